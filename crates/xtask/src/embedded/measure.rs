//! Measures how often the models' greedy answers are correct, kind by kind, on prompts outside the training.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Result;
use burn::tensor::Device;
use draftsmith_decode::{Limits, ModelSession, decode_plain};
use draftsmith_model::CausalLm;
use draftsmith_theory::{Decoding, SeededDraws};
use tokenizers::Tokenizer;

use super::corpus::{self, Kind, is_correct};
use super::tokenizer::render;

/// Prints, for each kind, the share of correct answers to `count` prompts.
pub(crate) fn measure(dir: &Path, seed: u64, first: u64, count: u64) -> Result<()> {
    let model = CausalLm::from_model_dir(dir, &Device::flex())?;
    let tokenizer = Tokenizer::from_file(dir.join("tokenizer.json"))
        .map_err(|e| anyhow::anyhow!(e.to_string()))?;
    let limits = Limits::new(112, vec![1]);
    let mut draws = SeededDraws::new(0, &["greedy decoding draws nothing"]);
    let mut session = ModelSession::new(&model, 256, "model");
    let mut tally = vec![(0, 0); Kind::ALL.len()];
    for index in first..first + count {
        let example = corpus::example(seed, index);
        let encoded = tokenizer
            .encode(render(&example).0, false)
            .map_err(|e| anyhow::anyhow!(e.to_string()))?;
        let generation = decode_plain(
            &mut session,
            &Decoding::GREEDY,
            encoded.get_ids(),
            &limits,
            &mut draws,
            &mut |_| ControlFlow::Continue(()),
        )?;
        let text = tokenizer
            .decode(&generation.token_ids, true)
            .map_err(|e| anyhow::anyhow!(e.to_string()))?;
        let (right, all) =
            &mut tally[Kind::ALL.iter().position(|kind| *kind == example.kind).unwrap_or(0)];
        *right += usize::from(is_correct(example.kind, &example.answer, &text));
        *all += 1;
    }
    for (kind, (right, all)) in Kind::ALL.iter().zip(tally) {
        println!(
            "{:8} {right:4} of {all:4} right, {:.1} %",
            kind.name(),
            100.0 * right as f64 / all as f64
        );
    }
    Ok(())
}
