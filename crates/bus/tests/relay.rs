//! The relay: nothing lost, nothing out of order, one owner.

mod support;

use std::collections::HashMap;
use std::time::Duration;

use support::{PARTS, Rig, STREAM, draft, keys, wait_for};
use tidemark_bus::BusError;
use tidemark_bus::relay::{Relay, RelayOptions};
use tidemark_store::outbox::{Emitter, EmitterOptions, OutboxError, Partitions};
use tidemark_store::{Verdict, buslog};
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_transactions_lose_nothing_and_keep_the_order_of_keys() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    rig.sql("create table versions (key text primary key, version bigint not null default 0)").await?;
    let keys = keys(8);
    for key in &keys {
        rig.sql(&format!("insert into versions values ('{key}')")).await?;
    }
    let relay = rig.run_relay();
    let (writers, rounds) = (6_u64, 40_u64);
    let mut tasks = JoinSet::new();
    for writer in 0..writers {
        let (db, emitter, keys) = (rig.db.clone(), rig.emitter.clone(), keys.clone());
        tasks.spawn(async move {
            for round in 0..rounds {
                let mut conn = db.conn().await?;
                let tx = conn.tx().await?;
                // Half of them take their transaction id early, which is what breaks other relays.
                if (writer + round) % 2 == 0 {
                    tx.query_one("take an id", "select pg_current_xact_id()::text", &[]).await?;
                }
                let turn = usize::try_from(writer * 31 + round * 7)?;
                tx.query_one(
                    "dawdle",
                    "select pg_sleep($1)::text",
                    &[&(f64::from(u8::try_from(turn % 10)?) / 1_000.0)],
                )
                .await?;
                let key = &keys[turn % keys.len()];
                let sql = "update versions set version = version + 1 where key = $1 returning version";
                let version: i64 = tx.query_one("bump", sql, &[key]).await?.get(0);
                emitter.append(&tx, &[draft(key, version)]).await?;
                tx.query_one(
                    "dawdle",
                    "select pg_sleep($1)::text",
                    &[&(f64::from(u8::try_from(turn % 7)?) / 1_000.0)],
                )
                .await?;
                if round % 9 == 8 {
                    tx.rollback().await?;
                } else {
                    tx.commit().await?;
                }
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    let appended = rig.count("select count(*) from system.outbox_events").await?;
    wait_for("all events to be numbered", async || {
        Ok(rig.count("select count(*) from system.bus_log").await? == appended)
    })
    .await?;
    relay.stop().await?;
    let conn = rig.db.conn().await?;
    let mut versions: HashMap<String, i64> = HashMap::new();
    let mut total = 0;
    for part in 0..PARTS {
        for (expected, row) in (1_i64..).zip(buslog::read(&conn, STREAM, part, 0, 100_000).await?) {
            assert_eq!(row.pseq, expected, "the numbers of part {part} have a hole");
            let envelope: tidemark_model::envelope::Envelope = serde_json::from_str(&row.envelope)?;
            let version = envelope.payload["finalized_height"].as_i64().expect("an integer");
            let last = versions.insert(envelope.partition_key.clone(), version).unwrap_or(0);
            assert!(version > last, "key {} went from {last} to {version}", envelope.partition_key);
            total += 1;
        }
    }
    assert_eq!(total, appended);
    Ok(())
}

#[tokio::test]
async fn a_zombie_relay_is_fenced() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let short =
        RelayOptions { owner: "old".into(), lease_ttl: Duration::from_millis(1), ..RelayOptions::default() };
    let old = Relay::new(rig.db.clone(), rig.bus.clone(), rig.tails.clone(), short);
    let new = rig.relay();
    rig.emit(&[("a", 1)]).await?;
    let stale = old.claim().await?.expect("free");
    assert_eq!(old.number(stale).await?.rows, 1);
    wait_for("the lease to run out", async || Ok(new.claim().await?.is_some())).await?;
    rig.emit(&[("a", 2)]).await?;
    match old.number(stale).await {
        Err(BusError::Store(error)) => assert_eq!(error.verdict(), Verdict::Fenced),
        other => panic!("the zombie got {other:?}"),
    }
    assert_eq!(rig.count("select count(*) from system.bus_log").await?, 1);
    Ok(())
}

#[tokio::test]
async fn two_relays_at_once_have_one_owner() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let first = rig.relay();
    assert!(first.claim().await?.is_some());
    assert!(rig.relay().claim().await?.is_none());
    Ok(())
}

#[tokio::test]
async fn the_lease_of_a_dead_relay_is_free_at_once_and_its_fence_holds() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let hour = RelayOptions { lease_ttl: Duration::from_secs(3_600), ..support::relay_options() };
    let relay = || Relay::new(rig.db.clone(), rig.bus.clone(), rig.tails.clone(), hour.clone());
    let named = |owner: &str| {
        let options = RelayOptions { owner: owner.to_owned(), ..hour.clone() };
        Relay::new(rig.db.clone(), rig.bus.clone(), rig.tails.clone(), options)
    };
    let dead = named("dead");
    let stale = dead.claim().await?.expect("free");
    assert!(relay().claim().await?.is_none(), "somebody alive holds it for an hour");
    drop(dead); // Its connection closes, as the kernel does it for a killed process.
    let heir = named("heir");
    wait_for("the heir to have it", async || Ok(heir.claim().await?.is_some())).await?;
    rig.emit(&[("a", 1)]).await?;
    match relay().number(stale).await {
        Err(BusError::Store(error)) => assert_eq!(error.verdict(), Verdict::Fenced),
        other => panic!("a dead relay's fence let {other:?} through"),
    }
    Ok(())
}

#[tokio::test]
async fn a_window_larger_than_a_transaction_is_numbered_in_pieces() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let options = RelayOptions { window_rows_max: 7, ..support::relay_options() };
    let relay = Relay::new(rig.db.clone(), rig.bus.clone(), rig.tails.clone(), options);
    let lease = relay.claim().await?.expect("free");
    for value in 1..=20 {
        rig.emit(&[("a", value), ("b", value)]).await?;
    }
    let mut rows = Vec::new();
    loop {
        let numbered = relay.number(lease).await?;
        if numbered.rows == 0 {
            break;
        }
        rows.push(numbered.rows);
        if numbered.rows == 7 && rows.len() == 2 {
            rig.emit(&[("a", 21), ("b", 21)]).await?; // Belongs to the next window.
        }
    }
    assert_eq!(rows.iter().sum::<u64>(), 42);
    let gaps = rig
        .count("select count(*) from (select pseq - row_number() over (partition by stream, part order by pseq) as off, outbox_seq - lag(outbox_seq) over (partition by stream, part order by pseq) as step from system.bus_log) x where off <> 0 or step <= 0")
        .await?;
    assert_eq!(gaps, 0);
    Ok(())
}

#[tokio::test]
async fn a_restored_dump_is_drained_by_sequence_and_old_xids_do_not_come_back() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let relay = rig.relay();
    let lease = relay.claim().await?.expect("free");
    rig.emit(&[("a", 1), ("a", 2)]).await?;
    relay.number(lease).await?;
    rig.emit(&[("a", 3)]).await?;
    // As after a restore: another cluster wrote the cursor and the xids, which are ahead of ours.
    rig.sql(
        "update system.outbox_events set xid = (pg_current_xact_id()::text::bigint + 3)::text::xid8;
         update system.relay_cursor set system_identifier = 'another', snapshot = '900000000:900000000:'",
    )
    .await?;
    let lease = relay.claim().await?.expect("still the owner");
    for value in 4..=12 {
        rig.emit(&[("a", value)]).await?;
        relay.number(lease).await?;
    }
    assert_eq!(rig.count("select count(*) from system.bus_log").await?, 12);
    assert_eq!(rig.count("select count(distinct outbox_seq) from system.bus_log").await?, 12);
    assert_eq!(rig.count("select max(pseq) from system.bus_log").await?, 12);
    Ok(())
}

#[tokio::test]
async fn another_partition_count_is_refused() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    rig.emit(&[("a", 1)]).await?;
    let options =
        EmitterOptions { partitions: Partitions::with_default(PARTS + 1), ..EmitterOptions::default() };
    let other = Emitter::new(options, rig.registry.clone());
    let mut conn = rig.db.conn().await?;
    let tx = conn.tx().await?;
    match other.append(&tx, &[draft("a", 2)]).await {
        Err(OutboxError::PartitionsChanged { recorded, configured, .. }) => {
            assert_eq!((recorded, configured), (PARTS, PARTS + 1));
        }
        other => panic!("got {other:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn the_emitter_refuses_what_must_not_travel() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let mut conn = rig.db.conn().await?;
    let tx = conn.tx().await?;
    let mut wrong = draft("a", 1);
    wrong.payload["surprise"] = 1.into();
    assert!(matches!(rig.emitter.append(&tx, &[wrong]).await, Err(OutboxError::Schema(_))));
    let mut unknown = draft("a", 1);
    unknown.subject = "ledger.finality.advanced.v9".parse()?;
    assert!(matches!(rig.emitter.append(&tx, &[unknown]).await, Err(OutboxError::Schema(_))));
    let mut large = draft("a", 1);
    large.partition_key = "x".repeat(300 * 1024);
    assert!(matches!(rig.emitter.append(&tx, &[large]).await, Err(OutboxError::TooLarge { .. })));
    let mut nul = draft("a", 1);
    nul.partition_key = "a\0b".into();
    assert!(matches!(rig.emitter.append(&tx, &[nul]).await, Err(OutboxError::Nul { .. })));
    Ok(())
}

#[tokio::test]
async fn the_stored_envelope_is_whole() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    rig.emit(&[("a", 1)]).await?;
    let relay = rig.relay();
    let lease = relay.claim().await?.expect("free");
    relay.number(lease).await?;
    let conn = rig.db.conn().await?;
    let part = tidemark_model::partition::partition_of("a", PARTS);
    let rows = buslog::read(&conn, STREAM, part, 0, 10).await?;
    let value: serde_json::Value = serde_json::from_str(&rows[0].envelope)?;
    rig.registry.validate_envelope(&value)?;
    let envelope: tidemark_model::envelope::Envelope = serde_json::from_value(value)?;
    assert!(envelope.outbox.is_some() && envelope.traceparent.is_some());
    rig.registry.validate(&envelope)?;
    Ok(())
}
