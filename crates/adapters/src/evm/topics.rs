//! The events we ask for, and the old contracts that wrote them before the standards settled.

use alloy_primitives::hex_literal::hex;

/// `Transfer(address,address,uint256)`: ERC-721, and ERC-20 alike.
pub const TRANSFER: [u8; 32] = hex!("ddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef");
/// ERC-1155 `TransferSingle(address,address,address,uint256,uint256)`.
pub const TRANSFER_SINGLE: [u8; 32] =
    hex!("c3d58168c5ae7397731d063d5bbf3d657854427343f4c083240f7aacaa2d0f62");
/// ERC-1155 `TransferBatch(address,address,address,uint256[],uint256[])`.
pub const TRANSFER_BATCH: [u8; 32] = hex!("4a39dc06d4c0dbc64b70af90fd698a233a518aa5d07e595d983b8c0526c8f7fb");
/// ERC-1155 `URI(string,uint256)`.
pub const URI: [u8; 32] = hex!("6bb7ff708619ba0610cba295a58592e0451dee2622938c8755667688daf3529b");

/// All of them, in the order of the filter.
pub const OURS: [[u8; 32]; 4] = [TRANSFER, TRANSFER_SINGLE, TRANSFER_BATCH, URI];

/// A contract whose `Transfer` indexes nothing and yet is an NFT's.
#[derive(Debug, Clone, Copy)]
pub struct Legacy {
    /// On which chain.
    pub chain_id: u64,
    /// Where.
    pub address: [u8; 20],
}

/// Contracts known to emit `Transfer` with one topic and three words for NFTs.
pub const LEGACY: &[Legacy] = &[
    // CryptoKitties, written against a draft of ERC-721.
    Legacy { chain_id: 1, address: hex!("06012c8cf97bead5deae237070f9587f8e7a266d") },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_are_the_hashes_of_their_signatures() {
        for (signature, topic) in [
            ("Transfer(address,address,uint256)", TRANSFER),
            ("TransferSingle(address,address,address,uint256,uint256)", TRANSFER_SINGLE),
            ("TransferBatch(address,address,address,uint256[],uint256[])", TRANSFER_BATCH),
            ("URI(string,uint256)", URI),
        ] {
            assert_eq!(alloy_primitives::keccak256(signature).0, topic, "{signature}");
        }
    }
}
