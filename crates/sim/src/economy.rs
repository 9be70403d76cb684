//! Who owns what while the chain grows, and what happens next. Valid by construction: only what somebody
//! owns is moved. Every entry can be taken back, so a reorg undoes blocks and builds others on top.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use alloy_primitives::U256;

use crate::book::{Book, Contract, Kind, Standard, ZERO, at};
use crate::config::SimConfig;
use crate::rng::Rng;

/// One log in its compact form (about 100 bytes). Addresses are indexes into the [`Book`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    /// Position of its transaction in the block.
    pub(crate) tx: u32,
    pub(crate) contract: u32,
    pub(crate) operator: u32,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) id: U256,
    pub(crate) qty: U256,
    /// Ids and amounts of a `TransferBatch`.
    pub(crate) items: Option<Box<[(U256, U256)]>>,
}

/// What one transaction will do, before it has a hash and a place.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) sender: u32,
    pub(crate) entries: Vec<Entry>,
}

#[derive(Debug, Default)]
struct Unique {
    tokens: Vec<(U256, u32)>,
    place: HashMap<U256, usize>,
    minted: u64,
}

#[derive(Debug, Default)]
struct Multi {
    holdings: Vec<(U256, u32, U256)>,
    place: HashMap<(U256, u32), usize>,
}

/// What a transaction is about; its logs share it.
enum Theme {
    Mixed,
    /// One buyer takes many tokens.
    Sweep(u32),
    /// One account mints several of one collection.
    Drop {
        contract: u32,
        to: u32,
    },
}

enum Act {
    Mint,
    Burn,
    Move,
}

/// The living state.
#[derive(Debug)]
pub(crate) struct Economy {
    book: Arc<Book>,
    config: SimConfig,
    unique: Vec<Unique>,
    multi: Vec<Multi>,
    /// Tokens that transactions waiting for re-inclusion will mint: nobody else may take these ids.
    reserved: HashSet<(u32, U256)>,
}

impl Economy {
    pub(crate) fn new(config: &SimConfig, book: Arc<Book>) -> Self {
        let unique = (0..config.collections_721).map(|_| Unique::default()).collect();
        let multi = (0..config.collections_1155).map(|_| Multi::default()).collect();
        Self { book, config: config.clone(), unique, multi, reserved: HashSet::new() }
    }

    /// Keeps the ids that `waiting` entries will mint.
    pub(crate) fn reserve<'a>(&mut self, waiting: impl Iterator<Item = &'a Entry>) {
        self.reserved = waiting
            .filter(|entry| entry.kind == Kind::Erc721 && entry.from == ZERO)
            .map(|entry| (entry.contract, entry.id))
            .collect();
    }

    /// Plans and applies transactions with `logs` logs in all.
    pub(crate) fn busy(&mut self, rng: &mut Rng, logs: u32) -> Vec<Plan> {
        let mut plans = Vec::new();
        let mut left = logs;
        while left > 0 {
            let wanted = match rng.below(10) {
                0..=5 => 1,
                6..=8 => 2 + rng.below32(3),
                _ => 5 + rng.below32(8),
            };
            let Some(plan) = self.transaction(rng, wanted.min(left)) else { break };
            left -= u32::try_from(plan.entries.len()).expect("a transaction has few logs");
            plans.push(plan);
        }
        plans
    }

    /// Plans and applies one transaction with exactly `logs` logs; `None` on a chain without contracts.
    pub(crate) fn transaction(&mut self, rng: &mut Rng, logs: u32) -> Option<Plan> {
        let sender = self.book.somebody(rng);
        let theme = match rng.below(4) {
            0 if logs > 1 => Theme::Sweep(sender),
            1 if logs > 1 && self.config.collections_721 > 0 => {
                Theme::Drop { contract: skewed(rng, self.config.collections_721), to: sender }
            }
            _ => Theme::Mixed,
        };
        let mut entries = Vec::with_capacity(at(logs));
        for _ in 0..logs {
            let entry = self.next_entry(rng, &theme)?;
            self.apply(&entry);
            entries.push(entry);
        }
        Some(Plan { sender, entries })
    }

    /// Plans and applies transactions that touch nothing another transaction may need: ERC-721 mints and
    /// ERC-20 noise.
    pub(crate) fn harmless(&mut self, rng: &mut Rng, transactions: u32) -> Vec<Plan> {
        (0..transactions)
            .filter_map(|_| {
                let sender = self.book.somebody(rng);
                let entry = if self.config.collections_721 > 0 && rng.percent(70) {
                    let contract = skewed(rng, self.config.collections_721);
                    self.mint_unique(contract, sender)
                } else {
                    self.noise(rng)?
                };
                self.apply(&entry);
                Some(Plan { sender, entries: vec![entry] })
            })
            .collect()
    }

    /// ERC-20 transfers only.
    pub(crate) fn noise_only(&mut self, rng: &mut Rng, transactions: u32) -> Vec<Plan> {
        (0..transactions)
            .filter_map(|_| Some(Plan { sender: self.book.somebody(rng), entries: vec![self.noise(rng)?] }))
            .collect()
    }

    fn next_entry(&mut self, rng: &mut Rng, theme: &Theme) -> Option<Entry> {
        let (count_721, count_1155) = (self.config.collections_721, self.config.collections_1155);
        if count_721 + count_1155 == 0 {
            return self.noise(rng);
        }
        // One roll decides noise and batches, so that both have their configured share of all logs.
        let noise = u64::from(self.config.erc20_noise_percent);
        let batch = noise + u64::from(self.config.batch_percent);
        match rng.below(100) {
            roll if roll < noise && self.config.contracts_20 > 0 => return self.noise(rng),
            roll if (noise..batch).contains(&roll) && count_1155 > 0 => return Some(self.batch(rng)),
            _ => {}
        }
        if let Theme::Drop { contract, to } = theme {
            return Some(self.mint_unique(*contract, *to));
        }
        let act = match rng.below(100) {
            roll if roll < u64::from(self.config.mint_percent) => Act::Mint,
            roll if roll < u64::from(self.config.mint_percent) + u64::from(self.config.burn_percent) => {
                Act::Burn
            }
            _ => Act::Move,
        };
        let receiver = match theme {
            Theme::Sweep(buyer) => *buyer,
            _ => self.book.somebody(rng),
        };
        if rng.below32(count_721 + count_1155) < count_721 {
            Some(self.unique_entry(rng, act, receiver))
        } else {
            Some(self.single(rng, act, receiver))
        }
    }

    fn unique_entry(&mut self, rng: &mut Rng, act: Act, receiver: u32) -> Entry {
        let count = self.config.collections_721;
        let contract = if matches!(act, Act::Mint) && count > 1 && rng.percent(self.config.spam_percent) {
            1
        } else {
            skewed(rng, count)
        };
        let tokens = &self.unique[at(contract)].tokens;
        if matches!(act, Act::Mint) || tokens.is_empty() {
            return self.mint_unique(contract, receiver);
        }
        let (id, owner) = tokens[rng.index(tokens.len())];
        let to = match act {
            Act::Burn => ZERO,
            _ if rng.percent(2) => owner, // Self transfers happen, and count for nothing.
            _ => receiver,
        };
        entry(Kind::Erc721, contract, [owner, owner, to], id, U256::from(1))
    }

    fn mint_unique(&self, contract: u32, to: u32) -> Entry {
        let unique = &self.unique[at(contract)];
        let mut index = unique.minted;
        let mut id = self.book.contract(contract).token_id(index);
        while unique.place.contains_key(&id) || self.reserved.contains(&(contract, id)) {
            index += 1;
            id = self.book.contract(contract).token_id(index);
        }
        entry(Kind::Erc721, contract, [to, ZERO, to], id, U256::from(1))
    }

    fn single(&mut self, rng: &mut Rng, act: Act, receiver: u32) -> Entry {
        let (contract, slot) = self.some_multi(rng);
        if rng.percent(2) {
            let id = self.book.contract(contract).class_id(self.some_class(rng));
            return entry(Kind::Uri, contract, [ZERO, ZERO, ZERO], id, U256::ZERO);
        }
        let holdings = &self.multi[slot].holdings;
        if matches!(act, Act::Mint) || holdings.is_empty() {
            let (id, qty) = self.fresh_amount(rng, contract);
            return entry(Kind::Single, contract, [receiver, ZERO, receiver], id, qty);
        }
        let (id, owner, held) = holdings[rng.index(holdings.len())];
        let qty = match rng.below(20) {
            0 => U256::ZERO, // Moving nothing is legal and must change nothing.
            1..=6 => held,
            _ => rng.amount(held),
        };
        let to = match act {
            Act::Burn => ZERO,
            _ if rng.percent(2) => owner,
            _ => receiver,
        };
        let operator = if rng.percent(40) { self.book.market(rng) } else { owner };
        entry(Kind::Single, contract, [operator, owner, to], id, qty)
    }

    fn batch(&mut self, rng: &mut Rng) -> Entry {
        let (contract, slot) = self.some_multi(rng);
        let receiver = self.book.somebody(rng);
        let wanted = 2 + rng.index(6);
        let multi = &self.multi[slot];
        let mut items = Vec::with_capacity(wanted + 1);
        let mut owner = ZERO;
        if !multi.holdings.is_empty() && rng.percent(60) {
            owner = multi.holdings[rng.index(multi.holdings.len())].1;
            let start = self.some_class(rng);
            for step in 0..self.config.class_tokens_per_1155.max(1) {
                let class = (start + step) % self.config.class_tokens_per_1155.max(1);
                let id = self.book.contract(contract).class_id(class);
                if let Some(place) = multi.place.get(&(id, owner)) {
                    items.push((id, rng.amount(multi.holdings[*place].2)));
                }
                if items.len() == wanted {
                    break;
                }
            }
            // The same id may stand twice in one batch: the parts add up.
            if rng.percent(25) && items[0].1 > U256::from(1) {
                let part = rng.amount(items[0].1 - U256::from(1));
                items[0].1 -= part;
                items.push((items[0].0, part));
            }
        } else {
            items.extend((0..wanted).map(|_| self.fresh_amount(rng, contract)));
        }
        let to = if owner != ZERO && rng.percent(self.config.burn_percent) { ZERO } else { receiver };
        let operator = if owner == ZERO { receiver } else { owner };
        let mut batch = entry(Kind::Batch, contract, [operator, owner, to], U256::ZERO, U256::ZERO);
        batch.items = Some(items.into_boxed_slice());
        batch
    }

    fn noise(&self, rng: &mut Rng) -> Option<Entry> {
        if self.config.contracts_20 == 0 {
            return None;
        }
        let first = self.config.collections_721 + self.config.collections_1155;
        let contract = first + rng.below32(self.config.contracts_20);
        let (from, to) = (self.book.somebody(rng), self.book.somebody(rng));
        let value = U256::from(rng.next()) * U256::from(rng.below(1_000_000));
        Some(entry(Kind::Erc20, contract, [from, from, to], U256::ZERO, value))
    }

    fn some_multi(&self, rng: &mut Rng) -> (u32, usize) {
        let slot = skewed(rng, self.config.collections_1155);
        (self.config.collections_721 + slot, at(slot))
    }

    fn some_class(&self, rng: &mut Rng) -> u32 {
        skewed(rng, self.config.class_tokens_per_1155.max(1))
    }

    fn fresh_amount(&self, rng: &mut Rng, contract: u32) -> (U256, U256) {
        let class = self.some_class(rng);
        (self.book.contract(contract).class_id(class), rng.amount(Contract::class_amount_max(class)))
    }

    /// Makes an entry happen.
    pub(crate) fn apply(&mut self, entry: &Entry) {
        self.settle(entry, entry.from, entry.to, true);
    }

    /// Takes an entry back. Entries are taken back newest first.
    pub(crate) fn undo(&mut self, entry: &Entry) {
        self.settle(entry, entry.to, entry.from, false);
    }

    fn settle(&mut self, entry: &Entry, from: u32, to: u32, forward: bool) {
        match self.book.contract(entry.contract).standard {
            Standard::Erc20 => {}
            Standard::Erc721 => {
                let unique = &mut self.unique[at(entry.contract)];
                unique.shift(entry.id, from, to);
                if entry.from == ZERO {
                    unique.minted = if forward { unique.minted + 1 } else { unique.minted - 1 };
                }
            }
            Standard::Erc1155 => {
                let multi = &mut self.multi[at(entry.contract - self.config.collections_721)];
                match &entry.items {
                    Some(items) => {
                        for (id, qty) in items {
                            multi.shift(*id, from, to, *qty);
                        }
                    }
                    None => multi.shift(entry.id, from, to, entry.qty),
                }
            }
        }
    }
}

impl Unique {
    fn shift(&mut self, id: U256, from: u32, to: u32) {
        if from == ZERO {
            let before = self.place.insert(id, self.tokens.len());
            assert!(before.is_none(), "token {id} exists already");
            self.tokens.push((id, to));
        } else if to == ZERO {
            let place = self.place.remove(&id).expect("only existing tokens are burned");
            self.tokens.swap_remove(place);
            if let Some((moved, _)) = self.tokens.get(place) {
                self.place.insert(*moved, place);
            }
        } else {
            let place = self.place[&id];
            assert_eq!(self.tokens[place].1, from, "only the owner sends token {id}");
            self.tokens[place].1 = to;
        }
    }
}

impl Multi {
    fn shift(&mut self, id: U256, from: u32, to: u32, qty: U256) {
        if qty.is_zero() {
            return;
        }
        if from != ZERO {
            let place = self.place[&(id, from)];
            let held = &mut self.holdings[place].2;
            *held = held.checked_sub(qty).expect("nobody sends more than they hold");
            if held.is_zero() {
                self.holdings.swap_remove(place);
                self.place.remove(&(id, from));
                if let Some((moved, holder, _)) = self.holdings.get(place) {
                    self.place.insert((*moved, *holder), place);
                }
            }
        }
        if to != ZERO {
            match self.place.get(&(id, to)) {
                Some(place) => self.holdings[*place].2 += qty,
                None => {
                    self.place.insert((id, to), self.holdings.len());
                    self.holdings.push((id, to, qty));
                }
            }
        }
    }
}

/// Early ones are more popular: the smaller of two draws.
fn skewed(rng: &mut Rng, bound: u32) -> u32 {
    rng.below32(bound).min(rng.below32(bound))
}

fn entry(kind: Kind, contract: u32, [operator, from, to]: [u32; 3], id: U256, qty: U256) -> Entry {
    Entry { kind, tx: 0, contract, operator, from, to, id, qty, items: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_logs_fit_in_little_memory() {
        assert!(size_of::<Entry>() <= 112, "{} bytes per log", size_of::<Entry>());
    }

    #[test]
    fn undoing_everything_leaves_nothing() {
        let config = SimConfig::small(1);
        let mut economy = Economy::new(&config, Arc::new(Book::new(&config)));
        let plans = economy.busy(&mut Rng::keyed(&[4]), 500);
        assert!(economy.unique.iter().any(|one| !one.tokens.is_empty()));
        for entry in plans.iter().flat_map(|plan| &plan.entries).rev() {
            economy.undo(entry);
        }
        assert!(economy.unique.iter().all(|one| one.tokens.is_empty() && one.minted == 0));
        assert!(economy.multi.iter().all(|one| one.holdings.is_empty() && one.place.is_empty()));
    }
}
