//! The one tolerant parser of hex from nodes (pitfall D63): `0x` alone, odd lengths, leading zeros, upper
//! case, decimal text and plain numbers where a hex string belongs. Never panics.

use std::fmt;

use alloy_primitives::U256;
use bytes::Bytes;
use serde::de::{Deserialize, Deserializer, Error, Visitor};

const BAD: u8 = 0xff;
const NIBBLES: [u8; 256] = {
    let mut table = [BAD; 256];
    let mut digit: u8 = 0;
    while digit < 10 {
        table[index(b'0' + digit)] = digit;
        digit += 1;
    }
    let mut letter: u8 = 0;
    while letter < 6 {
        table[index(b'a' + letter)] = 10 + letter;
        table[index(b'A' + letter)] = 10 + letter;
        letter += 1;
    }
    table
};

#[expect(clippy::as_conversions, reason = "widening in a const, where From cannot be called")]
const fn index(byte: u8) -> usize {
    byte as usize
}

fn digits(text: &str) -> Option<&[u8]> {
    text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).map(str::as_bytes)
}

fn byte(high: u8, low: u8) -> Option<u8> {
    let (high, low) = (NIBBLES[usize::from(high)], NIBBLES[usize::from(low)]);
    // Bad nibbles have all bits set; good ones never reach 16.
    ((high | low) < 16).then_some(high << 4 | low)
}

/// A number up to 64 bits: hex with prefix, or decimal digits without.
pub fn quantity(text: &str) -> Option<u64> {
    match digits(text) {
        Some([]) => Some(0),
        Some(hex) => {
            let first = hex.iter().position(|digit| *digit != b'0').unwrap_or(hex.len());
            let hex = &hex[first..];
            if hex.len() > 16 {
                return None;
            }
            hex.iter().try_fold(0_u64, |number, digit| match NIBBLES[usize::from(*digit)] {
                BAD => None,
                nibble => Some(number << 4 | u64::from(nibble)),
            })
        }
        None if text.is_empty() || text.len() > 20 => None,
        None => text.bytes().all(|digit| digit.is_ascii_digit()).then(|| text.parse().ok())?,
    }
}

/// A number up to 256 bits: hex with prefix, or decimal digits without.
pub fn quantity256(text: &str) -> Option<U256> {
    match digits(text) {
        Some(_) => {
            let bytes = bytes(text)?;
            let first = bytes.iter().position(|byte| *byte != 0).unwrap_or(bytes.len());
            U256::try_from_be_slice(&bytes[first..])
        }
        None => tidemark_model::quantity::parse_decimal(text),
    }
}

/// Bytes of any length; an odd number of digits gets a zero in front.
pub fn bytes(text: &str) -> Option<Vec<u8>> {
    let hex = digits(text)?;
    let mut decoded = Vec::with_capacity(hex.len().div_ceil(2));
    let (odd, pairs) = hex.split_at(hex.len() % 2);
    if let [low] = odd {
        decoded.push(byte(b'0', *low)?);
    }
    for pair in pairs.chunks_exact(2) {
        decoded.push(byte(pair[0], pair[1])?);
    }
    Some(decoded)
}

/// Exactly `N` bytes; fewer digits are padded with zeros in front, more are refused.
pub fn fixed<const N: usize>(text: &str) -> Option<[u8; N]> {
    let hex = digits(text)?;
    let mut decoded = [0; N];
    if hex.len() == 2 * N {
        for (slot, pair) in decoded.iter_mut().zip(hex.chunks_exact(2)) {
            *slot = byte(pair[0], pair[1])?;
        }
        return Some(decoded);
    }
    if hex.is_empty() || hex.len() > 2 * N {
        return None;
    }
    let short = bytes(text)?;
    decoded[N - short.len()..].copy_from_slice(&short);
    Some(decoded)
}

/// A JSON quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quantity(pub u64);

/// JSON bytes of any length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Data(pub Bytes);

/// JSON bytes of one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fixed<const N: usize>(pub [u8; N]);

struct FromText<T> {
    wanted: &'static str,
    text: fn(&str) -> Option<T>,
    number: fn(u64) -> Option<T>,
}

impl<T> Visitor<'_> for FromText<T> {
    type Value = T;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.wanted)
    }
    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.text)(text).ok_or_else(|| E::custom(format_args!("expected {}", self.wanted)))
    }
    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        (self.number)(number).ok_or_else(|| E::custom(format_args!("expected {}", self.wanted)))
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FromText {
            wanted: "a hex quantity of at most 64 bits",
            text: |text| quantity(text).map(Self),
            number: |number| Some(Self(number)),
        })
    }
}
impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FromText {
            wanted: "hex bytes",
            text: |text| bytes(text).map(|bytes| Self(bytes.into())),
            number: |_| None,
        })
    }
}
impl<'de, const N: usize> Deserialize<'de> for Fixed<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FromText {
            wanted: "hex bytes of the right length",
            text: |text| fixed(text).map(Self),
            number: |_| None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quirks_are_understood() {
        for (text, expected) in [
            ("0x", Some(0)),
            ("0x0", Some(0)),
            ("0x0000000000000000000000ff", Some(255)),
            ("0XfF", Some(255)),
            ("0xfff", Some(4095)),
            ("255", Some(255)),
            ("", None),
            ("0xg", None),
            ("0x10000000000000000", None),
            ("18446744073709551616", None),
            ("-1", None),
            ("0x-1", None),
        ] {
            assert_eq!(quantity(text), expected, "{text}");
        }
        assert_eq!(bytes("0xabc"), Some(vec![0x0a, 0xbc]));
        assert_eq!(bytes("abc"), None);
        assert_eq!(fixed::<2>("0xf"), Some([0, 15]));
        assert_eq!(fixed::<2>("0xABCD"), Some([0xab, 0xcd]));
        assert_eq!(fixed::<2>("0x"), None);
        assert_eq!(fixed::<2>("0x0abcd"), None);
        let number: Quantity = serde_json::from_str("17").expect("a plain number");
        assert_eq!(number, Quantity(17));
        assert_eq!(quantity256("0x0100"), Some(U256::from(256)));
        assert_eq!(quantity256("256"), Some(U256::from(256)));
    }

    proptest! {
        #[test]
        fn every_number_comes_back(number: u64) {
            prop_assert_eq!(quantity(&format!("0x{number:x}")), Some(number));
            prop_assert_eq!(quantity(&format!("0X{number:020X}")), Some(number));
            prop_assert_eq!(quantity(&number.to_string()), Some(number));
            prop_assert_eq!(quantity256(&format!("0x{number:x}")), Some(U256::from(number)));
        }
        #[test]
        fn all_bytes_come_back(data: Vec<u8>) {
            prop_assert_eq!(bytes(&format!("0x{}", ::hex::encode(&data))), Some(data.clone()));
            prop_assert_eq!(bytes(&format!("0X{}", ::hex::encode_upper(&data))), Some(data));
        }
        #[test]
        fn no_text_makes_it_panic(text in ".*", tail in "[0-9a-fA-FxX]*") {
            for text in [text.clone(), tail.clone(), format!("0x{text}"), format!("0x{tail}")] {
                let _ = (quantity(&text), quantity256(&text), bytes(&text), fixed::<20>(&text));
            }
        }
    }
}
