//! The allocator of this crate's tests: the system's, which counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static NUM_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which counts what each thread asks it for.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(num_bytes: usize) {
    NUM_BYTES.set(NUM_BYTES.get() + num_bytes);
}

#[expect(unsafe_code, reason = "an allocator's interface is unsafe")]
// SAFETY: every call is handed on as it is; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(old, layout, new_size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(old, layout) }
    }
}

/// Bytes that this thread asks for while `step` runs.
pub(super) fn bytes<R>(step: impl FnOnce() -> R) -> usize {
    let before = NUM_BYTES.get();
    step();
    NUM_BYTES.get() - before
}
