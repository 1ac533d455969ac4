//! Trees of models: greedy output is plain greedy output, and a node's row equals the row after the node's
//! path read as a chain.

use draftsmith_theory::{SignalNeeds, TreeShape};

use super::with_head::{all_reads, head};
use super::*;
use crate::tree_draft::TreeDraft;

const SHAPES: [&str; 4] = ["2x1x4", "3-2x3x12", "4x4x8", "2x9x40"];

fn shape(text: &str) -> TreeShape {
    text.parse().expect("a shape")
}

/// Decodes greedily with trees. Counts the rounds that proposed more than a chain and accepted a candidate.
fn assert_trees_are_plain(
    model: &CausalLm,
    adapter: &Adapter,
    exit_layer: usize,
    num_branched: &mut usize,
) {
    for (prompt, max_new_tokens) in prompts().iter().zip([3, 40, 40, 80]) {
        let limits = Limits::new(max_new_tokens, vec![]);
        let context = prompt.len() + 44;
        let plain = greedy_plain(&mut ModelSession::new(model, context, "target"), prompt, &limits);
        let mut session = session_with_exit(model, exit_layer, context);
        let mut self_draft = SelfDraft::new(model, adapter, exit_layer, None, context, 1);
        let mut separate = SeparateDraft::new(model, None, 96, context, 1);
        for shape in SHAPES.map(shape) {
            for length in [1, 3, 6] {
                let rule = &mut FixedLengthConfig { candidate_length: length };
                let drafter = &mut TreeDraft::new(&mut self_draft, shape);
                let found = greedy(&mut session, drafter, rule, prompt, &limits);
                assert_eq!(found.token_ids, plain.token_ids, "{shape}");
                let rounds = &found.trace.rounds;
                let is_branched = |round: &&draftsmith_theory::Round| {
                    round.num_accepted > 0 && round.num_drafted > length
                };
                *num_branched += rounds.iter().filter(is_branched).count();
                let drafter = &mut TreeDraft::new(&mut separate, shape);
                let found = greedy(&mut session, drafter, rule, prompt, &limits);
                assert_eq!(found.token_ids, plain.token_ids, "{shape}");
            }
        }
    }
}

#[test]
fn greedy_output_of_trees_is_plain_greedy_output_in_every_family() {
    let mut num_branched = 0;
    for name in FAMILIES {
        let model = target_of(name);
        let exit_layer = exit_layer_of(&model);
        let name = format!("tree-{name}");
        let near = adapter(&model, AdapterArchitecture::Attention, exit_layer, 0.02, &name);
        assert_trees_are_plain(&model, &near, exit_layer, &mut num_branched);
        assert_trees_are_plain(&model, &near, 0, &mut num_branched);
        let far = adapter(&model, AdapterArchitecture::DecoderLayer, exit_layer, 0.5, &name);
        assert_trees_are_plain(&model, &far, exit_layer, &mut num_branched);
        let device = Device::flex();
        device.seed(3);
        let drawn = model.config().init(&device);
        let config = config_of(&drawn, AdapterArchitecture::MlpOnly, exit_layer);
        assert_trees_are_plain(&drawn, &config.init(&device), exit_layer, &mut num_branched);
    }
    assert!(num_branched > 500, "{num_branched}");
}

/// ```text
/// 0 ─ 1 ─ 4
///   │   └ 5
///   └ 3
/// 2
/// ```
/// The parents of this tree's nodes. The drafter reads it in three steps after the sequence: node
/// 0, nodes 1 to 3, and nodes 4 and 5.
const PARENTS: [Option<usize>; 6] = [None, Some(0), None, Some(0), Some(1), Some(1)];
const STEPS: [std::ops::Range<usize>; 4] = [0..0, 0..1, 1..4, 4..6];

fn path_to(node: usize) -> Vec<usize> {
    let mut path = PARENTS[node].map(path_to).unwrap_or_default();
    path.push(node);
    path
}

/// Compares a drafter's rows and predictions after each node with those after the node's path as a chain.
fn assert_nodes_are_their_paths<T: Target>(
    target: &mut T,
    drafter: &mut impl StepDrafter<T>,
    what: &str,
) {
    const STANDING: [u32; 4] = [5, 17, 42, 9];
    let needs = SignalNeeds { acceptance_prob: true, entropy: true, ..SignalNeeds::default() };
    let nodes: Vec<u32> = (0..6).map(|node| 11 + 13 * node).collect();
    let begin = |target: &mut T, drafter: &mut dyn StepDrafter<T>| {
        target.begin(0, &STANDING).expect("fits");
        drafter.begin(target, 0, &STANDING).expect("fits");
    };
    let (candidate, decoding) = (7, &Decoding::GREEDY);
    begin(target, drafter);
    let mut of_nodes = Vec::new();
    for new in STEPS {
        let tokens = [&STANDING[..], &nodes[..new.end]].concat();
        let parents = &PARENTS[..new.end];
        let num_rows = new.len().max(1);
        let num_candidates = new.end;
        let step = DraftStep {
            slot: 0,
            tokens: &tokens,
            num_candidates,
            parents,
            num_rows,
            most: usize::MAX,
            needs,
            decoding,
        };
        let drafted = drafter.draft(target, &[step]).expect("finite");
        assert_eq!(drafted.len(), num_rows);
        for (row, drafted) in drafted.into_iter().enumerate() {
            let ahead = drafter.predict_acceptance((0, row), &drafted.own_logits, candidate);
            of_nodes.push((drafted, ahead.expect("finite")));
        }
    }
    for (nth, (found, ahead)) in of_nodes.iter().enumerate() {
        let path = nth.checked_sub(1).map(path_to).unwrap_or_default();
        begin(target, drafter);
        let mut tokens = STANDING.to_vec();
        let mut expected = None;
        for len in 0..=path.len() {
            tokens.extend(len.checked_sub(1).map(|last| nodes[path[last]]));
            let step = DraftStep::in_chain(0, &tokens, len, needs, decoding);
            let drafted = drafter.draft(target, &[step]).expect("finite").remove(0);
            let ahead = drafter.predict_acceptance((0, 0), &drafted.own_logits, candidate);
            expected = Some((drafted, ahead.expect("finite")));
        }
        let (expected, expected_ahead) = expected.expect("a step");
        for (found, expected) in found.own_logits.iter().zip(&expected.own_logits) {
            // Sums of f32 in another order, of numbers near 1.
            assert!((found - expected).abs() <= 2e-5 * expected.abs().max(1.0), "{what} {nth}");
        }
        let read = [found, &expected].map(|drafted| match drafted.signals.acceptance_prob {
            Some(draftsmith_theory::HeadEstimate::OfRead(prob)) => Some(prob),
            _ => None,
        });
        for [found, expected] in [read, [*ahead, expected_ahead]] {
            assert_eq!(found.is_some(), expected.is_some(), "{what} {nth}");
            if let Some((found, expected)) = found.zip(expected) {
                assert!((found - expected).abs() < 1e-5, "{what} {nth}: {found} for {expected}");
            }
        }
    }
}

#[test]
fn a_draft_and_its_head_give_the_same_for_a_node_as_for_its_path() {
    let model = target();
    let exit_layer = exit_layer_of(&model);
    let adapter =
        adapter(&model, AdapterArchitecture::DecoderLayer, exit_layer, 0.1, "tree-of-paths");
    for (nth, reads) in all_reads().iter().enumerate() {
        let head = head(&model, reads, &format!("tree-{nth}"));
        let what = format!("{reads:?}");
        let mut session = session_with_exit(&model, exit_layer, 32);
        let mut self_draft = SelfDraft::new(&model, &adapter, exit_layer, Some(&head), 32, 1);
        assert_nodes_are_their_paths(&mut session, &mut self_draft, &what);
        let mut session = ModelSession::new(&model, 32, "target");
        let mut separate = SeparateDraft::new(&model, Some(&head), 96, 32, 1);
        assert_nodes_are_their_paths(&mut session, &mut separate, &what);
    }
}
