//! `report.html`: what an evaluation found, on one page that needs nothing else.
//!
//! No script, no font, no request: the style sheet stands in the page and the pictures are inline
//! SVG. This file says what is on the page; its template says where. The pictures' geometry is
//! worked out in `report/`: `pareto` (discard rate against verification rate), `bars` (speed-ups),
//! `curves` (CTAR, acceptance by position), `replay` (gains, with their tables) and `reliability` (how
//! good the head's predictions are), with `axis`, `key` and `labels` under them; `sections` holds what
//! comes before and after the pictures. `data` is the page of a data set, with the pictures of `plot`.

mod axis;
mod bars;
mod curves;
pub(crate) mod data;
#[cfg(test)]
pub(crate) mod fixture;
mod key;
mod labels;
mod pareto;
pub(crate) mod plot;
mod reliability;
mod replay;
mod sections;
mod text;

use anyhow::{Context, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value, context};

use self::text::{
    counted, group_id, label, number, percent, rule_label, sentence_case, thousands, times,
};
use crate::results::{DrafterName, EvaluationSummary, Group, Replay, ResultRow, groups};

/// A picture's size in CSS pixels, its text about 12 of them. Every picture is drawn twice, and the
/// style sheet shows the one that fits: text scaled down with a wide picture could not be read on a
/// telephone.
#[derive(Debug, Clone, Copy)]
struct Frame {
    name: &'static str,
    width: f64,
    pareto_height: f64,
    curves_height: f64,
}

const FRAMES: [Frame; 2] = [
    Frame { name: "wide", width: 600.0, pareto_height: 400.0, curves_height: 300.0 },
    Frame { name: "narrow", width: 350.0, pareto_height: 330.0, curves_height: 260.0 },
];

/// A table of more settings is folded up.
const SHORT_TABLE: usize = 30;

/// The page for `rows`, in the order they are given, what they were measured with, and what replay
/// found; of no replay it says nothing.
///
/// # Errors
/// None that rows, summary and replays can cause: the template is ours.
pub(crate) fn render_html(
    rows: &[ResultRow],
    summary: &EvaluationSummary,
    replay: &Replay,
) -> Result<String> {
    let groups = groups(rows);
    let mut datasets: Vec<(&str, Vec<Value>)> = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        let view = group_view(group, summary, index);
        match datasets.iter_mut().find(|(name, _)| *name == group.dataset) {
            Some((_, views)) => views.push(view),
            None => datasets.push((group.dataset, vec![view])),
        }
    }
    let datasets: Vec<Value> = datasets
        .into_iter()
        .map(|(name, groups)| {
            let known = summary.datasets.iter().find(|dataset| dataset.name == name);
            context! {
                name,
                prompts => known.map(|known| counted(known.num_prompts, "prompt")),
                groups,
            }
        })
        .collect();
    let page = context! {
        recipe => summary.recipe.as_str(),
        version => summary.version.as_str(),
        lead => sections::lead(&groups),
        cards => sections::cards(&groups),
        datasets,
        replays => replay::sections(&replay.groups),
        predictions => reliability::sections(&replay.predictions),
        costs => sections::costs(&groups, summary),
        lossless => sections::lossless(&groups, summary),
        provenance => sections::provenance(summary),
    };
    let environment = environment()?;
    let template = environment.get_template("page.html")?;
    template.render(page).context("the report's template does not fit its data")
}

fn environment() -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    // Every value is text to be escaped, the style sheet's file holds none.
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    for (name, source) in [
        ("page.html", include_str!("report/page.html")),
        ("group.html", include_str!("report/group.html")),
        ("pareto.html", include_str!("report/pareto.html")),
        ("bars.html", include_str!("report/bars.html")),
        ("acceptance.html", include_str!("report/acceptance.html")),
        ("standard.html", include_str!("report/standard.html")),
        ("curves.html", include_str!("report/curves.html")),
        ("replay.html", include_str!("report/replay.html")),
        ("predictions.html", include_str!("report/predictions.html")),
        ("reliability.html", include_str!("report/reliability.html")),
        ("gains.html", include_str!("report/gains.html")),
        ("data.html", include_str!("report/data.html")),
        ("plot.html", include_str!("report/plot.html")),
        ("data.css", include_str!("report/data.css")),
        ("head.html", include_str!("report/head.html")),
        ("axes.html", include_str!("report/axes.html")),
        ("series.html", include_str!("report/series.html")),
        ("key.html", include_str!("report/key.html")),
        ("style.css", include_str!("report/style.css")),
    ] {
        environment.add_template(name, source)?;
    }
    Ok(environment)
}

/// One dataset under one way of decoding: its pictures and tables.
fn group_view(group: &Group<'_>, summary: &EvaluationSummary, index: usize) -> Value {
    let known = summary.group(group);
    let paretos = FRAMES.iter().filter_map(|frame| pareto::picture(group, known, *frame));
    let bars = FRAMES.iter().filter_map(|frame| bars::picture(group, *frame));
    let bars: Vec<Value> = bars.collect();
    // Beside bars that reach past two pictures there is room for a third.
    let [Frame { pareto_height, curves_height, .. }, ..] = FRAMES;
    let bars_are_tall = bars
        .first()
        .and_then(|wide| f64::try_from(wide.get_attr("height").ok()?).ok())
        .is_some_and(|height| height > pareto_height + curves_height);
    let curves = |curves: &curves::Curves| {
        let charts = FRAMES.iter().filter_map(|frame| curves::picture(group, curves, *frame));
        context! { name => curves.name, charts => charts.collect::<Vec<_>>() }
    };
    let num_settings = group.pooled().count();
    context! {
        id => group_id(index),
        num_settings => counted(num_settings, "setting"),
        is_short => num_settings <= SHORT_TABLE,
        title => sentence_case(&group.decoding_text()),
        name => format!("{}, {}", group.dataset, group.decoding_text()),
        paretos => paretos.collect::<Vec<_>>(),
        bars,
        bars_are_tall,
        ctar => curves(&curves::CTAR),
        acceptance => curves(&curves::ACCEPTANCE),
        unconditional => curves(&curves::UNCONDITIONAL),
        standard => standard_views(group),
        drafters => drafter_views(group),
        promises => known.map(sections::promises).unwrap_or_default(),
        categories => sections::categories(group),
    }
}

/// The table's rows under their drafters, the target alone first and under nothing.
fn drafter_views(group: &Group<'_>) -> Vec<Value> {
    let view = |drafter: DrafterName| {
        let rows = group.pooled().filter(|row| row.drafter == drafter);
        let rows: Vec<Value> = rows.map(|row| row_view(group, row)).collect();
        (!rows.is_empty()).then(|| context! { name => sentence_case(&drafter.text()), rows })
    };
    std::iter::once(DrafterName::None).chain(group.drafters()).filter_map(view).collect()
}

/// Each drafter and tree at its fastest setting, at standard costs; None where nothing was drafted.
fn standard_views(group: &Group<'_>) -> Option<Vec<Value>> {
    let row = |drafter: DrafterName| {
        let rows = group.pooled().filter(|row| row.drafter == drafter);
        let best = rows.max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second))?;
        let at = |position: usize| {
            let share = best.unconditional_acceptance.get(position - 1);
            number(share.copied().unwrap_or(f64::NAN), 2)
        };
        Some(context! {
            drafter => label(best),
            tokens_per_round => number(best.tokens_per_round(), 2),
            accepted => [at(1), at(2), at(4), at(8)],
            by_size => times(best.improvement_by_size),
            by_time => times(best.improvement_by_time),
            speedup => times(best.speedup),
        })
    };
    let rows: Vec<Value> = group.drafters().into_iter().filter_map(row).collect();
    (!rows.is_empty()).then_some(rows)
}

fn row_view(group: &Group<'_>, row: &ResultRow) -> Value {
    let counts = row.counts();
    context! {
        label => rule_label(row),
        mark => group.standing(row).map(|standing| standing.mark()),
        tokens_per_second => number(row.tokens_per_second, 1),
        speedup => times(row.speedup),
        modelled => times(row.modelled_speedup),
        discard_rate => number(row.discard_rate, 3),
        verification_rate => number(row.verification_rate, 3),
        compression_rate => number(row.compression_rate, 2),
        acceptance => percent(counts.acceptance_rate()),
        num_tokens => thousands(row.num_tokens),
        num_target_forwards => thousands(row.num_target_forwards),
        num_draft_forwards => thousands(row.num_draft_forwards),
        lossless => match row.lossless {
            Some(true) => "yes",
            Some(false) => "no",
            None => "\u{2013}",
        },
        mismatch => row.lossless == Some(false),
    }
}

#[cfg(test)]
mod tests;
