//! What the API reads: projection.* and by-id raw.*.
