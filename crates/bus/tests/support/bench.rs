//! A rig on any engine.

use std::sync::Arc;

use tidemark_bus::Bus;
use tidemark_bus::dlq::Desk;
use tidemark_bus::nats::{NatsBus, NatsOptions};
use tidemark_bus::redis::RedisBus;
use tidemark_model::redact::RedactedUrl;

use super::server::{Kind, Server};
use super::{Recorder, Rig};

/// A rig and the broker below it.
pub struct Bench {
    pub rig: Rig,
    pub server: Option<Server>,
}

#[derive(Debug, Clone, Copy)]
pub enum Engine {
    Postgres,
    Nats,
    Redis,
}

impl Bench {
    pub async fn new(engine: Engine) -> anyhow::Result<Self> {
        let mut rig = Rig::postgres().await?;
        let server = match engine {
            Engine::Postgres => None,
            Engine::Nats => Some(Server::start(Kind::Nats)?),
            Engine::Redis => Some(Server::start(Kind::Redis)?),
        };
        if let Some(server) = &server {
            rig.bus = Self::bus(engine, server, &rig).await?;
        }
        Ok(Self { rig, server })
    }

    /// The engine on `server` for the database of `rig`.
    pub async fn bus(engine: Engine, server: &Server, rig: &Rig) -> anyhow::Result<Arc<dyn Bus>> {
        let (db, tails) = (rig.db.clone(), rig.tails.clone());
        let url = RedactedUrl::parse(&server.url())?;
        Ok(match engine {
            Engine::Postgres => rig.bus.clone(),
            Engine::Nats => Arc::new(NatsBus::connect(&url, NatsOptions::default(), db, tails).await?),
            Engine::Redis => Arc::new(RedisBus::connect(&url, "tm", db, tails).await?),
        })
    }

    /// Every key gets these values, each round in one transaction.
    pub async fn emit(&self, keys: &[String], values: std::ops::RangeInclusive<i64>) -> anyhow::Result<()> {
        for value in values {
            let pairs: Vec<(&str, i64)> = keys.iter().map(|key| (key.as_str(), value)).collect();
            self.rig.emit(&pairs).await?;
        }
        Ok(())
    }

    /// Ends the broker and starts it again. Without a broker: ends every connection to the database.
    pub async fn restart(&mut self, disk: Disk) -> anyhow::Result<()> {
        match &mut self.server {
            Some(server) => {
                server.kill()?;
                if matches!(disk, Disk::Lost) {
                    server.wipe()?;
                }
                server.launch()
            }
            None => {
                let ended = "select pg_terminate_backend(pid) from pg_stat_activity
                             where datname = current_database() and pid <> pg_backend_pid()";
                self.rig.sql(ended).await
            }
        }
    }

    pub fn desk(&self, handler: Arc<Recorder>) -> Desk {
        Desk { db: self.rig.db.clone(), registry: self.rig.registry.clone(), handlers: vec![handler] }
    }
}

#[derive(Debug, Clone, Copy)]
pub enum Disk {
    Kept,
    Lost,
}
