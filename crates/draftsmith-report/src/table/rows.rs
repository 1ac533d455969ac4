//! The tables of one evaluation. There is a table for each dataset and way of decoding, with a
//! heading for each drafter if there are several. A further table shows each drafter at its fastest
//! setting, at standard costs.

use std::path::Path;

use super::{Line, Table, explained_tables};
use crate::results::{Conclusion, DrafterName, Group, ResultRow, groups};
use crate::text::{counted, number, percent, thousands, times, wrapped};

/// Renders an evaluation as text: its conclusion, the tables of rows, and the path of the report.
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

/// Renders the rows that cover all prompts as text tables, one for each dataset and way of
/// decoding, with a final line break. The least important columns are dropped until lines fit into
/// `width`, or into 80 columns if the width is unknown.
pub fn render_table(rows: &[ResultRow], width: Option<usize>, colour: bool) -> String {
    let groups = groups(rows);
    let tables = groups.iter().map(|group| {
        let prompts = group.pooled().map(|row| row.num_prompts).max().unwrap_or(0);
        (format!("{}, {}\n", group.name(), counted(prompts, "prompt")), results_table(group))
    });
    explained_tables(&tables.collect::<Vec<_>>(), width, colour)
}

/// Tabulates the rows of a group that cover all prompts.
pub(crate) fn results_table<'a>(group: &Group<'a>) -> Table<&'a ResultRow> {
    let has_several = group.drafters().len() > 1;
    let mut drafter = DrafterName::None;
    let mut lines = Vec::new();
    for row in group.pooled() {
        if std::mem::replace(&mut drafter, row.drafter) != row.drafter && has_several {
            lines.push(Line::heading(drafter.text() + ":"));
        }
        let name = if has_several { row.rule_label() } else { row.label() };
        let class = if row.lossless == Some(false) { "wrong" } else { "" };
        lines.push(Line { mark: group.mark(row), class, ..Line::of(name, row) });
    }
    let mut table = Table::new("setting", lines);
    table.marks = &[
        ["best", "of its kind of drafter", "best of its kind"],
        ["*", "best of its rule", "best of its rule"],
    ];
    table
        .column("tok/s", "tok/s", 0, |row| number(row.tokens_per_second, 1))
        .column("speed-up", "speed-up", 0, |row| times(row.speedup))
        .column("95 %", "95 %", 2, |row| row.speedup_range())
        .classed("range")
        .column("7B/70B", "7B/70B costs", 1, |row| times(Some(row.speedup_at_paper_costs)))
        .column("model", "modelled", 5, |row| times(row.modelled_speedup))
        .column("discard", "discard rate", 3, |row| number(row.discard_rate, 3))
        .column("verify", "verification rate", 4, |row| number(row.verification_rate, 3))
        .column("tok/fwd", "tokens per forward", 6, |row| number(row.compression_rate, 2))
        .page("accepted", |row| percent(row.counts.acceptance_rate(), 1))
        .page("tokens", |row| thousands(row.counts.num_tokens))
        .page("target forwards", |row| thousands(row.counts.num_target_forwards))
        .page("draft forwards", |row| thousands(row.counts.num_draft_forwards))
        .column("lossless", "lossless", 1, |row| lossless(row))
        .classed("lossless")
}

/// Formats whether a row is lossless, with the number of forgiven ties: `yes`, `yes, 2 ties` or
/// `NO`, and `-` if unchecked.
fn lossless(row: &ResultRow) -> String {
    let verdict = row.lossless.map_or("-", |lossless| if lossless { "yes" } else { "NO" });
    match row.num_forgiven_ties {
        0 => verdict.to_owned(),
        ties => format!("{verdict}, {}", counted(ties, "tie")),
    }
}

/// Tabulates each drafter of a group at its fastest setting.
pub(crate) fn standard_table<'a>(group: &Group<'a>) -> Table<&'a ResultRow> {
    let rows = group.best_by(|row| row.drafter).into_iter();
    let mut table = Table::new("drafter", rows.map(|row| Line::of(row.label(), row)))
        .page("tokens per round", |row| number(row.tokens_per_round, 2));
    for position in [1, 2, 4, 8] {
        table = table.page(format!("accepted up to {position}"), |row| {
            let share = row.unconditional_acceptance.get(position - 1);
            number(share.copied().unwrap_or(f64::NAN), 2)
        });
    }
    table
        .page("improvement by size", |row| times(row.improvement_by_size))
        .page("improvement by time", |row| times(row.improvement_by_time))
        .page("speed-up", |row| times(row.speedup))
}
