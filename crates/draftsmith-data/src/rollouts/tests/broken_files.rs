//! Damaged files and files of other kinds.

use arrow_array::{ArrayRef, BooleanArray, Float32Array, Float64Array, StringArray, UInt32Array};
use arrow_buffer::NullBuffer;

use super::*;
use crate::columns::tests::{Table, check_cut_files, check_flipped_bytes, null_list, nullable};
use crate::provenance::fields_to_entries;

/// A table with one response of two tokens, which a test changes before it is written.
fn table() -> Table<RolloutRow> {
    let row = RolloutRow {
        id: "set#0".into(),
        prompt_ids: vec![10],
        start: 0,
        limit: 2,
        candidates: candidates(&mut Noise(5), vec![11, 12], true),
        is_response: true,
    };
    Table::of(&COLUMNS, &[row])
}

#[test]
fn columns_with_wrong_types_or_values_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    let read = |change: &dyn Fn(&mut Table<RolloutRow>)| {
        let mut table = table();
        change(&mut table);
        table.write(&path, provenance(true).to_entries());
        read_rollouts(&path, None).map(|(rows, _)| rows).map_err(|e| e.to_string())
    };
    let check = |change: &dyn Fn(&mut Table<RolloutRow>), expected: &str| {
        let error = read(change).unwrap_err();
        assert!(error.starts_with(&format!("`{}`: {expected}", path.display())), "{error}");
        assert!(error.ends_with("; build the data again"), "{error}");
    };
    let doubles = |values: &[f64]| nullable(Arc::new(Float64Array::from(values.to_vec())));
    let is_response = |value: bool| -> ArrayRef { Arc::new(BooleanArray::from(vec![value])) };
    let no_text: ArrayRef = Arc::new(StringArray::from(vec![None::<&str>]));
    let no_number: ArrayRef = Arc::new(UInt32Array::from(vec![None]));
    let no_flag: ArrayRef = Arc::new(BooleanArray::from(vec![None]));
    // Other tools may reorder columns, add some and rename list elements.
    assert_eq!(read(&|_| {}).unwrap()[0].candidates.candidate_ids, [11, 12]);
    let rewritten = read(&|table| {
        table.set("confidence", doubles(&[0.25, 0.75]));
        table.reorder();
    });
    assert_eq!(rewritten.unwrap()[0].candidates.confidence, [0.25, 0.75]);

    for column in &COLUMNS {
        let without = read(&|table| table.remove(column.name));
        let error = without.unwrap_err();
        let expected = format!("`{}`: column `{}` is missing: ", path.display(), column.name);
        assert!(error.starts_with(&expected), "{error}");
        assert!(error.ends_with("; build the data again"), "{error}");
        let other_type = |table: &mut Table<RolloutRow>| {
            table.set(column.name, nullable(Arc::new(Float32Array::from(vec![0.5, 0.5]))));
        };
        check(&other_type, &format!("column `{}` is `List(", column.name));
    }
    check(
        &|table| table.set("start", Arc::new(Float32Array::from(vec![0.0]))),
        "column `start` is `Float32`, it must be a number (u32)",
    );
    check(
        &|table| table.set("is_response", no_number.clone()),
        "column `is_response` is `UInt32`, it must be true or false (bool)",
    );
    check(
        &|table| table.set("confidence", no_flag.clone()),
        "column `confidence` is `Boolean`, it must be a list of f64",
    );

    check(&|table| table.set("id", no_text.clone()), "column `id` is null (row 0)");
    check(&|table| table.set("start", no_number.clone()), "column `start` is null (row 0)");
    check(&|table| table.set("limit", no_number.clone()), "column `limit` is null (row 0)");
    check(
        &|table| table.set("is_response", no_flag.clone()),
        "column `is_response` is null (row 0)",
    );
    check(
        &|table| table.set("candidate_ids", null_list(DataType::UInt32)),
        "column `candidate_ids` is null (row 0)",
    );
    for column in ["candidate_prob", "confidence", "draft_entropy", "draft_log_prob"] {
        check(
            &|table| table.set(column, null_list(DataType::Float64)),
            &format!("column `{column}` is null (row 0)"),
        );
    }
    check(
        &|table| {
            let nulls = Some(NullBuffer::from(vec![true, false]));
            table.set(
                "confidence",
                nullable(Arc::new(Float64Array::new(vec![0.5; 2].into(), nulls))),
            );
        },
        "column `confidence` holds a null in its list (row 0)",
    );
    check(
        &|table| table.set("is_response", is_response(false)),
        "rollout `set#0` at 0: column `prompt_ids` is not empty, but only a response's row",
    );
    check(
        &|table| table.set("predicted_acceptance_prob", null_list(DataType::Float64)),
        "rollout `set#0` at 0: column `predicted_acceptance_prob` is null, but the provenance",
    );
    check(
        &|table| table.set("target_log_prob", doubles(&[-1.0])),
        "rollout `set#0` at 0: column `target_log_prob` has 1 values, `candidate_ids` has 2",
    );
}

#[test]
fn files_with_other_metadata_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    let read = |entries: Vec<(String, String)>| {
        table().write(&path, entries);
        read_rollouts(&path, None).unwrap_err().to_string()
    };
    let expected = format!("`{}`: its provenance cannot be used: ", path.display());
    let error = read(Vec::new());
    assert!(error.starts_with(&format!("{expected}there is no `draftsmith.*` key")), "{error}");
    let error = read(fields_to_entries(provenance_tests::provenance().fields()));
    assert_eq!(error, format!("{expected}missing field `drafter`; build the data again"));
    let mut entries = provenance(true).to_entries();
    entries.retain(|(key, _)| key != "draftsmith.target");
    assert_eq!(read(entries), format!("{expected}missing field `target`; build the data again"));
    let mut entries = provenance(true).to_entries();
    entries.push(("draftsmith.colour".into(), "1".into()));
    assert!(read(entries).contains("unknown field `colour`"));

    let missing = rollouts_path(dir.path(), "draft", "test", "greedy");
    assert!(missing.ends_with("rollouts-draft-test-greedy.parquet"));
    let error = read_rollouts(&missing, None).unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot read `{}`", missing.display())), "{error}");
}

#[test]
fn truncated_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    write_rollouts(&path, &sample_rows(true), &provenance(true)).unwrap();
    check_cut_files(&path, |path| read_rollouts(path, None));
}

#[test]
fn changed_bytes_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    write_rollouts(&path, &small_rows(), &provenance(true)).unwrap();
    check_flipped_bytes(
        &path,
        6,
        |path| read_rollouts(path, None),
        |(rows, _)| validate_rollouts(&rows).unwrap(),
    );
}

#[test]
fn the_error_of_an_invalid_row_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    let rows = &small_rows()[1..];
    let table = Table::of(&COLUMNS, rows);
    table.write(&path, provenance(true).to_entries());
    let error = read_rollouts(&path, None).unwrap_err();
    let expected = format!(
        "`{}`: rollout `set#0` at 0: column `is_response` is false, the first row of an id is the \
         response's; build the data again",
        path.display()
    );
    assert_eq!(error.to_string(), expected);
}
