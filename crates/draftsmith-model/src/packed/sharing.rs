//! A forward whose rows two threads share.
//!
//! One runs the first half of the rows through layer after layer, the other follows with the second
//! half, one layer behind, because its queries look at the first half's keys. They meet once a
//! layer, where threads that share products (`team`) meet four times.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::buffers::{PackedLayerCache, Scratch, Sharing};
use super::{PackedLayer, Threads};
use crate::placed::PlacedRows;
use crate::rope::Reach;

/// Rows from which on two threads share them: below, sharing products saves more.
const ROWS_FOR_TWO: usize = 7;

/// Weights that stay in caches between forwards, as far as a machine's other tenants let them.
const CACHED_BYTES: usize = 1 << 24;

/// Layers up to which a model's forwards are shared: their caches are handed over on the stack.
const MAX_LAYERS: usize = 64;

impl Sharing {
    /// The fewest forwards that one thread runs after two were held up, and the most, after they
    /// were again and again.
    const WAITS: (u32, u32) = (16, 4096);

    /// Whether two threads run the next forward.
    pub(super) fn shares(&mut self, layers: &[PackedLayer], x: &[f32]) -> bool {
        let num_rows = x.len() / layers[0].attention.norm.width();
        if num_rows < ROWS_FOR_TWO {
            return false;
        }
        // Products of large layers are worth sharing one by one, and among more than two; and weights
        // that caches do not hold would be read once by each thread.
        let num_bytes: usize = layers.iter().map(PackedLayer::num_bytes).sum();
        let is_large = num_bytes > CACHED_BYTES
            || layers[0].mlp.gate_up.is_shared()
            || layers.len() > MAX_LAYERS;
        // From outside the pool the second thread starts too late to help.
        let is_on_pool = rayon::current_thread_index().is_some();
        let may_share = !is_large && is_on_pool && rayon::current_num_threads() >= 2;
        may_share && self.is_worth_it()
    }

    /// Runs layers on rows, in place; `caches` gives each layer's memory, by slot.
    pub(super) fn forward_layers<'a>(
        &mut self,
        layers: &[PackedLayer],
        x: &mut [f32],
        rows: PlacedRows<'_>,
        mut caches: impl Iterator<Item = &'a mut [PackedLayerCache]>,
        reaches: &[Reach],
    ) {
        let width = layers[0].attention.norm.width();
        // The second half's queries see more keys, so the first half is the larger.
        let half = (x.len() / width).div_ceil(2).next_multiple_of(2);
        let (first, second) = x.split_at_mut(half * width);
        let (rows_of_first, rows_of_second) = rows.split_at(half);
        let caches: [Option<Mutex<&mut [PackedLayerCache]>>; MAX_LAYERS] =
            std::array::from_fn(|_| caches.next().map(Mutex::new));
        let num_done = AtomicUsize::new(0);
        let run = |x: &mut [f32],
                   rows: PlacedRows<'_>,
                   scratch: &mut Scratch,
                   before: &dyn Fn(usize),
                   after: &dyn Fn(usize)| {
            for (number, (layer, cache)) in layers.iter().zip(caches.iter().flatten()).enumerate() {
                before(number);
                let mut slots = cache.lock().unwrap_or_else(PoisonError::into_inner);
                layer.forward(x, rows, &mut slots, reaches, scratch);
                drop(slots);
                after(number);
            }
        };
        let [of_first, of_second] = &mut **self
            .halves
            .get_or_insert_with(|| Box::new([(); 2].map(|()| Scratch::with_threads(Threads::One))));
        let begun = Instant::now();
        let (first_took, ()) = rayon::join(
            || {
                // Should this half panic, the other must not wait for it.
                let _all_done = AllDone(&num_done);
                let after = |number| num_done.store(number + 1, Ordering::Release);
                run(first, rows_of_first, of_first, &|_| {}, &after);
                begun.elapsed()
            },
            || {
                let wait = |number| {
                    while num_done.load(Ordering::Acquire) <= number {
                        std::hint::spin_loop();
                    }
                };
                run(second, rows_of_second, of_second, &wait, &|_| {});
            },
        );
        self.took(first_took, begun.elapsed());
    }

    /// Asked before each forward that may be shared.
    fn is_worth_it(&mut self) -> bool {
        let is_worth_it = self.num_to_wait == 0;
        self.num_to_wait = self.num_to_wait.saturating_sub(1);
        is_worth_it
    }

    /// Told how long the first half of a shared forward took, and the whole.
    fn took(&mut self, first: Duration, whole: Duration) {
        if whole > 3 * first {
            let (least, most) = Self::WAITS;
            self.last_wait = (4 * self.last_wait).clamp(least, most);
            self.num_to_wait = self.last_wait;
        } else {
            self.last_wait /= 2;
        }
    }
}

/// Tells a waiting thread, when it goes, that there is nothing more to wait for.
struct AllDone<'a>(&'a AtomicUsize);

impl Drop for AllDone<'_> {
    fn drop(&mut self) {
        self.0.store(usize::MAX, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_that_are_held_up_leave_forwards_to_one_for_longer_and_longer() {
        let (millis, mut sharing) = (Duration::from_millis, Sharing::default());
        let num_alone = |sharing: &mut Sharing| {
            let alone = std::iter::repeat_with(|| sharing.is_worth_it());
            alone.take_while(|is_worth_it| !is_worth_it).count()
        };
        sharing.took(millis(2), millis(3));
        assert_eq!(num_alone(&mut sharing), 0);
        let mut waits = Vec::new();
        for _ in 0..6 {
            sharing.took(millis(2), millis(12));
            waits.push(num_alone(&mut sharing));
        }
        assert_eq!(waits, [16, 64, 256, 1024, 4096, 4096]);
        // Good ones in between are held against it less and less.
        for _ in 0..6 {
            sharing.took(millis(2), millis(3));
            assert!(sharing.is_worth_it());
        }
        sharing.took(millis(2), millis(12));
        assert_eq!(num_alone(&mut sharing), 256);
    }
}
