//! Parsing of JSON files that other programs may have written. Error messages name the key, and
//! describe types in plain words instead of Rust's type names.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use serde::de::{DeserializeOwned, Deserializer};
use serde_json::Value;
use serde_json::error::Category;

/// The maximum length of a value in a message, in characters.
const SHOWN_LEN: usize = 80;

/// The beginning of the problem of a text that is not JSON.
const NOT_JSON: &str = " is not JSON: ";

/// A JSON file that is malformed or does not have the expected form.
#[derive(Debug, thiserror::Error)]
#[error("`{path}`{problem}")]
pub struct JsonError {
    /// The file.
    pub path: PathBuf,
    /// The message after the path: ` is not JSON: …`, or `: key …`.
    problem: String,
}

/// Parses the JSON text of the file at `path`.
///
/// # Errors
/// If it is not JSON, or does not have the form of `T`.
pub fn parse_json<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, JsonError> {
    // A key that is read has a text in place of a number that is not finite, which its error names.
    let text = &*with_finite_numbers(text, |number| format!("\"{number}\""));
    let mut json = serde_json::Deserializer::from_slice(text);
    let parsed = parse_json_value(path, "", &mut json).and_then(|value| {
        json.end()
            .map_err(|error| JsonError { path: path.to_path_buf(), problem: not_json(&error) })?;
        Ok(value)
    });
    // From text, serde_json reports a number in place of an enum's name as a syntax error.
    parsed.or_else(|error| match serde_json::from_slice::<Value>(text) {
        Ok(value) if error.problem.starts_with(NOT_JSON) => parse_json_value(path, "", value),
        _ => Err(error),
    })
}

/// Adds the keys of one object to another.
pub fn merged(mut into: Value, from: Value) -> Value {
    if let (Some(into), Value::Object(from)) = (into.as_object_mut(), from) {
        into.extend(from);
    }
    into
}

/// Replaces numbers that are not finite, as Python's `json` writes them, so that a key that nobody reads does not make a
/// file unreadable.
pub fn with_finite_numbers(text: &[u8], replacement: impl Fn(&str) -> String) -> Cow<'_, [u8]> {
    const NAMES: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    let mut replaced: Vec<u8> = Vec::new();
    let (mut at, mut copied, mut is_string) = (0, 0, false);
    while at < text.len() {
        match text[at] {
            b'\\' if is_string => at += 1,
            b'"' => is_string = !is_string,
            _ if is_string => {}
            _ => {
                let is_here = |name: &&&str| text[at..].starts_with(name.as_bytes());
                if let Some(name) = NAMES.iter().find(is_here) {
                    replaced.extend_from_slice(&text[copied..at]);
                    replaced.extend(replacement(name).into_bytes());
                    at += name.len();
                    copied = at;
                    continue;
                }
            }
        }
        at += 1;
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    replaced.extend_from_slice(&text[copied..]);
    Cow::Owned(replaced)
}

/// Parses the value of the key `under` in the file at `path`.
///
/// # Errors
/// If it does not have the form of `T`.
pub fn parse_json_value<'de, T, D>(path: &Path, under: &str, value: D) -> Result<T, JsonError>
where
    T: DeserializeOwned,
    D: Deserializer<'de, Error = serde_json::Error>,
{
    serde_path_to_error::deserialize(value).map_err(|error| {
        let within = error.path().to_string();
        let error = error.into_inner();
        let problem = match error.classify() {
            Category::Data => data_problem(&joined(under, &within), &error),
            Category::Io | Category::Syntax | Category::Eof => not_json(&error),
        };
        JsonError { path: path.to_path_buf(), problem }
    })
}

fn not_json(error: &serde_json::Error) -> String {
    format!("{NOT_JSON}{error}")
}

/// Describes a wrong value of a key, or of the whole document if `key` is empty.
fn data_problem(key: &str, error: &serde_json::Error) -> String {
    let message = error.to_string();
    let message = message.rsplit_once(" at line ").map_or(&*message, |(message, _)| message);
    if let Some(name) = message.strip_prefix("missing field ") {
        return format!(": key `{}` is missing", joined(key, name.trim_matches('`')));
    }
    if let Some((name, known)) =
        message.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`'))
    {
        let parent = key.strip_suffix(name).unwrap_or(key).trim_end_matches('.');
        return format!(": key `{}` is not known{known}", joined(parent, name));
    }
    let problem = match message.strip_prefix("unknown variant ") {
        Some(rest) => format!("is {rest}"),
        None => plain_problem(message, Notation::Json),
    };
    if key.is_empty() { format!(": {problem}") } else { format!(": key `{key}` {problem}") }
}

/// Joins `key` to the path `parent`; `.` stands for the document itself.
fn joined(parent: &str, key: &str) -> String {
    match (parent, key) {
        (parent, "" | ".") => parent.to_owned(),
        ("" | ".", key) => key.to_owned(),
        (parent, key) if key.starts_with('[') => format!("{parent}{key}"),
        (parent, key) => format!("{parent}.{key}"),
    }
}

/// Parses a part of a TOML document. Error messages name the key.
///
/// # Errors
/// If it does not have the form of `T`.
pub fn parse_toml<T: DeserializeOwned>(keys: impl Into<toml::Value>) -> Result<T, String> {
    serde_path_to_error::deserialize(keys.into()).map_err(|error| {
        let (path, message) = (error.path().to_string(), error.inner().message());
        let problem = plain_problem(message, Notation::Toml);
        match (path.as_str(), problem == message) {
            (".", _) => problem,
            (key, true) => format!("`{key}`: {problem}"),
            (key, false) => format!("`{key}` {problem}"),
        }
    })
}

/// A file format, whose terms a message uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notation {
    /// JSON: a message says "object" and "list".
    Json,
    /// TOML: a message says "table" and "array".
    Toml,
}

impl Notation {
    fn object(self) -> &'static str {
        if self == Self::Json { "an object" } else { "a table" }
    }

    fn list(self) -> &'static str {
        if self == Self::Json { "a list" } else { "an array" }
    }
}

/// Rewrites serde's message about a wrong type or length without Rust's type names: `is 1.5, expected a
/// whole number, 0 or more`. Other messages are returned unchanged.
pub fn plain_problem(message: &str, notation: Notation) -> String {
    let parts = |prefix| message.strip_prefix(prefix)?.rsplit_once(", expected ");
    if let Some((found, expected)) = parts("invalid type: ").or_else(|| parts("invalid value: ")) {
        let (found, expected) = (plain_value(found, notation), plain_type(expected, notation));
        return format!("is {found}, expected {expected}");
    }
    match parts("invalid length ") {
        Some((len, expected)) => {
            format!("has {len} entries, expected {}", plain_type(expected, notation))
        }
        None => message.to_owned(),
    }
}

fn plain_value(found: &str, notation: Notation) -> String {
    let kinds = ["string ", "integer ", "floating point ", "boolean ", "character "];
    let value = match found {
        "map" => notation.object(),
        "sequence" => notation.list(),
        "unit value" => "null",
        _ => kinds.iter().find_map(|kind| found.strip_prefix(kind)).unwrap_or(found),
    };
    let value = value.trim_matches('`');
    match value.char_indices().nth(SHOWN_LEN) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

fn plain_type(expected: &str, notation: Notation) -> &str {
    match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number, 0 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "string" | "a borrowed string" | "path string" | "string or map" => "a string",
        "a sequence" => notation.list(),
        "a map" => notation.object(),
        "unit" => "null",
        other if other.starts_with("a nonzero ") => "a whole number, 1 or more",
        other if other.starts_with("struct ") => notation.object(),
        other if other.starts_with("enum ") => "a string",
        other if other.starts_with("a tuple ") || other.starts_with("an array ") => notation.list(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fmt;
    use std::num::NonZeroUsize;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only deserialized")]
    struct Document {
        size: usize,
        #[serde(default)]
        ids: Vec<u32>,
        inner: Option<Inner>,
        #[serde(default)]
        map: BTreeMap<String, bool>,
        count: Option<NonZeroUsize>,
        pair: Option<(f64, f64)>,
    }

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only deserialized")]
    struct Inner {
        factor: f64,
        kind: Option<Kind>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        One,
        Two,
    }

    fn problem(text: &str) -> String {
        parse_json::<Document>(Path::new("a/c.json"), text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn numbers_that_are_written_and_read_again_are_the_same() {
        let mut bits = 1_u64;
        let numbers = std::iter::repeat_with(|| {
            bits = bits.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            f64::from_bits(bits)
        });
        for number in numbers.take(20_000).filter(|number| number.is_finite()) {
            let text = serde_json::to_string(&number).unwrap();
            let read: f64 = parse_json(Path::new("a.json"), text.as_bytes()).unwrap();
            assert_eq!(read, number, "{text}");
        }
    }

    #[test]
    fn errors_name_the_key_in_plain_words() {
        for (text, expected) in [
            ("{", "`a/c.json` is not JSON: EOF while parsing an object at line 1 column 1"),
            ("{\"size\": 1} x", "`a/c.json` is not JSON: trailing characters at line 1 column 13"),
            ("[]", "`a/c.json`: has 0 entries, expected an object"),
            ("7", "`a/c.json`: is 7, expected an object"),
            ("{}", "`a/c.json`: key `size` is missing"),
            (
                r#"{"size": {}}"#,
                "`a/c.json`: key `size` is an object, expected a whole number, 0 or more",
            ),
            (
                r#"{"size": 1.5}"#,
                "`a/c.json`: key `size` is 1.5, expected a whole number, 0 or more",
            ),
            (r#"{"size": -1}"#, "`a/c.json`: key `size` is -1, expected a whole number, 0 or more"),
            (
                r#"{"size": null}"#,
                "`a/c.json`: key `size` is null, expected a whole number, 0 or more",
            ),
            (
                r#"{"sizes": 1}"#,
                "`a/c.json`: key `sizes` is not known, expected one of `size`, `ids`, `inner`, `map`, `count`, `pair`",
            ),
            (
                r#"{"size": 1, "ids": [2, "x"]}"#,
                "`a/c.json`: key `ids[1]` is \"x\", expected a whole number from 0 to 4294967295",
            ),
            (
                r#"{"size": 1, "ids": [4294967296]}"#,
                "`a/c.json`: key `ids[0]` is 4294967296, expected a whole number from 0 to 4294967295",
            ),
            (r#"{"size": 1, "inner": {}}"#, "`a/c.json`: key `inner.factor` is missing"),
            (
                r#"{"size": 1, "inner": []}"#,
                "`a/c.json`: key `inner` has 0 entries, expected an object",
            ),
            (
                r#"{"size": 1, "inner": {"factor": "8"}}"#,
                "`a/c.json`: key `inner.factor` is \"8\", expected a number",
            ),
            (
                r#"{"size": 1, "inner": {"factor": 8, "kind": "three"}}"#,
                "`a/c.json`: key `inner.kind` is `three`, expected `one` or `two`",
            ),
            (
                r#"{"size": 1, "map": {"a": 1}}"#,
                "`a/c.json`: key `map.a` is 1, expected true or false",
            ),
            (r#"{"size": 1, "map": "a"}"#, "`a/c.json`: key `map` is \"a\", expected an object"),
            (
                r#"{"size": 1, "count": 0}"#,
                "`a/c.json`: key `count` is 0, expected a whole number, 1 or more",
            ),
            (
                r#"{"size": 1, "inner": {"factor": 8, "kind": 3}}"#,
                "`a/c.json`: key `inner.kind` is 3, expected a string",
            ),
            (r#"{"size": 1, "pair": true}"#, "`a/c.json`: key `pair` is true, expected a list"),
            (
                r#"{"size": 1, "inner": {"factor": NaN}}"#,
                "`a/c.json`: key `inner.factor` is \"NaN\", expected a number",
            ),
            (
                r#"{"size": -Infinity}"#,
                "`a/c.json`: key `size` is \"-Infinity\", expected a whole number, 0 or more",
            ),
        ] {
            assert_eq!(problem(text), expected);
        }
        let long = format!(r#"{{"size": "{}"}}"#, "x".repeat(1000));
        assert!(problem(&long).len() < 200, "{}", problem(&long));
    }

    /// Serde may reword its messages, which then would name a type of Rust.
    #[test]
    fn every_type_has_plain_words() {
        fn expected<T: DeserializeOwned + fmt::Debug>(wrong: &str) -> String {
            let read = parse_json::<T>(Path::new("c.json"), wrong.as_bytes());
            let message = read.unwrap_err().to_string();
            message.rsplit_once(", expected ").expect("it names a type").1.to_owned()
        }
        for (found, plain) in [
            (expected::<u8>("true"), "a whole number from 0 to 255"),
            (expected::<u16>("true"), "a whole number from 0 to 65535"),
            (expected::<u32>("true"), "a whole number from 0 to 4294967295"),
            (expected::<u64>("true"), "a whole number, 0 or more"),
            (expected::<usize>("true"), "a whole number, 0 or more"),
            (expected::<i8>("true"), "a whole number"),
            (expected::<i16>("true"), "a whole number"),
            (expected::<i32>("true"), "a whole number"),
            (expected::<i64>("true"), "a whole number"),
            (expected::<isize>("true"), "a whole number"),
            (expected::<NonZeroUsize>("true"), "a whole number, 1 or more"),
            (expected::<f32>("true"), "a number"),
            (expected::<f64>("true"), "a number"),
            (expected::<bool>("1"), "true or false"),
            (expected::<String>("1"), "a string"),
            (expected::<PathBuf>("1"), "a string"),
            (expected::<Kind>("1"), "a string"),
            (expected::<Vec<u8>>("1"), "a list"),
            (expected::<[u8; 2]>("1"), "a list"),
            (expected::<(u8, u8)>("1"), "a list"),
            (expected::<BTreeMap<String, u8>>("1"), "an object"),
            (expected::<Inner>("1"), "an object"),
            (expected::<()>("1"), "null"),
        ] {
            assert_eq!(found, plain);
        }
    }

    #[test]
    fn errors_about_a_value_begin_with_its_key() {
        let value = serde_json::json!({ "size": 1, "ids": 3 });
        let read = parse_json_value::<Document, _>(Path::new("c.json"), "tuned", value);
        let message = read.unwrap_err().to_string();
        assert_eq!(message, "`c.json`: key `tuned.ids` is 3, expected a list");
        let read = parse_json_value::<usize, _>(Path::new("c.json"), "since", Value::from("then"));
        let message = read.unwrap_err().to_string();
        assert!(message.starts_with("`c.json`: key `since` is \"then\""), "{message}");
    }

    #[test]
    fn toml_has_tables_and_arrays() {
        let message = "invalid type: map, expected a sequence";
        assert_eq!(plain_problem(message, Notation::Toml), "is a table, expected an array");
        assert_eq!(plain_problem("unclosed table", Notation::Toml), "unclosed table");
    }

    #[test]
    fn numbers_that_are_not_finite_make_no_other_key_unreadable() {
        let text = r#"{"a": Infinity, "b": "NaN, \" -Infinity \\", "c": [-Infinity,NaN, 1], "Infinity": 2}"#;
        let read: serde_json::Value = parse_json("c.json".as_ref(), text.as_bytes()).unwrap();
        let expected = serde_json::json!({
            "a": "Infinity", "b": "NaN, \" -Infinity \\", "c": ["-Infinity", "NaN", 1], "Infinity": 2
        });
        assert_eq!(read, expected);
        let plain = with_finite_numbers(b"{\"a\": 1}", |_| unreachable!());
        assert!(matches!(plain, Cow::Borrowed(_)));
        let cut = parse_json::<serde_json::Value>("c.json".as_ref(), b"{\"a\": NaN").unwrap_err();
        assert!(cut.to_string().contains("is not JSON"), "{cut}");
    }
}
