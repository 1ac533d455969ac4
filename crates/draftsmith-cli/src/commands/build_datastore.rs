//! `build-datastore`: indexes earlier answers, which look-ups search for the tokens that followed most
//! often (suffix decoding).
//!
//! The answers are those of prompt files, or the built data's that training does not hold out.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::Args;
use draftsmith_files::check_place;
use draftsmith_recipe::Watch;
use draftsmith_recipe::answer_files::{source_of, write_answers};
use draftsmith_recipe::prompt_files::{Reading, files_of, note_malformed};
use draftsmith_theory::StoredAnswers;
use serde_json::json;

use crate::commands::StageJob;

/// Arguments of `build-datastore`.
#[derive(Debug, Args)]
pub(crate) struct DatastoreArguments {
    /// Index the answers in these prompt files, instead of those of the built data.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    from: Vec<PathBuf>,
}

/// Runs the command. Writes the recipe's `answers`, or `data/NAME/answers.safetensors`.
pub(crate) fn run(arguments: &DatastoreArguments, job: StageJob<'_>) -> Result<()> {
    let (answers, source) = match &arguments.from[..] {
        [] => built_answers(job)?,
        from => {
            let files = job.workspace.artifacts.prompt_files(from)?;
            (answers_in(from, job)?, json!(files).to_string())
        }
    };
    store(&answers, &source, job)
}

/// Indexes the built data's answers if the recipe names an index that is missing or of other data. An
/// index of prompt files stays.
pub(crate) fn run_once(job: StageJob<'_>) -> Result<()> {
    let Some(path) = &job.recipe.answers else { return Ok(()) };
    let kept = source_of(path);
    if kept.as_ref().is_some_and(|source| source.starts_with('[')) {
        return Ok(());
    }
    let (answers, source) = built_answers(job)?;
    if kept.as_ref() == Some(&source) { Ok(()) } else { store(&answers, &source, job) }
}

/// Indexes answers, and writes them with their source.
fn store(answers: &[Vec<u32>], source: &str, job: StageJob<'_>) -> Result<()> {
    let StageJob { recipe, workspace, console } = job;
    let path = recipe.answers.clone();
    let path = path.unwrap_or_else(|| recipe.data_dir().join("answers.safetensors"));
    let num_tokens: usize = answers.iter().map(Vec::len).sum();
    ensure!(num_tokens > 0, "found no answers to store");
    let most = StoredAnswers::MOST_TOKENS;
    ensure!(num_tokens <= most, "{num_tokens} tokens do not fit an index, which holds {most}");
    check_place(&path)?;
    let bar = console.bar("build-datastore", "tokens", num_tokens as u64);
    let stored = StoredAnswers::build(answers.iter().map(|ids| &ids[..]), |num_sorted| {
        bar.advance(num_sorted as f64 - bar.position() as f64);
        console.check_interrupted()
    })?;
    let tokenizer = &workspace.text.identity(&workspace.models)?.tokenizer;
    write_answers(&path, &stored, source, tokenizer)?;
    let (num_answers, num_tokens) = (stored.num_answers(), stored.num_tokens());
    console.text(format!("{num_answers} answers of {num_tokens} tokens: {}\n", path.display()))?;
    console.document(&json!({ "path": path, "num_answers": num_answers, "num_tokens": num_tokens }))
}

/// Returns the answers of the built data that training does not hold out, and describes them.
fn built_answers(job: StageJob<'_>) -> Result<(Vec<Vec<u32>>, String)> {
    let mut answers = Vec::new();
    let source = job.each_known_row(|row| answers.push(row.response_ids.clone()))?;
    Ok((answers, source))
}

/// Reads the answers in prompt files as tokens. An answer given as text ends with an end token.
fn answers_in(paths: &[PathBuf], job: StageJob<'_>) -> Result<Vec<Vec<u32>>> {
    let StageJob { recipe, workspace, console } = job;
    let (text, vocab_size) = (workspace.text_side()?, workspace.models.vocab_size()?);
    let reading = Reading { split: None, is_strict: recipe.is_strict, keeps_tokens: true };
    let mut answers = Vec::new();
    for path in files_of(paths)? {
        let mut prompts = reading.open(&path)?;
        for prompt in &mut prompts {
            console.check_interrupted()?;
            for turn in prompt?.turns {
                match (turn.tokens, turn.response) {
                    (Some(given), _) => {
                        let mut ids = given.response_ids;
                        let unknown = ids.iter().find(|id| **id as usize >= vocab_size);
                        if let Some(id) = unknown {
                            bail!(
                                "`{}` has an answer with the token {id}, which the target does not have",
                                path.display()
                            );
                        }
                        if let Some((len, _)) = text.end_of(&ids, 0, true) {
                            ids.truncate(len);
                        }
                        answers.push(ids);
                    }
                    (None, Some(response)) => {
                        let mut ids = text.tokenizer.encode(&response, false)?;
                        match text.end_of(&ids, 0, false) {
                            Some((len, _)) => ids.truncate(len),
                            None => ids.extend(text.eos_token_ids.first()),
                        }
                        answers.push(ids);
                    }
                    (None, None) => {}
                }
            }
        }
        note_malformed(&path, &prompts.malformed, console);
    }
    Ok(answers)
}
