//! `doctor`: predicts what inference servers will do with a trained drafter.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use draftsmith_report::wrapped;
use draftsmith_servers::doctor::{
    AcceptancePlan, Diagnosis, ExpectedAcceptance, Severity, diagnose, expected_acceptance,
    recipe_of,
};
use draftsmith_servers::explain::explain_hint;
use serde::Serialize;

use crate::commands::DeviceJob;
use crate::commands::check::CheckFailed;

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// The drafter's directory or GGUF file: a draft model, EAGLE-3, a block drafter, Medusa heads, a head or an adapter.
    drafter: PathBuf,
    /// The target's directory.
    #[arg(long, value_name = "DIR")]
    target: PathBuf,
    /// Prompts to decode, for the acceptance to expect by position.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// The most prompts, spread evenly over the file.
    #[arg(long, value_name = "N", default_value = "16", requires = "prompts")]
    num_prompts: NonZeroUsize,
    /// Candidates per round, as the server will draft.
    #[arg(long, value_name = "K", default_value = "3", requires = "prompts", value_parser = clap::value_parser!(u16).range(1..=20))]
    candidates: u16,
    /// The most tokens of an answer.
    #[arg(long, value_name = "N", default_value = "128", requires = "prompts")]
    max_new_tokens: NonZeroUsize,
    /// `vicuna`, `llama-2`, `alpaca`, `none` or a Jinja file.
    #[arg(long, value_name = "NAME", requires = "prompts")]
    chat_template: Option<String>,
}

/// The document that `--json` prints.
#[derive(Serialize)]
struct Document {
    #[serde(flatten)]
    diagnosis: Diagnosis,
    acceptance: Option<ExpectedAcceptance>,
}

/// Runs the command.
pub(crate) fn run(arguments: &DoctorArguments, job: DeviceJob<'_>) -> Result<()> {
    let DeviceJob { device, dtype, console, .. } = job;
    let diagnosis = diagnose(&arguments.drafter, &arguments.target)?;
    let num_breaks = diagnosis.findings.iter().filter(|it| it.severity == Severity::Breaks).count();
    console.text(text(&diagnosis, console.width()))?;
    let acceptance = match &arguments.prompts {
        Some(prompts) if num_breaks == 0 => {
            let mut recipe = recipe_of(diagnosis.form, &arguments.drafter, &arguments.target)?;
            recipe.models.chat_template.clone_from(&arguments.chat_template);
            let workspace = recipe.open(None, dtype, vec![device.clone()], console)?;
            let plan = AcceptancePlan {
                prompts: std::slice::from_ref(prompts),
                num_prompts: arguments.num_prompts.get(),
                num_candidates: arguments.candidates.into(),
                max_new_tokens: arguments.max_new_tokens.get(),
            };
            Some(expected_acceptance(&recipe, &workspace, &plan, console)?)
        }
        _ => None,
    };
    if let Some(acceptance) = &acceptance {
        console.text(expected(acceptance, console.width()))?;
    }
    let [drafter, target] =
        [&arguments.drafter, &arguments.target].map(|path| path.display().to_string());
    let hint = explain_hint(diagnosis.form.kind, &drafter, &target).filter(|_| num_breaks == 0);
    if let Some(hint) = hint {
        console.text(format!("\n{}\n", wrapped(&hint, console.width()).join("\n")))?;
    }
    console.document(&Document { diagnosis, acceptance })?;
    match num_breaks {
        0 => Ok(()),
        num => {
            let what = if num == 1 { "a problem" } else { "problems" };
            Err(CheckFailed::new(format!(
                "{what} with which a server refuses the drafter or never accepts it"
            ))
            .into())
        }
    }
}

fn text(diagnosis: &Diagnosis, width: Option<usize>) -> String {
    let form = format!("{}: {}", diagnosis.form.text, diagnosis.description);
    let mut lines = wrapped(&form, Some(width.unwrap_or(80)));
    for finding in &diagnosis.findings {
        let severity = match finding.severity {
            Severity::Breaks => "broken",
            Severity::Hurts => "slower",
            Severity::Note => "note",
        };
        lines.push(format!("\n{severity}: {}", finding.name));
        for part in [
            &finding.what,
            &format!("servers: {}", finding.servers),
            &format!("hint: {}", finding.hint),
        ] {
            let inner = width.unwrap_or(80).saturating_sub(2).max(20);
            lines.extend(wrapped(part, Some(inner)).into_iter().map(|line| format!("  {line}")));
        }
    }
    if diagnosis.findings.is_empty() {
        let none =
            "No problem found: vLLM, SGLang and llama.cpp read these files as they were trained.";
        lines.extend(wrapped(none, Some(width.unwrap_or(80))));
    }
    lines.join("\n") + "\n"
}

fn expected(acceptance: &ExpectedAcceptance, width: Option<usize>) -> String {
    let shares = acceptance.accepted_by_position.iter().map(|share| format!("{share:.3}"));
    let shares: Vec<String> = shares.collect();
    let text = format!(
        "Expected with {} candidates, greedy, over {} prompts and {} tokens: accepted up to positions 1, 2, … in {} of \
         rounds, {:.2} tokens per round. Hold it against the server: vLLM's and llama.cpp's \
         `spec_decode_num_accepted_tokens_per_pos_total` over `spec_decode_num_drafts_total`.",
        acceptance.num_candidates,
        acceptance.num_prompts,
        acceptance.num_tokens,
        shares.join(", "),
        acceptance.tokens_per_round
    );
    format!("\n{}\n", wrapped(&text, Some(width.unwrap_or(80))).join("\n"))
}
