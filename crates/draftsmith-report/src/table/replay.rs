//! Tables of the results of replay, one for each drafter, way of decoding and set of costs.

use draftsmith_theory::CostModel;

use super::{Line, Table, explained_tables};
use crate::results::{Estimate, LookUps, OracleResult, ReplayGroup, ReplayRow, TextRange};
use crate::text::{
    counted, gain, interval, number, percent, sentence_case, signed, times, wrapped,
};

/// A row of the table, which is a rule or the oracle.
pub(crate) struct Judged<'a> {
    /// The rule's results; None for the oracle.
    rule: Option<&'a ReplayRow>,
    /// The modelled speed relative to plain decoding.
    speedup: Estimate,
    /// The number of target forwards per token.
    verification_rate: f64,
    /// The gain over the best fixed length; None for the best fixed length itself.
    gain: Option<Estimate>,
}

/// Renders the groups as text tables with an explanation and a final line break. Empty without
/// groups. The least important columns are dropped until lines fit into `width`, or into 80 columns
/// if the width is unknown.
pub fn render_replay_table(groups: &[ReplayGroup], width: Option<usize>, colour: bool) -> String {
    let table = |group: &'_ ReplayGroup| {
        let heading = [
            format!("{}, {}", group.name(), group.cost_source.text()),
            costs_text(&group.costs) + "; without prefill",
            format!(
                "settings chosen on {}, judged on {}",
                counted(group.num_validation_prompts, "validation prompt"),
                counted(group.num_test_prompts, "test prompt"),
            ),
        ];
        let look_ups = group.look_ups.as_ref().map(LookUps::text);
        let more = [group.theorem_text(), look_ups, TextRange::text(&group.by_text_position)];
        let heading = heading.into_iter().chain(more.into_iter().flatten());
        heading.flat_map(|text| wrapped(&text, width)).map(|line| line + "\n").collect()
    };
    let tables = groups.iter().map(|group| (table(group), replay_table(&group.rows, group.oracle)));
    explained_tables(&tables.collect::<Vec<_>>(), width, colour)
}

/// Renders the rules of one group as a text table with an explanation and a final line break, with
/// the columns of [`render_replay_table`].
pub fn render_rules(
    rows: &[ReplayRow],
    oracle: Option<OracleResult>,
    width: Option<usize>,
    colour: bool,
) -> String {
    explained_tables(&[(String::new(), replay_table(rows, oracle))], width, colour)
}

/// Formats costs in milliseconds, such as `0.90 ms a draft forward, 6.20 a target forward, 0.20 a
/// row`.
pub(crate) fn costs_text(
    &CostModel { draft_seconds, target_seconds, row_seconds }: &CostModel,
) -> String {
    let milliseconds = |seconds: f64| number(1e3 * seconds, 2);
    let (draft, target) = (milliseconds(draft_seconds), milliseconds(target_seconds));
    let mut text = format!("{draft} ms a draft forward, {target} a target forward");
    if row_seconds > 0.0 {
        text += &format!(", {} a row", milliseconds(row_seconds));
    }
    text
}

/// Tabulates the rules and the oracle.
pub(crate) fn replay_table(rows: &[ReplayRow], oracle: Option<OracleResult>) -> Table<Judged<'_>> {
    let best = best_of(rows);
    let rules = rows.iter().map(|rule| {
        let gain = (!rule.is_best_fixed()).then_some(rule.gain);
        let class = match gain {
            Some(gain) if gain.low > 0.0 => "faster",
            Some(gain) if gain.high < 0.0 => "slower",
            _ => "",
        };
        let mark = if best == Some(rule) { "*" } else { "" };
        let ReplayRow { speedup, verification_rate, .. } = *rule;
        let judged = Judged { rule: Some(rule), speedup, verification_rate, gain };
        Line { mark, class, ..Line::of(rule.label(), judged) }
    });
    let oracle = oracle.map(|OracleResult { speedup, gain, verification_rate }| {
        let (verification_rate, gain) = (verification_rate.value, Some(gain));
        Line::of("oracle", Judged { rule: None, speedup, verification_rate, gain })
    });
    let mut table = Table::new("setting", rules.chain(oracle));
    table.marks = &[["*", "gains most", ""]];
    table
        .page("stop rule", |row| row.of_rule(|rule| sentence_case(rule.stop_rule.text())))
        .classed("word")
        .column("speed-up", "speed-up", 0, |row| times(Some(row.speedup.value)))
        .column("95 %", "95 %", 7, |row| interval(row.speedup, |speedup| number(speedup, 2)))
        .classed("range")
        .column("gain", "gain over fixed", 0, |row| {
            row.gain.map_or_else(|| "-".into(), |over| gain(over.value))
        })
        .classed("change")
        .column("95 %", "95 %", 1, |row| {
            row.gain.map_or_else(String::new, |over| interval(over, signed))
        })
        .classed("range")
        .column("discard", "discard rate", 5, |row| row.of_rule(|it| number(it.discard_rate, 3)))
        .column("verify", "verification rate", 4, |row| number(row.verification_rate, 3))
        .column("ceiling", "ceiling", 2, |row| row.ceiling(|ceiling| gain(ceiling.value)))
        .page("95 %", |row| row.ceiling(|ceiling| interval(ceiling, signed)))
        .classed("range")
        .column("reached", "share reached", 3, |row| row.reached(|it| percent(it.value, 0)))
        .column("95 %", "95 %", 6, |row| {
            row.reached(|share| interval(share, |end| number(100.0 * end, 0)))
        })
        .classed("range")
}

/// Returns the rule that gains most over the best fixed length.
pub(crate) fn best_of(rows: &[ReplayRow]) -> Option<&ReplayRow> {
    let rows = rows.iter().filter(|row| !row.is_best_fixed() && row.gain.value.is_finite());
    rows.reduce(|best, row| if row.gain.value > best.gain.value { row } else { best })
}

impl Judged<'_> {
    fn of_rule(&self, text: impl Fn(&ReplayRow) -> String) -> String {
        self.rule.map_or_else(String::new, text)
    }

    fn ceiling(&self, text: impl Fn(Estimate) -> String) -> String {
        self.rule.and_then(|rule| rule.ceiling).map_or_else(String::new, text)
    }

    fn reached(&self, text: impl Fn(Estimate) -> String) -> String {
        self.rule.and_then(|rule| rule.share_of_ceiling).map_or_else(String::new, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;
    use crate::text::width_of;

    #[test]
    fn a_replay_fits_80_columns() {
        let text = render_replay_table(&fixture::replays()[..1], Some(80), false);
        insta::assert_snapshot!(text, @r"
        draft, greedy, costs of this machine
        0.90 ms a draft forward, 6.20 a target forward, 0.20 a row; without prefill
        settings chosen on 120 validation prompts, judged on 240 test prompts
        SpecDec++, Theorem 3.1: c1 = 1.10 ms, c2 = 5.30 ms; with Δ = 0 the threshold is
        0.83, and h = 0.60 implies Δ = -3.65 ms
        first candidates accepted by position in the text: 71% (70..72) up to 512, 64%
        (63..65) up to 2048
        setting                speed-up    gain          95 %  ceiling  reached
        K = 6                     2.41x       -
        heuristic 5               2.31x   -4.2%    -5.6..-2.8
        head 0.6                  2.46x   +2.1%    +0.7..+3.5    +9.8%      21%
        head-without-lag 0.5      2.49x   +3.4%    +2.0..+4.8   +12.7%      27%
        confidence 0.45           2.45x   +1.8%    +0.4..+3.2
        candidate-prob 0.4        2.44x   +1.2%    -0.2..+2.6
        joint-confidence 0.3      2.47x   +2.6%    +1.2..+4.0
        entropy 0.35              2.43x   +0.8%    -0.6..+2.2
        cost-head 0.319           2.51x   +4.1%    +2.7..+5.5   +15.8%      26%  *
        cost-confidence 0.299     2.49x   +3.3%    +1.9..+4.7
        cost-entropy 0.285        2.48x   +2.9%    +1.5..+4.3
        oracle                    3.16x  +31.2%  +29.2..+33.2

        *: gains most; speed-up: over the target alone; gain: modelled speed over that
        of the best K; 95 %: interval of the number before it; ceiling: the gain with a
        perfect head; reached: the share of the ceiling; K: candidates per round; cost:
        drafts while a draft forward yields enough tokens for its time, by head,
        confidence or entropy; oracle: drafts exactly what is accepted; no bound for
        lookup; heuristic: the number in the first round of transformers' heuristic;
        head: SpecDec++'s h; head-without-lag: SpecDec++'s h without the paper's lag of
        one candidate; confidence: Kangaroo's η; candidate-prob: transformers'
        `assistant_confidence_threshold`, for the candidate's own probability;
        joint-confidence: a round ends when the product of its largest probabilities is
        at most this; entropy: SVIP's h
        ");
    }

    #[test]
    fn narrow_tables_drop_columns_but_no_rules() {
        let replays = fixture::replays();
        let num_rules = |text: &str| text.lines().filter(|line| line.contains("x  ")).count();
        let wide = render_replay_table(&replays, None, false);
        for width in [45, 50, 60, 70, 80] {
            let text = render_replay_table(&replays, Some(width), false);
            assert!(text.lines().all(|line| width_of(line) <= width), "{text}");
            assert_eq!(num_rules(&text), num_rules(&wide));
        }
        assert!(wide.contains("reached") && wide.lines().any(|line| line.ends_with('*')));
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
        assert!(!text.lines().any(|line| line.ends_with('*')), "{text}");
        assert_eq!(render_replay_table(&[], Some(80), true), "");
    }
}
