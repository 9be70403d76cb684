//! `kill -9` at any moment costs time and nothing else.

mod world;

use std::time::{Duration, Instant};

use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig, SimEvent};
use world::{Dice, Setup, World, live_through, same};

/// Nothing is stored twice, and as many logs as the chain has.
async fn nothing_is_doubled(world: &World, seed: u64) {
    let twice = world
        .text(
            "select 'record ' || block_height || '/' || event_index from raw.events
              group by network_id, block_height, event_index having count(*) > 1
              union all
             select 'transfer ' || event_id from projection.transfers group by event_id having count(*) > 1
              union all
             select 'event ' || source_event_id || '/' || sub_index from ledger.normalized_events
              group by source_event_id, sub_index having count(*) > 1",
        )
        .await;
    assert!(twice.is_empty(), "seed {seed}: {twice}");
    let finalized = world.sim.finalized();
    let logs = world.sim.logs(0, finalized);
    let movements =
        logs.iter().filter(|log| matches!(log.event, SimEvent::Erc721 { .. } | SimEvent::Erc1155 { .. }));
    let stored = world
        .number(&format!(
            "select count(distinct (block_number, event_index)) from ledger.normalized_events
              where not is_reverted and block_number <= {finalized} and event_kind in ('transfer', 'mint', 'burn')"
        ))
        .await;
    assert_eq!(stored, i64::try_from(movements.count()).ok(), "seed {seed}: logs that move something");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_kills_during_one_history() {
    let seed = 41;
    let sim = Sim::new(SimConfig { events_per_block: 6, ..SimConfig::small(seed) });
    sim.mine(2_400);
    // Slow enough that kills find it at work, and narrow enough that it dies with several ranges open.
    let slow = FaultProfile { seed, slow: 1_000, slow_ms: 50, ..FaultProfile::default() };
    let setup = Setup { lease_range: 16, ..Setup::default() };
    let mut world = World::new(sim, vec![slow], setup).await;
    let mut dice = Dice::new(seed);
    let tiles = "select count(*) from raw.range_evidence";
    let mut killed = 0;
    while killed < 50 {
        let (asked, stored) = (world.servers[0].http_requests(), world.number(tiles).await.unwrap_or(0));
        let mut running = world.start(&["sync", "--until", "finalized", "--json"]);
        // Some die while they start, some after so many requests, some right after they stored something.
        let requests = asked + dice.below(24);
        let begun = Instant::now();
        while !running.has_ended() {
            let enough = match killed % 5 {
                0 => true,
                1 => world.number(tiles).await.is_some_and(|now| now > stored),
                _ => world.servers[0].http_requests() > requests,
            };
            // When the dead hold all ranges there is nothing to do until their leases run out.
            if enough || begun.elapsed() > Duration::from_secs(2) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(dice.below(200))).await;
        if running.has_ended() {
            world.sim.mine(200); // Too fast for us.
            continue;
        }
        running.kill().await;
        killed += 1;
    }
    let before = world.number(tiles).await;
    assert!(before.is_some_and(|tiles| tiles > 0), "seed {seed}: killed before it ever stored something");
    world.servers[0].set_profile(FaultProfile::default());
    world.run(&["sync", "--until", "finalized", "--json"]).await.succeeded("the last run");
    let truth = world.truth(world.sim.finalized());
    same(&world.ledger().await, &truth, &format!("seed {seed}: the ledger"));
    same(&world.view_final().await, &truth, &format!("seed {seed}: the finalized view"));
    world.verify(seed).await;
    world.read_on_to_the_head(seed).await;
    world.rebuild_changes_nothing(seed).await;
    nothing_is_doubled(&world, seed).await;
    world.nothing_was_put_aside(seed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_while_live() {
    let seed = 42;
    let sim = Sim::new(SimConfig { events_per_block: 6, ..SimConfig::small(seed) });
    sim.mine(100);
    let mut world = World::plain(sim).await;
    let mut dice = Dice::new(seed);
    let projected = "select projected_height from projection.network_status";
    for kill in 0..10 {
        let mut running = world.live();
        // Leases of the dead run out after some seconds: only now and then does a life last that long, so
        // that relay and workers die at work, too.
        if kill % 4 == 0 {
            let head = i64::try_from(world.sim.head()).expect("fits");
            world.reach(&mut running, projected, head).await;
        }
        for _ in 0..1 + dice.below(3) {
            let kinds = u64::try_from(ReorgKind::ALL.len()).expect("fits");
            let kind = usize::try_from(dice.below(kinds)).expect("fits");
            live_through(&world.sim, &mut dice, ReorgKind::ALL[kind]);
            tokio::time::sleep(Duration::from_millis(30 + dice.below(300))).await;
        }
        assert!(!running.has_ended(), "seed {seed}: {}", running.log());
        running.kill().await;
    }
    world.sim.mine(3);
    let mut running = world.live();
    world.settle(&mut running, seed).await;
    assert_eq!(running.stop().await.code, Some(0), "seed {seed}");
    let truth = world.truth(world.sim.finalized());
    same(&world.ledger().await, &truth, &format!("seed {seed}: the ledger"));
    world.verify(seed).await;
    world.rebuild_changes_nothing(seed).await;
    nothing_is_doubled(&world, seed).await;
    world.nothing_was_put_aside(seed).await;
}
