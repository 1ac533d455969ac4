//! A store of one sequence's hidden states ("features"), kept until all their readers have used
//! them.
//!
//! The features stay in the runs of rows in which the forwards computed them. A draft step appends
//! one row and reads one row, so nothing is copied until a verification concatenates a round's
//! runs.

use draftsmith_model::Rows;

/// A drafter's request for features of one sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WantedFeatures<'a> {
    pub(crate) slot: usize,
    /// All tokens of the sequence, including drafted candidates.
    pub(crate) tokens: &'a [u32],
    /// The parent of each of the last tokens if they form a tree, counted from the tree's first
    /// node; `None` for a child of the token before the tree. Empty for a chain.
    pub(crate) parents: &'a [Option<usize>],
    /// The first position to return. All later positions are returned too.
    pub(crate) from: usize,
}

/// A store for the features of consecutive positions of one sequence.
#[derive(Debug)]
pub(crate) struct SlotFeatures {
    /// The position of the first stored row, or of the next row to come if none is stored.
    start: usize,
    /// The stored rows, in runs ordered by position.
    runs: Vec<Rows>,
}

impl SlotFeatures {
    /// Creates an empty store whose first row will belong to position `start`.
    pub(crate) fn new(start: usize) -> Self {
        Self { start, runs: Vec::new() }
    }

    /// Appends the features of the positions that follow the stored ones.
    pub(crate) fn push(&mut self, run: Rows) {
        self.runs.push(run);
    }

    /// Returns the position after the last stored one.
    pub(crate) fn end(&self) -> usize {
        self.start + self.runs.iter().map(Rows::num_rows).sum::<usize>()
    }

    /// Returns the features of all positions from `from` on.
    ///
    /// # Panics
    /// If no such features are stored, or those of `from` were released.
    pub(crate) fn since(&self, from: usize) -> Rows {
        assert!(from >= self.start, "the features of position {from} were released");
        let mut start = self.start;
        let mut runs = Vec::with_capacity(self.runs.len());
        for run in &self.runs {
            let rows = run.num_rows();
            if start + rows > from {
                runs.push(run.slice(from.saturating_sub(start)..rows));
            }
            start += rows;
        }
        assert!(!runs.is_empty(), "there are no features from position {from} on");
        Rows::cat(runs)
    }

    /// Drops all runs that end at or before `position`.
    pub(crate) fn release_before(&mut self, position: usize) {
        let mut num_released = 0;
        for run in &self.runs {
            let end = self.start + run.num_rows();
            if end > position {
                break;
            }
            (self.start, num_released) = (end, num_released + 1);
        }
        self.runs.drain(..num_released);
    }

    /// Keeps the features of the first `num_standing` tokens and of the tree nodes on `path`, and
    /// drops the others. Node 0 is at position `num_standing`. Kept nodes move to consecutive
    /// positions. Released features stay released.
    ///
    /// # Panics
    /// If the path is not in ascending order.
    pub(crate) fn keep(&mut self, num_standing: usize, path: &[usize]) {
        if path.iter().enumerate().all(|(at, node)| at == *node) {
            return self.truncate(num_standing + path.len());
        }
        let num_gone = path.partition_point(|node| num_standing + node < self.start);
        let held = path[num_gone..].iter().map(|node| self.at(num_standing + node));
        let held: Vec<Rows> = held.collect();
        self.truncate(num_standing);
        if self.runs.is_empty() && num_gone > 0 {
            self.start = num_standing + num_gone;
        }
        if !held.is_empty() {
            self.push(Rows::cat(held));
        }
    }

    /// Returns the features of one position.
    fn at(&self, position: usize) -> Rows {
        let mut start = self.start;
        for run in &self.runs {
            let rows = run.num_rows();
            if position < start + rows {
                return run.slice(position - start..position - start + 1);
            }
            start += rows;
        }
        panic!("there are no features of position {position}")
    }

    /// Drops the features of all positions from `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        let mut end = self.end();
        while end > len
            && let Some(run) = self.runs.pop()
        {
            let start = end - run.num_rows();
            if start < len {
                self.runs.push(run.slice(0..len - start));
            }
            end = start;
        }
        self.start = self.start.min(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Tensor, TensorData};

    /// Builds one row per position, which holds the position and its negative.
    fn run(positions: std::ops::Range<usize>) -> Rows {
        let shape = [1, positions.len(), 2];
        let values: Vec<f32> = positions.flat_map(|at| [at as f32, -(at as f32)]).collect();
        Tensor::<3>::from_data(TensorData::new(values, shape), &Device::flex()).into()
    }

    fn assert_holds(features: &SlotFeatures, positions: std::ops::Range<usize>) {
        let found = features.since(positions.start);
        let [found, expected] = Rows::to_host([found, run(positions)]).expect("brought");
        assert_eq!(found, expected);
    }

    fn example() -> SlotFeatures {
        let mut features = SlotFeatures::new(4);
        for positions in [4..5, 5..9, 9..10] {
            features.push(run(positions));
        }
        features
    }

    #[test]
    fn any_tail_can_be_read() {
        for from in 4..10 {
            assert_holds(&example(), from..10);
        }
    }

    #[test]
    fn truncated_features_equal_features_that_were_never_appended() {
        for len in 5..12 {
            let mut features = example();
            features.truncate(len);
            assert_holds(&features, 4..len.min(10));
            features.push(run(len.min(10)..13));
            assert_holds(&features, 4..13);
        }
        for len in 0..=4 {
            let mut features = example();
            features.truncate(len);
            features.push(run(len..13));
            assert_holds(&features, len..13);
        }
    }

    #[test]
    fn the_features_of_a_path_are_kept_unless_they_were_released() {
        let kept = |path: &[usize], released| {
            let mut features = example();
            features.release_before(released);
            features.keep(5, path);
            features
        };
        for released in [4, 5] {
            let features = kept(&[0, 2, 4], released);
            let [found] = Rows::to_host([features.since(5)]).expect("brought");
            assert_eq!(found, [5.0, -5.0, 7.0, -7.0, 9.0, -9.0]);
            assert_holds(&kept(&[0, 1], released), 5..7);
            assert_holds(&kept(&[], 4), 4..5);
        }
        // Released positions are not restored, and new rows follow the kept ones.
        let mut features = kept(&[1, 3, 4], 9);
        assert_eq!((features.start, features.runs.len()), (7, 1));
        features.push(run(8..10));
        let [found] = Rows::to_host([features.since(7)]).expect("brought");
        assert_eq!(found, [9.0, -9.0, 8.0, -8.0, 9.0, -9.0]);
    }

    #[test]
    fn a_run_is_released_once_the_position_is_past_its_end() {
        let held = |position| {
            let mut features = example();
            features.release_before(position);
            (features.start, features.runs.len())
        };
        assert_eq!([held(4), held(5), held(8)], [(4, 3), (5, 2), (5, 2)]);
        assert_eq!([held(9), held(10), held(11)], [(9, 1), (10, 0), (10, 0)]);
    }

    #[test]
    #[should_panic(expected = "were released")]
    fn released_features_cannot_be_read() {
        let mut features = example();
        features.release_before(9);
        features.since(8);
    }
}
