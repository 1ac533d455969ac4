//! Causal language models: embedding, decoder layers that can be run in ranges, final norm and LM
//! head.
//!
//! The pieces are public on purpose: a self-draft runs the layers `0..exit_layer`, verification
//! continues with `exit_layer..num_layers` on the same features. [`CausalLm::hidden_states`] runs
//! whole sequences without a cache, for training and for features.
//!
//! Which family a model is of is its config's to know: here are layers, wherever their weights are.

mod packed_model;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use serde_json::json;

use crate::buckets::padded_rows;
use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::decoder::layer::DecoderLayer;
use crate::decoder::norm::Norm;
use crate::decoder::soft_cap::soft_capped;
use crate::error::ModelError;
use crate::kv_cache::{CachePlace, KvCache};
use crate::packed::{self, PackedWeights, Storage};
use crate::rows::{DeviceRows, HostRows, Place, Rows, Run, Slots};
use crate::shape::ModelShape;
use crate::weights::{WeightDtype, WeightReader, write_json, write_safetensors};
use packed_model::PackedModel;

/// A causal language model.
#[derive(Module, Debug)]
pub struct CausalLm {
    weights: Weights,
    #[module(skip)]
    config: ModelConfig,
    /// Of the files.
    #[module(skip)]
    stored: WeightDtype,
    /// The layers that are here, the first ones: all of them, unless fewer were asked for.
    #[module(skip)]
    num_here: usize,
}

/// Where a model's weights are: in one of two places, never in both.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "there are a few models, each in one place")]
enum Weights {
    /// Tensors on a device: of what is trained, and of frozen models on other devices.
    Tensors(Decoder),
    /// Host memory: of a frozen model on the CPU.
    Packed(PackedModel),
}

impl ModelConfig {
    /// Initialises a model with random weights, for training from scratch.
    pub fn init(&self, device: &Device) -> CausalLm {
        let weights = Weights::Tensors(Decoder::init(self, device));
        let num_here = self.shape.num_layers;
        CausalLm { weights, config: self.clone(), stored: WeightDtype::F32, num_here }
    }
}

impl CausalLm {
    /// Loads a checkpoint directory: `config.json` and `model.safetensors` or shards. Weights are
    /// computed with in f32, however they are stored. On an autodiff device they can be trained
    /// further. On the CPU they are frozen otherwise, and kept in the format of the files, from
    /// which they are widened as they are used.
    ///
    /// # Errors
    /// If a file is missing or broken, or a tensor missing, extra or misshapen.
    pub fn from_model_dir(dir: &Path, device: &Device) -> Result<Self, ModelError> {
        Self::load(dir, WeightDtype::F32, None, None, device)
    }

    /// [`CausalLm::from_model_dir`], computing in `dtype`. Weights in bf16 are tensors, on the CPU
    /// too, where they are many times slower than packed ones.
    ///
    /// # Errors
    /// As [`CausalLm::from_model_dir`].
    pub fn from_model_dir_in(
        dir: &Path,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<Self, ModelError> {
        Self::load(dir, dtype, None, None, device)
    }

    /// [`CausalLm::from_model_dir`], with weights kept in `storage` where they are packed. A format
    /// that holds the files' numbers exactly changes no result, so a model's hash, which is of its
    /// files, says nothing of it; in a coarser one weights are rounded, and it is another model.
    ///
    /// # Errors
    /// As [`CausalLm::from_model_dir`].
    pub fn from_model_dir_stored(
        dir: &Path,
        storage: Storage,
        device: &Device,
    ) -> Result<Self, ModelError> {
        Self::load(dir, WeightDtype::F32, Some(storage), None, device)
    }

    /// [`CausalLm::from_model_dir_in`] of the first `num_layers` layers, or all if there are fewer, with
    /// embedding, final norm and LM head: what a self-draft behind them reads. What the directory has
    /// of deeper layers is not read, and need not be there.
    ///
    /// The shape stays the whole model's; to run a layer that is not here is a panic.
    ///
    /// # Errors
    /// As [`CausalLm::from_model_dir`].
    pub fn from_first_layers(
        dir: &Path,
        num_layers: usize,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<Self, ModelError> {
        Self::load(dir, dtype, None, Some(num_layers), device)
    }

    fn load(
        dir: &Path,
        dtype: WeightDtype,
        storage: Option<Storage>,
        num_layers: Option<usize>,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let config = ModelConfig::from_model_dir(dir)?;
        let num_all = config.shape.num_layers;
        let num_here = num_layers.unwrap_or(num_all).min(num_all);
        let is_deeper = |name: &str| {
            let layer = config.spec.names.layer_of(name);
            layer.is_some_and(|layer| (num_here..num_all).contains(&layer))
        };
        let mut reader = WeightReader::open_dir_of(dir, |name| !is_deeper(name))?;
        let mut here = config.clone();
        here.shape.num_layers = num_here;
        let weights = if dtype == WeightDtype::F32 && packed::runs_on(device) {
            Weights::Packed(PackedModel::read(&here, &mut reader, storage)?)
        } else {
            Weights::Tensors(Decoder::read(&here, &mut reader, dtype, device)?)
        };
        let tied_head = format!("{}.weight", config.spec.names.lm_head);
        reader.ignore(|name| {
            let is_tied_head = config.spec.tie_word_embeddings && name == tied_head;
            config.spec.names.ignored.iter().any(|end| name.ends_with(end)) || is_tied_head
        });
        let stored = WeightDtype::beside(&reader);
        reader.finish()?;
        Ok(Self { weights, config, stored, num_here })
    }

    /// Writes `config.json`, `generation_config.json` and `model.safetensors`, each under a
    /// temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_model_dir(&self, dir: &Path, dtype: WeightDtype) -> Result<(), ModelError> {
        let tensors = match &self.weights {
            Weights::Tensors(decoder) => decoder.named(&self.config),
            Weights::Packed(packed) => {
                packed.to_decoder(&self.config, &self.device()).named(&self.config)
            }
        };
        write_safetensors(&dir.join("model.safetensors"), &tensors, dtype, &[])?;
        let json = self.config.to_json(dtype.config_name());
        let generation =
            json!({"bos_token_id": json["bos_token_id"], "eos_token_id": json["eos_token_id"]});
        write_json(&dir.join("generation_config.json"), &generation)?;
        write_json(&dir.join("config.json"), &json)
    }

    /// What the model is, without its weights.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The model's sizes.
    pub fn shape(&self) -> &ModelShape {
        &self.config.shape
    }

    /// The layers that are here, the first ones.
    pub fn num_layers_here(&self) -> usize {
        self.num_here
    }

    fn check_here(&self, layers: &Range<usize>) {
        let num_here = self.num_here;
        assert!(layers.end <= num_here, "of the model, the first {num_here} layers alone are here");
    }

    /// The type that it computes in. Packed weights may be of another.
    pub fn dtype(&self) -> WeightDtype {
        match &self.weights {
            Weights::Tensors(decoder) if decoder.dtype() == FloatDType::BF16 => WeightDtype::Bf16,
            Weights::Tensors(_) | Weights::Packed(_) => WeightDtype::F32,
        }
    }

    /// The type to keep weights in that are used beside the model's: bf16 where its files have 16
    /// bits a number.
    pub fn stored_dtype(&self) -> WeightDtype {
        self.stored
    }

    /// Whether weights are packed in host memory: then what it computes of a row does not depend on
    /// the rows beside it, to the last bit.
    pub fn is_packed(&self) -> bool {
        matches!(self.weights, Weights::Packed(_))
    }

    /// The device that holds the weights.
    pub fn device(&self) -> Device {
        match &self.weights {
            Weights::Tensors(decoder) => decoder.device(),
            Weights::Packed(_) => Device::flex(),
        }
    }

    /// The model with its weights in `dtype`, in which it then computes; see `precision.rs`. Where
    /// weights are drawn lazily, as [`ModelConfig::init`] does, each is drawn, cast and let go in
    /// turn.
    pub fn to_dtype(self, dtype: WeightDtype) -> Self {
        let decoder = match self.weights {
            // Packed weights are computed with in f32.
            Weights::Packed(_) if dtype == WeightDtype::F32 => return self,
            Weights::Packed(packed) => packed.to_decoder(&self.config, &Device::flex()),
            Weights::Tensors(decoder) => decoder,
        };
        Self { weights: Weights::Tensors(decoder.in_dtype(dtype)), ..self }
    }

    /// The same with tensors in f32, to compare with.
    #[cfg(test)]
    pub(crate) fn to_tensors(&self) -> Self {
        let Weights::Packed(packed) = &self.weights else { return self.clone() };
        let decoder = packed.to_decoder(&self.config, &Device::flex());
        Self { weights: Weights::Tensors(decoder), ..self.clone() }
    }

    /// One layer, and the final norm: what an adapter can begin with.
    pub(crate) fn layer_and_norm(&self, number: usize) -> (DecoderLayer, Norm) {
        match &self.weights {
            Weights::Tensors(decoder) => (decoder.layers()[number].clone(), decoder.norm().clone()),
            Weights::Packed(packed) => {
                let device = self.device();
                (packed.layer(number, &self.config, &device), packed.norm(&self.config, &device))
            }
        }
    }

    /// A model of tensors, to be used beside one whose files have `stored`.
    pub(crate) fn of_tensors(config: ModelConfig, decoder: Decoder, stored: WeightDtype) -> Self {
        let num_here = config.shape.num_layers;
        Self { weights: Weights::Tensors(decoder), config, stored, num_here }
    }

    /// The embeddings as a matrix in f32, without what they are multiplied with.
    ///
    /// # Shapes
    /// - output: `[vocab, hidden]`
    pub(crate) fn embedding(&self) -> Tensor<2> {
        match &self.weights {
            Weights::Tensors(decoder) => decoder.embedding().cast(FloatDType::F32),
            Weights::Packed(packed) => packed.embedding_table(&self.device()),
        }
    }

    /// A cache for `num_slots` sequences of up to `capacity` tokens each.
    pub fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        match &self.weights {
            Weights::Tensors(decoder) => {
                let place = CachePlace::Device(&decoder.device(), decoder.dtype());
                KvCache::new(self.shape(), capacity, num_slots, place)
            }
            Weights::Packed(_) => KvCache::new(self.shape(), capacity, num_slots, CachePlace::Host),
        }
    }

    /// Looks up token embeddings.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    pub fn embed(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        match &self.weights {
            Weights::Tensors(decoder) => decoder.embed(ids),
            Weights::Packed(packed) => {
                let [batch, seq] = ids.dims();
                let ids: Vec<u32> = ids.into_data().iter::<u32>().collect();
                let HostRows { values, width } = packed.embed(&ids);
                packed::tensor(values, [batch, seq, width], &self.device())
            }
        }
    }

    /// The root of the mean square of all numbers of the embeddings.
    pub fn embedding_size(&self) -> f32 {
        match &self.weights {
            Weights::Tensors(decoder) => decoder.embedding_size(),
            Weights::Packed(packed) => packed.embedding_size(),
        }
    }

    /// Looks up the embeddings of tokens of the sequence in slot 0, for the layers over a cache: in
    /// host memory where the model has packed weights. There a token's results do not depend on
    /// the tokens beside it.
    pub fn embed_ids(&self, ids: &[u32]) -> Rows {
        if let Weights::Packed(packed) = &self.weights {
            return packed.embed(ids).into();
        }
        let num_rows = ids.len();
        let mut values: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        values.resize(padded_rows(num_rows), 0);
        let shape = [1, values.len()];
        let ids = Tensor::from_data(TensorData::new(values, shape), &self.device());
        Slots::One(0).rows(DeviceRows { tensor: Box::new(self.embed(ids)), num_rows })
    }

    /// [`CausalLm::embed_ids`] of tokens of several sequences, for one forward: each run is a slot
    /// and its sequence's next tokens.
    pub fn embed_runs(&self, runs: &[(usize, &[u32])]) -> Rows {
        let ids: Vec<u32> = runs.iter().flat_map(|(_, ids)| *ids).copied().collect();
        let slots: Slots =
            runs.iter().map(|(slot, ids)| Run { slot: *slot, num_rows: ids.len() }).collect();
        slots.rows(self.embed_ids(&ids).place)
    }

    /// Runs a range of layers on new tokens, which follow those that each layer's cache holds of
    /// their sequences. A row depends on its own sequence alone.
    ///
    /// # Panics
    /// If the layers of the range hold different numbers of a sequence's tokens, its slot is full,
    /// or its rows come in several runs.
    pub fn forward_layers(&self, layers: Range<usize>, hidden: Rows, cache: &mut KvCache) -> Rows {
        if layers.is_empty() {
            return hidden;
        }
        self.check_here(&layers);
        let num_rows = hidden.num_rows();
        let (place, slots) = hidden.into_parts();
        let runs = slots.runs(num_rows);
        match &self.weights {
            Weights::Tensors(decoder) => {
                let hidden = place.into_device(&decoder.device());
                let hidden = decoder.forward_layers(layers, hidden, runs, cache);
                slots.rows(hidden)
            }
            Weights::Packed(packed) => {
                let mut rows = place.into_host();
                packed.forward_layers(layers, &mut rows, runs, cache);
                slots.rows(rows)
            }
        }
    }

    /// Reads new tokens into the caches of layer `first` and all behind it, for their keys and
    /// values alone: of the last layer nothing else is computed. `hidden` is the stream after
    /// `first` layers; embeddings where that is 0.
    ///
    /// # Panics
    /// As [`CausalLm::forward_layers`].
    pub fn fill_cache(&self, first: usize, hidden: Rows, cache: &mut KvCache) {
        let last = self.shape().num_layers - 1;
        let num_rows = hidden.num_rows();
        let (place, slots) = self.forward_layers(first..last, hidden, cache).into_parts();
        let runs = slots.runs(num_rows);
        match &self.weights {
            Weights::Tensors(decoder) => {
                decoder.fill_last(place.into_device(&decoder.device()), runs, cache);
            }
            Weights::Packed(packed) => packed.fill_last(&place.into_host(), runs, cache),
        }
    }

    /// [`CausalLm::final_norm`] of rows.
    pub fn normed(&self, hidden: Rows) -> Rows {
        let (place, slots) = hidden.into_parts();
        match &self.weights {
            Weights::Tensors(decoder) => {
                let hidden = place.into_device(&decoder.device());
                slots.rows(hidden.map(|hidden| self.final_norm(hidden)))
            }
            Weights::Packed(packed) => slots.rows(packed.normed(place.into_host())),
        }
    }

    /// [`CausalLm::lm_head`] of normed rows, one row of logits each.
    pub fn logits(&self, normed: &Rows) -> Rows {
        match (&self.weights, &normed.place) {
            (Weights::Packed(packed), Place::Host(rows)) => normed.with_place(packed.logits(rows)),
            (Weights::Packed(packed), place) => {
                normed.with_place(packed.logits(&place.clone().into_host()))
            }
            (Weights::Tensors(decoder), place) => {
                let rows = place.clone().into_device(&decoder.device());
                normed.with_place(rows.map(|rows| self.lm_head(rows)))
            }
        }
    }

    /// Applies the final norm. Its output is what heads and Hugging Face's
    /// `hidden_states[-1]` mean by the final hidden state.
    pub fn final_norm(&self, hidden: Tensor<3>) -> Tensor<3> {
        match &self.weights {
            Weights::Tensors(decoder) => decoder.norm().forward(hidden),
            Weights::Packed(packed) => packed.norm(&self.config, &self.device()).forward(hidden),
        }
    }

    /// Applies the LM head to normed hidden states. The logits are f32, whatever the model computes
    /// in: what becomes of them, the soft cap first of all, is not rounded once more.
    ///
    /// # Shapes
    /// - hidden: `[batch, seq, hidden]`
    /// - output: `[batch, seq, vocab]`
    pub fn lm_head(&self, hidden: Tensor<3>) -> Tensor<3> {
        let [batch, seq, width] = hidden.dims();
        let rows = hidden.reshape([batch * seq, width]);
        let logits = rows.matmul(self.lm_head_weight()).cast(FloatDType::F32);
        let logits = soft_capped(logits, self.config.spec.logit_soft_cap);
        logits.reshape([batch, seq, self.shape().vocab_size])
    }

    /// The LM head in host memory, where the model is.
    pub(crate) fn packed_lm_head(&self) -> Option<&PackedWeights> {
        match &self.weights {
            Weights::Packed(packed) => Some(packed.lm_head()),
            Weights::Tensors(_) => None,
        }
    }

    /// The LM head as a matrix, for losses that take it in chunks; it has no bias. Logits may have
    /// a soft cap behind it: [`DecoderSpec::logit_soft_cap`](crate::DecoderSpec::logit_soft_cap).
    ///
    /// # Shapes
    /// - output: `[hidden, vocab]`
    pub fn lm_head_weight(&self) -> Tensor<2> {
        match &self.weights {
            Weights::Tensors(decoder) => decoder.lm_head_weight(),
            Weights::Packed(packed) => packed.lm_head_weight(&self.device()),
        }
    }

    /// Every layer's hidden states over whole sequences, without a cache: entry `ℓ` is the stream
    /// after `ℓ` layers, entry 0 the embeddings. The last is *not* normed.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `num_layers + 1` of `[batch, seq, hidden]`
    pub fn all_hidden_states(&self, ids: Tensor<2, Int>) -> Vec<Tensor<3>> {
        let [batch, seq] = ids.dims();
        let wanted = vec![0..seq; batch];
        let mut states = vec![self.embed(ids)];
        for number in 0..self.shape().num_layers {
            let last = states[number].clone();
            states.push(self.run_layers(number..number + 1, last, &wanted));
        }
        states
    }

    /// The hidden states after each number of layers in `exit_layers`, and the final ones (after
    /// the final norm), over whole sequences in one pass, without a cache. No other layer's states
    /// are kept.
    ///
    /// `wanted` names, for each sequence, the positions whose final states somebody reads. What
    /// lies behind them is padding, and what lies before them is only ever looked at: where that
    /// saves time, neither is computed to its end. So the exits' states hold before the end of
    /// `wanted`, the final ones within it; elsewhere they are finite and mean nothing.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - wanted: `batch` of them, within `seq`
    /// - output: `[batch, seq, hidden]` for each of `exit_layers`, in their order, and once more
    ///
    /// # Panics
    /// If there is no exit, there are fewer layers than one of `exit_layers`, or not one of `wanted` a
    /// sequence.
    pub fn hidden_states_at(
        &self,
        ids: Tensor<2, Int>,
        exit_layers: &[usize],
        wanted: &[Range<usize>],
    ) -> (Vec<Tensor<3>>, Tensor<3>) {
        let exits = self.exit_states_at(ids, exit_layers, wanted);
        let last = self.final_states_from(exit_layers, &exits, wanted);
        (exits, last)
    }

    /// Those of [`CausalLm::hidden_states_at`] after each number of layers in `exit_layers`; no layer
    /// behind the last of them is run.
    ///
    /// # Panics
    /// As there.
    pub fn exit_states_at(
        &self,
        ids: Tensor<2, Int>,
        exit_layers: &[usize],
        wanted: &[Range<usize>],
    ) -> Vec<Tensor<3>> {
        assert_eq!(ids.dims()[0], wanted.len(), "positions are wanted of every sequence");
        let mut rising: Vec<usize> = (0..exit_layers.len()).collect();
        rising.sort_by_key(|place| exit_layers[*place]);
        let mut hidden = self.embed(ids);
        let mut num_run = 0;
        let mut exits = vec![hidden.clone(); exit_layers.len()];
        for place in rising {
            hidden = self.run_layers(num_run..exit_layers[place], hidden, wanted);
            num_run = exit_layers[place];
            exits[place] = hidden.clone();
        }
        exits
    }

    /// The final ones of [`CausalLm::hidden_states_at`], from those that
    /// [`CausalLm::exit_states_at`] gave. Of a sequence of which nothing is wanted, nothing is computed.
    ///
    /// # Panics
    /// If there is no exit.
    pub fn final_states_from(
        &self,
        exit_layers: &[usize],
        exits: &[Tensor<3>],
        wanted: &[Range<usize>],
    ) -> Tensor<3> {
        let deepest = exit_layers.iter().zip(exits).max_by_key(|(layer, _)| **layer);
        let (layer, hidden) = deepest.expect("there is an exit");
        let last = self.run_layers(*layer..self.shape().num_layers, hidden.clone(), wanted);
        self.final_norm(last)
    }

    /// The final hidden states (after the final norm) over whole sequences, without a cache.
    /// Causal, so padding on the right changes nothing to its left.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    pub fn hidden_states(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [batch, seq] = ids.dims();
        let hidden =
            self.run_layers(0..self.shape().num_layers, self.embed(ids), &vec![0..seq; batch]);
        self.final_norm(hidden)
    }

    /// The hidden states after the first `exit_layer` layers over whole sequences, without a cache;
    /// no other layer is run.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Panics
    /// If there are fewer layers.
    pub fn exit_states(&self, ids: Tensor<2, Int>, exit_layer: usize) -> Tensor<3> {
        let [batch, seq] = ids.dims();
        self.run_layers(0..exit_layer, self.embed(ids), &vec![0..seq; batch])
    }

    /// Runs layers over whole sequences, without a cache. `wanted`: see
    /// [`CausalLm::hidden_states_at`].
    fn run_layers(
        &self,
        layers: Range<usize>,
        hidden: Tensor<3>,
        wanted: &[Range<usize>],
    ) -> Tensor<3> {
        self.check_here(&layers);
        match &self.weights {
            Weights::Tensors(decoder) => decoder.run_layers(layers, hidden),
            Weights::Packed(packed) => {
                let (shape, device) = (hidden.dims(), hidden.device());
                let mut x = packed::values(hidden);
                let are_last = layers.end == self.shape().num_layers;
                packed.run_sequences(layers, &mut x, wanted, are_last);
                packed::tensor(x, shape, &device)
            }
        }
    }
}
