//! A real node and real contracts: OpenZeppelin's tokens on anvil. The chain itself is the judge: what we say
//! about owners is compared with `ownerOf` and `balanceOf`, now and at the finalized block.

mod live;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use alloy_primitives::{Address, U256, keccak256};
use serde_json::{Value, json};
use tidemark_testkit::{Anvil, tools};

use live::{Live, PATIENCE};

const CHAIN_ID: u64 = 31_337;
/// Anvil calls final what is two epochs old.
const EPOCH_SLOTS: &str = "2";
const FINALITY_LAG: u64 = 4;
/// Token ids that the tests use, in both contracts.
const IDS: std::ops::RangeInclusive<u64> = 1..=6;

/// One argument of a call.
enum Arg {
    Word(U256),
    Words(Vec<U256>),
    Bytes,
}

impl From<Address> for Arg {
    fn from(address: Address) -> Self {
        Self::Word(U256::from_be_bytes(address.into_word().0))
    }
}
impl From<u64> for Arg {
    fn from(number: u64) -> Self {
        Self::Word(U256::from(number))
    }
}
impl<const N: usize> From<[u64; N]> for Arg {
    fn from(numbers: [u64; N]) -> Self {
        Self::Words(numbers.map(U256::from).to_vec())
    }
}

/// ABI encoding of a call, as far as these contracts need it.
fn call(signature: &str, args: &[Arg]) -> String {
    let (mut head, mut tail) = (vec![], vec![]);
    for arg in args {
        let offset = U256::from(32 * (args.len() + tail.len()));
        match arg {
            Arg::Word(word) => head.push(*word),
            Arg::Words(words) => {
                head.push(offset);
                tail.push(U256::from(words.len()));
                tail.extend(words);
            }
            Arg::Bytes => {
                head.push(offset);
                tail.push(U256::ZERO);
            }
        }
    }
    let mut data = keccak256(signature)[..4].to_vec();
    data.extend(head.iter().chain(&tail).flat_map(|word| word.to_be_bytes::<32>()));
    format!("0x{}", hex::encode(data))
}

/// The node, its accounts and the two contracts on it.
struct Chain {
    anvil: Anvil,
    http: reqwest::Client,
    people: Vec<Address>,
    token721: Address,
    token1155: Address,
}

type Balances = BTreeMap<(Address, u64, Address), U256>;

impl Chain {
    async fn new() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let anvil = Anvil::start(&["--slots-in-an-epoch", EPOCH_SLOTS]).await.expect("anvil starts");
        let http = reqwest::Client::new();
        let mut chain =
            Self { anvil, http, people: vec![], token721: Address::ZERO, token1155: Address::ZERO };
        let people = chain.rpc("eth_accounts", json!([])).await;
        chain.people = serde_json::from_value(people).expect("addresses");
        chain.people.truncate(4);
        chain.token721 = chain.deploy("Token721").await;
        chain.token1155 = chain.deploy("Token1155").await;
        chain
    }

    async fn rpc(&self, method: &str, params: Value) -> Value {
        let question = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let answer = self.http.post(&self.anvil.url).json(&question).send().await.expect("anvil answers");
        let mut answer: Value = answer.json().await.expect("JSON");
        assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
        answer["result"].take()
    }

    async fn deploy(&self, name: &str) -> Address {
        let path = tools::folder().join(format!("contracts/{name}.json"));
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}: run `make setup-test`", path.display()));
        let made: Value = serde_json::from_str(&text).expect("a compiled contract");
        let transaction = json!({ "from": self.people[0], "data": made["bytecode"] });
        let receipt = self.send(transaction).await;
        serde_json::from_value(receipt["contractAddress"].clone()).expect("an address")
    }

    /// Sends it and returns its receipt; anvil signs for its own accounts and mines it by itself.
    async fn send(&self, transaction: Value) -> Value {
        let hash = self.rpc("eth_sendTransaction", json!([transaction])).await;
        let deadline = Instant::now() + PATIENCE;
        let receipt = loop {
            let receipt = self.rpc("eth_getTransactionReceipt", json!([hash])).await;
            if !receipt.is_null() {
                break receipt;
            }
            assert!(Instant::now() < deadline, "anvil does not mine {hash}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        assert_eq!(receipt["status"], "0x1", "{hash} failed: {receipt}");
        receipt
    }

    fn request(&self, from: usize, to: Address, signature: &str, args: &[Arg]) -> Value {
        json!({ "from": self.people[from], "to": to, "data": call(signature, args), "gas": "0x7a120" })
    }

    async fn act(&self, from: usize, to: Address, signature: &str, args: &[Arg]) {
        self.send(self.request(from, to, signature, args)).await;
    }

    /// Mints, transfers, burns and batches: every way a balance can change.
    async fn live(&self) {
        let (nft, multi) = (self.token721, self.token1155);
        let person = |at: usize| Arg::from(self.people[at]);
        for id in 1..=4_u64 {
            self.act(0, nft, "mint(address,uint256)", &[person(0), id.into()]).await;
        }
        let transfer = "transferFrom(address,address,uint256)";
        self.act(0, nft, transfer, &[person(0), person(1), 2.into()]).await;
        self.act(1, nft, transfer, &[person(1), person(2), 2.into()]).await;
        self.act(0, nft, "burn(uint256)", &[3.into()]).await;
        self.act(0, multi, "mint(address,uint256,uint256)", &[person(0), 1.into(), 100.into()]).await;
        let mint_batch = "mintBatch(address,uint256[],uint256[])";
        self.act(0, multi, mint_batch, &[person(1), [2, 3].into(), [50, 7].into()]).await;
        // One id twice in one batch.
        self.act(0, multi, mint_batch, &[person(1), [4, 4].into(), [5, 6].into()]).await;
        let single = "safeTransferFrom(address,address,uint256,uint256,bytes)";
        self.act(0, multi, single, &[person(0), person(2), 1.into(), 30.into(), Arg::Bytes]).await;
        let batch = "safeBatchTransferFrom(address,address,uint256[],uint256[],bytes)";
        let sent = [person(1), person(3), [2, 4].into(), [20, 11].into(), Arg::Bytes];
        self.act(1, multi, batch, &sent).await;
        self.act(2, multi, "burn(uint256,uint256)", &[1.into(), 10.into()]).await;
        // To oneself: nothing changes, and nothing may be counted twice.
        self.act(3, multi, single, &[person(3), person(3), 2.into(), 20.into(), Arg::Bytes]).await;
    }

    async fn block(&self, which: Value) -> (u64, String) {
        let block = self.rpc("eth_getBlockByNumber", json!([which, false])).await;
        let number = block["number"].as_str().expect("a number").trim_start_matches("0x");
        let hash = block["hash"].as_str().expect("a hash").to_owned();
        (u64::from_str_radix(number, 16).expect("a number"), hash)
    }

    /// What the contracts themselves say at a height.
    async fn balances(&self, height: u64) -> Balances {
        let mut found = Balances::new();
        let at = format!("{height:#x}");
        for id in IDS {
            for person in &self.people {
                let data = call("balanceOf(address,uint256)", &[(*person).into(), id.into()]);
                let answer = self.rpc("eth_call", json!([{ "to": self.token1155, "data": data }, at])).await;
                let amount: U256 = answer.as_str().expect("a word").parse().expect("a number");
                if !amount.is_zero() {
                    found.insert((self.token1155, id, *person), amount);
                }
            }
            // Asked through the raw answer: for a token that does not exist the contract reverts.
            let data = call("ownerOf(uint256)", &[id.into()]);
            let params = json!([{ "to": self.token721, "data": data }, at]);
            let question = json!({ "jsonrpc": "2.0", "id": 1, "method": "eth_call", "params": params });
            let answer = self.http.post(&self.anvil.url).json(&question).send().await.expect("anvil answers");
            let answer: Value = answer.json().await.expect("JSON");
            if let Some(word) = answer["result"].as_str() {
                let owner: Address = format!("0x{}", &word[26..]).parse().expect("an address");
                found.insert((self.token721, id, owner), U256::ONE);
            }
        }
        found
    }

    /// What the API says; `field` is `qty` or `qty_finalized`.
    async fn answered(&self, live: &Live, query: &str, field: &str) -> Balances {
        let mut found = Balances::new();
        for contract in [self.token721, self.token1155] {
            for id in IDS {
                let path = format!("/v1/assets/{}/{contract:#x}/{id}/owners?{query}", live.slug);
                let Some(answer) = live.get(&path).await else { continue };
                for owner in answer["items"].as_array().expect("a list") {
                    let address: Address = serde_json::from_value(owner["address"].clone()).expect("named");
                    let qty: U256 = owner[field].as_str().expect("text").parse().expect("a number");
                    if !qty.is_zero() {
                        found.insert((contract, id, address), qty);
                    }
                }
            }
        }
        found
    }

    /// Waits until our owners are the chain's, both at its head and at its finalized block.
    async fn agrees_with(&self, live: &mut Live) {
        let (head, hash) = self.block(json!("latest")).await;
        let (finalized, _) = self.block(json!("finalized")).await;
        assert_eq!(finalized, head - FINALITY_LAG, "anvil has another idea of finality");
        live.reads_up_to(head, &hash).await;
        let status_path = format!("/v1/networks/{}/status", live.slug);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = live.get(&status_path).await.unwrap_or_default();
            let at = status["item"]["finalized_height"].as_u64();
            assert!(
                at.is_none_or(|at| at <= finalized),
                "final before the node says so: {at:?} > {finalized}"
            );
            if at == Some(finalized) {
                break;
            }
            live.not_yet(deadline, &format!("block {finalized} is final"), &status).await;
        }
        let now = self.balances(head).await;
        let then = self.balances(finalized).await;
        assert_ne!(now, then, "a test in which finality makes no difference proves nothing");
        assert_eq!(self.answered(live, "", "qty").await, now, "owners at the head");
        // Owners who have sold since are in the finalized view only, and new ones are final with what they had.
        let finalized_of_owners = self.answered(live, "", "qty_finalized").await;
        let expected: Balances = then.iter().filter(|(key, _)| now.contains_key(*key)).map(copied).collect();
        let known: Balances =
            finalized_of_owners.iter().filter(|(key, _)| now.contains_key(*key)).map(copied).collect();
        assert_eq!(known, expected, "finalized amounts of the owners at the head");
        assert_eq!(
            self.answered(live, "min_finality=finalized", "qty_finalized").await,
            then,
            "final owners"
        );
    }
}

fn copied((key, qty): (&(Address, u64, Address), &U256)) -> ((Address, u64, Address), U256) {
    (*key, *qty)
}

#[tokio::test(flavor = "multi_thread")]
async fn owners_are_the_contracts_own_answer_also_after_a_reorg() {
    let chain = Chain::new().await;
    chain.live().await;
    let mut live = Live::start("anvil", CHAIN_ID, &chain.anvil.url).await;
    chain.agrees_with(&mut live).await;

    // While we watch.
    let person = |at: usize| Arg::from(chain.people[at]);
    let transfer = "transferFrom(address,address,uint256)";
    chain.act(0, chain.token721, transfer, &[person(0), person(3), 1.into()]).await;
    chain.act(0, chain.token721, "mint(address,uint256)", &[person(1), 5.into()]).await;
    chain.agrees_with(&mut live).await;

    // Both blocks are replaced: token 1 goes to somebody else, token 5 was never minted, 6 is instead.
    let other = chain.request(0, chain.token721, transfer, &[person(0), person(2), 1.into()]);
    let mint = chain.request(0, chain.token721, "mint(address,uint256)", &[person(1), 6.into()]);
    let before = chain.block(json!("latest")).await;
    chain.rpc("anvil_reorg", json!([2, [[other, 0], [mint, 1]]])).await;
    let after = chain.block(json!("latest")).await;
    assert!(after.0 == before.0 && after.1 != before.1, "anvil did not reorganise: {before:?}, {after:?}");
    chain.agrees_with(&mut live).await;
    let head = chain.balances(after.0).await;
    assert!(head.contains_key(&(chain.token721, 1, chain.people[2])), "the replaced transfer did not run");
    assert!(head.contains_key(&(chain.token721, 6, chain.people[1])), "the replaced mint did not run");

    // And when all of it is final.
    chain.act(0, chain.token1155, "mint(address,uint256,uint256)", &[person(0), 5.into(), 9.into()]).await;
    chain.rpc("anvil_mine", json!(["0x3"])).await;
    chain.agrees_with(&mut live).await;
    let status = live.get("/v1/networks/anvil/status").await.expect("a status");
    assert_eq!(status["item"]["reorgs_total"], 1, "{status}");
    let (code, log) = live.stop();
    assert_eq!(code, Some(0), "{log}");
}
