//! The recipe's `[head]` section: how an acceptance head is trained.
//!
//! The defaults are the SpecDec++ authors' run: what their script sets, and the defaults of the
//! Hugging Face Trainer for what it leaves open.

use draftsmith_model::{HeadForm, HeadInput, HeadReads, WeightDtype};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::TrainError;
use crate::head::sweep::{HeadSweep, SweptSettings, check_num_layers};
use crate::ranges::{Range, check_counts, check_numbers};
use crate::run::optimizer::OptimizerSettings;
use crate::section::Section;
use crate::states::{FeatureFormat, Features};

/// What a head learns to predict at a token of the draft's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadLabels {
    /// min(1, p/q) at a token that the draft drew, of the distributions as served: SpecDec++'s.
    #[default]
    Sampled,
    /// Σ min(p, q) at its position, the mean of that over what the draft could have drawn: less
    /// noise, but nothing of the token itself.
    Overlap,
    /// Whether the draft's most probable token is the target's: what greedy decoding accepts.
    Greedy,
    /// What became of the candidates that rounds along the data's responses would meet, whether
    /// they were decoded greedily or sampled: the distribution met in use. Nothing is mixed.
    Rollouts,
}

/// The labels that tokens of the draft's have in a mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MixedLabels {
    Sampled,
    Overlap,
    Greedy,
}

impl HeadLabels {
    /// The labels in a mixture; None where nothing is mixed.
    pub(crate) fn mixed(self) -> Option<MixedLabels> {
        match self {
            Self::Sampled => Some(MixedLabels::Sampled),
            Self::Overlap => Some(MixedLabels::Overlap),
            Self::Greedy => Some(MixedLabels::Greedy),
            Self::Rollouts => None,
        }
    }
}

/// The settings of [`train_heads`](crate::train_heads). Every key may be left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeadTraining {
    /// Residual blocks D of the head, 0 to 64. 3: the best of SpecDec++'s sweep over 0 to 4.
    pub num_layers: usize,
    /// Whether one block serves every depth. True: the authors' code, and the only form that their
    /// class can load.
    pub tied: bool,
    /// Which hidden state the head reads: `candidate`, the one at the candidate's own position, or
    /// `look-ahead`, the one it was drawn from, with its embedding and log-probability, which ends
    /// rounds one draft forward earlier. Candidate: the authors'.
    pub form: HeadForm,
    /// Further inputs: any of `entropy` and `top_prob`, of the distribution that the candidate was drawn
    /// from. Empty: the authors'.
    pub inputs: Vec<HeadInput>,
    /// What is predicted: `sampled`, min(1, p/q) at a drawn token; `overlap`, its mean Σ min(p, q);
    /// `greedy`, whether both models' most probable tokens are one; or `rollouts`, what became of
    /// the candidates that rounds along the responses meet, which are then recorded first. Sampled:
    /// the authors'.
    pub labels: HeadLabels,
    /// Of labels from rollouts: how many candidates are recorded from each rejected one on, itself
    /// included, 1 or more. 1: ours; those behind a rejected one are met by rounds, but not by
    /// verification.
    pub rollout_length: usize,
    /// w_rej, the loss weight of the rejected class, above 0. 6: the best of SpecDec++'s sweep over
    /// 1, 3, 6 and 12 (§4.1).
    pub rejection_weight: f64,
    /// The share of positions that keep the target's token and have no label, from 0 to below 1.
    /// 0.15: the authors' code.
    pub mixing_ratio: f64,
    /// The type that the frozen draft and the head are computed in: `"f32"`, or `"bf16"` on a GPU.
    /// Parameters, optimizer and losses are f32 either way. f32: ours; the authors train in bf16.
    pub dtype: WeightDtype,
    /// `"recompute"`: the drafter's hidden states are computed in each epoch; `"cache"`: once, and kept
    /// on the disk, for this training and others. With labels from rollouts alone: a mixture is
    /// another text in each epoch.
    pub features: Features,
    /// How hidden states are kept: `"f16"`, or `"int8"` with a scale for each token.
    pub features_format: FeatureFormat,
    /// How long, in which steps and at which rate it is trained.
    #[serde(deserialize_with = "read_optimizer")]
    pub optimizer: OptimizerSettings,
    /// Heads of several depths, rejection weights and mixing ratios, in place of one.
    pub sweep: Option<HeadSweep>,
}

impl Default for HeadTraining {
    fn default() -> Self {
        Self {
            num_layers: 3,
            tied: true,
            form: HeadForm::Candidate,
            inputs: Vec::new(),
            labels: HeadLabels::Sampled,
            rollout_length: 1,
            rejection_weight: 6.0,
            mixing_ratio: 0.15,
            dtype: WeightDtype::F32,
            features: Features::Recompute,
            features_format: FeatureFormat::F16,
            optimizer: OptimizerSettings::HEAD,
            sweep: None,
        }
    }
}

impl HeadTraining {
    /// What tells a head from the others of a sweep: `d3-w6-r0.15` for a depth of 3, a rejection
    /// weight of 6 and a mixing ratio of 0.15.
    pub fn name(&self) -> String {
        format!("d{}-w{}-r{}", self.num_layers, self.rejection_weight, self.mixing_ratio)
    }

    /// Whether a head of these settings sees the same batches, in the same steps with the same
    /// learning rates, as one of `other`'s.
    pub(crate) fn shares_steps_with(&self, other: &Self) -> bool {
        let Self { num_layers, tied, rejection_weight, .. } = *self;
        *self == Self { num_layers, tied, rejection_weight, ..other.clone() }
    }

    /// What the head reads.
    pub fn reads(&self) -> HeadReads {
        HeadReads::new(self.form, &self.inputs)
    }

    /// The heads that these settings stand for, a list for each pass over the data: one head, or
    /// those of the sweep, ratio by ratio. None of them has a sweep.
    pub fn passes(&self) -> Vec<Vec<Self>> {
        let alone = SweptSettings {
            num_layers: self.num_layers,
            rejection_weight: self.rejection_weight,
            mixing_ratio: self.mixing_ratio,
        };
        let head = |swept| {
            let SweptSettings { num_layers, rejection_weight, mixing_ratio } = swept;
            Self { num_layers, rejection_weight, mixing_ratio, sweep: None, ..self.clone() }
        };
        let passes = self.sweep.clone().unwrap_or_default().passes(alone).into_iter();
        passes.map(|pass| pass.into_iter().map(head).collect()).collect()
    }

    /// Checks every setting's range.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key of `section` that is out of its range.
    pub fn validate(&self, section: Section) -> Result<(), TrainError> {
        check_num_layers(section, "num_layers", self.num_layers)?;
        self.optimizer.check(section)?;
        self.sweep.iter().try_for_each(|sweep| sweep.validate(section))?;
        check_numbers(
            section,
            &[
                ("rejection_weight", self.rejection_weight, Range::Positive),
                ("mixing_ratio", self.mixing_ratio, Range::BelowOne),
            ],
        )?;
        if self.features == Features::Cache && self.labels.mixed().is_some() {
            return Err(TrainError::Setting {
                section,
                key: "features",
                value: "`cache`".to_owned(),
                expected: "`recompute`: with these labels each epoch mixes tokens of target and draft \
                           afresh, a text of its own with hidden states of its own; those of \
                           `labels = \"rollouts\"` can be cached",
            });
        }
        check_counts(section, &[("rollout_length", self.rollout_length)])
    }
}

fn read_optimizer<'de, D: Deserializer<'de>>(from: D) -> Result<OptimizerSettings, D::Error> {
    OptimizerSettings::read_over(OptimizerSettings::HEAD, from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_the_default_and_a_misspelt_key_is_named() {
        let read = |text: &str| toml::from_str::<HeadTraining>(text);
        assert_eq!(read("").unwrap(), HeadTraining::default());
        assert_eq!(read("num_layers = 1\n[optimizer]\nepsilon = 1e-6").unwrap().num_layers, 1);
        let ahead = read("form = 'look-ahead'\ninputs = ['top_prob', 'entropy']").unwrap().reads();
        assert!(ahead.looks_ahead() && ahead.inputs() == [HeadInput::Entropy, HeadInput::TopProb]);
        for (text, expected) in [("inputs = ['x']", "top_prob"), ("labels = 'x'", "overlap")] {
            let message = read(text).unwrap_err().to_string();
            assert!(message.contains("`x`") && message.contains(expected), "{message}");
        }
        let message = read("num_layer = 1").unwrap_err().to_string();
        assert!(message.contains("num_layer"), "{message}");
    }

    #[test]
    fn every_default_is_in_range_and_bad_values_name_their_key() {
        for section in [Section::Head, Section::AdapterHead] {
            HeadTraining::default().validate(section).unwrap();
            let check = |key: &str, bad: HeadTraining| {
                let message = bad.validate(section).unwrap_err().to_string();
                assert!(message.starts_with(&format!("`{section}.{key}` is ")), "{message}");
            };
            let default = HeadTraining::default;
            check("num_layers", HeadTraining { num_layers: 65, ..default() });
            check("rollout_length", HeadTraining { rollout_length: 0, ..default() });
            check("features", HeadTraining { features: Features::Cache, ..default() });
            let labels = HeadLabels::Rollouts;
            let cached = HeadTraining { features: Features::Cache, labels, ..default() };
            cached.validate(section).unwrap();
            for bad in [f64::NAN, -1.0, f64::INFINITY] {
                check("rejection_weight", HeadTraining { rejection_weight: bad, ..default() });
                check("mixing_ratio", HeadTraining { mixing_ratio: bad, ..default() });
            }
            check("mixing_ratio", HeadTraining { mixing_ratio: 1.0, ..default() });
            let optimizer = OptimizerSettings { batch_size: 0, ..OptimizerSettings::HEAD };
            check("optimizer.batch_size", HeadTraining { optimizer, ..default() });
        }
    }
}
