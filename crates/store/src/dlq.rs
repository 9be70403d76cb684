//! system.dlq and parked keys.
