//! Examines the headers of drafters in GGUF (version 3), as llama.cpp b11434 reads them.

use std::path::{Path, PathBuf};

use anyhow::Result;
use draftsmith_model::{Gguf, ModelShape, is_gguf};
use serde_json::Value;

use super::Patient;
use super::Severity::{Breaks, Note};

/// Lists the GGUF files that a path names: itself, or those in the directory.
///
/// # Errors
/// If the directory cannot be read.
pub(super) fn files_in(path: &Path) -> Result<Vec<PathBuf>> {
    let mut files = vec![path.to_path_buf()];
    if path.is_dir() {
        let entries = path.read_dir()?.map(|entry| Ok(entry?.path()));
        files = entries.collect::<Result<_>>()?;
    }
    files.retain(|path| is_gguf(path));
    files.sort();
    Ok(files)
}

/// Finds problems in the headers of the drafter's GGUF files, and describes them.
///
/// # Errors
/// If a header cannot be read.
pub(super) fn examine(patient: &mut Patient<'_>) -> Result<String> {
    let mut described = Vec::new();
    for path in files_in(&patient.dir)? {
        let shown = path.display();
        let header = Header { file: Gguf::read(&path)? };
        for (name, what) in header.faults(&patient.target.shape) {
            let servers =
                "llama.cpp refuses it, or fails or accepts nothing from the first round on";
            let hint = "convert it again from a drafter of this target, with `--target-model-dir`";
            patient.find((name, Breaks), format!("`{shown}`: {what}"), servers, hint);
        }
        patient.find(
            ("header-only", Note),
            format!("`{shown}`: only its header is read, so nothing is known of its numbers"),
            "llama.cpp b11434 loads it; vLLM and SGLang load the directory that it was converted from",
            "examine that directory too",
        );
        described.push(header.description());
    }
    Ok(described.join("; "))
}

/// The header of a drafter's file.
struct Header {
    file: Gguf,
}

impl Header {
    /// Returns the number under a key, or the numbers of a list.
    fn list(&self, key: &str) -> Vec<u64> {
        match self.file.own(key) {
            Some(Value::Array(numbers)) => numbers.iter().filter_map(Value::as_u64).collect(),
            number => number.and_then(Value::as_u64).into_iter().collect(),
        }
    }

    /// Returns the number under the first of these keys that is given; 0 if none is.
    fn number(&self, keys: &[&str]) -> u64 {
        keys.iter().find_map(|key| self.list(key).first().copied()).unwrap_or(0)
    }

    fn num_tokens(&self) -> u64 {
        self.file.num_tokens().unwrap_or_else(|| self.number(&["vocab_size"]))
    }

    fn description(&self) -> String {
        let of = |key| self.number(&[key]);
        let (layers, width) = (of("block_count"), of("embedding_length"));
        let (name, tokens) = (&self.file.architecture, self.num_tokens());
        let text =
            format!("architecture `{name}`, {layers} layers of width {width}, {tokens} tokens");
        match (&*self.list("target_layers"), of("block_size")) {
            ([], _) => text,
            (read, 0) => format!("{text}, reads layers {read:?} of the target"),
            (read, block) => {
                format!("{text}, reads layers {read:?} of the target, blocks of {block}")
            }
        }
    }

    /// Finds what makes the drafter unfit for a target.
    fn faults(&self, target: &ModelShape) -> Vec<(&'static str, String)> {
        let mut faults = Vec::new();
        let mut find =
            |holds: bool, name, what: String| faults.extend(holds.then_some((name, what)));
        let (read, num_tokens) = (self.list("target_layers"), self.num_tokens());
        let ModelShape { vocab_size, hidden_size: width, num_layers, context, .. } = *target;
        let tensors = &self.file.tensors;
        find(tensors.is_empty(), "no-tensors", "it has no tensors".to_owned());
        let what = format!("it has {num_tokens} tokens, the target {vocab_size}");
        find(num_tokens != vocab_size as u64, "other-vocabulary", what);
        let [is_eagle3, is_block] = ["eagle3", "dflash"].map(|name| self.file.architecture == name);
        if !is_eagle3 && !is_block {
            return faults;
        }
        let numbers = tensors
            .keys()
            .filter_map(|it| it.strip_prefix("blk.")?.split('.').next()?.parse().ok());
        let (declared, found) =
            (self.number(&["block_count"]), numbers.max().map_or(0, |it: u32| it as u64 + 1));
        let what = format!("`block_count` is {declared}, and its tensors are of {found} layers");
        find(declared != found || is_eagle3 && declared != 1, "layers", what);
        let are_known = read.is_sorted_by(|one, next| one < next)
            && read.last().is_some_and(|last| *last <= num_layers as u64)
            && (read.len() == 3 || is_block);
        let what = format!("`target_layers` is {read:?}, but the target has {num_layers} layers");
        find(!are_known, "wrong-layers", what);
        let own = self.number(&["embedding_length"]);
        let state = self.number(&["target_hidden_size", "embedding_length"]);
        let fc = tensors.get("fc.weight").and_then(|it| it.shape.first()).unwrap_or(&0);
        let is_wide = state == width as u64
            && (own == state || tensors.contains_key("token_embd.weight"))
            && *fc == read.len() as u64 * state;
        let what = format!(
            "its width is {own}, it reads {fc} numbers of states of width {state}, and the target's is {width}"
        );
        find(!is_wide, "other-width", what);
        let size = self.list("block_size").first().copied().unwrap_or(16);
        let fits = (2..=context as u64).contains(&size);
        find(is_block && !fits, "block-size", format!("`block_size` is {size}"));
        faults
    }
}
