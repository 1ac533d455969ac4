//! Limits for one rendering of a chat template: steps, bytes of text and values, and processor time.
//!
//! The engine only counts steps ("fuel"), and forty steps suffice to double a text to a terabyte.
//! So everything that makes a value passes it to [`Allowance::settle`], which charges for it and
//! guarantees three properties of every value in the program. A text has at most `max_text_bytes`
//! bytes. A list or dictionary has at most `max_weight` bytes with its contents and is nested at
//! most [`MAX_DEPTH`] deep, where shared contents count each time. Both contain only plain data,
//! which excludes lazy lists, whose items nested calls would compute, and namespaces, which could
//! contain themselves. So each step of the engine is short and uses little memory.

use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::printed::{Result, ValueStyle, is_plain, printed, refused};

/// The number of bytes allowed for every chat.
const BASE_BYTES: usize = 32 << 20;
/// The additional bytes allowed per byte of the messages, which templates trim, split and join.
const BYTES_PER_BYTE: usize = 32;
/// The numbers of engine steps allowed for every chat and for each of its messages. Published
/// templates need some hundreds.
const BASE_STEPS: u64 = 500_000;
const STEPS_PER_MESSAGE: u64 = 5_000;
/// The limit of the thread's processor time, which load on the machine does not use up. Published
/// templates need well under a millisecond.
const MAX_TIME: Duration = Duration::from_secs(10);
/// The nesting limit of lists and dictionaries.
pub(super) const MAX_DEPTH: usize = 64;
/// The charge for a value in bytes, in addition to its text.
const VALUE_BYTES: usize = 32;

/// The remaining budget of one rendering.
#[derive(Debug)]
pub(super) struct Allowance {
    bytes: usize,
    remaining: AtomicUsize,
    /// The number of engine steps.
    pub(super) steps: u64,
}

impl Allowance {
    /// Creates the budget for a chat of `num_messages` messages with `num_bytes` bytes of text in
    /// total.
    pub(super) fn new(num_messages: usize, num_bytes: usize) -> Self {
        let bytes = BASE_BYTES.saturating_add(num_bytes.saturating_mul(BYTES_PER_BYTE));
        Self {
            bytes,
            remaining: AtomicUsize::new(bytes),
            steps: BASE_STEPS.saturating_add(STEPS_PER_MESSAGE.saturating_mul(num_messages as u64)),
        }
    }

    fn max_text_bytes(&self) -> usize {
        self.bytes / 16
    }

    fn max_weight(&self) -> usize {
        self.bytes / 4
    }

    /// Charges for a value of `num_bytes` that is about to be made, and checks the time limit.
    pub(super) fn spend(&self, num_bytes: usize) -> Result<()> {
        if processor_time() > MAX_TIME {
            return Err(refused(format!(
                "it computes for more than {} seconds",
                MAX_TIME.as_secs()
            )));
        }
        let remaining = self.remaining.load(Ordering::Relaxed);
        let Some(remaining) = remaining.checked_sub(num_bytes) else {
            return Err(refused(format!(
                "it makes more than {} MB of text and values",
                self.bytes >> 20
            )));
        };
        // Only one thread renders, so load and store need not be atomic together.
        self.remaining.store(remaining, Ordering::Relaxed);
        Ok(())
    }

    /// Checks the size of a text before it is made.
    pub(super) fn allow_text(&self, num_bytes: usize) -> Result<()> {
        if num_bytes > self.max_text_bytes() { Err(self.too_long()) } else { Ok(()) }
    }

    /// Checks the length of a list before it is made.
    pub(super) fn allow_values(&self, num_values: usize) -> Result<()> {
        if num_values > self.max_weight() / VALUE_BYTES { Err(self.too_heavy()) } else { Ok(()) }
    }

    /// Writes the values as one text with `separator` between them. Fails if the text is too long.
    pub(super) fn write<'a>(
        &self,
        values: impl IntoIterator<Item = &'a Value>,
        separator: &str,
    ) -> Result<String> {
        let mut text = ShortText { text: String::new(), longest: self.max_text_bytes() };
        for (index, value) in values.into_iter().enumerate() {
            let more = if is_plain(value) {
                self.write_as(&ValueStyle::python(), value)?
            } else {
                printed(value)
            };
            let separator = if index == 0 { "" } else { separator };
            write!(text, "{separator}{more}").map_err(|_| self.too_long())?;
        }
        Ok(text.text)
    }

    /// Writes a list or dictionary in a style. Fails if the style lacks a value or the text is too long.
    pub(super) fn write_as(&self, style: &ValueStyle, value: &Value) -> Result<String> {
        let mut text = ShortText { text: String::new(), longest: self.max_text_bytes() };
        style.write(value, 0, &mut text).map_err(|error| match error.kind() {
            ErrorKind::WriteFailure => self.too_long(),
            _ => error,
        })?;
        Ok(text.text)
    }

    /// Charges for a new value. Turns a lazy list into a list.
    pub(super) fn settle(&self, value: Value) -> Result<Value> {
        let value = match value.kind() {
            ValueKind::String | ValueKind::Bytes => {
                let num_bytes = value.as_bytes().map_or(0, <[u8]>::len);
                self.allow_text(num_bytes)?;
                self.spend(num_bytes)?;
                return Ok(value);
            }
            ValueKind::Seq | ValueKind::Iterable if !is_plain(&value) => {
                let mut items = Vec::new();
                for item in value.try_iter()?.checked() {
                    self.allow_values(items.len())?;
                    let item = item?;
                    let num_bytes = item.as_bytes().map_or(0, <[u8]>::len);
                    self.allow_text(num_bytes)?;
                    self.spend(VALUE_BYTES + num_bytes)?;
                    items.push(item);
                }
                Value::from(items)
            }
            ValueKind::Seq | ValueKind::Map if is_plain(&value) => {
                self.spend(value.len().unwrap_or(0).saturating_mul(VALUE_BYTES))?;
                value
            }
            _ => {
                self.spend(0)?;
                return Ok(value);
            }
        };
        self.weigh(&value)?;
        Ok(value)
    }

    /// Charges for a new attribute of `namespaces`, and limits their total weight.
    pub(super) fn store(&self, value: Value, namespaces: &[Value]) -> Result<Value> {
        let mut weight = self.weigh(&value)?;
        for namespace in namespaces {
            for name in namespace.try_iter()? {
                let attribute = namespace.get_item(&name)?;
                self.add_weight(&attribute, 0, &mut weight)?;
            }
        }
        self.settle(value)
    }

    /// Computes the weight of a plain value in bytes. Fails if it exceeds `max_weight`.
    pub(super) fn weigh(&self, value: &Value) -> Result<usize> {
        let mut weight = 0;
        self.add_weight(value, 0, &mut weight)?;
        Ok(weight)
    }

    fn add_weight(&self, value: &Value, depth: usize, weight: &mut usize) -> Result<()> {
        *weight += VALUE_BYTES + value.as_bytes().map_or(0, <[u8]>::len);
        if *weight > self.max_weight() {
            return Err(self.too_heavy());
        }
        let Some(object) = value.as_object() else { return Ok(()) };
        if depth > MAX_DEPTH {
            return Err(refused(format!("it nests lists more than {MAX_DEPTH} deep")));
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if !is_plain(value) => {
                Err(refused("it puts a namespace, a loop or a lazy list into another value".into()))
            }
            ValueKind::Map => {
                for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                    self.add_weight(&key, depth + 1, weight)?;
                    self.add_weight(&value, depth + 1, weight)?;
                }
                Ok(())
            }
            ValueKind::Seq => {
                for item in object.try_iter().into_iter().flatten() {
                    self.add_weight(&item, depth + 1, weight)?;
                }
                Ok(())
            }
            // A method or a cycler holds values, so only variables hold it. Else these would nest.
            _ if depth > 0 => {
                Err(refused("it puts a function or a method into another value".to_owned()))
            }
            _ => Ok(()),
        }
    }

    fn too_long(&self) -> Error {
        refused(format!("it makes a text of more than {} MB", self.max_text_bytes() >> 20))
    }

    fn too_heavy(&self) -> Error {
        let max_weight = self.max_weight() >> 20;
        refused(format!("it makes a list or dictionary of more than {max_weight} MB"))
    }
}

/// Returns the processor time that this thread has used. A rendering has a thread of its own.
#[cfg(unix)]
fn processor_time() -> Duration {
    nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID.now().map_or(Duration::ZERO, Duration::from)
}

/// Returns zero, because this system has no such clock: steps and bytes are the only limits.
#[cfg(not(unix))]
fn processor_time() -> Duration {
    Duration::ZERO
}

/// A text with a limited length.
struct ShortText {
    text: String,
    longest: usize,
}

impl Write for ShortText {
    fn write_str(&mut self, more: &str) -> std::fmt::Result {
        if self.text.len() + more.len() > self.longest {
            return Err(std::fmt::Error);
        }
        self.text.push_str(more);
        Ok(())
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn the_time_limit_counts_only_the_work_of_its_own_thread() {
        let before = processor_time();
        let busy = || while processor_time() < Duration::from_millis(300) {};
        std::thread::spawn(busy).join().unwrap();
        assert!(processor_time() - before < Duration::from_millis(100));
    }
}
