//! The stop rule by which llama.cpp cuts the drafts of a block drafter with a confidence head.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleSettings};
use super::{
    Bounds, DraftSignals, HeadEstimate, HeadTiming, SignalNeeds, StopRule, StopRuleEntry,
    StopRuleName,
};

/// llama.cpp's `--spec-draft-p-min` for DSpark drafters: no candidate is drawn whose predicted
/// acceptance is below the threshold.
///
/// Each candidate is judged by itself, not by the product of the round. The rule is made for heads
/// of [`HeadTiming::BeforeDraw`]. Other heads end the round as soon as they have predicted. No drawn
/// candidate is withheld, so the output stays lossless. With a minimum length of 0 a round may have
/// no candidates.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfidenceHeadConfig {
    /// The threshold, a probability. 0 never stops.
    pub acceptance_threshold: f64,
    /// The minimum and maximum candidate length.
    pub bounds: Bounds,
}

impl ConfidenceHeadConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::ConfidenceHead,
        file_name: "confidence-head",
        text: "confidence head",
        family: RuleFamily::Head,
        heads: &[HeadTiming::BeforeDraw],
        settings: RuleSettings::Grid(Grid::of_probabilities(
            "llama.cpp's `--spec-draft-p-min` for a block drafter with a confidence head: no candidate is drawn whose predicted acceptance is below this",
            |acceptance_threshold, _, bounds| {
                Self { acceptance_threshold, bounds: Bounds { min: 0, ..bounds } }.into()
            },
        )),
    }];
}

impl RuleConfig for ConfidenceHeadConfig {
    fn rule(&self) -> Box<dyn StopRule> {
        Box::new(*self)
    }
}

impl StopRule for ConfidenceHeadConfig {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        match signals.acceptance_prob {
            // A head may have read the token before the round, which is not a candidate.
            Some(HeadEstimate::OfRead(_)) if candidates.is_empty() => false,
            Some(HeadEstimate::OfDrawn(prob) | HeadEstimate::OfRead(prob)) => {
                prob < self.acceptance_threshold
            }
            None => false,
        }
    }

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        let of_drawn = signals.acceptance_prob.and_then(HeadEstimate::of_drawn);
        of_drawn.is_some_and(|prob| prob < self.acceptance_threshold)
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::StopRuleConfig;
    use super::*;

    fn rule(acceptance_threshold: f64) -> ConfidenceHeadConfig {
        ConfidenceHeadConfig { acceptance_threshold, bounds: Bounds { min: 0, max: 20 } }
    }

    #[test]
    fn by_the_head_each_candidate_is_judged_by_itself_before_its_draw() {
        let length = |probs: &[f64]| {
            let mut rule = rule(0.6);
            let sure = |prob: &f64| DraftSignals {
                acceptance_prob: Some(HeadEstimate::OfDrawn(*prob)),
                confidence_of_ten: Some(0.0),
                ..DraftSignals::default()
            };
            let mut drawn = Vec::new();
            for signals in probs.iter().map(sure) {
                if rule.stops_before_draw(&drawn, &signals) {
                    return Some(drawn.len());
                }
                drawn.push(0);
                assert!(!rule.stops(&drawn, &signals));
            }
            None
        };
        // The product falls below the threshold at the second candidate.
        assert_eq!(length(&[0.7, 0.7, 0.6, 0.59]), Some(3));
        assert_eq!(length(&[0.5]), Some(0));
        assert_eq!(length(&[0.6; 5]), None);
        let head = SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() };
        assert_eq!(rule(0.6).needs(), head);
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(StopRuleConfig::from(rule(threshold)).init().is_err());
        }
    }
}
