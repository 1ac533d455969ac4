//! The recipe's `[head]` section: the settings for training one acceptance head, or a sweep of
//! them.
//!
//! The defaults are those of the SpecDec++ authors' run: the values in their script, and the
//! Hugging Face Trainer's defaults for the other settings.
//!
//! In a sweep, heads with the same mixing ratio are trained side by side in one pass over the data.
//! Each mixing ratio needs a pass of its own, because mixtures, and thus hidden states, depend on
//! it.

use draftsmith_model::{HeadForm, HeadInput, HeadReads, WeightDtype};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Result, Section, TrainError};
use crate::ranges::{Range, check_numbers};
use crate::run::optimizer::OptimizerSettings;
use crate::states::{FeatureFormat, Features};

/// The kind of label that a head learns to predict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadLabels {
    /// min(1, p/q) at a token drawn from the draft (SpecDec++). p and q are the distributions that
    /// decoding samples from.
    #[default]
    Sampled,
    /// Σ min(p, q) at a position, which is the mean of `Sampled` over the draft's distribution. It
    /// is less noisy, but does not depend on the drawn token.
    Overlap,
    /// Whether draft and target have the same most probable token, as greedy decoding requires.
    Greedy,
    /// Acceptance of the candidates in decoding rounds along the responses, greedy or sampled.
    /// These candidates are distributed as in decoding. Rows are not mixed.
    Rollouts,
}

/// The kinds of labels for mixtures of the target's and the draft's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MixedLabels {
    Sampled,
    Overlap,
    Greedy,
}

impl HeadLabels {
    /// Returns the kind of labels for mixtures; `None` if rows are not mixed.
    pub(crate) fn mixed(self) -> Option<MixedLabels> {
        match self {
            Self::Sampled => Some(MixedLabels::Sampled),
            Self::Overlap => Some(MixedLabels::Overlap),
            Self::Greedy => Some(MixedLabels::Greedy),
            Self::Rollouts => None,
        }
    }
}

/// The name of the recipe's table in messages.
const SECTION: Section = "head";

/// The settings of [`train_heads`](crate::train_heads). Every key is optional.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeadTraining {
    /// The depth D: the number of the head's residual blocks, 0 to 64. Default: 3, the best of
    /// SpecDec++'s sweep over 0 to 4.
    pub num_layers: usize,
    /// Whether all blocks share their weights. Default: true, as in the authors' code, whose class
    /// can load no other heads.
    pub tied: bool,
    /// The hidden state that the head reads. `candidate` is the one at the candidate's position.
    /// `look-ahead` is the one that the candidate was drawn from, together with the candidate's
    /// embedding and log-probability. A look-ahead head ends rounds one draft forward earlier.
    /// Default: `candidate`, as the authors'.
    pub form: HeadForm,
    /// Further inputs: `entropy` and `top_prob` (the largest probability) of the distribution that
    /// the candidate was drawn from. Default: empty, as the authors'.
    pub inputs: Vec<HeadInput>,
    /// The labels: `sampled`, min(1, p/q) at a drawn token; `overlap`, its mean Σ min(p, q);
    /// `greedy`, whether both models have the same most probable token; or `rollouts`, whether
    /// rounds along the responses accept their candidates, which are recorded first. Default:
    /// `sampled`, as the authors'.
    pub labels: HeadLabels,
    /// For labels from rollouts: the number of candidates to record from each rejected candidate
    /// on, including it, 1 or more. A draft phase continues after a candidate that will be
    /// rejected, but verification does not. Default: 1, our choice.
    pub rollout_length: usize,
    /// w_rej, the loss weight of the rejected class, above 0. Default: 6, the best of SpecDec++'s
    /// sweep over 1, 3, 6 and 12 (§4.1).
    pub rejection_weight: f64,
    /// The fraction of positions that keep the target's token and have no label, from 0 to below 1.
    /// Default: 0.15, as in the authors' code.
    pub mixing_ratio: f64,
    /// The type in which the frozen draft and the head compute: `"f32"`, or `"bf16"` on a GPU.
    /// Parameters, optimizer and losses are always f32. Default: f32; the authors train in bf16.
    pub dtype: WeightDtype,
    /// `"recompute"`: the drafter's hidden states are computed in each epoch. `"cache"`: they are
    /// computed once and stored on disk, for other trainings too. `"cache"` needs labels from
    /// rollouts, because a mixture has other tokens in each epoch.
    pub features: Features,
    /// The format of hidden states on disk: `"f16"`, or `"int8"` with a scale for each token.
    pub features_format: FeatureFormat,
    /// Settings for epochs, batches, steps and the learning rate.
    #[serde(deserialize_with = "read_optimizer")]
    pub optimizer: OptimizerSettings,
    /// The values of a sweep, which trains several heads instead of one.
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
    /// Returns the head's name in a sweep: `d3-w6-r0.15` for depth 3, rejection weight 6 and mixing
    /// ratio 0.15.
    pub fn name(&self) -> String {
        format!("d{}-w{}-r{}", self.num_layers, self.rejection_weight, self.mixing_ratio)
    }

    /// Returns whether heads with these and `other` settings share batches, steps and learning rates.
    pub(crate) fn shares_steps_with(&self, other: &Self) -> bool {
        let Self { num_layers, tied, rejection_weight, .. } = *self;
        *self == Self { num_layers, tied, rejection_weight, ..other.clone() }
    }

    /// Returns the inputs of the head.
    pub fn reads(&self) -> HeadReads {
        HeadReads::new(self.form, &self.inputs)
    }

    /// Lists the settings of every head in the sweep, or of the single head, for each pass over the
    /// data. There is one pass per mixing ratio. The returned settings have no sweep.
    pub fn passes(&self) -> Vec<Vec<Self>> {
        let HeadSweep { num_layers, rejection_weight, mixing_ratio } =
            self.sweep.clone().unwrap_or_default();
        let depths = num_layers.unwrap_or_else(|| vec![self.num_layers]);
        let weights = rejection_weight.unwrap_or_else(|| vec![self.rejection_weight]);
        let ratios = mixing_ratio.unwrap_or_else(|| vec![self.mixing_ratio]);
        let pass = |mixing_ratio: f64| {
            let mut heads = Vec::with_capacity(depths.len() * weights.len());
            for &num_layers in &depths {
                heads.extend(weights.iter().map(|&rejection_weight| Self {
                    num_layers,
                    rejection_weight,
                    mixing_ratio,
                    sweep: None,
                    ..self.clone()
                }));
            }
            heads
        };
        ratios.into_iter().map(pass).collect()
    }

    /// Checks every setting's range.
    ///
    /// # Errors
    /// If a key of `head` is out of range. The error names the first one.
    pub fn validate(&self) -> Result<()> {
        let section = SECTION;
        self.optimizer.check(section)?;
        self.sweep.iter().try_for_each(|sweep| sweep.validate())?;
        check_numbers(
            section,
            &[
                ("num_layers", self.num_layers as f64, DEPTH),
                ("rejection_weight", self.rejection_weight, Range::Positive),
                ("mixing_ratio", self.mixing_ratio, Range::BelowOne),
                ("rollout_length", self.rollout_length as f64, Range::AT_LEAST_ONE),
            ],
        )?;
        self.features.check_local(section)?;
        if self.features == Features::Cache && self.labels.mixed().is_some() {
            let expected = "`recompute`: with these labels each epoch mixes the tokens of target and \
                            draft again, so hidden states change; `labels = \"rollouts\"` allows `cache`";
            return Err(TrainError::setting(section, "features", "`cache`", expected));
        }
        if self.labels.mixed().is_none()
            && self.sweep.iter().any(|sweep| sweep.mixing_ratio.is_some())
        {
            let expected = "no such list: with labels from rollouts nothing is mixed, so its heads \
                            would be equal";
            return Err(TrainError::setting(section, "sweep.mixing_ratio", "set", expected));
        }
        Ok(())
    }
}

/// The range of a head's depth.
const DEPTH: Range = Range::Within(0.0, 64.0, "0 to 64");

/// The values of a sweep, which trains a head for every combination of them. A missing key keeps
/// the value of `[head]`. The values in a list must differ.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeadSweep {
    /// The depths D. SpecDec++: 0 to 4.
    pub num_layers: Option<Vec<usize>>,
    /// The loss weights of the rejected class. SpecDec++: 1, 3, 6 and 12.
    pub rejection_weight: Option<Vec<f64>>,
    /// The fractions of positions that keep the target's token. Each takes a pass over the data.
    pub mixing_ratio: Option<Vec<f64>>,
}

impl HeadSweep {
    /// Checks that every list has different values in range.
    ///
    /// # Errors
    /// If a key is invalid. The error names the first one.
    fn validate(&self) -> Result<()> {
        let depths = self.num_layers.as_ref();
        let depths = depths.map(|depths| depths.iter().map(|depth| *depth as f64).collect());
        check_list("sweep.num_layers", depths, DEPTH)?;
        let weights = self.rejection_weight.clone();
        check_list("sweep.rejection_weight", weights, Range::Positive)?;
        check_list("sweep.mixing_ratio", self.mixing_ratio.clone(), Range::BelowOne)
    }
}

fn check_list(key: &'static str, values: Option<Vec<f64>>, range: Range) -> Result<()> {
    let Some(values) = values else { return Ok(()) };
    let are_distinct = values.iter().enumerate().all(|(n, value)| !values[..n].contains(value));
    if values.is_empty() || !are_distinct {
        let (value, expected) = (format!("{values:?}"), "a list of different values");
        return Err(TrainError::setting(SECTION, key, value, expected));
    }
    let numbers: Vec<_> = values.into_iter().map(|value| (key, value, range)).collect();
    check_numbers(SECTION, &numbers)
}

fn read_optimizer<'de, D: Deserializer<'de>>(from: D) -> Result<OptimizerSettings, D::Error> {
    OptimizerSettings::read_over(OptimizerSettings::HEAD, from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_the_default_and_an_error_names_a_misspelt_key() {
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
    fn defaults_are_in_range_and_errors_name_the_key() {
        {
            HeadTraining::default().validate().unwrap();
            let check = |key: &str, bad: HeadTraining| {
                let message = bad.validate().unwrap_err().to_string();
                assert!(message.starts_with(&format!("`head.{key}` is ")), "{message}");
            };
            let default = HeadTraining::default;
            check("num_layers", HeadTraining { num_layers: 65, ..default() });
            check("rollout_length", HeadTraining { rollout_length: 0, ..default() });
            check("features", HeadTraining { features: Features::Cache, ..default() });
            let labels = HeadLabels::Rollouts;
            let cached = HeadTraining { features: Features::Cache, labels, ..default() };
            cached.validate().unwrap();
            let mixing_ratio = Some(vec![0.1, 0.2]);
            let sweep = Some(HeadSweep { mixing_ratio, ..HeadSweep::default() });
            check("sweep.mixing_ratio", HeadTraining { labels, sweep, ..default() });
            for bad in [f64::NAN, -1.0, f64::INFINITY] {
                check("rejection_weight", HeadTraining { rejection_weight: bad, ..default() });
                check("mixing_ratio", HeadTraining { mixing_ratio: bad, ..default() });
            }
            check("mixing_ratio", HeadTraining { mixing_ratio: 1.0, ..default() });
            let optimizer = OptimizerSettings { batch_size: 0, ..OptimizerSettings::HEAD };
            check("optimizer.batch_size", HeadTraining { optimizer, ..default() });
        }
    }

    fn read(text: &str) -> HeadTraining {
        toml::from_str(text).unwrap()
    }

    fn names(training: &HeadTraining) -> Vec<Vec<String>> {
        let passes = training.passes().into_iter();
        passes.map(|pass| pass.iter().map(HeadTraining::name).collect()).collect()
    }

    #[test]
    fn a_sweep_has_every_combination_with_one_pass_per_ratio() {
        let training = read(
            "num_layers = 9\nrejection_weight = 3\n\
             [optimizer]\nnum_epochs = 7\n\
             [sweep]\nnum_layers = [0, 2]\nrejection_weight = [1, 2.5]\nmixing_ratio = [0.3, 0]",
        );
        training.validate().unwrap();
        assert_eq!(
            names(&training),
            [
                ["d0-w1-r0.3", "d0-w2.5-r0.3", "d2-w1-r0.3", "d2-w2.5-r0.3"],
                ["d0-w1-r0", "d0-w2.5-r0", "d2-w1-r0", "d2-w2.5-r0"],
            ]
        );
        let heads = training.passes().concat();
        assert!(heads.iter().all(|head| head.optimizer.num_epochs == 7 && head.sweep.is_none()));
        assert_eq!(read(&toml::to_string(&training).unwrap()), training);
    }

    #[test]
    fn missing_keys_keep_the_value_of_the_section() {
        assert_eq!(names(&read("")), [["d3-w6-r0.15"]]);
        assert_eq!(names(&read("num_layers = 1\n[sweep]")), [["d1-w6-r0.15"]]);
        assert_eq!(read("").passes(), [[read("")]]);
        let ratios = read("[sweep]\nmixing_ratio = [0.1, 0.2]");
        assert_eq!(names(&ratios), [["d3-w6-r0.1"], ["d3-w6-r0.2"]]);
    }

    #[test]
    fn invalid_lists_are_errors() {
        for (wrong, key) in [
            ("num_layers = []", "num_layers"),
            ("num_layers = [65]", "num_layers"),
            ("rejection_weight = [1, 2, 1.0]", "rejection_weight"),
            ("rejection_weight = [-1]", "rejection_weight"),
            ("rejection_weight = [nan]", "rejection_weight"),
            ("mixing_ratio = [0.1, 1]", "mixing_ratio"),
        ] {
            let checked = read(&format!("[sweep]\n{wrong}")).validate();
            let message = checked.unwrap_err().to_string();
            assert!(message.starts_with(&format!("`head.sweep.{key}` is ")), "{message}");
        }
        for (wrong, named) in [("depth = [1]", "`depth`"), ("num_layers = 1", "num_layers")] {
            let read = toml::from_str::<HeadTraining>(&format!("[sweep]\n{wrong}"));
            let message = read.unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
    }
}
