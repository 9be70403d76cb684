//! The whole way from a node to the read models, with the truth known: history, life with reorgs on every
//! engine, and a start in the middle.

mod world;

use std::time::Duration;

use serde_json::Value;
use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig};
use tidemark_testkit::{Nats, Redis};
use world::{Balances, Dice, Setup, World, live_through, same};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_equals_the_truth() {
    let seed = 11;
    let sim = Sim::new(SimConfig::small(seed));
    sim.mine(300);
    let mut world = World::plain(sim).await;
    let out = world.run(&["sync", "--until", "finalized", "--json"]).await.succeeded("sync");
    let last: Value = serde_json::from_str(out.lines().last().expect("a line")).expect("JSON");
    for key in ["events", "seconds", "events_per_second", "rpc_calls", "peak_rss_bytes", "cpu_seconds"] {
        assert!(last[key].as_f64().is_some_and(|number| number > 0.0), "{key}: {last}");
    }
    let finalized = world.sim.finalized();
    let truth = world.truth(finalized);
    assert!(truth.len() > 100, "a chain with something on it");
    same(&world.ledger().await, &truth, "the ledger");
    same(&world.view_final().await, &truth, "the finalized view");
    world.verify(seed).await;
    world.read_on_to_the_head(seed).await;
    world.rebuild_changes_nothing(seed).await;
    world.nothing_was_put_aside(seed).await;
}

/// A first history of more than 5 000 blocks goes into the ledger alone, through a kill; owners and indexes come at its
/// end, and live follows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_first_history_is_shown_at_its_end() {
    let seed = 12;
    let sim = Sim::new(SimConfig { events_per_block: 1, ..SimConfig::small(seed) });
    sim.mine(21_000);
    let mut world = World::plain(sim).await;
    let mut running = world.start(&["sync", "--until", "finalized"]);
    world.reach(&mut running, "select head_height from ledger.network_progress", 1_000).await;
    running.kill().await;
    let due =
        "select count(*) from ledger.network_progress p join projection.network_status s using (network_id)
                where p.read_models_due and s.projected_height is null";
    assert_eq!(world.number(due).await, Some(1));
    assert_eq!(world.number("select count(*) from projection.ownership_view").await, Some(0));
    assert!(world.number("select count(*) from system.deferred_indexes").await > Some(0));
    world.run(&["sync", "--until", "finalized"]).await.succeeded("sync");
    assert_eq!(world.number(due).await, Some(0));
    assert_eq!(world.number("select count(*) from system.deferred_indexes").await, Some(0));
    assert_eq!(world.number("select count(*) from pg_index where not indisvalid").await, Some(0));
    let truth = world.truth(world.sim.finalized());
    same(&world.ledger().await, &truth, "the ledger");
    same(&world.view_final().await, &truth, "the finalized view");
    world.verify(seed).await;
    world.read_on_to_the_head(seed).await;
    world.rebuild_changes_nothing(seed).await;
    world.nothing_was_put_aside(seed).await;
}

/// Lives through `rounds` of every kind of reorg, then stands still, and everything must be right.
async fn live_equals_the_truth(seed: u64, blocks: u64, rounds: u64, bus: String) {
    let sim = Sim::new(SimConfig { events_per_block: 8, ..SimConfig::small(seed) });
    sim.mine(blocks);
    let setup = Setup { bus, ..Setup::default() };
    let mut world = World::new(sim, vec![FaultProfile::default()], setup).await;
    let mut running = world.live();
    // Reorgs are met by a ledger that follows the head, not only by an ingester that reads history.
    let head = i64::try_from(world.sim.head()).expect("fits");
    world.reach(&mut running, "select projected_height from projection.network_status", head).await;
    // One reorg that cannot be missed: its old block is in the ledger, its new one must come.
    world.sim.reorg(1, ReorgKind::Replace);
    let head = i64::try_from(world.sim.head()).expect("fits");
    world.reach(&mut running, "select projected_height from projection.network_status", head).await;
    world.reach(&mut running, "select count(distinct reorg_id) from system.reorg_checkpoints", 1).await;
    let mut dice = Dice::new(seed);
    for _ in 0..rounds {
        for kind in ReorgKind::ALL {
            live_through(&world.sim, &mut dice, kind);
            // The pace of a chain: some reorgs are met one by one, others lie behind us when we look.
            tokio::time::sleep(Duration::from_millis(20 + dice.below(250))).await;
        }
    }
    world.sim.mine(3);
    world.settle(&mut running, seed).await;
    let stopped = running.stop().await;
    assert_eq!(stopped.code, Some(0), "seed {seed}: {}", stopped.err);
    let finalized = world.sim.finalized();
    same(&world.ledger().await, &world.truth(finalized), &format!("seed {seed}: the ledger"));
    world.verify(seed).await;
    world.rebuild_changes_nothing(seed).await;
    world.nothing_was_put_aside(seed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_with_reorgs_equals_the_truth() {
    live_equals_the_truth(21, 120, 3, String::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_over_nats_equals_the_truth() {
    let nats = Nats::start().await.expect("starts");
    live_equals_the_truth(22, 80, 1, format!("engine = \"nats\"\nnats_url = \"{}\"", nats.url)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_over_redis_equals_the_truth() {
    let redis = Redis::start().await.expect("starts");
    live_equals_the_truth(23, 80, 1, format!("engine = \"redis\"\nredis_url = \"{}\"", redis.url)).await;
}

/// Balances older than the first block read come from the nodes: everybody who moved something since has the
/// balance the chain says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_in_the_middle_equals_the_truth_of_all_who_moved() {
    let seed = 31;
    let sim = Sim::new(SimConfig::small(seed));
    sim.mine(300);
    let half = 150;
    let setup = Setup { start_block: half, ..Setup::default() };
    let mut world = World::new(sim, vec![FaultProfile::default()], setup).await;
    world.run(&["sync", "--until", "finalized", "--json"]).await.succeeded("sync");
    let finalized = world.sim.finalized();
    let moved = moved(&world.sim, half, finalized);
    assert!(moved.len() > 100);
    let truth = world.truth(finalized);
    let of_moved =
        |all: Balances| -> Balances { all.into_iter().filter(|(key, _)| moved.contains(key)).collect() };
    let before = world.truth(half - 1);
    assert!(moved.iter().any(|key| before.contains_key(key)), "somebody had something before");
    same(&of_moved(world.ledger().await), &of_moved(truth.clone()), "the ledger");
    same(&of_moved(world.view_final().await), &of_moved(truth.clone()), "the finalized view");
    // What did not move is unknown, and never invented.
    for (key, qty) in world.ledger().await {
        assert_eq!(truth.get(&key), Some(&qty), "{key:?}");
    }
    // Live goes on from there, with reorgs.
    let mut running = world.live();
    let mut dice = Dice::new(seed);
    for kind in ReorgKind::ALL {
        live_through(&world.sim, &mut dice, kind);
    }
    world.sim.mine(3);
    let head = i64::try_from(world.sim.head()).expect("fits");
    world.reach(&mut running, "select projected_height from projection.network_status", head).await;
    let finalized = i64::try_from(world.sim.finalized()).expect("fits");
    world.reach(&mut running, "select finalized_height from ledger.network_progress", finalized).await;
    assert_eq!(running.stop().await.code, Some(0));
    let moved = self::moved(&world.sim, half, world.sim.finalized());
    let truth = world.truth(world.sim.finalized());
    let ledger = world.ledger().await;
    for key in &moved {
        assert_eq!(ledger.get(key), truth.get(key), "{key:?}");
    }
    world.verify(seed).await;
    world.nothing_was_put_aside(seed).await;
}

/// Every balance that an event of these blocks touched.
fn moved(sim: &Sim, from: u64, to: u64) -> std::collections::BTreeSet<tidemark_sim::BalanceKey> {
    use tidemark_sim::SimEvent;
    let mut touched = std::collections::BTreeSet::new();
    for log in sim.logs(from, to) {
        let (sides, tokens) = match &log.event {
            SimEvent::Erc721 { from, to, token_id } => ([*from, *to], vec![*token_id]),
            SimEvent::Erc1155 { from, to, items, .. } => {
                ([*from, *to], items.iter().filter(|(_, qty)| !qty.is_zero()).map(|(id, _)| *id).collect())
            }
            _ => continue,
        };
        for token in tokens {
            for side in sides {
                touched.insert((format!("{:#x}", log.address), token.to_string(), format!("{side:#x}")));
            }
        }
    }
    touched
}
