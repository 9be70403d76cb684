//! History in bulk equals history block by block.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use tidemark_model::U256;
use tidemark_model::chain::{
    BalanceAsk, BlockLink, ChainAdapter, ChainError, FetchMode, Head, Network, ParsedBlock, RawBatch,
    RawBlock, RawEvent,
};
use tidemark_model::ids::{BlockHash, Height, HeightRange};
use tidemark_pipeline::history::{HistoryError, Writers, apply_blocks, show};
use tidemark_pipeline::workers::{BlockOutcome, Openings};
use tidemark_store::bulk;
use tidemark_store::projection::built_last;

use crate::world::{NETWORK, World, account_id, block, class, owners, single};

/// A chain that knows no old balances.
struct Silent(Network);

#[async_trait]
impl ChainAdapter for Silent {
    fn network(&self) -> &Network {
        &self.0
    }
    async fn head(&self) -> Result<Head, ChainError> {
        unreachable!("history does not ask for the head")
    }
    async fn next_head(&self, _: &Head, _: Duration) -> Result<Head, ChainError> {
        unreachable!("history does not ask for the head")
    }
    async fn fetch(&self, _: HeightRange, _: FetchMode) -> Result<RawBatch, ChainError> {
        unreachable!("history reads raw.*")
    }
    async fn link_at(&self, _: Height) -> Result<Option<BlockLink>, ChainError> {
        unreachable!("history is final")
    }
    fn parse(&self, _: &RawBlock) -> ParsedBlock {
        unreachable!("blocks are given parsed")
    }
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        Ok(vec![None; asks.len()])
    }
    fn requests(&self) -> u64 {
        0
    }
}

impl World {
    /// Applies `first..=last` in bulk and gives the number of events.
    pub(crate) async fn segment(
        &self,
        first: u64,
        last: u64,
        events: &[RawEvent],
    ) -> Result<u64, HistoryError> {
        let range = HeightRange::inclusive(Height(first), Height(last)).expect("not empty");
        let mut blocks: BTreeMap<Height, (RawBlock, ParsedBlock)> = BTreeMap::new();
        for event in events {
            let entry = blocks.entry(event.block_number).or_insert_with(|| {
                let block = RawBlock {
                    height: event.block_number,
                    hash: event.block_hash,
                    parent: BlockHash::default(),
                    time: event.event_time,
                    tx_count: None,
                    transactions: vec![],
                    records: vec![],
                    payload: None,
                };
                (block, ParsedBlock::default())
            });
            entry.1.events.push(event.clone());
        }
        let blocks: Vec<_> = blocks.into_values().collect();
        let conn = self.db.conn().await.expect("connects");
        let partition = format!(
            "do $$ begin
                 create table projection.transfers_t partition of projection.transfers for values in ({NETWORK});
             exception when duplicate_table or unique_violation then null; end $$"
        );
        conn.batch("partition", &partition).await.expect("partitions");
        bulk::ensure_progress(&conn, NETWORK, self.network.start_block).await.expect("progress");
        let mut writers = Writers { state: conn, log: self.db.spare_conn().await };
        apply_blocks(&mut writers, &Silent(self.network.clone()), range, &blocks).await
    }

    /// Its read models come when its history is done: segments are merged at once, without a look at what is there.
    async fn put_off(&self) {
        let before_start = self.network.start_block.as_i64() - 1;
        let mut conn = self.db.conn().await.expect("connects");
        bulk::ensure_progress(&conn, NETWORK, self.network.start_block).await.expect("progress");
        let is_put_off = built_last::put_off(&mut conn, NETWORK, before_start, before_start).await;
        assert!(is_put_off.expect("puts off"));
    }

    /// And now it is done.
    async fn show(&self) {
        let mut conn = self.db.conn().await.expect("connects");
        assert!(show(&mut conn, None, NETWORK).await.expect("shows"));
    }
}

fn fenced(outcome: Result<u64, HistoryError>) -> bool {
    outcome.is_err_and(|error| error.to_string().contains("moved by another worker"))
}

#[tokio::test]
async fn two_segments_at_once_are_one() {
    let world = World::new().await;
    let mint = class(1, 5, None, Some("a"), 10);
    let events = [mint.at(block(3, 0))];
    let (one, other) = tokio::join!(world.segment(0, 5, &events), world.segment(0, 5, &events));
    assert_eq!([one, other].into_iter().filter(Result::is_ok).count(), 1);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("a", 10)]));
    world.holds().await;
}

#[tokio::test]
async fn after_an_outage_history_takes_over_from_live_and_gives_back() {
    let world = World::new().await;
    let (mint, moved) = (single(1, 5, None, Some("a")), single(2, 5, Some("a"), Some("b")));
    let (lost, back) = (single(3, 5, Some("b"), Some("c")), single(4, 6, None, Some("d")));
    world.done(block(0, 0), &[&mint]).await;
    world.done(block(1, 0), &[&moved]).await;
    world.done(block(2, 0), &[&lost]).await;
    world.reorg(&[block(2, 0)], &[block(2, 1)]).await;
    // A long silence; blocks 2 to 20 are final meanwhile, and what was reverted is in one of them.
    assert!(fenced(world.segment(4, 20, &[]).await), "a gap below is refused");
    let events = [lost.at(block(7, 1)), back.at(block(9, 1))];
    assert!(fenced(world.segment(2, 20, &events).await), "what live left open is finished first");
    world.finalize(1).await;
    assert_eq!(world.segment(2, 20, &events).await.expect("applies"), 2);
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("c", 1)]));
    world.done(block(21, 1), &[&single(5, 6, Some("d"), None)]).await;
    world.finalize(21).await;
    assert_eq!(world.finalized(back.asset()).await, owners(&[]));
    world.holds().await;
}

#[tokio::test]
async fn a_reorg_while_a_lease_is_running_comes_before_it_or_fences_it() {
    for _ in 0..10 {
        let world = World::new().await;
        let (mint, moved) = (single(1, 5, None, Some("a")), single(2, 5, Some("a"), Some("b")));
        let lost = single(3, 6, None, Some("x")).index(1);
        world.segment(0, 1, &[mint.at(block(1, 0))]).await.expect("applies");
        world.done(block(2, 0), &[&moved, &lost]).await;
        // The new branch is final up to 9 and leased, with one of the two events; the message of the reorg comes now.
        let events = [moved.at(block(4, 1))];
        let (orphaned, canonical) = ([block(2, 0)], [block(2, 1)]);
        let (segment, reorg) =
            tokio::join!(world.segment(2, 9, &events), world.try_reorg(&orphaned, &canonical));
        assert_eq!(reorg.expect("handles the reorg").reverted, 2);
        if segment.is_err() {
            assert!(fenced(segment), "the open branch keeps the lease out, and nothing else does");
            world.segment(2, 9, &events).await.expect("applies after the reorg");
        }
        assert_eq!(world.finalized(mint.asset()).await, owners(&[("b", 1)]));
        assert_eq!(world.finalized(lost.asset()).await, owners(&[]));
        assert_eq!(world.latest(lost.asset()).await, owners(&[]));
        assert_eq!(world.key(moved.id()).await.2, "finalized");
        assert!(world.key(lost.id()).await.3, "it stays reverted");
        world.holds().await;
    }
}

/// A reorg there and back restores events above the head before their blocks are said again. Before: history could
/// not write the same events (their keys were there), and a later message of a block it had passed halted the network.
#[tokio::test]
async fn what_stands_above_the_head_makes_way_for_history() {
    let world = World::new().await;
    let (mint, moved) = (single(1, 5, None, Some("a")), single(2, 5, Some("a"), Some("b")));
    let (back, lost) = (single(3, 6, None, Some("x")), single(4, 7, None, Some("y")));
    world.done(block(0, 0), &[&mint]).await;
    world.finalize(0).await;
    world.done(block(1, 0), &[&moved]).await;
    world.done(block(2, 0), &[&back]).await;
    world.done(block(3, 0), &[&lost]).await;
    let (there, here) = ([block(1, 0), block(2, 0), block(3, 0)], [block(1, 1), block(2, 1), block(3, 1)]);
    world.reorg(&there, &here).await;
    let done = world.reorg(&here, &there).await;
    assert_eq!((done.restored, done.head), (3, 0));
    // The third block is gone for good, which nobody has said yet; the others are final by now.
    let events = [moved.at(block(1, 0)), back.at(block(2, 0))];
    assert!(fenced(world.segment(1, 9, &events).await), "not over what stands");
    for reverted in [3, 0] {
        assert_eq!(world.take_back().await.reverted, reverted);
    }
    assert_eq!(world.latest(mint.asset()).await, owners(&[("a", 1)]));
    assert_eq!(world.segment(1, 9, &events).await.expect("applies"), 2);
    world.reorg(&[block(3, 0)], &[block(3, 2)]).await;
    assert_eq!(world.finalized(mint.asset()).await, owners(&[("b", 1)]));
    assert_eq!(world.finalized(back.asset()).await, owners(&[("x", 1)]));
    assert_eq!(world.latest(lost.asset()).await, owners(&[]));
    world.holds().await;
}

#[tokio::test]
async fn live_waits_while_a_first_history_is_not_shown() {
    let world = World::new().await;
    let mint = single(1, 5, None, Some("a"));
    world.put_off().await;
    world.segment(0, 3, &[mint.at(block(2, 0))]).await.expect("applies");
    let moved = single(2, 5, Some("a"), Some("b"));
    let outcome = world.block(block(4, 0), &[&moved]).await;
    assert!(matches!(outcome, BlockOutcome::Gap { head: 3 }), "{outcome:?}");
    world.show().await;
    world.done(block(4, 0), &[&moved]).await;
    assert_eq!(world.latest(mint.asset()).await, owners(&[("b", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn openings_and_refusals_are_the_same_in_bulk() {
    for is_put_off in [false, true] {
        openings_and_refusals(is_put_off).await;
    }
}

async fn openings_and_refusals(is_put_off: bool) {
    let world = World::starting_at(100).await;
    if is_put_off {
        world.put_off().await;
    }
    let moved = single(1, 5, Some("a"), Some("b"));
    let spent = class(2, 7, Some("x"), Some("y"), 4).index(1);
    let thief = single(3, 5, Some("z"), Some("y")).index(2);
    let events = [moved.at(block(110, 0)), spent.at(block(110, 0)), thief.at(block(120, 0))];
    world.segment(100, 150, &events).await.expect("applies");
    if is_put_off {
        world.show().await;
    }
    let quarantined = "select count(*) from ledger.quarantine where resolved_at is null";
    assert_eq!(world.count(quarantined).await, 1);
    assert_eq!(world.finalized(moved.asset()).await, owners(&[("b", 1)]));
    assert_eq!(world.finalized(spent.asset()).await, owners(&[("y", 4)]));
    world.holds().await;
}

/// What the catalog says of every asset.
const FLAGS: &str = "
    select string_agg(format('%s %s: supply %s, burned %s, %s', standard_id, token_id_raw, supply, is_burned, history),
                      e'\n' order by standard_id, token_id_raw) from catalog.assets";

#[tokio::test]
async fn bulk_and_live_agree_on_supply_burned_and_history() {
    for (start, is_put_off) in [(0, false), (100, false), (0, true), (100, true)] {
        let mut acts = vec![
            // Made and burned in one batch; made; made, burned and made again; made of nothing.
            single(1, 1, None, Some("a")),
            single(2, 1, Some("a"), None),
            single(3, 2, None, Some("a")),
            single(4, 3, None, Some("a")),
            single(5, 3, Some("a"), None),
            single(6, 3, None, Some("b")),
            class(7, 1, None, Some("a"), 5),
            class(8, 1, Some("a"), None, 5),
            class(9, 2, None, Some("a"), 5),
            class(10, 2, Some("a"), None, 4),
            class(11, 3, None, Some("a"), 0),
            class(12, 4, Some("a"), Some("b"), 0),
        ];
        if start > 0 {
            // Older than our first block: moved on, burned, and a class of which others may hold more.
            acts.extend([
                single(13, 4, Some("a"), Some("b")),
                single(14, 5, Some("a"), None),
                class(15, 5, Some("a"), None, 3),
                class(16, 6, Some("a"), Some("b"), 3),
            ]);
        }
        let acts: Vec<_> = (0..).zip(acts).map(|(index, act)| act.index(index)).collect();
        let at = block(start, 0);
        let (live, in_bulk) = (World::starting_at(start).await, World::starting_at(start).await);
        live.done(at, &acts.iter().collect::<Vec<_>>()).await;
        live.finalize(start).await;
        let events: Vec<RawEvent> = acts.iter().map(|act| act.at(at)).collect();
        if is_put_off {
            in_bulk.put_off().await;
        }
        in_bulk.segment(start, start, &events).await.expect("applies");
        if is_put_off {
            in_bulk.show().await;
        }
        let flags = live.text(FLAGS).await;
        assert_eq!(in_bulk.text(FLAGS).await, flags);
        assert!(flags.contains("erc721 1: supply 0, burned t, complete"), "{flags}");
        assert!(flags.contains("erc721 3: supply 1, burned f, complete"), "{flags}");
        let (burned, known) = if start == 0 { ("t", "complete") } else { ("f", "partial") };
        assert!(flags.contains(&format!("erc1155 1: supply 0, burned {burned}, {known}")), "{flags}");
        assert!(flags.contains(&format!("erc1155 3: supply 0, burned f, {known}")), "{flags}");
        if start > 0 {
            assert!(flags.contains("erc721 5: supply 0, burned t, partial"), "{flags}");
            assert!(flags.contains("erc1155 5: supply 0, burned f, partial"), "{flags}");
        }
        assert_eq!(live.digest().await, in_bulk.digest().await);
        live.holds().await;
        in_bulk.holds().await;
    }
}

#[tokio::test]
async fn an_opening_that_went_with_its_block_is_written_again_by_history() {
    let world = World::starting_at(100).await;
    let moved = class(1, 5, Some("a"), Some("b"), 3);
    let answers = Openings([((moved.asset(), account_id("a")), Some(U256::from(10)))].into());
    world.done(block(100, 0), &[]).await;
    world.try_block(block(101, 0), vec![moved.at(block(101, 0))], &answers).await.expect("processes");
    world.reorg(&[block(101, 0)], &[block(101, 1)]).await;
    world.finalize(100).await;
    world.segment(101, 110, &[moved.at(block(105, 1))]).await.expect("applies");
    assert_eq!(world.finalized(moved.asset()).await, owners(&[("a", 7), ("b", 3)]));
    world.holds().await;
}

#[tokio::test]
async fn what_is_missing_again_is_implied_again_in_the_next_segment() {
    let world = World::starting_at(100).await;
    for (number, qty) in [(0, 3), (1, 4), (2, 5)] {
        let at = block(100 + number, 0);
        let spent = class(number, 5, Some("a"), Some("b"), qty);
        world.segment(at.height.0, at.height.0, &[spent.at(at)]).await.expect("applies");
    }
    let asset = class(0, 5, None, None, 0).asset();
    assert_eq!(world.finalized(asset).await, owners(&[("b", 12)]));
    let opening = "select state || ' ' || qty || ' ' || parts from ledger.openings where qty > 0";
    assert_eq!(world.text(opening).await, "implied 12 3");
    world.holds().await;
}

#[tokio::test]
async fn a_rewind_below_its_making_leaves_a_token_unmade_and_not_burned() {
    let world = World::new().await;
    let (mint, burn) = (single(1, 5, None, Some("a")), single(2, 5, Some("a"), None));
    world.segment(0, 2, &[mint.at(block(1, 0)), burn.at(block(2, 0))]).await.expect("applies");
    let burned = "select is_burned::text from catalog.assets";
    assert_eq!(world.text(burned).await, "true");
    world.rewind(1).await;
    assert_eq!(world.text(burned).await, "false");
    world.rewind(0).await;
    assert_eq!(world.text(burned).await, "false");
    world.finalize(2).await;
    assert_eq!(world.text(burned).await, "true");
    world.holds().await;
}

#[tokio::test]
async fn what_cannot_be_is_refused_in_bulk_as_it_is_live() {
    for is_put_off in [false, true] {
        what_cannot_be_is_refused(is_put_off).await;
    }
}

async fn what_cannot_be_is_refused(is_put_off: bool) {
    let most = U256::MAX;
    let acts = [
        single(1, 1, None, Some("a")),
        class(2, 1, None, Some("a"), 0).qty(most),
        // In the block of its making, in the next one of the segment, and in the next segment.
        single(3, 1, None, Some("b")),
        class(4, 1, None, Some("a"), 0).qty(most),
        class(5, 1, None, Some("b"), 1),
        class(6, 2, Some("x"), Some("y"), 0).qty(most),
        class(7, 2, Some("x"), Some("y"), 0).qty(most),
        single(8, 1, None, Some("c")),
        class(9, 1, None, Some("b"), 1),
        class(10, 1, Some("a"), Some("b"), 0).qty(most),
        single(11, 1, Some("a"), None),
        single(12, 1, None, Some("d")),
        single(13, 1, None, Some("a")),
        class(14, 1, None, Some("c"), 2),
    ];
    let acts: Vec<_> = (0..).zip(acts).map(|(index, act)| act.index(index)).collect();
    let places = [(0, &acts[..7]), (1, &acts[7..12]), (2, &acts[12..])];
    let (live, in_bulk) = (World::new().await, World::new().await);
    let mut events: Vec<Vec<RawEvent>> = Vec::new();
    for (height, acts) in places {
        live.done(block(height, 0), &acts.iter().collect::<Vec<_>>()).await;
        events.push(acts.iter().map(|act| act.at(block(height, 0))).collect());
    }
    live.finalize(2).await;
    if is_put_off {
        in_bulk.put_off().await;
    }
    in_bulk.segment(0, 1, &events[..2].concat()).await.expect("applies");
    in_bulk.segment(2, 2, &events[2]).await.expect("applies");
    if is_put_off {
        in_bulk.show().await;
    }
    let refused = "select string_agg(source_event_id, e'\n' order by source_event_id) from ledger.quarantine";
    assert_eq!(in_bulk.text(refused).await, live.text(refused).await);
    assert_eq!(in_bulk.count("select count(*) from ledger.quarantine").await, 9);
    assert_eq!(in_bulk.text(FLAGS).await, live.text(FLAGS).await);
    assert_eq!(in_bulk.digest().await, live.digest().await);
    let distrusted = "select count(*) from catalog.contracts where reliability = 'unreliable'";
    assert_eq!((in_bulk.count(distrusted).await, live.count(distrusted).await), (2, 2));
    live.holds().await;
    in_bulk.holds().await;
}
