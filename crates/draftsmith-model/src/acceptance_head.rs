//! The acceptance-prediction head of SpecDec++ (Huang et al. 2024, section 3): a small residual
//! network on the draft's final hidden state h. It has `D` blocks `x + SiLU(W x + b)` and a linear
//! layer to two logits, reject and accept. Further inputs z ([`HeadReads`]) enter before the first
//! block: x₀ = h + U z.
//!
//! There are two schemas on disk. The authors' schema is for heads that their class can load: one
//! block on the candidate's hidden state, applied `D` times and stored once. Every other head has
//! our schema, with other tensor names, because their class would silently load only the last of
//! several untied blocks.

mod config;
mod reads;

use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, FloatDType, Tensor, activation::silu};

pub use self::config::AcceptanceHeadConfig;
pub use self::reads::{DrawnCandidate, HeadFeatures, HeadForm, HeadInput, HeadReads};
use crate::decoder::source::{linear, transposed};
use crate::error::{ModelError, Result};
use crate::packed::{self, PackedWeights, Threads};
use crate::precision::cast_parameters;
use crate::rows::{DeviceRows, HostRows, RowData, Rows};
use crate::weights::{
    NamedTensor, WeightDtype, WeightReader, check_weights, write_network, write_safetensors,
};

/// A residual network that predicts the probability that a candidate is accepted.
#[derive(Module, Debug)]
pub struct AcceptanceHead {
    /// The matrix U, without bias; `None` if the head reads only a hidden state.
    input: Option<Linear>,
    /// The stored blocks: one if the blocks are tied, otherwise `num_layers`. Empty if `num_layers`
    /// is 0.
    blocks: Vec<Linear>,
    output: Linear,
    num_layers: usize,
    #[module(skip)]
    reads: HeadReads,
    /// The same layers in packed form, for few rows on the CPU.
    #[module(skip)]
    packed: Option<Arc<PackedHead>>,
}

#[derive(Debug)]
struct PackedHead {
    /// The part of U that reads an embedding, if the head looks ahead.
    embedding: Option<PackedWeights>,
    /// The part of U that reads scalars, `[scalars, hidden]`.
    scalars: Vec<f32>,
    blocks: Vec<PackedWeights>,
    /// The weights of the acceptance logit: the accept weights minus the reject weights.
    output: Vec<f32>,
    bias: f32,
}

impl PackedHead {
    fn of(head: &AcceptanceHead) -> Self {
        let AcceptanceHead { input, blocks, output, reads, .. } = head;
        let difference = |both: Vec<f32>| -> Vec<f32> {
            both.chunks_exact(2).map(|logits| logits[1] - logits[0]).collect()
        };
        let bias = output.bias.as_ref().map_or(vec![0.0; 2], |bias| packed::values(bias.val()));
        let matrix = input.as_ref().map_or(Vec::new(), |input| packed::values(input.weight.val()));
        let hidden = output.weight.dims()[0];
        let (embedding, scalars) = matrix.split_at(matrix.len() - reads.num_scalars() * hidden);
        let pack = |weight| PackedWeights::pack(weight, hidden, hidden, None);
        Self {
            embedding: (!embedding.is_empty()).then(|| pack(embedding)),
            scalars: scalars.to_vec(),
            blocks: blocks.iter().map(packed::pack).collect(),
            output: difference(packed::values(output.weight.val())),
            bias: difference(bias)[0],
        }
    }
}

impl AcceptanceHead {
    /// Returns a copy that computes in `dtype`, for one training forward. On an autodiff device,
    /// gradients reach this head's parameters in their own type.
    pub fn to_dtype(&self, dtype: FloatDType) -> Self {
        cast_parameters(Self { packed: None, ..self.clone() }, dtype)
    }

    /// Returns the inputs that the head reads.
    pub fn reads(&self) -> &HeadReads {
        &self.reads
    }

    /// Scales the weights for embeddings by `gain`. For an embedding e, the returned head predicts
    /// what this head predicts for `gain` · e. The scaling is exact if `gain` is a power of two.
    /// Nothing changes if the head reads no embeddings.
    #[must_use]
    pub fn with_embedding_gain(mut self, gain: f32) -> Self {
        if let Some(input) = self.input.as_mut().filter(|_| self.reads.looks_ahead()) {
            let weight = input.weight.val();
            let [_, hidden] = weight.dims();
            let of_embedding = [0..hidden, 0..hidden];
            let larger = weight.clone().slice(of_embedding.clone()) * gain;
            input.weight = Param::from_tensor(weight.slice_assign(of_embedding, larger));
        }
        if self.packed.is_some() {
            self.packed = Some(Arc::new(PackedHead::of(&self)));
        }
        self
    }

    /// Computes the two logits, reject and accept.
    ///
    /// # Shapes
    /// - features: `[rows, hidden]`, and `[rows, extra]` if the head has further inputs
    /// - output: `[rows, 2]`
    ///
    /// # Panics
    /// If the head has other inputs than the features.
    pub fn forward(&self, features: impl Into<HeadFeatures>) -> Tensor<2> {
        let HeadFeatures { hidden, extra } = features.into();
        self.forward_blocks(match (&self.input, extra) {
            (Some(input), Some(extra)) => hidden + input.forward(extra),
            (None, None) => hidden,
            _ => panic!("inputs that do not match the head"),
        })
    }

    /// Computes the two logits from x₀, the input of the first block.
    fn forward_blocks(&self, mut x: Tensor<2>) -> Tensor<2> {
        for depth in 0..self.num_layers {
            x = x.clone() + silu(self.blocks[self.stored(depth)].forward(x));
        }
        self.output.forward(x)
    }

    /// Returns the index in `blocks` of the block at a depth. It is 0 if only one block is stored,
    /// because the head is tied or has one depth.
    fn stored(&self, depth: usize) -> usize {
        if self.blocks.len() == 1 { 0 } else { depth }
    }

    /// Computes the acceptance logit: accept minus reject. Its sigmoid is the acceptance
    /// probability.
    ///
    /// # Shapes
    /// - features: as for [`AcceptanceHead::forward`]
    /// - output: `[rows]`, f32: a difference of large bf16 numbers would be coarse
    pub fn acceptance_logit(&self, features: impl Into<HeadFeatures>) -> Tensor<1> {
        logit_of(self.forward(features))
    }

    /// Multiplies embeddings by U, for a head that looks ahead. The product depends only on the
    /// candidate token, so callers may cache it for [`Self::acceptance_logits`].
    ///
    /// # Shapes
    /// - embedding, output: one row per candidate, of the draft's width
    ///
    /// # Panics
    /// If the head does not look ahead.
    pub fn of_embedding(&self, embedding: &Rows) -> Rows {
        let input = self.input.as_ref().filter(|_| self.reads.looks_ahead());
        let input = input.expect("a head that looks ahead reads embeddings");
        let packed = self.packed.as_ref().and_then(|packed| packed.embedding.as_ref());
        if let (Some(weights), RowData::Host(rows)) = (packed, &embedding.place) {
            let mut values = Vec::new();
            weights.multiply(&rows.values, &mut values, &Threads::All);
            return embedding.with_place(HostRows { values, width: rows.width });
        }
        embedding.with_place(self.as_read(embedding).map(|rows| {
            let [_, num_rows, width] = rows.dims();
            let weight = input.weight.val().slice([0..width, 0..width]);
            rows.reshape([num_rows, width]).matmul(weight).unsqueeze::<3>()
        }))
    }

    /// Moves rows to the head's device and casts them to its type. So a head in f32 predicts in f32
    /// even if the drafter computes in bf16.
    fn as_read(&self, rows: &Rows) -> DeviceRows {
        let weight = self.output.weight.val();
        let rows = rows.place.clone().into_device(&weight.device());
        rows.map(|rows| rows.cast(FloatDType::from(weight.dtype())))
    }

    /// Computes [`AcceptanceHead::acceptance_logit`] for rows; each output row is one number.
    ///
    /// # Shapes
    /// - hidden: one row per candidate
    /// - of_embedding: [`Self::of_embedding`] of the candidates, one row each, if the head looks
    ///   ahead
    /// - scalars: `[rows, scalars]`: [`HeadReads::scalars`] of each candidate
    ///
    /// # Panics
    /// If the head has other inputs.
    pub fn acceptance_logits(
        &self,
        hidden: &Rows,
        of_embedding: Option<&Rows>,
        scalars: &[f32],
    ) -> Rows {
        let (num_rows, num_scalars) = (hidden.num_rows(), self.reads.num_scalars());
        assert_eq!(scalars.len(), num_rows * num_scalars, "inputs that do not match the head");
        let looks_ahead = self.reads.looks_ahead();
        assert_eq!(of_embedding.is_some(), looks_ahead, "inputs that do not match the head");
        match (&self.packed, &hidden.place, of_embedding.map(|rows| &rows.place)) {
            (Some(packed), RowData::Host(rows), None) => {
                return hidden.with_place(self.run_packed(packed, rows, None, scalars));
            }
            (Some(packed), RowData::Host(rows), Some(RowData::Host(of_embedding))) => {
                let of_embedding = Some(&of_embedding.values[..]);
                return hidden.with_place(self.run_packed(packed, rows, of_embedding, scalars));
            }
            _ => {}
        }
        hidden.with_place(self.as_read(hidden).map(|rows| {
            let [_, num_padded, width] = rows.dims();
            let mut x = rows.reshape([num_padded, width]);
            if let Some(of_embedding) = of_embedding {
                x = x + self.as_read(of_embedding).tensor.reshape([num_padded, width]);
            }
            if let Some(input) = self.input.as_ref().filter(|_| num_scalars > 0) {
                let [num_inputs, width] = input.weight.dims();
                let weight =
                    input.weight.val().slice([num_inputs - num_scalars..num_inputs, 0..width]);
                let mut scalars = scalars.to_vec();
                scalars.resize(num_padded * num_scalars, 0.0);
                let scalars = packed::tensor(scalars, [num_padded, num_scalars], &weight.device());
                x = x + scalars.cast(FloatDType::from(weight.dtype())).matmul(weight);
            }
            logit_of(self.forward_blocks(x)).reshape([1, num_padded, 1])
        }))
    }

    /// Computes [`Self::acceptance_logits`] with packed weights, from rows in host memory.
    fn run_packed(
        &self,
        packed: &PackedHead,
        hidden: &HostRows,
        of_embedding: Option<&[f32]>,
        scalars: &[f32],
    ) -> HostRows {
        let (mut x, width) = (hidden.values.clone(), hidden.width);
        let num_scalars = self.reads.num_scalars();
        for (row, x) in x.chunks_exact_mut(width).enumerate() {
            let of_embedding = of_embedding.map(|rows| &rows[row * width..(row + 1) * width]);
            let scalars = &scalars[row * num_scalars..(row + 1) * num_scalars];
            packed::add_read(x, of_embedding, scalars, &packed.scalars);
        }
        let mut y = Vec::new();
        for depth in 0..self.num_layers {
            packed.blocks[self.stored(depth)].multiply(&x, &mut y, &Threads::All);
            packed::add_silu(&mut x, &y);
        }
        let logit = |row: &[f32]| packed::dot(row, &packed.output) + packed.bias;
        HostRows { values: x.chunks_exact(width).map(logit).collect(), width: 1 }
    }

    /// Loads a head directory for a draft of width `draft_hidden_size`.
    ///
    /// # Errors
    /// If a file is missing, broken or changed since its export, a tensor is missing, extra or
    /// misshapen, or the head was trained for another width.
    pub fn from_dir(
        dir: &Path,
        draft_hidden_size: usize,
        device: &Device,
    ) -> Result<(AcceptanceHeadConfig, Self)> {
        let config = AcceptanceHeadConfig::from_dir(dir)?;
        if config.hidden_size != draft_hidden_size {
            let problem = format!(
                "is {}, but the draft's hidden size is {draft_hidden_size}: train the head on this \
                 draft, or use the draft it was trained on",
                config.hidden_size
            );
            let path = dir.join("config.json");
            return Err(ModelError::config(&path, "hidden_size", problem));
        }
        let path = dir.join("model.safetensors");
        let mut reader = WeightReader::open_file(&path)?;
        let hidden = config.hidden_size;
        let blocks = if config.is_authors() {
            read_tied_block(&mut reader, &config, device)?.into_iter().collect()
        } else {
            let read = |i| read_linear(&mut reader, &format!("blocks.{i}"), [hidden; 2], device);
            (0..config.num_stored_blocks()).map(read).collect::<Result<_, _>>()?
        };
        let num_extra = config.reads.num_extra(hidden);
        let mut input = None;
        if num_extra > 0 {
            let weight = reader.take("input.weight", &[hidden, num_extra])?;
            let weight = transposed(&weight, hidden, num_extra);
            input = Some(linear(weight, [num_extra, hidden], None, device, FloatDType::F32));
        }
        let output_name = match config.is_authors() {
            true => format!("model.{}", config.num_layers),
            false => "output".to_owned(),
        };
        let output = read_linear(&mut reader, &output_name, [hidden, 2], device)?;
        reader.finish()?;
        check_weights(dir)?;
        let num_layers = config.num_layers;
        let reads = config.reads.clone();
        let mut head = Self { input, blocks, output, num_layers, reads, packed: None };
        if packed::runs_on(device) {
            head.packed = Some(Arc::new(PackedHead::of(&head)));
        }
        Ok((config, head))
    }

    /// Writes `model.safetensors`, then `config.json`, each under a temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &AcceptanceHeadConfig) -> Result<()> {
        let mut metadata = Vec::new();
        let is_authors = config.is_authors();
        let tensors = if is_authors {
            for i in 1..config.num_layers {
                for part in ["weight", "bias"] {
                    metadata.push((
                        format!("model.{i}.linear.{part}"),
                        format!("model.0.linear.{part}"),
                    ));
                }
            }
            let output = format!("model.{}", config.num_layers);
            self.named(|i| format!("model.{i}.linear"), &output)
        } else {
            self.named_as_own()
        };
        write_network(dir, &tensors, &metadata, config)
    }

    /// Writes only the weights, with the names of our schema for every head. They are
    /// `input.weight` if the head has further inputs, and `weight` (`[out, in]`) and `bias` of each
    /// stored block (`blocks.0`, `blocks.1`, …) and of `output`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_weights(&self, path: &Path) -> Result<()> {
        write_safetensors(path, &self.named_as_own(), WeightDtype::F32, &[]).map(drop)
    }

    fn named_as_own(&self) -> Vec<NamedTensor> {
        self.named(|i| format!("blocks.{i}"), "output")
    }

    fn named(&self, block_name: impl Fn(usize) -> String, output_name: &str) -> Vec<NamedTensor> {
        let mut tensors = Vec::new();
        self.input.iter().for_each(|input| push_linear(&mut tensors, "input", input));
        for (i, block) in self.blocks.iter().enumerate() {
            push_linear(&mut tensors, &block_name(i), block);
        }
        push_linear(&mut tensors, output_name, &self.output);
        tensors
    }
}

/// Subtracts the reject logit from the accept logit, in f32: `[rows, 2]` to `[rows]`.
fn logit_of(logits: Tensor<2>) -> Tensor<1> {
    let logits = logits.cast(FloatDType::F32);
    let [rows, _] = logits.dims();
    let column = |i: usize| logits.clone().slice([0..rows, i..i + 1]).reshape([rows]);
    column(1) - column(0)
}

fn same(a: &Linear, b: &Linear) -> bool {
    let bias = |l: &Linear| l.bias.as_ref().map(|b| b.val().into_data());
    a.weight.val().into_data() == b.weight.val().into_data() && bias(a) == bias(b)
}

/// Reads the block of the authors' schema, which all depths share. Their files contain block 0 and
/// list the others in metadata. Their reader fills missing blocks from any block that is there, and
/// so does this function.
fn read_tied_block(
    reader: &mut WeightReader,
    config: &AcceptanceHeadConfig,
    device: &Device,
) -> Result<Option<Linear>> {
    let name = |depth: usize| format!("model.{depth}.linear");
    let mut first: Option<(usize, Linear)> = None;
    for depth in 0..config.num_layers {
        if reader.shape(&format!("{}.weight", name(depth))).is_none() {
            continue;
        }
        let block = read_linear(reader, &name(depth), [config.hidden_size; 2], device)?;
        match &first {
            None => first = Some((depth, block)),
            Some((other, first)) if !same(first, &block) => {
                return Err(ModelError::Invalid(format!(
                    "`{}`: `{}` differs from `{}`, but in this schema all blocks are the same one: the file was written \
                     untied, and the authors' class would misread it too",
                    reader.path.display(),
                    name(depth),
                    name(*other)
                )));
            }
            Some(_) => {}
        }
    }
    if config.num_layers > 0 && first.is_none() {
        return Err(reader.missing(&format!("{}.weight", name(0))));
    }
    Ok(first.map(|(_, block)| block))
}

/// Reads a linear layer with a bias.
fn read_linear(
    reader: &mut WeightReader,
    name: &str,
    [input, output]: [usize; 2],
    device: &Device,
) -> Result<Linear> {
    let weight = reader.take(&format!("{name}.weight"), &[output, input])?;
    let bias = reader.take(&format!("{name}.bias"), &[output])?;
    let weight = transposed(&weight, output, input);
    Ok(linear(weight, [input, output], Some(bias), device, FloatDType::F32))
}

fn push_linear(tensors: &mut Vec<NamedTensor>, name: &str, linear: &Linear) {
    tensors
        .push(NamedTensor::from_tensor(&format!("{name}.weight"), linear.weight.val().transpose()));
    if let Some(bias) = &linear.bias {
        tensors.push(NamedTensor::from_tensor(&format!("{name}.bias"), bias.val()));
    }
}

#[cfg(test)]
mod tests;
