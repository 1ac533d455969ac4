//! The rows of an evaluation, stored in `results.json`.
//!
//! This file owns the rows, their order and their file. `results/group.rs` groups comparable rows.
//! `results/summary.rs` and `results/replay.rs` own the schemas of `summary.json` and
//! `replay.json`. The `evaluate` command fills in rows, and `table` and `report` show them.
//!
//! Undefined numbers, such as a rate over no tokens, are NaN or None in memory and `null` in files.

pub(crate) mod answers;
mod group;
mod heads;
mod replay;
mod serving;
mod summary;
#[cfg(test)]
mod tests;
mod verdict;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use draftsmith_files::{parse_json, read_file};
use draftsmith_theory::{
    Counts, Decoding, DrafterId, Round, Trace, expected_tokens_per_round, setting_text,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub(crate) use draftsmith_theory::{DecodingName, DrafterName, Estimate, Road, StopRuleName};
pub(crate) use group::{Group, groups};
pub use heads::{Algorithm2, CurvePoint, HeadOnSet, HeadRace, JudgedHead, SharedThreshold};
pub use replay::{
    HeadOverOnline, HeadPredictions, LogLosses, LookUps, OracleResult, Replay, ReplayGroup,
    ReplayRow, TextRange,
};
pub use serving::{DRAFTSMITH, ServingWay, fastest_ways, serving_text};
pub use summary::{
    CostSummary, DatasetSummary, EvaluationSummary, FilledBlock, FilledRow, FilledTable,
    GroupSummary, MAX_FOREIGN_LOAD, PromiseOutcome, PromiseSummary, RuleReads, Version,
    summary_to_json,
};
pub use verdict::{Conclusion, DeployAdvice, GroupVerdict, LEAST_PROMPTS, MeasuredSetting};

use crate::error::{ReportError, Result};
use crate::text::number;

/// The category of rows over all prompts of a dataset.
pub const ALL_CATEGORIES: &str = "all";

/// The maximum length of [`ResultRow::ctar`].
const CTAR_LEN: usize = 10;

/// The maximum length of [`ResultRow::acceptance_by_position`].
const NUM_POSITIONS: usize = 10;

/// The maximum length of [`ResultRow::unconditional_acceptance`].
const NUM_UNCONDITIONAL: usize = 30;

/// The minimum number of candidates or rounds from which a share is computed.
const MIN_JUDGED: usize = 20;

/// The cost of a forward of each drafter, in forwards of the target.
pub type CostRatios = BTreeMap<DrafterId, f64>;

/// A row of `results.json`: the results on a dataset and category under one setting.
///
/// Rates are relative to the number of tokens kept. Fields are in the order of the file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ResultRow {
    /// The prompt file's name without extension.
    pub dataset: String,
    /// The prompts' category, or [`ALL_CATEGORIES`].
    pub category: String,
    /// The drafter.
    pub drafter: DrafterName,
    /// The kind of the drafter, by which reports compare; null for the target alone.
    pub road: Option<Road>,
    /// The number of the drafter's own parameters, without those of the target; null for the target
    /// and for drafters that consist of others.
    #[serde(default)]
    pub num_parameters: Option<usize>,
    /// The stop rule.
    pub stop_rule: StopRuleName,
    /// The stop rule's parameter: the candidate length K, the heuristic's initial K, a threshold,
    /// or the minimum number of tokens that a draft forward must be worth. Null without a rule.
    #[serde(serialize_with = "integer_if_whole")]
    pub setting: Option<f64>,
    /// Whether `tune` chose the setting.
    pub is_tuned: bool,
    /// The way of decoding: greedy or sampled.
    pub decoding: DecodingName,
    /// The sampling temperature; 0 for greedy decoding.
    pub temperature: f64,
    /// The number of prompts.
    pub num_prompts: usize,
    /// The counts of tokens, forwards and candidates; in the file, columns such as `num_tokens`.
    #[serde(flatten)]
    pub counts: Counts,
    /// The number of target forwards per token.
    #[serde(deserialize_with = "nan_if_null")]
    pub verification_rate: f64,
    /// The number of discarded candidates per token.
    #[serde(deserialize_with = "nan_if_null")]
    pub discard_rate: f64,
    /// The number of tokens per target forward.
    #[serde(deserialize_with = "nan_if_null")]
    pub compression_rate: f64,
    /// The mean number of candidates per round.
    #[serde(deserialize_with = "nan_if_null")]
    pub draft_length: f64,
    /// The mean number of accepted candidates per round.
    #[serde(deserialize_with = "nan_if_null")]
    pub accepted_length: f64,
    /// The accepted share of the drafted candidates.
    #[serde(deserialize_with = "nan_if_null")]
    pub acceptance_rate: f64,
    /// The tokens per round, before any cut, if candidates were accepted independently. This is the
    /// mean of 1 + β + … + β^K over the rounds' lengths K, where β is the accepted share of the
    /// verified candidates (Leviathan et al., Eq. 1).
    #[serde(deserialize_with = "nan_if_null")]
    pub expected_tokens_per_round: f64,
    /// The mean number of tokens per round, before any cut.
    #[serde(deserialize_with = "nan_if_null")]
    pub tokens_per_round: f64,
    /// CTAR(w) for w = 1 to 10, the share of rounds with more than w tokens. Empty without rounds.
    pub ctar: Vec<f64>,
    /// The accepted share at each position of a round up to 10, among the candidates whose
    /// predecessors were all accepted. The list ends before the first position with fewer than 20
    /// such candidates.
    pub acceptance_by_position: Vec<f64>,
    /// The share of rounds whose first i candidates were all accepted, for i from 1 to 30, among
    /// the rounds with at least i candidates. In trees the candidates of the longest path count.
    /// The list ends before the first i with fewer than 20 rounds.
    pub unconditional_acceptance: Vec<f64>,
    /// The number of tokens kept per second of prefill and decoding.
    #[serde(deserialize_with = "nan_if_null")]
    pub tokens_per_second: f64,
    /// The value of `tokens_per_second` relative to plain decoding; null if that was not measured.
    pub speedup: Option<f64>,
    /// The speed-up by Spec-Bench's rule: the mean over prompts of tokens per second, relative to
    /// that of plain decoding.
    pub speedup_over_prompts: Option<f64>,
    /// The 95 % interval of `speedup_over_prompts`, bootstrapped over prompts.
    pub speedup_over_prompts_interval: Option<[f64; 2]>,
    /// The standard deviation of `speedup` over repeats; null without repeats.
    pub speedup_sd: Option<f64>,
    /// The speed over the first 32, 64, 128 and so on tokens of answers, if at least three answers
    /// are as long. Only in rows over all categories.
    #[serde(default)]
    pub by_length: Vec<SpeedAtLength>,
    /// The 95 % interval of `speedup`, bootstrapped over prompts.
    pub speedup_interval: Option<[f64; 2]>,
    /// The 95 % intervals of other rates over tokens, bootstrapped over the same prompts, by key:
    /// `tokens_per_second`, `compression_rate`, `speedup_at_paper_costs`, `improvement_by_size`,
    /// `improvement_by_time` and `improvement_at/NAME`.
    #[serde(default)]
    pub rate_intervals: BTreeMap<String, [f64; 2]>,
    /// The speed-up of these rounds at average costs over all settings, of draft forwards and of
    /// verifications by their number of rows. The times of both sides include the measured prefill.
    /// Null if nothing was timed.
    pub modelled_speedup: Option<f64>,
    /// The speed-up of these rounds at the SpecDec++ paper's costs of a 7B draft and a 70B target,
    /// where verified rows are free; without prefill. A forward of the largest separate draft costs
    /// the paper's 0.0234 s, of a smaller one its share of that by size, of another drafter its
    /// share of a target forward by size, and a look-up nothing. NaN if a size is unknown.
    #[serde(deserialize_with = "nan_if_null")]
    pub speedup_at_paper_costs: f64,
    /// The standardised improvement (CS-Drafting): tokens per forward, where a draft forward counts
    /// as the share of the target's parameters that it reads. Null if a share is unknown.
    pub improvement_by_size: Option<f64>,
    /// The standardised improvement where a draft forward counts as its time relative to a target
    /// forward of one row.
    pub improvement_by_time: Option<f64>,
    /// The standardised improvement at each set of the recipe's `evaluate.cost_ratios`, by the
    /// set's name.
    #[serde(default)]
    pub improvement_at: BTreeMap<String, Option<f64>>,
    /// Whether all tokens equal plain decoding's, except after forgiven ties. Null if not checked.
    pub lossless: Option<bool>,
    /// The number of prompts whose tokens first differ from plain decoding at a tie, a position
    /// where the logits of both tokens are the largest up to rounding.
    pub num_forgiven_ties: usize,
}

/// The speed over the first tokens of answers, including prefill (SVIP, Tables 2 and 6).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpeedAtLength {
    /// The number of first tokens of an answer.
    pub num_tokens: usize,
    /// The number of prompts whose answers are at least as long, both here and in plain decoding.
    pub num_answers: usize,
    /// The number of tokens per second.
    pub tokens_per_second: f64,
    /// The speed relative to plain decoding.
    pub speedup: f64,
    /// The 95 % interval of `speedup`, bootstrapped over prompts; null with few prompts.
    pub speedup_interval: Option<[f64; 2]>,
}

impl ResultRow {
    /// Builds a row from the merged `trace` of its prompts, without a drafter, a rule or a
    /// comparison. The caller fills in the prompts, the speed-ups, and the drafter and rule if there
    /// are any.
    pub fn of(trace: &Trace, decoding: &Decoding) -> Self {
        let counts = trace.counts();
        let ctar = (1..=CTAR_LEN).map(|num_tokens| trace.ctar(num_tokens));
        Self {
            category: ALL_CATEGORIES.to_owned(),
            decoding: DecodingName::of(decoding),
            temperature: decoding.sampling().temperature,
            counts,
            verification_rate: counts.verification_rate(),
            discard_rate: counts.discard_rate(),
            compression_rate: counts.compression_rate(),
            draft_length: counts.num_drafted as f64 / counts.num_target_forwards as f64,
            accepted_length: counts.num_accepted as f64 / counts.num_target_forwards as f64,
            acceptance_rate: counts.acceptance_rate(),
            expected_tokens_per_round: expected_tokens(trace),
            tokens_per_round: 1.0 + counts.num_accepted as f64 / counts.num_target_forwards as f64,
            ctar: if trace.rounds.is_empty() { Vec::new() } else { ctar.collect() },
            acceptance_by_position: acceptance_by_position(trace),
            unconditional_acceptance: unconditional_acceptance(trace),
            tokens_per_second: tokens_per_second(trace),
            ..Self::default()
        }
    }

    /// Labels the drafter and its setting, such as `target alone`, `K = 6` or `exit1, confidence 0.6`.
    pub fn label(&self) -> String {
        match self.drafter.prefix() {
            Some(prefix) => format!("{prefix}, {}", self.rule_label()),
            None => self.rule_label(),
        }
    }

    /// Labels the setting without the drafter.
    pub fn rule_label(&self) -> String {
        self.stop_rule.label(self.setting)
    }

    /// Formats the 95 % interval of the speed-up, such as `2.29..2.50`; `-` without one.
    pub(crate) fn speedup_range(&self) -> String {
        let ends = self.speedup_interval.map(|ends| ends.map(|end| number(end, 2)));
        ends.map_or_else(|| "-".into(), |[low, high]| format!("{low}..{high}"))
    }

    /// Formats only the setting's number, such as `6` or `0.7`; `?` if there is none.
    pub(crate) fn setting_text(&self) -> String {
        setting_text(self.setting)
    }

    /// Returns whether the row covers all prompts of its dataset.
    pub(crate) fn is_pooled(&self) -> bool {
        self.category == ALL_CATEGORIES
    }

    /// Returns whether the row has the same drafter and setting as `other`.
    fn same_setting(&self, other: &Self) -> bool {
        (self.drafter, self.stop_rule, self.setting)
            == (other.drafter, other.stop_rule, other.setting)
    }
}

/// Returns the time of prefill and decoding, which a user waits for.
pub fn waiting_time(trace: &Trace) -> Duration {
    trace.prefill_time + trace.decode_time()
}

/// Computes the tokens kept per second of [`waiting_time`]. NaN if both are 0.
pub fn tokens_per_second(trace: &Trace) -> f64 {
    trace.num_tokens as f64 / waiting_time(trace).as_secs_f64()
}

/// Computes the accepted share at each position of a round, among the candidates whose predecessors
/// were all accepted. Later candidates are discarded without being judged.
pub fn acceptance_by_position(trace: &Trace) -> Vec<f64> {
    let is_judged = |round: &Round, position: usize| {
        round.depth >= position && round.num_accepted >= position - 1
    };
    accepted_shares(trace, NUM_POSITIONS, is_judged)
}

/// Computes, for each position of a round, the share of the rounds with that many candidates in
/// which the candidate and all before it were accepted (CS-Drafting, Figure 2).
fn unconditional_acceptance(trace: &Trace) -> Vec<f64> {
    accepted_shares(trace, NUM_UNCONDITIONAL, |round, position| round.depth >= position)
}

/// Computes, for each position, the share of accepted candidates among the rounds for which
/// `counts(round, position)` holds. Stops at the first position with fewer than [`MIN_JUDGED`] such
/// rounds.
fn accepted_shares(
    trace: &Trace,
    num_positions: usize,
    counts: impl Fn(&Round, usize) -> bool,
) -> Vec<f64> {
    let share = |position: usize| {
        let rounds: Vec<&Round> =
            trace.rounds.iter().filter(|round| counts(round, position)).collect();
        let num_accepted = rounds.iter().filter(|round| round.num_accepted >= position).count();
        (rounds.len() >= MIN_JUDGED).then(|| num_accepted as f64 / rounds.len() as f64)
    };
    (1..=num_positions).map_while(share).collect()
}

fn expected_tokens(trace: &Trace) -> f64 {
    let rounds = || trace.rounds.iter();
    let num_accepted: usize = rounds().map(|round| round.num_accepted).sum();
    let num_rejected = rounds().filter(|round| round.num_accepted < round.depth).count();
    let acceptance = num_accepted as f64 / (num_accepted + num_rejected).max(1) as f64;
    let expected: f64 =
        rounds().map(|round| expected_tokens_per_round(acceptance, round.depth)).sum();
    expected / trace.rounds.len() as f64
}

/// Sorts rows for display: by dataset in order of appearance, greedy before sampled decoding, all
/// prompts before categories in order of appearance, then by drafter, stop rule and setting. The
/// sort is stable.
pub fn sort_rows(rows: &mut [ResultRow]) {
    let datasets = in_order(rows.iter().map(|row| row.dataset.clone()));
    let categories = in_order(rows.iter().map(|row| row.category.clone()));
    let place =
        |names: &[String], name: &str| names.iter().position(|known| known == name).unwrap_or(0);
    let setting = |row: &ResultRow| row.setting.unwrap_or(f64::NEG_INFINITY);
    rows.sort_by(|a, b| {
        (place(&datasets, &a.dataset).cmp(&place(&datasets, &b.dataset)))
            .then(a.decoding.cmp(&b.decoding))
            .then(a.temperature.total_cmp(&b.temperature))
            .then(b.is_pooled().cmp(&a.is_pooled()))
            .then(place(&categories, &a.category).cmp(&place(&categories, &b.category)))
            .then(a.drafter.cmp(&b.drafter))
            .then(a.stop_rule.cmp(&b.stop_rule))
            .then(setting(a).total_cmp(&setting(b)))
    });
}

/// Returns the distinct names, in order of appearance.
pub fn in_order<T: PartialEq>(names: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    distinct
}

/// Formats rows as `results.json`, a JSON list with one row per line.
///
/// # Errors
/// Never in practice, because rows are always valid JSON.
pub fn results_to_json(rows: &[ResultRow]) -> Result<String> {
    let lines: Vec<String> = rows.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    Ok(format!("[\n{}\n]\n", lines.join(",\n")))
}

/// Reads a `results.json`.
///
/// # Errors
/// If the file cannot be read, or is not a list of rows.
pub fn read_results(path: &Path) -> Result<Vec<ResultRow>> {
    parse_json(path, &read_file(path)?)
        .map_err(|source| ReportError::NotRows { path: path.to_path_buf(), source })
}

/// Writes 6 instead of 6.0.
fn integer_if_whole<S: Serializer>(
    setting: &Option<f64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match setting {
        // An f64 holds whole numbers exactly only up to 2^53.
        Some(whole) if whole.fract() == 0.0 && whole.abs() < 9e15 => {
            serializer.serialize_i64(*whole as i64)
        }
        setting => setting.serialize(serializer),
    }
}

/// Reads a number that serde_json wrote as `null` because it was not finite.
fn nan_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}
