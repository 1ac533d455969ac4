//! Medusa's heads (Medusa-1, Cai et al. 2024, section 2.1), which read the target's last hidden state
//! and each predict a token at another distance.
//!
//! Let h be what the target's LM head reads at position q: the last state after the final norm. The
//! LM head gives logits of token q + 1, and head i, counted from 0, those of token q + 2 + i:
//! ```text
//! x = h, then x + SiLU(W · x + b) for each residual block (one in the paper)
//! logits = U · x          (U: the head's own LM head, or the target's)
//! ```
//! A head reads no token, so one row gives the logits of a whole round, for chains and trees.
//!
//! A file contains only heads; their norm is the target's. We write the names of the authors' v1.3
//! files, `HEAD.BLOCK.linear.weight` and, after the last block, `HEAD.BLOCK.weight` for U. Heads
//! without it use the target's LM head (version 2, as in TGI). Whole models of Medusa-2
//! (`medusa_head.`) and Model-Optimizer (`medusa_heads.`) are read too; their other tensors are
//! those of a target. The tensors, not the keys, say how many heads and blocks there are, because
//! the authors' `config.json` is wrong about it.

#[cfg(test)]
mod tests;

use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{Device, FloatDType, Tensor};
use draftsmith_files::write_json;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::causal_lm::CausalLm;
use crate::decoder::norm::Norm;
use crate::decoder::source::{CheckpointSource, RandomSource, WeightSource, named_linears};
use crate::error::{ModelError, Result, read_json};
use crate::frozen::{Form, Packable, PackableLinear};
use crate::packed;
use crate::precision::cast_parameters;
use crate::rows::Rows;
use crate::self_draft::uniform_matrix;
use crate::spec::{LinearSpec, ModelShape};
use crate::state_network::{StateNetwork, UnrolledInputs, copied_head};
use crate::weights::{self, NamedTensor, WeightDtype, WeightReader};

/// The prefixes of heads in the file of a whole model.
const PREFIXES: [&str; 2] = ["medusa_head.", "medusa_heads."];
/// The name of a block's matrix.
const LINEAR: &str = "linear";
/// The names of the LM head after each number of blocks, of which a head has at most 8.
const LM_HEADS: [&str; 9] = ["0", "1", "2", "3", "4", "5", "6", "7", "8"];

/// The shape and provenance of heads: `config.json` of their directory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MedusaConfig {
    /// The number of heads.
    #[serde(rename = "medusa_num_heads")]
    pub num_heads: usize,
    /// The number of residual blocks of each head, 1 to 8.
    #[serde(rename = "medusa_num_layers")]
    pub num_blocks: usize,
    /// The number of the target's layers; the heads read the state after the last.
    #[serde(skip)]
    pub num_target_layers: usize,
    /// The width of the target's hidden states.
    pub hidden_size: usize,
    /// The vocabulary of the heads' own LM heads; `None` if they use the target's LM head.
    pub vocab_size: Option<usize>,
    /// The type of the weights in the file.
    #[serde(skip)]
    pub dtype: WeightDtype,
    /// The SHA-256 of the target that the heads were trained for, if known.
    pub target_hash: Option<String>,
    /// The record of the training.
    pub training: Map<String, Value>,
}

impl MedusaConfig {
    /// Configures the paper's heads, of one block each and with LM heads of their own.
    pub fn new(target: &ModelShape, num_heads: usize) -> Self {
        Self {
            num_heads,
            num_blocks: 1,
            num_target_layers: target.num_layers,
            hidden_size: target.hidden_size,
            vocab_size: Some(target.vocab_size),
            ..Self::default()
        }
    }

    /// Reads the configuration of the heads in a directory, for a target of `num_layers` layers.
    ///
    /// # Errors
    /// If a file is missing or malformed, or the weights are not those of heads.
    pub fn beside(dir: &Path, num_layers: usize) -> Result<Self> {
        Self::read(dir, num_layers).map(|(config, _)| config)
    }

    /// Reads the configuration, and opens the weights.
    fn read(dir: &Path, num_target_layers: usize) -> Result<(Self, WeightReader)> {
        let keys: Self = read_json(&dir.join("config.json"))?;
        let mut reader = WeightReader::open_dir(dir)?;
        let is_prefix = |prefix: &&str| reader.names().any(|name| name.starts_with(*prefix));
        if let Some(prefix) = PREFIXES.into_iter().find(is_prefix) {
            reader.ignore(|name| !name.starts_with(prefix));
            reader = reader.without_prefix(prefix);
        }
        let first = |name: String| reader.shape(&name)?.first().copied();
        let width = |head, block| first(format!("{head}.{block}.linear.weight"));
        let num_heads = (0..).take_while(|head| width(*head, 0).is_some()).count();
        let num_blocks = (0..LM_HEADS.len() - 1).take_while(|nth| width(0, *nth).is_some()).count();
        let hidden_size = width(0, 0).ok_or_else(|| reader.missing("0.0.linear.weight"))?;
        let vocab_size = first(format!("0.{num_blocks}.weight"));
        let dtype = WeightDtype::beside(&reader);
        let sizes = Self { num_heads, num_blocks, num_target_layers, hidden_size, ..keys };
        Ok((Self { vocab_size, dtype, ..sizes }, reader))
    }

    /// Counts the parameters.
    pub fn num_parameters(&self) -> usize {
        let of_blocks = self.num_blocks * (self.hidden_size + 1);
        self.num_heads * self.hidden_size * (of_blocks + self.vocab_size.unwrap_or(0))
    }

    fn block(&self) -> LinearSpec {
        let width = self.hidden_size;
        LinearSpec { has_bias: true, ..LinearSpec::matrix(LINEAR, width, width) }
    }

    fn lm_head(&self) -> Option<LinearSpec> {
        let name = LM_HEADS[self.num_blocks];
        self.vocab_size.map(|size| LinearSpec::matrix(name, self.hidden_size, size))
    }

    fn build<S: WeightSource>(&self, source: &mut S) -> Result<Medusa, S::Error> {
        let linear = |prefix: String, spec: LinearSpec, source: &mut S| {
            Packable::build(
                source,
                |it| it.linear(&prefix, &spec),
                |it| it.linears(&prefix, &[spec]),
            )
        };
        let heads = (0..self.num_heads).map(|head| {
            let blocks = (0..self.num_blocks).map(|nth| format!("{head}.{nth}"));
            let blocks = blocks.map(|prefix| linear(prefix, self.block(), source));
            let blocks = blocks.collect::<Result<_, _>>()?;
            let lm_head = self.lm_head().map(|spec| linear(head.to_string(), spec, source));
            Ok(Head { blocks, lm_head: lm_head.transpose()? })
        });
        Ok(Medusa { heads: heads.collect::<Result<_, _>>()?, norm: None })
    }

    /// Initialises heads with numbers in [0, 1) from `draw`. W is zero, as in the authors' code, and
    /// biases and LM heads are uniform within ±1/√hidden. The authors copy the target's LM head
    /// ([`Medusa::with_heads_of`]).
    pub fn init_from(&self, device: &Device, mut draw: impl FnMut() -> f64) -> Medusa {
        let bound = (self.hidden_size as f64).powf(-0.5);
        let mut drawn = |shape, bound| uniform_matrix(shape, bound, &mut draw, device);
        let matrix = |spec: &LinearSpec| {
            drawn([spec.inputs, spec.outputs], if spec.name == LINEAR { 0.0 } else { bound })
        };
        let Ok(mut heads) = self.build(&mut RandomSource { device, matrix });
        for block in heads.heads.iter_mut().flat_map(|head| &mut head.blocks) {
            let bias = drawn([1, self.hidden_size], bound).val().squeeze_dim::<1>(0);
            block.tensors.bias = Some(Param::from_data(bias.into_data(), device));
        }
        heads
    }
}

/// A head.
#[derive(Module, Debug)]
struct Head {
    blocks: Vec<PackableLinear>,
    /// `None` to use the target's LM head.
    lm_head: Option<PackableLinear>,
}

/// The heads of a target.
#[derive(Module, Debug)]
pub struct Medusa {
    heads: Vec<Head>,
    /// The target's final norm, for training. It is not trained.
    #[module(skip)]
    norm: Option<Norm>,
}

impl Medusa {
    /// Loads heads for a target of shape `target`. `dtype` is the type of computation, which must be
    /// the target's. On an autodiff device the heads can be trained.
    ///
    /// # Errors
    /// If a file is missing, broken or changed since its export, a tensor is missing, extra or
    /// misshapen, or the heads do not fit the target.
    pub fn from_dir(
        dir: &Path,
        target: &ModelShape,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<(MedusaConfig, Self)> {
        let (config, mut reader) = MedusaConfig::read(dir, target.num_layers)?;
        let expected = (target.hidden_size, target.vocab_size);
        let found = (config.hidden_size, config.vocab_size.unwrap_or(expected.1));
        if found != expected {
            return Err(ModelError::Shape(format!(
                "`{}`: the heads' width and vocabulary are {found:?}, but the target's are {expected:?}: they were \
                 made for another target; hint: train heads for this target",
                dir.display()
            )));
        }
        let dtype = dtype.float_dtype();
        let heads = config.build(&mut CheckpointSource { reader: &mut reader, device, dtype })?;
        reader.finish()?;
        weights::check_weights(dir)?;
        Ok((config, heads))
    }

    /// Copies the target's LM head into those of the heads.
    #[must_use]
    pub fn with_heads_of(mut self, target: &CausalLm) -> Self {
        for own in self.heads.iter_mut().flat_map(|head| &mut head.lm_head) {
            *own = copied_head(target, None, &own.weight.device());
        }
        self
    }

    /// Keeps the target's final norm, which training needs.
    #[must_use]
    pub fn with_norm_of(self, target: &CausalLm) -> Self {
        Self { norm: Some(target.last_norm()), ..self }
    }

    /// Returns the number of heads.
    pub fn num_heads(&self) -> usize {
        self.heads.len()
    }

    /// Computes logits of the first `num_heads` heads from the target's last states.
    ///
    /// # Shapes
    /// - states: `[rows, hidden]`, before the target's final norm
    /// - output: `[rows, vocab]` for each head
    pub fn logits(&self, states: Rows, num_heads: usize, target: &CausalLm) -> Vec<Rows> {
        let normed = target.normed(states);
        let of_head = |head: &Head| {
            let rows = head.blocks.iter().fold(normed.clone(), after);
            let own = head.lm_head.as_ref().map(|own| own.logits(&rows, None));
            own.unwrap_or_else(|| target.logits(&rows))
        };
        self.heads[..num_heads].iter().map(of_head).collect()
    }

    /// Lists the tensors in the layout of a file.
    fn named(&self, config: &MedusaConfig) -> Vec<NamedTensor> {
        let mut tensors = Vec::new();
        for (number, head) in self.heads.iter().enumerate() {
            for (nth, block) in head.blocks.iter().enumerate() {
                let block = [(config.block(), &**block)];
                tensors.extend(named_linears(&format!("{number}.{nth}"), block));
            }
            let lm_head = config.lm_head().zip(head.lm_head.as_deref());
            tensors.extend(named_linears(&number.to_string(), lm_head));
        }
        tensors
    }

    /// Writes `model.safetensors` in the configuration's type, then `config.json`.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &MedusaConfig) -> Result<()> {
        let path = dir.join("model.safetensors");
        let hash = weights::write_safetensors(&path, &self.named(config), config.dtype, &[])?;
        weights::write_config(dir, json!(config), hash)
    }

    /// Writes `medusa_lm_head.pt` in f32, then `config.json`, as the authors' class loads them for the
    /// target named `base`. The class needs heads with LM heads of their own.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_authors(&self, dir: &Path, config: &MedusaConfig, base: &str) -> Result<()> {
        weights::write_torch(&dir.join("medusa_lm_head.pt"), &self.named(config))?;
        let keys = json!({
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_blocks,
            "base_model_name_or_path": base,
        });
        Ok(write_json(&dir.join("config.json"), &keys)?)
    }
}

/// Computes `x + SiLU(W · x + b)` of each row x.
fn after(rows: Rows, block: &PackableLinear) -> Rows {
    match block.form() {
        Form::Packed(_) => {
            let added = block.of_rows(rows.clone()).place.into_host();
            rows.on_host(|values, _| packed::add_silu(values, &added.values))
        }
        Form::Tensors(linear) => {
            rows.map_on(&linear.weight.device(), |rows| rows.clone() + silu(linear.forward(rows)))
        }
    }
}

impl StateNetwork for Medusa {
    const KIND: &'static str = "medusa";

    fn to_dtype(&self, dtype: FloatDType) -> Self {
        cast_parameters(self.clone(), dtype)
    }

    fn own_head(&self) -> Option<Tensor<2>> {
        let own = self.heads.iter().map(|head| Some(head.lm_head.as_ref()?.weight.val()));
        own.collect::<Option<Vec<_>>>().map(|all| Tensor::cat(all, 0))
    }

    /// Computes the output of head k as step k, from the state k positions before.
    fn unrolled(&self, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        let states = inputs.states[0].clone().flatten::<2>(0, 1);
        let norm = self.norm.clone().expect("the heads were made for training");
        let normed = norm.to_device(&states.device()).forward(states);
        let add =
            |rows: Tensor<2>, block: &PackableLinear| rows.clone() + silu(block.forward(rows));
        let steps = self.heads[..inputs.num_steps].iter().enumerate();
        let rows = |step| normed.clone().select(0, inputs.begun_rows(step));
        steps.map(|(step, head)| head.blocks.iter().fold(rows(step), add)).collect()
    }
}
