//! The page of a data set, with its size, the acceptance of the draft's tokens, and some rows.

use minijinja::context;
use minijinja::value::Serde;
use serde::Serialize;

use super::lines::Plot;
use super::render;
use crate::error::Result;
use crate::table::{Line, Table};
use crate::text::{counted, number, percent, thousands};

/// The content of the page of a data set. Without rows, it is that of a training: its curves and scores.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DataPage {
    /// The directory or file of the data set.
    pub name: String,
    /// The version of this program.
    pub version: &'static str,
    /// The number of rows.
    pub num_rows: usize,
    /// The number of response tokens.
    pub num_tokens: usize,
    /// The figures of each source, then the total if there are several sources.
    #[serde(skip)]
    pub sources: Vec<SourceFigures>,
    /// The pictures.
    #[serde(skip)]
    pub plots: Vec<Plot>,
    /// The rows that are shown.
    pub rows: Vec<ShownRow>,
    /// The provenance, as names with values.
    pub provenance: Vec<(String, String)>,
}

/// The figures of a source. The last three are NaN without a draft.
#[derive(Debug, Clone)]
pub struct SourceFigures {
    /// The source's name.
    pub name: String,
    /// The number of rows.
    pub num_rows: usize,
    /// The number of response tokens.
    pub num_tokens: usize,
    /// The mean number of tokens of a prompt.
    pub mean_prompt_len: f64,
    /// The mean number of tokens of a response.
    pub mean_response_len: f64,
    /// The maximum number of tokens of a response.
    pub longest_response: usize,
    /// The share of responses that ended with an end token or a stop string.
    pub share_ended: f64,
    /// The mean overlap Σ min(p, q) over the tokens.
    pub overlap: f64,
    /// The mean acceptance probability of the draft's tokens.
    pub acceptance: f64,
    /// The share of positions where target and draft have the same most probable token.
    pub agreement: f64,
}

/// A row with its tokens.
#[derive(Debug, Clone, Serialize)]
pub struct ShownRow {
    /// The row's id.
    pub id: String,
    /// The reason why the response ended.
    pub finish: String,
    /// The prompt's text.
    pub prompt: String,
    /// The response's tokens.
    pub tokens: Vec<ShownToken>,
}

/// A token of a response.
#[derive(Debug, Clone, Serialize)]
pub struct ShownToken {
    /// The text of the token.
    pub text: String,
    /// The probability Σ min(p, q) that a candidate of the draft is accepted; `None` without a draft.
    pub accepted: Option<f32>,
    /// The text shown when the pointer is over the token.
    pub title: String,
}

/// Renders the page of a data set.
///
/// # Errors
/// Never because of the data: the template belongs to the program.
pub fn render_data_html(page: &DataPage) -> Result<String> {
    let has_draft = page.sources.iter().any(|source| source.overlap.is_finite());
    let view = context! {
        lead => format!(
            "{} of {} in {}.",
            counted(page.num_rows, "response"),
            counted(page.num_tokens, "token"),
            counted(page.sources.len().saturating_sub(1).max(1), "source"),
        ),
        has_draft,
        sources => sources(page).view(),
        plots => page.plots.iter().filter_map(Plot::view).collect::<Vec<_>>(),
        ..Serde(page)
    };
    render("data.html", view)
}

fn sources(page: &DataPage) -> Table<&SourceFigures> {
    // Without a draft the column is empty and therefore left out.
    let drafted = |value: f64| if value.is_finite() { number(value, 3) } else { String::new() };
    let lines = page.sources.iter().map(|source| Line::of(&source.name, source));
    Table::new("source", lines)
        .page("responses", |source| thousands(source.num_rows))
        .page("tokens", |source| thousands(source.num_tokens))
        .page("mean prompt", |source| number(source.mean_prompt_len, 1))
        .page("mean response", |source| number(source.mean_response_len, 1))
        .page("longest", |source| thousands(source.longest_response))
        .page("ended", |source| percent(source.share_ended, 1))
        .page("overlap", |source| drafted(source.overlap))
        .page("acceptance", |source| drafted(source.acceptance))
        .page("agreement", |source| drafted(source.agreement))
}

/// Returns the shade of a token's background, the tenth from 0 to 9 in which its overlap lies.
pub(super) fn shade(overlap: f32) -> u8 {
    (overlap.clamp(0.0, 1.0) * 10.0).min(9.0) as u8
}

#[cfg(test)]
mod tests {
    use super::super::lines::PlotContent;
    use super::*;

    #[test]
    fn each_plot_of_several_lines_has_a_legend() {
        let plot = |id: &str, names: &[&str]| Plot {
            id: id.to_owned(),
            title: "Acceptance".to_owned(),
            caption: String::new(),
            x_name: "x",
            y_name: "y",
            content: PlotContent::lines(
                names
                    .iter()
                    .map(|name| ((*name).to_owned(), vec![(0.0, 0.5), (1.0, 0.7)]))
                    .collect(),
            ),
        };
        let page = DataPage {
            name: "data".to_owned(),
            version: "0.1.0",
            num_rows: 0,
            num_tokens: 0,
            sources: Vec::new(),
            plots: vec![plot("one", &["chat"]), plot("two", &["chat", "code"])],
            rows: Vec::new(),
            provenance: Vec::new(),
        };
        let page = render_data_html(&page).expect("the page is rendered");
        assert_eq!(page.matches("<ul class=\"key\"").count(), 1);
        assert!(page.contains("</svg>chat</li>") && page.contains("</svg>code</li>"));
    }
}
