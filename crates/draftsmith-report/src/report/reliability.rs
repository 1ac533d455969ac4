//! Quality of the head's predictions before and after calibration: for each way of decoding a
//! reliability diagram and a table of scores.

use draftsmith_theory::{HeadScores, ReliabilityBin};
use minijinja::value::Serde;
use minijinja::{Value, context};

use super::axis::Rect;
use super::axis::{Axis, picture as picture_of, series};
use super::key::{Key, circle};
use super::text::{counted, number, percent, sentence_case};
use super::{FRAMES, Frame};
use crate::results::HeadPredictions;
use crate::table::calibration_text;

const LEFT: f64 = 44.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 30.0;
/// Height of the ticks, the axis' name and the key below the plot.
const BOTTOM: f64 = 74.0;
/// Distance of the key from the bottom of the plot.
const KEY: f64 = 52.5;
/// The radius of a point for all predictions.
const WHOLE: f64 = 10.0;
/// The least radius.
const MIN_RADIUS: f64 = 2.4;
/// The fewest predictions in a point; fewer would be noise.
const MIN_LABELS: usize = 50;

/// Uncalibrated predictions.
const RAW: Look = Look { class: "plain hollow", name: "uncalibrated" };
/// Calibrated predictions.
const CALIBRATED: Look = Look { class: "draft head", name: "calibrated" };

/// The look and name of a line.
struct Look {
    /// Classes of the style sheet.
    class: &'static str,
    name: &'static str,
}

/// A section for each way of decoding.
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
        before => predictions.before.scores.ece,
        after => predictions.after.as_ref().map(|after| after.scores.ece),
        charts => charts.collect::<Vec<_>>(),
        rows,
        name,
    }
}

/// A row of the table: the template shows the scores.
fn row(name: &str, prompts: &str, scores: &HeadScores) -> Value {
    context! { name => sentence_case(name), prompts, scores => Serde(scores) }
}

fn picture(predictions: &HeadPredictions, name: &str, frame: Frame) -> Value {
    let (right, bottom) = (frame.width - RIGHT, frame.pareto_height - BOTTOM);
    let x = Axis::new((0.0, 1.0), 5, LEFT, right);
    let y = Axis::new((0.0, 1.0), 5, bottom, TOP);
    let before = (RAW, gathered(&predictions.before.bins));
    let after = predictions.after.as_ref().map(|after| (CALIBRATED, gathered(&after.bins)));
    let judged: Vec<(Look, Vec<ReliabilityBin>)> = [before].into_iter().chain(after).collect();
    let mut key = Key::new((LEFT, right), bottom + KEY);
    let mut lines = Vec::new();
    for (look, bins) in &judged {
        let points = bins.iter().map(|bin| {
            let at = (x.place(bin.mean_predicted), y.place(bin.mean_label));
            let radius = MIN_RADIUS + (WHOLE - MIN_RADIUS) * bin.share.sqrt();
            (at, circle(at, radius), format!("{}: {}", look.name, bin_text(bin)))
        });
        lines.push(series(look.class, look.name, points));
        key.entry(look.class, look.name, |centre| circle(centre, 4.0));
    }
    let content = context! {
        title => format!("Reliability of the head\u{2019}s predictions: {name}"),
        x_name => "predicted acceptance probability \u{2192}", y_name => "\u{2191} accepted share",
        squared => true, series => lines, key => key.finish().0,
        description => description(&judged, name),
    };
    let plot = Rect { left: LEFT, top: TOP, right, bottom };
    picture_of(frame, frame.pareto_height, plot, [x.ticks(), y.ticks()], content)
}

/// Merges neighbouring bins until each holds enough predictions.
fn gathered(bins: &[ReliabilityBin]) -> Vec<ReliabilityBin> {
    let mut gathered: Vec<ReliabilityBin> = Vec::new();
    for bin in bins {
        match gathered.last_mut() {
            Some(last) if last.num_labels < MIN_LABELS => *last = merged(last, bin),
            _ => gathered.push(*bin),
        }
    }
    if let [.., before, last] = &mut gathered[..]
        && last.num_labels < MIN_LABELS
    {
        *before = merged(before, last);
        gathered.pop();
    }
    gathered
}

fn merged(one: &ReliabilityBin, other: &ReliabilityBin) -> ReliabilityBin {
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
fn bin_text(bin: &ReliabilityBin) -> String {
    format!(
        "{} predicted, {} accepted, {} of all weight, {}",
        number(bin.mean_predicted, 2),
        number(bin.mean_label, 2),
        percent(bin.share),
        counted(bin.num_labels, "prediction"),
    )
}

fn description(judged: &[(Look, Vec<ReliabilityBin>)], name: &str) -> String {
    let mut text = format!("Share accepted against the head's prediction, {name}.");
    for (look, bins) in judged {
        let bins: Vec<String> = bins.iter().map(bin_text).collect();
        text += &format!(" {}: {}.", sentence_case(look.name), bins.join("; "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_hold_enough_predictions_and_lose_none() {
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
