//! Answering a prompt's turns one after another, each behind the answers to those before it.

use anyhow::{Context, Result};
use draftsmith_data::Prompt;

use crate::pair::Pair;

/// A turn that is to be answered.
pub(crate) struct Turn {
    /// Which of the prompt's, from 0.
    pub(crate) number: usize,
    /// Its row's id.
    pub(crate) id: String,
    /// The conversation up to where the answer begins.
    pub(crate) prompt_ids: Vec<u32>,
}

/// Answers the turns of a prompt: `answer` gives what is kept of one, in which `response_ids` finds
/// the answer that later turns follow. Returns what was kept, with the answers' texts. A
/// conversation that outgrows the models' context ends with the turn before.
///
/// # Errors
/// If the first turn does not fit the context, a text cannot be encoded or decoded, or `answer`
/// fails, with the turn's id.
pub(crate) fn answer_turns<T>(
    pair: &Pair,
    prompt: &Prompt,
    response_ids: impl Fn(&T) -> &[u32],
    mut answer: impl FnMut(Turn) -> Result<T>,
) -> Result<(Vec<T>, Vec<String>)> {
    let (mut kept, mut texts) = (Vec::new(), Vec::new());
    for number in 0..prompt.turns.len() {
        let id = prompt.row_id(number);
        let prompt_ids = pair.encode(&prompt.messages(number, &texts))?;
        if number == 0 {
            pair.check_fits(&id, &prompt_ids)?;
        } else if prompt_ids.len() >= pair.context() {
            break;
        }
        let named = format!("prompt `{id}`");
        let one = answer(Turn { number, id, prompt_ids }).context(named)?;
        texts.push(pair.tokenizer.decode(response_ids(&one), true)?);
        kept.push(one);
    }
    Ok((kept, texts))
}
