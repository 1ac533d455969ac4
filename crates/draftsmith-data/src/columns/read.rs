//! The reader of tables, which trusts nothing in the file.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type, UInt32Type};
use arrow_array::{Array, ArrowPrimitiveType, RecordBatch};
use draftsmith_files::open_file;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::basic::{Encoding, Type as PhysicalType};
use parquet::column::page::PageReader;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, RowGroupMetaData};
use parquet::file::serialized_reader::SerializedPageReader;

use super::{Cell, Column};
use crate::caught::caught;
use crate::error::{DataError, Result};

/// The number of rows decoded at a time.
const BATCH_ROWS: usize = 1024;

type Builder = ParquetRecordBatchReaderBuilder<File>;

/// Runs a step of the Parquet reader and names the file in its error.
///
/// The reader (parquet 60.1) indexes past the end of a byte-stream-split page whose header claims
/// more values than it holds (`join_streams_const`), and asserts that a footer's offsets are not
/// negative (`ColumnChunkMetaData::byte_range`). Its panics therefore become errors, and a reader
/// that panicked is not used again.
pub(crate) fn guard<T>(path: &Path, step: impl FnOnce() -> Result<T, ParquetError>) -> Result<T> {
    let problem = match caught(step) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => format!("its pages are inconsistent ({panic})"),
    };
    Err(not_whole(path, &problem))
}

pub(crate) fn not_whole(path: &Path, problem: &str) -> DataError {
    let path = path.display();
    DataError::invalid(format!(
        "`{path}` is not a whole Parquet file: {problem}; build or fetch it again"
    ))
}

/// Opens a file and reads its footer.
pub(crate) fn open(path: &Path) -> Result<Builder> {
    let file = open_file(path)?;
    // Only Parquet's own schema is checked; the embedded Arrow schema may contradict it.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    guard(path, || Builder::try_new_with_options(file, options))
}

/// Yields the key-value metadata of a file. Keys without a value are left out.
pub(crate) fn entries(builder: &Builder) -> impl Iterator<Item = (&str, &str)> {
    let entries = builder.metadata().file_metadata().key_value_metadata();
    entries
        .into_iter()
        .flatten()
        .filter_map(|entry| Some((entry.key.as_str(), entry.value.as_deref()?)))
}

/// Creates the error of a file whose provenance cannot be read.
pub(crate) fn bad_provenance(path: &Path, problem: &str) -> DataError {
    DataError::invalid(format!(
        "`{}`: its provenance cannot be used: {problem}; build the data again",
        path.display()
    ))
}

/// Reads all rows, in order. Columns that are not in `columns` are ignored.
pub(crate) fn read_rows<R: Default>(
    path: &Path,
    builder: Builder,
    columns: &[Column<R>],
) -> Result<Vec<R>> {
    let mask = check_schema(path, &builder, columns)?;
    check_encodings(path, builder.metadata(), &mask)?;
    check_pages(path, builder.metadata(), &mask)?;
    let claimed = builder.metadata().file_metadata().num_rows();
    let mut reader =
        guard(path, || builder.with_projection(mask).with_batch_size(BATCH_ROWS).build())?;
    let mut rows = Vec::new();
    while let Some(batch) = guard(path, || Ok(reader.next().transpose()?))? {
        let first_row = rows.len();
        for index in 0..batch.num_rows() {
            rows.push(TableRow { path, columns, batch: &batch, first_row, index }.read()?);
        }
    }
    if i64::try_from(rows.len()) != Ok(claimed) {
        let problem = format!("its footer claims {claimed} rows, it holds {}", rows.len());
        return Err(not_whole(path, &problem));
    }
    Ok(rows)
}

/// Checks that the footer lists no unsupported encoding ([`is_unsupported`]) for a text column in
/// `mask`.
pub(crate) fn check_encodings(
    path: &Path,
    metadata: &ParquetMetaData,
    mask: &ProjectionMask,
) -> Result<()> {
    for (_, column) in texts(metadata, mask) {
        if let Some(encoding) = column.encodings().find(|encoding| is_unsupported(*encoding)) {
            return Err(DataError::invalid(format!(
                "`{}`: column `{}` is encoded as {encoding}, which is not supported; write the file with plain or \
                 dictionary encoding",
                path.display(),
                column.column_path().string()
            )));
        }
    }
    Ok(())
}

/// Makes the check of [`check_encodings`] in the page headers, which may contradict the footer.
fn check_pages(path: &Path, metadata: &ParquetMetaData, mask: &ProjectionMask) -> Result<()> {
    let file = Arc::new(open_file(path)?);
    for (group, column) in texts(metadata, mask) {
        guard(path, || {
            let num_rows = usize::try_from(group.num_rows())?;
            let mut pages = SerializedPageReader::new(file.clone(), column, num_rows, None)?;
            while let Some(page) = pages.get_next_page()? {
                if is_unsupported(page.encoding()) {
                    let problem = format!("its footer lists no {} pages", page.encoding());
                    return Err(ParquetError::General(problem));
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Yields the column chunks of the text columns in `mask`, with their row groups.
fn texts<'a>(
    metadata: &'a ParquetMetaData,
    mask: &'a ProjectionMask,
) -> impl Iterator<Item = (&'a RowGroupMetaData, &'a ColumnChunkMetaData)> {
    metadata.row_groups().iter().flat_map(|group| {
        let read = group.columns().iter().enumerate().filter(|(leaf, column)| {
            mask.leaf_included(*leaf) && column.column_type() == PhysicalType::BYTE_ARRAY
        });
        read.map(move |(_, column)| (group, column))
    })
}

/// Returns whether text pages with this encoding are refused. For such a page the reader (parquet
/// 60.1) allocates as many lengths as the page claims to have, and aborts the process if that is
/// too many.
fn is_unsupported(encoding: Encoding) -> bool {
    matches!(encoding, Encoding::DELTA_LENGTH_BYTE_ARRAY | Encoding::DELTA_BYTE_ARRAY)
}

/// Checks that every required column exists and that all columns have the expected type. Returns
/// the mask that selects the columns.
fn check_schema<R>(
    path: &Path,
    builder: &Builder,
    columns: &[Column<R>],
) -> Result<ProjectionMask> {
    let mut roots = Vec::with_capacity(columns.len());
    for column in columns {
        let problem = match builder.schema().column_with_name(column.name) {
            Some((index, field)) if column.accepts(field.data_type()) => {
                roots.push(index);
                continue;
            }
            Some((_, field)) => {
                format!("is `{}`, it must be {}", field.data_type(), column.data_type().1)
            }
            None if column.may_lack => continue,
            None => "is missing: draftsmith did not write this file, or another version did".into(),
        };
        return Err(bad_column(path, column.name, &problem));
    }
    Ok(ProjectionMask::roots(builder.parquet_schema(), roots))
}

/// A row of a batch whose schema has been checked, with the context for error messages.
struct TableRow<'a, R> {
    path: &'a Path,
    columns: &'a [Column<R>],
    batch: &'a RecordBatch,
    /// The position of the batch's first row in the file.
    first_row: usize,
    /// The row's position in the batch.
    index: usize,
}

impl<R: Default> TableRow<'_, R> {
    fn read(&self) -> Result<R> {
        let (mut row, at) = (R::default(), self.index);
        for column in self.columns {
            let Some(array) = self.array(column)? else { continue };
            match &column.cell {
                Cell::Text(place) => {
                    array.as_string::<i32>().value(at).clone_into((place.slot)(&mut row));
                }
                Cell::Name(_, set) => set(&mut row, array.as_string::<i32>().value(at))
                    .map_err(|problem| self.error(column, &problem))?,
                Cell::Flag(place) => *(place.slot)(&mut row) = array.as_boolean().value(at),
                Cell::Number(place) => {
                    *(place.slot)(&mut row) = array.as_primitive::<UInt32Type>().value(at);
                }
                Cell::Ids(place) => {
                    *(place.slot)(&mut row) = self.list::<UInt32Type>(column, array)?;
                }
                Cell::Floats(_, place) => {
                    *(place.slot)(&mut row) = self.list::<Float32Type>(column, array)?;
                }
                Cell::Doubles(_, place) => {
                    *(place.slot)(&mut row) = self.list::<Float64Type>(column, array)?;
                }
            }
        }
        Ok(row)
    }

    fn list<T: ArrowPrimitiveType>(
        &self,
        column: &Column<R>,
        array: &dyn Array,
    ) -> Result<Vec<T::Native>> {
        let values = array.as_list::<i32>().value(self.index);
        if values.null_count() > 0 {
            return Err(self.error(column, "holds a null in its list"));
        }
        Ok(values.as_primitive::<T>().values().to_vec())
    }

    /// Returns the column's array, which has a value in this row. `None` if the row lacks the
    /// optional part that the column belongs to. All columns of one part must be null together.
    fn array(&self, column: &Column<R>) -> Result<Option<&dyn Array>> {
        let of_row = |column: &Column<R>| {
            let array = self.batch.column_by_name(column.name)?;
            (!array.is_null(self.index)).then_some(array)
        };
        if let Some(array) = of_row(column) {
            return Ok(Some(array));
        }
        let Some(owner) = column.part_of else { return Err(self.error(column, "is null")) };
        let mut of_owner = self.columns.iter().filter(|other| other.part_of == Some(owner));
        if of_owner.all(|other| of_row(other).is_none()) {
            return Ok(None);
        }
        Err(self.error(column, &format!("is null where other columns of {owner} are not")))
    }

    /// Creates an error about this row's value in a column.
    fn error(&self, column: &Column<R>, problem: &str) -> DataError {
        let problem = format!("{problem} (row {})", self.first_row + self.index);
        bad_column(self.path, column.name, &problem)
    }
}

fn bad_column(path: &Path, column: &str, problem: &str) -> DataError {
    let path = path.display();
    DataError::invalid(format!("`{path}`: column `{column}` {problem}; build the data again"))
}
