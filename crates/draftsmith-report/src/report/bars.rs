//! The picture of speed-ups: a bar for each stop rule at its fastest setting, grouped by drafter, with a
//! tick at the cost model's speed-up and a dot for each other setting.

use minijinja::{Value, context};

use super::Frame;
use super::axis::Rect;
use super::axis::{Axis, picture as picture_of, tenth};
use super::key::{ADVANCE, Look};
use super::text::{label, rule_label, sentence_case, times};
use crate::results::{DrafterName, Group, ResultRow};

const TOP: f64 = 24.0;
const BOTTOM: f64 = 24.0;
const ROW: f64 = 22.0;
const BAR: f64 = 13.0;
/// Height of a drafter's name and the space above it.
const HEADING: f64 = 28.0;
/// Space for the number at the end of the longest bar.
const RIGHT: f64 = 54.0;
/// Width of the mark left of a label.
pub(super) const MARK: f64 = 22.0;

/// The picture for the template; None if no speed-up was measured.
pub(super) fn picture(group: &Group<'_>, frame: Frame) -> Option<Value> {
    let rows = group.plain().into_iter().chain(group.best_of_rules());
    let rows: Vec<(&ResultRow, f64)> = rows.filter_map(|row| Some((row, measured(row)?))).collect();
    if rows.is_empty() {
        return None;
    }
    let left = label_width(rows.iter().map(|(row, _)| rule_label(row)));
    let greatest = rows
        .iter()
        .map(|&(row, speedup)| speedup.max(modelled(row).unwrap_or(0.0)))
        .fold(1.0, f64::max);
    let right = frame.width - RIGHT;
    let x = Axis::new((0.0, greatest), (frame.width / 100.0) as usize, left, right);

    let mut top = TOP;
    let mut drafter = DrafterName::None;
    let (mut bars, mut headings) = (Vec::new(), Vec::new());
    for &(row, speedup) in &rows {
        if std::mem::replace(&mut drafter, row.drafter) != row.drafter {
            top += HEADING;
            let text = sentence_case(&row.drafter.text());
            headings.push(context! { text, y => tenth(top - 7.0) });
        }
        bars.push(bar(group, row, speedup, &x, top + ROW / 2.0));
        top += ROW;
    }
    let content = context! {
        bar_height => BAR, label_x => MARK, one => x.place(1.0), bars, headings,
        has_model => rows.iter().any(|(row, _)| modelled(row).is_some()),
        has_dots => rows.iter().any(|(row, _)| group.sweep_of(row).count() > 1),
        description => description(group, rows.len()),
    };
    let plot = Rect { left: tenth(left), top: TOP, right, bottom: top + 2.0 };
    Some(picture_of(frame, top + BOTTOM, plot, [x.ticks(), Vec::new()], content))
}

fn measured(row: &ResultRow) -> Option<f64> {
    row.speedup.filter(|speedup| speedup.is_finite())
}

fn modelled(row: &ResultRow) -> Option<f64> {
    row.modelled_speedup.filter(|speedup| speedup.is_finite())
}

/// The bar of a row around the height `middle`.
fn bar(group: &Group<'_>, row: &ResultRow, speedup: f64, x: &Axis, middle: f64) -> Value {
    let look = Look::of(row, group);
    let end = x.place(speedup);
    let tick = modelled(row).map(|modelled| x.place(modelled));
    // The number moves right of a tick that would cross it.
    let clear = tick.filter(|tick| *tick > end - 4.0 && *tick < end + 50.0).unwrap_or(end);
    let dot = |other: &ResultRow| {
        let title = format!("{}: {}", label(other), times(other.speedup));
        Some(context! { x => x.place(measured(other)?), title })
    };
    let others = group.sweep_of(row).filter(|other| other.setting != row.setting);
    context! {
        class => look.class(), best => group.is_best_of_road(row), label => rule_label(row),
        title => format!(
            "{}: measured {}, modelled {}",
            label(row),
            times(row.speedup),
            times(row.modelled_speedup)
        ),
        mark => look.path((8.0, tenth(middle)), 4.5),
        top => tenth(middle - BAR / 2.0), width => tenth(end - x.start), text_y => tenth(middle + 4.2),
        dots => others.filter_map(dot).collect::<Vec<_>>(), dot_y => tenth(middle),
        tick, tick_top => tenth(middle - 9.0), tick_bottom => tenth(middle + 9.0),
        value => times(Some(speedup)), value_x => tenth(end.max(clear) + 6.0),
    }
}

/// The left end of bars, after marks and labels.
pub(super) fn label_width(labels: impl Iterator<Item = String>) -> f64 {
    let longest = labels.map(|label| label.chars().count()).max().unwrap_or(0);
    MARK + longest as f64 * ADVANCE + 6.0
}

fn description(group: &Group<'_>, num_bars: usize) -> String {
    let mut text = format!(
        "Measured speed-up over plain decoding with the target, {num_bars} bars, on {}.",
        group.name()
    );
    for best in group.best_of_rules() {
        text += &format!(" {} reaches {}.", label(best), times(best.speedup));
    }
    text
}
