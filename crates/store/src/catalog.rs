//! catalog.* and ledger.accounts: stubs on first reference.
