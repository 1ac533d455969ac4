//! Generation of the target's responses to many prompts, in batches.
//!
//! A forward reads all weights, whether it computes one row or sixteen, so independent sequences
//! share forwards. Batching does not change a response, because a row's result does not depend on
//! the other rows, and each response has its own random draws.

use anyhow::Result;
use draftsmith_decode::{
    Generation, Limits, ModelSession, NoDrafter, Request, RoundTokens, decode_many,
};
use draftsmith_model::CausalLm;
use draftsmith_theory::{Decoding, SeededDraws};

use draftsmith_recipe::{Interrupted, Watch};

/// The maximum number of sequences in a batch. With more, arithmetic instead of memory bandwidth
/// limits the speed.
const SEQUENCES_AT_ONCE: usize = 16;

/// Returns the batch size for `num_sequences` sequences. On the CPU, the sequences are split among
/// the threads.
pub fn sequences_at_once(num_sequences: usize, on_cpu: bool) -> usize {
    let num_threads = if on_cpu { rayon::current_num_threads() } else { 1 };
    num_sequences.div_ceil(num_threads).clamp(1, SEQUENCES_AT_ONCE)
}

/// A target with the settings to generate its responses.
pub struct Responder<'a> {
    /// The target.
    pub target: &'a CausalLm,
    /// The maximum sequence length that all loaded models can read, in tokens.
    pub context: usize,
    /// The way of decoding: greedy or sampled, and any repetition penalty.
    pub decoding: Decoding,
    /// The conditions that end responses.
    pub limits: Limits,
    /// The interface that reports interrupts by the user.
    pub watch: &'a dyn Watch,
}

impl Responder<'_> {
    /// Generates responses in the order of the prompts. Each prompt comes with the random draws for
    /// its response. `observe` receives each round's tokens with the index of the prompt.
    ///
    /// # Errors
    /// If a prompt is empty or does not fit, the model fails, or the job is interrupted.
    pub fn respond(
        &self,
        prompts: &mut [(&[u32], SeededDraws)],
        mut observe: impl FnMut(usize, RoundTokens<'_>),
    ) -> Result<Vec<Generation>> {
        let longest = prompts.iter().map(|(prompt, _)| prompt.len()).max().unwrap_or(0);
        // KV caches are sized for the longest sequence, because full contexts in all slots would
        // need much memory.
        let room = longest.saturating_add(self.limits.max_new_tokens).min(self.context);
        let num_slots = prompts.len().clamp(1, SEQUENCES_AT_ONCE);
        let mut session = ModelSession::with_slots(self.target, room, num_slots, "target");
        let requests = prompts.iter_mut().map(|(prompt, draws)| Request {
            prompt,
            decoding: self.decoding,
            limits: &self.limits,
            rule: None,
            draws,
        });
        let responses = decode_many(&mut session, &mut NoDrafter, requests, &mut |nth, tokens| {
            observe(nth, tokens);
            self.watch.goes_on()
        })?;
        // An interrupt may have cut some responses short.
        if self.watch.is_interrupted() { Err(Interrupted.into()) } else { Ok(responses) }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use burn::tensor::Device;
    use draftsmith_theory::Sampling;

    use super::*;
    use draftsmith_recipe::workspace::Workspace;

    #[test]
    fn batching_does_not_change_a_response() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny/draft");
        let workspace = Workspace::new(&dir, &[], vec![Device::flex()]);
        let pair = workspace.target_alone().expect("it is committed");
        let sampling = Sampling { temperature: 1.0, top_p: 0.95, top_k: None, min_p: None };
        // More than one batch, with lengths that end at different times.
        let prompts: Vec<Vec<u32>> = (0..SEQUENCES_AT_ONCE as u32 + 5)
            .map(|nth| (0..3 + nth * 7 % 40).map(|at| 3 + (at * 31 + nth * 17) % 400).collect())
            .collect();
        let watch = draftsmith_recipe::watch::Silent;
        for decoding in [Decoding::GREEDY, Decoding::sampled(sampling)] {
            let responder = Responder {
                target: &pair.target,
                context: pair.text.context,
                decoding,
                limits: pair.text.limits(30),
                watch: &watch,
            };
            let draws = |nth: usize| SeededDraws::new(7, &[&nth.to_string()]);
            let mut all: Vec<(&[u32], SeededDraws)> = prompts
                .iter()
                .enumerate()
                .map(|(nth, prompt)| (prompt.as_slice(), draws(nth)))
                .collect();
            let mut drawn_from = vec![Vec::<f32>::new(); prompts.len()];
            let note = |nth: usize, tokens: RoundTokens<'_>| drawn_from[nth].extend(tokens.logits);
            let together = responder.respond(&mut all, note).expect("finite");
            assert_eq!(together.len(), prompts.len());
            for (nth, (prompt, together)) in prompts.iter().zip(&together).enumerate() {
                let mut one = [(prompt.as_slice(), draws(nth))];
                let single = responder.respond(&mut one, |_, _| ()).expect("finite").remove(0);
                assert_eq!(single.token_ids, together.token_ids, "{decoding:?}, prompt {nth}");
                assert_eq!(single.finish, together.finish);
                // The observed logits equal those of one forward over the whole text.
                let ids = [&prompt[..], &together.token_ids].concat();
                let mut session = ModelSession::new(&pair.target, pair.text.context, "target");
                let scored = session.score(&ids[..ids.len() - 1], prompt.len() - 1);
                let scored: Vec<f32> = scored.expect("finite").rows().flatten().copied().collect();
                assert!(drawn_from[nth] == scored, "{decoding:?}, prompt {nth}");
            }
            let lens = together.iter().map(|one| one.token_ids.len());
            assert!(lens.collect::<std::collections::BTreeSet<_>>().len() > 1, "lengths differ");
        }
    }
}
