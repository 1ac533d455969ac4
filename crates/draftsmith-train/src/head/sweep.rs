//! The recipe's `[head.sweep]` section: heads of several depths, rejection weights and mixing
//! ratios.
//!
//! A mixture depends on its ratio, and so do the hidden states that heads are trained on: heads of
//! one ratio are trained side by side over one stream of them, a pass, and ratios one after
//! another.

use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::section::{Range, Section, check_numbers};

/// The greatest depth of a head.
const MAX_NUM_LAYERS: usize = 64;

/// The settings that a sweep goes through, in every combination. A key that is left out stays at
/// the value that `[head]` has; the others are lists of different values.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeadSweep {
    /// Depths D. SpecDec++: 0 to 4.
    pub num_layers: Option<Vec<usize>>,
    /// Loss weights of the rejected class. SpecDec++: 1, 3, 6 and 12.
    pub rejection_weight: Option<Vec<f64>>,
    /// Shares of positions that keep the target's token. Each is a pass over the data.
    pub mixing_ratio: Option<Vec<f64>>,
}

/// What a sweep goes through, of one head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SweptSettings {
    pub(crate) num_layers: usize,
    pub(crate) rejection_weight: f64,
    pub(crate) mixing_ratio: f64,
}

impl HeadSweep {
    /// The settings that are gone through, a list for each pass over the data, ratio by ratio.
    /// Those of `alone` where there is no list.
    pub(crate) fn passes(self, alone: SweptSettings) -> Vec<Vec<SweptSettings>> {
        let depths = self.num_layers.unwrap_or_else(|| vec![alone.num_layers]);
        let weights = self.rejection_weight.unwrap_or_else(|| vec![alone.rejection_weight]);
        let ratios = self.mixing_ratio.unwrap_or_else(|| vec![alone.mixing_ratio]);
        let pass = |mixing_ratio: f64| {
            let of_depth = |num_layers: &usize| {
                let num_layers = *num_layers;
                weights.iter().map(move |rejection_weight| SweptSettings {
                    num_layers,
                    rejection_weight: *rejection_weight,
                    mixing_ratio,
                })
            };
            depths.iter().flat_map(of_depth).collect()
        };
        ratios.into_iter().map(pass).collect()
    }

    /// Checks that lists have values, each once and in its range.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key of `section` whose list is not so.
    pub(crate) fn validate(&self, section: Section) -> Result<(), TrainError> {
        check_list(section, "sweep.num_layers", self.num_layers.as_deref())?;
        check_list(section, "sweep.rejection_weight", self.rejection_weight.as_deref())?;
        check_list(section, "sweep.mixing_ratio", self.mixing_ratio.as_deref())?;
        for depth in self.num_layers.iter().flatten() {
            check_num_layers(section, "sweep.num_layers", *depth)?;
        }
        for weight in self.rejection_weight.iter().flatten() {
            check_numbers(section, &[("sweep.rejection_weight", *weight, Range::Positive)])?;
        }
        for ratio in self.mixing_ratio.iter().flatten() {
            check_numbers(section, &[("sweep.mixing_ratio", *ratio, Range::BelowOne)])?;
        }
        Ok(())
    }
}

/// Checks a depth.
///
/// # Errors
/// [`TrainError::Setting`] if it is out of its range.
pub(crate) fn check_num_layers(
    section: Section,
    key: &'static str,
    num_layers: usize,
) -> Result<(), TrainError> {
    if num_layers <= MAX_NUM_LAYERS {
        return Ok(());
    }
    let (value, expected) = (num_layers.to_string(), "0 to 64");
    Err(TrainError::Setting { section, key, value, expected })
}

/// Checks that a list has values, each once.
fn check_list<T: PartialEq + std::fmt::Debug>(
    section: Section,
    key: &'static str,
    values: Option<&[T]>,
) -> Result<(), TrainError> {
    let Some(values) = values else { return Ok(()) };
    let are_distinct = values.iter().enumerate().all(|(n, value)| !values[..n].contains(value));
    if !values.is_empty() && are_distinct {
        return Ok(());
    }
    let (value, expected) = (format!("{values:?}"), "a list of different values");
    Err(TrainError::Setting { section, key, value, expected })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::settings::HeadTraining;

    fn read(text: &str) -> HeadTraining {
        toml::from_str(text).unwrap()
    }

    fn names(training: &HeadTraining) -> Vec<Vec<String>> {
        let passes = training.passes().into_iter();
        passes.map(|pass| pass.iter().map(HeadTraining::name).collect()).collect()
    }

    #[test]
    fn a_sweep_is_every_combination_ratio_by_ratio() {
        let training = read(
            "num_layers = 9\nrejection_weight = 3\n\
             [optimizer]\nnum_epochs = 7\n\
             [sweep]\nnum_layers = [0, 2]\nrejection_weight = [1, 2.5]\nmixing_ratio = [0.3, 0]",
        );
        training.validate(Section::Head).unwrap();
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
    fn what_a_sweep_leaves_out_is_as_it_is_without() {
        assert_eq!(names(&read("")), [["d3-w6-r0.15"]]);
        assert_eq!(names(&read("num_layers = 1\n[sweep]")), [["d1-w6-r0.15"]]);
        assert_eq!(read("").passes(), [[read("")]]);
        let ratios = read("[sweep]\nmixing_ratio = [0.1, 0.2]");
        assert_eq!(names(&ratios), [["d3-w6-r0.1"], ["d3-w6-r0.2"]]);
    }

    #[test]
    fn lists_without_sense_are_refused() {
        for (wrong, key) in [
            ("num_layers = []", "num_layers"),
            ("num_layers = [65]", "num_layers"),
            ("rejection_weight = [1, 2, 1.0]", "rejection_weight"),
            ("rejection_weight = [-1]", "rejection_weight"),
            ("rejection_weight = [nan]", "rejection_weight"),
            ("mixing_ratio = [0.1, 1]", "mixing_ratio"),
        ] {
            let checked = read(&format!("[sweep]\n{wrong}")).validate(Section::Head);
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
