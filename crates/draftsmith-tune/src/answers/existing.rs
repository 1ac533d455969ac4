//! Responses in prompt files, given as text or as tokens.

use anyhow::{Context, Result, bail};
use draftsmith_data::FinishReason;
use draftsmith_recipe::TextSide;

use crate::conversation::Turn;

/// Returns the response that a prompt file gives for a turn, with the reason for its end. It is cut
/// where local decoding would end it: after a stop string or an end-of-sequence token, or at the
/// limit of tokens. A response given as text without a stop string gets an end-of-sequence token.
///
/// # Errors
/// If the turn has no response, or it cannot be encoded.
pub(super) fn existing_response(
    text: &TextSide,
    Turn { prompt_ids, of, calls, .. }: &Turn<'_>,
    max_new_tokens: usize,
) -> Result<(Vec<u32>, FinishReason)> {
    let turn = of.context("it has no response")?;
    let mut ids = prompt_ids.to_vec();
    match (&turn.tokens, calls, &turn.response) {
        (Some(given), ..) => ids.extend(&given.response_ids),
        (None, Some(written), _) => ids.extend(text.tokenizer.encode(written, false)?),
        (None, None, _) if !turn.calls.is_empty() => {
            bail!("the chat template does not write the calls of tools in its response")
        }
        (None, None, Some(response)) => ids.extend(text.tokenizer.encode(response, false)?),
        (None, None, None) => bail!("it has no response"),
    }
    // A text is not cut at an end token, which a template writes after calls.
    let has_end = turn.tokens.is_some() || calls.is_some();
    let mut finish = match text.end_of(&ids, prompt_ids.len(), has_end) {
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
    Ok((ids.split_off(prompt_ids.len()), finish))
}
