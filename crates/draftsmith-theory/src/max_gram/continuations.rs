//! Suffix decoding (Oliaro et al. 2025, arXiv:2411.04975; vLLM's method `suffix`): the tokens that most
//! often followed a sequence's end, in the sequence itself and in stored answers.
//!
//! The probability of a continuation is estimated by counts: of all places at which the last L tokens
//! occur, the share at which it follows. A match of L tokens proposes at most `factor` · L candidates,
//! as long as they are probable enough. Among all L and both texts, the continuation with the largest
//! sum of probabilities is proposed. If two are equal, we take the sequence's own text before stored
//! answers, then the longer match, and among equally frequent tokens the smallest id.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::stored_answers::{END, MAX_DEPTH, StoredAnswers};

/// The maximum match length of REST.
const REST_MATCH: usize = 16;
/// The maximum length of REST's continuations.
const REST_AHEAD: usize = 10;

/// Settings of suffix look-ups. The defaults are those of vLLM 0.33.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SuffixSettings {
    /// The maximum number of tokens of a match and its continuation together, from 2 to 64
    /// (`suffix_decoding_max_tree_depth`).
    pub depth: usize,
    /// The smallest probability of a candidate, estimated by counts, above 0 and at most 1
    /// (`suffix_decoding_min_token_prob`).
    pub min_prob: f64,
    /// The maximum number of candidates per matched token, above 0
    /// (`suffix_decoding_max_spec_factor`).
    pub factor: f64,
    /// Whether a round proposes a tree of several continuations, instead of the most frequent one.
    pub tree: bool,
    /// Whether candidates are those of REST (He et al. 2023, arXiv:2311.08252): only stored answers are
    /// searched, for the longest match of up to 16 tokens, and `factor` and `depth` do not apply. The
    /// continuations have up to 10 tokens.
    pub rest: bool,
}

impl Default for SuffixSettings {
    fn default() -> Self {
        Self { depth: 24, min_prob: 0.1, factor: 1.0, tree: false, rest: false }
    }
}

impl SuffixSettings {
    /// Returns the name of a setting out of range and what it should be; `None` if all are valid.
    pub fn fault(&self) -> Option<(&'static str, &'static str)> {
        let Self { depth, min_prob, factor, .. } = *self;
        let faults = [
            ((2..=MAX_DEPTH).contains(&depth), ("depth", "is outside 2 to 64")),
            (min_prob > 0.0 && min_prob <= 1.0, ("min_prob", "must be above 0 and at most 1")),
            (factor > 0.0 && factor.is_finite(), ("factor", "is not a number above 0")),
        ];
        faults.into_iter().find(|(is_valid, _)| !is_valid).map(|(_, fault)| fault)
    }
}

/// Tokens that may follow a sequence. Chains have each token follow the one before it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Continuations {
    /// The tokens, each with the index of the one that it follows; `None` for the sequence's end.
    pub nodes: Vec<(u32, Option<usize>)>,
    /// The sum of the tokens' estimated probabilities, the expected number of accepted candidates.
    pub score: f64,
}

/// The places of a match in a text, sorted by the tokens that follow.
pub(super) struct Followers<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) places: &'a [u32],
    /// The number of tokens from a place to the first that follows.
    pub(super) offset: usize,
    /// The maximum number of tokens that follow one another.
    pub(super) ahead: usize,
}

/// A candidate that is not yet proposed.
struct Open {
    token: u32,
    parent: Option<usize>,
    prob: f64,
    /// The places at which it follows, in the order of [`Followers`].
    places: Range<usize>,
    depth: usize,
}

impl Followers<'_> {
    fn token(&self, place: usize, depth: usize) -> u32 {
        let at = self.places[place] as usize + self.offset + depth;
        self.tokens.get(at).copied().unwrap_or(END)
    }

    /// Lists the tokens that follow after `depth` further tokens at `least` of the places or more, the
    /// most frequent first.
    fn next(&self, places: Range<usize>, depth: usize, least: usize) -> Vec<(u32, Range<usize>)> {
        let (mut found, mut from) = (Vec::new(), places.start);
        // A token with so many places, which are adjacent, has one at each probe that falls into them.
        while let probe = from + least - 1
            && probe < places.end
        {
            let token = self.token(probe, depth);
            if token == END {
                break;
            }
            let [begin, end] = [
                partition_point(from..probe, |place| self.token(place, depth) < token),
                partition_point(probe..places.end, |place| self.token(place, depth) == token),
            ];
            if end - begin >= least {
                found.push((token, begin..end));
            }
            from = end;
        }
        found.sort_by_key(|(token, places)| (usize::MAX - places.len(), *token));
        found
    }

    /// Proposes up to `most` tokens, the most probable first.
    fn propose(&self, most: usize, settings: &SuffixSettings) -> Continuations {
        let mut found = Continuations::default();
        let mut open = Vec::new();
        self.open(&mut open, (None, 1.0, 0), 0..self.places.len(), settings);
        while found.nodes.len() < most && !open.is_empty() {
            let probable = |best: usize, at: usize| {
                let is_more = |one: &Open, other: &Open| one.prob > other.prob;
                if is_more(&open[at], &open[best]) { at } else { best }
            };
            let Open { token, parent, prob, places, depth } =
                open.remove((1..open.len()).fold(0, probable));
            found.nodes.push((token, parent));
            found.score += prob;
            let parent = Some(found.nodes.len() - 1);
            self.open(&mut open, (parent, prob, depth + 1), places, settings);
        }
        found
    }

    /// Adds the probable candidates that follow a candidate, or the match.
    fn open(
        &self,
        open: &mut Vec<Open>,
        (parent, before, depth): (Option<usize>, f64, usize),
        places: Range<usize>,
        settings: &SuffixSettings,
    ) {
        if depth == self.ahead {
            return;
        }
        let num = places.len() as f64;
        let least = (settings.min_prob / before * num - 1e-6).ceil().max(1.0) as usize;
        let most = if settings.tree { usize::MAX } else { 1 };
        for (token, places) in self.next(places, depth, least).into_iter().take(most) {
            let prob = before * places.len() as f64 / num;
            if prob >= settings.min_prob {
                open.push(Open { token, parent, prob, places, depth });
            }
        }
    }
}

fn partition_point(range: Range<usize>, is_before: impl Fn(usize) -> bool) -> usize {
    let (mut from, mut to) = (range.start, range.end);
    while from < to {
        let middle = from.midpoint(to);
        if is_before(middle) { from = middle + 1 } else { to = middle }
    }
    from
}

/// A sequence with the places after each of its tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct OwnText {
    pub(super) tokens: Vec<u32>,
    after: HashMap<u32, Vec<u32>>,
}

impl OwnText {
    pub(super) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.after.entry(token).or_default().push(self.tokens.len() as u32);
    }

    pub(super) fn truncate(&mut self, len: usize) {
        for token in self.tokens.drain(len.min(self.tokens.len())..) {
            self.after.entry(token).and_modify(|places| _ = places.pop());
        }
    }

    /// Returns the places after the sequence's last token, each with the number of tokens before it, up
    /// to `longest`, that are the sequence's last. They are sorted by the next `depth` tokens.
    fn matches(&self, longest: usize, depth: usize) -> Vec<(u32, usize)> {
        let tokens = &self.tokens[..];
        let Some(places) = tokens.last().and_then(|last| self.after.get(last)) else {
            return Vec::new();
        };
        let len = |place: u32| {
            let before = tokens[..place as usize].iter().rev();
            before.zip(tokens.iter().rev()).take(longest).take_while(|(a, b)| a == b).count()
        };
        let mut matches: Vec<(u32, usize)> =
            places.iter().map(|place| (*place, len(*place))).collect();
        let next = |place: u32| {
            let from = place as usize;
            let next = tokens[from..tokens.len().min(from + depth)].iter().copied();
            next.chain([END])
        };
        matches.sort_by(|(one, _), (other, _)| next(*one).cmp(next(*other)));
        matches
    }

    /// Proposes up to `most` tokens to follow the sequence, after matches of `min_match` tokens or more. The
    /// stored answers are searched up to a place.
    pub(super) fn propose(
        &self,
        stored: Option<(&StoredAnswers, usize)>,
        (min_match, most): (usize, usize),
        settings: &SuffixSettings,
    ) -> Continuations {
        let depth = if settings.rest { REST_MATCH + REST_AHEAD } else { settings.depth };
        let depth = depth.clamp(2, MAX_DEPTH);
        let longest = if settings.rest { REST_MATCH } else { depth - 1 };
        let longest = longest.min(self.tokens.len().saturating_sub(1));
        let own = if settings.rest { Vec::new() } else { self.matches(longest, depth) };
        let found = stored.map_or_else(Vec::new, |(stored, _)| stored.find(&self.tokens, longest));
        let mut best = Continuations::default();
        let mut try_match = |len: usize, places: &[u32], tokens: &[u32], offset: usize| {
            let (most, ahead) = match settings.rest {
                true => (if best.nodes.is_empty() { most } else { 0 }, REST_AHEAD),
                false => (most.min((len as f64 * settings.factor + 1e-6) as usize), depth - len),
            };
            // Each candidate adds at most 1 to the score.
            if most as f64 > best.score {
                let followers = Followers { tokens, places, offset, ahead };
                let found = followers.propose(most, settings);
                if found.score > best.score {
                    best = found;
                }
            }
        };
        let lengths = (min_match.max(1)..=longest).rev();
        // The sequence's end is one of the places.
        for len in lengths.clone().filter(|_| own.len() > 1) {
            let places: Vec<u32> =
                own.iter().filter(|(_, own)| *own >= len).map(|(place, _)| *place).collect();
            try_match(len, &places, &self.tokens, 0);
        }
        if let Some((stored, end)) = stored {
            for len in lengths.filter(|len| *len <= found.len()) {
                let mut places = Cow::Borrowed(&stored.order()[found[len - 1].clone()]);
                if end < stored.tokens().len() {
                    places.to_mut().retain(|place| (*place as usize) < end);
                }
                try_match(len, &places, stored.tokens(), len);
            }
        }
        best
    }
}
