//! NATS JetStream: a stream per service, a subject per partition, our number in a header. Ordered pull
//! consumers are placed by us (the position lives in our database), so the server's idea of a consumer is
//! never the truth (pitfall B22). Acks are awaited in batches and believed only as far as the refill goes.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::consumer::DeliverPolicy;
use async_nats::jetstream::consumer::pull::{Ordered, OrderedConfig};
use async_nats::jetstream::context::PublishAckFuture;
use async_nats::jetstream::stream::{Config, StorageType, Stream};
use async_nats::jetstream::{self, Context};
use async_trait::async_trait;
use futures_util::{FutureExt, StreamExt};
use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Db, buslog};

use crate::refill::{Open, Raw, Refilling, Source};
use crate::tail::Tails;
use crate::{Bus, BusError, Consumer, Numbered};

const ENGINE: &str = "nats";
const NUMBER_HEADER: &str = "Tidemark-Number";
const ID_HEADER: &str = "Tidemark-Event-Id";
/// Publishes whose acks are awaited at any moment: a sliding window, so that the server always has work.
const IN_FLIGHT_MAX: usize = 2_000;
/// A server that does not answer for this long is away.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// A reader starts this much before the time of its first event: clocks differ. What it reads twice is
/// dropped by number, what it misses is refilled.
const CLOCK_SKEW: Duration = Duration::from_secs(5);

fn fail<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> BusError {
    move |error| BusError::engine(ENGINE, what, error)
}

/// How streams are made.
#[derive(Debug, Clone)]
pub struct NatsOptions {
    /// Streams are `PREFIX_SERVICE_LINEAGE`, subjects `prefix.service.lineage.part`.
    pub prefix: String,
    /// Copies in a cluster; three in production.
    pub replicas: usize,
    /// How long the server keeps events.
    pub max_age: Duration,
    /// How many bytes the server keeps per stream; -1 is no limit.
    pub max_bytes: i64,
}

impl Default for NatsOptions {
    fn default() -> Self {
        Self {
            prefix: "tidemark".to_owned(),
            replicas: 1,
            max_age: Duration::from_secs(30 * 86_400), // S2 §2, operational.
            max_bytes: -1,
        }
    }
}

/// JetStream as a bus.
#[derive(Clone)]
pub struct NatsBus {
    db: Db,
    tails: Arc<Tails>,
    opener: Arc<NatsOpener>,
}

impl std::fmt::Debug for NatsBus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NatsBus").field("options", &self.opener.options).finish_non_exhaustive()
    }
}

struct NatsOpener {
    context: Context,
    options: NatsOptions,
    db: Db,
    /// Streams known to exist; forgotten when a publish says otherwise.
    made: Mutex<HashSet<String>>,
    /// The lineage published to; read anew by every owner.
    lineage: Mutex<Option<String>>,
}

impl NatsBus {
    /// Connects to `url` (`nats://…`), also when the server comes up later.
    pub async fn connect(
        url: &RedactedUrl,
        options: NatsOptions,
        db: Db,
        tails: Arc<Tails>,
    ) -> Result<Self, BusError> {
        let client = async_nats::ConnectOptions::new()
            .name("tidemark")
            .retry_on_initial_connect()
            .request_timeout(Some(ANSWER_WAIT))
            .reconnect_delay_callback(|attempts| {
                let doubled = 50_u64.saturating_mul(1 << attempts.min(6));
                Duration::from_millis(doubled.min(2_000))
            })
            .connect(url.expose().as_str())
            .await
            .map_err(fail("connect"))?;
        let context = jetstream::ContextBuilder::new()
            .timeout(ANSWER_WAIT)
            .ack_timeout(ANSWER_WAIT)
            .max_ack_inflight(IN_FLIGHT_MAX * 2)
            .build(client);
        let opener = NatsOpener {
            context,
            options,
            db: db.clone(),
            made: Mutex::default(),
            lineage: Mutex::default(),
        };
        Ok(Self { db, tails, opener: Arc::new(opener) })
    }

    async fn send(&self, events: &[Numbered]) -> Result<(), BusError> {
        let opener = &self.opener;
        let lineage = opener.lineage().await?;
        for stream in events.iter().map(|event| event.stream.as_str()).collect::<HashSet<_>>() {
            opener.ensure(&lineage, stream).await?;
        }
        let mut acks = VecDeque::with_capacity(IN_FLIGHT_MAX);
        let mut place: Option<(&str, u16, async_nats::Subject)> = None;
        for event in events {
            // Events of one partition come together: its subject is made once.
            let subject = match &place {
                Some((stream, part, subject)) if *stream == event.stream && *part == event.part => {
                    subject.clone()
                }
                _ => {
                    let text = opener.subject(&lineage, &event.stream, event.part);
                    let subject = async_nats::Subject::from(text);
                    place = Some((&event.stream, event.part, subject.clone()));
                    subject
                }
            };
            let mut headers = HeaderMap::new();
            headers.insert(NUMBER_HEADER, event.pseq.to_string());
            headers.insert(ID_HEADER, event.event_id.to_string());
            // The number names the event; the server drops repetitions for its two minutes.
            headers.insert(
                async_nats::header::NATS_MESSAGE_ID,
                format!("{lineage}.{}.{}.{}", event.stream, event.part, event.pseq),
            );
            if acks.len() >= IN_FLIGHT_MAX {
                acknowledged(acks.pop_front()).await?;
            }
            let publishing = opener.context.publish_with_headers(subject, headers, event.body.clone());
            acks.push_back(publishing.await.map_err(fail("publish"))?);
        }
        while !acks.is_empty() {
            acknowledged(acks.pop_front()).await?;
        }
        Ok(())
    }
}

async fn acknowledged(ack: Option<PublishAckFuture>) -> Result<(), BusError> {
    if let Some(ack) = ack {
        ack.await.map_err(fail("acknowledge a publish"))?;
    }
    Ok(())
}

impl NatsOpener {
    async fn lineage(&self) -> Result<String, BusError> {
        let known = self.lineage.lock().expect("no panic while held").clone();
        match known {
            Some(lineage) => Ok(lineage),
            None => {
                let lineage = buslog::lineage(&self.db.conn().await?).await?;
                *self.lineage.lock().expect("no panic while held") = Some(lineage.clone());
                Ok(lineage)
            }
        }
    }
    fn stream_name(&self, lineage: &str, stream: &str) -> String {
        format!("{}_{stream}_{lineage}", self.options.prefix).to_uppercase().replace(['.', ' '], "_")
    }
    fn subject(&self, lineage: &str, stream: &str, part: u16) -> String {
        format!("{}.{stream}.{lineage}.{part}", self.options.prefix)
    }
    async fn make(&self, lineage: &str, stream: &str) -> Result<Stream, BusError> {
        self.context
            .get_or_create_stream(Config {
                name: self.stream_name(lineage, stream),
                subjects: vec![format!("{}.{stream}.{lineage}.*", self.options.prefix)],
                storage: StorageType::File,
                num_replicas: self.options.replicas,
                max_age: self.options.max_age,
                max_bytes: self.options.max_bytes,
                ..Config::default()
            })
            .await
            .map_err(fail("make a stream"))
    }
    async fn ensure(&self, lineage: &str, stream: &str) -> Result<(), BusError> {
        let name = self.stream_name(lineage, stream);
        if !self.made.lock().expect("no panic while held").contains(&name) {
            self.make(lineage, stream).await?;
            self.made.lock().expect("no panic while held").insert(name);
        }
        Ok(())
    }
    fn forget(&self) {
        self.made.lock().expect("no panic while held").clear();
    }
}

#[async_trait]
impl Bus for NatsBus {
    fn engine(&self) -> &'static str {
        ENGINE
    }
    async fn begin(&self) -> Result<String, BusError> {
        *self.opener.lineage.lock().expect("no panic while held") = None;
        Ok(format!("{ENGINE}:{}", self.opener.lineage().await?))
    }
    async fn publish(&self, events: &[Numbered]) -> Result<(), BusError> {
        let sent = self.send(events).await;
        if sent.is_err() {
            self.opener.forget(); // The server may have come back without its streams.
        }
        sent
    }
    async fn subscribe(&self, stream: &str, part: u16, after: i64) -> Result<Box<dyn Consumer>, BusError> {
        let (db, tails) = (self.db.clone(), Arc::clone(&self.tails));
        let opener: Arc<dyn Open> = self.opener.clone();
        Ok(Box::new(Refilling::new(db, tails, opener, stream, part, after)))
    }
}

#[async_trait]
impl Open for NatsOpener {
    fn engine(&self) -> &'static str {
        ENGINE
    }
    async fn open(&self, stream: &str, part: u16, after: i64) -> Result<Box<dyn Source>, BusError> {
        let lineage = buslog::lineage(&self.db.conn().await?).await?;
        let made = self.make(&lineage, stream).await?;
        let deliver_policy = if after == 0 {
            DeliverPolicy::All
        } else {
            let conn = self.db.conn().await?;
            let first = buslog::numbered_at(&conn, stream, part, after).await?;
            let first = first.unwrap_or_else(time::OffsetDateTime::now_utc);
            DeliverPolicy::ByStartTime { start_time: first - CLOCK_SKEW }
        };
        let config = OrderedConfig {
            filter_subject: self.subject(&lineage, stream, part),
            deliver_policy,
            ..OrderedConfig::default()
        };
        let consumer = made.create_consumer(config).await.map_err(fail("make a consumer"))?;
        let messages = consumer.messages().await.map_err(fail("read"))?;
        Ok(Box::new(NatsSource { messages }))
    }
}

struct NatsSource {
    messages: Ordered,
}

#[async_trait]
impl Source for NatsSource {
    async fn read(&mut self, at_most: usize, wait: Duration) -> Result<Vec<Raw>, BusError> {
        let mut raws = Vec::new();
        let mut next = tokio::time::timeout(wait, self.messages.next()).await.ok();
        while let Some(message) = next {
            let message = message
                .ok_or_else(|| BusError::engine(ENGINE, "read", "the consumer ended"))?
                .map_err(fail("read"))?;
            let number = message
                .headers
                .as_ref()
                .and_then(|headers| headers.get(NUMBER_HEADER))
                .and_then(|value| value.as_str().parse().ok());
            if let Some(pseq) = number {
                raws.push(Raw { pseq, body: message.payload.clone() });
            }
            if raws.len() >= at_most {
                break;
            }
            next = self.messages.next().now_or_never(); // Only what is already here.
        }
        Ok(raws)
    }
}
