//! The machine that this program runs on, and the load of other programs on it.

use std::fs::read_to_string;

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

    #[cfg(target_os = "linux")]
    #[test]
    fn linux_reports_processor_times() {
        let now = ProcessorTime::now().expect("Linux");
        assert!(now.total >= now.busy && now.busy >= now.own);
    }
}
