//! What one rendering of a chat template may use: steps, bytes of text and values, and time.
//!
//! The engine counts steps only ("fuel"), and forty steps are enough to double a text to a
//! terabyte. So whatever makes a value hands it to [`Allowance::settle`], which charges for it and
//! keeps three things true of every value in the program: a text has at most `longest_text` bytes,
//! a list or dictionary with all that it holds, counted as often as it is held, weighs at most
//! `heaviest` and is nested at most [`DEEPEST`] deep, and none holds anything but plain data: no
//! lazy list, whose items would be computed by nested calls, and no `namespace`, which could hold
//! itself. So each single step of the engine is short and small too, however it goes about it.

use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use minijinja::value::{Kwargs, Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Bytes for any chat at all.
const BASE_BYTES: usize = 32 << 20;
/// Bytes for each byte of the messages: templates trim, split, join and quote what they are given.
const BYTES_PER_BYTE: usize = 32;
/// Steps for any chat at all, and for each message: published templates take some hundreds.
const BASE_STEPS: u64 = 500_000;
const STEPS_PER_MESSAGE: u64 = 5_000;
/// Templates take well under a millisecond; only one that was made to be slow meets this.
const LONGEST: Duration = Duration::from_secs(10);
/// How deep lists and dictionaries may be nested.
const DEEPEST: usize = 64;
/// What a value is charged beside its text.
const VALUE_BYTES: usize = 32;

/// What is left for one rendering.
#[derive(Debug)]
pub(super) struct Allowance {
    bytes: usize,
    remaining: AtomicUsize,
    steps: u64,
    started: Instant,
}

impl Allowance {
    /// For a chat of so many messages, with so many bytes of text.
    pub(super) fn new(num_messages: usize, num_bytes: usize) -> Self {
        let bytes = BASE_BYTES.saturating_add(num_bytes.saturating_mul(BYTES_PER_BYTE));
        Self {
            bytes,
            remaining: AtomicUsize::new(bytes),
            steps: BASE_STEPS.saturating_add(STEPS_PER_MESSAGE.saturating_mul(num_messages as u64)),
            started: Instant::now(),
        }
    }

    /// Steps of the engine.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    fn longest_text(&self) -> usize {
        self.bytes / 16
    }

    fn heaviest(&self) -> usize {
        self.bytes / 4
    }

    /// Charges for `num_bytes` that are about to be made, and looks at the clock.
    pub(super) fn spend(&self, num_bytes: usize) -> Result<(), Error> {
        if self.started.elapsed() > LONGEST {
            return Err(refused(format!("it runs for more than {} seconds", LONGEST.as_secs())));
        }
        let remaining = self.remaining.load(Ordering::Relaxed);
        let Some(remaining) = remaining.checked_sub(num_bytes) else {
            return Err(refused(format!(
                "it makes more than {} MB of text and values",
                self.bytes >> 20
            )));
        };
        // One thread renders, so that nothing comes between.
        self.remaining.store(remaining, Ordering::Relaxed);
        Ok(())
    }

    /// Refuses a text of so many bytes before it is made.
    pub(super) fn allow_text(&self, num_bytes: usize) -> Result<(), Error> {
        if num_bytes > self.longest_text() {
            return Err(self.too_long());
        }
        Ok(())
    }

    /// Refuses a list of so many values before it is made.
    pub(super) fn allow_values(&self, num_values: usize) -> Result<(), Error> {
        if num_values > self.heaviest() / VALUE_BYTES {
            return Err(self.too_heavy());
        }
        Ok(())
    }

    /// Values written one after the other, as far as a text may go.
    pub(super) fn write<'a>(
        &self,
        values: impl IntoIterator<Item = &'a Value>,
        separator: &str,
    ) -> Result<String, Error> {
        let mut text = ShortText { text: String::new(), longest: self.longest_text() };
        for (index, value) in values.into_iter().enumerate() {
            let separator = if index == 0 { "" } else { separator };
            write!(text, "{separator}{value}").map_err(|_| self.too_long())?;
        }
        Ok(text.text)
    }

    /// A value that was just made, charged for; a lazy list becomes a list.
    pub(super) fn settle(&self, value: Value) -> Result<Value, Error> {
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

    /// A value that becomes an attribute of `namespaces`, as far as they can hold it.
    pub(super) fn store(&self, value: Value, namespaces: &[Value]) -> Result<Value, Error> {
        let mut weight = self.weigh(&value)?;
        for namespace in namespaces {
            for name in namespace.try_iter()? {
                let attribute = namespace.get_item(&name)?;
                self.add_weight(&attribute, 0, &mut weight)?;
            }
        }
        self.settle(value)
    }

    /// What a plain value weighs, in bytes: at most `heaviest`.
    pub(super) fn weigh(&self, value: &Value) -> Result<usize, Error> {
        let mut weight = 0;
        self.add_weight(value, 0, &mut weight)?;
        Ok(weight)
    }

    fn add_weight(&self, value: &Value, depth: usize, weight: &mut usize) -> Result<(), Error> {
        *weight += VALUE_BYTES + value.as_bytes().map_or(0, <[u8]>::len);
        if *weight > self.heaviest() {
            return Err(self.too_heavy());
        }
        let Some(object) = value.as_object() else { return Ok(()) };
        if depth > DEEPEST {
            return Err(refused(format!("it nests lists more than {DEEPEST} deep")));
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
            // A macro or a function.
            _ => Ok(()),
        }
    }

    /// The most steps of indentation that a value has, written out with each item on its own line.
    pub(super) fn most_indents(&self, value: Option<&Value>) -> Result<usize, Error> {
        let Some(value) = value else { return Ok(0) };
        self.weigh(value)?;
        fn count(value: &Value) -> usize {
            let Some(object) = value.as_object() else { return 1 };
            let items = object.try_iter_pairs().into_iter().flatten();
            1 + items.map(|(_, item)| count(&item)).sum::<usize>()
        }
        Ok(count(value) * DEEPEST)
    }

    fn too_long(&self) -> Error {
        refused(format!("it makes a text of more than {} MB", self.longest_text() >> 20))
    }

    fn too_heavy(&self) -> Error {
        let heaviest = self.heaviest() >> 20;
        refused(format!("it makes a list or dictionary of more than {heaviest} MB"))
    }
}

/// What a template does that no chat needs.
pub(super) fn refused(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Whether the value is a list, tuple or dictionary that holds its items. The engine does not
/// export its types, but tells their names.
fn is_plain(value: &Value) -> bool {
    let Some(object) = value.as_object() else { return false };
    let name = object.type_name();
    let same = |sample: Value| sample.as_object().is_some_and(|sample| sample.type_name() == name);
    same(Value::from(Vec::<Value>::new()))
        || same(Value::from_pairs([("key", 0)]))
        || same(Value::from(Tuple::default()))
        || same(Value::from(Kwargs::from_iter::<[(&str, Value); 0]>([])))
}

/// A text that stays short.
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
