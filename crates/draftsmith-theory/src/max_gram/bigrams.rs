//! A table of the most frequent successor of each token, counted over some texts.

use std::collections::HashMap;

/// A table of each token's most frequent successor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bigrams(Vec<Option<u32>>);

impl Bigrams {
    /// Creates a table in which entry i is the successor of token i, or None if token i has none.
    ///
    /// # Errors
    /// If a successor's id is not below the number of entries. The error is the first such id.
    pub fn new(next: Vec<Option<u32>>) -> Result<Self, u32> {
        match next.iter().flatten().find(|id| **id as usize >= next.len()) {
            Some(id) => Err(*id),
            None => Ok(Self(next)),
        }
    }

    /// Returns a token's most frequent successor; None if the token has none.
    pub fn after(&self, token: u32) -> Option<u32> {
        self.0.get(token as usize).copied().flatten()
    }

    /// Returns all entries, one per token id.
    pub fn entries(&self) -> &[Option<u32>] {
        &self.0
    }

    /// Counts the tokens that have a successor.
    pub fn num_known(&self) -> usize {
        self.0.iter().flatten().count()
    }
}

/// Counts of pairs of adjacent tokens.
#[derive(Debug, Clone, Default)]
pub struct BigramCounts(HashMap<(u32, u32), u64>);

impl BigramCounts {
    /// Counts the pairs of adjacent tokens in a text.
    pub fn add(&mut self, tokens: &[u32]) {
        let pairs = tokens.windows(2);
        pairs.for_each(|pair| *self.0.entry((pair[0], pair[1])).or_default() += 1);
    }

    /// Returns the number of pairs counted.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// Finds the most frequent successor of each token of a vocabulary; among equally frequent
    /// ones, the smallest id. Pairs with a token outside the vocabulary are ignored.
    pub fn most_frequent(&self, vocab_size: usize) -> Bigrams {
        let mut best: Vec<Option<(u64, u32)>> = vec![None; vocab_size];
        for (&(token, next), &count) in &self.0 {
            if (next as usize) < vocab_size
                && let Some(best) = best.get_mut(token as usize)
                && best.is_none_or(|(most, id)| count > most || (count == most && next < id))
            {
                *best = Some((count, next));
            }
        }
        Bigrams(best.into_iter().map(|best| best.map(|(_, next)| next)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_successor_wins_and_among_equals_the_smallest_id() {
        let mut counts = BigramCounts::default();
        counts.add(&[1, 2, 1, 3, 1, 3, 0]);
        counts.add(&[2, 0, 9, 2]);
        counts.add(&[]);
        counts.add(&[0]);
        assert_eq!(counts.total(), 9);
        let bigrams = counts.most_frequent(4);
        // 2 and 3 are followed by 1 and by 0, once each; 0 only by 9, outside this vocabulary.
        assert_eq!(bigrams.entries(), [None, Some(3), Some(0), Some(0)]);
        assert_eq!((bigrams.after(1), bigrams.after(0), bigrams.after(7)), (Some(3), None, None));
        assert_eq!(bigrams.num_known(), 3);
        assert_eq!(Bigrams::new(bigrams.entries().to_vec()), Ok(bigrams));
        assert_eq!(Bigrams::new(vec![None, Some(2)]), Err(2));
    }
}
