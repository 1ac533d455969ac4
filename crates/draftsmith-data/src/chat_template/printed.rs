//! Values as Python distinguishes, prints and orders them, and as its `json.dumps` writes them.

use std::cmp::Ordering;
use std::fmt::Write;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The result of a part of a template's run.
pub(super) type Result<T, E = Error> = std::result::Result<T, E>;

/// How lists and dictionaries are written, for Python's `repr` and for `json.dumps`.
pub(super) struct ValueStyle {
    pub(super) is_json: bool,
    /// The text between two items.
    pub(super) between: String,
    pub(super) after_key: String,
    /// The text by which each level is indented; `None` for one line.
    pub(super) indent: Option<String>,
    pub(super) is_sorted: bool,
}

impl ValueStyle {
    /// Returns the style of `repr`.
    pub(super) fn python() -> Self {
        let (between, after_key) = (", ".to_owned(), ": ".to_owned());
        Self { is_json: false, between, after_key, indent: None, is_sorted: false }
    }

    /// Appends a value to `text`.
    ///
    /// # Errors
    /// If JSON has no such value, or `text` takes no more.
    pub(super) fn write(&self, value: &Value, level: usize, text: &mut dyn Write) -> Result<()> {
        let is_map = value.kind() == ValueKind::Map;
        let [open, close] = match value.kind() {
            _ if !is_plain(value) => return Ok(text.write_str(&self.single(value)?)?),
            ValueKind::Map => ["{", "}"],
            _ if self.is_json || !is_tuple(value) => ["[", "]"],
            _ => ["(", if value.len() == Some(1) { ",)" } else { ")" }],
        };
        let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
        let mut pairs: Vec<_> = pairs.into_iter().flatten().collect();
        if self.is_sorted && is_map {
            pairs.sort_by(|left, right| left.0.cmp(&right.0));
        }
        let begin_line = |level: usize, text: &mut dyn Write| match &self.indent {
            Some(indent) => write!(text, "\n{}", indent.repeat(level)),
            None => Ok(()),
        };
        text.write_str(open)?;
        for (nth, (key, item)) in pairs.iter().enumerate() {
            text.write_str(if nth > 0 { &self.between } else { "" })?;
            begin_line(level + 1, text)?;
            match key.as_str() {
                _ if !is_map => {}
                None if self.is_json => {
                    write!(text, "\"{}\"{}", self.single(key)?, self.after_key)?
                }
                _ => {
                    self.write(key, level, text)?;
                    text.write_str(&self.after_key)?;
                }
            }
            self.write(item, level + 1, text)?;
        }
        if !pairs.is_empty() {
            begin_line(level, text)?;
        }
        Ok(text.write_str(close)?)
    }

    /// Returns the text of a value without items.
    fn single(&self, value: &Value) -> Result<String> {
        Ok(match (value.kind(), value.as_str()) {
            (ValueKind::Number, _) if self.is_json => {
                printed(value).replace("nan", "NaN").replace("inf", "Infinity")
            }
            (ValueKind::None | ValueKind::Bool | ValueKind::String, _) if self.is_json => {
                serde_json::json!(value).to_string()
            }
            (kind, _) if self.is_json => {
                return Err(refused(format!("`tojson` cannot write a value of type {kind}")));
            }
            (_, Some(text)) => quoted(text),
            (ValueKind::Undefined, _) => "Undefined".to_owned(),
            _ => printed(value),
        })
    }
}

/// Returns the text of a value without items, as Python's `str` writes it. A float has the fewest
/// digits, and an exponent at least two.
pub(super) fn printed(value: &Value) -> String {
    let float = f64::try_from(value.clone()).ok();
    let Some(float) = float.filter(|_| value.is_number() && !value.is_integer()) else {
        return value.to_string();
    };
    let text = format!("{float:?}").to_lowercase();
    let Some((digits, power)) = text.split_once('e') else { return text };
    format!("{digits}e{:+03}", power.parse::<i32>().unwrap_or_default())
}

/// Returns whether a value is a tuple in Python.
pub(super) fn is_tuple(value: &Value) -> bool {
    value.is_tuple() || value.downcast_object_ref::<GroupTuple>().is_some()
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut quoted = String::from(quote);
    for c in text.chars() {
        match (c, u32::from(c)) {
            ('\n' | '\r' | '\t' | '\\', _) => quoted.extend(c.escape_default()),
            _ if c == quote => quoted.extend(['\\', c]),
            _ if is_printable(c) => quoted.push(c),
            (_, code @ ..0x100) => quoted += &format!("\\x{code:02x}"),
            (_, code @ ..0x10000) => quoted += &format!("\\u{code:04x}"),
            (_, code) => quoted += &format!("\\U{code:08x}"),
        }
    }
    quoted.push(quote);
    quoted
}

/// Returns whether Python's `repr` writes a character as it is. Rust escapes the same characters,
/// and quotes and backslashes.
pub(super) fn is_printable(c: char) -> bool {
    matches!(c, ' '..='~') || String::from_iter(['a', c]).escape_debug().nth(1) != Some('\\')
}

/// Orders two values as Python's `<` does.
///
/// # Errors
/// If Python does not order values of these types.
pub(super) fn order(left: &Value, right: &Value) -> Result<Ordering> {
    let kind = |value: &Value| match value.kind() {
        ValueKind::Bool => ValueKind::Number,
        kind => kind,
    };
    match (kind(left), kind(right)) {
        (ValueKind::Number, ValueKind::Number) => {
            let number = |value: &Value| match value.kind() {
                ValueKind::Bool => Value::from(i64::from(value.is_true())),
                _ => value.clone(),
            };
            Ok(number(left).cmp(&number(right)))
        }
        (ValueKind::String, ValueKind::String) => Ok(left.cmp(right)),
        (ValueKind::Seq, ValueKind::Seq) if is_tuple(left) == is_tuple(right) => {
            let mut pairs = left.try_iter()?.zip(right.try_iter()?);
            match pairs.find(|(left, right)| left != right) {
                Some((left, right)) => order(&left, &right),
                None => Ok(left.len().cmp(&right.len())),
            }
        }
        (left, right) => Err(refused(format!(
            "values of the types {left} and {right} have no order; compare values of one type"
        ))),
    }
}

/// Creates the error of an operation that is refused, for example because it exceeds a limit.
pub(super) fn refused(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Returns whether a value is a list, tuple or dictionary that holds its items. The engine's types
/// are private, so they are recognised by name.
pub(super) fn is_plain(value: &Value) -> bool {
    let Some(object) = value.as_object() else { return false };
    let name = object.type_name();
    let same = |sample: Value| sample.as_object().is_some_and(|sample| sample.type_name() == name);
    same(Value::from(Vec::<Value>::new()))
        || same(Value::from_pairs([("key", 0)]))
        || same(Value::from(Tuple::default()))
        || same(Value::from_object(GroupTuple::default()))
        || same(Value::from(Kwargs::from_iter::<[(&str, Value); 0]>([])))
}

/// A group of `groupby`: a tuple of its key and its items, which also have names.
#[derive(Debug, Default)]
pub(super) struct GroupTuple(pub(super) [Value; 2]);

impl Object for GroupTuple {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match (key.as_str(), key.as_usize()) {
            (Some("grouper"), _) | (None, Some(0)) => Some(self.0[0].clone()),
            (Some("list"), _) | (None, Some(1)) => Some(self.0[1].clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}

/// Returns a tuple if `value` is one, and otherwise a list.
pub(super) fn like(value: &Value, items: Vec<Value>) -> Value {
    if is_tuple(value) { Value::from(Tuple::from(items)) } else { Value::from(items) }
}
