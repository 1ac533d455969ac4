//! Drafters that read the target's hidden states, such as EAGLE-3 (Li et al. 2025). The target's
//! session keeps those states for them.
//!
//! Position q of the drafter's KV cache combines the token at q + 1 with a feature at q. The
//! feature comes from the target's hidden states, or from the drafter's own output where the target
//! has not run yet. A round begins with one forward over all positions that verification has added
//! since the last round. Each drafted token is then read together with the output of its parent's
//! position. The next round drops every position that was computed from the drafter's own outputs,
//! so each round equals a fresh pass over the target's states. The drafter asks the target's
//! session how many tokens are final, because a composite drafter may pass it other drafters'
//! candidates as part of the sequence.

#[cfg(test)]
mod tests;

use draftsmith_model::{
    AcceptanceHead, CausalLm, DrafterModel, KvCache, Rows, SessionFaults, StepNetwork,
};
use draftsmith_theory::DrafterId;

use crate::acceptance::Acceptance;
use crate::drafter::{DraftRow, DraftStep, Drafter, ModelDrafter, StepDrafter};
use crate::error::Result;
use crate::record::{RecordTask, Recorded};
use crate::registry::{AnsweringTarget, DrafterParts, Sizes};
use crate::session::check_fits;
use crate::target::{KeptStates, TargetLayers};

/// The drafter's name in error messages.
const ROLE: &str = "drafter";

/// A drafter that reads the target's hidden states, such as EAGLE-3.
#[derive(Debug)]
pub struct StateDraft<'m, N> {
    id: DrafterId,
    network: &'m N,
    target: &'m CausalLm,
    layers: &'m [usize],
    cache: KvCache,
    slots: Vec<Slot>,
    /// The target as a drafter model; the acceptance head reads its token embeddings.
    read_by_head: DrafterModel,
    acceptance: Acceptance<'m>,
}

/// The drafter's state for one sequence.
#[derive(Debug, Default)]
struct Slot {
    /// The number of positions that were computed from the target's states. During a draft phase
    /// these are the positions of all final tokens except the last.
    num_known: usize,
    /// The output at the last of those positions, followed by the output at each drafted token, in
    /// the order of the nodes.
    outputs: Vec<Rows>,
}

impl Slot {
    /// Returns the output at a node's parent, which is the node's input feature; `None` if that
    /// output has not been computed yet.
    fn parent_of(&self, step: &DraftStep<'_>, node: usize) -> Option<&Rows> {
        let parent = match step.parents.get(node) {
            Some(parent) => parent.map_or(0, |parent| parent + 1),
            // In a chain, node n follows node n − 1, whose output is at index n.
            None => node,
        };
        self.outputs.get(parent)
    }
}

/// New cache positions of one sequence: the token after each position, and its feature.
struct NewPositions<'a> {
    slot: usize,
    tokens: &'a [u32],
    features: Rows,
}

impl<'m, N: StepNetwork> StateDraft<'m, N> {
    /// Creates a drafter for up to `num_slots` concurrent sequences of at most `capacity` tokens
    /// each. It reads the target's hidden states after each number of layers in `layers`. An
    /// acceptance head requires that the drafter has the target's hidden size.
    pub fn new(
        (target, network): (&'m CausalLm, &'m N),
        layers: &'m [usize],
        head: Option<&'m AcceptanceHead>,
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let cache = network.new_cache(capacity.min(network.context()), num_slots);
        let slots = std::iter::repeat_with(Slot::default).take(num_slots).collect();
        let read_by_head = DrafterModel::from(target);
        let acceptance = Acceptance::new(head, num_slots);
        let id = DrafterId::DRAFT;
        Self { id, network, target, layers, cache, slots, read_by_head, acceptance }
    }

    /// Runs the network over new positions in one forward, and returns each sequence's slot and
    /// outputs.
    fn forward(&mut self, new: Vec<NewPositions<'_>>) -> Vec<(usize, Rows)> {
        if new.is_empty() {
            return Vec::new();
        }
        let runs: Vec<(usize, &[u32])> = new.iter().map(|one| (one.slot, one.tokens)).collect();
        let embedded = self.network.embed(self.target, &runs);
        let features = Rows::cat(new.into_iter().map(|one| one.features.in_slot(one.slot)));
        let outputs = self.network.forward_cached(embedded, features, &mut self.cache);
        outputs.by_run().collect()
    }

    /// Runs the network over the positions whose target states have become available since the last
    /// round.
    fn read_known(&mut self, target: &mut impl KeptStates, steps: &[DraftStep<'_>]) {
        let mut new = Vec::new();
        for step in steps {
            let num_standing = target.num_standing(step.slot);
            let slot = &mut self.slots[step.slot];
            if slot.num_known + 1 == num_standing && !slot.outputs.is_empty() {
                continue;
            }
            // The last position is always computed again, because its output is needed.
            let from = slot.num_known.min(num_standing.saturating_sub(2));
            self.cache.truncate(step.slot, from);
            (slot.num_known, slot.outputs) = (num_standing - 1, Vec::new());
            if num_standing == 1 {
                // There is no position before the first token.
                slot.outputs.push(self.network.no_output(self.target, step.slot));
                continue;
            }
            let states = target.kept_states(step.slot, step.tokens, from, self.layers);
            let features = self.network.features(self.target, &states);
            let next = usize::from(!self.network.faults().reads_token_behind);
            let tokens = &step.tokens[from + next..num_standing - 1 + next];
            new.push(NewPositions { slot: step.slot, tokens, features });
        }
        for (slot, outputs) in self.forward(new) {
            self.slots[slot].outputs.push(outputs.last(1));
        }
    }

    /// Runs the network over the drafted tokens whose parents' outputs are known, in one forward.
    /// Returns whether there were any such tokens.
    fn read_drafted(&mut self, steps: &[DraftStep<'_>]) -> bool {
        let mut new = Vec::new();
        for step in steps {
            let slot = &self.slots[step.slot];
            let first = slot.outputs.len() - 1;
            let num_standing = slot.num_known + 1;
            let nodes = first..step.tokens.len() - num_standing;
            let features = nodes.map_while(|node| slot.parent_of(step, node).cloned());
            let features: Vec<Rows> = features.collect();
            if features.is_empty() {
                continue;
            }
            let parents = step.parents.get(..first + features.len()).unwrap_or_default();
            self.cache.branch(step.slot, num_standing - 1, parents);
            let SessionFaults { position_shift, reads_token_behind, .. } = self.network.faults();
            if position_shift != 0 {
                let num_nodes = first + features.len();
                self.cache.shift(step.slot, num_standing - 1, num_nodes, position_shift);
            }
            let num_before = num_standing + first - usize::from(reads_token_behind);
            let tokens = &step.tokens[num_before..][..features.len()];
            new.push(NewPositions { slot: step.slot, tokens, features: Rows::cat(features) });
        }
        let is_any = !new.is_empty();
        for (slot, outputs) in self.forward(new) {
            let each = (0..outputs.num_rows()).map(|row| outputs.slice(row..row + 1));
            self.slots[slot].outputs.extend(each);
        }
        is_any
    }
}

impl<N: StepNetwork, T: KeptStates> Drafter<T> for StateDraft<'_, N> {
    fn begin(&mut self, _target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        check_fits(prompt, self.cache.capacity(), ROLE)?;
        self.cache.truncate(slot, 0);
        self.slots[slot] = Slot::default();
        Ok(())
    }

    fn by_steps(&mut self) -> Option<&mut dyn StepDrafter<T>> {
        Some(self)
    }

    /// Keeps the outputs at the accepted nodes of a chain, because the same round may continue from
    /// them. The next round replaces them by outputs computed from the target's states.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        let is_chain = path.iter().enumerate().all(|(at, node)| at == *node);
        let num_kept = num_standing + if is_chain { path.len() } else { 0 };
        let known = &mut self.slots[slot];
        known.outputs.truncate(num_kept.saturating_sub(known.num_known));
        known.num_known = known.num_known.min(num_kept.saturating_sub(1));
        self.cache.truncate(slot, num_kept.saturating_sub(1));
        self.acceptance.roll_back(slot, num_kept);
    }

    fn context(&self) -> usize {
        self.cache.capacity()
    }
}

impl<N: StepNetwork, T: KeptStates> StepDrafter<T> for StateDraft<'_, N> {
    fn id(&self) -> DrafterId {
        self.id
    }

    fn drafts_by_round(&self) -> bool {
        true
    }

    fn draft(&mut self, target: &mut T, steps: &[DraftStep<'_>]) -> Result<Vec<DraftRow>> {
        self.read_known(target, steps);
        while self.read_drafted(steps) {}
        let last = steps.iter().flat_map(|step| {
            let Slot { num_known, outputs } = &self.slots[step.slot];
            let end = step.tokens.len() - num_known;
            outputs[end - step.num_rows..end].iter().cloned()
        });
        let normed = self.network.normed(Rows::cat(last));
        let logits = self.network.logits(&normed, self.target);
        let read = self.acceptance.read(&self.read_by_head, normed, logits, steps, ROLE)?;
        let rows = steps.iter().flat_map(DraftStep::rows).zip(read);
        Ok(rows.map(|(row, (logits, predicted))| DraftRow::new(row, logits, predicted)).collect())
    }

    /// # Panics
    /// If the last draft step did not request the head's prediction.
    fn predict_acceptance(
        &mut self,
        at: (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>> {
        self.acceptance.predict(&self.read_by_head, at, logits, candidate, ROLE)
    }
}

/// A drafter network and the target layers whose hidden states it reads.
#[derive(Debug, Clone)]
pub struct StateDraftParts<N> {
    /// The drafter network.
    pub network: N,
    /// The target's hidden states that the network reads, in its input order. Each is given by the
    /// number of target layers before it; 0 means the embeddings.
    pub layers: Vec<usize>,
    /// The drafter's acceptance head, if any.
    pub head: Option<AcceptanceHead>,
}

impl<N: StepNetwork> StateDraftParts<N> {
    fn session<'m>(&'m self, sizes: Sizes<'m>) -> StateDraft<'m, N> {
        let Sizes { target, capacity, num_slots } = sizes;
        let (models, head) = ((target, &self.network), self.head.as_ref());
        StateDraft::new(models, &self.layers, head, capacity, num_slots)
    }
}

impl<N: StepNetwork + Send> DrafterParts for StateDraftParts<N> {
    fn target_layers(&self) -> TargetLayers {
        TargetLayers::kept(&self.layers)
    }

    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        Box::new(StateDraft { id, ..self.session(sizes) })
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
