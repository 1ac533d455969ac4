//! The recipe's `[head]` section: how an acceptance head is trained.
//!
//! The defaults are the SpecDec++ authors' run: what their script sets, and the defaults of the
//! Hugging Face Trainer for what it leaves open.

use draftsmith_model::{HeadForm, HeadInput, HeadReads, WeightDtype};
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::head::sweep::HeadSweep;
use crate::ranges::{Range, check_counts, check_numbers};
use crate::run::clipping::Clipping;
use crate::run::optimiser::Optimiser;
use crate::run::schedule::Schedule;

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
    /// What the head is told besides: any of `entropy` and `top_prob`, of the distribution that the
    /// candidate was drawn from, and `position`, its place in the round, with which nothing can be
    /// recorded for replay. Empty: the authors'.
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
    /// 1, 3, 6 and 12.
    pub rejection_weight: f64,
    /// The share of positions that keep the target's token and have no label, from 0 to below 1.
    /// 0.15: SpecDec++, section 3.
    pub mixing_ratio: f64,
    /// The peak learning rate of AdamW, above 0. 5e-5: the Trainer's default.
    pub learning_rate: f64,
    /// Decoupled weight decay of AdamW, 0 or more. 0: the Trainer's default.
    pub weight_decay: f64,
    /// Decay of AdamW's mean of gradients, from 0 to below 1. 0.9: the Trainer's default.
    pub beta_1: f64,
    /// Decay of AdamW's mean of squared gradients, from 0 to below 1. 0.999: the Trainer's default.
    pub beta_2: f64,
    /// Added to the root of AdamW's mean of squares, above 0. 1e-8: the Trainer's default.
    pub epsilon: f64,
    /// What the learning rate does after its warm-up: `cosine`, `linear` (both fall to 0) or
    /// `constant`. Cosine: the authors' script.
    pub schedule: Schedule,
    /// The share of steps in which the learning rate climbs from 0 to its peak, from 0 to 1;
    /// rounded up. 0.03: the authors' script.
    pub warm_up_share: f64,
    /// The number of those steps, in place of the share.
    pub warm_up_steps: Option<usize>,
    /// How a step's gradients are cut: `norm`, all together to a global norm, or `value`, each
    /// number for itself; above 0. A norm of 1: the Trainer's default.
    pub clipping: Clipping,
    /// How often the data is gone through, 1 or more. 3: the authors' script.
    pub num_epochs: usize,
    /// Epochs in a row without a lower validation KL after which training ends, 1 or more; never if
    /// absent. The learning rate is planned for all epochs all the same. Absent: the authors' code.
    pub patience: Option<usize>,
    /// Rows a batch, 1 or more; the loss is a mean over a batch's labels. 4: the authors' script.
    pub batch_size: usize,
    /// Batches a step, 1 or more; their gradients are averaged. 8: the authors' script.
    pub gradient_accumulation: usize,
    /// The type that the frozen draft and the head are computed in: `"f32"`, or `"bf16"` on a GPU.
    /// Parameters, optimiser and losses are f32 either way. f32: ours; the authors train in bf16.
    pub dtype: WeightDtype,
    /// The share of conversations held out for validation, between 0 and 1. 0.1: ours; the authors
    /// hold out a fixed number of an unseeded shuffle.
    pub validation_share: f64,
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
            learning_rate: 5e-5,
            weight_decay: 0.0,
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            schedule: Schedule::Cosine,
            warm_up_share: 0.03,
            warm_up_steps: None,
            clipping: Clipping::Norm(1.0),
            num_epochs: 3,
            patience: None,
            batch_size: 4,
            gradient_accumulation: 8,
            dtype: WeightDtype::F32,
            validation_share: 0.1,
            sweep: None,
        }
    }
}

impl HeadTraining {
    /// The keys that say how weights are moved.
    pub(crate) fn optimiser(&self) -> Optimiser {
        Optimiser {
            learning_rate: self.learning_rate,
            schedule: self.schedule,
            warm_up_share: self.warm_up_share,
            warm_up_steps: self.warm_up_steps,
            clipping: self.clipping,
            weight_decay: self.weight_decay,
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
        }
    }

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

    /// Checks every setting's range.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key that is out of its range.
    pub fn validate(&self) -> Result<(), TrainError> {
        check_num_layers("num_layers", self.num_layers)?;
        self.optimiser().check("head")?;
        self.sweep.iter().try_for_each(HeadSweep::validate)?;
        check_numbers(
            "head",
            &[
                ("rejection_weight", self.rejection_weight, Range::Positive),
                ("mixing_ratio", self.mixing_ratio, Range::BelowOne),
                ("validation_share", self.validation_share, Range::BetweenZeroAndOne),
            ],
        )?;
        check_counts(
            "head",
            &[
                ("num_epochs", self.num_epochs),
                ("rollout_length", self.rollout_length),
                ("patience", self.patience.unwrap_or(1)),
                ("batch_size", self.batch_size),
                ("gradient_accumulation", self.gradient_accumulation),
            ],
        )
    }
}

/// Checks a depth.
///
/// # Errors
/// [`TrainError::Setting`] if it is out of its range.
pub(crate) fn check_num_layers(key: &'static str, num_layers: usize) -> Result<(), TrainError> {
    if num_layers <= 64 {
        return Ok(());
    }
    let (value, expected) = (num_layers.to_string(), "0 to 64");
    Err(TrainError::Setting { section: "head", key, value, expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_the_default_and_a_misspelt_key_is_named() {
        let read = |text: &str| toml::from_str::<HeadTraining>(text);
        assert_eq!(read("").unwrap(), HeadTraining::default());
        assert_eq!(read("num_layers = 1\nepsilon = 1e-6").unwrap().num_layers, 1);
        let ahead = read("form = 'look-ahead'\ninputs = ['top_prob', 'entropy']").unwrap().reads();
        assert!(ahead.looks_ahead() && ahead.inputs() == [HeadInput::Entropy, HeadInput::TopProb]);
        for (text, expected) in [("inputs = ['x']", "top_prob"), ("labels = 'x'", "overlap")] {
            let message = read(text).unwrap_err().to_string();
            assert!(message.contains("`x`") && message.contains(expected), "{message}");
        }
        let message = read("learning_rat = 1.0").unwrap_err().to_string();
        assert!(message.contains("learning_rat"), "{message}");
    }

    #[test]
    fn every_default_is_in_range_and_bad_values_name_their_key() {
        HeadTraining::default().validate().unwrap();
        let check = |key: &str, bad: HeadTraining| {
            let message = bad.validate().unwrap_err().to_string();
            assert!(message.starts_with(&format!("`head.{key}` is ")), "{message}");
        };
        let default = HeadTraining::default;
        check("num_layers", HeadTraining { num_layers: 65, ..default() });
        check("rollout_length", HeadTraining { rollout_length: 0, ..default() });
        check("num_epochs", HeadTraining { num_epochs: 0, ..default() });
        check("patience", HeadTraining { patience: Some(0), ..default() });
        check("batch_size", HeadTraining { batch_size: 0, ..default() });
        check("gradient_accumulation", HeadTraining { gradient_accumulation: 0, ..default() });
        for bad in [f64::NAN, -1.0, f64::INFINITY] {
            check("rejection_weight", HeadTraining { rejection_weight: bad, ..default() });
            check("mixing_ratio", HeadTraining { mixing_ratio: bad, ..default() });
            check("learning_rate", HeadTraining { learning_rate: bad, ..default() });
            check("weight_decay", HeadTraining { weight_decay: bad, ..default() });
            check("beta_1", HeadTraining { beta_1: bad, ..default() });
            check("beta_2", HeadTraining { beta_2: bad, ..default() });
            check("epsilon", HeadTraining { epsilon: bad, ..default() });
            check("warm_up_share", HeadTraining { warm_up_share: bad, ..default() });
            for clipping in [Clipping::Norm(bad), Clipping::Value(bad)] {
                check(clipping.setting().0, HeadTraining { clipping, ..default() });
            }
            check("validation_share", HeadTraining { validation_share: bad, ..default() });
        }
        check("mixing_ratio", HeadTraining { mixing_ratio: 1.0, ..default() });
        check("validation_share", HeadTraining { validation_share: 0.0, ..default() });
        check("validation_share", HeadTraining { validation_share: 1.0, ..default() });
        check("epsilon", HeadTraining { epsilon: 1e-60, ..default() });
    }
}
