//! How good the head's predictions are: for each way of decoding a picture of what came of them,
//! before and after calibration, and a table of scores.

use draftsmith_theory::{HeadScores, ReliabilityBin};
use minijinja::{Value, context};

use super::axis::{Axis, tenth};
use super::key::{ADVANCE, circle};
use super::text::{counted, number, percent, sentence_case};
use super::{FRAMES, Frame};
use crate::results::HeadPredictions;
use crate::table::calibration_text;

const LEFT: f64 = 44.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 30.0;
/// Ticks, the axis' name and the key, under the plot.
const BOTTOM: f64 = 74.0;
/// The key's line, under the axis' name.
const KEY: f64 = 62.0;
const SWATCH: f64 = 34.0;
const GAP: f64 = 18.0;
/// The radius of a point that stands for all predictions.
const WHOLE: f64 = 10.0;
/// The least radius.
const MIN_RADIUS: f64 = 2.4;
/// The fewest predictions that a point stands for: what came of less is luck.
const MIN_LABELS: usize = 50;

/// The head's own predictions.
const RAW: Series = Series { class: "plain hollow", name: "as they are" };
/// Calibrated ones.
const CALIBRATED: Series = Series { class: "draft head", name: "calibrated" };

struct Series {
    /// Of the style sheet.
    class: &'static str,
    name: &'static str,
}

/// One for each way of decoding.
pub(super) fn sections(predictions: &[HeadPredictions]) -> Vec<Value> {
    predictions.iter().enumerate().map(|(index, one)| view(one, index)).collect()
}

fn view(predictions: &HeadPredictions, index: usize) -> Value {
    let name = format!("{}, {}", predictions.drafter.text(), predictions.decoding.text());
    let fitted = predictions.calibration.as_ref();
    let on_test = format!("on {}", counted(predictions.num_test_prompts, "test prompt"));
    let mut rows = vec![row(RAW.name, &on_test, &predictions.before.scores)];
    rows.extend(
        predictions.after.as_ref().map(|after| row(CALIBRATED.name, &on_test, &after.scores)),
    );
    if let Some(fitted) = fitted {
        let on_tuning = format!("on {} of tuning", counted(fitted.num_prompts, "prompt"));
        rows.push(row(RAW.name, &on_tuning, &fitted.before));
        rows.push(row("calibrated, cross-validated", &on_tuning, &fitted.after));
    }
    let charts = FRAMES.iter().map(|frame| picture(predictions, &name, *frame));
    context! {
        id => format!("predictions-{}", index + 1),
        title => sentence_case(&name),
        calibration => fitted.map(|fitted| calibration_text(Some(&fitted.map))),
        prompts => fitted.map(|fitted| counted(fitted.num_prompts, "prompt")),
        before => error(&predictions.before.scores),
        after => predictions.after.as_ref().map(|after| error(&after.scores)),
        charts => charts.collect::<Vec<_>>(),
        rows,
        name,
    }
}

/// The expected calibration error, in percent.
fn error(scores: &HeadScores) -> String {
    percent(scores.ece)
}

fn row(name: &str, prompts: &str, scores: &HeadScores) -> Value {
    context! {
        name => sentence_case(name),
        prompts,
        ece => number(scores.ece, 4),
        brier => number(scores.brier, 4),
        kl => number(scores.kl, 4),
        auroc => number(scores.auroc.unwrap_or(f64::NAN), 4),
        mean_predicted => number(scores.mean_predicted, 3),
        mean_label => number(scores.mean_label, 3),
    }
}

fn picture(predictions: &HeadPredictions, name: &str, frame: Frame) -> Value {
    let (right, bottom) = (frame.width - RIGHT, frame.pareto_height - BOTTOM);
    let x = Axis::new((0.0, 1.0), 5, LEFT, right);
    let y = Axis::new((0.0, 1.0), 5, bottom, TOP);
    let judged = [
        Some((RAW, &predictions.before)),
        predictions.after.as_ref().map(|after| (CALIBRATED, after)),
    ];
    let judged: Vec<(Series, Vec<ReliabilityBin>)> = judged
        .into_iter()
        .flatten()
        .map(|(series, judged)| (series, gathered(&judged.bins)))
        .collect();
    let place = |bin: &ReliabilityBin| (x.place(bin.mean_predicted), y.place(bin.mean_label));
    let series = judged.iter().map(|(series, bins)| {
        let line = bins.iter().map(|bin| {
            let (x, y) = place(bin);
            format!("{x},{y}")
        });
        let point = |bin: &ReliabilityBin| {
            context! {
                path => circle(place(bin), MIN_RADIUS + (WHOLE - MIN_RADIUS) * bin.share.sqrt()),
                title => format!("{}: {}", series.name, told(bin)),
            }
        };
        context! {
            class => series.class,
            title => series.name,
            line => line.collect::<Vec<_>>().join(" "),
            points => bins.iter().map(point).collect::<Vec<_>>(),
        }
    });
    let mut at = LEFT;
    let entries = judged.iter().map(|(series, _)| {
        let entry = context! {
            class => series.class,
            text => series.name,
            from => tenth(at),
            to => tenth(at + SWATCH - 8.0),
            path => circle((tenth(at + (SWATCH - 8.0) / 2.0), bottom + KEY), 4.0),
            text_x => tenth(at + SWATCH),
        };
        at += SWATCH + series.name.chars().count() as f64 * ADVANCE + GAP;
        entry
    });
    let ticks = |axis: Axis| -> Vec<Value> {
        let ticks = axis.ticks().into_iter();
        ticks.map(|(value, text)| context! { at => axis.place(value), text }).collect()
    };
    context! {
        frame => frame.name,
        width => frame.width,
        height => frame.pareto_height,
        left => LEFT,
        right,
        top => TOP,
        bottom,
        key_y => bottom + KEY,
        x_ticks => ticks(x),
        y_ticks => ticks(y),
        entries => entries.collect::<Vec<_>>(),
        series => series.collect::<Vec<_>>(),
        description => description(&judged, name),
    }
}

/// Neighbouring bins together, until they hold enough predictions.
fn gathered(bins: &[ReliabilityBin]) -> Vec<ReliabilityBin> {
    let mut gathered: Vec<ReliabilityBin> = Vec::new();
    for bin in bins {
        match gathered.last_mut() {
            Some(last) if last.num_labels < MIN_LABELS => *last = together(last, bin),
            _ => gathered.push(*bin),
        }
    }
    if let [.., before, last] = &mut gathered[..]
        && last.num_labels < MIN_LABELS
    {
        *before = together(before, last);
        gathered.pop();
    }
    gathered
}

fn together(one: &ReliabilityBin, other: &ReliabilityBin) -> ReliabilityBin {
    let share = one.share + other.share;
    let mean =
        |of: fn(&ReliabilityBin) -> f64| (one.share * of(one) + other.share * of(other)) / share;
    ReliabilityBin {
        mean_predicted: mean(|bin| bin.mean_predicted),
        mean_label: mean(|bin| bin.mean_label),
        share,
        num_labels: one.num_labels + other.num_labels,
    }
}

/// `0.42 predicted, 0.61 accepted, 12.3 % of all weight, 340 predictions`.
fn told(bin: &ReliabilityBin) -> String {
    format!(
        "{} predicted, {} accepted, {} of all weight, {}",
        number(bin.mean_predicted, 2),
        number(bin.mean_label, 2),
        percent(bin.share),
        counted(bin.num_labels, "prediction"),
    )
}

fn description(judged: &[(Series, Vec<ReliabilityBin>)], name: &str) -> String {
    let mut text = format!("Share accepted against the head's prediction, {name}.");
    for (series, bins) in judged {
        let bins: Vec<String> = bins.iter().map(told).collect();
        text += &format!(" {}: {}.", sentence_case(series.name), bins.join("; "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_stands_for_enough_predictions_and_none_is_lost() {
        let bin = |mean_predicted: f64, num_labels: usize| ReliabilityBin {
            mean_predicted,
            mean_label: 1.0 - mean_predicted,
            share: num_labels as f64 / 256.0,
            num_labels,
        };
        let found = gathered(&[bin(0.25, 16), bin(0.5, 48), bin(0.75, 128), bin(1.0, 64)]);
        assert_eq!(found.len(), 3);
        assert_eq!(found[0].num_labels, 64);
        assert_eq!((found[0].mean_predicted, found[0].mean_label), (0.4375, 0.5625));
        assert_eq!(found[1..], [bin(0.75, 128), bin(1.0, 64)]);

        let found = gathered(&[bin(0.25, 96), bin(0.5, 96), bin(0.75, 32)]);
        assert_eq!(found.iter().map(|bin| bin.num_labels).collect::<Vec<_>>(), [96, 128]);
        let whole: f64 = found.iter().map(|bin| bin.share).sum();
        assert_eq!(whole, 224.0 / 256.0);
        assert_eq!(gathered(&[bin(0.5, 3)]), [bin(0.5, 3)]);
        assert_eq!(gathered(&[]), []);
    }
}
