//! Chooses the prompts for `build-data`. They belong to one split, lie within the length bounds and
//! contain no duplicates. Their number is limited per file, or divided among the sources by weight.

use std::collections::{BTreeMap, BinaryHeap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use draftsmith_data::{ContentHash, LengthBounds, Malformed, Prompt, Turn, missing_answer};

use super::chosen::{ChosenPlace, ChosenPrompts};
use super::refused;
use crate::prompt_files::{Reading, check_files, files_of, note_malformed};
use crate::recipe::{DataRecipe, PromptSource, Recipe, Responses};
use crate::text_side::TextSide;
use crate::watch::{Silent, Watch};

/// A prompt source of the recipe, with its files.
type Source<'a> = (&'a PromptSource, Vec<PathBuf>);

/// Chooses the prompts from which the recipe's data is built, in file order. Files are read once to
/// choose prompts, and again when the prompts are used.
///
/// # Errors
/// If a file cannot be read, a text cannot be encoded, file names repeat, or no prompt is left.
pub fn choose_prompts(
    recipe: &Recipe,
    data: &DataRecipe,
    text: &TextSide,
    watch: &dyn Watch,
) -> Result<ChosenPrompts> {
    let sources = data.prompts.iter().map(|source| Ok((source, files_of([&source.path])?)));
    let sources: Vec<Source<'_>> = sources.collect::<Result<_>>()?;
    let files: Vec<PathBuf> = sources.iter().flat_map(|(_, files)| files.clone()).collect();
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
        num_read: 0,
        left_out: BTreeMap::new(),
        unanswered: None,
        watch,
    };
    let is_weighted = data.prompts.iter().any(|source| source.weight.is_some());
    let places = match data.num_prompts {
        Some(num_prompts) if is_weighted => sieve.weighted(&sources, num_prompts, recipe.seed)?,
        limit => sieve.first(&files, limit)?,
    };
    if let Some(unanswered) = sieve.unanswered.filter(|_| places.is_empty()) {
        bail!(unanswered);
    }
    if places.is_empty() {
        let first = files.first().map(|path| path.display().to_string()).unwrap_or_default();
        let more = match files.len() {
            0 | 1 => String::new(),
            num => format!(" and {} more", num - 1),
        };
        bail!(
            "no prompt of `{first}`{more} is left; hint: check `data.split`, the bounds on tokens and the \
             models' context"
        );
    }
    Ok(ChosenPrompts { reading: sieve.reading, files, places })
}

/// Hashes the prompts from which the recipe's data is built, without their answers. `None` if the
/// recipe builds no data, or its prompt files cannot be read any more.
pub fn prompts_in_data(recipe: &Recipe, text: &TextSide) -> Option<HashSet<ContentHash>> {
    let chosen = choose_prompts(recipe, recipe.data.as_ref()?, text, &Silent).ok()?;
    let hash = |prompt: Result<Prompt>| Some(prompt.ok()?.content_hash(false));
    chosen.each(0..chosen.len()).map(hash).collect()
}

/// Counts the prompts whose content hash is among these hashes.
pub fn num_known(prompts: &[Prompt], known: &HashSet<ContentHash>) -> usize {
    prompts.iter().filter(|prompt| known.contains(&prompt.content_hash(false))).count()
}

/// The reason for leaving out prompts that the chat template does not render.
const REFUSED: &str = "refused by the chat template";
/// The reason for leaving out prompts whose file does not answer them.
const UNANSWERED: &str = "without an answer";

/// A filter for prompts, with its state.
struct Sieve<'a> {
    reading: Reading,
    data: &'a DataRecipe,
    lengths: LengthBounds,
    text: &'a TextSide,
    /// Content hashes of the prompts taken so far, over all files.
    seen: HashSet<ContentHash>,
    /// Number of prompts read from the current file. `left_out` counts skipped prompts by reason.
    num_read: usize,
    left_out: BTreeMap<&'static str, usize>,
    /// Describes the first prompt without the answer that existing responses need.
    unanswered: Option<String>,
    watch: &'a dyn Watch,
}

/// Describes a prompt without an answer in its file.
fn unanswered(path: &Path, prompt: &Prompt) -> String {
    // The number in an id counts records from 0.
    let record = prompt.id.rsplit_once('#').and_then(|(_, record)| record.parse().ok());
    format!(
        "prompt `{}` has no response in its file: {}; hint: set `data.responses = \"generate\"` to generate them with the \
         target",
        prompt.id,
        missing_answer(path, record.unwrap_or(0))
    )
}

impl Sieve<'_> {
    /// Calls `take` with each prompt of a file that passes the filter, and its index in the file,
    /// until `take` returns false.
    fn each(&mut self, path: &Path, mut take: impl FnMut(&Prompt, usize) -> bool) -> Result<()> {
        let mut prompts = self.reading.open(path)?;
        for (index, prompt) in prompts.by_ref().enumerate() {
            let prompt = prompt?;
            if self.takes(path, &prompt)? && !take(&prompt, index) {
                break;
            }
        }
        self.note_left_out(path, &prompts.malformed);
        Ok(())
    }

    /// Takes the first prompts of each file, at most `limit` per file; all if `limit` is `None`.
    fn first(&mut self, files: &[PathBuf], limit: Option<usize>) -> Result<Vec<ChosenPlace>> {
        let mut taken = Vec::new();
        for (file, path) in files.iter().enumerate() {
            let end = limit.map(|limit| taken.len() + limit);
            self.each(path, |prompt, index| {
                taken.push(ChosenPlace::of(prompt, file, index));
                end != Some(taken.len())
            })?;
        }
        Ok(taken)
    }

    /// Takes `num` prompts in total, divided among the sources by weight. From each source, takes
    /// the first prompts in a seeded random order.
    fn weighted(
        &mut self,
        sources: &[Source<'_>],
        num: usize,
        seed: u64,
    ) -> Result<Vec<ChosenPlace>> {
        let weights: Vec<f64> =
            sources.iter().map(|(source, _)| source.weight.unwrap_or(1.0)).collect();
        let mut taken = Vec::new();
        let mut numbers = 0..;
        for ((source, files), share) in sources.iter().zip(shares(num, &weights)) {
            // The heap drops the prompt that is last in the random order when it has too many.
            let mut first: BinaryHeap<(ContentHash, ChosenPlace)> = BinaryHeap::new();
            for (path, file) in files.iter().zip(&mut numbers) {
                self.each(path, |prompt, index| {
                    let order = prompt.content_hash(false).seeded(seed);
                    first.push((order, ChosenPlace::of(prompt, file, index)));
                    if first.len() > share {
                        first.pop();
                    }
                    true
                })?;
            }
            if first.len() < share {
                self.watch.note(format!(
                    "`{}` has {} prompts, fewer than the {share} that its weight asks for",
                    source.path.display(),
                    first.len()
                ));
            }
            let begin = taken.len();
            taken.extend(first.into_iter().map(|(_, place)| place));
            taken[begin..].sort_unstable();
        }
        Ok(taken)
    }

    /// Returns whether to take a prompt. If not, counts it under the reason.
    fn takes(&mut self, path: &Path, prompt: &Prompt) -> Result<bool> {
        self.num_read += 1;
        let reason = self.reason_against(path, prompt)?;
        reason.into_iter().for_each(|reason| *self.left_out.entry(reason).or_default() += 1);
        Ok(reason.is_none())
    }

    /// Returns the reason for leaving out a prompt, as worded in notes; `None` to take it.
    fn reason_against(&mut self, path: &Path, prompt: &Prompt) -> Result<Option<&'static str>> {
        if !self.reading.takes(prompt) {
            return Ok(Some("of other splits"));
        }
        let with_answers = self.data.responses == Responses::Existing;
        if with_answers && !prompt.turns.iter().all(Turn::has_response) {
            let first = self.unanswered.get_or_insert_with(|| unanswered(path, prompt));
            ensure!(!self.reading.is_strict, first.clone());
            return Ok(Some(UNANSWERED));
        }
        if !self.data.keep_duplicates && !self.seen.insert(prompt.content_hash(with_answers)) {
            return Ok(Some("duplicates"));
        }
        if let Some(error) = self.text.refusal(prompt) {
            if self.reading.is_strict {
                return Err(refused(prompt, error));
            }
            if !self.left_out.contains_key(REFUSED) {
                self.watch.note(format!("{:#}", refused(prompt, error)));
            }
            return Ok(Some(REFUSED));
        }
        if !self.data.skip_long_prompts && self.lengths.is_none() {
            return Ok(None);
        }
        let num_tokens = self.text.prompt_ids(prompt, 0, &[])?.len();
        if self.data.skip_long_prompts && num_tokens >= self.text.context {
            return Ok(Some("longer than the models' context"));
        }
        let has_length = self.has_length(prompt, num_tokens)?;
        Ok((!has_length).then_some("outside the length bounds"))
    }

    /// Returns whether a prompt of `num_tokens` tokens and its given answers are within the bounds.
    fn has_length(&self, prompt: &Prompt, num_tokens: usize) -> Result<bool> {
        let bounds = &self.lengths;
        let within = |num: usize, min: Option<usize>, max: Option<usize>| {
            min.is_none_or(|min| min <= num) && max.is_none_or(|max| num <= max)
        };
        if !within(num_tokens, bounds.min_prompt_tokens, bounds.max_prompt_tokens) {
            return Ok(false);
        }
        if bounds.min_response_tokens.or(bounds.max_response_tokens).is_none() {
            return Ok(true);
        }
        for turn in &prompt.turns {
            let num = match (&turn.tokens, &turn.response) {
                (Some(given), _) => given.response_ids.len(),
                (None, Some(response)) => self.text.tokenizer.encode(response, false)?.len(),
                (None, None) => continue,
            };
            if !within(num, bounds.min_response_tokens, bounds.max_response_tokens) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Shows a note with the number of prompts of a file that were left out, and resets the counts.
    fn note_left_out(&mut self, path: &Path, malformed: &Malformed) {
        note_malformed(path, malformed, self.watch);
        let (num_read, left_out) =
            (std::mem::take(&mut self.num_read), std::mem::take(&mut self.left_out));
        if left_out.is_empty() {
            return;
        }
        let num_left_out: usize = left_out.values().sum();
        let reasons: Vec<String> =
            left_out.iter().map(|(reason, num)| format!("{num} {reason}")).collect();
        self.watch.note(format!(
            "`{}`: {num_left_out} of {num_read} prompts are left out: {}",
            path.display(),
            reasons.join(", ")
        ));
    }
}

/// Divides `num` in proportion to the weights. Shares are rounded down. The remainder goes to the
/// shares with the largest fractional parts, with ties in list order.
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
    fn shares_follow_weights_and_sum_to_the_total() {
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
