//! Catalog stubs: a row for every account, contract, collection and asset, written in the transaction of the
//! first event that names it. Each table gets one statement, sorted by id, so that two workers that meet
//! wait for each other in one order and never deadlock.

use std::collections::{BTreeMap, BTreeSet};

use tidemark_model::chain::Standard;
use tidemark_model::ids::{AccountId, AssetId, CollectionId, ContractId, Height, NetworkId};
use tidemark_model::quantity::parse_decimal;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::db::{StoreError, Tx};
use crate::together::both;

/// An asset as first seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssetStub {
    /// Its collection.
    pub collection: CollectionId,
    /// As the chain has it.
    pub token_id_raw: String,
    /// Standard.
    pub standard: Standard,
    /// Block of the first event.
    pub first_seen_block: Height,
    /// Time of the first event.
    pub first_seen_at: OffsetDateTime,
    /// Did it exist before our first block?
    pub partial: bool,
}

/// Everything a batch of events names. Maps keep the ids sorted.
#[derive(Debug, Clone, Default)]
pub struct Stubs {
    /// Canonical address and first sight.
    pub accounts: BTreeMap<AccountId, (String, OffsetDateTime)>,
    /// Canonical address and standard.
    pub contracts: BTreeMap<ContractId, (String, Standard)>,
    /// Contract and first sight.
    pub collections: BTreeMap<CollectionId, (ContractId, OffsetDateTime)>,
    /// Assets.
    pub assets: BTreeMap<AssetId, AssetStub>,
}

const ACCOUNTS: &str = "
    insert into ledger.accounts (id, network_id, address_normalized, first_seen_at)
    select u.id, $1, u.address, u.seen
      from unnest($2::uuid[], $3::text[], $4::timestamptz[]) u (id, address, seen)
     order by u.id
    on conflict (id) do nothing";
const CONTRACTS: &str = "
    insert into catalog.contracts (id, network_id, address_normalized, standard_id)
    select u.id, $1, u.address, u.standard
      from unnest($2::uuid[], $3::text[], $4::text[]) u (id, address, standard)
     order by u.id
    on conflict (id) do nothing";
const COLLECTIONS: &str = "
    insert into catalog.collections (id, network_id, contract_id, created_at)
    select u.id, $1, u.contract, u.seen
      from unnest($2::uuid[], $3::uuid[], $4::timestamptz[]) u (id, contract, seen)
     order by u.id
    on conflict (id) do nothing";
const ASSETS: &str = "
    insert into catalog.assets
        (id, network_id, collection_id, token_id_raw, token_id_num, standard_id, is_fungible_class, history,
         first_seen_block, created_at)
    select u.id, $1, u.collection, u.token, u.number::numeric, u.standard, u.fungible, u.history, u.block, u.seen
      from unnest($2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::bool[], $8::text[],
                  $9::bigint[], $10::timestamptz[])
           u (id, collection, token, number, standard, fungible, history, block, seen)
     order by u.id
    on conflict (id) do nothing
    returning id";

/// Inserts what is not there yet; gives the assets that were new. In flight together, in the order of who names whom:
/// contracts, their collections, and those collections' assets.
pub async fn ensure_stubs(
    tx: &Tx<'_>,
    network: NetworkId,
    stubs: &Stubs,
) -> Result<BTreeSet<AssetId>, StoreError> {
    let named = both(ensure_contracts(tx, network, stubs), ensure_collections(tx, network, stubs));
    let (_, (_, assets)) =
        both(ensure_accounts(tx, network, stubs), both(named, ensure_assets(tx, network, stubs))).await?;
    Ok(assets)
}

async fn ensure_accounts(tx: &Tx<'_>, network: NetworkId, stubs: &Stubs) -> Result<(), StoreError> {
    if !stubs.accounts.is_empty() {
        let ids: Vec<Uuid> = stubs.accounts.keys().map(|id| id.0).collect();
        let addresses: Vec<&str> = stubs.accounts.values().map(|(address, _)| address.as_str()).collect();
        let seen: Vec<OffsetDateTime> = stubs.accounts.values().map(|(_, seen)| *seen).collect();
        tx.execute("insert account stubs", ACCOUNTS, &[&network.0, &ids, &addresses, &seen]).await?;
    }
    Ok(())
}

async fn ensure_contracts(tx: &Tx<'_>, network: NetworkId, stubs: &Stubs) -> Result<(), StoreError> {
    if !stubs.contracts.is_empty() {
        let ids: Vec<Uuid> = stubs.contracts.keys().map(|id| id.0).collect();
        let addresses: Vec<&str> = stubs.contracts.values().map(|(address, _)| address.as_str()).collect();
        let standards: Vec<&str> = stubs.contracts.values().map(|(_, standard)| standard.as_str()).collect();
        tx.execute("insert contract stubs", CONTRACTS, &[&network.0, &ids, &addresses, &standards]).await?;
    }
    Ok(())
}

async fn ensure_collections(tx: &Tx<'_>, network: NetworkId, stubs: &Stubs) -> Result<(), StoreError> {
    if !stubs.collections.is_empty() {
        let ids: Vec<Uuid> = stubs.collections.keys().map(|id| id.0).collect();
        let contracts: Vec<Uuid> = stubs.collections.values().map(|(contract, _)| contract.0).collect();
        let seen: Vec<OffsetDateTime> = stubs.collections.values().map(|(_, seen)| *seen).collect();
        tx.execute("insert collection stubs", COLLECTIONS, &[&network.0, &ids, &contracts, &seen]).await?;
    }
    Ok(())
}

async fn ensure_assets(
    tx: &Tx<'_>,
    network: NetworkId,
    stubs: &Stubs,
) -> Result<BTreeSet<AssetId>, StoreError> {
    if stubs.assets.is_empty() {
        return Ok(BTreeSet::new());
    }
    let assets = || stubs.assets.values();
    let ids: Vec<Uuid> = stubs.assets.keys().map(|id| id.0).collect();
    let collections: Vec<Uuid> = assets().map(|asset| asset.collection.0).collect();
    let tokens: Vec<&str> = assets().map(|asset| asset.token_id_raw.as_str()).collect();
    let numbers: Vec<Option<&str>> =
        tokens.iter().map(|token| parse_decimal(token).map(|_| *token)).collect();
    let standards: Vec<&str> = assets().map(|asset| asset.standard.as_str()).collect();
    let fungible: Vec<bool> = assets().map(|asset| asset.standard.is_fungible_class()).collect();
    let history: Vec<&str> =
        assets().map(|asset| if asset.partial { "partial" } else { "complete" }).collect();
    let blocks: Vec<i64> = assets().map(|asset| asset.first_seen_block.as_i64()).collect();
    let seen: Vec<OffsetDateTime> = assets().map(|asset| asset.first_seen_at).collect();
    let new = tx
        .query(
            "insert asset stubs",
            ASSETS,
            &[
                &network.0,
                &ids,
                &collections,
                &tokens,
                &numbers,
                &standards,
                &fungible,
                &history,
                &blocks,
                &seen,
            ],
        )
        .await?;
    Ok(new.iter().map(|row| AssetId(row.get(0))).collect())
}

const MARK_PARTIAL: &str =
    "update catalog.assets set history = 'partial' where id = any($1) and history <> 'partial'";

/// Says of assets that they are older than our first block.
pub async fn mark_partial(tx: &Tx<'_>, assets: &[AssetId]) -> Result<u64, StoreError> {
    if assets.is_empty() {
        return Ok(0);
    }
    let ids: Vec<Uuid> = assets.iter().map(|id| id.0).collect();
    tx.execute("mark assets as partial", MARK_PARTIAL, &[&ids]).await
}

const UNMARK_PARTIAL: &str = "
    update catalog.assets set history = 'complete'
     where id = any($1) and not is_fungible_class and history <> 'complete'";

/// Takes that back for single tokens whose opening went with its block: what comes next tells anew.
pub async fn unmark_partial(tx: &Tx<'_>, assets: &[AssetId]) -> Result<u64, StoreError> {
    if assets.is_empty() {
        return Ok(0);
    }
    let ids: Vec<Uuid> = assets.iter().map(|id| id.0).collect();
    tx.execute("take back that assets are partial", UNMARK_PARTIAL, &[&ids]).await
}

const MARK_UNRELIABLE: &str = "
    update catalog.contracts c
       set reliability = 'unreliable', unreliable_reason = u.reason
      from unnest($1::uuid[], $2::text[]) u (collection, reason)
      join catalog.collections l on l.id = u.collection
     where c.id = l.contract_id and c.reliability = 'ok'";

/// Marks the contracts of these collections as breaking their own standard; the first reason stays.
pub async fn mark_unreliable(
    tx: &Tx<'_>,
    reasons: &BTreeMap<CollectionId, String>,
) -> Result<u64, StoreError> {
    if reasons.is_empty() {
        return Ok(0);
    }
    let ids: Vec<Uuid> = reasons.keys().map(|id| id.0).collect();
    let reasons: Vec<&str> = reasons.values().map(String::as_str).collect();
    tx.execute("mark contracts as unreliable", MARK_UNRELIABLE, &[&ids, &reasons]).await
}

/// A finalized supply, and whether something of the asset was ever burned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Supply {
    /// Units that exist.
    pub units: alloy_primitives::U256,
    /// Was a burn applied?
    pub burnt: bool,
}

// Burned: a burn took the last of it. Of a class that we know in part others may hold units; a single token
// is gone in any case. `bulk` decides by the same rule.
const SET_SUPPLY: &str = "
    update catalog.assets a
       set supply = u.supply::numeric,
           is_burned = u.burnt and u.supply::numeric = 0 and (not a.is_fungible_class or a.history = 'complete')
      from unnest($1::uuid[], $2::text[], $3::bool[]) u (id, supply, burnt)
     where a.id = u.id";

/// Sets finalized supplies, and with them what is burned.
pub async fn set_supply(tx: &Tx<'_>, supplies: &BTreeMap<AssetId, Supply>) -> Result<u64, StoreError> {
    if supplies.is_empty() {
        return Ok(0);
    }
    let ids: Vec<Uuid> = supplies.keys().map(|id| id.0).collect();
    let units: Vec<String> = supplies.values().map(|supply| supply.units.to_string()).collect();
    let burnt: Vec<bool> = supplies.values().map(|supply| supply.burnt).collect();
    tx.execute("set supplies", SET_SUPPLY, &[&ids, &units, &burnt]).await
}
