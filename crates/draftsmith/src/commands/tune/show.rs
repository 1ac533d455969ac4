//! What was tuned, as text.

use anyhow::Result;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::Tuning;
use super::calibrate::Calibrating;
use crate::results::{CostSource, DrafterName, Estimate};
use crate::sweep::static_trees::rule_of;
use crate::table::{calibration_text, kind_text, render_scores};
use crate::tuning::{MeasuredCosts, TunedTree};

/// One drafter's table, with the setting that was chosen and those for other runtimes.
///
/// # Errors
/// If the costs do not say what a draft forward takes.
pub(super) fn tuning(tuning: &Tuning, width: Option<usize>) -> Result<String> {
    let costs = &tuning.costs.costs;
    let micro = |seconds: f64| format!("{:.1} µs", seconds * 1e6);
    let mut text = format!(
        "{}, {}: {} prompts, {} tokens\n",
        match tuning.drafter {
            DrafterName::None => "target alone".to_owned(),
            drafter => drafter.text(),
        },
        tuning.decoding.text(),
        tuning.num_prompts,
        tuning.num_tokens,
    );
    text += &format!(
        "a draft forward {}, a target forward of one row {}, a row more {} on average; \n\
         with the head {} more a draft forward, confidence {}, entropy {}\n\
         ({})\n",
        micro(costs.rounds.draft_seconds(costs.drafter)?),
        micro(costs.rounds.verify_seconds(1)),
        micro(costs.rounds.row_seconds()),
        micro(costs.head_seconds),
        micro(costs.confidence_seconds),
        micro(costs.entropy_seconds),
        how_known(tuning.cost_source, &tuning.costs),
    );
    if let Some(calibrating) = &tuning.calibration {
        text += &calibration(calibrating);
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if let Some(width) = width {
        table.set_width(width.try_into().unwrap_or(u16::MAX));
    }
    table.force_no_tty();
    table.set_header(["rule", "setting", "speed-up", "over best K", "95 %", ""]);
    for rule in &tuning.rules {
        let is_chosen = (rule.lookup_first, rule.stop_rule) == (tuning.lookup_first, tuning.chosen);
        let mark = if is_chosen { "chosen" } else { "" };
        let symbol = rule.stop_rule.symbol().unwrap_or_default();
        table.add_row([
            match rule.lookup_first {
                None => symbol.to_owned(),
                Some(first) => format!("lookup {first}, {symbol}"),
            },
            format!("{:.3}", rule.config.parameter())
                .trim_end_matches('0')
                .trim_end_matches('.')
                .into(),
            format!("{:.3}x", rule.speedup),
            percent(rule.gain.value),
            interval(&rule.gain),
            mark.to_owned(),
        ]);
    }
    for column in 1..5 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    text += &format!("{}\n", trimmed(&table.to_string()));
    if !tuning.runtimes.is_empty() {
        text += "\nwithout a head, over best K:\n";
        for setting in &tuning.runtimes {
            text += &format!(
                "  {:>7}  {:<12}  {}\n",
                percent(setting.gain),
                setting.runtime,
                setting.setting
            );
        }
    }
    text += &tuning.tree.as_ref().map(tree).unwrap_or_default();
    match &tuning.export {
        Some(dir) => {
            text += &format!("\nwritten to {}\n\n", dir.join("config.json").display());
        }
        None => text += "\nno head or adapter to write it to\n\n",
    }
    Ok(text)
}

/// A static tree, whose chain is as long as it is deep.
fn tree(tuned: &TunedTree) -> String {
    let TunedTree { shape, num_tried, speedup, best_fixed_length, expected_gain: gain, .. } = tuned;
    format!(
        "\nstatic tree, the best of {num_tried} shapes by replay:\n  \
         {shape}, K = {}  {speedup:.3}x, {} over K = {best_fixed_length} alone ({})\n",
        rule_of(*shape).candidate_length,
        percent(gain.value),
        interval(gain),
    )
}

/// How well costs are known: `known to 2.0 % after 12 passes`, or `costs as given`.
pub(super) fn how_known(source: CostSource, costs: &MeasuredCosts) -> String {
    match source {
        CostSource::Machine => {
            format!("known to {:.1} % after {} passes", costs.uncertainty * 100.0, costs.num_passes)
        }
        other => other.text().to_owned(),
    }
}

/// The head's predictions under every form, and the form that was chosen.
fn calibration(calibrating: &Calibrating) -> String {
    let chosen = calibrating.chosen.as_ref();
    let kind = chosen.map(|chosen| chosen.map.kind());
    let rows = calibrating.tried.iter().map(|tried| {
        let mark = if tried.kind == kind { "chosen" } else { "" };
        (kind_text(tried.kind), &tried.scores, mark)
    });
    let rows: Vec<_> = rows.collect();
    let mut text = format!(
        "\ncalibration of the head's predictions: {}\n",
        calibration_text(chosen.map(|chosen| &chosen.map))
    );
    if !rows.is_empty() {
        text += &render_scores("cross-validated", &rows);
    }
    text + "\n"
}

fn trimmed(table: &str) -> String {
    table.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

fn percent(share: f64) -> String {
    format!("{:+.1} %", share * 100.0)
}

fn interval(estimate: &Estimate) -> String {
    format!("{} to {}", percent(estimate.low), percent(estimate.high))
}
