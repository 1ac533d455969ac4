//! Max-Gram (CS-Drafting, Chen et al. 2023, section 3.3): a drafter without a model, also known as
//! prompt lookup. It copies the tokens that followed an earlier occurrence of the sequence's end.
//!
//! It finds the longest suffix of the sequence that occurs earlier, takes its first occurrence, and
//! proposes the tokens that followed there. If the copy reaches the end of the sequence, it goes on
//! with its own proposed tokens, so repetitions continue. If no suffix occurs earlier, or the
//! searched text ends, a table of bigrams may propose the most frequent next token.
//!
//! The paper's listing searches the prompt. The authors' code searches the prompt and the generated
//! text. That code stores the prompt twice and lets matches run from its end into its beginning.
//! Here each token is searched once.

mod bigrams;
mod suffix_automaton;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use self::suffix_automaton::{Match, SuffixAutomaton};
use crate::serialized::serialize_as_string;
use crate::{Result, TheoryError};

pub use self::bigrams::{BigramCounts, Bigrams};

/// The text in which a sequence's suffix is searched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SearchedText {
    /// The prompt, as in the paper's listing.
    Prompt,
    /// The prompt and the generated text, as in the authors' code.
    #[default]
    Sequence,
}

/// Settings of [`MaxGram`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaxGramConfig {
    /// The searched text.
    pub searched: SearchedText,
    /// The minimum length of a match in tokens, at least 1. The paper uses 1.
    pub min_match: usize,
}

impl Default for MaxGramConfig {
    fn default() -> Self {
        Self { searched: SearchedText::default(), min_match: 1 }
    }
}

/// The condition under which a look-up replaces the drafter's model in a round. Names and settings
/// write it as `2x4`, for example: after a match of at least two tokens, propose up to four
/// candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LookupFirst {
    /// The minimum match length in tokens, at least 1. Longer matches are rarer and more often
    /// right.
    pub min_match: usize,
    /// The maximum number of candidates, at least 1.
    pub most: usize,
}

impl LookupFirst {
    /// Returns the settings of this look-up, which searches the whole sequence.
    pub fn config(self) -> MaxGramConfig {
        MaxGramConfig { searched: SearchedText::Sequence, min_match: self.min_match }
    }
}

impl fmt::Display for LookupFirst {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}x{}", self.min_match, self.most)
    }
}

impl FromStr for LookupFirst {
    type Err = TheoryError;

    fn from_str(text: &str) -> Result<Self> {
        let read = || {
            let (min_match, most) = text.split_once('x')?;
            Some(Self { min_match: min_match.parse().ok()?, most: most.parse().ok()? })
        };
        let is_valid = |it: &Self| it.min_match > 0 && it.most > 0 && it.to_string() == text;
        read().filter(is_valid).ok_or_else(|| {
            TheoryError::invalid(format!(
                "`{text}` does not say when to look up, as in `2x4`: the minimum match length and the maximum number of \
                 candidates, in tokens, both at least 1"
            ))
        })
    }
}

serialize_as_string!(LookupFirst);

/// A sequence, indexed so that its suffix can be looked up. Reading a token takes amortised
/// constant time, and finding a match constant time.
#[derive(Debug, Clone)]
pub struct MaxGram {
    config: MaxGramConfig,
    /// The index of the searched text.
    index: SuffixAutomaton,
    prompt_len: usize,
    /// The longest suffix that occurs in the prompt, first of the prompt itself and then after each
    /// later token. Used only if the prompt alone is searched.
    matches: Vec<Match>,
}

impl MaxGram {
    /// Creates the index of an empty sequence.
    pub fn new(config: MaxGramConfig) -> Self {
        Self { config, index: SuffixAutomaton::new(), prompt_len: 0, matches: Vec::new() }
    }

    /// Begins a new sequence with this prompt.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.index.truncate(0);
        self.matches.clear();
        self.prompt_len = prompt.len();
        prompt.iter().for_each(|token| self.index.push(*token));
        self.index.reserve();
        self.matches.push(self.index.repeated_suffix());
    }

    /// Counts the tokens read so far, including the prompt's.
    pub fn num_read(&self) -> usize {
        match self.config.searched {
            SearchedText::Prompt => self.prompt_len + self.matches.len().saturating_sub(1),
            SearchedText::Sequence => self.index.len(),
        }
    }

    /// Reads the tokens of `sequence` that were not read yet. `sequence` includes the prompt.
    pub fn read(&mut self, sequence: &[u32]) {
        let unread = self.num_read();
        sequence[unread..].iter().for_each(|token| match self.config.searched {
            SearchedText::Prompt => self.matches.push(self.longest_match_with(*token)),
            SearchedText::Sequence => self.index.push(*token),
        });
    }

    /// Removes all tokens from position `len` on, except the prompt.
    pub fn truncate(&mut self, len: usize) {
        let len = len.max(self.prompt_len);
        match self.config.searched {
            SearchedText::Prompt => self.matches.truncate(1 + len - self.prompt_len),
            SearchedText::Sequence => self.index.truncate(len),
        }
    }

    /// Finds the longest suffix of the sequence that occurs earlier, and returns the position after
    /// its first occurrence. The continuation is empty if the suffix is shorter than
    /// [`MaxGramConfig::min_match`].
    pub fn continuation(&self) -> Continuation {
        let (found, end) = match self.config.searched {
            SearchedText::Prompt => {
                (self.matches.last().map(|found| self.followed(*found)), self.prompt_len)
            }
            SearchedText::Sequence => (Some(self.index.repeated_suffix()), usize::MAX),
        };
        let found = found.filter(|found| found.len >= self.config.min_match.max(1));
        let next = found.map_or(end, |found| self.index.first_end(found.state));
        Continuation { next, end }
    }

    /// Extends a sequence by its continuation, up to `most` tokens or an end token, and returns the
    /// number of added tokens. If the look-up finds no further token, `bigrams` supplies the next
    /// one.
    pub fn extend(
        &mut self,
        sequence: &mut Vec<u32>,
        bigrams: Option<&Bigrams>,
        most: usize,
        eos_token_ids: &[u32],
    ) -> usize {
        self.read(sequence);
        let mut copied = self.continuation();
        let num_before = sequence.len();
        while sequence.len() - num_before < most
            && let Some(token) = copied.next_or(bigrams, sequence)
        {
            sequence.push(token);
            if eos_token_ids.contains(&token) {
                break;
            }
        }
        sequence.len() - num_before
    }

    /// Finds the longest suffix that occurs in the prompt, once `token` is appended to the
    /// sequence.
    fn longest_match_with(&self, token: u32) -> Match {
        let mut shorter = self.matches.last().copied();
        while let Some(Match { state, len }) = shorter {
            if let Some(state) = self.index.followed_by(state, token) {
                return Match { state, len: len + 1 };
            }
            shorter = self.index.shorter(state);
        }
        Match::EMPTY
    }

    /// Shortens a match until it occurs before the prompt's end, so that a prompt token follows it.
    fn followed(&self, mut found: Match) -> Match {
        while self.index.first_end(found.state) == self.prompt_len
            && let Some(shorter) = self.index.shorter(found.state)
        {
            found = shorter;
        }
        found
    }
}

/// A position in a sequence from which the next tokens are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Continuation {
    next: usize,
    end: usize,
}

impl Continuation {
    /// Returns the next token to copy. If there is none, returns the successor of the sequence's
    /// last token in `bigrams`, or None.
    pub fn next_or(&mut self, bigrams: Option<&Bigrams>, sequence: &[u32]) -> Option<u32> {
        self.next(sequence).or_else(|| bigrams?.after(*sequence.last()?))
    }

    /// Returns the next token to copy and moves past it; None at the end of the searched text.
    /// `sequence` includes the tokens proposed so far.
    pub fn next(&mut self, sequence: &[u32]) -> Option<u32> {
        let token = sequence[..self.end.min(sequence.len())].get(self.next).copied();
        self.next += usize::from(token.is_some());
        token
    }
}
