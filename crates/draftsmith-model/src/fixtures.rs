//! Tiny random checkpoints of every family, with transformers' results.
//! `tests/fixtures/make_models.py` makes both.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::causal_lm::CausalLm;
use crate::weights::WeightReader;

/// The names of the fixtures: every family, in its variants and file formats.
pub(crate) const FIXTURES: [&str; 13] = [
    "llama-v5-untied-f32",
    "llama-v4-tied-bf16",
    "llama-v5-sharded-f16",
    "llama-yarn-bin-f32",
    "llama-dynamic-bf16",
    "mistral-window-f16",
    "qwen2-sharded-bf16",
    "qwen3-bf16",
    "gemma2-bf16",
    "gemma3-f16",
    "phi3-longrope-bf16",
    "gpt-neox-sharded-bin-f16",
    "gpt-neox-serial-bf16",
];

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

pub(crate) fn load(name: &str) -> CausalLm {
    CausalLm::from_model_dir(&fixture(name), &Device::flex()).expect("the fixture loads")
}

/// Builds a tensor of one sequence's token ids, `[1, seq]`.
pub(crate) fn ids_tensor(ids: &[u32]) -> Tensor<2, Int> {
    let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let shape = [1, ids.len()];
    Tensor::from_data(TensorData::new(ids, shape), &Device::flex())
}

/// The results of transformers for a fixture.
pub(crate) struct Expected {
    pub(crate) ids: Vec<u32>,
    pub(crate) logits: Vec<f32>,
    /// The hidden states after each number of layers; the last ones are after the final norm.
    pub(crate) hidden_states: Vec<Vec<f32>>,
    /// The token ids of greedy decoding.
    pub(crate) continuation: Vec<u32>,
}

impl Expected {
    pub(crate) fn num_layers(&self) -> usize {
        self.hidden_states.len() - 1
    }
}

pub(crate) fn expected(name: &str) -> Expected {
    let mut reader = WeightReader::open_file(&fixture(name).join("expected.safetensors"))
        .expect("the fixture opens");
    let mut take = |tensor: &str| {
        let shape = reader.shape(tensor)?.to_vec();
        Some(reader.take(tensor, &shape).expect("the fixture reads"))
    };
    let ids = |values: Option<Vec<f32>>| -> Vec<u32> {
        values.expect("the fixture has it").into_iter().map(|id| id as u32).collect()
    };
    let mut expected = Expected {
        ids: ids(take("ids")),
        logits: take("logits").expect("the fixture has it"),
        hidden_states: Vec::new(),
        continuation: ids(take("continuation")),
    };
    while let Some(states) = take(&format!("hidden_states.{}", expected.hidden_states.len())) {
        expected.hidden_states.push(states);
    }
    expected
}
