//! The Pareto picture, with a point for each setting at its discard and verification rate (x, y).
//!
//! Both are work per token, so lower left is better. By SpecDec++, Eq. 2.3, modelled time is linear
//! in the two, so settings with equal modelled speed-up lie on a straight line.

use minijinja::{Value, context};

use super::chart::{Axis, Frame, Rect, Segment, Svg, decimals, picture, round_step};
use super::labels::{Mark, place};
use super::look::{Look, Place};
use crate::results::{CostSummary, Group, GroupSummary, ResultRow};
use crate::text::{number, times, typeset};

const LEFT: f64 = 44.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 48.0;

/// The number of settings above which a picture is crowded. In a crowded picture points are
/// smaller, only the best setting of each kind of drafter has a label, and settings far from the
/// best of every rule are left out.
const CROWD: usize = 30;
/// The range of a crowded picture, relative to the greatest rates of the rules' best settings.
const CROWDED_REACH: f64 = 1.4;
/// The minimum length of a line of equal speed-up, in pixels.
const MIN_LINE: f64 = 70.0;

/// The content of the Pareto picture.
struct Pareto<'a> {
    group: &'a Group<'a>,
    /// The shown settings with a drafter. The best come last, so that they are drawn on top.
    rows: Vec<(&'a ResultRow, Look)>,
    is_crowded: bool,
    /// The costs for lines of equal speed-up; None if these cannot be drawn.
    cost: Option<&'a CostSummary>,
}

/// Builds the picture with the facts of its caption; `None` if no setting drafts anything.
pub(super) fn view(group: &Group<'_>, known: Option<&GroupSummary>, id: &str) -> Option<Value> {
    let is_finite =
        |row: &&ResultRow| row.discard_rate.is_finite() && row.verification_rate.is_finite();
    let mut rows: Vec<&ResultRow> = group.drafted().filter(is_finite).collect();
    let (num_rows, is_crowded) = (rows.len(), rows.len() > CROWD);
    if is_crowded {
        keep_near_the_best(group, &mut rows);
    }
    if rows.is_empty() {
        return None;
    }
    // Lines of equal speed-up hold for the costs of one drafter, so the fastest is taken. Eq. 2.3
    // does not hold for rows with forwards that drew nothing.
    let cost = group.best().and_then(|best| known?.cost_of(best.drafter));
    let of_drafter = rows.iter().filter(|row| cost.is_some_and(|cost| cost.drafter == row.drafter));
    let add_up: Vec<bool> =
        of_drafter.map(|row| row.counts.check_forward_identity().is_ok()).collect();
    let cost = cost.filter(|_| add_up.contains(&true));
    let bests = group.best_of_rules().into_iter().map(|best| format!(" Best: {}.", title(best)));
    let description = format!(
        "{} settings, each at its discard rate and verification rate; lower left is less work.{}",
        rows.len(),
        bests.collect::<String>()
    );
    let heading = format!("Discard rate against verification rate: {}", group.name());
    let rows = rows.into_iter().map(|row| (row, Look::of(row, group)));
    let mut pareto = Pareto { group, rows: rows.collect(), is_crowded, cost };
    pareto.rows.sort_by_key(|(row, _)| group.is_best_of_rule(row));
    Some(context! {
        picture => picture(id, &heading, &description, |frame, svg| pareto.draw(frame, svg)),
        has_lines => cost.is_some_and(|cost| cost.target_seconds > cost.draft_seconds),
        left_out => num_rows - pareto.rows.len(),
        all_add_up => cost.is_none() || !add_up.contains(&false),
        lines_of => cost.filter(|_| group.drafters().len() > 1).map(|cost| cost.drafter.text()),
    })
}

/// Keeps the rows whose rates are near those of the best setting of some rule. Keeps all rows if no
/// speed was measured.
fn keep_near_the_best(group: &Group<'_>, rows: &mut Vec<&ResultRow>) {
    for rate in [|row: &ResultRow| row.discard_rate, |row: &ResultRow| row.verification_rate] {
        let rates = group.best_of_rules().into_iter().map(rate).filter(|rate| rate.is_finite());
        let reach = CROWDED_REACH * rates.reduce(f64::max).unwrap_or(f64::INFINITY);
        rows.retain(|row| rate(row) <= reach);
    }
}

impl Pareto<'_> {
    fn draw(&self, frame: Frame, svg: &mut Svg) -> f64 {
        let (right, bottom) = (frame.width - RIGHT, frame.tall - BOTTOM);
        let plot = Rect { left: LEFT, top: TOP, right, bottom };
        let rates = |rate: fn(&ResultRow) -> f64| self.rows.iter().map(move |(row, _)| rate(row));
        let verification = || rates(|row| row.verification_rate);
        let most = rates(|row| row.discard_rate).fold(0.0, f64::max);
        let x = Axis::new((0.0, most), (frame.width / 90.0) as usize, LEFT, right);
        let least = verification().fold(f64::INFINITY, f64::min);
        let y = Axis::new((least, verification().fold(0.0, f64::max)), 5, bottom, TOP);
        let at = |row: &ResultRow| (x.place(row.discard_rate), y.place(row.verification_rate));
        let marks: Vec<Mark> = self.rows.iter().map(|(row, _)| self.mark(row, at(row))).collect();

        svg.x_axis(&x, plot, "", "discard rate \u{2192}", true);
        svg.y_axis(&y, plot, "\u{2191} verification rate");
        let lines = self.cost.map_or_else(Vec::new, |cost| equal_lines(cost, &x, &y));
        lines.iter().for_each(|(line, _)| svg.line("equal", line));
        let texts = label_lines(&lines, &marks, plot);
        for (rect, text) in &texts {
            let (x, y) = rect.centre();
            svg.text("equal", (x, y + 4.0), "middle", text);
        }
        for best in self.group.best_of_rules() {
            let is_shown =
                |row: &&ResultRow| self.rows.iter().any(|(known, _)| std::ptr::eq(*known, *row));
            let places: Vec<Place> = self.group.sweep_of(best).filter(is_shown).map(at).collect();
            svg.line(&format!("curve {}", Look::of(best, self.group).class), &places);
        }
        let labels = place(&marks, texts.iter().map(|(rect, _)| *rect).collect(), plot);
        let leaders = labels.iter().flatten().filter_map(|label| label.leader);
        leaders.for_each(|leader| svg.line("leader", &leader));
        let class = |look: &Look, mark: &Mark| {
            format!("{}{}", look.class, if mark.bold { " best" } else { "" })
        };
        for ((row, look), mark) in self.rows.iter().zip(&marks) {
            svg.open(&format!("series {}", class(look, mark)), &title(row));
            svg.path("", &look.path(mark.centre, mark.radius), "");
            svg.close();
        }
        for (((_, look), mark), label) in self.rows.iter().zip(&marks).zip(&labels) {
            let (Some(label), Some(text)) = (label, &mark.text) else { continue };
            let (x, y) = label.rect.centre();
            svg.text(&format!("label {}", class(look, mark)), (x, y + 4.2), "middle", text);
        }
        frame.tall
    }

    /// Builds a row's mark. In a crowded picture only the best of each kind of drafter has a label.
    fn mark(&self, row: &ResultRow, centre: Place) -> Mark {
        let bold = self.group.is_best_of_rule(row);
        let is_named = self.group.is_best_of_road(row) || bold && !self.is_crowded;
        // The key names the drafter if there are few.
        let has_few = self.group.drafters().len() <= 2;
        let full = || if has_few { row.rule_label() } else { row.label() };
        let (text, radius) = match (is_named, self.is_crowded) {
            (true, _) => (Some(full()), 6.5),
            (false, false) => (Some(row.setting_text()), 4.5),
            (false, true) => (None, if bold { 4.8 } else { 2.8 }),
        };
        Mark { centre, radius, text, bold }
    }
}

fn title(row: &ResultRow) -> String {
    format!(
        "{}: discard rate {}, verification rate {}, speed-up {}",
        row.label(),
        number(row.discard_rate, 3),
        number(row.verification_rate, 3),
        typeset(&times(row.speedup))
    )
}

/// Computes lines of equal modelled speed-up across the plot, with their labels.
///
/// By Eq. 2.3 the time per token is a·(1 + discard) + b·verification with a = t_draft + t_row and
/// b = t_target − t_draft. Plain decoding takes t_target + t_row per token.
fn equal_lines(cost: &CostSummary, x: &Axis, y: &Axis) -> Vec<(Segment, String)> {
    let row_seconds = cost.row_seconds.unwrap_or(0.0);
    let a = cost.draft_seconds + row_seconds;
    let b = cost.target_seconds - cost.draft_seconds;
    // There are no lines for a draft that is as slow as the target.
    if !(a > 0.0 && b > 0.0) {
        return Vec::new();
    }
    let plain = cost.target_seconds + row_seconds;
    let speedup =
        |discard: f64, verification: f64| plain / (a * (1.0 + discard) + b * verification);
    let (slowest, fastest) = (speedup(x.high, y.high), speedup(x.low, y.low));
    let step = round_step((fastest - slowest) / 7.0);
    let line = |level: f64| {
        let discard_at = |verification: f64| (plain / level - b * verification) / a - 1.0;
        let ends = [discard_at(y.high).max(x.low), discard_at(y.low).min(x.high)];
        let verification = |discard: f64| (plain / level - a * (1.0 + discard)) / b;
        let [from, to] = ends.map(|discard| (x.place(discard), y.place(verification(discard))));
        let text = format!("{level:.*}\u{d7}", decimals(step));
        let is_long = ends[0] < ends[1] && (to.0 - from.0).hypot(to.1 - from.1) >= MIN_LINE;
        is_long.then_some(([from, to], text))
    };
    let first = (slowest / step).ceil() as usize;
    let last = (fastest / step).floor() as usize;
    (first.max(1)..=last).filter_map(|index| line(index as f64 * step)).collect()
}

/// Places the text of each line as far right as possible without covering marks or another text,
/// and returns it with its area. Lines without a free place get no text.
fn label_lines<'a>(
    lines: &'a [(Segment, String)],
    marks: &[Mark],
    plot: Rect,
) -> Vec<(Rect, &'a str)> {
    let around = |mark: &Mark| Rect::about(mark.centre, mark.radius + 3.0, mark.radius + 3.0);
    let marks: Vec<Rect> = marks.iter().map(around).collect();
    let mut placed: Vec<(Rect, &str)> = Vec::new();
    for ([from, to], text) in lines {
        let rect = |step: i32| {
            let share = f64::from(step) / 20.0;
            let centre = (from.0 + share * (to.0 - from.0), from.1 + share * (to.1 - from.1));
            Rect::of_text(text, false, centre)
        };
        let is_free = |rect: &Rect| {
            let taken = marks.iter().chain(placed.iter().map(|(other, _)| other));
            plot.holds(rect) && !taken.into_iter().any(|other| rect.meets(other))
        };
        let free = (1..20).rev().map(rect).find(is_free);
        placed.extend(free.map(|rect| (rect, text.as_str())));
    }
    placed
}
