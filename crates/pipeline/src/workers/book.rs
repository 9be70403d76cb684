//! Balances while movements are applied to them, in the chain's order. Pure: it refuses what a token that
//! keeps its standard cannot do, and a refused movement leaves no trace.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::U256;
use tidemark_model::chain::Standard;
use tidemark_model::ids::AssetId;
use tidemark_model::quantity::SignedQty;
use tidemark_store::catalog::Supply;
use tidemark_store::ledger::{DeltaRow, Pair};
use tidemark_store::ownership::Balance;

/// Why a movement cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The sender holds less than it sends.
    Negative {
        /// What it holds.
        held: U256,
    },
    /// The receiver's balance would leave 256 bits.
    BalanceOverflow,
    /// The sum of all balances would leave 256 bits.
    SupplyOverflow,
    /// A single token is made while it exists.
    SecondUnit,
}

impl Refusal {
    /// In words, for the quarantine and the contract's page.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Negative { .. } => "an account sent more than it held",
            Self::BalanceOverflow => "a balance would exceed 256 bits",
            Self::SupplyOverflow => "the supply would exceed 256 bits",
            Self::SecondUnit => "a single token was made while it existed",
        }
    }
}

/// Balances and supplies of everything a batch touches.
#[derive(Debug, Default)]
pub(crate) struct Book {
    before: BTreeMap<Pair, U256>,
    balances: BTreeMap<Pair, U256>,
    supplies: BTreeMap<AssetId, U256>,
    resupplied: BTreeSet<AssetId>,
}

impl Book {
    pub(crate) fn new(balances: BTreeMap<Pair, U256>, supplies: BTreeMap<AssetId, U256>) -> Self {
        Self { before: balances.clone(), balances, supplies, resupplied: BTreeSet::new() }
    }

    /// What an account holds now.
    pub(crate) fn held(&self, pair: &Pair) -> U256 {
        self.balances.get(pair).copied().unwrap_or_default()
    }

    /// Applies one movement, or changes nothing.
    pub(crate) fn apply(&mut self, delta: &DeltaRow, standard: Standard) -> Result<(), Refusal> {
        let qty = delta.qty;
        if qty.is_zero() {
            return Ok(());
        }
        let sender = delta.from.map(|account| (delta.asset, account));
        let receiver = delta.to.map(|account| (delta.asset, account));
        let sent = match sender {
            Some(pair) => {
                let held = self.held(&pair);
                Some((pair, held.checked_sub(qty).ok_or(Refusal::Negative { held })?))
            }
            None => None,
        };
        let gained = match receiver {
            Some(pair) => {
                let held = match sent {
                    Some((sender, rest)) if sender == pair => rest,
                    _ => self.held(&pair),
                };
                Some((pair, held.checked_add(qty).ok_or(Refusal::BalanceOverflow)?))
            }
            None => None,
        };
        if sender.is_none() != receiver.is_none() {
            let supply = self.supplies.get(&delta.asset).copied().unwrap_or_default();
            let supply = if sender.is_none() {
                let more = supply.checked_add(qty).ok_or(Refusal::SupplyOverflow)?;
                if standard == Standard::Erc721 && more > U256::from(1) {
                    return Err(Refusal::SecondUnit);
                }
                more
            } else {
                supply.checked_sub(qty).ok_or(Refusal::Negative { held: supply })?
            };
            self.supplies.insert(delta.asset, supply);
            self.resupplied.insert(delta.asset);
        }
        self.balances.extend(sent);
        self.balances.extend(gained);
        Ok(())
    }

    /// What changed in all, without pairs that came back to where they were.
    pub(crate) fn changes(&self) -> BTreeMap<Pair, SignedQty> {
        changes(&self.before, &self.balances)
    }

    /// The rows that this changes.
    pub(crate) fn rows(&self) -> Vec<Balance> {
        rows(&self.before, &self.balances)
    }

    /// Supplies that were changed. One that was changed and is zero was burned to zero.
    pub(crate) fn resupplied(&self) -> BTreeMap<AssetId, Supply> {
        let supply = |units: &U256| Supply { units: *units, burnt: units.is_zero() };
        self.resupplied.iter().filter_map(|asset| Some((*asset, supply(self.supplies.get(asset)?)))).collect()
    }
}

/// `after - before`, pair by pair, without zeros.
pub(crate) fn changes(
    before: &BTreeMap<Pair, U256>,
    after: &BTreeMap<Pair, U256>,
) -> BTreeMap<Pair, SignedQty> {
    let pairs: BTreeSet<&Pair> = before.keys().chain(after.keys()).collect();
    pairs
        .into_iter()
        .filter_map(|pair| {
            let old = before.get(pair).copied().unwrap_or_default();
            let new = after.get(pair).copied().unwrap_or_default();
            let change = if new >= old { SignedQty::gain(new - old) } else { SignedQty::loss(old - new) };
            (!change.is_zero()).then_some((*pair, change))
        })
        .collect()
}

/// Rows of balances that differ.
pub(crate) fn rows(before: &BTreeMap<Pair, U256>, after: &BTreeMap<Pair, U256>) -> Vec<Balance> {
    let row = |pair: &Pair| Balance {
        pair: *pair,
        was: before.get(pair).copied(),
        is: after.get(pair).copied().unwrap_or_default(),
    };
    changes(before, after).keys().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_model::ids::AccountId;
    use uuid::Uuid;

    fn asset() -> AssetId {
        AssetId(Uuid::from_u128(1))
    }
    fn account(number: u128) -> AccountId {
        AccountId(Uuid::from_u128(number))
    }
    fn delta(from: Option<u128>, to: Option<u128>, qty: U256) -> DeltaRow {
        DeltaRow { asset: asset(), from: from.map(account), to: to.map(account), qty }
    }

    #[test]
    fn a_refused_movement_leaves_no_trace() {
        let mut book = Book::default();
        let one = U256::from(1);
        assert_eq!(
            book.apply(&delta(Some(1), Some(2), one), Standard::Erc721),
            Err(Refusal::Negative { held: U256::ZERO })
        );
        assert_eq!(book.apply(&delta(None, Some(1), one), Standard::Erc721), Ok(()));
        assert_eq!(book.apply(&delta(None, Some(2), one), Standard::Erc721), Err(Refusal::SecondUnit));
        assert_eq!(book.changes(), BTreeMap::from([((asset(), account(1)), SignedQty::gain(one))]));
        assert_eq!(book.resupplied(), BTreeMap::from([(asset(), Supply { units: one, burnt: false })]));
    }

    #[test]
    fn the_edges_of_256_bits_hold() {
        let mut book = Book::default();
        assert_eq!(book.apply(&delta(None, Some(1), U256::MAX), Standard::Erc1155), Ok(()));
        let one = U256::from(1);
        assert_eq!(book.apply(&delta(None, Some(2), one), Standard::Erc1155), Err(Refusal::SupplyOverflow));
        assert_eq!(book.apply(&delta(None, Some(1), one), Standard::Erc1155), Err(Refusal::BalanceOverflow));
        assert_eq!(book.apply(&delta(Some(1), Some(1), U256::MAX), Standard::Erc1155), Ok(()));
        assert_eq!(book.apply(&delta(Some(3), Some(4), U256::ZERO), Standard::Erc1155), Ok(()));
        assert_eq!(book.apply(&delta(Some(1), None, U256::MAX), Standard::Erc1155), Ok(()));
        assert!(book.changes().is_empty());
    }
}
