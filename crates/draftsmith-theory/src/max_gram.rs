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
//!
//! A third kind of look-up also searches stored answers and counts what followed:
//! [suffix decoding](continuations).

mod bigrams;
mod continuations;
mod stored_answers;
mod suffix_automaton;
#[cfg(test)]
mod tests;

use std::str::FromStr;
use std::sync::Arc;
use std::{fmt, vec};

use serde::{Deserialize, Serialize};

use self::continuations::OwnText;
use self::suffix_automaton::{Match, SuffixAutomaton};
use crate::serialized::serialize_as_string;
use crate::{Result, TheoryError};

pub use self::bigrams::{BigramCounts, Bigrams};
pub use self::continuations::{Continuations, SuffixSettings};
pub use self::stored_answers::StoredAnswers;

/// The text in which a sequence's suffix is searched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SearchedText {
    /// The prompt, as in the paper's listing.
    Prompt,
    /// The prompt and the generated text, as in the authors' code.
    #[default]
    Sequence,
    /// The prompt, the generated text and stored answers, for the tokens that followed most often.
    Answers,
}

/// Settings of [`MaxGram`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaxGramConfig {
    /// The searched text.
    pub searched: SearchedText,
    /// The minimum length of a match in tokens, at least 1. The paper uses 1.
    pub min_match: usize,
    /// The settings of [`SearchedText::Answers`].
    pub suffix: SuffixSettings,
}

impl Default for MaxGramConfig {
    fn default() -> Self {
        let suffix = SuffixSettings::default();
        Self { searched: SearchedText::default(), min_match: 1, suffix }
    }
}

/// The beginning of a condition that looks up stored answers too.
const ANSWERS: &str = "answers:";

/// The condition under which a look-up replaces the drafter's model in a round. Names and settings
/// write it as `2x4`, for example: after a match of at least two tokens, propose up to four
/// candidates. `answers:2x4` looks up stored answers too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LookupFirst {
    /// Whether stored answers are searched, by [`SearchedText::Answers`], or only the sequence.
    pub answers: bool,
    /// The minimum match length in tokens, at least 1. Longer matches are rarer and more often
    /// right.
    pub min_match: usize,
    /// The maximum number of candidates, at least 1.
    pub most: usize,
}

impl LookupFirst {
    /// Creates a look-up in the sequence.
    pub fn new(min_match: usize, most: usize) -> Self {
        Self { answers: false, min_match, most }
    }

    /// Returns the settings of this look-up.
    pub fn config(self) -> MaxGramConfig {
        let searched = if self.answers { SearchedText::Answers } else { SearchedText::Sequence };
        MaxGramConfig { searched, min_match: self.min_match, ..MaxGramConfig::default() }
    }
}

impl fmt::Display for LookupFirst {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answers = if self.answers { ANSWERS } else { "" };
        write!(formatter, "{answers}{}x{}", self.min_match, self.most)
    }
}

impl FromStr for LookupFirst {
    type Err = TheoryError;

    fn from_str(text: &str) -> Result<Self> {
        let read = || {
            let of_answers = text.strip_prefix(ANSWERS);
            let (min_match, most) = of_answers.unwrap_or(text).split_once('x')?;
            let [min_match, most] = [min_match.parse().ok()?, most.parse().ok()?];
            Some(Self { answers: of_answers.is_some(), min_match, most })
        };
        let is_valid = |it: &Self| it.min_match > 0 && it.most > 0 && it.to_string() == text;
        read().filter(is_valid).ok_or_else(|| {
            TheoryError::invalid(format!(
                "`{text}` does not say when to look up, as in `2x4` or `answers:2x4`: the minimum match length and the \
                 maximum number of candidates, in tokens, both at least 1"
            ))
        })
    }
}

serialize_as_string!(LookupFirst);

/// A sequence, indexed so that its suffix can be looked up. Reading a token takes amortised
/// constant time, and finding a match constant time. With [`SearchedText::Answers`], the time of a
/// look-up grows with the number of places of the sequence's last token.
#[derive(Debug, Clone)]
pub struct MaxGram {
    config: MaxGramConfig,
    /// The index of the searched text.
    index: SuffixAutomaton,
    prompt_len: usize,
    /// The longest suffix that occurs in the prompt, first of the prompt itself and then after each
    /// later token. Used only if the prompt alone is searched.
    matches: Vec<Match>,
    /// The sequence, if stored answers are searched too.
    own: OwnText,
    answers: Option<Arc<StoredAnswers>>,
    /// The end of the stored tokens that are searched.
    num_searched: usize,
}

impl MaxGram {
    /// Creates the index of an empty sequence. Only [`SearchedText::Answers`] searches `answers`.
    pub fn new(config: MaxGramConfig, answers: Option<Arc<StoredAnswers>>) -> Self {
        Self {
            config,
            index: SuffixAutomaton::new(),
            prompt_len: 0,
            matches: Vec::new(),
            own: OwnText::default(),
            answers,
            num_searched: usize::MAX,
        }
    }

    /// Sees only the stored answers before answer `number`, if they are those of one run.
    #[must_use]
    pub(crate) fn for_answer(mut self, number: usize) -> Self {
        self.num_searched = self.answers.as_ref().map_or(usize::MAX, |it| it.seen_by(number));
        self
    }

    /// Begins a new sequence with this prompt.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.index.truncate(0);
        self.matches.clear();
        self.own.truncate(0);
        self.prompt_len = prompt.len();
        if self.config.searched == SearchedText::Answers {
            prompt.iter().for_each(|token| self.own.push(*token));
            return;
        }
        prompt.iter().for_each(|token| self.index.push(*token));
        self.index.reserve();
        self.matches.push(self.index.repeated_suffix());
    }

    /// Counts the tokens read so far, including the prompt's.
    pub fn num_read(&self) -> usize {
        match self.config.searched {
            SearchedText::Prompt => self.prompt_len + self.matches.len().saturating_sub(1),
            SearchedText::Sequence => self.index.len(),
            SearchedText::Answers => self.own.tokens.len(),
        }
    }

    /// Reads the tokens of `sequence` that were not read yet. `sequence` includes the prompt.
    pub fn read(&mut self, sequence: &[u32]) {
        let unread = self.num_read();
        sequence[unread..].iter().for_each(|token| match self.config.searched {
            SearchedText::Prompt => self.matches.push(self.longest_match_with(*token)),
            SearchedText::Sequence => self.index.push(*token),
            SearchedText::Answers => self.own.push(*token),
        });
    }

    /// Removes all tokens from position `len` on, except the prompt.
    pub fn truncate(&mut self, len: usize) {
        let len = len.max(self.prompt_len);
        match self.config.searched {
            SearchedText::Prompt => self.matches.truncate(1 + len - self.prompt_len),
            SearchedText::Sequence => self.index.truncate(len),
            SearchedText::Answers => self.own.truncate(len),
        }
    }

    /// Returns the tokens that may follow the sequence, up to `most`, by [`SearchedText::Answers`]. They
    /// form a tree if the settings say so.
    pub fn continuations(&self, most: usize) -> Continuations {
        self.counted(most, &self.config.suffix)
    }

    fn counted(&self, most: usize, suffix: &SuffixSettings) -> Continuations {
        let stored = self.answers.as_deref().map(|stored| (stored, self.num_searched));
        self.own.propose(stored, (self.config.min_match, most), suffix)
    }

    /// Finds the longest suffix of the sequence that occurs earlier, and returns the position after
    /// its first occurrence. The continuation is empty if the suffix is shorter than
    /// [`MaxGramConfig::min_match`]. If stored answers are searched, it is the most probable chain of
    /// up to `most` tokens.
    pub fn continuation(&self, most: usize) -> Continuation {
        let (found, end) = match self.config.searched {
            SearchedText::Prompt => {
                (self.matches.last().map(|found| self.followed(*found)), self.prompt_len)
            }
            SearchedText::Sequence => (Some(self.index.repeated_suffix()), usize::MAX),
            SearchedText::Answers => {
                let chain = SuffixSettings { tree: false, ..self.config.suffix };
                let nodes = self.counted(most, &chain).nodes;
                let tokens: Vec<u32> = nodes.into_iter().map(|(token, _)| token).collect();
                return Continuation::Counted(tokens.into_iter());
            }
        };
        let found = found.filter(|found| found.len >= self.config.min_match.max(1));
        let next = found.map_or(end, |found| self.index.first_end(found.state));
        Continuation::Copied { next, end }
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
        let mut copied = self.continuation(most);
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

/// The tokens that a look-up proposes after a sequence.
#[derive(Debug, Clone)]
pub enum Continuation {
    /// Tokens of the sequence from a position on.
    Copied {
        /// The position of the next token.
        next: usize,
        /// The end of the searched text.
        end: usize,
    },
    /// The tokens that followed most often.
    Counted(vec::IntoIter<u32>),
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
        match self {
            Self::Copied { next, end } => {
                let token = sequence[..sequence.len().min(*end)].get(*next).copied();
                *next += usize::from(token.is_some());
                token
            }
            Self::Counted(tokens) => tokens.next(),
        }
    }
}
