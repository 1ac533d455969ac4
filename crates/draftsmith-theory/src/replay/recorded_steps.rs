//! A [`CandidateSource`] that takes the steps of a draft phase from a recording.

use std::convert::Infallible;
use std::slice::Iter;

use super::{RecordedCandidate, RecordedPlace};
use crate::{CandidateSource, DraftSignals, DrawnToken, HeadEstimate, HeadTiming, SignalNeeds};

/// The recorded steps after an accepted prefix. They follow the response while candidates are
/// accepted, then the rollout from the first rejected candidate on.
pub(super) struct RecordedSteps<'a> {
    head: Option<HeadTiming>,
    /// The remaining positions of the response, from the accepted prefix on.
    places: Iter<'a, RecordedPlace>,
    /// The remaining candidates of the rollout; None while the steps follow the response.
    rollout: Option<Iter<'a, RecordedCandidate>>,
    /// Whether a candidate of the round has been rejected.
    is_rejected: bool,
    /// The candidate that belongs to the last step; None before the first step.
    last: Option<&'a RecordedCandidate>,
    /// The number of drawn candidates that are accepted.
    pub(super) num_accepted: usize,
}

impl<'a> RecordedSteps<'a> {
    pub(super) fn new(places: &'a [RecordedPlace], head: Option<HeadTiming>) -> Self {
        let places = places.iter();
        Self { head, places, rollout: None, is_rejected: false, last: None, num_accepted: 0 }
    }

    /// Returns whether another step was recorded. Recording stops where the text ends.
    pub(super) fn has_next(&self) -> bool {
        self.rollout.as_ref().map_or(self.places.len(), Iter::len) > 0
    }

    /// Returns whether no candidate has been rejected so far.
    pub(super) fn is_accepted(&self) -> bool {
        !self.is_rejected
    }

    pub(super) fn next(&mut self) -> &'a RecordedCandidate {
        let place = self.places.next();
        if let Some(rollout) = place.and_then(|place| place.rollout.as_ref())
            && self.rollout.is_none()
        {
            self.rollout = Some(rollout.iter());
        }
        let own = place.map(|place| &place.candidate);
        let candidate = self.rollout.as_mut().map_or(own, Iter::next);
        let candidate = candidate.expect("a step is taken where there is one");
        self.is_rejected |= own.is_none_or(|own| own.token_id != candidate.token_id);
        candidate
    }

    /// Adds 1 to the accepted candidates, unless a candidate has been rejected.
    pub(super) fn count(&mut self) {
        self.num_accepted += usize::from(!self.is_rejected);
    }

    /// Takes the next step and returns its signals.
    pub(super) fn step(&mut self) -> DraftSignals {
        let candidate = self.next();
        let read = self.last.replace(candidate);
        let of_head = |candidate: &RecordedCandidate| candidate.predicted_acceptance_prob;
        let acceptance_prob = match self.head {
            Some(HeadTiming::AfterRead) => read.and_then(of_head).map(HeadEstimate::OfRead),
            Some(HeadTiming::BeforeDraw) => of_head(candidate).map(HeadEstimate::OfDrawn),
            Some(HeadTiming::AtDraw) | None => None,
        };
        DraftSignals {
            acceptance_prob,
            confidence: Some(candidate.confidence),
            confidence_of_ten: Some(candidate.confidence_of_ten),
            candidate_prob: None,
            entropy: Some(candidate.entropy),
        }
    }
}

impl CandidateSource for RecordedSteps<'_> {
    type Error = Infallible;

    fn draw(&mut self, _needs: SignalNeeds) -> DrawnToken {
        let candidate = self.last.expect("a step comes before its draw");
        self.count();
        DrawnToken { token_id: candidate.token_id, candidate_prob: Some(candidate.candidate_prob) }
    }

    fn predict_acceptance(&mut self, _candidate: u32) -> Result<Option<f64>, Infallible> {
        let looks_ahead = self.head == Some(HeadTiming::AtDraw);
        let drawn = self.last.filter(|_| looks_ahead);
        Ok(drawn.and_then(|drawn| drawn.predicted_acceptance_prob))
    }
}
