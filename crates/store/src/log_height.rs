//! How far the log of a network's ledger is written. History appends a segment's log in a transaction of its own and
//! commits it right before the one that moves the head; rows above the head that stand by a [`claim`] are nobody's,
//! and whoever locks the network's progress next takes them away ([`settle`]).
//!
//! The row of ledger.log_heights is locked by the log's writer from its first statement to its end, so that nobody
//! can miss a commit that is on its way.

use tidemark_model::ids::NetworkId;
use tokio_postgres::types::ToSql;

use crate::db::{StoreError, Tx};

const CLAIM: &str = "
    insert into ledger.log_heights as l (network_id, height) values ($1, $3)
    on conflict (network_id) do update set height = excluded.height where l.height <= $2";

/// Claims the log up to `height` for this transaction, which writes nothing but the log of (`head`, `height`]. Not
/// granted while rows above `head` are left from before.
pub async fn claim(tx: &Tx<'_>, network: NetworkId, head: i64, height: i64) -> Result<bool, StoreError> {
    Ok(tx.execute("claim the log", CLAIM, &[&network.0, &head, &height]).await? == 1)
}

const READ: &str = "select height from ledger.log_heights where network_id = $1 for share";
const STAY_BEHIND: &str = "update ledger.log_heights set height = $2 where network_id = $1";
// Openings stand in the history of balances below the first block: rows of it go by their events.
const DISCARD_HISTORY: &str = "
    delete from ledger.ownership_history h using ledger.normalized_events e
     where e.network_id = $1 and e.block_number > $2 and e.block_number <= $3 and not e.is_reverted
       and h.network_id = $1 and h.normalized_event_id = e.id";
const DISCARD_EVENTS: &str = "
    delete from ledger.normalized_events
     where network_id = $1 and block_number > $2 and block_number <= $3 and not is_reverted";
const DISCARD_TRANSFERS: &str = "
    delete from projection.transfers
     where network_id = $1 and height > $2 and height <= $3 and not is_reverted";
const DISCARD_BLOCKS: &str = "
    delete from projection.block_cards where network_id = $1 and height > $2 and height <= $3";

/// Takes away log rows above the head that a dead writer left, and says whether there were any. The caller holds the
/// lock on the network's progress and has just read `head` from it.
pub async fn settle(tx: &Tx<'_>, network: NetworkId, head: i64) -> Result<bool, StoreError> {
    let row = tx.query_opt("look for a log ahead of its ledger", READ, &[&network.0]).await?;
    let Some(height) = row.map(|row| row.get::<_, i64>(0)).filter(|height| *height > head) else {
        return Ok(false);
    };
    tracing::warn!(
        network_id = network.0,
        head,
        log_height = height,
        action = "discard_log",
        "A process ended before it moved the ledger; the log rows it left are taken away."
    );
    let above: [&(dyn ToSql + Sync); 3] = [&network.0, &head, &height];
    tx.execute("discard ownership history", DISCARD_HISTORY, &above).await?;
    tx.execute("discard events", DISCARD_EVENTS, &above).await?;
    tx.execute("discard transfers", DISCARD_TRANSFERS, &above).await?;
    tx.execute("discard block cards", DISCARD_BLOCKS, &above).await?;
    tx.execute("set the log's height", STAY_BEHIND, &[&network.0, &head]).await?;
    Ok(true)
}
