//! What the ingester tells the world: drafts for the outbox. Order is kept per network.

use serde_json::{Value, json};
use tidemark_model::OffsetDateTime;
use tidemark_model::chain::{BlockRef, Head, RawBlock};
use tidemark_model::envelope::Draft;
use tidemark_model::ids::{Height, NetworkId};
use tidemark_model::subject::Subject;
use time::format_description::well_known::Rfc3339;

/// What a block event says of the chain around it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Around {
    pub head: Height,
    pub finalized: Option<Height>,
}

fn subject(aggregate: &str, event: &str) -> Subject {
    Subject::new("chain", aggregate, event, 1).expect("our own subjects are valid")
}

/// `chain.block.ingested.v1`. A block that a reorg brings has an id of its own for that reorg: the same block
/// may come, go and come back, and each is a fact.
pub(super) fn block_ingested(
    network: NetworkId,
    block: &RawBlock,
    around: Around,
    reorg_id: Option<&str>,
) -> Draft {
    let cause = match reorg_id {
        None => format!("{network}:{}", block.hash),
        Some(reorg) => format!("{network}:{}:{reorg}", block.hash),
    };
    let time = block.time.format(&Rfc3339).expect("a block time has a year of four digits");
    let payload = json!({
        "network_id": network.0,
        "height": block.height.0,
        "hash": block.hash,
        "parent_hash": block.parent,
        "block_time": time,
        "event_count": block.records.len(),
        "head_height": around.head.0,
        "finalized_height": around.finalized.map(|height| height.0),
    });
    Draft::derived(subject("block", "ingested"), &cause, network.to_string(), payload, block.time)
}

/// `chain.finality.advanced.v1`
pub(super) fn finality_advanced(
    network: NetworkId,
    head: &Head,
    finalized: BlockRef,
    at: OffsetDateTime,
) -> Draft {
    let cause = format!("{network}:{finalized}");
    let payload = json!({
        "network_id": network.0,
        "finalized_height": finalized.height.0,
        "finalized_hash": finalized.hash,
        "head_height": head.latest.height.0,
    });
    Draft::derived(subject("finality", "advanced"), &cause, network.to_string(), payload, at)
}

/// `chain.reorg.detected.v1`. `number` counts the network's reorgs, so that going back and forth between two
/// branches gives a new id each time.
pub(super) fn reorg_detected(
    network: NetworkId,
    number: i64,
    ancestor: BlockRef,
    orphaned: &[BlockRef],
    canonical: &[RawBlock],
) -> Draft {
    let named = |block: &BlockRef| json!({ "height": block.height.0, "hash": block.hash });
    let canonical_refs: Vec<Value> = canonical.iter().map(|block| named(&block.block_ref())).collect();
    let payload = json!({
        "network_id": network.0,
        "ancestor": named(&ancestor),
        "orphaned": orphaned.iter().map(named).collect::<Vec<_>>(),
        "canonical": canonical_refs,
    });
    let at = canonical.last().map_or(OffsetDateTime::UNIX_EPOCH, |block| block.time);
    let cause = format!("{network}:{number}:{ancestor}");
    Draft::derived(subject("reorg", "detected"), &cause, network.to_string(), payload, at)
}
