//! The header's bloom against the logs we got. A bloom may veto, it never proves presence: false positives
//! are normal, and some chains leave it empty or out (the check can be switched off per network).

use std::collections::HashMap;

use alloy_primitives::keccak256;

use super::wire::Log;

/// The three bits of one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key([(usize, u8); 3]);

impl Key {
    /// The bits of `value` (an address or a topic).
    pub fn of(value: &[u8]) -> Self {
        let hash = keccak256(value);
        let bit = |at: usize| {
            let bit = (usize::from(hash[at]) << 8 | usize::from(hash[at + 1])) & 2047;
            (255 - bit / 8, 1 << (bit % 8))
        };
        Self([bit(0), bit(2), bit(4)])
    }
    /// May `bloom` contain it?
    pub fn is_in(&self, bloom: &[u8; 256]) -> bool {
        self.0.iter().all(|(byte, mask)| bloom[*byte] & mask != 0)
    }
    fn put_into(&self, bloom: &mut [u8; 256]) {
        for (byte, mask) in self.0 {
            bloom[byte] |= mask;
        }
    }
}

/// Keys of addresses and topics seen before: a range repeats a few contracts a thousand times.
#[derive(Debug, Default)]
pub struct Keys {
    addresses: HashMap<[u8; 20], Key>,
    topics: HashMap<[u8; 32], Key>,
}

impl Keys {
    /// Does the bloom admit this log's address and first topic?
    pub fn admits(&mut self, bloom: &[u8; 256], log: &Log) -> bool {
        let address = self.addresses.entry(log.address.0).or_insert_with_key(|address| Key::of(address));
        if !address.is_in(bloom) {
            return false;
        }
        log.topics.as_slice().first().is_none_or(|topic| {
            self.topics.entry(*topic).or_insert_with_key(|topic| Key::of(topic)).is_in(bloom)
        })
    }
}

/// The bloom of all these logs, as the chain computes it. Equal to the header's bloom only if no log with a
/// value of its own is missing.
pub fn of_logs<'a>(logs: impl IntoIterator<Item = &'a Log>) -> [u8; 256] {
    let mut bloom = [0; 256];
    for log in logs {
        Key::of(&log.address.0).put_into(&mut bloom);
        for topic in log.topics.as_slice() {
            Key::of(topic).put_into(&mut bloom);
        }
    }
    bloom
}
