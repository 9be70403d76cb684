//! Proves from what is stored that a range is complete, or names what is missing: evidence tiles the range,
//! every block that must be there is there and linked, and each block, its events and its evidence agree.

use std::fmt;

use tidemark_model::chain::{BlockCoverage, BlockRef};
use tidemark_model::ids::{Height, HeightRange, NetworkId};
use tidemark_store::cursor::{self, Cursor, Shard};
use tidemark_store::raw::audit::{self, BlockCount, Repaired, Tile, TileCount};
use tidemark_store::{Conn, StoreError};

/// Problems named of each kind and window; more say nothing new.
const NAMED_MAX: i64 = 100;
/// Heights looked at in one statement.
const WINDOW_BLOCKS: u64 = 100_000;
/// Tiles read at once.
const TILES_PAGE: i64 = 5000;

/// Something that contradicts completeness.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// No evidence covers these heights.
    Gap(HeightRange),
    /// Two pieces of evidence cover these heights.
    Overlap(HeightRange),
    /// The evidence says that every block is there, but some are not.
    MissingBlocks {
        /// The tile.
        range: HeightRange,
        /// Blocks that are there.
        found: u64,
    },
    /// The evidence counts other records than are stored.
    RecordCount {
        /// The tile.
        range: HeightRange,
        /// What the evidence says.
        expected: u64,
        /// What is stored.
        found: u64,
    },
    /// A block's parent is not the block stored below it.
    BrokenLink(BlockRef),
    /// A block and its events do not agree.
    Events(BlockCount),
    /// A block and what its shards counted do not agree.
    Shards(BlockCount),
    /// One of the others, in the tiling of one shard.
    InShard(i32, Box<Problem>),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gap(range) => write!(f, "heights {range} were never accepted"),
            Self::Overlap(range) => write!(f, "heights {range} were accepted twice"),
            Self::MissingBlocks { range, found } => {
                write!(f, "{found} of {} blocks of {range} are stored", range.blocks())
            }
            Self::RecordCount { range, expected, found } => {
                write!(f, "{found} events of {range} are stored, {expected} were received")
            }
            Self::BrokenLink(block) => write!(f, "block {block} is not the child of the block below it"),
            Self::InShard(shard, problem) => write!(f, "shard {shard}: {problem}"),
            Self::Shards(count) => write!(
                f,
                "the shards counted {} events of block {}, which has {}",
                count.events,
                count.height,
                count.promised.unwrap_or(0)
            ),
            Self::Events(count) => match count.promised {
                None => write!(f, "{} events at height {} have no block", count.events, count.height),
                Some(promised) => write!(
                    f,
                    "block {} has {} of {promised} events, {} of another block, {} twice",
                    count.height, count.events, count.strangers, count.repeated
                ),
            },
        }
    }
}

/// What the proof found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The network.
    pub network: NetworkId,
    /// What was looked at.
    pub range: HeightRange,
    /// Accepted ranges in it.
    pub tiles: u64,
    /// Blocks stored in it.
    pub blocks: u64,
    /// Events stored in it.
    pub events: u64,
    /// Everything that is wrong; empty when the range is complete.
    pub problems: Vec<Problem>,
}

impl Report {
    /// Is the range proven to be complete?
    pub fn is_complete(&self) -> bool {
        self.problems.is_empty()
    }
    /// Heights that no evidence covers.
    pub fn gaps(&self) -> Vec<HeightRange> {
        let gap = |problem: &Problem| match problem {
            Problem::Gap(range) => Some(*range),
            _ => None,
        };
        self.problems
            .iter()
            .filter_map(|problem| match problem {
                Problem::InShard(_, inner) => gap(inner),
                problem => gap(problem),
            })
            .collect()
    }
}

/// Looks at `range` of a network, in all its shards. Safe to run beside the ingester below its slowest cursor;
/// above finality a reorg between two statements may show as a problem, so ask again.
pub async fn verify_completeness(
    conn: &Conn,
    network: NetworkId,
    range: HeightRange,
) -> Result<Report, StoreError> {
    let mut report = Report { network, range, tiles: 0, blocks: 0, events: 0, problems: Vec::new() };
    let cursors = cursor::of_network(conn, network).await?;
    let of = i32::try_from(cursors.len()).expect("few shards");
    if of <= 1 {
        let number = cursors.first().map_or(0, |cursor| cursor.shard);
        verify_shard(conn, Shard { number, of: 1 }, &mut report).await?;
    }
    for Cursor { shard: number, .. } in cursors.iter().filter(|_| of > 1) {
        let before = std::mem::take(&mut report.problems);
        report.blocks = 0; // Shards share their blocks.
        verify_shard(conn, Shard { number: *number, of }, &mut report).await?;
        let found = std::mem::replace(&mut report.problems, before);
        let named = found.into_iter().map(|problem| Problem::InShard(*number, Box::new(problem)));
        report.problems.extend(named);
    }
    check_rows(conn, of > 1, &mut report).await?;
    Ok(report)
}

/// The tiles of one shard.
async fn verify_shard(conn: &Conn, shard: Shard, report: &mut Report) -> Result<(), StoreError> {
    let range = report.range;
    let mut at = range.from();
    let mut rest = Some(range);
    while let Some(page) = rest {
        let tiles = audit::tile_counts(conn, report.network, shard, page, TILES_PAGE).await?;
        let full = i64::try_from(tiles.len()).expect("bounded") == TILES_PAGE;
        let next = |last: &TileCount| HeightRange::new(last.tile.range.to(), range.to());
        rest = tiles.last().filter(|_| full).and_then(next);
        for tile in &tiles {
            at = tile_problems(at, range, &tile.tile, &mut report.problems);
            count_problems(tile, report);
        }
        report.tiles += u64::try_from(tiles.len()).expect("a length fits in 64 bits");
    }
    report.problems.extend(HeightRange::new(at, range.to()).map(Problem::Gap));
    Ok(())
}

/// Compares a tile with where the one before it ended; gives where this one ends.
fn tile_problems(at: Height, range: HeightRange, tile: &Tile, problems: &mut Vec<Problem>) -> Height {
    let from = tile.range.from().max(range.from());
    problems.extend(HeightRange::new(at, from).map(Problem::Gap));
    problems.extend(HeightRange::new(from, at.min(tile.range.to())).map(Problem::Overlap));
    at.max(tile.range.to())
}

fn count_problems(count: &TileCount, report: &mut Report) {
    let tile = &count.tile;
    report.blocks += count.blocks;
    report.events += count.events;
    if tile.coverage == BlockCoverage::All && count.blocks != tile.range.blocks() {
        report.problems.push(Problem::MissingBlocks { range: tile.range, found: count.blocks });
    }
    if count.events != tile.records || count.promised != tile.records {
        report.problems.push(Problem::RecordCount {
            range: tile.range,
            expected: tile.records,
            found: count.events,
        });
    }
}

async fn check_rows(conn: &Conn, is_sharded: bool, report: &mut Report) -> Result<(), StoreError> {
    let network = report.network;
    let mut rest = Some(report.range);
    while let Some(open) = rest {
        let (window, later) = open.split_first(WINDOW_BLOCKS);
        // One height more below, so that the link into the window is checked too.
        let linked = HeightRange::new(window.from().minus(1), window.to()).unwrap_or(window);
        let broken = audit::broken_links(conn, network, linked, NAMED_MAX).await?;
        report.problems.extend(broken.into_iter().map(Problem::BrokenLink));
        let wrong = audit::wrong_blocks(conn, network, window, NAMED_MAX).await?;
        report.problems.extend(wrong.into_iter().map(Problem::Events));
        if is_sharded {
            let wrong = audit::wrong_sums(conn, network, window, NAMED_MAX).await?;
            report.problems.extend(wrong.into_iter().map(Problem::Shards));
        }
        rest = later;
    }
    Ok(())
}

/// Makes tx_lookup and block_lookup of `range` say what raw.* says (S1 §6.7), window by window.
pub async fn repair_lookups(
    conn: &mut Conn,
    network: NetworkId,
    range: HeightRange,
) -> Result<Repaired, StoreError> {
    let mut sum = Repaired::default();
    let mut rest = Some(range);
    while let Some(open) = rest {
        let (window, later) = open.split_first(WINDOW_BLOCKS);
        let tx = conn.tx().await?;
        let part = audit::repair_lookups(&tx, network, window).await?;
        tx.commit().await?;
        sum.tx_removed += part.tx_removed;
        sum.tx_added += part.tx_added;
        sum.block_removed += part.block_removed;
        sum.block_added += part.block_added;
        rest = later;
    }
    Ok(sum)
}
