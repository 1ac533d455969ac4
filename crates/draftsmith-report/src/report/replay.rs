//! Results of replay: for each drafter, way of decoding and set of costs, a picture of gains over the
//! best fixed length and a table.

use draftsmith_theory::CostModel;
use minijinja::{Value, context};

use super::axis::Rect;
use super::axis::{Axis, picture as picture_of, tenth};
use super::bars::{MARK, label_width};
use super::key::Look;
use super::text::{counted, gain, number, on_a_page, sentence_case, times};
use super::{FRAMES, Frame};
use crate::results::{
    DecodingName, DrafterName, Estimate, ReplayGroup, ReplayRow, ReplayedTree, StopRuleName,
    in_order,
};

const TOP: f64 = 10.0;
/// Height of the oracle's name.
const ORACLE: f64 = 20.0;
const BOTTOM: f64 = 42.0;
const ROW: f64 = 26.0;
const BAR: f64 = 11.0;
const CEILING: f64 = 19.0;
/// Half the height of a whisker's ends.
const CAP: f64 = 4.0;
/// Width of the column of numbers.
const RIGHT: f64 = 62.0;

/// A section for each drafter and way of decoding, in order of appearance.
pub(super) fn sections(replays: &[ReplayGroup]) -> Vec<Value> {
    let kind = |replay: &ReplayGroup| (replay.drafter, replay.decoding);
    let section = |(number, (drafter, decoding)): (u32, (DrafterName, DecodingName))| {
        let name = format!("{}, {}", drafter.text(), decoding.text());
        let replays = replays.iter().filter(|replay| kind(replay) == (drafter, decoding));
        let views = (1u32..)
            .zip(replays)
            .map(|(nth, replay)| view(replay, &name, &format!("replay-{number}-{nth}")));
        context! { title => sentence_case(&name), groups => views.collect::<Vec<_>>() }
    };
    (1..).zip(in_order(replays.iter().map(kind))).map(section).collect()
}

fn view(replay: &ReplayGroup, name: &str, id: &str) -> Value {
    let best = best(replay);
    let CostModel { draft_seconds, target_seconds, row_seconds } = replay.costs;
    let rows = replay.rows.iter().map(|row| {
        let is_fixed = row.stop_rule == StopRuleName::FixedLength;
        context! {
            rule => sentence_case(row.stop_rule.text()), setting => label(row), best => best == Some(row),
            speedup => row.speedup.value, speedups => range(row.speedup, |speedup| number(speedup, 2)),
            gain => (!is_fixed).then(|| estimated_gain(row.gain)),
            verification_rate => row.verification_rate, discard_rate => row.discard_rate,
            ceiling => row.ceiling.map(estimated_gain),
            share => row.share_of_ceiling.map(|share| context! {
                value => share.value, range => range(share, |share| number(100.0 * share, 0)),
            }),
        }
    });
    let charts = FRAMES.iter().filter_map(|frame| picture(replay, name, *frame));
    context! {
        id,
        name => format!("{name}, {}", replay.cost_source.text()),
        costs => sentence_case(replay.cost_source.text()),
        draft_ms => 1e3 * draft_seconds, target_ms => 1e3 * target_seconds,
        row_ms => (row_seconds > 0.0).then_some(1e3 * row_seconds),
        prompts => format!(
            "chosen on {}, judged on {} with {}",
            counted(replay.num_validation_prompts, "validation prompt"),
            counted(replay.num_test_prompts, "test prompt"),
            counted(replay.num_test_tokens, "token"),
        ),
        tree => replay.tree.as_ref().map(tree),
        fixed => fixed(replay).map(label),
        best => best.map(|row| context! { setting => label(row), gain => estimated_gain(row.gain) }),
        oracle => replay.oracle.map(estimated_gain),
        has_ceiling => replay.rows.iter().any(|row| row.ceiling.is_some()),
        charts => charts.collect::<Vec<_>>(), rows => rows.collect::<Vec<_>>(),
    }
}

/// The row's label.
fn label(row: &ReplayRow) -> String {
    on_a_page(&row.label())
}

fn fixed(replay: &ReplayGroup) -> Option<&ReplayRow> {
    replay.rows.iter().find(|row| row.is_best_fixed())
}

/// The fastest static tree, in words.
fn tree(tree: &ReplayedTree) -> String {
    let ReplayedTree { shape, candidate_length, num_tried, speedup, gain: over, .. } = *tree;
    format!(
        "static tree {shape} with K = {candidate_length}, the best of {num_tried} shapes: {}, {} over the \
         fixed length ({})",
        times(Some(speedup.value)),
        gain(1.0 + over.value),
        range(over, signed),
    )
}

/// The rows that are compared with the best fixed length.
fn adaptive(replay: &ReplayGroup) -> impl Iterator<Item = &ReplayRow> {
    replay.rows.iter().filter(|row| !row.is_best_fixed() && row.gain.value.is_finite())
}

/// The row with the greatest gain.
fn best(replay: &ReplayGroup) -> Option<&ReplayRow> {
    adaptive(replay).reduce(|best, row| if row.gain.value > best.gain.value { row } else { best })
}

/// A gain with its interval, and whether the whole interval is above or below 0.
fn estimated_gain(estimate: Estimate) -> Value {
    context! {
        value => gain(1.0 + estimate.value),
        range => range(estimate, signed),
        faster => estimate.low > 0.0,
        slower => estimate.high < 0.0,
    }
}

/// `+4.1`, in percent.
fn signed(share: f64) -> String {
    let text = number(100.0 * share, 1);
    if text.starts_with('\u{2212}') || !share.is_finite() { text } else { format!("+{text}") }
}

/// `+2.9 to +5.3`; an en dash if an end is not finite.
fn range(estimate: Estimate, text: impl Fn(f64) -> String) -> String {
    if estimate.low.is_finite() && estimate.high.is_finite() {
        format!("{} to {}", text(estimate.low), text(estimate.high))
    } else {
        number(f64::NAN, 0)
    }
}

/// The picture for the template; None if nothing is compared with a fixed length.
fn picture(replay: &ReplayGroup, name: &str, frame: Frame) -> Option<Value> {
    let rows: Vec<&ReplayRow> = adaptive(replay).collect();
    if rows.is_empty() {
        return None;
    }
    let all = rows.iter().flat_map(|row| {
        let ceiling = row.ceiling.map_or(0.0, |ceiling| ceiling.value);
        [row.gain.value, row.gain.low, row.gain.high, ceiling]
    });
    let all: Vec<f64> = all.filter(|gain| gain.is_finite()).map(|gain| 100.0 * gain).collect();
    let lowest = all.iter().copied().fold(0.0, f64::min);
    let highest = all.iter().copied().fold(0.0, f64::max);
    let oracle = replay.oracle.map(|oracle| 100.0 * oracle.value).filter(|gain| gain.is_finite());
    let left = label_width(rows.iter().map(|row| label(row)));
    let right = frame.width - RIGHT;
    // A narrow picture leaves less of its width to an oracle beyond everything else.
    let near = oracle.filter(|gain| *gain <= (1.0 + (right - left) / 250.0) * highest);

    let num_ticks = ((right - left) / 70.0).max(3.0) as usize;
    let x = Axis::new((lowest, near.unwrap_or(0.0).max(highest)), num_ticks, left, right);
    let top = if oracle.is_some() { TOP + ORACLE } else { TOP };
    let best = best(replay);
    let bars = (0u32..).zip(&rows).map(|(index, row)| {
        let middle = top + ROW * (f64::from(index) + 0.5);
        bar(replay, row, best == Some(*row), &x, middle)
    });
    let content = context! {
        bar_height => BAR, ceiling_height => CEILING, label_x => MARK, value_x => frame.width - 2.0,
        zero => x.place(0.0),
        oracle => oracle.map(|gain_in_percent| context! {
            at => near.map(|near| x.place(near)), text => gain(1.0 + gain_in_percent / 100.0),
        }),
        bars => bars.collect::<Vec<_>>(),
        description => description(replay, name),
    };
    let bottom = top + ROW * rows.len() as f64;
    let plot = Rect { left: tenth(left), top, right, bottom };
    Some(picture_of(frame, bottom + BOTTOM, plot, [x.ticks(), Vec::new()], content))
}

/// The bar of a row around the height `middle`, with its whisker and ceiling.
fn bar(replay: &ReplayGroup, row: &ReplayRow, is_best: bool, x: &Axis, middle: f64) -> Value {
    let look = Look::of_only(Some(replay.road), row.stop_rule);
    let place = |gain: f64| x.place(100.0 * if gain.is_finite() { gain } else { 0.0 });
    let span = |gain: f64| {
        let (zero, end) = (x.place(0.0), place(gain));
        context! { x => tenth(end.min(zero)), width => tenth((end - zero).abs()) }
    };
    let ceiling = row.ceiling.filter(|ceiling| ceiling.value.is_finite());
    context! {
        class => look.class(), best => is_best, label => label(row), title => title(row),
        mark => look.path((8.0, tenth(middle)), 4.5), text_y => tenth(middle + 4.2),
        top => tenth(middle - BAR / 2.0), span => span(row.gain.value),
        ceiling => ceiling.map(|ceiling| span(ceiling.value)),
        ceiling_top => tenth(middle - CEILING / 2.0), middle => tenth(middle),
        cap_top => tenth(middle - CAP), cap_bottom => tenth(middle + CAP),
        low => place(row.gain.low), high => place(row.gain.high),
        value => gain(1.0 + row.gain.value),
    }
}

fn title(row: &ReplayRow) -> String {
    let mut text =
        format!("{}: {} ({})", label(row), gain(1.0 + row.gain.value), range(row.gain, signed));
    if let Some(ceiling) = row.ceiling {
        text += &format!(", ceiling {}", gain(1.0 + ceiling.value));
    }
    text
}

fn description(replay: &ReplayGroup, name: &str) -> String {
    let fixed = fixed(replay).map_or_else(|| "the best fixed length".into(), label);
    let mut text = format!("Modelled gain over {fixed}, {name}, {}.", replay.cost_source.text());
    for row in adaptive(replay) {
        text += &format!(" {}.", title(row));
    }
    if let Some(oracle) = replay.oracle {
        text += &format!(" Oracle: {}.", gain(1.0 + oracle.value));
    }
    text
}
