//! `explain`: says why a running server accepts as many of a drafter's candidates as it does.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use draftsmith_recipe::{Overrides, Recipe};
use draftsmith_report::{counted, plain_table, wrapped};
use draftsmith_servers::explain::{ComparedRow, ExplainSettings, Explained, Explanation, explain};

use crate::commands::DeviceJob;
use crate::commands::certify::AccessArguments;
use crate::commands::check::CheckFailed;

/// Arguments of `explain`.
#[derive(Debug, Args)]
#[command(override_usage = "draftsmith server explain [OPTIONS] --server <URL> --prompts <FILE>
                          <--target <DIR>|--states <RECIPE>> <DRAFTER>")]
pub(crate) struct ExplainArguments {
    /// The drafter's directory: EAGLE-3, a block drafter or a draft model, as trained or exported.
    drafter: PathBuf,
    /// The address of the server that speculates with it, up to `/v1`. It must serve nobody else meanwhile.
    #[arg(long, value_name = "URL")]
    server: String,
    /// The target's directory.
    #[arg(long, value_name = "DIR", required_unless_present = "states")]
    target: Option<PathBuf>,
    /// Directory of a GGUF target's tokenizer.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// A recipe whose servers give the hidden states of its target, which then need not run here.
    #[arg(long, value_name = "RECIPE", conflicts_with = "target")]
    states: Option<PathBuf>,
    /// Prompts, some dozens.
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// The most prompts, spread evenly over the file.
    #[arg(long, value_name = "N", default_value = "20")]
    num_prompts: NonZeroUsize,
    /// The most tokens of an answer.
    #[arg(long, value_name = "N", default_value = "96", value_parser = clap::value_parser!(u32).range(8..=100_000))]
    max_new_tokens: u32,
    /// Candidates per round that the server was started with [default: as it counts].
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..=64))]
    candidates: Option<u16>,
    /// `vicuna`, `llama-2`, `alpaca`, `none` or a Jinja file.
    #[arg(long, value_name = "NAME")]
    chat_template: Option<String>,
    #[command(flatten)]
    access: AccessArguments,
}

/// Runs the command.
pub(crate) fn run(arguments: &ExplainArguments, job: DeviceJob<'_>) -> Result<()> {
    let DeviceJob { device, dtype, console, .. } = job;
    let states = arguments.states.as_deref();
    let states = states.map(|path| Recipe::read(path, &Overrides::default())).transpose()?;
    if let (Some(recipe), Some(path)) = (&states, &arguments.states) {
        ensure!(
            recipe.states_server().is_some(),
            "`{}` has no table `[data.server.states]`; hint: give `--target DIR` to run the target here",
            path.display()
        );
    }
    let of_recipe = states.as_ref().map(|recipe| recipe.models.target.clone());
    let settings = ExplainSettings {
        url: arguments.server.clone(),
        model: arguments.access.model.clone(),
        secret: arguments.access.secret(),
        drafter: arguments.drafter.clone(),
        target: arguments.target.clone().or(of_recipe).unwrap_or_default(),
        tokenizer: arguments.tokenizer.clone(),
        states,
        chat_template: arguments.chat_template.clone(),
        prompts: arguments.prompts.clone(),
        num_prompts: arguments.num_prompts.get(),
        max_new_tokens: arguments.max_new_tokens as usize,
        num_candidates: arguments.candidates.map(usize::from),
        timeout: arguments.access.timeout(),
        dtype,
    };
    let found = explain(&settings, device, console)?;
    console.text(text(&found, console.width()))?;
    console.document(&found)?;
    match found.explanation {
        Explanation::AsTrained => Ok(()),
        Explanation::Misread | Explanation::OtherAnswers => {
            Err(CheckFailed::new("the server does not run the drafter as it was trained").into())
        }
        Explanation::Unknown => {
            let what = "it is not known why the server accepts other candidates than expected";
            Err(CheckFailed::unknown(what).into())
        }
    }
}

fn text(found: &Explained, width: Option<usize>) -> String {
    let mut lines = wrapped(&found.sentence, width);
    let has_cause = !found.causes.is_empty();
    let table = |first: &str, rows: &[ComparedRow], digits: usize| {
        let row = |(at, row): (usize, &ComparedRow)| {
            let number =
                |value: Option<f64>| value.map_or("-".to_owned(), |it| format!("{it:.digits$}"));
            let cause = has_cause.then(|| number(row.cause));
            let cells = [at.to_string(), number(Some(row.as_trained))].into_iter().chain(cause);
            cells.chain([number(row.measured)]).collect::<Vec<String>>()
        };
        let cause = has_cause.then_some("with the cause");
        let head = [first, "as trained"].into_iter().chain(cause).chain(["measured"]);
        plain_table(head, (1..).zip(rows).map(row), 0..4, (0, 2), width)
    };
    lines.push("\nshare of rounds that accept the candidate at each position".to_owned());
    lines.push(table("position", &found.positions, 3));
    lines.push("\naccepted candidates of each prompt".to_owned());
    lines.push(table("prompt", &found.prompts, 0) + "\n");
    for cause in &found.causes {
        lines.extend(wrapped(
            &format!("{}: {}.", cause.misreading.name, cause.misreading.hint),
            width,
        ));
    }
    if found.causes.len() > 1 {
        let more = "Longer prompts and answers, or another number of candidates, may tell these causes apart.";
        lines.extend(wrapped(more, width));
    }
    lines.extend(found.notes.iter().flat_map(|note| wrapped(note, width)));
    let basis = format!(
        "Measured on {} and {}, {} candidates per round{}. Rounding explains {:.2} candidates per prompt.",
        counted(found.num_prompts, "prompt"),
        counted(found.num_tokens, "token"),
        found.num_candidates,
        if found.changes_candidates { " at most" } else { "" },
        found.rounding
    );
    lines.extend(wrapped(&basis, width));
    lines.join("\n") + "\n"
}
