//! Which partition a key belongs to. The same function on every engine (pitfall B30): FNV-1a 32 bit
//! modulo n, which equals NATS' `{{partition(n, …)}}`.

/// Partitions per stream unless configured otherwise (S2 §15). Part of a stream's identity: changing it
/// moves every key.
pub const PARTITIONS_DEFAULT: u16 = 12;

/// FNV-1a, 32 bit.
pub fn fnv1a(key: &[u8]) -> u32 {
    key.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// The partition of `key` among `partitions` (at least one).
pub fn partition_of(key: &str, partitions: u16) -> u16 {
    let partitions = u32::from(partitions.max(1));
    u16::try_from(fnv1a(key.as_bytes()) % partitions).expect("a remainder of a u16 is a u16")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Golden values of the reference algorithm: a key that changes its partition loses its order.
    #[test]
    fn hash_values_are_golden() {
        assert_eq!(fnv1a(b""), 0x811c_9dc5);
        assert_eq!(fnv1a(b"a"), 0xe40c_292c);
        assert_eq!(fnv1a(b"foobar"), 0xbf9c_f968);
        assert_eq!(partition_of("foobar", 12), 4);
        assert_eq!(partition_of("anything", 0), 0);
    }
}
