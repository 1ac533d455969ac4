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
/// Shorter stages get no estimate of their total time.
const FIRST_MINUTE: Duration = Duration::from_mins(1);

/// The time that a stage must run after its first unit before we estimate its total time.
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
    /// Whether the estimate of the total time has been printed.
    is_estimated: bool,
}

impl Clock {
    fn starting_at(position: f64) -> Self {
        let now = Instant::now();
        Self {
            begun: now,
            last: now,
            position,
            skipped: position,
            first: None,
            is_estimated: false,
        }
    }

    /// Computes the units per second and the remaining time. In the first minute, the remaining
    /// time is `None` below 1 % of the units, because units often arrive in bursts.
    fn pace(&self, elapsed: Duration, total: u64) -> (f64, Option<Duration>) {
        let done = self.position - self.skipped;
        let left = (total as f64 - self.position).max(0.0);
        let rate = done / elapsed.as_secs_f64().max(1e-9);
        let is_known = done > 0.0 && (100.0 * done >= left || elapsed >= FIRST_MINUTE);
        (rate, is_known.then(|| Duration::from_secs_f64(left / rate)))
    }

    /// Estimates the total time once, after the trial period. Returns `None` before and afterwards,
    /// or if the total is short. The trial starts at the first advance, so that earlier work, such
    /// as reading prompts, is not extrapolated.
    fn whole(&mut self, elapsed: Duration, total: u64) -> Option<Duration> {
        let (first, position) = *self.first.get_or_insert((elapsed, self.position));
        let done = self.position - position;
        let left = (total as f64 - self.position).max(0.0);
        if self.is_estimated || elapsed < first + TRIAL || 100.0 * done < left {
            return None;
        }
        self.is_estimated = true;
        let left = (elapsed - first).mul_f64(left / done.max(1e-9));
        (elapsed + left >= FIRST_MINUTE).then_some(elapsed + left)
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
        let template = format!(
            "{name:<12} {{bar:28}} {{pos}}/{{len}} {unit}, {{per_sec}}, {{eta}} left{{msg}}"
        );
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
        let (rate, left) = clock.pace(elapsed, total);
        if let Some(whole) = clock.whole(elapsed, total) {
            clock.last = Instant::now();
            self.print(&format!(
                "{}: will take about {}, estimated from the first {}",
                self.name,
                HumanDuration(whole),
                HumanDuration(elapsed)
            ));
        }
        if !self.bar.is_hidden() || clock.last.elapsed() < LINE_INTERVAL {
            return;
        }
        clock.last = Instant::now();
        let left = left.map_or_else(String::new, |left| format!(", {} left", HumanDuration(left)));
        self.print(&format!(
            "{}: {position}/{total} {}, {}/s{left}{}",
            self.name,
            self.unit,
            setting_text(Some(rate)),
            self.bar.message()
        ));
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
        self.bar.reset_eta();
        if let Ok(mut clock) = self.clock.lock() {
            *clock = Clock {
                last: clock.last,
                is_estimated: clock.is_estimated,
                ..Clock::starting_at(position as f64)
            };
        }
    }

    fn position(&self) -> u64 {
        self.bar.position()
    }

    fn set_total(&self, total: u64) {
        self.bar.set_length(total);
        if let Ok(mut clock) = self.clock.lock() {
            clock.is_estimated = false;
        }
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
        self.bar.finish_and_clear();
        let (all, unit) = (self.bar.position(), self.unit);
        let skipped = self.clock.lock().map_or(0, |clock| clock.skipped as u64);
        let what = match skipped {
            0 => format!("{all} {unit}"),
            // Earlier runs did the others.
            skipped => format!("{all} {unit}, {} of them now,", all.saturating_sub(skipped)),
        };
        self.print(&format!("{}: {what} in {}", self.name, HumanDuration(self.bar.elapsed())));
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
            Clock { position, ..Clock::starting_at(500.0) }.pace(elapsed, 1500)
        };
        // In the first minute, one unit in a thousand gives no estimate.
        assert_eq!(pace(seconds(20), 501.0), (0.05, None));
        assert_eq!(pace(seconds(100), 501.0), (0.01, Some(seconds(99_900))));
        assert_eq!(pace(seconds(20), 510.0), (0.5, Some(seconds(1980))));
        assert_eq!(pace(seconds(90), 500.0), (0.0, None));
        assert_eq!(pace(seconds(10), 1500.0), (100.0, Some(seconds(0))));
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

    #[test]
    fn total_time_is_estimated_once_after_the_trial() {
        let seconds = Duration::from_secs;
        let mut clock = Clock::starting_at(10.0);
        let mut whole = |elapsed, position| {
            clock.position = position;
            clock.whole(seconds(elapsed), 1010)
        };
        // The time before the first advance is not extrapolated.
        assert_eq!(whole(30, 20.0), None);
        assert_eq!(whole(32, 40.0), None);
        assert_eq!(whole(34, 60.0), Some(seconds(34 + 4 * 950 / 40)));
        assert_eq!(whole(36, 80.0), None);
        clock.is_estimated = false;
        // Short stages get no estimate.
        clock.position = 1000.0;
        assert_eq!(clock.whole(seconds(40), 1010), None);
        let mut slow = Clock::starting_at(0.0);
        // Less than 1 % of the units gives no estimate.
        for (elapsed, position) in [(1, 1.0), (10, 2.0), (20, 3.0)] {
            slow.position = position;
            assert_eq!(slow.whole(seconds(elapsed), 1000), None);
        }
        slow.position = 11.0;
        assert_eq!(slow.whole(seconds(101), 1000), Some(seconds(101 + 9890)));
    }
}
