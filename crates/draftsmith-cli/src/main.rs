//! The `draftsmith` binary.

mod allocator;

fn main() -> std::process::ExitCode {
    allocator::keep_freed_pages();
    draftsmith_cli::run()
}
