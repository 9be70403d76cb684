//! The truth: balances folded from the entries of canonical blocks, apart from the economy's own books, so
//! that each checks the other.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use alloy_primitives::U256;

use crate::block::Block;
use crate::book::{Book, Kind, ZERO};
use crate::hexed;

/// Contract, token id and account of one balance, as an indexer names them: lower-case hexadecimal
/// addresses, decimal ids.
pub type BalanceKey = (String, String, String);

/// Who owned what at a height.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Truth {
    /// The height, inclusive.
    pub height: u64,
    /// Hash of the block there, lower-case with prefix.
    pub block_hash: String,
    /// Balances by (contract, token id, account); zero rows are absent.
    pub balances: BTreeMap<BalanceKey, U256>,
}

/// Balances by indexes; cheap to extend block by block.
#[derive(Debug, Clone, Default)]
pub(crate) struct Balances {
    held: HashMap<(u32, U256, u32), U256>,
    /// Owner of every ERC-721 token.
    owners: HashMap<(u32, U256), u32>,
}

impl Balances {
    pub(crate) fn extend(&mut self, blocks: &[Arc<Block>]) {
        for entry in blocks.iter().flat_map(|block| &block.entries) {
            match entry.kind {
                Kind::Erc20 | Kind::Uri => {}
                Kind::Erc721 | Kind::Single => {
                    if entry.kind == Kind::Erc721 {
                        self.set_owner(entry.contract, entry.id, entry.to);
                    }
                    self.shift(entry.contract, entry.id, entry.from, entry.to, entry.qty);
                }
                Kind::Batch => {
                    for (id, qty) in entry.items.as_deref().unwrap_or_default() {
                        self.shift(entry.contract, *id, entry.from, entry.to, *qty);
                    }
                }
            }
        }
    }

    fn shift(&mut self, contract: u32, id: U256, from: u32, to: u32, qty: U256) {
        if qty.is_zero() {
            return;
        }
        if from != ZERO {
            let key = (contract, id, from);
            let held = self.held.get(&key).copied().unwrap_or_default();
            let left = held.checked_sub(qty).expect("the simulated economy never overdraws");
            if left.is_zero() {
                self.held.remove(&key);
            } else {
                self.held.insert(key, left);
            }
        }
        if to != ZERO {
            let held = self.held.entry((contract, id, to)).or_default();
            *held = held.checked_add(qty).expect("the simulated economy never overflows");
        }
    }

    fn set_owner(&mut self, contract: u32, id: U256, owner: u32) {
        if owner == ZERO {
            self.owners.remove(&(contract, id));
        } else {
            self.owners.insert((contract, id), owner);
        }
    }

    pub(crate) fn owner(&self, contract: u32, id: U256) -> Option<u32> {
        self.owners.get(&(contract, id)).copied()
    }

    pub(crate) fn of(&self, contract: u32, id: U256, account: u32) -> U256 {
        self.held.get(&(contract, id, account)).copied().unwrap_or_default()
    }

    /// Sum and owner questions of a whole contract; slow, and rarely asked.
    pub(crate) fn of_contract(&self, contract: u32) -> impl Iterator<Item = (U256, u32, U256)> + '_ {
        self.held.iter().filter(move |(key, _)| key.0 == contract).map(|(key, qty)| (key.1, key.2, *qty))
    }

    pub(crate) fn name(&self, book: &Book) -> BTreeMap<BalanceKey, U256> {
        self.held
            .iter()
            .map(|((contract, id, account), qty)| {
                let contract = hexed::text(&book.contract(*contract).address);
                ((contract, id.to_string(), hexed::text(book.account(*account))), *qty)
            })
            .collect()
    }
}
