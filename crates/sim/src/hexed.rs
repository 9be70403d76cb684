//! Hexadecimal text, written straight into response buffers. The simulator has its own, so that it cannot
//! share a mistake with the adapter that reads it.

use alloy_primitives::U256;

const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// Both digits of every byte value, looked up instead of computed: serving speed is part of a benchmark.
const PAIRS: [[u8; 2]; 256] = pairs();

const fn pairs() -> [[u8; 2]; 256] {
    let mut table = [[0_u8; 2]; 256];
    let mut value = 0_usize;
    while value < 256 {
        table[value] = [DIGITS[value >> 4], DIGITS[value & 15]];
        value += 1;
    }
    table
}

/// Appends the digits of `bytes` without a prefix.
pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    // One growth for all digits instead of a capacity check per byte.
    let start = out.len();
    out.resize(start + 2 * bytes.len(), 0);
    for (digits, byte) in out[start..].chunks_exact_mut(2).zip(bytes) {
        digits.copy_from_slice(&PAIRS[usize::from(*byte)]);
    }
}

/// Appends `"0x…"` with quotes.
pub(crate) fn put_data(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(b"\"0x");
    put_bytes(out, bytes);
    out.push(b'"');
}

/// Appends a JSON-RPC quantity with quotes: no leading zeros, zero is `0x0`.
pub(crate) fn put_number(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(b"\"0x");
    put_digits(out, value);
    out.push(b'"');
}

fn put_digits(out: &mut Vec<u8>, value: u64) {
    let bytes = value.to_be_bytes();
    let mut started = false;
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            started |= digit != 0;
            if started {
                out.push(DIGITS[usize::from(digit)]);
            }
        }
    }
    if !started {
        out.push(b'0');
    }
}

/// `0x…` of bytes as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    let mut out = b"0x".to_vec();
    put_bytes(&mut out, bytes);
    String::from_utf8(out).expect("hex digits are ASCII")
}

/// A quantity as text, for error messages.
pub(crate) fn number_text(value: u64) -> String {
    let mut out = b"0x".to_vec();
    put_digits(&mut out, value);
    String::from_utf8(out).expect("hex digits are ASCII")
}

/// Bytes of `0x…` text with an even number of digits.
pub(crate) fn parse_bytes(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_prefix("0x")?.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    digits.chunks(2).map(|pair| Some((nibble(pair[0])? << 4) | nibble(pair[1])?)).collect()
}

/// Exactly `N` bytes of `0x…` text.
pub(crate) fn parse_fixed<const N: usize>(text: &str) -> Option<[u8; N]> {
    parse_bytes(text)?.try_into().ok()
}

/// A JSON-RPC quantity.
pub(crate) fn parse_number(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x")?;
    if digits.is_empty() || digits.starts_with('+') {
        return None;
    }
    u64::from_str_radix(digits, 16).ok()
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

/// The 32 bytes of a word.
pub(crate) fn word(value: U256) -> [u8; 32] {
    value.to_be_bytes::<32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_no_leading_zeros_and_come_back() {
        for value in [0, 1, 15, 16, 255, 4096, u64::MAX] {
            assert_eq!(number_text(value), format!("{value:#x}"));
            assert_eq!(parse_number(&number_text(value)), Some(value));
        }
        assert_eq!(parse_number("0x"), None);
        assert_eq!(parse_number("12"), None);
    }

    #[test]
    fn bytes_come_back_and_bad_text_is_refused() {
        assert_eq!(text(&[0, 171, 255]), "0x00abff");
        assert_eq!(parse_bytes("0x00ABff"), Some(vec![0, 171, 255]));
        assert_eq!(parse_bytes("0x0"), None);
        assert_eq!(parse_bytes("0xzz"), None);
        assert_eq!(parse_fixed::<2>("0x0102"), Some([1, 2]));
        assert_eq!(parse_fixed::<2>("0x010203"), None);
    }
}
