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
pub fn few_rows_matmul(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
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
    let Some(multiply) = fastest() else { return x.matmul(weight) };
    let mut output = vec![0.0; rows * outputs];
    multiply(
        &x_flex.storage::<f32>()[..rows * inputs],
        &weight_flex.storage::<f32>()[..inputs * outputs],
        &mut output,
        inputs,
        outputs,
    );
    Tensor::from_data(TensorData::new(output, [rows, outputs]), &device)
}

/// `output += x · weight` on slices: x, weight, output, inputs, outputs.
type Multiply = fn(&[f32], &[f32], &mut [f32], usize, usize);

/// The product compiled for this processor's vectors; none where it has no fused multiply-add.
fn fastest() -> Option<Multiply> {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            return Some(multiply_avx512);
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
        {
            return Some(multiply_avx2);
        }
    }
    #[cfg(target_arch = "aarch64")]
    return Some(multiply::<16>);
    #[cfg(not(target_arch = "aarch64"))]
    None
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "functions compiled for newer processors are unsafe to call")]
fn multiply_avx2(x: &[f32], weight: &[f32], output: &mut [f32], inputs: usize, outputs: usize) {
    #[target_feature(enable = "avx2,fma")]
    fn compiled(x: &[f32], weight: &[f32], output: &mut [f32], inputs: usize, outputs: usize) {
        multiply::<16>(x, weight, output, inputs, outputs);
    }
    // SAFETY: `fastest` hands this function out only where both features are there.
    unsafe { compiled(x, weight, output, inputs, outputs) }
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "functions compiled for newer processors are unsafe to call")]
fn multiply_avx512(x: &[f32], weight: &[f32], output: &mut [f32], inputs: usize, outputs: usize) {
    #[target_feature(enable = "avx512f")]
    fn compiled(x: &[f32], weight: &[f32], output: &mut [f32], inputs: usize, outputs: usize) {
        multiply::<32>(x, weight, output, inputs, outputs);
    }
    // SAFETY: `fastest` hands this function out only where the feature is there.
    unsafe { compiled(x, weight, output, inputs, outputs) }
}

/// `output += x · weight`, all row by row.
#[inline(always)]
fn multiply<const WIDTH: usize>(
    x: &[f32],
    weight: &[f32],
    output: &mut [f32],
    inputs: usize,
    outputs: usize,
) {
    let xs = x.chunks(ROWS_A_PASS * inputs);
    let products = output.chunks_mut(ROWS_A_PASS * outputs);
    for (x, output) in xs.zip(products) {
        match x.len() / inputs {
            1 => pass::<1, WIDTH>(x, weight, output, inputs, outputs),
            2 => pass::<2, WIDTH>(x, weight, output, inputs, outputs),
            3 => pass::<3, WIDTH>(x, weight, output, inputs, outputs),
            4 => pass::<4, WIDTH>(x, weight, output, inputs, outputs),
            5 => pass::<5, WIDTH>(x, weight, output, inputs, outputs),
            _ => pass::<6, WIDTH>(x, weight, output, inputs, outputs),
        }
    }
}

/// Multiplies `ROWS` rows, in blocks of `WIDTH` outputs.
#[inline(always)]
fn pass<const ROWS: usize, const WIDTH: usize>(
    x: &[f32],
    weight: &[f32],
    output: &mut [f32],
    inputs: usize,
    outputs: usize,
) {
    let mut start = 0;
    for deep in weight.chunks(DEPTH * outputs) {
        if deep.len() == DEPTH * outputs {
            let mut factors = [[0.0; ROWS]; DEPTH];
            for (i, factors) in factors.iter_mut().enumerate() {
                for (r, factor) in factors.iter_mut().enumerate() {
                    *factor = x[r * inputs + start + i];
                }
            }
            block::<ROWS, WIDTH, DEPTH>(&factors, deep, output, outputs);
        } else {
            for (i, row) in deep.chunks_exact(outputs).enumerate() {
                let mut factors = [[0.0; ROWS]; 1];
                for (r, factor) in factors[0].iter_mut().enumerate() {
                    *factor = x[r * inputs + start + i];
                }
                block::<ROWS, WIDTH, 1>(&factors, row, output, outputs);
            }
        }
        start += DEPTH;
    }
}

/// Adds the products with `LEN` weight rows.
#[inline(always)]
fn block<const ROWS: usize, const WIDTH: usize, const LEN: usize>(
    factors: &[[f32; ROWS]; LEN],
    weight: &[f32],
    output: &mut [f32],
    outputs: usize,
) {
    let mut column = 0;
    while column + WIDTH <= outputs {
        columns::<ROWS, WIDTH, LEN>(factors, weight, output, outputs, column);
        column += WIDTH;
    }
    while column + 8 <= outputs {
        columns::<ROWS, 8, LEN>(factors, weight, output, outputs, column);
        column += 8;
    }
    while column < outputs {
        columns::<ROWS, 1, LEN>(factors, weight, output, outputs, column);
        column += 1;
    }
}

/// Adds the products of `WIDTH` outputs from `column` on; the sums stay in registers.
#[inline(always)]
fn columns<const ROWS: usize, const WIDTH: usize, const LEN: usize>(
    factors: &[[f32; ROWS]; LEN],
    weight: &[f32],
    output: &mut [f32],
    outputs: usize,
    column: usize,
) {
    let mut sums = [[0.0_f32; WIDTH]; ROWS];
    for r in 0..ROWS {
        sums[r].copy_from_slice(&output[r * outputs + column..][..WIDTH]);
    }
    for i in 0..LEN {
        let mut weights = [0.0_f32; WIDTH];
        weights.copy_from_slice(&weight[i * outputs + column..][..WIDTH]);
        for r in 0..ROWS {
            for w in 0..WIDTH {
                sums[r][w] = factors[i][r].mul_add(weights[w], sums[r][w]);
            }
        }
    }
    for r in 0..ROWS {
        output[r * outputs + column..][..WIDTH].copy_from_slice(&sums[r]);
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
