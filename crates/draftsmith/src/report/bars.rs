//! The speed-up picture: a bar a setting under its drafter's heading, and a tick where the cost model puts it.

use minijinja::{Value, context};

use super::axis::{Axis, tenth};
use super::key::Look;
use super::{Frame, label, rule_label, times};
use crate::results::{DrafterName, Group, ResultRow};

const LEFT: f64 = 92.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 24.0;
const ROW: f64 = 20.0;
const BAR: f64 = 13.0;
/// Between stop rules.
const GAP: f64 = 8.0;
/// A drafter's name and the room above it.
const HEADING: f64 = 28.0;
/// For the number at the end of the longest bar.
const RIGHT: f64 = 54.0;

/// The picture's geometry; None where no speed-up was measured.
pub(super) fn picture(group: &Group<'_>, frame: Frame) -> Option<Value> {
    let measured = |row: &ResultRow| row.speedup.filter(|speedup| speedup.is_finite());
    let modelled = |row: &ResultRow| row.modelled_speedup.filter(|speedup| speedup.is_finite());
    let rows: Vec<(&ResultRow, f64)> =
        group.pooled().filter_map(|row| Some((row, measured(row)?))).collect();
    if rows.is_empty() {
        return None;
    }
    let greatest = rows
        .iter()
        .map(|&(row, speedup)| speedup.max(modelled(row).unwrap_or(0.0)))
        .fold(1.0, f64::max);
    let num_ticks = (frame.width / 100.0) as usize;
    let x = Axis::new((0.0, greatest), num_ticks, LEFT, frame.width - RIGHT);

    let mut top = TOP;
    let mut previous: Option<&ResultRow> = None;
    let (mut bars, mut headings) = (Vec::new(), Vec::new());
    for &(row, speedup) in &rows {
        if row.drafter != DrafterName::None
            && previous.is_none_or(|previous| previous.drafter != row.drafter)
        {
            top += HEADING;
            headings.push(context! {
                text => super::sentence_case(&row.drafter.text()),
                y => tenth(top - 7.0),
            });
        } else if previous.is_some_and(|previous| previous.stop_rule != row.stop_rule) {
            top += GAP;
        }
        previous = Some(row);
        let end = x.place(speedup);
        let tick = modelled(row).map(|modelled| x.place(modelled));
        // The number stands clear of a tick just beyond the bar.
        let clear = tick.filter(|tick| *tick > end - 4.0 && *tick < end + 50.0).unwrap_or(end);
        bars.push(context! {
            class => Look::of(row, group).class(),
            best => group.standing(row).is_some(),
            label => rule_label(row),
            title => format!(
                "{}: measured {}, modelled {}",
                label(row),
                times(row.speedup),
                times(row.modelled_speedup)
            ),
            top => tenth(top + (ROW - BAR) / 2.0),
            width => tenth(end - LEFT),
            text_y => tenth(top + ROW / 2.0 + 4.2),
            tick,
            tick_top => tenth(top + 1.5),
            tick_bottom => tenth(top + ROW - 1.5),
            value => times(Some(speedup)),
            value_x => tenth(end.max(clear) + 6.0),
        });
        top += ROW;
    }
    Some(context! {
        frame => frame.name,
        width => frame.width,
        height => top + BOTTOM,
        left => LEFT,
        top => TOP,
        bottom => top + 2.0,
        bar_height => BAR,
        label_x => LEFT - 8.0,
        one => x.place(1.0),
        ticks => x.ticks().into_iter()
            .map(|(value, text)| context! { at => x.place(value), text => text + "\u{d7}" })
            .collect::<Vec<_>>(),
        bars,
        headings,
        has_model => rows.iter().any(|(row, _)| modelled(row).is_some()),
        description => description(group, rows.len()),
    })
}

fn description(group: &Group<'_>, num_settings: usize) -> String {
    let mut text = format!(
        "Measured speed-up over the target alone of {num_settings} settings on {}, {}.",
        group.dataset,
        group.decoding_text()
    );
    for best in group.best_of_rules() {
        text += &format!(" {} reaches {}.", label(best), times(best.speedup));
    }
    text
}
