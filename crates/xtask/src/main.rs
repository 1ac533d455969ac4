//! Work on draftsmith itself: makes the embedded models and wheels. The benches are in `benches/`.

#[path = "../../draftsmith-cli/src/allocator.rs"]
mod allocator;
mod embedded;
mod wheel;

use anyhow::Result;
use clap::Parser;

/// Work on draftsmith itself.
#[derive(Parser)]
enum Task {
    /// Make the embedded default models: prompts, tokenizer and weights.
    Embedded(embedded::Arguments),
    /// Build a wheel with the command `draftsmith` and its manual.
    Wheel(wheel::Arguments),
}

fn main() -> Result<()> {
    allocator::keep_freed_pages();
    match Task::parse() {
        Task::Embedded(arguments) => embedded::run(arguments),
        Task::Wheel(arguments) => wheel::run(&arguments),
    }
}
