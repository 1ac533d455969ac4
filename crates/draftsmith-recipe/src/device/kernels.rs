//! Counts the kernels that devices launch, and tells users when they wait for kernels to compile.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cubecl::launched::LaunchedKernels;
use cubecl::logging::{LaunchObservation, LaunchObserver};

use super::NumKernels;

/// The time between two checks for new kernels.
const TICK: Duration = Duration::from_millis(500);
/// The shortest time between two progress lines.
const BETWEEN_LINES: Duration = Duration::from_secs(3);
/// The time without a new kernel after which we consider all kernels compiled.
const QUIET: Duration = Duration::from_secs(10);

/// An observer of kernel launches, with its counts.
pub(super) struct Watching {
    launches: Arc<Launches>,
    observation: LaunchObservation,
    distinct: Option<LaunchedKernels>,
}

/// The launches so far.
#[derive(Default)]
struct Launches {
    num: AtomicUsize,
    last: Mutex<&'static str>,
    is_over: AtomicBool,
}

impl LaunchObserver for Launches {
    fn launched(&self, kernel: &'static str) {
        self.num.fetch_add(1, Ordering::Relaxed);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = kernel;
    }
}

impl Watching {
    pub(super) fn begin(counts: bool, say: impl Fn(String) + Send + 'static) -> Self {
        let launches = Arc::new(Launches::default());
        let observation = LaunchObservation::new(launches.clone());
        let watched = launches.clone();
        // The thread ends with the process, or once no new kernels appear.
        std::thread::spawn(move || tell(&watched, say));
        Self { launches, observation, distinct: counts.then(LaunchedKernels::new) }
    }

    pub(super) fn end(self) -> NumKernels {
        drop(self.observation);
        self.launches.is_over.store(true, Ordering::Relaxed);
        let distinct = self.distinct.map_or(0, |distinct| distinct.finish().len());
        NumKernels { distinct, launches: self.launches.num.load(Ordering::Relaxed) }
    }
}

/// Reports the number of new kernels at intervals, as long as new ones appear.
fn tell(launches: &Launches, say: impl Fn(String)) {
    let (begun, mut found, mut num_said) = (Instant::now(), LaunchedKernels::new(), 0);
    let mut all = std::collections::HashSet::new();
    let (mut last_new, mut last_line) = (begun, begun);
    while !launches.is_over.load(Ordering::Relaxed) {
        std::thread::sleep(TICK);
        let num_before = all.len();
        all.extend(std::mem::replace(&mut found, LaunchedKernels::new()).finish());
        if all.len() > num_before {
            last_new = Instant::now();
        }
        if !all.is_empty() && last_new.elapsed() >= QUIET {
            return;
        }
        if all.len() > num_said && last_line.elapsed() >= BETWEEN_LINES {
            let last = *launches.last.lock().unwrap_or_else(PoisonError::into_inner);
            // The name is a type's path. Its parameters are dropped.
            let path = last.split('<').next().unwrap_or(last);
            let name = path.rsplit("::").next().unwrap_or(path);
            let seconds = begun.elapsed().as_secs();
            say(format!("compiling kernels: {} after {seconds} s, the last `{name}`", all.len()));
            (num_said, last_line) = (all.len(), Instant::now());
        }
    }
}
