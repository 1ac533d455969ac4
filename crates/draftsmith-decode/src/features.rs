//! Hidden states at an exit layer, kept until all who read them have.
//!
//! They stay in the runs they were computed in: a draft step appends one row and reads one row, so
//! nothing is copied or cut until a verification lays a round's runs end to end.

use draftsmith_model::Rows;

/// The features that a drafter wants of a sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WantedFeatures<'a> {
    pub(crate) slot: usize,
    /// The whole sequence.
    pub(crate) tokens: &'a [u32],
    /// What the last of them follow, where those form a tree.
    pub(crate) parents: &'a [Option<usize>],
    /// The first position.
    pub(crate) from: usize,
}

/// The features of a stretch of positions of one sequence.
#[derive(Debug)]
pub(crate) struct Features {
    /// The first position held, or to be held.
    start: usize,
    /// One after another.
    runs: Vec<Rows>,
}

impl Features {
    /// None yet; the first to come is that of position `start`.
    pub(crate) fn new(start: usize) -> Self {
        Self { start, runs: Vec::new() }
    }

    /// Appends the features of the positions that follow.
    pub(crate) fn push(&mut self, run: Rows) {
        self.runs.push(run);
    }

    /// One position behind the last that came and was not forgotten.
    pub(crate) fn end(&self) -> usize {
        self.start + self.runs.iter().map(Rows::num_rows).sum::<usize>()
    }

    /// The features of all positions from `from` on.
    ///
    /// # Panics
    /// If there is none, or that of `from` is no longer held.
    pub(crate) fn since(&self, from: usize) -> Rows {
        assert!(from >= self.start, "the features of position {from} are no longer held");
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

    /// Lets go of positions before `position`, as far as whole runs lie before it.
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

    /// Keeps of the positions from `num_standing` on those on `path`, counted from there, one behind
    /// the other; what is no longer held of them stays so.
    ///
    /// # Panics
    /// Unless the path's numbers rise.
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

    /// The features of one position.
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

    /// Forgets all positions from `len` on.
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

    /// Rows that say which position they are of.
    fn run(positions: std::ops::Range<usize>) -> Rows {
        let shape = [1, positions.len(), 2];
        let values: Vec<f32> = positions.flat_map(|at| [at as f32, -(at as f32)]).collect();
        Tensor::<3>::from_data(TensorData::new(values, shape), &Device::flex()).into()
    }

    fn assert_holds(features: &Features, positions: std::ops::Range<usize>) {
        let found = features.since(positions.start);
        let [found, expected] = Rows::to_host([found, run(positions)]).expect("brought");
        assert_eq!(found, expected);
    }

    fn example() -> Features {
        let mut features = Features::new(4);
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
    fn truncating_anywhere_is_never_having_appended() {
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
    fn a_path_is_kept_as_far_as_it_is_held() {
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
        // Of what was let go nothing comes back, and what follows stands behind it.
        let mut features = kept(&[1, 3, 4], 9);
        assert_eq!((features.start, features.runs.len()), (7, 1));
        features.push(run(8..10));
        let [found] = Rows::to_host([features.since(7)]).expect("brought");
        assert_eq!(found, [9.0, -9.0, 8.0, -8.0, 9.0, -9.0]);
    }

    #[test]
    fn runs_go_when_they_are_over() {
        let held = |position| {
            let mut features = example();
            features.release_before(position);
            (features.start, features.runs.len())
        };
        assert_eq!([held(4), held(5), held(8)], [(4, 3), (5, 2), (5, 2)]);
        assert_eq!([held(9), held(10), held(11)], [(9, 1), (10, 0), (10, 0)]);
    }

    #[test]
    #[should_panic(expected = "no longer held")]
    fn what_was_let_go_cannot_be_read() {
        let mut features = example();
        features.release_before(9);
        features.since(8);
    }
}
