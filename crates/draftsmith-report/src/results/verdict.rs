//! The conclusion of an evaluation: the setting to deploy for each dataset and way of decoding, and
//! reasons to doubt the measurements.
//!
//! The setting to deploy is the one that `tune` chose on other prompts. The fastest setting of the
//! sweep is named too but not advised, because it was chosen on the same prompts that it is
//! measured on.

use serde::{Deserialize, Serialize};

use super::{Group, ResultRow, ServingWay};
use crate::text::times_text;

/// The advice on deployment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeployAdvice {
    /// The tuned setting should be deployed, because it is faster than plain decoding.
    Deploy,
    /// Speculation should be left off, because the tuned setting is slower than plain decoding.
    DoNotSpeculate,
    /// The result is too uncertain: the interval of the tuned setting's speed-up contains 1.
    TooUncertain,
    /// There is no advice, because no tuned setting was measured.
    NotTuned,
}

/// A measured setting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredSetting {
    /// The label of drafter and rule, as in tables.
    pub label: String,
    /// The speed relative to plain decoding.
    pub speedup: f64,
    /// The 95 % interval of the speed-up.
    pub interval: Option<[f64; 2]>,
}

/// The conclusion for a dataset and way of decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupVerdict {
    /// The dataset and the way of decoding, in words.
    pub group: String,
    /// The advice on deployment.
    pub advice: DeployAdvice,
    /// The fastest of the settings that `tune` chose; null if none was measured.
    pub tuned: Option<MeasuredSetting>,
    /// The fastest setting of the sweep. Null if it is the tuned setting or nothing was drafted.
    pub fastest: Option<MeasuredSetting>,
}

/// The conclusion of an evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Conclusion {
    /// The verdicts, one for each dataset and way of decoding.
    pub verdicts: Vec<GroupVerdict>,
    /// Reasons to doubt the measurements, as sentences.
    pub doubts: Vec<String>,
    /// The ways to serve the setting to deploy, the measured one first; empty if none is advised.
    #[serde(default)]
    pub serving: Vec<ServingWay>,
    /// What was fastest and the next step, as sentences; null if nothing was drafted.
    pub last: Option<String>,
    /// Whether the evaluation was stopped before its end.
    #[serde(default)]
    pub is_partial: bool,
}

/// The next step where nothing is left to check.
const SERVE: &str = "Next, serve with a command under \"where to serve it\".";

/// The fewest prompts with an interval and advice.
pub const LEAST_PROMPTS: usize = 4;

impl MeasuredSetting {
    fn of(row: &ResultRow) -> Option<Self> {
        Some(Self { label: row.label(), speedup: row.speedup?, interval: row.speedup_interval })
    }

    /// Formats the speed-up and its interval, such as `1.15x (1.06 to 1.25)`.
    fn speed_text(&self) -> String {
        let interval = self.interval.map(|[low, high]| format!(" ({low:.2} to {high:.2})"));
        format!("{}{}", times_text(self.speedup), interval.unwrap_or_default())
    }
}

impl GroupVerdict {
    fn of(group: &Group<'_>) -> Self {
        let (tuned, best) = (group.best_tuned(), group.best());
        let is_tuned = |row: &&ResultRow| tuned.is_some_and(|tuned| std::ptr::eq(tuned, *row));
        let fastest = best.filter(|row| !is_tuned(row)).and_then(MeasuredSetting::of);
        let tuned = tuned.and_then(MeasuredSetting::of);
        let advice = match &tuned {
            None => DeployAdvice::NotTuned,
            // Without an interval there were too few prompts.
            Some(MeasuredSetting { interval, .. }) => match interval {
                Some([low, _]) if *low > 1.0 => DeployAdvice::Deploy,
                Some([_, high]) if *high < 1.0 => DeployAdvice::DoNotSpeculate,
                _ => DeployAdvice::TooUncertain,
            },
        };
        Self { group: group.name(), advice, tuned, fastest }
    }

    /// States in two sentences which setting was fastest and by how much, where `name` names the
    /// setting. `None` if nothing was drafted.
    pub fn found(&self, name: &str) -> Option<String> {
        let setting = self.tuned.as_ref().or(self.fastest.as_ref())?;
        let interval = setting.interval.map(|[low, high]| format!("95 %: {low:.2} to {high:.2}; "));
        let times = format!("{:.2} times as fast", setting.speedup);
        let among = format!("({}{})", interval.unwrap_or_default(), self.group);
        let neighbour = self.fastest.as_ref().map(|fastest| {
            format!(
                " {}, {}, is not advised: it is the best of many on the prompts that would judge it, and tuning chose \
                 on others.",
                fastest.label,
                fastest.speed_text()
            )
        });
        Some(match self.advice {
            DeployAdvice::Deploy => format!(
                "Of the settings that tuning chose, {name} was fastest. It decodes {times} as the target alone \
                 {among}.{}",
                neighbour.unwrap_or_default()
            ),
            DeployAdvice::DoNotSpeculate => format!(
                "The target alone was faster than the settings that tuning chose. The best of them, {name}, \
                 decodes {times} {among}."
            ),
            DeployAdvice::TooUncertain => format!(
                "No setting that tuning chose was clearly faster than the target alone. The best of them, \
                 {name}, decodes {times} {among}."
            ),
            DeployAdvice::NotTuned => format!(
                "Of the settings in the recipe, {name} was fastest. It decodes {times} as the target alone \
                 {among}."
            ),
        })
    }

    /// Returns the advice for the next step, as a sentence.
    pub fn next(&self) -> &'static str {
        match self.advice {
            DeployAdvice::Deploy => SERVE,
            DeployAdvice::DoNotSpeculate => "Next, try another drafter, or serve the target alone.",
            DeployAdvice::TooUncertain => {
                "Next, measure more prompts on a quiet machine: raise `evaluate.num_prompts`."
            }
            DeployAdvice::NotTuned => {
                "Next, add `tune = {}` to the recipe and run it again, which chooses a setting on other prompts."
            }
        }
    }

    /// Formats the verdict as sentences, such as `Deploy K = 1: 1.15x (1.06 to 1.25). Fastest in
    /// the sweep, not chosen: head 0.3, 1.40x (1.29 to 1.52).`
    pub fn text(&self) -> String {
        let tuned = self.tuned.as_ref().map(|tuned| (&tuned.label, tuned.speed_text()));
        let mut text = match (self.advice, tuned) {
            (DeployAdvice::Deploy, Some((label, speed))) => format!("Deploy {label}: {speed}."),
            (DeployAdvice::DoNotSpeculate, Some((label, speed))) => {
                format!("Do not speculate: the tuned setting, {label}, decodes at {speed}.")
            }
            (DeployAdvice::TooUncertain, Some((label, speed))) => format!(
                "Too uncertain to tell: the tuned setting, {label}, decodes at {speed}. Measure more \
                 prompts, on a quiet machine."
            ),
            _ => "No tuned setting was measured: run `draftsmith tune` to choose one on other prompts."
                .to_owned(),
        };
        if let Some(fastest) = &self.fastest {
            let (label, speed) = (&fastest.label, fastest.speed_text());
            text += &format!(" Fastest in the sweep, not chosen: {label}, {speed}.");
        }
        text
    }
}

impl Conclusion {
    /// Draws the conclusion from groups of rows. `doubts` are reasons to doubt them.
    pub(crate) fn of(groups: &[Group<'_>], doubts: Vec<String>) -> Self {
        let drafting = groups.iter().filter(|group| group.best().is_some());
        Self { verdicts: drafting.map(GroupVerdict::of).collect(), doubts, ..Self::default() }
    }

    /// Formats the conclusion as lines for a terminal.
    pub fn lines(&self) -> Vec<String> {
        let verdicts = self.verdicts.iter().map(|it| format!("{}: {}", it.group, it.text()));
        let doubts = self.doubts.iter().map(|doubt| format!("Doubtful: {doubt}"));
        let partial = "The evaluation was stopped before its end: these are only the prompts that every setting completed.";
        let partial = self.is_partial.then(|| partial.to_owned());
        partial.into_iter().chain(verdicts).chain(doubts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(label: &str, speedup: f64, interval: [f64; 2]) -> Option<MeasuredSetting> {
        Some(MeasuredSetting { label: label.to_owned(), speedup, interval: Some(interval) })
    }

    fn text(advice: DeployAdvice, tuned: Option<MeasuredSetting>) -> String {
        let fastest = setting("head 0.3", 1.4, [1.29, 1.52]);
        let group = "test, greedy".to_owned();
        GroupVerdict { group, advice, tuned, fastest }.text()
    }

    #[test]
    fn a_verdict_names_what_was_chosen_and_what_was_fastest() {
        let deploy = text(DeployAdvice::Deploy, setting("K = 1", 1.15, [1.06, 1.25]));
        insta::assert_snapshot!(deploy, @"Deploy K = 1: 1.15x (1.06 to 1.25). Fastest in the sweep, not chosen: head 0.3, 1.40x (1.29 to 1.52).");
        let slow = text(DeployAdvice::DoNotSpeculate, setting("K = 1", 0.86, [0.8, 0.92]));
        insta::assert_snapshot!(slow, @"Do not speculate: the tuned setting, K = 1, decodes at 0.86x (0.80 to 0.92). Fastest in the sweep, not chosen: head 0.3, 1.40x (1.29 to 1.52).");
        let uncertain = text(DeployAdvice::TooUncertain, setting("K = 1", 1.02, [0.93, 1.72]));
        insta::assert_snapshot!(uncertain, @"Too uncertain to tell: the tuned setting, K = 1, decodes at 1.02x (0.93 to 1.72). Measure more prompts, on a quiet machine. Fastest in the sweep, not chosen: head 0.3, 1.40x (1.29 to 1.52).");
        let untuned = text(DeployAdvice::NotTuned, None);
        insta::assert_snapshot!(untuned, @"No tuned setting was measured: run `draftsmith tune` to choose one on other prompts. Fastest in the sweep, not chosen: head 0.3, 1.40x (1.29 to 1.52).");
    }
}
