//! The drafter of EAGLE-1 (Li et al. 2024, section 4.1) and EAGLE-2: one layer that reads what the
//! target's LM head reads, and predicts it at the next position.
//!
//! At position q it reads the token after q and f, the target's last state at q after its final norm:
//! ```text
//! x = fc · [embedding of token q + 1; f] + b
//! a = x + attention(x)
//! o = a + mlp(norm(a))
//! ```
//! The target's LM head turns o into logits of token q + 2, and the next draft step reads o in place
//! of f. Neither the attention's input nor o is normed.
//!
//! Files have the authors' names of tensors, and vLLM reads them. The authors' files have a bias of
//! `fc`, which ours lack because vLLM's class does. Embeddings in a file are a copy of the target's
//! and ignored, as in the servers.
//!
//! EAGLE-2 has the same weights. Its tree is a shape of all draft trees: `10x10x50`.

#[cfg(test)]
mod tests;

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::Tensor;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::decoder::attention::{DraftAttention, DraftPlan, Drafts, delayed};
use crate::decoder::stack::LayerStack;
use crate::eagle3::Eagle3Config;
use crate::error::Result;
use crate::frozen::PackableLinear;
use crate::kv_cache::KvCache;
use crate::precision::copied;
use crate::rows::Rows;
use crate::self_draft::config::DraftConfig;
use crate::self_draft::files::DraftFiles;
use crate::self_draft::keys::{DraftKeys, DrafterDir};
use crate::self_draft::{DraftForm, DraftNetwork, EMBEDDING, FC, LM_HEAD, Parts, passing_last};
use crate::spec::{AttentionNames, AttentionSpec, LayerSpec, LinearSpec};
use crate::state_network::{StepNetwork, UnrolledInputs};

/// A drafter's shape and provenance: `config.json` of its directory. Its model is a Llama with the
/// drafter's layer.
pub type EagleConfig = DraftConfig<EagleForm>;

/// An EAGLE-1 drafter.
pub type Eagle = DraftNetwork<EagleForm>;

/// The settings that only EAGLE-1 drafters have.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EagleForm {
    /// Whether the projection has a bias.
    pub has_bias: bool,
}

/// The key of a drafter's `config.json` that a Llama does not have.
#[derive(Deserialize)]
struct BiasKey {
    bias: Option<bool>,
}

impl EagleConfig {
    /// Returns whether a `config.json` belongs to an EAGLE-1 drafter. A file of the authors without the
    /// key `bias` looks like that of a model.
    pub fn is_of(config: &Map<String, Value>) -> bool {
        let class = config.get("architectures").and_then(|classes| classes.get(0)?.as_str());
        let is_eagle1 = |class: &str| class.contains("Eagle") && !class.contains("Eagle3");
        class.is_some_and(is_eagle1) || config.contains_key("bias")
    }

    /// Configures a drafter of the target's sizes, with the layer of an EAGLE-3 drafter, a Llama's.
    pub fn new(target: &ModelConfig) -> Self {
        let (model, num_layers) = (Eagle3Config::new(target).model, target.shape.num_layers);
        let own = Self::of(model, vec![num_layers], EagleForm::default());
        Self { num_target_layers: Some(num_layers), ..own }
    }
}

/// SGLang's class of these drafters.
const SGLANG_CLASS: &str = "LlamaForCausalLMEagle";

impl DraftForm for EagleForm {
    const KIND: &'static str = "eagle";
    const KEYS: DraftKeys = DraftKeys {
        own: "bias",
        layers: ("num_hidden_layers", 0),
        reads_last: true,
        table: "",
        table_decides: false,
        has_families: false,
        dropped_prefix: "model.",
        other_prefix: ("", ""),
        dialects: &[],
    };

    fn parts(config: &EagleConfig) -> Parts {
        let ModelConfig { shape, spec, .. } = &config.model;
        let names = AttentionNames { norm: "", ..spec.attention.names.clone() };
        let attention = AttentionSpec { names, ..spec.attention.clone() };
        let layer = LayerSpec { attention: Some(attention), ..spec.layer(0) };
        let width = shape.hidden_size;
        let fc =
            LinearSpec { has_bias: config.has_bias, ..LinearSpec::matrix(FC, 2 * width, width) };
        let layers = [(layer, "layers.0".to_owned())].into_iter();
        Parts { fc: Some(fc), last_norm: "", ..Parts::of_layers(layers) }
    }

    fn read(files: &mut DraftFiles<Self>) -> Result<()> {
        let own: BiasKey = files.own_keys()?;
        let num_layers = files.num_target_layers;
        let has_bias = files.reader.shape(&format!("{FC}.bias")).is_some();
        files.config.own = Self { has_bias: own.bias.unwrap_or(has_bias) };
        files.config.num_target_layers = Some(num_layers);
        files.config.target_layers = vec![num_layers];
        files.need_one_layer();
        Ok(())
    }

    fn keys(config: &EagleConfig) -> Vec<(&'static str, Option<Value>)> {
        // vLLM finds its class by the name of the layer's; SGLang's class needs a bias.
        let class = if config.has_bias { SGLANG_CLASS } else { "LlamaForCausalLM" };
        vec![
            ("architectures", Some(json!([class]))),
            ("bias", Some(config.has_bias.into())),
            ("tie_word_embeddings", Some(false.into())),
        ]
    }

    /// Returns whether a tensor is a copy of one of the target's, or the frequencies that old trainers
    /// store.
    fn is_beside(_config: &EagleConfig, _dir: &DrafterDir, tensor: &str) -> bool {
        let is_copy = |name: &&str| tensor.strip_suffix(".weight") == Some(name);
        [EMBEDDING, LM_HEAD].iter().any(is_copy) || tensor.ends_with("rotary_emb.inv_freq")
    }

    fn unrolled(network: &Eagle, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        let (stack, fc) = (&network.stack, network.projection());
        let UnrolledInputs { mut states, embedded, begun, num_steps, lengths, .. } = inputs;
        let embedded = embedded.expect("it reads embeddings");
        let (attention, mlp) = stack.layers[0].both_parts();
        let [_, seq, _] = embedded.dims();
        let place = (embedded.dtype().into(), &stack.device());
        let plan = DraftPlan { begun, seq, num_steps, rows_ahead: 0, lengths };
        let drafts = Drafts::new(plan, &stack.reaches[attention.reach()], place);
        let read =
            |embedded: Tensor<2>, features| fc.forward(Tensor::cat(vec![embedded, features], 1));
        // The target's norm is not trained.
        let features = stack.norm.forward(drafts.known_rows(states.remove(0))).detach();
        let embedded = drafts.known_rows(embedded);
        let x = read(embedded.clone(), features);
        let [query, key, value, _] = attention.projections();
        let both = |x: &Tensor<2>| [key, value].map(|it| it.forward(x.clone()));
        let mut attending = DraftAttention::new(attention, &drafts, both(&x));
        let [embedded, mut x] = [embedded, x].map(|rows| rows.select(0, drafts.begun.clone()));
        let steps = (0..num_steps).map(|step| {
            let own = (step > 0).then(|| both(&x));
            let attended = attending.step(query.forward(x.clone()), own);
            let stream = x.clone() + attended;
            let output = stream.clone() + mlp.forward(stream.unsqueeze()).squeeze_dim::<2>(0);
            x = read(embedded.clone(), delayed(output.clone(), 1));
            output
        });
        steps.collect()
    }
}

impl Eagle {
    /// Sets the norm that training applies to the target's states, which the files lack.
    #[must_use]
    pub fn with_norm_of(self, target: &CausalLm) -> Self {
        let norm = copied(target.last_norm(), &self.stack.device());
        let stack = LayerStack { norm, ..self.stack.tensors }.into();
        Self { stack, ..self }
    }

    /// Lets the projection pass on f, plus a tenth of its previous output. The layer keeps its weights:
    /// those of the target's layers suit normed inputs and outputs.
    #[must_use]
    pub fn passing_states(self) -> Self {
        let fc = passing_last(self.projection(), &self.stack.device());
        Self { fc: Some(fc.into()), ..self }
    }

    /// Gives the projection a bias of zeros if it needs one and has none, or removes its bias.
    #[must_use]
    pub fn with_bias(self, has_bias: bool) -> Self {
        let Linear { weight, bias } = (**self.projection()).clone();
        let zeros = || {
            let [_, width] = weight.dims();
            Param::from_tensor(Tensor::zeros([width], &weight.device()))
        };
        let bias = has_bias.then(|| bias.unwrap_or_else(zeros));
        Self { fc: Some(Linear { weight, bias }.into()), ..self }
    }

    fn projection(&self) -> &PackableLinear {
        self.fc.as_ref().expect("EAGLE-1 has the projection")
    }
}

impl StepNetwork for Eagle {
    fn features(&self, target: &CausalLm, states: &[Rows]) -> Rows {
        let [state] = states else { panic!("it reads one state") };
        target.normed(state.clone())
    }

    fn forward_cached(&self, embedded: Rows, features: Rows, cache: &mut KvCache) -> Rows {
        let x = self.projection().of_rows(Rows::side_by_side([&embedded, &features]));
        self.stack.form().forward_reading(x.clone(), x, cache)
    }

    fn normed(&self, outputs: Rows) -> Rows {
        outputs
    }
}
