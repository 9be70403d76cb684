//! One suite, run unchanged on every engine with real servers: whatever the engine does, every event has its
//! effect once and in the order of its key.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::ensure;
use support::bench::{Bench, Disk, Engine};
use support::server::{Kind, Server};
use support::{PARTS, RECORDER, Recorder, Rig, STREAM, keys, wait_for};
use tidemark_bus::dlq::{self, RetryOptions};
use tidemark_bus::redis::{Persistence, RedisBus, TaskGroup};
use tidemark_bus::replay::{ReplayRequest, Selector, replay};
use tidemark_bus::{Bus, Numbered};
use tidemark_model::redact::RedactedUrl;
use tidemark_store::buslog;
use tidemark_store::dlq::Filter;
use time::OffsetDateTime;

async fn order_per_key_and_no_loss(engine: Engine) -> anyhow::Result<()> {
    let bench = Bench::new(engine).await?;
    let keys = keys(12);
    let (relay, handler) = (bench.rig.run_relay(), bench.rig.run_handler(Arc::new(Recorder::default())));
    bench.emit(&keys, 1..=40).await?;
    bench.rig.caught_up(RECORDER, 480).await?;
    bench.rig.assert_once_in_order(RECORDER, &keys, 40).await?;
    handler.stop().await?;
    relay.stop().await
}

async fn a_repeated_publish_has_one_effect(engine: Engine) -> anyhow::Result<()> {
    let bench = Bench::new(engine).await?;
    let keys = keys(4);
    bench.emit(&keys, 1..=10).await?;
    let relay = bench.rig.relay();
    let lease = relay.claim().await?.expect("free");
    relay.number(lease).await?;
    publish_all(&bench.rig, 0).await?;
    publish_all(&bench.rig, 0).await?;
    publish_all(&bench.rig, 5).await?;
    let handler = bench.rig.run_handler(Arc::new(Recorder::default()));
    bench.rig.caught_up(RECORDER, 40).await?;
    bench.rig.assert_once_in_order(RECORDER, &keys, 10).await?;
    handler.stop().await
}

async fn publish_all(rig: &Rig, after: i64) -> anyhow::Result<()> {
    let conn = rig.db.conn().await?;
    for part in 0..PARTS {
        let rows = buslog::read(&conn, STREAM, part, after, 10_000).await?;
        let events: Vec<Numbered> = rows
            .into_iter()
            .map(|row| Numbered {
                pseq: row.pseq,
                stream: STREAM.into(),
                part,
                event_id: row.event_id,
                body: row.envelope.into(),
            })
            .collect();
        rig.bus.publish(&events).await?;
    }
    Ok(())
}

async fn a_crash_between_publish_and_record_changes_nothing(engine: Engine) -> anyhow::Result<()> {
    let bench = Bench::new(engine).await?;
    let keys = keys(5);
    let handler = bench.rig.run_handler(Arc::new(Recorder::default()));
    bench.emit(&keys, 1..=20).await?;
    let dying = bench.rig.relay();
    let lease = dying.claim().await?.expect("free");
    dying.number(lease).await?;
    publish_all(&bench.rig, 0).await?; // And here it dies: nothing was recorded.
    drop(dying);
    bench.rig.sql("update system.relay_cursor set lease_expires_at = null").await?;
    let relay = bench.rig.run_relay();
    bench.emit(&keys, 21..=30).await?;
    bench.rig.caught_up(RECORDER, 150).await?;
    bench.rig.assert_once_in_order(RECORDER, &keys, 30).await?;
    handler.stop().await?;
    relay.stop().await
}

async fn a_crash_between_effect_and_ack_changes_nothing(engine: Engine) -> anyhow::Result<()> {
    let bench = Bench::new(engine).await?;
    let keys = keys(6);
    let relay = bench.rig.run_relay();
    for round in 0..3_i64 {
        let slow = Arc::new(Recorder { slow: Some(Duration::from_millis(1)), ..Recorder::default() });
        let handler = bench.rig.run_handler(slow.clone());
        bench.emit(&keys, round * 10 + 1..=round * 10 + 10).await?;
        wait_for("a batch in flight", async || Ok(slow.calls.load(Ordering::SeqCst) > 2)).await?;
        handler.kill().await;
        bench.rig.sql("update system.consumer_positions set lease_expires_at = null, owner = null").await?;
    }
    let handler = bench.rig.run_handler(Arc::new(Recorder::default()));
    bench.rig.caught_up(RECORDER, 180).await?;
    bench.rig.assert_once_in_order(RECORDER, &keys, 30).await?;
    handler.stop().await?;
    relay.stop().await
}

async fn a_duplicate_while_the_first_is_in_flight_has_one_effect(engine: Engine) -> anyhow::Result<()> {
    let bench = Bench::new(engine).await?;
    let rig = &bench.rig;
    let relay = rig.run_relay();
    let slow = Arc::new(Recorder { slow: Some(Duration::from_millis(200)), ..Recorder::default() });
    let first = rig.run_handler(slow.clone());
    let one = support::draft("a", 1);
    rig.emit_drafts(std::slice::from_ref(&one)).await?;
    wait_for("the first to be in flight", async || Ok(slow.calls.load(Ordering::SeqCst) > 0)).await?;
    rig.emit_drafts(&[one]).await?; // The same event id again, under another number.
    let second = rig.run_handler(Arc::new(Recorder::default()));
    rig.sql("update system.consumer_positions set lease_expires_at = now() - interval '1 hour'").await?;
    rig.emit(&[("a", 2)]).await?;
    rig.caught_up(RECORDER, 3).await?;
    rig.assert_once_in_order(RECORDER, &["a".to_owned()], 2).await?;
    first.stop().await?;
    second.stop().await?;
    relay.stop().await
}

async fn a_slow_consumer_gets_everything(engine: Engine) -> anyhow::Result<()> {
    let bench = Bench::new(engine).await?;
    let keys = keys(3);
    let relay = bench.rig.run_relay();
    bench.emit(&keys, 1..=60).await?;
    let slow = Recorder { slow: Some(Duration::from_millis(3)), ..Recorder::default() };
    let handler = bench.rig.run_handler(Arc::new(slow));
    bench.emit(&keys, 61..=100).await?;
    bench.rig.caught_up(RECORDER, 300).await?;
    bench.rig.assert_once_in_order(RECORDER, &keys, 100).await?;
    handler.stop().await?;
    relay.stop().await
}

async fn a_poison_key_is_parked_and_released_in_order(engine: Engine) -> anyhow::Result<()> {
    let bench = Bench::new(engine).await?;
    let rig = &bench.rig;
    let keys = keys(6);
    let recorder = Arc::new(Recorder::default());
    *recorder.poison.lock().expect("free") = Some(("key-2".into(), 4));
    let (relay, handler) = (rig.run_relay(), rig.run_handler(recorder.clone()));
    bench.emit(&keys, 1..=10).await?;
    rig.caught_up(RECORDER, 60).await?;
    let effects = rig.effects(RECORDER).await?;
    ensure!(effects["key-2"] == [1, 2, 3], "parked too late or too early: {:?}", effects["key-2"]);
    ensure!(keys.iter().filter(|key| *key != "key-2").all(|key| effects[key].len() == 10), "others stopped");

    let desk = bench.desk(recorder.clone());
    let failed = dlq::release(&desk, RECORDER, "key-2", "tester", None).await?;
    ensure!(failed.applied == 0 && failed.failed.is_some() && !failed.unparked, "{failed:?}");
    // A letter behind the first may not overtake it.
    let all = dlq::list(&rig.db, &Filter::default(), 100).await?;
    let filter = Filter { ids: Some(vec![all[1].id]), ..Filter::default() };
    let options =
        RetryOptions { by: "tester".into(), reason: None, limit: 10, per_second: None, dry_run: false };
    ensure!(dlq::retry(&desk, &filter, &options).await?.waiting == [all[1].id]);

    *recorder.poison.lock().expect("free") = None;
    let (released, emitted) = tokio::join!(
        dlq::release(&desk, RECORDER, "key-2", "tester", Some("fixed")),
        bench.emit(&keys, 11..=20), // New followers come in meanwhile.
    );
    emitted?;
    let released = released?;
    ensure!(released.failed.is_none() && released.unparked, "{released:?}");
    rig.caught_up(RECORDER, 120).await?;
    rig.assert_once_in_order(RECORDER, &keys, 20).await?;
    ensure!(rig.count("select count(*) from system.parked_keys").await? == 0);
    ensure!(rig.count("select count(*) from system.dlq where resolved_at is null").await? == 0);
    ensure!(rig.count("select count(*) from system.audit_log where action = 'dlq.released'").await? >= 7);
    handler.stop().await?;
    relay.stop().await
}

async fn replay_goes_by_number_and_by_time(engine: Engine) -> anyhow::Result<()> {
    let bench = Bench::new(engine).await?;
    let rig = &bench.rig;
    let recorder = Arc::new(Recorder::default());
    let (relay, handler) = (rig.run_relay(), rig.run_handler(recorder.clone()));
    let one = ["a".to_owned()];
    bench.emit(&one, 1..=10).await?;
    rig.caught_up(RECORDER, 10).await?;
    let middle = OffsetDateTime::now_utc();
    bench.emit(&one, 11..=20).await?;
    rig.caught_up(RECORDER, 20).await?;
    let desk = bench.desk(recorder);
    let mut request = ReplayRequest {
        handler: RECORDER.into(),
        selector: Selector::Numbers { part: None, from: 3, to: 5 },
        by: "tester".into(),
        reason: None,
        dry_run: true,
        per_second: None,
    };
    ensure!(replay(&desk, &request).await?.events == 3);
    request.dry_run = false;
    ensure!(replay(&desk, &request).await?.events == 3);
    request.selector =
        Selector::Time { from: middle, to: OffsetDateTime::now_utc() + Duration::from_secs(60) };
    ensure!(replay(&desk, &request).await?.events == 10);
    request.selector = Selector::Heights { network_id: Some(1), from: 7, to: 8 };
    ensure!(replay(&desk, &request).await?.events == 2);
    let expected: Vec<i64> = (1..=20).chain(3..=5).chain(11..=20).chain(7..=8).collect();
    ensure!(rig.effects(RECORDER).await?["a"] == expected);
    ensure!(rig.count("select count(*) from effects where replay").await? == 15);
    ensure!(rig.count("select count(*) from system.replays where status = 'done'").await? == 3);

    let outside = Arc::new(Recorder { acts_outside: true, ..Recorder::default() });
    ensure!(
        replay(&bench.desk(outside), &request).await.is_err(),
        "a handler with side effects was replayed"
    );
    handler.stop().await?;
    relay.stop().await
}

async fn restarted(engine: Engine, disk: Disk) -> anyhow::Result<()> {
    let mut bench = Bench::new(engine).await?;
    let keys = keys(6);
    let (relay, handler) = (bench.rig.run_relay(), bench.rig.run_handler(Arc::new(Recorder::default())));
    bench.emit(&keys, 1..=20).await?;
    bench.rig.caught_up(RECORDER, 120).await?;
    handler.stop().await?;
    // Published and not yet read by anybody when the engine dies.
    bench.emit(&keys, 21..=30).await?;
    wait_for("everything to be published", async || {
        let sql = "select count(*) from system.bus_partitions where engine <> 'postgres' and published_pseq < next_pseq - 1";
        let rows = "select coalesce(sum(next_pseq - 1), 0)::bigint from system.bus_partitions";
        Ok(bench.rig.count(sql).await? == 0 && bench.rig.count(rows).await? == 180)
    })
    .await?;
    bench.restart(disk).await?;
    let handler = bench.rig.run_handler(Arc::new(Recorder::default()));
    wait_for("a database that answers", async || Ok(bench.rig.sql("select 1").await.is_ok())).await?;
    bench.emit(&keys, 31..=40).await?;
    bench.rig.caught_up(RECORDER, 240).await?;
    bench.rig.assert_once_in_order(RECORDER, &keys, 40).await?;
    handler.stop().await?;
    relay.stop().await
}

async fn an_engine_restarted_with_its_disk_loses_nothing(engine: Engine) -> anyhow::Result<()> {
    restarted(engine, Disk::Kept).await
}

async fn an_engine_restarted_without_its_disk_loses_nothing(engine: Engine) -> anyhow::Result<()> {
    restarted(engine, Disk::Lost).await
}

async fn an_engine_that_is_away_does_not_stop_consumers(engine: Engine) -> anyhow::Result<()> {
    let mut bench = Bench::new(engine).await?;
    let keys = keys(4);
    let (relay, handler) = (bench.rig.run_relay(), bench.rig.run_handler(Arc::new(Recorder::default())));
    bench.emit(&keys, 1..=5).await?;
    bench.rig.caught_up(RECORDER, 20).await?;
    if let Some(server) = &mut bench.server {
        server.kill()?;
    }
    bench.emit(&keys, 6..=15).await?;
    bench.rig.caught_up(RECORDER, 60).await?;
    if let Some(server) = &mut bench.server {
        server.launch()?;
    }
    bench.emit(&keys, 16..=20).await?;
    bench.rig.caught_up(RECORDER, 80).await?;
    bench.rig.assert_once_in_order(RECORDER, &keys, 20).await?;
    handler.stop().await?;
    relay.stop().await
}

macro_rules! suite {
    ($($module:ident: $engine:expr => [$($case:ident),* $(,)?];)*) => {
        $(mod $module {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() -> anyhow::Result<()> {
                super::$case($engine).await
            })*
        })*
    };
}

macro_rules! every_engine {
    ($($case:ident),* $(,)?) => {
        suite! {
            postgres: crate::Engine::Postgres => [$($case),*];
            nats: crate::Engine::Nats => [$($case),*];
            redis: crate::Engine::Redis => [$($case),*];
        }
    };
}

every_engine!(
    order_per_key_and_no_loss,
    a_repeated_publish_has_one_effect,
    a_crash_between_publish_and_record_changes_nothing,
    a_crash_between_effect_and_ack_changes_nothing,
    a_duplicate_while_the_first_is_in_flight_has_one_effect,
    a_slow_consumer_gets_everything,
    a_poison_key_is_parked_and_released_in_order,
    replay_goes_by_number_and_by_time,
    an_engine_restarted_with_its_disk_loses_nothing,
    an_engine_restarted_without_its_disk_loses_nothing,
    an_engine_that_is_away_does_not_stop_consumers,
);

#[tokio::test]
async fn redis_says_what_its_disk_is_worth_and_shares_tasks() -> anyhow::Result<()> {
    let server = Server::start(Kind::Redis)?;
    let rig = Rig::postgres().await?;
    let url = RedactedUrl::parse(&server.url())?;
    let bus = RedisBus::connect(&url, "tm", rig.db.clone(), rig.tails.clone()).await?;
    assert_eq!(bus.persistence().await?, Persistence::AppendOnly);
    let event = |pseq| Numbered {
        pseq,
        stream: STREAM.into(),
        part: 0,
        event_id: uuid::Uuid::nil(),
        body: "{}".into(),
    };
    bus.publish(&[event(1), event(2), event(3)]).await?;
    let mut one = TaskGroup::join(&bus, STREAM, 0, "g", "one").await?;
    let mut two = TaskGroup::join(&bus, STREAM, 0, "g", "two").await?;
    let wait = Duration::from_millis(50);
    let first = one.next(2, wait).await?;
    assert_eq!(two.next(10, wait).await?.len(), 1);
    one.ack(&first[0].id).await?;
    // `one` dies with a task in hand; another entry was trimmed before `two` finished it.
    bus.trim(STREAM, 0, 0).await?;
    let reclaimed = two.reclaim(Duration::ZERO, 10).await?;
    assert!(reclaimed.tasks.iter().any(|task| task.id == first[1].id), "{reclaimed:?}");
    Ok(())
}

/// The numbers an engine holds of another history must never be taken for ours.
async fn numbers_of_another_history_are_not_read(engine: Engine) -> anyhow::Result<()> {
    let bench = Bench::new(engine).await?;
    let (relay, handler) = (bench.rig.run_relay(), bench.rig.run_handler(Arc::new(Recorder::default())));
    bench.rig.emit(&[("a", 100), ("a", 101)]).await?;
    bench.rig.caught_up(RECORDER, 2).await?;
    handler.stop().await?;
    relay.stop().await?;
    // Another database on the same broker gives the same numbers to other events.
    let mut other = Bench { rig: Rig::postgres().await?, server: None };
    let server = bench.server.as_ref().expect("a broker");
    other.rig.bus = Bench::bus(engine, server, &other.rig).await?;
    let (relay, handler) = (other.rig.run_relay(), other.rig.run_handler(Arc::new(Recorder::default())));
    other.rig.emit(&[("a", 1), ("a", 2), ("a", 3)]).await?;
    other.rig.caught_up(RECORDER, 3).await?;
    other.rig.assert_once_in_order(RECORDER, &["a".to_owned()], 3).await?;
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn nats_does_not_mix_histories() -> anyhow::Result<()> {
    numbers_of_another_history_are_not_read(Engine::Nats).await
}
#[tokio::test(flavor = "multi_thread")]
async fn redis_does_not_mix_histories() -> anyhow::Result<()> {
    numbers_of_another_history_are_not_read(Engine::Redis).await
}
