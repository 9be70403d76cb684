//! Opaque page cursors: base64url of version, place and a checksum that covers the list they belong to. A
//! cursor of another list, another filter or another byte is refused; it never becomes SQL and never an error
//! of ours.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::problem::Problem;

const VERSION: u8 = 1;
const CHECK_BYTES: usize = 8;
/// Longest cursor taken; a place on twenty networks fits.
const CURSOR_CHARS_MAX: usize = 4096;

/// Makes a cursor for the list named by `binding` (route, filters, sort).
pub(crate) fn encode<T: Serialize>(binding: &str, place: &T) -> String {
    let mut bytes = vec![VERSION];
    serde_json::to_writer(&mut bytes, place).expect("a place is plain data");
    let check = checksum(binding, &bytes);
    bytes.extend(check);
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Reads a cursor of the list named by `binding`.
pub(crate) fn decode<T: DeserializeOwned>(binding: &str, text: &str) -> Result<T, Problem> {
    let refuse = |why: &str| {
        Problem::bad(
            "invalid_cursor",
            format!("the cursor {why}"),
            "Use `next` of the previous page as it is, with the same route, filters and sort; or start without a cursor.",
        )
    };
    if text.len() > CURSOR_CHARS_MAX {
        return Err(refuse("is too long"));
    }
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| refuse("is not base64url"))?;
    let Some(split) = bytes.len().checked_sub(CHECK_BYTES).filter(|split| *split > 1) else {
        return Err(refuse("is too short"));
    };
    let (body, check) = bytes.split_at(split);
    if checksum(binding, body) != check {
        return Err(refuse("was changed, or belongs to another list"));
    }
    if body[0] != VERSION {
        return Err(refuse("is of another version"));
    }
    serde_json::from_slice(&body[1..]).map_err(|_| refuse("holds no place"))
}

fn checksum(binding: &str, body: &[u8]) -> [u8; CHECK_BYTES] {
    let mut hash = Sha256::new();
    hash.update(b"tidemark cursor\0");
    hash.update(binding.as_bytes());
    hash.update(b"\0");
    hash.update(body);
    let mut check = [0; CHECK_BYTES];
    check.copy_from_slice(&hash.finalize()[..CHECK_BYTES]);
    check
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_comes_back_as_it_went() {
        let text = encode("list|a=1", &(7_i64, "x".to_owned()));
        assert_eq!(decode::<(i64, String)>("list|a=1", &text).expect("our own"), (7, "x".to_owned()));
    }

    #[test]
    fn every_changed_byte_is_refused() {
        let text = encode("list", &(123_456_i64, 9_i32));
        for at in 0..text.len() {
            for with in [b'A', b'z', b'_', b'=', b'0'] {
                let mut bytes = text.clone().into_bytes();
                if bytes[at] == with {
                    continue;
                }
                bytes[at] = with;
                let changed = String::from_utf8(bytes).expect("ascii");
                let problem = decode::<(i64, i32)>("list", &changed).expect_err("changed");
                assert_eq!(problem.code, "invalid_cursor");
            }
        }
    }

    #[test]
    fn a_cursor_of_another_list_is_refused() {
        let text = encode("list|kind=mint", &(1_i64, 1_i32));
        assert!(decode::<(i64, i32)>("list|kind=burn", &text).is_err());
        for text in ["", "AA", "%%%", &"A".repeat(5000)] {
            assert!(decode::<(i64, i32)>("list", text).is_err(), "{text}");
        }
    }
}
