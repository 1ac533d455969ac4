//! Python's methods of texts that the engine lacks, or computes otherwise.
//!
//! Results are at most as long as the text, so they need no check of their size.

use minijinja::value::Value;
use minijinja::{Error, ErrorKind};

/// Calls a method of a text; `None` if the engine has the method as Python does.
///
/// # Errors
/// If an argument is not of the method's type.
pub(super) fn call(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
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
            let Some(separator) = given(0, "sep").filter(|it| it.as_str() != Some("")) else {
                return Some(Err(wrong(method, "a separator")));
            };
            let Some(separator) = separator.as_str() else {
                return Some(Err(wrong(method, "a separator")));
            };
            let is_last = method == "rpartition";
            let found = if is_last { text.rfind(separator) } else { text.find(separator) };
            texts(match found {
                Some(at) => vec![&text[..at], separator, &text[at + separator.len()..]],
                None if is_last => vec!["", "", text],
                None => vec![text, "", ""],
            })
        }
        "removeprefix" | "removesuffix" => {
            let Some(part) = given(0, "prefix") else { return Some(Err(wrong(method, "a text"))) };
            let Some(part) = part.as_str() else { return Some(Err(wrong(method, "a text"))) };
            let rest = match method {
                "removeprefix" => text.strip_prefix(part),
                _ => text.strip_suffix(part),
            };
            Ok(Value::from(rest.unwrap_or(text)))
        }
        "title" => Ok(Value::from(title(text))),
        "isspace" => Ok(Value::from(!text.is_empty() && text.chars().all(is_space))),
        _ => return None,
    })
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

/// Implements Jinja's filter `title`, whose words begin after white space, hyphens and opening
/// brackets.
pub(super) fn title_filter(text: &str) -> String {
    let is_between = |c: char| is_space(c) || "-({[<".contains(c);
    let mut titled = String::with_capacity(text.len());
    let mut is_first = true;
    for c in text.chars() {
        match is_first {
            true => titled.extend(c.to_uppercase()),
            false => titled.extend(c.to_lowercase()),
        }
        is_first = is_between(c);
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
