//! Files of stored answers, which look-ups search, and the check that files of token ids were made with
//! the target's tokenizer.

use std::path::Path;

use anyhow::{Result, anyhow, bail, ensure};
use draftsmith_model::{read_id_lists, read_metadata, write_id_lists};
use draftsmith_theory::StoredAnswers;

/// The lists in a file of stored answers: their tokens, each answer followed by 2³² − 1, and the index.
const LISTS: [&str; 2] = ["answers.token", "answers.order"];
/// The metadata keys of a file of token ids: the tokenizer's hash, and the source of the tokens.
const TOKENIZER: &str = "tokenizer";
const COUNTED: &str = "counted";

/// Writes stored answers for a tokenizer with the hash `tokenizer`; `source` describes where they come
/// from.
///
/// # Errors
/// If the file cannot be written.
pub fn write_answers(
    path: &Path,
    answers: &StoredAnswers,
    source: &str,
    tokenizer: &str,
) -> Result<()> {
    let lists = [(LISTS[0], answers.tokens()), (LISTS[1], answers.order())];
    Ok(write_id_lists(path, &lists, &metadata(source, tokenizer))?)
}

/// Reads stored answers for a tokenizer with the hash `tokenizer` and a vocabulary.
///
/// # Errors
/// If the file is missing or invalid, or was built for another tokenizer.
pub(crate) fn read_answers(
    path: &Path,
    tokenizer: &str,
    vocab_size: usize,
) -> Result<StoredAnswers> {
    const HINT: &str = "hint: build them with `draftsmith build-datastore RECIPE`";
    let shown = path.display();
    ensure!(path.is_file(), "there are no stored answers `{shown}`; {HINT}");
    check_tokenizer(path, tokenizer, ("stored answers", HINT))?;
    let [tokens, order] = read_id_lists(path, LISTS, 1 << 32)?;
    StoredAnswers::from_parts(tokens, order, vocab_size)
        .map_err(|fault| anyhow!("the stored answers `{shown}` are invalid: {fault}; {HINT}"))
}

/// Returns the source of the stored answers in a file; `None` if it cannot be read.
pub fn source_of(path: &Path) -> Option<String> {
    read_metadata(path).ok()?.remove(COUNTED)
}

/// Returns the metadata of a file of token ids.
pub(crate) fn metadata(source: &str, tokenizer: &str) -> [(String, String); 2] {
    [(TOKENIZER, tokenizer), (COUNTED, source)].map(|(key, it)| (key.to_owned(), it.to_owned()))
}

/// Checks that a file of token ids was made with the tokenizer that has the hash `own`.
///
/// # Errors
/// If it was made with another one or is no such file. The message calls its contents `what`.
pub(crate) fn check_tokenizer(path: &Path, own: &str, (what, hint): (&str, &str)) -> Result<()> {
    let shown = path.display();
    match read_metadata(path)?.get(TOKENIZER) {
        Some(hash) if hash == own => Ok(()),
        Some(hash) => bail!(
            "the {what} in `{shown}` were made with the tokenizer {hash}, the target's is {own}; {hint}"
        ),
        None => bail!("`{shown}` has no {what}: it does not name its tokenizer; {hint}"),
    }
}
