//! draftsmith's command line: arguments, the console and locks.
//!
//! Only this crate prints and parses arguments. `commands/` has one file per subcommand: it reads a recipe,
//! calls a library and prints.

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
