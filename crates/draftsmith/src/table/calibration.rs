//! How good a head's predictions are, as text: a line for each form of calibration.

use comfy_table::{CellAlignment, Table, presets};
use draftsmith_theory::{Calibration, CalibrationKind, HeadScores};

use super::{counted, number};
use crate::results::HeadPredictions;

/// A calibration in words: `platt, scale 0.930, bias +1.104`; `none` of none.
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
            let count = map.num_knots();
            let kind = kind_text(Some(CalibrationKind::Isotonic));
            format!("{kind}, {count} knot{}", if count == 1 { "" } else { "s" })
        }
    }
}

/// A form's name; of none, `as they are`.
pub(crate) fn kind_text(kind: Option<CalibrationKind>) -> &'static str {
    match kind {
        None => "as they are",
        Some(CalibrationKind::Platt) => "platt",
        Some(CalibrationKind::Isotonic) => "isotonic",
    }
}

/// The head's predictions on test prompts, a table for each way of decoding; nothing without a
/// head.
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

/// A table of scores, ending with a line break: of each a name, and a mark behind it.
pub(crate) fn render_scores(heading: &str, rows: &[(&str, &HeadScores, &str)]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).force_no_tty();
    table.set_header([heading, "ECE", "Brier", "KL", "AUROC", "mean", "true", ""]);
    for (name, scores, mark) in rows {
        table.add_row([
            (*name).to_owned(),
            number(scores.ece, 4),
            number(scores.brier, 4),
            number(scores.kl, 4),
            number(scores.auroc.unwrap_or(f64::NAN), 4),
            number(scores.mean_predicted, 3),
            number(scores.mean_label, 3),
            (*mark).to_owned(),
        ]);
    }
    for column in 1..7 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines: Vec<String> =
        table.to_string().lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixture;

    #[test]
    fn predictions_are_told_before_and_after() {
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
