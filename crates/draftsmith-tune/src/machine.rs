//! The machine that this program runs on, and the load of other programs on it.

use std::fs::read_to_string;
use std::time::Instant;

use draftsmith_report::MAX_FOREIGN_LOAD;

/// Describes the machine in one line: processor, cores and operating system.
pub(crate) fn machine_text() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let processor = line.and_then(|line| Some(line.split_once(':')?.1.trim()));
    format!(
        "{}, {cores} cores, {}",
        processor.unwrap_or(std::env::consts::ARCH),
        std::env::consts::OS
    )
}

/// The minimum time span over which load is computed, in clock ticks of all processors together
/// (usually 10 ms each).
const MIN_TICKS: u64 = 100;

/// The processor time since the machine started, in clock ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessorTime {
    /// The time of all processors, busy or idle.
    total: u64,
    /// The busy time of all programs.
    busy: u64,
    /// The busy time of this process.
    own: u64,
}

impl ProcessorTime {
    /// Reads the current times; `None` if the system does not report them like Linux.
    pub(crate) fn now() -> Option<Self> {
        let (stat, own) = (read_to_string("/proc/stat"), read_to_string("/proc/self/stat"));
        Self::parse(&stat.ok()?, &own.ok()?)
    }

    fn parse(stat: &str, own: &str) -> Option<Self> {
        let numbers = |text: &str, first: usize, count: usize| -> Option<Vec<u64>> {
            let words = text.split_whitespace().skip(first).take(count);
            words.map(|word| word.parse().ok()).collect()
        };
        // The fields are user, nice, system, idle, iowait, irq, softirq and steal. Guest time is
        // part of user.
        let all = numbers(stat.lines().next()?.strip_prefix("cpu ")?, 0, 8)?;
        let [user, nice, system, idle, waiting, irq, softirq, steal] = all.try_into().ok()?;
        let busy = user + nice + system + irq + softirq + steal;
        // The fields 14 and 15 are utime and stime. The process name before them may contain
        // spaces.
        let own = numbers(own.rsplit_once(')')?.1, 11, 2)?;
        Some(Self { total: busy + idle + waiting, busy, own: own.iter().sum() })
    }

    /// Computes the share of all processor time that other programs have used since `self`, from 0
    /// to 1; `None` if too little time has passed.
    pub(crate) fn foreign_load(self) -> Option<f64> {
        Self::now()?.foreign_since(self)
    }

    fn foreign_since(self, earlier: Self) -> Option<f64> {
        let since = |of: fn(&Self) -> u64| of(&self).saturating_sub(of(&earlier));
        let total = since(|it| it.total);
        let foreign = since(|it| it.busy).saturating_sub(since(|it| it.own));
        (total >= MIN_TICKS).then(|| (foreign as f64 / total as f64).min(1.0))
    }
}

/// A span of time whose load is measured.
pub(crate) struct Span {
    begun: Option<ProcessorTime>,
    clock: Instant,
}

impl Span {
    /// Begins a span.
    pub(crate) fn begin() -> Self {
        Self { begun: ProcessorTime::now(), clock: Instant::now() }
    }

    /// Returns the load of other programs since the beginning and the seconds; `None` if the span is
    /// too short, or the system does not tell.
    pub(crate) fn judge(&self) -> Option<(f64, f64)> {
        Some((self.begun?.foreign_load()?, self.clock.elapsed().as_secs_f64()))
    }
}

/// Which measurements to repeat because other programs disturbed them. A load does not slow all
/// settings by the same factor: decoding without a draft waits for its threads more often. Repeats take
/// at most as long as what was kept, and at most [`MOST_REPEATED`] seconds.
#[derive(Debug, Default)]
pub(crate) struct Quiet {
    /// The seconds of measurements that were kept.
    kept: f64,
    /// The seconds of measurements that were repeated.
    repeated: f64,
    /// The sum of load times seconds over what was kept.
    loaded: f64,
}

/// The most seconds of repeated measurements.
const MOST_REPEATED: f64 = 120.0;
/// The seconds that may be repeated before anything was kept.
const FIRST_REPEATED: f64 = 10.0;

impl Quiet {
    /// Returns whether a measurement of `seconds` under a load of other programs is to be repeated.
    pub(crate) fn repeats(&mut self, load: f64, seconds: f64) -> bool {
        let most = (FIRST_REPEATED + self.kept).min(MOST_REPEATED);
        let repeats = load > MAX_FOREIGN_LOAD && self.repeated + seconds <= most;
        if repeats {
            self.repeated += seconds;
        } else {
            self.kept += seconds;
            self.loaded += load * seconds;
        }
        repeats
    }

    /// Returns the average load of other programs over what was kept; `None` if nothing was judged.
    pub(crate) fn load(&self) -> Option<f64> {
        (self.kept > 0.0).then(|| self.loaded / self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_of_others_is_what_this_process_did_not_use() {
        let time = |busy: u64, idle: u64, own: u64| {
            let stat = format!("cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n");
            let own = format!("12 (a b) c) R 1 1 1 0 -1 0 0 0 0 0 {own} 0 0 0 20 0");
            ProcessorTime::parse(&stat, &own).expect("the system's format")
        };
        let begin = time(1000, 500, 40);
        assert_eq!(time(1200, 700, 140).foreign_since(begin), Some(0.25));
        // Rounding may count a tick of this process twice.
        assert_eq!(time(1100, 600, 141).foreign_since(begin), Some(0.0));
        assert_eq!(time(1010, 510, 40).foreign_since(begin), None);
        assert_eq!(ProcessorTime::parse("intr 1", "1 (a) R"), None);
    }

    #[test]
    fn bursts_are_repeated_and_a_steady_load_only_for_a_while() {
        let mut quiet = Quiet::default();
        // Five seconds busy and five quiet, in spans of half a second.
        let (mut clock, mut kept) = (0, Vec::new());
        while kept.len() < 60 {
            let load = if clock / 10 % 2 == 0 { 0.5 } else { 0.01 };
            clock += 1;
            if !quiet.repeats(load, 0.5) {
                kept.push(load);
            }
        }
        assert!(kept.iter().all(|load| *load < 0.1) && clock <= 120, "{clock} {kept:?}");
        assert!(quiet.load().is_some_and(|load| (load - 0.01).abs() < 1e-9));
        let mut busy = Quiet::default();
        let num_kept = (0..100).filter(|_| !busy.repeats(0.5, 1.0)).count();
        assert!((40..=50).contains(&num_kept) && busy.load() == Some(0.5), "{num_kept}");
        let mut long = Quiet::default();
        assert!(!long.repeats(0.5, 60.0), "a long measurement is not repeated");
        assert_eq!(Quiet::default().load(), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn linux_reports_processor_times() {
        let now = ProcessorTime::now().expect("Linux");
        assert!(now.total >= now.busy && now.busy >= now.own);
    }
}
