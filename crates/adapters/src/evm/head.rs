//! Tip and finality. Latest, safe and finalized come from one endpoint in one batch. When several endpoints
//! exist and finality moves, all are asked, and the height counts that a majority has reached (pitfall F78).
//! A latest lower than before is a lagging node, not an error; finality never goes back.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tidemark_model::chain::{BlockRef, ChainError, Head};
use tidemark_model::ids::Height;
use tidemark_rpc::{Call, Class, Endpoint, RpcError};

use super::config::FinalityRule;
use super::wire::Header;
use super::{EvmAdapter, block_ref, header_call};

/// Longest wait for the other endpoints' word on finality.
const QUORUM_WAIT_MAX: Duration = Duration::from_millis(500);

/// What one endpoint says.
struct Word {
    latest: BlockRef,
    safe: Option<Height>,
    finalized: Option<BlockRef>,
}

impl EvmAdapter {
    pub(super) async fn read_head(&self) -> Result<Head, ChainError> {
        let mut last = self.unavailable("its head", "no endpoint is configured");
        for round in 0..3 {
            for endpoint in self.pool.ranked() {
                match self.word_of(&endpoint).await {
                    Ok(word) => return self.settle(&endpoint, word).await,
                    Err(error) => last = error,
                }
            }
            if round < 2 {
                tokio::time::sleep(
                    self.pool.cooling().unwrap_or_default().max(self.pool.backoff().pause(round)),
                )
                .await;
            }
        }
        Err(last)
    }

    async fn word_of(&self, endpoint: &Endpoint) -> Result<Word, ChainError> {
        let tag = |tag: &str| Call::new("eth_getBlockByNumber", json!([tag, false]));
        let calls = match self.config.finality {
            FinalityRule::Tag => vec![tag("latest"), tag("safe"), tag("finalized")],
            FinalityRule::Depth(_) => vec![tag("latest")],
        };
        let what = "its head";
        let answers = self.pool.batch::<Option<Header>>(endpoint, &calls).await;
        let mut answers = answers.map_err(|error| self.explain(what, &error))?.into_iter();
        let mut next = || answers.next().unwrap_or(Ok(None));
        let latest = next().map_err(|error| self.explain(what, &error))?;
        let latest = latest
            .ok_or_else(|| self.unavailable(what, format!("{} has no latest block", endpoint.label())))?;
        let latest = block_ref(&latest);
        endpoint.saw_head(latest.height.0);
        let (safe, finalized) = (next(), next());
        let finalized = match self.config.finality {
            FinalityRule::Depth(depth) => self.at_depth(endpoint, latest, depth).await?,
            FinalityRule::Tag => match finalized {
                // A tag above the head is one tag computed on another machine; the head is the safer word.
                Ok(Some(header)) if header.number.0 > latest.height.0 => Some(latest),
                Ok(header) => header.as_ref().map(block_ref),
                // The chain has not finalized anything yet.
                Err(error) if says_nothing_final(&error) => None,
                Err(RpcError::Refused { class: Class::Other | Class::UnknownMethod, .. }) => {
                    self.at_depth(endpoint, latest, self.config.fallback_depth).await?
                }
                Err(error) => return Err(self.explain(what, &error)),
            },
        };
        let safe = safe.ok().flatten().map(|header| Height(header.number.0.min(latest.height.0)));
        Ok(Word { latest, safe, finalized })
    }

    async fn at_depth(
        &self,
        endpoint: &Endpoint,
        latest: BlockRef,
        depth: u64,
    ) -> Result<Option<BlockRef>, ChainError> {
        if depth == 0 {
            return Ok(Some(latest));
        }
        let Some(height) = latest.height.0.checked_sub(depth) else { return Ok(None) };
        // Nothing new below: no need to ask.
        if let Some(known) = self.finalized_so_far().filter(|known| known.height.0 >= height) {
            return Ok(Some(known));
        }
        let what = format!("block {height}");
        let header = self.pool.call::<Option<Header>>(endpoint, &header_call(height)).await;
        let header = header.map_err(|error| self.explain(&what, &error))?;
        let header = header.filter(|header| header.number.0 == height);
        let header =
            header.ok_or_else(|| self.unavailable(what, format!("{} does not have it", endpoint.label())))?;
        Ok(Some(block_ref(&header)))
    }

    async fn settle(&self, asked: &Arc<Endpoint>, word: Word) -> Result<Head, ChainError> {
        let known = self.finalized_so_far();
        let moved = word.finalized.is_some_and(|new| known.is_none_or(|known| new.height > known.height));
        let mut finalized = word.finalized;
        if moved && self.pool.endpoints().len() > 1 {
            let others = self.pool.ranked().into_iter().filter(|endpoint| !Arc::ptr_eq(endpoint, asked));
            let words = join_all(others.map(|endpoint| self.word_in_time(endpoint))).await;
            let mut reported: Vec<Option<BlockRef>> =
                words.into_iter().flatten().map(|word| word.finalized).chain([word.finalized]).collect();
            finalized = self.majority(&mut reported)?;
        }
        let mut slot = self.finalized.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = match (*slot, finalized) {
            (Some(old), Some(new)) if new.height > old.height => Some(new),
            (Some(old), _) => Some(old),
            (None, new) => new,
        };
        *slot = newest;
        Ok(Head { latest: word.latest, safe: word.safe, finalized: newest })
    }

    /// What another endpoint says, if it says so soon: a slow one must not hold the tip back.
    async fn word_in_time(&self, endpoint: Arc<Endpoint>) -> Option<Word> {
        match tokio::time::timeout(QUORUM_WAIT_MAX, self.word_of(&endpoint)).await {
            Ok(word) => word.ok(),
            Err(_) => {
                endpoint.gave_up();
                None
            }
        }
    }

    /// The highest block that more than half of the answering endpoints have reached.
    fn majority(&self, reported: &mut [Option<BlockRef>]) -> Result<Option<BlockRef>, ChainError> {
        for (index, one) in reported.iter().enumerate() {
            let clash = reported[index + 1..]
                .iter()
                .flatten()
                .find(|other| one.is_some_and(|one| one.height == other.height && one.hash != other.hash));
            if let (Some(one), Some(other)) = (one, clash) {
                return Err(self.inconsistent(
                    "its finalized block",
                    format!("{one} and {other} are both called final"),
                ));
            }
        }
        reported.sort_by_key(|block| std::cmp::Reverse(block.map(|block| block.height)));
        Ok(reported.get(reported.len() / 2).copied().flatten())
    }

    fn finalized_so_far(&self) -> Option<BlockRef> {
        *self.finalized.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn says_nothing_final(error: &RpcError) -> bool {
    match error {
        RpcError::Refused { code, message, class, .. } => {
            *code == -39001 || *class == Class::Lagging || message.to_ascii_lowercase().contains("not found")
        }
        _ => false,
    }
}
