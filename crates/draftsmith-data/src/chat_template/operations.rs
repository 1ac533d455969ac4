//! The filters, functions, methods and operators of chat templates: those of the engine and those
//! that transformers adds. Each whose result can be much larger than its input has a limit.
//!
//! A new filter, function or operator belongs here, with a bound on the size of its result.

use std::cmp::Ordering;
use std::fmt::Write;
use std::sync::Arc;

use chrono::NaiveDateTime;
use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, filters, functions, tests};
use minijinja_contrib::pycompat::unknown_method_callback;
use minijinja_contrib::{filters as contrib, globals};

use super::allowance::{Allowance, MAX_DEPTH};
use super::methods::{self, argument, slice};
use super::printed::{GroupTuple, Result, ValueStyle, is_tuple, like, order, printed, refused};

/// The names of filters that `program.rs` inserts. No template can contain these names.
pub(super) const SETTLE: &str = "$settle";
pub(super) const STORE: &str = "$store";
pub(super) const ADD: &str = "$add";
pub(super) const MULTIPLY: &str = "$multiply";
pub(super) const CONCATENATE: &str = "$concatenate";
pub(super) const SLICE: &str = "$slice";
pub(super) const REMAINDER: &str = "$remainder";
pub(super) const CHAIN: &str = "$chain";
pub(super) const ATTRIBUTE: &str = "$attribute";
pub(super) const ITEM: &str = "$item";

/// The names of a test that needs an order, and the orders for which it holds.
type OrderTest = (&'static str, fn(Ordering) -> bool);

/// The tests that need an order. The first name is also the filter that replaces the operator.
const ORDERS: [OrderTest; 4] = [
    ("< lt lessthan", Ordering::is_lt),
    ("<= le", Ordering::is_le),
    ("> gt greaterthan", Ordering::is_gt),
    (">= ge", Ordering::is_ge),
];

/// The largest number of characters in a set to strip from a text's ends. Stripping compares every
/// character of the text with the set.
const MAX_STRIPPED: usize = 256;

/// The largest size of a date's format, in bytes.
const MOST_DATE_FORMAT: usize = 256;
/// The largest size of a separator in JSON, in bytes.
const MOST_SEPARATOR: usize = 8;

/// A check of a call's arguments, including the value to which a filter or method is applied. It
/// runs before a function whose result could be too large.
type Check = fn(&Allowance, &[Value]) -> Result<()>;

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
    for (name, filter, check) in guarded_filters(allowance) {
        let own = Arc::clone(allowance);
        environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            check(&own, &args)?;
            filter.call(state, &args)
        });
    }
    add_filters(&mut environment);
    environment.remove_filter("pprint");
    add_tests(&mut environment, allowance);
    add_functions(&mut environment, allowance, date);
    let own = Arc::clone(allowance);
    environment.set_unknown_method_callback(move |state, value, method, args| {
        if let Some(check) = method_check(method) {
            let mut all = vec![value.clone()];
            all.extend_from_slice(args);
            check(&own, &all)?;
        }
        let called = methods::call(state, value, method, args);
        called.unwrap_or_else(|| unknown_method_callback(state, value, method, args))
    });
    environment
}

fn add_tests(environment: &mut Environment<'static>, allowance: &Arc<Allowance>) {
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
    environment.add_test("callable", methods::is_callable);
    for (names, holds) in ORDERS {
        let own = Arc::clone(allowance);
        let compare = move |left: &Value, right: &Value| {
            own.spend(0)?;
            order(left, right).map(holds)
        };
        for name in names.split(' ') {
            environment.add_test(name, compare.clone());
        }
        environment.add_filter(names.split(' ').next().unwrap_or_default(), compare);
    }
}

fn add_functions(
    environment: &mut Environment<'static>,
    allowance: &Arc<Allowance>,
    date: NaiveDateTime,
) {
    // What these functions return holds their arguments, which must be plain data.
    let own = Arc::clone(allowance);
    environment.add_function("cycler", move |items: Rest<Value>| {
        own.weigh(&Value::from(items.to_vec()))?;
        globals::cycler(items.to_vec())
    });
    let own = Arc::clone(allowance);
    environment.add_function("joiner", move |separator: Option<Value>| {
        own.weigh(&Value::from_iter(separator.clone()))?;
        Ok::<_, Error>(globals::joiner(separator))
    });
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
}

fn add_operators(environment: &mut Environment<'static>, allowance: &Arc<Allowance>) {
    let own = Arc::clone(allowance);
    environment.add_filter(SETTLE, move |value: Value| own.settle(value));
    let own = Arc::clone(allowance);
    environment.add_filter(STORE, move |value: Value, namespaces: Rest<Value>| {
        own.store(value, &namespaces)
    });
    type Operator = fn(&Allowance, &Value, &Value) -> Result<Value>;
    let operators: [(&'static str, Operator); 6] = [
        (ADD, add),
        (REMAINDER, remainder),
        (ATTRIBUTE, |_, value, name| methods::attribute(value, name)),
        (ITEM, |_, value, name| match value.get_item(name)? {
            item if item.is_undefined() => methods::attribute(value, name),
            item => Ok(item),
        }),
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
    environment.add_filter(CHAIN, |state: &mut State, first: Value, rest: Rest<Value>| {
        let mut left = &first;
        for pair in rest.chunks_exact(2) {
            let (sign, right) = (pair[0].as_str().unwrap_or_default(), &pair[1]);
            let (test, holds) = sign.strip_prefix("not ").map_or((sign, true), |it| (it, false));
            if state.perform_test(test, &[left.clone(), right.clone()])? != holds {
                return Ok(false);
            }
            left = right;
        }
        Ok::<_, Error>(true)
    });
    let own = Arc::clone(allowance);
    environment.add_filter(SLICE, move |value: Value, start: Value, stop: Value, step: Value| {
        own.settle(slice(&value, &start, &stop, &step)?)
    });
}

/// Adds the filters that compute otherwise than the engine's, or that it lacks.
fn add_filters(environment: &mut Environment<'static>) {
    environment.add_filter("filesizeformat", contrib::filesizeformat);
    environment.add_filter("striptags", contrib::striptags);
    environment.add_filter("truncate", contrib::truncate);
    environment.add_filter("wordcount", contrib::wordcount);
    for name in ["length", "count"] {
        environment.add_filter(name, length);
    }
    for name in ["escape", "e", "forceescape"] {
        environment.add_filter(name, move |value: Value| match value.is_safe() {
            true if name != "forceescape" => value,
            _ => escaped(&value),
        });
    }
    let compared = [
        ("dictsort", Value::from_function(filters::dictsort)),
        ("groupby", Value::from_function(groupby)),
        ("max", Value::from_function(filters::max)),
        ("min", Value::from_function(filters::min)),
        ("sort", Value::from_function(filters::sort)),
    ];
    for (name, filter) in compared {
        environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            check_order(state, &args)?;
            filter.call(state, &args)
        });
    }
}

/// Returns the filters whose result can be much larger than their arguments, each with the check
/// that runs before it.
fn guarded_filters(allowance: &Arc<Allowance>) -> [(&'static str, Value, Check); 11] {
    let own = Arc::clone(allowance);
    let to_json = move |value: Value, options: Kwargs| to_json(&own, &value, options);
    let own = Arc::clone(allowance);
    let string = move |value: Value| own.write([&value], "");
    let own = Arc::clone(allowance);
    let join = move |state: &mut State, values: Value, d: Option<Value>, name: Option<Value>| {
        let values = name.map_or(Ok(values.clone()), |name| keys(state, &values, name, None))?;
        let items = values.try_iter()?.checked().collect::<Result<Vec<_>>>()?;
        own.write(&items, &d.as_ref().map_or_else(String::new, printed))
    };
    [
        ("join", Value::from_function(join), |allowance, args| {
            check_join(allowance, args.first(), argument(args, 1, "d"))
        }),
        ("string", Value::from_function(string), |_, _| Ok(())),
        ("replace", Value::from_function(replace), check_replace),
        ("trim", Value::from_function(trim), check_strip),
        ("center", Value::from_function(center), |allowance, args| {
            allowance.allow_text(number(argument(args, 1, "width")).unwrap_or(0))
        }),
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
        ("tojson", Value::from_function(to_json), |_, _| Ok(())),
    ]
}

/// Returns the check for a method, by its name in Python; `None` if it needs none.
fn method_check(method: &str) -> Option<Check> {
    match method {
        "replace" => Some(check_replace),
        "join" => Some(|allowance, args| check_join(allowance, args.get(1), args.first().cloned())),
        "format" => Some(check_format),
        "strip" | "lstrip" | "rstrip" => Some(check_strip),
        "center" | "ljust" | "rjust" | "zfill" => Some(|allowance, args| {
            let width = number(argument(args, 1, "width")).unwrap_or(0);
            allowance.allow_text(width.saturating_mul(text(args.get(2)).len().max(1)))
        }),
        _ => None,
    }
}

fn check_join(
    allowance: &Allowance,
    values: Option<&Value>,
    separator: Option<Value>,
) -> Result<()> {
    let num_values = values.and_then(Value::len).unwrap_or(0);
    allowance.allow_text(num_values.saturating_mul(text(separator.as_ref()).len()))
}

fn check_replace(allowance: &Allowance, args: &[Value]) -> Result<()> {
    let (whole, from, to) = (text(args.first()), text(args.get(1)), text(args.get(2)));
    let num_matches = whole.matches(from.as_str()).count();
    allowance.allow_text(whole.len().saturating_add(num_matches.saturating_mul(to.len())))
}

fn check_strip(_: &Allowance, args: &[Value]) -> Result<()> {
    if text(args.get(1)).chars().count() > MAX_STRIPPED {
        return Err(refused(format!("it strips more than {MAX_STRIPPED} characters")));
    }
    Ok(())
}

fn check_columns(allowance: &Allowance, args: &[Value]) -> Result<()> {
    allowance.allow_values(number(argument(args, 1, "count")).unwrap_or(0))
}

/// Checks an upper bound on the length of the text: each placeholder counts with the largest width
/// and the longest value. Any number in the text counts as a width.
fn check_format(allowance: &Allowance, args: &[Value]) -> Result<()> {
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

/// Checks that Python orders the values, or their attributes, that a filter compares.
fn check_order(state: &mut State, args: &[Value]) -> Result<()> {
    let values = args.first().cloned().unwrap_or_default();
    let given = |name| argument(args, args.len(), name);
    let attributes = given("attribute").map_or_else(String::new, |names| names.to_string());
    for name in attributes.split(',') {
        let column = match given("by").is_some_and(|by| by.as_str() == Some("value")) {
            true => values.call_method(state, "values", &[])?,
            false if name.is_empty() => values.clone(),
            false => keys(state, &values, Value::from(name.trim()), given("default"))?,
        };
        let column: Vec<_> = column.try_iter()?.checked().collect::<Result<_>>()?;
        let unequal = column.windows(2).filter(|two| two[0] != two[1]);
        unequal.map(|two| order(&two[0], &two[1])).try_for_each(|it| it.map(|_| ()))?;
    }
    Ok(())
}

/// Returns an attribute of each item.
fn keys(
    state: &mut State,
    items: &Value,
    attribute: Value,
    default: Option<Value>,
) -> Result<Value> {
    let options = default.into_iter().map(|default| ("default", default));
    let options = Kwargs::from_iter(options.chain([("attribute", attribute)]));
    state.apply_filter("map", &[items.clone(), Value::from(options)])
}

/// Groups items as the engine does, with groups that hold their items.
fn groupby(values: Value, options: Kwargs) -> Result<Value> {
    let attribute: Option<&str> = options.get("attribute")?;
    let attribute = attribute.unwrap_or_default().to_owned();
    let group = |group: Value| {
        let items = group.get_item_by_index(1)?.try_iter()?.collect::<Vec<_>>();
        // The key of the first item, where the engine takes that of the last.
        let key = items.first().and_then(|item| item.get_attr(&attribute).ok());
        let key = key.filter(|key| !key.is_undefined());
        let key = key.map_or_else(|| group.get_item_by_index(0), Ok)?;
        Ok(Value::from_object(GroupTuple([key, Value::from(items)])))
    };
    let groups = filters::groupby(values, None, options)?;
    groups.try_iter()?.map(group).collect::<Result<Value>>()
}

fn replace(text: Value, old: String, new: String, count: Option<i64>) -> String {
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    printed(&text).replacen(&old, &new, count)
}

fn center(text: Value, width: Option<usize>) -> String {
    methods::justified(&printed(&text), "center", width.unwrap_or(80), " ")
}

fn escaped(value: &Value) -> Value {
    let text = printed(value).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    Value::from_safe_string(text.replace('"', "&#34;").replace('\'', "&#39;"))
}

/// Removes characters from both ends of a text: those of `set`, or else white space.
fn trim(text: String, set: Option<String>) -> String {
    methods::stripped(&text, "strip", set.as_deref()).to_owned()
}

/// Counts the items or characters of a value; 0 for a name that is not defined.
fn length(value: Value) -> Result<usize> {
    if value.is_undefined() { Ok(0) } else { filters::length(&value) }
}

fn number(value: Option<Value>) -> Option<usize> {
    let number = i128::try_from(value?).ok()?;
    Some(usize::try_from(number.unsigned_abs()).unwrap_or(usize::MAX))
}

/// Returns the text of a string; empty for any other value.
fn text(value: Option<&Value>) -> String {
    value.and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn add(allowance: &Allowance, left: &Value, right: &Value) -> Result<Value> {
    match (left.kind(), right.kind()) {
        (ValueKind::String, ValueKind::String) => {
            Ok(Value::from(allowance.write([left, right], "")?))
        }
        (ValueKind::Seq, ValueKind::Seq) => {
            allowance.allow_values(left.len().unwrap_or(0) + right.len().unwrap_or(0))?;
            let items = left.try_iter()?.checked().chain(right.try_iter()?.checked());
            Ok(like(left, items.collect::<Result<_, _>>()?))
        }
        _ => calculate("+", left, right, i128::checked_add, |left, right| left + right),
    }
}

fn multiply(allowance: &Allowance, left: &Value, right: &Value) -> Result<Value> {
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
    Ok(like(repeated, items.iter().cycle().take(items.len() * times).cloned().collect()))
}

/// Formats a text as Python's `%` does, or computes a remainder, which has the sign of the divisor.
fn remainder(allowance: &Allowance, left: &Value, right: &Value) -> Result<Value> {
    let Some(text) = left.as_str() else {
        let integers =
            |left: i128, right: i128| Some(left.checked_rem(right)?.checked_add(right)? % right);
        return calculate("%", left, right, integers, |left, right| {
            left - right * (left / right).floor()
        });
    };
    let args = match right.kind() {
        ValueKind::Seq if is_tuple(right) => right.try_iter()?.collect(),
        ValueKind::Map if text.contains("%(") => {
            let pairs =
                right.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            vec![Value::from(pairs.map(|(key, it)| (key.to_string(), it)).collect::<Kwargs>())]
        }
        _ => vec![right.clone()],
    };
    let mut all = vec![left.clone()];
    all.extend_from_slice(&args);
    check_format(allowance, &all)?;
    let num_placeholders = text.replace("%%", "").matches('%').count();
    if right.kind() != ValueKind::Map && args.len() > num_placeholders {
        return Err(refused(format!(
            "`%` has more values than the {num_placeholders} placeholders"
        )));
    }
    formatting::format(FormatStyle::Printf, text, &args).map(Value::from)
}

/// Calculates with integers if both operands are integers or booleans, and otherwise with floats.
fn calculate(
    sign: &str,
    left: &Value,
    right: &Value,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value> {
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

/// Implements `tojson` as in transformers: Python's `json.dumps` with `ensure_ascii=False`, which
/// does not escape HTML.
fn to_json(allowance: &Allowance, value: &Value, options: Kwargs) -> Result<String> {
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let is_sorted = options.get::<Option<Value>>("sort_keys")?.is_some_and(|it| it.is_true());
    let is_ascii = options.get::<Option<Value>>("ensure_ascii")?.is_some_and(|it| it.is_true());
    let [between, after_key] = match separators {
        Some(both) if both.len() == 2 && both.iter().all(|it| it.len() <= MOST_SEPARATOR) => {
            [both[0].clone(), both[1].clone()]
        }
        Some(_) => {
            return Err(refused(format!(
                "`tojson(separators=…)` expects two texts of up to {MOST_SEPARATOR} bytes"
            )));
        }
        None if indent.is_some() => [",".to_owned(), ": ".to_owned()],
        None => [", ".to_owned(), ": ".to_owned()],
    };
    let length = indent.as_ref().and_then(Value::as_str).map(str::len);
    let width = length.or_else(|| number(indent.clone())).unwrap_or(0);
    allowance.allow_text(width.saturating_mul(MAX_DEPTH))?;
    let indent = indent.map(|indent| match indent.as_str() {
        Some(indent) => indent.to_owned(),
        None => " ".repeat(indent.as_usize().unwrap_or(0)),
    });
    let style = ValueStyle { is_json: true, between, after_key, indent, is_sorted };
    let text = allowance.write_as(&style, value)?;
    if !is_ascii {
        return Ok(text);
    }
    let mut ascii = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' | '\n' | ' '..='~' => ascii.push(c),
            _ => ascii
                .extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}"))),
        }
    }
    Ok(ascii)
}
