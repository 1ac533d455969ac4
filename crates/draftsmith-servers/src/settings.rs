//! `tune --for SERVER`: chooses the best number of candidates at each load of a server, and writes
//! it as that server's own settings.
//!
//! The rounds under each setting come from recordings, and the times of rounds from `draftsmith
//! server costs`. Settings are chosen on validation prompts and evaluated on test prompts.
//! Intervals resample prompts and blocks of rounds.

mod files;
mod replayed;

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use draftsmith_report::{DecodingName, DrafterName, shown_interval};
use draftsmith_theory::{
    DrafterId, Drafting, Estimate, NgramSimple, Recordings, RoundTable, SeededDraws, ServerCosts,
    least_by,
};
use serde::Serialize;

use draftsmith_recipe::{Recipe, ServedDrafter, Workspace};
use draftsmith_tune::rollouts::{PromptSet, RolloutFiles, RolloutKey};
use draftsmith_tune::tuner::{LOOK_UP_LENGTHS, LOOK_UP_MATCHES};

use self::replayed::Replayed;

pub use self::files::{ScheduleKeys, ServerKind, SettingsFile};

/// The maximum share of throughput that we give up for a setting with fewer candidates.
const EQUAL_WITHIN: f64 = 0.01;
/// The minimum gain, by the lower end of its interval, below which speculation is turned off.
const LEAST_GAIN: f64 = 0.02;
/// The probabilities to try below which llama.cpp stops drafting.
const LEAST_PROBS: [f64; 5] = [0.3, 0.5, 0.7, 0.8, 0.9];
const MORE_ROWS: &str = "Settings with `--spec-draft-p-min` are not weighed at every load: that needs rounds without \
                         speculation of as many requests as rounds have rows (`draftsmith server costs --candidates 0 \
                         --concurrency 1,2,4,8,16`).";

/// The load of a server.
#[derive(Debug, Clone, PartialEq)]
pub enum ServerLoad {
    /// Batch sizes (numbers of concurrent requests), each with its share of the generated tokens.
    Shares(Vec<(f64, f64)>),
    /// The arrival rate in requests per second, and the number of tokens per request.
    Rate(f64, f64),
}

/// The server for which settings are chosen.
#[derive(Debug, Clone)]
pub struct ServerTuning {
    /// The server program.
    pub kind: ServerKind,
    /// The name of the file with the costs.
    pub source: String,
    /// The measured times of the server's rounds.
    pub costs: ServerCosts,
    /// The name of the drafter whose rounds were measured, if known.
    pub drafter: Option<String>,
    /// The server's load.
    pub load: ServerLoad,
}

/// The recordings of one drafter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recorded<'a> {
    /// The recorded responses on which settings are chosen.
    pub(crate) chosen_on: &'a Recordings,
    /// The recorded responses on which settings are evaluated.
    pub(crate) judged_on: &'a Recordings,
    pub(crate) decoding: DecodingName,
    /// The seed of the resampling for intervals.
    pub(crate) seed: u64,
}

/// A server's settings for one drafter and way of decoding.
#[derive(Debug, Clone, Serialize)]
pub struct ServerSettings {
    /// The drafter.
    pub drafter: DrafterName,
    /// Greedy or sampled decoding.
    pub decoding: DecodingName,
    /// The number of test prompts.
    pub num_prompts: usize,
    /// The results by batch size.
    pub rows: Vec<LoadRow>,
    /// The best single setting for all batch sizes at the given load; null if none pays.
    pub single: Option<Drafting>,
    /// The speedup of `single` over no speculation at the given load; null without a setting.
    pub single_speedup: Option<Estimate>,
    /// The speedup of a setting that may pay, but not certainly; null if a setting certainly pays, or
    /// none may.
    pub uncertain_speedup: Option<Estimate>,
    /// The share of speed at the load that `single` loses against the best setting per batch size.
    pub lost_by_single: f64,
    /// The server's settings files; empty if speculation does not pay.
    pub files: Vec<SettingsFile>,
    /// A file for benchmarks only, in which the server accepts at the recorded rates; null if the server
    /// cannot.
    pub benchmark: Option<SettingsFile>,
    /// The shell commands that start the server with the settings, to be run one after another.
    pub start: Vec<String>,
    /// Notes on what the settings cannot express and how to use them.
    pub notes: Vec<String>,
}

/// The results for one batch size.
#[derive(Debug, Clone, Serialize)]
pub struct LoadRow {
    /// The batch size: the number of concurrent requests.
    pub batch_size: usize,
    /// The best number of candidates; 0 if speculation does not pay.
    pub best: usize,
    /// The speedup of `best` over the server without speculation; null if `best` is 0.
    pub speedup: Option<Estimate>,
    /// The result of each setting that was tried.
    pub cells: Vec<LoadCell>,
}

/// The result of one setting at one batch size.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct LoadCell {
    /// The setting.
    #[serde(flatten)]
    pub drafting: Drafting,
    /// The tokens per round and request on test prompts.
    pub tokens_per_round: f64,
    /// The tokens per second of all requests together.
    pub tokens_per_second: f64,
    /// The speedup over the server without speculation.
    pub speedup: f64,
}

/// Chooses settings for each recorded drafter and way of decoding, and for the server's lookup.
///
/// # Errors
/// If recordings are missing, or the costs have no number of candidates that was recorded.
pub fn tune_for_server(
    recipe: &Recipe,
    workspace: &Workspace,
    tuning: &ServerTuning,
) -> Result<Vec<ServerSettings>> {
    let (_, evaluate) = recipe.need_tuning("tune")?;
    let files = RolloutFiles::of(recipe, workspace)?;
    let (mut all, mut left_out) = (Vec::new(), BTreeSet::new());
    for decoding in &evaluate.decodings {
        let mut has_look_ups = false;
        for drafter in files.drafters() {
            let read = |set| files.read(RolloutKey { drafter, set, decoding: *decoding });
            let [validation, test] = [read(PromptSet::Validation)?, read(PromptSet::Test)?];
            let id = drafter.id().context("a drafter was recorded")?;
            let served = recipe.served(id).filter(|it| tuning.kind.loads(it.flags));
            let Some(served) = served else {
                left_out.insert(id);
                continue;
            };
            let recorded = Recorded {
                chosen_on: &validation.recordings,
                judged_on: &test.recordings,
                decoding: *decoding,
                seed: recipe.seed,
            };
            all.push(tuning.settings(recorded, drafter, &served)?);
            // Lookup reads only the target's responses, which are the same for all drafters.
            if !has_look_ups {
                all.extend(tuning.look_ups(recorded, &served)?);
                has_look_ups = true;
            }
        }
    }
    let notes = left_out.iter().map(|id| {
        format!(
            "The server does not load `{id}`, or drafts badly with it, so it is left out; hint: train an adapter with an \
             attention layer and without `draft_vocabulary`, or choose another server."
        )
    });
    let notes: Vec<String> = notes.collect();
    match all.last_mut() {
        Some(last) => last.notes.extend(notes),
        None => bail!("{}", notes.join(" ")),
    }
    Ok(all)
}

impl ServerSettings {
    /// Returns the speedup at the load; 1 if no setting pays.
    pub fn speedup(&self) -> f64 {
        self.single_speedup.map_or(1.0, |speedup| speedup.value)
    }
}

/// Returns the settings that gain the most in the way of decoding in which they gain the least, so
/// that one start serves every way. `None` if no drafter pays in all of them.
pub fn winner(all: &[ServerSettings]) -> Option<&ServerSettings> {
    let least_of = |drafter: DrafterName| {
        let own = all.iter().filter(|it| it.drafter == drafter);
        least_by(own, |it| it.speedup())
    };
    let least = all.iter().filter_map(|it| least_of(it.drafter));
    let best = least.max_by(|one, other| one.speedup().total_cmp(&other.speedup()));
    best.filter(|it| it.single.is_some())
}

impl ServerTuning {
    /// Chooses a drafter's settings on the first recordings, and evaluates them on the second.
    ///
    /// # Errors
    /// If the costs have no number of candidates that was recorded, or do not cover the load.
    pub(crate) fn settings(
        &self,
        recorded: Recorded<'_>,
        drafter: DrafterName,
        served: &ServedDrafter,
    ) -> Result<ServerSettings> {
        let (longest, whole) = (recorded.chosen_on.max_length, served.whole_block);
        let is_usable = |it: &usize| *it <= longest && whole.is_none_or(|whole| *it == whole);
        let lengths: Vec<usize> = self.costs.lengths().into_iter().filter(is_usable).collect();
        if lengths.is_empty() {
            let whole = whole.map_or(String::new(), |it| format!(", in whole blocks of {it}"));
            bail!(
                "the costs have no number of candidates of {} up to {longest}, as many as were recorded{whole}; hint: measure \
                 one with `draftsmith server costs --candidates`",
                drafter.text()
            );
        }
        let mut tried: Vec<Drafting> = lengths.iter().copied().map(Drafting::fixed).collect();
        let cuts = served.flags.llama_cpp_cuts(recorded.chosen_on.head);
        if self.kind == ServerKind::LlamaCpp && cuts {
            let of =
                |num| LEAST_PROBS.map(|least_prob| Drafting { least_prob, ..Drafting::fixed(num) });
            tried.extend(lengths.iter().copied().flat_map(of));
        }
        let choosing = self.choosing(recorded, tried)?;
        let mut settings = choosing.settings(drafter, recorded.decoding)?;
        self.kind.write(&mut settings, served);
        settings.benchmark = self.kind.benchmark(&settings, recorded.judged_on)?;
        let is_weighed = |row: &LoadRow| row.cells.iter().any(|it| it.drafting.least_prob > 0.0);
        if self.kind == ServerKind::LlamaCpp && cuts && !settings.rows.iter().all(is_weighed) {
            settings.notes.push(MORE_ROWS.to_owned());
        }
        let (name, measured) = (drafter.text(), self.drafter.as_deref().unwrap_or("UNNAMED"));
        if measured != name {
            settings.notes.push(format!(
                "These are the costs of rounds with the drafter {measured}: with {name} a round may take longer or shorter. \
                 `draftsmith server costs --drafter NAME` names the served drafter."
            ));
        }
        Ok(settings)
    }

    /// Chooses settings for a drafter, or for the server's lookup if it is faster at the load.
    ///
    /// # Errors
    /// As [`settings`](Self::settings).
    pub(crate) fn fastest(
        &self,
        recorded: Recorded<'_>,
        drafter: DrafterName,
        served: &ServedDrafter,
    ) -> Result<ServerSettings> {
        let drafted = self.settings(recorded, drafter, served)?;
        let looked_up = self.look_ups(recorded, served)?;
        Ok(looked_up.filter(|it| it.speedup() > drafted.speedup()).unwrap_or(drafted))
    }

    /// Chooses settings for llama.cpp's lookup, or for vLLM's suffix decoding if there are stored
    /// answers. Returns `None` if the server has neither, or the costs without speculation do not cover
    /// rounds with that many rows.
    ///
    /// # Errors
    /// If the costs do not cover the load.
    pub(crate) fn look_ups(
        &self,
        recorded: Recorded<'_>,
        served: &ServedDrafter,
    ) -> Result<Option<ServerSettings>> {
        let most_rows = self.costs.batch_sizes().last().copied().unwrap_or(1);
        let of = |num_matched| {
            let most = LOOK_UP_LENGTHS
                .into_iter()
                .filter(move |most| (num_matched..most_rows).contains(most));
            most.map(move |most| Drafting::look_up(NgramSimple { num_matched, most }))
        };
        let tried: Vec<Drafting> = match self.kind {
            ServerKind::LlamaCpp => LOOK_UP_MATCHES.into_iter().flat_map(of).collect(),
            ServerKind::Vllm if recorded.chosen_on.answers.is_some() => {
                let most = LOOK_UP_LENGTHS.into_iter().filter(|most| *most < most_rows);
                most.map(Drafting::suffix).collect()
            }
            _ => Vec::new(),
        };
        if tried.is_empty() {
            return Ok(None);
        }
        let drafter: DrafterName = DrafterId::LOOK_UP.into();
        let mut settings = self.choosing(recorded, tried)?.settings(drafter, recorded.decoding)?;
        self.kind.write(&mut settings, served);
        Ok(Some(settings))
    }

    fn choosing(&self, recorded: Recorded<'_>, tried: Vec<Drafting>) -> Result<Choosing<'_>> {
        let [validation, test] =
            [recorded.chosen_on, recorded.judged_on].map(|set| Replayed::new(set, &tried));
        let table = self.costs.table();
        Ok(Choosing {
            tuning: self,
            table,
            tried,
            validation: validation?,
            test: test?,
            seed: recorded.seed,
        })
    }
}

struct Choosing<'a> {
    tuning: &'a ServerTuning,
    /// The times of rounds, averaged over all blocks.
    table: RoundTable,
    /// The settings to try, the cheapest first.
    tried: Vec<Drafting>,
    validation: Replayed,
    test: Replayed,
    seed: u64,
}

/// A function that computes the tokens per second under a setting, from round times and replayed
/// prompts. It returns `None` if the rounds were not measured.
type Speed<'a> = &'a dyn Fn(&RoundTable, &Replayed, Option<Drafting>, &[usize]) -> Option<f64>;

impl Choosing<'_> {
    fn settings(&self, drafter: DrafterName, decoding: DecodingName) -> Result<ServerSettings> {
        let (mut rows, mut of_rows): (Vec<LoadRow>, Vec<Option<Drafting>>) = Default::default();
        let may_pay = |it: &Estimate| (it.low..=it.high).contains(&(1.0 + LEAST_GAIN));
        let mut uncertain: Option<Estimate> = None;
        for size in self.tuning.costs.batch_sizes() {
            let at_size =
                |table: &RoundTable, set: &Replayed, setting: Option<Drafting>, some: &[usize]| {
                    set.throughput(table, size as f64, setting, some)
                };
            // A larger batch never gets more candidates than a smaller one.
            let most = rows.last().map_or(usize::MAX, |row| row.best);
            let is_allowed = |it: &Drafting| it.num_candidates <= most && it.least_prob == 0.0;
            let best = self.best(&at_size, is_allowed).flatten();
            uncertain = uncertain.or(best.map(|it| it.1).filter(may_pay));
            let best = best.filter(|it| it.1.low >= 1.0 + LEAST_GAIN);
            let cells = self.cells(size);
            of_rows.push(best.map(|it| it.0));
            let (best, speedup) =
                best.map_or((0, None), |(it, speedup)| (it.num_candidates, Some(speedup)));
            rows.push(LoadRow { batch_size: size, best, speedup, cells });
        }
        let load = &self.tuning.load;
        let at_load =
            |table: &RoundTable, set: &Replayed, setting: Option<Drafting>, some: &[usize]| {
                load.speed(&|size| set.throughput(table, size, setting, some))
            };
        let single = self.best(&at_load, |_| true).context(
            "the load is outside of the batch sizes of the costs; hint: measure them with `draftsmith server costs \
             --concurrency`",
        )?;
        let uncertain = single.map(|it| it.1).filter(may_pay).or(uncertain);
        let single = single.filter(|it| it.1.low >= 1.0 + LEAST_GAIN);
        let (table, all) = (&self.table, self.validation.all());
        let ideal = load.speed(&|size| {
            let nth = rows.iter().position(|row| row.batch_size as f64 >= size);
            let best = nth.and_then(|nth| of_rows[nth]);
            self.validation.throughput(table, size, best, &all)
        });
        let own = at_load(table, &self.validation, single.map(|it| it.0), &all);
        let lost_by_single =
            own.zip(ideal).map_or(0.0, |(own, ideal)| (1.0 - own / ideal).max(0.0));
        Ok(ServerSettings {
            drafter,
            decoding,
            num_prompts: self.test.num_prompts(),
            rows,
            single: single.map(|it| it.0),
            single_speedup: single.map(|it| it.1),
            uncertain_speedup: uncertain.filter(|_| single.is_none()),
            lost_by_single,
            files: Vec::new(),
            benchmark: None,
            start: Vec::new(),
            notes: Vec::new(),
        })
    }

    /// Finds the allowed setting with the highest throughput on validation prompts, or a cheaper
    /// one that is about as good. Returns it with its speedup on test prompts. Returns `Some(None)`
    /// if none is faster than the server without speculation, and `None` if the load was not
    /// measured.
    fn best(
        &self,
        speed: Speed<'_>,
        is_allowed: impl Fn(&Drafting) -> bool,
    ) -> Option<Option<(Drafting, Estimate)>> {
        let all = self.validation.all();
        let of = |setting| Some((setting, speed(&self.table, &self.validation, setting, &all)?));
        let plain = of(None)?;
        let tried = self.tried.iter().copied().filter(is_allowed).map(Some);
        let speeds: Vec<(Option<Drafting>, f64)> =
            [plain].into_iter().chain(tried.filter_map(of)).collect();
        let fastest = speeds.iter().map(|(_, speed)| *speed).fold(0.0, f64::max);
        let is_as_good =
            |(_, speed): &&(Option<Drafting>, f64)| *speed >= (1.0 - EQUAL_WITHIN) * fastest;
        let Some((Some(best), _)) = speeds.iter().find(is_as_good) else { return Some(None) };
        Some(Some((*best, self.speedup(*best, speed))))
    }

    /// Computes the result of each setting at a batch size, on test prompts.
    fn cells(&self, size: usize) -> Vec<LoadCell> {
        let all = self.test.all();
        let speed = |setting| self.test.throughput(&self.table, size as f64, setting, &all);
        let plain = speed(None);
        let cell = |drafting: &Drafting| {
            let tokens_per_round = self.test.tokens_per_round(*drafting, &all);
            let tokens_per_second = speed(Some(*drafting))?;
            let speedup = tokens_per_second / plain?;
            Some(LoadCell { drafting: *drafting, tokens_per_round, tokens_per_second, speedup })
        };
        self.tried.iter().filter_map(cell).collect()
    }

    /// Estimates a setting's speedup on test prompts, resampling prompts and blocks of rounds.
    fn speedup(&self, drafting: Drafting, speed: Speed<'_>) -> Estimate {
        let costs = &self.tuning.costs;
        let whole = self.test.all();
        shown_interval(self.test.num_prompts(), self.seed, |some| {
            let table = if some == whole {
                self.table.clone()
            } else {
                // Each sample of prompts gets its own sample of blocks.
                let number = some.iter().fold(0_u64, |sum, at| sum.wrapping_mul(31) + *at as u64);
                let mut draws = SeededDraws::new(self.seed, &["blocks", &number.to_string()]);
                let mut drawn = |num: usize| (draws.uniform() * num as f64) as usize;
                costs.table_of(|_, num| (0..num).map(|_| drawn(num)).collect())
            };
            let of = |setting| speed(&table, &self.test, setting, some);
            of(Some(drafting)).zip(of(None)).map_or(f64::NAN, |(own, plain)| own / plain)
        })
    }
}

impl ServerLoad {
    /// Computes the tokens per second at this load; `at` gives them for a batch size. For an
    /// arrival rate, returns the speed of one request. Returns `None` if the load exceeds the
    /// measured batch sizes.
    fn speed(&self, at: &dyn Fn(f64) -> Option<f64>) -> Option<f64> {
        match self {
            // The time per token is averaged over tokens.
            Self::Shares(shares) => {
                let mut seconds = 0.0;
                for (size, share) in shares {
                    seconds += share / at(*size)?;
                }
                Some(1.0 / seconds)
            }
            // We find the smallest batch that keeps up with arrivals. Throughput then equals the
            // arrival rate for every setting, so we compare the speed of one request.
            Self::Rate(requests, tokens) => {
                let wanted = requests * tokens;
                let sizes = (0..).map(|nth| 1.0 + f64::from(nth) / 8.0);
                let mut speeds = sizes.map_while(|size| Some((size, at(size)?)));
                let (size, speed) = speeds.find(|(_, speed)| *speed >= wanted)?;
                Some(speed / size)
            }
        }
    }
}

#[cfg(test)]
mod tests;
