//! One provider: answers JSON-RPC out of the chain, through its profile of faults. Plain functions from
//! request bytes to answer bytes; waiting and sockets are the server's business.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use alloy_primitives::keccak256;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::block::{Block, count};
use crate::book::at;
use crate::call::{self, CallError};
use crate::chain::{Sim, State};
use crate::encode::{HeaderTwist, Transactions, put_block, put_receipt, put_string, put_tx};
use crate::faults::{BeyondHead, BloomFault, Dice, FaultProfile, FinalizedTag, PrunedStyle, RpcError};
use crate::hexed::{self, put_data, put_number};

/// A provider.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) sim: Sim,
    pub(crate) dice: Dice,
    profile: RwLock<Arc<FaultProfile>>,
    calls: Mutex<BTreeMap<String, u64>>,
    served: AtomicU64,
    requests: AtomicU64,
    window: Mutex<Window>,
}

/// Requests of the running second.
#[derive(Debug)]
struct Window {
    since: Instant,
    requests: u32,
}

/// One JSON-RPC call.
#[derive(Debug, Deserialize)]
pub(crate) struct Call<'a> {
    #[serde(borrow, default)]
    pub(crate) id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) method: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(crate) params: Option<&'a RawValue>,
}

/// An answer with its HTTP status.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// What the machine that answers this call can see.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(crate) head: u64,
    pub(crate) left_branch: bool,
}

impl Node {
    pub(crate) fn new(sim: Sim, profile: FaultProfile) -> Self {
        Self {
            sim,
            dice: Dice::new(profile.seed),
            profile: RwLock::new(Arc::new(profile)),
            calls: Mutex::new(BTreeMap::new()),
            served: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            window: Mutex::new(Window { since: Instant::now(), requests: 0 }),
        }
    }

    pub(crate) fn profile(&self) -> Arc<FaultProfile> {
        Arc::clone(&self.profile.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set_profile(&self, profile: FaultProfile) {
        self.dice.reseed(profile.seed);
        *self.profile.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(profile);
    }

    pub(crate) fn calls(&self) -> BTreeMap<String, u64> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts an HTTP request; `false` when it is one too many in its second.
    pub(crate) fn admit(&self, profile: &FaultProfile) -> bool {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let Some(most) = profile.requests_per_sec else { return true };
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if window.since.elapsed() >= Duration::from_secs(1) {
            *window = Window { since: Instant::now(), requests: 0 };
        }
        window.requests += 1;
        window.requests <= most
    }

    pub(crate) fn http_requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Answers a request body: one call or a batch.
    pub(crate) fn answer(&self, body: &[u8]) -> Answer {
        self.answer_through(&self.profile(), body)
    }

    /// The same, of a chain that goes by another id.
    pub(crate) fn answer_as(&self, chain_id: u64, body: &[u8]) -> Answer {
        let named = FaultProfile {
            wrong_chain_id: Some(chain_id),
            wrong_chain_after: 0,
            ..FaultProfile::clone(&self.profile())
        };
        self.answer_through(&named, body)
    }

    fn answer_through(&self, profile: &FaultProfile, body: &[u8]) -> Answer {
        let is_batch = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
        if is_batch {
            let Ok(calls) = serde_json::from_slice::<Vec<Call<'_>>>(body) else {
                return refuse(None, &RpcError::new(-32700, "parse error"));
            };
            return self.answer_batch(profile, &calls);
        }
        match serde_json::from_slice::<Call<'_>>(body) {
            Ok(call) => self.answer_one(profile, &call),
            Err(_) => refuse(None, &RpcError::new(-32700, "parse error")),
        }
    }

    fn answer_batch(&self, profile: &FaultProfile, calls: &[Call<'_>]) -> Answer {
        if calls.is_empty() {
            return refuse(None, &RpcError::new(-32600, "empty batch"));
        }
        if profile.batch_max.is_some_and(|max| calls.len() > max) {
            return refuse(None, &RpcError::new(-32600, "batch too large"));
        }
        let mut answers: Vec<Vec<u8>> =
            calls.iter().map(|call| self.answer_one(profile, call).body).collect();
        if self.dice.hits(profile.wrong_id_in_batch) {
            let stranger = Call { id: None, method: Cow::Borrowed("eth_blockNumber"), params: None };
            let wrong = self.answer_one(profile, &stranger).body;
            let text = String::from_utf8_lossy(&wrong).replacen("\"id\":null", "\"id\":987654321", 1);
            let position = self.dice.below(answers.len());
            answers[position] = text.into_bytes();
        }
        if answers.len() > 1 && self.dice.hits(profile.batch_missing_item) {
            answers.remove(self.dice.below(answers.len()));
        }
        if self.dice.hits(profile.batch_reordered) {
            for position in (1..answers.len()).rev() {
                answers.swap(position, self.dice.below(position + 1));
            }
        }
        let mut body = Vec::with_capacity(answers.iter().map(|answer| answer.len() + 1).sum::<usize>() + 1);
        body.push(b'[');
        for (position, answer) in answers.iter().enumerate() {
            if position > 0 {
                body.push(b',');
            }
            body.extend_from_slice(answer);
        }
        body.push(b']');
        Answer { status: 200, body }
    }

    fn answer_one(&self, profile: &FaultProfile, call: &Call<'_>) -> Answer {
        self.count(&call.method);
        let mut body = opening(call.id);
        body.extend_from_slice(b"\"result\":");
        match self.put_result(profile, &mut body, call) {
            Ok(()) => {
                body.push(b'}');
                Answer { status: 200, body }
            }
            Err(error) => refuse(call.id, &error),
        }
    }

    fn count(&self, method: &str) {
        self.served.fetch_add(1, Ordering::Relaxed);
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        match calls.get_mut(method) {
            Some(count) => *count += 1,
            None => {
                // A hostile client must not grow this without end.
                let name = if calls.len() < 64 { method } else { "other" };
                *calls.entry(name.to_owned()).or_default() += 1;
            }
        }
    }

    fn put_result(&self, profile: &FaultProfile, out: &mut Vec<u8>, call: &Call<'_>) -> Result<(), RpcError> {
        let method = call.method.as_ref();
        if profile.unsupported_methods.iter().any(|name| name == method) {
            return Err(unknown_method(method));
        }
        if self.dice.hits(profile.rpc_throttled) {
            return Err(RpcError::new(-32005, "project ID request rate exceeded: rate limit, compute units"));
        }
        let params = Params::parse(call.params)?;
        let view = self.view(profile);
        match method {
            "eth_chainId" => put_number(out, self.chain_id(profile)),
            "net_version" => put_string(out, &self.chain_id(profile).to_string()),
            "web3_clientVersion" => put_string(out, "TidemarkSim/v1.0.0/linux-amd64/rust"),
            "eth_syncing" => out.extend_from_slice(b"false"),
            "eth_gasPrice" => put_number(out, 1_500_000_000),
            "eth_blockNumber" => {
                let back = if self.dice.hits(profile.head_backwards) {
                    profile.balancer_lag_blocks.max(1)
                } else {
                    0
                };
                put_number(out, view.head.saturating_sub(back));
            }
            "eth_getBlockByNumber" => self.block_by_number(profile, view, out, &params)?,
            "eth_getBlockByHash" => self.block_by_hash(profile, view, out, &params)?,
            "eth_getLogs" => self.logs(profile, view, out, &params)?,
            "eth_getBlockReceipts" => self.block_receipts(profile, view, out, &params)?,
            "eth_getTransactionReceipt" => self.transaction(profile, view, out, &params, Part::Receipt)?,
            "eth_getTransactionByHash" => self.transaction(profile, view, out, &params, Part::Itself)?,
            "eth_getBlockTransactionCountByNumber" => {
                let height = self.height(profile, view, &params.text(0)?)?;
                match self.block_at(&self.sim.read(), view, height) {
                    Some(block) => put_number(out, u64::from(count(block.txs.len()))),
                    None => out.extend_from_slice(b"null"),
                }
            }
            "eth_call" => self.call(profile, view, out, &params)?,
            "eth_getCode" => {
                let address = params.text(0)?;
                let address = hexed::parse_fixed::<20>(&address).ok_or_else(|| bad_param("address"))?;
                let code = self.sim.book().find_contract(&address).map(|_| CODE);
                put_data(out, code.unwrap_or_default());
            }
            "eth_subscribe" | "eth_unsubscribe" => {
                return Err(RpcError::new(-32601, "notifications not supported"));
            }
            other => return Err(unknown_method(other)),
        }
        Ok(())
    }

    fn chain_id(&self, profile: &FaultProfile) -> u64 {
        let served = self.served.load(Ordering::Relaxed);
        match profile.wrong_chain_id {
            Some(wrong) if served > profile.wrong_chain_after => wrong,
            _ => self.sim.config().chain_id,
        }
    }

    fn view(&self, profile: &FaultProfile) -> View {
        let state = self.sim.read();
        let left_branch = profile.on_left_branch && !state.left_branch.is_empty();
        let head = match state.left_branch.last() {
            Some(block) if left_branch => block.number,
            _ => state.head(),
        };
        let behind = if self.dice.hits(profile.balancer_lag) { profile.balancer_lag_blocks } else { 0 };
        View { head: head.saturating_sub(profile.lagging_blocks.max(behind)), left_branch }
    }

    pub(crate) fn block_at(&self, state: &State, view: View, height: u64) -> Option<Arc<Block>> {
        if height > view.head {
            return None;
        }
        match state.left_branch.first() {
            Some(lowest) if view.left_branch && height >= lowest.number => {
                state.left_branch.get(usize::try_from(height - lowest.number).ok()?).cloned()
            }
            _ => state.canonical(height),
        }
    }

    fn finalized(&self, profile: &FaultProfile, view: View) -> Result<u64, RpcError> {
        let right = self.sim.finalized().min(view.head);
        let height = match profile.finalized_tag {
            FinalizedTag::Right => right,
            FinalizedTag::Unsupported => {
                return Err(RpcError::new(-39001, "finalized block not found"));
            }
            FinalizedTag::Latest => view.head,
            FinalizedTag::Ahead(blocks) => right.saturating_add(blocks).min(view.head),
            FinalizedTag::Behind(blocks) => right.saturating_sub(blocks),
        };
        let back = if self.dice.hits(profile.finalized_backwards) { 5 } else { 0 };
        Ok(height.saturating_sub(back))
    }

    /// The height a block parameter means; it may lie above the head.
    pub(crate) fn height(&self, profile: &FaultProfile, view: View, tag: &str) -> Result<u64, RpcError> {
        match tag {
            "latest" | "pending" => Ok(view.head),
            "earliest" => Ok(0),
            "finalized" => self.finalized(profile, view),
            "safe" => {
                let safe = self.sim.safe().min(view.head);
                Ok(safe.max(self.finalized(profile, view)?))
            }
            number => hexed::parse_number(number).ok_or_else(|| bad_param("block number or tag")),
        }
    }

    fn block_by_number(
        &self,
        profile: &FaultProfile,
        view: View,
        out: &mut Vec<u8>,
        params: &Params<'_>,
    ) -> Result<(), RpcError> {
        let height = self.height(profile, view, &params.text(0)?)?;
        let state = self.sim.read();
        let mut block = self.block_at(&state, view, height);
        let mut twist = HeaderTwist::default();
        // Another branch can only exist above finality: below, the fault would be a broken chain.
        if height > state.finalized(self.sim.config()) && self.dice.hits(profile.unlinked_header) {
            let left = state.left_branch.iter().find(|left| left.number == height);
            match (left, &block) {
                (Some(left), _) => block = Some(Arc::clone(left)),
                (None, Some(known)) => twist.hash = Some(keccak256(known.hash).0),
                (None, None) => {}
            }
        }
        drop(state);
        if block.is_none() && profile.beyond_head != BeyondHead::Silent {
            return Err(RpcError::new(-32000, "header not found"));
        }
        self.put_block_or_null(profile, out, params, block, twist)
    }

    fn block_by_hash(
        &self,
        profile: &FaultProfile,
        view: View,
        out: &mut Vec<u8>,
        params: &Params<'_>,
    ) -> Result<(), RpcError> {
        let hash = params.hash(0)?;
        let block = self.sim.read().by_hash.get(&hash).filter(|block| block.number <= view.head).cloned();
        self.put_block_or_null(profile, out, params, block, HeaderTwist::default())
    }

    fn put_block_or_null(
        &self,
        profile: &FaultProfile,
        out: &mut Vec<u8>,
        params: &Params<'_>,
        block: Option<Arc<Block>>,
        mut twist: HeaderTwist,
    ) -> Result<(), RpcError> {
        let block = block.filter(|_| !self.dice.hits(profile.null_block));
        let Some(block) = block else {
            out.extend_from_slice(b"null");
            return Ok(());
        };
        twist.bloom = match profile.bloom {
            BloomFault::Right => None,
            BloomFault::Zero => Some([0; 256]),
            BloomFault::Full => Some([255; 256]),
        };
        let transactions = if params.flag(1) { Transactions::Full } else { Transactions::Hashes };
        put_block(out, self.sim.book(), &block, transactions, &twist);
        Ok(())
    }

    /// Whether `height` is pruned and the provider keeps silent about it.
    pub(crate) fn pruned(&self, profile: &FaultProfile, height: u64) -> Result<bool, RpcError> {
        if height >= profile.pruned_below {
            return Ok(false);
        }
        match profile.pruned_style {
            PrunedStyle::Empty => Ok(true),
            PrunedStyle::MissingTrieNode => {
                let node = hexed::text(&keccak256(height.to_be_bytes())[..]);
                Err(RpcError::new(-32000, format!("missing trie node {} (path ) <nil>", &node[2..])))
            }
            PrunedStyle::HistoryPruned => Err(RpcError::new(4444, "history has been pruned for this block")),
        }
    }

    fn block_receipts(
        &self,
        profile: &FaultProfile,
        view: View,
        out: &mut Vec<u8>,
        params: &Params<'_>,
    ) -> Result<(), RpcError> {
        let asked = params.text(0)?;
        let block = if asked.len() == 66 {
            let hash = params.hash(0)?;
            self.sim.read().by_hash.get(&hash).filter(|block| block.number <= view.head).cloned()
        } else {
            let height = self.height(profile, view, &asked)?;
            self.block_at(&self.sim.read(), view, height)
        };
        let block = block.filter(|_| !self.dice.hits(profile.missing_receipts));
        let Some(block) = block else {
            out.extend_from_slice(b"null");
            return Ok(());
        };
        if self.pruned(profile, block.number)? {
            out.extend_from_slice(b"null");
            return Ok(());
        }
        out.push(b'[');
        if !self.dice.hits(profile.empty_receipts) {
            for position in 0..count(block.txs.len()) {
                if position > 0 {
                    out.push(b',');
                }
                put_receipt(out, self.sim.book(), &block, position, profile.log_numbering);
            }
        }
        out.push(b']');
        Ok(())
    }

    fn transaction(
        &self,
        profile: &FaultProfile,
        view: View,
        out: &mut Vec<u8>,
        params: &Params<'_>,
        part: Part,
    ) -> Result<(), RpcError> {
        let hash = params.hash(0)?;
        let found = {
            let state = self.sim.read();
            let place = state.tx_places.get(&hash).copied();
            place.and_then(|(height, position)| Some((self.block_at(&state, view, height)?, position)))
        };
        // On a left branch the same place holds another transaction.
        let found =
            found.filter(|(block, position)| block.txs.get(at(*position)).is_some_and(|tx| tx.hash == hash));
        let missing = part == Part::Receipt && self.dice.hits(profile.missing_receipts);
        match found.filter(|_| !missing) {
            Some((block, _)) if self.pruned(profile, block.number)? => out.extend_from_slice(b"null"),
            Some((block, position)) => match part {
                Part::Receipt => put_receipt(out, self.sim.book(), &block, position, profile.log_numbering),
                Part::Itself => put_tx(out, self.sim.book(), &block, position, block.hash),
            },
            None => out.extend_from_slice(b"null"),
        }
        Ok(())
    }

    fn call(
        &self,
        profile: &FaultProfile,
        view: View,
        out: &mut Vec<u8>,
        params: &Params<'_>,
    ) -> Result<(), RpcError> {
        let asked: CallObject = params.parse_as(0)?;
        let to = asked.to.as_deref().and_then(hexed::parse_fixed::<20>).ok_or_else(|| bad_param("to"))?;
        let input = asked.input.or(asked.data).unwrap_or_else(|| "0x".to_owned());
        let input = hexed::parse_bytes(&input).ok_or_else(|| bad_param("data"))?;
        let block = self.call_block(profile, view, params)?;
        let block = block.ok_or_else(|| RpcError::new(-32000, "header not found"))?;
        if self.pruned(profile, block.number)? {
            put_data(out, &[]);
            return Ok(());
        }
        let balances = self.sim.balances_at(&block);
        match call::view(self.sim.book(), &balances, &to, &input) {
            Ok(value) => put_data(out, &value),
            Err(CallError::BadInput) => return Err(reverted("")),
            Err(CallError::Reverted(reason)) => return Err(reverted(reason)),
        }
        Ok(())
    }

    /// The block an `eth_call` is made at: a number, a tag, or an object with either or a hash (EIP-1898).
    fn call_block(
        &self,
        profile: &FaultProfile,
        view: View,
        params: &Params<'_>,
    ) -> Result<Option<Arc<Block>>, RpcError> {
        let at_block: BlockParam = match params.get(1) {
            Some(raw) => serde_json::from_str(raw.get()).map_err(|_| bad_param("block"))?,
            None => BlockParam::Tag("latest".to_owned()),
        };
        let hash = match &at_block {
            BlockParam::Tag(tag) if tag.len() == 66 => Some(tag),
            BlockParam::Object { block_hash, .. } => block_hash.as_ref(),
            BlockParam::Tag(_) => None,
        };
        if let Some(hash) = hash {
            let hash = hexed::parse_fixed::<32>(hash).ok_or_else(|| bad_param("blockHash"))?;
            let state = self.sim.read();
            let block = state.by_hash.get(&hash).filter(|block| block.number <= view.head).cloned();
            // State of left branches is not kept.
            return Ok(
                block.filter(|block| state.canonical(block.number).is_some_and(|known| known.hash == hash))
            );
        }
        let tag = match at_block {
            BlockParam::Tag(tag) => tag,
            BlockParam::Object { block_number, .. } => block_number.ok_or_else(|| bad_param("block"))?,
        };
        let height = self.height(profile, view, &tag)?;
        Ok(self.block_at(&self.sim.read(), View { left_branch: false, ..view }, height))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Receipt,
    Itself,
}

#[derive(Debug, Deserialize)]
struct CallObject {
    to: Option<String>,
    input: Option<String>,
    data: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum BlockParam {
    Tag(String),
    #[serde(rename_all = "camelCase")]
    Object {
        block_hash: Option<String>,
        block_number: Option<String>,
    },
}

/// Code every contract has: enough to be told from an account without code.
const CODE: &[u8] = &[0x60, 0x80, 0x60, 0x40, 0x52, 0x34, 0x80, 0x15, 0x60, 0x0f, 0x57, 0x5f, 0x80, 0xfd];

/// Positional parameters, each still raw.
pub(crate) struct Params<'a>(Vec<&'a RawValue>);

impl<'a> Params<'a> {
    fn parse(raw: Option<&'a RawValue>) -> Result<Self, RpcError> {
        match raw {
            None => Ok(Self(Vec::new())),
            Some(raw) => {
                serde_json::from_str(raw.get()).map(Self).map_err(|_| RpcError::new(-32602, "non-array args"))
            }
        }
    }

    fn get(&self, position: usize) -> Option<&'a RawValue> {
        self.0.get(position).copied().filter(|raw| raw.get() != "null")
    }

    pub(crate) fn parse_as<T: Deserialize<'a>>(&self, position: usize) -> Result<T, RpcError> {
        let raw = self.get(position).ok_or_else(|| {
            RpcError::new(-32602, format!("missing value for required argument {position}"))
        })?;
        serde_json::from_str(raw.get()).map_err(|_| bad_param(&format!("argument {position}")))
    }

    fn text(&self, position: usize) -> Result<String, RpcError> {
        self.parse_as(position)
    }

    fn hash(&self, position: usize) -> Result<[u8; 32], RpcError> {
        hexed::parse_fixed::<32>(&self.text(position)?).ok_or_else(|| bad_param("hash"))
    }

    fn flag(&self, position: usize) -> bool {
        self.get(position).is_some_and(|raw| raw.get() == "true")
    }
}

pub(crate) fn bad_param(what: &str) -> RpcError {
    RpcError::new(-32602, format!("invalid argument: {what}"))
}

fn unknown_method(method: &str) -> RpcError {
    RpcError::new(-32601, format!("the method {method:.64} does not exist/is not available"))
}

fn reverted(reason: &str) -> RpcError {
    let message = if reason.is_empty() {
        "execution reverted".to_owned()
    } else {
        format!("execution reverted: {reason}")
    };
    RpcError { status: 200, code: 3, message, data: Some(call::revert_data(reason)) }
}

fn opening(id: Option<&RawValue>) -> Vec<u8> {
    let mut body = Vec::with_capacity(1024);
    body.extend_from_slice(b"{\"jsonrpc\":\"2.0\",\"id\":");
    body.extend_from_slice(id.map_or("null", RawValue::get).as_bytes());
    body.push(b',');
    body
}

fn refuse(id: Option<&RawValue>, error: &RpcError) -> Answer {
    let mut body = opening(id);
    body.extend_from_slice(b"\"error\":{\"code\":");
    body.extend_from_slice(error.code.to_string().as_bytes());
    body.extend_from_slice(b",\"message\":");
    put_string(&mut body, &error.message);
    if let Some(data) = &error.data {
        body.extend_from_slice(b",\"data\":");
        put_data(&mut body, data);
    }
    body.extend_from_slice(b"}}");
    Answer { status: error.status, body }
}
