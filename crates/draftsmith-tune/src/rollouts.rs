//! The recordings of a recipe's drafters ("rollouts"), stored in
//! `data/<recipe>/rollouts-<drafter>-<set>-<decoding>.parquet`.
//!
//! `rollouts/files.rs` finds the files of a recipe and checks whether they match its models and
//! prompts. `recorder.rs` makes the recordings.

mod files;
mod prompts;
mod training;

use anyhow::{Result, bail};
use draftsmith_data::{RolloutHead, RolloutProvenance, RolloutRow, source_of};
use draftsmith_theory::{Recording, Recordings};
use draftsmith_train::recordings_of;
use serde::Serialize;

pub use self::files::{FileState, RolloutFiles, RolloutKey};
pub use self::prompts::{set_prompts, validation_prompts};
pub use self::training::{TrainingRecorder, TrainingRollouts};

/// A set of prompts to record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptSet {
    /// The prompts on which stop rules are chosen.
    Validation,
    /// The prompts on which stop rules are judged, which are those of `evaluate`.
    Test,
}

impl PromptSet {
    /// Returns the set's name in file names and messages.
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
    /// The recordings along the responses, in the order of `ids`.
    pub recordings: Recordings,
}

/// The size of a recorded set and its acceptance rate.
#[derive(Debug, Clone, Serialize)]
pub struct RolloutSummary {
    /// The number of recorded responses.
    pub num_responses: usize,
    /// The number of response tokens.
    pub num_tokens: usize,
    /// The share of positions with a candidate at which the candidate is the response's token and
    /// is accepted; null without such positions.
    pub share_accepted: Option<f64>,
    /// The number of positions with a rollout: the candidate there is rejected, or whole rounds are
    /// recorded.
    pub num_rollouts: usize,
    /// The mean number of candidates per rollout; null without rollouts.
    pub mean_rollout_length: Option<f64>,
}

impl RecordedSet {
    /// Converts valid rows of a rollouts file and their provenance into recordings.
    ///
    /// # Errors
    /// If the provenance names an unknown drafter.
    pub fn new(rows: &[RolloutRow], provenance: &RolloutProvenance) -> Result<Self> {
        let (ids, responses) = recordings_of(rows);
        let recordings = Recordings {
            drafter: provenance.drafter.parse()?,
            max_length: provenance.max_length as usize,
            eos_token_ids: provenance.responses.eos_token_ids.clone(),
            head: provenance.head.as_ref().map(RolloutHead::timing),
            responses: responses
                .into_iter()
                .map(|response| response.with_forwards(provenance.forwards))
                .collect(),
            answers: None,
        };
        Ok(Self { ids, recordings })
    }

    /// Groups the recordings by the source of their prompts (the prompt file), in order of first
    /// appearance.
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

    /// Summarises the set.
    pub fn summary(&self) -> RolloutSummary {
        let responses = &self.recordings.responses;
        // No candidate is drafted at the last position that the token limit allows.
        let num_drafted: usize = responses.iter().map(|it| it.places.len().min(it.limit - 1)).sum();
        let places = || responses.iter().flat_map(|response| &*response.places);
        let num_rejected = places().filter(|place| place.rejected().is_some()).count();
        let rollouts: Vec<usize> =
            places().filter_map(|place| place.rollout.as_ref().map(Vec::len)).collect();
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
    /// Reads one file of rollouts.
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
