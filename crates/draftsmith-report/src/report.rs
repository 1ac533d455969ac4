//! The page `report.html`, which shows the results of an evaluation and needs no other file.
//!
//! The page contains no script or font and makes no request. The style sheet is inline, and
//! pictures are inline SVG. Rust code computes numbers and draws pictures, and the templates in
//! `report/` arrange them. The modules `pareto` (discard rate against verification rate), `bars`
//! (speed-ups, gains in replay) and `lines` (CTAR, acceptance by position) draw pictures with the
//! help of `chart` and `look`. `replay` builds the results of replay and the head's predictions,
//! and `sections` the other parts of the page. `data` builds the page of a data set.

mod bars;
mod chart;
pub(crate) mod data;
#[cfg(test)]
pub(crate) mod fixture;
mod heads;
mod labels;
pub(crate) mod lines;
mod look;
mod pareto;
mod replay;
mod sections;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value, context};

use self::look::Look;
use crate::error::Result;
use crate::results::{
    EvaluationSummary, FilledTable, Group, Replay, ReplayRow, ResultRow, groups, in_order,
};
use crate::table::{explained, results_table, standard_table};
use crate::text::{counted, gain, number, percent, sentence_case, times, typeset};

/// The number of settings above which a table is collapsed.
const SHORT_TABLE: usize = 30;

/// Renders the page for `rows` in their order, with their summary, and with the results of replay
/// if there are any.
///
/// # Errors
/// Never because of the data: the template belongs to the program.
pub fn render_html(
    rows: &[ResultRow],
    summary: &EvaluationSummary,
    replay: &Replay,
) -> Result<String> {
    let groups = groups(rows);
    let views: Vec<(&str, Value)> = groups
        .iter()
        .enumerate()
        .map(|(index, group)| (group.dataset, group_view(group, summary, group_id(index))))
        .collect();
    let dataset = |name: &str| {
        let known = summary.datasets.iter().find(|dataset| dataset.name == name);
        let prompts = known.map(|known| counted(known.num_prompts, "prompt"));
        let groups =
            views.iter().filter(|(dataset, _)| *dataset == name).map(|(_, view)| view.clone());
        context! { name, prompts, groups => groups.collect::<Vec<_>>() }
    };
    let datasets = in_order(groups.iter().map(|group| group.dataset)).into_iter().map(dataset);
    let decodings = summary.groups.iter().map(|known| sections::decoding_text(&known.decoding));
    let drafted = groups.iter().flat_map(Group::drafted).map(ResultRow::label);
    let replayed = replay.groups.iter().flat_map(|group| &group.rows).map(ReplayRow::label);
    let page = context! {
        summary => Serde(summary), version => summary.version.as_str(),
        decodings => in_order(decodings), tie_text => summary.dtype.tie_text(),
        serving => sections::serving(&summary.conclusion),
        verdicts => sections::verdicts(&summary.conclusion),
        symbols => symbols(drafted), replayed_symbols => symbols(replayed),
        lead => sections::lead(&groups), cards => sections::cards(&groups),
        datasets => datasets.collect::<Vec<_>>(),
        replays => replay::replays(&replay.groups),
        predictions => replay::predictions(&replay.predictions),
        heads => heads::section(replay.heads.as_ref()),
        papers => summary.papers.iter().map(FilledTable::view).collect::<Vec<_>>(),
        costs => sections::costs(&groups, summary),
        lossless => sections::lossless(&groups, summary),
    };
    // Texts that terminals show too have backticks.
    Ok(render("page.html", page)?.replace('`', ""))
}

/// Draws the speed chart of the first group with a drafter as an SVG file that needs no other file;
/// `None` if nothing was drafted.
///
/// # Errors
/// Never because of the data: the template belongs to the program.
pub fn render_speed_svg(rows: &[ResultRow], summary: &EvaluationSummary) -> Result<Option<String>> {
    let groups = groups(rows);
    let group = groups.iter().find(|group| group.best().is_some());
    let picture =
        group.and_then(|group| bars::speedups(group, &summary.conclusion).picture("speed"));
    let view = |picture| context! { picture, summary => Serde(summary) };
    picture.map(|picture| render("speed.svg", view(picture))).transpose()
}

/// Explains the symbols in the labels of settings, in one line; `None` without symbols.
fn symbols(labels: impl Iterator<Item = String>) -> Option<String> {
    explained(&labels.collect::<Vec<_>>().join("\n"), Some(usize::MAX))
}

/// Renders a page of [`TEMPLATES`].
fn render(template: &str, page: Value) -> Result<String> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    // All values are escaped. Included style sheets contain no values.
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.add_filter("shade", data::shade);
    environment.add_filter("number", |value: Option<f64>, decimals| {
        typeset(&number(value.unwrap_or(f64::NAN), decimals))
    });
    environment.add_filter("times", |ratio: Option<f64>| typeset(&times(ratio)));
    environment.add_filter("gain", |share: f64| typeset(&gain(share)));
    environment.add_filter("percent", |share: f64| typeset(&percent(share, 1)));
    environment.add_filter("counted", |count, what: &str| counted(count, what));
    for (name, source) in TEMPLATES {
        environment.add_template(name, source)?;
    }
    Ok(environment.get_template(template)?.render(page)?)
}

/// The files of the pages, under the names by which they include each other.
const TEMPLATES: [(&str, &str); 15] = [
    ("page.html", include_str!("report/page.html")),
    ("group.html", include_str!("report/group.html")),
    ("picture.html", include_str!("report/picture.html")),
    ("elements.svg", include_str!("report/elements.svg")),
    ("speed.svg", include_str!("report/speed.svg")),
    ("key.html", include_str!("report/key.html")),
    ("replay.html", include_str!("report/replay.html")),
    ("heads.html", include_str!("report/heads.html")),
    ("predictions.html", include_str!("report/predictions.html")),
    ("data.html", include_str!("report/data.html")),
    ("head.html", include_str!("report/head.html")),
    ("table.html", include_str!("report/table.html")),
    ("data.css", include_str!("report/data.css")),
    ("picture.css", include_str!("report/picture.css")),
    ("style.css", include_str!("report/style.css")),
];

/// Returns the HTML id of a group by index. It contains no names, which may hold any character.
fn group_id(index: usize) -> String {
    format!("group-{}", index + 1)
}

/// Builds the data of a group's pictures and tables.
fn group_view(group: &Group<'_>, summary: &EvaluationSummary, id: String) -> Value {
    let known = summary.group(group);
    let [ctar, acceptance, unconditional, length] =
        lines::curves(group, &id).map(|plot| plot.view());
    let entry = |row: &ResultRow| {
        let name = row.stop_rule.symbol().unwrap_or_default().to_owned();
        (sentence_case(&row.drafter.text()), Look::of(row, group), name)
    };
    let num_settings = group.pooled().count();
    context! {
        title => sentence_case(&group.decoding_text()), name => group.name(),
        num_settings => counted(num_settings, "setting"), is_short => num_settings <= SHORT_TABLE,
        pareto => pareto::view(group, known, &format!("{id}-pareto")),
        bars => bars::speedups(group, &summary.conclusion).picture(&format!("{id}-bars")),
        key => chart::key(group.best_of_rules().into_iter().map(entry)),
        ctar, acceptance, unconditional, length,
        standard => standard_table(group).view(),
        settings => results_table(group).view(),
        promises => known.map(sections::promises).unwrap_or_default(),
        categories => sections::categories(group),
        id,
    }
}

#[cfg(test)]
mod tests;
