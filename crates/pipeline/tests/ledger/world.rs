//! A network to play on, and a maker of events.

use std::collections::BTreeMap;

use alloy_primitives::U256;
use tidemark_model::chain::{
    AssetRef, BlockRef, EventKind, Family, Network, OwnershipDelta, ParsedBlock, RawEvent, Standard,
};
use tidemark_model::finality::FinalityStatus;
use tidemark_model::ids::{
    AccountId, AssetId, BlockHash, CollectionId, EventId, Height, NetworkId, SourceEventId, TxId,
};
use tidemark_model::quantity::SignedQty;
use tidemark_model::redact::RedactedUrl;
use tidemark_pipeline::workers::{
    BlockInput, BlockOutcome, Cause, Finalized, Openings, Reorged, WorkError, advance_finality, handle_reorg,
    process_block, rewind, take_back_above_head, verify_ledger,
};
use tidemark_store::{Db, DbOptions};
use tidemark_testkit::pg::TestDb;
use time::OffsetDateTime;

pub(crate) const NETWORK: NetworkId = NetworkId(7);
pub(crate) const SINGLES: &str = "0x00000000000000000000000000000000000000aa";
pub(crate) const CLASSES: &str = "0x00000000000000000000000000000000000000bb";

/// Block `height` of branch `fork`; branch 0 is the first.
pub(crate) fn block(height: u64, fork: u8) -> BlockRef {
    let mut hash = [fork; 32];
    hash[..8].copy_from_slice(&height.to_be_bytes());
    BlockRef { height: Height(height), hash: BlockHash(hash) }
}

pub(crate) fn time_of(height: u64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(1_700_000_000 + i64::try_from(height).expect("small") * 12)
        .expect("a time")
}

/// What happens, without where.
#[derive(Debug, Clone)]
pub(crate) struct Act {
    pub(crate) tx: u64,
    pub(crate) index: u32,
    pub(crate) sub: u32,
    pub(crate) standard: Standard,
    pub(crate) token: String,
    pub(crate) from: Option<String>,
    pub(crate) to: Option<String>,
    pub(crate) qty: U256,
}

/// An account's address.
pub(crate) fn addr(name: &str) -> String {
    name.to_owned()
}

/// A single token moves; `tx` names the transaction.
pub(crate) fn single(tx: u64, token: u64, from: Option<&str>, to: Option<&str>) -> Act {
    Act {
        tx,
        index: 0,
        sub: 0,
        standard: Standard::Erc721,
        token: token.to_string(),
        from: from.map(addr),
        to: to.map(addr),
        qty: U256::from(1),
    }
}

/// Units of a class move.
pub(crate) fn class(tx: u64, token: u64, from: Option<&str>, to: Option<&str>, qty: u64) -> Act {
    Act { standard: Standard::Erc1155, qty: U256::from(qty), ..single(tx, token, from, to) }
}

impl Act {
    pub(crate) fn index(mut self, index: u32) -> Self {
        self.index = index;
        self
    }
    pub(crate) fn sub(mut self, sub: u32) -> Self {
        self.sub = sub;
        self
    }
    pub(crate) fn qty(mut self, qty: U256) -> Self {
        self.qty = qty;
        self
    }
    pub(crate) fn source(&self) -> SourceEventId {
        SourceEventId::evm(NETWORK, &tx_hash(self.tx), self.index)
    }
    pub(crate) fn id(&self) -> EventId {
        EventId::of(&self.source(), self.sub)
    }
    pub(crate) fn asset_ref(&self) -> AssetRef {
        let contract = if self.standard == Standard::Erc721 { SINGLES } else { CLASSES };
        AssetRef {
            network_id: NETWORK,
            collection_addr_normalized: contract.to_owned(),
            token_id_raw: self.token.clone(),
            standard: self.standard,
        }
    }
    pub(crate) fn asset(&self) -> AssetId {
        asset_id(&self.asset_ref())
    }
    pub(crate) fn at(&self, block: BlockRef) -> RawEvent {
        let lost = self.from.as_ref().map(|from| OwnershipDelta {
            account_addr_normalized: from.clone(),
            qty_delta: SignedQty::loss(self.qty),
        });
        let gained = self.to.as_ref().map(|to| OwnershipDelta {
            account_addr_normalized: to.clone(),
            qty_delta: SignedQty::gain(self.qty),
        });
        let event_kind = match (&self.from, &self.to) {
            (None, _) => EventKind::Mint,
            (_, None) => EventKind::Burn,
            _ => EventKind::Transfer,
        };
        RawEvent {
            source_event_id: self.source(),
            sub_index: self.sub,
            event_kind,
            asset_refs: vec![self.asset_ref()],
            ownership_deltas: lost.into_iter().chain(gained).collect(),
            block_number: block.height,
            block_hash: block.hash,
            tx_hash: TxId::from(tx_hash(self.tx)),
            event_index: self.index,
            event_time: time_of(block.height.0),
            finality_status: FinalityStatus::Pending,
            blob_ref: None,
        }
    }
}

pub(crate) fn asset_id(asset: &AssetRef) -> AssetId {
    let collection = CollectionId::of(NETWORK, &asset.collection_addr_normalized);
    AssetId::of(NETWORK, collection, &asset.token_id_raw, asset.standard.as_str())
}

pub(crate) fn account_id(name: &str) -> AccountId {
    AccountId::of(NETWORK, &addr(name))
}

fn tx_hash(tx: u64) -> [u8; 32] {
    let mut hash = [0x77; 32];
    hash[..8].copy_from_slice(&tx.to_be_bytes());
    hash
}

pub(crate) fn cause(id: impl ToString) -> Cause {
    Cause { id: id.to_string(), at: time_of(0) }
}

/// Owners by name.
pub(crate) type Owners = BTreeMap<String, String>;

pub(crate) fn owners(of: &[(&str, u64)]) -> Owners {
    of.iter().map(|(name, qty)| (addr(name), qty.to_string())).collect()
}

/// A database and a network on it.
pub(crate) struct World {
    pub(crate) db: Db,
    pub(crate) network: Network,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::starting_at(0).await
    }
    pub(crate) async fn starting_at(start: u64) -> Self {
        let test = TestDb::new().await.expect("a database");
        let db =
            Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
        let network = Network {
            id: NETWORK,
            slug: "test".to_owned(),
            family: Family::Evm,
            start_block: Height(start),
            confirmations: 2,
            reorg_depth_max: 64,
        };
        Self { db, network }
    }
    pub(crate) async fn try_block(
        &self,
        at: BlockRef,
        events: Vec<RawEvent>,
        openings: &Openings,
    ) -> Result<BlockOutcome, WorkError> {
        let parsed = ParsedBlock { events, quarantined: Vec::new() };
        let input = BlockInput {
            block: at,
            time: time_of(at.height.0),
            parsed: &parsed,
            chain_head: at.height,
            openings,
        };
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let outcome = process_block(&tx, &self.network, &input, &cause(at)).await?;
        tx.commit().await?;
        Ok(outcome)
    }
    /// Processes a block with these acts.
    pub(crate) async fn block(&self, at: BlockRef, acts: &[&Act]) -> BlockOutcome {
        let events = acts.iter().map(|act| act.at(at)).collect();
        self.try_block(at, events, &Openings::default()).await.expect("processes the block")
    }
    /// The same, and it must really be normalized.
    pub(crate) async fn done(&self, at: BlockRef, acts: &[&Act]) {
        let outcome = self.block(at, acts).await;
        assert!(matches!(outcome, BlockOutcome::Done(_)), "{outcome:?}");
    }
    pub(crate) async fn finalize(&self, height: u64) -> Finalized {
        let mut conn = self.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        let done = advance_finality(&tx, &self.network, Height(height), None, &cause(height))
            .await
            .expect("advances finality");
        tx.commit().await.expect("commits");
        done
    }
    pub(crate) async fn try_reorg(
        &self,
        orphaned: &[BlockRef],
        canonical: &[BlockRef],
    ) -> Result<Reorged, WorkError> {
        let mut conn = self.db.conn().await?;
        let tx = conn.tx().await?;
        let name = format!("{orphaned:?}{canonical:?}");
        let done = handle_reorg(&tx, &self.network, orphaned, canonical, &cause(name)).await?;
        tx.commit().await?;
        Ok(done)
    }
    pub(crate) async fn reorg(&self, orphaned: &[BlockRef], canonical: &[BlockRef]) -> Reorged {
        self.try_reorg(orphaned, canonical).await.expect("handles the reorg")
    }
    /// What stands above the head makes way for history.
    pub(crate) async fn take_back(&self) -> Reorged {
        let mut conn = self.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        let done = take_back_above_head(&tx, &self.network, &cause("way")).await.expect("takes back");
        tx.commit().await.expect("commits");
        done
    }
    /// The operator's way back.
    pub(crate) async fn rewind(&self, to: u64) -> Reorged {
        let mut conn = self.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        let done =
            rewind(&tx, &self.network, Height(to), &cause(format!("rewind to {to}"))).await.expect("rewinds");
        tx.commit().await.expect("commits");
        done
    }
    /// Finalized owners.
    pub(crate) async fn finalized(&self, asset: AssetId) -> Owners {
        self.owners(
            "select a.address_normalized, o.qty::text from ledger.ownership_current o
               join ledger.accounts a on a.id = o.account_id where o.asset_id = $1",
            asset,
        )
        .await
    }
    /// Latest owners: finalized plus what is open.
    pub(crate) async fn latest(&self, asset: AssetId) -> Owners {
        self.owners(
            "select a.address_normalized, sum(x.qty)::text
               from (select account_id, qty from ledger.ownership_current where asset_id = $1
                     union all
                     select account_id, qty_delta from ledger.unfinalized_deltas where asset_id = $1) x
               join ledger.accounts a on a.id = x.account_id
              group by 1 having sum(x.qty) <> 0",
            asset,
        )
        .await
    }
    async fn owners(&self, sql: &'static str, asset: AssetId) -> Owners {
        let conn = self.db.conn().await.expect("connects");
        let rows = conn.query("read owners", sql, &[&asset.0]).await.expect("reads");
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }
    /// One count of the database.
    pub(crate) async fn count(&self, sql: &str) -> i64 {
        let conn = self.db.conn().await.expect("connects");
        conn.query_one("read one count", sql, &[]).await.expect("reads").get(0)
    }
    /// One text of the database.
    pub(crate) async fn text(&self, sql: &str) -> String {
        let conn = self.db.conn().await.expect("connects");
        conn.query_one("read one text", sql, &[]).await.expect("reads").get(0)
    }
    pub(crate) async fn execute(&self, sql: &str) -> u64 {
        let conn = self.db.conn().await.expect("connects");
        conn.execute("change", sql, &[]).await.expect("changes")
    }
    /// All invariants hold.
    pub(crate) async fn holds(&self) {
        assert_eq!(self.violations().await, Vec::<String>::new());
    }
    pub(crate) async fn violations(&self) -> Vec<String> {
        let mut conn = self.db.conn().await.expect("connects");
        let tx = conn.snapshot_tx().await.expect("begins");
        let found = verify_ledger(&tx, NETWORK).await.expect("verifies");
        found.into_iter().map(|violation| format!("{}: {}", violation.check, violation.detail)).collect()
    }
    /// The whole digest as kept.
    pub(crate) async fn digest(&self) -> U256 {
        let conn = self.db.conn().await.expect("connects");
        let buckets = tidemark_store::digest::read_with(&conn, NETWORK).await.expect("reads");
        tidemark_store::digest::total(&buckets).0
    }
    /// Where an event is: block, status.
    pub(crate) async fn key(&self, event: EventId) -> (i64, Vec<u8>, String, bool) {
        let conn = self.db.conn().await.expect("connects");
        let row = conn
            .query_one(
                "read a key",
                "select block_number, block_hash, finality_status::text, is_reverted
                   from ledger.events_now where id = $1",
                &[&event.0],
            )
            .await
            .expect("the event is there");
        (row.get(0), row.get(1), row.get(2), row.get(3))
    }
}
