//! What the page says in words and tables around its pictures: the finding first, the provenance last.

use draftsmith_theory::Decoding;
use minijinja::{Value, context};

use super::{counted, gain, group_id, label, number, percent, thousands, times};
use crate::results::{
    CostSummary, DecodingName, DrafterName, EvaluationSummary, Group, GroupSummary, ResultRow,
    Road, StopRuleName,
};

/// The finding, in a sentence.
pub(super) fn lead(groups: &[Group<'_>]) -> String {
    let comparisons = [
        (
            head_over_fixed as fn(&Group<'_>) -> Option<f64>,
            "At its best threshold the acceptance head is faster than the best fixed candidate length in",
        ),
        (
            self_over_separate,
            "Self-drafting at its best is faster than the separate draft at its best in",
        ),
    ];
    let told = comparisons.map(|(ratio, what)| {
        let ratios: Vec<f64> = groups.iter().filter_map(ratio).collect();
        let num_faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
        let (least, greatest) = range(&ratios);
        let by = if ratios.len() == 1 {
            format!("a difference of {}", gain(least))
        } else {
            format!("differences from {} to {}", gain(least), gain(greatest))
        };
        let of = counted(ratios.len(), "comparison");
        (!ratios.is_empty())
            .then(|| format!("{what} {num_faster} of {of}: {by} in tokens a second."))
    });
    let told: Vec<String> = told.into_iter().flatten().collect();
    if !told.is_empty() {
        return told.join(" ");
    }
    let bests: Vec<(&ResultRow, f64)> =
        groups.iter().filter_map(|group| Some((group.best()?, group.best()?.speedup?))).collect();
    if bests.is_empty() {
        return "No speed-up over the target decoding alone was measured.".into();
    }
    let (least, greatest) = range(&bests.iter().map(|(_, speedup)| *speedup).collect::<Vec<_>>());
    let all = |of: fn(&ResultRow) -> bool| bests.iter().all(|(row, _)| of(row));
    let which = if all(|row| row.stop_rule == StopRuleName::RejectionThreshold) {
        "the acceptance head at its best threshold"
    } else if all(|row| row.drafter.road() == Some(Road::SelfDraft)) {
        "self-drafting at its best setting"
    } else if all(|row| row.stop_rule == StopRuleName::FixedLength) {
        "the best fixed candidate length"
    } else {
        "its best setting"
    };
    if bests.len() == 1 {
        format!("With {which} the target decodes {} as fast as alone.", times(Some(least)))
    } else {
        let (least, greatest) = (times(Some(least)), times(Some(greatest)));
        format!("With {which} the target decodes {least} to {greatest} as fast as alone.")
    }
}

fn range(values: &[f64]) -> (f64, f64) {
    let fold = |start, of: fn(f64, f64) -> f64| values.iter().copied().fold(start, of);
    (fold(f64::INFINITY, f64::min), fold(f64::NEG_INFINITY, f64::max))
}

/// Tokens a second of the best head over those of the best fixed length.
fn head_over_fixed(group: &Group<'_>) -> Option<f64> {
    speed_ratio(group.best_head()?, group.best_fixed_length()?)
}

/// Tokens a second of the best self-draft over those of the best separate draft.
fn self_over_separate(group: &Group<'_>) -> Option<f64> {
    speed_ratio(group.best_of_road(Road::SelfDraft)?, group.best_of_road(Road::SeparateDraft)?)
}

fn speed_ratio(row: &ResultRow, over: &ResultRow) -> Option<f64> {
    let ratio = row.tokens_per_second / over.tokens_per_second;
    ratio.is_finite().then_some(ratio)
}

/// What is compared in words: the best fixed length, the best head, the best self-draft.
fn compared<'a>(group: &Group<'a>) -> Vec<(&'static str, &'a ResultRow)> {
    [
        ("best self-draft", group.best_of_road(Road::SelfDraft)),
        ("best head", group.best_head()),
        ("best fixed", group.best_fixed_length()),
    ]
    .into_iter()
    .filter_map(|(what, row)| Some((what, row?)))
    .collect()
}

/// One card a group: the fastest setting, and the best of each kind against the target alone.
pub(super) fn cards(groups: &[Group<'_>]) -> Vec<Value> {
    let card = |(index, group): (usize, &Group<'_>)| {
        let first = group.best().or(group.plain())?;
        let line = |(what, row): (&str, &ResultRow)| {
            context! {
                what,
                setting => (row.drafter != DrafterName::None).then(|| label(row)),
                speedup => times(row.speedup),
                speed => number(row.tokens_per_second, 1),
            }
        };
        let gains = [
            (head_over_fixed(group), "head over fixed length"),
            (self_over_separate(group), "self-draft over separate"),
        ];
        let gains = gains.into_iter().filter_map(|(ratio, what)| {
            Some(context! { text => gain(ratio?), faster => ratio? > 1.0, what })
        });
        let mut lines: Vec<Value> = compared(group).into_iter().map(line).collect();
        lines.extend(group.plain().map(|plain| line(("target alone", plain))));
        Some(context! {
            id => group_id(index),
            dataset => group.dataset,
            decoding => group.decoding_text(),
            speedup => times(first.speedup),
            setting => label(first),
            gains => gains.collect::<Vec<_>>(),
            lines,
        })
    };
    groups.iter().enumerate().filter_map(card).collect()
}

/// The best settings, category by category; None where no rows by category are there, or nothing was drafted.
///
/// The settings are those best over all prompts: choosing anew in every category would flatter them.
pub(super) fn categories(group: &Group<'_>) -> Option<Value> {
    let categories = group.categories();
    let mut settings: Vec<&ResultRow> = compared(group).into_iter().map(|(_, row)| row).collect();
    // In the order of the other tables.
    settings.reverse();
    let any = *settings.first().filter(|_| !categories.is_empty())?;
    let (fixed, head) = (group.best_fixed_length(), group.best_head());
    let rows = categories.iter().map(|category| {
        let of = |like: Option<&ResultRow>| like.and_then(|like| group.in_category(category, like));
        let cells = settings.iter().map(|like| {
            of(Some(like)).map(|row| {
                context! {
                    speedup => times(row.speedup),
                    discard_rate => number(row.discard_rate, 2),
                    compression_rate => number(row.compression_rate, 2),
                }
            })
        });
        let ratio = of(head).zip(of(fixed)).and_then(|(head, fixed)| speed_ratio(head, fixed));
        context! {
            name => *category,
            num_prompts => of(Some(any)).map(|row| thousands(row.num_prompts)),
            plain => of(group.plain()).map(|row| number(row.tokens_per_second, 1)),
            cells => cells.collect::<Vec<_>>(),
            gain => ratio.map(gain),
        }
    });
    Some(context! {
        settings => settings.iter().map(|row| label(row)).collect::<Vec<_>>(),
        compares_head => fixed.is_some() && head.is_some(),
        rows => rows.collect::<Vec<_>>(),
    })
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
                    " {} forgiven, where the target\u{2019}s top two logits were equal to within 1e-5.",
                    counted(forgiven, "mismatch").replace("mismatchs", "mismatches")
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
        pair("Answers", format!("at most {}", counted(summary.max_new_tokens, "new token"))),
        pair(if seeds.len() == 1 { "Seed" } else { "Seeds" }, seeds.join(", ")),
        pair("Machine", summary.machine.clone()),
        pair("Device", summary.device.clone()),
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

fn decoding_text(decoding: &Decoding) -> String {
    match decoding {
        Decoding::Greedy => "greedy".into(),
        Decoding::Sampled(sampling) => {
            let mut text = format!("sampled at T = {}", sampling.temperature);
            if sampling.top_p < 1.0 {
                text += &format!(", top-p {}", sampling.top_p);
            }
            if let Some(top_k) = sampling.top_k {
                text += &format!(", top-k {top_k}");
            }
            text
        }
    }
}
