//! Construction of rows: gets the response to each turn and labels it.
//!
//! Labels for a target on a server do not need the target's weights. A greedy response already
//! gives the target's most probable token at each position, which suffices for labels. For a
//! sampled response, servers return the log-probabilities of the most probable tokens. Each row
//! stores a bound on the error from all other tokens (`draftsmith-theory`, `top_probs.rs`).

use std::borrow::Cow;
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result, anyhow};
use draftsmith_data::{Prompt, ResponseRow};
use draftsmith_decode::KnownResponse;
use draftsmith_theory::{Decoding, Draws, SeededDraws, TokenChoice, TopProbs};

use super::given::GivenLabels;
use crate::answers::{Answers, TargetAnswer, unfiltered};
use crate::conversation::{answer_batched, note_ended_by_call, num_ended_by_call};
use crate::labels::Labels;
use draftsmith_recipe::{Bar, DataRecipe, LabelModels, Responses, TextSide, Watch};

const HELD: &str = "nobody panics while holding it";

/// A builder of labelled rows for one data set.
pub(super) struct Labeller<'a> {
    pub(super) models: LabelModels<'a>,
    pub(super) text: &'a TextSide,
    pub(super) data: &'a DataRecipe,
    pub(super) seed: u64,
    pub(super) decoding: Decoding,
    /// The source of responses.
    pub(super) answers: &'a dyn Answers,
    pub(super) counted: Mutex<CountedRows>,
    pub(super) progress: &'a dyn Bar,
    pub(super) watch: &'a dyn Watch,
}

/// The statistics of rows, for messages at the end.
#[derive(Default)]
pub(super) struct CountedRows {
    /// The responses that prompt files give as tokens.
    given: GivenLabels,
    /// The conversations that end at an answer that does not call the tools whose results follow.
    num_ended_by_call: usize,
    kept: MassOfRows,
    /// The rows that exceed `data.server.max_outside_mass`.
    left_out: MassOfRows,
}

/// The summed unknown probability mass of some rows of a target on servers.
#[derive(Default)]
struct MassOfRows {
    num_rows: usize,
    num_tokens: usize,
    outside_mass: f64,
}

impl MassOfRows {
    /// Computes the mean unknown probability mass per token, in percent; `None` without rows.
    fn percent(&self) -> Option<f64> {
        (self.num_rows > 0).then(|| 100.0 * self.outside_mass / self.num_tokens as f64)
    }
}

/// Returns the share of a turn's work for generating its response, from 0 to 1. It is half if
/// labelling needs another forward over the response.
pub(super) fn share_of_response(data: &DataRecipe, has_draft: bool) -> f64 {
    match (data.responses, has_draft) {
        (Responses::Existing | Responses::Server, _) => 0.0,
        (Responses::Generate, true) => 0.5,
        (Responses::Generate, false) => 1.0,
    }
}

impl Labeller<'_> {
    /// Builds the rows of conversations, one per assistant turn, in order. Leaves out rows with too
    /// much unknown probability mass, and all turns of a conversation from the first filtered turn
    /// on.
    ///
    /// # Errors
    /// If a response is missing or does not fit, a model fails, or the job is interrupted.
    pub(super) fn rows(&self, prompts: &[&Prompt]) -> Result<Vec<ResponseRow>> {
        let mut left = prompts.len() as f64;
        let unfiltered: Vec<Cow<'_, Prompt>> =
            prompts.iter().filter_map(|prompt| unfiltered(self.answers, prompt)).collect();
        let prompts: Vec<&Prompt> = unfiltered.iter().map(|prompt| &**prompt).collect();
        let share_of_labels = 1.0 - share_of_response(self.data, self.models.draft.is_some());
        let answered = answer_batched(
            self.text,
            &prompts,
            |row: &ResponseRow| &row.response_ids,
            |turns| {
                let places: Vec<(usize, Option<&draftsmith_data::Turn>, f64)> =
                    turns.iter().map(|(index, turn)| (*index, turn.of, turn.share)).collect();
                let turns = turns.into_iter().map(|(_, turn)| turn).collect();
                let label =
                    |((index, of, share), answer): ((usize, Option<&_>, f64), TargetAnswer)| {
                        self.watch.check_interrupted()?;
                        let named = format!("prompt `{}`", answer.id);
                        let row = self.row(prompts[index], of, answer).context(named)?;
                        self.progress.advance(share * share_of_labels);
                        left -= share;
                        Ok(row)
                    };
                places.into_iter().zip(self.answers.answer(turns)?).map(label).collect()
            },
        )?;
        // The remaining progress belongs to turns that exceed the context.
        self.progress.advance(left);
        let num_ended = num_ended_by_call(self.text, &prompts, answered.iter().map(|it| &it.1));
        self.counted.lock().expect(HELD).num_ended_by_call += num_ended;
        let rows = answered.into_iter().flat_map(|(rows, _)| rows);
        Ok(rows.filter(|row| self.is_known(row)).collect())
    }

    fn row(
        &self,
        prompt: &Prompt,
        of: Option<&draftsmith_data::Turn>,
        answer: TargetAnswer,
    ) -> Result<ResponseRow> {
        let TargetAnswer { id, prompt_ids, response_ids, finish, probs, log_probs } = answer;
        let takes_existing = self.data.responses == Responses::Existing;
        let given = of.filter(|_| takes_existing).and_then(|turn| turn.tokens.as_ref());
        // If the target's weights are available locally, labels come from them instead of the
        // server's probabilities.
        let probs = probs.filter(|_| self.models.target.is_none());
        let labels = match log_probs {
            Some(response_target_log_prob) => Labels { response_target_log_prob, draft: None },
            None => {
                let mut draws = SeededDraws::new(self.seed, &[&id, "draft tokens"]);
                let given_ids = given.and_then(|given| given.draft_ids.as_deref());
                let draft_token = |at: usize, q: &[f64]| match given_ids {
                    Some(ids) => ids[at] as usize,
                    None => draws.categorical(q),
                };
                let known = KnownResponse { response: &response_ids, probs: probs.as_deref() };
                Labels::of(&self.models, &self.decoding, &prompt_ids, known, draft_token)?
            }
        };
        if let (Some(given), Some(columns)) = (given, &labels.draft) {
            self.counted.lock().expect(HELD).given.count(given, columns)?;
        }
        let mut row = ResponseRow {
            id,
            source: prompt.source.clone(),
            prompt_ids,
            response_ids,
            response_target_log_prob: labels.response_target_log_prob,
            target_outside_mass: probs.map(|probs| self.outside_masses(&probs)),
            draft: labels.draft,
            finish_reason: finish,
        };
        row.round_stored();
        Ok(row)
    }

    fn outside_masses(&self, probs: &[TopProbs]) -> Vec<f32> {
        let TokenChoice::Sampled(sampling) = self.decoding.choice else {
            return vec![0.0; probs.len()];
        };
        let vocab_size = self.models.vocab_size;
        let mass = |probs: &TopProbs| probs.outside_mass(&sampling, vocab_size).clamp(0.0, 1.0);
        probs.iter().map(|probs| mass(probs) as f32).collect()
    }

    /// Returns whether enough of a row's probability mass is known to keep the row, and counts the
    /// row as kept or left out.
    fn is_known(&self, row: &ResponseRow) -> bool {
        let Some(masses) = &row.target_outside_mass else { return true };
        let sum: f64 = masses.iter().map(|mass| f64::from(*mass)).sum();
        let most = self.data.served_by().map_or(1.0, |server| server.max_outside_mass);
        let is_known = sum <= most * masses.len() as f64;
        let mut all = self.counted.lock().expect(HELD);
        let rows = if is_known { &mut all.kept } else { &mut all.left_out };
        rows.num_rows += 1;
        rows.num_tokens += masses.len();
        rows.outside_mass += sum;
        is_known
    }

    /// Tells the user how much the labels in prompt files differ from ours, and how much
    /// probability mass of a target on servers is unknown.
    pub(super) fn note(&self) {
        let counted = self.counted.lock().expect(HELD);
        counted.given.note(self.data.max_new_tokens, self.watch);
        if let Some(unknown) = counted.kept.percent() {
            self.watch.note(format!(
                "build-data: {unknown:.2} % of the target's probability mass is unknown"
            ));
        }
        note_ended_by_call("build-data", counted.num_ended_by_call, self.watch);
        drop(counted);
        if let Some(why) = self.why_left_out() {
            self.watch.note(format!("build-data: {why}"));
        }
    }

    /// Returns the number of responses left out because too much of their probability mass is unknown,
    /// and of those that the servers' content filter stopped, or whose text is not what the target wrote.
    /// Then the number of conversations that end at other calls of tools than the file's.
    pub(super) fn num_left_out(&self) -> [usize; 3] {
        let CountedRows { left_out, num_ended_by_call, .. } = &*self.counted.lock().expect(HELD);
        [left_out.num_rows, self.answers.num_left_out(), *num_ended_by_call]
    }

    /// Describes the responses that were left out because too much of their probability mass is unknown.
    fn why_left_out(&self) -> Option<String> {
        let CountedRows { kept, left_out, .. } = &*self.counted.lock().expect(HELD);
        let (server, percent) = self.data.served_by().zip(left_out.percent())?;
        Some(format!(
            "{} of {} responses are left out, because on average {percent:.2} % of their probability \
             mass is outside the {} log-probabilities that the servers return, and \
             `data.server.max_outside_mass` is {}",
            left_out.num_rows,
            left_out.num_rows + kept.num_rows,
            server.logprobs,
            server.max_outside_mass
        ))
    }

    /// Builds the error for a data set in `dir` without any row, with reasons and hints.
    pub(super) fn no_rows(&self, dir: &Path) -> anyhow::Error {
        let (mut reasons, mut hints) = (String::new(), String::new());
        if let Some(why) = self.why_left_out() {
            reasons += &format!(": {why}");
            hints += "raise `data.server.logprobs` or `data.server.max_outside_mass`, or set `data.top_k` \
                      to at most `data.server.logprobs`; ";
        }
        let [_, num_filtered, _] = self.num_left_out();
        if num_filtered > 0 {
            reasons += &format!(
                ": the servers' content filter stopped {num_filtered} responses, or their text is not what the target wrote"
            );
            hints += "turn the servers' content filter off, use a server that returns token ids, and delete `served.jsonl` \
                      there; ";
        }
        anyhow!(
            "the data in `{}` has no row{reasons}; hint: {hints}delete the Parquet files there and run \
             the same command again",
            dir.display()
        )
    }
}
