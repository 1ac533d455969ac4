//! Keys and values of the tokens read so far, for several sequences. Each sequence has a slot, with
//! a length for each layer.
//!
//! The context limit in `config.json` allocates nothing, because sequences rarely reach it. Memory
//! grows with the tokens read, by doubling.
//!
//! In a self-draft, shallow layers may have read more tokens than deep ones, so each layer has its
//! own length. [`KvCache::truncate`] shortens every layer that is longer. It only changes lengths;
//! the next tokens overwrite the rest. A slot truncated to 0 is ready for the next sequence. Layers
//! with an attention window keep all keys and values too, so a rollback never needs a token that
//! was evicted.
//!
//! The last tokens of a slot may form a tree ([`KvCache::branch`]). After verification, one path of
//! it is kept ([`KvCache::keep`]). The logits of its nodes differ by rounding from those of the
//! path read as a chain, because other nodes were cached between them.

use std::ops::Range;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use crate::buckets::padded_keys;
use crate::following::Following;
use crate::packed::{PackedLayerCache, Scratch};
use crate::placed::{PlacedRows, PlacedRun};
use crate::rows::Run;
use crate::spec::ModelShape;
use crate::token_tree::TokenTree;

/// The number of tokens per slot that a new cache allocates.
const FIRST: usize = 1024;

/// The keys and values of every layer of one model.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    capacity: usize,
    /// The number of tokens per slot for which memory is allocated.
    allocated: usize,
    /// The token tree that the last tokens of each slot form.
    trees: Vec<TokenTree>,
    /// The runs of rows in the current forward.
    placed: Vec<PlacedRun>,
    /// Buffers for forwards with packed weights.
    scratch: Scratch,
}

/// The keys and values of one layer.
#[derive(Debug)]
pub(crate) struct LayerCache {
    store: Store,
    /// For each slot, the number of tokens that this layer has read.
    lens: Vec<usize>,
}

/// The storage of a layer's keys and values.
#[derive(Debug)]
enum Store {
    /// Keys and values on the model's device, in the model's type, `[slots, kv_heads, allocated,
    /// head_dim]` each. `Option` allows a write to move the tensor out, because writing in place
    /// needs the only reference.
    Device(Box<[Option<Tensor<4>>; 2]>),
    /// Keys and values in host memory, one entry per slot, for packed weights.
    Host(Vec<PackedLayerCache>),
    /// No keys and values: the layer has no attention and only counts its tokens.
    Nowhere,
}

/// The kind of storage that a model needs for its cache.
#[derive(Debug)]
pub(crate) enum CachePlace {
    /// Host memory, for packed weights.
    Host,
    /// A device, and the type in which the model computes.
    Device(Device, FloatDType),
    /// No storage, for layers without attention.
    Nowhere,
}

impl KvCache {
    /// Creates a cache for `num_slots` sequences of up to `capacity` tokens each.
    pub(crate) fn new(
        shape: &ModelShape,
        capacity: usize,
        num_slots: usize,
        place: CachePlace,
    ) -> Self {
        let (heads, head_dim) = (shape.num_kv_heads, shape.head_dim);
        let first = capacity.min(FIRST);
        let allocated = match place {
            CachePlace::Device(..) => padded_keys(first),
            CachePlace::Host | CachePlace::Nowhere => first,
        };
        let store = || match &place {
            CachePlace::Host => {
                let new = |_| PackedLayerCache::new(heads, head_dim, allocated);
                Store::Host((0..num_slots).map(new).collect())
            }
            CachePlace::Device(device, dtype) => {
                let dims = [num_slots, heads, allocated, head_dim];
                let zeros = || Some(Tensor::zeros(dims, (device, DType::from(*dtype))));
                Store::Device(Box::new([zeros(), zeros()]))
            }
            CachePlace::Nowhere => Store::Nowhere,
        };
        let layers = (0..shape.num_layers)
            .map(|_| LayerCache { store: store(), lens: vec![0; num_slots] })
            .collect();
        Self {
            layers,
            capacity,
            allocated,
            trees: vec![TokenTree::default(); num_slots],
            placed: Vec::new(),
            scratch: Scratch::default(),
        }
    }

    /// Keeps only these bits of each number in host memory.
    pub(crate) fn with_bits(mut self, bits: Option<u32>) -> Self {
        for layer in &mut self.layers {
            if let Store::Host(slots) = &mut layer.store {
                slots.iter_mut().for_each(|slot| slot.bits = bits);
            }
        }
        self
    }

    /// Declares the next `num_nodes` tokens of `slot`, after the first `num_standing`, to be rotated
    /// `shift` positions too far.
    pub fn shift(&mut self, slot: usize, num_standing: usize, num_nodes: usize, shift: isize) {
        let tree = &mut self.trees[slot];
        if tree.num_nodes() != num_nodes {
            tree.set(num_standing, (0..num_nodes).map(|node| node.checked_sub(1)));
        }
        tree.shift = shift;
    }

    /// Returns the number of slots.
    pub fn num_slots(&self) -> usize {
        self.layers[0].lens.len()
    }

    /// Returns the number of tokens of the sequence in `slot` that `layer` has read.
    pub fn len(&self, slot: usize, layer: usize) -> usize {
        self.layers[layer].lens[slot]
    }

    /// Returns the maximum number of tokens per slot.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens of `slot` from position `len` on, in every layer. The remaining tokens
    /// are a chain.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        self.trees[slot].clear();
        for layer in &mut self.layers {
            layer.lens[slot] = layer.lens[slot].min(len);
        }
    }

    /// Declares the tokens of `slot` after the first `num_standing` to be the nodes of a tree. Node
    /// `i` is the token at `num_standing + i`, read already or to be read next; `parents[i]` is its
    /// parent node, or `None` for the last token before the tree. Nodes attend only to their
    /// ancestors and the tokens before the tree. Without nodes the tokens are a chain.
    ///
    /// # Panics
    /// If a parent comes after its child.
    pub fn branch(&mut self, slot: usize, num_standing: usize, parents: &[Option<usize>]) {
        self.trees[slot].set(num_standing, parents.iter().copied());
    }

    /// Declares the next `num_nodes` tokens of `slot`, after the first `num_standing`, to be a block.
    /// Each of them attends to all of them. [`Self::truncate`] drops the block.
    pub(crate) fn begin_block(&mut self, slot: usize, num_standing: usize, num_nodes: usize) {
        self.trees[slot].set_block(num_standing, num_nodes);
    }

    /// Keeps the first `num_standing` tokens of a slot and the tree nodes on `path`, as far as each
    /// layer has read them. Drops the other nodes.
    ///
    /// # Panics
    /// If the node numbers in `path` do not rise.
    pub fn keep(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        assert!(path.is_sorted_by(|one, next| one < next), "a path goes from parent to child");
        let is_moved = |(at, node): (usize, &usize)| at != *node;
        if path.iter().enumerate().any(is_moved) {
            for layer in &mut self.layers {
                let is_read = |node: &&usize| num_standing + **node < layer.lens[slot];
                let num_read = path.iter().take_while(is_read).count();
                layer.gather(slot, num_standing, &path[..num_read]);
                if num_read < path.len() {
                    layer.lens[slot] = layer.lens[slot].min(num_standing + num_read);
                }
            }
        }
        self.truncate(slot, num_standing + path.len());
    }

    /// Registers the rows of a forward as read by each layer of a range, and returns their places.
    /// `num_padding` further rows follow the last run. They are part of it in the result, but do
    /// not count as read.
    ///
    /// # Panics
    /// If the layers hold different numbers of a slot's tokens, a slot does not exist or is full,
    /// or a slot's rows come in several runs.
    pub(crate) fn extend(
        &mut self,
        layers: Range<usize>,
        runs: impl Iterator<Item = Run>,
        num_padding: usize,
    ) -> PlacedRows<'_> {
        self.placed.clear();
        for Run { slot, num_rows } in runs {
            let start = self.layers[layers.start].lens[slot];
            let end = start + num_rows;
            // Siblings share a position, so the nodes of a tree may exceed the capacity.
            let capacity = self.capacity + self.trees[slot].num_nodes();
            assert!(end <= capacity, "{end} tokens do not fit a cache of {capacity}");
            self.make_room(end, num_padding);
            let is_new = self.placed.iter().all(|run| run.slot != slot);
            assert!(is_new, "a slot's rows of one forward are one run");
            for layer in &mut self.layers[layers.clone()] {
                assert_eq!(
                    layer.lens[slot], start,
                    "layers of one range have read the same tokens"
                );
                layer.lens[slot] = end;
            }
            self.placed.push(PlacedRun { slot, start, num_rows });
        }
        if let Some(last) = self.placed.last_mut() {
            last.num_rows += num_padding;
        }
        PlacedRows::new(&self.placed, &self.trees)
    }

    /// Allocates memory for `end` tokens per slot and `num_padding` more.
    fn make_room(&mut self, end: usize, num_padding: usize) {
        if end + num_padding <= self.allocated {
            return;
        }
        let wanted = end.max(2 * self.allocated).min(self.capacity).max(end + num_padding);
        let is_on_device = matches!(self.layers[0].store, Store::Device(_));
        self.allocated = if is_on_device { padded_keys(wanted) } else { wanted };
        self.layers.iter_mut().for_each(|layer| layer.grow(self.allocated));
    }

    /// Registers rows as [`KvCache::extend`] does, for a forward with packed weights. Also returns
    /// the storage of each layer, by slot, and the buffers.
    ///
    /// # Panics
    /// As for [`KvCache::extend`], and if the cache is not in host memory.
    pub(crate) fn extend_packed(
        &mut self,
        layers: Range<usize>,
        runs: impl Iterator<Item = Run>,
    ) -> (PlacedRows<'_>, impl Iterator<Item = &mut [PackedLayerCache]>, &mut Scratch) {
        self.extend(layers.clone(), runs, 0);
        let placed = PlacedRows::new(&self.placed, &self.trees);
        let memory = self.layers[layers].iter_mut().map(|layer| match &mut layer.store {
            Store::Host(slots) => slots.as_mut_slice(),
            Store::Nowhere => &mut [],
            Store::Device(_) => panic!("a packed model's cache is in host memory"),
        });
        (placed, memory, &mut self.scratch)
    }

    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut LayerCache {
        &mut self.layers[layer]
    }
}

impl LayerCache {
    /// Allocates memory for `allocated` tokens per slot.
    fn grow(&mut self, allocated: usize) {
        match &mut self.store {
            Store::Device(both) => {
                for stored in both.iter_mut() {
                    let all = stored.take().expect("put back after every write");
                    let [slots, heads, len, head_dim] = all.dims();
                    let more = [slots, heads, allocated - len, head_dim];
                    let more = Tensor::zeros(more, (&all.device(), all.dtype()));
                    *stored = Some(Tensor::cat(vec![all, more], 2));
                }
            }
            Store::Host(slots) => slots.iter_mut().for_each(|slot| slot.grow(allocated)),
            Store::Nowhere => {}
        }
    }

    /// Moves the tree nodes on `path` to the positions after the first `num_standing` tokens of a
    /// slot.
    fn gather(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        match &mut self.store {
            _ if path.is_empty() => {}
            Store::Device(both) => {
                for stored in both.iter_mut() {
                    let all = stored.take().expect("put back after every write");
                    let [_, heads, _, head_dim] = all.dims();
                    let of = |positions| [slot..slot + 1, 0..heads, positions, 0..head_dim];
                    let from = path[0]..path[path.len() - 1] + 1;
                    let nodes = path.iter().map(|node| (node - path[0]) as i32).collect();
                    let nodes = TensorData::new::<i32, _>(nodes, [path.len()]);
                    let nodes = Tensor::<1, Int>::from_data(nodes, &all.device());
                    let from = num_standing + from.start..num_standing + from.end;
                    let kept = all.clone().slice(of(from)).select(2, nodes);
                    let to = num_standing..num_standing + path.len();
                    *stored = Some(all.slice_assign(of(to), kept));
                }
            }
            Store::Host(slots) => {
                for (at, node) in path.iter().enumerate() {
                    slots[slot].copy(num_standing + node, num_standing + at);
                }
            }
            Store::Nowhere => {}
        }
    }

    /// Writes the keys and values of new tokens, which [`KvCache::extend`] has registered. Returns
    /// the keys and values that they attend to.
    ///
    /// # Shapes
    /// - new: keys and values, `[1, rows, kv_heads, head_dim]` each
    /// - output: `[runs, kv_heads, num_keys, head_dim]` each, as in `following`
    pub(crate) fn append(&mut self, following: &Following, new: [Tensor<4>; 2]) -> [Tensor<4>; 2] {
        self.update(|[keys, values]| {
            let [new_keys, new_values] = new;
            let (keys, seen_keys) = following.append(keys, new_keys);
            let (values, seen_values) = following.append(values, new_values);
            ([seen_keys, seen_values], [keys, values])
        })
    }

    /// Replaces the keys and values on a device, `[slots, kv_heads, allocated, head_dim]` each, by
    /// the tensors that `change` returns. `change` gets the only references to them, so it can
    /// write in place.
    pub(crate) fn update<R>(
        &mut self,
        change: impl FnOnce([Tensor<4>; 2]) -> (R, [Tensor<4>; 2]),
    ) -> R {
        let both = match &mut self.store {
            Store::Device(both) => both,
            Store::Nowhere => panic!("a layer without attention has no keys"),
            Store::Host(_) => panic!("a packed model writes its cache itself"),
        };
        let taken =
            both.each_mut().map(|stored| stored.take().expect("put back after every write"));
        let (result, changed) = change(taken);
        **both = changed.map(Some);
        result
    }
}
