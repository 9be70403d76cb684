//! The address book of a chain: accounts and contracts, fixed by the seed, with everything about them that
//! is asked for a million times (bloom positions, topics) computed once.

use std::collections::HashMap;
use std::sync::OnceLock;

use alloy_primitives::{U256, keccak256};

use crate::bloom::Bits;
use crate::config::SimConfig;
use crate::rng::{Rng, mix};

/// Index of the zero address in the account list: the other side of every mint and burn.
pub(crate) const ZERO: u32 = 0;
/// Accounts that act as operators of other people's tokens.
const MARKETS: u32 = 3;

/// What a log says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Erc721,
    Single,
    Batch,
    Uri,
    Erc20,
}

impl Kind {
    pub(crate) const ALL: [Self; 5] = [Self::Erc721, Self::Single, Self::Batch, Self::Uri, Self::Erc20];

    pub(crate) fn at(self) -> usize {
        match self {
            Self::Erc721 => 0,
            Self::Single => 1,
            Self::Batch => 2,
            Self::Uri => 3,
            Self::Erc20 => 4,
        }
    }

    fn signature(self) -> &'static str {
        match self {
            Self::Erc721 | Self::Erc20 => "Transfer(address,address,uint256)",
            Self::Single => "TransferSingle(address,address,address,uint256,uint256)",
            Self::Batch => "TransferBatch(address,address,address,uint256[],uint256[])",
            Self::Uri => "URI(string,uint256)",
        }
    }
}

/// The token standard of a contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standard {
    Erc721,
    Erc1155,
    Erc20,
}

/// One contract.
#[derive(Debug)]
pub(crate) struct Contract {
    pub(crate) address: [u8; 20],
    pub(crate) standard: Standard,
    pub(crate) bits: Bits,
    pub(crate) name: String,
    pub(crate) symbol: String,
    pub(crate) spam: bool,
    /// Position among the contracts of its standard: chooses the habits of its ids.
    ordinal: u32,
    salt: u64,
}

impl Contract {
    /// The id of the `index`-th token minted here. Four habits: from 0, from 1, down from 2^256−1, scattered.
    pub(crate) fn token_id(&self, index: u64) -> U256 {
        match self.ordinal % 4 {
            0 => U256::from(index),
            1 => U256::from(index + 1),
            2 => U256::MAX - U256::from(index),
            _ => {
                let base = mix(self.salt ^ index);
                U256::from_limbs([base, mix(base ^ 1), mix(base ^ 2), mix(base ^ 3)])
            }
        }
    }

    /// The id of a token class of an ERC-1155 contract.
    pub(crate) fn class_id(&self, class: u32) -> U256 {
        match self.ordinal % 3 {
            0 => U256::from(class),
            1 => (U256::from(class + 1) << 128) | U256::from(1),
            _ => U256::MAX - U256::from(class),
        }
    }

    /// The largest amount of a class minted at once.
    pub(crate) fn class_amount_max(class: u32) -> U256 {
        match class % 7 {
            0 => U256::from(1) << 200,
            1 | 4 => U256::from(10_u64.pow(18)),
            _ => U256::from(50),
        }
    }
}

/// Accounts and contracts.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) chain_id: u64,
    pub(crate) accounts: Vec<[u8; 20]>,
    /// Filled when first asked: a big chain never uses all of its accounts.
    account_bits: Vec<OnceLock<Bits>>,
    pub(crate) contracts: Vec<Contract>,
    contract_of: HashMap<[u8; 20], u32>,
    account_of: HashMap<[u8; 20], u32>,
    pub(crate) topic0: [[u8; 32]; 5],
    topic0_bits: [Bits; 5],
    holders: u32,
}

impl Book {
    pub(crate) fn new(config: &SimConfig) -> Self {
        let mut rng = Rng::keyed(&[config.seed, config.chain_id, 0xacc0]);
        let holders = config.accounts.max(2);
        let mut accounts = vec![[0_u8; 20]];
        accounts.extend((0..holders + MARKETS).map(|_| rng.bytes::<20>()));
        let account_bits = accounts.iter().map(|_| OnceLock::new()).collect();
        let account_of = (0_u32..).zip(&accounts).map(|(index, address)| (*address, index)).collect();
        let mut contracts = Vec::new();
        let groups = [
            (Standard::Erc721, config.collections_721),
            (Standard::Erc1155, config.collections_1155),
            (Standard::Erc20, config.contracts_20),
        ];
        for (standard, count) in groups {
            contracts.extend((0..count).map(|ordinal| contract(&mut rng, standard, ordinal)));
        }
        let contract_of = (0_u32..).zip(&contracts).map(|(index, one)| (one.address, index)).collect();
        let topic0 = Kind::ALL.map(|kind| keccak256(kind.signature()).0);
        let topic0_bits = topic0.map(|topic| Bits::of(&topic));
        Self {
            chain_id: config.chain_id,
            accounts,
            account_bits,
            contracts,
            contract_of,
            account_of,
            topic0,
            topic0_bits,
            holders,
        }
    }

    pub(crate) fn account(&self, index: u32) -> &[u8; 20] {
        &self.accounts[at(index)]
    }

    pub(crate) fn account_bits(&self, index: u32) -> Bits {
        *self.account_bits[at(index)].get_or_init(|| Bits::of(&topic_of(self.account(index))))
    }

    pub(crate) fn topic0_bits(&self, kind: Kind) -> Bits {
        self.topic0_bits[kind.at()]
    }

    pub(crate) fn contract(&self, index: u32) -> &Contract {
        &self.contracts[at(index)]
    }

    pub(crate) fn find_contract(&self, address: &[u8; 20]) -> Option<u32> {
        self.contract_of.get(address).copied()
    }

    pub(crate) fn find_account(&self, address: &[u8; 20]) -> Option<u32> {
        self.account_of.get(address).copied()
    }

    /// Somebody: a whale in three of ten cases.
    pub(crate) fn somebody(&self, rng: &mut Rng) -> u32 {
        let whales = self.holders / 100 + 1;
        1 + if rng.percent(30) { rng.below32(whales) } else { rng.below32(self.holders) }
    }

    /// A marketplace account.
    pub(crate) fn market(&self, rng: &mut Rng) -> u32 {
        1 + self.holders + rng.below32(MARKETS)
    }
}

/// An address as a 32-byte topic.
pub(crate) fn topic_of(address: &[u8; 20]) -> [u8; 32] {
    let mut topic = [0; 32];
    topic[12..].copy_from_slice(address);
    topic
}

/// A list position of an index.
pub(crate) fn at(index: u32) -> usize {
    usize::try_from(index).expect("this program runs on 32 bits or more")
}

fn contract(rng: &mut Rng, standard: Standard, ordinal: u32) -> Contract {
    const FIRST: [&str; 8] = ["Sleepy", "Cosmic", "Paper", "Tidal", "Grumpy", "Neon", "Quiet", "Golden"];
    const SECOND: [&str; 8] =
        ["Otters", "Lanterns", "Pilots", "Moths", "Harbours", "Robots", "Teapots", "Foxes"];
    let address = rng.bytes::<20>();
    let spam = standard == Standard::Erc721 && ordinal == 1;
    let name = match standard {
        Standard::Erc20 => format!("Sim Coin {ordinal}"),
        _ if spam => "FREE CLAIM at claim-rewards.example".to_owned(),
        _ => format!("{} {} {ordinal}", FIRST[rng.index(FIRST.len())], SECOND[rng.index(SECOND.len())]),
    };
    let symbol = match standard {
        Standard::Erc721 => format!("SIM{ordinal}"),
        Standard::Erc1155 => format!("MULTI{ordinal}"),
        Standard::Erc20 => format!("COIN{ordinal}"),
    };
    let bits = Bits::of(&address);
    Contract { address, standard, bits, name, symbol, spam, ordinal, salt: rng.next() }
}
