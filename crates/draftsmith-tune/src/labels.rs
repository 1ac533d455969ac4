//! The labels of a response: the target's and the draft model's probabilities at each position.

use anyhow::Result;
use draftsmith_data::DraftColumns;
use draftsmith_decode::{KnownResponse, Logits, ModelSession};
use draftsmith_theory::{
    Decoding, TopProbs, argmax, cross_entropy, entropy_of_log_probs, log_softmax, overlap,
};

use draftsmith_recipe::LabelModels;

/// The columns of a data row that are computed from logits.
#[derive(Debug)]
pub struct Labels {
    /// The target's log-probability of each response token.
    pub response_target_log_prob: Vec<f32>,
    /// The columns that need a draft model; `None` without one.
    pub draft: Option<DraftColumns>,
}

impl Labels {
    /// Computes the labels of a response. `draft_token` returns the draft token Y at a position of
    /// the response, given the draft model's distribution there. For a target on a server, labels
    /// come from the known part of its distributions. The cross-entropy is then left out, because
    /// it needs the full distributions.
    ///
    /// # Errors
    /// If the text does not fit the context, or a model fails.
    pub fn of(
        models: &LabelModels<'_>,
        decoding: &Decoding,
        prompt_ids: &[u32],
        KnownResponse { response, probs }: KnownResponse<'_>,
        draft_token: impl FnMut(usize, &[f64]) -> usize,
    ) -> Result<Self> {
        let LabelModels { target, draft, context, vocab_size } = *models;
        let ids = [prompt_ids, response].concat();
        // These tokens give the logits after the last prompt token and after every response token
        // except the last.
        let (read, from) = (&ids[..ids.len() - 1], prompt_ids.len() - 1);
        let score =
            |model, read: &[u32], role| ModelSession::new(model, context, role).score(read, from);
        let known = |at: usize| match probs {
            Some(probs) => probs[at].logits(vocab_size),
            None => TopProbs::certain(response[at]).logits(vocab_size),
        };
        let target_logits = match target {
            Some(target) => score(target, read, "target")?,
            None => Logits::new((0..response.len()).flat_map(known).collect(), vocab_size),
        };
        let draft = draft.map(|draft| {
            let read: Vec<u32> = read.iter().map(|id| draft.shape().readable(*id)).collect();
            score(draft, &read, "draft")
        });
        let draft = draft.transpose()?;
        let mut labels = label(decoding, &target_logits, draft.as_ref(), &ids, draft_token);
        if let (None, Some(columns)) = (target, &mut labels.draft) {
            columns.draft_target_cross_entropy = None;
        }
        Ok(labels)
    }
}

/// Computes labels from the logits after each prefix, for the response X at the end of `ids` and
/// for the draft tokens Y.
///
/// The log-probabilities of X and Y and the overlap refer to the distributions that `decoding`
/// samples from. The entropy, cross-entropy, top log-probability and top ids refer to the raw
/// logits after the repetition penalty. Tokens that only the target has get draft probability 0.
///
/// # Panics
/// If there are more rows of logits than ids, or an id is outside the vocabulary.
fn label(
    decoding: &Decoding,
    target: &Logits,
    draft: Option<&Logits>,
    ids: &[u32],
    mut draft_token: impl FnMut(usize, &[f64]) -> usize,
) -> Labels {
    let (prompt_ids, response_ids) = ids.split_at(ids.len() - target.num_rows());
    let columns =
        || DraftColumns { draft_target_cross_entropy: Some(Vec::new()), ..DraftColumns::default() };
    let mut labels =
        Labels { response_target_log_prob: Vec::new(), draft: draft.map(|_| columns()) };
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
            let own = draft_token(i, &q);
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

/// Computes the log-probability of token `id` after the tokens `before` under `decoding`. `logits`
/// are the target's logits after `before`.
pub fn log_prob(decoding: &Decoding, logits: &[f32], before: &[u32], id: u32) -> f32 {
    let logits = decoding.penalised(logits, before.iter().copied());
    log(decoding.probs(&logits)[id as usize])
}

fn log(prob: f64) -> f32 {
    prob.ln() as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use draftsmith_theory::{Draws, Sampling, SeededDraws};

    #[test]
    fn each_column_holds_its_quantity() {
        let (p, q) = ([0.5_f64, 0.25, 0.25], [0.2_f64, 0.5, 0.3]);
        let logits = |probs: [f64; 3]| probs.map(|p| p.ln() as f32).to_vec();
        let (target, draft) = (Logits::new(logits(p), 3), Logits::new(logits(q), 3));
        let mut draws = SeededDraws::new(1, &["test"]);
        let decoding = Decoding::sampled(Sampling::default());
        let labels = label(&decoding, &target, Some(&draft), &[2], |_, q| draws.categorical(q));
        let close = |found: f32, expected: f64| {
            // The logits above were rounded to f32.
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
    fn log_probs_follow_the_decoding_and_entropy_does_not() {
        let target = Logits::new(vec![3.0, 1.0, 0.0], 3);
        let draft = Logits::new(vec![0.0, 2.0], 2);
        let mut draws = SeededDraws::new(1, &["test"]);
        let drawn = |_: usize, q: &[f64]| draws.categorical(q);
        let labels = label(&Decoding::GREEDY, &target, Some(&draft), &[0], drawn);
        let columns = labels.draft.expect("a draft was given");
        assert_eq!(labels.response_target_log_prob, [0.0]);
        assert_eq!(columns.draft_ids, [1]);
        assert_eq!(columns.target_log_prob, [f32::NEG_INFINITY]);
        assert_eq!(columns.overlap, [0.0]);
        assert!(columns.draft_entropy[0] > 0.1, "of the raw logits");
    }
}
