//! Reads and writes the keys that tuning adds to an export's `config.json` after training.
//!
//! Readers of the head or adapter ignore these keys. Retraining writes a new `config.json` without
//! them, because they describe the old weights.

use std::path::Path;

use anyhow::{Context, Result};
use draftsmith_files::{parse_json, parse_json_value, read_text, write_whole};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Reads one key from the `config.json` in `dir`; `None` if the key is absent.
///
/// # Errors
/// If `config.json` cannot be read, or the value has another type.
pub fn read_key<T: DeserializeOwned>(dir: &Path, key: &str) -> Result<Option<T>> {
    let Some(value) = read_config(dir)?.remove(key) else {
        return Ok(None);
    };
    Ok(Some(parse_json_value(&dir.join("config.json"), key, value)?))
}

/// Returns a key's name with the path of its `config.json`, for messages.
pub fn named(dir: &Path, key: &str) -> String {
    format!("key `{key}` of `{}`", dir.join("config.json").display())
}

/// Writes all keys or none into the `config.json` in `dir`, which is made if it is missing. Other
/// keys keep their order.
///
/// # Errors
/// If `config.json` cannot be read or replaced.
pub fn write_keys(dir: &Path, keys: Vec<(&str, Value)>) -> Result<()> {
    let is_new = !dir.join("config.json").exists();
    let mut config = if is_new { Map::new() } else { read_config(dir)? };
    std::fs::create_dir_all(dir).with_context(|| format!("cannot write `{}`", dir.display()))?;
    for (key, value) in keys {
        config.insert(key.to_owned(), value);
    }
    let text = serde_json::to_string_pretty(&config)?;
    Ok(write_whole(&dir.join("config.json"), text + "\n")?)
}

fn read_config(dir: &Path) -> Result<Map<String, Value>> {
    let path = dir.join("config.json");
    let text = read_text(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
    Ok(parse_json(&path, text.as_bytes())?)
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
            write_keys(dir.path(), keys).expect("written");
            let read = read_key::<Value>(dir.path(), "tuned").expect("reads");
            assert_eq!(read, Some(json!({ "fast": fast })));
        }
        let config = read_config(dir.path()).expect("reads");
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
