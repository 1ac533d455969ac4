//! Choosing prompts. A prompt file may be larger than memory.
//!
//! This file chooses the prompts that commands measure with, and keeps them in memory.
//! `prompts/for_data.rs` chooses those that data is built from, and keeps only their positions
//! (`prompts/chosen.rs`).

pub(crate) mod chosen;
pub(crate) mod for_data;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use draftsmith_data::{Malformed, Prompt};

use crate::console::Console;
use crate::prompt_files::{Reading, check_files, files_of, tell_malformed};
use crate::text_side::TextSide;

/// A prompt file that was read once from end to end, so that it can be used. Its prompts are not kept:
/// those that are chosen are read again.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    name: String,
    reading: Reading,
    /// The places of the prompts of its split among all of the file's.
    places: Vec<usize>,
    malformed: Malformed,
}

/// Reads the prompt files that paths and patterns name.
///
/// # Errors
/// If one cannot be read, holds no prompt of the split, or two would give the same row ids.
pub(crate) fn read_sources(paths: &[PathBuf], reading: &Reading) -> Result<Vec<Source>> {
    let files = files_of(paths)?;
    check_files(&files)?;
    files.iter().map(|path| Source::read(path, reading)).collect()
}

impl Source {
    fn read(path: &Path, reading: &Reading) -> Result<Self> {
        let mut prompts = reading.open(path)?;
        let mut places = Vec::new();
        for (place, prompt) in prompts.by_ref().enumerate() {
            if reading.takes(&prompt?) {
                places.push(place);
            }
        }
        if places.is_empty()
            && let Some(split) = &reading.split
        {
            bail!("`{}` has no prompt of the split `{}`", path.display(), split.name);
        }
        let name = prompts.source().to_owned();
        let malformed = prompts.into_malformed();
        Ok(Self { path: path.to_path_buf(), name, reading: reading.clone(), places, malformed })
    }

    /// The places of the prompts that fit the models' context; how many do not is noted.
    fn fitting(&self, text: &TextSide, console: &Console) -> Result<Vec<usize>> {
        let mut places = Vec::new();
        for (place, prompt) in self.reading.open(&self.path)?.enumerate() {
            let prompt = prompt?;
            if self.reading.takes(&prompt) && fits(&prompt, text)? {
                places.push(place);
            }
        }
        note_left_out(&self.path, places.len(), self.places.len(), text, console)?;
        Ok(places)
    }
}

/// Whether a prompt's first turn leaves room for a token.
fn fits(prompt: &Prompt, text: &TextSide) -> Result<bool> {
    Ok(text.encode(&prompt.messages(0, &[]))?.len() < text.context)
}

/// Notes how many of the prompts that were looked at do not fit.
///
/// # Errors
/// If none does.
fn note_left_out(
    path: &Path,
    num_fitting: usize,
    num_seen: usize,
    text: &TextSide,
    console: &Console,
) -> Result<()> {
    let (path, context) = (path.display(), text.context);
    if num_fitting == 0 {
        bail!("no prompt of `{path}` fits the models' context of {context} tokens");
    }
    if num_fitting < num_seen {
        console.note(format!(
            "`{path}`: {} of {num_seen} prompts left out, they do not fit the context of {context} \
             tokens",
            num_seen - num_fitting
        ));
    }
    Ok(())
}

/// Which prompts are used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptChoice {
    /// At most so many, spread evenly, so that a file sorted by category gives all of them; all if
    /// absent.
    pub(crate) num_prompts: Option<usize>,
    /// Whether those that do not fit the models' context are left out; an error if not.
    pub(crate) skip_long: bool,
}

/// A prompt file's prompts.
pub(crate) struct Dataset {
    pub(crate) name: String,
    pub(crate) prompts: Vec<Prompt>,
}

impl PromptChoice {
    /// The prompts that are chosen of each file, all of which fit.
    ///
    /// # Errors
    /// If one does not fit the models' context, or cannot be encoded.
    pub(crate) fn of_each(
        self,
        sources: Vec<Source>,
        text: &TextSide,
        console: &Console,
    ) -> Result<Vec<Dataset>> {
        let choose = |source: Source| {
            let prompts = self.of_all(std::slice::from_ref(&source), text, console)?;
            Ok(Dataset { name: source.name, prompts })
        };
        sources.into_iter().map(choose).collect()
    }

    /// The prompts that are chosen of all files together, all of which fit.
    ///
    /// # Errors
    /// If one does not fit the models' context, or cannot be encoded.
    pub(crate) fn of_all(
        self,
        sources: &[Source],
        text: &TextSide,
        console: &Console,
    ) -> Result<Vec<Prompt>> {
        let mut places = Vec::new();
        for (index, source) in sources.iter().enumerate() {
            tell_malformed(&source.path, &source.malformed, console);
            let of_source = match self.skip_long {
                true => source.fitting(text, console)?,
                false => source.places.clone(),
            };
            places.extend(of_source.into_iter().map(|place| (index, place)));
        }
        let chosen = spread(places, self.num_prompts);
        let mut prompts = Vec::with_capacity(chosen.len());
        for of_source in chosen.chunk_by(|one, next| one.0 == next.0) {
            let source = &sources[of_source[0].0];
            let mut file = source.reading.open_at_places(&source.path)?;
            for (_, place) in of_source {
                prompts.push(file.at(*place)?);
            }
        }
        for prompt in &prompts {
            text.check_fits(&prompt.id, &text.encode(&prompt.messages(0, &[]))?)?;
        }
        Ok(prompts)
    }
}

/// At most so many, spread evenly from the first on; all if absent.
pub(crate) fn spread<T>(all: Vec<T>, num: Option<usize>) -> Vec<T> {
    let (total, num) = (all.len(), num.unwrap_or(all.len()).min(all.len()));
    let mut wanted = (0..num).map(|i| i * total / num).peekable();
    let chosen = all.into_iter().enumerate().filter(|(i, _)| wanted.next_if_eq(i).is_some());
    chosen.map(|(_, one)| one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_spread_from_the_first_on() {
        let ten = || (0..10).collect::<Vec<_>>();
        assert_eq!(spread(ten(), Some(3)), [0, 3, 6]);
        assert_eq!(spread(ten(), Some(1)), [0]);
        assert_eq!(spread(ten(), Some(11)), ten());
        assert_eq!(spread(ten(), None), ten());
    }
}
