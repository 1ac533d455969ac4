//! Results of replay as text: a table for each drafter, way of decoding and set of costs.

use super::{Column, TableLine, counted, explained, fitted, number, times, wrapped};
use crate::results::{Estimate, LookUps, ReplayGroup, ReplayRow, ReplayedTree};

/// A line of the table.
enum ReplayLine<'a> {
    Rule(&'a ReplayRow),
    /// The gain of the oracle.
    Oracle(Estimate),
}

/// The mark of the rule that gains most.
const BEST_MARK: &str = "*";

/// The groups as text tables with a final line break; empty without groups.
///
/// The least important columns are dropped until lines fit into `width`, if it is given.
pub fn render_replay_table(groups: &[ReplayGroup], width: Option<usize>, colour: bool) -> String {
    let tables = groups.iter().map(|group| {
        let (drafter, decoding) = (group.drafter.text(), group.decoding.text());
        let heading = [
            format!("{drafter}, {decoding}, {}", group.cost_source.text()),
            costs(group),
            format!(
                "settings chosen on {}, judged on {}",
                counted(group.num_validation_prompts, "validation prompt"),
                counted(group.num_test_prompts, "test prompt"),
            ),
        ];
        let heading = heading.into_iter().chain(group.tree.as_ref().map(tree));
        let mut lines: Vec<String> = heading.flat_map(|text| wrapped(&text, width)).collect();
        lines.extend(rule_lines(&group.rows, group.oracle, width, colour));
        lines.extend(group.look_ups.as_ref().map(LookUps::text));
        lines.join("\n") + "\n"
    });
    let mut text = tables.collect::<Vec<_>>().join("\n");
    if !groups.is_empty() {
        text += &format!("\n{}", legend(&text, width));
    }
    text
}

/// The rules of one group as a text table with a legend and a final line break, with the columns of
/// [`render_replay_table`].
pub fn render_rules(
    rows: &[ReplayRow],
    oracle: Option<Estimate>,
    width: Option<usize>,
    colour: bool,
) -> String {
    let lines = rule_lines(rows, oracle, width, colour).join("\n");
    format!("{lines}\n\n{}", legend(&lines, width))
}

fn legend(table: &str, width: Option<usize>) -> String {
    let legend = format!(
        "{BEST_MARK}: gains most; gain: modelled speed over that of the best K; times are the replayed \
         counts times the costs, without prefill"
    );
    let words = explained(table, width).map(|words| words + "\n").unwrap_or_default();
    wrapped(&legend, width).join("\n") + "\n" + &words
}

/// `0.90 ms a draft forward, 6.20 a target forward, 0.20 a row`.
fn costs(group: &ReplayGroup) -> String {
    let milliseconds = |seconds: f64| number(1e3 * seconds, 2);
    let costs = &group.costs;
    let mut text = format!(
        "{} ms a draft forward, {} a target forward",
        milliseconds(costs.draft_seconds),
        milliseconds(costs.target_seconds)
    );
    if costs.row_seconds > 0.0 {
        text += &format!(", {} a row", milliseconds(costs.row_seconds));
    }
    text
}

/// `static tree 3-2.1, K = 2, the best of 410 shapes: 1.31x, +5.0% over the best K (+3.1..+6.9)`.
fn tree(tree: &ReplayedTree) -> String {
    let ReplayedTree { shape, candidate_length, num_tried, speedup, gain, .. } = *tree;
    format!(
        "static tree {shape}, K = {candidate_length}, the best of {num_tried} shapes: {}, {} over the \
         best K ({})",
        times(Some(speedup.value)),
        marked(gain.value, signed),
        interval(gain, signed),
    )
}

fn rule_lines(
    rows: &[ReplayRow],
    oracle: Option<Estimate>,
    width: Option<usize>,
    colour: bool,
) -> Vec<String> {
    let mut judged: Vec<ReplayLine<'_>> = rows.iter().map(ReplayLine::Rule).collect();
    judged.extend(oracle.map(ReplayLine::Oracle));
    let best = judged.iter().filter_map(ReplayLine::own_gain).map(|gain| gain.value);
    let best = best.filter(|gain| gain.is_finite()).reduce(f64::max);
    let lines = judged.iter().map(|row| TableLine::Row {
        name: row.name(),
        mark: row.own_gain().filter(|gain| Some(gain.value) == best).map(|_| BEST_MARK),
        is_wrong: false,
        row,
    });
    fitted("setting", &lines.collect::<Vec<_>>(), &columns(), width, colour)
}

fn columns<'a>() -> [Column<ReplayLine<'a>>; 9] {
    [
        Column::new("speed-up", 0, |row| row.of_rule(|rule| times(Some(rule.speedup.value)))),
        Column::new("95 %", 7, |row| {
            row.of_rule(|rule| interval(rule.speedup, |speedup| number(speedup, 2)))
        }),
        Column::new("gain", 0, |row| {
            row.gain().map_or_else(|| "-".into(), |gain| marked(gain.value, signed))
        }),
        Column::new("95 %", 1, |row| {
            row.gain().map_or_else(String::new, |gain| interval(gain, signed))
        }),
        Column::new("discard", 5, |row| row.of_rule(|rule| number(rule.discard_rate, 3))),
        Column::new("verify", 4, |row| row.of_rule(|rule| number(rule.verification_rate, 3))),
        Column::new("ceiling", 2, |row| {
            row.estimate(|rule| rule.ceiling, |ceiling| marked(ceiling.value, signed))
        }),
        Column::new("reached", 3, |row| {
            row.estimate(|rule| rule.share_of_ceiling, |share| marked(share.value, percent))
        }),
        Column::new("95 %", 6, |row| {
            row.estimate(|rule| rule.share_of_ceiling, |share| interval(share, percent))
        }),
    ]
}

impl ReplayLine<'_> {
    fn name(&self) -> String {
        match self {
            Self::Rule(rule) => rule.label(),
            Self::Oracle(_) => "oracle".into(),
        }
    }

    /// The gain over the best fixed length; None for the best fixed length itself.
    fn gain(&self) -> Option<Estimate> {
        match self {
            Self::Rule(rule) => (!rule.is_best_fixed()).then_some(rule.gain),
            Self::Oracle(gain) => Some(*gain),
        }
    }

    /// The gain of a rule; None for the oracle.
    fn own_gain(&self) -> Option<Estimate> {
        self.gain().filter(|_| matches!(self, Self::Rule(_)))
    }

    fn of_rule(&self, text: impl Fn(&ReplayRow) -> String) -> String {
        match self {
            Self::Rule(rule) => text(rule),
            Self::Oracle(_) => String::new(),
        }
    }

    fn estimate(
        &self,
        of: impl Fn(&ReplayRow) -> Option<Estimate>,
        text: impl Fn(Estimate) -> String,
    ) -> String {
        self.of_rule(|rule| of(rule).map_or_else(String::new, &text))
    }
}

/// `+2.0..+4.8`; empty if an end is not finite.
fn interval(estimate: Estimate, text: impl Fn(f64) -> String) -> String {
    if estimate.low.is_finite() && estimate.high.is_finite() {
        format!("{}..{}", text(estimate.low), text(estimate.high))
    } else {
        String::new()
    }
}

/// A share with its percent sign; a dash if it is not finite.
fn marked(share: f64, text: impl Fn(f64) -> String) -> String {
    if share.is_finite() { text(share) + "%" } else { number(share, 0) }
}

/// `+4.1`, in percent.
fn signed(share: f64) -> String {
    let text = number(100.0 * share, 1);
    if text.starts_with('-') { text } else { format!("+{text}") }
}

fn percent(share: f64) -> String {
    number(100.0 * share, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;
    use crate::table::width_of;

    #[test]
    fn a_replay_fits_80_columns() {
        let text = render_replay_table(&fixture::replays()[..1], Some(80), false);
        insta::assert_snapshot!(text, @"
        draft, greedy, costs of this machine
        0.90 ms a draft forward, 6.20 a target forward, 0.20 a row
        settings chosen on 120 validation prompts, judged on 240 test prompts
        setting              speed-up    gain          95 %  verify  ceiling  reached
        K = 6                   2.41x       -                 0.202
        heuristic K = 5         2.31x   -4.2%    -5.6..-2.8   0.206
        h = 0.6                 2.46x   +2.1%    +0.7..+3.5   0.200    +9.8%      21%
        lagless h = 0.5         2.49x   +3.4%    +2.0..+4.8   0.199   +12.7%      27%
        eta = 0.45              2.45x   +1.8%    +0.4..+3.2   0.200
        q = 0.4                 2.44x   +1.2%    -0.2..+2.6   0.201
        joint eta = 0.3         2.47x   +2.6%    +1.2..+4.0   0.199
        entropy h = 0.35        2.43x   +0.8%    -0.6..+2.2   0.201
        worth(head) = 0.319     2.51x   +4.1%    +2.7..+5.5   0.198   +15.8%      26%  *
        worth(eta) = 0.299      2.49x   +3.3%    +1.9..+4.7   0.199
        worth(H) = 0.285        2.48x   +2.9%    +1.5..+4.3   0.199
        oracle                         +31.2%  +29.2..+33.2

        *: gains most; gain: modelled speed over that of the best K; times are the
        replayed counts times the costs, without prefill
        verify: target forwards per token; K: candidates per round; h: the head's
        threshold for a rejection; eta: the drafter's confidence threshold; q: threshold
        of the candidate's probability; entropy h: SVIP's entropy threshold; worth:
        tokens that a draft forward must be worth; ceiling: the gain with a perfect
        head; reached: the share of the ceiling
        ");
    }

    #[test]
    fn a_static_tree_is_shown_before_the_rules() {
        let mut group = fixture::replays().remove(0);
        group.tree = Some(fixture::static_tree());
        let text = render_replay_table(&[group], None, false).replace('\n', " ");
        let tree = "static tree 3-2.1, K = 2, the best of 410 shapes: 2.52x, +4.5% over the best K";
        assert!(text.contains(tree) && text.contains("(+3.1..+5.9)"), "{text}");
    }

    #[test]
    fn narrow_tables_drop_columns_but_no_rules() {
        let replays = fixture::replays();
        let num_rules = |text: &str| text.lines().filter(|line| line.contains(" = ")).count();
        let wide = render_replay_table(&replays, None, false);
        for width in [45, 50, 60, 70, 80] {
            let text = render_replay_table(&replays, Some(width), false);
            assert!(text.lines().all(|line| width_of(line) <= width), "{text}");
            assert_eq!(num_rules(&text), num_rules(&wide));
        }
        assert!(wide.contains("reached") && wide.lines().any(|line| line.ends_with(BEST_MARK)));
        assert!(render_replay_table(&replays, Some(80), true).contains('\u{1b}'));
    }

    #[test]
    fn missing_numbers_are_dashes() {
        let mut replays = fixture::replays();
        let nothing = Estimate { value: f64::NAN, low: f64::NAN, high: f64::NAN };
        for row in replays.iter_mut().flat_map(|group| &mut group.rows) {
            (row.speedup, row.gain, row.share_of_ceiling) = (nothing, nothing, Some(nothing));
        }
        let text = render_replay_table(&replays, None, false);
        assert!(!text.contains("NaN") && !text.contains("..-") && !text.contains("-%"), "{text}");
        assert!(!text.lines().any(|line| line.ends_with(BEST_MARK)), "{text}");
        assert_eq!(render_replay_table(&[], Some(80), true), "");
    }
}
