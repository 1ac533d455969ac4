//! Kernels of our own for frozen layers on a GPU. Forwards of few rows over a cache are what they are for: there launches and
//! the reading of weights take the time.
//!
//! A layer takes nine launches: norm, queries with keys and values, their rotation and the cache's append, attention over
//! pieces of the cache, the sum of the pieces, output with residual, norm, gate with up, down with residual. Every weight is
//! read once for up to eight rows. Many rows are multiplied by cubek's kernels: with tensor cores in 16 bits, and without in f32,
//! where those would round to 10 bits. Nothing depends on lengths but the number of pieces, so there are few kernels to compile.
//! The order of sums does not depend on the other rows of a forward.

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
use burn_cubecl::cubecl::features::Plane;
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

use crate::packed::AttentionForm;
use crate::spec::Activation;

/// Rows that share one reading of the weights.
const ROWS_AT_ONCE: usize = 8;
/// The most rows of a forward.
const MOST_ROWS: usize = 2 * ROWS_AT_ONCE;
/// The same in f32, where a prompt's rows equal those read one by one.
const MOST_EXACT_ROWS: usize = 1024;
/// Planes of a cube that projects.
const NUM_PLANES: u32 = 4;
/// Bytes that a lane reads at once.
const VECTOR_BYTES: usize = 16;

/// Whether a device runs the kernels, and how wide its planes are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernels {
    num_lanes: usize,
}

/// What a projection does after the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Nothing.
    Nothing,
    /// Applies an activation.
    Activate(Activation),
    /// Applies an activation to the first half of the outputs, and multiplies the second half by them.
    Gate(Activation),
}

/// A tensor that an operation may lack.
#[derive(ExtensionType)]
#[extension_type(fusion)]
pub(crate) enum Extra<B: Backend> {
    /// It has one.
    Given(FloatTensor<B>),
    /// It has none.
    Absent,
}

/// The norms of each head's query and key.
#[derive(ExtensionType)]
#[extension_type(fusion)]
pub(crate) enum HeadNorms<B: Backend> {
    /// The weights of both.
    Given(FloatTensor<B>, FloatTensor<B>),
    /// There are none.
    Absent,
}

/// The numbers of an attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attending {
    form: AttentionForm,
    epsilon: f32,
    num_splits: usize,
    num_lanes: usize,
}

#[backend_extension(Cube, Fusion)]
pub(crate) trait FewRowsOps: Backend {
    #[fusion(dtype = x, shape = x)]
    fn norm_rows(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        #[extension_type] beta: Extra<Self>,
        #[extension_type] residual: Extra<Self>,
        epsilon: f32,
    ) -> FloatTensor<Self>;

    #[fusion(dtype = *dtype, shape = {
        let num_outputs = weight[1] / if matches!(then, Then::Gate(_)) { 2 } else { 1 };
        burn::tensor::Shape::from([x[0], num_outputs])
    })]
    fn project_rows(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Extra<Self>,
        #[extension_type] residual: Extra<Self>,
        then: Then,
        dtype: DType,
        num_lanes: usize,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |qkv, keys, values, _norms, _rope, _places, attending| {
        let width = attending.form.num_heads * attending.form.head_dim;
        let mixed = burn::backend::fusion::custom::TensorSpec::new([qkv.shape[0], width].into(), qkv.dtype);
        (mixed, keys.clone(), values.clone())
    })]
    fn attend_rows(
        qkv: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        #[extension_type] norms: HeadNorms<Self>,
        rope: FloatTensor<Self>,
        places: IntTensor<Self>,
        attending: Attending,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

impl Kernels {
    /// The kernels of a device; `None` on the CPU, with autodiff, or without operations over planes.
    pub(crate) fn on(device: &Device) -> Option<Self> {
        let DispatchDevice::Cube(device) = device.as_dispatch() else { return None };
        let client = device.client();
        let properties = client.properties();
        let hardware = &properties.hardware;
        let is_fixed = hardware.plane_size_min == hardware.plane_size_max;
        let _ = Plane::Ops;
        let num_lanes = hardware.plane_size_max as usize;
        (is_fixed && num_lanes > 1).then_some(Self { num_lanes })
    }

    /// Whether a forward has so few rows, padding included, in this type.
    pub(crate) fn suit(num_rows: usize, dtype: DType) -> bool {
        let most = if dtype == DType::F32 { MOST_EXACT_ROWS } else { MOST_ROWS };
        num_rows == 1 || (num_rows.is_multiple_of(ROWS_AT_ONCE) && num_rows <= most)
    }

    /// The norm of rows, plus `residual`.
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

    /// Rows times a matrix whose columns are contiguous, with a bias, what follows, and a residual.
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

    /// Writes keys and values into a cache and attends over it.
    ///
    /// # Shapes
    /// - qkv: `[rows, (heads + 2 · kv_heads) · head_dim]`
    /// - cache: `[slots, kv_heads, allocated, head_dim]` each
    /// - output: `[rows, heads · head_dim]`, and the cache
    pub(crate) fn attend(
        self,
        qkv: Tensor<2>,
        [keys, values]: [Tensor<4>; 2],
        norms: Option<[Tensor<1>; 2]>,
        (rope, places): (Tensor<2>, Tensor<2, Int>),
        (form, epsilon, num_splits): (AttentionForm, f64, usize),
    ) -> (Tensor<2>, [Tensor<4>; 2]) {
        let norms = match norms {
            Some([query, key]) => HeadNorms::Given(query.into_dispatch(), key.into_dispatch()),
            None => HeadNorms::Absent,
        };
        let Self { num_lanes } = self;
        let attending = Attending { form, epsilon: epsilon as f32, num_splits, num_lanes };
        let (keys, values) = (keys.into_dispatch(), values.into_dispatch());
        let (rope, places) = (rope.into_dispatch(), places.into_dispatch());
        let (mixed, keys, values) = Dispatch::attend_rows(
            qkv.into_dispatch(),
            keys,
            values,
            norms,
            rope,
            places,
            attending,
        );
        let cache = [keys, values].map(Tensor::from_dispatch);
        (Tensor::from_dispatch(mixed), cache)
    }
}

/// The number of pieces of a cache that are attended to apart.
pub(crate) fn num_splits(num_keys: usize) -> usize {
    num_keys.div_ceil(KEYS_PER_SPLIT)
}

fn extra<const D: usize>(tensor: Option<Tensor<D>>) -> Extra<Dispatch> {
    tensor.map_or(Extra::Absent, |tensor| Extra::Given(tensor.into_dispatch()))
}

fn given(extra: Extra<CubeBackend>) -> Option<CubeTensor> {
    match extra {
        Extra::Given(tensor) => Some(into_contiguous(tensor)),
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

/// Numbers of a vector that a lane reads at once, of rows of `width`.
fn vector_size(client: &Client, dtype: DType, width: usize) -> usize {
    let most = VECTOR_BYTES / dtype.size();
    let sizes = client.io_optimized_vector_sizes(dtype.size());
    sizes.filter(|size| *size <= most && width.is_multiple_of(*size)).max().unwrap_or(1)
}

/// A matrix's buffer, output by output; copied if its columns are not contiguous.
fn by_outputs(mut weight: CubeTensor) -> CubeTensor {
    weight.meta.swap(0, 1);
    into_contiguous(weight)
}

/// The product of many rows and a matrix that lies output by output, in the rows' type.
fn multiplied(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let ([num_rows, width], [num_outputs, _]) = (x.shape().dims(), weight.shape().dims());
    let (client, dtype, kind) = (x.client.clone(), x.dtype, element(x.dtype));
    let output = empty(&x, [num_rows, num_outputs], dtype);
    // Measured on an H200 with weights as they lie here, 4096 × 4096 × 22016 in bf16: 299, 230 and 188 TFLOP/s; by default 63.
    let (cmma, mma) = (TileMatmulKind::Cmma, TileMatmulKind::Mma);
    let strategies = match dtype {
        DType::F32 => vec![Strategy::SimpleUnit(Inferred(SimpleUnitSelectionArgs {
            tile_size: TileSizeSelection::MaxTileSize,
        }))],
        _ => vec![
            Strategy::SpecializedTmaMma(Inferred(().into())),
            Strategy::SimpleTmaCmma(Inferred(SimpleArgs { multi_rows: true, tile_matmul: cmma })),
            Strategy::DoubleCyclicMma(Inferred(DoubleBufferingArgs {
                specialized: false,
                tile_matmul: mma,
            })),
        ],
    };
    for strategy in strategies.into_iter().map(cubek::matmul::strategy::Strategy::from) {
        let mut types =
            MatmulElems::from_globals(&MatmulGlobalElems { lhs: kind, rhs: kind, out: kind });
        let mut columns = weight.clone().binding();
        columns.shape = [width, num_outputs].into();
        columns.strides = [1, width].into();
        let (x, columns) =
            (InputBinding::new(x.clone().binding(), kind), InputBinding::new(columns, kind));
        if launch_ref(&strategy, &client, x, columns, output.clone().binding(), &mut types).is_ok()
        {
            return output;
        }
    }
    let mut columns = weight;
    columns.meta.swap(0, 1);
    CubeBackend::float_matmul(x, columns)
}

/// Adds a bias, activates or gates, and adds a residual, if there is anything to do.
fn finished(
    product: CubeTensor,
    (bias, residual): (Extra<CubeBackend>, Extra<CubeBackend>),
    (gate, activation): (Option<Activation>, Option<Activation>),
    shape: [usize; 2],
    dtype: DType,
) -> CubeTensor {
    let (bias, residual) = (given(bias), given(residual));
    let is_finished = bias.is_none() && residual.is_none() && gate.or(activation).is_none();
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
            gate,
            activation,
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
                given(beta).map(CubeTensor::into_buffer_arg).into(),
                given(residual).map(CubeTensor::into_buffer_arg).into(),
                output.clone().into_buffer_arg(),
                width,
                epsilon,
                num_units as usize,
                element(dtype),
            );
        }
        output
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
        let x = into_contiguous(x);
        let weight = by_outputs(weight);
        let (client, own) = (x.client.clone(), x.dtype);
        let [num_rows, width] = x.shape().dims();
        let [num_outputs, _] = weight.shape().dims();
        let (gate, activation) = match then {
            Then::Gate(gate) => (Some(gate), None),
            Then::Activate(activation) => (None, Some(activation)),
            Then::Nothing => (None, None),
        };
        let num_outputs = if gate.is_some() { num_outputs / 2 } else { num_outputs };
        if !Kernels::suit(num_rows, own) {
            let shape = [num_rows, num_outputs];
            return finished(
                multiplied(x, weight),
                (bias, residual),
                (gate, activation),
                shape,
                dtype,
            );
        }
        let at_once = num_rows.min(ROWS_AT_ONCE);
        let vector = vector_size(&client, own, width);
        let num_vectors = width / vector;
        // Few rows wait for memory, so a lane has several reads under way; many rows share what is read.
        let (per_plane, num_loads) = match (at_once, gate) {
            (1, None) => (2, 4),
            (1, Some(_)) => (1, 4),
            (_, None) => (4, 1),
            (_, Some(_)) => (2, 1),
        };
        #[cfg(test)]
        let (per_plane, num_loads, NUM_PLANES) =
            sweep::PLAN.lock().unwrap().unwrap_or((per_plane, num_loads, NUM_PLANES));
        let num_loads = if num_vectors >= num_loads * num_lanes { num_loads } else { 1 };
        let plan = ProjectionPlan {
            num_rows: at_once,
            num_outputs: per_plane,
            num_loads,
            is_ragged: !num_vectors.is_multiple_of(num_lanes * num_loads),
            gate,
            activation,
        };
        let output = empty(&x, [num_rows, num_outputs], dtype);
        let num_cubes = num_outputs.div_ceil(per_plane * NUM_PLANES as usize) as u32;
        // SAFETY: columns are checked where rows are ragged, outputs are clamped, and rows are whole groups.
        unsafe {
            cube::project::launch_unchecked(
                &client,
                CubeCount::Static(num_cubes, (num_rows / at_once) as u32, 1),
                CubeDim::new_2d(num_lanes as u32, NUM_PLANES),
                vector,
                x.into_buffer_arg(),
                weight.into_buffer_arg(),
                given(bias).map(CubeTensor::into_buffer_arg).into(),
                given(residual).map(CubeTensor::into_buffer_arg).into(),
                output.clone().into_buffer_arg(),
                num_vectors,
                num_outputs,
                plan,
                [element(own), element(dtype)],
            );
        }
        output
    }

    fn attend_rows(
        qkv: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        norms: HeadNorms<Self>,
        rope: FloatTensor<Self>,
        places: IntTensor<Self>,
        attending: Attending,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Attending { form, epsilon, num_splits, num_lanes } = attending;
        let AttentionForm { num_heads, num_kv_heads, head_dim, scale, soft_cap, reach } = form;
        let (qkv, rope, places) =
            (into_contiguous(qkv), into_contiguous(rope), into_contiguous(places));
        // Written in place, unless somebody else holds them.
        let owned = |x: CubeTensor| if x.can_mut() && x.is_contiguous() { x } else { x.copy() };
        let (keys, values) = (owned(keys), owned(values));
        let (client, dtype) = (qkv.client.clone(), qkv.dtype);
        let [num_rows, _] = qkv.shape().dims();
        let ([_, rotated], [_, num_columns]) = (rope.shape().dims(), places.shape().dims());
        let [_, _, allocated, _] = keys.shape().dims();
        let has_norms = matches!(norms, HeadNorms::Given(..));
        let [query_norm, key_norm] = match norms {
            HeadNorms::Given(query, key) => [query, key].map(into_contiguous),
            HeadNorms::Absent => [rope.clone(), rope.clone()],
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
        // A vector for each lane, where heads are wide enough.
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
        (queries, keys, values)
    }
}

#[cfg(test)]
mod sweep {
    use super::*;
    use std::time::Instant;
    pub(super) static PLAN: std::sync::Mutex<Option<(usize, usize, u32)>> =
        std::sync::Mutex::new(None);

    #[test]
    fn sweep() {
        let Ok(name) = std::env::var("DS_SWEEP") else { return };
        let small = name != "cuda";
        let device = if small {
            Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)
        } else {
            Device::cuda(0)
        };
        let kernels = Kernels::on(&device).unwrap();
        let like = (&device, if small { DType::F32 } else { DType::BF16 });
        let shapes = if small {
            vec![(64, 96)]
        } else {
            vec![(4096, 12288), (4096, 22016), (11008, 4096), (4096, 4096)]
        };
        let n = if small { 2 } else { 40 };
        // launches alone
        let x = Tensor::<2>::ones([1, 64], like);
        let g = Tensor::<1>::ones([64], (&device, DType::F32));
        for _ in 0..3 {
            let begun = Instant::now();
            let mut y = x.clone();
            for _ in 0..300 {
                y = kernels.norm(y, (g.clone(), None), None, 1e-5);
            }
            let host = begun.elapsed();
            device.sync().unwrap();
            println!(
                "300 norms: host {:.2} ms, all {:.2} ms",
                host.as_secs_f64() * 1e3,
                begun.elapsed().as_secs_f64() * 1e3
            );
            drop(y);
        }
        for (k, outs) in shapes {
            // Several copies, so that the cache does not hold them.
            let all: Vec<Tensor<2>> = (0..4)
                .map(|_| {
                    Tensor::<2>::random(
                        [outs, k],
                        burn::tensor::Distribution::Normal(0.0, 0.02),
                        like,
                    )
                    .transpose()
                })
                .collect();
            for rows in [1, 8] {
                let x = Tensor::<2>::random(
                    [rows, k],
                    burn::tensor::Distribution::Normal(0.0, 1.0),
                    like,
                );
                let plans: &[(usize, usize, u32)] = if rows == 1 {
                    &[
                        (2, 4, 4),
                        (1, 4, 4),
                        (1, 8, 4),
                        (4, 2, 4),
                        (2, 2, 4),
                        (1, 4, 8),
                        (2, 4, 8),
                        (1, 2, 8),
                        (2, 8, 4),
                        (4, 4, 4),
                        (1, 4, 16),
                    ]
                } else {
                    &[
                        (4, 1, 4),
                        (2, 1, 4),
                        (2, 2, 4),
                        (1, 2, 4),
                        (1, 4, 4),
                        (8, 1, 4),
                        (4, 1, 8),
                        (2, 1, 8),
                        (2, 2, 8),
                        (1, 1, 8),
                    ]
                };
                for plan in plans {
                    *PLAN.lock().unwrap() = Some(*plan);
                    let run = |w: &Tensor<2>| {
                        kernels.project(x.clone(), (w.clone(), None), None, Then::Nothing, like.1)
                    };
                    let y = run(&all[0]);
                    device.sync().unwrap();
                    drop(y);
                    let begun = Instant::now();
                    let mut last = None;
                    for nth in 0..n {
                        last = Some(run(&all[nth % 4]));
                        if nth % 8 == 7 {
                            let _ = &last;
                        }
                    }
                    device.sync().unwrap();
                    let s = begun.elapsed().as_secs_f64() / n as f64;
                    drop(last);
                    println!(
                        "{k}x{outs} rows {rows} {plan:?}: {:.1} us, {:.0} GB/s",
                        s * 1e6,
                        (k * outs * 2) as f64 / s / 1e9
                    );
                }
                *PLAN.lock().unwrap() = None;
            }
        }
    }
}
