//! The ledger's handler serves many lanes at once, one per partition of its stream.

use tidemark_bus::dispatch::{Delivered, Handler as _};
use tidemark_bus::registry::Registry;
use tidemark_model::subject::Subject;
use tidemark_pipeline::handlers::LedgerHandler;
use tidemark_store::bulk;
use tidemark_store::outbox::{Emitter, EmitterOptions};

use super::fake::FakeChain;
use super::*;

/// Before: a lane's `prepare` threw away what another lane had made ready, whose `apply` then read the block again,
/// on a second connection while it held one. A thousand networks stood still so, each waiting for the others.
#[tokio::test(flavor = "multi_thread")]
async fn lanes_keep_what_they_made_ready_for_themselves() {
    let world = World::new(FakeChain::new(0, 12, None)).await;
    world.catch_up().await;
    bulk::ensure_progress(&world.conn().await, NETWORK, Height(0)).await.expect("makes the row");
    let raw = Db::open(world.db.url(), &DbOptions::default()).expect("a pool");
    let emitter = Arc::new(Emitter::new(EmitterOptions::default(), Arc::new(Registry::builtin())));
    let adapter: Arc<dyn ChainAdapter> = Arc::<FakeChain>::clone(&world.chain);
    let reader = RawReader::new(Arc::clone(&world.blobs));
    let handler = LedgerHandler::new([adapter], raw.clone(), world.db.clone(), reader, Arc::clone(&emitter));
    let drafts = world.drafts().await;
    let (_, first) = drafts.iter().find(|(subject, _)| subject == "chain.block.ingested.v1").expect("blocks");
    let batch = |part: u16| {
        let subject = Subject::new("chain", "block", "ingested", 1).expect("a subject");
        let at = time::OffsetDateTime::UNIX_EPOCH;
        let draft = Draft::derived(subject, &format!("lane {part}"), NETWORK.to_string(), first.clone(), at);
        let envelope = emitter.envelope(&draft).expect("an envelope");
        [Delivered { envelope, stream: "chain".to_owned(), part, pseq: 1, replay: false }]
    };
    let lanes = [batch(1), batch(2)];
    for lane in &lanes {
        handler.prepare(lane).await.expect("prepares");
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
