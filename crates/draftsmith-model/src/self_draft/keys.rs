//! The keys of a drafter's `config.json`, by one rule for adapters, EAGLE-3 and block drafters.
//!
//! Trainers add keys that change the network, and a reader that overlooks one computes another
//! drafter. So every key, in nested tables too, must be one that the reader reads, one that changes
//! nothing ([`INERT`]), or one with its neutral value ([`NEUTRAL`]). Any other is refused by name,
//! unless the user ignores it. `null` counts as absent.
//!
//! Draft models need no such rule. They are checkpoints of transformers, whose classes also ignore
//! the keys of other families.

#[cfg(test)]
mod tests;

use std::ops::Deref;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{ModelError, Result, read_json};

/// Keys that change nothing: records, training and generation settings of transformers, trainers
/// and this program, and those that only concern inputs other than text, which are refused by other keys.
const INERT: &str = "\
    _attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation _name_or_path \
    _output_attentions architectures assistant_confidence_threshold assistant_early_exit assistant_lookbehind \
    attention_dropout attn_implementation auto_map bad_words_ids base_model_ep_plan base_model_pp_plan \
    base_model_tp_plan begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout \
    confidence_head_alpha decoder_start_token_id diversity_penalty do_sample draftsmith early_stopping \
    embed_requires_grad encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff \
    eta_cutoff exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id \
    gradient_checkpointing has_no_defaults_at_init hidden_dropout id2label initializer_range is_decoder label2id \
    length_penalty max_length max_sequence_length max_window_layers min_length modal_type mrope_interleaved \
    mrope_section name_or_path no_repeat_ngram_size num_anchors num_assistant_tokens num_assistant_tokens_schedule \
    num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states output_scores \
    pad_token_id parallel_draft_heads_num_layers prefix pretraining_tp problem_type remove_invalid_values \
    repetition_penalty return_dict return_dict_in_generate reuse_target_lm_head sep_token_id \
    sliding_window_non_causal speculators_version suppress_tokens target_hidden_size target_lookbehind target_model_type \
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_last_hidden_states tokenizer_class top_k \
    top_p torchscript transformers_version tuned typical_p use_bfloat16 use_cache weights_hash";

/// Keys that change the network, each beside the value with which it changes nothing.
const NEUTRAL: [(&str, &str); 8] = [
    (
        "false",
        "add_cross_attention additional_fc fc_norm is_encoder_decoder norm_before_fc parallel_drafting \
         use_aux_norm use_mrope use_mtp_layernorm use_sliding_window use_swa",
    ),
    (
        "true",
        "next_layer_regular use_aux_hidden_state use_input_layernorm_in_first_layer use_last_layernorm",
    ),
    (
        "1",
        "input_embedding_scale logit_scale logits_mup_width_multiplier output_multiplier parallel_draft_step",
    ),
    ("3", "num_aux_hidden_states"),
    ("{}", "pruned_heads"),
    ("\"dspark\"", "projector_type"),
    ("\"gqa\"", "attention_mode"),
    ("\"rope\"", "position_embedding_type"),
];

/// The keys that are read of the layers of a Llama or Qwen 3, without windows.
const LAYERS: &str = "attention_bias head_dim hidden_act hidden_size intermediate_size max_position_embeddings mlp_bias \
                      model_type num_attention_heads num_hidden_layers num_key_value_heads partial_rotary_factor \
                      quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings \
                      use_bidirectional_attention vocab_size";
/// The keys of windows in drafters that are no layers of their target's family.
const WINDOWS: &str =
    "layer_types max_window_layers sliding_window swa_window_size use_sliding_window use_swa";
/// The further keys of other families, whose layers adapters may have.
const FAMILIES: &str = "attn_logit_softcapping final_logit_softcapping hidden_activation layer_norm_eps layer_types \
                        original_max_position_embeddings query_pre_attn_scalar rope_local_base_freq rotary_emb_base \
                        rotary_pct sliding_window sliding_window_pattern use_parallel_residual use_sliding_window";
/// The keys of rotary embeddings in nested tables.
const ROPE: &str = "attention_factor beta_fast beta_slow factor full_attention high_freq_factor long_factor \
                    low_freq_factor mscale mscale_all_dim original_max_position_embeddings partial_rotary_factor \
                    rope_theta rope_type short_factor sliding_attention truncate type";

/// The tables whose keys are named one by one.
const TABLES: &str = "dflash_config eagle_config full_attention rope_parameters rope_scaling sliding_attention \
                      speculators_config transformer_layer_config";
/// The table in which the speculators library keeps the keys of a drafter's layers.
pub(crate) const LAYER_KEYS: &str = "transformer_layer_config";
/// The keys of the speculators library that say how its drafters are meant to be served.
const SERVING: &str = "algorithm default_proposal_method proposal_methods verifier";

/// The keys that all forms read.
pub(crate) const RECORD: &str = "dtype target_hash torch_dtype training";

/// The directory of a drafter, and the keys of its `config.json` that are ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrafterDir {
    /// The directory.
    pub path: PathBuf,
    /// The ignored keys, those of a nested table as in `dflash_config.block_size`.
    pub ignored_keys: Vec<String>,
}

impl<P: AsRef<Path>> From<P> for DrafterDir {
    fn from(path: P) -> Self {
        Self { path: path.as_ref().to_path_buf(), ignored_keys: Vec::new() }
    }
}

impl From<&Self> for DrafterDir {
    fn from(dir: &Self) -> Self {
        dir.clone()
    }
}

impl Deref for DrafterDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

/// The keys and names of tensors of a form of drafter, in our files and in those of other trainers.
#[derive(Debug)]
pub struct DraftKeys {
    /// The keys of the form itself that are read, beside [`RECORD`].
    pub(crate) own: &'static str,
    /// The key of the target's layers, and the number in it of the state before the first layer.
    pub(crate) layers: (&'static str, i64),
    /// Whether it reads the state after the target's last layer.
    pub(crate) reads_last: bool,
    /// The table whose keys are read as if they were at the top level.
    pub(crate) table: &'static str,
    /// Whether a key in this table decides if the top level has another value, as in the servers.
    /// Otherwise such a key is refused.
    pub(crate) table_decides: bool,
    /// Whether the layers may be of any family, with its windows.
    pub(crate) has_families: bool,
    /// A prefix that all tensors may have in addition.
    pub(crate) dropped_prefix: &'static str,
    /// Another prefix of some tensors, and ours.
    pub(crate) other_prefix: (&'static str, &'static str),
    /// The forms of other trainers. All that apply are translated to ours, in their order.
    pub(crate) dialects: &'static [DraftDialect],
}

/// The keys of a trainer that differ from ours.
#[derive(Debug)]
pub(crate) struct DraftDialect {
    /// A key that its files have, and one that they lack; empty for none.
    pub(crate) marks: [&'static str; 2],
    /// A key's name there, and ours.
    pub(crate) renamed: (&'static str, &'static str),
    /// A key and its value as JSON if it is absent.
    pub(crate) default: (&'static str, &'static str),
}

impl DraftDialect {
    /// Describes a form that differs only in a key's name.
    pub(crate) const fn named(theirs: &'static str, ours: &'static str) -> Self {
        Self { marks: [theirs, ""], renamed: (theirs, ours), default: ("", "") }
    }

    /// Describes a form that differs only in a default.
    pub(crate) const fn defaulting(
        marks: [&'static str; 2],
        default: (&'static str, &'static str),
    ) -> Self {
        Self { marks, renamed: ("", ""), default }
    }

    /// Translates the keys of a file in this form.
    pub(crate) fn translate(&self, keys: &mut Map<String, Value>) {
        let has = |keys: &Map<String, Value>, key| keys.get(key).is_some_and(|it| !it.is_null());
        if !has(keys, self.marks[0]) || has(keys, self.marks[1]) {
            return;
        }
        let (theirs, ours) = self.renamed;
        if !has(keys, ours)
            && let Some(value) = keys.get(theirs).cloned()
        {
            keys.insert(ours.to_owned(), value);
        }
        let (key, value) = self.default;
        if !key.is_empty() && !has(keys, key) {
            keys.insert(key.to_owned(), value.parse().unwrap_or_default());
        }
    }
}

/// The keys of a drafter's `config.json`, with those of nested tables beside the others.
pub(crate) struct FoundKeys {
    pub(crate) keys: Map<String, Value>,
    /// An error for each key that is refused.
    pub(crate) refused: Vec<ModelError>,
}

impl DrafterDir {
    /// Names the ignored keys in a sentence; `None` if there are none.
    pub fn ignored_text(&self) -> Option<String> {
        let names: Vec<String> = self.ignored_keys.iter().map(|key| format!("`{key}`")).collect();
        let text = || {
            format!("read without {} of `config.json`, as `ignored_keys` says", names.join(", "))
        };
        (!names.is_empty()).then(text)
    }

    /// Returns whether a key is ignored, in any table.
    pub(crate) fn ignores(&self, key: &str) -> bool {
        self.ignored_keys.iter().any(|ignored| last(ignored) == key)
    }

    /// Builds the error for a key that is refused.
    pub(crate) fn refuse(&self, key: impl Into<String>, problem: impl Into<String>) -> ModelError {
        let (path, key, problem) = (self.path.join("config.json"), key.into(), problem.into());
        ModelError::RefusedKey { path, key, problem }
    }

    /// Reads `config.json`. Of a key in several tables, the layers' own decides, then that of the
    /// form's table, or that of the top level.
    ///
    /// # Errors
    /// If the file is missing or malformed, or an ignored key is absent.
    pub(crate) fn read_keys(&self, kind: &DraftKeys) -> Result<FoundKeys> {
        let path = self.path.join("config.json");
        let mut keys: Map<String, Value> = read_json(&path)?;
        for key in &self.ignored_keys {
            if !remove(&mut keys, key) {
                let problem = format!("of the recipe names `{key}`, which this file does not have");
                return Err(ModelError::config(&path, "ignored_keys", problem));
            }
        }
        let (mut named, mut refused) = (Vec::new(), Vec::new());
        leaves("", &keys, &mut named);
        if let Some(Value::Object(nested)) = keys.get(kind.table).cloned() {
            for (key, value) in nested.into_iter().filter(|(_, value)| !value.is_null()) {
                match keys.get(&key).filter(|other| !other.is_null()) {
                    None => drop(keys.insert(key, value)),
                    Some(other) if *other == value => {}
                    Some(_) if kind.table_decides => drop(keys.insert(key, value)),
                    Some(other) => {
                        let problem = format!("is {value}, but `{key}` is {other}");
                        refused.push(self.refuse(format!("{}.{key}", kind.table), problem));
                    }
                }
            }
        }
        if let Some(Value::Object(layer)) = keys.get(LAYER_KEYS).cloned() {
            // The class of the layers is not that of the drafter.
            keys.extend(layer.into_iter().filter(|(key, _)| key != "architectures"));
        }
        let is_llama = keys.get("model_type").is_none_or(|family| family == "llama");
        let more = match kind.has_families {
            true if is_llama => "",
            true => FAMILIES,
            false => WINDOWS,
        };
        for (name, value) in named {
            let read = match name.rsplit('.').nth(1).unwrap_or(LAYER_KEYS) {
                table if table == kind.table || table == LAYER_KEYS => {
                    &[kind.own, RECORD, LAYERS, more][..]
                }
                "speculators_config" => &[SERVING],
                "dflash_config" | "eagle_config" => &[],
                _ => &[ROPE],
            };
            let key = last(&name);
            let is_read = read.iter().chain(&[INERT]).any(|read| has(read, key));
            if !is_read && !is_neutral(key, &value) {
                let problem = format!("is {value}, which is not computed here, or not known");
                refused.push(self.refuse(name, problem));
            }
        }
        Ok(FoundKeys { keys, refused })
    }
}

/// Returns the last part of a key's dotted name.
fn last(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Returns whether a list of words contains a key.
fn has(words: &str, key: &str) -> bool {
    words.split_whitespace().any(|word| word == key)
}

/// Removes a key by its dotted name. Returns whether it was there.
fn remove(keys: &mut Map<String, Value>, name: &str) -> bool {
    match name.split_once('.') {
        None => keys.shift_remove(name).is_some(),
        Some((table, key)) => match keys.get_mut(table) {
            Some(Value::Object(nested)) => remove(nested, key),
            _ => false,
        },
    }
}

/// Lists all keys with their values, those of nested tables by their dotted names.
fn leaves(table: &str, keys: &Map<String, Value>, found: &mut Vec<(String, Value)>) {
    for (key, value) in keys {
        let name = if table.is_empty() { key.clone() } else { format!("{table}.{key}") };
        match value.as_object().filter(|_| has(TABLES, key)) {
            Some(nested) => leaves(&name, nested, found),
            None => found.push((name, value.clone())),
        }
    }
}

/// Returns whether a key that is not read changes nothing with this value.
fn is_neutral(key: &str, value: &Value) -> bool {
    if value.is_null() {
        return true;
    }
    let (number, text) = (value.as_f64(), value.to_string());
    let is_equal =
        |neutral: &str| text == neutral || number.is_some() && neutral.parse().ok() == number;
    NEUTRAL.iter().any(|(neutral, keys)| has(keys, key) && is_equal(neutral))
}
