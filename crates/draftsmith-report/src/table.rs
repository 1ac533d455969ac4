//! Text tables of results, for `evaluate`, `inspect` and other commands.
//!
//! This file shows the rows of an evaluation: an aligned table over all prompts for each dataset and way
//! of decoding, with a heading for each of several drafters. Marks name the best rows, so colour is never
//! the only information. `table/replay.rs` shows the results of replay, and `table/heads.rs` scores and
//! sweeps of acceptance heads.

mod heads;
mod replay;

use std::path::Path;

use comfy_table::{Attribute, Cell, CellAlignment, Color, Table};

use crate::results::{Conclusion, DrafterName, Group, ResultRow, Standing, groups};

pub use heads::{
    SweptHead, calibration_text, render_predictions, render_scores, render_sweep_table,
};
pub use replay::{render_replay_table, render_rules};

/// Width of explanations if the terminal's width is unknown.
const WIDTH: usize = 80;

/// A column of a table.
struct Column<Row> {
    heading: &'static str,
    text: fn(&Row) -> String,
    /// If the terminal is too narrow, the column with the greatest number is dropped first; 0 is kept.
    expendable: usize,
}

const COLUMNS: [Column<ResultRow>; 8] = [
    Column::new("tok/s", 0, |row| number(row.tokens_per_second, 1)),
    Column::new("speed-up", 0, |row| times(row.speedup)),
    Column::new("95 %", 3, speedup_interval),
    Column::new("model", 5, |row| times(row.modelled_speedup)),
    Column::new("discard", 1, |row| number(row.discard_rate, 3)),
    Column::new("verify", 4, |row| number(row.verification_rate, 3)),
    Column::new("tok/fwd", 6, |row| number(row.compression_rate, 2)),
    Column::new("lossless", 2, lossless),
];

impl<Row> Column<Row> {
    const fn new(heading: &'static str, expendable: usize, text: fn(&Row) -> String) -> Self {
        Self { heading, text, expendable }
    }
}

/// A line of a table: a heading, or a row with its name and mark.
enum TableLine<'a, Row> {
    Heading(String),
    Row { name: String, mark: Option<&'a str>, is_wrong: bool, row: &'a Row },
}

/// An evaluation as text: its conclusion, the tables of rows, and the path of the report.
pub fn render_evaluation(
    rows: &[ResultRow],
    conclusion: &Conclusion,
    report: &Path,
    width: Option<usize>,
    colour: bool,
) -> String {
    let lines = conclusion.lines();
    let lines: Vec<String> = lines.iter().flat_map(|line| wrapped(line, width)).collect();
    let tables = render_table(rows, width, colour);
    format!("{}\n\n{tables}\nreport: {}\n", lines.join("\n"), report.display())
}

/// The rows over all prompts as text tables, one for each dataset and way of decoding, with a final line
/// break.
///
/// The least important columns are dropped until lines fit into `width`, if it is given.
pub fn render_table(rows: &[ResultRow], width: Option<usize>, colour: bool) -> String {
    let mut tables = Vec::new();
    for group in groups(rows) {
        let lines = group_lines(&group);
        let mut text = fitted("setting", &lines, &COLUMNS, width, colour);
        let has = |sought| {
            lines
                .iter()
                .any(|line| matches!(line, TableLine::Row { mark, .. } if *mark == Some(sought)))
        };
        let legend = [(BEST, "of its kind of drafter"), (BEST_OF_RULE, "of its rule")];
        let legend: Vec<String> = legend
            .into_iter()
            .filter(|(mark, _)| has(mark))
            .map(|(mark, what)| format!("{mark}: {what}"))
            .collect();
        if !legend.is_empty() {
            text.push(legend.join("; "));
        }
        tables.push(format!("{}\n{}\n", heading(&group), text.join("\n")));
    }
    let mut text = tables.join("\n");
    text += &explained(&text, width).map(|words| format!("\n{words}\n")).unwrap_or_default();
    text
}

/// Words and symbols of tables, each with its meaning.
const WORDS: [(&str, &str); 13] = [
    ("discard", "discarded candidates per token"),
    ("verify", "target forwards per token"),
    ("tok/fwd", "tokens per target forward"),
    ("model", "speed-up at average costs"),
    ("K =", "candidates per round"),
    ("h =", "the head's threshold for a rejection"),
    ("eta =", "the drafter's confidence threshold"),
    ("q =", "threshold of the candidate's probability"),
    ("entropy h =", "SVIP's entropy threshold"),
    ("worth(", "tokens that a draft forward must be worth"),
    ("lookup", "AxB looks up to B tokens after a match of A"),
    ("ceiling", "the gain with a perfect head"),
    ("reached", "the share of the ceiling"),
];

/// The meanings of the words that a table's text contains, on wrapped lines.
pub fn explained(text: &str, width: Option<usize>) -> Option<String> {
    let named = |word: &str| word.trim_end_matches(['=', '(', ' ']).to_owned();
    let words = WORDS.iter().filter(|(word, _)| text.contains(word));
    let words: Vec<String> =
        words.map(|(word, meaning)| format!("{}: {meaning}", named(word))).collect();
    (!words.is_empty()).then(|| wrapped(&words.join("; "), width).join("\n"))
}

const TUNED: &str = "tuned";
const TUNED_FASTEST: &str = "tuned, fastest";
const FASTEST: &str = "fastest";
const BEST: &str = "best";
const BEST_OF_RULE: &str = "*";

fn heading(group: &Group<'_>) -> String {
    let prompts = counted(group.pooled().map(|row| row.num_prompts).max().unwrap_or(0), "prompt");
    format!("{}, {}, {prompts}", group.dataset, group.decoding_text())
}

fn group_lines<'a>(group: &Group<'a>) -> Vec<TableLine<'a, ResultRow>> {
    let has_several = group.drafters().len() > 1;
    let mut drafter = DrafterName::None;
    let mut lines = Vec::new();
    for row in group.pooled() {
        if std::mem::replace(&mut drafter, row.drafter) != row.drafter && has_several {
            lines.push(TableLine::Heading(format!("{}:", drafter.text())));
        }
        let mark = match (row.is_tuned, group.standing(row)) {
            (true, Some(Standing::All)) => Some(TUNED_FASTEST),
            (true, _) => Some(TUNED),
            (_, standing) => standing.map(|standing| match standing {
                Standing::All => FASTEST,
                Standing::Road => BEST,
                Standing::Rule => BEST_OF_RULE,
            }),
        };
        let name = if has_several { row.rule_label() } else { row.label() };
        lines.push(TableLine::Row { name, mark, is_wrong: row.lossless == Some(false), row });
    }
    lines
}

/// Aligned lines with the columns that fit into `width`; `first` is the heading of the names.
fn fitted<Row>(
    first: &str,
    lines: &[TableLine<'_, Row>],
    columns: &[Column<Row>],
    width: Option<usize>,
    colour: bool,
) -> Vec<String> {
    let mut least_expendable = usize::MAX;
    loop {
        let kept: Vec<&Column<Row>> =
            columns.iter().filter(|column| column.expendable < least_expendable).collect();
        let widest = aligned(first, lines, &kept, false).iter().map(|line| width_of(line)).max();
        let next = kept.iter().map(|column| column.expendable).max().unwrap_or(0);
        if next == 0 || width.is_none_or(|width| widest.unwrap_or(0) <= width) {
            return aligned(first, lines, &kept, colour);
        }
        least_expendable = next;
    }
}

fn aligned<Row>(
    first: &str,
    lines: &[TableLine<'_, Row>],
    columns: &[&Column<Row>],
    colour: bool,
) -> Vec<String> {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).force_no_tty();
    if colour {
        table.enforce_styling();
    }
    let dim = |heading: &str| Cell::new(heading).add_attribute(Attribute::Dim);
    let headings = columns.iter().map(|column| dim(column.heading));
    table.set_header([dim(first)].into_iter().chain(headings).chain([Cell::new("")]));
    for line in lines {
        let (name, mark, is_wrong, row) = match line {
            TableLine::Heading(text) => {
                table.add_row([Cell::new(text).add_attribute(Attribute::Underlined)]);
                continue;
            }
            TableLine::Row { name, mark, is_wrong, row } => (name, mark, *is_wrong, *row),
        };
        let cell = |text: &str| {
            let cell = Cell::new(text);
            let cell = if mark.is_some() { cell.add_attribute(Attribute::Bold) } else { cell };
            if is_wrong { cell.fg(Color::Red) } else { cell }
        };
        let texts = columns.iter().map(|column| cell(&(column.text)(row)));
        let mark = Cell::new(mark.unwrap_or_default()).add_attribute(Attribute::Bold);
        table.add_row([cell(name)].into_iter().chain(texts).chain([mark]));
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if index == 0 { 0 } else { 2 }, 0));
        if 0 < index && index <= columns.len() {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect()
}

/// The text of a table with some columns aligned at their right.
pub fn table_text(mut table: Table, at_right: &[usize]) -> String {
    for column in at_right {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

/// The 95 % interval of the speed-up.
fn speedup_interval(row: &ResultRow) -> String {
    let ends = row.speedup_interval.map(|ends| ends.map(|end| number(end, 2)));
    ends.map_or_else(|| number(f64::NAN, 2), |[low, high]| format!("{low}-{high}"))
}

/// `1 prompt`, `2 prompts`.
pub fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// `text` wrapped at words to fit into `width`, or into 80 columns if it is unknown.
pub fn wrapped(text: &str, width: Option<usize>) -> Vec<String> {
    let width = width.unwrap_or(WIDTH);
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if width_of(line) + 1 + width_of(word) <= width => {
                *line += " ";
                *line += word;
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

/// A duration in words: `40 s`, `12 min` or `3.5 h`.
pub fn duration_text(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.0} s"),
        ..7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

fn width_of(line: &str) -> usize {
    line.chars().count()
}

/// `value` with this number of decimals; `-` if it is not finite. Zero has no sign.
pub(crate) fn number(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return "-".into();
    }
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(zero) if !zero.contains(|digit| matches!(digit, '1'..='9')) => zero.into(),
        _ => text,
    }
}

fn times(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{}x", number(value, 2)))
}

/// Whether a row is lossless, with its number of forgiven ties: `yes`, `yes, 2 ties`, `NO`.
fn lossless(row: &ResultRow) -> String {
    let verdict = match row.lossless {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "-",
    };
    match row.num_forgiven_ties {
        0 => verdict.to_owned(),
        ties => format!("{verdict}, {}", counted(ties, "tie")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn durations_are_short_and_words_are_explained_only_where_they_occur() {
        let shown = [12.3, 300.0, 9000.0].map(duration_text);
        assert_eq!(shown, ["12 s", "5 min", "2.5 h"]);
        let words = explained("K = 4  discard", Some(80)).expect("two words");
        assert_eq!(words, "discard: discarded candidates per token; K: candidates per round");
        assert_eq!(explained("tok/s", None), None);
    }

    #[test]
    fn the_conclusion_comes_first() {
        let (rows, summary) = (fixture::rows(), fixture::summary());
        let path = Path::new("evaluation/report.html");
        let text = render_evaluation(&rows, &summary.conclusion, path, Some(80), false);
        assert!(text.lines().all(|line| width_of(line) <= 80), "{text}");
        let first = text.split("\n\n").next().expect("a conclusion");
        insta::assert_snapshot!(first, @r#"
        spec-bench, greedy: Deploy worth(eta) = 0.187: 2.38x (2.29 to 2.50). Fastest in
        the sweep, not chosen: K = 5, 2.45x (2.36 to 2.58).
        spec-bench, sampled at T = 0.7: Deploy worth(eta) = 0.187: 2.20x (2.11 to 2.31).
        Fastest in the sweep, not chosen: h = 0.5, 2.29x (2.19 to 2.40).
        gsm8k, greedy: Deploy worth(eta) = 0.187: 2.53x (2.43 to 2.66). Fastest in the
        sweep, not chosen: K = 8, 2.66x (2.56 to 2.80).
        gsm8k, sampled at T = 0.7: Deploy worth(eta) = 0.187: 2.34x (2.24 to 2.45).
        Fastest in the sweep, not chosen: h = 0.3, 2.36x (2.27 to 2.48).
        Doubtful: 2 of the 60 prompts of spec-bench are prompts that the training data
        was built from. Speeds on unseen prompts may be lower.
        "#);
    }

    #[test]
    fn tables_are_aligned_and_fit_80_columns() {
        let rows: Vec<ResultRow> =
            fixture::rows().into_iter().filter(|row| row.dataset == "gsm8k").collect();
        let text = render_table(&rows, Some(80), false);
        assert!(text.lines().all(|line| width_of(line) <= 80), "{text}");
        let greedy = text.split("\n\n").next().expect("a table");
        insta::assert_snapshot!(greedy, @"
        gsm8k, greedy, 20 prompts
        setting              tok/s  speed-up       95 %  discard  lossless
        target alone         158.7     1.00x          -    0.000       yes
        draft:
        K = 1                258.1     1.63x  1.56-1.71    0.057       yes
        K = 2                313.9     1.98x  1.90-2.08    0.150       yes
        K = 3                340.8     2.15x  2.06-2.25    0.253       yes
        K = 4                383.6     2.42x  2.32-2.54    0.251       yes
        K = 5                403.9     2.54x  2.44-2.67    0.290       yes
        K = 6                416.6     2.62x  2.52-2.76    0.339       yes
        K = 8                423.0     2.66x  2.56-2.80    0.434       yes  fastest
        K = 10               392.9     2.47x  2.38-2.60    0.643       yes
        K = 12               380.0     2.39x  2.30-2.51    0.768       yes
        K = 14               378.5     2.38x  2.29-2.50    0.821       yes
        heuristic K = 1      377.1     2.38x  2.28-2.49    0.485       yes
        heuristic K = 5      398.8     2.51x  2.41-2.64    0.520       yes  *
        h = 0.1              362.7     2.29x  2.19-2.40    0.223       yes
        h = 0.3              397.3     2.50x  2.40-2.63    0.388       yes
        h = 0.5              399.4     2.52x  2.42-2.64    0.558       yes  *
        h = 0.7              373.0     2.35x  2.26-2.47    0.748       yes
        h = 0.9              344.3     2.17x  2.08-2.28    1.014       yes
        lagless h = 0.1      304.1     1.92x  1.84-2.01    0.126       yes
        lagless h = 0.3      353.9     2.23x  2.14-2.34    0.238       yes
        lagless h = 0.5      377.4     2.38x  2.28-2.50    0.420       yes  *
        lagless h = 0.7      344.8     2.17x  2.09-2.28    0.730       yes
        lagless h = 0.9      319.1     2.01x  1.93-2.11    1.124       yes
        eta = 0.3            339.5     2.14x  2.05-2.25    1.008       yes
        eta = 0.5            348.1     2.19x  2.11-2.30    0.679       yes
        eta = 0.6            351.8     2.22x  2.13-2.33    0.316       yes  *
        eta = 0.7            314.3     1.98x  1.90-2.08    0.198       yes
        eta = 0.8            292.3     1.84x  1.77-1.93    0.114       yes
        q = 0.3              313.5     1.98x  1.90-2.07    1.136       yes
        q = 0.5              371.2     2.34x  2.24-2.46    0.561       yes  *
        q = 0.6              353.7     2.23x  2.14-2.34    0.197       yes
        joint eta = 0.05     349.7     2.20x  2.11-2.31    0.994       yes
        joint eta = 0.2      352.4     2.22x  2.13-2.33    0.787       yes
        joint eta = 0.4      392.0     2.47x  2.37-2.59    0.380       yes  *
        joint eta = 0.6      370.0     2.33x  2.24-2.45    0.209       yes
        entropy h = 0.2      287.3     1.81x  1.74-1.90    0.092       yes
        entropy h = 0.3      331.2     2.09x  2.00-2.19    0.192       yes
        entropy h = 0.35     353.9     2.23x  2.14-2.34    0.358       yes  *
        entropy h = 0.4      338.7     2.13x  2.05-2.24    0.689       yes
        worth(head) = 0.08   319.2     2.01x  1.93-2.11    1.171       yes
        worth(head) = 0.187  358.3     2.26x  2.17-2.37    0.897       yes
        worth(head) = 0.45   401.6     2.53x  2.43-2.66    0.452       yes  *
        worth(eta) = 0.08    363.6     2.29x  2.20-2.40    0.845       yes
        worth(eta) = 0.187   402.2     2.53x  2.43-2.66    0.524       yes  tuned
        worth(eta) = 0.45    373.9     2.36x  2.26-2.47    0.240       yes
        worth(H) = 0.08      339.2     2.14x  2.05-2.24    0.977       yes
        worth(H) = 0.187     394.5     2.49x  2.39-2.61    0.515       yes  *
        worth(H) = 0.45      366.4     2.31x  2.22-2.42    0.182       yes
        exit1:
        K = 1                233.4     1.47x  1.41-1.54    0.099       yes
        K = 2                267.5     1.69x  1.62-1.77    0.203       yes
        K = 3                282.7     1.78x  1.71-1.87    0.308       yes
        K = 4                292.8     1.84x  1.77-1.94    0.378       yes
        K = 5                308.3     1.94x  1.86-2.04    0.395       yes  best
        K = 6                297.9     1.88x  1.80-1.97    0.519       yes
        heuristic K = 2      290.0     1.83x  1.75-1.92    0.560       yes  *
        eta = 0.3            202.3     1.27x  1.22-1.34    1.553       yes
        eta = 0.5            220.3     1.39x  1.33-1.46    1.095       yes
        eta = 0.6            263.6     1.66x  1.59-1.74    0.499       yes
        eta = 0.7            275.2     1.73x  1.66-1.82    0.202       yes  *
        eta = 0.8            256.1     1.61x  1.55-1.69    0.158       yes
        q = 0.3              219.4     1.38x  1.33-1.45    1.317       yes
        q = 0.5              254.8     1.61x  1.54-1.69    0.804       yes
        q = 0.6              274.7     1.73x  1.66-1.82    0.366       yes  *
        joint eta = 0.2      268.5     1.69x  1.62-1.78    0.832       yes
        joint eta = 0.4      295.4     1.86x  1.79-1.95    0.502       yes  *
        joint eta = 0.6      286.3     1.80x  1.73-1.89    0.329       yes
        entropy h = 0.25     260.0     1.64x  1.57-1.72    0.188       yes
        entropy h = 0.3      275.1     1.73x  1.66-1.82    0.250       yes  *
        entropy h = 0.35     269.4     1.70x  1.63-1.78    0.568       yes
        worth(eta) = 0.08    220.9     1.39x  1.34-1.46    1.351       yes
        worth(eta) = 0.187   272.9     1.72x  1.65-1.81    0.791       yes  *
        worth(H) = 0.08      249.5     1.57x  1.51-1.65    1.067       yes
        worth(H) = 0.187     281.9     1.78x  1.70-1.86    0.681       yes  *
        best: of its kind of drafter; *: of its rule
        ");
    }

    #[test]
    fn narrow_tables_drop_columns_but_no_rows() {
        let rows = fixture::rows();
        let num_settings = |text: &str| text.lines().filter(|line| line.contains(" = ")).count();
        let wide = num_settings(&render_table(&rows, None, false));
        for width in [45, 50, 60, 70] {
            let text = render_table(&rows, Some(width), false);
            assert!(text.lines().all(|line| width_of(line) <= width), "{text}");
            assert_eq!(num_settings(&text), wide);
        }
        assert!(render_table(&rows, Some(1), false).contains("speed-up"));
    }

    #[test]
    fn colour_does_not_change_the_text() {
        let rows = fixture::rows();
        let coloured = render_table(&rows, None, true);
        assert!(coloured.contains('\u{1b}'));
        let mut plain = String::new();
        for (index, part) in coloured.split('\u{1b}').enumerate() {
            let text =
                if index == 0 { part } else { part.split_once('m').map_or("", |(_, text)| text) };
            plain += text;
        }
        let trimmed = |text: &str| text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
        assert_eq!(trimmed(&plain), trimmed(&render_table(&rows, None, false)));
    }

    #[test]
    fn forgiven_ties_follow_the_verdict() {
        let mut rows = fixture::rows();
        for row in rows.iter_mut().filter(|row| row.lossless.is_some()) {
            row.num_forgiven_ties = if row.drafter == DrafterName::None { 0 } else { 2 };
        }
        let text = render_table(&rows, None, false);
        assert!(text.contains("yes, 2 ties\n"), "{text}");
        let plain = text.lines().find(|line| line.starts_with("target alone")).expect("a row");
        assert!(plain.ends_with(" yes"), "{plain}");
    }

    #[test]
    fn missing_measurements_are_dashes() {
        let mut rows = fixture::rows();
        for row in &mut rows {
            (row.tokens_per_second, row.speedup, row.lossless) = (f64::NAN, None, Some(false));
        }
        let text = render_table(&rows, None, false);
        assert!(text.contains("NO") && !text.contains("NaN") && !text.contains("best"), "{text}");
        assert_eq!(render_table(&[], Some(80), true), "");
    }
}
