//! A rollouts file into columns, and those into rows.

use std::path::Path;

use super::provenance::RolloutProvenance;
use super::row::{RolloutCandidates, RolloutRow};
use super::schema::COLUMNS;
use super::validate::validate_file;
use crate::columns::{TableRow, bad_provenance, entries, open, read_rows};
use crate::error::DataError;

/// Reads a rollouts file: its rows, in order, and where they came from. Columns that are not of the
/// schema are left alone. With `vocab_size`, the rows are for a model of so many tokens.
///
/// # Errors
/// If the file cannot be read, is not whole, lacks a column or its provenance, or holds a type, a
/// null or rows that may not be (see [`validate_rollouts`]), or that do not fit its provenance (see
/// [`write_rollouts`]) or that the model does not know ([`RolloutRow::check_ids`]).
///
/// [`validate_rollouts`]: crate::validate_rollouts
/// [`write_rollouts`]: crate::write_rollouts
pub fn read_rollouts(
    path: &Path,
    vocab_size: Option<usize>,
) -> Result<(Vec<RolloutRow>, RolloutProvenance), DataError> {
    let builder = open(path)?;
    let provenance = parse_provenance(path, entries(&builder))?;
    let rows = read_rows(path, builder, &COLUMNS, rollout)?;
    let known = |size| rows.iter().try_for_each(|row: &RolloutRow| row.check_ids(size));
    let checked = validate_file(&rows, &provenance);
    let checked = checked.and_then(|()| vocab_size.map_or(Ok(()), known));
    checked.map_err(|source| DataError::row_in_file(path, source))?;
    Ok((rows, provenance))
}

/// Reads only where a file's rollouts came from.
///
/// # Errors
/// If the file cannot be read, is not whole, or has no provenance that can be read.
pub fn read_rollout_provenance(path: &Path) -> Result<RolloutProvenance, DataError> {
    parse_provenance(path, entries(&open(path)?))
}

fn parse_provenance<'a>(
    path: &Path,
    entries: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<RolloutProvenance, DataError> {
    let read = RolloutProvenance::from_entries(entries);
    read.and_then(|read| read.validate().map(|()| read)).map_err(|e| bad_provenance(path, &e))
}

fn rollout(row: &TableRow<'_>) -> Result<RolloutRow, DataError> {
    Ok(RolloutRow {
        id: row.text("id")?.to_owned(),
        prompt_ids: row.ids("prompt_ids")?,
        start: row.number("start")?,
        limit: row.number("limit")?,
        candidates: RolloutCandidates {
            candidate_ids: row.ids("candidate_ids")?,
            candidate_prob: row.doubles("candidate_prob")?,
            confidence: row.doubles("confidence")?,
            confidence_of_ten: row.doubles("confidence_of_ten")?,
            draft_entropy: row.doubles("draft_entropy")?,
            predicted_acceptance_prob: predicted(row)?,
            draft_log_prob: row.doubles("draft_log_prob")?,
            target_log_prob: row.doubles("target_log_prob")?,
            draft_rank: row.ids_if_any("draft_rank")?,
        },
        is_response: row.flag("is_response")?,
    })
}

fn predicted(row: &TableRow<'_>) -> Result<Option<Vec<f64>>, DataError> {
    let column = "predicted_acceptance_prob";
    if row.is_null(column) { Ok(None) } else { row.doubles(column).map(Some) }
}
