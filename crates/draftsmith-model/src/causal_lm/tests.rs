//! A model must match transformers, and the way a sequence is divided into forwards, layer ranges
//! and rolled-back detours must not matter.

mod trees;

use burn::tensor::{Device, Tensor};

use super::CausalLm;
use crate::fixtures::{FIXTURES, expected, fixture, ids_tensor, load};
use crate::rows::Rows;
use crate::weights::{NamedTensor, WeightDtype, WeightReader, write_safetensors};

/// transformers sums in another order; f32 rounding through three layers stays well below this.
const RELATIVE_TOLERANCE: f32 = 1e-4;

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("f32")
}

/// Asserts that the largest difference is within the tolerance, relative to the largest value.
fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let off = found.iter().zip(expected).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(off <= RELATIVE_TOLERANCE * scale, "{what}: off by {off} of {scale}");
}

/// Logits of the stream after the last layer.
fn logits_of(model: &CausalLm, hidden: Rows) -> Vec<f32> {
    let [logits] = Rows::to_host([model.logits(&model.normed(hidden))]).expect("brought");
    logits
}

/// Logits of all positions, with the ids read in the given pieces through a cache.
pub(crate) fn cached_logits(model: &CausalLm, pieces: &[&[u32]]) -> Vec<f32> {
    let num_layers = model.shape().num_layers;
    let mut cache = model.new_cache(64, 1);
    let pieces = pieces.iter().filter(|piece| !piece.is_empty());
    pieces
        .flat_map(|piece| {
            let hidden = model.forward_layers(0..num_layers, model.embed_ids(piece), &mut cache);
            logits_of(model, hidden)
        })
        .collect()
}

#[test]
fn logits_and_hidden_states_agree_with_transformers() {
    for name in FIXTURES {
        let model = load(name);
        agrees_with_transformers(name, &model);
        agrees_with_transformers(name, &model.to_tensors());
    }
}

fn agrees_with_transformers(name: &str, model: &CausalLm) {
    let expected = expected(name);
    let num_layers = expected.num_layers();
    let ids = || ids_tensor(&expected.ids);
    // transformers' last entry is after the final norm.
    let (of_layers, of_norm) = expected.hidden_states.split_at(num_layers);
    for (layer, expected) in of_layers.iter().enumerate() {
        assert_close(
            &values(model.exit_states(ids(), layer)),
            expected,
            &format!("{name} {layer}"),
        );
    }
    let normed = model.hidden_states(ids());
    assert_close(&values(normed.clone()), &of_norm[0], &format!("{name} hidden_states"));
    assert_close(&values(model.lm_head(normed)), &expected.logits, &format!("{name} logits"));
    let all = 0..expected.ids.len();
    let wanted = std::slice::from_ref(&all);
    for layer in 0..=num_layers {
        let (mut exits, last) = model.hidden_states_at(ids(), &[layer], wanted);
        let exit = exits.remove(0);
        let what = format!("{name} hidden_states_at {layer}");
        assert_close(&values(last), &of_norm[0], &what);
        let exit = if layer == num_layers { model.final_norm(exit) } else { exit };
        assert_close(&values(exit), &expected.hidden_states[layer], &what);
    }
    // Several exits at once give the same as each separately, in the order asked for.
    let (exits, last) = model.hidden_states_at(ids(), &[2, 1, 2], wanted);
    for (exit, layer) in exits.into_iter().zip([2, 1, 2]) {
        let (mut alone, alone_last) = model.hidden_states_at(ids(), &[layer], wanted);
        assert_eq!(values(exit), values(alone.remove(0)), "{name} {layer}");
        assert_eq!(values(last.clone()), values(alone_last), "{name} {layer}");
    }
}

/// The index of the largest number.
fn top(row: &[f32]) -> u32 {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.expect("a row of logits").0 as u32
}

#[test]
fn greedy_decoding_continues_as_transformers_does() {
    for name in FIXTURES {
        let (model, expected) = (load(name), expected(name));
        for model in [&model, &model.to_tensors()] {
            let mut cache = model.new_cache(128, 1);
            let layers = 0..model.shape().num_layers;
            let mut next = |ids: &[u32]| {
                let hidden = model.forward_layers(layers.clone(), model.embed_ids(ids), &mut cache);
                top(&logits_of(model, hidden.last(1)))
            };
            let mut found = vec![next(&expected.ids)];
            while found.len() < expected.continuation.len() {
                found.push(next(&found[found.len() - 1..]));
            }
            assert_eq!(found, expected.continuation, "{name}");
        }
    }
}

#[test]
fn rolled_back_candidates_change_nothing_beyond_a_window_either() {
    for name in FIXTURES {
        let (model, expected) = (load(name), expected(name));
        let sequence = [&expected.ids[..], &expected.continuation].concat();
        let sequence = &sequence[..80];
        for model in [&model, &model.to_tensors()] {
            let vocab = model.shape().vocab_size;
            let whole = values(model.lm_head(model.hidden_states(ids_tensor(sequence))));
            let mut cache = model.new_cache(100, 1);
            let layers = 0..model.shape().num_layers;
            let read = |ids: &[u32], cache: &mut crate::KvCache| {
                let hidden = model.forward_layers(layers.clone(), model.embed_ids(ids), cache);
                logits_of(model, hidden)
            };
            // Each round keeps some of its candidates and rolls the others back.
            let mut len = 0;
            for (num_rows, num_wrong) in
                [(1, 0), (10, 9), (3, 11), (6, 2), (1, 20), (12, 8), (9, 15)]
            {
                let right = &sequence[len..len + num_rows];
                let wrong: Vec<u32> = (0..num_wrong).map(|i| (i * 31 + 5) % 90 + 3).collect();
                let logits = read(&[right, &wrong].concat(), &mut cache);
                let expected = &whole[len * vocab..(len + num_rows) * vocab];
                assert_close(&logits[..num_rows * vocab], expected, &format!("{name} from {len}"));
                len += num_rows;
                cache.truncate(0, len);
            }
            let rest = read(&sequence[len..], &mut cache);
            assert_close(&rest, &whole[len * vocab..], &format!("{name} to the end"));
        }
    }
}

#[test]
fn a_padded_batch_gives_each_sequences_states_at_the_wanted_positions() {
    for name in FIXTURES {
        a_padded_batch_is_each_sequence_alone(&load(name));
    }
}

fn a_padded_batch_is_each_sequence_alone(model: &CausalLm) {
    let (on_tensors, config) = (model.to_tensors(), model.config());
    let (seq, width) = (300, config.shape.hidden_size);
    let all_wanted = [120..300, 0..70, 64..65, 2..2];
    let padded: Vec<u32> = (0..4 * seq as u32).map(|i| i * 37 % 96).collect();
    let ids = ids_tensor(&padded).reshape([4, seq]);
    let exit_layers = [config.shape.num_layers - 1, 0, 1];
    let (exits, last) = model.hidden_states_at(ids, &exit_layers, &all_wanted);
    let exits: Vec<Vec<f32>> = exits.into_iter().map(values).collect();
    let last = values(last);
    assert!(exits.iter().flatten().chain(&last).all(|x| x.is_finite()));
    for (nth, wanted) in all_wanted.into_iter().enumerate() {
        if wanted.is_empty() {
            continue;
        }
        let alone = &padded[nth * seq..][..wanted.end];
        let rows = |from: usize| (nth * seq + from) * width..(nth * seq + wanted.end) * width;
        for (layer, exit) in exit_layers.into_iter().zip(&exits) {
            let expected = values(on_tensors.exit_states(ids_tensor(alone), layer));
            assert_close(&exit[rows(0)], &expected, &format!("sequence {nth} exit {layer}"));
        }
        let expected = values(on_tensors.hidden_states(ids_tensor(alone)));
        let expected = &expected[wanted.start * width..];
        assert_close(&last[rows(wanted.start)], expected, &format!("sequence {nth}"));
    }
}

#[test]
fn any_split_of_a_sequence_gives_the_same_logits() {
    for name in FIXTURES {
        let (model, expected) = (load(name), expected(name));
        let ids = &expected.ids;
        for cuts in [vec![], vec![1], vec![7, 8], vec![2, 5, 20], (1..ids.len()).collect()] {
            let mut bounds = vec![0];
            bounds.extend(&cuts);
            bounds.push(ids.len());
            let pieces: Vec<&[u32]> = bounds.windows(2).map(|w| &ids[w[0]..w[1]]).collect();
            let found = cached_logits(&model, &pieces);
            assert_close(&found, &expected.logits, &format!("{name} cut at {cuts:?}"));
        }
    }
}

#[test]
fn in_host_memory_a_rows_bits_do_not_depend_on_other_rows() {
    // Threads share rows only inside a pool.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("two threads");
    for name in FIXTURES {
        let (model, expected) = (load(name), expected(name));
        if !model.is_packed() {
            return;
        }
        let ids: Vec<u32> = expected.ids.iter().chain(&expected.ids).copied().collect();
        let one_by_one: Vec<&[u32]> = ids.chunks(1).collect();
        let alone = cached_logits(&model, &one_by_one);
        // Rows of a verification, of a prompt that two threads share, and of a whole sequence.
        for num_rows in [2, 3, 4, 5, 6, 7, 8, 20, 31, ids.len()] {
            let pieces: Vec<&[u32]> = ids.chunks(num_rows).collect();
            assert!(cached_logits(&model, &pieces) == alone, "{name}, {num_rows} rows at a time");
            let shared = pool.install(|| cached_logits(&model, &pieces));
            assert!(shared == alone, "{name}, {num_rows} rows at a time, shared");
        }
    }
}

#[test]
fn a_filled_cache_gives_the_same_as_one_that_was_read() {
    for name in FIXTURES {
        let (model, expected) = (load(name), expected(name));
        for cut in [1, 9, expected.ids.len() - 1] {
            let (prefix, rest) = expected.ids.split_at(cut);
            let mut cache = model.new_cache(64, 1);
            model.fill_cache(0, model.embed_ids(prefix), &mut cache);
            let layers = 0..model.shape().num_layers;
            let hidden = model.forward_layers(layers, model.embed_ids(rest), &mut cache);
            let found = logits_of(&model, hidden);
            let vocab = model.shape().vocab_size;
            assert_close(&found, &expected.logits[cut * vocab..], &format!("{name} from {cut}"));
        }
    }
}

#[test]
fn truncated_tokens_leave_no_trace() {
    let (model, expected) = (load(FIXTURES[0]), expected(FIXTURES[0]));
    let ids = &expected.ids;
    let num_layers = model.shape().num_layers;
    let mut cache = model.new_cache(64, 1);
    let read = |ids: &[u32], cache: &mut crate::KvCache| {
        let hidden = model.forward_layers(0..num_layers, model.embed_ids(ids), cache);
        logits_of(&model, hidden)
    };
    read(&ids[..10], &mut cache);
    read(&[5, 5, 5, 5, 5, 5, 5], &mut cache);
    cache.truncate(0, 10);
    let found = read(&ids[10..], &mut cache);
    let vocab = model.shape().vocab_size;
    assert_close(&found, &expected.logits[10 * vocab..], "after a truncated detour");
}

/// Three sequences of different lengths, each divided into forwards.
fn sequences(ids: &[u32]) -> [Vec<&[u32]>; 3] {
    let (a, b, c) = (&ids[..20], &ids[5..24], &ids[1..24]);
    [
        vec![&a[..5], &a[5..6], &[], &a[6..]],
        vec![&b[..1], &b[1..9], &b[9..12], &b[12..]],
        vec![&[], &c[..4], &c[4..18], &c[18..]],
    ]
}

#[test]
fn several_sequences_in_one_forward_give_the_same_as_each_alone() {
    // Threads share rows only inside a pool.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("two threads");
    for name in FIXTURES {
        let (model, expected) = (load(name), expected(name));
        let on_tensors = model.to_tensors();
        for model in [&model, &on_tensors] {
            let sequences = sequences(&expected.ids);
            let alone = sequences.each_ref().map(|pieces| cached_logits(model, pieces));
            let together = || {
                let num_layers = model.shape().num_layers;
                let mut cache = model.new_cache(64, 4);
                let mut found = [const { Vec::new() }; 3];
                // The order of the slots does not matter, nor that one is unused.
                let turn = |turn: usize| [2, 0, 1].map(|nth| (nth + 1, sequences[nth][turn]));
                for runs in (0..4).map(turn) {
                    let hidden = model.embed_runs(&runs);
                    let hidden = model.forward_layers(0..num_layers, hidden, &mut cache);
                    let logits = model.logits(&model.normed(hidden));
                    let mut end = 0;
                    for run in logits.runs() {
                        let rows = logits.slice(end..end + run.num_rows);
                        assert_eq!(rows.runs().collect::<Vec<_>>(), [run]);
                        let [values] = Rows::to_host([rows]).expect("brought");
                        found[run.slot - 1].extend(values);
                        end += run.num_rows;
                    }
                }
                let lens = [0, 1, 2, 3].map(|slot| cache.len(slot, num_layers - 1));
                assert_eq!(lens, [0, 20, 19, 23], "{name}");
                found
            };
            for found in [together(), pool.install(together)] {
                if model.is_packed() {
                    assert!(found == alone, "{name}: to the last bit");
                }
                for (found, alone) in found.iter().zip(&alone) {
                    assert_close(found, alone, name);
                }
            }
        }
    }
}

#[test]
fn a_used_or_filled_slot_can_be_reused_next_to_others() {
    for name in FIXTURES {
        let (model, expected) = (load(name), expected(name));
        let on_tensors = model.to_tensors();
        for model in [&model, &on_tensors] {
            let (ids, num_layers) = (&expected.ids, model.shape().num_layers);
            let mut cache = model.new_cache(64, 2);
            let mut read = |runs: &[(usize, &[u32])], lens: [usize; 2]| {
                for (slot, len) in lens.into_iter().enumerate() {
                    cache.truncate(slot, len);
                }
                let hidden = model.embed_runs(runs);
                logits_of(model, model.forward_layers(0..num_layers, hidden, &mut cache))
            };
            read(&[(0, &ids[..10]), (1, &ids[7..20])], [0, 0]);
            read(&[(1, &[5, 5, 5]), (0, &[5; 7])], [10, 13]);
            // Slot 0 returns to where the detour began; slot 1 starts again.
            let found = read(&[(0, &ids[10..]), (1, &ids[..4])], [10, 0]);
            let vocab = model.shape().vocab_size;
            let behind = [&expected.logits[10 * vocab..], &expected.logits[..4 * vocab]].concat();
            assert_close(&found, &behind, &format!("{name} after detours"));
            cache.truncate(0, 0);
            cache.truncate(1, 0);
            model.fill_cache(0, model.embed_runs(&[(1, &ids[..9]), (0, &ids[..3])]), &mut cache);
            let hidden = model.embed_runs(&[(1, &ids[9..]), (0, &ids[3..4])]);
            let hidden = model.forward_layers(0..num_layers, hidden, &mut cache);
            let behind =
                [&expected.logits[9 * vocab..], &expected.logits[3 * vocab..4 * vocab]].concat();
            assert_close(&logits_of(model, hidden), &behind, &format!("{name} filled"));
        }
    }
}

#[test]
fn layer_ranges_compose_and_shallow_layers_may_run_ahead() {
    let (model, expected) = (load(FIXTURES[0]), expected(FIXTURES[0]));
    let mut cache = model.new_cache(64, 1);
    let shallow: Vec<Rows> = expected
        .ids
        .iter()
        .map(|id| model.forward_layers(0..1, model.embed_ids(&[*id]), &mut cache))
        .collect();
    assert_eq!((cache.len(0, 0), cache.len(0, 2)), (expected.ids.len(), 0));
    let deep = model.forward_layers(1..3, Rows::cat(shallow), &mut cache);
    let logits = logits_of(&model, deep);
    assert_close(&logits, &expected.logits, "shallow layers first");
}

#[test]
fn a_written_checkpoint_reads_back_the_same() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for name in FIXTURES {
        let (model, expected) = (load(name), expected(name));
        model.write_model_dir(dir.path(), WeightDtype::F32).expect("written");
        let read = CausalLm::from_model_dir(dir.path(), &Device::flex()).expect("reads back");
        assert_eq!(read.config(), model.config());
        let ids: &[u32] = &expected.ids;
        let found = cached_logits(&read, &[ids]);
        // The 1 of Gemma's norms is subtracted when written and added when read.
        assert_close(&found, &cached_logits(&model, &[ids]), name);
    }
}

/// A directory with a fixture's files and a modified `config.json`.
fn with_config(name: &str, change: impl FnOnce(&mut serde_json::Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for entry in std::fs::read_dir(fixture(name)).expect("the fixture is there") {
        let path = entry.expect("reads").path();
        std::fs::copy(&path, dir.path().join(path.file_name().expect("a file"))).expect("copied");
    }
    let path = dir.path().join("config.json");
    let mut config = crate::error::read_json(&path).expect("reads");
    change(&mut config);
    std::fs::write(&path, config.to_string()).expect("written");
    dir
}

#[test]
fn sizes_that_contradict_the_weights_allocate_nothing() {
    const HUGE: usize = 1 << 27;
    for (key, named) in [
        ("vocab_size", "model.embed_tokens.weight"),
        ("hidden_size", "model.embed_tokens.weight"),
        ("intermediate_size", "model.layers.0.mlp"),
        ("num_hidden_layers", "num_hidden_layers"),
        ("head_dim", "model.layers.0.self_attn.q_proj.weight"),
    ] {
        let dir = with_config(FIXTURES[0], |config| config[key] = HUGE.into());
        for device in [Device::flex(), Device::flex().autodiff()] {
            let refused = CausalLm::from_model_dir(dir.path(), &device).expect_err("refused");
            assert!(refused.to_string().contains(named), "{key}: {refused}");
        }
    }
}

#[test]
fn a_cache_grows_with_the_tokens_and_keeps_them() {
    // A sequence longer than a cache's first allocation, with two slots.
    let (num_tokens, context) = (2500, 1 << 26);
    let dir = with_config(FIXTURES[0], |config| config["max_position_embeddings"] = context.into());
    let device = Device::flex();
    let model = CausalLm::from_model_dir(dir.path(), &device).expect("loads");
    let ids: Vec<u32> = (0..num_tokens).map(|i| i * 37 % 96).collect();
    let expected = values(model.hidden_states(ids_tensor(&ids)));
    for model in [&model, &model.to_tensors()] {
        let layers = 0..model.shape().num_layers;
        let mut cache = model.new_cache(context, 2);
        let (mut read, mut found) = (0, Vec::new());
        for (turn, num_rows) in [1000, 23, 1, 1, 975, 500].into_iter().enumerate() {
            let new = &ids[read..][..num_rows];
            let beside = &ids[turn * 7..][..5];
            let hidden = model.embed_runs(&[(1, beside), (0, new)]);
            let hidden = model.forward_layers(layers.clone(), hidden, &mut cache);
            let own = model.normed(hidden.slice(5..5 + num_rows));
            found.extend(values(own.into_tensor(&device)));
            read += num_rows;
        }
        assert_close(&found, &expected, "read in pieces");
    }
}

/// Adds tensors to the single file of a model, after renaming its own.
fn rewrite(dir: &std::path::Path, rename: impl Fn(&str) -> String, added: &[(&str, &[usize])]) {
    let path = dir.join("model.safetensors");
    let mut reader = WeightReader::open_file(&path).expect("opens");
    let names: Vec<String> = reader.names().map(str::to_owned).collect();
    let own = names.iter().map(|name| {
        let shape = reader.shape(name).expect("there").to_vec();
        let values = reader.take(name, &shape).expect("reads");
        NamedTensor { name: rename(name), shape, values }
    });
    let mut tensors: Vec<NamedTensor> = own.collect();
    tensors.extend(added.iter().map(|(name, shape)| NamedTensor {
        name: (*name).to_owned(),
        shape: shape.to_vec(),
        values: vec![0.5; shape.iter().product()],
    }));
    write_safetensors(&path, &tensors, WeightDtype::F32, &[]).expect("written");
}

fn notes_of(dir: &std::path::Path) -> Vec<String> {
    let config = crate::config::ModelConfig::from_model_dir(dir).expect("reads");
    CausalLm::notes(dir, &config).expect("reads")
}

#[test]
fn a_tied_head_beside_another_stored_head_is_noted_in_every_family() {
    for (name, head) in [
        ("gpt-neox-serial-bf16", "`embed_out.weight`"),
        ("llama-v5-untied-f32", "`lm_head.weight`"),
    ] {
        let dir = with_config(name, |config| config["tie_word_embeddings"] = true.into());
        let notes = notes_of(dir.path());
        assert!(notes.len() == 1 && notes[0].contains(head), "{notes:?}");
        CausalLm::from_model_dir(dir.path(), &Device::flex()).expect("loads");
    }
}

#[test]
fn a_checkpoint_of_the_base_class_and_tensors_that_are_skipped_are_read_as_in_transformers() {
    let (name, device) = ("llama-v4-tied-bf16", Device::flex());
    let expected = expected(name);
    let check = |rename: fn(&str) -> String, added: &[(&str, &[usize])], note: Option<&str>| {
        let dir = with_config(name, |_| ());
        rewrite(dir.path(), rename, added);
        let model = CausalLm::from_model_dir(dir.path(), &device).expect("loads");
        assert_close(&cached_logits(&model, &[&expected.ids]), &expected.logits, name);
        let notes = notes_of(dir.path());
        assert_eq!(notes.len(), usize::from(note.is_some()), "{notes:?}");
        note.into_iter().for_each(|note| assert!(notes[0].contains(note), "{notes:?}"));
    };
    let whole: fn(&str) -> String = str::to_owned;
    let base: fn(&str) -> String = |name| name.trim_start_matches("model.").to_owned();
    check(base, &[], None);
    let last = load(name).shape().num_layers;
    let behind = format!("model.layers.{last}.eh_proj.weight");
    check(whole, &[(&behind, &[2, 3])], Some(&behind));
    check(whole, &[("mtp.fc.weight", &[2]), ("v_head.bias", &[1])], Some("has 2 tensors"));
    check(whole, &[("model.layers.0.self_attn.rotary_emb.inv_freq", &[2])], None);
    check(base, &[("mtp.norm.weight", &[2])], Some("mtp.norm.weight"));
    // A tensor within a layer would change it.
    let dir = with_config(name, |_| ());
    rewrite(dir.path(), whole, &[("model.layers.0.self_attn.q_norm.weight", &[2])]);
    let refused = CausalLm::from_model_dir(dir.path(), &device).expect_err("refused").to_string();
    assert!(
        refused.contains("unexpected tensor `model.layers.0.self_attn.q_norm.weight`"),
        "{refused}"
    );
}

#[test]
fn a_partial_rotation_that_transformers_ignores_is_noted() {
    let partial = |config: &mut serde_json::Value| config["partial_rotary_factor"] = 0.5.into();
    let notes = notes_of(with_config("llama-v4-tied-bf16", partial).path());
    assert!(notes.len() == 1 && notes[0].contains("`partial_rotary_factor`"), "{notes:?}");
    assert_eq!(notes_of(&fixture("gpt-neox-serial-bf16")), [] as [String; 0]);
}
