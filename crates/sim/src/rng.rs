//! Seeded randomness (splitmix64). Written here, and not taken from a crate, because the same seed must
//! give the same chain for ever, also after a dependency changed its algorithm.

use alloy_primitives::U256;

/// A small deterministic generator.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

/// One step of splitmix64 as a plain function.
pub(crate) fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Rng {
    /// A generator for one purpose: every part of the key changes the whole sequence.
    pub(crate) fn keyed(key: &[u64]) -> Self {
        Self(key.iter().fold(0x7469_6465, |state, part| mix(state ^ mix(*part))))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform in `0..bound`; 0 for a bound of 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next()) * u128::from(bound);
        u64::try_from(wide >> 64).expect("a product of two u64 shifted by 64 fits u64")
    }

    pub(crate) fn below32(&mut self, bound: u32) -> u32 {
        u32::try_from(self.below(u64::from(bound))).expect("below a u32 bound")
    }

    pub(crate) fn index(&mut self, len: usize) -> usize {
        let bound = u64::try_from(len).expect("lengths fit u64");
        usize::try_from(self.below(bound)).expect("below a usize bound")
    }

    pub(crate) fn percent(&mut self, percent: u8) -> bool {
        self.below(100) < u64::from(percent)
    }

    pub(crate) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0_u8; N];
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_be_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        bytes
    }

    /// Uniform enough in `1..=max`; `max` must not be zero.
    pub(crate) fn amount(&mut self, max: U256) -> U256 {
        U256::from_be_bytes(self.bytes::<32>()) % max + U256::from(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_key_gives_the_same_sequence_for_ever() {
        let mut rng = Rng::keyed(&[1, 2, 3]);
        let first = [rng.next(), rng.next()];
        let mut again = Rng::keyed(&[1, 2, 3]);
        assert_eq!(first, [again.next(), again.next()]);
        assert_ne!(Rng::keyed(&[1, 2, 4]).next(), first[0]);
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf, "the published first value of splitmix64");
    }

    #[test]
    fn amounts_stay_between_one_and_the_maximum() {
        let mut rng = Rng::keyed(&[5]);
        for max in [1_u64, 2, 1_000] {
            let amount = rng.amount(U256::from(max));
            assert!(amount >= U256::from(1) && amount <= U256::from(max));
        }
        assert_eq!(rng.below(0), 0);
    }
}
