//! `mode = full`: whole blocks with transactions and receipts. Logs come from the receipts, unfiltered, so
//! their indexes can be checked for holes and their bloom against the header's: a block that passes cannot
//! miss a log with a value of its own.

use alloy_primitives::U256;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use tidemark_model::chain::{BlockCoverage, RawBatch, RawBlock, RawTransaction};
use tidemark_model::ids::{Height, HeightRange, TxId};
use tidemark_rpc::{Call, Class, RpcError};

use super::config::BloomPolicy;
use super::fetch::{Miss, Reader, arena, block, record};
use super::parse::Claim;
use super::wire::{Header, Log, Receipt};
use super::{bloom, check, hex, hex_number};

impl Reader<'_> {
    /// Whole blocks, stopping before the first one the endpoint does not have.
    pub(super) async fn full(&self, range: HeightRange) -> Result<RawBatch, Miss> {
        let calls: Vec<Call> = (range.from().0..range.to().0)
            .map(|number| Call::new("eth_getBlockByNumber", json!([hex_number(number), true])))
            .collect();
        let mut bodies = Vec::with_capacity(calls.len());
        for (number, body) in (range.from().0..).zip(self.all::<Value>(&calls).await?) {
            if body.is_null() {
                break; // Not available yet: what came before it is still good.
            }
            let header =
                Header::deserialize(&body).map_err(|error| Miss::Bad(format!("block {number}: {error}")))?;
            if header.number.0 != number {
                return Err(Miss::Bad(format!("block {} came for {number}", header.number.0)));
            }
            bodies.push((header, body));
        }
        let headers: Vec<Header> = bodies.iter().map(|(header, _)| header.clone()).collect();
        let Some(last) = headers.last() else {
            return Err(Miss::Behind(format!("{} has no block {} now", self.endpoint.label(), range.from())));
        };
        let head = last.number.0;
        self.endpoint.saw_head(head);
        self.passed("head_reached");
        check::links(&headers).map_err(Miss::Behind)?;
        self.passed("parent_links");
        let receipts = self.receipts_of_blocks(&bodies).await?;
        let mut blocks = Vec::with_capacity(bodies.len());
        let (mut records, mut foreign) = (0_u64, 0_u64);
        for ((header, body), receipts) in bodies.into_iter().zip(receipts) {
            let (built, of_block) = self.whole_block(&header, body, receipts)?;
            records += u64::try_from(built.records.len()).unwrap_or(u64::MAX);
            foreign += of_block;
            blocks.push(built);
        }
        let covered = HeightRange::inclusive(range.from(), Height(head)).unwrap_or(range);
        Ok(RawBatch { covered, blocks, evidence: self.evidence(head, records, foreign, BlockCoverage::All) })
    }

    /// Receipts per block: one call per block, or one per transaction where the node knows no better.
    async fn receipts_of_blocks(&self, bodies: &[(Header, Value)]) -> Result<Vec<Vec<Value>>, Miss> {
        let calls: Vec<Call> = bodies
            .iter()
            .map(|(header, _)| Call::new("eth_getBlockReceipts", json!([hex_number(header.number.0)])))
            .collect();
        self.sent(self.endpoint, calls.len());
        let answers = self.adapter.pool.batch::<Option<Vec<Value>>>(self.endpoint, &calls).await?;
        let mut all = Vec::with_capacity(bodies.len());
        for ((header, body), answer) in bodies.iter().zip(answers) {
            let number = header.number.0;
            match answer {
                Ok(Some(receipts)) => all.push(receipts),
                Ok(None) => {
                    return Err(Miss::Behind(format!("receipts of block {number} are not there yet")));
                }
                Err(RpcError::Refused { class: Class::UnknownMethod, .. }) => {
                    all.push(self.receipts_one_by_one(number, body).await?);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(all)
    }

    async fn receipts_one_by_one(&self, number: u64, body: &Value) -> Result<Vec<Value>, Miss> {
        let calls: Vec<Call> = transactions(body)
            .iter()
            .filter_map(|tx| tx.get("hash"))
            .map(|hash| Call::new("eth_getTransactionReceipt", json!([hash])))
            .collect();
        let receipts = self.all::<Value>(&calls).await?;
        if receipts.iter().any(Value::is_null) {
            return Err(Miss::Behind(format!("a receipt of block {number} is not there yet")));
        }
        Ok(receipts)
    }

    fn whole_block(
        &self,
        header: &Header,
        mut body: Value,
        values: Vec<Value>,
    ) -> Result<(RawBlock, u64), Miss> {
        let number = header.number.0;
        let bad = |reason: &str| Miss::Bad(format!("block {number}: {reason}"));
        let txs = match body.get_mut("transactions").map(Value::take) {
            Some(Value::Array(txs)) => txs,
            _ => return Err(bad("no list of transactions")),
        };
        if values.len() != txs.len() {
            // A node that has the block and not its receipts is behind itself.
            return Err(Miss::Behind(format!(
                "block {number} has {} transactions and {} receipts",
                txs.len(),
                values.len()
            )));
        }
        let mut receipts = Vec::with_capacity(values.len());
        for value in &values {
            let receipt = Receipt::deserialize(value).map_err(|error| bad(&error.to_string()))?;
            if receipt.block_hash != header.hash {
                return Err(Miss::Behind(format!("a receipt of block {number} names another block")));
            }
            receipts.push(receipt);
        }
        receipts.sort_by_key(|receipt| receipt.transaction_index.0);
        self.passed("receipt_count");
        let logs: Vec<Log> = receipts.iter().flat_map(|receipt| receipt.logs.iter().cloned()).collect();
        check_order(&logs).map_err(|reason| bad(&reason))?;
        self.passed("log_order");
        if logs.iter().enumerate().all(|(index, log)| u64::try_from(index) == Ok(log.log_index.0)) {
            self.passed("log_index_without_holes");
        }
        if let Some(expected) = header.logs_bloom.as_deref()
            && self.adapter.config.bloom == BloomPolicy::Check
        {
            if bloom::of_logs(&logs) != *expected {
                return Err(bad("the receipts' logs do not give the header's bloom"));
            }
            self.passed("bloom_equal");
        }
        let arena = arena(logs.iter());
        let mut at = 0;
        let records = logs.iter().map(|log| record(log, &arena, &mut at)).collect();
        let foreign = logs.iter().filter(|log| self.is_foreign(log)).count();
        let mut built = block(header, records).map_err(|reason| bad(&reason))?;
        let mut extras: Vec<Option<Value>> = values.into_iter().map(Some).collect();
        for (index, tx) in txs.into_iter().enumerate() {
            let hash = tx.get("hash").and_then(Value::as_str).and_then(hex::fixed::<32>);
            let hash = hash.ok_or_else(|| bad("a transaction without hash"))?;
            let receipt = receipts.iter().find(|receipt| receipt.transaction_hash.0 == hash);
            let receipt = receipt.ok_or_else(|| bad("a transaction without receipt"))?;
            let extra = extras.iter_mut().find(|extra| names(extra.as_ref(), &hash)).and_then(Option::take);
            let index = u32::try_from(index).map_err(|_| bad("too many transactions"))?;
            built.transactions.push(transaction(tx, index, hash, receipt, extra).map_err(&bad)?);
        }
        if let Value::Object(fields) = &mut body {
            for column in ["number", "hash", "parentHash", "timestamp", "transactions", "logsBloom"] {
                fields.remove(column);
            }
        }
        built.payload = Some(body);
        Ok((built, u64::try_from(foreign).unwrap_or(u64::MAX)))
    }

    fn is_foreign(&self, log: &Log) -> bool {
        let topics = log.topics.as_slice();
        let topic0 = topics.first().map(|topic| &topic[..]);
        self.adapter.known.claim(&log.address.0, topic0, topics.len()) == Claim::Foreign
    }
}

fn check_order(logs: &[Log]) -> Result<(), String> {
    if logs
        .iter()
        .any(|log| u32::try_from(log.log_index.0).is_err() || u32::try_from(log.transaction_index.0).is_err())
    {
        return Err("an index beyond 32 bits".to_owned());
    }
    match logs.windows(2).find(|pair| pair[0].log_index.0 >= pair[1].log_index.0) {
        Some(pair) => Err(format!("log index {} came after {}", pair[1].log_index.0, pair[0].log_index.0)),
        None => Ok(()),
    }
}

fn transactions(body: &Value) -> &[Value] {
    body.get("transactions").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn names(receipt: Option<&Value>, hash: &[u8; 32]) -> bool {
    let named =
        receipt.and_then(|receipt| receipt.get("transactionHash")?.as_str()).and_then(hex::fixed::<32>);
    named == Some(*hash)
}

fn transaction(
    mut tx: Value,
    index: u32,
    hash: [u8; 32],
    receipt: &Receipt,
    extra: Option<Value>,
) -> Result<RawTransaction, &'static str> {
    let text = |field: &str| tx.get(field).and_then(Value::as_str);
    let address = |text: &str| hex::fixed::<20>(text).map(|bytes| Bytes::copy_from_slice(&bytes));
    // System transactions of some chains have no sender in the JSON; zero stands for the system.
    let sender = match text("from") {
        Some(from) => address(from).ok_or("a sender that is no address")?,
        None => Bytes::from_static(&[0; 20]),
    };
    let receiver = match text("to") {
        Some(to) if to != "0x" => Some(address(to).ok_or("a receiver that is no address")?),
        _ => None,
    };
    let value = match tx.get("value") {
        Some(Value::String(value)) => hex::quantity256(value).ok_or("a value that is no number")?,
        Some(Value::Number(number)) => number.as_u64().map(U256::from).ok_or("a value that is no number")?,
        _ => U256::ZERO,
    };
    if let Value::Object(fields) = &mut tx {
        for column in ["hash", "from", "to", "value", "blockHash", "blockNumber", "transactionIndex"] {
            fields.remove(column);
        }
        if let Some(Value::Object(mut rest)) = extra {
            for column in [
                "logs",
                "logsBloom",
                "blockHash",
                "blockNumber",
                "transactionHash",
                "transactionIndex",
                "from",
                "to",
                "status",
            ] {
                rest.remove(column);
            }
            fields.insert("receipt".to_owned(), Value::Object(rest));
        }
    }
    Ok(RawTransaction {
        id: TxId::from(hash),
        index,
        sender,
        receiver,
        value,
        succeeded: receipt.status,
        payload: tx,
    })
}
