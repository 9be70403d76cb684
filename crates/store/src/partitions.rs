//! The partition manager of height-partitioned tables.
