//! Axes with round ticks, which map values to pixels, and the plot area that they frame.

use minijinja::{Value, context};

use super::Frame;

/// A rectangle, y downwards.
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
    pub(super) step: f64,
    /// The pixel of `low`.
    pub(super) start: f64,
    /// The pixel of `high`; less than `start` for an axis that runs upwards.
    pub(super) end: f64,
}

/// A tick of an axis.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tick {
    /// The tick's pixel.
    pub(super) at: f64,
    pub(super) text: String,
}

impl From<Tick> for Value {
    fn from(Tick { at, text }: Tick) -> Self {
        context! { at, text }
    }
}

impl Axis {
    /// An axis that covers `low` to `high` with about `num_ticks` round steps, drawn from pixel `start`
    /// to `end`.
    pub(super) fn new((low, high): (f64, f64), num_ticks: usize, start: f64, end: f64) -> Self {
        // A single value gets a range around it.
        let span = if high > low { high - low } else { high.abs().max(1.0) * 0.1 };
        let step = round_step(span / num_ticks as f64);
        // A hundredth of a step of slack, so that a value on a tick does not add another tick.
        let low = (low / step + 0.01).floor() * step;
        let high = ((high / step - 0.01).ceil() * step).max(low + step);
        Self { low, high, step, start, end }
    }

    /// The pixel of `value`, to a tenth.
    pub(super) fn place(&self, value: f64) -> f64 {
        let share = (value - self.low) / (self.high - self.low);
        tenth(self.start + share * (self.end - self.start))
    }

    /// Ticks at round values.
    pub(super) fn ticks(&self) -> Vec<Tick> {
        let num_steps = ((self.high - self.low) / self.step).round() as usize;
        let decimals = decimals(self.step);
        (0..=num_steps)
            .map(|index| {
                let value = self.low + index as f64 * self.step;
                Tick { at: self.place(value), text: format!("{value:.decimals$}") }
            })
            .collect()
    }
}

/// The least of 1, 2, 2.5 and 5 times a power of ten that is at least `step`.
pub(super) fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= step * 0.999);
    factor.unwrap_or(10.0) * power
}

/// The number of decimals that distinguishes multiples of `step`.
pub(super) fn decimals(step: f64) -> usize {
    (0..6)
        .find(|&decimals| {
            let scaled = step * 10f64.powi(decimals as i32);
            (scaled - scaled.round()).abs() < 1e-6 * scaled
        })
        .unwrap_or(6)
}

/// Rounds to a tenth of a pixel, which is as precise as the page needs.
pub(super) fn tenth(pixels: f64) -> f64 {
    (pixels * 10.0).round() / 10.0
}

/// A picture for its template: the frame, the edges of the plot area and the ticks of both axes, with the
/// keys of `content`.
pub(super) fn picture(
    frame: Frame,
    height: f64,
    plot: Rect,
    [x_ticks, y_ticks]: [Vec<Tick>; 2],
    content: Value,
) -> Value {
    let Rect { left, top, right, bottom } = plot;
    context! {
        frame => frame.name, width => frame.width, height, left, top, right, bottom,
        x_ticks, y_ticks, ..content
    }
}

/// A line through points with a mark at each. A point has its pixels, the mark's outline and a title.
pub(super) fn series(
    class: &str,
    title: &str,
    points: impl Iterator<Item = ((f64, f64), String, String)>,
) -> Value {
    let (mut line, mut marks) = (Vec::new(), Vec::new());
    for ((x, y), path, title) in points {
        line.push(format!("{x},{y}"));
        marks.push(context! { path, title });
    }
    context! { class, title, line => line.join(" "), points => marks }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(range: (f64, f64), num_ticks: usize, expected: &[&str]) {
        let axis = Axis::new(range, num_ticks, 0.0, 100.0);
        let ticks: Vec<String> = axis.ticks().into_iter().map(|tick| tick.text).collect();
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
