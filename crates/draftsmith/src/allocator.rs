//! The allocator of the binaries: mimalloc, told to keep freed pages.
//!
//! Large tensors are freed and allocated at every step; with pages returned to the system each
//! time, first-touch page faults cost more than the arithmetic. The binary, the examples and the
//! benches share this file.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// mimalloc's `mi_option_purge_delay`: milliseconds until freed pages go back; −1 is never.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Tells mimalloc to keep freed pages for the next tensor. Called once, first in `main`.
#[expect(unsafe_code, reason = "mimalloc's options are set through its C interface")]
pub(crate) fn keep_freed_pages() {
    // SAFETY: a plain setter, called before any other thread is started.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}
