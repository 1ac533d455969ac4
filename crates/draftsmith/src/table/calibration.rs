//! Scores of a head's predictions as text tables.

use draftsmith_theory::{Calibration, CalibrationKind, HeadScores};

use super::{Column, TableLine, counted, fitted, number};
use crate::results::HeadPredictions;

/// A calibration in words: `platt, scale 0.930, bias +1.104`, or `none`.
pub(crate) fn calibration_text(calibration: Option<&Calibration>) -> String {
    match calibration {
        None => "none".to_owned(),
        Some(Calibration::Platt(platt)) => format!(
            "{}, scale {}, bias {:+.3}",
            kind_text(Some(CalibrationKind::Platt)),
            number(platt.scale(), 3),
            platt.bias()
        ),
        Some(Calibration::Isotonic(map)) => {
            let kind = kind_text(Some(CalibrationKind::Isotonic));
            format!("{kind}, {}", counted(map.num_knots(), "knot"))
        }
    }
}

/// The name of a kind of calibration; without one, `as they are`.
pub(crate) fn kind_text(kind: Option<CalibrationKind>) -> &'static str {
    match kind {
        None => "as they are",
        Some(CalibrationKind::Platt) => "platt",
        Some(CalibrationKind::Isotonic) => "isotonic",
    }
}

/// A table of the head's scores on test prompts for each way of decoding; empty without a head.
pub(crate) fn render_predictions(predictions: &[HeadPredictions]) -> String {
    let table = |one: &HeadPredictions| {
        let map = one.calibration.as_ref().map(|fitted| &fitted.map);
        let heading = format!(
            "{}, {}: the head's predictions on {}\ncalibration: {}",
            one.drafter.text(),
            one.decoding.text(),
            counted(one.num_test_prompts, "test prompt"),
            calibration_text(map),
        );
        let mut rows = vec![("as they are", &one.before.scores, "")];
        rows.extend(one.after.as_ref().map(|after| ("calibrated", &after.scores, "")));
        format!("{heading}\n{}\n", render_scores("", &rows))
    };
    predictions.iter().map(table).collect()
}

const COLUMNS: [Column<HeadScores>; 6] = [
    Column::new("ECE", 0, |scores| number(scores.ece, 4)),
    Column::new("Brier", 0, |scores| number(scores.brier, 4)),
    Column::new("KL", 0, |scores| number(scores.kl, 4)),
    Column::new("AUROC", 0, |scores| number(scores.auroc.unwrap_or(f64::NAN), 4)),
    Column::new("mean", 0, |scores| number(scores.mean_predicted, 3)),
    Column::new("true", 0, |scores| number(scores.mean_label, 3)),
];

/// A table of scores with a final line break. A row has a name, scores and a mark, which may be empty.
pub(crate) fn render_scores(heading: &str, rows: &[(&str, &HeadScores, &str)]) -> String {
    let lines = rows.iter().map(|(name, row, mark)| {
        let mark = Some(*mark).filter(|mark| !mark.is_empty());
        TableLine::Row { name: (*name).to_owned(), mark, is_wrong: false, row: *row }
    });
    fitted(heading, &lines.collect::<Vec<_>>(), &COLUMNS, None, false).join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn scores_are_shown_before_and_after_calibration() {
        let text = render_predictions(&fixture::replay().predictions);
        insta::assert_snapshot!(text, @"
        separate draft, greedy: the head's predictions on 240 test prompts
        calibration: platt, scale 1.000, bias +1.386
                         ECE   Brier      KL   AUROC   mean   true
         as they are  0.1937  0.0510  0.1388  0.8716  0.473  0.667
         calibrated   0.0123  0.0007  0.0057  0.8716  0.667  0.667

        separate draft, sampled: the head's predictions on 240 test prompts
        calibration: none
                         ECE   Brier      KL   AUROC   mean   true
         as they are  0.0123  0.0007  0.0057  0.8716  0.667  0.667
        ");
        assert_eq!(render_predictions(&[]), "");
    }
}
