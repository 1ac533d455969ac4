//! Examines the headers of drafters in GGUF (version 3), as llama.cpp b11434 reads them.
//!
//! A header is read in one pass. Limits on what is kept bound the memory for a malformed file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Take, copy, sink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use draftsmith_model::ModelShape;

use super::Patient;
use super::Severity::{Breaks, Note};

/// The greatest size of a header in bytes. Most of it are the texts of the vocabulary.
const MAX_HEADER: u64 = 128 << 20;
/// The greatest number of keys and of tensors.
const MAX_ENTRIES: u64 = 1 << 17;
/// The greatest length of a text and of a list; the rest is skipped.
const MAX_KEPT: usize = 4096;
/// The number of bytes of each type's values: numbers, a text (8) and a list (9).
const SIZES: [usize; 13] = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8];

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
    files.retain(|path| path.extension().is_some_and(|it| it == "gguf"));
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
        let header = Header::read(&path).with_context(|| {
            format!(
                "cannot read `{shown}`; hint: give a GGUF file of version 3, or convert it again"
            )
        })?;
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

/// The header of a file.
#[derive(Default)]
struct Header {
    /// The value of `general.architecture`.
    architecture: String,
    /// The numbers by key: the bytes of a text, and the length of a list of texts.
    values: BTreeMap<String, Vec<u64>>,
    /// The shapes of tensors, the fastest dimension first.
    tensors: BTreeMap<String, Vec<u64>>,
}

impl Header {
    fn read(path: &Path) -> Result<Self> {
        let mut source = GgufSource(BufReader::new(File::open(path)?.take(MAX_HEADER)));
        let (magic, version) = (source.number(4)?.to_le_bytes(), source.number(4)?);
        ensure!(magic.starts_with(b"GGUF"), "it does not begin with `GGUF`");
        ensure!(version == 3, "its version is {version}, expected 3");
        let [num_tensors, num_keys] = [source.number(8)?, source.number(8)?];
        let num_entries = num_tensors.max(num_keys);
        ensure!(num_entries <= MAX_ENTRIES, "it claims {num_entries} entries");
        let mut header = Self::default();
        for _ in 0..num_keys {
            let (key, kind) = (source.text()?, source.number(4)?);
            let value = source.value(kind).with_context(|| format!("key `{key}`"))?;
            header.values.insert(key, value);
        }
        for _ in 0..num_tensors {
            let (name, num_dims) = (source.text()?, source.number(4)?);
            ensure!(num_dims <= 4, "tensor `{name}` has {num_dims} dimensions");
            let shape = (0..num_dims).map(|_| source.number(8)).collect::<Result<_>>()?;
            header.tensors.insert(name, shape);
            // Its type, and its place in the file.
            source.number(4)?;
            source.number(8)?;
        }
        let name = header.list("general.architecture").iter().map(|byte| *byte as u8 as char);
        header.architecture = name.collect();
        Ok(header)
    }

    /// Returns the numbers under a key, with or without the architecture's name before it.
    fn list(&self, key: &str) -> &[u64] {
        let own = format!("{}.{key}", self.architecture);
        self.values.get(&own).or(self.values.get(key)).map_or(&[], Vec::as_slice)
    }

    /// Returns the number under the first of these keys that is given; 0 if none is.
    fn number(&self, keys: &[&str]) -> u64 {
        keys.iter().find_map(|key| self.list(key).first().copied()).unwrap_or(0)
    }

    fn num_tokens(&self) -> u64 {
        self.number(&["tokenizer.ggml.tokens", "vocab_size"])
    }

    fn description(&self) -> String {
        let of = |key| self.number(&[key]);
        let (layers, width) = (of("block_count"), of("embedding_length"));
        let (name, tokens) = (&self.architecture, self.num_tokens());
        let text =
            format!("architecture `{name}`, {layers} layers of width {width}, {tokens} tokens");
        match (self.list("target_layers"), of("block_size")) {
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
        find(self.tensors.is_empty(), "no-tensors", "it has no tensors".to_owned());
        let what = format!("it has {num_tokens} tokens, the target {vocab_size}");
        find(num_tokens != vocab_size as u64, "other-vocabulary", what);
        let (is_eagle3, is_block) = (self.architecture == "eagle3", self.architecture == "dflash");
        if !is_eagle3 && !is_block {
            return faults;
        }
        let numbers = self
            .tensors
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
        let fc = self.tensors.get("fc.weight").and_then(|shape| shape.first()).unwrap_or(&0);
        let is_wide = state == width as u64
            && (own == state || self.tensors.contains_key("token_embd.weight"))
            && *fc == read.len() as u64 * state;
        let what = format!(
            "its width is {own}, it reads {fc} numbers of states of width {state}, and the target's is {width}"
        );
        find(!is_wide, "other-width", what);
        let size = self.list("block_size").first().unwrap_or(&16);
        let fits = (2..=context as u64).contains(size);
        find(is_block && !fits, "block-size", format!("`block_size` is {size}"));
        faults
    }
}

/// The bytes of a header.
struct GgufSource(BufReader<Take<File>>);

impl GgufSource {
    /// Reads a number of this many bytes.
    fn number(&mut self, num_bytes: usize) -> Result<u64> {
        let mut bytes = [0; 8];
        self.0.read_exact(&mut bytes[..num_bytes]).context("it ends within its header")?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn text(&mut self) -> Result<String> {
        let (num_bytes, mut kept) = (self.number(8)?, Vec::new());
        let mut rest = (&mut self.0).take(num_bytes);
        rest.by_ref().take(MAX_KEPT as u64).read_to_end(&mut kept)?;
        copy(&mut rest, &mut sink())?;
        ensure!(rest.limit() == 0, "it ends within its header");
        Ok(String::from_utf8_lossy(&kept).into_owned())
    }

    fn value(&mut self, kind: u64) -> Result<Vec<u64>> {
        Ok(match (kind, SIZES.get(kind as usize)) {
            (8, _) => self.text()?.bytes().map(u64::from).collect(),
            (9, _) => {
                let (kind, num) = (self.number(4)?, self.number(8)?);
                ensure!(kind != 9, "is a list of lists");
                let mut kept = Vec::new();
                for _ in 0..num {
                    let one = self.value(kind)?;
                    kept.extend(one.into_iter().filter(|_| kind != 8 && num <= MAX_KEPT as u64));
                }
                if kind == 8 { vec![num] } else { kept }
            }
            (_, Some(size)) => vec![self.number(*size)?],
            (_, None) => bail!("has the unknown type {kind}"),
        })
    }
}
