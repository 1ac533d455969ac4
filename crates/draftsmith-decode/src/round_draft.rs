//! Drafters that compute all candidates of a round in one forward, such as block drafters.
//!
//! A round begins with a forward that computes the rows of all candidates that the round may have.
//! This forward is counted for the first step. A stop rule may end the draft phase before any draw,
//! which saves verified rows but no drafting.
//!
//! A row depends on the text and on its number in the round. Candidates influence it only by the
//! token before it. Trees and cascades can therefore ask for the row after any candidates, and what
//! one forward computed serves a whole round. How many rows are computed is decided before the
//! forward, by the length limit and the stop rule's bounds.

use std::fmt::Debug;

use draftsmith_model::CausalLm;
use draftsmith_theory::{DrafterId, HeadEstimate, HeadTiming};

use crate::acceptance::Acceptance;
use crate::drafter::{DraftRow, DraftStep, Drafter, ModelDrafter, StepDrafter};
use crate::error::Result;
use crate::record::{RecordTask, Recorded};
use crate::registry::{AnsweringTarget, DrafterParts, Sizes};
use crate::session::{check_fits, check_logits};
use crate::target::{KeptStates, TargetLayers};

/// The drafter's name in error messages.
pub(crate) const ROLE: &str = "drafter";

/// A network that computes all candidates of a round in one forward.
pub trait RoundNetwork: Debug + Send + Sync {
    /// What the drafter keeps of its sequences.
    type Memory: Debug + Send;
    /// What a forward computed for a round.
    type Round: Debug + Send;

    /// Returns the greatest number of candidates in a round.
    fn num_candidates(&self) -> usize;

    /// Returns when an acceptance head predicts that is a part of the network; `None` without one.
    fn own_head(&self) -> Option<HeadTiming> {
        None
    }

    /// Creates the memory for up to `num_slots` sequences of at most `capacity` tokens each. Returns
    /// it with the longest sequence that it has room for, in tokens.
    fn memory(&self, capacity: usize, num_slots: usize) -> (Self::Memory, usize);

    /// Forgets the tokens of a slot from position `len` on.
    fn truncate(memory: &mut Self::Memory, slot: usize, len: usize) {
        let _ = (memory, slot, len);
    }

    /// Runs the rounds of some steps in one forward. Each step comes with the number of rows that it
    /// needs at least.
    fn run(
        &self,
        source: RoundSource<'_>,
        memory: &mut Self::Memory,
        steps: &[(&DraftStep<'_>, usize)],
    ) -> Vec<Self::Round>;

    /// Counts the rows of a round.
    fn num_rows(round: &Self::Round) -> usize;

    /// Returns the logits of some rows over the target's vocabulary, one row after another. If
    /// `predicts` is true and there is an acceptance head, also returns its logit for each row.
    ///
    /// # Errors
    /// If the device fails.
    fn rows(&self, rows: &[RoundRow<'_, Self::Round>], predicts: bool) -> ComputedRows;
}

/// The logits of rows, and those of an acceptance head, if any.
pub type ComputedRows = Result<(Vec<f32>, Option<Vec<f32>>)>;

/// The target whose hidden states a round begins with.
pub struct RoundSource<'a> {
    /// The target, or its ends.
    pub target: &'a CausalLm,
    /// The hidden states that the network reads, each given by the number of target layers before
    /// it.
    pub layers: &'a [usize],
    /// The session that keeps these states.
    pub states: &'a mut dyn KeptStates,
}

/// A row of a round: what a forward computed, the row's number, and the token before its candidate.
#[derive(Debug, Clone, Copy)]
pub struct RoundRow<'a, R> {
    /// What the forward of the round computed.
    pub round: &'a R,
    /// The number of the row.
    pub number: usize,
    /// The token before the row's candidate.
    pub token: u32,
}

/// A drafter that proposes all candidates of a round from one forward.
#[derive(Debug)]
pub struct RoundDraft<'m, N: RoundNetwork> {
    id: DrafterId,
    network: &'m N,
    target: &'m CausalLm,
    layers: &'m [usize],
    memory: N::Memory,
    /// The longest sequence, in tokens.
    room: usize,
    /// The current round of each sequence, with its number of final tokens; `None` before its first
    /// step.
    pub(crate) slots: Vec<Option<(usize, N::Round)>>,
}

impl<'m, N: RoundNetwork> RoundDraft<'m, N> {
    /// Creates a drafter for up to `num_slots` concurrent sequences of at most `capacity` tokens
    /// each. It reads the target's hidden states after each number of layers in `layers`.
    pub fn new(
        (target, network): (&'m CausalLm, &'m N),
        layers: &'m [usize],
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let (memory, room) = network.memory(capacity, num_slots);
        let slots = std::iter::repeat_with(|| None).take(num_slots).collect();
        Self { id: DrafterId::DRAFT, network, target, layers, memory, room, slots }
    }

    /// Runs the rounds that begin, or that need more rows than they have, in one forward. `num_rows`
    /// gives the number of rows that each step needs. Returns for each step whether its round was
    /// run.
    fn run(
        &mut self,
        states: &mut impl KeptStates,
        steps: &[DraftStep<'_>],
        num_rows: &[usize],
    ) -> Vec<bool> {
        let are_new = steps.iter().zip(num_rows).map(|(step, num_rows)| {
            let num_standing = states.num_standing(step.slot);
            let is_enough = |(standing, round): &(usize, N::Round)| {
                *standing == num_standing && N::num_rows(round) >= *num_rows
            };
            !self.slots[step.slot].as_ref().is_some_and(is_enough)
        });
        let are_new: Vec<bool> = are_new.collect();
        let new = steps.iter().zip(num_rows).zip(&are_new).filter(|(_, is_new)| **is_new);
        let new: Vec<(&DraftStep<'_>, usize)> =
            new.map(|((step, num_rows), _)| (step, *num_rows)).collect();
        if !new.is_empty() {
            let source = RoundSource { target: self.target, layers: self.layers, states };
            let rounds = self.network.run(source, &mut self.memory, &new);
            for ((step, _), round) in new.iter().zip(rounds) {
                self.slots[step.slot] = Some((states.num_standing(step.slot), round));
            }
        }
        are_new
    }
}

impl<N: RoundNetwork, T: KeptStates> Drafter<T> for RoundDraft<'_, N> {
    fn begin(&mut self, _target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        check_fits(prompt, self.room, ROLE)?;
        N::truncate(&mut self.memory, slot, 0);
        self.slots[slot] = None;
        Ok(())
    }

    fn by_steps(&mut self) -> Option<&mut dyn StepDrafter<T>> {
        Some(self)
    }

    /// Keeps a round while its last final token stays: candidates that a cascade's reviewer accepts
    /// change no row.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        let num_kept = num_standing + path.len();
        N::truncate(&mut self.memory, slot, num_kept);
        self.slots[slot].take_if(|(num_standing, _)| *num_standing > num_kept);
    }

    fn context(&self) -> usize {
        self.room
    }
}

impl<N: RoundNetwork, T: KeptStates> StepDrafter<T> for RoundDraft<'_, N> {
    fn id(&self) -> DrafterId {
        self.id
    }

    fn drafts_by_round(&self) -> bool {
        true
    }

    fn max_candidates(&self) -> usize {
        self.network.num_candidates()
    }

    fn draft(&mut self, target: &mut T, steps: &[DraftStep<'_>]) -> Result<Vec<DraftRow>> {
        let number = |step: &DraftStep<'_>, row: usize| {
            step.tokens_before(row).count() - target.num_standing(step.slot)
        };
        let numbers: Vec<Vec<usize>> = steps
            .iter()
            .map(|step| step.rows().map(|(_, row)| number(step, row)).collect())
            .collect();
        let num_rows = numbers.iter().map(|numbers| numbers.iter().max().map_or(1, |it| it + 1));
        let are_new = self.run(target, steps, &num_rows.collect::<Vec<_>>());
        let rows = steps.iter().flat_map(DraftStep::rows).zip(numbers.concat());
        let rows = rows.map(|((step, row), number)| {
            let (_, round) = self.slots[step.slot].as_ref().expect("the round was run");
            RoundRow { round, number, token: step.tokens[step.at(row)] }
        });
        let rows: Vec<RoundRow<'_, N::Round>> = rows.collect();
        let predicts = steps.iter().any(|step| step.needs.acceptance_prob);
        let (logits, confidence) = self.network.rows(&rows, predicts)?;
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

/// A network that computes whole rounds, and the target layers whose hidden states it reads.
#[derive(Debug, Clone)]
pub struct RoundDraftParts<N> {
    /// The network.
    pub network: N,
    /// The target's hidden states that the network reads, in its input order. Each is given by the
    /// number of target layers before it; 0 means the embeddings.
    pub layers: Vec<usize>,
}

impl<N: RoundNetwork> RoundDraftParts<N> {
    fn session<'m>(&'m self, sizes: Sizes<'m>) -> RoundDraft<'m, N> {
        let Sizes { target, capacity, num_slots } = sizes;
        RoundDraft::new((target, &self.network), &self.layers, capacity, num_slots)
    }
}

impl<N: RoundNetwork> DrafterParts for RoundDraftParts<N> {
    fn target_layers(&self) -> TargetLayers {
        TargetLayers::kept(&self.layers)
    }

    fn own_head(&self) -> Option<HeadTiming> {
        self.network.own_head()
    }

    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        Box::new(RoundDraft { id, ..self.session(sizes) })
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
