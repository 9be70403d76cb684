//! The six metrics of S2 §19 and the lag of a consumer, as Prometheus reads them; a large tenant's own partition.

mod support;

use std::sync::Arc;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use support::bench::{Bench, Engine};
use support::{RECORDER, Recorder, Rig, draft, partitions, wait_for};
use tidemark_store::outbox::{Emitter, EmitterOptions};

/// The value of the first line that begins with `name` and holds all of `labels`.
fn value(handle: &PrometheusHandle, name: &str, labels: &[&str]) -> Option<f64> {
    handle.render().lines().find_map(|line| {
        let rest = line.strip_prefix(name)?;
        let ours = rest.starts_with(['{', ' ']) && labels.iter().all(|label| rest.contains(label));
        ours.then(|| rest.rsplit(' ').next()?.parse().ok())?
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_of_the_backbone_says_what_happened() -> anyhow::Result<()> {
    let seen = PrometheusBuilder::new().install_recorder()?;
    let bench = Bench::new(Engine::Nats).await?;
    let rig = &bench.rig;
    let handler = r#"handler="recorder""#;
    // One key dies, one event does not fit its schema, the rest goes.
    let recorder = Arc::new(Recorder::default());
    *recorder.poison.lock().expect("free") = Some(("bad".into(), 1));
    rig.emit(&[("bad", 1), ("bad", 2), ("good", 1), ("odd", 1)]).await?;
    rig.sql(
        "update system.outbox_events set envelope = jsonb_set(envelope::jsonb, '{payload,finalized_height}', '\"x\"')::json
         where partition_key = 'odd'",
    )
    .await?;
    let mut refused = draft("good", 2);
    refused.payload["finalized_height"] = "x".into();
    assert!(rig.emit_drafts(&[refused]).await.is_err());
    let relay = rig.run_relay();
    let working = rig.run_handler(recorder);
    rig.caught_up(RECORDER, 4).await?;
    wait_for("metrics of what was handled", async || {
        Ok(value(&seen, "dlq_depth", &[handler]) == Some(3.0)
            && value(&seen, "event_publish_rate", &["nats"]) == Some(4.0)
            && value(&seen, "consumer_lag_messages", &[handler]) == Some(0.0))
    })
    .await?;
    assert_eq!(value(&seen, "event_consume_rate", &[handler]), Some(1.0));
    let failures = |side| value(&seen, "schema_validation_failures", &["ledger.finality.advanced.v1", side]);
    assert_eq!((failures("produce"), failures("consume")), (Some(1.0), Some(1.0)));
    assert_eq!(value(&seen, "outbox_lag_seconds", &[]), Some(0.0));
    working.stop().await?;
    relay.stop().await?;

    // Nobody relays: events wait in the outbox. Somebody relays and nobody handles: the consumer lags.
    rig.emit(&[("good", 3), ("good", 4)]).await?;
    let relay = rig.run_relay();
    wait_for("the relay to be done", async || {
        Ok(value(&seen, "event_publish_rate", &["nats"]) == Some(6.0)
            && value(&seen, "outbox_unpublished_count", &[]) == Some(0.0))
    })
    .await?;
    rig.sql("update system.bus_log set numbered_at = now() - interval '10 minutes'").await?;
    // A dispatcher of another handler measures for all of them.
    let slow = Arc::new(Recorder::default());
    slow.defer.store(true, std::sync::atomic::Ordering::SeqCst);
    *slow.poison.lock().expect("free") = Some(("good".into(), 3));
    let working = rig.run_handler(slow);
    wait_for("the lag to be seen", async || {
        let seconds = value(&seen, "consumer_lag_seconds", &[handler]);
        Ok(value(&seen, "consumer_lag_messages", &[handler]) == Some(2.0)
            && seconds.is_some_and(|s| s > 500.0))
    })
    .await?;
    working.stop().await?;
    relay.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_tenants_events_go_through_its_own_partition() -> anyhow::Result<()> {
    let mut rig = Rig::postgres().await?;
    let own = partitions().with_tenant("acme");
    let last = own.of(support::STREAM) - 1;
    let options =
        EmitterOptions { partitions: own.clone(), tenant_id: "acme".into(), ..EmitterOptions::default() };
    rig.emitter = Emitter::new(options, rig.registry.clone());
    rig.emit(&[("a", 1), ("b", 1), ("c", 1)]).await?;
    let others = EmitterOptions { partitions: own.clone(), ..EmitterOptions::default() };
    rig.emitter = Emitter::new(others, rig.registry.clone());
    rig.emit(&[("d", 1), ("e", 1)]).await?;
    let options =
        tidemark_bus::dispatch::DispatcherOptions { partitions: own, ..support::dispatcher_options() };
    let relay = rig.run_relay();
    let working = rig.run_dispatcher(rig.dispatcher_with(Arc::new(Recorder::default()), options));
    rig.caught_up(RECORDER, 5).await?;
    let in_own = format!("select count(*) from effects where part = {last}");
    assert_eq!(rig.count(&in_own).await?, 3);
    assert_eq!(rig.count(&format!("{in_own} and key in ('d', 'e')")).await?, 0);
    working.stop().await?;
    relay.stop().await
}
