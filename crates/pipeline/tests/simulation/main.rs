//! The ledger under everything that happens to a deployment, with the simulated chain as the truth: real
//! Postgres, a seeded schedule of deliveries (duplicated, reordered across networks, late, in batches of any
//! size), transactions ended at every writing statement, reorgs of every kind, finality that moves and
//! stalls, history in bulk mixed with live, and starts in the middle. After each run the ledger equals the
//! truth at every height, every invariant holds, and a clean replay gives the same rows and digest.
//!
//! `make sim SEEDS=20000` runs more seeds, `make sim SEED=7` one, with its trace.

mod chain;
mod check;
mod feed;
mod ground;
mod lane;
mod run;

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use ground::Ground;
use run::Trace;

/// Seeds that `make test` runs, over all tests of this file.
const SEEDS: u64 = 200;
/// Tests that share them; nextest runs as many at once as there are cores.
const TESTS: u64 = 4;
/// Seeds that share a database: its tables stay small, and it is made rarely.
const SEEDS_PER_DATABASE: u64 = 25;
/// Actions shown of a seed that failed.
const SHOWN: usize = 60;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

async fn attempt(ground: &Ground, seed: u64) -> (Trace, Result<(), String>) {
    let mut trace = Trace::default();
    let done = AssertUnwindSafe(run::run(ground, seed, &mut trace)).catch_unwind().await;
    let done = done.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default())
    });
    (trace, done)
}

#[expect(clippy::print_stdout, reason = "a long run says how far it is, a failing seed what happened")]
async fn seeds(share: u64) {
    let only = number("TIDEMARK_SIM_SEED");
    let (first, count) = match only {
        Some(seed) if seed % TESTS == share => (seed, 1),
        Some(_) => return,
        None => (number("TIDEMARK_SIM_FROM").unwrap_or(0), number("TIDEMARK_SIM_SEEDS").unwrap_or(SEEDS)),
    };
    let mut failed = Vec::new();
    let mut ground = Ground::new().await;
    let mine = (first..first + count).filter(|seed| seed % TESTS == share);
    for (done, seed) in (0_u64..).zip(mine) {
        if done > 0 && done % SEEDS_PER_DATABASE == 0 {
            println!("{done} seeds, last {seed}; {} failed", failed.len());
            ground = Ground::new().await;
        }
        let (trace, outcome) = attempt(&ground, seed).await;
        if only.is_some() {
            println!("{}", trace.0.join("\n"));
        }
        if let Err(error) = outcome {
            let from = trace.0.len().saturating_sub(SHOWN);
            println!("{}\n\nseed {seed}: {error}\nagain: make sim SEED={seed}\n", trace.0[from..].join("\n"));
            failed.push(seed);
        }
        assert!(failed.len() < 5, "seeds {failed:?} failed; each again: make sim SEED=N");
    }
    let kills = ground.kills.lock().expect("nobody panics").clone();
    println!("transactions were ended at {} places: {kills:#?}", kills.len());
    assert!(failed.is_empty(), "seeds {failed:?} failed; each again: make sim SEED=N");
}

#[tokio::test]
async fn the_ledger_equals_the_simulated_truth_first_share_of_seeds() {
    seeds(0).await;
}
#[tokio::test]
async fn the_ledger_equals_the_simulated_truth_second_share_of_seeds() {
    seeds(1).await;
}
#[tokio::test]
async fn the_ledger_equals_the_simulated_truth_third_share_of_seeds() {
    seeds(2).await;
}
#[tokio::test]
async fn the_ledger_equals_the_simulated_truth_fourth_share_of_seeds() {
    seeds(3).await;
}

#[tokio::test]
async fn a_seed_gives_the_same_run_twice() {
    for seed in [1_000_001, 1_000_002] {
        let (one, other) = (Ground::new().await, Ground::new().await);
        let ((first, a), (second, b)) = (attempt(&one, seed).await, attempt(&other, seed).await);
        assert_eq!((a, b), (Ok(()), Ok(())));
        assert_eq!(first, second, "a seed reproduces");
    }
}
