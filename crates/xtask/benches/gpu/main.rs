//! Both trainings at the shapes of real models on a GPU: tokens per second, memory and utilisation; and the
//! times of decoding forwards by number of rows. Models have random weights, made on the device. Steps are
//! those of `train-drafter` and `train-head`, through the same functions.
//!
//! `cargo bench -p xtask --bench gpu --features cuda -- --device cuda`, or `../gpu.sh`, which takes
//! turns with torch (`../peers/gpu.py`). `../README.md` says what is compared and how. With `--device cpu`
//! and small shapes the same code runs anywhere.

mod agreement;
#[path = "../../../draftsmith-cli/src/allocator.rs"]
mod allocator;
mod decoding;
mod flops;
mod work;

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use draftsmith_model::WeightDtype;
use draftsmith_recipe::device::{self, DeviceChoice};
use serde::Serialize;

use self::flops::Shape;
use self::work::{Timing, Work};

/// Times training steps and decoding at the shapes of real models.
#[derive(Debug, Parser)]
struct Arguments {
    /// `cpu`, `cuda`, `cuda:N` or `wgpu`.
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
    /// Work to time [default: all, one after the other].
    #[arg(long)]
    work: Option<WorkName>,
    /// Instead of timing: check that small models on the device, in f32 and bf16, give the CPU's f32 logits,
    /// losses and gradients.
    #[arg(long)]
    check: bool,
    /// Instead of timing: measure the rounding differences between forwards of one row and of several, with
    /// the model in this directory.
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    rounding: Option<std::path::PathBuf>,
    /// Type of the computations, in the frozen model and the trained part.
    #[arg(long, default_value = "bf16", value_parser = device::parse_dtype)]
    dtype: WeightDtype,
    #[command(flatten)]
    shape: Shape,
    /// Layers before the adapter.
    #[arg(long, default_value_t = 2)]
    exit_layer: usize,
    /// Tied residual blocks of the head.
    #[arg(long, default_value_t = 3)]
    head_layers: usize,
    /// Tokens of each row that the frozen model reads; for decoding, the tokens in the cache.
    #[arg(long, default_value_t = 1024)]
    seq: usize,
    /// Tokens of each row with a label or a supervised prediction.
    #[arg(long, default_value_t = 768)]
    supervised: usize,
    /// Rows of a step: one batch for an adapter, `--accumulation` batches for a head.
    #[arg(long, default_value_t = 4)]
    rows: usize,
    /// Unrolled steps of an EAGLE-3 drafter.
    #[arg(long, default_value_t = 5)]
    unrolled: usize,
    /// Batches of a head's step.
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    /// Tokens whose logits are held at once.
    #[arg(long, default_value_t = 1024)]
    loss_chunk: usize,
    /// Untimed first steps, in which kernels are compiled and chosen.
    #[arg(long, default_value_t = 5)]
    warm_up: usize,
    /// Timed steps.
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Peak of the card in 10¹² operations per second; the default is dense bf16 on an H100 SXM.
    #[arg(long, default_value_t = 989.0)]
    peak_tflops: f64,
    /// Print one JSON object a line, for `gpu.sh`.
    #[arg(long)]
    json: bool,
    /// An argument that cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A work as the command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WorkName {
    Adapter,
    Head,
    Eagle3,
    Decode,
}

/// The results of one work; `peers/gpu.py` prints the same for torch.
#[derive(Debug, Serialize)]
struct Figures {
    work: &'static str,
    by: &'static str,
    device: String,
    dtype: &'static str,
    /// The number of tokens that the frozen model reads in a step.
    tokens_per_step: usize,
    flops_per_step: f64,
    /// The mean time of the timed steps in seconds.
    seconds_per_step: f64,
    least_step_seconds: f64,
    most_step_seconds: f64,
    tokens_per_second: f64,
    /// Model FLOPs utilisation: the operations that the step needs over the card's peak.
    mfu: f64,
    first_loss: f64,
    last_loss: f64,
    /// The peak device memory of the allocator; null if it does not report it.
    reserved_bytes: Option<u64>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    // `cargo test --benches` runs benches too, only to see that they start.
    let Some(choice) = arguments.device else {
        eprintln!("gpu: skipped; hint: `--device cuda`, or `--device cpu` with small shapes");
        return Ok(());
    };
    allocator::keep_freed_pages();
    let device = choice.open()?;
    if arguments.check {
        return agreement::check(&device);
    }
    if let Some(dir) = &arguments.rounding {
        return decoding::rounding(dir, arguments.dtype, &device);
    }
    let trains = arguments.work != Some(WorkName::Decode);
    if trains && (arguments.supervised == 0 || arguments.supervised >= arguments.seq) {
        bail!("`--supervised` is {}, expected 1 to `--seq` less 1", arguments.supervised);
    }
    if arguments.rows == 0 || arguments.accumulation == 0 || arguments.steps == 0 {
        bail!("`--rows`, `--accumulation` and `--steps`: expected 1 or more");
    }
    let is_wanted = |name| arguments.work.is_none_or(|wanted| wanted == name);
    let trainings = [
        (WorkName::Adapter, arguments.adapter()),
        (WorkName::Head, arguments.head()),
        (WorkName::Eagle3, arguments.eagle3()),
    ];
    for (_, training) in trainings.into_iter().filter(|(name, _)| is_wanted(*name)) {
        let figures = arguments.figures(training, &device)?;
        if arguments.json {
            println!("{}", serde_json::to_string(&figures)?);
        } else {
            print(&figures);
        }
    }
    if is_wanted(WorkName::Decode) {
        let Arguments { shape, seq, dtype, warm_up, steps, .. } = arguments;
        let model = shape.model(2 * seq, dtype, &device);
        let name = DeviceChoice::name(&device);
        let figures = decoding::time(&model, name, seq, warm_up, steps)?;
        if arguments.json {
            println!("{}", serde_json::to_string(&figures)?);
        } else {
            decoding::print(&figures);
        }
    }
    Ok(())
}

impl Arguments {
    /// The adapter's training, its operations and its tokens in a step.
    fn adapter(&self) -> (Work, f64, usize) {
        let work = Work::Adapter { exit_layer: self.exit_layer, loss_chunk: self.loss_chunk };
        let flops = self.shape.adapter_step(self.rows, self.seq, self.supervised);
        (work, flops, self.rows * self.seq)
    }

    /// The head's training, its operations and its tokens in a step.
    fn head(&self) -> (Work, f64, usize) {
        let Self { seq, supervised, head_layers: num_layers, accumulation, .. } = *self;
        let rows = self.rows * accumulation;
        let flops = self.shape.head_step(rows, seq, supervised, num_layers);
        (Work::Head { num_layers, accumulation }, flops, rows * seq)
    }

    /// The training of an EAGLE-3 drafter, its operations and its tokens in a step.
    fn eagle3(&self) -> (Work, f64, usize) {
        let work = Work::Eagle3 { num_steps: self.unrolled, loss_chunk: self.loss_chunk };
        let flops = self.shape.eagle3_step(self.rows, self.seq, self.supervised, self.unrolled);
        (work, flops, self.rows * self.seq)
    }

    fn figures(
        &self,
        (work, flops_per_step, tokens_per_step): (Work, f64, usize),
        device: &burn::tensor::Device,
    ) -> Result<Figures> {
        let (dtype, seq, supervised) = (self.dtype, self.seq, self.supervised);
        let model = self.shape.model(seq + 1, dtype, device);
        let timing = Timing {
            rows: self.rows,
            seq,
            supervised,
            warm_up: self.warm_up,
            steps: self.steps,
            dtype,
            // The default of both.
            learning_rate: 5e-5,
        };
        let timed = work.time(&model, &timing)?;
        let total: f64 = timed.step_seconds.iter().sum();
        let seconds_per_step = total / timed.step_seconds.len() as f64;
        Ok(Figures {
            work: work.name(),
            by: "draftsmith",
            device: DeviceChoice::name(device),
            dtype: dtype.name(),
            tokens_per_step,
            flops_per_step,
            seconds_per_step,
            least_step_seconds: timed.step_seconds.iter().copied().fold(f64::INFINITY, f64::min),
            most_step_seconds: timed.step_seconds.iter().copied().fold(0.0, f64::max),
            tokens_per_second: tokens_per_step as f64 / seconds_per_step,
            mfu: flops_per_step / seconds_per_step / (self.peak_tflops * 1e12),
            first_loss: timed.steps[0].loss,
            last_loss: timed.steps[timed.steps.len() - 1].loss,
            reserved_bytes: timed.reserved_bytes,
        })
    }
}

fn print(figures: &Figures) {
    let Figures { work, device, dtype, .. } = figures;
    println!("{work} training on {device} in {dtype}");
    println!(
        "  {:.1} tokens/s, {:.1} ms a step ({:.1} to {:.1}), {:.2} TFLOP a step, MFU {:.1} %",
        figures.tokens_per_second,
        1e3 * figures.seconds_per_step,
        1e3 * figures.least_step_seconds,
        1e3 * figures.most_step_seconds,
        figures.flops_per_step / 1e12,
        100.0 * figures.mfu,
    );
    let reserved = figures.reserved_bytes.map_or_else(
        || "memory unknown".to_owned(),
        |bytes| format!("{:.2} GB held", bytes as f64 / 1e9),
    );
    println!("  loss {:.4} to {:.4}, {reserved}", figures.first_loss, figures.last_loss);
}
