//! Block drafters (DFlash, DSpark): all candidates of a round from one forward.
//!
//! The target's session keeps the hidden states that the drafter reads. A round begins with the
//! contexts of the positions that verification has added since the last round; the drafter's cache
//! holds nothing else. One forward then computes a block: the rows of all candidates that the round
//! may have, and their logits without the Markov head. This forward is counted for the first step.
//! Every step adds the Markov head's part for the token before its candidate. So a stop rule may end
//! the draft phase before any draw, which saves verified rows but no drafting.
//!
//! A row depends on the text and on its number in the block. Candidates influence it only by the
//! token before it. Trees and cascades can therefore ask for the row after any candidates, and a
//! stored block serves a whole round. How many rows are computed is decided before the forward, by
//! the length limit and the stop rule's bounds.
//!
//! The confidence head predicts the acceptance of a candidate before it is drawn, so a rule may end
//! the draft phase there by its prediction.

#[cfg(test)]
mod tests;

use draftsmith_model::{BlockDrafter, BlockStart, CausalLm, KvCache, Rows};
use draftsmith_theory::{DrafterId, HeadEstimate, HeadTiming};

use crate::acceptance::Acceptance;
use crate::drafter::{DraftRow, DraftStep, Drafter, ModelDrafter, StepDrafter};
use crate::error::DecodeError;
use crate::record::{RecordTask, Recorded};
use crate::registry::{AnsweringTarget, DrafterParts, Sizes};
use crate::session::{check_fits, check_logits, to_host};
use crate::target::{KeptStates, TargetLayers};

/// The drafter's name in error messages.
const ROLE: &str = "drafter";

/// A drafter that proposes all candidates of a round from one forward.
#[derive(Debug)]
pub struct BlockDraft<'m> {
    id: DrafterId,
    network: &'m BlockDrafter,
    target: &'m CausalLm,
    layers: &'m [usize],
    /// The keys and values of contexts.
    cache: KvCache,
    slots: Vec<BlockSlot>,
}

/// The drafter's state for one sequence.
#[derive(Debug, Default)]
struct BlockSlot {
    /// The block of the current round; `None` before its first step.
    block: Option<RunBlock>,
}

/// The rows of one block.
#[derive(Debug)]
struct RunBlock {
    /// The number of final tokens. The last is the anchor.
    num_standing: usize,
    normed: Rows,
    /// The logits without the Markov head's part.
    logits: Rows,
}

/// A row that a step asks for: its number in the block, and the token before its candidate.
#[derive(Debug, Clone, Copy)]
struct BlockRow {
    slot: usize,
    number: usize,
    token: u32,
}

impl<'m> BlockDraft<'m> {
    /// Creates a drafter for up to `num_slots` concurrent sequences of at most `capacity` tokens
    /// each. It reads the target's hidden states after each number of layers in `layers`.
    pub fn new(
        (target, network): (&'m CausalLm, &'m BlockDrafter),
        layers: &'m [usize],
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let cache = network.new_cache(capacity.min(network.context()), num_slots);
        let slots = std::iter::repeat_with(BlockSlot::default).take(num_slots).collect();
        Self { id: DrafterId::DRAFT, network, target, layers, cache, slots }
    }

    /// Returns the longest sequence that leaves room for a block, in tokens.
    fn room(&self) -> usize {
        self.cache.capacity() - self.network.block_size()
    }

    /// Reads the contexts of the positions whose target states have become available since the last
    /// round, in one forward.
    fn read_contexts(&mut self, target: &mut impl KeptStates, steps: &[&DraftStep<'_>]) {
        let contexts = steps.iter().filter_map(|step| {
            let (slot, from) = (step.slot, self.cache.len(step.slot, 0));
            let num_known = target.num_standing(slot) - 1;
            let states = (from < num_known)
                .then(|| target.kept_states(slot, step.tokens, from, self.layers))?;
            Some(self.network.contexts(&states).in_slot(slot))
        });
        let contexts: Vec<Rows> = contexts.collect();
        if !contexts.is_empty() {
            self.network.read_contexts(Rows::cat(contexts), &mut self.cache);
        }
    }

    /// Runs the blocks of rounds that begin, or that need more rows than their block has, in one
    /// forward. `num_rows` gives the number of rows that each step needs. Returns for each step
    /// whether a block was run.
    fn run_blocks(
        &mut self,
        target: &mut impl KeptStates,
        steps: &[DraftStep<'_>],
        num_rows: &[usize],
    ) -> Vec<bool> {
        let are_new = steps.iter().zip(num_rows).map(|(step, num_rows)| {
            let (num_standing, block) =
                (target.num_standing(step.slot), &self.slots[step.slot].block);
            let is_enough = |block: &RunBlock| {
                block.num_standing == num_standing && block.normed.num_rows() >= *num_rows
            };
            !block.as_ref().is_some_and(is_enough)
        });
        let are_new: Vec<bool> = are_new.collect();
        let new = steps.iter().zip(num_rows).zip(&are_new).filter(|(_, is_new)| **is_new);
        let new: Vec<(&DraftStep<'_>, usize)> =
            new.map(|((step, num_rows), _)| (step, *num_rows)).collect();
        if new.is_empty() {
            return are_new;
        }
        self.read_contexts(target, &new.iter().map(|(step, _)| *step).collect::<Vec<_>>());
        let blocks = new.iter().map(|(step, num_rows)| {
            let num_candidates = step.most.min(self.network.num_candidates()).max(*num_rows);
            let anchor = step.tokens[target.num_standing(step.slot) - 1];
            BlockStart { slot: step.slot, anchor, num_candidates }
        });
        let blocks: Vec<BlockStart> = blocks.collect();
        let normed = self.network.forward_blocks(self.target, &blocks, &mut self.cache);
        let logits = self.network.logits(&normed, self.target);
        let mut start = 0;
        for start_of_block in &blocks {
            let rows = start..start + self.network.num_rows_of(start_of_block);
            start = rows.end;
            let num_standing = target.num_standing(start_of_block.slot);
            let (normed, logits) = (normed.slice(rows.clone()), logits.slice(rows));
            self.slots[start_of_block.slot].block = Some(RunBlock { num_standing, normed, logits });
        }
        are_new
    }

    /// Returns the logits of rows after the tokens before them, and the confidence head's
    /// predictions if there is a head and `predicts` is true.
    fn finished(
        &self,
        rows: &[BlockRow],
        predicts: bool,
    ) -> Result<(Vec<f32>, Option<Vec<f32>>), DecodeError> {
        let select = |part: fn(&RunBlock) -> &Rows| {
            Rows::cat(rows.iter().map(|row| {
                let block = self.slots[row.slot].block.as_ref().expect("the round has a block");
                part(block).slice(row.number..row.number + 1)
            }))
        };
        let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
        let logits = self.network.after_tokens(select(|block| &block.logits), &tokens);
        if !predicts || !self.network.has_confidence() {
            let [logits] = to_host([logits], ROLE)?;
            return Ok((logits, None));
        }
        let confidence = self.network.confidence_logits(&select(|block| &block.normed), &tokens);
        let [logits, confidence] = to_host([logits, confidence.expect("it has a head")], ROLE)?;
        Ok((logits, Some(confidence)))
    }
}

impl<T: KeptStates> Drafter<T> for BlockDraft<'_> {
    fn begin(&mut self, _target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        check_fits(prompt, self.room(), ROLE)?;
        self.cache.truncate(slot, 0);
        self.slots[slot] = BlockSlot::default();
        Ok(())
    }

    fn by_steps(&mut self) -> Option<&mut dyn StepDrafter<T>> {
        Some(self)
    }

    /// Keeps a block while its anchor stays the last final token of the round: candidates that a
    /// cascade's reviewer accepts change no row.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        let num_kept = num_standing + path.len();
        self.cache.truncate(slot, num_kept);
        self.slots[slot].block.take_if(|block| block.num_standing > num_kept);
    }

    fn context(&self) -> usize {
        self.room()
    }
}

impl<T: KeptStates> StepDrafter<T> for BlockDraft<'_> {
    fn id(&self) -> DrafterId {
        self.id
    }

    fn drafts_by_round(&self) -> bool {
        true
    }

    fn max_candidates(&self) -> usize {
        self.network.num_candidates()
    }

    fn draft(
        &mut self,
        target: &mut T,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>, DecodeError> {
        let row_of = |(step, row): (&DraftStep<'_>, usize)| BlockRow {
            slot: step.slot,
            number: step.tokens_before(row).count() - target.num_standing(step.slot),
            token: step.tokens[step.at(row)],
        };
        let of_steps: Vec<Vec<BlockRow>> =
            steps.iter().map(|step| step.rows().map(row_of).collect()).collect();
        let num_rows = |rows: &Vec<BlockRow>| rows.iter().map(|row| row.number + 1).max();
        let num_rows: Vec<usize> =
            of_steps.iter().map(|rows| num_rows(rows).unwrap_or(1)).collect();
        let are_new = self.run_blocks(target, steps, &num_rows);
        let rows = of_steps.concat();
        let predicts = steps.iter().any(|step| step.needs.acceptance_prob);
        let (logits, confidence) = self.finished(&rows, predicts)?;
        let mut logits = logits.chunks_exact(logits.len() / rows.len());
        let mut confidence = confidence.into_iter().flatten();
        let mut all = Vec::with_capacity(rows.len());
        for (step, is_new) in steps.iter().zip(are_new) {
            let num_read = step.tokens.len();
            for (row, logits) in step.rows().zip(logits.by_ref()) {
                check_logits(logits, logits.len(), ROLE, num_read)?;
                let predicted = confidence.next();
                let predicted = predicted.map(|logit| Acceptance::acceptance_prob(logit, num_read));
                let predicted = predicted.transpose()?.map(HeadEstimate::OfDrawn);
                let drafted = DraftRow::new(row, logits.to_vec(), predicted);
                all.push(if is_new { drafted } else { drafted.without_forward() });
            }
        }
        Ok(all)
    }
}

/// A block drafter's network and the target layers whose hidden states it reads.
#[derive(Debug, Clone)]
pub struct BlockDraftParts {
    /// The network.
    pub network: BlockDrafter,
    /// The target's hidden states that the network reads, in its input order. Each is given by the
    /// number of target layers before it; 0 means the embeddings.
    pub layers: Vec<usize>,
}

impl BlockDraftParts {
    fn session<'m>(&'m self, sizes: Sizes<'m>) -> BlockDraft<'m> {
        let Sizes { target, capacity, num_slots } = sizes;
        BlockDraft::new((target, &self.network), &self.layers, capacity, num_slots)
    }
}

impl DrafterParts for BlockDraftParts {
    fn target_layers(&self) -> TargetLayers {
        TargetLayers::kept(&self.layers)
    }

    fn own_head(&self) -> Option<HeadTiming> {
        self.network.has_confidence().then_some(HeadTiming::BeforeDraw)
    }

    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        Box::new(BlockDraft { id, ..self.session(sizes) })
    }

    fn record_elsewhere(
        &self,
        mut target: AnsweringTarget<'_, '_>,
        task: RecordTask<'_, '_>,
    ) -> Recorded {
        let sizes = target.sizes().filter(|_| target.answers.has_states())?;
        task.along(&mut target.answers, &mut self.session(sizes))
    }
}
