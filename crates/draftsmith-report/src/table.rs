//! Tables of results, as text for terminals and as data for pages.
//!
//! This file owns the table type, its layout, and the words that explain it. `table/rows.rs` shows
//! the rows of one evaluation, `table/pairs.rs` those of two, `table/replay.rs` the results of
//! replay, and `table/heads.rs` acceptance heads. Words mark the best rows, so colour is never the
//! only information.

mod heads;
mod pairs;
mod replay;
mod rows;

use comfy_table::{CellAlignment, ContentArrangement, Row, presets};
use draftsmith_theory::stop_rules;
use minijinja::{Value, context};

use crate::text::{WIDTH, sentence_case, typeset, width_of, wrapped};

pub use heads::{SweptHead, render_head_race, render_predictions, render_sweep_table};
pub(crate) use heads::{head_race_table, scores_table};
pub use pairs::{RowPair, pair_rows, render_pairs};
pub(crate) use replay::{best_of, costs_text, replay_table};
pub use replay::{render_replay_table, render_rules};
pub use rows::{render_evaluation, render_table};
pub(crate) use rows::{results_table, standard_table};

/// A table for terminals and pages.
pub(crate) struct Table<Row> {
    /// The heading of the first column, which holds the names of lines.
    first: &'static str,
    columns: Vec<TableColumn>,
    lines: Vec<Line<Row>>,
    /// The marks, each with its meaning and its badge on pages.
    marks: &'static [[&'static str; 3]],
}

/// A column of a table.
struct TableColumn {
    /// The heading on a terminal. If it is empty, the column is only on pages.
    heading: &'static str,
    /// The heading on a page. If it is empty, the column is only on terminals.
    on_page: String,
    /// The order in which columns are dropped if the terminal is too narrow. The greatest number
    /// goes first, and 0 is always kept.
    expendable: usize,
    /// The CSS class of the column's cells on a page.
    class: &'static str,
    /// The text of each line.
    cells: Vec<String>,
}

/// A line of a table.
pub(crate) struct Line<Row> {
    name: String,
    /// The mark, such as `fastest` or `tuned`; may be empty.
    mark: &'static str,
    /// The CSS class of the row on a page. A row of class `wrong` is red on terminals.
    class: &'static str,
    /// The row; None for a heading.
    row: Option<Row>,
}

impl<Row> Line<Row> {
    /// Creates a line with a row and without a mark.
    pub(crate) fn of(name: impl Into<String>, row: Row) -> Self {
        Self { name: name.into(), mark: "", class: "", row: Some(row) }
    }

    fn heading(name: impl Into<String>) -> Self {
        Self { name: name.into(), mark: "", class: "heading", row: None }
    }
}

impl<Row> Table<Row> {
    /// Creates a table without columns. `first` is the heading of its names.
    pub(crate) fn new(first: &'static str, lines: impl IntoIterator<Item = Line<Row>>) -> Self {
        Self { first, columns: Vec::new(), lines: lines.into_iter().collect(), marks: &[] }
    }

    /// Adds a column for terminals and pages, with a heading for each. If space is short, the
    /// columns with the greatest `expendable` are dropped first, and those with 0 are kept.
    fn column(
        mut self,
        heading: &'static str,
        on_page: impl Into<String>,
        expendable: usize,
        text: impl Fn(&Row) -> String,
    ) -> Self {
        let cell = |line: &Line<Row>| line.row.as_ref().map(&text).unwrap_or_default();
        let (on_page, cells) = (on_page.into(), self.lines.iter().map(cell).collect());
        self.columns.push(TableColumn { heading, on_page, expendable, class: "num", cells });
        self
    }

    /// Adds a column for pages only.
    pub(crate) fn page(self, heading: impl Into<String>, text: impl Fn(&Row) -> String) -> Self {
        self.column("", heading, 0, text)
    }

    /// Sets the CSS class of the last column, such as `word` for texts or `range` for intervals.
    pub(crate) fn classed(mut self, class: &'static str) -> Self {
        self.columns.iter_mut().rev().take(1).for_each(|column| column.class = class);
        self
    }

    /// Returns the columns that have a text in any row and a non-empty `heading`.
    fn filled(&self, heading: impl Fn(&TableColumn) -> &str) -> Vec<&TableColumn> {
        let is_filled = |column: &&TableColumn| {
            !heading(column).is_empty() && column.cells.iter().any(|cell| !cell.is_empty())
        };
        self.columns.iter().filter(is_filled).collect()
    }

    /// Formats the table as aligned lines, without the most expendable columns if `width` is too
    /// narrow for all. An unknown width counts as 80.
    fn text(&self, width: Option<usize>, colour: bool) -> Vec<String> {
        let width = width.unwrap_or(WIDTH);
        let mut kept = self.filled(|column| column.heading);
        loop {
            let lines = self.aligned(&kept);
            let most = kept.iter().map(|column| column.expendable).max().unwrap_or(0);
            if most == 0 || lines.iter().all(|line| width_of(line) <= width) {
                let lines = lines.iter().enumerate();
                return lines.map(|(index, line)| self.styled(index, line, colour)).collect();
            }
            kept.retain(|column| column.expendable < most);
        }
    }

    fn aligned(&self, columns: &[&TableColumn]) -> Vec<String> {
        let names = self.lines.iter().map(|line| line.name.clone());
        let mut lines: Vec<String> = [self.first.to_owned()].into_iter().chain(names).collect();
        for column in columns {
            let cells = [column.heading].into_iter().chain(column.cells.iter().map(String::as_str));
            let [at, width] = [widest(lines.iter()), widest(cells.clone())];
            for (line, cell) in lines.iter_mut().zip(cells) {
                *line = format!("{line:<at$}  {cell:>width$}");
            }
        }
        let at = widest(lines.iter());
        let marks = [""].into_iter().chain(self.lines.iter().map(|line| line.mark));
        let marked = lines.iter().zip(marks).map(|(line, mark)| format!("{line:<at$}  {mark}"));
        marked.map(|line| line.trim_end().to_owned()).collect()
    }

    /// Styles a line of text: headings are dim or underlined, marked rows are bold, and rows of
    /// class `wrong` are red.
    fn styled(&self, index: usize, text: &str, colour: bool) -> String {
        let style = match index.checked_sub(1).map(|index| &self.lines[index]) {
            None => "2",
            Some(line) if line.row.is_none() => "4",
            Some(line) if line.class == "wrong" => "31",
            Some(line) if !line.mark.is_empty() => "1",
            Some(_) => return text.to_owned(),
        };
        if colour { format!("\u{1b}[{style}m{text}\u{1b}[0m") } else { text.to_owned() }
    }

    /// Builds the table's data for the template `table.html`.
    pub(crate) fn view(&self) -> Value {
        let columns = self.filled(|column| &column.on_page);
        let line = |(index, line): (usize, &Line<Row>)| {
            let Line { name, mark, class, .. } = line;
            let cell = |column: &&TableColumn| match (column.class, &column.cells[index]) {
                ("word", text) => ("word", text.clone()),
                (class, figure) => (class, typeset(figure)),
            };
            let known = self.marks.iter().find(|[known, ..]| known == mark);
            let mark = known.map_or(*mark, |[.., badge]| badge);
            let best = if line.mark.is_empty() { "" } else { "best " };
            let cells: Vec<(&str, String)> = columns.iter().map(cell).collect();
            let name = match line.row {
                Some(_) => name.to_owned(),
                None => sentence_case(name.trim_end_matches(':')),
            };
            context! { name, mark, class => format!("{best}{class}"), cells }
        };
        let headings = columns.iter().map(|column| (column.class, column.on_page.clone()));
        context! {
            first => self.first, columns => headings.collect::<Vec<_>>(),
            lines => self.lines.iter().enumerate().map(line).collect::<Vec<_>>(),
        }
    }
}

/// Returns the width of the widest text.
fn widest<T: AsRef<str>>(texts: impl Iterator<Item = T>) -> usize {
    texts.map(|text| width_of(text.as_ref())).max().unwrap_or(0)
}

/// Renders tables, each below its heading, and one explanation of marks, column headings and
/// symbols. A heading is empty or ends with a line break. Returns an empty text without tables.
fn explained_tables<Row>(
    tables: &[(String, Table<Row>)],
    width: Option<usize>,
    colour: bool,
) -> String {
    let Some((_, Table { marks, .. })) = tables.first() else { return String::new() };
    let text = |colour| {
        let text = |(heading, table): &(String, Table<Row>)| {
            format!("{heading}{}\n", table.text(width, colour).join("\n"))
        };
        tables.iter().map(text).collect::<Vec<_>>().join("\n")
    };
    let plain = text(false);
    let lines = || tables.iter().flat_map(|(_, table)| &table.lines);
    let is_shown = |mark: &str| lines().any(|line| line.mark == mark);
    let marks = marks.iter().filter(|[mark, ..]| is_shown(mark));
    let marks = marks.map(|[mark, meaning, _]| format!("{mark}: {meaning}"));
    let legend: Vec<String> = marks.chain(words(&plain)).collect();
    format!("{}\n{}\n", text(colour), wrapped(&legend.join("; "), width).join("\n"))
}

/// The headings and symbols of tables with their meaning. A symbol ends with `=`, `-` or a space.
const WORDS: [(&str, &str); 30] = [
    ("tok/s", "tokens per second"),
    ("speed-up", "over the target alone"),
    ("gain", "modelled speed over that of the best K"),
    ("over best K", "gain in modelled speed"),
    ("95 %", "interval of the number before it"),
    ("B/A", "tokens per second of the second over the first"),
    ("A speed-up", "over the target alone"),
    ("7B/70B", "speed-up of these rounds at SpecDec++'s costs of a 7B draft and a 70B target"),
    ("model", "speed-up at average costs"),
    ("discard", "discarded candidates per token"),
    ("verify", "target forwards per token"),
    ("tok/fwd", "tokens per target forward"),
    ("lossless", "the tokens are the target's"),
    ("ceiling", "the gain with a perfect head"),
    ("reached", "the share of the ceiling"),
    ("least share", "of the fastest head's speed, on the test prompts where it is lowest"),
    ("ECE", "calibration error"),
    ("Brier", "mean squared error"),
    ("KL", "nats from a perfect head"),
    ("unshifted", "KL without the rejection weight's shift; the lowest is the best"),
    ("AUROC", "chance that an accepted candidate ranks above a rejected one"),
    ("mean", "of the predictions"),
    ("true", "share accepted"),
    ("epoch", "of the weights"),
    ("pass", "time of the training"),
    ("K =", "candidates per round"),
    (
        "cost-",
        "drafts while a draft forward yields enough tokens for its time, by head, confidence or entropy",
    ),
    ("lookup ", "4x6 proposes up to 6 tokens after a match of at least 4"),
    ("tree ", "3-2x4x8 has 3, then 2 children, 4 nodes in a draft forward and 8 beside the chain"),
    ("oracle", "drafts exactly what is accepted; no bound for lookup"),
];

/// Yields explanations of the headings and symbols that a table's text contains.
fn words(text: &str) -> impl Iterator<Item = String> {
    let is_heading =
        |word: &str| text.lines().flat_map(|line| line.split("  ")).any(|cell| cell.trim() == word);
    let headings = WORDS.iter().filter_map(move |(word, meaning)| {
        let name = word.trim_end_matches(['=', '-', ' ']);
        let is_shown = if name == *word { is_heading(word) } else { text.contains(word) };
        is_shown.then(|| format!("{name}: {meaning}"))
    });
    let rules = stop_rules().filter_map(move |entry| {
        let (name, doc) = (entry.file_name, entry.grid()?.doc);
        let meaning = doc.split(": ").next().unwrap_or(doc);
        is_labelled(text, name).then(|| format!("{name}: {meaning}"))
    });
    headings.chain(rules)
}

/// Returns whether a text contains a rule's name with its setting, such as `head 0.7`.
fn is_labelled(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(at, _)| {
        let is_whole = !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '-');
        let setting = text[at + name.len()..].strip_prefix(' ');
        is_whole && setting.is_some_and(|it| it.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// Explains the headings and symbols that a table's text contains, on wrapped lines. `None` if
/// there is nothing to explain.
pub fn explained(text: &str, width: Option<usize>) -> Option<String> {
    let words: Vec<String> = words(text).collect();
    (!words.is_empty()).then(|| wrapped(&words.join("; "), width).join("\n"))
}

/// Renders rows below headings, with the given numbers of spaces before and after each cell. The columns
/// with indices `at_right` are right-aligned. Cells are wrapped to fit a `width`, if given.
pub fn plain_table<R: Into<Row>>(
    heading: impl Into<Row>,
    rows: impl IntoIterator<Item = R>,
    at_right: impl IntoIterator<Item = usize>,
    padding: (u16, u16),
    width: Option<usize>,
) -> String {
    let mut table = comfy_table::Table::new();
    table.load_style(presets::NOTHING).set_header(heading).add_rows(rows).force_no_tty();
    if let Some(width) = width {
        let width = width.try_into().unwrap_or(u16::MAX);
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    for column in table.column_iter_mut() {
        column.set_padding(padding);
    }
    for column in at_right {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests;
