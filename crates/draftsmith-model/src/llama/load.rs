//! Reading and writing a [`CausalLm`] as a Hugging Face checkpoint directory.
//!
//! Hugging Face stores linear weights as `[out, in]`; they are transposed here, once, and a tied
//! LM head becomes a contiguous `[hidden, vocab]` copy of the embedding.

use std::path::Path;
use std::sync::Arc;

use burn::module::Param;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{Device, Tensor, TensorData};
use draftsmith_files::write_whole;

use super::{CausalLm, DecoderLayer, LinearShape, Mlp, PackedModel};
use crate::config::LlamaConfig;
use crate::error::ModelError;
use crate::llama::attention::Attention;
use crate::llama::rope::Rope;
use crate::packed;
use crate::precision::cast_parameters;
use crate::weights::{NamedTensor, WeightDtype, WeightReader, write_safetensors};

impl CausalLm {
    /// Loads a checkpoint directory: `config.json` and `model.safetensors` or shards. Weights are
    /// computed with in f32, however they are stored. On an autodiff device they can be trained
    /// further.
    ///
    /// # Errors
    /// If a file is missing or broken, or a tensor missing, extra or misshapen.
    pub fn from_model_dir(dir: &Path, device: &Device) -> Result<Self, ModelError> {
        Self::from_model_dir_in(dir, WeightDtype::F32, device)
    }

    /// The same with weights that are computed with in `dtype`: a frozen model of a training. Each
    /// layer is cast when it is read, so that the device never holds the whole model in f32.
    ///
    /// # Errors
    /// As [`CausalLm::from_model_dir`].
    pub fn from_model_dir_in(
        dir: &Path,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let config = LlamaConfig::from_model_dir(dir)?;
        let mut reader = WeightReader::open_dir(dir)?;
        let model = Self::read(config, &mut reader, dtype, device)?;
        let tied = model.config.tie_word_embeddings;
        reader.ignore(|name| {
            name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight")
        });
        reader.finish()?;
        Ok(model)
    }

    fn read(
        config: LlamaConfig,
        reader: &mut WeightReader,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embed = reader.take("model.embed_tokens.weight", &[vocab, hidden])?;
        // A tied model on an autodiff device is there to be trained: the embedding stays both.
        let head = if !config.tie_word_embeddings {
            Some(transposed(&reader.take("lm_head.weight", &[vocab, hidden])?, vocab, hidden))
        } else if device.is_autodiff() {
            None
        } else {
            Some(transposed(&embed, vocab, hidden))
        };
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for number in 0..config.num_hidden_layers {
            let layer = read_layer(&config, number, reader, device)?;
            layers.push(cast_parameters(layer, dtype.float_dtype()));
        }
        let norm = read_norm(&config, "model.norm.weight", reader, device)?;
        let mut model = Self {
            embed_tokens: parameter(embed, [vocab, hidden], device),
            layers,
            norm,
            lm_head: head.map(|head| linear(head, [hidden, vocab], None, device)),
            rope: Rope::new(&config, device),
            packed: None,
            config,
        }
        .to_dtype(dtype);
        if dtype == WeightDtype::F32 && packed::runs_on(device) {
            model.packed = Some(Arc::new(PackedModel::of(&model)));
        }
        Ok(model)
    }

    /// Writes `config.json`, `generation_config.json` and `model.safetensors`, each under a
    /// temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_model_dir(&self, dir: &Path, dtype: WeightDtype) -> Result<(), ModelError> {
        let config = &self.config;
        let mut tensors =
            vec![NamedTensor::from_tensor("model.embed_tokens.weight", self.embed_tokens.val())];
        for (number, layer) in self.layers.iter().enumerate() {
            let prefix = format!("model.layers.{number}");
            let attention = &layer.self_attn;
            for (name, linear) in [
                ("self_attn.q_proj", &attention.q_proj),
                ("self_attn.k_proj", &attention.k_proj),
                ("self_attn.v_proj", &attention.v_proj),
                ("self_attn.o_proj", &attention.o_proj),
                ("mlp.gate_proj", &layer.mlp.gate_proj),
                ("mlp.up_proj", &layer.mlp.up_proj),
                ("mlp.down_proj", &layer.mlp.down_proj),
            ] {
                let (name, linear) = (format!("{prefix}.{name}"), linear);
                tensors.push(NamedTensor::from_tensor(
                    &format!("{name}.weight"),
                    linear.weight.val().transpose(),
                ));
                if let Some(bias) = &linear.bias {
                    tensors.push(NamedTensor::from_tensor(&format!("{name}.bias"), bias.val()));
                }
            }
            for (name, norm) in [
                ("input_layernorm", &layer.input_layernorm),
                ("post_attention_layernorm", &layer.post_attention_layernorm),
            ] {
                tensors.push(NamedTensor::from_tensor(
                    &format!("{prefix}.{name}.weight"),
                    norm.gamma.val(),
                ));
            }
        }
        tensors.push(NamedTensor::from_tensor("model.norm.weight", self.norm.gamma.val()));
        if let Some(head) = self.lm_head.as_ref().filter(|_| !config.tie_word_embeddings) {
            tensors.push(NamedTensor::from_tensor("lm_head.weight", head.weight.val().transpose()));
        }
        write_safetensors(&dir.join("model.safetensors"), &tensors, dtype, &[])?;
        let json = config.to_json(dtype.config_name());
        let generation = serde_json::json!({
            "bos_token_id": json["bos_token_id"],
            "eos_token_id": json["eos_token_id"],
        });
        write_whole(&dir.join("generation_config.json"), pretty(&generation).as_bytes())?;
        Ok(write_whole(&dir.join("config.json"), pretty(&json).as_bytes())?)
    }
}

/// JSON as people read it, with a newline at the end.
pub(crate) fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

fn read_layer(
    config: &LlamaConfig,
    number: usize,
    reader: &mut WeightReader,
    device: &Device,
) -> Result<DecoderLayer, ModelError> {
    let prefix = format!("model.layers.{number}");
    let (self_attn, mlp) = build_from(&prefix, reader, device, |mut linear| {
        (Attention::new(config, &mut linear), Mlp::new(config, &mut linear))
    })?;
    let mut norm = |name| read_norm(config, &format!("{prefix}.{name}.weight"), reader, device);
    Ok(DecoderLayer {
        input_layernorm: norm("input_layernorm")?,
        post_attention_layernorm: norm("post_attention_layernorm")?,
        self_attn,
        mlp,
    })
}

/// Builds parts of a layer with the linear layers that `reader` has under `prefix`.
///
/// The builder cannot fail, reading can: the first failure is kept and told after.
pub(crate) fn build_from<T>(
    prefix: &str,
    reader: &mut WeightReader,
    device: &Device,
    build: impl FnOnce(&mut dyn FnMut(LinearShape) -> Linear) -> T,
) -> Result<T, ModelError> {
    let mut failure = None;
    let built = build(&mut |shape| {
        read_linear(prefix, &shape, reader, device).unwrap_or_else(|error| {
            failure.get_or_insert(error);
            linear(vec![0.0], [1, 1], None, device)
        })
    });
    failure.map_or(Ok(built), Err)
}

fn read_linear(
    prefix: &str,
    shape: &LinearShape,
    reader: &mut WeightReader,
    device: &Device,
) -> Result<Linear, ModelError> {
    let name = format!("{prefix}.{}", shape.name);
    let weight = reader.take(&format!("{name}.weight"), &[shape.output, shape.input])?;
    let weight = transposed(&weight, shape.output, shape.input);
    let bias = if shape.bias {
        Some(reader.take(&format!("{name}.bias"), &[shape.output])?)
    } else {
        None
    };
    Ok(linear(weight, [shape.input, shape.output], bias, device))
}

pub(crate) fn read_norm(
    config: &LlamaConfig,
    name: &str,
    reader: &mut WeightReader,
    device: &Device,
) -> Result<RmsNorm, ModelError> {
    let gamma = reader.take(name, &[config.hidden_size])?;
    Ok(RmsNorm {
        gamma: Param::from_data(TensorData::new(gamma, [config.hidden_size]), device),
        epsilon: config.rms_norm_eps,
    })
}

/// `[rows, columns]` values as `[columns, rows]`.
pub(crate) fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut output = vec![0.0; values.len()];
    for (r, row) in values.chunks_exact(columns).enumerate() {
        for (c, value) in row.iter().enumerate() {
            output[c * rows + r] = *value;
        }
    }
    output
}

/// A linear layer of `[in, out]` weights.
pub(crate) fn linear(
    weight: Vec<f32>,
    shape: [usize; 2],
    bias: Option<Vec<f32>>,
    device: &Device,
) -> Linear {
    let bias = bias.map(|bias| Param::from_data(TensorData::new(bias, [shape[1]]), device));
    Linear { weight: parameter(weight, shape, device), bias }
}

fn parameter(values: Vec<f32>, shape: [usize; 2], device: &Device) -> Param<Tensor<2>> {
    Param::from_data(TensorData::new(values, shape), device)
}
