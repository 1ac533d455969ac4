//! The speed-up picture: a bar a stop rule at its fastest setting under its drafter's heading, a
//! tick where the cost model puts it, and a dot for each other setting of the sweep.

use minijinja::{Value, context};

use super::Frame;
use super::axis::{Axis, tenth};
use super::key::{ADVANCE, Look};
use super::text::{label, rule_label, times};
use crate::results::{DrafterName, Group, ResultRow};

const TOP: f64 = 24.0;
const BOTTOM: f64 = 24.0;
const ROW: f64 = 22.0;
const BAR: f64 = 13.0;
/// A drafter's name and the room above it.
const HEADING: f64 = 28.0;
/// For the number at the end of the longest bar.
const RIGHT: f64 = 54.0;
/// A mark left of a label, and the room between label and bar.
pub(super) const MARK: f64 = 22.0;

/// The picture's geometry; None where no speed-up was measured.
pub(super) fn picture(group: &Group<'_>, frame: Frame) -> Option<Value> {
    let measured = |row: &ResultRow| row.speedup.filter(|speedup| speedup.is_finite());
    let modelled = |row: &ResultRow| row.modelled_speedup.filter(|speedup| speedup.is_finite());
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
    let num_ticks = (frame.width / 100.0) as usize;
    let x = Axis::new((0.0, greatest), num_ticks, left, frame.width - RIGHT);

    let mut top = TOP;
    let mut drafter = DrafterName::None;
    let (mut bars, mut headings) = (Vec::new(), Vec::new());
    for &(row, speedup) in &rows {
        if std::mem::replace(&mut drafter, row.drafter) != row.drafter {
            top += HEADING;
            headings.push(context! {
                text => super::text::sentence_case(&row.drafter.text()),
                y => tenth(top - 7.0),
            });
        }
        let look = Look::of(row, group);
        let middle = top + ROW / 2.0;
        let end = x.place(speedup);
        let tick = modelled(row).map(|modelled| x.place(modelled));
        // The number stands clear of a tick just beyond the bar.
        let clear = tick.filter(|tick| *tick > end - 4.0 && *tick < end + 50.0).unwrap_or(end);
        let others = group.sweep_of(row).filter(|other| other.setting != row.setting);
        bars.push(context! {
            class => look.class(),
            best => group.is_best_of_road(row),
            label => rule_label(row),
            title => format!(
                "{}: measured {}, modelled {}",
                label(row),
                times(row.speedup),
                times(row.modelled_speedup)
            ),
            mark => look.path((8.0, tenth(middle)), 4.5),
            top => tenth(middle - BAR / 2.0),
            width => tenth(end - left),
            text_y => tenth(middle + 4.2),
            dots => others
                .filter_map(|other| Some(context! {
                    x => x.place(measured(other)?),
                    title => format!("{}: {}", label(other), times(other.speedup)),
                }))
                .collect::<Vec<_>>(),
            dot_y => tenth(middle),
            tick,
            tick_top => tenth(middle - 9.0),
            tick_bottom => tenth(middle + 9.0),
            value => times(Some(speedup)),
            value_x => tenth(end.max(clear) + 6.0),
        });
        top += ROW;
    }
    Some(context! {
        frame => frame.name,
        width => frame.width,
        height => top + BOTTOM,
        left => tenth(left),
        top => TOP,
        bottom => top + 2.0,
        bar_height => BAR,
        label_x => MARK,
        one => x.place(1.0),
        ticks => x.ticks().into_iter()
            .map(|(value, text)| context! { at => x.place(value), text => text + "\u{d7}" })
            .collect::<Vec<_>>(),
        bars,
        headings,
        has_model => rows.iter().any(|(row, _)| modelled(row).is_some()),
        has_dots => rows.iter().any(|(row, _)| group.sweep_of(row).count() > 1),
        description => description(group, rows.len()),
    })
}

/// Where bars begin: right of their marks and labels.
pub(super) fn label_width(labels: impl Iterator<Item = String>) -> f64 {
    let longest = labels.map(|label| label.chars().count()).max().unwrap_or(0);
    MARK + longest as f64 * ADVANCE + 6.0
}

fn description(group: &Group<'_>, num_bars: usize) -> String {
    let mut text = format!(
        "Measured speed-up over the target alone, {num_bars} bars, on {}, {}.",
        group.dataset,
        group.decoding_text()
    );
    for best in group.best_of_rules() {
        text += &format!(" {} reaches {}.", label(best), times(best.speedup));
    }
    text
}
