//! The finality lifecycle (S0 §10.1): pending → confirmed → finalized, or → reverted before finality.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::Height;

/// How sure an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinalityStatus {
    /// In a block with fewer confirmations than the network asks for.
    Pending,
    /// Confirmed by the network's threshold, still reversible.
    Confirmed,
    /// Irreversible.
    Finalized,
    /// Its block left the canonical chain.
    Reverted,
}

impl FinalityStatus {
    /// The label used in Postgres and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Confirmed => "confirmed",
            Self::Finalized => "finalized",
            Self::Reverted => "reverted",
        }
    }
    /// May an event go from `self` to `next`? Finality never regresses; a revert only before finality;
    /// a reverted event may come back when its block (or its transaction) does.
    pub fn may_become(self, next: Self) -> bool {
        match (self, next) {
            (Self::Finalized, next) => next == Self::Finalized,
            (Self::Reverted, _) => true,
            (_, Self::Reverted) => true,
            (now, next) => next >= now,
        }
    }
}
impl fmt::Display for FinalityStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
impl FromStr for FinalityStatus {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "pending" => Ok(Self::Pending),
            "confirmed" => Ok(Self::Confirmed),
            "finalized" => Ok(Self::Finalized),
            "reverted" => Ok(Self::Reverted),
            other => Err(format!("{other:?} is not a finality status")),
        }
    }
}

/// The status of a canonical block's events, from heights alone.
pub fn status_at(
    height: Height,
    latest: Height,
    finalized: Option<Height>,
    confirmations: u64,
) -> FinalityStatus {
    if finalized.is_some_and(|line| height <= line) {
        FinalityStatus::Finalized
    } else if latest.0.saturating_sub(height.0) >= confirmations {
        FinalityStatus::Confirmed
    } else {
        FinalityStatus::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finalized_is_the_end() {
        assert!(FinalityStatus::Finalized.may_become(FinalityStatus::Finalized));
        assert!(!FinalityStatus::Finalized.may_become(FinalityStatus::Reverted));
        assert!(!FinalityStatus::Confirmed.may_become(FinalityStatus::Pending));
        assert!(FinalityStatus::Reverted.may_become(FinalityStatus::Pending));
    }

    #[test]
    fn status_follows_the_two_lines() {
        let at = |height| status_at(Height(height), Height(100), Some(Height(64)), 12);
        assert_eq!(at(64), FinalityStatus::Finalized);
        assert_eq!(at(65), FinalityStatus::Confirmed);
        assert_eq!(at(88), FinalityStatus::Confirmed);
        assert_eq!(at(89), FinalityStatus::Pending);
    }
}
