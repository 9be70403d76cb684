//! Processes, heads, watermarks: what `status` shows.
