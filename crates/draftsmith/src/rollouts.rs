//! Rollouts: what was recorded of a recipe's drafters, in
//! `data/<recipe>/rollouts-<drafter>-<set>-<decoding>.parquet`.
//!
//! `rollouts/rows.rs` turns recordings into rows and back; `rollouts/files.rs` knows the files of a
//! recipe, and whether one is still true of the models and prompts at hand. Recording itself is the
//! `record` command's business.

mod files;
mod prompts;
mod rows;
mod training;

use anyhow::{Result, bail};
use draftsmith_data::{RolloutHead, RolloutProvenance, RolloutRow};
use draftsmith_theory::{Decoding, HeadTiming, JudgedPrediction, Recordings};
use serde::Serialize;

pub(crate) use self::files::{FileState, RolloutFiles, RolloutKey};
pub(crate) use self::prompts::{SetSources, validation_prompts};
pub(crate) use self::training::TrainingRollouts;

/// The two sets of prompts that are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PromptSet {
    /// What rules are chosen on.
    Validation,
    /// What they are judged on: the prompts of `evaluate`.
    Test,
}

impl PromptSet {
    /// The name in files and messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Validation => "validation",
            Self::Test => "test",
        }
    }
}

/// Recordings, and whose they are.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RecordedSet {
    /// The row ids of the prompts, one a response.
    pub(crate) ids: Vec<String>,
    /// What was recorded.
    pub(crate) recordings: Recordings,
}

/// When a recorded head made its predictions.
fn timing(head: &RolloutHead) -> HeadTiming {
    if head.looks_ahead { HeadTiming::AtDraw } else { HeadTiming::AfterRead }
}

/// What a set of recordings comes to.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RolloutSummary {
    /// Responses recorded.
    pub(crate) num_responses: usize,
    /// Their tokens.
    pub(crate) num_tokens: usize,
    /// The share of positions where the response's token is drafted and accepted, of those where
    /// something is drafted.
    pub(crate) share_accepted: Option<f64>,
    /// Positions where something else is drafted.
    pub(crate) num_rollouts: usize,
    /// Candidates a rollout.
    pub(crate) mean_rollout_length: Option<f64>,
}

impl RecordedSet {
    /// The recordings in rows that keep their rules and fit their provenance.
    ///
    /// # Errors
    /// If the provenance names a drafter that this version does not know.
    pub(crate) fn new(rows: &[RolloutRow], provenance: &RolloutProvenance) -> Result<Self> {
        let (ids, responses) = rows::recordings_of(rows);
        let recordings = Recordings {
            drafter: provenance.drafter.parse()?,
            max_length: provenance.max_length as usize,
            eos_token_ids: provenance.responses.eos_token_ids.clone(),
            head: provenance.head.as_ref().map(timing),
            responses,
        };
        Ok(Self { ids, recordings })
    }

    /// The head's predictions for the candidates that rounds meet, with what became of them: of each
    /// prompt, the turns of a conversation together. A turn's id is its conversation's with `#turn`
    /// behind it, and follows it.
    pub(crate) fn judged_prompts(&self, decoding: Decoding) -> Vec<Vec<JudgedPrediction>> {
        let mut prompts: Vec<(&str, Vec<JudgedPrediction>)> = Vec::new();
        for (id, judged) in self.ids.iter().zip(self.recordings.judged_predictions(decoding)) {
            match prompts.last_mut() {
                Some((first, prompt))
                    if id.strip_prefix(*first).is_some_and(|turn| turn.starts_with('#')) =>
                {
                    prompt.extend(judged);
                }
                _ => prompts.push((id, judged)),
            }
        }
        prompts.into_iter().map(|(_, prompt)| prompt).collect()
    }

    pub(crate) fn summary(&self) -> RolloutSummary {
        let responses = &self.recordings.responses;
        // Nothing is drafted for the last token that the limit allows.
        let num_drafted_for = |len: usize, limit: usize| len.min(limit - 1);
        let num_drafted: usize = responses
            .iter()
            .map(|response| num_drafted_for(response.places.len(), response.limit))
            .sum();
        let rollouts: Vec<usize> = responses
            .iter()
            .flat_map(|response| &*response.places)
            .filter_map(|place| place.rollout.as_ref().map(Vec::len))
            .collect();
        let share = |part: usize, whole: usize| (whole > 0).then(|| part as f64 / whole as f64);
        RolloutSummary {
            num_responses: responses.len(),
            num_tokens: self.recordings.num_tokens(),
            share_accepted: share(num_drafted - rollouts.len(), num_drafted),
            num_rollouts: rollouts.len(),
            mean_rollout_length: share(rollouts.iter().sum(), rollouts.len()),
        }
    }
}

impl RolloutFiles<'_> {
    /// Reads what `draftsmith record` left of a drafter.
    ///
    /// # Errors
    /// If the file is missing, broken, or was recorded with other models, prompts or settings than
    /// the recipe has now.
    pub(crate) fn read(&self, key: RolloutKey) -> Result<RecordedSet> {
        match self.state(key)? {
            FileState::Whole(set) => Ok(set),
            FileState::Absent => bail!(
                "there are no rollouts in `{}`; hint: run `draftsmith record` with this recipe first",
                self.path(key).display()
            ),
            FileState::Stale(why) => {
                bail!("{why}; hint: run `draftsmith record` with this recipe again")
            }
        }
    }
}
