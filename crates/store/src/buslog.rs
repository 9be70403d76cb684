//! Numbering, positions, leases of the backbone.
