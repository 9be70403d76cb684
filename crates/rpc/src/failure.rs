//! Why a request gave no answer. Every variant names the endpoint by label, never by URL.

use std::time::Duration;

use crate::errors::Class;

/// Why a request gave no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RpcError {
    /// The connection failed or broke.
    #[error("{endpoint} did not answer {method}: {reason}")]
    Transport {
        /// Label.
        endpoint: String,
        /// Method.
        method: &'static str,
        /// Without URL.
        reason: String,
    },
    /// No answer in time.
    #[error("{endpoint} did not answer {method} within {after:?}")]
    Timeout {
        /// Label.
        endpoint: String,
        /// Method.
        method: &'static str,
        /// The limit.
        after: Duration,
    },
    /// The body is longer than we take.
    #[error("{endpoint} answered {method} with more than {limit} bytes")]
    BodyTooLarge {
        /// Label.
        endpoint: String,
        /// Method.
        method: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The body is not the JSON we asked for.
    #[error("{endpoint} answered {method} with something else: {reason}")]
    BadAnswer {
        /// Label.
        endpoint: String,
        /// Method.
        method: &'static str,
        /// What the parser says.
        reason: String,
    },
    /// A batch came back without this item.
    #[error("{endpoint} left {method} out of its batch answer")]
    MissingReply {
        /// Label.
        endpoint: String,
        /// Method.
        method: &'static str,
    },
    /// The node refused, in words or by HTTP status.
    #[error("{endpoint} refused {method} (code {code}): {message}")]
    Refused {
        /// Label.
        endpoint: String,
        /// Method.
        method: &'static str,
        /// JSON-RPC code, or the HTTP status.
        code: i64,
        /// Its words, bounded.
        message: String,
        /// What they mean.
        class: Class,
    },
    /// The breaker of this endpoint is open.
    #[error("{endpoint} is resting after failures")]
    Resting {
        /// Label.
        endpoint: String,
    },
    /// The endpoint serves another chain.
    #[error("{endpoint} serves chain {found}, expected {expected}")]
    WrongChain {
        /// Label.
        endpoint: String,
        /// What it says.
        found: String,
        /// What we want.
        expected: String,
    },
    /// There is nothing to ask.
    #[error("no endpoint is configured")]
    NoEndpoint,
    /// The HTTP client could not be built.
    #[error("cannot set up the HTTP client: {0}")]
    Setup(String),
}

impl RpcError {
    /// What the caller should do about it.
    pub fn class(&self) -> Class {
        match self {
            Self::Refused { class, .. } => class.clone(),
            Self::BodyTooLarge { .. } => Class::ResponseTooLarge,
            Self::Transport { .. }
            | Self::Timeout { .. }
            | Self::BadAnswer { .. }
            | Self::MissingReply { .. }
            | Self::Resting { .. }
            | Self::WrongChain { .. }
            | Self::NoEndpoint
            | Self::Setup(_) => Class::Other,
        }
    }
    /// The label used in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Refused { class, .. } => class.label(),
            Self::BodyTooLarge { .. } => "response_too_large",
            Self::Transport { .. } => "transport",
            Self::Timeout { .. } => "timeout",
            Self::BadAnswer { .. } => "bad_answer",
            Self::MissingReply { .. } => "missing_reply",
            Self::Resting { .. } => "resting",
            Self::WrongChain { .. } => "wrong_chain",
            Self::NoEndpoint | Self::Setup(_) => "setup",
        }
    }
    /// Does it speak against the endpoint's health? A refusal by rule (size, method, revert) does not.
    pub(crate) fn is_fault(&self) -> bool {
        match self {
            Self::Transport { .. }
            | Self::Timeout { .. }
            | Self::BadAnswer { .. }
            | Self::MissingReply { .. } => true,
            Self::Refused { class, code, .. } => matches!(class, Class::Other) && (500..600).contains(code),
            Self::BodyTooLarge { .. }
            | Self::Resting { .. }
            | Self::WrongChain { .. }
            | Self::NoEndpoint
            | Self::Setup(_) => false,
        }
    }
}
