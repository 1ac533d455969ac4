//! Which prompts `build-data` takes of its sources: those of one split, of the lengths that are asked
//! for, each once, and as many of each file, or of each source by its weight, as the recipe says.

use std::collections::{BinaryHeap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use draftsmith_data::{ContentHash, LengthBounds, Malformed, Prompt};

use super::chosen::{ChosenPlace, ChosenPrompts};
use crate::console::Console;
use crate::prompt_files::{Reading, check_files, files_of, tell_malformed};
use crate::recipe::{DataRecipe, PromptSource, Recipe, Responses};
use crate::text_side::TextSide;

/// A source and its files.
struct Source<'a> {
    given: &'a PromptSource,
    files: Vec<PathBuf>,
}

/// The prompts that the recipe's data is built from, in the order of the files and their records. They
/// are read through once to be chosen, and again when they are used.
///
/// # Errors
/// If a file cannot be read, a text cannot be encoded, two files would give the same row ids, or no
/// prompt is left.
pub(crate) fn choose_prompts(
    recipe: &Recipe,
    data: &DataRecipe,
    text: &TextSide,
    console: &Console,
) -> Result<ChosenPrompts> {
    let source = |given| Ok(Source { given, files: files_of([&given.path])? });
    let sources = data.prompts.iter().map(source).collect::<Result<Vec<_>>>()?;
    let files: Vec<PathBuf> = sources.iter().flat_map(|source| source.files.clone()).collect();
    check_files(&files)?;
    let mut sieve = Sieve {
        reading: Reading {
            keeps_tokens: data.responses == Responses::Existing,
            ..recipe.reading(data.split)
        },
        data,
        lengths: data.lengths(),
        text,
        seen: HashSet::new(),
        left_out: LeftOut::default(),
        console,
    };
    let is_weighted = data.prompts.iter().any(|source| source.weight.is_some());
    let places = match data.num_prompts {
        Some(num_prompts) if is_weighted => sieve.weighted(&sources, num_prompts, recipe.seed)?,
        limit => sieve.first(&files, limit)?,
    };
    if places.is_empty() {
        bail!(
            "no prompt of {} is left; hint: see `data.split`, the bounds on tokens and the models' \
             context",
            told(&files)
        );
    }
    Ok(ChosenPrompts { reading: sieve.reading, files, places })
}

/// The first of many files, and how many more there are.
fn told(files: &[PathBuf]) -> String {
    let first = files.first().map(|path| path.display().to_string()).unwrap_or_default();
    match files.len() {
        0 | 1 => format!("`{first}`"),
        num => format!("`{first}` and {} more", num - 1),
    }
}

/// What prompts have to pass to be taken.
struct Sieve<'a> {
    reading: Reading,
    data: &'a DataRecipe,
    lengths: LengthBounds,
    text: &'a TextSide,
    /// What was taken, over all files.
    seen: HashSet<ContentHash>,
    /// What was left out of the file at hand.
    left_out: LeftOut,
    console: &'a Console,
}

/// How many prompts of a file were left out, by the first reason for it.
#[derive(Debug, Default)]
struct LeftOut {
    num_read: usize,
    of_other_splits: usize,
    duplicates: usize,
    of_other_lengths: usize,
    too_long: usize,
}

impl Sieve<'_> {
    /// The first prompts of each file.
    fn first(&mut self, files: &[PathBuf], limit: Option<usize>) -> Result<Vec<ChosenPlace>> {
        let mut taken = Vec::new();
        for (file, path) in files.iter().enumerate() {
            let mut prompts = self.reading.open(path)?;
            let mut places = 0..;
            let end = limit.map(|limit| taken.len() + limit);
            while end != Some(taken.len())
                && let Some((prompt, place)) = prompts.next().zip(places.next())
            {
                let prompt = prompt?;
                if self.takes(&prompt)? {
                    taken.push(ChosenPlace::of(&prompt, file, place));
                }
            }
            self.tell(path, prompts.malformed());
        }
        Ok(taken)
    }

    /// So many prompts in all, shared out among the sources by their weights, of each those that come
    /// first in an order that depends on the seed.
    fn weighted(
        &mut self,
        sources: &[Source<'_>],
        num: usize,
        seed: u64,
    ) -> Result<Vec<ChosenPlace>> {
        let weights: Vec<f64> =
            sources.iter().map(|source| source.given.weight.unwrap_or(1.0)).collect();
        let mut taken = Vec::new();
        let mut files = 0..;
        for (source, share) in sources.iter().zip(shares(num, &weights)) {
            // The last in that order is the first to go where there are too many.
            let mut first: BinaryHeap<(ContentHash, ChosenPlace)> = BinaryHeap::new();
            for (path, file) in source.files.iter().zip(&mut files) {
                let mut prompts = self.reading.open(path)?;
                for (place, prompt) in prompts.by_ref().enumerate() {
                    let prompt = prompt?;
                    if self.takes(&prompt)? {
                        let order = prompt.content_hash(false).seeded(seed);
                        first.push((order, ChosenPlace::of(&prompt, file, place)));
                    }
                    if first.len() > share {
                        first.pop();
                    }
                }
                self.tell(path, prompts.malformed());
            }
            if first.len() < share {
                self.console.note(format!(
                    "`{}`: {} prompts, fewer than the {share} of its weight",
                    source.given.path.display(),
                    first.len()
                ));
            }
            let begin = taken.len();
            taken.extend(first.into_iter().map(|(_, place)| place));
            taken[begin..].sort_unstable();
        }
        Ok(taken)
    }

    /// Whether a prompt is taken.
    fn takes(&mut self, prompt: &Prompt) -> Result<bool> {
        self.left_out.num_read += 1;
        if !self.reading.takes(prompt) {
            self.left_out.of_other_splits += 1;
            return Ok(false);
        }
        let with_answers = self.data.responses == Responses::Existing;
        if !self.data.keep_duplicates && !self.seen.insert(prompt.content_hash(with_answers)) {
            self.left_out.duplicates += 1;
            return Ok(false);
        }
        if self.data.skip_long_prompts || !self.lengths.is_none() {
            let num_tokens = self.text.prompt_ids(prompt, 0, &[])?.len();
            if self.data.skip_long_prompts && num_tokens >= self.text.context {
                self.left_out.too_long += 1;
                return Ok(false);
            }
            if !self.has_length(prompt, num_tokens)? {
                self.left_out.of_other_lengths += 1;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a prompt of so many tokens, and the answers that its file has, are within the bounds.
    fn has_length(&self, prompt: &Prompt, num_tokens: usize) -> Result<bool> {
        let LengthBounds {
            min_prompt_tokens,
            max_prompt_tokens,
            min_response_tokens,
            max_response_tokens,
        } = self.lengths;
        let within = |num: usize, min: Option<usize>, max: Option<usize>| {
            min.is_none_or(|min| min <= num) && max.is_none_or(|max| num <= max)
        };
        if !within(num_tokens, min_prompt_tokens, max_prompt_tokens) {
            return Ok(false);
        }
        if min_response_tokens.or(max_response_tokens).is_none() {
            return Ok(true);
        }
        for turn in &prompt.turns {
            let num = match (&turn.tokens, &turn.response) {
                (Some(given), _) => given.response_ids.len(),
                (None, Some(response)) => self.text.tokenizer.encode(response, false)?.len(),
                (None, None) => continue,
            };
            if !within(num, min_response_tokens, max_response_tokens) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Tells what was left out of a file, and begins to count for the next.
    fn tell(&mut self, path: &Path, malformed: &Malformed) {
        tell_malformed(path, malformed, self.console);
        let LeftOut { num_read, of_other_splits, duplicates, of_other_lengths, too_long } =
            std::mem::take(&mut self.left_out);
        let context = self.text.context;
        let reasons = [
            (of_other_splits, "of other splits".to_owned()),
            (duplicates, "there before".to_owned()),
            (of_other_lengths, "shorter or longer than is asked for".to_owned()),
            (too_long, format!("longer than the context of {context} tokens")),
        ];
        let num_left_out: usize = reasons.iter().map(|(num, _)| num).sum();
        if num_left_out > 0 {
            let reasons = reasons.iter().filter(|(num, _)| *num > 0);
            let reasons: Vec<String> = reasons.map(|(num, what)| format!("{num} {what}")).collect();
            self.console.note(format!(
                "`{}`: {num_left_out} of {num_read} prompts left out: {}",
                path.display(),
                reasons.join(", ")
            ));
        }
    }
}

/// So many prompts shared out by weights: each share rounded down, and what is left to those that lost
/// most by it, the first of equals first.
fn shares(num: usize, weights: &[f64]) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|weight| num as f64 * weight / sum).collect();
    let mut shares: Vec<usize> = exact.iter().map(|share| share.floor() as usize).collect();
    let left = num.saturating_sub(shares.iter().sum());
    let mut by_loss: Vec<usize> = (0..weights.len()).collect();
    by_loss.sort_by(|one, other| exact[*other].fract().total_cmp(&exact[*one].fract()));
    by_loss.into_iter().cycle().take(left).for_each(|at| shares[at] += 1);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_weights_and_sum_to_what_is_shared_out() {
        assert_eq!(shares(10, &[1.0]), [10]);
        assert_eq!(shares(9, &[1.0, 2.0]), [3, 6]);
        assert_eq!(shares(10, &[1.0, 2.0]), [3, 7]);
        assert_eq!(shares(2, &[1.0, 1.0, 1.0]), [1, 1, 0]);
        assert_eq!(shares(1000, &[0.1, 0.2, 0.7]), [100, 200, 700]);
        for num in 0..50 {
            let all = shares(num, &[0.3, 5.0, 1e-9, 2.2]);
            assert_eq!(all.iter().sum::<usize>(), num, "{all:?}");
        }
    }
}
