//! The curves over a round: CTAR(w), and acceptance by position, each of the fastest setting of
//! every drafter and family of stop rules: more lines than that could not be told apart.

use minijinja::{Value, context};

use super::Frame;
use super::axis::{Axis, tenth};
use super::key::{Look, family_of, key};
use super::text::{label, number, rule_label};
use crate::results::{Group, ResultRow};

const LEFT: f64 = 44.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 30.0;
/// Ticks and the axis' name, under the plot.
const AXIS: f64 = 50.0;
/// From the plot's edges to the first and last point.
const INSET: f64 = 14.0;
const RADIUS: f64 = 3.8;

/// What a picture of curves shows of a row.
pub(super) struct Curves {
    /// For ids.
    pub(super) name: &'static str,
    title: &'static str,
    x_name: &'static str,
    y_name: &'static str,
    /// Values at 1, 2, 3 and so on; none where there is nothing to show.
    values: fn(&ResultRow) -> &[f64],
    /// The least value that has a place on the axis whatever the rows hold.
    floor: f64,
}

/// The share of rounds that yield more than w tokens.
pub(super) const CTAR: Curves = Curves {
    name: "ctar",
    title: "CTAR",
    x_name: "w \u{2192}",
    y_name: "\u{2191} share of rounds that yield more than w tokens",
    // Beyond the first 0 there are only more: a line along the axis that says nothing.
    values: |row| {
        let first_zero = row.ctar.iter().position(|share| *share == 0.0);
        first_zero.map_or(&row.ctar, |index| &row.ctar[..=index])
    },
    floor: 0.0,
};

/// The share accepted of the candidates judged at each position.
pub(super) const ACCEPTANCE: Curves = Curves {
    name: "acceptance",
    title: "Acceptance by position",
    x_name: "position in the round \u{2192}",
    y_name: "\u{2191} share accepted of the candidates judged",
    values: |row| &row.acceptance_by_position,
    floor: 1.0,
};

/// The share of rounds in which all candidates up to a position were accepted.
pub(super) const UNCONDITIONAL: Curves = Curves {
    name: "unconditional",
    title: "Unconditional acceptance by position",
    x_name: "position in the round \u{2192}",
    y_name: "\u{2191} share of rounds accepted so far",
    values: |row| &row.unconditional_acceptance,
    floor: 1.0,
};

/// So many positions have each its tick; of more, every fifth.
const MOST_TICKS: usize = 12;

/// The picture's geometry; None where no setting has values.
pub(super) fn picture(group: &Group<'_>, curves: &Curves, frame: Frame) -> Option<Value> {
    let rows: Vec<&ResultRow> = best_of_families(group)
        .into_iter()
        .filter(|row| (curves.values)(row).iter().any(|value| value.is_finite()))
        .collect();
    let num_places = rows.iter().map(|row| (curves.values)(row).len()).max()?;
    let values = rows.iter().flat_map(|row| (curves.values)(row)).copied();
    let least = values.filter(|value| value.is_finite()).fold(curves.floor, f64::min);
    let (right, bottom) = (frame.width - RIGHT, frame.curves_height - AXIS);
    let y = Axis::new((least, 1.0), 5, bottom, TOP);
    let step = (right - LEFT - 2.0 * INSET) / num_places.saturating_sub(1).max(1) as f64;
    let x = |index: usize| tenth(LEFT + INSET + step * index as f64);

    let series = rows.iter().map(|row| {
        let look = Look::of(row, group);
        let places: Vec<(usize, f64)> = (curves.values)(row)
            .iter()
            .copied()
            .enumerate()
            .filter(|(_, value)| value.is_finite())
            .collect();
        let line = places.iter().map(|&(index, value)| format!("{},{}", x(index), y.place(value)));
        context! {
            class => look.class(),
            title => label(row),
            line => line.collect::<Vec<_>>().join(" "),
            points => places
                .iter()
                .map(|&(index, value)| context! {
                    path => look.path((x(index), y.place(value)), RADIUS),
                    title => format!("{}: {} at {}", label(row), number(value, 3), index + 1),
                })
                .collect::<Vec<_>>(),
        }
    });
    let (key, key_height) = key(&rows, group, rule_label, (LEFT, right), frame.curves_height);
    Some(context! {
        frame => frame.name,
        title => curves.title,
        width => frame.width,
        height => frame.curves_height + key_height,
        left => LEFT,
        right,
        top => TOP,
        bottom,
        x_name => curves.x_name,
        y_name => curves.y_name,
        x_ticks => (0..num_places)
            .filter(|index| num_places <= MOST_TICKS || (index + 1) % 5 == 0)
            .map(|index| context! { at => x(index), text => index + 1 })
            .collect::<Vec<_>>(),
        y_ticks => y.ticks().into_iter()
            .map(|(value, text)| context! { at => y.place(value), text })
            .collect::<Vec<_>>(),
        series => series.collect::<Vec<_>>(),
        key,
        description => description(group, curves, &rows),
    })
}

/// The fastest of each drafter and family, in order.
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
    let mut text = format!("{} on {}, {}.", curves.title, group.dataset, group.decoding_text());
    for row in rows {
        let values: Vec<String> =
            (curves.values)(row).iter().map(|value| number(*value, 2)).collect();
        text += &format!(" {}: {}.", label(row), values.join(", "));
    }
    text
}
