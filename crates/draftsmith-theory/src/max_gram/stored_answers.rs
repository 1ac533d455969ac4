//! Stored answers, indexed by a suffix array: every place in them, sorted by the tokens that follow.

use std::cmp::Ordering;
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;

/// Stands for the end of a text where a token would follow. It is larger than any token id.
pub(super) const END: u32 = u32::MAX;
/// The maximum number of tokens of a match and its continuation together.
pub(super) const MAX_DEPTH: usize = 64;

/// Answers that look-ups search. An index of n tokens takes 8·n bytes, and 4 bytes for each token id
/// of the vocabulary.
#[derive(Clone, PartialEq, Eq)]
pub struct StoredAnswers {
    /// The answers one after another, each followed by [`END`].
    tokens: Vec<u32>,
    /// The places of all tokens but [`END`], sorted by the tokens from there on.
    order: Vec<u32>,
    /// The first index in `order` of each token id, and the end of the last.
    first: Vec<u32>,
    /// The place of each answer, if look-ups see only those before their own.
    starts: Option<Vec<usize>>,
}

impl StoredAnswers {
    /// The maximum number of tokens of an index.
    pub const MOST_TOKENS: usize = 1 << 30;

    /// Indexes answers. `observe` receives the number of sorted tokens now and then.
    ///
    /// # Errors
    /// If `observe` fails.
    ///
    /// # Panics
    /// If the answers have more than [`Self::MOST_TOKENS`] tokens.
    pub fn build<'a, E>(
        answers: impl IntoIterator<Item = &'a [u32]>,
        mut observe: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut tokens = Vec::new();
        for answer in answers.into_iter().filter(|answer| !answer.is_empty()) {
            tokens.extend(answer.iter().filter(|token| **token != END));
            tokens.push(END);
        }
        assert!(tokens.len() <= 2 * Self::MOST_TOKENS, "{} tokens", tokens.len());
        let first = firsts(&tokens);
        let mut next = first.clone();
        let mut order = vec![0; first.last().map_or(0, |num| *num as usize)];
        for (at, token) in tokens.iter().enumerate().filter(|(_, token)| **token != END) {
            let next = &mut next[*token as usize];
            order[*next as usize] = at as u32;
            *next += 1;
        }
        let mut rest = &mut order[..];
        let mut num_sorted = 0;
        while !rest.is_empty() {
            // Whole tokens' places, at least this many at a time.
            const AT_A_TIME: usize = 1 << 18;
            let wanted = (num_sorted + AT_A_TIME) as u32;
            let end = first[first.partition_point(|at| *at < wanted).min(first.len() - 1)] as usize;
            let (some, others) = rest.split_at_mut(end - num_sorted);
            some.sort_unstable_by(|one, other| compare(&tokens, *one, *other));
            (rest, num_sorted) = (others, end);
            observe(num_sorted)?;
        }
        Ok(Self { tokens, order, first, starts: None })
    }

    /// Indexes the answers of one run, of which a look-up for answer `number` sees only those before it, as
    /// on a server that stores the answers that it gives.
    ///
    /// # Panics
    /// As [`Self::build`].
    pub fn of_run(answers: &[&[u32]]) -> Self {
        let Ok(stored) = Self::build(answers.iter().copied(), |_| Ok::<_, Infallible>(()));
        let starts = answers.iter().scan(0, |start, answer| {
            let len = answer.iter().filter(|token| **token != END).count();
            let end = *start + if answer.is_empty() { 0 } else { len + 1 };
            Some(std::mem::replace(start, end))
        });
        Self { starts: Some(starts.collect()), ..stored }
    }

    /// Returns the end of the tokens that a look-up for answer `number` sees.
    pub(crate) fn seen_by(&self, number: usize) -> usize {
        self.starts.as_ref().map_or(usize::MAX, |starts| starts[number])
    }

    /// Takes answers and their index from a file, and checks the index.
    ///
    /// # Errors
    /// If the index is not that of the answers, an answer has no end, or a token is not in the
    /// vocabulary. The error says which.
    pub fn from_parts(
        tokens: Vec<u32>,
        order: Vec<u32>,
        vocab_size: usize,
    ) -> Result<Self, &'static str> {
        if tokens.iter().any(|token| *token != END && *token as usize >= vocab_size) {
            return Err("it has a token that the target does not have");
        }
        if tokens.last().is_some_and(|token| *token != END) || tokens.len() >= END as usize {
            return Err("its last answer has no end");
        }
        let num_tokens = tokens.iter().filter(|token| **token != END).count();
        let is_token = |at: &u32| tokens.get(*at as usize).is_some_and(|token| *token != END);
        let is_index = order.len() == num_tokens && order.iter().all(is_token);
        // Places that ascend strictly are all different.
        let ascends = |two: &[u32]| compare(&tokens, two[0], two[1]).is_lt();
        if !is_index || !order.windows(2).all(ascends) {
            return Err("its index is not that of its answers");
        }
        let first = firsts(&tokens);
        Ok(Self { tokens, order, first, starts: None })
    }

    /// Returns the answers one after another, each followed by `u32::MAX`.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the places of all tokens, sorted by the tokens from there on.
    pub fn order(&self) -> &[u32] {
        &self.order
    }

    /// Counts the stored tokens.
    pub fn num_tokens(&self) -> usize {
        self.order.len()
    }

    /// Counts the stored answers.
    pub fn num_answers(&self) -> usize {
        self.tokens.len() - self.order.len()
    }

    /// Finds the places of the suffixes of `sequence` with 1, 2, … `longest` tokens, until one does not
    /// occur.
    pub(super) fn find(&self, sequence: &[u32], longest: usize) -> Vec<Range<usize>> {
        let lengths = 1..=longest.min(sequence.len());
        let found = lengths.map(|len| self.places_of(&sequence[sequence.len() - len..]));
        found.take_while(|places| !places.is_empty()).collect()
    }

    fn places_of(&self, text: &[u32]) -> Range<usize> {
        let Some([from, to]) = self.first.get(text[0] as usize..).and_then(<[u32]>::first_chunk)
        else {
            return 0..0;
        };
        let (from, to) = (*from as usize, *to as usize);
        let beside = |at: &u32| {
            let at = *at as usize;
            self.tokens[at..self.tokens.len().min(at + text.len())].cmp(text)
        };
        let some = &self.order[from..to];
        let begin = some.partition_point(|at| beside(at).is_lt());
        let len = some[begin..].partition_point(|at| beside(at).is_eq());
        from + begin..from + begin + len
    }
}

impl fmt::Debug for StoredAnswers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "StoredAnswers({} tokens)", self.num_tokens())
    }
}

/// Counts for each token id the tokens with smaller ids.
fn firsts(tokens: &[u32]) -> Vec<u32> {
    let num_ids =
        tokens.iter().filter(|token| **token != END).max().map_or(0, |id| *id as usize + 1);
    let mut first = vec![0; num_ids + 1];
    tokens.iter().filter(|token| **token != END).for_each(|token| first[*token as usize + 1] += 1);
    (0..num_ids).for_each(|id| first[id + 1] += first[id]);
    first
}

/// Orders two places by the tokens from there on, as far as look-ups read, and then by themselves.
fn compare(tokens: &[u32], one: u32, other: u32) -> Ordering {
    for ahead in 0..MAX_DEPTH {
        let [a, b] = [one, other].map(|at| tokens[at as usize + ahead]);
        match a.cmp(&b) {
            Ordering::Equal if a == END => break,
            Ordering::Equal => {}
            order => return order,
        }
    }
    one.cmp(&other)
}
