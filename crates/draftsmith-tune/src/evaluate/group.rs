//! The runs on one dataset under one way of decoding, and their results: rows, fitted costs and
//! answers.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use draftsmith_data::Prompt;
use draftsmith_report::{
    ALL_CATEGORIES, Answer, Choice, CostRatios, CostSummary, DecodingName, DrafterName,
    GroupSummary, LEAST_PROMPTS, PromiseOutcome, PromiseSummary, ResultRow, Road, RuleReads,
    SpeedAtLength, answers_to_jsonl, shown_interval, tokens_per_second, waiting_time,
};
use draftsmith_theory::{
    CostModel, DrafterId, Estimate, FixedLengthConfig, Round, RoundCosts, StopRuleConfig,
    TimedCounts, Trace,
};

use super::Plan;
use super::cost_ratios::{cost_by_time, given_ratios, paper_costs};
use super::measure::{Bench, PromptRun};
use super::settings::Setting;
use crate::agreement::Agreement;
use draftsmith_recipe::{Dataset, EvaluateRecipe, Recipe, TunedRule};

/// The lengths of prefixes of answers for which a speed is reported, in tokens. SVIP's Tables 2 and
/// 6 have those from 128 on.
const LENGTHS: [usize; 10] = [32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192];
/// The minimum number of answers for which a speed by length is reported.
const MIN_ANSWERS: usize = 3;

/// The categories of MT-Bench, which Spec-Bench reports as one category.
const MT_BENCH: [&str; 9] = [
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
    "mt-bench",
];

/// The runs on one dataset under one way of decoding.
pub(super) struct MeasuredGroup<'a> {
    pub(super) dataset: &'a Dataset,
    pub(super) plan: &'a Plan,
    /// The runs: one list per setting, with one entry per prompt and repeat.
    pub(super) runs: Vec<Vec<PromptRun>>,
}

impl MeasuredGroup<'_> {
    /// Adds a run of the setting with this index. A greedy run is compared with the plain run on
    /// the same prompt, which must have been added before.
    fn add(&mut self, index: usize, mut measured: PromptRun, bench: &mut Bench<'_>) -> Result<()> {
        if self.plan.decoding.is_greedy()
            && let Some(plain) = self.runs[0].get(measured.prompt)
        {
            measured.agreement = bench.compare(&self.plan.decoding, plain, &measured)?;
        }
        self.runs[index].push(measured);
        Ok(())
    }

    /// Adds runs of the settings with these indices, in the order in which they were made.
    pub(super) fn add_all(
        &mut self,
        runs: Vec<(usize, PromptRun)>,
        bench: &mut Bench<'_>,
    ) -> Result<()> {
        runs.into_iter().try_for_each(|(index, run)| self.add(index, run, bench))
    }

    /// Drops the runs on prompts that not all settings have completed.
    pub(super) fn keep_whole_prompts(&mut self) {
        let num_whole = self.runs.iter().map(Vec::len).min().unwrap_or(0);
        for runs in &mut self.runs {
            runs.truncate(num_whole);
        }
    }

    /// Fits linear cost models for each drafter over all prompts (SpecDec++, Table 2). One model
    /// covers plain decoding and all settings of the drafter. Further models cover plain decoding
    /// and the settings whose rules read the same signals. Models that cannot be fitted are left
    /// out.
    fn fits(&self) -> Vec<CostSummary> {
        let settings = &self.plan.settings;
        let reads = |setting: &Setting| Some(RuleReads::of(setting.rule.as_ref()?.needs()));
        let of_rules = settings.iter().map(|setting| (setting.drafter, reads(setting)));
        let of_all = settings.iter().map(|setting| (setting.drafter, None));
        let fitted: BTreeSet<(DrafterName, Option<RuleReads>)> = of_all.chain(of_rules).collect();
        let fit = |(drafter, wanted): (DrafterName, Option<RuleReads>)| {
            let belongs = |setting: &Setting| match setting.drafter {
                DrafterName::None => true,
                own => own == drafter && (wanted.is_none() || reads(setting) == wanted),
            };
            let settings = settings.iter().zip(&self.runs);
            let runs: Vec<TimedCounts> = settings
                .filter(|(setting, _)| belongs(setting))
                .flat_map(|(_, runs)| runs)
                .filter(|run| run.trace.num_tokens > 0)
                .map(|run| TimedCounts::from(&run.trace))
                .collect();
            Some(CostSummary::new(drafter, wanted, &CostModel::fit(&runs).ok()?))
        };
        let fitted = fitted.into_iter().filter(|(drafter, _)| *drafter != DrafterName::None);
        fitted.filter_map(fit).collect()
    }

    /// Estimates the costs of rounds under each setting, over all prompts; `None` if they cannot be
    /// estimated. Verification costs are averaged by number of rows over plain decoding and all
    /// settings of the drafter. Draft forward costs are averaged over the settings whose rules read
    /// the same signals.
    fn round_costs(&self) -> Vec<Option<RoundCosts>> {
        let rounds_of = |belongs: &dyn Fn(&Setting) -> bool| -> Vec<Round> {
            let settings = self.plan.settings.iter().zip(&self.runs);
            let runs = settings.filter(|(setting, _)| belongs(setting)).flat_map(|(_, runs)| runs);
            runs.flat_map(|run| &run.trace.rounds).copied().collect()
        };
        let needs = |setting: &Setting| setting.rule.as_ref().map(StopRuleConfig::needs);
        let costs = |setting: &Setting| {
            let drafters = [DrafterName::None, setting.drafter];
            let all =
                RoundCosts::of_rounds(&rounds_of(&|other| drafters.contains(&other.drafter)))?;
            let alike = rounds_of(&|other| {
                (other.drafter, needs(other)) == (setting.drafter, needs(setting))
            });
            let alike = RoundCosts::of_rounds(&alike)?;
            let prices = setting.drafter.id().map(|id| (id, alike.draft_seconds(id)));
            Some(match prices {
                Some((id, Ok(draft_seconds))) => all.with_draft_seconds(id, draft_seconds),
                _ => all,
            })
        };
        self.plan.settings.iter().map(costs).collect()
    }

    /// Builds the result rows over all prompts, and also over each category if there are several.
    fn rows(&self, seed: u64, costs: &GroupCosts<'_>) -> Vec<ResultRow> {
        let mut rows = self.category_rows(ALL_CATEGORIES, seed, costs, |_| true);
        let prompts = &self.dataset.prompts;
        let of_spec_bench = prompts.iter().any(|it| it.category.as_deref() == Some("humanities"));
        let category_of = |prompt: &'_ Prompt| -> Option<String> {
            let own = prompt.category.as_deref()?;
            let is_turn_of_mt_bench = of_spec_bench && MT_BENCH.contains(&own);
            Some(if is_turn_of_mt_bench { "mt_bench" } else { own }.to_owned())
        };
        let categories: BTreeSet<String> = prompts.iter().filter_map(category_of).collect();
        if categories.len() > 1 {
            for category in categories {
                rows.extend(self.category_rows(&category, seed, costs, |run| {
                    category_of(&prompts[run.prompt]).as_ref() == Some(&category)
                }));
            }
        }
        rows
    }

    fn category_rows(
        &self,
        category: &str,
        seed: u64,
        costs: &GroupCosts<'_>,
        belongs: impl Fn(&PromptRun) -> bool,
    ) -> Vec<ResultRow> {
        let of_category: Vec<Vec<&PromptRun>> =
            self.runs.iter().map(|runs| runs.iter().filter(|run| belongs(run)).collect()).collect();
        let traces: Vec<Trace> =
            of_category.iter().map(|runs| Trace::merge(traces(runs))).collect();
        let plain = &traces[0];
        let row = |(index, (trace, runs)): (usize, (&Trace, &Vec<&PromptRun>))| {
            let num_of = |agreement| runs.iter().filter(|r| r.agreement == agreement).count();
            let setting = &self.plan.settings[index];
            let finite = |number: f64| Some(number).filter(|number| number.is_finite());
            let row = ResultRow::of(trace, &self.plan.decoding);
            let num_prompts = by_prompt(runs).len();
            // Plain decoding has no interval relative to itself.
            let intervals = setting.rule.as_ref();
            let intervals = intervals.map(|_| speedup_intervals(runs, &of_category[0], seed));
            let [speedup_interval, speedup_over_prompts_interval] = intervals.unwrap_or_default();
            ResultRow {
                dataset: self.dataset.name.clone(),
                category: category.to_owned(),
                drafter: setting.drafter,
                road: costs.road_of(setting.drafter),
                num_parameters: (setting.drafter.id())
                    .and_then(|id| costs.num_parameters.get(&id).copied()),
                stop_rule: setting.stop_rule(),
                setting: setting.rule.as_ref().map(StopRuleConfig::parameter),
                is_tuned: self.plan.is_tuned(setting),
                num_prompts,
                speedup_over_prompts: finite(mean_speed(runs) / mean_speed(&of_category[0])),
                speedup_over_prompts_interval,
                speedup_sd: speedup_sd(runs, &of_category[0]),
                speedup: finite(row.tokens_per_second / tokens_per_second(plain)),
                by_length: match category == ALL_CATEGORIES {
                    true => by_length(runs, &of_category[0], seed),
                    false => Vec::new(),
                },
                speedup_interval,
                rate_intervals: rate_intervals(runs, seed, costs),
                modelled_speedup: costs.of_rounds[index].as_ref().and_then(|costs| {
                    let plain = modelled_tokens_per_second(plain, costs)?;
                    finite(modelled_tokens_per_second(trace, costs)? / plain)
                }),
                speedup_at_paper_costs: speedup_at(trace, costs.paper),
                improvement_by_size: improvement(trace, costs.by_size),
                improvement_by_time: improvement(trace, costs.by_time),
                improvement_at: costs
                    .given
                    .iter()
                    .map(|(name, ratios)| (name.clone(), improvement(trace, ratios)))
                    .collect(),
                // Sampled answers are random and cannot be compared with the plain answer.
                lossless: (self.plan.decoding.is_greedy())
                    .then_some(num_of(Agreement::Different) == 0),
                num_forgiven_ties: num_of(Agreement::Tie),
                ..row
            }
        };
        traces.iter().zip(&of_category).enumerate().map(row).collect()
    }

    /// Collects the answers to each prompt under one setting, with one [`Choice`] per repeat.
    fn answers(&self, index: usize, recipe: &Recipe) -> Vec<Answer> {
        let name = self.plan.settings[index].name();
        let runs: Vec<&PromptRun> = self.runs[index].iter().collect();
        let answer = |(index, runs): (usize, Vec<&PromptRun>)| {
            let prompt = &self.dataset.prompts[index];
            let choice = |(index, run): (usize, &PromptRun)| {
                let mut choice = Choice { index, ..Choice::default() };
                for (turn, text) in run.turns.iter().zip(&run.texts) {
                    choice.push_turn(text.clone(), &turn.trace);
                }
                choice
            };
            let choices = runs.into_iter().enumerate().map(choice).collect();
            let category = prompt.category.clone().unwrap_or_else(|| prompt.source.clone());
            let model_id = format!("{}-{name}", recipe.name);
            Answer::new(question_id(prompt), category, model_id, choices)
        };
        by_prompt(&runs).into_iter().map(answer).collect()
    }
}

/// The costs of a group's rounds and the cost ratios of its drafters.
struct GroupCosts<'a> {
    roads: &'a BTreeMap<DrafterId, Road>,
    num_parameters: &'a BTreeMap<DrafterId, usize>,
    /// The costs of rounds under each setting.
    of_rounds: &'a [Option<RoundCosts>],
    by_size: &'a CostRatios,
    by_time: &'a CostRatios,
    /// The recipe's sets of cost ratios.
    given: &'a BTreeMap<String, CostRatios>,
    /// The SpecDec++ paper's costs.
    paper: &'a RoundCosts,
}

impl GroupCosts<'_> {
    fn road_of(&self, drafter: DrafterName) -> Option<Road> {
        match drafter.as_look_ups_alone() {
            Some(_) => Some(Road::Lookup),
            None => drafter.id().and_then(|id| self.roads.get(&id).copied()),
        }
    }
}

/// Computes the speed-up of rounds at some costs over decoding with the target by itself; NaN if the
/// cost of a drafter is unknown.
pub(super) fn speedup_at(trace: &Trace, costs: &RoundCosts) -> f64 {
    let plain = trace.num_tokens as f64 * costs.verify_seconds(1);
    costs.seconds(&trace.rounds).map_or(f64::NAN, |seconds| plain / seconds)
}

/// Computes CS-Drafting's standardised walltime improvement with these cost ratios; `None` without
/// tokens, or if a drafter has no cost ratio.
fn improvement(trace: &Trace, ratios: &CostRatios) -> Option<f64> {
    trace.standard_improvement(|id| ratios.get(&id).copied())
}

/// Computes the speed over the first tokens of answers, up to the longest of [`LENGTHS`] that enough
/// answers have.
fn by_length(own: &[&PromptRun], plain: &[&PromptRun], seed: u64) -> Vec<SpeedAtLength> {
    let at_length = |num_tokens: usize| {
        // The beginnings of each prompt's answers.
        let mut of_prompts: BTreeMap<usize, [Vec<Trace>; 2]> = BTreeMap::new();
        for (own, plain) in own.iter().zip(plain) {
            let turns = own.turns.iter().zip(&plain.turns).filter_map(|(own, plain)| {
                own.trace.first(num_tokens).zip(plain.trace.first(num_tokens))
            });
            for (first, of_plain) in turns {
                let both = of_prompts.entry(own.prompt).or_default();
                both[0].push(first);
                both[1].push(of_plain);
            }
        }
        let num_answers: usize = of_prompts.values().map(|[own, _]| own.len()).sum();
        let [own, plain] = [0, 1].map(|nth| -> Vec<(usize, f64)> {
            of_prompts.values().map(|both| tokens_and_seconds(&both[nth])).collect()
        });
        let all: Vec<usize> = (0..own.len()).collect();
        let [fast, slow] = [&own, &plain].map(|runs| per_second(runs, &all));
        (num_answers >= MIN_ANSWERS).then(|| SpeedAtLength {
            num_tokens,
            num_answers,
            tokens_per_second: fast,
            speedup: fast / slow,
            speedup_interval: interval(own.len(), seed, |some| {
                per_second(&own, some) / per_second(&plain, some)
            }),
        })
    };
    LENGTHS.into_iter().map_while(at_length).collect()
}

/// Computes the 95 % intervals of a speed-up by resampling prompts. The first is of the speed-up of
/// all prompts together, and the second of the speed-up by the mean over prompts.
fn speedup_intervals(own: &[&PromptRun], plain: &[&PromptRun], seed: u64) -> [Option<[f64; 2]>; 2] {
    // The tokens and seconds of each prompt are summed once, not for each resample.
    let [own, plain] = [own, plain].map(|runs| {
        let of_prompt = |runs: Vec<&PromptRun>| tokens_and_seconds(traces(&runs));
        by_prompt(runs).into_values().map(of_prompt).collect::<Vec<(usize, f64)>>()
    });
    let mean = |runs: &[(usize, f64)], some: &[usize]| -> f64 {
        some.iter().map(|index| runs[*index].0 as f64 / runs[*index].1).sum()
    };
    [
        interval(own.len(), seed, |some| per_second(&own, some) / per_second(&plain, some)),
        interval(own.len(), seed, |some| mean(&own, some) / mean(&plain, some)),
    ]
}

/// Computes the intervals of [`ResultRow::rate_intervals`]. Rates are undefined for prompts without
/// tokens, which are left out.
fn rate_intervals(
    runs: &[&PromptRun],
    seed: u64,
    costs: &GroupCosts<'_>,
) -> BTreeMap<String, [f64; 2]> {
    let prompts = by_prompt(runs).into_values().map(|runs| Trace::merge(traces(&runs)));
    let prompts: Vec<Trace> = prompts.filter(|trace| trace.num_tokens > 0).collect();
    let of = |rate: &dyn Fn(&Trace) -> f64| {
        // Each rate is a number of tokens over a sum of costs.
        let cost = |trace: &Trace| (trace.num_tokens, trace.num_tokens as f64 / rate(trace));
        let costs: Vec<(usize, f64)> = prompts.iter().map(cost).collect();
        interval(costs.len(), seed, |some| per_second(&costs, some))
    };
    let improved =
        |ratios: &CostRatios| of(&|trace| improvement(trace, ratios).unwrap_or(f64::NAN));
    let given = costs.given.iter();
    let given = given.map(|(name, ratios)| (format!("improvement_at/{name}"), improved(ratios)));
    let named = [
        ("tokens_per_second", of(&tokens_per_second)),
        ("compression_rate", of(&|trace| trace.counts().compression_rate())),
        ("speedup_at_paper_costs", of(&|trace| speedup_at(trace, costs.paper))),
        ("improvement_by_size", improved(costs.by_size)),
        ("improvement_by_time", improved(costs.by_time)),
    ];
    let named = named.into_iter().map(|(name, ends)| (name.to_owned(), ends));
    named.chain(given).filter_map(|(name, ends)| Some((name, ends?))).collect()
}

/// Computes the 95 % interval of a statistic by resampling prompts. `None` for so few prompts that
/// they say nothing about others, and if an end is not finite.
fn interval(
    num_prompts: usize,
    seed: u64,
    statistic: impl Fn(&[usize]) -> f64,
) -> Option<[f64; 2]> {
    let resampled =
        (num_prompts >= LEAST_PROMPTS).then(|| shown_interval(num_prompts, seed, statistic));
    let ends = resampled.map(|Estimate { low, high, .. }| [low, high]);
    ends.filter(|ends| ends.iter().all(|end| end.is_finite()))
}

/// Divides the tokens of the prompts with the indices `some` by their seconds.
fn per_second(runs: &[(usize, f64)], some: &[usize]) -> f64 {
    let (tokens, seconds) = some.iter().fold((0, 0.0), |(tokens, seconds), index| {
        (tokens + runs[*index].0, seconds + runs[*index].1)
    });
    tokens as f64 / seconds
}

/// Groups runs by the index of their prompt. Each group is in the order of repeats.
fn by_prompt<'r>(runs: &[&'r PromptRun]) -> BTreeMap<usize, Vec<&'r PromptRun>> {
    let mut of_prompts: BTreeMap<usize, Vec<&PromptRun>> = BTreeMap::new();
    for run in runs {
        of_prompts.entry(run.prompt).or_default().push(run);
    }
    of_prompts
}

fn traces<'r>(runs: &[&'r PromptRun]) -> impl Iterator<Item = &'r Trace> {
    runs.iter().map(|run| &run.trace)
}

/// Sums the tokens of traces, and the seconds that a user waits for them, including prefill.
fn tokens_and_seconds<'t>(traces: impl IntoIterator<Item = &'t Trace>) -> (usize, f64) {
    traces.into_iter().fold((0, 0.0), |(tokens, seconds), trace| {
        (tokens + trace.num_tokens, seconds + waiting_time(trace).as_secs_f64())
    })
}

fn speed(runs: &[&PromptRun]) -> f64 {
    let (tokens, seconds) = tokens_and_seconds(traces(runs));
    tokens as f64 / seconds
}

/// Computes the mean of the runs' tokens per second, as Spec-Bench does.
fn mean_speed(runs: &[&PromptRun]) -> f64 {
    runs.iter().map(|run| speed(&[run])).sum::<f64>() / runs.len() as f64
}

/// Computes the sample standard deviation (n − 1) of the speed-up over repeats; `None` with fewer
/// than two repeats.
fn speedup_sd(own: &[&PromptRun], plain: &[&PromptRun]) -> Option<f64> {
    let num_repeats = by_prompt(own).into_values().map(|runs| runs.len()).min()?;
    let of_repeat = |runs: &[&PromptRun], nth: usize| {
        let nth = by_prompt(runs).into_values().filter_map(|runs| runs.get(nth).copied());
        speed(&nth.collect::<Vec<_>>())
    };
    let speedups: Vec<f64> =
        (0..num_repeats).map(|nth| of_repeat(own, nth) / of_repeat(plain, nth)).collect();
    let mean = speedups.iter().sum::<f64>() / num_repeats as f64;
    let squares: f64 = speedups.iter().map(|it| (it - mean).powi(2)).sum();
    (num_repeats > 1).then(|| (squares / (num_repeats - 1) as f64).sqrt())
}

/// Computes the tokens per second from average round costs and the measured prefill time; `None` if
/// the cost of a drafter is unknown.
fn modelled_tokens_per_second(trace: &Trace, costs: &RoundCosts) -> Option<f64> {
    let decode = costs.seconds(&trace.rounds).ok()?;
    Some(trace.num_tokens as f64 / (trace.prefill_time.as_secs_f64() + decode))
}

/// Returns the prompt's own id from its file, or else its row id.
fn question_id(prompt: &Prompt) -> serde_json::Value {
    let own = prompt.own_id.clone().filter(|id| id.is_number() || id.is_string());
    own.unwrap_or_else(|| prompt.id.as_str().into())
}

/// Computes the seconds per forward in runs of plain decoding, without prefill; `None` without
/// forwards.
pub(super) fn seconds_alone(runs: &[PromptRun]) -> Option<f64> {
    let seconds: f64 = runs.iter().map(|run| run.trace.decode_time().as_secs_f64()).sum();
    let num: usize = runs.iter().map(|run| run.trace.rounds.len()).sum();
    (num > 0).then(|| seconds / num as f64)
}

/// The results of an evaluation over all datasets and ways of decoding.
#[derive(Default)]
pub(super) struct EvaluationResults {
    pub(super) cost_by_size: CostRatios,
    /// The number of parameters of each drafter's own.
    pub(super) num_parameters: BTreeMap<DrafterId, usize>,
    /// The category of each drafter in reports, such as separate draft model or self-draft.
    pub(super) roads: BTreeMap<DrafterId, Road>,
    /// The cost of the draft model's forwards when it decodes alone; `None` without a draft model.
    pub(super) alone: Option<CostSummary>,
    pub(super) rows: Vec<ResultRow>,
    pub(super) groups: Vec<GroupSummary>,
    /// The name and the text of each answers file.
    pub(super) answers: Vec<(String, String)>,
    /// The share of the processors that other programs used; `None` if unknown.
    pub(super) foreign_load: Option<f64>,
}

impl EvaluationResults {
    pub(super) fn add(
        &mut self,
        group: MeasuredGroup<'_>,
        recipe: &Recipe,
        evaluate: &EvaluateRecipe,
    ) -> Result<()> {
        if group.runs.iter().any(Vec::is_empty) {
            return Ok(());
        }
        let mut fits = group.fits();
        let target = seconds_alone(&group.runs[0])
            .map(|seconds| CostSummary::alone(DrafterName::None, seconds));
        fits.extend(target.into_iter().chain(self.alone));
        let (of_rounds, settings) = (group.round_costs(), &group.plan.settings);
        let by_time = cost_by_time(settings, &group.runs, &of_rounds);
        let by_size = &self.cost_by_size;
        let costs = GroupCosts {
            roads: &self.roads,
            num_parameters: &self.num_parameters,
            of_rounds: &of_rounds,
            by_size,
            by_time: &by_time,
            given: &given_ratios(recipe, by_size),
            paper: &paper_costs(recipe, by_size),
        };
        self.rows.extend(group.rows(recipe.seed, &costs));
        let ties = group.runs.iter().flatten().filter(|run| run.agreement == Agreement::Tie);
        self.groups.push(GroupSummary {
            dataset: group.dataset.name.clone(),
            decoding: group.plan.decoding,
            num_forgiven_ties: ties.count(),
            costs: fits,
            // Predicted gains apply only to batch size 1.
            promises: if evaluate.batch_size > 1 {
                Vec::new()
            } else {
                promises(&group.plan.promised, &group.plan.settings, &group.runs, recipe.seed)
            },
        });
        for (index, setting) in group.plan.settings.iter().enumerate() {
            let name = format!(
                "answers/{}/{}-{}.jsonl",
                group.dataset.name,
                DecodingName::of(&group.plan.decoding).text(),
                setting.name()
            );
            self.answers.push((name, answers_to_jsonl(&group.answers(index, recipe))?));
        }
        Ok(())
    }
}

/// Compares predicted gains with the runs of one group. Leaves out settings that were not run, and
/// the best fixed length itself, which is the baseline.
fn promises(
    promised: &[TunedRule],
    settings: &[Setting],
    runs: &[Vec<PromptRun>],
    seed: u64,
) -> Vec<PromiseSummary> {
    let runs_of = |drafter: DrafterName, rule: &StopRuleConfig| {
        let is_it =
            |setting: &Setting| setting.drafter == drafter && setting.rule.as_ref() == Some(rule);
        settings.iter().position(is_it).map(|index| &runs[index])
    };
    let promise = |promised: &TunedRule| {
        let candidate_length = promised.best_fixed_length;
        let fixed = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length });
        let own = runs_of(promised.drafter, &promised.config)?;
        let over = DrafterName::Of(promised.drafter.id()?);
        if promised.config == fixed && promised.drafter == over {
            return None;
        }
        let fixed = runs_of(over, &fixed)?;
        let seconds = |runs: &[PromptRun], some: &[usize]| -> f64 {
            let traces = || some.iter().map(|index| &runs[*index].trace);
            let seconds: f64 = traces().map(|trace| trace.decode_time().as_secs_f64()).sum();
            seconds / traces().map(|trace: &Trace| trace.num_tokens as f64).sum::<f64>()
        };
        let gain = |some: &[usize]| seconds(fixed, some) / seconds(own, some) - 1.0;
        let measured = shown_interval(own.len(), seed, gain);
        let expected = promised.expected_gain;
        Some(PromiseSummary {
            drafter: promised.drafter,
            stop_rule: promised.config.name(),
            best_fixed_length: candidate_length,
            expected_gain: expected,
            measured_gain: measured,
            outcome: PromiseOutcome::of(&expected, &measured),
        })
    };
    // Gains at costs of another machine cannot be verified here.
    let of_here = promised.iter().filter(|promised| promised.cost_source.is_machine());
    of_here.filter_map(promise).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use draftsmith_theory::Forwards;

    use super::*;

    /// Creates the runs of prompts with these numbers of accepted candidates, one round each.
    fn runs(accepted: &[usize]) -> Vec<PromptRun> {
        let run = |(prompt, num_accepted): (usize, &usize)| {
            let round = Round {
                num_drafted: 4,
                depth: 4,
                forwards: Forwards::of(DrafterId::DRAFT, 4),
                num_accepted: *num_accepted,
                verify_time: Duration::from_millis(10),
                ..Round::default()
            };
            let (rounds, num_tokens) = (vec![round], num_accepted + 1);
            let trace = Trace { rounds, num_tokens, ..Trace::default() };
            let agreement = Agreement::Same;
            PromptRun { prompt, trace, turns: Vec::new(), texts: Vec::new(), agreement }
        };
        accepted.iter().enumerate().map(run).collect()
    }

    #[test]
    fn every_rate_over_tokens_has_an_interval_around_its_value() {
        let by_size = &CostRatios::from([(DrafterId::DRAFT, 0.25)]);
        let given = &[("ms".to_owned(), by_size.clone())].into();
        let paper = &RoundCosts::paper([(DrafterId::DRAFT, 0.02)].into());
        let roads = &BTreeMap::new();
        let (num_parameters, of_rounds) = (&BTreeMap::new(), &[]);
        let by_time = by_size;
        let costs = GroupCosts { roads, num_parameters, of_rounds, by_size, by_time, given, paper };
        let intervals =
            |runs: &[PromptRun]| rate_intervals(&runs.iter().collect::<Vec<_>>(), 3, &costs);
        let varied = runs(&[0, 1, 2, 3, 4, 4]);
        let trace = Trace::merge(varied.iter().map(|run| &run.trace));
        // 20 tokens of 6 rounds of 10 ms and 2 target forwards each.
        let improved = 20.0 / 12.0;
        let expected = [
            ("compression_rate", 20.0 / 6.0),
            ("improvement_at/ms", improved),
            ("improvement_by_size", improved),
            ("improvement_by_time", improved),
            ("speedup_at_paper_costs", speedup_at(&trace, paper)),
            ("tokens_per_second", 20.0 / 0.06),
        ];
        let found = intervals(&varied);
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.map(|(name, _)| name));
        for (name, value) in expected {
            // Resamples of 6 prompts with 1 to 5 tokens have a mean of 3.3 ± 0.6 tokens.
            let [low, high] = found[name].map(|end| end / value);
            assert!(
                (0.5..0.8).contains(&low) && (1.2..1.5).contains(&high),
                "{name}: {low} {high}"
            );
        }
        let [low, high] = intervals(&runs(&[2; 6]))["compression_rate"];
        assert_eq!([low, high], [3.0, 3.0], "prompts do not differ");
        assert!(intervals(&varied[..3]).is_empty(), "three prompts say nothing about others");
    }
}
