//! The self-draft adapter of Kangaroo (Liu et al. 2024, section 3.1): one attention layer that turns
//! a target's own shallow layers into its draft.
//!
//! `y = norm(x + attention(input_layernorm(x)))`, where `x` is the target's hidden state after its
//! first `exit_layer` layers; the target's own LM head turns `y` into logits. There is no MLP and no
//! norm after the attention. Tensor names on disk are Kangaroo's; `config.json` has the shape of a
//! one-layer Llama's, with our keys beside it.

use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::nn::{Initializer, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::config::LlamaConfig;
use crate::error::{ModelError, read_json};
use crate::host::{self, HostAttention, HostNorm, RopeTable};
use crate::kv_cache::KvCache;
use crate::llama::attention::{Attention, Positions};
use crate::llama::rope::Rope;
use crate::llama::{LinearShape, build_from, pretty, read_norm};
use crate::precision::cast_parameters;
use crate::rows::{Place, Rows};
use crate::weights::{NamedTensor, WeightDtype, WeightReader, write_safetensors, write_whole};

/// An adapter's shape, and where it came from: `config.json` of an adapter directory.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// The target's layers that run before the adapter: 1 to one less than all of them.
    pub exit_layer: usize,
    /// The target's shape with one layer: what the adapter's attention, norms and rotation take
    /// after.
    pub llama: LlamaConfig,
    /// SHA-256 of the target the adapter was trained for, if known.
    pub target_hash: Option<String>,
    /// Everything else that training recorded.
    pub training: Map<String, Value>,
}

/// Our keys of an adapter's `config.json`.
#[derive(Deserialize)]
struct OwnKeys {
    exit_layer: Option<usize>,
    target_hash: Option<String>,
    #[serde(default)]
    training: Map<String, Value>,
}

/// One attention layer between a target's shallow layers and its LM head.
#[derive(Module, Debug)]
pub struct Adapter {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    norm: RmsNorm,
    rope: Rope,
    /// The same once more, for few rows on the CPU.
    #[module(skip)]
    host: Option<Arc<HostAdapter>>,
    #[module(skip)]
    config: LlamaConfig,
}

/// An adapter as `host` runs it.
#[derive(Debug)]
struct HostAdapter {
    attention: HostAttention,
    norm: HostNorm,
    rope: RopeTable,
}

impl AdapterConfig {
    /// An adapter for `target` behind its first `exit_layer` layers.
    ///
    /// # Errors
    /// If `exit_layer` is not between 1 and the target's layers less one.
    pub fn new(target: &LlamaConfig, exit_layer: usize) -> Result<Self, ModelError> {
        if exit_layer == 0 || exit_layer >= target.num_hidden_layers {
            return Err(ModelError::ExitLayer { exit_layer, num_layers: target.num_hidden_layers });
        }
        let llama = LlamaConfig { num_hidden_layers: 1, attention_bias: false, ..target.clone() };
        Ok(Self { exit_layer, llama, target_hash: None, training: Map::new() })
    }

    /// Initialises an adapter as Kangaroo does: linear layers with a normal distribution of
    /// standard deviation 0.02, norms with ones.
    pub fn init(&self, device: &Device) -> Adapter {
        let initializer = Initializer::Normal { mean: 0.0, std: 0.02 };
        let mut build = |shape: LinearShape| {
            LinearConfig::new(shape.input, shape.output)
                .with_bias(false)
                .with_initializer(initializer.clone())
                .init(device)
        };
        let config = &self.llama;
        let norm = || {
            RmsNormConfig::new(config.hidden_size).with_epsilon(config.rms_norm_eps).init(device)
        };
        Adapter {
            input_layernorm: norm(),
            self_attn: Attention::new(config, &mut build),
            norm: norm(),
            rope: Rope::new(config, device),
            host: None,
            config: config.clone(),
        }
    }

    /// Reads an adapter's `config.json`.
    ///
    /// # Errors
    /// If it is missing, not of a one-layer Llama's shape, or has no `exit_layer`.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let llama = LlamaConfig::from_model_dir(dir)?;
        let OwnKeys { exit_layer, target_hash, training } = read_json(&path)?;
        let Some(exit_layer) = exit_layer else {
            return Err(ModelError::Config {
                path,
                key: "exit_layer",
                problem: "is missing: give the number of the target's layers that run before the \
                          adapter (Kangaroo's own adapters: 2 for 7B, 3 for 13B models)"
                    .to_owned(),
            });
        };
        if llama.num_hidden_layers != 1 {
            return Err(ModelError::Config {
                path,
                key: "num_hidden_layers",
                problem: format!(
                    "is {}, expected 1: this is no adapter's directory",
                    llama.num_hidden_layers
                ),
            });
        }
        Ok(Self { exit_layer, llama, target_hash, training })
    }

    /// Checks that the adapter fits a target.
    ///
    /// # Errors
    /// If a width differs, or the exit layer leaves no layer of the target to verify with.
    pub fn check_target(&self, dir: &Path, target: &LlamaConfig) -> Result<(), ModelError> {
        let path = dir.join("config.json");
        let widths: [(&'static str, usize, usize); 2] = [
            ("hidden_size", self.llama.hidden_size, target.hidden_size),
            ("vocab_size", self.llama.vocab_size, target.vocab_size),
        ];
        for (key, found, expected) in widths {
            if found != expected {
                return Err(ModelError::Config {
                    path,
                    key,
                    problem: format!(
                        "is {found}, but the target's is {expected}: the adapter was made for \
                         another target; train one for this target"
                    ),
                });
            }
        }
        let (context, needed) =
            (self.llama.max_position_embeddings, target.max_position_embeddings);
        if context < needed {
            return Err(ModelError::Config {
                path,
                key: "max_position_embeddings",
                problem: format!(
                    "is {context}, but the target reads {needed} tokens: the adapter rotates with \
                     the target's table, so raise it to that"
                ),
            });
        }
        if self.exit_layer == 0 || self.exit_layer >= target.num_hidden_layers {
            return Err(ModelError::Config {
                path,
                key: "exit_layer",
                problem: format!(
                    "is {}, but the target has {} layers: expected 1 to {}",
                    self.exit_layer,
                    target.num_hidden_layers,
                    target.num_hidden_layers - 1
                ),
            });
        }
        Ok(())
    }
}

impl Adapter {
    /// A cache for one sequence of up to `capacity` tokens.
    pub fn new_cache(&self, capacity: usize) -> KvCache {
        KvCache::new(&self.config, capacity, &self.device(), self.host.is_some())
    }

    fn device(&self) -> Device {
        self.input_layernorm.gamma.val().device()
    }

    /// A copy that computes in `dtype`, for one forward over whole sequences of a training: on an
    /// autodiff device, gradients reach this adapter's own parameters, in their own type.
    pub fn to_dtype(&self, dtype: FloatDType) -> Self {
        cast_parameters(Self { host: None, ..self.clone() }, dtype)
    }

    /// The number of parameters.
    pub fn num_parameters(&self) -> usize {
        self.num_params()
    }

    /// What the target's LM head reads, over whole sequences, without a cache. Causal, so padding
    /// on the right changes nothing to its left.
    ///
    /// # Shapes
    /// - features: `[batch, seq, hidden]`, the target's hidden states at the exit layer
    /// - output: the same, after the adapter's norm
    pub fn forward(&self, features: Tensor<3>) -> Tensor<3> {
        let positions = Positions::whole(&self.rope, &features);
        self.run(features, &positions, None)
    }

    /// The same for new tokens, which follow those that the cache holds.
    ///
    /// # Panics
    /// If the cache is full.
    pub fn forward_cached(&self, features: Rows, cache: &mut KvCache) -> Rows {
        let start = cache.len(0);
        let num_rows = features.num_rows();
        match (&self.host, features) {
            (Some(host), Rows(Place::Host(mut rows))) => {
                let (mut memory, scratch) = cache.extend_on_host(0..1, num_rows);
                let memory = memory.next().expect("an adapter's cache has one layer");
                host.attention.forward(&mut rows.values, start, memory, &host.rope, scratch);
                host.norm.forward(&mut rows.values);
                rows.into()
            }
            (_, features) => {
                let features = features.into_tensor(&self.device());
                let positions = Positions::following(&self.rope, start, &features);
                self.run(features, &positions, Some(cache)).into()
            }
        }
    }

    /// Reads new tokens into the cache, for their keys and values alone.
    ///
    /// # Panics
    /// If the cache is full.
    pub fn fill_cache(&self, features: Rows, cache: &mut KvCache) {
        let start = cache.len(0);
        let num_rows = features.num_rows();
        match (&self.host, features) {
            (Some(host), Rows(Place::Host(rows))) => {
                let (mut memory, scratch) = cache.extend_on_host(0..1, num_rows);
                let memory = memory.next().expect("an adapter's cache has one layer");
                host.attention.fill(&rows.values, start, memory, &host.rope, scratch);
            }
            (_, features) => {
                let features = features.into_tensor(&self.device());
                let positions = Positions::following(&self.rope, start, &features);
                let normed = self.input_layernorm.forward(features);
                self.self_attn.fill(normed, &positions, cache.layer_mut(0));
            }
        }
    }

    fn run(
        &self,
        features: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut KvCache>,
    ) -> Tensor<3> {
        let normed = self.input_layernorm.forward(features.clone());
        let cache = cache.map(|cache| cache.layer_mut(0));
        self.norm.forward(features + self.self_attn.forward(normed, positions, cache))
    }

    /// Loads an adapter directory for a target of shape `target`. On an autodiff device the
    /// adapter can be trained further.
    ///
    /// # Errors
    /// If a file is missing or broken, a tensor missing, extra or misshapen, or the adapter does
    /// not fit the target.
    pub fn from_dir(
        dir: &Path,
        target: &LlamaConfig,
        device: &Device,
    ) -> Result<(AdapterConfig, Self), ModelError> {
        let config = AdapterConfig::from_dir(dir)?;
        config.check_target(dir, target)?;
        let mut reader = WeightReader::open_dir(dir)?;
        let llama = &config.llama;
        let self_attn = build_from("layers.0", &mut reader, device, |mut linear| {
            Attention::new(llama, &mut linear)
        })?;
        let mut norm = |name| read_norm(llama, name, &mut reader, device);
        let input_layernorm = norm("layers.0.input_layernorm.weight")?;
        let norm = norm("norm.weight")?;
        reader.ignore(|name| name.ends_with("rotary_emb.inv_freq"));
        reader.finish()?;
        let rope = Rope::new(llama, device);
        let host = host::runs_on(device).then(|| {
            Arc::new(HostAdapter {
                attention: HostAttention::new(llama, &input_layernorm, self_attn.projections()),
                norm: HostNorm::of(&norm),
                rope: rope.table(),
            })
        });
        let adapter = Self { input_layernorm, self_attn, norm, rope, host, config: llama.clone() };
        Ok((config, adapter))
    }

    /// Writes `model.safetensors` in f32, then `config.json`, each under a temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &AdapterConfig) -> Result<(), ModelError> {
        let mut tensors = vec![
            NamedTensor::from_tensor(
                "layers.0.input_layernorm.weight",
                self.input_layernorm.gamma.val(),
            ),
            NamedTensor::from_tensor("norm.weight", self.norm.gamma.val()),
        ];
        let names = ["q_proj", "k_proj", "v_proj", "o_proj"];
        for (name, linear) in names.iter().zip(self.self_attn.projections()) {
            let name = format!("layers.0.self_attn.{name}.weight");
            tensors.push(NamedTensor::from_tensor(&name, linear.weight.val().transpose()));
        }
        write_safetensors(&dir.join("model.safetensors"), &tensors, WeightDtype::F32, &[])?;
        let mut json = config.llama.to_json(WeightDtype::F32.config_name());
        json["exit_layer"] = config.exit_layer.into();
        if let Some(hash) = &config.target_hash {
            json["target_hash"] = hash.as_str().into();
        }
        if !config.training.is_empty() {
            json["training"] = Value::Object(config.training.clone());
        }
        write_whole(&dir.join("config.json"), pretty(&json).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CausalLm;
    use crate::rows::HostRows;
    use burn::tensor::{Distribution, Int, TensorData};

    fn target() -> CausalLm {
        let dir =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/llama-v5-untied-f32");
        CausalLm::from_model_dir(&dir, &Device::flex()).expect("the fixture loads")
    }

    fn values(tensor: Tensor<3>) -> Vec<f32> {
        tensor.into_data().try_into_vec().expect("f32")
    }

    fn assert_close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            // Sums in another order, of numbers near 1.
            assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} for {b}");
        }
    }

    /// A directory with a random adapter for the fixture.
    fn written() -> (tempfile::TempDir, AdapterConfig, Adapter) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut config = AdapterConfig::new(target().config(), 1).expect("a valid exit layer");
        config.target_hash = Some("abc".to_owned());
        config.training.insert("seed".to_owned(), 7.into());
        let mut adapter = config.init(&Device::flex());
        // Norms of ones would hide a norm that is not applied.
        let random = |norm: RmsNorm| RmsNorm {
            gamma: norm.gamma.map(|g| g.random_like(Distribution::Uniform(0.5, 1.5))),
            ..norm
        };
        adapter.input_layernorm = random(adapter.input_layernorm);
        adapter.norm = random(adapter.norm);
        adapter.write_dir(dir.path(), &config).expect("written");
        (dir, config, adapter)
    }

    #[test]
    fn an_adapter_round_trips_and_any_split_of_a_sequence_gives_the_same() {
        let (dir, config, adapter) = written();
        let target = target();
        let (read_config, read) =
            Adapter::from_dir(dir.path(), target.config(), &Device::flex()).expect("reads");
        assert_eq!(read_config, config);
        let ids: Vec<i32> = (0..30).map(|i| i * 7 % 40).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 30]), &Device::flex());
        let features = target.all_hidden_states(ids).swap_remove(1);
        let [_, _, width] = features.dims();
        let expected = values(adapter.forward(features.clone()));
        assert_close(&values(read.forward(features.clone())), &expected);
        let on_device: Rows = features.clone().into();
        let on_host: Rows = HostRows { values: values(features), width }.into();
        // The one that was read has a host path, the other has none; each takes both.
        for (adapter, features) in
            [(&adapter, &on_device), (&adapter, &on_host), (&read, &on_device), (&read, &on_host)]
        {
            let forward = |from: usize, to: usize, cache: &mut KvCache| {
                let rows = adapter.forward_cached(features.slice(from..to), cache);
                values(rows.into_tensor(&Device::flex()))
            };
            let mut cache = adapter.new_cache(30);
            let mut found = Vec::new();
            for (from, to) in [(0, 1), (1, 4), (4, 25), (25, 26), (26, 30)] {
                found.extend(forward(from, to, &mut cache));
            }
            assert_close(&found, &expected);
            cache.truncate(0);
            adapter.fill_cache(features.slice(0..9), &mut cache);
            assert_close(&forward(9, 30, &mut cache), &expected[9 * width..]);
        }
    }

    #[test]
    fn files_have_kangaroos_names() {
        let (dir, ..) = written();
        let reader = WeightReader::open_dir(dir.path()).expect("opens");
        let names: Vec<&str> = reader.names().collect();
        assert_eq!(
            names,
            [
                "layers.0.input_layernorm.weight",
                "layers.0.self_attn.k_proj.weight",
                "layers.0.self_attn.o_proj.weight",
                "layers.0.self_attn.q_proj.weight",
                "layers.0.self_attn.v_proj.weight",
                "norm.weight",
            ]
        );
        let json: Value = read_json(&dir.path().join("config.json")).expect("JSON");
        assert_eq!((&json["num_hidden_layers"], &json["exit_layer"]), (&1.into(), &1.into()));
    }

    #[test]
    fn what_fits_no_target_is_refused_and_says_why() {
        let (dir, ..) = written();
        let target = target();
        let refused = |dir: &Path, config: &LlamaConfig| {
            Adapter::from_dir(dir, config, &Device::flex()).expect_err("refused").to_string()
        };
        let wider = LlamaConfig { hidden_size: 4096, ..target.config().clone() };
        assert!(refused(dir.path(), &wider).contains("another target"));
        let shallow = LlamaConfig { num_hidden_layers: 1, ..target.config().clone() };
        assert!(refused(dir.path(), &shallow).contains("exit_layer"));
        for exit_layer in [0, target.config().num_hidden_layers] {
            assert!(AdapterConfig::new(target.config(), exit_layer).is_err());
        }
        let path = dir.path().join("config.json");
        let mut json: Value = read_json(&path).expect("JSON");
        json.as_object_mut().expect("an object").remove("exit_layer");
        std::fs::write(&path, json.to_string()).expect("written");
        assert!(refused(dir.path(), target.config()).contains("exit_layer"));
    }
}
