//! Compares calls of tools in texts, whatever form a model writes them in.

use serde_json::{Deserializer, Map, Value};

/// Returns the text of an answer before its calls of tools if these are the recorded ones, which `recorded`
/// holds as the chat template writes them; `None` if they differ.
///
/// Calls are the same if their JSON has the same values, with ids aside. Calls in another form are the same
/// if they are the whole answer, with white space aside.
pub(crate) fn text_before(recorded: &str, answer: &str) -> Option<String> {
    let (expected, found) = (objects(recorded), objects(answer));
    if expected.is_empty() {
        let is_same = recorded.split_whitespace().eq(answer.split_whitespace());
        return (is_same && !recorded.trim().is_empty()).then(String::new);
    }
    let calls = found.get(found.len().checked_sub(expected.len())?..)?;
    let is_same = calls.iter().map(|(_, call)| call).eq(expected.iter().map(|(_, call)| call));
    let before = answer[..calls[0].0].trim_end();
    let marker = recorded[..expected[0].0].trim();
    is_same.then(|| before.strip_suffix(marker).unwrap_or(before).trim_end().to_owned())
}

/// Finds the objects of JSON in a text, each with its position.
fn objects(text: &str) -> Vec<(usize, Value)> {
    let (mut found, mut from) = (Vec::new(), 0);
    while let Some(at) = text[from..].find('{').map(|at| from + at) {
        let mut values = Deserializer::from_str(&text[at..]).into_iter::<Map<String, Value>>();
        from = match values.next() {
            Some(Ok(call)) => {
                found.push((at, comparable(call)));
                at + values.byte_offset()
            }
            _ => at + 1,
        };
    }
    found
}

/// Returns a call without its id, and with arguments that are a text of JSON as values.
fn comparable(mut call: Map<String, Value>) -> Value {
    call.shift_remove("id");
    for value in call.values_mut() {
        let parsed = value.as_str().and_then(|text| serde_json::from_str(text).ok());
        if let Some(parsed @ Value::Object(_)) = parsed {
            *value = parsed;
        }
    }
    Value::Object(call)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_the_same_by_value_and_the_text_before_them_is_kept() {
        let check = |recorded: &str, answer: &str, expected: Option<&str>| {
            assert_eq!(text_before(recorded, answer).as_deref(), expected, "{answer}");
        };
        let hermes = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": [2]}}\n</tool_call>\n";
        check(hermes, hermes, Some(""));
        let other =
            "I add.\n<tool_call>{\"arguments\":{\"b\":[2],\"a\":1},\"name\":\"add\"}</tool_call>";
        check(hermes, other, Some("I add."));
        check(hermes, &other.replace('2', "3"), None);
        check(
            hermes,
            &format!("{other}{other}"),
            Some(
                "I add.\n<tool_call>{\"arguments\":{\"b\":[2],\"a\":1},\"name\":\"add\"}</tool_call>I add.",
            ),
        );
        check(hermes, "three", None);
        check(hermes, "", None);
        check(hermes, "{{{", None);
        // Two calls in a list, as Mistral writes them, with ids that each answer makes anew.
        let list = "[{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 1}\", \"id\": \"a1\"}, {\"name\": \"g\", \"id\": \"a2\"}]";
        check(
            list,
            "[{\"name\": \"f\", \"arguments\": {\"x\": 1}, \"id\": \"b\"}, {\"name\": \"g\"}]",
            Some(""),
        );
        check(list, "[{\"name\": \"g\"}, {\"name\": \"f\", \"arguments\": {\"x\": 1}}]", None);
        // A form without JSON.
        let tagged = "<function=add>\n<a>1</a>\n</function>";
        check(tagged, "<function=add> <a>1</a>\n</function>\n", Some(""));
        check(tagged, "<function=add><a>2</a></function>", None);
        check("", "text", None);
        check("", "", None);
    }
}
