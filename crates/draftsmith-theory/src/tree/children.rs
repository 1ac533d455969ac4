//! The children of a node in order: the most probable tokens, or tokens drawn without replacement.

use crate::select::largest;
use crate::{DrawnFrom, Draws, SoftmaxSummary};

/// The remaining children of a node.
#[derive(Debug, Clone)]
pub struct Children(RemainingChildren);

#[derive(Debug, Clone)]
enum RemainingChildren {
    /// The most probable tokens, with their probabilities.
    Top(std::vec::IntoIter<(u32, f64)>),
    /// The distribution after temperature and filters, with 0 for tokens already drawn.
    Drawn(Vec<f64>),
}

impl Children {
    /// Creates up to `num` children, the most probable tokens in descending order.
    pub(super) fn top(logits: &[f32], num: usize) -> Self {
        Self(RemainingChildren::Top(most_probable(logits, num).into_iter()))
    }

    /// Creates children that are drawn without replacement from `probs`, the distribution after
    /// temperature and filters.
    pub(super) fn drawn(probs: Vec<f64>) -> Self {
        Self(RemainingChildren::Drawn(probs))
    }

    /// Creates the siblings of a first child that is already proposed. `drawn_from` is the
    /// distribution that it was drawn from. If it was certain, its siblings are up to `num` of the
    /// most probable other tokens. Otherwise they are drawn without replacement from the rest of
    /// that distribution.
    pub fn beside(first: u32, drawn_from: &DrawnFrom, logits: &[f32], num: usize) -> Self {
        match drawn_from {
            DrawnFrom::OneHot => {
                let mut others = most_probable(logits, num + 1);
                others.retain(|(token, _)| *token != first);
                others.truncate(num);
                Self(RemainingChildren::Top(others.into_iter()))
            }
            DrawnFrom::Probs(probs) => {
                let mut left = probs.clone();
                left[first as usize] = 0.0;
                Self::drawn(left)
            }
        }
    }

    /// Returns whether the children are drawn, so that all must be proposed.
    pub(super) fn are_drawn(&self) -> bool {
        matches!(self.0, RemainingChildren::Drawn(_))
    }

    /// Returns the next child: the token, the distribution it was drawn from given the earlier
    /// children, and its probability given only its parent. None if no child is left.
    pub fn next(&mut self, draws: &mut dyn Draws) -> Option<(u32, DrawnFrom, f64)> {
        match &mut self.0 {
            RemainingChildren::Top(tokens) => {
                let (token, prob) = tokens.next()?;
                Some((token, DrawnFrom::OneHot, prob))
            }
            RemainingChildren::Drawn(left) => {
                let total: f64 = left.iter().sum();
                if total <= 0.0 {
                    return None;
                }
                let q: Vec<f64> = left.iter().map(|weight| weight / total).collect();
                let token = draws.categorical(&q);
                let prob = std::mem::take(&mut left[token]);
                Some((token as u32, DrawnFrom::Probs(q), prob))
            }
        }
    }
}

/// Finds up to `num` of the most probable tokens, in descending order, with their probabilities.
fn most_probable(logits: &[f32], num: usize) -> Vec<(u32, f64)> {
    let softmax = SoftmaxSummary::of(logits);
    let prob = |token: u32| (token, softmax.log_prob(logits[token as usize]).exp());
    largest(logits, num).into_iter().map(prob).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SeededDraws;

    fn all(mut children: Children, num: usize) -> Vec<(u32, DrawnFrom)> {
        let draws = &mut SeededDraws::new(0, &["children"]);
        let next = |_| children.next(draws).map(|(token, drawn_from, _)| (token, drawn_from));
        (0..num).map_while(next).collect()
    }

    #[test]
    fn the_siblings_of_a_certain_child_are_the_most_probable_other_tokens() {
        let logits = [0.5, 2.0, f32::NEG_INFINITY, 1.0, -3.0];
        let beside = |first, num| -> Vec<u32> {
            let siblings = Children::beside(first, &DrawnFrom::OneHot, &logits, num);
            all(siblings, 9).into_iter().map(|(token, _)| token).collect()
        };
        assert_eq!(beside(1, 2), [3, 0]);
        // A lenient reviewer may have accepted a token that is not the most probable one.
        assert_eq!(beside(4, 2), [1, 3]);
        assert_eq!(beside(2, 2), [1, 3]);
        assert_eq!(beside(1, 8), [3, 0, 4]);
        assert_eq!(beside(1, 0), [0; 0]);
    }

    #[test]
    fn the_siblings_of_a_drawn_child_are_drawn_without_those_before() {
        let probs = DrawnFrom::Probs(vec![0.5, 0.0, 0.125, 0.375]);
        let drawn = all(Children::beside(0, &probs, &[], 9), 9);
        let [(first, of_first), (second, of_second)] = &drawn[..] else {
            panic!("two tokens are left: {drawn:?}")
        };
        assert_eq!(*of_first, DrawnFrom::Probs(vec![0.0, 0.0, 0.25, 0.75]));
        assert_eq!([first, second].into_iter().sum::<u32>(), 5);
        let DrawnFrom::Probs(last) = of_second else { panic!("it is drawn") };
        assert_eq!(last[*second as usize], 1.0);
    }
}
