//! Writes rows as a table.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{
    ArrayRef, ArrowPrimitiveType, BooleanArray, ListArray, PrimitiveArray, RecordBatch,
    StringArray, UInt32Array,
};
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_schema::{ArrowError, DataType};
use draftsmith_files::write_whole_with;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::errors::ParquetError;

use super::{Column, arrow_schema, writer_properties};
use crate::error::DataError;

/// Rows per Arrow batch; bounds the memory in addition to the rows.
const BATCH_ROWS: usize = 1024;

/// Writes rows as one table, whole or not at all, with `entries` in its key-value metadata.
/// `to_array` makes the array of one column from some of the rows.
pub(crate) fn write_rows<T>(
    path: &Path,
    columns: &[Column],
    entries: Vec<(String, String)>,
    rows: &[T],
    to_array: impl Fn(&[T], Column) -> Result<ArrayRef, ArrowError>,
) -> Result<(), DataError> {
    write_whole_with(path, |file| {
        encode(file, columns, entries, rows, to_array).map_err(|e| match e {
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

fn encode<T>(
    file: &mut File,
    columns: &[Column],
    entries: Vec<(String, String)>,
    rows: &[T],
    to_array: impl Fn(&[T], Column) -> Result<ArrayRef, ArrowError>,
) -> Result<(), ParquetError> {
    // Parquet's schema is sufficient; do not embed Arrow's.
    let options = ArrowWriterOptions::new()
        .with_properties(writer_properties(columns, entries))
        .with_skip_arrow_metadata(true);
    let schema = arrow_schema(columns);
    let mut writer = ArrowWriter::try_new_with_options(file, schema.clone(), options)?;
    for rows in rows.chunks(BATCH_ROWS) {
        let arrays = columns.iter().map(|column| to_array(rows, *column));
        let batch = RecordBatch::try_new(schema.clone(), arrays.collect::<Result<_, _>>()?)?;
        writer.write(&batch)?;
    }
    writer.close()?;
    Ok(())
}

pub(crate) fn texts<'a>(texts: impl Iterator<Item = &'a str>) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(texts))
}

pub(crate) fn flags(flags: impl Iterator<Item = bool>) -> ArrayRef {
    Arc::new(BooleanArray::from(flags.collect::<Vec<_>>()))
}

pub(crate) fn numbers(numbers: impl Iterator<Item = u32>) -> ArrayRef {
    Arc::new(UInt32Array::from_iter_values(numbers))
}

/// A list array. `None` is null in a nullable column.
pub(crate) fn lists<'a, T: ArrowPrimitiveType>(
    column: Column,
    lists: impl Iterator<Item = Option<&'a Vec<T::Native>>> + Clone,
) -> Result<ArrayRef, ArrowError> {
    let DataType::List(element) = column.data_type() else {
        unreachable!("only list columns hold lists")
    };
    let values = lists.clone().flatten().flatten().copied();
    let values = Arc::new(PrimitiveArray::<T>::from_iter_values(values));
    let offsets = OffsetBuffer::from_lengths(lists.clone().map(|list| list.map_or(0, Vec::len)));
    let nulls = column.part_of.map(|_| lists.map(|list| list.is_some()).collect::<NullBuffer>());
    Ok(Arc::new(ListArray::try_new(element, offsets, values, nulls)?))
}
