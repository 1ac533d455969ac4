//! What a drafter does along many responses, several recorded at once.
//!
//! A place of sixteen responses takes forwards that read all weights once, and so do the candidates
//! that are rolled out from there. Each gets the recording that it would get alone: a row's result
//! does not depend on the rows beside it, and draws are keyed by the response's id.

use std::ops::ControlFlow;

use anyhow::Result;
use draftsmith_decode::RecordRequest;
use draftsmith_theory::{Decoding, Recording, SeededDraws};
use rayon::prelude::*;

use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::decoders::Decoders;
use crate::exports::Exports;
use crate::pair::Pair;
use crate::responses::sequences_at_once;
use crate::results::DrafterName;

/// How a drafter is recorded.
pub(crate) struct RecordingJob<'a> {
    pub(crate) pair: &'a Pair,
    pub(crate) exports: &'a Exports,
    pub(crate) drafter: DrafterName,
    pub(crate) decoding: Decoding,
    pub(crate) max_new_tokens: usize,
    /// The most candidates that a round can be replayed with.
    pub(crate) max_length: usize,
    /// Whether candidates get their labels also where the drafter has no head: one is to be trained on
    /// them, or weighed.
    pub(crate) labels: bool,
    /// Whether several threads record, each several responses.
    pub(crate) on_cpu: bool,
    pub(crate) console: &'a Console,
    /// Counts responses.
    pub(crate) progress: &'a Progress,
}

/// A response of the target, with the draws of its recording.
pub(crate) struct ToRecord<'a> {
    pub(crate) prompt_ids: &'a [u32],
    pub(crate) response_ids: &'a [u32],
    pub(crate) draws: SeededDraws,
}

impl RecordingJob<'_> {
    /// The recordings of responses, in their order.
    ///
    /// # Errors
    /// If a response does not fit, a model fails, or Ctrl-C is met.
    pub(crate) fn record(&self, responses: &mut [ToRecord<'_>]) -> Result<Vec<Recording>> {
        let at_once = sequences_at_once(responses.len(), self.on_cpu);
        let decoders =
            || Decoders::with_slots(self.pair, self.exports, self.max_new_tokens, at_once);
        let some = |decoders: &mut Decoders<'_>, responses: &mut [ToRecord<'_>]| {
            self.record_some(decoders, responses)
        };
        // On a device, one thread has them all, and a slot that comes free goes to the next.
        let recorded: Vec<Vec<Recording>> = if self.on_cpu {
            let chunks = responses.par_chunks_mut(at_once);
            chunks.map_init(decoders, some).collect::<Result<_>>()?
        } else {
            vec![some(&mut decoders(), responses)?]
        };
        Ok(recorded.into_iter().flatten().collect())
    }

    fn record_some(
        &self,
        decoders: &mut Decoders<'_>,
        responses: &mut [ToRecord<'_>],
    ) -> Result<Vec<Recording>> {
        let num_responses = responses.len();
        let num_places: usize = responses.iter().map(|one| one.response_ids.len()).sum();
        let requests = responses.iter_mut().map(|response| RecordRequest {
            prompt: response.prompt_ids,
            response: response.response_ids,
            draws: &mut response.draws,
        });
        let mut all = self.progress.side_by_side(vec![num_responses as f64]);
        let observe = &mut |num_recorded: usize| {
            all.reach(0, num_recorded as f64 / num_places as f64);
            match self.console.is_interrupted() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let how = (self.max_length, self.labels);
        let recorded = decoders.record(self.drafter, &self.decoding, how, requests, observe)?;
        if recorded.len() < num_responses {
            return Err(Interrupted.into());
        }
        all.finish();
        Ok(recorded)
    }
}
