//! Integration tests through the command line, on the embedded models.
#![expect(clippy::unwrap_used, reason = "helpers may panic like the tests that call them")]

#[path = "cli/adapter.rs"]
mod adapter;
#[path = "cli/bad_input.rs"]
mod bad_input;
#[path = "cli/block.rs"]
mod block;
#[path = "cli/cascade.rs"]
mod cascade;
#[path = "cli/certify.rs"]
mod certify;
#[path = "cli/check.rs"]
mod check;
#[path = "cli/costs.rs"]
mod costs;
#[path = "cli/data_forms.rs"]
mod data_forms;
#[path = "cli/data_page.rs"]
mod data_page;
#[path = "cli/doctor.rs"]
mod doctor;
#[path = "cli/eagle1.rs"]
mod eagle1;
#[path = "cli/explain.rs"]
mod explain;
#[path = "cli/export.rs"]
mod export;
#[path = "cli/features.rs"]
mod features;
#[path = "cli/foreign.rs"]
mod foreign;
#[path = "cli/generate.rs"]
mod generate;
#[path = "cli/gguf.rs"]
mod gguf;
#[cfg(unix)]
#[path = "cli/guides.rs"]
mod guides;
#[path = "cli/help.rs"]
mod help;
#[path = "cli/hub.rs"]
mod hub;
#[path = "cli/medusa.rs"]
mod medusa;
#[path = "cli/papers.rs"]
mod papers;
#[cfg(target_os = "linux")]
#[path = "cli/process.rs"]
mod process;
#[path = "cli/record.rs"]
mod record;
#[path = "cli/resume.rs"]
mod resume;
#[path = "cli/road.rs"]
mod road;
#[path = "cli/servers.rs"]
mod servers;
#[path = "cli/sharded.rs"]
mod sharded;
#[path = "cli/sources.rs"]
mod sources;
#[path = "cli/stale.rs"]
mod stale;
#[cfg(unix)]
#[path = "cli/states.rs"]
mod states;
#[path = "cli/support.rs"]
mod support;
#[path = "cli/survey.rs"]
mod survey;
#[path = "cli/sweep.rs"]
mod sweep;
#[path = "cli/texts.rs"]
mod texts;
#[path = "cli/tune.rs"]
mod tune;
#[path = "cli/verdict.rs"]
mod verdict;
