//! system.sync_cursors and system.network_heads: positions and what the chain reports.
