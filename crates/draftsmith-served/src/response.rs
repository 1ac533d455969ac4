//! Conversion of a server's completion to a response: tokenises text, and cuts the tokens where
//! local decoding would end.

use draftsmith_data::FinishReason;

use super::journal::{Entry, FILTERED, INEXACT};
use super::known::KnownTokens;
use super::protocol::{Ask, Terms};
use super::reply::{Completion, ReplyEnding, Tokens, Unusable};
use crate::TargetSettings;

/// A response, with notes about the answer that it came from.
pub(super) struct Received {
    pub(super) entry: Entry,
    /// The number of tokens that the server sent after the response's end.
    pub(super) num_past_end: usize,
    /// Whether the response arrived as text and was tokenised locally.
    pub(super) is_text: bool,
    /// Whether a stop string or token of the server ended the response, which has no end token then.
    pub(super) is_stopped: bool,
    /// Whether the server counted more response tokens than it sent ids.
    pub(super) lacks_ids: bool,
    /// Whether the server reported a different number of prompt tokens than we sent.
    pub(super) has_other_prompt: bool,
    /// The server's name for its model, if it differs from the requested one.
    pub(super) other_model: Option<String>,
    /// The file in which the server stores the prompt's hidden states, if it does.
    pub(super) states_path: Option<String>,
    /// The numbers of drafted and accepted candidates, if the server gives them.
    pub(super) speculated: Option<[f64; 2]>,
}

impl Received {
    /// Converts a completion to a response.
    ///
    /// # Errors
    /// If the completion has no tokens, has tokens outside the target's vocabulary, or is too
    /// short.
    pub(super) fn of(
        completion: Completion,
        ask: &Ask,
        terms: &Terms,
        target: &TargetSettings,
    ) -> Result<Self, Unusable> {
        let Completion { tokens, mut known, ending, ended_by, num_tokens, .. } = completion;
        let is_text = matches!(tokens, Tokens::Text(_));
        let mut is_inexact = false;
        let ids = match tokens {
            Tokens::Ids(ids) => ids,
            Tokens::Text(words) => {
                let ids = target.tokenizer.encode(&words, false);
                let ids = ids.map_err(|error| Unusable::Invalid(format!("a text: {error}")))?;
                // The target may have used more tokens for the same text than our tokenizer, but
                // not twice as many.
                if ending == ReplyEnding::Length
                    && num_tokens.is_none()
                    && 2 * ids.len() < ask.max_tokens
                {
                    return Err(Unusable::CutShort(ids.len()));
                }
                is_inexact = words.contains(char::REPLACEMENT_CHARACTER)
                    || is_echo(&words, ask, target)
                    || num_tokens.is_some_and(|num| ids.len() > 2 * num + 1);
                ids
            }
        };
        let num_received = ids.len();
        let end = ended_by.or_else(|| match &completion.stopped_by {
            None => terms.eos_token_ids.first().copied(),
            Some(words) => find_end(words, target),
        });
        let end = end.filter(|_| ending == ReplyEnding::Stop);
        let mut is_stopped = ending == ReplyEnding::Stop && end.is_none();
        is_inexact |= is_stopped && completion.stopped_by.is_some() && num_received == 0;
        let entry = if ending == ReplyEnding::ContentFilter || is_inexact {
            let why = if is_inexact { INEXACT } else { FILTERED };
            Entry::left_out(&ask.id, terms.identity(ask), why)
        } else {
            let (response_ids, mut finish) = cut_at_end(ask, target, ids.into_iter().chain(end));
            is_stopped &= finish == FinishReason::Length;
            if is_stopped {
                finish = FinishReason::StopString;
            }
            if let Some(known) = &mut known {
                // No log-probabilities are known for an end token that the server left out.
                known.resize(response_ids.len(), KnownTokens::new());
            }
            Entry {
                id: ask.id.clone(),
                request: terms.identity(ask),
                response_ids,
                finish_reason: finish.as_str().to_owned(),
                known,
            }
        };
        if entry.response_ids.is_empty() && !entry.is_left_out() {
            let why = "no tokens, and the target has no end token that they could stand for";
            return Err(Unusable::Invalid(why.to_owned()));
        }
        if !entry.is_sound(terms.vocab_size) {
            return Err(Unusable::Invalid("a response that the target cannot have".to_owned()));
        }
        let num_prompt_tokens = completion.num_prompt_tokens;
        Ok(Self {
            num_past_end: num_received.saturating_sub(entry.response_ids.len()),
            is_stopped: is_stopped && !entry.is_left_out(),
            entry,
            is_text,
            lacks_ids: completion.lacks_ids,
            has_other_prompt: num_prompt_tokens.is_some_and(|num| num != ask.prompt_ids.len()),
            other_model: completion.model.filter(|model| !is_same_model(model, &terms.model)),
            states_path: completion.states_path,
            speculated: completion.speculated,
        })
    }
}

/// Returns whether a text begins with the prompt's, with or without special tokens.
fn is_echo(words: &str, ask: &Ask, target: &TargetSettings) -> bool {
    [false, true].into_iter().any(|skips_special| {
        let prompt = target.tokenizer.decode(&ask.prompt_ids, skips_special).unwrap_or_default();
        let prompt = prompt.trim();
        !prompt.is_empty() && words.trim_start().starts_with(prompt)
    })
}

/// Finds the end token with this text, if there is one. Servers also have such stop strings.
fn find_end(words: &str, target: &TargetSettings) -> Option<u32> {
    let is_it = |id: &u32| target.tokenizer.decode(&[*id], false).is_ok_and(|text| text == words);
    target.eos_token_ids.iter().copied().find(is_it)
}

/// Cuts a response where local decoding would end it: after an end-of-sequence token or a stop
/// string, or at the token limit. Returns its tokens and the reason for its end.
fn cut_at_end(
    ask: &Ask,
    target: &TargetSettings,
    received: impl Iterator<Item = u32>,
) -> (Vec<u32>, FinishReason) {
    let TargetSettings { eos_token_ids, text_end, .. } = target;
    let mut ids = ask.prompt_ids.clone();
    let mut finish = FinishReason::Length;
    for id in received.take(ask.max_tokens) {
        ids.push(id);
        if eos_token_ids.contains(&id) {
            finish = FinishReason::Eos;
            break;
        }
        if text_end.as_ref().is_some_and(|end| end.is_reached(&mut ids.iter().rev().copied())) {
            finish = FinishReason::StopString;
            break;
        }
    }
    (ids.split_off(ask.prompt_ids.len()), finish)
}

/// Returns whether the model name in an answer can mean the requested model. Servers report the
/// requested name, or a path or file whose last part is that name.
fn is_same_model(answered: &str, requested: &str) -> bool {
    let base = |name: &str| {
        let name = name.trim_end_matches('/').rsplit(['/', '\\']).next().unwrap_or(name);
        name.to_lowercase().trim_end_matches(".gguf").to_owned()
    };
    answered.is_empty() || base(answered) == base(requested)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_the_same_by_its_last_name() {
        let same = [
            ("", "a/b"),
            ("a/b", "a/b"),
            ("B", "a/b"),
            ("/models/b/", "b"),
            ("C:\\models\\b.gguf", "b"),
            ("b", "/models/b.gguf"),
        ];
        for (answered, requested) in same {
            assert!(is_same_model(answered, requested), "{answered} for {requested}");
        }
        for (answered, requested) in [("c", "b"), ("a", "a/b"), ("b-8b", "b"), ("b.gguf", "c.gguf")]
        {
            assert!(!is_same_model(answered, requested), "{answered} for {requested}");
        }
    }
}
