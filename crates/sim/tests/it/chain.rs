//! The chain without a socket: determinism, conservation, blooms, reorgs.

use std::collections::BTreeMap;

use alloy_primitives::U256;
use tidemark_sim::{ReorgKind, ReorgSchedule, Sim, SimConfig, SimEvent, SimLog, Truth, supply};

fn hashes(sim: &Sim) -> Vec<String> {
    (0..=sim.head()).map(|height| sim.block(height).unwrap().hash.to_string()).collect()
}

#[test]
fn the_same_seed_and_calls_give_the_same_chain() {
    let make = |seed: u64| {
        let sim = Sim::new(SimConfig::small(seed));
        sim.mine(30);
        for kind in ReorgKind::ALL {
            sim.reorg(3, kind);
            sim.mine(2);
        }
        sim
    };
    let (one, two, other) = (make(5), make(5), make(6));
    assert_eq!(hashes(&one), hashes(&two));
    assert_eq!(one.state_digest(one.head()), two.state_digest(two.head()));
    assert_ne!(hashes(&one)[1], hashes(&other)[1]);
    assert_ne!(hashes(&one)[0], hashes(&other)[0], "another seed is another genesis");
}

#[test]
fn blocks_mined_at_once_or_one_by_one_are_the_same() {
    let (one, two) = (Sim::new(SimConfig::small(1)), Sim::new(SimConfig::small(1)));
    one.mine(20);
    (0..20).for_each(|_| two.mine(1));
    assert_eq!(hashes(&one), hashes(&two));
}

/// Folds public logs, with nothing shared with the simulator's own fold.
fn fold(logs: &[SimLog]) -> BTreeMap<(String, String, String), U256> {
    let mut balances: BTreeMap<(String, String, String), U256> = BTreeMap::new();
    let zero = alloy_primitives::Address::ZERO;
    for log in logs {
        let (from, to, items) = match &log.event {
            SimEvent::Erc721 { from, to, token_id } => (from, to, vec![(*token_id, U256::from(1))]),
            SimEvent::Erc1155 { from, to, items, .. } => (from, to, items.clone()),
            SimEvent::Uri { .. } | SimEvent::Erc20 => continue,
        };
        for (id, qty) in items {
            let key = |account: &alloy_primitives::Address| {
                (format!("{:#x}", log.address), id.to_string(), format!("{account:#x}"))
            };
            if *from != zero {
                let held = balances.entry(key(from)).or_default();
                *held = held.checked_sub(qty).expect("senders own what they send");
            }
            if *to != zero {
                *balances.entry(key(to)).or_default() += qty;
            }
        }
    }
    balances.retain(|_, qty| !qty.is_zero());
    balances
}

#[test]
fn the_truth_is_the_fold_of_the_logs_at_every_height() {
    let sim = Sim::new(SimConfig::small(3));
    sim.mine(60);
    for height in [0, 1, 17, 60] {
        assert_eq!(sim.owners_at(height).balances, fold(&sim.logs(0, height)), "height {height}");
    }
    assert_eq!(sim.owners_at(1_000).height, 60);
}

#[test]
fn unique_tokens_have_one_owner() {
    let sim = Sim::new(SimConfig { collections_1155: 0, batch_percent: 0, ..SimConfig::small(3) });
    sim.mine(60);
    let supply = supply(&sim.owners_at(60));
    assert!(supply.len() > 50);
    assert!(supply.values().all(|sum| *sum == U256::from(1)));
}

#[test]
fn the_economy_has_everything_an_indexer_must_survive() {
    let sim = Sim::new(SimConfig::small(2));
    sim.mine(300);
    let logs = sim.logs(0, 300);
    let has = |what: &str, test: &dyn Fn(&SimLog) -> bool| {
        assert!(logs.iter().any(test), "no {what} in {} logs", logs.len());
    };
    let zero = alloy_primitives::Address::ZERO;
    has("ERC-721 mint", &|log| matches!(&log.event, SimEvent::Erc721 { from, .. } if *from == zero));
    has("ERC-721 burn", &|log| matches!(&log.event, SimEvent::Erc721 { to, .. } if *to == zero));
    has("self transfer", &|log| matches!(&log.event, SimEvent::Erc721 { from, to, .. } if from == to));
    has(
        "largest id",
        &|log| matches!(&log.event, SimEvent::Erc721 { token_id, .. } if *token_id == U256::MAX),
    );
    has(
        "zero quantity",
        &|log| matches!(&log.event, SimEvent::Erc1155 { items, .. } if items.iter().any(|(_, qty)| qty.is_zero())),
    );
    has(
        "large quantity",
        &|log| matches!(&log.event, SimEvent::Erc1155 { items, .. } if items.iter().any(|(_, qty)| *qty > U256::from(u128::MAX))),
    );
    has("id twice in a batch", &|log| {
        matches!(&log.event, SimEvent::Erc1155 { items, batch: true, .. }
            if items.iter().map(|(id, _)| id).collect::<std::collections::BTreeSet<_>>().len() < items.len())
    });
    has(
        "batch burn or transfer",
        &|log| matches!(&log.event, SimEvent::Erc1155 { from, batch: true, .. } if *from != zero),
    );
    has("URI", &|log| matches!(&log.event, SimEvent::Uri { .. }));
    has("ERC-20 noise", &|log| log.event == SimEvent::Erc20 && log.topics.len() == 3);
    has("second log of a transaction", &|log| log.index_in_tx > 0);
    assert!((1..=300).any(|height| sim.block(height).unwrap().log_count == 0), "some blocks are empty");
}

#[test]
fn headers_link_and_blooms_hold_every_address_and_topic() {
    let sim = Sim::new(SimConfig::small(4));
    sim.mine(40);
    sim.reorg(5, ReorgKind::ReincludeShifted);
    for height in 1..=sim.head() {
        let block = sim.block(height).unwrap();
        assert_eq!(block.parent_hash, sim.block(height - 1).unwrap().hash);
        assert_eq!(block.timestamp, sim.block(height - 1).unwrap().timestamp + 12);
        let logs = sim.logs(height, height);
        for (expected, log) in (0_u32..).zip(&logs) {
            assert_eq!(log.log_index, expected);
            assert_eq!(block.transactions[usize::try_from(log.tx_index).unwrap()], log.tx_hash);
            assert!(block.logs_bloom.may_contain(log.address.as_slice()));
            assert!(log.topics.iter().all(|topic| block.logs_bloom.may_contain(topic.as_slice())));
        }
        assert_eq!(logs.is_empty(), block.logs_bloom.as_bytes().iter().all(|byte| *byte == 0));
    }
}

/// Content of logs without their place in a block.
fn content(logs: &[SimLog]) -> Vec<(String, u32, Vec<u8>)> {
    logs.iter().map(|log| (log.tx_hash.to_string(), log.index_in_tx, log.data.clone())).collect()
}

struct Before {
    sim: Sim,
    logs: Vec<SimLog>,
    truth: Truth,
}

/// A chain of 40 blocks, reorganised: heights 37..=40 are replaced, the head becomes 41.
fn reorganised(kind: ReorgKind) -> Before {
    let sim = Sim::new(SimConfig { steady: true, ..SimConfig::small(8) });
    sim.mine(40);
    let before = Before { logs: sim.logs(37, 40), truth: sim.owners_at(40), sim: sim.clone() };
    let (below, old) = (sim.block(36).unwrap(), sim.block(37).unwrap());
    sim.reorg(4, kind);
    assert_eq!(sim.head(), 41);
    assert_eq!(sim.block(36).unwrap(), below);
    assert_ne!(sim.block(37).unwrap().hash, old.hash);
    assert_eq!(sim.block(37).unwrap().parent_hash, below.hash);
    assert_eq!(sim.owners_at(41).balances, fold(&sim.logs(0, 41)));
    before
}

#[test]
fn same_again_changes_hashes_only() {
    let Before { sim, logs, truth } = reorganised(ReorgKind::ReincludeSame);
    let after = sim.logs(37, 40);
    assert_eq!(content(&after), content(&logs));
    assert!(logs.iter().zip(&after).all(|(old, new)| old.log_index == new.log_index));
    assert!(logs.iter().zip(&after).all(|(old, new)| old.block_hash != new.block_hash));
    assert_eq!(sim.owners_at(40).balances, truth.balances);
}

#[test]
fn shifted_keeps_transactions_and_changes_log_indexes() {
    let Before { sim, logs, .. } = reorganised(ReorgKind::ReincludeShifted);
    let after = sim.logs(37, 40);
    for old in &logs {
        let again = after.iter().find(|log| log.tx_hash == old.tx_hash && log.index_in_tx == old.index_in_tx);
        let again = again.expect("every transaction came back");
        assert_eq!((again.block_number, &again.data), (old.block_number, &old.data));
        assert!(again.log_index > old.log_index);
    }
    assert!(after.len() > logs.len());
}

#[test]
fn later_moves_transactions_one_block_up() {
    let Before { sim, logs, .. } = reorganised(ReorgKind::ReincludeLater);
    let after = sim.logs(38, 41);
    assert_eq!(content(&after), content(&logs));
    assert!(logs.iter().zip(&after).all(|(old, new)| new.block_number == old.block_number + 1));
}

#[test]
fn changed_keeps_names_and_changes_content() {
    let Before { sim, logs, .. } = reorganised(ReorgKind::ReincludeChanged);
    let after = sim.logs(37, 40);
    let names = |logs: &[SimLog]| -> Vec<_> {
        logs.iter().map(|log| (log.tx_hash, log.log_index, log.block_number)).collect()
    };
    assert_eq!(names(&after), names(&logs));
    assert!(logs.iter().zip(&after).any(|(old, new)| old.topics != new.topics || old.data != new.data));
}

#[test]
fn replaced_dropped_and_empty_branches_lose_the_transactions() {
    for kind in [ReorgKind::Replace, ReorgKind::Drop, ReorgKind::Empty] {
        let Before { sim, logs, truth } = reorganised(kind);
        let after = sim.logs(37, 41);
        assert!(logs.iter().all(|old| after.iter().all(|new| new.tx_hash != old.tx_hash)), "{kind:?}");
        match kind {
            ReorgKind::Drop => {
                assert!(!after.is_empty() && after.iter().all(|log| log.event == SimEvent::Erc20));
            }
            ReorgKind::Empty => assert!(after.is_empty()),
            _ => assert_ne!(sim.owners_at(40).balances, truth.balances),
        }
    }
}

#[test]
fn back_restores_the_old_hashes() {
    let sim = Sim::new(SimConfig::small(8));
    sim.mine(40);
    let old = sim.block(40).unwrap();
    let truth = sim.owners_at(40);
    sim.reorg(3, ReorgKind::Replace);
    assert_ne!(sim.block(40).unwrap(), old);
    sim.reorg(0, ReorgKind::Back);
    assert_eq!(sim.block(40).unwrap(), old);
    assert_eq!(sim.owners_at(40), truth);
    assert_eq!(sim.head(), 42, "the old branch grew longer than the other");
}

#[test]
fn many_reorgs_in_a_row_stay_valid() {
    let sim = Sim::new(SimConfig::small(21));
    sim.mine(30);
    for round in 0_u64..60 {
        let kind = ReorgKind::ALL[usize::try_from(round).unwrap() % ReorgKind::ALL.len()];
        sim.reorg(1 + round % 5, kind);
        sim.mine(round % 3);
    }
    assert_eq!(sim.owners_at(sim.head()).balances, fold(&sim.logs(0, sim.head())));
}

#[test]
fn finality_never_goes_back_and_can_stand_still() {
    let sim = Sim::new(SimConfig::small(8));
    assert_eq!((sim.head(), sim.safe(), sim.finalized()), (0, 0, 0));
    sim.mine(20);
    assert_eq!((sim.safe(), sim.finalized()), (16, 12));
    sim.reorg_to(6, ReorgKind::Empty, 1);
    assert_eq!((sim.head(), sim.finalized()), (15, 12));
    sim.freeze_finality(true);
    sim.mine(30);
    assert_eq!(sim.finalized(), 12);
    sim.freeze_finality(false);
    assert_eq!(sim.finalized(), sim.head() - 8);
}

#[test]
fn full_and_empty_blocks_come_on_demand() {
    let sim = Sim::new(SimConfig::small(8));
    sim.mine_full(333);
    sim.mine_empty(2);
    assert_eq!(sim.log_count(1, 1), 333);
    assert_eq!(sim.log_count(2, 3), 0);
    assert_eq!(sim.head(), 3);
}

#[tokio::test]
async fn the_clock_mines_and_reorganises_until_it_is_told_to_stop() {
    let sim = Sim::new(SimConfig::small(8));
    sim.mine(30);
    let before = hashes(&sim);
    let token = tokio_util::sync::CancellationToken::new();
    let schedule = ReorgSchedule { every_blocks: 2, depth_max: 3, ..ReorgSchedule::default() };
    let clock = sim.clone().run_clock(std::time::Duration::from_millis(1), Some(schedule), token.clone());
    let watch = async {
        while sim.head() < 60 {
            tokio::task::yield_now().await;
        }
        token.cancel();
    };
    let both = async { tokio::join!(clock, watch) };
    tokio::time::timeout(std::time::Duration::from_secs(60), both).await.unwrap();
    let finalized_then = 22;
    assert_eq!(hashes(&sim)[..=finalized_then], before[..=finalized_then], "finalized blocks stay");
    assert_eq!(sim.owners_at(sim.head()).balances, fold(&sim.logs(0, sim.head())));
}

#[test]
fn a_chain_at_rest_is_the_same_chain_and_nothing_happens_on_it() {
    let (one, two) = (Sim::new(SimConfig::small(9)), Sim::new(SimConfig::small(9)));
    one.mine(20);
    two.mine(20);
    one.rest();
    assert_eq!(hashes(&one), hashes(&two));
    assert_eq!(one.logs(0, 20), two.logs(0, 20));
    assert_eq!(one.state_digest(20), two.state_digest(20));
    one.mine(2);
    assert_eq!(one.logs(21, 22), Vec::new());
}
