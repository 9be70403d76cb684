//! A segment: the finalized events of a run of blocks, shaped for bulk application.
//!
//! Building is pure. It interns addresses and assets (each id is hashed once per segment), encodes the
//! append-only rows straight into COPY buffers, and folds all movements into one net change per (asset,
//! account). `low` is the smallest running sum on the way, so that "the balance never went below zero" can
//! be decided later from the balance before the segment alone.

use alloy_primitives::U256;
use alloy_primitives::map::HashMap;
use std::collections::HashSet;

use tidemark_model::chain::{AssetRef, EventKind, Network, ParsedBlock, RawBlock, RawEvent, Standard};
use tidemark_model::digest::{BUCKETS, Digest, bucket_of};
use tidemark_model::ids::{
    AccountId, AssetId, CollectionId, ContractId, EventId, Height, HeightRange, NetworkId, SourceEventId,
};
use tidemark_model::quantity::SignedQty;
use tidemark_store::copy::CopyBuffer;
use time::OffsetDateTime;
use uuid::Uuid;

/// An account seen in the segment.
#[derive(Debug)]
pub struct SegmentAccount {
    /// Its id.
    pub id: AccountId,
    /// Its canonical address.
    pub address: String,
    /// Time of its first event here.
    pub first_seen: OffsetDateTime,
    /// Time of its last event here.
    pub last_seen: OffsetDateTime,
    /// Events it took part in.
    pub transfers: i64,
}

/// A collection seen in the segment.
#[derive(Debug)]
pub struct SegmentCollection {
    /// Its id.
    pub id: CollectionId,
    /// Its contract.
    pub contract: ContractId,
    /// Canonical contract address.
    pub address: String,
    /// The standard of its first event here.
    pub standard: Standard,
    /// Time of its first event here.
    pub first_seen: OffsetDateTime,
    /// Height of its first event here.
    pub first_height: Height,
    /// Height of its last event here.
    pub last_height: Height,
    /// Events that moved something.
    pub transfers: i64,
}

/// An asset seen in the segment.
#[derive(Debug)]
pub struct SegmentAsset {
    /// Its id.
    pub id: AssetId,
    /// Index into the segment's collections.
    pub collection: u32,
    /// Token id as the chain has it.
    pub token_id: String,
    /// Its standard.
    pub standard: Standard,
    /// Minted less burned.
    pub supply: SignedQty,
    /// The largest `supply` on the way, never below zero.
    pub high: SignedQty,
    /// Time of its first event here.
    pub first_seen: OffsetDateTime,
    /// Height of its first event here.
    pub first_height: Height,
    /// Height of its last movement here; zero for none.
    pub last_height: Height,
    /// Was something of it burnt here?
    pub burnt: bool,
    /// Who sent it in its first movement here.
    pub first_sender: Option<AccountId>,
    /// Did its first movement here create it?
    pub begins_with_mint: bool,
    /// Has any movement been seen here?
    moved: bool,
}

/// The net change of one (asset, account).
#[derive(Debug, Clone, Copy)]
pub struct BalanceChange {
    /// Index into the segment's assets.
    pub asset: u32,
    /// Index into the segment's accounts.
    pub account: u32,
    /// Sum of all legs.
    pub net: SignedQty,
    /// Smallest running sum, never above zero.
    pub low: SignedQty,
}

/// An event whose effect is left out because a balance would go negative.
#[derive(Debug, Clone)]
pub struct Refused {
    /// The event.
    pub event: EventId,
    /// Its chain-native identity.
    pub source: SourceEventId,
    /// Where it stands.
    pub height: Height,
    /// Its asset.
    pub asset: AssetId,
    /// Its contract.
    pub contract: ContractId,
    /// Why, with the balance it met.
    pub reason: String,
}

/// What is known of balances before the segment, for the pairs that need it.
#[derive(Debug, Default, Clone)]
pub struct Before {
    /// Balances before the segment of pairs that went below zero in a first try.
    pub balances: HashMap<(AssetId, AccountId), U256>,
    /// Openings: balances older than the start block, to be written as opening events.
    pub openings: HashMap<(AssetId, AccountId), U256>,
    /// Supplies before the segment of assets of which too much was made in a first try.
    pub supplies: HashMap<AssetId, U256>,
    /// Opening events that these pairs have already; none for the others.
    pub parts: HashMap<(AssetId, AccountId), u32>,
}

/// Rows and sums of one run of blocks.
pub struct Segment {
    /// The network.
    pub network: NetworkId,
    /// The heights covered.
    pub range: HeightRange,
    /// Canonical events (all kinds).
    pub events: u64,
    /// Ids of all events, for the rare case that some were reverted before.
    pub event_ids: CopyBuffer,
    /// Rows of ledger.normalized_events.
    pub event_rows: CopyBuffer,
    /// Rows of ledger.ownership_history.
    pub history_rows: CopyBuffer,
    /// Rows of projection.transfers.
    pub transfer_rows: CopyBuffer,
    /// Rows of projection.block_cards.
    pub block_rows: CopyBuffer,
    /// Accounts seen.
    pub accounts: Vec<SegmentAccount>,
    /// Collections seen.
    pub collections: Vec<SegmentCollection>,
    /// Assets seen.
    pub assets: Vec<SegmentAsset>,
    /// Net changes.
    pub balances: Vec<BalanceChange>,
    /// Change of the digest per bucket.
    pub digest: Vec<Digest>,
    /// Openings written: asset, account, quantity.
    pub opened: Vec<(AssetId, AccountId, U256)>,
    /// Events whose effect was refused.
    pub refused: Vec<Refused>,
    /// Records that break their standard, with their height.
    pub quarantined: Vec<(Height, tidemark_model::chain::Quarantined)>,
    /// Time of the last block.
    pub last_time: OffsetDateTime,
}

impl Segment {
    /// The asset at `at`.
    pub fn asset(&self, at: u32) -> &SegmentAsset {
        &self.assets[index(at)]
    }
    /// The account at `at`.
    pub fn account(&self, at: u32) -> &SegmentAccount {
        &self.accounts[index(at)]
    }
    /// The collection at `at`.
    pub fn collection(&self, at: u32) -> &SegmentCollection {
        &self.collections[index(at)]
    }
    /// The natural name of an asset of this segment.
    pub fn asset_ref(&self, asset: &SegmentAsset) -> AssetRef {
        AssetRef {
            network_id: self.network,
            collection_addr_normalized: self.collection(asset.collection).address.clone(),
            token_id_raw: asset.token_id.clone(),
            standard: asset.standard,
        }
    }
}

/// What an event's row says of itself, beside its block.
struct Place<'a> {
    source: &'a SourceEventId,
    sub_index: u32,
    kind: EventKind,
    tx: &'a [u8],
    index: i32,
    blob_ref: Option<&'a str>,
    /// The event whose block and time these are.
    of: &'a RawEvent,
}

impl<'a> Place<'a> {
    fn of(event: &'a RawEvent) -> Self {
        Self {
            source: &event.source_event_id,
            sub_index: event.sub_index,
            kind: event.event_kind,
            tx: event.tx_hash.as_bytes(),
            index: i32::try_from(event.event_index).expect("an index in a block fits in 31 bits"),
            blob_ref: event.blob_ref.as_deref(),
            of: event,
        }
    }
}

/// What an event moved: sides, and the signed quantity of its row.
struct Moved {
    from: Option<Uuid>,
    to: Option<Uuid>,
    qty: SignedQty,
}

/// Where a leg stands in the history of balances.
struct Stands {
    height: i64,
    index: i32,
    time: OffsetDateTime,
}

/// Builds one segment. Nothing is kept from one to the next, so that a segment depends on its blocks alone.
pub struct Builder {
    network: Network,
    before: Before,
    account_index: HashMap<String, u32>,
    collection_index: HashMap<String, u32>,
    asset_index: HashMap<(u32, String, Standard), u32>,
    pair_index: HashMap<(u32, u32), u32>,
    opened: HashSet<(u32, u32)>,
    segment: Segment,
}

impl Builder {
    /// Begins a segment at `from`.
    pub fn new(network: &Network, from: Height, before: Before) -> Self {
        Self {
            network: network.clone(),
            before,
            account_index: HashMap::default(),
            collection_index: HashMap::default(),
            asset_index: HashMap::default(),
            pair_index: HashMap::default(),
            opened: HashSet::new(),
            segment: Segment {
                network: network.id,
                range: HeightRange::one(from),
                events: 0,
                event_ids: CopyBuffer::new(1),
                event_rows: CopyBuffer::new(18),
                history_rows: CopyBuffer::new(9),
                transfer_rows: CopyBuffer::new(15),
                block_rows: CopyBuffer::new(7),
                accounts: Vec::new(),
                collections: Vec::new(),
                assets: Vec::new(),
                balances: Vec::new(),
                digest: vec![Digest::default(); BUCKETS],
                opened: Vec::new(),
                refused: Vec::new(),
                quarantined: Vec::new(),
                last_time: OffsetDateTime::UNIX_EPOCH,
            },
        }
    }

    /// Adds the next blocks (heights ascending, all within `range`, all final). `range` begins where the segment
    /// began or where the one before ended.
    pub fn add(&mut self, range: HeightRange, blocks: &[(RawBlock, ParsedBlock)]) {
        self.segment.range =
            HeightRange::new(self.segment.range.from(), range.to()).expect("ranges are added in order");
        for (block, parsed) in blocks {
            assert!(range.contains(block.height), "block {} lies outside of {range}", block.height);
            self.segment.last_time = block.time;
            self.block(block, parsed);
        }
    }

    /// The heights added so far.
    pub fn range(&self) -> HeightRange {
        self.segment.range
    }

    /// What it holds so far: events, records that are none, and blocks, which may all be empty.
    pub fn weight(&self) -> usize {
        let rows = self.segment.events + self.segment.block_rows.rows();
        usize::try_from(rows).unwrap_or(usize::MAX).saturating_add(self.segment.quarantined.len())
    }

    /// The segment of what was added.
    pub fn finish(self) -> Segment {
        let mut segment = self.segment;
        // Neighbours in the stream are neighbours in the index.
        segment.event_rows = segment.event_rows.take().sorted_by_leading_uuid();
        // With a start in the middle every pair that moved is needed: its opening may be asked for.
        if self.network.start_block.0 == 0 {
            segment.balances.retain(|change| !change.net.is_zero() || change.low.is_negative());
        }
        segment
    }

    fn block(&mut self, block: &RawBlock, parsed: &ParsedBlock) {
        let events = i32::try_from(parsed.events.len()).expect("a block holds fewer than 2^31 events");
        self.segment
            .block_rows
            .row()
            .i32(self.network.id.0)
            .i64(block.height.as_i64())
            .bytea(&block.hash.0)
            .bytea(&block.parent.0)
            .timestamp(block.time)
            .opt(block.tx_count.and_then(|count| i32::try_from(count).ok()), CopyBuffer::i32)
            .i32(events);
        for event in &parsed.events {
            self.event(event);
        }
        self.segment.quarantined.extend(parsed.quarantined.iter().map(|bad| (block.height, bad.clone())));
    }

    fn event(&mut self, event: &RawEvent) {
        let id = EventId::of(&event.source_event_id, event.sub_index);
        let Some(asset_ref) = event.asset_refs.first() else {
            self.event_row(id, &Place::of(event), None, None);
            return;
        };
        let moves = event.movement();
        let collection = self.collection(
            &asset_ref.collection_addr_normalized,
            asset_ref.standard,
            event,
            moves.is_some(),
        );
        let asset = self.asset(collection, &asset_ref.token_id_raw, asset_ref.standard, event);
        let Some(movement) = moves else {
            self.event_row(id, &Place::of(event), Some((asset, collection)), None);
            return;
        };
        let from = movement.from.map(|address| self.account(address, event));
        // A transfer to oneself is one event of one account.
        let to = match (movement.from, movement.to) {
            (Some(sender), Some(receiver)) if sender == receiver => from,
            (_, receiver) => receiver.map(|address| self.account(address, event)),
        };
        self.moved(asset, event, from);
        let asset_id = self.segment.assets[index(asset)].id;
        let account_id = |builder: &Self, at: u32| builder.segment.accounts[index(at)].id.0;
        let (from_id, to_id) = (from.map(|at| account_id(self, at)), to.map(|at| account_id(self, at)));
        let signed = if to.is_none() { SignedQty::loss(movement.qty) } else { SignedQty::gain(movement.qty) };
        let moved = Moved { from: from_id, to: to_id, qty: signed };
        self.event_row(id, &Place::of(event), Some((asset, collection)), Some(moved));
        let collection_id = self.segment.collections[index(collection)].id;
        self.segment
            .transfer_rows
            .row()
            .i32(self.network.id.0)
            .i64(event.block_number.as_i64())
            .i32(i32::try_from(event.event_index).expect("an index in a block fits in 31 bits"))
            .i32(i32::try_from(event.sub_index).expect("an index in a batch fits in 31 bits"))
            .uuid(id.0)
            .text(event.event_kind.as_str())
            .uuid(asset_id.0)
            .uuid(collection_id.0)
            .opt(from_id, CopyBuffer::uuid)
            .opt(to_id, CopyBuffer::uuid)
            .u256(movement.qty)
            .bytea(event.tx_hash.as_bytes())
            .bytea(&event.block_hash.0)
            .timestamp(event.event_time)
            .bool(false);
        // A movement of nothing needs nothing.
        for account in [from, to].into_iter().flatten().filter(|_| !movement.qty.is_zero()) {
            self.open(asset, account, event);
        }
        if let Err(reason) = self.may_move(asset, from, to, movement.qty) {
            let contract = self.segment.collections[index(collection)].contract;
            self.segment.refused.push(Refused {
                event: id,
                source: event.source_event_id.clone(),
                height: event.block_number,
                asset: asset_id,
                contract,
                reason,
            });
            return;
        }
        if movement.qty.is_zero() {
            return; // It changes no balance and leaves no trace in the history of balances.
        }
        let stands = Stands {
            height: event.block_number.as_i64(),
            index: i32::try_from(event.event_index).expect("an index in a block fits in 31 bits"),
            time: event.event_time,
        };
        if let Some(from) = from {
            self.leg(id, &stands, asset, from, SignedQty::loss(movement.qty), 0);
        }
        if let Some(to) = to {
            self.leg(id, &stands, asset, to, SignedQty::gain(movement.qty), 1);
        }
        if from.is_none() || to.is_none() {
            let touched = &mut self.segment.assets[index(asset)];
            touched.burnt |= to.is_none();
            touched.supply = touched.supply.checked_add(signed).unwrap_or(touched.supply);
            touched.high = touched.high.max(touched.supply);
        }
    }

    /// Refuses what no token that keeps its standard can do, whatever was before the segment; and what it
    /// cannot do given what was, where that was looked up.
    fn may_move(&self, asset: u32, from: Option<u32>, to: Option<u32>, qty: U256) -> Result<(), String> {
        if let Some(from) = from {
            self.may_lose(asset, from, qty)?;
        }
        let running = |account: u32| {
            let at = self.pair_index.get(&(asset, account));
            at.map_or(SignedQty::ZERO, |at| self.segment.balances[index(*at)].net)
        };
        if from.is_some_and(|from| running(from).checked_add(SignedQty::loss(qty)).is_none()) {
            return Err("an account sent more than it held".to_owned());
        }
        let gained = |to: u32| running(to).checked_add(SignedQty::gain(qty)).is_none();
        if to.is_some_and(|to| from != Some(to) && gained(to)) {
            return Err("a balance would exceed 256 bits".to_owned());
        }
        if from.is_some() || qty.is_zero() {
            return Ok(());
        }
        let touched = &self.segment.assets[index(asset)];
        let before = self.before.supplies.get(&touched.id).copied().unwrap_or_default();
        let made = SignedQty::gain(before)
            .checked_add(touched.supply)
            .and_then(|supply| supply.checked_add(SignedQty::gain(qty)));
        match (made, touched.standard) {
            (None, _) => Err("the supply would exceed 256 bits".to_owned()),
            (Some(made), Standard::Erc721) if made > SignedQty::gain(U256::from(1)) => {
                Err("a single token was made while it existed".to_owned())
            }
            (Some(_), Standard::Erc721 | Standard::Erc1155) => Ok(()),
        }
    }

    /// Refuses a loss that the balance before the segment does not cover; only pairs whose balance was
    /// looked up can be judged, all others are judged by `low` against the database.
    fn may_lose(&self, asset: u32, account: u32, qty: U256) -> Result<(), String> {
        let pair = (self.segment.assets[index(asset)].id, self.segment.accounts[index(account)].id);
        let Some(held) = self.before.balances.get(&pair) else { return Ok(()) };
        let running = self
            .pair_index
            .get(&(asset, account))
            .map_or(SignedQty::ZERO, |at| self.segment.balances[index(*at)].net);
        let after =
            SignedQty::gain(*held).checked_add(running).and_then(|now| now.checked_add(SignedQty::loss(qty)));
        match after {
            Some(after) if !after.is_negative() => Ok(()),
            _ => Err(format!(
                "would leave {} of {qty} that are not there",
                self.segment.accounts[index(account)].address
            )),
        }
    }

    /// Writes the opening of a pair, if it has one, before its first leg: the balance the account had
    /// before our start block, as an explicit delta.
    fn open(&mut self, asset: u32, account: u32, cause: &RawEvent) {
        let (asset_id, account_id) =
            (self.segment.assets[index(asset)].id, self.segment.accounts[index(account)].id);
        let Some(qty) = self.before.openings.get(&(asset_id, account_id)).copied() else { return };
        if qty.is_zero() || !self.opened.insert((asset, account)) {
            return;
        }
        let source = SourceEventId::opening(self.network.id, asset_id, account_id);
        let part = self.before.parts.get(&(asset_id, account_id)).copied().unwrap_or(0);
        let id = EventId::of(&source, part);
        let collection = self.segment.assets[index(asset)].collection;
        let place = Place {
            source: &source,
            sub_index: part,
            kind: EventKind::Opening,
            tx: &[0; 32],
            index: -1,
            blob_ref: None,
            of: cause,
        };
        let moved = Moved { from: None, to: Some(account_id.0), qty: SignedQty::gain(qty) };
        self.event_row(id, &place, Some((asset, collection)), Some(moved));
        // In the history it stands before our first block: it was true all along.
        let stands = Stands {
            height: self.network.start_block.as_i64() - 1,
            index: -1,
            time: OffsetDateTime::UNIX_EPOCH,
        };
        self.leg(id, &stands, asset, account, SignedQty::gain(qty), 1);
        self.segment.opened.push((asset_id, account_id, qty));
        let touched = &mut self.segment.assets[index(asset)];
        touched.supply = touched.supply.checked_add(SignedQty::gain(qty)).unwrap_or(touched.supply);
        touched.high = touched.high.max(touched.supply);
    }

    fn event_row(&mut self, id: EventId, place: &Place<'_>, asset: Option<(u32, u32)>, moved: Option<Moved>) {
        let event = place.of;
        self.segment.events += 1;
        self.segment.event_ids.row().uuid(id.0);
        let mut sub_index = [0_u8; 10];
        let sub_index = decimal(place.sub_index, &mut sub_index);
        let ids = asset.map(|(asset, collection)| {
            (self.segment.assets[index(asset)].id.0, self.segment.collections[index(collection)].id.0)
        });
        self.segment
            .event_rows
            .row()
            .uuid(id.0)
            .text(place.source.as_str())
            .text(sub_index)
            .i32(self.network.id.0)
            .text(place.kind.as_str())
            .opt(ids.map(|ids| ids.0), CopyBuffer::uuid)
            .opt(ids.map(|ids| ids.1), CopyBuffer::uuid)
            .opt(moved.as_ref().and_then(|moved| moved.from), CopyBuffer::uuid)
            .opt(moved.as_ref().and_then(|moved| moved.to), CopyBuffer::uuid)
            .opt(moved.map(|moved| moved.qty), CopyBuffer::qty)
            .i64(event.block_number.as_i64())
            .bytea(&event.block_hash.0)
            .bytea(place.tx)
            .i32(place.index)
            .timestamp(event.event_time)
            .text("finalized")
            .bool(false)
            .opt(place.blob_ref, CopyBuffer::text);
    }

    fn leg(&mut self, id: EventId, stands: &Stands, asset: u32, account: u32, qty: SignedQty, leg: i16) {
        let (asset_id, account_id) =
            (self.segment.assets[index(asset)].id, self.segment.accounts[index(account)].id);
        self.segment
            .history_rows
            .row()
            .uuid(asset_id.0)
            .uuid(account_id.0)
            .i32(self.network.id.0)
            .i64(stands.height)
            .i32(stands.index)
            .qty(qty)
            .timestamp(stands.time)
            .uuid(id.0)
            .i16(leg);
        self.segment.digest[usize::from(bucket_of(asset_id))].add(asset_id, account_id, qty);
        let next = u32::try_from(self.segment.balances.len()).expect("fewer than 2^32 pairs");
        let at = *self.pair_index.entry((asset, account)).or_insert(next);
        if at == next {
            self.segment.balances.push(BalanceChange {
                asset,
                account,
                net: SignedQty::ZERO,
                low: SignedQty::ZERO,
            });
        }
        let change = &mut self.segment.balances[index(at)];
        change.net =
            change.net.checked_add(qty).expect("a sum of checked uint256 legs stays within the sign bit");
        change.low = change.low.min(change.net);
    }

    fn moved(&mut self, asset: u32, event: &RawEvent, from: Option<u32>) {
        let sender = from.map(|at| self.segment.accounts[index(at)].id);
        let touched = &mut self.segment.assets[index(asset)];
        touched.last_height = event.block_number;
        if !touched.moved {
            touched.moved = true;
            touched.begins_with_mint = event.event_kind == EventKind::Mint;
            touched.first_sender = sender;
        }
    }

    fn account(&mut self, address: &str, event: &RawEvent) -> u32 {
        if let Some(at) = self.account_index.get(address) {
            let account = &mut self.segment.accounts[index(*at)];
            account.last_seen = event.event_time;
            account.transfers += 1;
            return *at;
        }
        let at = u32::try_from(self.segment.accounts.len()).expect("fewer than 2^32 accounts");
        self.account_index.insert(address.to_owned(), at);
        self.segment.accounts.push(SegmentAccount {
            id: AccountId::of(self.network.id, address),
            address: address.to_owned(),
            first_seen: event.event_time,
            last_seen: event.event_time,
            transfers: 1,
        });
        at
    }

    fn collection(&mut self, address: &str, standard: Standard, event: &RawEvent, moves: bool) -> u32 {
        let at = match self.collection_index.get(address) {
            Some(at) => *at,
            None => {
                let at = u32::try_from(self.segment.collections.len()).expect("fewer than 2^32 collections");
                self.collection_index.insert(address.to_owned(), at);
                self.segment.collections.push(SegmentCollection {
                    id: CollectionId::of(self.network.id, address),
                    contract: ContractId::of(self.network.id, address),
                    address: address.to_owned(),
                    standard,
                    first_seen: event.event_time,
                    first_height: event.block_number,
                    last_height: event.block_number,
                    transfers: 0,
                });
                at
            }
        };
        let collection = &mut self.segment.collections[index(at)];
        collection.last_height = event.block_number;
        collection.transfers += i64::from(moves);
        at
    }

    fn asset(&mut self, collection: u32, token_id: &str, standard: Standard, event: &RawEvent) -> u32 {
        let key = (collection, token_id.to_owned(), standard);
        if let Some(at) = self.asset_index.get(&key) {
            return *at;
        }
        let at = u32::try_from(self.segment.assets.len()).expect("fewer than 2^32 assets");
        let id = AssetId::of(
            self.network.id,
            self.segment.collections[index(collection)].id,
            token_id,
            standard.as_str(),
        );
        self.segment.assets.push(SegmentAsset {
            id,
            collection,
            token_id: key.1.clone(),
            standard,
            supply: SignedQty::ZERO,
            high: SignedQty::ZERO,
            first_seen: event.event_time,
            first_height: event.block_number,
            last_height: Height(0),
            burnt: false,
            first_sender: None,
            begins_with_mint: false,
            moved: false,
        });
        self.asset_index.insert(key, at);
        at
    }
}

fn index(at: u32) -> usize {
    usize::try_from(at).expect("usize holds 32 bits")
}

fn decimal(value: u32, buffer: &mut [u8; 10]) -> &str {
    let mut at = buffer.len();
    let mut rest = value;
    loop {
        at -= 1;
        buffer[at] = b'0' + u8::try_from(rest % 10).expect("a digit");
        rest /= 10;
        if rest == 0 {
            return std::str::from_utf8(&buffer[at..]).expect("digits are ASCII");
        }
    }
}
