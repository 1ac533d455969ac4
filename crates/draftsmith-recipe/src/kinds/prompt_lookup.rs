//! The kind `prompt-lookup` (Max-Gram, suffix decoding): takes candidates from earlier text of the same
//! sequence or from stored answers, with an optional bigram table.
//!
//! `build-datastore` stores answers, and `train-bigram` writes the table. Token ids depend on the
//! tokenizer, so each file stores a hash of its tokenizer, and we reject a file for another tokenizer.
//! We also read the tables that CS-Drafting's authors publish: JSON lists with the next token of each
//! token id.

use std::iter::repeat;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, anyhow, bail, ensure};
use draftsmith_decode::{LookUpParts, NamedParts};
use draftsmith_files::{parse_json, read_file};
use draftsmith_model::{read_id_lists, write_id_lists};
use draftsmith_theory::{Bigrams, MaxGramConfig, ModelSummary, Road, SearchedText, SuffixSettings};
use serde::{Deserialize, Serialize};

use super::loaded::{DrafterSize, LoadedDrafter, Loading};
use super::{DrafterKind, DrafterRecipes, KindEntry, Role, read_kind};
use crate::answer_files::{check_tokenizer, metadata};
use crate::recipe::keys::require;
use crate::workspace::Workspace;

/// The lists in the bigram file: ascending token ids, and the most frequent next token of each.
const LISTS: [&str; 2] = ["bigram.token", "bigram.next"];

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry =
    KindEntry { name: "prompt-lookup", read: read_kind::<PromptLookupKind>, export: None };

/// The settings of prompt lookup.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptLookupKind {
    /// The text in which the sequence's last tokens are searched.
    pub searched: SearchedText,
    /// The minimum length of a match, in tokens.
    pub min_match: usize,
    /// The path of a bigram table for further candidates where lookup finds none; no table if
    /// absent.
    pub bigrams: Option<PathBuf>,
    /// How continuations are chosen if stored answers are searched.
    pub suffix: SuffixSettings,
}

impl From<MaxGramConfig> for PromptLookupKind {
    fn from(MaxGramConfig { searched, min_match, suffix }: MaxGramConfig) -> Self {
        Self { searched, min_match, bigrams: None, suffix }
    }
}

impl Default for PromptLookupKind {
    fn default() -> Self {
        MaxGramConfig::default().into()
    }
}

impl PromptLookupKind {
    fn searches_answers(&self) -> bool {
        self.searched == SearchedText::Answers
    }
}

impl DrafterKind for PromptLookupKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn text(&self) -> String {
        match self.searched {
            SearchedText::Answers => "suffix decoding".to_owned(),
            SearchedText::Prompt | SearchedText::Sequence => "prompt lookup (Max-Gram)".to_owned(),
        }
    }

    fn road(&self) -> Road {
        Road::Lookup
    }

    fn check(&self, key: &str, _all: &DrafterRecipes) -> Result<()> {
        let of_match = format!("{key}.min_match");
        require(self.min_match > 0, &of_match, "is 0: a match has at least one token")?;
        let is_own = self.searches_answers() || self.suffix == SuffixSettings::default();
        require(is_own, &format!("{key}.suffix"), "is set without `searched = \"answers\"`")?;
        let is_lost = self.suffix.tree && self.bigrams.is_some();
        require(
            !is_lost,
            &format!("{key}.bigrams"),
            "is set beside `suffix.tree`: bigrams continue chains",
        )?;
        let fault = self.suffix.fault();
        fault.map_or(Ok(()), |(of, fault)| require(false, &format!("{key}.suffix.{of}"), fault))
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let Loading { id, workspace, .. } = *loading;
        let Self { searched, min_match, bigrams, suffix } = self;
        let bigrams = bigrams.as_deref().map(|path| read_bigrams(path, workspace)).transpose()?;
        let config = MaxGramConfig { searched: *searched, min_match: *min_match, suffix: *suffix };
        let answers = if self.searches_answers() { Some(workspace.need_answers()?) } else { None };
        let parts = NamedParts { id, parts: Arc::new(LookUpParts { config, bigrams, answers }) };
        let sizes = vec![DrafterSize { id, num_read: 0, num_own: 0 }];
        Ok(LoadedDrafter { parts, head: None, dir: None, rule_dir: None, sizes })
    }

    fn summaries(
        &self,
        loading: &Loading<'_>,
        _loaded: &LoadedDrafter,
    ) -> Result<Vec<ModelSummary>> {
        let hash = loading.workspace.answers_hash()?.filter(|_| self.searches_answers());
        let of = |hash| {
            let own = loading.plain_summary("earlier answers".to_owned());
            ModelSummary { hash, ..own }
        };
        Ok(hash.map(of).into_iter().collect())
    }

    fn role(&self) -> Role {
        Role::LookUp
    }
}

/// Writes a bigram table for the workspace's tokenizer; `counted` describes the counted texts.
///
/// # Errors
/// If the file cannot be written, or the tokenizer cannot be read.
pub fn write_bigrams(
    path: &Path,
    bigrams: &Bigrams,
    counted: &str,
    workspace: &Workspace,
) -> Result<()> {
    let known = (0..).zip(bigrams.entries()).filter_map(|(token, next)| Some((token, (*next)?)));
    let (tokens, next): (Vec<u32>, Vec<u32>) = known.unzip();
    let lists = [(LISTS[0], &tokens[..]), (LISTS[1], &next)];
    let tokenizer = &workspace.text.identity(&workspace.models)?.tokenizer;
    Ok(write_id_lists(path, &lists, &metadata(counted, tokenizer))?)
}

/// Reads a bigram table for the workspace's tokenizer. A plain list of ids (`.json`) does not
/// name its tokenizer. It must not have more tokens than the target.
///
/// # Errors
/// If the file is missing or invalid, or was built for another tokenizer.
fn read_bigrams(path: &Path, workspace: &Workspace) -> Result<Bigrams> {
    let hint = "hint: count one with `draftsmith train-bigram RECIPE`";
    ensure!(path.is_file(), "there is no table of bigrams `{}`; {hint}", path.display());
    let vocab_size = workspace.models.vocab_size()?;
    if path.extension().is_some_and(|extension| extension == "json") {
        let next: Vec<u32> = parse_json(path, &read_file(path)?)?;
        if next.len() > vocab_size {
            let num = next.len();
            bail!("`{}` has {num} tokens, and the target {vocab_size}; {hint}", path.display());
        }
        // The authors write 0, which is no text, for tokens that nothing follows.
        let known = next.into_iter().map(|id| Some(id).filter(|id| *id != 0));
        return bigrams_of(path, known.chain(repeat(None)).take(vocab_size).collect());
    }
    let tokenizer = &workspace.text.identity(&workspace.models)?.tokenizer;
    check_tokenizer(path, tokenizer, ("bigrams", hint))?;
    let [tokens, next] = read_id_lists(path, LISTS, vocab_size)?;
    ensure!(
        tokens.len() == next.len() && tokens.is_sorted_by(|a, b| a < b),
        "`{}` is invalid: its tokens are not ascending, or do not have one next token each",
        path.display()
    );
    let mut entries = vec![None; vocab_size];
    tokens.iter().zip(next).for_each(|(token, next)| entries[*token as usize] = Some(next));
    bigrams_of(path, entries)
}

fn bigrams_of(path: &Path, entries: Vec<Option<u32>>) -> Result<Bigrams> {
    Bigrams::new(entries).map_err(|id| {
        anyhow!("`{}` has the token {id}, which the target does not have", path.display())
    })
}
