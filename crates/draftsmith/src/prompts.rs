//! Prompts: reading their files, and choosing those that are used.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Result, bail};
use draftsmith_data::{Prompt, read_prompts};

use crate::console::Console;
use crate::pair::Pair;

/// A prompt file and what was taken from it.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) prompts: Vec<Prompt>,
}

/// Reads prompt files.
///
/// # Errors
/// If one cannot be read, or two would give the same row ids.
pub(crate) fn read_sources(paths: &[PathBuf]) -> Result<Vec<Source>> {
    let mut names = BTreeSet::new();
    let mut sources = Vec::new();
    for path in paths {
        let prompts = read_prompts(path)?;
        let name = prompts.first().map(|p| p.source.clone()).unwrap_or_default();
        if !names.insert(name.clone()) {
            bail!(
                "`{}` is named `{name}` like another prompt file, and rows are named by file; \
                 hint: rename one of them",
                path.display()
            );
        }
        sources.push(Source { path: path.clone(), prompts });
    }
    Ok(sources)
}

impl Source {
    /// Takes out the prompts whose first turn does not fit the models' context, and notes how many.
    ///
    /// # Errors
    /// If a prompt cannot be encoded, or none is left.
    pub(crate) fn drop_long(&mut self, pair: &Pair, console: &Console) -> Result<()> {
        let num_all = self.prompts.len();
        let mut kept = Vec::with_capacity(num_all);
        for prompt in self.prompts.drain(..) {
            if pair.encode(&prompt.messages(0, &[]))?.len() < pair.context() {
                kept.push(prompt);
            }
        }
        if kept.is_empty() {
            bail!(
                "no prompt of `{}` fits the models' context of {} tokens",
                self.path.display(),
                pair.context()
            );
        }
        if kept.len() < num_all {
            console.note(format!(
                "`{}`: {} of {num_all} prompts left out, they do not fit the context of {} tokens",
                self.path.display(),
                num_all - kept.len(),
                pair.context()
            ));
        }
        self.prompts = kept;
        Ok(())
    }
}

/// Which prompts of each file are used.
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
    /// The prompts that are chosen, all of which fit.
    ///
    /// # Errors
    /// If one does not fit the models' context, or cannot be encoded.
    pub(crate) fn of(
        self,
        sources: Vec<Source>,
        pair: &Pair,
        console: &Console,
    ) -> Result<Vec<Dataset>> {
        let choose = |mut source: Source| {
            if self.skip_long {
                source.drop_long(pair, console)?;
            }
            let name = source.prompts.first().map(|p| p.source.clone()).unwrap_or_default();
            let prompts = spread(source.prompts, self.num_prompts);
            for prompt in &prompts {
                pair.check_fits(&prompt.id, &pair.encode(&prompt.messages(0, &[]))?)?;
            }
            Ok(Dataset { name, prompts })
        };
        sources.into_iter().map(choose).collect()
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
