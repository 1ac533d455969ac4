//! Rows into columns, and those into a file.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, ListArray, RecordBatch, StringArray, UInt32Array};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::DataType;
use arrow::error::ArrowError;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::errors::ParquetError;

use super::schema::{COLUMNS, Column, arrow_schema, writer_properties};
use crate::artifact::write_atomically;
use crate::error::DataError;
use crate::provenance::Provenance;
use crate::record::{DraftColumns, ResponseRow};

/// Rows that become one Arrow batch: bounds the memory beside the rows themselves.
const BATCH_ROWS: usize = 1024;

/// Writes rows as one shard, whole or not at all (see [`write_atomically`]). Floats are stored as
/// they are: call [`ResponseRow::round_stored`] first to keep the file small.
///
/// # Errors
/// If a row breaks its own rules ([`ResponseRow::validate`]), or the file cannot be written.
pub fn write_shard(
    path: &Path,
    rows: &[ResponseRow],
    provenance: &Provenance,
) -> Result<(), DataError> {
    for row in rows {
        row.validate()?;
    }
    write_atomically(path, |file| {
        encode(file, rows, provenance).map_err(|e| match e {
            ParquetError::External(source) => match source.downcast::<std::io::Error>() {
                Ok(source) => DataError::io("write", path, *source),
                Err(source) => write_error(path, &*source),
            },
            other => write_error(path, &other),
        })
    })
}

fn write_error(path: &Path, problem: &dyn std::error::Error) -> DataError {
    DataError::ParquetWrite { path: path.to_path_buf(), problem: problem.to_string() }
}

fn encode(
    file: &mut File,
    rows: &[ResponseRow],
    provenance: &Provenance,
) -> Result<(), ParquetError> {
    // Without Arrow's own copy of the schema: Parquet's says all that is needed.
    let options = ArrowWriterOptions::new()
        .with_properties(writer_properties(provenance))
        .with_skip_arrow_metadata(true);
    let mut writer = ArrowWriter::try_new_with_options(file, arrow_schema(), options)?;
    for rows in rows.chunks(BATCH_ROWS) {
        writer.write(&to_batch(rows)?)?;
    }
    writer.close()?;
    Ok(())
}

fn to_batch(rows: &[ResponseRow]) -> Result<RecordBatch, ArrowError> {
    let columns = COLUMNS.iter().map(|column| to_array(rows, *column)).collect::<Result<_, _>>()?;
    RecordBatch::try_new(arrow_schema(), columns)
}

fn to_array(rows: &[ResponseRow], column: Column) -> Result<ArrayRef, ArrowError> {
    let draft_ids = |list: fn(&DraftColumns) -> &Vec<u32>| {
        ids(column, rows.iter().map(|row| row.draft.as_ref().map(list)))
    };
    let draft_floats = |list: fn(&DraftColumns) -> &Vec<f32>| {
        floats(column, rows.iter().map(|row| row.draft.as_ref().map(list)))
    };
    match column.name {
        "id" => Ok(texts(rows.iter().map(|row| row.id.as_str()))),
        "source" => Ok(texts(rows.iter().map(|row| row.source.as_str()))),
        "finish_reason" => Ok(texts(rows.iter().map(|row| row.finish_reason.as_str()))),
        "prompt_ids" => ids(column, rows.iter().map(|row| Some(&row.prompt_ids))),
        "response_ids" => ids(column, rows.iter().map(|row| Some(&row.response_ids))),
        "response_target_log_prob" => {
            floats(column, rows.iter().map(|row| Some(&row.response_target_log_prob)))
        }
        "response_draft_log_prob" => draft_floats(|draft| &draft.response_draft_log_prob),
        "draft_ids" => draft_ids(|draft| &draft.draft_ids),
        "draft_log_prob" => draft_floats(|draft| &draft.draft_log_prob),
        "target_log_prob" => draft_floats(|draft| &draft.target_log_prob),
        "overlap" => draft_floats(|draft| &draft.overlap),
        "draft_entropy" => draft_floats(|draft| &draft.draft_entropy),
        "draft_target_cross_entropy" => draft_floats(|draft| &draft.draft_target_cross_entropy),
        "draft_top_ids" => draft_ids(|draft| &draft.draft_top_ids),
        "target_top_ids" => draft_ids(|draft| &draft.target_top_ids),
        "draft_top_log_prob" => draft_floats(|draft| &draft.draft_top_log_prob),
        name => unreachable!("`{name}` is in the schema, so it has a list in the row"),
    }
}

fn texts<'a>(texts: impl Iterator<Item = &'a str>) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(texts))
}

fn ids<'a>(
    column: Column,
    lists: impl Iterator<Item = Option<&'a Vec<u32>>> + Clone,
) -> Result<ArrayRef, ArrowError> {
    let values = lists.clone().flatten().flatten().copied();
    list(column, lists, Arc::new(UInt32Array::from_iter_values(values)))
}

fn floats<'a>(
    column: Column,
    lists: impl Iterator<Item = Option<&'a Vec<f32>>> + Clone,
) -> Result<ArrayRef, ArrowError> {
    let values = lists.clone().flatten().flatten().copied();
    list(column, lists, Arc::new(Float32Array::from_iter_values(values)))
}

/// A list array over the lists' concatenated values; `None` is null.
fn list<'a, T: 'a>(
    column: Column,
    lists: impl Iterator<Item = Option<&'a Vec<T>>> + Clone,
    values: ArrayRef,
) -> Result<ArrayRef, ArrowError> {
    let DataType::List(element) = column.data_type() else {
        unreachable!("only list columns have lists of values")
    };
    let offsets = OffsetBuffer::from_lengths(lists.clone().map(|list| list.map_or(0, Vec::len)));
    let nulls = column.of_draft.then(|| lists.map(|list| list.is_some()).collect::<NullBuffer>());
    Ok(Arc::new(ListArray::try_new(element, offsets, values, nulls)?))
}
