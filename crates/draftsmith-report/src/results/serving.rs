//! The ways to serve a setting: here and in other programs, with the speed to expect there, what is
//! lost, and how to start it.

use draftsmith_theory::{CostSource, Drafting, Estimate};
use serde::{Deserialize, Serialize};

use super::DrafterName;
use crate::text::{times_text, wrapped};

/// The name of our own decoder among the runtimes.
pub const DRAFTSMITH: &str = "draftsmith";

/// The name of the runtime that is started from Python.
const TRANSFORMERS: &str = "transformers";

/// The best setting that a runtime can run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServingWay {
    /// The runtime's name.
    pub runtime: String,
    /// The drafter.
    pub drafter: DrafterName,
    /// The setting in words, such as `K = 3`.
    pub setting: String,
    /// The setting of a program that drafts without our code; null for our own decoder and heads.
    pub drafting: Option<Drafting>,
    /// The speed relative to the target alone, with its 95 % interval. It includes prefill, except at
    /// given costs.
    pub speedup: Estimate,
    /// The costs at which the speed was modelled; null if it was measured.
    pub costs: Option<CostSource>,
    /// What draftsmith would use and the runtime cannot.
    pub lost: Vec<String>,
    /// The shell commands that start it, to be run one after another.
    pub start: Vec<String>,
}

impl ServingWay {
    /// Returns whether the whole interval of the speed-up lies above 1.
    pub fn pays(&self) -> bool {
        self.speedup.low > 1.0
    }

    /// Widens an interval that was modelled from this machine's times to the relative width of a measured
    /// one, because a model of costs is no surer than a measurement.
    #[must_use]
    pub fn as_unsure_as(mut self, measured: Estimate) -> Self {
        if self.costs == Some(CostSource::Machine) {
            let Estimate { value, low, high } = self.speedup;
            self.speedup.low = low.min(value * measured.low / measured.value);
            self.speedup.high = high.max(value * measured.high / measured.value);
        }
        self
    }

    /// Describes the way in one line, such as `vLLM: 1.07x (1.02 to 1.12), modelled from this machine's
    /// times: eagle, K = 2, without prompt lookup`.
    pub fn text(&self) -> String {
        let Estimate { value, low, high } = self.speedup;
        let basis = match self.costs {
            None => "measured".to_owned(),
            Some(CostSource::Machine) => "modelled from this machine's times".to_owned(),
            Some(other) => format!("modelled at {}", other.text()),
        };
        let interval = match low.is_finite() && high.is_finite() {
            true => format!(" ({low:.2} to {high:.2})"),
            false => String::new(),
        };
        let drafter = self.drafter.prefix().map(|name| name + ", ").unwrap_or_default();
        let lost = match self.lost.as_slice() {
            [] => String::new(),
            lost => format!(", without {}", lost.join(" and ")),
        };
        let advice = if self.pays() { "" } else { "; leave speculation off there" };
        format!(
            "{}: {}{interval}, {basis}: {drafter}{}{lost}{advice}",
            self.runtime,
            times_text(value),
            self.setting
        )
    }

    /// Returns the commands as one command for a shell; `None` if speculation does not pay there.
    pub fn command(&self) -> Option<String> {
        // The last step of transformers is Python.
        let joint = if self.runtime == TRANSFORMERS { "\n" } else { " &&\n" };
        (self.pays() && !self.start.is_empty()).then(|| self.start.join(joint))
    }
}

/// Formats ways to serve as text: a line each, and below it the command that starts it.
pub fn serving_text(ways: &[ServingWay], width: Option<usize>) -> String {
    let mut text = String::new();
    for way in ways {
        for (nth, line) in wrapped(&way.text(), width.map(|width| width - 4)).iter().enumerate() {
            text += &format!("{}{line}\n", if nth == 0 { "  " } else { "    " });
        }
        let command = way.command().unwrap_or_default();
        command.lines().for_each(|line| text += &format!("      {line}\n"));
    }
    text
}

/// Returns the fastest way of each runtime, in the order of first appearance.
pub fn fastest_ways<'a>(ways: impl IntoIterator<Item = &'a ServingWay>) -> Vec<ServingWay> {
    let mut best: Vec<ServingWay> = Vec::new();
    for way in ways {
        match best.iter_mut().find(|it| it.runtime == way.runtime) {
            Some(known) if known.speedup.value < way.speedup.value => *known = way.clone(),
            Some(_) => {}
            None => best.push(way.clone()),
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::DrafterId;

    use super::*;

    fn way(runtime: &str, value: f64, low: f64) -> ServingWay {
        ServingWay {
            runtime: runtime.to_owned(),
            drafter: DrafterName::Of(DrafterId::named("eagle")),
            setting: "K = 2".to_owned(),
            drafting: None,
            speedup: Estimate { value, low, high: value + 0.1 },
            costs: Some(CostSource::Machine),
            lost: vec!["prompt lookup".to_owned()],
            start: vec!["draftsmith export".to_owned(), "vllm serve".to_owned()],
        }
    }

    #[test]
    fn a_way_says_what_to_expect_what_is_lost_and_how_to_start() {
        let ways = [way("vLLM", 1.3, 1.2), way("llama.cpp", 1.02, 0.98)];
        insta::assert_snapshot!(serving_text(&ways, Some(60)), @r"
        vLLM: 1.30x (1.20 to 1.40), modelled from this machine's
          times: eagle, K = 2, without prompt lookup
            draftsmith export &&
            vllm serve
        llama.cpp: 1.02x (0.98 to 1.12), modelled from this
          machine's times: eagle, K = 2, without prompt lookup;
          leave speculation off there
        ");
        let measured = Estimate { value: 2.0, low: 1.0, high: 2.1 };
        let Estimate { value, low, high } = way("vLLM", 1.3, 1.2).as_unsure_as(measured).speedup;
        assert_eq!((value, low, high), (1.3, 0.65, 1.4000000000000001), "the wider of both ends");
        let given = ServingWay { costs: Some(CostSource::Given), ..way("vLLM", 1.3, 1.2) };
        assert!(given.text().contains("modelled at costs as given: eagle"), "{}", given.text());
        let ways = [way("vLLM", 1.3, 1.2), way("SGLang", 1.1, 1.0), way("vLLM", 1.4, 1.3)];
        let best = fastest_ways(&ways);
        let found: Vec<(&str, f64)> =
            best.iter().map(|way| (way.runtime.as_str(), way.speedup.value)).collect();
        assert_eq!(found, [("vLLM", 1.4), ("SGLang", 1.1)]);
    }
}
