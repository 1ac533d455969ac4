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
use burn::nn::Linear;
use burn::tensor::activation::silu;
use burn::tensor::{Device, FloatDType, Tensor};
use draftsmith_files::write_json;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::causal_lm::CausalLm;
use crate::decoder::norm::Norm;
use crate::decoder::source::{
    CheckpointSource, ShapeSource, WeightSource, named_linears, parameter,
};
use crate::error::{ModelError, Result, read_json};
use crate::frozen::{Form, Packable, PackableLinear};
use crate::packed;
use crate::precision::cast_parameters;
use crate::rows::Rows;
use crate::self_draft::uniform_matrix;
use crate::spec::{LinearSpec, ModelShape};
use crate::state_network::{StateNetwork, UnrolledInputs, copied_head};
use crate::weights::{
    NamedTensor, WeightDtype, WeightReader, check_weights, write_config, write_torch,
    write_with_ids,
};

/// The prefixes of heads in the file of a whole model.
const PREFIXES: [&str; 2] = ["medusa_head.", "medusa_heads."];
/// The names of the LM head after each number of blocks.
const LM_HEADS: [&str; 9] = ["0", "1", "2", "3", "4", "5", "6", "7", "8"];

/// The shape and provenance of heads: `config.json` of their directory.
#[derive(Debug, Clone, PartialEq)]
pub struct MedusaConfig {
    /// The number of heads.
    pub num_heads: usize,
    /// The number of residual blocks of each head, 1 to 8.
    pub num_blocks: usize,
    /// Whether blocks have biases.
    pub has_biases: bool,
    /// The number of the target's layers; the heads read the state after the last.
    pub num_target_layers: usize,
    /// The width of the target's hidden states.
    pub hidden_size: usize,
    /// The vocabulary of the heads' own LM heads; `None` if they use the target's LM head.
    pub vocab_size: Option<usize>,
    /// The type of the weights in the file.
    pub dtype: WeightDtype,
    /// The SHA-256 of the target that the heads were trained for, if known.
    pub target_hash: Option<String>,
    /// The record of the training.
    pub training: Map<String, Value>,
}

/// The keys that are read.
#[derive(Deserialize)]
struct Record {
    target_hash: Option<String>,
    #[serde(default)]
    training: Map<String, Value>,
}

impl MedusaConfig {
    /// Configures the paper's heads, of one block each and with LM heads of their own.
    pub fn new(target: &ModelShape, num_heads: usize) -> Self {
        Self {
            num_heads,
            num_blocks: 1,
            has_biases: true,
            num_target_layers: target.num_layers,
            hidden_size: target.hidden_size,
            vocab_size: Some(target.vocab_size),
            dtype: WeightDtype::F32,
            target_hash: None,
            training: Map::new(),
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
        let Record { target_hash, training } = read_json(&dir.join("config.json"))?;
        let mut reader = WeightReader::open_dir(dir)?;
        let is_prefix = |prefix: &&str| reader.names().any(|name| name.starts_with(*prefix));
        if let Some(prefix) = PREFIXES.into_iter().find(is_prefix) {
            reader.ignore(|name| !name.starts_with(prefix));
            reader = reader.without_prefix(prefix);
        }
        let count = |name: &dyn Fn(usize) -> String| {
            (0..).take_while(|nth| reader.shape(&name(*nth)).is_some()).count()
        };
        let num_heads = count(&|head| format!("{head}.0.linear.weight"));
        let num_blocks = count(&|block| format!("0.{block}.linear.weight"));
        let first = |name: &str| reader.shape(name).and_then(|shape| shape.first().copied());
        let Some(hidden_size) = first("0.0.linear.weight") else {
            return Err(reader.missing("0.0.linear.weight"));
        };
        if num_blocks >= LM_HEADS.len() {
            let most = LM_HEADS.len() - 1;
            let problem = format!("a head has {num_blocks} blocks, expected at most {most}");
            return Err(ModelError::safetensors(&reader.path, problem));
        }
        let config = Self {
            num_heads,
            num_blocks,
            has_biases: first("0.0.linear.bias").is_some(),
            num_target_layers,
            hidden_size,
            vocab_size: first(&format!("0.{num_blocks}.weight")),
            dtype: WeightDtype::beside(&reader),
            target_hash,
            training,
        };
        Ok((config, reader))
    }

    /// Counts the parameters.
    pub fn num_parameters(&self) -> usize {
        let mut source = ShapeSource::default();
        let Ok(_) = self.build(&mut source);
        source.num_parameters()
    }

    /// Checks that the heads in `dir` fit a target.
    ///
    /// # Errors
    /// If the width or the vocabulary differs.
    fn check_target(&self, dir: &Path, target: &ModelShape) -> Result<()> {
        let vocab_size = self.vocab_size.unwrap_or(target.vocab_size);
        for (what, found, expected) in [
            ("width", self.hidden_size, target.hidden_size),
            ("vocabulary size", vocab_size, target.vocab_size),
        ] {
            if found != expected {
                return Err(ModelError::Shape(format!(
                    "`{}`: the heads' {what} is {found}, but the target's is {expected}: they were made for another \
                     target; hint: train heads for this target",
                    dir.display()
                )));
            }
        }
        Ok(())
    }

    fn block(&self) -> LinearSpec {
        let width = self.hidden_size;
        LinearSpec { has_bias: self.has_biases, ..LinearSpec::matrix("linear", width, width) }
    }

    fn lm_head(&self) -> Option<LinearSpec> {
        let named = |vocab_size| {
            LinearSpec::matrix(LM_HEADS[self.num_blocks], self.hidden_size, vocab_size)
        };
        self.vocab_size.map(named)
    }

    fn build<S: WeightSource>(&self, source: &mut S) -> Result<Medusa, S::Error> {
        let linear = |prefix: String, spec: LinearSpec, source: &mut S| {
            let tensors = |it: &mut S| it.linear(&prefix, &spec);
            Packable::build(source, tensors, |it| it.linears(&prefix, &[spec.clone()]))
        };
        let heads = (0..self.num_heads).map(|head| {
            let blocks = 0..self.num_blocks;
            let blocks = blocks.map(|nth| linear(format!("{head}.{nth}"), self.block(), source));
            let blocks = blocks.collect::<Result<_, _>>()?;
            let lm_head = self.lm_head().map(|spec| linear(head.to_string(), spec, source));
            Ok(Head { blocks, lm_head: lm_head.transpose()? })
        });
        Ok(Medusa { heads: heads.collect::<Result<_, _>>()?, norm: None })
    }

    /// Initialises heads as the authors do, with numbers in [0, 1) from `draw`: zeros for W, and
    /// biases that are uniform within ±1/√hidden. LM heads are uniform within the same bound; the
    /// authors copy the target's ([`Medusa::with_heads_of`]).
    pub fn init_from(&self, device: &Device, mut draw: impl FnMut() -> f64) -> Medusa {
        let width = self.hidden_size;
        let mut drawn = |shape| uniform_matrix(shape, (width as f64).powf(-0.5), &mut draw, device);
        let mut linear = |spec: LinearSpec, is_block: bool| -> PackableLinear {
            let zeros = || parameter(vec![0.0; width * width], [width; 2], device, FloatDType::F32);
            let shape = [spec.inputs, spec.outputs];
            let weight = if is_block { zeros() } else { drawn(shape) };
            let bias = spec.has_bias.then(|| {
                Param::from_data(drawn([1, width]).val().reshape([width]).into_data(), device)
            });
            Linear { weight, bias }.into()
        };
        let heads = (0..self.num_heads).map(|_| Head {
            blocks: (0..self.num_blocks).map(|_| linear(self.block(), true)).collect(),
            lm_head: self.lm_head().map(|spec| linear(spec, false)),
        });
        Medusa { heads: heads.collect(), norm: None }
    }

    /// Returns the keys of `config.json`.
    fn to_json(&self) -> Value {
        let mut keys = json!({
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_blocks,
            "hidden_size": self.hidden_size,
            "torch_dtype": self.dtype.config_name(),
        });
        let known = [
            ("target_hash", self.target_hash.as_deref().map(Value::from)),
            ("training", (!self.training.is_empty()).then(|| self.training.clone().into())),
        ];
        for (key, value) in known {
            if let Some(value) = value {
                keys[key] = value;
            }
        }
        keys
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
        config.check_target(dir, target)?;
        let dtype = dtype.float_dtype();
        let heads = config.build(&mut CheckpointSource { reader: &mut reader, device, dtype })?;
        reader.finish()?;
        check_weights(dir)?;
        Ok((config, heads))
    }

    /// Copies the target's LM head into those of the heads.
    #[must_use]
    pub fn with_heads_of(self, target: &CausalLm) -> Self {
        let heads = self.heads.into_iter().map(|head| {
            let copied = |own: PackableLinear| copied_head(target, None, &own.weight.device());
            Head { lm_head: head.lm_head.map(copied), ..head }
        });
        Self { heads: heads.collect(), ..self }
    }

    /// Keeps the target's final norm, which training needs.
    #[must_use]
    pub fn with_norm_of(self, target: &CausalLm) -> Self {
        let heads = self.heads.into_iter().map(|Head { blocks, lm_head }| Head {
            blocks: blocks.into_iter().map(Packable::unpacked).collect(),
            lm_head: lm_head.map(Packable::unpacked),
        });
        Self { heads: heads.collect(), norm: Some(target.last_norm()) }
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
            let rows = head.blocks.iter().fold(normed.clone(), |rows, block| after(block, rows));
            match &head.lm_head {
                Some(own) => own.logits(&rows, None),
                None => target.logits(&rows),
            }
        };
        self.heads[..num_heads].iter().map(of_head).collect()
    }

    /// Lists the tensors in the layout of a file.
    fn named(&self, config: &MedusaConfig) -> Vec<NamedTensor> {
        let of_head = |(number, head): (usize, &Head)| {
            let blocks = head.blocks.iter().enumerate().flat_map(|(block, linear)| {
                named_linears(&format!("{number}.{block}"), [(config.block(), &**linear)])
            });
            let lm_head = config.lm_head().zip(head.lm_head.as_deref());
            let tensors = blocks.chain(named_linears(&number.to_string(), lm_head));
            tensors.collect::<Vec<_>>()
        };
        self.heads.iter().enumerate().flat_map(of_head).collect()
    }

    /// Writes `model.safetensors` in the configuration's type, then `config.json`.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &MedusaConfig) -> Result<()> {
        let path = dir.join("model.safetensors");
        let hash = write_with_ids(&path, &self.named(config), &[], config.dtype, &[])?;
        write_config(dir, config.to_json(), hash)
    }

    /// Writes `medusa_lm_head.pt` in f32, then `config.json`, as the authors' class loads them for the
    /// target named `base`.
    ///
    /// # Errors
    /// If the heads have no LM heads of their own, which the class needs, or the directory cannot be
    /// written.
    pub fn write_authors(&self, dir: &Path, config: &MedusaConfig, base: &str) -> Result<()> {
        if config.vocab_size.is_none() {
            let problem = "Medusa's class needs heads with LM heads of their own";
            return Err(ModelError::Invalid(problem.to_owned()));
        }
        write_torch(&dir.join("medusa_lm_head.pt"), &self.named(config))?;
        let keys = json!({
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_blocks,
            "base_model_name_or_path": base,
        });
        Ok(write_json(&dir.join("config.json"), &keys)?)
    }
}

/// Computes `x + SiLU(W · x + b)` of each row x.
fn after(block: &PackableLinear, rows: Rows) -> Rows {
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
        let [batch, seq, width] = inputs.states[0].dims();
        let states = inputs.states[0].clone().reshape([batch * seq, width]);
        let norm = self.norm.clone().expect("the heads were made for training");
        let normed = norm.to_device(&states.device()).forward(states);
        let steps = self.heads[..inputs.num_steps].iter().enumerate().map(|(step, head)| {
            let rows = normed.clone().select(0, inputs.begun_rows(step));
            let add =
                |rows: Tensor<2>, block: &PackableLinear| rows.clone() + silu(block.forward(rows));
            head.blocks.iter().fold(rows, add)
        });
        steps.collect()
    }
}
