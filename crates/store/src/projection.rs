//! projection.*: what the projectors write.
