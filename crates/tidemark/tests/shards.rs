//! ADDR_SHARDS: a list of contracts read in parts is the same truth, through kills and reorgs.

mod world;

use std::time::Duration;

use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig};
use world::{Dice, Setup, World, live_through, same};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_shards_are_the_truth_through_kills_and_reorgs() {
    let seed = 71;
    let sim = Sim::new(SimConfig { events_per_block: 6, ..SimConfig::small(seed) });
    sim.mine(400);
    let contracts: Vec<String> = sim.nft_contracts().iter().map(|address| format!("\"{address}\"")).collect();
    assert!(contracts.len() >= 3, "something to divide");
    let slow = FaultProfile { seed, slow: 1_000, slow_ms: 20, ..FaultProfile::default() };
    let setup = Setup {
        lease_range: 16,
        ingest: "addr_shards = 3\n".into(),
        network: format!("contracts = [{}]", contracts.join(", ")),
        ..Setup::default()
    };
    let mut world = World::new(sim, vec![slow], setup).await;
    let mut dice = Dice::new(seed);
    for _ in 0..6 {
        let mut running = world.start(&["sync", "--until", "finalized", "--json"]);
        let asked = world.servers[0].http_requests() + 10 + dice.below(40);
        while !running.has_ended() && world.servers[0].http_requests() < asked {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if running.has_ended() {
            world.sim.mine(100); // Too fast for us.
            continue;
        }
        running.kill().await;
    }
    world.servers[0].set_profile(FaultProfile::default());
    world.run(&["sync", "--until", "finalized", "--json"]).await.succeeded("the last run");
    assert!(world.number("select count(*) from system.sync_cursors").await > Some(1), "really divided");
    let truth = world.truth(world.sim.finalized());
    same(&world.ledger().await, &truth, "the ledger after history");
    world.verify(seed).await;
    // Life, with a kill in it.
    let mut running = world.live();
    let head = i64::try_from(world.sim.head()).expect("fits");
    world.reach(&mut running, "select projected_height from projection.network_status", head).await;
    for kind in ReorgKind::ALL {
        live_through(&world.sim, &mut dice, kind);
        tokio::time::sleep(Duration::from_millis(20 + dice.below(150))).await;
    }
    running.kill().await;
    world.sim.mine(3);
    let mut running = world.live();
    world.settle(&mut running, seed).await;
    assert_eq!(running.stop().await.code, Some(0));
    world.verify(seed).await;
    world.rebuild_changes_nothing(seed).await;
    world.nothing_was_put_aside(seed).await;
}
