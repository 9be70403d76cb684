//! A small ledger for the projection tests: blocks, finality and reorgs written to ledger.* and catalog.* by
//! plain SQL, each step giving the envelopes the real ledger would emit.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tidemark_model::envelope::{
    Actor, ActorKind, DataResidency, Draft, Envelope, RetentionClass, Source, derived_id,
};
use tidemark_model::ids::{AccountId, AssetId, CollectionId, ContractId, EventId, NetworkId, SourceEventId};
use tidemark_model::redact::RedactedUrl;
use tidemark_pipeline::projectors::{Beside, Projected, rebuild_keys, touched};
use tidemark_store::{Conn, Db, DbOptions, Tx};
use tidemark_testkit::pg::TestDb;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

pub const NETWORK: NetworkId = NetworkId(1);

/// What a movement is, before it has a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    pub contract: usize,
    pub token: u32,
    pub from: Option<usize>,
    pub to: Option<usize>,
    pub qty: i64,
}

#[derive(Debug, Clone)]
pub struct Event {
    pub id: EventId,
    pub what: Move,
    pub height: i64,
    pub hash: Vec<u8>,
    pub index: i32,
    pub status: &'static str,
}

pub struct World {
    pub db: Db,
    pub conn: Conn,
    /// Every event ever normalized, by id.
    pub events: BTreeMap<EventId, Event>,
    pub head: i64,
    pub finalized: i64,
    pub fork: u8,
    next_tx: u32,
}

pub async fn world() -> World {
    let test = TestDb::new().await.expect("a database");
    let url = RedactedUrl::parse(&test.url).expect("a url");
    let db = Db::open(&url, &DbOptions::default()).expect("opens");
    let conn = db.conn().await.expect("connects");
    conn.batch(
        "set up",
        "create table projection.transfers_1 partition of projection.transfers for values in (1)
             partition by range (height);
         create table projection.transfers_1_0 partition of projection.transfers_1 for values from (0) to (15);
         create table projection.transfers_1_1 partition of projection.transfers_1 for values from (15) to (100000);
         create index on projection.transfers_1_0 (from_account, height desc);
         create index on projection.transfers_1_1 (collection_id, height desc);
         insert into projection.network_status (network_id, slug, family, start_block, confirmations)
             values (1, 'one', 'evm', 0, 2);
         insert into ledger.network_progress (network_id) values (1);",
    )
    .await
    .expect("sets up");
    World { db, conn, events: BTreeMap::new(), head: 0, finalized: -1, fork: 0, next_tx: 0 }
}

pub fn contract(at: usize) -> String {
    format!("0xc{at:039}")
}
pub fn standard(at: usize) -> &'static str {
    if at == 0 { "erc721" } else { "erc1155" }
}
pub fn address(at: usize) -> String {
    format!("0x{at:040}")
}
pub fn account(at: usize) -> AccountId {
    AccountId::of(NETWORK, &address(at))
}
pub fn collection(at: usize) -> CollectionId {
    CollectionId::of(NETWORK, &contract(at))
}
pub fn asset(contract: usize, token: u32) -> AssetId {
    AssetId::of(NETWORK, collection(contract), &token.to_string(), standard(contract))
}
pub fn time_of(height: i64, fork: u8) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(1_700_000_000 + height * 12 + i64::from(fork)).expect("a time")
}
pub fn hash_of(height: i64, fork: u8) -> Vec<u8> {
    let mut hash = vec![fork; 32];
    hash[..8].copy_from_slice(&height.to_be_bytes());
    hash
}

impl Move {
    pub fn mint(contract: usize, token: u32, to: usize, qty: i64) -> Self {
        Self { contract, token, from: None, to: Some(to), qty }
    }
    pub fn transfer(contract: usize, token: u32, from: usize, to: usize, qty: i64) -> Self {
        Self { contract, token, from: Some(from), to: Some(to), qty }
    }
    pub fn burn(contract: usize, token: u32, from: usize, qty: i64) -> Self {
        Self { contract, token, from: Some(from), to: None, qty }
    }
    pub fn kind(&self) -> &'static str {
        match (self.from, self.to) {
            (None, _) => "mint",
            (_, None) => "burn",
            _ => "transfer",
        }
    }
    pub fn asset(&self) -> AssetId {
        asset(self.contract, self.token)
    }
}

pub fn envelope(subject: &str, payload: Value) -> Envelope {
    let at = time_of(1, 0);
    let id = derived_id(at, &[subject, &payload.to_string()]);
    Envelope {
        event_id: id,
        event_type: subject.to_owned(),
        event_version: 1,
        schema_uri: "schemas://x".into(),
        source: Source { service: "ledger".into(), instance: "t".into(), commit: "c".into() },
        occurred_at: at,
        ingested_at: at,
        causation_id: None,
        correlation_id: id,
        traceparent: None,
        tenant_id: "t".into(),
        actor: Actor { kind: ActorKind::System, id: "ledger".into() },
        payload,
        partition_key: "1".into(),
        outbox: None,
        retention_class: RetentionClass::Operational,
        data_residency: DataResidency::Eu,
    }
}

impl World {
    /// Fresh events for the next block, and the block.
    pub async fn block(&mut self, moves: &[Move]) -> Vec<Envelope> {
        let sources: Vec<(SourceEventId, Move)> = moves
            .iter()
            .map(|what| {
                self.next_tx += 1;
                let mut tx = [0; 32];
                tx[..4].copy_from_slice(&self.next_tx.to_be_bytes());
                (SourceEventId::evm(NETWORK, &tx, 0), *what)
            })
            .collect();
        self.include(&sources).await
    }

    /// The next block, with events that may have been in another one before.
    pub async fn include(&mut self, sources: &[(SourceEventId, Move)]) -> Vec<Envelope> {
        self.head += 1;
        let (height, hash, at) = (self.head, hash_of(self.head, self.fork), time_of(self.head, self.fork));
        let mut out = Vec::new();
        for (index, (source, what)) in (0_i32..).zip(sources) {
            let id = EventId::of(source, 0);
            self.stubs(what, height, at).await;
            let tx = vec![0_u8; 32];
            let signed = if what.to.is_none() { -what.qty } else { what.qty };
            let (from, to) = (what.from.map(|at| account(at).0), what.to.map(|at| account(at).0));
            self.run(
                "insert into ledger.normalized_events
                        (id, source_event_id, sub_index, network_id, event_kind, asset_id, collection_id,
                         block_number, block_hash, tx_hash, event_index, event_time, finality_status,
                         from_account_id, to_account_id, qty_delta)
                 values ($1, $2, '0', 1, $3::text::ledger.event_kind, $4, $5, $6, $7, $8, $9, $10, 'pending', $11, $12,
                         $13::bigint::numeric)
                 on conflict (id) do update
                    set block_number = $6, block_hash = $7, event_index = $9, event_time = $10,
                        finality_status = 'pending', is_reverted = false",
                &[
                    &id.0,
                    &source.as_str(),
                    &what.kind(),
                    &what.asset().0,
                    &collection(what.contract).0,
                    &height,
                    &hash,
                    &tx,
                    &index,
                    &at,
                    &from,
                    &to,
                    &signed,
                ],
            )
            .await;
            for (leg, side, qty) in [(0_i16, from, -what.qty), (1, to, what.qty)] {
                if let Some(side) = side {
                    self.run(
                        "insert into ledger.unfinalized_deltas
                                (asset_id, account_id, normalized_event_id, leg, network_id, block_number, qty_delta)
                         values ($1, $2, $3, $4, 1, $5, $6::bigint::numeric)
                         on conflict (asset_id, account_id, normalized_event_id, leg) do update
                            set block_number = $5",
                        &[&what.asset().0, &side, &id.0, &leg, &height, &qty],
                    )
                    .await;
                }
            }
            let event = Event { id, what: *what, height, hash: hash.clone(), index, status: "pending" };
            self.events.insert(id, event);
            let told = json!({
                "event_id": id, "source_event_id": source, "sub_index": "0", "kind": what.kind(),
                "asset_id": what.asset(), "collection_id": collection(what.contract),
                "token_id": what.token.to_string(), "from_account_id": from, "to_account_id": to,
                "qty": what.qty.to_string(), "tx_hash": hex(&tx), "event_index": index,
                "finality_status": "pending",
            });
            let block = json!({
                "network_id": 1, "block_number": height, "block_hash": hex(&hash),
                "event_time": at.format(&Rfc3339).expect("a time"), "events": [told],
            });
            out.push(envelope("ledger.event.normalized", block));
        }
        out.push(envelope("ledger.block.normalized", json!({ "network_id": 1, "height": height })));
        out
    }

    async fn stubs(&self, what: &Move, height: i64, at: OffsetDateTime) {
        let address_of = contract(what.contract);
        let contract_id = ContractId::of(NETWORK, &address_of);
        let collection_id = collection(what.contract);
        self.run(
            "insert into catalog.contracts (id, network_id, address_normalized, standard_id)
             values ($1, 1, $2, $3) on conflict do nothing",
            &[&contract_id.0, &address_of, &standard(what.contract)],
        )
        .await;
        self.run(
            "insert into catalog.collections (id, network_id, contract_id, created_at) values ($1, 1, $2, $3)
             on conflict do nothing",
            &[&collection_id.0, &contract_id.0, &at],
        )
        .await;
        self.run(
            "insert into catalog.assets (id, network_id, collection_id, token_id_raw, standard_id,
                                         is_fungible_class, first_seen_block, created_at)
             values ($1, 1, $2, $3, $4, $5, $6, $7) on conflict do nothing",
            &[
                &what.asset().0,
                &collection_id.0,
                &what.token.to_string(),
                &standard(what.contract),
                &(what.contract != 0),
                &height,
                &at,
            ],
        )
        .await;
        for side in what.from.iter().chain(&what.to) {
            self.run(
                "insert into ledger.accounts (id, network_id, address_normalized, first_seen_at)
                 values ($1, 1, $2, $3) on conflict do nothing",
                &[&account(*side).0, &address(*side), &at],
            )
            .await;
        }
    }

    /// Events at or below `height` are confirmed.
    pub async fn confirm(&mut self, height: i64) -> Vec<Envelope> {
        let mut assets = BTreeSet::new();
        for event in self.events.values_mut() {
            if event.status == "pending" && event.height <= height {
                event.status = "confirmed";
                assets.insert(event.what.asset());
            }
        }
        self.run("update ledger.network_progress set confirmed_height = $1", &[&height]).await;
        // Said by earlier versions, and perhaps still in somebody's stream.
        vec![changed("confirmed", height, &assets)]
    }

    /// Events at or below `height` are final and applied.
    pub async fn finalize(&mut self, height: i64) -> Vec<Envelope> {
        let mut assets = BTreeSet::new();
        let ready: Vec<Event> = self
            .events
            .values()
            .filter(|event| matches!(event.status, "pending" | "confirmed") && event.height <= height)
            .cloned()
            .collect();
        for event in ready {
            assets.insert(event.what.asset());
            let asset = event.what.asset().0;
            for (side, qty) in [(event.what.from, -event.what.qty), (event.what.to, event.what.qty)] {
                if let Some(side) = side {
                    self.run(
                        "insert into ledger.ownership_current as o (asset_id, account_id, network_id, qty, updated_at)
                         values ($1, $2, 1, $3::bigint::numeric, now())
                         on conflict (asset_id, account_id) do update set qty = o.qty + excluded.qty",
                        &[&asset, &account(side).0, &qty],
                    )
                    .await;
                }
            }
            let made = match event.what.kind() {
                "mint" => event.what.qty,
                "burn" => -event.what.qty,
                _ => 0,
            };
            self.run(
                "update catalog.assets set supply = supply + $2::bigint::numeric where id = $1",
                &[&asset, &made],
            )
            .await;
            self.run("update catalog.assets set is_burned = supply = 0 where id = $1", &[&asset]).await;
            self.run("delete from ledger.unfinalized_deltas where normalized_event_id = $1", &[&event.id.0])
                .await;
            self.events.get_mut(&event.id).expect("known").status = "finalized";
        }
        self.run("delete from ledger.ownership_current where qty = 0", &[]).await;
        self.run("update ledger.network_progress set finalized_height = $1", &[&height]).await;
        self.finalized = height;
        vec![
            changed("finalized", height, &assets),
            envelope("ledger.finality.advanced", json!({ "network_id": 1, "finalized_height": height })),
        ]
    }

    /// Blocks above `ancestor` leave the chain; gives what they held, to be included again.
    pub async fn reorg(&mut self, ancestor: i64) -> (Vec<Envelope>, Vec<(SourceEventId, Move)>) {
        assert!(ancestor >= self.finalized);
        let mut out = Vec::new();
        let mut held = Vec::new();
        let mut assets = BTreeSet::new();
        let gone: Vec<Event> = self
            .events
            .values()
            .filter(|event| event.status != "reverted" && event.height > ancestor)
            .cloned()
            .collect();
        for event in gone {
            assets.insert(event.what.asset());
            let rows = self
                .conn
                .query(
                    "revert",
                    "update ledger.normalized_events set finality_status = 'reverted', is_reverted = true
                      where id = $1 returning source_event_id",
                    &[&event.id.0],
                )
                .await
                .expect("reverts");
            held.push((SourceEventId::from_stored(rows[0].get(0)), event.what));
            self.run("delete from ledger.unfinalized_deltas where normalized_event_id = $1", &[&event.id.0])
                .await;
            self.run(
                "insert into ledger.orphaned_blocks (network_id, block_hash, block_number) values (1, $1, $2)
                 on conflict do nothing",
                &[&event.hash, &event.height],
            )
            .await;
            self.events.get_mut(&event.id).expect("known").status = "reverted";
            out.push(envelope("ledger.event.reverted", named(event.id, &event.what, event.height)));
        }
        out.push(changed("reorg", ancestor, &assets));
        self.head = ancestor;
        self.fork += 1;
        (out, held)
    }

    /// Runs statements that must succeed.
    pub async fn run(&self, sql: &str, params: &[tidemark_store::db::Param<'_>]) {
        self.conn.execute("write the test's ledger", sql, params).await.expect("the test's ledger takes it");
    }

    /// Projects a batch in one transaction.
    pub async fn project(&self, batch: &[Envelope]) -> Vec<Draft> {
        project(&self.db, batch).await.drafts
    }

    /// Latest balances of the model.
    pub fn balances(&self) -> BTreeMap<(Uuid, Uuid), i64> {
        let mut all = BTreeMap::new();
        for event in self.events.values().filter(|event| event.status != "reverted") {
            for (side, qty) in [(event.what.from, -event.what.qty), (event.what.to, event.what.qty)] {
                if let Some(side) = side {
                    *all.entry((event.what.asset().0, account(side).0)).or_insert(0) += qty;
                }
            }
        }
        all.retain(|_, qty| *qty != 0);
        all
    }

    /// Every projection table as text, without updated_at: what its rows say now, not what they said when written.
    pub async fn dump(&self) -> BTreeMap<&'static str, Vec<String>> {
        let mut all = BTreeMap::new();
        for table in TABLES {
            let shown = match *table {
                "asset_cards" => "cards_now",
                "ownership_view" => "ownership_now",
                other => other,
            };
            let sql =
                format!("select (to_jsonb(t) - 'updated_at')::text from projection.{shown} t order by 1");
            let rows = self.conn.query("dump", &sql, &[]).await.expect("dumps");
            all.insert(*table, rows.iter().map(|row| row.get(0)).collect());
        }
        all
    }

    /// One number.
    pub async fn number(&self, sql: &str) -> i64 {
        self.conn.query_one("count", sql, &[]).await.expect("counts").get(0)
    }
}

pub const TABLES: &[&str] = &[
    "asset_cards",
    "ownership_view",
    "collection_holders",
    "collection_stats",
    "account_summaries",
    "transfers",
];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold("0x".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}
/// The same batch from somebody who does not say token ids: then everything is read from the ledger.
pub fn without_tokens(batch: &[Envelope]) -> Vec<Envelope> {
    let mut batch = batch.to_vec();
    for envelope in &mut batch {
        let events = envelope.payload.get_mut("events").and_then(Value::as_array_mut);
        for event in events.into_iter().flatten().filter_map(Value::as_object_mut) {
            event.remove("token_id");
        }
    }
    batch
}
fn named(id: EventId, what: &Move, height: i64) -> Value {
    json!({ "network_id": 1, "event_id": id, "asset_id": what.asset(), "block_number": height })
}
fn changed(reason: &str, height: i64, assets: &BTreeSet<AssetId>) -> Envelope {
    envelope(
        "ledger.ownership.changed",
        json!({ "network_id": 1, "reason": reason, "height": height, "assets": assets }),
    )
}

/// As live does it with a large batch: owners on a second connection wherever that goes.
pub async fn project(db: &Db, batch: &[Envelope]) -> Projected {
    let mut conn = db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    let done = project_in(&tx, batch, Some(&Beside { db: db.clone(), pairs_min: 1 })).await;
    tx.commit().await.expect("commits");
    done
}

/// The same in a transaction of the caller's.
pub async fn project_in(tx: &Tx<'_>, batch: &[Envelope], beside: Option<&Beside>) -> Projected {
    let batch: Vec<&Envelope> = batch.iter().collect();
    let mut done = Projected::default();
    for (network, keys) in touched(&batch).expect("readable") {
        let one = rebuild_keys(tx, network, &keys, beside).await.expect("projects");
        done.rows += one.rows;
        done.drafts.extend(one.drafts);
    }
    done
}

/// (subject's event, event_id) of the transfers in drafts.
pub fn said(drafts: &[Draft]) -> Vec<(String, String)> {
    drafts
        .iter()
        .filter(|draft| draft.subject.to_string().starts_with("projection.transfer."))
        .flat_map(|draft| {
            let subject = draft.subject.to_string();
            let event = subject.trim_start_matches("projection.transfer.").trim_end_matches(".v1").to_owned();
            let transfers = draft.payload["transfers"].as_array().expect("a list").clone();
            let id = |one: Value| one["event_id"].as_str().expect("an id").to_owned();
            transfers.into_iter().map(move |one| (event.clone(), id(one)))
        })
        .collect()
}
