//! The 2048-bit logs bloom of the yellow paper: three 11-bit positions out of the first six bytes of the
//! keccak hash of each address and topic, counted from the end of the 256 bytes.

use alloy_primitives::keccak256;

/// The three positions of one value.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bits([u16; 3]);

impl Bits {
    pub(crate) fn of(value: &[u8]) -> Self {
        let hash = keccak256(value);
        let position = |at: usize| u16::from_be_bytes([hash[at], hash[at + 1]]) & 2047;
        Self([position(0), position(2), position(4)])
    }
}

/// A block's bloom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bloom(pub(crate) Box<[u8; 256]>);

impl Default for Bloom {
    fn default() -> Self {
        Self(Box::new([0; 256]))
    }
}

impl Bloom {
    pub(crate) fn add(&mut self, bits: Bits) {
        for position in bits.0 {
            self.0[255 - usize::from(position / 8)] |= 1 << (position % 8);
        }
    }

    /// Whether an address (20 bytes) or topic (32 bytes) may be in the block; `false` is certain.
    pub fn may_contain(&self, value: &[u8]) -> bool {
        Bits::of(value)
            .0
            .iter()
            .all(|position| self.0[255 - usize::from(position / 8)] & (1 << (position % 8)) != 0)
    }

    /// The 256 bytes as a node writes them.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0[..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bits_are_where_another_implementation_puts_them() {
        let mut ours = Bloom::default();
        let mut theirs = alloy_primitives::Bloom::ZERO;
        for value in 0_u8..40 {
            let bytes = vec![value; if value % 2 == 0 { 20 } else { 32 }];
            ours.add(Bits::of(&bytes));
            theirs.accrue(alloy_primitives::BloomInput::Raw(&bytes));
        }
        assert_eq!(ours.as_bytes(), theirs.as_slice());
    }

    #[test]
    fn what_was_added_may_be_contained_and_others_are_not() {
        let mut bloom = Bloom::default();
        assert!(!bloom.may_contain(&[7; 20]));
        bloom.add(Bits::of(&[7; 20]));
        assert!(bloom.may_contain(&[7; 20]));
        assert!(!bloom.may_contain(&[8; 20]));
        assert!(bloom.as_bytes().iter().map(|byte| byte.count_ones()).sum::<u32>() <= 3);
    }
}
