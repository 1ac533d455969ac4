//! The rows of an evaluation as text: what `evaluate` prints and `inspect` shows of a result.
//!
//! One aligned table for each dataset and way of decoding, over all prompts; the rows by category
//! are for the report. Where several drafters are there, each has its heading. The fastest row of
//! all is marked `fastest`, the fastest of the other road `best`, and the fastest of any other
//! drafter and stop rule `*`. Nothing is said by colour alone. `table/replay.rs` shows what replay
//! found in the same manner, `table/calibration.rs` how good a head's predictions are, and
//! `table/sweep.rs` the heads of a sweep.

mod calibration;
mod replay;
mod sweep;

use comfy_table::{Attribute, Cell, CellAlignment, Color, Table};

use crate::results::{DrafterName, Group, ResultRow, Standing, groups};

pub(crate) use calibration::{calibration_text, kind_text, render_predictions, render_scores};
pub(crate) use replay::render_replay_table;
pub(crate) use sweep::render_sweep_table;

/// A column: its heading, its text in a row, and when it goes if the terminal is too narrow.
struct Column<Row> {
    heading: &'static str,
    text: fn(&Row) -> String,
    /// The greatest goes first; 0 never goes.
    expendable: usize,
}

const COLUMNS: [Column<ResultRow>; 7] = [
    Column { heading: "tok/s", text: |row| number(row.tokens_per_second, 1), expendable: 0 },
    Column { heading: "speed-up", text: |row| times(row.speedup), expendable: 0 },
    Column { heading: "model", text: |row| times(row.modelled_speedup), expendable: 3 },
    Column { heading: "discard", text: |row| number(row.discard_rate, 3), expendable: 1 },
    Column { heading: "verify", text: |row| number(row.verification_rate, 3), expendable: 1 },
    Column { heading: "tok/fwd", text: |row| number(row.compression_rate, 2), expendable: 4 },
    Column { heading: "lossless", text: lossless, expendable: 2 },
];

/// A line of a table: a heading, or a row's name, mark and columns.
enum Line<'a, Row> {
    Heading(String),
    Row { name: String, mark: Option<&'static str>, is_wrong: bool, row: &'a Row },
}

/// The pooled rows as text tables, one for each dataset and way of decoding, ending with a line
/// break.
///
/// Columns are left out, the least important first, until the lines fit `width`; without one, all are
/// there.
pub(crate) fn render_table(rows: &[ResultRow], width: Option<usize>, colour: bool) -> String {
    let mut tables = Vec::new();
    for group in groups(rows) {
        let lines = group_lines(&group);
        let mut text = fitted("setting", &lines, &COLUMNS, width, colour);
        let has = |sought| {
            lines.iter().any(|line| matches!(line, Line::Row { mark, .. } if *mark == Some(sought)))
        };
        let legend = [(BEST, "fastest of its road"), (BEST_OF_RULE, "of its rule")];
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
    tables.join("\n")
}

const FASTEST: &str = "fastest";
const BEST: &str = "best";
const BEST_OF_RULE: &str = "*";

fn heading(group: &Group<'_>) -> String {
    let prompts = counted(group.pooled().map(|row| row.num_prompts).max().unwrap_or(0), "prompt");
    format!("{}, {}, {prompts}", group.dataset, group.decoding_text())
}

fn group_lines<'a>(group: &Group<'a>) -> Vec<Line<'a, ResultRow>> {
    let has_several = group.drafters().len() > 1;
    let mut drafter = DrafterName::None;
    let mut lines = Vec::new();
    for row in group.pooled() {
        if std::mem::replace(&mut drafter, row.drafter) != row.drafter && has_several {
            lines.push(Line::Heading(format!("{}:", drafter.text())));
        }
        let mark = group.standing(row).map(|standing| match standing {
            Standing::All => FASTEST,
            Standing::Road => BEST,
            Standing::Rule => BEST_OF_RULE,
        });
        let name = if has_several { row.rule_label() } else { row.label() };
        lines.push(Line::Row { name, mark, is_wrong: row.lossless == Some(false), row });
    }
    lines
}

/// The lines as aligned text under the columns that `width` has room for; `first` heads the names.
fn fitted<Row>(
    first: &str,
    lines: &[Line<'_, Row>],
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
    lines: &[Line<'_, Row>],
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
            Line::Heading(text) => {
                table.add_row([Cell::new(text).add_attribute(Attribute::Underlined)]);
                continue;
            }
            Line::Row { name, mark, is_wrong, row } => (name, mark, *is_wrong, *row),
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

/// `1 prompt`, `2 prompts`.
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn width_of(line: &str) -> usize {
    line.chars().count()
}

/// `value` with so many decimals; `-` where there is none. What rounds to 0 has no sign.
fn number(value: f64, decimals: usize) -> String {
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

/// Whether a row is lossless, and how many ties that took: `yes`, `yes, 2 ties`, `NO`.
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
    fn tables_are_aligned_and_fit_80_columns() {
        let rows: Vec<ResultRow> =
            fixture::rows().into_iter().filter(|row| row.dataset == "gsm8k").collect();
        let text = render_table(&rows, Some(80), false);
        assert!(text.lines().all(|line| width_of(line) <= 80), "{text}");
        let greedy = text.split("\n\n").next().expect("a table");
        insta::assert_snapshot!(greedy, @r#"
        gsm8k, greedy, 20 prompts
        setting              tok/s  speed-up  model  discard  verify  lossless
        target alone         158.7     1.00x  1.00x    0.000   1.000       yes
        separate draft:
        K = 1                258.1     1.63x  1.59x    0.057   0.532       yes
        K = 2                313.9     1.98x  1.89x    0.150   0.386       yes
        K = 3                340.8     2.15x  2.03x    0.253   0.319       yes
        K = 4                383.6     2.42x  2.28x    0.251   0.256       yes
        K = 5                403.9     2.54x  2.39x    0.290   0.221       yes
        K = 6                416.6     2.62x  2.45x    0.339   0.197       yes
        K = 8                423.0     2.66x  2.50x    0.434   0.168       yes  fastest
        K = 10               392.9     2.47x  2.33x    0.643   0.159       yes
        K = 12               380.0     2.39x  2.28x    0.768   0.145       yes
        K = 14               378.5     2.38x  2.28x    0.821   0.132       yes
        heuristic K = 1      377.1     2.38x  2.24x    0.485   0.214       yes
        heuristic K = 5      398.8     2.51x  2.37x    0.520   0.177       yes  *
        h = 0.1              362.7     2.29x  2.17x    0.223   0.288       yes
        h = 0.3              397.3     2.50x  2.37x    0.388   0.205       yes
        h = 0.5              399.4     2.52x  2.40x    0.558   0.162       yes  *
        h = 0.7              373.0     2.35x  2.28x    0.748   0.149       yes
        h = 0.9              344.3     2.17x  2.12x    1.014   0.134       yes
        lagless h = 0.1      304.1     1.92x  1.84x    0.126   0.350       yes
        lagless h = 0.3      353.9     2.23x  2.13x    0.238   0.251       yes
        lagless h = 0.5      377.4     2.38x  2.27x    0.420   0.189       yes  *
        lagless h = 0.7      344.8     2.17x  2.09x    0.730   0.178       yes
        lagless h = 0.9      319.1     2.01x  1.97x    1.124   0.141       yes
        eta = 0.3            339.5     2.14x  2.09x    1.008   0.141       yes
        eta = 0.5            348.1     2.19x  2.13x    0.679   0.202       yes
        eta = 0.6            351.8     2.22x  2.13x    0.316   0.278       yes  *
        eta = 0.7            314.3     1.98x  1.90x    0.198   0.373       yes
        eta = 0.8            292.3     1.84x  1.78x    0.114   0.436       yes
        q = 0.3              313.5     1.98x  1.93x    1.136   0.165       yes
        q = 0.5              371.2     2.34x  2.28x    0.561   0.188       yes  *
        q = 0.6              353.7     2.23x  2.14x    0.197   0.302       yes
        joint eta = 0.05     349.7     2.20x  2.15x    0.994   0.128       yes
        joint eta = 0.2      352.4     2.22x  2.10x    0.787   0.185       yes
        joint eta = 0.4      392.0     2.47x  2.33x    0.380   0.215       yes  *
        joint eta = 0.6      370.0     2.33x  2.22x    0.209   0.278       yes
        entropy h = 0.2      287.3     1.81x  1.75x    0.092   0.451       yes
        entropy h = 0.3      331.2     2.09x  2.00x    0.192   0.343       yes
        entropy h = 0.35     353.9     2.23x  2.14x    0.358   0.267       yes  *
        entropy h = 0.4      338.7     2.13x  2.08x    0.689   0.214       yes
        worth(head) = 0.08   319.2     2.01x  1.96x    1.171   0.146       yes
        worth(head) = 0.187  358.3     2.26x  2.20x    0.897   0.136       yes
        worth(head) = 0.45   401.6     2.53x  2.42x    0.452   0.181       yes  *
        worth(eta) = 0.08    363.6     2.29x  2.20x    0.845   0.147       yes
        worth(eta) = 0.187   402.2     2.53x  2.40x    0.524   0.170       yes  *
        worth(eta) = 0.45    373.9     2.36x  2.23x    0.240   0.268       yes
        worth(H) = 0.08      339.2     2.14x  2.05x    0.977   0.160       yes
        worth(H) = 0.187     394.5     2.49x  2.34x    0.515   0.184       yes  *
        worth(H) = 0.45      366.4     2.31x  2.20x    0.182   0.290       yes
        self-draft, exit 1:
        K = 1                233.4     1.47x  1.44x    0.099   0.552       yes
        K = 2                267.5     1.69x  1.63x    0.203   0.405       yes
        K = 3                282.7     1.78x  1.71x    0.308   0.333       yes
        K = 4                292.8     1.84x  1.77x    0.378   0.283       yes
        K = 5                308.3     1.94x  1.86x    0.395   0.239       yes  best
        K = 6                297.9     1.88x  1.79x    0.519   0.223       yes
        heuristic K = 2      290.0     1.83x  1.75x    0.560   0.228       yes  *
        eta = 0.3            202.3     1.27x  1.27x    1.553   0.184       yes
        eta = 0.5            220.3     1.39x  1.37x    1.095   0.260       yes
        eta = 0.6            263.6     1.66x  1.62x    0.499   0.312       yes
        eta = 0.7            275.2     1.73x  1.68x    0.202   0.380       yes  *
        eta = 0.8            256.1     1.61x  1.57x    0.158   0.453       yes
        q = 0.3              219.4     1.38x  1.37x    1.317   0.188       yes
        q = 0.5              254.8     1.61x  1.58x    0.804   0.229       yes
        q = 0.6              274.7     1.73x  1.68x    0.366   0.326       yes  *
        joint eta = 0.2      268.5     1.69x  1.64x    0.832   0.187       yes
        joint eta = 0.4      295.4     1.86x  1.79x    0.502   0.233       yes  *
        joint eta = 0.6      286.3     1.80x  1.74x    0.329   0.312       yes
        entropy h = 0.25     260.0     1.64x  1.59x    0.188   0.432       yes
        entropy h = 0.3      275.1     1.73x  1.68x    0.250   0.364       yes  *
        entropy h = 0.35     269.4     1.70x  1.66x    0.568   0.269       yes
        worth(eta) = 0.08    220.9     1.39x  1.37x    1.351   0.178       yes
        worth(eta) = 0.187   272.9     1.72x  1.66x    0.791   0.191       yes  *
        worth(H) = 0.08      249.5     1.57x  1.53x    1.067   0.168       yes
        worth(H) = 0.187     281.9     1.78x  1.72x    0.681   0.202       yes  *
        best: fastest of its road; *: of its rule
        "#);
    }

    #[test]
    fn narrow_tables_lose_columns_and_not_rows() {
        let rows = fixture::rows();
        let wide = render_table(&rows, None, false);
        for width in [45, 50, 60, 70] {
            let text = render_table(&rows, Some(width), false);
            assert!(text.lines().all(|line| width_of(line) <= width), "{text}");
            assert_eq!(text.lines().count(), wide.lines().count());
        }
        assert!(render_table(&rows, Some(1), false).contains("speed-up"));
    }

    #[test]
    fn colour_adds_nothing_but_colour() {
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
    fn forgiven_ties_stand_beside_the_verdict() {
        let mut rows = fixture::rows();
        for row in rows.iter_mut().filter(|row| row.lossless.is_some()) {
            row.num_forgiven_ties = if row.drafter == DrafterName::None { 0 } else { 2 };
        }
        let text = render_table(&rows, None, false);
        assert!(text.contains("yes, 2 ties\n"), "{text}");
        let alone = text.lines().find(|line| line.starts_with("target alone")).expect("a row");
        assert!(alone.ends_with(" yes"), "{alone}");
    }

    #[test]
    fn what_was_not_measured_is_a_dash() {
        let mut rows = fixture::rows();
        for row in &mut rows {
            (row.tokens_per_second, row.speedup, row.lossless) = (f64::NAN, None, Some(false));
        }
        let text = render_table(&rows, None, false);
        assert!(text.contains("NO") && !text.contains("NaN") && !text.contains("best"), "{text}");
        assert_eq!(render_table(&[], Some(80), true), "");
    }
}
