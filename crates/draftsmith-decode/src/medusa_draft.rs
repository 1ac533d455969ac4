//! Medusa's heads: all candidates of a round from one row, the target's last state at the last token
//! but one.
//!
//! No candidate changes a row, so siblings in a tree have the same children. Candidates after those
//! of all heads, for which a cascade may ask, are drawn from the last head.

#[cfg(test)]
mod tests;

use draftsmith_model::{Medusa, Rows};

use crate::drafter::DraftStep;
use crate::round_draft::{
    ComputedRows, ROLE, RoundDraftParts, RoundNetwork, RoundRow, RoundSource,
};
use crate::session::to_host;

/// Medusa's heads and the number of the target's layers, whose last state they read.
pub type MedusaDraftParts = RoundDraftParts<Medusa>;

impl RoundNetwork for Medusa {
    /// Heads keep nothing of their sequences.
    type Memory = ();
    /// The logits of each candidate.
    type Round = Vec<Rows>;

    fn num_candidates(&self) -> usize {
        self.num_heads()
    }

    fn memory(&self, capacity: usize, _num_slots: usize) -> ((), usize) {
        ((), capacity)
    }

    fn run(
        &self,
        source: RoundSource<'_>,
        _memory: &mut (),
        steps: &[(&DraftStep<'_>, usize)],
    ) -> Vec<Vec<Rows>> {
        let RoundSource { target, layers, states } = source;
        let states = steps.iter().map(|(DraftStep { slot, tokens, .. }, _)| {
            match states.num_standing(*slot).checked_sub(2) {
                Some(at) => states.kept_states(*slot, tokens, at, layers).remove(0).in_slot(*slot),
                // No state comes before the first token. Its embedding takes the place of one.
                None => target.embed_runs(&[(*slot, &tokens[..1])]),
            }
        });
        let states = Rows::cat(states.collect::<Vec<_>>());
        let num_rows = |(step, num_rows): &(&DraftStep<'_>, usize)| {
            step.most.min(self.num_heads()).max(*num_rows)
        };
        let most = steps.iter().map(num_rows).max().map_or(1, |most| most.min(self.num_heads()));
        let logits = self.logits(states, most, target);
        let of_step = |(nth, step)| {
            let row = |number: usize| logits[number.min(most - 1)].slice(nth..nth + 1);
            (0..num_rows(step)).map(row).collect()
        };
        steps.iter().enumerate().map(of_step).collect()
    }

    fn num_rows(round: &Vec<Rows>) -> usize {
        round.len()
    }

    fn rows(&self, rows: &[RoundRow<'_, Vec<Rows>>], _predicts: bool) -> ComputedRows {
        let logits = Rows::cat(rows.iter().map(|row| row.round[row.number].clone()));
        let [logits] = to_host([logits], ROLE)?;
        Ok((logits, None))
    }
}
