//! Progress of long stages: a bar with rate and time left on a terminal, a plain line now and then
//! where stderr is a file.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use crate::console::Console;
use crate::console::streams::tell;

/// How often a plain line is written.
const LINE_INTERVAL: Duration = Duration::from_secs(15);

/// From when on a few units tell how long the rest will take.
const FIRST_MINUTE: Duration = Duration::from_mins(1);

/// One stage's progress; shared by the threads that work on it.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Set where lines take the place of the bar.
    lines: Option<Mutex<Lines>>,
    name: &'static str,
    unit: &'static str,
}

#[derive(Debug)]
struct Lines {
    begun: Instant,
    last: Instant,
    /// Units that were done before.
    skipped: u64,
}

impl Lines {
    /// How many units a second are done, and how long the rest will take; that is not told of a few
    /// in the first minute, which often come in bunches.
    fn pace(&self, elapsed: Duration, position: u64, total: u64) -> (f64, Option<Duration>) {
        let (done, left) = (position.saturating_sub(self.skipped), total.saturating_sub(position));
        let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
        let is_telling = done > 0 && (100 * done >= left || elapsed >= FIRST_MINUTE);
        (rate, is_telling.then(|| Duration::from_secs_f64(left as f64 / rate)))
    }
}

impl Progress {
    /// A stage of `total` units.
    pub(crate) fn new(
        console: &Console,
        name: &'static str,
        unit: &'static str,
        total: u64,
    ) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar =
            if console.quiet() || !terminal { ProgressBar::hidden() } else { ProgressBar::new(0) };
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
        let now = Instant::now();
        let lines = (!console.quiet() && !terminal)
            .then(|| Mutex::new(Lines { begun: now, last: now, skipped: 0 }));
        Self { bar, lines, name, unit }
    }

    /// Shows a message beside the numbers.
    pub(crate) fn message(&self, text: impl Into<String>) {
        self.bar.set_message(format!(", {}", text.into()));
    }

    /// Moves on by `units`.
    pub(crate) fn advance(&self, units: u64) {
        self.bar.inc(units);
        self.line();
    }

    /// Changes how many units there are.
    pub(crate) fn set_total(&self, total: u64) {
        self.bar.set_length(total);
    }

    /// Moves to `position` without counting what lies before it as done now.
    pub(crate) fn skip_to(&self, position: u64) {
        self.bar.set_position(position);
        self.bar.reset_eta();
        if let Some(lines) = &self.lines
            && let Ok(mut lines) = lines.lock()
        {
            (lines.skipped, lines.begun) = (position, Instant::now());
        }
    }

    /// Ends the stage without a line.
    pub(crate) fn clear(self) {
        self.bar.finish_and_clear();
    }

    /// Ends the stage with a line that says how long it took.
    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
        let text = format!(
            "{}: {} {} in {}",
            self.name,
            self.bar.position(),
            self.unit,
            HumanDuration(self.bar.elapsed())
        );
        if self.lines.is_some() {
            tell(text);
        } else if !self.bar.is_hidden() {
            self.bar.println(text);
        }
    }

    fn line(&self) {
        let Some(lines) = &self.lines else { return };
        let Ok(mut lines) = lines.lock() else { return };
        if lines.last.elapsed() < LINE_INTERVAL {
            return;
        }
        lines.last = Instant::now();
        let (position, total) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let (rate, left) = lines.pace(lines.begun.elapsed(), position, total);
        let left = left.map_or_else(String::new, |left| format!(", {} left", HumanDuration(left)));
        tell(format!(
            "{}: {position}/{total} {}, {rate:.1}/s{left}{}",
            self.name,
            self.unit,
            self.bar.message()
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_is_that_of_what_was_done_now() {
        let now = Instant::now();
        let lines = Lines { begun: now, last: now, skipped: 500 };
        let seconds = Duration::from_secs;
        // One of a thousand says little in the first minute.
        assert_eq!(lines.pace(seconds(20), 501, 1500), (0.05, None));
        assert_eq!(lines.pace(seconds(100), 501, 1500), (0.01, Some(seconds(99_900))));
        assert_eq!(lines.pace(seconds(20), 510, 1500), (0.5, Some(seconds(1980))));
        assert_eq!(lines.pace(seconds(90), 500, 1500), (0.0, None));
        assert_eq!(lines.pace(seconds(10), 1500, 1500), (100.0, Some(seconds(0))));
    }
}
