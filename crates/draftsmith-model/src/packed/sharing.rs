//! A forward whose rows are shared by two threads, from seven rows on.
//!
//! One thread runs the first half of the rows through the layers. The other follows with the second
//! half, one layer later, because its queries attend to the first half's keys. They synchronise
//! once per layer, while a `team` synchronises once per product.
//!
//! If other processes slow down the second thread, the next 16 to 4,096 forwards use one thread.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::buffers::{PackedLayerCache, Scratch, Sharing};
use super::{PackedLayer, PackedWeights, Threads};
use crate::placed::PlacedRows;

/// The minimum number of rows to share. For fewer rows, a team is faster.
const ROWS_FOR_TWO: usize = 7;

/// The bytes of weights that stay cached between forwards if other processes do not evict them.
const CACHED_BYTES: usize = 1 << 24;

/// The maximum number of layers for sharing, because the caches of the layers are passed on the
/// stack.
const MAX_LAYERS: usize = 64;

impl Sharing {
    /// The minimum and the maximum number of forwards that one thread runs after a delay.
    const WAITS: (u32, u32) = (16, 4096);

    /// Returns whether two threads should run the next forward.
    pub(super) fn shares(&mut self, layers: &[PackedLayer], x: &[f32]) -> bool {
        let num_rows = x.len() / layers[0].width();
        if num_rows < ROWS_FOR_TWO {
            return false;
        }
        // Large products are better shared one by one, among more threads. Otherwise each of the
        // two threads would read weights that are not cached.
        let products = layers.iter().flat_map(PackedLayer::products);
        let num_bytes: usize = products.map(PackedWeights::num_bytes).sum();
        let is_large = num_bytes > CACHED_BYTES
            || layers[0].mlp.as_ref().is_some_and(|mlp| mlp.gate_up.is_shared())
            || layers.len() > MAX_LAYERS;
        // Outside the pool, the second thread would start too late to help.
        let is_on_pool = rayon::current_thread_index().is_some();
        let may_share = !is_large && is_on_pool && rayon::current_num_threads() >= 2;
        may_share && self.is_worth_it()
    }

    /// Runs layers in place on rows. `caches` yields each layer's cache, one entry per slot.
    pub(super) fn forward_layers<'a>(
        &mut self,
        layers: &[PackedLayer],
        x: &mut [f32],
        rows: PlacedRows<'_>,
        mut caches: impl Iterator<Item = &'a mut [PackedLayerCache]>,
    ) {
        let width = layers[0].width();
        // The second half's queries attend to more keys, so the first half gets more rows.
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
                layer.forward((&mut *x, None), rows, &mut slots, scratch);
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
                // If this half panics, the other must not wait for it forever.
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

    /// Returns whether the next forward is worth sharing. It counts forwards, so it must be called
    /// once before each forward that may be shared.
    fn is_worth_it(&mut self) -> bool {
        let is_worth_it = self.num_to_wait == 0;
        self.num_to_wait = self.num_to_wait.saturating_sub(1);
        is_worth_it
    }

    /// Records the times that the first half and the whole of a shared forward took.
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

/// A guard that releases a waiting thread when it is dropped.
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
    fn each_delay_leaves_more_forwards_to_one_thread() {
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
        // Good forwards in between shorten the next wait.
        for _ in 0..6 {
            sharing.took(millis(2), millis(3));
            assert!(sharing.is_worth_it());
        }
        sharing.took(millis(2), millis(12));
        assert_eq!(num_alone(&mut sharing), 256);
    }
}
