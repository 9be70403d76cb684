//! Who works on which partition: everybody alive who runs a handler takes an equal share of its partitions.
//! One look at the database decides; a process with too many finishes what it is at and gives some back, one
//! with too few takes what is free. Views may differ for a moment; the epoch of each lease does not.

use std::collections::{BTreeMap, BTreeSet};

use tidemark_store::buslog::HeldPart;

/// What one look asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Shares {
    /// Free partitions to be claimed.
    pub(crate) claim: Vec<u16>,
    /// Partitions to be given back.
    pub(crate) give: Vec<u16>,
    /// Partitions that somebody else has taken over.
    pub(crate) lost: Vec<u16>,
}

/// What is known at one moment.
pub(crate) struct Look<'a> {
    /// The handler: where the remainder of the division goes differs from handler to handler.
    pub(crate) handler: &'a str,
    /// This process.
    pub(crate) me: &'a str,
    /// Partitions of the stream.
    pub(crate) parts: u16,
    /// Everybody alive, by name.
    pub(crate) members: &'a [String],
    /// What the database says is held.
    pub(crate) held: &'a [HeldPart],
    /// What runs here, with its epoch.
    pub(crate) running: &'a BTreeMap<u16, i64>,
}

/// Decides; touches nothing.
pub(crate) fn share(look: &Look<'_>) -> Shares {
    let by_part: BTreeMap<u16, &HeldPart> = look.held.iter().map(|held| (held.part, held)).collect();
    let lost: Vec<u16> = look
        .running
        .iter()
        .filter(|(part, epoch)| by_part.get(part).is_some_and(|held| held.epoch != **epoch))
        .map(|(part, _)| *part)
        .collect();
    let mine: BTreeSet<u16> = look.running.keys().copied().filter(|part| !lost.contains(part)).collect();
    let (rank, quota) = quota(look);
    if mine.len() > quota {
        return Shares { give: mine.into_iter().skip(quota).collect(), lost, ..Shares::default() };
    }
    let mut free: Vec<u16> = (0..look.parts)
        .filter(|part| !look.running.contains_key(part))
        .filter(|part| by_part.get(part).is_none_or(|held| held.owner == look.me))
        .collect();
    // Claimants begin at different places, so that they rarely want the same partition.
    if !free.is_empty() {
        let start = rank * quota % free.len();
        free.rotate_left(start);
    }
    free.truncate(quota - mine.len());
    Shares { claim: free, lost, ..Shares::default() }
}

/// This process's place among the living, and how many partitions it may have.
fn quota(look: &Look<'_>) -> (usize, usize) {
    let parts = usize::from(look.parts);
    let others = look.members.iter().filter(|member| *member != look.me).count();
    let count = others + 1;
    let place = look.members.iter().filter(|member| member.as_str() < look.me).count();
    let turn = usize::try_from(tidemark_model::partition::fnv1a(look.handler.as_bytes())).unwrap_or(0);
    let rank = (place + turn % count) % count;
    (rank, parts / count + usize::from(rank < parts % count))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Everybody looks and acts in turn until nothing changes; gives what each holds.
    fn settle(parts: u16, members: &[String], held: &mut BTreeMap<u16, String>) -> Vec<usize> {
        for _ in 0..20 {
            let before = held.clone();
            for me in members {
                let look: Vec<HeldPart> = held
                    .iter()
                    .map(|(part, owner)| HeldPart { part: *part, owner: owner.clone(), epoch: 1 })
                    .collect();
                let running: BTreeMap<u16, i64> =
                    held.iter().filter(|(_, owner)| *owner == me).map(|(part, _)| (*part, 1)).collect();
                let shares =
                    share(&Look { handler: "h", me, parts, members, held: &look, running: &running });
                for part in shares.give {
                    held.remove(&part);
                }
                for part in shares.claim {
                    assert!(held.insert(part, me.clone()).is_none(), "claimed what is held");
                }
            }
            if *held == before {
                break;
            }
        }
        members.iter().map(|me| held.values().filter(|owner| *owner == me).count()).collect()
    }

    proptest! {
        #[test]
        fn everybody_ends_with_an_equal_share_and_nothing_is_left(
            parts in 1_u16..40, count in 1_usize..7, joined in 0_usize..4,
        ) {
            let members: Vec<String> = (0..count).map(|at| format!("m{at}")).collect();
            let mut held = BTreeMap::new();
            settle(parts, &members, &mut held);
            let more: Vec<String> = (0..count + joined).map(|at| format!("m{at}")).collect();
            let counts = settle(parts, &more, &mut held);
            prop_assert_eq!(counts.iter().sum::<usize>(), usize::from(parts));
            prop_assert!(counts.iter().max().unwrap_or(&0) - counts.iter().min().unwrap_or(&0) <= 1);
        }
    }

    #[test]
    fn a_partition_under_another_fence_is_lost() {
        let members = ["a".to_owned()];
        let held = [HeldPart { part: 0, owner: "a".into(), epoch: 9 }];
        let running = BTreeMap::from([(0, 1)]);
        let look =
            Look { handler: "h", me: "a", parts: 1, members: &members, held: &held, running: &running };
        assert_eq!(share(&look), Shares { lost: vec![0], ..Shares::default() });
    }

    #[test]
    fn the_odd_partition_goes_to_another_member_for_another_handler() {
        let members = ["a".to_owned(), "b".to_owned()];
        let gets = |handler| {
            let running = BTreeMap::new();
            let look = Look { handler, me: "a", parts: 1, members: &members, held: &[], running: &running };
            share(&look).claim.len()
        };
        let shares: BTreeSet<usize> = ["ledger", "projector", "webhooks", "scores"].map(gets).into();
        assert_eq!(shares.len(), 2, "one member got the only partition of every handler");
    }
}
