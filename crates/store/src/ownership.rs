//! ledger.ownership_*: balances and their history.
