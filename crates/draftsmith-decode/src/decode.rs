//! The decoding loop: plain or speculative, for one sequence or a batch of sequences.

#[cfg(test)]
mod tests;

use std::ops::ControlFlow;
use std::time::Instant;

use draftsmith_theory::{Decoding, Draws};

use crate::drafter::{DraftRound, Drafter, NoDrafter};
use crate::error::Result;
use crate::sequence::{Generation, Limits, Request, RoundTokens, Sequence, Stage};
use crate::target::{Target, Verification};

/// Decodes without a drafter, one token per target forward. This is the baseline of every speed-up.
/// Each round has no candidates.
///
/// `observe` receives each round's tokens and may stop the generation.
///
/// # Errors
/// If the prompt is empty or does not fit, or the model fails.
pub fn decode_plain<T: Target>(
    target: &mut T,
    decoding: &Decoding,
    prompt: &[u32],
    limits: &Limits,
    draws: &mut dyn Draws,
    observe: &mut dyn FnMut(RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Generation> {
    let request = Request { prompt, decoding: *decoding, limits, rule: None, draws };
    decode_speculative(target, &mut NoDrafter, request, observe)
}

/// Decodes one sequence in rounds. In each round the drafter draws candidates until the stop rule,
/// its bounds, an end-of-sequence token or the token limit ends the draft phase. The target then
/// verifies them in one forward, and both models forget the rejected candidates. A stop rule may
/// also skip a draft phase.
///
/// The output equals the target's own: token for token if greedy, in distribution if sampled. A
/// round never drafts more candidates than the token limit leaves room for, counting the target's
/// own token.
///
/// `observe` receives each round's tokens and may stop the generation.
///
/// # Errors
/// If the prompt is empty or does not fit, or a model fails.
pub fn decode_speculative<T: Target, D: Drafter<T> + ?Sized>(
    target: &mut T,
    drafter: &mut D,
    request: Request<'_>,
    observe: &mut dyn FnMut(RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Generation> {
    decode_on(target, drafter, request, 0, observe)
}

/// Decodes many sequences, as many concurrently as the target has slots. All unfinished draft
/// phases share each draft forward, and all proposals share one target forward. The next sequence
/// starts as soon as a slot is free. Batching does not change any sequence's tokens.
///
/// `observe` receives the index of the request and the round's tokens, and may stop that
/// generation. The time of a target forward is split among the sequences in proportion to their
/// rows. The drafting time is split in proportion to their draft forwards.
///
/// # Errors
/// If a prompt is empty or does not fit, or a model fails.
pub fn decode_many<'a, T: Target, D: Drafter<T> + ?Sized>(
    target: &mut T,
    drafter: &mut D,
    requests: impl IntoIterator<Item = Request<'a>>,
    observe: &mut dyn FnMut(usize, RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Vec<Generation>> {
    let requests = requests.into_iter().map(|request| (request, 0));
    decode_requests(target, drafter, requests, observe)
}

/// Decodes one sequence that goes on from the one before, as a conversation's next turn does: the first `num_kept`
/// tokens of its prompt are all tokens of that sequence, prompt and output, in the first slot. Target and drafter do
/// not read them again. With 0 it begins anew.
///
/// # Errors
/// As [`decode_speculative`].
pub fn decode_on<T: Target, D: Drafter<T> + ?Sized>(
    target: &mut T,
    drafter: &mut D,
    request: Request<'_>,
    num_kept: usize,
    observe: &mut dyn FnMut(RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Generation> {
    let observe = &mut |_, round: RoundTokens<'_>| observe(round);
    let mut all = decode_requests(target, drafter, [(request, num_kept)], observe)?;
    Ok(all.remove(0))
}

/// Decodes requests, each with the number of tokens of its prompt that its slot keeps.
fn decode_requests<'a, T: Target, D: Drafter<T> + ?Sized>(
    target: &mut T,
    drafter: &mut D,
    requests: impl IntoIterator<Item = (Request<'a>, usize)>,
    observe: &mut dyn FnMut(usize, RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Vec<Generation>> {
    let mut waiting = requests.into_iter().enumerate();
    let mut free: Vec<usize> = (0..target.num_slots()).rev().collect();
    let mut running: Vec<(usize, Sequence<'a>)> = Vec::with_capacity(free.len());
    let mut generations: Vec<(usize, Generation)> = Vec::new();
    loop {
        while let Some(slot) = free.pop() {
            let Some((number, (request, num_kept))) = waiting.next() else { break };
            let sequence = Sequence::begin(request, (slot, num_kept), target, drafter)?;
            if let Stage::Finished(_) = sequence.stage {
                generations.push((number, sequence.into_generation()));
                free.push(slot);
            } else {
                running.push((number, sequence));
            }
        }
        if running.is_empty() {
            break;
        }
        let begun = Instant::now();
        let rounds = running.iter_mut().map(|(_, sequence)| sequence);
        let rounds = rounds.filter(|sequence| sequence.stage == Stage::NeedsDraft);
        let rounds = rounds.map(|sequence| sequence.draft_round(target));
        let mut rounds: Vec<DraftRound<'_>> = rounds.collect();
        if !rounds.is_empty() {
            drafter.propose(target, &mut rounds)?;
        }
        let draft_time = begun.elapsed();
        let batch: Vec<Verification<'_>> =
            running.iter().map(|(_, sequence)| sequence.verification()).collect();
        let num_forwards: usize = batch.iter().map(|one| one.proposal.forwards.total()).sum();
        let forward_time = draft_time.checked_div(num_forwards as u32).unwrap_or_default();
        let begun = Instant::now();
        let logits = target.verify(&batch)?;
        let row_time = begun.elapsed() / logits.num_rows() as u32;
        let mut first_row = 0;
        for (number, sequence) in &mut running {
            let proposal = sequence.verification().proposal;
            let (num_rows, draft_time) =
                (proposal.num_rows(), forward_time * proposal.forwards.total() as u32);
            let begun = Instant::now();
            sequence.commit(target, drafter, &logits, first_row);
            sequence.set_round_times(draft_time, row_time * num_rows as u32 + begun.elapsed());
            if observe(*number, sequence.last_round(&logits, first_row)).is_break() {
                sequence.stop();
            }
            first_row += num_rows;
        }
        let is_finished = |(_, sequence): &mut (usize, Sequence<'a>)| {
            matches!(sequence.stage, Stage::Finished(_))
        };
        for (number, sequence) in running.extract_if(.., is_finished) {
            free.push(sequence.slot);
            generations.push((number, sequence.into_generation()));
        }
    }
    generations.sort_by_key(|(number, _)| *number);
    Ok(generations.into_iter().map(|(_, generation)| generation).collect())
}
