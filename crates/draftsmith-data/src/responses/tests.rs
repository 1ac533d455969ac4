//! Round trips, what a shard looks like from outside, its size, and files that are not what they
//! claim to be.

use std::fs::{self, File};
use std::sync::Arc;

use arrow_array::{ArrayRef, Float32Array, StringArray, UInt32Array};
use arrow_buffer::NullBuffer;
use arrow_schema::{DataType, Field};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, Encoding};

use super::schema::COLUMNS;
use super::*;
use crate::columns::Kind;
use crate::columns::tests::{
    Noise, Table, check_cut_files, check_flipped_bytes, list, null_list, nullable,
};
use crate::provenance::tests::provenance;

fn row(noise: &mut Noise, n: usize, length: usize, with_draft: bool) -> ResponseRow {
    let response_ids: Vec<u32> = (0..length).map(|_| noise.id()).collect();
    let floats =
        |noise: &mut Noise| (0..length).map(|_| noise.log_prob() as f32).collect::<Vec<_>>();
    let response_target_log_prob = floats(noise);
    let draft = with_draft.then(|| {
        let mut draft = DraftColumns {
            response_draft_log_prob: floats(noise),
            draft_ids: (0..length).map(|_| noise.id()).collect(),
            draft_log_prob: floats(noise),
            target_log_prob: floats(noise),
            overlap: floats(noise).iter().map(|log| log.exp()).collect(),
            draft_entropy: floats(noise).iter().map(|log| -log).collect(),
            draft_target_cross_entropy: floats(noise).iter().map(|log| 1.0 - log).collect(),
            draft_top_ids: (0..length).map(|_| noise.id()).collect(),
            target_top_ids: (0..length).map(|_| noise.id()).collect(),
            draft_top_log_prob: floats(noise),
        };
        for i in 0..length {
            if noise.unit() < 0.6 {
                draft.draft_ids[i] = response_ids[i];
                draft.draft_log_prob[i] = draft.response_draft_log_prob[i];
                draft.target_log_prob[i] = response_target_log_prob[i];
            }
        }
        draft
    });
    ResponseRow {
        id: format!("set#{n}"),
        source: "set".into(),
        prompt_ids: (0..length / 2 + 1).map(|_| noise.id()).collect(),
        response_ids,
        response_target_log_prob,
        draft,
        finish_reason: if n.is_multiple_of(2) { FinishReason::Eos } else { FinishReason::Length },
    }
}

/// Rows with and without a draft, an empty response and −∞ among them.
fn sample_rows() -> Vec<ResponseRow> {
    let mut noise = Noise(1);
    let mut rows: Vec<_> = (0..7).map(|n| row(&mut noise, n, n * 5 % 17, n != 3)).collect();
    rows[4].response_target_log_prob[0] = f32::NEG_INFINITY;
    rows[4].draft.as_mut().unwrap().target_log_prob[1] = f32::NEG_INFINITY;
    rows
}

#[test]
fn rows_round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 3);
    assert!(path.ends_with("responses-00003.parquet"));
    let mut noise = Noise(2);
    let without_draft: Vec<_> = (0..3).map(|n| row(&mut noise, n, 4, false)).collect();
    let many: Vec<_> = (0..2500).map(|n| row(&mut noise, n, n % 3, n % 5 != 0)).collect();
    for rows in [sample_rows(), without_draft, many, Vec::new()] {
        write_shard(&path, &rows, &provenance()).unwrap();
        let read = read_shard(&path, None).unwrap();
        assert_eq!(read.0, rows);
        assert_eq!(read.1, provenance());
    }
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["responses-00003.parquet"]);
}

#[test]
fn equal_rows_give_equal_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (shard_path(dir.path(), 0), shard_path(dir.path(), 1));
    write_shard(&one, &sample_rows(), &provenance()).unwrap();
    write_shard(&two, &sample_rows(), &provenance()).unwrap();
    assert_eq!(fs::read(one).unwrap(), fs::read(two).unwrap());
}

#[test]
fn other_readers_find_plain_parquet() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    write_shard(&path, &sample_rows(), &provenance()).unwrap();
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let list = |element| DataType::List(Arc::new(Field::new("element", element, false)));
    let fields = builder.schema().fields();
    assert_eq!(fields.len(), 16);
    assert_eq!(*fields[0], Field::new("id", DataType::Utf8, false));
    assert_eq!(*fields[3], Field::new("response_ids", list(DataType::UInt32), false));
    assert_eq!(*fields[5], Field::new("response_draft_log_prob", list(DataType::Float32), true));
    assert_eq!(fields[15].name(), "finish_reason");
    let metadata = builder.metadata();
    let entries = metadata.file_metadata().key_value_metadata().unwrap();
    let seed = entries.iter().find(|entry| entry.key == "draftsmith.seed").unwrap();
    assert_eq!(seed.value.as_deref(), Some("18446744073709551615"));
    assert!(entries.iter().all(|entry| entry.key.starts_with("draftsmith.")));
    let overlap = metadata.row_group(0).column(9);
    assert_eq!(overlap.column_path().string(), "overlap.list.element");
    assert!(matches!(overlap.compression(), Compression::ZSTD(_)));
    assert!(overlap.encodings().any(|encoding| encoding == Encoding::BYTE_STREAM_SPLIT));
    assert!(overlap.dictionary_page_offset().is_none());
}

#[test]
fn a_token_takes_at_most_28_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    let mut noise = Noise(3);
    let mut rows: Vec<_> = (0..400).map(|n| row(&mut noise, n, 256, true)).collect();
    let mut bytes_per_token = || {
        write_shard(&path, &rows, &provenance()).unwrap();
        let size = fs::metadata(&path).unwrap().len() as f64 / (400 * 256) as f64;
        rows.iter_mut().for_each(ResponseRow::round_stored);
        size
    };
    let (whole, rounded) = (bytes_per_token(), bytes_per_token());
    println!("bytes a token: {whole:.2} as they are, {rounded:.2} rounded");
    assert!(whole > 28.0, "rounding is not needed: {whole:.2}");
    assert!(rounded <= 28.0, "{rounded:.2}");
    assert_eq!(read_shard(&path, None).unwrap().0, rows);
}

#[test]
fn directories_are_read_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let error = read_dir(dir.path(), None).unwrap_err().to_string();
    assert!(error.contains("holds no `responses-*.parquet`: run build-data first"), "{error}");
    assert!(
        read_dir(&dir.path().join("none"), None)
            .unwrap_err()
            .to_string()
            .starts_with("cannot read")
    );

    fs::write(dir.path().join(".responses-00000.parquet.tmp"), "half").unwrap();
    fs::write(dir.path().join("rollouts-00000.parquet"), "other").unwrap();
    let rows = sample_rows();
    for (index, rows) in [(100_000, &rows[5..]), (2, &rows[3..5]), (0, &rows[..3])] {
        write_shard(&shard_path(dir.path(), index), rows, &provenance()).unwrap();
    }
    assert_eq!(read_dir(dir.path(), None).unwrap(), (rows.clone(), provenance()));

    let other = Provenance { top_p: 0.5, ..provenance() };
    write_shard(&shard_path(dir.path(), 2), &rows, &other).unwrap();
    let error = read_dir(dir.path(), None).unwrap_err().to_string();
    assert!(error.contains("`top_p` is 0.95 in the one and 0.5 in the other"), "{error}");
    assert!(error.contains("responses-00000.parquet` and `"), "{error}");
}

#[test]
fn broken_rows_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    let mut rows = sample_rows();
    rows[1].response_ids.push(1);
    let error = write_shard(&path, &rows, &provenance()).unwrap_err().to_string();
    assert!(error.starts_with("row `set#1`: column `response_target_log_prob` has 5"), "{error}");
    assert!(!path.exists());
}

/// A one-row table, to be broken before it is written.
fn table() -> Table {
    let list = |values: ArrayRef| {
        list(&Arc::new(Field::new("element", values.data_type().clone(), false)), values)
    };
    Table::new(&COLUMNS, |column| match column.kind {
        Kind::Text => Arc::new(StringArray::from(vec!["eos"])),
        Kind::Ids => list(Arc::new(UInt32Array::from(vec![1, 2]))),
        Kind::Floats if column.name.ends_with("log_prob") => {
            list(Arc::new(Float32Array::from(vec![-0.5, -1.5])))
        }
        Kind::Floats => list(Arc::new(Float32Array::from(vec![0.5, 0.25]))),
        other => unreachable!("not in the schema: {other:?}"),
    })
}

#[test]
fn tables_that_break_the_schema_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    let read = |change: &dyn Fn(&mut Table)| {
        let mut table = table();
        change(&mut table);
        table.write(&path, provenance().to_entries());
        read_shard(&path, None).map(|(rows, _)| rows).map_err(|e| e.to_string())
    };
    let check = |change: &dyn Fn(&mut Table), expected: &str| {
        let error = read(change).unwrap_err();
        assert!(error.starts_with(&format!("`{}`: {expected}", path.display())), "{error}");
    };
    // What other tools may do to a file: another order, other columns, other names of elements.
    assert_eq!(read(&|_| {}).unwrap()[0].response_ids, [1, 2]);
    let rewritten = read(&|table| {
        table.set("prompt_ids", nullable(Arc::new(UInt32Array::from(vec![9, 8, 7]))));
        table.reorder();
    });
    assert_eq!(rewritten.unwrap()[0].prompt_ids, [9, 8, 7]);

    let texts = |text: Option<&str>| -> ArrayRef { Arc::new(StringArray::from(vec![text])) };
    check(
        &|table| table.set("overlap", nullable(Arc::new(UInt32Array::from(vec![1, 2])))),
        "column `overlap` is `List(",
    );
    check(
        &|table| table.set("draft_ids", texts(Some("x"))),
        "column `draft_ids` is `Utf8`, it must be a list of u32; build the data again",
    );
    check(
        &|table| table.set("id", nullable(Arc::new(UInt32Array::from(vec![1])))),
        "column `id` is `List(",
    );
    check(&|table| table.set("id", texts(None)), "row 0, column `id` is null; build");
    check(
        &|table| table.set("finish_reason", texts(Some("stop"))),
        "row 0, column `finish_reason` is `stop`, it must be `eos` or `length`",
    );
    check(
        &|table| table.set("response_ids", null_list(DataType::UInt32)),
        "row 0, column `response_ids` is null; build",
    );
    check(
        &|table| {
            let values =
                UInt32Array::new(vec![1, 2].into(), Some(NullBuffer::from(vec![true, false])));
            table.set("response_ids", nullable(Arc::new(values)));
        },
        "row 0, column `response_ids` holds a null in its list",
    );
    check(
        &|table| table.set("draft_entropy", null_list(DataType::Float32)),
        "row 0, column `draft_entropy` is null where other columns of the draft are not",
    );
    check(
        &|table| table.set("overlap", nullable(Arc::new(Float32Array::from(vec![1.0])))),
        "row `eos`: column `overlap` has 1 values, `response_ids` has 2",
    );
    check(
        &|table| table.set("overlap", nullable(Arc::new(Float32Array::from(vec![1.0, 1.5])))),
        "row `eos`: column `overlap` is 1.5 at 1, it must be within [0, 1]; build the data again",
    );

    let error = read(&|table| table.remove("target_top_ids")).unwrap_err();
    assert!(error.contains("has no column `target_top_ids`"), "{error}");
}

#[test]
fn tokens_that_the_reading_model_does_not_know_are_told_by_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    let mut rows = sample_rows();
    rows[2].draft.as_mut().unwrap().draft_ids[1] = 4096;
    write_shard(&path, &rows, &provenance()).unwrap();
    for known in [None, Some(4097)] {
        assert_eq!(read_shard(&path, known).unwrap().0, rows);
        assert_eq!(read_dir(dir.path(), known).unwrap().0, rows);
    }
    let expected = format!(
        "`{}`: row `set#2`: column `draft_ids` has token 4096 at 1, but the model that is to read \
         it has 4096 tokens; build the data again",
        path.display()
    );
    assert_eq!(read_shard(&path, Some(4096)).unwrap_err().to_string(), expected);
    assert_eq!(read_dir(dir.path(), Some(4096)).unwrap_err().to_string(), expected);
}

#[test]
fn files_without_provenance_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    table().write(&path, Vec::new());
    let error = read_shard(&path, None).unwrap_err().to_string();
    assert!(error.contains("there is no `draftsmith.*` key"), "{error}");
}

#[test]
fn cut_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    write_shard(&path, &sample_rows(), &provenance()).unwrap();
    check_cut_files(&path, |path| read_shard(path, None));
}

#[test]
fn flipped_bytes_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    write_shard(&path, &sample_rows(), &provenance()).unwrap();
    check_flipped_bytes(
        &path,
        4,
        |path| read_shard(path, None),
        |(rows, _)| {
            rows.iter().for_each(|row| row.validate().unwrap());
        },
    );
}
