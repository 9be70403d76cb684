//! `eth_getLogs`: find the blocks, find the logs, keep the limits, bend what the profile wants bent, write.

use std::collections::HashMap;
use std::sync::Arc;

use alloy_primitives::keccak256;

use crate::block::{Block, count};
use crate::book::at;
use crate::encode::{LogTwist, put_log};
use crate::faults::{FaultProfile, LogNumbering, RpcError};
use crate::filter::{Filter, RawFilter};
use crate::hexed;
use crate::limits::{Limit, Refusal};
use crate::node::{Node, Params, View, bad_param};

/// Bytes of one log in an answer, for reserving memory.
const LOG_BYTES: usize = 760;

/// A log of an answer: positions of block and log.
type Hit = (u32, u32);

impl Node {
    pub(crate) fn logs(
        &self,
        profile: &FaultProfile,
        view: View,
        out: &mut Vec<u8>,
        params: &Params<'_>,
    ) -> Result<(), RpcError> {
        let raw: RawFilter = params.parse_as(0)?;
        let book = self.sim.book();
        let filter = Filter::parse(&raw, book, profile.empty_addresses)
            .map_err(|reason| RpcError::new(-32602, reason))?;
        let Some((blocks, from, to)) = self.log_blocks(profile, view, &raw)? else {
            out.extend_from_slice(b"[]");
            return Ok(());
        };
        let mut hits: Vec<Hit> = Vec::new();
        for (block_at, block) in (0_u32..).zip(&blocks) {
            for (log_at, entry) in (0_u32..).zip(&block.entries) {
                if filter.matches(book, entry) {
                    hits.push((block_at, log_at));
                }
            }
        }
        if self.dice.hits(profile.late_tip_logs) {
            hits.retain(|hit| blocks[at(hit.0)].number < view.head);
        }
        let found = u64::from(count(hits.len()));
        if let Some(allowed) = profile.max_results.filter(|max| found > *max) {
            let fits = usize::try_from(allowed).unwrap_or(usize::MAX);
            // The block in which the first log too many stands; the one before still fits.
            let works_to = from + u64::from(hits[fits].0.saturating_sub(1));
            return Err(self.refuse_range(profile, Limit::Results, allowed, (from, to), works_to));
        }
        let twists = self.twist_logs(profile, &blocks, &mut hits);
        let mark = out.len();
        out.reserve(hits.len() * LOG_BYTES + 2);
        out.push(b'[');
        for (position, (block_at, log_at)) in hits.iter().enumerate() {
            if position > 0 {
                out.push(b',');
            }
            let block = &blocks[at(*block_at)];
            let twist = if twists.is_empty() {
                LogTwist::default()
            } else {
                twists.get(&position).copied().unwrap_or_default()
            };
            put_log(out, book, block, (*log_at, &block.entries[at(*log_at)]), twist);
        }
        out.push(b']');
        let bytes = u64::try_from(out.len() - mark).expect("lengths fit u64");
        if let Some(allowed) = profile.max_response_bytes.filter(|max| bytes > *max) {
            // Half of what would fit on average: blocks differ.
            let works_to = from + ((to - from + 1) * allowed / bytes / 2).max(1) - 1;
            return Err(self.refuse_range(profile, Limit::Bytes, allowed, (from, to), works_to));
        }
        Ok(())
    }

    /// The blocks a filter speaks of with first and last height; `None` when the answer is `[]`.
    #[expect(clippy::type_complexity, reason = "used once, right above")]
    fn log_blocks(
        &self,
        profile: &FaultProfile,
        view: View,
        raw: &RawFilter,
    ) -> Result<Option<(Vec<Arc<Block>>, u64, u64)>, RpcError> {
        if let Some(hash) = &raw.block_hash {
            if raw.from_block.is_some() || raw.to_block.is_some() {
                return Err(RpcError::new(
                    -32602,
                    "cannot specify both BlockHash and FromBlock/ToBlock, choose one or the other",
                ));
            }
            let hash = hexed::parse_fixed::<32>(hash).ok_or_else(|| bad_param("blockHash"))?;
            let block = self.sim.read().by_hash.get(&hash).filter(|block| block.number <= view.head).cloned();
            let block = block.ok_or_else(|| RpcError::new(-32000, "unknown block"))?;
            let height = block.number;
            if self.pruned(profile, height)? {
                return Ok(None);
            }
            return Ok(Some((vec![block], height, height)));
        }
        let latest = "latest".to_owned();
        let from = self.height(profile, view, raw.from_block.as_ref().unwrap_or(&latest))?;
        let to = self.height(profile, view, raw.to_block.as_ref().unwrap_or(&latest))?;
        if from > to {
            return Err(RpcError::new(-32602, "invalid block range params"));
        }
        if let Some(allowed) = profile.max_block_range.filter(|max| to - from >= *max) {
            let works_to = from.saturating_add(allowed.max(1) - 1);
            return Err(self.refuse_range(profile, Limit::Blocks, allowed, (from, to), works_to));
        }
        if to > view.head
            && let Some(error) = profile.beyond_head.error()
        {
            return Err(error);
        }
        if self.pruned(profile, from)? || from > view.head {
            return Ok(None);
        }
        let state = self.sim.read();
        let blocks = if view.left_branch {
            (from..=to.min(view.head)).filter_map(|height| self.block_at(&state, view, height)).collect()
        } else {
            state.blocks(from, to.min(view.head))
        };
        Ok(Some((blocks, from, to.min(view.head))))
    }

    fn refuse_range(
        &self,
        profile: &FaultProfile,
        limit: Limit,
        allowed: u64,
        (from, to): (u64, u64),
        works_to: u64,
    ) -> RpcError {
        let works_to = works_to.clamp(from, to);
        Refusal { limit, allowed, from, to, works_to }.in_words(profile.limit_style, &self.dice)
    }

    /// Bends an answer of logs as the profile wants it.
    fn twist_logs(
        &self,
        profile: &FaultProfile,
        blocks: &[Arc<Block>],
        hits: &mut Vec<Hit>,
    ) -> HashMap<usize, LogTwist> {
        let mut twists: HashMap<usize, LogTwist> = HashMap::new();
        if hits.is_empty() {
            return twists;
        }
        if self.dice.hits(profile.empty_logs) {
            hits.clear();
            return twists;
        }
        if self.dice.hits(profile.hidden_block_logs) {
            let hidden = hits[self.dice.below(hits.len())].0;
            hits.retain(|hit| hit.0 != hidden);
        }
        if !hits.is_empty() && self.dice.hits(profile.hidden_single_log) {
            hits.remove(self.dice.below(hits.len()));
        }
        if hits.is_empty() {
            return twists;
        }
        if self.dice.hits(profile.removed_logs) {
            // A log of a left branch, shown between the living ones.
            let position = self.dice.below(hits.len());
            hits.insert(position, hits[position]);
            let block_hash = Some(keccak256(blocks[at(hits[position].0)].hash).0);
            twists.insert(position, LogTwist { removed: true, block_hash, ..LogTwist::default() });
        }
        if self.dice.hits(profile.other_block_log) {
            let position = self.dice.below(hits.len());
            let hash = keccak256(blocks[at(hits[position].0)].hash).0;
            twists.entry(position).or_default().block_hash = Some(hash);
        }
        if profile.log_numbering == LogNumbering::PerTransaction {
            for (position, (block_at, log_at)) in hits.iter().enumerate() {
                let block = &blocks[at(*block_at)];
                let first = block.txs[at(block.entries[at(*log_at)].tx)].first;
                twists.entry(position).or_default().index = Some(log_at - first);
            }
        }
        let pairs: Vec<usize> =
            (1..hits.len()).filter(|position| hits[*position].0 == hits[position - 1].0).collect();
        if !pairs.is_empty() && self.dice.hits(profile.duplicate_log_index) {
            let position = pairs[self.dice.below(pairs.len())];
            twists.entry(position).or_default().index = Some(hits[position - 1].1);
        }
        if !pairs.is_empty() && self.dice.hits(profile.decreasing_log_index) {
            let position = pairs[self.dice.below(pairs.len())];
            twists.entry(position).or_default().index = Some(hits[position - 1].1);
            twists.entry(position - 1).or_default().index = Some(hits[position].1);
        }
        twists
    }
}
