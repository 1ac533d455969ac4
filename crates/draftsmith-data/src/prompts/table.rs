//! Prompt sets as Parquet tables: each row becomes a record of its text columns.

use std::fs::File;
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use serde_json::{Map, Value};

use crate::columns::guard;
use crate::error::{DataError, Place};

/// Calls `visit` with each row's index and its columns of text or lists of text, by name. Columns
/// of other types are not looked at: a conversation as a list of structures is read from JSON only.
pub(super) fn for_each_row(
    path: &Path,
    mut visit: impl FnMut(usize, Place, Value) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let file = File::open(path).map_err(|e| DataError::io("read", path, e))?;
    let mut num_rows = 0;
    for batch in guard(path, || read_batches(file))? {
        for row in 0..batch.num_rows() {
            visit(num_rows, Place::Row(num_rows), record(&batch, row))?;
            num_rows += 1;
        }
    }
    Ok(())
}

fn read_batches(file: File) -> Result<Vec<RecordBatch>, parquet::errors::ParquetError> {
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let builder = ParquetRecordBatchReaderBuilder::try_new_with_options(file, options)?;
    let texts: Vec<usize> = builder
        .schema()
        .fields()
        .iter()
        .enumerate()
        .filter(|(_, field)| match field.data_type() {
            DataType::Utf8 => true,
            DataType::List(element) => *element.data_type() == DataType::Utf8,
            _ => false,
        })
        .map(|(index, _)| index)
        .collect();
    let mask = ProjectionMask::roots(builder.parquet_schema(), texts);
    Ok(builder.with_projection(mask).build()?.collect::<Result<_, _>>()?)
}

fn record(batch: &RecordBatch, row: usize) -> Value {
    let schema = batch.schema();
    let columns = schema.fields().iter().zip(batch.columns());
    let record: Map<String, Value> = columns
        .filter(|(_, column)| !column.is_null(row))
        .map(|(field, column)| (field.name().clone(), value(column, row)))
        .collect();
    Value::Object(record)
}

fn value(column: &dyn Array, row: usize) -> Value {
    if let Some(texts) = column.as_string_opt::<i32>() {
        return if texts.is_null(row) { Value::Null } else { texts.value(row).into() };
    }
    let texts = column.as_list::<i32>().value(row);
    (0..texts.len()).map(|n| value(&texts, n)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::types::Int32Type;
    use arrow_array::{ArrayRef, Int32Array, ListArray, StringArray};
    use parquet::arrow::ArrowWriter;
    use parquet::basic::Compression;
    use parquet::file::properties::WriterProperties;

    use crate::prompts::{Prompt, read_prompts};

    fn read(
        columns: Vec<(&str, ArrayRef)>,
        compression: Compression,
    ) -> Result<Vec<Prompt>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("train-00000.parquet");
        let batch = arrow_array::RecordBatch::try_from_iter(columns).unwrap();
        let properties = WriterProperties::builder().set_compression(compression).build();
        let file = std::fs::File::create(&path).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        read_prompts(&path).map_err(|e| e.to_string())
    }

    fn texts(texts: Vec<Option<&str>>) -> ArrayRef {
        Arc::new(StringArray::from(texts))
    }

    #[test]
    fn text_columns_become_records() {
        let turns = ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1)]), None]);
        let columns = vec![
            ("question", texts(vec![Some("a"), Some("b")])),
            ("answer", texts(vec![Some("1"), None])),
            ("turns", Arc::new(turns) as ArrayRef),
            ("n", Arc::new(Int32Array::from(vec![5, 6])) as ArrayRef),
        ];
        for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY] {
            let prompts = read(columns.clone(), compression).unwrap();
            let ids: Vec<_> = prompts.iter().map(|prompt| prompt.id.as_str()).collect();
            assert_eq!(ids, ["train-00000#0", "train-00000#1"]);
            assert_eq!(prompts[0].turns[0].user, "a");
            assert_eq!(prompts[0].turns[0].response.as_deref(), Some("1"));
            assert_eq!(prompts[1].turns[0].response, None);
        }
    }

    #[test]
    fn lists_of_text_are_turns() {
        let mut turns =
            arrow_array::builder::ListBuilder::new(arrow_array::builder::StringBuilder::new());
        turns.append_value([Some("a"), Some("b")]);
        let turns = Arc::new(turns.finish()) as ArrayRef;
        let prompts = read(vec![("turns", turns)], Compression::UNCOMPRESSED).unwrap();
        assert_eq!(prompts[0].turns[1].user, "b");
    }

    #[test]
    fn mistakes_are_told_with_their_row() {
        let error = |column| {
            let columns = vec![(column, texts(vec![Some("a"), None]))];
            read(columns, Compression::UNCOMPRESSED).unwrap_err()
        };
        assert!(error("prompt").contains("row 1: the record has no keys, but"));
        assert!(error("text").contains("row 0: the record has keys `text`, but"));
    }
}
