//! The command line of draftsmith: arguments, console output and locks.
//!
//! Only this crate prints and parses arguments. `commands/` has one file per subcommand, which
//! reads a recipe, calls a library and prints the result.

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

pub use cli::{command, run};
