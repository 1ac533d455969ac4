//! Causal language models: embedding, decoder layers that can run in ranges, final norm and LM
//! head.
//!
//! A self-draft runs layers `0..exit_layer`, and verification continues with
//! `exit_layer..num_layers` on the same hidden states, so these parts are public.
//! [`CausalLm::hidden_states`] runs whole sequences without a cache, for training and for features.
//!
//! The weights have one of two forms. A frozen model on the CPU is packed in host memory
//! (`packed`). Every other model consists of tensors on a device (`decoder`). Callers see no
//! difference.

mod packed_model;
#[cfg(test)]
pub(crate) mod tests;

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use draftsmith_files::write_json;
use serde_json::json;

use crate::buckets::padded_rows;
use crate::config::ModelConfig;
use crate::decoder::layer::DecoderLayer;
use crate::decoder::norm::Norm;
use crate::decoder::{Decoder, logits};
use crate::error::Result;
use crate::frozen::Stack;
use crate::kv_cache::{CachePlace, KvCache};
use crate::packed::{self, PackedWeights};
use crate::rows::{DeviceRows, HostRows, Rows, Run, Slots};
use crate::spec::{ModelShape, NormForm, SessionFaults};
use crate::weights::{WeightDtype, WeightReader, write_safetensors};
use packed_model::PackedModel;

/// A causal language model.
#[derive(Module, Debug)]
pub struct CausalLm {
    weights: ModelWeights,
    #[module(skip)]
    config: ModelConfig,
    /// The type of the weights in the model's files.
    #[module(skip)]
    stored: WeightDtype,
    /// The number of leading layers that were loaded. These are all layers unless the caller asked
    /// for fewer.
    #[module(skip)]
    num_here: usize,
}

/// A model's weights in one of two forms.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "there are a few models, each in one place")]
enum ModelWeights {
    /// Tensors on a device, for training and for frozen models on other devices.
    Tensors(Decoder),
    /// Packed weights in host memory, for a frozen model on the CPU.
    Packed(PackedModel),
}

impl ModelConfig {
    /// Initialises a model with random weights, for training from scratch.
    pub fn init(&self, device: &Device) -> CausalLm {
        let weights = ModelWeights::Tensors(Decoder::init(self, device));
        let num_here = self.shape.num_layers;
        CausalLm { weights, config: self.clone(), stored: WeightDtype::F32, num_here }
    }
}

impl CausalLm {
    /// Loads a checkpoint directory: `config.json`, and `model.safetensors` or shards. The model
    /// computes in f32 regardless of the stored type. On an autodiff device it can be trained. On
    /// the CPU it is frozen; its weights keep the stored type in memory and are widened in
    /// registers.
    ///
    /// # Errors
    /// If a file is missing or broken, or a tensor is missing, extra or misshapen.
    pub fn from_model_dir(dir: &Path, device: &Device) -> Result<Self> {
        Self::load(dir, WeightDtype::F32, None, device)
    }

    /// Loads a checkpoint as [`CausalLm::from_model_dir`] does, computing in `dtype`. bf16 on the CPU
    /// uses tensors and is many times slower than packed weights.
    ///
    /// With `num_layers` it loads only the first layers, plus embedding, final norm and LM head: all
    /// that a self-draft needs. Files of deeper layers are not read and may be absent. The shape stays
    /// that of the whole model. Running a layer that was not loaded panics.
    ///
    /// # Errors
    /// As [`CausalLm::from_model_dir`].
    pub fn load(
        dir: &Path,
        dtype: WeightDtype,
        num_layers: Option<usize>,
        device: &Device,
    ) -> Result<Self> {
        let config = ModelConfig::from_model_dir(dir)?;
        let num_all = config.shape.num_layers;
        let num_here = num_layers.unwrap_or(num_all).min(num_all);
        let names = &config.spec.names;
        // Layers after the model's last predict further tokens, which transformers skips too.
        let is_deeper = |name: &str| {
            let layer = names.layer_of(&names.with_base(name));
            layer.is_some_and(|layer| layer >= num_here)
        };
        let reader = WeightReader::open_dir_of(dir, |name| !is_deeper(name))?.with_base(names);
        Self::read(config, reader, (dtype, num_here), device)
    }

    /// Loads only the ends of a checkpoint: embeddings, final norm and LM head, under any prefix. The
    /// model may be of any family, and its layers quantised. Files without its ends may be absent.
    ///
    /// # Errors
    /// As [`CausalLm::from_model_dir`], or if the ends are quantised, except in a GGUF file.
    pub fn load_ends(dir: &Path, dtype: WeightDtype, device: &Device) -> Result<Self> {
        let config = ModelConfig::ends_from_model_dir(dir)?;
        let reader = WeightReader::open_ends(dir, &config.spec.names)?;
        Self::read(config, reader, (dtype, 0), device)
    }

    /// Reads the tensors of a model's ends and of its first layers.
    fn read(
        config: ModelConfig,
        mut reader: WeightReader,
        (dtype, num_here): (WeightDtype, usize),
        device: &Device,
    ) -> Result<Self> {
        let mut here = config.clone();
        here.shape.num_layers = num_here;
        let weights = if dtype == WeightDtype::F32 && packed::runs_on(device) {
            ModelWeights::Packed(PackedModel::read(&here, &mut reader)?)
        } else {
            ModelWeights::Tensors(Decoder::read(&here, &mut reader, dtype, device)?)
        };
        let tied_head = format!("{}.weight", config.spec.names.lm_head);
        reader.ignore(|name| {
            let is_tied_head = config.spec.tie_word_embeddings && name == tied_head;
            config.spec.names.is_foreign(name) || is_tied_head
        });
        let stored = WeightDtype::beside(&reader);
        reader.finish()?;
        Ok(Self { weights, config, stored, num_here })
    }

    /// Describes what the user should know of a checkpoint: the tensors that [`CausalLm::load`] skips,
    /// and the keys that other programs read differently.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn notes(dir: &Path, config: &ModelConfig) -> Result<Vec<String>> {
        let ModelConfig { architecture, shape, spec } = config;
        let mut notes = Vec::from_iter(Self::ignored_head(dir, config)?);
        if spec.rope.width.is_some() && !architecture.rotates_in_part() {
            notes.push(format!(
                "`{}` rotates a part of each head (`partial_rotary_factor`), as in vLLM, while transformers 5 ignores this \
                 key for a `{}` and rotates all",
                dir.display(),
                architecture.model_type()
            ));
        }
        let reader = WeightReader::open_dir(dir)?.with_base(&spec.names);
        let skipped = reader.names().filter(|name| {
            let is_behind = spec.names.layer_of(name).is_some_and(|at| at >= shape.num_layers);
            is_behind || spec.names.is_foreign(name) && !spec.names.is_buffer(name)
        });
        let skipped: Vec<&str> = skipped.collect();
        notes.extend(skipped.first().map(|first| {
            format!(
                "`{}` has {} tensors that a `{}` doesn't use, such as `{first}`; they are skipped, as in transformers",
                dir.display(),
                skipped.len(),
                architecture.model_type()
            )
        }));
        Ok(notes)
    }

    /// Describes the LM head that [`CausalLm::load`] ignores, because `config.json` ties the head to
    /// the embeddings; `None` if the checkpoint stores none, or the same numbers. Of a large
    /// vocabulary some 4096 rows are compared.
    fn ignored_head(dir: &Path, config: &ModelConfig) -> Result<Option<String>> {
        let ModelConfig { shape, spec, .. } = config;
        let (names, shape) = (&spec.names, [shape.vocab_size, shape.hidden_size]);
        let both = [names.lm_head, names.embedding].map(|name| format!("{name}.weight"));
        let is_one = |name: &str| both.contains(&names.with_base(name));
        let mut reader = WeightReader::open_dir_of(dir, is_one)?.with_base(names);
        if !spec.tie_word_embeddings || reader.shape(&both[0]).is_none() {
            return Ok(None);
        }
        let every = shape[0].div_ceil(4096).max(1);
        let [head, embedding] = both.each_ref().map(|name| {
            let (mut values, rows) = (Vec::new(), (0..shape[0]).step_by(every));
            let rows = rows.map(|row| row..row + 1);
            reader.take_rows(name, &shape, rows, |_, row| values.extend_from_slice(row)).ok()?;
            Some(values)
        });
        let [head_name, embedding_name] = &both;
        Ok((head != embedding).then(|| {
            format!(
                "`{}` ties its LM head (`tie_word_embeddings`), but `{head_name}` has other numbers than \
                 `{embedding_name}`: the embeddings are used, as in vLLM, while transformers 5 uses the stored head; \
                 hint: set `tie_word_embeddings` to false to use it here too",
                dir.display()
            )
        }))
    }

    /// Writes `config.json`, `generation_config.json` and `model.safetensors`, each under a
    /// temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_model_dir(&self, dir: &Path, dtype: WeightDtype) -> Result<()> {
        let tensors = match &self.weights {
            ModelWeights::Tensors(decoder) => decoder.named(&self.config),
            ModelWeights::Packed(packed) => {
                packed.to_decoder(&self.config, &self.device()).named(&self.config)
            }
        };
        write_safetensors(&dir.join("model.safetensors"), &tensors, dtype, &[])?;
        let json = self.config.to_json(dtype.config_name());
        let generation =
            json!({"bos_token_id": json["bos_token_id"], "eos_token_id": json["eos_token_id"]});
        write_json(&dir.join("generation_config.json"), &generation)?;
        Ok(write_json(&dir.join("config.json"), &json)?)
    }

    /// Returns the architecture, without weights.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the model with sessions that have these faults.
    #[must_use]
    pub fn with_faults(mut self, faults: SessionFaults) -> Self {
        self.config.spec.faults = faults;
        self
    }

    /// Returns the sizes and special tokens.
    pub fn shape(&self) -> &ModelShape {
        &self.config.shape
    }

    /// Returns the number of leading layers that were loaded.
    pub fn num_here(&self) -> usize {
        self.num_here
    }

    fn check_here(&self, layers: &Range<usize>) {
        let num_here = self.num_here;
        let are_here = layers.is_empty() || layers.end <= num_here;
        assert!(are_here, "only the model's first {num_here} layers were loaded");
    }

    /// Returns the type in which the model computes. Packed weights may be stored in another type.
    pub fn dtype(&self) -> WeightDtype {
        match &self.weights {
            ModelWeights::Tensors(decoder) if decoder.dtype() == FloatDType::BF16 => {
                WeightDtype::Bf16
            }
            ModelWeights::Tensors(_) | ModelWeights::Packed(_) => WeightDtype::F32,
        }
    }

    /// Returns the type for weights that are stored beside the model's: bf16 if its files have at
    /// most 16 bits per number, otherwise f32.
    pub fn stored_dtype(&self) -> WeightDtype {
        self.stored
    }

    /// Returns whether the weights are packed. If so, each row's result is independent of the other
    /// rows, to the last bit.
    pub fn is_packed(&self) -> bool {
        matches!(self.weights, ModelWeights::Packed(_))
    }

    /// Returns the device that holds the weights.
    pub fn device(&self) -> Device {
        match &self.weights {
            ModelWeights::Tensors(decoder) => decoder.device(),
            ModelWeights::Packed(_) => Device::flex(),
        }
    }

    /// Converts the model to compute in `dtype` (see `precision.rs`). Weights that are initialised
    /// lazily, as by [`ModelConfig::init`], are drawn, cast and dropped one by one.
    pub fn to_dtype(self, dtype: WeightDtype) -> Self {
        let decoder = match self.weights {
            // Packed weights already compute in f32.
            ModelWeights::Packed(_) if dtype == WeightDtype::F32 => return self,
            ModelWeights::Packed(packed) => packed.to_decoder(&self.config, &Device::flex()),
            ModelWeights::Tensors(decoder) => decoder,
        };
        Self { weights: ModelWeights::Tensors(decoder.in_dtype(dtype)), ..self }
    }

    /// Returns the same model with its weights as tensors in f32, for comparison.
    #[cfg(test)]
    pub(crate) fn to_tensors(&self) -> Self {
        let ModelWeights::Packed(packed) = &self.weights else { return self.clone() };
        let decoder = packed.to_decoder(&self.config, &Device::flex());
        Self { weights: ModelWeights::Tensors(decoder), ..self.clone() }
    }

    /// Returns a layer, for initialising adapters and draft models; `None` if it was not loaded.
    pub(crate) fn layer(&self, number: usize) -> Option<DecoderLayer> {
        let is_here = number < self.num_here;
        is_here.then(|| match &self.weights {
            ModelWeights::Tensors(decoder) => decoder.stack.layers[number].clone(),
            ModelWeights::Packed(packed) => packed.layer(number, &self.config, &self.device()),
        })
    }

    /// Returns the final norm.
    pub(crate) fn last_norm(&self) -> Norm {
        self.norm().into_owned()
    }

    /// Wraps a decoder of tensors as a model. `stored` is the type of the weights in the model's
    /// files.
    pub(crate) fn of_tensors(config: ModelConfig, decoder: Decoder, stored: WeightDtype) -> Self {
        let num_here = config.shape.num_layers;
        Self { weights: ModelWeights::Tensors(decoder), config, stored, num_here }
    }

    /// Returns the embedding matrix in f32, without the family's embedding scale.
    ///
    /// # Shapes
    /// - output: `[vocab, hidden]`
    pub(crate) fn embedding(&self) -> Tensor<2> {
        match &self.weights {
            ModelWeights::Tensors(decoder) => decoder.embedding().cast(FloatDType::F32),
            ModelWeights::Packed(packed) => packed.embedding_table(&self.device()),
        }
    }

    /// Creates a cache for `num_slots` sequences of up to `capacity` tokens each.
    pub fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        let place = match &self.weights {
            ModelWeights::Tensors(decoder) => CachePlace::Device(decoder.device(), decoder.dtype()),
            ModelWeights::Packed(_) => CachePlace::Host,
        };
        let cache = KvCache::new(self.shape(), capacity, num_slots, place);
        cache.with_bits(self.config.spec.faults.cache_bits)
    }

    /// Looks up token embeddings.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    pub fn embed(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        match &self.weights {
            ModelWeights::Tensors(decoder) => decoder.embed(ids),
            ModelWeights::Packed(packed) => {
                let [batch, seq] = ids.dims();
                let ids: Vec<u32> = ids.into_data().iter::<u32>().collect();
                let HostRows { values, width } = packed.embed(&ids);
                packed::tensor(values, [batch, seq, width], &self.device())
            }
        }
    }

    /// Computes the root mean square of the embeddings, with the family's embedding scale.
    pub fn embedding_size(&self) -> f32 {
        match &self.weights {
            ModelWeights::Tensors(decoder) => decoder.embedding_size(),
            ModelWeights::Packed(packed) => packed.embedding_size(),
        }
    }

    /// Looks up embeddings for tokens of slot 0. The rows are in host memory if the weights are
    /// packed, otherwise on the device.
    pub fn embed_ids(&self, ids: &[u32]) -> Rows {
        if let ModelWeights::Packed(packed) = &self.weights {
            return Rows::of_slot_0(packed.embed(ids));
        }
        let num_rows = ids.len();
        let mut values: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        values.resize(padded_rows(num_rows), 0);
        let shape = [1, values.len()];
        let ids = Tensor::from_data(TensorData::new(values, shape), &self.device());
        Rows::of_slot_0(DeviceRows { tensor: Box::new(self.embed(ids)), num_rows })
    }

    /// Looks up embeddings as [`CausalLm::embed_ids`] does, for tokens of several sequences in one
    /// forward. Each run is a sequence's slot and its next tokens.
    pub fn embed_runs(&self, runs: &[(usize, &[u32])]) -> Rows {
        let ids: Vec<u32> = runs.iter().flat_map(|(_, ids)| *ids).copied().collect();
        let slots: Slots =
            runs.iter().map(|(slot, ids)| Run { slot: *slot, num_rows: ids.len() }).collect();
        slots.rows(self.embed_ids(&ids).place)
    }

    /// Runs a range of layers on new tokens, which follow the cached tokens of their sequences.
    /// Each row depends only on its own sequence.
    ///
    /// # Panics
    /// If the layers of the range hold different numbers of a sequence's tokens, a slot is full, or
    /// a sequence's rows come in several runs.
    pub fn forward_layers(&self, layers: Range<usize>, hidden: Rows, cache: &mut KvCache) -> Rows {
        self.check_here(&layers);
        self.stack().forward(layers, hidden, cache)
    }

    /// Writes the keys and values of new tokens into the caches of all layers from `first` on. The
    /// rest of the last layer is not computed. `hidden` contains the hidden states after `first`
    /// layers; these are the embeddings if `first` is 0.
    ///
    /// # Panics
    /// As [`CausalLm::forward_layers`].
    pub fn fill_cache(&self, first: usize, hidden: Rows, cache: &mut KvCache) {
        self.check_here(&(first..self.shape().num_layers));
        self.stack().fill_from(first, hidden, cache);
    }

    /// Applies [`CausalLm::final_norm`] to rows.
    pub fn normed(&self, hidden: Rows) -> Rows {
        self.stack().norm().of_rows(hidden)
    }

    fn stack(&self) -> Stack<'_> {
        match &self.weights {
            ModelWeights::Tensors(decoder) => Stack::Tensors(&decoder.stack),
            ModelWeights::Packed(packed) => packed.stack(),
        }
    }

    /// Applies [`CausalLm::lm_head`] to rows after the final norm. Returns one row of logits for
    /// each.
    pub fn logits(&self, normed: &Rows) -> Rows {
        match &self.weights {
            ModelWeights::Packed(packed) => normed.with_place(packed.logits(&normed.place.host())),
            ModelWeights::Tensors(decoder) => {
                let rows = normed.place.clone().into_device(&decoder.device());
                normed.with_place(rows.map(|rows| self.lm_head(rows)))
            }
        }
    }

    /// Applies the final norm. The output is what acceptance heads read, and what Hugging Face
    /// calls `hidden_states[-1]`.
    pub fn final_norm(&self, hidden: Tensor<3>) -> Tensor<3> {
        self.norm().forward(hidden)
    }

    /// Applies the final norm with each function that it may have: one, or two for a model of a
    /// family that we do not know, whose checkpoint may store weights minus 1.
    pub fn possible_final_norms(&self, hidden: Tensor<3>) -> Vec<Tensor<3>> {
        let mut normed = vec![self.final_norm(hidden.clone())];
        if self.config.spec.norm.form == NormForm::Undecided {
            normed.push(self.norm().plus_one().forward(hidden));
        }
        normed
    }

    fn norm(&self) -> Cow<'_, Norm> {
        match &self.weights {
            ModelWeights::Tensors(decoder) => Cow::Borrowed(&decoder.stack.norm),
            ModelWeights::Packed(packed) => Cow::Owned(packed.norm(&self.config, &self.device())),
        }
    }

    /// Applies the LM head to hidden states after the final norm. Logits are always f32.
    ///
    /// # Shapes
    /// - hidden: `[batch, seq, hidden]`
    /// - output: `[batch, seq, vocab]`
    pub fn lm_head(&self, hidden: Tensor<3>) -> Tensor<3> {
        logits(hidden, self.lm_head_weight(), self.config.spec.logit_soft_cap)
    }

    /// Returns the LM head if it is packed.
    pub(crate) fn packed_lm_head(&self) -> Option<&PackedWeights> {
        match &self.weights {
            ModelWeights::Packed(packed) => Some(packed.lm_head()),
            ModelWeights::Tensors(_) => None,
        }
    }

    /// Returns the LM head as a matrix, for losses that compute logits in chunks. It has no bias.
    /// The caller applies the soft cap, if there is one:
    /// [`DecoderSpec::logit_soft_cap`](crate::DecoderSpec::logit_soft_cap).
    ///
    /// # Shapes
    /// - output: `[hidden, vocab]`
    pub fn lm_head_weight(&self) -> Tensor<2> {
        match &self.weights {
            ModelWeights::Tensors(decoder) => decoder.lm_head_weight(),
            ModelWeights::Packed(packed) => packed.lm_head_weight(&self.device()),
        }
    }

    /// Computes the exit states (hidden states after each number of layers in `exit_layers`) and
    /// the final hidden states after the final norm. It runs over whole sequences in one pass
    /// without a cache.
    ///
    /// `wanted` lists, for each sequence, the positions whose final states are needed. Later
    /// positions are padding, and earlier ones are only attended to; neither is computed further
    /// than necessary. Exit states are valid before the end of `wanted`, and final states within
    /// `wanted`. All other values are finite and meaningless.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - wanted: one range per sequence, within `seq`
    /// - output: `[batch, seq, hidden]` for each of `exit_layers` in order, and the final states
    ///
    /// # Panics
    /// If `exit_layers` is empty or has a layer that does not exist, or `wanted` does not have one
    /// range per sequence.
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

    /// Computes the exit states of [`CausalLm::hidden_states_at`]. No layer after the deepest exit
    /// runs.
    ///
    /// # Panics
    /// As for [`CausalLm::hidden_states_at`].
    pub fn exit_states_at(
        &self,
        ids: Tensor<2, Int>,
        exit_layers: &[usize],
        wanted: &[Range<usize>],
    ) -> Vec<Tensor<3>> {
        assert_eq!(ids.dims()[0], wanted.len(), "one range of positions per sequence");
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

    /// Computes the final states of [`CausalLm::hidden_states_at`] from the exit states. A sequence
    /// with an empty range in `wanted` costs nothing.
    ///
    /// # Panics
    /// If `exit_layers` is empty.
    pub fn final_states_from(
        &self,
        exit_layers: &[usize],
        exits: &[Tensor<3>],
        wanted: &[Range<usize>],
    ) -> Tensor<3> {
        let deepest = exit_layers.iter().zip(exits).max_by_key(|(layer, _)| **layer);
        let (layer, hidden) = deepest.expect("at least one exit");
        let last = self.run_layers(*layer..self.shape().num_layers, hidden.clone(), wanted);
        self.final_norm(last)
    }

    /// Computes the final hidden states (after the final norm) over whole sequences, without a
    /// cache. The model is causal, so padding on the right does not change earlier positions.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    pub fn hidden_states(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.final_norm(self.exit_states(ids, self.shape().num_layers))
    }

    /// Computes the hidden states after the first `exit_layer` layers over whole sequences, without
    /// a cache. No later layer runs.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Panics
    /// If the model has fewer layers.
    pub fn exit_states(&self, ids: Tensor<2, Int>, exit_layer: usize) -> Tensor<3> {
        let [batch, seq] = ids.dims();
        self.run_layers(0..exit_layer, self.embed(ids), &vec![0..seq; batch])
    }

    /// Runs layers over whole sequences, without a cache. For `wanted`, see
    /// [`CausalLm::hidden_states_at`].
    fn run_layers(
        &self,
        layers: Range<usize>,
        hidden: Tensor<3>,
        wanted: &[Range<usize>],
    ) -> Tensor<3> {
        self.check_here(&layers);
        match &self.weights {
            ModelWeights::Tensors(decoder) => {
                decoder.stack.forward(layers, hidden, &decoder.device())
            }
            ModelWeights::Packed(packed) => {
                let (shape, device) = (hidden.dims(), hidden.device());
                let mut x = packed::values(hidden);
                let are_last = layers.end == self.shape().num_layers;
                packed.run_sequences(layers, &mut x, wanted, are_last);
                packed::tensor(x, shape, &device)
            }
        }
    }
}
