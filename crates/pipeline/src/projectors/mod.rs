//! Read models, rebuilt by key from the ledger.
