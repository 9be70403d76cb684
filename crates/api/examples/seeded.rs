//! Serves the explorer over the seeded test database: `cargo run -p tidemark-api --example seeded`. Prints its
//! address, tells a new transfer every few seconds, and stops with Ctrl-C. For looking at pages.
#![allow(clippy::print_stdout, reason = "an example speaks on stdout")]

#[path = "../tests/seed/mod.rs"]
mod seed;

use std::net::SocketAddr;

use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let seed = seed::seed().await?;
    let stop = CancellationToken::new();
    let port = std::env::var("PORT").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let listener = tokio::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], port))).await?;
    println!("http://{}", listener.local_addr()?);
    println!("account {} collection {}", seed.accounts[3], seed.collections[0].1);
    let app = tidemark_api::router(seed.state.clone()).into_make_service_with_connect_info::<SocketAddr>();
    let serve = axum::serve(listener, app).with_graceful_shutdown(stop.clone().cancelled_owned());
    let mut height = seed::HEAD;
    let tell = async {
        loop {
            tokio::time::sleep(std::time::Duration::from_secs(6)).await;
            height += 1;
            let mut sql = String::new();
            let mut moved = seed
                .transfers
                .iter()
                .rfind(|moved| moved.collection == 0 && moved.from.is_some())
                .expect("one")
                .clone();
            moved.height = height;
            moved.network = seed::ETH;
            moved.event_id = uuid::Uuid::new_v4();
            moved.tx_hash = seed::bytes(&moved.event_id.to_string());
            seed.transfer_sql(&mut sql, &moved);
            seed.run(&sql).await?;
            seed.run(&format!(
                "update projection.network_status set head_height = {height}, projected_height = {height},
                     finalized_height = {height} - 64, finalized_at = now(), head_time = now() where network_id = 1"
            ))
            .await?;
            seed.say("projection.transfer.projected.v1", &seed.payload(&[&moved])).await?;
            // Now and then a reorg: the row leaves the table, the stream names it.
            if height % 4 == 0 {
                tokio::time::sleep(std::time::Duration::from_secs(3)).await;
                seed.run(&format!("delete from projection.transfers where event_id = '{}'", moved.event_id))
                    .await?;
                seed.say("projection.transfer.retracted.v1", &seed.payload(&[&moved])).await?;
            }
        }
        #[allow(unreachable_code, reason = "gives the block its type")]
        Ok::<(), anyhow::Error>(())
    };
    tokio::select! {
        result = serve => result?,
        () = seed.state.run(stop.clone()) => {}
        result = tell => result?,
        _ = tokio::signal::ctrl_c() => stop.cancel(),
    }
    Ok(())
}
