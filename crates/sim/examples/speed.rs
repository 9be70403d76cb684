//! How fast a long history is made and served: `cargo run --profile measured -p tidemark-sim --example speed`.
//! Arguments: logs, blocks, blocks per `eth_getLogs` call.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use tidemark_sim::{FaultProfile, Sim, SimConfig};

#[tokio::main(flavor = "current_thread")]
#[expect(clippy::print_stdout, reason = "an example speaks to the person who runs it")]
async fn main() -> std::io::Result<()> {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let (logs, blocks, step) = match numbers[..] {
        [logs, blocks, step] => (logs, blocks, step),
        _ => (1_000_000, 50_000, 500),
    };
    let started = Instant::now();
    let sim = Sim::new(SimConfig::bench(logs, blocks));
    sim.mine(blocks);
    println!("made {} logs in {blocks} blocks: {:?}", sim.log_count(0, blocks), started.elapsed());
    let server = sim.serve(([127, 0, 0, 1], 0).into(), FaultProfile::default()).await?;
    let address = server.address;
    let started = Instant::now();
    // The reader only counts bytes, on a thread of its own: the server's core is what is measured.
    let bytes = tokio::task::spawn_blocking(move || {
        let mut bytes = 0;
        for from in (1..=blocks).step_by(usize::try_from(step).unwrap_or(500)) {
            let to = (from + step - 1).min(blocks);
            let body = format!(
                "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"eth_getLogs\",\"params\":[{{\"fromBlock\":\"{from:#x}\",\"toBlock\":\"{to:#x}\"}}]}}"
            );
            let mut stream = TcpStream::connect(address)?;
            write!(
                stream,
                "POST / HTTP/1.1\r\nhost: sim\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )?;
            let mut answer = Vec::new();
            bytes += stream.read_to_end(&mut answer)?;
        }
        std::io::Result::Ok(bytes)
    })
    .await
    .map_err(std::io::Error::other)??;
    let seconds = started.elapsed().as_secs_f64();
    println!("served {bytes} bytes in {seconds:.2} s");
    server.stop().await;
    let started = Instant::now();
    let truth = sim.owners_at(blocks);
    println!("folded {} balances: {:?}", truth.balances.len(), started.elapsed());
    Ok(())
}
