//! Drawing of pictures in two sizes, axes with round ticks, and their SVG elements.

use minijinja::{Value, context};

use super::look::{Look, Place, tenth};
use crate::results::in_order;
use crate::text::{number, typeset};

/// A straight line between two places.
pub(super) type Segment = [Place; 2];

/// The size of a picture in CSS pixels. Every picture is drawn in two sizes, and the style sheet
/// shows the one that fits the screen, so that its text is never scaled down.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame {
    name: &'static str,
    pub(super) width: f64,
    /// The height of square pictures in CSS pixels.
    pub(super) tall: f64,
    /// The height of other pictures in CSS pixels.
    pub(super) low: f64,
}

const FRAMES: [Frame; 2] = [
    Frame { name: "wide", width: 600.0, tall: 400.0, low: 300.0 },
    Frame { name: "narrow", width: 350.0, tall: 330.0, low: 260.0 },
];

/// The width of a character in the widest common font, in CSS pixels.
const ADVANCE: f64 = 7.0;
/// The distance of the first and last position from the plot's edges, in CSS pixels.
const INSET: f64 = 14.0;
/// The number of positions above which only every fifth has a tick.
const MOST_TICKS: f64 = 12.0;

/// A rectangle in pixels, with y downwards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rect {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

/// A range of values between round numbers, and the range of pixels that it maps to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    /// The least value.
    pub(super) low: f64,
    /// The greatest value.
    pub(super) high: f64,
    step: f64,
    /// The pixel to which `low` maps.
    start: f64,
    /// The pixel to which `high` maps. It is less than `start` on an axis that runs upwards.
    end: f64,
}

impl Axis {
    /// Creates an axis that covers `low` to `high` with about `num_ticks` round steps, drawn from
    /// pixel `start` to `end`.
    pub(super) fn new((low, high): (f64, f64), num_ticks: usize, start: f64, end: f64) -> Self {
        // A single value gets a range around it.
        let span = if high > low { high - low } else { high.abs().max(1.0) * 0.1 };
        let step = round_step(span / num_ticks as f64);
        // A hundredth of a step of slack keeps a value on a tick from adding another tick.
        let low = (low / step + 0.01).floor() * step;
        let high = ((high / step - 0.01).ceil() * step).max(low + step);
        Self { low, high, step, start, end }
    }

    /// Creates an axis of the positions from 1, away from the ends of the plot. If there are many,
    /// every fifth has a tick.
    pub(super) fn of_positions(last: f64, start: f64, end: f64) -> Self {
        let step = if last <= MOST_TICKS { 1.0 } else { 5.0 };
        Self { low: 1.0, high: last.max(2.0), step, start: start + INSET, end: end - INSET }
    }

    /// Returns the pixel of `value`, rounded to a tenth.
    pub(super) fn place(&self, value: f64) -> f64 {
        let share = (value - self.low) / (self.high - self.low);
        tenth(self.start + share * (self.end - self.start))
    }

    /// Returns the pixel and the text of each tick. Ticks are at round values.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        let decimals = decimals(self.step);
        let [first, last] =
            [(self.low / self.step - 0.01).ceil(), (self.high / self.step + 0.01).floor()];
        let values = (first as i64..=last as i64).map(|index| index as f64 * self.step);
        values.map(|value| (self.place(value), number(value, decimals))).collect()
    }
}

/// Draws a picture in both sizes for `picture.html`. `draw` draws one and returns its height.
pub(super) fn picture(
    id: &str,
    title: &str,
    description: &str,
    draw: impl Fn(Frame, &mut Svg) -> f64,
) -> Value {
    let charts = FRAMES.map(|frame| {
        let mut svg = Svg::default();
        let height = draw(frame, &mut svg);
        context! { frame => frame.name, width => frame.width, height, elements => svg.0 }
    });
    context! { id, title, description, charts }
}

/// Builds the legend for `key.html` from a heading, which may be empty, a look and a name for each
/// entry.
pub(super) fn key(entries: impl Iterator<Item = (String, Look, String)>) -> Vec<[String; 4]> {
    in_order(entries.map(|(heading, look, name)| {
        let outline = look.path((6.0, 7.0), 4.5);
        [heading, look.class, outline, name]
    }))
}

/// The elements of a picture.
#[derive(Default)]
pub(super) struct Svg(Vec<Value>);

impl Svg {
    /// Begins a group of elements.
    pub(super) fn open(&mut self, class: &str, title: &str) {
        self.0.push(context! { open => true, class, title });
    }

    /// Ends the group of elements.
    pub(super) fn close(&mut self) {
        self.0.push(context! { close => true });
    }

    /// Adds an outline with a title, which may be empty.
    pub(super) fn path(&mut self, class: &str, outline: &str, title: &str) {
        self.0.push(context! { class, outline, title });
    }

    /// Adds a line through places.
    pub(super) fn line(&mut self, class: &str, places: &[Place]) {
        let places = places.iter().map(|(x, y)| format!("{} {}", tenth(*x), tenth(*y)));
        self.path(class, &format!("M{}", places.collect::<Vec<_>>().join("L")), "");
    }

    pub(super) fn rect(&mut self, class: &str, rect: Rect, title: &str) {
        let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom].map(tenth);
        self.path(class, &format!("M{left} {top}H{right}V{bottom}H{left}z"), title);
    }

    /// Adds a text. Its `start`, `middle` or `end` lies at the place, as `anchor` says.
    pub(super) fn text(&mut self, class: &str, (x, y): Place, anchor: &str, text: &str) {
        self.0.push(context! { class, x => tenth(x), y => tenth(y), anchor, text });
    }

    /// Adds the horizontal axis below the plot, with lines through the plot if `has_grid`. A number
    /// that would touch the one before it is left out.
    pub(super) fn x_axis(
        &mut self,
        axis: &Axis,
        plot: Rect,
        unit: &str,
        name: &str,
        has_grid: bool,
    ) {
        let mut end = f64::NEG_INFINITY;
        for (x, text) in axis.ticks() {
            if has_grid {
                self.line("grid", &[(x, plot.top), (x, plot.bottom)]);
            }
            let text = typeset(&(text + unit));
            let half = width(&text) / 2.0 + 2.0;
            if x - half >= end {
                self.text("axis", (x, plot.bottom + 17.0), "middle", &text);
                end = x + half;
            }
        }
        self.text("", (plot.right, plot.bottom + 38.0), "end", name);
    }

    /// Adds the vertical axis left of the plot, with lines through the plot.
    pub(super) fn y_axis(&mut self, axis: &Axis, plot: Rect, name: &str) {
        for (y, text) in axis.ticks() {
            self.line("grid", &[(plot.left, y), (plot.right, y)]);
            self.text("axis", (plot.left - 8.0, y + 4.0), "end", &text);
        }
        self.text("", (plot.left - 36.0, plot.top - 13.0), "start", name);
    }
}

/// Estimates the width of a text in the widest common font, in CSS pixels.
pub(super) fn width(text: &str) -> f64 {
    text.chars().count() as f64 * ADVANCE
}

/// Rounds `step` up to 1, 2, 2.5 or 5 times a power of ten.
pub(super) fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= step * 0.999);
    factor.unwrap_or(10.0) * power
}

/// Counts the decimals that distinguish multiples of `step`, at most 6.
pub(super) fn decimals(step: f64) -> usize {
    (0..6)
        .find(|&decimals| {
            let scaled = step * 10f64.powi(decimals as i32);
            (scaled - scaled.round()).abs() < 1e-6 * scaled
        })
        .unwrap_or(6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(range: (f64, f64), num_ticks: usize, expected: &[&str]) {
        let axis = Axis::new(range, num_ticks, 0.0, 100.0);
        let ticks: Vec<String> = axis.ticks().into_iter().map(|(_, text)| text).collect();
        assert_eq!(ticks, expected);
        for value in [range.0, range.1] {
            // Values may lie a hundredth of a step beyond the last tick.
            assert!((-1.0..=101.0).contains(&axis.place(value)), "{value} is off the axis");
        }
    }

    #[test]
    fn ticks_are_round_and_hold_the_range() {
        check((0.0, 2.3), 5, &["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]);
        check((0.21, 0.58), 4, &["0.2", "0.3", "0.4", "0.5", "0.6"]);
        check((0.0, 3.0), 3, &["0", "1", "2", "3"]);
        check((0.0, 1000.0), 4, &["0", "250", "500", "750", "1000"]);
        check((0.3, 0.3), 4, &["0.300", "0.325"]);
        check((0.0, 0.0), 4, &["0.000", "0.025"]);
    }

    #[test]
    fn an_axis_may_run_upwards() {
        let axis = Axis::new((0.0, 1.0), 4, 300.0, 20.0);
        assert_eq!((axis.place(0.0), axis.place(1.0), axis.place(0.5)), (300.0, 20.0, 160.0));
    }
}
