//! Curves over the positions of a round: CTAR(w) and acceptance by position.
//!
//! Each drafter and family of stop rules has one line, its fastest setting; more lines would be hard to
//! distinguish.

use minijinja::{Value, context};

use super::Frame;
use super::axis::Rect;
use super::axis::{Axis, Tick, picture as picture_of, series};
use super::key::{Look, family_of, key};
use super::text::{label, number, rule_label};
use crate::results::{Group, ResultRow};

const LEFT: f64 = 44.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 30.0;
/// Height of the ticks and the axis' name below the plot.
const AXIS: f64 = 50.0;
/// Distance of the first and last point from the plot's edges.
const INSET: f64 = 14.0;
const RADIUS: f64 = 3.8;

/// A kind of curve.
pub(super) struct Curves {
    /// Part of the picture's id.
    pub(super) name: &'static str,
    title: &'static str,
    x_name: &'static str,
    y_name: &'static str,
    /// The row's values at 1, 2, 3 and so on.
    values: fn(&ResultRow) -> &[f64],
    /// A value that the axis always includes.
    floor: f64,
}

/// The share of rounds that yield more than w tokens.
pub(super) const CTAR: Curves = Curves {
    name: "ctar",
    title: "CTAR",
    x_name: "w \u{2192}",
    y_name: "\u{2191} share of rounds that yield more than w tokens",
    // Everything after the first 0 is 0.
    values: |row| {
        let first_zero = row.ctar.iter().position(|share| *share == 0.0);
        first_zero.map_or(&row.ctar, |index| &row.ctar[..=index])
    },
    floor: 0.0,
};

/// The accepted share of the candidates judged at each position.
pub(super) const ACCEPTANCE: Curves = Curves {
    name: "acceptance",
    title: "Acceptance by position",
    x_name: "position in the round \u{2192}",
    y_name: "\u{2191} share accepted of the candidates judged",
    values: |row| &row.acceptance_by_position,
    floor: 1.0,
};

/// The share of rounds in which all candidates up to each position were accepted.
pub(super) const UNCONDITIONAL: Curves = Curves {
    name: "unconditional",
    title: "Unconditional acceptance by position",
    x_name: "position in the round \u{2192}",
    y_name: "\u{2191} share of rounds accepted so far",
    values: |row| &row.unconditional_acceptance,
    floor: 1.0,
};

/// With more positions than this, only every fifth has a tick.
const MOST_TICKS: usize = 12;

/// The picture for the template; None if no setting has values.
pub(super) fn picture(group: &Group<'_>, curves: &Curves, frame: Frame) -> Option<Value> {
    let rows: Vec<&ResultRow> = best_of_families(group)
        .into_iter()
        .filter(|row| (curves.values)(row).iter().any(|value| value.is_finite()))
        .collect();
    let num_positions = rows.iter().map(|row| (curves.values)(row).len()).max()?;
    let values = rows.iter().flat_map(|row| (curves.values)(row)).copied();
    let least = values.filter(|value| value.is_finite()).fold(curves.floor, f64::min);
    let (right, bottom) = (frame.width - RIGHT, frame.curves_height - AXIS);
    let plot = Rect { left: LEFT, top: TOP, right, bottom };
    let y = Axis::new((least, 1.0), 5, bottom, TOP);
    let (low, high) = (1.0, num_positions.max(2) as f64);
    let x = Axis { low, high, step: 1.0, start: LEFT + INSET, end: right - INSET };
    let is_shown = |position: &usize| num_positions <= MOST_TICKS || position.is_multiple_of(5);
    let x_ticks = (1..=num_positions)
        .filter(is_shown)
        .map(|position| Tick { at: x.place(position as f64), text: position.to_string() });

    let lines = rows.iter().map(|row| {
        let look = Look::of(row, group);
        let values = (1..).zip((curves.values)(row)).filter(|(_, value)| value.is_finite());
        let points = values.map(|(position, value)| {
            let at = (x.place(f64::from(position)), y.place(*value));
            let title = format!("{}: {} at {position}", label(row), number(*value, 3));
            (at, look.path(at, RADIUS), title)
        });
        series(&look.class(), &label(row), points)
    });
    let (key, key_height) = key(&rows, group, rule_label, (LEFT, right), frame.curves_height);
    let content = context! {
        title => format!("{}: {}", curves.title, group.name()),
        x_name => curves.x_name, y_name => curves.y_name, squared => false,
        series => lines.collect::<Vec<_>>(), key,
        description => description(group, curves, &rows),
    };
    let ticks = [x_ticks.collect(), y.ticks()];
    Some(picture_of(frame, frame.curves_height + key_height, plot, ticks, content))
}

/// The fastest row of each drafter and family of rules, in order.
fn best_of_families<'a>(group: &Group<'a>) -> Vec<&'a ResultRow> {
    let mut bests: Vec<&ResultRow> = Vec::new();
    for row in group.best_of_rules() {
        let kind = |row: &ResultRow| (row.drafter, family_of(row.stop_rule));
        match bests.iter_mut().find(|best| kind(best) == kind(row)) {
            Some(best) if row.tokens_per_second > best.tokens_per_second => *best = row,
            Some(_) => {}
            None => bests.push(row),
        }
    }
    bests
}

fn description(group: &Group<'_>, curves: &Curves, rows: &[&ResultRow]) -> String {
    let mut text = format!("{} on {}.", curves.title, group.name());
    for row in rows {
        let values: Vec<String> =
            (curves.values)(row).iter().map(|value| number(*value, 2)).collect();
        text += &format!(" {}: {}.", label(row), values.join(", "));
    }
    text
}
