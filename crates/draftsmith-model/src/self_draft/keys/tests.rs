//! The keys that trainers write by default are accepted, and those that change the network are not.

use serde::de::value::Error;
use serde::de::{Deserializer, Error as _, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use serde_json::json;

use super::*;
use crate::config::{Keys, RopeKeys};
use crate::self_draft::DraftForm;
use crate::self_draft::files::RecordKeys;
use crate::{AdapterForm, BlockForm, Eagle3Form, adapter, block_drafter, eagle3};

const ADAPTER: DraftKeys = AdapterForm::KEYS;
const EAGLE3: DraftKeys = Eagle3Form::KEYS;
const BLOCK: DraftKeys = BlockForm::KEYS;

/// A deserializer that notes the fields that a struct asks for.
struct FieldsOf<'a>(&'a mut Vec<&'static str>);

impl<'de> Deserializer<'de> for FieldsOf<'_> {
    type Error = Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        self.0.extend(fields);
        Err(Error::custom("noted"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("no struct"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

fn fields<T: for<'de> Deserialize<'de>>() -> Vec<&'static str> {
    let mut found = Vec::new();
    assert!(T::deserialize(FieldsOf(&mut found)).is_err());
    found.sort_unstable();
    found
}

fn words(lists: &[&'static str]) -> Vec<&'static str> {
    let mut all: Vec<&str> = lists.iter().flat_map(|list| list.split_whitespace()).collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[test]
fn the_lists_of_keys_are_those_that_readers_read() {
    assert_eq!(words(&[ADAPTER.own]), fields::<adapter::OwnKeys>());
    assert_eq!(words(&[EAGLE3.own]), fields::<eagle3::OwnKeys>());
    let mut block = fields::<block_drafter::BlockKeys>();
    block.extend(["shift_label", "use_confidence_head"]);
    block.sort_unstable();
    assert_eq!(words(&[BLOCK.own]), block);
    assert_eq!(words(&[RECORD]), fields::<RecordKeys>());
    let mut layers = words(&[LAYERS, FAMILIES, WINDOWS, "bos_token_id eos_token_id"]);
    layers.retain(|key| *key != "model_type");
    assert_eq!(layers, fields::<Keys>());
    assert_eq!(words(&[ROPE]), fields::<RopeKeys>());
    let tables = words(&[INERT, NEUTRAL.map(|(_, keys)| keys).concat().leak()]);
    for key in tables {
        let of_kinds = [ADAPTER.own, EAGLE3.own, BLOCK.own, RECORD];
        let is_shared = ["architectures", "target_hidden_size"].contains(&key)
            || ["bos_token_id", "eos_token_id", "max_window_layers"].contains(&key)
            || ["use_sliding_window", "use_swa", "sliding_window_non_causal"].contains(&key)
            || ["fc_norm", "norm_before_fc"].contains(&key);
        let is_read = of_kinds.iter().any(|list| has(list, key)) || layers.contains(&key);
        assert_eq!(is_read, is_shared, "`{key}` is read and in a table");
    }
}

/// Returns the refused keys of a `config.json`.
fn refused(kind: &DraftKeys, config: &Value, ignored: &[&str]) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let ignored_keys = ignored.iter().map(|key| (*key).to_owned()).collect();
    let dir = DrafterDir { path: dir.path().to_path_buf(), ignored_keys };
    let name = |error| match error {
        ModelError::RefusedKey { key, problem, .. } => {
            assert!(!problem.is_empty());
            key
        }
        other => panic!("{other}"),
    };
    dir.read_keys(kind).unwrap().refused.into_iter().map(name).collect()
}

fn merged(all: impl IntoIterator<Item = Value>) -> Value {
    let objects = all.into_iter().map(|it| it.as_object().unwrap().clone());
    Value::Object(objects.flatten().collect())
}

/// What transformers 4 writes for a Llama, with all defaults.
fn transformers_4() -> Value {
    let network = json!({
        "vocab_size": 32000, "max_position_embeddings": 2048, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu",
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "pretraining_tp": 1, "use_cache": true,
        "rope_theta": 10000.0, "rope_scaling": null, "attention_bias": false, "attention_dropout": 0.0,
        "mlp_bias": false, "head_dim": 16, "return_dict": true, "output_hidden_states": false,
        "torchscript": false, "dtype": null, "pruned_heads": {}, "tie_word_embeddings": false,
        "chunk_size_feed_forward": 0, "is_encoder_decoder": false, "is_decoder": false,
        "cross_attention_hidden_size": null, "add_cross_attention": false, "tie_encoder_decoder": false,
    });
    let others = json!({
        "architectures": null, "finetuning_task": null, "id2label": { "0": "LABEL_0", "1": "LABEL_1" },
        "label2id": { "LABEL_0": 0, "LABEL_1": 1 }, "task_specific_params": null, "problem_type": null,
        "tokenizer_class": null, "prefix": null, "bos_token_id": 1, "pad_token_id": null, "eos_token_id": 2,
        "sep_token_id": null, "decoder_start_token_id": null,
    });
    let generation = json!({
        "max_length": 20, "min_length": 0, "do_sample": false, "early_stopping": false, "num_beams": 1, "temperature": 1.0, "top_k": 50,
        "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0,
        "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": null,
        "num_return_sequences": 1, "output_scores": false, "return_dict_in_generate": false,
        "forced_bos_token_id": null, "forced_eos_token_id": null, "remove_invalid_values": false,
        "exponential_decay_length_penalty": null, "suppress_tokens": null, "begin_suppress_tokens": null,
        "num_beam_groups": 1, "diversity_penalty": 0.0, "_name_or_path": "", "_commit_hash": null,
        "transformers_version": "4.57.6", "model_type": "llama", "tf_legacy_loss": false,
        "use_bfloat16": false, "output_attentions": false, "torch_dtype": "bfloat16",
        "_attn_implementation_autoset": true,
    });
    merged([network, others, generation])
}

/// What transformers 5 writes for a Qwen 3, with all defaults.
fn transformers_5() -> Value {
    json!({
        "transformers_version": "5.24.0", "architectures": ["Qwen3ForCausalLM"], "output_hidden_states": false,
        "return_dict": true, "dtype": "bfloat16", "chunk_size_feed_forward": 0, "is_encoder_decoder": false,
        "id2label": { "0": "LABEL_0" }, "label2id": { "LABEL_0": 0 }, "problem_type": null, "vocab_size": 32000,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "use_cache": true, "tie_word_embeddings": false,
        "rope_parameters": { "rope_type": "default", "rope_theta": 1e4 }, "attention_bias": false,
        "use_sliding_window": false, "sliding_window": null, "max_window_layers": 28,
        "layer_types": ["full_attention", "full_attention"], "attention_dropout": 0.0, "pad_token_id": null,
        "bos_token_id": null, "eos_token_id": null, "_name_or_path": "", "model_type": "qwen3",
        "output_attentions": false, "_attn_implementation": "flex_attention", "tie_last_hidden_states": null,
    })
}

fn speculators(method: &str, layer: Value, own: Value) -> Value {
    let common = json!({
        "speculators_model_type": method, "speculators_version": "0.9.0", "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": method, "default_proposal_method": "greedy",
            "proposal_methods": [{ "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
                                   "accept_tolerance": 0.0 }],
            "verifier": { "name_or_path": "target", "architectures": ["LlamaForCausalLM"] },
        },
        "draft_vocab_size": 32000, "target_hidden_size": null,
    });
    let mut base = transformers_4();
    for key in transformers_5().as_object().unwrap().keys() {
        if !["transformers_version", "dtype", "tie_word_embeddings"].contains(&key.as_str()) {
            base.as_object_mut().unwrap().shift_remove(key);
        }
    }
    merged([base, common, own])
}

#[test]
fn every_key_that_trainers_write_by_default_is_accepted() {
    let eagle3 = [
        ("transformers 4", merged([transformers_4(), json!({ "draft_vocab_size": 32000 })])),
        (
            "speculators",
            speculators(
                "eagle3",
                transformers_4(),
                json!({
                    "architectures": ["Eagle3Speculator"], "norm_before_residual": false, "norm_before_fc": false,
                    "fc_norm": false, "norm_output": true, "embed_requires_grad": false,
                    "eagle_aux_hidden_state_layer_ids": null,
                }),
            ),
        ),
        (
            "SpecForge",
            merged([
                transformers_4(),
                json!({
                    "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000,
                    "eagle_config": { "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": true },
                    "sliding_window": 512, "use_sliding_window": false, "max_window_layers": 48,
                    "target_model_type": "gemma3_text", "additional_fc": false, "reuse_target_lm_head": true,
                    "rope_scaling": { "rope_type": "default", "mrope_section": [24, 20, 20],
                                      "mrope_interleaved": true },
                }),
            ]),
        ),
        (
            "Model-Optimizer",
            json!({
                "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "eos_token_id": 2,
                "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.01, "intermediate_size": 128,
                "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 4,
                "num_key_value_heads": 4, "num_hidden_layers": 1, "pad_token_id": null, "rms_norm_eps": 1e-5,
                "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "5.0.0",
                "use_cache": true, "vocab_size": 32000, "draft_vocab_size": 32000,
                "rope_scaling": { "rope_type": "default", "rope_theta": 10000 }, "attention_bias": false,
                "attention_dropout": 0.0, "head_dim": 16, "mlp_bias": false, "pretraining_tp": 1,
                "rope_theta": 10000, "position_embedding_type": "rope", "num_aux_hidden_states": 3,
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": true,
                    "use_input_layernorm_in_first_layer": true, "use_last_layernorm": true,
                    "use_mtp_layernorm": false, "next_layer_regular": true, "parallel_draft_step": 1,
                    "parallel_draft_heads_num_layers": 1,
                },
            }),
        ),
        (
            "Automodel",
            merged([
                transformers_4(),
                json!({
                    "architectures": ["LlamaEagle3DraftModel"], "draft_vocab_size": 32000, "target_hidden_size": 64,
                    "attn_implementation": "eager", "fc_norm": false, "norm_output": false,
                    "parallel_drafting": false,
                }),
            ]),
        ),
        (
            "AngelSlim",
            merged([
                transformers_4(),
                json!({
                    "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 32000, "use_mrope": false,
                    "sliding_window": 131072, "use_sliding_window": false, "max_window_layers": 28,
                }),
            ]),
        ),
    ];
    let dspark = json!({
        "block_size": 7, "mask_token_id": 5, "markov_rank": 256, "markov_head_type": "vanilla",
        "enable_confidence_head": true, "confidence_head_with_markov": true, "num_target_layers": 36,
    });
    let block = [
        (
            "speculators",
            speculators(
                "dspark",
                transformers_5(),
                merged([
                    dspark.clone(),
                    json!({
                        "architectures": ["DSparkSpeculator"], "aux_hidden_state_layer_ids": [2, 4],
                        "sample_from_anchor": true, "sliding_window_non_causal": false,
                    }),
                ]),
            ),
        ),
        (
            "DeepSpec, Automodel",
            merged([
                transformers_5(),
                dspark.clone(),
                json!({ "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, 3], "num_anchors": 512 }),
            ]),
        ),
        (
            "SpecForge",
            merged([
                transformers_5(),
                json!({
                    "architectures": ["DSparkDraftModel"], "auto_map": { "AutoModel": "dspark.DSparkDraftModel" },
                    "block_size": 16, "num_target_layers": 36, "is_causal": true,
                    "dflash_config": {
                        "attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": true,
                        "enable_confidence_head": true, "markov_head_type": "vanilla", "markov_rank": 256,
                        "mask_token_id": 5, "projector_type": "dspark", "target_layer_ids": [1, 3],
                    },
                }),
            ]),
        ),
        (
            "z-lab, Automodel",
            merged([
                transformers_5(),
                json!({
                    "architectures": ["DFlashDraftModel"], "block_size": 16, "num_target_layers": 36,
                    "is_causal": false,
                    "dflash_config": {
                        "block_size": 16, "mask_token_id": 5, "target_layer_ids": [1, 3], "output_multiplier": 1.0,
                        "final_logit_softcapping": null, "input_embedding_scale": 1.0,
                    },
                }),
            ]),
        ),
        (
            "Model-Optimizer",
            merged([
                transformers_5(),
                json!({
                    "block_size": 8, "rope_theta": 1e4, "rope_scaling": null, "torch_dtype": "bfloat16",
                    "dflash_config": {
                        "mask_token_id": 5, "target_layer_ids": [1, 3], "projector_type": "dspark",
                        "shift_label": true, "markov_rank": 256, "markov_head_type": "vanilla",
                        "use_confidence_head": false,
                    },
                }),
            ]),
        ),
    ];
    let kangaroo =
        json!({ "exit_layer": 2, "max_sequence_length": 2048, "weights_hash": "", "tuned": {} });
    let adapter = [("Kangaroo", merged([transformers_4(), kangaroo]))];
    for (kind, configs) in [(&EAGLE3, &eagle3[..]), (&BLOCK, &block), (&ADAPTER, &adapter)] {
        for (trainer, config) in configs {
            assert_eq!(refused(kind, config, &[]), [""; 0], "{trainer}");
        }
    }
}

/// Keys that change the network, with such values.
fn changing() -> Vec<(&'static str, Value)> {
    vec![
        ("norm_before_fc", true.into()),
        ("fc_norm", true.into()),
        ("use_aux_norm", true.into()),
        ("logit_scale", 0.5.into()),
        ("output_multiplier", 0.2.into()),
        ("input_embedding_scale", 2.into()),
        ("num_aux_hidden_states", 5.into()),
        ("final_logit_softcapping", 30.0.into()),
        ("use_aux_hidden_state", false.into()),
        ("use_last_layernorm", false.into()),
        ("parallel_drafting", true.into()),
        ("projector_type", "domino".into()),
        ("attention_mode", "mla".into()),
        ("layer_types", json!(["sliding_attention"])),
        ("sliding_window", 16.into()),
        ("use_sliding_window", true.into()),
        ("use_swa", true.into()),
        ("conv_kernel_size", 2.into()),
        ("per_layer_config", json!({ "0": { "head_dim": 8 } })),
        ("a_key_of_tomorrow", 1.into()),
        ("a_table_of_tomorrow", json!({ "use_cache": true })),
    ]
}

#[test]
fn keys_that_change_the_network_are_refused_by_name_at_each_level() {
    let mut layer = transformers_4();
    layer.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    let insert = |config: &mut Value, table: &str, key: &str, value: &Value| {
        let table = if table.is_empty() { config } else { &mut config[table] };
        table[key] = value.clone();
    };
    for (kind, tables) in [
        (&ADAPTER, &[""][..]),
        (&EAGLE3, &["", "eagle_config", "transformer_layer_config", "dflash_config"]),
        (&BLOCK, &["", "dflash_config", "transformer_layer_config", "eagle_config"]),
    ] {
        let is_read = |key| has(kind.own, key) || !kind.has_families && has(WINDOWS, key);
        for (key, value) in changing().into_iter().filter(|(key, _)| !is_read(key)) {
            for table in tables {
                let mut config = layer.clone();
                if *table == "transformer_layer_config" {
                    config = json!({ "transformer_layer_config": layer.clone() });
                }
                insert(&mut config, table, key, &value);
                let name = if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") };
                assert_eq!(refused(kind, &config, &[]), std::slice::from_ref(&name));
                assert_eq!(refused(kind, &config, &[&name]), [""; 0]);
                insert(&mut config, table, key, &Value::Null);
                assert_eq!(refused(kind, &config, &[]), [""; 0], "null is absent");
            }
        }
        // Keys that are read have no meaning in a table that is not.
        for (table, key) in [
            ("speculators_config", "block_size"),
            ("rope_scaling", "hidden_size"),
            ("rope_parameters", "tomorrow"),
        ] {
            let mut config = layer.clone();
            config[table] = json!({ key: 1 });
            assert_eq!(refused(kind, &config, &[]), [format!("{table}.{key}")]);
        }
    }
}

#[test]
fn windows_are_read_of_every_form() {
    let used =
        json!({ "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] });
    let config = merged([transformers_5(), used]);
    for kind in [&BLOCK, &EAGLE3, &ADAPTER] {
        assert_eq!(refused(kind, &config, &[]), [""; 0]);
    }
}

#[test]
fn a_blocks_own_table_decides_and_an_ignored_key_must_be_there() {
    let config = |nested: Value| {
        merged([transformers_5(), json!({ "block_size": 8, "dflash_config": nested })])
    };
    let twice = config(json!({ "block_size": 4, "mask_token_id": 5 }));
    assert_eq!(refused(&BLOCK, &twice, &[]), [""; 0]);
    for (ignored, block_size) in [("", 4), ("dflash_config.block_size", 8), ("block_size", 4)] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), twice.to_string()).unwrap();
        let ignored_keys =
            Vec::from_iter([ignored.to_owned()].into_iter().filter(|it| !it.is_empty()));
        let from = DrafterDir { path: dir.path().to_path_buf(), ignored_keys };
        assert_eq!(from.read_keys(&BLOCK).unwrap().keys["block_size"], block_size);
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), twice.to_string()).unwrap();
    let ignored_keys = vec!["dflash_config.misspelt".to_owned()];
    let from = DrafterDir { path: dir.path().to_path_buf(), ignored_keys };
    let error = from.read_keys(&BLOCK).err().unwrap().to_string();
    assert!(
        error.contains("ignored_keys") && error.contains("`dflash_config.misspelt`"),
        "{error}"
    );
    let same = config(json!({ "block_size": 8, "mask_token_id": null }));
    assert_eq!(refused(&BLOCK, &same, &[]), [""; 0]);
}
