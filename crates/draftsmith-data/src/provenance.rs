//! Where a file of responses came from: what would have to be the same to make the same file again.
//!
//! It stands in the file's key-value metadata, one key a field: `draftsmith.<field>`, each value
//! JSON text. There are no timestamps and no paths, so equal inputs give equal bytes.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What the metadata keys begin with.
const KEY_PREFIX: &str = "draftsmith.";

/// Everything that a response file depends on. Hashes are hex SHA-256.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The version of draftsmith that wrote the file.
    pub version: String,
    /// Hash of the target's weights and config.
    pub target: String,
    /// Hash of the draft's weights and config; `None` where no draft was given.
    pub draft: Option<String>,
    /// Hash of the token → id map that target and draft share.
    pub tokenizer: String,
    /// Hash of the chat template's source; `None` where prompts were encoded as they are.
    pub chat_template: Option<String>,
    /// The prompt files, in the order they were read.
    pub prompts: Vec<PromptFile>,
    /// At most this many prompts of each file; `None` for all.
    pub limit: Option<u64>,
    /// Whether the file's own answers were taken as responses, instead of the target's.
    pub existing_responses: bool,
    /// Sampling temperature of both models; 0 is greedy.
    pub temperature: f64,
    /// Nucleus mass that is kept; 1 keeps all.
    pub top_p: f64,
    /// Number of most probable tokens that are kept; `None` keeps all.
    pub top_k: Option<u32>,
    /// The longest response, in tokens.
    pub max_new_tokens: u64,
    /// The seed of every draw.
    pub seed: u64,
}

/// A prompt file as provenance knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptFile {
    /// The file's name, without its directory.
    pub name: String,
    /// Hash of its bytes.
    pub hash: String,
}

/// The first field in which two provenances differ, with both values as JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The field's name.
    pub key: String,
    /// Its value in the one.
    pub left: String,
    /// Its value in the other.
    pub right: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is {} in the one and {} in the other", self.key, self.left, self.right)
    }
}

impl Provenance {
    /// The first field, in the order of declaration, in which `self` and `other` differ.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<Difference> {
        fields_difference(fields_of(self), &fields_of(other))
    }

    /// The metadata entries: `draftsmith.<field>` and JSON text, in the order of declaration.
    pub(crate) fn to_entries(&self) -> Vec<(String, String)> {
        fields_to_entries(fields_of(self))
    }

    /// Reads what [`Self::to_entries`] wrote, among entries of others.
    ///
    /// # Errors
    /// What is missing, unknown or not JSON.
    pub(crate) fn from_entries<'a>(
        entries: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, String> {
        let fields = fields_from_entries(entries)?;
        serde_json::from_value(Value::Object(fields)).map_err(|e| e.to_string())
    }
}

/// The fields of a provenance, in the order of declaration.
pub(crate) fn fields_of(provenance: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(provenance) {
        Ok(Value::Object(fields)) => fields,
        other => unreachable!("a struct with string keys serializes to an object: {other:?}"),
    }
}

/// The first of `left`'s fields that is another in `right`, which has the same ones.
pub(crate) fn fields_difference(
    left: Map<String, Value>,
    right: &Map<String, Value>,
) -> Option<Difference> {
    left.into_iter().find_map(|(key, left)| {
        let right = &right[&key];
        (left != *right).then(|| Difference {
            left: left.to_string(),
            right: right.to_string(),
            key,
        })
    })
}

/// The metadata entries of fields: `draftsmith.<field>` and JSON text.
pub(crate) fn fields_to_entries(fields: Map<String, Value>) -> Vec<(String, String)> {
    fields
        .into_iter()
        .map(|(key, value)| (KEY_PREFIX.to_owned() + &key, value.to_string()))
        .collect()
}

/// The fields that [`fields_to_entries`] wrote, among entries of others.
///
/// # Errors
/// If there is none, or one that is not JSON.
pub(crate) fn fields_from_entries<'a>(
    entries: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<Map<String, Value>, String> {
    let mut fields = Map::new();
    for (key, text) in entries {
        let Some(field) = key.strip_prefix(KEY_PREFIX) else { continue };
        let value = serde_json::from_str(text)
            .map_err(|e| format!("the value of `{key}` is not JSON: {e}"))?;
        fields.insert(field.to_owned(), value);
    }
    if fields.is_empty() {
        return Err(format!("there is no `{KEY_PREFIX}*` key: draftsmith did not write it"));
    }
    Ok(fields)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn provenance() -> Provenance {
        Provenance {
            version: "0.1.0".into(),
            target: "aa".into(),
            draft: Some("bb".into()),
            tokenizer: "cc".into(),
            chat_template: None,
            prompts: vec![PromptFile { name: "set.jsonl".into(), hash: "dd".into() }],
            limit: Some(10),
            existing_responses: false,
            temperature: 0.7,
            top_p: 0.95,
            top_k: None,
            max_new_tokens: 128,
            seed: u64::MAX,
        }
    }

    fn read(entries: &[(String, String)]) -> Result<Provenance, String> {
        Provenance::from_entries(entries.iter().map(|(k, v)| (k.as_str(), v.as_str())))
    }

    #[test]
    fn entries_round_trip() {
        let mut entries = provenance().to_entries();
        assert_eq!(entries[0], ("draftsmith.version".into(), "\"0.1.0\"".into()));
        entries.push(("pandas".into(), "not ours".into()));
        assert_eq!(read(&entries).unwrap(), provenance());
    }

    #[test]
    fn missing_unknown_and_broken_entries_are_named() {
        let mut entries = provenance().to_entries();
        entries.retain(|(key, _)| key != "draftsmith.seed");
        assert!(read(&entries).unwrap_err().contains("missing field `seed`"));
        entries.push(("draftsmith.seed".into(), "x".into()));
        assert!(read(&entries).unwrap_err().contains("`draftsmith.seed` is not JSON"));
        let mut entries = provenance().to_entries();
        entries.push(("draftsmith.colour".into(), "1".into()));
        assert!(read(&entries).unwrap_err().contains("unknown field `colour`"));
        assert!(read(&[]).unwrap_err().contains("no `draftsmith.*` key"));
    }

    #[test]
    fn difference_names_the_first_field() {
        let mut other = provenance();
        assert_eq!(provenance().difference(&other), None);
        other.seed = 3;
        other.draft = None;
        let difference = provenance().difference(&other).unwrap();
        assert_eq!(difference.to_string(), "`draft` is \"bb\" in the one and null in the other");
    }
}
