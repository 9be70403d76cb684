//! Names from chains are hostile (pitfalls G81-G88). Two doors: [`storable`] makes text that Postgres
//! takes without losing the fact that something was wrong; [`shown`] makes text that is safe to show.

use unicode_normalization::UnicodeNormalization;

/// Text fit for a `text` or `jsonb` column, and whether something had to be replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Storable {
    /// Valid UTF-8 without NUL.
    pub text: String,
    /// True when the source had NUL or bytes that are not UTF-8.
    pub altered: bool,
}

/// Makes bytes storable: NUL and invalid UTF-8 become U+FFFD.
pub fn storable(bytes: &[u8]) -> Storable {
    let text = String::from_utf8_lossy(bytes);
    let clean = text.replace('\0', "\u{fffd}");
    Storable { altered: clean.as_bytes() != bytes, text: clean }
}

/// Longest name shown, in characters.
const SHOWN_CHARS_MAX: usize = 120;

/// Text that is safe and readable on a page: NFC, without control, bidirectional, zero-width and
/// private-use characters, combining marks limited, length bounded. Escaping is the template's job.
pub fn shown(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(480));
    let mut marks = 0;
    let mut chars = 0;
    for character in text.nfc() {
        if unshowable(character) {
            continue;
        }
        if unicode_normalization::char::is_combining_mark(character) {
            marks += 1;
            if marks > 2 {
                continue; // Two marks cover every living script in NFC; more is decoration.
            }
        } else {
            marks = 0;
        }
        if chars == SHOWN_CHARS_MAX {
            out.push('…');
            break;
        }
        out.push(character);
        chars += 1;
    }
    out.trim().to_owned()
}

fn unshowable(character: char) -> bool {
    character.is_control()
        || matches!(u32::from(character),
            0x00ad | 0x061c | 0x180e | 0x200b..=0x200f | 0x2028..=0x202e | 0x2060..=0x206f
            | 0xe000..=0xf8ff | 0xfe00..=0xfe0f | 0xfeff | 0xfff0..=0xfffb | 0xe0000..=0xe0fff | 0xf0000..=0x0010_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storable_replaces_and_says_so() {
        assert_eq!(storable(b"plain"), Storable { text: "plain".into(), altered: false });
        assert_eq!(storable(b"a\0b"), Storable { text: "a\u{fffd}b".into(), altered: true });
        assert!(storable(&[0xff, 0xfe]).altered);
    }

    #[test]
    fn shown_strips_what_deceives() {
        assert_eq!(shown("USD\u{200b}T"), "USDT");
        assert_eq!(shown("evil\u{202e}gpj.exe"), "evilgpj.exe");
        assert_eq!(shown("line\nbreak\u{1b}[31m"), "linebreak[31m");
        assert_eq!(shown(&"x".repeat(500)).chars().count(), SHOWN_CHARS_MAX + 1);
        assert_eq!(shown("e\u{301}"), "é");
        assert_eq!(shown("Z\u{300}\u{301}\u{302}\u{303}\u{304}").chars().count(), 3);
    }
}
