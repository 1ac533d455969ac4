//! The races of a recipe's drafters: which settings start, how they run, and what they showed.

use anyhow::{Context, Result};
use draftsmith_recipe::{Recipe, Workspace};
use draftsmith_report::{CostSource, DecodingName, DrafterName, waiting_time};
use draftsmith_theory::{
    Estimate, LookupFirst, Recordings, SeededDraws, StopRule, StopRuleConfig, StopRuleName,
    seconds_per_token,
};
use serde::{Deserialize, Serialize};

use super::{Tuner, made_from};
use crate::costs::MeasuredCosts;
use crate::race::{AnswerTime, Race};
use crate::sweep::{RuleChoice, best_fixed, cheapest};
use crate::tuning::TuningFile;

/// The number of times that costs and prompts are resampled to propose settings.
const NUM_RESAMPLES: usize = 8;
/// The most settings that start, besides plain decoding.
const MOST_SETTINGS: usize = 7;
/// The default time of all races together, in answers.
const MOST_ANSWERS: f64 = 1000.0;
/// The most seconds of all races together by default.
pub(super) const MOST_SECONDS: f64 = 600.0;
/// The number of plain decoding in a race; settings follow.
const PLAIN: usize = 0;

/// A drafter's costs and race under one way of decoding. A stopped `tune` goes on from it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Raced {
    drafter: DrafterName,
    decoding: DecodingName,
    measured: MeasuredCosts,
    /// The settings, the simplest first; none before the race.
    settings: Vec<RuleChoice>,
    race: Race,
}

/// The races of a `tune` so far, as in `races.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RaceFile {
    /// The hash of everything that tuning depends on.
    made_from: String,
    races: Vec<Raced>,
}

/// The models that read a prompt before the first round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefilling {
    /// The target.
    Target,
    /// The target and the drafter.
    Both,
}

/// What a race showed.
#[derive(Debug, Clone, Serialize)]
pub struct RaceOutcome {
    /// The number of laps. In each, every setting that was still running answered the same prompt.
    pub num_laps: usize,
    /// The settings, the simplest first.
    pub settings: Vec<RacedSetting>,
}

/// A setting in a race.
#[derive(Debug, Clone, Serialize)]
pub struct RacedSetting {
    /// The settings of prompt lookup in front of the drafter; null for no lookup.
    pub lookup_first: Option<LookupFirst>,
    /// The rule with its setting.
    pub config: StopRuleConfig,
    /// The speed relative to plain decoding, prefill included, by the race and the model together.
    pub speedup: Estimate,
    /// The speed relative to the best fixed length without prefill, minus 1.
    pub gain: Estimate,
}

impl RaceFile {
    /// Reads the costs and races of a stopped `tune`; none if its inputs were others.
    pub(super) fn read(recipe: &Recipe, workspace: &Workspace) -> Result<Self> {
        let kept: Self = TuningFile::RACES.read(recipe)?;
        let made_from = made_from(recipe, workspace)?;
        let is_same = kept.made_from == made_from;
        Ok(if is_same { kept } else { Self { made_from, races: Vec::new() } })
    }
}

impl Raced {
    fn numbers(&self) -> Vec<usize> {
        (1..=self.settings.len()).collect()
    }

    /// Returns the winner of each rule, and of all settings with prompt lookup, the simplest first.
    fn winners(&self) -> Vec<usize> {
        let numbers = self.numbers();
        let rule = |number: &usize| rule_of(&self.settings[number - 1]);
        let of_rules = numbers.chunk_by(|one, other| rule(one) == rule(other));
        of_rules.map(|some| self.race.winner(some)).collect()
    }

    fn winning(&self) -> usize {
        self.race.winner(&self.winners())
    }

    /// Returns the winner.
    pub(super) fn winner(&self) -> &RuleChoice {
        &self.settings[self.winning() - 1]
    }

    /// Replaces the settings of rules by those that won among the rule's settings.
    pub(super) fn replace(&self, choices: &mut Vec<RuleChoice>) {
        for number in self.winners() {
            let winner = &self.settings[number - 1];
            match choices.iter_mut().find(|choice| rule_of(choice) == rule_of(winner)) {
                Some(choice) => choice.clone_from(winner),
                None => choices.push(winner.clone()),
            }
        }
    }

    /// Estimates the speed of a setting relative to another, minus 1; `None` if one of them was not
    /// in the race.
    pub(super) fn gain(&self, choice: &RuleChoice, over: &RuleChoice) -> Option<Estimate> {
        let speedup = self.race.speedup(self.number(choice)?, self.number(over)?);
        Some(speedup.map(|speedup| speedup - 1.0))
    }

    fn number(&self, choice: &RuleChoice) -> Option<usize> {
        self.settings.iter().position(|one| is_same(one, choice)).map(|at| at + 1)
    }

    /// Returns the share of speed that may be lost with the winner, at 95 %.
    pub(super) fn lost(&self) -> f64 {
        self.race.lost(self.winning(), &self.numbers())
    }

    /// Returns a function that converts a speed relative to plain decoding without prefill to the one
    /// that a user sees.
    pub(super) fn with_prefill(&self, prefilling: Prefilling) -> impl Fn(f64) -> f64 {
        let reader = if prefilling == Prefilling::Both { PLAIN + 1 } else { PLAIN };
        self.race.with_prefill(PLAIN, reader)
    }

    /// Returns what the race showed, where `fixed` is the best fixed length.
    pub(super) fn outcome(&self, fixed: &RuleChoice) -> RaceOutcome {
        let with_prefill = self.with_prefill(Prefilling::Both);
        let settings = self.settings.iter().zip(1..).filter_map(|(choice, number)| {
            let speedup = self.race.speedup_through(number, self.number(fixed)?, PLAIN);
            Some(RacedSetting {
                lookup_first: choice.lookup_first,
                config: choice.config.clone(),
                speedup: speedup.map(&with_prefill),
                gain: self.gain(choice, fixed)?,
            })
        });
        RaceOutcome { num_laps: self.race.num_laps(), settings: settings.collect() }
    }
}

fn is_same(one: &RuleChoice, other: &RuleChoice) -> bool {
    one.lookup_first == other.lookup_first && one.config == other.config
}

/// Returns the rule that a setting is one of; `None` for all with prompt lookup.
fn rule_of(choice: &RuleChoice) -> Option<StopRuleName> {
    choice.lookup_first.is_none().then_some(choice.name)
}

/// Returns a key that sorts simple settings first.
fn complexity(choice: &RuleChoice) -> (bool, bool, StopRuleName) {
    let is_fixed = choice.name == StopRuleName::FixedLength;
    (choice.lookup_first.is_some(), !is_fixed, choice.name)
}

impl Tuner<'_> {
    /// Returns a drafter's costs for each way of decoding in `names`, which a stopped `tune` of the
    /// same inputs may have measured.
    pub(super) fn costs_once(
        &mut self,
        drafter: DrafterName,
        recordings: &[&Recordings],
        names: &[DecodingName],
    ) -> Result<(CostSource, Vec<MeasuredCosts>)> {
        let races = self.races.races.iter();
        let kept: Vec<MeasuredCosts> =
            races.filter(|it| it.drafter == drafter).map(|it| it.measured.clone()).collect();
        if kept.len() == names.len() {
            return Ok((CostSource::Machine, kept));
        }
        let (source, costs) = self.costs(recordings, names)?;
        if source.is_machine() {
            let of = |(name, measured): (&DecodingName, &MeasuredCosts)| Raced {
                drafter,
                decoding: *name,
                measured: measured.clone(),
                settings: Vec::new(),
                race: Race::new(0, self.recipe.seed),
            };
            self.races.races.extend(names.iter().zip(&costs).map(of));
            TuningFile::RACES.write(self.recipe, &self.races)?;
        }
        Ok((source, costs))
    }

    /// Lists the settings that may be the fastest: the best fixed length, the cheapest rule with and
    /// without prompt lookup, and those whose rule or length is the cheapest at costs and prompts that
    /// are resampled. The simplest comes first.
    fn proposed(
        &self,
        recordings: &Recordings,
        measured: &MeasuredCosts,
        choices: &[RuleChoice],
    ) -> Result<Vec<RuleChoice>> {
        let mut draws = SeededDraws::new(self.recipe.seed, &["proposed"]);
        let mut all = vec![best_fixed(choices)?.clone()];
        let mut add = |choice: &RuleChoice| {
            if !all.iter().any(|one| is_same(one, choice)) && all.len() < MOST_SETTINGS {
                all.push(choice.clone());
            }
        };
        add(cheapest(choices)?);
        add(cheapest(choices.iter().filter(|choice| choice.lookup_first.is_none()))?);
        for costs in measured.drawn(self.recipe.seed).iter().skip(1).take(NUM_RESAMPLES) {
            let num = recordings.responses.len();
            let mut some = recordings.clone();
            let mut drawn = || &recordings.responses[(draws.uniform() * num as f64) as usize];
            some.responses = (0..num).map(|_| drawn().clone()).collect();
            let found = self.finds()(&some, costs)?;
            let found = cheapest(&found)?;
            // Other thresholds of a rule are not worth the time of the race. Other lengths are.
            let own = choices.iter().find(|choice| rule_of(choice) == rule_of(found));
            match own {
                Some(own) if rule_of(own) != Some(StopRuleName::FixedLength) => add(own),
                _ => {
                    let spent = found.replay(recordings, &measured.costs)?;
                    add(&RuleChoice {
                        seconds_per_token: seconds_per_token(&spent),
                        ..found.clone()
                    });
                }
            }
        }
        all.sort_by_key(complexity);
        Ok(all)
    }

    /// Races the settings of a drafter that may be the fastest, beside plain decoding. Does nothing
    /// if costs are given, or the target does not run here.
    pub(super) fn race(
        &mut self,
        (drafter, name): (DrafterName, DecodingName),
        measured: &MeasuredCosts,
        (recordings, choices): (&Recordings, &[RuleChoice]),
    ) -> Result<Option<Raced>> {
        if measured.num_passes == 0 || self.measuring.is_none() {
            return Ok(None);
        }
        let is_it = |it: &Raced| (it.drafter, it.decoding) == (drafter, name);
        let at = self.races.races.iter().position(is_it).context("costs are kept first")?;
        if self.races.races[at].settings.is_empty() {
            let settings = self.proposed(recordings, measured, choices)?;
            let mut modelled = vec![Vec::new(); settings.len() + 1];
            for costs in measured.drawn(self.recipe.seed) {
                let plain = recordings.plain(&costs.rounds);
                modelled[PLAIN].push(seconds_per_token(&plain).ln());
                for (setting, modelled) in settings.iter().zip(&mut modelled[1..]) {
                    let spent = setting.replay(recordings, &costs)?;
                    modelled.push(seconds_per_token(&spent).ln());
                }
            }
            self.races.races[at].race = Race::of_modelled(modelled, self.recipe.seed);
            self.races.races[at].settings = settings;
        }
        let settings = self.races.races[at].settings.clone();
        let (seed, watch) = (self.recipe.seed, self.watch);
        let decoding = self.evaluate.decoding(name);
        let Some((decoders, prompts)) = self.measuring.as_mut() else { return Ok(None) };
        watch.note(format!("tune: racing {} settings, {drafter}, {}", settings.len(), name.text()));
        let mut run = |setting: usize, prompt: usize| {
            watch.check_interrupted()?;
            let choice = setting.checked_sub(1).map(|at| &settings[at]);
            let mut rule = choice.map(|it| it.config.init()).transpose()?;
            let rule = rule.as_mut().map(|rule| &mut **rule as &mut dyn StopRule);
            let draws = &mut SeededDraws::new(seed, &["race", &prompt.to_string()]);
            let with_lookup = |choice: &RuleChoice| drafter.with_lookup(choice.lookup_first);
            let name = choice.map_or(DrafterName::None, with_lookup);
            let trace = decoders.decode(name, rule, &decoding, &prompts[prompt], draws)?.trace;
            Ok(AnswerTime {
                num_tokens: trace.num_tokens,
                seconds: trace.decode_time().as_secs_f64(),
                waiting: waiting_time(&trace).as_secs_f64(),
            })
        };
        // The first forwards of a setting are slow, because they touch memory pages and select
        // kernels.
        let mut answer = 0.0;
        for setting in (0..=settings.len()).rev() {
            answer = run(setting, 0)?.waiting;
        }
        let by_default = (MOST_ANSWERS * answer).min(self.race_most);
        let left = self.race_left.get_or_insert(by_default);
        let limit = *left / self.num_races.max(1) as f64;
        while !self.races.races[at].race.is_over(limit) {
            let outcome = self.races.races[at].race.run_laps(prompts.len(), limit, &mut run);
            TuningFile::RACES.write(self.recipe, &self.races)?;
            outcome?;
        }
        *left -= self.races.races[at].race.seconds;
        self.num_races -= 1;
        Ok(Some(self.races.races[at].clone()))
    }
}
