//! The jobs of draftsmith: recipes, subcommands and reports.
//!
//! The only crate that prints, reads arguments and picks devices. One file a subcommand in
//! `commands/`; what they share stands beside it.

mod agreement;
mod built_data;
mod cli;
mod commands;
mod console;
mod conversation;
mod costs;
mod data_store;
mod decoders;
mod decoding_arguments;
mod device;
mod devices;
mod ends;
mod exports;
mod hub;
mod judging;
mod labels;
mod lock;
mod names;
mod out_dir;
mod pair;
mod prompt_files;
mod prompts;
#[doc(hidden)]
pub mod readers;
mod recipe;
mod recorder;
mod report;
mod responses;
mod results;
mod rollouts;
mod served;
mod served_rows;
mod shard;
mod statistics;
mod sweep;
mod table;
mod text_side;
mod training;
mod tuning;
mod workspace;

pub use cli::run;
