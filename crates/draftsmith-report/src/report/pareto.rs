//! The Pareto picture: a point for each setting, at its discard rate (x) and verification rate (y).
//!
//! Both are work per token, so lower left is better. By SpecDec++, Eq. 2.3, modelled time is linear in
//! the two, so settings with equal modelled speed-up lie on a straight line.

use minijinja::{Value, context};

use super::Frame;
use super::axis::Rect;
use super::axis::{Axis, decimals, picture as picture_of, round_step, tenth};
use super::key::{Look, key};
use super::labels::{Label, Mark, Segment, Surroundings};
use super::text::{counted, label, number, rule_label, symbol, times};
use crate::results::{
    CostSummary, DrafterName, Group, GroupSummary, ResultRow, Standing, StopRuleName,
};

const LEFT: f64 = 44.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 48.0;
const RADIUS: f64 = 4.5;
const BEST_RADIUS: f64 = 6.5;

/// A picture with more settings is crowded: points are smaller, only the best of each kind of drafter
/// has a label, and settings far from the best of every rule are left out.
const CROWD: usize = 30;
const CROWDED_RADIUS: f64 = 2.8;
const CROWDED_BEST_RADIUS: f64 = 4.8;
/// The range of a crowded picture, relative to the greatest rates among the best of the rules.
const CROWDED_REACH: f64 = 1.4;

/// The least length of a line of equal speed-up, in pixels.
const MIN_LINE: f64 = 70.0;

/// The two axes and the area between them.
struct Scales {
    x: Axis,
    y: Axis,
    plot: Rect,
}

impl Scales {
    fn of(rows: &[&ResultRow], frame: Frame) -> Self {
        let (right, bottom) = (frame.width - RIGHT, frame.pareto_height - BOTTOM);
        let most = |of: fn(&ResultRow) -> f64| rows.iter().map(|row| of(row)).fold(0.0, f64::max);
        let least = rows.iter().map(|row| row.verification_rate).fold(f64::INFINITY, f64::min);
        let num_ticks = (frame.width / 90.0) as usize;
        Self {
            x: Axis::new((0.0, most(|row| row.discard_rate)), num_ticks, LEFT, right),
            y: Axis::new((least, most(|row| row.verification_rate)), 5, bottom, TOP),
            plot: Rect { left: LEFT, top: TOP, right, bottom },
        }
    }

    fn at(&self, discard_rate: f64, verification_rate: f64) -> (f64, f64) {
        (self.x.place(discard_rate), self.y.place(verification_rate))
    }

    fn point(&self, row: &ResultRow) -> (f64, f64) {
        self.at(row.discard_rate, row.verification_rate)
    }
}

/// The picture for the template; None if no setting drafts anything.
pub(super) fn picture(
    group: &Group<'_>,
    known: Option<&GroupSummary>,
    frame: Frame,
) -> Option<Value> {
    let all: Vec<&ResultRow> = group.pooled().filter(|row| is_drawn(row)).collect();
    let is_crowded = all.len() > CROWD;
    let rows = if is_crowded { near_the_best(group, &all) } else { all.clone() };
    if rows.is_empty() {
        return None;
    }
    let scales = Scales::of(&rows, frame);
    let plot = scales.plot;
    let marks: Vec<Mark> = rows.iter().map(|row| mark(group, row, is_crowded, &scales)).collect();
    let curves = curves(group, &scales);

    // A line holds for the costs of one drafter, the fastest. Eq. 2.3 does not hold for rows with
    // forwards that drew nothing.
    let adds_up = |row: &ResultRow| row.counts().check_forward_identity().is_ok();
    let cost = group.best().and_then(|best| known?.cost_of(best.drafter));
    let of_drafter = |cost: &&CostSummary| rows_of(&rows, cost.drafter).map(adds_up).collect();
    let add_up: Option<Vec<bool>> = cost.as_ref().map(of_drafter);
    let cost = cost.filter(|_| add_up.iter().flatten().any(|adds_up| *adds_up));
    let all_add_up = cost.is_none() || add_up.iter().flatten().all(|adds_up| *adds_up);
    let lines = cost.map_or_else(Vec::new, |cost| equal_lines(cost, &scales));

    let mut crossed: Vec<Segment> =
        curves.iter().flat_map(|(_, segments)| segments).copied().collect();
    let line_labels = label_lines(&lines, &marks, &crossed, plot);
    let obstacles: Vec<Rect> = line_labels.iter().flatten().map(|(_, rect)| *rect).collect();
    crossed.extend(lines.iter().map(|(segment, _)| *segment));
    let surroundings =
        Surroundings { marks: &marks, obstacles: &obstacles, lines: &crossed, bounds: plot };
    let labels = surroundings.place();
    let mut points: Vec<usize> = (0..rows.len()).collect();
    // The best are drawn over all others.
    points.sort_by_key(|&index| marks[index].bold);
    let points = points.into_iter().map(|index| {
        point_view(&Look::of(rows[index], group), rows[index], &marks[index], labels[index])
    });

    let sides = (plot.left, plot.right);
    let (key, key_height) = key(&rows, group, symbol, sides, frame.pareto_height);
    let several_drafters = group.drafters().len() > 1;
    let content = context! {
        lines => lines.iter().zip(&line_labels)
            .map(|(line, label)| line_view(line, label.map(|(centre, _)| centre)))
            .collect::<Vec<_>>(),
        left_out => (rows.len() < all.len()).then(|| counted(all.len() - rows.len(), "setting")),
        all_add_up,
        lines_of => cost.filter(|_| several_drafters).map(|cost| cost.drafter.text()),
        curves => curves.iter().map(curve_view).collect::<Vec<_>>(),
        points => points.collect::<Vec<_>>(),
        description => description(group, &rows),
        key,
    };
    let ticks = [scales.x.ticks(), scales.y.ticks()];
    Some(picture_of(frame, frame.pareto_height + key_height, plot, ticks, content))
}

/// Whether a row drafts and has both rates.
fn is_drawn(row: &ResultRow) -> bool {
    let is_finite = row.discard_rate.is_finite() && row.verification_rate.is_finite();
    row.stop_rule != StopRuleName::None && is_finite
}

fn rows_of<'r>(
    rows: &'r [&ResultRow],
    drafter: DrafterName,
) -> impl Iterator<Item = &'r ResultRow> {
    rows.iter().copied().filter(move |row| row.drafter == drafter)
}

/// The mark of a row, with a label unless the picture is crowded.
fn mark(group: &Group<'_>, row: &ResultRow, is_crowded: bool, scales: &Scales) -> Mark {
    let standing = group.standing(row);
    // The key names the exit layer if there is only one.
    let several_exits = group.drafters().len() > 2;
    let full = || if several_exits { label(row) } else { rule_label(row) };
    let (text, radius) = match standing {
        Some(Standing::All | Standing::Road) => (Some(full()), BEST_RADIUS),
        Some(Standing::Rule) if is_crowded => (None, CROWDED_BEST_RADIUS),
        Some(Standing::Rule) => (Some(full()), BEST_RADIUS),
        None if is_crowded => (None, CROWDED_RADIUS),
        None => (Some(row.setting_text()), RADIUS),
    };
    Mark { centre: scales.point(row), radius, text, bold: standing.is_some() }
}

/// The curve through the settings of each drafter and rule, clipped to the plot.
fn curves(group: &Group<'_>, scales: &Scales) -> Vec<(Look, Vec<Segment>)> {
    let curve = |best: &ResultRow| {
        let sweep = group.sweep_of(best).filter(|row| is_drawn(row));
        let points: Vec<(f64, f64)> = sweep.map(|row| scales.point(row)).collect();
        let segments = points.windows(2).filter_map(|pair| scales.plot.clip(&[pair[0], pair[1]]));
        (Look::of(best, group), segments.collect::<Vec<Segment>>())
    };
    let curves = group.best_of_rules().into_iter().map(curve);
    curves.filter(|(_, segments)| !segments.is_empty()).collect()
}

fn curve_view((look, segments): &(Look, Vec<Segment>)) -> Value {
    context! { class => look.class(), path => segments.iter().map(segment_path).collect::<String>() }
}

fn point_view(look: &Look, row: &ResultRow, mark: &Mark, label: Option<Label>) -> Value {
    context! {
        class => look.class(), best => mark.bold, title => point_title(row),
        path => look.path(mark.centre, mark.radius),
        label => label.map(|label| context! {
            text => mark.text.as_deref(),
            x => label.centre.0, y => tenth(label.centre.1 + 4.2),
            leader => label.leader.map(segment_view),
        }),
    }
}

fn line_view((segment, text): &(Segment, String), label: Option<(f64, f64)>) -> Value {
    let label = label.map(|(x, y)| context! { x => tenth(x), y => tenth(y + 4.0) });
    context! { line => segment_view(*segment), text => text.as_str(), label }
}

/// Rows whose rates are near those of the best of some rule.
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
    // Without measured speeds no row is best.
    if bests.is_empty() {
        return rows.to_vec();
    }
    rows.iter().copied().filter(|row| is_near(row)).collect()
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
        "{} settings on {}, each at its discard rate and verification rate; lower left is less work.",
        rows.len(),
        group.name()
    );
    for best in group.best_of_rules() {
        text += &format!(" Fastest of its rule: {}.", point_title(best));
    }
    text
}

/// Lines of equal modelled speed-up across the plot, with their labels.
///
/// By Eq. 2.3 the time per token is a·(1 + discard) + b·verification with a = t_draft + t_row and
/// b = t_target − t_draft. Plain decoding takes t_target + t_row per token.
fn equal_lines(cost: &CostSummary, scales: &Scales) -> Vec<(Segment, String)> {
    let Scales { x, y, plot } = scales;
    let row_seconds = cost.row_seconds.unwrap_or(0.0);
    let a = cost.draft_seconds + row_seconds;
    let b = cost.target_seconds - cost.draft_seconds;
    // No lines for a draft as slow as the target.
    if !(a > 0.0 && b > 0.0) {
        return Vec::new();
    }
    let plain = cost.target_seconds + row_seconds;
    let speedup =
        |discard: f64, verification: f64| plain / (a * (1.0 + discard) + b * verification);
    let (slowest, fastest) = (speedup(x.high, y.high), speedup(x.low, y.low));
    let step = round_step((fastest - slowest) / 7.0);
    let line = |level: f64| {
        let verification = |discard: f64| (plain / level - a * (1.0 + discard)) / b;
        let ends = [x.low, x.high].map(|discard| scales.at(discard, verification(discard)));
        let segment = plot.clip(&ends)?.map(|(x, y)| (tenth(x), tenth(y)));
        let length = (segment[1].0 - segment[0].0).hypot(segment[1].1 - segment[0].1);
        let text = format!("{level:.*}\u{d7}", decimals(step));
        (length >= MIN_LINE).then_some((segment, text))
    };
    let first = (slowest / step).ceil() as usize;
    let last = (fastest / step).floor() as usize;
    (first.max(1)..=last).filter_map(|index| line(index as f64 * step)).collect()
}

/// The position of each line's text, as far right as possible without covering marks or curves.
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
