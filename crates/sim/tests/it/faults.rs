//! Every fault is visible to a client, and a perfect node shows none of them.
