//! Reconciliation (S0 §16.4): a random sample of assets, compared with the truth in one snapshot.

use serde_json::{Value, json};
use uuid::Uuid;

use super::truth::{card_truth, is_open, last_height_truth, ownership_truth, stats_truth};
use crate::db::{StoreError, Tx};

/// Ids are hashes, so a run of them from a random start is a random sample, found by the primary key.
const SAMPLE: &str = "
    select id from ((select id, network_id from catalog.assets where id >= $1 order by id limit $2)
                    union
                    (select id, network_id from catalog.assets where id < $1 order by id limit $2)) s
     where network_id not in (select p.network_id from ledger.network_progress p where p.read_models_due)
     order by id < $1, id limit $2";

/// At most `size` assets, from `start` on, around the end; none of a network that has no read models yet.
pub async fn sample(tx: &Tx<'_>, start: Uuid, size: i64) -> Result<Vec<Uuid>, StoreError> {
    let rows = tx.query("sample assets", SAMPLE, &[&start, &size]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// A key at which a projection is not what the ledger says.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    /// The asset, or the collection.
    pub id: Uuid,
    /// Both sides, for people.
    pub detail: Value,
}

const CHECK_CARDS: &str = concat!(
    "select k.asset_id,
            (select to_jsonb(w) from (select c.collection_id, c.token_id, c.standard, c.is_stub, c.is_burned,
                                             c.supply, c.history, case when ",
    is_open!("c"),
    " then c.open_height end as open_height, c.last_height
                                       where c.asset_id is not null) w),
            (select to_jsonb(w) from (select t.collection_id, t.token_id, t.standard, t.is_stub, t.is_burned,
                                             t.supply, t.history, case when ",
    is_open!("t"),
    " then t.open_height end as open_height, ",
    last_height_truth!("t.network_id", "t.asset_id"),
    " as last_height) w)
       from unnest($1::uuid[]) as k(asset_id)
       join (",
    card_truth!("select i as asset_id from unnest($1::uuid[]) i"),
    ") t on t.asset_id = k.asset_id
       left join projection.asset_cards c on c.asset_id = k.asset_id
      order by k.asset_id"
);

/// Cards of these assets that are wrong or missing.
pub async fn check_cards(tx: &Tx<'_>, assets: &[Uuid]) -> Result<Vec<Mismatch>, StoreError> {
    let rows = tx.query("check asset cards", CHECK_CARDS, &[&assets]).await?;
    let mut found = Vec::new();
    for row in &rows {
        let (live, truth): (Option<Value>, Option<Value>) = (row.get(1), row.get(2));
        if live != truth {
            found.push(Mismatch { id: row.get(0), detail: json!({ "projection": live, "ledger": truth }) });
        }
    }
    Ok(found)
}

/// Rows of ownership as they count now.
macro_rules! settled {
    ($rows:literal) => {
        concat!(
            "select w.asset_id, w.account_id, w.collection_id, w.qty,
                    case when ",
            is_open!("w"),
            " then w.qty_finalized else w.qty end as qty_finalized, case when ",
            is_open!("w"),
            " then w.open_height end as open_height
               from ",
            $rows,
            " w where w.asset_id = any($1)"
        )
    };
}

const CHECK_OWNERSHIP: &str = concat!(
    "with keys as materialized (
        select asset_id, account_id from projection.ownership_view where asset_id = any($1::uuid[])
        union
        select asset_id, account_id from ledger.ownership_current where asset_id = any($1)
        union
        select asset_id, account_id from ledger.unfinalized_deltas where asset_id = any($1)),
     truth as materialized (",
    ownership_truth!("select asset_id, account_id from keys"),
    ")
     select k.asset_id, k.account_id, v.qty::text, t.qty::text, v.qty_finalized::text, t.qty_finalized::text,
            v.open_height, t.open_height
       from keys k
       left join (",
    settled!("projection.ownership_view"),
    ") v on v.asset_id = k.asset_id and v.account_id = k.account_id
       left join (",
    settled!("truth"),
    ") t on t.asset_id = k.asset_id and t.account_id = k.account_id
      where (v.qty, v.qty_finalized, v.open_height, v.collection_id)
            is distinct from (t.qty, t.qty_finalized, t.open_height, t.collection_id)
      order by k.asset_id, k.account_id"
);

/// Holdings of these assets that are wrong, missing or too many.
pub async fn check_ownership(tx: &Tx<'_>, assets: &[Uuid]) -> Result<Vec<Mismatch>, StoreError> {
    let rows = tx.query("check ownership", CHECK_OWNERSHIP, &[&assets]).await?;
    let text = |row: &tokio_postgres::Row, at: usize| row.get::<_, Option<String>>(at);
    let open = |row: &tokio_postgres::Row, at: usize| row.get::<_, Option<i64>>(at);
    Ok(rows
        .iter()
        .map(|row| Mismatch {
            id: row.get(0),
            detail: json!({
                "account_id": row.get::<_, Uuid>(1),
                "projection": { "qty": text(row, 2), "qty_finalized": text(row, 4), "open_height": open(row, 6) },
                "ledger": { "qty": text(row, 3), "qty_finalized": text(row, 5), "open_height": open(row, 7) },
            }),
        })
        .collect())
}

const COLLECTIONS_OF: &str = "
    select distinct collection_id from catalog.assets where id = any($1::uuid[]) order by 1 limit $2";

const CHECK_STATS: &str = concat!(
    "select t.collection_id,
            jsonb_build_object('owners', s.owners_count, 'assets', s.asset_count, 'supply', s.total_supply,
                               'stubs', s.stub_count, 'transfers', s.transfer_count, 'height', s.last_height),
            jsonb_build_object('owners', t.owners_count, 'assets', t.asset_count, 'supply', t.total_supply,
                               'stubs', t.stub_count, 'transfers', t.transfer_count, 'height', t.last_height)
       from (",
    stats_truth!("collection_id = any($1::uuid[])"),
    ") t left join projection.collection_stats s on s.collection_id = t.collection_id
      order by t.collection_id"
);

/// Stats that do not add up, of at most `limit` collections of these assets; with how many were looked at.
pub async fn check_stats(
    tx: &Tx<'_>,
    assets: &[Uuid],
    limit: i64,
) -> Result<(usize, Vec<Mismatch>), StoreError> {
    let rows = tx.query("list collections", COLLECTIONS_OF, &[&assets, &limit]).await?;
    let collections: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    let rows = tx.query("check collection stats", CHECK_STATS, &[&collections]).await?;
    let mut found = Vec::new();
    for row in &rows {
        let (live, truth): (Value, Value) = (row.get(1), row.get(2));
        if live != truth {
            found.push(Mismatch { id: row.get(0), detail: json!({ "projection": live, "ledger": truth }) });
        }
    }
    Ok((collections.len(), found))
}

const RECORD: &str = "
    insert into system.reconciliation_runs (projection, sample_size, mismatches_found, mismatch_rate, detail)
    values ($1, $2, $3, $4, $5)";

/// Writes the result of a check down.
pub async fn record(
    tx: &Tx<'_>,
    projection: &str,
    sample_size: i64,
    mismatches: i64,
    mismatch_rate: f64,
    detail: &Value,
) -> Result<(), StoreError> {
    tx.execute(
        "record a reconciliation",
        RECORD,
        &[&projection, &sample_size, &mismatches, &mismatch_rate, detail],
    )
    .await?;
    Ok(())
}
