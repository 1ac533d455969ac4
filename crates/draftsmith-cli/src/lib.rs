//! draftsmith's command line: recipes and subcommands.
//!
//! Only this crate prints, parses arguments and chooses devices. `commands/` has one file per subcommand;
//! shared code is beside it.

mod cli;
mod commands;
mod console;
mod decoding_arguments;
mod devices;
mod lock;
#[cfg(test)]
pub mod loopback;
#[doc(hidden)]
pub mod readers;
#[cfg(test)]
mod test_support;
mod training;

pub use cli::run;
