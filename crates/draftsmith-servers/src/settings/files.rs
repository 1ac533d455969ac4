//! Writes settings in each server's own format, with notes on what the format cannot express.
//!
//! Formats follow vLLM 0.33 (`SpeculativeConfig`), SGLang 0.5.23 (`server_args`, adaptive
//! configuration), llama.cpp b11434 (`common/arg.cpp`) and TensorRT-LLM 1.3 (`draft_len_schedule`).

use anyhow::Result;
use draftsmith_recipe::exports::servers::suffix_config;
use draftsmith_recipe::{Runtime, ServedDrafter, ServerFlags};
use draftsmith_report::{DecodingName, speed_text};
use draftsmith_theory::{Drafting, Recordings};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{LoadRow, ServerSettings};

/// A number of concurrent requests above every server's limit.
const ANY_NUMBER: usize = 1_000_000;

/// An inference server program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerKind {
    /// llama.cpp's llama-server, with one number of candidates, set at its start.
    LlamaCpp,
    /// vLLM, with a table by batch size.
    Vllm,
    /// SGLang, with a table by batch size for EAGLE-3 drafters, and one number for draft models.
    Sglang,
    /// TensorRT-LLM, with a table by batch size. The meaning of its keys changed between versions.
    TrtLlm(ScheduleKeys),
}

/// The meaning of the keys in TensorRT-LLM's `draft_len_schedule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduleKeys {
    /// A key is the largest batch size of its entry (since pull request 10860 of March 2026).
    UpperBounds,
    /// A key is the smallest batch size of its entry (before that pull request).
    LowerBounds,
}

/// A settings file for a server, or its command-line flags.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SettingsFile {
    /// The file's name; `flags.txt` contains flags.
    pub name: &'static str,
    /// The file's text.
    pub text: String,
}

/// Merges batch sizes into ranges (first size, last size, number of candidates). The first range
/// begins at 1. Sizes between two measured ones get the number of the larger one.
fn ranges(rows: &[LoadRow]) -> Vec<(usize, usize, usize)> {
    let mut ranges: Vec<(usize, usize, usize)> = Vec::new();
    for row in rows {
        match ranges.last_mut() {
            Some((_, to, best)) if *best == row.best => *to = row.batch_size,
            last => {
                let from = last.map_or(1, |(_, to, _)| *to + 1);
                ranges.push((from, row.batch_size, row.best));
            }
        }
    }
    ranges
}

impl ServerKind {
    /// The names of all servers.
    pub const NAMES: [&str; 4] = ["llama.cpp", "vllm", "sglang", "trtllm"];

    /// Returns the server with this name; `None` if there is none, or if it is TensorRT-LLM and the
    /// meaning of its keys is not given.
    pub fn named(name: &str, keys: Option<ScheduleKeys>) -> Option<Self> {
        let all = [Self::LlamaCpp, Self::Vllm, Self::Sglang].into_iter();
        all.chain(keys.map(Self::TrtLlm)).find(|it| it.name() == name)
    }

    /// Returns the server's name in arguments and file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::LlamaCpp => "llama.cpp",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::TrtLlm(_) => "trtllm",
        }
    }

    /// Returns the program as a runtime; `None` for TensorRT-LLM, which needs a settings file only.
    fn runtime(self) -> Option<Runtime> {
        match self {
            Self::LlamaCpp => Some(Runtime::LlamaCpp),
            Self::Vllm => Some(Runtime::Vllm),
            Self::Sglang => Some(Runtime::Sglang),
            Self::TrtLlm(_) => None,
        }
    }

    /// Returns whether the server loads a drafter.
    pub fn loads(self, flags: &ServerFlags) -> bool {
        self.runtime().is_none_or(|runtime| flags.is_loaded_by(runtime))
    }

    /// Returns whether the server takes a single number of candidates for all loads.
    fn takes_one(self, flags: &ServerFlags) -> bool {
        self == Self::LlamaCpp || self == Self::Sglang && !flags.sglang_adapts
    }

    /// Returns settings for benchmarks without a trained drafter's answers: the server accepts at the
    /// recorded rates by position in a round. `None` if the server cannot, or nothing pays.
    ///
    /// # Errors
    /// If the rounds cannot be replayed.
    pub(super) fn benchmark(
        self,
        settings: &ServerSettings,
        recordings: &Recordings,
    ) -> Result<Option<SettingsFile>> {
        let most = settings.rows.iter().map(|row| row.best).max().unwrap_or(0);
        let drafting = match self {
            Self::Vllm => Some(Drafting::fixed(most)),
            Self::LlamaCpp => settings.single,
            Self::Sglang | Self::TrtLlm(_) => None,
        };
        let Some((drafting, file)) = drafting.zip(settings.files.first()) else { return Ok(None) };
        let recordings = recordings.after_first_token();
        let trace = recordings.trace(&drafting.rule(recordings.head))?;
        let rates = trace.unconditional_rates(drafting.num_candidates);
        let rates = json!(rates.iter().map(|rate| (1e4 * rate).round() / 1e4).collect::<Vec<_>>());
        Ok(Some(if self == Self::LlamaCpp {
            let (flags, rates) = (file.text.trim_end(), rates.to_string());
            let text = format!("{flags} --spec-synth-rates {}\n", rates.trim_matches(['[', ']']));
            SettingsFile { name: "benchmark.txt", text }
        } else {
            let mut config: Map<String, Value> = serde_json::from_str(&file.text)?;
            // vLLM's first runner refuses it beside synthetic acceptance.
            config.shift_remove("draft_sample_method");
            config.insert("rejection_sample_method".to_owned(), json!("synthetic"));
            config.insert("synthetic_acceptance_rates".to_owned(), rates);
            SettingsFile { name: "benchmark.json", text: json!(config).to_string() + "\n" }
        }))
    }

    /// Writes the server's settings, and the notes on what they cannot express, into `settings`.
    /// Without a setting that pays there are only notes.
    pub(super) fn write(self, settings: &mut ServerSettings, served: &ServedDrafter) {
        let is_suffix =
            settings.rows.iter().flat_map(|row| &row.cells).any(|it| it.drafting.is_suffix);
        let takes_one = self.takes_one(served.flags) || is_suffix;
        let most = settings.rows.iter().map(|row| row.best).max().unwrap_or(0);
        let single = settings.single.unwrap_or(Drafting::fixed(0));
        let table = SettingsTable {
            ranges: ranges(&settings.rows),
            most: if takes_one { single.num_candidates } else { most },
            single,
            is_sampled: settings.decoding == DecodingName::Sampled,
            served,
        };
        if table.most == 0 {
            settings.notes.push(match settings.uncertain_speedup {
                Some(speedup) => format!(
                    "It is not certain that speculation pays here: {}. It must certainly gain 2 %, so start the server \
                     without it, or measure more `--blocks` on an idle machine.",
                    speed_text(&speedup)
                ),
                None => "Speculation does not pay here: start the server without it.".to_owned(),
            });
            return;
        }
        let (files, mut notes) = match self {
            Self::LlamaCpp => table.llama_cpp(),
            Self::Vllm => table.vllm(),
            Self::Sglang => table.sglang(),
            Self::TrtLlm(keys) => table.trtllm(keys),
        };
        if takes_one && settings.lost_by_single > 0.0 {
            let faster = settings.lost_by_single / (1.0 - settings.lost_by_single);
            notes.push(format!(
                "It takes one number of candidates for all loads. The best one for each batch size would be {:.1} % \
                 faster at this load.",
                100.0 * faster
            ));
        }
        if let Some(runtime) = self.runtime() {
            let flags = match (self, files.first()) {
                (Self::Vllm, Some(file)) => {
                    format!("--speculative-config \"$(cat {})\"", file.name)
                }
                (_, file) => file.map_or(String::new(), |file| file.text.trim_end().to_owned()),
            };
            settings.start = served.start_with(runtime, &flags, single.num_matched.is_none());
        }
        (settings.files, settings.notes) = (files, notes);
    }
}

/// The numbers of candidates by batch size.
struct SettingsTable<'a> {
    /// The ranges of batch sizes (first, last, number of candidates).
    ranges: Vec<(usize, usize, usize)>,
    /// The largest number of candidates.
    most: usize,
    /// The setting that serves all loads.
    single: Drafting,
    is_sampled: bool,
    served: &'a ServedDrafter,
}

impl SettingsTable<'_> {
    fn most_requests(&self) -> usize {
        self.ranges.last().map_or(1, |(_, to, _)| *to)
    }

    fn llama_cpp(&self) -> (Vec<SettingsFile>, Vec<String>) {
        let mut text = self.served.llama_cpp_flags(self.single, self.is_sampled);
        if self.single.num_matched.is_some() {
            return (vec![flags(text + self.unified())], self.unified_note());
        }
        let mut notes = vec![
            "No minimum length is set: with a minimum probability it biases sampled output."
                .to_owned(),
        ];
        if self.single.least_prob > 0.0 {
            text += self.unified();
            notes.extend(self.unified_note());
        }
        if let Some((flag, note)) =
            self.served.flags.llama_cpp_several.filter(|_| self.most_requests() > 1)
        {
            text += flag;
            notes.push(note.to_owned());
        }
        (vec![flags(text)], notes)
    }

    fn above_note(&self) -> String {
        format!(
            "With more than {} concurrent requests it does not draft, because `costs` has not measured them; measure \
             more with `--concurrency`.",
            self.most_requests()
        )
    }

    /// Returns the flag for concurrent requests with rounds of different lengths; empty for one
    /// request.
    fn unified(&self) -> &'static str {
        if self.most_requests() > 1 { " --kv-unified" } else { "" }
    }

    fn unified_note(&self) -> Vec<String> {
        let note = "Without `--kv-unified` (the default if `--parallel` is given) llama.cpp computes requests that draft \
                    different numbers one after another.";
        if self.most_requests() > 1 { vec![note.to_owned()] } else { Vec::new() }
    }

    fn vllm(&self) -> (Vec<SettingsFile>, Vec<String>) {
        if self.single.is_suffix {
            let config = suffix_config(self.single.num_candidates);
            let note = "vLLM also counts what followed in answers that are not complete yet, and forgets the oldest of \
                        10,000 answers. After its start it has none.";
            return (vec![config_file(&config)], vec![note.to_owned()]);
        }
        // A batch above the last range would get that range's number.
        let above = (self.most_requests() + 1, ANY_NUMBER, 0);
        let ranges: Vec<[usize; 3]> =
            self.ranges.iter().chain([&above]).map(|(from, to, num)| [*from, *to, *num]).collect();
        let mut config = self.served.vllm_config(self.most, self.is_sampled);
        config["num_speculative_tokens_per_batch_size"] = json!(ranges);
        let mut notes = vec![
            "A batch sets what is drafted after it, one step late; with 0 candidates the drafter still reads new \
             tokens."
                .to_owned(),
            self.above_note(),
        ];
        notes.extend(self.served.flags.vllm_note.map(str::to_owned));
        if let Some((from, ..)) = self.ranges.iter().find(|(.., num)| *num == 0) {
            notes.push(format!(
                "From {from} concurrent requests on it drafts 0 candidates. There vLLM's throughput can collapse (its \
                 issue #49548, open): measure it at that load, and if it stalls, start it without speculation."
            ));
        }
        (vec![config_file(&config)], notes)
    }

    fn sglang(&self) -> (Vec<SettingsFile>, Vec<String>) {
        let common = self.served.sglang_flags(self.most, self.is_sampled);
        let mut notes =
            vec!["On a CPU it accepts by the most probable token even when it samples.".to_owned()];
        if !self.served.flags.sglang_adapts {
            return (vec![flags(common)], notes);
        }
        let slot = |(from, _, num): &(usize, usize, usize)| {
            (from.to_string(), json!({ "candidate_steps": [num] }))
        };
        let above = (self.most_requests() + 1, ANY_NUMBER, 0);
        let slots: Map<String, Value> = self.ranges.iter().chain([&above]).map(slot).collect();
        let note = "It takes the slot of the next batch size that has a CUDA graph, so a batch may get the number of a \
                    larger one.";
        notes.extend([note.to_owned(), self.above_note()]);
        let adaptive = "--speculative-adaptive --speculative-adaptive-config adaptive.json";
        let files = vec![
            flags(format!("{common} {adaptive}")),
            SettingsFile { name: "adaptive.json", text: json!(slots).to_string() + "\n" },
        ];
        (files, notes)
    }

    fn trtllm(&self, keys: ScheduleKeys) -> (Vec<SettingsFile>, Vec<String>) {
        let drafts = self.ranges.iter().filter(|(.., num)| *num > 0);
        let mut text =
            format!("speculative_config:\n  max_draft_len: {}\n  draft_len_schedule:\n", self.most);
        let mut last = 0;
        for (from, to, num) in drafts {
            let key = match keys {
                ScheduleKeys::UpperBounds => to,
                ScheduleKeys::LowerBounds => from,
            };
            text += &format!("    {key}: {num}\n");
            last = *to;
        }
        // Above the last upper bound, the server does not draft anyway. A larger batch never gets
        // more candidates, so drafting never resumes after a 0 with a stale KV cache of the
        // drafter.
        if keys == ScheduleKeys::LowerBounds && last < self.most_requests() {
            text += &format!("    {}: 0\n", last + 1);
        }
        let note = match keys {
            ScheduleKeys::UpperBounds => {
                "Keys are the greatest numbers of requests. Versions before pull request 10860 read them as the \
                 smallest: then use `--schedule-keys lower`."
            }
            ScheduleKeys::LowerBounds => {
                "Keys are the smallest numbers of requests. Versions since pull request 10860 read them as the \
                 greatest: then use `--schedule-keys upper`."
            }
        };
        (vec![SettingsFile { name: "speculative.yaml", text }], vec![note.to_owned()])
    }
}

fn config_file(config: &Value) -> SettingsFile {
    SettingsFile { name: "speculative.json", text: config.to_string() + "\n" }
}

fn flags(text: String) -> SettingsFile {
    SettingsFile { name: "flags.txt", text: text + "\n" }
}
