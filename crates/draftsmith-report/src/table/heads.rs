//! Tables of acceptance heads: the scores of their predictions, and the heads of a sweep.

use std::path::PathBuf;

use draftsmith_theory::HeadScores;
use serde::{Deserialize, Serialize};

use super::{Line, Table, explained_tables};
use crate::results::{HeadPredictions, HeadRace, JudgedHead};
use crate::text::{counted, gain, interval, number, percent, signed, times, wrapped};

/// Renders a table of the head's scores on test prompts for each way of decoding, with verdicts.
/// Empty without a head.
pub fn render_predictions(predictions: &[HeadPredictions]) -> String {
    let table = |one: &'_ HeadPredictions| {
        let heading = format!(
            "{}: the head's predictions on {}\n",
            one.drafter.under(one.decoding),
            counted(one.num_test_prompts, "test prompt"),
        );
        (heading, scores_table("", vec![Line::of("head", one.scores)]))
    };
    let mut text =
        explained_tables(&predictions.iter().map(table).collect::<Vec<_>>(), None, false);
    for one in predictions {
        let verdict = format!("{}: {}", one.drafter.under(one.decoding), one.over_online.verdict());
        text += &(wrapped(&verdict, None).join("\n") + "\n");
    }
    text
}

/// Builds a table of scores for terminals and pages.
pub(crate) fn scores_table(first: &'static str, lines: Vec<Line<HeadScores>>) -> Table<HeadScores> {
    Table::new(first, lines)
        .column("ECE", "ECE", 0, |scores| number(scores.ece, 4))
        .column("Brier", "Brier", 0, |scores| number(scores.brier, 4))
        .column("KL", "KL, nats", 0, |scores| number(scores.kl, 4))
        .column("AUROC", "AUROC", 0, |scores| number(scores.auroc.unwrap_or(f64::NAN), 4))
        .column("mean", "mean prediction", 0, |scores| number(scores.mean_predicted, 3))
        .column("true", "share accepted", 0, |scores| number(scores.mean_label, 3))
}

/// A head of a sweep, which is a row of `sweep.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweptHead {
    /// The head's settings, as in `d3-w6-r0.15`.
    pub name: String,
    /// The head's number of layers.
    pub num_layers: usize,
    /// The loss weight of rejected candidates.
    pub rejection_weight: f64,
    /// The share of the target's tokens in the head's training input.
    pub mixing_ratio: f64,
    /// Whether this head is the one in `head/`, which has the lowest `unshifted_kl`.
    pub best: bool,
    /// The epoch from which the head's weights are.
    pub best_epoch: usize,
    /// The head's scores on the validation rows.
    pub scores: HeadScores,
    /// The seconds of the run that trained the head, possibly with others; null if unknown.
    pub seconds: Option<f64>,
    /// The head's directory.
    pub dir: PathBuf,
}

/// Renders the heads of a sweep as a text table with its explanation and a final line break. The
/// least important columns are dropped until lines fit into `width`, or into 80 columns if the
/// width is unknown.
pub fn render_sweep_table(rows: &[SweptHead], width: Option<usize>, colour: bool) -> String {
    let lines = rows.iter().map(|row| {
        let mark = if row.best { "best" } else { "" };
        Line { mark, ..Line::of(row.name.clone(), row) }
    });
    let seconds = |seconds: Option<f64>| seconds.map_or("-".into(), |it| number(it, 1) + " s");
    let table = Table::new("head", lines)
        .column("KL", "", 1, |row| number(row.scores.kl, 4))
        .column("unshifted", "", 0, |row| number(row.scores.comparable_kl(), 4))
        .column("AUROC", "", 0, |row| number(row.scores.auroc.unwrap_or(f64::NAN), 4))
        .column("ECE", "", 2, |row| number(row.scores.ece, 4))
        .column("epoch", "", 3, |row| row.best_epoch.to_string())
        .column("pass", "", 4, |row| seconds(row.seconds));
    explained_tables(&[(String::new(), table)], width, colour)
}

/// Renders the speed of decoding with each head of a sweep as a text table with its explanation and
/// a final line break.
pub fn render_head_race(race: &HeadRace, width: Option<usize>, colour: bool) -> String {
    let heading = format!(
        "heads of {}, {}\n{}\n",
        race.drafter.text(),
        race.cost_source.text(),
        race.verdict()
    );
    let heading = heading.lines().flat_map(|line| wrapped(line, width)).map(|line| line + "\n");
    explained_tables(&[(heading.collect(), head_race_table(race))], width, colour)
}

/// Builds the table of the speed of decoding with each head of a sweep, for terminals and pages.
pub(crate) fn head_race_table(race: &HeadRace) -> Table<&JudgedHead> {
    let lines = race.heads.iter().map(|head| {
        let mark = if head.is_chosen { "*" } else { "" };
        let class = if head.is_chosen { "best" } else { "" };
        Line { mark, class, ..Line::of(head.name.clone(), head) }
    });
    let mut table = Table::new("head", lines);
    table.marks = &[["*", "fastest", ""]];
    table
        .column("speed-up", "speed-up", 0, |head| times(Some(head.speedup)))
        .column("gain", "gain over fixed", 0, |head| gain(head.gain.value))
        .classed("change")
        .column("95 %", "95 %", 1, |head| interval(head.gain, signed))
        .classed("range")
        .column("least share", "least share of the fastest", 2, |head| percent(head.least_share, 1))
        .column("KL", "KL, nats", 3, |head| number(head.kl, 4))
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::HeadMetrics;

    use super::*;
    use crate::report::fixture;

    #[test]
    fn scores_are_shown_with_their_meaning() {
        let text = render_predictions(&fixture::replay().predictions);
        insta::assert_snapshot!(text, @"
        draft, greedy: the head's predictions on 240 test prompts
                 ECE   Brier      KL   AUROC   mean   true
        head  0.1937  0.0510  0.1388  0.8716  0.473  0.667

        draft, sampled: the head's predictions on 240 test prompts
                 ECE   Brier      KL   AUROC   mean   true
        head  0.0123  0.0007  0.0057  0.8716  0.667  0.667

        ECE: calibration error; Brier: mean squared error; KL: nats from a perfect head;
        AUROC: chance that an accepted candidate ranks above a rejected one; mean: of
        the predictions; true: share accepted
        draft, greedy: The head beats vLLM's online estimator, which needs no training.
        Log-loss: 0.231 nats per candidate against 0.262 (better by 0.031, 95 %: 0.021
        to 0.041); speed at costs of this machine: +1.4% (+0.4..+2.4).
        draft, sampled: The head beats vLLM's online estimator, which needs no training.
        Log-loss: 0.231 nats per candidate against 0.262 (better by 0.031, 95 %: 0.021
        to 0.041); speed at costs of this machine: +1.4% (+0.4..+2.4).
        ");
        assert_eq!(render_predictions(&[]), "");
    }

    #[test]
    fn a_race_of_heads_fits_80_columns() {
        let text = render_head_race(&fixture::head_race(), Some(80), false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let shown: Vec<&str> = text.lines().filter(|line| line.starts_with("d2-w")).collect();
        insta::assert_snapshot!(shown.join("\n"), @"
        d2-w6-r0.15 is the fastest of 20 heads. d1-w6-r0.15 has the lowest KL and is
        d2-w1-r0.15      2.39x  +2.6%  +0.6..+4.6        97.6%  0.2900
        d2-w3-r0.15      2.32x  -0.2%  -2.2..+1.8        94.8%  0.2800
        d2-w6-r0.15      2.45x  +5.0%  +3.0..+7.0       100.0%  0.2700  *
        d2-w12-r0.15     2.38x  +2.2%  +0.2..+4.2        97.2%  0.2600
        ");
    }

    fn row(num_layers: usize, rejection_weight: f64, best: bool) -> SweptHead {
        let mut metrics = HeadMetrics::unshifting(rejection_weight);
        for (predicted_prob, label) in [(0.3, 0.2), (0.6, 0.9), (0.5, 0.7)] {
            metrics.update(predicted_prob, label);
        }
        let name = format!("d{num_layers}-w{rejection_weight}-r0.15");
        SweptHead {
            dir: format!("checkpoints/mine/sweep/{name}").into(),
            name,
            num_layers,
            rejection_weight,
            mixing_ratio: 0.15,
            best,
            best_epoch: 3,
            scores: metrics.finish(),
            seconds: best.then_some(12.34),
        }
    }

    #[test]
    fn every_head_has_a_line_and_the_best_has_a_mark() {
        let rows = [row(0, 1.0, false), row(3, 1.5, true)];
        let text = render_sweep_table(&rows, Some(80), false);
        insta::assert_snapshot!(text, @"
        head               KL  unshifted   AUROC     ECE  epoch    pass
        d0-w1-r0.15    0.1114     0.1114  0.8241  0.2000      3       -
        d3-w1.5-r0.15  0.1114     0.0766  0.8241  0.2000      3  12.3 s  best

        ECE: calibration error; KL: nats from a perfect head; unshifted: KL without the
        rejection weight's shift; the lowest is the best; AUROC: chance that an accepted
        candidate ranks above a rejected one; epoch: of the weights; pass: time of the
        training
        ");
        for width in [30, 50, 80] {
            let text = render_sweep_table(&rows, Some(width), false);
            assert!(text.contains("unshifted") && text.contains("AUROC"), "{text}");
            assert_eq!(text.lines().filter(|line| line.contains("-r0.15")).count(), 2);
        }
    }
}
