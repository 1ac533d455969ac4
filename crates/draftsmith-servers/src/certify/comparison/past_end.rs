//! Counts answers that go on after an end token or the token limit.
//!
//! A server that drafts through an end token sends what it accepted after it. This is a fault
//! wherever the reference stops, so no distribution is tested. Some servers stop at fewer end tokens
//! than the target's configuration names. If the reference goes on after one too, it is no fault.

use std::collections::BTreeMap;
use std::sync::Mutex;

use draftsmith_served::{Completed, CompletionAsk, Listener};
use draftsmith_theory::SeededDraws;
use serde::Serialize;

use super::{Completing, HELD, Result, complete_all, greedy_ask};

/// The number of answers in which the reference may draw an end token, to show whether it stops.
const NUM_ASKED: usize = 1000;

/// An end that answers of a server reach before their limit, or pass.
#[derive(Debug, Clone, Serialize)]
pub struct ReachedEnd {
    /// The end token; null for the maximum number of tokens.
    pub token: Option<u32>,
    /// The number of answers that stop there.
    pub num_stopped: usize,
    /// The number of answers that go on.
    pub num_past: usize,
    /// Whether the reference stops there; null if it did not draw the token.
    pub reference_stops: Option<bool>,
}

/// The numbers of answers that stop at an end and that go on, and the prompt of one that went on
/// with the answer up to its end.
type Reached = ([usize; 2], Vec<u32>);

/// A server whose answers are counted by their end: a token, or `None` for the limit.
pub(super) struct Watched<'a> {
    end: &'a dyn Completing,
    reached: Mutex<BTreeMap<Option<u32>, Reached>>,
}

impl Completing for Watched<'_> {
    fn complete(&self, ask: CompletionAsk<'_>) -> Result<Completed> {
        let completed = self.end.complete(ask)?;
        let ids = &completed.ids;
        let end = ids.last().filter(|_| ids.len() < ask.num_tokens).copied();
        let mut reached = self.reached.lock().expect(HELD);
        let (nums, before) = reached.entry(end).or_default();
        nums[usize::from(completed.num_past_end > 0)] += 1;
        if completed.num_past_end > 0 {
            *before = [ask.prompt, &ids[..ids.len().saturating_sub(1)]].concat();
        }
        Ok(completed)
    }
}

impl<'a> Watched<'a> {
    pub(super) fn new(end: &'a dyn Completing) -> Self {
        Self { end, reached: Mutex::default() }
    }

    /// Lists the server's ends. Where answers go on, the reference is asked to draw the same token,
    /// unless it has done so already.
    ///
    /// # Errors
    /// If the reference fails, or the listener asks to stop.
    pub(super) fn ends(
        &self,
        reference: &Watched<'_>,
        concurrency: usize,
        listener: &(dyn Listener + Sync),
    ) -> Result<Vec<ReachedEnd>> {
        let stops = |token| Some(reference.reached.lock().expect(HELD).get(&token)?.0[1] == 0);
        let mut ends = Vec::new();
        for (token, ([num_stopped, num_past], before)) in &*self.reached.lock().expect(HELD) {
            if *num_past > 0 && stops(*token).is_none() {
                let mut draws = SeededDraws::new(0, &["past the end"]);
                let mut seed = || (draws.uniform() * 2e9) as u32;
                let ask = CompletionAsk { temperature: 1.0, ..greedy_ask(before, 2) };
                let asks: Vec<CompletionAsk<'_>> =
                    (0..NUM_ASKED).map(|_| CompletionAsk { seed: seed(), ..ask }).collect();
                complete_all(reference, &asks, concurrency, listener)?;
            }
            ends.push(ReachedEnd {
                token: *token,
                num_stopped: *num_stopped,
                num_past: *num_past,
                reference_stops: stops(*token),
            });
        }
        Ok(ends)
    }
}
