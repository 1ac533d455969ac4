//! The files that define a model's tokenizer and chat template.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use draftsmith_files::{if_present, read_text};

use crate::error::{DataError, Result};

/// The file that holds the tokenizer.
pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";
/// The file that holds special tokens and, in transformers 4, the chat template.
pub(crate) const CONFIG_FILE: &str = "tokenizer_config.json";

/// The files of a checkpoint directory, or the contents that they would have.
#[derive(Debug, Clone)]
pub struct TextFiles {
    place: PathBuf,
    /// The contents of `tokenizer.json` and `tokenizer_config.json`; `None` if they are in a
    /// directory.
    made: Option<Arc<[String; 2]>>,
}

impl<P: AsRef<Path> + ?Sized> From<&P> for TextFiles {
    /// Takes the files of a directory.
    fn from(dir: &P) -> Self {
        Self { place: dir.as_ref().to_path_buf(), made: None }
    }
}

impl TextFiles {
    /// Takes the contents of `tokenizer.json` and `tokenizer_config.json`, made from the file at
    /// `place`.
    pub fn made_from(place: &Path, contents: [String; 2]) -> Self {
        Self { place: place.to_path_buf(), made: Some(contents.into()) }
    }

    /// Returns the directory, or the file from which the contents are made.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Returns the names and contents of the files if they were made from another file; `None` for
    /// a directory.
    pub fn made(&self) -> Option<[(&'static str, &str); 2]> {
        let [tokenizer, config] = self.made.as_deref()?;
        Some([(TOKENIZER_FILE, tokenizer), (CONFIG_FILE, config)])
    }

    /// Returns whether there is a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        self.path(TOKENIZER_FILE).is_file()
    }

    /// Returns the path of a file, or of the file from which its contents are made.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        if self.made.is_some() { self.place.clone() } else { self.place.join(name) }
    }

    pub(crate) fn read(&self, name: &str) -> std::io::Result<String> {
        let Some(made) = self.made() else { return read_text(self.path(name)) };
        let found = made.into_iter().find(|(made, _)| *made == name);
        found.map(|(_, contents)| contents.to_owned()).ok_or_else(|| ErrorKind::NotFound.into())
    }

    /// Reads a file; `None` if it does not exist.
    pub(crate) fn read_if_present(&self, name: &str) -> Result<Option<String>> {
        if_present(self.read(name)).map_err(|e| DataError::io("read", &self.path(name), e))
    }
}
