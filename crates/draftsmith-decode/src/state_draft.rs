//! Drafters that read their target's hidden states, such as EAGLE-3 (Li et al. 2025), beside the target's session,
//! which keeps those states.
//!
//! Position q of the drafter's cache belongs to the token at q + 1 and what is known at q: the target's states,
//! or the drafter's own output where the target has not been. A round begins with one forward over all positions
//! that verification has added since; after it, each drafted token is read with the output of the position before.
//! What was computed from own outputs is dropped in the next round, so that every round equals a fresh pass over
//! the target's states. The drafter asks the target's session which tokens stand, because a composite drafter may
//! pass it candidates of other drafters as if they were text.

#[cfg(test)]
mod tests;

use draftsmith_model::{AcceptanceHead, CausalLm, DrafterModel, KvCache, Rows, StepNetwork};
use draftsmith_theory::DrafterId;

use crate::acceptance::Acceptance;
use crate::chain::propose_chain;
use crate::drafter::{DraftRound, DraftRow, DraftStep, Drafter, Member, ModelDrafter, StepDrafter};
use crate::error::DecodeError;
use crate::registry::{DrafterParts, Sizes};
use crate::session::{ModelSession, check_fits};
use crate::target::TargetLayers;

/// Its name in errors.
const ROLE: &str = "drafter";

/// A drafter that reads its target's hidden states.
#[derive(Debug)]
pub struct StateDraft<'m, N> {
    id: DrafterId,
    network: &'m N,
    target: &'m CausalLm,
    layers: &'m [usize],
    cache: KvCache,
    slots: Vec<Slot>,
    /// The target, whose embeddings the head reads.
    read_by_head: DrafterModel,
    acceptance: Acceptance<'m>,
}

/// What is known of one sequence.
#[derive(Debug, Default)]
struct Slot {
    /// The number of positions that were read with the target's states: while drafting, those of all tokens that
    /// stand but the last.
    num_known: usize,
    /// The output at the last of them, then at each token drafted since, in the order of nodes.
    outputs: Vec<Rows>,
}

impl Slot {
    /// Returns the output that a node's position continues from; `None` if it has not been computed.
    fn parent_of(&self, step: &DraftStep<'_>, node: usize) -> Option<&Rows> {
        let parent = match step.parents.get(node) {
            Some(parent) => parent.map_or(0, |parent| parent + 1),
            // A chain.
            None => node,
        };
        self.outputs.get(parent)
    }
}

/// New positions of one sequence: the tokens after them, and g or outputs.
struct NewPositions<'a> {
    slot: usize,
    tokens: &'a [u32],
    features: Rows,
}

impl<'m, N: StepNetwork> StateDraft<'m, N> {
    /// Creates a drafter for `num_slots` sequences of up to `capacity` tokens side by side. It reads the target's
    /// states after each number of layers in `layers`. A head needs a drafter of the target's width.
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

    /// Renames the drafter, whose name is [`DrafterId::DRAFT`] until then.
    #[must_use]
    pub fn named(mut self, id: DrafterId) -> Self {
        self.id = id;
        self
    }

    /// Reads positions in one forward, and returns each sequence's slot and outputs.
    fn forward(&mut self, new: Vec<NewPositions<'_>>) -> Vec<(usize, Rows)> {
        if new.is_empty() {
            return Vec::new();
        }
        let runs: Vec<(usize, &[u32])> = new.iter().map(|one| (one.slot, one.tokens)).collect();
        let embedded = self.network.embed(self.target, &runs);
        let features = Rows::cat(new.into_iter().map(|one| one.features.in_slot(one.slot)));
        let outputs = self.network.forward_cached(embedded, features, &mut self.cache);
        let mut end = 0;
        let of_run = |(slot, tokens): (usize, &[u32])| {
            let start = end;
            end += tokens.len();
            (slot, outputs.slice(start..end))
        };
        runs.into_iter().map(of_run).collect()
    }

    /// Reads the positions whose states the target has computed since the last round.
    fn read_known(&mut self, target: &mut ModelSession<'m>, steps: &[DraftStep<'_>]) {
        let mut new = Vec::new();
        for step in steps {
            let num_standing = target.num_standing(step.slot);
            let slot = &mut self.slots[step.slot];
            if slot.num_known + 1 == num_standing && !slot.outputs.is_empty() {
                continue;
            }
            // At least the last position is read again, for its output.
            let from = slot.num_known.min(num_standing.saturating_sub(2));
            self.cache.truncate(step.slot, from);
            (slot.num_known, slot.outputs) = (num_standing - 1, Vec::new());
            if num_standing == 1 {
                // No position comes before the first token.
                slot.outputs.push(self.network.no_output(self.target, step.slot));
                continue;
            }
            let states = target.kept_states(step.slot, step.tokens, from, self.layers);
            let features = self.network.features(&states);
            new.push(NewPositions {
                slot: step.slot,
                tokens: &step.tokens[from + 1..num_standing],
                features,
            });
        }
        for (slot, outputs) in self.forward(new) {
            self.slots[slot].outputs.push(outputs.last(1));
        }
    }

    /// Reads the drafted tokens whose parents' outputs are known, in one forward. Returns whether there were
    /// any.
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
            let tokens = &step.tokens[num_standing + first..][..features.len()];
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

impl<'m, N: StepNetwork> Drafter<ModelSession<'m>> for StateDraft<'m, N> {
    fn begin(
        &mut self,
        _target: &mut ModelSession<'m>,
        slot: usize,
        prompt: &[u32],
    ) -> Result<(), DecodeError> {
        check_fits(prompt, self.cache.capacity(), ROLE)?;
        self.cache.truncate(slot, 0);
        self.slots[slot] = Slot::default();
        Ok(())
    }

    fn propose(
        &mut self,
        target: &mut ModelSession<'m>,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        propose_chain(self, target, rounds)
    }

    /// Keeps the outputs at the nodes on a chain's path, since the round may go on from there. The next round
    /// reads the target's states in their place.
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

impl<'m, N: StepNetwork> StepDrafter<ModelSession<'m>> for StateDraft<'m, N> {
    fn id(&self) -> DrafterId {
        self.id
    }

    fn drafts_by_round(&self) -> bool {
        true
    }

    fn draft(
        &mut self,
        target: &mut ModelSession<'m>,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>, DecodeError> {
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
    /// If the last draft step did not ask for the head's prediction.
    fn predict_acceptance(
        &mut self,
        at: (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        self.acceptance.predict(&self.read_by_head, at, logits, candidate, ROLE)
    }
}

impl<'m, N: StepNetwork> ModelDrafter<'m> for StateDraft<'m, N> {
    fn by_steps(&mut self) -> Option<&mut (dyn StepDrafter<ModelSession<'m>> + 'm)> {
        Some(self)
    }

    fn into_member(self: Box<Self>) -> Member<'m> {
        Member::Steps(self)
    }
}

/// A network and the target's layers that it reads.
#[derive(Debug, Clone)]
pub struct StateDraftParts<N> {
    /// The network.
    pub network: N,
    /// The numbers of the target's layers before the states that it reads, in the network's order.
    pub layers: Vec<usize>,
    /// Its head.
    pub head: Option<AcceptanceHead>,
}

impl<N: StepNetwork + Send> DrafterParts for StateDraftParts<N> {
    fn target_layers(&self) -> TargetLayers {
        let kept = TargetLayers { exit: None, kept: self.layers.clone() };
        TargetLayers::default().and(kept)
    }

    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let Sizes { target, capacity, num_slots } = sizes;
        let models = (target, &self.network);
        let head = self.head.as_ref();
        Box::new(StateDraft::new(models, &self.layers, head, capacity, num_slots).named(id))
    }
}
