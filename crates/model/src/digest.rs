//! The ledger digest: an order-independent, incremental hash of who owns how much.
//!
//! `digest = Σ qty · H(asset, account) mod p` with p = 2^255 − 19. It is linear in the quantities, so a
//! movement changes it by `qty · (H(to) − H(from))` without reading old balances: any order, any batching
//! and any split into segments give the same value, and equal digests mean equal state (up to a hash
//! collision). ADR 0009 says why this and not a hash of rows.

use alloy_primitives::U256;
use sha2::{Digest as _, Sha256};

use crate::ids::{AccountId, AssetId};
use crate::quantity::SignedQty;

/// Buckets per network: the first byte of the asset id.
pub const BUCKETS: usize = 256;

/// p = 2^255 − 19.
const PRIME: U256 = U256::from_limbs([0xffff_ffff_ffff_ffed, u64::MAX, u64::MAX, 0x7fff_ffff_ffff_ffff]);

/// One digest value; starts at zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Digest(pub U256);

impl Digest {
    /// Adds `qty` to what `account` holds of `asset`.
    pub fn add(&mut self, asset: AssetId, account: AccountId, qty: SignedQty) {
        let term = weight(asset, account).mul_mod(qty.magnitude(), PRIME);
        let term = if qty.is_negative() && !term.is_zero() { PRIME - term } else { term };
        self.0 = self.0.add_mod(term, PRIME);
    }
    /// Adds another digest: sums over disjoint parts.
    pub fn merge(&mut self, other: Self) {
        self.0 = self.0.add_mod(other.0, PRIME);
    }
}

/// The bucket of an asset.
pub fn bucket_of(asset: AssetId) -> u8 {
    asset.0.as_bytes()[0]
}

fn weight(asset: AssetId, account: AccountId) -> U256 {
    let mut hasher = Sha256::new();
    hasher.update(asset.0.as_bytes());
    hasher.update(account.0.as_bytes());
    let hash: [u8; 32] = hasher.finalize().into();
    U256::from_be_bytes(hash).reduce_mod(PRIME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use uuid::Uuid;

    fn ids(asset: u8, account: u8) -> (AssetId, AccountId) {
        (AssetId(Uuid::from_u128(asset.into())), AccountId(Uuid::from_u128(u128::from(account) << 64)))
    }

    proptest! {
        #[test]
        fn order_and_split_do_not_matter(mut moves in proptest::collection::vec((0_u8..4, 0_u8..4, any::<u64>(), any::<bool>()), 0..30), at in 0_usize..30) {
            let sum = |moves: &[(u8, u8, u64, bool)]| {
                let mut digest = Digest::default();
                for (asset, account, qty, lost) in moves {
                    let (asset, account) = ids(*asset, *account);
                    let qty = U256::from(*qty);
                    digest.add(asset, account, if *lost { SignedQty::loss(qty) } else { SignedQty::gain(qty) });
                }
                digest
            };
            let whole = sum(&moves);
            let at = at.min(moves.len());
            let mut parts = sum(&moves[..at]);
            parts.merge(sum(&moves[at..]));
            prop_assert_eq!(whole, parts);
            moves.reverse();
            prop_assert_eq!(whole, sum(&moves));
        }
    }

    #[test]
    fn gain_and_loss_cancel_and_states_differ() {
        let (asset, account) = ids(1, 1);
        let mut digest = Digest::default();
        digest.add(asset, account, SignedQty::gain(U256::MAX));
        assert_ne!(digest, Digest::default());
        digest.add(asset, account, SignedQty::loss(U256::MAX));
        assert_eq!(digest, Digest::default());
        let mut one = Digest::default();
        one.add(asset, account, SignedQty::gain(U256::from(1)));
        let mut other = Digest::default();
        other.add(asset, ids(1, 2).1, SignedQty::gain(U256::from(1)));
        assert_ne!(one, other);
    }
}
