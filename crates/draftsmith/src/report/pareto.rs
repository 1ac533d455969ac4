//! The Pareto picture: discard rate across, verification rate up, a point a setting.
//!
//! Both are work a token (drafted in vain, and verified), so lower left is better. By Eq. 2.3 of
//! SpecDec++ modelled time is linear in the two, so that settings of equal modelled speed-up lie on
//! a straight line.

use minijinja::{Value, context};

use super::Frame;
use super::axis::{Axis, decimals, round_step, tenth};
use super::key::{Look, key};
use super::labels::{Mark, Rect, Segment, place};
use super::text::{counted, label, number, rule_label, symbol, times};
use crate::results::{CostSummary, Group, GroupSummary, ResultRow, Standing, StopRuleName};

const LEFT: f64 = 44.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 48.0;
const RADIUS: f64 = 4.5;
const BEST_RADIUS: f64 = 6.5;

/// With more settings than these, points are smaller, only each road's best has a label, and what
/// is far from the best of every rule is left out.
const CROWD: usize = 30;
const CROWDED_RADIUS: f64 = 2.8;
const CROWDED_BEST_RADIUS: f64 = 4.8;
/// How far out a crowded picture reaches, in what the best of the rules need.
const CROWDED_REACH: f64 = 1.4;

/// A line shorter than this shows nothing.
const MIN_LINE: f64 = 70.0;

/// The picture's geometry; None where no setting drafts anything.
pub(super) fn picture(
    group: &Group<'_>,
    known: Option<&GroupSummary>,
    frame: Frame,
) -> Option<Value> {
    let rows: Vec<&ResultRow> = group
        .pooled()
        .filter(|row| row.stop_rule != StopRuleName::None)
        .filter(|row| row.discard_rate.is_finite() && row.verification_rate.is_finite())
        .collect();
    let plot = Rect {
        left: LEFT,
        top: TOP,
        right: frame.width - RIGHT,
        bottom: frame.pareto_height - BOTTOM,
    };
    let is_crowded = rows.len() > CROWD;
    let all = rows.len();
    let rows: Vec<&ResultRow> = if is_crowded { near_the_best(group, &rows) } else { rows };
    if rows.is_empty() {
        return None;
    }
    let most = |of: fn(&ResultRow) -> f64| rows.iter().map(|row| of(row)).fold(0.0, f64::max);
    let least = rows.iter().map(|row| row.verification_rate).fold(f64::INFINITY, f64::min);
    let num_ticks = (frame.width / 90.0) as usize;
    let x = Axis::new((0.0, most(|row| row.discard_rate)), num_ticks, plot.left, plot.right);
    let y = Axis::new((least, most(|row| row.verification_rate)), 5, plot.bottom, plot.top);

    let several_exits = group.drafters().len() > 2;
    let marks: Vec<Mark> = rows
        .iter()
        .map(|row| {
            let standing = group.standing(row);
            // The key says which exit, if there is but one.
            let full = || if several_exits { label(row) } else { rule_label(row) };
            let (text, radius) = match standing {
                Some(Standing::All | Standing::Road) => (Some(full()), BEST_RADIUS),
                Some(Standing::Rule) if is_crowded => (None, CROWDED_BEST_RADIUS),
                Some(Standing::Rule) => (Some(full()), BEST_RADIUS),
                None if is_crowded => (None, CROWDED_RADIUS),
                None => (Some(row.setting_text()), RADIUS),
            };
            Mark {
                centre: (x.place(row.discard_rate), y.place(row.verification_rate)),
                radius,
                text,
                bold: standing.is_some(),
            }
        })
        .collect();
    let looks: Vec<Look> = rows.iter().map(|row| Look::of(row, group)).collect();

    // The settings of a rule lie on a curve.
    let mut curves: Vec<(Look, Vec<Segment>)> = Vec::new();
    for best in group.best_of_rules() {
        let places: Vec<(f64, f64)> = group
            .sweep_of(best)
            .filter(|row| row.discard_rate.is_finite() && row.verification_rate.is_finite())
            .map(|row| (x.place(row.discard_rate), y.place(row.verification_rate)))
            .collect();
        let segments = places.windows(2).filter_map(|pair| plot.clip(&[pair[0], pair[1]]));
        curves.push((Look::of(best, group), segments.collect()));
    }
    let curve_segments: Vec<Segment> =
        curves.iter().flat_map(|(_, segments)| segments.iter().copied()).collect();

    // A line holds for one drafter's cost: the fastest's.
    let cost = group.best().and_then(|best| known?.cost_of(best.drafter));
    // Eq. 2.3 says nothing of counts that do not add up: those of forwards that drew nothing.
    let adds_up = |row: &ResultRow| row.counts().check_forward_identity().is_ok();
    let of_drafter = |cost: &CostSummary| {
        let drafter = cost.drafter;
        rows.iter().filter(move |row| row.drafter == drafter)
    };
    let cost = cost.filter(|cost| of_drafter(cost).any(|row| adds_up(row)));
    let all_add_up = cost.is_none_or(|cost| of_drafter(cost).all(|row| adds_up(row)));
    let lines = cost.map_or_else(Vec::new, |cost| equal_lines(cost, &x, &y));
    let line_labels = label_lines(&lines, &marks, &curve_segments, plot);
    let obstacles: Vec<Rect> = line_labels.iter().flatten().map(|(_, rect)| *rect).collect();
    let mut crossed = curve_segments;
    crossed.extend(lines.iter().map(|(segment, _)| *segment));
    let labels = place(&marks, &obstacles, &crossed, plot);

    let points =
        rows.iter().zip(&marks).zip(&labels).zip(&looks).map(|(((row, mark), label), look)| {
            context! {
                class => look.class(),
                best => mark.bold,
                title => point_title(row),
                path => look.path(mark.centre, mark.radius),
                label => label.map(|label| context! {
                    text => mark.text.as_deref(),
                    x => label.centre.0,
                    y => tenth(label.centre.1 + 4.2),
                    leader => label.leader.map(segment_view),
                }),
            }
        });
    // The best over all others.
    let mut points: Vec<(bool, Value)> =
        points.zip(&marks).map(|(point, mark)| (mark.bold, point)).collect();
    points.sort_by_key(|(best, _)| *best);
    let (key, key_height) = key(&rows, group, symbol, (plot.left, plot.right), frame.pareto_height);
    Some(context! {
        frame => frame.name,
        width => frame.width,
        height => frame.pareto_height + key_height,
        left => plot.left,
        right => plot.right,
        top => plot.top,
        bottom => plot.bottom,
        x_ticks => x.ticks().into_iter()
            .map(|(value, text)| context! { at => x.place(value), text })
            .collect::<Vec<_>>(),
        y_ticks => y.ticks().into_iter()
            .map(|(value, text)| context! { at => y.place(value), text })
            .collect::<Vec<_>>(),
        lines => lines.iter().zip(&line_labels)
            .map(|((segment, text), label)| context! {
                line => segment_view(*segment),
                text => text.as_str(),
                label => label.map(|((x, y), _)| context! { x => tenth(x), y => tenth(y + 4.0) }),
            })
            .collect::<Vec<_>>(),
        left_out => (rows.len() < all).then(|| counted(all - rows.len(), "setting")),
        all_add_up,
        lines_of => several_drafters(group).then(|| cost.map(|cost| cost.drafter.text())).flatten(),
        curves => curves.iter()
            .filter(|(_, segments)| !segments.is_empty())
            .map(|(look, segments)| context! {
                class => look.class(),
                path => segments.iter().map(segment_path).collect::<String>(),
            })
            .collect::<Vec<_>>(),
        points => points.into_iter().map(|(_, point)| point).collect::<Vec<_>>(),
        description => description(group, &rows),
        key,
    })
}

/// The rows that need not much more of either work than the best of some rule.
fn near_the_best<'a>(group: &Group<'_>, rows: &[&'a ResultRow]) -> Vec<&'a ResultRow> {
    let bests = group.best_of_rules();
    let reach = |of: fn(&ResultRow) -> f64| {
        let most = bests.iter().map(|row| of(row)).filter(|rate| rate.is_finite());
        CROWDED_REACH * most.fold(0.0, f64::max)
    };
    let (discard, verification) =
        (reach(|row| row.discard_rate), reach(|row| row.verification_rate));
    let is_near =
        |row: &ResultRow| row.discard_rate <= discard && row.verification_rate <= verification;
    // Where none is best of anything there is nothing to be near to.
    if bests.is_empty() {
        return rows.to_vec();
    }
    rows.iter().copied().filter(|row| is_near(row)).collect()
}

fn several_drafters(group: &Group<'_>) -> bool {
    group.drafters().len() > 1
}

fn point_title(row: &ResultRow) -> String {
    format!(
        "{}: discard rate {}, verification rate {}, speed-up {}",
        label(row),
        number(row.discard_rate, 3),
        number(row.verification_rate, 3),
        times(row.speedup)
    )
}

fn description(group: &Group<'_>, rows: &[&ResultRow]) -> String {
    let mut text = format!(
        "{} settings on {}, {}, each at its discard rate and verification rate; lower left is less work.",
        rows.len(),
        group.dataset,
        group.decoding_text()
    );
    for best in group.best_of_rules() {
        text += &format!(" Fastest of its kind: {}.", point_title(best));
    }
    text
}

/// Lines of equal modelled speed-up across the plot, and what they are called.
///
/// With Eq. 2.3, time a token = a·(1 + discard) + b·verification, a = t_draft + t_row, b = t_target
/// − t_draft; the target alone takes t_target + t_row.
fn equal_lines(cost: &CostSummary, x: &Axis, y: &Axis) -> Vec<(Segment, String)> {
    let row_seconds = cost.row_seconds.unwrap_or(0.0);
    let a = cost.draft_seconds + row_seconds;
    let b = cost.target_seconds - cost.draft_seconds;
    // A draft as slow as the target: no line worth drawing.
    if !(a > 0.0 && b > 0.0) {
        return Vec::new();
    }
    let plain = cost.target_seconds + row_seconds;
    let speedup =
        |discard: f64, verification: f64| plain / (a * (1.0 + discard) + b * verification);
    let (slowest, fastest) = (speedup(x.high, y.high), speedup(x.low, y.low));
    let step = round_step((fastest - slowest) / 7.0);
    let plot = Rect {
        left: x.place(x.low),
        right: x.place(x.high),
        top: y.place(y.high),
        bottom: y.place(y.low),
    };
    let first = (slowest / step).ceil() as usize;
    let last = (fastest / step).floor() as usize;
    (first.max(1)..=last)
        .filter_map(|index| {
            let level = index as f64 * step;
            let verification = |discard: f64| (plain / level - a * (1.0 + discard)) / b;
            let ends =
                [x.low, x.high].map(|discard| (x.place(discard), y.place(verification(discard))));
            let segment = plot.clip(&ends)?.map(|(x, y)| (tenth(x), tenth(y)));
            let length = (segment[1].0 - segment[0].0).hypot(segment[1].1 - segment[0].1);
            let text = format!("{level:.*}\u{d7}", decimals(step));
            (length >= MIN_LINE).then_some((segment, text))
        })
        .collect()
}

/// A place on each line for its text, off the marks and the curve, as far right as there is one.
fn label_lines(
    lines: &[(Segment, String)],
    marks: &[Mark],
    curve: &[Segment],
    plot: Rect,
) -> Vec<Option<((f64, f64), Rect)>> {
    let mut taken: Vec<Rect> = marks
        .iter()
        .map(|mark| Rect::about(mark.centre, mark.radius + 3.0, mark.radius + 3.0))
        .collect();
    let mut labels = Vec::new();
    for ([from, to], text) in lines {
        let label = (1..20).rev().map(|step| f64::from(step) / 20.0).find_map(|share| {
            let centre = (from.0 + share * (to.0 - from.0), from.1 + share * (to.1 - from.1));
            let rect = Rect::of_text(text, false, centre);
            let free = rect.left >= plot.left
                && rect.right <= plot.right
                && rect.top >= plot.top
                && rect.bottom <= plot.bottom
                && taken.iter().all(|other| rect.overlap(other) == 0.0)
                && curve.iter().all(|segment| rect.length_within(segment) == 0.0);
            free.then_some((centre, rect))
        });
        taken.extend(label.map(|(_, rect)| rect));
        labels.push(label);
    }
    labels
}

fn segment_path([from, to]: &Segment) -> String {
    let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(tenth);
    format!("M{x1} {y1}L{x2} {y2}")
}

fn segment_view([from, to]: Segment) -> Value {
    context! { x1 => from.0, y1 => from.1, x2 => to.0, y2 => to.1 }
}
