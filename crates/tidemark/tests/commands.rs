//! What operators type, against a real database: the good answer, the bad answer, and their exit codes.

use std::process::{Command, Output};
use std::sync::Arc;

use alloy_primitives::U256;
use serde_json::{Value, json};
use tidemark_bus::Bus;
use tidemark_bus::postgres::PostgresBus;
use tidemark_bus::registry::Registry;
use tidemark_bus::relay::{Relay, RelayOptions};
use tidemark_bus::tail::Tails;
use tidemark_model::chain::{
    AssetRef, BlockRef, EventKind, Family, Network, OwnershipDelta, ParsedBlock, RawEvent, Standard,
};
use tidemark_model::envelope::Draft;
use tidemark_model::finality::FinalityStatus;
use tidemark_model::ids::{BlockHash, Height, HeightRange, NetworkId, SourceEventId, TxId};
use tidemark_model::quantity::SignedQty;
use tidemark_model::redact::RedactedUrl;
use tidemark_model::subject::Subject;
use tidemark_pipeline::workers::{
    BlockInput, BlockOutcome, Cause, Openings, advance_finality, process_block,
};
use tidemark_store::dlq::{Kind, NewDeadLetter};
use tidemark_store::outbox::{Emitter, EmitterOptions, Partitions as Streams};
use tidemark_store::partitions::{PartitionSizes, Partitions};
use tidemark_store::{Db, DbOptions, bulk, cursor, dlq};
use tidemark_testkit::pg::TestDb;
use time::OffsetDateTime;

const NETWORK: NetworkId = NetworkId(7);
const KEY: &str = "7";

/// A database with one network, `seven`, and the binary beside it.
struct Desk {
    url: String,
    db: Db,
    network: Network,
    emitter: Emitter,
}

struct Answer {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Answer {
    #[track_caller]
    fn is(&self, code: i32, said: &[&str]) {
        assert_eq!(self.code, Some(code), "out: {}\nerr: {}", self.out, self.err);
        for part in said {
            assert!(
                self.out.contains(part) || self.err.contains(part),
                "{part:?} is not in\nout: {}\nerr: {}",
                self.out,
                self.err
            );
        }
    }
    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}\n{}", self.out, self.err))
    }
}

impl From<Output> for Answer {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

fn tidemark(args: &[&str], url: Option<&str>) -> Answer {
    let dir = std::env::temp_dir().join("tidemark-commands");
    std::fs::create_dir_all(&dir).expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidemark"));
    command.args(args).env_remove("TIDEMARK_CONFIG").env("USER", "olga").current_dir(dir);
    if let Some(url) = url {
        command.env("TIDEMARK__DATABASE__URL", url);
    }
    command.output().expect("runs").into()
}

impl Desk {
    async fn new() -> Self {
        let test = TestDb::new().await.expect("a database");
        let url = RedactedUrl::parse(&test.url).expect("a URL");
        let db = Db::open(&url, &DbOptions::default()).expect("a pool");
        let network = Network {
            id: NETWORK,
            slug: "seven".to_owned(),
            family: Family::Evm,
            start_block: Height(0),
            confirmations: 2,
            reorg_depth_max: 64,
        };
        let conn = db.conn().await.expect("connects");
        cursor::ensure_network(&conn, &network).await.expect("registers");
        cursor::ensure(&conn, &network, cursor::Shard::ONLY).await.expect("a cursor");
        // As the binary's own defaults have it.
        let streams = Streams::with_default(default_partitions()).with("projection", 1);
        let options = EmitterOptions { partitions: streams, ..EmitterOptions::default() };
        let emitter = Emitter::new(options, Arc::new(Registry::builtin()));
        Self { url: test.url, db, network, emitter }
    }
    fn run(&self, args: &[&str]) -> Answer {
        tidemark(args, Some(&self.url))
    }
    async fn sql(&self, sql: &str) {
        self.db.conn().await.expect("connects").batch("prepare a test", sql).await.expect("changes");
    }
    async fn count(&self, sql: &str) -> i64 {
        let conn = self.db.conn().await.expect("connects");
        conn.query_one("count", sql, &[]).await.expect("counts").get(0)
    }
    /// Heights 0..30 in three accepted ranges without events.
    async fn accepted(&self) {
        self.sql(
            "insert into raw.range_evidence (network_id, from_height, to_height, provider, head_seen, records,
                                             foreign_records, requests, checks, coverage)
             select 7, at, at + 10, 'test', 100, 0, 0, 1, '{}', 'with_records' from unnest('{0,10,20}'::bigint[]) at;
             update system.sync_cursors set last_processed_block = 29 where network_id = 7",
        )
        .await;
    }
    /// Token 1 goes to `a` and then to `b`, token 2 to `a`; the first `finalized + 1` blocks are final.
    async fn lived(&self, finalized: u64) {
        let acts = [(1, None, "a"), (1, Some("a"), "b"), (2, None, "a")];
        for (height, (token, from, to)) in (0..).zip(acts) {
            let block = block(height);
            let parsed =
                ParsedBlock { events: vec![movement(block, token, from, to)], quarantined: Vec::new() };
            let input = BlockInput {
                block,
                time: time_of(height),
                parsed: &parsed,
                chain_head: block.height,
                openings: &Openings::default(),
            };
            let mut conn = self.db.conn().await.expect("connects");
            let tx = conn.tx().await.expect("begins");
            let cause = Cause { id: format!("block {height}"), at: time_of(height) };
            let outcome = process_block(&tx, &self.network, &input, &cause).await.expect("processes");
            let BlockOutcome::Done(drafts) = outcome else { panic!("{outcome:?}") };
            self.emitter.append(&tx, &drafts).await.expect("appends");
            tx.commit().await.expect("commits");
        }
        let mut conn = self.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        let cause = Cause { id: "finality".into(), at: time_of(9) };
        advance_finality(&tx, &self.network, Height(finalized), None, &cause).await.expect("finalizes");
        tx.commit().await.expect("commits");
    }
    /// A dead letter that says that the ledger, or the chain, is final up to 2.
    async fn dead(&self, handler: &str, height: i64) -> i64 {
        let (stream, payload) = match handler {
            "ledger" => (
                "chain",
                json!({ "network_id": 7, "finalized_height": height, "finalized_hash": BlockHash([1; 32]),
                        "head_height": height }),
            ),
            _ => ("ledger", json!({ "network_id": 7, "finalized_height": height })),
        };
        let subject = Subject::new(stream, "finality", "advanced", 1).expect("a subject");
        let draft = Draft::derived(subject.clone(), &format!("{height}"), KEY.into(), payload, time_of(0));
        let envelope = self.emitter.envelope(&draft).expect("an envelope");
        let letter = NewDeadLetter {
            event_id: uuid::Uuid::from_u128(envelope.event_id.0),
            topic: subject.to_string(),
            pseq: height,
            partition_key: KEY.into(),
            envelope: serde_json::to_value(&envelope).expect("json"),
            kind: Kind::Poison,
            error: "it was a bad day".into(),
            chain: vec!["it was a bad day".into()],
            attempts: 8,
            versions: json!({}),
        };
        let part = self.emitter.partitions().place(stream, &envelope.tenant_id, KEY);
        let mut conn = self.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        dlq::insert(&tx, handler, stream, part, &[letter]).await.expect("writes");
        dlq::park(&tx, handler, stream, part, KEY, height).await.expect("parks");
        tx.commit().await.expect("commits");
        self.count("select max(id) from system.dlq").await
    }
    /// Gives everything in the outbox its number.
    async fn numbered(&self) {
        let tails = Arc::new(Tails::new(self.db.clone()));
        let bus: Arc<dyn Bus> = Arc::new(PostgresBus::new(self.db.clone(), Arc::clone(&tails)));
        let relay = Relay::new(self.db.clone(), bus, tails, RelayOptions::default());
        let lease = relay.claim().await.expect("claims").expect("nobody else holds it");
        relay.number(lease).await.expect("numbers");
    }
}

fn default_partitions() -> u16 {
    tidemark::config::Config::load(&tidemark::config::Sources::default()).expect("defaults").bus.partitions
}

fn time_of(height: u64) -> OffsetDateTime {
    let seconds = 1_700_000_000 + i64::try_from(height).expect("small") * 12;
    OffsetDateTime::from_unix_timestamp(seconds).expect("a time")
}

fn block(height: u64) -> BlockRef {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&height.to_be_bytes());
    BlockRef { height: Height(height), hash: BlockHash(hash) }
}

fn movement(block: BlockRef, token: u64, from: Option<&str>, to: &str) -> RawEvent {
    let leg =
        |account: &str, qty_delta| OwnershipDelta { account_addr_normalized: account.to_owned(), qty_delta };
    let one = U256::from(1);
    let lost = from.map(|from| leg(from, SignedQty::loss(one)));
    RawEvent {
        source_event_id: SourceEventId::evm(NETWORK, &block.hash.0, 0),
        sub_index: 0,
        event_kind: if from.is_some() { EventKind::Transfer } else { EventKind::Mint },
        asset_refs: vec![AssetRef {
            network_id: NETWORK,
            collection_addr_normalized: "0x00000000000000000000000000000000000000aa".to_owned(),
            token_id_raw: token.to_string(),
            standard: Standard::Erc721,
        }],
        ownership_deltas: lost.into_iter().chain([leg(to, SignedQty::gain(one))]).collect(),
        block_number: block.height,
        block_hash: block.hash,
        tx_hash: TxId::from(block.hash.0),
        event_index: 0,
        event_time: time_of(block.height.0),
        finality_status: FinalityStatus::Pending,
        blob_ref: None,
    }
}

#[tokio::test]
async fn a_fresh_database_has_nothing_to_complain_about() {
    let test = TestDb::empty().await.expect("a database");
    let run = |args: &[&str]| tidemark(args, Some(&test.url));
    run(&["verify", "ledger"]).is(1, &["ref.networks"]);
    run(&["migrate"]).is(0, &["Applied"]);
    run(&["verify", "completeness"]).is(0, &["No network is known yet."]);
    run(&["verify", "ledger"]).is(0, &["No network is known yet."]);
    run(&["digest"]).is(0, &["No network is known yet."]);
    run(&["dlq", "list"]).is(0, &["No dead letters."]);
    run(&["repair", "lookups"]).is(0, &[]);
    run(&["reconcile"]).is(0, &["asset_cards"]);
    run(&["verify", "ledger", "--network", "nine"]).is(2, &["no network nine"]);
    run(&["rewind", "--network", "nine", "--to", "3"]).is(2, &["no network nine"]);
}

#[test]
fn a_database_that_is_not_there_is_four_for_every_command() {
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").expect("binds").local_addr().expect("an address").port();
    let url = format!("postgres://u:CANARY@127.0.0.1:{port}/x");
    for args in [
        ["verify", "completeness"].as_slice(),
        &["digest"],
        &["digest", "diff", &url, &url],
        &["dlq", "list"],
        &["dlq", "discard", "1", "--reason", "x"],
        &["rebuild", "projection", "all"],
        &["reconcile"],
        &["replay", "--handler", "projector", "--from", "1", "--to", "2"],
    ] {
        let answer = tidemark(args, Some(&url));
        answer.is(4, &["cannot connect"]);
        assert!(!answer.err.contains("CANARY") && !answer.out.contains("CANARY"), "{}", answer.err);
    }
}

#[tokio::test]
async fn completeness_names_every_gap() {
    let desk = Desk::new().await;
    desk.run(&["verify", "completeness"]).is(0, &["seven: nothing was read yet."]);
    desk.accepted().await;
    desk.run(&["verify", "completeness"])
        .is(0, &["seven: heights 0 to 29 are complete", "3 accepted ranges"]);
    desk.sql("delete from raw.range_evidence where from_height = 10").await;
    desk.sql("update raw.range_evidence set to_height = 28 where from_height = 20").await;
    desk.run(&["verify", "completeness", "--network", "seven"])
        .is(3, &["not complete", "heights 10..20 were never accepted", "heights 28..30 were never accepted"]);
    desk.run(&["verify", "completeness", "--to", "9"]).is(0, &["heights 0 to 9 are complete"]);
    desk.run(&["verify", "completeness", "--from", "9", "--to", "3"]).is(2, &["no height"]);
    let answer = desk.run(&["verify", "completeness", "--json"]);
    answer.is(3, &[]);
    let gaps = json!([{ "from": 10, "to": 19 }, { "from": 28, "to": 29 }]);
    assert_eq!(answer.json()[0]["gaps"], gaps);
}

#[tokio::test]
async fn a_tampered_owner_is_named() {
    let desk = Desk::new().await;
    desk.lived(1).await;
    desk.run(&["verify", "ledger"]).is(0, &["seven: every invariant holds."]);
    desk.sql("update ledger.ownership_current set qty = 2").await;
    desk.run(&["verify", "ledger", "--network", "7"])
        .is(3, &["seven:", "owners_equal_the_log", "digest_equals_the_rows"]);
    let answer = desk.run(&["verify", "ledger", "--json"]);
    answer.is(3, &[]);
    assert_eq!(answer.json()[0]["sound"], json!(false));
}

#[tokio::test]
async fn digests_are_printed_and_compared() {
    let (one, other) = (Desk::new().await, Desk::new().await);
    one.run(&["digest"]).is(0, &["seven", "nothing is final yet"]);
    one.lived(1).await;
    other.lived(1).await;
    let digest = one.run(&["digest", "--json"]).json();
    assert_eq!(digest, other.run(&["digest", "--json"]).json());
    assert_eq!(digest[0]["height"], json!(1));
    one.run(&["digest", "--height", "1"]).is(0, &[digest[0]["digest"].as_str().expect("a digest")]);
    let diff = ["digest", "diff", one.url.as_str(), other.url.as_str()];
    tidemark(&diff, None).is(0, &["seven: owners are equal", "A is final up to 1, B up to 1"]);
    other.sql("update ledger.ownership_current set qty = 3").await;
    tidemark(&diff, None).is(3, &["seven: owners differ", "first differing asset", "owns 1", "owns 3"]);
    let answer = tidemark(&[diff.as_slice(), &["--json", "--network", "seven"]].concat(), None);
    answer.is(3, &[]);
    assert_eq!(answer.json()[0]["equal"], json!(false));
    tidemark(&[diff.as_slice(), &["--network", "nine"]].concat(), None).is(2, &["network nine"]);
    tidemark(&["digest", "diff", "CANARY secret", &one.url], None).is(2, &["postgres://"]);
}

#[tokio::test]
async fn dead_letters_are_listed_shown_and_discarded_for_a_reason() {
    let desk = Desk::new().await;
    let id = desk.dead("ledger", 2).await.to_string();
    desk.run(&["dlq", "list"])
        .is(3, &["chain.finality.advanced.v1", "it was a bad day", "dlq release --handler ledger --key 7"]);
    assert_eq!(desk.run(&["dlq", "list", "--json"]).json()["letters"][0]["number"], json!(2));
    desk.run(&["dlq", "list", "--handler", "projector"]).is(0, &["No dead letters."]);
    assert_eq!(desk.run(&["dlq", "show", &id]).json()["envelope"]["payload"]["network_id"], json!(7));
    desk.run(&["dlq", "show", "999"]).is(1, &["no dead letter 999"]);
    desk.run(&["dlq", "discard", &id]).is(2, &["--reason"]);
    desk.run(&["dlq", "discard", &id, "--reason", " "]).is(1, &["say why"]);
    desk.run(&["dlq", "discard", &id, "--reason", "a test"]).is(0, &["Discarded"]);
    desk.run(&["dlq", "discard", &id, "--reason", "a test"]).is(1, &["settled already"]);
    desk.run(&["dlq", "list"]).is(0, &["No dead letters."]);
    desk.run(&["dlq", "list", "--all"]).is(0, &["discarded"]);
    let audited = "select count(*) from system.audit_log
                    where actor = 'olga' and action = 'dlq.discard' and reason = 'a test'";
    assert_eq!(desk.count(audited).await, 1);
    assert_eq!(desk.count("select count(*) from system.parked_keys").await, 0);
}

#[tokio::test]
async fn dead_letters_are_retried_and_keys_released() {
    let desk = Desk::new().await;
    desk.lived(2).await;
    let (first, second) = (desk.dead("projector", 1).await.to_string(), desk.dead("projector", 2).await);
    let second = second.to_string();
    desk.run(&["dlq", "retry", "--dry-run"]).is(0, &["Would retry 2"]);
    desk.run(&["dlq", "retry", &second]).is(3, &["waits for an earlier letter"]);
    desk.run(&["dlq", "retry", "999"]).is(3, &["999 is not an open letter"]);
    desk.run(&["dlq", "retry", &first, "--by", "ivo", "--reason", "mended"]).is(0, &["Retried 1"]);
    desk.run(&["dlq", "release", "--handler", "projector", "--key", KEY])
        .is(0, &["Applied 1 letters", "free again"]);
    desk.run(&["dlq", "release", "--handler", "projector", "--key", KEY]).is(1, &["is not parked"]);
    // Nobody has configured the network here: the ledger cannot do it.
    let id = desk.dead("ledger", 2).await.to_string();
    desk.run(&["dlq", "retry", &id]).is(3, &["failed again", "not configured"]);
    desk.run(&["dlq", "release", "--handler", "ledger", "--key", KEY]).is(3, &["still parked"]);
    let audited = "select count(*) from system.audit_log
                    where (actor, action) in (('ivo', 'dlq.retried'), ('olga', 'dlq.released'))";
    assert_eq!(desk.count(audited).await, 2);
}

#[tokio::test]
async fn events_are_replayed_by_number_height_and_time() {
    let desk = Desk::new().await;
    desk.lived(1).await;
    desk.numbered().await;
    let all = desk.count("select count(*) from system.bus_log where stream = 'ledger'").await;
    assert!(all > 3, "{all}");
    let replay = |more: &[&str]| desk.run(&[["replay", "--handler", "projector"].as_slice(), more].concat());
    replay(&["--from", "1", "--to", "99", "--dry-run"]).is(0, &["Would replay 0 events"]);
    desk.sql(
        "insert into system.consumer_positions (handler_kind, stream, part, pseq)
         select 'projector', stream, part, max(pseq) from system.bus_log where stream = 'ledger' group by 2, 3",
    )
    .await;
    // The projector's tables are built anew beside the live ones: what the ledger does not know goes.
    desk.sql(
        "insert into projection.collection_holders (collection_id, account_id, qty, asset_count)
         values (gen_random_uuid(), '00000000-0000-0000-0000-000000000001', 1, 1)",
    )
    .await;
    replay(&["--from", "1", "--to", "99", "--reason", "a test"]).is(0, &[&format!("Replayed {all} events")]);
    let strangers = "select count(*) from projection.collection_holders
                      where account_id = '00000000-0000-0000-0000-000000000001'";
    assert_eq!(desk.count(strangers).await, 0);
    replay(&["--from", "1", "--to", "2", "--dry-run"]).is(0, &["Would replay 2 events"]);
    replay(&["--unit", "height", "--network", "seven", "--from", "2", "--to", "2", "--dry-run"])
        .is(0, &["Would replay"]);
    replay(&["--unit", "time", "--from", "2020-01-01T00:00:00Z", "--to", "2021-01-01T00:00:00Z"])
        .is(0, &["Replayed 0 events"]);
    assert_eq!(desk.count("select count(*) from projection.asset_cards").await, 2);
    replay(&["--from", "x", "--to", "2"]).is(2, &["--from x is not a number"]);
    replay(&["--from", "3", "--to", "2"]).is(2, &["not before"]);
    replay(&["--unit", "time", "--from", "1", "--to", "2"]).is(2, &["not a time"]);
    desk.run(&["replay", "--handler", "nobody", "--from", "1", "--to", "2"]).is(1, &["no handler nobody"]);
    let audited = "select count(*) from system.audit_log where actor = 'olga' and action = 'events.replay'";
    assert_eq!(desk.count(audited).await, 2);
}

#[tokio::test]
async fn a_rewind_opens_what_was_final_and_tells_of_it() {
    let desk = Desk::new().await;
    desk.lived(2).await;
    desk.sql(
        "insert into system.network_heads (network_id, latest_height, latest_hash, halted_reason)
              values (7, 2, '', 'finality broke')",
    )
    .await;
    desk.sql(
        "insert into system.processes (instance, role, state) values
             ('host-1', 'history:seven', 'running'), ('host-1', 'ingest:nine', 'running'), ('host-2', 'ledger', 'stopped')",
    )
    .await;
    let told = "select count(*) from system.outbox_events where topic = 'ledger.ownership.changed.v1'
                   and envelope->'payload'->>'reason' = 'rewind'";
    desk.run(&["rewind", "--network", "seven", "--to", "0"]).is(1, &["history:seven of host-1", "--force"]);
    assert_eq!(desk.count(told).await, 0);
    desk.sql("update system.processes set heartbeat_at = now() - interval '1 minute'").await;
    desk.run(&["rewind", "--network", "seven", "--to", "0", "--reason", "a test"]).is(
        0,
        &[
            "seven is final up to 0 again; it was 2",
            "2 events are open again, 2 assets",
            "was halted and goes on",
        ],
    );
    assert_eq!(desk.count(told).await, 1);
    desk.run(&["verify", "ledger"]).is(0, &["every invariant holds"]);
    desk.sql("update system.processes set heartbeat_at = now()").await;
    desk.run(&["rewind", "--network", "7", "--to", "0", "--force"]).is(0, &["Nothing to undo"]);
    let audited = "select count(*) from system.audit_log where actor = 'olga' and action = 'ledger.rewind'
                      and target = 'seven' and reason = 'a test'";
    assert_eq!(desk.count(audited).await, 1);
}

#[tokio::test]
async fn projections_are_rebuilt_and_reconciled() {
    let desk = Desk::new().await;
    desk.lived(1).await;
    desk.run(&["reconcile"]).is(3, &["asset_cards", "Too many differ"]);
    desk.run(&["rebuild", "undo", "asset_cards"]).is(1, &["nothing to undo"]);
    let first = desk.run(&["rebuild", "projection", "all", "--json"]);
    first.is(0, &[]);
    let cards = first.json().as_array().expect("a list")[2].clone();
    assert_eq!((&cards["projection"], &cards["rows"]), (&json!("asset_cards"), &json!(2)));
    assert!(cards["differing"].as_u64().is_some_and(|rows| rows > 0), "{cards}");
    desk.run(&["reconcile", "--sample", "10"]).is(0, &["asset_cards", "0.000 %"]);
    desk.run(&["rebuild", "projection", "asset_cards"])
        .is(0, &["asset_cards: 2 rows built, all as they were"]);
    desk.sql("delete from projection.asset_cards").await;
    let answer = desk.run(&["reconcile", "--json"]);
    answer.is(3, &[]);
    assert_eq!(answer.json()["alarming"], json!(true));
    desk.run(&["rebuild", "projection", "asset_cards"]).is(0, &["2 differed", "was no row"]);
    desk.run(&["rebuild", "undo", "asset_cards"]).is(0, &["what it was before"]);
    desk.run(&["rebuild", "projection", "asset_cards"]).is(0, &[]);
    desk.run(&["rebuild", "forget", "asset_cards"]).is(0, &["Nothing is kept"]);
    desk.run(&["rebuild", "undo", "asset_cards"]).is(1, &["nothing to undo"]);
    desk.run(&["rebuild", "projection", "nonsense"]).is(2, &["take one of", "or all"]);
}

#[tokio::test]
async fn lookups_are_repaired_once() {
    let desk = Desk::new().await;
    desk.run(&["repair", "lookups"]).is(0, &["seven: nothing was read yet."]);
    desk.accepted().await;
    let mut conn = desk.db.conn().await.expect("connects");
    let range = HeightRange::new(Height(0), Height(30)).expect("a range");
    let partitions = Partitions::new(PartitionSizes::default(), Default::default());
    partitions.ensure_raw(&mut conn, NETWORK, range).await.expect("partitions");
    desk.sql(
        "insert into raw.blocks (network_id, height, hash, parent_hash, block_time, event_count)
         values (7, 5, decode(repeat('05', 32), 'hex'), decode(repeat('04', 32), 'hex'), now(), 0)",
    )
    .await;
    desk.run(&["repair", "lookups", "--network", "seven"]).is(0, &["of blocks: 1 added, 0 removed"]);
    assert_eq!(desk.run(&["repair", "lookups", "--json"]).json()[0]["blocks_added"], json!(0));
}

#[test]
fn a_schema_that_breaks_readers_is_refused_with_a_counterexample() {
    let dir = std::env::temp_dir().join(format!("tidemark-lint-{}", uuid::Uuid::new_v4().simple()));
    let file = dir.join("schemas/ledger/thing/changed/v1.json");
    std::fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
    let schema = |required: &[&str]| {
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object", "additionalProperties": false, "required": required,
            "properties": { "a": { "type": "integer" }, "b": { "type": "string" } },
        })
        .to_string()
    };
    let git = |args: &[&str]| {
        let output = Command::new("git")
            .args(["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"])
            .args(args)
            .current_dir(&dir)
            .output()
            .expect("git runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let schemas = dir.join("schemas").display().to_string();
    let lint =
        |more: &[&str]| tidemark(&[["schema", "lint", "--dir", &schemas].as_slice(), more].concat(), None);
    std::fs::write(&file, schema(&["a"])).expect("writes");
    lint(&[]).is(1, &["git cannot read the published schemas"]);
    git(&["init", "-q"]);
    git(&["add", "."]);
    git(&["commit", "-q", "-m", "published"]);
    lint(&[]).is(0, &["1 schemas may be published; HEAD has 1."]);
    std::fs::write(&file, schema(&["a", "b"])).expect("writes");
    lint(&[]).is(3, &["ledger/thing/changed/v1", "RequiredField", "counterexample: {\"a\"", "instead:"]);
    let answer = lint(&["--against", "HEAD", "--json"]);
    answer.is(3, &[]);
    assert_eq!(answer.json()[0]["rule"], json!("RequiredField"));
    lint(&["--against=--help"]).is(2, &["not a revision"]);
    lint(&["--against", "nowhere"]).is(1, &["git cannot read"]);
    std::fs::remove_dir_all(dir).expect("removes");
}

/// History adds differences to the projections: they must hold what the ledger holds before it does.
#[tokio::test]
async fn history_waits_until_the_projector_has_read_what_live_wrote() {
    let desk = Desk::new().await;
    let conn = desk.db.conn().await.expect("connects");
    let lags = async || bulk::projector_lags(&conn, NETWORK).await.expect("answers");
    assert!(!lags().await, "live wrote nothing yet");
    desk.lived(0).await;
    assert!(lags().await, "events without a number");
    desk.numbered().await;
    assert!(lags().await, "events with a number that nobody read");
    desk.sql(
        "insert into system.consumer_positions (handler_kind, stream, part, pseq)
         select 'projector', stream, part, next_pseq - 1 from system.bus_partitions where stream = 'ledger'
         on conflict (handler_kind, stream, part) do update set pseq = excluded.pseq",
    )
    .await;
    assert!(!lags().await, "everything was read");
    let other = bulk::projector_lags(&conn, NetworkId(8)).await.expect("answers");
    assert!(!other, "another network is not held up");
}
