//! Reads a table into rows. Nothing in the file is trusted.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::UInt32Type;
use arrow_array::{Array, ArrowPrimitiveType, RecordBatch};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::basic::{Encoding, Type as PhysicalType};
use parquet::column::page::PageReader;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, RowGroupMetaData};
use parquet::file::serialized_reader::SerializedPageReader;

use super::Column;
use crate::caught::caught;
use crate::error::DataError;

/// Rows decoded at a time.
const BATCH_ROWS: usize = 1024;

type Builder = ParquetRecordBatchReaderBuilder<File>;

/// Runs a step of the Parquet reader, naming the file in its error.
///
/// The reader (parquet 60.1) indexes past the end of a byte-stream-split page whose header claims
/// more values than it holds (`join_streams_const`), and asserts that a footer's offsets are not
/// negative (`ColumnChunkMetaData::byte_range`). Its panics therefore become errors, and a reader
/// that panicked is not used again.
pub(crate) fn guard<T>(
    path: &Path,
    step: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    let problem = match caught(step) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => format!("its pages are inconsistent ({panic})"),
    };
    Err(DataError::Parquet { path: path.to_path_buf(), problem })
}

/// Opens a file and reads its footer.
pub(crate) fn open(path: &Path) -> Result<Builder, DataError> {
    let file = File::open(path).map_err(|e| DataError::io("read", path, e))?;
    // Only Parquet's own schema is checked; the embedded Arrow schema may contradict it.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    guard(path, || Builder::try_new_with_options(file, options))
}

/// The key-value metadata.
pub(crate) fn entries(builder: &Builder) -> impl Iterator<Item = (&str, &str)> {
    let entries = builder.metadata().file_metadata().key_value_metadata();
    entries
        .into_iter()
        .flatten()
        .filter_map(|entry| Some((entry.key.as_str(), entry.value.as_deref()?)))
}

/// The error of a file whose provenance cannot be read.
pub(crate) fn bad_provenance(path: &Path, problem: &str) -> DataError {
    let problem = format!("{problem}; build the data again");
    DataError::BadProvenance { path: path.to_path_buf(), problem }
}

/// Reads all rows, in order. Columns that are not in `columns` are ignored.
pub(crate) fn read_rows<T>(
    path: &Path,
    builder: Builder,
    columns: &[Column],
    read_row: impl Fn(&TableRow<'_>) -> Result<T, DataError>,
) -> Result<Vec<T>, DataError> {
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
            rows.push(read_row(&TableRow { path, columns, batch: &batch, first_row, index })?);
        }
    }
    if i64::try_from(rows.len()) != Ok(claimed) {
        let problem = format!("its footer claims {claimed} rows, it holds {}", rows.len());
        return Err(DataError::Parquet { path: path.to_path_buf(), problem });
    }
    Ok(rows)
}

/// Checks that the footer lists no unsupported encoding ([`is_unsupported`]) for a text column in
/// `mask`.
pub(crate) fn check_encodings(
    path: &Path,
    metadata: &ParquetMetaData,
    mask: &ProjectionMask,
) -> Result<(), DataError> {
    for (_, column) in texts(metadata, mask) {
        if let Some(encoding) = column.encodings().find(|encoding| is_unsupported(*encoding)) {
            return Err(DataError::Encoding {
                path: path.to_path_buf(),
                column: column.column_path().string(),
                encoding: encoding.to_string(),
            });
        }
    }
    Ok(())
}

/// Checks the same in the page headers, which may contradict the footer.
fn check_pages(
    path: &Path,
    metadata: &ParquetMetaData,
    mask: &ProjectionMask,
) -> Result<(), DataError> {
    let file = Arc::new(File::open(path).map_err(|e| DataError::io("read", path, e))?);
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

/// The chunks of the text columns in `mask`.
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

/// Whether text pages with this encoding are refused: the reader (parquet 60.1) allocates as many
/// lengths as such a page claims to have, and aborts if that is too many.
fn is_unsupported(encoding: Encoding) -> bool {
    matches!(encoding, Encoding::DELTA_LENGTH_BYTE_ARRAY | Encoding::DELTA_BYTE_ARRAY)
}

/// Checks that every column that may not be missing is there with its type; returns the mask that
/// selects the columns.
fn check_schema(
    path: &Path,
    builder: &Builder,
    columns: &[Column],
) -> Result<ProjectionMask, DataError> {
    let mut roots = Vec::with_capacity(columns.len());
    for column in columns {
        let problem = match builder.schema().column_with_name(column.name) {
            Some((index, field)) if column.accepts(field.data_type()) => {
                roots.push(index);
                continue;
            }
            Some((_, field)) => {
                format!("is `{}`, it must be {}", field.data_type(), column.expected())
            }
            None if column.may_lack => continue,
            None => "is missing: draftsmith did not write this file, or another version did".into(),
        };
        return Err(DataError::Column { path: path.to_path_buf(), column: column.name, problem });
    }
    Ok(ProjectionMask::roots(builder.parquet_schema(), roots))
}

/// A row of a batch whose schema has been checked, with what error messages need.
pub(crate) struct TableRow<'a> {
    path: &'a Path,
    columns: &'a [Column],
    batch: &'a RecordBatch,
    /// The position of the batch's first row in the file.
    first_row: usize,
    /// The row's position in the batch.
    index: usize,
}

impl TableRow<'_> {
    pub(crate) fn text(&self, column: &'static str) -> Result<&str, DataError> {
        Ok(self.values(column)?.as_string::<i32>().value(self.index))
    }

    pub(crate) fn flag(&self, column: &'static str) -> Result<bool, DataError> {
        Ok(self.values(column)?.as_boolean().value(self.index))
    }

    pub(crate) fn number(&self, column: &'static str) -> Result<u32, DataError> {
        Ok(self.values(column)?.as_primitive::<UInt32Type>().value(self.index))
    }

    pub(crate) fn list<T: ArrowPrimitiveType>(
        &self,
        column: &'static str,
    ) -> Result<Vec<T::Native>, DataError> {
        let values = self.values(column)?.as_list::<i32>().value(self.index);
        if values.null_count() > 0 {
            return Err(self.error(column, "holds a null in its list"));
        }
        Ok(values.as_primitive::<T>().values().to_vec())
    }

    /// The list; `None` if it is null.
    pub(crate) fn list_if_any<T: ArrowPrimitiveType>(
        &self,
        column: &'static str,
    ) -> Result<Option<Vec<T::Native>>, DataError> {
        if self.is_null(column) { Ok(None) } else { self.list::<T>(column).map(Some) }
    }

    pub(crate) fn is_null(&self, column: &'static str) -> bool {
        self.batch.column_by_name(column).is_none_or(|column| column.is_null(self.index))
    }

    /// An error about this row's value in a column.
    pub(crate) fn error(&self, column: &'static str, problem: &str) -> DataError {
        let problem = format!("{problem} (row {})", self.first_row + self.index);
        DataError::Column { path: self.path.to_path_buf(), column, problem }
    }

    /// The column's array, in which this row is not null.
    fn values(&self, column: &'static str) -> Result<&dyn Array, DataError> {
        if !self.is_null(column) {
            return Ok(self.batch.column_by_name(column).expect("a missing column is null"));
        }
        let owner = self.columns.iter().find(|known| known.name == column);
        Err(match owner.and_then(|known| known.part_of) {
            Some(owner) => {
                self.error(column, &format!("is null where other columns of {owner} are not"))
            }
            None => self.error(column, "is null"),
        })
    }
}
