//! The code of the kernels, in CubeCL's Rust. A *plane* is a warp in CUDA, a *cube* is a thread
//! block. Each plane sums over its lanes.
//!
//! Sums are f32, in an order that depends only on a row's own numbers. So a row's result does not
//! depend on the rows computed beside it, to the last bit.

#![expect(clippy::too_many_arguments, reason = "kernels take their buffers, and sizes one by one")]

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

use super::Then;
use crate::spec::Activation;

/// The number of keys that one plane reads. The lengths of caches are multiples of it.
pub(super) const KEYS_PER_SPLIT: usize = 64;
/// The number of keys whose scores are computed together.
const KEYS_AT_ONCE: usize = 4;
/// The score of a key that a row may not attend to.
const UNSEEN: f32 = -1e30;
/// The number of columns in `places` before those of the first reach: a row's slot, its cache entry
/// and the number of entries before its tree.
const FIRST_REACH: usize = 3;
/// The number of columns in `places` for each reach: the first entry that the row attends to, and
/// two words with a bit for each of the first 64 nodes of the tree that it attends to.
const REACH_COLUMNS: usize = 3;

/// The division of a projection among planes and lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ProjectionPlan {
    /// The number of rows for which weights are read once.
    pub(super) num_rows: usize,
    /// The number of outputs that one plane computes.
    pub(super) num_outputs: usize,
    /// The number of weight vectors that a lane reads at once, for each output.
    pub(super) num_loads: usize,
    /// The operation on the product.
    pub(super) then: Then,
}

impl ProjectionPlan {
    /// Counts the sums that a plane computes.
    fn num_sums(self) -> usize {
        self.num_rows * self.num_outputs * self.then.num_parts()
    }
}

/// Multiplies rows by a matrix whose rows are outputs: `output[r][o] = Σ x[r][i] · weight[o][i]`.
#[cube(launch_unchecked)]
pub(super) fn project<T: Float, O: Float, N: Size>(
    x: &[Vector<T, N>],
    weight: &[Vector<T, N>],
    bias: ComptimeOption<&[T]>,
    residual: ComptimeOption<&[T]>,
    output: &mut [O],
    num_vectors: usize,
    num_outputs: usize,
    #[comptime] plan: ProjectionPlan,
    #[define(T, O)] _types: [ElemType; 2],
) {
    let lane = UNIT_POS_X as usize;
    let num_lanes = CUBE_DIM_X as usize;
    let plane = CUBE_POS_X as usize * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let first_output = plane * plan.num_outputs;
    let first_row = CUBE_POS_Y as usize * plan.num_rows;
    let mut sums = Array::<f32>::new(comptime!(plan.num_sums()));
    #[unroll]
    for nth in 0..comptime!(plan.num_sums()) {
        sums[nth] = 0.0f32;
    }
    let stride = num_lanes * plan.num_loads;
    let mut begun = 0usize.runtime();
    while begun + stride <= num_vectors {
        #[unroll]
        for load in 0..plan.num_loads {
            let column = begun + lane + load * num_lanes;
            let tile = Tile { column, num_vectors, first_row, first_output, num_outputs };
            multiply::<T, N>(x, weight, &mut sums, &tile, plan);
        }
        begun += stride;
    }
    // The remaining vectors, fewer than a stride, are read one at a time.
    while begun < num_vectors {
        let column = begun + lane;
        if column < num_vectors {
            let tile = Tile { column, num_vectors, first_row, first_output, num_outputs };
            multiply::<T, N>(x, weight, &mut sums, &tile, plan);
        }
        begun += num_lanes;
    }
    #[unroll]
    for o in 0..plan.num_outputs {
        let place = first_output + o;
        #[unroll]
        for r in 0..plan.num_rows {
            let nth = comptime!(o * plan.num_rows + r);
            let sum = plane_sum(sums[nth]);
            let mut up = 0.0f32;
            if comptime!(plan.then.num_parts() == 2) {
                up = plane_sum(sums[comptime!(nth + plan.num_outputs * plan.num_rows)]);
            }
            let at = (first_row + r) * num_outputs + place;
            if lane == 0 && place < num_outputs {
                let places = (place, num_outputs, at);
                let number = followed::<T>((sum, up), places, &bias, &residual, plan.then);
                output[at] = O::cast_from(number);
            }
        }
    }
}

/// Finishes one output of a product, given the sums of its one or two parts: adds biases, applies
/// `then`, and adds the residual.
#[cube]
fn followed<T: Float>(
    product: (f32, f32),
    places: (usize, usize, usize),
    bias: &ComptimeOption<&[T]>,
    residual: &ComptimeOption<&[T]>,
    #[comptime] then: Then,
) -> f32 {
    let (place, num_outputs, at) = places;
    let first = plus::<T>(product.0, bias, place);
    let number = match then {
        Then::Nothing => first,
        Then::Activate(activation) => activated(first, activation),
        Then::Gate(activation) => {
            activated(first, activation) * plus::<T>(product.1, bias, num_outputs + place)
        }
    };
    plus::<T>(number, residual, at)
}

#[cube]
fn plus<T: Float>(number: f32, added: &ComptimeOption<&[T]>, at: usize) -> f32 {
    let mut sum = number;
    #[comptime]
    match added {
        ComptimeOption::Some(added) => sum += f32::cast_from(added[at]),
        ComptimeOption::None => {}
    }
    sum
}

/// The numbers that a lane multiplies at once: a column of vectors, for the rows and outputs of its
/// plane.
#[derive(CubeType)]
struct Tile {
    column: usize,
    num_vectors: usize,
    first_row: usize,
    first_output: usize,
    num_outputs: usize,
}

/// Adds the products of one column of vectors to the sums of a plane.
#[cube]
fn multiply<T: Float, N: Size>(
    x: &[Vector<T, N>],
    weight: &[Vector<T, N>],
    sums: &mut Array<f32>,
    tile: &Tile,
    #[comptime] plan: ProjectionPlan,
) {
    let mut rows = Array::<Vector<f32, N>>::new(plan.num_rows);
    #[unroll]
    for r in 0..plan.num_rows {
        rows[r] = Vector::cast_from(x[(tile.first_row + r) * tile.num_vectors + tile.column]);
    }
    #[unroll]
    for half in 0..comptime!(plan.then.num_parts()) {
        #[unroll]
        for o in 0..plan.num_outputs {
            // A plane past the last output computes the last output again and writes nothing.
            let output =
                clamp_max(tile.first_output + o, tile.num_outputs - 1) + half * tile.num_outputs;
            let weights =
                Vector::<f32, N>::cast_from(weight[output * tile.num_vectors + tile.column]);
            #[unroll]
            for r in 0..plan.num_rows {
                let nth = comptime!((half * plan.num_outputs + o) * plan.num_rows + r);
                let mut sum = sums[nth];
                let row = rows[r];
                #[unroll]
                for i in 0..N::value() {
                    sum = fma(weights.extract(i), row.extract(i), sum);
                }
                sums[nth] = sum;
            }
        }
    }
}

/// Finishes the outputs of a product of many rows. Each unit (thread) finishes one output.
#[cube(launch_unchecked)]
pub(super) fn finish<T: Float, O: Float>(
    product: &[T],
    bias: ComptimeOption<&[T]>,
    residual: ComptimeOption<&[T]>,
    output: &mut [O],
    num_outputs: usize,
    num_all: usize,
    #[comptime] then: Then,
    #[define(T, O)] _types: [ElemType; 2],
) {
    if ABSOLUTE_POS < num_all {
        let (row, place) = (ABSOLUTE_POS / num_outputs, ABSOLUTE_POS % num_outputs);
        let first = row * num_outputs * comptime!(then.num_parts()) + place;
        let sum = f32::cast_from(product[first]);
        let mut up = 0.0f32;
        if comptime!(then.num_parts() == 2) {
            up = f32::cast_from(product[first + num_outputs]);
        }
        let places = (place, num_outputs, ABSOLUTE_POS);
        let number = followed::<T>((sum, up), places, &bias, &residual, then);
        output[ABSOLUTE_POS] = O::cast_from(number);
    }
}

#[cube]
fn activated(x: f32, #[comptime] activation: Activation) -> f32 {
    match activation {
        Activation::Silu => x / (1.0f32 + (-x).exp()),
        Activation::Gelu => 0.5f32 * x * (1.0f32 + Erf::erf(x * 0.707_106_77f32)),
        Activation::GeluTanh => {
            let inner = (x + 0.044_715f32 * x * x * x) * 0.797_884_6f32;
            0.5f32 * x * (1.0f32 + inner.tanh())
        }
    }
}

/// Applies a norm to rows, one row per cube. It is an RMS norm, or a LayerNorm if there is a shift.
#[cube(launch_unchecked)]
pub(super) fn norm<T: Float>(
    x: &[T],
    gamma: &[f32],
    beta: ComptimeOption<&[f32]>,
    residual: ComptimeOption<&[T]>,
    output: &mut [T],
    width: usize,
    epsilon: f32,
    #[comptime] num_units: usize,
    #[define(T)] _type: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(num_units);
    let unit = UNIT_POS as usize;
    let first = CUBE_POS_X as usize * width;
    let mut mean = 0.0f32;
    #[comptime]
    match beta {
        ComptimeOption::Some(_) => {
            let mut sum = 0.0f32;
            let mut i = unit;
            while i < width {
                sum += f32::cast_from(x[first + i]);
                i += num_units;
            }
            mean = sum_of_cube(sum, &mut shared, num_units) / f32::cast_from(width);
        }
        ComptimeOption::None => {}
    }
    let mut sum = 0.0f32;
    let mut i = unit;
    while i < width {
        let centered = f32::cast_from(x[first + i]) - mean;
        sum = fma(centered, centered, sum);
        i += num_units;
    }
    let square = sum_of_cube(sum, &mut shared, num_units) / f32::cast_from(width);
    let scale = 1.0f32 / (square + epsilon).sqrt();
    let mut i = unit;
    while i < width {
        let mut normed = (f32::cast_from(x[first + i]) - mean) * scale * gamma[i];
        #[comptime]
        match beta {
            ComptimeOption::Some(beta) => normed += beta[i],
            ComptimeOption::None => {}
        }
        #[comptime]
        match residual {
            ComptimeOption::Some(residual) => normed += f32::cast_from(residual[first + i]),
            ComptimeOption::None => {}
        }
        output[first + i] = T::cast_from(normed);
        i += num_units;
    }
}

/// Adds up one number from each unit in the cube; `num_units` is a power of two.
#[cube]
fn sum_of_cube(value: f32, shared: &mut Shared<[f32]>, #[comptime] num_units: usize) -> f32 {
    let unit = UNIT_POS as usize;
    sync_cube();
    shared[unit] = value;
    sync_cube();
    let mut half = num_units.runtime() / 2;
    while half > 0 {
        if unit < half {
            let other = shared[unit + half];
            shared[unit] += other;
        }
        sync_cube();
        half /= 2;
    }
    shared[0]
}

/// The sizes and options of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Heads {
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
    /// The number of channels that are rotated.
    pub(super) rotated: usize,
    pub(super) has_norms: bool,
    pub(super) is_capped: bool,
    /// The number of lanes in a plane.
    pub(super) num_lanes: usize,
}

/// Applies norms and rotation to queries and keys, scales queries, and writes keys and values to
/// their places in the cache. Each plane processes one head of a row.
#[cube(launch_unchecked)]
pub(super) fn place<T: Float>(
    qkv: &[T],
    query_norm: &[f32],
    key_norm: &[f32],
    rope: &[f32],
    places: &[i32],
    queries: &mut [T],
    keys: &mut [T],
    values: &mut [T],
    allocated: usize,
    num_columns: usize,
    scale: f32,
    epsilon: f32,
    #[comptime] heads: Heads,
    #[define(T)] _type: ElemType,
) {
    let (lane, row) = (UNIT_POS_X as usize, CUBE_POS_Y as usize);
    let head = CUBE_POS_X as usize;
    let num_keys = comptime!(heads.num_heads + heads.num_kv_heads);
    let num_all = comptime!(num_keys + heads.num_kv_heads);
    let first = (row * num_all + head) * heads.head_dim;
    let half = comptime!(heads.rotated / 2);
    let mut factor = 1.0f32;
    if comptime!(heads.has_norms) {
        let mut sum = 0.0f32;
        let mut i = lane;
        while i < heads.head_dim {
            let number = f32::cast_from(qkv[first + i]);
            sum = fma(number, number, sum);
            i += heads.num_lanes;
        }
        factor = 1.0f32 / (plane_sum(sum) / f32::cast_from(heads.head_dim) + epsilon).sqrt();
    }
    let slot = usize::cast_from(places[row * num_columns]);
    let entry = usize::cast_from(places[row * num_columns + 1]);
    let mut i = lane;
    while i < heads.head_dim {
        let mut number = f32::cast_from(qkv[first + i]);
        if head < num_keys {
            number = weighed(number, factor, i, head, query_norm, key_norm, heads);
            if i < comptime!(2 * half) {
                let is_first = i < half;
                let other_at = select(is_first, i + half, i - half);
                let other = weighed(
                    f32::cast_from(qkv[first + other_at]),
                    factor,
                    other_at,
                    head,
                    query_norm,
                    key_norm,
                    heads,
                );
                let pair = select(is_first, i, i - half);
                let cos = rope[row * heads.rotated + pair];
                let sin = rope[row * heads.rotated + half + pair];
                let signed = select(is_first, -sin, sin);
                number = number * cos + other * signed;
            }
        }
        if head < heads.num_heads {
            queries[(row * heads.num_heads + head) * heads.head_dim + i] =
                T::cast_from(number * scale);
        } else if head < num_keys {
            let kv = slot * heads.num_kv_heads + head - heads.num_heads;
            keys[(kv * allocated + entry) * heads.head_dim + i] = T::cast_from(number);
        } else {
            let kv = slot * heads.num_kv_heads + head - num_keys;
            values[(kv * allocated + entry) * heads.head_dim + i] = T::cast_from(number);
        }
        i += heads.num_lanes;
    }
}

/// Applies the norm of a head, if there is one, to one channel of a query or key.
#[cube]
fn weighed(
    number: f32,
    factor: f32,
    channel: usize,
    head: usize,
    query_norm: &[f32],
    key_norm: &[f32],
    #[comptime] heads: Heads,
) -> f32 {
    let mut normed = number;
    if comptime!(heads.has_norms) {
        let gamma = select(head < heads.num_heads, query_norm[channel], key_norm[channel]);
        normed = number * factor * gamma;
    }
    normed
}

/// Attends from one head of a row to the keys of one split. Writes the softmax's numerator, its
/// maximum and its denominator.
#[cube(launch_unchecked)]
pub(super) fn attend<T: Float, N: Size>(
    queries: &[Vector<T, N>],
    keys: &[Vector<T, N>],
    values: &[Vector<T, N>],
    places: &[i32],
    mixed: &mut [Vector<f32, N>],
    sums: &mut [f32],
    allocated: usize,
    num_columns: usize,
    reach: usize,
    soft_cap: f32,
    #[comptime] heads: Heads,
    #[comptime] vectors_per_lane: usize,
    #[define(T)] _type: ElemType,
) {
    let (lane, head) = (UNIT_POS_X as usize, CUBE_POS_X as usize);
    let (row, split) = (CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let num_vectors = comptime!(heads.head_dim) / N::value();
    let about = row * num_columns;
    let slot = usize::cast_from(places[about]);
    let entry = usize::cast_from(places[about + 1]);
    let standing = usize::cast_from(places[about + 2]);
    let seen = about + FIRST_REACH + REACH_COLUMNS * reach;
    let first_seen = usize::cast_from(places[seen]);
    let groups = comptime!(heads.num_heads / heads.num_kv_heads);
    let first_key = (slot * heads.num_kv_heads + head / groups) * allocated;
    let begin = clamp_min(first_seen, split * KEYS_PER_SPLIT) / KEYS_AT_ONCE * KEYS_AT_ONCE;
    let end = clamp_max(entry + 1, split * KEYS_PER_SPLIT + KEYS_PER_SPLIT);

    let mut query = Array::<Vector<f32, N>>::new(vectors_per_lane);
    let mut sum = Array::<Vector<f32, N>>::new(vectors_per_lane);
    #[unroll]
    for n in 0..vectors_per_lane {
        let vector = lane + n * heads.num_lanes;
        query[n] = Vector::new(0.0f32);
        sum[n] = Vector::new(0.0f32);
        if vector < num_vectors {
            query[n] =
                Vector::cast_from(queries[(row * heads.num_heads + head) * num_vectors + vector]);
        }
    }
    let mut most = f32::new(UNSEEN);
    let mut denominator = 0.0f32;
    let mut key = begin;
    while key < end {
        let mut scores = Array::<f32>::new(KEYS_AT_ONCE);
        let mut best = most;
        #[unroll]
        for k in 0..KEYS_AT_ONCE {
            let first = (first_key + key + k) * num_vectors;
            let product = product_of_lane::<T, N>(&query, keys, first, heads, vectors_per_lane);
            let mut score = plane_sum(product);
            if comptime!(heads.is_capped) {
                score = (score / soft_cap).tanh() * soft_cap;
            }
            let at = key + k;
            let is_seen = at >= first_seen
                && at <= entry
                && (at < standing || is_node_seen(places, seen, at - standing));
            scores[k] = select(is_seen, score, f32::new(UNSEEN));
            best = max(best, scores[k]);
        }
        let shrink = (most - best).exp();
        denominator *= shrink;
        #[unroll]
        for n in 0..vectors_per_lane {
            sum[n] = sum[n] * Vector::new(shrink);
        }
        #[unroll]
        for k in 0..KEYS_AT_ONCE {
            let weight = select(scores[k] > f32::new(UNSEEN), (scores[k] - best).exp(), 0.0f32);
            denominator += weight;
            let first = (first_key + key + k) * num_vectors;
            add_weighted::<T, N>(&mut sum, values, (first, weight), heads, vectors_per_lane);
        }
        most = best;
        key += KEYS_AT_ONCE;
    }
    let place = (row * heads.num_heads + head) * CUBE_COUNT_Z as usize + split;
    write_lane::<N>(mixed, place * num_vectors, &sum, heads, vectors_per_lane);
    if lane == 0 {
        sums[2 * place] = most;
        sums[2 * place + 1] = denominator;
    }
}

/// Adds a lane's part of a value vector, times a weight, to `sum`. `at` contains the start of the
/// value vector and the weight.
#[cube]
fn add_weighted<T: Float, N: Size>(
    sum: &mut Array<Vector<f32, N>>,
    values: &[Vector<T, N>],
    at: (usize, f32),
    #[comptime] heads: Heads,
    #[comptime] vectors_per_lane: usize,
) {
    #[unroll]
    for n in 0..vectors_per_lane {
        let vector = UNIT_POS_X as usize + n * heads.num_lanes;
        if vector < comptime!(heads.head_dim) / N::value() {
            let read = Vector::<f32, N>::cast_from(values[at.0 + vector]);
            sum[n] = fma(read, Vector::new(at.1), sum[n]);
        }
    }
}

/// Writes a lane's part of a head's sums.
#[cube]
fn write_lane<N: Size>(
    output: &mut [Vector<f32, N>],
    first: usize,
    sum: &Array<Vector<f32, N>>,
    #[comptime] heads: Heads,
    #[comptime] vectors_per_lane: usize,
) {
    #[unroll]
    for n in 0..vectors_per_lane {
        let vector = UNIT_POS_X as usize + n * heads.num_lanes;
        if vector < comptime!(heads.head_dim) / N::value() {
            output[first + vector] = sum[n];
        }
    }
}

/// Multiplies a query by the key that begins at `first`, and returns the sum over this lane's channels.
#[cube]
fn product_of_lane<T: Float, N: Size>(
    query: &Array<Vector<f32, N>>,
    keys: &[Vector<T, N>],
    first: usize,
    #[comptime] heads: Heads,
    #[comptime] vectors_per_lane: usize,
) -> f32 {
    let mut product = 0.0f32;
    #[unroll]
    for n in 0..vectors_per_lane {
        let vector = UNIT_POS_X as usize + n * heads.num_lanes;
        if vector < comptime!(heads.head_dim) / N::value() {
            let read = Vector::<f32, N>::cast_from(keys[first + vector]);
            let of_query = query[n];
            #[unroll]
            for i in 0..N::value() {
                product = fma(of_query.extract(i), read.extract(i), product);
            }
        }
    }
    product
}

/// Returns whether a row attends to a node of its tree, according to the node's bit in `places`.
#[cube]
fn is_node_seen(places: &[i32], seen: usize, node: usize) -> bool {
    // For entries before the tree, the node number wraps around and the result is not used.
    let node = u32::cast_from(node);
    let word = select((node & 63u32) < 32u32, places[seen + 1], places[seen + 2]);
    (u32::reinterpret(word) >> (node & 31u32)) & 1u32 == 1u32
}

/// Combines the splits of one head of a row.
#[cube(launch_unchecked)]
pub(super) fn combine<T: Float>(
    mixed: &[f32],
    sums: &[f32],
    output: &mut [T],
    num_splits: usize,
    head_dim: usize,
    #[define(T)] _type: ElemType,
) {
    let head = CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize;
    let first = head * num_splits;
    let mut most = f32::new(UNSEEN);
    for split in 0..num_splits {
        most = max(most, sums[2 * (first + split)]);
    }
    let mut denominator = 0.0f32;
    for split in 0..num_splits {
        let place = 2 * (first + split);
        denominator = fma((sums[place] - most).exp(), sums[place + 1], denominator);
    }
    let mut channel = UNIT_POS_X as usize;
    while channel < head_dim {
        let mut sum = 0.0f32;
        for split in 0..num_splits {
            let weight = (sums[2 * (first + split)] - most).exp();
            sum = fma(weight, mixed[(first + split) * head_dim + channel], sum);
        }
        output[head * head_dim + channel] = T::cast_from(sum / denominator);
        channel += CUBE_DIM_X as usize;
    }
}
