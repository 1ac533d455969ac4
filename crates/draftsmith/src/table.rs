//! The rows of an evaluation as text: what `evaluate` prints and `inspect` shows of a result.
//!
//! One aligned table for each dataset and way of decoding, over all prompts; the rows by category are for the report.
//! Where a separate draft and self-drafts are both there, each road has its heading. The fastest row of all is marked
//! `fastest`, the fastest of the other road `best`, and the fastest of any other stop rule `best h`. Nothing is said by
//! colour alone.

use comfy_table::{Attribute, Cell, CellAlignment, Color, Table};

use crate::results::{Group, ResultRow, Road, groups};

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
    let has_both = [Road::SeparateDraft, Road::SelfDraft]
        .into_iter()
        .all(|road| group.pooled().any(|row| row.drafter.road() == Some(road)));
    let mut road = None;
    for row in group.pooled() {
        let previous = std::mem::replace(&mut road, row.drafter.road());
        if has_both && road != previous {
            let heading = road.map_or_else(String::new, |road| format!("{}:", road.text()));
            table.add_row([Cell::new(heading).add_attribute(Attribute::Underlined)]);
        }
        let mark = group.standing(row).map(|standing| standing.mark(row));
        let mut cells: Vec<Cell> = columns
            .iter()
            .map(|column| {
                let mut cell = Cell::new((column.text)(row));
                if mark.is_some() {
                    cell = cell.add_attribute(Attribute::Bold);
                }
                if row.lossless == Some(false) {
                    cell = cell.fg(Color::Red);
                }
                cell
            })
            .collect();
        cells.push(Cell::new(mark.unwrap_or_default()).add_attribute(Attribute::Bold));
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
        setting            tok/s  speed-up  model  discard  verify  lossless
        target alone       158.8     1.00x  1.00x    0.000   1.000       yes
        separate draft:
        K = 1              256.7     1.62x  1.58x    0.070   0.537       yes
        K = 2              319.6     2.01x  1.95x    0.122   0.378       yes
        K = 3              344.9     2.17x  2.09x    0.236   0.315       yes
        K = 4              383.9     2.42x  2.32x    0.246   0.255       yes
        K = 5              393.6     2.48x  2.37x    0.326   0.228       yes
        K = 6              407.1     2.56x  2.45x    0.364   0.202       yes  best K
        K = 8              383.8     2.42x  2.32x    0.590   0.184       yes
        K = 10             383.5     2.42x  2.33x    0.686   0.161       yes
        K = 12             398.9     2.51x  2.45x    0.679   0.139       yes
        K = 14             354.9     2.24x  2.21x    0.936   0.141       yes
        h = 0.1            332.8     2.10x  2.03x    0.136   0.353       yes
        h = 0.3            378.2     2.38x  2.30x    0.240   0.260       yes
        h = 0.5            430.0     2.71x  2.62x    0.359   0.170       yes  fastest
        h = 0.7            391.4     2.47x  2.43x    0.605   0.157       yes
        h = 0.9            333.9     2.10x  2.10x    1.067   0.141       yes
        self-draft:
        exit 1, K = 1      235.9     1.49x  1.46x    0.087   0.546       yes
        exit 1, K = 2      268.5     1.69x  1.64x    0.198   0.404       yes
        exit 1, K = 3      290.3     1.83x  1.77x    0.265   0.322       yes
        exit 1, K = 4      299.7     1.89x  1.82x    0.343   0.275       yes
        exit 1, K = 5      299.8     1.89x  1.83x    0.428   0.245       yes  best
        exit 1, K = 6      280.9     1.77x  1.70x    0.609   0.239       yes
        exit 1, eta = 0.3  192.2     1.21x  1.22x    1.716   0.190       yes
        exit 1, eta = 0.5  232.9     1.47x  1.47x    0.987   0.242       yes
        exit 1, eta = 0.6  276.8     1.74x  1.70x    0.438   0.295       yes  best eta
        exit 1, eta = 0.7  270.6     1.70x  1.66x    0.213   0.390       yes
        exit 1, eta = 0.8  261.2     1.65x  1.60x    0.137   0.446       yes

        gsm8k, sampled at T = 0.7, 20 prompts
        setting            tok/s  speed-up  model  discard  verify  lossless
        target alone       158.8     1.00x  1.00x    0.000   1.000         -
        separate draft:
        K = 1              246.8     1.55x  1.53x    0.110   0.557         -
        K = 2              291.1     1.83x  1.77x    0.245   0.418         -
        K = 3              336.6     2.12x  2.04x    0.267   0.323         -
        K = 4              349.8     2.20x  2.12x    0.374   0.281         -
        K = 5              376.8     2.37x  2.29x    0.378   0.237         -  fastest
        K = 6              367.6     2.32x  2.22x    0.520   0.223         -
        K = 8              366.3     2.31x  2.22x    0.678   0.193         -
        K = 10             360.7     2.27x  2.21x    0.787   0.173         -
        K = 12             333.9     2.10x  2.07x    1.010   0.165         -
        K = 14             288.1     1.82x  1.79x    1.415   0.174         -
        h = 0.1            309.1     1.95x  1.89x    0.174   0.391         -
        h = 0.3            330.9     2.08x  2.03x    0.268   0.328         -
        h = 0.5            368.4     2.32x  2.27x    0.459   0.225         -  best h
        h = 0.7            346.9     2.19x  2.14x    0.670   0.215         -
        h = 0.9            284.2     1.79x  1.78x    1.357   0.191         -
        self-draft:
        exit 1, K = 1      224.1     1.41x  1.39x    0.147   0.577         -
        exit 1, K = 2      257.8     1.62x  1.58x    0.251   0.422         -
        exit 1, K = 3      285.6     1.80x  1.76x    0.284   0.327         -  best
        exit 1, K = 4      282.8     1.78x  1.73x    0.425   0.292         -
        exit 1, K = 5      258.1     1.63x  1.58x    0.676   0.284         -
        exit 1, K = 6      268.3     1.69x  1.64x    0.690   0.250         -
        exit 1, eta = 0.3  184.0     1.16x  1.17x    1.721   0.244         -
        exit 1, eta = 0.5  217.5     1.37x  1.37x    0.970   0.318         -
        exit 1, eta = 0.6  240.8     1.52x  1.49x    0.532   0.383         -
        exit 1, eta = 0.7  253.0     1.59x  1.56x    0.257   0.431         -  best eta
        exit 1, eta = 0.8  247.9     1.56x  1.53x    0.173   0.475         -
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
