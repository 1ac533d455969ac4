//! Where a rollouts file came from: what responses depend on, and what rollouts depend on besides.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::provenance::{
    Difference, Provenance, fields_differences, fields_from_entries, fields_of, fields_to_entries,
};

/// Everything that a rollouts file depends on. Hashes are hex SHA-256.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutProvenance {
    /// What the responses depend on. `draft` is the drafter's hash, of a draft model or an adapter
    /// alike, and never `None`.
    pub responses: Provenance,
    /// The drafter's name, as in the file's name: `draft`, `self_draft_2`.
    pub drafter: String,
    /// The prompt set's name, as in the file's name: `validation`, `test`.
    pub set: String,
    /// The acceptance head; `None` where there was none.
    pub head: Option<RolloutHead>,
    /// The greatest number of candidates of a rollout.
    pub max_length: u32,
    /// The most tokens that a prompt and its response may have together.
    pub context: u32,
    /// Hash of the data whose responses these are ([`DataSet::hash`]); `None` where the target
    /// answered prompts anew.
    ///
    /// [`DataSet::hash`]: crate::DataSet::hash
    pub data: Option<String>,
}

/// The acceptance head that predicted the candidates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutHead {
    /// Hash of its weights and shape.
    pub hash: String,
    /// Whether it predicted candidates as they were drawn; else once the draft had read them.
    pub looks_ahead: bool,
}

/// The fields of [`RolloutProvenance`] that responses do not have, as they stand in the metadata.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnFields {
    drafter: String,
    set: String,
    head: Option<RolloutHead>,
    max_length: u32,
    context: u32,
    data: Option<String>,
}

/// The names of the fields of [`OwnFields`].
const OWN_FIELDS: [&str; 6] = ["drafter", "set", "head", "max_length", "context", "data"];

/// How the tokens of responses and rollouts were chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RolloutDecoding {
    /// The most probable token, always: temperature 0.
    Greedy,
    /// Draws from the distribution as served.
    Sampled,
}

impl RolloutDecoding {
    /// The text that stands in file names: `greedy` or `sampled`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Greedy => "greedy",
            Self::Sampled => "sampled",
        }
    }
}

impl fmt::Display for RolloutDecoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl RolloutProvenance {
    /// How tokens were chosen: greedily where the temperature is 0.
    #[must_use]
    pub fn decoding(&self) -> RolloutDecoding {
        if self.responses.temperature == 0.0 {
            RolloutDecoding::Greedy
        } else {
            RolloutDecoding::Sampled
        }
    }

    /// The fields, in the order of declaration, in which `self` and `other` differ.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        fields_differences(self.fields(), other.fields())
    }

    /// The metadata entries: `draftsmith.<field>` and JSON text, in the order of declaration.
    pub(super) fn to_entries(&self) -> Vec<(String, String)> {
        fields_to_entries(self.fields())
    }

    /// Reads what [`Self::to_entries`] wrote, among entries of others.
    ///
    /// # Errors
    /// What is missing, unknown or not JSON.
    pub(super) fn from_entries<'a>(
        entries: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, String> {
        let fields = fields_from_entries(entries)?;
        let (own, of_responses): (Map<_, _>, Map<_, _>) =
            fields.into_iter().partition(|(key, _)| OWN_FIELDS.contains(&key.as_str()));
        let own: OwnFields =
            serde_json::from_value(Value::Object(own)).map_err(|e| e.to_string())?;
        let OwnFields { drafter, set, head, max_length, context, data } = own;
        let responses =
            serde_json::from_value(Value::Object(of_responses)).map_err(|e| e.to_string())?;
        Ok(Self { responses, drafter, set, head, max_length, context, data })
    }

    /// Checks that there was a drafter and that it was asked for candidates.
    ///
    /// # Errors
    /// What is wrong and what is expected.
    pub(super) fn validate(&self) -> Result<(), String> {
        if self.responses.draft.is_none() {
            return Err("`draft` is null, it must be the hash of what drafted".to_owned());
        }
        if self.max_length == 0 {
            return Err("`max_length` is 0, it must be at least 1".to_owned());
        }
        Ok(())
    }

    /// The fields and their values, as they stand in the metadata.
    #[must_use]
    pub fn fields(&self) -> Map<String, Value> {
        let mut fields = self.responses.fields();
        fields.extend(fields_of(&OwnFields {
            drafter: self.drafter.clone(),
            set: self.set.clone(),
            head: self.head.clone(),
            max_length: self.max_length,
            context: self.context,
            data: self.data.clone(),
        }));
        fields
    }
}
