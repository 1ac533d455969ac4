//! The configuration of a block drafter: its shape, the tensors that follow from it, and its fit to a target.

use std::path::Path;
use std::sync::Arc;

use burn::nn::Initializer;
use burn::tensor::Device;
use serde_json::{Map, Value};

use super::BlockDrafter;
use crate::config::ModelConfig;
use crate::decoder::source::{RandomSource, WeightSource};
use crate::decoder::stack::StackSpec;
use crate::draft_vocabulary::DraftVocabulary;
use crate::drafter_keys::DrafterDir;
use crate::error::ModelError;
use crate::frozen::{PackableLinear, PackableNorm, PackableStack};
use crate::spec::{LinearSpec, ModelShape};
use crate::weights::WeightDtype;

/// The names of the tensors in published drafters.
pub(super) const FC: &str = "fc";
pub(super) const CONTEXT_NORM: &str = "hidden_norm";
pub(super) const NORM: &str = "norm";
pub(super) const LAYERS: &str = "layers";
pub(super) const LM_HEAD: &str = "lm_head";
pub(super) const MARKOV_IN: &str = "markov_head.markov_w1";
pub(super) const MARKOV_OUT: &str = "markov_head.markov_w2";
pub(super) const CONFIDENCE: &str = "confidence_head.proj";

/// A drafter's shape and provenance: `config.json` of its directory.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockDrafterConfig {
    /// For each hidden state that the drafter reads, the number of the target's layers before it.
    /// The order is that of the inputs of `fc`.
    pub target_layers: Vec<usize>,
    /// The number of the target's layers, if known.
    pub num_target_layers: Option<usize>,
    /// A model with the drafter's layers, and the target's width and vocabulary.
    pub model: ModelConfig,
    /// The tokens that the drafter may draft; `None` for all.
    pub draft_vocabulary: Option<DraftVocabulary>,
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
    /// The type of the weights in the drafter's file.
    pub dtype: WeightDtype,
    /// The SHA-256 of the target that the drafter was trained for, if known.
    pub target_hash: Option<String>,
    /// The record of the training, without the settings above.
    pub training: Map<String, Value>,
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

impl BlockDrafterConfig {
    /// Returns the default of [`Self::target_layers`] for a draft of `num_layers` layers: the outputs
    /// of as many layers, spread evenly from the second to the last but two, as in DFlash.
    pub fn default_layers(num_layers: usize, num_target_layers: usize) -> Vec<usize> {
        let (first, last) = (1, num_target_layers.saturating_sub(3).max(1));
        if num_layers == 1 {
            return vec![(num_target_layers / 2 + 1).min(num_target_layers)];
        }
        let at = |nth: usize| (2 * nth * (last - first) + num_layers - 1) / (2 * (num_layers - 1));
        (0..num_layers).map(|nth| (first + at(nth) + 1).min(num_target_layers)).collect()
    }

    /// Configures an anchor-first, causal drafter of the target's width with `num_layers` Qwen 3
    /// layers, no Markov head and no confidence head.
    pub fn new(target: &ModelConfig, num_layers: usize, mask_token_id: u32) -> Self {
        let ModelConfig { shape, spec, .. } = target;
        let mut model =
            ModelConfig::qwen3(ModelShape { num_layers, ..shape.clone() }, spec.mlp.width);
        model.spec.norm.epsilon = spec.norm.epsilon;
        model.spec.rope.theta = spec.rope.theta;
        Self {
            target_layers: Self::default_layers(num_layers, shape.num_layers),
            num_target_layers: Some(shape.num_layers),
            model,
            draft_vocabulary: None,
            block_size: 7,
            mask_token_id,
            is_anchor_first: true,
            is_causal: true,
            markov_rank: 0,
            confidence: ConfidenceHead::Absent,
            dtype: WeightDtype::F32,
            target_hash: None,
            training: Map::new(),
        }
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

    /// Counts the tokens that the drafter may draft.
    pub fn num_draft_tokens(&self) -> usize {
        let all = self.model.shape.vocab_size;
        self.draft_vocabulary.as_ref().map_or(all, |vocabulary| vocabulary.ids().len())
    }

    /// Counts the parameters of the drafter, with its own LM head if it has one.
    pub fn num_parameters(&self) -> usize {
        let ModelConfig { shape, spec, .. } = &self.model;
        let linears = [Some(self.fc()), self.own_head(), self.confidence()].into_iter().flatten();
        let linears = linears.chain(self.markov().into_iter().flatten());
        linears.map(|linear| linear.num_parameters()).sum::<usize>()
            + self.stack().num_parameters()
            + spec.norm.num_parameters(shape.hidden_size)
    }

    /// Specifies the draft layers and the norm of their output.
    pub(super) fn stack(&self) -> StackSpec<'_> {
        let layer = |number| (self.model.spec.layer(number), format!("{LAYERS}.{number}"));
        let layers = (0..self.model.shape.num_layers).map(layer).collect();
        StackSpec { model: &self.model, layers, norm: NORM }
    }

    pub(super) fn fc(&self) -> LinearSpec {
        let width = self.model.shape.hidden_size;
        LinearSpec::matrix(FC, self.target_layers.len() * width, width)
    }

    pub(super) fn own_head(&self) -> Option<LinearSpec> {
        let (width, num_tokens) = (self.model.shape.hidden_size, self.num_draft_tokens());
        self.draft_vocabulary.as_ref().map(|_| LinearSpec::matrix(LM_HEAD, width, num_tokens))
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

    pub(super) fn confidence(&self) -> Option<LinearSpec> {
        let width = self.model.shape.hidden_size;
        let inputs = match self.confidence {
            ConfidenceHead::Absent => return None,
            ConfidenceHead::OfRow => width,
            ConfidenceHead::OfRowAndToken => width + self.markov_rank,
        };
        Some(LinearSpec { has_bias: true, ..LinearSpec::matrix(CONFIDENCE, inputs, 1) })
    }

    /// Checks that the drafter in `dir` fits a target.
    ///
    /// # Errors
    /// If the width or the vocabulary differs, the target lacks a layer that the drafter reads, or
    /// its context is longer.
    pub fn check_target(&self, dir: &Path, target: &ModelShape) -> Result<(), ModelError> {
        let own = &self.model.shape;
        let fail =
            |key, problem| Err(ModelError::Config { path: dir.join("config.json"), key, problem });
        for (key, found, expected) in [
            ("hidden_size", own.hidden_size, target.hidden_size),
            ("vocab_size", own.vocab_size, target.vocab_size),
        ] {
            if found != expected {
                let problem = format!(
                    "is {found}, but the target's is {expected}: the drafter was made for another target; hint: \
                     use a drafter that was trained for this target"
                );
                return fail(key, problem);
            }
        }
        if let Some(layer) = self.target_layers.iter().find(|layer| **layer > target.num_layers) {
            let problem = format!(
                "names the output of layer {}, counted from 0, but the target has {} layers",
                layer - 1,
                target.num_layers
            );
            return fail("target_layer_ids", problem);
        }
        if own.context < target.context {
            let problem = format!(
                "is {}, but the target reads {} tokens: raise it to that",
                own.context, target.context
            );
            return fail("max_position_embeddings", problem);
        }
        Ok(())
    }

    /// Initialises random weights with burn's random numbers: linear layers are uniform within
    /// ±1/√inputs (torch's default for `nn.Linear`), and norms are ones.
    pub fn init(&self, device: &Device) -> BlockDrafter {
        let matrix = |linear: &LinearSpec| {
            let bound = 1.0 / (linear.inputs as f64).sqrt();
            let uniform = Initializer::Uniform { min: -bound, max: bound };
            uniform.init([linear.inputs, linear.outputs], device)
        };
        let Ok(drafter) = self.build(&mut RandomSource { device, matrix });
        drafter
    }

    /// Builds the drafter with the weights of `source`.
    pub(super) fn build<S: WeightSource>(&self, source: &mut S) -> Result<BlockDrafter, S::Error> {
        let context_norm = PackableNorm::build(CONTEXT_NORM, &self.model, source)?;
        let mut linear = |linear: LinearSpec| PackableLinear::build(&linear, source);
        let fc = linear(self.fc())?;
        let lm_head = self.own_head().map(&mut linear).transpose()?;
        let markov = match self.markov() {
            Some([token_in, out]) => Some([linear(token_in)?, linear(out)?]),
            None => None,
        };
        let confidence = self.confidence().map(&mut linear).transpose()?;
        Ok(BlockDrafter {
            fc,
            context_norm,
            stack: PackableStack::build(&self.stack(), source)?,
            lm_head,
            markov,
            confidence,
            narrow_head: None,
            narrow_markov: None,
            mask: None,
            config: Arc::new(self.clone()),
        })
    }
}
