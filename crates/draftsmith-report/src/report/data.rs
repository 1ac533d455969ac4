//! The page of a data set: its size, how often the draft is accepted, and some of its rows.

use anyhow::{Context, Result};
use minijinja::context;
use minijinja::value::Serde;
use serde::Serialize;

use super::plot::Plot;
use super::text::counted;
use super::{FRAMES, environment};

/// The content of the page.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DataPage {
    pub(crate) name: String,
    pub(crate) version: &'static str,
    pub(crate) num_rows: usize,
    pub(crate) num_tokens: usize,
    /// One entry for each source, then their total if there are several.
    pub(crate) sources: Vec<SourceFigures>,
    #[serde(skip)]
    pub(crate) plots: Vec<Plot>,
    pub(crate) rows: Vec<ShownRow>,
    /// Names and values.
    pub(crate) provenance: Vec<(String, String)>,
}

/// The figures of a source. The last three are NaN without a draft.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct SourceFigures {
    pub(crate) name: String,
    pub(crate) num_rows: usize,
    pub(crate) num_tokens: usize,
    pub(crate) mean_prompt_len: f64,
    pub(crate) mean_response_len: f64,
    pub(crate) longest_response: usize,
    /// The share of responses that ended with an end token or a stop string.
    pub(crate) share_ended: f64,
    pub(crate) overlap: f64,
    pub(crate) acceptance: f64,
    pub(crate) agreement: f64,
}

/// A row with its tokens.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ShownRow {
    pub(crate) id: String,
    pub(crate) finish: String,
    pub(crate) prompt: String,
    pub(crate) tokens: Vec<ShownToken>,
}

/// A token of a response.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ShownToken {
    pub(crate) text: String,
    /// Σ min(p, q) at the token: the probability that the draft's candidate is accepted.
    pub(crate) overlap: Option<f32>,
    /// Shown when the pointer is over the token.
    pub(crate) title: String,
}

/// The page.
///
/// # Errors
/// Never because of the data, as the template belongs to the program.
pub(crate) fn render_data_html(page: &DataPage) -> Result<String> {
    let environment = environment()?;
    let template = environment.get_template("data.html")?;
    let view = context! {
        lead => format!(
            "{} of {} in {}.",
            counted(page.num_rows, "response"),
            counted(page.num_tokens, "token"),
            counted(page.sources.len().saturating_sub(1).max(1), "source"),
        ),
        has_draft => page.sources.iter().any(|source| source.overlap.is_finite()),
        plots => page.plots.iter().filter_map(|plot| plot.view(&FRAMES)).collect::<Vec<_>>(),
        ..Serde(page)
    };
    template.render(view).context("the page's template does not fit its data")
}

/// The class of a token's background: the tenth from 0 to 9 that its overlap lies in.
pub(super) fn shade(overlap: f32) -> u8 {
    (overlap.clamp(0.0, 1.0) * 10.0).min(9.0) as u8
}
