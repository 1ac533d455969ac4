//! A table of bigrams in a file: `train-bigram` writes it, prompt lookup fills up its rounds with it.
//!
//! Ids mean something with their tokenizer alone, so the file names it by its hash, and a table of
//! another one is refused.

use std::path::Path;

use anyhow::{Result, bail};
use draftsmith_model::{read_id_lists, read_metadata, write_id_lists};
use draftsmith_theory::Bigrams;

use crate::workspace::Workspace;

/// The file's lists: tokens, rising, and what most often follows each.
const LISTS: [&str; 2] = ["bigram.token", "bigram.next"];
/// What the file says of itself: the hash of its tokenizer, and what was counted.
const TOKENIZER: &str = "tokenizer";
const COUNTED: &str = "counted";

/// Writes a table for the workspace's tokenizer, `counted` in some texts.
///
/// # Errors
/// If the file cannot be written, or the tokenizer not be read.
pub(crate) fn write_bigrams(
    path: &Path,
    bigrams: &Bigrams,
    counted: &str,
    workspace: &Workspace,
) -> Result<()> {
    let known = (0..).zip(bigrams.entries()).filter_map(|(token, next)| Some((token, (*next)?)));
    let (tokens, next): (Vec<u32>, Vec<u32>) = known.unzip();
    let metadata = [(TOKENIZER, workspace.text_identity()?.tokenizer.as_str()), (COUNTED, counted)];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Ok(write_id_lists(path, &[(LISTS[0], &tokens), (LISTS[1], &next)], &metadata)?)
}

/// Reads a table for the workspace's tokenizer.
///
/// # Errors
/// If it is missing or broken, or of another tokenizer.
pub(crate) fn read_bigrams(path: &Path, workspace: &Workspace) -> Result<Bigrams> {
    let hint = "hint: count one with `draftsmith train-bigram RECIPE`";
    if !path.is_file() {
        bail!("there is no table of bigrams `{}`; {hint}", path.display());
    }
    let metadata = read_metadata(path)?;
    let own = &workspace.text_identity()?.tokenizer;
    match metadata.get(TOKENIZER) {
        Some(hash) if hash == own => {}
        Some(hash) => bail!(
            "the bigrams in `{}` were counted with the tokenizer {hash}, the target's is {own}; {hint}",
            path.display()
        ),
        None => bail!(
            "`{}` does not name its tokenizer: it is no table of bigrams; {hint}",
            path.display()
        ),
    }
    let vocab_size = workspace.vocab_size()?;
    let [tokens, next] = read_id_lists(path, LISTS, vocab_size)?;
    if tokens.len() != next.len() || !tokens.is_sorted_by(|a, b| a < b) {
        bail!("`{}` has no rising tokens with one that follows each: it is broken", path.display());
    }
    let mut entries = vec![None; vocab_size];
    tokens.iter().zip(next).for_each(|(token, next)| entries[*token as usize] = Some(next));
    match Bigrams::new(entries) {
        Ok(bigrams) => Ok(bigrams),
        Err(id) => bail!("`{}` has the token {id}, which the target has not", path.display()),
    }
}
