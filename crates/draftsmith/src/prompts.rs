//! Prompts: reading their files, and choosing those that are used. A file may be larger than the
//! memory: only the prompts that are chosen are held.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use draftsmith_data::{Prompt, Prompts};

use crate::console::Console;
use crate::pair::Pair;

/// The first prompts of a file.
#[derive(Debug)]
pub(crate) struct FirstPrompts {
    path: PathBuf,
    /// At most so many; all if absent.
    limit: Option<usize>,
    pub(crate) prompts: Vec<Prompt>,
    /// What was not read, because it may not be needed.
    rest: Prompts,
}

impl FirstPrompts {
    /// Reads as many prompts of each file.
    ///
    /// # Errors
    /// If one cannot be read, or two would give the same row ids.
    pub(crate) fn read(paths: &[PathBuf], limit: Option<usize>) -> Result<Vec<Self>> {
        let read = |path: &PathBuf, mut rest: Prompts| {
            let prompts =
                rest.by_ref().take(limit.unwrap_or(usize::MAX)).collect::<Result<_, _>>()?;
            Ok(Self { path: path.clone(), limit, prompts, rest })
        };
        let opened = open_all(paths)?;
        paths.iter().zip(opened).map(|(path, prompts)| read(path, prompts)).collect()
    }

    /// Takes out the prompts whose first turn does not fit the models' context, reads others in
    /// their place, and notes how many.
    ///
    /// # Errors
    /// If a prompt cannot be read or encoded, or none is left.
    pub(crate) fn skip_long(&mut self, pair: &Pair, console: &Console) -> Result<()> {
        let read = std::mem::take(&mut self.prompts).into_iter().map(Ok);
        let mut num_seen = 0;
        for prompt in read.chain(self.rest.by_ref()) {
            let prompt = prompt?;
            num_seen += 1;
            if fits(&prompt, pair)? {
                self.prompts.push(prompt);
            }
            if self.limit == Some(self.prompts.len()) {
                break;
            }
        }
        note_left_out(&self.path, self.prompts.len(), num_seen, pair, console)
    }
}

/// A prompt file that was read once from end to end, so that it can be used, and holds so many
/// prompts. They are not kept: those that are chosen are read again.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    name: String,
    num_prompts: usize,
}

/// Reads prompt files.
///
/// # Errors
/// If one cannot be read, or two would give the same row ids.
pub(crate) fn read_sources(paths: &[PathBuf]) -> Result<Vec<Source>> {
    let read = |path: &PathBuf, prompts: Prompts| {
        let name = prompts.source().to_owned();
        let mut num_prompts = 0;
        for prompt in prompts {
            prompt?;
            num_prompts += 1;
        }
        Ok(Source { path: path.clone(), name, num_prompts })
    };
    let opened = open_all(paths)?;
    paths.iter().zip(opened).map(|(path, prompts)| read(path, prompts)).collect()
}

impl Source {
    /// The places of the prompts that fit the models' context; how many do not is noted.
    fn fitting(&self, pair: &Pair, console: &Console) -> Result<Vec<usize>> {
        let mut places = Vec::new();
        for (place, prompt) in Prompts::open(&self.path)?.enumerate() {
            if fits(&prompt?, pair)? {
                places.push(place);
            }
        }
        note_left_out(&self.path, places.len(), self.num_prompts, pair, console)?;
        Ok(places)
    }

    /// The prompts at `places`, which are in order.
    fn pick(&self, places: &[usize]) -> Result<Vec<Prompt>> {
        let mut wanted = places.iter().peekable();
        let mut prompts = Prompts::open(&self.path)?.enumerate();
        let mut picked = Vec::with_capacity(places.len());
        while wanted.peek().is_some()
            && let Some((place, prompt)) = prompts.next()
        {
            let prompt = prompt?;
            picked.extend(wanted.next_if_eq(&&place).map(|_| prompt));
        }
        Ok(picked)
    }
}

fn open_all(paths: &[PathBuf]) -> Result<Vec<Prompts>> {
    let mut names = BTreeSet::new();
    let open = |path: &PathBuf| {
        let prompts = Prompts::open(path)?;
        let name = prompts.source();
        if !names.insert(name.to_owned()) {
            bail!(
                "`{}` is named `{name}` like another prompt file, and rows are named by file; \
                 hint: rename one of them",
                path.display()
            );
        }
        Ok(prompts)
    };
    paths.iter().map(open).collect()
}

/// Whether a prompt's first turn leaves room for a token.
fn fits(prompt: &Prompt, pair: &Pair) -> Result<bool> {
    Ok(pair.encode(&prompt.messages(0, &[]))?.len() < pair.context())
}

/// Notes how many of the prompts that were looked at do not fit.
///
/// # Errors
/// If none does.
fn note_left_out(
    path: &Path,
    num_fitting: usize,
    num_seen: usize,
    pair: &Pair,
    console: &Console,
) -> Result<()> {
    let (path, context) = (path.display(), pair.context());
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
        pair: &Pair,
        console: &Console,
    ) -> Result<Vec<Dataset>> {
        let choose = |source: Source| {
            let prompts = self.of_all(std::slice::from_ref(&source), pair, console)?;
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
        pair: &Pair,
        console: &Console,
    ) -> Result<Vec<Prompt>> {
        let mut places = Vec::new();
        for (index, source) in sources.iter().enumerate() {
            let of_source = match self.skip_long {
                true => source.fitting(pair, console)?,
                false => (0..source.num_prompts).collect(),
            };
            places.extend(of_source.into_iter().map(|place| (index, place)));
        }
        let chosen = spread(places, self.num_prompts);
        let mut prompts = Vec::with_capacity(chosen.len());
        for of_source in chosen.chunk_by(|one, next| one.0 == next.0) {
            let places: Vec<usize> = of_source.iter().map(|(_, place)| *place).collect();
            prompts.extend(sources[of_source[0].0].pick(&places)?);
        }
        for prompt in &prompts {
            pair.check_fits(&prompt.id, &pair.encode(&prompt.messages(0, &[]))?)?;
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
