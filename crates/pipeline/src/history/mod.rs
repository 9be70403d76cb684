//! Bulk application of finalized history, segment by segment.
