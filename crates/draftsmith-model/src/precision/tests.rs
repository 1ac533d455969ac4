//! A model in bf16 computes nearly the same as in f32, and gradients come back in f32.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use super::NORM;
use crate::buckets::Lengths;
use crate::config::ModelConfig;
use crate::fixtures::{FIXTURES, expected, fixture, load};
use crate::rows::Rows;
use crate::spec::ModelShape;
use crate::state_network::StateNetwork;
use crate::{
    AcceptanceHeadConfig, Adapter, AdapterConfig, CausalLm, DrafterModel, KvCache, WeightDtype,
};

/// bf16 has 8 bits of precision: each rounding is off by up to 1/256, and a few layers add up.
const RELATIVE_TOLERANCE: f32 = 0.03;

/// For logits of the fixtures, whose random weights amplify rounding; up to 0.055 was observed. A
/// wrong mask or rotation is off by more than half.
const LOGITS_TOLERANCE: f32 = 0.1;

/// Three layers. If `num_kv_heads` is below 4, query heads share keys.
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

/// [`relative_off`] of tensors.
fn relative_difference<const D: usize>(found: Tensor<D>, expected: Tensor<D>) -> f32 {
    relative_off(&values(found), &values(expected))
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
            // If this were f32, the test would prove nothing.
            assert!(off > 1e-4, "{off}");
        }
        let logits = reduced.lm_head(reduced_last);
        assert_eq!(logits.dtype(), DType::F32);
        let off = relative_difference(logits, model.lm_head(last));
        assert!(off < RELATIVE_TOLERANCE, "{off}");
    }
}

#[test]
fn a_model_cast_to_bf16_and_back_has_rounded_weights() {
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
        // A loss with a different gradient for each number.
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
        // Twice, because the error goes through the layer forwards and backwards.
        assert!(off < 2.0 * RELATIVE_TOLERANCE && off > 1e-4, "{off}");
    }
}

#[test]
fn a_bf16_heads_logits_are_f32_and_nearly_equal() {
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

/// The parameter types of norms, and of everything else.
#[derive(Default)]
struct Dtypes {
    is_in_norm: bool,
    of_norms: Vec<DType>,
    of_others: Vec<DType>,
}

impl Dtypes {
    fn of(module: &impl Module) -> Self {
        let mut dtypes = Self::default();
        module.visit(&mut dtypes);
        dtypes
    }
}

impl ModuleVisitor for Dtypes {
    fn enter_module(&mut self, _: &str, container: &str) {
        self.is_in_norm = container == NORM;
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let dtypes = if self.is_in_norm { &mut self.of_norms } else { &mut self.of_others };
        dtypes.push(param.val().dtype());
    }
}

fn load_in_bf16(name: &str) -> CausalLm {
    let loaded = CausalLm::load(&fixture(name), WeightDtype::Bf16, None, &Device::flex());
    loaded.expect("the fixture loads")
}

/// Logits of all positions, with the ids read in pieces through a cache.
fn cached_logits(model: &CausalLm, ids: &[u32]) -> Vec<f32> {
    let (mut cache, layers) = (model.new_cache(64, 1), 0..model.shape().num_layers);
    let mut read = |ids: &[u32]| {
        let hidden = model.forward_layers(layers.clone(), model.embed_ids(ids), &mut cache);
        let [logits] = Rows::to_host([model.logits(&model.normed(hidden))]).expect("brought");
        logits
    };
    [&ids[..9], &ids[9..10], &ids[10..13], &ids[13..]].into_iter().flat_map(&mut read).collect()
}

/// Root mean square of the difference, relative to that of `expected`.
fn relative_off(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let square = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| x * x).sum::<f32>();
    let off = square(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    (off / square(&mut expected.iter().copied())).sqrt()
}

#[test]
fn every_family_decodes_in_bf16_nearly_as_in_f32() {
    for name in FIXTURES {
        let (model, ids) = (load_in_bf16(name), expected(name).ids);
        assert_eq!(model.dtype(), WeightDtype::Bf16);
        let off = relative_off(&cached_logits(&model, &ids), &cached_logits(&load(name), &ids));
        assert!(off < LOGITS_TOLERANCE && off > 1e-3, "{name}: {off}");
    }
}

#[test]
fn loading_in_bf16_equals_casting_and_norms_stay_f32() {
    for name in FIXTURES {
        let (loaded, cast) = (load_in_bf16(name), load(name).to_dtype(WeightDtype::Bf16));
        for model in [&loaded, &cast] {
            let Dtypes { of_norms, of_others, .. } = Dtypes::of(model);
            // At least two norms per layer and the final one, and four matrices per layer and the
            // embedding.
            let num_layers = model.shape().num_layers;
            assert!(of_norms.len() > 2 * num_layers && of_others.len() > 4 * num_layers, "{name}");
            assert!(of_norms.iter().all(|dtype| *dtype == DType::F32), "{name}");
            assert!(of_others.iter().all(|dtype| *dtype == DType::BF16), "{name}");
        }
        let ids = expected(name).ids;
        assert!(cached_logits(&loaded, &ids) == cached_logits(&cast, &ids), "{name}");
    }
}

/// A self-draft in bf16, over a cache and over whole sequences. Its head is f32, and so are the
/// predictions.
#[test]
fn adapters_draft_in_bf16_and_heads_predict_in_f32() {
    let device = Device::flex();
    for name in FIXTURES {
        let (target, dir) = (load_in_bf16(name), tempfile::tempdir().expect("a directory"));
        let config = AdapterConfig::new(target.config(), 1).expect("a valid exit layer");
        config.init(&device).write_dir(dir.path(), &config).expect("written");
        let head = AcceptanceHeadConfig::new(target.shape().hidden_size, 2, true).init(&device);
        let ids = &expected(name).ids[..12];
        let drafter = |target: CausalLm| {
            let dtype = target.dtype();
            let read = Adapter::from_dir(dir.path(), target.shape(), dtype, &device);
            DrafterModel::self_draft(target, read.expect("reads").1, 1)
        };
        let [found, expected] = [target, load(name)].map(drafter).map(|drafter| {
            let (mut of_target, mut cache): (Option<KvCache>, KvCache) =
                (drafter.new_feature_cache(12, 1), drafter.new_cache(12, 1));
            let mut last = None;
            for (start, end) in [(0, 7), (7, 8), (8, 12)] {
                let features = drafter.features(&ids[start..end], of_target.as_mut());
                last = Some(drafter.forward_cached(features, std::iter::once(1), &mut cache));
            }
            let last = last.expect("three forwards");
            let predicted = head.acceptance_logits(&last, None, &[]);
            let whole = drafter.hidden_states(&[ids], Lengths::AsGiven).narrow(1, 11, 1);
            let parts = [drafter.logits(&last), drafter.logits(&whole.into()), predicted];
            Rows::to_host(parts).expect("brought")
        });
        let [cached, whole, predicted] = [0, 1, 2].map(|part| (&found[part], &expected[part]));
        for (found, expected) in [cached, whole] {
            let off = relative_off(found, expected);
            assert!(off < LOGITS_TOLERANCE && off > 1e-3, "{name}: {off}");
        }
        // A logit of acceptance can be near 0.
        let off = (predicted.0[0] - predicted.1[0]).abs();
        assert!(off < LOGITS_TOLERANCE, "{name}: {off}");
    }
}

struct Gradients<'a> {
    grads: &'a burn::tensor::Gradients,
    all: &'a mut Vec<Tensor<1>>,
}

impl ModuleVisitor for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = param.val().grad(self.grads).expect("every parameter is trained");
        self.all.push(grad.reshape([param.shape().num_elements()]));
    }
}
