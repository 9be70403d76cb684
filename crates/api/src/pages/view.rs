//! Rows as pages show them.

use tidemark_store::reads::NetworkRow;
use time::OffsetDateTime;

use super::art;
use super::files::FILES;
use crate::answer::{Page, lag_seconds};
use crate::dto::{Asset, Network, Transfer, finality};
use crate::reader::Reader;

/// What is around every page.
pub(crate) struct Shell {
    pub(crate) title: String,
    /// The same facts as JSON.
    pub(crate) api: String,
    pub(crate) query: String,
    pub(crate) chips: Vec<Chip>,
    pub(crate) css: &'static str,
    pub(crate) js: &'static str,
    pub(crate) icon: &'static str,
    /// Is there an operator page?
    pub(crate) operator: bool,
}

/// How far one network is, in the top bar.
pub(crate) struct Chip {
    pub(crate) slug: String,
    pub(crate) state: &'static str,
    pub(crate) text: String,
}

impl Shell {
    pub(crate) fn new(reader: &Reader, title: &str, api: &str) -> Self {
        Self::of(&reader.networks, reader.operator_page, title, api)
    }
    pub(crate) fn of(networks: &[NetworkRow], operator: bool, title: &str, api: &str) -> Self {
        let chips = networks
            .iter()
            .map(|row| {
                let network = Network::from(row);
                let text = match (network.state, network.lag_seconds) {
                    ("halted", _) => "halted".to_owned(),
                    (_, Some(0)) => "live".to_owned(),
                    (_, Some(lag)) => format!("{} behind", span(lag)),
                    (_, None) => "starting".to_owned(),
                };
                Chip { slug: network.slug, state: network.state, text }
            })
            .collect();
        Self { chips, operator, ..Self::bare_with(title, api) }
    }
    /// Without a database, for pages that say that something is not there.
    pub(crate) fn bare(title: &str) -> Self {
        Self::bare_with(title, "")
    }
    fn bare_with(title: &str, api: &str) -> Self {
        Self {
            title: title.to_owned(),
            api: api.to_owned(),
            query: String::new(),
            chips: Vec::new(),
            css: &FILES.css,
            js: &FILES.js,
            icon: &FILES.icon,
            operator: false,
        }
    }
}

/// Digits in groups of three: 21 403 117, with spaces that do not break.
pub(crate) fn group(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::from(if number < 0 { "-" } else { "" });
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// [`group`] for templates, which pass references.
pub(crate) fn num(number: &i64) -> String {
    group(*number)
}

/// [`exact`] for templates.
pub(crate) fn when(at: &OffsetDateTime) -> String {
    exact(*at)
}

/// The same for a number that is already text; anything else as it is.
pub(crate) fn group_text(text: &str) -> String {
    text.parse::<i64>().map_or_else(|_| short_token(text), group)
}

/// `0x1a2b…9f0e`.
pub(crate) fn short(text: &str) -> String {
    if text.len() <= 14 || !text.is_ascii() {
        return text.to_owned();
    }
    format!("{}…{}", &text[..6], &text[text.len() - 4..])
}

/// Long token ids keep their beginning and end.
pub(crate) fn short_token(text: &str) -> String {
    let count = text.chars().count();
    if count <= 12 {
        return text.to_owned();
    }
    let head: String = text.chars().take(5).collect();
    let tail: String = text.chars().skip(count - 4).collect();
    format!("{head}…{tail}")
}

/// 12 s, 3 min, 5 h, 2 d.
pub(crate) fn span(seconds: i64) -> String {
    match seconds {
        ..60 => format!("{} s", seconds.max(0)),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// How old a time is.
pub(crate) fn ago(at: OffsetDateTime) -> String {
    format!("{} ago", span((OffsetDateTime::now_utc() - at).whole_seconds()))
}

/// A time for people who hover: 2026-11-15 23:04:05 UTC.
pub(crate) fn exact(at: OffsetDateTime) -> String {
    let at = at.to_offset(time::UtcOffset::UTC);
    let (date, time) = (at.date(), at.time());
    format!("{date} {:02}:{:02}:{:02} UTC", time.hour(), time.minute(), time.second())
}

/// How sure, as shape and word.
pub(crate) struct Badge {
    pub(crate) class: &'static str,
    pub(crate) text: String,
}

impl Badge {
    pub(crate) fn new(status: &str, confirmations: i64, required: i64) -> Self {
        match status {
            "finalized" => Self { class: "final", text: "finalized".into() },
            "confirmed" => Self { class: "wet", text: "confirmed".into() },
            "reverted" => Self { class: "gone", text: "reverted".into() },
            _ => Self {
                class: "wet",
                text: format!("confirming {}/{required}", confirmations.clamp(0, required)),
            },
        }
    }
    pub(crate) fn of_height(network: &NetworkRow, height: i64) -> Self {
        let head = network.head_height.or(network.projected_height).unwrap_or(height);
        Self::new(finality(network, height, false).as_str(), head - height, network.confirmations)
    }
    /// Where only the word is known.
    pub(crate) fn word(status: &str) -> Self {
        match status {
            "finalized" => Self { class: "final", text: "finalized".into() },
            other => Self { class: "wet", text: other.to_owned() },
        }
    }
}

/// The tidemark between two rows.
#[derive(Clone)]
pub(crate) struct Rule {
    pub(crate) network: String,
    pub(crate) text: String,
}

impl Rule {
    pub(crate) fn of(network: &NetworkRow) -> Option<Self> {
        let height = network.finalized_height?;
        let age = network.finalized_at.map_or_else(String::new, |at| format!(", {}", ago(at)));
        Some(Self { network: network.slug.clone(), text: format!("finalized up to {}{age}", group(height)) })
    }
}

/// A link to an account, shortened.
pub(crate) struct Party {
    pub(crate) short: String,
    pub(crate) full: String,
    pub(crate) href: String,
}

/// One transfer in a table.
pub(crate) struct Row {
    pub(crate) rule: Option<Rule>,
    pub(crate) event_id: String,
    pub(crate) network: String,
    pub(crate) height: String,
    pub(crate) block_href: String,
    pub(crate) tx_href: String,
    pub(crate) tx_full: String,
    pub(crate) age: String,
    pub(crate) exact: String,
    pub(crate) kind: String,
    pub(crate) qty: Option<String>,
    pub(crate) picture: String,
    pub(crate) asset_href: String,
    pub(crate) asset: String,
    pub(crate) collection: String,
    pub(crate) collection_href: String,
    pub(crate) from: Option<Party>,
    pub(crate) to: Option<Party>,
    pub(crate) badge: Badge,
    pub(crate) class: &'static str,
}

/// A list of transfers with the tidemark drawn into it.
pub(crate) struct Feed {
    pub(crate) rows: Vec<Row>,
    pub(crate) older: Option<String>,
    pub(crate) many_networks: bool,
    /// All rows are of one asset, which the page names already.
    pub(crate) same_asset: bool,
    /// Query of the stream that feeds it; none when it does not move.
    pub(crate) live: Option<String>,
    /// Where the line is when no row of this list is below it.
    pub(crate) below: Vec<Rule>,
}

impl Feed {
    pub(crate) fn new(page: Page<Transfer>, networks: &[NetworkRow], base: &str) -> Self {
        let mut drawn: Vec<i32> = Vec::new();
        let mut wet: Vec<i32> = Vec::new();
        let mut rows = Vec::with_capacity(page.items.len());
        for transfer in page.items {
            let network = networks.iter().find(|network| network.network_id == transfer.network_id);
            let required = network.map_or(0, |network| network.confirmations);
            let mut rule = None;
            // One rule per network, between its last wet row and its first dry one.
            if transfer.finality_status == "finalized" {
                if !drawn.contains(&transfer.network_id) {
                    drawn.push(transfer.network_id);
                    rule = network.filter(|_| wet.contains(&transfer.network_id)).and_then(Rule::of);
                }
            } else if transfer.finality_status != "reverted" && !wet.contains(&transfer.network_id) {
                wet.push(transfer.network_id);
            }
            rows.push(Row::new(transfer, required, rule));
        }
        let below = networks
            .iter()
            .filter(|network| wet.contains(&network.network_id) && !drawn.contains(&network.network_id))
            .filter_map(Rule::of)
            .collect();
        let joint = if base.contains('?') { '&' } else { '?' };
        let older = page.next.map(|cursor| format!("{base}{joint}cursor={cursor}"));
        Self { rows, older, many_networks: networks.len() > 1, same_asset: false, live: None, below }
    }
    /// For lists within one block, which are on one side of the line.
    pub(crate) fn without_rules(mut self) -> Self {
        self.below.clear();
        for row in &mut self.rows {
            row.rule = None;
        }
        self
    }
}

impl Row {
    fn new(transfer: Transfer, required: i64, rule: Option<Rule>) -> Self {
        let network = &transfer.network;
        let party = |address: &Option<String>| {
            address.as_ref().map(|address| Party {
                short: short(address),
                href: format!("/accounts/{network}/{address}"),
                full: address.clone(),
            })
        };
        let contract = transfer.contract.clone().unwrap_or_default();
        let token = transfer.token_id.clone().unwrap_or_default();
        let (from, to) = (party(&transfer.from), party(&transfer.to));
        let known = !contract.is_empty() && !token.is_empty();
        Self {
            rule,
            event_id: transfer.event_id.to_string(),
            height: group(transfer.height),
            block_href: format!("/blocks/{network}/{}", transfer.height),
            tx_href: format!("/tx/{network}/{}", transfer.tx_hash),
            age: span((OffsetDateTime::now_utc() - transfer.event_time).whole_seconds()),
            exact: exact(transfer.event_time),
            qty: (transfer.qty != "1").then(|| group_text(&transfer.qty)),
            picture: art::shore(&transfer.asset_id.to_string(), false),
            asset_href: if known { format!("/assets/{network}/{contract}/{token}") } else { String::new() },
            asset: transfer.asset_name.unwrap_or_else(|| format!("#{}", short_token(&token))),
            collection: transfer.collection_name.unwrap_or_else(|| short(&contract)),
            collection_href: format!("/collections/{network}/{contract}"),
            badge: Badge::new(&transfer.finality_status, transfer.confirmations, required),
            class: match transfer.finality_status.as_str() {
                "finalized" => "dry",
                "reverted" => "gone",
                _ => "wet",
            },
            from,
            to,
            kind: transfer.kind,
            tx_full: transfer.tx_hash,
            network: transfer.network,
        }
    }
}

/// An asset in a grid or on its page.
pub(crate) struct AssetView {
    pub(crate) item: Asset,
    pub(crate) href: String,
    pub(crate) title: String,
    /// What the title does not say: token id, units, stub, burned.
    pub(crate) subtitle: String,
    pub(crate) picture: String,
    pub(crate) badge: Option<Badge>,
}

impl AssetView {
    pub(crate) fn new(item: Asset, held: Option<(String, String)>) -> Self {
        let contract = item.contract.clone().unwrap_or_default();
        let token = short_token(&item.token_id);
        let mut said = Vec::new();
        if item.name.is_some() {
            said.push(format!("#{token}"));
        }
        if let Some((qty, _)) = held.as_ref().filter(|(qty, _)| qty != "1") {
            said.push(format!("× {}", group_text(qty)));
        }
        if item.is_burned {
            said.push("burned".to_owned());
        } else if item.is_stub {
            said.push("metadata on its way".to_owned());
        }
        Self {
            subtitle: said.join(" · "),
            href: format!("/assets/{}/{contract}/{}", item.network, item.token_id),
            title: item.name.clone().unwrap_or_else(|| format!("#{token}")),
            picture: art::shore(&item.id.to_string(), false),
            badge: held.filter(|(_, status)| status != "finalized").map(|(_, status)| Badge::word(&status)),
            item,
        }
    }
}

/// A network's strip on the home page.
pub(crate) struct NetworkView {
    pub(crate) network: Network,
    pub(crate) head: String,
    pub(crate) finalized: String,
    pub(crate) age: String,
    pub(crate) wet: String,
    pub(crate) lag: String,
    pub(crate) per_second: String,
    pub(crate) spark: String,
    pub(crate) gauge: String,
    pub(crate) events: String,
}

impl NetworkView {
    pub(crate) fn new(row: &NetworkRow, activity: &[(OffsetDateTime, i64)]) -> Self {
        let show = |height: Option<i64>| height.map_or("none yet".to_owned(), group);
        // Buckets without events have no row: fill them, or the chart would close its gaps.
        let now = OffsetDateTime::now_utc();
        let mut buckets = vec![0_i64; 90];
        for (at, events) in activity {
            let back = (now - *at).whole_seconds() / 10;
            let slot = usize::try_from(89 - back.clamp(0, 89)).unwrap_or(0);
            buckets[slot] += events;
        }
        // The newest bucket is still filling; the six before it are the last minute.
        let minute: i64 = buckets[83..89].iter().sum();
        let tenths = minute / 6;
        let (head, finalized) = (row.head_height.unwrap_or(-1), row.finalized_height.unwrap_or(-1));
        let projected = row.projected_height.unwrap_or(-1);
        Self {
            head: show(row.head_height),
            finalized: show(row.finalized_height),
            age: row.finalized_at.map_or_else(String::new, ago),
            wet: group((head - finalized).max(0)),
            lag: match lag_seconds(row) {
                Some(0) => "none".to_owned(),
                Some(lag) => format!("{} ({} blocks)", span(lag), group((head - projected).max(0))),
                // A first long history is shown at its end.
                None if row.projected_height.is_none() => match row.normalized_height {
                    Some(read) => format!("reading history, at {}", group(read)),
                    None => "unknown".to_owned(),
                },
                None => "unknown".to_owned(),
            },
            per_second: format!("{}.{}", tenths / 10, tenths % 10),
            spark: art::sparkline(&buckets),
            gauge: art::gauge(finalized, projected, head),
            events: group(row.events_total),
            network: Network::from(row),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_short_and_readable() {
        assert_eq!(group(21_403_117), "21\u{202f}403\u{202f}117");
        assert_eq!((group(-5), group(0), group(999)), ("-5".into(), "0".into(), "999".into()));
        assert_eq!(short("0x1a2b3c4d5e6f7081920a0b0c0d0e0f1a2b3c9f0e"), "0x1a2b…9f0e");
        assert_eq!(short_token("115792089237316195423570985"), "11579…0985");
        assert_eq!(
            (span(12), span(200), span(7200), span(400_000)),
            ("12 s".into(), "3 min".into(), "2 h".into(), "4 d".into())
        );
    }

    #[test]
    fn badges_say_how_sure_in_words() {
        assert_eq!(Badge::new("pending", 7, 64).text, "confirming 7/64");
        assert_eq!(Badge::new("finalized", 900, 64).class, "final");
        assert_eq!(Badge::new("reverted", 7, 64).text, "reverted");
    }
}
