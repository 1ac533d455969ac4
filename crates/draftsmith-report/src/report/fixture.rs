//! A simulated evaluation with realistic numbers, for tests.
//!
//! Runs of tokens are easy or hard, a noisy head predicts which, and forwards take a set time with
//! small deviations. So the rows are as consistent as measured rows. They are computed from a
//! `Trace`, like real rows.

mod replays;

use std::sync::LazyLock;
use std::time::Duration;

use draftsmith_theory::{
    CostModel, Decoding, DrafterId, Forwards, ModelSummary, Road, Round, Rounding, Sampling,
    SeededDraws, TimedCounts, Trace,
};

use crate::results::{
    ALL_CATEGORIES, Conclusion, CostRatios, CostSummary, DatasetSummary, DrafterName, Estimate,
    EvaluationSummary, GroupSummary, PromiseOutcome, PromiseSummary, ResultRow, SpeedAtLength,
    StopRuleName, Version, sort_rows, tokens_per_second,
};

pub(crate) use replays::{head_race, replay, replays};

const COST: CostModel =
    CostModel { draft_seconds: 0.0009, target_seconds: 0.0062, row_seconds: 0.0 };
/// A self-draft's forward runs layers of the target.
const SELF_DRAFT_SECONDS: f64 = 0.0014;
const SELF_DRAFT: DrafterName = DrafterName::Of(DrafterId::named("exit1"));
const NUM_TOKENS: usize = 96;

const DATASETS: [(&str, &[&str], f64); 2] = [
    (
        "spec-bench",
        &["writing", "coding", "extraction", "translation", "summarization", "math_reasoning"],
        0.80,
    ),
    ("gsm8k", &["arithmetic", "word_problem"], 0.90),
];

static EVALUATION: LazyLock<(Vec<ResultRow>, EvaluationSummary)> = LazyLock::new(evaluation);

/// The setting that tuning chose.
const TUNED: Setting =
    (DrafterName::Of(DrafterId::DRAFT), StopRuleName::CostConfidence, Some(0.1874236));

type Setting = (DrafterName, StopRuleName, Option<f64>);

fn settings() -> Vec<Setting> {
    use StopRuleName as Rule;
    const LENGTHS: [f64; 10] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 14.0];
    const PROBS: [f64; 5] = [0.3, 0.5, 0.6, 0.7, 0.8];
    const WORTHS: [f64; 3] = [0.08, 0.1874236, 0.45];
    let sweeps: [(DrafterName, StopRuleName, &[f64]); 19] = [
        (DrafterName::Of(DrafterId::DRAFT), Rule::FixedLength, &LENGTHS),
        (DrafterName::Of(DrafterId::DRAFT), Rule::Heuristic, &[1.0, 5.0]),
        (DrafterName::Of(DrafterId::DRAFT), Rule::RejectionThreshold, &[0.1, 0.3, 0.5, 0.7, 0.9]),
        (
            DrafterName::Of(DrafterId::DRAFT),
            Rule::RejectionThresholdWithoutLag,
            &[0.1, 0.3, 0.5, 0.7, 0.9],
        ),
        (DrafterName::Of(DrafterId::DRAFT), Rule::ConfidenceThreshold, &PROBS),
        (DrafterName::Of(DrafterId::DRAFT), Rule::CandidateProbThreshold, &PROBS[..3]),
        (DrafterName::Of(DrafterId::DRAFT), Rule::JointConfidence, &[0.05, 0.2, 0.4, 0.6]),
        (DrafterName::Of(DrafterId::DRAFT), Rule::EntropyThreshold, &[0.2, 0.3, 0.35, 0.4]),
        (DrafterName::Of(DrafterId::DRAFT), Rule::CostHead, &WORTHS),
        (DrafterName::Of(DrafterId::DRAFT), Rule::CostConfidence, &WORTHS),
        (DrafterName::Of(DrafterId::DRAFT), Rule::CostEntropy, &WORTHS),
        (SELF_DRAFT, Rule::FixedLength, &LENGTHS[..6]),
        (SELF_DRAFT, Rule::Heuristic, &[2.0]),
        (SELF_DRAFT, Rule::ConfidenceThreshold, &PROBS),
        (SELF_DRAFT, Rule::CandidateProbThreshold, &PROBS[..3]),
        (SELF_DRAFT, Rule::JointConfidence, &[0.2, 0.4, 0.6]),
        (SELF_DRAFT, Rule::EntropyThreshold, &[0.25, 0.3, 0.35]),
        (SELF_DRAFT, Rule::CostConfidence, &WORTHS[..2]),
        (SELF_DRAFT, Rule::CostEntropy, &WORTHS[..2]),
    ];
    let mut settings = vec![(DrafterName::None, StopRuleName::None, None)];
    for (drafter, stop_rule, values) in sweeps {
        settings.extend(values.iter().map(|value| (drafter, stop_rule, Some(*value))));
    }
    settings
}

fn decodings() -> [Decoding; 2] {
    [
        Decoding::GREEDY,
        Decoding::sampled(Sampling { temperature: 0.7, top_p: 0.9, top_k: None, min_p: None }),
    ]
}

/// Returns the rows of 2 datasets, 2 ways of decoding, 74 settings and every category.
pub(crate) fn rows() -> Vec<ResultRow> {
    EVALUATION.0.clone()
}

/// Returns the summary of the evaluation that the rows are from.
pub(crate) fn summary() -> EvaluationSummary {
    EVALUATION.1.clone()
}

/// Sets the cost of a forward of either drafter to `cost_ratio` forwards of the target.
fn costs(cost_ratio: f64) -> CostRatios {
    [DrafterName::Of(DrafterId::DRAFT), SELF_DRAFT]
        .into_iter()
        .filter_map(|drafter| Some((drafter.id()?, cost_ratio)))
        .collect()
}

fn evaluation() -> (Vec<ResultRow>, EvaluationSummary) {
    let mut draws = SeededDraws::new(5, &["fixture"]);
    let (mut rows, mut groups) = (Vec::new(), Vec::new());
    for (dataset, categories, easy_share) in DATASETS {
        for decoding in decodings() {
            let easy_share = easy_share - if decoding.is_greedy() { 0.0 } else { 0.08 };
            let traces: Vec<(Setting, Vec<Vec<Trace>>)> = settings()
                .into_iter()
                .map(|setting| {
                    let categories = (0..categories.len()).map(|category| {
                        let easy_share = easy_share + 0.03 * category as f64 - 0.08;
                        (0..10).map(|_| decode(setting, easy_share, &mut draws)).collect()
                    });
                    (setting, categories.collect())
                })
                .collect();
            let fits = [DrafterName::Of(DrafterId::DRAFT), SELF_DRAFT].map(|drafter| {
                let of_drafter =
                    |setting: &Setting| [DrafterName::None, drafter].contains(&setting.0);
                let runs: Vec<TimedCounts> = traces
                    .iter()
                    .filter(|(setting, _)| of_drafter(setting))
                    .flat_map(|(_, traces)| traces.iter().flatten())
                    .map(TimedCounts::from)
                    .collect();
                (drafter, CostModel::fit(&runs).expect("several candidate lengths"))
            });
            groups.push(GroupSummary {
                dataset: dataset.into(),
                decoding,
                num_forgiven_ties: usize::from(decoding.is_greedy()),
                costs: fits.map(|(drafter, fit)| CostSummary::new(drafter, None, &fit)).into(),
                promises: vec![PromiseSummary {
                    drafter: DrafterName::Of(DrafterId::DRAFT),
                    stop_rule: StopRuleName::CostConfidence,
                    best_fixed_length: 3,
                    expected_gain: Estimate { value: 0.114, low: 0.1, high: 0.127 },
                    measured_gain: Estimate { value: 0.121, low: 0.108, high: 0.135 },
                    outcome: PromiseOutcome::Held,
                }],
            });
            let seconds_per_token = |drafter: DrafterName, trace: &Trace| {
                let (_, fit) = &fits[usize::from(drafter == SELF_DRAFT)];
                let decode = fit.model.seconds(&trace.counts());
                (trace.prefill_time.as_secs_f64() + decode) / trace.num_tokens as f64
            };
            let mut row = |category: &str, pick: &dyn Fn(&[Vec<Trace>]) -> Vec<Trace>| {
                let plain = Trace::merge(&pick(&traces[0].1));
                for (setting, traces) in &traces {
                    let (drafter, stop_rule, setting) = *setting;
                    let picked = pick(traces);
                    let trace = Trace::merge(&picked);
                    let row = ResultRow::of(&trace, &decoding);
                    let speedup = row.tokens_per_second / tokens_per_second(&plain);
                    let improvement = |ratios: CostRatios| {
                        trace.standard_improvement(|id| ratios.get(&id).copied())
                    };
                    rows.push(ResultRow {
                        dataset: dataset.into(),
                        category: category.into(),
                        drafter,
                        road: road_of(drafter),
                        stop_rule,
                        setting,
                        is_tuned: (drafter, stop_rule, setting) == TUNED,
                        num_prompts: picked.len(),
                        speedup: Some(speedup),
                        by_length: [32, 64].map(|num_tokens| at_length(num_tokens, speedup)).into(),
                        speedup_interval: (drafter != DrafterName::None)
                            .then_some([0.96 * speedup, 1.05 * speedup]),
                        modelled_speedup: Some(
                            seconds_per_token(drafter, &plain) / seconds_per_token(drafter, &trace),
                        ),
                        improvement_by_size: improvement(costs(0.2)),
                        improvement_by_time: improvement(costs(0.3)),
                        lossless: (decoding.is_greedy()).then_some(true),
                        num_forgiven_ties: 0,
                        ..row
                    });
                }
            };
            row(ALL_CATEGORIES, &|traces| traces.concat());
            for (index, category) in categories.iter().enumerate() {
                row(category, &|traces| traces[index].clone());
            }
        }
    }
    sort_rows(&mut rows);
    let summary = summary_of(groups).concluded(&rows);
    (rows, summary)
}

/// Simulates one answer of [`NUM_TOKENS`] tokens.
fn decode(
    (drafter, stop_rule, setting): Setting,
    easy_share: f64,
    draws: &mut SeededDraws,
) -> Trace {
    let setting = setting.unwrap_or(0.0);
    let (easy_prob, hard_prob, draft_seconds) = match drafter {
        SELF_DRAFT => (0.92, 0.3, SELF_DRAFT_SECONDS),
        _ => (0.95, 0.4, COST.draft_seconds),
    };
    let (mut rounds, mut num_tokens, mut easy) = (Vec::new(), 0, true);
    let mut length = setting;
    let jitter = |draws: &mut SeededDraws| 0.9 + 0.2 * draws.uniform();
    while num_tokens < NUM_TOKENS {
        let (mut num_drafted, mut num_accepted, mut accepting) = (0, 0, true);
        let mut seen = Seen::default();
        let room = NUM_TOKENS - num_tokens - 1;
        let num_unused = loop {
            let stops = num_drafted > 0 && seen.stop(stop_rule, setting)
                || stop_rule == StopRuleName::None
                || stop_rule == StopRuleName::FixedLength && num_drafted as f64 >= setting
                || stop_rule == StopRuleName::Heuristic && num_drafted as f64 >= length;
            if stops || num_drafted == room.min(20) {
                // The forward that read the last candidate.
                let is_read = stop_rule == StopRuleName::RejectionThresholdWithoutLag;
                break usize::from(stops && is_read);
            }
            if draws.uniform() < 0.35 {
                easy = draws.uniform() < easy_share;
            }
            let accepted = draws.uniform() < if easy { easy_prob } else { hard_prob };
            seen.before_last = seen.all_accepted;
            seen.all_accepted *= if easy { 0.90 } else { 0.5 } + 0.1 * draws.uniform();
            seen.confidence = if easy { 0.55 } else { 0.2 } + 0.44 * draws.uniform();
            seen.all_confident *= seen.confidence.sqrt();
            accepting &= accepted;
            num_drafted += 1;
            num_accepted += usize::from(accepting);
        };
        length = if num_accepted == num_drafted { length + 2.0 } else { (length - 1.0).max(1.0) };
        let num_draft_forwards = num_drafted + num_unused;
        let seconds = draft_seconds * num_draft_forwards as f64;
        // The time differs slightly from the cost model's, so that the fit has an error.
        let verify_seconds =
            COST.target_seconds * (1.0 + 0.0015 * (num_drafted * num_drafted) as f64);
        rounds.push(Round {
            num_drafted,
            depth: num_drafted,
            forwards: Forwards::of(DrafterId::DRAFT, num_draft_forwards),
            num_accepted,
            draft_time: Duration::from_secs_f64(seconds * jitter(draws)),
            verify_time: Duration::from_secs_f64(verify_seconds * jitter(draws)),
        });
        num_tokens += num_accepted + 1;
    }
    Trace { rounds, num_tokens: NUM_TOKENS, prefill_time: Duration::from_millis(9) }
}

/// The signals that a stop rule reads in a round.
struct Seen {
    /// The head's estimate of the probability that all candidates are accepted, and its estimate
    /// for all but the last.
    all_accepted: f64,
    before_last: f64,
    confidence: f64,
    all_confident: f64,
}

impl Default for Seen {
    fn default() -> Self {
        Self { all_accepted: 1.0, before_last: 1.0, confidence: 1.0, all_confident: 1.0 }
    }
}

impl Seen {
    fn stop(&self, rule: StopRuleName, setting: f64) -> bool {
        let entropy = -1.5 * self.confidence.ln();
        match rule {
            StopRuleName::None | StopRuleName::FixedLength | StopRuleName::Heuristic => false,
            StopRuleName::ConfidenceHead => self.all_accepted < setting,
            StopRuleName::RejectionThreshold => 1.0 - self.before_last > setting,
            StopRuleName::RejectionThresholdWithoutLag => 1.0 - self.all_accepted > setting,
            StopRuleName::ConfidenceThreshold => self.confidence <= setting,
            StopRuleName::CandidateProbThreshold => 0.95 * self.confidence < setting,
            StopRuleName::JointConfidence => self.all_confident <= setting,
            StopRuleName::OnlineAcceptance => self.all_confident < setting,
            StopRuleName::EntropyThreshold => (0.15 * entropy).sqrt() > setting,
            StopRuleName::CostHead => 0.8 * self.before_last < setting,
            StopRuleName::CostConfidence => 0.8 * self.all_confident < setting,
            StopRuleName::CostEntropy => 0.7 * self.all_confident < setting,
        }
    }
}

/// Returns the speed over the first `num_tokens` tokens, which grows with their number.
fn at_length(num_tokens: usize, speedup: f64) -> SpeedAtLength {
    let speedup = speedup * (1.0 - 4.0 / num_tokens as f64);
    let tokens_per_second = 50.0 * speedup;
    SpeedAtLength {
        num_tokens,
        num_answers: 12,
        tokens_per_second,
        speedup,
        speedup_interval: None,
    }
}

fn summary_of(groups: Vec<GroupSummary>) -> EvaluationSummary {
    let model = |role: &str, name: &str, description: &str, hash: &str| ModelSummary {
        role: role.into(),
        name: name.into(),
        description: description.into(),
        hash: hash.repeat(8),
    };
    let version =
        |name: &str, version: &str| Version { name: name.into(), version: version.into() };
    EvaluationSummary {
        papers: Vec::new(),
        recipe: "tiny".into(),
        conclusion: Conclusion::default(),
        version: "0.1.0".into(),
        device: "cpu".into(),
        dtype: Rounding::F32,
        machine: "8 cores, 32 GiB, Linux x86_64".into(),
        foreign_load: Some(0.02),
        versions: vec![version("burn", "0.22.1"), version("rustc", "1.95.0")],
        models: vec![
            model(
                "target",
                "checkpoints/tiny/target",
                "llama, 8 layers of 256, 8.4M parameters, f32",
                "3f9ac01b",
            ),
            model(
                "draft",
                "checkpoints/tiny/draft",
                "llama, 2 layers of 128, 0.9M parameters, f32",
                "b71200de",
            ),
            model(
                "head",
                "checkpoints/tiny/head",
                "acceptance head, 3 tied blocks of 128",
                "09e4d55a",
            ),
            model(
                "adapter",
                "checkpoints/tiny/adapter",
                "Kangaroo adapter at exit layer 1, a block without MLP of 256",
                "c4410f7e",
            ),
        ],
        max_new_tokens: NUM_TOKENS,
        batch_size: 1,
        seeds: vec![42],
        datasets: DATASETS
            .map(|(name, categories, _)| DatasetSummary {
                name: name.into(),
                num_prompts: 10 * categories.len(),
                num_in_data: Some(categories.len() / 3),
            })
            .into(),
        groups,
    }
}

/// Infers a drafter's kind from its name, as tests choose names. `None` without a drafter.
pub(crate) fn road_of(drafter: DrafterName) -> Option<Road> {
    let id = drafter.id()?;
    Some(match id.as_str().trim_end_matches(|c: char| c.is_ascii_digit()) {
        "draft" => Road::SeparateDraft,
        "exit" => Road::SelfDraft,
        "lookup" | "look-up" => Road::Lookup,
        _ => Road::Several,
    })
}
