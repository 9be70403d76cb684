//! The binary's rooms: command line, configuration, embedded Postgres, supervision, telemetry, wiring.
//! A library so that tests can use them; nobody else should.

pub mod admin;
pub mod bench;
pub mod cli;
pub mod commands;
pub mod config;
pub mod dev_chain;
pub mod embedded_pg;
pub mod exit;
pub mod host;
pub mod parent;
pub mod parts;
pub mod replays;
pub mod roles;
pub mod supervise;
pub mod telemetry;
pub mod wire;
