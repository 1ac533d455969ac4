//! What a round of any cascade comes to, as this engine drafts it, if every candidate is accepted
//! independently: CS-Drafting's closed forms for chains of any matrix K.
//!
//! The published forms are of two drafters and of rounds with a fixed number of steps. A chain here is
//! drafted until it has as many tokens as K asks for, and may have what its last step lets stand
//! beyond them; each chain that is reviewed inside is drafted in the same way. A drafter that looks up
//! finds something or does not.

/// A token of a cascade's drafter, by how it came about. Drafters are numbered as K's columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Emitted {
    /// Whose token it is.
    pub drafter: usize,
    /// Who proposed a candidate in its place, which it is or which the drafter rejected; None of what
    /// nothing was proposed for. A reviewer that forgives nothing emits tokens of one distribution
    /// either way.
    pub instead_of: Option<usize>,
}

/// What a round comes to on average.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedRound {
    /// Tokens, the target's own among them.
    pub num_tokens: f64,
    /// `[drafter][rows - 1]`: forwards of each drafter that read so many rows. One that looks up has
    /// forwards too, of one row for each token.
    pub num_forwards: Vec<Vec<f64>>,
    /// The chance of a chain of 0, 1, 2, … candidates.
    pub length_probs: Vec<f64>,
}

/// What a round of a cascade comes to whose matrix K is `lengths`: row i and column j have the
/// candidates of drafter j in the chain that reviewer i reads, the target being reviewer 0 and drafter
/// i − 1 reviewer i.
///
/// `acceptance_prob(i, token)` is the chance that reviewer i lets such a token stand. Where a chain of
/// several drafters is reviewed, what stands in their candidates' places counts as instead of the
/// first one's. `found_prob(j)` is the chance that drafter j has something to propose, 1 of a model, and
/// then it has all that is asked for. No chain meets the end of a text.
///
/// # Panics
/// If `lengths` is not square.
pub fn expected_cascade_round(
    lengths: &[Vec<usize>],
    acceptance_prob: impl Fn(usize, Emitted) -> f64,
    found_prob: impl Fn(usize) -> f64,
) -> ExpectedRound {
    let num_drafters = lengths.len();
    assert!(lengths.iter().all(|row| row.len() == num_drafters), "K is square");
    // From the last reviewer on, as chains are made of what is reviewed in them. Behind the last drafter
    // there is nobody.
    let mut chain = ExpectedChain::empty(num_drafters);
    // The steps of the last drafter first.
    let mut steps: Vec<ExpectedStep> = Vec::with_capacity(num_drafters);
    for row in (0..num_drafters).rev() {
        let below = lengths.get(row + 1).and_then(|row| row.iter().position(|len| *len > 0));
        steps.push(ExpectedStep::of(row, below, &chain));
        chain = ExpectedChain::empty(num_drafters);
        let mut most = 0;
        for (step, length) in steps.iter().rev().zip(&lengths[row][row..]) {
            most += length;
            let missed = chain.miss(most, 1.0 - found_prob(step.own.drafter));
            chain.draft(most, step, |token| acceptance_prob(row, token));
            chain.add(missed);
        }
    }
    let ExpectedChain { length_probs, rejected, stands_all, num_forwards } = chain;
    let stood = rejected.iter().enumerate().chain(stands_all.iter().enumerate());
    let num_accepted: f64 = stood.map(|(num, prob)| num as f64 * prob).sum();
    ExpectedRound { num_tokens: 1.0 + num_accepted, num_forwards, length_probs }
}

/// A chain that a reviewer reads.
struct ExpectedChain {
    /// The chance of each length.
    length_probs: Vec<f64>,
    /// The chance that so many of its tokens stand and the next does not.
    rejected: Vec<f64>,
    /// The chance that it has so many tokens and all stand.
    stands_all: Vec<f64>,
    /// Forwards that it takes, as [`ExpectedRound::num_forwards`] has them.
    num_forwards: Vec<Vec<f64>>,
}

/// A forward of a drafter, with what is proposed to it.
struct ExpectedStep {
    /// What it emits in the place of what was proposed.
    reviewed: Emitted,
    /// What it emits behind that, where all of it stands.
    own: Emitted,
    outcomes: Vec<StepOutcome>,
    /// Forwards that it takes.
    num_forwards: Vec<Vec<f64>>,
}

/// What a step may come to.
struct StepOutcome {
    prob: f64,
    /// Tokens in the places of candidates.
    num_reviewed: usize,
    /// Whether one of its own comes behind them.
    has_own: bool,
}

impl ExpectedStep {
    /// A step of a drafter that reviews a chain, whose first candidates are another's, if it has any.
    fn of(drafter: usize, proposer: Option<usize>, chain: &ExpectedChain) -> Self {
        let rejected = chain.rejected.iter().enumerate().map(|(num_stand, prob)| StepOutcome {
            prob: *prob,
            num_reviewed: num_stand + 1,
            has_own: false,
        });
        let stands_all = chain.stands_all.iter().enumerate().map(|(num_stand, prob)| StepOutcome {
            prob: *prob,
            num_reviewed: num_stand,
            has_own: true,
        });
        let mut num_forwards = chain.num_forwards.clone();
        for (num_proposed, prob) in chain.length_probs.iter().enumerate() {
            *at(&mut num_forwards[drafter], num_proposed) += prob;
        }
        Self {
            reviewed: Emitted { drafter, instead_of: proposer },
            own: Emitted { drafter, instead_of: None },
            outcomes: rejected.chain(stands_all).filter(|it| it.prob > 0.0).collect(),
            num_forwards,
        }
    }
}

impl ExpectedChain {
    /// One of no tokens.
    fn empty(num_drafters: usize) -> Self {
        Self {
            length_probs: vec![1.0],
            rejected: Vec::new(),
            stands_all: vec![1.0],
            num_forwards: vec![Vec::new(); num_drafters],
        }
    }

    /// Takes out of it the share in which nothing is proposed where there are fewer than `most` tokens: the
    /// chances of each length, and of as many that stand.
    fn miss(&mut self, most: usize, share: f64) -> Vec<[f64; 2]> {
        let take = |all: &mut f64| {
            let missed = share * *all;
            *all -= missed;
            missed
        };
        let short = self.length_probs.iter_mut().zip(&mut self.stands_all).take(most);
        short.map(|(reached, stands)| [take(reached), take(stands)]).collect()
    }

    /// Adds such a share.
    fn add(&mut self, share: Vec<[f64; 2]>) {
        for (length, [reached, stands]) in share.into_iter().enumerate() {
            *at(&mut self.length_probs, length) += reached;
            *at(&mut self.stands_all, length) += stands;
        }
    }

    /// Takes a drafter's steps until there are `most` tokens.
    fn draft(
        &mut self,
        most: usize,
        step: &ExpectedStep,
        acceptance_prob: impl Fn(Emitted) -> f64,
    ) {
        let [reviewed, own] = [step.reviewed, step.own].map(acceptance_prob);
        let mut num_steps = 0.0;
        for length in 0..most {
            let reached = std::mem::take(at(&mut self.length_probs, length));
            let stands = std::mem::take(at(&mut self.stands_all, length));
            num_steps += reached;
            if reached == 0.0 {
                continue;
            }
            for StepOutcome { prob, num_reviewed, has_own } in &step.outcomes {
                let mut left = stands * prob;
                let mut longer = length;
                let tokens = std::iter::repeat_n(reviewed, *num_reviewed);
                for acceptance_prob in tokens.chain(has_own.then_some(own)) {
                    *at(&mut self.rejected, longer) += left * (1.0 - acceptance_prob);
                    left *= acceptance_prob;
                    longer += 1;
                }
                *at(&mut self.length_probs, longer) += reached * prob;
                *at(&mut self.stands_all, longer) += left;
            }
        }
        for (all, of_step) in self.num_forwards.iter_mut().zip(&step.num_forwards) {
            for (rows, num) in of_step.iter().enumerate() {
                *at(all, rows) += num_steps * num;
            }
        }
    }
}

/// The entry there, 0 where there was none.
fn at(all: &mut Vec<f64>, index: usize) -> &mut f64 {
    if all.len() <= index {
        all.resize(index + 1, 0.0);
    }
    &mut all[index]
}
