//! Redis Streams: one key per partition, entry ids `pseq-0`. Redis refuses an id that is not larger than
//! the last, which makes publishing twice harmless; keys carry the database's lineage, so that numbers of
//! another history are never taken for ours. Ordered consumers read by position (XREAD); unordered
//! tasks may share a consumer group ([`TaskGroup`]).

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::streams::{StreamAutoClaimReply, StreamReadReply};
use ::redis::{AsyncConnectionConfig, Client, RedisError, RedisResult, Value};
use async_trait::async_trait;
use tidemark_model::redact::RedactedUrl;
use tidemark_store::{Db, buslog};

use crate::refill::{Open, Raw, Refilling, Source};
use crate::tail::Tails;
use crate::{Bus, BusError, Consumer, Numbered};

const ENGINE: &str = "redis";
/// The field of an entry that holds the envelope.
const FIELD: &str = "e";
/// Commands of one pipeline.
const PIPELINE_MAX: usize = 1_000;
/// A server that does not answer for this long is away.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

fn fail(what: &'static str) -> impl Fn(RedisError) -> BusError {
    // The driver's text may repeat the URL only when it is not one; it was parsed before.
    move |error| BusError::engine(ENGINE, what, error)
}

fn key_of(prefix: &str, lineage: &str, stream: &str, part: u16) -> String {
    format!("{prefix}:{lineage}:{stream}:{part}")
}

/// Redis as a bus.
#[derive(Clone)]
pub struct RedisBus {
    db: Db,
    tails: Arc<Tails>,
    opener: Arc<RedisOpener>,
    /// The connection that publishes; made again after an error.
    publisher: Arc<tokio::sync::Mutex<Option<MultiplexedConnection>>>,
    /// The lineage published to; read anew by every owner.
    lineage: Arc<Mutex<Option<String>>>,
}

impl std::fmt::Debug for RedisBus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisBus").field("prefix", &self.opener.prefix).finish_non_exhaustive()
    }
}

struct RedisOpener {
    client: Client,
    prefix: String,
    db: Db,
}

impl RedisOpener {
    async fn connect(&self) -> Result<MultiplexedConnection, BusError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(ANSWER_WAIT))
            .set_response_timeout(Some(ANSWER_WAIT));
        self.client.get_multiplexed_async_connection_with_config(&config).await.map_err(fail("connect"))
    }
}

/// What a server's persistence is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Persistence {
    /// The append-only file is on.
    AppendOnly,
    /// A crash of the server loses what was acknowledged; the outbox refills it.
    Volatile,
    /// The server does not say.
    Unknown,
}

impl RedisBus {
    /// Connects to `url` (`redis://…`) and says aloud if the server keeps nothing. Keys begin with `prefix`.
    pub async fn connect(
        url: &RedactedUrl,
        prefix: &str,
        db: Db,
        tails: Arc<Tails>,
    ) -> Result<Self, BusError> {
        let client = Client::open(url.expose().as_str()).map_err(fail("read its address"))?;
        let opener = Arc::new(RedisOpener { client, prefix: prefix.to_owned(), db: db.clone() });
        let bus = Self { db, tails, opener, publisher: Arc::default(), lineage: Arc::default() };
        match bus.persistence().await {
            Ok(Persistence::AppendOnly) => {}
            Ok(Persistence::Volatile) => tracing::warn!(
                engine = ENGINE,
                action = "check_persistence",
                "Redis runs with appendonly no: a crash of the server loses acknowledged events. They are \
                 refilled from the outbox; set appendonly yes to avoid that work."
            ),
            Ok(Persistence::Unknown) => tracing::warn!(
                engine = ENGINE,
                action = "check_persistence",
                "Redis does not say whether its append-only file is on: check appendonly yes by hand."
            ),
            Err(error) => {
                tracing::warn!(%error, action = "check_persistence", "Redis is away; its persistence was not checked.");
            }
        }
        Ok(bus)
    }

    /// Asks the server about its append-only file.
    pub async fn persistence(&self) -> Result<Persistence, BusError> {
        let mut connection = self.opener.connect().await?;
        let answer: RedisResult<Vec<String>> =
            ::redis::cmd("CONFIG").arg("GET").arg("appendonly").query_async(&mut connection).await;
        Ok(match answer {
            Ok(pair) if pair.get(1).is_some_and(|value| value == "yes") => Persistence::AppendOnly,
            Ok(pair) if pair.len() > 1 => Persistence::Volatile,
            Ok(_) | Err(_) => Persistence::Unknown,
        })
    }

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

    async fn send(&self, events: &[Numbered]) -> Result<(), BusError> {
        let lineage = self.lineage().await?;
        let mut publisher = self.publisher.lock().await;
        let mut connection = match publisher.take() {
            Some(connection) => connection,
            None => self.opener.connect().await?,
        };
        for chunk in events.chunks(PIPELINE_MAX) {
            let mut pipe = ::redis::pipe();
            pipe.ignore_errors();
            for event in chunk {
                pipe.cmd("XADD")
                    .arg(key_of(&self.opener.prefix, &lineage, &event.stream, event.part))
                    .arg(format!("{}-0", event.pseq))
                    .arg(FIELD)
                    .arg(event.body.as_ref());
            }
            let answers: Vec<RedisResult<Value>> =
                pipe.query_async(&mut connection).await.map_err(fail("publish"))?;
            for answer in answers {
                match answer {
                    Ok(_) => {}
                    Err(error) if is_repetition(&error) => {}
                    Err(error) => return Err(fail("publish")(error)),
                }
            }
        }
        *publisher = Some(connection);
        Ok(())
    }
}

/// The number is already there: published before.
fn is_repetition(error: &RedisError) -> bool {
    error.to_string().contains("equal or smaller")
}

#[async_trait]
impl Bus for RedisBus {
    fn engine(&self) -> &'static str {
        ENGINE
    }
    async fn begin(&self) -> Result<String, BusError> {
        *self.lineage.lock().expect("no panic while held") = None;
        Ok(format!("{ENGINE}:{}", self.lineage().await?))
    }
    async fn publish(&self, events: &[Numbered]) -> Result<(), BusError> {
        self.send(events).await
    }
    async fn subscribe(&self, stream: &str, part: u16, after: i64) -> Result<Box<dyn Consumer>, BusError> {
        let (db, tails) = (self.db.clone(), Arc::clone(&self.tails));
        let opener: Arc<dyn Open> = self.opener.clone();
        Ok(Box::new(Refilling::new(db, tails, opener, stream, part, after)))
    }
    async fn trim(&self, stream: &str, part: u16, through: i64) -> Result<(), BusError> {
        let lineage = self.lineage().await?;
        let mut connection = self.opener.connect().await?;
        ::redis::cmd("XTRIM")
            .arg(key_of(&self.opener.prefix, &lineage, stream, part))
            .arg("MINID")
            .arg("~")
            .arg(format!("{}-0", through.saturating_add(1)))
            .query_async::<i64>(&mut connection)
            .await
            .map_err(fail("trim a stream"))?;
        Ok(())
    }
}

#[async_trait]
impl Open for RedisOpener {
    fn engine(&self) -> &'static str {
        ENGINE
    }
    async fn open(&self, stream: &str, part: u16, after: i64) -> Result<Box<dyn Source>, BusError> {
        // A connection of its own: a blocking read would hold up everybody else's commands.
        let connection = self.connect().await?;
        let lineage = buslog::lineage(&self.db.conn().await?).await?;
        Ok(Box::new(RedisSource {
            connection,
            key: key_of(&self.prefix, &lineage, stream, part),
            position: after,
        }))
    }
}

struct RedisSource {
    connection: MultiplexedConnection,
    key: String,
    position: i64,
}

#[async_trait]
impl Source for RedisSource {
    async fn read(&mut self, at_most: usize, wait: Duration) -> Result<Vec<Raw>, BusError> {
        let block_ms = u64::try_from(wait.as_millis()).unwrap_or(1_000).max(1); // 0 would wait for ever.
        let reply: Option<StreamReadReply> = ::redis::cmd("XREAD")
            .arg("COUNT")
            .arg(at_most)
            .arg("BLOCK")
            .arg(block_ms)
            .arg("STREAMS")
            .arg(&self.key)
            .arg(format!("{}-0", self.position))
            .query_async(&mut self.connection)
            .await
            .map_err(fail("read"))?;
        let mut raws = Vec::new();
        for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            let Some(pseq) = number_of(&entry.id) else {
                continue; // Not one of ours; if a number is missing, the log has it.
            };
            self.position = pseq;
            if let Some(body) = entry.get::<Vec<u8>>(FIELD) {
                raws.push(Raw { pseq, body: body.into() });
            }
        }
        Ok(raws)
    }
}

/// `12-0` → 12
fn number_of(id: &str) -> Option<i64> {
    id.strip_suffix("-0")?.parse().ok()
}

/// A consumer group for tasks whose order does not matter. Delivery is at least once: guard the effect.
pub struct TaskGroup {
    connection: MultiplexedConnection,
    key: String,
    group: String,
    consumer: String,
}

/// One task of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// The entry's id, for [`TaskGroup::ack`].
    pub id: String,
    /// The envelope's text.
    pub body: Vec<u8>,
}

/// What [`TaskGroup::reclaim`] found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reclaimed {
    /// Tasks of consumers that went silent; now ours.
    pub tasks: Vec<Task>,
    /// Entries that were trimmed before anybody finished them: data loss unless the outbox has them.
    pub lost: Vec<String>,
}

impl TaskGroup {
    /// Joins `group` on one partition, making it at the start of the stream if it is new.
    pub async fn join(
        bus: &RedisBus,
        stream: &str,
        part: u16,
        group: &str,
        consumer: &str,
    ) -> Result<Self, BusError> {
        let mut connection = bus.opener.connect().await?;
        let key = key_of(&bus.opener.prefix, &bus.lineage().await?, stream, part);
        let made: RedisResult<Value> = ::redis::cmd("XGROUP")
            .arg("CREATE")
            .arg(&key)
            .arg(group)
            .arg("0")
            .arg("MKSTREAM")
            .query_async(&mut connection)
            .await;
        match made {
            Err(error) if error.code() != Some("BUSYGROUP") => return Err(fail("make a group")(error)),
            Ok(_) | Err(_) => {}
        }
        Ok(Self { connection, key, group: group.to_owned(), consumer: consumer.to_owned() })
    }

    /// New tasks; never with NOACK, so an unfinished one stays pending.
    pub async fn next(&mut self, at_most: usize, wait: Duration) -> Result<Vec<Task>, BusError> {
        let reply: Option<StreamReadReply> = ::redis::cmd("XREADGROUP")
            .arg("GROUP")
            .arg(&self.group)
            .arg(&self.consumer)
            .arg("COUNT")
            .arg(at_most)
            .arg("BLOCK")
            .arg(u64::try_from(wait.as_millis()).unwrap_or(1_000).max(1))
            .arg("STREAMS")
            .arg(&self.key)
            .arg(">")
            .query_async(&mut self.connection)
            .await
            .map_err(fail("read tasks"))?;
        let entries = reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids);
        Ok(entries.map(|entry| Task { body: entry.get(FIELD).unwrap_or_default(), id: entry.id }).collect())
    }

    /// The task is done.
    pub async fn ack(&mut self, id: &str) -> Result<(), BusError> {
        ::redis::cmd("XACK")
            .arg(&self.key)
            .arg(&self.group)
            .arg(id)
            .query_async::<i64>(&mut self.connection)
            .await
            .map_err(fail("acknowledge a task"))?;
        Ok(())
    }

    /// Takes over tasks that nobody finished for `idle`, which must be longer than the slowest task.
    pub async fn reclaim(&mut self, idle: Duration, at_most: usize) -> Result<Reclaimed, BusError> {
        let reply: StreamAutoClaimReply = ::redis::cmd("XAUTOCLAIM")
            .arg(&self.key)
            .arg(&self.group)
            .arg(&self.consumer)
            .arg(u64::try_from(idle.as_millis()).unwrap_or(u64::MAX))
            .arg("0-0")
            .arg("COUNT")
            .arg(at_most)
            .query_async(&mut self.connection)
            .await
            .map_err(fail("reclaim tasks"))?;
        let lost = reply.deleted_ids;
        if !lost.is_empty() {
            tracing::error!(
                key = self.key,
                group = self.group,
                lost = lost.len(),
                action = "reclaim",
                "Entries were trimmed before they were handled: read them from the outbox."
            );
        }
        let tasks = reply
            .claimed
            .into_iter()
            .map(|entry| Task { body: entry.get(FIELD).unwrap_or_default(), id: entry.id })
            .collect();
        Ok(Reclaimed { tasks, lost })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_numbers_of_ours_or_nothing() {
        assert_eq!(number_of("17-0"), Some(17));
        assert_eq!(number_of("17-1"), None);
        assert_eq!(number_of("1700000000000-0x"), None);
    }
}
