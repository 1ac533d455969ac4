//! The reader of training states: resumes a head's training from a state with one changed file and the
//! checksums that match the change.

use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_data::{
    DraftColumns, FinishReason, LengthBounds, PromptFile, Provenance, ResponseRow, hash_bytes,
};
use draftsmith_model::CausalLm;
use draftsmith_train::{HeadTraining, TrainingRun, train_heads};

use super::{MODEL, fixture};

/// The name of the training whose state is changed.
const FINGERPRINT: &str = "fuzz";
/// The directory of its state.
const TRAINING: &str = "training";
/// The file that describes a state, and the state's other files with the keys of their checksums.
const STATE: &str = "state.toml";
const RECORDS: [(&str, &str); 3] =
    [("model.bpk", "model"), ("optimizer.bpk", "optimizer"), ("best.bpk", "best")];

/// Trains a head for three epochs and returns its state: each file after a line with its name and length.
/// Every state differs, because parameters get new names each time.
#[allow(dead_code, reason = "only who mutates needs it")]
pub(crate) fn trained() -> Result<Vec<u8>> {
    let dir = tempfile::tempdir()?;
    train(dir.path(), 3)?;
    let Some(state) = std::fs::read_dir(dir.path().join("checkpoint"))?.next() else {
        bail!("the training left no state")
    };
    let state = state?.path();
    let mut files = Vec::new();
    for name in std::iter::once(STATE).chain(RECORDS.map(|(name, _)| name)) {
        files.push((name.to_owned(), std::fs::read(state.join(name))?));
    }
    Ok(join(&files))
}

fn train(dir: &Path, num_steps: usize) -> Result<()> {
    // Loading the model takes longer than everything else.
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

/// The files of a state as one.
pub(crate) fn join(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let file = |(name, bytes): &(String, Vec<u8>)| {
        [format!("{name} {}\n", bytes.len()).as_bytes(), bytes].concat()
    };
    files.iter().flat_map(file).collect()
}

/// The files that [`join`] joined, if they are complete.
pub(crate) fn split(mut joined: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    while let Some(end) = joined.iter().position(|byte| *byte == b'\n') {
        let line = String::from_utf8_lossy(&joined[..end]).into_owned();
        let Some((name, length)) = line.split_once(' ') else { break };
        let rest = &joined[end + 1..];
        let length = length.parse().unwrap_or(rest.len()).min(rest.len());
        files.push((name.to_owned(), rest[..length].to_vec()));
        joined = &rest[length..];
    }
    files
}

/// Writes a state with matching checksums, so that the code behind the checksum test runs, and resumes from
/// it.
pub(crate) fn resume(dir: &Path) -> Result<()> {
    let files = split(&std::fs::read(dir.join("state"))?);
    let training = dir.join(TRAINING);
    let state = training.join("checkpoint/epoch-1-step-0");
    let _ = std::fs::remove_dir_all(&training);
    std::fs::create_dir_all(&state)?;
    let file = |name: &str| files.iter().find(|(other, _)| other == name).map(|(_, bytes)| bytes);
    let Some(text) = file(STATE) else { bail!("it has no `{STATE}`") };
    let text = String::from_utf8_lossy(text);
    // The first line is the checksum of the others.
    let mut lines: Vec<String> = text.lines().skip(1).map(str::to_owned).collect();
    for (name, key) in RECORDS {
        let Some(record) = file(name) else { continue };
        std::fs::write(state.join(name), record)?;
        let key = format!("{key} = \"");
        for line in lines.iter_mut().filter(|line| line.starts_with(&key)) {
            *line = format!("{key}{}\"", hash_bytes(record));
        }
    }
    let text = lines.join("\n");
    let text = format!("checksum = \"{}\"\n{text}", hash_bytes(text.as_bytes()));
    std::fs::write(state.join(STATE), text)?;
    train(&training, 1)
}

/// The provenance of the rows.
pub(crate) fn provenance() -> Provenance {
    Provenance {
        version: "0.1.0".to_owned(),
        target: "aa".to_owned(),
        draft: Some("bb".to_owned()),
        tokenizer: "cc".to_owned(),
        chat_template: None,
        special_tokens: [("eos_token".to_owned(), "</s>".to_owned())].into(),
        eos_token_ids: vec![2],
        stop_strings: Vec::new(),
        prompts: vec![PromptFile { name: "set.jsonl".to_owned(), hash: "dd".to_owned() }],
        limit: Some(6),
        weights: Vec::new(),
        split: None,
        lengths: LengthBounds::default(),
        keep_duplicates: false,
        existing_responses: false,
        served_model: None,
        served_log_probs: None,
        max_outside_mass: None,
        temperature: 0.0,
        top_p: 1.0,
        top_k: None,
        min_p: None,
        repetition_penalty: 1.0,
        max_new_tokens: 4,
        seed: 1,
        dtype: Provenance::F32.to_owned(),
    }
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
            target_outside_mass: None,
            draft: Some(DraftColumns {
                response_draft_log_prob: numbers(-1.5),
                draft_ids: ids(13),
                draft_log_prob: numbers(-0.75),
                target_log_prob: numbers(-3.0),
                overlap: numbers(1.0),
                draft_entropy: numbers(2.0),
                draft_target_cross_entropy: Some(numbers(4.0)),
                draft_top_ids: ids(17),
                target_top_ids: ids(19),
                draft_top_log_prob: numbers(-0.25),
            }),
            finish_reason: if row % 2 == 0 { FinishReason::Eos } else { FinishReason::Length },
        }
    });
    rows.collect()
}
