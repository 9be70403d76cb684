//! The adapter against a node that misbehaves in every way we know: what it hands over is the truth or an
//! error, never something in between.

mod common;

use std::time::Duration;

use common::{Block, FINALITY_LAG, Node, adapter, branch, chain, config, contract};
use proptest::prelude::*;
use tidemark_adapters::evm::{Audit, BloomPolicy, EvmAdapter, FinalityRule, HeaderPolicy, Mode};
use tidemark_model::U256;
use tidemark_model::chain::{
    AssetRef, BalanceAsk, BlockCoverage, ChainAdapter, ChainError, FetchMode, RawBatch, RawBlock, Standard,
    Verdict,
};
use tidemark_model::ids::{Height, HeightRange, NetworkId};

fn range(first: u64, last: u64) -> HeightRange {
    HeightRange::inclusive(Height(first), Height(last)).expect("not empty")
}

/// Reads all of `range`, sub-range by sub-range.
async fn read_all(
    adapter: &EvmAdapter,
    range: HeightRange,
    mode: FetchMode,
) -> Result<Vec<RawBatch>, ChainError> {
    let mut batches = Vec::new();
    let mut rest = Some(range);
    while let Some(open) = rest {
        let batch = adapter.fetch(open, mode).await?;
        assert_eq!(batch.covered.from(), open.from(), "covered starts where it was asked");
        assert!(batch.covered.to() <= open.to());
        rest = HeightRange::new(batch.covered.to(), open.to());
        batches.push(batch);
    }
    Ok(batches)
}

fn tokens(batches: &[RawBatch]) -> Vec<(u64, u32)> {
    let blocks = batches.iter().flat_map(|batch| &batch.blocks);
    blocks.flat_map(|block| block.records.iter().map(|record| (block.height.0, record.index))).collect()
}

fn truth(first: u64, last: u64, transfers: impl Fn(u64) -> u64) -> Vec<(u64, u32)> {
    (first..=last)
        .flat_map(|height| {
            (0..transfers(height)).map(move |index| (height, u32::try_from(index).expect("small")))
        })
        .collect()
}

fn few(height: u64) -> u64 {
    height % 3
}

fn has(batch: &RawBatch, check: &str) -> bool {
    batch.evidence.checks.iter().any(|name| name == check)
}

#[tokio::test]
async fn a_good_node_is_read_completely_and_parsed() {
    let node = Node::start(chain(60, few)).await;
    let adapter = adapter(&[&node]);
    assert!(adapter.check().await.expect("the right chain").starts_with("chain 1, genesis 0x1111"));
    let batches = read_all(&adapter, range(1, 57), FetchMode::History).await.expect("reads");
    assert_eq!(tokens(&batches), truth(1, 57, few));
    let evidence = &batches[0].evidence;
    assert_eq!((evidence.provider.as_str(), evidence.head_seen, evidence.foreign), ("one", Height(60), 28));
    assert_eq!(evidence.coverage, BlockCoverage::All);
    for check in ["head_reached", "log_order", "parent_links", "block_hashes", "bloom"] {
        assert!(has(&batches[0], check), "{check}");
    }
    // One request for logs and head, six for the headers, one for the receipts of a sample.
    assert_eq!(evidence.requests, 8);
    assert!(has(&batches[0], "receipts_sample"));
    let blocks: Vec<&RawBlock> = batches.iter().flat_map(|batch| &batch.blocks).collect();
    assert_eq!(blocks.len(), 57);
    assert!(blocks.windows(2).all(|pair| pair[1].parent == pair[0].hash));
    let events: usize = blocks.iter().map(|block| adapter.parse(block).events.len()).sum();
    assert_eq!(events, truth(1, 57, few).len());
    assert!(adapter.requests() >= 8);
}

fn sparse(height: u64) -> u64 {
    u64::from(height % 10 == 1)
}

fn with_records(nodes: &[&Node]) -> EvmAdapter {
    let mut config = config(nodes);
    config.headers = HeaderPolicy::WithRecords;
    EvmAdapter::new(config).expect("good")
}

fn heights(batch: &RawBatch) -> Vec<u64> {
    batch.blocks.iter().map(|block| block.height.0).collect()
}

#[tokio::test]
async fn only_headers_with_records_are_read_where_two_endpoints_agree() {
    let (one, two) = (Node::start(chain(60, sparse)).await, Node::start(chain(60, sparse)).await);
    let adapter = with_records(&[&one, &two]);
    let batch = adapter.fetch(range(1, 57), FetchMode::History).await.expect("reads");
    assert_eq!(batch.evidence.coverage, BlockCoverage::WithRecords);
    assert!(has(&batch, "second_endpoint_agrees"), "{:?}", batch.evidence.checks);
    assert_eq!(heights(&batch), [1, 11, 21, 31, 41, 51]);
    // That is for history: at the tip the next block can be judged only by the one below it.
    let batch = adapter.fetch(range(41, 57), FetchMode::Tip).await.expect("reads");
    assert_eq!(batch.evidence.coverage, BlockCoverage::All);
    assert_eq!(heights(&batch), (41..41 + batch.covered.blocks()).collect::<Vec<u64>>());
}

#[tokio::test]
async fn all_headers_are_read_where_nobody_confirms_that_there_is_nothing() {
    // Alone; beside one that is down; beside one that has less: the blooms must do.
    let (one, two) = (Node::start(chain(60, sparse)).await, Node::start(chain(60, sparse)).await);
    let alone = with_records(&[&one]).fetch(range(1, 57), FetchMode::History).await.expect("reads");
    assert_eq!((alone.evidence.coverage, alone.blocks.len()), (BlockCoverage::All, 57));
    two.fault(|faults| faults.broken = u32::MAX);
    let beside = with_records(&[&one, &two]).fetch(range(1, 57), FetchMode::History).await.expect("reads");
    assert_eq!((beside.evidence.coverage, beside.blocks.len()), (BlockCoverage::All, 57));
    two.fault(|faults| {
        faults.broken = 0;
        faults.hide = vec![21];
    });
    let adapter = with_records(&[&one, &two]);
    for _ in 0..4 {
        let batches =
            read_all(&adapter, range(1, 57), FetchMode::History).await.expect("the honest one answers");
        assert_eq!(tokens(&batches), truth(1, 57, sparse));
        assert!(batches.iter().all(|batch| batch.evidence.coverage == BlockCoverage::All));
    }
    // And the one that hides a whole block is not believed when it is alone.
    let error = with_records(&[&two]).fetch(range(1, 57), FetchMode::History).await.expect_err("found out");
    assert!(error.to_string().contains("hid logs of block 21"), "{error}");
}

#[tokio::test]
async fn a_chain_without_blooms_needs_two_endpoints_or_receipts() {
    let blocks = || {
        let mut blocks = chain(30, few);
        blocks.iter_mut().for_each(|block| block.body["logsBloom"] = serde_json::Value::Null);
        blocks
    };
    let (one, two) = (Node::start(blocks()).await, Node::start(blocks()).await);
    // Receipts tell that nothing is missing, and that something is.
    let batches = read_all(&adapter(&[&one]), range(1, 27), FetchMode::History).await.expect("reads");
    assert_eq!(tokens(&batches), truth(1, 27, few));
    one.fault(|faults| faults.hide = vec![19]);
    let error = adapter(&[&one]).fetch(range(1, 27), FetchMode::History).await.expect_err("found out");
    assert!(error.to_string().contains("hid logs of block 19"), "{error}");
    // With blooms ignored, the second endpoint is not optional.
    let ignoring = |nodes: &[&Node]| {
        let mut config = config(nodes);
        config.bloom = BloomPolicy::Ignore;
        config.tries_max = 2;
        EvmAdapter::new(config).expect("good")
    };
    for mode in [FetchMode::History, FetchMode::Tip] {
        let error = ignoring(&[&one]).fetch(range(1, 27), mode).await.expect_err("nobody confirms");
        assert_eq!(error.verdict(), Verdict::Retry, "{error}");
        assert!(
            ignoring(&[&one, &two])
                .fetch(range(19, 19), mode)
                .await
                .is_ok_and(|batch| !batch.blocks[0].records.is_empty())
        );
    }
}

#[tokio::test]
async fn passing_troubles_are_outlived() {
    let node = Node::start(chain(40, few)).await;
    let adapter = adapter(&[&node]);
    let faults: [fn(&mut common::Faults); 4] = [
        |faults| faults.throttle = 2,
        |faults| faults.broken = 2,
        |faults| faults.truncate = 2,
        |faults| faults.omit = 2,
    ];
    for change in faults {
        node.fault(change);
        let batches = read_all(&adapter, range(1, 37), FetchMode::History).await.expect("reads");
        assert_eq!(tokens(&batches), truth(1, 37, few));
    }
    node.fault(|faults| faults.reorder = true);
    let batches = read_all(&adapter, range(1, 37), FetchMode::Tip).await.expect("reads");
    assert_eq!(tokens(&batches), truth(1, 37, few));
}

#[tokio::test]
async fn an_endpoint_that_stays_down_is_left_for_the_other() {
    let (down, up) = (Node::start(chain(40, few)).await, Node::start(chain(40, few)).await);
    down.fault(|faults| faults.broken = u32::MAX);
    let adapter = adapter(&[&down, &up]);
    for _ in 0..5 {
        let batch = adapter.fetch(range(1, 37), FetchMode::History).await.expect("reads");
        assert_eq!(batch.evidence.provider, "two");
    }
    up.fault(|faults| faults.broken = u32::MAX);
    let error = adapter.fetch(range(1, 37), FetchMode::History).await.expect_err("nobody answers");
    assert_eq!(error.verdict(), Verdict::Retry);
    assert!(!error.to_string().contains("127.0.0.1"), "{error}");
}

#[tokio::test]
async fn stated_limits_are_learned_and_kept() {
    let node = Node::start(chain(60, few)).await;
    node.fault(|faults| {
        faults.range_max = Some((10, "you can make requests with up to a 10 block range".to_owned()))
    });
    let adapter = adapter(&[&node]);
    let batches = read_all(&adapter, range(1, 57), FetchMode::History).await.expect("reads");
    assert_eq!(tokens(&batches), truth(1, 57, few));
    let widths: Vec<u64> = batches.iter().map(|batch| batch.covered.blocks()).collect();
    assert_eq!(widths, [10, 10, 10, 10, 10, 7]);
    assert_eq!(node.asked("eth_getLogs"), 7, "one refusal, six answers");
}

#[tokio::test]
async fn suggested_ranges_are_used() {
    let node = Node::start(chain(60, |_| 4)).await;
    node.fault(|faults| faults.results_max = Some((50, 7)));
    let adapter = adapter(&[&node]);
    let batch = adapter.fetch(range(1, 57), FetchMode::History).await.expect("reads");
    assert_eq!(batch.covered, range(1, 7));
    let batches = read_all(&adapter, range(8, 57), FetchMode::History).await.expect("reads");
    assert_eq!(tokens(&batches), truth(8, 57, |_| 4));
}

#[tokio::test]
async fn one_block_beyond_the_limit_is_read_by_parts() {
    let node = Node::start(chain(10, |_| 30)).await;
    node.fault(|faults| faults.results_max = Some((5, 1)));
    let adapter = adapter(&[&node]);
    let batches = read_all(&adapter, range(1, 7), FetchMode::History).await.expect("reads");
    assert_eq!(tokens(&batches), truth(1, 7, |_| 30));
    assert!(has(&batches[0], "logs_by_topic"));
}

#[tokio::test]
async fn a_lagging_node_never_shortens_history() {
    let (behind, ahead) = (Node::start(chain(60, few)).await, Node::start(chain(60, few)).await);
    behind.fault(|faults| faults.lag = 30);
    let adapter = adapter(&[&behind, &ahead]);
    for _ in 0..4 {
        let batches = read_all(&adapter, range(1, 57), FetchMode::History).await.expect("reads");
        assert_eq!(tokens(&batches), truth(1, 57, few));
        assert!(batches.iter().all(|batch| batch.evidence.provider == "two"));
    }
    let alone = common::adapter(&[&behind]);
    let error = alone.fetch(range(1, 57), FetchMode::History).await.expect_err("it is behind");
    assert!(matches!(error, ChainError::Unavailable { .. }), "{error}");
}

#[tokio::test]
async fn hidden_logs_are_found_out() {
    // Block 19 holds one transfer and no ERC-20 log beside it, so its whole topic is hidden.
    let hide = |node: &Node| node.fault(|faults| faults.hide = vec![19]);
    let honest = Node::start(chain(40, few)).await;
    for mode in [FetchMode::History, FetchMode::Tip] {
        let liar = Node::start(chain(40, few)).await;
        hide(&liar);
        let adapter = adapter(&[&liar, &honest]);
        for _ in 0..4 {
            let batches = read_all(&adapter, range(1, 37), mode).await.expect("the honest one answers");
            assert_eq!(tokens(&batches), truth(1, 37, few));
        }
        // Alone, its own receipts tell on it.
        let error = read_all(&common::adapter(&[&liar]), range(1, 37), mode).await.expect_err("found out");
        assert!(matches!(error, ChainError::Inconsistent { .. }), "{error}");
        assert!(error.to_string().contains("hid logs of block 19"), "{error}");
    }
    // Both lie in their logs: the receipts still tell.
    let (one, two) = (Node::start(chain(40, few)).await, Node::start(chain(40, few)).await);
    hide(&one);
    hide(&two);
    let error = adapter(&[&one, &two]).fetch(range(1, 37), FetchMode::History).await.expect_err("found out");
    assert!(matches!(error, ChainError::Inconsistent { .. }), "{error}");
}

#[tokio::test]
async fn a_false_alarm_of_the_bloom_is_settled() {
    let mut blocks = chain(40, few);
    // All bits set: promises everything. Without receipts to compare, two endpoints agree.
    blocks[20].body["logsBloom"] = serde_json::json!(format!("0x{}", "ff".repeat(256)));
    let (one, two) = (Node::start(blocks.clone()).await, Node::start(blocks).await);
    let batch = adapter(&[&one, &two]).fetch(range(1, 37), FetchMode::History).await.expect("accepted");
    assert!(has(&batch, "bloom_false_positive_confirmed"), "{:?}", batch.evidence.checks);
    // A promise that nothing keeps is not believed of a node that is alone.
    let error = read_all(&adapter(&[&one]), range(1, 37), FetchMode::Tip).await.expect_err("not believed");
    assert!(error.to_string().contains("do not give its bloom"), "{error}");
}

#[tokio::test]
async fn a_node_alone_without_block_receipts_is_proven_by_the_receipts_of_its_transactions() {
    // Block 18 has no transfer of the contract we read, but another event of it, and a foreign transfer: its
    // bloom promises what it does not hold.
    let mut blocks = chain(40, few);
    let block = &mut blocks[17];
    let mut log = block.receipts[0]["logs"][0].clone();
    log["address"] = serde_json::json!(contract());
    log["topics"] = serde_json::json!([common::word(7)]);
    log["logIndex"] = serde_json::json!("0x1");
    block.receipts[0]["logs"].as_array_mut().expect("a list").push(log);
    let logs = block.receipts[0]["logs"].as_array().expect("a list").clone();
    block.body["logsBloom"] = serde_json::json!(common::bloom(&logs));
    let node = Node::start(blocks).await;
    node.fault(|faults| faults.no_receipts = true);
    let mut config = config(&[&node]);
    config.contracts = vec![contract()];
    let adapter = EvmAdapter::new(config).expect("good");
    let batches = read_all(&adapter, range(1, 37), FetchMode::History).await.expect("no false alarm");
    assert_eq!(tokens(&batches), truth(1, 37, few));
    assert!(batches.iter().any(|batch| has(batch, "bloom_false_positive_confirmed")));
    assert!(node.asked("eth_getTransactionReceipt") > 0);
    node.fault(|faults| faults.hide = vec![19]);
    let error = adapter.fetch(range(1, 37), FetchMode::History).await.expect_err("found out");
    assert!(error.to_string().contains("hid logs of block 19"), "{error}");
}

#[tokio::test]
async fn one_log_missing_among_several_is_found_by_the_audit() {
    let liar = Node::start(chain(40, |_| 2)).await;
    liar.fault(|faults| faults.hide_first = vec![19]);
    let honest = Node::start(chain(40, |_| 2)).await;
    let audited = |nodes: &[&Node]| {
        let mut config = config(nodes);
        config.audit = Audit::Receipts;
        EvmAdapter::new(config).expect("good")
    };
    let adapter = adapter(&[&liar, &honest]);
    for _ in 0..4 {
        for mode in [FetchMode::History, FetchMode::Tip] {
            let batches = read_all(&adapter, range(1, 37), mode).await.expect("reads");
            assert_eq!(tokens(&batches), truth(1, 37, |_| 2));
        }
    }
    // Without an audit of every block, a sample finds out who does it again and again.
    let notorious = Node::start(chain(40, |_| 2)).await;
    notorious.fault(|faults| faults.hide_first = (1..=40).collect());
    let error = common::adapter(&[&notorious])
        .fetch(range(1, 37), FetchMode::History)
        .await
        .expect_err("a sample tells");
    assert!(error.to_string().contains("hid logs of block"), "{error}");
    let error =
        audited(&[&liar]).fetch(range(1, 37), FetchMode::History).await.expect_err("its receipts tell");
    assert!(matches!(error, ChainError::Inconsistent { .. }), "{error}");
    let batch = audited(&[&honest]).fetch(range(1, 37), FetchMode::History).await.expect("no false alarm");
    assert!(has(&batch, "receipts_agree"));
}

#[tokio::test]
async fn contradictions_are_not_believed() {
    let faults: [fn(&mut common::Faults); 2] =
        [|faults| faults.doubled = true, |faults| faults.foreign_hash = true];
    for change in faults {
        for mode in [FetchMode::History, FetchMode::Tip] {
            let node = Node::start(chain(20, few)).await;
            node.fault(change);
            let error = adapter(&[&node]).fetch(range(1, 17), mode).await.expect_err("not believed");
            assert!(matches!(error, ChainError::Inconsistent { .. }), "{error}");
        }
    }
}

#[tokio::test]
async fn removed_logs_are_dropped() {
    let node = Node::start(chain(20, few)).await;
    node.fault(|faults| faults.removed = true);
    let batch = adapter(&[&node]).fetch(range(1, 17), FetchMode::History).await.expect("reads");
    assert!(has(&batch, "removed_dropped"));
    assert_eq!(tokens(&[batch]), truth(1, 17, few));
}

#[tokio::test]
async fn a_null_block_is_not_an_end() {
    let (hole, whole) = (Node::start(chain(20, few)).await, Node::start(chain(20, few)).await);
    hole.fault(|faults| faults.null_blocks = vec![9]);
    let adapter = adapter(&[&hole, &whole]);
    for _ in 0..3 {
        let batches = read_all(&adapter, range(1, 17), FetchMode::History).await.expect("reads");
        assert_eq!(tokens(&batches), truth(1, 17, few));
        let batches = read_all(&adapter, range(1, 17), FetchMode::Tip).await.expect("reads");
        assert_eq!(tokens(&batches), truth(1, 17, few));
    }
}

#[tokio::test]
async fn another_chain_is_refused() {
    let (wrong, right) = (Node::start(chain(20, few)).await, Node::start(chain(20, few)).await);
    wrong.fault(|faults| faults.chain_id = Some(5));
    let error = adapter(&[&wrong]).check().await.expect_err("another chain");
    assert_eq!(error.verdict(), Verdict::Halt);
    let error = adapter(&[&wrong]).fetch(range(1, 5), FetchMode::History).await.expect_err("another chain");
    assert_eq!(error.verdict(), Verdict::Halt);
    let adapter = adapter(&[&wrong, &right]);
    adapter.check().await.expect("one is enough");
    let batch = adapter.fetch(range(1, 17), FetchMode::History).await.expect("reads");
    assert_eq!(batch.evidence.provider, "two");
}

#[tokio::test]
async fn heads_come_with_finality_that_never_goes_back() {
    let node = Node::start(chain(20, few)).await;
    let adapter = adapter(&[&node]);
    let head = adapter.head().await.expect("a head");
    assert_eq!((head.latest.height, head.safe), (Height(20), Some(Height(19))));
    assert_eq!(head.finalized.map(|block| block.height), Some(Height(20 - FINALITY_LAG)));
    node.fault(|faults| faults.lag = 5);
    let later = adapter.next_head(&head, Duration::from_millis(1)).await.expect("a lower head is no error");
    assert_eq!((later.latest.height, later.finalized), (Height(15), head.finalized));
}

#[tokio::test]
async fn the_majority_decides_what_is_final() {
    let nodes = [
        Node::start(chain(20, few)).await,
        Node::start(chain(20, few)).await,
        Node::start(chain(20, few)).await,
    ];
    nodes[0].fault(|faults| faults.lag = 10);
    nodes[1].fault(|faults| faults.lag = 4);
    let adapter = adapter(&[&nodes[0], &nodes[1], &nodes[2]]);
    let head = adapter.head().await.expect("a head");
    assert_eq!(head.finalized.map(|block| block.height), Some(Height(16 - FINALITY_LAG)));
}

#[tokio::test]
async fn depth_stands_in_for_missing_tags() {
    let node = Node::start(chain(20, few)).await;
    node.fault(|faults| faults.no_tags = true);
    let mut deep = config(&[&node]);
    deep.fallback_depth = 8;
    let head = EvmAdapter::new(deep.clone()).expect("good").head().await.expect("a head");
    assert_eq!(head.finalized.map(|block| block.height), Some(Height(12)));
    deep.finality = FinalityRule::Depth(5);
    let head = EvmAdapter::new(deep.clone()).expect("good").head().await.expect("a head");
    assert_eq!(head.finalized.map(|block| block.height), Some(Height(15)));
    deep.finality = FinalityRule::Depth(50);
    let head = EvmAdapter::new(deep).expect("good").head().await.expect("a head");
    assert_eq!(head.finalized, None);
}

#[tokio::test]
async fn the_tip_follows_the_branch_the_node_is_on() {
    let node = Node::start(chain(20, few)).await;
    let adapter = adapter(&[&node]);
    let before = adapter.fetch(range(15, 30), FetchMode::Tip).await.expect("reads");
    assert_eq!(before.covered, range(15, 20), "shorter than asked, without a hole");
    let fork: Vec<Block> = {
        let mut blocks = node.chain.lock().expect("no panic");
        let parent = blocks[16].hash().to_owned();
        blocks.truncate(17);
        blocks.extend(branch(18, &parent, 22, 1, |_| 1));
        blocks.clone()
    };
    let after = adapter.fetch(range(18, 22), FetchMode::Tip).await.expect("reads");
    assert_eq!(after.blocks[0].parent, before.blocks[2].hash);
    assert_ne!(after.blocks[0].hash, before.blocks[3].hash);
    assert_eq!(tokens(&[after]), truth(18, 22, |_| 1));
    let link = adapter.link_at(Height(18)).await.expect("asks").expect("there");
    assert_eq!(link.block.hash.to_string(), fork[17].hash());
    assert_eq!(adapter.link_at(Height(99)).await.expect("asks"), None);
}

#[tokio::test]
async fn full_mode_keeps_transactions_and_all_logs() {
    for no_receipts in [false, true] {
        let node = Node::start(chain(20, few)).await;
        node.fault(|faults| faults.no_receipts = no_receipts);
        let mut config = config(&[&node]);
        config.mode = Mode::Full;
        config.full_step_max = 8;
        let adapter = EvmAdapter::new(config).expect("good");
        let batches = read_all(&adapter, range(1, 17), FetchMode::History).await.expect("reads");
        assert!(has(&batches[0], "bloom_equal") && has(&batches[0], "log_index_without_holes"));
        let block = &batches[0].blocks[1];
        assert_eq!((block.transactions.len(), block.records.len()), (1, 3), "two transfers and a coin's");
        let tx = &block.transactions[0];
        assert_eq!((tx.succeeded, tx.value, tx.sender.len()), (Some(true), U256::ZERO, 20));
        assert_eq!(tx.payload["nonce"], "0x1");
        assert_eq!(tx.payload["receipt"]["gasUsed"], "0x5208");
        assert_eq!(block.payload.as_ref().expect("the rest")["gasUsed"], "0x5208");
        let events: usize = batches
            .iter()
            .flat_map(|batch| &batch.blocks)
            .map(|block| adapter.parse(block).events.len())
            .sum();
        assert_eq!(events, truth(1, 17, few).len());
    }
}

#[tokio::test]
async fn incomplete_receipts_do_not_pass_in_full_mode() {
    let node = Node::start(chain(20, |_| 1)).await;
    node.fault(|faults| {
        faults.hide = vec![7];
        faults.hide_in_receipts = true;
    });
    let mut config = config(&[&node]);
    config.mode = Mode::Full;
    let error = EvmAdapter::new(config).expect("good").fetch(range(1, 17), FetchMode::History).await;
    assert!(matches!(error, Err(ChainError::Inconsistent { .. })), "{error:?}");
}

#[tokio::test]
async fn filters_by_contract_are_sent_and_checked() {
    let node = Node::start(chain(20, few)).await;
    let mut config = config(&[&node]);
    config.contracts = vec![contract()];
    let batch =
        EvmAdapter::new(config).expect("good").fetch(range(1, 17), FetchMode::History).await.expect("reads");
    assert_eq!(batch.evidence.foreign, 0, "the coin was not asked for");
    assert_eq!(tokens(&[batch]), truth(1, 17, few));
    let hidden = {
        node.fault(|faults| faults.hide = vec![4]);
        let mut config = common::config(&[&node]);
        config.contracts = vec![contract()];
        EvmAdapter::new(config).expect("good").fetch(range(1, 17), FetchMode::History).await
    };
    assert!(matches!(hidden, Err(ChainError::Inconsistent { .. })), "{hidden:?}");
}

#[tokio::test]
async fn balances_are_asked_at_their_height() {
    let node = Node::start(chain(20, few)).await;
    let ask = |standard, account: &str, token: &str| BalanceAsk {
        asset: AssetRef {
            network_id: NetworkId(1),
            collection_addr_normalized: contract(),
            token_id_raw: token.to_owned(),
            standard,
        },
        account: account.to_owned(),
        at: Height(5),
    };
    let owner = format!("0x{}", "aa".repeat(20));
    let other = format!("0x{}", "bb".repeat(20));
    let asks = [
        ask(Standard::Erc721, &owner, "1"),
        ask(Standard::Erc721, &other, "1"),
        ask(Standard::Erc1155, &owner, "1"),
        ask(Standard::Erc1155, &owner, "not a number"),
    ];
    let answers = adapter(&[&node]).balances(&asks).await.expect("asks");
    assert_eq!(answers, [Some(U256::from(1)), Some(U256::ZERO), Some(U256::from(7)), None]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn sub_ranges_join_to_what_was_asked(first in 1_u64..30, length in 1_u64..25, max in 1_u64..12, results in 1_usize..20) {
        let last = first + length;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let batches = runtime.block_on(async {
            let node = Node::start(chain(60, few)).await;
            node.fault(|faults| {
                faults.range_max = Some((max, format!("block range is too wide (maximum {max})")));
                faults.results_max = Some((results, max));
            });
            read_all(&adapter(&[&node]), range(first, last), FetchMode::History).await
        }).expect("reads");
        // `read_all` checks that each starts where the one before ended; together they are the whole.
        let covered: u64 = batches.iter().map(|batch| batch.covered.blocks()).sum();
        prop_assert_eq!(covered, length + 1);
        let heights: Vec<u64> = batches.iter().flat_map(|batch| &batch.blocks).map(|block| block.height.0).collect();
        prop_assert_eq!(heights, (first..=last).collect::<Vec<_>>());
        prop_assert_eq!(tokens(&batches), truth(first, last, few));
    }
}

#[tokio::test]
async fn recorded_blocks_pass_all_checks() {
    let Some(folder) = common::fixtures() else { return };
    let blocks: Vec<Block> = (14_000_000..=14_000_012)
        .map(|height| {
            let load = |kind: &str| {
                common::load(&folder.join(format!("rpc-range/ethereum/{height}.{kind}.json.gz")))
            };
            Block { body: load("block"), receipts: load("receipts").as_array().expect("receipts").clone() }
        })
        .collect();
    let node = Node::start(blocks).await;
    let asked = range(14_000_000, 14_000_012);
    let mut found = Vec::new();
    for (mode, fetch) in
        [(Mode::Logs, FetchMode::History), (Mode::Logs, FetchMode::Tip), (Mode::Full, FetchMode::Tip)]
    {
        let mut config = config(&[&node]);
        config.mode = mode;
        let adapter = EvmAdapter::new(config).expect("good");
        let batches = read_all(&adapter, asked, fetch).await.expect("reads");
        let blocks = batches.iter().flat_map(|batch| &batch.blocks);
        let events: Vec<_> = blocks.flat_map(|block| adapter.parse(block).events).collect();
        assert!(events.len() > 100, "{}", events.len());
        found.push(events);
    }
    assert!(found[0] == found[1] && found[1] == found[2], "all ways of reading give the same events");
}

#[tokio::test]
async fn a_wrong_chain_keeps_halting_and_one_wrong_endpoint_does_not() {
    let (wrong, down) = (Node::start(chain(20, few)).await, Node::start(chain(20, few)).await);
    wrong.fault(|faults| faults.chain_id = Some(5));
    let alone = adapter(&[&wrong]);
    for _ in 0..2 {
        let error = alone.fetch(range(1, 5), FetchMode::History).await.expect_err("another chain");
        assert_eq!(error.verdict(), Verdict::Halt, "{error}");
    }
    down.fault(|faults| faults.broken = u32::MAX);
    let error = adapter(&[&wrong, &down]).fetch(range(1, 5), FetchMode::History).await.expect_err("nobody");
    assert_eq!(error.verdict(), Verdict::Retry, "{error}");
}

#[tokio::test]
async fn a_node_that_fails_now_and_then_does_not_stop_a_wide_range() {
    let node = Node::start(chain(300, few)).await;
    node.fault(|faults| faults.every = 4);
    let adapter = adapter(&[&node]);
    let batches = read_all(&adapter, range(1, 297), FetchMode::History).await.expect("reads");
    assert_eq!(batches.len(), 1, "thirty batches of headers, a quarter of them failing once");
    assert_eq!(tokens(&batches), truth(1, 297, few));
}

/// Reads like an ingester: an error that says retry is retried.
async fn read_patiently(adapter: &EvmAdapter, asked: HeightRange, mode: FetchMode) -> Vec<(u64, u32)> {
    let mut found = Vec::new();
    let mut rest = Some(asked);
    let mut errors = 0;
    while let Some(open) = rest {
        match adapter.fetch(open, mode).await {
            Ok(batch) => {
                rest = HeightRange::new(batch.covered.to(), open.to());
                found.extend(tokens(&[batch]));
            }
            Err(error) => {
                assert_eq!(error.verdict(), Verdict::Retry, "{error}");
                errors += 1;
                assert!(errors < 200, "no progress: {error}");
            }
        }
    }
    found
}

#[tokio::test]
async fn every_fault_at_once_ends_in_the_truth() {
    for seed in 1..=8 {
        let (one, two) = (Node::start(chain(120, few)).await, Node::start(chain(120, few)).await);
        one.fault(|faults| faults.chaos = seed);
        let mut small = config(&[&one]);
        small.step_init = 16;
        small.step_max = 40;
        let alone = EvmAdapter::new(small.clone()).expect("good");
        small.endpoints = vec![one.endpoint("one"), two.endpoint("two")];
        let both = EvmAdapter::new(small).expect("good");
        for mode in [FetchMode::History, FetchMode::Tip] {
            assert_eq!(read_patiently(&alone, range(1, 100), mode).await, truth(1, 100, few), "seed {seed}");
        }
        // Single missing logs are seen where a second endpoint can be compared with.
        one.fault(|faults| faults.chaos_partial = true);
        let found = read_patiently(&both, range(1, 100), FetchMode::History).await;
        assert_eq!(found, truth(1, 100, few), "seed {seed}");
    }
}

#[tokio::test]
async fn shards_of_the_contracts_see_together_what_one_adapter_sees() {
    let node = Node::start(chain(40, few)).await;
    let mut config = config(&[&node]);
    config.contracts = (0..20_u8).map(|n| format!("0x{}", ::hex::encode([n; 20]))).collect();
    config.contracts.push(contract());
    let whole = EvmAdapter::new(config).expect("good");
    let shards = whole.shards(3).expect("good");
    assert_eq!(shards.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1, 2]);
    let mut seen = Vec::new();
    for (_, shard) in &shards {
        let batches = read_all(shard, range(1, 37), FetchMode::History).await.expect("reads");
        let of_shard = tokens(&batches);
        // There is one contract with transfers, and it is in one shard.
        assert!(of_shard.is_empty() || of_shard == truth(1, 37, few));
        seen.extend(of_shard);
    }
    assert_eq!(seen, truth(1, 37, few));
    assert_eq!(whole.requests(), shards[0].1.requests(), "they share their endpoints");
}
