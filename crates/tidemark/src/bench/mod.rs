//! Benchmarks: ratios measured in one run on one machine. Each prints a table for people and writes JSON.

pub mod bare_copy;
pub mod minimal;
pub mod sync;
