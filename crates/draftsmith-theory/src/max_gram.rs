//! Max-Gram (CS-Drafting, Chen et al. 2023, section 3.3): a draft without a model, which copies what
//! followed an earlier occurrence of the sequence's end. Also known as prompt lookup.
//!
//! It finds the longest suffix of the sequence that occurs earlier, takes its first occurrence, and
//! proposes the tokens that followed there. Where the two overlap it reads on into its own proposal,
//! so repetitions continue. Where no suffix occurs earlier, or the searched text ends, a table of
//! bigrams may propose the usual next token.
//!
//! The paper's listing searches the prompt; the authors' code searches the prompt and the generated
//! text. That code holds a decoder's prompt twice and lets matches run from its end into its beginning;
//! here each token is searched once.

mod bigrams;
mod lookup_first;
mod suffix_automaton;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use self::suffix_automaton::SuffixAutomaton;

pub use self::bigrams::{BigramCounts, Bigrams};
pub use self::lookup_first::LookupFirst;

/// Where a sequence's suffix is looked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SearchedText {
    /// In the prompt: the paper's listing.
    Prompt,
    /// In the prompt and in what was generated: the authors' code.
    #[default]
    Sequence,
}

/// How a sequence's suffix is looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaxGramConfig {
    /// Where.
    pub searched: SearchedText,
    /// The fewest tokens that a match has; shorter ones are none. At least 1, which is the paper's.
    pub min_match: usize,
}

impl Default for MaxGramConfig {
    fn default() -> Self {
        Self { searched: SearchedText::default(), min_match: 1 }
    }
}

/// One sequence, with its suffix looked up at any time. Reading a token takes constant time on
/// average, a look-up always.
#[derive(Debug, Clone)]
pub struct MaxGram {
    config: MaxGramConfig,
    /// Of what is searched.
    index: SuffixAutomaton,
    prompt_len: usize,
    /// Where the prompt alone is searched: the longest suffix that occurs in it, behind the prompt
    /// and each token after it.
    matches: Vec<Match>,
}

/// A suffix of the sequence that occurs in what is searched.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Match {
    state: u32,
    len: usize,
}

impl MaxGram {
    /// An empty sequence.
    pub fn new(config: MaxGramConfig) -> Self {
        Self { config, index: SuffixAutomaton::new(), prompt_len: 0, matches: Vec::new() }
    }

    /// Begins another sequence.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.index.truncate(0);
        self.matches.clear();
        self.prompt_len = prompt.len();
        prompt.iter().for_each(|token| self.index.push(*token));
        self.index.reserve();
        self.matches.push(self.repeated_suffix());
    }

    /// The number of tokens read.
    pub fn num_read(&self) -> usize {
        match self.config.searched {
            SearchedText::Prompt => self.prompt_len + self.matches.len().saturating_sub(1),
            SearchedText::Sequence => self.index.len(),
        }
    }

    /// Reads what it has not read of the sequence.
    pub fn read(&mut self, sequence: &[u32]) {
        let unread = self.num_read();
        sequence[unread..].iter().for_each(|token| match self.config.searched {
            SearchedText::Prompt => self.matches.push(self.longest_match_with(*token)),
            SearchedText::Sequence => self.index.push(*token),
        });
    }

    /// Forgets all tokens from position `len` on, but for the prompt.
    pub fn truncate(&mut self, len: usize) {
        let len = len.max(self.prompt_len);
        match self.config.searched {
            SearchedText::Prompt => self.matches.truncate(1 + len - self.prompt_len),
            SearchedText::Sequence => self.index.truncate(len),
        }
    }

    /// What followed the longest suffix of the sequence read so far where it occurred first.
    pub fn continuation(&self) -> Continuation {
        let (found, end) = match self.config.searched {
            SearchedText::Prompt => {
                (self.matches.last().copied().map(|found| self.followed(found)), self.prompt_len)
            }
            SearchedText::Sequence => (Some(self.repeated_suffix()), usize::MAX),
        };
        let found = found.filter(|found| found.len >= self.config.min_match.max(1));
        let next = found.map_or(end, |found| self.index.first_end(found.state));
        Continuation { next, end }
    }

    /// Appends to a sequence what would follow, `most` tokens or up to an end token, and returns how
    /// many those are. Where a look-up says nothing more, `bigrams` go on, if there are any.
    pub fn extend(
        &mut self,
        sequence: &mut Vec<u32>,
        bigrams: Option<&Bigrams>,
        most: usize,
        eos_token_ids: &[u32],
    ) -> usize {
        self.read(sequence);
        let mut copied = self.continuation();
        let num_standing = sequence.len();
        while sequence.len() - num_standing < most
            && let Some(token) = copied.next_or(bigrams, sequence)
        {
            sequence.push(token);
            if eos_token_ids.contains(&token) {
                break;
            }
        }
        sequence.len() - num_standing
    }

    /// The longest suffix of what is indexed that occurs before its end.
    fn repeated_suffix(&self) -> Match {
        let (state, len) = self.index.repeated_suffix();
        Match { state, len }
    }

    /// The longest suffix in the prompt, after one more token.
    fn longest_match_with(&self, token: u32) -> Match {
        let mut shorter = self.matches.last().map(|found| (found.state, found.len));
        while let Some((state, len)) = shorter {
            if let Some(state) = self.index.followed_by(state, token) {
                return Match { state, len: len + 1 };
            }
            shorter = self.index.shorter(state);
        }
        Match { state: suffix_automaton::ROOT, len: 0 }
    }

    /// The longest suffix of a match that occurs before the prompt's end, where a token follows.
    fn followed(&self, mut found: Match) -> Match {
        while self.index.first_end(found.state) == self.prompt_len
            && let Some((state, len)) = self.index.shorter(found.state)
        {
            found = Match { state, len };
        }
        found
    }
}

/// Where the next tokens are to be found in a sequence and its continuation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Continuation {
    next: usize,
    end: usize,
}

impl Continuation {
    /// The next token, as the sequence went on before or else as it usually does.
    pub fn next_or(&mut self, bigrams: Option<&Bigrams>, sequence: &[u32]) -> Option<u32> {
        self.next(sequence).or_else(|| bigrams?.after(*sequence.last()?))
    }

    /// The next token, where there is one, of the sequence with what was proposed behind it.
    pub fn next(&mut self, sequence: &[u32]) -> Option<u32> {
        let token = sequence[..self.end.min(sequence.len())].get(self.next).copied();
        self.next += usize::from(token.is_some());
        token
    }
}
