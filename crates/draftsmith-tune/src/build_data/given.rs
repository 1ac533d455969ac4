//! Responses that prompt files give as tokens, possibly with a draft's tokens and the acceptance probabilities
//! that the file's author measured.

use anyhow::{Result, bail};
use draftsmith_data::{DraftColumns, GivenTokens, Prompt};
use draftsmith_theory::acceptance_prob;

use draftsmith_recipe::watch::Watch;

/// Mean difference of acceptance probabilities above which rounding cannot be the reason.
const OTHER_MODELS: f64 = 0.05;

/// Checks that a prompt's given tokens are in a vocabulary of `vocab_size` tokens.
///
/// # Errors
/// The first unknown token, with its key.
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

/// Statistics of all responses given as tokens.
#[derive(Default)]
pub(super) struct GivenLabels {
    num_responses: usize,
    num_cut: usize,
    /// Tokens with acceptance probabilities in the file, and the sum of their differences from ours.
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

    /// Notes how far the file's labels are from ours.
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
