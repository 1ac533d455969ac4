//! The settings with which inference servers draft: a number of candidates, a minimum probability, or
//! a server's lookup.

use serde::{Deserialize, Serialize};

use crate::{
    Bounds, ConfidenceHeadConfig, ConfidenceThresholdConfig, FixedLengthConfig, HeadTiming,
    LookupFirst, NgramSimple, Recordings, RoundLengths, StopRuleConfig,
};

/// A setting for how a server drafts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Drafting {
    /// The maximum number of candidates per round.
    pub num_candidates: usize,
    /// The probability below which drafting stops: the drafter's largest among its top ten tokens, or
    /// its confidence head's. 0 if never.
    pub least_prob: f64,
    /// The number of tokens that a lookup must match; null for a drafter.
    pub num_matched: Option<usize>,
    /// Whether the lookup is vLLM's suffix decoding, which also searches earlier answers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_suffix: bool,
}

impl Drafting {
    /// Creates a setting that always drafts the same number of candidates.
    pub fn fixed(num_candidates: usize) -> Self {
        Self { num_candidates, least_prob: 0.0, num_matched: None, is_suffix: false }
    }

    /// Creates a setting for llama.cpp's lookup.
    pub fn look_up(ngram: NgramSimple) -> Self {
        Self { num_matched: Some(ngram.num_matched), ..Self::fixed(ngram.most) }
    }

    /// Creates a setting for vLLM's suffix decoding.
    pub fn suffix(num_candidates: usize) -> Self {
        Self { num_matched: Some(1), is_suffix: true, ..Self::fixed(num_candidates) }
    }

    /// Replays a lookup, and counts the rounds of each response by number of candidates. `None` for a
    /// drafter.
    pub fn looked_up(&self, recordings: &Recordings) -> Option<Vec<RoundLengths>> {
        let (num_matched, most) = (self.num_matched?, self.num_candidates);
        let suffix = LookupFirst { answers: true, min_match: num_matched, most };
        Some(match self.is_suffix {
            true => recordings.look_up_lengths(suffix),
            false => recordings.ngram_lengths(NgramSimple { num_matched, most }),
        })
    }

    /// Returns the stop rule of a drafter. `head` is the time at which its acceptance head predicts,
    /// or `None` without a head.
    pub fn rule(&self, head: Option<HeadTiming>) -> StopRuleConfig {
        let (candidate_length, least) = (self.num_candidates, self.least_prob);
        let bounds = Bounds { min: 0, max: candidate_length };
        match (least > 0.0, head) {
            (false, _) => FixedLengthConfig { candidate_length }.into(),
            (true, Some(HeadTiming::BeforeDraw)) => {
                ConfidenceHeadConfig { acceptance_threshold: least, bounds }.into()
            }
            (true, _) => {
                let confidence_threshold = least;
                ConfidenceThresholdConfig { confidence_threshold, before_draw: true, bounds }.into()
            }
        }
    }

    /// Describes the setting in words, such as `K = 3` or `lookup 4x3`.
    pub fn text(&self) -> String {
        let Self { num_candidates, least_prob, num_matched, .. } = self;
        match num_matched {
            Some(_) if self.is_suffix => format!("suffix decoding up to {num_candidates}"),
            Some(num_matched) => format!("lookup {num_matched}x{num_candidates}"),
            None if *least_prob > 0.0 => {
                format!("K = {num_candidates} while probabilities reach {least_prob}")
            }
            None => format!("K = {num_candidates}"),
        }
    }
}
