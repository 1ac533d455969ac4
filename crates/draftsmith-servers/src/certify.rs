//! `certify`: compares a server with a reference, and checks by its counters that it speculated.

mod comparison;
mod identifiers;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Result, ensure};
use draftsmith_recipe::{
    Interrupted, PromptChoice, Reading, TextSide, Watch, Workspace, read_sources,
};
use draftsmith_served::{
    Completer, Secret, ServedError, ServerRecipe, TargetSettings, check_given_url,
};
use draftsmith_theory::Decoding;
use draftsmith_tune::server_access::Asking;
use serde::Serialize;

use crate::costs::{SERVER_FLAGS, SpeculationCounters, TimedServer};

pub(crate) use self::comparison::greedy_ask;
pub use self::comparison::{
    Certificate, CertifyPlan, Completing, Difference, FullLengthTest, GreedyReport, ReachedEnd,
    SampledPlan, SampledReport, TestedWhat, Verdict, certify,
};

/// The settings of a certification.
pub struct CertifySettings {
    /// The URLs, up to `/v1`, of the speculating server and of a reference server that does not.
    pub urls: [String; 2],
    /// The model's name on both servers; by default the first in each server's list.
    pub model: Option<String>,
    /// A function that reads the servers' API key. It is called for every client.
    pub secret: Box<dyn Fn() -> Result<Secret>>,
    /// The prompt file; `None` for identifiers that the target repeats.
    pub prompts: Option<PathBuf>,
    /// The maximum number of prompts.
    pub num_prompts: usize,
    /// The maximum wait for a response.
    pub timeout: Duration,
    /// The plan of the comparison.
    pub plan: CertifyPlan,
}

/// The result of a certification.
#[derive(Debug, Serialize)]
pub struct Certified {
    /// The result of the comparison.
    #[serde(flatten)]
    pub certificate: Certificate,
    /// Number of candidates drafted during the comparison, by the server's counters; null if
    /// unknown.
    pub num_drafted: Option<f64>,
    /// The accepted ones among these candidates; null without counters.
    pub num_accepted: Option<f64>,
    /// Limits of the verdict, one sentence each.
    pub doubts: Vec<String>,
}

/// Certifies a server. Of the target in `workspace`, the tokenizer and sizes are read.
///
/// # Errors
/// If prompts cannot be read, or a server fails.
pub fn certify_server(
    settings: &CertifySettings,
    workspace: &Workspace,
    watch: &dyn Watch,
) -> Result<Certified> {
    let text = workspace.text_side()?;
    let prompts: Vec<Vec<u32>> = match &settings.prompts {
        None => {
            let ids = |number| identifiers::prompt(text, number, settings.plan.num_tokens);
            (0..settings.num_prompts).map(ids).collect::<Result<_>>()?
        }
        Some(path) => encoded_prompts(path, settings.num_prompts, text, watch)?,
    };
    let open = |url: &String| -> Result<TimedServer> {
        let (model, secret) = (settings.model.as_deref(), (settings.secret)()?);
        Ok(TimedServer::open(url, model, secret, settings.timeout, SERVER_FLAGS)?)
    };
    let [url, reference_url] = &settings.urls;
    settings.urls.iter().try_for_each(|url| check_given_url(url, &SERVER_FLAGS))?;
    ensure!(
        url.trim_end_matches('/') != reference_url.trim_end_matches('/'),
        "`--server` and `--reference` are the same server, `{url}`; hint: start the target a second time without \
         speculation and give its address as `--reference`"
    );
    let (counted, listed) = (open(url)?, open(reference_url)?);
    let vocab_size = workspace.models.target_shape()?.vocab_size;
    let end = |url, model: &str| settings.end(url, model, text, vocab_size);
    let (server, reference) = (end(url, &counted.model)?, end(reference_url, &listed.model)?);
    let before = counted.counters()?;
    let sampled = settings.plan.sampled.as_ref();
    let num_units =
        sampled.map_or(0, |it| it.num_prompts.min(prompts.len()) + it.num_full_length());
    let progress = watch.bar("certify", "sampled places", num_units as u64);
    let listener = Asking { watch, progress: &*progress, is_told: AtomicBool::default() };
    let found = certify(&server, &reference, &prompts, &settings.plan, &listener);
    let certificate = found.map_err(|error| match error {
        ServedError::Interrupted => Interrupted.into(),
        error => anyhow::Error::from(error),
    })?;
    progress.finish();
    let counters = before.zip(counted.counters()?).and_then(|(before, after)| after.since(&before));
    Ok(judged(certificate, &settings.plan, counters))
}

/// Reads up to `num_prompts` prompts of a file, spread evenly, and encodes each up to its first answer.
pub(crate) fn encoded_prompts(
    path: &Path,
    num_prompts: usize,
    text: &TextSide,
    watch: &dyn Watch,
) -> Result<Vec<Vec<u32>>> {
    let sources = read_sources(&[path.to_path_buf()], &Reading::default())?;
    let choice = PromptChoice { num_prompts: Some(num_prompts), skip_long: true };
    let prompts = choice.of_all(&sources, text, watch)?;
    prompts.iter().map(|it| text.prompt_ids(it, 0, &[])).collect()
}

impl CertifySettings {
    /// Creates the client for one of the two servers.
    fn end(&self, url: &str, model: &str, text: &TextSide, vocab_size: usize) -> Result<Completer> {
        let (secret, num_tokens) = ((self.secret)()?, self.plan.num_tokens);
        let (timeout_s, urls) = (self.timeout.as_secs_f64(), vec![url.to_owned()]);
        let model = model.to_owned();
        let server = ServerRecipe { urls, model, timeout_s, retries: 2, ..ServerRecipe::default() };
        Ok(greedy_client(&server, secret, (text, vocab_size), num_tokens))
    }
}

/// Creates the client for answers of up to `num_tokens` tokens without stop strings.
pub(crate) fn greedy_client(
    server: &ServerRecipe,
    secret: Secret,
    (text, vocab_size): (&TextSide, usize),
    num_tokens: usize,
) -> Completer {
    let target = TargetSettings {
        tokenizer: text.tokenizer.clone(),
        eos_token_ids: text.eos_token_ids.clone(),
        stop_strings: Vec::new(),
        text_end: None,
        vocab_size,
        context: text.context,
        decoding: Decoding::GREEDY,
        max_new_tokens: num_tokens,
        seed: 0,
    };
    Completer::new(server, secret, target, SERVER_FLAGS)
}

/// Says what was not tested: positions of a round, ends, other settings, longer answers and higher
/// loads.
fn untested(certificate: &Certificate, plan: &CertifyPlan) -> Vec<String> {
    let mut doubts = Vec::new();
    if let Some(sampled) = &certificate.sampled {
        let positions = sampled.num_by_position.iter().enumerate();
        let none: Vec<String> =
            positions.filter(|(_, num)| **num == 0).map(|(at, _)| (at + 1).to_string()).collect();
        if !none.is_empty() && sampled.num_prefixes > 0 {
            doubts.push(format!(
                "No sampled token was tested at position {} of a round of {} candidates and the token after them: raise \
                 `--draws`.",
                none.join(", "),
                sampled.num_by_position.len() - 1
            ));
        }
    }
    if certificate.ends.iter().all(|end| end.token.is_none()) {
        doubts.push(
            "No answer reached an end token, so it was not tested that answers stop there: raise `--max-new-tokens`, or use \
             prompts with shorter answers."
                .to_owned(),
        );
    }
    let sampling = plan.sampled.as_ref().map_or("sampled answers (`--draws`)".to_owned(), |it| {
        let temperature = match it.temperature == 1.0 {
            true => "whether the server applies the temperature, since it is 1",
            false => "other temperatures",
        };
        let top_k = if it.top_k.is_none() { "top-k (`--top-k`), " } else { "" };
        format!("{temperature} (`--temperature`), {top_k}top-p, min-p")
    });
    doubts.push(format!(
        "Not tested: {sampling}, penalties, stop strings, tokens after the first {} of an answer (`--max-new-tokens`), and \
         more than {} requests at a time (`--concurrency`).",
        plan.num_tokens, plan.concurrency
    ));
    doubts
}

/// Adjusts the verdict by the server's speculation counters, and lists doubts.
fn judged(
    mut certificate: Certificate,
    plan: &CertifyPlan,
    counters: Option<SpeculationCounters>,
) -> Certified {
    let mut doubts = Vec::new();
    match counters {
        None => doubts.push(
            "The server shows no counters of speculation (llama-server needs `--metrics`), or was started again, so it \
             is not known whether it speculated."
                .to_owned(),
        ),
        Some(counted) if counted.num_accepted > counted.num_drafted => doubts.push(format!(
            "The server's counters are of another kind, {} candidates drafted and {} accepted, so it is not known whether \
             it speculated: check that no other server writes them.",
            counted.num_drafted, counted.num_accepted
        )),
        Some(counted) if counted.num_drafted == 0.0 => {
            doubts.push("The server drafted nothing, so nothing was tested.".to_owned());
            if certificate.verdict == Verdict::NotRefuted {
                certificate.verdict = Verdict::Inconclusive;
            }
        }
        Some(counted) if counted.num_accepted >= counted.num_drafted => doubts.push(
            "No candidate was rejected, so the way in which rejections are handled was not tested: use prompts that the \
             drafter finds harder."
                .to_owned(),
        ),
        Some(_) => {}
    }
    doubts.extend(untested(&certificate, plan));
    Certified {
        certificate,
        num_drafted: counters.map(|it| it.num_drafted),
        num_accepted: counters.map(|it| it.num_accepted),
        doubts,
    }
}
