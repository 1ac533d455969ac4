//! `tune --for SERVER`: the numbers of candidates that pay on a server, by its load, as that server's own settings.
//!
//! The tokens per round of each number of candidates come from recordings, the time of a round from `draftsmith
//! costs`. Numbers are chosen on validation prompts and judged on test prompts; intervals are over prompts and over
//! blocks of rounds.

mod files;

use anyhow::{Context, Result, bail};
use draftsmith_report::{DecodingName, DrafterName, shown_interval};
use draftsmith_theory::{
    Counts, Estimate, FixedLengthConfig, Recordings, RoundTable, SeededDraws, ServerCosts,
};
use serde::Serialize;

use crate::rollouts::{PromptSet, RolloutFiles, RolloutKey};
use draftsmith_recipe::Recipe;
use draftsmith_recipe::workspace::Workspace;

pub(crate) use self::files::Served;
pub use self::files::{ScheduleKeys, ServerKind, SettingsFile};

/// Fewer candidates are taken if they cost at most this share of throughput.
const EQUAL_WITHIN: f64 = 0.01;
/// Speculation must certainly gain this much, or it is off.
const LEAST_GAIN: f64 = 0.02;

/// How busy a server is: shares of its tokens by the number of requests side by side.
#[derive(Debug, Clone, PartialEq)]
pub enum ServerLoad {
    /// Batch sizes with their shares.
    Shares(Vec<(f64, f64)>),
    /// Requests per second, and tokens per request.
    Rate(f64, f64),
}

/// What to choose for.
#[derive(Debug, Clone)]
pub struct ServerTuning {
    /// The server.
    pub kind: ServerKind,
    /// Its rounds.
    pub costs: ServerCosts,
    /// Its load.
    pub load: ServerLoad,
}

/// The settings for one drafter and way of decoding.
#[derive(Debug, Clone, Serialize)]
pub struct ServerSettings {
    /// The drafter.
    pub drafter: DrafterName,
    /// Greedy or sampled decoding.
    pub decoding: DecodingName,
    /// Number of test prompts.
    pub num_prompts: usize,
    /// By batch size.
    pub rows: Vec<LoadRow>,
    /// One number for all batch sizes, the best at the load; 0 if speculation does not pay there.
    pub single: usize,
    /// Its speed over the server without speculation at the load; null if it is 0.
    pub single_speedup: Option<Estimate>,
    /// What is lost by one number instead of the best for each batch size, as a share of speed at the load.
    pub lost_by_single: f64,
    /// The server's settings.
    pub files: Vec<SettingsFile>,
    /// What the settings cannot express, and how to use them.
    pub notes: Vec<String>,
}

/// A batch size.
#[derive(Debug, Clone, Serialize)]
pub struct LoadRow {
    /// Requests side by side.
    pub batch_size: usize,
    /// The best number of candidates; 0 if none pays.
    pub best: usize,
    /// Its speed over the server without speculation; null if it is 0.
    pub speedup: Option<Estimate>,
    /// Each number of candidates with its tokens per round and its speed.
    pub cells: Vec<LoadCell>,
}

/// A number of candidates at a batch size.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct LoadCell {
    /// The number.
    pub num_candidates: usize,
    /// Tokens per round and request, on test prompts.
    pub tokens_per_round: f64,
    /// Tokens per second of all requests.
    pub tokens_per_second: f64,
    /// Speed over the server without speculation.
    pub speedup: f64,
}

/// Chooses settings for each drafter and way of decoding that was recorded.
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
    let mut all = Vec::new();
    for drafter in files.drafters() {
        for decoding in &evaluate.decodings {
            let read = |set| files.read(RolloutKey { drafter, set, decoding: *decoding });
            let [validation, test] = [read(PromptSet::Validation)?, read(PromptSet::Test)?];
            let id = drafter.id().context("a drafter was recorded")?;
            let own = recipe.drafters.get(id).context("a recorded drafter is in the recipe")?;
            let own_model = own.kind.model().map(|model| model.display().to_string());
            let model = own_model.unwrap_or_else(|| format!("exported/{id}"));
            let served = Served { drafter, form: own.kind.served_as(), model };
            let recordings = [&validation.recordings, &test.recordings];
            all.push(tuning.settings(recordings, *decoding, &served, recipe.seed)?);
        }
    }
    Ok(all)
}

impl ServerTuning {
    /// The settings for a drafter: chosen on the first recordings and judged on the second.
    ///
    /// # Errors
    /// If the costs have no number of candidates that was recorded, or not the load.
    pub(crate) fn settings(
        &self,
        recordings: [&Recordings; 2],
        decoding: DecodingName,
        served: &Served,
        seed: u64,
    ) -> Result<ServerSettings> {
        let [validation, test] = recordings.map(|set| TokensByLength::new(set, &self.costs));
        let choice = Choosing { tuning: self, validation: validation?, test: test?, seed };
        let mut settings = choice.settings(served.drafter, decoding)?;
        (settings.files, settings.notes) = self.kind.write(&settings, served);
        Ok(settings)
    }
}

/// The counts of each prompt by number of candidates.
struct TokensByLength {
    by_length: Vec<(usize, Vec<Counts>)>,
    num_prompts: usize,
}

impl TokensByLength {
    fn new(recordings: &Recordings, costs: &ServerCosts) -> Result<Self> {
        // A server's first token comes from reading the prompt, and is never speculated.
        let recordings = recordings.after_first_token();
        let lengths = costs.lengths().into_iter().filter(|it| *it <= recordings.max_length);
        let count = |candidate_length| {
            let config = FixedLengthConfig { candidate_length };
            anyhow::Ok((candidate_length, recordings.replay_counts(&config.into())?))
        };
        let by_length = lengths.map(count).collect::<Result<Vec<_>>>()?;
        if by_length.is_empty() {
            bail!(
                "the costs have no number of candidates up to {}, as many as were recorded; hint: measure one with \
                 `draftsmith costs --candidates`",
                recordings.max_length
            );
        }
        Ok(Self { by_length, num_prompts: recordings.responses.len() })
    }

    fn lengths(&self) -> impl Iterator<Item = usize> {
        self.by_length.iter().map(|(length, _)| *length)
    }

    /// Tokens per round over all prompts.
    fn mean(&self, num_candidates: usize) -> f64 {
        self.over(num_candidates, &(0..self.num_prompts).collect::<Vec<usize>>())
    }

    /// Tokens per round over some prompts; 1 without candidates.
    fn over(&self, num_candidates: usize, some: &[usize]) -> f64 {
        let Some((_, counts)) = self.by_length.iter().find(|(length, _)| *length == num_candidates)
        else {
            return 1.0;
        };
        let sum =
            |of: fn(&Counts) -> usize| some.iter().map(|at| of(&counts[*at])).sum::<usize>() as f64;
        sum(|it| it.num_tokens) / sum(|it| it.num_target_forwards)
    }
}

/// Tokens per second at some load: by the table, a number of candidates and its tokens per round.
type Throughput<'a> = &'a dyn Fn(&RoundTable, usize, f64) -> Option<f64>;

struct Choosing<'a> {
    tuning: &'a ServerTuning,
    validation: TokensByLength,
    test: TokensByLength,
    seed: u64,
}

impl Choosing<'_> {
    fn settings(&self, drafter: DrafterName, decoding: DecodingName) -> Result<ServerSettings> {
        let mut rows: Vec<LoadRow> = Vec::new();
        for size in self.tuning.costs.batch_sizes() {
            let at_size =
                |table: &RoundTable, num, tokens| table.throughput(size as f64, num, tokens);
            // A larger batch never gets more candidates.
            let most = rows.last().map_or(usize::MAX, |row| row.best);
            let (best, speedup) = self.best(&at_size, most).unwrap_or((0, None));
            rows.push(LoadRow { batch_size: size, best, speedup, cells: self.cells(size) });
        }
        let load = &self.tuning.load;
        let at_load = |table: &RoundTable, num, tokens| load.throughput(table, &|_| (num, tokens));
        let (single, single_speedup) = self.best(&at_load, usize::MAX).context(
            "the load is outside of the batch sizes of the costs; hint: measure them with `draftsmith costs \
             --batch-sizes`",
        )?;
        let table = self.tuning.costs.table();
        let ideal = load.throughput(&table, &|size| {
            let best =
                rows.iter().find(|row| row.batch_size as f64 >= size).map_or(0, |row| row.best);
            (best, self.validation.mean(best))
        });
        let own = at_load(&table, single, self.validation.mean(single));
        let lost_by_single =
            own.zip(ideal).map_or(0.0, |(own, ideal)| (1.0 - own / ideal).max(0.0));
        Ok(ServerSettings {
            drafter,
            decoding,
            num_prompts: self.test.num_prompts,
            rows,
            single,
            single_speedup,
            lost_by_single,
            files: Vec::new(),
            notes: Vec::new(),
        })
    }

    /// The number of candidates with the greatest throughput on validation prompts, or a smaller one that is as good,
    /// and its speed over none on test prompts; 0 if that gains too little. `None` where no round was measured.
    fn best(&self, throughput: Throughput<'_>, most: usize) -> Option<(usize, Option<Estimate>)> {
        let table = self.tuning.costs.table();
        let lengths = [0].into_iter().chain(self.validation.lengths()).filter(|it| *it <= most);
        let speed = |num| Some((num, throughput(&table, num, self.validation.mean(num))?));
        let speeds: Vec<(usize, f64)> = lengths.filter_map(speed).collect();
        let fastest = speeds.iter().map(|(_, speed)| *speed).reduce(f64::max)?;
        let is_as_good = |(_, speed): &&(usize, f64)| *speed >= (1.0 - EQUAL_WITHIN) * fastest;
        let (best, _) = *speeds.iter().find(is_as_good)?;
        if best == 0 {
            return Some((0, None));
        }
        let speedup = self.speedup(best, throughput);
        let pays = speedup.low >= 1.0 + LEAST_GAIN;
        Some(if pays { (best, Some(speedup)) } else { (0, None) })
    }

    /// Each number of candidates at a batch size, on test prompts.
    fn cells(&self, size: usize) -> Vec<LoadCell> {
        let (table, size) = (self.tuning.costs.table(), size as f64);
        let cell = |num_candidates| {
            let tokens_per_round = self.test.mean(num_candidates);
            let tokens_per_second = table.throughput(size, num_candidates, tokens_per_round)?;
            let speedup = tokens_per_second / table.throughput(size, 0, 1.0)?;
            Some(LoadCell { num_candidates, tokens_per_round, tokens_per_second, speedup })
        };
        [0].into_iter().chain(self.test.lengths()).filter_map(cell).collect()
    }

    /// The speed of a number of candidates over none on test prompts. Prompts and blocks of rounds are resampled.
    fn speedup(&self, num_candidates: usize, throughput: Throughput<'_>) -> Estimate {
        let costs = &self.tuning.costs;
        let whole: Vec<usize> = (0..self.test.num_prompts).collect();
        shown_interval(self.test.num_prompts, self.seed, |some| {
            let table = if some == whole {
                costs.table()
            } else {
                // Another sample of blocks for each sample of prompts.
                let number = some.iter().fold(0_u64, |sum, at| sum.wrapping_mul(31) + *at as u64);
                let mut draws = SeededDraws::new(self.seed, &["blocks", &number.to_string()]);
                let mut drawn = |num: usize| (draws.uniform() * num as f64) as usize;
                costs.table_of(|_, num| (0..num).map(|_| drawn(num)).collect())
            };
            let own = throughput(&table, num_candidates, self.test.over(num_candidates, some));
            let plain = throughput(&table, 0, 1.0);
            own.zip(plain).map_or(f64::NAN, |(own, plain)| own / plain)
        })
    }
}

impl ServerLoad {
    /// Tokens per second if a batch gets the number of candidates and the tokens per round of `rule`; `None` outside
    /// of the measured batch sizes.
    fn throughput(&self, table: &RoundTable, rule: &dyn Fn(f64) -> (usize, f64)) -> Option<f64> {
        let at = |size: f64| {
            let (num_candidates, tokens_per_round) = rule(size);
            table.throughput(size, num_candidates, tokens_per_round)
        };
        match self {
            // Time per token, averaged over tokens.
            Self::Shares(shares) => {
                let mut seconds = 0.0;
                for (size, share) in shares {
                    seconds += share / at(*size)?;
                }
                Some(1.0 / seconds)
            }
            // The smallest batch that keeps up with what arrives. Throughput is then the same for all, so the speed
            // that counts is that of one request.
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
