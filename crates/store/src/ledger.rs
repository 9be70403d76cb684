//! ledger.normalized_*: keys, events, deltas.
