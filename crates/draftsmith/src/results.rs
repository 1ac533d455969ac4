//! The numbers an evaluation leaves behind: `results.json`, a list of rows, and `summary.json`, what the rows were
//! measured with.
//!
//! This file owns both schemas, their order and their reading and writing as text. The rates come from the theory
//! crate's `Counts`; who decodes, and where files go, is the `evaluate` command's business. `table` and `report` show
//! these rows.
//!
//! A number that does not exist (a rate of no tokens, a speed-up over nothing) is NaN or None in memory and `null` in
//! the file, never NaN, which is not JSON.

use std::path::Path;

use anyhow::{Context, Result};
use draftsmith_theory::{Counts, Decoding, Fit, Sampling, Trace};
use serde::{Deserialize, Serialize};

/// The category of the rows that pool all prompts of a dataset.
pub(crate) const ALL_CATEGORIES: &str = "all";

/// How many entries `ctar` has.
const CTAR_LEN: usize = 10;

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
    /// The stop rule's number: K for a fixed length, h for a rejection threshold, null without a rule.
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
    /// CTAR: the w-th entry, counted from 1, is the share of rounds that yield more than w tokens, w = 1 to 10.
    /// Empty without rounds.
    pub(crate) ctar: Vec<f64>,
    /// Tokens kept over the time of prefill and of all rounds.
    #[serde(with = "finite_or_null")]
    pub(crate) tokens_per_second: f64,
    /// `tokens_per_second` over that of the target decoding alone; null where that was not measured.
    #[serde(serialize_with = "finite_or_null::serialize_option")]
    pub(crate) speedup: Option<f64>,
    /// The speed-up the fitted cost model gives these counts, the measured prefill added on both sides, since the
    /// model speaks of rounds only; null without a fit.
    #[serde(serialize_with = "finite_or_null::serialize_option")]
    pub(crate) modelled_speedup: Option<f64>,
    /// Whether the tokens are the target's own, token for token; null only where it was not checked.
    pub(crate) lossless: Option<bool>,
}

/// What proposes candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DrafterName {
    /// Nothing: the target decodes alone.
    None,
    /// A separate draft model.
    Draft,
}

/// What ends a draft phase; in the order rows are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopRuleName {
    /// Nothing is drafted.
    None,
    /// K candidates a round.
    FixedLength,
    /// SpecDec++: the acceptance head's threshold h.
    RejectionThreshold,
}

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DecodingName {
    /// The most probable token.
    Greedy,
    /// A token drawn from the warped distribution.
    Sampled,
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
    /// The target alone on the same prompts; None if it was not run. Its own row names its own speed: speed-up 1.
    pub(crate) plain_tokens_per_second: Option<f64>,
    /// See [`ResultRow::modelled_speedup`].
    pub(crate) modelled_speedup: Option<f64>,
    /// See [`ResultRow::lossless`].
    pub(crate) lossless: Option<bool>,
}

impl ResultRow {
    /// The row of the pooled `trace` of all its prompts.
    pub(crate) fn new(context: RowContext, trace: &Trace) -> Self {
        let counts = trace.counts();
        let tokens_per_second = tokens_per_second(trace);
        let speedup = context.plain_tokens_per_second.map(|plain| tokens_per_second / plain);
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
            tokens_per_second,
            speedup: speedup.filter(|speedup| speedup.is_finite()),
            modelled_speedup: context.modelled_speedup.filter(|speedup| speedup.is_finite()),
            lossless: context.lossless,
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

    /// What the row's setting is called: `target alone`, `K = 6`, `h = 0.7`.
    pub(crate) fn label(&self) -> String {
        let letter = match self.stop_rule {
            StopRuleName::None => return "target alone".into(),
            StopRuleName::FixedLength => "K",
            StopRuleName::RejectionThreshold => "h",
        };
        format!("{letter} = {}", self.setting_text())
    }

    /// The setting's number alone: `6`, `0.7`; `?` where a rule has none.
    pub(crate) fn setting_text(&self) -> String {
        self.setting.map_or_else(|| "?".into(), |setting| setting.to_string())
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

/// Tokens kept over the time of prefill and of all rounds: what a user waits for. NaN without either.
pub(crate) fn tokens_per_second(trace: &Trace) -> f64 {
    trace.num_tokens as f64 / (trace.prefill_time + trace.decode_time()).as_secs_f64()
}

impl DecodingName {
    /// The name of a way of decoding.
    pub(crate) fn of(decoding: &Decoding) -> Self {
        match decoding {
            Decoding::Greedy => Self::Greedy,
            Decoding::Sampled(_) => Self::Sampled,
        }
    }
}

fn temperature(decoding: &Decoding) -> f64 {
    match decoding {
        Decoding::Greedy => 0.0,
        Decoding::Sampled(Sampling { temperature, .. }) => *temperature,
    }
}

/// Puts rows in the order they are shown: datasets as they first came, then greedy before sampled, then all prompts
/// before their categories as they first came, then plain, fixed lengths and thresholds, each ascending. Equal rows
/// keep their order.
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

/// The distinct ones of `names`, in the order they first came.
fn in_order<T: PartialEq>(names: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    distinct
}

/// The rows of one dataset under one way of decoding: what may be compared with each other.
#[derive(Debug, Clone)]
pub(crate) struct Group<'a> {
    /// The dataset.
    pub(crate) dataset: &'a str,
    /// How tokens are chosen.
    pub(crate) decoding: DecodingName,
    /// Sampling temperature; 0 for greedy decoding.
    pub(crate) temperature: f64,
    rows: Vec<&'a ResultRow>,
}

/// `rows` by dataset and decoding, in the order they first came.
pub(crate) fn groups(rows: &[ResultRow]) -> Vec<Group<'_>> {
    let key = |row: &ResultRow| (row.decoding, row.temperature);
    let mut groups: Vec<Group<'_>> = Vec::new();
    for row in rows {
        let known = groups.iter_mut().find(|group| {
            group.dataset == row.dataset && (group.decoding, group.temperature) == key(row)
        });
        match known {
            Some(group) => group.rows.push(row),
            None => groups.push(Group {
                dataset: &row.dataset,
                decoding: row.decoding,
                temperature: row.temperature,
                rows: vec![row],
            }),
        }
    }
    groups
}

impl<'a> Group<'a> {
    /// The rows of all prompts together.
    pub(crate) fn pooled(&self) -> impl Iterator<Item = &'a ResultRow> + '_ {
        self.rows.iter().copied().filter(|row| row.is_pooled())
    }

    /// The target alone, over all prompts.
    pub(crate) fn plain(&self) -> Option<&'a ResultRow> {
        self.pooled().find(|row| row.stop_rule == StopRuleName::None)
    }

    /// The fastest fixed candidate length over all prompts; the first of equals.
    pub(crate) fn best_fixed_length(&self) -> Option<&'a ResultRow> {
        self.fastest(StopRuleName::FixedLength)
    }

    /// The fastest threshold of the acceptance head over all prompts; the first of equals.
    pub(crate) fn best_head(&self) -> Option<&'a ResultRow> {
        self.fastest(StopRuleName::RejectionThreshold)
    }

    /// Whether `row` is the best fixed length or the best head.
    pub(crate) fn is_best(&self, row: &ResultRow) -> bool {
        [self.best_fixed_length(), self.best_head()]
            .iter()
            .flatten()
            .any(|best| best.is_pooled() == row.is_pooled() && best.same_setting(row))
    }

    /// The prompts' categories, in the order they first came; none where only pooled rows are there.
    pub(crate) fn categories(&self) -> Vec<&'a str> {
        let rows = self.rows.iter().copied();
        in_order(rows.filter(|row| !row.is_pooled()).map(|row| row.category.as_str()))
    }

    /// The row of `category` under the setting of `like`.
    pub(crate) fn in_category(&self, category: &str, like: &ResultRow) -> Option<&'a ResultRow> {
        self.rows.iter().copied().find(|row| row.category == category && row.same_setting(like))
    }

    /// How the group decodes, in words: `greedy`, `sampled at T = 0.7`.
    pub(crate) fn decoding_text(&self) -> String {
        match self.decoding {
            DecodingName::Greedy => "greedy".into(),
            DecodingName::Sampled => format!("sampled at T = {}", self.temperature),
        }
    }

    // Within a group the baseline is one and the same, so the fastest has the greatest speed-up; and there is a
    // fastest also where the target alone was not measured.
    fn fastest(&self, stop_rule: StopRuleName) -> Option<&'a ResultRow> {
        let rows = self.pooled().filter(|row| row.stop_rule == stop_rule);
        rows.filter(|row| row.tokens_per_second.is_finite()).reduce(|best, row| {
            if row.tokens_per_second > best.tokens_per_second { row } else { best }
        })
    }
}

/// `results.json`: a JSON list, one row a line.
///
/// # Errors
/// None that rows of numbers and strings can cause.
pub(crate) fn results_to_json(rows: &[ResultRow]) -> Result<String> {
    let lines: Vec<String> = rows.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    Ok(format!("[\n{}\n]\n", lines.join(",\n")))
}

/// The text of `summary.json`.
///
/// # Errors
/// None that numbers and strings can cause.
pub(crate) fn summary_to_json(summary: &EvaluationSummary) -> Result<String> {
    Ok(serde_json::to_string_pretty(summary)? + "\n")
}

/// Reads a `results.json`.
///
/// # Errors
/// If the file cannot be read, or is not a list of rows.
pub(crate) fn read_results(path: &Path) -> Result<Vec<ResultRow>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read `{shown}`"))?;
    serde_json::from_str(&text).with_context(|| {
        format!(
            "`{shown}` is not a list of result rows; hint: `draftsmith evaluate` writes it anew"
        )
    })
}

/// What the rows were measured with: `summary.json`, beside `results.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct EvaluationSummary {
    /// The recipe's name.
    pub(crate) recipe: String,
    /// The version of this program.
    pub(crate) version: String,
    /// Where it computed: `cpu`, `cuda:0`.
    pub(crate) device: String,
    /// The machine, in words: processor, cores, memory, operating system.
    pub(crate) machine: String,
    /// Libraries and drivers with their versions, in the order to be shown.
    pub(crate) versions: Vec<Version>,
    /// Target, draft, head: in that order.
    pub(crate) models: Vec<ModelSummary>,
    /// The most tokens an answer may have.
    pub(crate) max_new_tokens: usize,
    /// The seeds of all draws.
    pub(crate) seeds: Vec<u64>,
    /// The prompts.
    pub(crate) datasets: Vec<DatasetSummary>,
    /// One for each dataset and way of decoding.
    pub(crate) groups: Vec<GroupSummary>,
}

/// A library or driver and its version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Version {
    /// What it is.
    pub(crate) name: String,
    /// Which one.
    pub(crate) version: String,
}

/// A model or head: what it is and where it came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ModelSummary {
    /// `target`, `draft`, `head`.
    pub(crate) role: String,
    /// Its name, as the recipe gives it.
    pub(crate) name: String,
    /// Architecture, layers, sizes, parameters, in words.
    pub(crate) description: String,
    /// The hash of its files.
    pub(crate) hash: String,
}

/// A set of prompts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DatasetSummary {
    /// The prompt file's name, as in the rows.
    pub(crate) name: String,
    /// How many prompts were answered.
    pub(crate) num_prompts: usize,
}

/// What belongs to one dataset under one way of decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct GroupSummary {
    /// The dataset, as in the rows.
    pub(crate) dataset: String,
    /// How tokens were chosen, with all sampling settings.
    pub(crate) decoding: Decoding,
    /// Mismatches with plain greedy decoding forgiven because the top two logits were equal to 1e-5 there, all
    /// settings together; 0 for sampled decoding.
    pub(crate) num_forgiven_ties: usize,
    /// The fitted cost model; None where it could not be fitted.
    pub(crate) cost: Option<CostSummary>,
}

/// A fitted cost model and how well it fits, over all settings pooled.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct CostSummary {
    /// t_draft.
    pub(crate) draft_seconds: f64,
    /// t_target.
    pub(crate) target_seconds: f64,
    /// t_row; null where it cannot be told from the other two, and is part of both.
    pub(crate) row_seconds: Option<f64>,
    /// Centred R².
    #[serde(with = "finite_or_null")]
    pub(crate) r_squared: f64,
    /// Mean relative error of a prompt's time.
    #[serde(with = "finite_or_null")]
    pub(crate) mean_relative_error: f64,
    /// Greatest relative error of a prompt's time.
    #[serde(with = "finite_or_null")]
    pub(crate) max_relative_error: f64,
}

impl From<&Fit> for CostSummary {
    fn from(fit: &Fit) -> Self {
        Self {
            draft_seconds: fit.model.draft_seconds,
            target_seconds: fit.model.target_seconds,
            row_seconds: fit.rows_separable.then_some(fit.model.row_seconds),
            r_squared: fit.r_squared,
            mean_relative_error: fit.mean_relative_error,
            max_relative_error: fit.max_relative_error,
        }
    }
}

impl EvaluationSummary {
    /// What is known of a group of rows.
    pub(crate) fn group(&self, group: &Group<'_>) -> Option<&GroupSummary> {
        self.groups.iter().find(|summary| {
            summary.dataset == group.dataset
                && DecodingName::of(&summary.decoding) == group.decoding
                && temperature(&summary.decoding) == group.temperature
        })
    }
}

/// Writes 6 and not 6.0: a candidate length is a count.
fn integer_if_whole<S: serde::Serializer>(
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use draftsmith_theory::{CostModel, Round};
    use serde_json::{Value, json};

    use super::*;

    /// Columns in DESIGN's order.
    const COLUMNS: [&str; 22] = [
        "dataset",
        "category",
        "drafter",
        "stop_rule",
        "setting",
        "decoding",
        "temperature",
        "num_prompts",
        "num_tokens",
        "num_target_forwards",
        "num_draft_forwards",
        "num_drafted",
        "num_accepted",
        "num_discarded",
        "verification_rate",
        "discard_rate",
        "compression_rate",
        "ctar",
        "tokens_per_second",
        "speedup",
        "modelled_speedup",
        "lossless",
    ];

    fn context(stop_rule: StopRuleName, setting: Option<f64>) -> RowContext {
        RowContext {
            dataset: "alpaca".into(),
            category: ALL_CATEGORIES.into(),
            drafter: DrafterName::Draft,
            stop_rule,
            setting,
            decoding: Decoding::Greedy,
            num_prompts: 1,
            plain_tokens_per_second: Some(50.0),
            modelled_speedup: Some(1.9),
            lossless: Some(true),
        }
    }

    /// Two rounds yield 4 + 2 = 6 tokens in 50 ms, prefill 10 ms.
    fn trace() -> Trace {
        let round = |num_drafted: usize, num_accepted| Round {
            num_drafted,
            num_draft_forwards: num_drafted,
            num_accepted,
            draft_time: Duration::from_millis(5),
            verify_time: Duration::from_millis(20),
        };
        Trace {
            rounds: vec![round(3, 3), round(4, 1)],
            num_tokens: 6,
            prefill_time: Duration::from_millis(10),
        }
    }

    fn row(stop_rule: StopRuleName, setting: Option<f64>) -> ResultRow {
        ResultRow::new(context(stop_rule, setting), &trace())
    }

    #[test]
    fn a_row_says_what_its_trace_says() {
        let row = row(StopRuleName::FixedLength, Some(4.0));
        assert_eq!(row.counts(), trace().counts());
        assert_eq!((row.verification_rate, row.discard_rate), (2.0 / 6.0, 3.0 / 6.0));
        assert_eq!(row.compression_rate, 3.0);
        assert_eq!(row.ctar, [1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        // 6 tokens in 60 ms, to f64's rounding of a Duration.
        assert!((row.tokens_per_second - 100.0).abs() < 1e-9);
        assert!((row.speedup.expect("there is a baseline") - 2.0).abs() < 1e-9);
    }

    #[test]
    fn results_are_a_list_of_rows_in_the_documented_order_and_come_back() {
        let rows = vec![
            ResultRow { lossless: None, ..row(StopRuleName::None, None) },
            row(StopRuleName::FixedLength, Some(4.0)),
            row(StopRuleName::RejectionThreshold, Some(0.7)),
        ];
        let text = results_to_json(&rows).expect("rows are JSON");
        assert_eq!(text.lines().count(), rows.len() + 2);

        let list: Vec<serde_json::Map<String, Value>> =
            serde_json::from_str(&text).expect("a list of objects");
        for row in &list {
            assert_eq!(row.keys().collect::<Vec<_>>(), COLUMNS);
        }
        assert_eq!(list[0]["lossless"], Value::Null);
        assert_eq!((&list[0]["stop_rule"], &list[0]["setting"]), (&json!("none"), &Value::Null));
        assert!(text.contains(r#""drafter":"draft","stop_rule":"fixed_length","setting":4,"#));
        assert!(text.contains(r#""stop_rule":"rejection_threshold","setting":0.7,"#));

        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("results.json");
        std::fs::write(&path, &text).expect("writable");
        assert_eq!(read_results(&path).expect("readable"), rows);
    }

    #[test]
    fn what_is_not_a_number_is_null() {
        let context = RowContext {
            plain_tokens_per_second: Some(0.0),
            modelled_speedup: Some(f64::NAN),
            ..context(StopRuleName::FixedLength, Some(f64::NAN))
        };
        let row = ResultRow::new(context, &Trace::default());
        assert!(row.verification_rate.is_nan());
        let text = results_to_json(std::slice::from_ref(&row)).expect("rows are JSON");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        for column in ["setting", "verification_rate", "discard_rate", "compression_rate"] {
            assert_eq!(value[0][column], Value::Null, "{column}");
        }
        for column in ["tokens_per_second", "speedup", "modelled_speedup"] {
            assert_eq!(value[0][column], Value::Null, "{column}");
        }
        assert_eq!(value[0]["ctar"], json!([]));
        let back: Vec<ResultRow> = serde_json::from_str(&text).expect("rows");
        assert!(back[0].discard_rate.is_nan() && back[0].speedup.is_none());

        // Also by a writer that is not ours, and in numbers put in afterwards.
        let row = ResultRow { speedup: Some(f64::INFINITY), ..row };
        assert_eq!(serde_json::to_value(&row).expect("JSON")["speedup"], Value::Null);
    }

    #[test]
    fn a_file_that_is_no_result_is_named() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("results.json");
        std::fs::write(&path, "[{}]").expect("writable");
        let error = format!("{:#}", read_results(&path).expect_err("columns are missing"));
        assert!(error.contains("is not a list of result rows; hint:"), "{error}");
        assert!(error.contains("missing field `dataset`"), "{error}");
    }

    #[test]
    fn rows_are_sorted_as_they_are_shown() {
        use StopRuleName::{FixedLength, None as Plain, RejectionThreshold};
        let make = |dataset: &str, category: &str, stop_rule, setting| ResultRow {
            dataset: dataset.into(),
            category: category.into(),
            ..row(stop_rule, setting)
        };
        let mut rows = vec![
            make("gsm8k", "all", RejectionThreshold, Some(0.3)),
            make("alpaca", "all", FixedLength, Some(10.0)),
            make("gsm8k", "writing", FixedLength, Some(2.0)),
            make("gsm8k", "all", FixedLength, Some(10.0)),
            make("gsm8k", "coding", Plain, None),
            make("gsm8k", "all", FixedLength, Some(2.0)),
            make("alpaca", "all", Plain, None),
            make("gsm8k", "all", Plain, None),
        ];
        sort_rows(&mut rows);
        let shown: Vec<String> = rows
            .iter()
            .map(|row| format!("{} {} {}", row.dataset, row.category, row.label()))
            .collect();
        assert_eq!(
            shown,
            [
                "gsm8k all target alone",
                "gsm8k all K = 2",
                "gsm8k all K = 10",
                "gsm8k all h = 0.3",
                "gsm8k writing K = 2",
                "gsm8k coding target alone",
                "alpaca all target alone",
                "alpaca all K = 10",
            ]
        );
    }

    #[test]
    fn the_best_are_the_fastest_of_their_group_over_all_prompts() {
        use StopRuleName::{FixedLength, None as Plain, RejectionThreshold};
        let make = |stop_rule, setting, tokens_per_second| ResultRow {
            tokens_per_second,
            ..row(stop_rule, setting)
        };
        let rows = vec![
            make(Plain, None, 50.0),
            make(FixedLength, Some(2.0), 80.0),
            make(FixedLength, Some(4.0), 90.0),
            make(FixedLength, Some(6.0), 90.0),
            make(RejectionThreshold, Some(0.3), f64::NAN),
            make(RejectionThreshold, Some(0.7), 95.0),
            ResultRow { category: "coding".into(), ..make(FixedLength, Some(2.0), 120.0) },
            ResultRow {
                decoding: DecodingName::Sampled,
                temperature: 0.7,
                ..make(FixedLength, Some(2.0), 70.0)
            },
        ];
        let groups = groups(&rows);
        assert_eq!(groups.len(), 2);
        let label = |row: Option<&ResultRow>| row.map(ResultRow::label);
        assert_eq!(label(groups[0].plain()).as_deref(), Some("target alone"));
        assert_eq!(label(groups[0].best_fixed_length()).as_deref(), Some("K = 4"));
        assert_eq!(label(groups[0].best_head()).as_deref(), Some("h = 0.7"));
        assert_eq!(groups[0].categories(), ["coding"]);
        assert!(groups[0].is_best(&rows[2]) && !groups[0].is_best(&rows[3]));
        assert_eq!(groups[0].in_category("coding", &rows[1]), Some(&rows[6]));
        assert_eq!(label(groups[1].best_fixed_length()).as_deref(), Some("K = 2"));
        assert_eq!(label(groups[1].best_head()), None);
        assert_eq!(groups[1].decoding_text(), "sampled at T = 0.7");
    }

    #[test]
    fn summaries_come_back() {
        let fit = Fit {
            model: CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.0 },
            rows_separable: false,
            r_squared: 0.99,
            mean_relative_error: 0.01,
            max_relative_error: 0.05,
        };
        let sampling = Sampling { temperature: 0.7, top_p: 0.9, top_k: None };
        let group = |decoding, cost| GroupSummary {
            dataset: "alpaca".into(),
            decoding,
            num_forgiven_ties: 1,
            cost,
        };
        let summary = EvaluationSummary {
            recipe: "tiny".into(),
            version: "0.1.0".into(),
            device: "cpu".into(),
            machine: "8 cores".into(),
            versions: vec![Version { name: "burn".into(), version: "0.22.1".into() }],
            models: vec![ModelSummary {
                role: "target".into(),
                name: "tiny/target".into(),
                description: "llama".into(),
                hash: "00ff".into(),
            }],
            max_new_tokens: 128,
            seeds: vec![7],
            datasets: vec![DatasetSummary { name: "alpaca".into(), num_prompts: 1 }],
            groups: vec![
                group(Decoding::Greedy, Some(CostSummary::from(&fit))),
                group(Decoding::Sampled(sampling), None),
            ],
        };
        let text = summary_to_json(&summary).expect("a summary is JSON");
        let back: EvaluationSummary = serde_json::from_str(&text).expect("a summary");
        assert_eq!(back, summary);
        assert_eq!(back.groups[0].cost.expect("a fit").row_seconds, None);

        let rows = [row(StopRuleName::None, None)];
        let found = back.group(&groups(&rows)[0]).expect("the greedy group");
        assert_eq!(found.decoding, Decoding::Greedy);
    }
}
