//! The texts and tables on findings, cost models, losslessness and provenance.

use std::collections::BTreeSet;

use draftsmith_theory::{Decoding, TokenChoice};
use minijinja::value::Serde;
use minijinja::{Value, context};

use super::group_id;
use crate::results::{
    Conclusion, CostSummary, DecodingName, DeployAdvice, EvaluationSummary, Group, GroupSummary,
    GroupVerdict, PromiseSummary, ResultRow, Road, RuleReads, ServingWay, StopRuleName,
};
use crate::table::{Line, Table};
use crate::text::{counted, gain, number, percent, times, typeset};

/// The kinds of drafters, each with the start of a sentence and the prefix of gains on a card.
const ROADS: [(Road, &str, &str); 4] = [
    (Road::SeparateDraft, "With the separate draft", ""),
    (Road::SelfDraft, "With self-drafts", "self-draft, "),
    (Road::Lookup, "With prompt lookup", "prompt lookup, "),
    (Road::Several, "With several drafters", "several drafters, "),
];

/// Writes the main findings, in a few sentences.
pub(super) fn lead(groups: &[Group<'_>]) -> String {
    let rules = ROADS.iter().filter_map(|(road, with, _)| rule_over_fixed(groups, *road, with));
    let what = "Self-drafting at its best is faster than the separate draft at its best";
    let ratios: Vec<f64> = groups.iter().filter_map(self_over_separate).collect();
    let findings: Vec<String> = rules.chain(compared(what, &ratios)).collect();
    if !findings.is_empty() {
        return findings.join(" ");
    }
    let speedups: Vec<f64> = groups.iter().filter_map(|group| group.best()?.speedup).collect();
    match range(&speedups, |speedup| times(Some(speedup))) {
        None => "No speed-up over plain decoding with the target was measured.".into(),
        Some(range) => format!("The best settings are {range} as fast as plain decoding."),
    }
}

/// States how much faster the best adaptive rule of a kind of drafter is than the best fixed
/// length. The best rule has the highest mean ratio over the groups. `None` if no group measured
/// both.
fn rule_over_fixed(groups: &[Group<'_>], road: Road, with: &str) -> Option<String> {
    let rows = groups.iter().flat_map(Group::drafted).filter(|row| row.road == Some(road));
    let rules: BTreeSet<StopRuleName> = rows.map(|row| row.stop_rule).collect();
    let ratios = |rule: StopRuleName| {
        let ratio = |group: &Group<'_>| {
            speed_ratio(best(group, road, |other| other == rule)?, best_fixed(group, road)?)
        };
        (rule, groups.iter().filter_map(ratio).collect::<Vec<f64>>())
    };
    let rules = rules.into_iter().filter(|rule| is_adaptive(*rule)).map(ratios);
    let rules: Vec<_> = rules.filter(|(_, ratios)| !ratios.is_empty()).collect();
    let mean = |ratios: &[f64]| ratios.iter().sum::<f64>() / ratios.len() as f64;
    // Rules measured in the most groups come first, because others may have had easier groups.
    let (rule, ratios) = rules
        .iter()
        .max_by(|(_, a), (_, b)| a.len().cmp(&b.len()).then(mean(a).total_cmp(&mean(b))))?;
    let of = match rules.len() {
        1 => "the adaptive stop rule".into(),
        several => format!("the best of {several} adaptive stop rules"),
    };
    let (rule, symbol) = (rule.text(), symbol(*rule));
    let what =
        format!("{with} {of}, {rule} ({symbol}), is faster than the best fixed candidate length");
    compared(&what, ratios)
}

/// Completes a finding with its numbers, as in `… in 3 of 4 comparisons: differences from −0.4 % to
/// +9.0 % in tokens per second.`
fn compared(what: &str, ratios: &[f64]) -> Option<String> {
    let num_faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
    let differences = range(ratios, |ratio| gain(ratio - 1.0))?;
    let comparisons = counted(ratios.len(), "comparison");
    Some(format!("{what} in {num_faster} of {comparisons}: {differences} in tokens per second."))
}

/// Formats the range of values, such as `1.20× to 1.31×`, or only one text if there is one value.
fn range(values: &[f64], text: impl Fn(f64) -> String) -> Option<String> {
    let least = typeset(&text(values.iter().copied().reduce(f64::min)?));
    let greatest = typeset(&text(values.iter().copied().reduce(f64::max)?));
    Some(if values.len() == 1 { least } else { format!("{least} to {greatest}") })
}

fn is_adaptive(rule: StopRuleName) -> bool {
    rule != StopRuleName::FixedLength
}

/// Returns the fastest row of a kind of drafter under the rules that `is_meant` accepts.
fn best<'a>(
    group: &Group<'a>,
    road: Road,
    is_meant: impl Fn(StopRuleName) -> bool,
) -> Option<&'a ResultRow> {
    group.fastest(|row| row.road == Some(road) && is_meant(row.stop_rule))
}

fn best_fixed<'a>(group: &Group<'a>, road: Road) -> Option<&'a ResultRow> {
    best(group, road, |rule| !is_adaptive(rule))
}

/// Returns the speed of the best self-draft relative to the best separate draft.
fn self_over_separate(group: &Group<'_>) -> Option<f64> {
    speed_ratio(
        best(group, Road::SelfDraft, |_| true)?,
        best(group, Road::SeparateDraft, |_| true)?,
    )
}

fn speed_ratio(row: &ResultRow, over: &ResultRow) -> Option<f64> {
    let ratio = row.tokens_per_second / over.tokens_per_second;
    ratio.is_finite().then_some(ratio)
}

/// Returns the ways to serve the setting to deploy, with the command of each.
pub(super) fn serving(conclusion: &Conclusion) -> Vec<Value> {
    let way = |way: &ServingWay| context! { text => way.text(), command => way.command() };
    conclusion.serving.iter().map(way).collect()
}

/// Returns the conclusion for each group, with its CSS class.
pub(super) fn verdicts(conclusion: &Conclusion) -> Vec<Value> {
    let verdict = |verdict: &GroupVerdict| {
        let class = match verdict.advice {
            DeployAdvice::Deploy => "same",
            DeployAdvice::DoNotSpeculate => "differs",
            DeployAdvice::TooUncertain | DeployAdvice::NotTuned => "unchecked",
        };
        let text = verdict.text().replace("x (", "\u{d7} (").replace("x.", "\u{d7}.");
        context! { class, group => verdict.group.as_str(), text }
    };
    conclusion.verdicts.iter().map(verdict).collect()
}

/// Builds a card for each group with the tuned setting, or else the fastest one, and the best
/// setting of each kind of drafter.
pub(super) fn cards(groups: &[Group<'_>]) -> Vec<Value> {
    let line = |row: &ResultRow| {
        let drafter = row.drafter.prefix().map(|prefix| prefix + ", ").unwrap_or_default();
        context! { drafter, rule => row.rule_label(), ..Serde(row) }
    };
    let card = |(index, group): (usize, &Group<'_>)| {
        let first = group.best_tuned().or(group.best()).or(group.plain())?;
        let mut gains = Vec::new();
        for (road, _, prefix) in ROADS {
            let Some(adaptive) = best(group, road, is_adaptive) else { continue };
            let ratio = best_fixed(group, road).and_then(|fixed| speed_ratio(adaptive, fixed));
            gains.push((ratio, format!("{prefix}{} over K", symbol(adaptive.stop_rule))));
        }
        gains.push((self_over_separate(group), "self-draft over separate".into()));
        let gains = gains.into_iter().filter_map(|(ratio, what)| Some((ratio? - 1.0, what)));
        let lines = bests(group).into_iter().map(|(row, _)| row).chain(group.plain()).map(line);
        Some(context! {
            id => group_id(index), decoding_text => group.decoding_text(), label => first.label(),
            interval => first.speedup_interval.map(|_| typeset(&first.speedup_range())),
            gains => gains.collect::<Vec<_>>(), lines => lines.collect::<Vec<_>>(), ..Serde(first)
        })
    };
    groups.iter().enumerate().filter_map(card).collect()
}

/// Returns the best fixed length and the best adaptive rule of each kind of drafter, each with the
/// fixed length that it is compared with.
fn bests<'a>(group: &Group<'a>) -> Vec<(&'a ResultRow, Option<&'a ResultRow>)> {
    let of_road = |(road, ..): (Road, &str, &str)| {
        let fixed = best_fixed(group, road);
        let adaptive = best(group, road, is_adaptive).map(|row| (row, fixed));
        fixed.map(|row| (row, None)).into_iter().chain(adaptive).collect::<Vec<_>>()
    };
    ROADS.into_iter().flat_map(of_road).collect()
}

/// Tabulates the results by category, at the settings that are best over all prompts. The table is
/// empty if there are no categories or nothing was drafted.
///
/// Choosing settings again in each category would overstate their speed.
pub(super) fn categories(group: &Group<'_>) -> Value {
    let settings = bests(group);
    let names = group.categories().into_iter().filter(|_| !settings.is_empty());
    let any = settings.first().map(|(row, _)| *row);
    let value = |category: &str, like: Option<&ResultRow>, of: fn(&ResultRow) -> Option<f64>| {
        like.and_then(|like| of(group.in_category(category, like)?)).unwrap_or(f64::NAN)
    };
    let mut table = Table::new("category", names.map(|name| Line::of(name, name)))
        .page("prompts", |it| number(value(it, any, |row| Some(row.num_prompts as f64)), 0))
        .page("plain decoding, tok/s", |it| {
            number(value(it, group.plain(), |row| Some(row.tokens_per_second)), 1)
        });
    for (row, fixed) in settings {
        let name = row.label();
        let speed = |it: &str, row| value(it, Some(row), |row| Some(row.tokens_per_second));
        table = table
            .page(format!("{name}: speed-up"), |it| {
                times(Some(value(it, Some(row), |row| row.speedup)))
            })
            .page(format!("{name}: tok/fwd"), |it| {
                number(value(it, Some(row), |row| Some(row.compression_rate)), 2)
            });
        if let Some(fixed) = fixed {
            let over = |it: &&str| gain(speed(it, row) / speed(it, fixed) - 1.0);
            table = table.page(format!("{name}: over K"), over);
        }
    }
    table.view()
}

/// Tabulates the fitted cost models of all groups, with the greatest error of a speed-up.
pub(super) fn costs(groups: &[Group<'_>], summary: &EvaluationSummary) -> Value {
    let miss = |group: &Group<'_>, cost: &CostSummary| {
        let is_of_all = cost.reads.is_none();
        let rows = group.pooled().filter(|row| is_of_all && row.drafter == cost.drafter);
        let misses =
            rows.filter_map(|row| Some((row.modelled_speedup? / row.speedup? - 1.0).abs()));
        misses.fold(f64::NAN, f64::max)
    };
    let known = groups.iter().filter_map(|group| Some((group, &summary.group(group)?.costs)));
    let lines = known.flat_map(|(group, costs)| {
        costs.iter().map(move |cost| Line::of(group.name(), (cost, miss(group, cost))))
    });
    let ms = |seconds: f64| number(1e3 * seconds, 3);
    Table::new("dataset and decoding", lines)
        .page("drafter", |(cost, _)| cost.drafter.text())
        .classed("word")
        .page("rules read", |(cost, _)| cost.reads.map_or("all", RuleReads::text).to_owned())
        .classed("word")
        .page("t_draft, ms", |(cost, _)| ms(cost.draft_seconds))
        .page("t_target, ms", |(cost, _)| ms(cost.target_seconds))
        .page("t_row, ms", |(cost, _)| cost.row_seconds.map_or("in both".into(), ms))
        .page("R²", |(cost, _)| number(cost.r_squared, 4))
        .page("mean error", |(cost, _)| percent(cost.mean_relative_error, 1))
        .page("greatest error", |(cost, _)| percent(cost.max_relative_error, 1))
        .page("greatest error of a speed-up", |(_, miss)| percent(*miss, 1))
        .view()
}

/// Lists the gains of tuned rules, as promised and as measured.
pub(super) fn promises(known: &GroupSummary) -> Vec<Value> {
    let promise = |promise: &PromiseSummary| {
        let prefix = promise.drafter.prefix().map(|prefix| prefix + ", ").unwrap_or_default();
        let rule = format!("{prefix}{}", symbol(promise.stop_rule));
        context! { rule, outcome_text => promise.outcome.text(), ..Serde(promise) }
    };
    known.promises.iter().map(promise).collect()
}

/// Counts the settings of each group whose output equals the target's and those that were not
/// checked, and names those whose output differs.
pub(super) fn lossless(groups: &[Group<'_>], summary: &EvaluationSummary) -> Vec<Value> {
    let statement = |group: &Group<'_>| {
        let with = |lossless| group.drafted().filter(move |row| row.lossless == lossless);
        let (num_same, num_unchecked) = (with(Some(true)).count(), with(None).count());
        let differing: Vec<String> = with(Some(false)).map(ResultRow::label).collect();
        let num_forgiven = summary.group(group).map_or(0, |known| known.num_forgiven_ties);
        let is_sampled = group.decoding == DecodingName::Sampled;
        context! { name => group.name(), num_same, num_unchecked, differing, num_forgiven, is_sampled }
    };
    groups.iter().map(statement).collect()
}

/// Describes all settings of a way of decoding in words.
pub(super) fn decoding_text(decoding: &Decoding) -> String {
    let first = match decoding.choice {
        TokenChoice::Greedy => "greedy".to_owned(),
        TokenChoice::Sampled(sampling) => format!("sampled at T = {}", sampling.temperature),
    };
    [vec![first], decoding.filters_text()].concat().join(", ")
}

fn symbol(rule: StopRuleName) -> String {
    rule.symbol().unwrap_or_default().to_owned()
}
