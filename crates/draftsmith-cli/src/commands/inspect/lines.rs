//! JSON documents as aligned lines and small tables for people.

use serde_json::{Map, Number, Value};

/// Longest width that we align to. Formatting panics at widths beyond `u16`.
const WIDEST: usize = 200;

/// Formats a JSON object as aligned `key  value` lines, with nested objects indented.
pub(super) fn lines(value: &Value) -> String {
    fn write(object: &Map<String, Value>, indent: usize, out: &mut String) {
        let width = object.keys().map(String::len).max().unwrap_or(0).min(WIDEST);
        for (key, value) in object {
            match value {
                Value::Object(inner) if !inner.is_empty() => {
                    *out += &format!("{:indent$}{key}\n", "");
                    write(inner, indent + 2, out);
                }
                Value::Array(list) if let Some(table) = table(list) => {
                    *out += &format!("{:indent$}{key}\n", "");
                    for line in table {
                        *out += &format!("{:indent$}  {line}\n", "");
                    }
                }
                value => {
                    let text = match value {
                        Value::Null => "-".to_owned(),
                        Value::String(text) => text.clone(),
                        Value::Number(n) => number(n),
                        Value::Array(list)
                            if list.len() > 1 && list.iter().all(Value::is_object) =>
                        {
                            format!("{} (see `--json`)", list.len())
                        }
                        other => other.to_string(),
                    };
                    *out += &format!("{:indent$}{key:<width$}  {text}\n", "");
                }
            }
        }
    }
    let mut out = String::new();
    if let Value::Object(object) = value {
        write(object, 0, &mut out);
    }
    out
}

fn number(number: &Number) -> String {
    match number.as_f64() {
        Some(n) if number.is_f64() && (n == 0.0 || (1e-3..1e6).contains(&n.abs())) => {
            format!("{n:.4}")
        }
        Some(n) if number.is_f64() => format!("{n:.3e}"),
        _ => number.to_string(),
    }
}

/// Formats a list of objects as the lines of a table. `None` unless all have the same keys and only numbers.
fn table(list: &[Value]) -> Option<Vec<String>> {
    let text = |value: &Value| match value {
        Value::Number(n) => Some(number(n)),
        Value::Null => Some("-".to_owned()),
        _ => None,
    };
    let heading: Vec<String> = list.first()?.as_object()?.keys().cloned().collect();
    let mut rows = vec![heading];
    for value in list {
        let object = value.as_object().filter(|object| object.keys().eq(&rows[0]))?;
        rows.push(object.values().map(text).collect::<Option<_>>()?);
    }
    let width =
        |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0).min(WIDEST);
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(at, cell)| format!("{cell:>0$}", width(at)));
        cells.collect::<Vec<_>>().join("  ")
    };
    Some(rows.iter().map(line).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_of_number_objects_become_tables() {
        let shown = json!({
            "bands": [{ "from": 0.0, "count": 12, "bound": null }, { "from": 0.25, "count": 3, "bound": 0.5 }],
            "files": [{ "name": "a" }, { "name": "b" }],
            "ids": [1, 2],
        });
        assert_eq!(
            lines(&shown),
            "bands\n    from  count   bound\n  0.0000     12       -\n  0.2500      3  0.5000\n\
             files  2 (see `--json`)\nids    [1,2]\n"
        );
        let long = "k".repeat(70_000);
        let shown = json!({ "a": [{ long.clone(): 1 }], long.clone(): 2 });
        assert!(lines(&shown).contains(&format!("{long}  2\n")));
    }
}
