//! A small believable data set: two networks (one live, one behind), named, stub, hostile and unreliable
//! collections, finalized and unfinalized rows, a transfer a reorg took back, raw rows, a stream, and something
//! on every part of the operator page.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "shared by several test binaries and an example")]

use std::collections::BTreeMap;
use std::fmt::Write as _;

use sha2::{Digest, Sha256};
use tidemark_api::{ApiConfig, ApiState, Woken};
use tidemark_model::ids::{AccountId, AssetId, CollectionId, EventId, NetworkId, SourceEventId};
use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Db, DbOptions};
use tidemark_testkit::pg::TestDb;
use uuid::Uuid;

pub const ETH: i32 = 1;
pub const POLYGON: i32 = 137;
pub const HEAD: i64 = 21_403_200;
pub const FINALIZED: i64 = 21_403_136;
pub const START: i64 = 21_400_000;
pub const HOSTILE: &str = "<script>alert(1)</script>\u{202e}Evil \"quoted\" & co";

pub struct Seed {
    pub db: TestDb,
    pub owner: Db,
    pub state: ApiState,
    pub woken: Woken,
    /// Built once: making the OpenAPI document is most of the work.
    pub router: axum::Router,
    pub collections: Vec<(i32, String, &'static str)>,
    pub accounts: Vec<String>,
    pub transfers: Vec<Moved>,
}

#[derive(Clone)]
pub struct Moved {
    pub network: i32,
    pub height: i64,
    pub event_index: i32,
    pub event_id: Uuid,
    pub collection: usize,
    pub token: String,
    pub from: Option<usize>,
    pub to: Option<usize>,
    pub qty: u64,
    pub tx_hash: [u8; 32],
    pub reverted: bool,
}

pub fn bytes(of: &str) -> [u8; 32] {
    Sha256::digest(of.as_bytes()).into()
}
pub fn address(of: &str) -> String {
    format!("0x{}", hex::encode(&bytes(of)[..20]))
}
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
fn time_of(height: i64) -> String {
    format!("(now() - interval '{} seconds')", (HEAD - height) * 12 + 4)
}

pub async fn seed() -> anyhow::Result<Seed> {
    seed_with(ApiConfig { requests_per_minute: 100_000, stream_poll_ms: 20, ..ApiConfig::default() }).await
}

pub async fn seed_with(config: ApiConfig) -> anyhow::Result<Seed> {
    let mut seed = open(config).await?;
    seed.partitions().await?;
    seed.fill().await?;
    Ok(seed)
}

/// A migrated database with nothing in it.
pub async fn empty() -> anyhow::Result<Seed> {
    open(ApiConfig { requests_per_minute: 100_000, ..ApiConfig::default() }).await
}

async fn open(config: ApiConfig) -> anyhow::Result<Seed> {
    let db = TestDb::new().await?;
    let url = RedactedUrl::parse(&db.url)?;
    let owner = Db::open(&url, &DbOptions::default())?;
    let role = DbOptions {
        // Two cores shared with many other tests: the limit is for broken plans, not for a busy machine.
        statement_timeout: Some(std::time::Duration::from_secs(30)),
        ..tidemark_api::db_options(8)
    };
    let app = Db::open(&url, &role)?;
    let woken = Woken::default();
    let state = ApiState::new(app.clone(), app, config, woken.clone());
    let collections = vec![
        (ETH, address("harbour"), "erc721"),
        (ETH, address("driftwood"), "erc1155"),
        (ETH, address("hostile"), "erc721"),
        (ETH, address("stub"), "erc721"),
        (POLYGON, address("kelp"), "erc721"),
    ];
    let accounts: Vec<String> = (0..24).map(|n| address(&format!("account {n}"))).collect();
    let transfers = story();
    Ok(Seed {
        db,
        owner,
        router: tidemark_api::router(state.clone()),
        state,
        woken,
        collections,
        accounts,
        transfers,
    })
}

/// Mints first, then moves; the newest are above the tidemark, one of them was taken back.
fn story() -> Vec<Moved> {
    let mut moves = Vec::new();
    let mut owners: BTreeMap<(usize, String), usize> = BTreeMap::new();
    let mut dice = 7_u64;
    let mut roll = move |sides: u64| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (dice >> 33) % sides
    };
    for step in 0..360_i64 {
        let network = if step % 6 == 5 { POLYGON } else { ETH };
        let collection = match (network, roll(10)) {
            (POLYGON, _) => 4,
            (_, 0..=4) => 0,
            (_, 5..=6) => 1,
            (_, 7..=8) => 2,
            _ => 3,
        };
        let token = match collection {
            1 => (roll(4) + 1).to_string(),
            2 if step < 8 => {
                "115792089237316195423570985008687907853269984665640564039457584007913129639935".into()
            }
            _ => (roll(40) + 1).to_string(),
        };
        // The last stretch is dense and above the finalized height.
        let height = if step < 320 { START + step * 9 } else { FINALIZED - 4 + (step - 320) * 68 / 40 };
        let to = usize::try_from(roll(24)).expect("small");
        let key = (collection, token.clone());
        let from = if collection == 1 { None } else { owners.get(&key).copied() };
        owners.insert(key, to);
        let event_index = i32::try_from(roll(90)).expect("small");
        let tx_hash = bytes(&format!("tx {network} {height} {}", step / 2 * 2));
        let source =
            SourceEventId::evm(NetworkId(network), &tx_hash, u32::try_from(event_index).expect("small"));
        moves.push(Moved {
            network,
            height,
            event_index: event_index + i32::try_from(step % 7).expect("small") * 100,
            event_id: EventId::of(&source, u32::try_from(step).expect("small")).0,
            collection,
            token,
            from,
            to: Some(to),
            qty: if collection == 1 { roll(5) + 1 } else { 1 },
            tx_hash,
            reverted: step == 352,
        });
    }
    moves
}

impl Seed {
    pub fn collection_id(&self, at: usize) -> Uuid {
        let (network, address, _) = &self.collections[at];
        CollectionId::of(NetworkId(*network), address).0
    }
    pub fn asset_id(&self, collection: usize, token: &str) -> Uuid {
        let (network, address, standard) = &self.collections[collection];
        let network = NetworkId(*network);
        AssetId::of(network, CollectionId::of(network, address), token, standard).0
    }
    pub fn account_id(&self, network: i32, at: usize) -> Uuid {
        AccountId::of(NetworkId(network), &self.accounts[at]).0
    }
    pub async fn run(&self, sql: &str) -> anyhow::Result<()> {
        self.owner.conn().await?.batch("seed", sql).await?;
        Ok(())
    }

    /// What the partition manager makes, with the same secondary indexes.
    async fn partitions(&self) -> anyhow::Result<()> {
        let mut sql = String::new();
        for network in [ETH, POLYGON] {
            for table in ["raw.blocks", "raw.transactions", "raw.events", "raw.tx_lookup", "raw.block_lookup"]
            {
                let _ = writeln!(
                    sql,
                    "create table {table}_{network} partition of {table} for values in ({network});"
                );
            }
            let _ = write!(
                sql,
                "create index on raw.tx_lookup_{network} (id); create index on raw.block_lookup_{network} (id);
                 create table projection.transfers_{network} partition of projection.transfers
                     for values in ({network}) partition by range (height);\n"
            );
            for (from, to) in [(0_i64, 21_402_000_i64), (21_402_000, 50_000_000)] {
                let name = format!("projection.transfers_{network}_{from}");
                let _ = write!(
                    sql,
                    "create table {name} partition of projection.transfers_{network} for values from ({from}) to ({to});
                     create index on {name} (asset_id, height desc, event_index desc, sub_index desc);
                     create index on {name} (collection_id, height desc, event_index desc, sub_index desc);
                     create index on {name} (from_account, height desc, event_index desc, sub_index desc);
                     create index on {name} (to_account, height desc, event_index desc, sub_index desc);\n"
                );
            }
        }
        self.run(&sql).await
    }

    async fn fill(&mut self) -> anyhow::Result<()> {
        self.networks().await?;
        let mut sql = String::new();
        for moved in self.transfers.clone() {
            self.transfer_sql(&mut sql, &moved);
        }
        self.balances_sql(&mut sql);
        self.cards_sql(&mut sql);
        self.run(&sql).await?;
        self.operator().await?;
        self.run("analyze").await
    }

    async fn networks(&self) -> anyhow::Result<()> {
        self.run(&format!(
            "insert into projection.network_status (network_id, slug, family, start_block, confirmations, head_height,
                 head_time, ingested_height, normalized_height, finalized_height, projected_height, finalized_at,
                 events_total, reorgs_total) values
             ({ETH}, 'ethereum', 'evm', {START}, 12, {HEAD}, {head_time}, {HEAD}, {HEAD}, {FINALIZED}, {HEAD},
                 now() - interval '12 seconds', 1284311, 3),
             ({POLYGON}, 'polygon', 'evm', {START}, 64, {HEAD} + 40, now(), {HEAD}, {HEAD} - 2, {FINALIZED}, {HEAD} - 4,
                 now() - interval '40 seconds', 55012, 0);
             insert into projection.finality_lines (network_id, height) values ({ETH}, {FINALIZED}), ({POLYGON}, {FINALIZED});
             insert into projection.network_activity (network_id, bucket, events)
                 select {ETH}, date_bin('10 seconds', now(), 'epoch') - n * interval '10 seconds',
                        (40 + 30 * sin(n / 7.0) + (n * 37 % 23))::bigint from generate_series(0, 90) n
                 union all
                 select {POLYGON}, date_bin('10 seconds', now(), 'epoch') - n * interval '10 seconds',
                        (8 + n * 13 % 11)::bigint from generate_series(0, 90) n where n % 5 <> 0;",
            head_time = time_of(HEAD),
        ))
        .await
    }

    pub fn transfer_sql(&self, sql: &mut String, moved: &Moved) {
        let network = moved.network;
        let account = |at: Option<usize>| {
            at.map_or("null".to_owned(), |at| format!("'{}'", self.account_id(network, at)))
        };
        let kind = if moved.from.is_none() { "mint" } else { "transfer" };
        let block = hex::encode(bytes(&format!("block {network} {}", moved.height)));
        let parent = hex::encode(bytes(&format!("block {network} {}", moved.height - 1)));
        let tx = hex::encode(moved.tx_hash);
        let (height, index, time) = (moved.height, moved.event_index, time_of(moved.height));
        let asset = self.asset_id(moved.collection, &moved.token);
        let collection = self.collection_id(moved.collection);
        let _ = write!(
            sql,
            "insert into projection.transfers (network_id, height, event_index, sub_index, event_id, kind, asset_id,
                 collection_id, from_account, to_account, qty, tx_hash, block_hash, event_time, is_reverted)
             values ({network}, {height}, {index}, 0, '{event}', '{kind}', '{asset}', '{collection}', {from}, {to},
                 {qty}, '\\x{tx}', '\\x{block}', {time}, {reverted});
             insert into projection.block_cards (network_id, height, hash, parent_hash, block_time, tx_count, event_count)
             values ({network}, {height}, '\\x{block}', '\\x{parent}', {time}, null, 1)
                 on conflict (network_id, height) do update set event_count = projection.block_cards.event_count + 1;
             insert into raw.tx_lookup (network_id, block_height, id, tx_index, block_time)
             values ({network}, {height}, '\\x{tx}', 3, {time});
             insert into raw.events (network_id, block_height, tx_id, event_index, tx_index, block_hash, emitter, topics, data)
             values ({network}, {height}, '\\x{tx}', {index}, 3, '\\x{block}', '\\x{emitter}', '\\x{block}{tx}', '\\x{tx}');
             insert into ledger.normalized_events (id, source_event_id, sub_index, network_id, event_kind, asset_id,
                 collection_id, block_number, block_hash, tx_hash, event_index, event_time, finality_status, is_reverted)
             values ('{event}', '{network}:0x{tx}:{index}', '0', {network}, '{kind}', '{asset}', '{collection}', {height},
                 '\\x{block}', '\\x{tx}', {index}, {time}, 'finalized', {reverted});\n",
            event = moved.event_id,
            from = account(moved.from),
            to = account(moved.to),
            qty = moved.qty,
            reverted = moved.reverted,
            emitter = &self.collections[moved.collection].1[2..],
        );
        if height > FINALIZED || moved.reverted {
            return;
        }
        for (leg, at, sign) in [(0, moved.from, "-"), (1, moved.to, "")] {
            if let Some(at) = at {
                let _ = write!(
                    sql,
                    "insert into ledger.ownership_history (asset_id, account_id, network_id, block_number, event_index,
                         qty_delta, event_time, normalized_event_id, leg)
                     values ('{asset}', '{account}', {network}, {height}, {index}, {sign}{qty}, {time}, '{event}', {leg});\n",
                    account = self.account_id(network, at),
                    qty = moved.qty,
                    event = moved.event_id,
                );
            }
        }
    }

    /// ownership_view, collection_holders and account_summaries out of the story.
    fn balances_sql(&self, sql: &mut String) {
        let mut latest: BTreeMap<(usize, String, usize), (i64, i64, i64)> = BTreeMap::new();
        let mut seen: BTreeMap<(i32, usize), (i64, i64, i64)> = BTreeMap::new();
        for moved in self.transfers.iter().filter(|moved| !moved.reverted) {
            let qty = i64::try_from(moved.qty).expect("small");
            for (at, delta) in [(moved.from, -qty), (moved.to, qty)] {
                let Some(at) = at else { continue };
                let entry = latest.entry((moved.collection, moved.token.clone(), at)).or_default();
                entry.0 += delta;
                if moved.height <= FINALIZED {
                    entry.1 += delta;
                }
                entry.2 = entry.2.max(moved.height);
                let account = seen.entry((moved.network, at)).or_insert((moved.height, moved.height, 0));
                account.1 = account.1.max(moved.height);
                account.2 += 1;
            }
        }
        let mut holders: BTreeMap<(usize, usize), (i64, i64)> = BTreeMap::new();
        let mut held: BTreeMap<(i32, usize), i64> = BTreeMap::new();
        for ((collection, token, account), (qty, finalized, height)) in &latest {
            if *qty <= 0 && *finalized <= 0 {
                continue;
            }
            let network = self.collections[*collection].0;
            let (status, open) = stored(*height);
            let _ = write!(
                sql,
                "insert into projection.ownership_view (asset_id, account_id, network_id, collection_id, qty,
                     qty_finalized, finality_status, open_height, updated_at)
                 values ('{}', '{}', {network}, '{}', {}, {}, '{status}', {open}, {});\n",
                self.asset_id(*collection, token),
                self.account_id(network, *account),
                self.collection_id(*collection),
                (*qty).max(0),
                (*finalized).max(0),
                time_of(*height),
            );
            if *qty > 0 {
                let holder = holders.entry((*collection, *account)).or_default();
                holder.0 += 1;
                holder.1 += qty;
                *held.entry((network, *account)).or_default() += 1;
            }
        }
        for ((collection, account), (assets, qty)) in &holders {
            let _ = write!(
                sql,
                "insert into projection.collection_holders (collection_id, account_id, asset_count, qty)
                 values ('{}', '{}', {assets}, {qty});\n",
                self.collection_id(*collection),
                self.account_id(self.collections[*collection].0, *account),
            );
        }
        for ((network, account), (first, last, count)) in &seen {
            let assets = held.get(&(*network, *account)).copied().unwrap_or(0);
            let _ = write!(
                sql,
                "insert into projection.account_summaries (account_id, network_id, address, asset_count, transfer_count,
                     first_seen_at, last_seen_at, updated_at)
                 values ('{}', {network}, '{}', {assets}, {count}, {}, {}, now());\n",
                self.account_id(*network, *account),
                self.accounts[*account],
                time_of(*first),
                time_of(*last),
            );
        }
        for (at, (network, address, standard)) in self.collections.iter().enumerate() {
            let name = [
                Some("Harbour Lights"),
                Some("Driftwood Editions"),
                Some(HOSTILE),
                None,
                Some("Kelp Forest"),
            ][at];
            let of: Vec<_> = self.transfers.iter().filter(|moved| moved.collection == at).collect();
            let tokens: std::collections::BTreeSet<_> = of.iter().map(|moved| &moved.token).collect();
            let owners = holders.keys().filter(|(collection, _)| *collection == at).count();
            let supply: i64 = holders
                .iter()
                .filter(|((collection, _), _)| *collection == at)
                .map(|(_, (_, qty))| qty)
                .sum();
            let _ = write!(
                sql,
                "insert into projection.collection_stats (collection_id, network_id, address, standard, name, verified,
                     is_stub, reliability, unreliable_reason, owners_count, asset_count, total_supply, stub_count,
                     transfer_count, last_height, updated_at)
                 values ('{}', {network}, '{address}', '{standard}', {}, {}, {}, {}, {}, {owners}, {}, {supply}, 0, {}, {}, now());\n",
                self.collection_id(at),
                name.map_or("null".to_owned(), quoted),
                at == 0,
                name.is_none(),
                if at == 2 { "'unreliable'" } else { "'ok'" },
                if at == 2 { "'Transfers do not match ownerOf.'" } else { "null" },
                tokens.len(),
                of.len(),
                of.last().map_or(0, |moved| moved.height),
            );
        }
    }

    fn cards_sql(&self, sql: &mut String) {
        let mut tokens: BTreeMap<(usize, &str), (i64, u64)> = BTreeMap::new();
        for moved in self.transfers.iter().filter(|moved| !moved.reverted) {
            let entry = tokens.entry((moved.collection, &moved.token)).or_default();
            entry.0 = entry.0.max(moved.height);
            if moved.from.is_none() {
                entry.1 += moved.qty;
            }
        }
        for ((collection, token), (height, supply)) in tokens {
            let (status, open) = stored(height);
            let name = match collection {
                0 => format!("'Harbour Light #{token}'"),
                1 => format!("'Driftwood No. {token}'"),
                2 => quoted(HOSTILE),
                _ => "null".to_owned(),
            };
            let _ = write!(
                sql,
                "insert into projection.asset_cards (asset_id, network_id, collection_id, token_id, standard, name, is_stub,
                     is_burned, supply, history, finality_status, open_height, last_height, updated_at)
                 values ('{}', {}, '{}', '{token}', '{}', {name}, {}, false, {supply}, '{}', '{status}', {open}, {height}, {});\n",
                self.asset_id(collection, token),
                self.collections[collection].0,
                self.collection_id(collection),
                self.collections[collection].2,
                name == "null",
                if collection == 2 { "partial" } else { "complete" },
                time_of(height),
            );
        }
    }

    async fn operator(&self) -> anyhow::Result<()> {
        self.run(&format!(
            "insert into system.network_heads (network_id, latest_height, latest_hash, finalized_height) values
                 ({ETH}, {HEAD}, '\\x01', {FINALIZED}), ({POLYGON}, {HEAD} + 40, '\\x02', {FINALIZED});
             insert into system.sync_cursors (id, network_id, cursor_type, start_height, last_processed_block) values
                 ('evm:1:shard-0', {ETH}, 'height', {START}, {HEAD}), ('evm:137:shard-0', {POLYGON}, 'height', {START}, {HEAD});
             insert into ledger.network_progress (network_id, head_height, finalized_height, history_height) values
                 ({ETH}, {HEAD}, {FINALIZED}, {FINALIZED} - 900), ({POLYGON}, {HEAD} - 2, {FINALIZED}, {FINALIZED});
             insert into system.bus_partitions (stream, part, next_pseq, published_pseq) values
                 ('chain', 0, 90211, 90210), ('ledger', 0, 411902, 411850);
             insert into system.consumer_positions (handler_kind, stream, part, pseq, owner) values
                 ('ledger', 'chain', 0, 90208, 'node-a'), ('projector', 'ledger', 0, 411800, 'node-a');
             insert into system.processes (instance, role, state, restarts, last_error) values
                 ('node-a', 'ingester', 'running', 0, null), ('node-a', 'relay', 'running', 0, null),
                 ('node-a', 'ledger', 'running', 1, 'deadlock detected'), ('node-a', 'projector', 'running', 0, null),
                 ('node-a', 'api', 'running', 0, null);
             insert into system.dlq (handler_kind, source_topic, stream, part, pseq, partition_key, event_id, envelope, kind,
                 error, attempts) values ('ledger', 'chain.block.ingested.v1', 'chain', 0, 88012, '137',
                 '{dlq}', '{{}}', 'poison', 'block 21401007 holds a log of 1 topic where ERC-721 has 4', 10);
             insert into system.parked_keys (handler_kind, stream, part, partition_key, pseq)
                 values ('ledger', 'chain', 0, '137', 88012);
             insert into ledger.quarantine (normalized_event_id, consumer, network_id, source_event_id, block_number, reason,
                 evidence) values ('{dlq}', 'state-updater', {ETH}, '1:0xabc:4', {START} + 12,
                 'balance would become negative', '{{}}');
             insert into system.reorg_checkpoints (network_id, block_number, block_hash, is_canonical, reorg_id) values
                 ({ETH}, {HEAD} - 30, '\\x0a', false, 'r1'), ({ETH}, {HEAD} - 29, '\\x0b', false, 'r1');",
            dlq = Uuid::from_u128(0xd1),
        ))
        .await
    }

    /// Appends a message to the live stream, as relay and projector do.
    pub async fn say(&self, subject: &str, payload: &serde_json::Value) -> anyhow::Result<i64> {
        let conn = self.owner.conn().await?;
        let envelope = serde_json::json!({ "payload": payload });
        let row = conn
            .query_one(
                "say",
                "with made as (
                     insert into system.outbox_events (id, aggregate_type, aggregate_id, event_type, topic, stream, part,
                         partition_key, correlation_id, retention_class, tenant_id, envelope)
                     values (gen_random_uuid(), 't', 't', $1, $1, 'projection', 0, '0', gen_random_uuid(), 'standard', 't', $2)
                     returning day, seq),
                 numbered as (
                     insert into system.bus_partitions (stream, part, next_pseq) values ('projection', 0, 2)
                     on conflict (stream, part) do update set next_pseq = system.bus_partitions.next_pseq + 1
                     returning next_pseq - 1 as pseq)
                 insert into system.bus_log (stream, part, pseq, outbox_day, outbox_seq)
                 select 'projection', 0, numbered.pseq, made.day, made.seq from made, numbered returning pseq",
                &[&subject, &envelope],
            )
            .await?;
        Ok(row.get(0))
    }

    /// The payload of a message of transfers as the projector writes it.
    pub fn payload(&self, moved: &[&Moved]) -> serde_json::Value {
        let transfers: Vec<serde_json::Value> = moved.iter().map(|moved| self.transfer(moved)).collect();
        serde_json::json!({ "network_id": moved[0].network, "height": moved[0].height, "transfers": transfers })
    }

    fn transfer(&self, moved: &Moved) -> serde_json::Value {
        serde_json::json!({
            "event_id": moved.event_id, "network_id": moved.network, "kind": "transfer",
            "asset_id": self.asset_id(moved.collection, &moved.token),
            "collection_id": self.collection_id(moved.collection),
            "contract": self.collections[moved.collection].1, "token_id": moved.token,
            "from": moved.from.map(|at| self.accounts[at].clone()), "to": moved.to.map(|at| self.accounts[at].clone()),
            "qty": moved.qty.to_string(), "height": moved.height,
            "block_hash": format!("0x{}", hex::encode(bytes(&format!("block {} {}", moved.network, moved.height)))),
            "tx_hash": format!("0x{}", hex::encode(moved.tx_hash)), "event_index": moved.event_index,
            "sub_index": 0, "event_time": "2026-11-15T23:00:00Z", "finality_status": "pending",
        })
    }
}

/// What the projector stores of a row whose newest event is at `height`.
fn stored(height: i64) -> (&'static str, String) {
    if height <= FINALIZED { ("finalized", "null".to_owned()) } else { ("pending", height.to_string()) }
}
