//! A tree in a cache: each node's logits equal those of its path read as a chain, and one path can
//! be kept.

use super::{assert_close, logits_of};
use crate::causal_lm::CausalLm;
use crate::fixtures::{FIXTURES, expected, load};

/// ```text
/// 0 ─ 1 ─ 4 ─ 6
///   │   └ 5
///   └ 2
/// 3 ─ 7
/// ```
/// Two forwards of the draft read it: nodes 0 to 3, then the others.
const PARENTS: [Option<usize>; 8] =
    [None, Some(0), Some(0), None, Some(1), Some(1), Some(4), Some(3)];
const PATHS: [&[usize]; 6] = [&[], &[0, 1, 4, 6], &[0, 1, 5], &[0, 2], &[3, 7], &[3]];

/// The nodes from the root to `node`.
fn path_to(node: usize) -> Vec<usize> {
    let mut path = PARENTS[node].map(path_to).unwrap_or_default();
    path.push(node);
    path
}

/// Logits of each of `new`, read after `standing` from an empty cache.
fn alone(model: &CausalLm, standing: &[u32], new: &[u32]) -> Vec<f32> {
    let layers = 0..model.shape().num_layers;
    let mut cache = model.new_cache(64, 1);
    let ids = [standing, new].concat();
    let hidden = model.forward_layers(layers, model.embed_ids(&ids), &mut cache);
    logits_of(model, hidden.last(new.len()))
}

#[test]
fn each_tree_node_equals_its_path_as_a_chain_and_any_path_can_be_kept() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool");
    for name in FIXTURES {
        let (model, expected) = (load(name), expected(name));
        let on_tensors = model.to_tensors();
        let nodes: Vec<u32> = (0..8).map(|node| 3 + 7 * node).collect();
        for model in [&model, &on_tensors] {
            for path in PATHS {
                // More tokens than the fixtures' window holds, and fewer.
                for standing in [&expected.ids[..3], &expected.ids[..]] {
                    reads_and_keeps(name, model, standing, &nodes, path);
                    pool.install(|| reads_and_keeps(name, model, standing, &nodes, path));
                }
            }
        }
    }
}

fn reads_and_keeps(name: &str, model: &CausalLm, standing: &[u32], nodes: &[u32], path: &[usize]) {
    let (num_layers, slot) = (model.shape().num_layers, 1);
    let tokens =
        |nodes_of: &[usize]| -> Vec<u32> { nodes_of.iter().map(|node| nodes[*node]).collect() };
    let mut cache = model.new_cache(standing.len() + 6, 3);
    let (before, last) = standing.split_at(standing.len() - 1);
    model.fill_cache(0, model.embed_ids(before).in_slot(slot), &mut cache);
    // Another slot holds a chain. There are two forwards; the first includes the last token before
    // the tree.
    let mut found = Vec::new();
    for (new, known) in [(0..4, 4), (4..8, 8)] {
        cache.branch(slot, standing.len(), &PARENTS[..known]);
        let last = if new.start == 0 { last } else { &[] };
        let own = [last, &nodes[new]].concat();
        let hidden = model.embed_runs(&[(0, &[5, 6]), (slot, &own)]);
        let hidden = model.forward_layers(0..num_layers, hidden, &mut cache);
        found.extend(logits_of(model, hidden.slice(2..2 + own.len())));
    }
    let vocab_size = model.shape().vocab_size;
    let rows: Vec<&[f32]> = found.chunks_exact(vocab_size).collect();
    assert_close(rows[0], &alone(model, before, last), name);
    for node in 0..nodes.len() {
        let of_path = alone(model, standing, &tokens(&path_to(node)));
        let expected = &of_path[of_path.len() - vocab_size..];
        assert_close(rows[node + 1], expected, &format!("{name}: node {node}"));
    }
    cache.keep(slot, standing.len(), path);
    assert_eq!(cache.len(slot, num_layers - 1), standing.len() + path.len());
    let kept = [standing, &tokens(path)].concat();
    let hidden = model.embed_ids(&[9, 11]).in_slot(slot);
    let hidden = model.forward_layers(0..num_layers, hidden, &mut cache);
    let expected = alone(model, &kept, &[9, 11]);
    assert_close(&logits_of(model, hidden), &expected, &format!("{name}: behind {path:?}"));
}

#[test]
fn a_path_is_kept_as_far_as_each_layer_has_read_it() {
    for name in [FIXTURES[0], FIXTURES[5]] {
        let model = load(name);
        for model in [&model, &model.to_tensors()] {
            let num_layers = model.shape().num_layers;
            let mut cache = model.new_cache(16, 1);
            // The first layer is ahead of the others, from node 3 on.
            cache.branch(0, 1, &PARENTS);
            let hidden = model.forward_layers(0..1, model.embed_ids(&[7, 1, 2, 3]), &mut cache);
            model.forward_layers(1..num_layers, hidden, &mut cache);
            model.forward_layers(0..1, model.embed_ids(&[4, 5]), &mut cache);
            cache.keep(0, 1, &[0, 1, 4, 6]);
            let lens = [0, 1].map(|layer| cache.len(0, layer));
            assert_eq!(lens, [4, 3], "{name}");
        }
    }
}
