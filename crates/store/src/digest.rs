//! ledger.digests: the order-independent hash, kept incrementally.
