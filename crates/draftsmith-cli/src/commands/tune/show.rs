//! Formats the results of `tune` as text.

use anyhow::Result;
use draftsmith_report::{
    CostSource, DrafterName, explained, fastest_ways, plain_table, rule_label, serving_text,
    signed_percent, times_text, wrapped,
};
use draftsmith_theory::{Estimate, StopRuleName};

use draftsmith_tune::tuner::baseline::RuleGain;
use draftsmith_tune::tuner::{RaceOutcome, RacedSetting, Tuning, TuningBasis};

/// Formats a table of one drafter's rules, with the chosen setting and the equivalent settings of
/// other runtimes.
///
/// # Errors
/// If the costs lack the time of a draft forward.
pub(super) fn tuning(tuning: &Tuning, width: Option<usize>) -> Result<String> {
    let basis = &tuning.basis;
    let costs = &basis.costs.costs;
    let micro = |seconds: f64| format!("{:.1} µs", seconds * 1e6);
    let mut text = format!(
        "{}, {}: {} prompts, {} tokens\n",
        match basis.drafter {
            DrafterName::None => "target alone".to_owned(),
            drafter => drafter.text(),
        },
        basis.decoding.text(),
        basis.num_prompts,
        basis.num_tokens,
    );
    let paragraph = format!(
        "A draft forward takes {}, a target forward of one row {}, and each further row {} on average. The head adds \
         {} to a draft forward, the confidence {}, the entropy {}. {}",
        micro(costs.rounds.draft_seconds(costs.drafter)?),
        micro(costs.rounds.verify_seconds(1)),
        micro(costs.rounds.row_seconds()),
        micro(costs.head_seconds),
        micro(costs.confidence_seconds),
        micro(costs.entropy_seconds),
        how_known(basis),
    );
    text += &(wrapped(&paragraph, width).join("\n") + "\n");
    let rules = rules(tuning, width);
    text += &format!("{rules}\n");
    text += &explained(&rules, width).map(|words| words + "\n").unwrap_or_default();
    text += &tuning.race.as_ref().map(|race| raced(race, tuning)).unwrap_or_default();
    text += &tuning.look_ups.map(|found| found.text() + "\n").unwrap_or_default();
    for it in &tuning.by_source {
        text += &format!(
            "on {}, {} prompts: {} over K = {} ({})\n",
            it.source,
            it.num_prompts,
            signed_percent(it.gain.value),
            best_length(tuning),
            interval(&it.gain)
        );
    }
    text += &advice(tuning).map(|advice| format!("\n{advice}\n")).unwrap_or_default();
    let ways = fastest_ways(&tuning.ways);
    if !ways.is_empty() {
        text += &format!("\nin other programs, at {}:\n", basis.cost_source.text());
        text += &serving_text(&ways, width);
    }
    text += &match &tuning.export {
        Some(dir) => format!(
            "\nwritten to {}: `generate --rule tuned={}` takes it\n\n",
            dir.join("config.json").display(),
            dir.display()
        ),
        None => "\nno head or adapter to write it to\n\n".to_owned(),
    };
    Ok(text)
}

/// Advises against speculation if even the best rule is slower than the target alone. `None`
/// otherwise.
fn advice(tuning: &Tuning) -> Option<String> {
    if tuning.share_accepted == Some(0.0) {
        return Some("never accepted: do not speculate with it, or train longer".to_owned());
    }
    let best = tuning.rules.iter().map(|rule| rule.speedup).reduce(f64::max)?;
    (best <= 1.0).then(|| {
        format!(
            "no rule is faster than the target alone ({}): do not speculate with it, or train longer",
            times_text(best)
        )
    })
}

/// Returns the best fixed candidate length; NaN if no fixed length was tried.
fn best_length(tuning: &Tuning) -> f64 {
    let is_fixed = |rule: &&RuleGain| rule.stop_rule == StopRuleName::FixedLength;
    tuning.rules.iter().find(is_fixed).map_or(f64::NAN, |rule| rule.config.parameter())
}

/// Formats the table of rules.
fn rules(tuning: &Tuning, width: Option<usize>) -> String {
    let rows = tuning.rules.iter().map(|rule| {
        let is_chosen = (rule.lookup_first, rule.stop_rule) == (tuning.lookup_first, tuning.chosen);
        let mark = if is_chosen { "chosen" } else { "" };
        [
            rule_label(rule.lookup_first, &rule.config),
            format!("{:.3}x", rule.speedup),
            signed_percent(rule.gain.value),
            interval(&rule.gain),
            mark.to_owned(),
        ]
    });
    let heading = ["rule", "speed-up", "over best K", "95 %", ""];
    plain_table(heading, rows, [1, 2, 3], (1, 1), width)
}

/// Formats the result of a race, one line per setting.
fn raced(race: &RaceOutcome, tuning: &Tuning) -> String {
    let label = |it: &RacedSetting| rule_label(it.lookup_first, &it.config);
    let widest = race.settings.iter().map(|it| label(it).chars().count()).max().unwrap_or(0);
    let lines = race.settings.iter().map(|it| {
        let Estimate { value, low, high } = it.speedup;
        let label = label(it);
        format!("  {label:widest$}  {value:.3}x  {low:.3} to {high:.3}\n")
    });
    format!(
        "\nin a race over {} answers each, beside the target alone (95 %):\n{}no other may be faster than the winner by more than {:.1} %\n",
        race.num_laps,
        lines.collect::<String>(),
        100.0 * tuning.basis.lost_by_costs
    )
}

/// Describes how precise the costs are: `known to 2.0 % after 12 passes`, or `costs as given`.
fn how_known(TuningBasis { cost_source, costs, .. }: &TuningBasis) -> String {
    match cost_source {
        CostSource::Machine => format!(
            "These times are known to {:.1} % after {} passes.",
            costs.uncertainty * 100.0,
            costs.num_passes
        ),
        other => format!("These are {}.", other.text()),
    }
}

fn interval(estimate: &Estimate) -> String {
    format!("{} to {}", signed_percent(estimate.low), signed_percent(estimate.high))
}
