//! The suite every adapter passes.
