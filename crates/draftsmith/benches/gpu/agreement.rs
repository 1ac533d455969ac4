//! Whether a device trains as the CPU does: small models with the same weights and rows, the losses
//! of each step side by side. The first steps of a run on new hardware are these.

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_model::{CausalLm, WeightDtype};

use crate::flops::Shape;
use crate::work::{Timing, Work};

/// Wide enough for tensor cores; rows are longer than one tile of a fused attention.
const SHAPE: Shape = Shape { hidden: 128, layers: 3, heads: 2, intermediate: 256, vocab: 512 };
/// Losses sum hundreds of numbers in another order.
const F32_TOLERANCE: f64 = 1e-3;
/// bf16 keeps 8 bits; a loss is a mean of hundreds of numbers.
const BF16_TOLERANCE: f64 = 0.02;

/// Trains on the CPU in f32, and on `device` in f32 and bf16, and prints how far apart they are.
///
/// # Errors
/// If a loss is further from the CPU's than its type allows, or training fails.
pub(crate) fn check(device: &Device) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (rows, seq, supervised) = (2, 320, 200);
    let context = seq + 1;
    SHAPE.config(context).init(&Device::flex()).write_model_dir(dir.path(), WeightDtype::F32)?;
    let mut is_near = true;
    for work in [
        Work::Adapter { exit_layer: 1, loss_chunk: 128 },
        Work::Head { num_layers: 3, accumulation: 2 },
    ] {
        let losses = |device: &Device, dtype| {
            let model = CausalLm::from_model_dir_in(dir.path(), dtype, device)?;
            let timing = Timing { rows, seq, supervised, warm_up: 1, steps: 5, dtype };
            anyhow::Ok(work.time(&model, &timing)?.losses)
        };
        let expected = losses(&Device::flex(), WeightDtype::F32)?;
        for (dtype, tolerance) in
            [(WeightDtype::F32, F32_TOLERANCE), (WeightDtype::Bf16, BF16_TOLERANCE)]
        {
            let found = losses(device, dtype)?;
            let off = found
                .iter()
                .zip(&expected)
                .map(|(found, expected)| ((found - expected) / expected).abs())
                .fold(0.0, f64::max);
            let verdict = if off <= tolerance { "near" } else { "FAR" };
            is_near &= off <= tolerance;
            println!(
                "{} in {}: {verdict}, off by {off:.2e} at most (allowed {tolerance:.0e}): {found:.5?} \
                 for {expected:.5?}",
                work.name(),
                dtype.config_name(),
            );
        }
    }
    if is_near { Ok(()) } else { bail!("the device does not train as the CPU does") }
}
