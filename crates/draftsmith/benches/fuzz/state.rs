//! The reader of training states: a head's training is resumed from a state of which one file was
//! changed, with the checksums that the change would have if it had been saved.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_data::{DraftColumns, FinishReason, ResponseRow, hash_bytes};
use draftsmith_model::CausalLm;
use draftsmith_train::{HeadTraining, TrainingRun, train_heads};

use super::{MODEL, copy_files, fixture, put};

/// What names the training whose state is changed.
const FINGERPRINT: &str = "fuzz";
/// Where its state is put, and where it stays as it was.
const TRAINING: &str = "training";
const SAVED: &str = "saved";
/// The files of a state: what it says of itself, then its records.
const STATE: &str = "state.toml";
const RECORDS: [(&str, &str); 3] =
    [("model.bpk", "model"), ("optimizer.bpk", "optimizer"), ("best.bpk", "best")];

/// Trains a head for an epoch and a step, and leaves its state.
pub(crate) fn save(dir: &Path) -> Result<()> {
    train(&dir.join(SAVED), 3)?;
    let saved = state_dir(&dir.join(SAVED))?;
    // The one number that differs from run to run.
    let text = std::fs::read_to_string(saved.join(STATE))?;
    let lines = text.lines().map(|line| match line.starts_with("seconds = ") {
        true => "seconds = 0.25",
        false => line,
    });
    put(&saved, STATE, with_checksum(&lines.skip(1).collect::<Vec<_>>().join("\n")))
}

fn train(dir: &Path, num_steps: usize) -> Result<()> {
    // Loading it takes longer than all else.
    static DRAFT: OnceLock<CausalLm> = OnceLock::new();
    let draft = match DRAFT.get() {
        Some(draft) => draft,
        None => {
            let read = CausalLm::from_model_dir(&fixture(MODEL), &Device::flex())?;
            DRAFT.get_or_init(|| read)
        }
    };
    let mut training = HeadTraining { num_layers: 1, ..HeadTraining::default() };
    training.optimizer.batch_size = 2;
    training.optimizer.validation_fraction = 0.5;
    let rows = response_rows(96);
    let run = TrainingRun { max_steps: Some(num_steps), ..TrainingRun::new(dir, FINGERPRINT) };
    train_heads(draft, &rows[..], &[training], 1, run)?;
    Ok(())
}

/// The directory of a training's state.
fn state_dir(training: &Path) -> Result<PathBuf> {
    let Some(state) = std::fs::read_dir(training.join("checkpoint"))?.next() else {
        bail!("the training left no state")
    };
    Ok(state?.path())
}

fn with_checksum(text: &str) -> String {
    format!("checksum = \"{}\"\n{text}", hash_bytes(text.as_bytes()))
}

/// A state's files as inputs: the name on the first line, then what is in it.
#[allow(dead_code, reason = "only who mutates needs them")]
pub(crate) fn files(place: &Path) -> Result<Vec<Vec<u8>>> {
    let saved = state_dir(&place.join(SAVED))?;
    let names = std::iter::once(STATE).chain(RECORDS.map(|(name, _)| name));
    names
        .map(|name| Ok([name.as_bytes(), b"\n", &std::fs::read(saved.join(name))?].concat()))
        .collect()
}

/// Puts a changed file into a state whose checksums are those of its files, so that what reads
/// behind them is reached, and resumes from it.
pub(crate) fn resume(dir: &Path) -> Result<()> {
    let input = std::fs::read(dir.join("changed"))?;
    let Some(end) = input.iter().position(|byte| *byte == b'\n') else { bail!("no name") };
    let (name, changed) = (&input[..end], &input[end + 1..]);
    let saved = state_dir(&dir.join(SAVED))?;
    let training = dir.join(TRAINING);
    let state = training.join("checkpoint").join(saved.file_name().unwrap_or_default());
    let _ = std::fs::remove_dir_all(&training);
    std::fs::create_dir_all(&state)?;
    copy_files(&saved, &state)?;
    let mut text = std::fs::read_to_string(saved.join(STATE))?;
    if name == STATE.as_bytes() {
        text = String::from_utf8_lossy(changed).into_owned();
    }
    for (record, key) in RECORDS {
        if name == record.as_bytes() {
            let was = hash_bytes(&std::fs::read(saved.join(record))?);
            put(&state, record, changed)?;
            text = text.replace(
                &format!("{key} = \"{was}\""),
                &format!("{key} = \"{}\"", hash_bytes(changed)),
            );
        }
    }
    let text = text.split_once('\n').map_or("", |(_, text)| text);
    put(&state, STATE, with_checksum(text))?;
    train(&training, 1)
}

/// Rows of a few tokens, below `vocab_size`.
pub(crate) fn response_rows(vocab_size: u32) -> Vec<ResponseRow> {
    let rows = (0..6_u32).map(|row| {
        let ids = |step: u32| (0..4).map(|at| (row * 31 + at * step) % vocab_size).collect();
        let numbers = |number: f32| vec![number, number / 2.0, number / 3.0, number / 4.0];
        ResponseRow {
            id: format!("set#{row}"),
            source: "set".to_owned(),
            prompt_ids: ids(7),
            response_ids: ids(11),
            response_target_log_prob: vec![-0.5, -1.0, f32::NEG_INFINITY, 0.0],
            draft: Some(DraftColumns {
                response_draft_log_prob: numbers(-1.5),
                draft_ids: ids(13),
                draft_log_prob: numbers(-0.75),
                target_log_prob: numbers(-3.0),
                overlap: numbers(1.0),
                draft_entropy: numbers(2.0),
                draft_target_cross_entropy: numbers(4.0),
                draft_top_ids: ids(17),
                target_top_ids: ids(19),
                draft_top_log_prob: numbers(-0.25),
            }),
            finish_reason: if row % 2 == 0 { FinishReason::Eos } else { FinishReason::Length },
        }
    });
    rows.collect()
}
