//! The pictures, tables and texts of replay results and of the head's prediction quality.

use draftsmith_theory::ReliabilityBin;
use minijinja::{Value, context};

use super::bars::gains;
use super::lines::{Plot, PlotContent, PlotLine, PlotPoint};
use super::look::Look;
use crate::results::{Estimate, HeadPredictions, ReplayGroup, TextRange, in_order};
use crate::table::{Line, best_of, costs_text, replay_table, scores_table};
use crate::text::{counted, gain, interval, number, percent, sentence_case, signed, typeset};

/// The radius in pixels of a point that holds all predictions.
const WHOLE: f64 = 10.0;
/// The minimum radius of a point in pixels.
const MIN_RADIUS: f64 = 2.4;
/// The minimum number of predictions of a point. With fewer it would be noise.
const MIN_LABELS: usize = 50;

/// Builds a section for each drafter, way of decoding and source of prompts, in order of
/// appearance.
pub(super) fn replays(replays: &[ReplayGroup]) -> Vec<Value> {
    let section = |name: String| {
        let of_section = replays.iter().enumerate().filter(|(_, it)| it.name() == name);
        context! {
            title => sentence_case(&name),
            groups => of_section.map(|(index, replay)| view(index, replay)).collect::<Vec<_>>(),
        }
    };
    in_order(replays.iter().map(ReplayGroup::name)).into_iter().map(section).collect()
}

fn view(index: usize, replay: &ReplayGroup) -> Value {
    let source = replay.cost_source.text();
    let shown = |it: Estimate| format!("{} ({})", gain(it.value), interval(it, signed));
    let fixed = replay.rows.iter().find(|row| row.is_best_fixed());
    let best = best_of(&replay.rows);
    context! {
        name => format!("{}, {source}", replay.name()),
        costs => sentence_case(source), source,
        details => format!(
            "{}; chosen on {}, judged on {} with {}",
            costs_text(&replay.costs),
            counted(replay.num_validation_prompts, "validation prompt"),
            counted(replay.num_test_prompts, "test prompt"),
            counted(replay.num_test_tokens, "token"),
        ),
        fixed => fixed.map(|row| row.label()),
        best => best.map(|row| context! {
            setting => row.label(), gain => typeset(&shown(row.gain)),
        }),
        theorem => replay.theorem_text(),
        by_text_position => TextRange::text(&replay.by_text_position).map(|it| sentence_case(&it)),
        picture => gains(replay).picture(&format!("replay-{}", index + 1)),
        table => replay_table(&replay.rows, replay.oracle).view(),
    }
}

/// Builds a section on the head's predictions for each drafter and way of decoding.
pub(super) fn predictions(predictions: &[HeadPredictions]) -> Vec<Value> {
    predictions.iter().enumerate().map(|(index, one)| judged(index, one)).collect()
}

fn judged(index: usize, predictions: &HeadPredictions) -> Value {
    let name = predictions.drafter.under(predictions.decoding);
    let on_test = format!("on {}", counted(predictions.num_test_prompts, "test prompt"));
    context! {
        title => sentence_case(&name),
        error => predictions.scores.ece,
        verdict => predictions.over_online.verdict(),
        plot => reliability(predictions, format!("predictions-{}", index + 1), &name).view(),
        table => scores_table("predictions", vec![Line::of(on_test, predictions.scores)]).view(),
        name,
    }
}

/// Plots the accepted share against the prediction.
fn reliability(predictions: &HeadPredictions, id: String, name: &str) -> Plot {
    let line = PlotLine {
        look: Look::circle("draft head"),
        entry: "predictions".to_owned(),
        name: "predictions".to_owned(),
        points: gathered(&predictions.bins).iter().map(point).collect(),
    };
    Plot {
        id,
        title: format!("Reliability of the head\u{2019}s predictions: {name}"),
        caption: String::new(),
        x_name: "predicted acceptance probability \u{2192}",
        y_name: "\u{2191} accepted share",
        content: PlotContent::Square(vec![line]),
    }
}

/// Plots a bin as a point with a title such as `0.42 predicted, 0.61 accepted, 12.3 % of all
/// weight, 340 predictions`.
fn point(bin: &ReliabilityBin) -> PlotPoint {
    PlotPoint {
        at: (bin.mean_predicted, bin.mean_label),
        radius: MIN_RADIUS + (WHOLE - MIN_RADIUS) * bin.share.sqrt(),
        title: format!(
            "{} predicted, {} accepted, {} of all weight, {}",
            number(bin.mean_predicted, 2),
            number(bin.mean_label, 2),
            typeset(&percent(bin.share, 1)),
            counted(bin.num_labels, "prediction"),
        ),
    }
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
