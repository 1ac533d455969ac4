//! Responses that stand in the prompt files: as text, or as tokens, with what a draft drew beside them
//! and how probable acceptance was where the file was made.

use std::sync::Mutex;

use anyhow::{Result, bail};
use draftsmith_data::{DraftColumns, FinishReason, GivenTokens, Prompt, Turn};
use draftsmith_theory::{TextEnd, acceptance_prob};

use crate::console::Console;
use crate::text_side::TextSide;

const HELD: &str = "nobody panics while holding it";

/// A mean difference of acceptance probabilities that rounding does not explain.
const OTHER_MODELS: f64 = 0.05;

/// A response from a file.
pub(super) struct Existing {
    pub(super) ids: Vec<u32>,
    pub(super) finish: FinishReason,
}

/// A turn's response from its file, ended as the target would end it: by a stop string, or else by an
/// end token; cut where it does not fit. Tokens are taken as they are up to where they end.
///
/// # Errors
/// If there is none, or it cannot be encoded.
pub(super) fn existing_response(
    text: &TextSide,
    turn: &Turn,
    prompt_ids: &[u32],
    max_new_tokens: usize,
) -> Result<Existing> {
    let mut ids = prompt_ids.to_vec();
    match (&turn.tokens, &turn.response) {
        (Some(given), _) => ids.extend(&given.response_ids),
        (None, Some(response)) => ids.extend(text.tokenizer.encode(response, false)?),
        (None, None) => bail!("it has no response"),
    }
    let stop = text.text_end.as_deref();
    let ends = |len: usize| {
        let is_end = turn.tokens.is_some() && text.eos_token_ids.contains(&ids[len - 1]);
        let is_stopped =
            || stop.is_some_and(|stop| stop.is_reached(&mut ids[..len].iter().rev().copied()));
        match is_end {
            true => Some((len, FinishReason::Eos)),
            false => is_stopped().then_some((len, FinishReason::StopString)),
        }
    };
    let mut finish = match (prompt_ids.len() + 1..=ids.len()).find_map(ends) {
        Some((len, finish)) => {
            ids.truncate(len);
            finish
        }
        None if turn.tokens.is_some() => FinishReason::Length,
        None => {
            ids.extend(text.eos_token_ids.first());
            FinishReason::Eos
        }
    };
    let room = text.context - prompt_ids.len();
    let most = prompt_ids.len() + room.min(max_new_tokens);
    if ids.len() > most {
        ids.truncate(most);
        finish = FinishReason::Length;
    }
    Ok(Existing { ids: ids.split_off(prompt_ids.len()), finish })
}

/// Checks that models of `vocab_size` tokens know those that came with a prompt.
///
/// # Errors
/// The first that they do not know, with its key.
pub(super) fn check_known(prompt: &Prompt, vocab_size: usize) -> Result<()> {
    for given in prompt.turns.iter().filter_map(|turn| turn.tokens.as_ref()) {
        let GivenTokens { prompt_ids, response_ids, draft_ids, .. } = given;
        let lists = [("prefix", Some(prompt_ids)), ("tokens", Some(response_ids))];
        for (key, ids) in lists.into_iter().chain([("draft", draft_ids.as_ref())]) {
            let unknown = ids.into_iter().flatten().find(|id| **id as usize >= vocab_size);
            if let Some(id) = unknown {
                bail!(
                    "prompt `{}`: key `{key}` has the token {id}, and the models have {vocab_size}; \
                     hint: give the models whose tokenizer made `{}`",
                    prompt.id,
                    prompt.source
                );
            }
        }
    }
    Ok(())
}

/// What is told of all responses that came as tokens.
#[derive(Default)]
pub(super) struct GivenLabels {
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    num_responses: usize,
    num_cut: usize,
    /// Those that the file has acceptance probabilities of.
    num_compared: usize,
    difference: f64,
}

impl GivenLabels {
    /// Counts a response that came as tokens, and compares the file's labels with those of the models
    /// here.
    ///
    /// # Errors
    /// If the draft would not have drawn what the file says it drew.
    pub(super) fn count(&self, given: &GivenTokens, columns: &DraftColumns) -> Result<()> {
        let own = columns.draft_log_prob.iter();
        if let Some(at) = own.clone().position(|log_prob| !log_prob.is_finite()) {
            bail!(
                "key `draft` has the token {} at place {at}, to which the draft gives no chance under \
                 `[data]`; hint: set `data.temperature` and its like to what the file was made with, \
                 or take the key out of it to have tokens drawn here",
                columns.draft_ids[at]
            );
        }
        let mut told = self.told.lock().expect(HELD);
        told.num_responses += 1;
        told.num_cut += usize::from(columns.draft_ids.len() < given.response_ids.len());
        let theirs = given.acceptance_prob.iter().flatten();
        for (theirs, (p, q)) in theirs.zip(columns.target_log_prob.iter().zip(own)) {
            told.num_compared += 1;
            told.difference += (theirs - f64::from(acceptance_prob(*p, *q))).abs();
        }
        Ok(())
    }

    /// Tells how far the file's labels are from those that were made.
    pub(super) fn tell(&self, max_new_tokens: usize, console: &Console) {
        let Told { num_responses, num_cut, num_compared, difference } =
            *self.told.lock().expect(HELD);
        if num_responses == 0 {
            return;
        }
        let mut line = format!("build-data: {num_responses} responses came as tokens");
        if num_cut > 0 {
            line += &format!(
                ", {num_cut} of them cut at an end token, the context, or `data.max_new_tokens` = \
                 {max_new_tokens}"
            );
        }
        if num_compared > 0 {
            let mean = difference / num_compared as f64;
            line += &format!(
                "; acceptance probabilities are {mean:.4} from the file's on average{}",
                match mean > OTHER_MODELS {
                    true => ": it was made with other models, or another way of sampling",
                    false => "",
                }
            );
        }
        console.note(line);
    }
}
