//! The system's allocator with a count of held bytes and a bound: beyond the bound it returns null, and Rust
//! then ends the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct Bounded;

#[global_allocator]
static ALLOCATOR: Bounded = Bounded;

static NUM_HELD: AtomicUsize = AtomicUsize::new(0);
static MOST_HELD: AtomicUsize = AtomicUsize::new(0);
static BOUND: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Bounds the bytes that the process may hold in addition to what it holds now.
pub(crate) fn bound(num_bytes: usize) {
    BOUND.store(NUM_HELD.load(Ordering::Relaxed).saturating_add(num_bytes), Ordering::Relaxed);
}

/// The peak of additional bytes held while `work` ran, and its result.
pub(crate) fn peak<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = NUM_HELD.load(Ordering::Relaxed);
    MOST_HELD.store(before, Ordering::Relaxed);
    let done = work();
    (MOST_HELD.load(Ordering::Relaxed).saturating_sub(before), done)
}

/// Whether this many more bytes may be held; if so, counts them.
fn hold(num_bytes: usize) -> bool {
    let now = NUM_HELD.fetch_add(num_bytes, Ordering::Relaxed) + num_bytes;
    if now > BOUND.load(Ordering::Relaxed) {
        NUM_HELD.fetch_sub(num_bytes, Ordering::Relaxed);
        return false;
    }
    MOST_HELD.fetch_max(now, Ordering::Relaxed);
    true
}

#[expect(unsafe_code, reason = "an allocator's interface is unsafe")]
// SAFETY: every call is passed on unchanged or answered with null, as if memory were full; counting does not
// allocate.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !hold(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !hold(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        NUM_HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(old, layout) }
    }
}
