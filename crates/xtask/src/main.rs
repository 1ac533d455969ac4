//! Work on draftsmith itself: makes the embedded models. The benches are in `benches/`.

#[path = "../../draftsmith-cli/src/allocator.rs"]
mod allocator;
mod embedded;

use anyhow::Result;
use clap::Parser;

/// Work on draftsmith itself.
#[derive(Parser)]
enum Task {
    /// Make the embedded default models: prompts, tokenizer and weights.
    Embedded(embedded::Arguments),
}

fn main() -> Result<()> {
    allocator::keep_freed_pages();
    match Task::parse() {
        Task::Embedded(arguments) => embedded::run(arguments),
    }
}
