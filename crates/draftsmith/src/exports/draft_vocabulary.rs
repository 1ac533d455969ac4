//! The tokens that a separate draft may propose if the recipe sets `evaluate.draft_vocabulary`: the most
//! frequent ones in the built responses that training used.
//!
//! They are counted once and stored in `checkpoints/NAME/draft_vocabulary.safetensors`, for `generate` and
//! for machines without the data.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_data::{ResponseRow, hash_bytes};
use draftsmith_model::{DraftVocabulary, read_metadata};
use draftsmith_train::is_held_out;

use crate::built_data::built_data;
use crate::recipe::Recipe;
use crate::workspace::Workspace;

/// Metadata of the file: the requested number of tokens, the counted data, and the share of tokens in
/// held-out responses that the vocabulary covers.
const SIZE: &str = "size";
const DATA: &str = "data";
const COVERAGE: &str = "coverage";

/// The tokens that a separate draft may propose.
#[derive(Debug, Clone)]
pub(crate) struct DraftTokens {
    pub(crate) vocabulary: DraftVocabulary,
    /// The covered share of the tokens in held-out responses; None if the file does not say it.
    pub(crate) coverage: Option<f64>,
}

impl DraftTokens {
    /// The tokens of a recipe that limits them and has a draft. They are counted again if the file in the
    /// recipe's checkpoints belongs to other data.
    ///
    /// # Errors
    /// If there is neither a matching file nor data, or one of them cannot be read.
    pub(crate) fn of_recipe(recipe: &Recipe, workspace: &Workspace) -> Result<Option<Self>> {
        let size = recipe.evaluate.as_ref().and_then(|evaluate| evaluate.draft_vocabulary);
        let (Some(size), Some(_)) = (size, workspace.draft_shape()?) else {
            return Ok(None);
        };
        let path = recipe.checkpoint_dir().join("draft_vocabulary.safetensors");
        let vocab_size = workspace.vocab_size()?;
        let found = if path.is_file() { read_metadata(&path)? } else { BTreeMap::new() };
        let is_of_size = found.get(SIZE) == Some(&size.to_string());
        if is_of_size && !recipe.data_dir().is_dir() {
            return Self::read(&path, vocab_size).map(Some);
        }
        let data = built_data(recipe, workspace, vocab_size).context(
            "key `evaluate.draft_vocabulary` needs the most frequent tokens of responses",
        )?;
        let share = recipe.held_out_share();
        let counted_in = format!("{} without {share}", data.hash);
        if is_of_size && found.get(DATA) == Some(&counted_in) {
            return Self::read(&path, vocab_size).map(Some);
        }
        let counts = |is_wanted: &dyn Fn(&ResponseRow) -> bool| {
            let mut counts = vec![0_u64; vocab_size];
            let rows = data.rows.iter().filter(|row| is_wanted(row));
            rows.flat_map(|row| &row.response_ids).for_each(|id| counts[*id as usize] += 1);
            counts
        };
        let counted = counts(&|row| !is_held_out(row, share));
        if counted.iter().all(|count| *count == 0) {
            bail!(
                "key `evaluate.draft_vocabulary` needs the most frequent tokens of responses, but those \
                 in `{}` have none; hint: build more data, or leave the key out",
                recipe.data_dir().display()
            );
        }
        let always = &workspace.text_side()?.eos_token_ids;
        let vocabulary = DraftVocabulary::most_frequent(&counted, size, always);
        let coverage = vocabulary.coverage(&counts(&|row| is_held_out(row, share)));
        let metadata =
            [(DATA, counted_in), (SIZE, size.to_string()), (COVERAGE, coverage.to_string())];
        vocabulary.write(&path, &metadata.map(|(key, value)| (key.to_owned(), value)))?;
        Ok(Some(Self { vocabulary, coverage: Some(coverage) }))
    }

    /// Reads a file, for models with `vocab_size` tokens.
    ///
    /// # Errors
    /// If it cannot be read, or has a token that the models do not have.
    pub(crate) fn read(path: &Path, vocab_size: usize) -> Result<Self> {
        let vocabulary = DraftVocabulary::read(path, vocab_size)?;
        let coverage = read_metadata(path)?.get(COVERAGE).and_then(|text| text.parse().ok());
        Ok(Self { vocabulary, coverage })
    }

    /// The number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.vocabulary.ids().len()
    }

    /// The hash in provenance of a draft limited to these tokens; `hash` is that of the unlimited draft.
    pub(crate) fn drafter_hash(tokens: Option<&Self>, hash: &str) -> String {
        let Some(tokens) = tokens else { return hash.to_owned() };
        let ids = tokens.vocabulary.ids().iter().flat_map(|id| id.to_le_bytes());
        hash_bytes(&hash.bytes().chain(ids).collect::<Vec<u8>>())
    }
}
