//! The suite every adapter passes (S0 §16.5). It looks at `parse` only, which is where silent corruption would
//! begin; the caller brings blocks of its family and a validator for [`RAW_EVENT_SCHEMA`].

use std::collections::{BTreeMap, HashSet};

use serde_json::Value;
use tidemark_model::chain::{ChainAdapter, EventKind, RawBlock, RawEvent};
use tidemark_model::quantity::SignedQty;

/// JSON Schema (2020-12) of a `RawEvent`.
pub const RAW_EVENT_SCHEMA: &str = include_str!("../schemas/chain/raw_event/v1.json");

/// A block with one batch record of `classes` token classes.
#[derive(Debug, Clone)]
pub struct BatchCase {
    /// How many events it must expand to.
    pub classes: usize,
    /// The block.
    pub block: RawBlock,
}

/// What the suite saw, so that a test can insist on having seen something.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// Events per kind.
    pub kinds: BTreeMap<&'static str, usize>,
    /// Records named as broken.
    pub quarantined: usize,
}

/// Runs the suite; the error names the first broken promise.
pub fn adapter_contract(
    adapter: &dyn ChainAdapter,
    blocks: &[RawBlock],
    batches: &[BatchCase],
    valid: &dyn Fn(&Value) -> Result<(), String>,
) -> Result<Seen, String> {
    let mut seen = Seen::default();
    for block in blocks.iter().chain(batches.iter().map(|case| &case.block)) {
        let parsed = adapter.parse(block);
        if adapter.parse(block) != parsed {
            return Err(format!("block {} parsed twice gives two answers", block.height));
        }
        check_block(adapter, block, &parsed.events, valid)?;
        for event in &parsed.events {
            *seen.kinds.entry(event.event_kind.as_str()).or_default() += 1;
        }
        if let Some(bad) = parsed.quarantined.iter().find(|bad| bad.reason.is_empty()) {
            return Err(format!("{} is quarantined without a reason", bad.source_event_id.as_str()));
        }
        seen.quarantined += parsed.quarantined.len();
    }
    for case in batches {
        let found = adapter.parse(&case.block).events.len();
        if found != case.classes {
            return Err(format!("a batch of {} classes gave {found} events", case.classes));
        }
    }
    Ok(seen)
}

fn check_block(
    adapter: &dyn ChainAdapter,
    block: &RawBlock,
    events: &[RawEvent],
    valid: &dyn Fn(&Value) -> Result<(), String>,
) -> Result<(), String> {
    let mut ids = HashSet::new();
    let mut next: BTreeMap<&str, u32> = BTreeMap::new();
    let mut previous = None;
    for event in events {
        let name = format!("{} #{}", event.source_event_id.as_str(), event.sub_index);
        let value = serde_json::to_value(event).map_err(|error| format!("{name}: {error}"))?;
        valid(&value).map_err(|error| format!("{name} breaks the schema: {error}"))?;
        if !ids.insert((event.source_event_id.as_str(), event.sub_index)) {
            return Err(format!("{name} came twice"));
        }
        let expected = next.entry(event.source_event_id.as_str()).or_default();
        if *expected != event.sub_index {
            return Err(format!("{name}: expected sub_index {expected}"));
        }
        *expected += 1;
        let position = (event.event_index, event.sub_index);
        if previous.is_some_and(|previous| previous >= position) {
            return Err(format!("{name} is out of order"));
        }
        previous = Some(position);
        if (event.block_number, event.block_hash, event.event_time) != (block.height, block.hash, block.time)
        {
            return Err(format!("{name} names another block"));
        }
        if event.asset_refs.iter().any(|asset| asset.network_id != adapter.network().id) {
            return Err(format!("{name} names another network"));
        }
        check_legs(event).map_err(|reason| format!("{name}: {reason}"))?;
    }
    Ok(())
}

fn check_legs(event: &RawEvent) -> Result<(), &'static str> {
    let legs = || event.ownership_deltas.iter().map(|delta| delta.qty_delta);
    let sum = legs().try_fold(SignedQty::ZERO, SignedQty::checked_add).ok_or("the legs overflow")?;
    match event.event_kind {
        EventKind::Transfer => {
            if event.ownership_deltas.len() != 2 || !sum.is_zero() {
                return Err("a transfer has two legs that sum to zero");
            }
        }
        EventKind::Mint | EventKind::Opening => {
            if event.ownership_deltas.len() != 1 || sum.is_negative() {
                return Err("a mint has one leg, not negative");
            }
        }
        EventKind::Burn => {
            if event.ownership_deltas.len() != 1 || (!sum.is_negative() && !sum.is_zero()) {
                return Err("a burn has one leg, not positive");
            }
        }
        EventKind::Listing | EventKind::Sale | EventKind::Offer | EventKind::Cancel | EventKind::Metadata => {
            if !event.ownership_deltas.is_empty() {
                return Err("an event that moves nothing has no legs");
            }
        }
    }
    Ok(())
}
