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

/// The first part of a stage is its trial: how long the whole will take is told after it, where that
/// is a minute or more.
const TRIAL: Duration = Duration::from_secs(3);

/// One stage's progress; shared by the threads that work on it.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// What is told besides the bar.
    told: Told,
    clock: Mutex<Clock>,
    name: &'static str,
    unit: &'static str,
}

/// What is told of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    /// Lines above the bar, of what does not pass.
    AboveBar,
    /// Lines in the place of the bar.
    Lines,
}

#[derive(Debug)]
struct Clock {
    begun: Instant,
    last: Instant,
    /// Units that were done before.
    skipped: u64,
    /// Whether it was told how long the whole will take.
    has_told_whole: bool,
}

impl Clock {
    /// How many units a second are done, and how long the rest will take; that is not told of a few
    /// in the first minute, which often come in bunches.
    fn pace(&self, elapsed: Duration, position: u64, total: u64) -> (f64, Option<Duration>) {
        let (done, left) = (position.saturating_sub(self.skipped), total.saturating_sub(position));
        let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
        let is_telling = done > 0 && (100 * done >= left || elapsed >= FIRST_MINUTE);
        (rate, is_telling.then(|| Duration::from_secs_f64(left as f64 / rate)))
    }

    /// How long the whole will take, once and after the trial; None where that is soon.
    fn whole(&mut self, elapsed: Duration, left: Option<Duration>) -> Option<Duration> {
        if self.has_told_whole || elapsed < TRIAL {
            return None;
        }
        let whole = elapsed + left?;
        self.has_told_whole = true;
        (whole >= FIRST_MINUTE).then_some(whole)
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
        let told = match (console.quiet(), terminal) {
            (true, _) => Told::Nothing,
            (false, true) => Told::AboveBar,
            (false, false) => Told::Lines,
        };
        let now = Instant::now();
        let clock = Clock { begun: now, last: now, skipped: 0, has_told_whole: false };
        Self { bar, told, clock: Mutex::new(clock), name, unit }
    }

    /// Shows a message beside the numbers.
    pub(crate) fn message(&self, text: impl Into<String>) {
        self.bar.set_message(format!(", {}", text.into()));
    }

    /// Moves on by `units`.
    pub(crate) fn advance(&self, units: u64) {
        self.bar.inc(units);
        self.tell_pace();
    }

    /// Changes how many units there are.
    pub(crate) fn set_total(&self, total: u64) {
        self.bar.set_length(total);
        if let Ok(mut clock) = self.clock.lock() {
            clock.has_told_whole = false;
        }
    }

    /// Moves to `position` without counting what lies before it as done now.
    pub(crate) fn skip_to(&self, position: u64) {
        self.bar.set_position(position);
        self.bar.reset_eta();
        if let Ok(mut clock) = self.clock.lock() {
            (clock.skipped, clock.begun) = (position, Instant::now());
        }
    }

    /// Ends the stage without a line.
    pub(crate) fn clear(self) {
        self.bar.finish_and_clear();
    }

    /// Ends the stage with a line that says how long it took.
    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
        self.tell(&format!(
            "{}: {} {} in {}",
            self.name,
            self.bar.position(),
            self.unit,
            HumanDuration(self.bar.elapsed())
        ));
    }

    /// A line that stays.
    pub(crate) fn tell(&self, line: &str) {
        match self.told {
            Told::Nothing => {}
            Told::AboveBar => self.bar.println(line),
            Told::Lines => tell(line),
        }
    }

    fn tell_pace(&self) {
        if self.told == Told::Nothing {
            return;
        }
        let Ok(mut clock) = self.clock.lock() else { return };
        let (position, total) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let elapsed = clock.begun.elapsed();
        let (rate, left) = clock.pace(elapsed, position, total);
        if let Some(whole) = clock.whole(elapsed, left) {
            clock.last = Instant::now();
            self.tell(&format!(
                "{}: will take about {}, by its first {}",
                self.name,
                HumanDuration(whole),
                HumanDuration(elapsed)
            ));
        }
        if self.told != Told::Lines || clock.last.elapsed() < LINE_INTERVAL {
            return;
        }
        clock.last = Instant::now();
        let left = left.map_or_else(String::new, |left| format!(", {} left", HumanDuration(left)));
        self.tell(&format!(
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
        let clock = Clock { begun: now, last: now, skipped: 500, has_told_whole: false };
        let seconds = Duration::from_secs;
        // One of a thousand says little in the first minute.
        assert_eq!(clock.pace(seconds(20), 501, 1500), (0.05, None));
        assert_eq!(clock.pace(seconds(100), 501, 1500), (0.01, Some(seconds(99_900))));
        assert_eq!(clock.pace(seconds(20), 510, 1500), (0.5, Some(seconds(1980))));
        assert_eq!(clock.pace(seconds(90), 500, 1500), (0.0, None));
        assert_eq!(clock.pace(seconds(10), 1500, 1500), (100.0, Some(seconds(0))));
    }

    #[test]
    fn how_long_a_stage_will_take_is_told_once_after_a_trial() {
        let now = Instant::now();
        let mut clock = Clock { begun: now, last: now, skipped: 0, has_told_whole: false };
        let seconds = Duration::from_secs;
        assert_eq!(clock.whole(seconds(2), Some(seconds(500))), None);
        assert_eq!(clock.whole(seconds(9), None), None);
        assert_eq!(clock.whole(seconds(10), Some(seconds(490))), Some(seconds(500)));
        assert_eq!(clock.whole(seconds(11), Some(seconds(489))), None);
        clock.has_told_whole = false;
        assert_eq!(clock.whole(seconds(4), Some(seconds(30))), None);
    }
}
