//! A target and a draft: how they agree, what each rule would gain, and how much of it a head could.

use anyhow::{Context, Result};
use draftsmith_decode::KnownResponse;
use draftsmith_theory::{
    Decoding, DrafterId, Draws, FixedLengthConfig, HeadScores, HeadTiming, Recording, Recordings,
    Sampling, SeededDraws, StopRuleConfig, StopRuleName, TimedCounts, TokenChoice,
};
use rayon::prelude::*;
use serde::Serialize;

use super::look_ups::LookUps;
use super::probe::{Unexplained, scores};
use super::verdict::{HeadOutlook, Promise, Verdict, of_pair};
use super::{MAX_LENGTH, Surveyor};
use crate::console::Interrupted;
use crate::console::progress::Progress;
use crate::costs::Costs;
use crate::device::DeviceChoice;
use crate::exports::Exports;
use crate::judging::{Fold, Judging, over};
use crate::labels::Labels;
use crate::recorder::Recorder;
use crate::recordings::RecordedModels;
use crate::results::{CostSource, DrafterName, Estimate, ReplayRow, acceptance_by_position};
use crate::rollouts::RecordedSet;
use crate::statistics::shown_interval;
use crate::sweep::{Choice, best_of_all, cheapest};

/// What was found of a pair.
#[derive(Debug, Serialize)]
pub(super) struct PairSurvey {
    /// The share of positions at which both models' most probable tokens are one.
    pub(super) agreement: Estimate,
    /// Σ min(p, q) as sampled, at temperature 1 where answers are greedy: the chance that a sampled
    /// candidate is accepted. Null for greedy answers of servers, which say no probabilities.
    pub(super) overlap: Option<Estimate>,
    /// The share of the answers' tokens that the draft proposes and the target accepts; null where
    /// nothing is drafted.
    pub(super) share_accepted: Option<f64>,
    /// The i-th entry is the share accepted of the candidates at position i of a round whose
    /// predecessors were; it ends before the first position with fewer than 20 such candidates.
    pub(super) acceptance_by_position: Vec<f64>,
    /// Whose costs are reckoned with.
    pub(super) cost_source: CostSource,
    pub(super) costs: Costs,
    /// Modelled speed over the target alone at every fixed length, on all answers.
    pub(super) fixed_lengths: Vec<FixedLength>,
    /// Every rule, its settings those that are best on all answers, its numbers from halves that are
    /// judged by what the other half chose. Rules that read a head have the probes' predictions.
    pub(super) rules: Vec<ReplayRow>,
    /// The gain over the best fixed length of whoever knows the answers; greedy only.
    pub(super) oracle: Option<Estimate>,
    /// The best rule that can be set as it is, with nothing trained or fitted: what the halves chose,
    /// judged on one another.
    pub(super) untrained: Promise,
    /// Its gain over the best fixed length.
    pub(super) untrained_gain: Estimate,
    /// What prompt lookup gains without the draft.
    pub(super) look_ups: LookUps,
    /// What a head could do.
    pub(super) head: HeadSurvey,
    pub(super) verdict: Verdict,
}

/// The speed at a fixed length.
#[derive(Debug, Serialize)]
pub(super) struct FixedLength {
    /// K, candidates a round.
    pub(super) candidate_length: usize,
    pub(super) speedup: Estimate,
}

/// What a head could do for the pair.
#[derive(Debug, Serialize)]
pub(super) struct HeadSurvey {
    /// The gain over the best fixed length of a rule that reads a perfect look-ahead head; null where the
    /// target is served, which nobody can ask about all candidates.
    pub(super) ceiling: Option<Estimate>,
    /// What heads that were trained for a moment knew; null where answers were too few.
    pub(super) probe: Option<Probe>,
}

/// What small heads knew that were trained on half of the answers and asked about the other.
#[derive(Debug, Serialize)]
pub(super) struct Probe {
    /// The share they explain of what a constant leaves unexplained (KL): a floor of what a head could
    /// know.
    pub(super) explained: Estimate,
    /// Their predictions on answers that they were not trained on.
    pub(super) scores: HeadScores,
    /// What a head that explains so much is expected to gain: that share of the ceiling. Where there is
    /// none, what the best rule that reads these small heads gains.
    pub(super) outlook: HeadOutlook,
}

/// Surveys the pair.
pub(super) fn survey(surveyor: &Surveyor<'_>) -> Result<PairSurvey> {
    let Surveyor { answers, decoding, seed, console, .. } = *surveyor;
    let (drafter, id) = (DrafterName::Of(DrafterId::Draft), DrafterId::Draft);
    let num_steps = 3 * answers.len() as u64;
    let progress = Progress::new(console, "survey", "answers", num_steps);
    let (agreement, overlap) = agreement(surveyor, &progress)?;
    let text = surveyor.models.text();
    let recorder = Recorder {
        models: surveyor.models.clone(),
        max_new_tokens: surveyor.max_new_tokens,
        seed,
        max_length: MAX_LENGTH,
        labels: true,
        on_cpu: DeviceChoice::is_cpu(surveyor.workspace.device()),
        console,
        progress: &progress,
    };
    progress.message("draft");
    let none = Exports::default();
    let recorded = recorder.record(&none, drafter, decoding, answers)?;
    let all = |recorded: &[(String, Recording)], head| Recordings {
        drafter: id,
        max_length: MAX_LENGTH,
        eos_token_ids: text.eos_token_ids.clone(),
        head,
        responses: recorded.iter().map(|(_, recording)| recording.clone()).collect(),
    };
    let whole = all(&recorded, None);
    let halves = surveyor.halves();
    progress.message("probing what a head could know");
    let [one, other] = &halves;
    let probes = [surveyor.probe(other, &recorded)?, surveyor.probe(one, &recorded)?];
    // Along each half with the head that was trained on the other.
    let mut with_heads = Vec::new();
    for (half, probe) in halves.iter().zip(&probes) {
        let Some(exports) = probe else { continue };
        let some = half.iter().map(|nth| &answers[*nth]);
        with_heads.push(recorder.record(exports, drafter, decoding, some)?);
    }
    progress.clear();
    let of_half = |half: &[usize]| {
        let some: Vec<_> = half.iter().map(|nth| recorded[*nth].clone()).collect();
        all(&some, None)
    };
    let plain_halves = [of_half(one), of_half(other)];
    let probed = <[_; 2]>::try_from(with_heads).ok();
    let probed = probed.map(|halves| halves.map(|half| all(&half, Some(HeadTiming::AtDraw))));

    let exports = probes.iter().flatten().next().unwrap_or(&none);
    let (cost_source, costs) = surveyor.draft_costs(exports, &whole)?;
    console.note("survey: replaying every rule");
    let judged_halves = probed.as_ref().unwrap_or(&plain_halves);
    let judging = judging(judged_halves, &costs, seed)?;
    let together = Recordings {
        responses: judged_halves.iter().flat_map(|half| half.responses.clone()).collect(),
        ..judged_halves[0].clone()
    };
    let shown = best_of_all(&together, &costs)?;
    let rules = judging.rows(&shown)?;
    let oracle = (decoding.is_greedy()).then(|| judging.oracle()).transpose()?;

    let untrained = judging.best(is_settable)?;
    let untrained_gain = judging.estimate(&|some| over(judging.fixed(), &untrained, some));
    let best: Vec<Choice> = shown.iter().filter(|choice| is_settable(choice)).cloned().collect();
    let promise = |choice: &Choice, spent: &[TimedCounts]| Promise {
        setting: choice.name.label(Some(choice.config.parameter())),
        config: choice.config.clone(),
        speedup: judging.speedup(spent),
    };
    let fixed = shown.iter().find(|choice| choice.name == StopRuleName::FixedLength);
    let fixed = promise(fixed.context("fixed lengths are tried")?, judging.fixed());

    let is_judged = plain_halves.iter().all(Recordings::is_judged);
    let perfect = is_judged.then(|| {
        let ahead = plain_halves
            .clone()
            .map(|half| Recordings { head: Some(HeadTiming::AtDraw), ..half }.with_perfect_head());
        self::judging(&ahead, &costs, seed)?.best(reads_head)
    });
    let perfect = perfect.transpose()?;
    let ceiling_of =
        perfect.as_ref().map(|perfect| |some: &[usize]| over(judging.fixed(), perfect, some));
    let probing = |halves: &[Recordings; 2]| -> Result<Probe> {
        let [one, other] = halves.each_ref().map(|half| half.judged_predictions(decoding));
        let unexplained = Unexplained::of(&one, &other).join(Unexplained::of(&other, &one));
        // Without a ceiling there is what these heads gain themselves.
        let own = match ceiling_of {
            Some(_) => Vec::new(),
            None => judging.best(reads_head)?,
        };
        let expected = |some: &[usize]| match &ceiling_of {
            Some(ceiling_of) => unexplained.share(some).max(0.0) * ceiling_of(some),
            None => over(judging.fixed(), &own, some),
        };
        let over_untrained = |some: &[usize]| {
            (1.0 + expected(some)) / (1.0 + over(judging.fixed(), &untrained, some)) - 1.0
        };
        let speedup = |some: &[usize]| {
            (1.0 + expected(some)) * (1.0 + over(judging.plain(), judging.fixed(), some))
        };
        Ok(Probe {
            explained: judging.estimate(&|some| unexplained.share(some)),
            scores: scores(&[one, other].concat().concat(), &|prob| prob),
            outlook: HeadOutlook {
                over_fixed: judging.estimate(&expected),
                over_untrained: judging.estimate(&over_untrained),
                speedup: judging.estimate(&speedup),
            },
        })
    };
    let probe = probed.as_ref().map(probing).transpose()?;
    let ceiling = ceiling_of.as_ref().map(|ceiling_of| judging.estimate(ceiling_of));
    let head = HeadSurvey { ceiling, probe };
    let untrained = promise(cheapest(&best)?, &untrained);
    let outlook = head.probe.as_ref().map(|probe| &probe.outlook);
    let look_ups = LookUps::of(&plain_halves, &costs, seed)?;
    let verdict = of_pair(&fixed, &untrained, untrained_gain, outlook, head.ceiling)
        .beside_look_ups(look_ups.look_ups, look_ups.speedup);
    let set = RecordedSet { ids: Vec::new(), recordings: whole };
    let longest = FixedLengthConfig { candidate_length: MAX_LENGTH };
    let trace = set.recordings.trace(&StopRuleConfig::FixedLength(longest))?;
    Ok(PairSurvey {
        agreement,
        overlap,
        share_accepted: set.summary().share_accepted,
        acceptance_by_position: acceptance_by_position(&trace),
        cost_source,
        fixed_lengths: fixed_lengths(&set.recordings, &costs, seed)?,
        costs,
        rules,
        oracle,
        untrained,
        untrained_gain,
        look_ups,
        head,
        verdict,
    })
}

/// Whether a rule reads a head.
fn reads_head(choice: &Choice) -> bool {
    choice.config.needs().acceptance_prob
}

/// Whether a rule can be set as it stands: nothing is trained or fitted for it.
fn is_settable(choice: &Choice) -> bool {
    choice.lookup_first.is_none()
        && !reads_head(choice)
        && !matches!(choice.config, StopRuleConfig::CostOptimal(_))
}

/// Each half judged by what the other chose.
fn judging<'a>(halves: &'a [Recordings; 2], costs: &'a Costs, seed: u64) -> Result<Judging<'a>> {
    let [one, other] = halves;
    let folds = [(other, one), (one, other)]
        .into_iter()
        .map(|(chosen_on, judged_on)| Fold::new(chosen_on, judged_on, costs, best_of_all));
    Judging::new(folds.collect::<Result<_>>()?, costs, seed)
}

/// The speed at every fixed length.
fn fixed_lengths(recordings: &Recordings, costs: &Costs, seed: u64) -> Result<Vec<FixedLength>> {
    let plain = recordings.plain(&costs.rounds);
    let at = |candidate_length| -> Result<FixedLength> {
        let config = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length });
        let own = recordings.replay(&config, &costs.of_rule(&config))?;
        let speedup = |some: &[usize]| 1.0 + over(&plain, &own, some);
        let speedup = shown_interval(recordings.responses.len(), seed, speedup);
        Ok(FixedLength { candidate_length, speedup })
    };
    (1..=recordings.max_length).map(at).collect()
}

/// How often both models prefer the same token, and the overlap of their distributions, if that is
/// known.
fn agreement(surveyor: &Surveyor<'_>, progress: &Progress) -> Result<(Estimate, Option<Estimate>)> {
    progress.message("target and draft along the answers");
    let decoding = match surveyor.decoding.choice {
        TokenChoice::Greedy => Decoding::sampled(Sampling::default()),
        TokenChoice::Sampled(sampling) => Decoding::sampled(sampling),
    };
    let decoding = decoding.penalising(surveyor.decoding.repetition_penalty);
    let counted = surveyor.answers.par_iter().map(|answer| {
        if surveyor.console.is_interrupted() {
            return Err(Interrupted.into());
        }
        let mut draws = SeededDraws::new(surveyor.seed, &[&answer.id, "draft tokens"]);
        let (prompt, response) = (&answer.prompt_ids, &answer.response_ids);
        let models = match &surveyor.models {
            RecordedModels::Pair(pair) => (*pair).into(),
            RecordedModels::Served { models, .. } => *models,
        };
        let known = KnownResponse { response, probs: answer.probs.as_deref() };
        let labels = Labels::of(&models, &decoding, prompt, known, |_, q| draws.categorical(q))?;
        let draft = labels.draft.context("there is a draft")?;
        let top = draft.draft_top_ids.iter().zip(&draft.target_top_ids);
        let num_agreeing = top.filter(|(draft, target)| draft == target).count();
        let overlap: f64 = draft.overlap.iter().map(|overlap| f64::from(*overlap)).sum();
        progress.advance(1);
        anyhow::Ok([response.len() as f64, num_agreeing as f64, overlap])
    });
    let counted: Vec<[f64; 3]> = counted.collect::<Result<_>>()?;
    let share = |of: usize| -> Estimate {
        let sum = |some: &[usize], of: usize| some.iter().map(|nth| counted[*nth][of]).sum::<f64>();
        let share = |some: &[usize]| sum(some, of) / sum(some, 0);
        shown_interval(counted.len(), surveyor.seed, share)
    };
    let is_served = matches!(surveyor.models, RecordedModels::Served { .. });
    let overlap = (!is_served || !surveyor.decoding.is_greedy()).then(|| share(2));
    Ok((share(1), overlap))
}
