//! One seed: two networks in one database, a schedule of everything that happens to a deployment, and at the
//! end the comparison with the truth.

use rand::Rng as _;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use tidemark_sim::ReorgKind;
use tidemark_store::projection::built_last;

use crate::chain::{Archive, Chain};
use crate::check;
use crate::feed::Message;
use crate::ground::{Ground, settle};
use crate::lane::{Failed, Kill, Lane, Step, text};

/// Things that happen before everything is brought to an end.
const ACTIONS: u32 = 70;
/// Messages a duplicate may be old.
const DUPLICATES: usize = 6;

/// What happened, in order; printed when a seed fails, compared when it runs twice.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Trace(pub(crate) Vec<String>);

impl Trace {
    fn note(&mut self, lane: &Lane, what: String) {
        self.0.push(format!("{} {what}", lane.chain.network.slug));
    }
}

/// Runs a seed; the trace is filled as far as it came.
pub(crate) async fn run(ground: &Ground, seed: u64, trace: &mut Trace) -> Result<(), Failed> {
    let mut random = StdRng::seed_from_u64(seed);
    // The first network starts at zero; the second somewhere in the middle.
    let blocks = random.random_range(1..12);
    let whole = Chain::new(seed, 0, blocks, 0, Archive::Answers);
    let blocks = random.random_range(20..30);
    let start = random.random_range(8..=blocks - 6);
    let archive = if random.random_bool(0.25) { Archive::Pruned } else { Archive::Answers };
    let half = Chain::new(seed, 1, blocks, start, archive);
    let mut lanes = [Lane::new(whole), Lane::new(half)];
    for lane in &lanes {
        settle(&ground.db, &lane.chain.network).await.map_err(text)?;
        settle(&ground.replay, &lane.chain.network).await.map_err(text)?;
        if random.random_bool(0.4) {
            let mut conn = ground.db.conn().await.map_err(text)?;
            let head = lane.chain.network.start_block.as_i64() - 1;
            built_last::put_off(&mut conn, lane.chain.network.id, head, head).await.map_err(text)?;
            trace.note(lane, "is shown when its history is read".to_owned());
        }
    }
    for _ in 0..ACTIONS {
        let lane = &mut lanes[usize::from(random.random_bool(0.5))];
        act(ground, lane, &mut random, trace).await?;
    }
    for lane in &mut lanes {
        finish(ground, lane, &mut random, trace).await?;
    }
    for lane in &lanes {
        check::everything(ground, lane, &mut random, trace).await?;
    }
    Ok(())
}

fn some_kill(random: &mut StdRng) -> Kill {
    match random.random_range(0..20) {
        0 | 1 => Kill::Statement(random.random_range(0..16)),
        2 => Kill::BeforeCommit,
        3 => Kill::AfterCommit,
        _ => Kill::Never,
    }
}

/// One thing happens to one network.
async fn act(ground: &Ground, lane: &mut Lane, random: &mut StdRng, trace: &mut Trace) -> Result<(), Failed> {
    match random.random_range(0..100) {
        0..16 => {
            let blocks = random.random_range(1..4);
            lane.chain.sim.mine(blocks);
            trace.note(lane, format!("mines {blocks}, head {}", lane.chain.sim.head()));
        }
        16..18 => {
            // A long silence: what comes next is history.
            let blocks = random.random_range(8..14);
            lane.chain.sim.mine(blocks);
            trace.note(lane, format!("mines {blocks} while nobody looks"));
        }
        18..26 => {
            let kind = *ReorgKind::ALL.choose(random).expect("there are kinds");
            let depth: u64 = random.random_range(1..=5);
            let new_blocks = (depth + random.random_range(0..3)).saturating_sub(1).max(1);
            let done = lane.chain.reorg(kind, depth, new_blocks);
            trace.note(lane, format!("reorg {done}"));
        }
        26..28 => {
            let frozen = random.random_bool(0.5);
            lane.chain.sim.freeze_finality(frozen);
            trace.note(lane, format!("finality frozen: {frozen}"));
        }
        28..50 => {
            let most = random.random_range(1..6);
            lane.feed.pull(&lane.chain, most, random);
            let (tip, messages) = (lane.feed.tip(), lane.feed.messages.len());
            trace.note(lane, format!("is read up to {tip:?}, {messages} messages"));
        }
        50..78 => deliver_next(ground, lane, random, trace).await?,
        78..82 => duplicate(ground, lane, random, trace).await?,
        82..83 => {
            *lane.chain.failures.lock().expect("nobody panics") += 2;
            trace.note(lane, "the node refuses two questions".to_owned());
        }
        83..91 => {
            let (most, kill) = (random.random_range(1..9), some_kill(random));
            let (step, what) = lane.history(ground, most, kill).await?;
            trace.note(lane, format!("{what} ({kill:?}): {step:?}"));
        }
        91..100 => {
            let (most, kill) = (random.random_range(1..80), some_kill(random));
            let step = lane.project(ground, most, kill).await?;
            trace.note(lane, format!("projects to {} ({kill:?}): {step:?}", lane.projected));
        }
        _ => unreachable!("a hundred"),
    }
    Ok(())
}

/// The next messages, one or several in one transaction, as the dispatcher does it.
async fn deliver_next(
    ground: &Ground,
    lane: &mut Lane,
    random: &mut StdRng,
    trace: &mut Trace,
) -> Result<(), Failed> {
    let kill = some_kill(random);
    let waiting = lane.feed.messages.len() - lane.position;
    if waiting == 0 {
        return Ok(());
    }
    let count = random.random_range(1..=5).min(waiting);
    let batch: Vec<Message> = lane.feed.messages[lane.position..lane.position + count].to_vec();
    let names: Vec<String> = batch.iter().map(Message::name).collect();
    let mut step = lane.deliver(ground, &batch, kill).await?;
    trace.note(lane, format!("{} ({kill:?}): {step:?}", names.join(", ")));
    if step == Step::Done {
        lane.position += count;
    }
    // What cannot go together is tried alone.
    if step == Step::Waits && count > 1 {
        step = lane.deliver(ground, &batch[..1], Kill::Never).await?;
        trace.note(lane, format!("{} alone: {step:?}", names[0]));
        lane.position += usize::from(step == Step::Done);
    }
    Ok(())
}

/// A message comes again, alone or with all that followed it, past the inbox.
async fn duplicate(
    ground: &Ground,
    lane: &mut Lane,
    random: &mut StdRng,
    trace: &mut Trace,
) -> Result<(), Failed> {
    let delivered = &lane.feed.messages[..lane.position];
    let near = lane.position.saturating_sub(DUPLICATES);
    // What was final before stays so: nobody goes back behind it.
    let near = delivered
        .iter()
        .rposition(|message| matches!(message, Message::Final { .. }))
        .map_or(near, |last| near.max(last));
    let Some(again) = (near..lane.position).collect::<Vec<_>>().choose(random).copied() else {
        return Ok(());
    };
    if random.random_bool(0.4) {
        trace.note(lane, format!("goes back from message {} to {again}", lane.position));
        lane.position = again;
        return Ok(());
    }
    let message = lane.feed.messages[again].clone();
    if matches!(message, Message::Reorg { .. }) && again + 1 != lane.position {
        return Ok(());
    }
    let step = lane.deliver(ground, std::slice::from_ref(&message), Kill::Never).await?;
    trace.note(lane, format!("{} again: {step:?}", message.name()));
    Ok(())
}

/// The chain comes to rest; everything is read, delivered, applied and projected.
async fn finish(
    ground: &Ground,
    lane: &mut Lane,
    random: &mut StdRng,
    trace: &mut Trace,
) -> Result<(), Failed> {
    lane.chain.sim.freeze_finality(false);
    // Longer than anything that was ever read, so that the last reorg is seen.
    let head = lane.chain.sim.head();
    let behind = lane.feed.tip().unwrap_or(0).saturating_sub(head);
    lane.chain.sim.mine(behind + 1);
    trace.note(lane, format!("comes to rest at {}", lane.chain.sim.head()));
    while lane.feed.tip() != Some(lane.chain.sim.head())
        || lane.feed.tip().and_then(|tip| lane.chain.link(tip)).map(|block| block.hash)
            != lane.feed.tip().map(|tip| lane.feed.stored[&tip].hash)
    {
        lane.feed.pull(&lane.chain, 10, random);
    }
    drain(ground, lane, random, trace).await?;
    check::latest(ground, lane).await?;
    // At last the newest block is final, too.
    lane.feed.finalize(&lane.chain, lane.chain.sim.head());
    drain(ground, lane, random, trace).await
}

async fn drain(
    ground: &Ground,
    lane: &mut Lane,
    random: &mut StdRng,
    trace: &mut Trace,
) -> Result<(), Failed> {
    for _ in 0..400 {
        while lane.projected < lane.emitted.len() {
            lane.project(ground, 200, Kill::Never).await?;
        }
        let before = lane.position;
        deliver_next(ground, lane, random, trace).await?;
        let (step, what) = lane.history(ground, 50, Kill::Never).await?;
        if step == Step::Done {
            trace.note(lane, what);
        }
        let idle = lane.position == before && step != Step::Done;
        if idle && lane.position == lane.feed.messages.len() && lane.projected == lane.emitted.len() {
            return Ok(());
        }
    }
    Err(format!("{} never comes to rest", lane.chain.network.slug))
}
