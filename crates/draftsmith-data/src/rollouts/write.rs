//! Rows into columns, and those into a rollouts file.

use std::path::Path;

use arrow_array::ArrayRef;
use arrow_array::types::{Float64Type, UInt32Type};
use arrow_schema::ArrowError;

use super::provenance::RolloutProvenance;
use super::row::{RolloutCandidates, RolloutRow};
use super::schema::COLUMNS;
use super::validate::validate_file;
use crate::columns::{Column, flags, lists, numbers, texts, write_rows};
use crate::error::DataError;

/// Writes rows as one rollouts file, whole or not at all.
///
/// # Errors
/// If rows break their rules ([`validate_rollouts`]) or do not fit the provenance (acceptance
/// probabilities are predicted iff it names a head; responses and rollouts continue to an end token or
/// as far as they may), if it names no drafter, or if the file cannot be written.
///
/// [`validate_rollouts`]: crate::validate_rollouts
pub fn write_rollouts(
    path: &Path,
    rows: &[RolloutRow],
    provenance: &RolloutProvenance,
) -> Result<(), DataError> {
    provenance
        .validate()
        .map_err(|problem| DataError::BadProvenance { path: path.to_path_buf(), problem })?;
    validate_file(rows, provenance)?;
    write_rows(path, &COLUMNS, provenance.to_entries(), rows, to_array)
}

pub(super) fn to_array(rows: &[RolloutRow], column: Column) -> Result<ArrayRef, ArrowError> {
    let candidates = rows.iter().map(|row| &row.candidates);
    let doubles = |list: fn(&RolloutCandidates) -> &Vec<f64>| {
        lists::<Float64Type>(column, candidates.clone().map(|row| Some(list(row))))
    };
    match column.name {
        "id" => Ok(texts(rows.iter().map(|row| row.id.as_str()))),
        "prompt_ids" => lists::<UInt32Type>(column, rows.iter().map(|row| Some(&row.prompt_ids))),
        "start" => Ok(numbers(rows.iter().map(|row| row.start))),
        "is_response" => Ok(flags(rows.iter().map(|row| row.is_response))),
        "limit" => Ok(numbers(rows.iter().map(|row| row.limit))),
        "candidate_ids" => {
            lists::<UInt32Type>(column, candidates.map(|row| Some(&row.candidate_ids)))
        }
        "candidate_prob" => doubles(|row| &row.candidate_prob),
        "confidence" => doubles(|row| &row.confidence),
        "confidence_of_ten" => doubles(|row| &row.confidence_of_ten),
        "draft_entropy" => doubles(|row| &row.draft_entropy),
        "predicted_acceptance_prob" => {
            let predicted = candidates.map(|row| row.predicted_acceptance_prob.as_ref());
            lists::<Float64Type>(column, predicted)
        }
        "draft_rank" => {
            let ranks = candidates.map(|row| row.draft_rank.as_ref());
            lists::<UInt32Type>(column, ranks)
        }
        "draft_log_prob" => doubles(|row| &row.draft_log_prob),
        "target_log_prob" => doubles(|row| &row.target_log_prob),
        name => unreachable!("`{name}` is in the schema, so it has a list in the row"),
    }
}
