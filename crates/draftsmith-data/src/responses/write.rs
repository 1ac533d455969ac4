//! Rows into columns, and those into a shard.

use std::path::Path;

use arrow_array::ArrayRef;
use arrow_array::types::{Float32Type, UInt32Type};
use arrow_schema::ArrowError;

use super::header::{ShardHeader, ShardPlace};
use super::manifest::ShardRecord;
use super::row::{DraftColumns, ResponseRow};
use super::schema::COLUMNS;
use crate::columns::{Column, lists, texts, write_rows};
use crate::error::DataError;
use crate::provenance::Provenance;

/// Writes rows as one shard, whole or not at all, with the record of what was written beside it; or,
/// without a place, as a file of its own. Floats are stored as they are: call
/// [`ResponseRow::round_stored`] first to keep the file small.
///
/// # Errors
/// If a row breaks its own rules ([`ResponseRow::validate`]), or the file cannot be written.
pub fn write_shard(
    path: &Path,
    rows: &[ResponseRow],
    provenance: &Provenance,
    place: Option<ShardPlace>,
) -> Result<(), DataError> {
    for row in rows {
        row.validate()?;
    }
    let header = ShardHeader { provenance: provenance.clone(), place };
    write_rows(path, &COLUMNS, header.to_entries(), rows, to_array)?;
    if let Some(ShardPlace { index, .. }) = place {
        let dir = path.parent().unwrap_or(Path::new(""));
        ShardRecord::of(path, index, rows.len())?.write(dir, index)?;
    }
    Ok(())
}

pub(super) fn to_array(rows: &[ResponseRow], column: Column) -> Result<ArrayRef, ArrowError> {
    let ids = |list: fn(&ResponseRow) -> &Vec<u32>| {
        lists::<UInt32Type>(column, rows.iter().map(|row| Some(list(row))))
    };
    let draft_ids = |list: fn(&DraftColumns) -> &Vec<u32>| {
        lists::<UInt32Type>(column, rows.iter().map(|row| row.draft.as_ref().map(list)))
    };
    let draft_floats = |list: fn(&DraftColumns) -> &Vec<f32>| {
        lists::<Float32Type>(column, rows.iter().map(|row| row.draft.as_ref().map(list)))
    };
    match column.name {
        "id" => Ok(texts(rows.iter().map(|row| row.id.as_str()))),
        "source" => Ok(texts(rows.iter().map(|row| row.source.as_str()))),
        "finish_reason" => Ok(texts(rows.iter().map(|row| row.finish_reason.as_str()))),
        "prompt_ids" => ids(|row| &row.prompt_ids),
        "response_ids" => ids(|row| &row.response_ids),
        "response_target_log_prob" => {
            let log_probs = rows.iter().map(|row| Some(&row.response_target_log_prob));
            lists::<Float32Type>(column, log_probs)
        }
        "target_outside_mass" => {
            let masses = rows.iter().map(|row| row.target_outside_mass.as_ref());
            lists::<Float32Type>(column, masses)
        }
        "response_draft_log_prob" => draft_floats(|draft| &draft.response_draft_log_prob),
        "draft_ids" => draft_ids(|draft| &draft.draft_ids),
        "draft_log_prob" => draft_floats(|draft| &draft.draft_log_prob),
        "target_log_prob" => draft_floats(|draft| &draft.target_log_prob),
        "overlap" => draft_floats(|draft| &draft.overlap),
        "draft_entropy" => draft_floats(|draft| &draft.draft_entropy),
        "draft_target_cross_entropy" => {
            let all =
                rows.iter().map(|row| row.draft.as_ref()?.draft_target_cross_entropy.as_ref());
            lists::<Float32Type>(column, all)
        }
        "draft_top_ids" => draft_ids(|draft| &draft.draft_top_ids),
        "target_top_ids" => draft_ids(|draft| &draft.target_top_ids),
        "draft_top_log_prob" => draft_floats(|draft| &draft.draft_top_log_prob),
        name => unreachable!("`{name}` is in the schema, so it has a list in the row"),
    }
}
