//! The progress of long stages. A terminal shows a bar with speed and remaining time; a file gets
//! an occasional line of text.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use draftsmith_recipe::Bar;
use draftsmith_theory::setting_text;

use crate::console::Console;
use crate::console::streams::eprint_line;

/// The time between two plain lines.
const LINE_INTERVAL: Duration = Duration::from_secs(15);

/// The time after which we estimate the remaining time even if less than 1 % of the units are done.
const FIRST_MINUTE: Duration = Duration::from_mins(1);

/// The time that a stage must run after its first unit before we estimate its speed.
const TRIAL: Duration = Duration::from_secs(3);

/// The progress of one stage, shared by its threads.
#[derive(Debug)]
pub(crate) struct TerminalBar {
    bar: ProgressBar,
    quiet: bool,
    clock: Mutex<Clock>,
    name: &'static str,
    unit: &'static str,
}

#[derive(Debug)]
struct Clock {
    begun: Instant,
    /// The time of the last plain line.
    last: Instant,
    /// The number of units done, which may be fractional.
    position: f64,
    /// The number of units done by an earlier run.
    skipped: f64,
    /// The elapsed time at the first advance, and the position after it.
    first: Option<(Duration, f64)>,
}

impl Clock {
    fn starting_at(position: f64) -> Self {
        let now = Instant::now();
        Self { begun: now, last: now, position, skipped: position, first: None }
    }

    /// Estimates the units per second and the remaining time; `None` before the end of the trial. The
    /// trial starts at the first advance, so that earlier work, such as reading prompts, and the units
    /// of earlier runs are not extrapolated. In the first minute, 1 % of the units must be done,
    /// because units often arrive in bursts.
    fn pace(&mut self, elapsed: Duration, total: u64) -> Option<(f64, Duration)> {
        let (first, position) = *self.first.get_or_insert((elapsed, self.position));
        let (done, time) = (self.position - position, elapsed.saturating_sub(first));
        let left = (total as f64 - self.position).max(0.0);
        let is_known = done > 0.0 && (100.0 * done >= left || elapsed >= FIRST_MINUTE);
        let rate = done / time.as_secs_f64().max(1e-9);
        (is_known && time >= TRIAL).then(|| (rate, Duration::from_secs_f64(left / rate)))
    }
}

impl TerminalBar {
    /// Starts the progress of a stage of `total` units.
    pub(crate) fn new(
        console: &Console,
        name: &'static str,
        unit: &'static str,
        total: u64,
    ) -> Self {
        let is_shown = !console.quiet && std::io::stderr().is_terminal();
        let bar = if is_shown { ProgressBar::new(0) } else { ProgressBar::hidden() };
        bar.set_length(total);
        let template = format!("{name:<12} {{bar:28}} {{pos}}/{{len}} {unit}{{prefix}}{{msg}}");
        bar.set_style(
            ProgressStyle::with_template(&template)
                .expect("the template is valid")
                .progress_chars("━╸ "),
        );
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar, quiet: console.quiet, clock: Mutex::new(Clock::starting_at(0.0)), name, unit }
    }

    fn print_pace(&self, clock: &mut Clock) {
        if self.quiet {
            return;
        }
        let (position, total) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let elapsed = clock.begun.elapsed();
        let pace = clock.pace(elapsed, total);
        let text = pace.map_or_else(String::new, |(rate, left)| {
            format!(", {}/s, {} left", setting_text(Some(rate)), HumanDuration(left))
        });
        self.bar.set_prefix(text.clone());
        if !self.bar.is_hidden() || clock.last.elapsed() < LINE_INTERVAL {
            return;
        }
        clock.last = Instant::now();
        let (name, unit) = (self.name, self.unit);
        self.print(&format!("{name}: {position}/{total} {unit}{text}{}", self.bar.message()));
    }
}

impl Bar for TerminalBar {
    fn advance(&self, units: f64) {
        let Ok(mut clock) = self.clock.lock() else { return };
        clock.position += units;
        // Fractions add up to whole units except for rounding.
        let most = self.bar.length().unwrap_or(u64::MAX);
        self.bar.set_position(((clock.position + 1e-6) as u64).min(most));
        self.print_pace(&mut clock);
    }

    fn skip_to(&self, position: u64) {
        self.bar.set_position(position);
        self.bar.set_prefix("");
        if let Ok(mut clock) = self.clock.lock() {
            *clock = Clock {
                last: clock.last,
                skipped: clock.skipped + (position as f64 - clock.position).max(0.0),
                ..Clock::starting_at(position as f64)
            };
        }
    }

    fn position(&self) -> u64 {
        self.bar.position()
    }

    fn set_total(&self, total: u64) {
        self.bar.set_length(total);
    }

    fn message(&self, text: &str) {
        let text = if text.is_empty() { String::new() } else { format!(", {text}") };
        self.bar.set_message(text);
    }

    fn print(&self, line: &str) {
        if self.bar.is_hidden() && !self.quiet {
            eprint_line(line);
        } else {
            self.bar.println(line);
        }
    }

    fn finish(&self) {
        // A stopped stage has not done all units, as the cleared bar would say.
        let (all, unit, time) = (self.bar.position(), self.unit, HumanDuration(self.bar.elapsed()));
        self.bar.finish_and_clear();
        let skipped = self.clock.lock().map_or(0, |clock| clock.skipped as u64);
        // Earlier runs did those that were skipped.
        let what = match all.saturating_sub(skipped) {
            _ if skipped == 0 => format!("{all} {unit} in {time}"),
            0 => format!("kept all {all} {unit}"),
            now => format!("{all} {unit}, {now} of them now, in {time}"),
        };
        self.print(&format!("{}: {what}", self.name));
    }
}

impl Drop for TerminalBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_ignores_units_of_earlier_runs() {
        let seconds = Duration::from_secs;
        let pace = |elapsed: Duration, position: f64| {
            let first = Some((Duration::ZERO, 500.0));
            Clock { position, first, ..Clock::starting_at(500.0) }.pace(elapsed, 1500)
        };
        // In the first minute, one unit in a thousand gives no estimate.
        assert_eq!(pace(seconds(20), 501.0), None);
        assert_eq!(pace(seconds(100), 501.0), Some((0.01, seconds(99_900))));
        assert_eq!(pace(seconds(20), 510.0), Some((0.5, seconds(1980))));
        assert_eq!(pace(seconds(90), 500.0), None);
        assert_eq!(pace(seconds(10), 1500.0), Some((100.0, seconds(0))));
        // The time before the first advance is not extrapolated.
        let mut late = Clock { position: 60.0, ..Clock::starting_at(10.0) };
        late.first = Some((seconds(30), 20.0));
        assert_eq!(late.pace(seconds(34), 1010), Some((10.0, seconds(95))));
        // A burst right after a resumption is no speed.
        assert_eq!(pace(seconds(2), 1000.0), None);
    }

    #[test]
    fn parts_add_up_to_whole_units() {
        let bar = TerminalBar::new(&Console::silent(), "test", "pieces", 4);
        bar.skip_to(2);
        bar.advance(0.5);
        for _ in 0..10 {
            bar.advance(0.15);
        }
        assert_eq!(bar.position(), 4);
    }
}
