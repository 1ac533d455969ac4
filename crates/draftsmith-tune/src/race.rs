//! A race between settings: they answer the same prompts in turn, and the clock decides.
//!
//! Modelled costs only propose settings. Other programs slow some forwards more than others, and the
//! modelled order of close settings is then chance. In a race, every lap decodes one prompt with all
//! settings that are still running, in random order, and only times of the same laps are compared.
//! A burst of load slows whole laps, which cancels, or single times, which the trimmed ratio leaves
//! out.
//!
//! On a busy machine a short race says little. So its result is averaged with the modelled order, each
//! weighted by the inverse of its variance.

use std::collections::BTreeMap;

use anyhow::Result;
use draftsmith_report::{LEAST_PROMPTS, median_of};
use draftsmith_theory::{Estimate, SeededDraws, bootstrap};
use serde::{Deserialize, Serialize};

/// The share of speed within which settings count as equally fast.
const NEARLY: f64 = 0.01;
/// The number of laps before the first check.
const MIN_LAPS: usize = 10;
/// The number of laps after which a race ends.
const MAX_LAPS: usize = 1000;
/// The share of laps left out at each end of a trimmed ratio.
const TRIMMED: f64 = 0.2;
/// The number of resamples of an interval.
const NUM_RESAMPLES: usize = 400;
/// The least standard deviation of a modelled difference of two settings' logarithmic times.
const LEAST_MODEL_SD: f64 = 0.04;
/// The half width of a 95 % interval in standard deviations.
const SDS: f64 = 1.96;

/// The time of an answer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct AnswerTime {
    pub(crate) num_tokens: usize,
    /// The seconds by which settings are compared.
    pub(crate) seconds: f64,
    /// The seconds that count towards the race's limit.
    pub(crate) waiting: f64,
}

/// A function that decodes a prompt with a setting, both by their numbers.
pub(crate) type Run<'r> = &'r mut dyn FnMut(usize, usize) -> Result<AnswerTime>;

/// The laps of a race so far.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Race {
    laps: Vec<Lap>,
    /// The numbers of the settings that are still running.
    running: Vec<usize>,
    /// The logarithm of the modelled seconds per token of each setting, at the measured costs and then
    /// at costs within their uncertainty; empty without a model.
    modelled: Vec<Vec<f64>>,
    seed: u64,
    /// The seconds of all laps.
    pub(crate) seconds: f64,
}

/// One prompt with every setting that was running.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Lap {
    prompt: usize,
    /// The times by the settings' numbers.
    times: BTreeMap<usize, AnswerTime>,
}

impl Race {
    /// Lines up `num_settings` settings.
    pub(crate) fn new(num_settings: usize, seed: u64) -> Self {
        let running = (0..num_settings).collect();
        Self { laps: Vec::new(), running, modelled: Vec::new(), seed, seconds: 0.0 }
    }

    /// Lines up settings with the logarithms of their modelled seconds per token, each at the measured
    /// costs and then at costs within their uncertainty.
    pub(crate) fn of_modelled(modelled: Vec<Vec<f64>>, seed: u64) -> Self {
        let lined_up = Self::new(modelled.len(), seed);
        Self { modelled, ..lined_up }
    }

    /// Returns whether the race is over: the fastest setting is known to within [`NEARLY`] with 95 %,
    /// or the laps took `limit` seconds. Settings that are clearly slower do not run on.
    pub(crate) fn is_over(&mut self, limit: f64) -> bool {
        let num_laps = self.laps.len();
        if num_laps < LEAST_PROMPTS || (num_laps < MIN_LAPS && self.seconds < limit) {
            return false;
        }
        let leader = self.fastest(&self.running);
        let others = self.running.iter().filter(|one| **one != leader);
        let behind: Vec<(usize, f64)> =
            others.map(|one| (*one, self.slower(*one, leader).low)).collect();
        let is_slower =
            |one: &usize| behind.iter().any(|(other, least)| other == one && *least > 1.0 + NEARLY);
        self.running.retain(|one| !is_slower(one));
        let is_known = behind.iter().all(|(_, least)| *least > 1.0 - NEARLY);
        is_known || num_laps >= MAX_LAPS || self.seconds >= limit
    }

    /// Runs the laps up to the next check by [`is_over`](Self::is_over).
    ///
    /// # Errors
    /// If `run` fails. Earlier laps are kept.
    pub(crate) fn run_laps(&mut self, num_prompts: usize, limit: f64, run: Run<'_>) -> Result<()> {
        let next = (self.laps.len() + (self.laps.len() / 4).max(1)).clamp(MIN_LAPS, MAX_LAPS);
        while self.laps.len() < LEAST_PROMPTS || (self.laps.len() < next && self.seconds < limit) {
            let nth = self.laps.len();
            let cycle = self.shuffled(num_prompts, &["prompts", &(nth / num_prompts).to_string()]);
            let prompt = cycle[nth % num_prompts];
            let mut times = BTreeMap::new();
            for place in self.shuffled(self.running.len(), &["lap", &nth.to_string()]) {
                let setting = self.running[place];
                let time = run(setting, prompt)?;
                times.insert(setting, time);
            }
            self.add(prompt, times);
        }
        Ok(())
    }

    /// Adds a lap, the times of a prompt by the numbers of settings.
    pub(crate) fn add(&mut self, prompt: usize, times: BTreeMap<usize, AnswerTime>) {
        self.seconds += times.values().map(|time| time.waiting).sum::<f64>();
        self.laps.push(Lap { prompt, times });
    }

    /// Returns the numbers below `num` in an order that depends on the seed and `stream`.
    fn shuffled(&self, num: usize, stream: &[&str]) -> Vec<usize> {
        let mut numbers: Vec<usize> = (0..num).collect();
        SeededDraws::new(self.seed, stream).shuffle(&mut numbers);
        numbers
    }

    /// Returns the number of laps.
    pub(crate) fn num_laps(&self) -> usize {
        self.laps.len()
    }

    /// Returns a function that converts a speed relative to the setting `over` to the one that a user
    /// sees, who also waits for the prefill, of `over` and of a setting that reads prompts as
    /// `reader` does.
    pub(crate) fn with_prefill(&self, over: usize, reader: usize) -> impl Fn(f64) -> f64 {
        let median = |setting: usize, of: fn(&AnswerTime) -> f64| {
            let times = self.laps.iter().filter_map(|lap| lap.times.get(&setting));
            median_of(times.map(of)).unwrap_or(0.0)
        };
        let [before, own_before] = [over, reader].map(|it| median(it, |t| t.waiting - t.seconds));
        let decoding = median(over, |time| time.seconds);
        move |speedup| (before + decoding) / (own_before + decoding / speedup)
    }

    /// Returns the fastest of some settings.
    fn fastest(&self, some: &[usize]) -> usize {
        let first = some[0];
        let mut times: Vec<(f64, usize)> =
            some.iter().map(|one| (self.slower(*one, first).value, *one)).collect();
        times.sort_by(|one, other| one.0.total_cmp(&other.0));
        times[0].1
    }

    /// Returns the times of two settings in their common laps, by prompt, or by lap if there are too
    /// few prompts to resample.
    fn pairs(&self, one: usize, other: usize) -> BTreeMap<usize, Vec<[AnswerTime; 2]>> {
        let prompts = self.laps.iter().map(|lap| lap.prompt).max().unwrap_or(0);
        let mut pairs: BTreeMap<usize, Vec<[AnswerTime; 2]>> = BTreeMap::new();
        for (nth, lap) in self.laps.iter().enumerate() {
            if let (Some(one), Some(other)) = (lap.times.get(&one), lap.times.get(&other)) {
                let group = if prompts < LEAST_PROMPTS { nth } else { lap.prompt };
                pairs.entry(group).or_default().push([*one, *other]);
            }
        }
        pairs
    }

    /// Estimates the seconds per token of a setting relative to another, with its 95 % interval.
    fn slower(&self, one: usize, other: usize) -> Estimate {
        let pairs: Vec<Vec<[AnswerTime; 2]>> = self.pairs(one, other).into_values().collect();
        let raced = bootstrap(pairs.len(), NUM_RESAMPLES, self.seed, 0.95, |some| {
            trimmed_ratio(some.iter().flat_map(|group| &pairs[*group]))
        });
        let (Some(one), Some(other)) = (self.modelled.get(one), self.modelled.get(other)) else {
            return raced;
        };
        let apart: Vec<f64> = one.iter().zip(other).map(|(one, other)| one - other).collect();
        let squares = apart.iter().map(|it| (it - apart[0]).powi(2)).sum::<f64>();
        let model_sd = (squares / apart.len() as f64).sqrt().max(LEAST_MODEL_SD);
        let race_sd = (raced.high / raced.low).ln() / (2.0 * SDS);
        // Without common laps the weight of the race is NaN.
        let share = model_sd.powi(2) / (model_sd.powi(2) + race_sd.powi(2));
        let (share, raced) = if share.is_nan() { (0.0, 1.0) } else { (share, raced.value) };
        let value = share * raced.ln() + (1.0 - share) * apart[0];
        let half = SDS * if share > 0.0 { share.sqrt() * race_sd } else { model_sd };
        Estimate { value: value.exp(), low: (value - half).exp(), high: (value + half).exp() }
    }

    /// Estimates the speed of a setting relative to another.
    pub(crate) fn speedup(&self, of: usize, over: usize) -> Estimate {
        self.slower(over, of)
    }

    /// Estimates the speed of a setting relative to `over` by its speed relative to `through`. The
    /// slow `over` leaves a race early, so its own laps with each setting say less about their order.
    pub(crate) fn speedup_through(&self, of: usize, through: usize, over: usize) -> Estimate {
        let parts = [self.speedup(of, through), self.speedup(through, over)];
        let [half, other] = parts.map(|part| (part.high / part.low).ln() / 2.0);
        let (value, half) = (parts[0].value * parts[1].value, half.hypot(other));
        Estimate { value, low: value * (-half).exp(), high: value * half.exp() }
    }

    /// Returns the winner among `some`, which are in order of simplicity: the simplest setting that
    /// is at most [`NEARLY`] slower than the fastest.
    pub(crate) fn winner(&self, some: &[usize]) -> usize {
        let fastest = self.fastest(some);
        let is_near = |one: &&usize| self.slower(**one, fastest).value <= 1.0 + NEARLY;
        *some.iter().find(is_near).unwrap_or(&fastest)
    }

    /// Returns the share of speed that may be lost with `winner`, because one of `some` may be
    /// faster: the largest upper end of the 95 % intervals.
    pub(crate) fn lost(&self, winner: usize, some: &[usize]) -> f64 {
        let others = some.iter().filter(|one| **one != winner);
        others.map(|one| self.slower(winner, *one).high - 1.0).fold(0.0, f64::max)
    }
}

/// Computes the seconds per token of the first of each pair relative to the second, over all pairs
/// but the fifths with the smallest and largest ratios. NaN without pairs.
fn trimmed_ratio<'p>(pairs: impl Iterator<Item = &'p [AnswerTime; 2]>) -> f64 {
    let per_token = |time: &AnswerTime| time.seconds / time.num_tokens as f64;
    let mut all: Vec<(f64, &[AnswerTime; 2])> =
        pairs.map(|pair| (per_token(&pair[0]) / per_token(&pair[1]), pair)).collect();
    all.sort_by(|one, other| one.0.total_cmp(&other.0));
    let num_left_out = (all.len() as f64 * TRIMMED) as usize;
    let kept = &all[num_left_out..all.len() - num_left_out];
    let [one, other] = [0, 1].map(|of| {
        let seconds: f64 = kept.iter().map(|(_, pair)| pair[of].seconds).sum();
        seconds / kept.iter().map(|(_, pair)| pair[of].num_tokens).sum::<usize>() as f64
    });
    one / other
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a race of settings with these seconds per token, of which each time varies by
    /// `noise`. The machine is `slow` times slower in a share `busy` of bursts of 7 answers each.
    fn raced(times: &[f64], noise: f64, load: (f64, f64), seed: u64, limit: f64) -> Race {
        run(Race::new(times.len(), seed), (times, noise, load), limit)
    }

    fn run(
        mut race: Race,
        (times, noise, (busy, slow)): (&[f64], f64, (f64, f64)),
        limit: f64,
    ) -> Race {
        let seed = race.seed;
        let mut draws = SeededDraws::new(seed, &["clock"]);
        let (mut left, mut factor) = (0, 1.0);
        let mut decode = |setting: usize, prompt: usize| {
            if left == 0 {
                left = 7;
                factor = if draws.uniform() < busy { slow } else { 1.0 };
            }
            left -= 1;
            let of_prompt = 1.0 + 0.3 * (prompt % 5) as f64;
            let varied =
                (noise * 2.0 * (draws.uniform() + draws.uniform() + draws.uniform() - 1.5)).exp();
            let seconds = times[setting] * of_prompt * varied * factor * 30.0;
            Ok(AnswerTime { num_tokens: 30, seconds, waiting: seconds })
        };
        while !race.is_over(limit) {
            race.run_laps(40, limit, &mut decode).expect("nothing fails");
            // A race that is read back goes on as it would have.
            let text = serde_json::to_string(&race).expect("a race");
            race = serde_json::from_str(&text).expect("a race");
        }
        race
    }

    #[test]
    fn the_fastest_wins_under_load_and_the_interval_covers_the_loss() {
        let times = [10e-3, 9.2e-3, 8.4e-3, 8.8e-3, 15e-3];
        let all: Vec<usize> = (0..times.len()).collect();
        let (mut num_right, mut num_covered) = (0, 0);
        for seed in 0..40 {
            let race = raced(&times, 0.05, (0.4, 3.0), seed, 300.0);
            let winner = race.winner(&all);
            num_right += usize::from(times[winner] <= 8.4e-3 * 1.03);
            num_covered += usize::from(race.lost(winner, &all) >= times[winner] / 8.4e-3 - 1.0);
        }
        assert!(num_right >= 38 && num_covered >= 38, "{num_right} {num_covered}");
    }

    #[test]
    fn a_clear_race_is_short_and_a_close_one_goes_to_the_simplest() {
        let clear = raced(&[10e-3, 5e-3], 0.02, (0.0, 1.0), 1, 600.0);
        assert_eq!((clear.num_laps(), clear.winner(&[0, 1])), (MIN_LAPS, 1));
        let faster = clear.speedup(1, 0);
        assert!(faster.low > 1.9 && faster.high < 2.1, "{faster:?}");
        // Half a percent apart: the simplest of them, wherever it is in the list.
        let close = raced(&[10e-3, 9.95e-3, 14e-3], 0.02, (0.0, 1.0), 2, 20.0);
        assert_eq!((close.winner(&[0, 1, 2]), close.winner(&[1, 0, 2])), (0, 1));
        // Dropped settings keep their laps, and the limit ends the race.
        let last = close.laps.last().expect("a lap");
        assert!(!last.times.contains_key(&2) && close.laps[0].times.contains_key(&2));
        let limited = raced(&[10e-3, 10e-3], 0.3, (0.5, 4.0), 3, 6.0);
        assert!(limited.seconds < 20.0 && limited.lost(0, &[0, 1]) > NEARLY);
    }

    #[test]
    fn a_short_race_under_load_follows_the_model_and_a_quiet_one_does_not() {
        let times = [10e-3, 9e-3, 9.6e-3];
        let all = [0, 1, 2];
        // The costs are known to some 5 %, and say that the last setting is the fastest.
        let modelled = |times: [f64; 3]| {
            let at = |nth: usize, by: f64| times[nth].ln() + by;
            vec![
                vec![at(0, 0.0), at(0, 0.05), at(0, -0.05)],
                vec![at(1, 0.0), at(1, -0.05), at(1, 0.05)],
                vec![at(2, 0.0), at(2, 0.0), at(2, 0.0)],
            ]
        };
        let mut num_right = 0;
        for seed in 0..20 {
            let right = Race::of_modelled(modelled(times), seed);
            let race = run(right, (&times, 0.3, (0.5, 4.0)), 8.0);
            num_right += usize::from(race.winner(&all) == 1);
            let wrong = Race::of_modelled(modelled([10e-3, 9.6e-3, 9.2e-3]), seed);
            let race = run(wrong, (&times, 0.02, (0.0, 1.0)), 60.0);
            assert_eq!(race.winner(&all), 1, "{seed}");
            let faster = race.speedup(1, 2);
            assert!(faster.low < 9.6 / 9.0 && 9.6 / 9.0 < faster.high + 0.02, "{faster:?}");
        }
        assert!(num_right >= 12, "{num_right}");
    }

    #[test]
    fn speedups_follow_gains_when_a_burst_hit_the_laps_of_plain_decoding() {
        let mut race = Race::new(3, 1);
        for lap in 0..50 {
            let burst = if lap < 10 { 1.0 + 0.02 * f64::from(lap) } else { 1.0 };
            let time = |seconds| AnswerTime { num_tokens: 10, seconds, waiting: seconds };
            let mut times = BTreeMap::from([(1, time(5.0 * burst)), (2, time(5.0))]);
            if lap < 10 {
                times.insert(0, time(10.0));
            }
            race.add(lap as usize, times);
        }
        assert!(race.speedup(2, 0).low > race.speedup(1, 0).high);
        let [one, other] = [1, 2].map(|of| race.speedup_through(of, 1, 0));
        assert_eq!(one.value, race.speedup(1, 0).value);
        assert!((other.value / one.value - race.speedup(2, 1).value).abs() < 1e-12);
        assert!(other.low <= one.high && other.low < other.value && other.value < other.high);
    }

    #[test]
    fn a_user_sees_the_prefill_too() {
        let mut race = Race::new(2, 1);
        let mut run = |setting: usize, _: usize| {
            let (seconds, prefill) = [(8.0, 2.0), (4.0, 3.0)][setting];
            Ok(AnswerTime { num_tokens: 8, seconds, waiting: seconds + prefill })
        };
        race.run_laps(5, 1000.0, &mut run).expect("nothing fails");
        let twice = race.speedup(1, 0);
        assert!((twice.value - 2.0).abs() < 1e-9, "{twice:?}");
        let seen = [1, 0].map(|reader| race.with_prefill(0, reader)(twice.value));
        assert!((seen[0] - 10.0 / 7.0).abs() < 1e-9 && (seen[1] - 10.0 / 6.0).abs() < 1e-9);
    }

    #[test]
    fn a_failure_keeps_the_laps_before_it() {
        let mut race = Race::new(2, 1);
        let mut num_answers = 0;
        let mut run = |_: usize, _: usize| {
            num_answers += 1;
            anyhow::ensure!(num_answers < 8, "stopped");
            Ok(AnswerTime { num_tokens: 3, seconds: 1.0, waiting: 1.0 })
        };
        race.run_laps(5, 100.0, &mut run).expect_err("stopped");
        assert_eq!(race.num_laps(), 3);
    }
}
