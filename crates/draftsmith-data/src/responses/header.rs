//! What a shard's key-value metadata says: where its rows came from, and which shard it is.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::provenance::{Provenance, fields_from_entries, fields_to_entries};

/// The field of the place, beside those of the provenance.
const PLACE: &str = "shard";

/// Which shard a file is. It stands in the file, so that a copy under another shard's name is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardPlace {
    /// From 0, as in the file's name.
    pub index: usize,
    /// The number of shards when all are built.
    pub count: usize,
}

/// The key-value metadata of a shard.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ShardHeader {
    pub(super) provenance: Provenance,
    /// None of rows that were written by themselves.
    pub(super) place: Option<ShardPlace>,
}

impl ShardHeader {
    /// The metadata entries: those of the provenance, and `draftsmith.shard`.
    pub(super) fn to_entries(&self) -> Vec<(String, String)> {
        let mut fields = self.provenance.fields();
        let place = self.place.and_then(|place| serde_json::to_value(place).ok());
        fields.extend(place.map(|place| (PLACE.to_owned(), place)));
        fields_to_entries(fields)
    }

    /// Reads what [`Self::to_entries`] wrote, among entries of others.
    ///
    /// # Errors
    /// What is missing, unknown or not JSON.
    pub(super) fn from_entries<'a>(
        entries: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, String> {
        let mut fields = fields_from_entries(entries)?;
        let place = fields.remove(PLACE).map(serde_json::from_value).transpose();
        let place = place.map_err(|e| format!("`draftsmith.{PLACE}`: {e}"))?;
        let provenance =
            serde_json::from_value(Value::Object(fields)).map_err(|e| e.to_string())?;
        Ok(Self { provenance, place })
    }
}
