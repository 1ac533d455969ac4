use super::*;
use crate::{Sampling, SeededDraws};

fn shape(text: &str) -> TreeShape {
    text.parse().expect("a shape")
}

/// Logits with this softmax.
fn logits(probs: &[f64]) -> Vec<f32> {
    probs.iter().map(|prob| prob.ln() as f32).collect()
}

/// Grows a tree with a chain of `chain_len` for a drafter with one distribution. Returns the
/// proposal and the number of nodes read.
fn grown(
    shape: TreeShape,
    probs: &[f64],
    chain_len: usize,
    decoding: &Decoding,
    draws: &mut dyn Draws,
) -> (Proposal, usize) {
    let logits = logits(probs);
    let (mut growth, mut proposal, mut tokens) =
        (TreeGrowth::new(shape), Proposal::default(), Vec::new());
    let mut num_read = 0;
    for _ in 0..chain_len {
        let read = num_read..proposal.len();
        growth.extend_chain(&logits, decoding, draws);
        // The first is the chain's.
        read.clone().skip(1).for_each(|node| growth.branch(node, &logits, decoding, draws));
        num_read = proposal.len();
        let num_next = growth.read_next(&[9], &mut proposal, &mut tokens);
        assert!((1..=usize::from(shape.num_read)).contains(&num_next));
    }
    growth.finish(&mut proposal, &mut tokens);
    let of_nodes: Vec<u32> = proposal.nodes().iter().map(|node| node.token_id).collect();
    assert_eq!(tokens, of_nodes);
    (proposal, num_read)
}

/// The tokens on the path to each node.
fn paths(proposal: &Proposal) -> Vec<Vec<u32>> {
    let nodes = proposal.nodes();
    let path = |node: usize| {
        let up = std::iter::successors(Some(node), |at| nodes[*at].parent);
        let mut path: Vec<u32> = up.map(|at| nodes[at].token_id).collect();
        path.reverse();
        path
    };
    (0..nodes.len()).map(path).collect()
}

const PROBS: [f64; 4] = [0.2, 0.5, 0.0, 0.3];

#[test]
fn shapes_are_read_only_as_they_are_written() {
    for text in ["1x1x0", "3-2-1x4x12", "2x6x300-drawn", "1-2-3-4-5-6-7-8x1x5"] {
        assert_eq!(shape(text).to_string(), text);
    }
    for text in [
        "",
        "2-1",
        "2x1x3-head",
        "3x4",
        "x1x1",
        "0x1x1",
        "2-0x1x1",
        "2x0x1",
        "02x1x1",
        "2x1x1 ",
        "2x1x1-top",
        "1-2-3-4-5-6-7-8-9x1x5",
        "999x1x1",
        "2x-1x1",
    ] {
        let message = text.parse::<TreeShape>().unwrap_err().to_string();
        assert!(message.starts_with("a tree is written as its widths by depth"), "{text}");
    }
}

#[test]
fn a_tree_of_width_one_is_its_chain() {
    let draws = &mut SeededDraws::new(1, &["tree"]);
    let (proposal, num_read) = grown(shape("1x4x20"), &PROBS, 3, &Decoding::GREEDY, draws);
    assert_eq!((paths(&proposal).last(), num_read), (Some(&vec![1, 1, 1]), 2));
    assert!(proposal.is_chain());
}

#[test]
fn a_chain_has_its_siblings_if_nothing_else_is_read() {
    let draws = &mut SeededDraws::new(1, &["tree"]);
    let (proposal, _) = grown(shape("3-2x1x9"), &PROBS, 2, &Decoding::GREEDY, draws);
    // Token 2 has probability 0. The most probable nodes follow the chain.
    let expected: [&[u32]; 5] = [&[1], &[1, 1], &[3], &[0], &[1, 3]];
    assert_eq!(paths(&proposal), expected);
    let ranks: Vec<usize> = proposal.nodes().iter().map(|node| node.rank).collect();
    assert_eq!(ranks, [0, 0, 1, 2, 1]);
    let (proposal, _) = grown(shape("3-2x1x2"), &PROBS, 2, &Decoding::GREEDY, draws);
    assert_eq!(paths(&proposal), expected[..4]);
}

#[test]
fn the_most_probable_nodes_are_read_and_come_first() {
    let draws = &mut SeededDraws::new(1, &["tree"]);
    let (proposal, num_read) = grown(shape("3x2x4"), &PROBS, 3, &Decoding::GREEDY, draws);
    // Read: 1 and 3, then 1 1 and the most probable of 0 (0.2), 1 3, 3 1 (0.15).
    let expected: [&[u32]; 7] = [&[1], &[3], &[1, 1], &[0], &[1, 1, 1], &[1, 3], &[3, 1]];
    assert_eq!((paths(&proposal), num_read), (expected.map(<[u32]>::to_vec).to_vec(), 4));
}

#[test]
fn an_end_token_is_proposed_and_never_read() {
    let draws = &mut SeededDraws::new(1, &["tree"]);
    let mut probs = [0.02; 10];
    (probs[1], probs[9]) = (0.5, 0.34);
    let (proposal, _) = grown(shape("2x2x3"), &probs, 2, &Decoding::GREEDY, draws);
    let paths = paths(&proposal);
    assert!(paths.contains(&vec![9]) && paths.iter().all(|path| path[0] != 9 || path.len() == 1));
}

#[test]
fn drawn_children_are_proposed_with_the_renormalised_rest() {
    let decoding = Decoding::sampled(Sampling::default());
    for seed in 0..50 {
        let draws = &mut SeededDraws::new(seed, &["tree"]);
        let (proposal, num_read) = grown(shape("3x2x5-drawn"), &PROBS, 3, &decoding, draws);
        let beside = proposal.len() - 3;
        assert!(beside <= 5 && num_read >= 2, "{beside}");
        for parent in std::iter::once(None).chain((0..proposal.len()).map(Some)) {
            let mut left = PROBS.to_vec();
            for (rank, (_, node)) in proposal.children(parent).enumerate() {
                assert_eq!(node.rank, rank);
                let total: f64 = left.iter().sum();
                let DrawnFrom::Probs(q) = &node.drawn_from else { panic!("drawn") };
                for (q, left) in q.iter().zip(&left) {
                    // Logits are f32.
                    assert!((q - left / total).abs() < 1e-6);
                }
                left[node.token_id as usize] = 0.0;
            }
        }
        // One-hot children of the same drafter.
        let (top, _) = grown(shape("3x2x5"), &PROBS, 3, &decoding, draws);
        assert!(top.nodes().iter().all(|node| node.drawn_from == DrawnFrom::OneHot));
        assert_eq!(top.len(), 8);
    }
}
