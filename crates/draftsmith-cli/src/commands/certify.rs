//! `certify`: tests whether a speculating server's output is that of its target.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use burn::tensor::Device;
use clap::{Args, ValueEnum};
use draftsmith_recipe::Workspace;
use draftsmith_report::{counted, wrapped};
use draftsmith_served::{NUM_LOG_PROBS, Secret};
use draftsmith_servers::certify::{
    Certified, CertifyPlan, CertifySettings, ReachedEnd, SampledPlan, SampledReport, TestedWhat,
    Verdict, certify_server,
};
use draftsmith_tune::server_access::read_token;

use crate::commands::check::CheckFailed;
use crate::console::Console;

/// Arguments of `certify`.
#[derive(Debug, Args)]
#[command(override_usage = "draftsmith server certify [OPTIONS] --server <URL> --reference <URL>
                          --target <DIR> --prompts <FILE>")]
pub(crate) struct CertifyArguments {
    /// The address of the server that speculates, up to `/v1`.
    #[arg(long, value_name = "URL")]
    server: String,
    /// The address of a server of the same target that does not speculate.
    #[arg(long, value_name = "URL")]
    reference: String,
    /// The target's directory; only its tokenizer, chat template and `config.json` are read.
    #[arg(long, value_name = "DIR")]
    target: PathBuf,
    /// Directory of a GGUF target's tokenizer.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Prompts, on which the drafter is sometimes right.
    #[arg(long, value_name = "FILE", required_unless_present = "workload")]
    prompts: Option<PathBuf>,
    /// `identifiers` to repeat, instead of prompts.
    #[arg(long, value_name = "NAME", conflicts_with = "prompts", value_parser = ["identifiers"], hide_possible_values = true)]
    workload: Option<String>,
    /// The most prompts [default: 16; identifiers: 12].
    #[arg(long, value_name = "N")]
    num_prompts: Option<NonZeroUsize>,
    /// Tokens of each answer.
    #[arg(long, value_name = "N", default_value = "128")]
    max_new_tokens: NonZeroUsize,
    /// Short sampled answers from each of two places on; 0: none.
    #[arg(long, value_name = "N", default_value = "4000", value_parser = clap::value_parser!(u32).range(0..=10_000_000))]
    draws: u32,
    /// Temperature of sampled answers; other than 1 needs `--top-k`.
    #[arg(long, value_name = "T", default_value = "1", value_parser = positive)]
    temperature: f64,
    /// Draw from the N most probable tokens, at most 20.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=NUM_LOG_PROBS as i64))]
    top_k: Option<u8>,
    /// The server's candidates per round: as many positions are tested, and one more.
    #[arg(long, value_name = "K", default_value = "3", value_parser = clap::value_parser!(u16).range(1..=64))]
    candidates: u16,
    /// Concurrent requests under load [default: 4; identifiers: 12].
    #[arg(long, value_name = "N", alias = "streams", value_parser = clap::value_parser!(u16).range(2..=256))]
    concurrency: Option<u16>,
    /// The type that the servers compute in, by which two tokens count as equally good.
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    server_dtype: ServerDtype,
    /// `vicuna`, `llama-2`, `alpaca` or a Jinja file.
    #[arg(long, value_name = "NAME")]
    chat_template: Option<String>,
    #[command(flatten)]
    access: AccessArguments,
}

/// Arguments of commands that ask servers for answers.
#[derive(Debug, Args)]
pub(crate) struct AccessArguments {
    /// The model's name there [default: the first].
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// The environment variable with the servers' key.
    #[arg(long, value_name = "NAME")]
    key_env: Option<String>,
    /// The longest wait for an answer, in seconds.
    #[arg(long, value_name = "S", default_value = "600", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

impl AccessArguments {
    /// Returns a function that reads the servers' key.
    pub(crate) fn secret(&self) -> Box<dyn Fn() -> Result<Secret>> {
        let key_env = self.key_env.clone();
        Box::new(move || match &key_env {
            Some(name) => read_token(name, "--key-env"),
            None => Ok(Secret::default()),
        })
    }

    /// Returns the longest wait for an answer.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ServerDtype {
    F32,
    F16,
    Bf16,
}

impl ServerDtype {
    /// Returns the gap of log-probabilities, in nats, up to which two tokens always count as tied: two units in the
    /// last place of a logit between 16 and 32.
    fn tie(self) -> f64 {
        match self {
            Self::F32 => 4e-6,
            Self::F16 => 0.032,
            Self::Bf16 => 0.25,
        }
    }
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite());
    number.ok_or_else(|| "expected a number above 0".to_owned())
}

/// Runs the command.
pub(crate) fn run(arguments: &CertifyArguments, seed: u64, console: &Console) -> Result<()> {
    anyhow::ensure!(
        arguments.temperature == 1.0 || arguments.top_k.is_some(),
        "`--temperature {}` needs `--top-k`; hint: servers tell the log-probabilities of {NUM_LOG_PROBS} tokens, so other \
         temperatures can be tested among so many, as with `--top-k {NUM_LOG_PROBS}`",
        arguments.temperature
    );
    let devices = vec![Device::flex()];
    let served_as = Some(arguments.access.model.as_deref().unwrap_or("served"));
    let template = arguments.chat_template.as_deref();
    let mut workspace =
        Workspace::open(&arguments.target, served_as, &[], template, devices, console)?;
    workspace.text.dir.clone_from(&arguments.tokenizer);
    let eos_token_ids = workspace.text_side()?.eos_token_ids.clone();
    let sampled = SampledPlan {
        num_draws: arguments.draws as usize,
        num_candidates: arguments.candidates.into(),
        num_prompts: 2,
        temperature: arguments.temperature,
        top_k: arguments.top_k.map(usize::from),
        eos_token_ids,
        seed,
    };
    let (num_prompts, concurrency) = if arguments.workload.is_some() { (12, 12) } else { (16, 4) };
    let settings = CertifySettings {
        urls: [arguments.server.clone(), arguments.reference.clone()],
        model: arguments.access.model.clone(),
        secret: arguments.access.secret(),
        prompts: arguments.prompts.clone(),
        num_prompts: arguments.num_prompts.map_or(num_prompts, NonZeroUsize::get),
        timeout: arguments.access.timeout(),
        plan: CertifyPlan {
            num_tokens: arguments.max_new_tokens.get(),
            concurrency: arguments.concurrency.map_or(concurrency, usize::from),
            least_tie: arguments.server_dtype.tie(),
            sampled: (arguments.draws > 0).then_some(sampled),
        },
    };
    let found = certify_server(&settings, &workspace, console)?;
    console.text(text(&found, console.width()))?;
    console.document(&found)?;
    match found.certificate.verdict {
        Verdict::NotRefuted => Ok(()),
        Verdict::Refuted => Err(CheckFailed::new("the server's output is not its target's").into()),
        Verdict::Inconclusive => {
            let what = "it cannot be told whether the server's output is its target's";
            Err(CheckFailed::unknown(what).into())
        }
    }
}

fn text(found: &Certified, width: Option<usize>) -> String {
    let certificate = &found.certificate;
    let verdict = match certificate.verdict {
        Verdict::NotRefuted => {
            "NOT REFUTED: nothing speaks against the server's output being its target's."
        }
        Verdict::Refuted => "REFUTED: the server's output is not its target's.",
        Verdict::Inconclusive => "INCONCLUSIVE: it cannot be told.",
    };
    let greedy = &certificate.greedy;
    let mut sentences = vec![format!(
        "Greedy, alone and under load: {} of {} compared, {}. A gap of up to {:.4} nats is a tie.",
        counted(greedy.num_tokens, "token"),
        counted(greedy.num_prompts, "prompt"),
        counted(greedy.differences.len(), "difference"),
        greedy.tie_gap
    )];
    for it in greedy.differences.iter().take(5) {
        let load = if it.under_load { "under load" } else { "alone" };
        sentences.push(format!(
            "Prompt {}, token {}, {load}: gap {:.4} nats.",
            it.prompt + 1,
            it.position + 1,
            it.gap
        ));
    }
    sentences.extend(certificate.ends.iter().filter_map(end_sentence));
    sentences.extend(certificate.sampled.iter().flat_map(sampled_sentences));
    if let Some((drafted, accepted)) = found.num_drafted.zip(found.num_accepted) {
        sentences.push(format!(
            "By its counters the server drafted {drafted} candidates and accepted {accepted}."
        ));
    }
    sentences.extend(found.doubts.iter().cloned());
    let lines = [verdict.to_owned()].into_iter().chain(sentences);
    lines.flat_map(|line| wrapped(&line, width)).collect::<Vec<_>>().join("\n") + "\n"
}

/// Describes an end token that answers reached, or an end that they passed.
fn end_sentence(end: &ReachedEnd) -> Option<String> {
    let name = end.token.map_or("the limit".to_owned(), |id| format!("the end token {id}"));
    let why = match end.reference_stops {
        _ if end.num_past == 0 => {
            end.token?;
            let (num, share) =
                (counted(end.num_stopped, "answer"), 300.0 / end.num_stopped.max(3) as f64);
            return Some(format!(
                "{num} stopped at {name}; if {share:.1} % went on, that would be found with probability 0.95."
            ));
        }
        Some(true) => "where the reference stops",
        Some(false) => "and so do the reference's, so this is no fault",
        None => "which the reference did not draw, so it is not known whether this is a fault",
    };
    Some(format!("{} of the server's answers go on after {name}, {why}.", end.num_past))
}

/// Describes the sampled tests: what they found, and the differences that they would find.
fn sampled_sentences(sampled: &SampledReport) -> Vec<String> {
    let num = |count: usize, what: &str| counted(count, what).replace("prefixs", "prefixes");
    let mut by_position = Vec::new();
    for (at, (distance, tokens)) in
        (1..).zip(sampled.detectable.iter().zip(&sampled.num_by_position))
    {
        let of = |distance| format!("{distance:.3} at position {at} ({})", num(*tokens, "token"));
        by_position.extend(distance.map(of));
    }
    let answers = format!(
        "Sampled: {} to {}",
        num(sampled.num_draws, "answer"),
        num(sampled.num_prompts, "prompt")
    );
    let mut sentences = vec![match sampled.tests.first() {
        None => format!(
            "{answers}, and no prefix in 200 of them, so short answers test nothing. Raise `--draws`, or give prompts whose \
             first tokens are less open."
        ),
        Some(worst) => format!(
            "{answers}, {}, smallest p-value {:.2e}. By position of a round, these total variations would be found with \
             probability 0.9: {}.",
            num(sampled.num_prefixes, "tested prefix"),
            worst.p_value,
            by_position.join(", ")
        ),
    }];
    let tested = sampled.full_length.iter().filter(|test| test.num > 0);
    if let Some(least) = tested.clone().map(|test| test.p_value).reduce(f64::min) {
        let shares = tested.filter(|test| test.what == TestedWhat::MostProbable).map(|it| {
            format!("{:.3} from token {} on ({})", it.detectable, it.from + 1, num(it.num, "token"))
        });
        sentences.push(format!(
            "Sampled to full length, smallest p-value {least:.2e}. These changes in the share of most probable tokens would \
             be found with probability 0.9: {}. Smaller differences are not testable at this size, nor is a fault of one \
             request in N unless its difference is N times as large: raise `--draws`.",
            shares.collect::<Vec<_>>().join(", ")
        ));
    }
    let of_prefixes = sampled.tests.iter().map(|test| {
        let place = format!("Prompt {} and {}", test.prompt + 1, num(test.num_given, "token"));
        (format!("{place} of its answer, {:?}", test.what), test.p_value, test.again)
    });
    let of_places = sampled.full_length.iter().map(|test| {
        (format!("From token {} on, {:?}", test.from + 1, test.what), test.p_value, test.again)
    });
    let repeated = of_prefixes.chain(of_places).filter_map(|(what, first, again)| {
        Some(format!("{what}: p = {first:.2e}, and {:.2e} with new seeds.", again?))
    });
    sentences.extend(repeated.take(8));
    sentences
}
