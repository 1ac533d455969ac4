//! Blocks equal those of a plain computation in f64, however the contexts arrive, and files in every
//! form give the same drafter.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde_json::{Map, Value};

use super::*;
use crate::buckets::Lengths;
use crate::config::ModelConfig;
use crate::draft_vocabulary::DraftVocabulary;
use crate::error::Result;
use crate::fixtures::{FIXTURES, expected, load};
use crate::spec::ModelShape;
use crate::state_network::{CachedNetwork, StateNetwork, UnrolledInputs};
use crate::weights::{NamedTensor, WeightDtype, write_with_ids};

const VOCAB: usize = 24;
const WIDTH: usize = 16;
const MASK: u32 = 23;

/// The properties in which drafters of these tests differ.
#[derive(Debug, Clone, Copy)]
struct Form {
    is_anchor_first: bool,
    is_causal: bool,
    markov_rank: usize,
    confidence: ConfidenceHead,
    draft_vocabulary: Option<[u32; 3]>,
    /// The size of the window, the layers that have it, and whether their rows see later ones.
    window: Option<(usize, [bool; 2], bool)>,
}

const OURS: Form = Form {
    is_anchor_first: true,
    is_causal: true,
    markov_rank: 4,
    confidence: ConfidenceHead::OfRowAndToken,
    draft_vocabulary: None,
    window: None,
};

/// Ours, a DFlash of z-lab, a DSpark of DeepSpec, one of a part of the vocabulary, a DFlash with a
/// confidence head, and windows: ours, those of z-lab's and MiMo's files, and one shorter than a block.
const FORMS: [Form; 9] = [
    OURS,
    Form {
        is_anchor_first: false,
        is_causal: false,
        markov_rank: 0,
        confidence: ConfidenceHead::Absent,
        ..OURS
    },
    Form { is_causal: false, ..OURS },
    Form { draft_vocabulary: Some([5, 1, 2]), ..OURS },
    Form { is_anchor_first: false, markov_rank: 0, confidence: ConfidenceHead::OfRow, ..OURS },
    Form { window: Some((6, [true, true], false)), ..OURS },
    Form { is_causal: false, window: Some((7, [true, false], false)), ..OURS },
    Form { is_causal: false, window: Some((6, [true, true], true)), ..OURS },
    Form { is_causal: false, window: Some((3, [false, true], true)), ..OURS },
];

/// A target, the drafter's configuration, and the drafter as it is read: packed, and with tensors.
struct Models {
    target: CausalLm,
    config: BlockDrafterConfig,
    packed: BlockDrafter,
    tensors: BlockDrafter,
}

fn models(form: Form) -> Models {
    let shape = ModelShape {
        vocab_size: VOCAB,
        hidden_size: WIDTH,
        num_layers: 5,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 4,
        context: 64,
        bos_token_id: None,
        eos_token_ids: vec![],
    };
    let config = ModelConfig::llama(shape, 24);
    let target = config.init(&Device::flex());
    let config = BlockDrafterConfig::new(&config, 2, MASK).with(|it| {
        it.target_layers = vec![0, 2, 5];
        it.block_size = 5;
        it.is_anchor_first = form.is_anchor_first;
        it.is_causal = form.is_causal;
        it.markov_rank = form.markov_rank;
        it.confidence = form.confidence;
        it.draft_vocabulary = form.draft_vocabulary.map(DraftVocabulary::new);
        it.set_window(form.window.map(|(size, ..)| size));
        if let Some((window, (_, layers, sees_ahead))) =
            it.model.spec.window.as_mut().zip(form.window)
        {
            (window.layers, window.sees_ahead) = (layers.to_vec(), sees_ahead);
        }
    });
    let dir = tempfile::tempdir().unwrap();
    config.init(&Device::flex()).write_dir(dir.path(), &config).unwrap();
    let (found, packed) = read(dir.path(), target.shape()).unwrap();
    assert_eq!(found, config, "it is written as it is read");
    let tensors = packed.to_tensors();
    Models { target, config, packed, tensors }
}

fn read(dir: &Path, target: &ModelShape) -> Result<(BlockDrafterConfig, BlockDrafter)> {
    BlockDrafter::from_dir(dir, target, WeightDtype::F32, &Device::flex())
}

fn values(rows: Rows) -> Vec<f32> {
    let [values] = Rows::to_host([rows]).unwrap();
    values
}

#[track_caller]
fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        // Sums of f32 in different orders, through two layers.
        let is_near = (found - expected).abs() < 2e-4 * expected.abs().max(1.0);
        assert!(is_near || expected.max(*found) < -1e29, "{what}: {found} for {expected}");
    }
}

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|n| (n * 7 + 3) % 22).collect()
}

/// The target's hidden states of a text that the drafter reads.
fn states(target: &CausalLm, layers: &[usize], ids: &[u32]) -> Vec<Rows> {
    let mut cache = target.new_cache(ids.len(), 1);
    let (mut hidden, mut at) = (target.embed_ids(ids), 0);
    let states = layers.iter().map(|layer| {
        hidden = target.forward_layers(at..*layer, hidden.clone(), &mut cache);
        at = *layer;
        hidden.clone()
    });
    states.collect()
}

/// What a block gives: the rows after the norm, the logits after `tokens`, and the confidences.
type Found = [Vec<f32>; 3];

fn finish(models: &Models, drafter: &BlockDrafter, normed: &Rows, tokens: &[u32]) -> Found {
    let tokens = &tokens[..normed.num_rows()];
    let logits = drafter.after_tokens(drafter.logits(normed, &models.target), tokens);
    let confidence = drafter.confidence_logits(normed, tokens);
    [values(normed.clone()), values(logits), confidence.map(values).unwrap_or_default()]
}

/// Runs a block after a text. `tokens` are the anchor and the candidates. The contexts are read in
/// parts that end at `cuts`.
fn block(
    models: &Models,
    drafter: &BlockDrafter,
    (ids, cuts): (&[u32], &[usize]),
    (tokens, num_candidates): (&[u32], usize),
) -> Found {
    let mut cache = drafter.new_cache(48, 1);
    let mut start = 0;
    // Nothing comes before the first token of a text.
    let states = (!ids.is_empty())
        .then(|| states(&models.target, &models.config.target_layers, ids))
        .map(|states| drafter.contexts(&states));
    if let Some(contexts) = states {
        for end in cuts.iter().copied().chain([ids.len()]) {
            if end > start {
                drafter.read_contexts(contexts.slice(start..end), &mut cache);
            }
            start = end;
        }
    }
    let start = BlockStart { slot: 0, anchor: tokens[0], num_candidates };
    let normed = drafter.forward_blocks(&models.target, &[start], &mut cache);
    let again = drafter.forward_blocks(&models.target, &[start], &mut cache);
    assert_eq!(values(normed.clone()), values(again), "a block leaves nothing behind");
    finish(models, drafter, &normed, tokens)
}

/// Computes a block in f64 from the tensors of the file, one number after another.
mod plain {
    use super::*;

    type Matrix = Vec<Vec<f64>>;

    struct Weights(BTreeMap<String, Matrix>);

    impl Weights {
        fn of(&self, name: &str) -> &Matrix {
            &self.0[&format!("{name}.weight")]
        }

        fn times(&self, name: &str, x: &[f64]) -> Vec<f64> {
            self.of(name).iter().map(|row| dot(row, x)).collect()
        }

        fn normed(&self, name: &str, x: &[f64]) -> Vec<f64> {
            let size = (dot(x, x) / x.len() as f64 + 1e-5).sqrt();
            let gamma = self.of(name).iter().map(|row| row[0]);
            x.iter().zip(gamma).map(|(x, gamma)| x / size * gamma).collect()
        }

        /// Projects to heads of 4 channels, norms and rotates them.
        fn heads(&self, layer: &str, what: &str, x: &[f64], position: Option<usize>) -> Matrix {
            let projected = self.times(&format!("{layer}.self_attn.{what}_proj"), x);
            let heads = projected.chunks(4).map(<[f64]>::to_vec);
            let Some(position) = position else { return heads.collect() };
            let rotated = heads.map(|head| {
                let head = self.normed(&format!("{layer}.self_attn.{what}_norm"), &head);
                let (sin, cos): (Vec<f64>, Vec<f64>) =
                    [1.0, 0.01].map(|f| (position as f64 * f).sin_cos()).into_iter().unzip();
                let turned = |n: usize| match n {
                    0 | 1 => head[n] * cos[n] - head[n + 2] * sin[n],
                    _ => head[n] * cos[n - 2] + head[n - 2] * sin[n - 2],
                };
                (0..4).map(turned).collect()
            });
            rotated.collect()
        }
    }

    fn dot(x: &[f64], y: &[f64]) -> f64 {
        x.iter().zip(y).map(|(x, y)| x * y).sum()
    }

    fn softmax(scores: &[f64]) -> Vec<f64> {
        let total: f64 = scores.iter().map(|score| score.exp()).sum();
        scores.iter().map(|score| score.exp() / total).collect()
    }

    fn plus(x: &[f64], y: &[f64]) -> Vec<f64> {
        x.iter().zip(y).map(|(x, y)| x + y).collect()
    }

    fn rows(rows: Rows, width: usize) -> Matrix {
        let wide: Vec<f64> = values(rows).into_iter().map(f64::from).collect();
        wide.chunks(width).map(<[f64]>::to_vec).collect()
    }

    pub(super) fn block(models: &Models, ids: &[u32], tokens: &[u32], num_rows: usize) -> Found {
        let Models { target, config, tensors, .. } = models;
        let named = tensors.named(config).into_iter().map(|NamedTensor { name, shape, values }| {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            let width = shape.get(1).copied().unwrap_or(1);
            (name, values.chunks(width).map(<[f64]>::to_vec).collect())
        });
        let weights = Weights(named.collect());
        let states = match ids {
            [] => Vec::new(),
            _ => states(target, &config.target_layers, ids),
        };
        let states: Vec<Matrix> = states.into_iter().map(|state| rows(state, WIDTH)).collect();
        let contexts: Matrix = (0..ids.len())
            .map(|at| {
                let read: Vec<f64> = states.iter().flat_map(|state| state[at].clone()).collect();
                weights.normed("hidden_norm", &weights.times("fc", &read))
            })
            .collect();
        let mut read = vec![MASK; num_rows];
        read[0] = tokens[0];
        let mut x = rows(target.embed_ids(&read), WIDTH);
        for (number, layer) in ["layers.0", "layers.1"].into_iter().enumerate() {
            let norm = |part: &str, x: &[f64]| weights.normed(&format!("{layer}.{part}"), x);
            let normed = x.iter().map(|x| norm("input_layernorm", x));
            let seen: Matrix = contexts.iter().cloned().chain(normed).collect();
            let keys: Vec<Matrix> =
                (0..seen.len()).map(|at| weights.heads(layer, "k", &seen[at], Some(at))).collect();
            let of_value = |x: &Vec<f64>| weights.heads(layer, "v", x, None);
            let all_values: Vec<Matrix> = seen.iter().map(of_value).collect();
            for (nth, x) in x.iter_mut().enumerate() {
                let at = ids.len() + nth;
                let window = config.model.spec.window.as_ref();
                let (size, sees_ahead) = match window.filter(|window| window.layers[number]) {
                    Some(window) => (window.size, window.sees_ahead),
                    None => (usize::MAX, !config.is_causal),
                };
                let first = (at + 1).saturating_sub(size);
                let end = if sees_ahead { seen.len().min(at.saturating_add(size)) } else { at + 1 };
                let queries = weights.heads(layer, "q", &seen[at], Some(at));
                let mixed = queries.iter().enumerate().flat_map(|(head, query)| {
                    // Two query heads share a key head.
                    let scores: Vec<f64> = keys[first..end]
                        .iter()
                        .map(|key| dot(query, &key[head / 2]) / 2.0)
                        .collect();
                    let shares = softmax(&scores);
                    let mean = |n: usize| {
                        all_values[first..]
                            .iter()
                            .zip(&shares)
                            .map(|(it, share)| share * it[head / 2][n])
                            .sum()
                    };
                    (0..4).map(mean).collect::<Vec<f64>>()
                });
                let mixed: Vec<f64> = mixed.collect();
                *x = plus(x, &weights.times(&format!("{layer}.self_attn.o_proj"), &mixed));
                let normed = norm("post_attention_layernorm", x);
                let part = |part: &str, x: &[f64]| weights.times(&format!("{layer}.mlp.{part}"), x);
                let gated = part("gate_proj", &normed).into_iter().zip(part("up_proj", &normed));
                let gated: Vec<f64> =
                    gated.map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
                *x = plus(x, &part("down_proj", &gated));
            }
        }
        let first = usize::from(!config.is_anchor_first);
        let normed: Matrix = x[first..].iter().map(|x| weights.normed("norm", x)).collect();
        finish(models, &weights, &normed, tokens)
    }

    fn finish(models: &Models, weights: &Weights, normed: &Matrix, tokens: &[u32]) -> Found {
        let config = &models.config;
        let head =
            rows(Tensor::unsqueeze::<3>(models.target.lm_head_weight().transpose()).into(), WIDTH);
        let (mut logits, mut confidences) = (Vec::new(), Vec::new());
        for (row, token) in normed.iter().zip(tokens) {
            let vector = match config.markov_rank {
                0 => Vec::new(),
                _ => weights.of("markov_head.markov_w1")[*token as usize].clone(),
            };
            let all = DraftVocabulary::new((0..VOCAB as u32).collect::<Vec<u32>>());
            let drawn = config.draft_vocabulary.as_ref().unwrap_or(&all);
            let mut of_row = vec![-1e30; VOCAB];
            for (nth, id) in drawn.ids().iter().enumerate() {
                let own = match &config.draft_vocabulary {
                    Some(_) => &weights.of("lm_head")[nth],
                    None => &head[*id as usize],
                };
                of_row[*id as usize] = dot(own, row)
                    + match config.markov_rank {
                        0 => 0.0,
                        _ => dot(&weights.of("markov_head.markov_w2")[nth], &vector),
                    };
            }
            logits.extend(of_row);
            if config.confidence != ConfidenceHead::Absent {
                let read = [row.clone(), vector].concat();
                let bias = weights.0["confidence_head.proj.bias"][0][0];
                confidences.push(dot(&weights.of("confidence_head.proj")[0], &read) + bias);
            }
        }
        [normed.concat(), logits, confidences].map(|it| it.into_iter().map(|x| x as f32).collect())
    }
}

#[test]
fn blocks_equal_a_plain_computation_however_the_contexts_arrive() {
    for form in FORMS {
        let models = models(form);
        let num = models.config.num_candidates();
        let tokens = [4, 9, 2, 17, 20];
        for len in [0, 1, 9, 20] {
            let ids = text(len);
            let rows = models.config.block_size;
            let expected = plain::block(&models, &ids, &tokens, rows);
            for drafter in [&models.packed, &models.tensors] {
                for cuts in [&[][..], &[1], &[3, 4, 8]] {
                    let cuts: Vec<usize> = cuts.iter().map(|cut| *cut.min(&ids.len())).collect();
                    let found = block(&models, drafter, (&ids, &cuts), (&tokens, num));
                    for (found, expected) in found.iter().zip(&expected) {
                        assert_near(found, expected, &format!("{form:?}, {len}"));
                    }
                }
            }
        }
    }
}

#[test]
fn a_shorter_block_gives_the_first_candidates_of_a_longer_one() {
    for form in FORMS {
        let models = models(form);
        let num = models.config.num_candidates();
        let (ids, tokens) = (text(11), [4, 9, 2, 17, 20]);
        let run = |drafter, num| block(&models, drafter, (&ids, &[]), (&tokens, num));
        let whole = run(&models.packed, num);
        for shorter in 1..num {
            let found = run(&models.packed, shorter);
            let num_rows = if form.is_causal { shorter } else { num };
            // Packed rows do not depend on the rows beside them.
            assert_eq!(found[0], whole[0][..num_rows * WIDTH], "{form:?}");
            assert_eq!(found[1], whole[1][..num_rows * VOCAB], "{form:?}");
            let on_tensors = run(&models.tensors, shorter);
            assert_near(&on_tensors[1], &whole[1][..num_rows * VOCAB], "tensors");
        }
    }
}

#[test]
fn blocks_side_by_side_equal_each_alone() {
    for form in FORMS {
        let models = models(form);
        let num = models.config.num_candidates();
        let texts = [text(9), text(0), text(23)[4..].to_vec()];
        let anchors = [3, 8, 5];
        for drafter in [&models.packed, &models.tensors] {
            let mut cache = drafter.new_cache(40, 4);
            let contexts = texts.iter().enumerate().filter(|(_, ids)| !ids.is_empty());
            let contexts = contexts.map(|(slot, ids)| {
                let states = states(&models.target, &models.config.target_layers, ids);
                drafter.contexts(&states).in_slot(slot)
            });
            drafter.read_contexts(Rows::cat(contexts.collect::<Vec<_>>()), &mut cache);
            let starts: Vec<BlockStart> = [2, 0, 1]
                .map(|slot| BlockStart { slot, anchor: anchors[slot], num_candidates: num - slot })
                .to_vec();
            let together = drafter.forward_blocks(&models.target, &starts, &mut cache);
            let mut first = 0;
            for start in starts {
                let rows = first..first + drafter.num_rows_of(&start);
                first = rows.end;
                let ids = &texts[start.slot];
                let given = ([start.anchor, 1, 1, 1, 1], start.num_candidates);
                let alone = block(&models, drafter, (ids, &[]), (&given.0, given.1));
                assert_near(&values(together.slice(rows)), &alone[0], &format!("{form:?}"));
            }
            assert_eq!(first, together.num_rows());
        }
    }
}

#[test]
fn rows_that_attend_ahead_differ_from_causal_ones_when_many_rows_share_a_forward() {
    // Enough rows that a causal forward is shared by threads, or divided into blocks.
    let models = models(Form { is_causal: false, ..OURS });
    let (ids, num_slots) = (text(9), 15);
    let starts: Vec<BlockStart> =
        (0..num_slots).map(|slot| BlockStart { slot, anchor: 4, num_candidates: 5 }).collect();
    let drafter = &models.packed;
    let mut cache = drafter.new_cache(40, num_slots);
    let states = states(&models.target, &models.config.target_layers, &ids);
    let contexts = (0..num_slots).map(|slot| drafter.contexts(&states).in_slot(slot));
    drafter.read_contexts(Rows::cat(contexts.collect::<Vec<_>>()), &mut cache);
    for num in [2, num_slots] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let found =
            pool.install(|| drafter.forward_blocks(&models.target, &starts[..num], &mut cache));
        let alone = block(&models, drafter, (&ids, &[]), (&[4, 1, 1, 1, 1], 5));
        assert_eq!(values(found), alone[0].repeat(num));
    }
}

#[test]
fn contexts_of_targets_of_every_family_are_read() {
    for name in FIXTURES {
        let (target, ids) = (load(name), expected(name).ids);
        let config = BlockDrafterConfig::new(target.config(), 1, 0);
        let config = config.with(|it| it.markov_rank = 2);
        let dir = tempfile::tempdir().unwrap();
        config.init(&Device::flex()).write_dir(dir.path(), &config).unwrap();
        let (found, packed) = read(dir.path(), target.shape()).unwrap();
        assert_eq!(found, config, "{name}");
        let both = [(target.clone(), packed.clone()), (target.to_tensors(), packed.to_tensors())];
        let [host, tensors] = both.map(|(target, drafter)| {
            let mut cache = drafter.new_cache(ids.len(), 1);
            let contexts = drafter.contexts(&states(&target, &config.target_layers, &ids));
            drafter.read_contexts(contexts, &mut cache);
            let start = BlockStart { slot: 0, anchor: ids[0], num_candidates: 3 };
            let normed = drafter.forward_blocks(&target, &[start], &mut cache);
            values(drafter.after_tokens(drafter.logits(&normed, &target), &ids[..3]))
        });
        assert_near(&host, &tensors, name);
    }
}

#[test]
fn default_layers_are_spread_over_the_target() {
    let ids = |num, of| -> Vec<usize> {
        BlockDrafterConfig::default_layers(num, of).into_iter().map(|layer| layer - 1).collect()
    };
    assert_eq!(ids(5, 36), [1, 9, 17, 25, 33]);
    assert_eq!(ids(2, 30), [1, 27]);
    assert_eq!((ids(1, 30), ids(1, 1), ids(2, 1)), (vec![15], vec![0], vec![0]));
    // No layer is named twice.
    assert_eq!((ids(3, 4), ids(2, 3), ids(5, 8)), (vec![0, 2, 3], vec![0, 2], vec![1, 2, 3, 4, 5]));
}

/// Writes a drafter, applies changes to its tensors and to its keys, where `null` removes a key, and
/// reads it.
fn changed(
    models: &Models,
    tensors: impl FnOnce(&mut Vec<NamedTensor>),
    change: impl FnOnce(&mut Map<String, Value>),
) -> Result<(BlockDrafterConfig, BlockDrafter)> {
    let Models { target, config, packed, .. } = models;
    let dir = tempfile::tempdir().unwrap();
    packed.write_dir(dir.path(), config).unwrap();
    let mut named = packed.named(config);
    tensors(&mut named);
    let offsets = config.draft_vocabulary.iter().map(|all| ("d2t", all.offsets()));
    let offsets: Vec<_> = offsets.collect();
    write_with_ids(&dir.path().join("model.safetensors"), &named, &offsets, config.dtype, &[])
        .unwrap();
    let path = dir.path().join("config.json");
    let mut keys: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    keys.shift_remove("weights_hash");
    change(&mut keys);
    keys.retain(|_, value| !value.is_null());
    std::fs::write(&path, Value::Object(keys).to_string()).unwrap();
    assert!(BlockDrafterConfig::is_of(
        &serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
    ));
    read(dir.path(), target.shape())
}

fn set(changes: Value) -> impl FnOnce(&mut Map<String, Value>) {
    move |keys| {
        let Value::Object(changes) = changes else { panic!("an object") };
        keys.extend(changes);
    }
}

#[test]
fn files_of_other_trainers_are_read_as_the_same_drafter() {
    use serde_json::json;
    // DeepSpec's files have copies of the target's matrices, and names with a prefix load elsewhere.
    let ours = models(Form { is_causal: false, ..OURS });
    let copies = |tensors: &mut Vec<NamedTensor>| {
        for name in ["embed_tokens.weight", "lm_head.weight"] {
            let (shape, values) = (vec![VOCAB, WIDTH], vec![0.5; VOCAB * WIDTH]);
            tensors.push(NamedTensor { name: name.to_owned(), shape, values });
        }
        tensors.iter_mut().for_each(|tensor| tensor.name.insert_str(0, "model."));
    };
    let keys = json!({ "sample_from_anchor": null, "is_causal": null, "confidence_head_with_markov": null,
                       "num_target_layers": null, "enable_confidence_head": null });
    let (config, found) = changed(&ours, copies, set(keys)).unwrap();
    assert_eq!(config, BlockDrafterConfig { num_target_layers: None, ..ours.config.clone() });
    assert_same(&found, &ours);

    let dflash = models(FORMS[1]);
    let z_labs = json!({
        "architectures": ["DFlashDraftModel"], "sample_from_anchor": null, "is_causal": null, "markov_rank": null,
        "markov_head_type": null, "enable_confidence_head": null, "target_layer_ids": null, "mask_token_id": null,
        "dflash_config": { "target_layer_ids": [-1, 1, 4], "mask_token_id": MASK },
    });
    let (config, found) = changed(&dflash, |_| {}, set(z_labs)).unwrap();
    assert_eq!(config, dflash.config);
    assert_same(&found, &dflash);

    // SpecForge and Model-Optimizer keep a DSpark's keys in the same table.
    let dspark = models(OURS);
    let nested = json!({
        "target_layer_ids": [-1, 1, 4], "mask_token_id": MASK, "markov_rank": dspark.config.markov_rank,
        "markov_head_type": "vanilla", "projector_type": "dspark", "confidence_head_with_markov": true,
    });
    let own = |key: &str, value: bool| {
        let mut nested = nested.clone();
        nested[key] = value.into();
        json!({
            "architectures": ["DSparkDraftModel"], "sample_from_anchor": null, "markov_rank": null,
            "markov_head_type": null, "enable_confidence_head": null, "confidence_head_with_markov": null,
            "target_layer_ids": null, "mask_token_id": null, "dflash_config": nested,
        })
    };
    for (key, value) in
        [("enable_confidence_head", true), ("use_confidence_head", true), ("shift_label", true)]
    {
        let (config, found) = changed(&dspark, |_| {}, set(own(key, value))).unwrap();
        assert_eq!(config, dspark.config, "{key}");
        assert_same(&found, &dspark);
    }
    let (config, _) = changed(&dspark, |_| {}, set(own("shift_label", false))).unwrap();
    assert!(!config.is_anchor_first, "the key decides");

    let narrow = models(FORMS[3]);
    let speculators = |keys: &mut Map<String, Value>| {
        let mut layer = std::mem::take(keys);
        for key in [
            "block_size",
            "mask_token_id",
            "sample_from_anchor",
            "is_causal",
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "num_target_layers",
            "draft_vocab_size",
        ] {
            keys.insert(key.to_owned(), layer[key].take());
        }
        layer.retain(|_, value| !value.is_null());
        layer.shift_remove("target_layer_ids");
        keys.insert("speculators_model_type".to_owned(), "dspark".into());
        keys.insert("aux_hidden_state_layer_ids".to_owned(), json!([0, 2, 5]));
        keys.insert("transformer_layer_config".to_owned(), layer.into());
    };
    let (config, found) = changed(&narrow, |_| {}, speculators).unwrap();
    assert_eq!(config, narrow.config);
    assert_same(&found, &narrow);
}

#[test]
fn windows_and_causality_are_read_as_servers_read_them() {
    use serde_json::json;
    let ours = models(OURS);
    let both = ["sliding_attention", "sliding_attention"];
    let one = ["sliding_attention", "full_attention"];
    let full = ["full_attention", "full_attention"];
    let base = json!({ "is_causal": null, "sliding_window": 8, "use_sliding_window": true });
    // The keys, the layers with a window, whether all are causal, and whether rows in windows see later ones.
    for (keys, layers, is_causal, sees_ahead) in [
        (json!({ "layer_types": both }), [true, true], true, false),
        (json!({ "layer_types": one }), [true, false], false, false),
        (json!({ "layer_types": one, "is_causal": true }), [true, false], true, false),
        (json!({ "layer_types": both, "is_causal": false }), [true, true], false, true),
        (json!({ "layer_types": null, "max_window_layers": 1 }), [false, true], false, false),
        (
            json!({ "layer_types": full, "dflash_config": { "use_swa": true, "swa_window_size": 5, "causal": false } }),
            [true, true],
            false,
            true,
        ),
        (
            json!({ "layer_types": one, "speculators_model_type": "dflash", "sliding_window_non_causal": false }),
            [true, false],
            true,
            false,
        ),
        (
            json!({ "layer_types": one, "speculators_model_type": "dflash" }),
            [true, false],
            false,
            true,
        ),
        (
            json!({ "layer_types": one, "speculators_model_type": "dspark", "sliding_window_non_causal": false }),
            [true, false],
            false,
            false,
        ),
    ] {
        let change = |all: &mut Map<String, Value>| {
            set(base.clone())(all);
            set(keys.clone())(all);
        };
        let (config, _) = changed(&ours, |_| {}, change).unwrap();
        let window = config.model.spec.window.as_ref().unwrap();
        let size = if keys.get("dflash_config").is_some() { 5 } else { 8 };
        assert_eq!((window.size, &*window.layers), (size, &layers[..]), "{keys}");
        assert_eq!((config.is_causal, window.sees_ahead), (is_causal, sees_ahead), "{keys}");
    }
    let (config, _) = changed(&ours, |_| {}, set(json!({ "sliding_window": 8 }))).unwrap();
    assert_eq!(config.model.spec.window, None, "no layer has it");
}

fn assert_same(found: &BlockDrafter, models: &Models) {
    let all = |drafter: &BlockDrafter| -> Vec<(String, Vec<f32>)> {
        let named = drafter.named(&models.config).into_iter();
        named.map(|tensor| (tensor.name, tensor.values)).collect()
    };
    assert_eq!(all(found), all(&models.packed));
}

#[test]
fn drafters_that_cannot_be_computed_and_damaged_ones_are_refused_by_name() {
    use serde_json::json;
    let (ours, narrow) = (models(OURS), models(FORMS[3]));
    let refused = |models: &Models, changes: Value, named: &[&str]| {
        let text = changes.to_string();
        let error = changed(models, |_| {}, set(changes)).map(|_| ()).expect_err(&text).to_string();
        for part in named {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    };
    for (changes, named) in [
        (json!({ "markov_head_type": "gated" }), ["markov_head_type", "`gated`"]),
        (json!({ "markov_head_type": "rnn" }), ["markov_head_type", "`rnn`"]),
        (json!({ "architectures": ["DFlash2DraftModel"] }), ["architectures", "DFlash2"]),
        (json!({ "speculators_model_type": "dflash2" }), ["speculators_model_type", "DFlash2"]),
        (
            json!({ "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8 }),
            ["use_sliding_window", "is false"],
        ),
        (
            json!({ "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": true }),
            ["`sliding_window`", "missing"],
        ),
        (
            json!({ "layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 0,
                    "use_sliding_window": true }),
            ["`sliding_window`", "0"],
        ),
        (json!({ "layer_types": ["full_attention"] }), ["layer_types", "expected 2"]),
        (
            json!({ "layer_types": null, "use_sliding_window": null, "sliding_window": 8 }),
            ["`sliding_window`", "`layer_types`"],
        ),
        (json!({ "mask_token_id": null }), ["mask_token_id", "missing"]),
        (json!({ "mask_token_id": 24 }), ["mask_token_id", "below 24"]),
        (json!({ "mask_token_id": -1 }), ["mask_token_id", "-1"]),
        (json!({ "block_size": null }), ["block_size", "missing"]),
        (json!({ "block_size": 0 }), ["block_size", "1 to 256"]),
        (json!({ "block_size": 1_u64 << 40 }), ["block_size", "1 to 256"]),
        (json!({ "block_size": 1, "sample_from_anchor": false }), ["block_size", "2 to 256"]),
        (json!({ "markov_rank": 5 }), ["markov_head.markov_w1", "[24, 4]"]),
        (json!({ "markov_rank": 1_u64 << 50 }), ["markov_rank", "at most"]),
        (json!({ "target_layer_ids": null }), ["target_layer_ids", "missing"]),
        (json!({ "target_layer_ids": [] }), ["target_layer_ids", "[]"]),
        (json!({ "target_layer_ids": [-2, 1, 4] }), ["target_layer_ids", "-2"]),
        (json!({ "target_layer_ids": [i64::MAX, 1, 4] }), ["target_layer_ids", "expected"]),
        (json!({ "target_layer_ids": [0, 1, 5] }), ["target_layer_ids", "layer 5"]),
        (json!({ "target_layer_ids": [0, 1] }), ["fc.weight", "[16, 48]"]),
        (json!({ "hidden_size": 32 }), ["hidden_size", "is 32"]),
        (json!({ "vocab_size": 25 }), ["vocab_size", "is 25"]),
        (json!({ "max_position_embeddings": 63 }), ["max_position_embeddings", "64"]),
        (json!({ "num_hidden_layers": 3, "layer_types": null }), ["layers.2", "no tensor"]),
        (json!({ "num_hidden_layers": 1, "layer_types": null }), ["layers.1", "unexpected"]),
        (json!({ "confidence_head_with_markov": false }), ["confidence_head.proj", "[1, 20]"]),
        (json!({ "draft_vocab_size": 3 }), ["d2t", "no tensor"]),
        (
            json!({ "speculators_model_type": "dspark", "sample_from_anchor": null }),
            ["sample_from_anchor", "missing"],
        ),
        (
            json!({ "sample_from_anchor": null, "markov_rank": null, "architectures": ["Qwen3DFlashModel"] }),
            ["sample_from_anchor", "missing"],
        ),
    ] {
        refused(&ours, changes, &named);
    }
    for (changes, named) in [
        (json!({ "draft_vocab_size": 0 }), ["d2t", "[0]"]),
        (json!({ "draft_vocab_size": 4 }), ["d2t", "[4]"]),
    ] {
        refused(&narrow, changes, &named);
    }
    for name in [
        "fc.weight",
        "hidden_norm.weight",
        "confidence_head.proj.bias",
        "markov_head.markov_w2.weight",
    ] {
        let remove = |tensors: &mut Vec<NamedTensor>| tensors.retain(|it| it.name != name);
        let error = changed(&ours, remove, |_| {}).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let add = |tensors: &mut Vec<NamedTensor>| {
        let name = "candidate_selector.hidden_projection.weight".to_owned();
        tensors.push(NamedTensor { name, shape: vec![1], values: vec![1.0] });
    };
    let error = changed(&ours, add, |_| {}).unwrap_err().to_string();
    assert!(error.contains("candidate_selector"), "{error}");
}

#[test]
fn a_mask_embedding_beside_the_weights_and_changed_weights_are_refused() {
    let models = models(OURS);
    let dir = tempfile::tempdir().unwrap();
    models.packed.write_dir(dir.path(), &models.config).unwrap();
    let shape = models.target.shape();
    read(dir.path(), shape).unwrap();
    std::fs::write(dir.path().join("mask_embedding.pt"), "").unwrap();
    let error = read(dir.path(), shape).unwrap_err().to_string();
    assert!(error.contains("mask_embedding.pt"), "{error}");
    std::fs::remove_file(dir.path().join("mask_embedding.pt")).unwrap();
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert!(read(dir.path(), shape).unwrap_err().to_string().contains("was changed"));
}

#[test]
fn switched_off_heads_are_ignored() {
    let models = models(OURS);
    let off = set(serde_json::json!({ "enable_confidence_head": false }));
    let (config, found) = changed(&models, |_| {}, off).unwrap();
    assert_eq!(config.confidence, ConfidenceHead::Absent);
    assert!(!found.has_confidence());
    assert!(config.num_parameters() < models.config.num_parameters());
}

#[test]
fn the_blocks_of_a_training_equal_those_of_decoding() {
    const SEQ: usize = 11;
    let ids = text(SEQ as u32);
    for form in [
        OURS,
        FORMS[3],
        FORMS[5],
        Form { markov_rank: 0, confidence: ConfidenceHead::OfRow, ..OURS },
        Form { window: Some((3, [true, false], false)), ..OURS },
    ] {
        let models = models(form);
        let (target, num_steps) = (&models.target, models.config.block_size);
        let drafter = models.tensors.clone().with_mask_of(target);
        let device = Device::flex();
        let of_text = states(target, &models.config.target_layers, &ids);
        let of_text = of_text.into_iter().map(|rows| {
            let state = rows.into_tensor(&device).narrow(1, 0, SEQ - 1);
            Tensor::cat(vec![state.clone(), state], 0)
        });
        let of_text: Vec<Tensor<3>> = of_text.collect();
        let next: Vec<i32> = [&ids[1..], &ids[1..]].concat().iter().map(|id| *id as i32).collect();
        let next = Tensor::<2, Int>::from_data(TensorData::new(next, [2, SEQ - 1]), &device);
        let head = drafter.own_head().unwrap_or_else(|| target.lm_head_weight());
        let head = Tensor::cat([head].into_iter().chain(drafter.more_head()).collect(), 0);
        for (begun, lengths) in [
            ([0..0, 0..SEQ - 1], Lengths::AsGiven),
            ([0..SEQ - 1, 3..8], Lengths::AsGiven),
            ([3..8, 0..SEQ - 1], Lengths::InBuckets),
        ] {
            let steps = drafter.unrolled(UnrolledInputs {
                states: of_text.clone(),
                next_ids: next.clone(),
                embedded: Some(target.embed(next.clone())),
                begun: &begun,
                num_steps,
                lengths,
            });
            let mut first = 0;
            for begun in &begun {
                for start in begun.clone() {
                    let num = num_steps.min(begun.end - start);
                    let tokens = &ids[start + 1..start + 1 + num];
                    let decoded = block(&models, &drafter, (&ids[..=start], &[]), (tokens, num));
                    for (step, trained) in steps[..num].iter().enumerate() {
                        let what = format!("block {start}, row {step}");
                        let row = first + start - begun.start + step;
                        let trained = trained.clone().narrow(0, row, 1);
                        let of_row =
                            |all: &[f32], width: usize| all[step * width..][..width].to_vec();
                        let normed = trained.clone().narrow(1, 0, WIDTH).into_data();
                        let normed: Vec<f32> = normed.iter::<f32>().collect();
                        assert_near(&normed, &of_row(&decoded[0], WIDTH), &what);
                        let logits = trained.matmul(head.clone()).into_data();
                        let logits: Vec<f32> = logits.iter::<f32>().collect();
                        let expected = of_row(&decoded[1], VOCAB);
                        let expected = match &models.config.draft_vocabulary {
                            Some(all) => {
                                all.ids().iter().map(|id| expected[*id as usize]).collect()
                            }
                            None => expected,
                        };
                        assert_near(&logits, &expected, &what);
                    }
                }
                first += begun.len();
            }
        }
    }
}

#[test]
fn a_drafter_as_servers_read_it_has_a_markov_head_and_proposes_the_same() {
    let ids = text(9);
    for form in FORMS {
        let models = models(form);
        let (dspark, config) = models.packed.clone().as_dspark(&models.config);
        let dir = tempfile::tempdir().unwrap();
        dspark.write_dir(dir.path(), &config).unwrap();
        let (found, read) = read(dir.path(), models.target.shape()).unwrap();
        assert_eq!(found, config);
        assert!(config.markov_rank > 0 && config.confidence != ConfidenceHead::OfRow, "{form:?}");
        let keys: Map<String, Value> =
            crate::error::read_json(&dir.path().join("config.json")).unwrap();
        for key in [
            "architectures",
            "attention_bias",
            "block_size",
            "confidence_head_with_markov",
            "enable_confidence_head",
            "head_dim",
            "layer_types",
            "markov_head_type",
            "markov_rank",
            "mask_token_id",
            "max_position_embeddings",
            "model_type",
            "num_target_layers",
            "rms_norm_eps",
            "rope_theta",
            "sample_from_anchor",
            "target_layer_ids",
            "tie_word_embeddings",
        ] {
            assert!(keys.contains_key(key), "`{key}`: {keys:?}");
        }
        // Layers differ if only those with a window are causal.
        let differs = form.window.is_some_and(|(.., sees_ahead)| !form.is_causal && !sees_ahead);
        assert_eq!(keys.contains_key("is_causal"), !differs, "{form:?}");
        let tokens = [3, 5, 1, 2, 5];
        let num = models.config.num_candidates();
        let of = |drafter: &BlockDrafter| block(&models, drafter, (&ids, &[]), (&tokens, num));
        for (before, after) in of(&models.packed).iter().zip(of(&read)) {
            assert_near(&after, before, &format!("{form:?}"));
        }
    }
}

#[test]
fn a_new_confidence_head_changes_no_candidate_and_gives_the_regression() {
    let (ids, tokens) = (text(9), [3, 5, 1, 2, 5]);
    for form in FORMS {
        let models = models(form);
        let num_inputs = WIDTH + form.markov_rank;
        for reads_token in [true, false] {
            let weights = ConfidenceWeights {
                row: (0..num_inputs).map(|n| (n as f32 - 7.0) / 20.0).collect(),
                of_token: reads_token.then(|| (0..VOCAB).map(|n| n as f32 / 10.0).collect()),
                bias: 0.25,
            };
            let (with_head, config) =
                models.packed.clone().with_confidence(&models.config, &weights);
            assert_eq!(config.markov_rank, form.markov_rank + usize::from(reads_token));
            let (with_head, config) = with_head.as_dspark(&config);
            let dir = tempfile::tempdir().unwrap();
            with_head.write_dir(dir.path(), &config).unwrap();
            let (_, read) = read(dir.path(), models.target.shape()).unwrap();
            let num = models.config.num_candidates();
            let of = |drafter: &BlockDrafter| block(&models, drafter, (&ids, &[]), (&tokens, num));
            let [before, logits, _] = of(&models.packed);
            let found = of(&read);
            assert_near(&found[0], &before, "the rows");
            assert_near(&found[1], &logits, "the logits");
            let mut cache = models.packed.new_cache(48, 1);
            let states = states(&models.target, &models.config.target_layers, &ids);
            models.packed.read_contexts(models.packed.contexts(&states), &mut cache);
            let start = BlockStart { slot: 0, anchor: tokens[0], num_candidates: num };
            let normed = models.packed.forward_blocks(&models.target, &[start], &mut cache);
            let inputs = models.packed.confidence_inputs(&normed, &tokens[..num]);
            let inputs: Vec<Vec<f32>> = inputs.into_iter().map(values).collect();
            let expected: Vec<f32> = (0..num)
                .map(|row| {
                    let read = inputs.iter().flat_map(|part| {
                        let width = part.len() / num;
                        part[row * width..(row + 1) * width].to_vec()
                    });
                    let own: f32 = read.zip(&weights.row).map(|(x, weight)| x * weight).sum();
                    let of_token =
                        weights.of_token.as_ref().map_or(0.0, |all| all[tokens[row] as usize]);
                    own + of_token + 0.25
                })
                .collect();
            assert_near(&found[2], &expected, &format!("{form:?}"));
        }
    }
}
