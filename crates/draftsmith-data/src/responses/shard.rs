//! One shard: its columns, its metadata (provenance and position), and how rows become a file and
//! back.

use std::path::Path;

use arrow_array::ArrayRef;
use arrow_array::types::{Float32Type, UInt32Type};
use arrow_schema::ArrowError;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::manifest::ShardRecord;
use super::row::{DraftColumns, FinishReason, ResponseRow};
use crate::columns::{
    Column, Kind, TableRow, bad_provenance, entries, lists, open, read_rows, texts, write_rows,
};
use crate::error::DataError;
use crate::provenance::{Provenance, fields_from_entries, fields_to_entries};

/// The owner of the draft's columns.
const DRAFT: &str = "the draft";

const fn of_draft(name: &'static str, kind: Kind) -> Column {
    Column::part_of(DRAFT, name, kind)
}

/// All columns, in the order of the file.
pub(super) const COLUMNS: [Column; 17] = [
    Column::new("id", Kind::Text),
    Column::new("source", Kind::Text),
    Column::new("prompt_ids", Kind::Ids),
    Column::new("response_ids", Kind::Ids),
    Column::new("response_target_log_prob", Kind::Floats),
    Column::optional("a server", "target_outside_mass", Kind::Floats),
    of_draft("response_draft_log_prob", Kind::Floats),
    of_draft("draft_ids", Kind::Ids),
    of_draft("draft_log_prob", Kind::Floats),
    of_draft("target_log_prob", Kind::Floats),
    of_draft("overlap", Kind::Floats),
    of_draft("draft_entropy", Kind::Floats),
    Column::optional("the target's weights", "draft_target_cross_entropy", Kind::Floats),
    of_draft("draft_top_ids", Kind::Ids),
    of_draft("target_top_ids", Kind::Ids),
    of_draft("draft_top_log_prob", Kind::Floats),
    Column::new("finish_reason", Kind::Text),
];

/// The metadata field of the position, next to those of the provenance.
const POSITION: &str = "shard";

/// Which shard a file is. It is stored in the file, so that a copy under another name is noticed.
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
    /// `None` in a file that is not part of a data set.
    pub(super) position: Option<ShardPlace>,
}

impl ShardHeader {
    /// The metadata entries: the provenance and `draftsmith.shard`.
    pub(super) fn to_entries(&self) -> Vec<(String, String)> {
        let mut fields = self.provenance.fields();
        let position = self.position.and_then(|position| serde_json::to_value(position).ok());
        fields.extend(position.map(|position| (POSITION.to_owned(), position)));
        fields_to_entries(fields)
    }

    /// Reads the entries that [`Self::to_entries`] made. Entries of other programs are ignored.
    ///
    /// # Errors
    /// What is missing, unknown or not JSON.
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

/// Writes rows as one shard, whole or not at all, and a record of the file next to it; without a
/// position, writes only the file. Floats are stored unchanged: call [`ResponseRow::round_stored`]
/// first to keep the file small.
///
/// # Errors
/// If a row is invalid ([`ResponseRow::validate`]) or a file cannot be written.
pub fn write_shard(
    path: &Path,
    rows: &[ResponseRow],
    provenance: &Provenance,
    position: Option<ShardPlace>,
) -> Result<(), DataError> {
    rows.iter().try_for_each(ResponseRow::validate)?;
    let header = ShardHeader { provenance: provenance.clone(), position };
    write_rows(path, &COLUMNS, header.to_entries(), rows, to_array)?;
    if let Some(ShardPlace { index, .. }) = position {
        let dir = path.parent().unwrap_or(Path::new(""));
        ShardRecord::of(path, index, rows.len(), provenance)?.write(dir, index)?;
    }
    Ok(())
}

pub(super) fn to_array(rows: &[ResponseRow], column: Column) -> Result<ArrayRef, ArrowError> {
    match column.kind {
        Kind::Ids => lists::<UInt32Type>(
            column,
            rows.iter().map(|row| {
                let mut ids = row.ids().filter(|(name, _)| *name == column.name);
                ids.next().map(|(_, ids)| ids)
            }),
        ),
        Kind::Floats => lists::<Float32Type>(
            column,
            rows.iter().map(|row| {
                let mut floats = row.floats().filter(|(name, ..)| *name == column.name);
                floats.next().map(|(.., floats)| floats)
            }),
        ),
        _ => Ok(texts(rows.iter().map(|row| match column.name {
            "id" => row.id.as_str(),
            "source" => row.source.as_str(),
            _ => row.finish_reason.as_str(),
        }))),
    }
}

/// Reads one shard: its rows, in order, and their provenance. Unknown columns are ignored. With
/// `vocab_size`, every token must be in a vocabulary of that size.
///
/// # Errors
/// If the file cannot be read or is malformed, lacks a column or its provenance, or holds an invalid
/// row ([`ResponseRow::validate`], [`ResponseRow::check_ids`]).
pub fn read_shard(
    path: &Path,
    vocab_size: Option<usize>,
) -> Result<(Vec<ResponseRow>, Provenance), DataError> {
    let builder = open(path)?;
    let header =
        ShardHeader::from_entries(entries(&builder)).map_err(|e| bad_provenance(path, &e))?;
    let rows = read_rows(path, builder, &COLUMNS, |row| {
        let response = read_row(row)?;
        let known = || vocab_size.map_or(Ok(()), |vocab_size| response.check_ids(vocab_size));
        let checked = response.validate().and_then(|()| known());
        checked.map_err(|source| DataError::row_in_file(path, source))?;
        Ok(response)
    })?;
    Ok((rows, header.provenance))
}

/// Reads only a shard's metadata.
pub(super) fn read_header(path: &Path) -> Result<ShardHeader, DataError> {
    ShardHeader::from_entries(entries(&open(path)?)).map_err(|e| bad_provenance(path, &e))
}

fn read_row(row: &TableRow<'_>) -> Result<ResponseRow, DataError> {
    let ids = |column| row.list::<UInt32Type>(column);
    let floats = |column| row.list::<Float32Type>(column);
    // The draft's columns are null all together or not at all.
    let mut of_draft = COLUMNS.iter().filter(|column| column.part_of == Some(DRAFT));
    let draft = if of_draft.all(|column| row.is_null(column.name)) {
        None
    } else {
        Some(DraftColumns {
            response_draft_log_prob: floats("response_draft_log_prob")?,
            draft_ids: ids("draft_ids")?,
            draft_log_prob: floats("draft_log_prob")?,
            target_log_prob: floats("target_log_prob")?,
            overlap: floats("overlap")?,
            draft_entropy: floats("draft_entropy")?,
            draft_target_cross_entropy: row
                .list_if_any::<Float32Type>("draft_target_cross_entropy")?,
            draft_top_ids: ids("draft_top_ids")?,
            target_top_ids: ids("target_top_ids")?,
            draft_top_log_prob: floats("draft_top_log_prob")?,
        })
    };
    let reason = row.text("finish_reason")?;
    let finish_reason = FinishReason::parse(reason).ok_or_else(|| {
        let problem = format!("is `{reason}`, it must be `eos`, `stop_string` or `length`");
        row.error("finish_reason", &problem)
    })?;
    Ok(ResponseRow {
        id: row.text("id")?.to_owned(),
        source: row.text("source")?.to_owned(),
        prompt_ids: ids("prompt_ids")?,
        response_ids: ids("response_ids")?,
        response_target_log_prob: floats("response_target_log_prob")?,
        target_outside_mass: row.list_if_any::<Float32Type>("target_outside_mass")?,
        draft,
        finish_reason,
    })
}
