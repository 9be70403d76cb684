//! app.indexing_errors with dedupe and truncation (S1 §7.1).
