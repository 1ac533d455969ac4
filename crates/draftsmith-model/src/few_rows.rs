//! The product of a few rows with a weight matrix on the CPU: what verification spends its time on.
//!
//! A general matrix product walks a `[in, out]` weight matrix in tall panels, a cache line from
//! every row in turn. That is right for many rows. For the 2 to 16 of a verification it makes the
//! forward wait for memory again and again, several times as long as one row takes, and
//! speculation gains nothing. Here the matrix is read once, in order, a few of its rows at a time,
//! and every input row is multiplied with what is in registers: 6 rows take little longer than 1.
//!
//! Each output is summed over the inputs in order, whatever the number of rows: a row's result
//! does not depend on the rows beside it, so verification repeats plain decoding's products to the
//! last bit.

use burn::tensor::{Device, Tensor, TensorData};
use burn_flex::Flex;
use pulp::{Arch, Simd, WithSimd};

/// The most rows that are multiplied here; more are the general product's business.
const MOST_ROWS: usize = 16;

/// Rows multiplied in one pass over the weights: their sums stay in registers.
const ROWS_A_PASS: usize = 6;

/// Weight rows read side by side: as many streams as prefetchers follow well.
const DEPTH: usize = 8;

/// Whether [`few_rows_matmul`] takes this product.
pub(crate) fn is_few_rows(rows: usize, device: &Device) -> bool {
    rows <= MOST_ROWS && *device == Device::flex()
}

/// Multiplies a few rows with a weight matrix.
///
/// # Shapes
/// - x: `[rows, in]`
/// - weight: `[in, out]`
/// - output: `[rows, out]`
///
/// Falls back to the general product where the tensors are not plain f32 in memory.
pub(crate) fn few_rows_matmul(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    let [rows, inputs] = x.dims();
    let [_, outputs] = weight.dims();
    let device = x.device();
    let plain = |tensor: &burn_flex::FlexTensor| {
        tensor.dtype() == burn::tensor::DType::F32
            && tensor.layout().is_contiguous()
            && tensor.layout().start_offset() == 0
    };
    let (Ok(x_flex), Ok(weight_flex)) =
        (x.clone().try_into_primitive::<Flex>(), weight.clone().try_into_primitive::<Flex>())
    else {
        return x.matmul(weight);
    };
    let x_flex = x_flex.to_contiguous();
    if !plain(&weight_flex) || !plain(&x_flex) {
        return x.matmul(weight);
    }
    let mut output = vec![0.0; rows * outputs];
    Arch::new().dispatch(FewRows {
        x: &x_flex.storage::<f32>()[..rows * inputs],
        weight: &weight_flex.storage::<f32>()[..inputs * outputs],
        output: &mut output,
        inputs,
        outputs,
    });
    Tensor::from_data(TensorData::new(output, [rows, outputs]), &device)
}

/// `output += x · weight`, all row by row.
struct FewRows<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    output: &'a mut [f32],
    inputs: usize,
    outputs: usize,
}

impl WithSimd for FewRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let xs = self.x.chunks(ROWS_A_PASS * self.inputs);
        let outputs = self.output.chunks_mut(ROWS_A_PASS * self.outputs);
        for (x, output) in xs.zip(outputs) {
            let (weight, k, n) = (self.weight, self.inputs, self.outputs);
            // Few rows leave registers for wider blocks, which keep as many sums in flight.
            match x.len() / k {
                1 => pass::<S, 1, 8>(simd, x, weight, output, k, n),
                2 => pass::<S, 2, 4>(simd, x, weight, output, k, n),
                3 => pass::<S, 3, 3>(simd, x, weight, output, k, n),
                4 => pass::<S, 4, 2>(simd, x, weight, output, k, n),
                5 => pass::<S, 5, 2>(simd, x, weight, output, k, n),
                _ => pass::<S, 6, 2>(simd, x, weight, output, k, n),
            }
        }
    }
}

/// Multiplies `ROWS` rows, in blocks of `WIDTH` vectors of outputs.
#[inline(always)]
fn pass<S: Simd, const ROWS: usize, const WIDTH: usize>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    output: &mut [f32],
    inputs: usize,
    outputs: usize,
) {
    let x: [&[f32]; ROWS] = std::array::from_fn(|r| &x[r * inputs..(r + 1) * inputs]);
    let mut start = 0;
    for deep in weight.chunks(DEPTH * outputs) {
        let depth = deep.len() / outputs;
        if depth == DEPTH {
            block::<S, ROWS, WIDTH, DEPTH>(simd, &x, start, deep, output, outputs);
        } else {
            for (i, row) in deep.chunks_exact(outputs).enumerate() {
                block::<S, ROWS, WIDTH, 1>(simd, &x, start + i, row, output, outputs);
            }
        }
        start += depth;
    }
}

/// Adds the products with `LEN` weight rows, of which `start` is the first.
#[inline(always)]
fn block<S: Simd, const ROWS: usize, const WIDTH: usize, const LEN: usize>(
    simd: S,
    x: &[&[f32]; ROWS],
    start: usize,
    weight: &[f32],
    output: &mut [f32],
    outputs: usize,
) {
    let factors: [[f32; LEN]; ROWS] =
        std::array::from_fn(|r| std::array::from_fn(|i| x[r][start + i]));
    let rows: [(&[S::f32s], &[f32]); LEN] =
        std::array::from_fn(|i| S::as_simd_f32s(&weight[i * outputs..(i + 1) * outputs]));
    let num_vectors = rows[0].0.len();
    let mut sums = output.chunks_exact_mut(outputs);
    let mut sums: [(&mut [S::f32s], &mut [f32]); ROWS] = std::array::from_fn(|_| {
        S::as_mut_simd_f32s(sums.next().expect("one output row for each input row"))
    });
    let mut column = 0;
    while column + WIDTH <= num_vectors {
        let mut sum: [[S::f32s; WIDTH]; ROWS] =
            std::array::from_fn(|r| std::array::from_fn(|w| sums[r].0[column + w]));
        for i in 0..LEN {
            let weights = &rows[i].0[column..column + WIDTH];
            for r in 0..ROWS {
                let factor = simd.splat_f32s(factors[r][i]);
                for w in 0..WIDTH {
                    sum[r][w] = simd.mul_add_e_f32s(factor, weights[w], sum[r][w]);
                }
            }
        }
        for r in 0..ROWS {
            sums[r].0[column..column + WIDTH].copy_from_slice(&sum[r]);
        }
        column += WIDTH;
    }
    for column in column..num_vectors {
        for r in 0..ROWS {
            let mut sum = sums[r].0[column];
            for i in 0..LEN {
                let factor = simd.splat_f32s(factors[r][i]);
                sum = simd.mul_add_e_f32s(factor, rows[i].0[column], sum);
            }
            sums[r].0[column] = sum;
        }
    }
    for column in 0..rows[0].1.len() {
        for r in 0..ROWS {
            for i in 0..LEN {
                sums[r].1[column] += factors[r][i] * rows[i].1[column];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Distribution;

    fn values(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().try_into_vec().expect("f32")
    }

    #[test]
    fn it_is_the_general_product_and_rows_do_not_depend_on_each_other() {
        let device = Device::flex();
        device.seed(3);
        for (inputs, outputs) in [(1, 1), (7, 5), (8, 32), (33, 100), (192, 517)] {
            let weight =
                Tensor::<2>::random([inputs, outputs], Distribution::Normal(0.0, 1.0), &device);
            let all = Tensor::<2>::random([16, inputs], Distribution::Normal(0.0, 1.0), &device);
            let single: Vec<f32> = (0..16)
                .flat_map(|r| {
                    let row = all.clone().slice([r..r + 1, 0..inputs]);
                    values(few_rows_matmul(row, weight.clone()))
                })
                .collect();
            for rows in 1..=16 {
                let x = all.clone().slice([0..rows, 0..inputs]);
                let found = values(few_rows_matmul(x.clone(), weight.clone()));
                assert_eq!(found, single[..rows * outputs], "{rows} rows are {rows} times one");
                for (a, b) in found.iter().zip(values(x.matmul(weight.clone()))) {
                    // Sums of up to 192 products of unit normals, in another order.
                    assert!((a - b).abs() < 1e-4, "{a} for {b}");
                }
            }
        }
    }
}
