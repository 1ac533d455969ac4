//! The recipe's `[head.sweep]` section: heads with several depths, rejection weights and mixing ratios.
//!
//! Mixtures, and thus hidden states, depend on the mixing ratio. Heads with the same ratio are trained side
//! by side in one pass over the data, and ratios one after another.

use serde::{Deserialize, Serialize};

use crate::error::{Section, TrainError};
use crate::ranges::{Range, check_numbers};

/// The range of a head's depth.
pub(crate) const DEPTH: Range = Range::Within(0.0, 64.0, "0 to 64");

/// The values of a sweep, which tries every combination. A missing key keeps the value of `[head]`; the
/// others are lists of different values.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeadSweep {
    /// Depths D. SpecDec++: 0 to 4.
    pub num_layers: Option<Vec<usize>>,
    /// Loss weights of the rejected class. SpecDec++: 1, 3, 6 and 12.
    pub rejection_weight: Option<Vec<f64>>,
    /// Fractions of positions that keep the target's token. Each takes a pass over the data.
    pub mixing_ratio: Option<Vec<f64>>,
}

impl HeadSweep {
    /// Checks that every list has different values in range.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first invalid key of `section`.
    pub(crate) fn validate(&self, section: Section) -> Result<(), TrainError> {
        let depths = self.num_layers.as_ref();
        let depths = depths.map(|depths| depths.iter().map(|depth| *depth as f64).collect());
        check_list(section, "sweep.num_layers", depths, DEPTH)?;
        let weights = self.rejection_weight.clone();
        check_list(section, "sweep.rejection_weight", weights, Range::Positive)?;
        check_list(section, "sweep.mixing_ratio", self.mixing_ratio.clone(), Range::BelowOne)
    }
}

fn check_list(
    section: Section,
    key: &'static str,
    values: Option<Vec<f64>>,
    range: Range,
) -> Result<(), TrainError> {
    let Some(values) = values else { return Ok(()) };
    let are_distinct = values.iter().enumerate().all(|(n, value)| !values[..n].contains(value));
    if values.is_empty() || !are_distinct {
        let (value, expected) = (format!("{values:?}"), "a list of different values");
        return Err(TrainError::Setting { section, key, value, expected });
    }
    let numbers: Vec<_> = values.into_iter().map(|value| (key, value, range)).collect();
    check_numbers(section, &numbers)
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
    fn a_sweep_has_every_combination_with_one_pass_per_ratio() {
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
