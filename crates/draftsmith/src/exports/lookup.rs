//! Prompt lookup as a drafter, with its optional table of bigrams.
//!
//! `train-bigram` writes the table. Token ids depend on the tokenizer, so the file names its tokenizer by
//! a hash, and a table of another tokenizer is refused.

use std::path::Path;

use anyhow::{Result, bail};
use draftsmith_decode::DrafterParts;
use draftsmith_model::{read_id_lists, read_metadata, write_id_lists};
use draftsmith_theory::{Bigrams, MaxGramConfig};

use crate::recipe::{EvaluateRecipe, MaxGramRecipe};
use crate::workspace::Workspace;

/// The lists in the file: ascending tokens, and the most frequent next token of each.
const LISTS: [&str; 2] = ["bigram.token", "bigram.next"];
/// Metadata of the file: the hash of its tokenizer, and the counted texts.
const TOKENIZER: &str = "tokenizer";
const COUNTED: &str = "counted";

/// The settings and data of prompt lookup.
#[derive(Debug, Clone)]
pub(crate) struct Lookup {
    config: MaxGramConfig,
    /// Continues rounds where lookup finds nothing.
    bigrams: Option<Bigrams>,
}

impl Lookup {
    /// Prompt lookup with a recipe's settings.
    ///
    /// # Errors
    /// As [`Lookup::read`].
    pub(crate) fn of_recipe(evaluate: &EvaluateRecipe, workspace: &Workspace) -> Result<Self> {
        let keys = evaluate.max_gram.as_ref();
        let config = keys.map(MaxGramRecipe::config).unwrap_or_default();
        Self::read(config, keys.and_then(|keys| keys.bigrams.as_deref()), workspace)
    }

    /// Prompt lookup with these settings, and the table of bigrams in a file if one is given.
    ///
    /// # Errors
    /// If the table cannot be read, or belongs to another tokenizer.
    pub(crate) fn read(
        config: MaxGramConfig,
        bigrams: Option<&Path>,
        workspace: &Workspace,
    ) -> Result<Self> {
        let bigrams = bigrams.map(|path| read_bigrams(path, workspace)).transpose()?;
        Ok(Self { config, bigrams })
    }

    /// The drafter's parts.
    pub(crate) fn parts(&self) -> DrafterParts<'_> {
        DrafterParts::MaxGram { config: self.config, bigrams: self.bigrams.as_ref() }
    }
}

/// Writes a table for the workspace's tokenizer; `counted` describes the counted texts.
///
/// # Errors
/// If the file cannot be written, or the tokenizer cannot be read.
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
/// If the file is missing or invalid, or belongs to another tokenizer.
fn read_bigrams(path: &Path, workspace: &Workspace) -> Result<Bigrams> {
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
            "`{}` is not a table of bigrams: it does not name its tokenizer; {hint}",
            path.display()
        ),
    }
    let vocab_size = workspace.vocab_size()?;
    let [tokens, next] = read_id_lists(path, LISTS, vocab_size)?;
    if tokens.len() != next.len() || !tokens.is_sorted_by(|a, b| a < b) {
        bail!(
            "`{}` is invalid: its tokens are not ascending, or do not have one next token each",
            path.display()
        );
    }
    let mut entries = vec![None; vocab_size];
    tokens.iter().zip(next).for_each(|(token, next)| entries[*token as usize] = Some(next));
    match Bigrams::new(entries) {
        Ok(bigrams) => Ok(bigrams),
        Err(id) => bail!("`{}` has the token {id}, which the target does not have", path.display()),
    }
}
