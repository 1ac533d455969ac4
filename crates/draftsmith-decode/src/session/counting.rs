//! The allocator of this crate's tests: the system allocator with byte counters.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// The counter of the bytes that this thread allocates; `None` if they are not counted.
    static NUM_BYTES: Cell<Option<&'static AtomicUsize>> = const { Cell::new(None) };
}

/// The system allocator, extended to count the bytes that threads with a counter allocate.
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

/// Builds a pool of two threads with a shared byte counter.
pub(super) fn counted_pool() -> rayon::ThreadPool {
    let counter: &'static AtomicUsize = Box::leak(Box::default());
    rayon::ThreadPoolBuilder::new()
        .num_threads(2)
        .start_handler(move |_| NUM_BYTES.set(Some(counter)))
        .build()
        .expect("two threads")
}

/// Counts the bytes that the threads of a counted pool allocate while one of them runs `step`.
pub(super) fn bytes<R>(step: impl FnOnce() -> R) -> usize {
    let counter = NUM_BYTES.get().expect("runs on a counted pool");
    let before = counter.load(Ordering::Relaxed);
    step();
    counter.load(Ordering::Relaxed) - before
}
