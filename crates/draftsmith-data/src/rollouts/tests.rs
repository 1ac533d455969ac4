//! Round trips and the layout of a file; `rules` tests the rules of rows, `broken_files` damaged
//! files.

mod broken_files;
mod rules;

use std::fs::{self, File};
use std::sync::Arc;

use arrow_schema::{DataType, Field};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, Encoding};

use draftsmith_theory::HeadTiming;

use super::*;
use crate::columns::tests::Noise;
use crate::provenance::{Provenance, tests as provenance_tests};

const MAX_LENGTH: usize = 5;

fn provenance(with_head: bool) -> RolloutProvenance {
    RolloutProvenance {
        responses: provenance_tests::provenance(),
        drafter: "self_draft_2".into(),
        set: "validation".into(),
        head: with_head.then(|| RolloutHead::new("ee".into(), HeadTiming::AtDraw)),
        max_length: MAX_LENGTH as u32,
        context: 4096,
        forwards: Default::default(),
        data: with_head.then(|| "ff".into()),
    }
}

fn candidates(noise: &mut Noise, candidate_ids: Vec<u32>, with_head: bool) -> RolloutCandidates {
    let length = candidate_ids.len();
    let predicted = with_head.then(|| {
        let mut predicted: Vec<_> = (0..length).map(|_| noise.unit()).collect();
        if let Some(last) = predicted.last_mut() {
            *last = f64::NAN;
        }
        predicted
    });
    let mut list = |value: fn(&mut Noise) -> f64| (0..length).map(|_| value(noise)).collect();
    RolloutCandidates {
        candidate_ids,
        candidate_prob: list(Noise::unit),
        confidence: list(Noise::unit),
        confidence_of_ten: list(Noise::unit),
        draft_entropy: list(|noise| -noise.log_prob()),
        predicted_acceptance_prob: predicted,
        draft_log_prob: list(Noise::log_prob),
        target_log_prob: list(Noise::log_prob),
    }
}

/// The rows of one id: a response that ends at its limit or earlier with an end token, and its
/// rollouts.
fn rows_of_id(noise: &mut Noise, n: usize, length: usize, with_head: bool) -> Vec<RolloutRow> {
    let id = format!("set#{n}");
    let limit = length + n % 2;
    // Larger than the end tokens.
    let token = |noise: &mut Noise| 10 + noise.id();
    let mut response: Vec<u32> = (0..length).map(|_| token(noise)).collect();
    if length < limit {
        response[length - 1] = 2;
    }
    let mut rows = vec![RolloutRow {
        id: id.clone(),
        prompt_ids: (0..=n).map(|_| token(noise)).collect(),
        start: 0,
        limit: limit as u32,
        candidates: candidates(noise, response.clone(), with_head),
        is_response: true,
    }];
    for (start, &token_there) in response.iter().enumerate().take(limit - 1) {
        if noise.next().is_multiple_of(3) {
            continue;
        }
        let room = MAX_LENGTH.min(limit - start - 1);
        let length = 1 + noise.next() as usize % room;
        let mut ids: Vec<_> = (0..length).map(|_| token(noise)).collect();
        ids[0] = token_there + 10;
        if length < room {
            ids[length - 1] = 7;
        }
        rows.push(RolloutRow {
            id: id.clone(),
            prompt_ids: Vec::new(),
            start: start as u32,
            limit: limit as u32,
            candidates: candidates(noise, ids, with_head),
            is_response: false,
        });
    }
    rows
}

/// A golden number: the bytes of the version that first had these columns.
#[test]
fn the_bytes_of_a_file_stay_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rollouts.parquet");
    let exact = |candidate_ids: Vec<u32>| {
        let list = |step: usize| -> Vec<f64> {
            (0..candidate_ids.len()).map(|at| (at * step % 9) as f64 / 8.0).collect()
        };
        let logs = |step| -> Vec<f64> { list(step).iter().map(|share| -share).collect() };
        RolloutCandidates {
            candidate_prob: list(1),
            confidence: list(2),
            confidence_of_ten: list(4),
            draft_entropy: list(5),
            predicted_acceptance_prob: Some(list(7)),
            draft_log_prob: logs(1),
            target_log_prob: logs(2),
            candidate_ids,
        }
    };
    let response = RolloutRow {
        id: "set#0".into(),
        prompt_ids: vec![1, 5],
        start: 0,
        limit: 4,
        candidates: exact(vec![11, 12, 13, 14]),
        is_response: true,
    };
    let rollout = RolloutRow {
        prompt_ids: Vec::new(),
        start: 1,
        candidates: exact(vec![15, 16]),
        is_response: false,
        ..response.clone()
    };
    let mut of_greedy = provenance(true);
    of_greedy.responses.temperature = 0.0;
    let rows = [response, rollout];
    write_rollouts(&path, &rows, &of_greedy).unwrap();
    assert_eq!(read_rollouts(&path, None).unwrap().0, rows);
    let found = blake3::hash(&fs::read(&path).unwrap()).to_hex().to_string();
    assert_eq!(found, "673819538668f828d2e8ed8f7bdd435c7c21a880c4e7155cd8d7954145281ccf");
}

/// Responses of several lengths with extreme values, including −∞.
fn sample_rows(with_head: bool) -> Vec<RolloutRow> {
    let mut noise = Noise(1);
    let mut rows: Vec<_> =
        (0..7).flat_map(|n| rows_of_id(&mut noise, n, 1 + n * 5 % 17, with_head)).collect();
    let response = &mut rows[1].candidates;
    assert_eq!(response.candidate_ids.len(), 6);
    response.draft_log_prob[0] = f64::NEG_INFINITY;
    response.target_log_prob[1] = f64::NEG_INFINITY;
    response.target_log_prob[0] = -0.0;
    response.candidate_prob[0] = 0.0;
    response.confidence[0] = 1.0;
    response.draft_entropy[0] = f64::MIN_POSITIVE;
    validate_rollouts(&rows).unwrap();
    rows
}

/// The contents of a row with floats as bits, so that NaN equals NaN and 0 differs from −0.
fn bits(row: &RolloutRow) -> impl PartialEq + std::fmt::Debug {
    let of_list = |list: &Vec<f64>| list.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let candidates = &row.candidates;
    let lists = [
        of_list(&candidates.candidate_prob),
        of_list(&candidates.confidence),
        of_list(&candidates.confidence_of_ten),
        of_list(&candidates.draft_entropy),
        of_list(&candidates.draft_log_prob),
        of_list(&candidates.target_log_prob),
    ];
    let predicted = candidates.predicted_acceptance_prob.as_ref().map(of_list);
    (
        row.id.clone(),
        row.start,
        row.limit,
        candidates.candidate_ids.clone(),
        lists,
        predicted,
        row.is_response,
    )
}

fn all_bits(rows: &[RolloutRow]) -> Vec<impl PartialEq + std::fmt::Debug> {
    rows.iter().map(bits).collect()
}

fn path_in(dir: &tempfile::TempDir) -> PathBuf {
    rollouts_path(dir.path(), "self_draft_2", "validation", "sampled")
}

#[test]
fn rows_round_trip_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    assert!(path.ends_with("rollouts-self_draft_2-validation-sampled.parquet"));
    let mut noise = Noise(2);
    let many: Vec<_> = (0..300).flat_map(|n| rows_of_id(&mut noise, n, 1 + n % 20, true)).collect();
    assert!(many.len() > 1500, "more than a batch: {}", many.len());
    for (rows, with_head) in [
        (sample_rows(true), true),
        (sample_rows(false), false),
        (many, true),
        (Vec::new(), true),
        (Vec::new(), false),
    ] {
        write_rollouts(&path, &rows, &provenance(with_head)).unwrap();
        let read = read_rollouts(&path, None).unwrap();
        assert!(all_bits(&read.0) == all_bits(&rows));
        assert_eq!(read.1, provenance(with_head));
        assert_eq!(read_rollout_provenance(&path).unwrap(), provenance(with_head));
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    fs::write(dir.path().join("responses-00000.parquet"), "").unwrap();
    assert_eq!(rollouts_paths(dir.path()).unwrap(), [path]);
}

#[test]
fn equal_rows_give_equal_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["one", "two"].map(|set| rollouts_path(dir.path(), "draft", set, "greedy"));
    for path in &paths {
        write_rollouts(path, &sample_rows(true), &provenance(true)).unwrap();
    }
    assert_eq!(fs::read(&paths[0]).unwrap(), fs::read(&paths[1]).unwrap());
}

#[test]
fn rollouts_are_plain_parquet() {
    let dir = tempfile::tempdir().unwrap();
    let path = path_in(&dir);
    write_rollouts(&path, &sample_rows(true), &provenance(true)).unwrap();
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let list = |element| DataType::List(Arc::new(Field::new("element", element, false)));
    let fields = builder.schema().fields();
    assert_eq!(fields.len(), 13);
    assert_eq!(*fields[0], Field::new("id", DataType::Utf8, false));
    assert_eq!(*fields[1], Field::new("prompt_ids", list(DataType::UInt32), false));
    assert_eq!(*fields[2], Field::new("start", DataType::UInt32, false));
    assert_eq!(*fields[3], Field::new("is_response", DataType::Boolean, false));
    assert_eq!(*fields[5], Field::new("candidate_ids", list(DataType::UInt32), false));
    assert_eq!(*fields[7], Field::new("confidence", list(DataType::Float64), false));
    let predicted = Field::new("predicted_acceptance_prob", list(DataType::Float64), true);
    assert_eq!(*fields[10], predicted);
    assert_eq!(*fields[12], Field::new("target_log_prob", list(DataType::Float64), false));
    let metadata = builder.metadata();
    let entries = metadata.file_metadata().key_value_metadata().unwrap();
    let value = |key: &str| entries.iter().find(|entry| entry.key == key).unwrap().value.as_deref();
    assert_eq!(value("draftsmith.eos_token_ids"), Some("[2,7]"));
    assert_eq!(value("draftsmith.drafter"), Some("\"self_draft_2\""));
    assert_eq!(value("draftsmith.draft"), Some("\"bb\""));
    assert!(entries.iter().all(|entry| entry.key.starts_with("draftsmith.")));
    for (index, path) in [(2, "start"), (7, "confidence.list.element")] {
        let column = metadata.row_group(0).column(index);
        assert_eq!(column.column_path().string(), path);
        assert!(matches!(column.compression(), Compression::ZSTD(_)));
        assert!(column.encodings().any(|encoding| encoding == Encoding::BYTE_STREAM_SPLIT));
        assert!(column.dictionary_page_offset().is_none());
    }
}

/// A response of three tokens. The drafter misses the first two; at the last nothing is drafted,
/// because of the limit.
fn small_rows() -> Vec<RolloutRow> {
    let mut noise = Noise(3);
    let row = |noise: &mut Noise, start, ids, is_response| RolloutRow {
        id: "set#0".into(),
        prompt_ids: if is_response { vec![13, 14] } else { Vec::new() },
        start,
        limit: 3,
        candidates: candidates(noise, ids, true),
        is_response,
    };
    vec![
        row(&mut noise, 0, vec![10, 11, 12], true),
        row(&mut noise, 0, vec![20, 11], false),
        row(&mut noise, 1, vec![21], false),
    ]
}

#[test]
fn differences_of_provenance_are_named() {
    let one = provenance(true);
    assert_eq!(one.differences(&one.clone()), []);
    let mut other = provenance(false);
    let differences = one.differences(&other);
    assert_eq!(
        differences[0].to_string(),
        "`head` is {\"hash\":\"ee\",\"looks_ahead\":true} in the one and null in the other"
    );
    other.responses.temperature = 0.0;
    let differences = one.differences(&other);
    let keys: Vec<_> = differences.iter().map(|difference| difference.key.as_str()).collect();
    assert_eq!(keys, ["temperature", "head", "data"]);
    assert_eq!(one.decoding(), "sampled");
    assert_eq!(other.decoding(), "greedy");
}
