//! A reader of prompt sets in Parquet tables. Each row becomes a record of its text columns.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, Int32Type, Int64Type};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReader;
use parquet::basic::Compression;
use parquet::file::metadata::ParquetMetaData;
use serde_json::{Map, Value};

use super::forms::{KEYS, MEDIA_KEYS, RESPONSE_KEYS};
use super::record::{MAX_BYTES, Problem, Record};
use crate::columns::{check_encodings, guard, not_whole, open};
use crate::error::{DataError, RecordPosition, Result};

/// The number of rows decoded at a time. Few are, because each may have a record's maximum size.
const BATCH_ROWS: usize = 16;
/// The limit on the compression factor of a column. Text usually has a factor of 3 to 20. A column
/// that exceeds this limit and [`MAX_UNPACKED_BYTES`] is refused as a decompression bomb.
const MAX_COMPRESSION: i64 = 100;
const MAX_UNPACKED_BYTES: i64 = 64 << 20;

/// A reader of a table's rows as records, which decodes them lazily.
pub(super) struct RecordTable {
    path: PathBuf,
    batches: ParquetRecordBatchReader,
    batch: Option<RecordBatch>,
    /// The index of the next row in `batch`.
    row: usize,
    num_rows: usize,
    /// A column of a prompt's key whose type cannot be read, with the reason; `None` without one.
    unread: Option<(&'static str, String)>,
}

impl RecordTable {
    /// Opens a table. Columns of text, of lists and structures of text, and answers that are
    /// numbers are read.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let builder = open(path)?;
        check_codecs(path, builder.metadata())?;
        let fields = builder.schema().fields().clone();
        let texts = fields.iter().enumerate().filter(|(_, field)| is_text(field));
        let texts: Vec<usize> = texts.map(|(index, _)| index).collect();
        let mask = ProjectionMask::roots(builder.parquet_schema(), texts);
        check_encodings(path, builder.metadata(), &mask)?;
        for group in builder.metadata().row_groups() {
            for (leaf, column) in group.columns().iter().enumerate() {
                let (packed, unpacked) = (column.compressed_size(), column.uncompressed_size());
                let is_bomb = unpacked > MAX_UNPACKED_BYTES && unpacked / MAX_COMPRESSION > packed;
                if mask.leaf_included(leaf) && is_bomb {
                    let problem = format!(
                        "column `{}` unpacks from {packed} to {unpacked} bytes",
                        column.column_path().string()
                    );
                    return Err(not_whole(path, &problem));
                }
            }
        }
        let column = |key: &str| fields.iter().find(|field| field.name() == key);
        let unread = KEYS.into_iter().find_map(|key| {
            let field = column(key)?;
            (!is_text(field)).then(|| (key, type_problem(field.data_type())))
        });
        let form = KEYS.into_iter().find(|key| column(key).is_some_and(|field| is_text(field)));
        if let Some(choices) = column("choices").filter(|field| !is_text(field))
            && form == Some("question")
        {
            let problem = Problem::key("choices", type_problem(choices.data_type()));
            return Err(problem.at(path, RecordPosition::Row(0)));
        }
        let batches =
            guard(path, || builder.with_projection(mask).with_batch_size(BATCH_ROWS).build())?;
        Ok(Self { path: path.to_path_buf(), batches, batch: None, row: 0, num_rows: 0, unread })
    }

    /// Reads the next row. The inner error concerns this row only. `None` at the end of the table.
    pub(super) fn next(&mut self) -> Result<Option<Result<Record>>> {
        loop {
            if let Some(batch) = self.batch.as_ref().filter(|batch| self.row < batch.num_rows()) {
                let (row, position) = (self.row, RecordPosition::Row(self.num_rows));
                self.row += 1;
                self.num_rows += 1;
                return Ok(Some(self.record(batch, row, position)));
            }
            let next = guard(&self.path, || {
                self.batches.next().transpose().map_err(parquet::errors::ParquetError::from)
            })?;
            if next.is_none() {
                return Ok(None);
            }
            (self.batch, self.row) = (next, 0);
        }
    }

    fn record(&self, batch: &RecordBatch, row: usize, position: RecordPosition) -> Result<Record> {
        let schema = batch.schema();
        let columns = || schema.fields().iter().zip(batch.columns());
        let present = columns().filter(|(_, column)| !column.is_null(row));
        let num_bytes: usize = present.clone().map(|(_, column)| text_bytes(column, row)).sum();
        if num_bytes > MAX_BYTES {
            return Err(Problem::long().at(&self.path, position));
        }
        let read = |(field, column): (&Arc<Field>, &ArrayRef)| match value(column, row) {
            // What an image consists of is not read, but it is there.
            Value::Object(_) | Value::Null if is_media(field) => (field.name().clone(), "…".into()),
            value => (field.name().clone(), value),
        };
        let record: Map<String, Value> = present.map(read).collect();
        let is_null = |key: &&str| {
            columns().any(|(field, column)| field.name() == *key && column.is_null(row))
        };
        let null = KEYS.into_iter().find(is_null);
        let unread = null.map(|key| (key, "is null, it must be a string".to_owned()));
        let unread = unread.or(self.unread.clone());
        Ok(Record { position, value: Value::Object(record), unread })
    }
}

/// Checks that every column is compressed by a codec of this build.
fn check_codecs(path: &Path, metadata: &ParquetMetaData) -> Result<()> {
    let columns = metadata.row_groups().iter().flat_map(|group| group.columns());
    let missing = |codec: &Compression| {
        !matches!(codec, Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::ZSTD(_))
    };
    let Some(codec) = columns.map(|column| column.compression()).find(missing) else {
        return Ok(());
    };
    let name = codec.to_string();
    let name = name.split('(').next().unwrap_or_default().to_lowercase();
    Err(DataError::invalid(format!(
        "`{}` is compressed with {name}, which this build does not read; hint: write it with zstd, snappy or no \
         compression",
        path.display()
    )))
}

/// Returns whether a column is read.
fn is_text(field: &Field) -> bool {
    let is_answer = RESPONSE_KEYS.contains(&field.name().as_str());
    is_text_type(field.data_type()) || is_answer && is_number(field.data_type()) || is_media(field)
}

fn is_media(field: &Field) -> bool {
    MEDIA_KEYS.split(' ').any(|key| key == field.name())
}

/// Returns whether values of a type have a text. Fields of structures without text are left out.
fn is_text_type(found: &DataType) -> bool {
    match found {
        DataType::Utf8 => true,
        DataType::List(element) => is_text_type(element.data_type()),
        DataType::Struct(fields) => fields.iter().any(|field| is_text_type(field.data_type())),
        _ => false,
    }
}

fn is_number(found: &DataType) -> bool {
    matches!(found, DataType::Boolean | DataType::Int32 | DataType::Int64 | DataType::Float64)
}

fn type_problem(found: &DataType) -> String {
    let found = match found {
        DataType::Null => "null in every row".to_owned(),
        DataType::Binary | DataType::FixedSizeBinary(_) => "a column of binary values".to_owned(),
        found if found.is_integer() => "a column of integers".to_owned(),
        found if found.is_floating() => "a column of floating-point numbers".to_owned(),
        found if found.is_nested() => {
            return "is a column of structures, which are read from JSON only: \
                    write the table as JSON lines"
                .to_owned();
        }
        found => format!("a column of {found}"),
    };
    format!("is {found}, it must be text (a string column, annotated as UTF-8)")
}

/// Counts a row's bytes of text before copying. Each list item adds the size of a JSON value.
fn text_bytes(column: &dyn Array, row: usize) -> usize {
    if let Some(texts) = column.as_string_opt::<i32>() {
        return usize::try_from(texts.value_length(row)).unwrap_or(usize::MAX);
    }
    if let Some(lists) = column.as_list_opt::<i32>() {
        let items = lists.value(row);
        return (0..items.len()).map(|n| text_bytes(&items, n) + size_of::<Value>()).sum();
    }
    let Some(structure) = column.as_struct_opt() else { return size_of::<Value>() };
    let size = |column: &ArrayRef| text_bytes(column, row) + size_of::<Value>();
    structure.columns().iter().map(size).sum()
}

fn value(column: &dyn Array, row: usize) -> Value {
    if let Some(texts) = column.as_string_opt::<i32>() {
        return if texts.is_null(row) { Value::Null } else { texts.value(row).into() };
    }
    if let Some(lists) = column.as_list_opt::<i32>() {
        let items = lists.value(row);
        return (0..items.len()).map(|n| value(&items, n)).collect();
    }
    if let Some(structure) = column.as_struct_opt() {
        let fields = structure.fields().iter().zip(structure.columns());
        let given = fields
            .filter(|(field, column)| is_text_type(field.data_type()) && !column.is_null(row));
        let given = given.map(|(field, column)| (field.name().clone(), value(column, row)));
        return Value::Object(given.collect());
    }
    number(column, row)
}

/// Returns a number or truth value; null for a column of another type.
fn number(column: &dyn Array, row: usize) -> Value {
    match column.data_type() {
        DataType::Boolean => column.as_boolean().value(row).into(),
        DataType::Int32 => column.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => column.as_primitive::<Int64Type>().value(row).into(),
        DataType::Float64 => column.as_primitive::<Float64Type>().value(row).into(),
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::{
        ArrayRef, BinaryArray, Float64Array, Int32Array, ListArray, NullArray, StringArray,
        StructArray,
    };
    use arrow_schema::Schema;
    use parquet::arrow::ArrowWriter;
    use parquet::basic::ZstdLevel;
    use parquet::file::properties::WriterProperties;

    use super::*;
    use crate::peak::peak_bytes;
    use crate::prompts::{Prompt, Prompts};

    fn read(
        columns: Vec<(&str, ArrayRef)>,
        compression: Compression,
    ) -> Result<Vec<Prompt>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("train-00000.parquet");
        let columns = columns.into_iter().map(|(name, column)| (name, column, true));
        let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
        let properties = WriterProperties::builder().set_compression(compression).build();
        let file = std::fs::File::create(&path).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        Prompts::open(&path).and_then(Iterator::collect).map_err(|e| e.to_string())
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

    /// A conversation as transformers' sets have it, with a column that nobody reads.
    fn conversation(texts_of: &[(&str, &str)]) -> ArrayRef {
        let text = |name: &str, values: Vec<&str>| {
            let field = Arc::new(Field::new(name, DataType::Utf8, true));
            (field, texts(values.into_iter().map(Some).collect()))
        };
        let ids = Arc::new(Int32Array::from_iter_values(0..texts_of.len() as i32)) as ArrayRef;
        let messages = StructArray::from(vec![
            text("role", texts_of.iter().map(|(role, _)| *role).collect()),
            text("content", texts_of.iter().map(|(_, content)| *content).collect()),
            (Arc::new(Field::new("n", DataType::Int32, true)), ids),
        ]);
        let offsets = arrow_buffer::OffsetBuffer::from_lengths([texts_of.len()]);
        let field = Arc::new(Field::new("item", messages.data_type().clone(), true));
        Arc::new(ListArray::new(field, offsets, Arc::new(messages), None))
    }

    #[test]
    fn a_conversation_counts_in_a_table_as_in_json() {
        let messages = [("user", "add 2 and 3"), ("assistant", "5"), ("user", "and 4")];
        for name in ["messages", "conversations"] {
            let columns =
                vec![("prompt", texts(vec![Some("add 2 and 3")])), (name, conversation(&messages))];
            let prompts = read(columns, Compression::SNAPPY).unwrap();
            let turns: Vec<_> = prompts[0].turns.iter().map(|turn| turn.user.as_str()).collect();
            assert_eq!(turns, ["add 2 and 3", "and 4"], "{name}");
            assert_eq!(prompts[0].turns[0].response.as_deref(), Some("5"));
        }
    }

    #[test]
    fn an_answer_may_be_a_number_and_a_missing_codec_is_named() {
        let answers: [ArrayRef; 3] = [
            Arc::new(arrow_array::Int64Array::from(vec![Some(5), None])),
            Arc::new(Float64Array::from(vec![Some(2.5), None])),
            Arc::new(arrow_array::BooleanArray::from(vec![Some(true), None])),
        ];
        for (answer, expected) in answers.into_iter().zip(["5", "2.5", "true"]) {
            let columns = vec![("question", texts(vec![Some("a"), Some("b")])), ("answer", answer)];
            let prompts = read(columns, Compression::UNCOMPRESSED).unwrap();
            let responses: Vec<_> =
                prompts.iter().map(|prompt| prompt.turns[0].response.as_deref()).collect();
            assert_eq!(responses, [Some(expected), None]);
        }
        // Nothing here writes brotli, so the codec's number in the footer is changed.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("packed.parquet");
        let schema = writer_schema();
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
        let file = std::fs::File::create(&path).unwrap();
        let mut writer = ArrowWriter::try_new(file, Arc::clone(&schema), Some(properties)).unwrap();
        writer.write(&RecordBatch::try_new(schema, vec![texts(vec![Some("a")])]).unwrap()).unwrap();
        writer.close().unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        // In Thrift's compact protocol: field 4 of a column's metadata, an i32, zigzag: 1 is snappy, 4 is brotli.
        let footer = bytes.len()
            - 8
            - u32::from_le_bytes(bytes[bytes.len() - 8..bytes.len() - 4].try_into().unwrap())
                as usize;
        let name = bytes[footer..].windows(6).position(|it| it == b"prompt").unwrap();
        let last = bytes[footer..].windows(10).rposition(|it| it == b"\x18\x06prompt\x15\x02");
        let at = footer + last.map_or_else(|| name, |at| at + 9);
        bytes[at] = 8;
        std::fs::write(&path, bytes).unwrap();
        let error = Prompts::open(&path).map(drop).unwrap_err().to_string();
        assert!(error.contains("compressed with brotli") && error.contains("zstd"), "{error}");
    }

    #[test]
    fn rows_with_images_are_refused_by_key_and_rows_without_are_read() {
        let bytes = BinaryArray::from_opt_vec(vec![None, Some(b"PNG")]);
        let check = |image: ArrayRef| {
            let columns = vec![("prompt", texts(vec![Some("a"), Some("b")])), ("image", image)];
            let error = read(columns, Compression::UNCOMPRESSED).unwrap_err();
            assert!(error.contains("row 1: key `image` is beside the text"), "{error}");
        };
        let field = Arc::new(Field::new("bytes", DataType::Binary, true));
        let structure = StructArray::new(
            vec![field].into(),
            vec![Arc::new(bytes.clone())],
            Some(vec![false, true].into()),
        );
        check(Arc::new(structure));
        check(Arc::new(bytes));
        check(texts(vec![Some(""), Some("a.png")]));
    }

    #[test]
    fn choices_are_read_with_their_question_or_refused_by_name() {
        let mut choices =
            arrow_array::builder::ListBuilder::new(arrow_array::builder::StringBuilder::new());
        choices.append_value([Some("3"), Some("4")]);
        let question = texts(vec![Some("2 + 2?")]);
        let table = |choices| vec![("question", question.clone()), ("choices", choices)];
        let prompts = read(table(Arc::new(choices.finish())), Compression::UNCOMPRESSED).unwrap();
        assert_eq!(prompts[0].turns[0].user, "2 + 2?\nA. 3\nB. 4\nAnswer:");

        let field = Arc::new(Field::new("text", DataType::Utf8, true));
        let structs = Arc::new(StructArray::from(vec![(field, texts(vec![Some("a")]))]));
        let error = read(table(structs), Compression::UNCOMPRESSED).unwrap_err();
        assert!(error.contains("key `choices` is an object, it must be an array"), "{error}");
    }

    #[test]
    fn mistakes_are_reported_with_their_row() {
        let error = |column| {
            let columns = vec![(column, texts(vec![Some("a"), None]))];
            read(columns, Compression::UNCOMPRESSED).unwrap_err()
        };
        assert!(error("prompt").contains("row 1: key `prompt` is null, it must be a string"));
        assert!(error("text").contains("row 0: the record has keys `text`, but"));
    }

    #[test]
    fn columns_of_other_types_are_named() {
        let check = |column: ArrayRef, expected: &str| {
            let others = texts(vec![Some("x"), Some("y")]);
            let error = read(vec![("prompt", column), ("note", others)], Compression::SNAPPY);
            let error = error.unwrap_err();
            assert!(error.contains(&format!("row 0: key `prompt` is {expected}")), "{error}");
        };
        check(Arc::new(Int32Array::from(vec![5, 6])), "a column of integers, it must be text");
        check(Arc::new(Float64Array::from(vec![5., 6.])), "a column of floating-point numbers");
        check(
            Arc::new(BinaryArray::from_vec(vec![b"a", b"b"])),
            "a column of binary values, it must be text (a string column, annotated as UTF-8)",
        );
        check(Arc::new(NullArray::new(2)), "null");
        let field = Arc::new(Field::new("role", DataType::Utf8, true));
        let messages = StructArray::from(vec![(field, texts(vec![Some("a"), Some("b")]))]);
        check(Arc::new(messages), "an object, it must be a string");
    }

    #[test]
    fn long_rows_and_decompression_bombs_are_refused() {
        let long = vec!["short".to_owned(), "a b".repeat(MAX_BYTES / 2)];
        let column = Arc::new(StringArray::from(long)) as ArrayRef;
        let error = read(vec![("prompt", column)], Compression::UNCOMPRESSED).unwrap_err();
        assert!(error.contains("row 1: the record has more than 8 MB"), "{error}");

        let zstd = Compression::ZSTD(ZstdLevel::default());
        let error = large(
            "bomb.parquet",
            zstd,
            |_| "a".repeat(1 << 20),
            |path| Prompts::open(path).unwrap_err().to_string(),
        );
        assert!(error.contains("`prompt` unpacks from"), "{error}");
    }

    /// Writes a table of 100 texts of one megabyte in one row group, and returns the result of
    /// `look` on it.
    fn large<T>(
        name: &str,
        compression: Compression,
        mut text: impl FnMut(usize) -> String,
        look: impl FnOnce(&Path) -> T,
    ) -> T {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        let properties = WriterProperties::builder()
            .set_compression(compression)
            .set_dictionary_enabled(false)
            .set_write_batch_size(1)
            .build();
        let file = std::fs::File::create(&path).unwrap();
        let mut writer = ArrowWriter::try_new(file, writer_schema(), Some(properties)).unwrap();
        for row in 0..100 {
            let column = texts(vec![Some(&text(row))]);
            writer.write(&RecordBatch::try_new(writer_schema(), vec![column]).unwrap()).unwrap();
        }
        writer.close().unwrap();
        look(&path)
    }

    fn writer_schema() -> Arc<Schema> {
        Arc::new(Schema::new(vec![Field::new("prompt", DataType::Utf8, true)]))
    }

    #[test]
    fn reading_the_first_rows_needs_little_memory() {
        // Text that hardly compresses.
        let mut state = 1_u64;
        let noise = |_| {
            let letter = |_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                char::from(b' ' + u8::try_from(state >> 58).unwrap())
            };
            (0..1 << 20).map(letter).collect()
        };
        large("large.parquet", Compression::UNCOMPRESSED, noise, |path| {
            let before = peak_bytes();
            let three: Vec<Prompt> =
                Prompts::open(path).unwrap().take(3).collect::<Result<_, _>>().unwrap();
            assert_eq!(three[2].id, "large#2");
            assert_eq!(Prompts::open(path).unwrap().count(), 100);
            if let (Some(before), Some(after)) = (before, peak_bytes()) {
                assert!(after - before < 80 << 20, "{} MB", (after - before) >> 20);
            }
        });
    }
}
