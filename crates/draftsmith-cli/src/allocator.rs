//! The binaries' allocator: mimalloc, configured to keep freed pages.
//!
//! Every step frees and allocates large tensors. If their pages were returned to the system each
//! time, page faults would cost more than the arithmetic. The binary, the examples and the benches
//! share this file.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The id of mimalloc's `mi_option_purge_delay`: the delay in milliseconds before freed pages are
/// returned; −1 means never.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Makes mimalloc keep freed pages for later tensors. Call it once, first in `main`.
#[expect(unsafe_code, reason = "mimalloc's options are set through its C interface")]
pub(crate) fn keep_freed_pages() {
    // SAFETY: this only sets an option, and no other thread runs yet.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}
