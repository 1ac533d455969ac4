//! What the page says in words and tables around its pictures: the finding first, the provenance
//! last.

use draftsmith_theory::{Decoding, TokenChoice};
use minijinja::{Value, context};

use super::text::{
    counted, gain, group_id, label, number, on_a_page, percent, rule_label, symbol, times,
};
use crate::agreement::rounding;
use crate::results::{
    CostSummary, DecodingName, Estimate, EvaluationSummary, Group, GroupSummary, PromiseSummary,
    ResultRow, Road, StopRuleName,
};

/// The finding, in a few sentences.
pub(super) fn lead(groups: &[Group<'_>]) -> String {
    let mut told: Vec<String> =
        ROADS.into_iter().filter_map(|road| rule_over_fixed(groups, road)).collect();
    let ratios: Vec<f64> = groups.iter().filter_map(self_over_separate).collect();
    if !ratios.is_empty() {
        let what = "Self-drafting at its best is faster than the separate draft at its best";
        told.push(format!("{what} {}", compared(&ratios)));
    }
    if !told.is_empty() {
        return told.join(" ");
    }
    let bests: Vec<(&ResultRow, f64)> =
        groups.iter().filter_map(|group| Some((group.best()?, group.best()?.speedup?))).collect();
    let Some((first, _)) = bests.first() else {
        return "No speed-up over the target decoding alone was measured.".into();
    };
    let (least, greatest) = range(&bests.iter().map(|(_, speedup)| *speedup).collect::<Vec<_>>());
    let which = if bests.iter().all(|(row, _)| row.stop_rule == first.stop_rule) {
        format!("{} at its best setting", rule_in_words(first.stop_rule))
    } else if bests.iter().all(|(row, _)| row.drafter.road() == Some(Road::SelfDraft)) {
        "self-drafting at its best setting".into()
    } else {
        "its best setting".into()
    };
    if bests.len() == 1 {
        format!("With {which} the target decodes {} as fast as alone.", times(Some(least)))
    } else {
        let (least, greatest) = (times(Some(least)), times(Some(greatest)));
        format!("With {which} the target decodes {least} to {greatest} as fast as alone.")
    }
}

const ROADS: [Road; 4] = [Road::SeparateDraft, Road::SelfDraft, Road::Lookup, Road::Several];

/// What the road's best rule but the fixed length, by its mean over the groups, gains over the best
/// fixed length.
fn rule_over_fixed(groups: &[Group<'_>], road: Road) -> Option<String> {
    let mut rules: Vec<StopRuleName> =
        groups.iter().flat_map(|group| group.rules_of_road(road)).collect();
    rules.sort();
    rules.dedup();
    rules.retain(|rule| is_adaptive(*rule));
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
    let told = rules.iter().map(|rule| (*rule, gains(*rule)));
    let told: Vec<(StopRuleName, Vec<f64>)> = told.filter(|(_, gains)| !gains.is_empty()).collect();
    let best = |a: &(StopRuleName, Vec<f64>), b: &(StopRuleName, Vec<f64>)| {
        // A rule of fewer groups is not judged by the ones it happens to be in.
        a.1.len().cmp(&b.1.len()).then(mean(&a.1).total_cmp(&mean(&b.1)))
    };
    let (rule, ratios) = told.iter().max_by(|a, b| best(a, b))?;
    let of = if told.len() == 1 {
        "the adaptive stop rule".into()
    } else {
        format!("the best of {} adaptive stop rules", told.len())
    };
    let with = match road {
        Road::SeparateDraft => "With the separate draft",
        Road::SelfDraft => "With self-drafts",
        Road::Lookup => "With prompt lookup",
        Road::Several => "With several drafters",
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

/// `in 3 of 4 comparisons: differences from −0.4 % to +9.0 % in tokens a second.`
fn compared(ratios: &[f64]) -> String {
    let num_faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
    let (least, greatest) = range(ratios);
    let by = if ratios.len() == 1 {
        format!("a difference of {}", gain(least))
    } else {
        format!("differences from {} to {}", gain(least), gain(greatest))
    };
    format!("in {num_faster} of {}: {by} in tokens a second.", counted(ratios.len(), "comparison"))
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

/// Tokens a second of the best self-draft over those of the best separate draft.
fn self_over_separate(group: &Group<'_>) -> Option<f64> {
    speed_ratio(group.best_of_road(Road::SelfDraft)?, group.best_of_road(Road::SeparateDraft)?)
}

/// The 95 % interval of a speed-up, in words; None where there is none.
fn speedup_interval(row: &ResultRow) -> Option<String> {
    let [low, high] = row.speedup_interval?.map(|end| number(end, 2));
    Some(format!("{low} to {high}"))
}

fn speed_ratio(row: &ResultRow, over: &ResultRow) -> Option<f64> {
    let ratio = row.tokens_per_second / over.tokens_per_second;
    ratio.is_finite().then_some(ratio)
}

/// One card a group: the fastest setting, and the best of each kind against the target alone.
pub(super) fn cards(groups: &[Group<'_>]) -> Vec<Value> {
    let card = |(index, group): (usize, &Group<'_>)| {
        let first = group.best().or(group.plain())?;
        let line = |row: &ResultRow| {
            let (setting, rule) = (label(row), rule_label(row));
            context! {
                drafter => setting.strip_suffix(&rule),
                rule,
                speedup => times(row.speedup),
                speed => number(row.tokens_per_second, 1),
            }
        };
        let (mut gains, mut lines) = (Vec::new(), Vec::new());
        for road in ROADS {
            let (adaptive, fixed) = (best_adaptive(group, road), best_fixed(group, road));
            lines.extend(adaptive.into_iter().chain(fixed).map(line));
            if let (Some(adaptive), Some(fixed)) = (adaptive, fixed) {
                let over = format!("{} over K", symbol(adaptive));
                let what = match road {
                    Road::SeparateDraft => over,
                    Road::SelfDraft => format!("self-draft, {over}"),
                    Road::Lookup => format!("prompt lookup, {over}"),
                    Road::Several => format!("several drafters, {over}"),
                };
                gains.push((speed_ratio(adaptive, fixed), what));
            }
        }
        gains.push((self_over_separate(group), "self-draft over separate".into()));
        let gains = gains.into_iter().filter_map(|(ratio, what)| {
            Some(context! { text => gain(ratio?), faster => ratio? > 1.0, what })
        });
        lines.extend(group.plain().map(line));
        Some(context! {
            id => group_id(index),
            dataset => group.dataset,
            decoding => group.decoding_text(),
            speedup => times(first.speedup),
            interval => speedup_interval(first),
            setting => label(first),
            gains => gains.collect::<Vec<_>>(),
            lines,
        })
    };
    groups.iter().enumerate().filter_map(card).collect()
}

/// The best settings, category by category; None where no rows by category are there, or nothing
/// was drafted.
///
/// The settings are those best over all prompts: choosing anew in every category would flatter
/// them.
pub(super) fn categories(group: &Group<'_>) -> Option<Value> {
    // Each with the fixed length it is compared with.
    let mut settings: Vec<(&ResultRow, Option<&ResultRow>)> = Vec::new();
    for road in ROADS {
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

/// The fitted cost models, a row for each that a group has.
pub(super) fn costs(groups: &[Group<'_>], summary: &EvaluationSummary) -> Vec<Value> {
    let milliseconds = |seconds: f64| number(1e3 * seconds, 3);
    let row = |group: &Group<'_>, cost: &CostSummary| {
        let misses = group.pooled().filter(|row| row.drafter == cost.drafter);
        let misses =
            misses.filter_map(|row| Some((row.modelled_speedup? / row.speedup? - 1.0).abs()));
        context! {
            name => format!("{}, {}", group.dataset, group.decoding_text()),
            drafter => cost.drafter.text(),
            draft => milliseconds(cost.draft_seconds),
            target => milliseconds(cost.target_seconds),
            row => cost.row_seconds.map(milliseconds),
            r_squared => number(cost.r_squared, 4),
            mean_error => percent(cost.mean_relative_error),
            max_error => percent(cost.max_relative_error),
            miss => percent(misses.fold(f64::NAN, f64::max)),
        }
    };
    let costs = groups.iter().filter_map(|group| Some((group, summary.group(group)?)));
    costs.flat_map(|(group, known)| known.costs.iter().map(move |cost| row(group, cost))).collect()
}

/// What tuning promised of a group's rules, and what came of it.
pub(super) fn promises(known: &GroupSummary) -> Vec<Value> {
    let promise = |promise: &PromiseSummary| {
        let Estimate { value, low, high } = promise.measured_gain;
        let drafter = promise.drafter.text();
        let is_one_of_several =
            known.promises.len() > 1 || promise.drafter.road() == Some(Road::Several);
        context! {
            drafter => if is_one_of_several { drafter + ", " } else { String::new() },
            rule => on_a_page(promise.stop_rule.symbol().unwrap_or_default()),
            best_fixed_length => promise.best_fixed_length,
            expected => gain(1.0 + promise.expected_gain.value),
            measured => gain(1.0 + value),
            low => gain(1.0 + low),
            high => gain(1.0 + high),
            verdict => if promise.holds { "held" } else { "not held" },
        }
    };
    known.promises.iter().map(promise).collect()
}

/// A statement a group on whether the output is the target's own.
pub(super) fn lossless(groups: &[Group<'_>], summary: &EvaluationSummary) -> Vec<Value> {
    groups
        .iter()
        .map(|group| {
            let drafted: Vec<&ResultRow> =
                group.pooled().filter(|row| row.stop_rule != StopRuleName::None).collect();
            let with = |lossless| drafted.iter().filter(move |row| row.lossless == lossless);
            let (num_same, differing, num_unchecked) =
                (with(Some(true)).count(), with(Some(false)), with(None).count());
            let differing: Vec<String> = differing.map(|row| label(row)).collect();
            let (verdict, mut text) = if !differing.is_empty() {
                ("differs", format!("not the target\u{2019}s own tokens with {}.", differing.join(", ")))
            } else if num_same > 0 {
                let all = if num_same == drafted.len() && num_same > 1 { "all " } else { "" };
                let settings = format!("{all}{}", counted(num_same, "setting"));
                ("same", format!("{settings} gave the target\u{2019}s own tokens, token for token, on every prompt."))
            } else if group.decoding == DecodingName::Sampled {
                (
                    "unchecked",
                    "not compared: two sampled texts differ even where they follow the same distribution.".into(),
                )
            } else {
                ("unchecked", "not checked.".into())
            };
            if num_unchecked > 0 && verdict != "unchecked" {
                text += &format!(" {} not checked.", counted(num_unchecked, "setting"));
            }
            let forgiven = summary.group(group).map_or(0, |known| known.num_forgiven_ties);
            if forgiven > 0 {
                text += &format!(
                    " {} forgiven, where both tokens\u{2019} logits were within {} of the greatest.",
                    counted(forgiven, "mismatch").replace("mismatchs", "mismatches"),
                    rounding(summary.dtype).tie_text()
                );
            }
            context! { name => format!("{}, {}", group.dataset, group.decoding_text()), verdict, text }
        })
        .collect()
}

/// Models, prompts, decoding, machine and versions.
pub(super) fn provenance(summary: &EvaluationSummary) -> Value {
    let pair = |what: &str, text: String| context! { what, text };
    let mut decodings: Vec<String> = Vec::new();
    for GroupSummary { decoding, .. } in &summary.groups {
        let text = decoding_text(decoding);
        if !decodings.contains(&text) {
            decodings.push(text);
        }
    }
    let seeds: Vec<String> = summary.seeds.iter().map(u64::to_string).collect();
    let prompts: Vec<String> = summary
        .datasets
        .iter()
        .map(|dataset| format!("{} ({})", dataset.name, counted(dataset.num_prompts, "prompt")))
        .collect();
    let mut facts = vec![
        pair("Recipe", summary.recipe.clone()),
        pair("Prompts", prompts.join(", ")),
        pair("Decoding", decodings.join("; ")),
        pair("Answers", answers_text(summary)),
        pair(if seeds.len() == 1 { "Seed" } else { "Seeds" }, seeds.join(", ")),
        pair("Machine", summary.machine.clone()),
        pair("Device", device_text(summary)),
        pair("draftsmith", summary.version.clone()),
    ];
    facts.extend(summary.versions.iter().map(|known| pair(&known.name, known.version.clone())));
    let models = summary.models.iter().map(|model| {
        context! {
            role => model.role.as_str(),
            name => model.name.as_str(),
            description => model.description.as_str(),
            hash => model.hash.as_str(),
        }
    });
    context! { facts, models => models.collect::<Vec<_>>() }
}

/// How long answers may be, and how many were given at once.
fn answers_text(summary: &EvaluationSummary) -> String {
    let at_most = format!("at most {}", counted(summary.max_new_tokens, "new token"));
    match summary.batch_size {
        1 => at_most,
        several => format!("{at_most}, {several} prompts side by side"),
    }
}

/// The device, and what it computed in where that is not f32.
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
