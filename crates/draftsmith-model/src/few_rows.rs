//! The product of a few rows with a weight matrix on the CPU: what decoding and verification spend
//! their time on.
//!
//! A general matrix product walks a `[in, out]` matrix in panels, one cache line from every row in
//! turn. For many rows that is right. For the 2 to 16 rows of a verification the forward then waits
//! for memory again and again, several times as long as one row takes, and speculation gains
//! nothing. Here the matrix is stored once more, as panels of 16 outputs laid end to end: each is
//! read from its beginning to its end, at the memory's own speed, and every input row is multiplied
//! with what is in registers.
//!
//! Each output is summed over the inputs in order, whatever the number of rows: a row's result does
//! not depend on the rows beside it, so verification repeats plain decoding's products to the last
//! bit.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor, TensorData};
use rayon::prelude::*;

use crate::host_rows::{MOST_ROWS, tensor, values};

/// Rows multiplied in one pass over a panel: their sums stay in registers.
const ROWS_A_PASS: usize = 6;

/// Outputs of one panel: a cache line.
const LINE: usize = 16;

/// Weights from which on a second thread is worth its start: below, they fit a core's caches.
const PARALLEL_WEIGHTS: usize = 4 << 20;

/// A linear layer that multiplies few rows by panels where it has them.
#[derive(Module, Debug)]
pub(crate) struct Projection {
    /// `[in, out]`, and a bias where the architecture has one.
    pub(crate) linear: Linear,
    #[module(skip)]
    panels: Option<Arc<Panels>>,
}

impl Projection {
    /// A layer to be trained, or to run elsewhere than on the CPU.
    pub(crate) fn new(linear: Linear) -> Self {
        Self { linear, panels: None }
    }

    /// A layer that only runs, from `[in, out]` weights.
    pub(crate) fn frozen(
        weight: Vec<f32>,
        [inputs, outputs]: [usize; 2],
        bias: Option<Vec<f32>>,
        device: &Device,
    ) -> Self {
        let panels = Panels::pack(&weight, inputs, outputs, device);
        let weight = TensorData::new(weight, [inputs, outputs]);
        let bias = bias.map(|bias| Param::from_data(TensorData::new(bias, [outputs]), device));
        Self { linear: Linear { weight: Param::from_data(weight, device), bias }, panels }
    }

    /// Applies the layer to rows.
    ///
    /// # Shapes
    /// - rows: `[rows, in]`
    /// - output: `[rows, out]`
    pub(crate) fn forward(&self, rows: Tensor<2>) -> Tensor<2> {
        let [num_rows, inputs] = rows.dims();
        let Some(panels) = self.panels.as_deref().filter(|_| num_rows <= MOST_ROWS) else {
            return self.linear.forward(rows);
        };
        let device = rows.device();
        let x = values(rows);
        debug_assert_eq!(x.len(), num_rows * inputs);
        let product = tensor(panels.multiply(&x, num_rows), [num_rows, panels.outputs], &device);
        match &self.linear.bias {
            Some(bias) => product + bias.val().unsqueeze(),
            None => product,
        }
    }
}

/// A `[in, out]` matrix as panels of [`LINE`] outputs, each `[in, LINE]`.
#[derive(Debug)]
struct Panels {
    lines: Vec<Line>,
    inputs: usize,
    outputs: usize,
}

/// Sixteen weights of one input, on one cache line.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Line([f32; LINE]);

impl Panels {
    /// Packs a matrix, where the device is the CPU and the processor has the instructions.
    fn pack(weight: &[f32], inputs: usize, outputs: usize, device: &Device) -> Option<Arc<Self>> {
        if *device != Device::flex() || !kernel_runs_here() {
            return None;
        }
        let num_panels = outputs.div_ceil(LINE);
        let mut lines = vec![Line([0.0; LINE]); num_panels * inputs];
        for (panel, lines) in lines.chunks_exact_mut(inputs).enumerate() {
            let (start, end) = (panel * LINE, ((panel + 1) * LINE).min(outputs));
            for (line, row) in lines.iter_mut().zip(weight.chunks_exact(outputs)) {
                line.0[..end - start].copy_from_slice(&row[start..end]);
            }
        }
        Some(Arc::new(Self { lines, inputs, outputs }))
    }

    /// `x · weight`, row by row.
    fn multiply(&self, x: &[f32], num_rows: usize) -> Vec<f32> {
        let mut output = vec![0.0; num_rows * self.outputs];
        let panels = || self.lines.chunks_exact(self.inputs);
        let write = |panel: usize, sums: &[[f32; LINE]], output: &mut [f32]| {
            let (start, end) = (panel * LINE, ((panel + 1) * LINE).min(self.outputs));
            for (row, sums) in output.chunks_exact_mut(self.outputs).zip(sums) {
                row[start..end].copy_from_slice(&sums[..end - start]);
            }
        };
        if self.inputs * self.outputs < PARALLEL_WEIGHTS {
            let mut sums = [[0.0; LINE]; MOST_ROWS];
            for (number, panel) in panels().enumerate() {
                multiply_panel(x, panel, &mut sums[..num_rows]);
                write(number, &sums[..num_rows], &mut output);
            }
        } else {
            let products: Vec<[[f32; LINE]; MOST_ROWS]> = self
                .lines
                .par_chunks_exact(self.inputs)
                .map(|panel| {
                    let mut sums = [[0.0; LINE]; MOST_ROWS];
                    multiply_panel(x, panel, &mut sums[..num_rows]);
                    sums
                })
                .collect();
            for (number, sums) in products.iter().enumerate() {
                write(number, &sums[..num_rows], &mut output);
            }
        }
        output
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn kernel_runs_here() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_panel(_x: &[f32], _panel: &[Line], _sums: &mut [[f32; LINE]]) {
    unreachable!("no panels are packed on this processor")
}

#[cfg(target_arch = "x86_64")]
use x86::{kernel_runs_here, multiply_panel};

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are chosen at run time and load from pointers")]
mod x86 {
    //! The product with AVX2 and FMA, compiled for both so that sums stay in registers.

    use std::arch::is_x86_feature_detected;
    use std::arch::x86_64::{
        __m256, _mm256_fmadd_ps, _mm256_load_ps, _mm256_set1_ps, _mm256_setzero_ps,
        _mm256_storeu_ps,
    };

    use super::{LINE, Line, ROWS_A_PASS};

    /// Whether the processor has the instructions.
    pub(super) fn kernel_runs_here() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    /// Multiplies rows with a panel; only where [`kernel_runs_here`], for panels are packed only
    /// there.
    pub(super) fn multiply_panel(x: &[f32], panel: &[Line], sums: &mut [[f32; LINE]]) {
        let inputs = panel.len();
        assert_eq!(x.len(), sums.len() * inputs, "a row of inputs for each row of sums");
        let passes = x.chunks(ROWS_A_PASS * inputs).zip(sums.chunks_mut(ROWS_A_PASS));
        for (x, sums) in passes {
            // SAFETY: panels exist only where both features were detected.
            unsafe {
                match sums.len() {
                    1 => pass::<1>(x, panel, sums),
                    2 => pass::<2>(x, panel, sums),
                    3 => pass::<3>(x, panel, sums),
                    4 => pass::<4>(x, panel, sums),
                    5 => pass::<5>(x, panel, sums),
                    _ => pass::<6>(x, panel, sums),
                }
            }
        }
    }

    #[target_feature(enable = "avx2,fma")]
    fn pass<const ROWS: usize>(x: &[f32], panel: &[Line], output: &mut [[f32; LINE]]) {
        let inputs = panel.len();
        let rows: [&[f32]; ROWS] = std::array::from_fn(|r| &x[r * inputs..(r + 1) * inputs]);
        let zero = _mm256_setzero_ps();
        let mut sums: [[__m256; 2]; ROWS] = [[zero; 2]; ROWS];
        for (i, line) in panel.iter().enumerate() {
            // SAFETY: a line is sixteen values on a 64-byte boundary.
            let (low, high) = unsafe {
                (_mm256_load_ps(line.0.as_ptr()), _mm256_load_ps(line.0.as_ptr().add(LINE / 2)))
            };
            for r in 0..ROWS {
                let factor = _mm256_set1_ps(rows[r][i]);
                sums[r][0] = _mm256_fmadd_ps(factor, low, sums[r][0]);
                sums[r][1] = _mm256_fmadd_ps(factor, high, sums[r][1]);
            }
        }
        for (row, sums) in output.iter_mut().zip(sums) {
            // SAFETY: a row of the output is sixteen values.
            unsafe {
                _mm256_storeu_ps(row.as_mut_ptr(), sums[0]);
                _mm256_storeu_ps(row.as_mut_ptr().add(LINE / 2), sums[1]);
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
        for (inputs, outputs) in [(1, 1), (7, 5), (8, 32), (33, 100), (192, 517), (2048, 2056)] {
            let random = |rows, columns| {
                Tensor::<2>::random([rows, columns], Distribution::Normal(0.0, 1.0), &device)
            };
            let weight = random(inputs, outputs);
            let layer =
                Projection::frozen(values(weight.clone()), [inputs, outputs], None, &device);
            let all = random(17, inputs);
            let single: Vec<f32> = (0..16)
                .flat_map(|r| values(layer.forward(all.clone().slice([r..r + 1, 0..inputs]))))
                .collect();
            for rows in [1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17] {
                let x = all.clone().slice([0..rows, 0..inputs]);
                let found = values(layer.forward(x.clone()));
                if layer.panels.is_some() && rows <= 16 {
                    assert_eq!(found, single[..rows * outputs], "{rows} rows are {rows} times one");
                }
                for (a, b) in found.iter().zip(values(x.matmul(weight.clone()))) {
                    // Sums of up to 2,048 products of unit normals, in another order.
                    assert!((a - b).abs() < 1e-3, "{a} for {b}");
                }
            }
        }
    }
}
