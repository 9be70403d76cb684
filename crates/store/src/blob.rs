//! Content-addressed object storage for payloads above the inline limit. The name of a blob is the SHA-256 of
//! its bytes, so putting twice is putting once, and what comes back is checked against its name.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use sha2::{Digest, Sha256};
use tidemark_model::redact::RedactedUrl;

/// The name of a blob: the SHA-256 of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobRef([u8; 32]);

impl BlobRef {
    /// The name these bytes have.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
    /// The hash itself, for `payload_hash`.
    pub fn hash(&self) -> &[u8; 32] {
        &self.0
    }
    /// Reads a `payload_ref` column back; `None` for anything that [`fmt::Display`] did not write.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("sha256:")?;
        Some(Self(hex::decode(digits).ok()?.try_into().ok()?))
    }
    /// Two levels of folders keep a file system's directories small.
    fn path(&self) -> Path {
        let name = hex::encode(self.0);
        Path::from_iter(["sha256", &name[..2], &name[2..4], &name])
    }
}

impl fmt::Display for BlobRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", hex::encode(self.0))
    }
}

/// Why a blob could not be put or had.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// The URL of the store cannot be used.
    #[error(
        "cannot use {url} as object storage: {reason}; use file:///folder, s3://bucket/prefix or memory:"
    )]
    Url {
        /// Without secrets.
        url: RedactedUrl,
        /// Why.
        reason: String,
    },
    /// The store did not take or give it.
    #[error("cannot {what} blob {blob}: {reason}")]
    Store {
        /// `put` or `get`.
        what: &'static str,
        /// Which.
        blob: BlobRef,
        /// What the store said.
        reason: String,
    },
    /// The bytes are not those that were put.
    #[error("blob {blob} does not match its name: restore it from a backup or ingest its range again")]
    Damaged {
        /// Which.
        blob: BlobRef,
    },
}

/// Where large bodies live.
#[async_trait]
pub trait BlobStore: Send + Sync + 'static {
    /// Returns when the bytes are durable.
    async fn put(&self, bytes: Bytes) -> Result<BlobRef, BlobError>;
    /// The bytes with this name, checked.
    async fn get(&self, at: &BlobRef) -> Result<Bytes, BlobError>;
}

/// A [`BlobStore`] on a folder, an S3 bucket, or memory.
#[derive(Debug, Clone)]
pub struct ObjectBlobs {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
}

impl ObjectBlobs {
    /// `file:///folder`, `s3://bucket/prefix` (credentials and endpoint from the usual AWS variables) or
    /// `memory:`.
    pub fn open(url: &RedactedUrl) -> Result<Self, BlobError> {
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Self::open_with(url, variables)
    }
    /// The same with these variables instead of the environment's.
    pub fn open_with(
        url: &RedactedUrl,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, BlobError> {
        let fail = |reason: String| BlobError::Url { url: url.clone(), reason };
        let full = url.expose();
        match full.scheme() {
            "memory" => Ok(Self::memory()),
            "file" => {
                let folder = full.to_file_path().map_err(|()| fail("not an absolute path".to_owned()))?;
                std::fs::create_dir_all(&folder).map_err(|error| fail(error.to_string()))?;
                let store =
                    LocalFileSystem::new_with_prefix(folder).map_err(|error| fail(error.to_string()))?;
                Ok(Self { store: Arc::new(store), prefix: Path::default() })
            }
            "s3" => {
                if rustls::crypto::CryptoProvider::get_default().is_none() {
                    // Losing a race against another installer is as good as winning it.
                    let _ = rustls::crypto::ring::default_provider().install_default();
                }
                let mut store = AmazonS3Builder::new().with_url(full.as_str());
                for (name, value) in variables.into_iter().filter(|(name, _)| name.starts_with("AWS_")) {
                    // Variables that are somebody else's are none of ours.
                    if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
                        store = store.with_config(key, value);
                    }
                }
                let store = store.build().map_err(|error| fail(error.to_string()))?;
                let prefix = Path::from_url_path(full.path()).map_err(|error| fail(error.to_string()))?;
                Ok(Self { store: Arc::new(store), prefix })
            }
            other => Err(fail(format!("the scheme {other:?} is not known"))),
        }
    }
    /// Blobs that end with the process: tests, and `dev` without a folder.
    pub fn memory() -> Self {
        Self { store: Arc::new(InMemory::new()), prefix: Path::default() }
    }
    fn path(&self, blob: &BlobRef) -> Path {
        self.prefix.parts().chain(blob.path().parts()).collect()
    }
}

#[async_trait]
impl BlobStore for ObjectBlobs {
    async fn put(&self, bytes: Bytes) -> Result<BlobRef, BlobError> {
        let blob = BlobRef::of(&bytes);
        match self.store.put(&self.path(&blob), PutPayload::from(bytes)).await {
            Ok(_) => Ok(blob),
            Err(error) => Err(BlobError::Store { what: "put", blob, reason: error.to_string() }),
        }
    }
    async fn get(&self, at: &BlobRef) -> Result<Bytes, BlobError> {
        let fail = |error: object_store::Error| BlobError::Store {
            what: "get",
            blob: *at,
            reason: error.to_string(),
        };
        let bytes = self.store.get(&self.path(at)).await.map_err(fail)?.bytes().await.map_err(fail)?;
        if BlobRef::of(&bytes) == *at { Ok(bytes) } else { Err(BlobError::Damaged { blob: *at }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn check(url: &str) {
        let blobs = ObjectBlobs::open(&RedactedUrl::parse(url).expect("a URL")).expect("opens");
        let body = Bytes::from(vec![7; 100_000]);
        let blob = blobs.put(body.clone()).await.expect("puts");
        assert_eq!(blobs.put(body.clone()).await.expect("puts again"), blob);
        assert_eq!(blobs.get(&blob).await.expect("gets"), body);
        assert_eq!(BlobRef::parse(&blob.to_string()), Some(blob));
        let other = BlobRef::of(b"never put");
        assert!(matches!(blobs.get(&other).await, Err(BlobError::Store { what: "get", .. })));
    }

    #[tokio::test]
    async fn memory_keeps_what_was_put() {
        check("memory:").await;
    }

    #[tokio::test]
    async fn a_folder_keeps_what_was_put() {
        let folder = std::env::temp_dir().join(format!("tidemark-blobs-{}", std::process::id()));
        check(&format!("file://{}", folder.display())).await;
        std::fs::remove_dir_all(folder).expect("removes");
    }

    #[test]
    fn an_unknown_scheme_is_refused_with_advice() {
        let error = ObjectBlobs::open(&RedactedUrl::parse("ftp://host/x").expect("a URL"));
        assert!(error.expect_err("refused").to_string().contains("s3://"));
    }
}
