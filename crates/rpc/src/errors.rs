//! The dictionary of providers' error texts (reliability.md §3.2). Providers word the same limit in a dozen
//! ways, and a size error may contain the word "timeout", so the verdict comes from one ordered table with a
//! test per text. The text is written by a stranger: only its first [`TEXT_BYTES_MAX`] bytes are looked at,
//! and nothing here backtracks.

use std::time::Duration;

/// How much of an error text is looked at.
pub const TEXT_BYTES_MAX: usize = 512;

/// What an error means for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Class {
    /// The range has too many blocks: ask for fewer.
    RangeTooWide {
        /// First and last block the provider says would work.
        suggested: Option<(u64, u64)>,
        /// Most blocks per call, where the text says so.
        max_blocks: Option<u64>,
    },
    /// The range holds too many logs: ask for fewer blocks; another range may hold fewer logs.
    TooManyResults {
        /// First and last block the provider says would work.
        suggested: Option<(u64, u64)>,
        /// Most results per call, where the text says so.
        max_results: Option<u64>,
    },
    /// The answer has too many bytes.
    ResponseTooLarge,
    /// Too many requests: wait, keep the range.
    Throttled {
        /// How long the provider asks us to wait.
        retry_after: Option<Duration>,
    },
    /// The node has not reached that block yet.
    Lagging,
    /// The node does not keep that history.
    Pruned,
    /// The node does not know the method.
    UnknownMethod,
    /// The contract call itself failed; asking elsewhere gives the same.
    Reverted,
    /// Anything else: ask another endpoint.
    Other,
}

impl Class {
    /// Would a smaller range help?
    pub fn is_size(&self) -> bool {
        matches!(self, Self::RangeTooWide { .. } | Self::TooManyResults { .. } | Self::ResponseTooLarge)
    }
    /// The label used in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::RangeTooWide { .. } => "range_too_wide",
            Self::TooManyResults { .. } => "too_many_results",
            Self::ResponseTooLarge => "response_too_large",
            Self::Throttled { .. } => "throttled",
            Self::Lagging => "lagging",
            Self::Pruned => "pruned",
            Self::UnknownMethod => "unknown_method",
            Self::Reverted => "reverted",
            Self::Other => "other",
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Meaning {
    Range,
    Results,
    Bytes,
    Throttle,
    Lagging,
    Pruned,
    Method,
    Reverted,
}

struct Entry {
    /// Lower case; the first entry whose fragment occurs wins.
    fragment: &'static str,
    meaning: Meaning,
    /// The limit is the first number after this text; empty when the text carries none.
    number_after: &'static str,
}

const fn entry(fragment: &'static str, meaning: Meaning, number_after: &'static str) -> Entry {
    Entry { fragment, meaning, number_after }
}

/// Ordered: the special before the general, size before throttle (Alchemy's size error says "timeout",
/// others say "limit exceeded" for blocks).
const TABLE: &[Entry] = &[
    // Size, by number of results.
    entry("this block range should work", Meaning::Results, ""), // Alchemy
    entry("query returned more than", Meaning::Results, "more than"), // Infura, zkSync, thirdweb
    entry("query exceeds max results", Meaning::Results, "max results"), // Ankr, LlamaRPC
    entry("logs matched by query exceeds limit of", Meaning::Results, "limit of"), // Arbitrum
    // Size, by number of blocks.
    entry("consider reducing your block range", Meaning::Range, ""), // Alchemy, with "timeout" inside
    entry("block range should be at most", Meaning::Range, "at most"),
    entry("maximum allowed number of requested blocks", Meaning::Range, "requested blocks"), // Infura
    entry("exceeds the range allowed for your plan", Meaning::Range, ">"),                   // QuickNode
    entry("blocks distance", Meaning::Range, "distance"),                                    // Ankr
    entry("requested too many blocks", Meaning::Range, "maximum is set to"),                 // Avalanche
    entry("please limit the query to at most", Meaning::Range, "at most"),                   // Coinbase
    entry("query exceeds max block range", Meaning::Range, "max block range"),               // Hyperliquid
    entry("block range limit exceeded", Meaning::Range, ""),                                 // Chainstack
    entry("block range is too wide", Meaning::Range, "maximum"), // Ankr, Moonriver
    entry("block range is too large", Meaning::Range, "maximum"), // Optimism, Base
    entry("maximum block range", Meaning::Range, "maximum block range"), // PublicNode
    entry("block range exceeds", Meaning::Range, "exceeds"),     // Somnia
    entry("query must be smaller than size", Meaning::Range, "size"), // Harmony
    entry("max range", Meaning::Range, "max range"),             // Cloudflare
    // Plain words of throttling, before the vague words of size below: "limited to 10 requests per second".
    entry("rate limit", Meaning::Throttle, ""),
    entry("request rate", Meaning::Throttle, ""),
    entry("requests per second", Meaning::Throttle, ""),
    entry("requests/second", Meaning::Throttle, ""),
    entry("too many requests", Meaning::Throttle, ""),
    entry("compute units", Meaning::Throttle, ""),
    entry("up to a ", Meaning::Range, "up to a"), // Alchemy's free tier, Aurora
    entry("limited to ", Meaning::Range, "limited to"), // QuickNode, 1RPC, Blast, BlockPI
    entry("max is ", Meaning::Range, "max is"),   // Merkle
    entry("no backend is currently healthy", Meaning::Range, ""), // Optimism: overload and size alike; less is kinder
    // Size, by bytes.
    entry("response size should not greater than", Meaning::Bytes, ""), // 1RPC
    entry("backend response too large", Meaning::Bytes, ""),            // Optimism
    entry("response size exceeded", Meaning::Bytes, ""),
    entry("response too large", Meaning::Bytes, ""),
    entry("response is too big", Meaning::Bytes, ""),
    // The contract's own failure.
    entry("execution reverted", Meaning::Reverted, ""),
    entry("vm execution error", Meaning::Reverted, ""),
    // History the node does not keep.
    entry("missing trie node", Meaning::Pruned, ""),
    entry("pruned", Meaning::Pruned, ""),
    entry("historical state", Meaning::Pruned, ""),
    entry("state is not available", Meaning::Pruned, ""),
    entry("state not available", Meaning::Pruned, ""),
    entry("archive", Meaning::Pruned, ""),
    entry("history is not available", Meaning::Pruned, ""),
    entry("no state available", Meaning::Pruned, ""),
    // The node is behind.
    entry("invalid block range", Meaning::Lagging, ""),
    entry("beyond current head", Meaning::Lagging, ""),
    entry("beyond the head", Meaning::Lagging, ""),
    entry("after last accepted block", Meaning::Lagging, ""),
    entry("header not found", Meaning::Lagging, ""),
    entry("header for hash not found", Meaning::Lagging, ""),
    entry("block not found", Meaning::Lagging, ""),
    entry("unknown block", Meaning::Lagging, ""),
    entry("future block", Meaning::Lagging, ""),
    // The node does not speak it.
    entry("method not found", Meaning::Method, ""),
    entry("method not supported", Meaning::Method, ""),
    entry("unsupported method", Meaning::Method, ""),
    entry("does not exist/is not available", Meaning::Method, ""),
    entry("method is not available", Meaning::Method, ""),
    entry("method is not whitelisted", Meaning::Method, ""),
    // Throttling.
    entry("ratelimit", Meaning::Throttle, ""),
    entry("request limit", Meaning::Throttle, ""),
    entry("limit exceeded", Meaning::Throttle, ""),
    entry("quota", Meaning::Throttle, ""),
    entry("try again later", Meaning::Throttle, ""),
];

/// What a node's error means. `http_status` is 200 for an error inside a well-formed answer.
pub fn classify(http_status: u16, code: Option<i64>, text: &str, retry_after: Option<Duration>) -> Class {
    let text = bounded(text).to_ascii_lowercase();
    if http_status == 429 {
        return Class::Throttled { retry_after };
    }
    if let Some(found) = TABLE.iter().find(|entry| text.contains(entry.fragment)) {
        let number = || number_after(&text, found.number_after);
        return match found.meaning {
            Meaning::Range => Class::RangeTooWide { suggested: suggested_range(&text), max_blocks: number() },
            Meaning::Results => {
                Class::TooManyResults { suggested: suggested_range(&text), max_results: number() }
            }
            Meaning::Bytes => Class::ResponseTooLarge,
            Meaning::Throttle => Class::Throttled { retry_after },
            Meaning::Lagging => Class::Lagging,
            Meaning::Pruned => Class::Pruned,
            Meaning::Method => Class::UnknownMethod,
            Meaning::Reverted => Class::Reverted,
        };
    }
    match (http_status, code) {
        (413, _) => Class::ResponseTooLarge,
        (503, _) if retry_after.is_some() => Class::Throttled { retry_after },
        (_, Some(-32601)) => Class::UnknownMethod,
        (_, Some(-32005 | -32016)) => Class::Throttled { retry_after },
        (_, Some(3)) => Class::Reverted,
        (_, Some(4444)) => Class::Pruned, // EIP-4444 history expiry
        _ => Class::Other,
    }
}

/// The first [`TEXT_BYTES_MAX`] bytes, cut at a character.
pub fn bounded(text: &str) -> &str {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// `[0x10, 0x20]` anywhere in the text.
fn suggested_range(text: &str) -> Option<(u64, u64)> {
    let (_, rest) = text.split_once("[0x")?;
    let (inside, _) = rest.split_once(']')?;
    let (first, last) = inside.split_once(',')?;
    let last = last.trim();
    let first = u64::from_str_radix(first.trim(), 16).ok()?;
    let last = u64::from_str_radix(last.strip_prefix("0x").unwrap_or(last), 16).ok()?;
    (first <= last).then_some((first, last))
}

/// The first number after `marker`: thousands may be grouped by commas, dots or underscores, `k` multiplies.
/// Zero is no limit anybody can work with and counts as no number.
fn number_after(text: &str, marker: &str) -> Option<u64> {
    if marker.is_empty() {
        return None;
    }
    let (_, rest) = text.split_once(marker)?;
    let start = rest.find(|symbol: char| symbol.is_ascii_digit())?;
    let rest = rest.as_bytes().get(start..)?;
    let mut number: u64 = 0;
    let mut at = 0;
    while let Some(symbol) = rest.get(at) {
        match symbol {
            digit @ b'0'..=b'9' => {
                number = number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
            }
            b',' | b'.' | b'_' if is_group(rest.get(at + 1..)) => {}
            b'k' => {
                number = number.checked_mul(1000)?;
                break;
            }
            _ => break,
        }
        at += 1;
    }
    (number > 0).then_some(number)
}

/// Exactly three digits follow: what came before is a thousands separator, not the end of a sentence.
fn is_group(rest: Option<&[u8]>) -> bool {
    let Some([a, b, c, after @ ..]) = rest else { return false };
    [a, b, c].iter().all(|digit| digit.is_ascii_digit()) && !after.first().is_some_and(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn range(text: &str, max_blocks: Option<u64>) {
        assert_eq!(
            classify(200, Some(-32000), text, None),
            Class::RangeTooWide { suggested: None, max_blocks },
            "{text}"
        );
    }

    #[track_caller]
    fn results(text: &str, suggested: Option<(u64, u64)>, max_results: Option<u64>) {
        assert_eq!(
            classify(200, Some(-32005), text, None),
            Class::TooManyResults { suggested, max_results },
            "{text}"
        );
    }

    #[track_caller]
    fn check(status: u16, code: Option<i64>, text: &str, expected: Class) {
        assert_eq!(classify(status, code, text, None), expected, "{text}");
    }

    #[test]
    fn too_many_results_name_the_range_that_works() {
        results(
            "Log response size exceeded. Based on your parameters and the response size limit, this block range should work: [0x10, 0x1f]",
            Some((16, 31)),
            None,
        );
        results(
            "query returned more than 10000 results. Try with this block range [0xA1B2C3, 0xA1B2FF].",
            Some((0xa1_b2c3, 0xa1_b2ff)),
            Some(10_000),
        );
        results("query exceeds max results 20000, retry with the range 1-2", None, Some(20_000));
        results("logs matched by query exceeds limit of 10000", None, Some(10_000));
        results(
            "query returned more than 10000 results. Try with this block range [0x20, 0x10].",
            None,
            Some(10_000),
        );
    }

    #[test]
    fn too_wide_ranges_carry_their_limit() {
        range("Query timeout exceeded. Consider reducing your block range.", None);
        range(
            "Under the Free tier plan, you can make eth_getLogs requests with up to a 10 block range.",
            Some(10),
        );
        range("Maximum allowed number of requested blocks is 3500", Some(3_500));
        range("eth_getLogs is limited to a 10,000 range", Some(10_000));
        range("block range exceeds the range allowed for your plan (20001 > 5000)", Some(5_000));
        range("block range is too wide", None);
        range("maximum [from, to] blocks distance: 2000", Some(2_000));
        range("Max range: 800", Some(800));
        range("requested too many blocks from 1 to 5000, maximum is set to 2048", Some(2_048));
        range("Block range is too large", None);
        range("no backend is currently healthy to serve traffic", None);
        range("eth_getLogs is limited to 1024 block range", Some(1_024));
        range("exceed maximum block range: 50000", Some(50_000));
        range("please limit the query to at most 1000 blocks", Some(1_000));
        range("Block range limit exceeded.", None);
        range("query exceeds max block range 100000", Some(100_000));
        range("up to a 1.000 block range", Some(1_000));
        range("block range exceeds 1000", Some(1_000));
        range("block range too big, max is 10k blocks", Some(10_000));
        range("query must be smaller than size 1024", Some(1_024));
        range("block range is too wide (maximum 1024)", Some(1_024));
    }

    #[test]
    fn answers_too_large_are_not_ranges() {
        check(200, None, "response size should not greater than 10000000 bytes", Class::ResponseTooLarge);
        check(200, Some(-32020), "backend response too large", Class::ResponseTooLarge);
        check(413, None, "Payload", Class::ResponseTooLarge);
    }

    #[test]
    fn throttling_is_not_size() {
        let throttled = Class::Throttled { retry_after: None };
        check(200, Some(-32005), "daily request count exceeded, request rate limited", throttled.clone());
        check(200, Some(-32005), "something new", throttled.clone());
        check(
            200,
            Some(-32000),
            "Your app has exceeded its compute units per second capacity",
            throttled.clone(),
        );
        check(429, None, "block range is too wide", throttled.clone());
        check(200, Some(-32000), "your plan is limited to 10 requests per second", throttled.clone());
        check(200, Some(-32000), "rate limited to 25/s, up to a burst of 50", throttled.clone());
        check(200, Some(-32000), "Too Many Requests", throttled);
        let wait = Some(Duration::from_secs(3));
        assert_eq!(classify(503, None, "busy", wait), Class::Throttled { retry_after: wait });
    }

    #[test]
    fn the_rest_is_told_apart() {
        check(200, Some(-32601), "nope", Class::UnknownMethod);
        check(200, Some(-32000), "the method eth_x does not exist/is not available", Class::UnknownMethod);
        check(200, Some(-32000), "invalid block range params", Class::Lagging);
        check(200, Some(-32000), "block range extends beyond current head block", Class::Lagging);
        check(200, Some(-32000), "missing trie node 00ff (path ) state 0x1 is not available", Class::Pruned);
        check(200, Some(4444), "gone", Class::Pruned);
        check(200, Some(3), "execution reverted: ERC721: invalid token ID", Class::Reverted);
        check(500, None, "<html>oops</html>", Class::Other);
        check(200, Some(-32602), "invalid argument 0", Class::Other);
    }

    #[test]
    fn only_the_first_bytes_are_looked_at() {
        let late = format!("{}rate limit", "x".repeat(TEXT_BYTES_MAX));
        check(200, None, &late, Class::Other);
        let cut = "ä".repeat(TEXT_BYTES_MAX);
        assert_eq!(bounded(&cut).len(), TEXT_BYTES_MAX);
        assert_eq!(bounded(&format!("x{cut}")).len(), TEXT_BYTES_MAX - 1);
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".*", code in proptest::option::of(proptest::num::i64::ANY)) {
            let _ = classify(200, code, &text, None);
            let _ = classify(200, code, &format!("limited to {text}"), None);
            let _ = classify(200, code, &format!("query returned more than [0x{text}"), None);
        }
    }
}
