//! What drafters, stop rules, ways of decoding and costs are called, in the file and in words.

use std::fmt;

use draftsmith_theory::{AcceptanceSignal, Decoding, StopRuleConfig};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// What proposes candidates; in the order rows are shown. In the file a string: `none`, `draft`,
/// `self_draft_1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DrafterName {
    /// Nothing: the target decodes alone.
    None,
    /// A separate draft model.
    Draft,
    /// Kangaroo: the target's own first layers and an adapter.
    SelfDraft {
        /// The layers run before the adapter.
        exit_layer: usize,
    },
}

/// What ends a draft phase; in the order rows are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopRuleName {
    /// Nothing is drafted.
    None,
    /// K candidates a round.
    FixedLength,
    /// transformers' schedule: K moves with what is accepted.
    Heuristic,
    /// SpecDec++: the acceptance head's threshold h, in the paper's form, a candidate late.
    RejectionThreshold,
    /// The same, asked about each candidate before the next is drawn.
    RejectionThresholdWithoutLag,
    /// Kangaroo: the threshold η of the draft's own confidence.
    ConfidenceThreshold,
    /// transformers: the threshold of the candidate's own probability.
    CandidateProbThreshold,
    /// The threshold of the product of confidences.
    JointConfidence,
    /// SVIP: the threshold of the draft's entropy.
    EntropyThreshold,
    /// Cost-optimal stopping by the acceptance head.
    CostOptimalHead,
    /// Cost-optimal stopping by the draft's confidence.
    CostOptimalConfidence,
    /// Cost-optimal stopping by the draft's entropy.
    CostOptimalEntropy,
}

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DecodingName {
    /// The most probable token.
    Greedy,
    /// A token drawn from the warped distribution.
    Sampled,
}

/// The two roads to candidates. What lies on different ones takes different files to serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Road {
    /// A second, smaller model.
    SeparateDraft,
    /// The target's own first layers and an adapter, wherever they are left.
    SelfDraft,
}

impl DrafterName {
    /// The road the drafter lies on; None for the target alone.
    pub(crate) fn road(self) -> Option<Road> {
        match self {
            Self::None => None,
            Self::Draft => Some(Road::SeparateDraft),
            Self::SelfDraft { .. } => Some(Road::SelfDraft),
        }
    }

    /// The drafter in words: `separate draft`, `self-draft, exit 1`; nothing for the target alone.
    pub(crate) fn text(self) -> String {
        match self {
            Self::None => String::new(),
            Self::Draft => "separate draft".into(),
            Self::SelfDraft { exit_layer } => format!("self-draft, exit {exit_layer}"),
        }
    }
}

impl StopRuleName {
    /// The name of a rule with settings.
    pub(crate) fn of(config: &StopRuleConfig) -> Self {
        match config {
            StopRuleConfig::FixedLength { .. } => Self::FixedLength,
            StopRuleConfig::Heuristic { .. } => Self::Heuristic,
            StopRuleConfig::RejectionThreshold { without_lag: false, .. } => {
                Self::RejectionThreshold
            }
            StopRuleConfig::RejectionThreshold { without_lag: true, .. } => {
                Self::RejectionThresholdWithoutLag
            }
            StopRuleConfig::ConfidenceThreshold { .. } => Self::ConfidenceThreshold,
            StopRuleConfig::CandidateProbThreshold { .. } => Self::CandidateProbThreshold,
            StopRuleConfig::JointConfidence { .. } => Self::JointConfidence,
            StopRuleConfig::EntropyThreshold { .. } => Self::EntropyThreshold,
            StopRuleConfig::CostOptimal(config) => match config.signal {
                AcceptanceSignal::AcceptanceProb => Self::CostOptimalHead,
                AcceptanceSignal::Confidence => Self::CostOptimalConfidence,
                AcceptanceSignal::Entropy => Self::CostOptimalEntropy,
            },
        }
    }

    /// What files call the rule.
    pub(crate) fn file_name(self) -> &'static str {
        match self {
            Self::None => "plain",
            Self::FixedLength => "fixed",
            Self::Heuristic => "heuristic",
            Self::RejectionThreshold => "head",
            Self::RejectionThresholdWithoutLag => "head-without-lag",
            Self::ConfidenceThreshold => "confidence",
            Self::CandidateProbThreshold => "candidate-prob",
            Self::JointConfidence => "joint-confidence",
            Self::EntropyThreshold => "entropy",
            Self::CostOptimalHead => "cost-head",
            Self::CostOptimalConfidence => "cost-confidence",
            Self::CostOptimalEntropy => "cost-entropy",
        }
    }

    /// What the rule's number is called, in ASCII; None without a rule. `worth` is the least that a
    /// draft forward must bring in tokens, by what its brackets name.
    pub(crate) fn symbol(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::FixedLength => Some("K"),
            Self::Heuristic => Some("heuristic K"),
            Self::RejectionThreshold => Some("h"),
            Self::RejectionThresholdWithoutLag => Some("lagless h"),
            Self::ConfidenceThreshold => Some("eta"),
            Self::CandidateProbThreshold => Some("q"),
            Self::JointConfidence => Some("joint eta"),
            Self::EntropyThreshold => Some("entropy h"),
            Self::CostOptimalHead => Some("worth(head)"),
            Self::CostOptimalConfidence => Some("worth(eta)"),
            Self::CostOptimalEntropy => Some("worth(H)"),
        }
    }

    /// The rule in words: what goes on a page that has room.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::None => "target alone",
            Self::FixedLength => "fixed length",
            Self::Heuristic => "transformers\u{2019} heuristic",
            Self::RejectionThreshold => "acceptance head",
            Self::RejectionThresholdWithoutLag => "acceptance head, no lag",
            Self::ConfidenceThreshold => "confidence",
            Self::CandidateProbThreshold => "candidate\u{2019}s probability",
            Self::JointConfidence => "joint confidence",
            Self::EntropyThreshold => "entropy",
            Self::CostOptimalHead => "cost-optimal, by head",
            Self::CostOptimalConfidence => "cost-optimal, by confidence",
            Self::CostOptimalEntropy => "cost-optimal, by entropy",
        }
    }

    /// The rule at a setting: `target alone`, `K = 6`, `h = 0.7`.
    pub(crate) fn label(self, setting: Option<f64>) -> String {
        match self.symbol() {
            Some(symbol) => format!("{symbol} = {}", setting_text(setting)),
            None => "target alone".into(),
        }
    }
}

/// A setting's number alone: `6`, `0.7`, three digits of one that was worked out; `?` where a rule
/// has none.
pub(super) fn setting_text(setting: Option<f64>) -> String {
    let Some(setting) = setting else { return "?".into() };
    let text = setting.to_string();
    if text.len() <= 5 || !setting.is_finite() || setting == 0.0 {
        return text;
    }
    let decimals = (2.0 - setting.abs().log10().floor()).clamp(0.0, 6.0) as usize;
    let text = format!("{setting:.decimals$}");
    if decimals == 0 { text } else { text.trim_end_matches('0').trim_end_matches('.').into() }
}

/// What a self-draft's name begins with in the file; its exit layer follows.
const SELF_DRAFT: &str = "self_draft_";

impl fmt::Display for DrafterName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => formatter.write_str("none"),
            Self::Draft => formatter.write_str("draft"),
            Self::SelfDraft { exit_layer } => write!(formatter, "{SELF_DRAFT}{exit_layer}"),
        }
    }
}

impl Serialize for DrafterName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DrafterName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let exit_layer = || name.strip_prefix(SELF_DRAFT)?.parse().ok();
        let known = match name.as_str() {
            "none" => Some(Self::None),
            "draft" => Some(Self::Draft),
            _ => exit_layer().map(|exit_layer| Self::SelfDraft { exit_layer }),
        };
        // `+1` and `01` are numbers too, but no name of ours: what is read is what would be
        // written.
        known.filter(|known| known.to_string() == name).ok_or_else(|| {
            let expected = "`none`, `draft` or `self_draft_` and an exit layer";
            de::Error::custom(format!("unknown drafter `{name}`, expected {expected}"))
        })
    }
}

impl DecodingName {
    /// The name of a way of decoding.
    pub(crate) fn of(decoding: &Decoding) -> Self {
        match decoding {
            Decoding::Greedy => Self::Greedy,
            Decoding::Sampled(_) => Self::Sampled,
        }
    }

    /// The way of decoding in words.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Greedy => "greedy",
            Self::Sampled => "sampled",
        }
    }
}

/// Whose costs a replay is judged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CostSource {
    /// Measured here.
    Machine,
    /// SpecDec++'s: (0.0234, 0.112) s, rows for nothing.
    Paper,
}

impl CostSource {
    /// Whose costs in words.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Machine => "costs of this machine",
            Self::Paper => "costs of the SpecDec++ paper",
        }
    }
}
