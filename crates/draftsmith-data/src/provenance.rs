//! Where a file of responses came from: what would have to be the same to make the same file again.
//!
//! It stands in the file's key-value metadata, one key a field: `draftsmith.<field>`, each value
//! JSON text. There are no timestamps and no paths, so equal inputs give equal bytes.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::prompts::{LengthBounds, SourceWeight, SplitRange};

/// What the metadata keys begin with.
const KEY_PREFIX: &str = "draftsmith.";

/// Everything that a response file depends on. Hashes are hex SHA-256.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The version of draftsmith that wrote the file.
    pub version: String,
    /// Hash of the target's weights and config.
    pub target: String,
    /// Hash of the draft's weights and config; `None` where no draft was given.
    pub draft: Option<String>,
    /// Hash of the target's `tokenizer.json`.
    pub tokenizer: String,
    /// Hash of the chat template's source; `None` where prompts were encoded as they are.
    pub chat_template: Option<String>,
    /// The special tokens that the chat template may name, by name.
    pub special_tokens: BTreeMap<String, String>,
    /// The tokens that end a response.
    pub eos_token_ids: Vec<u32>,
    /// What else ends a response. Files do not name an empty list, as none did that were written before
    /// there was a choice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop_strings: Vec<String>,
    /// The prompt files, in the order they were read.
    pub prompts: Vec<PromptFile>,
    /// How many prompts of each file there are at most, or, with weights, of all sources together;
    /// `None` for all.
    pub limit: Option<u64>,
    /// What share of the prompts each source has, and how many of the files are its own, in their
    /// order. Files do not name it where nothing is weighed, nor the three below where they say nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<SourceWeight>,
    /// The split that prompts were taken of; `None` for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<SplitRange>,
    /// Which lengths were left out.
    #[serde(default, skip_serializing_if = "LengthBounds::is_none")]
    pub lengths: LengthBounds,
    /// Whether prompts were taken as often as they stand in the files.
    #[serde(default, skip_serializing_if = "is_false")]
    pub keep_duplicates: bool,
    /// Whether the file's own answers were taken as responses, instead of the target's.
    pub existing_responses: bool,
    /// The name of the target on the servers that wrote the responses; `None`, and not named in files, where
    /// it wrote them itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served_model: Option<String>,
    /// Of how many of its most probable tokens those servers gave the probabilities, which labels are made of;
    /// `None`, and not named in files, where labels are the target's own or those of greedy responses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served_log_probs: Option<u32>,
    /// Responses whose mean `target_outside_mass` is larger were left out; `None`, and not named in files, where
    /// nothing is outside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_outside_mass: Option<f64>,
    /// Sampling temperature of both models; 0 is greedy.
    pub temperature: f64,
    /// Nucleus mass that is kept; 1 keeps all.
    pub top_p: f64,
    /// Number of most probable tokens that are kept; `None` keeps all.
    pub top_k: Option<u32>,
    /// The least probability that is kept, as a share of the largest; `None` keeps all. Files do not
    /// name it then, as none did that were written before there was a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// The repetition penalty of both models. 1 is none, and files do not name it then.
    #[serde(default = "no_penalty", skip_serializing_if = "is_no_penalty")]
    pub repetition_penalty: f64,
    /// The longest response, in tokens.
    pub max_new_tokens: u64,
    /// The seed of every draw.
    pub seed: u64,
    /// The type that the models computed in: [`Provenance::F32`] or `bf16`. Files in f32 do not name
    /// it, as none did that were written before there was a choice.
    #[serde(default = "f32_name", skip_serializing_if = "is_f32")]
    pub dtype: String,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

impl Provenance {
    /// Whether tokens were chosen by the models' own distributions: at temperature 1, with none left out
    /// and none penalised.
    pub fn is_raw(&self) -> bool {
        let served = (self.temperature, self.top_p, self.top_k, self.min_p);
        served == (1.0, 1.0, None, None) && is_no_penalty(&self.repetition_penalty)
    }
}

/// The repetition penalty that changes nothing, which files mean that name none.
pub fn no_penalty() -> f64 {
    1.0
}

/// Whether a repetition penalty changes nothing: then files do not name it.
pub fn is_no_penalty(penalty: &f64) -> bool {
    *penalty == no_penalty()
}

fn f32_name() -> String {
    Provenance::F32.to_owned()
}

fn is_f32(dtype: &str) -> bool {
    dtype == Provenance::F32
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

/// A field in which two provenances differ, with both values as JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The field's name, with the place in its list where that is all that differs.
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
    /// The `dtype` of models that computed in f32.
    pub const F32: &'static str = "f32";

    /// The fields, in the order of declaration, in which `self` and `other` differ.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        fields_differences(self.fields(), other.fields())
    }

    /// The fields and their values, in the order of declaration, as files have them: some are left out
    /// where they say nothing.
    #[must_use]
    pub fn fields(&self) -> Map<String, Value> {
        fields_of(self)
    }
}

/// The fields of a provenance, in the order of declaration.
pub(crate) fn fields_of(provenance: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(provenance) {
        Ok(Value::Object(fields)) => fields,
        other => unreachable!("a struct with string keys serializes to an object: {other:?}"),
    }
}

/// What fields stand for that files leave out, as they did before there was a choice.
fn fill_in(mut fields: Map<String, Value>) -> Map<String, Value> {
    let left_out: [(&str, Value); 11] = [
        ("weights", Value::Array(Vec::new())),
        ("split", Value::Null),
        ("lengths", Value::Object(Map::new())),
        ("keep_duplicates", false.into()),
        ("served_model", Value::Null),
        ("served_log_probs", Value::Null),
        ("max_outside_mass", Value::Null),
        ("stop_strings", Value::Array(Vec::new())),
        ("min_p", Value::Null),
        ("repetition_penalty", 1.0.into()),
        ("dtype", Provenance::F32.into()),
    ];
    for (key, value) in left_out {
        fields.entry(key).or_insert(value);
    }
    fields
}

/// Those of `left`'s fields that are others in `right`, which has the same ones, but for some that
/// either may leave out.
pub(crate) fn fields_differences(
    left: Map<String, Value>,
    right: Map<String, Value>,
) -> Vec<Difference> {
    let [left, right] = [left, right].map(fill_in);
    let differing = left.into_iter().filter(|(key, left)| *left != right[key]);
    differing
        .map(|(key, left)| match (&left, &right[&key]) {
            // Of a list of files, the first that is another.
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

fn difference(key: String, left: &Value, right: &Value) -> Difference {
    Difference { key, left: left.to_string(), right: right.to_string() }
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
    fn only_what_was_not_computed_in_f32_names_its_type() {
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
    fn what_one_of_two_leaves_out_is_a_difference() {
        let told = |one: &Provenance, other: &Provenance| {
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
        assert_eq!(told(&penalised, &provenance()), [expected]);
        let stopped = Provenance { stop_strings: vec!["\n".into()], ..provenance() };
        let expected = "`stop_strings` is [] in the one and [\"\\n\"] in the other";
        assert_eq!(told(&provenance(), &stopped), [expected]);
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
            told(&provenance(), &chosen),
            [
                "`weights` is [] in the one and [{\"num_files\":1,\"weight\":2.0}] in the other",
                "`split` is null in the one and {\"name\":\"train\",\"from\":0.0,\"to\":0.5} in the other",
                "`lengths` is {} in the one and {\"max_prompt_tokens\":9} in the other",
                "`keep_duplicates` is false in the one and true in the other",
            ]
        );
        let min_p = Provenance { min_p: Some(0.1), ..provenance() };
        assert_eq!(
            told(&provenance(), &min_p),
            ["`min_p` is null in the one and 0.1 in the other"]
        );
        assert_eq!(
            told(&min_p, &provenance()),
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
        let told = |other: &Provenance| {
            let differences = provenance().differences(other);
            differences.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let draft = "`draft` is \"bb\" in the one and null in the other";
        let eos = "`eos_token_ids` is [2,7] in the one and [2,3] in the other";
        assert_eq!(told(&other), [draft, eos]);
        let mut other = provenance();
        other.prompts[0].hash = "ff".into();
        assert!(
            told(&other)[0].starts_with("`prompts[0]` is {\"name\":\"set.jsonl\","),
            "{other:?}"
        );
        other.prompts.clear();
        assert!(told(&other)[0].starts_with("`prompts` is [{"), "{other:?}");
    }
}
