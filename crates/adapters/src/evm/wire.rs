//! What nodes send, read leniently: unknown fields are skipped, hex is decoded while the JSON is read, and
//! what we do not use is never kept.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, SeqAccess, Visitor};

use super::hex::{Data, Fixed, Quantity};

/// One log of `eth_getLogs` or of a receipt.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Log {
    /// Who emitted it.
    pub address: Fixed<20>,
    /// Its topics.
    pub topics: Topics,
    /// Its data.
    #[serde(default)]
    pub data: Data,
    /// Block.
    pub block_number: Quantity,
    /// Block.
    pub block_hash: Fixed<32>,
    /// Transaction.
    pub transaction_hash: Fixed<32>,
    /// Transaction.
    pub transaction_index: Quantity,
    /// Position in the block.
    pub log_index: Quantity,
    /// Taken back by a reorg; some nodes return such logs.
    #[serde(default)]
    pub removed: Option<bool>,
}

/// Up to four topics, without an allocation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Topics {
    count: usize,
    words: [[u8; 32]; 4],
}

impl Topics {
    /// The topics.
    pub fn as_slice(&self) -> &[[u8; 32]] {
        &self.words[..self.count]
    }
}

impl<'de> Deserialize<'de> for Topics {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Seen;
        impl<'de> Visitor<'de> for Seen {
            type Value = Topics;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("at most four topics of 32 bytes")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Topics, A::Error> {
                let mut topics = Topics::default();
                while let Some(Fixed(word)) = seq.next_element::<Fixed<32>>()? {
                    *topics.words.get_mut(topics.count).ok_or_else(|| A::Error::custom("five topics"))? =
                        word;
                    topics.count += 1;
                }
                Ok(topics)
            }
        }
        deserializer.deserialize_seq(Seen)
    }
}

/// The header part of `eth_getBlockByNumber`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Header {
    /// Position.
    pub number: Quantity,
    /// Name.
    pub hash: Fixed<32>,
    /// Name of the parent.
    pub parent_hash: Fixed<32>,
    /// Unix seconds.
    pub timestamp: Quantity,
    /// Absent on some chains.
    #[serde(default, deserialize_with = "bloom")]
    pub logs_bloom: Option<Box<[u8; 256]>>,
    /// How many transactions; their content is skipped.
    #[serde(default)]
    pub transactions: Option<Count>,
}

/// A bloom of another length is no bloom.
fn bloom<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Box<[u8; 256]>>, D::Error> {
    let data = Option::<Data>::deserialize(deserializer)?;
    Ok(data.and_then(|Data(bytes)| Box::<[u8]>::from(&bytes[..]).try_into().ok()))
}

/// The length of an array whose elements nobody needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count(pub usize);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Counting;
        impl<'de> Visitor<'de> for Counting {
            type Value = Count;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Count, A::Error> {
                let mut count = 0;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Count(count))
            }
        }
        deserializer.deserialize_seq(Counting)
    }
}

/// The transactions of a block, by hash.
#[derive(Debug, Clone, Deserialize)]
pub struct TxHashes {
    /// As the node wrote them: they are only sent back to it.
    #[serde(default)]
    pub transactions: Vec<String>,
}

/// The part of a receipt we use.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Receipt {
    /// Transaction.
    pub transaction_hash: Fixed<32>,
    /// Transaction.
    pub transaction_index: Quantity,
    /// Block.
    pub block_hash: Fixed<32>,
    /// 1 for success; absent before Byzantium.
    #[serde(default, deserialize_with = "status")]
    pub status: Option<bool>,
    /// Gas, for the payload.
    #[serde(default)]
    pub gas_used: Option<Quantity>,
    /// All its logs.
    pub logs: Vec<Log>,
}

fn status<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Status {
        Plain(bool),
        Number(Quantity),
        Other(IgnoredAny),
    }
    Ok(match Option::<Status>::deserialize(deserializer)? {
        Some(Status::Plain(succeeded)) => Some(succeeded),
        Some(Status::Number(number)) => Some(number.0 == 1),
        Some(Status::Other(_)) | None => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_whatever_else_it_holds() {
        let text = r#"{"number":"0x10","hash":"0x01","parentHash":"0x02","timestamp":1,"logsBloom":"0x00",
            "transactions":["0x1",{"hash":"0x2"}],"l1BlockNumber":"0x3","uncles":[]}"#;
        let header: Header = serde_json::from_str(text).expect("reads");
        assert_eq!((header.number, header.transactions), (Quantity(16), Some(Count(2))));
        assert_eq!(header.logs_bloom, None);
    }

    #[test]
    fn five_topics_are_refused() {
        let five = format!("[{}]", ["\"0x01\""; 5].join(","));
        assert!(serde_json::from_str::<Topics>(&five).is_err());
        let two: Topics = serde_json::from_str(r#"["0x01","0x02"]"#).expect("reads");
        assert_eq!(two.as_slice().len(), 2);
    }

    #[test]
    fn a_status_comes_in_three_forms() {
        let receipt = |status: &str| {
            let text = format!(
                r#"{{"transactionHash":"0x1","transactionIndex":0,"blockHash":"0x1","logs":[]{status}}}"#
            );
            serde_json::from_str::<Receipt>(&text).expect("reads").status
        };
        assert_eq!(receipt(r#","status":"0x1""#), Some(true));
        assert_eq!(receipt(r#","status":false"#), Some(false));
        assert_eq!(receipt(r#","status":null"#), None);
        assert_eq!(receipt(""), None);
    }
}
