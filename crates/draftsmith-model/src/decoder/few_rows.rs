//! Forwards of few rows over a cache on a GPU, through our own [kernels](super::kernels). This file
//! collects the places of the rows and the entries that they attend to, and lays out weights as the
//! kernels read them.

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use super::block::{Attending, BlockTensors};
use super::kernels::{Kernels, Then, num_splits};
use super::norm::Norm;
use crate::kv_cache::LayerCache;
use crate::packed::AttentionForm;
use crate::placed::PlacedRows;
use crate::rope::Reach;
use crate::token_tree::TokenTree;

/// The maximum number of nodes in a tree, each of which takes a bit in two words.
const MOST_NODES: usize = 64;

/// The rows of a forward, in the form that the kernels of its layers read.
#[derive(Debug, Clone)]
pub(crate) struct FewRows {
    pub(crate) kernels: Kernels,
    /// For each row its slot, its cache entry and the number of entries before the tree. Then, for
    /// each reach, the first entry that the row attends to, and a bit for each node of the tree
    /// that it attends to, in two words. `[rows, 3 + 3 · reaches]`
    places: Tensor<2, Int>,
    /// For each reach, the cosines and then the sines of each row, `[rows, rotated channels]`.
    ropes: Vec<Tensor<2>>,
    num_splits: usize,
}

impl FewRows {
    /// Collects the data about a forward's rows, including padding, that the kernels need. `None`
    /// if there are too many rows for kernels in this type, if a tree is too large, or for a block.
    pub(crate) fn new(
        kernels: Kernels,
        reaches: &[Reach],
        rows: PlacedRows<'_>,
        (dtype, device): (DType, &Device),
    ) -> Option<Self> {
        let num_rows = rows.runs().map(|run| run.num_rows).sum();
        let mut trees = rows.runs().filter_map(|run| rows.tree(run.slot));
        let is_unsuited = |tree: &TokenTree| tree.is_block || tree.num_nodes() > MOST_NODES;
        if !Kernels::suit(num_rows, dtype) || trees.any(is_unsuited) {
            return None;
        }
        let (mut places, mut ropes, mut end) = (Vec::new(), vec![Vec::new(); reaches.len()], 0);
        let entries = rows
            .runs()
            .flat_map(|run| (0..run.num_rows).map(move |row| (run.slot, run.start + row)));
        for (slot, entry) in entries {
            let (tree, position) = (rows.tree(slot), rows.position(slot, entry));
            let num_standing = tree.map_or(entry + 1, |tree| tree.num_standing);
            places.extend([slot, entry, num_standing].map(|number| number as i32));
            end = end.max(entry + 1);
            for (reach, rope) in reaches.iter().zip(&mut ropes) {
                let first_seen = reach.first_seen(position);
                let hidden = tree.into_iter().flat_map(|tree| tree.hidden_from(entry, first_seen));
                let seen =
                    hidden.fold(u64::MAX, |seen, other| seen & !(1 << (other - num_standing)));
                places.push(first_seen.min(num_standing) as i32);
                places.extend([seen as u32, (seen >> 32) as u32].map(u32::cast_signed));
                let (cos, sin) = reach.rope.at(position);
                rope.extend(cos.iter().chain(sin).copied());
            }
        }
        let shape = [num_rows, places.len() / num_rows];
        let places = Tensor::from_data(TensorData::new(places, shape), device);
        let ropes = ropes.into_iter().map(|rope: Vec<f32>| {
            let shape = [num_rows, rope.len() / num_rows];
            Tensor::from_data(TensorData::new(rope, shape), device)
        });
        Some(Self { kernels, places, ropes: ropes.collect(), num_splits: num_splits(end) })
    }

    /// Adds an attention over a layer's cache to a residual, and writes the new keys and values.
    ///
    /// # Shapes
    /// - residual, output: `[1, rows, hidden]`
    /// - x: `[1, rows, hidden · num_read]`, after the norm if the block has none
    pub(crate) fn attention(
        &self,
        both: (Tensor<3>, Tensor<3>),
        block: BlockTensors,
        cache: &mut LayerCache,
        (norms, epsilon): (Option<[Tensor<1>; 2]>, f64),
        form: AttentionForm,
    ) -> Tensor<3> {
        let about = (self.ropes[form.reach].clone(), self.places.clone());
        let attending = Attending { form, epsilon: epsilon as f32, num_splits: self.num_splits };
        cache.update(|cached| self.kernels.attention(both, block, cached, norms, about, attending))
    }
}

impl BlockTensors {
    /// Collects the weights of a block.
    pub(super) fn new(
        norm: Option<&Norm>,
        first: &Joined,
        last: &Linear,
        post_norm: Option<&Norm>,
    ) -> Self {
        let parts = |norm: &Norm| (norm.gamma(), norm.beta());
        Self {
            norm: norm.map(parts),
            first: (first.weight.clone(), first.bias.clone()),
            last: (last.weight.val(), last.bias.as_ref().map(Param::val)),
            post_norm: post_norm.map(parts),
            epsilon: norm.or(post_norm).map_or(0.0, Norm::epsilon),
        }
    }
}

/// Linear layers that read the same rows, joined to one product.
#[derive(Debug, Clone)]
pub(crate) struct Joined {
    /// The joined matrix, `[in, out]`, with contiguous columns.
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
}

impl Joined {
    /// Joins linear layers, whose weights become views of the joined matrix. `None` if only some of
    /// them have a bias.
    pub(crate) fn new(linears: &mut [&mut Linear]) -> Option<Self> {
        let biases = linears.iter().filter_map(|linear| linear.bias.as_ref().map(Param::val));
        let biases: Vec<Tensor<1>> = biases.collect();
        if !biases.is_empty() && biases.len() < linears.len() {
            return None;
        }
        let by_outputs = linears.iter().map(|linear| linear.weight.val().transpose());
        let all = with_contiguous_columns(Tensor::cat(by_outputs.collect(), 0).transpose());
        let mut start = 0;
        for linear in linears.iter_mut() {
            let [_, outputs] = linear.weight.dims();
            linear.weight = Param::from_tensor(all.clone().narrow(1, start, outputs));
            start += outputs;
        }
        let bias = (!biases.is_empty()).then(|| Tensor::cat(biases, 0));
        Some(Self { weight: all, bias })
    }

    /// Returns whether `linear`, one of the joined layers, still has the type and device of the
    /// joined matrix. The joined matrix is not a parameter, so burn does not cast or copy it with
    /// the module.
    pub(crate) fn is_of(&self, linear: &Linear) -> bool {
        let weight = &linear.weight;
        self.weight.dtype() == weight.dtype() && self.weight.device() == weight.device()
    }

    /// Multiplies rows by the joined matrix, adds its bias, applies `then`, and adds the residual,
    /// if given.
    ///
    /// # Shapes
    /// - x: `[rows, in]`
    pub(crate) fn project(
        &self,
        kernels: Kernels,
        x: Tensor<2>,
        residual: Option<Tensor<2>>,
        then: Then,
    ) -> Tensor<2> {
        let dtype = x.dtype();
        kernels.project(x, (self.weight.clone(), self.bias.clone()), residual, then, dtype)
    }
}

/// Multiplies rows by a block's last matrix, applies the block's post norm if it has one, and adds
/// the residual.
pub(super) fn finished(
    kernels: Kernels,
    last: &Linear,
    post_norm: &Option<Norm>,
    x: Tensor<2>,
    residual: Tensor<2>,
) -> Tensor<2> {
    let (dtype, weights) = (x.dtype(), (last.weight.val(), last.bias.as_ref().map(Param::val)));
    match post_norm {
        None => kernels.project(x, weights, Some(residual), Then::Nothing, dtype),
        Some(norm) => {
            let output = kernels.project(x, weights, None, Then::Nothing, dtype);
            norm.forward_with(kernels, output, Some(residual))
        }
    }
}

/// Lays out a matrix, `[in, out]`, with contiguous columns. A product of few rows is fastest with
/// this layout.
pub(crate) fn with_contiguous_columns(matrix: Tensor<2>) -> Tensor<2> {
    let [num_inputs, num_outputs] = matrix.dims();
    let flat = matrix.transpose().reshape([num_outputs * num_inputs]);
    flat.reshape([num_outputs, num_inputs]).transpose()
}

/// Multiplies rows by an LM head and returns logits in f32.
///
/// # Shapes
/// - rows: `[rows, hidden]`
/// - head: `[hidden, vocab]`; a GPU reads it fastest with contiguous columns
pub(crate) fn logits(rows: Tensor<2>, head: Tensor<2>) -> Tensor<2> {
    match Kernels::on(&rows.device()) {
        Some(kernels) => kernels.project(rows, (head, None), None, Then::Nothing, DType::F32),
        None => rows.matmul(head).cast(FloatDType::F32),
    }
}
