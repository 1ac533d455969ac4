//! The provenance of a rollouts file: the provenance of its responses, and everything else that
//! rollouts depend on.

use draftsmith_theory::{HeadTiming, RoundForwards};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::provenance::{
    FieldDifference, Provenance, fields_differences, fields_from_entries, fields_of,
    fields_to_entries,
};

/// Everything that a rollouts file depends on. Hashes are hex SHA-256.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutProvenance {
    /// The provenance of the responses. Its `draft` is the hash of the draft model or the adapter,
    /// and never `None`.
    pub responses: Provenance,
    /// The drafter's name, as in the file's name, such as `draft` or `self_draft_2`.
    pub drafter: String,
    /// The prompt set's name, as in the file's name, such as `validation` or `test`.
    pub set: String,
    /// The acceptance head; `None` without one.
    pub head: Option<RolloutHead>,
    /// The largest number of candidates in a rollout.
    pub max_length: u32,
    /// The largest number of tokens of a prompt and its response together.
    pub context: u32,
    /// The number of draft forwards that a round takes.
    #[serde(default, skip_serializing_if = "RoundForwards::is_each_step")]
    pub forwards: RoundForwards,
    /// The hash of the data set that holds the responses ([`DataSet::hash`]); `None` if the target
    /// generated them for this file.
    ///
    /// [`DataSet::hash`]: crate::DataSet::hash
    pub data: Option<String>,
}

/// The acceptance head that predicted the acceptance of the candidates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutHead {
    /// The hash of the head's weights and shape.
    pub hash: String,
    /// Whether the head predicts when a candidate is drawn (look-ahead) or before, rather than after
    /// the draft has read the candidate.
    pub looks_ahead: bool,
    /// Whether the head predicts before the candidate is drawn. `false` is not stored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub before_draw: bool,
}

impl RolloutHead {
    /// Describes a head that predicts at `timing`. `hash` is that of its weights and shape.
    pub fn new(hash: String, timing: HeadTiming) -> Self {
        let before_draw = timing == HeadTiming::BeforeDraw;
        Self { hash, looks_ahead: timing.looks_ahead(), before_draw }
    }

    /// Returns when the head predicts.
    pub fn timing(&self) -> HeadTiming {
        if self.before_draw {
            HeadTiming::BeforeDraw
        } else {
            HeadTiming::of_reader(self.looks_ahead)
        }
    }
}

/// The field of the responses' provenance. Files store its inner fields next to the others.
const RESPONSES: &str = "responses";
/// The other fields of [`RolloutProvenance`].
const OWN_FIELDS: [&str; 7] =
    ["drafter", "set", "head", "max_length", "context", "forwards", "data"];

impl RolloutProvenance {
    /// Returns whether tokens are always the most probable ones: temperature 0.
    pub fn is_greedy(&self) -> bool {
        self.responses.temperature == 0.0
    }

    /// Returns `greedy` or `sampled`, the decoding as written in file names.
    pub fn decoding(&self) -> &'static str {
        if self.is_greedy() { "greedy" } else { "sampled" }
    }

    /// Finds the fields in which `self` and `other` differ, in the order of declaration.
    pub fn differences(&self, other: &Self) -> Vec<FieldDifference> {
        let all = |it: &Self| it.with_own_fields(it.responses.all_fields());
        fields_differences(all(self), &all(other))
    }

    /// Converts the provenance to metadata entries: `draftsmith.<field>` and JSON text, in the
    /// order of declaration.
    pub(super) fn to_entries(&self) -> Vec<(String, String)> {
        fields_to_entries(self.fields())
    }

    /// Reads the entries that [`Self::to_entries`] made. Entries of other programs are ignored.
    ///
    /// # Errors
    /// If an entry is missing, unknown or not JSON. The error says which.
    pub(super) fn from_entries<'a>(
        entries: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, String> {
        let fields = fields_from_entries(entries)?;
        let (mut own, responses): (Map<_, _>, Map<_, _>) =
            fields.into_iter().partition(|(key, _)| OWN_FIELDS.contains(&key.as_str()));
        own.insert(RESPONSES.to_owned(), Value::Object(responses));
        serde_json::from_value(Value::Object(own)).map_err(|e| e.to_string())
    }

    /// Checks that there was a drafter and that it may propose candidates.
    ///
    /// # Errors
    /// If one of them does not hold. The error says what is wrong and what is expected.
    pub(super) fn validate(&self) -> Result<(), String> {
        if self.responses.draft.is_none() {
            return Err("`draft` is null, it must be the hash of the drafter".to_owned());
        }
        if self.max_length == 0 {
            return Err("`max_length` is 0, it must be at least 1".to_owned());
        }
        Ok(())
    }

    /// Returns the fields that files store and their values, in the order of declaration.
    pub fn fields(&self) -> Map<String, Value> {
        self.with_own_fields(self.responses.fields())
    }

    fn with_own_fields(&self, mut fields: Map<String, Value>) -> Map<String, Value> {
        fields.extend(fields_of(self).into_iter().filter(|(key, _)| key != RESPONSES));
        fields
    }
}
