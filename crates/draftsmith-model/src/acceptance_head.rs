//! The acceptance-prediction head of SpecDec++ (Huang et al. 2024, section 3): a small residual
//! network on the draft's final hidden state, `D` blocks `x + SiLU(W x + b)` and a linear layer to
//! two logits, reject and accept.
//!
//! Two schemas on disk. `tied` is the authors': one block applied `D` times, stored once, readable
//! by their class. `untied` is ours: a block of its own for each depth; their class would load such
//! a file silently and keep only the last block, so it goes under other tensor names.

use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor, activation::silu};
use serde::{Deserialize, Serialize};

use crate::error::{ModelError, read_json};
use crate::host::{self, Panels, Threads};
use crate::llama::{linear, pretty, transposed};
use crate::precision::cast_parameters;
use crate::rows::{HostRows, Place, Rows};
use crate::weights::{NamedTensor, WeightDtype, WeightReader, write_safetensors, write_whole};

/// What our untied heads call their schema in `config.json`.
const UNTIED_SCHEMA: &str = "draftsmith.untied-head.v1";

/// The shape of a head, and where it came from: `config.json` of a head directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceHeadConfig {
    /// Width of the draft's hidden states.
    pub hidden_size: usize,
    /// Number of residual blocks, 0 to 64.
    pub num_layers: usize,
    /// `None` for tied blocks, the authors' schema; our schema's name for untied ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// SHA-256 of the draft the head was trained on, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_hash: Option<String>,
    /// SHA-256 of the target whose verdicts the head predicts, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_hash: Option<String>,
    /// Everything else that training recorded.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub training: serde_json::Map<String, serde_json::Value>,
}

/// A residual network from a hidden state to the chance that its token is accepted.
#[derive(Module, Debug)]
pub struct AcceptanceHead {
    /// One block if tied, `num_layers` if not, none if `num_layers` is 0.
    blocks: Vec<Linear>,
    output: Linear,
    num_layers: usize,
    /// Blocks and output once more, for few rows on the CPU.
    #[module(skip)]
    host: Option<Arc<(Vec<Panels>, Panels)>>,
}

impl AcceptanceHeadConfig {
    /// A head of `num_layers` tied or untied blocks.
    pub fn new(hidden_size: usize, num_layers: usize, tied: bool) -> Self {
        Self {
            hidden_size,
            num_layers,
            schema: (!tied).then(|| UNTIED_SCHEMA.to_owned()),
            draft_hash: None,
            target_hash: None,
            training: serde_json::Map::new(),
        }
    }

    /// Whether one block serves every depth.
    pub fn is_tied(&self) -> bool {
        self.schema.is_none()
    }

    fn num_stored_blocks(&self) -> usize {
        if self.is_tied() { self.num_layers.min(1) } else { self.num_layers }
    }

    /// Initialises a head with PyTorch's default for linear layers: uniform in ±1/√in.
    pub fn init(&self, device: &Device) -> AcceptanceHead {
        let hidden = self.hidden_size;
        AcceptanceHead {
            blocks: (0..self.num_stored_blocks())
                .map(|_| LinearConfig::new(hidden, hidden).init(device))
                .collect(),
            output: LinearConfig::new(hidden, 2).init(device),
            num_layers: self.num_layers,
            host: None,
        }
    }

    /// Reads a head's `config.json`.
    ///
    /// # Errors
    /// If it is missing, not JSON, or of another schema.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let config: Self = read_json(&path)?;
        if let Some(schema) = config.schema.as_deref().filter(|s| *s != UNTIED_SCHEMA) {
            return Err(ModelError::Config {
                path,
                key: "schema",
                problem: format!("is `{schema}`: `{UNTIED_SCHEMA}` and none are known"),
            });
        }
        if config.hidden_size == 0 {
            return Err(ModelError::Config {
                path,
                key: "hidden_size",
                problem: "is 0, expected the draft's hidden size".to_owned(),
            });
        }
        if config.num_layers > 64 {
            return Err(ModelError::Config {
                path,
                key: "num_layers",
                problem: format!("is {}, expected 0 to 64", config.num_layers),
            });
        }
        Ok(config)
    }
}

impl AcceptanceHead {
    /// A copy that computes in `dtype`, for one forward of a training: on an autodiff device,
    /// gradients reach this head's own parameters, in their own type.
    pub fn to_dtype(&self, dtype: FloatDType) -> Self {
        cast_parameters(Self { host: None, ..self.clone() }, dtype)
    }

    /// The two logits, reject and accept.
    ///
    /// # Shapes
    /// - hidden: `[rows, hidden]`, the draft's hidden states after its final norm, at the
    ///   candidates' own positions
    /// - output: `[rows, 2]`
    pub fn forward(&self, hidden: Tensor<2>) -> Tensor<2> {
        let mut x = hidden;
        for depth in 0..self.num_layers {
            x = x.clone() + silu(self.blocks[self.stored(depth)].forward(x));
        }
        self.output.forward(x)
    }

    /// Where the block of a depth is stored. One that is stored alone is a tied head's only one, or
    /// an untied head's only depth.
    fn stored(&self, depth: usize) -> usize {
        if self.blocks.len() == 1 { 0 } else { depth }
    }

    /// The logit of acceptance: accept minus reject, so that its sigmoid is the chance.
    ///
    /// # Shapes
    /// - hidden: `[rows, hidden]`
    /// - output: `[rows]`, f32: a difference of large bf16 numbers would be coarse
    pub fn acceptance_logit(&self, hidden: Tensor<2>) -> Tensor<1> {
        let logits = self.forward(hidden).cast(FloatDType::F32);
        let [rows, _] = logits.dims();
        let column = |i: usize| logits.clone().slice([0..rows, i..i + 1]).reshape([rows]);
        column(1) - column(0)
    }

    /// [`AcceptanceHead::acceptance_logit`] of rows, each a row of one number.
    pub fn acceptance_logits(&self, hidden: &Rows) -> Rows {
        match (&self.host, hidden) {
            (Some(host), Rows(Place::Host(rows))) => {
                let (blocks, output) = &**host;
                let (mut x, mut y) = (rows.values.clone(), Vec::new());
                for depth in 0..self.num_layers {
                    blocks[self.stored(depth)].multiply(&x, &mut y, Threads::All);
                    host::add_silu(&mut x, &y);
                }
                output.multiply(&x, &mut y, Threads::All);
                let values = y.chunks_exact(2).map(|logits| logits[1] - logits[0]).collect();
                HostRows { values, width: 1 }.into()
            }
            _ => {
                let device = self.output.weight.val().device();
                let hidden = hidden.clone().into_tensor(&device);
                let [_, rows, width] = hidden.dims();
                let logits = self.acceptance_logit(hidden.reshape([rows, width]));
                logits.reshape([1, rows, 1]).into()
            }
        }
    }

    /// Loads a head directory for a draft of width `draft_hidden_size`.
    ///
    /// # Errors
    /// If a file is missing or broken, a tensor missing, extra or misshapen, or the head was
    /// trained for another width.
    pub fn from_dir(
        dir: &Path,
        draft_hidden_size: usize,
        device: &Device,
    ) -> Result<(AcceptanceHeadConfig, Self), ModelError> {
        let config = AcceptanceHeadConfig::from_dir(dir)?;
        if config.hidden_size != draft_hidden_size {
            return Err(ModelError::HeadHiddenSize {
                path: dir.join("config.json"),
                found: config.hidden_size,
                expected: draft_hidden_size,
            });
        }
        let path = dir.join("model.safetensors");
        let mut reader = WeightReader::open_file(&path)?;
        let hidden = config.hidden_size;
        let mut blocks = Vec::with_capacity(config.num_stored_blocks());
        if config.is_tied() {
            // The authors' files hold block 0 and name the others in their metadata; a reader
            // fills missing indices from the one that is present.
            let present: Vec<usize> = (0..config.num_layers)
                .filter(|i| reader.shape(&format!("model.{i}.linear.weight")).is_some())
                .collect();
            for (nth, index) in present.iter().enumerate() {
                let block =
                    read_linear(&mut reader, &format!("model.{index}.linear"), hidden, device)?;
                if nth == 0 {
                    blocks.push(block);
                } else if !same(&blocks[0], &block) {
                    return Err(ModelError::HeadSchema {
                        path,
                        problem: format!(
                            "`model.{index}.linear` differs from `model.{}.linear`, but blocks \
                             under this schema are one and the same: the file was written untied, \
                             and the authors' class would misread it too",
                            present[0]
                        ),
                    });
                }
            }
            if config.num_layers > 0 && blocks.is_empty() {
                return Err(ModelError::MissingTensor {
                    path,
                    tensor: "model.0.linear.weight".to_owned(),
                });
            }
        } else {
            for i in 0..config.num_layers {
                blocks.push(read_linear(&mut reader, &format!("blocks.{i}"), hidden, device)?);
            }
        }
        let output_name =
            if config.is_tied() { format!("model.{}", config.num_layers) } else { "output".into() };
        let output = read_linear_shaped(&mut reader, &output_name, hidden, 2, device)?;
        reader.finish()?;
        let num_layers = config.num_layers;
        let host = host::runs_on(device).then(|| {
            let blocks = blocks.iter().map(|block| host::pack(&[block])).collect();
            Arc::new((blocks, host::pack(&[&output])))
        });
        Ok((config, Self { blocks, output, num_layers, host }))
    }

    /// Writes `model.safetensors`, then `config.json`, each under a temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &AcceptanceHeadConfig) -> Result<(), ModelError> {
        let mut tensors = Vec::new();
        let mut metadata = Vec::new();
        for (i, block) in self.blocks.iter().enumerate() {
            let name =
                if config.is_tied() { format!("model.{i}.linear") } else { format!("blocks.{i}") };
            push_linear(&mut tensors, &name, block);
        }
        if config.is_tied() {
            for i in 1..config.num_layers {
                for part in ["weight", "bias"] {
                    metadata.push((
                        format!("model.{i}.linear.{part}"),
                        format!("model.0.linear.{part}"),
                    ));
                }
            }
            push_linear(&mut tensors, &format!("model.{}", config.num_layers), &self.output);
        } else {
            push_linear(&mut tensors, "output", &self.output);
        }
        write_safetensors(&dir.join("model.safetensors"), &tensors, WeightDtype::F32, &metadata)?;
        let path = dir.join("config.json");
        let json = serde_json::to_value(config)
            .map_err(|source| ModelError::Json { path: path.clone(), source })?;
        write_whole(&path, pretty(&json).as_bytes())
    }
}

fn same(a: &Linear, b: &Linear) -> bool {
    let bias = |l: &Linear| l.bias.as_ref().map(|b| b.val().into_data());
    a.weight.val().into_data() == b.weight.val().into_data() && bias(a) == bias(b)
}

fn read_linear(
    reader: &mut WeightReader,
    name: &str,
    hidden: usize,
    device: &Device,
) -> Result<Linear, ModelError> {
    read_linear_shaped(reader, name, hidden, hidden, device)
}

fn read_linear_shaped(
    reader: &mut WeightReader,
    name: &str,
    input: usize,
    output: usize,
    device: &Device,
) -> Result<Linear, ModelError> {
    let weight = reader.take(&format!("{name}.weight"), &[output, input])?;
    let bias = reader.take(&format!("{name}.bias"), &[output])?;
    let weight = transposed(&weight, output, input);
    Ok(linear(weight, [input, output], Some(bias), device))
}

fn push_linear(tensors: &mut Vec<NamedTensor>, name: &str, linear: &Linear) {
    tensors
        .push(NamedTensor::from_tensor(&format!("{name}.weight"), linear.weight.val().transpose()));
    if let Some(bias) = &linear.bias {
        tensors.push(NamedTensor::from_tensor(&format!("{name}.bias"), bias.val()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;

    /// What a head says of three rows, as tensors and as rows in host memory.
    fn outputs(head: &AcceptanceHead, hidden: usize) -> [Vec<f32>; 2] {
        let device = Device::flex();
        let values: Vec<f32> = (0..3 * hidden).map(|i| (i as f32 * 0.37).sin()).collect();
        let x = Tensor::<2>::from_data(TensorData::new(values.clone(), [3, hidden]), &device);
        let rows = HostRows { values, width: hidden }.into();
        let of_tensors = head.acceptance_logit(x).into_data().try_into_vec().expect("f32");
        let [of_rows] = Rows::to_host([head.acceptance_logits(&rows)]).expect("in host memory");
        [of_tensors, of_rows]
    }

    /// Asserts that two heads have the same weights, and say the same of rows but for the order of
    /// sums: one that was read goes another way through few rows than one that is trained.
    fn assert_same(found: &AcceptanceHead, expected: &AcceptanceHead, hidden: usize) {
        assert_eq!(found.blocks.len(), expected.blocks.len());
        assert!(found.blocks.iter().zip(&expected.blocks).all(|(a, b)| same(a, b)));
        assert!(same(&found.output, &expected.output));
        let [expected, _] = outputs(expected, hidden);
        for found in outputs(found, hidden) {
            for (a, b) in found.iter().zip(&expected) {
                assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} for {b}");
            }
        }
    }

    #[test]
    fn heads_round_trip_tied_and_untied_at_every_depth() {
        let device = Device::flex();
        for tied in [true, false] {
            for num_layers in 0..=4 {
                let config = AcceptanceHeadConfig::new(8, num_layers, tied);
                let head = config.init(&device);
                let dir = tempfile::tempdir().expect("a temporary directory");
                head.write_dir(dir.path(), &config).expect("written");
                let (read_config, read) =
                    AcceptanceHead::from_dir(dir.path(), 8, &device).expect("reads");
                assert_eq!(read_config, config);
                assert_same(&read, &head, 8);
            }
        }
    }

    #[test]
    fn a_tied_file_has_the_authors_names_and_metadata() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let config = AcceptanceHeadConfig::new(4, 3, true);
        config.init(&Device::flex()).write_dir(dir.path(), &config).expect("written");
        let path = dir.path().join("model.safetensors");
        let reader = WeightReader::open_file(&path).expect("opens");
        let names: Vec<&str> = reader.names().collect();
        assert_eq!(
            names,
            ["model.0.linear.bias", "model.0.linear.weight", "model.3.bias", "model.3.weight"]
        );
        let metadata = crate::read_metadata(&path).expect("reads");
        assert_eq!(metadata["model.2.linear.weight"], "model.0.linear.weight");
    }

    #[test]
    fn a_block_under_a_later_index_fills_the_missing_ones() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let device = Device::flex();
        let config = AcceptanceHeadConfig::new(4, 3, true);
        let head = config.init(&device);
        head.write_dir(dir.path(), &config).expect("written");
        let mut tensors = Vec::new();
        push_linear(&mut tensors, "model.2.linear", &head.blocks[0]);
        push_linear(&mut tensors, "model.3", &head.output);
        write_safetensors(&dir.path().join("model.safetensors"), &tensors, WeightDtype::F32, &[])
            .expect("written");
        let (_, read) = AcceptanceHead::from_dir(dir.path(), 4, &device).expect("reads");
        assert_same(&read, &head, 4);
    }

    #[test]
    fn wrong_widths_and_untied_blocks_under_the_tied_schema_are_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let device = Device::flex();
        let config = AcceptanceHeadConfig::new(4, 2, true);
        config.init(&device).write_dir(dir.path(), &config).expect("written");
        let message =
            AcceptanceHead::from_dir(dir.path(), 8, &device).expect_err("refused").to_string();
        assert!(message.contains("hidden_size") && message.contains('8'), "{message}");
        let untied = AcceptanceHeadConfig::new(4, 2, false).init(&device);
        let mut tensors = Vec::new();
        push_linear(&mut tensors, "model.0.linear", &untied.blocks[0]);
        push_linear(&mut tensors, "model.1.linear", &untied.blocks[1]);
        push_linear(&mut tensors, "model.2", &untied.output);
        write_safetensors(&dir.path().join("model.safetensors"), &tensors, WeightDtype::F32, &[])
            .expect("written");
        let message =
            AcceptanceHead::from_dir(dir.path(), 4, &device).expect_err("refused").to_string();
        assert!(message.contains("untied"), "{message}");
    }
}
