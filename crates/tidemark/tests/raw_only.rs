//! Raw ingestion needs nobody: with relay, bus and workers stopped it reads history and follows the tip, and
//! what was left undone is done when they come.

mod world;

use std::time::{Duration, Instant};

use serde_json::Value;
use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig};
use world::{Dice, PATIENCE, Setup, World, live_through, same};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn raw_only_mode_holds_with_everything_else_stopped() {
    let seed = 81;
    let sim = Sim::new(SimConfig { events_per_block: 6, ..SimConfig::small(seed) });
    sim.mine(150);
    let mut world = World::new(sim, vec![FaultProfile::default()], Setup::default()).await;
    let out = world.run(&["sync", "--raw-only", "--json"]).await.succeeded("sync --raw-only");
    let last: Value = serde_json::from_str(out.lines().last().expect("a line")).expect("JSON");
    assert!(last["events"].as_u64().is_some_and(|events| events > 100), "{last}");
    assert_eq!(
        world.number("select count(*) from raw.events").await.map(i64::unsigned_abs),
        last["events"].as_u64()
    );
    world.run(&["verify", "completeness"]).await.succeeded("verify completeness");
    assert_eq!(world.number("select count(*) from ledger.normalized_events").await, Some(0));
    // The tip, with reorgs, and nobody who listens.
    let mut running = world.start(&["run", "--roles", "ingest"]);
    let mut dice = Dice::new(seed);
    for kind in ReorgKind::ALL {
        live_through(&world.sim, &mut dice, kind);
        tokio::time::sleep(Duration::from_millis(20 + dice.below(100))).await;
    }
    world.sim.mine(3);
    let head = world.sim.block(world.sim.head()).expect("a head");
    let stored = format!("select height from raw.blocks where hash = '\\x{:x}'", head.hash);
    let begun = Instant::now();
    while world.number(&stored).await.is_none() {
        assert!(begun.elapsed() < PATIENCE && !running.has_ended(), "{}", running.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(running.stop().await.code, Some(0));
    world.run(&["verify", "completeness"]).await.succeeded("verify completeness at the tip");
    assert_eq!(world.number("select count(*) from ledger.normalized_events").await, Some(0));
    assert_eq!(world.complained().await, Some(0), "{}", world.complaints().await);
    // They come back: everything is there.
    let mut running = world.live();
    world.settle(&mut running, seed).await;
    assert_eq!(running.stop().await.code, Some(0));
    let truth = world.truth(world.sim.finalized());
    same(&world.ledger().await, &truth, "the ledger");
    world.verify(seed).await;
    world.nothing_was_put_aside(seed).await;
}
