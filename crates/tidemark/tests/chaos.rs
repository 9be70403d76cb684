//! Bad nodes: with one honest among them the truth comes out; without one, nobody is told a lie in silence.

mod world;

use std::time::{Duration, Instant};

use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig};
use world::{Dice, PATIENCE, Setup, World, live_through, same};

/// Seeds by default; `TIDEMARK_CHAOS_SEEDS=n` for more.
const SEEDS: u64 = 2;

fn seeds() -> u64 {
    std::env::var("TIDEMARK_CHAOS_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS)
}

async fn chaos(seed: u64) {
    let sim = Sim::new(SimConfig { events_per_block: 6, ..SimConfig::small(seed) });
    sim.mine(150);
    let providers = vec![
        FaultProfile::chaos(seed),
        FaultProfile::default(),
        FaultProfile::chaos(seed.wrapping_add(1_000)),
    ];
    let mut world = World::new(sim, providers, Setup::default()).await;
    world.run(&["sync", "--until", "finalized", "--json"]).await.succeeded(&format!("seed {seed}"));
    let truth = world.truth(world.sim.finalized());
    same(&world.ledger().await, &truth, &format!("seed {seed}: the ledger after history"));
    let mut running = world.live();
    let mut dice = Dice::new(seed);
    for kind in ReorgKind::ALL {
        live_through(&world.sim, &mut dice, kind);
        tokio::time::sleep(Duration::from_millis(20 + dice.below(200))).await;
    }
    world.sim.mine(3);
    world.settle(&mut running, seed).await;
    assert_eq!(running.stop().await.code, Some(0), "seed {seed}");
    world.verify(seed).await;
    world.rebuild_changes_nothing(seed).await;
    world.nothing_was_put_aside(seed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_honest_node_among_chaotic_ones_is_enough() {
    for seed in 0..seeds() {
        chaos(51 + seed).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_hide_logs_are_never_believed_in_silence() {
    let hiding =
        |seed| FaultProfile { seed, hidden_block_logs: 500, empty_logs: 300, ..FaultProfile::default() };
    hidden(61, vec![hiding(61), hiding(62)], Setup::default()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_node_that_always_hides_a_block_is_never_believed_in_silence() {
    // As configured by default: the blooms of all headers are checked.
    let hiding = FaultProfile { seed: 63, hidden_block_logs: 1_000, ..FaultProfile::default() };
    hidden(63, vec![hiding.clone()], Setup::default()).await;
    // Without the receipts of whole blocks, too.
    let unsupported_methods = vec!["eth_getBlockReceipts".to_owned()];
    hidden(64, vec![FaultProfile { seed: 64, unsupported_methods, ..hiding }], Setup::default()).await;
}

/// All there is are nodes that hide logs: the truth, or a word about it.
async fn hidden(seed: u64, providers: Vec<FaultProfile>, setup: Setup) {
    let sim = Sim::new(SimConfig { events_per_block: 6, ..SimConfig::small(seed) });
    sim.mine(120);
    let mut world = World::new(sim, providers, setup).await;
    let mut running = world.start(&["sync", "--until", "finalized", "--json"]);
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE && !running.has_ended() && world.complained().await.unwrap_or(0) == 0 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let finished = running.has_ended();
    let truth = world.truth(world.sim.finalized());
    if finished && world.ledger().await == truth {
        return; // It asked until it had everything.
    }
    assert!(!finished, "seed {seed}: it ended with wrong balances: {}", world.complaints().await);
    let said = world.complaints().await;
    assert!(!said.is_empty(), "seed {seed}: it hangs and says nothing: {}", running.log());
    running.kill().await;
    // What was accepted meanwhile is true: every balance that is final is one the chain had at that height.
    let height = world.number("select finalized_height from ledger.network_progress").await.unwrap_or(-1);
    if let Ok(height) = u64::try_from(height) {
        same(&world.ledger().await, &world.truth(height), &format!("seed {seed}: the ledger at {height}"));
    }
    // And once they tell everything, it goes on by itself.
    for server in &world.servers {
        server.set_profile(FaultProfile::default());
    }
    world.run(&["sync", "--until", "finalized", "--json"]).await.succeeded("the next run");
    same(&world.ledger().await, &truth, &format!("seed {seed}: the ledger in the end"));
    world.verify(seed).await;
}
