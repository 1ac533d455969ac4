//! What the page says in words and tables around its pictures: the finding first, the provenance last.

use draftsmith_theory::Decoding;
use minijinja::{Value, context};

use super::{counted, gain, group_id, number, percent, thousands, times};
use crate::results::{
    DecodingName, EvaluationSummary, Group, GroupSummary, ResultRow, StopRuleName,
};

/// The finding, in a sentence.
pub(super) fn lead(groups: &[Group<'_>]) -> String {
    let ratios: Vec<f64> = groups.iter().filter_map(head_over_fixed).collect();
    if !ratios.is_empty() {
        let num_faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
        let (least, greatest) = range(&ratios);
        let by = if ratios.len() == 1 {
            format!("a difference of {}", gain(least))
        } else {
            format!("differences from {} to {}", gain(least), gain(greatest))
        };
        return format!(
            "At its best threshold the acceptance head is faster than the best fixed candidate length in \
             {num_faster} of {}: {by} in tokens a second.",
            counted(ratios.len(), "comparison"),
        );
    }
    let best = |group: &Group<'_>| (group.best_head().or(group.best_fixed_length()))?.speedup;
    let speedups: Vec<f64> = groups.iter().filter_map(best).collect();
    if speedups.is_empty() {
        return "No speed-up over the target decoding alone was measured.".into();
    }
    let (least, greatest) = range(&speedups);
    let which = if groups.iter().any(|group| group.best_head().is_some()) {
        "the acceptance head at its best threshold"
    } else {
        "the best fixed candidate length"
    };
    if speedups.len() == 1 {
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

fn speed_ratio(row: &ResultRow, over: &ResultRow) -> Option<f64> {
    let ratio = row.tokens_per_second / over.tokens_per_second;
    ratio.is_finite().then_some(ratio)
}

/// One card a group: the best head against the best fixed length and the target alone.
pub(super) fn cards(groups: &[Group<'_>]) -> Vec<Value> {
    let card = |(index, group): (usize, &Group<'_>)| {
        let (fixed, head) = (group.best_fixed_length(), group.best_head());
        let first = head.or(fixed).or(group.plain())?;
        let line = |what: &str, row: Option<&ResultRow>| {
            row.map(|row| {
                context! {
                    what,
                    setting => match row.stop_rule {
                        StopRuleName::None => None,
                        StopRuleName::FixedLength | StopRuleName::RejectionThreshold => Some(row.label()),
                    },
                    speedup => times(row.speedup),
                    speed => number(row.tokens_per_second, 1),
                }
            })
        };
        let lines = [
            line("best head", head),
            line("best fixed", fixed),
            line("target alone", group.plain()),
        ];
        let ratio = head_over_fixed(group);
        Some(context! {
            id => group_id(index),
            dataset => group.dataset,
            decoding => group.decoding_text(),
            speedup => times(first.speedup),
            setting => first.label(),
            gain => ratio.map(gain),
            faster => ratio.is_some_and(|ratio| ratio > 1.0),
            lines => lines.into_iter().flatten().collect::<Vec<_>>(),
        })
    };
    groups.iter().enumerate().filter_map(card).collect()
}

/// The best settings, category by category; None where no rows by category are there, or nothing was drafted.
///
/// The settings are those best over all prompts: choosing anew in every category would flatter both.
pub(super) fn categories(group: &Group<'_>) -> Option<Value> {
    let (fixed, head) = (group.best_fixed_length(), group.best_head());
    let categories = group.categories();
    let any = fixed.or(head).filter(|_| !categories.is_empty())?;
    let cells = |category: &str, like: Option<&ResultRow>| {
        let row = like.and_then(|like| group.in_category(category, like));
        row.map(|row| {
            context! {
                speedup => times(row.speedup),
                discard_rate => number(row.discard_rate, 2),
                compression_rate => number(row.compression_rate, 2),
            }
        })
    };
    let rows = categories.iter().map(|category| {
        let of = |like: Option<&ResultRow>| like.and_then(|like| group.in_category(category, like));
        let ratio = of(head).zip(of(fixed)).and_then(|(head, fixed)| speed_ratio(head, fixed));
        context! {
            name => *category,
            num_prompts => of(Some(any)).map(|row| thousands(row.num_prompts)),
            plain => of(group.plain()).map(|row| number(row.tokens_per_second, 1)),
            fixed => cells(category, fixed),
            head => cells(category, head),
            gain => ratio.map(gain),
        }
    });
    Some(context! {
        fixed => fixed.map(ResultRow::label),
        head => head.map(ResultRow::label),
        rows => rows.collect::<Vec<_>>(),
    })
}

/// The fitted cost models, a row a group that has one.
pub(super) fn costs(groups: &[Group<'_>], summary: &EvaluationSummary) -> Vec<Value> {
    let milliseconds = |seconds: f64| number(1e3 * seconds, 3);
    let row = |group: &Group<'_>| {
        let cost = summary.group(group)?.cost?;
        let misses = group.pooled().filter(|row| row.stop_rule != StopRuleName::None);
        let misses =
            misses.filter_map(|row| Some((row.modelled_speedup? / row.speedup? - 1.0).abs()));
        Some(context! {
            name => format!("{}, {}", group.dataset, group.decoding_text()),
            draft => milliseconds(cost.draft_seconds),
            target => milliseconds(cost.target_seconds),
            row => cost.row_seconds.map(milliseconds),
            r_squared => number(cost.r_squared, 4),
            mean_error => percent(cost.mean_relative_error),
            max_error => percent(cost.max_relative_error),
            miss => percent(misses.fold(f64::NAN, f64::max)),
        })
    };
    groups.iter().filter_map(row).collect()
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
            let differing: Vec<String> = differing.map(|row| row.label()).collect();
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
