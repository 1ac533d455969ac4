//! Static tree shapes that grow node by node by the paths of recorded responses.
//!
//! From every position of a response, the ranks of the next tokens form a path. The expected tokens per
//! round of a shape are 1 plus the sum of its paths' shares of positions, so the most frequent path adds
//! most. Medusa grows shapes likewise by its heads' accuracies, assumed independent (Cai et al. 2024),
//! and Sequoia by the acceptance rate of each rank, assumed equal at all positions (Chen et al. 2024).
//! We count whole paths. A shape holds a child only together with the siblings before it.

use std::collections::HashMap;

use super::{Recording, Recordings};
use crate::{MAX_CHILDREN, TreeShape};

/// The number of positions from which responses follow each path.
type PathCounts = HashMap<Vec<u8>, usize>;

impl Recordings {
    /// Shapes of 1, 2, … nodes and at most `max_depth`. Each adds to the previous one the most frequent
    /// path that may be added. Empty if no response token is among the drafter's, or if ranks were not
    /// recorded.
    pub fn likely_shapes(&self, max_depth: usize) -> Vec<TreeShape> {
        let mut counted = PathCounts::new();
        self.responses.iter().for_each(|response| count(response, max_depth, &mut counted));
        let of = |path: Vec<u8>| counted.get(&path).map(|count| (*count, path));
        let mut open: Vec<(usize, Vec<u8>)> = of(vec![0]).into_iter().collect();
        let (mut paths, mut shapes) = (Vec::new(), Vec::new());
        // Among equals, the first that could be added.
        while let Some(best) = (0..open.len()).rev().max_by_key(|at| open[*at].0) {
            let (_, path) = open.remove(best);
            let mut sibling = path.clone();
            if let Some(rank) = sibling.last_mut() {
                *rank += 1;
            }
            let child = [&path[..], &[0]].concat();
            open.extend([sibling, child].into_iter().filter_map(of));
            paths.push(path);
            match TreeShape::of_paths(&paths) {
                Ok(shape) => shapes.push(shape),
                // The shape is full.
                Err(_) => break,
            }
        }
        shapes
    }
}

/// Counts the paths of up to `max_depth` from each position of a response.
fn count(response: &Recording, max_depth: usize, counted: &mut PathCounts) {
    for start in 0..response.places.len() {
        // The last token within the limit has no candidate.
        let room = response.limit - start - 1;
        let places = response.places[start..].iter().take(room.min(max_depth));
        let ranks = places.map_while(|place| place.draft_rank.filter(|rank| *rank < MAX_CHILDREN));
        let path: Vec<u8> = ranks.map(|rank| rank as u8).collect();
        for depth in 1..=path.len() {
            *counted.entry(path[..depth].to_vec()).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::test_recordings::random;

    /// Responses with tokens of these ranks.
    fn ranked(responses: &[&[u32]]) -> Recordings {
        let any = random(1, 1, 0.5);
        let place = any.responses[0].places[0].clone();
        let of_response = |ranks: &&[u32]| {
            let places = ranks.iter().map(|rank| {
                let mut place = place.clone();
                place.draft_rank = Some(*rank);
                place
            });
            Recording::new(vec![1], places.collect(), ranks.len() + 1)
        };
        Recordings { responses: responses.iter().map(of_response).collect(), ..any }
    }

    fn texts(shapes: &[TreeShape]) -> Vec<String> {
        shapes.iter().map(TreeShape::to_string).collect()
    }

    #[test]
    fn the_most_frequent_path_comes_next() {
        let recordings = ranked(&[&[0, 0, 1, 0], &[0, 1, 0], &[2, 0], &[64, 1]]);
        // By positions: 6 of rank 0, 3 of rank 1, 1 of rank 2; after rank 0 twice 1 and once 0; after
        // rank 1 twice 0; after rank 2 once 0.
        let found = texts(&recordings.likely_shapes(2));
        assert_eq!(
            found,
            ["1", "2", "2-0.1", "2-1.1", "2-2.1", "3-2.1", "3-2.1.1"].map(str::to_owned)
        );
        assert_eq!(texts(&recordings.likely_shapes(1)), ["1", "2", "3"]);
    }

    #[test]
    fn shapes_respect_the_maximum_depth_and_number_of_nodes() {
        let recordings = random(2, 60, 0.6);
        for max_depth in 1..=8 {
            let shapes = recordings.likely_shapes(max_depth);
            assert!(
                shapes.iter().all(|shape| shape.depth().is_some_and(|depth| depth <= max_depth))
            );
            assert!(shapes.windows(2).all(|two| two[0] != two[1]) && shapes.len() <= 64);
        }
        assert_eq!(recordings.likely_shapes(8).len(), 64);
        let mut unranked = recordings.clone();
        for response in &mut unranked.responses {
            for place in std::sync::Arc::make_mut(&mut response.places) {
                place.draft_rank = None;
            }
        }
        assert_eq!(unranked.likely_shapes(8), []);
        // The last token within the limit has no candidate.
        let mut full = ranked(&[&[0, 0, 0]]);
        full.responses[0].limit = 3;
        assert_eq!(texts(&full.likely_shapes(8)), ["1", "1-1"]);
    }
}
