//! Chain adapters: fetch and parse, nothing else.
