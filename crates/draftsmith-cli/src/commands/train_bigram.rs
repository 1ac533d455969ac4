//! `train-bigram`: finds the most frequent successor of each token. Prompt lookup proposes it where
//! the text has no match (Max-Gram; CS-Drafting, section 3.3).
//!
//! Tokens are counted in text files, or in the built data's prompts and responses that training
//! does not hold out.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use draftsmith_files::{check_place, open_regular};
use draftsmith_theory::BigramCounts;
use serde_json::json;

use crate::commands::StageJob;
use draftsmith_recipe::Watch;
use draftsmith_recipe::kinds::prompt_lookup::write_bigrams;

/// Arguments of `train-bigram`.
#[derive(Debug, Args)]
pub(crate) struct BigramArguments {
    /// Count in these text files, instead of the responses.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(arguments: &BigramArguments, job: StageJob<'_>) -> Result<()> {
    let StageJob { recipe, workspace, console } = job;
    let vocab_size = workspace.models.vocab_size()?;
    let path = recipe.checkpoint_dir().join("bigrams.safetensors");
    check_place(&path)?;
    let mut counts = BigramCounts::default();
    let counted = if arguments.text.is_empty() {
        job.each_known_row(|row| counts.add(&[&row.prompt_ids[..], &row.response_ids].concat()))?
    } else {
        for path in &arguments.text {
            count_text(path, job, &mut counts)?;
        }
        "text".to_owned()
    };
    ensure!(counts.total() != 0, "found no pair of tokens to count");
    let bigrams = counts.most_frequent(vocab_size);
    write_bigrams(&path, &bigrams, &counted, workspace)?;
    let (num_pairs, num_known) = (counts.total(), bigrams.num_known());
    console.text(format!(
        "successors of {num_known} of {vocab_size} tokens, counted in {num_pairs} pairs: {}\n",
        path.display()
    ))?;
    console.document(&json!({ "path": path, "num_pairs": num_pairs, "num_tokens": num_known }))
}

/// Counts the tokens of a text file line by line. Pairs do not span lines.
fn count_text(path: &Path, job: StageJob<'_>, counts: &mut BigramCounts) -> Result<()> {
    let StageJob { workspace, console, .. } = job;
    let tokenizer = workspace.text.tokenizer(&workspace.models)?;
    let named = || format!("cannot read the text `{}`", path.display());
    let mut file = BufReader::new(open_regular(path).with_context(named)?);
    let mut line = String::new();
    while file.read_line(&mut line).with_context(named)? > 0 {
        console.check_interrupted()?;
        counts.add(&tokenizer.encode(&line, false)?);
        line.clear();
    }
    Ok(())
}
