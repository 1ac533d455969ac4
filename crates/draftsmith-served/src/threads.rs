//! Threads that send requests at the same time. All of them start, or none sends anything.

use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, scope};

use crate::error::{Result, ServedError};

/// Starts `num` threads with `start`.
///
/// # Errors
/// If a thread cannot start. The earlier ones run until their work ends.
pub(crate) fn start_all<T>(num: usize, mut start: impl FnMut() -> io::Result<T>) -> Result<Vec<T>> {
    let failed = |number: usize, error: io::Error| {
        ServedError::Invalid(format!(
            "only {number} of {num} requests could start at the same time, each in a thread: {error}; hint: lower the \
             concurrency, or raise the limit of threads (`ulimit -u`, a container's limit of processes)"
        ))
    };
    (0..num).map(|number| start().map_err(|error| failed(number, error))).collect()
}

/// Runs `work` for all items at the same time, each in a thread that `new_thread` describes. Returns
/// the results in order.
///
/// # Errors
/// If a thread cannot start, before any work begins, or the first error of `work`.
pub fn side_by_side<I: Sync, T: Send>(
    mut new_thread: impl FnMut() -> Builder,
    items: &[I],
    work: impl Fn(&I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (have_started, mut left) = (OnceLock::new(), items.iter());
    scope(|scope| {
        let started = start_all(items.len(), || {
            let item = left.next().expect("an item for each thread");
            let (have_started, work) = (&have_started, &work);
            new_thread().spawn_scoped(scope, move || match have_started.wait() {
                true => work(item),
                false => Err(ServedError::Interrupted),
            })
        });
        // Also ends the waiting threads if one could not start.
        have_started.get_or_init(|| started.is_ok());
        started?.into_iter().map(|it| it.join().map_err(|_| ServedError::Panicked)?).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_cannot_start_ends_all_before_any_request() {
        for num_startable in [0, 2] {
            let mut num_asked = 0;
            let new_thread = || {
                num_asked += 1;
                // No machine has an address space for such a stack.
                let is_startable = num_asked <= num_startable;
                if is_startable { Builder::new() } else { Builder::new().stack_size(1 << 50) }
            };
            let work = |_: &u32| -> Result<()> { unreachable!("nothing is sent") };
            let failed = side_by_side(new_thread, &[1, 2, 3, 4], work);
            let message = failed.expect_err("the stack is too large").to_string();
            let expected = format!("only {num_startable} of 4 requests could start");
            assert!(message.starts_with(&expected), "{message}");
            assert!(message.contains("; hint: lower the concurrency"), "{message}");
        }
        let doubled = side_by_side(Builder::new, &[3, 1, 2], |number| Ok(2 * number));
        assert_eq!(doubled.expect("all start"), [6, 2, 4]);
    }
}
