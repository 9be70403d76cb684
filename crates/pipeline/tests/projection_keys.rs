//! Live recomputation by key against the truth recomputed from nothing.

mod projection_support;

use std::collections::{BTreeMap, BTreeSet};

use projection_support::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tidemark_model::envelope::Envelope;
use tidemark_pipeline::projectors::{Beside, ProjectionName, Touched, rebuild_keys, rebuild_projection};

/// Owners that were committed and not counted.
const AHEAD: &str = "select count(*) from projection.owners_ahead";

/// Forgets all projections and projects every key at once.
async fn from_nothing(world: &World) -> BTreeMap<&'static str, Vec<String>> {
    for table in TABLES {
        world.run(&format!("delete from projection.{table}"), &[]).await;
    }
    world.run("delete from projection.transfer_positions", &[]).await;
    let everything = Touched {
        events: world.events.keys().copied().collect(),
        whole_assets: world.events.values().map(|event| event.what.asset()).collect(),
        ..Touched::default()
    };
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    rebuild_keys(&tx, NETWORK, &everything, None).await.expect("projects");
    tx.commit().await.expect("commits");
    world.dump().await
}

fn random_moves(world: &World, rng: &mut StdRng, at_most: usize) -> Vec<Move> {
    let mut balances = world.balances();
    let mut moves = Vec::new();
    for _ in 0..rng.random_range(0..=at_most) {
        let contract = rng.random_range(0..2);
        let token = rng.random_range(0..4);
        let asset = asset(contract, token).0;
        let holders: Vec<usize> =
            (1..6).filter(|at| balances.get(&(asset, account(*at).0)).is_some_and(|qty| *qty > 0)).collect();
        let to = rng.random_range(1..6);
        let what = if holders.is_empty() || (contract == 1 && rng.random_bool(0.3)) {
            Move::mint(contract, token, to, if contract == 0 { 1 } else { rng.random_range(0..9) })
        } else {
            let from = holders[rng.random_range(0..holders.len())];
            let has = balances[&(asset, account(from).0)];
            let qty = if contract == 0 { 1 } else { rng.random_range(1..=has) };
            if rng.random_bool(0.25) {
                Move::burn(contract, token, from, qty)
            } else {
                Move::transfer(contract, token, from, to, qty)
            }
        };
        for (side, qty) in [(what.from, -what.qty), (what.to, what.qty)] {
            if let Some(side) = side {
                *balances.entry((asset, account(side).0)).or_insert(0) += qty;
            }
        }
        moves.push(what);
    }
    moves
}

/// What the messages of a block say need not be read from the ledger again, and is the same.
#[tokio::test]
async fn a_block_that_was_told_is_projected_as_one_that_is_read() {
    let mut dumps = Vec::new();
    for read in [false, true] {
        let mut world = world().await;
        let moves = [
            Move::mint(0, 1, 1, 1),
            Move::mint(1, 2, 2, 8),
            Move::transfer(1, 2, 2, 3, 5),
            Move::burn(1, 2, 3, 1),
        ];
        let mut drafts = Vec::new();
        for moves in [&moves[..2], &moves[2..]] {
            let batch = world.block(moves).await;
            let batch = if read { without_tokens(&batch) } else { batch };
            // Only a batch that is read depends on what the log says of the events.
            if !read {
                world.run("update ledger.normalized_events set event_index = event_index + 100", &[]).await;
            }
            drafts.extend(world.project(&batch).await);
            if !read {
                world.run("update ledger.normalized_events set event_index = event_index - 100", &[]).await;
            }
            assert!(world.project(&batch).await.is_empty(), "twice is once");
        }
        let told: Vec<_> = drafts.iter().map(|draft| (draft.event_id, draft.payload.clone())).collect();
        dumps.push((world.dump().await, told));
    }
    assert_eq!(dumps[0], dumps[1]);
}

/// A random life of a chain. The projector sees its envelopes in pieces, sometimes late.
async fn live_a_life(seed: u64, steps: usize) {
    let mut world = world().await;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut waiting: Vec<Envelope> = Vec::new();
    let mut delivered: BTreeSet<String> = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for step in 0..steps {
        match rng.random_range(0..10) {
            0..=5 => {
                let moves = random_moves(&world, &mut rng, 4);
                waiting.extend(world.block(&moves).await);
            }
            6 => {
                let height = world.head - 1;
                waiting.extend(world.confirm(height).await);
            }
            7 => {
                let height = (world.head - rng.random_range(1..4)).max(world.finalized);
                waiting.extend(world.finalize(height).await);
            }
            _ => {
                let ancestor = (world.head - rng.random_range(1..4)).max(world.finalized).max(0);
                let (said, held) = world.reorg(ancestor).await;
                waiting.extend(said);
                // Some come back, all in one block or each in its own, in any order, some never.
                for (source, what) in held {
                    match rng.random_range(0..3) {
                        0 => {}
                        1 => waiting.extend(world.include(&[(source, what)]).await),
                        _ => {
                            waiting.extend(world.block(&[]).await);
                            waiting.extend(world.include(&[(source, what)]).await);
                        }
                    }
                }
            }
        }
        while !waiting.is_empty() && rng.random_bool(0.7) {
            let take = rng.random_range(1..=waiting.len());
            let mut batch: Vec<Envelope> = waiting.drain(..take).collect();
            if rng.random_bool(0.3) {
                batch = without_tokens(&batch);
            }
            let drafts = world.project(&batch).await;
            for draft in &drafts {
                assert!(
                    ids.insert(draft.event_id) || draft.subject.to_string().contains("finality"),
                    "seed {seed}"
                );
            }
            for (what, event) in said(&drafts) {
                let fits =
                    if what == "projected" { delivered.insert(event) } else { delivered.remove(&event) };
                assert!(fits, "seed {seed}, step {step}: {what} does not fit what was delivered");
            }
        }
    }
    let drafts = world.project(&waiting).await;
    for (what, event) in said(&drafts) {
        let fits = if what == "projected" { delivered.insert(event) } else { delivered.remove(&event) };
        assert!(fits, "seed {seed}: {what} does not fit what was delivered");
    }
    let canonical: BTreeSet<String> = world
        .events
        .values()
        .filter(|event| event.status != "reverted")
        .map(|event| event.id.to_string())
        .collect();
    assert_eq!(delivered, canonical, "seed {seed}: the live stream adds up to the truth");

    let rows = world
        .conn
        .query(
            "read",
            "select asset_id, account_id, qty::bigint from projection.ownership_view where qty <> 0",
            &[],
        )
        .await
        .expect("reads");
    let seen: BTreeMap<_, i64> = rows.iter().map(|row| ((row.get(0), row.get(1)), row.get(2))).collect();
    assert_eq!(seen, world.balances(), "seed {seed}");

    // Three roads: step by step, all keys at once, and the full rebuild.
    let live = world.dump().await;
    for name in ProjectionName::ALL {
        let report = rebuild_projection(&world.db, name, &|_| {}).await.expect("rebuilds");
        assert_eq!(report.differing.count, 0, "seed {seed}: {name}: {:?}", report.differing.samples);
    }
    assert_eq!(world.dump().await, live, "seed {seed}");
    let again = from_nothing(&world).await;
    for table in TABLES {
        assert_eq!(live[table], again[table], "seed {seed}: {table}");
    }
}

#[tokio::test]
async fn live_steps_equal_a_projection_from_nothing() {
    for seed in 0..4 {
        live_a_life(seed, 40).await;
    }
}

#[tokio::test]
async fn twice_is_once() {
    let mut world = world().await;
    let mut batch = world.block(&[Move::mint(0, 1, 1, 1), Move::mint(1, 7, 2, 50)]).await;
    batch.extend(world.block(&[Move::transfer(1, 7, 2, 3, 20), Move::transfer(0, 1, 1, 1, 1)]).await);
    let first = project(&world.db, &batch).await;
    assert_eq!(said(&first.drafts).len(), 4);
    let dump = world.dump().await;
    let second = project(&world.db, &batch).await;
    assert_eq!((second.rows, second.drafts.len()), (0, 0));
    assert_eq!(world.dump().await, dump);
    assert_eq!(world.number("select sum(events)::bigint from projection.network_activity").await, 4);
}

#[tokio::test]
async fn two_at_once_is_once() {
    let mut world = world().await;
    let mut batch = world.block(&[Move::mint(0, 1, 1, 1), Move::mint(1, 7, 2, 50)]).await;
    batch.extend(world.block(&[Move::transfer(1, 7, 2, 3, 20)]).await);
    let results = futures_util::future::join_all((0..4).map(|_| project(&world.db, &batch))).await;
    let drafts: usize = results.iter().map(|done| said(&done.drafts).len()).sum();
    assert_eq!(drafts, 3);
    let live = world.dump().await;
    assert_eq!(live, from_nothing(&world).await);
}

#[tokio::test]
async fn crash_between_is_once() {
    let mut world = world().await;
    let batch = world.block(&[Move::mint(0, 1, 1, 1), Move::mint(1, 7, 2, 50)]).await;
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    let lost = project_in(&tx, &batch, None).await;
    drop(tx);
    drop(conn);
    assert_eq!(world.number("select count(*) from projection.transfers").await, 0);
    let kept = project(&world.db, &batch).await;
    assert_eq!(lost.drafts, kept.drafts, "the same facts have the same ids");
    let live = world.dump().await;
    assert_eq!(live, from_nothing(&world).await);
}

/// Owners of a large batch are committed right before everything else: whoever dies between the two leaves owners that
/// nobody counted.
#[tokio::test]
async fn crash_between_owners_and_the_rest_is_once() {
    let mut world = world().await;
    let first = world.block(&[Move::mint(0, 1, 1, 1), Move::mint(1, 7, 2, 50)]).await;
    world.project(&first).await;
    assert_eq!(world.number(AHEAD).await, 0);
    let batch = world.block(&[Move::transfer(0, 1, 1, 3, 1), Move::transfer(1, 7, 2, 3, 50)]).await;
    let beside = Beside { db: world.db.clone(), pairs_min: 1 };
    let mut lost = Vec::new();
    for _ in 0..2 {
        let mut conn = world.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        lost.push(project_in(&tx, &batch, Some(&beside)).await.drafts);
    }
    assert_eq!(world.number("select count(*) from projection.transfers").await, 2);
    assert_eq!(world.number("select count(*) from projection.ownership_view where qty > 0").await, 2);
    assert_eq!(world.number("select count(distinct account_id) from projection.collection_holders").await, 1);
    let counted = "select asset_count::bigint from projection.account_summaries where account_id = $1";
    let of = async |at: usize| {
        let row = world.conn.query_opt("look", counted, &[&account(at).0]).await.expect("looks");
        row.map(|row| row.get::<_, i64>(0))
    };
    assert_eq!((of(1).await, of(2).await, of(3).await), (Some(1), Some(1), None), "nobody counted them yet");
    assert!(world.number(AHEAD).await > 0);
    let refused = rebuild_projection(&world.db, ProjectionName::AccountSummaries, &|_| {}).await;
    let refused = refused.expect_err("it would count them twice").to_string();
    assert!(refused.contains("interrupted half-way"), "{refused}");

    let kept = project(&world.db, &batch).await;
    assert_eq!(lost, [kept.drafts.clone(), kept.drafts], "the same facts have the same ids");
    assert_eq!((of(1).await, of(2).await, of(3).await), (Some(0), Some(0), Some(2)));
    assert_eq!(world.number(AHEAD).await, 0);
    let live = world.dump().await;
    assert_eq!(live, from_nothing(&world).await);
    rebuild_projection(&world.db, ProjectionName::AccountSummaries, &|_| {}).await.expect("rebuilds again");
}

#[tokio::test]
async fn a_connection_beside_makes_no_difference() {
    let mut dumps = Vec::new();
    for pairs_min in [1, usize::MAX] {
        let mut world = world().await;
        let mut rng = StdRng::seed_from_u64(30);
        let mut drafts = Vec::new();
        for height in 1..=12 {
            let moves = random_moves(&world, &mut rng, 8);
            let mut batch = world.block(&moves).await;
            if height > 4 {
                batch.extend(world.finalize(height - 4).await);
            }
            let beside = Beside { db: world.db.clone(), pairs_min };
            let mut conn = world.db.conn().await.expect("connects");
            let tx = conn.tx().await.expect("begins");
            drafts.push(project_in(&tx, &batch, Some(&beside)).await.drafts);
            tx.commit().await.expect("commits");
        }
        assert_eq!(world.number(AHEAD).await, 0);
        dumps.push((world.dump().await, drafts));
    }
    assert_eq!(dumps[0], dumps[1]);
}

#[tokio::test]
async fn a_revert_is_retracted_once() {
    let mut world = world().await;
    let batch = world.block(&[Move::mint(0, 1, 1, 1)]).await;
    let delivered = said(&world.project(&batch).await);
    let (batch, _) = world.reorg(0).await;
    let retracted = said(&world.project(&batch).await);
    assert_eq!(retracted, vec![("retracted".to_owned(), delivered[0].1.clone())]);
    assert_eq!(said(&world.project(&batch).await), vec![]);
    assert_eq!(world.number("select count(*) from projection.transfers where is_reverted").await, 1);
    assert_eq!(world.number("select count(*) from projection.ownership_view").await, 0);
    assert_eq!(world.number("select asset_count + owners_count from projection.collection_stats").await, 0);
    assert_eq!(world.number("select count(*) from projection.account_summaries").await, 0);
}

#[tokio::test]
async fn a_second_inclusion_moves_the_row() {
    let mut world = world().await;
    let batch = world.block(&[Move::mint(0, 1, 1, 1)]).await;
    world.project(&batch).await;
    let (mut batch, held) = world.reorg(0).await;
    batch.extend(world.block(&[]).await);
    batch.extend(world.include(&held).await);
    let drafts = world.project(&batch).await;
    let words: Vec<String> = said(&drafts).into_iter().map(|(what, _)| what).collect();
    assert_eq!(words, ["retracted", "projected"]);
    assert_eq!(drafts[0].payload["height"], 1);
    assert_eq!(drafts[0].payload["transfers"][0]["finality_status"], "reverted");
    assert_eq!(drafts[1].payload["height"], 2);
    assert_eq!(world.number("select count(*) from projection.transfers").await, 1);
    assert_eq!(world.number("select height from projection.transfers where not is_reverted").await, 2);
    assert_eq!(world.number("select transfer_count from projection.collection_stats").await, 1);
}

#[tokio::test]
async fn there_and_back_again_is_delivered_again_with_a_new_id() {
    let mut world = world().await;
    let batch = world.block(&[Move::mint(0, 1, 1, 1)]).await;
    let first = world.project(&batch).await;
    let (batch, held) = world.reorg(0).await;
    world.project(&batch).await;
    world.fork = 0; // The old branch wins after all: the same block hash.
    let batch = world.include(&held).await;
    let second = world.project(&batch).await;
    assert_eq!(first[0].payload, second[0].payload);
    assert_ne!(first[0].event_id, second[0].event_id);
}

#[tokio::test]
async fn a_row_that_is_spent_but_not_final_stays_for_readers_of_finalized() {
    let mut world = world().await;
    let mut batch = world.block(&[Move::mint(0, 1, 1, 1)]).await;
    batch.extend(world.finalize(1).await);
    batch.extend(world.block(&[Move::transfer(0, 1, 1, 2, 1)]).await);
    world.project(&batch).await;
    let row = world
        .conn
        .query_one(
            "read",
            "select qty::bigint, qty_finalized::bigint, finality_status::text from projection.ownership_view
              where account_id = $1",
            &[&account(1).0],
        )
        .await
        .expect("one row");
    let row: (i64, i64, String) = (row.get(0), row.get(1), row.get(2));
    assert_eq!(row, (0, 1, "pending".to_owned()));
    assert_eq!(world.number("select owners_count from projection.collection_stats").await, 1);
    let batch = world.finalize(2).await;
    let drafts = world.project(&batch).await;
    assert_eq!(drafts.len(), 1, "only the finality line");
    assert_eq!(world.number("select count(*) from projection.ownership_view").await, 1);
    assert_eq!(world.number("select count(*) from projection.transfer_positions").await, 0);
}

const PLACES: &str =
    "select string_agg(ctid::text, ' ' order by asset_id, account_id) from projection.ownership_view";
const FINAL: &str =
    "select coalesce(string_agg(qty_finalized || ' ' || finality_status, ', ' order by account_id = $1), '')
                       from projection.ownership_now";

async fn text(world: &World, sql: &str) -> String {
    world.conn.query_one("read", sql, &[]).await.expect("reads").get(0)
}
async fn final_owners(world: &World) -> String {
    world.conn.query_one("read", FINAL, &[&account(2).0]).await.expect("reads").get(0)
}

/// The line passes over rows that rest on nothing above it: they are final and nobody wrote them.
#[tokio::test]
async fn a_row_becomes_final_without_being_written() {
    let mut world = world().await;
    let mut batch = world.block(&[Move::mint(0, 1, 1, 1), Move::mint(0, 2, 2, 1)]).await;
    batch.extend(world.block(&[]).await);
    world.project(&batch).await;
    assert_eq!(final_owners(&world).await, "0 pending, 0 pending");
    let (before, cards) =
        (text(&world, PLACES).await, "select min(updated_at)::text from projection.asset_cards");
    let written = text(&world, cards).await;
    let batch = world.finalize(2).await;
    world.project(&batch).await;
    assert_eq!(final_owners(&world).await, "1 finalized, 1 finalized");
    assert_eq!((text(&world, PLACES).await, text(&world, cards).await), (before, written));
    assert_eq!(
        text(&world, "select string_agg(finality_status::text, ' ') from projection.cards_now").await,
        "finalized finalized"
    );
}

/// What became final and the line that says so may come in two batches: a giver and a taker are final at once, with the
/// line.
#[tokio::test]
async fn both_sides_become_final_at_the_same_moment() {
    let mut world = world().await;
    let mut batch = world.block(&[Move::mint(0, 1, 1, 1)]).await;
    batch.extend(world.finalize(1).await);
    batch.extend(world.block(&[Move::transfer(0, 1, 1, 2, 1)]).await);
    world.project(&batch).await;
    assert_eq!(
        final_owners(&world).await,
        "1 pending, 0 pending",
        "the giver has it for those who want to be sure"
    );
    let batch = world.finalize(2).await;
    world.project(&batch[..1]).await;
    assert_eq!(final_owners(&world).await, "1 pending, 0 pending");
    world.project(&batch[1..]).await;
    assert_eq!(final_owners(&world).await, "1 finalized");
}

/// What was handed on before it was final: the one in the middle has it, for those who want to be sure.
#[tokio::test]
async fn finality_stops_in_the_middle_of_a_chain_of_transfers() {
    let mut world = world().await;
    let mut batch = world.block(&[Move::mint(0, 1, 1, 1)]).await;
    batch.extend(world.block(&[Move::transfer(0, 1, 1, 2, 1)]).await);
    batch.extend(world.block(&[Move::transfer(0, 1, 2, 3, 1)]).await);
    world.project(&batch).await;
    for (height, owner) in [(1, 1), (2, 2), (3, 3)] {
        let batch = world.finalize(height).await;
        world.project(&batch).await;
        let rows = world
            .conn
            .query("read", "select account_id from projection.ownership_now where qty_finalized = 1", &[])
            .await
            .expect("reads");
        let owners: Vec<uuid::Uuid> = rows.iter().map(|row| row.get(0)).collect();
        assert_eq!(owners, [account(owner).0], "at {height}");
    }
    assert_eq!(world.number("select count(*) from projection.ownership_view").await, 1);
}

/// Somebody may hold units from before our start: that the ones we know of are gone does not burn the class.
#[tokio::test]
async fn a_class_of_unknown_past_is_not_burned_before_finality_either() {
    let mut world = world().await;
    let first = world.block(&[Move::mint(1, 1, 1, 5), Move::mint(1, 2, 1, 5)]).await;
    world.project(&first).await;
    world.run("update catalog.assets set history = 'partial' where id = $1", &[&asset(1, 1).0]).await;
    let second = world.block(&[Move::burn(1, 1, 1, 5), Move::burn(1, 2, 1, 5)]).await;
    world.project(&second).await;
    let burned = "select count(*) from projection.asset_cards where is_burned and token_id";
    assert_eq!(world.number(&format!("{burned} = '1'")).await, 0);
    assert_eq!(world.number(&format!("{burned} = '2'")).await, 1);
}
