//! The texts and tables around the pictures: findings, cost models, losslessness and provenance.

use std::collections::BTreeSet;

use draftsmith_theory::{Decoding, TokenChoice};
use minijinja::value::Serde;
use minijinja::{Value, context};

use super::text::{counted, gain, group_id, label, number, on_a_page, rule_label, symbol, times};
use crate::results::{
    Conclusion, CostSummary, DecodingName, DeployAdvice, EvaluationSummary, Group, GroupSummary,
    GroupVerdict, PromiseSummary, ResultRow, Road, StopRuleName, in_order,
};

/// The main findings, in a few sentences.
pub(super) fn lead(groups: &[Group<'_>]) -> String {
    let mut findings: Vec<String> =
        ROADS.iter().filter_map(|(road, with, _)| rule_over_fixed(groups, *road, with)).collect();
    let ratios: Vec<f64> = groups.iter().filter_map(self_over_separate).collect();
    if !ratios.is_empty() {
        let what = "Self-drafting at its best is faster than the separate draft at its best";
        findings.push(format!("{what} {}", compared(&ratios)));
    }
    if !findings.is_empty() {
        return findings.join(" ");
    }
    let speedups: Vec<f64> = groups.iter().filter_map(|group| group.best()?.speedup).collect();
    let (least, greatest) = range(&speedups);
    match speedups.len() {
        0 => "No speed-up over plain decoding with the target was measured.".into(),
        1 => format!("The best setting is {} as fast as plain decoding.", times(Some(least))),
        _ => format!(
            "The best settings are {} to {} as fast as plain decoding.",
            times(Some(least)),
            times(Some(greatest))
        ),
    }
}

/// Kinds of drafters with the start of a sentence about them, and the prefix of their gains on a card.
const ROADS: [(Road, &str, &str); 4] = [
    (Road::SeparateDraft, "With the separate draft", ""),
    (Road::SelfDraft, "With self-drafts", "self-draft, "),
    (Road::Lookup, "With prompt lookup", "prompt lookup, "),
    (Road::Several, "With several drafters", "several drafters, "),
];

/// The gain of a kind of drafter's best adaptive rule, by its mean over the groups, over the best fixed
/// length.
fn rule_over_fixed(groups: &[Group<'_>], road: Road, with: &str) -> Option<String> {
    let rules: BTreeSet<StopRuleName> =
        groups.iter().flat_map(|group| group.rules_of_road(road)).collect();
    let rules = rules.into_iter().filter(|rule| is_adaptive(*rule));
    let gains = |rule: StopRuleName| -> Vec<f64> {
        let ratio = |group: &Group<'_>| {
            speed_ratio(
                group.best_of_road_by(road, |other| other == rule)?,
                best_fixed(group, road)?,
            )
        };
        groups.iter().filter_map(ratio).collect()
    };
    let mean = |ratios: &[f64]| ratios.iter().sum::<f64>() / ratios.len() as f64;
    let rules = rules.map(|rule| (rule, gains(rule)));
    let rules: Vec<(StopRuleName, Vec<f64>)> =
        rules.filter(|(_, gains)| !gains.is_empty()).collect();
    let best = |a: &(StopRuleName, Vec<f64>), b: &(StopRuleName, Vec<f64>)| {
        // A rule measured in fewer groups may have had the easier ones.
        a.1.len().cmp(&b.1.len()).then(mean(&a.1).total_cmp(&mean(&b.1)))
    };
    let (rule, ratios) = rules.iter().max_by(|a, b| best(a, b))?;
    let of = if rules.len() == 1 {
        "the adaptive stop rule".into()
    } else {
        format!("the best of {} adaptive stop rules", rules.len())
    };
    Some(format!(
        "{with} {of}, {}, is faster than the best fixed candidate length {}",
        rule_in_words(*rule),
        compared(ratios)
    ))
}

/// `acceptance head (h)`.
fn rule_in_words(rule: StopRuleName) -> String {
    match rule.symbol() {
        Some(symbol) => format!("{} ({})", rule.text(), on_a_page(symbol)),
        None => rule.text().into(),
    }
}

/// `in 3 of 4 comparisons: differences from −0.4 % to +9.0 % in tokens per second.`
fn compared(ratios: &[f64]) -> String {
    let num_faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
    let (least, greatest) = range(ratios);
    let by = if ratios.len() == 1 {
        format!("a difference of {}", gain(least))
    } else {
        format!("differences from {} to {}", gain(least), gain(greatest))
    };
    format!(
        "in {num_faster} of {}: {by} in tokens per second.",
        counted(ratios.len(), "comparison")
    )
}

fn range(values: &[f64]) -> (f64, f64) {
    let fold = |start, of: fn(f64, f64) -> f64| values.iter().copied().fold(start, of);
    (fold(f64::INFINITY, f64::min), fold(f64::NEG_INFINITY, f64::max))
}

fn is_adaptive(rule: StopRuleName) -> bool {
    rule != StopRuleName::FixedLength
}

fn best_fixed<'a>(group: &Group<'a>, road: Road) -> Option<&'a ResultRow> {
    group.best_of_road_by(road, |rule| !is_adaptive(rule))
}

fn best_adaptive<'a>(group: &Group<'a>, road: Road) -> Option<&'a ResultRow> {
    group.best_of_road_by(road, is_adaptive)
}

/// Speed of the best self-draft relative to the best separate draft.
fn self_over_separate(group: &Group<'_>) -> Option<f64> {
    speed_ratio(group.best_of_road(Road::SelfDraft)?, group.best_of_road(Road::SeparateDraft)?)
}

/// The 95 % interval of a speed-up, in words.
fn speedup_interval(row: &ResultRow) -> Option<String> {
    let [low, high] = row.speedup_interval?.map(|end| number(end, 2));
    Some(format!("{low} to {high}"))
}

fn speed_ratio(row: &ResultRow, over: &ResultRow) -> Option<f64> {
    let ratio = row.tokens_per_second / over.tokens_per_second;
    ratio.is_finite().then_some(ratio)
}

/// The conclusion for each group, with the style sheet's class.
pub(super) fn verdicts(conclusion: &Conclusion) -> Vec<Value> {
    let verdict = |verdict: &GroupVerdict| {
        let class = match verdict.advice {
            DeployAdvice::Deploy => "same",
            DeployAdvice::DoNotSpeculate => "differs",
            DeployAdvice::TooUncertain | DeployAdvice::NotTuned => "unchecked",
        };
        let text = on_a_page(&verdict.text()).replace("x (", "\u{d7} (").replace("x.", "\u{d7}.");
        context! { class, group => verdict.group.as_str(), text }
    };
    conclusion.verdicts.iter().map(verdict).collect()
}

/// A card for each group: the tuned or else the fastest setting, and the best of each kind of drafter.
pub(super) fn cards(groups: &[Group<'_>]) -> Vec<Value> {
    let line = |row: &ResultRow| {
        let (setting, rule) = (label(row), rule_label(row));
        let (drafter, speed) = (setting.strip_suffix(&rule), number(row.tokens_per_second, 1));
        context! { drafter, rule, speedup => times(row.speedup), speed }
    };
    let card = |(index, group): (usize, &Group<'_>)| {
        let first = group.best_tuned().or(group.best()).or(group.plain())?;
        let (mut gains, mut lines) = (Vec::new(), Vec::new());
        for (road, _, prefix) in ROADS {
            let (adaptive, fixed) = (best_adaptive(group, road), best_fixed(group, road));
            lines.extend(adaptive.into_iter().chain(fixed).map(line));
            if let (Some(adaptive), Some(fixed)) = (adaptive, fixed) {
                let what = format!("{prefix}{} over K", symbol(adaptive));
                gains.push((speed_ratio(adaptive, fixed), what));
            }
        }
        gains.push((self_over_separate(group), "self-draft over separate".into()));
        let gains = gains.into_iter().filter_map(|(ratio, what)| {
            Some(context! { text => gain(ratio?), faster => ratio? > 1.0, what })
        });
        lines.extend(group.plain().map(line));
        Some(context! {
            id => group_id(index), dataset => group.dataset, decoding => group.decoding_text(),
            speedup => times(first.speedup), interval => speedup_interval(first),
            setting => label(first), is_tuned => first.is_tuned, gains => gains.collect::<Vec<_>>(), lines,
        })
    };
    groups.iter().enumerate().filter_map(card).collect()
}

/// The results by category with the settings that are best over all prompts; None if there are no
/// categories, or nothing was drafted.
///
/// Choosing settings again in each category would overstate their speed.
pub(super) fn categories(group: &Group<'_>) -> Option<Value> {
    // Each setting with the fixed length that it is compared with.
    let mut settings: Vec<(&ResultRow, Option<&ResultRow>)> = Vec::new();
    for (road, ..) in ROADS {
        let fixed = best_fixed(group, road);
        settings.extend(fixed.map(|row| (row, None)));
        settings.extend(best_adaptive(group, road).map(|row| (row, fixed)));
    }
    let categories = group.categories();
    let (any, _) = *settings.first().filter(|_| !categories.is_empty())?;
    let rows = categories.iter().map(|category| {
        let of = |like: Option<&ResultRow>| like.and_then(|like| group.in_category(category, like));
        let cells = settings.iter().map(|(like, fixed)| {
            let row = of(Some(like));
            let over = row.zip(of(*fixed)).and_then(|(row, fixed)| speed_ratio(row, fixed));
            context! {
                speedup => times(row.and_then(|row| row.speedup)),
                compression_rate => number(row.map_or(f64::NAN, |row| row.compression_rate), 2),
                over => fixed.map(|_| over.map_or_else(|| number(f64::NAN, 0), gain)),
            }
        });
        context! {
            name => *category,
            num_prompts => of(Some(any)).map(|row| row.num_prompts),
            plain => of(group.plain()).map(|row| number(row.tokens_per_second, 1)),
            cells => cells.collect::<Vec<_>>(),
        }
    });
    let settings = settings.iter().map(|(row, fixed)| {
        context! { name => label(row), over => fixed.map(symbol) }
    });
    Some(context! { settings => settings.collect::<Vec<_>>(), rows => rows.collect::<Vec<_>>() })
}

/// The fitted cost models of all groups.
pub(super) fn costs(groups: &[Group<'_>], summary: &EvaluationSummary) -> Vec<Value> {
    let row = |group: &Group<'_>, cost: &CostSummary| {
        let rows = group.pooled().filter(|row| row.drafter == cost.drafter);
        let misses =
            rows.filter_map(|row| Some((row.modelled_speedup? / row.speedup? - 1.0).abs()));
        let (miss, drafter_text) = (misses.fold(f64::NAN, f64::max), cost.drafter.text());
        context! { name => group.name(), drafter_text, miss, ..Serde(cost) }
    };
    let costs = groups.iter().filter_map(|group| Some((group, summary.group(group)?)));
    costs.flat_map(|(group, known)| known.costs.iter().map(move |cost| row(group, cost))).collect()
}

/// Gains of tuned rules, as promised and as measured.
pub(super) fn promises(known: &GroupSummary) -> Vec<Value> {
    let promise = |promise: &PromiseSummary| {
        let drafter = promise.drafter.text();
        let drafter_text = if known.promises.len() > 1 { drafter + ", " } else { String::new() };
        let rule = on_a_page(promise.stop_rule.symbol().unwrap_or_default());
        let outcome_text = promise.outcome.text();
        context! { drafter_text, rule, outcome_text, ..Serde(promise) }
    };
    known.promises.iter().map(promise).collect()
}

/// Statements on whether the output of each group is the target's.
pub(super) fn lossless(groups: &[Group<'_>], summary: &EvaluationSummary) -> Vec<Value> {
    let statement = |group: &Group<'_>| {
        let (verdict, mut text) = verdict(group);
        let forgiven = summary.group(group).map_or(0, |known| known.num_forgiven_ties);
        if forgiven > 0 {
            text += &format!(
                " {} forgiven, where both tokens\u{2019} logits were within {} of the greatest.",
                counted(forgiven, "mismatch").replace("mismatchs", "mismatches"),
                summary.dtype.tie_text()
            );
        }
        context! { name => group.name(), verdict, text }
    };
    groups.iter().map(statement).collect()
}

/// The style sheet's class of a statement, and its text.
fn verdict(group: &Group<'_>) -> (&'static str, String) {
    let drafted: Vec<&ResultRow> =
        group.pooled().filter(|row| row.stop_rule != StopRuleName::None).collect();
    let with = |lossless| drafted.iter().filter(move |row| row.lossless == lossless);
    let (num_same, num_unchecked) = (with(Some(true)).count(), with(None).count());
    let differing: Vec<String> = with(Some(false)).map(|row| label(row)).collect();
    let (verdict, mut text) = if !differing.is_empty() {
        let text =
            format!("differs from the target\u{2019}s output with {}.", differing.join(", "));
        ("differs", text)
    } else if num_same > 0 {
        let all = if num_same == drafted.len() && num_same > 1 { "all " } else { "" };
        let settings = format!("{all}{}", counted(num_same, "setting"));
        ("same", format!("{settings} gave exactly the target\u{2019}s tokens on every prompt."))
    } else if group.decoding == DecodingName::Sampled {
        let text =
            "not compared: two sampled texts differ even if they have the same distribution.";
        return ("unchecked", text.into());
    } else {
        return ("unchecked", "not checked.".into());
    };
    if num_unchecked > 0 {
        text += &format!(" {} not checked.", counted(num_unchecked, "setting"));
    }
    (verdict, text)
}

/// Models, prompts, decoding, machine and versions.
pub(super) fn provenance(summary: &EvaluationSummary) -> Value {
    let decodings = in_order(summary.groups.iter().map(|group| decoding_text(&group.decoding)));
    let seeds: Vec<String> = summary.seeds.iter().map(u64::to_string).collect();
    let prompts: Vec<String> = summary
        .datasets
        .iter()
        .map(|dataset| format!("{} ({})", dataset.name, counted(dataset.num_prompts, "prompt")))
        .collect();
    let fact = |what: &str, text: String| (what.to_owned(), text);
    let mut facts = vec![
        fact("Recipe", summary.recipe.clone()),
        fact("Prompts", prompts.join(", ")),
        fact("Decoding", decodings.join("; ")),
        fact("Answers", answers_text(summary)),
        fact(if seeds.len() == 1 { "Seed" } else { "Seeds" }, seeds.join(", ")),
        fact("Machine", summary.machine.clone()),
        fact("Device", device_text(summary)),
        fact("draftsmith", summary.version.clone()),
    ];
    facts.extend(summary.versions.iter().map(|known| fact(&known.name, known.version.clone())));
    context! { facts, models => Serde(&summary.models) }
}

/// The limit of answers, and the batch size.
fn answers_text(summary: &EvaluationSummary) -> String {
    let at_most = format!("at most {}", counted(summary.max_new_tokens, "new token"));
    match summary.batch_size {
        1 => at_most,
        several => format!("{at_most}, {several} prompts at the same time"),
    }
}

/// The device, and the type of its numbers unless it is f32.
fn device_text(summary: &EvaluationSummary) -> String {
    let device = &summary.device;
    if summary.dtype.is_f32() {
        return device.clone();
    }
    format!("{device}, in {}", summary.dtype.name())
}

fn decoding_text(decoding: &Decoding) -> String {
    let mut text = match decoding.choice {
        TokenChoice::Greedy => "greedy".into(),
        TokenChoice::Sampled(sampling) => {
            let mut text = format!("sampled at T = {}", sampling.temperature);
            if sampling.top_p < 1.0 {
                text += &format!(", top-p {}", sampling.top_p);
            }
            if let Some(top_k) = sampling.top_k {
                text += &format!(", top-k {top_k}");
            }
            if let Some(min_p) = sampling.min_p {
                text += &format!(", min-p {min_p}");
            }
            text
        }
    };
    if decoding.is_penalised() {
        text += &format!(", repetition penalty {}", decoding.repetition_penalty);
    }
    text
}
