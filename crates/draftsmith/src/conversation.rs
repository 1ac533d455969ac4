//! Answering prompts' turns one after another, each behind the answers to those before it.

use anyhow::{Context, Result};
use draftsmith_data::Prompt;

use crate::text_side::TextSide;

/// A turn that is to be answered.
pub(crate) struct Turn {
    /// Which of the prompt's, from 0.
    pub(crate) number: usize,
    /// Its row's id.
    pub(crate) id: String,
    /// The conversation up to where the answer begins.
    pub(crate) prompt_ids: Vec<u32>,
}

/// What was kept of each turn of a conversation, and the answers' texts.
pub(crate) type Answered<T> = (Vec<T>, Vec<String>);

/// Answers the turns of a prompt: `answer` gives what is kept of one, in which `response_ids` finds
/// the answer that later turns follow. A conversation that outgrows the models' context ends with
/// the turn before.
///
/// # Errors
/// If the first turn does not fit the context, a text cannot be encoded or decoded, or `answer`
/// fails, with the turn's id.
pub(crate) fn answer_turns<T>(
    text: &TextSide,
    prompt: &Prompt,
    response_ids: impl Fn(&T) -> &[u32],
    mut answer: impl FnMut(Turn) -> Result<T>,
) -> Result<Answered<T>> {
    let one = |turns: Vec<(usize, Turn)>| {
        turns.into_iter().map(|(_, turn)| answer_named(turn, &mut answer)).collect()
    };
    let mut answered = answer_side_by_side(text, &[prompt], response_ids, one)?;
    Ok(answered.remove(0))
}

/// Answers a turn; what fails is told with its id.
///
/// # Errors
/// If `answer` fails.
pub(crate) fn answer_named<T>(turn: Turn, answer: impl FnOnce(Turn) -> Result<T>) -> Result<T> {
    let named = format!("prompt `{}`", turn.id);
    answer(turn).context(named)
}

/// Answers the turns of several prompts: the first ones side by side, then the second ones, and so
/// on. `answer` is given turns with the numbers of their prompts, and gives what is kept of each, in
/// their order. All else is as in [`answer_turns`].
///
/// # Errors
/// As there.
pub(crate) fn answer_side_by_side<T>(
    text: &TextSide,
    prompts: &[&Prompt],
    response_ids: impl Fn(&T) -> &[u32],
    mut answer: impl FnMut(Vec<(usize, Turn)>) -> Result<Vec<T>>,
) -> Result<Vec<Answered<T>>> {
    let mut all: Vec<Answered<T>> = prompts.iter().map(|_| (Vec::new(), Vec::new())).collect();
    for number in 0.. {
        let mut turns = Vec::new();
        for (of_prompt, (prompt, (_, texts))) in prompts.iter().zip(&all).enumerate() {
            let has_more = number < prompt.turns.len() && texts.len() == number;
            let next = if has_more { next_turn(text, prompt, texts)? } else { None };
            turns.extend(next.map(|turn| (of_prompt, turn)));
        }
        if turns.is_empty() {
            break;
        }
        let of_prompts: Vec<usize> = turns.iter().map(|(of_prompt, _)| *of_prompt).collect();
        for (of_prompt, one) in of_prompts.into_iter().zip(answer(turns)?) {
            let (kept, texts) = &mut all[of_prompt];
            texts.push(text.tokenizer.decode(response_ids(&one), true)?);
            kept.push(one);
        }
    }
    Ok(all)
}

/// The turn behind those that were answered; None where it outgrows the context.
///
/// # Errors
/// If the first turn does not fit the context, or a text cannot be encoded.
pub(crate) fn next_turn(
    text: &TextSide,
    prompt: &Prompt,
    texts: &[String],
) -> Result<Option<Turn>> {
    let number = texts.len();
    let id = prompt.row_id(number);
    let prompt_ids = text.prompt_ids(prompt, number, texts)?;
    if number == 0 {
        text.check_fits(&id, &prompt_ids)?;
    } else if prompt_ids.len() >= text.context {
        return Ok(None);
    }
    Ok(Some(Turn { number, id, prompt_ids }))
}
