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
    fn drawn_children_are_drawn_without_those_before() {
        let drawn = all(Children::drawn(vec![0.0, 0.0, 0.125, 0.375]), 9);
        let [(first, of_first), (second, of_second)] = &drawn[..] else {
            panic!("two tokens are left: {drawn:?}")
        };
        assert_eq!(*of_first, DrawnFrom::Probs(vec![0.0, 0.0, 0.25, 0.75]));
        assert_eq!([first, second].into_iter().sum::<u32>(), 5);
        let DrawnFrom::Probs(last) = of_second else { panic!("it is drawn") };
        assert_eq!(last[*second as usize], 1.0);
    }
}
