//! Decoding on a device: compares a forward of several rows with forwards of one row, whose rounding
//! differs, and times forwards by number of rows.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_data::TextTokenizer;
use draftsmith_model::{CausalLm, KvCache, Rows, WeightDtype};
use draftsmith_theory::{Rounding, argmax};
use serde::Serialize;

/// A text in every checkout, for the user's model to read.
const TEXT: &str = include_str!("../README.md");
/// The number of its tokens that are read, and the number before the first compared one.
const NUM_TOKENS: usize = 240;
const NUM_BEFORE: usize = 100;
/// The numbers of rows that are compared with one.
const ROWS: [usize; 4] = [2, 5, 9, NUM_TOKENS - NUM_BEFORE];
/// The numbers of rows that are timed: a draft step, and verifications of 1 to 11 candidates.
const TIMED_ROWS: [usize; 6] = [1, 2, 4, 6, 8, 12];

/// A model with a cache for one sequence.
struct Reader<'m> {
    model: &'m CausalLm,
    cache: KvCache,
}

impl<'m> Reader<'m> {
    fn new(model: &'m CausalLm, capacity: usize) -> Self {
        Self { model, cache: model.new_cache(capacity, 1) }
    }

    /// Reads the next tokens and waits for their logits.
    fn read(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let layers = 0..self.model.shape().num_layers;
        let hidden = self.model.embed_ids(ids);
        let hidden = self.model.forward_layers(layers, hidden, &mut self.cache);
        let [logits] = Rows::to_host([self.model.logits(&self.model.normed(hidden))])?;
        Ok(logits)
    }
}

/// The logits after each token from `start` on, read `num_rows` at a time.
///
/// # Errors
/// If the device fails.
pub(crate) fn logits_in_pieces(
    model: &CausalLm,
    ids: &[u32],
    start: usize,
    num_rows: usize,
) -> Result<Vec<f32>> {
    let mut reader = Reader::new(model, ids.len());
    reader.read(&ids[..start])?;
    let mut logits = Vec::new();
    for piece in ids[start..].chunks(num_rows) {
        logits.extend(reader.read(piece)?);
    }
    Ok(logits)
}

/// Reads a text with the model in `dir`, one token at a time and several at once, and prints by how much the
/// logits differ. The tolerance of `Rounding` must cover it.
///
/// # Errors
/// If it does not, if the model cannot be read, or if the device fails.
pub(crate) fn rounding(dir: &Path, dtype: WeightDtype, device: &Device) -> Result<()> {
    let mut ids = TextTokenizer::from_model_dir(dir)?.encode(TEXT, true)?;
    ids.truncate(NUM_TOKENS);
    let model = CausalLm::load(dir, dtype, None, device)?;
    let rounding = match dtype {
        WeightDtype::F32 => Rounding::F32,
        WeightDtype::Bf16 | WeightDtype::F16 => Rounding::Bf16,
    };
    let vocab_size = model.shape().vocab_size;
    let expected = logits_in_pieces(&model, &ids, NUM_BEFORE, 1)?;
    let mut most = 0.0_f32;
    for num_rows in ROWS {
        let found = logits_in_pieces(&model, &ids, NUM_BEFORE, num_rows)?;
        let places = expected.chunks_exact(vocab_size).zip(found.chunks_exact(vocab_size));
        let (mut moved, mut gap_moved, mut changed) = (0.0_f32, 0.0_f32, Vec::new());
        for (expected, found) in places {
            let best = argmax(expected) as usize;
            let allowed = rounding.allowance(expected[best]);
            let second = (0..vocab_size).filter(|token| *token != best);
            let second = second.max_by(|a, b| expected[*a].total_cmp(&expected[*b]));
            let second = second.expect("a vocabulary of two tokens and more");
            let gap = |logits: &[f32]| logits[best] - logits[second];
            moved = moved.max((expected[best] - found[best]).abs() / allowed);
            gap_moved = gap_moved.max((gap(expected) - gap(found)).abs() / allowed);
            let chosen = argmax(found) as usize;
            if chosen != best {
                changed.push((expected[best] - expected[chosen]) / allowed);
            }
        }
        println!(
            "{num_rows} rows for one in {}, in shares of what is forgiven: the best logit moved by up \
             to {moved:.2}, the gap of the two best by {gap_moved:.2}; {} of {} choices changed, at \
             gaps of {changed:.2?}",
            dtype.name(),
            changed.len(),
            ids.len() - NUM_BEFORE
        );
        most = changed.into_iter().fold(most, f32::max).max(gap_moved);
    }
    if most <= 1.0 { Ok(()) } else { bail!("rounding moves choices by more than the tolerance") }
}

/// The times of decoding, one line of JSON.
#[derive(Debug, Serialize)]
pub(crate) struct DecodeFigures {
    work: &'static str,
    by: &'static str,
    device: String,
    dtype: &'static str,
    /// The number of tokens in the cache.
    num_cached: usize,
    prefill_seconds: f64,
    tokens_per_second: f64,
    /// The number of rows of a forward, and its median time in seconds.
    forwards: Vec<(usize, f64)>,
    /// The peak device memory of the allocator; null if it does not report it.
    reserved_bytes: Option<u64>,
}

/// Times forwards after `num_cached` tokens: `warm_up` of each kind, then the median of `steps`.
///
/// # Errors
/// If the device fails.
pub(crate) fn time(
    model: &CausalLm,
    device_name: String,
    num_cached: usize,
    warm_up: usize,
    steps: usize,
) -> Result<DecodeFigures> {
    let (vocab_size, device) = (model.shape().vocab_size, model.device());
    let ids = |num: usize| (0..num).map(|n| (n * 7919 % vocab_size) as u32).collect::<Vec<_>>();
    let longest = TIMED_ROWS.into_iter().max().unwrap_or(1);
    let mut reader = Reader::new(model, num_cached + longest);
    let mut seconds = |num_rows: usize, num_before: usize, num_times: usize| -> Result<f64> {
        let mut all = Vec::with_capacity(num_times);
        for _ in 0..num_times {
            reader.cache.truncate(0, num_before);
            let begun = Instant::now();
            reader.read(&ids(num_rows))?;
            all.push(begun.elapsed().as_secs_f64());
        }
        all.sort_by(f64::total_cmp);
        Ok(all[num_times / 2])
    };
    let prefill_seconds = {
        seconds(num_cached, 0, 1)?;
        seconds(num_cached, 0, 3)?
    };
    let mut forwards = Vec::new();
    for num_rows in TIMED_ROWS {
        seconds(num_rows, num_cached, warm_up.max(1))?;
        forwards.push((num_rows, seconds(num_rows, num_cached, steps)?));
    }
    Ok(DecodeFigures {
        work: "decode",
        by: "draftsmith",
        device: device_name,
        dtype: model.dtype().name(),
        num_cached,
        prefill_seconds,
        tokens_per_second: 1.0 / forwards[0].1,
        forwards,
        reserved_bytes: device.memory_pool_usage().map(|usage| usage.bytes_reserved),
    })
}

/// The times as text.
pub(crate) fn print(figures: &DecodeFigures) {
    let DecodeFigures { device, dtype, num_cached, prefill_seconds, .. } = figures;
    println!("decoding on {device} in {dtype}, after {num_cached} tokens");
    println!(
        "  {:.1} tokens/s; prefill {:.0} tokens/s",
        figures.tokens_per_second,
        *num_cached as f64 / prefill_seconds
    );
    for (num_rows, seconds) in &figures.forwards {
        println!("  {num_rows} rows {:.2} ms", 1e3 * seconds);
    }
}
