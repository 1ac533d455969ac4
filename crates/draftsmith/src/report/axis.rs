//! Axes: round numbers to label them with, and the way from a value to a place.

/// A range of values between round numbers, and the places it maps to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    /// The least value.
    pub(super) low: f64,
    /// The greatest value.
    pub(super) high: f64,
    step: f64,
    /// Where `low` lies.
    start: f64,
    /// Where `high` lies; less than `start` for an axis that runs upwards.
    end: f64,
}

impl Axis {
    /// An axis that holds `low` to `high` with about `num_ticks` round steps, drawn from `start` to
    /// `end`.
    pub(super) fn new((low, high): (f64, f64), num_ticks: usize, start: f64, end: f64) -> Self {
        // All values alike make no range.
        let span = if high > low { high - low } else { high.abs().max(1.0) * 0.1 };
        let step = round_step(span / num_ticks as f64);
        // A hundredth of a step of slack, so that a value on a tick does not ask for one more.
        let low = (low / step + 0.01).floor() * step;
        let high = ((high / step - 0.01).ceil() * step).max(low + step);
        Self { low, high, step, start, end }
    }

    /// Where `value` lies, to a tenth of a pixel.
    pub(super) fn place(&self, value: f64) -> f64 {
        let share = (value - self.low) / (self.high - self.low);
        tenth(self.start + share * (self.end - self.start))
    }

    /// Round values and their text.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        let num_steps = ((self.high - self.low) / self.step).round() as usize;
        let decimals = decimals(self.step);
        (0..=num_steps)
            .map(|index| {
                let value = self.low + index as f64 * self.step;
                (value, format!("{value:.decimals$}"))
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

/// How many decimals tell multiples of `step` apart.
pub(super) fn decimals(step: f64) -> usize {
    (0..6)
        .find(|&decimals| {
            let scaled = step * 10f64.powi(decimals as i32);
            (scaled - scaled.round()).abs() < 1e-6 * scaled
        })
        .unwrap_or(6)
}

/// To a tenth of a pixel: the page need not say more.
pub(super) fn tenth(place: f64) -> f64 {
    (place * 10.0).round() / 10.0
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
            // A hundredth of a step beyond the last tick is let pass.
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
