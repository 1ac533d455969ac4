//! Training reads what decoding computes.

use super::*;

/// Numbers in [0, 1), the same in every run.
fn draws(mut state: u64) -> impl FnMut() -> f64 {
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A target, and a drafter whose key and value heads are shared.
fn models(norm_before_residual: bool) -> (CausalLm, Eagle3) {
    let shape = ModelShape {
        vocab_size: 24,
        hidden_size: 16,
        num_layers: 4,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 4,
        context: 64,
        bos_token_id: None,
        eos_token_ids: vec![],
    };
    let config = ModelConfig::llama(shape, 24);
    let target = config.init(&Device::flex());
    let config = Eagle3Config { norm_before_residual, ..Eagle3Config::new(&config) };
    (target, config.init_from(&Device::flex(), draws(5)))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

#[test]
fn unrolled_steps_equal_those_of_decoding() {
    const SEQ: usize = 9;
    const STEPS: usize = 4;
    for norm_before_residual in [false, true] {
        let (target, drafter) = models(norm_before_residual);
        let device = Device::flex();
        let ids: Vec<u32> = (0..SEQ as u32).map(|n| (n * 7 + 3) % 24).collect();
        let mut draw = draws(6);
        let features: Vec<f32> = (0..SEQ * 16).map(|_| draw() as f32 - 0.5).collect();
        let features = Tensor::<3>::from_data(TensorData::new(features, [1, SEQ, 16]), &device);
        let tokens: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [1, SEQ]), &device);
        let unrolled = drafter.unrolled(target.embed(tokens), features.clone(), STEPS);
        for start in 0..SEQ {
            let known = start + 1;
            let mut cache = drafter.new_cache(SEQ, 1);
            let given = features.clone().narrow(1, 0, known);
            let padding = Tensor::zeros([1, padded_rows(known), 16], &device);
            let tensor = Box::new(padding.slice_assign([0..1, 0..known, 0..16], given));
            let embedded = target.embed_ids(&ids[..known]);
            let given = embedded.with_place(DeviceRows { tensor, num_rows: known });
            let mut output = drafter.forward_cached(embedded, given, &mut cache).last(1);
            for (step, all) in unrolled.iter().enumerate() {
                let position = start + step;
                let DeviceRows { tensor, .. } =
                    drafter.normed(output.clone()).into_parts().0.into_device(&device);
                let decoded = values(tensor.narrow(1, 0, 1));
                let trained = values(all.clone().narrow(1, position, 1));
                for (one, other) in decoded.iter().zip(&trained) {
                    assert!(
                        (one - other).abs() < 2e-5,
                        "round {start}, step {step}: {one} {other}"
                    );
                }
                if position + 1 == SEQ {
                    break;
                }
                let embedded = target.embed_ids(&ids[position + 1..position + 2]);
                output = drafter.forward_cached(embedded, output, &mut cache);
            }
        }
    }
}

#[test]
fn a_drafter_begins_with_what_fits_of_the_target() {
    let (target, drafter) = models(false);
    let vocabulary = DraftVocabulary::new([1, 2, 5]);
    let config = Eagle3Config {
        draft_vocabulary: Some(vocabulary.clone()),
        ..Eagle3Config::new(target.config())
    };
    let begun = drafter.clone().with_weights_of(&target, &config);
    let (theirs, _) = target.layer_and_norm(3);
    let theirs = theirs.attention.unwrap();
    let (own, drawn) = (begun.layer.attention.as_ref().unwrap(), drafter.layer.attention.unwrap());
    let halves = |linear: &Linear| {
        let weight = linear.weight.val();
        [values(weight.clone().narrow(0, 0, 16)), values(weight.narrow(0, 16, 16))]
    };
    let [first, second] = halves(own.projections()[1]);
    assert_eq!(first, halves(drawn.projections()[1])[0]);
    assert_eq!(second, values(theirs.projections()[1].weight.val()));
    assert_eq!(
        values(own.projections()[3].weight.val()),
        values(theirs.projections()[3].weight.val())
    );
    assert_eq!(
        values(begun.own_head().unwrap()),
        values(narrowed(target.lm_head_weight(), &vocabulary))
    );
    let fc = values(begun.fc.weight.val());
    let before = values(drafter.fc.weight.val());
    assert!((fc[32 * 16] - (1.0 + before[32 * 16] / 10.0)).abs() < 1e-6);
    assert!((fc[1] - before[1] / 10.0).abs() < 1e-6);
}
