//! What the numbers of a survey come to, in one sentence: train a head, train an adapter, set a rule
//! that needs no training, or do not speculate.
//!
//! What is advised is what an interval bears out, not what its middle says: where a gain may be nothing,
//! the simpler thing is advised.

use draftsmith_theory::{LookupFirst, StopRuleConfig};
use serde::Serialize;

use crate::results::Estimate;

/// What a head has to gain over what needs no training, to be worth training.
const WORTH_TRAINING: f64 = 0.01;

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Advice {
    /// Train an acceptance head for the draft.
    TrainHead,
    /// Train a self-draft adapter.
    TrainAdapter,
    /// Set a rule that needs no training.
    JustSet,
    /// Look prompts up, without a draft or an adapter.
    JustLookUp,
    /// Decode with the target alone.
    DoNotSpeculate,
}

/// The advice, and what it rests on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Verdict {
    pub(super) advice: Advice,
    /// The rule that is to be set, or the adapter's fixed length; null where there is none.
    pub(super) config: Option<StopRuleConfig>,
    /// What is to be looked up; null where something else is advised.
    pub(super) look_ups: Option<LookupFirst>,
    /// Expected speed over the target alone of what is advised, or of the best there is where
    /// speculation is advised against, minus 1.
    pub(super) expected_gain: Estimate,
    pub(super) sentence: String,
}

impl Verdict {
    /// The verdict beside prompt lookup alone, with its speed over the target alone: it is advised where
    /// it surely gains, and more than what else needs no training. What is trained can be looked up
    /// before.
    pub(super) fn beside_look_ups(self, look_ups: LookupFirst, speedup: Estimate) -> Self {
        let gain = minus_one(speedup);
        if gain.low <= 0.0 {
            return self;
        }
        match self.advice {
            Advice::TrainHead | Advice::TrainAdapter => {
                let sentence = format!(
                    "{}; prompt lookup alone, {}, gives {}, and can go before it",
                    self.sentence,
                    told_look_ups(look_ups),
                    told(gain)
                );
                Self { sentence, ..self }
            }
            _ if gain.value > self.expected_gain.value => {
                let sentence = format!(
                    "just look up prompts, {}: expect {} over the target alone; otherwise, {}",
                    told_look_ups(look_ups),
                    told(gain),
                    self.sentence
                );
                Self {
                    advice: Advice::JustLookUp,
                    config: None,
                    look_ups: Some(look_ups),
                    expected_gain: gain,
                    sentence,
                }
            }
            _ => self,
        }
    }
}

/// `4 candidates behind a match of 2`.
pub(super) fn told_look_ups(look_ups: LookupFirst) -> String {
    let LookupFirst { min_match, most } = look_ups;
    format!("up to {most} candidates behind a match of {min_match}")
}

/// A rule, and what is expected of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Promise {
    /// The rule with its setting: `K = 4`.
    pub(super) setting: String,
    pub(super) config: StopRuleConfig,
    /// Over the target alone.
    pub(super) speedup: Estimate,
}

/// What a head is expected to gain.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct HeadOutlook {
    /// Over the best fixed length.
    pub(super) over_fixed: Estimate,
    /// Over the best rule that needs no training.
    pub(super) over_untrained: Estimate,
    /// Speed over the target alone.
    pub(super) speedup: Estimate,
}

/// The advice for a pair: its best fixed length, its best rule that needs no training with the gain
/// over that, and what a head is expected to do, if that is known.
pub(super) fn of_pair(
    fixed: &Promise,
    untrained: &Promise,
    untrained_gain: Estimate,
    head: Option<&HeadOutlook>,
    ceiling: Option<Estimate>,
) -> Verdict {
    // A fixed length is simpler, and every runtime has it.
    let is_better = untrained_gain.low > 0.0;
    let setting = if is_better { untrained } else { fixed };
    let of_head =
        head.map(|head| (head, if is_better { head.over_untrained } else { head.over_fixed }));
    if let Some((head, gain)) = of_head
        && gain.low > 0.0
        && gain.value >= WORTH_TRAINING
        && head.speedup.low > 1.0
    {
        let expected_gain = minus_one(head.speedup);
        let sentence = format!(
            "train a head: expect {} over the target alone, {} more than {}, the best without one",
            told(expected_gain),
            told(gain),
            setting.setting
        );
        return Verdict {
            advice: Advice::TrainHead,
            config: None,
            look_ups: None,
            expected_gain,
            sentence,
        };
    }
    let expected_gain = minus_one(setting.speedup);
    let config = Some(setting.config.clone());
    if expected_gain.low > 0.0 {
        let about_heads = match of_head {
            Some((_, gain)) => {
                format!(
                    "a head that knows what these prompts teach would change that by {}",
                    told(gain)
                )
            }
            None => "these are too few prompts to say what a head would know".to_owned(),
        };
        let joint = if of_head.is_some() { ", a" } else { "; a" };
        let of_perfect = ceiling.map_or_else(String::new, |ceiling| {
            format!("{joint} perfect one gains {} over the best K", percent(ceiling.value))
        });
        let sentence = format!(
            "just set {}: expect {} over the target alone; {about_heads}{of_perfect}",
            setting.setting,
            told(expected_gain)
        );
        return Verdict {
            advice: Advice::JustSet,
            config,
            look_ups: None,
            expected_gain,
            sentence,
        };
    }
    let sentence = refusal(&setting.setting, expected_gain);
    Verdict {
        advice: Advice::DoNotSpeculate,
        config: None,
        look_ups: None,
        expected_gain,
        sentence,
    }
}

/// The advice for a target alone: the exit layer whose linear read-out drafts best, what it comes to,
/// what share of the tokens it drafts rightly, and from which share on one candidate a round pays.
pub(super) fn of_target(
    exit_layer: usize,
    best: &Promise,
    accepted: Estimate,
    break_even: f64,
) -> Verdict {
    let expected_gain = minus_one(best.speedup);
    if expected_gain.low > 0.0 {
        let sentence = format!(
            "train an adapter behind layer {exit_layer}: a linear read-out of it would give {} over \
             the target alone with {}, and an adapter learns more",
            told(expected_gain),
            best.setting
        );
        let config = Some(best.config.clone());
        return Verdict {
            advice: Advice::TrainAdapter,
            config,
            look_ups: None,
            expected_gain,
            sentence,
        };
    }
    let setting = format!("a linear read-out of layer {exit_layer}, {}", best.setting);
    let sentence = format!(
        "{}; an adapter there would have to draft {:.0} % of the tokens, and the read-out drafts \
         {:.0} %",
        refusal(&setting, expected_gain),
        100.0 * break_even,
        100.0 * accepted.value
    );
    Verdict {
        advice: Advice::DoNotSpeculate,
        config: None,
        look_ups: None,
        expected_gain,
        sentence,
    }
}

fn refusal(setting: &str, gain: Estimate) -> String {
    if gain.high > 0.0 {
        format!(
            "do not speculate on this evidence: the best without training, {setting}, may gain \
             nothing over the target alone, {}; more prompts would tell",
            told(gain)
        )
    } else {
        format!(
            "do not speculate: the best without training, {setting}, gives {} over the target alone",
            told(gain)
        )
    }
}

fn minus_one(speedup: Estimate) -> Estimate {
    let Estimate { value, low, high } = speedup;
    Estimate { value: value - 1.0, low: low - 1.0, high: high - 1.0 }
}

/// `+12.3 % (95 %: +8.0 to +16.1)`.
pub(super) fn told(gain: Estimate) -> String {
    let plain = |share: f64| format!("{:+.1}", 100.0 * share);
    format!("{} (95 %: {} to {})", percent(gain.value), plain(gain.low), plain(gain.high))
}

fn percent(share: f64) -> String {
    format!("{:+.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::{Bounds, ConfidenceThresholdConfig, FixedLengthConfig};

    use super::*;

    fn estimate(value: f64, half: f64) -> Estimate {
        Estimate { value, low: value - half, high: value + half }
    }

    fn fixed(speedup: Estimate) -> Promise {
        let config = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length: 4 });
        Promise { setting: "K = 4".into(), config, speedup }
    }

    fn confidence(speedup: Estimate) -> Promise {
        let config = StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
            confidence_threshold: 0.6,
            before_draw: false,
            bounds: Bounds { min: 1, max: 10 },
        });
        Promise { setting: "eta = 0.6".into(), config, speedup }
    }

    /// A pair whose K = 4 gives 1.2, η so much more than that, and a head so much more than η.
    fn pair(fixed_half: f64, eta: Estimate, head: Option<Estimate>) -> Verdict {
        let of_head = head.map(|gain| HeadOutlook {
            over_fixed: Estimate {
                value: eta.value + gain.value,
                low: eta.value + gain.low,
                high: eta.value + gain.high,
            },
            over_untrained: gain,
            speedup: estimate(1.2 * (1.0 + eta.value + gain.value), 0.03),
        });
        of_pair(
            &fixed(estimate(1.2, fixed_half)),
            &confidence(estimate(1.2 * (1.0 + eta.value), 0.03)),
            eta,
            of_head.as_ref(),
            Some(estimate(0.2, 0.02)),
        )
    }

    #[test]
    fn a_head_is_trained_where_it_surely_gains_over_what_needs_none() {
        let verdict = pair(0.03, estimate(0.05, 0.02), Some(estimate(0.06, 0.03)));
        assert_eq!(verdict.advice, Advice::TrainHead);
        assert!((verdict.expected_gain.value - 0.332).abs() < 1e-12);
        insta::assert_snapshot!(verdict.sentence, @"train a head: expect +33.2 % (95 %: +30.2 to +36.2) over the target alone, +6.0 % (95 %: +3.0 to +9.0) more than eta = 0.6, the best without one");
    }

    #[test]
    fn where_a_head_may_gain_nothing_a_rule_is_set() {
        for head in [estimate(0.06, 0.07), estimate(-0.05, 0.01), estimate(0.005, 0.001)] {
            let verdict = pair(0.03, estimate(0.05, 0.02), Some(head));
            assert_eq!(verdict.advice, Advice::JustSet, "{head:?}");
            assert!(verdict.sentence.starts_with("just set eta = 0.6: expect +26.0 %"));
            assert_eq!(verdict.config, Some(confidence(head).config));
        }
        let unknown = pair(0.03, estimate(0.05, 0.02), None);
        assert_eq!(unknown.advice, Advice::JustSet);
        assert!(unknown.sentence.contains("too few prompts"), "{}", unknown.sentence);
    }

    #[test]
    fn where_a_rule_may_gain_nothing_over_a_fixed_length_that_is_set() {
        let verdict = pair(0.03, estimate(0.02, 0.03), Some(estimate(-0.01, 0.03)));
        assert_eq!(verdict.advice, Advice::JustSet);
        insta::assert_snapshot!(verdict.sentence, @"just set K = 4: expect +20.0 % (95 %: +17.0 to +23.0) over the target alone; a head that knows what these prompts teach would change that by +1.0 % (95 %: -2.0 to +4.0), a perfect one gains +20.0 % over the best K");
    }

    #[test]
    fn where_nothing_surely_gains_there_is_no_speculation() {
        let straddling = pair(0.25, estimate(0.0, 0.03), Some(estimate(0.0, 0.05)));
        assert_eq!(straddling.advice, Advice::DoNotSpeculate);
        assert!(straddling.sentence.contains("more prompts would tell"), "{}", straddling.sentence);
        let slow = of_pair(
            &fixed(estimate(0.8, 0.05)),
            &confidence(estimate(0.8, 0.05)),
            estimate(0.0, 0.01),
            None,
            Some(estimate(0.1, 0.02)),
        );
        assert_eq!((slow.advice, slow.config), (Advice::DoNotSpeculate, None));
        insta::assert_snapshot!(slow.sentence, @"do not speculate: the best without training, K = 4, gives -20.0 % (95 %: -25.0 to -15.0) over the target alone");
        // Nor is a head trained that gains over a draft which slows the target down.
        let head = HeadOutlook {
            over_fixed: estimate(0.1, 0.02),
            over_untrained: estimate(0.1, 0.02),
            speedup: estimate(0.88, 0.05),
        };
        let slow = fixed(estimate(0.8, 0.05));
        let advised =
            of_pair(&slow, &slow, estimate(0.0, 0.01), Some(&head), Some(head.over_fixed));
        assert_eq!(advised.advice, Advice::DoNotSpeculate);
    }

    #[test]
    fn an_adapter_is_trained_where_a_linear_read_out_gains() {
        let of = |speedup| of_target(2, &fixed(speedup), estimate(0.3, 0.02), 0.45);
        let verdict = of(estimate(1.12, 0.04));
        assert_eq!(verdict.advice, Advice::TrainAdapter);
        insta::assert_snapshot!(verdict.sentence, @"train an adapter behind layer 2: a linear read-out of it would give +12.0 % (95 %: +8.0 to +16.0) over the target alone with K = 4, and an adapter learns more");
        let straddling = of(estimate(1.02, 0.04));
        assert_eq!(straddling.advice, Advice::DoNotSpeculate);
        assert!(straddling.sentence.contains("may gain nothing"), "{}", straddling.sentence);
        let slow = of(estimate(0.9, 0.04));
        assert_eq!(slow.advice, Advice::DoNotSpeculate);
        let told = "would have to draft 45 % of the tokens, and the read-out drafts 30 %";
        assert!(slow.sentence.ends_with(told), "{}", slow.sentence);
    }

    #[test]
    fn look_ups_are_advised_where_they_surely_gain_more_than_what_needs_no_training() {
        let look_ups: LookupFirst = "2x4".parse().expect("one");
        let set = || pair(0.03, estimate(0.02, 0.03), None);
        assert_eq!(set().beside_look_ups(look_ups, estimate(1.3, 0.4)), set());
        assert_eq!(set().beside_look_ups(look_ups, estimate(1.15, 0.05)), set());
        let verdict = set().beside_look_ups(look_ups, estimate(1.3, 0.05));
        assert_eq!((verdict.advice, verdict.config), (Advice::JustLookUp, None));
        assert_eq!(verdict.look_ups, Some(look_ups));
        insta::assert_snapshot!(verdict.sentence, @"just look up prompts, up to 4 candidates behind a match of 2: expect +30.0 % (95 %: +25.0 to +35.0) over the target alone; otherwise, just set K = 4: expect +20.0 % (95 %: +17.0 to +23.0) over the target alone; these are too few prompts to say what a head would know; a perfect one gains +20.0 % over the best K");
        let slow = of_target(2, &fixed(estimate(0.9, 0.04)), estimate(0.3, 0.02), 0.45);
        let verdict = slow.beside_look_ups(look_ups, estimate(1.1, 0.05));
        assert_eq!(verdict.advice, Advice::JustLookUp);
        // What is trained does more, and may be looked up before.
        let adapter = || of_target(2, &fixed(estimate(1.12, 0.04)), estimate(0.3, 0.02), 0.45);
        let verdict = adapter().beside_look_ups(look_ups, estimate(1.3, 0.05));
        assert_eq!(verdict.advice, Advice::TrainAdapter);
        assert_eq!(verdict.expected_gain, adapter().expected_gain);
        let more = "; prompt lookup alone, up to 4 candidates behind a match of 2, gives +30.0 % (95 %: \
                    +25.0 to +35.0), and can go before it";
        assert_eq!(verdict.sentence, adapter().sentence + more);
    }
}
