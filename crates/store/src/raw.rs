//! raw.*: blocks, transactions, events, lookups, evidence, orphans.
