//! draftsmith's command line: recipes and subcommands.
//!
//! Only this crate prints, parses arguments and chooses devices. `commands/` has one file per subcommand;
//! shared code is beside it.

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
mod exports;
mod hub;
mod judging;
mod kinds;
mod labels;
mod lock;
#[cfg(test)]
pub mod loopback;
mod out_dir;
mod pair;
mod prompt_files;
mod prompts;
#[doc(hidden)]
pub mod readers;
mod recipe;
mod recorder;
mod responses;
mod rollouts;
mod server_access;
mod shard;
mod sweep;
mod text_side;
mod training;
mod tuning;
mod workspace;

pub use cli::{command, run};
