//! Retention drops whole days, and never what somebody still needs.

mod support;

use std::sync::Arc;
use std::time::Duration;

use support::{RECORDER, Recorder, Rig};
use tidemark_bus::retention::{RetentionOptions, run};
use tidemark_store::buslog;

#[tokio::test]
async fn an_old_day_goes_when_everybody_has_handled_it() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let day = "(now() at time zone 'utc')::date - 40";
    rig.sql(&format!(
        "do $$ declare d date := {day}; begin
           execute format('create table system.outbox_events_%s partition of system.outbox_events for values from (%L) to (%L)', to_char(d, 'YYYYMMDD'), d, d + 1);
           execute format('create table system.bus_log_%s partition of system.bus_log for values from (%L) to (%L)', to_char(d, 'YYYYMMDD'), d, d + 1);
         end $$"
    ))
    .await?;
    rig.emit(&[("a", 1), ("b", 1)]).await?;
    rig.sql(&format!("update system.outbox_events set day = {day}")).await?;
    rig.emit(&[("a", 2), ("b", 2)]).await?;

    let options = RetentionOptions::default();
    let report = run(&rig.db, rig.bus.as_ref(), &options).await?;
    assert!(report.dropped.is_empty() && report.kept.len() == 1, "no number yet: {report:?}");

    let relay = rig.run_relay();
    rig.dispatcher(Arc::new(Recorder::default())).declare().await?;
    let numbered = "select count(*) from system.bus_log";
    support::wait_for("numbers", async || Ok(rig.count(numbered).await? == 4)).await?;
    let report = run(&rig.db, rig.bus.as_ref(), &options).await?;
    assert!(report.kept[0].1.contains(RECORDER), "a declared consumer still needs it: {report:?}");

    let handler = rig.run_handler(Arc::new(Recorder::default()));
    rig.caught_up(RECORDER, 4).await?;
    let long = RetentionOptions { operational: Duration::from_secs(86_400 * 60), ..options.clone() };
    assert!(run(&rig.db, rig.bus.as_ref(), &long).await?.dropped.is_empty(), "younger than its class allows");
    assert_eq!(run(&rig.db, rig.bus.as_ref(), &options).await?.dropped.len(), 1);
    assert_eq!(rig.count(numbered).await?, 2);

    // The rest goes on, and a reader from the start begins where the log does.
    rig.emit(&[("a", 3)]).await?;
    rig.caught_up(RECORDER, 5).await?;
    assert_eq!(rig.effects(RECORDER).await?["a"], [1, 2, 3]);
    let conn = rig.db.conn().await?;
    let part = tidemark_model::partition::partition_of("a", support::PARTS);
    assert!(buslog::read(&conn, support::STREAM, part, 0, 10).await?[0].pseq > 1);
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test]
async fn partitions_are_made_ahead_and_twice_is_once() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let conn = rig.db.conn().await?;
    buslog::ensure_partitions(&conn).await?;
    buslog::ensure_partitions(&conn).await?;
    for table in ["outbox_events", "bus_log", "inbox"] {
        assert_eq!(buslog::days(&conn, table).await?.len(), 3, "{table}");
    }
    rig.emit(&[("a", 1)]).await?;
    assert_eq!(rig.count("select count(*) from system.outbox_events_default").await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_day_without_partition_still_takes_events() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    rig.emit(&[("a", 1)]).await?; // Nobody made a partition yet.
    assert_eq!(rig.count("select count(*) from system.outbox_events_default").await?, 1);
    // The default partition holds this day now; making partitions must not fail over it.
    buslog::ensure_partitions(&rig.db.conn().await?).await?;
    rig.emit(&[("a", 2)]).await?;
    let (relay, handler) = (rig.run_relay(), rig.run_handler(Arc::new(Recorder::default())));
    rig.caught_up(RECORDER, 2).await?;
    assert_eq!(rig.effects(RECORDER).await?["a"], [1, 2]);
    handler.stop().await?;
    relay.stop().await
}
