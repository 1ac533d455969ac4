//! The `draftsmith` binary: parses, calls, maps to an exit code.

mod allocator;

fn main() -> std::process::ExitCode {
    allocator::keep_freed_pages();
    draftsmith::run()
}
