//! `digest` and `digest diff`

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tidemark_model::digest::Digest;
use tidemark_model::ids::{AssetId, NetworkId};
use tidemark_store::{Db, DbOptions, cursor, digest, ownership, status};

use super::databases;
use super::status::columns;
use crate::cli::{DigestArgs, DigestCommand, DigestDiffArgs};
use crate::exit::{self, Usage};

/// Runs it.
pub async fn run(args: DigestArgs) -> anyhow::Result<u8> {
    match args.command {
        Some(DigestCommand::Diff(args)) => diff(args).await,
        None => print(args).await,
    }
}

fn hex(digest: Digest) -> String {
    format!("{:#066x}", digest.0)
}

async fn print(args: DigestArgs) -> anyhow::Result<u8> {
    let ctx = databases::open(&args.database)?;
    let networks = databases::networks(&ctx, args.network.as_deref()).await?;
    let conn = ctx.app.conn().await?;
    let mut lines = vec![];
    for network in &networks {
        let height = match args.height {
            Some(height) => Some(i64::try_from(height).map_err(|_| Usage("no chain is that high".into()))?),
            None => final_height(&status::app_progress(&conn).await?, network.id),
        };
        let found = match (args.height, height) {
            (Some(_), Some(height)) => digest::at_height(&conn, network.id, height).await?,
            (None, Some(height)) => {
                Some((height, digest::total(&digest::read_with(&conn, network.id).await?)))
            }
            _ => None,
        };
        lines.push((network, found));
    }
    if args.json {
        let lines: Vec<Value> = lines
            .iter()
            .map(|(network, found)| {
                json!({
                    "network": network.slug,
                    "network_id": network.id,
                    "height": found.map(|(height, _)| height),
                    "digest": found.map(|(_, digest)| hex(digest)),
                })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&lines)?);
    } else if lines.is_empty() {
        println!("No network is known yet.");
    } else {
        let rows = lines.iter().map(|(network, found)| match found {
            Some((height, digest)) => vec![network.slug.clone(), height.to_string(), hex(*digest)],
            None => vec![network.slug.clone(), "-".into(), "nothing is final yet".into()],
        });
        let mut text = String::new();
        columns(&mut text, &["NETWORK", "HEIGHT", "DIGEST"], rows.collect());
        print!("{text}");
    }
    Ok(exit::OK)
}

fn final_height(progress: &[status::AppProgress], network: NetworkId) -> Option<i64> {
    let line = progress.iter().find(|line| line.network_id == network.0)?;
    line.finalized.filter(|height| *height >= 0)
}

async fn diff(args: DigestDiffArgs) -> anyhow::Result<u8> {
    let options =
        DbOptions { application_name: "tidemark digest".into(), connections_max: 2, ..DbOptions::default() };
    let (a, b) = (Db::open(&args.a, &options)?, Db::open(&args.b, &options)?);
    let (progress_a, progress_b) =
        (status::app_progress(&a.conn().await?).await?, status::app_progress(&b.conn().await?).await?);
    let mut code = exit::OK;
    let mut answers = vec![];
    for (network, name) in networks(&a, &b, &progress_a, &progress_b, args.network.as_deref()).await? {
        let heights = (final_height(&progress_a, network), final_height(&progress_b, network));
        let found = digest::diff(&a, &b, network).await?;
        let mut answer = json!({
            "network": name,
            "equal": found.is_none(),
            "height_a": heights.0,
            "height_b": heights.1,
        });
        let shown = |height: Option<i64>| height.map_or_else(|| "nothing".into(), |at| at.to_string());
        let heights = format!("A is final up to {}, B up to {}", shown(heights.0), shown(heights.1));
        match found {
            None if !args.json => println!("{name}: owners are equal ({heights})."),
            None => {}
            Some(found) => {
                code = exit::FOUND;
                let (in_a, in_b) = (owners(&a, found.asset).await?, owners(&b, found.asset).await?);
                answer["asset_id"] = json!(found.asset);
                answer["ranges_compared"] = json!(found.steps);
                answer["owners_a"] = json!(in_a);
                answer["owners_b"] = json!(in_b);
                if !args.json {
                    println!("{name}: owners differ ({heights}).");
                    println!("  first differing asset: {}", found.asset.0);
                    for (side, owners) in [("A", in_a), ("B", in_b)] {
                        println!("  {side}: {}", in_words(&owners));
                    }
                }
            }
        }
        answers.push(answer);
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&answers)?);
    } else if answers.is_empty() {
        println!("Neither database has a network yet.");
    }
    Ok(code)
}

/// Networks of either ledger, by id, with a name for people.
async fn networks(
    a: &Db,
    b: &Db,
    progress_a: &[status::AppProgress],
    progress_b: &[status::AppProgress],
    named: Option<&str>,
) -> anyhow::Result<BTreeMap<NetworkId, String>> {
    let mut known: Vec<cursor::KnownNetwork> = databases::known(a).await?;
    known.extend(databases::known(b).await?);
    let all: BTreeMap<NetworkId, String> = progress_a
        .iter()
        .chain(progress_b)
        .map(|line| {
            let id = NetworkId(line.network_id);
            let name = known.iter().find(|network| network.id == id).map(|network| network.slug.clone());
            (id, name.unwrap_or_else(|| id.to_string()))
        })
        .collect();
    let Some(named) = named else { return Ok(all) };
    let one: BTreeMap<NetworkId, String> =
        all.into_iter().filter(|(id, name)| name == named || id.to_string() == named).collect();
    if one.is_empty() {
        return Err(Usage(format!("neither database has a ledger of network {named}")).into());
    }
    Ok(one)
}

async fn owners(db: &Db, asset: AssetId) -> anyhow::Result<BTreeMap<String, String>> {
    let mut conn = db.conn().await?;
    let tx = conn.tx().await?;
    let found = ownership::of_assets(&tx, &BTreeSet::from([asset])).await?;
    tx.rollback().await?;
    Ok(found.into_iter().map(|((_, account), qty)| (account.0.to_string(), qty.to_string())).collect())
}

fn in_words(owners: &BTreeMap<String, String>) -> String {
    if owners.is_empty() {
        return "nobody owns it".into();
    }
    let owners: Vec<String> =
        owners.iter().map(|(account, qty)| format!("account {account} owns {qty}")).collect();
    owners.join(", ")
}
