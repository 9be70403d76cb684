//! Limits of `eth_getLogs` and the words in which providers refuse what exceeds them.

use serde::Deserialize;

use crate::faults::{Dice, RpcError};
use crate::hexed::number_text;

/// In whose words a provider refuses a range or an answer that is too big.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LimitStyle {
    /// With a range that works.
    #[default]
    Alchemy,
    /// The free tier, with a range that works.
    AlchemyFree,
    /// Says timeout, means size.
    AlchemyTimeout,
    /// With a range to try.
    Infura,
    /// zkSync and thirdweb.
    ZkSync,
    /// With a comma in the number.
    QuickNode,
    /// 1RPC.
    OneRpc,
    /// Blast.
    Blast,
    /// Ankr.
    Ankr,
    /// LlamaRPC.
    Llama,
    /// Cloudflare.
    Cloudflare,
    /// Avalanche.
    Avalanche,
    /// Optimism and Base.
    Optimism,
    /// Optimism's overload words, which also mean size.
    OptimismUnhealthy,
    /// Arbitrum.
    Arbitrum,
    /// BlockPI.
    BlockPi,
    /// PublicNode.
    PublicNode,
    /// Coinbase.
    Coinbase,
    /// Chainstack, without a number.
    Chainstack,
    /// Hyperliquid.
    Hyperliquid,
    /// Aurora.
    Aurora,
    /// Somnia.
    Somnia,
    /// Merkle, with a k.
    Merkle,
    /// Harmony.
    Harmony,
    /// Moonriver.
    Moonriver,
    /// HTTP 413 without a JSON-RPC body of its own.
    PayloadTooLarge,
    /// Another of the above each time.
    Rotating,
}

impl LimitStyle {
    /// Every fixed style.
    pub const ALL: [Self; 26] = [
        Self::Alchemy,
        Self::AlchemyFree,
        Self::AlchemyTimeout,
        Self::Infura,
        Self::ZkSync,
        Self::QuickNode,
        Self::OneRpc,
        Self::Blast,
        Self::Ankr,
        Self::Llama,
        Self::Cloudflare,
        Self::Avalanche,
        Self::Optimism,
        Self::OptimismUnhealthy,
        Self::Arbitrum,
        Self::BlockPi,
        Self::PublicNode,
        Self::Coinbase,
        Self::Chainstack,
        Self::Hyperliquid,
        Self::Aurora,
        Self::Somnia,
        Self::Merkle,
        Self::Harmony,
        Self::Moonriver,
        Self::PayloadTooLarge,
    ];
}

/// Which limit was exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    Blocks,
    Results,
    Bytes,
}

/// A refused range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refusal {
    pub(crate) limit: Limit,
    pub(crate) allowed: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Last height of a range from `from` that would be answered.
    pub(crate) works_to: u64,
}

impl Refusal {
    /// The refusal in the words of `style`. Where a provider knows no words for a kind of limit, it uses
    /// those it has: readers must cope with that too.
    pub(crate) fn in_words(&self, style: LimitStyle, dice: &Dice) -> RpcError {
        let Self { limit, allowed, from, to, works_to } = *self;
        let works = format!("[{}, {}]", number_text(from), number_text(works_to));
        let blocks = (to - from).saturating_add(1);
        let fitting = works_to - from + 1;
        let (code, message) = match style {
            LimitStyle::Rotating => {
                let at = usize::try_from(dice.draw() % 26).unwrap_or_default();
                return self.in_words(LimitStyle::ALL[at], dice);
            }
            LimitStyle::Alchemy => (
                -32602,
                format!(
                    "Log response size exceeded. Based on your parameters and the response size limit, this block range should work: {works}"
                ),
            ),
            LimitStyle::AlchemyFree => (
                -32600,
                format!(
                    "Under the Free tier plan, you can make eth_getLogs requests with up to a {} block range. Based on your parameters, this block range should work: {works}. Upgrade to PAYG for expanded block range.",
                    fitting
                ),
            ),
            LimitStyle::AlchemyTimeout => {
                (-32000, "Query timeout exceeded. Consider reducing your block range.".to_owned())
            }
            LimitStyle::Infura => (
                -32005,
                format!("query returned more than {allowed} results. Try with this block range {works}."),
            ),
            LimitStyle::ZkSync => {
                (-32602, format!("Maximum allowed number of requested blocks is {}", fitting))
            }
            LimitStyle::QuickNode => {
                (-32614, format!("eth_getLogs is limited to a {} range", with_commas(fitting)))
            }
            LimitStyle::OneRpc => (
                -32000,
                format!("block range exceeds the range allowed for your plan ({blocks} > {})", fitting),
            ),
            LimitStyle::Blast => (-32000, format!("response size should not greater than {allowed} bytes")),
            LimitStyle::Ankr => (-32600, "block range is too wide".to_owned()),
            LimitStyle::Llama => match limit {
                Limit::Blocks => (-32000, format!("maximum [from, to] blocks distance: {}", works_to - from)),
                _ => (
                    -32602,
                    format!("query exceeds max results {allowed}, retry with the range {from}-{works_to}"),
                ),
            },
            LimitStyle::Cloudflare => (
                -32047,
                format!(
                    "Invalid eth_getLogs request. 'fromBlock'-'toBlock' range too large. Max range: {}",
                    fitting
                ),
            ),
            LimitStyle::Avalanche => (
                -32000,
                format!("requested too many blocks from {from} to {to}, maximum is set to {}", fitting),
            ),
            LimitStyle::Optimism => match limit {
                Limit::Blocks => (-32000, "Block range is too large".to_owned()),
                _ => (-32020, "backend response too large".to_owned()),
            },
            LimitStyle::OptimismUnhealthy => {
                let message = "no backend is currently healthy to serve traffic";
                return RpcError::new(-32011, message).with_status(503);
            }
            LimitStyle::Arbitrum => (-32000, format!("logs matched by query exceeds limit of {allowed}")),
            LimitStyle::BlockPi => {
                (-32000, format!("eth_getLogs is limited to {} block range", with_commas(fitting)))
            }
            LimitStyle::PublicNode => (-32701, format!("exceed maximum block range: {}", fitting)),
            LimitStyle::Coinbase => (-32602, format!("please limit the query to at most {} blocks", fitting)),
            LimitStyle::Chainstack => (-32602, "Block range limit exceeded.".to_owned()),
            LimitStyle::Hyperliquid => (-32602, format!("query exceeds max block range {}", fitting)),
            LimitStyle::Aurora => {
                (-32600, format!("you can make requests with up to a {} block range", fitting))
            }
            LimitStyle::Somnia => (-32000, format!("block range exceeds {}", fitting)),
            LimitStyle::Merkle => {
                let text = if fitting.is_multiple_of(1_000) {
                    format!("{}k", fitting / 1_000)
                } else {
                    fitting.to_string()
                };
                (-32600, format!("block range too large, max is {text} blocks"))
            }
            LimitStyle::Harmony => (-32000, format!("query must be smaller than size {}", fitting)),
            LimitStyle::Moonriver => (-32603, format!("block range is too wide (maximum {})", fitting)),
            LimitStyle::PayloadTooLarge => {
                return RpcError::new(-32000, "Request Entity Too Large").with_status(413);
            }
        };
        let status = match style {
            LimitStyle::Alchemy | LimitStyle::AlchemyFree | LimitStyle::Cloudflare => 400,
            LimitStyle::QuickNode => 413,
            _ => 200,
        };
        RpcError::new(code, message).with_status(status)
    }
}

fn with_commas(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_style_has_its_own_words() {
        let dice = Dice::new(1);
        let refusal =
            Refusal { limit: Limit::Blocks, allowed: 10_000, from: 1, to: 20_000, works_to: 10_000 };
        let texts: std::collections::BTreeSet<String> =
            LimitStyle::ALL.iter().map(|style| refusal.in_words(*style, &dice).message).collect();
        assert_eq!(texts.len(), LimitStyle::ALL.len());
        assert!(texts.contains("eth_getLogs is limited to a 10,000 range"));
        assert!(texts.iter().any(|text| text.contains("this block range should work: [0x1, 0x2710]")));
    }
}
