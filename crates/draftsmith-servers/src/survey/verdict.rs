//! The advice of a survey, in one sentence: train a head, train an adapter, set a rule that needs
//! no training, use prompt lookup, or do not speculate.
//!
//! Advice relies on intervals, not point estimates. If a gain may be zero, we advise the simpler
//! option.

use draftsmith_report::{LookUps, ReplayRow, signed_percent};
use draftsmith_theory::{Estimate, LookupFirst, StopRuleConfig};
use serde::Serialize;

use super::halves::HalfPromise;

/// The minimum gain over untrained options at which we advise to train a head.
const WORTH_TRAINING: f64 = 0.01;

/// The advised action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Advice {
    /// Train an acceptance head for the draft model.
    TrainHead,
    /// Train a self-draft adapter.
    TrainAdapter,
    /// Use a rule that needs no training.
    JustSet,
    /// Use prompt lookup, without a draft model or adapter.
    JustLookUp,
    /// Decode with the target alone.
    DoNotSpeculate,
}

/// The advice with its reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SurveyVerdict {
    /// The advised action.
    pub advice: Advice,
    /// The rule to set, or the adapter's fixed candidate length; null if there is none.
    pub config: Option<StopRuleConfig>,
    /// The prompt lookup settings; null if something else is advised.
    pub look_ups: Option<LookupFirst>,
    /// The expected speedup over plain decoding, minus 1, of the advised option; if speculation is
    /// advised against, of the best option.
    pub expected_gain: Estimate,
    /// The advice in words.
    pub sentence: String,
}

/// The expected gains of an acceptance head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HeadOutlook {
    /// The gain over the best fixed length.
    pub over_fixed: Estimate,
    /// The gain over the best rule that needs no training.
    pub over_untrained: Estimate,
    /// The speedup over plain decoding.
    pub speedup: Estimate,
}

/// What a survey knows about the benefit of training an acceptance head.
#[derive(Debug, Clone, Copy)]
pub(super) enum KnownOfHeads<'a> {
    /// The expected gains.
    Outlook(&'a HeadOutlook),
    /// There were too few answers.
    TooLittle,
    /// No head was tried.
    NotProbed,
}

impl SurveyVerdict {
    fn new(
        advice: Advice,
        config: Option<StopRuleConfig>,
        expected_gain: Estimate,
        sentence: String,
    ) -> Self {
        Self { advice, config, look_ups: None, expected_gain, sentence }
    }

    /// Advises on a target and a drafter. `fixed` is the best fixed length; `untrained` is the best
    /// rule without training, and `untrained_gain` its gain over `fixed`. `ceiling` is a perfect head's
    /// gain, if known.
    pub(super) fn of_pair(
        fixed: &HalfPromise,
        untrained: &HalfPromise,
        untrained_gain: Estimate,
        known: KnownOfHeads<'_>,
        ceiling: Option<Estimate>,
    ) -> Self {
        // A fixed length is simpler, and every runtime supports it.
        let is_better = untrained_gain.low > 0.0;
        let set = if is_better { untrained } else { fixed };
        let gain_of =
            |head: &HeadOutlook| if is_better { head.over_untrained } else { head.over_fixed };
        if let KnownOfHeads::Outlook(head) = known
            && let gain = gain_of(head)
            && gain.low > 0.0
            && gain.value >= WORTH_TRAINING
            && head.speedup.low > 1.0
        {
            let expected_gain = head.speedup.map(|speedup| speedup - 1.0);
            let sentence = format!(
                "train a head: expect {} over the target alone, {} more than {}, the best without one",
                gain_text(expected_gain),
                gain_text(gain),
                set.setting
            );
            return Self::new(Advice::TrainHead, None, expected_gain, sentence);
        }
        let expected_gain = set.speedup.map(|speedup| speedup - 1.0);
        if expected_gain.low <= 0.0 {
            let sentence = refusal(&set.setting, expected_gain);
            return Self::new(Advice::DoNotSpeculate, None, expected_gain, sentence);
        }
        let about_heads = match known {
            KnownOfHeads::Outlook(head) => {
                let gain = gain_text(gain_of(head));
                format!("; a head that knows what these prompts teach would change that by {gain},")
            }
            KnownOfHeads::TooLittle => {
                "; these are too few prompts to say what a head would know;".to_owned()
            }
            KnownOfHeads::NotProbed => ";".to_owned(),
        };
        let what = if let KnownOfHeads::NotProbed = known { "head" } else { "one" };
        let about_heads = match ceiling.filter(|ceiling| ceiling.value > 0.0) {
            Some(ceiling) => {
                let gain = signed_percent(ceiling.value);
                format!("{about_heads} a perfect {what} gains {gain} over the best K")
            }
            None => about_heads.trim_end_matches([',', ';']).to_owned(),
        };
        let sentence = format!(
            "just set {}: expect {} over the target alone{about_heads}",
            set.setting,
            gain_text(expected_gain)
        );
        Self::new(Advice::JustSet, Some(set.config.clone()), expected_gain, sentence)
    }

    /// Advises on a target without a draft model. `best` is the result of the best linear read-out,
    /// of a layer or, if `exit_layer` is `None`, of an EAGLE-3 drafter's inputs. `accepted` is the
    /// share of tokens that it drafts correctly, and `break_even` the share above which one
    /// candidate per round pays.
    pub(super) fn of_target(
        exit_layer: Option<usize>,
        best: &HalfPromise,
        accepted: Estimate,
        break_even: f64,
    ) -> Self {
        let gain = best.speedup.map(|speedup| speedup - 1.0);
        if gain.low > 0.0 {
            let (what, reads, learner) = match exit_layer {
                Some(layer) => (format!("an adapter after layer {layer}"), "it", "an adapter"),
                None => ("an EAGLE-3 drafter".to_owned(), "what it reads", "a drafter"),
            };
            let sentence = format!(
                "train {what}: a linear read-out of {reads} would give {} over the target alone with {}, and \
                 {learner} learns more",
                gain_text(gain),
                best.setting
            );
            return Self::new(Advice::TrainAdapter, Some(best.config.clone()), gain, sentence);
        }
        let (reads, learner) = match exit_layer {
            Some(layer) => (format!("layer {layer}"), "an adapter there"),
            None => ("what an EAGLE-3 drafter reads".to_owned(), "the drafter"),
        };
        let setting = format!("a linear read-out of {reads}, {}", best.setting);
        let sentence = format!(
            "{}; {learner} would have to draft {:.0} % of the tokens, and the read-out drafts \
             {:.0} %",
            refusal(&setting, gain),
            100.0 * break_even,
            100.0 * accepted.value
        );
        Self::new(Advice::DoNotSpeculate, None, gain, sentence)
    }

    /// Compares the advice with prompt lookup alone. We advise lookup if its gain is certain and
    /// exceeds that of other untrained options. If we advise training, we mention lookup as an
    /// addition.
    pub(super) fn beside_look_ups(self, found: &LookUps) -> Self {
        let gain = found.speedup.map(|speedup| speedup - 1.0);
        let (look_ups, sentence) = (look_ups_text(found.look_ups), &self.sentence);
        if gain.low <= 0.0 {
            return self;
        }
        match self.advice {
            Advice::TrainHead | Advice::TrainAdapter => Self {
                sentence: format!(
                    "{sentence}; prompt lookup alone, {look_ups}, gives {}, and can go before it",
                    gain_text(gain)
                ),
                ..self
            },
            _ if gain.value > self.expected_gain.value => Self {
                advice: Advice::JustLookUp,
                config: None,
                look_ups: Some(found.look_ups),
                expected_gain: gain,
                sentence: format!(
                    "just look up prompts, {look_ups}: expect {} over the target alone; otherwise, \
                     {sentence}",
                    gain_text(gain)
                ),
            },
            _ => self,
        }
    }

    /// Mentions the best rule of the table if it gains more than what is advised. Such a rule is fitted to
    /// recordings, or looks up prompts first, and only our decoder has it.
    pub(super) fn beside_fitted(mut self, rules: &[ReplayRow]) -> Self {
        let best =
            rules.iter().max_by(|one, other| one.speedup.value.total_cmp(&other.speedup.value));
        let gain = |row: &ReplayRow| row.speedup.map(|speedup| speedup - 1.0);
        let best = best.filter(|row| gain(row).value > self.expected_gain.value);
        if let Some(row) = best.filter(|row| gain(row).low > 0.0) {
            let (label, gain) = (row.label(), gain_text(gain(row)));
            self.sentence +=
                &format!("; in our decoder, {label} gives {gain}, which `tune = {{}}` sets up");
        }
        self
    }
}

fn refusal(setting: &str, gain: Estimate) -> String {
    let gain_text = gain_text(gain);
    if gain.high > 0.0 {
        format!(
            "do not speculate on this evidence: the best without training, {setting}, may gain \
             nothing over the target alone, {gain_text}; more prompts on a quiet machine would tell"
        )
    } else {
        format!(
            "do not speculate: the best without training, {setting}, gives {gain_text} over the target \
             alone"
        )
    }
}

/// Describes lookup settings in words: `up to 4 candidates after a match of 2`.
pub(super) fn look_ups_text(LookupFirst { answers, min_match, most }: LookupFirst) -> String {
    let answers = if answers { ", also in stored answers" } else { "" };
    format!("up to {most} candidates after a match of {min_match}{answers}")
}

/// Formats a gain with its interval, such as `+12.3 % (95 %: +8.0 to +16.1)`.
pub fn gain_text(gain: Estimate) -> String {
    let [value, low, high] = [gain.value, gain.low, gain.high].map(signed_percent);
    let bare = |text: &str| text.trim_end_matches(" %").to_owned();
    format!("{value} (95 %: {} to {})", bare(&low), bare(&high))
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::{Bounds, ConfidenceThresholdConfig, FixedLengthConfig};

    use super::*;

    fn estimate(value: f64, half: f64) -> Estimate {
        Estimate { value, low: value - half, high: value + half }
    }

    fn fixed(speedup: Estimate) -> HalfPromise {
        let config = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length: 4 });
        HalfPromise { setting: "K = 4".into(), config, speedup }
    }

    fn confidence(speedup: Estimate) -> HalfPromise {
        let config = StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
            confidence_threshold: 0.6,
            before_draw: false,
            bounds: Bounds { min: 1, max: 10 },
        });
        HalfPromise { setting: "eta = 0.6".into(), config, speedup }
    }

    /// Returns the verdict on a pair with a speedup of 1.2 at K = 4. `eta` is the gain of η over K
    /// = 4, and `head` the gain of a head over η.
    fn pair(fixed_half: f64, eta: Estimate, head: Option<Estimate>) -> SurveyVerdict {
        let of_head = head.map(|gain| HeadOutlook {
            over_fixed: Estimate {
                value: eta.value + gain.value,
                low: eta.value + gain.low,
                high: eta.value + gain.high,
            },
            over_untrained: gain,
            speedup: estimate(1.2 * (1.0 + eta.value + gain.value), 0.03),
        });
        SurveyVerdict::of_pair(
            &fixed(estimate(1.2, fixed_half)),
            &confidence(estimate(1.2 * (1.0 + eta.value), 0.03)),
            eta,
            of_head.as_ref().map_or(KnownOfHeads::TooLittle, KnownOfHeads::Outlook),
            Some(estimate(0.2, 0.02)),
        )
    }

    #[test]
    fn a_head_is_trained_if_its_gain_over_untrained_rules_is_certain() {
        let verdict = pair(0.03, estimate(0.05, 0.02), Some(estimate(0.06, 0.03)));
        assert_eq!(verdict.advice, Advice::TrainHead);
        assert!((verdict.expected_gain.value - 0.332).abs() < 1e-12);
        insta::assert_snapshot!(verdict.sentence, @"train a head: expect +33.2 % (95 %: +30.2 to +36.2) over the target alone, +6.0 % (95 %: +3.0 to +9.0) more than eta = 0.6, the best without one");
    }

    #[test]
    fn a_rule_is_set_if_the_gain_of_a_head_may_be_zero() {
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
    fn a_fixed_length_is_set_if_the_gain_of_other_rules_may_be_zero() {
        let verdict = pair(0.03, estimate(0.02, 0.03), Some(estimate(-0.01, 0.03)));
        assert_eq!(verdict.advice, Advice::JustSet);
        insta::assert_snapshot!(verdict.sentence, @"just set K = 4: expect +20.0 % (95 %: +17.0 to +23.0) over the target alone; a head that knows what these prompts teach would change that by +1.0 % (95 %: -2.0 to +4.0), a perfect one gains +20.0 % over the best K");
    }

    #[test]
    fn speculation_is_advised_against_if_no_gain_is_certain() {
        let straddling = pair(0.25, estimate(0.0, 0.03), Some(estimate(0.0, 0.05)));
        assert_eq!(straddling.advice, Advice::DoNotSpeculate);
        assert!(
            straddling.sentence.contains("more prompts on a quiet machine would tell"),
            "{}",
            straddling.sentence
        );
        let slow = SurveyVerdict::of_pair(
            &fixed(estimate(0.8, 0.05)),
            &confidence(estimate(0.8, 0.05)),
            estimate(0.0, 0.01),
            KnownOfHeads::TooLittle,
            Some(estimate(0.1, 0.02)),
        );
        assert_eq!((slow.advice, slow.config), (Advice::DoNotSpeculate, None));
        insta::assert_snapshot!(slow.sentence, @"do not speculate: the best without training, K = 4, gives -20.0 % (95 %: -25.0 to -15.0) over the target alone");
        // We do not advise a head if the draft model stays slower than plain decoding.
        let head = HeadOutlook {
            over_fixed: estimate(0.1, 0.02),
            over_untrained: estimate(0.1, 0.02),
            speedup: estimate(0.88, 0.05),
        };
        let slow = fixed(estimate(0.8, 0.05));
        let advised = SurveyVerdict::of_pair(
            &slow,
            &slow,
            estimate(0.0, 0.01),
            KnownOfHeads::Outlook(&head),
            Some(head.over_fixed),
        );
        assert_eq!(advised.advice, Advice::DoNotSpeculate);
    }

    #[test]
    fn an_adapter_is_trained_if_a_linear_read_out_gains() {
        let of =
            |speedup| SurveyVerdict::of_target(Some(2), &fixed(speedup), estimate(0.3, 0.02), 0.45);
        let verdict = of(estimate(1.12, 0.04));
        assert_eq!(verdict.advice, Advice::TrainAdapter);
        insta::assert_snapshot!(verdict.sentence, @"train an adapter after layer 2: a linear read-out of it would give +12.0 % (95 %: +8.0 to +16.0) over the target alone with K = 4, and an adapter learns more");
        let straddling = of(estimate(1.02, 0.04));
        assert_eq!(straddling.advice, Advice::DoNotSpeculate);
        assert!(straddling.sentence.contains("may gain nothing"), "{}", straddling.sentence);
        let slow = of(estimate(0.9, 0.04));
        assert_eq!(slow.advice, Advice::DoNotSpeculate);
        let ending = "would have to draft 45 % of the tokens, and the read-out drafts 30 %";
        assert!(slow.sentence.ends_with(ending), "{}", slow.sentence);
    }

    #[test]
    fn look_ups_are_advised_if_they_certainly_gain_more_than_untrained_rules() {
        let look_ups: LookupFirst = "2x4".parse().expect("one");
        let found = |speedup: Estimate| LookUps { look_ups, speedup };
        let set = || pair(0.03, estimate(0.02, 0.03), None);
        assert_eq!(set().beside_look_ups(&found(estimate(1.3, 0.4))), set());
        assert_eq!(set().beside_look_ups(&found(estimate(1.15, 0.05))), set());
        let verdict = set().beside_look_ups(&found(estimate(1.3, 0.05)));
        assert_eq!((verdict.advice, verdict.config), (Advice::JustLookUp, None));
        assert_eq!(verdict.look_ups, Some(look_ups));
        insta::assert_snapshot!(verdict.sentence, @"just look up prompts, up to 4 candidates after a match of 2: expect +30.0 % (95 %: +25.0 to +35.0) over the target alone; otherwise, just set K = 4: expect +20.0 % (95 %: +17.0 to +23.0) over the target alone; these are too few prompts to say what a head would know; a perfect one gains +20.0 % over the best K");
        let slow = SurveyVerdict::of_target(
            Some(2),
            &fixed(estimate(0.9, 0.04)),
            estimate(0.3, 0.02),
            0.45,
        );
        let verdict = slow.beside_look_ups(&found(estimate(1.1, 0.05)));
        assert_eq!(verdict.advice, Advice::JustLookUp);
        // Training is still advised, with prompt lookup as an addition.
        let adapter = || {
            SurveyVerdict::of_target(
                Some(2),
                &fixed(estimate(1.12, 0.04)),
                estimate(0.3, 0.02),
                0.45,
            )
        };
        let verdict = adapter().beside_look_ups(&found(estimate(1.3, 0.05)));
        assert_eq!(verdict.advice, Advice::TrainAdapter);
        assert_eq!(verdict.expected_gain, adapter().expected_gain);
        let more = "; prompt lookup alone, up to 4 candidates after a match of 2, gives +30.0 % (95 %: \
                    +25.0 to +35.0), and can go before it";
        assert_eq!(verdict.sentence, adapter().sentence + more);
    }
}
