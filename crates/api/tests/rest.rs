//! Every route of /v1 over a seeded database, through the real router and the API's own role.

mod seed;

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use seed::{ETH, FINALIZED, HEAD, Seed};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tower::ServiceExt as _;

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Value,
}

async fn send(seed: &Seed, request: Request<Body>) -> anyhow::Result<Answer> {
    let response = seed.router.clone().oneshot(request).await?;
    let (status, headers) = (response.status(), response.headers().clone());
    let bytes = axum::body::to_bytes(response.into_body(), 10 << 20).await?;
    let body = serde_json::from_slice(&bytes)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
    Ok(Answer { status, headers, body })
}

async fn get(seed: &Seed, path: &str) -> anyhow::Result<Answer> {
    send(seed, Request::get(path).body(Body::empty())?).await
}

async fn ok(seed: &Seed, path: &str) -> anyhow::Result<Value> {
    let answer = get(seed, path).await?;
    assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
    Ok(answer.body)
}

async fn refused(seed: &Seed, path: &str, status: u16, code: &str) -> anyhow::Result<Answer> {
    let answer = get(seed, path).await?;
    assert_eq!(
        (answer.status.as_u16(), answer.body["code"].as_str()),
        (status, Some(code)),
        "{path}: {}",
        answer.body
    );
    assert_eq!(answer.headers["content-type"], "application/problem+json");
    assert_eq!(answer.body["status"], status);
    for field in ["type", "title", "detail", "hint"] {
        assert!(answer.body[field].as_str().is_some_and(|text| !text.is_empty()), "{path}: {field}");
    }
    Ok(answer)
}

/// All pages of a list; the ids under `id` in order.
async fn walk(seed: &Seed, path: &str, id: &[&str]) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut cursor = String::new();
    loop {
        let joint = if path.contains('?') { '&' } else { '?' };
        let url = if cursor.is_empty() { path.to_owned() } else { format!("{path}{joint}cursor={cursor}") };
        let page = ok(seed, &url).await?;
        for item in page["items"].as_array().expect("items") {
            found.push(id.iter().fold(item, |value, name| &value[name]).as_str().expect("an id").to_owned());
        }
        match page["next"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => return Ok(found),
        }
    }
}

#[tokio::test]
async fn every_route_answers_with_data_and_meta() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let harbour = &seed.collections[0].1;
    let account = &seed.accounts[3];
    let moved =
        seed.transfers.iter().rfind(|moved| moved.network == ETH && moved.collection == 0).expect("one");
    let (token, tx) = (&moved.token, hex::encode(moved.tx_hash));
    let (collection, asset) = (seed.collection_id(0), seed.asset_id(0, token));
    let hash = hex::encode(seed::bytes(&format!("block 1 {}", moved.height)));
    let lists = [
        "/v1/networks".to_owned(),
        "/v1/collections".into(),
        "/v1/collections?network=1&sort=id".into(),
        format!("/v1/collections/ethereum/{harbour}/assets"),
        format!("/v1/collections/1/{harbour}/holders"),
        format!("/v1/collections/1/{harbour}/transfers?kind=mint,transfer"),
        format!("/v1/collections/{collection}/assets"),
        format!("/v1/collections/{collection}/holders?sort=id"),
        format!("/v1/collections/{collection}/transfers"),
        format!("/v1/assets/1/{harbour}/{token}/owners"),
        format!("/v1/assets/1/{harbour}/{token}/transfers"),
        format!("/v1/assets/1/{harbour}/{token}/history"),
        format!("/v1/assets/{asset}/owners?min_finality=finalized"),
        format!("/v1/assets/{asset}/transfers"),
        format!("/v1/assets/{asset}/history"),
        format!("/v1/accounts/ethereum/{account}/assets"),
        format!("/v1/accounts/ethereum/{account}/collections"),
        format!("/v1/accounts/ethereum/{account}/transfers"),
        "/v1/transfers".into(),
        "/v1/transfers?network=polygon".into(),
        format!("/v1/blocks/1/{}/events", moved.height),
        format!("/v1/transactions/1/0x{tx}/events"),
        format!("/v1/search?q={harbour}"),
    ];
    for path in &lists {
        let body = ok(&seed, path).await?;
        assert!(body["items"].as_array().is_some_and(|items| !items.is_empty()), "{path}: {body}");
        assert!(body.get("next").is_some(), "{path}");
        check_meta(path, &body["meta"]);
    }
    let singles = [
        "/v1/networks/1".to_owned(),
        "/v1/networks/ethereum/status".into(),
        format!("/v1/collections/1/{harbour}"),
        format!("/v1/collections/{collection}"),
        format!("/v1/collections/1/{harbour}/stats"),
        format!("/v1/collections/{collection}/stats"),
        format!("/v1/assets/1/{harbour}/{token}"),
        format!("/v1/assets/{asset}"),
        format!("/v1/accounts/1/{account}"),
        format!("/v1/blocks/1/{}", moved.height),
        format!("/v1/blocks/1/0x{hash}"),
        format!("/v1/transactions/1/0x{tx}"),
        format!("/v1/tx/1/0x{tx}/status"),
        format!("/v1/events/{}", moved.event_id),
    ];
    for path in &singles {
        let body = ok(&seed, path).await?;
        assert!(body["item"].is_object(), "{path}: {body}");
        check_meta(path, &body["meta"]);
    }
    let request = Request::post("/v1/assets/batch").header("content-type", "application/json").body(Body::from(
        json!({"ids": [asset, uuid::Uuid::nil()], "keys": [{"network": "1", "contract": harbour, "token_id": "1"}]})
            .to_string(),
    ))?;
    let answer = send(&seed, request).await?;
    assert_eq!(answer.body["items"].as_array().map(Vec::len), Some(2), "{}", answer.body);
    Ok(())
}

fn check_meta(path: &str, meta: &Value) {
    for field in ["data_watermark", "finalized_height", "lag_seconds", "required_workers", "generated_at"] {
        assert!(meta.get(field).is_some(), "{path}: meta.{field}");
    }
    assert!(!meta["required_workers"].as_array().expect("workers").is_empty());
}

#[tokio::test]
async fn refusals_are_problems_with_stable_codes() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let harbour = &seed.collections[0].1;
    let unknown = seed::address("nobody");
    let zeros = "00".repeat(32);
    for (path, status, code) in [
        ("/v1/nothing".to_owned(), 404, "unknown_route"),
        ("/v1/networks/atlantis".into(), 404, "unknown_network"),
        (format!("/v1/collections/1/{unknown}"), 404, "not_found"),
        ("/v1/collections/1/0xnonsense".into(), 400, "invalid_address"),
        ("/v1/collections/not-a-uuid".into(), 400, "invalid_parameter"),
        (format!("/v1/assets/1/{harbour}/abc"), 400, "invalid_token_id"),
        (format!("/v1/assets/1/{harbour}/999999"), 404, "not_found"),
        (format!("/v1/accounts/1/{unknown}"), 404, "not_found"),
        ("/v1/transfers?limit=0".into(), 400, "invalid_parameter"),
        ("/v1/transfers?limit=101".into(), 400, "invalid_parameter"),
        ("/v1/transfers?limit=many".into(), 400, "invalid_parameter"),
        ("/v1/transfers?kind=gift".into(), 400, "invalid_parameter"),
        ("/v1/transfers?min_finality=sure".into(), 400, "invalid_parameter"),
        ("/v1/transfers?min_finalty=finalized".into(), 400, "unknown_parameter"),
        ("/v1/transfers?cursor=abc".into(), 400, "invalid_cursor"),
        ("/v1/transfers?min_height=5".into(), 400, "invalid_parameter"),
        ("/v1/transfers?network=1&as_of=yesterday".into(), 400, "invalid_parameter"),
        (format!("/v1/transfers?network=1&as_of={HEAD}"), 400, "as_of_not_final"),
        (format!("/v1/collections/1/{harbour}/holders?as_of=5"), 400, "as_of_unsupported"),
        ("/v1/blocks/1/zz".into(), 400, "invalid_hash"),
        (format!("/v1/transactions/1/0x{zeros}"), 404, "not_found"),
        ("/v1/events/00000000-0000-0000-0000-000000000000".into(), 404, "pending"),
        ("/v1/stream?network=atlantis".into(), 404, "unknown_network"),
        ("/v1/stream?last_event_id=x".into(), 400, "invalid_cursor"),
        ("/v1/stream?last_event_id=99999999".into(), 410, "position_expired"),
    ] {
        refused(&seed, &path, status, code).await?;
    }
    let answer = send(&seed, Request::delete("/v1/transfers").body(Body::empty())?).await?;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (405, &json!("method_not_allowed")));
    for (body, status) in [("{", 400), (r#"{"idz":[]}"#, 400), (&" ".repeat(70_000), 413)] {
        let request = Request::post("/v1/assets/batch")
            .header("content-type", "application/json")
            .body(Body::from(body.to_owned()))?;
        let answer = send(&seed, request).await?;
        assert_eq!(answer.status.as_u16(), status, "{}", answer.body);
        assert_eq!(answer.headers["content-type"], "application/problem+json");
    }
    Ok(())
}

#[tokio::test]
async fn what_may_be_ahead_of_us_is_pending() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let unknown = seed::address("nobody");
    // Polygon is behind its head, Ethereum is not.
    for path in [
        format!("/v1/collections/polygon/{unknown}"),
        format!("/v1/accounts/polygon/{unknown}"),
        format!("/v1/accounts/polygon/{unknown}/assets"),
        format!("/v1/accounts/polygon/{unknown}/transfers"),
        format!("/v1/blocks/1/{}", HEAD + 10),
    ] {
        let answer = refused(&seed, &path, 404, "pending").await?;
        assert_eq!(answer.headers["x-data-status"], "pending", "{path}");
        assert!(answer.headers.contains_key("retry-after"));
    }
    // Where we are at the head an unknown account simply holds nothing.
    assert_eq!(ok(&seed, &format!("/v1/accounts/1/{unknown}/assets")).await?["items"], json!([]));
    let stub = &seed.collections[3].1;
    assert_eq!(ok(&seed, &format!("/v1/collections/1/{stub}")).await?["item"]["is_stub"], true);
    refused(&seed, &format!("/v1/collections/1/{stub}?require_metadata=true"), 404, "stub").await?;
    assert_eq!(
        ok(&seed, &format!("/v1/collections/1/{stub}/assets?require_metadata=true")).await?["items"],
        json!([])
    );
    let status = ok(&seed, &format!("/v1/tx/1/0x{}/status", "00".repeat(32))).await?;
    assert_eq!(status["item"]["status"], "not_seen");
    Ok(())
}

#[tokio::test]
async fn min_height_waits_for_the_projector_and_gives_up_in_time() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let path = format!("/v1/networks/1/status?min_height={}", HEAD + 1);
    let waiting = ok(&seed, &path);
    let moving = async {
        seed.run(&format!(
            "update projection.network_status set projected_height = {HEAD} + 1 where network_id = 1"
        ))
        .await
    };
    let (answer, moved) = tokio::join!(waiting, moving);
    moved?;
    assert_eq!(answer?["meta"]["data_watermark"], HEAD + 1);
    for height in [HEAD + 10, HEAD + 1_000_000] {
        let path = format!("/v1/networks/1/status?min_height={height}");
        let answer = refused(&seed, &path, 404, "not_reached").await?;
        assert_eq!(answer.headers["x-data-status"], "pending");
    }
    Ok(())
}

#[tokio::test]
async fn min_height_is_not_met_by_a_branch_that_is_gone() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let path = format!("/v1/networks/1/status?min_height={HEAD}");
    // The ingester has followed a reorg of the same height, the projector has not.
    seed.run(&format!(
        "insert into raw.blocks (network_id, height, hash, parent_hash, block_time, event_count)
             values (1, {HEAD}, '\\x0b', '\\x0a', now(), 0);
         update projection.network_status set projected_hash = '\\x0a' where network_id = 1"
    ))
    .await?;
    refused(&seed, &path, 404, "not_reached").await?;
    let waiting = ok(&seed, &path);
    let following =
        seed.run("update projection.network_status set projected_hash = '\\x0b' where network_id = 1");
    let (answer, followed) = tokio::join!(waiting, following);
    followed?;
    assert_eq!(answer?["meta"]["data_watermark"], HEAD);
    Ok(())
}

#[tokio::test]
async fn an_empty_network_that_lags_is_pending_not_empty() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    seed.run(
        "insert into projection.network_status (network_id, slug, family, start_block, confirmations, head_height, head_time)
         values (10, 'optimism', 'evm', 0, 12, 500, now())",
    )
    .await?;
    for path in ["/v1/transfers?network=optimism", "/v1/collections?network=10"] {
        let answer = refused(&seed, path, 404, "pending").await?;
        assert_eq!(answer.headers["x-data-status"], "pending", "{path}");
    }
    // Nothing lags here: nothing is the truth.
    assert_eq!(ok(&seed, "/v1/transfers?network=1&kind=sale").await?["items"], json!([]));
    Ok(())
}

#[tokio::test]
async fn assets_come_by_token_id_as_numbers() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    for (collection, query) in [(0, "limit=7"), (2, "limit=3"), (0, "limit=7&require_metadata=true")] {
        let path = format!("/v1/collections/1/{}/assets?{query}", seed.collections[collection].1);
        let tokens = walk(&seed, &path, &["token_id"]).await?;
        let mut sorted = tokens.clone();
        sorted.sort_by_key(|token| (token.len(), token.clone()));
        assert_eq!(tokens, sorted);
        assert!(tokens.len() > 7, "{tokens:?}");
    }
    Ok(())
}

#[tokio::test]
async fn common_parameters_hold_for_search_networks_events_and_batches() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let slugs = walk(&seed, "/v1/networks?limit=1", &["slug"]).await?;
    assert_eq!(slugs, ["ethereum", "polygon"]);
    let all = walk(&seed, "/v1/search?q=harbour", &["page"]).await?;
    assert_eq!(walk(&seed, "/v1/search?q=harbour&limit=3", &["page"]).await?, all);
    assert!(all.len() > 3);
    let found = ok(&seed, "/v1/search?q=kelp&network=ethereum").await?;
    assert_eq!((&found["items"], &found["meta"]["data_watermark"]), (&json!([]), &json!(HEAD)));
    assert_eq!(ok(&seed, "/v1/search?q=kelp&network=polygon").await?["items"][0]["kind"], "collection");
    let stub = &seed.collections[3].1;
    let kinds = |body: &Value| body["items"].as_array().expect("items").len();
    let every = ok(&seed, &format!("/v1/search?q={stub}")).await?;
    let named = ok(&seed, &format!("/v1/search?q={stub}&require_metadata=true")).await?;
    assert!(kinds(&every) > kinds(&named), "{every} {named}");
    let open =
        seed.transfers.iter().rfind(|moved| moved.network == ETH && moved.height > FINALIZED).expect("one");
    let block = format!("/v1/search?q={}&network=1", open.height);
    assert!(ok(&seed, &block).await?.to_string().contains("/blocks/"), "{block}");
    assert!(!ok(&seed, &format!("{block}&min_finality=finalized")).await?.to_string().contains("/blocks/"));
    let event = format!("/v1/events/{}", open.event_id);
    assert_eq!(ok(&seed, &event).await?["item"]["event_id"], json!(open.event_id));
    refused(&seed, &format!("{event}?min_finality=finalized"), 404, "pending").await?;
    for path in ["/v1/networks?min_height=5", "/v1/search?q=a&min_height=5", "/v1/collections?min_height=5"] {
        refused(&seed, path, 400, "invalid_parameter").await?;
    }
    for path in ["/v1/networks?as_of=5", "/v1/search?q=a&as_of=5"] {
        refused(&seed, path, 400, "as_of_unsupported").await?;
    }
    let key = json!({"network": "ethereum", "contract": seed.collections[0].1, "token_id": "1"});
    for (body, height, status) in [
        (json!({"keys": [key]}), HEAD, 200),
        (json!({"keys": [key]}), HEAD + 100_000, 404),
        (json!({"ids": [seed.asset_id(0, "1")]}), HEAD, 400),
    ] {
        let request = Request::post(format!("/v1/assets/batch?min_height={height}"))
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))?;
        let answer = send(&seed, request).await?;
        assert_eq!(answer.status.as_u16(), status, "{}", answer.body);
    }
    Ok(())
}

#[tokio::test]
async fn more_requests_than_connections_do_not_wait_for_each_other() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let tx = hex::encode(seed.transfers[0].tx_hash);
    let height = seed.transfers[0].height;
    // The pool has eight connections: with two per request, eight at once would wait for ever.
    for path in [
        format!("/v1/transactions/1/0x{tx}"),
        format!("/v1/transactions/1/0x{tx}/events"),
        format!("/v1/tx/1/0x{tx}/status"),
        format!("/v1/blocks/1/{height}/events"),
        format!("/v1/search?q=0x{tx}"),
        "/v1/networks/1/status?min_height=5".to_owned(),
        format!("/v1/events/{}", seed.transfers[0].event_id),
        format!("/tx/1/0x{tx}"),
        "/operator".to_owned(),
    ] {
        let asked = (0..40).map(|_| get(&seed, &path));
        let answers = tokio::time::timeout(
            std::time::Duration::from_secs(60),
            futures_util::future::try_join_all(asked),
        );
        for answer in answers.await.map_err(|_| anyhow::anyhow!("{path}: stuck"))?? {
            assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_rare_kind_is_found_over_several_short_pages() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    // Two burns under a long stretch of transfers, on a network of their own.
    seed.run(
        "insert into projection.network_status (network_id, slug, family, start_block, confirmations, head_height,
             projected_height, finalized_height, head_time) values (77, 'wide', 'evm', 0, 1, 40000, 40000, 40000, now());
         create table projection.transfers_77 partition of projection.transfers for values in (77);
         insert into projection.transfers (network_id, height, event_index, sub_index, event_id, kind, asset_id,
             collection_id, from_account, to_account, qty, tx_hash, block_hash, event_time)
         select 77, n, 0, 0, md5('wide' || n)::uuid, case when n in (3, 30001) then 'burn' else 'transfer' end::ledger.event_kind,
             md5('w')::uuid, md5('w')::uuid, md5('w' || n % 2)::uuid, null, -1, '\\x00', '\\x00', now() - (40000 - n) * interval '1 second'
           from generate_series(1, 35000) n",
    )
    .await?;
    let collection = seed.collection_id(0);
    let other =
        walk(&seed, &format!("/v1/collections/{collection}/transfers?kind=burn"), &["event_id"]).await?;
    for path in ["/v1/transfers?network=wide&kind=burn&limit=1", "/v1/transfers?kind=burn&limit=5"] {
        let found = walk(&seed, path, &["event_id"]).await?;
        let of_wide: Vec<&String> = found.iter().filter(|id| !other.contains(id)).collect();
        assert_eq!(of_wide.len(), 2, "{path}: {found:?}");
    }
    let page = ok(&seed, "/v1/transfers?network=wide&kind=sale").await?;
    assert_eq!(page["items"], json!([]));
    assert!(page["next"].is_string(), "the list goes on");
    Ok(())
}

#[tokio::test]
async fn only_listed_origins_may_call_from_a_browser() -> anyhow::Result<()> {
    for (allowed, origin, answered) in [
        (vec![], "https://app.example", None),
        (vec!["https://app.example"], "https://app.example", Some("https://app.example")),
        (vec!["https://app.example"], "https://evil.example", None),
        (vec!["*"], "https://evil.example", Some("*")),
    ] {
        let cors_origins = allowed.into_iter().map(str::to_owned).collect();
        let seed = seed::seed_with(tidemark_api::ApiConfig { cors_origins, ..Default::default() }).await?;
        let asked = Request::get("/v1/networks").header("origin", origin).body(Body::empty())?;
        let answer = send(&seed, asked).await?;
        assert_eq!(answer.status, StatusCode::OK);
        let header = |answer: &Answer, name: &str| {
            answer.headers.get(name).map(|value| value.to_str().expect("ascii").to_owned())
        };
        assert_eq!(header(&answer, "access-control-allow-origin").as_deref(), answered);
        assert_eq!(header(&answer, "access-control-allow-credentials"), None);
        let asked = Request::options("/v1/assets/batch")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "content-type")
            .body(Body::empty())?;
        let answer = send(&seed, asked).await?;
        assert_eq!(header(&answer, "access-control-allow-origin").as_deref(), answered);
    }
    Ok(())
}

#[tokio::test]
async fn a_burst_is_bounded_by_its_own_number() -> anyhow::Result<()> {
    let config = tidemark_api::ApiConfig { requests_per_minute: 60, burst: 5, ..Default::default() };
    let seed = seed::seed_with(config).await?;
    for left in (0..5).rev() {
        let answer = get(&seed, "/healthz").await?;
        assert_eq!(answer.status, StatusCode::OK);
        let limit = answer.headers["ratelimit"].to_str()?.to_owned();
        assert!(limit.starts_with(&format!("\"client\";r={left};")), "{limit}");
        assert!(answer.headers["ratelimit-policy"].to_str()?.contains("q=5;w=5"));
    }
    refused(&seed, "/v1/networks", 429, "rate_limited").await?;
    Ok(())
}

#[tokio::test]
async fn finality_is_a_dimension_of_every_read() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let page = ok(&seed, "/v1/transfers?network=1&limit=100").await?;
    let statuses: BTreeSet<&str> = page["items"]
        .as_array()
        .expect("items")
        .iter()
        .filter_map(|item| item["finality_status"].as_str())
        .collect();
    assert_eq!(statuses, BTreeSet::from(["pending", "confirmed", "finalized"]));
    for (level, line) in [("finalized", FINALIZED), ("confirmed", HEAD - 12)] {
        let page = ok(&seed, &format!("/v1/transfers?network=1&min_finality={level}&limit=100")).await?;
        let heights: Vec<i64> = page["items"]
            .as_array()
            .expect("items")
            .iter()
            .filter_map(|item| item["height"].as_i64())
            .collect();
        assert!(heights.iter().all(|height| *height <= line) && !heights.is_empty(), "{level}");
    }
    // The reverted transfer shows only when asked for.
    let reverted = seed.transfers.iter().find(|moved| moved.reverted).expect("one").event_id.to_string();
    assert!(!page.to_string().contains(&reverted));
    let all = ok(&seed, "/v1/transfers?network=1&include_reverted=true&limit=100").await?;
    let row = all["items"]
        .as_array()
        .expect("items")
        .iter()
        .find(|item| item["event_id"] == reverted)
        .expect("asked");
    assert_eq!(row["finality_status"], "reverted");
    // An owner above the line and the owner at the line are two answers.
    let moved = seed
        .transfers
        .iter()
        .rfind(|moved| {
            moved.network == ETH && moved.collection == 0 && moved.height > FINALIZED && !moved.reverted
        })
        .expect("one");
    let path = format!("/v1/assets/{}/owners", seed.asset_id(0, &moved.token));
    let latest = ok(&seed, &path).await?;
    assert_eq!(latest["items"][0]["address"], seed.accounts[moved.to.expect("to")].as_str());
    assert_ne!(latest["items"][0]["finality_status"], "finalized");
    let sure = ok(&seed, &format!("{path}?min_finality=finalized")).await?;
    for owner in sure["items"].as_array().expect("items") {
        assert_eq!(owner["finality_status"], "finalized");
    }
    assert_ne!(latest["items"], sure["items"]);
    Ok(())
}

#[tokio::test]
async fn as_of_tells_who_owned_it_then() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let mut of: Vec<_> =
        seed.transfers.iter().filter(|moved| moved.collection == 0 && moved.height <= FINALIZED).collect();
    of.sort_by_key(|moved| moved.height);
    let twice =
        of.iter().find(|a| of.iter().filter(|b| b.token == a.token).count() >= 2).expect("moved twice");
    let chain: Vec<_> = of.iter().filter(|moved| moved.token == twice.token).collect();
    let path = format!("/v1/assets/{}", seed.asset_id(0, &twice.token));
    for (at, moved) in chain.iter().enumerate() {
        let until = chain.get(at + 1).map_or(FINALIZED, |next| next.height - 1);
        for height in [moved.height, until] {
            for form in ["history", "owners"] {
                let body = ok(&seed, &format!("{path}/{form}?as_of={height}")).await?;
                assert_eq!(body["items"].as_array().map(Vec::len), Some(1), "{body}");
                assert_eq!(body["items"][0]["address"], seed.accounts[moved.to.expect("to")].as_str());
                assert_eq!(body["meta"]["as_of_height"], height);
            }
        }
    }
    // By time: one second after a block's time is that block.
    let block = ok(&seed, &format!("/v1/blocks/1/{}", chain[0].height)).await?;
    let time = block["item"]["block_time"].as_str().expect("a time").replace('+', "%2B");
    let body = ok(&seed, &format!("{path}/owners?as_of={time}")).await?;
    assert_eq!(body["meta"]["as_of_height"], chain[0].height);
    refused(&seed, &format!("{path}/owners?as_of=2009-01-03T18:15:05Z"), 400, "as_of_before_start").await?;
    refused(&seed, &format!("{path}/owners?as_of=2999-01-01T00:00:00Z"), 400, "as_of_not_final").await?;
    let account = &seed.accounts[chain[0].to.expect("to")];
    let held =
        ok(&seed, &format!("/v1/accounts/1/{account}/assets?as_of={}&limit=100", chain[0].height)).await?;
    let asset = seed.asset_id(0, &twice.token).to_string();
    assert!(held["items"].as_array().expect("items").iter().any(|item| item["asset"]["id"] == asset));
    Ok(())
}

#[tokio::test]
async fn pages_walk_to_the_end_while_rows_come_in() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let harbour = &seed.collections[0].1;
    let stable = [
        ("/v1/transfers?limit=7".to_owned(), vec!["event_id"]),
        ("/v1/transfers?limit=7&network=1".into(), vec!["event_id"]),
        (format!("/v1/collections/1/{harbour}/transfers?limit=5"), vec!["event_id"]),
        (format!("/v1/accounts/1/{}/transfers?limit=3", seed.accounts[3]), vec!["event_id"]),
        (format!("/v1/accounts/1/{}/assets?limit=2", seed.accounts[3]), vec!["asset", "id"]),
        (format!("/v1/collections/1/{harbour}/holders?limit=3&sort=id"), vec!["account_id"]),
        (format!("/v1/collections/1/{harbour}/holders?limit=3"), vec!["account_id"]),
        (format!("/v1/collections/1/{harbour}/assets?limit=4"), vec!["id"]),
        ("/v1/collections?limit=2".into(), vec!["id"]),
        ("/v1/collections?limit=1&sort=id".into(), vec!["id"]),
    ];
    for (path, id) in &stable {
        let before: BTreeSet<String> = walk(&seed, path, id).await?.into_iter().collect();
        let whole = walk(&seed, &path.replace("limit=", "limit=9"), id).await?;
        assert_eq!(before, whole.iter().cloned().collect(), "{path}: page size changes nothing");
        assert_eq!(before.len(), whole.len(), "{path}: none twice");
        // Now rows come in between the pages.
        let mut found = Vec::new();
        let mut cursor = String::new();
        let mut turn = 0;
        loop {
            let url = if cursor.is_empty() { path.clone() } else { format!("{path}&cursor={cursor}") };
            let page = ok(&seed, &url).await?;
            for item in page["items"].as_array().expect("items") {
                found.push(
                    id.iter().fold(item, |value, name| &value[name]).as_str().expect("an id").to_owned(),
                );
            }
            turn += 1;
            if turn <= 3 {
                let mut sql = String::new();
                let moved = seed::Moved {
                    height: HEAD + turn,
                    event_id: uuid::Uuid::new_v4(),
                    tx_hash: seed::bytes(&uuid::Uuid::new_v4().to_string()),
                    event_index: 5,
                    reverted: false,
                    ..seed.transfers[0].clone()
                };
                seed.transfer_sql(&mut sql, &moved);
                seed.run(&sql).await?;
            }
            match page["next"].as_str() {
                Some(next) => cursor = next.to_owned(),
                None => break,
            }
        }
        let once: BTreeSet<String> = found.iter().cloned().collect();
        assert_eq!(once.len(), found.len(), "{path}: none twice while writing");
        assert!(before.is_subset(&once), "{path}: none missing while writing");
    }
    Ok(())
}

#[tokio::test]
async fn a_changed_or_foreign_cursor_is_a_400() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let next = ok(&seed, "/v1/transfers?network=1&limit=2").await?["next"].as_str().expect("more").to_owned();
    for at in (0..next.len()).step_by(5) {
        let mut changed = next.clone().into_bytes();
        changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
        let changed = String::from_utf8(changed)?;
        refused(&seed, &format!("/v1/transfers?network=1&limit=2&cursor={changed}"), 400, "invalid_cursor")
            .await?;
    }
    for other in
        ["/v1/transfers?network=137", "/v1/transfers?network=1&kind=mint", "/v1/collections?network=1"]
    {
        refused(&seed, &format!("{other}&cursor={next}"), 400, "invalid_cursor").await?;
    }
    Ok(())
}

#[tokio::test]
async fn every_answer_carries_security_and_rate_headers() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    for path in [
        "/v1/networks",
        "/v1/nothing",
        "/",
        "/no/such/page",
        "/docs",
        "/openapi.json",
        "/v1/transfers?limit=0",
    ] {
        let answer = get(&seed, path).await?;
        let csp = answer.headers["content-security-policy"].to_str()?;
        assert!(csp.contains("default-src 'self'") && !csp.contains("unsafe"), "{path}");
        assert_eq!(answer.headers["x-content-type-options"], "nosniff", "{path}");
        assert_eq!(answer.headers["referrer-policy"], "no-referrer", "{path}");
        assert!(
            answer.headers.contains_key("ratelimit") && answer.headers.contains_key("ratelimit-policy"),
            "{path}"
        );
        assert!(!answer.headers.contains_key("access-control-allow-origin"), "{path}");
        assert!(!answer.headers.contains_key("access-control-allow-credentials"), "{path}");
    }
    Ok(())
}

#[tokio::test]
async fn too_many_requests_are_a_429_that_says_when() -> anyhow::Result<()> {
    let config = tidemark_api::ApiConfig { requests_per_minute: 3, ..Default::default() };
    let seed = seed::seed_with(config).await?;
    let router = seed.router.clone();
    let mut last = None;
    for _ in 0..4 {
        last = Some(router.clone().oneshot(Request::get("/v1/networks").body(Body::empty())?).await?);
    }
    let response = last.expect("four answers");
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(response.headers().contains_key("retry-after"));
    assert_eq!(response.headers()["ratelimit-policy"], "\"client\";q=3;w=60");
    Ok(())
}

#[tokio::test]
async fn a_limit_of_zero_is_no_limit() -> anyhow::Result<()> {
    let config = tidemark_api::ApiConfig { requests_per_minute: 0, ..Default::default() };
    let seed = seed::seed_with(config).await?;
    for _ in 0..5 {
        let request = Request::get("/v1/networks").body(Body::empty())?;
        let response = seed.router.clone().oneshot(request).await?;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(!response.headers().contains_key("ratelimit"), "it promises a limit that is not there");
    }
    Ok(())
}

#[tokio::test]
async fn the_admin_router_lets_only_the_token_in() -> anyhow::Result<()> {
    let extra = || axum::Router::new().route("/admin/ping", axum::routing::get(|| async { "pong" }));
    for (token, header, status) in [
        ("secret", None, 401),
        ("secret", Some("Bearer wrong"), 401),
        ("secret", Some("Bearer secret"), 200),
        ("", Some("Bearer "), 401),
    ] {
        let mut request = Request::get("/admin/ping");
        if let Some(header) = header {
            request = request.header("authorization", header);
        }
        let response =
            tidemark_api::admin_router(token, extra()).oneshot(request.body(Body::empty())?).await?;
        assert_eq!(response.status().as_u16(), status, "{header:?}");
        assert_eq!(response.headers()["x-content-type-options"], "nosniff");
    }
    Ok(())
}

#[tokio::test]
async fn the_document_lists_every_route_with_its_errors() -> anyhow::Result<()> {
    let doc = tidemark_api::openapi_document("0");
    assert!(doc["openapi"].as_str().is_some_and(|version| version.starts_with("3.1")));
    let paths = doc["paths"].as_object().expect("paths");
    assert_eq!(paths.len(), 36, "{:?}", paths.keys().collect::<Vec<_>>());
    let mut ids = BTreeSet::new();
    for (path, item) in paths {
        for (method, operation) in item.as_object().expect("operations") {
            let id = operation["operationId"].as_str().expect("an id");
            assert!(ids.insert(id.to_owned()), "{id} twice");
            for status in ["200", "400", "404", "429", "500", "503", "504"] {
                assert!(operation["responses"][status].is_object(), "{method} {path} {status}");
            }
        }
    }
    // Every reference resolves.
    let text = doc.to_string();
    for part in text.split("#/components/schemas/").skip(1) {
        let name = part.split('"').next().expect("a name");
        assert!(doc["components"]["schemas"][name].is_object(), "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn search_finds_addresses_hashes_heights_tokens_and_names() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let moved = seed.transfers.iter().rfind(|moved| moved.collection == 0).expect("one");
    for (query, kind) in [
        (seed.collections[0].1.clone(), "collection"),
        (seed.accounts[3].clone(), "account"),
        (seed.accounts[3][..12].to_owned(), "account"),
        (format!("0x{}", hex::encode(moved.tx_hash)), "transaction"),
        (format!("0x{}", hex::encode(seed::bytes(&format!("block 1 {}", moved.height)))), "block"),
        (moved.height.to_string(), "block"),
        (moved.token.clone(), "asset"),
        (format!("{}/{}", seed.collections[0].1, moved.token), "asset"),
        ("harbour li".into(), "collection"),
        ("HARBOUR LIGHT #".into(), "asset"),
        (seed.asset_id(0, &moved.token).to_string(), "asset"),
        ("ethereum".into(), "network"),
    ] {
        let encoded: String = url_encode(&query);
        let body = ok(&seed, &format!("/v1/search?q={encoded}")).await?;
        let kinds: Vec<&str> = body["items"]
            .as_array()
            .expect("items")
            .iter()
            .filter_map(|item| item["kind"].as_str())
            .collect();
        assert!(kinds.contains(&kind), "{query}: {body}");
    }
    for nothing in ["", "zzzz", "%00", "'; drop table x; --", "%", "_"] {
        let body = ok(&seed, &format!("/v1/search?q={}", url_encode(nothing))).await?;
        assert_eq!(body["items"], json!([]), "{nothing}");
    }
    Ok(())
}

fn url_encode(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

#[tokio::test]
async fn the_api_role_cannot_read_the_ledger_or_write() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let url = tidemark_model::redact::RedactedUrl::parse(&seed.db.url)?;
    let options = tidemark_store::DbOptions { role: Some("tidemark_api".into()), ..Default::default() };
    let conn = tidemark_store::Db::open(&url, &options)?.conn().await?;
    for sql in [
        "select 1 from ledger.ownership_current",
        "select 1 from ledger.ownership_history",
        "select 1 from raw.events",
        "select 1 from system.outbox_events",
        "delete from projection.transfers",
        "update projection.network_status set slug = slug",
        "create table projection.mine (id int)",
    ] {
        let error = conn.batch("try", sql).await.expect_err(sql);
        assert_eq!(error.code().map(|code| code.code()), Some("42501"), "{sql}: {error}");
    }
    Ok(())
}

#[tokio::test]
async fn gauges_are_read_from_statistics_by_the_api_role() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let url = tidemark_model::redact::RedactedUrl::parse(&seed.db.url)?;
    let conn = tidemark_store::Db::open(&url, &tidemark_api::db_options(1))?.conn().await?;
    let hits = tidemark_store::reads::cache_hits(&conn).await?;
    assert!(hits.iter().any(|(table, _)| table == "transfers"), "{hits:?}");
    assert!(
        hits.iter().all(|(table, _)| !table.starts_with("transfers_")),
        "partitions are one label: {hits:?}"
    );
    let shares = tidemark_store::reads::finality_shares(&conn).await?;
    assert!(shares.iter().any(|(status, share)| status == "finalized" && *share > 0.0), "{shares:?}");
    Ok(())
}
