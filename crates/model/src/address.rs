//! Canonical addresses per chain family (S0 §3). Canonical once, in the adapter; compared byte for byte
//! ever after. Nothing here lowercases base58 or guesses.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};

/// Text that is not an address of its family.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {wanted}")]
pub struct NotAnAddress {
    /// What was given, bounded in length.
    pub text: String,
    /// What was wanted, in words.
    pub wanted: &'static str,
}

fn refuse(text: &str, wanted: &'static str) -> NotAnAddress {
    NotAnAddress { text: text.chars().take(80).collect(), wanted }
}

/// EVM: `0x` and 40 lowercase hex digits. Mixed case must carry a right EIP-55 checksum.
pub fn evm(text: &str) -> Result<String, NotAnAddress> {
    let digits = text
        .strip_prefix("0x")
        .or_else(|| text.strip_prefix("0X"))
        .filter(|digits| digits.len() == 40 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .ok_or_else(|| refuse(text, "an EVM address (0x and 40 hex digits)"))?;
    let lower = digits.to_ascii_lowercase();
    let mixed = digits != lower && digits != digits.to_ascii_uppercase();
    if mixed && checksummed(&lower) != digits {
        return Err(refuse(text, "an EVM address with a right EIP-55 checksum"));
    }
    Ok(format!("0x{lower}"))
}

/// EVM from the chain's 20 bytes.
pub fn evm_bytes(bytes: &[u8; 20]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(42);
    text.push_str("0x");
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

/// The EIP-55 form for display. `None` unless `canonical` is a canonical EVM address.
pub fn evm_display(canonical: &str) -> Option<String> {
    let digits = canonical.strip_prefix("0x").filter(|digits| digits.len() == 40)?;
    digits
        .bytes()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        .then(|| format!("0x{}", checksummed(digits)))
}

fn checksummed(lower: &str) -> String {
    let hash = alloy_primitives::keccak256(lower.as_bytes());
    lower
        .bytes()
        .enumerate()
        .map(|(index, digit)| {
            let nibble = (hash[index / 2] >> (if index % 2 == 0 { 4 } else { 0 })) & 15;
            char::from(if nibble >= 8 { digit.to_ascii_uppercase() } else { digit })
        })
        .collect()
}

/// Solana: base58 of exactly 32 bytes, case kept.
pub fn solana(text: &str) -> Result<String, NotAnAddress> {
    let wanted = "a Solana address (base58 of 32 bytes)";
    if text.len() > 44 {
        return Err(refuse(text, wanted));
    }
    match bs58::decode(text).into_vec() {
        Ok(bytes) if bytes.len() == 32 => Ok(text.to_owned()),
        _ => Err(refuse(text, wanted)),
    }
}

/// TON: the raw form `workchain:64 hex digits`, from the raw form or from any friendly form (its CRC is
/// checked; bounce and test flags are dropped because they are not part of the address).
pub fn ton(text: &str) -> Result<String, NotAnAddress> {
    let wanted = "a TON address (raw workchain:hex, or a friendly form with a right checksum)";
    if let Some((workchain, digits)) = text.split_once(':') {
        let workchain: i32 = workchain.parse().map_err(|_| refuse(text, wanted))?;
        if digits.len() != 64 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(refuse(text, wanted));
        }
        return Ok(format!("{workchain}:{}", digits.to_ascii_lowercase()));
    }
    if text.len() != 48 {
        return Err(refuse(text, wanted));
    }
    let bytes = URL_SAFE.decode(text).or_else(|_| STANDARD.decode(text)).map_err(|_| refuse(text, wanted))?;
    let (body, crc) = bytes.split_at_checked(34).ok_or_else(|| refuse(text, wanted))?;
    if crc16_xmodem(body).to_be_bytes() != *crc || !matches!(body[0] & 0x7f, 0x11 | 0x51) {
        return Err(refuse(text, wanted));
    }
    let workchain = i8::from_be_bytes([body[1]]);
    Ok(format!("{workchain}:{}", hex::encode(&body[2..])))
}

fn crc16_xmodem(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    })
}

/// Off-chain: a marketplace's own account name. Trimmed, never case-changed, without control characters,
/// at most 256 bytes; the marketplace's id keeps names of different places apart.
pub fn offchain(marketplace: &str, name: &str) -> Result<String, NotAnAddress> {
    let name = name.trim();
    if marketplace.is_empty() || name.is_empty() || name.len() > 256 || name.chars().any(char::is_control) {
        return Err(refuse(name, "an account name of at most 256 bytes without control characters"));
    }
    Ok(format!("{marketplace}:{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// EIP-55's own vectors.
    #[test]
    fn evm_vectors() {
        for text in [
            "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
            "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
            "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB",
            "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
        ] {
            let canonical = evm(text).expect("a vector");
            assert_eq!(canonical, text.to_lowercase());
            assert_eq!(evm_display(&canonical).as_deref(), Some(text));
            assert_eq!(evm(&text.to_uppercase().replace('X', "x")).as_deref(), Ok(canonical.as_str()));
        }
    }

    #[test]
    fn evm_refuses_a_wrong_checksum_and_wrong_shapes() {
        assert!(evm("0xd1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb").is_err());
        for text in [
            "",
            "0x",
            "5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
            "0x5aaeb6053f3e94c9b9a09f33669435e7ef1beae",
        ] {
            assert!(evm(text).is_err(), "{text}");
        }
    }

    /// chains.md: Solana vectors.
    #[test]
    fn solana_is_untouched() {
        for text in [
            "11111111111111111111111111111111",
            "TokenkegQfeZyiNwAJbNbGKPFXCWuBvf9Ss623VQ5DA",
            "As1cySAyfeesM4MBrYZhs46DFMfnHH3ySU32C2xfSgPv",
            "5MtT8THrJYLNbxgbpPZUjZchMdmvMTkCT8VR8TQzorMk",
        ] {
            assert_eq!(solana(text).as_deref(), Ok(text));
        }
        for text in ["0OIl", "1111", "TokenkegQfeZyiNwAJbNbGKPFXCWuBvf9Ss623VQ5D0"] {
            assert!(solana(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_friendly_form_of_ton_gives_one_raw_form(hash in any::<[u8; 32]>(), masterchain in any::<bool>()) {
            let workchain: i8 = if masterchain { -1 } else { 0 };
            let raw = format!("{workchain}:{}", hex::encode(hash));
            for tag in [0x11_u8, 0x51, 0x91, 0xd1] {
                let mut body = vec![tag, workchain.to_be_bytes()[0]];
                body.extend(hash);
                body.extend(crc16_xmodem(&body).to_be_bytes());
                let friendly_url = URL_SAFE.encode(&body);
                let friendly = STANDARD.encode(&body);
                prop_assert_eq!(ton(&friendly_url), Ok(raw.clone()));
                prop_assert_eq!(ton(&friendly), Ok(raw.clone()));
                body[35] ^= 1;
                prop_assert!(ton(&URL_SAFE.encode(&body)).is_err());
            }
            prop_assert_eq!(ton(&raw.to_uppercase()), Ok(raw.clone()));
        }
        #[test]
        fn no_text_panics(text in ".{0,80}") {
            let _ = (evm(&text), solana(&text), ton(&text), offchain("m", &text));
        }
    }
}
