//! The heads of a sweep as a text table.

use super::{Column, TableLine, fitted, number};
use crate::training::head_outcome::SweptHead;

const COLUMNS: [Column<SweptHead>; 6] = [
    Column::new("KL", 1, |row| number(row.scores.kl, 4)),
    Column::new("unshifted", 0, |row| number(row.scores.comparable_kl(), 4)),
    Column::new("AUROC", 0, |row| number(row.scores.auroc.unwrap_or(f64::NAN), 4)),
    Column::new("ECE", 2, |row| number(row.scores.ece, 4)),
    Column::new("epoch", 3, |row| row.best_epoch.to_string()),
    Column::new("pass", 4, |row| {
        row.seconds.map_or_else(|| "-".into(), |seconds| format!("{} s", number(seconds, 1)))
    }),
];

/// The heads of a sweep as a text table with a final line break.
///
/// The least important columns are dropped until lines fit into `width`, if it is given.
pub(crate) fn render_sweep_table(rows: &[SweptHead], width: Option<usize>, colour: bool) -> String {
    let lines = rows.iter().map(|row| TableLine::Row {
        name: row.name.clone(),
        mark: row.best.then_some("best"),
        is_wrong: false,
        row,
    });
    let mut text = fitted("head", &lines.collect::<Vec<_>>(), &COLUMNS, width, colour).join("\n");
    text += "\nunshifted: KL without the rejection weight's shift; the lowest is the best\n";
    text
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::HeadMetrics;

    use super::*;

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
        unshifted: KL without the rejection weight's shift; the lowest is the best
        ");
        for width in [30, 50, 80] {
            let text = render_sweep_table(&rows, Some(width), false);
            assert!(text.contains("unshifted") && text.contains("AUROC"), "{text}");
            assert_eq!(text.lines().filter(|line| line.contains("-r0.15")).count(), 2);
        }
    }
}
