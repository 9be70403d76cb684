//! Token amounts. A quantity is a uint256; a delta is signed. Arithmetic is checked: an overflow is an
//! answer (`None`), never a wrapped number.

use std::fmt;
use std::str::FromStr;

use alloy_primitives::U256;
use serde::{Deserialize, Serialize};

/// A signed uint256: what an account gains (positive) or loses (negative). Zero is never negative.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SignedQty {
    negative: bool,
    magnitude: U256,
}

impl SignedQty {
    /// Nothing gained, nothing lost.
    pub const ZERO: Self = Self { negative: false, magnitude: U256::ZERO };

    /// `+magnitude`.
    pub fn gain(magnitude: U256) -> Self {
        Self { negative: false, magnitude }
    }
    /// `-magnitude`.
    pub fn loss(magnitude: U256) -> Self {
        Self { negative: !magnitude.is_zero(), magnitude }
    }
    /// Is it below zero?
    pub fn is_negative(self) -> bool {
        self.negative
    }
    /// Is it zero?
    pub fn is_zero(self) -> bool {
        self.magnitude.is_zero()
    }
    /// The amount without its sign.
    pub fn magnitude(self) -> U256 {
        self.magnitude
    }
    /// The same amount the other way.
    #[must_use]
    pub fn negated(self) -> Self {
        if self.negative { Self::gain(self.magnitude) } else { Self::loss(self.magnitude) }
    }
    /// Sum, or `None` when the magnitude leaves uint256.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        if self.negative == other.negative {
            let magnitude = self.magnitude.checked_add(other.magnitude)?;
            return Some(Self { negative: self.negative, magnitude });
        }
        let (larger, smaller) = if self.magnitude >= other.magnitude { (self, other) } else { (other, self) };
        let magnitude = larger.magnitude - smaller.magnitude;
        Some(Self { negative: larger.negative && !magnitude.is_zero(), magnitude })
    }
}

impl PartialOrd for SignedQty {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for SignedQty {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        match (self.negative, other.negative) {
            (false, true) => std::cmp::Ordering::Greater,
            (true, false) => std::cmp::Ordering::Less,
            (false, false) => self.magnitude.cmp(&other.magnitude),
            (true, true) => other.magnitude.cmp(&self.magnitude),
        }
    }
}
impl fmt::Display for SignedQty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.negative {
            f.write_str("-")?;
        }
        self.magnitude.fmt(f)
    }
}
impl fmt::Debug for SignedQty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is not a whole decimal number within uint256.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a whole number of at most 256 bits")]
pub struct NotAQuantity(pub String);

impl FromStr for SignedQty {
    type Err = NotAQuantity;
    fn from_str(text: &str) -> Result<Self, NotAQuantity> {
        let (negative, digits) = match text.strip_prefix('-') {
            Some(digits) => (true, digits),
            None => (false, text),
        };
        let magnitude = parse_decimal(digits).ok_or_else(|| NotAQuantity(text.chars().take(90).collect()))?;
        Ok(if negative { Self::loss(magnitude) } else { Self::gain(magnitude) })
    }
}

/// A decimal uint256, digits only. `None` for anything else.
pub fn parse_decimal(digits: &str) -> Option<U256> {
    if digits.is_empty() || digits.len() > 78 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    U256::from_str_radix(digits, 10).ok()
}

impl Serialize for SignedQty {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
impl<'de> Deserialize<'de> for SignedQty {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_qty() -> impl Strategy<Value = SignedQty> {
        (any::<[u8; 32]>(), any::<bool>(), 0_usize..=31).prop_map(|(mut bytes, negative, zeros)| {
            bytes[..zeros].fill(0);
            let magnitude = U256::from_be_bytes(bytes);
            if negative { SignedQty::loss(magnitude) } else { SignedQty::gain(magnitude) }
        })
    }

    proptest! {
        #[test]
        fn text_round_trips(qty in any_qty()) {
            prop_assert_eq!(qty.to_string().parse::<SignedQty>(), Ok(qty));
        }
        #[test]
        fn adding_the_negated_gives_zero(qty in any_qty()) {
            prop_assert_eq!(qty.checked_add(qty.negated()), Some(SignedQty::ZERO));
        }
        #[test]
        fn addition_commutes(a in any_qty(), b in any_qty()) {
            prop_assert_eq!(a.checked_add(b), b.checked_add(a));
        }
        #[test]
        fn order_agrees_with_subtraction(a in any_qty(), b in any_qty()) {
            if let Some(difference) = a.checked_add(b.negated()) {
                prop_assert_eq!(a < b, difference.is_negative());
            }
        }
    }

    #[test]
    fn the_edge_of_uint256_overflows_into_none() {
        let max = SignedQty::gain(U256::MAX);
        assert_eq!(max.checked_add(SignedQty::gain(U256::from(1))), None);
        assert_eq!(max.checked_add(SignedQty::loss(U256::MAX)), Some(SignedQty::ZERO));
        assert!("1e3".parse::<SignedQty>().is_err());
        assert!("".parse::<SignedQty>().is_err());
        assert!("-".parse::<SignedQty>().is_err());
        assert_eq!("-0".parse::<SignedQty>(), Ok(SignedQty::ZERO));
    }
}
