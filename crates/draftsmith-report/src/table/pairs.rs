//! Tables that show two evaluations side by side.

use serde::Serialize;

use super::{Line, Table, explained_tables};
use crate::results::{ALL_CATEGORIES, DecodingName, DrafterName, ResultRow, StopRuleName, groups};
use crate::text::{number, times};

/// The results of one setting in two evaluations.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowPair {
    /// The prompt file's name without extension.
    pub dataset: String,
    /// The way of decoding: greedy or sampled.
    pub decoding: DecodingName,
    /// The sampling temperature; 0 for greedy decoding.
    pub temperature: f64,
    /// The drafter.
    pub drafter: DrafterName,
    /// The stop rule.
    pub stop_rule: StopRuleName,
    /// The stop rule's parameter.
    pub setting: Option<f64>,
    /// The tokens per second in each evaluation; null if the setting was not measured there.
    pub tokens_per_second: [Option<f64>; 2],
    /// The speed relative to the target alone in each evaluation; null if unknown.
    pub speedup: [Option<f64>; 2],
    /// The 95 % interval of each `speedup`.
    pub speedup_interval: [Option<[f64; 2]>; 2],
    /// The ratio of tokens per second, the second evaluation's to the first's.
    pub ratio: Option<f64>,
    /// The ratio of the second speed-up to the first, which cancels the machine's speed.
    pub speedup_ratio: Option<f64>,
    #[serde(skip)]
    label: String,
}

/// Pairs the rows of two evaluations that cover all categories, in the order of the first
/// evaluation. The rows that only the second evaluation has follow.
pub fn pair_rows(first: &[ResultRow], second: &[ResultRow]) -> Vec<RowPair> {
    type Key<'a> = (&'a str, DecodingName, f64, DrafterName, StopRuleName, Option<f64>);
    fn key(row: &ResultRow) -> Key<'_> {
        let ResultRow { decoding, temperature, drafter, stop_rule, setting, .. } = *row;
        (&row.dataset, decoding, temperature, drafter, stop_rule, setting)
    }
    let pooled = |rows: &'_ [ResultRow]| -> Vec<ResultRow> {
        rows.iter().filter(|row| row.category == ALL_CATEGORIES).cloned().collect()
    };
    let both = [pooled(first), pooled(second)];
    let find =
        |side: usize, wanted: &ResultRow| both[side].iter().find(|row| key(row) == key(wanted));
    let pair = |row: &ResultRow| {
        let sides = [0, 1].map(|side| find(side, row));
        let of = |pick: fn(&ResultRow) -> Option<f64>| sides.map(|row| row.and_then(pick));
        let over = |[first, second]: [Option<f64>; 2]| Some(second? / first?);
        let tokens_per_second = of(|row| Some(row.tokens_per_second));
        let speedup = of(|row| row.speedup);
        RowPair {
            dataset: row.dataset.clone(),
            decoding: row.decoding,
            temperature: row.temperature,
            drafter: row.drafter,
            stop_rule: row.stop_rule,
            setting: row.setting,
            speedup_interval: sides.map(|row| row.and_then(|row| row.speedup_interval)),
            ratio: over(tokens_per_second),
            speedup_ratio: over(speedup),
            tokens_per_second,
            speedup,
            label: row.label(),
        }
    };
    let added = both[1].iter().filter(|row| find(0, row).is_none());
    both[0].iter().chain(added).map(pair).collect()
}

/// Renders the pairs of two evaluations' rows as text tables, one for each dataset and way of
/// decoding, with a final line break.
pub fn render_pairs(
    first: &[ResultRow],
    second: &[ResultRow],
    width: Option<usize>,
    colour: bool,
) -> String {
    let pairs = pair_rows(first, second);
    let all: Vec<ResultRow> = first.iter().chain(second).cloned().collect();
    let tables = groups(&all).into_iter().map(|group| {
        let key = (group.dataset, group.decoding, group.temperature);
        let own =
            pairs.iter().filter(|it| (it.dataset.as_str(), it.decoding, it.temperature) == key);
        (format!("{}\n", group.name()), pairs_table(own))
    });
    explained_tables(&tables.collect::<Vec<_>>(), width, colour)
}

fn pairs_table<'p>(pairs: impl Iterator<Item = &'p RowPair>) -> Table<&'p RowPair> {
    let lines = pairs.map(|pair| {
        let mark = match pair.speedup_interval {
            [Some([_, high]), Some([low, _])] if low > high => "faster",
            [Some([low, _]), Some([_, high])] if high < low => "slower",
            _ => "",
        };
        Line { mark, ..Line::of(pair.label.clone(), pair) }
    });
    let per_second =
        |pair: &RowPair, side: usize| number(pair.tokens_per_second[side].unwrap_or(f64::NAN), 1);
    let mut table = Table::new("setting", lines);
    table.marks = &[
        ["faster", "the second speed-up's interval is above the first's", ""],
        ["slower", "it is below", ""],
    ];
    table
        .column("A tok/s", "", 2, move |pair| per_second(pair, 0))
        .column("B tok/s", "", 2, move |pair| per_second(pair, 1))
        .column("B/A", "", 0, |pair| times(pair.ratio))
        .column("A speed-up", "", 1, |pair| times(pair.speedup[0]))
        .column("B speed-up", "", 1, |pair| times(pair.speedup[1]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn settings_are_paired_and_those_of_one_side_are_kept() {
        let rows: Vec<ResultRow> =
            fixture::rows().into_iter().filter(|row| row.dataset == "gsm8k").collect();
        let is_pooled = |row: &&ResultRow| row.category == ALL_CATEGORIES;
        let num = rows.iter().filter(is_pooled).count();
        let mut faster: Vec<ResultRow> = rows.clone();
        for row in &mut faster {
            row.tokens_per_second *= 2.0;
            row.speedup = row.speedup.map(|speedup| 1.5 * speedup);
            row.speedup_interval = row.speedup_interval.map(|ends| ends.map(|end| 1.5 * end));
        }
        let last = faster.iter().rposition(|row| is_pooled(&row)).expect("rows");
        let lost = faster.remove(last);
        let pairs = pair_rows(&rows, &faster);
        assert_eq!((pairs.len(), pair_rows(&faster, &rows).len()), (num, num));
        for pair in &pairs {
            let is_lost = (pair.drafter, pair.stop_rule, pair.setting, pair.decoding)
                == (lost.drafter, lost.stop_rule, lost.setting, lost.decoding);
            let expected = if is_lost { None } else { Some(2.0) };
            assert_eq!(pair.ratio, expected, "{pair:?}");
        }
        let text = render_pairs(&rows, &faster, Some(80), false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("  2.00x  ") && text.contains("faster") && !text.contains("NaN"));
        assert_eq!(render_pairs(&[], &[], None, false), "");
    }
}
