//! ledger.applied_events: claims.
