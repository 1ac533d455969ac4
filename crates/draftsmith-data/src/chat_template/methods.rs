//! Python's methods of texts, lists and dictionaries that the engine lacks, or computes otherwise.
//!
//! `operations.rs` checks the size of results that can be longer than the text.

use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;
use unicode_categories::UnicodeCategories;

use super::printed::{Result, is_plain, is_printable, like, refused};

/// The methods of Python's dictionaries. In the sandbox of transformers, those that change one are not
/// defined.
const MAP_METHODS: &str = "copy fromkeys get items keys values";
const CHANGING: &str = "clear pop popitem setdefault update";
/// The digits of Python that are not decimal.
const OTHER_DIGITS: &str = "¹²³⁰⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉①②③④⑤⑥⑦⑧⑨";
/// The methods of texts that search a part.
const SEARCHES: &str = "count endswith find index rfind rindex startswith";

fn contains(names: &str, name: &str) -> bool {
    names.split(' ').any(|it| it == name)
}

/// Returns whether Python's dictionaries have a method of this name.
pub(super) fn is_method(name: &str) -> bool {
    contains(MAP_METHODS, name) || contains(CHANGING, name)
}

/// A method of a dictionary, as `schema.items` without a call.
#[derive(Debug)]
struct Method {
    of: Value,
    name: String,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value> {
        self.of.call_method(state, &self.name, args)
    }
}

/// Returns an attribute with the name of a method, which a dictionary has instead of its item.
///
/// # Errors
/// If the value is not defined.
pub(super) fn attribute(value: &Value, name: &Value) -> Result<Value> {
    let name = name.as_str().unwrap_or_default();
    match value.kind() == ValueKind::Map && is_plain(value) {
        true if contains(CHANGING, name) => Ok(Value::UNDEFINED),
        true => Ok(Value::from_object(Method { of: value.clone(), name: name.to_owned() })),
        false => value.get_attr(name),
    }
}

/// Implements the test `callable`.
pub(super) fn is_callable(value: &Value) -> bool {
    let is_function = |name: &str| !name.ends_with("Namespace") && !name.ends_with("Cycler");
    let object = value.as_object();
    value.is_undefined() || object.is_some_and(|it| !is_plain(value) && is_function(it.type_name()))
}

/// Calls a method; `None` if the engine has the method as Python does.
///
/// # Errors
/// If an argument is not of the method's type.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Option<Result<Value>> {
    match (value.as_str(), value.kind(), method) {
        (Some(_), _, method) if contains(SEARCHES, method) => {
            Some(search(state, value, method, args))
        }
        (Some(text), ..) => call_text(text, method, args),
        (None, ValueKind::Seq | ValueKind::Map, "copy") => Some(Ok(value.clone())),
        (None, ValueKind::Seq, "index") => Some(index(value, args)),
        _ => None,
    }
}

fn index(items: &Value, args: &[Value]) -> Result<Value> {
    let [wanted] = args else { return Err(wrong("index", "one value")) };
    let found = items.try_iter()?.position(|item| item == *wanted);
    found.map(Value::from).ok_or_else(|| wrong("index", "an item of the list"))
}

/// Evaluates `value[start:stop:step]` by Python's rules.
pub(super) fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value> {
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
            let picked = indices(items.len(), start, stop, step).map(|at| items[at].clone());
            like(value, picked.collect())
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

/// Searches the part of a text from the second argument to the third.
fn search(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value> {
    let none = Value::from(());
    let start = args.get(1).unwrap_or(&none);
    let part = slice(value, start, args.get(2).unwrap_or(&none), &none)?;
    let base = method.replace("index", "find");
    let found = unknown_method_callback(state, &part, &base, &args[..args.len().min(1)])?;
    match found.as_i64() {
        Some(-1) if method.ends_with("index") => Err(wrong(method, "a part of the text")),
        Some(found) if found >= 0 && base.ends_with("find") && !start.is_none() => {
            let before = slice(value, &none, start, &none)?.len().unwrap_or(0);
            Ok(Value::from(found + i64::try_from(before).unwrap_or(0)))
        }
        _ => Ok(found),
    }
}

fn call_text(text: &str, method: &str, args: &[Value]) -> Option<Result<Value>> {
    let given = |index, name| {
        argument(args, index, name).filter(|value| !value.is_none() && !value.is_undefined())
    };
    let texts = |parts: Vec<&str>| Ok(parts.into_iter().map(Value::from).collect::<Value>());
    Some(match method {
        "strip" | "lstrip" | "rstrip" => match given(0, "chars") {
            Some(set) if set.as_str().is_none() => Err(wrong(method, "a text")),
            set => Ok(Value::from(stripped(text, method, set.as_ref().and_then(Value::as_str)))),
        },
        "splitlines" => {
            let keeps_ends = given(0, "keepends").is_some_and(|keeps| keeps.is_true());
            texts(lines(text, keeps_ends))
        }
        "split" | "rsplit" => {
            let (separator, most) = (given(0, "sep"), given(1, "maxsplit"));
            let most = most.and_then(|most| i64::try_from(most).ok()).unwrap_or(-1);
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            match separator.as_ref().map(Value::as_str) {
                None => texts(words(text, most, method == "rsplit")),
                Some(None | Some("")) => Err(wrong(method, "a separator")),
                Some(Some(separator)) => texts(split(text, separator, most, method == "rsplit")),
            }
        }
        "partition" | "rpartition" => {
            let separator = args.first().and_then(Value::as_str).filter(|it| !it.is_empty());
            let Some(separator) = separator else {
                return Some(Err(wrong(method, "a separator")));
            };
            let is_last = method == "rpartition";
            let found = if is_last { text.rfind(separator) } else { text.find(separator) };
            let parts = match found {
                Some(at) => [&text[..at], separator, &text[at + separator.len()..]],
                None if is_last => ["", "", text],
                None => [text, "", ""],
            };
            Ok(Value::from(Tuple::from(parts.map(Value::from))))
        }
        "removeprefix" | "removesuffix" => {
            let Some(part) = args.first().and_then(Value::as_str) else {
                return Some(Err(wrong(method, "a text")));
            };
            let rest = match method {
                "removeprefix" => text.strip_prefix(part),
                _ => text.strip_suffix(part),
            };
            Ok(Value::from(rest.unwrap_or(text)))
        }
        "center" | "ljust" | "rjust" | "zfill" => {
            let fill = args.get(1).map_or(Some(" "), Value::as_str).unwrap_or_default();
            match args.first().and_then(|width| i64::try_from(width.clone()).ok()) {
                Some(width) if fill.chars().count() == 1 => {
                    let width = usize::try_from(width).unwrap_or(0);
                    Ok(Value::from(justified(text, method, width, fill)))
                }
                _ => Err(wrong(method, "a width and one character")),
            }
        }
        "title" => Ok(Value::from(title(text))),
        "casefold" | "swapcase" => {
            let changed = |c: char| match method == "swapcase" && c.is_uppercase() {
                true => c.to_lowercase().to_string(),
                false if method == "swapcase" => c.to_uppercase().to_string(),
                false => c.to_uppercase().flat_map(char::to_lowercase).collect(),
            };
            Ok(Value::from(text.chars().map(changed).collect::<String>()))
        }
        "istitle" => {
            let has_case = text.chars().any(|c| c.is_lowercase() || c.is_uppercase());
            Ok(Value::from(has_case && title(text) == text))
        }
        "isdecimal" | "isdigit" | "isidentifier" | "isprintable" | "isspace" => {
            Ok(Value::from(consists_of(text, method)))
        }
        _ => return None,
    })
}

/// Pads a text to a width. As in Python, `center` puts an odd rest on the side that the width
/// decides, and `zfill` puts zeros behind a sign.
pub(super) fn justified(text: &str, method: &str, width: usize, fill: &str) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
    match method {
        "ljust" => text.to_owned() + &fill.repeat(missing),
        "rjust" => fill.repeat(missing) + text,
        "zfill" => format!("{sign}{}{digits}", "0".repeat(missing)),
        _ => {
            let left = missing / 2 + (missing & width & 1);
            fill.repeat(left) + text + &fill.repeat(missing - left)
        }
    }
}

/// Returns whether all characters of a text are of the kind for which a method asks.
fn consists_of(text: &str, method: &str) -> bool {
    let fits = |c: char| match method {
        "isidentifier" => c.is_alphanumeric() || c == '_',
        "isprintable" => is_printable(c),
        "isspace" => is_space(c),
        "isdigit" if OTHER_DIGITS.contains(c) => true,
        _ => c.is_number_decimal_digit(),
    };
    let is_number = method == "isidentifier" && text.starts_with(char::is_numeric);
    !is_number && text.chars().all(fits) && (!text.is_empty() || method == "isprintable")
}

fn wrong(method: &str, expected: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("`{method}` expects {expected}"))
}

/// Returns whether Python's `isspace` is true: for Unicode's white space and four separators.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Removes characters from one end or both: those of `set`, or else white space.
pub(super) fn stripped<'t>(text: &'t str, method: &str, set: Option<&str>) -> &'t str {
    let is_removed = |c: char| set.map_or_else(|| is_space(c), |set| set.contains(c));
    match method {
        "lstrip" => text.trim_start_matches(is_removed),
        "rstrip" => text.trim_end_matches(is_removed),
        _ => text.trim_matches(is_removed),
    }
}

/// Splits a text at the ends of lines that Python knows.
fn lines(text: &str, keeps_ends: bool) -> Vec<&str> {
    const ENDS: [char; 10] = [
        '\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}',
        '\u{2029}',
    ];
    let (mut all, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(ENDS) {
        let length = match rest[at..].starts_with("\r\n") {
            true => 2,
            false => rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        all.push(&rest[..if keeps_ends { at + length } else { at }]);
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        all.push(rest);
    }
    all
}

/// Splits a text at white space, at most `most` times from its start or its end. The rest keeps its
/// white space.
fn words(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let trimmed =
        if from_end { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) };
    let (mut all, mut rest) = (Vec::new(), trimmed);
    while !rest.is_empty() {
        let at = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = at.filter(|_| all.len() < most) else {
            all.push(rest);
            break;
        };
        let after = at + rest[at..].chars().next().map_or(1, char::len_utf8);
        let (word, others) = match from_end {
            true => (&rest[after..], rest[..at].trim_end_matches(is_space)),
            false => (&rest[..at], rest[after..].trim_start_matches(is_space)),
        };
        all.push(word);
        rest = others;
    }
    if from_end {
        all.reverse();
    }
    all
}

/// Splits a text at a separator, at most `most` times from its start or its end.
fn split<'t>(text: &'t str, separator: &str, most: usize, from_end: bool) -> Vec<&'t str> {
    let most = most.saturating_add(1);
    if !from_end {
        return text.splitn(most, separator).collect();
    }
    let mut all: Vec<&str> = text.rsplitn(most, separator).collect();
    all.reverse();
    all
}

/// Writes the first letter of each run of letters in upper case, and the others in lower case.
fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut is_inside = false;
    for c in text.chars() {
        match is_inside {
            true => titled.extend(c.to_lowercase()),
            false => titled.extend(c.to_uppercase()),
        }
        is_inside = c.is_lowercase() || c.is_uppercase();
    }
    titled
}

/// Finds an argument by position or name.
pub(super) fn argument(args: &[Value], index: usize, name: &str) -> Option<Value> {
    let named = args.last().filter(|last| last.is_kwargs());
    let positional = args.len() - usize::from(named.is_some());
    match args.get(index) {
        Some(value) if index < positional => Some(value.clone()),
        _ => {
            named.and_then(|named| named.get_attr(name).ok()).filter(|found| !found.is_undefined())
        }
    }
}
