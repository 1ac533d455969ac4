//! A self-draft adapter as an ordinary model, for runtimes that support draft models but no
//! adapters.
//!
//! A model of the target's family is built from the target's first layers, the adapter's layers,
//! the adapter's norm and an LM head. It has the adapter's logits. It contains copies of the
//! weights that the adapter shares with the target, and verification computes the first layers
//! again.

use burn::tensor::{Tensor, TensorData};

use crate::adapter::{Adapter, AdapterArchitecture, AdapterConfig};
use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::error::{ModelError, Result};
use crate::spec::WindowSpec;
use crate::state_network::StateNetwork;

impl AdapterConfig {
    /// Returns the draft model's architecture: the target's first `exit_layer` layers, then the
    /// adapter's.
    ///
    /// # Errors
    /// If no layer of the target's family can express the adapter's computation.
    pub fn draft_model(&self, target: &ModelConfig) -> Result<ModelConfig> {
        if self.architecture == AdapterArchitecture::MlpOnly {
            return Err(ModelError::Invalid(format!(
                "an adapter of architecture `{}` cannot be a draft model, because no layer of {} computes it; train \
                 another architecture, best `decoder-layer`",
                self.architecture,
                target.architecture.name()
            )));
        }
        let mut model = target.clone();
        let own_layers = self.model.shape.num_layers;
        model.shape.num_layers = self.exit_layer() + own_layers;
        let looks_back = self.model.spec.window.is_some();
        model.spec.window = model.spec.window.map(|window| {
            let mut layers = window.layers[..self.exit_layer()].to_vec();
            layers.resize(self.exit_layer() + own_layers, looks_back);
            WindowSpec { layers, ..window }
        });
        // The draft model has an LM head that differs from the target's.
        if self.architecture.has_head() || self.draft_vocabulary.is_some() {
            model.spec.tie_word_embeddings = false;
        }
        Ok(model)
    }
}

impl Adapter {
    /// Builds the draft model from tensors in f32. Parts that the adapter lacks get weights of
    /// zero. Tokens outside the draft vocabulary get LM head rows of zeros, and hence logits of 0,
    /// because an ordinary model cannot give them −∞.
    ///
    /// # Errors
    /// If no layer of the target's family can express the adapter's computation.
    ///
    /// # Panics
    /// If `target` has another shape than the adapter.
    pub fn draft_model(&self, config: &AdapterConfig, target: &CausalLm) -> Result<CausalLm> {
        let model = config.draft_model(target.config())?;
        let device = target.device();
        let ModelConfig { shape, spec, .. } = &model;
        let theirs = (0..config.exit_layer()).map(|number| target.layer(number));
        let theirs = theirs.map(|layer| layer.expect("the layers before the exit are here"));
        let own = self.stack.layers.iter().enumerate().map(|(number, layer)| {
            let spec = spec.layer(config.exit_layer() + number);
            layer.clone().with_both_parts(&spec, shape, &device)
        });
        let lm_head = self.own_head().unwrap_or_else(|| target.lm_head_weight());
        let lm_head = match &config.draft_vocabulary {
            Some(vocabulary) => {
                let mut kept = vec![0.0_f32; shape.vocab_size];
                vocabulary.ids().iter().for_each(|id| kept[*id as usize] = 1.0);
                lm_head * Tensor::from_data(TensorData::new(kept, [1, shape.vocab_size]), &device)
            }
            None => lm_head,
        };
        let decoder = Decoder::new(
            &model,
            target.embedding(),
            theirs.chain(own).collect(),
            self.stack.norm.clone(),
            lm_head,
        );
        Ok(CausalLm::of_tensors(model, decoder, target.stored_dtype()))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::draft_vocabulary::DraftVocabulary;
    use crate::fixtures::{FIXTURES, ids_tensor, load};
    use crate::weights::WeightDtype;

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_into_vec().expect("f32")
    }

    fn assert_close(found: &[f32], expected: &[f32], what: &str) {
        assert_eq!(found.len(), expected.len());
        let scale = expected.iter().fold(1.0_f32, |most, b| most.max(b.abs()));
        for (a, b) in found.iter().zip(expected) {
            // Sums in another order.
            assert!((a - b).abs() < 2e-5 * scale, "{what}: {a} for {b}");
        }
    }

    /// Computes the logits of the adapter after the target's layers, and of the draft model read
    /// from files.
    fn both(target: &CausalLm, config: &AdapterConfig, what: &str) -> [Vec<f32>; 2] {
        let ids: Vec<u32> = (0..30).map(|i| i * 7 % 40).collect();
        let adapter = config.init(&Device::flex());
        let features = target.exit_states(ids_tensor(&ids), config.exit_layer());
        let normed = adapter.forward(features);
        let [_, num_rows, width] = normed.dims();
        let head = adapter.own_head().unwrap_or_else(|| target.lm_head_weight());
        let cap = target.config().spec.logit_soft_cap;
        let logits = normed.reshape([num_rows, width]).matmul(head);
        let expected = values(crate::decoder::soft_capped(logits, cap));
        let place = tempfile::tempdir().expect("a temporary directory");
        let model = adapter.draft_model(config, target).expect(what);
        model.write_model_dir(place.path(), WeightDtype::F32).expect("written");
        let read = CausalLm::from_model_dir(place.path(), &Device::flex()).expect("readable");
        assert_eq!(read.shape().num_layers, config.exit_layer() + config.model.shape.num_layers);
        [values(read.lm_head(read.hidden_states(ids_tensor(&ids)))), expected]
    }

    #[test]
    fn a_draft_model_has_the_adapters_logits_for_every_family_and_architecture() {
        for name in FIXTURES {
            let target = load(name);
            let exits = 1..target.shape().num_layers;
            for (exit_layer, num_layers) in [(0, 2), (1, 1), (exits.end - 1, 2)] {
                for architecture in AdapterArchitecture::ALL {
                    let config = AdapterConfig::new(target.config(), exit_layer).expect("an exit");
                    let config =
                        config.with(|it| it.architecture = architecture).with_layers(num_layers);
                    let what = format!("{name}, {architecture}, {exit_layer} + {num_layers}");
                    if architecture == AdapterArchitecture::MlpOnly {
                        let refused = config.draft_model(target.config()).expect_err("refused");
                        assert!(refused.to_string().contains("`mlp-only`"), "{refused}");
                        continue;
                    }
                    let [found, expected] = both(&target, &config, &what);
                    assert_close(&found, &expected, &what);
                }
            }
        }
    }

    #[test]
    fn tokens_outside_the_draft_vocabulary_have_logits_of_zero() {
        for name in FIXTURES {
            let target = load(name);
            let config = AdapterConfig::new(target.config(), 1).expect("an exit");
            let vocabulary = DraftVocabulary::new(vec![1, 3, 4, 20]);
            let config = AdapterConfig { draft_vocabulary: Some(vocabulary.clone()), ..config };
            let [found, all] = both(&target, &config, name);
            let vocab_size = target.shape().vocab_size;
            for (found, all) in found.chunks(vocab_size).zip(all.chunks(vocab_size)) {
                let kept = |row: &[f32]| -> Vec<f32> {
                    vocabulary.ids().iter().map(|id| row[*id as usize]).collect()
                };
                assert_close(&kept(found), &kept(all), name);
                let others =
                    found.iter().enumerate().filter(|(id, _)| !vocabulary.contains(*id as u32));
                assert!(others.map(|(_, logit)| *logit).all(|logit| logit == 0.0), "{name}");
            }
        }
    }
}
