//! `costs --server`: times a running server's rounds, and adds them to a file.
//!
//! A running server uses one number of candidates, or none. So each run of the command adds one
//! column to the table, with the round times by batch size. Blocks of rounds are measured in random
//! order. Before and after each block we time a sentinel: a round with one request on a reference
//! server without speculation on the same machine, or else the smallest batch of the server itself.
//! Times are divided by the sentinel's drift, and a block with too much drift is repeated. On a
//! machine whose speed changes, only the reference server makes times from different runs
//! comparable.

mod timing;

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use draftsmith_files::{if_present, parse_json, read_bytes, write_json};
use draftsmith_recipe::Watch;
use draftsmith_report::median_of;
use draftsmith_theory::{SeededDraws, ServerCell, ServerCosts};
use serde::{Deserialize, Serialize};

use self::timing::speculation_name;

pub use self::timing::{SERVER_FLAGS, SpeculationCounters, TimedRounds, TimedServer};
pub(crate) use self::timing::{accepted_by_position, metric};

/// The maximum relative change of the sentinel during a block.
const MOST_DRIFT: f64 = 0.1;
/// The maximum number of times that a block is repeated because of drift.
const MOST_AGAIN: usize = 3;
/// How to start each server so that it accepts no candidate.
pub const ACCEPT_NOTHING: &str = "llama.cpp: `--spec-synth-rates 0,0,…`, vLLM: `\"rejection_sample_method\": \"synthetic\", \
                                  \"synthetic_acceptance_rates\": [0, 0, …]`, SGLang: `SGLANG_SIMULATE_ACC_LEN=1.0`";

/// The maximum tokens per round for which a round's time equals the time between two tokens.
const MOST_TOKENS_PER_ROUND: f64 = 1.02;
/// The allowed relative difference between the server's and the given number of candidates. The
/// last rounds of a request draft fewer candidates.
const MOST_FEWER_CANDIDATES: f64 = 0.1;

/// The ratio of a cell's slowest to its fastest block above which we warn of an unsteady machine.
const MOST_SPREAD: f64 = 1.2;

/// The plan of the measurement.
#[derive(Debug, Clone)]
pub struct ServerPlan {
    /// The number of candidates with which the server runs; 0 without speculation.
    pub num_candidates: usize,
    /// The batch sizes (numbers of concurrent requests), in ascending order.
    pub concurrency: Vec<usize>,
    /// The name of the drafter that the server runs, if given.
    pub drafter: Option<String>,
    /// The number of words in a prompt.
    pub num_words: usize,
    /// The number of rounds in a block.
    pub num_rounds: usize,
    /// The number of blocks for each batch size.
    pub num_blocks: usize,
    /// The seed of prompts and of the order of blocks.
    pub seed: u64,
}

/// The file with a server's round times.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerCostsFile {
    /// The model's name on the server.
    pub model: String,
    /// The name of the drafter whose rounds were measured; null if it was not given.
    pub drafter: Option<String>,
    /// The number of words in a prompt.
    pub num_words: usize,
    /// The first round time of the reference server without speculation, in milliseconds, to which
    /// all times are scaled. Null without a reference server.
    pub sentinel_ms: Option<f64>,
    /// The cells of the table of round times.
    pub cells: Vec<MeasuredCell>,
}

/// The round times for one batch size and number of candidates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredCell {
    /// The batch size: the number of concurrent requests.
    #[serde(alias = "batch_size")]
    pub concurrency: usize,
    /// The number of candidates per round and request; 0 without speculation.
    pub num_candidates: usize,
    /// The median round time of each block in milliseconds, corrected for drift.
    pub block_ms: Vec<f64>,
    /// The prefill time per prompt token in each block, in milliseconds; empty if lengths are
    /// unknown.
    #[serde(default)]
    pub prompt_token_ms: Vec<f64>,
    /// The tokens per round by the server's counters, which should be 1; null without counters.
    pub tokens_per_round: Option<f64>,
}

impl MeasuredCell {
    /// Returns the number of candidates and the batch size, which identify the cell.
    fn key(&self) -> (usize, usize) {
        (self.num_candidates, self.concurrency)
    }

    /// Returns the median of the blocks in milliseconds; NaN without blocks.
    pub fn median_ms(&self) -> f64 {
        median_of(self.block_ms.iter().copied()).unwrap_or(f64::NAN)
    }
}

impl ServerCostsFile {
    /// Reads the file, or returns an empty table if it does not exist.
    ///
    /// # Errors
    /// If the file exists but cannot be read.
    pub fn read_or_new(path: &Path) -> Result<Self> {
        let text = if_present(read_bytes(path));
        let text = text.with_context(|| format!("cannot read `{}`", path.display()))?;
        let Some(text) = text else { return Ok(Self::default()) };
        parse_json(path, &text).with_context(|| {
            format!(
                "`{}` is not a file of server costs; hint: give another name, or write it with `draftsmith server costs`",
                path.display()
            )
        })
    }

    /// Reads the measured round times, and the name of their drafter if the file has it.
    ///
    /// # Errors
    /// If the file is missing or invalid, or has no cell without speculation.
    pub fn read(path: &Path) -> Result<(ServerCosts, Option<String>)> {
        ensure!(
            path.is_file(),
            "there is no file `{}`; hint: `draftsmith server costs --server URL` measures one",
            path.display()
        );
        let cell = |cell: MeasuredCell| ServerCell {
            batch_size: cell.concurrency,
            num_candidates: cell.num_candidates,
            block_seconds: cell.block_ms.iter().map(|ms| ms / 1e3).collect(),
            prompt_token_seconds: median_of(cell.prompt_token_ms).unwrap_or(0.0) / 1e3,
        };
        let Self { cells, drafter, .. } = Self::read_or_new(path)?;
        let costs = ServerCosts::new(cells.into_iter().map(cell).collect());
        Ok((costs.with_context(|| format!("costs `{}`", path.display()))?, drafter))
    }

    /// Returns the cell of this batch size and number of candidates; `None` if it was not measured.
    pub fn cell(&self, concurrency: usize, num_candidates: usize) -> Option<&MeasuredCell> {
        self.cells.iter().find(|cell| cell.key() == (num_candidates, concurrency))
    }

    /// Adds a cell's blocks to the cell with the same batch size and number of candidates.
    fn add(&mut self, measured: MeasuredCell) {
        let Some(cell) = self.cells.iter_mut().find(|cell| cell.key() == measured.key()) else {
            return self.cells.push(measured);
        };
        cell.block_ms.extend(measured.block_ms);
        cell.prompt_token_ms.extend(measured.prompt_token_ms);
        cell.tokens_per_round = measured.tokens_per_round.or(cell.tokens_per_round);
    }

    /// Describes the cell whose blocks differ most, if they differ by more than [`MOST_SPREAD`].
    fn unsteady(&self, num_candidates: usize) -> Option<String> {
        let spread = |cell: &MeasuredCell| {
            let least = cell.block_ms.iter().copied().reduce(f64::min)?;
            let most = cell.block_ms.iter().copied().reduce(f64::max)?;
            Some((most / least, cell.concurrency, least, most))
        };
        let cells = self.cells.iter().filter(|cell| cell.num_candidates == num_candidates);
        let worst = cells.filter_map(spread).max_by(|one, other| one.0.total_cmp(&other.0));
        let (_, concurrency, least, most) = worst.filter(|worst| worst.0 > MOST_SPREAD)?;
        Some(format!(
            "costs: the machine is unsteady: a round of {concurrency} requests took {least:.1} to {most:.1} ms in different \
             blocks; hint: leave it idle, give a server on a CPU fewer threads than there are CPUs (two may share a \
             core), or measure more `--blocks`"
        ))
    }

    /// Checks that the file is for the same model, drafter and prompts as a measurement. An empty file
    /// takes them over.
    ///
    /// # Errors
    /// If it is not.
    fn check(&mut self, server: &TimedServer, plan: &ServerPlan, path: &Path) -> Result<()> {
        if self.cells.is_empty() {
            (self.model, self.num_words) = (server.model.clone(), plan.num_words);
        }
        let speculates = plan.num_candidates > 0;
        if speculates && self.cells.iter().all(|cell| cell.num_candidates == 0) {
            self.drafter.clone_from(&plan.drafter);
        }
        let drafter = if speculates { &plan.drafter } else { &self.drafter };
        if (&self.model, self.num_words, &self.drafter) != (&server.model, plan.num_words, drafter)
        {
            let of = |drafter: &Option<String>| {
                drafter.as_ref().map(|it| format!(" with `{it}`")).unwrap_or_default()
            };
            bail!(
                "`{}` has costs of the model `{}`{} with prompts of {} words, but the server has `{}`{} and prompts have {}; \
                 hint: give another file with `--out`, or another `--prompt-words`",
                path.display(),
                self.model,
                of(&self.drafter),
                self.num_words,
                server.model,
                of(drafter),
                plan.num_words
            );
        }
        Ok(())
    }
}

/// Measures the cells of the plan that the file lacks, and writes the file after each pass over the
/// batch sizes. `beside` is a reference server of the same model without speculation.
///
/// # Errors
/// If a server fails, accepts candidates, or uses another number of candidates than planned. Also
/// if the file is for another model, or only one of the file and this run uses a reference server.
pub fn measure_server(
    server: &TimedServer,
    beside: Option<&TimedServer>,
    plan: &ServerPlan,
    path: &Path,
    watch: &dyn Watch,
) -> Result<ServerCostsFile> {
    let mut file = ServerCostsFile::read_or_new(path)?;
    file.check(server, plan, path)?;
    if !file.cells.is_empty() && file.sentinel_ms.is_some() != beside.is_some() {
        let (had, hint) = match beside {
            None => ("with", "give `--reference URL`"),
            Some(_) => ("without", "leave out `--reference`"),
        };
        bail!(
            "`{}` was measured {had} a server without speculation beside; hint: {hint}, or give another file with `--out`",
            path.display()
        );
    }
    let first_sentinel = file.sentinel_ms;
    let mut measuring = Measuring { server, beside, plan, watch, first_sentinel, num_asked: 0 };
    let left = |file: &ServerCostsFile, size: &usize| {
        let measured = file.cell(*size, plan.num_candidates);
        plan.num_blocks.saturating_sub(measured.map_or(0, |cell| cell.block_ms.len()))
    };
    let num_left: usize = plan.concurrency.iter().map(|size| left(&file, size)).sum();
    let progress = watch.bar("costs", "blocks", num_left as u64);
    if num_left > 0 {
        watch.note(format!(
            "costs: {num_left} blocks of {} rounds, {} candidates",
            plan.num_rounds, plan.num_candidates
        ));
        measuring.check_candidates()?;
    }
    let mut draws = SeededDraws::new(plan.seed, &["server costs"]);
    loop {
        let mut sizes = plan.concurrency.clone();
        sizes.retain(|size| left(&file, size) > 0);
        if sizes.is_empty() {
            break;
        }
        draws.shuffle(&mut sizes);
        let blocks = measuring.pass(&sizes).map_err(|error| match file.cells.is_empty() {
            true => error,
            false => error.context(format!(
                "cells in `{}` are kept; the same command measures the others",
                path.display()
            )),
        })?;
        for block in blocks {
            file.sentinel_ms = beside.and(measuring.first_sentinel);
            file.add(block);
            progress.advance(1.0);
        }
        write_json(path, &file)?;
    }
    progress.finish();
    file.cells.sort_by_key(MeasuredCell::key);
    write_json(path, &file)?;
    if let Some(unsteady) = file.unsteady(plan.num_candidates) {
        watch.note(unsteady);
    }
    Ok(file)
}

struct Measuring<'a> {
    server: &'a TimedServer,
    beside: Option<&'a TimedServer>,
    plan: &'a ServerPlan,
    watch: &'a dyn Watch,
    /// The first time of the sentinel, in milliseconds.
    first_sentinel: Option<f64>,
    /// The number of prompts so far, so that all prompts differ.
    num_asked: usize,
}

impl Measuring<'_> {
    /// Checks by the server's counters that it drafts the planned number of candidates.
    fn check_candidates(&mut self) -> Result<()> {
        let before = self.server.counters()?;
        self.block(self.plan.concurrency[0])?;
        let Some(counted) = since(self.server.counters()?, before)? else {
            return self.note_unchecked();
        };
        let wanted = self.plan.num_candidates as f64;
        let found = match counted.num_rounds {
            Some(rounds) if rounds > 0.0 => counted.num_drafted / rounds,
            Some(_) => 0.0,
            None if counted.num_drafted == 0.0 => 0.0,
            // Without rounds, the number of candidates is not known, but that the server drafts is.
            None if wanted > 0.0 => {
                self.watch.note(
                    "costs: the server does not count its rounds, so that it drafts as many candidates as `--candidates` \
                     says is not checked",
                );
                return Ok(());
            }
            None => counted.num_drafted / self.num_rounds(self.plan.concurrency[0]),
        };
        ensure!(
            (found - wanted).abs() <= MOST_FEWER_CANDIDATES * wanted.max(1.0),
            "the server drafts {found:.1} candidates per round, but `--candidates` is {wanted}; hint: start it \
             with that many, or give its number"
        );
        Ok(())
    }

    /// Says what cannot be checked of a server without readable counters of speculation.
    ///
    /// # Errors
    /// If the server should speculate, and nothing shows that it does.
    fn note_unchecked(&self) -> Result<()> {
        let (page, num_candidates) = (self.server.metrics()?.concat(), self.plan.num_candidates);
        let why = match speculation_name(&page) {
            Some(name) => format!("the server's counter `{name}` cannot be read"),
            None if page.contains("sglang:") => "SGLang counts no candidates".to_owned(),
            None if num_candidates > 0 => bail!(
                "the server shows no counters of speculation, but `--candidates` is {num_candidates}; hint: start \
                 llama-server with `--metrics` and SGLang with `--enable-metrics`, and check that the server speculates"
            ),
            None if page.is_empty() => {
                "the server shows no metrics (llama-server needs `--metrics`)".to_owned()
            }
            None => return Ok(()),
        };
        self.watch.note(format!(
            "costs: {why}, so it is not checked that it drafts {num_candidates} candidates and accepts none"
        ));
        Ok(())
    }

    /// Times a block for each batch size, corrected for the sentinel's drift.
    fn pass(&mut self, sizes: &[usize]) -> Result<Vec<MeasuredCell>> {
        let mut before = self.sentinel()?;
        let first = *self.first_sentinel.get_or_insert(before);
        let mut blocks = Vec::new();
        for size in sizes {
            for again in 0.. {
                let mut block = self.block(*size)?;
                let after = self.sentinel()?;
                let drift = (before + after) / 2.0 / first;
                let is_steady = (after / before - 1.0).abs() <= MOST_DRIFT;
                before = after;
                if is_steady || again == MOST_AGAIN {
                    let times = block.block_ms.iter_mut().chain(&mut block.prompt_token_ms);
                    times.for_each(|ms| *ms /= drift);
                    blocks.push(block);
                    break;
                }
            }
        }
        Ok(blocks)
    }

    fn sentinel(&mut self) -> Result<f64> {
        let Some(beside) = self.beside else {
            return Ok(self.block(self.plan.concurrency[0])?.median_ms());
        };
        let prompt = self.prompt();
        Ok(1e3 * beside.time_rounds(&[prompt], self.plan.num_rounds + 1)?.round)
    }

    /// Times one block at this batch size.
    fn block(&mut self, concurrency: usize) -> Result<MeasuredCell> {
        self.watch.check_interrupted()?;
        let prompts: Vec<String> = (0..concurrency).map(|_| self.prompt()).collect();
        let before = self.server.counters()?;
        let timed = self.server.time_rounds(&prompts, self.plan.num_rounds + 1)?;
        let counted = since(self.server.counters()?, before)?;
        let rounds =
            |it: &SpeculationCounters| it.num_rounds.unwrap_or(self.num_rounds(concurrency));
        let tokens = counted.filter(|it| rounds(it) > 0.0);
        let tokens = tokens.map(|it| 1.0 + it.num_accepted / rounds(&it));
        if let Some(tokens) = tokens.filter(|tokens| *tokens > MOST_TOKENS_PER_ROUND) {
            bail!(
                "the server accepted candidates: {tokens:.2} tokens per round, but rounds are timed at 1; hint: start it \
                 with an acceptance of 0 ({ACCEPT_NOTHING}), or with an untrained drafter"
            );
        }
        let prompt_token_ms = timed.prompt_tokens.map(|num| 1e3 * timed.prompt / num);
        Ok(MeasuredCell {
            concurrency,
            num_candidates: self.plan.num_candidates,
            block_ms: vec![1e3 * timed.round],
            prompt_token_ms: prompt_token_ms.into_iter().collect(),
            tokens_per_round: tokens,
        })
    }

    /// Returns the number of rounds of all requests in a block.
    fn num_rounds(&self, concurrency: usize) -> f64 {
        (self.plan.num_rounds * concurrency) as f64
    }

    /// Draws a prompt whose beginning no other prompt shares.
    fn prompt(&mut self) -> String {
        self.num_asked += 1;
        let number = self.num_asked.to_string();
        let mut draws = SeededDraws::new(self.plan.seed, &["prompt", &number]);
        let word = |_| WORDS[(draws.uniform() * WORDS.len() as f64) as usize];
        (0..self.plan.num_words).map(word).collect::<Vec<_>>().join(" ")
    }
}

/// Returns the increase of a server's counters since `before`; `None` if it has no counters.
fn since(
    now: Option<SpeculationCounters>,
    before: Option<SpeculationCounters>,
) -> Result<Option<SpeculationCounters>> {
    let Some((now, before)) = now.zip(before) else { return Ok(None) };
    let counted = now.since(&before);
    counted.map(Some).context(
        "the server's counters fell, so it was started again; hint: run the same command again",
    )
}

const WORDS: [&str; 16] = [
    "river", "stone", "lantern", "market", "winter", "engine", "garden", "paper", "signal",
    "harbour", "copper", "bridge", "window", "field", "letter", "orchard",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unequal_blocks_are_said() {
        let cell = |concurrency, num_candidates, block_ms: &[f64]| MeasuredCell {
            concurrency,
            num_candidates,
            block_ms: block_ms.to_vec(),
            prompt_token_ms: Vec::new(),
            tokens_per_round: None,
        };
        let file = ServerCostsFile {
            cells: vec![
                cell(1, 0, &[10.0, 11.9]),
                cell(1, 2, &[10.0, 12.5]),
                cell(4, 2, &[20.0, 31.0, 24.0]),
                cell(8, 2, &[30.0]),
                cell(16, 2, &[]),
            ],
            ..ServerCostsFile::default()
        };
        assert_eq!(file.unsteady(0), None);
        let said = file.unsteady(2).expect("two cells are unsteady");
        assert!(said.contains("4 requests took 20.0 to 31.0 ms"), "{said}");
    }
}
