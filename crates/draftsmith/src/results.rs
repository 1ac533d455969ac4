//! The numbers an evaluation leaves behind: `results.json`, a list of rows, and `summary.json`,
//! what the rows were measured with.
//!
//! This file owns the rows: their schema, their order and their reading and writing as text.
//! `results/group.rs` groups the rows that may be compared, and `results/summary.rs` owns the other
//! schema. The rates come from the theory crate's `Counts`. The `evaluate` command decodes and decides
//! where files go; `table` and `report` show these rows.
//!
//! A number that does not exist (a rate of no tokens, a speed-up over nothing) is NaN or None in
//! memory and `null` in the file, never NaN, which is not JSON.

pub(crate) mod answers;
mod group;
mod replay;
mod summary;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use draftsmith_files::parse_json;
use draftsmith_theory::{Counts, Decoding, DrafterId, Sampling, TokenChoice, Trace, setting_text};
use serde::{Deserialize, Serialize, Serializer};

pub(crate) use draftsmith_theory::StopRuleName;
pub(crate) use group::{Group, Standing, groups};
pub(crate) use replay::{
    FittedCalibration, HeadPredictions, JudgedHead, Replay, ReplayGroup, ReplayRow, ReplayedTree,
};
pub(crate) use summary::{
    CostSummary, DatasetSummary, EvaluationSummary, GroupSummary, ModelSummary, PromiseSummary,
    Version, summary_to_json,
};

pub(crate) use crate::names::{CostSource, DecodingName, DrafterName, Road, rule_label};
pub(crate) use crate::statistics::Estimate;

/// The category of the rows that pool all prompts of a dataset.
pub(crate) const ALL_CATEGORIES: &str = "all";

/// How many entries `ctar` has.
const CTAR_LEN: usize = 10;

/// How many entries `acceptance_by_position` has at most.
const NUM_POSITIONS: usize = 10;

/// How many entries `unconditional_acceptance` has at most.
const NUM_UNCONDITIONAL: usize = 30;

/// A share of fewer candidates or rounds than this is noise.
const MIN_JUDGED: usize = 20;

/// What a forward of a drafter costs, in forwards of the target.
pub(crate) type CostRatios = BTreeMap<DrafterId, f64>;

/// One dataset and category under one setting and one way of decoding: a row of `results.json`.
///
/// All rates are of the tokens kept. The fields stand in the file's order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ResultRow {
    /// The prompt file's name, without its extension.
    pub(crate) dataset: String,
    /// The prompts' category, or [`ALL_CATEGORIES`].
    pub(crate) category: String,
    /// What proposes candidates.
    pub(crate) drafter: DrafterName,
    /// What ends a draft phase.
    pub(crate) stop_rule: StopRuleName,
    /// The stop rule's number: K, the heuristic's first K, a threshold, or the least worth of a
    /// draft forward in tokens; null without a rule.
    #[serde(serialize_with = "integer_if_whole")]
    pub(crate) setting: Option<f64>,
    /// How tokens are chosen.
    pub(crate) decoding: DecodingName,
    /// Sampling temperature; 0 for greedy decoding.
    pub(crate) temperature: f64,
    /// Prompts answered.
    pub(crate) num_prompts: usize,
    /// N: new tokens kept.
    pub(crate) num_tokens: usize,
    /// N_target: target forwards.
    pub(crate) num_target_forwards: usize,
    /// N_draft: draft forwards.
    pub(crate) num_draft_forwards: usize,
    /// Candidates drafted.
    pub(crate) num_drafted: usize,
    /// Candidates accepted.
    pub(crate) num_accepted: usize,
    /// N_discarded: candidates rejected, and tokens cut at the end of the text.
    pub(crate) num_discarded: usize,
    /// Target forwards a token.
    #[serde(with = "finite_or_null")]
    pub(crate) verification_rate: f64,
    /// Discarded candidates a token.
    #[serde(with = "finite_or_null")]
    pub(crate) discard_rate: f64,
    /// Tokens a target forward.
    #[serde(with = "finite_or_null")]
    pub(crate) compression_rate: f64,
    /// CTAR: the w-th entry, counted from 1, is the share of rounds that yield more than w tokens,
    /// w = 1 to 10. Empty without rounds.
    pub(crate) ctar: Vec<f64>,
    /// The i-th entry, counted from 1, is the share accepted of the candidates drafted at position
    /// i of their round whose predecessors were all accepted, i = 1 to 10; it ends before the first
    /// position where fewer than 20 such candidates were judged. Empty in files older than the
    /// column.
    #[serde(default)]
    pub(crate) acceptance_by_position: Vec<f64>,
    /// The i-th entry, counted from 1, is the share of the rounds that drafted i candidates or more in
    /// which the first i were accepted, i = 1 to 30; of a tree, those on its longest path. It ends
    /// before the first position of fewer than 20 rounds. Empty in files older than the column.
    #[serde(default)]
    pub(crate) unconditional_acceptance: Vec<f64>,
    /// Tokens kept over the time of prefill and of all rounds.
    #[serde(with = "finite_or_null")]
    pub(crate) tokens_per_second: f64,
    /// `tokens_per_second` over that of the target decoding alone; null where that was not
    /// measured.
    #[serde(serialize_with = "finite_or_null::serialize_option")]
    pub(crate) speedup: Option<f64>,
    /// Its 95 % interval, bootstrapped over prompts; null where there is none, and in files older
    /// than the column.
    #[serde(default)]
    pub(crate) speedup_interval: Option<[f64; 2]>,
    /// The speed-up that these rounds would have at average costs: of draft forwards and of
    /// verifications of so many rows, over all settings together. The measured prefill is added on
    /// both sides, since costs are of rounds only; null where nothing was timed.
    #[serde(serialize_with = "finite_or_null::serialize_option")]
    pub(crate) modelled_speedup: Option<f64>,
    /// The standardised improvement over the target alone (CS-Drafting): tokens over forwards, each of
    /// a drafter's counted as the share of the target's parameters that it reads; null where one's is
    /// not known, and in files older than the column.
    #[serde(default, serialize_with = "finite_or_null::serialize_option")]
    pub(crate) improvement_by_size: Option<f64>,
    /// The same, each of a drafter's counted as its time here over that of a target forward of one row.
    #[serde(default, serialize_with = "finite_or_null::serialize_option")]
    pub(crate) improvement_by_time: Option<f64>,
    /// Whether the tokens are the target's own, token for token, but for forgiven ties; null only
    /// where it was not checked.
    pub(crate) lossless: Option<bool>,
    /// Prompts whose tokens are the target's own up to where its most probable tokens are equal but
    /// for rounding, of which it took the other; 0 in files older than the column.
    #[serde(default)]
    pub(crate) num_forgiven_ties: usize,
}

/// What a row says besides what its trace says.
#[derive(Debug, Clone)]
pub(crate) struct RowContext {
    /// See [`ResultRow::dataset`].
    pub(crate) dataset: String,
    /// See [`ResultRow::category`].
    pub(crate) category: String,
    /// See [`ResultRow::drafter`].
    pub(crate) drafter: DrafterName,
    /// See [`ResultRow::stop_rule`].
    pub(crate) stop_rule: StopRuleName,
    /// See [`ResultRow::setting`].
    pub(crate) setting: Option<f64>,
    /// How tokens were chosen.
    pub(crate) decoding: Decoding,
    /// See [`ResultRow::num_prompts`].
    pub(crate) num_prompts: usize,
    /// The target alone on the same prompts; None if it was not run. Its own row names its own
    /// speed: speed-up 1.
    pub(crate) plain_tokens_per_second: Option<f64>,
    /// See [`ResultRow::speedup_interval`].
    pub(crate) speedup_interval: Option<[f64; 2]>,
    /// See [`ResultRow::modelled_speedup`].
    pub(crate) modelled_speedup: Option<f64>,
    /// What forwards of the drafters cost by size.
    pub(crate) cost_by_size: CostRatios,
    /// And by time.
    pub(crate) cost_by_time: CostRatios,
    /// See [`ResultRow::lossless`].
    pub(crate) lossless: Option<bool>,
    /// See [`ResultRow::num_forgiven_ties`].
    pub(crate) num_forgiven_ties: usize,
}

impl ResultRow {
    /// The row of the pooled `trace` of all its prompts.
    pub(crate) fn new(context: RowContext, trace: &Trace) -> Self {
        let counts = trace.counts();
        let tokens_per_second = tokens_per_second(trace);
        let speedup = context.plain_tokens_per_second.map(|plain| tokens_per_second / plain);
        let improvement =
            |ratios: &CostRatios| trace.standard_improvement(|id| ratios.get(&id).copied());
        let ctar = (1..=CTAR_LEN).map(|num_tokens| trace.ctar(num_tokens));
        Self {
            dataset: context.dataset,
            category: context.category,
            drafter: context.drafter,
            stop_rule: context.stop_rule,
            setting: context.setting,
            decoding: DecodingName::of(&context.decoding),
            temperature: temperature(&context.decoding),
            num_prompts: context.num_prompts,
            num_tokens: counts.num_tokens,
            num_target_forwards: counts.num_target_forwards,
            num_draft_forwards: counts.num_draft_forwards,
            num_drafted: counts.num_drafted,
            num_accepted: counts.num_accepted,
            num_discarded: counts.num_discarded,
            verification_rate: counts.verification_rate(),
            discard_rate: counts.discard_rate(),
            compression_rate: counts.compression_rate(),
            ctar: if trace.rounds.is_empty() { Vec::new() } else { ctar.collect() },
            acceptance_by_position: acceptance_by_position(trace),
            unconditional_acceptance: unconditional_acceptance(trace),
            tokens_per_second,
            speedup: speedup.filter(|speedup| speedup.is_finite()),
            speedup_interval: context
                .speedup_interval
                .filter(|ends| ends.iter().all(|end| end.is_finite())),
            modelled_speedup: context.modelled_speedup.filter(|speedup| speedup.is_finite()),
            improvement_by_size: improvement(&context.cost_by_size),
            improvement_by_time: improvement(&context.cost_by_time),
            lossless: context.lossless,
            num_forgiven_ties: context.num_forgiven_ties,
        }
    }

    /// The counts the rates were made of.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            num_tokens: self.num_tokens,
            num_target_forwards: self.num_target_forwards,
            num_draft_forwards: self.num_draft_forwards,
            num_drafted: self.num_drafted,
            num_accepted: self.num_accepted,
            num_discarded: self.num_discarded,
        }
    }

    /// What the row's setting is called: `target alone`, `K = 6`, `h = 0.7`, `exit 1, eta = 0.6`.
    pub(crate) fn label(&self) -> String {
        match self.drafter.prefix() {
            Some(prefix) => format!("{prefix}, {}", self.rule_label()),
            None => self.rule_label(),
        }
    }

    /// E[L]: the tokens that a round yields on average, before any cut. NaN without rounds.
    pub(crate) fn tokens_per_round(&self) -> f64 {
        1.0 + self.num_accepted as f64 / self.num_target_forwards as f64
    }

    /// The label without the drafter: for where a heading names it.
    pub(crate) fn rule_label(&self) -> String {
        self.stop_rule.label(self.setting)
    }

    /// The setting's number alone: `6`, `0.7`; `?` where a rule has none.
    pub(crate) fn setting_text(&self) -> String {
        setting_text(self.setting)
    }

    /// Whether the row pools all prompts of its dataset.
    pub(crate) fn is_pooled(&self) -> bool {
        self.category == ALL_CATEGORIES
    }

    /// Whether the row is of the same setting as `other`, whatever the prompts.
    fn same_setting(&self, other: &Self) -> bool {
        (self.drafter, self.stop_rule, self.setting)
            == (other.drafter, other.stop_rule, other.setting)
    }
}

/// The time of prefill and of all rounds: what a user waits for.
pub(crate) fn waiting_time(trace: &Trace) -> Duration {
    trace.prefill_time + trace.decode_time()
}

/// Tokens kept over [`waiting_time`]. NaN without either.
pub(crate) fn tokens_per_second(trace: &Trace) -> f64 {
    trace.num_tokens as f64 / waiting_time(trace).as_secs_f64()
}

/// For each position of a round, the share accepted of the candidates that were judged: those whose
/// predecessors in the round were all accepted. A later one is thrown away unseen.
pub(crate) fn acceptance_by_position(trace: &Trace) -> Vec<f64> {
    let share = |position: usize| {
        let judged = trace
            .rounds
            .iter()
            .filter(|round| round.depth >= position && round.num_accepted >= position - 1);
        let (num_judged, num_accepted) = judged.fold((0, 0), |(judged, accepted), round| {
            (judged + 1, accepted + usize::from(round.num_accepted >= position))
        });
        (num_judged >= MIN_JUDGED).then(|| num_accepted as f64 / num_judged as f64)
    };
    (1..=NUM_POSITIONS).map_while(share).collect()
}

/// For each position of a round, the share of the rounds with that many candidates in which the candidate
/// and all before it were accepted (CS-Drafting, Figure 2).
fn unconditional_acceptance(trace: &Trace) -> Vec<f64> {
    let share = |position: usize| {
        let drafted = trace.rounds.iter().filter(|round| round.depth >= position);
        let (num_rounds, num_accepted) = drafted.fold((0, 0), |(rounds, accepted), round| {
            (rounds + 1, accepted + usize::from(round.num_accepted >= position))
        });
        (num_rounds >= MIN_JUDGED).then(|| num_accepted as f64 / num_rounds as f64)
    };
    (1..=NUM_UNCONDITIONAL).map_while(share).collect()
}

fn temperature(decoding: &Decoding) -> f64 {
    match decoding.choice {
        TokenChoice::Greedy => 0.0,
        TokenChoice::Sampled(Sampling { temperature, .. }) => temperature,
    }
}

/// Puts rows in the order they are shown: datasets as they first came, then greedy before sampled,
/// then all prompts before their categories as they first came, then the target alone, the separate
/// draft and self-drafts by exit layer, in each the rules in the order of their names, settings
/// ascending. Equal rows keep their order.
pub(crate) fn sort_rows(rows: &mut [ResultRow]) {
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

/// The distinct names, in order of appearance.
pub(crate) fn in_order<T: PartialEq>(names: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    distinct
}

/// `results.json`: a JSON list, one row a line.
///
/// # Errors
/// None that rows of numbers and strings can cause.
pub(crate) fn results_to_json(rows: &[ResultRow]) -> Result<String> {
    let lines: Vec<String> = rows.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    Ok(format!("[\n{}\n]\n", lines.join(",\n")))
}

/// Reads a `results.json`.
///
/// # Errors
/// If the file cannot be read, or is not a list of rows.
pub(crate) fn read_results(path: &Path) -> Result<Vec<ResultRow>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read `{shown}`"))?;
    parse_json(path, text.as_bytes()).with_context(|| {
        format!(
            "`{shown}` is not a list of result rows; hint: `draftsmith evaluate` writes it anew"
        )
    })
}

/// Writes 6 and not 6.0: a candidate length is a count.
fn integer_if_whole<S: Serializer>(
    setting: &Option<f64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match setting {
        // Beyond 2^53 an f64 no longer counts; no setting comes near.
        Some(whole) if whole.fract() == 0.0 && whole.abs() < 9e15 => {
            serializer.serialize_i64(*whole as i64)
        }
        setting => finite_or_null::serialize_option(setting, serializer),
    }
}

/// NaN and infinities as `null`, and `null` as NaN.
mod finite_or_null {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serialize_option(&Some(*value), serializer)
    }

    pub(super) fn serialize_option<S: Serializer>(
        value: &Option<f64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.filter(|value| value.is_finite()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
    }
}
