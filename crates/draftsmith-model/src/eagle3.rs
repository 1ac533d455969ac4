//! EAGLE-3's drafter (Li et al. 2025, section 3): one layer that reads the target's hidden states
//! after three of its layers. At drafted positions, which the target has not processed, it reads
//! its own output instead.
//!
//! At position q it reads the token after q and the target's states at q:
//! ```text
//! g = fc · [low; mid; high]
//! x = [norm(embedding of token q + 1); norm(g)]
//! a = g + attention(x)
//! o = a + mlp(norm(a))
//! ```
//! The LM head turns `norm(o)` into logits of token q + 2. The next draft step is at position
//! q + 1. It reads the token that was just drafted, and o in place of g. A layer number L stands
//! for the residual stream after the target's first L layers.
//!
//! Files have the format that vLLM, SGLang and llama.cpp load. The tensor `d2t` contains each draft
//! token's id in the target minus its number in the draft vocabulary. It exists if and only if the
//! drafter drafts only some tokens. The numbers of the target's layers are stored only if they are not
//! the defaults. Drafters from other trainers are read in two more forms: with the layer named
//! `layers.0`, and with the keys of the speculators library, which nests the layer's keys in
//! `transformer_layer_config`.

#[cfg(test)]
mod tests;

use burn::module::Param;
use burn::tensor::Tensor;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::block_drafter::BlockDrafterConfig;
use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::decoder::attention::{DraftPlan, Drafts, UnrolledAttention, delayed};
use crate::draft_vocabulary::{DraftVocabulary, MASK, OFFSETS};
use crate::error::Result;
use crate::kv_cache::KvCache;
use crate::rows::{Rows, Slots};
use crate::self_draft::config::DraftConfig;
use crate::self_draft::faults::DraftFaultKind;
use crate::self_draft::files::DraftFiles;
use crate::self_draft::keys::{DraftDialect, DraftKeys, DrafterDir, LAYER_KEYS};
use crate::self_draft::{DraftForm, DraftNetwork, EMBEDDING, FC, LM_HEAD, Parts, part};
use crate::spec::{
    AttentionNames, AttentionSpec, LayerSpec, LinearSpec, ModelShape, RopeConfig, RopeScaling,
};
use crate::state_network::{StepNetwork, UnrolledInputs};

/// The names of the tensors in published drafters.
const LAYER: &str = "midlayer";
const EMBEDDING_NORM: &str = "midlayer.input_layernorm";
/// The key for the numbers of the target's layers.
const LAYERS: &str = "eagle_aux_hidden_state_layer_ids";
/// The key of the speculators library for the drafting method.
const METHOD: &str = "speculators_model_type";
/// Keys that add tensors to a drafter, with a part of the names of these. An ignored key's tensors are
/// ignored.
const TENSORS_OF: [(&str, &str); 2] = [("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")];
/// The norms of the target's states: one of all states concatenated, or one of each.
const NORM_OF_ALL: [&str; 1] = ["input_norm"];
const NORMS_OF_EACH: [&str; NUM_TARGET_STATES] = ["fc_norm.0", "fc_norm.1", "fc_norm.2"];
/// The number of the target's hidden states that a drafter reads.
pub const NUM_TARGET_STATES: usize = 3;

/// A drafter's shape and provenance: `config.json` of its directory. Its model is a Llama that has one
/// layer of the drafter's sizes, and the target's vocabulary.
pub type Eagle3Config = DraftConfig<Eagle3Form>;

/// An EAGLE-3 drafter. The layer's attention reads an embedding and g, concatenated; its attention norm
/// is the norm of g.
pub type Eagle3 = DraftNetwork<Eagle3Form>;

/// The settings that only EAGLE-3 drafters have.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Eagle3Form {
    /// The width of the target's hidden states.
    pub target_hidden_size: usize,
    /// Whether the residual stream begins with g after its norm, instead of g.
    pub norm_before_residual: bool,
    /// The norms of the target's states before their projection.
    pub state_norms: StateNorms,
    /// Whether the next step reads the normed output, as in EAGLE-3.1, and not the residual stream.
    pub norm_output: bool,
    /// Whether the drafter has token embeddings of its own. If not, it uses the target's.
    pub has_embedding: bool,
    /// Whether the drafter has an LM head of its own. If not, it uses the target's.
    pub has_head: bool,
}

/// The norms of the target's hidden states before their projection (EAGLE-3.1).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StateNorms {
    /// None, as in EAGLE-3.
    #[default]
    Absent,
    /// One norm of all states, concatenated: `norm_before_fc`.
    OfAll,
    /// A norm of each state: `fc_norm`.
    OfEach,
}

impl StateNorms {
    /// Returns the norms that these keys ask for, of which at most one is true.
    pub fn of(norm_before_fc: bool, fc_norm: bool) -> Self {
        match (norm_before_fc, fc_norm) {
            (true, _) => Self::OfAll,
            (false, true) => Self::OfEach,
            (false, false) => Self::Absent,
        }
    }
}

/// The keys of a drafter's `config.json` that a Llama does not have.
#[derive(Deserialize)]
pub(crate) struct OwnKeys {
    draft_vocab_size: Option<usize>,
    target_hidden_size: Option<usize>,
    #[serde(default)]
    norm_before_residual: bool,
    #[serde(default)]
    norm_output: bool,
    #[serde(default)]
    norm_before_fc: bool,
    #[serde(default)]
    fc_norm: bool,
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    speculators_model_type: Option<String>,
}

impl Eagle3Config {
    /// Returns whether a `config.json` belongs to an EAGLE-3 drafter.
    pub fn is_of(config: &Map<String, Value>) -> bool {
        config.contains_key("draft_vocab_size") && !BlockDrafterConfig::is_of(config)
    }

    /// Returns the default of [`Self::target_layers`]: 2, n/2 and n − 3 for a target with n layers.
    pub fn default_layers(num_layers: usize) -> [usize; NUM_TARGET_STATES] {
        [2, num_layers / 2, num_layers.saturating_sub(3)]
    }

    /// Returns the window of the drafter in `dir`; `None` without one, and for unreadable drafters.
    pub fn window(dir: &DrafterDir) -> Option<usize> {
        // The window does not depend on the target's layers.
        let files = DraftFiles::<Eagle3Form>::read(dir, 0).ok()?;
        files.config.model.spec.window.map(|window| window.size)
    }

    /// Configures a drafter of the target's sizes, with a Llama's layer and an LM head of its own over
    /// all tokens.
    pub fn new(target: &ModelConfig) -> Self {
        let ModelConfig { shape, spec, .. } = target;
        let own = Eagle3Form {
            target_hidden_size: shape.hidden_size,
            has_head: true,
            ..Eagle3Form::default()
        };
        let (num_layers, layers) = (shape.num_layers, Self::default_layers(shape.num_layers));
        let shape = ModelShape { num_layers: 1, ..shape.clone() };
        let mut model = ModelConfig::llama(shape, spec.mlp.width);
        model.spec.norm.epsilon = spec.norm.epsilon;
        model.spec.rope =
            RopeConfig { theta: spec.rope.theta, width: None, scaling: RopeScaling::None };
        Self { num_target_layers: Some(num_layers), ..Self::of(model, layers.to_vec(), own) }
    }

    /// Gives the layer a Qwen 3's norms of queries and keys.
    pub fn add_head_norms(&mut self) {
        let shape = self.model.shape.clone();
        let qwen3 = ModelConfig::qwen3(shape, self.model.spec.mlp.width);
        self.model.architecture = qwen3.architecture;
        self.model.spec.attention = qwen3.spec.attention;
    }

    /// Returns whether the drafter reads the default layers of its target.
    pub fn has_default_layers(&self) -> bool {
        let default = self.num_target_layers.map(Self::default_layers);
        default.is_some_and(|default| self.target_layers == default)
    }
}

impl DraftForm for Eagle3Form {
    const KIND: &'static str = "eagle3";
    const KEYS: DraftKeys = DraftKeys {
        own: "draft_vocab_size eagle_aux_hidden_state_layer_ids fc_norm norm_before_fc norm_before_residual \
              norm_output speculators_model_type target_hidden_size",
        layers: (LAYERS, 0),
        reads_last: true,
        table: "eagle_config",
        table_decides: false,
        has_families: false,
        dropped_prefix: "",
        other_prefix: ("layers.0.", "midlayer."),
        dialects: &[
            DraftDialect::defaulting([METHOD, ""], ("norm_before_residual", "true")),
            DraftDialect::defaulting([LAYER_KEYS, ""], ("norm_before_residual", "true")),
        ],
    };

    /// Specifies the parts. The queries, keys and values of the layer read an embedding and g,
    /// concatenated.
    fn parts(config: &Eagle3Config) -> Parts {
        let ModelConfig { shape, spec, .. } = &config.model;
        let names = AttentionNames { norm: "hidden_norm", ..spec.attention.names.clone() };
        let attention = AttentionSpec { num_read: 2, names, ..spec.attention.clone() };
        let layer = LayerSpec { attention: Some(attention), ..spec.layer(0) };
        let width = shape.hidden_size;
        let head = || LinearSpec::matrix(LM_HEAD, width, config.num_draft_tokens());
        let inputs = NUM_TARGET_STATES * config.target_hidden_size;
        Parts {
            embedding: config.has_embedding.then(|| LinearSpec::lm_head(EMBEDDING, shape)),
            fc: Some(LinearSpec::matrix(FC, inputs, width)),
            state_norms: match config.state_norms {
                StateNorms::Absent => Vec::new(),
                StateNorms::OfAll => NORM_OF_ALL.map(|name| (name, inputs)).to_vec(),
                StateNorms::OfEach => {
                    NORMS_OF_EACH.map(|name| (name, config.target_hidden_size)).to_vec()
                }
            },
            input_norm: Some(EMBEDDING_NORM),
            lm_head: config.has_head.then(head),
            ..Parts::of_layers([(layer, LAYER.to_owned())].into_iter())
        }
    }

    fn read(files: &mut DraftFiles<Self>) -> Result<()> {
        let own: OwnKeys = files.own_keys()?;
        if let Some(method) = own.speculators_model_type.filter(|method| method != "eagle3") {
            return Err(files.error(METHOD, format!("is \"{method}\", expected \"eagle3\"")));
        }
        let num_layers = files.num_target_layers;
        let model = &files.config.model;
        let form = Self {
            target_hidden_size: own.target_hidden_size.unwrap_or(model.shape.hidden_size),
            norm_before_residual: own.norm_before_residual,
            state_norms: StateNorms::of(own.norm_before_fc, own.fc_norm),
            norm_output: own.norm_output,
            has_embedding: files.has(EMBEDDING),
            has_head: files.has(LM_HEAD),
        };
        if own.norm_before_fc && own.fc_norm {
            let problem = "is true beside `norm_before_fc`, and only one of them is computed here";
            return Err(files.error("fc_norm", problem));
        }
        files.config.own = form;
        files.config.num_target_layers = Some(num_layers);
        files.config.target_layers = Eagle3Config::default_layers(num_layers).to_vec();
        files.need_one_layer();
        // Model-Optimizer writes an empty list for the default.
        let given = own.eagle_aux_hidden_state_layer_ids.filter(|layers| !layers.is_empty());
        given.into_iter().for_each(|layers| read_layers(files, layers));
        read_vocabulary(files, own.draft_vocab_size);
        Ok(())
    }

    fn keys(config: &Eagle3Config) -> Vec<(&'static str, Option<Value>)> {
        let layers = (!config.has_default_layers()).then(|| json!(config.target_layers));
        let has_head_norms = config.model.spec.attention.names.head_norms.is_some();
        let class =
            if has_head_norms { "Eagle3Qwen3ForCausalLM" } else { "LlamaForCausalLMEagle3" };
        let window = config.model.spec.window.as_ref();
        vec![
            ("architectures", Some(json!([class]))),
            ("draft_vocab_size", Some(config.num_draft_tokens().into())),
            ("target_hidden_size", Some(config.target_hidden_size.into())),
            ("tie_word_embeddings", Some(false.into())),
            ("norm_before_residual", config.norm_before_residual.then(|| true.into())),
            ("norm_before_fc", (config.state_norms == StateNorms::OfAll).then(|| true.into())),
            ("fc_norm", (config.state_norms == StateNorms::OfEach).then(|| true.into())),
            ("norm_output", config.norm_output.then(|| true.into())),
            ("layer_types", window.map(|_| json!(["sliding_attention"]))),
            ("sliding_window", window.map(|window| window.size.into())),
            (LAYERS, layers),
        ]
    }

    fn width_read(config: &Eagle3Config) -> (&'static str, usize) {
        ("target_hidden_size", config.target_hidden_size)
    }

    fn more_faults(
        config: &Eagle3Config,
        target: &ModelShape,
    ) -> Option<(DraftFaultKind, &'static str, String)> {
        let width = config.model.shape.hidden_size;
        let needs_own = !(config.has_embedding && config.has_head) && width != target.hidden_size;
        let problem = format!(
            "is {width}, and the target's is {}: such a drafter needs the tensors `{EMBEDDING}` and `{LM_HEAD}`",
            target.hidden_size
        );
        needs_own.then_some((DraftFaultKind::MissingTensor, "hidden_size", problem))
    }

    /// Returns whether a tensor is a part of the vocabulary, the frequencies that old trainers store, or
    /// belongs to a key which is ignored.
    fn is_beside(_config: &Eagle3Config, dir: &DrafterDir, tensor: &str) -> bool {
        let is_of = |(key, part): &(&str, &str)| tensor.contains(part) && dir.ignores(key);
        [MASK, OFFSETS].contains(&tensor)
            || tensor.ends_with("rotary_emb.inv_freq")
            || TENSORS_OF.iter().any(is_of)
    }

    fn unrolled(network: &Eagle3, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        let DraftNetwork { stack, fc, input_norm, config, .. } = network;
        let UnrolledInputs { states, embedded, begun, num_steps, lengths, .. } = inputs;
        let embedded = embedded.expect("it reads embeddings");
        let layer = &stack.layers[0];
        let (attention, mlp) = layer.both_parts();
        let [_, seq, _] = embedded.dims();
        let place = (embedded.dtype().into(), &stack.device());
        let plan = DraftPlan { begun, seq, num_steps, rows_ahead: 0, lengths };
        let drafts = Drafts::new(plan, &stack.reaches[attention.reach()], place);
        let states = states.into_iter().map(|states| drafts.known_rows(states)).collect();
        let features = part(fc).forward(network.normed_states(states));
        let normed = attention.normed_input(features.clone());
        let embedded = part(input_norm).forward(drafts.known_rows(embedded));
        let mut attending = UnrolledAttention::new(attention, &drafts, embedded, normed);
        let mut given = features.select(0, drafts.begun.clone());
        let steps = (0..num_steps).map(|_| {
            let normed = attention.normed_input(given.clone());
            let stream = if config.norm_before_residual { normed.clone() } else { given.clone() };
            let stream = stream + attending.step(normed);
            let output = stream.clone() + mlp.forward(stream.unsqueeze()).squeeze_dim::<2>(0);
            let normed = stack.norm.forward(output.clone());
            given = delayed(if config.norm_output { normed.clone() } else { output }, 1);
            normed
        });
        steps.collect()
    }
}

impl Eagle3 {
    /// Norms the target's states at some positions and concatenates them.
    ///
    /// # Shapes
    /// - states: `[rows, target_hidden]` for each layer
    /// - output: `[rows, 3 · target_hidden]`
    fn normed_states(&self, states: Vec<Tensor<2>>) -> Tensor<2> {
        match &self.state_norms[..] {
            [] => Tensor::cat(states, 1),
            [of_all] => of_all.forward(Tensor::cat(states, 1)),
            of_each => {
                let normed = of_each.iter().zip(states).map(|(norm, states)| norm.forward(states));
                Tensor::cat(normed.collect(), 1)
            }
        }
    }
}

fn read_layers(files: &mut DraftFiles<Eagle3Form>, layers: Vec<usize>) {
    if layers.len() != NUM_TARGET_STATES {
        let problem = format!("is {layers:?}, expected {NUM_TARGET_STATES} layers");
        files.fault(DraftFaultKind::WrongLayers, LAYERS, problem);
    } else if layers.is_sorted_by(|one, next| one < next) {
        files.config.target_layers = layers;
    } else {
        let problem = format!(
            "is {layers:?}: runtimes take layers that do not ascend in different orders, and read a layer \
             that is named twice once; hint: name three layers in rising order, and sort the columns of \
             `{FC}` with them"
        );
        files.fault(DraftFaultKind::DescendingLayers, LAYERS, problem);
    }
}

/// Reads the draft vocabulary, of which `config.json` gives the size.
fn read_vocabulary(files: &mut DraftFiles<Eagle3Form>, given: Option<usize>) {
    const KEY: &str = "draft_vocab_size";
    let vocab_size = files.config.model.shape.vocab_size;
    let offsets = files.reader.shape(OFFSETS).map(|shape| shape.iter().product::<usize>());
    let size = given.or(offsets).unwrap_or(vocab_size);
    if size >= vocab_size {
        if offsets.is_some() {
            let problem = format!(
                "is {size}, all tokens, but the weights have a tensor `{OFFSETS}`; hint: remove it"
            );
            files.fault(DraftFaultKind::SurplusOffsets, KEY, problem);
        }
        return;
    }
    if offsets.is_none() {
        let problem = format!(
            "is {size} of {vocab_size} tokens, but the weights have no tensor `{OFFSETS}` that says which"
        );
        files.fault(DraftFaultKind::NoOffsets, KEY, problem);
    } else {
        files.read_offsets(size);
    }
    if !files.config.has_head {
        let problem = format!("needs the tensor `{LM_HEAD}.weight`, and the weights have none");
        files.fault(DraftFaultKind::NoHead, KEY, problem);
    }
    // Any tokens of that number give the LM head its shape.
    let any = || DraftVocabulary::new((0..size.max(1) as u32).collect::<Vec<u32>>());
    files.config.draft_vocabulary.get_or_insert_with(any);
}

impl StepNetwork for Eagle3 {
    fn embed(&self, target: &CausalLm, runs: &[(usize, &[u32])]) -> Rows {
        let Some(table) = &self.embedding else { return target.embed_runs(runs) };
        let ids = runs.iter().flat_map(|(_, ids)| *ids);
        slots_of(runs).rows(table.looked_up(Param::val, ids))
    }

    fn features(&self, _target: &CausalLm, states: &[Rows]) -> Rows {
        assert_eq!(states.len(), NUM_TARGET_STATES, "one for each layer");
        let rows = match &self.state_norms[..] {
            [] => Rows::side_by_side(states),
            [of_all] => of_all.form().of_rows(Rows::side_by_side(states)),
            of_each => {
                let norms = of_each.iter().zip(states);
                let normed = norms.map(|(norm, states)| norm.form().of_rows(states.clone()));
                Rows::side_by_side(&normed.collect::<Vec<Rows>>())
            }
        };
        part(&self.fc).of_rows(rows)
    }

    fn forward_cached(&self, embedded: Rows, features: Rows, cache: &mut KvCache) -> Rows {
        let stack = self.stack.form();
        let embedded = part(&self.input_norm).form().of_rows(embedded);
        let normed = stack.first_norm().of_rows(features.clone());
        let read = Rows::side_by_side([&embedded, &normed]);
        let stream = if self.config.norm_before_residual { normed } else { features };
        let output = stack.forward_reading(read, stream, cache);
        if self.config.norm_output { stack.norm().of_rows(output) } else { output }
    }

    fn normed(&self, outputs: Rows) -> Rows {
        if self.config.norm_output { outputs } else { self.stack.form().norm().of_rows(outputs) }
    }
}

fn slots_of(runs: &[(usize, &[u32])]) -> Slots {
    let run = |(slot, ids): &(usize, &[u32])| crate::rows::Run { slot: *slot, num_rows: ids.len() };
    runs.iter().map(run).collect()
}
