//! The rows of an evaluation as text: what `evaluate` prints and `inspect` shows of a result.
//!
//! One aligned table for each dataset and way of decoding, over all prompts; the rows by category are for the report.
//! Nothing is said by colour alone.

use comfy_table::{Attribute, Cell, CellAlignment, Color, Table};

use crate::results::{Group, ResultRow, groups};

/// A column: its heading, its text in a row, and when it goes if the terminal is too narrow.
struct Column {
    heading: &'static str,
    text: fn(&ResultRow) -> String,
    /// The greatest goes first; 0 never goes.
    expendable: usize,
}

const COLUMNS: [Column; 8] = [
    Column { heading: "setting", text: ResultRow::label, expendable: 0 },
    Column { heading: "tok/s", text: |row| number(row.tokens_per_second, 1), expendable: 0 },
    Column { heading: "speed-up", text: |row| times(row.speedup), expendable: 0 },
    Column { heading: "model", text: |row| times(row.modelled_speedup), expendable: 3 },
    Column { heading: "discard", text: |row| number(row.discard_rate, 3), expendable: 1 },
    Column { heading: "verify", text: |row| number(row.verification_rate, 3), expendable: 1 },
    Column { heading: "tok/fwd", text: |row| number(row.compression_rate, 2), expendable: 4 },
    Column { heading: "lossless", text: |row| yes_or_no(row.lossless).into(), expendable: 2 },
];

/// The pooled rows as text tables, one for each dataset and way of decoding, ending with a line break.
///
/// Columns are left out, the least telling first, until the lines fit `width`; without one, all are there.
pub(crate) fn render_table(rows: &[ResultRow], width: Option<usize>, colour: bool) -> String {
    let mut tables = Vec::new();
    for group in groups(rows) {
        let mut least_expendable = usize::MAX;
        let lines = loop {
            let columns: Vec<&Column> =
                COLUMNS.iter().filter(|column| column.expendable < least_expendable).collect();
            let lines = table_lines(&group, &columns, colour);
            let widest =
                table_lines(&group, &columns, false).iter().map(|line| width_of(line)).max();
            let next = columns.iter().map(|column| column.expendable).max().unwrap_or(0);
            if next == 0 || width.is_none_or(|width| widest.unwrap_or(0) <= width) {
                break lines;
            }
            least_expendable = next;
        };
        tables.push(format!("{}\n{}\n", heading(&group), lines.join("\n")));
    }
    tables.join("\n")
}

fn heading(group: &Group<'_>) -> String {
    let num_prompts = group.pooled().map(|row| row.num_prompts).max().unwrap_or(0);
    let prompts = if num_prompts == 1 { "prompt" } else { "prompts" };
    format!("{}, {}, {num_prompts} {prompts}", group.dataset, group.decoding_text())
}

fn table_lines(group: &Group<'_>, columns: &[&Column], colour: bool) -> Vec<String> {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).force_no_tty();
    if colour {
        table.enforce_styling();
    }
    let mut header: Vec<Cell> = columns
        .iter()
        .map(|column| Cell::new(column.heading).add_attribute(Attribute::Dim))
        .collect();
    header.push(Cell::new(""));
    table.set_header(header);
    for row in group.pooled() {
        let best = group.is_best(row);
        let mut cells: Vec<Cell> = columns
            .iter()
            .map(|column| {
                let mut cell = Cell::new((column.text)(row));
                if best {
                    cell = cell.add_attribute(Attribute::Bold);
                }
                if row.lossless == Some(false) {
                    cell = cell.fg(Color::Red);
                }
                cell
            })
            .collect();
        cells.push(Cell::new(if best { "best" } else { "" }).add_attribute(Attribute::Bold));
        table.add_row(cells);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if index == 0 { 0 } else { 2 }, 0));
        if 0 < index && index < columns.len() {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect()
}

fn width_of(line: &str) -> usize {
    line.chars().count()
}

/// `value` with so many decimals; `-` where there is none.
fn number(value: f64, decimals: usize) -> String {
    if value.is_finite() { format!("{value:.decimals$}") } else { "-".into() }
}

fn times(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{}x", number(value, 2)))
}

fn yes_or_no(lossless: Option<bool>) -> &'static str {
    match lossless {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "-",
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
        insta::assert_snapshot!(text, @r#"
        gsm8k, greedy, 20 prompts
        setting       tok/s  speed-up  model  discard  verify  tok/fwd  lossless
        target alone  158.8     1.00x  1.00x    0.000   1.000     1.00       yes
        K = 1         257.8     1.62x  1.59x    0.061   0.534     1.87       yes
        K = 2         325.0     2.05x  1.98x    0.104   0.373     2.68       yes
        K = 3         343.7     2.16x  2.08x    0.245   0.316     3.16       yes
        K = 4         379.6     2.39x  2.29x    0.268   0.258     3.88       yes
        K = 5         408.9     2.57x  2.46x    0.274   0.219     4.57       yes
        K = 6         399.3     2.51x  2.40x    0.391   0.208     4.81       yes
        K = 8         411.5     2.59x  2.49x    0.483   0.171     5.85       yes  best
        K = 10        398.3     2.51x  2.43x    0.617   0.156     6.42       yes
        K = 12        356.4     2.24x  2.20x    0.863   0.158     6.32       yes
        K = 14        378.3     2.38x  2.34x    0.824   0.132     7.59       yes
        h = 0.1       337.0     2.12x  2.06x    0.119   0.348     2.87       yes
        h = 0.3       367.2     2.31x  2.24x    0.262   0.270     3.70       yes
        h = 0.5       392.2     2.47x  2.40x    0.438   0.198     5.04       yes  best
        h = 0.7       385.5     2.43x  2.40x    0.639   0.157     6.38       yes
        h = 0.9       335.3     2.11x  2.11x    1.036   0.147     6.81       yes

        gsm8k, sampled at T = 0.7, 20 prompts
        setting       tok/s  speed-up  model  discard  verify  tok/fwd  lossless
        target alone  159.0     1.00x  1.00x    0.000   1.000     1.00         -
        K = 1         245.0     1.54x  1.52x    0.117   0.561     1.78         -
        K = 2         303.6     1.91x  1.86x    0.184   0.399     2.51         -
        K = 3         337.9     2.12x  2.05x    0.261   0.321     3.11         -
        K = 4         341.5     2.15x  2.07x    0.412   0.287     3.48         -
        K = 5         368.2     2.32x  2.22x    0.428   0.243     4.12         -  best
        K = 6         361.9     2.28x  2.18x    0.549   0.229     4.37         -
        K = 8         354.6     2.23x  2.15x    0.721   0.201     4.97         -
        K = 10        330.7     2.08x  2.02x    0.975   0.188     5.33         -
        K = 12        329.4     2.07x  2.04x    1.041   0.168     5.96         -
        K = 14        301.2     1.89x  1.87x    1.301   0.169     5.91         -
        h = 0.1       299.5     1.88x  1.84x    0.172   0.409     2.44         -
        h = 0.3       361.6     2.27x  2.21x    0.257   0.281     3.56         -  best
        h = 0.5       358.7     2.26x  2.21x    0.489   0.234     4.27         -
        h = 0.7       361.0     2.27x  2.24x    0.681   0.187     5.35         -
        h = 0.9       316.3     1.99x  1.99x    1.129   0.165     6.06         -
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
