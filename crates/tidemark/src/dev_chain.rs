//! The simulated chain of `tidemark dev`. It lives as long as the data directory does: everything that
//! happened to it is written to a journal first, so that the next start finds the same chain, and it goes on
//! "while you were away".

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use rand::Rng;
use tidemark_sim::{FaultProfile, ReorgKind, Sim, SimConfig, SimServer};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

/// The id of the simulated network.
pub const CHAIN_ID: u64 = 31_337;
/// Its name.
pub const SLUG: &str = "simnet";
/// Blocks that exist at the first start: enough history to look at.
const FIRST_BLOCKS: u64 = 400;
/// Seconds between two blocks.
const BLOCK_SECONDS: u64 = 2;
/// Blocks between head and finality.
pub const FINALITY_LAG: u64 = 24;
/// Blocks made up for at a restart; a longer absence is only shortened.
const CATCH_UP_MAX: u64 = 3_000;
/// A reorg happens about once in so many blocks.
const REORG_EVERY: u32 = 30;
/// Deepest reorg.
const REORG_DEPTH_MAX: u64 = 3;

const KINDS: [(ReorgKind, &str); 4] = [
    (ReorgKind::ReincludeSame, "same"),
    (ReorgKind::ReincludeShifted, "shifted"),
    (ReorgKind::Replace, "replace"),
    (ReorgKind::Drop, "drop"),
];

/// A running simulated chain.
pub struct DevChain {
    sim: Sim,
    /// The node.
    pub server: SimServer,
    journal: Journal,
}

impl DevChain {
    /// Opens the chain of `data_dir`, or begins one with `seed`.
    pub async fn open(data_dir: &Path, seed: Option<u64>) -> anyhow::Result<Self> {
        std::fs::create_dir_all(data_dir)
            .with_context(|| format!("{} cannot be made", data_dir.display()))?;
        let path = data_dir.join("simnet.journal");
        let (journal, actions) = Journal::open(path, seed)?;
        let config = SimConfig {
            chain_id: CHAIN_ID,
            seed: journal.seed,
            genesis_time: journal.genesis,
            block_time_secs: BLOCK_SECONDS,
            finality_lag: FINALITY_LAG,
            safe_lag: FINALITY_LAG / 2,
            admin: true,
            ..SimConfig::default()
        };
        let sim = tokio::task::spawn_blocking(move || {
            let sim = Sim::new(config);
            for action in actions {
                action.perform(&sim);
            }
            sim
        })
        .await?;
        let server = sim.serve("127.0.0.1:0".parse()?, FaultProfile::default()).await?;
        let mut chain = Self { sim, server, journal };
        chain.catch_up()?;
        Ok(chain)
    }

    /// The chain went on while nobody looked.
    fn catch_up(&mut self) -> anyhow::Result<()> {
        let elapsed = OffsetDateTime::now_utc().unix_timestamp() - self.journal.genesis;
        let due = u64::try_from(elapsed).unwrap_or(0) / BLOCK_SECONDS;
        let missing = due.saturating_sub(self.sim.head()).min(CATCH_UP_MAX);
        if missing > 0 {
            self.act(Action::Mine(missing))?;
        }
        Ok(())
    }

    fn act(&mut self, action: Action) -> anyhow::Result<()> {
        self.journal.append(action)?; // First: what was served must be there again after a crash.
        action.perform(&self.sim);
        Ok(())
    }

    /// Mines in real time, with a reorg now and then, until `stop`.
    pub async fn run(mut self, stop: CancellationToken) -> anyhow::Result<()> {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = tokio::time::sleep(Duration::from_secs(BLOCK_SECONDS)) => {}
            }
            let action = {
                let mut random = rand::rng();
                if random.random_ratio(1, REORG_EVERY) {
                    let (kind, _) = KINDS[random.random_range(0..KINDS.len())];
                    Action::Reorg(random.random_range(1..=REORG_DEPTH_MAX), kind)
                } else {
                    Action::Mine(1)
                }
            };
            self.act(action)?;
        }
        self.server.stop().await;
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Mine(u64),
    Reorg(u64, ReorgKind),
}

impl Action {
    fn perform(self, sim: &Sim) {
        match self {
            Self::Mine(blocks) => sim.mine(blocks),
            Self::Reorg(depth, kind) => sim.reorg(depth, kind),
        }
    }
    fn line(self) -> String {
        match self {
            Self::Mine(blocks) => format!("mine {blocks}"),
            Self::Reorg(depth, kind) => {
                let name = KINDS.iter().find(|(one, _)| *one == kind).map_or("same", |(_, name)| *name);
                format!("reorg {depth} {name}")
            }
        }
    }
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        match (words.next()?, words.next()?.parse().ok()?, words.next()) {
            ("mine", blocks, None) => Some(Self::Mine(blocks)),
            ("reorg", depth, Some(name)) => {
                Some(Self::Reorg(depth, KINDS.iter().find(|(_, one)| *one == name)?.0))
            }
            _ => None,
        }
    }
}

struct Journal {
    file: std::fs::File,
    seed: u64,
    genesis: i64,
}

impl Journal {
    fn open(path: PathBuf, seed: Option<u64>) -> anyhow::Result<(Self, Vec<Action>)> {
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| format!("{} cannot be read", path.display())),
        };
        let file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| format!("{} cannot be written", path.display()))?;
        let mut lines = text.lines();
        let Some(head) = lines.next() else {
            let seed = seed.unwrap_or(1);
            let span = i64::try_from(FIRST_BLOCKS * BLOCK_SECONDS).expect("small");
            let genesis = OffsetDateTime::now_utc().unix_timestamp() - span;
            let mut journal = Self { file, seed, genesis };
            journal.write(&format!("simnet seed {seed} genesis {genesis}"))?;
            let first = Action::Mine(FIRST_BLOCKS);
            journal.append(first)?;
            return Ok((journal, vec![first]));
        };
        let words: Vec<&str> = head.split(' ').collect();
        let ["simnet", "seed", stored, "genesis", genesis] = words[..] else {
            bail!("{} is not a journal of the simulated chain: use another --data-dir", path.display());
        };
        let (stored, genesis) = (stored.parse()?, genesis.parse()?);
        if seed.is_some_and(|seed| seed != stored) {
            bail!(
                "{} holds a chain of seed {stored}: use --seed {stored} or another --data-dir",
                path.display()
            );
        }
        // A last line without its end was never performed for anybody: a crash cut it off.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let actions = whole
            .lines()
            .skip(1)
            .map(|line| {
                Action::parse(line).with_context(|| format!("{}: {line:?} is not an action", path.display()))
            })
            .collect::<Result<Vec<_>, _>>()?;
        if whole.len() + 1 < text.len() {
            file.set_len(u64::try_from(whole.len() + 1)?)?;
        }
        Ok((Self { file, seed: stored, genesis }, actions))
    }
    fn append(&mut self, action: Action) -> anyhow::Result<()> {
        self.write(&action.line())
    }
    fn write(&mut self, line: &str) -> anyhow::Result<()> {
        self.file
            .write_all(format!("{line}\n").as_bytes())
            .context("the journal of the simulated chain cannot be written")
    }
}
