//! Chooses prompts from files that may be larger than memory.
//!
//! This file chooses the prompts for measurements and keeps them in memory. `prompts/for_data.rs`
//! chooses the prompts for `build-data`, and keeps only their positions (`prompts/chosen.rs`).

pub mod chosen;
pub mod for_data;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
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
    /// Counts its prompts, at most `limit`, and the turns in them.
    pub fn num_turns(&self, limit: Option<usize>) -> (usize, usize) {
        let num = limit.map_or(self.prompts.len(), |limit| limit.min(self.prompts.len()));
        (num, self.prompts.num_turns(0..num))
    }

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
        sources.iter().for_each(|it| note_malformed(it.path(), &it.malformed, watch));
        let places = |(number, source): (usize, &Source)| {
            let places = source.prompts.places.clone().into_iter();
            places.map(|place| (number, place)).collect::<Vec<_>>()
        };
        let places: Vec<_> = sources.iter().enumerate().flat_map(places).collect();
        let num_slots = self.num_prompts.unwrap_or(places.len()).min(places.len());
        let first_of = |slot: usize| slot * places.len() / num_slots;
        let mut choosing = Choosing::new((text, self.skip_long), sources);
        choosing.try_each((0..num_slots).map(|slot| (slot, places[first_of(slot)])))?;
        let empty = (0..num_slots).filter(|slot| !choosing.chosen.contains_key(slot));
        let others = |slot| (first_of(slot) + 1..first_of(slot + 1)).map(move |at| (slot, at));
        let others: Vec<_> = empty.flat_map(others).map(|(slot, at)| (slot, places[at])).collect();
        choosing.try_each(others)?;
        choosing.finish(watch)
    }
}

/// Prompts being chosen, at most one for each slot. Slots divide the prompts evenly, and the first
/// usable prompt of a slot is chosen, so only as many prompts are encoded as needed.
struct Choosing<'a> {
    text: &'a TextSide,
    skip_long: bool,
    sources: &'a [Source],
    chosen: BTreeMap<usize, Prompt>,
    left_out: Vec<LeftOut>,
}

/// The prompts of one source that were looked at, and those that were not chosen.
#[derive(Debug, Default)]
struct LeftOut {
    num_seen: usize,
    num_long: usize,
    num_refused: usize,
    first_refused: Option<String>,
}

impl<'a> Choosing<'a> {
    fn new((text, skip_long): (&'a TextSide, bool), sources: &'a [Source]) -> Self {
        let left_out = sources.iter().map(|_| LeftOut::default()).collect();
        Self { text, skip_long, sources, chosen: BTreeMap::new(), left_out }
    }

    /// Reads prompts in file order, each with its slot and source, for slots without a prompt.
    fn try_each(
        &mut self,
        places: impl IntoIterator<Item = (usize, (usize, ChosenPlace))>,
    ) -> Result<()> {
        let places: Vec<_> = places.into_iter().collect();
        for of_source in places.chunk_by(|(_, (one, _)), (_, (next, _))| one == next) {
            let (_, (source, _)) = of_source[0];
            let places = of_source.iter().map(|(_, (_, place))| *place).collect();
            let prompts = ChosenPrompts { places, ..self.sources[source].prompts.clone() };
            let mut open = None;
            for (number, (slot, _)) in of_source.iter().enumerate() {
                if !self.chosen.contains_key(slot) {
                    let prompt = prompts.get(&mut open, number)?;
                    self.try_one(prompt, *slot, source)?;
                }
            }
        }
        Ok(())
    }

    fn try_one(&mut self, prompt: Prompt, slot: usize, source: usize) -> Result<()> {
        let left_out = &mut self.left_out[source];
        left_out.num_seen += 1;
        if let Some(error) = self.text.refusal(&prompt) {
            let error = refused(&prompt, error);
            if self.sources[source].prompts.reading.is_strict {
                return Err(error);
            }
            left_out.num_refused += 1;
            left_out.first_refused.get_or_insert_with(|| format!("{error:#}"));
            return Ok(());
        }
        let ids = self.text.encode_turn(&prompt, 0, &[])?;
        if self.skip_long && ids.len() >= self.text.context {
            left_out.num_long += 1;
            return Ok(());
        }
        self.text.check_fits(&prompt.id, &ids)?;
        self.chosen.insert(slot, prompt);
        Ok(())
    }

    fn finish(self, watch: &dyn Watch) -> Result<Vec<Prompt>> {
        let context = self.text.context;
        for (source, left_out) in self.sources.iter().zip(self.left_out) {
            let LeftOut { num_seen, num_long, num_refused, first_refused } = left_out;
            let path = source.path().display();
            ensure!(
                num_seen == 0 || num_long != num_seen,
                "no prompt of `{path}` fits the models' context of {context} tokens; hint: give shorter prompts, or \
                 models with a longer context"
            );
            if num_long > 0 {
                watch.note(format!(
                    "`{path}`: {num_long} of {num_seen} prompts are left out, because they do not fit the context of \
                     {context} tokens"
                ));
            }
            if let Some(first) = first_refused {
                watch.note(first);
                watch.note(format!(
                    "`{path}`: {num_refused} of {num_seen} prompts are left out, because the chat template refuses \
                     them; hint: with a recipe, `--strict` fails at the first one"
                ));
            }
        }
        ensure!(
            !self.chosen.is_empty(),
            "the chat template refuses every prompt; hint: choose another with `--chat-template` or a recipe's \
             `models.chat_template`"
        );
        Ok(self.chosen.into_values().collect())
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
