//! Writes responses and labels as an HTML page: `inspect DATA --html FILE`.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;
use draftsmith_data::{DraftColumns, FinishReason, Provenance, ResponseRow, TextTokenizer};
use draftsmith_files::write_whole;
use draftsmith_recipe::workspace::text_files;
use draftsmith_report::{
    DataPage, Plot, PlotContent, ShownRow, ShownToken, SourceFigures, bin_of, bins,
    render_data_html,
};
use draftsmith_theory::{
    acceptance_prob, bretagnolle_huber_bound, entropy_overlap_estimate, pinsker_bound,
};
use serde_json::Value;

use super::acceptance::{
    EntropyBand, acceptance_probs, agreements, by_entropy, entropy_ratio, entropy_ratios, overlaps,
};
use crate::console::Console;

/// Most bars or points in a plot.
const NUM_BINS: usize = 20;
/// The greatest ratio of entropies with a bar.
const MOST_RATIO: f64 = 8.0;
/// The edges between bands of √H.
const ENTROPY_EDGES: [f64; 11] = [0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0];
/// Fewest positions for a point.
const LEAST_POSITIONS: usize = 20;

/// Arguments of the HTML page.
#[derive(Debug, Args)]
pub(crate) struct PageArguments {
    /// Write an HTML page: curves of a training, or data with some responses coloured by overlap.
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// The checkpoint whose tokenizer decodes the page's responses; shown as ids if absent.
    #[arg(long, value_name = "DIR", requires = "html")]
    tokenizer: Option<PathBuf>,
    /// Number of responses on the page, spread evenly over the data.
    #[arg(long, value_name = "N", default_value = "20", requires = "html")]
    rows: NonZeroUsize,
}

impl PageArguments {
    /// Writes the page if `--html` was given.
    ///
    /// # Errors
    /// If the tokenizer cannot be read or is not the data's, or the file cannot be written.
    pub(super) fn write(
        &self,
        path: &Path,
        rows: &[ResponseRow],
        provenance: &Provenance,
        console: &Console,
    ) -> Result<()> {
        let Some(html) = &self.html else { return Ok(()) };
        let tokenizer = self.tokenizer.as_deref();
        let tokenizer = tokenizer.map(|dir| data_tokenizer(dir, provenance)).transpose()?;
        let shown =
            draftsmith_recipe::prompts::spread(rows.iter().collect(), Some(self.rows.get()));
        let shown = shown.into_iter().map(|row| shown_row(row, tokenizer.as_ref()));
        let name = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let page = DataPage {
            name: name.file_name().unwrap_or(name.as_os_str()).to_string_lossy().into_owned(),
            version: env!("CARGO_PKG_VERSION"),
            num_rows: rows.len(),
            num_tokens: rows.iter().map(|row| row.response_ids.len()).sum(),
            sources: figures(rows),
            plots: plots(rows, provenance),
            rows: shown.collect::<Result<_>>()?,
            provenance: facts(provenance),
        };
        write_whole(html, render_data_html(&page)?)?;
        console.note(format!("inspect: wrote `{}`", html.display()));
        Ok(())
    }
}

/// Reads the tokenizer and checks that it is the data's.
fn data_tokenizer(dir: &Path, provenance: &Provenance) -> Result<TextTokenizer> {
    let tokenizer = TextTokenizer::from_model_dir(text_files(dir)?)?;
    ensure!(
        tokenizer.hash()? == provenance.tokenizer,
        "the tokenizer in `{}` differs from the data's; hint: give the data's target as \
         `--tokenizer`",
        dir.display()
    );
    Ok(tokenizer)
}

/// Groups the rows by the name of their source.
fn by_source(rows: &[ResponseRow]) -> BTreeMap<&str, Vec<&ResponseRow>> {
    let mut all: BTreeMap<&str, Vec<&ResponseRow>> = BTreeMap::new();
    rows.iter().for_each(|row| all.entry(&row.source).or_default().push(row));
    all
}

fn figures(rows: &[ResponseRow]) -> Vec<SourceFigures> {
    let sources = by_source(rows);
    let mut figures: Vec<SourceFigures> =
        sources.iter().map(|(name, rows)| figures_of(name, rows)).collect();
    if sources.len() > 1 {
        figures.push(figures_of("all", &rows.iter().collect::<Vec<_>>()));
    }
    figures
}

fn figures_of(name: &str, rows: &[&ResponseRow]) -> SourceFigures {
    let drafted = || rows.iter().filter_map(|row| row.draft.as_ref());
    let num_ended = rows.iter().filter(|row| row.finish_reason != FinishReason::Length).count();
    let lens = || rows.iter().map(|row| row.response_ids.len());
    SourceFigures {
        name: name.to_owned(),
        num_rows: rows.len(),
        num_tokens: lens().sum(),
        mean_prompt_len: mean(rows.iter().map(|row| row.prompt_ids.len() as f64)),
        mean_response_len: mean(lens().map(|len| len as f64)),
        longest_response: lens().max().unwrap_or(0),
        share_ended: num_ended as f64 / rows.len() as f64,
        overlap: mean(drafted().flat_map(overlaps)),
        acceptance: mean(drafted().flat_map(acceptance_probs)),
        agreement: mean(drafted().flat_map(agreements)),
    }
}

/// Computes the mean; NaN without values.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    super::mean(values).unwrap_or(f64::NAN)
}

fn plots(rows: &[ResponseRow], provenance: &Provenance) -> Vec<Plot> {
    let drafted: Vec<&DraftColumns> = rows.iter().filter_map(|row| row.draft.as_ref()).collect();
    if drafted.is_empty() {
        return Vec::new();
    }
    let shares = |id: &str, title: &str, caption: &str, values: fn(&DraftColumns) -> Vec<f64>| {
        let edges = (0..=NUM_BINS).map(|edge| edge as f64 / NUM_BINS as f64).collect();
        let values = drafted.iter().flat_map(|columns| values(columns));
        Plot {
            id: id.to_owned(),
            title: title.to_owned(),
            caption: caption.to_owned(),
            x_name: "acceptance probability \u{2192}",
            y_name: "\u{2191} share of positions",
            content: PlotContent::histogram(edges, values),
        }
    };
    vec![
        shares(
            "acceptance",
            "How often the draft\u{2019}s tokens are accepted",
            "min(1, p/q) at the draft\u{2019}s token.",
            acceptance_probs,
        ),
        shares(
            "overlap",
            "How alike draft and target are",
            "\u{3a3} min(p, q), the expected acceptance probability over the draft\u{2019}s tokens.",
            overlaps,
        ),
        entropy(&drafted, provenance),
        accepted_lengths(&drafted),
        ratio_of_entropies(&drafted),
        bounds(&drafted, provenance),
    ]
}

/// Plots how many of the draft's tokens are accepted from a position on, by the draft's entropy there (SVIP, Figure
/// 2).
fn accepted_lengths(drafted: &[&DraftColumns]) -> Plot {
    let mut at: Vec<Vec<f64>> = vec![Vec::new(); ENTROPY_EDGES.len() - 1];
    for columns in drafted {
        let mut length = 0.0;
        for (overlap, entropy) in columns.overlap.iter().zip(&columns.draft_entropy).rev() {
            length = f64::from(*overlap) * (1.0 + length);
            at[bin_of(&ENTROPY_EDGES, f64::from(*entropy).sqrt())].push(length);
        }
    }
    let points = ENTROPY_EDGES.windows(2).zip(&at).filter(|(_, all)| all.len() >= LEAST_POSITIONS);
    let points =
        points.map(|(edges, all)| ((edges[0] + edges[1]) / 2.0, mean(all.iter().copied())));
    Plot {
        id: "accepted-lengths".to_owned(),
        title: "Where the draft is sure, more of its tokens are accepted".to_owned(),
        caption: "The expected number of accepted candidates from a position on, along the response (SVIP, \
                  Figure 2)."
            .to_owned(),
        x_name: "\u{221a}H of the draft, in nats \u{2192}",
        y_name: "\u{2191} accepted candidates",
        content: PlotContent::lines(vec![("accepted candidates".to_owned(), points.collect())]),
    }
}

/// Plots the overlap, its lower bounds and SVIP's estimate at all positions, in the order of the overlap (SVIP,
/// Figure 4 and Appendix B). Empty unless tokens are sampled from the models' raw distributions, to which divergences
/// refer.
fn bounds(drafted: &[&DraftColumns], provenance: &Provenance) -> Plot {
    let scale = entropy_ratio(drafted).map_or(0.0, |it| it.fitted_scale);
    let mut positions: Vec<[f64; 4]> = Vec::new();
    for columns in drafted.iter().filter(|_| provenance.is_raw()) {
        let cross = columns.draft_target_cross_entropy.iter().flatten();
        for ((cross, own), overlap) in cross.zip(&columns.draft_entropy).zip(&columns.overlap) {
            let own = f64::from(*own).max(0.0);
            let divergence = (f64::from(*cross) - own).max(0.0);
            positions.push([
                f64::from(*overlap),
                pinsker_bound(divergence),
                bretagnolle_huber_bound(divergence),
                entropy_overlap_estimate(own, scale),
            ]);
        }
    }
    positions.sort_by(|one, other| one[0].total_cmp(&other[0]));
    let size = positions.len().div_ceil(NUM_BINS).max(1);
    let line = |(column, name): (usize, &str)| {
        let points = positions.chunks(size).enumerate().map(|(nth, some)| {
            let share = (nth * size + some.len() / 2) as f64 / positions.len() as f64;
            (share, mean(some.iter().map(|position| position[column])))
        });
        (name.to_owned(), points.collect())
    };
    let names = [
        "overlap",
        "Pinsker\u{2019}s bound",
        "Bretagnolle and Huber\u{2019}s",
        "SVIP\u{2019}s estimate",
    ];
    Plot {
        id: "bounds".to_owned(),
        title: "How near SVIP\u{2019}s estimate and the bounds are to the overlap".to_owned(),
        caption: format!(
            "Positions in the order of their overlap; means of {NUM_BINS} parts. The estimate takes c = \
             {scale:.2}, fitted (SVIP, Figure 4 and Appendix B)."
        ),
        x_name: "share of positions \u{2192}",
        y_name: "\u{2191} acceptance probability",
        content: PlotContent::lines(names.into_iter().enumerate().map(line).collect()),
    }
}

/// Plots the ratio of H(q, p) to H(q), which SVIP takes to be the same at all positions.
fn ratio_of_entropies(drafted: &[&DraftColumns]) -> Plot {
    let edges = bins(MOST_RATIO, NUM_BINS, 0.1);
    let ratios = entropy_ratios(drafted).into_iter().map(|ratio| ratio.min(MOST_RATIO));
    let fitted = entropy_ratio(drafted).map(|it| (it.median_ratio, it.fitted_scale));
    Plot {
        id: "entropy-ratio".to_owned(),
        title: "Whether one constant c fits: cross-entropy over the draft\u{2019}s entropy".to_owned(),
        caption: fitted.map_or_else(String::new, |(median, scale)| {
            format!(
                "Where the draft\u{2019}s entropy is at least 0.01 nats; {MOST_RATIO} and more are one bar. SVIP \
                 takes it to be 1 + 2c everywhere. The median {median:.2} makes c = {scale:.2}."
            )
        }),
        x_name: "H(q, p) / H(q) \u{2192}",
        y_name: "\u{2191} share of positions",
        content: PlotContent::histogram(edges, ratios),
    }
}

/// Plots the mean overlap by the draft's entropy, with SVIP's estimate and the lower bound.
fn entropy(drafted: &[&DraftColumns], provenance: &Provenance) -> Plot {
    let bands = by_entropy(drafted, provenance.is_raw());
    // The last band has no upper edge.
    let width = bands.iter().find_map(|band| Some(band.to_threshold? - band.from_threshold));
    let at = |band: &EntropyBand| {
        let to = band.to_threshold.unwrap_or(band.from_threshold + width.unwrap_or(0.1));
        (band.from_threshold + to) / 2.0
    };
    let mean = bands.iter().map(|band| (at(band), band.mean_overlap)).collect();
    let estimate = bands.iter().map(|band| (at(band), band.svip_estimate.max(0.0))).collect();
    let bound: Vec<(f64, f64)> =
        bands.iter().filter_map(|band| Some((at(band), band.overlap_bound?))).collect();
    let mut lines = vec![
        ("mean overlap".to_owned(), mean),
        ("SVIP\u{2019}s 1 \u{2212} \u{221a}(c\u{b7}H)".to_owned(), estimate),
    ];
    if !bound.is_empty() {
        lines.push(("bound by KL(q, p)".to_owned(), bound));
    }
    Plot {
        id: "entropy".to_owned(),
        title: "How well the draft\u{2019}s entropy tells acceptance".to_owned(),
        caption:
            "H: the draft\u{2019}s entropy in nats; c as in SVIP\u{2019}s code (Zhang et al. 2024, \
                  section 2)."
                .to_owned(),
        x_name: "\u{221a}(c\u{b7}H) \u{2192}",
        y_name: "\u{2191} mean overlap",
        content: PlotContent::lines(lines),
    }
}

fn shown_row(row: &ResponseRow, tokenizer: Option<&TextTokenizer>) -> Result<ShownRow> {
    let texts = texts(&row.response_ids, tokenizer)?;
    let tokens = texts.into_iter().enumerate().map(|(at, text)| {
        let draft = row.draft.as_ref();
        let log_prob = |log_probs: &[f32]| log_probs.get(at).map_or(f32::NAN, |it| it.exp());
        let mut title = format!(
            "token {}: p {:.3}",
            row.response_ids[at],
            log_prob(&row.response_target_log_prob)
        );
        if let Some(draft) = draft {
            let accepted = acceptance_prob(draft.target_log_prob[at], draft.draft_log_prob[at]);
            title += &format!(
                ", q {:.3}; overlap {:.3}; the draft drew {}, accepted with {accepted:.3}",
                log_prob(&draft.response_draft_log_prob),
                draft.overlap[at],
                draft.draft_ids[at],
            );
        }
        let accepted = draft.map(|draft| draft.overlap[at]);
        ShownToken { text, accepted, title }
    });
    Ok(ShownRow {
        id: row.id.clone(),
        finish: format!("ended by {}", row.finish_reason.as_str()),
        prompt: match tokenizer {
            Some(tokenizer) => tokenizer.decode(&row.prompt_ids, false)?,
            None => ids(&row.prompt_ids).concat(),
        },
        tokens: tokens.collect(),
    })
}

/// Returns the text that each token adds, or an ellipsis for a token that is part of a character. Without a
/// tokenizer, returns the token ids as text.
fn texts(response: &[u32], tokenizer: Option<&TextTokenizer>) -> Result<Vec<String>> {
    let Some(tokenizer) = tokenizer else { return Ok(ids(response)) };
    let mut stream = tokenizer.text_stream(false);
    let mut texts = Vec::with_capacity(response.len());
    for id in response {
        texts.push(stream.push(*id)?.unwrap_or_else(|| "\u{22ef}".to_owned()));
    }
    Ok(texts)
}

fn ids(tokens: &[u32]) -> Vec<String> {
    tokens.iter().map(|id| format!("{id} ")).collect()
}

/// Lists the provenance as names and values, as in the files.
fn facts(provenance: &Provenance) -> Vec<(String, String)> {
    let Ok(Value::Object(fields)) = serde_json::to_value(provenance) else { return Vec::new() };
    let text = |value: Value| match value {
        Value::String(text) => text,
        Value::Null => "none".to_owned(),
        other => other.to_string(),
    };
    fields.into_iter().map(|(name, value)| (name.replace('_', " "), text(value))).collect()
}
