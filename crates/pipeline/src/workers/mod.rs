//! The ledger's workers: normalizer, state-updater, reorg-handler. A file each.
