//! `report.html`: the results of an evaluation on one page that needs no other file.
//!
//! The page has no script and no font and makes no request: the style sheet is inline, and pictures are
//! inline SVG. Rust code collects the content and computes the geometry of pictures; the templates in
//! `report/` arrange it and format numbers. Pictures are in `pareto` (discard rate against verification
//! rate), `bars` (speed-ups), `curves` (CTAR, acceptance by position), `replay` (gains) and `reliability`
//! (predictions of the head), which share `axis`, `key` and `labels`. `sections` has the other parts of
//! the page. `data` is the page of a data set, with the pictures of `plot`.

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

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value, context};

use self::text::{
    counted, gain, group_id, label, number, percent, rule_label, sentence_case, thousands, times,
};
use crate::error::Result;
use crate::results::{DrafterName, EvaluationSummary, Group, Replay, ResultRow, groups};

/// The size of a picture in CSS pixels. Every picture is drawn in two sizes, and the style sheet shows
/// the one that fits the screen, so that its text is never scaled down.
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

/// Tables with more settings are collapsed.
const SHORT_TABLE: usize = 30;

/// The page for `rows` in their order, with their summary, and with the results of replay if there are
/// any.
///
/// # Errors
/// Never because of the data, as the template belongs to the program.
pub fn render_html(
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
    let dataset = |(name, groups): (&str, Vec<Value>)| {
        let known = summary.datasets.iter().find(|dataset| dataset.name == name);
        let prompts = known.map(|known| counted(known.num_prompts, "prompt"));
        context! { name, prompts, groups }
    };
    let datasets: Vec<Value> = datasets.into_iter().map(dataset).collect();
    let page = context! {
        recipe => summary.recipe.as_str(), version => summary.version.as_str(),
        verdicts => sections::verdicts(&summary.conclusion),
        doubts => Serde(&summary.conclusion.doubts),
        lead => sections::lead(&groups), cards => sections::cards(&groups), datasets,
        replays => replay::sections(&replay.groups),
        predictions => reliability::sections(&replay.predictions),
        costs => sections::costs(&groups, summary),
        lossless => sections::lossless(&groups, summary),
        provenance => sections::provenance(summary),
    };
    let environment = environment()?;
    let template = environment.get_template("page.html")?;
    Ok(template.render(page)?)
}

fn environment() -> Result<Environment<'static>> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    // Escape all values. Included style sheets contain no values.
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.add_filter("number", |value: Option<f64>, decimals| {
        number(value.unwrap_or(f64::NAN), decimals)
    });
    environment.add_filter("percent", |share: Option<f64>| percent(share.unwrap_or(f64::NAN)));
    environment.add_filter("times", times);
    environment.add_filter("gain", gain);
    environment.add_filter("thousands", thousands);
    environment.add_filter("counted", |count, what: &str| counted(count, what));
    environment.add_filter("shade", data::shade);
    for (name, source) in TEMPLATES {
        environment.add_template(name, source)?;
    }
    Ok(environment)
}

/// The files of the pages, under the names by which they include each other.
#[rustfmt::skip]
const TEMPLATES: [(&str, &str); 18] = [
    ("page.html", include_str!("report/page.html")),
    ("group.html", include_str!("report/group.html")),
    ("pareto.html", include_str!("report/pareto.html")),
    ("bars.html", include_str!("report/bars.html")),
    ("acceptance.html", include_str!("report/acceptance.html")),
    ("standard.html", include_str!("report/standard.html")),
    ("lines.html", include_str!("report/lines.html")),
    ("replay.html", include_str!("report/replay.html")),
    ("predictions.html", include_str!("report/predictions.html")),
    ("gains.html", include_str!("report/gains.html")),
    ("data.html", include_str!("report/data.html")),
    ("plot.html", include_str!("report/plot.html")),
    ("head.html", include_str!("report/head.html")),
    ("axes.html", include_str!("report/axes.html")),
    ("series.html", include_str!("report/series.html")),
    ("key.html", include_str!("report/key.html")),
    ("data.css", include_str!("report/data.css")),
    ("style.css", include_str!("report/style.css")),
];

/// The pictures and tables of a group.
fn group_view(group: &Group<'_>, summary: &EvaluationSummary, index: usize) -> Value {
    let known = summary.group(group);
    let paretos = FRAMES.iter().filter_map(|frame| pareto::picture(group, known, *frame));
    let bars = FRAMES.iter().filter_map(|frame| bars::picture(group, *frame));
    let bars: Vec<Value> = bars.collect();
    // Bars taller than two pictures leave space for a third beside them.
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
        id => group_id(index), title => sentence_case(&group.decoding_text()), name => group.name(),
        num_settings => counted(num_settings, "setting"), is_short => num_settings <= SHORT_TABLE,
        paretos => paretos.collect::<Vec<_>>(), bars, bars_are_tall,
        ctar => curves(&curves::CTAR), acceptance => curves(&curves::ACCEPTANCE),
        unconditional => curves(&curves::UNCONDITIONAL),
        standard => standard_views(group), drafters => drafter_views(group),
        promises => known.map(sections::promises).unwrap_or_default(),
        categories => sections::categories(group),
    }
}

/// The table's rows by drafter; plain decoding comes first, without a heading.
fn drafter_views(group: &Group<'_>) -> Vec<Value> {
    let view = |drafter: DrafterName| {
        let rows = group.pooled().filter(|row| row.drafter == drafter);
        let rows: Vec<Value> = rows.map(|row| row_view(group, row)).collect();
        (!rows.is_empty()).then(|| context! { name => sentence_case(&drafter.text()), rows })
    };
    std::iter::once(DrafterName::None).chain(group.drafters()).filter_map(view).collect()
}

/// The fastest row of each drafter and tree; None if nothing was drafted.
fn standard_views(group: &Group<'_>) -> Option<Vec<Value>> {
    let row = |drafter: DrafterName| {
        let rows = group.pooled().filter(|row| row.drafter == drafter);
        let best = rows.max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second))?;
        let (drafter, tokens_per_round) = (label(best), best.tokens_per_round());
        Some(context! { drafter, tokens_per_round, ..Serde(best) })
    };
    let rows: Vec<Value> = group.drafters().into_iter().filter_map(row).collect();
    (!rows.is_empty()).then_some(rows)
}

fn row_view(group: &Group<'_>, row: &ResultRow) -> Value {
    let standing = group.standing(row).map(|standing| standing.mark());
    let mark = match (row.is_tuned, standing) {
        (true, Some(standing)) => Some(format!("tuned, {standing}")),
        (true, None) => Some("tuned".to_owned()),
        (false, standing) => standing.map(str::to_owned),
    };
    let acceptance = row.counts().acceptance_rate();
    context! { label => rule_label(row), mark, acceptance, ..Serde(row) }
}

#[cfg(test)]
mod tests;
