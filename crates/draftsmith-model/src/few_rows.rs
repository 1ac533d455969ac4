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

/// The most rows multiplied in one pass over a panel: their sums stay in registers.
const ROWS_A_PASS: usize = 6;

/// Panels multiplied side by side where the rows are too few to keep the multipliers busy.
const PANELS_A_GROUP: usize = 4;

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
        let group_len = PANELS_A_GROUP * self.inputs;
        let product = |panels: &[Line]| {
            let mut sums = [[[0.0; LINE]; MOST_ROWS]; PANELS_A_GROUP];
            multiply_panels(x, panels, self.inputs, &mut sums);
            sums
        };
        let mut write = |group: usize, sums: &[Sums; PANELS_A_GROUP]| {
            for (panel, sums) in sums.iter().enumerate() {
                let start = (group * PANELS_A_GROUP + panel) * LINE;
                let end = (start + LINE).min(self.outputs);
                if start < end {
                    for (row, sums) in output.chunks_exact_mut(self.outputs).zip(sums) {
                        row[start..end].copy_from_slice(&sums[..end - start]);
                    }
                }
            }
        };
        if self.inputs * self.outputs < PARALLEL_WEIGHTS {
            for (group, panels) in self.lines.chunks(group_len).enumerate() {
                write(group, &product(panels));
            }
        } else {
            let products: Vec<_> = self.lines.par_chunks(group_len).map(product).collect();
            for (group, sums) in products.iter().enumerate() {
                write(group, sums);
            }
        }
        output
    }
}

/// A panel's product with each row.
type Sums = [[f32; LINE]; MOST_ROWS];

#[cfg(not(target_arch = "x86_64"))]
fn kernel_runs_here() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_panels(_x: &[f32], _panels: &[Line], _inputs: usize, _sums: &mut [Sums]) {
    unreachable!("no panels are packed on this processor")
}

#[cfg(target_arch = "x86_64")]
use x86::{kernel_runs_here, multiply_panels};

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "vector instructions are chosen at run time and load from pointers")]
mod x86 {
    //! The product with AVX2 and FMA, compiled for both so that sums stay in registers.

    use std::arch::is_x86_feature_detected;
    use std::arch::x86_64::{
        __m256, _mm256_fmadd_ps, _mm256_load_ps, _mm256_set1_ps, _mm256_setzero_ps,
        _mm256_storeu_ps,
    };

    use super::{LINE, Line, ROWS_A_PASS, Sums};

    /// Whether the processor has the instructions.
    pub(super) fn kernel_runs_here() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    /// Multiplies rows with a group of panels; only where [`kernel_runs_here`], for panels are
    /// packed only there. `sums` holds a row of lines for each panel in turn.
    pub(super) fn multiply_panels(x: &[f32], panels: &[Line], inputs: usize, sums: &mut [Sums]) {
        let num_rows = x.len() / inputs;
        let num_passes = num_rows.div_ceil(ROWS_A_PASS);
        // Passes of about the same size: a pass of one row costs as much as one of four.
        let rows_a_pass = num_rows.div_ceil(num_passes);
        for (number, x) in x.chunks(rows_a_pass * inputs).enumerate() {
            let start = number * rows_a_pass;
            let num_panels = panels.len() / inputs;
            // SAFETY: panels exist only where both features were detected.
            unsafe {
                match (x.len() / inputs, num_panels) {
                    (1, 4) => pass::<1, 4>(x, panels, inputs, start, sums),
                    (1, _) => panel_by_panel::<1>(x, panels, inputs, start, sums),
                    (2, _) => panel_by_panel::<2>(x, panels, inputs, start, sums),
                    (3, _) => panel_by_panel::<3>(x, panels, inputs, start, sums),
                    (4, _) => panel_by_panel::<4>(x, panels, inputs, start, sums),
                    (5, _) => panel_by_panel::<5>(x, panels, inputs, start, sums),
                    _ => panel_by_panel::<6>(x, panels, inputs, start, sums),
                }
            }
        }
    }

    #[target_feature(enable = "avx2,fma")]
    fn panel_by_panel<const ROWS: usize>(
        x: &[f32],
        panels: &[Line],
        inputs: usize,
        start: usize,
        sums: &mut [Sums],
    ) {
        for (panel, sums) in panels.chunks(inputs).zip(sums.chunks_mut(1)) {
            pass::<ROWS, 1>(x, panel, inputs, start, sums);
        }
    }

    /// Multiplies `ROWS` rows with `PANELS` panels side by side, so that enough sums are in flight
    /// to keep the multipliers busy.
    #[target_feature(enable = "avx2,fma")]
    fn pass<const ROWS: usize, const PANELS: usize>(
        x: &[f32],
        panels: &[Line],
        inputs: usize,
        start: usize,
        output: &mut [Sums],
    ) {
        let rows: [&[f32]; ROWS] = std::array::from_fn(|r| &x[r * inputs..(r + 1) * inputs]);
        let panels: [&[Line]; PANELS] =
            std::array::from_fn(|p| &panels[p * inputs..(p + 1) * inputs]);
        let zero = _mm256_setzero_ps();
        let mut sums: [[[__m256; 2]; ROWS]; PANELS] = [[[zero; 2]; ROWS]; PANELS];
        for i in 0..inputs {
            for p in 0..PANELS {
                let line = &panels[p][i];
                // SAFETY: a line is sixteen values on a 64-byte boundary.
                let (low, high) = unsafe {
                    (_mm256_load_ps(line.0.as_ptr()), _mm256_load_ps(line.0.as_ptr().add(LINE / 2)))
                };
                for r in 0..ROWS {
                    let factor = _mm256_set1_ps(rows[r][i]);
                    sums[p][r][0] = _mm256_fmadd_ps(factor, low, sums[p][r][0]);
                    sums[p][r][1] = _mm256_fmadd_ps(factor, high, sums[p][r][1]);
                }
            }
        }
        for (output, sums) in output.iter_mut().zip(sums) {
            for (row, sums) in output[start..start + ROWS].iter_mut().zip(sums) {
                // SAFETY: a row of the output is sixteen values.
                unsafe {
                    _mm256_storeu_ps(row.as_mut_ptr(), sums[0]);
                    _mm256_storeu_ps(row.as_mut_ptr().add(LINE / 2), sums[1]);
                }
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
