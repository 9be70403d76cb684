//! Balances at past heights, by `eth_call`. A node that pruned that state or a contract that refuses gives no
//! answer rather than a guess.

use alloy_primitives::U256;
use serde_json::json;
use tidemark_model::chain::{BalanceAsk, ChainError, Standard};
use tidemark_rpc::{Call, Class, RpcError};

use super::hex::{self, Data};
use super::{EvmAdapter, hex_number};

/// Selector of `ownerOf(uint256)`.
const OWNER_OF: &str = "0x6352211e";
/// Selector of `balanceOf(address,uint256)`.
const BALANCE_OF: &str = "0x00fdd58e";
/// Questions per batch: servers bound the work of one request.
const ASKS_PER_BATCH: usize = 100;

impl EvmAdapter {
    pub(super) async fn read_balances(&self, asks: &[BalanceAsk]) -> Result<Vec<Option<U256>>, ChainError> {
        let mut answers = Vec::with_capacity(asks.len());
        for part in asks.chunks(ASKS_PER_BATCH) {
            let mut known: Vec<Option<Option<U256>>> = vec![None; part.len()];
            let mut last = None;
            for (index, ask) in part.iter().enumerate() {
                if call_of(ask).is_none() {
                    known[index] = Some(None); // Not a question an EVM contract can be asked.
                }
            }
            for _ in 0..self.config.tries_max.max(1) {
                for endpoint in self.pool.ranked() {
                    let open: Vec<usize> = (0..part.len()).filter(|index| known[*index].is_none()).collect();
                    let calls: Vec<Call> = open.iter().filter_map(|index| call_of(&part[*index])).collect();
                    if calls.is_empty() {
                        break;
                    }
                    match self.pool.batch::<Data>(&endpoint, &calls).await {
                        Ok(results) => {
                            for (index, result) in open.into_iter().zip(results) {
                                match result {
                                    Ok(data) => known[index] = Some(answer(&part[index], &data.0)),
                                    Err(error) if error.class() == Class::Reverted => {
                                        known[index] = Some(None)
                                    }
                                    Err(error) => last = Some(error),
                                }
                            }
                        }
                        Err(error) => last = Some(error),
                    }
                }
                if known.iter().all(Option::is_some) || only_pruned(last.as_ref()) {
                    break;
                }
                tokio::time::sleep(self.pool.backoff().pause(1)).await;
            }
            if known.iter().any(Option::is_none)
                && !only_pruned(last.as_ref())
                && let Some(error) = last
            {
                return Err(self.explain("balances", &error));
            }
            answers.extend(known.into_iter().map(Option::flatten));
        }
        Ok(answers)
    }
}

fn only_pruned(error: Option<&RpcError>) -> bool {
    error.is_some_and(|error| error.class() == Class::Pruned)
}

fn call_of(ask: &BalanceAsk) -> Option<Call> {
    let id = tidemark_model::quantity::parse_decimal(&ask.asset.token_id_raw)?;
    let account = hex::fixed::<20>(&ask.account)?;
    let data = match ask.asset.standard {
        Standard::Erc721 => format!("{OWNER_OF}{id:064x}"),
        Standard::Erc1155 => format!("{BALANCE_OF}{:0>64}{id:064x}", ::hex::encode(account)),
    };
    let to = &ask.asset.collection_addr_normalized;
    Some(Call::new("eth_call", json!([{ "to": to, "data": data }, hex_number(ask.at.0)])))
}

/// `None` when the answer is not one word: no contract there, or one with another interface.
fn answer(ask: &BalanceAsk, data: &[u8]) -> Option<U256> {
    let word = U256::from_be_bytes(<[u8; 32]>::try_from(data).ok()?);
    match ask.asset.standard {
        Standard::Erc1155 => Some(word),
        Standard::Erc721 => {
            let account = U256::from_be_slice(&hex::fixed::<20>(&ask.account)?);
            Some(if word == account { U256::from(1) } else { U256::ZERO })
        }
    }
}
