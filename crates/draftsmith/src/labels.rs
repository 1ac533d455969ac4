//! The numbers of a row: the target's and the draft's probabilities at each position of a response.

use anyhow::Result;
use draftsmith_data::DraftColumns;
use draftsmith_decode::{KnownResponse, Logits, ModelSession};
use draftsmith_model::CausalLm;
use draftsmith_theory::{
    Decoding, Draws, TopProbs, argmax, cross_entropy, entropy_of_log_probs, log_softmax, overlap,
};

use crate::pair::Pair;

/// A target that is served elsewhere, and its draft.
#[derive(Clone, Copy)]
pub(crate) struct ServedModels<'m> {
    pub(crate) draft: Option<&'m CausalLm>,
    /// The longest sequence that both read.
    pub(crate) context: usize,
    /// How many tokens the target has.
    pub(crate) vocab_size: usize,
}

/// The draft's own tokens Y.
pub(crate) enum DraftTokens<'a> {
    /// They are drawn.
    Drawn(&'a mut dyn Draws),
    /// They were drawn before: one for each position of the response.
    Given(&'a [u32]),
}

impl DraftTokens<'_> {
    /// The one at a position, of which the draft's distribution is `q`.
    fn at(&mut self, position: usize, q: &[f64]) -> usize {
        match self {
            Self::Drawn(draws) => draws.categorical(q),
            Self::Given(ids) => ids[position] as usize,
        }
    }
}

/// The columns that come from logits.
#[derive(Debug)]
pub(crate) struct Labels {
    pub(crate) response_target_log_prob: Vec<f32>,
    pub(crate) draft: Option<DraftColumns>,
}

impl Labels {
    /// The numbers of a response, which target and draft read.
    ///
    /// # Errors
    /// If it does not fit, or a model fails.
    pub(crate) fn of(
        pair: &Pair,
        decoding: &Decoding,
        prompt_ids: &[u32],
        response_ids: &[u32],
        draft_tokens: DraftTokens<'_>,
    ) -> Result<Self> {
        let context = pair.text.context;
        let ids = [prompt_ids, response_ids].concat();
        // The logits after the last prompt token and every response token but the last.
        let (read, from) = (&ids[..ids.len() - 1], prompt_ids.len() - 1);
        let score = |model, role| ModelSession::new(model, context, role).score(read, from);
        let target = score(&pair.target, "target")?;
        let draft = pair.draft.as_ref().map(|draft| score(draft, "draft")).transpose()?;
        Ok(label(decoding, &target, draft.as_ref(), &ids, draft_tokens))
    }

    /// The numbers of a response that a served target gave, of what is known of it, which the draft
    /// reads: what it takes all of the target's probabilities for is left out.
    ///
    /// # Errors
    /// If it does not fit, or the draft fails.
    pub(crate) fn of_served(
        models: &ServedModels<'_>,
        decoding: &Decoding,
        prompt_ids: &[u32],
        response: &KnownResponse<'_>,
        draws: &mut dyn Draws,
    ) -> Result<Self> {
        let ServedModels { draft, context, vocab_size } = *models;
        let KnownResponse { response, probs } = *response;
        let ids = [prompt_ids, response].concat();
        let (read, from) = (&ids[..ids.len() - 1], prompt_ids.len() - 1);
        let draft = draft.map(|draft| ModelSession::new(draft, context, "draft").score(read, from));
        let row = |at: usize| match probs {
            Some(probs) => probs[at].logits(vocab_size),
            None => TopProbs::certain(response[at]).logits(vocab_size),
        };
        let target = Logits::new((0..response.len()).flat_map(row).collect(), vocab_size);
        let draft_tokens = DraftTokens::Drawn(draws);
        let draft = draft.transpose()?;
        let mut labels = label(decoding, &target, draft.as_ref(), &ids, draft_tokens);
        if let Some(columns) = &mut labels.draft {
            columns.draft_target_cross_entropy = None;
        }
        Ok(labels)
    }
}

/// Labels a response X, the end of `ids`, from the logits after each prefix, beside the draft's own
/// tokens Y.
///
/// log-probabilities at X and Y and overlap are of the distributions as served under `decoding`;
/// entropy, cross-entropy, the top log-probability and the top ids know of a repetition penalty alone. A draft with fewer embeddings than
/// the target gives the missing tokens chance 0.
///
/// # Panics
/// If there are more rows of logits than ids, or fewer given tokens, or one that the target does not have.
fn label(
    decoding: &Decoding,
    target: &Logits,
    draft: Option<&Logits>,
    ids: &[u32],
    mut draft_tokens: DraftTokens<'_>,
) -> Labels {
    let (prompt_ids, response_ids) = ids.split_at(ids.len() - target.num_rows());
    let mut labels = Labels {
        response_target_log_prob: Vec::with_capacity(response_ids.len()),
        draft: draft.map(|_| DraftColumns {
            draft_target_cross_entropy: Some(Vec::with_capacity(response_ids.len())),
            ..DraftColumns::default()
        }),
    };
    for (i, id) in response_ids.iter().enumerate() {
        let before = || ids[..prompt_ids.len() + i].iter().copied();
        let target_row = &*decoding.penalised(target.row(i), before());
        let p = decoding.probs(target_row);
        labels.response_target_log_prob.push(log(p[*id as usize]));
        if let (Some(draft), Some(columns)) = (draft, &mut labels.draft) {
            let mut draft_row = draft.row(i).to_vec();
            draft_row.resize(target_row.len(), f32::NEG_INFINITY);
            let draft_row = decoding.penalised(&draft_row, before());
            let q = decoding.probs(&draft_row);
            let own = draft_tokens.at(i, &q);
            push(columns, (target_row, &p), (&draft_row, &q), *id, own);
        }
    }
    labels
}

fn push(
    columns: &mut DraftColumns,
    (target_row, p): (&[f32], &[f64]),
    (draft_row, q): (&[f32], &[f64]),
    response_id: u32,
    drawn: usize,
) {
    let (raw_p, raw_q) = (log_softmax(target_row), log_softmax(draft_row));
    let top = argmax(draft_row);
    columns.response_draft_log_prob.push(log(q[response_id as usize]));
    columns.draft_ids.push(drawn as u32);
    columns.draft_log_prob.push(log(q[drawn]));
    columns.target_log_prob.push(log(p[drawn]));
    columns.overlap.push(overlap(p, q) as f32);
    columns.draft_entropy.push(entropy_of_log_probs(&raw_q) as f32);
    let cross_entropies = columns.draft_target_cross_entropy.iter_mut();
    cross_entropies.for_each(|all| all.push(cross_entropy(&raw_q, &raw_p) as f32));
    columns.draft_top_ids.push(top);
    columns.target_top_ids.push(argmax(target_row));
    columns.draft_top_log_prob.push(raw_q[top as usize] as f32);
}

/// The log-probability as served of a token behind others.
pub(crate) fn log_prob(decoding: &Decoding, logits: &[f32], before: &[u32], id: u32) -> f32 {
    let logits = decoding.penalised(logits, before.iter().copied());
    log(decoding.probs(&logits)[id as usize])
}

fn log(prob: f64) -> f32 {
    prob.ln() as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use draftsmith_theory::{Sampling, SeededDraws};

    #[test]
    fn the_columns_are_what_they_are_called() {
        let (p, q) = ([0.5_f64, 0.25, 0.25], [0.2_f64, 0.5, 0.3]);
        let logits = |probs: [f64; 3]| probs.map(|p| p.ln() as f32).to_vec();
        let (target, draft) = (Logits::new(logits(p), 3), Logits::new(logits(q), 3));
        let mut draws = SeededDraws::new(1, &["test"]);
        let decoding = Decoding::sampled(Sampling::default());
        let labels = label(&decoding, &target, Some(&draft), &[2], DraftTokens::Drawn(&mut draws));
        let close = |found: f32, expected: f64| {
            // Logits were rounded to f32 on the way in.
            assert!((f64::from(found) - expected).abs() < 1e-6, "{found} for {expected}");
        };
        close(labels.response_target_log_prob[0], 0.25_f64.ln());
        let columns = labels.draft.expect("a draft was given");
        close(columns.response_draft_log_prob[0], 0.3_f64.ln());
        let drawn = columns.draft_ids[0] as usize;
        close(columns.draft_log_prob[0], q[drawn].ln());
        close(columns.target_log_prob[0], p[drawn].ln());
        close(columns.overlap[0], 0.2 + 0.25 + 0.25);
        close(columns.draft_entropy[0], -q.iter().map(|q| q * q.ln()).sum::<f64>());
        close(
            columns.draft_target_cross_entropy.expect("all are known")[0],
            -q.iter().zip(p).map(|(q, p)| q * p.ln()).sum::<f64>(),
        );
        assert_eq!((columns.draft_top_ids[0], columns.target_top_ids[0]), (1, 0));
        close(columns.draft_top_log_prob[0], 0.5_f64.ln());
    }

    #[test]
    fn served_columns_are_warped_and_raw_ones_are_not() {
        let target = Logits::new(vec![3.0, 1.0, 0.0], 3);
        let draft = Logits::new(vec![0.0, 2.0], 2);
        let mut draws = SeededDraws::new(1, &["test"]);
        let drawn = DraftTokens::Drawn(&mut draws);
        let labels = label(&Decoding::GREEDY, &target, Some(&draft), &[0], drawn);
        let columns = labels.draft.expect("a draft was given");
        assert_eq!(labels.response_target_log_prob, [0.0]);
        assert_eq!(columns.draft_ids, [1]);
        assert_eq!(columns.target_log_prob, [f32::NEG_INFINITY]);
        assert_eq!(columns.overlap, [0.0]);
        assert!(columns.draft_entropy[0] > 0.1, "raw, not of the greedy choice");
    }
}
