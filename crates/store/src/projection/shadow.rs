//! Building a projection beside the live one.
