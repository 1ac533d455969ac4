//! Tests of the rows and batches of lessons.

use std::path::Path;

use burn::tensor::{Device, TensorData};

use super::*;
use crate::tests::pair::{deep_target, response_row, responses, tiny_draft};
use draftsmith_data::ResponseRow;

fn row(prompt: &[u32], response: &[u32]) -> ResponseRow {
    let probs = vec![0.5; response.len()];
    response_row("set#3", prompt, response, response, &probs)
}

/// The token at each supervised position, and the one that it predicts.
fn predicted(prompt: &[u32], response: &[u32], max_len: usize) -> Option<Vec<(u32, u32)>> {
    let all = [prompt, response].concat();
    let row = LessonRow::new(&row(prompt, response), 0, max_len)?;
    assert_eq!(row.input_ids, all[..row.input_ids.len()]);
    let positions = row.first_supervised..row.input_ids.len();
    Some(positions.map(|position| (all[position], all[position + 1])).collect())
}

#[test]
fn exactly_the_tokens_of_the_response_are_predicted() {
    let check = |prompt: &[u32], response: &[u32], max_len, expected: &[(u32, u32)]| {
        assert_eq!(predicted(prompt, response, max_len).as_deref(), Some(expected));
    };
    check(&[1, 2, 3], &[4, 5, 6], 64, &[(3, 4), (4, 5), (5, 6)]);
    check(&[1, 2, 3], &[4], 64, &[(3, 4)]);
    check(&[1], &[4, 5], 64, &[(1, 4), (4, 5)]);
    // Without a prompt, no position predicts the first token of the response.
    check(&[], &[4, 5, 6], 64, &[(4, 5), (5, 6)]);
    check(&[1, 2, 3], &[4, 5, 6], 6, &[(3, 4), (4, 5), (5, 6)]);
    check(&[1, 2, 3], &[4, 5, 6], 5, &[(3, 4), (4, 5)]);
    check(&[1, 2, 3], &[4, 5, 6], 4, &[(3, 4)]);
}

#[test]
fn rows_without_a_supervised_position_are_unusable() {
    for (prompt, response, max_len) in [
        (&[1, 2, 3][..], &[][..], 64),
        (&[1, 2, 3], &[4], 3),
        (&[1, 2, 3], &[4], 2),
        (&[], &[4], 64),
        (&[], &[], 64),
    ] {
        assert_eq!(predicted(prompt, response, max_len), None);
    }
}

#[test]
fn rows_need_no_draft_columns() {
    let mut without_draft = row(&[1], &[2]);
    without_draft.draft = None;
    assert!(LessonRow::new(&without_draft, 0, 64).is_some());
}

fn source(num_rows: usize) -> LessonSource {
    let target = tiny_draft(16, 64);
    let rows = responses(num_rows, 20, 5)
        .iter()
        .map(|row| Arc::new(LessonRow::new(row, 0, 64).unwrap()))
        .collect();
    LessonSource {
        targets: FrozenTarget::new(target, None).into(),
        exit_layers: vec![1],
        reads_tokens: false,
        rows,
        batch_size: 3,
        lengths: Lengths::AsGiven,
        room: Arc::default(),
        stored: None,
        teaching: Teaching::Target,
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().unwrap()
}

#[test]
fn padding_does_not_change_a_rows_states() {
    let source = source(7);
    let by_id = |id: &str| source.rows.iter().find(|row| row.id == id).unwrap();
    let batches: Vec<TrainingBatch<LessonBatch>> =
        source.step_batches(1, &[vec![0, 1, 2], vec![3, 4, 5], vec![6]]).collect();
    let sizes: Vec<usize> = batches.iter().map(|batch| batch.row_ids.len()).collect();
    assert_eq!(sizes, [3, 3, 1]);
    for batch in &batches {
        let LessonBatch { features, wanted, .. } = &batch.content;
        let [_, seq, _] = features[0].dims();
        let wanted = wanted.iter().enumerate();
        let rows = wanted.flat_map(|(nth, row)| row.clone().map(move |at| (nth * seq + at) as i32));
        let rows: Vec<i32> = rows.collect();
        let rows = Tensor::from_ints(rows.as_slice(), &features[0].device());
        let features = values(at_positions(features[0].clone(), rows));
        let (mut expected, mut teachers) = (Vec::new(), Vec::new());
        for row in batch.row_ids.iter().map(|id| by_id(id)) {
            let ids: Vec<i32> = row.input_ids.iter().map(|id| *id as i32).collect();
            let data = TensorData::new(ids, [1, row.input_ids.len()]);
            let ids = Tensor::<2, Int>::from_data(data, &source.targets.first().model.device());
            let from = row.first_supervised * 16;
            let exit = source.targets.first().model.exit_states(ids.clone(), 1);
            expected.extend_from_slice(&values(exit)[from..]);
            teachers.extend_from_slice(
                &values(source.targets.first().model.hidden_states(ids))[from..],
            );
        }
        let pairs =
            [(features, expected), (values(states_of(batch.content.teacher.clone())), teachers)];
        for (found, expected) in pairs {
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.into_iter().zip(expected) {
                // Another batch shape may sum in another order: f32 rounding near 1.
                assert!((found - expected).abs() < 1e-5, "{found} != {expected}");
            }
        }
    }
}

#[test]
fn states_kept_in_memory_equal_recomputed_ones() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen3-bf16");
    let target = CausalLm::from_model_dir(&dir, &Device::flex()).unwrap();
    assert!(target.is_packed());
    let width = target.shape().hidden_size;
    let source = |num_rows| {
        let targets = FrozenTarget::new(target.clone(), None).into();
        LessonSource { targets, ..source(num_rows) }
    };
    let none = source(7);
    let bits = |source: &LessonSource, epoch: u64, step: &[Vec<usize>]| -> Vec<[Vec<f32>; 2]> {
        let batches = source.step_batches(epoch, step);
        let states = |batch: TrainingBatch<LessonBatch>| {
            let batch = batch.content;
            [batch.features[0].clone().flatten(0, 1), states_of(batch.teacher)].map(values)
        };
        batches.map(states).collect()
    };
    // The rows are in other batches each time.
    let epochs = [[vec![0, 1, 2], vec![3, 4, 5], vec![6]], [vec![6, 2, 4], vec![0, 5, 1], vec![3]]];
    let bytes: usize = none.rows.iter().map(|row| row.num_supervised() * width * 4).sum();
    for room in [bytes, bytes / 2] {
        let source = LessonSource { room: Arc::new(room.into()), ..source(7) };
        for epoch in [1, 2, 3] {
            let step = &epochs[epoch % 2];
            assert!(bits(&source, 1, step) == bits(&none, 1, step), "epoch {epoch}");
        }
        let num_kept = source.rows.iter().filter(|row| row.teacher.get().is_some()).count();
        assert_eq!(num_kept == 7, room == bytes, "{num_kept} rows are kept");
        assert!(num_kept > 1);
        let left = source.room.load(Ordering::Relaxed);
        assert!(left < bytes / 7 * 2 && (room != bytes || left == 0), "{left} bytes");
    }
    assert!(none.rows.iter().all(|row| row.teacher.get().is_none()));
}

#[test]
fn batches_are_weighted_by_their_tokens() {
    let source = source(7);
    let batches: Vec<TrainingBatch<LessonBatch>> =
        source.step_batches(1, &[vec![0, 1, 2], vec![3, 4, 5], vec![6]]).collect();
    let total: usize = source.rows.iter().map(|row| row.num_supervised()).sum();
    for batch in &batches {
        assert_eq!(batch.step_share, batch.num_supervised as f64 / total as f64);
    }
    let ends: Vec<bool> = batches.iter().map(|batch| batch.ends_step).collect();
    assert_eq!(ends, [false, false, true]);
    let mut ids: Vec<&String> = batches.iter().flat_map(|batch| &batch.row_ids).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 7);
}

#[test]
fn devices_take_turns() {
    let source = source(7);
    let targets =
        [tiny_draft(16, 64), deep_target(16, 64)].map(|target| FrozenTarget::new(target, None));
    let step = [vec![0, 1, 2], vec![3, 4, 5], vec![6]];
    let teachers = |targets: PerDevice<FrozenTarget>| -> Vec<Vec<f32>> {
        let source = LessonSource { targets, ..source.clone() };
        let batches: Vec<TrainingBatch<LessonBatch>> = source.step_batches(1, &step).collect();
        let ends: Vec<bool> = batches.iter().map(|batch| batch.ends_step).collect();
        assert_eq!(ends, [false, false, true]);
        batches.into_iter().map(|batch| values(states_of(batch.content.teacher))).collect()
    };
    let [first, second] = targets.clone().map(|target| teachers(target.into()));
    assert!(first[0] != second[0]);
    let both = teachers(PerDevice::new(targets.to_vec(), 1).unwrap());
    assert!(both == [&first[0][..], &second[1], &first[2]]);
}

/// The hidden states of the teacher.
fn states_of(lesson: Lesson) -> Tensor<2> {
    match lesson {
        Lesson::States(states) => states,
        Lesson::Tokens(_) => panic!("hidden states are expected"),
    }
}

#[test]
fn a_response_as_teacher_needs_only_its_tokens() {
    let rows: Vec<ResponseRow> = responses(7, 20, 5);
    let target = deep_target(16, 64);
    let source = LessonSource {
        targets: FrozenTarget::new(target, None).into(),
        teaching: Teaching::Response,
        ..source(7)
    };
    let step = [vec![0, 1, 2], vec![3, 4, 5], vec![6]];
    let whole = LessonSource { teaching: Teaching::Target, ..source.clone() };
    for (batch, whole) in source.step_batches(1, &step).zip(whole.step_batches(1, &step)) {
        let Lesson::Tokens(tokens) = &batch.content.teacher else { panic!("tokens are expected") };
        let expected: Vec<u32> = batch
            .row_ids
            .iter()
            .flat_map(|id| rows.iter().find(|row| row.id == *id).unwrap().response_ids.clone())
            .collect();
        assert_eq!(*tokens, expected);
        let states = |batch: &TrainingBatch<LessonBatch>| values(batch.content.features[0].clone());
        assert!(states(&batch) == states(&whole));
    }
}

#[test]
fn a_responses_labels_are_numbers_in_the_draft_vocabulary() {
    for lengths in [Lengths::AsGiven, Lengths::InBuckets] {
        let ids: Vec<u32> = (0..48).filter(|id| id % 3 != 0).collect();
        let vocabulary = DraftVocabulary::new(ids.clone());
        let targets = FrozenTarget::new(tiny_draft(16, 64), Some(&vocabulary)).into();
        let teaching = Teaching::Response;
        let source = LessonSource { targets, teaching, lengths, ..source(3) };
        let batch = source.step_batches(1, &[vec![0, 1, 2]]).next().unwrap().content;
        let predicted: Vec<u32> = source.rows_of_batches(&[vec![0, 1, 2]])[0]
            .iter()
            .flat_map(|row| row.next_ids())
            .collect();
        let (are, Lesson::Tokens(labels)) = (values(batch.tokens.are.unwrap()), batch.teacher)
        else {
            panic!("tokens")
        };
        assert!(predicted.iter().any(|id| id % 3 == 0) && predicted.iter().any(|id| id % 3 != 0));
        for (nth, id) in predicted.iter().enumerate() {
            assert_eq!(are[nth] == 1.0, id % 3 != 0, "{id}");
            assert!(are[nth] == 0.0 || ids[labels[nth] as usize] == *id, "{id}");
        }
        assert!(are[predicted.len()..].iter().all(|are| *are == 0.0));
    }
}
