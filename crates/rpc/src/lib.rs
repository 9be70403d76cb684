//! One resilient JSON-RPC client: endpoint pools, breaker, token buckets, batches, error dictionary.
