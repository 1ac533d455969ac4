//! The form of block drafters: their parts, training, and directories.
//!
//! We write DeepSpec's form, with every key that some runtime needs. Two more forms are read:
//! z-lab's DFlash, with the keys of `dflash_config`, and that of the speculators library, which
//! nests the layers' keys in `transformer_layer_config` and counts layers by their inputs.
//!
//! Copies of the target's embeddings and LM head are ignored, as the drafter was trained on the
//! target's own. A drafter of a part of the vocabulary has an LM head of its own, and the tensor
//! `d2t` contains each draft token's id in the target minus its number in the draft vocabulary.
//!
//! The tensors decide whether a Markov or confidence head exists only if no key does. Gated and
//! recurrent Markov heads, DFlash2, mask embeddings beside the weights, and keys that change the
//! network otherwise are refused by name.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{BlockDrafter, BlockDrafterConfig, part};
use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::decoder::attention::{DraftPlan, Drafts};
use crate::draft_vocabulary::{MASK, OFFSETS};
use crate::error::{ModelError, Result};
use crate::self_draft::faults::DraftFaultKind;
use crate::self_draft::files::DraftFiles;
use crate::self_draft::keys::{DraftDialect, DraftKeys, DrafterDir};
use crate::self_draft::{DraftForm, DraftNetwork, EMBEDDING, FC, LM_HEAD, Parts};
use crate::spec::{LinearSpec, ModelShape, WindowSpec};
use crate::state_network::UnrolledInputs;
use crate::weights::WeightReader;

/// The names of the tensors in published drafters.
const CONTEXT_NORM: &str = "hidden_norm";
const MARKOV_IN: &str = "markov_head.markov_w1";
const MARKOV_OUT: &str = "markov_head.markov_w2";
const CONFIDENCE: &str = "confidence_head.proj";
/// The class of our files, and the layers that they read: each the layer whose output is read,
/// counted from 0, or −1 for the embeddings.
const CLASS: &str = "Qwen3DSparkModel";
const LAYER_IDS: &str = "target_layer_ids";
/// The nested keys of z-lab's form.
const DFLASH: &str = "dflash_config";
/// The keys of the speculators library: the drafting method, and the layers whose input is read.
const METHOD: &str = "speculators_model_type";
const INPUT_IDS: &str = "aux_hidden_state_layer_ids";
const LAYOUT: &str = "sample_from_anchor";
const MARKOV_TYPE: &str = "markov_head_type";
/// The greatest size of a block. Published drafters have at most 16 rows.
const MOST_ROWS: usize = 256;
/// The greatest rank of a Markov head. Published drafters have 256.
const MOST_RANK: usize = 1 << 16;
/// A file that MiMo's drafters have beside the weights.
const MASK_EMBEDDING: &str = "mask_embedding.pt";

/// The settings that only block drafters have.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockForm {
    /// The greatest number of rows of a block.
    pub block_size: usize,
    /// The token in all rows but the anchor's.
    pub mask_token_id: u32,
    /// Whether row i predicts the token after its position, and not the token at its position.
    pub is_anchor_first: bool,
    /// Whether rows attend only to earlier rows of the block.
    pub is_causal: bool,
    /// The rank of the Markov head; 0 for none, as in DFlash.
    pub markov_rank: usize,
    /// The inputs of the confidence head.
    pub confidence: ConfidenceHead,
}

impl Default for BlockForm {
    fn default() -> Self {
        Self {
            block_size: 7,
            mask_token_id: 0,
            is_anchor_first: true,
            is_causal: true,
            markov_rank: 0,
            confidence: ConfidenceHead::Absent,
        }
    }
}

/// The confidence head of a block drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfidenceHead {
    /// No confidence head.
    Absent,
    /// A head that reads only the row of a candidate.
    OfRow,
    /// A head that reads the row of a candidate and the Markov head's vector of the token before it.
    OfRowAndToken,
}

/// The keys of a drafter's `config.json` that a model does not have.
#[derive(Deserialize)]
pub(crate) struct BlockKeys {
    /// The file, for messages.
    #[serde(skip)]
    path: PathBuf,
    target_layer_ids: Option<Vec<i64>>,
    aux_hidden_state_layer_ids: Option<Vec<i64>>,
    num_target_layers: Option<usize>,
    block_size: Option<usize>,
    mask_token_id: Option<u32>,
    sample_from_anchor: Option<bool>,
    is_causal: Option<bool>,
    causal: Option<bool>,
    sliding_window_non_causal: Option<bool>,
    markov_rank: Option<usize>,
    markov_head_type: Option<String>,
    enable_confidence_head: Option<bool>,
    confidence_head_with_markov: Option<bool>,
    draft_vocab_size: Option<usize>,
    #[serde(default)]
    architectures: Vec<String>,
    speculators_model_type: Option<String>,
}

impl BlockKeys {
    fn fail<T>(&self, key: &str, problem: impl Display) -> Result<T> {
        Err(ModelError::config(&self.path, key, problem))
    }

    /// Refuses drafters that are not computed here.
    fn check_known(&self) -> Result<()> {
        let Self { architectures, speculators_model_type, markov_head_type, .. } = self;
        if architectures.iter().chain(speculators_model_type).any(|it| is_class(it, "dflash2")) {
            let key = if speculators_model_type.is_some() { METHOD } else { "architectures" };
            let problem = "names DFlash2, whose convolutions and candidate selector are not computed; hint: use \
                           a DFlash or DSpark drafter";
            return self.fail(key, problem);
        }
        if let Some(other) = markov_head_type.as_ref().filter(|form| *form != "vanilla")
            && self.markov_rank() > 0
        {
            let problem = format!(
                "is `{other}`, and only `vanilla` Markov heads are computed; hint: llama.cpp and vLLM refuse \
                 it too"
            );
            return self.fail(MARKOV_TYPE, problem);
        }
        if self.markov_rank() > MOST_RANK {
            let problem = format!("is {}, expected at most {MOST_RANK}", self.markov_rank());
            return self.fail("markov_rank", problem);
        }
        if self.path.with_file_name(MASK_EMBEDDING).exists() {
            let problem = format!(
                "has an embedding of its own in `{MASK_EMBEDDING}`, and only embeddings of the target are used"
            );
            return self.fail("mask_token_id", problem);
        }
        Ok(())
    }

    fn markov_rank(&self) -> usize {
        self.markov_rank.unwrap_or(0)
    }

    /// Returns whether row i predicts the token after its position.
    fn is_anchor_first(&self) -> Result<bool> {
        let problem = "is missing, and runtimes take it differently; hint: set it to true if the anchor's row \
                       predicts the next token, as in DSpark, or else to false";
        self.sample_from_anchor.map_or_else(|| self.fail(LAYOUT, problem), Ok)
    }

    /// Returns whether rows attend only to earlier rows in all layers, as in vLLM: if no key says so,
    /// layers with a window are causal, and others are not. Sets what rows see in the window.
    fn is_causal(&self, window: Option<&mut WindowSpec>) -> bool {
        let is_method = |name| self.speculators_model_type.as_deref() == Some(name);
        let of_method = || !self.sliding_window_non_causal.unwrap_or(true);
        let given = self.is_causal.or(self.causal);
        let given = given.or_else(|| is_method("dflash").then(of_method));
        window.is_some_and(|window| {
            window.sees_ahead = given == Some(false);
            given.is_none() && !window.layers.contains(&false)
        }) || given == Some(true)
    }

    /// Reads for each state the number of the target's layers before it.
    fn target_layers(&self) -> Result<Vec<usize>> {
        let (key, first, ids) = match (&self.target_layer_ids, &self.aux_hidden_state_layer_ids) {
            (Some(ids), _) => (LAYER_IDS, 1, ids),
            (None, Some(ids)) => (INPUT_IDS, 0, ids),
            (None, None) => {
                return self.fail(LAYER_IDS, "is missing, expected a list of the target's layers");
            }
        };
        let layer = |id: &i64| usize::try_from(id.checked_add(first)?).ok();
        match ids.iter().map(layer).collect::<Option<Vec<usize>>>() {
            Some(layers) if (1..layers.len()).any(|at| layers[..at].contains(&layers[at])) => {
                self.fail(key, format!("is {ids:?}, which names a layer twice"))
            }
            Some(layers) if !layers.is_empty() && layers.len() <= MOST_ROWS => Ok(layers),
            _ => self.fail(key, format!("is {ids:?}, expected 1 to {MOST_ROWS} layers")),
        }
    }

    /// Reads the number of rows of a block and the mask token.
    fn block(&self, is_anchor_first: bool, vocab_size: usize) -> Result<(usize, u32)> {
        let least = if is_anchor_first { 1 } else { 2 };
        let block_size = match self.block_size {
            Some(size) if (least..=MOST_ROWS).contains(&size) => size,
            Some(size) => {
                let problem = format!("is {size}, expected {least} to {MOST_ROWS} rows");
                return self.fail("block_size", problem);
            }
            None => return self.fail("block_size", "is missing, expected the rows of a block"),
        };
        match self.mask_token_id {
            Some(id) if (id as usize) < vocab_size => Ok((block_size, id)),
            Some(id) => {
                self.fail("mask_token_id", format!("is {id}, expected an id below {vocab_size}"))
            }
            None => self.fail("mask_token_id", "is missing, expected the id of the mask token"),
        }
    }

    fn confidence(&self, reader: &WeightReader) -> ConfidenceHead {
        let has_tensor = reader.shape(&format!("{CONFIDENCE}.weight")).is_some();
        let is_enabled = self.enable_confidence_head.unwrap_or(has_tensor);
        let reads_token = self.confidence_head_with_markov.unwrap_or(true);
        match (is_enabled, reads_token && self.markov_rank() > 0) {
            (false, _) => ConfidenceHead::Absent,
            (true, false) => ConfidenceHead::OfRow,
            (true, true) => ConfidenceHead::OfRowAndToken,
        }
    }
}

/// Returns whether the name of a class or method contains `part`, in any case.
fn is_class(name: &str, part: &str) -> bool {
    name.to_ascii_lowercase().contains(part)
}

impl BlockDrafterConfig {
    /// Returns whether a `config.json` belongs to a block drafter, of a kind that is read or refused.
    pub fn is_of(config: &Map<String, Value>) -> bool {
        let classes = config.get("architectures").and_then(Value::as_array).into_iter().flatten();
        let mut names = classes.chain(config.get(METHOD)).filter_map(Value::as_str);
        config.contains_key(LAYOUT)
            || config.contains_key(DFLASH)
            || names.any(|name| is_class(name, "dspark") || is_class(name, "dflash"))
    }

    /// Reads the configuration of a drafter.
    ///
    /// # Errors
    /// If a file is missing or malformed, a key contradicts the tensors, or the drafter is of a kind
    /// that is not computed here.
    pub fn from_dir(dir: impl Into<DrafterDir>) -> Result<Self> {
        Self::beside(dir, 0)
    }

    /// Reads the keys of a drafter's `config.json`, with those of nested tables beside the others.
    ///
    /// # Errors
    /// If the file is missing or malformed, or an ignored key is absent.
    pub fn keys(dir: &DrafterDir) -> Result<Map<String, Value>> {
        Ok(dir.read_keys(&BlockForm::KEYS)?.keys)
    }

    /// Returns the default of [`Self::target_layers`] for a draft of `num_layers` layers: the outputs
    /// of as many layers, spread evenly from the second to the last but two, as in DFlash. If these are
    /// too few, the layers are spread over the whole target.
    pub fn default_layers(num_layers: usize, num_target_layers: usize) -> Vec<usize> {
        let (mut first, mut last) = (1, num_target_layers.saturating_sub(3).max(1));
        if num_layers == 1 {
            return vec![(num_target_layers / 2 + 1).min(num_target_layers)];
        }
        if last - first + 1 < num_layers {
            (first, last) = (0, num_target_layers.saturating_sub(1));
        }
        let at = |nth: usize| (2 * nth * (last - first) + num_layers - 1) / (2 * (num_layers - 1));
        let mut layers: Vec<usize> =
            (0..num_layers).map(|nth| (first + at(nth) + 1).min(num_target_layers)).collect();
        layers.dedup();
        layers
    }

    /// Configures an anchor-first, causal drafter of the target's width with `num_layers` Qwen 3
    /// layers, no Markov head and no confidence head.
    pub fn new(target: &ModelConfig, num_layers: usize, mask_token_id: u32) -> Self {
        let ModelConfig { shape, spec, .. } = target;
        let mut model =
            ModelConfig::qwen3(ModelShape { num_layers, ..shape.clone() }, spec.mlp.width);
        model.spec.norm.epsilon = spec.norm.epsilon;
        model.spec.rope.theta = spec.rope.theta;
        let layers = Self::default_layers(num_layers, shape.num_layers);
        let own = BlockForm { mask_token_id, ..BlockForm::default() };
        Self { num_target_layers: Some(shape.num_layers), ..Self::of(model, layers, own) }
    }

    /// Returns the number of candidates of the drafter in `dir` if its rows see the whole block. Then
    /// the candidates of a shorter block differ. `None` for other drafters and unreadable ones.
    pub fn whole_block(dir: &DrafterDir) -> Option<usize> {
        let config = Self::from_dir(dir).ok().filter(|config| !config.is_causal)?;
        Some(config.num_candidates())
    }

    /// Returns the greatest number of candidates in a round.
    pub fn num_candidates(&self) -> usize {
        self.block_size - self.num_rows_before()
    }

    /// Counts the rows of a block that predict nothing.
    pub(super) fn num_rows_before(&self) -> usize {
        usize::from(!self.is_anchor_first)
    }

    pub(super) fn markov(&self) -> Option<[LinearSpec; 2]> {
        let (rank, vocab_size) = (self.markov_rank, self.model.shape.vocab_size);
        let both = || {
            [
                LinearSpec::matrix(MARKOV_IN, rank, vocab_size),
                LinearSpec::matrix(MARKOV_OUT, rank, self.num_draft_tokens()),
            ]
        };
        (rank > 0).then(both)
    }

    pub(super) fn confidence_spec(&self) -> Option<LinearSpec> {
        let width = self.model.shape.hidden_size;
        let inputs = match self.confidence {
            ConfidenceHead::Absent => return None,
            ConfidenceHead::OfRow => width,
            ConfidenceHead::OfRowAndToken => width + self.markov_rank,
        };
        Some(LinearSpec { has_bias: true, ..LinearSpec::matrix(CONFIDENCE, inputs, 1) })
    }

    /// Initialises a drafter to train for a target, from numbers that `draw` gives, uniform from 0
    /// to 1. The Markov head adds nothing at first.
    pub fn init_for(
        &self,
        target: &CausalLm,
        device: &Device,
        draw: impl FnMut() -> f64,
    ) -> BlockDrafter {
        let drafter = self.init_from(device, draw);
        let markov = drafter.markov.map(|[vectors, out]| {
            let weight = Param::from_tensor(out.weight.val().zeros_like());
            [vectors, Linear { weight, ..out.tensors }.into()]
        });
        BlockDrafter { markov, ..drafter }.with_mask_of(target)
    }
}

impl BlockDrafter {
    /// Drops the confidence head.
    #[must_use]
    pub fn without_confidence(self) -> Self {
        Self { confidence: None, ..self }
    }

    /// Keeps the target's embedding of the mask token, which training needs.
    #[must_use]
    pub fn with_mask_of(self, target: &CausalLm) -> Self {
        let (place, _) = target.embed_ids(&[self.config.mask_token_id]).into_parts();
        let mask = place.into_host().values[..self.hidden_size()].to_vec();
        Self { mask: Some(mask), ..self }
    }
}

impl DraftForm for BlockForm {
    const KIND: &'static str = "block";
    const KEYS: DraftKeys = DraftKeys {
        own: "architectures aux_hidden_state_layer_ids block_size causal confidence_head_with_markov draft_vocab_size \
              enable_confidence_head is_causal markov_head_type markov_rank mask_token_id num_target_layers \
              sample_from_anchor shift_label sliding_window_non_causal speculators_model_type target_layer_ids \
              use_confidence_head",
        layers: (LAYER_IDS, -1),
        reads_last: true,
        table: DFLASH,
        table_decides: true,
        has_families: false,
        dropped_prefix: "model.",
        other_prefix: ("", ""),
        // Only z-lab's form of DFlash, and DSpark in DeepSpec's and SpecForge's forms, have a layout on
        // which all agree.
        dialects: &[
            DraftDialect::named("shift_label", LAYOUT),
            DraftDialect::named("use_confidence_head", "enable_confidence_head"),
            DraftDialect::defaulting(["markov_rank", METHOD], (LAYOUT, "true")),
            DraftDialect::defaulting([DFLASH, ""], (LAYOUT, "false")),
        ],
    };

    fn parts(config: &BlockDrafterConfig) -> Parts {
        let ModelConfig { shape, spec, .. } = &config.model;
        let (width, num_tokens) = (shape.hidden_size, config.num_draft_tokens());
        let layer = |number| (spec.layer(number), format!("layers.{number}"));
        let head = |_| LinearSpec::matrix(LM_HEAD, width, num_tokens);
        Parts {
            fc: Some(LinearSpec::matrix(FC, config.target_layers.len() * width, width)),
            input_norm: Some(CONTEXT_NORM),
            lm_head: config.draft_vocabulary.as_ref().map(head),
            is_head_first: true,
            markov: config.markov(),
            confidence: config.confidence_spec(),
            ..Parts::of_layers((0..shape.num_layers).map(layer))
        }
    }

    fn read(files: &mut DraftFiles<Self>) -> Result<()> {
        let own = BlockKeys { path: files.dir.join("config.json"), ..files.own_keys()? };
        own.check_known()?;
        if !files.faults.is_empty() {
            return Err(files.faults.remove(0).error);
        }
        let model = &files.config.model;
        let vocab_size = model.shape.vocab_size;
        let is_anchor_first = own.is_anchor_first()?;
        let (block_size, mask_token_id) = own.block(is_anchor_first, vocab_size)?;
        files.config.target_layers = own.target_layers()?;
        files.config.own = Self {
            block_size,
            mask_token_id,
            is_anchor_first,
            is_causal: own.is_causal(files.config.model.spec.window.as_mut()),
            markov_rank: own.markov_rank(),
            confidence: own.confidence(&files.reader),
        };
        files.config.num_target_layers = own.num_target_layers;
        match own.draft_vocab_size {
            Some(size) if size < vocab_size => files.read_offsets(size),
            None if files.reader.shape(OFFSETS).is_some() => {
                let problem = format!(
                    "is missing, but the weights have a tensor `{OFFSETS}`; hint: set it to the number of its \
                     entries"
                );
                files.fault(DraftFaultKind::SurplusOffsets, "draft_vocab_size", problem);
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the keys in DeepSpec's form, with every key that some runtime needs.
    fn keys(config: &BlockDrafterConfig) -> Vec<(&'static str, Option<Value>)> {
        let ids = config.target_layers.iter().map(|layer| *layer as i64 - 1);
        let has_head = config.confidence != ConfidenceHead::Absent;
        let reads_token = config.confidence == ConfidenceHead::OfRowAndToken;
        let window = config.model.spec.window.as_ref();
        let kind = |number: usize| match window.is_some_and(|window| window.layers[number]) {
            true => "sliding_attention",
            false => "full_attention",
        };
        let types: Vec<&str> = (0..config.model.shape.num_layers).map(kind).collect();
        // Without the key, only layers with a window are causal.
        let follows_types = !config.is_causal && window.is_some_and(|window| !window.sees_ahead);
        let num_tokens = config.vocabulary_size();
        let given = [
            ("architectures", json!([CLASS])),
            ("block_size", json!(config.block_size)),
            ("mask_token_id", json!(config.mask_token_id)),
            (LAYOUT, json!(config.is_anchor_first)),
            ("is_causal", json!(config.is_causal)),
            ("markov_rank", json!(config.markov_rank)),
            (MARKOV_TYPE, json!("vanilla")),
            ("enable_confidence_head", json!(has_head)),
            ("confidence_head_with_markov", json!(reads_token)),
            // A setting of DeepSpec's trainer, without which its class cannot be built.
            ("num_anchors", json!(512)),
            (LAYER_IDS, json!(ids.collect::<Vec<i64>>())),
            ("layer_types", json!(types)),
            ("tie_word_embeddings", json!(false)),
        ];
        let given = given.into_iter().filter(|(key, _)| *key != "is_causal" || !follows_types);
        let given = given.map(|(key, value)| (key, Some(value)));
        let optional = [
            ("sliding_window", window.map(|window| window.size.into())),
            ("use_sliding_window", window.map(|_| true.into())),
            ("num_target_layers", config.num_target_layers.map(Value::from)),
            ("draft_vocab_size", num_tokens.map(Value::from)),
        ];
        given.chain(optional).collect()
    }

    /// Computes the rows of all blocks. The block of the draft that begins at position q has its
    /// anchor at token q + 1 and reads the contexts of the tokens up to q. Row k predicts token
    /// q + 2 + k, and its Markov vector is that of token q + 1 + k of the response.
    fn unrolled(network: &BlockDrafter, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        let DraftNetwork { stack, fc, input_norm, markov, mask, .. } = network;
        let UnrolledInputs { states, next_ids, embedded, begun, num_steps, lengths, .. } = inputs;
        let embedded = embedded.expect("it reads embeddings");
        let [batch, seq, hidden_size] = embedded.dims();
        let (dtype, device) = (embedded.dtype(), stack.device());
        let plan = DraftPlan { begun, seq, num_steps, rows_ahead: 1, lengths };
        let has =
            |reach: usize| stack.layers.iter().any(|layer| layer.both_parts().0.reach() == reach);
        let of_reach = stack.reaches.iter().enumerate().map(|(number, reach)| {
            has(number).then(|| Drafts::new(plan, reach, (dtype.into(), &device)))
        });
        let of_reach: Vec<Option<Drafts>> = of_reach.collect();
        let drafts = of_reach.iter().flatten().next().expect("it has layers");
        let states = states.into_iter().map(|states| drafts.known_rows(states)).collect();
        let fused = part(fc).forward(Tensor::cat(states, 1));
        let contexts = part(input_norm).forward(fused);
        let anchors = drafts.known_rows(embedded).select(0, drafts.begun.clone());
        let [num_tokens, _] = anchors.dims();
        let mask = mask.as_ref().expect("the drafter was made for training");
        let mask = Tensor::<1>::from_floats(mask.as_slice(), &anchors.device()).cast(dtype);
        let mask = mask.unsqueeze::<2>().expand([(num_steps - 1) * num_tokens, hidden_size]);
        let mut rows = Tensor::cat(vec![anchors, mask], 0);
        for layer in &stack.layers {
            let (attention, mlp) = layer.both_parts();
            let normed = attention.normed_input(rows.clone());
            let drafts = of_reach[attention.reach()].as_ref().expect("a layer has this reach");
            rows = rows + attention.of_blocks(normed, contexts.clone(), drafts);
            let added = mlp.forward(rows.clone().unsqueeze()).squeeze_dim::<2>(0);
            rows = rows + added;
        }
        let normed = stack.norm.forward(rows);
        let vectors = markov.as_ref().map(|[vectors, _]| {
            let ids = next_ids.reshape([batch * seq]).select(0, drafts.known.clone());
            vectors.weight.val().transpose().select(0, ids.select(0, drafts.begun.clone()))
        });
        let steps = (0..num_steps).map(|step| {
            let rows = normed.clone().narrow(0, step * num_tokens, num_tokens);
            match &vectors {
                Some(vectors) => Tensor::cat(vec![rows, vectors.clone()], 1),
                None => rows,
            }
        });
        steps.collect()
    }

    fn num_ahead(config: &BlockDrafterConfig) -> usize {
        config.block_size
    }

    /// Returns whether a tensor is a copy of the target's, a part of the vocabulary, a head that is
    /// switched off, or frequencies that old trainers store.
    fn is_beside(config: &BlockDrafterConfig, _dir: &DrafterDir, tensor: &str) -> bool {
        let is_of = |name: &str| tensor.strip_suffix(".weight") == Some(name);
        let is_copy = is_of(EMBEDDING) || config.draft_vocabulary.is_none() && is_of(LM_HEAD);
        let is_off = config.confidence == ConfidenceHead::Absent && tensor.starts_with(CONFIDENCE);
        let is_old = tensor.ends_with("rotary_emb.inv_freq");
        is_copy || is_off || is_old || [OFFSETS, MASK].contains(&tensor)
    }
}

/// Measures the relative distance (root mean square) of a drafter's `embed_tokens` or `lm_head` from that of
/// a target with its directory; `None` if the drafter's file does not have the matrix.
///
/// # Errors
/// If a file cannot be read, or the shapes differ.
pub fn copy_distance(
    dir: &Path,
    matrix: &str,
    (target_dir, target): (&Path, &ModelConfig),
) -> Result<Option<f64>> {
    let (mut reader, name) =
        (WeightReader::open_dir(dir)?.without_prefix("model."), format!("{matrix}.weight"));
    let Some(shape) = reader.shape(&name).map(<[usize]>::to_vec) else { return Ok(None) };
    let names = &target.spec.names;
    let of_target = match matrix == LM_HEAD && !target.spec.tie_word_embeddings {
        true => names.lm_head,
        false => names.embedding,
    };
    let mut ends = WeightReader::open_ends(target_dir, names)?;
    let theirs = ends.take(&format!("{of_target}.weight"), &shape)?;
    let own = reader.take(&name, &shape)?;
    let sum =
        |terms: &mut dyn Iterator<Item = f32>| terms.map(|it| f64::from(it).powi(2)).sum::<f64>();
    let apart = sum(&mut own.iter().zip(&theirs).map(|(own, theirs)| own - theirs));
    Ok(Some((apart / sum(&mut theirs.iter().copied())).sqrt()))
}
