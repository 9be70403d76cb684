//! Set-based questions about what is stored: the tiling of evidence, links, counts, lookups. They compare
//! tables with each other and decide nothing.

use tidemark_model::chain::{BlockCoverage, BlockRef};
use tidemark_model::ids::{BlockHash, Height, HeightRange, NetworkId};

use crate::cursor::Shard;
use crate::db::{Conn, StoreError, Tx};

/// An accepted range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// Its heights.
    pub range: HeightRange,
    /// Records that were received.
    pub records: u64,
    /// Which blocks must be there.
    pub coverage: BlockCoverage,
    /// Which endpoint answered.
    pub provider: String,
}

const TILES: &str = "
    select from_height, to_height, records, coverage, provider from raw.range_evidence
     where network_id = $1 and shard = $2 and to_height > $3 and from_height < $4
     order by from_height limit $5";

/// Accepted ranges that touch `range`, in order, at most `limit`.
pub async fn tiles(
    conn: &Conn,
    network: NetworkId,
    shard: i32,
    range: HeightRange,
    limit: i64,
) -> Result<Vec<Tile>, StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let rows = conn.query("read evidence", TILES, &[&network.0, &shard, &from, &to, &limit]).await?;
    Ok(rows.iter().map(tile_of).collect())
}

fn tile_of(row: &tokio_postgres::Row) -> Tile {
    Tile {
        range: HeightRange::new(Height::from_i64(row.get(0)), Height::from_i64(row.get(1)))
            .expect("the table checks from_height < to_height"),
        records: u64::try_from(row.get::<_, i64>(2)).unwrap_or(0),
        coverage: match row.get(3) {
            "all" => BlockCoverage::All,
            _ => BlockCoverage::WithRecords,
        },
        provider: row.get(4),
    }
}

/// A tile against the rows inside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileCount {
    /// The tile.
    pub tile: Tile,
    /// Blocks stored.
    pub blocks: u64,
    /// What the blocks say they hold, or what the shard counted of them.
    pub promised: u64,
    /// Events stored.
    pub events: u64,
}

// In one statement: the ingester merges tiles meanwhile.
const TILE_COUNTS: &str = "
    select e.from_height, e.to_height, e.records, e.coverage, e.provider, b.blocks, b.promised, v.events
      from raw.range_evidence e
      cross join lateral (select count(*) as blocks, coalesce(sum(event_count), 0)::bigint as promised
                            from raw.blocks
                           where network_id = $1 and height >= e.from_height and height < e.to_height) b
      cross join lateral (select count(*) as events from raw.events
                           where network_id = $1 and block_height >= e.from_height
                             and block_height < e.to_height) v
     where e.network_id = $1 and e.shard = $2 and e.to_height > $3 and e.from_height < $4
     order by e.from_height limit $5";

// Events do not say which shard they came from: its counts do, and SHARD_SUMS compares those with the blocks.
const SHARD_TILE_COUNTS: &str = "
    select e.from_height, e.to_height, e.records, e.coverage, e.provider, b.blocks, s.promised, s.promised
      from raw.range_evidence e
      cross join lateral (select count(*) as blocks from raw.blocks
                           where network_id = $1 and height >= e.from_height and height < e.to_height) b
      cross join lateral (select coalesce(sum(event_count), 0)::bigint as promised from raw.shard_blocks
                           where network_id = $1 and shard = $2 and height >= e.from_height
                             and height < e.to_height) s
     where e.network_id = $1 and e.shard = $2 and e.to_height > $3 and e.from_height < $4
     order by e.from_height limit $5";

/// Accepted ranges that touch `range` with the counts of blocks and events inside each, in order, at most
/// `limit`; of one shard's events, where there are several.
pub async fn tile_counts(
    conn: &Conn,
    network: NetworkId,
    shard: Shard,
    range: HeightRange,
    limit: i64,
) -> Result<Vec<TileCount>, StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let sql = if shard.is_only() { TILE_COUNTS } else { SHARD_TILE_COUNTS };
    let rows =
        conn.query("count inside evidence", sql, &[&network.0, &shard.number, &from, &to, &limit]).await?;
    let count = |row: &tokio_postgres::Row, at| u64::try_from(row.get::<_, i64>(at)).unwrap_or(0);
    Ok(rows
        .iter()
        .map(|row| TileCount {
            tile: tile_of(row),
            blocks: count(row, 5),
            promised: count(row, 6),
            events: count(row, 7),
        })
        .collect())
}

const BROKEN_LINKS: &str = "
    select height, hash from (
        select height, hash, parent_hash, lag(height) over w as before, lag(hash) over w as before_hash
          from raw.blocks where network_id = $1 and height >= $2 and height < $3
        window w as (order by height)) links
     where before = height - 1 and before_hash <> parent_hash
     order by height limit $4";

/// Blocks whose stored parent is not the block stored below them.
pub async fn broken_links(
    conn: &Conn,
    network: NetworkId,
    range: HeightRange,
    limit: i64,
) -> Result<Vec<BlockRef>, StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let rows = conn.query("check links", BROKEN_LINKS, &[&network.0, &from, &to, &limit]).await?;
    Ok(rows
        .iter()
        .filter_map(|row| {
            let hash = BlockHash::from_slice(row.get::<_, &[u8]>(1))?;
            Some(BlockRef { height: Height::from_i64(row.get(0)), hash })
        })
        .collect())
}

/// A block against its events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCount {
    /// The height.
    pub height: Height,
    /// What the block says; `None` when there is no block.
    pub promised: Option<u64>,
    /// Events stored at the height.
    pub events: u64,
    /// Events whose block hash is not the block's.
    pub strangers: u64,
    /// Events whose index repeats within the block.
    pub repeated: u64,
}

const BLOCK_COUNTS: &str = "
    select height, b.event_count, coalesce(e.events, 0), coalesce(e.strangers, 0), coalesce(e.repeated, 0)
      from (select height, hash, event_count from raw.blocks
             where network_id = $1 and height >= $2 and height < $3) b
      full join (select e.block_height as height, count(*) as events,
                        count(*) filter (where e.block_hash is distinct from o.hash) as strangers,
                        count(*) - count(distinct e.event_index) as repeated
                   from raw.events e
                   left join raw.blocks o on o.network_id = e.network_id and o.height = e.block_height
                  where e.network_id = $1 and e.block_height >= $2 and e.block_height < $3
                  group by e.block_height) e using (height)
     where b.event_count is distinct from coalesce(e.events, 0) or e.strangers > 0 or e.repeated > 0
     order by height limit $4";

/// Heights where events and block do not agree.
pub async fn wrong_blocks(
    conn: &Conn,
    network: NetworkId,
    range: HeightRange,
    limit: i64,
) -> Result<Vec<BlockCount>, StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let rows =
        conn.query("compare events with blocks", BLOCK_COUNTS, &[&network.0, &from, &to, &limit]).await?;
    let count = |row: &tokio_postgres::Row, at| u64::try_from(row.get::<_, i64>(at)).unwrap_or(0);
    Ok(rows
        .iter()
        .map(|row| BlockCount {
            height: Height::from_i64(row.get(0)),
            promised: row.get::<_, Option<i32>>(1).map(|count| u64::try_from(count).unwrap_or(0)),
            events: count(row, 2),
            strangers: count(row, 3),
            repeated: count(row, 4),
        })
        .collect())
}

const SHARD_SUMS: &str = "
    select height, b.event_count, coalesce(s.events, 0)
      from (select height, event_count from raw.blocks
             where network_id = $1 and height >= $2 and height < $3) b
      full join (select height, sum(event_count) as events from raw.shard_blocks
                  where network_id = $1 and height >= $2 and height < $3 group by height) s using (height)
     where coalesce(b.event_count, 0) <> coalesce(s.events, 0)
     order by height limit $4";

/// Heights where the counts of the shards do not give the block's: promised is the block's word, events
/// theirs.
pub async fn wrong_sums(
    conn: &Conn,
    network: NetworkId,
    range: HeightRange,
    limit: i64,
) -> Result<Vec<BlockCount>, StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let rows =
        conn.query("compare shards with blocks", SHARD_SUMS, &[&network.0, &from, &to, &limit]).await?;
    let count = |value: i64| u64::try_from(value).unwrap_or(0);
    Ok(rows
        .iter()
        .map(|row| BlockCount {
            height: Height::from_i64(row.get(0)),
            promised: row.get::<_, Option<i32>>(1).map(|promised| count(i64::from(promised))),
            events: count(row.get(2)),
            strangers: 0,
            repeated: 0,
        })
        .collect())
}

/// What a repair of lookups changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Transaction lookups that pointed at nothing, or were there twice.
    pub tx_removed: u64,
    /// Transactions that had no lookup.
    pub tx_added: u64,
    /// Block lookups that pointed at nothing, or were there twice.
    pub block_removed: u64,
    /// Blocks that had no lookup.
    pub block_added: u64,
}

const LOCK_LOOKUPS: &str = "lock table raw.tx_lookup, raw.block_lookup in share row exclusive mode";
const TX_REMOVE: &str = "
    delete from raw.tx_lookup l
     where l.network_id = $1 and l.block_height >= $2 and l.block_height < $3
       and (not exists (select from raw.events e where e.network_id = $1 and e.block_height = l.block_height
                           and e.tx_id = l.id)
            and not exists (select from raw.transactions t where t.network_id = $1
                               and t.block_height = l.block_height and t.id = l.id)
         or exists (select from raw.tx_lookup o where o.network_id = $1 and o.block_height = l.block_height
                       and o.id = l.id and (o.tableoid, o.ctid) < (l.tableoid, l.ctid)))";
const TX_ADD: &str = "
    insert into raw.tx_lookup (network_id, block_height, id, tx_index, block_time)
    select $1, t.height, t.id, t.tx_index, b.block_time
      from (select block_height as height, tx_id as id, min(tx_index) as tx_index from raw.events
             where network_id = $1 and block_height >= $2 and block_height < $3 group by 1, 2
             union
            select block_height, id, tx_index from raw.transactions
             where network_id = $1 and block_height >= $2 and block_height < $3) t
      join raw.blocks b on b.network_id = $1 and b.height = t.height
     where not exists (select from raw.tx_lookup l where l.network_id = $1 and l.block_height = t.height
                          and l.id = t.id)";
const BLOCK_REMOVE: &str = "
    delete from raw.block_lookup l
     where l.network_id = $1 and l.height >= $2 and l.height < $3
       and (not exists (select from raw.blocks b where b.network_id = $1 and b.height = l.height
                           and b.hash = l.id)
         or exists (select from raw.block_lookup o where o.network_id = $1 and o.height = l.height
                       and o.id = l.id and (o.tableoid, o.ctid) < (l.tableoid, l.ctid)))";
const BLOCK_ADD: &str = "
    insert into raw.block_lookup (network_id, height, id, block_time)
    select $1, b.height, b.hash, b.block_time from raw.blocks b
     where b.network_id = $1 and b.height >= $2 and b.height < $3
       and not exists (select from raw.block_lookup l where l.network_id = $1 and l.height = b.height
                          and l.id = b.hash)";

/// Makes the lookups of `range` say what raw.* says (S1 §6.7). Writers of lookups wait meanwhile.
pub async fn repair_lookups(
    tx: &Tx<'_>,
    network: NetworkId,
    range: HeightRange,
) -> Result<Repaired, StoreError> {
    let (from, to) = (range.from().as_i64(), range.to().as_i64());
    let params: [crate::db::Param<'_>; 3] = [&network.0, &from, &to];
    tx.batch("lock lookups", LOCK_LOOKUPS).await?;
    Ok(Repaired {
        tx_removed: tx.execute("remove transaction lookups", TX_REMOVE, &params).await?,
        tx_added: tx.execute("add transaction lookups", TX_ADD, &params).await?,
        block_removed: tx.execute("remove block lookups", BLOCK_REMOVE, &params).await?,
        block_added: tx.execute("add block lookups", BLOCK_ADD, &params).await?,
    })
}
