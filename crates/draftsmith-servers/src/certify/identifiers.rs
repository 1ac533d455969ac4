//! Prompts that ask for opaque identifiers to be repeated.
//!
//! Nothing but the text itself predicts an identifier, so a wrong cache shows at once: entries of
//! another request, or entries that a sliding window has overwritten.

use anyhow::{Context, Result};
use draftsmith_data::Message;
use draftsmith_recipe::TextSide;
use draftsmith_theory::SeededDraws;

/// The number of identifiers by which prompts grow.
const NUM_MORE: usize = 8;
/// The number of tokens from which a prompt no longer grows. Most sliding windows are shorter.
const ENOUGH_TOKENS: usize = 4_608;

/// Creates the token ids of a prompt with as many identifiers as fit into the target's context beside
/// `num_tokens` tokens of an answer.
///
/// # Errors
/// If a prompt cannot be encoded, or eight identifiers do not fit.
pub(super) fn prompt(text: &TextSide, number: usize, num_tokens: usize) -> Result<Vec<u32>> {
    let mut draws = SeededDraws::new(0, &["identifiers", &number.to_string()]);
    let mut words = "Repeat these identifiers exactly, one per line:".to_owned();
    let mut longest: Option<Vec<u32>> = None;
    while longest.as_ref().is_none_or(|ids| ids.len() < ENOUGH_TOKENS) {
        for _ in 0..NUM_MORE {
            words += &format!("\n{:012x}", (draws.uniform() * 2_f64.powi(48)) as u64);
        }
        let ids = text.encode(&[Message::user(&words)])?;
        if ids.len() + num_tokens > text.context {
            break;
        }
        longest = Some(ids);
    }
    longest.context(
        "eight identifiers and an answer exceed the target's context; hint: lower `--max-new-tokens`",
    )
}
