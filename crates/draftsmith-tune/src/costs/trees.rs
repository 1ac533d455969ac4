//! Measures the costs of trees: a drafter's forwards over several nodes, and verifications of more rows than
//! chains have.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use draftsmith_report::{DrafterName, median_of};
use draftsmith_theory::{
    Decoding, DrafterId, FixedLengthConfig, RoundCosts, SeededDraws, StopRuleConfig, TreeShape,
};

use super::{Costs, LENGTHS};
use crate::decoders::Decoders;

/// Rows of a drafter's forward that are timed.
const DRAFT_ROWS: [usize; 8] = [1, 2, 3, 4, 5, 7, 9, 11];
/// How often each number is timed after a prompt, all in turn.
const NUM_DRAFT_PASSES: usize = 40;
/// Nodes of the trees whose verification is timed; all are children of the root. The first tree has as many
/// nodes as the longest timed chain, and the others are compared with it.
const NODES: [usize; 6] = [LENGTHS[LENGTHS.len() - 1], 20, 28, 36, 48, 64];
/// How often each number is timed after a prompt, all in turn.
const NUM_PASSES: usize = 5;
/// New tokens per prompt and pass.
const NUM_TOKENS: usize = 16;

/// Adds the costs of trees to a drafter's costs: its forwards of several rows, and verifications of up to 65
/// rows.
///
/// # Errors
/// If there are no prompts, a model fails, or the drafter was not loaded.
pub fn measure_tree_costs(
    decoders: &mut Decoders<'_>,
    prompts: &[Vec<u32>],
    costs: &mut Costs,
) -> Result<()> {
    costs.draft_rows = Some(draft_rows(decoders, costs.drafter, prompts)?);
    let all = std::mem::replace(&mut decoders.limits.max_new_tokens, NUM_TOKENS);
    let timed = verifications(decoders, costs.drafter, prompts);
    decoders.limits.max_new_tokens = all;
    costs.rounds = with_wide(&costs.rounds, costs.drafter, &timed?)?;
    Ok(())
}

/// Measures a drafter's forwards after prompts by their rows.
fn draft_rows(
    decoders: &mut Decoders<'_>,
    drafter: DrafterId,
    prompts: &[Vec<u32>],
) -> Result<RoundCosts> {
    let drafter = DrafterName::Of(drafter);
    let mut seconds: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for prompt in prompts {
        for (rows, time) in decoders.draft_times(drafter, prompt, &DRAFT_ROWS, NUM_DRAFT_PASSES)? {
            seconds.entry(rows).or_default().push(time.as_secs_f64());
        }
    }
    let points = seconds.into_iter().filter_map(|(rows, all)| Some((rows, median_of(all)?)));
    let points: Vec<(usize, f64)> = points.collect();
    if points.is_empty() {
        bail!("no prompt leaves room in the context to measure costs");
    }
    Ok(RoundCosts::from_points([].into(), points)?)
}

/// The costs of chains' rounds, extended to wider verifications by their additional time over that of the
/// longest chain.
fn with_wide(
    rounds: &RoundCosts,
    drafter: DrafterId,
    timed: &BTreeMap<usize, f64>,
) -> Result<RoundCosts> {
    let longest = NODES[0] + 1;
    let Some(of_longest) = timed.get(&longest) else {
        bail!("the answers are too short to measure the costs of trees");
    };
    let known = (1..=longest).map(|rows| (rows, rounds.verify_seconds(rows)));
    let base = rounds.verify_seconds(longest);
    let more = timed.range(longest + 1..);
    let more = more.map(|(rows, seconds)| (*rows, base + (seconds - of_longest).max(0.0)));
    let draft_seconds = [(drafter, rounds.draft_seconds(drafter)?)].into();
    Ok(RoundCosts::from_points(draft_seconds, known.chain(more).collect())?)
}

/// Seconds of verifications by their rows.
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
        let found =
            decoders.decode(drafter, Some(&mut *rule as _), &Decoding::GREEDY, prompt, unused)?;
        for round in found.trace.rounds.iter().filter(|round| round.num_drafted == *nodes) {
            seconds.entry(nodes + 1).or_default().push(round.verify_time.as_secs_f64());
        }
    }
    Ok(seconds.into_iter().filter_map(|(rows, all)| Some((rows, median_of(all)?))).collect())
}
