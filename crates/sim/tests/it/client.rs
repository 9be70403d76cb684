//! A small JSON-RPC client for the tests, and hexadecimal helpers.

use std::sync::Once;

use serde_json::{Value, json};
use tidemark_sim::{FaultProfile, Sim, SimConfig, SimServer};

/// A chain of `blocks` blocks and one server of it.
pub(crate) async fn served(blocks: u64, profile: FaultProfile) -> (Sim, SimServer, Client) {
    let sim = Sim::new(SimConfig::small(11));
    sim.mine(blocks);
    let server = sim.serve(([127, 0, 0, 1], 0).into(), profile).await.unwrap();
    let client = Client::new(&server.url);
    (sim, server, client)
}

#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    pub(crate) url: String,
}

pub(crate) struct Raw {
    pub(crate) status: u16,
    pub(crate) body: String,
    pub(crate) retry_after: Option<String>,
}

impl Client {
    pub(crate) fn new(url: &str) -> Self {
        static PROVIDER: Once = Once::new();
        PROVIDER.call_once(|| {
            let _ = rustls::crypto::ring::default_provider().install_default();
        });
        Self { http: reqwest::Client::new(), url: url.to_owned() }
    }

    pub(crate) async fn post(&self, path: &str, body: String) -> Raw {
        let answer = self
            .http
            .post(format!("{}{path}", self.url))
            .header("content-type", "application/json")
            .body(body)
            .send()
            .await
            .unwrap();
        let retry_after = answer.headers().get("retry-after").map(|v| v.to_str().unwrap().to_owned());
        Raw { status: answer.status().as_u16(), body: answer.text().await.unwrap(), retry_after }
    }

    pub(crate) async fn get(&self, path: &str) -> Raw {
        let answer = self.http.get(format!("{}{path}", self.url)).send().await.unwrap();
        Raw { status: answer.status().as_u16(), body: answer.text().await.unwrap(), retry_after: None }
    }

    pub(crate) async fn raw(&self, method: &str, params: Value) -> Raw {
        let call = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        self.post("/", call.to_string()).await
    }

    /// The result of a call; panics on an error.
    pub(crate) async fn call(&self, method: &str, params: Value) -> Value {
        let raw = self.raw(method, params).await;
        let mut answer: Value = serde_json::from_str(&raw.body).unwrap();
        assert_eq!(answer["id"], 1);
        assert!(answer.get("error").is_none(), "{method}: {answer}");
        answer["result"].take()
    }

    /// Code and message of the error a call gives.
    pub(crate) async fn error(&self, method: &str, params: Value) -> (i64, String) {
        let raw = self.raw(method, params).await;
        let answer: Value = serde_json::from_str(&raw.body).unwrap();
        let error = answer.get("error").unwrap_or_else(|| panic!("{method} should fail: {answer}"));
        (error["code"].as_i64().unwrap(), error["message"].as_str().unwrap().to_owned())
    }

    pub(crate) async fn logs(&self, from: u64, to: u64) -> Vec<Value> {
        let filter = json!([{"fromBlock": hex(from), "toBlock": hex(to)}]);
        self.call("eth_getLogs", filter).await.as_array().unwrap().clone()
    }
}

pub(crate) fn hex(value: u64) -> String {
    format!("{value:#x}")
}

pub(crate) fn number(value: &Value) -> u64 {
    u64::from_str_radix(value.as_str().unwrap().strip_prefix("0x").unwrap(), 16).unwrap()
}
