//! The filters, functions, methods and operators of chat templates: those of the engine and those
//! that transformers adds. Each whose result can be much larger than its input has a limit.
//!
//! A new filter, function or operator belongs here, with a bound on the size of its result.

use std::fmt::Write;
use std::sync::Arc;

use chrono::NaiveDateTime;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, filters, functions, tests};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::allowance::{Allowance, refused};
use super::text_methods::{self, argument};

/// The names of filters that `program.rs` inserts. No template can contain these names.
pub(super) const SETTLE: &str = "$settle";
pub(super) const STORE: &str = "$store";
pub(super) const ADD: &str = "$add";
pub(super) const MULTIPLY: &str = "$multiply";
pub(super) const CONCATENATE: &str = "$concatenate";
pub(super) const SLICE: &str = "$slice";

/// The largest number of characters in a set to strip from a text's ends. Stripping compares every
/// character of the text with the set.
const MAX_STRIPPED: usize = 256;

/// The largest size of a date's format, in bytes.
const MOST_DATE_FORMAT: usize = 256;
/// The largest size of a separator in JSON, in bytes.
const MOST_SEPARATOR: usize = 8;

/// A check of a call's arguments, including the value to which a filter or method is applied. It
/// runs before a function whose result could be too large.
type Check = fn(&Allowance, &[Value]) -> Result<(), Error>;

/// Creates the engine's environment for one rendering, whose operations charge `allowance`.
pub(super) fn environment(allowance: &Arc<Allowance>, date: NaiveDateTime) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(allowance.steps));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    let own = Arc::clone(allowance);
    environment.set_formatter(move |output, _, value| {
        let text = own.write([value], "")?;
        own.spend(text.len())?;
        Ok(output.write_str(&text)?)
    });

    add_operators(&mut environment, allowance);
    for (name, filter, check) in guarded_filters() {
        let own = Arc::clone(allowance);
        environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            check(&own, &args)?;
            filter.call(state, &args)
        });
    }
    let own = Arc::clone(allowance);
    environment.set_unknown_method_callback(move |state, value, method, args| {
        if let Some(check) = method_check(method) {
            let mut all = vec![value.clone()];
            all.extend_from_slice(args);
            check(&own, &all)?;
        }
        if let Some(result) = value.as_str().and_then(|it| text_methods::call(it, method, args)) {
            return result;
        }
        unknown_method_callback(state, value, method, args)
    });
    // `select("in", …)` looks through a list for each item of another.
    let own = Arc::clone(allowance);
    environment.add_test("in", move |state: &State, value: &Value, other: &Value| {
        own.spend(0)?;
        tests::is_in(state, value, other)
    });
    // As in Python: what has a length and items.
    environment.add_test("sequence", |value: &Value| {
        value.is_undefined() || (value.len().is_some() && !value.is_none())
    });
    // As in Python. In the engine, `none` is iterable.
    environment.add_test("iterable", |value: &Value| !value.is_none() && tests::is_iterable(value));

    let own = Arc::clone(allowance);
    environment.add_function("namespace", move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        args.iter().try_for_each(|arg| own.weigh(arg).map(|_| ()))?;
        Value::from_function(functions::namespace).call(state, &args)
    });
    environment.remove_global("debug");
    environment.add_function("strftime_now", move |format: String| {
        // A long format names no date.
        let mut text = String::new();
        let written = write!(text, "{}", date.format(&format));
        match written.is_ok() && format.len() <= MOST_DATE_FORMAT {
            true => Ok(text),
            false => Err(refused(format!("`strftime_now` cannot write `{format}`"))),
        }
    });
    environment.add_function("raise_exception", |message: String| {
        Err::<Value, _>(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment
}

fn add_operators(environment: &mut Environment<'static>, allowance: &Arc<Allowance>) {
    let own = Arc::clone(allowance);
    environment.add_filter(SETTLE, move |value: Value| own.settle(value));
    let own = Arc::clone(allowance);
    environment.add_filter(STORE, move |value: Value, namespaces: Rest<Value>| {
        own.store(value, &namespaces)
    });
    type Operator = fn(&Allowance, &Value, &Value) -> Result<Value, Error>;
    let operators: [(&'static str, Operator); 3] = [
        (ADD, add),
        (MULTIPLY, multiply),
        (CONCATENATE, |allowance, left, right| {
            Ok(Value::from(allowance.write([left, right], "")?))
        }),
    ];
    for (name, operator) in operators {
        let own = Arc::clone(allowance);
        environment.add_filter(name, move |left: Value, right: Value| {
            own.settle(operator(&own, &left, &right)?)
        });
    }
    let own = Arc::clone(allowance);
    environment.add_filter(SLICE, move |value: Value, start: Value, stop: Value, step: Value| {
        own.settle(slice(&value, &start, &stop, &step)?)
    });
}

/// Returns the filters whose result can be much larger than their arguments, each with the check
/// that runs before it.
fn guarded_filters() -> [(&'static str, Value, Check); 12] {
    [
        ("join", Value::from_function(filters::join), |allowance, args| {
            check_join(allowance, args.first(), argument(args, 1, "d"))
        }),
        ("replace", Value::from_function(filters::replace), check_replace),
        ("trim", Value::from_function(trim), check_strip),
        (
            "title",
            Value::from_function(|text: String| text_methods::title_filter(&text)),
            |_, _| Ok(()),
        ),
        ("length", Value::from_function(length), |_, _| Ok(())),
        ("count", Value::from_function(length), |_, _| Ok(())),
        ("format", Value::from_function(filters::format), check_format),
        ("indent", Value::from_function(filters::indent), |allowance, args| {
            let width = number(argument(args, 1, "width")).unwrap_or(4);
            let num_lines = text(args.first()).matches('\n').count() + 1;
            allowance.allow_text(width.saturating_mul(num_lines))
        }),
        ("batch", Value::from_function(filters::batch), check_columns),
        ("slice", Value::from_function(filters::slice), check_columns),
        ("sum", Value::from_function(filters::sum), |_, args| match argument(args, 2, "start") {
            Some(start) if !start.is_number() => {
                Err(refused("it sums from a value that is not a number".to_owned()))
            }
            _ => Ok(()),
        }),
        ("tojson", Value::from_function(to_json), |allowance, args| {
            let indent = number(argument(args, 1, "indent")).unwrap_or(0);
            allowance.allow_text(allowance.most_indents(args.first())?.saturating_mul(indent))
        }),
    ]
}

/// Returns the check for a method, by its name in Python; `None` if it needs none.
fn method_check(method: &str) -> Option<Check> {
    match method {
        "replace" => Some(check_replace),
        "join" => Some(|allowance, args| check_join(allowance, args.get(1), args.first().cloned())),
        "format" => Some(check_format),
        "strip" | "lstrip" | "rstrip" => Some(check_strip),
        _ => None,
    }
}

fn check_join(
    allowance: &Allowance,
    values: Option<&Value>,
    separator: Option<Value>,
) -> Result<(), Error> {
    let num_values = values.and_then(Value::len).unwrap_or(0);
    allowance.allow_text(num_values.saturating_mul(text(separator.as_ref()).len()))
}

fn check_replace(allowance: &Allowance, args: &[Value]) -> Result<(), Error> {
    let (whole, from, to) = (text(args.first()), text(args.get(1)), text(args.get(2)));
    let num_matches = whole.matches(from.as_str()).count();
    allowance.allow_text(whole.len().saturating_add(num_matches.saturating_mul(to.len())))
}

fn check_strip(_: &Allowance, args: &[Value]) -> Result<(), Error> {
    if text(args.get(1)).chars().count() > MAX_STRIPPED {
        return Err(refused(format!("it strips more than {MAX_STRIPPED} characters")));
    }
    Ok(())
}

fn check_columns(allowance: &Allowance, args: &[Value]) -> Result<(), Error> {
    allowance.allow_values(number(argument(args, 1, "count")).unwrap_or(0))
}

/// Checks an upper bound on the length of the text: each placeholder counts with the largest width
/// and the longest value. Any number in the text counts as a width.
fn check_format(allowance: &Allowance, args: &[Value]) -> Result<(), Error> {
    let format = text(args.first());
    let values = args.get(1..).unwrap_or_default();
    let num_placeholders = format.matches(['%', '{']).count();
    let widths = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widest = widths.map(|digits| digits.parse().unwrap_or(usize::MAX)).max().unwrap_or(0);
    let given = match format.contains('*') {
        true => values.iter().filter_map(|value| number(Some(value.clone()))).max().unwrap_or(0),
        false => 0,
    };
    let mut longest = 0;
    for value in values {
        longest = longest.max(allowance.weigh(value)?);
    }
    let field = widest.saturating_add(given).saturating_add(longest);
    allowance.allow_text(format.len().saturating_add(num_placeholders.saturating_mul(field)))
}

/// Removes characters from both ends of a text: those of `set`, or else white space.
fn trim(text: String, set: Option<String>) -> String {
    text_methods::stripped(&text, "strip", set.as_deref()).to_owned()
}

/// Counts the items or characters of a value; 0 for a name that is not defined.
fn length(value: Value) -> Result<usize, Error> {
    match value.is_undefined() {
        true => Ok(0),
        false => filters::length(&value),
    }
}

fn number(value: Option<Value>) -> Option<usize> {
    let number = i128::try_from(value?).ok()?;
    Some(usize::try_from(number.unsigned_abs()).unwrap_or(usize::MAX))
}

/// Returns the text of a string; empty for any other value.
fn text(value: Option<&Value>) -> String {
    value.and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn add(allowance: &Allowance, left: &Value, right: &Value) -> Result<Value, Error> {
    match (left.kind(), right.kind()) {
        (ValueKind::String, ValueKind::String) => {
            Ok(Value::from(allowance.write([left, right], "")?))
        }
        (ValueKind::Seq, ValueKind::Seq) => {
            allowance.allow_values(left.len().unwrap_or(0) + right.len().unwrap_or(0))?;
            left.try_iter()?.checked().chain(right.try_iter()?.checked()).collect::<Result<_, _>>()
        }
        _ => calculate("+", left, right, i128::checked_add, |left, right| left + right),
    }
}

fn multiply(allowance: &Allowance, left: &Value, right: &Value) -> Result<Value, Error> {
    let (repeated, times) = match (left.kind(), right.kind()) {
        (ValueKind::String | ValueKind::Seq, _) => (left, right),
        (_, ValueKind::String | ValueKind::Seq) => (right, left),
        _ => return calculate("*", left, right, i128::checked_mul, |left, right| left * right),
    };
    if !times.is_integer() {
        return Err(impossible("*", left, right));
    }
    let times = i128::try_from(times.clone()).unwrap_or(0).max(0);
    let times = usize::try_from(times).unwrap_or(usize::MAX);
    if let Some(text) = repeated.as_str() {
        allowance.allow_text(text.len().saturating_mul(times))?;
        return Ok(Value::from(text.repeat(times)));
    }
    allowance.allow_values(repeated.len().unwrap_or(0).saturating_mul(times))?;
    let items = repeated.try_iter()?.checked().collect::<Result<Vec<Value>, _>>()?;
    Ok(items.iter().cycle().take(items.len() * times).cloned().collect())
}

/// Calculates with integers if both operands are integers or booleans, and otherwise with floats.
fn calculate(
    sign: &str,
    left: &Value,
    right: &Value,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let integer = |value: &Value| i128::try_from(value.clone()).ok();
    let float = |value: &Value| f64::try_from(value.clone()).ok();
    let is_integer = |value: &Value| value.is_integer() || value.kind() == ValueKind::Bool;
    if is_integer(left) && is_integer(right) {
        let result = integer(left).zip(integer(right)).and_then(|(l, r)| integers(l, r));
        let result = result.ok_or_else(|| refused(format!("`{left} {sign} {right}` overflows")))?;
        return Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from));
    }
    match float(left).zip(float(right)) {
        Some((left, right)) => Ok(Value::from(floats(left, right))),
        None => Err(impossible(sign, left, right)),
    }
}

fn impossible(sign: &str, left: &Value, right: &Value) -> Error {
    let (left, right) = (left.kind(), right.kind());
    refused(format!("tried to use {sign} operator on unsupported types {left} and {right}"))
}

/// Evaluates `value[start:stop:step]` by Python's rules.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |value: &Value| match value.is_none() {
        true => Ok(None),
        false => i64::try_from(value.clone()).map(Some),
    };
    let step = bound(step)?.unwrap_or(1);
    if step == 0 {
        return Err(refused("cannot slice by step size of 0".to_owned()));
    }
    let (start, stop) = (bound(start)?, bound(stop)?);
    Ok(match (value.as_str(), value.kind()) {
        (Some(text), _) => {
            let characters: Vec<char> = text.chars().collect();
            let picked = indices(characters.len(), start, stop, step).map(|at| characters[at]);
            Value::from(picked.collect::<String>())
        }
        (None, ValueKind::Seq | ValueKind::Iterable) => {
            let items = value.try_iter()?.checked().collect::<Result<Vec<Value>, _>>()?;
            indices(items.len(), start, stop, step).map(|at| items[at].clone()).collect()
        }
        (None, ValueKind::Undefined | ValueKind::None) => Value::from(Vec::<Value>::new()),
        (None, kind) => return Err(refused(format!("value of type {kind} cannot be sliced"))),
    })
}

/// Yields the indices that a slice selects from `length` items.
fn indices(
    length: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    // The slice's bounds are clamped to this range. In the direction of `step`, it ends one past
    // the last index.
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let within = |bound: i64| {
        let bound = if bound < 0 { bound.saturating_add(length) } else { bound };
        bound.clamp(lowest, highest)
    };
    let start = start.map_or(if step > 0 { lowest } else { highest }, within);
    let stop = stop.map_or(if step > 0 { highest } else { lowest }, within);
    std::iter::successors(Some(start), move |at| at.checked_add(step))
        .take_while(move |&at| if step > 0 { at < stop } else { at > stop })
        .map(|at| usize::try_from(at).expect("an index is not negative"))
}

/// Implements `tojson` as in transformers: Python's `json.dumps` with `ensure_ascii=False`, which
/// does not escape HTML. The engine's filter escapes four characters for HTML, which are restored.
fn to_json(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    if let Some(true) = options.get::<Option<bool>>("ensure_ascii")? {
        let problem = "`tojson(ensure_ascii=true)` is not supported";
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    let indent = indent.or(options.get("indent")?);
    let separators: Option<Vec<String>> = options.get("separators")?;
    let is_sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    if separators.is_some() || is_sorted {
        let [between, after_key] = match separators {
            Some(both) if both.len() == 2 && both.iter().all(|it| it.len() <= MOST_SEPARATOR) => {
                [both[0].clone(), both[1].clone()]
            }
            Some(_) => {
                let problem = format!(
                    "`tojson(separators=…)` expects two texts of up to {MOST_SEPARATOR} bytes"
                );
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
            None if indent.is_some() => [",".to_owned(), ": ".to_owned()],
            None => [", ".to_owned(), ": ".to_owned()],
        };
        let json = serde_json::to_value(value)
            .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
        let width = indent.and_then(|indent| usize::try_from(indent).ok());
        let form = JsonForm { between: &between, after_key: &after_key, width, is_sorted };
        let mut text = String::new();
        form.write(&json, 0, &mut text);
        return Ok(Value::from(text));
    }
    let escaped = filters::tojson(value, indent, Kwargs::from_iter::<[(&str, Value); 0]>([]))?;
    Ok(Value::from(without_html_escapes(escaped.as_str().unwrap_or_default())))
}

/// How `json.dumps` writes lists and objects.
struct JsonForm<'a> {
    /// The text between two items.
    between: &'a str,
    after_key: &'a str,
    /// The spaces by which each level is indented; `None` for one line.
    width: Option<usize>,
    is_sorted: bool,
}

impl JsonForm<'_> {
    fn write(&self, json: &serde_json::Value, level: usize, text: &mut String) {
        match json {
            serde_json::Value::Array(items) if !items.is_empty() => {
                self.write_items(('[', ']'), items.iter().map(|it| (None, it)), level, text);
            }
            serde_json::Value::Object(pairs) if !pairs.is_empty() => {
                let mut pairs: Vec<_> = pairs.iter().map(|(key, it)| (Some(key), it)).collect();
                if self.is_sorted {
                    pairs.sort_by_key(|(key, _)| *key);
                }
                self.write_items(('{', '}'), pairs.into_iter(), level, text);
            }
            other => *text += &other.to_string(),
        }
    }

    fn write_items<'j>(
        &self,
        (open, close): (char, char),
        items: impl Iterator<Item = (Option<&'j String>, &'j serde_json::Value)>,
        level: usize,
        text: &mut String,
    ) {
        let line = |level: usize, text: &mut String| {
            if let Some(width) = self.width {
                text.push('\n');
                text.extend(std::iter::repeat_n(' ', level * width));
            }
        };
        text.push(open);
        for (nth, (key, item)) in items.enumerate() {
            if nth > 0 {
                *text += self.between;
            }
            line(level + 1, text);
            if let Some(key) = key {
                *text += &serde_json::Value::from(key.as_str()).to_string();
                *text += self.after_key;
            }
            self.write(item, level + 1, text);
        }
        line(level, text);
        text.push(close);
    }
}

/// Replaces `\u003c`, `\u003e`, `\u0026` and `\u0027` in JSON text by their characters.
fn without_html_escapes(json: &str) -> String {
    let mut plain = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(backslash) = rest.find('\\') {
        plain.push_str(&rest[..backslash]);
        rest = &rest[backslash..];
        let character = match rest.get(..6) {
            Some("\\u003c") => Some('<'),
            Some("\\u003e") => Some('>'),
            Some("\\u0026") => Some('&'),
            Some("\\u0027") => Some('\''),
            _ => None,
        };
        // Skip both characters of any other escape, so that `\\u003c` remains an escaped backslash.
        let length = match character {
            Some(character) => {
                plain.push(character);
                6
            }
            None => {
                plain.push_str(&rest[..2]);
                2
            }
        };
        rest = &rest[length..];
    }
    plain + rest
}
