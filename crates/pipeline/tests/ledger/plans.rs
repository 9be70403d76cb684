//! What a batch costs does not grow with what is stored: rows are looked up, tables are not read through.

use tidemark_model::ids::Height;
use tidemark_pipeline::workers::{advance_finality, take_back_above_head};
use tidemark_store::Tx;

use crate::world::{Act, World, block, cause, single};

/// Other events, assets and owners, far more than those that a test is about.
const STORED: i64 = 4_000;
/// Events of the block that a test is about: so many that reading all that is stored looks cheaper than looking up.
const EVENTS: u64 = 400;

async fn a_full_ledger() -> World {
    let world = World::new().await;
    world
        .execute(&format!(
            "insert into ledger.normalized_events (id, source_event_id, sub_index, network_id, event_kind, asset_id,
                 to_account_id, qty_delta, block_number, block_hash, tx_hash, event_index, event_time, finality_status)
             select md5('e' || n)::uuid, n::text, '0', {network}, 'mint', md5('a' || n)::uuid, md5('o' || n)::uuid, 1,
                    -1, '', '', 0, now(), 'finalized'
               from generate_series(1, {STORED}) n",
            network = world.network.id
        ))
        .await;
    world
        .execute(&format!(
            "insert into ledger.ownership_current (asset_id, account_id, network_id, qty, updated_at)
             select md5('a' || n)::uuid, md5('o' || n)::uuid, {network}, 1, now()
               from generate_series(1, {STORED}) n",
            network = world.network.id
        ))
        .await;
    world
        .execute(&format!(
            "insert into catalog.assets (id, network_id, collection_id, token_id_raw, standard_id, is_fungible_class,
                 supply, first_seen_block, created_at)
             select md5('a' || n)::uuid, {network}, md5('c')::uuid, n::text, 'erc721', false, 1, 0, now()
               from generate_series(1, {STORED}) n",
            network = world.network.id
        ))
        .await;
    world.execute("analyze").await;
    world
}

fn mints() -> Vec<Act> {
    (0..EVENTS)
        .map(|n| {
            single(1, 100_000 + n, None, Some("a")).index(u32::try_from(n).expect("a few hundred events"))
        })
        .collect()
}

/// Tables that this connection read through so far, with the number of rows. (Postgres adds up what it has not reported
/// yet, which may be more than this transaction's: what counts is that nothing is added.)
async fn read_through(tx: &Tx<'_>) -> Vec<String> {
    tx.query(
        "look what was read through",
        "select format('%s.%s: %s rows', schemaname, relname, seq_tup_read) from pg_stat_xact_user_tables
          where seq_tup_read >= $1 order by 1",
        &[&STORED],
    )
    .await
    .expect("reads")
    .iter()
    .map(|row| row.get(0))
    .collect()
}

/// Also where nobody said how to plan: the history worker makes what live left open final, block by block while
/// live is far behind.
#[tokio::test]
async fn what_becomes_final_is_looked_up_and_not_read_through() {
    let world = a_full_ledger().await;
    let mints = mints();
    world.done(block(0, 0), &mints.iter().collect::<Vec<_>>()).await;
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    let before = read_through(&tx).await;
    let done =
        advance_finality(&tx, &world.network, Height(0), None, &cause("final")).await.expect("advances");
    assert_eq!(done.applied, mints.len());
    assert_eq!(read_through(&tx).await, before);
    tx.commit().await.expect("commits");
}

#[tokio::test]
async fn what_is_taken_back_is_looked_up_and_not_read_through() {
    let world = a_full_ledger().await;
    let mints = mints();
    world.done(block(0, 0), &[]).await;
    world.done(block(1, 0), &mints.iter().collect::<Vec<_>>()).await;
    // A reorg there and back leaves it standing above the head.
    let (there, here) = ([block(1, 0)], [block(1, 1)]);
    world.reorg(&there, &here).await;
    assert_eq!(world.reorg(&here, &there).await.head, 0);
    let mut conn = world.db.conn().await.expect("connects");
    let tx = conn.tx().await.expect("begins");
    let before = read_through(&tx).await;
    let done = take_back_above_head(&tx, &world.network, &cause("way")).await.expect("takes back");
    assert_eq!(done.reverted, mints.len());
    assert_eq!(read_through(&tx).await, before);
    tx.commit().await.expect("commits");
}
