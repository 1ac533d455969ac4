//! The products and the attention of a few rows, computed by several threads.
//!
//! A decoded token takes a hundred products of some tens of microseconds each, which is too short
//! to start threads for. Here the other threads spin during a forward and take shares of each
//! product. A product does not wait long for a thread that was suspended: the share is computed
//! again.

use std::fmt::Debug;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use super::lines::{Factors, Lines};
use super::storage::LINE;

/// The number of panels per pass over a row. Shares are multiples of it.
const PANELS_A_PASS: usize = 6;

/// The maximum number of threads in a team. More threads do not read memory faster.
const MAX_THREADS: usize = 8;

/// The threads that work on one forward.
#[derive(Debug, Default)]
pub(crate) struct Team {
    /// The work that is being done, if any.
    work: Mutex<Option<Arc<SharedWork>>>,
    /// Counts the pieces of work so far, which identifies the current one.
    num_works: AtomicUsize,
    /// The number of threads that help, or will soon.
    num_helpers: AtomicUsize,
    is_over: AtomicBool,
}

impl Team {
    /// Runs a forward with the help of other threads of the pool.
    pub(super) fn run(self: &Arc<Self>, forward: impl FnOnce()) {
        let most = rayon::current_num_threads().min(MAX_THREADS) - 1;
        self.is_over.store(false, Ordering::Relaxed);
        // If the forward panics, the others must not wait for it.
        let _over = Over(self);
        // A thread that was suspended in an earlier forward still counts as a helper and may return
        // in this one.
        while self.num_helpers.load(Ordering::Relaxed) < most {
            self.num_helpers.fetch_add(1, Ordering::Relaxed);
            let team = self.clone();
            rayon::spawn(move || {
                // If a share panics, the thread that needs it computes it again and panics too.
                let _ = catch_unwind(AssertUnwindSafe(|| team.help()));
                team.num_helpers.fetch_sub(1, Ordering::Relaxed);
            });
        }
        forward();
    }

    /// Multiplies rows by weights of shape `[inputs, outputs]`, into `output`, `[rows, outputs]`.
    pub(super) fn multiply(
        &self,
        lines: &Arc<Lines>,
        shape: [usize; 2],
        x: &[f32],
        output: &mut [f32],
    ) {
        let num_passes = shape[1].div_ceil(PANELS_A_PASS * LINE);
        let product = SharedProduct::new(lines, shape, x);
        self.share(product, num_passes, |product, passes, done| {
            product.place(passes, done, output);
        });
    }

    /// Computes work of `num_parts` parts, and calls `place` with each share's parts and results.
    pub(super) fn share<W: Shared + 'static>(
        &self,
        work: W,
        num_parts: usize,
        place: impl FnMut(&W, Range<usize>, &[f32]),
    ) {
        let begun = Instant::now();
        let work = Arc::new(SharedWork::new(work, num_parts));
        *self.work() = Some(work.clone());
        self.num_works.fetch_add(1, Ordering::Release);
        work.work();
        // This thread waits for others as long as its own shares took.
        work.collect(Instant::now() + begun.elapsed(), place);
    }

    fn work(&self) -> MutexGuard<'_, Option<Arc<SharedWork>>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works until the forward is over.
    fn help(&self) {
        let mut last = 0;
        while !self.is_over.load(Ordering::Relaxed) {
            let number = self.num_works.load(Ordering::Acquire);
            if number == last {
                std::hint::spin_loop();
                continue;
            }
            last = number;
            let work = self.work().clone();
            if let Some(work) = work {
                work.work();
            }
        }
    }
}

/// A guard that dismisses the team when it is dropped.
struct Over<'a>(&'a Team);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
        *self.0.work() = None;
    }
}

/// Work in parts that any thread can compute independently.
pub(super) trait Shared: Debug + Send + Sync {
    /// Computes some parts.
    fn compute(&self, parts: Range<usize>) -> Vec<f32>;
}

/// Work that the threads of a team share.
#[derive(Debug)]
struct SharedWork<W: ?Sized = dyn Shared> {
    /// The first part that no thread has taken.
    next: AtomicUsize,
    /// The results of each share, at the index of its first part.
    done: Vec<OnceLock<Vec<f32>>>,
    work: W,
}

impl<W> SharedWork<W> {
    fn new(work: W, num_parts: usize) -> Self {
        let done = std::iter::repeat_with(OnceLock::new).take(num_parts).collect();
        Self { next: AtomicUsize::new(0), done, work }
    }
}

impl<W: Shared + ?Sized> SharedWork<W> {
    /// Returns the share that starts at a part. It is a quarter of the remaining parts, so that
    /// there are few shares and the last ones are small.
    fn share(&self, first: usize) -> Range<usize> {
        let num_left = self.done.len() - first;
        first..first + num_left.div_ceil(4)
    }

    /// Computes shares until all are taken.
    fn work(&self) {
        let mut first = self.next.load(Ordering::Relaxed);
        while first < self.done.len() {
            let share = self.share(first);
            let order = Ordering::Relaxed;
            match self.next.compare_exchange_weak(first, share.end, order, order) {
                Ok(_) => {
                    let results = self.work.compute(share);
                    // Another thread may have set it already, to the same numbers.
                    let _ = self.done[first].set(results);
                    first = self.next.load(Ordering::Relaxed);
                }
                Err(taken) => first = taken,
            }
        }
    }

    /// Calls `place` with the results of all shares. Computes those that are missing at the deadline.
    fn collect(&self, deadline: Instant, mut place: impl FnMut(&W, Range<usize>, &[f32])) {
        let mut first = 0;
        while first < self.done.len() {
            let share = self.share(first);
            while self.done[first].get().is_none() && Instant::now() < deadline {
                std::hint::spin_loop();
            }
            let done = self.done[first].get_or_init(|| self.work.compute(share.clone()));
            first = share.end;
            place(&self.work, share, done);
        }
    }
}

/// A product of a few rows and a matrix. Its parts are passes over panels.
#[derive(Debug)]
struct SharedProduct {
    lines: Arc<Lines>,
    inputs: usize,
    outputs: usize,
    factors: Factors<'static>,
}

impl SharedProduct {
    fn new(lines: &Arc<Lines>, [inputs, outputs]: [usize; 2], x: &[f32]) -> Self {
        let factors = Factors::new(lines, inputs, x.to_vec());
        Self { lines: lines.clone(), inputs, outputs, factors }
    }

    fn columns(&self, passes: Range<usize>) -> Range<usize> {
        let width = PANELS_A_PASS * LINE;
        passes.start * width..(passes.end * width).min(self.outputs)
    }

    /// Copies the outputs of some passes into `output`, `[rows, outputs]`.
    fn place(&self, passes: Range<usize>, done: &[f32], output: &mut [f32]) {
        let columns = self.columns(passes);
        let rows = output.chunks_exact_mut(self.outputs);
        for (row, done) in rows.zip(done.chunks_exact(columns.len())) {
            row[columns.clone()].copy_from_slice(done);
        }
    }
}

impl Shared for SharedProduct {
    /// Computes the outputs of some passes, `[rows, outputs of these passes]`.
    fn compute(&self, passes: Range<usize>) -> Vec<f32> {
        let columns = self.columns(passes);
        let mut output = vec![0.0; self.factors.num_numbers() / self.inputs * columns.len()];
        self.lines.multiply(self.inputs, columns, &self.factors, &mut output);
        output
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;
    use crate::packed::{PackedWeights, Threads};

    /// Makes deterministic weights and rows.
    fn weights_and_rows(inputs: usize, outputs: usize, rows: usize) -> (PackedWeights, Vec<f32>) {
        let numbers = |len: usize| (0..len).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0);
        let weights: Vec<f32> = numbers(inputs * outputs).collect();
        let packed = PackedWeights::pack(&weights, inputs, outputs, None);
        (packed, numbers(rows * inputs).collect())
    }

    fn on_threads<R: Send>(num_threads: usize, run: impl FnOnce() -> R + Send) -> R {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build();
        pool.expect("threads start").install(run)
    }

    #[test]
    fn a_team_multiplies_as_one_thread_does_to_the_last_bit() {
        // Whole and partial passes, and products too small to share.
        for (inputs, outputs, rows) in [(700, 1000, 1), (129, 5003, 3), (512, 96, 6), (8, 8, 1)] {
            let (weights, x) = weights_and_rows(inputs, outputs, rows);
            let mut alone = Vec::new();
            weights.multiply(&x, &mut alone, &Threads::One);
            on_threads(4, || {
                let team = Arc::new(Team::default());
                for _ in 0..50 {
                    team.run(|| {
                        for _ in 0..4 {
                            let mut together = Vec::new();
                            let threads = Threads::Team(team.clone());
                            weights.multiply(&x, &mut together, &threads);
                            assert_eq!(together, alone);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_product_does_not_wait_for_a_thread_that_keeps_its_share() {
        let (weights, x) = weights_and_rows(700, 1000, 2);
        let (mut alone, mut together) = (Vec::new(), Vec::new());
        weights.multiply(&x, &mut alone, &Threads::One);
        let product = SharedProduct::new(weights.lines(), [700, 1000], &x);
        let work = SharedWork::new(product, 1000_usize.div_ceil(PANELS_A_PASS * LINE));
        // Somebody takes the first share and never returns.
        let taken = work.share(0);
        work.next.store(taken.end, Ordering::Relaxed);
        work.work();
        together.resize(alone.len(), 0.0);
        assert!(work.done[0].get().is_none() && work.done[taken.end].get().is_some());
        let now = Instant::now();
        work.collect(now, |product, passes, done| product.place(passes, done, &mut together));
        assert_eq!(together, alone);
    }

    #[test]
    fn a_panic_dismisses_the_team() {
        on_threads(2, || {
            let team = Arc::new(Team::default());
            let run = AssertUnwindSafe(|| team.run(|| panic!("in a forward")));
            assert!(catch_unwind(run).is_err());
            while team.num_helpers.load(Ordering::Relaxed) > 0 {
                rayon::yield_now();
            }
        });
    }
}
