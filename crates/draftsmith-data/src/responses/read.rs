//! A file into columns, and those into rows: nothing in the file is trusted.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{ArrowPrimitiveType, Float32Type, UInt32Type};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::errors::ParquetError;

use super::schema::COLUMNS;
use crate::error::DataError;
use crate::provenance::Provenance;
use crate::record::{DraftColumns, FinishReason, ResponseRow};

/// Rows decoded at a time.
const BATCH_ROWS: usize = 1024;

/// Reads one shard: its rows, in order, and where they came from. Columns that are not of the
/// schema are left alone.
///
/// # Errors
/// If the file cannot be read, is not whole, lacks a column or its provenance, or holds a type, a
/// null, a list length or a finish reason that may not be.
pub fn read_shard(path: &Path) -> Result<(Vec<ResponseRow>, Provenance), DataError> {
    let builder = open(path)?;
    let provenance = provenance_of(path, &builder)?;
    let mask = check_schema(path, &builder)?;
    let claimed = builder.metadata().file_metadata().num_rows();
    let mut reader =
        guard(path, || builder.with_projection(mask).with_batch_size(BATCH_ROWS).build())?;
    let mut rows = Vec::new();
    while let Some(batch) = guard(path, || Ok(reader.next().transpose()?))? {
        read_batch(path, &batch, &mut rows)?;
    }
    if i64::try_from(rows.len()) != Ok(claimed) {
        let problem = format!("its footer claims {claimed} rows, it holds {}", rows.len());
        return Err(DataError::Parquet { path: path.to_path_buf(), problem });
    }
    Ok((rows, provenance))
}

/// Reads only where a shard's rows came from.
///
/// # Errors
/// If the file cannot be read, is not whole, or has no provenance that can be read.
pub fn read_provenance(path: &Path) -> Result<Provenance, DataError> {
    provenance_of(path, &open(path)?)
}

/// Runs a step of the Parquet reader, naming the file in its error.
///
/// The reader (parquet 60.1) indexes past the end of a byte-stream-split page whose header claims
/// more values than it holds (`join_streams_const`), and asserts that a footer's offsets are not
/// negative (`ColumnChunkMetaData::byte_range`), so its panics are caught and told as what they
/// are: a broken file. A reader that panicked is not used again.
pub(crate) fn guard<T>(
    path: &Path,
    step: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    let problem = match catch_unwind(AssertUnwindSafe(step)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => {
            let told = panic.downcast_ref::<String>().map(String::as_str);
            let told = told.or(panic.downcast_ref::<&str>().copied());
            format!("its pages do not add up ({})", told.unwrap_or("no more is known"))
        }
    };
    Err(DataError::Parquet { path: path.to_path_buf(), problem })
}

type Builder = ParquetRecordBatchReaderBuilder<File>;

fn open(path: &Path) -> Result<Builder, DataError> {
    let file = File::open(path).map_err(|e| DataError::io("read", path, e))?;
    // Parquet's own schema is the one that is checked: a copy in Arrow's form may lie.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    guard(path, || Builder::try_new_with_options(file, options))
}

fn provenance_of(path: &Path, builder: &Builder) -> Result<Provenance, DataError> {
    let entries = builder.metadata().file_metadata().key_value_metadata();
    let entries = entries
        .into_iter()
        .flatten()
        .filter_map(|entry| Some((entry.key.as_str(), entry.value.as_deref()?)));
    Provenance::from_entries(entries)
        .map_err(|problem| DataError::BadProvenance { path: path.to_path_buf(), problem })
}

/// Checks that every column is there with its type; gives the mask that selects them.
fn check_schema(path: &Path, builder: &Builder) -> Result<ProjectionMask, DataError> {
    let mut roots = Vec::with_capacity(COLUMNS.len());
    for column in COLUMNS {
        let Some((index, field)) = builder.schema().column_with_name(column.name) else {
            return Err(DataError::MissingColumn { path: path.to_path_buf(), column: column.name });
        };
        if !column.accepts(field.data_type()) {
            return Err(DataError::ColumnType {
                path: path.to_path_buf(),
                column: column.name,
                found: format!("`{}`", field.data_type()),
                expected: column.expected().to_owned(),
            });
        }
        roots.push(index);
    }
    Ok(ProjectionMask::roots(builder.parquet_schema(), roots))
}

fn read_batch(
    path: &Path,
    batch: &RecordBatch,
    rows: &mut Vec<ResponseRow>,
) -> Result<(), DataError> {
    let reader = BatchReader { path, batch, first_row: rows.len() };
    for row in 0..batch.num_rows() {
        let read = reader.row(row)?;
        read.validate().map_err(|source| DataError::RowInFile {
            path: path.to_path_buf(),
            source: Box::new(source),
        })?;
        rows.push(read);
    }
    Ok(())
}

/// A batch whose columns have been checked, with what its errors need to name.
struct BatchReader<'a> {
    path: &'a Path,
    batch: &'a RecordBatch,
    /// The place of the batch's first row in the file.
    first_row: usize,
}

impl BatchReader<'_> {
    fn row(&self, row: usize) -> Result<ResponseRow, DataError> {
        Ok(ResponseRow {
            id: self.text("id", row)?.to_owned(),
            source: self.text("source", row)?.to_owned(),
            prompt_ids: self.ids("prompt_ids", row)?,
            response_ids: self.ids("response_ids", row)?,
            response_target_log_prob: self.floats("response_target_log_prob", row)?,
            draft: self.draft(row)?,
            finish_reason: self.finish_reason(row)?,
        })
    }

    /// The draft's columns: null all together, or not at all.
    fn draft(&self, row: usize) -> Result<Option<DraftColumns>, DataError> {
        let mut of_draft = COLUMNS.iter().filter(|column| column.of_draft);
        if of_draft.all(|column| self.column(column.name).is_null(row)) {
            return Ok(None);
        }
        Ok(Some(DraftColumns {
            response_draft_log_prob: self.floats("response_draft_log_prob", row)?,
            draft_ids: self.ids("draft_ids", row)?,
            draft_log_prob: self.floats("draft_log_prob", row)?,
            target_log_prob: self.floats("target_log_prob", row)?,
            overlap: self.floats("overlap", row)?,
            draft_entropy: self.floats("draft_entropy", row)?,
            draft_target_cross_entropy: self.floats("draft_target_cross_entropy", row)?,
            draft_top_ids: self.ids("draft_top_ids", row)?,
            target_top_ids: self.ids("target_top_ids", row)?,
            draft_top_log_prob: self.floats("draft_top_log_prob", row)?,
        }))
    }

    fn finish_reason(&self, row: usize) -> Result<FinishReason, DataError> {
        let reason = self.text("finish_reason", row)?;
        FinishReason::parse(reason).ok_or_else(|| {
            self.error("finish_reason", row, format!("is `{reason}`, it must be `eos` or `length`"))
        })
    }

    fn text(&self, column: &'static str, row: usize) -> Result<&str, DataError> {
        let texts = self.column(column).as_string::<i32>();
        self.refuse_null(column, row)?;
        Ok(texts.value(row))
    }

    fn ids(&self, column: &'static str, row: usize) -> Result<Vec<u32>, DataError> {
        self.list::<UInt32Type>(column, row)
    }

    fn floats(&self, column: &'static str, row: usize) -> Result<Vec<f32>, DataError> {
        self.list::<Float32Type>(column, row)
    }

    fn list<T: ArrowPrimitiveType>(
        &self,
        column: &'static str,
        row: usize,
    ) -> Result<Vec<T::Native>, DataError> {
        self.refuse_null(column, row)?;
        let values = self.column(column).as_list::<i32>().value(row);
        if values.null_count() > 0 {
            return Err(self.error(column, row, "holds a null in its list".to_owned()));
        }
        Ok(values.as_primitive::<T>().values().to_vec())
    }

    fn refuse_null(&self, column: &'static str, row: usize) -> Result<(), DataError> {
        if !self.column(column).is_null(row) {
            return Ok(());
        }
        let of_draft = COLUMNS.iter().any(|known| known.of_draft && known.name == column);
        let problem =
            if of_draft { "is null where other columns of the draft are not" } else { "is null" };
        Err(self.error(column, row, problem.to_owned()))
    }

    fn column(&self, name: &str) -> &dyn Array {
        self.batch.column_by_name(name).expect("the schema was checked to have every column")
    }

    fn error(&self, column: &'static str, row: usize, problem: String) -> DataError {
        let (path, row) = (self.path.to_path_buf(), self.first_row + row);
        DataError::ColumnValue { path, row, column, problem }
    }
}
