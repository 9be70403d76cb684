//! Building a projection beside the live one (S0 §14): `X__shadow` is filled from the truth in one snapshot
//! while live goes on; a trigger notes in `X__changes` which keys live writes meanwhile; then, with all
//! projectors waiting, those keys (and those that differed) are recomputed and the tables change names.
//! The replaced table stays as `X__old`, and the trigger stays on, so that an undo is exact too: for a day, or
//! until the noted keys take a gigabyte ([`outdated`]).
//!
//! Of transfers only what is final *and* projected is rebuilt; above that line rows are taken as live has
//! them, because a row that appears by rebuild would never be delivered on the live stream.
//!
//! Identifiers in the statements made here come from the constants below and from the catalog of our own
//! partitions, never from a caller.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::truth::{
    account_truth, card_truth, holder_truth, is_open, last_height_truth, ownership_truth, stats_truth,
    transfer_truth,
};
use crate::db::{Conn, StoreError, Tx};

/// A projection that can be rebuilt. In this order: later ones are computed from earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProjectionName {
    /// projection.transfers
    Transfers,
    /// projection.ownership_view
    OwnershipView,
    /// projection.asset_cards
    AssetCards,
    /// projection.collection_holders
    CollectionHolders,
    /// projection.collection_stats
    CollectionStats,
    /// projection.account_summaries
    AccountSummaries,
}

impl ProjectionName {
    /// All of them, in an order in which each finds its sources rebuilt.
    pub const ALL: [Self; 6] = [
        Self::Transfers,
        Self::OwnershipView,
        Self::AssetCards,
        Self::CollectionHolders,
        Self::CollectionStats,
        Self::AccountSummaries,
    ];
    /// The table's name without schema.
    pub fn as_str(self) -> &'static str {
        self.plan().table
    }
    fn plan(self) -> &'static Plan {
        match self {
            Self::Transfers => &TRANSFERS,
            Self::OwnershipView => &OWNERSHIP_VIEW,
            Self::AssetCards => &ASSET_CARDS,
            Self::CollectionHolders => &COLLECTION_HOLDERS,
            Self::CollectionStats => &COLLECTION_STATS,
            Self::AccountSummaries => &ACCOUNT_SUMMARIES,
        }
    }
}
impl fmt::Display for ProjectionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
impl FromStr for ProjectionName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|name| name.as_str() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|name| name.as_str()).collect();
            format!("{text:?} is not a projection that can be rebuilt: take one of {}", names.join(", "))
        })
    }
}

/// How a projection is rebuilt.
struct Plan {
    table: &'static str,
    keys: &'static str,
    /// All columns but updated_at that a rebuild fills, keys included; truths give them in this order.
    columns: &'static str,
    has_updated_at: bool,
    /// Rows whose first key lies between $1 and $2.
    truth: &'static str,
    /// Rows whose keys are in X__changes.
    truth_of_changes: &'static str,
    /// In how many pieces to fill, for the sake of a progress bar.
    slices: u8,
    /// Only rows at or below the line of their network are rebuilt.
    has_line: bool,
}

const OWNERSHIP_VIEW: Plan = Plan {
    table: "ownership_view",
    keys: "asset_id, account_id",
    columns: "asset_id, account_id, network_id, collection_id, qty, qty_finalized, finality_status, open_height",
    has_updated_at: true,
    truth: ownership_truth!(
        "select asset_id, account_id from ledger.ownership_current where asset_id between $1 and $2
         union
         select asset_id, account_id from ledger.unfinalized_deltas where asset_id between $1 and $2"
    ),
    truth_of_changes: ownership_truth!(
        "select distinct asset_id, account_id from projection.ownership_view__changes"
    ),
    slices: 16,
    has_line: false,
};

macro_rules! card_columns {
    ($cards:expr, $height:expr, $join:expr) => {
        concat!(
            "select t.asset_id, t.network_id, t.collection_id, t.token_id, t.standard, t.is_stub, t.is_burned,
                    t.supply, t.history, t.finality_status, t.open_height, ",
            $height,
            " as last_height from (",
            $cards,
            ") t ",
            $join
        )
    };
}

const ASSET_CARDS: Plan = Plan {
    table: "asset_cards",
    keys: "asset_id",
    columns: "asset_id, network_id, collection_id, token_id, standard, is_stub, is_burned, supply, history, \
              finality_status, open_height, last_height",
    has_updated_at: true,
    truth: card_columns!(
        card_truth!("select id as asset_id from catalog.assets where id between $1 and $2"),
        "coalesce(h.height, 0)",
        "left join (select asset_id, max(height) as height
                      from projection.transfers
                     where asset_id between $1 and $2 and not is_reverted
                     group by asset_id) h on h.asset_id = t.asset_id"
    ),
    truth_of_changes: card_columns!(
        card_truth!("select distinct asset_id from projection.asset_cards__changes"),
        last_height_truth!("t.network_id", "t.asset_id"),
        ""
    ),
    slices: 4,
    has_line: false,
};

const COLLECTION_HOLDERS: Plan = Plan {
    table: "collection_holders",
    keys: "collection_id, account_id",
    columns: "collection_id, account_id, asset_count, qty",
    has_updated_at: false,
    truth: holder_truth!("o.collection_id between $1 and $2"),
    truth_of_changes: holder_truth!(
        "o.account_id in (select account_id from projection.collection_holders__changes)
         and (o.collection_id, o.account_id) in
             (select collection_id, account_id from projection.collection_holders__changes)"
    ),
    slices: 1,
    has_line: false,
};

const COLLECTION_STATS: Plan = Plan {
    table: "collection_stats",
    keys: "collection_id",
    columns: "collection_id, network_id, address, standard, slug, name, verified, is_stub, reliability, \
              unreliable_reason, owners_count, asset_count, total_supply, stub_count, transfer_count, last_height",
    has_updated_at: true,
    truth: stats_truth!("collection_id between $1 and $2"),
    truth_of_changes: stats_truth!(
        "collection_id in (select collection_id from projection.collection_stats__changes)"
    ),
    slices: 1,
    has_line: false,
};

const ACCOUNT_SUMMARIES: Plan = Plan {
    table: "account_summaries",
    keys: "account_id",
    columns: "account_id, network_id, address, asset_count, transfer_count, first_seen_at, last_seen_at",
    has_updated_at: true,
    truth: account_truth!(
        "account_id between $1 and $2",
        "from_account between $1 and $2",
        "to_account between $1 and $2"
    ),
    truth_of_changes: account_truth!(
        "account_id in (select account_id from projection.account_summaries__changes)",
        "from_account in (select account_id from projection.account_summaries__changes)",
        "to_account in (select account_id from projection.account_summaries__changes)"
    ),
    slices: 1,
    has_line: false,
};

macro_rules! transfer_columns {
    ($keys:expr) => {
        concat!(
            "select t.network_id, t.height, t.event_index, t.sub_index, t.event_id, t.kind, t.asset_id,
                    t.collection_id, t.from_account, t.to_account, t.qty, t.tx_hash, t.block_hash, t.event_time,
                    t.is_reverted
               from (",
            transfer_truth!($keys),
            ") t join projection.transfers__line l on l.network_id = t.network_id and t.height <= l.height"
        )
    };
}

const TRANSFERS: Plan = Plan {
    table: "transfers",
    keys: "network_id, height, event_index, sub_index, event_id",
    columns: "network_id, height, event_index, sub_index, event_id, kind, asset_id, collection_id, from_account, \
              to_account, qty, tx_hash, block_hash, event_time, is_reverted",
    has_updated_at: false,
    truth: transfer_columns!(
        "select network_id, id as event_id from ledger.normalized_events where id between $1 and $2"
    ),
    truth_of_changes: transfer_columns!(
        "select distinct network_id, event_id from projection.transfers__changes"
    ),
    slices: 1,
    has_line: true,
};

/// Heights up to which transfers are rebuilt.
const DRAW_LINE: &str = "
    drop table if exists projection.transfers__line;
    create table projection.transfers__line as
    select s.network_id, least(s.projected_height, p.finalized_height) as height
      from projection.network_status s
      join ledger.network_progress p on p.network_id = s.network_id
     where s.projected_height is not null";

/// One table of a (partition) tree.
struct Branch {
    name: String,
    parent: Option<String>,
    bound: Option<String>,
    key: Option<String>,
}

const TREE: &str = "
    select c.relname::text, p.relname::text, pg_get_expr(c.relpartbound, c.oid),
           case when c.relkind = 'p' then pg_get_partkeydef(c.oid) end
      from (select relid, parentrelid, level from pg_partition_tree(to_regclass($1::text))
            union
            select to_regclass($1::text), null, 0) t
      join pg_class c on c.oid = t.relid
      left join pg_class p on p.oid = t.parentrelid
     order by t.level, c.relname";

async fn tree(tx: &Tx<'_>, table: &str) -> Result<Vec<Branch>, StoreError> {
    let rows = tx.query("list partitions", TREE, &[&format!("projection.{table}")]).await?;
    Ok(rows
        .iter()
        .map(|row| Branch { name: row.get(0), parent: row.get(1), bound: row.get(2), key: row.get(3) })
        .collect())
}

/// Name and definition from ` USING` on; `is_own`: not made by an index of the parent.
const INDEXES: &str = "
    select i.relname::text, substring(pg_get_indexdef(i.oid) from ' USING .*$'), x.indisunique,
           not exists (select 1 from pg_inherits h where h.inhrelid = i.oid)
      from pg_index x
      join pg_class i on i.oid = x.indexrelid
     where x.indrelid = to_regclass($1::text)
     order by i.relname";

struct Index {
    name: String,
    definition: String,
    is_unique: bool,
    is_own: bool,
}

async fn indexes(tx: &Tx<'_>, table: &str) -> Result<Vec<Index>, StoreError> {
    let rows = tx.query("list indexes", INDEXES, &[&format!("projection.{table}")]).await?;
    Ok(rows
        .iter()
        .map(|row| Index {
            name: row.get(0),
            definition: row.get(1),
            is_unique: row.get(2),
            is_own: row.get(3),
        })
        .collect())
}

const SETTINGS: &str = "
    select array_to_string(reloptions, ', ') from pg_class
     where relname = $1 and relnamespace = 'projection'::regnamespace";

/// Makes the tables `X__shadow` that are not there yet, with X's partitions and indexes.
async fn grow_shadow(tx: &Tx<'_>, plan: &Plan) -> Result<(), StoreError> {
    let there: Vec<String> = match exists(tx, &format!("{}__shadow", plan.table)).await? {
        true => tree(tx, &format!("{}__shadow", plan.table)).await?.into_iter().map(|one| one.name).collect(),
        false => Vec::new(),
    };
    for branch in tree(tx, plan.table).await? {
        let shadow = format!("{}__shadow", branch.name);
        if there.contains(&shadow) {
            continue;
        }
        let by = branch.key.as_ref().map(|key| format!(" partition by {key}")).unwrap_or_default();
        let sql = match (&branch.parent, &branch.bound) {
            (Some(parent), Some(bound)) => {
                format!(
                    "create table projection.{shadow} partition of projection.{parent}__shadow {bound}{by}"
                )
            }
            _ => format!(
                "create table projection.{shadow} (like projection.{} including all){by}",
                branch.name
            ),
        };
        tx.batch("make a shadow table", &sql).await?;
        let settings = tx.query_one("read a table's settings", SETTINGS, &[&branch.name]).await?;
        if let Some(settings) = settings.get::<_, Option<String>>(0) {
            let sql = format!("alter table projection.{shadow} set ({settings})");
            tx.batch("set up a shadow table", &sql).await?;
        }
        let made: Vec<String> = indexes(tx, &shadow).await?.into_iter().map(|one| one.definition).collect();
        for index in indexes(tx, &branch.name).await? {
            if index.is_own && !made.contains(&index.definition) {
                let unique = if index.is_unique { "unique " } else { "" };
                let sql = format!("create {unique}index on projection.{shadow}{}", index.definition);
                tx.batch("index a shadow table", &sql).await?;
            }
        }
    }
    Ok(())
}

async fn exists(tx: &Tx<'_>, table: &str) -> Result<bool, StoreError> {
    const EXISTS: &str = "select to_regclass($1::text) is not null";
    let row = tx.query_one("look for a table", EXISTS, &[&format!("projection.{table}")]).await?;
    Ok(row.get(0))
}

/// Notes the keys of rows that anybody writes from now on.
async fn watch(tx: &Tx<'_>, plan: &Plan) -> Result<(), StoreError> {
    let (table, keys) = (plan.table, plan.keys);
    let of = |row: &str| keys.split(", ").map(|key| format!("{row}.{key}")).collect::<Vec<_>>().join(", ");
    let sql = format!(
        "create table if not exists projection.{table}__changes as select {keys} from projection.{table} with no data;
         create or replace function projection.{table}__note() returns trigger language plpgsql as $note$
         begin
             if tg_op <> 'INSERT' then
                 insert into projection.{table}__changes values ({});
             end if;
             if tg_op <> 'DELETE' then
                 insert into projection.{table}__changes values ({});
             end if;
             return null;
         end $note$;
         create trigger {table}__note after insert or update or delete on projection.{table}
             for each row execute function projection.{table}__note()",
        of("old"),
        of("new"),
    );
    tx.batch("watch a projection", &sql).await
}

/// Notes on `X__changes` since when it grows: [`outdated`] reads it.
async fn note_time(tx: &Tx<'_>, plan: &Plan) -> Result<(), StoreError> {
    let sql = format!(
        "do $$ begin execute format('comment on table projection.{}__changes is %L', now()); end $$",
        plan.table
    );
    tx.batch("note the time of a rebuild", &sql).await
}

async fn unwatch(tx: &Tx<'_>, plan: &Plan, table: &str) -> Result<(), StoreError> {
    let sql = format!("drop trigger if exists {}__note on projection.{table}", plan.table);
    tx.batch("stop watching a projection", &sql).await
}

/// Makes an empty shadow and begins to watch the live table. Drops what an earlier rebuild left.
pub async fn begin(tx: &Tx<'_>, name: ProjectionName) -> Result<(), StoreError> {
    let plan = name.plan();
    super::lock_all(tx).await?;
    super::built_last::refuse_while_behind(tx).await?;
    patient(tx).await?;
    unwatch(tx, plan, plan.table).await?;
    let table = plan.table;
    tx.batch(
        "drop old shadows",
        &format!(
            "drop table if exists projection.{table}__shadow; drop table if exists projection.{table}__old;
             drop table if exists projection.{table}__changes"
        ),
    )
    .await?;
    if plan.has_line {
        tx.batch("draw the line of a rebuild", DRAW_LINE).await?;
    }
    grow_shadow(tx, plan).await?;
    watch(tx, plan).await?;
    note_time(tx, plan).await
}

/// Long statements are what these transactions are for; long waits for locks are not.
async fn patient(tx: &Tx<'_>) -> Result<(), StoreError> {
    tx.batch("prepare a long job", "set local statement_timeout = 0; set local lock_timeout = '3s'").await
}

/// How many pieces [`fill`] has for this projection.
pub fn slices(name: ProjectionName) -> u8 {
    name.plan().slices
}

/// Fills piece `slice` of the shadow; gives its rows. All pieces in one snapshot (`Conn::snapshot_tx`).
pub async fn fill(tx: &Tx<'_>, name: ProjectionName, slice: u8) -> Result<u64, StoreError> {
    let plan = name.plan();
    patient(tx).await?;
    let width = u128::MAX / u128::from(plan.slices);
    let from = width * u128::from(slice);
    let to = if slice + 1 == plan.slices { u128::MAX } else { from + (width - 1) };
    let sql = insert_into(plan, "shadow", plan.truth);
    tx.execute("fill a shadow table", &sql, &[&Uuid::from_u128(from), &Uuid::from_u128(to)]).await
}

fn insert_into(plan: &Plan, suffix: &str, rows: &str) -> String {
    let (stamp, now) = if plan.has_updated_at { (", updated_at", ", now()") } else { ("", "") };
    format!(
        "insert into projection.{}__{suffix} ({columns}{stamp}) select {columns}{now} from ({rows}) q",
        plan.table,
        columns = plan.columns,
    )
}

/// What the columns say of the row `r` now: a row at or below the line of its network is final as it stands,
/// whatever it said when it was written.
fn as_they_count(plan: &Plan) -> String {
    const OPEN: &str = is_open!("r");
    let counts = |column: &str| match column {
        "qty_finalized" => format!("case when {OPEN} then r.qty_finalized else r.qty end as qty_finalized"),
        "finality_status" => format!(
            "case when {OPEN} then r.finality_status else 'finalized'::ledger.event_finality_status end \
             as finality_status"
        ),
        "open_height" => format!("case when {OPEN} then r.open_height end as open_height"),
        other => format!("r.{other}"),
    };
    plan.columns.split(", ").map(counts).collect::<Vec<_>>().join(", ")
}

/// Notes the keys at which shadow and live differ in this snapshot; gives how many.
pub async fn compare(tx: &Tx<'_>, name: ProjectionName) -> Result<u64, StoreError> {
    let plan = name.plan();
    let (table, keys, columns) = (plan.table, plan.keys, as_they_count(plan));
    let below = match plan.has_line {
        true => format!(
            " where r.height <= (select l.height from projection.{table}__line l where l.network_id = r.network_id)"
        ),
        false => String::new(),
    };
    let sql = format!(
        "insert into projection.{table}__changes ({keys})
         select distinct {keys}
           from ((select {columns} from projection.{table} r{below}
                  except select {columns} from projection.{table}__shadow r)
                 union all
                 (select {columns} from projection.{table}__shadow r
                  except select {columns} from projection.{table} r)) d"
    );
    tx.execute("compare a shadow table", &sql, &[]).await
}

/// A row that a rebuild changes.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// As it stood; none: it was missing.
    pub live: Option<Value>,
    /// As it must be; none: it must go.
    pub rebuilt: Option<Value>,
}

/// What a rebuild found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Differences {
    /// How many rows differ.
    pub count: u64,
    /// The first few of them.
    pub samples: Vec<Difference>,
}

/// Most differing rows shown.
const SAMPLES_MAX: usize = 20;

/// Recomputes in `X__{suffix}` what was noted, and takes over from live what is above the line.
async fn catch_up(tx: &Tx<'_>, plan: &Plan, suffix: &str) -> Result<(), StoreError> {
    let table = plan.table;
    let same = equal(plan, "s", "c");
    let sql = format!(
        "delete from projection.{table}__{suffix} s using projection.{table}__changes c where {same}"
    );
    tx.execute("forget changed rows of a shadow", &sql, &[]).await?;
    // A moved event may be noted at its old place only.
    let sql = format!("{} on conflict do nothing", insert_into(plan, suffix, plan.truth_of_changes));
    tx.execute("catch up a shadow", &sql, &[]).await?;
    if plan.has_line {
        let above = "height > coalesce((select l.height from projection.transfers__line l \
                                         where l.network_id = t.network_id), -1)";
        let sql = format!("delete from projection.{table}__{suffix} t where {above}");
        tx.execute("forget the open end of a shadow", &sql, &[]).await?;
        let columns = plan.columns;
        let rows = format!("select {columns} from projection.{table} t where {above}");
        tx.execute("copy the open end of a projection", &insert_into(plan, suffix, &rows), &[]).await?;
    }
    Ok(())
}

fn equal(plan: &Plan, left: &str, right: &str) -> String {
    plan.keys.split(", ").map(|key| format!("{left}.{key} = {right}.{key}")).collect::<Vec<_>>().join(" and ")
}

/// Ends a rebuild: catches up, counts the differences and swaps. All projectors wait meanwhile.
pub async fn swap(tx: &Tx<'_>, name: ProjectionName) -> Result<Differences, StoreError> {
    let plan = name.plan();
    super::lock_all(tx).await?;
    super::built_last::refuse_while_behind(tx).await?;
    patient(tx).await?;
    grow_shadow(tx, plan).await?;
    catch_up(tx, plan, "shadow").await?;
    let differences = differences(tx, plan).await?;
    unwatch(tx, plan, plan.table).await?;
    change_names(tx, plan, "shadow", "old").await?;
    let sql = format!("truncate projection.{}__changes", plan.table);
    tx.batch("forget noted keys", &sql).await?;
    watch(tx, plan).await?;
    note_time(tx, plan).await?;
    Ok(differences)
}

async fn differences(tx: &Tx<'_>, plan: &Plan) -> Result<Differences, StoreError> {
    let (table, keys) = (plan.table, plan.keys);
    // Columns that no rebuild fills yet (prices, names) are not compared: they are nobody's.
    let columns = as_they_count(plan);
    let sql = format!(
        "select to_jsonb(l), to_jsonb(s), count(*) over ()
           from (select distinct {keys} from projection.{table}__changes) c
           left join (select {columns} from projection.{table} r) l on {}
           left join (select {columns} from projection.{table}__shadow r) s on {}
          where l is distinct from s
          order by {}
          limit {SAMPLES_MAX}",
        equal(plan, "l", "c"),
        equal(plan, "s", "c"),
        keys.split(", ").map(|key| format!("c.{key}")).collect::<Vec<_>>().join(", "),
    );
    let rows = tx.query("count differences", &sql, &[]).await?;
    Ok(Differences {
        count: rows.first().map_or(0, |row| u64::try_from(row.get::<_, i64>(2)).unwrap_or(0)),
        samples: rows.iter().map(|row| Difference { live: row.get(0), rebuilt: row.get(1) }).collect(),
    })
}

const VIEWS: &str = "
    select distinct v.oid::regclass::text, pg_get_viewdef(v.oid)
      from pg_depend d
      join pg_rewrite r on r.oid = d.objid
      join pg_class v on v.oid = r.ev_class
     where d.classid = 'pg_rewrite'::regclass and d.refobjid = to_regclass($1::text) and v.relkind = 'v'";

const GRANTS: &str = "
    select format('grant %s on table projection.%I to %s', a.privilege_type, $2::text,
                  case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end)
      from pg_class c
     cross join lateral aclexplode(c.relacl) a
     where c.oid = to_regclass($1::text) and a.grantee <> c.relowner";

/// `X` becomes `X__{away}`, `X__{coming}` becomes `X`; partitions, indexes, views and grants follow.
async fn change_names(tx: &Tx<'_>, plan: &Plan, coming: &str, away: &str) -> Result<(), StoreError> {
    let live = format!("projection.{}", plan.table);
    let views = tx.query("list views", VIEWS, &[&live]).await?;
    let grants = tx.query("list grants", GRANTS, &[&live, &format!("{}__{coming}", plan.table)]).await?;
    for row in &grants {
        tx.batch("copy a grant", row.get(0)).await?;
    }
    for branch in tree(tx, plan.table).await? {
        let name = &branch.name;
        let mut newcomers = indexes(tx, &format!("{name}__{coming}")).await?;
        for index in indexes(tx, name).await? {
            let sql = format!("alter index projection.{0} rename to {0}__{away}", index.name);
            tx.batch("rename an index", &sql).await?;
            let twin = newcomers.iter().position(|other| other.definition == index.definition);
            if let Some(twin) = twin.map(|at| newcomers.swap_remove(at)) {
                let sql = format!("alter index projection.{} rename to {}", twin.name, index.name);
                tx.batch("rename an index", &sql).await?;
            }
        }
        let sql = format!(
            "alter table projection.{name} rename to {name}__{away};
             alter table projection.{name}__{coming} rename to {name}"
        );
        tx.batch("rename a projection", &sql).await?;
    }
    for row in &views {
        let (view, definition): (&str, &str) = (row.get(0), row.get(1));
        let sql = format!("create or replace view {view} as {definition}");
        tx.batch("point a view to its new table", &sql).await?;
    }
    Ok(())
}

/// Puts the table that was replaced back, with what was written since recomputed. Gives false when there is
/// nothing to undo.
pub async fn undo(tx: &Tx<'_>, name: ProjectionName) -> Result<bool, StoreError> {
    let plan = name.plan();
    super::lock_all(tx).await?;
    super::built_last::refuse_while_behind(tx).await?;
    patient(tx).await?;
    if !exists(tx, &format!("{}__old", plan.table)).await? {
        return Ok(false);
    }
    catch_up(tx, plan, "old").await?;
    unwatch(tx, plan, plan.table).await?;
    change_names(tx, plan, "old", "undone").await?;
    let table = plan.table;
    tx.batch(
        "drop the undone table",
        &format!("drop table projection.{table}__undone; drop table projection.{table}__changes"),
    )
    .await?;
    Ok(true)
}

/// What a rebuild keeps for undo is dropped after this long.
pub const UNDO_KEPT: Duration = Duration::from_secs(24 * 3600);
/// Or earlier, when the keys noted for an undo take more room than this.
pub const UNDO_BYTES_MAX: i64 = 1 << 30;
/// A rebuild that has not swapped by then was interrupted.
pub const BUILD_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

const KEPT: &str = "
    select c.relname::text, to_regclass('projection.' || replace(c.relname, '__changes', '__old')) is not null,
           coalesce(extract(epoch from now() - obj_description(c.oid, 'pg_class')::timestamptz), 0)::float8,
           pg_relation_size(c.oid)
      from pg_class c
      join pg_namespace n on n.oid = c.relnamespace
     where n.nspname = 'projection' and c.relname = any($1)
     order by c.relname";

/// The projections whose last rebuild keeps something that nobody will want back: [`forget`] them.
pub async fn outdated(conn: &Conn) -> Result<Vec<ProjectionName>, StoreError> {
    let names: Vec<String> = ProjectionName::ALL.iter().map(|name| format!("{name}__changes")).collect();
    let rows = conn.query("look for old rebuilds", KEPT, &[&names]).await?;
    let is_outdated = |row: &tokio_postgres::Row| {
        let (is_swapped, age, bytes): (bool, f64, i64) = (row.get(1), row.get(2), row.get(3));
        match is_swapped {
            true => age > UNDO_KEPT.as_secs_f64() || bytes > UNDO_BYTES_MAX,
            false => age > BUILD_KEPT.as_secs_f64(),
        }
    };
    let of = |row: &tokio_postgres::Row| row.get::<_, &str>(0).trim_end_matches("__changes").parse().ok();
    Ok(rows.iter().filter(|row| is_outdated(row)).filter_map(of).collect())
}

/// Drops what a rebuild keeps for undo, and what an interrupted one left.
pub async fn forget(tx: &Tx<'_>, name: ProjectionName) -> Result<(), StoreError> {
    let plan = name.plan();
    super::lock_all(tx).await?;
    super::built_last::refuse_while_behind(tx).await?;
    patient(tx).await?;
    unwatch(tx, plan, plan.table).await?;
    let table = plan.table;
    tx.batch(
        "drop what a rebuild kept",
        &format!(
            "drop table if exists projection.{table}__old; drop table if exists projection.{table}__shadow;
             drop table if exists projection.{table}__changes; drop table if exists projection.{table}__line"
        ),
    )
    .await
}
