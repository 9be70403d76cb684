//! The explorer without a browser: complete without script, hostile names harmless, light enough.

mod seed;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use seed::{ETH, FINALIZED, HEAD, Seed};
use tower::ServiceExt as _;

/// Without images, of which there are none.
const PAGE_BYTES_MAX: usize = 60 * 1024;

async fn get(seed: &Seed, path: &str) -> anyhow::Result<(StatusCode, String)> {
    let response = seed.router.clone().oneshot(Request::get(path).body(Body::empty())?).await?;
    let status = response.status();
    let kind =
        response.headers().get("content-type").and_then(|value| value.to_str().ok()).unwrap_or("").to_owned();
    let bytes = axum::body::to_bytes(response.into_body(), 10 << 20).await?;
    let text = String::from_utf8(bytes.to_vec())?;
    if kind.starts_with("text/html") {
        check_html(path, &text);
    }
    Ok((status, text))
}

fn check_html(path: &str, text: &str) {
    assert!(text.len() < PAGE_BYTES_MAX, "{path} has {} bytes", text.len());
    assert!(!text.contains("<script>"), "{path}: inline script");
    assert!(!text.contains("alert(1)</script>"), "{path}: a name became markup");
    assert!(!text.contains(" style="), "{path}: inline style");
    assert!(!text.contains("onclick"), "{path}: inline handler");
    assert!(!text.contains('\u{202e}'), "{path}: right-to-left override");
    assert!(!text.contains("src=\"http") && !text.contains("href=\"http"), "{path}: foreign resource");
    assert!(text.contains("<html lang=\"en\">") && text.contains("<main") && text.contains("<h1"), "{path}");
    for table in text.split("<table").skip(1) {
        assert!(
            table.split("</table>").next().is_some_and(|table| table.contains("<caption")),
            "{path}: caption"
        );
    }
}

async fn page(seed: &Seed, path: &str) -> anyhow::Result<String> {
    let (status, text) = get(seed, path).await?;
    assert_eq!(status, StatusCode::OK, "{path}: {text}");
    Ok(text)
}

#[tokio::test]
async fn pages_hold_their_data_without_script() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let harbour = &seed.collections[0].1;
    let moved =
        seed.transfers.iter().rfind(|moved| moved.network == ETH && moved.collection == 0).expect("one");
    let account = &seed.accounts[moved.to.expect("to")];
    let tx = hex::encode(moved.tx_hash);

    let home = page(&seed, "/").await?;
    assert!(home.contains("ethereum") && home.contains("finalized") && home.contains("events/s"));
    assert!(
        home.contains("confirming") && home.contains("class=\"spark\"") && home.contains("class=\"gauge\"")
    );

    let transfers = page(&seed, "/transfers?network=ethereum").await?;
    assert!(transfers.contains("reverted") && transfers.contains("Older transfers"));

    let collections = page(&seed, "/collections").await?;
    assert!(
        collections.contains("Harbour Lights")
            && collections.contains("unreliable")
            && collections.contains("verified")
    );

    let collection = page(&seed, &format!("/collections/ethereum/{harbour}")).await?;
    assert!(collection.contains("Largest holders") && collection.contains("Harbour Light #"));

    let asset = page(&seed, &format!("/assets/ethereum/{harbour}/{}", moved.token)).await?;
    assert!(
        asset.contains("Owned by") && asset.contains(account) && asset.contains("Where it stands on chain")
    );

    let edition = page(&seed, &format!("/assets/ethereum/{}/1", seed.collections[1].1)).await?;
    assert!(edition.contains("Owners now") && edition.contains("units"));

    let portfolio = page(&seed, &format!("/accounts/ethereum/{account}")).await?;
    assert!(portfolio.contains("First seen") && portfolio.contains("class=\"grid\""));

    let block = page(&seed, &format!("/blocks/ethereum/{}", moved.height)).await?;
    assert!(block.contains("Parent") && block.contains("What") && block.contains("previous"));

    let transaction = page(&seed, &format!("/tx/ethereum/0x{tx}")).await?;
    assert!(transaction.contains("What it moved") && transaction.contains(&tx));

    let search = page(&seed, "/search?q=harbour").await?;
    assert!(search.contains("Harbour Lights"));
    assert!(page(&seed, "/search?q=%3Cscript%3Ealert(1)%3C/script%3E").await?.contains("&#60;script&#62;"));

    let operator = page(&seed, "/operator").await?;
    for fact in
        ["Dead letters", "poison", "Parked keys", "Quarantine", "negative", "Reorgs", "projector", "deadlock"]
    {
        let fact = if fact == "poison" { "ERC-721 has 4" } else { fact };
        assert!(operator.contains(fact), "{fact}");
    }
    // The bus is Postgres: what is numbered is published, nothing waits between the two.
    let streams = operator.split("id=\"streams\"").nth(1).and_then(|rest| rest.split("</table>").next());
    let streams = streams.expect("a table of streams");
    assert!(streams.contains("90\u{202f}210") && !streams.contains("data-label=\"Waiting\">1<"), "{streams}");
    let docs = page(&seed, "/docs").await?;
    assert!(
        docs.contains("/v1/stream") && docs.contains("problem-not_found") && docs.contains("min_finality")
    );
    Ok(())
}

#[tokio::test]
async fn the_tidemark_stands_between_wet_and_dry_rows() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let text = page(&seed, "/transfers?network=ethereum").await?;
    let mut cursor = text.find("Older transfers").map(|_| text.clone());
    // Walk to the page that holds the line, then look at what is around it.
    while let Some(text) = cursor {
        if let Some(at) = text.find("class=\"tidemark\"") {
            let (above, below) = text.split_at(at);
            assert!(!above.contains("class=\"dry\""), "nothing final above the line");
            assert!(!below.contains("class=\"wet\""), "nothing wet below the line");
            assert!(below.contains(&format!("finalized up to {}", "21\u{202f}403\u{202f}136")));
            assert_eq!(text.matches("class=\"tidemark\"").count(), 1);
            return Ok(());
        }
        let href = text
            .split("class=\"more\"")
            .nth(1)
            .and_then(|rest| rest.split('"').nth(1))
            .map(|href| href.replace("&#38;", "&"));
        cursor = match href {
            Some(href) => Some(page(&seed, &href).await?),
            None => None,
        };
    }
    panic!("no line between {FINALIZED} and {HEAD}");
}

#[tokio::test]
async fn no_page_leads_to_an_operator_page_that_is_not_served() -> anyhow::Result<()> {
    for served in [true, false] {
        let config = tidemark_api::ApiConfig { operator_page: served, ..Default::default() };
        let seed = seed::seed_with(config).await?;
        let tx = hex::encode(seed.transfers[0].tx_hash);
        for path in ["/", "/docs", "/search?q=x", &format!("/tx/1/0x{tx}")] {
            assert_eq!(page(&seed, path).await?.contains("href=\"/operator\""), served, "{path}");
        }
        assert_eq!(get(&seed, "/operator").await?.0.as_u16(), if served { 200 } else { 404 });
    }
    Ok(())
}

#[tokio::test]
async fn hostile_names_are_text() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let hostile = &seed.collections[2].1;
    for path in [format!("/collections/1/{hostile}"), "/collections".into(), "/".into(), "/transfers".into()]
    {
        let text = page(&seed, &path).await?;
        assert!(text.contains("&#60;script&#62;alert(1)&#60;/script&#62;Evil"), "{path}");
    }
    let token = "115792089237316195423570985008687907853269984665640564039457584007913129639935";
    let text = page(&seed, &format!("/assets/1/{hostile}/{token}")).await?;
    assert!(text.contains(token) && text.contains("begins in the middle"));
    Ok(())
}

#[tokio::test]
async fn missing_pending_and_empty_are_designed() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let nobody = seed::address("nobody");
    for (path, status, says) in [
        ("/no/such/page".to_owned(), 404, "There is no page at this address"),
        ("/static/other.css".into(), 404, "There is no page at this address"),
        (format!("/collections/ethereum/{nobody}"), 404, "not known"),
        (format!("/collections/polygon/{nobody}"), 404, "Not here yet"),
        (format!("/blocks/ethereum/{}", HEAD + 5), 404, "we have read to"),
        ("/collections/atlantis/0x00".into(), 404, "Known networks"),
        ("/accounts/ethereum/0x123".into(), 400, "invalid_address"),
        (format!("/accounts/ethereum/{nobody}"), 200, "has not taken part"),
        ("/search?q=nothing%20like%20this".into(), 200, "Nothing here is called that"),
        ("/search".into(), 200, "Type an address"),
    ] {
        let (found, text) = get(&seed, &path).await?;
        assert_eq!(found.as_u16(), status, "{path}");
        assert!(text.contains(says), "{path}: {text}");
        assert!(text.contains("role=\"search\""), "{path}: offers search");
    }
    // An empty database has pages too.
    let empty = seed::empty().await?;
    for path in ["/", "/transfers", "/collections", "/operator", "/search?q=x"] {
        page(&empty, path).await?;
    }
    Ok(())
}

#[tokio::test]
async fn embedded_files_are_cached_by_content() -> anyhow::Result<()> {
    let seed = seed::empty().await?;
    let home = page(&seed, "/").await?;
    for ending in [".css", ".js", ".svg"] {
        let path = home
            .split('"')
            .find(|part| part.starts_with("/static/") && part.ends_with(ending))
            .expect("linked");
        let response = seed.router.clone().oneshot(Request::get(path).body(Body::empty())?).await?;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers()["cache-control"].to_str()?.contains("immutable"));
    }
    Ok(())
}
