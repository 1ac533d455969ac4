//! Times decoding and reading prompts with any model, for the benches that take your model.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use draftsmith_decode::{Limits, ModelSession, RoundTokens, decode_plain};
use draftsmith_model::CausalLm;
use draftsmith_theory::{Decoding, SeededDraws};

/// Token ids of ordinary tokens.
pub(crate) fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 270 + i * 37 % 300).collect()
}

/// A greedy answer to a prompt and the times of its parts.
pub(crate) struct Answer {
    pub(crate) token_ids: Vec<u32>,
    /// The time to read the prompt, including the first token.
    pub(crate) to_first: Duration,
    /// The time from the first token to the last.
    pub(crate) to_last: Duration,
}

/// Decodes greedily and ignores end tokens.
///
/// # Errors
/// If prompt and answer do not fit.
pub(crate) fn answer(model: &CausalLm, prompt: &[u32], max_new_tokens: usize) -> Result<Answer> {
    let limits = Limits::new(max_new_tokens, Vec::new());
    let mut session = ModelSession::new(model, model.shape().context, "model");
    let mut draws = SeededDraws::new(0, &["greedy"]);
    let (begun, mut first) = (Instant::now(), None);
    let observe = &mut |_: RoundTokens<'_>| {
        first.get_or_insert_with(Instant::now);
        ControlFlow::Continue(())
    };
    let greedy = &Decoding::GREEDY;
    let answer = decode_plain(&mut session, greedy, prompt, &limits, &mut draws, observe)?;
    let first = first.context("nothing was decoded")?;
    let (to_first, to_last) = (first - begun, first.elapsed());
    Ok(Answer { token_ids: answer.token_ids, to_first, to_last })
}
