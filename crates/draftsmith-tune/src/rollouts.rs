//! Rollouts: the recordings of a recipe's drafters, in
//! `data/<recipe>/rollouts-<drafter>-<set>-<decoding>.parquet`.
//!
//! `rollouts/rows.rs` converts recordings into rows and back; `rollouts/files.rs` finds the files of a recipe,
//! and checks whether they match the models and prompts at hand. `recorder.rs` makes the recordings.

mod files;
mod prompts;
mod training;

use anyhow::{Result, bail};
use draftsmith_data::{RolloutProvenance, RolloutRow, source_of};
use draftsmith_theory::{HeadTiming, Recording, Recordings};
use draftsmith_train::recordings_of;
use serde::Serialize;

pub use self::files::{FileState, RolloutFiles, RolloutKey};
pub use self::prompts::{set_prompts, validation_prompts};
pub use self::training::{TrainingRecorder, TrainingRollouts};

/// The sets of prompts that are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptSet {
    /// The prompts that rules are chosen on.
    Validation,
    /// The prompts that rules are judged on: those of `evaluate`.
    Test,
}

impl PromptSet {
    /// Returns the name in files and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Validation => "validation",
            Self::Test => "test",
        }
    }
}

/// Recordings with the ids of their prompts.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedSet {
    /// The row ids of the prompts, one per response.
    pub ids: Vec<String>,
    /// What was recorded along each response.
    pub recordings: Recordings,
}

/// The size of a recorded set, and how often its candidates are accepted.
#[derive(Debug, Clone, Serialize)]
pub struct RolloutSummary {
    /// Recorded responses.
    pub num_responses: usize,
    /// Tokens of the responses.
    pub num_tokens: usize,
    /// The share of drafted positions at which the response's token is drafted and accepted.
    pub share_accepted: Option<f64>,
    /// Positions at which another token is drafted or the token is rejected, or at which whole rounds are recorded.
    pub num_rollouts: usize,
    /// Candidates per rollout.
    pub mean_rollout_length: Option<f64>,
}

impl RecordedSet {
    /// Converts valid rows and their provenance into recordings.
    ///
    /// # Errors
    /// If the provenance names an unknown drafter.
    pub fn new(rows: &[RolloutRow], provenance: &RolloutProvenance) -> Result<Self> {
        let (ids, responses) = recordings_of(rows);
        let recordings = Recordings {
            drafter: provenance.drafter.parse()?,
            max_length: provenance.max_length as usize,
            eos_token_ids: provenance.responses.eos_token_ids.clone(),
            head: provenance.head.as_ref().map(|head| match head.looks_ahead {
                true => HeadTiming::AtDraw,
                false => HeadTiming::AfterRead,
            }),
            responses: responses
                .into_iter()
                .map(|response| response.with_forwards(provenance.forwards))
                .collect(),
        };
        Ok(Self { ids, recordings })
    }

    /// Groups the recordings by the source of their prompts, in order of appearance.
    pub fn by_source(&self) -> Vec<(&str, Recordings)> {
        let mut sources: Vec<(&str, Vec<Recording>)> = Vec::new();
        for (id, response) in self.ids.iter().zip(&self.recordings.responses) {
            let source = source_of(id);
            match sources.iter_mut().find(|(name, _)| *name == source) {
                Some((_, responses)) => responses.push(response.clone()),
                None => sources.push((source, vec![response.clone()])),
            }
        }
        let of_source = |(source, responses)| {
            let shared = Recordings { responses: Vec::new(), ..self.recordings.clone() };
            (source, Recordings { responses, ..shared })
        };
        sources.into_iter().map(of_source).collect()
    }

    /// Counts the responses, tokens and rollouts, and computes the share of accepted candidates.
    pub fn summary(&self) -> RolloutSummary {
        let responses = &self.recordings.responses;
        // Nothing is drafted at the last position that the limit allows.
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
        let places = responses.iter().flat_map(|response| &*response.places);
        let num_rejected = places.filter(|place| place.rejected().is_some()).count();
        let share = |part: usize, whole: usize| (whole > 0).then(|| part as f64 / whole as f64);
        RolloutSummary {
            num_responses: responses.len(),
            num_tokens: self.recordings.num_tokens(),
            share_accepted: share(num_drafted - num_rejected, num_drafted),
            num_rollouts: rollouts.len(),
            mean_rollout_length: share(rollouts.iter().sum(), rollouts.len()),
        }
    }
}

impl RolloutFiles<'_> {
    /// Reads a file of rollouts.
    ///
    /// # Errors
    /// If the file is missing or broken, or was recorded with other models, prompts or settings than the
    /// recipe's.
    pub fn read(&self, key: RolloutKey) -> Result<RecordedSet> {
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
