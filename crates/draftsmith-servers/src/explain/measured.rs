//! Asks a speculating server for answers, one request at a time, so that the differences of its
//! counters are those of one answer.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use draftsmith_recipe::{TextSide, Watch};
use draftsmith_served::ServerRecipe;

use super::ExplainSettings;
use crate::certify::{greedy_ask, greedy_client};
use crate::costs::{SERVER_FLAGS, SpeculationCounters, TimedServer, accepted_by_position, metric};

/// The waits in milliseconds for counters that a server updates after it has answered.
const LATE: [u64; 3] = [20, 80, 300];

/// What a server counted while it gave one answer. Unknown counts are `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ServerCounts {
    pub(super) num_rounds: Option<f64>,
    pub(super) num_drafted: Option<f64>,
    pub(super) num_accepted: Option<f64>,
    /// The rounds that accepted the candidate at each position; empty if unknown.
    pub(super) by_position: Vec<f64>,
}

/// A server's answer to a prompt.
#[derive(Debug, Clone)]
pub(super) struct CountedAnswer {
    pub(super) prompt_ids: Vec<u32>,
    pub(super) ids: Vec<u32>,
    pub(super) measured: ServerCounts,
}

impl CountedAnswer {
    /// Counts the tokens that rounds gave: all but the first one, which comes from the prefill.
    pub(super) fn num_in_rounds(&self) -> f64 {
        self.ids.len() as f64 - 1.0
    }

    /// Returns the accepted candidates, and the rounds of the answer. If one of them is not counted, it
    /// follows from the other, because each round gives one token more than it accepts.
    pub(super) fn counts(&self) -> [f64; 2] {
        let ServerCounts { num_rounds, num_accepted, .. } = self.measured;
        match (num_accepted, num_rounds) {
            (Some(accepted), Some(rounds)) => [accepted, rounds],
            (Some(accepted), None) => [accepted, self.num_in_rounds() - accepted],
            (None, rounds) => {
                let rounds = rounds.unwrap_or(self.num_in_rounds());
                [self.num_in_rounds() - rounds, rounds]
            }
        }
    }
}

impl ServerCounts {
    /// Reads a server's counts since its start; `None` without counters.
    fn of(server: &TimedServer) -> Result<Option<Self>> {
        let page = server.metrics()?.concat();
        // SGLang counts rounds, and tells how many candidates they have.
        let verified = metric(&page, "sglang:spec_verify_calls_total");
        let of_sglang = verified.map(|rounds| {
            let steps = metric(&page, "sglang:spec_num_steps");
            let num_drafted = steps.map(|steps| steps * rounds);
            Self { num_rounds: verified, num_drafted, ..Self::default() }
        });
        let of_others = SpeculationCounters::read(&page).map(|it| Self {
            num_rounds: it.num_rounds,
            num_drafted: Some(it.num_drafted),
            num_accepted: Some(it.num_accepted),
            by_position: accepted_by_position(&page),
        });
        Ok(of_others.or(of_sglang))
    }

    /// Subtracts earlier counts. A server that was started again has lower ones, and is not known then.
    fn since(&self, before: &Self) -> Option<Self> {
        let more = |now: Option<f64>, then: Option<f64>| Some(now? - then?);
        let then = before.by_position.iter().copied().chain(std::iter::repeat(0.0));
        let by_position = self.by_position.iter().zip(then).map(|(now, then)| now - then).collect();
        let since = Self {
            num_rounds: more(self.num_rounds, before.num_rounds),
            num_drafted: more(self.num_drafted, before.num_drafted),
            num_accepted: more(self.num_accepted, before.num_accepted),
            by_position,
        };
        let counts = [since.num_rounds, since.num_drafted, since.num_accepted];
        counts.into_iter().flatten().all(|count| count >= 0.0).then_some(since)
    }

    /// Returns whether the counters may not include all rounds of an answer of `num_tokens` tokens yet. Each
    /// round gives a token more than it accepts.
    fn is_late(&self, num_tokens: usize) -> bool {
        let counted = self.num_rounds.map(|rounds| match self.num_accepted {
            Some(accepted) => rounds + accepted + 2.0 >= num_tokens as f64,
            None => rounds > 0.0,
        });
        counted == Some(false)
    }
}

/// Asks the server for an answer to each prompt.
///
/// # Errors
/// If the server fails, counts nothing, or does not speculate.
pub(super) fn ask_each(
    settings: &ExplainSettings,
    text: (&TextSide, usize),
    prompts: Vec<Vec<u32>>,
    watch: &dyn Watch,
) -> Result<Vec<CountedAnswer>> {
    let url = &settings.url;
    let (model, secret) = (settings.model.as_deref(), (settings.secret)()?);
    let server = TimedServer::open(url, model, secret, settings.timeout, SERVER_FLAGS)?;
    // A request that is sent again would be counted twice.
    let own = ServerRecipe {
        urls: vec![url.clone()],
        model: server.model.clone(),
        timeout_s: settings.timeout.as_secs_f64(),
        retries: 0,
        ..ServerRecipe::default()
    };
    let completer = greedy_client(&own, (settings.secret)()?, text, settings.max_new_tokens);
    let progress = watch.bar("explain", "answers", prompts.len() as u64);
    let (mut answers, mut before) = (Vec::new(), ServerCounts::of(&server)?);
    for prompt_ids in prompts {
        watch.check_interrupted()?;
        let completed = completer.complete(greedy_ask(&prompt_ids, settings.max_new_tokens))?;
        let mut waits = LATE.into_iter();
        let counted = loop {
            let now = ServerCounts::of(&server)?;
            let counted = now.as_ref().zip(before.as_ref()).and_then(|(now, then)| now.since(then));
            let is_late = counted.as_ref().is_some_and(|it| it.is_late(completed.ids.len()));
            match waits.next().filter(|_| is_late) {
                Some(wait) => sleep(Duration::from_millis(wait)),
                None => {
                    before = now;
                    break counted;
                }
            }
        };
        let in_answer = completed.speculated.map(|[drafted, accepted]| ServerCounts {
            num_drafted: Some(drafted),
            num_accepted: Some(accepted),
            ..ServerCounts::default()
        });
        let measured = counted.or(in_answer).with_context(|| {
            format!(
                "the server `{url}` shows no counters of speculation; hint: start vLLM without \
                 `--disable-log-stats`, SGLang with `--enable-metrics` and llama-server with a drafter"
            )
        })?;
        answers.push(CountedAnswer { prompt_ids, ids: completed.ids, measured });
        progress.advance(1.0);
    }
    progress.finish();
    answers.retain(|answer| answer.ids.len() > 2);
    ensure!(
        answers.len() >= 4,
        "{} answers of the server have more than two tokens, and 4 are needed; hint: give more prompts, or raise \
         `--max-new-tokens`",
        answers.len()
    );
    let is_drafted =
        |it: &ServerCounts| it.num_drafted.or(it.num_rounds).is_some_and(|num| num > 0.0);
    ensure!(
        answers.iter().any(|answer| is_drafted(&answer.measured)),
        "the server `{url}` drafted nothing, so there is no acceptance to explain; hint: start it with the drafter, as \
         `draftsmith export` shows"
    );
    Ok(answers)
}
