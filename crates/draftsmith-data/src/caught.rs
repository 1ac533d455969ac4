//! Turns panics of libraries that read malformed files into errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static IS_CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a library step that may panic on malformed files. After a panic, do not reuse what `step`
/// captured.
///
/// # Errors
/// If the step panics. The error is the panic's message.
pub fn caught<T>(step: impl FnOnce() -> T) -> Result<T, String> {
    let was_catching = IS_CATCHING.replace(true);
    let done = catch_unwind(AssertUnwindSafe(step));
    IS_CATCHING.set(was_catching);
    done.map_err(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("unknown panic").to_owned()
    })
}

/// Returns whether a panic on this thread would become an error, so that a hook need not report it.
pub fn is_panic_caught() -> bool {
    IS_CATCHING.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(caught(|| (is_panic_caught(), 7)), Ok((true, 7)));
        assert!(!is_panic_caught());
        let number = 3;
        assert_eq!(caught(|| panic!("at {number}")), Err::<(), _>("at 3".to_owned()));
        assert_eq!(caught(|| panic!("plainly")), Err::<(), _>("plainly".to_owned()));
        assert!(!is_panic_caught());
    }
}
