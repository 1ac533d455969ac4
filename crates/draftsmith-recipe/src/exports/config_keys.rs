//! Reads and writes the keys that tuning adds to an export's `config.json` after training.
//!
//! Readers of the head or adapter ignore these keys. Retraining writes a new `config.json` without
//! them, because they describe the old weights.

use std::path::Path;

use anyhow::Result;
use draftsmith_files::{parse_json, parse_json_value, read_file, write_json};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Reads one key from the `config.json` in `dir`; `None` if the key is absent.
///
/// # Errors
/// If `config.json` cannot be read, or the value has another type.
pub fn read_key<T: DeserializeOwned>(dir: &Path, key: &str) -> Result<Option<T>> {
    let path = dir.join("config.json");
    let value = read_keys(&path)?.remove(key);
    Ok(value.map(|value| parse_json_value(&path, key, value)).transpose()?)
}

/// Returns a key's name with the path of its `config.json`, for messages.
pub fn named(dir: &Path, key: &str) -> String {
    format!("key `{key}` of `{}`", dir.join("config.json").display())
}

/// Writes all keys or none into a JSON file, which is made if it is missing. Other keys keep their
/// order.
///
/// # Errors
/// If the file cannot be read or replaced.
pub fn write_keys<'k>(path: &Path, keys: impl IntoIterator<Item = (&'k str, Value)>) -> Result<()> {
    let mut all = if path.exists() { read_keys(path)? } else { Map::new() };
    all.extend(keys.into_iter().map(|(key, value)| (key.to_owned(), value)));
    Ok(write_json(path, &all)?)
}

/// Reads a JSON file that holds an object.
pub(crate) fn read_keys(path: &Path) -> Result<Map<String, Value>> {
    Ok(parse_json(path, &read_file(path)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn written_keys_read_back_and_others_keep_their_order() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("config.json");
        std::fs::write(&path, r#"{"zeta": 1, "exit_layer": 2, "alpha": {"b": 0.25, "a": []}}"#)
            .expect("written");
        assert_eq!(read_key::<Value>(dir.path(), "tuned").expect("reads"), None);
        for fast in [1, 2] {
            let keys = vec![("tuned", json!({ "fast": fast })), ("draft_model", json!([]))];
            write_keys(&path, keys).expect("written");
            let read = read_key::<Value>(dir.path(), "tuned").expect("reads");
            assert_eq!(read, Some(json!({ "fast": fast })));
        }
        let config = read_keys(&path).expect("reads");
        let expected = ["zeta", "exit_layer", "alpha", "tuned", "draft_model"];
        assert_eq!(config.keys().collect::<Vec<_>>(), expected);
        assert_eq!(config["alpha"].to_string(), r#"{"b":0.25,"a":[]}"#);
        let names: Vec<_> = std::fs::read_dir(dir.path()).expect("listed").collect();
        assert_eq!(names.len(), 1, "no temporary file is left");
    }

    #[test]
    fn errors_name_the_invalid_part() {
        for (config, expected) in
            [("{", "config.json"), ("[]", "config.json"), (r#"{"tuned": 1}"#, "tuned")]
        {
            let dir = tempfile::tempdir().expect("a temporary directory");
            std::fs::write(dir.path().join("config.json"), config).expect("written");
            let error = read_key::<String>(dir.path(), "tuned").expect_err("refused");
            let message = format!("{error:#}");
            assert!(message.contains(expected) && message.contains("config.json"), "{message}");
        }
        assert!(read_key::<String>(Path::new("absent"), "tuned").is_err());
    }
}
