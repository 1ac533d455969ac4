//! Weights in one of two forms, and forwards of rows through either: packed in host memory, for
//! decoding on the CPU, or as tensors, for training and for other devices.
//!
//! A model has its weights in one form. A drafter keeps its tensors beside the packed copy, for
//! writing and training.

use std::ops::{Deref, Range};
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;

use crate::config::ModelConfig;
use crate::decoder::norm::Norm;
use crate::decoder::source::WeightSource;
use crate::decoder::stack::{LayerStack, StackSpec};
use crate::decoder::{BOTH_PARTS, logits};
use crate::error::ModelError;
use crate::kv_cache::{CachePlace, KvCache};
use crate::packed::{
    self, PackedAttention, PackedLayer, PackedMlp, PackedNorm, PackedWeights, Packing, Threads,
};
use crate::rope::Reach;
use crate::rows::{DeviceRows, HostRows, RowData, Rows, Run};
use crate::spec::{LayerSpec, LinearSpec, ModelShape};

/// The form of weights that a forward uses.
pub(crate) enum Form<'a, T, P> {
    Packed(&'a P),
    Tensors(&'a T),
}

/// The layers of a model or a drafter and the norm after them.
pub(crate) type Stack<'a> = Form<'a, LayerStack, PackedStack>;

/// A part of a drafter: its tensors, and a packed copy if it decodes on the CPU.
#[derive(Module, Debug)]
pub(crate) struct Packable<T, P> {
    pub(crate) tensors: T,
    #[module(skip)]
    pub(crate) packed: Option<P>,
}

pub(crate) type PackableLinear = Packable<Linear, Arc<PackedWeights>>;
pub(crate) type PackableNorm = Packable<Norm, Arc<PackedNorm>>;
pub(crate) type PackableStack = Packable<LayerStack, Arc<PackedStack>>;
/// A table, `[numbers, width]`, packed as a matrix whose outputs are the rows of the table.
pub(crate) type PackableTable = Packable<Param<Tensor<2>>, Arc<PackedWeights>>;

impl<T, P> Deref for Packable<T, P> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.tensors
    }
}

impl<T, P> From<T> for Packable<T, P> {
    fn from(tensors: T) -> Self {
        Self { tensors, packed: None }
    }
}

impl<T, P> Packable<T, Arc<P>> {
    /// Drops the packed copy.
    pub(crate) fn unpacked(self) -> Self {
        self.tensors.into()
    }

    pub(crate) fn form(&self) -> Form<'_, T, P> {
        match &self.packed {
            Some(packed) => Form::Packed(packed),
            None => Form::Tensors(&self.tensors),
        }
    }
}

impl<T> Packable<T, Arc<PackedWeights>> {
    /// Looks up rows of a table, which `table` makes of the tensors.
    pub(crate) fn looked_up<'a>(
        &self,
        table: impl FnOnce(&T) -> Tensor<2>,
        ids: impl Iterator<Item = &'a u32>,
    ) -> RowData {
        match self.form() {
            Form::Packed(packed) => {
                HostRows { values: packed.read_outputs(ids), width: packed.inputs }.into()
            }
            Form::Tensors(tensors) => DeviceRows::looked_up(table(tensors), ids).into(),
        }
    }
}

impl PackableLinear {
    pub(crate) fn build<S: WeightSource>(
        spec: &LinearSpec,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let tensors = source.linear("", spec)?;
        let packed = source.packed(|packing| packing.linears("", &[*spec]))?;
        Ok(Self { tensors, packed })
    }

    /// Multiplies rows by the matrix and adds the bias.
    pub(crate) fn of_rows(&self, rows: Rows) -> Rows {
        let (place, slots) = rows.into_parts();
        match self.form() {
            Form::Packed(weights) => {
                let mut values = Vec::new();
                weights.multiply(&place.into_host().values, &mut values, &Threads::All);
                slots.rows(HostRows { values, width: weights.outputs })
            }
            Form::Tensors(linear) => {
                let rows = place.into_device(&linear.weight.device());
                slots.rows(rows.map(|rows| linear.forward(rows)))
            }
        }
    }

    /// Computes logits of normed rows, if the matrix is an LM head, with a soft cap if given.
    pub(crate) fn logits(&self, normed: &Rows, cap: Option<f32>) -> Rows {
        match self.form() {
            Form::Packed(head) => {
                let values = packed::logits(head, &normed.place.host().values, cap);
                normed.with_place(HostRows { values, width: head.outputs })
            }
            Form::Tensors(head) => {
                let rows = normed.place.clone().into_device(&head.weight.device());
                normed.with_place(rows.map(|rows| logits(rows, head.weight.val(), cap)))
            }
        }
    }
}

impl PackableNorm {
    pub(crate) fn build<S: WeightSource>(
        name: &'static str,
        model: &ModelConfig,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let (width, spec) = (model.shape.hidden_size, &model.spec.norm);
        let tensors = source.norm("", name, width, spec)?;
        let packed = source.packed(|packing| packing.norm("", name, width, spec))?;
        Ok(Self { tensors, packed })
    }
}

impl Form<'_, Norm, PackedNorm> {
    /// Norms rows.
    pub(crate) fn of_rows(&self, rows: Rows) -> Rows {
        let (place, slots) = rows.into_parts();
        match self {
            Self::Packed(norm) => {
                let mut rows = place.into_host();
                norm.forward(&mut rows.values);
                slots.rows(rows)
            }
            Self::Tensors(norm) => {
                let rows = place.into_device(&norm.gamma().device());
                slots.rows(rows.map(|rows| norm.forward(rows)))
            }
        }
    }
}

impl PackableStack {
    pub(crate) fn build<S: WeightSource>(
        spec: &StackSpec<'_>,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let tensors = LayerStack::build(spec, source)?;
        let packed = source.packed(|packing| PackedStack::read(spec, packing))?;
        Ok(Self { tensors, packed })
    }
}

/// Packed layers and the norm after them.
#[derive(Debug)]
pub(crate) struct PackedStack {
    layers: PackedLayers,
    pub(crate) norm: PackedNorm,
    pub(crate) reaches: Vec<Reach>,
}

/// The layers of a stack. The layers of some adapters lack a part.
#[derive(Debug)]
enum PackedLayers {
    Whole(Vec<PackedLayer>),
    Attention(Vec<PackedAttention>),
    Mlp(Vec<PackedMlp>),
}

impl PackedStack {
    /// Packs a checkpoint's tensors in their storage format.
    ///
    /// # Errors
    /// If a tensor is missing or misshapen, or a file is broken.
    pub(crate) fn read(
        spec: &StackSpec<'_>,
        packing: &mut Packing<'_>,
    ) -> Result<Self, ModelError> {
        let StackSpec { model: ModelConfig { shape, spec: decoder, .. }, layers, norm } = spec;
        let lack = |part: fn(&LayerSpec) -> bool| layers.iter().any(|(layer, _)| !part(layer));
        let each = layers.iter();
        let layers = if lack(|layer| layer.mlp.is_some()) {
            let attention = each.filter_map(|(layer, name)| {
                Some(packing.attention(layer.attention.as_ref()?, layer, shape, name))
            });
            PackedLayers::Attention(attention.collect::<Result<_, _>>()?)
        } else if lack(|layer| layer.attention.is_some()) {
            let mlp = each.filter_map(|(layer, name)| {
                Some(packing.mlp(layer.mlp.as_ref()?, layer, shape, name))
            });
            PackedLayers::Mlp(mlp.collect::<Result<_, _>>()?)
        } else {
            let whole = each.map(|(layer, name)| packing.layer(layer, shape, name));
            PackedLayers::Whole(whole.collect::<Result<_, _>>()?)
        };
        let norm = packing.norm("", norm, shape.hidden_size, &decoder.norm)?;
        Ok(Self { layers, norm, reaches: Reach::all_of(decoder, shape) })
    }

    /// Returns the layers.
    ///
    /// # Panics
    /// If they lack a part.
    pub(crate) fn layers(&self) -> &[PackedLayer] {
        let PackedLayers::Whole(layers) = &self.layers else { panic!("{BOTH_PARTS}") };
        layers
    }

    fn attention(&self, number: usize) -> Option<&PackedAttention> {
        match &self.layers {
            PackedLayers::Whole(layers) => Some(&layers[number].attention),
            PackedLayers::Attention(layers) => Some(&layers[number]),
            PackedLayers::Mlp(_) => None,
        }
    }

    fn len(&self) -> usize {
        match &self.layers {
            PackedLayers::Whole(layers) => layers.len(),
            PackedLayers::Attention(layers) => layers.len(),
            PackedLayers::Mlp(layers) => layers.len(),
        }
    }

    fn forward(
        &self,
        layers: Range<usize>,
        x: &mut [f32],
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let (placed, memory, scratch) = cache.extend_packed(layers.clone(), runs);
        let reaches = &self.reaches;
        match &self.layers {
            PackedLayers::Whole(all) => {
                packed::forward_layers(&all[layers], x, placed, memory, reaches, scratch);
            }
            PackedLayers::Attention(all) => all[layers]
                .iter()
                .zip(memory)
                .for_each(|(layer, slots)| layer.forward(x, placed, slots, reaches, scratch)),
            PackedLayers::Mlp(all) => all[layers].iter().for_each(|mlp| mlp.forward(x, scratch)),
        }
    }

    fn forward_reading(
        &self,
        both: (&[f32], &mut [f32]),
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let (placed, mut memory, scratch) = cache.extend_packed(0..1, runs);
        let slots = memory.next().expect("the cache has the layer");
        let (layer, reaches) = (&self.layers()[0], &self.reaches);
        packed::forward_reading(layer, both, placed, slots, reaches, scratch);
    }

    fn fill(
        &self,
        layers: Range<usize>,
        (x, is_normed): (&[f32], bool),
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let (placed, memory, scratch) = cache.extend_packed(layers.clone(), runs);
        for (number, slots) in layers.zip(memory) {
            let Some(attention) = self.attention(number) else { continue };
            let fill = if is_normed { PackedAttention::fill_read } else { PackedAttention::fill };
            fill(attention, x, placed, slots, &self.reaches, scratch);
        }
    }
}

impl Stack<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Packed(stack) => stack.len(),
            Self::Tensors(stack) => stack.layers.len(),
        }
    }

    /// Creates a cache of layers of this shape.
    pub(crate) fn new_cache(
        &self,
        shape: &ModelShape,
        capacity: usize,
        num_slots: usize,
    ) -> KvCache {
        let device;
        let place = match self {
            Self::Packed(stack) => stack.attention(0).map(|_| CachePlace::Host),
            Self::Tensors(stack) => {
                device = stack.device();
                stack.layers[0].attention.as_ref().map(|attention| {
                    let [query, ..] = attention.projections();
                    CachePlace::Device(&device, query.weight.dtype().into())
                })
            }
        };
        KvCache::new(shape, capacity, num_slots, place.unwrap_or(CachePlace::Nowhere))
    }

    /// Runs layers on new tokens, which follow the cached tokens of their sequences.
    pub(crate) fn forward(&self, layers: Range<usize>, rows: Rows, cache: &mut KvCache) -> Rows {
        if layers.is_empty() {
            return rows;
        }
        let (place, slots) = rows.into_parts();
        match self {
            Self::Packed(stack) => {
                let mut rows = place.into_host();
                stack.forward(layers, &mut rows.values, slots.runs(), cache);
                slots.rows(rows)
            }
            Self::Tensors(stack) => {
                let rows = place.into_device(&stack.device());
                let rows = stack.forward_cached(layers, rows, slots.runs(), cache);
                slots.rows(rows)
            }
        }
    }

    /// Runs all layers and the norm on new tokens.
    pub(crate) fn forward_normed(&self, rows: Rows, cache: &mut KvCache) -> Rows {
        self.norm().of_rows(self.forward(0..self.len(), rows, cache))
    }

    /// Runs the only layer on new tokens. Its attention reads the rows `read` instead of the
    /// residual stream `rows`; the norm has been applied to them already.
    pub(crate) fn forward_reading(&self, read: Rows, rows: Rows, cache: &mut KvCache) -> Rows {
        let ((read, _), (place, slots)) = (read.into_parts(), rows.into_parts());
        match self {
            Self::Packed(stack) => {
                let (read, mut rows) = (read.into_host(), place.into_host());
                let both = (&*read.values, &mut *rows.values);
                stack.forward_reading(both, slots.runs(), cache);
                slots.rows(rows)
            }
            Self::Tensors(stack) => {
                let device = stack.device();
                let (read, rows) = (read.into_device(&device), place.into_device(&device));
                let rows = stack.forward_reading(*read.tensor, rows, slots.runs(), cache);
                slots.rows(rows)
            }
        }
    }

    /// Writes the keys and values of new tokens into the caches of all layers from `first` on. The
    /// rest of the last layer is not computed. `hidden` contains the hidden states after `first`
    /// layers.
    pub(crate) fn fill_from(&self, first: usize, hidden: Rows, cache: &mut KvCache) {
        let last = self.len() - 1;
        let hidden = self.forward(first..last, hidden, cache);
        self.fill(last..last + 1, (hidden, false), cache);
    }

    /// Writes the keys and values of contexts into the cache of every layer. All layers read the
    /// same rows, which are after the norm.
    pub(crate) fn fill_each(&self, contexts: Rows, cache: &mut KvCache) {
        self.fill(0..self.len(), (contexts, true), cache);
    }

    fn fill(&self, layers: Range<usize>, (read, is_normed): (Rows, bool), cache: &mut KvCache) {
        let (place, slots) = read.into_parts();
        match self {
            Self::Packed(stack) => {
                let rows = place.into_host();
                stack.fill(layers, (&rows.values, is_normed), slots.runs(), cache);
            }
            Self::Tensors(stack) => {
                let rows = place.into_device(&stack.device());
                stack.fill(layers, (rows, is_normed), slots.runs(), cache);
            }
        }
    }

    /// Returns the norm after the layers.
    pub(crate) fn norm(&self) -> Form<'_, Norm, PackedNorm> {
        match self {
            Self::Packed(stack) => Form::Packed(&stack.norm),
            Self::Tensors(stack) => Form::Tensors(&stack.norm),
        }
    }

    /// Returns the norm of the rows that the first layer's attention reads.
    ///
    /// # Panics
    /// If the layer lacks a part.
    pub(crate) fn first_norm(&self) -> Form<'_, Norm, PackedNorm> {
        match self {
            Self::Packed(stack) => Form::Packed(&stack.layers()[0].attention.norm),
            Self::Tensors(stack) => {
                Form::Tensors(&stack.layers[0].attention.as_ref().expect(BOTH_PARTS).norm)
            }
        }
    }
}
