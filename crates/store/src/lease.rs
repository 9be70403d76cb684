//! app.worker_leases and app.indexing_checkpoints (S1 §6.1-6.2).
