//! The allocator of the binaries: mimalloc, told to keep freed pages.
//!
//! Large tensors are freed and allocated at every step; with pages returned to the system each
//! time, first-touch page faults cost more than the arithmetic. The file is shared by the binary,
//! the examples and the benches.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
