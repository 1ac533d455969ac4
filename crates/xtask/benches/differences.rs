//! Compares the data or weights that two devices made: responses with labels, rollouts, or weights.
//!
//! `cargo bench -p xtask --bench differences -- FOUND EXPECTED TOLERANCE` takes two directories of
//! responses, two files of rollouts or two of weights. Rows, tokens and shapes must be equal. Numbers may
//! differ by TOLERANCE, relative if they are above 1, and one bf16 weight in a hundred may be rounded to
//! the other neighbour. The exit code is 1 if they differ by more. `device.sh` uses it.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use draftsmith_data::{Incomplete, ResponseRow, RolloutRow, read_dir, read_rollouts};
use draftsmith_model::WeightReader;

fn main() -> ExitCode {
    // `cargo bench` adds an argument.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|one| one != "--bench").collect();
    let compared = match &arguments[..] {
        [found, expected, tolerance] => {
            compare(Path::new(found), Path::new(expected), tolerance.parse().unwrap_or(0.0))
        }
        _ => Err(anyhow::anyhow!("expected FOUND EXPECTED TOLERANCE")),
    };
    match compared {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What the two sides contain, in words.
fn compare(found: &Path, expected: &Path, tolerance: f64) -> Result<String> {
    let mut apart = Apart { tolerance, largest: 0.0 };
    let what = if expected.is_dir() {
        responses(found, expected, &mut apart)?
    } else if expected.extension().is_some_and(|ending| ending == "safetensors") {
        weights(found, expected, &mut apart)?
    } else {
        rollouts(found, expected, &mut apart)?
    };
    Ok(format!("{what}, numbers at most {:.1e} apart ({tolerance:.0e} allowed)", apart.largest))
}

fn responses(found: &Path, expected: &Path, apart: &mut Apart) -> Result<String> {
    let [found, expected] = [found, expected].map(|dir| read_dir(dir, Incomplete::Refused));
    let (found, expected) = (found?.rows, expected?.rows);
    ensure!(found.len() == expected.len(), "{} rows for {}", found.len(), expected.len());
    let mut num_tokens = 0;
    for (found, expected) in found.iter().zip(&expected) {
        let ids = |row: &ResponseRow| {
            let draft = row.draft.as_ref().map(|draft| {
                (draft.draft_ids.clone(), draft.draft_top_ids.clone(), draft.target_top_ids.clone())
            });
            (row.id.clone(), row.prompt_ids.clone(), row.response_ids.clone(), draft)
        };
        ensure!(ids(found) == ids(expected), "`{}` has other tokens", expected.id);
        num_tokens += expected.response_ids.len();
        let numbers = |row: &ResponseRow| -> Vec<f64> {
            let draft = row.draft.iter().flat_map(|draft| {
                [
                    &draft.response_draft_log_prob,
                    &draft.draft_log_prob,
                    &draft.target_log_prob,
                    &draft.overlap,
                    &draft.draft_entropy,
                    &draft.draft_top_log_prob,
                ]
                .into_iter()
                .chain(&draft.draft_target_cross_entropy)
            });
            let all = std::iter::once(&row.response_target_log_prob).chain(draft);
            all.flatten().map(|number| f64::from(*number)).collect()
        };
        apart.check(&numbers(found), &numbers(expected)).with_context(|| expected.id.clone())?;
    }
    Ok(format!("{} responses of {num_tokens} tokens", expected.len()))
}

fn rollouts(found: &Path, expected: &Path, apart: &mut Apart) -> Result<String> {
    let [(found, _), (expected, _)] = [read_rollouts(found, None)?, read_rollouts(expected, None)?];
    ensure!(found.len() == expected.len(), "{} rows for {}", found.len(), expected.len());
    let mut num_candidates = 0;
    for (found, expected) in found.iter().zip(&expected) {
        let ids = |row: &RolloutRow| {
            (row.id.clone(), row.start, row.limit, row.candidates.candidate_ids.clone())
        };
        ensure!(ids(found) == ids(expected), "`{}` has other candidates", expected.id);
        num_candidates += expected.candidates.candidate_ids.len();
        let numbers = |row: &RolloutRow| -> Vec<f64> {
            let candidates = &row.candidates;
            let columns = [
                &candidates.candidate_prob,
                &candidates.confidence,
                &candidates.confidence_of_ten,
                &candidates.draft_entropy,
                &candidates.draft_log_prob,
                &candidates.target_log_prob,
            ];
            let columns = columns.into_iter().chain(&candidates.predicted_acceptance_prob);
            columns.flatten().copied().collect()
        };
        apart.check(&numbers(found), &numbers(expected)).with_context(|| expected.id.clone())?;
    }
    Ok(format!("{} rollouts of {num_candidates} candidates", expected.len()))
}

fn weights(found: &Path, expected: &Path, apart: &mut Apart) -> Result<String> {
    let (mut found, mut expected) =
        (WeightReader::open_file(found)?, WeightReader::open_file(expected)?);
    let names: Vec<String> = expected.names().map(str::to_owned).collect();
    ensure!(found.names().eq(names.iter().map(String::as_str)), "other tensors");
    let is_bf16 = expected.dtype().is_some_and(|dtype| dtype == "BF16");
    let (mut num_weights, mut num_rounded) = (0, 0);
    for name in &names {
        let shape = expected.shape(name).context("it was named")?.to_vec();
        if !expected.is_weights(name) {
            let len = shape.iter().product();
            let ids = |file: &mut WeightReader| file.take_ids(name, len, u32::MAX as usize);
            ensure!(ids(&mut found)? == ids(&mut expected)?, "`{name}` has other ids");
            continue;
        }
        let wide = |values: Vec<f32>| -> Vec<f64> { values.into_iter().map(f64::from).collect() };
        let (mut found, expected) =
            (wide(found.take(name, &shape)?), wide(expected.take(name, &shape)?));
        num_weights += expected.len();
        if is_bf16 {
            num_rounded += take_for_neighbours(&mut found, &expected);
        }
        apart.check(&found, &expected).with_context(|| name.clone())?;
    }
    ensure!(
        num_rounded * 100 <= num_weights,
        "{num_rounded} of {num_weights} weights are rounded otherwise"
    );
    Ok(format!("{} tensors of {num_weights} weights, {num_rounded} rounded otherwise", names.len()))
}

/// Replaces bf16 numbers that are neighbours of the expected ones by those, because a small difference may
/// round either way. Returns how many were replaced.
fn take_for_neighbours(found: &mut [f64], expected: &[f64]) -> usize {
    let mut num_taken = 0;
    for (found, expected) in found.iter_mut().zip(expected) {
        let step = found.abs().max(expected.abs()) / 128.0;
        if found != expected && (*found - expected).abs() <= step {
            *found = *expected;
            num_taken += 1;
        }
    }
    num_taken
}

/// The largest difference between numbers.
struct Apart {
    tolerance: f64,
    largest: f64,
}

impl Apart {
    fn check(&mut self, found: &[f64], expected: &[f64]) -> Result<()> {
        ensure!(found.len() == expected.len(), "{} numbers for {}", found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            // The same infinity, or NaN on both sides.
            if found == expected || (found.is_nan() && expected.is_nan()) {
                continue;
            }
            let apart = (found - expected).abs() / expected.abs().max(1.0);
            if apart.is_nan() || apart > self.tolerance {
                bail!("{found} for {expected}: {apart:.1e} apart, {:.0e} allowed", self.tolerance);
            }
            self.largest = self.largest.max(apart);
        }
        Ok(())
    }
}
