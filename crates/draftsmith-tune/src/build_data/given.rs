//! Responses that prompt files give as tokens, possibly with draft tokens and acceptance
//! probabilities that the file's author measured.

use anyhow::{Result, bail};
use draftsmith_data::{DraftColumns, GivenTokens, Prompt};
use draftsmith_theory::acceptance_prob;

use draftsmith_recipe::Watch;

/// The mean difference of acceptance probabilities above which rounding cannot be the cause.
const OTHER_MODELS: f64 = 0.05;

/// Checks that all token ids that a prompt file gives are below `vocab_size`.
///
/// # Errors
/// If a token id is unknown. The error names the first one and its key.
pub(super) fn check_known(prompt: &Prompt, vocab_size: usize) -> Result<()> {
    for given in prompt.turns.iter().filter_map(|turn| turn.tokens.as_ref()) {
        let GivenTokens { prompt_ids, response_ids, draft_ids, .. } = given;
        let lists = [("prefix", Some(prompt_ids)), ("tokens", Some(response_ids))];
        for (key, ids) in lists.into_iter().chain([("draft", draft_ids.as_ref())]) {
            let unknown = ids.into_iter().flatten().find(|id| **id as usize >= vocab_size);
            if let Some(id) = unknown {
                bail!(
                    "prompt `{}`: key `{key}` has the token {id}, but the models have {vocab_size}; \
                     hint: use the models whose tokenizer made `{}`",
                    prompt.id,
                    prompt.source
                );
            }
        }
    }
    Ok(())
}

/// The statistics of all responses given as tokens.
#[derive(Default)]
pub(super) struct GivenLabels {
    num_responses: usize,
    num_cut: usize,
    /// The number of tokens with acceptance probabilities in the file. `difference` is the sum of
    /// their absolute differences from ours.
    num_compared: usize,
    difference: f64,
}

impl GivenLabels {
    /// Counts a response given as tokens, and compares the file's labels with ours.
    ///
    /// # Errors
    /// If the draft gives one of the file's draft tokens probability 0.
    pub(super) fn count(&mut self, given: &GivenTokens, columns: &DraftColumns) -> Result<()> {
        let own = columns.draft_log_prob.iter();
        if let Some(at) = own.clone().position(|log_prob| !log_prob.is_finite()) {
            bail!(
                "key `draft` has the token {} at position {at}, to which the draft gives probability 0 \
                 under `[data]`; hint: set `data.temperature` and the other sampling keys as they were \
                 when the file was made, or remove the key to draw tokens here",
                columns.draft_ids[at]
            );
        }
        self.num_responses += 1;
        self.num_cut += usize::from(columns.draft_ids.len() < given.response_ids.len());
        let theirs = given.acceptance_prob.iter().flatten();
        for (theirs, (p, q)) in theirs.zip(columns.target_log_prob.iter().zip(own)) {
            self.num_compared += 1;
            self.difference += (theirs - f64::from(acceptance_prob(*p, *q))).abs();
        }
        Ok(())
    }

    /// Tells the user how many responses were cut, and how much the files' labels differ from ours.
    pub(super) fn note(&self, max_new_tokens: usize, watch: &dyn Watch) {
        let Self { num_responses, num_cut, num_compared, difference } = *self;
        if num_responses == 0 {
            return;
        }
        let mut line = format!("build-data: {num_responses} responses were given as tokens");
        if num_cut > 0 {
            line += &format!(
                ", {num_cut} of them cut at an end token, the context or `data.max_new_tokens` = \
                 {max_new_tokens}"
            );
        }
        if num_compared > 0 {
            let mean = difference / num_compared as f64;
            line += &format!(
                "; acceptance probabilities differ from the file's by {mean:.4} on average{}",
                match mean > OTHER_MODELS {
                    true => ": it was made with other models or sampling settings",
                    false => "",
                }
            );
        }
        watch.note(line);
    }
}
