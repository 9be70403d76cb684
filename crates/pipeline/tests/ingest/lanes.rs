//! The ledger's handler with a raw store beside it: many lanes at once, and messages that are older than the store.

use serde_json::json;
use tidemark_bus::dispatch::{Delivered, HandleError, Handler as _};
use tidemark_bus::registry::Registry;
use tidemark_model::subject::Subject;
use tidemark_pipeline::handlers::LedgerHandler;
use tidemark_store::bulk;
use tidemark_store::outbox::{Emitter, EmitterOptions};

use super::fake::FakeChain;
use super::*;

/// The handler, with a pool of its own for raw.*.
fn handler(world: &World) -> (LedgerHandler, Db, Arc<Emitter>) {
    let raw = Db::open(world.db.url(), &DbOptions::default()).expect("a pool");
    let emitter = Arc::new(Emitter::new(EmitterOptions::default(), Arc::new(Registry::builtin())));
    let adapter: Arc<dyn ChainAdapter> = Arc::<FakeChain>::clone(&world.chain);
    let reader = RawReader::new(Arc::clone(&world.blobs));
    let handler = LedgerHandler::new([adapter], raw.clone(), world.db.clone(), reader, Arc::clone(&emitter));
    (handler, raw, emitter)
}

fn delivered(emitter: &Emitter, part: u16, [what, happened]: [&str; 2], payload: &Value) -> Delivered {
    let subject = Subject::new("chain", what, happened, 1).expect("a subject");
    let at = time::OffsetDateTime::UNIX_EPOCH;
    let cause = format!("{part}: {payload}");
    let draft = Draft::derived(subject, &cause, NETWORK.to_string(), payload.clone(), at);
    let envelope = emitter.envelope(&draft).expect("an envelope");
    Delivered { envelope, stream: "chain".to_owned(), part, pseq: 1, replay: false }
}

/// Before: a lane's `prepare` threw away what another lane had made ready, whose `apply` then read the block again,
/// on a second connection while it held one. A thousand networks stood still so, each waiting for the others.
#[tokio::test(flavor = "multi_thread")]
async fn lanes_keep_what_they_made_ready_for_themselves() {
    let world = World::new(FakeChain::new(0, 12, None)).await;
    world.catch_up().await;
    bulk::ensure_progress(&world.conn().await, NETWORK, Height(0)).await.expect("makes the row");
    let (handler, raw, emitter) = handler(&world);
    let drafts = world.drafts().await;
    let (_, first) = drafts.iter().find(|(subject, _)| subject == "chain.block.ingested.v1").expect("blocks");
    let lanes = [1, 2].map(|part| [delivered(&emitter, part, ["block", "ingested"], first)]);
    for lane in &lanes {
        handler.prepare(lane, &[]).await.expect("prepares");
    }
    raw.close();
    for lane in &lanes {
        let mut conn = world.conn().await;
        let tx = conn.tx().await.expect("begins");
        handler.apply(&tx, lane).await.expect("needs no other connection");
        tx.commit().await.expect("commits");
    }
    assert_eq!(world.scalar("select head_height from ledger.network_progress").await, 0);
}

/// The chain went from one branch to another and back while nobody looked, and history made final what it came back to:
/// then the messages of both reorgs come. Before: the first halted the network.
#[tokio::test(flavor = "multi_thread")]
async fn a_reorg_that_was_taken_back_does_not_halt_what_is_final_since() {
    let world = World::new(FakeChain::new(0, 6, None)).await;
    world.catch_up().await;
    bulk::ensure_progress(&world.conn().await, NETWORK, Height(0)).await.expect("makes the row");
    let (handler, _raw, emitter) = handler(&world);
    let apply = async |one: Delivered| {
        let batch = [one];
        handler.prepare(&batch, &[]).await?;
        let mut conn = world.conn().await;
        let tx = conn.tx().await.expect("begins");
        handler.apply(&tx, &batch).await?;
        tx.commit().await.expect("commits");
        Ok::<_, HandleError>(())
    };
    for (subject, payload) in world.drafts().await {
        if subject == "chain.block.ingested.v1" {
            apply(delivered(&emitter, 1, ["block", "ingested"], &payload)).await.expect("applies");
        }
    }
    let last = world.chain.chain.lock().unwrap().head().block_ref();
    let finality = json!({ "network_id": NETWORK, "finalized_height": last.height, "finalized_hash": last.hash,
                           "head_height": last.height });
    apply(delivered(&emitter, 1, ["finality", "advanced"], &finality)).await.expect("applies");
    let height = last.height.as_i64();
    assert_eq!(world.scalar("select finalized_height from ledger.network_progress").await, height);
    let named = |hash: String| json!({ "height": last.height, "hash": hash });
    let (here, there) = (named(last.hash.to_string()), named(format!("0x{}", "77".repeat(32))));
    let ancestor = json!({ "height": last.height.0 - 1, "hash": format!("0x{}", "11".repeat(32)) });
    let reorg = |from: &Value, to: &Value| {
        let payload =
            json!({ "network_id": NETWORK, "ancestor": ancestor, "orphaned": [from], "canonical": [to] });
        delivered(&emitter, 1, ["reorg", "detected"], &payload)
    };
    apply(reorg(&here, &there)).await.expect("it is old: the raw store has the block");
    apply(reorg(&there, &here)).await.expect("nothing to do");
    assert_eq!(world.scalar("select head_height from ledger.network_progress").await, height);
    let open = "select count(*) from ledger.events_now where finality_status <> 'finalized'";
    assert_eq!(world.scalar(open).await, 0);
    // Without the block in the raw store it is what it says: something final has gone.
    let gone =
        format!("update raw.blocks set hash = decode(repeat('77', 32), 'hex') where height = {height}");
    world.conn().await.batch("replace a block", &gone).await.expect("replaces");
    let refused = apply(reorg(&here, &there)).await.expect_err("it halts");
    assert!(refused.to_string().contains("rewind"), "{refused}");
}

/// Blocks are committed before a line that stands behind them, and a line whose work that one does is passed over although it
/// comes in the transaction before.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_gives_way_to_one_in_the_next_transaction() {
    let world = World::new(FakeChain::new(0, 6, None)).await;
    world.catch_up().await;
    bulk::ensure_progress(&world.conn().await, NETWORK, Height(0)).await.expect("makes the row");
    let (handler, _raw, emitter) = handler(&world);
    let drafts = world.drafts().await;
    let blocks: Vec<&Value> = drafts
        .iter()
        .filter(|(subject, _)| subject == "chain.block.ingested.v1")
        .map(|(_, payload)| payload)
        .collect();
    let block = |at: usize| delivered(&emitter, 1, ["block", "ingested"], blocks[at]);
    let line = |at: usize| {
        let (height, hash) = (&blocks[at]["height"], &blocks[at]["hash"]);
        let payload = json!({ "network_id": NETWORK, "finalized_height": height, "finalized_hash": hash,
                              "head_height": height });
        delivered(&emitter, 1, ["finality", "advanced"], &payload)
    };
    let waiting = [block(0), block(1), line(0), block(2), line(1)];
    assert_eq!(handler.first_of(&waiting), 4);
    let mut reached = Vec::new();
    for (batch, later) in [(&waiting[..4], &waiting[4..]), (&waiting[4..], &[])] {
        handler.prepare(batch, later).await.expect("prepares");
        let mut conn = world.conn().await;
        let tx = conn.tx().await.expect("begins");
        handler.apply(&tx, batch).await.expect("applies");
        tx.commit().await.expect("commits");
        let progress = bulk::read_progress(&world.conn().await, NETWORK).await.expect("reads");
        reached.push(progress.map(|progress| (progress.head, progress.finalized)));
    }
    let height = |at: usize| blocks[at]["height"].as_i64().expect("a height");
    assert_eq!(reached, [Some((height(2), -1)), Some((height(2), height(1)))]);
}
