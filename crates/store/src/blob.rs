//! Content-addressed object storage for payloads above the inline limit.
