//! `doctor`: predicts what inference servers will do with a trained drafter, without running them.
//!
//! Servers load many damaged drafters without an error and then accept no candidates. We report
//! every problem as a named finding, with each server's behaviour and a remedy. The behaviour was
//! measured on vLLM 0.32 and llama.cpp b11434, and read from the source of vLLM 0.33 and SGLang 0.5.23.

mod acceptance;
mod block;
mod draft_model;
mod eagle3;
mod gguf;
mod keys;

use std::borrow::Cow;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use burn::tensor::Device;
use draftsmith_data::{ChatTemplate, TextTokenizer};
use draftsmith_files::{parse_json, read_bytes};
use draftsmith_model::{
    AcceptanceHead, AdapterForm, BlockForm, DraftForm, DraftNetwork, DrafterDir, Eagle3Form,
    EagleForm, Gguf, Medusa, MedusaConfig, ModelConfig, ModelError, WeightDtype, WeightReader,
    check_finite, hash_model_dir, is_gguf, text_dir,
};
use draftsmith_recipe::Kinds;
use draftsmith_recipe::exports::HEAD;
use serde::Serialize;
use serde_json::{Map, Value};

use self::Severity::{Breaks, Hurts, Note};
pub use self::acceptance::{AcceptancePlan, ExpectedAcceptance, expected_acceptance, recipe_of};

/// The diagnosis of a drafter.
#[derive(Debug, Clone, Serialize)]
pub struct Diagnosis {
    /// The drafter's file format.
    pub form: &'static FileForm,
    /// The drafter's sizes, in words.
    pub description: String,
    /// The problems, the most severe first.
    pub findings: Vec<Finding>,
}

/// Findings that an export removes, or that break a drafter on some servers only.
const MENDED: [&str; 7] = [
    "anchor-first-dflash",
    "confidence-of-row",
    "embeddings-for-lm-head",
    "no-confidence-bias",
    "no-draft-vocab-size",
    "tied-embeddings",
    "uncaptured-layer",
];

impl Diagnosis {
    /// Returns the first finding that no export removes and that breaks the drafter on every server;
    /// `None` if it may be exported.
    pub fn refuses_export(&self) -> Option<&Finding> {
        let breaks = self.findings.iter().filter(|finding| finding.severity == Breaks);
        breaks.into_iter().find(|finding| !MENDED.contains(&finding.name))
    }
}

/// A file format in which trainers write drafters.
#[derive(Debug)]
pub struct FileForm {
    /// The format's name in JSON.
    name: &'static str,
    /// The format's name in messages, such as `an EAGLE-3 drafter`.
    pub text: &'static str,
    /// The drafter's kind in recipes; `None` if this program cannot run it.
    pub kind: Option<&'static str>,
    /// A function that recognises a drafter in this format.
    is_of: fn(&Files) -> bool,
    /// A function that adds findings and describes the drafter.
    examine: fn(&mut Patient<'_>) -> Result<String>,
    /// A function that reads the drafter as the decoder does; `None` if `examine` does, or none can.
    read: Option<ReadDrafter>,
}

type ReadDrafter = fn(&Patient<'_>, &Device) -> Result<(), ModelError>;

fn read<F: DraftForm>(it: &Patient<'_>, device: &Device) -> Result<(), ModelError> {
    DraftNetwork::<F>::from_dir(&it.dir, &it.target.shape, WeightDtype::F32, device).map(|_| ())
}

impl Serialize for FileForm {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

/// The keys of a drafter's `config.json`, the names of its tensors and the shape of `fc`, which identify
/// its format.
struct Files {
    keys: Map<String, Value>,
    names: Vec<String>,
    fc: Option<Vec<usize>>,
}

impl Files {
    fn has(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// Returns whether the keys identify a drafter of this kind.
    fn is_of_kind(&self, name: &str) -> bool {
        let export = Kinds::default().get(name).and_then(|kind| kind.export.as_ref());
        export.is_some_and(|export| (export.is_of)(&self.keys))
    }

    /// Returns whether `fc` reads one state and an embedding, and its layer has no norm of the state.
    fn is_eagle1(&self) -> bool {
        let reads_one = matches!(self.fc.as_deref(), Some([rows, columns]) if 2 * rows == *columns);
        let is_later = |name: &String| name == "d2t" || name.contains("hidden_norm.");
        self.keys.get("speculators_model_type").is_some_and(|method| *method == "eagle")
            || reads_one && !self.names.iter().any(is_later)
    }

    fn is_eagle3(&self) -> bool {
        let architecture = self.keys.get("architectures").map(ToString::to_string);
        self.is_of_kind("eagle3")
            || architecture.is_some_and(|it| it.contains("Eagle3"))
            || self.names.iter().any(|name| name == "d2t")
    }
}

const EAGLE3: FileForm = FileForm {
    name: "eagle3",
    text: "an EAGLE-3 drafter",
    kind: Some("eagle3"),
    is_of: Files::is_eagle3,
    examine: eagle3::examine,
    read: Some(read::<Eagle3Form>),
};

/// The known formats. The first match wins. The draft model matches any files, so it comes last.
static FORMS: [FileForm; 9] = [
    FileForm {
        name: "eagle1",
        text: "an EAGLE-1 or EAGLE-2 drafter",
        kind: Some("eagle"),
        is_of: Files::is_eagle1,
        examine: eagle1,
        read: Some(read::<EagleForm>),
    },
    FileForm {
        name: "block",
        text: "a block drafter",
        kind: Some("block"),
        is_of: |files| files.is_of_kind("block"),
        examine: block::examine,
        read: Some(read::<BlockForm>),
    },
    FileForm {
        name: "eagle3_speculators",
        text: "an EAGLE-3 drafter in the speculators library's form",
        is_of: |files| files.has("speculators_model_type"),
        ..EAGLE3
    },
    FileForm {
        name: "eagle3_layers",
        text: "an EAGLE-3 drafter whose layer is called `layers.0`",
        is_of: |files| {
            files.is_eagle3() && files.names.iter().any(|name| name.starts_with("layers.0."))
        },
        ..EAGLE3
    },
    EAGLE3,
    FileForm {
        name: "medusa",
        text: "Medusa heads",
        kind: Some("medusa"),
        is_of: |files| {
            let is_named = !files.names.is_empty() && files.names.iter().all(|it| is_medusas(it));
            files.is_of_kind("medusa") || is_named
        },
        examine: medusa,
        read: Some(|it, device| {
            let (shape, dtype) = (&it.target.shape, WeightDtype::F32);
            Medusa::from_dir(&it.dir, shape, dtype, device).map(|_| ())
        }),
    },
    FileForm {
        name: "adapter",
        text: "a self-draft adapter",
        kind: Some("adapter"),
        is_of: |files| files.is_of_kind("adapter"),
        examine: own_export,
        read: Some(read::<AdapterForm>),
    },
    FileForm {
        name: "acceptance_head",
        text: "an acceptance head",
        kind: None,
        is_of: |files| (HEAD.is_of)(&files.keys),
        examine: own_export,
        read: Some(|it, device| {
            let width = it.number("hidden_size").unwrap_or(0);
            AcceptanceHead::from_dir(&it.dir, width, device).map(|_| ())
        }),
    },
    FileForm {
        name: "draft_model",
        text: "a draft model",
        kind: Some("model"),
        is_of: |_| true,
        examine: draft_model::examine,
        read: None,
    },
];

/// A drafter of which only a GGUF file is given.
static GGUF: FileForm = FileForm {
    name: "gguf",
    text: "a drafter in GGUF",
    kind: None,
    is_of: |_| false,
    examine: gguf::examine,
    read: None,
};

/// Returns whether a tensor's name begins with two numbers, as Medusa's do.
fn is_medusas(name: &str) -> bool {
    let mut parts = name.split('.');
    let is_number = |part: Option<&str>| part.is_some_and(|part| part.parse::<u32>().is_ok());
    is_number(parts.next()) && is_number(parts.next())
}

/// The servers' behaviour for a drafter whose context is shorter than the target's, and the remedy.
const SHORT_CONTEXT: (&str, &str) = (
    "vLLM cuts the target's context to it; others stop drafting there",
    "serve with a context of at most that, or use another drafter",
);

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A server rejects the drafter, or no candidate is ever accepted.
    Breaks,
    /// A server computes something other than what was trained, or loses speed.
    Hurts,
    /// Information without harm.
    Note,
}

/// A problem, or a note, about a drafter.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// The finding's name.
    pub name: &'static str,
    /// The severity.
    pub severity: Severity,
    /// What was found, with the file, key or tensor.
    pub what: String,
    /// The servers' behaviour.
    pub servers: &'static str,
    /// The remedy.
    pub hint: Cow<'static, str>,
}

/// The files of the drafter under examination, and the configuration of its target.
struct Patient<'a> {
    /// The directory, with the keys that keep the drafter from being read as ignored.
    dir: DrafterDir,
    keys: Map<String, Value>,
    target_dir: &'a Path,
    target: ModelConfig,
    findings: Vec<Finding>,
}

impl Patient<'_> {
    fn find(
        &mut self,
        (name, severity): (&'static str, Severity),
        what: impl Into<String>,
        servers: &'static str,
        hint: impl Into<Cow<'static, str>>,
    ) {
        let (what, hint) = (what.into(), hint.into());
        self.findings.push(Finding { name, severity, what, servers, hint });
    }

    fn find_if(
        &mut self,
        holds: bool,
        which: (&'static str, Severity),
        what: impl Into<String>,
        servers: &'static str,
        hint: impl Into<Cow<'static, str>>,
    ) {
        if holds {
            self.find(which, what, servers, hint);
        }
    }

    /// Adds the finding that the decoder cannot read the drafter.
    fn find_unreadable(&mut self, error: &ModelError) {
        let (servers, hint) = (
            "most refuse it too, if the file is broken",
            "export it again, or see the error's hint",
        );
        self.find(("unreadable", Breaks), error.to_string(), servers, hint);
    }

    /// Returns what was read, or adds the finding that the decoder cannot read the drafter.
    fn readable<T>(&mut self, read: Result<T, ModelError>) -> Option<T> {
        read.inspect_err(|error| self.find_unreadable(error)).ok()
    }

    fn number(&self, key: &str) -> Option<usize> {
        usize::try_from(self.keys.get(key)?.as_u64()?).ok()
    }
}

/// Examines a drafter together with its target.
///
/// # Errors
/// If a directory has no readable `config.json` or weights.
pub fn diagnose(dir: &Path, target_dir: &Path) -> Result<Diagnosis> {
    let target = ModelConfig::from_model_dir(target_dir)
        .with_context(|| format!("the target `{}`", target_dir.display()))?;
    let keys = Map::new();
    let mut patient = Patient { dir: dir.into(), keys, target_dir, target, findings: Vec::new() };
    let has_gguf = !gguf::files_in(dir)?.is_empty();
    let (form, mut description) = match has_gguf && !dir.join("config.json").is_file() {
        true => (&GGUF, String::new()),
        false => of_directory(&mut patient)?,
    };
    if has_gguf {
        description += if description.is_empty() { "" } else { "; in GGUF: " };
        description += &gguf::examine(&mut patient)?;
    }
    patient.findings.sort_by_key(|finding| finding.severity);
    Ok(Diagnosis { form, description, findings: patient.findings })
}

/// Examines a directory with a `config.json`. Returns the drafter's format and its description.
fn of_directory(patient: &mut Patient<'_>) -> Result<(&'static FileForm, String)> {
    patient.keys = config_keys(&patient.dir)?;
    let form = form_of(patient)?;
    keys::examine(patient, form);
    let description = (form.examine)(patient)?;
    numbers(patient);
    trained_target(patient);
    tokenizers(patient)?;
    let is_fine = |finding: &Finding| finding.severity != Breaks;
    if patient.findings.iter().all(is_fine)
        && let Some(Err(error)) = form.read.map(|read| read(patient, &Device::flex()))
    {
        patient.find_unreadable(&error);
    }
    Ok((form, description))
}

fn config_keys(dir: &Path) -> Result<Map<String, Value>> {
    let path = dir.join("config.json");
    let text = read_bytes(&path).with_context(|| {
        format!(
            "cannot read `{}`; hint: give the directory of a drafter with its `config.json`",
            path.display()
        )
    })?;
    Ok(parse_json(&path, &text)?)
}

fn form_of(patient: &Patient<'_>) -> Result<&'static FileForm> {
    let reader = WeightReader::open_dir(&patient.dir)
        .map_err(|error| anyhow!("{error}; hint: give a directory with `model.safetensors`"))?;
    let files = Files {
        keys: patient.keys.clone(),
        names: reader.names().map(str::to_owned).collect(),
        fc: reader.shape("fc.weight").map(<[usize]>::to_vec),
    };
    FORMS.iter().find(|form| (form.is_of)(&files)).context("anything may be a draft model")
}

/// Examines an EAGLE-1 or EAGLE-2 drafter, whose files are the same.
fn eagle1(patient: &mut Patient<'_>) -> Result<String> {
    let has_bias = WeightReader::open_dir(&patient.dir)?.shape("fc.bias").is_some();
    let (problem, servers) = match has_bias {
        true => (
            "`fc` has a bias",
            "vLLM refuses the tensor; SGLang needs it; llama.cpp b11434 has only EAGLE-3",
        ),
        false => (
            "`fc` has no bias",
            "vLLM has none; SGLang adds random numbers in its place; llama.cpp b11434 has only EAGLE-3",
        ),
    };
    patient.find(
        ("bias", Note),
        problem,
        servers,
        "`export --for eagle` writes the drafter for vLLM, and `--for eagle-sglang` for SGLang",
    );
    Ok(format!("width {}", patient.number("hidden_size").unwrap_or(0)))
}

/// Examines Medusa heads.
fn medusa(patient: &mut Patient<'_>) -> Result<String> {
    let config = MedusaConfig::beside(&patient.dir, patient.target.shape.num_layers);
    let Some(MedusaConfig { num_heads, .. }) = patient.readable(config) else {
        return Ok(String::new());
    };
    let declared = patient.number("medusa_num_heads").unwrap_or(num_heads);
    patient.find_if(
        declared != num_heads,
        ("number-of-heads", Hurts),
        format!("`medusa_num_heads` is {declared}, but the weights have {num_heads} heads"),
        "vLLM leaves heads at their first values without a word, or skips some",
        "correct `medusa_num_heads` in `config.json`",
    );
    patient.find(
        ("needs-conversion", Note),
        "servers load Medusa heads under other names",
        "vLLM: method `medusa`, with tensors `blocks.N` and `lm_heads.N`; SGLang and llama.cpp: none",
        "rename the tensors, and set vLLM's key `medusa_fc_bias` to true",
    );
    Ok(format!("{num_heads} heads"))
}

/// Examines an acceptance head or adapter of this program, which servers cannot load directly.
fn own_export(patient: &mut Patient<'_>) -> Result<String> {
    let is_adapter = patient.keys.contains_key("exit_layer");
    let width = patient.number("hidden_size").unwrap_or(0);
    let expected = patient.target.shape.hidden_size;
    patient.find_if(
        is_adapter && width != expected,
        ("wrong-target", Breaks),
        format!("`hidden_size` is {width}, but the target's is {expected}"),
        "none loads it",
        "use the target that it was trained for",
    );
    patient.find(
        ("needs-export", Note),
        "servers load it in another form",
        "none loads this directory",
        "run `draftsmith export --for draft-model` for an adapter, `--for transformers` or `--for vllm` for a head",
    );
    Ok(format!("width {width}"))
}

/// Checks that the weights can be read and are finite.
fn numbers(patient: &mut Patient<'_>) {
    match check_finite(&patient.dir) {
        Ok(()) => {}
        Err(error @ ModelError::Dtype(_)) => patient.find(
            ("other-dtype", Breaks),
            error.to_string(),
            "vLLM and SGLang read quantised tensors if `quantization_config` describes them; llama.cpp's converter mostly \
             refuses them",
            "use the drafter before its quantisation, or convert it to bf16",
        ),
        Err(error) => patient.find(
            ("not-finite", Breaks),
            error.to_string(),
            "all load it and draft nonsense, or stop at the first round",
            "train it again with a smaller learning rate, and keep an earlier checkpoint",
        ),
    }
}

/// Compares the target with the one that the drafter was trained for, if the drafter names it.
fn trained_target(patient: &mut Patient<'_>) {
    let Some(Value::String(trained)) = patient.keys.get("target_hash") else { return };
    // Without weights, nothing more is known of the target.
    let Ok(hash) = hash_model_dir(patient.target_dir, &mut |_, _| {}) else { return };
    patient.find_if(
        *trained != hash,
        ("other-target", Breaks),
        "`target_hash` is that of another target",
        "all load it; they accept little, if the other target is no version of this one",
        "use the target that it was trained for, or train it for this one",
    );
}

/// Compares the tokenizers and chat templates of drafter and target, if the drafter has its own.
fn tokenizers(patient: &mut Patient<'_>) -> Result<()> {
    if !patient.dir.join("tokenizer.json").is_file() {
        return Ok(());
    }
    let own = TextTokenizer::from_model_dir(&*patient.dir)?;
    let target_dir = text_dir(patient.target_dir);
    if is_gguf(patient.target_dir) && !target_dir.join("tokenizer.json").is_file() {
        return Ok(
            own.check_tokens(patient.target_dir, &Gguf::read(patient.target_dir)?.tokens()?)?
        );
    }
    let target = TextTokenizer::from_model_dir(target_dir)?;
    patient.find_if(
        own.hash()? != target.hash()?,
        ("other-tokenizer", Breaks),
        "`tokenizer.json` differs from the target's",
        "vLLM and SGLang exchange ids and accept little; llama.cpp translates text where it can; transformers needs its \
         tokens compared",
        "use a drafter with the target's tokenizer, or make sure that only files and not tokens differ",
    );
    let template =
        |dir: &Path| ChatTemplate::from_model_dir(dir).ok().flatten().map(|it| it.hash());
    patient.find_if(
        template(&patient.dir) != template(target_dir),
        ("other-template", Note),
        "its chat template differs from the target's",
        "all use the target's",
        "nothing to do, if it was trained on texts of the target's template",
    );
    Ok(())
}
