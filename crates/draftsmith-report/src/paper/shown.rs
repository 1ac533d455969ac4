//! The rendering of filled tables as text and for the page.

use draftsmith_theory::Estimate;
use minijinja::context;

use crate::results::{FilledBlock, FilledRow, FilledTable};
use crate::text::{WIDTH, typeset, width_of, wrapped};

impl FilledTable {
    /// Builds the table's data for the page.
    pub(crate) fn view(&self) -> minijinja::Value {
        let row = |block: &FilledBlock, row: &FilledRow| {
            let cells = block.texts(row).map(|text| ("num", typeset(&text)));
            context! { name => &row.name, mark => "", class => "", cells => cells.collect::<Vec<_>>() }
        };
        let table = |block: &FilledBlock| {
            let columns = block.columns.iter().map(|name| ("num", name.clone()));
            let columns: Vec<_> = columns.collect();
            let lines: Vec<_> = block.rows.iter().map(|it| row(block, it)).collect();
            context! { first => &block.name, columns, lines }
        };
        let tables: Vec<_> = self.blocks.iter().map(table).collect();
        context! { title => &self.title, note => &self.note, trend => &self.trend, tables }
    }
}

impl FilledBlock {
    /// Formats the figures of a row. Ours have three digits and half the width of their 95 %
    /// interval. The paper's have the largest number of decimals in their column.
    fn texts<'a>(&'a self, row: &'a FilledRow) -> impl Iterator<Item = String> + use<'a> {
        let decimals = |at: usize| {
            let printed = self.rows.iter().filter_map(|row| row.figures[at]);
            let printed = printed.map(|it| it.value.to_string());
            let decimals = printed.map(|it| it.split_once('.').map_or(0, |(_, it)| it.len()));
            decimals.max().unwrap_or(0)
        };
        row.figures.iter().enumerate().map(move |(at, figure)| match figure {
            None => "-".to_owned(),
            Some(figure) if self.is_published => format!("{:.*}", decimals(at), figure.value),
            Some(figure) => three_digits(*figure),
        })
    }

    /// Lays the block out in lines of at most `width` columns. Columns that do not fit follow
    /// below, after a repetition of the names.
    fn lines(&self, names: usize, width: usize) -> Vec<String> {
        let cells: Vec<Vec<String>> =
            self.rows.iter().map(|row| self.texts(row).collect()).collect();
        let widest = |column: usize| {
            let texts = cells.iter().map(|row| width_of(&row[column]));
            texts.chain([width_of(&self.columns[column])]).max().unwrap_or(0)
        };
        let mut lines = Vec::new();
        let mut from = 0;
        while from < self.columns.len() {
            let mut to = from + 1;
            let mut used = names + 2 + widest(from);
            while to < self.columns.len() && used + 2 + widest(to) <= width {
                used += 2 + widest(to);
                to += 1;
            }
            let line = |name: &str, texts: &[String]| {
                let cells = (from..to).map(|at| format!("  {:>1$}", texts[at], widest(at)));
                format!("{name:<names$}{}", cells.collect::<String>())
            };
            lines.push(line(&self.name, &self.columns));
            let rows = self.rows.iter().zip(&cells);
            lines.extend(rows.map(|(row, cells)| line(&format!("  {}", row.name), cells)));
            from = to;
        }
        lines
    }
}

/// Formats a figure with three digits, as in `1.42`, or `1.42 ±0.05` with an interval.
fn three_digits(figure: Estimate) -> String {
    let Estimate { value, low, high } = figure;
    let magnitude = if value == 0.0 { 0.0 } else { value.abs().log10().floor() };
    let decimals = (2.0 - magnitude).clamp(0.0, 9.0) as usize;
    // A constant's interval may have the width of rounding errors.
    match high - low > 1e-12 * value.abs() {
        true => format!("{value:.decimals$} ±{:.decimals$}", (high - low) / 2.0),
        false => format!("{value:.decimals$}"),
    }
}

/// Renders tables as text, with a final line break.
pub fn render_papers(tables: &[FilledTable], width: Option<usize>) -> String {
    let mut text = String::new();
    for table in tables {
        let all = width.unwrap_or(WIDTH);
        let names = table.blocks.iter().flat_map(|block| {
            block.rows.iter().map(|row| 2 + width_of(&row.name)).chain([width_of(&block.name)])
        });
        let names = names.max().unwrap_or(0).min(all / 2);
        let blocks = table.blocks.iter().flat_map(|block| block.lines(names, all));
        let lines = wrapped(&table.title, width).into_iter().chain(blocks);
        let said = [&table.trend, &table.note].into_iter().filter(|it| !it.is_empty());
        for line in lines.chain(said.flat_map(|it| wrapped(it, width))) {
            text += line.trim_end();
            text.push('\n');
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_tables_continue_below() {
        let columns = (1..=9).map(|nth| format!("category {nth}")).collect::<Vec<_>>();
        let figure = Estimate { value: 0.04213, low: 0.04213, high: 0.04213 };
        let rows = vec![FilledRow { name: "a".into(), figures: vec![Some(figure); 9] }];
        let block = FilledBlock { name: "here".into(), is_published: false, columns, rows };
        let lines = block.lines(6, 40);
        assert_eq!(lines.iter().filter(|line| line.starts_with("here")).count(), 5);
        assert!(lines.iter().all(|line| line.len() <= 40) && lines[1].contains("0.0421"));
    }

    #[test]
    fn figures_have_three_digits_and_half_their_interval() {
        let text = |value, low, high| three_digits(Estimate { value, low, high });
        assert_eq!(text(1.4213, 1.37, 1.47), "1.42 ±0.05");
        assert_eq!(text(134.4, 130.0, 139.0), "134 ±4");
        assert_eq!(text(0.5, 0.5, 0.5), "0.500");
        assert_eq!(text(1.0, 1.0 - f64::EPSILON, 1.0), "1.00");
    }
}
