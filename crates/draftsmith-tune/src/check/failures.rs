//! The failures of a check in words.

use draftsmith_report::speed_text;
use draftsmith_theory::Estimate;

use super::{AcceptanceCheck, CheckReport};

impl CheckReport {
    /// Describes all failures in one sentence. `None` if there are no failures.
    pub(super) fn failures(&self) -> Option<String> {
        let Self { greedy, sampled, .. } = self;
        let mut failures = Vec::new();
        if let Some(first) = greedy.output.differences.first() {
            failures.push(format!(
                "greedy output is not plain greedy output: {} answers differ, the first that of \
             `{}` at its token {}",
                greedy.output.differences.len(),
                first.id,
                first.token
            ));
        }
        if !sampled.output.holds {
            let output = &sampled.output;
            failures.push(if output.num_impossible > 0 {
            format!(
                "sampled output has {} tokens that the target never samples",
                output.num_impossible
            )
        } else {
            format!(
                "sampled output does not follow the target's distribution: p = {}, which must be at least {}",
                p_value_text(output.p_value),
                output.alpha
            )
        });
        }
        failures.extend(broken_promise("greedy", &greedy.acceptance));
        failures.extend(broken_promise("sampled", &sampled.acceptance));
        if self.speed.holds == Some(false) {
            failures.push(format!(
            "greedy decoding runs at {} of the target alone; hint: do not serve it, tune it on this \
             machine, or pass it with `--allow-slower`",
            speed_text(&self.speed.speedup)
        ));
        }
        let failures = (!failures.is_empty()).then(|| failures.join("; "))?;
        Some(format!("the export `{}` fails: {failures}", self.export.display()))
    }
}

fn broken_promise(decoding: &str, acceptance: &AcceptanceCheck) -> Option<String> {
    let promised = acceptance.promised.as_ref().filter(|_| acceptance.holds == Some(false))?;
    Some(format!(
        "the {decoding} acceptance rate is {}, not the {} that tuning promised \
         (`tuned.{decoding}.expected_acceptance_rate`); hint: check with prompts like those it was \
         tuned on, or tune it again",
        rate_text(&acceptance.rate),
        rate_text(promised)
    ))
}

/// Formats a p-value as a decimal fraction, or as a power of ten below 0.001.
pub fn p_value_text(p_value: f64) -> String {
    if p_value == 0.0 || p_value >= 0.001 {
        format!("{}", (p_value * 1e4).round() / 1e4)
    } else {
        format!("{p_value:.1e}")
    }
}

/// Formats a rate with its interval: `0.612 (0.580..0.644)`.
pub fn rate_text(estimate: &Estimate) -> String {
    format!("{:.3} ({:.3}..{:.3})", estimate.value, estimate.low, estimate.high)
}
