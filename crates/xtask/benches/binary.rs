//! Where the `draftsmith` binary is that benches run: in the folder above their own, where `cargo build` puts it.

use std::path::PathBuf;

/// Path of the binary.
///
/// # Panics
///
/// If it was not built.
pub(crate) fn binary() -> PathBuf {
    let bench = std::env::current_exe().expect("a bench knows its path");
    let name = format!("draftsmith{}", std::env::consts::EXE_SUFFIX);
    let path = bench.parent().and_then(|deps| deps.parent()).expect("it is in `deps`").join(name);
    assert!(path.is_file(), "`{}` is missing; hint: `cargo build --release`", path.display());
    path
}
