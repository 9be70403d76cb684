//! Random chains with reorgs, duplicated and late deliveries: the ledger equals the truth, at every height
//! where finality stood, and every invariant holds. A failing seed is in the message.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::U256;
use rand::Rng as _;
use rand::seq::IndexedRandom as _;
use tidemark_model::chain::BlockRef;
use tidemark_model::ids::AssetId;
use tidemark_pipeline::workers::{BlockOutcome, Openings, prepare};

use crate::openings::Oracle;
use crate::truth::{State, TrueBlock, Truth};
use crate::world::World;

#[derive(Debug, Clone)]
enum Message {
    Block(Box<TrueBlock>),
    Reorg(Vec<BlockRef>, Vec<BlockRef>),
    Final(u64),
}

/// What the ingester would say of a random chain, in an order a bus might deliver it.
fn script(truth: &mut Truth, steps: usize) -> Vec<Message> {
    let mut finalized = truth.tip().at.height.0;
    let mut messages = vec![Message::Block(Box::new(truth.tip().clone()))];
    let mut again = Vec::new();
    for _ in 0..steps {
        let tip = truth.tip().at.height.0;
        let open = tip - finalized;
        match truth.random.random_range(0..10) {
            0 | 1 if open > 0 => {
                let depth = truth.random.random_range(1..=open.min(4));
                let gone = truth.roll_back(usize::try_from(depth).expect("small"));
                again = gone.iter().flat_map(|block| block.acts.clone()).collect();
                let length = truth.random.random_range(depth..=depth + 1);
                let new: Vec<TrueBlock> = (0..length).map(|_| truth.extend(&mut again)).collect();
                let refs = |blocks: &[TrueBlock]| blocks.iter().map(|block| block.at).collect::<Vec<_>>();
                let reorg = Message::Reorg(refs(&gone), refs(&new));
                let mut branch: Vec<Message> =
                    new.into_iter().map(|block| Message::Block(Box::new(block))).collect();
                // Sometimes the message comes after some of the blocks it speaks of.
                let at = if truth.random.random_bool(0.4) {
                    truth.random.random_range(0..=branch.len())
                } else {
                    0
                };
                branch.insert(at, reorg);
                messages.extend(branch);
                // An orphaned block may come late.
                let late = gone.choose(&mut truth.random).expect("one is gone").clone();
                messages.push(Message::Block(Box::new(late)));
            }
            2 | 3 if open > 2 => {
                finalized += truth.random.random_range(1..=open - 1);
                messages.push(Message::Final(finalized));
            }
            _ => messages.push(Message::Block(Box::new(truth.extend(&mut again)))),
        }
        if truth.random.random_bool(0.3) {
            let near = messages.len().saturating_sub(6);
            let copy = messages[near..].choose(&mut truth.random).expect("there are messages").clone();
            messages.push(copy);
        }
    }
    let tip = truth.tip().at.height.0;
    messages.push(Message::Final(tip));
    messages
}

async fn deliver(world: &World, messages: &[Message], oracle: Option<&Oracle>) {
    let mut deferred: Vec<&TrueBlock> = Vec::new();
    for message in messages {
        match message {
            Message::Block(block) => deferred.push(block),
            Message::Reorg(orphaned, canonical) => {
                world.reorg(orphaned, canonical).await;
            }
            Message::Final(height) => {
                world.finalize(*height).await;
            }
        }
        // What had to wait is tried again, as the dispatcher would.
        let mut waiting = Vec::new();
        for block in deferred {
            let events: Vec<_> = block.acts.iter().map(|act| act.at(block.at)).collect();
            let openings = match oracle {
                Some(oracle) => {
                    prepare(&world.db, oracle, &world.network, &events, 1_000).await.expect("asks")
                }
                None => Openings::default(),
            };
            let outcome = world.try_block(block.at, events, &openings).await.expect("processes");
            if matches!(outcome, BlockOutcome::Gap { .. }) {
                waiting.push(block);
            }
        }
        deferred = waiting;
    }
    assert!(deferred.is_empty(), "every gap was filled");
}

/// All finalized balances.
pub(crate) async fn owned(world: &World) -> State {
    let conn = world.db.conn().await.expect("connects");
    let rows = conn
        .query(
            "read everything",
            "select o.asset_id, a.address_normalized, o.qty::text from ledger.ownership_current o
               join ledger.accounts a on a.id = o.account_id",
            &[],
        )
        .await
        .expect("reads");
    rows.iter()
        .map(|row| {
            let qty: &str = row.get(2);
            ((AssetId(row.get(0)), row.get(1)), qty.parse::<U256>().expect("a number"))
        })
        .collect()
}

async fn check(seed: u64) {
    let mut truth = Truth::new(seed);
    let messages = script(&mut truth, 25);
    let world = World::new().await;
    deliver(&world, &messages, None).await;
    let tip = truth.chain.len() - 1;
    assert_eq!(&owned(&world).await, truth.state_at(tip), "seed {seed}");
    assert_eq!(world.violations().await, Vec::<String>::new(), "seed {seed}");
    let conn = world.db.conn().await.expect("connects");
    let rows = conn
        .query("read digests", "select height, digest::text from ledger.digest_history", &[])
        .await
        .expect("reads");
    let found: BTreeMap<usize, String> = rows
        .iter()
        .map(|row| (usize::try_from(row.get::<_, i64>(0)).expect("a height"), row.get(1)))
        .collect();
    for (height, digest) in found {
        assert_eq!(digest, truth.digest_at(height).to_string(), "seed {seed} at height {height}");
    }
    assert_eq!(world.count("select count(*) from ledger.quarantine").await, 0, "seed {seed}");
    // Back to the middle, and forward again.
    let middle = tip / 2;
    world.rewind(u64::try_from(middle).expect("small")).await;
    assert_eq!(&owned(&world).await, truth.state_at(middle), "seed {seed}");
    assert_eq!(world.violations().await, Vec::<String>::new(), "seed {seed}");
    world.finalize(u64::try_from(tip).expect("small")).await;
    assert_eq!(world.digest().await, truth.digest_at(tip), "seed {seed}");
    assert_eq!(world.violations().await, Vec::<String>::new(), "seed {seed}");
}

#[tokio::test]
async fn the_ledger_equals_the_truth_for_seeds_0_to_9() {
    for seed in 0..10 {
        check(seed).await;
    }
}
#[tokio::test]
async fn the_ledger_equals_the_truth_for_seeds_10_to_19() {
    for seed in 10..20 {
        check(seed).await;
    }
}
#[tokio::test]
async fn the_ledger_equals_the_truth_for_seeds_20_to_29() {
    for seed in 20..30 {
        check(seed).await;
    }
}

/// The same, for a ledger that starts in the middle: what moved since is as it is.
async fn check_from_half(seed: u64) {
    let mut truth = Truth::new(seed);
    let mut again = Vec::new();
    for _ in 0..20 {
        truth.extend(&mut again);
    }
    let messages = script(&mut truth, 25);
    let world = World::starting_at(20).await;
    let oracle = Oracle { network: world.network.clone(), state: truth.state_at(19).clone(), pruned: false };
    deliver(&world, &messages, Some(&oracle)).await;
    let mut expected = truth.state_at(truth.chain.len() - 1).clone();
    let since = truth.chain[20..].iter().flat_map(|block| &block.acts).filter(|act| !act.qty.is_zero());
    let moved: BTreeSet<(AssetId, String)> = since
        .flat_map(|act| act.from.iter().chain(&act.to).map(|name| (act.asset(), name.clone())))
        .collect();
    expected.retain(|pair, _| moved.contains(pair));
    assert_eq!(owned(&world).await, expected, "seed {seed}");
    assert_eq!(world.violations().await, Vec::<String>::new(), "seed {seed}");
    assert_eq!(world.count("select count(*) from ledger.quarantine").await, 0, "seed {seed}");
    world.rewind(25).await;
    assert_eq!(world.violations().await, Vec::<String>::new(), "seed {seed}");
    world.finalize(truth.tip().at.height.0).await;
    assert_eq!(owned(&world).await, expected, "seed {seed}");
    assert_eq!(world.violations().await, Vec::<String>::new(), "seed {seed}");
}

#[tokio::test]
async fn starting_at_half_equals_the_truth_through_reorgs_for_seeds_0_to_9() {
    for seed in 0..10 {
        check_from_half(seed).await;
    }
}

/// `TIDEMARK_LEDGER_SEEDS=500` for a longer look.
#[tokio::test]
async fn the_ledger_equals_the_truth_for_as_many_seeds_as_asked() {
    let seeds = std::env::var("TIDEMARK_LEDGER_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    for seed in 1_000..1_000 + seeds {
        check(seed).await;
        check_from_half(seed).await;
    }
}
