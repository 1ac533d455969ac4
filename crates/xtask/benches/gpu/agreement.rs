//! Checks that a device decodes and trains like the CPU: compares a small model's hidden states and cached
//! logits number by number, and the losses and gradients of each step. A run on new hardware begins with
//! this.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use draftsmith_model::{CausalLm, NamedTensor, WeightDtype, WeightReader, write_safetensors};

use crate::decoding::logits_in_pieces;
use crate::flops::Shape;
use crate::work::{Step, Timing, Work};

/// Wide enough for tensor cores, with rows longer than one tile of fused attention.
const SHAPE: Shape = Shape { hidden: 128, layers: 3, heads: 2, intermediate: 256, vocab: 512 };
const ROWS: usize = 2;
const SEQ: usize = 320;
const SUPERVISED: usize = 200;
const EXIT_LAYER: usize = 1;
const SEED: u64 = 3;
/// Large enough that later losses depend visibly on earlier steps.
const LEARNING_RATE: f64 = 1e-2;
/// The factor on initial weights. Without it all tokens are equally probable and the layers have no effect.
const WEIGHT_SCALE: f32 = 8.0;
/// Tolerance in f32: sums of hundreds of numbers in another order, or of products that keep 11 bits.
const F32_TOLERANCE: f64 = 1e-3;
/// Tolerance of losses in bf16, which keeps 8 bits. A loss is a mean of hundreds of numbers; the CPU
/// reached 0.003.
const BF16_TOLERANCE: f64 = 0.02;
/// Tolerance of gradient norms in bf16: small numbers after a few steps. The CPU reached 0.013.
const BF16_NORM_TOLERANCE: f64 = 0.04;
/// Tolerance of hidden states in bf16, number by number. Weights this large amplify rounding: torch's bf16
/// differs from its f32 by 2 % after one layer and 4 % after three. A wrong mask or rotation differs by more
/// than half.
const BF16_STATES_TOLERANCE: f64 = 0.08;

/// Runs and trains on the CPU in f32 and on `device` in f32 and bf16, and prints the differences.
///
/// # Errors
/// If hidden states, a loss or a gradient norm differ from the CPU's by more than the tolerance, or training
/// fails.
pub(crate) fn check(device: &Device) -> Result<()> {
    let dir = tempfile::tempdir()?;
    write_model(dir.path())?;
    let mut is_near = true;
    let numbers = |dtype, device: &Device| -> Result<[Vec<f32>; 3]> {
        let (exit, last) = hidden_states(dir.path(), dtype, device)?;
        Ok([exit, last, cached_logits(dir.path(), dtype, device)?])
    };
    let expected = numbers(WeightDtype::F32, &Device::flex())?;
    for (dtype, tolerance) in
        [(WeightDtype::F32, F32_TOLERANCE), (WeightDtype::Bf16, BF16_STATES_TOLERANCE)]
    {
        let found = numbers(dtype, device)?;
        let names = ["exit layer", "last layer", "logits over a cache"];
        for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
            let off = relative_difference(found, expected);
            let verdict = if off <= tolerance { "near" } else { "FAR" };
            is_near &= off <= tolerance;
            let dtype = dtype.config_name();
            println!("{name} in {dtype}: {verdict}, off by {off:.1e} (allowed {tolerance:.0e})");
        }
    }
    let adapter = Work::Adapter { exit_layer: EXIT_LAYER, loss_chunk: 128 };
    let head = Work::Head { num_layers: 3, accumulation: 2 };
    for work in [adapter, head] {
        let steps = |device: &Device, dtype| {
            let model = CausalLm::load(dir.path(), dtype, None, device)?;
            let timing = Timing {
                rows: ROWS,
                seq: SEQ,
                supervised: SUPERVISED,
                warm_up: 1,
                steps: 7,
                dtype,
                learning_rate: LEARNING_RATE,
            };
            anyhow::Ok(work.time(&model, &timing)?.steps)
        };
        let expected = steps(&Device::flex(), WeightDtype::F32)?;
        for (dtype, tolerance, norm_tolerance) in [
            (WeightDtype::F32, F32_TOLERANCE, F32_TOLERANCE),
            (WeightDtype::Bf16, BF16_TOLERANCE, BF16_NORM_TOLERANCE),
        ] {
            let found = steps(device, dtype)?;
            let name = format!("{} in {}", work.name(), dtype.config_name());
            is_near &= compare(&format!("{name}, loss"), &found, &expected, tolerance, |s| s.loss);
            is_near &= compare(
                &format!("{name}, gradient norm"),
                &found,
                &expected,
                norm_tolerance,
                |s| s.gradient_norm,
            );
        }
    }
    if is_near { Ok(()) } else { bail!("the device computes something else than the CPU") }
}

/// The model's logits after made-up tokens, most read at once and the others a few at a time.
fn cached_logits(dir: &Path, dtype: WeightDtype, device: &Device) -> Result<Vec<f32>> {
    let model = CausalLm::load(dir, dtype, None, device)?;
    let ids = (0..SEQ).map(|n| (n * 7919 % SHAPE.vocab) as u32).collect::<Vec<_>>();
    logits_in_pieces(&model, &ids, SUPERVISED, 7)
}

/// The model's hidden states at the exit layer and at the end, over made-up rows.
fn hidden_states(dir: &Path, dtype: WeightDtype, device: &Device) -> Result<(Vec<f32>, Vec<f32>)> {
    let model = CausalLm::load(dir, dtype, None, device)?;
    let ids = (0..ROWS * SEQ).map(|n| (n * 7919 % SHAPE.vocab) as i32).collect::<Vec<_>>();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [ROWS, SEQ]), device);
    let [batch, seq] = ids.dims();
    let wanted = vec![0..seq; batch];
    let (mut exits, last) = model.hidden_states_at(ids, &[EXIT_LAYER], &wanted);
    let values = |hidden: Tensor<3>| -> Result<Vec<f32>> {
        let data = hidden.cast(FloatDType::F32).try_into_data().map_err(|e| anyhow!("{e}"))?;
        data.try_into_vec().map_err(|e| anyhow!("{e:?}"))
    };
    Ok((values(exits.remove(0))?, values(last)?))
}

/// The root mean square of the difference, relative to that of the expected numbers; NaN if any is NaN.
fn relative_difference(found: &[f32], expected: &[f32]) -> f64 {
    let square = |sum: f64, x: f32| sum + f64::from(x) * f64::from(x);
    let difference = found.iter().zip(expected).map(|(a, b)| a - b).fold(0.0, square);
    (difference / expected.iter().copied().fold(0.0, square)).sqrt()
}

/// Compares one number of every step with its tolerance.
fn compare(
    what: &str,
    found: &[Step],
    expected: &[Step],
    tolerance: f64,
    pick: impl Fn(&Step) -> f64,
) -> bool {
    let [found, expected] = [found, expected].map(|s| s.iter().map(&pick).collect::<Vec<f64>>());
    let pairs = found.iter().zip(&expected);
    let off = pairs.map(|(found, expected)| ((found - expected) / expected).abs());
    let off = off.fold(0.0, f64::max);
    let is_near = found.iter().all(|number| number.is_finite()) && off <= tolerance;
    println!(
        "{what}: {}, off by {off:.1e} at most (allowed {tolerance:.0e}): {found:.5?} for \
         {expected:.5?}",
        if is_near { "near" } else { "FAR" },
    );
    is_near
}

/// A checkpoint of random weights, large enough to matter.
fn write_model(dir: &Path) -> Result<()> {
    let device = Device::flex();
    device.seed(SEED);
    SHAPE.config(SEQ + 1).init(&device).write_model_dir(dir, WeightDtype::F32)?;
    let path = dir.join("model.safetensors");
    let mut reader = WeightReader::open_file(&path)?;
    let names: Vec<String> = reader.names().map(str::to_owned).collect();
    let mut tensors = Vec::with_capacity(names.len());
    for name in names {
        let shape = reader.shape(&name).context("the tensor is there")?.to_vec();
        let mut values = reader.take(&name, &shape)?;
        // Norms are unchanged.
        if shape.len() == 2 {
            values.iter_mut().for_each(|value| *value *= WEIGHT_SCALE);
        }
        tensors.push(NamedTensor { name, shape, values });
    }
    write_safetensors(&path, &tensors, WeightDtype::F32, &[])?;
    Ok(())
}
