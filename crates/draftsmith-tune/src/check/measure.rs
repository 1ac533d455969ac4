//! Decoding of every prompt with the target alone and with the export, and comparison of the two.

use std::path::Path;

use anyhow::{Result, bail};
use draftsmith_data::Prompt;
use draftsmith_decode::Generation;
use draftsmith_report::{
    DecodingName, DrafterName, LEAST_PROMPTS, MAX_FOREIGN_LOAD, promise_interval, waiting_time,
};
use draftsmith_theory::{
    Counts, Decoding, Estimate, LosslessnessTest, Rounding, Sampling, SeededDraws, StopRule,
    StopRuleConfig, TokenChoice, Trace,
};

use super::{
    ALPHA, AcceptanceCheck, AnswerDifference, DecodingCheck, GreedyOutput, SampledOutput,
    SpeedCheck,
};
use crate::agreement::{Agreement, compare, num_same, rounding};
use crate::conversation::{Turn, answer_turns};
use crate::decoders::Decoders;
use crate::race::{AnswerTime, Race};
use draftsmith_recipe::{LoadedDrafters, Pair, Tuned, Watch};

/// The rounding tolerance of top-p masses and logits in f32, for tokens at the limit of what can be
/// sampled.
const EDGE: f64 = 1e-4;

/// The quantile of the normal distribution for a 99.99 % interval.
const WILSON_Z: f64 = 3.89;

/// The numbers of the target alone and of the export in a race.
const PLAIN: usize = 0;
const OWN: usize = 1;

/// The loaded models, and the measurements so far.
pub(super) struct Bench<'m> {
    pair: &'m Pair,
    decoders: Decoders<'m>,
    drafter: DrafterName,
    seed: u64,
    test: LosslessnessTest,
    /// The random draws of the losslessness test.
    draws: SeededDraws,
    num_forgiven_edges: usize,
    num_forgiven_ties: usize,
    differences: Vec<AnswerDifference>,
    /// The prompts of greedy answers.
    turns: Vec<Vec<u32>>,
    /// The times of greedy answers with the target alone, [`PLAIN`], and with the export, [`OWN`].
    race: Race,
}

/// The results of one turn, which is decoded plainly, greedily and sampled.
struct CheckedTurn {
    /// The answer of plain greedy decoding.
    plain: Vec<u32>,
    of_greedy: Trace,
    of_sampled: Trace,
}

/// A stop rule under one way of decoding, with counts for each prompt so far.
pub(super) struct CheckedRule {
    /// The drafter, including any prompt lookup in front of it.
    drafter: DrafterName,
    decoding: Decoding,
    config: StopRuleConfig,
    rule: Box<dyn StopRule>,
    /// The acceptance rate that `tune` predicted; `None` for the default rule.
    promised: Option<Estimate>,
    counts: Vec<Counts>,
}

impl CheckedRule {
    /// Returns the tuned rule for one way of decoding, or else the default rule of `generate`.
    /// Without a tuned rule, sampled decoding is at temperature 1.
    ///
    /// # Errors
    /// If the tuned rule is for another drafter, or needs a head that is missing. The error names
    /// `config.json` in `tuned_dir`.
    pub(super) fn new(
        tuned: &Tuned,
        name: DecodingName,
        drafter: DrafterName,
        has_head: bool,
        tuned_dir: &Path,
    ) -> Result<Self> {
        let tuned = tuned.rule(name);
        if let Some(tuned) = tuned
            && (tuned.drafter.id() != drafter.id()
                || (tuned.config.needs().acceptance_prob && !has_head))
        {
            bail!(
                "the rule under `tuned` of `{}` is for the drafter `{}`, but the export is for \
                 `{drafter}`; hint: tune it again",
                tuned_dir.join("config.json").display(),
                tuned.drafter
            );
        }
        let (drafter, decoding, config) = match (tuned, name) {
            (Some(tuned), _) => (tuned.drafter, tuned.decoding(), tuned.config.clone()),
            (None, DecodingName::Greedy) => {
                (drafter, Decoding::GREEDY, StopRuleConfig::by_default(has_head))
            }
            (None, DecodingName::Sampled) => (
                drafter,
                Decoding::sampled(Sampling::default()),
                StopRuleConfig::by_default(has_head),
            ),
        };
        let promised = tuned.map(|tuned| tuned.expected_acceptance_rate);
        Ok(Self { drafter, decoding, rule: config.init()?, config, promised, counts: Vec::new() })
    }

    fn judge<T>(self, seed: u64, output: T) -> Result<DecodingCheck<T>> {
        let total: Counts = self.counts.iter().copied().sum();
        let rate = promise_interval(self.counts.len(), seed, |prompts| {
            prompts.iter().map(|prompt| self.counts[*prompt]).sum::<Counts>().acceptance_rate()
        });
        let rate = widened(rate, total.num_drafted);
        let promised = self.promised;
        Ok(DecodingCheck {
            lookup_first: self.drafter.lookup_first(),
            stop_rule: self.config,
            is_tuned: self.promised.is_some(),
            sampling: self.decoding.sampling(),
            repetition_penalty: self.decoding.repetition_penalty,
            num_tokens: total.num_tokens,
            output,
            acceptance: AcceptanceCheck {
                holds: promised.map(|it| rate.value >= it.value || rate.agrees_with(&it)),
                num_drafted: total.num_drafted,
                rate,
                promised: self.promised,
            },
        })
    }
}

impl<'m> Bench<'m> {
    pub(super) fn new(
        pair: &'m Pair,
        drafters: &'m LoadedDrafters,
        drafter: DrafterName,
        max_new_tokens: usize,
        seed: u64,
    ) -> Self {
        Self {
            pair,
            decoders: Decoders::new(pair, drafters, max_new_tokens),
            drafter,
            seed,
            test: LosslessnessTest::default(),
            draws: SeededDraws::new(seed, &["check", "losslessness"]),
            num_forgiven_edges: 0,
            num_forgiven_ties: 0,
            differences: Vec::new(),
            turns: Vec::new(),
            race: Race::new(2, seed),
        }
    }

    /// Decodes the first turn of a prompt once, without recording results. The first forwards of a
    /// process are slow, because they touch memory pages and select kernels.
    ///
    /// # Errors
    /// If a model fails.
    pub(super) fn warm_up(&mut self, prompt: &Prompt, greedy: &mut CheckedRule) -> Result<()> {
        let prompt_ids = self.pair.text.encode_turn(prompt, 0, &[])?;
        let most = std::mem::replace(&mut self.decoders.limits.max_new_tokens, 16);
        self.greedy(&prompt.id, &prompt_ids, greedy)?;
        self.decoders.limits.max_new_tokens = most;
        self.num_forgiven_ties = 0;
        self.differences.clear();
        self.turns.clear();
        self.race = Race::new(2, self.seed);
        Ok(())
    }

    /// Decodes greedy answers again, until it is known which is faster, the export or the target
    /// alone, but no longer than the first answers took.
    ///
    /// # Errors
    /// If a model fails, or the user presses Ctrl-C.
    pub(super) fn race(&mut self, greedy: &mut CheckedRule, watch: &dyn Watch) -> Result<()> {
        let limit = 2.0 * self.race.seconds;
        let (mut race, turns) = (self.race.clone(), self.turns.clone());
        while !race.is_over(limit) {
            race.run_laps(turns.len(), limit, &mut |which, turn| {
                watch.check_interrupted()?;
                Ok(answer_time(&self.decode(which, &turns[turn], greedy)?.trace))
            })?;
        }
        self.race = race;
        Ok(())
    }

    /// Estimates the speed of greedy decoding relative to the target alone, with its 95 % interval.
    pub(super) fn speed(&self, allows_slower: bool, foreign_load: Option<f64>) -> SpeedCheck {
        let speedup = self.race.speedup(OWN, PLAIN);
        let holds = holds(&speedup, self.turns.len(), foreign_load, allows_slower);
        SpeedCheck { holds, speedup, foreign_load }
    }

    /// Decodes all turns of a prompt. Each turn follows the earlier answers of plain greedy
    /// decoding.
    pub(super) fn run(
        &mut self,
        prompt: &Prompt,
        greedy: &mut CheckedRule,
        sampled: &mut CheckedRule,
    ) -> Result<()> {
        let pair = self.pair;
        let (answered, _) = answer_turns(
            &pair.text,
            prompt,
            |answered: &CheckedTurn| &answered.plain,
            |turn| {
                let Turn { id, prompt_ids, .. } = turn;
                let (plain, of_greedy) = self.greedy(&id, &prompt_ids, greedy)?;
                let of_sampled = self.sampled(&id, &prompt_ids, sampled)?;
                Ok(CheckedTurn { plain, of_greedy, of_sampled })
            },
        )?;
        let counts =
            |trace: fn(&CheckedTurn) -> &Trace| Trace::merge(answered.iter().map(trace)).counts();
        greedy.counts.push(counts(|answered: &CheckedTurn| &answered.of_greedy));
        sampled.counts.push(counts(|answered: &CheckedTurn| &answered.of_sampled));
        Ok(())
    }

    /// Decodes a prompt greedily with the target alone, [`PLAIN`], or with the export, [`OWN`].
    fn decode(
        &mut self,
        which: usize,
        prompt_ids: &[u32],
        greedy: &mut CheckedRule,
    ) -> Result<Generation> {
        // Greedy decoding does not use the draws.
        let draws = &mut SeededDraws::new(self.seed, &["check", "greedy"]);
        let (drafter, rule) = match which {
            PLAIN => (DrafterName::None, None),
            _ => (greedy.drafter, Some(&mut *greedy.rule as &mut dyn StopRule)),
        };
        self.decoders.decode(drafter, rule, &greedy.decoding, prompt_ids, draws)
    }

    /// Compares greedy decoding with plain decoding, and returns the plain answer.
    fn greedy(
        &mut self,
        id: &str,
        prompt_ids: &[u32],
        greedy: &mut CheckedRule,
    ) -> Result<(Vec<u32>, Trace)> {
        // Each comes first in every other turn.
        let is_plain_first = self.turns.len().is_multiple_of(2);
        let first = if is_plain_first { PLAIN } else { OWN };
        let one = self.decode(first, prompt_ids, greedy)?;
        let other = self.decode(PLAIN + OWN - first, prompt_ids, greedy)?;
        let (alone, generation) = if is_plain_first { (one, other) } else { (other, one) };
        let times = [(PLAIN, &alone), (OWN, &generation)];
        let times = times.map(|(which, answer)| (which, answer_time(&answer.trace)));
        self.race.add(self.turns.len(), times.into());
        self.turns.push(prompt_ids.to_vec());
        let plain = alone.token_ids;
        let (decoders, decoding) = (&mut self.decoders, &greedy.decoding);
        match compare(decoders, decoding, prompt_ids, &plain, &generation.token_ids)? {
            Agreement::Same => {}
            Agreement::Tie => self.num_forgiven_ties += 1,
            Agreement::Different => {
                let token = num_same(&plain, &generation.token_ids);
                self.differences.push(AnswerDifference { id: id.to_owned(), token });
            }
        }
        Ok((plain, generation.trace))
    }

    /// Decodes a sampled answer and tests its tokens.
    fn sampled(
        &mut self,
        id: &str,
        prompt_ids: &[u32],
        sampled: &mut CheckedRule,
    ) -> Result<Trace> {
        let decoding = sampled.decoding;
        let mut draws = SeededDraws::new(self.seed, &[id, "check", "sampled"]);
        let rule = Some(&mut *sampled.rule as _);
        let drafter = sampled.drafter;
        let generation = self.decoders.decode(drafter, rule, &decoding, prompt_ids, &mut draws)?;
        if let TokenChoice::Sampled(sampling) = decoding.choice {
            self.test(&decoding, &sampling, prompt_ids, &generation.token_ids)?;
        }
        Ok(generation.trace)
    }

    /// Tests an answer against the target's distributions. These are computed in a separate
    /// forward, so that a bug in the caches of rounds cannot affect them. In bf16 they differ from
    /// the distributions in the rounds by unbiased noise, which hardly changes the test. The draft
    /// distributions only affect the power of the test.
    fn test(
        &mut self,
        decoding: &Decoding,
        sampling: &Sampling,
        prompt_ids: &[u32],
        answer: &[u32],
    ) -> Result<()> {
        let Some((_, read)) = answer.split_last() else {
            return Ok(());
        };
        let ids = [prompt_ids, read].concat();
        let rounding = rounding(self.decoders.dtype);
        let target = self.decoders.score(&ids, prompt_ids.len() - 1)?;
        let draft = self.decoders.draft_logits(self.drafter, prompt_ids, answer)?;
        let rows = target.rows().zip(&draft).zip(prompt_ids.len()..);
        for (((target, draft), num_before), token) in rows.zip(answer) {
            let before = || ids[..num_before].iter().copied();
            let [target, draft] =
                [target, draft].map(|logits| decoding.penalised(logits, before()));
            let (p, q) = (sampling.probs(&target), sampling.probs(&draft));
            if p[*token as usize] == 0.0 && is_at_edge(rounding, sampling, &target, *token) {
                self.num_forgiven_edges += 1;
            } else {
                self.test.observe(&p, &q, *token, &mut self.draws);
            }
        }
        Ok(())
    }

    /// Builds the results of greedy and sampled decoding over all prompts.
    pub(super) fn judge(
        self,
        greedy: CheckedRule,
        sampled: CheckedRule,
    ) -> Result<(DecodingCheck<GreedyOutput>, DecodingCheck<SampledOutput>)> {
        let p_value = self.test.p_value();
        let greedy_output = GreedyOutput {
            holds: self.differences.is_empty(),
            num_forgiven_ties: self.num_forgiven_ties,
            differences: self.differences,
        };
        let sampled_output = SampledOutput {
            holds: p_value >= ALPHA,
            p_value,
            alpha: ALPHA,
            num_impossible: self.test.num_impossible(),
            num_forgiven_edges: self.num_forgiven_edges,
        };
        let greedy = greedy.judge(self.seed, greedy_output)?;
        Ok((greedy, sampled.judge(self.seed, sampled_output)?))
    }
}

/// Returns whether an export is fast enough, or `None` if that is not known. A slow export fails only
/// on a quiet machine, because other programs slow small forwards more than large ones.
fn holds(
    speedup: &Estimate,
    num_turns: usize,
    foreign_load: Option<f64>,
    allows_slower: bool,
) -> Option<bool> {
    let is_quiet = foreign_load.is_none_or(|load| load <= MAX_FOREIGN_LOAD);
    if num_turns < LEAST_PROMPTS {
        return None;
    }
    match (speedup.high < 1.0, speedup.low >= 1.0) {
        (true, _) if is_quiet => Some(allows_slower),
        (_, true) => Some(true),
        _ => None,
    }
}

/// Returns the time of an answer, including prefill.
fn answer_time(trace: &Trace) -> AnswerTime {
    let seconds = waiting_time(trace).as_secs_f64();
    AnswerTime { num_tokens: trace.num_tokens, seconds, waiting: seconds }
}

/// Widens the interval of an acceptance rate to at least Wilson's interval for `num_drafted`
/// independent candidates. Resampling a few equal prompts would give an interval of zero width.
fn widened(rate: Estimate, num_drafted: usize) -> Estimate {
    if num_drafted == 0 {
        return rate;
    }
    let (n, p) = (num_drafted as f64, rate.value);
    let square = WILSON_Z * WILSON_Z;
    let centre = (p + square / (2.0 * n)) / (1.0 + square / n);
    let half = WILSON_Z / (1.0 + square / n) * (p * (1.0 - p) / n + square / (4.0 * n * n)).sqrt();
    Estimate { value: p, low: rate.low.min(centre - half), high: rate.high.max(centre + half) }
}

/// Returns whether a token could be sampled if the top-p mass or the token's logit were slightly
/// larger. Logits computed in rounds and over a whole text differ by rounding.
fn is_at_edge(rounding: Rounding, sampling: &Sampling, logits: &[f32], token: u32) -> bool {
    let logit = logits[token as usize];
    let more = match rounding {
        Rounding::F32 => EDGE,
        Rounding::Bf16 => f64::from(rounding.allowance(logit)),
    };
    let num_above = |least: f64| logits.iter().filter(|other| f64::from(**other) > least).count();
    let top_k = sampling.top_k.map(|top_k| {
        let is_near = num_above(f64::from(logit) + more) < top_k;
        if is_near { top_k.max(num_above(f64::from(logit)) + 1) } else { top_k }
    });
    let top_p = match rounding {
        Rounding::F32 => (sampling.top_p + EDGE).min(1.0),
        Rounding::Bf16 => mass_with_larger_logit(sampling.top_p, more / sampling.temperature),
    };
    // The most probable token's logit may also be smaller by the same amount.
    let less = (-2.0 * more / sampling.temperature).exp();
    let min_p = sampling.min_p.map(|min_p| min_p * less);
    let wider = Sampling { top_p, top_k, min_p, ..*sampling };
    wider.probs(logits)[token as usize] > 0.0
}

/// Solves m / (m + (1 − m) eᵐᵒʳᵉ) = `top_p` for m. Here m is the mass of all tokens more probable
/// than a given token. It shrinks to `top_p` if the logits of the given token and of all less
/// probable tokens grow by `more`.
fn mass_with_larger_logit(top_p: f64, more: f64) -> f64 {
    top_p / (top_p + (1.0 - top_p) * (-more).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_of_few_equal_prompts_has_width() {
        let none = |value| Estimate { value, low: value, high: value };
        let found = widened(none(0.5), 16);
        assert!(found.low < 0.2 && found.high > 0.8, "{found:?}");
        let found = widened(none(1.0), 16);
        assert!(found.low < 0.6 && found.high <= 1.0 + 1e-12, "{found:?}");
        let many = widened(none(0.5), 1_000_000);
        assert!(many.low > 0.495 && many.high < 0.505, "{many:?}");
        assert_eq!(widened(none(0.5), 0), none(0.5));
    }

    #[test]
    fn a_slow_export_fails_only_if_load_and_prompts_allow_to_say_so() {
        let slow = Estimate { value: 0.8, low: 0.7, high: 0.9 };
        let unsure = Estimate { value: 0.95, low: 0.8, high: 1.1 };
        let fast = Estimate { value: 1.2, low: 1.1, high: 1.3 };
        let quiet = |speedup, allows| holds(speedup, 40, Some(0.05), allows);
        assert_eq!(
            [&slow, &unsure, &fast].map(|it| quiet(it, false)),
            [Some(false), None, Some(true)]
        );
        assert_eq!((quiet(&slow, true), holds(&slow, 40, None, false)), (Some(true), Some(false)));
        // Other programs, or two prompts.
        assert_eq!([&slow, &fast].map(|it| holds(it, 40, Some(0.3), false)), [None, Some(true)]);
        assert_eq!([&slow, &fast].map(|it| holds(it, 2, Some(0.0), false)), [None, None]);
    }

    #[test]
    fn only_tokens_at_the_top_k_edge_are_ignored() {
        let two = Sampling { top_k: Some(2), ..Sampling::default() };
        let is_at_edge = |sampling: &Sampling, logits: &[f32], token| {
            super::is_at_edge(Rounding::F32, sampling, logits, token)
        };
        assert!(is_at_edge(&two, &[3.0, 1.000_05, 1.0, 0.0], 2));
        assert!(!is_at_edge(&two, &[3.0, 1.001, 1.0, 0.0], 2));
        assert!(!is_at_edge(&two, &[3.0, 1.000_05, 1.0, 0.0], 3));
        let also_nucleus = Sampling { top_p: 0.5, ..two };
        assert!(!is_at_edge(&also_nucleus, &[3.0, 1.000_05, 1.0, 0.0], 2));
    }

    #[test]
    fn only_tokens_at_the_nucleus_edge_are_ignored() {
        let logits = [0.5f32, 0.3, 0.2].map(f32::ln);
        let with = |top_p| Sampling { top_p, ..Sampling::default() };
        let is_at_edge = |sampling: &Sampling, logits: &[f32], token| {
            super::is_at_edge(Rounding::F32, sampling, logits, token)
        };
        assert!(is_at_edge(&with(0.799_95), &logits, 2));
        assert!(!is_at_edge(&with(0.799), &logits, 2));
        assert!(!is_at_edge(&with(1.0), &[0.0, f32::NEG_INFINITY], 1));
    }

    #[test]
    fn only_tokens_at_the_edge_of_min_p_are_ignored() {
        let logits = [0.5f32, 0.3, 0.2].map(f32::ln);
        let with = |min_p| Sampling { min_p: Some(min_p), ..Sampling::default() };
        let is_at_edge =
            |rounding, min_p, token| super::is_at_edge(rounding, &with(min_p), &logits, token);
        assert!(is_at_edge(Rounding::F32, 0.400_05, 2) && !is_at_edge(Rounding::F32, 0.401, 2));
        // Neighbours of log 0.2 in bf16 are 1/128 apart.
        assert!(is_at_edge(Rounding::Bf16, 0.405, 2) && !is_at_edge(Rounding::Bf16, 0.45, 2));
    }

    #[test]
    fn edges_are_wider_in_bf16() {
        let is_at_edge = |sampling: &Sampling, logits: &[f32], token| {
            super::is_at_edge(Rounding::Bf16, sampling, logits, token)
        };
        let two = Sampling { top_k: Some(2), ..Sampling::default() };
        // From 16 to 32 neighbours are 1/8 apart.
        assert!(is_at_edge(&two, &[25.0, 20.125, 20.0, 16.0], 2));
        assert!(!is_at_edge(&two, &[25.0, 20.375, 20.0, 16.0], 2));
        // Before the last token lies a mass of 1 / (1 + e⁻³), some 0.953; with its logit a quarter
        // larger it would be some 0.940.
        let with = |top_p, temperature| Sampling { top_p, temperature, ..Sampling::default() };
        assert!(is_at_edge(&with(0.941, 1.0), &[20.0, 17.0], 1));
        assert!(!is_at_edge(&with(0.938, 1.0), &[20.0, 17.0], 1));
        // At temperature 2 logits and tolerance are halved: 0.818, and 0.798.
        assert!(is_at_edge(&with(0.80, 2.0), &[20.0, 17.0], 1));
        assert!(!is_at_edge(&with(0.79, 2.0), &[20.0, 17.0], 1));
        assert!(!is_at_edge(&with(0.99, 1.0), &[20.0, f32::NEG_INFINITY], 1));
    }
}
