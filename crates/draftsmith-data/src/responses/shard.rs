//! The reader and writer of one shard and its metadata (provenance and position).

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::manifest::ShardRecord;
use super::row::{COLUMNS, ResponseRow};
use crate::columns::{bad_provenance, entries, open, read_rows, write_rows};
use crate::error::{DataError, Result};
use crate::provenance::{Provenance, fields_from_entries, fields_to_entries};

/// The metadata field of the position, next to those of the provenance.
const POSITION: &str = "shard";

/// The position of a shard in its data set, stored in the file so that renamed copies are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardPlace {
    /// The shard's index, from 0, as in the file's name.
    pub index: usize,
    /// The number of shards when all are built.
    pub count: usize,
}

/// The key-value metadata of a shard.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ShardHeader {
    pub(super) provenance: Provenance,
    /// The position in the data set; `None` in a file that is not part of one.
    pub(super) position: Option<ShardPlace>,
}

impl ShardHeader {
    /// Converts the header to metadata entries: the provenance and `draftsmith.shard`.
    pub(super) fn to_entries(&self) -> Vec<(String, String)> {
        let mut fields = self.provenance.fields();
        let position = self.position.and_then(|position| serde_json::to_value(position).ok());
        fields.extend(position.map(|position| (POSITION.to_owned(), position)));
        fields_to_entries(fields)
    }

    /// Reads the entries that [`Self::to_entries`] made. Entries of other programs are ignored.
    ///
    /// # Errors
    /// If an entry is missing, unknown or not JSON. The error says which.
    pub(super) fn from_entries<'a>(
        entries: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, String> {
        let mut fields = fields_from_entries(entries)?;
        let position = fields.remove(POSITION).map(serde_json::from_value).transpose();
        let position = position.map_err(|e| format!("`draftsmith.{POSITION}`: {e}"))?;
        let provenance =
            serde_json::from_value(Value::Object(fields)).map_err(|e| e.to_string())?;
        Ok(Self { provenance, position })
    }
}

/// Writes rows as one shard, whole or not at all. With a position, also writes a record of the file
/// next to it. Floats are stored unchanged: call [`ResponseRow::round_stored`] first to keep the
/// file small.
///
/// # Errors
/// If a row is invalid ([`ResponseRow::validate`]) or a file cannot be written.
pub fn write_shard(
    path: &Path,
    rows: &[ResponseRow],
    provenance: &Provenance,
    position: Option<ShardPlace>,
) -> Result<()> {
    rows.iter().try_for_each(ResponseRow::validate)?;
    let header = ShardHeader { provenance: provenance.clone(), position };
    write_rows(path, &COLUMNS, header.to_entries(), rows)?;
    if let Some(ShardPlace { index, .. }) = position {
        let dir = path.parent().unwrap_or(Path::new(""));
        ShardRecord::of(path, index, rows.len(), provenance)?.write(dir, index)?;
    }
    Ok(())
}

/// Reads one shard: its rows, in order, and their provenance. Unknown columns are ignored. With
/// `vocab_size`, every token must be in a vocabulary of that size.
///
/// # Errors
/// If the file cannot be read or is malformed, lacks a column or its provenance, or holds an
/// invalid row ([`ResponseRow::validate`], [`ResponseRow::check_ids`]).
pub fn read_shard(
    path: &Path,
    vocab_size: Option<usize>,
) -> Result<(Vec<ResponseRow>, Provenance)> {
    let builder = open(path)?;
    let header =
        ShardHeader::from_entries(entries(&builder)).map_err(|e| bad_provenance(path, &e))?;
    let rows = read_rows(path, builder, &COLUMNS)?;
    for row in &rows {
        let known = || vocab_size.map_or(Ok(()), |vocab_size| row.check_ids(vocab_size));
        let checked = row.validate().and_then(|()| known());
        checked.map_err(|source| DataError::row_in_file(path, &source))?;
    }
    Ok((rows, header.provenance))
}

/// Reads only a shard's metadata.
pub(super) fn read_header(path: &Path) -> Result<ShardHeader> {
    ShardHeader::from_entries(entries(&open(path)?)).map_err(|e| bad_provenance(path, &e))
}
