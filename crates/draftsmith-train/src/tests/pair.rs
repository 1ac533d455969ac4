//! Test data: tiny random models and random responses, the same in every run.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use draftsmith_data::{DraftColumns, FinishReason, ResponseRow};
use draftsmith_model::{
    AdapterArchitecture, AdapterConfig, CausalLm, DrafterModel, ModelConfig, ModelShape,
};
use draftsmith_theory::SeededDraws;

use crate::error::to_host;
use crate::head::Redraw;

/// The vocabulary size of all models here.
pub(crate) const VOCAB_SIZE: u32 = 48;

/// A random draft with two layers.
pub(crate) fn tiny_draft(hidden_size: usize, context: usize) -> CausalLm {
    random_model(2, hidden_size, context)
}

/// A random target with three layers, for several exit layers.
pub(crate) fn deep_target(hidden_size: usize, context: usize) -> CausalLm {
    random_model(3, hidden_size, context)
}

/// A draft, and a self-draft whose adapter follows the second of three layers and has a separate LM head.
pub(crate) fn tiny_drafters(hidden_size: usize, context: usize) -> [DrafterModel; 2] {
    let target = deep_target(hidden_size, context);
    let config = AdapterConfig::new(target.config(), 2)
        .expect("a valid exit layer")
        .with(|it| it.architecture = AdapterArchitecture::AttentionWithHead);
    let mut draws = SeededDraws::new(2, &["tiny-adapter"]);
    let draw = || draws.uniform() as f32 - 0.5;
    let adapter = redrawn(config.init(&Device::flex()), draw);
    [(&tiny_draft(hidden_size, context)).into(), DrafterModel::self_draft(target, adapter, 2)]
}

pub(crate) fn random_model(num_layers: usize, hidden_size: usize, context: usize) -> CausalLm {
    let config = ModelConfig::llama(
        ModelShape {
            vocab_size: VOCAB_SIZE as usize,
            hidden_size,
            num_layers,
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: hidden_size / 2,
            context,
            bos_token_id: None,
            eos_token_ids: vec![],
        },
        2 * hidden_size,
    )
    .with_tied_embeddings(true);
    let mut draws = SeededDraws::new(1, &["tiny-draft"]);
    redrawn(config.init(&Device::flex()), || draws.uniform() as f32 - 0.5)
}

/// The model of [`tiny_draft`] with a nearly inactive MLP in its second layer, so that an attention adapter
/// after the first layer can match it.
pub(crate) fn early_target() -> CausalLm {
    let mut draws = SeededDraws::new(1, &["tiny-draft"]);
    let target = tiny_draft(16, 64);
    // The embedding and two layers of seven matrices; the last one is the MLP's output projection.
    let last_matrix = 48 * 16 + 2 * (2 * 16 * 16 + 2 * 16 * 8 + 2 * 16 * 32);
    let mut num_drawn = 0;
    redrawn(target, || {
        num_drawn += 1;
        let scale = if num_drawn > last_matrix { 0.1 } else { 1.0 };
        scale * (draws.uniform() as f32 - 0.5)
    })
}

/// The module with drawn matrices. Norms and biases do not change.
fn redrawn<M: Module>(module: M, draw: impl FnMut() -> f32) -> M {
    module.map(&mut RedrawMatrices(draw))
}

struct RedrawMatrices<F>(F);

impl<F: FnMut() -> f32> ModuleMapper for RedrawMatrices<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D == 2 { Redraw(&mut self.0).map_float(param) } else { param }
    }
}

/// A row whose draft tokens have the given acceptance probabilities.
pub(crate) fn response_row(
    id: &str,
    prompt_ids: &[u32],
    response_ids: &[u32],
    draft_ids: &[u32],
    acceptance_probs: &[f32],
) -> ResponseRow {
    let len = response_ids.len();
    ResponseRow {
        id: id.to_owned(),
        source: "set".to_owned(),
        prompt_ids: prompt_ids.to_vec(),
        response_ids: response_ids.to_vec(),
        response_target_log_prob: vec![-1.0; len],
        target_outside_mass: None,
        draft: Some(DraftColumns {
            response_draft_log_prob: vec![-1.0; len],
            draft_ids: draft_ids.to_vec(),
            draft_log_prob: vec![0.0; len],
            target_log_prob: acceptance_probs.iter().map(|prob| prob.ln()).collect(),
            overlap: vec![0.5; len],
            draft_entropy: vec![1.0; len],
            draft_target_cross_entropy: None,
            draft_top_ids: draft_ids.to_vec(),
            target_top_ids: response_ids.to_vec(),
            draft_top_log_prob: vec![-1.0; len],
        }),
        finish_reason: FinishReason::Eos,
    }
}

/// Rows with random tokens and labels, and responses of 1 to `longest` tokens.
pub(crate) fn responses(num_rows: usize, longest: usize, seed: u64) -> Vec<ResponseRow> {
    let mut draws = SeededDraws::new(seed, &["responses"]);
    let mut below = move |limit: usize| (draws.uniform() * limit as f64) as usize;
    (0..num_rows)
        .map(|n| {
            let len = 1 + below(longest);
            let prompt_len = 1 + below(5);
            let mut tokens = |len: usize| {
                (0..len).map(|_| below(VOCAB_SIZE as usize) as u32).collect::<Vec<_>>()
            };
            let (prompt, response, draft) = (tokens(prompt_len), tokens(len), tokens(len));
            let probs: Vec<f32> = (0..len).map(|_| below(101) as f32 / 100.0).collect();
            response_row(&format!("set#{n}"), &prompt, &response, &draft, &probs)
        })
        .collect()
}

/// The gradients of all parameters of a module, concatenated.
pub(crate) fn gradients_of<M: Module>(module: &M, grads: &GradientsParams) -> Vec<f32> {
    let mut collect = Collect { grads, all: Vec::new() };
    module.visit(&mut collect);
    collect.all
}

struct Collect<'a> {
    grads: &'a GradientsParams,
    all: Vec<f32>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = self.grads.get::<D>(param.id).expect("every parameter is trained");
        self.all.extend(to_host(grad).unwrap());
    }
}

/// Responses that continue a pattern: each token is the one before plus the first token.
pub(crate) fn patterned(num_rows: usize) -> Vec<ResponseRow> {
    let row = |n: usize| {
        let step = 1 + n as u32 % 5;
        let tokens: Vec<u32> = (0..24).map(|at| (step * (at + 1)) % 48).collect();
        response_row(&format!("set#{n}"), &tokens[..4], &tokens[4..], &[], &[])
    };
    (0..num_rows).map(|n| ResponseRow { draft: None, ..row(n) }).collect()
}
