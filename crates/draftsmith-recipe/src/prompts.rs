//! Chooses prompts from files that may be larger than memory.
//!
//! This file chooses the prompts for measurements and keeps them in memory. `prompts/for_data.rs`
//! chooses the prompts for `build-data`, and keeps only their positions (`prompts/chosen.rs`).

pub mod chosen;
pub mod for_data;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use draftsmith_data::{DataError, Malformed, Prompt, Prompts};

use self::chosen::{ChosenPlace, ChosenPrompts};
use crate::prompt_files::{Reading, check_files, files_of, note_malformed};
use crate::text_side::TextSide;
use crate::watch::Watch;

/// A checked prompt file. Only the positions of its prompts are kept in memory.
#[derive(Debug)]
pub struct Source {
    name: String,
    /// The prompts of the chosen split.
    prompts: ChosenPrompts,
    malformed: Malformed,
}

/// Reads the prompt files that paths and patterns name.
///
/// # Errors
/// If a file cannot be read or has no prompt in the split, or two files have one name.
pub fn read_sources(paths: &[PathBuf], reading: &Reading) -> Result<Vec<Source>> {
    let files = files_of(paths)?;
    check_files(&files)?;
    files.iter().map(|path| Source::read(path, reading)).collect()
}

impl Source {
    fn read(path: &Path, reading: &Reading) -> Result<Self> {
        let mut prompts = reading.open(path)?;
        let mut places = Vec::new();
        for (index, prompt) in prompts.by_ref().enumerate() {
            let prompt = prompt?;
            if reading.takes(&prompt) {
                places.push(ChosenPlace::of(&prompt, 0, index));
            }
        }
        if places.is_empty()
            && let Some(split) = &reading.split
        {
            bail!("`{}` has no prompt of the split `{}`", path.display(), split.name);
        }
        let Prompts { source: name, malformed, .. } = prompts;
        let (reading, files) = (reading.clone(), vec![path.to_path_buf()]);
        Ok(Self { name, prompts: ChosenPrompts { reading, files, places }, malformed })
    }

    fn path(&self) -> &Path {
        &self.prompts.files[0]
    }

    /// Returns the positions of prompts whose first turn fits the models' context, and notes the
    /// rest.
    fn fitting(&self, text: &TextSide, watch: &dyn Watch) -> Result<Vec<ChosenPlace>> {
        let mut fitting = Vec::new();
        let Self { prompts, .. } = self;
        for (place, prompt) in prompts.places.iter().zip(prompts.each(0..prompts.len())) {
            let prompt = prompt?;
            // What the template refuses is left out later, with its reason.
            let fits = text.refusal(&prompt).is_some()
                || text.encode(&prompt.messages(0, &[]))?.len() < text.context;
            if fits {
                fitting.push(*place);
            }
        }
        let (path, context) = (self.path().display(), text.context);
        let (num_fitting, num_all) = (fitting.len(), prompts.len());
        if num_fitting == 0 {
            bail!("no prompt of `{path}` fits the models' context of {context} tokens");
        }
        if num_fitting < num_all {
            watch.note(format!(
                "`{path}`: {} of {num_all} prompts are left out, because they do not fit the context of \
                 {context} tokens",
                num_all - num_fitting
            ));
        }
        Ok(fitting)
    }
}

/// The criteria for choosing prompts.
#[derive(Debug, Clone, Copy)]
pub struct PromptChoice {
    /// The maximum number of prompts; all if `None`. They are spread evenly over the file, so that
    /// a file sorted by category contributes some of each.
    pub num_prompts: Option<usize>,
    /// Whether to leave out prompts that exceed the models' context; if false, they are an error.
    pub skip_long: bool,
}

/// The prompts chosen from one file.
pub struct Dataset {
    /// The file's name without its extension.
    pub name: String,
    /// The chosen prompts.
    pub prompts: Vec<Prompt>,
}

impl PromptChoice {
    /// Chooses prompts from each file separately. All chosen prompts fit the models' context.
    ///
    /// # Errors
    /// If a prompt does not fit the context, or cannot be encoded.
    pub fn of_each(
        self,
        sources: Vec<Source>,
        text: &TextSide,
        watch: &dyn Watch,
    ) -> Result<Vec<Dataset>> {
        let choose = |source: Source| {
            let prompts = self.of_all(std::slice::from_ref(&source), text, watch)?;
            Ok(Dataset { name: source.name, prompts })
        };
        sources.into_iter().map(choose).collect()
    }

    /// Chooses prompts from all files together. All chosen prompts fit the models' context.
    ///
    /// # Errors
    /// If a prompt does not fit the context, or cannot be encoded.
    pub fn of_all(
        self,
        sources: &[Source],
        text: &TextSide,
        watch: &dyn Watch,
    ) -> Result<Vec<Prompt>> {
        let mut places = Vec::new();
        for source in sources {
            note_malformed(source.path(), &source.malformed, watch);
            let fitting = match self.skip_long {
                true => source.fitting(text, watch)?,
                false => source.prompts.places.clone(),
            };
            places.extend(fitting.into_iter().map(|place| (source, place)));
        }
        let mut prompts = Vec::new();
        let is_same = |(one, _): &(&Source, _), (next, _): &(&Source, _)| std::ptr::eq(*one, *next);
        for of_source in spread(places, self.num_prompts).chunk_by(is_same) {
            let places = of_source.iter().map(|(_, place)| *place).collect();
            let chosen = ChosenPrompts { places, ..of_source[0].0.prompts.clone() };
            let mut num_refused = 0;
            for prompt in chosen.each(0..chosen.len()) {
                let prompt = prompt?;
                if let Some(error) = text.refusal(&prompt) {
                    if chosen.reading.is_strict {
                        return Err(refused(&prompt, error));
                    }
                    if num_refused == 0 {
                        watch.note(format!("{:#}", refused(&prompt, error)));
                    }
                    num_refused += 1;
                    continue;
                }
                text.check_fits(&prompt.id, &text.encode(&prompt.messages(0, &[]))?)?;
                prompts.push(prompt);
            }
            if num_refused > 0 {
                watch.note(format!(
                    "`{}`: {num_refused} of {} prompts are left out, because the chat template refuses them; hint: \
                     `--strict` fails at the first one",
                    of_source[0].0.path().display(),
                    of_source.len()
                ));
            }
        }
        if prompts.is_empty() {
            bail!(
                "the chat template refuses every prompt; hint: choose another with `chat_template`"
            );
        }
        Ok(prompts)
    }
}

/// Builds the error of a prompt that the chat template refuses.
fn refused(prompt: &Prompt, error: DataError) -> anyhow::Error {
    // The number in an id counts records from 0.
    let record = prompt.id.rsplit_once('#').and_then(|(_, number)| number.parse::<usize>().ok());
    let place =
        record.map_or(String::new(), |number| format!(", record {} of its file", number + 1));
    anyhow::Error::from(error).context(format!("prompt `{}`{place}", prompt.id))
}

/// Returns at most `num` elements, spread evenly and including the first; all if `num` is `None`.
pub fn spread<T>(all: Vec<T>, num: Option<usize>) -> Vec<T> {
    let (total, num) = (all.len(), num.unwrap_or(all.len()).min(all.len()));
    let mut wanted = (0..num).map(|i| i * total / num).peekable();
    let chosen = all.into_iter().enumerate().filter(|(i, _)| wanted.next_if_eq(i).is_some());
    chosen.map(|(_, one)| one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_begins_with_the_first() {
        let ten = || (0..10).collect::<Vec<_>>();
        assert_eq!(spread(ten(), Some(3)), [0, 3, 6]);
        assert_eq!(spread(ten(), Some(1)), [0]);
        assert_eq!(spread(ten(), Some(11)), ten());
        assert_eq!(spread(ten(), None), ten());
    }
}
