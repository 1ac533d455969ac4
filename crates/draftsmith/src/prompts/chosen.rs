//! Prompts that were chosen, by the places where they stand: a hundred thousand take little room, and
//! each is read again when its turn has come.

use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Result, bail};
use draftsmith_data::{ContentHash, Prompt};

use crate::prompt_files::{PromptFile, Reading};

/// Prompts of some files, in the order of the files and of their places there.
#[derive(Debug)]
pub(crate) struct ChosenPrompts {
    pub(super) reading: Reading,
    pub(super) files: Vec<PathBuf>,
    pub(super) places: Vec<ChosenPlace>,
}

/// Where a chosen prompt stands, and what is to be found there. Ordered by files and places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChosenPlace {
    /// Which of the files.
    pub(super) file: usize,
    /// Which of the file's prompts.
    pub(super) place: usize,
    num_turns: usize,
    content: ContentHash,
}

impl ChosenPlace {
    /// The place of a prompt.
    pub(super) fn of(prompt: &Prompt, file: usize, place: usize) -> Self {
        let (num_turns, content) = (prompt.turns.len(), prompt.content_hash(true));
        Self { file, place, num_turns, content }
    }
}

impl ChosenPrompts {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// How many turns some of them have.
    pub(crate) fn num_turns(&self, of: Range<usize>) -> usize {
        self.places[of].iter().map(|chosen| chosen.num_turns).sum()
    }

    /// Reads them, from the first on.
    pub(crate) fn reader(&self) -> ChosenReader<'_> {
        ChosenReader { chosen: self, open: None }
    }

    /// Each of some, which are in order. Ends behind an error.
    pub(crate) fn each(
        &self,
        numbers: impl IntoIterator<Item = usize>,
    ) -> impl Iterator<Item = Result<Prompt>> {
        let mut reader = self.reader();
        let mut has_failed = false;
        numbers.into_iter().map_while(move |number| {
            let prompt = (!has_failed).then(|| reader.get(number))?;
            has_failed = prompt.is_err();
            Some(prompt)
        })
    }
}

/// Chosen prompts, as they are read.
#[derive(Debug)]
pub(crate) struct ChosenReader<'c> {
    chosen: &'c ChosenPrompts,
    /// The file that was read last, by its number.
    open: Option<(usize, PromptFile)>,
}

impl ChosenReader<'_> {
    /// A prompt by its number, which is greater than that of each before.
    ///
    /// # Errors
    /// If its file cannot be read, or has other prompts than when it was chosen.
    ///
    /// # Panics
    /// If there are not so many.
    pub(crate) fn get(&mut self, number: usize) -> Result<Prompt> {
        let ChosenPlace { file, place, content, .. } = self.chosen.places[number];
        let path = &self.chosen.files[file];
        let open = match &mut self.open {
            Some((number, open)) if *number == file => open,
            open => &mut open.insert((file, self.chosen.reading.open_at_places(path)?)).1,
        };
        let prompt = open.at(place)?;
        if prompt.content_hash(true) != content {
            bail!(
                "prompt `{}` of `{}` is not what it was when this command began; hint: leave prompt \
                 files alone while they are read, and begin again",
                prompt.id,
                path.display()
            );
        }
        Ok(prompt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_read_where_they_were_chosen_and_changed_ones_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let files = [dir.path().join("a.jsonl"), dir.path().join("b.jsonl")];
        let lines = |name: &str, num: usize| -> String {
            (0..num).map(|n| format!("{{\"prompt\": \"{name} {n}\"}}\n")).collect()
        };
        std::fs::write(&files[0], lines("a", 5)).expect("written");
        std::fs::write(&files[1], lines("b", 3)).expect("written");
        let reading = Reading::default();
        let place = |(file, place): (usize, usize)| {
            let prompt = reading.open_at_places(&files[file]).and_then(|mut file| file.at(place));
            ChosenPlace::of(&prompt.expect("it is there"), file, place)
        };
        let places = [(0, 0), (0, 3), (0, 4), (1, 1), (1, 2)].map(place).to_vec();
        let chosen = ChosenPrompts { reading: reading.clone(), files: files.to_vec(), places };
        let ids = |numbers: &[usize]| -> Result<Vec<String>> {
            chosen.each(numbers.iter().copied()).map(|prompt| Ok(prompt?.id)).collect()
        };
        assert_eq!(ids(&[0, 1, 2, 3, 4]).expect("there"), ["a#0", "a#3", "a#4", "b#1", "b#2"]);
        assert_eq!(ids(&[2, 4]).expect("there"), ["a#4", "b#2"]);
        assert_eq!((chosen.len(), chosen.num_turns(1..4)), (5, 3));

        std::fs::write(&files[0], lines("c", 5)).expect("written");
        let error = ids(&[1]).expect_err("it says something else").to_string();
        assert!(error.starts_with("prompt `a#3` of"), "{error}");
        std::fs::write(&files[1], lines("b", 2)).expect("written");
        assert_eq!(ids(&[3]).expect("it is as it was"), ["b#1"]);
        let error = ids(&[3, 4]).expect_err("it is gone").to_string();
        assert!(error.contains("has 2 prompts, and had more"), "{error}");
    }
}
