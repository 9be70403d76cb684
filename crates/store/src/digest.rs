//! The ledger digest (model::digest) in the database: one number per bucket, kept in step with every applied
//! change; and the search for the first difference between two databases.

use std::collections::BTreeMap;

use tidemark_model::digest::Digest;
use tidemark_model::ids::{AccountId, AssetId, NetworkId};
use tidemark_model::quantity::SignedQty;
use uuid::Uuid;

use crate::checks::Slice;
use crate::db::{Conn, Db, StoreError, Tx};
use crate::ledger::quantity;

/// Digests by bucket; a missing bucket is zero.
pub type Buckets = BTreeMap<u8, Digest>;

const READ: &str = "select bucket, digest::text from ledger.digests where network_id = $1";

/// The digests as kept, inside a transaction.
pub async fn read(tx: &Tx<'_>, network: NetworkId) -> Result<Buckets, StoreError> {
    buckets(&tx.query("read digests", READ, &[&network.0]).await?)
}

/// The digests as kept.
pub async fn read_with(conn: &Conn, network: NetworkId) -> Result<Buckets, StoreError> {
    buckets(&conn.query("read digests", READ, &[&network.0]).await?)
}

fn buckets(rows: &[tokio_postgres::Row]) -> Result<Buckets, StoreError> {
    rows.iter()
        .map(|row| {
            let bucket = u8::try_from(row.get::<_, i16>(0)).map_err(|_| StoreError::Corrupt {
                what: "ledger.digests".to_owned(),
                found: "a bucket outside 0..256".to_owned(),
                hint: "run `tidemark verify ledger`",
            })?;
            Ok((bucket, Digest(quantity(row, 1)?)))
        })
        .collect()
}

/// The digest of the whole network.
pub fn total(buckets: &Buckets) -> Digest {
    let mut total = Digest::default();
    for digest in buckets.values() {
        total.merge(*digest);
    }
    total
}

const WRITE: &str = "
    insert into ledger.digests as d (network_id, bucket, digest, height)
    select $1, u.bucket, u.digest::numeric, $2
      from unnest($3::smallint[], $4::text[]) u (bucket, digest)
     order by u.bucket
    on conflict (network_id, bucket) do update set digest = excluded.digest, height = excluded.height";
const WRITE_TOTAL: &str = "
    insert into ledger.digest_history as d (network_id, height, digest) values ($1, $2, $3::text::numeric)
    on conflict (network_id, height) do update set digest = excluded.digest";

/// Writes changed buckets, and the total at this height. The caller holds the network's lock.
pub async fn write(
    tx: &Tx<'_>,
    network: NetworkId,
    height: i64,
    changed: &Buckets,
    total: Digest,
) -> Result<(), StoreError> {
    if !changed.is_empty() {
        let buckets: Vec<i16> = changed.keys().map(|bucket| i16::from(*bucket)).collect();
        let digests: Vec<String> = changed.values().map(|digest| digest.0.to_string()).collect();
        tx.execute("write digests", WRITE, &[&network.0, &height, &buckets, &digests]).await?;
    }
    let total = total.0.to_string();
    tx.execute("write the digest of a height", WRITE_TOTAL, &[&network.0, &height, &total]).await?;
    Ok(())
}

const AT_HEIGHT: &str = "
    select height, digest::text from ledger.digest_history
     where network_id = $1 and height <= $2 order by height desc limit 1";

/// The newest total at or below a height, with its height.
pub async fn at_height(
    conn: &Conn,
    network: NetworkId,
    height: i64,
) -> Result<Option<(i64, Digest)>, StoreError> {
    let row = conn.query_opt("read an old digest", AT_HEIGHT, &[&network.0, &height]).await?;
    row.map(|row| Ok((row.get(0), Digest(quantity(&row, 1)?)))).transpose()
}

const DROP_ABOVE: &str = "delete from ledger.digest_history where network_id = $1 and height > $2";

/// Forgets totals above a height: an operator's rewind.
pub async fn drop_above(tx: &Tx<'_>, network: NetworkId, height: i64) -> Result<u64, StoreError> {
    tx.execute("drop digests above a height", DROP_ABOVE, &[&network.0, &height]).await
}

/// Assets `first..=last` by id, computed from the rows themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeDigest {
    /// Sum over the rows.
    pub digest: Digest,
    /// The lowest and highest asset found, if any.
    pub span: Option<(AssetId, AssetId)>,
}

const RANGE: &str = "
    select asset_id, account_id, qty::text from ledger.ownership_current
     where asset_id >= $2 and asset_id <= $3 and network_id = $1
     order by asset_id";

/// The digest of `first..=last` from ownership_current, not from what was kept.
pub async fn range(
    conn: &Conn,
    network: NetworkId,
    first: Uuid,
    last: Uuid,
) -> Result<RangeDigest, StoreError> {
    let rows = conn.query("read a range of balances", RANGE, &[&network.0, &first, &last]).await?;
    let mut digest = Digest::default();
    for row in &rows {
        digest.add(AssetId(row.get(0)), AccountId(row.get(1)), SignedQty::gain(quantity(row, 2)?));
    }
    let span = rows.first().zip(rows.last()).map(|(low, high)| (AssetId(low.get(0)), AssetId(high.get(0))));
    Ok(RangeDigest { digest, span })
}

const RECOMPUTE: &str = "
    select asset_id, account_id, qty::text from ledger.ownership_current
     where asset_id between $2 and $3 and network_id = $1";

/// The buckets of a slice computed from ownership_current.
pub async fn recompute(tx: &Tx<'_>, network: NetworkId, slice: Slice) -> Result<Buckets, StoreError> {
    let (first, last) = slice.bounds();
    let rows = tx.query("recompute digests", RECOMPUTE, &[&network.0, &first, &last]).await?;
    let mut buckets = Buckets::new();
    for row in &rows {
        let asset = AssetId(row.get(0));
        buckets.entry(tidemark_model::digest::bucket_of(asset)).or_default().add(
            asset,
            AccountId(row.get(1)),
            SignedQty::gain(quantity(row, 2)?),
        );
    }
    Ok(buckets)
}

/// The first asset whose owners differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    /// The asset.
    pub asset: AssetId,
    /// Ranges compared to find it.
    pub steps: u32,
}

/// Finds the first asset, by id, whose finalized owners differ between two databases: by bucket where the
/// kept digests differ, else over everything, then by halves. Each step halves what is read.
pub async fn diff(a: &Db, b: &Db, network: NetworkId) -> Result<Option<Difference>, StoreError> {
    let (a, b) = (a.conn().await?, b.conn().await?);
    let (kept_a, kept_b) = (read_with(&a, network).await?, read_with(&b, network).await?);
    let differs = (0..=u8::MAX).find(|bucket| {
        kept_a.get(bucket).copied().unwrap_or_default() != kept_b.get(bucket).copied().unwrap_or_default()
    });
    if let Some(bucket) = differs {
        let first = u128::from(bucket) << 120;
        let last = first | (u128::MAX >> 8);
        let found = search(&a, &b, network, first, last).await?;
        if found.is_some() {
            return Ok(found);
        }
    }
    search(&a, &b, network, 0, u128::MAX).await
}

async fn search(
    a: &Conn,
    b: &Conn,
    network: NetworkId,
    first: u128,
    last: u128,
) -> Result<Option<Difference>, StoreError> {
    let mut steps = 0;
    // What is known to differ; the lower half is looked at first.
    let mut differing = match differing_span(a, b, network, first, last, &mut steps).await? {
        Some(span) => span,
        None => return Ok(None),
    };
    while differing.0 < differing.1 {
        let (low, high) = differing;
        let middle = low + (high - low) / 2;
        differing = match differing_span(a, b, network, low, middle, &mut steps).await? {
            Some(span) => span,
            // The lower half is equal, so the difference lies above it.
            None => match differing_span(a, b, network, middle + 1, high, &mut steps).await? {
                Some(span) => span,
                // Somebody wrote meanwhile and the difference is gone.
                None => return Ok(None),
            },
        };
    }
    Ok(Some(Difference { asset: AssetId(Uuid::from_u128(differing.0)), steps }))
}

/// The lowest and highest asset of a range whose digests differ; `None` when they are equal. Narrowing to
/// what is there makes halves of random ids even.
async fn differing_span(
    a: &Conn,
    b: &Conn,
    network: NetworkId,
    first: u128,
    last: u128,
    steps: &mut u32,
) -> Result<Option<(u128, u128)>, StoreError> {
    *steps += 1;
    let (from, to) = (Uuid::from_u128(first), Uuid::from_u128(last));
    let (in_a, in_b) = (range(a, network, from, to).await?, range(b, network, from, to).await?);
    if in_a.digest == in_b.digest {
        return Ok(None);
    }
    let spans = [in_a.span, in_b.span].into_iter().flatten();
    Ok(spans
        .map(|(low, high)| (low.0.as_u128(), high.0.as_u128()))
        .reduce(|one, other| (one.0.min(other.0), one.1.max(other.1))))
}
