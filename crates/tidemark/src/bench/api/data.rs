//! The read models of a chain that was never read: ids as the product makes them, rows by COPY and set-based
//! SQL, indexes and statistics as after a long history.

use anyhow::ensure;
use tidemark_model::ids::{AccountId, AssetId, CollectionId, Height, HeightRange, NetworkId};
use tidemark_model::redact::RedactedUrl;
use tidemark_store::copy::CopyBuffer;
use tidemark_store::partitions::{PartitionSizes, Partitions, RAW_TABLES, Table};
use tidemark_store::{Db, DbOptions, migrate};
use uuid::Uuid;

use super::endpoints::Moved;

/// The network of all rows.
pub(super) const NETWORK: NetworkId = NetworkId(31_337);
/// Its short name.
pub(super) const SLUG: &str = "bench";
/// Transfers in a block.
const PER_BLOCK: u64 = 10;
/// Heights above the tidemark.
const OPEN_BLOCKS: u64 = 64;
/// History, raw rows and event keys are built for one asset or block in so many.
const SAMPLE: u64 = 10;
/// A prime that spreads the assets over the blocks of a round.
const SHUFFLE: u64 = 7919;

/// How much to build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    /// Assets; five assets to an account, a thousand to a collection.
    pub(super) assets: u64,
    /// Transfers; each round moves every asset once.
    pub(super) transfers: u64,
}

impl Size {
    /// Collections.
    pub(super) fn collections(self) -> u64 {
        (self.assets / 1000).max(4)
    }
    /// Accounts.
    pub(super) fn accounts(self) -> u64 {
        (self.assets / 5).max(4)
    }
    /// Blocks.
    pub(super) fn blocks(self) -> u64 {
        self.transfers.div_ceil(PER_BLOCK)
    }
    /// The collection of an asset: one in ten is in the first.
    pub(super) fn collection_of(self, asset: u64) -> u64 {
        if asset.is_multiple_of(10) { 0 } else { 1 + asset % (self.collections() - 1) }
    }
}

/// An address that looks like one.
fn address(kind: u64, number: u64) -> String {
    let mut words = [0_u64; 3];
    let mut state = kind.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number;
    for word in &mut words {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        *word = mixed ^ (mixed >> 31);
    }
    let text = format!("{:016x}{:016x}{:016x}", words[0], words[1], words[2]);
    format!("0x{}", &text[..40])
}

/// Contract of a collection.
pub(super) fn contract(collection: u64) -> String {
    address(1, collection)
}
/// Address of an account.
pub(super) fn account(number: u64) -> String {
    address(2, number)
}
/// Id of a collection.
pub(super) fn collection_id(collection: u64) -> Uuid {
    CollectionId::of(NETWORK, &contract(collection)).0
}
/// Id of an account.
pub(super) fn account_id(number: u64) -> Uuid {
    AccountId::of(NETWORK, &account(number)).0
}
/// Id of an asset; its number is its token id.
pub(super) fn asset_id(size: Size, asset: u64) -> Uuid {
    let collection = CollectionId(collection_id(size.collection_of(asset)));
    AssetId::of(NETWORK, collection, &asset.to_string(), "erc721").0
}

/// Builds everything on an empty database.
pub(super) async fn build(url: &RedactedUrl, size: Size) -> anyhow::Result<()> {
    ensure!(size.assets >= 1000, "at least a thousand assets");
    ensure!(
        size.transfers >= size.assets && size.transfers.is_multiple_of(size.assets),
        "every asset moves as often as every other: transfers must be a multiple of assets"
    );
    ensure!(!size.assets.is_multiple_of(SHUFFLE), "another number of assets: {SHUFFLE} shuffles them");
    let options = DbOptions { statement_timeout: None, ..DbOptions::default() };
    let db = Db::open(url, &options)?;
    migrate::run(&db).await?;
    let mut conn = db.conn().await?;
    conn.batch("prepare to build", PREPARE).await?;
    let tx = conn.tx().await?;
    tx.copy_in("copy collections", COPY_COLLECTIONS, collections(size)).await?;
    tx.copy_in("copy accounts", COPY_ACCOUNTS, accounts(size)).await?;
    for from in (0..size.assets).step_by(200_000) {
        let to = (from + 200_000).min(size.assets);
        tx.copy_in("copy assets", COPY_ASSETS, assets(size, from..to)).await?;
    }
    tx.commit().await?;
    let last = Height(size.blocks() - 1);
    let third = (size.blocks() / 3 + 1).max(1);
    let sizes = PartitionSizes { transfers: third, ..PartitionSizes::default() };
    let partitions = Partitions::new(sizes, std::collections::HashMap::new());
    let range = HeightRange::inclusive(Height(0), last).expect("at least one block");
    partitions.ensure_transfers(&mut conn, NETWORK, range).await?;
    partitions.ensure_raw(&mut conn, NETWORK, range).await?;
    for (what, sql) in STEPS {
        let begun = std::time::Instant::now();
        let sql = sql
            .replace("{transfers}", &size.transfers.to_string())
            .replace("{assets}", &size.assets.to_string())
            .replace("{accounts}", &size.accounts().to_string())
            .replace("{blocks}", &size.blocks().to_string())
            .replace("{per_block}", &PER_BLOCK.to_string())
            .replace("{open}", &OPEN_BLOCKS.to_string())
            .replace("{shuffle}", &SHUFFLE.to_string())
            .replace("{sample}", &SAMPLE.to_string());
        conn.batch("build read models", &sql).await?;
        eprintln!("  {what}: {:.1} s", begun.elapsed().as_secs_f64());
    }
    let tables: Vec<Table> = RAW_TABLES.into_iter().chain([Table::Transfers]).collect();
    for height in [0, third, 2 * third].into_iter().map(Height).filter(|height| *height <= last) {
        partitions.ensure_indexed(&mut conn, &tables, NETWORK, height).await?;
    }
    for sql in ["drop schema bench cascade", "vacuum analyze", "checkpoint"] {
        conn.batch("finish building", sql).await?;
    }
    Ok(())
}

// A stride over the whole chain; only one block in ten has raw rows.
const MOVED: &str = "
    select t.height, '0x' || encode(t.tx_hash, 'hex'), t.event_id
      from generate_series(0, 1999) n
     cross join lateral (select t.height, t.tx_hash, t.event_id from projection.transfers t
                          where t.network_id = 31337 and t.height = (n * $1::bigint / 2000) / 10 * 10
                            and t.event_index = n % 10) t
     order by md5(n::text)";

/// Transfers whose raw rows exist, all over the chain.
pub(super) async fn moved(db: &Db, size: Size) -> anyhow::Result<Vec<Moved>> {
    let conn = db.conn().await?;
    let rows = conn.query("choose transfers", MOVED, &[&number(size.blocks())]).await?;
    Ok(rows
        .iter()
        .map(|row| Moved { height: row.get(0), tx_hash: row.get(1), event_id: row.get(2) })
        .collect())
}

const COPY_COLLECTIONS: &str = "copy bench.collections (n, id, address) from stdin (format binary)";
const COPY_ACCOUNTS: &str = "copy bench.accounts (n, id, address) from stdin (format binary)";
const COPY_ASSETS: &str = "copy bench.assets (n, id, collection) from stdin (format binary)";

fn number(value: u64) -> i64 {
    i64::try_from(value).expect("a benchmark's size is small")
}

fn collections(size: Size) -> CopyBuffer {
    let mut rows = CopyBuffer::new(3);
    for n in 0..size.collections() {
        rows.row().i64(number(n)).uuid(collection_id(n)).text(&contract(n));
    }
    rows
}

fn accounts(size: Size) -> CopyBuffer {
    let mut rows = CopyBuffer::new(3);
    for n in 0..size.accounts() {
        rows.row().i64(number(n)).uuid(account_id(n)).text(&account(n));
    }
    rows
}

fn assets(size: Size, range: std::ops::Range<u64>) -> CopyBuffer {
    let mut rows = CopyBuffer::new(3);
    for n in range {
        rows.row().i64(number(n)).uuid(asset_id(size, n)).i64(number(size.collection_of(n)));
    }
    rows
}

const PREPARE: &str = "
    set synchronous_commit = off;
    set work_mem = '256MB';
    set maintenance_work_mem = '512MB';
    create schema bench;
    create unlogged table bench.collections (n bigint primary key, id uuid not null, address text not null);
    create unlogged table bench.accounts (n bigint primary key, id uuid not null, address text not null);
    create unlogged table bench.assets (n bigint primary key, id uuid not null, collection bigint not null);
    -- Who has asset n after round r; the first account has one asset in twenty.
    create function bench.owner(n bigint, r bigint, accounts bigint) returns bigint language sql immutable as $$
        select case when (n * 31 + r * 17) % 20 = 0 then 0 else (n * 2654435761 + r * 40503) % accounts end
    $$";

// Numbers of our own making are put into these texts: they are the size of the benchmark.
const STEPS: &[(&str, &str)] = &[
    (
        "transfers",
        "create unlogged table bench.moves as
         select i, i / {per_block} as height, (i % {per_block})::int as event_index, i / {assets} as round,
                (i * {shuffle}) % {assets} as n
           from generate_series(0::bigint, {transfers} - 1) i;
         insert into projection.transfers (network_id, height, event_index, sub_index, event_id, kind, asset_id,
             collection_id, from_account, to_account, qty, tx_hash, block_hash, event_time)
         select 31337, m.height, m.event_index, 0, md5('e' || m.i)::uuid,
                case when m.round = 0 then 'mint' else 'transfer' end::ledger.event_kind, a.id, c.id,
                f.id, t.id, 1, sha256(int8send(m.i)), sha256(('b' || m.height)::bytea),
                now() - ({blocks} - m.height) * interval '12 seconds'
           from bench.moves m
           join bench.assets a on a.n = m.n
           join bench.collections c on c.n = a.collection
           join bench.accounts t on t.n = bench.owner(m.n, m.round, {accounts})
           left join bench.accounts f on m.round > 0 and f.n = bench.owner(m.n, m.round - 1, {accounts})",
    ),
    (
        "owners",
        "insert into projection.ownership_view (asset_id, account_id, network_id, collection_id, qty, qty_finalized,
             finality_status, updated_at)
         select a.id, o.id, 31337, c.id, 1, 1, 'finalized', now()
           from bench.assets a
           join bench.collections c on c.n = a.collection
           join bench.accounts o on o.n = bench.owner(a.n, {transfers} / {assets} - 1, {accounts})",
    ),
    (
        "asset cards",
        "insert into projection.asset_cards (asset_id, network_id, collection_id, token_id, standard, name, is_stub,
             is_burned, supply, history, finality_status, last_height, updated_at)
         select a.id, 31337, c.id, a.n::text, 'erc721', case when a.n % 3 = 0 then 'Shell ' || a.n end, a.n % 3 <> 0,
                false, 1, 'complete', 'finalized', {blocks} - 1, now()
           from bench.assets a join bench.collections c on c.n = a.collection",
    ),
    (
        "aggregates",
        "insert into projection.collection_holders (collection_id, account_id, asset_count, qty)
         select collection_id, account_id, count(*), sum(qty) from projection.ownership_view group by 1, 2;
         insert into projection.collection_stats (collection_id, network_id, address, standard, name, is_stub,
             owners_count, asset_count, total_supply, stub_count, transfer_count, last_height, updated_at)
         select c.id, 31337, c.address, 'erc721', 'Harbour ' || c.n, false, h.owners, h.assets, h.assets, 0,
                t.transfers, {blocks} - 1, now()
           from bench.collections c
           join (select collection_id, count(*) as owners, sum(asset_count) as assets
                   from projection.collection_holders group by 1) h on h.collection_id = c.id
           join (select collection_id, count(*) as transfers from projection.transfers group by 1) t
                on t.collection_id = c.id;
         insert into projection.account_summaries (account_id, network_id, address, asset_count, transfer_count,
             first_seen_at, last_seen_at, updated_at)
         select a.id, 31337, a.address, coalesce(h.assets, 0), coalesce(t.transfers, 0), now() - interval '60 days',
                now(), now()
           from bench.accounts a
           left join (select account_id, sum(asset_count) as assets
                        from projection.collection_holders group by 1) h on h.account_id = a.id
           left join (select to_account, count(*) as transfers from projection.transfers group by 1) t
                on t.to_account = a.id",
    ),
    (
        "blocks and network",
        "insert into projection.block_cards (network_id, height, hash, parent_hash, block_time, tx_count, event_count)
         select 31337, h, sha256(('b' || h)::bytea), sha256(('b' || h - 1)::bytea),
                now() - ({blocks} - h) * interval '12 seconds', {per_block}, {per_block}
           from generate_series(0::bigint, {blocks} - 1) h;
         insert into projection.network_status (network_id, slug, family, start_block, confirmations, head_height,
             head_time, ingested_height, normalized_height, finalized_height, projected_height, finalized_at,
             events_total)
         values (31337, 'bench', 'evm', 0, 12, {blocks} - 1, now(), {blocks} - 1, {blocks} - 1,
                 {blocks} - 1 - {open}, {blocks} - 1, now(), {transfers});
         insert into projection.network_activity (network_id, bucket, events)
         select 31337, date_bin('10 seconds', now(), 'epoch') - n * interval '10 seconds', n % 50
           from generate_series(0, 8639) n",
    ),
    (
        "history of one asset in ten",
        "insert into ledger.ownership_history (asset_id, account_id, network_id, block_number, event_index, qty_delta,
             event_time, normalized_event_id, leg)
         select a.id, o.id, 31337, m.height, m.event_index, l.qty,
                now() - ({blocks} - m.height) * interval '12 seconds', md5('e' || m.i)::uuid, l.leg
           from bench.moves m
           join bench.assets a on a.n = m.n
          cross join (values (0::smallint, -1), (1::smallint, 1)) l (leg, qty)
           join bench.accounts o on o.n = bench.owner(m.n, m.round - 1 + l.leg, {accounts})
          where m.n % {sample} = 0 and (m.round > 0 or l.leg = 1)",
    ),
    (
        "raw rows of one block in ten",
        "insert into raw.tx_lookup (network_id, block_height, id, tx_index, block_time)
         select 31337, m.height, sha256(int8send(m.i)), m.event_index, now() - ({blocks} - m.height) * interval '12 seconds'
           from bench.moves m where m.height % {sample} = 0;
         insert into raw.events (network_id, block_height, tx_id, event_index, tx_index, block_hash, emitter, topics, data)
         select 31337, m.height, sha256(int8send(m.i)), m.event_index, m.event_index, sha256(('b' || m.height)::bytea),
                decode(substr(c.address, 3), 'hex'), sha256('transfer') || sha256('from') || sha256('to'), '\\x'
           from bench.moves m
           join bench.assets a on a.n = m.n
           join bench.collections c on c.n = a.collection
          where m.height % {sample} = 0;
         insert into ledger.normalized_events (id, source_event_id, sub_index, network_id, event_kind, asset_id,
             block_number, block_hash, tx_hash, event_index, event_time, finality_status)
         select md5('e' || m.i)::uuid, 'bench:' || m.i, '0', 31337, 'transfer', a.id, m.height,
                sha256(('b' || m.height)::bytea), sha256(int8send(m.i)), m.event_index,
                now() - ({blocks} - m.height) * interval '12 seconds', 'finalized'
           from bench.moves m join bench.assets a on a.n = m.n where m.height % {sample} = 0",
    ),
];
