//! Real time for a simulated chain: a block per interval and a reorg now and then, for `tidemark dev`.

use std::time::Duration;

use serde::Deserialize;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::chain::{ReorgKind, Sim};
use crate::rng::Rng;

/// When the chain changes its mind.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ReorgSchedule {
    /// Mean number of blocks between two reorgs.
    pub every_blocks: u64,
    /// Deepest reorg; shallow ones are more frequent. It never reaches the finalized height.
    pub depth_max: u64,
    /// Kinds to choose from.
    pub kinds: Vec<ReorgKind>,
}

impl Default for ReorgSchedule {
    fn default() -> Self {
        Self { every_blocks: 40, depth_max: 4, kinds: ReorgKind::ALL.to_vec() }
    }
}

impl Sim {
    /// Mines a block every `interval`, with reorgs as scheduled, until `token` is cancelled. The caller owns
    /// the future and spawns it where its tasks live.
    pub async fn run_clock(
        self,
        interval: Duration,
        reorgs: Option<ReorgSchedule>,
        token: CancellationToken,
    ) {
        let mut rng = Rng::keyed(&[self.config().seed, 0xc10c]);
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await; // The first tick is immediate; the first block is not.
        loop {
            tokio::select! {
                biased;
                () = token.cancelled() => return,
                _ = ticks.tick() => self.step(&mut rng, reorgs.as_ref()),
            }
        }
    }

    fn step(&self, rng: &mut Rng, reorgs: Option<&ReorgSchedule>) {
        if let Some(schedule) = reorgs
            && !schedule.kinds.is_empty()
            && rng.below(schedule.every_blocks.max(1)) == 0
        {
            let room = self.head().saturating_sub(self.finalized());
            let depth = (1 + rng.below(schedule.depth_max).min(rng.below(schedule.depth_max))).min(room);
            let kind = schedule.kinds[rng.index(schedule.kinds.len())];
            let finalized = self.finalized();
            let kind = match kind {
                // The branch left last may have become history meanwhile.
                ReorgKind::Back if self.left_from().is_none_or(|from| from <= finalized) => {
                    ReorgKind::ReincludeSame
                }
                other => other,
            };
            if depth > 0 {
                tracing::debug!(depth, ?kind, action = "sim_reorg", "The simulated chain reorganises.");
                self.reorg(depth, kind);
                return;
            }
        }
        self.mine(1);
    }
}
