//! The ways in which servers misread the files of a drafter: a row each, with the edit of the files, the
//! target's states or the drafter's session that has the same effect, and what to do about it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use draftsmith_files::write_json;
use draftsmith_model::{
    BlockDrafterConfig, CausalLm, DrafterDir, Eagle3Config, ModelConfig, NamedTensor, Rows,
    SessionFaults, WeightDtype, WeightReader, write_with_ids,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use Edit::{Behind, Drawn, Embeddings, Filled, Ignored, Layers, Resized, Session, Set, Toggled};

/// The kinds of drafters that servers run.
const MODEL: &str = "model";
pub(super) const EAGLE3: &str = "eagle3";
pub(super) const BLOCK: &str = "block";
/// The kinds of drafters that are explained.
pub(super) const ALL: &[&str] = &[EAGLE3, BLOCK, MODEL];
const STATES: &[&str] = &[EAGLE3, BLOCK];
const EAGLES: &[&str] = &[EAGLE3];
const BLOCKS: &[&str] = &[BLOCK];

/// What to do about each group of misreadings.
const WINDOW: &str = "serve it with a server that computes windows (`draftsmith server doctor` lists them), or texts \
                      shorter than the window";
const LAYERS: &str = "compare the layer numbers in `config.json` with those that the server counts; `draftsmith export` \
                      writes them as servers read them";
const NORMS: &str =
    "check that the file that the server loads has the tensor under the name that it expects";
const NEWER: &str =
    "serve it with vLLM 0.33, SGLang 0.5.23 or newer; llama.cpp b11434 does not compute it";
const KEYS: &str =
    "write the key at the top of `config.json`, as `draftsmith export` does, or update the server";
const SERVER: &str = "update the server: no file changes this";
const CACHE: &str = "keep the drafter's cache in 16 bits (llama.cpp: `-ctkd f16 -ctvd f16`)";
const D2T: &str = "`d2t` must have the target's ids minus their numbers as int64; SGLang ignores it for block drafters";
const ROWS: &str = "draft as many candidates as the block has";
const GREEDY: &str =
    "vLLM: `draft_sample_method` `greedy`; llama.cpp: `--spec-draft-sampling greedy`";

/// A way in which a server may misread a drafter.
#[derive(Debug, Serialize)]
pub struct Misreading {
    /// The name.
    pub name: &'static str,
    /// What the server does, in words that follow "the server probably".
    pub what: &'static str,
    /// What to do.
    pub hint: &'static str,
    #[serde(skip)]
    kinds: &'static [&'static str],
    #[serde(skip)]
    edit: Edit,
}

/// An edit with the effect of a misreading.
#[derive(Debug)]
enum Edit {
    /// Gives a key another value; without one, the misreading changes nothing.
    Set(&'static str, fn(&Map<String, Value>, &MisreadDrafter) -> Option<Value>),
    /// Negates a key that is false by default.
    Toggled(&'static str),
    /// Ignores a key that is true, and its tensors.
    Ignored(&'static str),
    /// Makes the window longer or shorter; `None` to drop it.
    Resized(Option<i64>),
    /// Fills the tensors of this name, in each layer, with a number.
    Filled(&'static str, f32),
    /// Takes the embeddings of the target for the drafter's own.
    Embeddings,
    /// Reads other hidden states of the target, given the drafter's and the number of layers.
    Layers(fn(&[usize], usize) -> Vec<usize>),
    /// Reads the states of the token before.
    Behind,
    /// Draws candidates at temperature 1.
    Drawn,
    /// Runs sessions with these faults.
    Session(SessionFaults),
}

const fn row(
    name: &'static str,
    kinds: &'static [&'static str],
    what: &'static str,
    hint: &'static str,
    edit: Edit,
) -> Misreading {
    Misreading { name, kinds, what, hint, edit }
}

const fn faults(cache_bits: Option<u32>, position_shift: isize, behind: bool) -> Edit {
    Session(SessionFaults { cache_bits, position_shift, reads_token_behind: behind })
}

/// All misreadings that are tried. A row is read along a line.
#[rustfmt::skip]
pub(super) static MISREADINGS: [Misreading; 34] = [
    row("window-ignored", ALL, "runs this drafter's window as full attention", WINDOW, Resized(None)),
    row("window-shorter", ALL, "makes this drafter's window one token too short", WINDOW, Resized(Some(-1))),
    row("window-longer", ALL, "makes this drafter's window one token too long", WINDOW, Resized(Some(1))),
    row("layers-above", STATES, "reads the target's states one layer too high", LAYERS,
        Layers(|own, num| own.iter().map(|it| (it + 1).min(num)).collect())),
    row("layers-below", STATES, "reads the target's states one layer too low", LAYERS,
        Layers(|own, _| own.iter().map(|it| it.saturating_sub(1)).collect())),
    row("layers-reversed", STATES, "reads the target's states in reverse order", LAYERS,
        Layers(|own, _| own.iter().rev().copied().collect())),
    row("last-layer", STATES, "reads the target's last state in place of the drafter's last", LAYERS,
        Layers(|own, num| own.iter().take(own.len() - 1).copied().chain([num]).collect())),
    row("states-behind", STATES, "pairs each token with the target's state one position too early", SERVER, Behind),
    row("token-behind", EAGLES, "pairs each state with the token at its own position", SERVER, faults(None, 0, true)),
    row("positions-above", STATES, "rotates drafted tokens to one position too high", SERVER, faults(None, 1, false)),
    row("positions-below", STATES, "rotates drafted tokens to one position too low", SERVER, faults(None, -1, false)),
    row("cache-4-bits", ALL, "keeps the drafter's keys and values in 4 bits", CACHE, faults(Some(4), 0, false)),
    row("cache-8-bits", ALL, "keeps the drafter's keys and values in 8 bits", CACHE, faults(Some(8), 0, false)),
    row("no-input-norm", ALL, "leaves out the weights of `input_layernorm`", NORMS, Filled("input_layernorm.weight", 1.0)),
    row("no-hidden-norm", STATES, "leaves out the weights of `hidden_norm`", NORMS, Filled("hidden_norm.weight", 1.0)),
    row("no-mlp-norm", ALL, "leaves out the weights of `post_attention_layernorm`", NORMS,
        Filled("post_attention_layernorm.weight", 1.0)),
    row("no-query-norm", ALL, "leaves out the weights of `q_norm`", NORMS, Filled("q_norm.weight", 1.0)),
    row("no-key-norm", ALL, "leaves out the weights of `k_norm`", NORMS, Filled("k_norm.weight", 1.0)),
    row("no-last-norm", ALL, "leaves out the weights of the last `norm`", NORMS, Filled("norm.weight", 1.0)),
    row("no-norm-before-fc", EAGLES, "leaves out the norm of the target's states", NEWER, Ignored("norm_before_fc")),
    row("no-fc-norm", EAGLES, "leaves out the norms of the target's states", NEWER, Ignored("fc_norm")),
    row("state-norm", EAGLES, "feeds the drafter's state back on the wrong side of its last norm", NEWER,
        Toggled("norm_output")),
    row("residual-norm", EAGLES, "begins the residual stream on the wrong side of `hidden_norm`", KEYS,
        Toggled("norm_before_residual")),
    row("rope-base", ALL, "takes the default base of rotary positions, 10000", KEYS, Set("rope_theta", |_, _| Some(json!(1e4)))),
    row("rope-scaling", ALL, "ignores the scaling of rotary positions", KEYS, Set("rope_scaling", |_, _| Some(Value::Null))),
    row("draft-ids", STATES, "takes numbers in the draft vocabulary for ids of the target's tokens", D2T, Filled("d2t", 0.0)),
    row("target-embeddings", EAGLES, "takes the target's embeddings for the drafter's own", NORMS, Embeddings),
    row("mask-first", BLOCKS, "takes token 0 for the mask token", KEYS, Set("mask_token_id", |_, _| Some(json!(0)))),
    row("mask-end", BLOCKS, "takes the end token for the mask token", KEYS,
        Set("mask_token_id", |_, it| it.eos_token_id.map(|id| json!(id)))),
    row("anchor-layout", BLOCKS, "takes the wrong row of a block for the first candidate", KEYS,
        Toggled("sample_from_anchor")),
    row("causality", BLOCKS, "lets rows of a block read those after them, or keeps them from it", KEYS, Toggled("is_causal")),
    row("fewer-rows", BLOCKS, "computes fewer rows of a block than the drafter was trained with", ROWS,
        Set("block_size", fewer_rows)),
    row("no-markov-head", BLOCKS, "leaves out the Markov head", KEYS, Filled("markov_w2.weight", 0.0)),
    row("drawn-candidates", ALL, "draws candidates at temperature 1, or rounds much more than bf16", GREEDY, Drawn),
];

/// Returns the block size of a server that computes only the rows that it drafts. It matters if rows read
/// later ones.
fn fewer_rows(keys: &Map<String, Value>, drafter: &MisreadDrafter) -> Option<Value> {
    let num_before = usize::from(keys["sample_from_anchor"] != true);
    let size = json!(drafter.num_candidates + num_before);
    let is_shorter = size.as_u64() < keys["block_size"].as_u64();
    (keys.get("is_causal") != Some(&json!(true)) && is_shorter).then_some(size)
}

/// A drafter whose files may be misread.
#[derive(Debug)]
pub(super) struct MisreadDrafter {
    pub(super) kind: &'static str,
    dir: PathBuf,
    /// Its `config.json` in our own form.
    keys: Map<String, Value>,
    /// The numbers of layers before the target's states that it reads.
    pub(super) layers: Vec<usize>,
    num_target_layers: usize,
    /// The number of candidates in a round of the server.
    pub(super) num_candidates: usize,
    eos_token_id: Option<u32>,
}

/// A drafter's files and drafts as a server may read them.
#[derive(Debug, Clone)]
pub(super) struct DrafterReading {
    pub(super) dir: DrafterDir,
    /// For each state that the drafter reads, the number of target layers before the one it gets.
    pub(super) layers: Vec<usize>,
    pub(super) reads_behind: bool,
    pub(super) is_drawn: bool,
    pub(super) faults: SessionFaults,
    /// The relative size of random errors in states.
    pub(super) noise: f32,
}

impl MisreadDrafter {
    /// Reads the configuration of a drafter of a kind that servers run.
    ///
    /// # Errors
    /// If a file is missing or invalid.
    pub(super) fn read(kind: &'static str, dir: &Path, target: &ModelConfig) -> Result<Self> {
        let num_target_layers = target.shape.num_layers;
        let (keys, layers) = match kind {
            EAGLE3 => {
                let config = Eagle3Config::beside(dir, num_target_layers)?;
                (config.to_json(), config.target_layers)
            }
            BLOCK => {
                let config = BlockDrafterConfig::beside(dir, num_target_layers)?;
                (config.to_json(), config.target_layers)
            }
            _ => {
                let dtype = WeightDtype::F32.config_name();
                (ModelConfig::from_model_dir(dir)?.to_json(dtype), Vec::new())
            }
        };
        let eos_token_id = target.shape.eos_token_ids.first().copied();
        let keys = keys.as_object().cloned().unwrap_or_default();
        let dir = fs::canonicalize(dir)?;
        Ok(Self { kind, dir, keys, layers, num_target_layers, num_candidates: 0, eos_token_id })
    }

    /// Returns the drafter as it was trained.
    pub(super) fn as_trained(&self) -> DrafterReading {
        let (layers, dir) = (self.layers.clone(), self.dir.clone().into());
        let faults = SessionFaults::default();
        DrafterReading { dir, layers, reads_behind: false, is_drawn: false, faults, noise: 0.0 }
    }

    /// Returns the drafter as trained with random errors of the relative size `noise`, which imitate a
    /// server's rounding. Its files are written to `place`.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(super) fn with_noise(&self, noise: f32, place: &Path) -> Result<DrafterReading> {
        let edit = |name: &str, values: &mut [f32]| {
            if name != IDS {
                add_noise(values, noise);
            }
        };
        self.write_tensors(place, edit)?;
        self.write_keys(place, &self.keys)?;
        Ok(DrafterReading { dir: place.into(), noise, ..self.as_trained() })
    }

    /// Returns the drafter as a server misreads it; `None` if that changes nothing. Changed files are
    /// written to `place`.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub(super) fn misread(
        &self,
        it: &Misreading,
        target: &CausalLm,
        place: &Path,
    ) -> Result<Option<DrafterReading>> {
        if !it.kinds.contains(&self.kind) {
            return Ok(None);
        }
        let (own, mut keys) = (self.as_trained(), self.keys.clone());
        let mut written = DrafterReading { dir: place.into(), ..own.clone() };
        match &it.edit {
            Layers(edit) => {
                let layers = edit(&own.layers, self.num_target_layers);
                return Ok((layers != own.layers).then_some(DrafterReading { layers, ..own }));
            }
            Behind => return Ok(Some(DrafterReading { reads_behind: true, ..own })),
            Drawn => return Ok(Some(DrafterReading { is_drawn: true, ..own })),
            Session(faults) => return Ok(Some(DrafterReading { faults: *faults, ..own })),
            Set(key, value) => {
                if let Some(value) = value(&keys, self).filter(|_| keys.contains_key(*key)) {
                    set(&mut keys, key, value);
                }
            }
            Toggled(key) => {
                let is_on = keys.get(*key) == Some(&json!(true));
                keys.insert((*key).to_owned(), json!(!is_on));
            }
            Ignored(key) if keys.get(*key) == Some(&json!(true)) => {
                written.dir.ignored_keys.push((*key).to_owned());
            }
            Resized(by) => {
                let size = keys.get("sliding_window").and_then(Value::as_i64);
                match (size, by) {
                    (Some(size), Some(by)) => set(&mut keys, "sliding_window", json!(size + by)),
                    (Some(_), None) => keys.retain(|key, _| !WINDOW_KEYS.contains(&&**key)),
                    (None, _) => {}
                }
            }
            Ignored(_) | Filled(..) | Embeddings => {}
        }
        let is_changed = match &it.edit {
            Filled(tensor, number) => self.write_tensors(place, |name, values| {
                let before = name.strip_suffix(tensor);
                if before.is_some_and(|it| it.is_empty() || it.ends_with('.')) {
                    values.fill(*number);
                }
            })?,
            Embeddings => {
                let ids: Vec<u32> = (0..target.shape().vocab_size as u32).collect();
                let [theirs] = Rows::to_host([target.embed_ids(&ids)])?;
                self.write_tensors(place, |name, values| {
                    if name == "embed_tokens.weight" && values.len() == theirs.len() {
                        values.copy_from_slice(&theirs);
                    }
                })?
            }
            _ => {
                self.link_files(place, |_| true)?;
                keys != self.keys || !written.dir.ignored_keys.is_empty()
            }
        };
        self.write_keys(place, &keys)?;
        Ok(is_changed.then_some(written))
    }

    /// Lists the layers whose states misreadings take, with the drafter's own.
    pub(super) fn all_layers(&self) -> Vec<usize> {
        let mut all = self.layers.clone();
        for misreading in MISREADINGS.iter().filter(|_| !self.layers.is_empty()) {
            if let Layers(edit) = misreading.edit {
                all.extend(edit(&self.layers, self.num_target_layers));
            }
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    fn write_keys(&self, place: &Path, keys: &Map<String, Value>) -> Result<()> {
        let keys = keys.iter().filter(|(key, _)| *key != "target_hash");
        Ok(write_json(&place.join("config.json"), &keys.collect::<BTreeMap<_, _>>())?)
    }

    /// Writes the weights to `place` as `edit` changes them, and returns whether it does.
    fn write_tensors(&self, place: &Path, edit: impl Fn(&str, &mut [f32])) -> Result<bool> {
        self.link_files(place, |name| !name.contains("safetensors") && !name.ends_with(".bin"))?;
        let mut reader = WeightReader::open_dir(&self.dir)?;
        let (mut tensors, mut ids, mut is_changed) = (Vec::new(), Vec::new(), false);
        let names: Vec<String> = reader.names().map(str::to_owned).collect();
        for name in names {
            let shape = reader.shape(&name).unwrap_or_default().to_vec();
            let (is_ids, num) = (name == IDS, shape.iter().product());
            let own = match reader.is_weights(&name) {
                true => reader.take(&name, &shape)?,
                false if is_ids => {
                    reader.take_integers(IDS, num)?.into_iter().map(|id| id as f32).collect()
                }
                false => continue,
            };
            let mut values = own.clone();
            edit(&name, &mut values);
            is_changed |= values != own;
            match is_ids {
                true => ids.push((IDS, values.into_iter().map(|id| id as i64).collect())),
                false => tensors.push(NamedTensor { name, shape, values }),
            }
        }
        let path = place.join("model.safetensors");
        write_with_ids(&path, &tensors, &ids, WeightDtype::F32, &[])?;
        Ok(is_changed)
    }

    /// Makes files appear in `place`, but for `config.json`.
    fn link_files(&self, place: &Path, is_wanted: impl Fn(&str) -> bool) -> Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let (from, name) = (entry.path(), entry.file_name());
            if from.is_file() && name != "config.json" && is_wanted(&name.to_string_lossy()) {
                #[cfg(unix)]
                let linked = std::os::unix::fs::symlink(&from, place.join(name));
                #[cfg(not(unix))]
                let linked = fs::copy(&from, place.join(name)).map(drop);
                linked.with_context(|| format!("cannot write to `{}`", place.display()))?;
            }
        }
        Ok(())
    }
}

/// The tensor of a draft vocabulary.
const IDS: &str = "d2t";
const WINDOW_KEYS: [&str; 3] = ["sliding_window", "layer_types", "use_sliding_window"];

/// Sets a key, and what follows from it in the tables of rotary positions.
fn set(keys: &mut Map<String, Value>, key: &str, value: Value) {
    for table in ["rope_parameters", "rope_scaling"] {
        let Some(Value::Object(table)) = keys.get_mut(table) else { continue };
        match key {
            "rope_theta" => drop(table.insert(key.to_owned(), value.clone())),
            "rope_scaling" => {
                table.retain(|key, _| ["rope_theta", "partial_rotary_factor"].contains(&&**key));
                table.insert("rope_type".to_owned(), json!("default"));
            }
            _ => {}
        }
    }
    keys.insert(key.to_owned(), value);
}

/// Adds random errors of a relative size to numbers.
pub(super) fn add_noise(values: &mut [f32], noise: f32) {
    let mut state = values.len() as u32;
    for value in values {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *value *= 1.0 + noise * ((state >> 8) as f32 / (1 << 23) as f32 - 1.0);
    }
}
