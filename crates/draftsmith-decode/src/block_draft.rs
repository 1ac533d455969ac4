//! Block drafters (DFlash, DSpark): all candidates of a round from one forward.
//!
//! The target's session keeps the hidden states that the drafter reads. A round begins with the
//! contexts of the positions that verification has added since the last round; the drafter's cache
//! holds nothing else. One forward then computes a block: the rows of all candidates that the round
//! may have, and their logits without the Markov head. Every step adds the Markov head's part for
//! the token before its candidate.
//!
//! The confidence head predicts the acceptance of a candidate before it is drawn, so a rule may end
//! the draft phase there by its prediction.

#[cfg(test)]
mod tests;

use draftsmith_model::{BlockDrafter, BlockStart, CachedNetwork, KvCache, Rows};
use draftsmith_theory::HeadTiming;

use crate::drafter::DraftStep;
use crate::round_draft::{
    ComputedRows, ROLE, RoundDraft, RoundDraftParts, RoundNetwork, RoundRow, RoundSource,
};
use crate::session::to_host;

/// A drafter that proposes the candidates of a block.
pub type BlockDraft<'m> = RoundDraft<'m, BlockDrafter>;

/// A block drafter's network and the target layers whose hidden states it reads.
pub type BlockDraftParts = RoundDraftParts<BlockDrafter>;

/// The rows of one block.
#[derive(Debug)]
pub struct RunBlock {
    normed: Rows,
    /// The logits without the Markov head's part.
    logits: Rows,
}

/// Reads the contexts of the positions whose target states have become available since the last
/// round, in one forward.
fn read_contexts(
    network: &BlockDrafter,
    source: &mut RoundSource<'_>,
    cache: &mut KvCache,
    steps: &[(&DraftStep<'_>, usize)],
) {
    let contexts = steps.iter().filter_map(|(step, _)| {
        let (slot, from) = (step.slot, cache.len(step.slot, 0));
        let num_known = source.states.num_standing(slot) - 1;
        let states = (from < num_known)
            .then(|| source.states.kept_states(slot, step.tokens, from, source.layers))?;
        Some(network.contexts(&states).in_slot(slot))
    });
    let contexts: Vec<Rows> = contexts.collect();
    if !contexts.is_empty() {
        network.read_contexts(Rows::cat(contexts), cache);
    }
}

impl RoundNetwork for BlockDrafter {
    /// The keys and values of contexts.
    type Memory = KvCache;
    type Round = RunBlock;

    fn num_candidates(&self) -> usize {
        self.num_candidates()
    }

    fn own_head(&self) -> Option<HeadTiming> {
        self.has_confidence().then_some(HeadTiming::BeforeDraw)
    }

    /// The longest sequence leaves room for a block.
    fn memory(&self, capacity: usize, num_slots: usize) -> (KvCache, usize) {
        let cache = self.new_cache(capacity.min(self.context()), num_slots);
        let room = cache.capacity() - self.block_size();
        (cache, room)
    }

    fn truncate(cache: &mut KvCache, slot: usize, len: usize) {
        cache.truncate(slot, len);
    }

    fn run(
        &self,
        mut source: RoundSource<'_>,
        cache: &mut KvCache,
        steps: &[(&DraftStep<'_>, usize)],
    ) -> Vec<RunBlock> {
        read_contexts(self, &mut source, cache, steps);
        let blocks = steps.iter().map(|(step, num_rows)| {
            let num_candidates = step.most.min(self.num_candidates()).max(*num_rows);
            let anchor = step.tokens[source.states.num_standing(step.slot) - 1];
            BlockStart { slot: step.slot, anchor, num_candidates }
        });
        let blocks: Vec<BlockStart> = blocks.collect();
        let normed = self.forward_blocks(source.target, &blocks, cache);
        let logits = self.logits(&normed, source.target);
        let of_blocks = normed.by_run().zip(logits.by_run());
        of_blocks.map(|((_, normed), (_, logits))| RunBlock { normed, logits }).collect()
    }

    fn num_rows(block: &RunBlock) -> usize {
        block.normed.num_rows()
    }

    fn rows(&self, rows: &[RoundRow<'_, RunBlock>], predicts: bool) -> ComputedRows {
        let select = |part: fn(&RunBlock) -> &Rows| {
            Rows::cat(rows.iter().map(|row| part(row.round).slice(row.number..row.number + 1)))
        };
        let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
        let logits = self.after_tokens(select(|block| &block.logits), &tokens);
        if !predicts || !self.has_confidence() {
            let [logits] = to_host([logits], ROLE)?;
            return Ok((logits, None));
        }
        let confidence = self.confidence_logits(&select(|block| &block.normed), &tokens);
        let [logits, confidence] = to_host([logits, confidence.expect("it has a head")], ROLE)?;
        Ok((logits, Some(confidence)))
    }
}
