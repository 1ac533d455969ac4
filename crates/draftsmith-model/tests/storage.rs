//! The memory that loading a frozen model takes, packed in each storage format and as bf16 tensors,
//! and what packed models compute.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Device;
use draftsmith_model::{CausalLm, ModelConfig, ModelShape, Rows, WeightDtype, vectors};

/// The system's allocator, with a count of the bytes held and of their maximum.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static NUM_HELD: AtomicUsize = AtomicUsize::new(0);
static MOST_HELD: AtomicUsize = AtomicUsize::new(0);

fn held(num_bytes: usize) {
    let now = NUM_HELD.fetch_add(num_bytes, Ordering::Relaxed) + num_bytes;
    MOST_HELD.fetch_max(now, Ordering::Relaxed);
}

#[expect(unsafe_code, reason = "an allocator's interface is unsafe")]
// SAFETY: every call is passed on unchanged; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        held(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        NUM_HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(old, layout) }
    }
}

/// The most bytes held while `load` runs, beyond those held before, and its result.
fn peak<R>(load: impl FnOnce() -> R) -> (usize, R) {
    let before = NUM_HELD.load(Ordering::Relaxed);
    MOST_HELD.store(before, Ordering::Relaxed);
    let loaded = load();
    (MOST_HELD.load(Ordering::Relaxed) - before, loaded)
}

/// A bf16 checkpoint of 15 million weights, 31 MB.
fn write_checkpoint(dir: &Path, is_tied: bool, device: &Device) -> u64 {
    let shape = ModelShape {
        vocab_size: 8192,
        hidden_size: 384,
        num_layers: 6,
        num_heads: 6,
        num_kv_heads: 2,
        head_dim: 64,
        context: 512,
        bos_token_id: None,
        eos_token_ids: vec![0],
    };
    let config = ModelConfig::llama(shape, 1408).with_tied_embeddings(is_tied);
    config.init(device).write_model_dir(dir, WeightDtype::Bf16).expect("written");
    std::fs::metadata(dir.join("model.safetensors")).expect("written").len()
}

/// The logits of a prompt that is read in `pieces`.
fn logits(model: &CausalLm, pieces: &[usize]) -> Vec<f32> {
    let num_tokens = pieces.iter().sum();
    let mut cache = model.new_cache(num_tokens, 1);
    let layers = 0..model.shape().num_layers;
    let (mut read, mut all) = (0, Vec::new());
    for num_rows in pieces {
        let ids: Vec<u32> = (read..read + num_rows).map(|i| i as u32 * 37 % 8192).collect();
        let hidden = model.forward_layers(layers.clone(), model.embed_ids(&ids), &mut cache);
        let [values] = Rows::to_host([model.logits(&model.normed(hidden))]).expect("brought");
        all.extend(values);
        read += num_rows;
    }
    all
}

/// A model that allows 67 million tokens but reads a few needs little memory beside its weights.
fn a_limit_allocates_nothing(device: &Device) {
    let shape = ModelShape {
        vocab_size: 64,
        hidden_size: 32,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 8,
        context: 1 << 26,
        bos_token_id: None,
        eos_token_ids: vec![0],
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = ModelConfig::llama(shape.clone(), 48);
    config.init(device).write_model_dir(dir.path(), WeightDtype::F32).expect("written");
    for device in [device.clone(), device.clone().autodiff()] {
        let (peak, ()) = peak(|| {
            let model = CausalLm::from_model_dir(dir.path(), &device).expect("loads");
            let mut cache = model.new_cache(shape.context, 1);
            let hidden = model.embed_ids(&[1, 2, 3]);
            let hidden = model.forward_layers(0..shape.num_layers, hidden, &mut cache);
            Rows::to_host([model.logits(&model.normed(hidden))]).expect("brought");
        });
        assert!(peak < 4 << 20, "{peak} bytes");
    }
}

/// A single test, because the allocator counts all threads together.
#[test]
fn a_model_is_held_once_and_computes_the_same_bits_in_every_exact_format() {
    let device = Device::flex();
    if !vectors::reach(&device) {
        return;
    }
    a_limit_allocates_nothing(&device);
    for is_tied in [true, false] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = write_checkpoint(dir.path(), is_tied, &device) as f64;
        let load = |dir| peak(|| CausalLm::from_model_dir(dir, &device).expect("loads"));
        let (peak_as_stored, as_stored) = load(dir.path());
        // The same numbers in a file of f32.
        let wide = tempfile::tempdir().expect("a temporary directory");
        as_stored.write_model_dir(wide.path(), WeightDtype::F32).expect("written");
        let (peak_in_f32, in_f32) = load(wide.path());
        // Rotary tables and read buffers come on top.
        let ratio = |peak: usize| peak as f64 / file;
        assert!(ratio(peak_as_stored) < 1.15, "{} times its file", ratio(peak_as_stored));
        assert!(ratio(peak_in_f32) < 2.15, "{} times its bf16 file in f32", ratio(peak_in_f32));
        // As on a GPU, with host memory in its place: a tied LM head is copied, and one tensor at a
        // time is in f32 while it is read.
        let dtype = WeightDtype::Bf16;
        let in_bf16 = || CausalLm::load(dir.path(), dtype, None, &device);
        let (peak_in_bf16, _in_bf16) = peak(|| in_bf16().expect("loads"));
        let most = if is_tied { 1.4 } else { 1.2 };
        assert!(ratio(peak_in_bf16) < most, "{} times its file as tensors", ratio(peak_in_bf16));
        // A prompt in blocks for several threads, a verification, and single tokens.
        let expected = logits(&in_f32, &[100, 1, 5, 1, 150]);
        assert!(logits(&as_stored, &[100, 1, 5, 1, 150]) == expected, "the same bits");
        assert!(logits(&as_stored, &[257]) == expected, "in one piece");
        assert!(logits(&in_f32, &[1, 255, 1]) == expected, "in other pieces");
    }
}
