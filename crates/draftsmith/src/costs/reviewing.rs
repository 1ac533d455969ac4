//! What a drafter's own forwards cost that read several tokens: those with which it reviews, in a
//! cascade, what was looked up, and those that read a tree's nodes.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use draftsmith_theory::{DraftSeconds, RoundCosts};

use crate::decoders::Decoders;
use crate::results::DrafterName;
use crate::statistics::median_of;

/// The rows that are timed, up to ten looked-up tokens and the one before them.
const ROWS: [usize; 8] = [1, 2, 3, 4, 5, 7, 9, 11];
/// How often each is timed behind a prompt, all in turn.
const NUM_PASSES: usize = 40;

/// Measures forwards of a drafter behind prompts, by their rows.
///
/// # Errors
/// If there is no prompt, a model fails, or there is no such drafter.
pub(crate) fn measure_reviewing(
    decoders: &mut Decoders<'_>,
    drafter: DrafterName,
    prompts: &[Vec<u32>],
) -> Result<RoundCosts> {
    let mut seconds: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for prompt in prompts {
        for (rows, time) in decoders.draft_times(drafter, prompt, &ROWS, NUM_PASSES)? {
            seconds.entry(rows).or_default().push(time.as_secs_f64());
        }
    }
    let points = seconds.into_iter().filter_map(|(rows, all)| Some((rows, median_of(all)?)));
    let points: Vec<(usize, f64)> = points.collect();
    if points.is_empty() {
        bail!("there is no prompt to measure costs on, or none leaves room in the context");
    }
    Ok(RoundCosts::from_points(DraftSeconds::new(), points)?)
}
