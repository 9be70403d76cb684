//! From the adapter to raw.*: history by leased ranges, the tip by one loop, reorgs by one swap.
