//! system.sync_cursors and system.network_heads: positions and what the chain reports. A position moves only
//! from where its mover believes it to be; zero rows mean that somebody else moved it.

use std::collections::BTreeMap;

use tidemark_model::chain::{BlockRef, Head, Network};
use tidemark_model::ids::{BlockHash, Height, NetworkId};
use time::OffsetDateTime;
use tokio_postgres::Row;

use crate::db::{Conn, StoreError, Tx};

/// A part of a network's contracts (ADDR_SHARDS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Which one, from zero.
    pub number: i32,
    /// Of how many.
    pub of: i32,
}

impl Shard {
    /// All of a network.
    pub const ONLY: Self = Self { number: 0, of: 1 };
    /// Is there no other?
    pub fn is_only(self) -> bool {
        self.of == 1
    }
}

impl std::fmt::Display for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.of {
            1 => write!(f, "shard-{}", self.number),
            // With their number, so that another division is never taken for this one.
            of => write!(f, "shard-{}/{of}", self.number),
        }
    }
}

/// Where a shard of a network stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    /// `evm:1:shard-0`
    pub id: String,
    /// The network.
    pub network: NetworkId,
    /// The number of the shard.
    pub shard: i32,
    /// The first height we read.
    pub start: Height,
    /// The first height that is not processed; everything from `start` below it is.
    pub next: Height,
    /// Hash of the block below `next`, where it is known.
    pub last_hash: Option<BlockHash>,
}

impl Cursor {
    /// The newest processed height; `None` while nothing is processed.
    pub fn last(&self) -> Option<Height> {
        (self.next > self.start).then(|| self.next.minus(1))
    }
    /// The newest processed block, where its hash is known.
    pub fn last_block(&self) -> Option<BlockRef> {
        Some(BlockRef { height: self.last()?, hash: self.last_hash? })
    }
}

/// The id of a shard's cursor.
pub fn cursor_id(network: &Network, shard: Shard) -> String {
    format!("{}:{}:{shard}", network.family.as_str(), network.id)
}

// One at a time ("networks"): `on conflict (id)` does not catch the name, which is unique as well, when another
// registers the same network at the same moment.
const ENSURE_NETWORK: &str = "
    with alone as materialized (select pg_advisory_xact_lock(x'6e6574776f726b73'::bigint))
    insert into ref.networks (id, slug, family, start_block, confirmations)
    select $1::int, $2::text, $3::text, $4::bigint, $5::bigint from alone
    on conflict (id) do update set slug = excluded.slug, confirmations = excluded.confirmations
     where ref.networks.slug is distinct from excluded.slug
        or ref.networks.confirmations is distinct from excluded.confirmations";

/// Makes sure that the network has its row.
pub async fn ensure_network(conn: &Conn, network: &Network) -> Result<(), StoreError> {
    let confirmations = i64::try_from(network.confirmations).unwrap_or(i64::MAX);
    conn.execute(
        "register a network",
        ENSURE_NETWORK,
        &[
            &network.id.0,
            &network.slug,
            &network.family.as_str(),
            &network.start_block.as_i64(),
            &confirmations,
        ],
    )
    .await?;
    Ok(())
}

const KEEP_IDENTITY: &str = "
    update ref.networks set chain_identity = $2
     where id = $1 and (chain_identity is null or chain_identity like '%unknown%')";
const IDENTITY: &str = "select chain_identity from ref.networks where id = $1";

/// Keeps the identity of a network's chain as it was first seen; gives the one that counts. What was not known
/// then is filled in later.
pub async fn keep_identity(
    conn: &Conn,
    network: NetworkId,
    identity: &str,
) -> Result<Option<String>, StoreError> {
    conn.execute("keep a chain's identity", KEEP_IDENTITY, &[&network.0, &identity]).await?;
    Ok(conn.query_opt("read a chain's identity", IDENTITY, &[&network.0]).await?.and_then(|row| row.get(0)))
}

/// A row of ref.networks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownNetwork {
    /// Its id.
    pub id: NetworkId,
    /// Its short name.
    pub slug: String,
    /// Its family's label.
    pub family: String,
    /// The first height we read.
    pub start_block: Height,
    /// Blocks above an event before it counts as confirmed.
    pub confirmations: u64,
}

const NETWORKS: &str = "select id, slug, family, start_block, confirmations from ref.networks order by id";

/// Every network that was ever read into this database.
pub async fn networks(conn: &Conn) -> Result<Vec<KnownNetwork>, StoreError> {
    let rows = conn.query("read networks", NETWORKS, &[]).await?;
    Ok(rows
        .iter()
        .map(|row| KnownNetwork {
            id: NetworkId(row.get(0)),
            slug: row.get(1),
            family: row.get(2),
            start_block: Height::from_i64(row.get(3)),
            confirmations: u64::try_from(row.get::<_, i64>(4)).unwrap_or(0),
        })
        .collect())
}

const ENSURE_CURSOR: &str = "
    insert into system.sync_cursors (id, network_id, shard, cursor_type, start_height, last_processed_block)
    values ($1, $2, $4, 'height', $3, $3::bigint - 1)
    on conflict (id) do nothing";

/// Makes sure that a shard has its cursor and reads it. An existing cursor keeps its start.
pub async fn ensure(conn: &Conn, network: &Network, shard: Shard) -> Result<Cursor, StoreError> {
    let id = cursor_id(network, shard);
    let start = network.start_block.as_i64();
    conn.execute("create a cursor", ENSURE_CURSOR, &[&id, &network.id.0, &start, &shard.number]).await?;
    read(conn, &id).await
}

const READ_ALL: &str = "
    select id, network_id, start_height, last_processed_block, last_processed_hash, shard
      from system.sync_cursors where network_id = $1 order by shard, id";

/// The cursors of all shards of a network.
pub async fn of_network(conn: &Conn, network: NetworkId) -> Result<Vec<Cursor>, StoreError> {
    let rows = conn.query("read cursors", READ_ALL, &[&network.0]).await?;
    rows.iter().map(cursor_of).collect()
}

const LOCK_ALL: &str = "
    select id, network_id, start_height, last_processed_block, last_processed_hash, shard
      from system.sync_cursors where network_id = $1 order by id for update";

/// The cursors of all shards, kept from moving until the transaction ends.
pub async fn lock_all(tx: &Tx<'_>, network: NetworkId) -> Result<Vec<Cursor>, StoreError> {
    let rows = tx.query("lock cursors", LOCK_ALL, &[&network.0]).await?;
    rows.iter().map(cursor_of).collect()
}

const SLOWEST: &str = "
    select min(last_processed_block) + 1 from system.sync_cursors where network_id = $1";

/// The first height that some shard has not processed.
pub async fn slowest(tx: &Tx<'_>, network: NetworkId) -> Result<Height, StoreError> {
    let row = tx.query_one("read the slowest cursor", SLOWEST, &[&network.0]).await?;
    Ok(Height::from_i64(row.get::<_, Option<i64>>(0).unwrap_or(0)))
}

const READ: &str = "
    select id, network_id, start_height, last_processed_block, last_processed_hash, shard
      from system.sync_cursors where id = $1";

/// Reads a cursor that exists.
pub async fn read(conn: &Conn, id: &str) -> Result<Cursor, StoreError> {
    cursor_of(&conn.query_one("read a cursor", READ, &[&id]).await?)
}

const LOCK: &str = "
    select id, network_id, start_height, last_processed_block, last_processed_hash, shard
      from system.sync_cursors where id = $1 for update";

/// Reads a cursor and keeps others from moving it until the transaction ends.
pub async fn lock(tx: &Tx<'_>, id: &str) -> Result<Cursor, StoreError> {
    cursor_of(&tx.query_one("lock a cursor", LOCK, &[&id]).await?)
}

fn cursor_of(row: &tokio_postgres::Row) -> Result<Cursor, StoreError> {
    let id: String = row.get(0);
    let last: i64 = row.get(3);
    let hash: Option<&[u8]> = row.get(4);
    let last_hash = match hash {
        None => None,
        Some(bytes) => Some(BlockHash::from_slice(bytes).ok_or_else(|| StoreError::Corrupt {
            what: format!("system.sync_cursors {id}"),
            found: format!("a hash of {} bytes", bytes.len()),
            hint: "a foreign hand wrote it: set the hash to null",
        })?),
    };
    Ok(Cursor {
        network: NetworkId(row.get(1)),
        shard: row.get(5),
        start: Height::from_i64(row.get(2)),
        next: Height::from_i64(last + 1),
        last_hash,
        id,
    })
}

const MOVE: &str = "
    update system.sync_cursors
       set last_processed_block = $4, last_processed_hash = $5, updated_at = now()
     where id = $1 and last_processed_block = $2 and last_processed_hash is not distinct from $3";

/// Moves a cursor so that `to` is its next height; fenced by what the mover believes it to be.
pub async fn advance(
    tx: &Tx<'_>,
    from: &Cursor,
    to: Height,
    last_hash: Option<BlockHash>,
) -> Result<Cursor, StoreError> {
    let old = from.last_hash.as_ref().map(|hash| hash.0.as_slice());
    let new = last_hash.as_ref().map(|hash| hash.0.as_slice());
    let moved = tx
        .execute(
            "move a cursor",
            MOVE,
            &[&from.id, &(from.next.as_i64() - 1), &old, &(to.as_i64() - 1), &new],
        )
        .await?;
    if moved == 0 {
        return Err(StoreError::Fenced { what: format!("cursor {}", from.id) });
    }
    Ok(Cursor { next: to, last_hash, ..from.clone() })
}

/// A network's row of system.network_heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkHead {
    /// Newest height the nodes reported; `None` before the first report.
    pub latest: Option<Height>,
    /// Newest safe height.
    pub safe: Option<Height>,
    /// Newest finalized block we have confirmed against our own chain.
    pub finalized: Option<BlockRef>,
    /// Why the network stands still, if it does.
    pub halted: Option<String>,
}

const READ_HEAD: &str = "
    select latest_height, safe_height, finalized_height, finalized_hash, halted_reason, latest_hash
      from system.network_heads where network_id = $1";

/// What is stored of a network's head.
pub async fn head(conn: &Conn, network: NetworkId) -> Result<Option<NetworkHead>, StoreError> {
    let row = conn.query_opt("read a network's head", READ_HEAD, &[&network.0]).await?;
    Ok(row.as_ref().map(network_head))
}

fn network_head(row: &Row) -> NetworkHead {
    let finalized = row.get::<_, Option<i64>>(2).zip(row.get::<_, Option<&[u8]>>(3));
    NetworkHead {
        latest: (!row.get::<_, &[u8]>(5).is_empty()).then(|| Height::from_i64(row.get(0))),
        safe: row.get::<_, Option<i64>>(1).map(Height::from_i64),
        finalized: finalized.and_then(|(height, hash)| {
            Some(BlockRef { height: Height::from_i64(height), hash: BlockHash::from_slice(hash)? })
        }),
        halted: row.get(4),
    }
}

const READ_HEADS: &str = "
    select latest_height, safe_height, finalized_height, finalized_hash, halted_reason, latest_hash, network_id
      from system.network_heads where network_id = any($1)";

/// What is stored of many networks' heads, in one question.
pub async fn heads(
    conn: &Conn,
    networks: &[NetworkId],
) -> Result<BTreeMap<NetworkId, NetworkHead>, StoreError> {
    let ids: Vec<i32> = networks.iter().map(|network| network.0).collect();
    let rows = conn.query("read heads", READ_HEADS, &[&ids]).await?;
    Ok(rows.iter().map(|row| (NetworkId(row.get(6)), network_head(row))).collect())
}

/// When the cursors of a network moved last, and where they are; equal marks: nothing moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    moved_at: OffsetDateTime,
    heights: i64,
}

const READ_MARKS: &str = "
    select network_id, max(updated_at), sum(last_processed_block)::bigint
      from system.sync_cursors where network_id = any($1) group by network_id";

/// Marks of many networks, in one question.
pub async fn marks(conn: &Conn, networks: &[NetworkId]) -> Result<BTreeMap<NetworkId, Mark>, StoreError> {
    let ids: Vec<i32> = networks.iter().map(|network| network.0).collect();
    let rows = conn.query("read where cursors are", READ_MARKS, &[&ids]).await?;
    let mark = |row: &Row| Mark { moved_at: row.get(1), heights: row.get(2) };
    Ok(rows.iter().map(|row| (NetworkId(row.get(0)), mark(row))).collect())
}

const ENSURE_HEAD: &str = "
    insert into system.network_heads (network_id, latest_height, latest_hash) values ($1, 0, '')
    on conflict do nothing";

/// Makes sure that the network has its row of system.network_heads; the hash is empty until the first report.
pub async fn ensure_head(conn: &Conn, network: NetworkId) -> Result<(), StoreError> {
    conn.execute("create a network's head", ENSURE_HEAD, &[&network.0]).await?;
    Ok(())
}

const LOCK_HEAD: &str = "select finalized_height from system.network_heads where network_id = $1 for update";
const UPSERT_HEAD: &str = "
    insert into system.network_heads
           (network_id, latest_height, latest_hash, safe_height, finalized_height, finalized_hash)
    values ($1, $2, $3, $4, $5, $6)
    on conflict (network_id) do update
       set latest_height = excluded.latest_height, latest_hash = excluded.latest_hash,
           safe_height = excluded.safe_height,
           finalized_height = greatest(system.network_heads.finalized_height, excluded.finalized_height),
           finalized_hash = case
               when excluded.finalized_height > coalesce(system.network_heads.finalized_height, -1)
               then excluded.finalized_hash else system.network_heads.finalized_hash end,
           updated_at = now()";

/// Stores a reported head and says whether finality moved. `latest` may go back; `finalized` never does.
pub async fn report_head(tx: &Tx<'_>, network: NetworkId, head: &Head) -> Result<bool, StoreError> {
    let before = tx.query_opt("lock a network's head", LOCK_HEAD, &[&network.0]).await?;
    let before: Option<i64> = before.and_then(|row| row.get(0));
    let safe = head.safe.map(Height::as_i64);
    let finalized = head.finalized.map(|block| block.height.as_i64());
    let finalized_hash = head.finalized.as_ref().map(|block| block.hash.0.as_slice());
    tx.execute(
        "store a network's head",
        UPSERT_HEAD,
        &[
            &network.0,
            &head.latest.height.as_i64(),
            &head.latest.hash.0.as_slice(),
            &safe,
            &finalized,
            &finalized_hash,
        ],
    )
    .await?;
    Ok(finalized > before)
}

const HALT: &str = "
    insert into system.network_heads (network_id, latest_height, latest_hash, halted_reason, halted_at)
    values ($1, 0, '', $2, now())
    on conflict (network_id) do update
       set halted_reason = excluded.halted_reason,
           halted_at = coalesce(system.network_heads.halted_at, now()), updated_at = now()";

/// Stops a network, with the reason an operator will read. The other networks go on.
pub async fn halt(conn: &Conn, network: NetworkId, reason: &str) -> Result<(), StoreError> {
    conn.execute("halt a network", HALT, &[&network.0, &reason]).await?;
    Ok(())
}

const UNHALT: &str = "
    update system.network_heads set halted_reason = null, halted_at = null, updated_at = now()
     where network_id = $1 and halted_reason is not null";

/// Lets a network go on; says whether it was halted.
pub async fn unhalt(conn: &Conn, network: NetworkId) -> Result<bool, StoreError> {
    Ok(conn.execute("let a network go on", UNHALT, &[&network.0]).await? > 0)
}
