//! A model in bf16 must compute nearly what it computes in f32, and gradients must come back in f32.

use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use crate::config::ModelConfig;
use crate::shape::ModelShape;
use crate::{AcceptanceHeadConfig, AdapterConfig, CausalLm, WeightDtype};

/// bf16 keeps 8 bits: each rounding is off by up to 1/256, and those of a few layers add up.
const RELATIVE_TOLERANCE: f32 = 0.03;

/// Three layers; with `num_kv_heads` below 4, query heads share keys.
fn model(num_kv_heads: usize) -> CausalLm {
    let config = ModelConfig::llama(
        ModelShape {
            vocab_size: 64,
            hidden_size: 64,
            num_layers: 3,
            num_heads: 4,
            num_kv_heads,
            head_dim: 16,
            context: 64,
            bos_token_id: None,
            eos_token_ids: vec![],
        },
        128,
    );
    config.init(&Device::flex())
}

fn ids(batch: usize, seq: usize) -> Tensor<2, Int> {
    let values: Vec<i32> = (0..batch * seq).map(|n| (n * 37 % 61) as i32).collect();
    Tensor::from_data(TensorData::new(values, [batch, seq]), &Device::flex())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(FloatDType::F32).into_data().try_into_vec().expect("f32")
}

/// The hidden states after one layer, and the final ones.
fn states(model: &CausalLm, ids: Tensor<2, Int>) -> (Tensor<3>, Tensor<3>) {
    let [batch, seq] = ids.dims();
    let (mut exits, last) = model.hidden_states_at(ids, &[1], &vec![0..seq; batch]);
    (exits.remove(0), last)
}

/// Root mean square of the difference, relative to that of what is expected.
fn relative_difference<const D: usize>(found: Tensor<D>, expected: Tensor<D>) -> f32 {
    let (found, expected) = (values(found), values(expected));
    assert_eq!(found.len(), expected.len());
    let square = |sum: f32, x: f32| sum + x * x;
    let difference = found.iter().zip(&expected).map(|(a, b)| a - b).fold(0.0, square);
    (difference / expected.into_iter().fold(0.0, square)).sqrt()
}

#[test]
fn a_model_in_bf16_computes_nearly_what_it_computes_in_f32() {
    for num_kv_heads in [4, 2] {
        let model = model(num_kv_heads);
        let reduced = model.clone().to_dtype(WeightDtype::Bf16);
        let ids = ids(2, 29);
        let (exit, last) = states(&model, ids.clone());
        let (reduced_exit, reduced_last) = states(&reduced, ids);
        assert_eq!(reduced_exit.dtype(), DType::BF16);
        assert_eq!(reduced_last.dtype(), DType::BF16);
        for (found, expected) in [(reduced_exit, exit), (reduced_last.clone(), last.clone())] {
            let off = relative_difference(found, expected);
            assert!(off < RELATIVE_TOLERANCE, "{off}");
            // Were it f32 after all, it would show nothing.
            assert!(off > 1e-4, "{off}");
        }
        let off = relative_difference(reduced.lm_head(reduced_last), model.lm_head(last));
        assert!(off < RELATIVE_TOLERANCE, "{off}");
    }
}

#[test]
fn back_in_f32_a_model_has_its_rounded_weights() {
    let model = model(4);
    let same = model.clone().to_dtype(WeightDtype::F32);
    assert_eq!(values(same.lm_head_weight()), values(model.lm_head_weight()));
    let back = model.clone().to_dtype(WeightDtype::Bf16).to_dtype(WeightDtype::F32);
    let found = values(back.lm_head_weight());
    let rounded = values(model.lm_head_weight());
    let rounded: Vec<f32> = rounded.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
    assert_eq!(found, rounded);
}

#[test]
fn padding_on_the_right_changes_nothing_in_bf16() {
    let reduced = model(2).to_dtype(WeightDtype::Bf16);
    let long = reduced.hidden_states(ids(1, 40)).slice([0..1, 0..17]);
    let short = reduced.hidden_states(ids(1, 40).slice([0..1, 0..17]));
    // Other shapes may sum in another order.
    assert!(relative_difference(long, short) < RELATIVE_TOLERANCE);
}

#[test]
fn an_adapters_gradients_reach_its_own_parameters_in_f32() {
    let target = model(4);
    let (features, _) = states(&target, ids(2, 21));
    let config = AdapterConfig::new(target.config(), 1).expect("an exit layer");
    let adapter = config.init(&Device::flex().autodiff());
    let gradients = |features: Tensor<3>| {
        let copy = adapter.to_dtype(features.dtype().into());
        let output = copy.forward(features).cast(FloatDType::F32);
        // A loss with a gradient of its own at each number.
        let grads = (output.clone() * output.sin()).sum().backward();
        let mut all = Vec::new();
        adapter.visit(&mut Gradients { grads: &grads, all: &mut all });
        all
    };
    let expected = gradients(features.clone());
    let found = gradients(features.cast(FloatDType::BF16));
    assert_eq!(expected.len(), 6, "two norms and four projections");
    assert_eq!(found.len(), 6);
    for (found, expected) in found.into_iter().zip(expected) {
        assert_eq!(found.dtype(), DType::F32);
        let off = relative_difference(found, expected);
        // Twice through the layer.
        assert!(off < 2.0 * RELATIVE_TOLERANCE && off > 1e-4, "{off}");
    }
}

#[test]
fn a_heads_logits_are_f32_and_near() {
    let device = Device::flex();
    let head = AcceptanceHeadConfig::new(64, 3, false).init(&device);
    let (_, hidden) = states(&model(4), ids(1, 30));
    let hidden = hidden.reshape([30, 64]);
    let reduced = head.to_dtype(FloatDType::BF16);
    let found = reduced.acceptance_logit(hidden.clone().cast(FloatDType::BF16));
    assert_eq!(found.dtype(), DType::F32);
    let off = relative_difference(found, head.acceptance_logit(hidden));
    assert!(off < RELATIVE_TOLERANCE && off > 1e-4, "{off}");
}

struct Gradients<'a> {
    grads: &'a burn::tensor::Gradients,
    all: &'a mut Vec<Tensor<1>>,
}

impl burn::module::ModuleVisitor for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<D>>) {
        let grad = param.val().grad(self.grads).expect("every parameter is trained");
        self.all.push(grad.reshape([param.shape().num_elements()]));
    }
}
