//! The Tidemark binary.
fn main() {}
