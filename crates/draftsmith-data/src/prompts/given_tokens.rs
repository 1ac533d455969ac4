//! Responses given as token ids, in the form of the SpecDec++ authors. A record has the ids of the
//! prompt (`prefix`) and of the response (`tokens`), the token that the authors' draft model drew
//! at each position (`draft`), and the acceptance probabilities of these draft tokens (`p_acc`).
//! Each list is JSON, or text as Python prints it.

use std::str::FromStr;

use serde_json::Value;

use super::record::{Keys, Problem, Result, kind};

/// A prompt and its response as token ids.
#[derive(Debug, Clone, PartialEq)]
pub struct GivenTokens {
    /// The tokens before the response; never empty.
    pub prompt_ids: Vec<u32>,
    /// The tokens of the response; never empty.
    pub response_ids: Vec<u32>,
    /// The token that the draft model drew at each position of the response, if the file has them.
    pub draft_ids: Option<Vec<u32>>,
    /// The probability that the target accepts each of `draft_ids`, if the file has them.
    pub acceptance_prob: Option<Vec<f64>>,
}

/// Returns whether a record holds a turn as token ids.
pub(super) fn has_tokens(record: &Keys) -> bool {
    record.contains_key("prefix") && record.contains_key("tokens")
}

/// Reads a turn as token ids.
///
/// # Errors
/// If a list cannot be read or does not have the response's length.
pub(super) fn read_tokens(record: &Keys) -> Result<GivenTokens> {
    let non_empty = |key: &str| -> Result<Vec<u32>> {
        let ids = list(record, key, "token ids")?.unwrap_or_default();
        if ids.is_empty() { Err(Problem::key(key, "has no token")) } else { Ok(ids) }
    };
    let (prompt_ids, response_ids) = (non_empty("prefix")?, non_empty("tokens")?);
    let check_length = |key: &str, found: Option<usize>| match found {
        Some(found) if found != response_ids.len() => Err(Problem::key(
            key,
            format!("has {found} values, but `tokens` has {}", response_ids.len()),
        )),
        _ => Ok(()),
    };
    let draft_ids = list(record, "draft", "token ids")?;
    check_length("draft", draft_ids.as_ref().map(Vec::len))?;
    let mut acceptance_prob = None;
    for key in ["log_p_7b", "log_p_70b", "p_acc"] {
        let values: Option<Vec<f64>> = list(record, key, "numbers")?;
        check_length(key, values.as_ref().map(Vec::len))?;
        let is_prob = |value: &f64| (0.0..=1.0).contains(value);
        if key == "p_acc" {
            if let Some(value) = values.iter().flatten().find(|value| !is_prob(value)) {
                return Err(Problem::key(key, format!("has {value}, expected 0 to 1")));
            }
            acceptance_prob = values;
        }
    }
    // Without the draft's tokens, the probabilities are meaningless.
    let acceptance_prob = acceptance_prob.filter(|_| draft_ids.is_some());
    Ok(GivenTokens { prompt_ids, response_ids, draft_ids, acceptance_prob })
}

/// Reads the list under a key, as JSON or as Python prints it; `None` if it is missing or null.
fn list<T: FromStr>(record: &Keys, key: &str, what: &str) -> Result<Option<Vec<T>>> {
    let bad = |found: String| Problem::key(key, format!("{found}, it must be a list of {what}"));
    let one = |text: &str| text.trim().parse().map_err(|_| bad(format!("has `{}`", text.trim())));
    match record.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(values)) => {
            let values = values.iter().map(|value| match value {
                Value::Number(number) => one(&number.to_string()),
                value => Err(bad(format!("has {}", kind(value)))),
            });
            values.collect::<Result<_, _>>().map(Some)
        }
        Some(Value::String(text)) => {
            let inner = text.trim().strip_prefix('[').and_then(|text| text.strip_suffix(']'));
            let inner = inner.ok_or_else(|| bad("is text without `[` and `]`".to_owned()))?;
            if inner.trim().is_empty() {
                return Ok(Some(Vec::new()));
            }
            inner.split(',').map(one).collect::<Result<_, _>>().map(Some)
        }
        Some(value) => Err(bad(format!("is {}", kind(value)))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(record: Value) -> Result<GivenTokens, String> {
        let Value::Object(record) = record else { panic!("an object is expected") };
        assert!(has_tokens(&record));
        read_tokens(&record).map_err(|problem| match problem {
            Problem::Large(found) | Problem::Unknown(found) => found,
            Problem::Key { key, problem } => format!("`{key}` {problem}"),
        })
    }

    #[test]
    fn lists_and_their_texts_are_equivalent() {
        let lists = json!({
            "prefix": [1, 5], "tokens": [7, 2], "draft": [8, 2], "log_p_7b": [-0.5, -0.25],
            "log_p_70b": [-1.5, -0.25], "p_acc": [0.25, 1],
        });
        let texts = json!({
            "prefix": "[1, 5]", "tokens": " [7,2] ", "draft": "[8, 2]", "log_p_7b": "[-0.5, -0.25]",
            "log_p_70b": "[-1e999, -0.25]", "p_acc": "[0.25, 1.0]",
        });
        let expected = GivenTokens {
            prompt_ids: vec![1, 5],
            response_ids: vec![7, 2],
            draft_ids: Some(vec![8, 2]),
            acceptance_prob: Some(vec![0.25, 1.0]),
        };
        assert_eq!(read(lists).expect("reads"), expected);
        assert_eq!(read(texts).expect("reads"), expected);
        let bare = GivenTokens { draft_ids: None, acceptance_prob: None, ..expected };
        let alone =
            json!({ "prefix": [1, 5], "tokens": [7, 2], "p_acc": [0.25, 1], "draft": null });
        assert_eq!(read(alone).expect("reads"), bare);
    }

    #[test]
    fn errors_name_the_key() {
        let check = |key: &str, value: Value, expected: &str| {
            let mut record = json!({ "prefix": [1], "tokens": [7, 2], "draft": [8, 2] });
            record[key] = value;
            let error = read(record).expect_err("refused");
            assert!(error.contains(expected), "{error}");
        };
        check("prefix", json!([]), "`prefix` has no token");
        check("prefix", json!(null), "`prefix` has no token");
        check("tokens", json!("[]"), "`tokens` has no token");
        check("tokens", json!("7, 2"), "`tokens` is text without `[` and `]`, it must be a list");
        check("tokens", json!("[7, x]"), "`tokens` has `x`, it must be a list of token ids");
        check("tokens", json!([7, -2]), "`tokens` has `-2`");
        check("tokens", json!([7, 4_294_967_296_u64]), "`tokens` has `4294967296`");
        check("tokens", json!([7, "2"]), "`tokens` has a string");
        check("tokens", json!({}), "`tokens` is an object");
        check("draft", json!("[8]"), "`draft` has 1 values, but `tokens` has 2");
        check("log_p_70b", json!("[0.5, 1.0, 2.0]"), "`log_p_70b` has 3 values");
        check("log_p_7b", json!("[0.5, None]"), "`log_p_7b` has `None`");
        check("p_acc", json!([0.5, 1.5]), "`p_acc` has 1.5, expected 0 to 1");
        check("p_acc", json!("[nan, 1]"), "`p_acc` has NaN");
    }
}
