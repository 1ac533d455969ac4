//! Panics of libraries that read files, as what they are: files that are broken.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static IS_CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a step of a library that panics on files that lie. What it was given is not to be used again
/// after it did.
///
/// # Errors
/// What the panic said.
pub fn caught<T>(step: impl FnOnce() -> T) -> Result<T, String> {
    let was_catching = IS_CATCHING.replace(true);
    let done = catch_unwind(AssertUnwindSafe(step));
    IS_CATCHING.set(was_catching);
    done.map_err(|panic| {
        let told = panic.downcast_ref::<String>().map(String::as_str);
        told.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no more is known").to_owned()
    })
}

/// Whether a panic on this thread, now, is one that becomes an error that names the file: a panic
/// hook need not tell of it.
#[must_use]
pub fn is_panic_caught() -> bool {
    IS_CATCHING.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_what_it_said() {
        assert_eq!(caught(|| (is_panic_caught(), 7)), Ok((true, 7)));
        assert!(!is_panic_caught());
        let number = 3;
        assert_eq!(caught(|| panic!("at {number}")), Err::<(), _>("at 3".to_owned()));
        assert_eq!(caught(|| panic!("plainly")), Err::<(), _>("plainly".to_owned()));
        assert!(!is_panic_caught());
    }
}
