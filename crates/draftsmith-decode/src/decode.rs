//! Callers that advance sequences: one alone, plain or speculative, or many side by side.

#[cfg(test)]
mod tests;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use draftsmith_theory::{Decoding, Draws, StopRule};

use crate::drafter::{DraftRound, Drafter, NoDrafter};
use crate::error::DecodeError;
use crate::sequence::{Generation, Limits, Request, RoundTokens, Sequence, Stage};
use crate::target::{Target, Verification};

/// Decodes with the target alone, one token a forward: the baseline of every speed-up. Its rounds
/// have no candidates.
///
/// `observe` sees every round's tokens as they come, and may break off.
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
) -> Result<Generation, DecodeError> {
    let request = Request { prompt, decoding: *decoding, limits, rule: None, draws };
    decode_one(target, &mut NoDrafter, request, observe)
}

/// Decodes by rounds: the drafter draws candidates until the stop rule, its bounds, an end token
/// or the limit ends the phase (a rule may also skip it), the target verifies them in one forward,
/// and both forget what does not stand.
///
/// The output is the target's: token for token when greedy, in distribution when sampled.
/// No round drafts more than could be kept beside the target's own token.
///
/// # Errors
/// If the prompt is empty or does not fit, or a model fails.
#[expect(clippy::too_many_arguments, reason = "each is one independent choice of the caller")]
pub fn decode_speculative<T: Target, D: Drafter<T> + ?Sized>(
    target: &mut T,
    drafter: &mut D,
    rule: &mut dyn StopRule,
    decoding: &Decoding,
    prompt: &[u32],
    limits: &Limits,
    draws: &mut dyn Draws,
    observe: &mut dyn FnMut(RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Generation, DecodeError> {
    let request = Request { prompt, decoding: *decoding, limits, rule: Some(rule), draws };
    decode_one(target, drafter, request, observe)
}

/// Advances one sequence to its end, in the target's first slot.
fn decode_one<T: Target, D: Drafter<T> + ?Sized>(
    target: &mut T,
    drafter: &mut D,
    request: Request<'_>,
    observe: &mut dyn FnMut(RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Generation, DecodeError> {
    let mut sequence = begin(request, 0, target, drafter)?;
    loop {
        let draft_time = match sequence.stage() {
            Stage::NeedsDraft => timed(|| drafter.propose(target, &mut [sequence.draft_round()]))?,
            Stage::NeedsTarget => Duration::ZERO,
            Stage::Finished(_) => return Ok(sequence.into_generation()),
        };
        let begun = Instant::now();
        let logits = target.verify(&[sequence.verification()])?;
        sequence.commit(target, drafter, &logits, 0);
        sequence.set_round_times(draft_time, begun.elapsed());
        if observe(sequence.last_round(&logits, 0)).is_break() {
            sequence.stop();
        }
    }
}

/// Decodes many sequences, as many side by side as the target has slots: a forward of the drafter is
/// over all whose draft phases go on, and one of the target over the proposals of all. A slot that
/// comes free is given to the next sequence. Each gets the tokens that it would get alone.
///
/// `observe` sees every round's tokens with the number of its request, and may break that one off.
/// The time of a shared forward of the target is shared out by rows, that of the draft phases by the
/// forwards that each took part in.
///
/// # Errors
/// If a prompt is empty or does not fit, or a model fails.
pub fn decode_many<'a, T: Target, D: Drafter<T> + ?Sized>(
    target: &mut T,
    drafter: &mut D,
    requests: impl IntoIterator<Item = Request<'a>>,
    observe: &mut dyn FnMut(usize, RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Vec<Generation>, DecodeError> {
    let mut waiting = requests.into_iter().enumerate();
    let mut free: Vec<usize> = (0..target.num_slots()).rev().collect();
    let mut running: Vec<(usize, Sequence<'a>)> = Vec::with_capacity(free.len());
    let mut generations: Vec<(usize, Generation)> = Vec::new();
    loop {
        while let Some(slot) = free.pop() {
            let Some((number, request)) = waiting.next() else { break };
            let sequence = begin(request, slot, target, drafter)?;
            if let Stage::Finished(_) = sequence.stage() {
                generations.push((number, sequence.into_generation()));
                free.push(slot);
            } else {
                running.push((number, sequence));
            }
        }
        if running.is_empty() {
            break;
        }
        let draft_time = timed(|| {
            let rounds = running.iter_mut().map(|(_, sequence)| sequence);
            let rounds = rounds.filter(|sequence| sequence.stage() == Stage::NeedsDraft);
            let mut rounds: Vec<DraftRound<'_>> = rounds.map(Sequence::draft_round).collect();
            if rounds.is_empty() { Ok(()) } else { drafter.propose(target, &mut rounds) }
        })?;
        let forwards_of =
            |sequence: &Sequence<'_>| sequence.verification().proposal.forwards.total();
        let num_forwards: usize = running.iter().map(|(_, sequence)| forwards_of(sequence)).sum();
        let forward_time = draft_time.checked_div(num_forwards as u32).unwrap_or_default();
        let batch: Vec<Verification<'_>> =
            running.iter().map(|(_, sequence)| sequence.verification()).collect();
        let begun = Instant::now();
        let logits = target.verify(&batch)?;
        let row_time = begun.elapsed() / logits.num_rows() as u32;
        let mut first_row = 0;
        for (number, sequence) in &mut running {
            let num_rows = sequence.verification().proposal.num_rows();
            let draft_time = forward_time * forwards_of(sequence) as u32;
            let own_time = timed(|| {
                sequence.commit(target, drafter, &logits, first_row);
                Ok(())
            })?;
            sequence.set_round_times(draft_time, row_time * num_rows as u32 + own_time);
            if observe(*number, sequence.last_round(&logits, first_row)).is_break() {
                sequence.stop();
            }
            first_row += num_rows;
        }
        let is_finished = |(_, sequence): &mut (usize, Sequence<'a>)| {
            matches!(sequence.stage(), Stage::Finished(_))
        };
        for (number, sequence) in running.extract_if(.., is_finished) {
            free.push(sequence.slot());
            generations.push((number, sequence.into_generation()));
        }
    }
    generations.sort_by_key(|(number, _)| *number);
    Ok(generations.into_iter().map(|(_, generation)| generation).collect())
}

/// Starts a sequence and notes what that takes.
fn begin<'a, T: Target, D: Drafter<T> + ?Sized>(
    request: Request<'a>,
    slot: usize,
    target: &mut T,
    drafter: &mut D,
) -> Result<Sequence<'a>, DecodeError> {
    let begun = Instant::now();
    let mut sequence = Sequence::begin(request, slot, target, drafter)?;
    sequence.set_prefill_time(begun.elapsed());
    Ok(sequence)
}

/// The time that some work takes.
fn timed(work: impl FnOnce() -> Result<(), DecodeError>) -> Result<Duration, DecodeError> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed())
}
