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
    /// Units that are done, with parts of others.
    position: f64,
    /// Units that were done before.
    skipped: f64,
    /// When the first piece was done, and how far that was.
    first: Option<(Duration, f64)>,
    /// Whether it was told how long the whole will take.
    has_told_whole: bool,
}

impl Clock {
    /// How many units a second are done, and how long the rest will take; that is not told of a few
    /// in the first minute, which often come in bunches.
    fn pace(&self, elapsed: Duration, total: u64) -> (f64, Option<Duration>) {
        let done = self.position - self.skipped;
        let left = (total as f64 - self.position).max(0.0);
        let rate = done / elapsed.as_secs_f64().max(1e-9);
        let is_telling = done > 0.0 && (100.0 * done >= left || elapsed >= FIRST_MINUTE);
        (rate, is_telling.then(|| Duration::from_secs_f64(left / rate)))
    }

    /// How long the whole will take, once and after the trial; None where that is soon. The trial begins
    /// where the first piece is done: what comes before it, as the reading of prompts, is not all that
    /// is to come.
    fn whole(&mut self, elapsed: Duration, total: u64) -> Option<Duration> {
        let (first, position) = *self.first.get_or_insert((elapsed, self.position));
        if self.has_told_whole || elapsed < first + TRIAL {
            return None;
        }
        let done = self.position - position;
        let left = (total as f64 - self.position).max(0.0);
        if 100.0 * done < left {
            return None;
        }
        self.has_told_whole = true;
        let left = (elapsed - first).mul_f64(left / done.max(1e-9));
        (elapsed + left >= FIRST_MINUTE).then_some(elapsed + left)
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
        let clock = Clock {
            begun: now,
            last: now,
            position: 0.0,
            skipped: 0.0,
            first: None,
            has_told_whole: false,
        };
        Self { bar, told, clock: Mutex::new(clock), name, unit }
    }

    /// Shows a message beside the numbers.
    pub(crate) fn message(&self, text: impl Into<String>) {
        self.bar.set_message(format!(", {}", text.into()));
    }

    /// Moves on by `units`.
    pub(crate) fn advance(&self, units: u64) {
        self.advance_part(units as f64);
    }

    /// Moves on by `units`, which may be a part of one: so the pace of units that come side by side is
    /// known before the first is done.
    pub(crate) fn advance_part(&self, units: f64) {
        let Ok(mut clock) = self.clock.lock() else { return };
        clock.position += units;
        // Parts add up to whole units but for rounding.
        self.bar.set_position((clock.position + 1e-6) as u64);
        self.tell_pace(&mut clock);
    }

    /// Moves on with several pieces of work that come along together, each worth so many units.
    pub(crate) fn side_by_side(&self, worth: Vec<f64>) -> SideBySide<'_> {
        SideBySide { progress: self, done: vec![0.0; worth.len()], worth }
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
            (clock.position, clock.skipped) = (position as f64, position as f64);
            (clock.begun, clock.first) = (Instant::now(), None);
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

    fn tell_pace(&self, clock: &mut Clock) {
        if self.told == Told::Nothing {
            return;
        }
        let (position, total) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let elapsed = clock.begun.elapsed();
        let (rate, left) = clock.pace(elapsed, total);
        if let Some(whole) = clock.whole(elapsed, total) {
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

/// Pieces of work that come along together.
#[derive(Debug)]
pub(crate) struct SideBySide<'a> {
    progress: &'a Progress,
    worth: Vec<f64>,
    /// The share of each that is done.
    done: Vec<f64>,
}

impl SideBySide<'_> {
    /// So much of a piece is done, of 1.
    pub(crate) fn reach(&mut self, nth: usize, share: f64) {
        let more = share.min(1.0) - self.done[nth];
        if more > 0.0 {
            self.done[nth] += more;
            self.progress.advance_part(more * self.worth[nth]);
        }
    }

    /// All are done.
    pub(crate) fn finish(mut self) {
        (0..self.worth.len()).for_each(|nth| self.reach(nth, 1.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(skipped: f64) -> Clock {
        let now = Instant::now();
        let (position, first) = (skipped, None);
        Clock { begun: now, last: now, position, skipped, first, has_told_whole: false }
    }

    #[test]
    fn the_pace_is_that_of_what_was_done_now() {
        let seconds = Duration::from_secs;
        let pace = |elapsed: Duration, position: f64| {
            Clock { position, ..clock(500.0) }.pace(elapsed, 1500)
        };
        // One of a thousand says little in the first minute.
        assert_eq!(pace(seconds(20), 501.0), (0.05, None));
        assert_eq!(pace(seconds(100), 501.0), (0.01, Some(seconds(99_900))));
        assert_eq!(pace(seconds(20), 510.0), (0.5, Some(seconds(1980))));
        assert_eq!(pace(seconds(90), 500.0), (0.0, None));
        assert_eq!(pace(seconds(10), 1500.0), (100.0, Some(seconds(0))));
    }

    #[test]
    fn pieces_side_by_side_count_as_they_come_along() {
        let progress = Progress::new(&Console::silent(), "test", "pieces", 4);
        let position = || progress.clock.lock().expect("nobody panics").position;
        let mut pieces = progress.side_by_side(vec![1.0, 1.0, 0.5]);
        pieces.reach(0, 0.25);
        pieces.reach(1, 0.5);
        assert_eq!((position(), progress.bar.position()), (0.75, 0));
        pieces.reach(0, 0.75);
        // What is less than before, or more than all, is no news.
        pieces.reach(0, 0.5);
        pieces.reach(2, 3.0);
        assert_eq!((position(), progress.bar.position()), (1.75, 1));
        pieces.finish();
        assert_eq!(position(), 2.5);
        for _ in 0..10 {
            progress.advance_part(0.15);
        }
        assert_eq!(progress.bar.position(), 4);
    }

    #[test]
    fn how_long_a_stage_will_take_is_told_once_after_a_trial() {
        let seconds = Duration::from_secs;
        let mut clock = clock(10.0);
        let mut whole = |elapsed, position| {
            clock.position = position;
            clock.whole(seconds(elapsed), 1010)
        };
        // What the first unit takes says nothing of the others.
        assert_eq!(whole(30, 20.0), None);
        assert_eq!(whole(32, 40.0), None);
        assert_eq!(whole(34, 60.0), Some(seconds(34 + 4 * 950 / 40)));
        assert_eq!(whole(36, 80.0), None);
        clock.has_told_whole = false;
        // What is soon over is not told.
        clock.position = 1000.0;
        assert_eq!(clock.whole(seconds(40), 1010), None);
        let mut slow = self::clock(0.0);
        // One of a thousand says little.
        for (elapsed, position) in [(1, 1.0), (10, 2.0), (20, 3.0)] {
            slow.position = position;
            assert_eq!(slow.whole(seconds(elapsed), 1000), None);
        }
        slow.position = 11.0;
        assert_eq!(slow.whole(seconds(101), 1000), Some(seconds(101 + 9890)));
    }
}
