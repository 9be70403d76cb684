//! Starting in the middle of a chain's history.

use std::collections::BTreeMap;
use std::time::Duration;

use alloy_primitives::U256;
use async_trait::async_trait;
use tidemark_model::chain::{
    BalanceAsk, BlockLink, ChainAdapter, ChainError, FetchMode, Head, Network, ParsedBlock, RawBatch,
    RawBlock,
};
use tidemark_model::ids::{AssetId, Height, HeightRange};
use tidemark_pipeline::workers::{BlockOutcome, Openings, openings, prepare};
use tidemark_store::ownership::{AsOf, owners_at};

use crate::world::{Act, World, account_id, asset_id, block, cause, class, owners, single};

/// Balances by asset and name.
type State = BTreeMap<(AssetId, String), U256>;

/// Knows the balances of one height.
struct Oracle {
    network: Network,
    state: State,
    pruned: bool,
}

#[async_trait]
impl ChainAdapter for Oracle {
    fn network(&self) -> &Network {
        &self.network
    }
    async fn head(&self) -> Result<Head, ChainError> {
        Err(self.silent())
    }
    async fn next_head(&self, _known: &Head, _wait: Duration) -> Result<Head, ChainError> {
        Err(self.silent())
    }
    async fn fetch(&self, _range: HeightRange, _mode: FetchMode) -> Result<RawBatch, ChainError> {
        Err(self.silent())
    }
    async fn link_at(&self, _height: Height) -> Result<Option<BlockLink>, ChainError> {
        Err(self.silent())
    }
    fn parse(&self, _block: &RawBlock) -> ParsedBlock {
        ParsedBlock::default()
    }
    async fn balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        if self.pruned {
            return Err(ChainError::Pruned { network: "test".to_owned(), what: "balances".to_owned() });
        }
        let held = |ask: &BalanceAsk| {
            assert_eq!(ask.at, self.network.start_block.minus(1));
            self.state.get(&(asset_id(&ask.asset), ask.account.clone())).copied().unwrap_or_default()
        };
        Ok(asks.iter().map(|ask| Some(held(ask))).collect())
    }
    fn requests(&self) -> u64 {
        0
    }
}

impl Oracle {
    fn silent(&self) -> ChainError {
        ChainError::Unavailable {
            network: "test".to_owned(),
            what: "anything but balances".to_owned(),
            reason: "it is a test".to_owned(),
        }
    }
    fn knowing(world: &World, balances: &[(&Act, &str, u64)]) -> Self {
        let state = balances
            .iter()
            .map(|(act, name, qty)| ((act.asset(), (*name).to_owned()), U256::from(*qty)))
            .collect();
        Self { network: world.network.clone(), state, pruned: false }
    }
    fn pruned(world: &World) -> Self {
        Self { network: world.network.clone(), state: State::new(), pruned: true }
    }
}

/// Asks, then processes.
async fn feed(world: &World, oracle: &Oracle, at: tidemark_model::chain::BlockRef, acts: &[&Act]) {
    let events: Vec<_> = acts.iter().map(|act| act.at(at)).collect();
    let answers = prepare(&world.db, oracle, &world.network, &events, 1_000).await.expect("asks");
    let outcome = world.try_block(at, events, &answers).await.expect("processes");
    assert!(matches!(outcome, BlockOutcome::Done(_)), "{outcome:?}");
}

#[tokio::test]
async fn the_first_sender_of_a_single_token_held_it() {
    let world = World::starting_at(100).await;
    let (moved, minted) = (single(1, 5, Some("a"), Some("b")), single(2, 6, None, Some("c")).index(1));
    world.done(block(100, 0), &[&moved, &minted]).await;
    assert_eq!(world.latest(moved.asset()).await, owners(&[("b", 1)]), "also before finality");
    world.finalize(100).await;
    assert_eq!(world.finalized(moved.asset()).await, owners(&[("b", 1)]));
    let history = "select string_agg(token_id_raw || history, ',' order by token_id_raw) from catalog.assets";
    assert_eq!(world.text(history).await, "5partial,6complete");
    world.done(block(101, 0), &[&single(3, 5, Some("b"), None)]).await;
    world.finalize(101).await;
    assert_eq!(world.finalized(moved.asset()).await, owners(&[]));
    let conn = world.db.conn().await.expect("connects");
    let before = owners_at(&conn, moved.asset(), AsOf::Height(Height(99))).await.expect("reads");
    assert_eq!(before.into_keys().collect::<Vec<_>>(), [account_id("a")]);
    world.holds().await;
}

#[tokio::test]
async fn an_opening_goes_and_comes_with_the_block_that_needs_it() {
    let world = World::starting_at(100).await;
    let (moved, onward) = (single(1, 5, Some("a"), Some("b")), single(2, 5, Some("b"), Some("c")));
    world.done(block(100, 0), &[]).await;
    world.done(block(101, 0), &[&moved]).await;
    world.reorg(&[block(101, 0)], &[block(101, 1)]).await;
    assert_eq!(world.latest(moved.asset()).await, owners(&[]));
    world.done(block(101, 1), &[]).await;
    world.done(block(102, 1), &[&moved]).await;
    world.done(block(103, 1), &[&onward]).await;
    assert_eq!(world.latest(moved.asset()).await, owners(&[("c", 1)]));
    world.finalize(103).await;
    assert_eq!(world.finalized(moved.asset()).await, owners(&[("c", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn an_opening_moves_on_when_the_message_of_the_reorg_is_late() {
    let world = World::starting_at(100).await;
    let moved = single(1, 5, Some("a"), Some("b"));
    world.done(block(100, 0), &[]).await;
    world.done(block(101, 0), &[&moved]).await;
    world.done(block(101, 1), &[]).await;
    world.done(block(102, 1), &[&moved]).await;
    world.reorg(&[block(101, 0)], &[block(101, 1), block(102, 1)]).await;
    assert_eq!(world.latest(moved.asset()).await, owners(&[("b", 1)]));
    world.finalize(102).await;
    assert_eq!(world.finalized(moved.asset()).await, owners(&[("b", 1)]));
    world.holds().await;
}

#[tokio::test]
async fn holders_of_a_class_are_asked_once_and_receivers_too() {
    let world = World::starting_at(100).await;
    let (first, second) = (class(1, 5, Some("a"), Some("b"), 3), class(2, 5, Some("b"), Some("a"), 1));
    let oracle = Oracle::knowing(&world, &[(&first, "a", 10), (&first, "b", 7)]);
    feed(&world, &oracle, block(100, 0), &[&first]).await;
    assert_eq!(world.latest(first.asset()).await, owners(&[("a", 7), ("b", 10)]));
    let events = [second.at(block(101, 0))];
    let again = prepare(&world.db, &oracle, &world.network, &events, 1_000).await.expect("asks");
    assert_eq!(again, Openings::default());
    feed(&world, &oracle, block(101, 0), &[&second]).await;
    world.finalize(101).await;
    assert_eq!(world.finalized(first.asset()).await, owners(&[("a", 8), ("b", 9)]));
    assert_eq!(world.text("select history from catalog.assets").await, "partial");
    // What the chain said is exact: sending more than that is the contract's fault.
    world.done(block(102, 0), &[&class(3, 5, Some("a"), Some("b"), 9)]).await;
    assert_eq!(world.finalize(102).await.quarantined.len(), 1);
    world.holds().await;
}

#[tokio::test]
async fn where_the_chain_cannot_say_what_is_missing_is_implied() {
    let world = World::starting_at(100).await;
    let acts = [
        class(1, 5, Some("a"), Some("b"), 3),
        class(2, 5, Some("a"), Some("b"), 4),
        class(3, 5, Some("b"), Some("a"), 2),
    ];
    let oracle = Oracle::pruned(&world);
    for (height, act) in (100..).zip(&acts) {
        feed(&world, &oracle, block(height, 0), &[act]).await;
    }
    assert_eq!(world.finalize(100).await.quarantined.len(), 0);
    world.finalize(102).await;
    assert_eq!(world.finalized(acts[0].asset()).await, owners(&[("a", 2), ("b", 5)]));
    assert_eq!(world.count("select count(*) from ledger.quarantine").await, 0);
    assert_eq!(world.text("select history from catalog.assets").await, "partial");
    assert_eq!(
        world.text("select state || qty || parts from ledger.openings where qty > 0").await,
        "implied72"
    );
    world.holds().await;
}

#[tokio::test]
async fn a_budget_leaves_the_rest_for_the_next_touch() {
    let world = World::starting_at(100).await;
    let moved = class(1, 5, Some("a"), Some("b"), 3);
    let oracle = Oracle::knowing(&world, &[(&moved, "a", 10), (&moved, "b", 7)]);
    let events = [moved.at(block(100, 0))];
    let answers = prepare(&world.db, &oracle, &world.network, &events, 1).await.expect("asks");
    assert_eq!(answers.0.keys().map(|(_, account)| *account).collect::<Vec<_>>(), [account_id("a")]);
}

#[tokio::test]
async fn answers_that_come_after_their_events_are_settled_before_finality() {
    let world = World::starting_at(100).await;
    let moved = class(1, 5, Some("a"), Some("b"), 3);
    let oracle = Oracle::knowing(&world, &[(&moved, "a", 10), (&moved, "b", 7)]);
    world.done(block(100, 0), &[&moved]).await;
    for round in 0..2 {
        let mut conn = world.db.conn().await.expect("connects");
        let tx = conn.tx().await.expect("begins");
        let asks = openings::unasked(&tx, &world.network, 100).await.expect("reads");
        tx.rollback().await.expect("ends");
        assert_eq!(asks.len(), if round == 0 { 2 } else { 0 });
        let answers = openings::ask(&oracle, &asks).await.expect("asks");
        for _twice in 0..2 {
            let tx = conn.tx().await.expect("begins");
            openings::settle(&tx, &world.network, &answers, &cause("asker")).await.expect("settles");
            tx.commit().await.expect("commits");
        }
    }
    assert_eq!(world.latest(moved.asset()).await, owners(&[("a", 7), ("b", 10)]));
    world.finalize(100).await;
    assert_eq!(world.finalized(moved.asset()).await, owners(&[("a", 7), ("b", 10)]));
    world.holds().await;
}
