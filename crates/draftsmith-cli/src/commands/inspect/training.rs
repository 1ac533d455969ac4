//! The curves and scores of a training: `metrics.jsonl` in its directory, and `scores.json` of its export.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use draftsmith_files::{parse_json, read_text, write_whole};
use draftsmith_report::{DataPage, Plot, PlotContent, plain_table, render_data_html};
use draftsmith_theory::setting_text;
use serde::Serialize;
use serde_json::Value;

const LOG: &str = "metrics.jsonl";
const SCORES: &str = "scores.json";
/// The most rows of the table, and the most points of a curve.
const NUM_ROWS: usize = 16;
const NUM_POINTS: usize = 200;
/// The numbers of a step. Of several steps, the table has the last of the first two and the mean of the others.
const COLUMNS: [&str; 5] = ["step", "epoch", "loss", "learning_rate", "gradient_norm"];

/// The log of a training and the scores of its export.
#[derive(Debug, Serialize)]
pub(crate) struct Training {
    /// The numbers of each step by name.
    steps: Vec<BTreeMap<String, Option<f64>>>,
    /// The scores by name.
    scores: Value,
}

impl Training {
    /// Reads the training in `dir`, such as `checkpoints/NAME/eagle-training`, or of the export in `dir`,
    /// `checkpoints/NAME/eagle`. `None` if there is none.
    ///
    /// # Errors
    /// If a file is malformed.
    pub(crate) fn find(dir: &Path) -> Result<Option<Self>> {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        // The training of `draft/head` is in `draft-head-training`.
        let export = name.strip_suffix("-training").map(|name| name.replace("-head", "/head"));
        let scores = export.map_or(dir.to_owned(), |name| dir.with_file_name(name)).join(SCORES);
        let logs = [dir.to_owned(), dir.with_file_name(format!("{name}-training"))];
        let mut logs = logs.iter().map(|dir| dir.join(LOG)).filter(|log| log.is_file());
        let Some(log) = logs.next() else { return Ok(None) };
        let text = read_text(&log)?;
        let steps = text.lines().map(|line| parse_json(&log, line.as_bytes()));
        let scores = match scores.is_file() {
            true => parse_json(&scores, read_text(&scores)?.as_bytes())?,
            false => Value::Null,
        };
        Ok(Some(Self { steps: steps.collect::<Result<_, _>>()?, scores }))
    }

    /// Returns the [`COLUMNS`] of at most `most` parts of the steps.
    fn parts(&self, most: usize) -> impl Iterator<Item = [f64; 5]> {
        self.steps.chunks(self.steps.len().div_ceil(most).max(1)).map(|part| {
            COLUMNS.map(|column| {
                let mut all = part.iter().filter_map(|step| *step.get(column)?);
                match column {
                    "step" | "epoch" => all.next_back().unwrap_or(f64::NAN),
                    _ => all.sum::<f64>() / part.len() as f64,
                }
            })
        })
    }

    /// Formats the table of means, and the scores.
    pub(super) fn text(&self, width: Option<usize>) -> String {
        let rows = self.parts(NUM_ROWS).map(|row| row.map(|number| setting_text(Some(number))));
        let table = plain_table(COLUMNS, rows, 0..5, (1, 1), width);
        let scores =
            self.figures().into_iter().map(|(name, score)| format!("{name}: {score:.4}\n"));
        format!("{table}\n\n{}", scores.collect::<String>())
    }

    /// Writes a page with the curves.
    pub(super) fn write_page(&self, dir: &Path, html: &Path) -> Result<()> {
        let curve = |column: usize| Plot {
            id: COLUMNS[column].to_owned(),
            title: COLUMNS[column].to_owned(),
            caption: String::new(),
            x_name: "step \u{2192}",
            y_name: "\u{2191} mean",
            content: PlotContent::lines(vec![(
                COLUMNS[column].to_owned(),
                self.parts(NUM_POINTS).map(|row| (row[0], row[column])).collect(),
            )]),
        };
        let page = DataPage {
            name: dir.display().to_string(),
            version: env!("CARGO_PKG_VERSION"),
            plots: vec![curve(2), curve(4)],
            provenance: self
                .figures()
                .into_iter()
                .map(|(name, it)| (name, format!("{it:.4}")))
                .collect(),
            ..DataPage::default()
        };
        Ok(write_whole(html, render_data_html(&page)?)?)
    }

    /// Lists the number of steps, the loss of the last ones, and the scores by name.
    pub(crate) fn figures(&self) -> BTreeMap<String, f64> {
        let mut figures = BTreeMap::from([("steps".to_owned(), self.steps.len() as f64)]);
        let loss = self.parts(NUM_ROWS).last().map(|row| ("last training loss".to_owned(), row[2]));
        figures.extend(loss);
        for (name, score) in self.scores.as_object().into_iter().flatten() {
            match score {
                Value::Array(parts) => {
                    figures.extend((1..).zip(parts).filter_map(|(nth, part)| {
                        Some((format!("{name}, step {nth}"), part.as_f64()?))
                    }))
                }
                score => figures.extend(score.as_f64().map(|score| (name.clone(), score))),
            }
        }
        figures
    }
}
