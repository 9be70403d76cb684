//! The dispatcher: one effect per event, whatever happens.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use support::{RECORDER, Recorder, Rig, Running, dispatcher_options, draft, keys, wait_for};
use tidemark_bus::dispatch::{Accepts, Delivered, DispatcherOptions, HandleError, Handler};
use tidemark_bus::news::News;
use tidemark_bus::relay::{Relay, RelayOptions};
use tidemark_store::{Tx, dlq};

async fn emit_rounds(
    rig: &Rig,
    keys: &[String],
    rounds: std::ops::RangeInclusive<i64>,
) -> anyhow::Result<()> {
    for value in rounds {
        let pairs: Vec<(&str, i64)> = keys.iter().map(|key| (key.as_str(), value)).collect();
        rig.emit(&pairs).await?;
    }
    Ok(())
}

#[tokio::test]
async fn twice_is_once() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let events = [draft("a", 1), draft("a", 2)];
    rig.emit_drafts(&events).await?;
    rig.emit_drafts(&events).await?; // The same ids again, as after a retried transaction.
    let (relay, handler) = (rig.run_relay(), rig.run_handler(Arc::new(Recorder::default())));
    rig.caught_up(RECORDER, 4).await?;
    rig.assert_once_in_order(RECORDER, &["a".to_owned()], 2).await?;
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_is_once() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let keys = keys(10);
    let relay = rig.run_relay();
    let one = rig.run_handler(Arc::new(Recorder::default()));
    let two = rig.run_handler(Arc::new(Recorder::default()));
    emit_rounds(&rig, &keys, 1..=20).await?;
    rig.caught_up(RECORDER, 200).await?;
    rig.assert_once_in_order(RECORDER, &keys, 20).await?;
    one.stop().await?;
    two.stop().await?;
    relay.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_between_is_once() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let keys = keys(6);
    let relay = rig.run_relay();
    for round in 0..5_i64 {
        let slow = Recorder { slow: Some(Duration::from_millis(1)), ..Recorder::default() };
        let handler = rig.run_handler(Arc::new(slow));
        emit_rounds(&rig, &keys, round * 10 + 1..=round * 10 + 10).await?;
        let seen = round * 20;
        wait_for("some effects", async || Ok(rig.count("select count(*) from effects").await? > seen))
            .await?;
        handler.kill().await; // In the middle of a batch.
        // The dead process's leases run out; the test does not wait for that.
        rig.sql("update system.consumer_positions set lease_expires_at = null, owner = null").await?;
    }
    let handler = rig.run_handler(Arc::new(Recorder::default()));
    rig.caught_up(RECORDER, 300).await?;
    rig.assert_once_in_order(RECORDER, &keys, 50).await?;
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test]
async fn a_poison_event_parks_its_key_and_the_rest_goes_on() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let keys = keys(8);
    let recorder = Arc::new(Recorder::default());
    *recorder.poison.lock().expect("free") = Some(("key-3".into(), 5));
    let (relay, handler) = (rig.run_relay(), rig.run_handler(recorder.clone()));
    emit_rounds(&rig, &keys, 1..=10).await?;
    rig.caught_up(RECORDER, 80).await?;
    let effects = rig.effects(RECORDER).await?;
    assert_eq!(effects["key-3"], vec![1, 2, 3, 4]);
    let others: Vec<String> = keys.iter().filter(|key| *key != "key-3").cloned().collect();
    for key in &others {
        assert_eq!(effects[key], (1..=10).collect::<Vec<i64>>(), "{key}");
    }
    let conn = rig.db.conn().await?;
    let letters = dlq::list(&conn, &dlq::Filter::default(), 100).await?;
    assert_eq!(letters.len(), 6);
    assert_eq!((letters[0].kind.as_str(), letters[0].attempts), ("poison", 10));
    assert!(letters[0].error.contains("told to fail"));
    assert!(letters[1..].iter().all(|letter| letter.kind == "follower"));
    assert!(letters.windows(2).all(|pair| pair[0].pseq < pair[1].pseq));
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test]
async fn who_waits_in_the_process_hears_of_a_batch_that_can_be_read() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let news = News::default();
    let options = DispatcherOptions { news: news.clone(), ..dispatcher_options() };
    let relay = rig.run_relay();
    let handler = rig.run_dispatcher(rig.dispatcher_with(Arc::new(Recorder::default()), options));
    let (heard, emitted) =
        tokio::join!(tokio::time::timeout(Duration::from_secs(60), news.heard()), rig.emit(&[("a", 1)]));
    emitted?;
    heard?;
    assert_eq!(rig.effects(RECORDER).await?["a"], vec![1], "committed before it is told");
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test]
async fn a_panic_is_a_failed_delivery() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let recorder = Arc::new(Recorder::default());
    recorder.panics.store(true, Ordering::SeqCst);
    *recorder.poison.lock().expect("free") = Some(("a".into(), 1));
    let (relay, handler) = (rig.run_relay(), rig.run_handler(recorder.clone()));
    rig.emit(&[("a", 1), ("b", 1)]).await?;
    rig.caught_up(RECORDER, 2).await?;
    assert_eq!(
        rig.count("select count(*) from system.dlq where error like '%panicked: told to panic%'").await?,
        1
    );
    assert_eq!(rig.effects(RECORDER).await?.len(), 1);
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test]
async fn a_refused_event_is_not_tried_again() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let recorder = Arc::new(Recorder::default());
    recorder.never.store(true, Ordering::SeqCst);
    *recorder.poison.lock().expect("free") = Some(("a".into(), 1));
    let (relay, handler) = (rig.run_relay(), rig.run_handler(recorder.clone()));
    rig.emit(&[("a", 1)]).await?;
    rig.caught_up(RECORDER, 1).await?;
    assert_eq!(recorder.calls.load(Ordering::SeqCst), 1);
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test]
async fn a_deferred_event_waits_without_counting() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let recorder = Arc::new(Recorder::default());
    recorder.defer.store(true, Ordering::SeqCst);
    *recorder.poison.lock().expect("free") = Some(("a".into(), 3));
    let (relay, handler) = (rig.run_relay(), rig.run_handler(recorder.clone()));
    rig.emit(&[("a", 1), ("a", 2), ("a", 3), ("a", 4)]).await?;
    wait_for("many tries", async || Ok(recorder.calls.load(Ordering::SeqCst) > 30)).await?;
    assert_eq!(rig.count("select count(*) from system.inbox where status <> 'ACK'").await?, 0);
    assert_eq!(rig.count("select count(*) from system.dlq").await?, 0);
    assert_eq!(rig.effects(RECORDER).await?["a"], vec![1, 2]);
    *recorder.poison.lock().expect("free") = None;
    rig.caught_up(RECORDER, 4).await?;
    rig.assert_once_in_order(RECORDER, &["a".to_owned()], 4).await?;
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test]
async fn an_event_that_does_not_fit_its_schema_is_parked() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    rig.emit(&[("a", 1), ("a", 2), ("b", 1)]).await?;
    rig.sql(
        "update system.outbox_events set envelope = jsonb_set(envelope::jsonb, '{payload,finalized_height}', '\"x\"')::json
         where partition_key = 'a' and envelope->'payload'->>'finalized_height' = '1'",
    )
    .await?;
    let (relay, handler) = (rig.run_relay(), rig.run_handler(Arc::new(Recorder::default())));
    rig.caught_up(RECORDER, 3).await?;
    let conn = rig.db.conn().await?;
    let letters = dlq::list(&conn, &dlq::Filter::default(), 10).await?;
    let kinds: Vec<&str> = letters.iter().map(|letter| letter.kind.as_str()).collect();
    assert_eq!(kinds, ["schema", "follower"]);
    assert!(letters[0].error.contains("/finalized_height"), "{}", letters[0].error);
    assert_eq!(rig.effects(RECORDER).await?.len(), 1);
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test]
async fn a_zombie_consumer_is_fenced() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    let relay = rig.run_relay();
    let slow = Arc::new(Recorder { slow: Some(Duration::from_millis(300)), ..Recorder::default() });
    let zombie = rig.run_handler(slow.clone());
    rig.emit(&[("a", 1)]).await?;
    wait_for("the zombie to begin", async || Ok(slow.calls.load(Ordering::SeqCst) > 0)).await?;
    // Its leases run out while it sleeps in its handler, which holds the position's lock: the new owner
    // waits for that lock, and what the zombie does later is refused.
    let healthy =
        rig.run_dispatcher(rig.dispatcher_with(Arc::new(Recorder::default()), dispatcher_options()));
    for value in 2..=6 {
        rig.sql("update system.consumer_positions set lease_expires_at = now() - interval '1 hour'").await?;
        rig.emit(&[("a", value)]).await?;
    }
    rig.caught_up(RECORDER, 6).await?;
    rig.assert_once_in_order(RECORDER, &["a".to_owned()], 6).await?;
    zombie.stop().await?;
    healthy.stop().await?;
    relay.stop().await
}

/// Hands every event on to the next stream, as a normalizer does.
struct PassOn(tidemark_store::outbox::Emitter);

#[async_trait::async_trait]
impl Handler for PassOn {
    fn kind(&self) -> &'static str {
        "pass-on"
    }
    fn accepts(&self) -> &'static [Accepts] {
        &[Accepts { subject: "chain.finality.advanced", versions: &[1] }]
    }
    async fn apply(&self, tx: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError> {
        let passed: Vec<_> = batch
            .iter()
            .map(|event| {
                let value = event.envelope.payload["finalized_height"].as_i64().expect("an integer");
                draft(&event.envelope.partition_key, value).caused_by(&event.envelope)
            })
            .collect();
        Ok(self.0.append(tx, &passed).await?)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_woken_relay_does_not_wait_for_its_next_look() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    // A relay that looks by itself only once an hour.
    let lazy = RelayOptions {
        busy_wait: Duration::from_secs(3_600),
        idle_wait_max: Duration::from_secs(3_600),
        ..support::relay_options()
    };
    let relay = Relay::new(rig.db.clone(), rig.bus.clone(), rig.tails.clone(), lazy);
    let wake = relay.handle();
    let running = Running::start(move |stop| async move { relay.run(stop).await });
    let options = DispatcherOptions { relay: Some(wake.clone()), ..dispatcher_options() };
    let passing = rig.dispatcher_with(Arc::new(PassOn(rig.emitter.clone())), options);
    let passing = rig.run_dispatcher(passing);
    let recording = rig.run_handler(Arc::new(Recorder::default()));
    for value in 1..=5 {
        let mut event = draft("a", value);
        event.subject = "chain.finality.advanced.v1".parse()?;
        event.payload["finalized_hash"] = "0xab".into();
        event.payload["head_height"] = value.into();
        rig.emit_drafts(&[event]).await?;
        wake.wake();
        wait_for("two hops", async || Ok(rig.count("select count(*) from effects").await? == value)).await?;
    }
    rig.assert_once_in_order(RECORDER, &["a".to_owned()], 5).await?;
    // The trace goes all the way.
    let broken = "select count(*) from system.outbox_events o where o.stream = 'ledger' and not exists (
                      select from system.outbox_events c where c.stream = 'chain'
                        and c.correlation_id = o.correlation_id
                        and c.envelope->>'eventId' = o.envelope->>'causationId'
                        and c.envelope->>'traceparent' = o.envelope->>'traceparent')";
    assert_eq!(rig.count(broken).await?, 0);
    passing.stop().await?;
    recording.stop().await?;
    running.stop().await
}

/// Does something before the transaction, and cannot go without it.
#[derive(Default)]
struct Prepares {
    ready: std::sync::Mutex<std::collections::HashSet<uuid::Uuid>>,
}

#[async_trait::async_trait]
impl Handler for Prepares {
    fn kind(&self) -> &'static str {
        RECORDER
    }
    fn accepts(&self) -> &'static [Accepts] {
        &[Accepts { subject: "ledger.finality.advanced", versions: &[1] }]
    }
    async fn prepare(&self, batch: &[Delivered], _later: &[Delivered]) -> Result<(), HandleError> {
        self.ready.lock().expect("free").extend(batch.iter().map(Delivered::event_id));
        Ok(())
    }
    async fn apply(&self, _: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError> {
        let mut ready = self.ready.lock().expect("free");
        let all = batch.iter().all(|event| ready.remove(&event.event_id()));
        if all { Ok(()) } else { Err(HandleError::retry("not prepared")) }
    }
}

/// Takes what is waiting by twos, and notes how much that was and how much stood behind it.
#[derive(Default)]
struct ByTwos {
    taken: std::sync::Mutex<Vec<(usize, usize)>>,
}

#[async_trait::async_trait]
impl Handler for ByTwos {
    fn kind(&self) -> &'static str {
        RECORDER
    }
    fn accepts(&self) -> &'static [Accepts] {
        &[Accepts { subject: "ledger.finality.advanced", versions: &[1] }]
    }
    fn first_of(&self, waiting: &[Delivered]) -> usize {
        waiting.len().min(2)
    }
    async fn prepare(&self, batch: &[Delivered], later: &[Delivered]) -> Result<(), HandleError> {
        assert!(batch.iter().chain(later).is_sorted_by_key(|event| event.pseq));
        self.taken.lock().expect("free").push((batch.len(), later.len()));
        Ok(())
    }
    async fn apply(&self, _: &Tx<'_>, batch: &[Delivered]) -> Result<(), HandleError> {
        if batch.len() <= 2 { Ok(()) } else { Err(HandleError::retry("too many")) }
    }
}

#[tokio::test]
async fn a_handler_says_how_much_it_takes_at_once_and_sees_what_waits() -> anyhow::Result<()> {
    let rig = Rig::postgres().await?;
    rig.emit(&[("a", 1), ("a", 2), ("a", 3), ("a", 4), ("a", 5)]).await?;
    let by_twos = Arc::new(ByTwos::default());
    let (relay, handler) = (rig.run_relay(), rig.run_handler(by_twos.clone()));
    rig.caught_up(RECORDER, 5).await?;
    assert_eq!(*by_twos.taken.lock().expect("free"), [(2, 3), (2, 1), (1, 0)]);
    handler.stop().await?;
    relay.stop().await
}

#[tokio::test]
async fn operators_prepare_before_they_apply() -> anyhow::Result<()> {
    use tidemark_bus::dlq::{Desk, release};
    use tidemark_bus::replay::{ReplayRequest, Selector, replay};
    let rig = Rig::postgres().await?;
    let refusing = Arc::new(Recorder::default());
    refusing.never.store(true, Ordering::SeqCst);
    *refusing.poison.lock().expect("free") = Some(("a".into(), 1));
    let (relay, handler) = (rig.run_relay(), rig.run_handler(refusing));
    rig.emit(&[("a", 1), ("a", 2), ("b", 1)]).await?;
    rig.caught_up(RECORDER, 3).await?;
    let handlers: Vec<Arc<dyn Handler>> = vec![Arc::new(Prepares::default())];
    let desk = Desk { db: rig.db.clone(), registry: rig.registry.clone(), handlers };
    let released = release(&desk, RECORDER, "a", "tester", None).await?;
    assert_eq!((released.applied, released.unparked, released.failed), (2, true, None));
    let request = ReplayRequest {
        handler: RECORDER.into(),
        selector: Selector::Numbers { part: None, from: 1, to: 100 },
        by: "tester".into(),
        reason: None,
        dry_run: false,
        per_second: None,
    };
    assert_eq!(replay(&desk, &request).await?.events, 3);
    handler.stop().await?;
    relay.stop().await
}
