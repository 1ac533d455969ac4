//! The stop rules that may end a cascade's chains before their full length.
//!
//! A rule sees a chain's tokens like the candidates of a draft phase, with the signals of the
//! drafter that appends them. A reviewing drafter appends several tokens per forward, all drawn
//! before the rule sees them. So the rule only decides whether the drafter takes another step, and
//! its decision depends only on the tokens of the chain.

use draftsmith_theory::{
    DraftSignals, HeadEstimate, RoundEnd, SignalNeeds, StopRule, StopRuleConfig, TheoryError,
};

/// The stop rules of one sequence's chains, indexed by reviewer; `None` for a chain without a rule.
pub(super) struct ChainRules(Vec<Option<Box<dyn StopRule>>>);

impl ChainRules {
    /// Builds the rules for a new sequence from their settings.
    ///
    /// # Errors
    /// If a rule's settings are invalid.
    pub(super) fn new(configs: &[Option<StopRuleConfig>]) -> Result<Self, TheoryError> {
        let init =
            |config: &Option<StopRuleConfig>| config.as_ref().map(StopRuleConfig::init).transpose();
        configs.iter().map(init).collect::<Result<_, _>>().map(Self::of)
    }

    /// Prepares already built rules for a new sequence.
    pub(super) fn of(mut rules: Vec<Option<Box<dyn StopRule>>>) -> Self {
        rules.iter_mut().flatten().for_each(|rule| rule.begin_sequence());
        Self(rules)
    }

    /// Begins a new chain for a reviewer, and lends the chain its rule until [`Self::end`].
    pub(super) fn begin(&mut self, reviewer: usize) -> ChainRule {
        let mut rule = self.0.get_mut(reviewer).and_then(Option::take);
        rule.iter_mut().for_each(|rule| rule.begin_round());
        let skips = rule.as_mut().is_some_and(|rule| rule.skips_drafting());
        ChainRule { rule, candidates: Vec::new(), is_over: skips }
    }

    /// Takes back the rule of a complete chain.
    pub(super) fn end(&mut self, reviewer: usize, chain: ChainRule) {
        if let (Some(rule), Some(kept)) = (chain.rule, self.0.get_mut(reviewer)) {
            *kept = Some(rule);
        }
    }

    /// Reports the outcome of a chain's review to the chain's rule.
    pub(super) fn reviewed(&mut self, reviewer: usize, end: RoundEnd) {
        if let Some(Some(rule)) = self.0.get_mut(reviewer) {
            rule.end_round(end);
        }
    }
}

/// The stop rule of an unfinished chain, and the tokens that it has seen; without a rule nothing
/// ends the chain early.
pub(super) struct ChainRule {
    rule: Option<Box<dyn StopRule>>,
    candidates: Vec<u32>,
    /// Whether the rule has ended the chain.
    pub(super) is_over: bool,
}

impl ChainRule {
    /// Returns the signals that the rule reads, or none without a rule.
    pub(super) fn needs(&self) -> SignalNeeds {
        self.rule.as_ref().map_or(SignalNeeds::default(), |rule| rule.needs())
    }

    /// Returns the maximum length of the chain: the smaller of `room` and the rule's upper bound.
    pub(super) fn most(&self, room: usize) -> usize {
        self.rule.as_ref().map_or(room, |rule| room.min(rule.bounds().max))
    }

    /// Asks the rule whether to end the chain before another token is drawn. `signals` belong to
    /// the row that the token would be drawn from. Returns whether the chain has ended, which is
    /// `false` without a rule.
    pub(super) fn stops_before_draw(&mut self, signals: &DraftSignals) -> bool {
        let Some(rule) = &mut self.rule else { return false };
        let stops = rule.stops_before_draw(&self.candidates, signals);
        self.is_over |= stops && self.candidates.len() >= rule.bounds().min;
        self.is_over
    }

    /// Records a drawn token and asks the rule whether the chain ends after it. `predicted` is a
    /// look-ahead head's acceptance probability for the token, if any.
    pub(super) fn drew(&mut self, token: u32, signals: DraftSignals, predicted: Option<f64>) {
        let Some(rule) = &mut self.rule else { return };
        self.candidates.push(token);
        let of_drawn = predicted.map(HeadEstimate::OfDrawn);
        let signals =
            DraftSignals { acceptance_prob: of_drawn.or(signals.acceptance_prob), ..signals };
        let stops = rule.stops(&self.candidates, &signals);
        self.is_over |= stops && self.candidates.len() >= rule.bounds().min;
    }
}
