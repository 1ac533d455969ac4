//! Answering of conversations turn by turn. Each turn's prompt contains the answers to the earlier
//! turns.

use anyhow::{Context, Result};
use draftsmith_data::{DataError, Prompt};

use draftsmith_recipe::{TextSide, Watch};

/// A prompt to answer.
#[derive(Clone)]
pub enum SetPrompt {
    /// A conversation, answered turn by turn.
    Conversation(Prompt),
    /// A prompt of the built data that training held out. It includes the earlier turns of its
    /// conversation.
    HeldOut {
        /// The id of the prompt's turn.
        id: String,
        /// The token ids of the prompt.
        prompt_ids: Vec<u32>,
    },
}

impl SetPrompt {
    /// Returns the maximum number of responses to the prompt.
    pub fn num_turns(&self) -> usize {
        match self {
            Self::Conversation(prompt) => prompt.turns.len(),
            Self::HeldOut { .. } => 1,
        }
    }
}

/// A turn to answer.
pub struct Turn<'p> {
    /// The id of the turn's row.
    pub id: String,
    /// The token ids of the conversation up to the answer.
    pub prompt_ids: Vec<u32>,
    /// The turn in its prompt file; `None` for a held-out prompt.
    pub of: Option<&'p draftsmith_data::Turn>,
    /// The answer in the file with its calls of tools, as the chat template writes it; `None` without calls,
    /// and if the template does not write them.
    pub calls: Option<String>,
    /// The share of the prompt's work that this turn counts for in progress reports, from 0 to 1.
    pub share: f64,
}

/// The results of a conversation's answered turns, and the answers' texts.
pub type Answered<T> = (Vec<T>, Vec<String>);

/// Counts the conversations that ended because an answer does not make the file's calls of tools, whose
/// results follow.
pub fn num_ended_by_call<'a>(
    text: &TextSide,
    prompts: &[&Prompt],
    texts: impl IntoIterator<Item = &'a Vec<String>>,
) -> usize {
    let answered = prompts.iter().zip(texts);
    answered.filter(|(prompt, texts)| text.ends_by_call(prompt, texts)).count()
}

/// Notes that `num` conversations ended early for this reason, unless none did.
pub fn note_ended_by_call(stage: &str, num: usize, watch: &dyn Watch) {
    if num > 0 {
        watch.note(format!(
            "{stage}: {num} conversations end early, because the target's answer does not make the calls of tools \
             whose results follow in the file"
        ));
    }
}

/// Answers the turns of one prompt. `answer` returns a turn's result, and `response_ids` extracts
/// the answer's token ids from it for the following turns. A conversation ends before a turn that
/// exceeds the context.
///
/// # Errors
/// If the first turn does not fit the context, a text cannot be encoded or decoded, or `answer`
/// fails. The error of `answer` gets the turn's id as context.
pub fn answer_turns<'p, T>(
    text: &TextSide,
    prompt: &'p Prompt,
    response_ids: impl Fn(&T) -> &[u32],
    mut answer: impl FnMut(Turn<'p>) -> Result<T>,
) -> Result<Answered<T>> {
    let one = |turns: Vec<(usize, Turn<'p>)>| {
        let named = |(_, turn): (usize, Turn<'p>)| {
            let name = format!("prompt `{}`", turn.id);
            answer(turn).context(name)
        };
        turns.into_iter().map(named).collect()
    };
    let mut answered = answer_batched(text, &[prompt], response_ids, one)?;
    Ok(answered.remove(0))
}

/// Answers the turns of several prompts in batches: all first turns, then all second turns, and so
/// on. `answer` takes turns with the indices of their prompts, and returns their results in order.
/// Otherwise it works like [`answer_turns`].
///
/// # Errors
/// As for [`answer_turns`], except that `answer` itself must name the turn in its error.
pub fn answer_batched<'p, T>(
    text: &TextSide,
    prompts: &[&'p Prompt],
    response_ids: impl Fn(&T) -> &[u32],
    mut answer: impl FnMut(Vec<(usize, Turn<'p>)>) -> Result<Vec<T>>,
) -> Result<Vec<Answered<T>>> {
    let mut all: Vec<Answered<T>> = prompts.iter().map(|_| (Vec::new(), Vec::new())).collect();
    for number in 0.. {
        let mut turns = Vec::new();
        for (prompt_index, (prompt, (_, texts))) in prompts.iter().zip(&all).enumerate() {
            let has_more = number < prompt.turns.len() && texts.len() == number;
            let next = if has_more { next_turn(text, prompt, texts)? } else { None };
            turns.extend(next.map(|turn| (prompt_index, turn)));
        }
        if turns.is_empty() {
            break;
        }
        let prompt_indices: Vec<usize> =
            turns.iter().map(|(prompt_index, _)| *prompt_index).collect();
        for (prompt_index, one) in prompt_indices.into_iter().zip(answer(turns)?) {
            let (results, texts) = &mut all[prompt_index];
            texts.push(text.tokenizer.decode(response_ids(&one), true)?);
            results.push(one);
        }
    }
    Ok(all)
}

/// Builds the turn that follows the answers `texts`; `None` if it exceeds the context.
///
/// # Errors
/// If the first turn does not fit the context, or a text cannot be encoded.
pub fn next_turn<'p>(
    text: &TextSide,
    prompt: &'p Prompt,
    texts: &[String],
) -> Result<Option<Turn<'p>>> {
    let number = texts.len();
    let id = prompt.row_id(number);
    let prompt_ids = match text.prompt_ids(prompt, number, texts) {
        // A template may refuse what follows, such as an empty answer, and an answer may not call the tools whose
        // results follow. The conversation then ends.
        Err(error) if number > 0 && error.is::<DataError>() => return Ok(None),
        prompt_ids => prompt_ids?,
    };
    if number == 0 {
        text.check_fits(&id, &prompt_ids)?;
    } else if prompt_ids.len() >= text.context {
        return Ok(None);
    }
    let share = 1.0 / prompt.turns.len() as f64;
    let of = &prompt.turns[number];
    let with_calls = || text.answer_with_calls(prompt, number, texts).ok();
    let calls = (!of.calls.is_empty()).then(with_calls).flatten();
    Ok(Some(Turn { id, prompt_ids, of: Some(of), calls, share }))
}
