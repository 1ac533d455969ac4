//! The jobs of draftsmith: recipes, subcommands and reports.
//!
//! The only crate that prints, reads arguments and picks devices. One file a subcommand in
//! `commands/`; what they share stands beside it.

mod agreement;
mod answers;
mod calibrated;
mod cli;
mod commands;
mod console;
mod costs;
mod dashboard;
mod decoders;
mod device;
mod devices;
mod export_config;
mod pair;
mod progress;
mod recipe;
mod report;
mod results;
mod rollouts;
mod sweep;
mod table;
mod trained;
mod tuned;

pub use cli::run;
