//! The writer of tables.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::types::{Float32Type, Float64Type, UInt32Type};
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

use super::{Cell, Column, arrow_schema, writer_properties};
use crate::error::{DataError, Result};

/// The number of rows per Arrow batch, which bounds the memory used in addition to the rows.
const BATCH_ROWS: usize = 1024;

/// Writes rows as one table, whole or not at all, with `entries` in its key-value metadata.
pub(crate) fn write_rows<R>(
    path: &Path,
    columns: &[Column<R>],
    entries: Vec<(String, String)>,
    rows: &[R],
) -> Result<()> {
    write_whole_with(path, |file| {
        encode(file, columns, entries, rows).map_err(|e| match e {
            ParquetError::External(source) => match source.downcast::<std::io::Error>() {
                Ok(source) => DataError::io("write", path, *source),
                Err(source) => write_error(path, &*source),
            },
            other => write_error(path, &other),
        })
    })
}

fn write_error(path: &Path, problem: &dyn std::error::Error) -> DataError {
    DataError::invalid(format!("cannot encode `{}` as Parquet: {problem}", path.display()))
}

fn encode<R>(
    file: &mut File,
    columns: &[Column<R>],
    entries: Vec<(String, String)>,
    rows: &[R],
) -> Result<(), ParquetError> {
    // Parquet's own schema is sufficient, so Arrow's is not embedded.
    let options = ArrowWriterOptions::new()
        .with_properties(writer_properties(columns, entries))
        .with_skip_arrow_metadata(true);
    let schema = arrow_schema(columns);
    let mut writer = ArrowWriter::try_new_with_options(file, schema.clone(), options)?;
    for rows in rows.chunks(BATCH_ROWS) {
        let arrays = columns.iter().map(|column| to_array(rows, column));
        let batch = RecordBatch::try_new(schema.clone(), arrays.collect::<Result<_, _>>()?)?;
        writer.write(&batch)?;
    }
    writer.close()?;
    Ok(())
}

/// Builds the Arrow array of one column for these rows.
pub(crate) fn to_array<R>(rows: &[R], column: &Column<R>) -> Result<ArrayRef, ArrowError> {
    let rows = rows.iter();
    Ok(match &column.cell {
        Cell::Text(place) => Arc::new(StringArray::from_iter(rows.map(place.get))),
        Cell::Name(get, _) => Arc::new(StringArray::from_iter_values(rows.map(get))),
        Cell::Flag(place) => {
            Arc::new(BooleanArray::from_iter(rows.map(|row| (place.get)(row).copied())))
        }
        Cell::Number(place) => {
            Arc::new(UInt32Array::from_iter(rows.map(|row| (place.get)(row).copied())))
        }
        Cell::Ids(place) => lists::<UInt32Type, R>(column, rows.map(place.get))?,
        Cell::Floats(_, place) => lists::<Float32Type, R>(column, rows.map(place.get))?,
        Cell::Doubles(_, place) => lists::<Float64Type, R>(column, rows.map(place.get))?,
    })
}

/// Builds a list array. `None` is null in a nullable column.
fn lists<'a, T: ArrowPrimitiveType, R>(
    column: &Column<R>,
    lists: impl Iterator<Item = Option<&'a Vec<T::Native>>> + Clone,
) -> Result<ArrayRef, ArrowError> {
    let DataType::List(element) = column.data_type().0 else {
        unreachable!("only list columns hold lists")
    };
    let values = lists.clone().flatten().flatten().copied();
    let values = Arc::new(PrimitiveArray::<T>::from_iter_values(values));
    let offsets = OffsetBuffer::from_lengths(lists.clone().map(|list| list.map_or(0, Vec::len)));
    let nulls = column.part_of.map(|_| lists.map(|list| list.is_some()).collect::<NullBuffer>());
    Ok(Arc::new(ListArray::try_new(element, offsets, values, nulls)?))
}
