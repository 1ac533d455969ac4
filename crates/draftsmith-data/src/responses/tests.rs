//! Round trips, the layout and size of a shard, and damaged or misnamed files.

use std::fs::{self, File};
use std::sync::Arc;

use arrow_array::{ArrayRef, Float32Array, StringArray, UInt32Array};
use arrow_buffer::NullBuffer;
use arrow_schema::{DataType, Field};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, Encoding};
use parquet::file::properties::WriterProperties;
use parquet::schema::types::ColumnPath;

use super::row::COLUMNS;
use super::*;
use crate::columns::tests::{
    Noise, Table, check_cut_files, check_flipped_bytes, null_list, nullable,
};
use crate::columns::write_rows;
use crate::error::DataError;
use crate::provenance::tests::provenance;
use crate::provenance::{Provenance, fields_to_entries};

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
            draft_target_cross_entropy: (!n.is_multiple_of(3))
                .then(|| floats(noise).iter().map(|log| 1.0 - log).collect()),
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
        target_outside_mass: (n % 4 == 3)
            .then(|| floats(noise).iter().map(|log| log.exp()).collect()),
        draft,
        finish_reason: if n.is_multiple_of(2) { FinishReason::Eos } else { FinishReason::Length },
    }
}

/// Rows with and without a draft, including −∞.
fn sample_rows() -> Vec<ResponseRow> {
    let mut noise = Noise(1);
    let mut rows: Vec<_> = (0..7).map(|n| row(&mut noise, n, n * 5 % 17 + 1, n != 3)).collect();
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
    let many: Vec<_> = (0..2500).map(|n| row(&mut noise, n, n % 3 + 1, n % 5 != 0)).collect();
    for rows in [sample_rows(), without_draft, many, Vec::new()] {
        write_shard(&path, &rows, &provenance(), None).unwrap();
        let read = read_shard(&path, None).unwrap();
        assert_eq!(read.0, rows);
        assert_eq!(read.1, provenance());
    }
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["responses-00003.parquet"]);
}

/// A row of exact numbers, which are the same on every platform.
fn exact_row(n: usize) -> ResponseRow {
    let length = 3 + n;
    let ids = |step: usize| (0..length).map(|at| (at * step + n) as u32).collect();
    let shares = |step: usize| -> Vec<f32> {
        (0..length).map(|at| ((at * step + n) % 9) as f32 / 8.0).collect()
    };
    let logs = |step| -> Vec<f32> { shares(step).iter().map(|share| -share).collect() };
    ResponseRow {
        id: format!("set#{n}"),
        source: "set".into(),
        prompt_ids: vec![1, 5, n as u32],
        response_ids: ids(3),
        response_target_log_prob: logs(1),
        target_outside_mass: (n == 3).then(|| shares(2)),
        draft: (n != 2).then(|| DraftColumns {
            response_draft_log_prob: logs(2),
            draft_ids: ids(5),
            draft_log_prob: logs(4),
            target_log_prob: logs(5),
            overlap: shares(4),
            draft_entropy: shares(5),
            draft_target_cross_entropy: (n != 1).then(|| shares(7)),
            draft_top_ids: ids(7),
            target_top_ids: ids(11),
            draft_top_log_prob: logs(8),
        }),
        finish_reason: if n == 0 { FinishReason::Length } else { FinishReason::Eos },
    }
}

/// A golden number: these are the bytes of the version before columns were described in one place.
/// Equal data must keep its hash, by which heads and recordings name it.
#[test]
fn the_bytes_and_the_hash_of_rows_stay_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<ResponseRow> = (0..4).map(exact_row).collect();
    let position = Some(ShardPlace { index: 0, count: 1 });
    write_shard(&shard_path(dir.path(), 0), &rows, &provenance(), position).unwrap();
    let bytes = fs::read(shard_path(dir.path(), 0)).unwrap();
    let data = read_dir(dir.path(), Incomplete::Refused).unwrap();
    assert_eq!(data.rows, rows);
    let found = [blake3::hash(&bytes).to_hex().to_string(), data.hash];
    assert_eq!(
        found,
        [
            "d9be04fea589a8838d1a70aa0329d1fbaa265da336c248a7d826a88686b4cfa8",
            "ef3c46cb6ff2f7e1acb16ac0bb2329343dda7536b73d66426961871a4887b4de",
        ]
    );
}

#[test]
fn the_manifest_records_every_shard() {
    let (dir, rows) = three_shards();
    let names = || {
        let entries = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names().len(), 6, "a record beside each");
    // One shard has no record, as from versions that wrote none.
    fs::remove_file(dir.path().join(".responses-00001.json")).unwrap();
    fs::write(dir.path().join(".responses-00001.parquet.tmp"), "left").unwrap();
    write_manifest(dir.path(), 3).unwrap();
    let shards = ["responses-00000.parquet", "responses-00001.parquet", "responses-00002.parquet"];
    assert_eq!(names(), [&["manifest.json"], &shards[..]].concat());
    let text = fs::read_to_string(dir.path().join("manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&manifest["num_shards"], &manifest["num_rows"]), (&3.into(), &rows.len().into()));
    for (record, name) in manifest["shards"].as_array().unwrap().iter().zip(shards) {
        let bytes = fs::read(dir.path().join(name)).unwrap();
        assert_eq!((&record["name"], &record["num_bytes"]), (&name.into(), &bytes.len().into()));
        assert_eq!(record["blake3"], blake3::hash(&bytes).to_hex().as_str());
    }
    assert!(broken_shards(dir.path()).unwrap().is_empty());

    // A new record replaces the one in the manifest.
    write_nth(dir.path(), 1, 3, &rows[3..5]);
    assert_eq!(names().len(), 5);
    write_manifest(dir.path(), 3).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("manifest.json")).unwrap(), text);

    let path = shard_path(dir.path(), 1);
    let whole = fs::read(&path).unwrap();
    for at in [0, whole.len() / 2, whole.len() - 30] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let broken = broken_shards(dir.path()).unwrap();
        assert_eq!(broken.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1], "byte {at}");
        assert!(broken[0].1.to_string().contains("responses-00001.parquet`"), "{}", broken[0].1);
        assert!(refusal(dir.path()).contains("responses-00001.parquet`"));
    }
    fs::write(&path, &whole).unwrap();
    fs::write(dir.path().join("manifest.json"), "[]").unwrap();
    assert!(refusal(dir.path()).contains("manifest.json` cannot be read"));
    forget_manifest(dir.path()).unwrap();
    write_manifest(dir.path(), 3).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("manifest.json")).unwrap(), text);
}

#[test]
fn equal_rows_give_equal_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (shard_path(dir.path(), 0), shard_path(dir.path(), 1));
    write_shard(&one, &sample_rows(), &provenance(), None).unwrap();
    write_shard(&two, &sample_rows(), &provenance(), None).unwrap();
    assert_eq!(fs::read(one).unwrap(), fs::read(two).unwrap());
}

#[test]
fn shards_are_plain_parquet() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    write_shard(&path, &sample_rows(), &provenance(), None).unwrap();
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let list = |element| DataType::List(Arc::new(Field::new("element", element, false)));
    let fields = builder.schema().fields();
    assert_eq!(fields.len(), 17);
    assert_eq!(*fields[0], Field::new("id", DataType::Utf8, false));
    assert_eq!(*fields[3], Field::new("response_ids", list(DataType::UInt32), false));
    assert_eq!(*fields[6], Field::new("response_draft_log_prob", list(DataType::Float32), true));
    assert_eq!(fields[16].name(), "finish_reason");
    let metadata = builder.metadata();
    let entries = metadata.file_metadata().key_value_metadata().unwrap();
    let seed = entries.iter().find(|entry| entry.key == "draftsmith.seed").unwrap();
    assert_eq!(seed.value.as_deref(), Some("18446744073709551615"));
    assert!(entries.iter().all(|entry| entry.key.starts_with("draftsmith.")));
    let overlap = metadata.row_group(0).column(10);
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
        write_shard(&path, &rows, &provenance(), None).unwrap();
        let size = fs::metadata(&path).unwrap().len() as f64 / (400 * 256) as f64;
        rows.iter_mut().for_each(ResponseRow::round_stored);
        size
    };
    let (whole, rounded) = (bytes_per_token(), bytes_per_token());
    println!("bytes per token: {whole:.2} unrounded, {rounded:.2} rounded");
    assert!(whole > 28.0, "rounding is unnecessary: {whole:.2}");
    assert!(rounded <= 28.0, "{rounded:.2}");
    assert_eq!(read_shard(&path, None).unwrap().0, rows);
}

/// Writes rows as one of `count` shards.
fn write_nth(dir: &Path, index: usize, count: usize, rows: &[ResponseRow]) -> PathBuf {
    let path = shard_path(dir, index);
    write_shard(&path, rows, &provenance(), Some(ShardPlace { index, count })).unwrap();
    path
}

/// A directory of three shards and their rows.
fn three_shards() -> (tempfile::TempDir, Vec<ResponseRow>) {
    let (dir, rows) = (tempfile::tempdir().unwrap(), sample_rows());
    for (index, rows) in [(2, &rows[5..]), (1, &rows[3..5]), (0, &rows[..3])] {
        write_nth(dir.path(), index, 3, rows);
    }
    (dir, rows)
}

/// The error of reading a directory, whether or not shards may be missing.
fn refusal(dir: &Path) -> String {
    let refused = [Incomplete::Allowed, Incomplete::Refused].map(|incomplete| {
        let error = read_dir(dir, incomplete).unwrap_err();
        assert!(!matches!(error, DataError::MissingShards(_)), "{error}");
        error.to_string()
    });
    assert_eq!(refused[0], refused[1]);
    refused[0].clone()
}

#[test]
fn directories_are_read_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let error = refusal(dir.path());
    assert!(error.contains("holds no `responses-*.parquet`: run build-data first"), "{error}");
    assert!(refusal(&dir.path().join("none")).starts_with("cannot read"));

    let (dir, rows) = three_shards();
    fs::write(dir.path().join(".responses-00000.parquet.tmp"), "half").unwrap();
    fs::write(dir.path().join("rollouts-00000.parquet"), "other").unwrap();
    let read = read_dir(dir.path(), Incomplete::Refused).unwrap();
    assert_eq!((&read.rows, &read.provenance), (&rows, &provenance()));
    assert_eq!((read.num_shards(), read.num_shards_planned), (3, 3));

    let other = Provenance { top_p: 0.5, ..provenance() };
    let place = Some(ShardPlace { index: 2, count: 3 });
    write_shard(&shard_path(dir.path(), 2), &rows, &other, place).unwrap();
    let error = refusal(dir.path());
    assert!(error.contains("`top_p` is 0.95 in the one and 0.5 in the other"), "{error}");
    assert!(error.contains("responses-00000.parquet` and `"), "{error}");
}

#[test]
fn missing_shards_are_named_unless_they_may_be_missing() {
    let (dir, rows) = three_shards();
    let whole = read_dir(dir.path(), Incomplete::Refused).unwrap();
    fs::remove_file(shard_path(dir.path(), 1)).unwrap();
    let error = read_dir(dir.path(), Incomplete::Refused).unwrap_err().to_string();
    assert!(error.ends_with("of 3 shards it lacks `responses-00001.parquet`"), "{error}");
    let part = read_dir(dir.path(), Incomplete::Allowed).unwrap();
    assert_eq!(part.rows, [&rows[..3], &rows[5..]].concat());
    assert_eq!((part.num_shards(), part.num_shards_planned), (2, 3));
    assert_ne!(part.hash, whole.hash);

    let many = tempfile::tempdir().unwrap();
    for (count, more) in [(100, 96), (usize::MAX, usize::MAX - 4)] {
        write_nth(many.path(), 4, count, &rows);
        let error = read_dir(many.path(), Incomplete::Refused).unwrap_err().to_string();
        assert!(error.ends_with(&format!("`responses-00002.parquet` and {more} more")), "{error}");
    }
}

#[test]
fn copied_surplus_and_misnamed_shards_are_refused() {
    let path = |dir: &tempfile::TempDir, index| shard_path(dir.path(), index);
    let (dir, rows) = three_shards();
    fs::copy(path(&dir, 0), path(&dir, 1)).unwrap();
    let error = refusal(dir.path());
    let copy = "responses-00001.parquet` is a copy of `responses-00000.parquet`";
    assert!(error.contains(copy), "{error}");

    let (dir, _) = three_shards();
    fs::copy(path(&dir, 2), path(&dir, 3)).unwrap();
    assert!(refusal(dir.path()).contains("responses-00003.parquet` is a copy of `"));
    write_nth(dir.path(), 3, 3, &rows);
    let error = refusal(dir.path());
    assert!(error.contains("responses-00003.parquet` is surplus: there are 3"), "{error}");
    write_nth(dir.path(), 3, 4, &rows);
    let error = refusal(dir.path());
    let other = "00003.parquet` is one of 4 shards, and `responses-00000.parquet` one of 3; remove";
    assert!(error.contains(other), "{error}");

    let (dir, _) = three_shards();
    fs::copy(path(&dir, 2), dir.path().join("responses-2.parquet")).unwrap();
    let error = refusal(dir.path());
    let name =
        "responses-2.parquet` is named like shard 2, whose name is `responses-00002.parquet`";
    assert!(error.contains(name), "{error}");

    let (dir, rows) = three_shards();
    write_shard(&path(&dir, 1), &rows[3..5], &provenance(), None).unwrap();
    let error = refusal(dir.path());
    assert!(
        error.contains("00001.parquet`: its provenance") && error.contains(".shard`"),
        "{error}"
    );
}

#[test]
fn repeated_rows_are_refused() {
    let (dir, rows) = three_shards();
    write_nth(dir.path(), 2, 3, &rows[4..]);
    let error = refusal(dir.path());
    let both = "responses-00001.parquet` and again in `";
    assert!(error.contains(both) && error.contains("row `set#4` is in `"), "{error}");
    write_nth(dir.path(), 2, 3, &[rows[5].clone(), rows[6].clone(), rows[5].clone()]);
    let error = refusal(dir.path());
    let twice = "00002.parquet` and again in `";
    assert!(error.contains(twice) && error.contains("row `set#5` is in `"), "{error}");
}

#[test]
fn the_hash_depends_only_on_the_rows() {
    let (dir, rows) = three_shards();
    let hash = || read_dir(dir.path(), Incomplete::Refused).unwrap().hash;
    let whole = hash();
    // Other metadata, as from another tool, changes the bytes of the file.
    let mut entries = fields_to_entries(provenance().fields());
    entries.push(("draftsmith.shard".to_owned(), r#"{"index":0,"count":3}"#.to_owned()));
    entries.push(("pandas".to_owned(), "{}".to_owned()));
    let bytes = fs::read(shard_path(dir.path(), 0)).unwrap();
    write_rows(&shard_path(dir.path(), 0), &COLUMNS, entries, &rows[..3]).unwrap();
    let error = refusal(dir.path());
    assert!(
        error.contains("responses-00000.parquet` has ") && error.contains("--repair"),
        "{error}"
    );
    forget_manifest(dir.path()).unwrap();
    assert_ne!(fs::read(shard_path(dir.path(), 0)).unwrap(), bytes);
    assert_eq!(hash(), whole);
    let check = |change: fn(&mut ResponseRow)| {
        let mut rows = rows[3..5].to_vec();
        change(&mut rows[1]);
        write_nth(dir.path(), 1, 3, &rows);
        assert_ne!(hash(), whole);
    };
    check(|row| row.prompt_ids[0] += 1);
    check(|row| row.response_target_log_prob[1] = -7.0);
    check(|row| row.draft.as_mut().unwrap().draft_top_log_prob[0] = -7.0);
    check(|row| row.draft = None);
    check(|row| row.finish_reason = FinishReason::Length);
    // Move bytes from one column to another.
    check(|row| {
        let last = row.prompt_ids.pop().unwrap();
        row.id.push(char::from_u32(last % 128).unwrap());
    });
    write_nth(dir.path(), 1, 3, &rows[3..5]);
    assert_eq!(hash(), whole);
}

#[test]
fn invalid_rows_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    let mut rows = sample_rows();
    rows[1].response_ids.push(1);
    let error = write_shard(&path, &rows, &provenance(), None).unwrap_err().to_string();
    assert!(error.starts_with("row `set#1`: column `response_target_log_prob` has 6"), "{error}");
    assert!(!path.exists());
}

/// A table of one row, which a test changes before it is written.
fn table() -> Table<ResponseRow> {
    let (shares, logs, ids) = (vec![0.5, 0.25], vec![-0.5, -1.5], vec![1, 2]);
    let row = ResponseRow {
        id: "eos".into(),
        source: "eos".into(),
        prompt_ids: ids.clone(),
        response_ids: ids.clone(),
        response_target_log_prob: logs.clone(),
        target_outside_mass: Some(shares.clone()),
        draft: Some(DraftColumns {
            response_draft_log_prob: logs.clone(),
            draft_ids: ids.clone(),
            draft_log_prob: logs.clone(),
            target_log_prob: logs.clone(),
            overlap: shares.clone(),
            draft_entropy: shares.clone(),
            draft_target_cross_entropy: Some(shares),
            draft_top_ids: ids.clone(),
            target_top_ids: ids,
            draft_top_log_prob: logs,
        }),
        finish_reason: FinishReason::Eos,
    };
    Table::of(&COLUMNS, &[row])
}

#[test]
fn columns_with_wrong_types_or_values_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    let read = |change: &dyn Fn(&mut Table<ResponseRow>)| {
        let mut table = table();
        change(&mut table);
        table.write(&path, fields_to_entries(provenance().fields()));
        read_shard(&path, None).map(|(rows, _)| rows).map_err(|e| e.to_string())
    };
    let check = |change: &dyn Fn(&mut Table<ResponseRow>), expected: &str| {
        let error = read(change).unwrap_err();
        assert!(error.starts_with(&format!("`{}`: {expected}", path.display())), "{error}");
    };
    // Other tools may reorder columns, add some and rename list elements.
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
    for (column, expected) in [
        ("response_ids", "row `eos`: column `response_ids` is empty: the loss mask would be all 0"),
        ("prompt_ids", "row `eos`: column `prompt_ids` is empty: the loss mask would be all 1"),
    ] {
        let empty = || nullable(Arc::new(UInt32Array::from(Vec::<u32>::new())));
        check(&|table| table.set(column, empty()), expected);
    }
    check(&|table| table.set("id", texts(None)), "column `id` is null (row 0); build");
    check(
        &|table| table.set("finish_reason", texts(Some("stop"))),
        "column `finish_reason` is `stop`, it must be `eos`, `stop_string` or `length`",
    );
    check(
        &|table| table.set("response_ids", null_list(DataType::UInt32)),
        "column `response_ids` is null (row 0); build",
    );
    check(
        &|table| {
            let values =
                UInt32Array::new(vec![1, 2].into(), Some(NullBuffer::from(vec![true, false])));
            table.set("response_ids", nullable(Arc::new(values)));
        },
        "column `response_ids` holds a null in its list (row 0)",
    );
    check(
        &|table| table.set("draft_entropy", null_list(DataType::Float32)),
        "column `draft_entropy` is null where other columns of the draft are not (row 0)",
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
    assert!(error.contains("column `target_top_ids` is missing: "), "{error}");
}

#[test]
fn unknown_tokens_are_named_with_their_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    let mut rows = sample_rows();
    rows[2].draft.as_mut().unwrap().draft_ids[1] = 4096;
    write_nth(dir.path(), 0, 1, &rows);
    for known in [None, Some(4097)] {
        assert_eq!(read_shard(&path, known).unwrap().0, rows);
    }
    let data = read_dir(dir.path(), Incomplete::Refused).unwrap();
    assert_eq!(data.rows, rows);
    data.check_tokens(4097).unwrap();
    let expected = format!(
        "`{}`: row `set#2`: column `draft_ids` has token 4096 at 1, but the model that is to read \
         it has 4096 tokens; build the data again",
        path.display()
    );
    assert_eq!(read_shard(&path, Some(4096)).unwrap_err().to_string(), expected);
    assert_eq!(data.check_tokens(4096).unwrap_err().to_string(), expected);
}

#[test]
fn text_encodings_with_unbounded_memory_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    write_shard(&path, &sample_rows(), &provenance(), None).unwrap();
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(&path).unwrap()).unwrap();
    let entries = builder.metadata().file_metadata().key_value_metadata().cloned();
    let (schema, batches) = (builder.schema().clone(), builder.build().unwrap());
    let batches: Vec<_> = batches.map(|batch| batch.unwrap()).collect();
    let check = |encoding, expected: Option<&str>| {
        let properties = WriterProperties::builder()
            .set_dictionary_enabled(false)
            .set_key_value_metadata(entries.clone())
            .set_column_encoding(ColumnPath::from("source"), encoding);
        let file = File::create(&path).unwrap();
        let mut writer =
            ArrowWriter::try_new(file, schema.clone(), Some(properties.build())).unwrap();
        batches.iter().for_each(|batch| writer.write(batch).unwrap());
        writer.close().unwrap();
        let found = read_shard(&path, None).map(|(rows, _)| rows).map_err(|e| e.to_string());
        match expected {
            None => assert_eq!(found.unwrap(), sample_rows()),
            Some(expected) => {
                let error = found.unwrap_err();
                assert!(error.contains(expected), "{error}");
            }
        }
    };
    check(Encoding::PLAIN, None);
    check(Encoding::DELTA_BYTE_ARRAY, Some("column `source` is encoded as DELTA_BYTE_ARRAY"));
    check(
        Encoding::DELTA_LENGTH_BYTE_ARRAY,
        Some("DELTA_LENGTH_BYTE_ARRAY, which is not supported"),
    );
}

#[test]
fn files_without_provenance_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    table().write(&path, Vec::new());
    let error = read_shard(&path, None).unwrap_err().to_string();
    assert!(error.contains("there is no `draftsmith.*` key"), "{error}");
}

#[test]
fn truncated_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    write_shard(&path, &sample_rows(), &provenance(), None).unwrap();
    check_cut_files(&path, |path| read_shard(path, None));
}

#[test]
fn changed_bytes_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard_path(dir.path(), 0);
    write_shard(&path, &sample_rows(), &provenance(), None).unwrap();
    check_flipped_bytes(
        &path,
        4,
        |path| read_shard(path, None),
        |(rows, _)| {
            rows.iter().for_each(|row| row.validate().unwrap());
        },
    );
}
