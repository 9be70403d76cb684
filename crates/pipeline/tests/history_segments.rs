//! Bulk history on a real Postgres: any split into segments gives the balances of a naive model, the read
//! models agree with the ledger, and starting in the middle ends in the same balances.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tidemark_model::chain::*;
use tidemark_model::finality::FinalityStatus;
use tidemark_model::ids::*;
use tidemark_model::quantity::SignedQty;
use tidemark_model::redact::RedactedUrl;
use tidemark_model::{OffsetDateTime, U256};
use tidemark_pipeline::history::segment::{Before, Builder};
use tidemark_pipeline::history::{Writers, apply_blocks, build, show};
use tidemark_pipeline::projectors::{ProjectionName, rebuild_projection, reconcile};
use tidemark_store::projection::built_last;
use tidemark_store::{Db, DbOptions, bulk, ledger};
use tidemark_testkit::pg::TestDb;

const NETWORK: NetworkId = NetworkId(7);

/// (contract, token, account) → quantity.
type Balances = BTreeMap<(String, String, String), U256>;

/// Balances of the chain's past, for openings.
struct Chain {
    network: Network,
    before_start: Balances,
}

#[async_trait]
impl ChainAdapter for Chain {
    fn network(&self) -> &Network {
        &self.network
    }
    async fn head(&self) -> Result<Head, ChainError> {
        unreachable!("history does not ask for the head")
    }
    async fn next_head(&self, _: &Head, _: Duration) -> Result<Head, ChainError> {
        unreachable!("history does not ask for the head")
    }
    async fn fetch(&self, _: HeightRange, _: FetchMode) -> Result<RawBatch, ChainError> {
        unreachable!("history reads raw.*")
    }
    async fn link_at(&self, _: Height) -> Result<Option<BlockLink>, ChainError> {
        unreachable!("history is final")
    }
    fn parse(&self, _: &RawBlock) -> ParsedBlock {
        unreachable!("blocks are given parsed")
    }
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        let key = |ask: &BalanceAsk| {
            (
                ask.asset.collection_addr_normalized.clone(),
                ask.asset.token_id_raw.clone(),
                ask.account.clone(),
            )
        };
        Ok(asks
            .iter()
            .map(|ask| Some(self.before_start.get(&key(ask)).copied().unwrap_or_default()))
            .collect())
    }
    fn requests(&self) -> u64 {
        0
    }
}

struct Script {
    blocks: Vec<(RawBlock, ParsedBlock)>,
    /// Balances after each block.
    truth: Vec<Balances>,
}

fn address(n: u32) -> String {
    format!("0x{n:040x}")
}

fn event(
    block: &RawBlock,
    index: u32,
    kind: EventKind,
    asset: AssetRef,
    from: Option<&str>,
    to: Option<&str>,
    qty: U256,
) -> RawEvent {
    let tx: [u8; 32] = U256::from(block.height.0 * 1000 + u64::from(index)).to_be_bytes();
    let leg =
        |account: &str, qty_delta| OwnershipDelta { account_addr_normalized: account.to_owned(), qty_delta };
    RawEvent {
        source_event_id: SourceEventId::evm(NETWORK, &tx, index),
        sub_index: 0,
        event_kind: kind,
        asset_refs: vec![asset],
        ownership_deltas: [
            from.map(|account| leg(account, SignedQty::loss(qty))),
            to.map(|account| leg(account, SignedQty::gain(qty))),
        ]
        .into_iter()
        .flatten()
        .collect(),
        block_number: block.height,
        block_hash: block.hash,
        tx_hash: TxId::from(tx),
        event_index: index,
        event_time: block.time,
        finality_status: FinalityStatus::Finalized,
        blob_ref: None,
    }
}

fn asset(contract: &str, token: &str, standard: Standard) -> AssetRef {
    AssetRef {
        network_id: NETWORK,
        collection_addr_normalized: contract.to_owned(),
        token_id_raw: token.to_owned(),
        standard,
    }
}

fn script(seed: u64, heights: u64) -> Script {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut balances = Balances::new();
    let mut script = Script { blocks: Vec::new(), truth: Vec::new() };
    let mut minted = 0_u32;
    for height in 0..heights {
        let seconds = i64::try_from(height).expect("small");
        let block = RawBlock {
            height: Height(height),
            hash: BlockHash(U256::from(height + 1).to_be_bytes()),
            parent: BlockHash(U256::from(height).to_be_bytes()),
            time: OffsetDateTime::from_unix_timestamp(1_700_000_000 + seconds).expect("a time"),
            tx_count: Some(1),
            transactions: vec![],
            records: vec![],
            payload: None,
        };
        let mut parsed = ParsedBlock::default();
        for index in 0..rng.random_range(0..6_u32) {
            let standard = if rng.random_bool(0.5) { Standard::Erc721 } else { Standard::Erc1155 };
            let single = standard == Standard::Erc721;
            let contract = address(if single { 0x721 } else { 0x1155 });
            let held: Vec<_> = balances
                .iter()
                .filter(|((at, _, _), _)| *at == contract)
                .map(|(key, qty)| (key.clone(), *qty))
                .collect();
            let (kind, token, from, to, qty) = if held.is_empty() || rng.random_bool(0.4) {
                minted += 1;
                let token = if single { minted } else { rng.random_range(0..3) };
                let qty = if single { 1 } else { rng.random_range(0..50_u64) };
                (
                    EventKind::Mint,
                    token.to_string(),
                    None,
                    Some(address(rng.random_range(1..6))),
                    U256::from(qty),
                )
            } else {
                let ((_, token, owner), has) = held[rng.random_range(0..held.len())].clone();
                let qty = if single { has } else { has / U256::from(rng.random_range(1..4_u64)) };
                let to = (!rng.random_bool(0.15)).then(|| address(rng.random_range(1..6)));
                (
                    if to.is_some() { EventKind::Transfer } else { EventKind::Burn },
                    token,
                    Some(owner),
                    to,
                    qty,
                )
            };
            let mut change = |account: &str, gain: bool| {
                let key = (contract.clone(), token.clone(), account.to_owned());
                let has = balances.remove(&key).unwrap_or_default();
                let now = if gain { has + qty } else { has - qty };
                if !now.is_zero() {
                    balances.insert(key, now);
                }
            };
            if let Some(from) = &from {
                change(from, false);
            }
            if let Some(to) = &to {
                change(to, true);
            }
            let asset = asset(&contract, &token, standard);
            parsed.events.push(event(&block, index, kind, asset, from.as_deref(), to.as_deref(), qty));
        }
        script.blocks.push((block, parsed));
        script.truth.push(balances.clone());
    }
    script
}

async fn database() -> Db {
    let test = TestDb::new().await.expect("a database");
    let db = Db::open(&RedactedUrl::parse(&test.url).expect("a URL"), &DbOptions::default()).expect("a pool");
    let conn = db.conn().await.expect("connects");
    let partition = "create table projection.transfers_7 partition of projection.transfers for values in (7)";
    conn.batch("partition", partition).await.expect("partitions");
    drop(conn);
    db
}

async fn run(db: &Db, chain: &Chain, script: &Script, from: usize, split: usize) {
    let conn = db.conn().await.expect("connects");
    bulk::ensure_progress(&conn, NETWORK, chain.network.start_block).await.expect("progress");
    // Both ways are walked: one connection with short segments, two with others.
    let log = if split == 1 { None } else { db.spare_conn().await };
    let mut writers = Writers { state: conn, log };
    for blocks in script.blocks[from..].chunks(split) {
        let (first, last) = (blocks[0].0.height, blocks[blocks.len() - 1].0.height);
        let range = HeightRange::inclusive(first, last).expect("not empty");
        apply_blocks(&mut writers, chain, range, blocks).await.expect("applies");
    }
}

fn chain(start: u64, before_start: Balances) -> Chain {
    let network = Network {
        id: NETWORK,
        slug: "seven".into(),
        family: Family::Evm,
        start_block: Height(start),
        confirmations: 1,
        reorg_depth_max: 10,
    };
    Chain { network, before_start }
}

async fn owners(db: &Db, table: &str) -> Balances {
    let conn = db.conn().await.expect("connects");
    let sql = format!(
        "select k.address_normalized, a.token_id_raw, o.address_normalized, t.qty from {table} t
           join catalog.assets a on a.id = t.asset_id join catalog.collections c on c.id = a.collection_id
           join catalog.contracts k on k.id = c.contract_id join ledger.accounts o on o.id = t.account_id"
    );
    let rows = conn.query("read", &sql, &[]).await.expect("reads");
    rows.iter().map(|row| ((row.get(0), row.get(1), row.get(2)), row.get(3))).collect()
}

async fn no_rows(db: &Db, sql: &str) {
    let conn = db.conn().await.expect("connects");
    let rows =
        conn.query("check", &format!("select q::text from ({sql}) q limit 5"), &[]).await.expect("reads");
    let rows: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert!(rows.is_empty(), "{sql}: {rows:?}");
}

/// Each read model equals what the ledger says.
const READ_MODELS_DIFFER: &[&str] = &[
    "select o.collection_id, o.account_id, count(*)::bigint, sum(o.qty) from projection.ownership_view o group by 1, 2
     except select collection_id, account_id, asset_count, qty from projection.collection_holders",
    "select collection_id, account_id, asset_count, qty from projection.collection_holders
     except select o.collection_id, o.account_id, count(*)::bigint, sum(o.qty) from projection.ownership_view o group by 1, 2",
    "select collection_id, count(*)::bigint from projection.collection_holders group by 1
     except select collection_id, owners_count from projection.collection_stats",
    "select collection_id, count(*) filter (where supply > 0)::bigint, sum(supply) from catalog.assets group by 1
     except select collection_id, asset_count, total_supply from projection.collection_stats",
    "select account_id, count(*)::bigint from projection.ownership_view group by 1
     except select account_id, asset_count from projection.account_summaries",
    "select asset_id from projection.asset_cards c join catalog.assets a on a.id = c.asset_id
      where (a.supply, a.is_burned) <> (c.supply, c.is_burned)",
    "select asset_id, sum(qty_delta) from ledger.ownership_history group by 1
     except select id, supply from catalog.assets",
];

#[tokio::test]
async fn any_split_gives_the_truth_and_one_digest() {
    let mut digests = Vec::new();
    for (seed, split) in [(1, 1), (1, 7), (1, 200), (2, 3)] {
        let script = script(seed, 60);
        let db = database().await;
        run(&db, &chain(0, Balances::new()), &script, 0, split).await;
        let truth = script.truth.last().expect("blocks");
        assert_eq!(&owners(&db, "ledger.ownership_current").await, truth, "seed {seed}, split {split}");
        assert_eq!(&owners(&db, "projection.ownership_view").await, truth, "seed {seed}, split {split}");
        for sql in READ_MODELS_DIFFER {
            no_rows(&db, sql).await;
        }
        let conn = db.conn().await.expect("connects");
        let newest = "select digest from ledger.digest_history order by height desc limit 1";
        let digest: U256 = conn.query_one("read", newest, &[]).await.expect("reads").get(0);
        digests.push(digest);
    }
    assert!(digests[..3].iter().all(|digest| *digest == digests[0]), "{digests:?}");
    assert_ne!(digests[3], digests[0]);
}

#[tokio::test]
async fn starting_in_the_middle_gives_all_who_moved_the_true_balance_and_no_phantom() {
    for seed in 10..14 {
        let script = script(seed, 60);
        let db = database().await;
        run(&db, &chain(30, script.truth[29].clone()), &script, 30, 11).await;
        let found = owners(&db, "ledger.ownership_current").await;
        let truth = script.truth.last().expect("blocks");
        for event in script.blocks[30..].iter().flat_map(|(_, parsed)| &parsed.events) {
            let asset = &event.asset_refs[0];
            if let Some(sender) = event.movement().expect("moves").from {
                let key =
                    (asset.collection_addr_normalized.clone(), asset.token_id_raw.clone(), sender.to_owned());
                assert_eq!(found.get(&key), truth.get(&key), "seed {seed}: {key:?}");
            }
        }
        for (key, qty) in &found {
            assert!(qty <= truth.get(key).unwrap_or(&U256::ZERO), "seed {seed}: phantom at {key:?}");
        }
        no_rows(&db, "select * from ledger.quarantine").await;
    }
}

#[tokio::test]
async fn a_transfer_of_what_is_not_there_is_quarantined_and_the_rest_goes_on() {
    let mut script = script(3, 20);
    let (block, parsed) = &mut script.blocks[10];
    let ghost = asset(&address(0x721), "424242", Standard::Erc721);
    let one = U256::from(1);
    parsed.events.push(event(
        block,
        99,
        EventKind::Transfer,
        ghost,
        Some(&address(1)),
        Some(&address(2)),
        one,
    ));
    let db = database().await;
    run(&db, &chain(0, Balances::new()), &script, 0, 6).await;
    assert_eq!(&owners(&db, "ledger.ownership_current").await, script.truth.last().expect("blocks"));
    let conn = db.conn().await.expect("connects");
    let row = conn.query_one("read", "select reason from ledger.quarantine", &[]).await.expect("one row");
    assert!(row.get::<_, String>(0).contains("not there"));
    let flagged = "select count(*) from projection.collection_stats where reliability = 'unreliable'";
    assert_eq!(conn.query_one("read", flagged, &[]).await.expect("reads").get::<_, i64>(0), 1);
}

#[tokio::test]
async fn a_segment_applied_twice_is_refused_by_the_fence() {
    let script = script(4, 10);
    let db = database().await;
    let chain = chain(0, Balances::new());
    run(&db, &chain, &script, 0, 10).await;
    let mut writers = Writers { state: db.conn().await.expect("connects"), log: None };
    let range = HeightRange::new(Height(0), Height(10)).expect("not empty");
    let error = apply_blocks(&mut writers, &chain, range, &script.blocks).await.expect_err("fenced");
    assert!(error.to_string().contains("moved by another worker"), "{error}");
    assert_eq!(&owners(&db, "ledger.ownership_current").await, script.truth.last().expect("blocks"));
}

/// What a process leaves that dies after the log of a segment is committed and before its state is.
#[tokio::test]
async fn a_log_without_its_state_is_taken_away_and_written_again() {
    let script = script(5, 40);
    let truth = script.truth.last().expect("blocks");
    let chain = chain(0, Balances::new());
    let logs = [
        "ledger.normalized_events",
        "ledger.ownership_history",
        "projection.transfers",
        "projection.block_cards",
    ];
    let calm = database().await;
    run(&calm, &chain, &script, 0, 10).await;
    for by_live in [false, true] {
        let db = database().await;
        let half = Script { blocks: script.blocks[..20].to_vec(), truth: vec![] };
        run(&db, &chain, &half, 0, 10).await;
        let mut writers = Writers { state: db.conn().await.expect("connects"), log: db.spare_conn().await };
        assert!(writers.log.is_some(), "the pool has two");
        writers.state.batch("die", DIES_AT_COMMIT).await.expect("arms");
        let range = HeightRange::inclusive(Height(20), Height(29)).expect("not empty");
        apply_blocks(&mut writers, &chain, range, &script.blocks[20..30]).await.expect_err("it died");
        writers.state.batch("live", "drop trigger die on ledger.network_progress").await.expect("disarms");
        drop(writers);
        let left = count(&db, "ledger.normalized_events where block_number >= 20").await;
        assert!(left > 0, "the log is ahead of the ledger");
        if by_live {
            let mut conn = db.conn().await.expect("connects");
            let tx = conn.tx().await.expect("begins");
            ledger::lock_progress(&tx, NETWORK, Height(0)).await.expect("locks");
            tx.commit().await.expect("commits");
            for table in logs {
                let height = if table.starts_with("projection") { "height" } else { "block_number" };
                assert_eq!(count(&db, &format!("{table} where {height} >= 20")).await, 0, "{table}");
            }
        }
        run(&db, &chain, &script, 20, 10).await;
        assert_eq!(&owners(&db, "ledger.ownership_current").await, truth);
        assert_eq!(&owners(&db, "projection.ownership_view").await, truth);
        for sql in READ_MODELS_DIFFER {
            no_rows(&db, sql).await;
        }
        for table in logs {
            assert_eq!(count(&db, table).await, count(&calm, table).await, "{table}");
        }
    }
}

/// Every row of the read models of state, but for when it was written.
async fn shown(db: &Db) -> Vec<String> {
    let conn = db.conn().await.expect("connects");
    let mut all = Vec::new();
    for table in
        ["ownership_view", "asset_cards", "collection_holders", "collection_stats", "account_summaries"]
    {
        let sql = format!(
            "select '{table} ' || (to_jsonb(t) - 'updated_at')::text from projection.{table} t order by 1"
        );
        all.extend(conn.query("read", &sql, &[]).await.expect("reads").iter().map(|row| row.get(0)));
    }
    all
}

async fn put_off(db: &Db, chain: &Chain) {
    let mut conn = db.conn().await.expect("connects");
    let before_start = chain.network.start_block.as_i64() - 1;
    bulk::ensure_progress(&conn, NETWORK, chain.network.start_block).await.expect("progress");
    let head = progress(db).await.head;
    assert!(built_last::put_off(&mut conn, NETWORK, head, before_start).await.expect("puts off"));
    assert!(!built_last::put_off(&mut conn, NETWORK, head, before_start).await.expect("is put off already"));
}

async fn progress(db: &Db) -> bulk::Progress {
    let conn = db.conn().await.expect("connects");
    bulk::read_progress(&conn, NETWORK).await.expect("reads").expect("a row")
}

/// Shown at the end or as it goes, with one connection or two, once or twice: the same rows.
#[tokio::test]
async fn a_history_shown_at_its_end_shows_what_one_does_that_is_shown_as_it_goes() {
    for (seed, start, with_two) in [(20, 0, false), (21, 0, true), (22, 30, true)] {
        let script = script(seed, 60);
        let before = if start == 0 { Balances::new() } else { script.truth[start - 1].clone() };
        let chain = chain(u64::try_from(start).expect("small"), before);
        let (kept, late) = (database().await, database().await);
        run(&kept, &chain, &script, start, 9).await;
        put_off(&late, &chain).await;
        run(&late, &chain, &script, start, 9).await;
        assert_eq!(shown(&late).await, Vec::<String>::new(), "nothing while it is read");
        assert_eq!(count(&late, "app.indexing_checkpoints where worker_name = 'projector'").await, 0);
        for _ in 0..2 {
            let mut conn = late.conn().await.expect("connects");
            let second = if with_two { late.spare_conn().await } else { None };
            assert!(show(&mut conn, second, NETWORK).await.expect("shows"));
            assert_eq!(shown(&late).await, shown(&kept).await, "seed {seed}");
        }
        assert!(!progress(&late).await.read_models_due);
        let at_head = "app.indexing_checkpoints where worker_name = 'projector' and height = 59";
        assert_eq!(count(&late, at_head).await, 1);
        let mut conn = late.conn().await.expect("connects");
        let before_start = chain.network.start_block.as_i64() - 1;
        let moved = built_last::put_off(&mut conn, NETWORK, before_start, before_start);
        assert!(!moved.await.expect("asks"), "its head is not there any more");
    }
}

fn part(script: &Script, blocks: usize) -> Script {
    Script { blocks: script.blocks[..blocks].to_vec(), truth: vec![] }
}

/// On top of what is shown: caught up at the end of a backlog, or merged as it goes, the same rows. Twice in a row, with
/// what lies between merged as it goes, and with a network beside it that must stay as it is. Compared by look-ups, as
/// where much is stored, and as the planner sees fit.
#[tokio::test]
async fn a_backlog_shown_at_its_end_shows_what_one_does_that_is_shown_as_it_goes() {
    for (seed, start, is_little) in [(30, 0, false), (31, 0, true), (32, 20, true), (33, 35, false)] {
        let script = script(seed, 90);
        let before = if start == 0 { Balances::new() } else { script.truth[start - 1].clone() };
        let chain = chain(u64::try_from(start).expect("small"), before);
        let (kept, late) = (database().await, database().await);
        run(&kept, &chain, &script, start, 7).await;
        run(&late, &chain, &part(&script, 40), start, 7).await;
        let then = shown(&late).await;
        put_off(&late, &chain).await;
        run(&late, &chain, &part(&script, 65), 40, 5).await;
        assert_eq!(shown(&late).await, then, "they stand where they stood");
        assert_eq!(progress(&late).await.read_models_height, Some(39));
        let mut conn = late.conn().await.expect("connects");
        if is_little {
            let sql = "update pg_class set reltuples = 1e9 where oid = 'projection.ownership_view'::regclass";
            assert_eq!(conn.execute("make a backlog little", sql, &[]).await.expect("writes"), 1);
        }
        for _ in 0..2 {
            assert!(show(&mut conn, late.spare_conn().await, NETWORK).await.expect("shows"));
        }
        let now = progress(&late).await;
        assert!(!now.read_models_due && now.read_models_height.is_none(), "{now:?}");
        drop(conn);
        run(&late, &chain, &part(&script, 70), 65, 5).await;
        put_off(&late, &chain).await;
        run(&late, &chain, &script, 70, 20).await;
        let mut conn = late.conn().await.expect("connects");
        assert!(show(&mut conn, None, NETWORK).await.expect("shows"));
        assert_eq!(shown(&late).await, shown(&kept).await, "seed {seed}");
        for sql in READ_MODELS_DIFFER {
            no_rows(&late, sql).await;
        }
        let at_head = "app.indexing_checkpoints where worker_name = 'projector' and height = 89";
        assert_eq!(count(&late, at_head).await, 1);
    }
}

/// A contract that turns out to lie while nothing is shown is shown as one that does.
#[tokio::test]
async fn a_contract_distrusted_in_a_backlog_is_shown_as_unreliable() {
    let script = script(34, 40);
    let chain = chain(0, Balances::new());
    let db = database().await;
    run(&db, &chain, &part(&script, 1), 0, 5).await;
    put_off(&db, &chain).await;
    run(&db, &chain, &script, 1, 10).await;
    let mut conn = db.conn().await.expect("connects");
    let distrust = "update catalog.contracts set reliability = 'unreliable', unreliable_reason = 'lies'";
    conn.execute("distrust", distrust, &[]).await.expect("distrusts");
    assert!(show(&mut conn, None, NETWORK).await.expect("shows"));
    let trusted =
        "projection.collection_stats where reliability <> 'unreliable' or unreliable_reason <> 'lies'";
    assert_eq!(count(&db, trusted).await, 0);
}

/// Killed before its commit it is as if it had not begun; two at once are one; and what is ahead of the ledger is not
/// counted.
#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_caught_up_by_two_or_killed_in_between_is_caught_up_once() {
    let script = script(35, 60);
    let chain = chain(0, Balances::new());
    let (kept, late) = (database().await, database().await);
    run(&kept, &chain, &part(&script, 50), 0, 10).await;
    run(&late, &chain, &part(&script, 20), 0, 10).await;
    put_off(&late, &chain).await;
    run(&late, &chain, &part(&script, 50), 20, 10).await;
    let then = shown(&late).await;
    let mut writers = Writers { state: late.conn().await.expect("connects"), log: late.spare_conn().await };
    writers.state.batch("die", DIES_AT_COMMIT).await.expect("arms");
    let range = HeightRange::inclusive(Height(50), Height(59)).expect("not empty");
    apply_blocks(&mut writers, &chain, range, &script.blocks[50..]).await.expect_err("it died");
    let Writers { mut state, log } = writers;
    state.batch("live", "drop trigger die on ledger.network_progress").await.expect("disarms");
    assert!(!show(&mut state, log, NETWORK).await.expect("takes the log away first"));
    state.batch("die", DIES_AT_COMMIT).await.expect("arms");
    show(&mut state, None, NETWORK).await.expect_err("it died");
    assert_eq!(shown(&late).await, then);
    assert_eq!(progress(&late).await.read_models_height, Some(19));
    // With two connections the second's half is there already, and what it changes in accounts and statistics is noted:
    // once, however often.
    for half in 0..2 {
        let collections =
            format!("catalog.collections where get_byte(uuid_send(id), 15) % 2 = {half} and network_id = 7");
        assert!(count(&late, &collections).await > 0, "both have something to do");
    }
    let noted = ["projection.stats_to_come", "projection.accounts_to_come"];
    for notes in noted {
        assert_eq!(count(&late, notes).await, 0);
    }
    let mut sums = Vec::new();
    for _ in 0..2 {
        show(&mut state, late.spare_conn().await, NETWORK).await.expect_err("it died");
        for notes in noted {
            assert!(count(&late, notes).await > 0, "{notes}");
        }
        let sum = "select (select (sum(supply), sum(stubs), sum(assets), sum(owners))::text from projection.stats_to_come)
                       || (select sum(assets) from projection.accounts_to_come)";
        sums.push(state.query_one("add up", sum, &[]).await.expect("adds").get::<_, String>(0));
    }
    assert_eq!(sums[0], sums[1], "what is caught up changes nothing");
    assert_ne!(shown(&late).await, then, "one half is there");
    assert_eq!(progress(&late).await.read_models_height, Some(19));
    state.batch("live", "drop trigger die on ledger.network_progress").await.expect("disarms");
    drop(state);
    let build = async || {
        let mut conn = late.conn().await.expect("connects");
        show(&mut conn, late.spare_conn().await, NETWORK).await.expect("shows")
    };
    assert_eq!(tokio::join!(build(), build(), build()), (true, true, true));
    for notes in noted {
        assert_eq!(count(&late, notes).await, 0, "{notes} are added");
    }
    assert_eq!(shown(&late).await, shown(&kept).await);
}

/// Who died after one half was caught up left notes; a rewind may have taken its transfers back since.
#[tokio::test]
async fn a_note_counts_also_where_no_transfer_is_unseen() {
    let script = script(38, 20);
    let chain = chain(0, Balances::new());
    let db = database().await;
    run(&db, &chain, &script, 0, 10).await;
    put_off(&db, &chain).await;
    let mut conn = db.conn().await.expect("connects");
    let sums = "select (sum(total_supply), sum(asset_count), sum(stub_count), sum(transfer_count), max(last_height))::text
                  from projection.collection_stats";
    let supply = "select sum(total_supply)::text from projection.collection_stats";
    let assets = "select sum(asset_count)::text from projection.account_summaries";
    let notes = "insert into projection.stats_to_come (network_id, collection_id, supply)
                 select network_id, collection_id, 5 from projection.collection_stats limit 1;
                 insert into projection.accounts_to_come (network_id, account_id, assets)
                 select network_id, account_id, 3 from projection.account_summaries limit 1";
    let before: String = conn.query_one("add up", sums, &[]).await.expect("adds").get(0);
    let owned: String = conn.query_one("add up", supply, &[]).await.expect("adds").get(0);
    let held: String = conn.query_one("add up", assets, &[]).await.expect("adds").get(0);
    let transfers = "select sum(transfer_count)::text from projection.account_summaries";
    let moved: String = conn.query_one("add up", transfers, &[]).await.expect("adds").get(0);
    conn.batch("note", notes).await.expect("notes");
    assert!(show(&mut conn, None, NETWORK).await.expect("shows"));
    assert_eq!(count(&db, "projection.stats_to_come").await, 0);
    assert_eq!(count(&db, "projection.accounts_to_come").await, 0);
    let holds: String = conn.query_one("add up", assets, &[]).await.expect("adds").get(0);
    assert_eq!(holds.parse::<i64>().expect("counts"), held.parse::<i64>().expect("counts") + 3);
    let moves: String = conn.query_one("add up", transfers, &[]).await.expect("adds").get(0);
    assert_eq!(moves, moved, "no transfer was counted");
    let more = format!("select (sum(total_supply) = {owned} + 5)::text from projection.collection_stats");
    assert_eq!(conn.query_one("compare", &more, &[]).await.expect("compares").get::<_, String>(0), "true");
    let back = "update projection.collection_stats set total_supply = total_supply - 5
                 where collection_id = (select collection_id from projection.collection_stats limit 1)";
    conn.batch("take back", back).await.expect("takes back");
    let after: String = conn.query_one("add up", sums, &[]).await.expect("adds").get(0);
    assert_eq!(after, before, "and nothing else changed");
}

/// Between building and showing come the indexes, and maybe more history.
#[tokio::test]
async fn read_models_that_are_built_are_shown_later_with_what_came_since() {
    let script = script(37, 60);
    let chain = chain(0, Balances::new());
    let (kept, late) = (database().await, database().await);
    run(&kept, &chain, &script, 0, 10).await;
    put_off(&late, &chain).await;
    run(&late, &chain, &part(&script, 40), 0, 10).await;
    let mut conn = late.conn().await.expect("connects");
    for _ in 0..2 {
        assert!(build(&mut conn, late.spare_conn().await, NETWORK).await.expect("builds"));
        let now = progress(&late).await;
        assert!(now.read_models_due && now.read_models_height == Some(39), "{now:?}");
    }
    assert_eq!(
        count(&late, "app.indexing_checkpoints where worker_name = 'projector'").await,
        0,
        "not shown"
    );
    drop(conn);
    run(&late, &chain, &script, 40, 10).await;
    let mut conn = late.conn().await.expect("connects");
    assert!(show(&mut conn, late.spare_conn().await, NETWORK).await.expect("shows"));
    assert!(build(&mut conn, None, NETWORK).await.expect("is built"), "and nothing happens");
    assert!(!progress(&late).await.read_models_due);
    assert_eq!(shown(&late).await, shown(&kept).await);
}

/// What a rebuild puts there would be counted again when the backlog is shown.
#[tokio::test]
async fn projections_are_not_rebuilt_while_a_network_waits_to_be_shown() {
    let script = script(36, 20);
    let chain = chain(0, Balances::new());
    let db = database().await;
    run(&db, &chain, &part(&script, 10), 0, 10).await;
    put_off(&db, &chain).await;
    run(&db, &chain, &script, 10, 10).await;
    let error = rebuild_projection(&db, ProjectionName::CollectionStats, &|_| ()).await.expect_err("refused");
    assert!(error.to_string().contains("network 7 catches up"), "{error}");
    let mut conn = db.conn().await.expect("connects");
    assert!(show(&mut conn, None, NETWORK).await.expect("shows"));
    let report = rebuild_projection(&db, ProjectionName::CollectionStats, &|_| ()).await.expect("rebuilds");
    assert_eq!(report.differing.count, 0);
}

/// Two processes may come to the end of a history at the same moment.
#[tokio::test(flavor = "multi_thread")]
async fn read_models_built_by_two_at_once_are_built_once() {
    let script = script(23, 40);
    let chain = chain(0, Balances::new());
    let (kept, late) = (database().await, database().await);
    run(&kept, &chain, &script, 0, 10).await;
    put_off(&late, &chain).await;
    run(&late, &chain, &script, 0, 10).await;
    let build = async || {
        let mut conn = late.conn().await.expect("connects");
        show(&mut conn, late.spare_conn().await, NETWORK).await.expect("shows")
    };
    assert_eq!(tokio::join!(build(), build(), build()), (true, true, true));
    assert_eq!(shown(&late).await, shown(&kept).await);
}

/// The second connection's half is committed first; who dies then leaves it to be built again. And a log that
/// is ahead of its ledger is not counted.
#[tokio::test]
async fn read_models_half_built_are_built_again() {
    let script = script(24, 40);
    let chain = chain(0, Balances::new());
    let half = Script { blocks: script.blocks[..30].to_vec(), truth: vec![] };
    let (kept, late) = (database().await, database().await);
    run(&kept, &chain, &half, 0, 10).await;
    put_off(&late, &chain).await;
    run(&late, &chain, &half, 0, 10).await;
    let mut writers = Writers { state: late.conn().await.expect("connects"), log: late.spare_conn().await };
    writers.state.batch("die", DIES_AT_COMMIT).await.expect("arms");
    let range = HeightRange::inclusive(Height(30), Height(39)).expect("not empty");
    apply_blocks(&mut writers, &chain, range, &script.blocks[30..]).await.expect_err("it died");
    assert!(count(&late, "projection.transfers where height >= 30").await > 0, "the log is ahead");
    let Writers { mut state, log } = writers;
    state.batch("live", "drop trigger die on ledger.network_progress").await.expect("disarms");
    assert!(!show(&mut state, log, NETWORK).await.expect("takes the log away first"));
    state.batch("die", DIES_AT_COMMIT).await.expect("arms");
    show(&mut state, late.spare_conn().await, NETWORK).await.expect_err("it died");
    assert!(count(&late, "projection.asset_cards").await > 0, "one half is there");
    assert_eq!(count(&late, "projection.ownership_view").await, 0, "the other is not");
    assert!(progress(&late).await.read_models_due);
    state.batch("live", "drop trigger die on ledger.network_progress").await.expect("disarms");
    assert!(show(&mut state, late.spare_conn().await, NETWORK).await.expect("shows"));
    assert_eq!(shown(&late).await, shown(&kept).await);
    drop(state);
    run(&late, &chain, &script, 30, 5).await;
    run(&kept, &chain, &script, 30, 5).await;
    assert_eq!(shown(&late).await, shown(&kept).await, "what follows is merged");
}

/// The safety net does not alarm for what is not there yet.
#[tokio::test]
async fn a_network_that_is_not_shown_yet_is_not_reconciled() {
    let script = script(25, 20);
    let chain = chain(0, Balances::new());
    let db = database().await;
    put_off(&db, &chain).await;
    run(&db, &chain, &script, 0, 10).await;
    let mut conn = db.conn().await.expect("connects");
    let report = reconcile(&mut conn, 100).await.expect("reconciles");
    assert!(report.runs.iter().all(|run| run.sample_size == 0 && run.mismatches_found == 0), "{report:?}");
    assert!(show(&mut conn, None, NETWORK).await.expect("shows"));
    let report = reconcile(&mut conn, 100).await.expect("reconciles");
    assert!(report.runs.iter().all(|run| run.sample_size > 0 && run.mismatches_found == 0), "{report:?}");
}

const DIES_AT_COMMIT: &str = "
    create or replace function pg_temp.die() returns trigger language plpgsql as
        $$ begin raise exception 'killed' using errcode = 'admin_shutdown'; end $$;
    create constraint trigger die after update on ledger.network_progress
        deferrable initially deferred for each row execute function pg_temp.die()";

async fn count(db: &Db, what: &str) -> i64 {
    let conn = db.conn().await.expect("connects");
    conn.query_one("count", &format!("select count(*) from {what}"), &[]).await.expect("reads").get(0)
}

/// A segment ends by its weight: a long chain of empty blocks must not become one segment.
#[test]
fn empty_blocks_have_a_weight() {
    let mut script = script(6, 30);
    for (_, parsed) in &mut script.blocks {
        parsed.events.clear();
    }
    let mut builder = Builder::new(&chain(0, Balances::new()).network, Height(0), Before::default());
    builder.add(HeightRange::inclusive(Height(0), Height(29)).expect("not empty"), &script.blocks);
    assert_eq!(builder.weight(), 30);
}
