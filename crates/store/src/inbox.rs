//! system.inbox: one effect per (event, handler).
