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
        let lines =
            (!console.quiet() && !terminal).then(|| Mutex::new(Lines { begun: now, last: now }));
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
        let rate = position as f64 / lines.begun.elapsed().as_secs_f64();
        let left =
            Duration::from_secs_f64((total.saturating_sub(position)) as f64 / rate.max(1e-9));
        tell(format!(
            "{}: {position}/{total} {}, {rate:.1}/s, {} left{}",
            self.name,
            self.unit,
            HumanDuration(left),
            self.bar.message()
        ));
    }
}
