//! A shard into columns, and those into rows.

use std::path::Path;

use super::header::ShardHeader;
use super::row::{DraftColumns, FinishReason, ResponseRow};
use super::schema::{COLUMNS, DRAFT};
use crate::columns::{TableRow, bad_provenance, entries, open, read_rows};
use crate::error::DataError;
use crate::provenance::Provenance;

/// Reads one shard: its rows, in order, and where they came from. Columns that are not of the
/// schema are left alone. With `vocab_size`, the rows are for a model of so many tokens.
///
/// # Errors
/// If the file cannot be read, is not whole, lacks a column or its provenance, or holds a type, a
/// null, a finish reason, a list length or a number that may not be ([`ResponseRow::validate`]), or
/// a token that the model does not know ([`ResponseRow::check_ids`]).
pub fn read_shard(
    path: &Path,
    vocab_size: Option<usize>,
) -> Result<(Vec<ResponseRow>, Provenance), DataError> {
    let builder = open(path)?;
    let header =
        ShardHeader::from_entries(entries(&builder)).map_err(|e| bad_provenance(path, &e))?;
    let rows = read_rows(path, builder, &COLUMNS, |row| {
        let read = response(row)?;
        let known = || vocab_size.map_or(Ok(()), |vocab_size| read.check_ids(vocab_size));
        let checked = read.validate().and_then(|()| known());
        checked.map_err(|source| DataError::row_in_file(path, source))?;
        Ok(read)
    })?;
    Ok((rows, header.provenance))
}

/// Reads only where a shard's rows came from, and its place.
pub(super) fn read_header(path: &Path) -> Result<ShardHeader, DataError> {
    ShardHeader::from_entries(entries(&open(path)?)).map_err(|e| bad_provenance(path, &e))
}

fn response(row: &TableRow<'_>) -> Result<ResponseRow, DataError> {
    Ok(ResponseRow {
        id: row.text("id")?.to_owned(),
        source: row.text("source")?.to_owned(),
        prompt_ids: row.ids("prompt_ids")?,
        response_ids: row.ids("response_ids")?,
        response_target_log_prob: row.floats("response_target_log_prob")?,
        target_outside_mass: row.floats_if_any("target_outside_mass")?,
        draft: draft(row)?,
        finish_reason: finish_reason(row)?,
    })
}

/// The draft's columns: null all together, or not at all.
fn draft(row: &TableRow<'_>) -> Result<Option<DraftColumns>, DataError> {
    let mut of_draft = COLUMNS.iter().filter(|column| column.part_of == Some(DRAFT));
    if of_draft.all(|column| row.is_null(column.name)) {
        return Ok(None);
    }
    Ok(Some(DraftColumns {
        response_draft_log_prob: row.floats("response_draft_log_prob")?,
        draft_ids: row.ids("draft_ids")?,
        draft_log_prob: row.floats("draft_log_prob")?,
        target_log_prob: row.floats("target_log_prob")?,
        overlap: row.floats("overlap")?,
        draft_entropy: row.floats("draft_entropy")?,
        draft_target_cross_entropy: row.floats_if_any("draft_target_cross_entropy")?,
        draft_top_ids: row.ids("draft_top_ids")?,
        target_top_ids: row.ids("target_top_ids")?,
        draft_top_log_prob: row.floats("draft_top_log_prob")?,
    }))
}

fn finish_reason(row: &TableRow<'_>) -> Result<FinishReason, DataError> {
    let reason = row.text("finish_reason")?;
    FinishReason::parse(reason).ok_or_else(|| {
        row.error(
            "finish_reason",
            format!("is `{reason}`, it must be `eos`, `stop_string` or `length`"),
        )
    })
}
