//! Cost-optimal stopping, fitted to recordings: its estimates, and the fixed point of what a token
//! costs.

use super::step_function::fit_steps;
use std::ops::Range;

use super::{RecordedCandidate, RecordedPlace, Recordings, seconds_per_token};
use crate::{
    AcceptanceSignal, Bounds, CostOptimalConfig, HeadTiming, RoundCosts, StopRuleConfig,
    TheoryError,
};

/// Steps towards the fixed point; a handful are enough.
const MAX_STEPS: usize = 30;
/// The price of a row, in its average cost.
const ROW_SHARES: [f64; 4] = [1.0, 0.75, 0.5, 0.25];
/// Seconds a token that change by less than this share change no decision.
const CLOSE_ENOUGH: f64 = 1e-9;

/// The rule found, and what a token costs under it.
#[derive(Debug, Clone, PartialEq)]
pub struct CostOptimum {
    /// The rule, with its estimates and the least worth of a draft forward.
    pub config: CostOptimalConfig,
    /// λ: modelled seconds a token on the recordings it was fitted to.
    pub seconds_per_token: f64,
}

/// Fits [`CostOptimalConfig`](crate::CostOptimalConfig) that reads `signal` to recordings, where costs are
/// `costs`: how likely candidates are accepted given the signal, and λ, the seconds a token costs,
/// with which the rule does what λ says. Of the values met on the way to the fixed point the best
/// is kept.
///
/// # Errors
/// If the recordings are empty or have no head where `signal` is its prediction, `bounds` go beyond
/// them, or `costs` has no price for their drafter.
pub fn cost_optimal(
    recordings: &Recordings,
    signal: AcceptanceSignal,
    costs: &RoundCosts,
    bounds: Bounds,
) -> Result<CostOptimum, TheoryError> {
    if signal.needs().acceptance_prob && recordings.head.is_none() {
        return Err(TheoryError::NoHeadRecorded);
    }
    let fit = |signal_of: &dyn Fn(Place<'_>) -> Option<f64>, outcome| {
        fit_steps(outcomes(recordings, signal_of, outcome)).ok_or(TheoryError::NothingRecorded)
    };
    let own = |place: Place<'_>| signal.of(drafted(&place.places[place.at]));
    let estimate = fit(&own, 0..1)?;
    // A head that predicts for a candidate once it is read: then one more can be drawn, and a
    // forward brings a second. All else is about the candidate that is drawn, and a forward brings
    // the next.
    let (draw_outlook, outlook, initial_outlook) = match (signal, recordings.head) {
        (AcceptanceSignal::AcceptanceProb, Some(HeadTiming::AtDraw)) => {
            let next = fit(&own, 1..2)?;
            (next.clone(), next, 1.0)
        }
        (AcceptanceSignal::AcceptanceProb, _) => {
            let first_two = outcomes(recordings, &|_| Some(0.0), 0..2);
            let initial = mean(&first_two).ok_or(TheoryError::NothingRecorded)?;
            (fit(&own, 1..2)?, fit(&own, 1..3)?, initial)
        }
        (AcceptanceSignal::Confidence | AcceptanceSignal::Entropy, _) => {
            (estimate.clone(), fit(&own, 1..2)?, 1.0)
        }
    };

    let draft_seconds = costs.draft_seconds(recordings.drafter)?;
    let plain = seconds_per_token(&recordings.plain(costs));
    let mut best: Option<CostOptimum> = None;
    // Rows that cost in steps have no one price: several are tried.
    for row_share in ROW_SHARES {
        let row_seconds = row_share * costs.row_seconds();
        let mut lambda = plain;
        for _ in 0..MAX_STEPS {
            let config = CostOptimalConfig {
                signal,
                least_worth: (draft_seconds + row_seconds) / lambda,
                least_draw_worth: row_seconds / lambda,
                estimate: estimate.clone(),
                draw_outlook: draw_outlook.clone(),
                outlook: outlook.clone(),
                initial_outlook,
                bounds,
            };
            let rule = StopRuleConfig::CostOptimal(config.clone());
            let found = seconds_per_token(&recordings.replay(&rule, costs)?);
            let change = (found / lambda - 1.0).abs();
            lambda = found;
            if best.as_ref().is_none_or(|best| found < best.seconds_per_token) {
                best = Some(CostOptimum { config, seconds_per_token: found });
            }
            if change < CLOSE_ENOUGH {
                break;
            }
        }
        if row_seconds == 0.0 {
            break;
        }
    }
    best.ok_or(TheoryError::NothingRecorded)
}

/// A place whose prefix a round may have accepted.
#[derive(Clone, Copy)]
struct Place<'a> {
    /// The response's places at which something is drafted.
    places: &'a [RecordedPlace],
    at: usize,
}

/// Of every place: its signal (what a head predicts that reads where a round began, in the round
/// that begins there), with 1 where the candidates at `ahead` places from it are all
/// accepted, else 0. Where `ahead` begins beyond the place itself, only places whose own candidate
/// is accepted count: the chance is given that.
fn outcomes(
    recordings: &Recordings,
    signal_of: &dyn Fn(Place<'_>) -> Option<f64>,
    ahead: Range<usize>,
) -> Vec<(f64, f64)> {
    let is_accepted = |place: &RecordedPlace| place.rollout.is_none();
    let mut pairs = Vec::new();
    for response in &recordings.responses {
        // Nothing is drafted for the last place the limit allows.
        let num_drafted = response.places.len().min(response.limit - 1);
        let places = &response.places[..num_drafted];
        for at in 0..places.len().saturating_sub(ahead.end - 1) {
            if !places[at..at + ahead.start].iter().all(is_accepted) {
                continue;
            }
            let all = places[at + ahead.start..at + ahead.end].iter().all(is_accepted);
            if let Some(signal) = signal_of(Place { places, at }) {
                pairs.push((signal, f64::from(u8::from(all))));
            }
        }
    }
    pairs
}

fn mean(pairs: &[(f64, f64)]) -> Option<f64> {
    let total: f64 = pairs.iter().map(|(_, outcome)| outcome).sum();
    (!pairs.is_empty()).then(|| total / pairs.len() as f64)
}

/// The candidate that is drafted at a place.
fn drafted(place: &RecordedPlace) -> &RecordedCandidate {
    place.rollout.as_ref().and_then(|rollout| rollout.first()).unwrap_or(&place.candidate)
}

impl AcceptanceSignal {
    fn of(self, candidate: &RecordedCandidate) -> Option<f64> {
        match self {
            Self::AcceptanceProb => candidate.predicted_acceptance_prob.in_round(0),
            Self::Confidence => Some(candidate.confidence),
            Self::Entropy => Some(candidate.entropy),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_recordings::random;
    use super::*;
    use crate::{CostModel, Counts, DrafterId, FixedLengthConfig};

    fn rounds(line: CostModel) -> RoundCosts {
        RoundCosts::from_line(DrafterId::Draft, line).expect("times")
    }

    const COSTS: CostModel =
        CostModel { draft_seconds: 0.0234, target_seconds: 0.112, row_seconds: 0.0 };

    fn cost(recordings: &Recordings, rule: &StopRuleConfig, costs: CostModel) -> f64 {
        seconds_per_token(&recordings.replay(rule, &rounds(costs)).expect("replays"))
    }

    fn bounds() -> Bounds {
        Bounds { min: 1, max: 8 }
    }

    #[test]
    fn it_beats_every_fixed_length_where_signals_tell_something() {
        let recordings = random(1, 400, 0.75);
        let fixed = (1..=8)
            .map(|candidate_length| {
                let rule = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length });
                cost(&recordings, &rule, COSTS)
            })
            .fold(f64::INFINITY, f64::min);
        use AcceptanceSignal::{AcceptanceProb, Confidence, Entropy};
        for signal in [AcceptanceProb, Confidence, Entropy] {
            let found = cost_optimal(&recordings, signal, &rounds(COSTS), bounds()).expect("fits");
            assert!(found.seconds_per_token < fixed, "{signal:?}: {found:?} against {fixed}");
            let again = cost(&recordings, &StopRuleConfig::CostOptimal(found.config), COSTS);
            assert_eq!(again, found.seconds_per_token);
        }
    }

    #[test]
    fn a_head_that_looks_ahead_gains_more_than_the_same_predictions_later() {
        let late = random(1, 400, 0.75);
        let ahead = Recordings { head: Some(HeadTiming::AtDraw), ..late.clone() };
        let [late, ahead] = [late, ahead].map(|recordings| {
            let signal = AcceptanceSignal::AcceptanceProb;
            cost_optimal(&recordings, signal, &rounds(COSTS), bounds()).expect("fits")
        });
        assert!(ahead.seconds_per_token < late.seconds_per_token, "{ahead:?} for {late:?}");
    }

    #[test]
    fn dearer_drafting_drafts_less() {
        let recordings = random(2, 100, 0.75);
        let num_drafted = |draft_seconds| {
            let costs = CostModel { draft_seconds, ..COSTS };
            let found =
                cost_optimal(&recordings, AcceptanceSignal::Confidence, &rounds(costs), bounds());
            let rule = StopRuleConfig::CostOptimal(found.expect("fits").config);
            let counts: Counts =
                recordings.replay_counts(&rule).expect("replays").into_iter().sum();
            counts.num_drafted
        };
        let counts = [0.0, 0.005, 0.02, 0.05, 0.1].map(num_drafted);
        assert!(counts.is_sorted_by(|a, b| a >= b), "{counts:?}");
        assert!(counts[0] > counts[4]);
    }

    #[test]
    fn dear_rows_leave_free_candidates_undrawn() {
        let recordings = random(3, 200, 0.7);
        let costs = CostModel { row_seconds: 0.03, draft_seconds: 0.005, ..COSTS };
        for signal in [AcceptanceSignal::AcceptanceProb, AcceptanceSignal::Confidence] {
            let found = cost_optimal(&recordings, signal, &rounds(costs), bounds()).expect("fits");
            let seconds = |config: CostOptimalConfig| {
                let rule = StopRuleConfig::CostOptimal(config);
                cost(&recordings, &rule, costs)
            };
            let drawn = CostOptimalConfig { least_draw_worth: 0.0, ..found.config.clone() };
            assert!(seconds(found.config) < seconds(drawn), "{signal:?}");
        }
    }

    #[test]
    fn nothing_recorded_fits_nothing() {
        let recordings = Recordings { responses: Vec::new(), ..random(4, 1, 0.5) };
        let refused =
            cost_optimal(&recordings, AcceptanceSignal::Entropy, &rounds(COSTS), bounds());
        assert_eq!(refused, Err(TheoryError::NothingRecorded));
    }
}
