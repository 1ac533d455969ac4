//! What a drafter proposes along the responses that were built, for labels from rollouts:
//! `data/<recipe>/rollouts-<drafter>-training-<decoding>.parquet`.
//!
//! Recorded under the data's own sampling, without a head, since this is what heads are made of. A
//! file is whole or absent, and one of other data, models or settings is recorded again.

use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_data::{
    DataSet, Provenance, ResponseRow, RolloutDecoding, RolloutProvenance, RolloutRow,
    read_rollouts, rollouts_path, write_rollouts,
};
use draftsmith_theory::{
    Decoding, DrafterId, RecordedPlace, Recording, Sampling, SeededDraws, TopProbs,
};
use draftsmith_train::RecordedRollouts;

use super::rows::rows_of;
use crate::console::Console;
use crate::console::progress::Progress;
use crate::device::{DeviceChoice, on_pool};
use crate::exports::{AdapterExport, Exports};
use crate::recipe::{Recipe, decoding};
use crate::recordings::{RecordedModels, RecordingJob, ToRecord};
use crate::results::DrafterName;
use crate::served::ServerAccess;
use crate::shard::Shard;
use crate::workspace::Workspace;

/// The set's name in files.
const SET: &str = "training";

/// The rollouts along a recipe's built data.
pub(crate) struct TrainingRollouts {
    rows: Vec<RolloutRow>,
    is_greedy: bool,
}

impl TrainingRollouts {
    /// Reads the rollouts of `max_length` candidates along the responses of `data`, or records them:
    /// those of the adapter in `adapter_dir`, or else the draft's. `provenance` is the data's, with
    /// the hash of that drafter.
    ///
    /// # Errors
    /// If the responses are not the target's own, a model cannot be read or fails, or the file cannot
    /// be written.
    pub(crate) fn read_or_record(
        recipe: &Recipe,
        adapter_dir: Option<&Path>,
        data: &DataSet,
        provenance: &Provenance,
        max_length: usize,
        workspace: &Workspace,
        console: &Console,
    ) -> Result<Self> {
        if provenance.existing_responses {
            bail!(
                "labels from rollouts need responses that the target gave, but the data in `{}` has \
                 existing ones; hint: set `data.responses` to `generate`, or, of a draft's head, other \
                 `head.labels`",
                recipe.data_dir().display()
            );
        }
        let models = match adapter_dir {
            Some(_) if recipe.target_elsewhere().is_none() => {
                RecordedModels::Pair(workspace.target_alone()?)
            }
            _ => RecordedModels::of(recipe, workspace)?,
        };
        let context = models.text().context;
        let adapter = adapter_dir.map(|dir| AdapterExport::without_head(dir, workspace));
        let adapters = adapter.transpose()?.into_iter().collect();
        let exports = Exports { adapters, ..Exports::default() };
        let drafter = match exports.adapters.first() {
            Some(adapter) => {
                DrafterName::Of(DrafterId::SelfDraft { exit_layer: adapter.config.exit_layer })
            }
            None => DrafterName::Of(DrafterId::Draft),
        };
        let expected = RolloutProvenance {
            responses: provenance.clone(),
            drafter: drafter.to_string(),
            set: SET.to_owned(),
            head: None,
            max_length: max_length as u32,
            context: context as u32,
            data: Some(data.hash.clone()),
        };
        let is_greedy = expected.decoding() == RolloutDecoding::Greedy;
        let path = rollouts_path(&recipe.data_dir(), &expected.drafter, SET, expected.decoding());
        if path.exists() {
            match read_rollouts(&path, Some(workspace.target_shape()?.vocab_size)) {
                Ok((rows, found)) if found == expected => {
                    return Ok(Self { rows, is_greedy });
                }
                _ => console.note(format!(
                    "`{}` is broken or of other data or settings: it is recorded again",
                    path.display()
                )),
            }
        }
        let responses: Vec<&ResponseRow> =
            data.rows.iter().filter(|row| is_usable(row, context)).collect();
        let progress = Progress::new(console, "rollouts", "responses", responses.len() as u64);
        progress.message(expected.drafter.clone());
        let Provenance { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *provenance;
        let Provenance { seed, max_new_tokens, .. } = *provenance;
        let top_k = top_k.map(|top_k| top_k as usize);
        let decoding =
            decoding(Sampling { temperature, top_p, top_k, min_p }).penalising(repetition_penalty);
        let probs = match &models {
            RecordedModels::Served { .. } if !decoding.is_greedy() => {
                served_probs(recipe, workspace, decoding, max_new_tokens as usize, &responses)?
            }
            _ => vec![None; responses.len()],
        };
        let job = RecordingJob {
            models,
            exports: &exports,
            drafter,
            decoding,
            max_new_tokens: max_new_tokens as usize,
            max_length,
            labels: true,
            on_cpu: DeviceChoice::is_cpu(workspace.device()),
            console,
            progress: &progress,
        };
        let mut to_record: Vec<ToRecord<'_>> = responses
            .iter()
            .zip(&probs)
            .map(|(row, probs)| {
                let room = context - row.prompt_ids.len();
                let stream = [&row.id, "rollouts", SET, expected.decoding().as_str()];
                ToRecord {
                    prompt_ids: &row.prompt_ids,
                    response_ids: &row.response_ids[..row.response_ids.len().min(room)],
                    probs: probs.as_deref(),
                    draws: SeededDraws::new(seed, &stream),
                }
            })
            .collect();
        let recorded = on_pool(|| job.record(&mut to_record))?;
        progress.clear();
        let ids = responses.iter().map(|row| &row.id);
        let rows: Vec<RolloutRow> =
            ids.zip(&recorded).flat_map(|(id, recording)| rows_of(id, recording, false)).collect();
        write_rollouts(&path, &rows, &expected)?;
        Ok(Self { rows, is_greedy })
    }

    /// The first candidate of each rollout of recordings, which nothing is written of.
    pub(crate) fn of(recorded: &[(&str, &Recording)], is_greedy: bool) -> Self {
        let shortened = |recording: &Recording| {
            let first = |place: &RecordedPlace| RecordedPlace {
                candidate: place.candidate.clone(),
                rollout: place.rollout.as_ref().map(|rollout| rollout[..1].to_vec()),
                draft_rank: place.draft_rank,
            };
            let places: Vec<RecordedPlace> = recording.places.iter().map(first).collect();
            Recording::new(recording.prompt.clone(), places, recording.limit)
        };
        let rows =
            recorded.iter().flat_map(|(id, recording)| rows_of(id, &shortened(recording), false));
        Self { rows: rows.collect(), is_greedy }
    }

    /// The rollouts as training takes them.
    pub(crate) fn recorded(&self) -> RecordedRollouts<'_> {
        RecordedRollouts { rows: &self.rows, is_greedy: self.is_greedy }
    }
}

/// What a served target drew the responses of rows from, as its journal has it.
fn served_probs(
    recipe: &Recipe,
    workspace: &Workspace,
    decoding: Decoding,
    max_new_tokens: usize,
    rows: &[&ResponseRow],
) -> Result<Vec<Option<Vec<TopProbs>>>> {
    let silent = Console::silent();
    let served = ServerAccess::of(recipe, Shard::WHOLE)?.open(
        workspace,
        decoding,
        max_new_tokens,
        &silent,
    )?;
    let probs_of = |row: &&ResponseRow| {
        let response = served.response(&row.id, &row.prompt_ids).with_context(|| {
            format!(
                "labels from rollouts need what the servers said of `{}`; hint: delete the Parquet \
                 files in `{}` and run `draftsmith build-data` again",
                row.id,
                recipe.data_dir().display()
            )
        })?;
        Ok(response.probs)
    };
    rows.iter().map(probs_of).collect()
}

/// Whether there is a position at which the drafter can propose something.
fn is_usable(response: &ResponseRow, context: usize) -> bool {
    let num_prompt_tokens = response.prompt_ids.len();
    !response.response_ids.is_empty() && (1..context).contains(&num_prompt_tokens)
}
