//! What the target's forwards cost that read more rows than chains have: those that verify trees.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use draftsmith_theory::{
    Decoding, DrafterId, FixedLengthConfig, RoundCosts, SeededDraws, StopRuleConfig, TreeShape,
};

use super::LENGTHS;
use crate::decoders::Decoders;
use crate::results::DrafterName;
use crate::statistics::median_of;

/// The nodes that are timed, children of what stands all; the first as many as the longest chain has
/// that is timed among chains, which the others are compared with.
const NODES: [usize; 6] = [LENGTHS[LENGTHS.len() - 1], 20, 28, 36, 48, 64];
/// How often each is timed behind a prompt, all in turn.
const NUM_PASSES: usize = 5;
/// New tokens a prompt and pass.
const NUM_TOKENS: usize = 16;

/// Costs of rounds with those of verifications of up to 65 rows: what they take longer than the longest
/// chain's. They are timed by trees that take one forward of a drafter.
///
/// # Errors
/// If there is no prompt, a model fails, or there is no such drafter.
pub(crate) fn measure_wide(
    decoders: &mut Decoders<'_>,
    drafter: DrafterId,
    prompts: &[Vec<u32>],
    rounds: &RoundCosts,
) -> Result<RoundCosts> {
    let all = std::mem::replace(&mut decoders.limits.max_new_tokens, NUM_TOKENS);
    let timed = verifications(decoders, drafter, prompts);
    decoders.limits.max_new_tokens = all;
    let timed = timed?;
    let longest = NODES[0] + 1;
    let Some(of_longest) = timed.get(&longest) else {
        bail!("there is no prompt to measure costs on, or their answers are too short");
    };
    let known = (1..=longest).map(|rows| (rows, rounds.verify_seconds(rows)));
    let base = rounds.verify_seconds(longest);
    let more = timed.range(longest + 1..);
    let more = more.map(|(rows, seconds)| (*rows, base + (seconds - of_longest).max(0.0)));
    let draft_seconds = [(drafter, rounds.draft_seconds(drafter)?)].into();
    Ok(RoundCosts::from_points(draft_seconds, known.chain(more).collect())?)
}

/// The seconds of verifications, by their rows.
fn verifications(
    decoders: &mut Decoders<'_>,
    drafter: DrafterId,
    prompts: &[Vec<u32>],
) -> Result<BTreeMap<usize, f64>> {
    let mut rule = StopRuleConfig::from(FixedLengthConfig { candidate_length: 1 }).init()?;
    let mut seconds: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for (prompt, nodes) in (0..NUM_PASSES)
        .flat_map(|_| prompts)
        .flat_map(|prompt| NODES.iter().map(move |nodes| (prompt, nodes)))
    {
        let shape = nodes.to_string().parse::<TreeShape>().context("as many children")?;
        let drafter = DrafterName::Tree(drafter, shape);
        let unused = &mut SeededDraws::new(0, &["costs"]);
        let found = decoders.decode(drafter, &mut *rule, &Decoding::GREEDY, prompt, unused)?;
        for round in found.trace.rounds.iter().filter(|round| round.num_drafted == *nodes) {
            seconds.entry(nodes + 1).or_default().push(round.verify_time.as_secs_f64());
        }
    }
    Ok(seconds.into_iter().filter_map(|(rows, all)| Some((rows, median_of(all)?))).collect())
}
