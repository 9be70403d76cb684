//! REST /v1, live stream and explorer pages over projection.*.
