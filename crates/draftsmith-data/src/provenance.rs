//! The provenance of a file of responses: everything that must be equal to build it again.
//!
//! It is stored in the file's key-value metadata, with a key `draftsmith.<field>` and a value in
//! JSON for each field. It holds no timestamps and no paths, so equal inputs give equal bytes.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::{Map, Value};

use crate::prompts::{LengthBounds, SourceWeight, SplitRange};

/// The prefix of the metadata keys.
const KEY_PREFIX: &str = "draftsmith.";

/// Everything that a response file depends on. Hashes are hex SHA-256.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Provenance {
    /// The version of draftsmith that wrote the file.
    pub version: String,
    /// The hash of the target's weights and config.
    pub target: String,
    /// The hash of the draft's weights and config; `None` without a draft.
    pub draft: Option<String>,
    /// The hash of the target's `tokenizer.json`.
    pub tokenizer: String,
    /// The hash of the chat template's source; `None` if prompts were encoded without a template.
    pub chat_template: Option<String>,
    /// The text of each special token that the chat template can use, by name.
    pub special_tokens: BTreeMap<String, String>,
    /// The tokens that end a response.
    pub eos_token_ids: Vec<u32>,
    /// The stop strings, which end a response too. Not stored if empty.
    pub stop_strings: Vec<String>,
    /// The prompt files, in the order they were read.
    pub prompts: Vec<PromptFile>,
    /// The maximum number of prompts from each file, or from all sources together if there are
    /// weights. `None` for no limit.
    pub limit: Option<u64>,
    /// The weight and number of files of each source, in the order of the files. Not stored if
    /// empty.
    pub weights: Vec<SourceWeight>,
    /// The split to which prompts were restricted; `None`, which is not stored, for all prompts.
    pub split: Option<SplitRange>,
    /// The bounds on the lengths of prompts and responses. Not stored if there are none.
    pub lengths: LengthBounds,
    /// Whether duplicate prompts were kept. Not stored if false.
    pub keep_duplicates: bool,
    /// Whether responses are the answers in the prompt files rather than the target's.
    pub existing_responses: bool,
    /// The target's name on the servers that generated the responses; `None`, which is not stored,
    /// for a local target.
    pub served_model: Option<String>,
    /// The number of most probable tokens whose probabilities those servers returned, if labels
    /// were computed from these. Otherwise `None`, which is not stored.
    pub served_log_probs: Option<u32>,
    /// The maximum mean `target_outside_mass` of a response. Responses with more were dropped.
    /// `None`, which is not stored, if all probabilities are known.
    pub max_outside_mass: Option<f64>,
    /// The sampling temperature of both models; 0 is greedy.
    pub temperature: f64,
    /// The probability mass that top-p (nucleus) sampling keeps; 1 keeps all.
    pub top_p: f64,
    /// The number of most probable tokens that top-k keeps; `None` keeps all.
    pub top_k: Option<u32>,
    /// The smallest probability that min-p keeps, as a fraction of the largest. `None`, which is
    /// not stored, keeps all.
    pub min_p: Option<f64>,
    /// The repetition penalty of both models; 1, which is not stored, changes nothing.
    pub repetition_penalty: f64,
    /// The maximum length of a response, in tokens.
    pub max_new_tokens: u64,
    /// The seed of every draw.
    pub seed: u64,
    /// The type in which the models computed: [`Provenance::F32`], which is not stored, or `bf16`.
    pub dtype: String,
}

/// Returns the fields that are not stored at certain values, with these values. Earlier versions
/// had no such fields.
fn defaults() -> [(&'static str, Value); 11] {
    [
        ("stop_strings", Value::Array(Vec::new())),
        ("weights", Value::Array(Vec::new())),
        ("split", Value::Null),
        ("lengths", Value::Object(Map::new())),
        ("keep_duplicates", false.into()),
        ("served_model", Value::Null),
        ("served_log_probs", Value::Null),
        ("max_outside_mass", Value::Null),
        ("min_p", Value::Null),
        ("repetition_penalty", no_penalty().into()),
        ("dtype", Provenance::F32.into()),
    ]
}

impl Serialize for Provenance {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = self.all_fields();
        for (key, value) in defaults() {
            if fields[key] == value {
                fields.shift_remove(key);
            }
        }
        fields.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Provenance {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Map::deserialize(deserializer)?;
        for (key, value) in defaults() {
            fields.entry(key).or_insert(value);
        }
        Self::deserialize(Value::Object(fields)).map_err(de::Error::custom)
    }
}

impl Provenance {
    /// Returns whether tokens were drawn from the unmodified distributions: temperature 1, no
    /// truncation and no penalty.
    pub fn is_raw(&self) -> bool {
        let served = (self.temperature, self.top_p, self.top_k, self.min_p);
        served == (1.0, 1.0, None, None) && is_no_penalty(&self.repetition_penalty)
    }

    /// The `dtype` of models that computed in f32.
    pub const F32: &'static str = "f32";

    /// Finds the fields in which `self` and `other` differ, in the order of declaration.
    pub fn differences(&self, other: &Self) -> Vec<FieldDifference> {
        fields_differences(self.all_fields(), &other.all_fields())
    }

    /// Returns the fields that files store and their values, in the order of declaration.
    pub fn fields(&self) -> Map<String, Value> {
        fields_of(self)
    }

    /// Returns all fields and values in the order of declaration, including those that files omit.
    pub(crate) fn all_fields(&self) -> Map<String, Value> {
        fields_in(Self::serialize(self, serde_json::value::Serializer))
    }
}

/// Returns the repetition penalty that changes nothing, which is the default in files.
pub fn no_penalty() -> f64 {
    1.0
}

/// Returns whether a repetition penalty changes nothing, so that it is not stored.
pub fn is_no_penalty(penalty: &f64) -> bool {
    *penalty == no_penalty()
}

/// A prompt file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptFile {
    /// The file's name, without its directory.
    pub name: String,
    /// The hash of the file.
    pub hash: String,
}

/// A field in which two provenances differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldDifference {
    /// The field's name. In a list of files, the index of the first file that differs follows.
    pub key: String,
    /// The field's value in the first provenance, as JSON text.
    pub left: String,
    /// The field's value in the second provenance, as JSON text.
    pub right: String,
}

impl fmt::Display for FieldDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is {} in the one and {} in the other", self.key, self.left, self.right)
    }
}

/// Returns the fields of a provenance that are stored, in the order of declaration.
pub(crate) fn fields_of(provenance: &impl Serialize) -> Map<String, Value> {
    fields_in(serde_json::to_value(provenance))
}

fn fields_in(value: serde_json::Result<Value>) -> Map<String, Value> {
    match value {
        Ok(Value::Object(fields)) => fields,
        other => unreachable!("a struct with string keys serializes to an object: {other:?}"),
    }
}

/// Finds the fields in which `left` and `right`, which have the same fields, differ.
pub(crate) fn fields_differences(
    left: Map<String, Value>,
    right: &Map<String, Value>,
) -> Vec<FieldDifference> {
    let differing = left.into_iter().filter(|(key, left)| *left != right[key]);
    differing
        .map(|(key, left)| match (&left, &right[&key]) {
            // In lists of files, name the first file that differs.
            (Value::Array(left), Value::Array(right))
                if left.len() == right.len() && left.iter().all(Value::is_object) =>
            {
                let at = left.iter().zip(right).take_while(|(left, right)| left == right).count();
                difference(format!("{key}[{at}]"), &left[at], &right[at])
            }
            (left, right) => difference(key, left, right),
        })
        .collect()
}

fn difference(key: String, left: &Value, right: &Value) -> FieldDifference {
    FieldDifference { key, left: left.to_string(), right: right.to_string() }
}

/// Converts fields to metadata entries: `draftsmith.<field>` and JSON text.
pub(crate) fn fields_to_entries(fields: Map<String, Value>) -> Vec<(String, String)> {
    fields
        .into_iter()
        .map(|(key, value)| (KEY_PREFIX.to_owned() + &key, value.to_string()))
        .collect()
}

/// Reads the fields that [`fields_to_entries`] wrote. Entries of other programs are ignored.
///
/// # Errors
/// If there are no such fields, or a value is not JSON.
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
        return Err(format!("there is no `{KEY_PREFIX}*` key: draftsmith did not write this file"));
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
            special_tokens: [("eos_token".to_owned(), "</s>".to_owned())].into(),
            eos_token_ids: vec![2, 7],
            stop_strings: Vec::new(),
            prompts: vec![PromptFile { name: "set.jsonl".into(), hash: "dd".into() }],
            limit: Some(10),
            weights: Vec::new(),
            split: None,
            lengths: LengthBounds::default(),
            keep_duplicates: false,
            existing_responses: false,
            served_model: None,
            served_log_probs: None,
            max_outside_mass: None,
            temperature: 0.7,
            top_p: 0.95,
            top_k: None,
            min_p: None,
            repetition_penalty: 1.0,
            max_new_tokens: 128,
            seed: u64::MAX,
            dtype: Provenance::F32.into(),
        }
    }

    fn read(entries: &[(String, String)]) -> Result<Provenance, String> {
        let entries = entries.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        serde_json::from_value(Value::Object(fields_from_entries(entries)?))
            .map_err(|e| e.to_string())
    }

    fn entries() -> Vec<(String, String)> {
        fields_to_entries(provenance().fields())
    }

    #[test]
    fn entries_round_trip() {
        let mut entries = entries();
        assert_eq!(entries[0], ("draftsmith.version".into(), "\"0.1.0\"".into()));
        entries.push(("pandas".into(), "not ours".into()));
        assert_eq!(read(&entries).unwrap(), provenance());
    }

    #[test]
    fn only_types_other_than_f32_are_stored() {
        let is_named = |entries: &[(String, String)]| {
            entries.iter().any(|(key, value)| key == "draftsmith.dtype" && value == "\"bf16\"")
        };
        assert!(entries().iter().all(|(key, _)| key != "draftsmith.dtype"));
        let reduced = Provenance { dtype: "bf16".into(), ..provenance() };
        let entries = fields_to_entries(reduced.fields());
        assert!(is_named(&entries));
        assert_eq!(read(&entries).unwrap(), reduced);
        for (left, right, expected) in [
            (&provenance(), &reduced, "`dtype` is \"f32\" in the one and \"bf16\" in the other"),
            (&reduced, &provenance(), "`dtype` is \"bf16\" in the one and \"f32\" in the other"),
        ] {
            let differences = left.differences(right);
            assert_eq!(differences.len(), 1);
            assert_eq!(differences[0].to_string(), expected);
        }
    }

    #[test]
    fn a_field_that_only_one_file_stores_is_a_difference() {
        let messages = |one: &Provenance, other: &Provenance| {
            one.differences(other).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let penalised = Provenance { repetition_penalty: 1.3, ..provenance() };
        let entries = fields_to_entries(penalised.fields());
        assert_eq!(read(&entries).unwrap(), penalised);
        assert!(
            provenance()
                .fields()
                .keys()
                .all(|key| !["min_p", "repetition_penalty"].contains(&&**key))
        );
        let expected = "`repetition_penalty` is 1.3 in the one and 1.0 in the other";
        assert_eq!(messages(&penalised, &provenance()), [expected]);
        let stopped = Provenance { stop_strings: vec!["\n".into()], ..provenance() };
        let expected = "`stop_strings` is [] in the one and [\"\\n\"] in the other";
        assert_eq!(messages(&provenance(), &stopped), [expected]);
        let lengths = LengthBounds { max_prompt_tokens: Some(9), ..LengthBounds::default() };
        let chosen = Provenance {
            weights: vec![SourceWeight { num_files: 1, weight: 2.0 }],
            split: Some(SplitRange { name: "train".into(), from: 0.0, to: 0.5 }),
            lengths,
            keep_duplicates: true,
            ..provenance()
        };
        assert_eq!(read(&fields_to_entries(chosen.fields())).unwrap(), chosen);
        assert_eq!(
            messages(&provenance(), &chosen),
            [
                "`weights` is [] in the one and [{\"num_files\":1,\"weight\":2.0}] in the other",
                "`split` is null in the one and {\"name\":\"train\",\"from\":0.0,\"to\":0.5} in the other",
                "`lengths` is {} in the one and {\"max_prompt_tokens\":9} in the other",
                "`keep_duplicates` is false in the one and true in the other",
            ]
        );
        let min_p = Provenance { min_p: Some(0.1), ..provenance() };
        assert_eq!(
            messages(&provenance(), &min_p),
            ["`min_p` is null in the one and 0.1 in the other"]
        );
        assert_eq!(
            messages(&min_p, &provenance()),
            ["`min_p` is 0.1 in the one and null in the other"]
        );
    }

    #[test]
    fn missing_unknown_and_broken_entries_are_named() {
        let mut some = entries();
        some.retain(|(key, _)| key != "draftsmith.seed");
        assert!(read(&some).unwrap_err().contains("missing field `seed`"));
        some.push(("draftsmith.seed".into(), "x".into()));
        assert!(read(&some).unwrap_err().contains("`draftsmith.seed` is not JSON"));
        let mut some = entries();
        some.push(("draftsmith.colour".into(), "1".into()));
        assert!(read(&some).unwrap_err().contains("unknown field `colour`"));
        assert!(read(&[]).unwrap_err().contains("no `draftsmith.*` key"));
    }

    #[test]
    fn differences_name_every_field_and_the_file_of_a_list() {
        let mut other = provenance();
        assert_eq!(provenance().differences(&other), []);
        other.eos_token_ids = vec![2, 3];
        other.draft = None;
        let messages = |other: &Provenance| {
            let differences = provenance().differences(other);
            differences.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let draft = "`draft` is \"bb\" in the one and null in the other";
        let eos = "`eos_token_ids` is [2,7] in the one and [2,3] in the other";
        assert_eq!(messages(&other), [draft, eos]);
        let mut other = provenance();
        other.prompts[0].hash = "ff".into();
        assert!(
            messages(&other)[0].starts_with("`prompts[0]` is {\"name\":\"set.jsonl\","),
            "{other:?}"
        );
        other.prompts.clear();
        assert!(messages(&other)[0].starts_with("`prompts` is [{"), "{other:?}");
    }
}
