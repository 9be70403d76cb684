//! A chain made up from a seed, with what everybody owns after every block.

use std::collections::BTreeMap;

use alloy_primitives::U256;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use tidemark_model::chain::{BlockRef, Standard};
use tidemark_model::digest::Digest;
use tidemark_model::ids::AssetId;
use tidemark_model::quantity::SignedQty;

use crate::world::{Act, account_id, block, class, single};

/// Balances by asset and name.
pub(crate) type State = BTreeMap<(AssetId, String), U256>;

/// A block, what happened in it, and what was so after it.
#[derive(Debug, Clone)]
pub(crate) struct TrueBlock {
    pub(crate) at: BlockRef,
    pub(crate) acts: Vec<Act>,
    pub(crate) after: State,
}

/// The canonical chain, and a source of chance.
pub(crate) struct Truth {
    pub(crate) random: StdRng,
    pub(crate) chain: Vec<TrueBlock>,
    next_tx: u64,
    fork: u8,
}

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

impl Truth {
    pub(crate) fn new(seed: u64) -> Self {
        let first = TrueBlock { at: block(0, 0), acts: Vec::new(), after: State::new() };
        Self { random: StdRng::seed_from_u64(seed), chain: vec![first], next_tx: 1, fork: 0 }
    }
    pub(crate) fn tip(&self) -> &TrueBlock {
        self.chain.last().expect("a chain has a first block")
    }
    pub(crate) fn state_at(&self, height: usize) -> &State {
        &self.chain[height].after
    }
    pub(crate) fn digest_at(&self, height: usize) -> U256 {
        let mut digest = Digest::default();
        for ((asset, name), qty) in self.state_at(height) {
            digest.add(*asset, account_id(name), SignedQty::gain(*qty));
        }
        digest.0
    }
    /// Adds a block with some of these acts, where they still can be, and some of its own.
    pub(crate) fn extend(&mut self, again: &mut Vec<Act>) -> TrueBlock {
        let mut state = self.tip().after.clone();
        let mut acts: Vec<Act> = Vec::new();
        let mut rest = Vec::new();
        for act in again.drain(..) {
            let shifted = if self.random.random_bool(0.3) { act.clone().index(40 + act.index) } else { act };
            if self.random.random_bool(0.6) && can(&state, &shifted) {
                apply(&mut state, &shifted);
                acts.push(shifted);
            } else if self.random.random_bool(0.5) {
                rest.push(shifted);
            }
        }
        *again = rest;
        for _ in 0..self.random.random_range(0..4) {
            let act = self.invent(&state);
            if can(&state, &act) {
                apply(&mut state, &act);
                acts.push(act);
            }
        }
        // The chain's order is the order of the indexes, and no two records share one.
        acts.sort_by_key(|act| act.index);
        acts.dedup_by_key(|act| act.index);
        let mut state = self.tip().after.clone();
        acts.retain(|act| {
            let possible = can(&state, act);
            if possible {
                apply(&mut state, act);
            }
            possible
        });
        let height = self.tip().at.height.0 + 1;
        let made = TrueBlock { at: block(height, self.fork), acts, after: state };
        self.chain.push(made.clone());
        made
    }
    /// Takes the newest `depth` blocks back; what follows is another branch.
    pub(crate) fn roll_back(&mut self, depth: usize) -> Vec<TrueBlock> {
        self.fork += 1;
        self.chain.split_off(self.chain.len() - depth)
    }
    fn invent(&mut self, state: &State) -> Act {
        self.next_tx += 1;
        let (tx, random) = (self.next_tx, &mut self.random);
        let name = |random: &mut StdRng| *NAMES.choose(random).expect("names");
        let index = random.random_range(0..40);
        let token = random.random_range(0..4);
        let (from, to) = (name(random), name(random));
        let holder = |asset: AssetId, random: &mut StdRng| {
            let holders: Vec<&String> =
                state.keys().filter(|(id, _)| *id == asset).map(|(_, name)| name).collect();
            holders.choose(random).map(|name| (*name).clone())
        };
        if random.random_bool(0.5) {
            let token = 1_000 * u64::from(index % 3) + token;
            let probe = single(tx, token, None, Some(to)).index(index);
            match holder(probe.asset(), random) {
                None => probe,
                Some(owner) if random.random_bool(0.2) => single(tx, token, Some(&owner), None).index(index),
                Some(owner) => single(tx, token, Some(&owner), Some(to)).index(index),
            }
        } else {
            let qty = random.random_range(0..20);
            let sender = if random.random_bool(0.4) { None } else { Some(from) };
            let receiver = if sender.is_some() && random.random_bool(0.2) { None } else { Some(to) };
            class(tx, token, sender, receiver, qty).index(index)
        }
    }
}

fn can(state: &State, act: &Act) -> bool {
    let held = |name: &String| state.get(&(act.asset(), name.clone())).copied().unwrap_or_default();
    match &act.from {
        Some(from) => held(from) >= act.qty,
        None if act.standard == Standard::Erc721 => !state.keys().any(|(asset, _)| *asset == act.asset()),
        None => true,
    }
}

fn apply(state: &mut State, act: &Act) {
    if let Some(from) = &act.from {
        let key = (act.asset(), from.clone());
        let rest = state.get(&key).copied().unwrap_or_default() - act.qty;
        if rest.is_zero() {
            state.remove(&key);
        } else {
            state.insert(key, rest);
        }
    }
    if let Some(to) = &act.to
        && !act.qty.is_zero()
    {
        *state.entry((act.asset(), to.clone())).or_default() += act.qty;
    }
}
