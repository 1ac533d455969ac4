//! Settings in the form of each server. Its own parser must take them; what it cannot express is said beside them.
//!
//! Facts are from vLLM 0.33 (`SpeculativeConfig`), SGLang 0.5.23 (`server_args`, adaptive configuration), llama.cpp
//! b11434 (`common/arg.cpp`) and TensorRT-LLM 1.3 (`draft_len_schedule`).

use draftsmith_recipe::kinds::ServedAs;
use serde::Serialize;
use serde_json::json;

use super::{LoadRow, ServerSettings};

/// A server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerKind {
    /// llama.cpp's llama-server: one number of candidates for each start.
    LlamaCpp,
    /// vLLM: a table by batch size.
    Vllm,
    /// SGLang: a table by batch size for EAGLE-3 drafters, one number for draft models.
    Sglang,
    /// TensorRT-LLM: a table by batch size, whose keys changed their meaning.
    TrtLlm(ScheduleKeys),
}

/// What a key of TensorRT-LLM's `draft_len_schedule` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduleKeys {
    /// The greatest number of requests of its entry, since pull request 10860 of March 2026.
    UpperBounds,
    /// The smallest one, before.
    LowerBounds,
}

/// A file of a server's settings, or its flags.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SettingsFile {
    /// The file's name; `flags.txt` has flags.
    pub name: &'static str,
    /// Its text.
    pub text: String,
}

/// How a drafter is served.
pub(super) struct Served {
    pub(super) form: ServedAs,
    /// Its checkpoint directory or export.
    pub(super) model: String,
}

/// The ranges of batch sizes with their numbers of candidates: both ends are in a range, and the first begins at 1.
/// Between two measured sizes the number is that of the larger one.
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
    /// The name in file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::LlamaCpp => "llama.cpp",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::TrtLlm(_) => "trtllm",
        }
    }

    /// The settings, and what they cannot express.
    pub(super) fn write(
        self,
        settings: &ServerSettings,
        served: &Served,
    ) -> (Vec<SettingsFile>, Vec<String>) {
        let ranges = ranges(&settings.rows);
        let most = settings.rows.iter().map(|row| row.best).max().unwrap_or(0);
        let takes_one =
            self == Self::LlamaCpp || self == Self::Sglang && served.form == ServedAs::DraftModel;
        let (candidates, most_requests) =
            (if takes_one { settings.single } else { most }, ranges.last().map_or(1, |it| it.1));
        if candidates == 0 {
            let note = "Speculation does not pay here: start the server without it. Its number of candidates must certainly \
                        gain 2 %.";
            return (Vec::new(), vec![note.to_owned()]);
        }
        let mut notes = Vec::new();
        if takes_one && settings.lost_by_single > 0.0 {
            notes.push(format!(
                "It takes one number of candidates for all loads. The best one for each batch size would be {} faster at \
                 this load.",
                format_args!("{:.1} %", 100.0 * settings.lost_by_single / (1.0 - settings.lost_by_single))
            ));
        }
        let model = &served.model;
        let files = match self {
            Self::LlamaCpp => {
                let form = match served.form {
                    ServedAs::Eagle3 => "draft-eagle3",
                    ServedAs::DraftModel => "draft-simple",
                };
                notes.push(format!(
                    "`{model}.gguf` is made of `{model}` by llama.cpp's `convert_hf_to_gguf.py`. It does not set a least \
                     number or probability: both together bias sampled output."
                ));
                vec![flags(format!(
                    "--spec-type {form} --spec-draft-model {model}.gguf --spec-draft-n-max {candidates} --spec-draft-n-min \
                     0 --spec-draft-p-min 0"
                ))]
            }
            Self::Vllm => {
                let method = match served.form {
                    ServedAs::Eagle3 => "eagle3",
                    ServedAs::DraftModel => "draft_model",
                };
                let table: Vec<[usize; 3]> =
                    ranges.iter().map(|(from, to, best)| [*from, *to, *best]).collect();
                let config = json!({
                    "method": method, "model": model, "num_speculative_tokens": most,
                    "num_speculative_tokens_per_batch_size": table,
                });
                notes.push(format!(
                    "`vllm serve TARGET --max-num-seqs {most_requests} --speculative-config \"$(cat speculative.json)\"`. A \
                     batch sets what is drafted after it, one step late; with 0 candidates the drafter still reads new \
                     tokens."
                ));
                if served.form == ServedAs::DraftModel {
                    notes.push(
                        "Its second runner drafts the greatest number with a draft model and cuts the rest, so smaller \
                         numbers save less than these figures."
                            .to_owned(),
                    );
                }
                vec![SettingsFile { name: "speculative.json", text: pretty(&config) }]
            }
            Self::Sglang => {
                let form = match served.form {
                    ServedAs::Eagle3 => "EAGLE3",
                    ServedAs::DraftModel => "STANDALONE",
                };
                let common = format!(
                    "--speculative-algorithm {form} --speculative-draft-model-path {model} --speculative-num-steps \
                     {candidates} --speculative-eagle-topk 1 --speculative-num-draft-tokens {} --max-running-requests \
                     {most_requests}",
                    candidates + 1
                );
                notes.push(
                    "On a CPU it accepts by the most probable token even when it samples."
                        .to_owned(),
                );
                match served.form {
                    ServedAs::DraftModel => vec![flags(common)],
                    ServedAs::Eagle3 => {
                        let slots = ranges.iter().map(|(from, _, best)| {
                            (from.to_string(), json!({ "candidate_steps": [best] }))
                        });
                        let slots: serde_json::Map<String, serde_json::Value> = slots.collect();
                        notes.push(
                            "It takes the slot of the next batch size that has a CUDA graph, so a batch may get the \
                             number of a larger one."
                                .to_owned(),
                        );
                        let adaptive =
                            "--speculative-adaptive --speculative-adaptive-config adaptive.json";
                        vec![
                            flags(format!("{common} {adaptive}")),
                            SettingsFile { name: "adaptive.json", text: pretty(&json!(slots)) },
                        ]
                    }
                }
            }
            Self::TrtLlm(keys) => {
                let mut entries: Vec<(usize, usize, usize)> = ranges.clone();
                // Above the last bound it does not draft. A 0 before that would leave drafters with stale caches.
                while entries.last().is_some_and(|(.., best)| *best == 0) {
                    entries.pop();
                }
                let key = |(from, to, _): &(usize, usize, usize)| match keys {
                    ScheduleKeys::UpperBounds => *to,
                    ScheduleKeys::LowerBounds => *from,
                };
                let mut text = format!(
                    "speculative_config:\n  max_draft_len: {most}\n  draft_len_schedule:\n"
                );
                for entry in &entries {
                    text += &format!("    {}: {}\n", key(entry), entry.2);
                }
                if let (ScheduleKeys::LowerBounds, Some((_, to, _))) = (keys, entries.last())
                    && entries.len() < ranges.len()
                {
                    text += &format!("    {}: 0\n", to + 1);
                }
                notes.push(match keys {
                    ScheduleKeys::UpperBounds => "Keys are the greatest numbers of requests. Versions before pull request 10860 \
                                                  read them as the smallest: then use `--schedule-keys lower`."
                        .to_owned(),
                    ScheduleKeys::LowerBounds => "Keys are the smallest numbers of requests. Versions since pull request 10860 read \
                                                  them as the greatest: then use `--schedule-keys upper`."
                        .to_owned(),
                });
                vec![SettingsFile { name: "speculative.yaml", text }]
            }
        };
        (files, notes)
    }
}

fn flags(text: String) -> SettingsFile {
    SettingsFile { name: "flags.txt", text: text + "\n" }
}

fn pretty(value: &serde_json::Value) -> String {
    value.to_string() + "\n"
}
