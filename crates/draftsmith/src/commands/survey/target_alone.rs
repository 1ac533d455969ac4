//! A target alone: what its own first layers know, as a floor of what a self-draft adapter could
//! learn, and what that would be worth.

use anyhow::{Context, Result, bail};
use draftsmith_model::ModelConfig;
use draftsmith_theory::{
    DrafterId, RecordedCandidate, RecordedPlace, Recording, Recordings, TimedCounts,
    seconds_per_token,
};
use serde::Serialize;

use super::look_ups::LookUps;
use super::read_out::{ReadOut, read_outs};
use super::verdict::{Promise, Verdict, of_target};
use super::{MAX_LENGTH, Surveyor};
use crate::console::progress::Progress;
use crate::costs::Costs;
use crate::judging::{Fold, Judging};
use crate::results::{CostSource, Estimate};
use crate::statistics::shown_interval;
use crate::sweep::{Choice, best_unread, cheapest};

/// The most exit layers that are looked at; of more, every so many-th.
const MAX_EXITS: usize = 40;

/// The most tokens that an adapter is taken to draft: the LM head is dear, and most of its tokens are
/// rare.
pub(super) const DRAFT_VOCABULARY: usize = 8192;

/// What was found of a target alone.
#[derive(Debug, Serialize)]
pub(super) struct TargetSurvey {
    /// Whose costs are reckoned with.
    pub(super) cost_source: CostSource,
    /// Seconds of the target's forwards of 1, 2, 3 … rows.
    pub(super) verify_seconds: Vec<f64>,
    /// By exit layer.
    pub(super) exits: Vec<ExitSurvey>,
    /// The exit layer that is best.
    pub(super) best_exit_layer: usize,
    /// What it comes to: exit and length were chosen on each half for the other.
    pub(super) best: Promise,
    /// What prompt lookup gains, which needs no adapter.
    pub(super) look_ups: LookUps,
    pub(super) verdict: Verdict,
}

/// What a linear read-out of a layer would do as a draft.
#[derive(Debug, Serialize)]
pub(super) struct ExitSurvey {
    pub(super) exit_layer: usize,
    /// What a draft forward costs of a target forward: by the weights that it reads (the layers so
    /// far, one more for the adapter, and the LM head's rows of [`DRAFT_VOCABULARY`] tokens), unless
    /// it is given.
    pub(super) draft_share: f64,
    /// The chance of acceptance from which on one candidate a round pays.
    pub(super) break_even: f64,
    /// The share of positions at which its most probable token is the target's.
    pub(super) agreement: Estimate,
    /// The share of the answers' tokens that it would draft and the target accept.
    pub(super) accepted: Estimate,
    /// Its best rule of those that read no signal.
    pub(super) setting: String,
    /// Modelled speed over the target alone.
    pub(super) speedup: Estimate,
}

/// An exit, ready to be replayed.
struct Exit {
    read_out: ReadOut,
    /// The halves of the answers, and all of them.
    halves: [Recordings; 2],
    all: Recordings,
    costs: Costs,
    draft_share: f64,
}

/// Surveys the target.
pub(super) fn survey(surveyor: &Surveyor<'_>) -> Result<TargetSurvey> {
    let target = &surveyor.workspace.pair()?.target;
    let num_layers = target.shape().num_layers;
    if num_layers < 2 {
        bail!(
            "the target has one layer, so that it has none to leave early; hint: give a `--draft`"
        );
    }
    let step = (num_layers - 1).div_ceil(MAX_EXITS);
    let exit_layers: Vec<usize> = (1..num_layers).step_by(step).collect();
    let num_steps = surveyor.answers.len() + exit_layers.len();
    let progress = Progress::new(surveyor.console, "survey", "steps", num_steps as u64);
    let read_outs = read_outs(surveyor, &exit_layers, &progress)?;
    progress.clear();
    let (cost_source, base) = surveyor.target_costs()?;
    let num_exits = exit_layers.len();
    let exits = read_outs.into_iter().map(|read_out| {
        let id = DrafterId::SelfDraft { exit_layer: read_out.exit_layer };
        let given = surveyor.given.map(|given| Costs::given(given, id, num_exits)).transpose()?;
        let costs = match given.flatten() {
            Some(costs) => costs,
            None => {
                let share = share_read(target.config(), read_out.exit_layer);
                let seconds = share * base.rounds.verify_seconds(1);
                let rounds = base.rounds.clone().with_draft_seconds(id, seconds);
                Costs { drafter: id, mixed_rounds: rounds.clone(), rounds, ..base.clone() }
            }
        };
        let draft_share = costs.rounds.draft_seconds(id)? / costs.rounds.verify_seconds(1);
        let halves = surveyor.halves().map(|half| recordings(surveyor, &read_out, id, &half));
        let all: Vec<usize> = (0..surveyor.answers.len()).collect();
        let all = recordings(surveyor, &read_out, id, &all);
        anyhow::Ok(Exit { read_out, halves, all, costs, draft_share })
    });
    let exits: Vec<Exit> = exits.collect::<Result<_>>()?;
    let judged = exits.iter().map(|exit| exit.judge(surveyor.seed)).collect::<Result<Vec<_>>>()?;
    let (best, promise) = best_of(&judged)?;
    let best_exit_layer = best.exit.read_out.exit_layer;
    let surveyed = judged.iter().map(|exit| exit.told(surveyor.seed));
    let surveyed = surveyed.collect::<Result<Vec<_>>>()?;
    let best_exit = surveyed.iter().find(|exit| exit.exit_layer == best_exit_layer);
    let best_exit = best_exit.context("the best exit is one of them")?;
    // Look-ups are the same beside every exit.
    let first = exits.first().context("there is an exit")?;
    let look_ups = LookUps::of(&first.halves, &first.costs, surveyor.seed)?;
    let verdict = of_target(best_exit_layer, &promise, best_exit.accepted, best_exit.break_even)
        .beside_look_ups(look_ups.look_ups, look_ups.speedup);
    Ok(TargetSurvey {
        cost_source,
        verify_seconds: (1..=MAX_LENGTH + 1).map(|rows| base.rounds.verify_seconds(rows)).collect(),
        best_exit_layer,
        verdict,
        best: promise,
        look_ups,
        exits: surveyed,
    })
}

/// An exit with the rules that were chosen for it.
struct JudgedExit<'a> {
    exit: &'a Exit,
    /// Each half is judged by what the other chose.
    judging: Judging<'a>,
    /// The best rule on all answers.
    choice: Choice,
}

impl Exit {
    fn judge(&self, seed: u64) -> Result<JudgedExit<'_>> {
        let [one, other] = &self.halves;
        let folds = vec![
            Fold::new(other, one, &self.costs, best_unread)?,
            Fold::new(one, other, &self.costs, best_unread)?,
        ];
        Ok(JudgedExit {
            exit: self,
            judging: Judging::new(folds, &self.costs, seed)?,
            choice: cheapest(&best_unread(&self.all, &self.costs)?)?.clone(),
        })
    }
}

impl JudgedExit<'_> {
    /// As it is shown.
    fn told(&self, seed: u64) -> Result<ExitSurvey> {
        let Exit { read_out, costs, draft_share, .. } = self.exit;
        let speedup = self.judging.speedup(&self.judging.best(|_| true)?);
        let verify = |rows| costs.rounds.verify_seconds(rows);
        let share = |of: &[Vec<bool>]| -> Estimate {
            let share = |some: &[usize]| {
                let answers = || some.iter().map(|nth| &of[*nth]);
                let num_true = answers().flatten().filter(|holds| **holds).count();
                num_true as f64 / answers().map(Vec::len).sum::<usize>() as f64
            };
            shown_interval(of.len(), seed, share)
        };
        Ok(ExitSurvey {
            exit_layer: read_out.exit_layer,
            draft_share: *draft_share,
            break_even: draft_share + verify(2) / verify(1) - 1.0,
            agreement: share(&read_out.agrees),
            accepted: share(&read_out.accepted),
            setting: label(&self.choice),
            speedup,
        })
    }
}

/// The exit that is best, and what to expect of it: each half is judged by the exit and the rule that
/// are best on the other.
fn best_of<'a, 'b>(exits: &'b [JudgedExit<'a>]) -> Result<(&'b JudgedExit<'a>, Promise)> {
    let mut own: [Vec<TimedCounts>; 2] = Default::default();
    let mut least = [f64::INFINITY; 2];
    for JudgedExit { exit, judging, .. } in exits {
        for (half, fold) in judging.folds().iter().enumerate() {
            let (choice, spent) = fold.best(&exit.costs, |_| true)?;
            if choice.seconds_per_token < least[half] {
                (least[half], own[half]) = (choice.seconds_per_token, spent);
            }
        }
    }
    // The target alone takes the same beside every exit.
    let first = exits.first().context("there is an exit")?;
    let speedup = first.judging.speedup(&own.concat());
    let seconds = |judged: &JudgedExit<'_>| -> Result<f64> {
        let JudgedExit { exit, choice, .. } = judged;
        let spent = exit.all.replay(&choice.config, &exit.costs.of_rule(&choice.config))?;
        Ok(seconds_per_token(&spent))
    };
    let mut best = (seconds(first)?, first);
    for judged in &exits[1..] {
        let seconds = seconds(judged)?;
        if seconds < best.0 {
            best = (seconds, judged);
        }
    }
    let (_, judged) = best;
    let choice = &judged.choice;
    let promise = Promise { setting: label(choice), config: choice.config.clone(), speedup };
    Ok((judged, promise))
}

fn label(choice: &Choice) -> String {
    choice.name.label(Some(choice.config.parameter()))
}

/// The share of a target forward's weights that a draft forward behind an exit reads: the layers so far,
/// one more for the adapter, and the LM head's rows of what it drafts. Embeddings are looked up.
fn share_read(config: &ModelConfig, exit_layer: usize) -> f64 {
    let read = |num_layers, vocab_size| {
        let mut config = config.clone().with_tied_embeddings(true);
        (config.shape.num_layers, config.shape.vocab_size) = (num_layers, vocab_size);
        config.num_parameters() as f64
    };
    let vocab_size = config.shape.vocab_size;
    read(exit_layer + 1, vocab_size.min(DRAFT_VOCABULARY))
        / read(config.shape.num_layers, vocab_size)
}

/// What a read-out would do along some answers, for rules that look at no candidate: what is drafted
/// instead of an answer's token does not matter to them.
fn recordings(
    surveyor: &Surveyor<'_>,
    read_out: &ReadOut,
    drafter: DrafterId,
    some: &[usize],
) -> Recordings {
    let shape = surveyor.workspace.target_shape();
    let eos_token_ids = shape.map(|shape| shape.eos_token_ids.clone()).unwrap_or_default();
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
    // No end token: rounds go on behind a rejected candidate.
    let other = (0..).find(|id| !eos_token_ids.contains(id)).unwrap_or_default();
    let of_answer = |nth: &usize| {
        let answer = &surveyor.answers[*nth];
        let tokens = answer.response_ids.iter().zip(&read_out.accepted[*nth]);
        let place = |(token_id, is_accepted): (&u32, &bool)| RecordedPlace {
            candidate: candidate(*token_id),
            rollout: (!is_accepted).then(|| vec![candidate(other); MAX_LENGTH]),
            draft_rank: None,
        };
        let places = tokens.map(place).collect();
        Recording::new(answer.prompt_ids.clone(), places, surveyor.max_new_tokens)
    };
    Recordings {
        drafter,
        max_length: MAX_LENGTH,
        eos_token_ids: eos_token_ids.clone(),
        head: None,
        responses: some.iter().map(of_answer).collect(),
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_model::ModelShape;

    use super::*;

    #[test]
    fn a_draft_forward_costs_what_it_reads() {
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
        // A layer has 4 · 10 · 10 + 3 · 10 · 20 and two norms, 1,020 in all; the LM head 10,000, the
        // last norm 10.
        for tied in [false, true] {
            let config = ModelConfig::llama(shape.clone(), 20).with_tied_embeddings(tied);
            let expected = (2.0 * 1020.0 + 10_010.0) / (4.0 * 1020.0 + 10_010.0);
            assert!((share_read(&config, 1) - expected).abs() < 1e-12);
            assert_eq!(share_read(&config, 3), 1.0);
            // Of a large vocabulary, the rows that are drafted.
            let large = ModelShape { vocab_size: 4 * DRAFT_VOCABULARY, ..shape.clone() };
            let config = ModelConfig::llama(large, 20).with_tied_embeddings(tied);
            let head = |tokens: usize| (10 * tokens + 10) as f64;
            let expected =
                (2040.0 + head(DRAFT_VOCABULARY)) / (4080.0 + head(4 * DRAFT_VOCABULARY));
            assert!((share_read(&config, 1) - expected).abs() < 1e-12);
        }
    }
}
