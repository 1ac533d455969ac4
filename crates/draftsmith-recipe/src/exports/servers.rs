//! The settings with which inference runtimes draft, and the commands that start them.
//!
//! Names are taken from vLLM 0.33 (`SpeculativeConfig`), SGLang 0.5.23 (`server_args`), llama.cpp
//! b11434 (`common/arg.cpp`) and transformers 5.23 (`GenerationConfig`).

use std::path::{Path, absolute};

use draftsmith_model::{BlockDrafterConfig, DrafterDir, Eagle3Config, is_gguf};
use draftsmith_theory::{Drafting, HeadTiming, SuffixSettings};
use serde_json::{Value, json};

/// One drafter method's names and peculiarities in each server.
#[derive(Debug, PartialEq)]
pub struct ServerFlags {
    /// The form of `export --for` in which servers load the drafter.
    pub form: &'static str,
    /// The value of `method` in vLLM's speculative config.
    pub vllm_method: &'static str,
    /// A caveat about vLLM's table of candidate numbers by batch size; `None` if there is none.
    pub vllm_note: Option<&'static str>,
    /// The value of SGLang's `--speculative-algorithm`; empty if SGLang does not load this form.
    pub sglang_algorithm: &'static str,
    /// Whether SGLang accepts a table that sets the number of candidates by batch size, and rejection
    /// sampling.
    pub sglang_adapts: bool,
    /// The value of llama.cpp's `--spec-type`; empty if llama.cpp does not load the drafter.
    pub llama_cpp_type: &'static str,
    /// A flag that llama.cpp needs for several requests at once, with the reason; `None` if none.
    pub llama_cpp_several: Option<(&'static str, &'static str)>,
    /// The flag of llama.cpp's conversion that names the target; `None` if it needs no target.
    pub llama_cpp_target: Option<&'static str>,
    /// Whether transformers loads the drafter.
    pub in_transformers: bool,
    /// Whether the drafter proposes all candidates in one forward.
    pub is_block: bool,
}

impl ServerFlags {
    /// Returns the command that writes a trained drafter as servers load it.
    pub fn export_command(&self, source: &Path, out: &str) -> String {
        let source = served_path(source, true);
        format!("draftsmith export --for {} {} {}", self.form, quoted(&source), quoted(out))
    }

    /// Finds the settings for drafters in a form of `export --for`; `None` if servers do not load it.
    pub fn of_form(form: &str) -> Option<&'static Self> {
        [&AS_DRAFT_MODEL, &AS_EAGLE, &AS_EAGLE3, &AS_DSPARK].into_iter().find(|it| it.form == form)
    }

    /// Describes the drafter in `dir` as servers load it: from `model`, which `export` writes if it does
    /// not exist.
    pub fn served(
        &'static self,
        target: &Path,
        (model, export): (String, Option<String>),
        dir: &DrafterDir,
    ) -> ServedDrafter {
        let is_eagle3 = self.form == AS_EAGLE3.form;
        ServedDrafter {
            flags: self,
            target: served_path(target, false),
            model,
            export,
            whole_block: self.is_block.then(|| BlockDrafterConfig::whole_block(dir)).flatten(),
            window: is_eagle3.then(|| Eagle3Config::window(dir)).flatten(),
        }
    }

    /// Returns whether a program loads the drafter.
    pub fn is_loaded_by(&self, runtime: Runtime) -> bool {
        match runtime {
            Runtime::LlamaCpp => !self.llama_cpp_type.is_empty(),
            Runtime::Transformers => self.in_transformers,
            Runtime::Sglang => !self.sglang_algorithm.is_empty(),
            Runtime::Vllm => true,
        }
    }

    /// Returns whether llama.cpp can end a round by a minimum probability. It cuts a DSpark by its
    /// confidence head, and does not speculate at all if there is none.
    pub fn llama_cpp_cuts(&self, head: Option<HeadTiming>) -> bool {
        !self.is_block || head == Some(HeadTiming::BeforeDraw)
    }
}

/// The settings for a separate draft model. Adapters can be exported as one too.
pub static AS_DRAFT_MODEL: ServerFlags = ServerFlags {
    form: "draft-model",
    vllm_method: "draft_model",
    vllm_note: Some(
        "vLLM's second runner drafts the greatest number with a draft model and cuts the rest, so smaller \
         numbers save less than these figures.",
    ),
    sglang_algorithm: "STANDALONE",
    sglang_adapts: false,
    llama_cpp_type: "draft-simple",
    llama_cpp_several: None,
    llama_cpp_target: None,
    in_transformers: true,
    is_block: false,
};

/// The settings for an EAGLE-3 drafter.
pub static AS_EAGLE3: ServerFlags = ServerFlags {
    form: "eagle3",
    vllm_method: "eagle3",
    vllm_note: None,
    sglang_algorithm: "EAGLE3",
    sglang_adapts: true,
    llama_cpp_type: "draft-eagle3",
    llama_cpp_several: Some((
        " --no-spec-draft-backend-sampling",
        "By default the drafter samples in the backend. llama.cpp b11434 then mixes the candidates of \
         several requests up: 1.24 tokens per round instead of 1.74 with four.",
    )),
    llama_cpp_target: Some("--target-model-dir"),
    in_transformers: false,
    is_block: false,
};

/// The settings for an EAGLE-1 drafter in vLLM's form. SGLang loads another form, and llama.cpp none.
pub static AS_EAGLE: ServerFlags = ServerFlags {
    form: "eagle",
    vllm_method: "eagle",
    sglang_algorithm: "",
    sglang_adapts: false,
    llama_cpp_type: "",
    llama_cpp_several: None,
    llama_cpp_target: None,
    ..AS_EAGLE3
};

/// The settings for a block drafter, exported as a DSpark.
pub static AS_DSPARK: ServerFlags = ServerFlags {
    form: "dspark",
    vllm_method: "dspark",
    sglang_algorithm: "DSPARK",
    sglang_adapts: false,
    llama_cpp_type: "draft-dspark",
    llama_cpp_several: Some((
        " --no-spec-draft-backend-sampling",
        "By default the drafter samples in the backend. llama.cpp b11434 then drafts other tokens for several \
         requests: with four and K = 3, its counts differed in 25 of 40 runs. Answers stay right.",
    )),
    is_block: true,
    ..AS_EAGLE3
};

/// An inference program that can decode with a drafter trained elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runtime {
    /// llama.cpp's llama-server.
    LlamaCpp,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// The assisted generation of Hugging Face transformers.
    Transformers,
}

impl Runtime {
    /// All runtimes.
    pub const ALL: [Self; 4] = [Self::LlamaCpp, Self::Vllm, Self::Sglang, Self::Transformers];

    /// Returns the runtime's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::LlamaCpp => "llama.cpp",
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::Transformers => "transformers",
        }
    }
}

/// A drafter as other programs load it, with its target.
#[derive(Debug, Clone)]
pub struct ServedDrafter {
    /// The method's names in each server.
    pub flags: &'static ServerFlags,
    /// The target's directory or name.
    pub target: String,
    /// The directory or name of the drafter's checkpoint.
    pub model: String,
    /// The command that writes `model`; `None` if it exists.
    pub export: Option<String>,
    /// The number of candidates of a block drafter whose rows see the whole block, and whose
    /// candidates therefore change with the number; `None` for other drafters.
    pub whole_block: Option<usize>,
    /// The sliding window of an EAGLE-3 drafter, which SGLang does not read from the drafter's files;
    /// `None` for other drafters.
    pub window: Option<usize>,
}

/// Returns vLLM's speculative config for suffix decoding with up to this number of candidates.
pub fn suffix_config(num_candidates: usize) -> Value {
    let SuffixSettings { depth, min_prob, factor, .. } = SuffixSettings::default();
    json!({
        "method": "suffix", "num_speculative_tokens": num_candidates, "suffix_decoding_max_tree_depth": depth,
        "suffix_decoding_min_token_prob": min_prob, "suffix_decoding_max_spec_factor": factor,
    })
}

impl ServedDrafter {
    /// Names a target without a drafter, for prompt lookup.
    pub fn of_target(target: &Path) -> Self {
        let (target, model) = (served_path(target, false), String::new());
        let (export, whole_block, window) = (None, None, None);
        Self { flags: &AS_DRAFT_MODEL, target, model, export, whole_block, window }
    }

    /// Returns llama.cpp's flags for a setting, for greedy or sampled decoding.
    pub fn llama_cpp_flags(&self, drafting: Drafting, is_sampled: bool) -> String {
        let Drafting { num_candidates, least_prob, num_matched, .. } = drafting;
        if let Some(num_matched) = num_matched {
            return format!(
                "--spec-type ngram-simple --spec-ngram-simple-size-n {num_matched} --spec-ngram-simple-size-m \
                 {num_candidates} --spec-ngram-simple-min-hits 1"
            );
        }
        // Block drafters always propose their most probable tokens there.
        let draws = is_sampled && !self.flags.is_block;
        let sampled = if draws { " --spec-draft-sampling probabilistic" } else { "" };
        format!(
            "--spec-type {} --spec-draft-model {} --spec-draft-n-max {num_candidates} --spec-draft-n-min 0 \
             --spec-draft-p-min {least_prob}{sampled}",
            self.flags.llama_cpp_type,
            gguf(&self.model)
        )
    }

    /// Returns vLLM's speculative config for a number of candidates.
    pub fn vllm_config(&self, num_candidates: usize, is_sampled: bool) -> Value {
        let mut config = json!({
            "method": self.flags.vllm_method, "model": self.model, "num_speculative_tokens": num_candidates,
        });
        if is_sampled {
            // Without this key, vLLM drafts the most probable token.
            config["draft_sample_method"] = json!("probabilistic");
        }
        config
    }

    /// Returns SGLang's flags for a number of candidates.
    pub fn sglang_flags(&self, num_candidates: usize, is_sampled: bool) -> String {
        let ServerFlags { sglang_algorithm, sglang_adapts, is_block, .. } = self.flags;
        // SGLang refuses rejection sampling for draft models.
        let sampled = match is_sampled && *sglang_adapts {
            true => " --speculative-use-rejection-sampling",
            false => "",
        };
        let lengths = match is_block {
            true => format!("--speculative-dspark-block-size {num_candidates}"),
            false => format!(
                "--speculative-num-steps {num_candidates} --speculative-eagle-topk 1 \
                 --speculative-num-draft-tokens {}{sampled}",
                num_candidates + 1
            ),
        };
        let model = quoted(&self.model);
        let window = self.window.map(|size| format!(" --speculative-draft-window-size {size}"));
        format!(
            "--speculative-algorithm {sglang_algorithm} --speculative-draft-model-path {model} {lengths}{}",
            window.unwrap_or_default()
        )
    }

    /// Returns the flags of a program for a setting; for transformers, settings in Python. SGLang's lookup
    /// has none.
    pub fn flags(&self, runtime: Runtime, drafting: Drafting, is_sampled: bool) -> String {
        let num_candidates = drafting.num_candidates;
        match runtime {
            Runtime::LlamaCpp => self.llama_cpp_flags(drafting, is_sampled),
            Runtime::Vllm => {
                let config = match drafting.num_matched {
                    Some(_) if drafting.is_suffix => suffix_config(num_candidates),
                    // vLLM tries the longest match first.
                    Some(least) => json!({
                        "method": "ngram", "num_speculative_tokens": num_candidates,
                        "prompt_lookup_max": least.max(5), "prompt_lookup_min": least,
                    }),
                    None => self.vllm_config(num_candidates, is_sampled),
                };
                format!("--speculative-config {}", quoted(&config.to_string()))
            }
            Runtime::Sglang => self.sglang_flags(num_candidates, is_sampled),
            Runtime::Transformers => format!(
                "num_assistant_tokens={num_candidates}, num_assistant_tokens_schedule=\"constant\", \
                 assistant_confidence_threshold={}",
                drafting.least_prob
            ),
        }
    }

    /// Returns the shell commands, to be run one after another, that start a program with a setting.
    /// For transformers, the last one is Python.
    pub fn start(&self, runtime: Runtime, drafting: Drafting, is_sampled: bool) -> Vec<String> {
        let flags = self.flags(runtime, drafting, is_sampled);
        self.start_with(runtime, &flags, drafting.num_matched.is_none())
    }

    /// Returns the shell commands that start a program with these flags. `is_drafter` is false for
    /// llama.cpp's lookup.
    pub fn start_with(&self, runtime: Runtime, flags: &str, is_drafter: bool) -> Vec<String> {
        let target = quoted(&self.target);
        let mut steps: Vec<String> = self.export.iter().filter(|_| is_drafter).cloned().collect();
        let convert = |model: &str| {
            let is_directory = gguf(model) != quoted(model);
            is_directory.then(|| {
                format!("convert_hf_to_gguf.py {} --outfile {}", quoted(model), gguf(model))
            })
        };
        let last = match runtime {
            Runtime::LlamaCpp => {
                steps.extend(convert(&self.target));
                if is_drafter {
                    let flag = self.flags.llama_cpp_target;
                    let of = flag.map(|flag| format!(" {flag} {target}")).unwrap_or_default();
                    steps.extend(convert(&self.model).map(|convert| convert + &of));
                }
                format!("llama-server --model {} {flags} --metrics", gguf(&self.target))
            }
            Runtime::Vllm => {
                let found = served_method(&self.model).filter(|_| is_drafter);
                if let Some(method) = found.filter(|found| *found != self.flags.vllm_method) {
                    steps.push(format!(
                        "# vLLM 0.33 runs it as `{method}` because of its path: rename it"
                    ));
                }
                format!("vllm serve {target} {flags}")
            }
            Runtime::Sglang => {
                format!("python -m sglang.launch_server --model-path {target} {flags}")
            }
            Runtime::Transformers => format!(
                "assistant = AutoModelForCausalLM.from_pretrained({}); \
                 assistant.generation_config.update({flags}); \
                 target.generate(**inputs, assistant_model=assistant)",
                json!(self.model)
            ),
        };
        steps.push(last);
        steps
    }
}

/// Returns the commands that load a draft and its acceptance head into transformers: the export of
/// `source` to `out`, then Python.
pub fn transformers_with_head(source: &Path, out: &str) -> Vec<String> {
    let source = served_path(source, true);
    vec![
        format!("draftsmith export --for transformers {} {}", quoted(&source), quoted(out)),
        format!(
            "target.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained({}, \
             trust_remote_code=True))",
            json!(out)
        ),
    ]
}

/// Returns the path of a model's GGUF file, quoted for a shell.
fn gguf(model: &str) -> String {
    if is_gguf(Path::new(model)) {
        return quoted(model);
    }
    // A model's name on the Hub becomes a file here.
    let path = if Path::new(model).is_absolute() { model } else { &model.replace('/', "-") };
    quoted(&format!("{path}.gguf"))
}

/// Returns the text after `--target` in a command: the target, and the directory of its tokenizer if one was given.
pub fn target_argument(target: &str, tokenizer: Option<&Path>) -> String {
    let tokenizer = tokenizer.map(|dir| quoted(&dir.display().to_string()));
    tokenizer.map_or_else(|| target.to_owned(), |dir| format!("{target} --tokenizer {dir}"))
}

/// Returns a path as servers need it: absolute, or unchanged for a name on the Hugging Face Hub.
pub fn served_path(path: &Path, is_written_later: bool) -> String {
    let later = || is_written_later.then(|| absolute(path).ok()).flatten();
    let full = path.canonicalize().ok().or_else(later);
    full.as_deref().unwrap_or(path).display().to_string()
}

/// The classes of models, without `ForCausalLM`, for which vLLM 0.32 lacks its interface for EAGLE-3, by
/// which it also stores hidden states.
const WITHOUT_STATES: &str = "AXK1 BailingMoe BailingMoeV2 BailingMoeV2_5 BailingMoeV3 Bloom Cohere Cohere2 Dbrx DeciLM \
    Ernie4_5_Moe Exaone Exaone4 ExaoneMoe ExaoneMoE Falcon FalconH1 FalconMamba GPTJ Gemma Gemma2 Gemma3 Gemma3n Glm4 Glm4Moe \
    Glm4MoeLite GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared HYV3 HrmText HyperCLOVAX IQuestLoopCoder InternLM2 \
    Jamba Lfm2 Lfm2Moe LongcatFlash LongcatFlashNgram Mamba Mamba2 Mixtral Nemotron OPT OlmoHybrid Olmoe Orion PanguEmbedded \
    PanguProMoEV2 PanguUltraMoE Param2MoE PhiMoE Qwen2Moe Rnj1 SarvamMoE Solar StableLm Step3Text Step3p5 Zamba2";

/// Returns whether vLLM 0.32 stores no hidden states of a model whose `config.json` names this class.
pub fn lacks_states(class: &str) -> bool {
    let class = class.strip_suffix("ForCausalLM");
    class.is_some_and(|class| WITHOUT_STATES.split_whitespace().any(|known| known == class))
}

/// Returns the method that vLLM 0.33 takes from a drafter's path instead of its config; `None` if the path
/// names none.
pub fn served_method(path: &str) -> Option<&'static str> {
    let path = path.to_lowercase();
    let known =
        [("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark")];
    known.into_iter().find(|(part, _)| path.contains(part)).map(|(_, method)| method)
}

/// Quotes a text as a single word for a POSIX shell.
pub fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./@+:".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::NgramSimple;

    use super::*;

    fn served(flags: &'static ServerFlags) -> ServedDrafter {
        let export = Some("draftsmith export --for eagle3 own /m/eagle".to_owned());
        let (target, model) = ("/m/t".to_owned(), "/m/eagle".to_owned());
        ServedDrafter { flags, target, model, export, whole_block: None, window: None }
    }

    #[test]
    fn every_runtime_starts_with_the_steps_that_it_needs() {
        let start = |flags, runtime, drafting, is_sampled| {
            served(flags).start(runtime, drafting, is_sampled).join("\n")
        };
        let three = Drafting::fixed(3);
        insta::assert_snapshot!(start(&AS_EAGLE3, Runtime::LlamaCpp, three, true), @r"
        draftsmith export --for eagle3 own /m/eagle
        convert_hf_to_gguf.py /m/t --outfile /m/t.gguf
        convert_hf_to_gguf.py /m/eagle --outfile /m/eagle.gguf --target-model-dir /m/t
        llama-server --model /m/t.gguf --spec-type draft-eagle3 --spec-draft-model /m/eagle.gguf --spec-draft-n-max 3 --spec-draft-n-min 0 --spec-draft-p-min 0 --spec-draft-sampling probabilistic --metrics
        ");
        insta::assert_snapshot!(start(&AS_EAGLE3, Runtime::Vllm, three, true), @r#"
        draftsmith export --for eagle3 own /m/eagle
        vllm serve /m/t --speculative-config '{"method":"eagle3","model":"/m/eagle","num_speculative_tokens":3,"draft_sample_method":"probabilistic"}'
        "#);
        insta::assert_snapshot!(start(&AS_EAGLE3, Runtime::Sglang, three, true), @r"
        draftsmith export --for eagle3 own /m/eagle
        python -m sglang.launch_server --model-path /m/t --speculative-algorithm EAGLE3 --speculative-draft-model-path /m/eagle --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --speculative-use-rejection-sampling
        ");
        let windowed = ServedDrafter { window: Some(2048), ..served(&AS_EAGLE3) };
        assert!(
            windowed.sglang_flags(3, false).ends_with("4 --speculative-draft-window-size 2048")
        );
        insta::assert_snapshot!(start(&AS_DRAFT_MODEL, Runtime::Sglang, three, true), @r"
        draftsmith export --for eagle3 own /m/eagle
        python -m sglang.launch_server --model-path /m/t --speculative-algorithm STANDALONE --speculative-draft-model-path /m/eagle --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
        ");
        insta::assert_snapshot!(start(&AS_DRAFT_MODEL, Runtime::Transformers, three, false), @r#"
        draftsmith export --for eagle3 own /m/eagle
        assistant = AutoModelForCausalLM.from_pretrained("/m/eagle"); assistant.generation_config.update(num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0); target.generate(**inputs, assistant_model=assistant)
        "#);
        insta::assert_snapshot!(start(&AS_DSPARK, Runtime::Sglang, three, true), @r"
        draftsmith export --for eagle3 own /m/eagle
        python -m sglang.launch_server --model-path /m/t --speculative-algorithm DSPARK --speculative-draft-model-path /m/eagle --speculative-dspark-block-size 3
        ");
        let look_up = Drafting::look_up(NgramSimple { num_matched: 4, most: 6 });
        insta::assert_snapshot!(start(&AS_DRAFT_MODEL, Runtime::LlamaCpp, look_up, true), @r"
        convert_hf_to_gguf.py /m/t --outfile /m/t.gguf
        llama-server --model /m/t.gguf --spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 6 --spec-ngram-simple-min-hits 1 --metrics
        ");
    }

    #[test]
    fn the_readme_names_every_flag() {
        let readme = include_str!("../../../../checkpoints/README.md");
        let least = Drafting { least_prob: 0.5, ..Drafting::fixed(3) };
        for runtime in Runtime::ALL {
            let row =
                readme.lines().find(|line| line.starts_with(&format!("| {} ", runtime.name())));
            let row = row.unwrap_or_else(|| panic!("{runtime:?} has no row"));
            let start = served(&AS_DRAFT_MODEL).start(runtime, least, runtime != Runtime::Vllm);
            let words = start.last().expect("a command").split([' ', '(', '=', ',', ';']);
            let is_name = |word: &&str| word.starts_with("--") || word.contains("assistant_");
            for word in words.filter(is_name) {
                assert!(row.contains(word), "`{word}` is not in: {row}");
            }
        }
    }

    #[test]
    fn paths_are_words_of_a_shell() {
        assert_eq!(quoted("checkpoints/tiny/head"), "checkpoints/tiny/head");
        assert_eq!(quoted("my models/it's"), "'my models/it'\\''s'");
        assert_eq!(gguf("org/name"), "org-name.gguf");
    }
}
