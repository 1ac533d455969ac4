//! Our own kernels for frozen layers on a GPU. They are for forwards of few rows over a cache,
//! whose time is spent on launches and on reading weights.
//!
//! A layer takes nine launches: norm; queries with keys and values; their rotation, which also
//! writes the cache; attention over pieces of the cache; the sum of the pieces; output with
//! residual; norm; gate with up; down with residual. Every weight is read once for up to eight
//! rows. Many rows are multiplied by cubek's kernels: in 16 bits with tensor cores, and in f32
//! without them, because they would round to 10 bits. Only the number of pieces depends on lengths,
//! so there are few kernels to compile. The order of sums does not depend on the other rows of a
//! forward.

#![expect(
    unsafe_code,
    reason = "launches without bounds checks; each states why its accesses are within bounds"
)]

mod cube;

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Backend, Dispatch, DispatchDevice, ExtensionType, TensorMetadata, backend_extension,
};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::ir::{ElemType, FloatKind};
use burn_cubecl::cubecl::{calculate_cube_count_elemwise, prelude::*};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::multi_level::components::tile::TileMatmulKind;
use cubek::matmul::multi_level::routines::TileSizeSelection;
use cubek::matmul::multi_level::routines::batch::double_buffering::DoubleBufferingArgs;
use cubek::matmul::multi_level::routines::batch::simple::SimpleArgs;
use cubek::matmul::multi_level::routines::batch::simple_unit::SimpleUnitSelectionArgs;
use cubek::matmul::routine::BlueprintStrategy::Inferred;
use cubek::std::InputBinding;

use cube::{Heads, KEYS_PER_SPLIT, ProjectionPlan};

use super::block::{Attending, BlockTensors};
use crate::packed::AttentionForm;
use crate::spec::Activation;

/// The number of rows for which weights are read once.
const ROWS_AT_ONCE: usize = 8;
/// The maximum number of rows in a forward.
const MOST_ROWS: usize = 2 * ROWS_AT_ONCE;
/// The maximum number of rows in a forward in f32, where the rows of a prompt equal rows computed
/// one by one.
const MOST_EXACT_ROWS: usize = 1024;
/// The number of planes (warps) in a cube (thread block) of a projection.
const NUM_PLANES: u32 = 4;
/// The number of bytes that a lane (thread) reads at once.
const VECTOR_BYTES: usize = 16;

/// A device that can run the kernels, described by the width of its planes (warps).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernels {
    num_lanes: usize,
}

/// The operation that a projection applies to its product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Then {
    /// No operation.
    Nothing,
    /// An activation.
    Activate(Activation),
    /// An activation of the first half of the outputs, whose result is multiplied by the second
    /// half.
    Gate(Activation),
}

impl Then {
    /// Counts the numbers of the product that make one output: two for a gate, otherwise one.
    fn num_parts(self) -> usize {
        if matches!(self, Self::Gate(_)) { 2 } else { 1 }
    }
}

/// An optional tensor of an operation.
#[derive(ExtensionType)]
pub(crate) enum Extra<B: Backend> {
    /// The tensor.
    Given(FloatTensor<B>),
    /// No tensor.
    Absent,
}

/// Up to two optional tensors of an operation: a norm's scale and shift, or the norms of each
/// head's query and key.
#[derive(ExtensionType)]
pub(crate) enum Pair<B: Backend> {
    /// Both tensors.
    Both(FloatTensor<B>, FloatTensor<B>),
    /// Only the first tensor.
    One(FloatTensor<B>),
    /// No tensor.
    Absent,
}

/// The weights of one block of a layer, attention or MLP.
#[derive(ExtensionType)]
pub(crate) struct Weights<B: Backend> {
    #[extension_type]
    norm: Pair<B>,
    first: FloatTensor<B>,
    #[extension_type]
    first_bias: Extra<B>,
    last: FloatTensor<B>,
    #[extension_type]
    last_bias: Extra<B>,
    #[extension_type]
    post_norm: Pair<B>,
}

/// The parameters of a block besides its weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbers {
    epsilon: f32,
    num_lanes: usize,
}

#[backend_extension(Cube)]
pub(crate) trait FewRowsOps: Backend {
    fn norm_rows(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        #[extension_type] beta: Extra<Self>,
        #[extension_type] residual: Extra<Self>,
        epsilon: f32,
    ) -> FloatTensor<Self>;

    fn project_rows(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Extra<Self>,
        #[extension_type] residual: Extra<Self>,
        then: Then,
        dtype: DType,
        num_lanes: usize,
    ) -> FloatTensor<Self>;

    fn exact_product(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;

    fn mlp_block(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        #[extension_type] weights: Weights<Self>,
        then: Then,
        numbers: Numbers,
    ) -> FloatTensor<Self>;

    #[expect(clippy::too_many_arguments, reason = "fusion follows tensors by argument")]
    fn attention_block(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        #[extension_type] weights: Weights<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        #[extension_type] norms: Pair<Self>,
        rope: FloatTensor<Self>,
        places: IntTensor<Self>,
        form: Attending,
        numbers: Numbers,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

impl Kernels {
    /// Returns the kernels of a device. `None` on the CPU, with autodiff, or if planes have no
    /// fixed width, which sums over a plane need.
    pub(crate) fn on(device: &Device) -> Option<Self> {
        let DispatchDevice::Cube(device) = device.as_dispatch() else { return None };
        let client = device.client();
        let properties = client.properties();
        let hardware = &properties.hardware;
        let is_fixed = hardware.plane_size_min == hardware.plane_size_max;
        let num_lanes = hardware.plane_size_max as usize;
        (is_fixed && num_lanes > 1).then_some(Self { num_lanes })
    }

    /// Returns whether the kernels suit a forward of `num_rows` rows (including padding) in this
    /// type.
    pub(crate) fn suit(num_rows: usize, dtype: DType) -> bool {
        let most = if dtype == DType::F32 { MOST_EXACT_ROWS } else { MOST_ROWS };
        num_rows == 1 || (num_rows.is_multiple_of(ROWS_AT_ONCE) && num_rows <= most)
    }

    /// Applies a norm to rows, then adds `residual`.
    pub(crate) fn norm<const D: usize>(
        self,
        x: Tensor<D>,
        (gamma, beta): (Tensor<1>, Option<Tensor<1>>),
        residual: Option<Tensor<D>>,
        epsilon: f64,
    ) -> Tensor<D> {
        let (beta, residual) = (extra(beta), extra(residual));
        let (x, gamma) = (x.into_dispatch(), gamma.into_dispatch());
        Tensor::from_dispatch(Dispatch::norm_rows(x, gamma, beta, residual, epsilon as f32))
    }

    /// Multiplies rows by a matrix with contiguous columns, adds a bias, applies `then`, and adds a
    /// residual.
    ///
    /// # Shapes
    /// - x: `[rows, in]`
    /// - weight: `[in, out]`
    /// - output, residual: `[rows, out]`, or half of `out` after a gate
    pub(crate) fn project(
        self,
        x: Tensor<2>,
        (weight, bias): (Tensor<2>, Option<Tensor<1>>),
        residual: Option<Tensor<2>>,
        then: Then,
        dtype: DType,
    ) -> Tensor<2> {
        let (bias, residual) = (extra(bias), extra(residual));
        let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
        let output = Dispatch::project_rows(x, weight, bias, residual, then, dtype, self.num_lanes);
        Tensor::from_dispatch(output)
    }

    /// Multiplies batches of matrices. Products in f32 do not use tensor cores, which would round
    /// them.
    pub(crate) fn product(lhs: Tensor<4>, rhs: Tensor<4>) -> Tensor<4> {
        if lhs.dtype() != DType::F32 {
            return lhs.matmul(rhs);
        }
        Tensor::from_dispatch(Dispatch::exact_product(lhs.into_dispatch(), rhs.into_dispatch()))
    }

    /// Adds an MLP with its norms to `residual`. This is one operation, because an operation costs
    /// the host more than a launch.
    ///
    /// # Shapes
    /// - residual, output: `[1, rows, hidden]`
    /// - x: `[1, rows, hidden]`, before the norm
    pub(crate) fn mlp(
        self,
        residual: Tensor<3>,
        x: Tensor<3>,
        block: BlockTensors,
        then: Then,
    ) -> Tensor<3> {
        let (weights, numbers) = self.weights(block);
        let (residual, x) = (residual.into_dispatch(), x.into_dispatch());
        Tensor::from_dispatch(Dispatch::mlp_block(residual, x, weights, then, numbers))
    }

    /// Adds an attention over a cache, with its norms, to `residual`, in one operation. Writes the
    /// new keys and values.
    ///
    /// # Shapes
    /// - residual, output: `[1, rows, hidden]`
    /// - x: `[1, rows, hidden · num_read]`, after the norm if the block has none
    /// - cache: `[slots, kv_heads, allocated, head_dim]` each
    pub(crate) fn attention(
        self,
        (residual, x): (Tensor<3>, Tensor<3>),
        block: BlockTensors,
        [keys, values]: [Tensor<4>; 2],
        norms: Option<[Tensor<1>; 2]>,
        (rope, places): (Tensor<2>, Tensor<2, Int>),
        attending: Attending,
    ) -> (Tensor<3>, [Tensor<4>; 2]) {
        let (weights, numbers) = self.weights(block);
        let (output, keys, values) = Dispatch::attention_block(
            residual.into_dispatch(),
            x.into_dispatch(),
            weights,
            keys.into_dispatch(),
            values.into_dispatch(),
            pair(norms.map(|[query, key]| (query, Some(key)))),
            rope.into_dispatch(),
            places.into_dispatch(),
            attending,
            numbers,
        );
        (Tensor::from_dispatch(output), [keys, values].map(Tensor::from_dispatch))
    }

    fn weights(self, block: BlockTensors) -> (Weights<Dispatch>, Numbers) {
        let BlockTensors {
            norm,
            first: (first, first_bias),
            last: (last, last_bias),
            post_norm,
            epsilon,
        } = block;
        let weights = Weights {
            norm: pair(norm),
            first: first.into_dispatch(),
            first_bias: extra(first_bias),
            last: last.into_dispatch(),
            last_bias: extra(last_bias),
            post_norm: pair(post_norm),
        };
        (weights, Numbers { epsilon: epsilon as f32, num_lanes: self.num_lanes })
    }
}

/// Returns the number of pieces into which a cache of `num_keys` keys is divided for attention.
pub(crate) fn num_splits(num_keys: usize) -> usize {
    num_keys.div_ceil(KEYS_PER_SPLIT)
}

fn extra<const D: usize>(tensor: Option<Tensor<D>>) -> Extra<Dispatch> {
    tensor.map_or(Extra::Absent, |tensor| Extra::Given(tensor.into_dispatch()))
}

fn pair(tensors: Option<(Tensor<1>, Option<Tensor<1>>)>) -> Pair<Dispatch> {
    match tensors {
        Some((one, Some(other))) => Pair::Both(one.into_dispatch(), other.into_dispatch()),
        Some((one, None)) => Pair::One(one.into_dispatch()),
        None => Pair::Absent,
    }
}

fn given(extra: Extra<CubeBackend>) -> Option<CubeTensor> {
    match extra {
        Extra::Given(tensor) => Some(tensor),
        Extra::Absent => None,
    }
}

fn element(dtype: DType) -> ElemType {
    ElemType::Float(match dtype {
        DType::BF16 => FloatKind::BF16,
        DType::F16 => FloatKind::F16,
        _ => FloatKind::F32,
    })
}

fn empty<const D: usize>(like: &CubeTensor, shape: [usize; D], dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// Returns the size of the vectors in which a lane reads rows of `width` numbers.
fn vector_size(client: &Client, dtype: DType, width: usize) -> usize {
    let most = VECTOR_BYTES / dtype.size();
    let sizes = client.io_optimized_vector_sizes(dtype.size());
    sizes.filter(|size| *size <= most && width.is_multiple_of(*size)).max().unwrap_or(1)
}

/// Returns a matrix as a buffer of outputs, one after another. Copies it if its columns are not
/// contiguous.
fn by_outputs(mut weight: CubeTensor) -> CubeTensor {
    weight.meta.swap(0, 1);
    into_contiguous(weight)
}

/// Returns the strategy for products in f32 without tensor cores.
fn exact() -> Strategy {
    let tile_size = TileSizeSelection::MaxTileSize;
    Strategy::SimpleUnit(Inferred(SimpleUnitSelectionArgs { tile_size }))
}

/// Returns the strategies for products in 16 bits, fastest first. On an H200, for 4096 × 4096 ×
/// 22016 in bf16 with contiguous columns of weights, we measured 299, 230 and 188 TFLOP/s, and 63
/// for cubek's default.
fn fast() -> [Strategy; 3] {
    let (cmma, mma) = (TileMatmulKind::Cmma, TileMatmulKind::Mma);
    [
        Strategy::SpecializedTmaMma(Inferred(().into())),
        Strategy::SimpleTmaCmma(Inferred(SimpleArgs { multi_rows: true, tile_matmul: cmma })),
        Strategy::DoubleCyclicMma(Inferred(DoubleBufferingArgs {
            specialized: false,
            tile_matmul: mma,
        })),
    ]
}

/// Launches a product with a strategy. Returns false if the strategy does not support the product.
fn launched(strategy: &Strategy, lhs: CubeTensor, rhs: CubeTensor, output: &CubeTensor) -> bool {
    let kind = element(output.dtype);
    let mut types =
        MatmulElems::from_globals(&MatmulGlobalElems { lhs: kind, rhs: kind, out: kind });
    let (client, output) = (&output.client, output.clone().binding());
    let [lhs, rhs] = [lhs, rhs].map(|x| InputBinding::new(x.binding(), kind));
    launch_ref(&strategy.clone().into(), client, lhs, rhs, output, &mut types).is_ok()
}

/// Multiplies many rows by a weight matrix of shape `[outputs, inputs]`. The result has the rows' data type.
fn multiplied(x: CubeTensor, mut weight: CubeTensor) -> CubeTensor {
    let [num_outputs, width] = weight.shape().dims();
    let num_rows = x.meta.num_elements() / width;
    let output = empty(&x, [num_rows, num_outputs], x.dtype);
    let is_exact = x.dtype == DType::F32;
    let rows = CubeBackend::float_reshape(x, [num_rows, width].into());
    weight.meta.swap(0, 1);
    let strategies = if is_exact { vec![exact()] } else { fast().into() };
    let mut strategies = strategies.iter();
    match strategies.any(|strategy| launched(strategy, rows.clone(), weight.clone(), &output)) {
        true => output,
        false => CubeBackend::float_matmul(rows, weight),
    }
}

/// Adds a bias, applies `then` and adds a residual, as far as these are given.
fn finished(
    product: CubeTensor,
    (bias, residual): (Option<CubeTensor>, Option<CubeTensor>),
    then: Then,
    shape: [usize; 2],
    dtype: DType,
) -> CubeTensor {
    let (bias, residual) = (bias.map(into_contiguous), residual.map(into_contiguous));
    let is_finished = bias.is_none() && residual.is_none() && then == Then::Nothing;
    if is_finished && product.dtype == dtype {
        return product;
    }
    let (client, own) = (product.client.clone(), product.dtype);
    let output = empty(&product, shape, dtype);
    let num_all = shape[0] * shape[1];
    let cube_dim = CubeDim::new(&client, num_all);
    // SAFETY: units past the last number do nothing.
    unsafe {
        cube::finish::launch_unchecked(
            &client,
            calculate_cube_count_elemwise(&client, num_all, cube_dim),
            cube_dim,
            product.into_buffer_arg(),
            bias.map(CubeTensor::into_buffer_arg).into(),
            residual.map(CubeTensor::into_buffer_arg).into(),
            output.clone().into_buffer_arg(),
            shape[1],
            num_all,
            then,
            [element(own), element(dtype)],
        );
    }
    output
}

impl FewRowsOps for CubeBackend {
    fn norm_rows(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Extra<Self>,
        residual: Extra<Self>,
        epsilon: f32,
    ) -> FloatTensor<Self> {
        normed(x, (gamma, given(beta)), given(residual), epsilon)
    }

    fn project_rows(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Extra<Self>,
        residual: Extra<Self>,
        then: Then,
        dtype: DType,
        num_lanes: usize,
    ) -> FloatTensor<Self> {
        projected(x, (weight, given(bias)), given(residual), then, (dtype, num_lanes))
    }

    fn exact_product(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        let mut shape = lhs.shape();
        let last = shape.num_dims() - 1;
        shape[last] = rhs.shape()[last];
        let (client, device, dtype) = (lhs.client.clone(), lhs.device.clone(), lhs.dtype);
        let output = empty_device_contiguous_dtype(client, device, shape, dtype);
        match launched(&exact(), lhs.clone(), rhs.clone(), &output) {
            true => output,
            false => Self::float_matmul(lhs, rhs),
        }
    }

    fn mlp_block(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weights: Weights<Self>,
        then: Then,
        numbers: Numbers,
    ) -> FloatTensor<Self> {
        let (read, rest) = weights.begin(x, numbers, then);
        rest.end(read, residual, numbers)
    }

    fn attention_block(
        residual: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weights: Weights<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        norms: Pair<Self>,
        rope: FloatTensor<Self>,
        places: IntTensor<Self>,
        form: Attending,
        numbers: Numbers,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (qkv, rest) = weights.begin(x, numbers, Then::Nothing);
        let (mixed, [keys, values]) =
            attended(qkv, [keys, values], norms, (rope, places), form, numbers.num_lanes);
        (rest.end(mixed, residual, numbers), keys, values)
    }
}

impl Pair<CubeBackend> {
    /// Splits a norm into its scale and shift; `None` without a norm.
    fn into_norm(self) -> Option<(CubeTensor, Option<CubeTensor>)> {
        match self {
            Self::Both(gamma, beta) => Some((gamma, Some(beta))),
            Self::One(gamma) => Some((gamma, None)),
            Self::Absent => None,
        }
    }
}

/// The weights of a block's end: its last product and its post norm.
struct Rest {
    last: (CubeTensor, Option<CubeTensor>),
    post_norm: Pair<CubeBackend>,
}

impl Weights<CubeBackend> {
    /// Applies the norm to the rows that a block reads, and multiplies them by the first matrix.
    fn begin(self, x: CubeTensor, numbers: Numbers, then: Then) -> (CubeTensor, Rest) {
        let Numbers { epsilon, num_lanes } = numbers;
        let dtype = x.dtype;
        let x = match self.norm.into_norm() {
            Some(norm) => normed(x, norm, None, epsilon),
            None => x,
        };
        let first = (self.first, given(self.first_bias));
        let rest = Rest { last: (self.last, given(self.last_bias)), post_norm: self.post_norm };
        (projected(x, first, None, then, (dtype, num_lanes)), rest)
    }
}

impl Rest {
    /// Multiplies rows by the last matrix, and adds the residual. The output has its shape.
    fn end(self, x: CubeTensor, residual: CubeTensor, numbers: Numbers) -> CubeTensor {
        let Numbers { epsilon, num_lanes } = numbers;
        let (shape, to) = (residual.shape(), (x.dtype, num_lanes));
        let output = match self.post_norm.into_norm() {
            None => projected(x, self.last, Some(residual), Then::Nothing, to),
            Some(norm) => {
                let output = projected(x, self.last, None, Then::Nothing, to);
                normed(output, norm, Some(residual), epsilon)
            }
        };
        CubeBackend::float_reshape(output, shape)
    }
}

/// Applies a norm to rows, then adds a residual.
fn normed(
    x: CubeTensor,
    (gamma, beta): (CubeTensor, Option<CubeTensor>),
    residual: Option<CubeTensor>,
    epsilon: f32,
) -> CubeTensor {
    let x = into_contiguous(x);
    let (client, dtype, shape) = (x.client.clone(), x.dtype, x.shape());
    let width = shape[shape.num_dims() - 1];
    let num_rows = shape.num_elements() / width.max(1);
    let output = empty_device_contiguous_dtype(client.clone(), x.device.clone(), shape, dtype);
    let most = client.properties().hardware.max_units_per_cube.min(256);
    let num_units = 1_u32 << most.ilog2();
    // SAFETY: units stay within their row's `width` numbers, and cubes within the rows.
    unsafe {
        cube::norm::launch_unchecked(
            &client,
            CubeCount::Static(num_rows as u32, 1, 1),
            CubeDim::new_1d(num_units),
            x.into_buffer_arg(),
            into_contiguous(gamma).into_buffer_arg(),
            beta.map(into_contiguous).map(CubeTensor::into_buffer_arg).into(),
            residual.map(into_contiguous).map(CubeTensor::into_buffer_arg).into(),
            output.clone().into_buffer_arg(),
            width,
            epsilon,
            num_units as usize,
            element(dtype),
        );
    }
    output
}

/// Multiplies rows by a matrix, applies `then`, and adds a residual.
fn projected(
    x: CubeTensor,
    (weight, bias): (CubeTensor, Option<CubeTensor>),
    residual: Option<CubeTensor>,
    then: Then,
    (dtype, num_lanes): (DType, usize),
) -> CubeTensor {
    let x = into_contiguous(x);
    let weight = by_outputs(weight);
    let (client, own) = (x.client.clone(), x.dtype);
    let width = x.meta.shape()[x.meta.num_dims() - 1];
    let num_rows = x.meta.num_elements() / width;
    let [num_outputs, _] = weight.shape().dims();
    let num_outputs = num_outputs / then.num_parts();
    if !Kernels::suit(num_rows, own) {
        let shape = [num_rows, num_outputs];
        return finished(multiplied(x, weight), (bias, residual), then, shape, dtype);
    }
    let at_once = num_rows.min(ROWS_AT_ONCE);
    let vector = vector_size(&client, own, width);
    let num_vectors = width / vector;
    // A product of few rows waits for memory, so each lane has several reads under way. A product
    // of many rows reuses what it has read.
    let (per_plane, num_loads) = if at_once == 1 { (2, 4) } else { (4, 1) };
    let per_plane = per_plane / then.num_parts();
    let num_loads = if num_vectors >= num_loads * num_lanes { num_loads } else { 1 };
    let plan = ProjectionPlan { num_rows: at_once, num_outputs: per_plane, num_loads, then };
    let output = empty(&x, [num_rows, num_outputs], dtype);
    let num_cubes = num_outputs.div_ceil(per_plane * NUM_PLANES as usize) as u32;
    // SAFETY: columns end with the rows, outputs are clamped, and rows are whole groups.
    unsafe {
        cube::project::launch_unchecked(
            &client,
            CubeCount::Static(num_cubes, (num_rows / at_once) as u32, 1),
            CubeDim::new_2d(num_lanes as u32, NUM_PLANES),
            vector,
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            bias.map(into_contiguous).map(CubeTensor::into_buffer_arg).into(),
            residual.map(into_contiguous).map(CubeTensor::into_buffer_arg).into(),
            output.clone().into_buffer_arg(),
            num_vectors,
            num_outputs,
            plan,
            [element(own), element(dtype)],
        );
    }
    output
}

/// Writes queries, keys and values to their places, then computes the attention of each row.
fn attended(
    qkv: CubeTensor,
    [keys, values]: [CubeTensor; 2],
    norms: Pair<CubeBackend>,
    (rope, places): (CubeTensor, CubeTensor),
    Attending { form, epsilon, num_splits }: Attending,
    num_lanes: usize,
) -> (CubeTensor, [CubeTensor; 2]) {
    let AttentionForm { num_heads, num_kv_heads, head_dim, scale, soft_cap, reach } = form;
    let (qkv, rope, places) =
        (into_contiguous(qkv), into_contiguous(rope), into_contiguous(places));
    // The tensors are written in place, unless there are other references to them.
    let owned = |x: CubeTensor| if x.can_mut() && x.is_contiguous() { x } else { x.copy() };
    let (keys, values) = (owned(keys), owned(values));
    let (client, dtype) = (qkv.client.clone(), qkv.dtype);
    let [num_rows, _] = qkv.shape().dims();
    let ([_, rotated], [_, num_columns]) = (rope.shape().dims(), places.shape().dims());
    let [_, _, allocated, _] = keys.shape().dims();
    let has_norms = matches!(norms, Pair::Both(..));
    let [query_norm, key_norm] = match norms {
        Pair::Both(query, key) => [query, key].map(into_contiguous),
        Pair::One(_) | Pair::Absent => [rope.clone(), rope.clone()],
    };
    let is_capped = soft_cap.is_some();
    let heads =
        Heads { num_heads, num_kv_heads, head_dim, rotated, has_norms, is_capped, num_lanes };
    let queries = empty(&qkv, [num_rows, num_heads * head_dim], dtype);
    let plane = CubeDim::new_1d(num_lanes as u32);
    // SAFETY: a plane has one of the heads of one of the rows, and places are entries of the cache.
    unsafe {
        cube::place::launch_unchecked(
            &client,
            CubeCount::Static((num_heads + 2 * num_kv_heads) as u32, num_rows as u32, 1),
            plane,
            qkv.clone().into_buffer_arg(),
            query_norm.into_buffer_arg(),
            key_norm.into_buffer_arg(),
            rope.into_buffer_arg(),
            places.clone().into_buffer_arg(),
            queries.clone().into_buffer_arg(),
            keys.clone().into_buffer_arg(),
            values.clone().into_buffer_arg(),
            allocated,
            num_columns,
            scale,
            epsilon,
            heads,
            element(dtype),
        );
    }
    // Each lane gets a vector, if heads are wide enough.
    let widest = (head_dim / num_lanes).max(1);
    let vector = (1..=vector_size(&client, dtype, head_dim).min(widest))
        .rev()
        .find(|size| head_dim.is_multiple_of(*size) && size.is_power_of_two())
        .unwrap_or(1);
    let vectors_per_lane = (head_dim / vector).div_ceil(num_lanes);
    let splits = empty(&qkv, [num_rows * num_heads, num_splits, head_dim], DType::F32);
    let sums = empty(&qkv, [num_rows * num_heads, num_splits, 2], DType::F32);
    // SAFETY: splits are pieces of a cache whose length is a multiple of theirs.
    unsafe {
        cube::attend::launch_unchecked(
            &client,
            CubeCount::Static(num_heads as u32, num_rows as u32, num_splits as u32),
            plane,
            vector,
            queries.clone().into_buffer_arg(),
            keys.clone().into_buffer_arg(),
            values.clone().into_buffer_arg(),
            places.into_buffer_arg(),
            splits.clone().into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            allocated,
            num_columns,
            reach,
            soft_cap.unwrap_or(1.0),
            heads,
            vectors_per_lane,
            element(dtype),
        );
    }
    // SAFETY: a cube has one of the heads of one of the rows. The queries have been read.
    unsafe {
        cube::combine::launch_unchecked(
            &client,
            CubeCount::Static(num_heads as u32, num_rows as u32, 1),
            plane,
            splits.into_buffer_arg(),
            sums.into_buffer_arg(),
            queries.clone().into_buffer_arg(),
            num_splits,
            head_dim,
            element(dtype),
        );
    }
    (queries, [keys, values])
}
