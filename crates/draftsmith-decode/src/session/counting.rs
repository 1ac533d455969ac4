//! The allocator of this crate's tests: the system's allocator, with counters.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// The counter of this thread's bytes, if they are counted.
    static NUM_BYTES: Cell<Option<&'static AtomicUsize>> = const { Cell::new(None) };
}

/// The system's allocator, which counts the bytes that some threads allocate.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(num_bytes: usize) {
    if let Some(counter) = NUM_BYTES.get() {
        counter.fetch_add(num_bytes, Ordering::Relaxed);
    }
}

#[expect(unsafe_code, reason = "an allocator's interface is unsafe")]
// SAFETY: every call is passed on unchanged, and counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size);
        // SAFETY: the caller keeps the contract.
        unsafe { System.realloc(old, layout, new_size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(old, layout) }
    }
}

/// Builds a pool of two threads whose allocated bytes are counted together.
pub(super) fn counted_pool() -> rayon::ThreadPool {
    let counter: &'static AtomicUsize = Box::leak(Box::default());
    rayon::ThreadPoolBuilder::new()
        .num_threads(2)
        .start_handler(move |_| NUM_BYTES.set(Some(counter)))
        .build()
        .expect("two threads")
}

/// Counts the bytes that a counted pool's threads allocate while one of them runs `step`.
pub(super) fn bytes<R>(step: impl FnOnce() -> R) -> usize {
    let counter = NUM_BYTES.get().expect("runs on a counted pool");
    let before = counter.load(Ordering::Relaxed);
    step();
    counter.load(Ordering::Relaxed) - before
}
