//! Chosen prompts, stored as file positions and read again when used, which saves memory.

use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use draftsmith_data::{ContentHash, Prompt, Prompts};

use crate::prompt_files::Reading;

/// Prompts chosen from several files, in file order.
#[derive(Debug, Clone)]
pub struct ChosenPrompts {
    pub(super) reading: Reading,
    pub(super) files: Vec<PathBuf>,
    pub(super) places: Vec<ChosenPlace>,
}

/// The position of a chosen prompt, with a hash of its content. Sorts by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChosenPlace {
    /// The index of the prompt's file in the list of files.
    pub(super) file: usize,
    /// The index of the prompt in its file.
    index: usize,
    num_turns: usize,
    content: ContentHash,
}

impl ChosenPlace {
    pub(super) fn of(prompt: &Prompt, file: usize, index: usize) -> Self {
        Self { file, index, num_turns: prompt.turns.len(), content: prompt.content_hash(true) }
    }
}

impl ChosenPrompts {
    /// Returns the number of prompts, which is at least one.
    #[expect(
        clippy::len_without_is_empty,
        reason = "prompts that fit are chosen, or it is an error"
    )]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Counts the turns of the prompts whose indices are in the range `of`.
    pub fn num_turns(&self, of: Range<usize>) -> usize {
        self.places[of].iter().map(|chosen| chosen.num_turns).sum()
    }

    /// Reads the prompts at these ascending indices. The iterator ends after an error.
    ///
    /// # Panics
    /// If an index is out of range.
    pub fn each(
        &self,
        numbers: impl IntoIterator<Item = usize>,
    ) -> impl Iterator<Item = Result<Prompt>> {
        let (mut open, mut has_failed) = (None, false);
        numbers.into_iter().map_while(move |number| {
            let prompt = (!has_failed).then(|| self.get(&mut open, number))?;
            has_failed = prompt.is_err();
            Some(prompt)
        })
    }

    /// Reads the prompt at an index, which must exceed the index of the previous call. `open` is
    /// the file that was read last.
    ///
    /// # Errors
    /// If the file cannot be read, or has changed since the prompts were chosen.
    pub(super) fn get(&self, open: &mut Option<OpenFile>, number: usize) -> Result<Prompt> {
        let ChosenPlace { file, index, content, .. } = self.places[number];
        let path = &self.files[file];
        let (_, prompts, num_read) = match open {
            Some(open) if open.0 == file => open,
            open => open.insert((file, self.reading.open(path)?, 0)),
        };
        while let Some(prompt) = prompts.next().transpose()? {
            *num_read += 1;
            if *num_read <= index {
                continue;
            }
            ensure!(
                prompt.content_hash(true) == content,
                "prompt `{}` of `{}` changed after this command began; {UNCHANGED}",
                prompt.id,
                path.display()
            );
            return Ok(prompt);
        }
        bail!(
            "`{}` has {num_read} prompts and had more when this command began; {UNCHANGED}",
            path.display()
        )
    }
}

/// An open prompt file: its index, its remaining prompts, and the number of prompts read so far.
pub(super) type OpenFile = (usize, Prompts, usize);

const UNCHANGED: &str =
    "hint: do not change prompt files while they are read, and run the command again";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_prompts_are_read_again_and_changed_ones_fail() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let files = [dir.path().join("a.jsonl"), dir.path().join("b.jsonl")];
        let lines = |name: &str, num: usize| -> String {
            (0..num).map(|n| format!("{{\"prompt\": \"{name} {n}\"}}\n")).collect()
        };
        std::fs::write(&files[0], lines("a", 5)).expect("written");
        std::fs::write(&files[1], lines("b", 3)).expect("written");
        let reading = Reading::default();
        let place = |(file, index): (usize, usize)| {
            let prompt = reading.open(&files[file]).expect("opens").nth(index).expect("exists");
            ChosenPlace::of(&prompt.expect("reads"), file, index)
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
        let error = ids(&[1]).expect_err("the file changed").to_string();
        assert!(error.starts_with("prompt `a#3` of"), "{error}");
        std::fs::write(&files[1], lines("b", 2)).expect("written");
        assert_eq!(ids(&[3]).expect("unchanged"), ["b#1"]);
        let error = ids(&[3, 4]).expect_err("the file is shorter").to_string();
        assert!(error.contains("has 2 prompts and had more"), "{error}");
    }
}
