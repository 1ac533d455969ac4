//! What is noted of draft forwards and rounds, which a head may yet be told.

use draftsmith_model::{DrawnCandidate, Rows};
use draftsmith_theory::SoftmaxSummary;

/// The draft forwards over one sequence.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Those whose candidates the head may yet be asked about and told more of than hidden states, in
    /// the order of what they read; of a head that looks ahead, those of the last step.
    pub(super) forwards: Vec<Forward>,
    /// The rounds that a head which depends on them may be asked about, the one that is drafted last.
    pub(super) rounds: Vec<RoundStart>,
    /// Whether it may be asked about more than one.
    pub(super) keeps_rounds: bool,
    /// The place of the last token read, and its hidden state, where it may.
    pub(super) last_read: Option<(usize, Rows)>,
}

/// Where a round begins.
#[derive(Debug)]
pub(super) struct RoundStart {
    /// Behind so many tokens.
    pub(super) num_standing: usize,
    /// The head's product with the target's last hidden state, if it reads that.
    pub(super) of_target: Option<Rows>,
}

impl Slot {
    /// Another round begins; up to `num_kept` may be asked about from now on. What was read before the
    /// last tokens of those is asked about no more.
    pub(super) fn begin_round(&mut self, round: RoundStart, num_kept: usize) {
        let num_standing = round.num_standing;
        self.forget_before((num_standing - 1).saturating_sub(num_kept));
        self.keeps_rounds = num_kept > 1;
        self.rounds.retain(|round| round.num_standing < num_standing);
        let num_over = (self.rounds.len() + 1).saturating_sub(num_kept);
        self.rounds.drain(..num_over);
        self.rounds.push(round);
    }

    /// Forgets forwards that read tokens before a place.
    fn forget_before(&mut self, place: usize) {
        self.forwards.retain(|forward| forward.at >= place);
    }

    /// The round that is drafted.
    pub(super) fn round(&self) -> &RoundStart {
        self.rounds.last().expect("a round begins before its steps")
    }
}

/// A draft forward, as a head is told of it.
#[derive(Debug)]
pub(super) struct Forward {
    /// The place of the token that it read.
    pub(super) at: usize,
    /// The round's candidates up to that.
    pub(super) num_candidates: usize,
    /// The final hidden state, for a head that looks ahead.
    pub(super) hidden: Option<Rows>,
    /// Of the drafter's own logits, before they are cut to the target's vocabulary: as in training.
    pub(super) softmax: SoftmaxSummary,
}

impl Forward {
    /// The candidate drawn from it, behind `position` others in its round.
    pub(super) fn candidate(&self, log_prob: Option<f64>, position: usize) -> DrawnCandidate {
        DrawnCandidate {
            entropy: self.softmax.entropy,
            top_prob: self.softmax.largest_prob,
            log_prob,
            position,
        }
    }
}
