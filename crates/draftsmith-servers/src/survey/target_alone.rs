//! Surveys a target without a draft model. Linear read-outs of each layer, and of an EAGLE-3
//! drafter's inputs, act as drafters, which gives a lower bound for what a self-draft could learn.

use anyhow::{Context, Result, ensure};
use draftsmith_model::{Eagle3Config, ModelConfig, ModelShape};
use draftsmith_report::{CostSource, LookUps, shown_interval};
use draftsmith_theory::{
    DrafterId, Estimate, RecordedCandidate, RecordedPlace, Recording, Recordings, TimedCounts,
    least_by,
};
use serde::Serialize;

use super::halves::{HalfPromise, Halves};
use super::read_out::{ReadOut, read_outs};
use super::verdict::SurveyVerdict;
use super::{MAX_LENGTH, Surveyor};
use crate::settings::ServerSettings;
use draftsmith_recipe::ServedDrafter;
use draftsmith_tune::costs::Costs;
use draftsmith_tune::judging::{Fold, joined, speedup};
use draftsmith_tune::sweep::{RuleChoice, best_unread, cheapest};

/// The maximum number of exit layers to survey. In deeper models, they are spread evenly.
const MAX_EXITS: usize = 40;

/// The assumed size of an adapter's draft vocabulary. The full LM head is expensive, and most
/// tokens are rare.
pub const DRAFT_VOCABULARY: usize = 8192;

/// The findings for a target without a draft model.
#[derive(Debug, Serialize)]
pub struct TargetSurvey {
    /// The source of the costs.
    pub cost_source: CostSource,
    /// The seconds of target forwards over 1, 2, 3 … rows.
    pub verify_seconds: Vec<f64>,
    /// Half the 95 % interval of the least certain of them, relative to it; 0 for given costs.
    pub uncertainty: f64,
    /// The results by exit layer, then for EAGLE-3 if all layers that it reads are surveyed.
    pub exits: Vec<ExitSurvey>,
    /// The most promising exit layer; null if an EAGLE-3 drafter is more promising.
    pub best_exit_layer: Option<usize>,
    /// The draft vocabulary of an EAGLE-3 drafter whose layer has fewer weights than the target's LM head;
    /// null for the whole vocabulary.
    pub draft_vocabulary: Option<usize>,
    /// The best rule of this self-draft, with a speedup cross-validated over self-drafts and rules.
    pub best: HalfPromise,
    /// The result for prompt lookup without an adapter.
    pub look_ups: LookUps,
    /// A server's settings for llama.cpp's lookup; null if not requested.
    pub server: Option<ServerSettings>,
    /// The advice.
    pub verdict: SurveyVerdict,
}

/// The result for a linear read-out that acts as a drafter.
#[derive(Debug, Serialize)]
pub struct ExitSurvey {
    /// The number of layers before the adapter; null for an EAGLE-3 drafter.
    pub exit_layer: Option<usize>,
    /// The cost of a draft forward relative to a target forward. Unless given, it is the share of
    /// weights that a draft forward reads: the layers up to the exit, one for the adapter, and the
    /// LM head's rows for [`DRAFT_VOCABULARY`] tokens.
    pub draft_share: f64,
    /// The acceptance rate above which one candidate per round pays.
    pub break_even: f64,
    /// The share of positions at which the read-out's most probable token is the target's.
    pub agreement: Estimate,
    /// The share of the answers' tokens that the read-out would draft and the target would accept.
    pub accepted: Estimate,
    /// The best rule that reads no drafter probabilities, as text.
    pub setting: String,
    /// The modelled speedup over plain decoding, cross-validated.
    pub speedup: Estimate,
}

/// Surveys a target without a draft model.
pub(super) fn survey(surveyor: &Surveyor<'_>) -> Result<TargetSurvey> {
    let target = &surveyor.workspace.pair()?.target;
    let num_layers = target.shape().num_layers;
    ensure!(
        num_layers >= 2,
        "the target has one layer and cannot exit early; hint: give a `--draft`"
    );
    let step = (num_layers - 1).div_ceil(MAX_EXITS);
    let exit_layers: Vec<usize> = (1..num_layers).step_by(step).collect();
    let num_steps = surveyor.answers.len() + exit_layers.len();
    let progress = surveyor.watch.bar("survey", "steps", num_steps as u64);
    let read_outs = read_outs(surveyor, &exit_layers, &*progress)?;
    drop(progress);
    let (cost_source, base) = surveyor.target_costs()?;
    let exits = read_outs.into_iter().map(|read_out| {
        let id = match read_out.exit_layer {
            Some(layer) => format!("exit{layer}").parse::<DrafterId>()?,
            None => DrafterId::named("eagle3"),
        };
        let given = surveyor.given.map(|given| Costs::given(given, id, exit_layers.len()));
        let costs = match given.transpose()?.flatten() {
            Some(costs) => vec![costs],
            None => {
                let share = share_read(target.config(), read_out.exit_layer);
                let with_draft = |base: Costs| {
                    let seconds = share * base.rounds.verify_seconds(1);
                    let rounds = base.rounds.clone().with_draft_seconds(id, seconds);
                    Costs { drafter: id, mixed_rounds: rounds.clone(), rounds, ..base }
                };
                base.drawn(surveyor.seed).into_iter().map(with_draft).collect()
            }
        };
        let half = |half: Vec<usize>| recordings(surveyor, &read_out, id, &half);
        let halves = Halves(surveyor.halves().map(half));
        anyhow::Ok(ExitRecordings { read_out, halves, costs })
    });
    let exits: Vec<ExitRecordings> = exits.collect::<Result<_>>()?;
    let seed = surveyor.seed;
    let judged = exits.iter().map(|exit| exit.judge(seed)).collect::<Result<Vec<_>>>()?;
    // Plain decoding and prompt lookup cost the same for every exit layer.
    let first = exits.first().context("there is an exit")?;
    let look_ups = first.halves.look_ups(&first.costs, seed)?;
    let server = surveyor.tuning.map(|tuning| {
        let served = ServedDrafter::of_target(surveyor.workspace.models.target_dir());
        tuning.look_ups(first.halves.recorded(surveyor.decoding, seed), &served)?.context(
            "the server's costs have too few rows for look-ups; hint: measure rounds without speculation for more \
             requests, with `draftsmith server costs --candidates 0 --concurrency 1,2,4,8,16`",
        )
    });
    let (best_exit, best) = best_of(&judged, &first.halves.plain(&first.costs), seed)?;
    let ExitSurvey { exit_layer, accepted, break_even, .. } = *best_exit;
    let verdict = SurveyVerdict::of_target(exit_layer, &best, accepted, break_even);
    Ok(TargetSurvey {
        cost_source,
        verify_seconds: (1..=MAX_LENGTH + 1)
            .map(|rows| base.costs.rounds.verify_seconds(rows))
            .collect(),
        uncertainty: base.uncertainty,
        best_exit_layer: exit_layer,
        draft_vocabulary: draft_vocabulary(target.config()),
        verdict: verdict.beside_look_ups(&look_ups),
        best,
        look_ups,
        server: server.transpose()?,
        exits: judged.into_iter().map(|judged| judged.survey).collect(),
    })
}

/// An exit layer's recordings and costs, ready for replay.
struct ExitRecordings {
    read_out: ReadOut,
    halves: Halves,
    /// The costs, then some within their uncertainty.
    costs: Vec<Costs>,
}

/// An exit layer with the best stop rules found for it.
struct JudgedExit {
    survey: ExitSurvey,
    /// The best rule on all answers.
    choice: RuleChoice,
    /// For each half of the answers, the seconds per token of the best rule on the other half, and the
    /// rule's time on this half at each of the costs.
    halves: [(f64, Vec<Vec<TimedCounts>>); 2],
}

impl ExitRecordings {
    fn judge(&self, seed: u64) -> Result<JudgedExit> {
        let Self { read_out, halves, costs: all } = self;
        let costs = &all[0];
        let best = |fold: Fold<'_>| {
            let best = fold.best(|_| true)?;
            anyhow::Ok((best.seconds_per_token, fold.spent(best, all)?))
        };
        let [one, other] = halves.folds(costs, best_unread)?.map(best);
        let judged = [one?, other?];
        let choice = cheapest(&best_unread(&halves.together(), costs)?)?.clone();
        let verify = |rows| costs.rounds.verify_seconds(rows);
        let draft_share = costs.rounds.draft_seconds(costs.drafter)? / verify(1);
        let share = |of: &[Vec<bool>]| -> Estimate {
            let share = |some: &[usize]| {
                let answers = || some.iter().map(|nth| &of[*nth]);
                let num_true = answers().flatten().filter(|holds| **holds).count();
                num_true as f64 / answers().map(Vec::len).sum::<usize>() as f64
            };
            shown_interval(of.len(), seed, share)
        };
        let HalfPromise { setting, speedup, .. } = HalfPromise::new(
            &choice,
            speedup(
                &halves.plain(all),
                &joined(&judged.each_ref().map(|it| &it.1)),
                all.len(),
                seed,
            ),
        );
        let survey = ExitSurvey {
            exit_layer: read_out.exit_layer,
            draft_share,
            break_even: draft_share + verify(2) / verify(1) - 1.0,
            agreement: share(&read_out.agrees),
            accepted: share(&read_out.accepted),
            setting,
            speedup,
        };
        Ok(JudgedExit { survey, choice, halves: judged })
    }
}

/// Finds the best exit layer and its expected speedup. Each half is scored with the exit layer and
/// rule that are best on the other half.
fn best_of<'a>(
    exits: &'a [JudgedExit],
    plain: &[TimedCounts],
    seed: u64,
) -> Result<(&'a ExitSurvey, HalfPromise)> {
    let half = |half: usize| {
        let best = least_by(exits.iter().map(|exit| &exit.halves[half]), |(seconds, _)| *seconds);
        best.map(|(_, spent)| spent).context("there is an exit")
    };
    let halves = [half(0)?, half(1)?];
    let (spent, num_costs) = (joined(&halves), halves[0].len());
    let best = least_by(exits, |exit| exit.choice.seconds_per_token);
    let best = best.context("there is an exit")?;
    Ok((&best.survey, HalfPromise::new(&best.choice, speedup(plain, &spent, num_costs, seed))))
}

/// Computes the number of weights that a draft forward reads, relative to a target forward: the
/// layers up to the exit, one layer for the adapter or EAGLE-3 drafter, and the LM head's rows for
/// the draft vocabulary. Embeddings do not count.
fn share_read(config: &ModelConfig, exit_layer: Option<usize>) -> f64 {
    let read = |num_layers, vocab_size| {
        let mut config = config.clone().with_tied_embeddings(true);
        (config.shape.num_layers, config.shape.vocab_size) = (num_layers, vocab_size);
        config.num_parameters() as f64
    };
    let ModelShape { vocab_size, hidden_size, num_layers, .. } = config.shape;
    let num_drafted = vocab_size.min(DRAFT_VOCABULARY);
    let drafter = match exit_layer {
        Some(exit_layer) => read(exit_layer + 1, num_drafted),
        None => {
            // `fc` is read only once per round.
            let not_read = (vocab_size - num_drafted + 3 * hidden_size) * hidden_size;
            (Eagle3Config::new(config).num_parameters() - not_read) as f64
        }
    };
    drafter / read(num_layers, vocab_size)
}

/// Returns the draft vocabulary of an EAGLE-3 drafter if the LM head outweighs its layer.
fn draft_vocabulary(config: &ModelConfig) -> Option<usize> {
    let ModelShape { vocab_size, hidden_size, .. } = config.shape;
    let layer = Eagle3Config::new(config).num_parameters().saturating_sub(vocab_size * hidden_size);
    (vocab_size > DRAFT_VOCABULARY && vocab_size * hidden_size > layer).then_some(DRAFT_VOCABULARY)
}

/// Builds the recordings of a read-out along some answers, for rules that read no drafter
/// probabilities. Such rules do not depend on which wrong token is drafted.
fn recordings(
    surveyor: &Surveyor<'_>,
    read_out: &ReadOut,
    drafter: DrafterId,
    some: &[usize],
) -> Recordings {
    let eos_token_ids = surveyor.models.text().eos_token_ids.clone();
    let candidate = |token_id| RecordedCandidate {
        token_id,
        candidate_prob: 1.0,
        confidence: 1.0,
        confidence_of_ten: 1.0,
        entropy: 0.0,
        predicted_acceptance_prob: None,
        draft_log_prob: 0.0,
        target_log_prob: 0.0,
    };
    // The wrong token is not an end token, because rounds must continue after a rejected candidate.
    let other = |token: &u32| {
        (0..).find(|id| id != token && !eos_token_ids.contains(id)).unwrap_or_default()
    };
    let of_answer = |nth: &usize| {
        let answer = &surveyor.answers[*nth];
        let tokens = answer.response_ids.iter().zip(&read_out.accepted[*nth]);
        let place = |(token_id, is_accepted): (&u32, &bool)| RecordedPlace {
            candidate: candidate(*token_id),
            rollout: (!is_accepted).then(|| vec![candidate(other(token_id)); MAX_LENGTH]),
        };
        let places = tokens.map(place).collect();
        let recording = Recording::new(answer.prompt_ids.clone(), places, surveyor.max_new_tokens);
        recording.numbered(*nth)
    };
    Recordings {
        drafter,
        max_length: MAX_LENGTH,
        eos_token_ids: eos_token_ids.clone(),
        head: None,
        responses: some.iter().map(of_answer).collect(),
        answers: surveyor.stored.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_lm_head_that_outweighs_the_drafter_is_cut() {
        // SmolLM2-135M, whose LM head has 28 M weights, and a 7B model with a vocabulary of 8,192.
        let config = |vocab_size, hidden_size, mlp_width, num_heads, num_kv_heads| {
            let (num_layers, head_dim) = (30, 64);
            let shape = ModelShape {
                vocab_size,
                hidden_size,
                num_layers,
                num_heads,
                num_kv_heads,
                head_dim,
                context: 8,
                bos_token_id: None,
                eos_token_ids: vec![0],
            };
            ModelConfig::llama(shape, mlp_width)
        };
        assert_eq!(draft_vocabulary(&config(49_152, 576, 1536, 9, 3)), Some(DRAFT_VOCABULARY));
        assert_eq!(draft_vocabulary(&config(32_000, 4096, 11_008, 64, 64)), None);
        assert_eq!(draft_vocabulary(&config(8192, 64, 64, 1, 1)), None);
    }

    #[test]
    fn a_draft_forward_costs_the_weights_that_it_reads() {
        let shape = ModelShape {
            vocab_size: 1000,
            hidden_size: 10,
            num_layers: 4,
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: 10,
            context: 8,
            bos_token_id: None,
            eos_token_ids: vec![0],
        };
        // A layer has 4 · 10 · 10 + 3 · 10 · 20 weights and two norms, 1,020 in total. The LM head
        // has 10,000 weights, and the last norm 10.
        for tied in [false, true] {
            let config = ModelConfig::llama(shape.clone(), 20).with_tied_embeddings(tied);
            let expected = (2.0 * 1020.0 + 10_010.0) / (4.0 * 1020.0 + 10_010.0);
            assert!((share_read(&config, Some(1)) - expected).abs() < 1e-12);
            assert_eq!(share_read(&config, Some(3)), 1.0);
            // The EAGLE-3 layer's queries, keys and values read 20 numbers, and it has a third
            // norm.
            let expected = (1020.0 + 300.0 + 10.0 + 10_010.0) / (4.0 * 1020.0 + 10_010.0);
            assert!((share_read(&config, None) - expected).abs() < 1e-12);
            // Only the draft vocabulary of a large vocabulary counts.
            let large = ModelShape { vocab_size: 4 * DRAFT_VOCABULARY, ..shape.clone() };
            let config = ModelConfig::llama(large, 20).with_tied_embeddings(tied);
            let head = |tokens: usize| (10 * tokens + 10) as f64;
            let expected =
                (2040.0 + head(DRAFT_VOCABULARY)) / (4080.0 + head(4 * DRAFT_VOCABULARY));
            assert!((share_read(&config, Some(1)) - expected).abs() < 1e-12);
        }
    }
}
