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

use crate::decoder::logits;
use crate::decoder::norm::Norm;
use crate::decoder::source::WeightSource;
use crate::decoder::stack::{LayerStack, StackSpec};
use crate::error::Result;
use crate::kv_cache::{CachePlace, KvCache};
use crate::packed::{self, PackedLayer, PackedNorm, PackedWeights, Packing, Threads};
use crate::rope::Reach;
use crate::rows::{DeviceRows, HostRows, RowData, Rows};
use crate::spec::ModelShape;

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
    /// Builds a part from its tensors and, if the source has one, their packed copy.
    pub(crate) fn build<S: WeightSource>(
        source: &mut S,
        tensors: impl FnOnce(&mut S) -> Result<T, S::Error>,
        pack: impl FnOnce(&mut Packing<'_>) -> Result<P>,
    ) -> Result<Self, S::Error> {
        Ok(Self { tensors: tensors(source)?, packed: source.packed(pack)? })
    }

    /// Drops the packed copy.
    pub(crate) fn unpacked(self) -> Self {
        self.tensors.into()
    }

    pub(crate) fn form(&self) -> Form<'_, T, P> {
        self.packed.as_deref().map_or(Form::Tensors(&self.tensors), Form::Packed)
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
    /// Multiplies rows by the matrix and adds the bias.
    pub(crate) fn of_rows(&self, rows: Rows) -> Rows {
        match self.form() {
            Form::Packed(weights) => {
                let mut values = Vec::new();
                weights.multiply(&rows.place.host().values, &mut values, &Threads::All);
                rows.with_place(HostRows { values, width: weights.outputs })
            }
            Form::Tensors(linear) => {
                rows.map_on(&linear.weight.device(), |rows| linear.forward(rows))
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
            Form::Tensors(head) => normed
                .clone()
                .map_on(&head.weight.device(), |rows| logits(rows, head.weight.val(), cap)),
        }
    }
}

impl Form<'_, Norm, PackedNorm> {
    /// Norms rows.
    pub(crate) fn of_rows(&self, rows: Rows) -> Rows {
        match self {
            Self::Packed(norm) => rows.on_host(|values, _| norm.forward(values)),
            Self::Tensors(norm) => rows.map_on(&norm.gamma().device(), |rows| norm.forward(rows)),
        }
    }
}

/// Packed layers and the norm after them.
#[derive(Debug)]
pub(crate) struct PackedStack {
    pub(crate) layers: Vec<PackedLayer>,
    pub(crate) norm: PackedNorm,
}

impl PackedStack {
    /// Packs a checkpoint's tensors in their storage format.
    ///
    /// # Errors
    /// If a tensor is missing or misshapen, or a file is broken.
    pub(crate) fn read(spec: &StackSpec<'_>, packing: &mut Packing<'_>) -> Result<Self> {
        let reaches = Reach::all_of(&spec.model.spec, &spec.model.shape);
        let layers = spec.layers().map(|layer| packing.layer(layer, &reaches));
        Ok(Self { layers: layers.collect::<Result<_>>()?, norm: packing.norm(spec.norm())? })
    }
}

impl Stack<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Packed(stack) => stack.layers.len(),
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
        let place = match self {
            Self::Packed(stack) => stack.layers[0].attention.as_ref().map(|_| CachePlace::Host),
            Self::Tensors(stack) => stack.layers[0].attention.as_ref().map(|attention| {
                let [query, ..] = attention.projections();
                CachePlace::Device(stack.device(), query.weight.dtype().into())
            }),
        };
        KvCache::new(shape, capacity, num_slots, place.unwrap_or(CachePlace::Nowhere))
    }

    /// Runs layers on new tokens, which follow the cached tokens of their sequences.
    pub(crate) fn forward(&self, layers: Range<usize>, rows: Rows, cache: &mut KvCache) -> Rows {
        if layers.is_empty() {
            return rows;
        }
        match self {
            Self::Packed(stack) => rows.on_host(|x, slots| {
                let (placed, memory, scratch) = cache.extend_packed(layers.clone(), slots.runs());
                packed::forward_layers(&stack.layers[layers], x, placed, memory, scratch);
            }),
            Self::Tensors(stack) => rows.on_device(&stack.device(), |rows, slots| {
                let positions = stack.positions(layers.clone(), &rows, slots.runs(), cache);
                let run = |hidden, number: usize| {
                    let cache = Some(cache.layer_mut(number));
                    stack.layers[number].forward(hidden, &positions, cache)
                };
                rows.map(|hidden| layers.fold(hidden, run))
            }),
        }
    }

    /// Runs all layers and the norm on new tokens.
    pub(crate) fn forward_normed(&self, rows: Rows, cache: &mut KvCache) -> Rows {
        self.norm().of_rows(self.forward(0..self.len(), rows, cache))
    }

    /// Runs the only layer on new tokens. Its attention reads the rows `read` instead of the
    /// residual stream `rows`; the norm has been applied to them already.
    pub(crate) fn forward_reading(&self, read: Rows, rows: Rows, cache: &mut KvCache) -> Rows {
        let (read, _) = read.into_parts();
        match self {
            Self::Packed(stack) => rows.on_host(|x, slots| {
                let (placed, mut memory, scratch) = cache.extend_packed(0..1, slots.runs());
                let memory = memory.next().expect("the cache has the layer");
                let (layer, both) = (&stack.layers[0], (&*read.into_host().values, &mut **x));
                packed::forward_reading(layer, both, placed, memory, scratch);
            }),
            Self::Tensors(stack) => rows.on_device(&stack.device(), |rows, slots| {
                let read = *read.into_device(&stack.device()).tensor;
                let positions = stack.positions(0..1, &rows, slots.runs(), cache);
                let cache = Some(cache.layer_mut(0));
                rows.map(|rows| stack.layers[0].forward_reading(read, rows, &positions, cache))
            }),
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
                let x = &place.into_host().values;
                let (placed, memory, scratch) = cache.extend_packed(layers.clone(), slots.runs());
                for (layer, slots) in stack.layers[layers].iter().zip(memory) {
                    if let Some(attention) = &layer.attention {
                        attention.fill((x, is_normed), placed, slots, scratch);
                    }
                }
            }
            Self::Tensors(stack) => {
                let rows = place.into_device(&stack.device());
                let positions = stack.positions(layers.clone(), &rows, slots.runs(), cache);
                for number in layers {
                    let read = (Tensor::clone(&rows.tensor), is_normed);
                    stack.layers[number].fill(read, &positions, cache.layer_mut(number));
                }
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
            Self::Packed(stack) => Form::Packed(&stack.layers[0].whole_attention().norm),
            Self::Tensors(stack) => Form::Tensors(&stack.layers[0].both_parts().0.norm),
        }
    }
}
