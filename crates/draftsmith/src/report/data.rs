//! The page of a data set: how much there is of what, how its draft is accepted, and some of its rows.

use anyhow::{Context, Result};
use minijinja::{Value, context};

use super::plot::Plot;
use super::text::{counted, number, percent, thousands};
use super::{FRAMES, environment};

/// What the page says.
#[derive(Debug, Clone)]
pub(crate) struct DataPage {
    pub(crate) name: String,
    pub(crate) version: &'static str,
    pub(crate) num_rows: usize,
    pub(crate) num_tokens: usize,
    /// One of each source, and of more than one the sum of all behind them.
    pub(crate) sources: Vec<SourceFigures>,
    pub(crate) plots: Vec<Plot>,
    pub(crate) rows: Vec<ShownRow>,
    /// What it was made of, as name and value.
    pub(crate) provenance: Vec<(String, String)>,
}

/// A source's figures; NaN where there is no draft.
#[derive(Debug, Clone)]
pub(crate) struct SourceFigures {
    pub(crate) name: String,
    pub(crate) num_rows: usize,
    pub(crate) num_tokens: usize,
    pub(crate) mean_prompt_len: f64,
    pub(crate) mean_response_len: f64,
    pub(crate) longest_response: usize,
    /// The share of responses that ended by an end token or a stop string.
    pub(crate) share_ended: f64,
    pub(crate) overlap: f64,
    pub(crate) acceptance: f64,
    pub(crate) agreement: f64,
}

/// A row with its tokens.
#[derive(Debug, Clone)]
pub(crate) struct ShownRow {
    pub(crate) id: String,
    pub(crate) finish: String,
    pub(crate) prompt: String,
    pub(crate) tokens: Vec<ShownToken>,
}

/// A token of a response.
#[derive(Debug, Clone)]
pub(crate) struct ShownToken {
    pub(crate) text: String,
    /// Σ min(p, q) where it stands: the chance that what the draft draws there is accepted.
    pub(crate) overlap: Option<f32>,
    /// All that is known of it.
    pub(crate) title: String,
}

/// The page.
///
/// # Errors
/// None that data can cause: the template is ours.
pub(crate) fn render_data_html(page: &DataPage) -> Result<String> {
    let environment = environment()?;
    let template = environment.get_template("data.html")?;
    let view = context! {
        name => page.name.as_str(),
        version => page.version,
        lead => format!(
            "{} of {} in {}.",
            counted(page.num_rows, "response"),
            counted(page.num_tokens, "token"),
            counted(page.sources.len().saturating_sub(1).max(1), "source"),
        ),
        sources => page.sources.iter().map(source).collect::<Vec<_>>(),
        has_draft => page.sources.iter().any(|source| source.overlap.is_finite()),
        plots => page.plots.iter().filter_map(|plot| plot.view(&FRAMES)).collect::<Vec<_>>(),
        rows => page.rows.iter().map(row).collect::<Vec<_>>(),
        provenance => page.provenance.iter()
            .map(|(what, text)| context! { what, text })
            .collect::<Vec<_>>(),
    };
    template.render(view).context("the page's template does not fit its data")
}

fn source(source: &SourceFigures) -> Value {
    context! {
        name => source.name.as_str(),
        num_rows => thousands(source.num_rows),
        num_tokens => thousands(source.num_tokens),
        mean_prompt_len => number(source.mean_prompt_len, 1),
        mean_response_len => number(source.mean_response_len, 1),
        longest_response => thousands(source.longest_response),
        share_ended => percent(source.share_ended),
        overlap => number(source.overlap, 3),
        acceptance => number(source.acceptance, 3),
        agreement => number(source.agreement, 3),
    }
}

fn row(row: &ShownRow) -> Value {
    let token = |token: &ShownToken| {
        context! {
            text => token.text.as_str(),
            title => token.title.as_str(),
            tenth => token.overlap.map(|overlap| (overlap.clamp(0.0, 1.0) * 10.0).min(9.0) as u8),
        }
    };
    context! {
        id => row.id.as_str(),
        finish => row.finish.as_str(),
        prompt => row.prompt.as_str(),
        num_tokens => counted(row.tokens.len(), "token"),
        tokens => row.tokens.iter().map(token).collect::<Vec<_>>(),
    }
}
