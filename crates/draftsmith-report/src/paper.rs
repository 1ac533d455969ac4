//! Tables in the layout of papers, which show figures from our results above the published ones.
//!
//! A recipe describes a table by its rows and columns. Each row and column names conditions on the
//! keys of `results.json`, `summary.json`, `heads.json` or `replay.json`. A cell shows the value of
//! a key in the entry that meets the conditions of its row and column, with its 95 % interval if
//! the entry has one.

mod shown;
mod trend;

use std::collections::BTreeMap;

use draftsmith_files::merged;
use draftsmith_theory::{DecodingName, Estimate};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::trend::trend;
use crate::error::{ReportError, Result};
use crate::results::{
    ALL_CATEGORIES, FilledBlock, FilledRow, FilledTable, GroupSummary, HeadRace, ReplayGroup,
    ResultRow, in_order,
};

pub use self::shown::render_papers;

/// The keys by which measured figures are split into several tables, unless a row or column has a
/// condition on the key.
const SPLIT_BY: [&str; 2] = ["dataset", "decoding"];

/// Conditions on entries: keys with their required values. A list holds alternatives.
type Conditions = BTreeMap<String, Value>;

/// A table of a paper, as a recipe describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperTable {
    /// The paper and the number of the table or figure.
    pub title: String,
    /// The differences from the paper's measurement.
    #[serde(default)]
    pub note: String,
    /// The file that the figures are from.
    #[serde(default)]
    pub source: PaperSource,
    /// The key that chooses among the settings that fit a row: the one with the largest mean over
    /// all prompts of all data sets. All columns without conditions on settings show it.
    #[serde(default = "speed")]
    pub best: String,
    /// The rows.
    pub rows: Vec<PaperRow>,
    /// The columns.
    pub columns: Vec<PaperColumn>,
    /// The paper's figures.
    #[serde(default)]
    pub published: Vec<Published>,
}

fn speed() -> String {
    "tokens_per_second".to_owned()
}

/// The file with the figures of a table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PaperSource {
    /// The rows of `results.json`.
    #[default]
    Results,
    /// The costs in `summary.json`.
    Costs,
    /// The heads of a sweep in `heads.json`.
    Heads,
    /// The rules of `replay.json`, and the oracle among them.
    Replay,
}

/// The measurements that fill tables.
#[derive(Debug, Clone, Copy)]
pub struct Measured<'a> {
    /// The rows of `results.json`.
    pub rows: &'a [ResultRow],
    /// The groups of `summary.json`, which have the costs.
    pub groups: &'a [GroupSummary],
    /// The content of `heads.json`, if there is a sweep.
    pub heads: Option<&'a HeadRace>,
    /// The groups of `replay.json`; empty without a replay.
    pub replays: &'a [ReplayGroup],
}

/// A row of a paper's table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperRow {
    /// The name, before a value of `each` if there is one.
    pub name: String,
    /// A key. The table gets a row for each of its values, which follows `name` in the row's name.
    pub each: Option<String>,
    /// The conditions that its entries meet.
    #[serde(default)]
    pub r#where: Conditions,
}

/// A column of a paper's table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperColumn {
    /// The column's name. With `each`, the value of the key follows the name.
    #[serde(default)]
    pub name: String,
    /// The key that the column shows. Slashes lead into lists and objects, as in `ctar/2`.
    pub value: String,
    /// A key. The table gets a column for each of its values.
    pub each: Option<String>,
    /// A row. The column shows the value relative to that row's, minus 1.
    pub over: Option<String>,
    /// The conditions that its entries meet.
    #[serde(default)]
    pub r#where: Conditions,
}

/// A set of published figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The models and prompts of the measurement.
    pub name: String,
    /// The names of rows, if they differ from the table's.
    pub rows: Option<Vec<String>>,
    /// The names of columns, if they differ from the table's.
    pub columns: Option<Vec<String>>,
    /// The figures by row and column. NaN where there is no figure.
    pub figures: Vec<Vec<f64>>,
}

impl PaperTable {
    /// Checks that results have every key that the table names, and that each set of published
    /// figures has one figure for each row and column.
    ///
    /// # Errors
    /// If a check fails. The message names the table.
    pub fn check(&self) -> Result<()> {
        let problem =
            |what: String| Err(ReportError::PaperTable { title: self.title.clone(), what });
        if self.title.contains(char::is_control) {
            return problem("its title has control characters; hint: remove them".to_owned());
        }
        let known = self.source.keys();
        let rows = self.rows.iter().flat_map(|row| row.each.iter().chain(row.r#where.keys()));
        let columns = self.columns.iter().flat_map(|column| {
            [&column.value].into_iter().chain(&column.each).chain(column.r#where.keys())
        });
        let best = Some(&self.best).filter(|best| **best != speed());
        for key in rows.chain(columns).chain(best) {
            let first = key.split('/').next().unwrap_or_default();
            if !known.iter().any(|known| known == first) {
                return problem(format!("`{key}` is no key of {}", self.source.text()));
            }
        }
        let mut over = self.columns.iter().filter_map(|column| column.over.as_ref());
        if let Some(name) = over.find(|name| self.rows.iter().all(|row| row.name != **name)) {
            return problem(format!("a column is `over` `{name}`, which is no row"));
        }
        for it in &self.published {
            for names in [&it.rows, &it.columns].into_iter().flatten() {
                let is_bad = |at: usize| {
                    names[at].contains(char::is_control) || names[..at].contains(&names[at])
                };
                if let Some(at) = (0..names.len()).find(|at| is_bad(*at)) {
                    return problem(format!(
                        "the figures published for `{}` name {:?} twice, or with control characters",
                        it.name, names[at]
                    ));
                }
            }
            let num_rows = it.rows.as_ref().map_or(self.rows.len(), Vec::len);
            let num_columns = it.columns.as_ref().map_or(self.columns.len(), Vec::len);
            let is_full = it.figures.iter().all(|row| row.len() == num_columns);
            if it.figures.len() != num_rows || !is_full {
                return problem(format!(
                    "the figures published for `{}` are not {num_rows} rows of {num_columns}; hint: write `nan` \
                     where there is none",
                    it.name
                ));
            }
        }
        Ok(())
    }

    /// Fills the table with measured figures from results, beside the published ones.
    pub fn fill(&self, measured: Measured<'_>) -> FilledTable {
        let entries = self.source.entries(measured);
        let is_mentioned = |key: &str| {
            let conditions = self.rows.iter().map(|row| &row.r#where);
            let columns = self.columns.iter().map(|column| &column.r#where);
            let each = self.rows.iter().map(|row| &row.each);
            let each = each.chain(self.columns.iter().map(|column| &column.each));
            conditions.chain(columns).any(|conditions| conditions.contains_key(key))
                || each.flatten().any(|each| each == key)
        };
        let split: Vec<&str> = SPLIT_BY.into_iter().filter(|key| !is_mentioned(key)).collect();
        let key =
            |entry: &Value| -> Vec<Value> { split.iter().map(|key| entry[*key].clone()).collect() };
        let measured = in_order(entries.iter().map(key)).into_iter().map(|values| {
            let own: Vec<&Value> = entries.iter().filter(|entry| key(entry) == values).collect();
            let name: Vec<String> = values.iter().map(value_text).collect();
            self.block(format!("here: {}", name.join(", ")), &own)
        });
        let published = self.published.iter().map(|it| self.published_block(it));
        let blocks: Vec<FilledBlock> = measured.chain(published).collect();
        let (title, note, trend) = (self.title.clone(), self.note.clone(), trend(&blocks));
        FilledTable { title, note, blocks, trend }
    }

    fn block(&self, name: String, entries: &[&Value]) -> FilledBlock {
        let columns: Vec<(String, &PaperColumn, Conditions)> = self
            .columns
            .iter()
            .flat_map(|column| {
                let all = expanded(&column.name, column.each.as_deref(), &column.r#where, entries);
                all.into_iter().map(move |(name, conditions)| (name, column, conditions))
            })
            .collect();
        let rows = self
            .rows
            .iter()
            .flat_map(|row| expanded(&row.name, row.each.as_deref(), &row.r#where, entries));
        let row = |(name, conditions): (String, Conditions)| {
            let figure = |(_, column, others): &(String, &PaperColumn, Conditions)| {
                let of = |row| self.figure(entries, row, others, &column.value);
                let Some(over) = &column.over else { return of(&conditions) };
                let over = self.rows.iter().find(|row| row.name == *over)?;
                Some(exact(of(&conditions)?.value / of(&over.r#where)?.value - 1.0))
            };
            FilledRow { name, figures: columns.iter().map(figure).collect() }
        };
        let mut rows: Vec<FilledRow> = rows.map(row).collect();
        let is_filled: Vec<bool> = (0..columns.len())
            .map(|at| rows.iter().any(|row: &FilledRow| row.figures[at].is_some()))
            .collect();
        for row in &mut rows {
            let mut is_filled = is_filled.iter();
            row.figures.retain(|_| is_filled.next() == Some(&true));
        }
        let columns = columns.iter().zip(&is_filled).filter(|(_, is_filled)| **is_filled);
        let columns = columns.map(|((name, ..), _)| name.clone()).collect();
        FilledBlock { name, is_published: false, columns, rows }
    }

    /// Returns the mean of a figure over the entries of one setting that meet the conditions of a
    /// row and a column. Categories and columns of data sets do not decide the setting, so that it
    /// is the same in all of them.
    fn figure(
        &self,
        entries: &[&Value],
        row: &Conditions,
        column: &Conditions,
        value: &str,
    ) -> Option<Estimate> {
        let mut own = row.clone();
        own.extend(column.clone());
        let mut over_all = row.clone();
        over_all.extend(column.clone().into_iter().filter(|(key, _)| key != "dataset"));
        if self.source == PaperSource::Results {
            own.entry("category".to_owned()).or_insert_with(|| json!(ALL_CATEGORIES));
            over_all.insert("category".to_owned(), json!(ALL_CATEGORIES));
        }
        let setting = |entry: &Value| -> Vec<Value> {
            self.source.setting_keys().iter().map(|key| entry[*key].clone()).collect()
        };
        let fits = |all: &Conditions| entries.iter().filter(|entry| meets(entry, all)).collect();
        let (shown, compared): (Vec<&&Value>, Vec<&&Value>) = (fits(&own), fits(&over_all));
        let speed = |of: &Vec<Value>| {
            let own = compared.iter().filter(|entry| setting(entry) == *of);
            mean(own.filter_map(|entry| number_at(entry, &self.best).map(exact)))
                .map_or(f64::MIN, |speed| speed.value)
        };
        let settings = in_order(compared.iter().map(|entry| setting(entry)));
        let by_speed = |one: &Vec<Value>, other: &Vec<Value>| speed(one).total_cmp(&speed(other));
        // The first of equally fast ones.
        let best = settings.into_iter().rev().max_by(by_speed)?;
        let shown = shown.into_iter().filter(|entry| setting(entry) == best);
        mean(shown.filter_map(|entry| estimate_at(entry, value)))
    }

    fn published_block(&self, it: &Published) -> FilledBlock {
        let own = || self.rows.iter().map(|row| row.name.clone()).collect();
        let names: Vec<String> = it.rows.clone().unwrap_or_else(own);
        let rows = names.into_iter().zip(&it.figures).map(|(name, figures)| {
            let figures = figures.iter().map(|it| it.is_finite().then(|| exact(*it)));
            FilledRow { name, figures: figures.collect() }
        });
        let own = || self.columns.iter().map(|column| column.name.clone()).collect();
        let columns = it.columns.clone().unwrap_or_else(own);
        let name = format!("paper: {}", it.name);
        FilledBlock { name, is_published: true, columns, rows: rows.collect() }
    }
}

impl PaperSource {
    fn text(self) -> &'static str {
        match self {
            Self::Results => "`results.json`",
            Self::Costs => "the costs in `summary.json`",
            Self::Heads => "`heads.json`",
            Self::Replay => "`replay.json`",
        }
    }

    /// Lists the keys that tell the settings of this source apart.
    fn setting_keys(self) -> &'static [&'static str] {
        match self {
            Self::Results => &["drafter", "stop_rule", "setting"],
            Self::Costs => &["drafter", "reads"],
            Self::Heads => &["name"],
            Self::Replay => &["drafter", "stop_rule"],
        }
    }

    /// Lists the keys of this source's entries.
    fn keys(self) -> Vec<String> {
        let names = match self {
            Self::Results => {
                let row = json!(ResultRow::default());
                return row.as_object().into_iter().flat_map(|row| row.keys().cloned()).collect();
            }
            Self::Costs => {
                "dataset decoding drafter reads draft_seconds target_seconds row_seconds r_squared \
                 mean_relative_error max_relative_error"
            }
            Self::Heads => {
                "name num_layers rejection_weight mixing_ratio kl is_chosen has_lowest_kl least_share \
                 shared_threshold decoding dataset config speedup gain algorithm_2 curve"
            }
            Self::Replay => {
                "dataset decoding drafter stop_rule config speedup gain verification_rate \
                 verification_rate_interval discard_rate tokens_per_second ceiling share_of_ceiling"
            }
        };
        names.split_whitespace().map(str::to_owned).collect()
    }

    fn entries(self, measured: Measured<'_>) -> Vec<Value> {
        let Measured { rows, groups, heads, replays } = measured;
        match self {
            Self::Results => rows.iter().map(|row| json!(row)).collect(),
            Self::Costs => groups
                .iter()
                .flat_map(|group| {
                    let decoding = DecodingName::of(&group.decoding);
                    let of = json!({ "dataset": group.dataset, "decoding": decoding });
                    group.costs.iter().map(move |cost| merged(of.clone(), json!(cost)))
                })
                .collect(),
            Self::Heads => heads
                .iter()
                .flat_map(|race| &race.heads)
                .flat_map(|head| {
                    let mut own = json!(head);
                    own.as_object_mut().map(|own| own.remove("sets"));
                    head.sets.iter().map(move |set| merged(own.clone(), json!(set)))
                })
                .collect(),
            Self::Replay => replays.iter().flat_map(ReplayGroup::paper_entries).collect(),
        }
    }
}

impl ReplayGroup {
    /// Lists the rules without look-ups, the oracle and the target by itself as entries of paper
    /// tables. The stop rules of the last two are `oracle` and `none`. Speeds are modelled at the
    /// group's costs.
    fn paper_entries(&self) -> Vec<Value> {
        let of = json!({
            "dataset": self.dataset.as_deref().unwrap_or(ALL_CATEGORIES),
            "decoding": self.decoding,
            "drafter": self.drafter,
        });
        let plain = json!({
            "stop_rule": "none",
            "speedup": exact(1.0),
            "verification_rate": 1.0,
            "discard_rate": 0.0,
        });
        let oracle = self.oracle.map(|oracle| {
            json!({
                "stop_rule": "oracle",
                "speedup": oracle.speedup,
                "gain": oracle.gain,
                "verification_rate": oracle.verification_rate.value,
                "verification_rate_interval": [
                    oracle.verification_rate.low,
                    oracle.verification_rate.high,
                ],
                "discard_rate": 0.0,
            })
        });
        let rules = self.rows.iter().filter(|row| row.lookup_first.is_none());
        let rules = rules.map(|row| json!(row));
        let entry = |own: Value| {
            let mut entry = merged(of.clone(), own);
            let speed = |end: &str| {
                Some(number_at(&entry, &format!("speedup/{end}"))? / self.plain_seconds)
            };
            let [value, low, high] = ["value", "low", "high"].map(speed);
            entry["tokens_per_second"] = json!({ "value": value, "low": low, "high": high });
            entry
        };
        [plain].into_iter().chain(rules).chain(oracle).map(entry).collect()
    }
}

/// Returns the name and conditions of a row or column. With `each`, returns such a pair for each
/// value of that key in the entries.
fn expanded(
    name: &str,
    each: Option<&str>,
    conditions: &Conditions,
    entries: &[&Value],
) -> Vec<(String, Conditions)> {
    let Some(key) = each else { return vec![(name.to_owned(), conditions.clone())] };
    let fits = entries.iter().filter(|entry| meets(entry, conditions));
    let values = in_order(fits.map(|entry| entry[key].clone()));
    let one = |value: Value| {
        let name = format!("{name} {}", value_text(&value)).trim().to_owned();
        let mut conditions = conditions.clone();
        conditions.insert(key.to_owned(), value);
        (name, conditions)
    };
    values.into_iter().filter(|it| !it.is_null() && *it != ALL_CATEGORIES).map(one).collect()
}

fn meets(entry: &Value, conditions: &Conditions) -> bool {
    let equals = |found: &Value, wanted: &Value| match (found.as_f64(), wanted.as_f64()) {
        (Some(found), Some(wanted)) => found == wanted,
        _ => found == wanted,
    };
    conditions.iter().all(|(key, wanted)| match wanted {
        Value::Array(any) => any.iter().any(|wanted| equals(&entry[key], wanted)),
        wanted => equals(&entry[key], wanted),
    })
}

fn number_at(entry: &Value, key: &str) -> Option<f64> {
    entry.pointer(&format!("/{key}"))?.as_f64()
}

/// Reads a figure with its 95 % interval. The interval is in the keys `low` and `high` beside
/// `value`, in the key with `_interval` at its end, or in `rate_intervals`. Without one, both ends
/// equal the value.
fn estimate_at(entry: &Value, key: &str) -> Option<Estimate> {
    let value = number_at(entry, key)?;
    let beside = |end| number_at(entry, &format!("{}/{end}", key.strip_suffix("/value")?));
    let of_rate = |at: usize| entry["rate_intervals"][key][at].as_f64();
    let interval =
        |at: usize| number_at(entry, &format!("{key}_interval/{at}")).or_else(|| of_rate(at));
    let low = beside("low").or_else(|| interval(0)).unwrap_or(value);
    let high = beside("high").or_else(|| interval(1)).unwrap_or(value);
    Some(Estimate { value, low: low.min(value), high: high.max(value) })
}

/// Averages figures of different prompts, with the interval of the mean. `None` without figures.
fn mean(figures: impl Iterator<Item = Estimate>) -> Option<Estimate> {
    let all: Vec<Estimate> = figures.collect();
    if all.len() < 2 {
        return all.first().copied();
    }
    let num = all.len() as f64;
    let value = all.iter().map(|it| it.value).sum::<f64>() / num;
    let half = all.iter().fold(0.0, |sum: f64, it| sum.hypot((it.high - it.low) / 2.0)) / num;
    Some(Estimate { value, low: value - half, high: value + half })
}

/// Makes an estimate of a figure without an interval.
fn exact(value: f64) -> Estimate {
    Estimate { value, low: value, high: value }
}

fn value_text(value: &Value) -> String {
    match (value.as_str(), value.as_f64()) {
        (Some(text), _) => text.to_owned(),
        (_, Some(number)) => number.to_string(),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    fn table(text: &str) -> PaperTable {
        serde_json::from_str(text).expect("a table")
    }

    #[test]
    fn figures_are_picked_by_conditions_and_compared_with_published_ones() {
        let (rows, summary) = (fixture::rows(), fixture::summary());
        let spec = r#"{"title": "A paper, Table 1", "note": "Another pair.",
            "rows": [{"name": "best K", "where": {"drafter": "draft", "stop_rule": "fixed_length"}},
                     {"name": "K =", "each": "setting",
                      "where": {"drafter": "exit1", "stop_rule": "fixed_length", "setting": [1, 2]}}],
            "columns": [{"name": "speed-up", "value": "speedup"}, {"name": "CTAR(3)", "value": "ctar/2"}],
            "published": [{"name": "7B", "rows": ["best K", "K = 1"], "figures": [[1.5, 0.25], [1.9, null]]}]}"#;
        let mut spec = table(&spec.replace("null", "0.5"));
        spec.published[0].figures[1][1] = f64::NAN;
        spec.check().expect("a table of known keys");
        let filled =
            spec.fill(Measured { rows: &rows, groups: &summary.groups, heads: None, replays: &[] });
        let best = |name: &str| {
            let own = rows.iter().filter(|row| {
                row.dataset == name
                    && row.category == ALL_CATEGORIES
                    && row.label().starts_with("K =")
                    && row.decoding == crate::DecodingName::Greedy
            });
            own.max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second)).expect("rows")
        };
        let first = &filled.blocks[0];
        let row = best(
            first
                .name
                .strip_prefix("here: ")
                .and_then(|it| it.strip_suffix(", greedy"))
                .expect("greedy"),
        );
        let [low, high] = row.speedup_interval.expect("an interval");
        let speedup = row.speedup.map(|value| Estimate { value, low, high });
        assert_eq!(first.rows[0].figures, [speedup, Some(exact(row.ctar[2]))]);
        assert_eq!(first.rows.len(), 3, "a row for each of the two settings");
        let text = render_papers(&[filled], Some(60));
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        assert!(
            text.contains("paper: 7B") && text.contains("1.9") && text.contains("  -\n"),
            "{text}"
        );
        assert!(text.contains("comparisons of rows come out as in the"), "{text}");
    }

    #[test]
    fn a_row_shows_one_setting_in_all_categories_and_data_sets() {
        let row = |dataset: &str, category: &str, setting: f64, speed: f64| ResultRow {
            dataset: dataset.into(),
            category: category.into(),
            setting: Some(setting),
            tokens_per_second: speed,
            speedup: Some(speed / 50.0),
            speedup_interval: Some([speed / 50.0 - 0.3, speed / 50.0 + 0.3]),
            improvement_at: [("ms".into(), Some(1.5))].into(),
            rate_intervals: [("improvement_at/ms".into(), [1.4, 1.7])].into(),
            ..ResultRow::default()
        };
        // 0.3 is the fastest over all prompts, and 0.5 in `math` and on the second set.
        let rows = [
            row("one", ALL_CATEGORIES, 0.5, 90.0),
            row("one", ALL_CATEGORIES, 0.3, 100.0),
            row("one", "math", 0.5, 95.0),
            row("one", "math", 0.3, 80.0),
            row("two", ALL_CATEGORIES, 0.5, 75.0),
            row("two", ALL_CATEGORIES, 0.3, 70.0),
        ];
        let spec = table(
            r#"{"title": "T", "rows": [{"name": "SVIP"}, {"name": "base", "where": {"setting": 0.5}}],
                "columns": [
                {"each": "category", "value": "tokens_per_second"},
                {"each": "dataset", "value": "tokens_per_second"},
                {"name": "setting", "value": "setting"},
                {"name": "at 0.5", "value": "tokens_per_second", "where": {"setting": 0.5}},
                {"name": "speed-up", "value": "speedup"},
                {"name": "gain", "value": "speedup", "over": "base"}]}"#,
        );
        let filled = spec.fill(Measured { rows: &rows, groups: &[], heads: None, replays: &[] });
        let [block] = &filled.blocks[..] else { panic!("one block: {filled:?}") };
        let figures: Vec<f64> =
            block.rows[0].figures.iter().map(|it| it.expect("measured").value).collect();
        assert_eq!(block.columns, ["math", "one", "two", "setting", "at 0.5", "speed-up", "gain"]);
        assert_eq!(figures, [80.0, 100.0, 70.0, 0.3, 82.5, 1.7, 1.7 / 1.65 - 1.0]);
        // The mean of two data sets is surer than each.
        let mean = block.rows[0].figures[5].expect("measured");
        assert!((mean.high - mean.low - 0.6 / 2f64.sqrt()).abs() < 1e-12, "{mean:?}");
        let nested = estimate_at(&json!(rows[0]), "improvement_at/ms");
        assert_eq!(nested, Some(Estimate { value: 1.5, low: 1.4, high: 1.7 }));
    }

    #[test]
    fn unknown_keys_and_figures_of_another_shape_are_named() {
        let columns = r#""columns": [{"name": "a", "value": "speedup"}]"#;
        let wrong = table(&format!(
            r#"{{"title": "T", "rows": [{{"name": "a", "where": {{"drafts": 1}}}}], {columns}}}"#
        ));
        let error = wrong.check().expect_err("no such key").to_string();
        assert!(
            error.contains("`drafts` is no key of `results.json`") && error.contains("`T`"),
            "{error}"
        );
        let wrong = table(&format!(
            r#"{{"title": "T", "rows": [{{"name": "a"}}], {columns}, "published": [{{"name": "7B", "figures": [[1, 2]]}}]}}"#
        ));
        let error = wrong.check().expect_err("another shape").to_string();
        assert!(error.contains("not 1 rows of 1"), "{error}");
        let over = columns.replace(r#""speedup""#, r#""speedup", "over": "b""#);
        let wrong = table(&format!(r#"{{"title": "T", "rows": [{{"name": "a"}}], {over}}}"#));
        let error = wrong.check().expect_err("no such row").to_string();
        assert!(error.contains("`b`, which is no row"), "{error}");
    }

    #[test]
    fn the_keys_of_each_source_are_those_of_its_entries() {
        let (rows, summary) = (fixture::rows(), fixture::summary());
        let race = fixture::head_race();
        let replay = fixture::replay();
        let measured = Measured {
            rows: &rows,
            groups: &summary.groups,
            heads: Some(&race),
            replays: &replay.groups,
        };
        use PaperSource::{Costs, Heads, Replay, Results};
        for source in [Results, Costs, Heads, Replay] {
            let entries = source.entries(measured);
            let keys = entries.iter().flat_map(|it| it.as_object().expect("an object").keys());
            let found: std::collections::BTreeSet<String> = keys.cloned().collect();
            assert_eq!(found, source.keys().into_iter().collect());
        }
    }
}
