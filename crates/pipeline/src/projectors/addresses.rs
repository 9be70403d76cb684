//! Addresses by id. An id is the hash of its network and address, so what was read once stays true, in every
//! transaction and after every rollback; only the memory for it is bounded.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use tidemark_store::projection::live::{self, TransferDetail};
use tidemark_store::together::both;
use tidemark_store::{StoreError, Tx};
use uuid::Uuid;

/// Addresses kept at least; twice as many at most.
const KEPT: usize = 50_000;

/// What this process has read of addresses.
#[derive(Debug, Default)]
pub struct Addresses {
    kept: Mutex<Kept>,
}

/// Two generations: what is asked for moves to the younger one, and the older one goes when that is full.
#[derive(Debug, Default)]
struct Kept {
    young: HashMap<Uuid, Arc<str>>,
    old: HashMap<Uuid, Arc<str>>,
}

impl Kept {
    fn get(&mut self, id: Uuid) -> Option<Arc<str>> {
        if let Some(address) = self.young.get(&id) {
            return Some(Arc::clone(address));
        }
        let address = self.old.remove(&id)?;
        self.put(id, Arc::clone(&address));
        Some(address)
    }
    fn put(&mut self, id: Uuid, address: Arc<str>) {
        if self.young.len() >= KEPT {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(id, address);
    }
}

/// Addresses of a batch, by the id of a collection (its contract's) or an account.
pub(super) type Known = HashMap<Uuid, Arc<str>>;

impl Addresses {
    /// The addresses these transfers name.
    pub(super) async fn of(&self, tx: &Tx<'_>, transfers: &[&TransferDetail]) -> Result<Known, StoreError> {
        let rows = || transfers.iter().map(|one| &one.row);
        let collections: BTreeSet<Uuid> = rows().map(|row| row.collection_id.0).collect();
        let sides = rows().flat_map(|row| row.from_account.iter().chain(&row.to_account));
        let accounts: BTreeSet<Uuid> = sides.map(|account| account.0).collect();
        let mut known = Known::with_capacity(collections.len() + accounts.len());
        let (collections, accounts) = {
            let mut kept = self.kept.lock().expect("no holder panics");
            let mut missing = |ids: BTreeSet<Uuid>| -> Vec<Uuid> {
                ids.into_iter()
                    .filter(|id| match kept.get(*id) {
                        Some(address) => {
                            known.insert(*id, address);
                            false
                        }
                        None => true,
                    })
                    .collect()
            };
            (missing(collections), missing(accounts))
        };
        let (contracts, accounts) =
            both(live::contracts(tx, &collections), live::accounts(tx, &accounts)).await?;
        let mut kept = self.kept.lock().expect("no holder panics");
        for (id, address) in contracts.into_iter().chain(accounts) {
            let address: Arc<str> = address.into();
            kept.put(id, Arc::clone(&address));
            known.insert(id, address);
        }
        Ok(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_stays_and_memory_is_bounded() {
        let mut kept = Kept::default();
        let id = |number: usize| Uuid::from_u128(u128::try_from(number).expect("fits"));
        kept.put(id(0), "often".into());
        for number in 1..=KEPT * 3 {
            kept.put(id(number), "once".into());
            if number % 1_000 == 0 {
                assert_eq!(kept.get(id(0)).as_deref(), Some("often"));
            }
            assert!(kept.young.len() + kept.old.len() <= KEPT * 2 + 1);
        }
        assert_eq!(kept.get(id(1)), None);
        assert_eq!(kept.get(id(KEPT * 3)).as_deref(), Some("once"));
    }
}
