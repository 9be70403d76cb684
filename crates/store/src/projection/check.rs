//! Reconciliation of a sample.
