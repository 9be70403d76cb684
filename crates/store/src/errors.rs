//! app.indexing_errors (S1 §7.1): one row per distinct error at a place, counted; bodies cut.

use sha2::{Digest, Sha256};
use tidemark_model::ids::{Height, NetworkId, TxId};
use tidemark_model::text::storable;

use crate::db::{Conn, StoreError};

/// Longest `raw_data` kept inline.
pub const RAW_DATA_BYTES_MAX: usize = 4096;
/// Longest message kept.
const MESSAGE_BYTES_MAX: usize = 2048;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Work stands still until somebody looks.
    Fatal,
    /// Handled; worth knowing.
    Warn,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Self::Fatal => "FATAL",
            Self::Warn => "WARN",
        }
    }
}

/// An error of a worker at a place of a chain.
#[derive(Debug, Clone)]
pub struct IndexingError<'a> {
    /// Which worker.
    pub worker: &'a str,
    /// Which network.
    pub network: NetworkId,
    /// At which height.
    pub height: Height,
    /// In which transaction, if in one.
    pub tx: Option<TxId>,
    /// How bad.
    pub severity: Severity,
    /// What happened; already free of secrets.
    pub message: &'a str,
    /// What it happened with; cut to [`RAW_DATA_BYTES_MAX`].
    pub raw_data: Option<&'a [u8]>,
    /// Where the whole body lies, if it was kept.
    pub raw_ref: Option<&'a str>,
}

const RECORD: &str = "
    insert into app.indexing_errors
           (worker_name, network_id, block_height, transaction_id, error_hash, severity, message, raw_data, raw_ref)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
    on conflict (worker_name, network_id, block_height, transaction_id, error_hash) do update
       set occurrences = app.indexing_errors.occurrences + 1, last_seen_at = now(), resolved = false,
           severity = excluded.severity";

/// Records an error, or counts it once more.
pub async fn record(conn: &Conn, error: &IndexingError<'_>) -> Result<(), StoreError> {
    let message = cut(error.message.as_bytes(), MESSAGE_BYTES_MAX);
    let hash: [u8; 32] = Sha256::digest(message.as_bytes()).into();
    let raw_data = error.raw_data.map(|data| cut(data, RAW_DATA_BYTES_MAX));
    let tx = error.tx.as_ref().map_or(&[][..], TxId::as_bytes);
    conn.execute(
        "record an indexing error",
        RECORD,
        &[
            &error.worker,
            &error.network.0,
            &error.height.as_i64(),
            &tx,
            &hash.as_slice(),
            &error.severity.as_str(),
            &message,
            &raw_data,
            &error.raw_ref,
        ],
    )
    .await?;
    Ok(())
}

const RESOLVE: &str = "
    update app.indexing_errors set resolved = true
     where worker_name = $1 and network_id = $2 and block_height >= $3 and block_height < $4 and not resolved";

/// Marks the errors of a range as resolved; gives how many there were.
pub async fn resolve(
    conn: &Conn,
    worker: &str,
    network: NetworkId,
    range: tidemark_model::ids::HeightRange,
) -> Result<u64, StoreError> {
    conn.execute(
        "resolve indexing errors",
        RESOLVE,
        &[&worker, &network.0, &range.from().as_i64(), &range.to().as_i64()],
    )
    .await
}

/// The first `bytes_max` bytes as text Postgres takes.
fn cut(bytes: &[u8], bytes_max: usize) -> String {
    let mut text = storable(&bytes[..bytes.len().min(bytes_max)]).text;
    while text.len() > bytes_max {
        text.pop(); // A replaced byte grows to three.
    }
    text
}
