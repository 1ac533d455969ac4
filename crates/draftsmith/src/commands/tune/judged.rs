//! What tuned cascades and trees are judged by and against, and what replay then promises of them.

use draftsmith_model::WeightDtype;
use draftsmith_theory::{Counts, Recordings, Spending, seconds_per_token};

use crate::costs::Costs;
use crate::results::CostSource;
use crate::statistics::shown_interval;
use crate::sweep::per_token;
use crate::tuning::{PromisedBy, TunedPromise};

/// What something is judged by and against.
pub(super) struct Judged<'a> {
    pub(super) recordings: &'a Recordings,
    pub(super) costs: &'a Costs,
    pub(super) cost_source: CostSource,
    pub(super) dtype: WeightDtype,
    pub(super) seed: u64,
    /// The drafter's best fixed length, and what it takes.
    pub(super) fixed: (usize, Vec<Spending>),
}

impl Judged<'_> {
    /// Modelled speed over the best fixed length, minus 1, over some responses.
    fn gain_of(&self, spent: &[Spending], some: &[usize]) -> f64 {
        per_token(&self.fixed.1, some) / per_token(spent, some) - 1.0
    }

    /// The same over all.
    pub(super) fn gain(&self, spent: &[Spending]) -> f64 {
        let all: Vec<usize> = (0..spent.len()).collect();
        self.gain_of(spent, &all)
    }

    /// The target's own modelled seconds a token.
    pub(super) fn plain(&self) -> f64 {
        seconds_per_token(&self.recordings.plain(&self.costs.rounds))
    }

    /// What replay promises of the best of so many, which takes this.
    pub(super) fn promise(&self, spent: &[Spending], num_tried: usize) -> TunedPromise {
        let num_prompts = self.recordings.responses.len();
        let counts: Counts = spent.iter().map(|spent| spent.counts).sum();
        let gain = shown_interval(num_prompts, self.seed, |some| self.gain_of(spent, some));
        TunedPromise {
            promised_by: PromisedBy::Replay,
            num_tried,
            num_prompts,
            cost_source: self.cost_source,
            speedup: self.plain() / seconds_per_token(spent),
            verification_rate: counts.verification_rate(),
            discard_rate: counts.discard_rate(),
            best_fixed_length: self.fixed.0,
            expected_gain: gain.into(),
        }
    }
}
