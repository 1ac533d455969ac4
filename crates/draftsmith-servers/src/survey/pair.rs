//! Surveys a target and a drafter: how often they agree, the gain of each stop rule, and the
//! share of a perfect acceptance head's gain that a trained head could reach.

use anyhow::{Context, Result};
use draftsmith_decode::KnownResponse;
use draftsmith_report::{
    CostSource, LookUps, OracleResult, ReplayRow, TextRange, acceptance_by_position, shown_interval,
};
use draftsmith_theory::{
    Decoding, DrafterId, Draws, Estimate, FixedLengthConfig, HeadMetrics, HeadScores, HeadTiming,
    Recording, Recordings, SeededDraws, StopRuleConfig, TimedCounts,
};
use rayon::prelude::*;
use serde::Serialize;

use super::Surveyor;
use super::halves::{HalfPromise, Halves};
use super::probe::Unexplained;
use super::verdict::{HeadOutlook, KnownOfHeads, SurveyVerdict};
use crate::settings::ServerSettings;
use draftsmith_recipe::{Bar, LoadedDrafters};
use draftsmith_tune::costs::{Costs, MeasuredCosts};
use draftsmith_tune::judging::{Judging, at_each, over, speedup};
use draftsmith_tune::labels::Labels;
use draftsmith_tune::recorder::{RecordedDrafter, RecordedModels};
use draftsmith_tune::rollouts::RecordedSet;
use draftsmith_tune::sweep::{RuleChoice, best_fixed, best_of_all, cheapest};

/// The findings for a target and a drafter.
#[derive(Debug, Serialize)]
pub struct PairSurvey {
    /// The share of positions at which both models' most probable tokens are the same. Null for a
    /// drafter that is not a separate model.
    pub agreement: Option<Estimate>,
    /// The mean overlap Σ min(p, q), which is the probability that a sampled candidate is accepted.
    /// For greedy answers, it is taken at temperature 1. Null for greedy answers from servers,
    /// which return no probabilities, and where `agreement` is null.
    pub overlap: Option<Estimate>,
    /// The share of the answers' tokens that are accepted candidates; null if nothing is drafted.
    pub share_accepted: Option<f64>,
    /// Acceptance rates by position in a round, given that all earlier candidates were accepted.
    /// The list ends before the first position with fewer than 20 such candidates.
    pub acceptance_by_position: Vec<f64>,
    /// The acceptance of first candidates by position in the text.
    pub by_text_position: Vec<TextRange>,
    /// The source of the costs.
    pub cost_source: CostSource,
    /// The costs of forwards, with their precision.
    pub costs: MeasuredCosts,
    /// The modelled speedup over plain decoding at every fixed candidate length, on all answers.
    pub fixed_lengths: Vec<FixedLength>,
    /// For every rule, its best setting on all answers and its cross-validated gains. Rules that
    /// need an acceptance head use the drafter's own head, or the probes' predictions.
    pub rules: Vec<ReplayRow>,
    /// The oracle's result; null for sampled answers.
    pub oracle: Option<OracleResult>,
    /// The best fixed candidate length, with its cross-validated speedup.
    pub fixed: HalfPromise,
    /// The best rule that needs neither training nor fitting, with its cross-validated speedup.
    pub untrained: HalfPromise,
    /// The gain of `untrained` over the best fixed length.
    pub untrained_gain: Estimate,
    /// The result for prompt lookup without the drafter.
    pub look_ups: LookUps,
    /// The expected benefit of an acceptance head.
    pub head: HeadSurvey,
    /// The advice.
    pub verdict: SurveyVerdict,
    /// A server's settings, chosen on one half of the answers and evaluated on the other, if
    /// requested.
    pub server: Option<ServerSettings>,
}

/// The speedup at one fixed candidate length.
#[derive(Debug, Serialize)]
pub struct FixedLength {
    /// The number of candidates per round, K.
    pub candidate_length: usize,
    /// The modelled speedup over plain decoding.
    pub speedup: Estimate,
}

/// The expected benefit of an acceptance head for the pair.
#[derive(Debug, Serialize)]
pub struct HeadSurvey {
    /// The gain over the best fixed length of a rule with a perfect look-ahead head. Null if
    /// servers run the target, because they cannot judge every candidate.
    pub ceiling: Option<Estimate>,
    /// The small heads trained as probes; null if there were too few answers, or the drafter is not a
    /// separate model.
    pub probe: Option<Probe>,
}

/// Small acceptance heads, each trained on one half of the answers and scored on the other.
#[derive(Debug, Serialize)]
pub struct Probe {
    /// The share of a constant prediction's KL divergence that the heads explain, a lower bound.
    pub explained: Estimate,
    /// The heads' scores on answers that they were not trained on.
    pub scores: HeadScores,
    /// The expected gain of a head that explains this share. It is the same share of the ceiling
    /// or, without a ceiling, the gain of the best rule that uses the probes.
    pub outlook: HeadOutlook,
}

/// Surveys a target and a drafter.
pub(super) fn survey(surveyor: &Surveyor<'_>) -> Result<PairSurvey> {
    let Surveyor { ref answers, decoding, seed, watch, .. } = *surveyor;
    let is_model = surveyor.has_draft_model();
    let num_passes = if is_model { 3 } else { 1 };
    let progress = watch.bar("survey", "answers", num_passes * answers.len() as u64);
    let (agreement, overlap) = match is_model {
        true => agreement(surveyor, &*progress)?,
        false => (None, None),
    };
    let recorded = PairRecordings::record(surveyor, &*progress)?;
    drop(progress);
    let (cost_source, measured) = surveyor.draft_costs(&recorded.drafters, &recorded.whole)?;
    let costs = measured.drawn(seed);
    watch.note("survey: replaying every rule");
    let judged = recorded.with_heads.as_ref().unwrap_or(&recorded.halves);
    let judging = judging(judged, &costs, seed)?;
    let shown = best_of_all(&judged.together(), &costs[0])?;

    // A drafter's own head needs no training.
    let has_head = recorded.whole.head.is_some();
    let is_settable = if has_head { needs_no_fit } else { needs_no_training };
    let untrained_spent = judging.best(is_settable)?;
    let untrained_gain = judging.estimate(&|some| over(&judging.fixed, &untrained_spent, some));
    let settable = shown.iter().filter(|choice| is_settable(choice));
    let untrained = HalfPromise::new(cheapest(settable)?, judging.speedup(&untrained_spent));
    let fixed = HalfPromise::new(best_fixed(&shown)?, judging.speedup(&judging.fixed));
    let head = recorded.head_survey(&judging, &costs, &untrained_spent, surveyor)?;
    let look_ups = recorded.halves.look_ups(&costs, seed)?;
    let outlook = head.probe.as_ref().map(|probe| &probe.outlook);
    let known = match outlook {
        Some(outlook) => KnownOfHeads::Outlook(outlook),
        None if is_model => KnownOfHeads::TooLittle,
        None => KnownOfHeads::NotProbed,
    };
    let rules = judging.rows(&shown)?;
    let verdict = SurveyVerdict::of_pair(&fixed, &untrained, untrained_gain, known, head.ceiling)
        .beside_look_ups(&look_ups)
        .beside_fitted(&rules);
    let longest = FixedLengthConfig { candidate_length: recorded.whole.max_length };
    let trace = recorded.whole.trace(&StopRuleConfig::FixedLength(longest))?;
    let server = surveyor.tuning.map(|tuning| {
        let recorded = recorded.halves.recorded(decoding, seed);
        tuning.fastest(recorded, DrafterId::DRAFT.into(), &surveyor.served()?)
    });
    Ok(PairSurvey {
        server: server.transpose()?,
        agreement,
        overlap,
        acceptance_by_position: acceptance_by_position(&trace),
        by_text_position: TextRange::all_of(&recorded.whole, seed),
        fixed_lengths: fixed_lengths(&recorded.whole, &costs, seed)?,
        share_accepted: RecordedSet { ids: Vec::new(), recordings: recorded.whole }
            .summary()
            .share_accepted,
        cost_source,
        rules,
        fixed,
        oracle: decoding.is_greedy().then(|| judging.oracle()).transpose()?,
        costs: measured,
        untrained,
        untrained_gain,
        look_ups,
        head,
        verdict,
    })
}

/// The recordings of the drafter.
struct PairRecordings {
    /// The recordings along all answers, in order. Only a head that came with the drafter predicts in
    /// them.
    whole: Recordings,
    /// The same recordings in two halves.
    halves: Halves,
    /// Each half with predictions of a head trained on the other; `None` with too few
    /// answers, or if the drafter is not a separate model.
    with_heads: Option<Halves>,
    /// The drafter, with one of these heads if there are some.
    drafters: LoadedDrafters,
}

impl PairRecordings {
    fn record(surveyor: &Surveyor<'_>, progress: &dyn Bar) -> Result<Self> {
        let Surveyor { ref answers, decoding, .. } = *surveyor;
        let recorder = surveyor.recorder(progress);
        let drafter = |drafters| RecordedDrafter { drafters, id: DrafterId::DRAFT, decoding };
        let recordings = |responses: Vec<Recording>, head| Recordings {
            drafter: DrafterId::DRAFT,
            max_length: recorder.max_length,
            eos_token_ids: surveyor.models.text().eos_token_ids.clone(),
            head,
            responses,
            answers: surveyor.stored.clone(),
        };
        progress.message("draft");
        let given = surveyor.drafter()?;
        let own_head = given.get(DrafterId::DRAFT)?.head_timing();
        let recorded: Vec<_> = recorder.record_answers(&drafter(&given), answers)?;
        let numbered = recorded.into_iter().enumerate();
        let recorded: Vec<_> = numbered.map(|(nth, (it, own))| (it, own.numbered(nth))).collect();
        let numbers = surveyor.halves();
        let half = |half: &Vec<usize>| {
            recordings(half.iter().map(|nth| recorded[*nth].1.clone()).collect(), own_head)
        };
        let halves = Halves(numbers.each_ref().map(half));

        let [one, other] = &numbers;
        let mut probes = [None, None];
        if surveyor.has_draft_model() {
            progress.message("probing what a head could know");
            probes = [surveyor.probe(other, &recorded)?, surveyor.probe(one, &recorded)?];
        }
        let mut with_heads = Vec::new();
        for (half, probe) in numbers.iter().zip(&probes) {
            let Some(probed) = probe else { continue };
            let some = half.iter().map(|nth| &answers[*nth]);
            let recorded = recorder.record_answers(&drafter(probed), some)?;
            let responses = recorded.into_iter().zip(half);
            let responses =
                responses.map(|((_, recording), nth)| recording.numbered(*nth)).collect();
            with_heads.push(recordings(responses, Some(HeadTiming::AtDraw)));
        }
        Ok(Self {
            whole: recordings(recorded.into_iter().map(|(_, it)| it).collect(), own_head),
            halves,
            with_heads: <[_; 2]>::try_from(with_heads).ok().map(Halves),
            drafters: probes.into_iter().flatten().next().unwrap_or(given),
        })
    }

    /// Estimates the benefit of an acceptance head; `untrained` is the cost of the best untrained
    /// rule.
    fn head_survey(
        &self,
        judging: &Judging<'_>,
        costs: &[Costs],
        untrained: &[TimedCounts],
        surveyor: &Surveyor<'_>,
    ) -> Result<HeadSurvey> {
        let with_perfect_head = |half: &Recordings| {
            Recordings { head: Some(HeadTiming::AtDraw), ..half.clone() }.with_perfect_head()
        };
        let perfect = self.halves.0.iter().all(Recordings::is_judged).then(|| {
            let perfect = Halves(self.halves.0.each_ref().map(with_perfect_head));
            self::judging(&perfect, costs, surveyor.seed)?.best(reads_head)
        });
        let perfect = perfect.transpose()?;
        let ceiling_of =
            perfect.as_ref().map(|perfect| |some: &[usize]| over(&judging.fixed, perfect, some));
        let ceiling = ceiling_of.as_ref().map(|ceiling_of| judging.estimate(ceiling_of));
        let Some(halves) = &self.with_heads else {
            return Ok(HeadSurvey { ceiling, probe: None });
        };
        let [one, other] =
            halves.0.each_ref().map(|half| half.judged_predictions(surveyor.decoding));
        let unexplained = Unexplained::of(&one, &other).join(Unexplained::of(&other, &one));
        let probed = match ceiling_of {
            Some(_) => Vec::new(),
            None => judging.best(reads_head)?,
        };
        let num_answers = surveyor.answers.len();
        let explained = |some: &[usize]| {
            unexplained.share(&some.iter().map(|nth| nth % num_answers).collect::<Vec<usize>>())
        };
        let over_fixed = |some: &[usize]| match &ceiling_of {
            Some(ceiling_of) => explained(some).max(0.0) * ceiling_of(some),
            None => over(&judging.fixed, &probed, some),
        };
        let over_untrained = |some: &[usize]| {
            (1.0 + over_fixed(some)) / (1.0 + over(&judging.fixed, untrained, some)) - 1.0
        };
        let speedup = |some: &[usize]| {
            (1.0 + over_fixed(some)) * (1.0 + over(&judging.plain, &judging.fixed, some))
        };
        let probe = Probe {
            explained: judging.estimate(&explained),
            scores: HeadMetrics::of(&[one, other].concat().concat(), &|prob| prob).finish(),
            outlook: HeadOutlook {
                over_fixed: judging.estimate(&over_fixed),
                over_untrained: judging.estimate(&over_untrained),
                speedup: judging.estimate(&speedup),
            },
        };
        Ok(HeadSurvey { ceiling, probe: Some(probe) })
    }
}

fn reads_head(choice: &RuleChoice) -> bool {
    choice.config.needs().acceptance_prob
}

/// Returns whether a rule needs no fitting and no lookup.
fn needs_no_fit(choice: &RuleChoice) -> bool {
    choice.lookup_first.is_none() && !matches!(choice.config, StopRuleConfig::CostOptimal(_))
}

/// Returns whether a rule needs no training, no fitting and no lookup.
fn needs_no_training(choice: &RuleChoice) -> bool {
    needs_no_fit(choice) && !reads_head(choice)
}

fn judging<'a>(halves: &'a Halves, costs: &'a [Costs], seed: u64) -> Result<Judging<'a>> {
    Judging::new(halves.folds(&costs[0], best_of_all)?.into(), costs, seed)
}

/// Computes the modelled speedup over plain decoding at every fixed candidate length.
fn fixed_lengths(recordings: &Recordings, costs: &[Costs], seed: u64) -> Result<Vec<FixedLength>> {
    let plain: Vec<TimedCounts> =
        costs.iter().flat_map(|costs| recordings.plain(&costs.rounds)).collect();
    let at = |candidate_length| -> Result<FixedLength> {
        let config = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length });
        let own = at_each(costs, |at| Ok(recordings.replay(&config, &at.of_rule(&config))?))?;
        let speedup = speedup(&plain, &own, costs.len(), seed);
        Ok(FixedLength { candidate_length, speedup })
    };
    (1..=recordings.max_length).map(at).collect()
}

/// Estimates how often both models' top tokens agree, and their distributions' overlap if known.
fn agreement(
    surveyor: &Surveyor<'_>,
    progress: &dyn Bar,
) -> Result<(Option<Estimate>, Option<Estimate>)> {
    progress.message("target and draft along the answers");
    let own = surveyor.decoding;
    let decoding = Decoding::sampled(own.sampling_of_labels()).penalising(own.repetition_penalty);
    let counted = surveyor.answers.par_iter().map(|answer| {
        surveyor.watch.check_interrupted()?;
        let mut draws = SeededDraws::new(surveyor.seed, &[&answer.id, "draft tokens"]);
        let (prompt, response) = (&answer.prompt_ids, &answer.response_ids);
        let models = match &surveyor.models {
            RecordedModels::Pair(pair) => (*pair).into(),
            RecordedModels::Served(served) => served.models,
        };
        let known = KnownResponse { response, probs: answer.probs.as_deref() };
        let labels = Labels::of(&models, &decoding, prompt, known, |_, q| draws.categorical(q))?;
        let draft = labels.draft.context("there is a draft")?;
        let top = draft.draft_top_ids.iter().zip(&draft.target_top_ids);
        let num_agreeing = top.filter(|(draft, target)| draft == target).count();
        let overlap: f64 = draft.overlap.iter().map(|overlap| f64::from(*overlap)).sum();
        progress.advance(1.0);
        anyhow::Ok([response.len() as f64, num_agreeing as f64, overlap])
    });
    let counted: Vec<[f64; 3]> = counted.collect::<Result<_>>()?;
    let share = |of: usize| -> Estimate {
        let sum = |some: &[usize], of: usize| some.iter().map(|nth| counted[*nth][of]).sum::<f64>();
        let share = |some: &[usize]| sum(some, of) / sum(some, 0);
        shown_interval(counted.len(), surveyor.seed, share)
    };
    let is_served = matches!(surveyor.models, RecordedModels::Served(_));
    let overlap = (!is_served || !surveyor.decoding.is_greedy()).then(|| share(2));
    Ok((Some(share(1)), overlap))
}
