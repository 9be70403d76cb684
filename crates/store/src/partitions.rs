//! The partition manager of height-partitioned tables: LIST by network, then RANGE by height (S1 §3).
//!
//! A partition is made as a table of its own and then attached, because `create table … partition of` would
//! lock readers and writers of the whole parent out. Makers take one advisory lock, so two that need the same
//! partition at once make it once. What was made is registered in raw.partitions. Secondary indexes are not
//! made with the table: a partition gets them when its backfill is done, or when the tip enters it (S1 §5.5).

use std::collections::HashMap;
use std::sync::Mutex;

use tidemark_model::ids::{Height, HeightRange, NetworkId};

use crate::db::{Conn, Param, StoreError, Tx};
use crate::{bulk, projection};

/// Partitions made ahead of the one that is needed, once that one is half full: a thousand quiet networks that have
/// read a few blocks each need no room for ten million more.
const LOOKAHEAD: u64 = 2;

/// Rows of a partition from which on what comes next gets one of its own: the indexes of a few million rows stay in
/// memory, and what is added touches those alone.
pub const FULL_BYTES: i64 = 512 << 20;
/// Or this part of all there is, so that a read of all of them looks into a few dozen at most.
const FULL_PART: i64 = 8;
/// A partition of at most so many bytes of rows has its indexes back within a second: a long backlog takes them away. Where
/// the newest is larger, and has indexes, the backlog gets one of its own.
const SMALL_BYTES: i64 = 64 << 20;
/// Or this part of all there is: backlogs are rare.
const SMALL_PART: i64 = 64;

/// A height-partitioned table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Table {
    /// raw.blocks
    Blocks,
    /// raw.transactions
    Transactions,
    /// raw.events
    Events,
    /// raw.tx_lookup
    TxLookup,
    /// raw.block_lookup
    BlockLookup,
    /// projection.transfers
    Transfers,
}

/// The tables the ingester writes.
pub const RAW_TABLES: [Table; 5] =
    [Table::Blocks, Table::Transactions, Table::Events, Table::TxLookup, Table::BlockLookup];

impl Table {
    /// Its qualified name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Blocks => "raw.blocks",
            Self::Transactions => "raw.transactions",
            Self::Events => "raw.events",
            Self::TxLookup => "raw.tx_lookup",
            Self::BlockLookup => "raw.block_lookup",
            Self::Transfers => "projection.transfers",
        }
    }
    fn parse(name: &str) -> Option<Self> {
        RAW_TABLES.into_iter().chain([Self::Transfers]).find(|table| table.name() == name)
    }
    fn height_column(self) -> &'static str {
        match self {
            Self::Blocks | Self::BlockLookup | Self::Transfers => "height",
            Self::Transactions | Self::Events | Self::TxLookup => "block_height",
        }
    }
    /// Suffix and columns of the secondary indexes (S1 §5.6, and what the API pages through).
    fn secondary_indexes(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Blocks => &[],
            Self::Transactions => &[("by_position", "(block_height, tx_index)")],
            Self::Events => &[("by_tx", "(block_height, tx_id)")],
            // Hashes: with room for what comes next (ADR 0030).
            Self::TxLookup => &[
                ("by_id", "(id) with (fillfactor = 75)"),
                ("by_evm_hash", "(evm_hash) where evm_hash is not null"),
            ],
            Self::BlockLookup => &[("by_id", "(id)")],
            Self::Transfers => &[
                ("by_asset", "(asset_id, height desc, event_index desc, sub_index desc)"),
                ("by_collection", "(collection_id, height desc, event_index desc, sub_index desc)"),
                ("by_sender", "(from_account, height desc, event_index desc, sub_index desc)"),
                ("by_receiver", "(to_account, height desc, event_index desc, sub_index desc)"),
            ],
        }
    }
}

/// Heights per partition. A change takes effect at the next partition that is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionSizes {
    /// raw.blocks
    pub blocks: u64,
    /// raw.transactions
    pub transactions: u64,
    /// raw.events
    pub events: u64,
    /// raw.tx_lookup and raw.block_lookup
    pub lookups: u64,
    /// projection.transfers
    pub transfers: u64,
}

impl Default for PartitionSizes {
    /// S1 §3.2.
    fn default() -> Self {
        Self {
            blocks: 5_000_000,
            transactions: 5_000_000,
            events: 10_000_000,
            lookups: 5_000_000,
            transfers: 10_000_000,
        }
    }
}

impl PartitionSizes {
    fn of(&self, table: Table) -> u64 {
        let size = match table {
            Table::Blocks => self.blocks,
            Table::Transactions => self.transactions,
            Table::Events => self.events,
            Table::TxLookup | Table::BlockLookup => self.lookups,
            Table::Transfers => self.transfers,
        };
        size.max(1)
    }
}

/// A registered partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The table it is a part of.
    pub table: Table,
    /// The network.
    pub network: NetworkId,
    /// Its qualified name.
    pub name: String,
    /// Its heights.
    pub range: HeightRange,
}

/// What comes into a new partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Block by block, and readers at once: it has its indexes from the start.
    Live,
    /// Much at once: it gets its indexes when that is done ([`Partitions::ensure_indexed`]), and one that is small and
    /// has them does without meanwhile.
    Backlog,
}

impl Next {
    /// Bytes of rows from which on it does not go into a partition that has its indexes.
    fn indexed_bytes(self) -> i64 {
        match self {
            Self::Live => i64::MAX,
            Self::Backlog => SMALL_BYTES,
        }
    }
}

/// Makes partitions on demand and remembers what is there, so that the hot path asks nothing.
#[derive(Debug, Default)]
pub struct Partitions {
    sizes: PartitionSizes,
    per_network: HashMap<NetworkId, PartitionSizes>,
    known: Mutex<HashMap<(Table, NetworkId), Known>>,
}

/// What this process has seen: heights that exist, and heights that are indexed.
#[derive(Debug, Default, Clone, Copy)]
struct Known {
    made: Option<HeightRange>,
    indexed: Option<HeightRange>,
}

const LOCK: &str = "select pg_advisory_xact_lock($1)";
/// "partitio"
const LOCK_KEY: i64 = 0x7061_7274_6974_696f;
const LIST: &str = "
    select name, from_height, to_height from raw.partitions
     where parent = $1 and network_id = $2 and to_height > $3 and from_height <= $4
     order by from_height";
const REGISTER: &str = "
    insert into raw.partitions (parent, network_id, name, from_height, to_height) values ($1, $2, $3, $4, $5)
    on conflict do nothing";
const DUE: &str = "
    select parent, name, from_height, to_height from raw.partitions
     where network_id = $1 and to_height <= $2 and indexed_at is null and parent = any($3)
     order by from_height, parent";
const UNINDEXED_AT: &str = "
    select parent, name, from_height, to_height, indexed_at is null from raw.partitions
     where network_id = $1 and from_height <= $2 and to_height > $2 and parent = any($3)
     order by parent";
// The newest partition that is large and has room above its rows is the one that is written to.
const FULL: &str = "
    select p.parent, p.name, p.from_height, p.to_height
      from raw.partitions p
     where p.parent = $1 and p.network_id = $2
       and (select pg_relation_size(p.name::regclass) >= greatest($3::bigint, a.bytes / $4::bigint)
                or p.indexed_at is not null
                   and pg_relation_size(p.name::regclass) > greatest($5::bigint, a.bytes / $6::bigint)
              from (select sum(pg_relation_size(o.name::regclass))::bigint as bytes from raw.partitions o
                     where o.parent = $1 and o.network_id = $2) a)
       and not exists (select from raw.partitions o
                        where o.parent = $1 and o.network_id = $2 and o.from_height > p.from_height
                          and pg_relation_size(o.name::regclass) > 0)
     order by p.from_height desc limit 1";
const PREPARE_TO_END: &str = "set local statement_timeout = 0; set local lock_timeout = '3s'";
const IS_REBUILT: &str = "
    select to_regclass('projection.transfers__shadow') is not null
        or to_regclass('projection.transfers__old') is not null";
const ENDS: &str = "
    update raw.partitions set to_height = $4 where parent = $1 and network_id = $2 and from_height = $3";
const MARK_INDEXED: &str = "
    update raw.partitions set indexed_at = now() where parent = $1 and network_id = $2 and from_height = $3";
const MARK_UNINDEXED: &str = "
    update raw.partitions set indexed_at = null where parent = $1 and network_id = $2 and from_height = $3";
const SMALL: &str = "
    select p.parent, p.name, p.from_height, p.to_height
      from raw.partitions p
     where p.parent = $1 and p.network_id = $2 and p.indexed_at is not null
       and p.from_height <= $3 and p.to_height > $3
       and pg_relation_size(p.name::regclass) <= greatest($4::bigint, (
           select sum(pg_relation_size(o.name::regclass))::bigint from raw.partitions o
            where o.parent = $1 and o.network_id = $2) / $5::bigint)";

impl Partitions {
    /// With sizes for all networks and other sizes for some.
    pub fn new(sizes: PartitionSizes, per_network: HashMap<NetworkId, PartitionSizes>) -> Self {
        Self { sizes, per_network, known: Mutex::default() }
    }

    fn sizes_of(&self, network: NetworkId) -> PartitionSizes {
        self.per_network.get(&network).copied().unwrap_or(self.sizes)
    }

    /// Makes sure that the ingester's tables take rows of `range`, with [`LOOKAHEAD`] partitions more from the middle
    /// of one on.
    pub async fn ensure_raw(
        &self,
        conn: &mut Conn,
        network: NetworkId,
        range: HeightRange,
    ) -> Result<(), StoreError> {
        self.ensure(conn, &RAW_TABLES, network, range).await
    }

    /// Makes sure that projection.transfers takes rows of `range`.
    pub async fn ensure_transfers(
        &self,
        conn: &mut Conn,
        network: NetworkId,
        range: HeightRange,
    ) -> Result<(), StoreError> {
        self.ensure(conn, &[Table::Transfers], network, range).await
    }

    /// Makes sure that `tables` take rows of `range`. In a transaction of its own: no writer waits for it.
    pub async fn ensure(
        &self,
        conn: &mut Conn,
        tables: &[Table],
        network: NetworkId,
        range: HeightRange,
    ) -> Result<(), StoreError> {
        let missing: Vec<(Table, HeightRange, u64)> = tables
            .iter()
            .filter_map(|table| {
                let size = self.sizes_of(network).of(*table);
                let needed = with_lookahead(range, size);
                let made = self.known(*table, network).made;
                (!made.is_some_and(|made| holds(made, needed))).then_some((*table, needed, size))
            })
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let tx = conn.tx().await?;
        tx.query_one("lock the partitions", LOCK, &[&LOCK_KEY]).await?;
        let mut made = Vec::with_capacity(missing.len());
        for (table, needed, size) in missing {
            made.push((table, make(&tx, table, network, needed, size).await?));
        }
        tx.commit().await?;
        for (table, made) in made {
            self.remember(table, network, |known| known.made = Some(union(known.made, made)));
        }
        Ok(())
    }

    /// Partitions whose history is done (everything below `history_done` is stored) and that have no
    /// secondary indexes yet.
    pub async fn indexes_due(
        &self,
        conn: &Conn,
        tables: &[Table],
        network: NetworkId,
        history_done: Height,
    ) -> Result<Vec<Partition>, StoreError> {
        let names: Vec<&str> = tables.iter().map(|table| table.name()).collect();
        let rows = conn
            .query("look for partitions to index", DUE, &[&network.0, &history_done.as_i64(), &names])
            .await?;
        rows.iter().map(|row| partition_of(row, network)).collect()
    }

    /// Makes sure that the partitions of `tables` that hold `height` have their secondary indexes: the tip
    /// serves reads at once.
    pub async fn ensure_indexed(
        &self,
        conn: &mut Conn,
        tables: &[Table],
        network: NetworkId,
        height: Height,
    ) -> Result<(), StoreError> {
        let unknown: Vec<&str> = tables
            .iter()
            .filter(|table| !self.known(**table, network).indexed.is_some_and(|range| range.contains(height)))
            .map(|table| table.name())
            .collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let rows = conn
            .query("look for indexes of the tip", UNINDEXED_AT, &[&network.0, &height.as_i64(), &unknown])
            .await?;
        for row in &rows {
            let partition = partition_of(row, network)?;
            if row.get(4) {
                index_partition(conn, &partition).await?;
            }
            self.remember(partition.table, network, |known| known.indexed = Some(partition.range));
        }
        Ok(())
    }

    /// Ends the partition that a network's transfers are written to, if it holds `full_bytes` or more, or has indexes that a
    /// backlog could not take away, right above its newest row; what comes next goes to a new one. Readers of the
    /// network's transfers wait while the old one is read through. Says whether it did: not while a rebuild is under way
    /// or can be undone, which knows the partitions as they were.
    pub async fn begin_anew(
        &self,
        conn: &mut Conn,
        network: NetworkId,
        full_bytes: i64,
        next: Next,
    ) -> Result<bool, StoreError> {
        let table = Table::Transfers;
        let indexed_bytes = next.indexed_bytes();
        let full: [Param<'_>; 6] =
            [&table.name(), &network.0, &full_bytes, &FULL_PART, &indexed_bytes, &SMALL_PART];
        if conn.query_opt("look for a full partition", FULL, &full).await?.is_none() {
            return Ok(false);
        }
        let tx = conn.tx().await?;
        tx.batch("prepare to end a partition", PREPARE_TO_END).await?;
        tx.query_one("lock the partitions", LOCK, &[&LOCK_KEY]).await?;
        projection::lock_network(&tx, network).await?;
        if tx.query_one("look for a rebuild", IS_REBUILT, &[]).await?.get(0) {
            return Ok(false);
        }
        // Somebody may have been faster.
        let Some(row) = tx.query_opt("look for a full partition", FULL, &full).await? else {
            return Ok(false);
        };
        let partition = partition_of(&row, network)?;
        let name = &partition.name;
        let parent = format!("{}_{network}", table.name());
        tx.batch("lock a network's partition", &format!("lock table {parent} in access exclusive mode"))
            .await?;
        // The network leads the key: with it the newest row is looked up, without it all are read.
        let newest =
            format!("select max({}) from {name} where network_id = {network}", table.height_column());
        let newest: Option<i64> = tx.query_one("look for the newest row", &newest, &[]).await?.get(0);
        let Some(rest) = newest
            .and_then(|newest| HeightRange::new(Height::from_i64(newest).plus(1), partition.range.to()))
        else {
            return Ok(false); // It is full to its end already.
        };
        let sql = format!(
            "alter table {parent} detach partition {name};
             alter table {parent} attach partition {name} for values from ({from}) to ({to})",
            from = partition.range.from(),
            to = rest.from(),
        );
        tx.batch("end a partition", &sql).await?;
        let ended: [Param<'_>; 4] =
            [&table.name(), &network.0, &partition.range.from().as_i64(), &rest.from().as_i64()];
        tx.execute("note where a partition ends", ENDS, &ended).await?;
        let name = create_leaf(&tx, table, network, rest).await?;
        match next {
            Next::Live => create_indexes(&tx, &Partition { table, network, name, range: rest }).await?,
            Next::Backlog => {}
        }
        tx.commit().await?;
        self.remember(table, network, |known| known.indexed = None);
        Ok(true)
    }

    /// Takes the secondary indexes of the partition of transfers that `next` goes to away, if it is small: a long backlog
    /// goes in, and they are back at its end. Says whether it did; not while a rebuild is under way or can be undone.
    pub async fn do_without_indexes(
        &self,
        conn: &mut Conn,
        network: NetworkId,
        next: Height,
    ) -> Result<bool, StoreError> {
        let table = Table::Transfers;
        let small: [Param<'_>; 5] = [&table.name(), &network.0, &next.as_i64(), &SMALL_BYTES, &SMALL_PART];
        if conn.query_opt("look for a small partition", SMALL, &small).await?.is_none() {
            return Ok(false);
        }
        let tx = conn.tx().await?;
        tx.batch("prepare to drop indexes", PREPARE_TO_END).await?;
        tx.query_one("lock the partitions", LOCK, &[&LOCK_KEY]).await?;
        projection::lock_network(&tx, network).await?;
        if tx.query_one("look for a rebuild", IS_REBUILT, &[]).await?.get(0) {
            return Ok(false);
        }
        // Somebody may have been faster.
        let Some(row) = tx.query_opt("look for a small partition", SMALL, &small).await? else {
            return Ok(false);
        };
        let partition = partition_of(&row, network)?;
        for (suffix, _) in table.secondary_indexes() {
            let sql = format!("drop index if exists {}_{suffix}", partition.name);
            tx.batch("drop an index", &sql).await?;
        }
        let from = partition.range.from().as_i64();
        tx.execute("note a partition without indexes", MARK_UNINDEXED, &[&table.name(), &network.0, &from])
            .await?;
        tx.commit().await?;
        self.remember(table, network, |known| known.indexed = None);
        Ok(true)
    }

    fn known(&self, table: Table, network: NetworkId) -> Known {
        let known = self.known.lock().expect("nothing panics while holding this lock");
        known.get(&(table, network)).copied().unwrap_or_default()
    }

    fn remember(&self, table: Table, network: NetworkId, note: impl FnOnce(&mut Known)) {
        let mut known = self.known.lock().expect("nothing panics while holding this lock");
        note(known.entry((table, network)).or_default());
    }
}

/// `range`, with room for what comes next when it ends in the second half of a partition.
fn with_lookahead(range: HeightRange, size: u64) -> HeightRange {
    let last = range.last();
    let ahead = if last.0 % size >= size / 2 { LOOKAHEAD.saturating_mul(size) } else { 0 };
    HeightRange::inclusive(range.from(), last.plus(ahead)).unwrap_or(range)
}

fn holds(outer: HeightRange, inner: HeightRange) -> bool {
    outer.from() <= inner.from() && inner.to() <= outer.to()
}

/// Both, where they touch; else the newer one.
fn union(old: Option<HeightRange>, new: HeightRange) -> HeightRange {
    old.filter(|old| old.from() <= new.to() && new.from() <= old.to())
        .and_then(|old| HeightRange::new(old.from().min(new.from()), old.to().max(new.to())))
        .unwrap_or(new)
}

const COUNT: &str = "select count(*) from raw.partitions";

/// How many partitions there are, of all tables and networks.
pub async fn count(conn: &Conn) -> Result<i64, StoreError> {
    Ok(conn.query_one("count partitions", COUNT, &[]).await?.get(0))
}

/// Builds a partition's secondary indexes and notes it. Doing it again changes nothing.
pub async fn index_partition(conn: &mut Conn, partition: &Partition) -> Result<(), StoreError> {
    let tx = conn.tx().await?;
    let key = i64::from(tidemark_model::partition::fnv1a(partition.name.as_bytes()));
    tx.query_one("lock a partition's indexes", LOCK, &[&key]).await?;
    tx.batch("prepare to build an index", bulk::PREPARE_TO_INDEX).await?;
    create_indexes(&tx, partition).await?;
    tx.commit().await
}

async fn create_indexes(tx: &Tx<'_>, partition: &Partition) -> Result<(), StoreError> {
    for (suffix, columns) in partition.table.secondary_indexes() {
        let (_, table) = partition.name.split_once('.').unwrap_or(("", &partition.name));
        let sql = format!("create index if not exists {table}_{suffix} on {} {columns}", partition.name);
        tx.batch("index a partition", &sql).await?;
    }
    tx.execute(
        "note a partition's indexes",
        MARK_INDEXED,
        &[&partition.table.name(), &partition.network.0, &partition.range.from().as_i64()],
    )
    .await?;
    Ok(())
}

/// Makes what is missing of `range`; gives the heights that exist around it. The caller holds the makers' lock.
async fn make(
    tx: &Tx<'_>,
    table: Table,
    network: NetworkId,
    range: HeightRange,
    size: u64,
) -> Result<HeightRange, StoreError> {
    let last = range.last();
    let floor = Height(range.from().0 / size * size);
    let rows = tx
        .query("list partitions", LIST, &[&table.name(), &network.0, &floor.as_i64(), &last.as_i64()])
        .await?;
    let there: Vec<HeightRange> = rows
        .iter()
        .filter_map(|row| HeightRange::new(Height::from_i64(row.get(1)), Height::from_i64(row.get(2))))
        .collect();
    let missing = missing_ranges(&there, range.from(), last, size);
    if !missing.is_empty() {
        create_network_level(tx, table, network).await?;
    }
    for part in &missing {
        create_leaf(tx, table, network, *part).await?;
    }
    let from = there.iter().chain(&missing).map(|part| part.from()).min().unwrap_or(range.from());
    let to = there.iter().chain(&missing).map(|part| part.to()).max().unwrap_or(range.to());
    Ok(HeightRange::new(from, to).unwrap_or(range))
}

/// What `there` (ordered, touching `first..=last`) leaves open, cut at multiples of `size`.
fn missing_ranges(there: &[HeightRange], first: Height, last: Height, size: u64) -> Vec<HeightRange> {
    let mut missing = Vec::new();
    let mut at = first;
    let mut taken_to = Height(0);
    let mut there = there.iter().peekable();
    while at <= last {
        match there.peek() {
            Some(part) if part.from() <= at => {
                taken_to = taken_to.max(part.to());
                at = at.max(part.to());
                there.next();
            }
            upcoming => {
                // An existing partition of another size may reach into the aligned range from either side.
                let from = Height(at.0 / size * size).max(taken_to);
                let mut to = Height((at.0 / size).saturating_add(1).saturating_mul(size));
                if let Some(part) = upcoming {
                    to = to.min(part.from());
                }
                missing.extend(HeightRange::new(from, to));
                taken_to = to;
                at = to;
            }
        }
    }
    missing
}

/// `raw.events_1`: the LIST partition of a network, itself partitioned by height.
async fn create_network_level(tx: &Tx<'_>, table: Table, network: NetworkId) -> Result<(), StoreError> {
    let name = format!("{}_{network}", table.name());
    let there: bool = tx
        .query_one("look for a network's partition", "select to_regclass($1::text) is not null", &[&name])
        .await?
        .get(0);
    if there {
        return Ok(());
    }
    let sql = format!(
        "create table {name} (like {parent} including defaults including constraints) \
             partition by range ({column});
         alter table {parent} attach partition {name} for values in ({network})",
        parent = table.name(),
        column = table.height_column(),
    );
    tx.batch("create a network's partition", &sql).await
}

async fn create_leaf(
    tx: &Tx<'_>,
    table: Table,
    network: NetworkId,
    range: HeightRange,
) -> Result<String, StoreError> {
    let parent = format!("{}_{network}", table.name());
    let name = format!("{parent}_{:010}", range.from().0);
    let sql = format!(
        "create table {name} (like {parent} including defaults including constraints);
         alter table {parent} attach partition {name} for values from ({from}) to ({to})",
        from = range.from(),
        to = range.to(),
    );
    tx.batch("create a partition", &sql).await?;
    tx.execute(
        "register a partition",
        REGISTER,
        &[&table.name(), &network.0, &name, &range.from().as_i64(), &range.to().as_i64()],
    )
    .await?;
    Ok(name)
}

// The partition of ledger.ownership_history that new rows go to ends nowhere. While a network is live it keeps its indexes
// anyway ([`SMALL_HISTORY`]), and a new one for every backlog would only make many.
const NEWEST_HISTORY: &str = "
    select c.oid::regclass::text, substring(pg_get_expr(c.relpartbound, c.oid) from '\\((.*)\\) TO '), n.number
      from (select count(*) as number, sum(pg_relation_size(inhrelid))::bigint as bytes
              from pg_inherits where inhparent = 'ledger.ownership_history'::regclass) n
      cross join pg_inherits i
      join pg_class c on c.oid = i.inhrelid
     where i.inhparent = 'ledger.ownership_history'::regclass
       and pg_get_expr(c.relpartbound, c.oid) like '% TO (MAXVALUE)'
       and (pg_relation_size(c.oid) >= greatest($1::bigint, n.bytes / $2::bigint)
            or exists (select from pg_index x where x.indrelid = c.oid)
               and not exists (select from ledger.network_progress p where not p.read_models_due)
               and pg_relation_size(c.oid) > greatest($3::bigint, n.bytes / $4::bigint))";

/// Ends the newest partition of ledger.ownership_history, if it holds `full_bytes` or more, or has indexes that a backlog
/// could not take away, right after its newest row.
/// All who write it wait while it is read through. Says whether it did.
pub async fn begin_history_anew(conn: &mut Conn, full_bytes: i64, next: Next) -> Result<bool, StoreError> {
    let indexed_bytes = next.indexed_bytes();
    let full: [Param<'_>; 4] = [&full_bytes, &FULL_PART, &indexed_bytes, &SMALL_PART];
    if conn.query_opt("look for a full partition", NEWEST_HISTORY, &full).await?.is_none() {
        return Ok(false);
    }
    let tx = conn.tx().await?;
    tx.batch("prepare to end a partition", PREPARE_TO_END).await?;
    tx.query_one("lock the partitions", LOCK, &[&LOCK_KEY]).await?;
    tx.batch("lock the history of balances", "lock table ledger.ownership_history in access exclusive mode")
        .await?;
    let row = tx.query_opt("look for a full partition", NEWEST_HISTORY, &full).await?;
    let Some(row) = row else { return Ok(false) }; // Somebody was faster.
    let (name, from, number): (&str, &str, i64) = (row.get(0), row.get(1), row.get(2));
    let newest = format!("select quote_literal(max(event_time) + interval '1 microsecond') from {name}");
    let newest: Option<String> = tx.query_one("look for the newest row", &newest, &[]).await?.get(0);
    let Some(to) = newest else { return Ok(false) };
    let sql = format!(
        "alter table ledger.ownership_history detach partition {name};
         alter table ledger.ownership_history attach partition {name} for values from ({from}) to ({to});
         create table ledger.ownership_history_{number:04}
             (like ledger.ownership_history including defaults including constraints);
         alter table ledger.ownership_history attach partition ledger.ownership_history_{number:04}
             for values from ({to}) to (maxvalue);
         create index ownership_history_{number:04}_account_id_block_number_idx
             on ledger.ownership_history_{number:04} (account_id, block_number);
         create index ownership_history_{number:04}_asset_id_block_number_idx
             on ledger.ownership_history_{number:04} (asset_id, block_number)"
    );
    tx.batch("end a partition", &sql).await?;
    tx.commit().await?;
    Ok(true)
}

// All networks write there: while others are live, their readers and writers need the indexes.
const SMALL_HISTORY: &str = "
    select format('%I.%I', n.nspname, i.relname), pg_get_indexdef(i.oid)
      from pg_inherits h
      join pg_class t on t.oid = h.inhrelid
      join pg_index x on x.indrelid = t.oid
      join pg_class i on i.oid = x.indexrelid
      join pg_namespace n on n.oid = i.relnamespace
     where h.inhparent = 'ledger.ownership_history'::regclass
       and pg_get_expr(t.relpartbound, t.oid) like '% TO (MAXVALUE)'
       and pg_relation_size(t.oid) <= greatest($1::bigint, (
           select sum(pg_relation_size(o.inhrelid))::bigint from pg_inherits o
            where o.inhparent = 'ledger.ownership_history'::regclass) / $3::bigint)
       and not exists (select from ledger.network_progress p where p.network_id <> $2 and not p.read_models_due)
     order by 1";

/// The same for the newest partition of ledger.ownership_history, unless another network is live. What it does without
/// is written down for [`bulk::restore_indexes`].
pub async fn history_without_indexes(conn: &mut Conn, network: NetworkId) -> Result<bool, StoreError> {
    let small: [Param<'_>; 3] = [&SMALL_BYTES, &network.0, &SMALL_PART];
    let tx = conn.tx().await?;
    tx.batch("prepare to drop indexes", PREPARE_TO_END).await?;
    tx.query_one("lock the partitions", LOCK, &[&LOCK_KEY]).await?;
    let indexes = tx.query("list indexes of a small history", SMALL_HISTORY, &small).await?;
    bulk::put_indexes_off(&tx, &indexes).await?;
    tx.commit().await?;
    Ok(!indexes.is_empty())
}

fn partition_of(row: &tokio_postgres::Row, network: NetworkId) -> Result<Partition, StoreError> {
    let (parent, name): (&str, String) = (row.get(0), row.get(1));
    let range = HeightRange::new(Height::from_i64(row.get(2)), Height::from_i64(row.get(3)));
    match (Table::parse(parent), range) {
        (Some(table), Some(range)) => Ok(Partition { table, network, name, range }),
        _ => Err(StoreError::Corrupt {
            what: format!("raw.partitions {name}"),
            found: format!("parent {parent:?}"),
            hint: "this row was not written by the partition manager: remove it",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(from: u64, to: u64) -> HeightRange {
        HeightRange::new(Height(from), Height(to)).expect("not empty")
    }

    #[test]
    fn two_more_are_made_from_the_middle_of_a_partition_on() {
        assert_eq!(with_lookahead(range(0, 4), 10), range(0, 4));
        assert_eq!(with_lookahead(range(0, 6), 10), range(0, 26));
        assert_eq!(with_lookahead(range(12, 14), 10), range(12, 14));
        assert_eq!(with_lookahead(range(0, 1), 1), range(0, 3));
    }

    #[track_caller]
    fn check(there: &[(u64, u64)], first: u64, last: u64, expected: &[(u64, u64)]) {
        let there: Vec<_> = there.iter().map(|(from, to)| range(*from, *to)).collect();
        let expected: Vec<_> = expected.iter().map(|(from, to)| range(*from, *to)).collect();
        assert_eq!(missing_ranges(&there, Height(first), Height(last), 10), expected);
    }

    #[test]
    fn missing_partitions_are_aligned_and_never_overlap() {
        check(&[], 5, 25, &[(0, 10), (10, 20), (20, 30)]);
        check(&[(0, 10)], 5, 25, &[(10, 20), (20, 30)]);
        check(&[(10, 20)], 5, 25, &[(0, 10), (20, 30)]);
        check(&[(0, 30)], 5, 25, &[]);
        // After a change of the size: an old partition ends in the middle of a new one.
        check(&[(0, 14)], 5, 25, &[(14, 20), (20, 30)]);
        check(&[(14, 30)], 5, 25, &[(0, 10), (10, 14)]);
        check(&[(0, 4)], 5, 25, &[(4, 10), (10, 20), (20, 30)]);
    }
}
