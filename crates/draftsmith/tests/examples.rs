//! Runs every example. Each checks its own result: `main` fails or panics if a text differs from the target's.

use std::error::Error;

/// Gives each example a module and a test of its name.
macro_rules! examples {
    ($($file:literal $name:ident $test:ident;)+) => {
        $(
            #[path = $file]
            mod $name;

            #[test]
            fn $test() -> Result<(), Box<dyn Error>> {
                $name::main()
            }
        )+

        /// The files that have a test.
        const FILES: &[&str] = &[$($file),+];
    };
}

examples! {
    "../examples/generate.rs" generate a_draft_gives_the_same_text_from_fewer_target_forwards;
    "../examples/head.rs" head a_head_is_trained_and_decoded_with;
    "../examples/adapter.rs" adapter an_adapter_is_trained_from_parquet_and_decoded_with;
    "../examples/custom_rule.rs" custom_rule a_custom_rule_is_replayed_as_it_decodes;
    "../examples/own_drafter.rs" own_drafter a_drafter_of_ones_own_gives_the_targets_text;
    "../examples/conversation.rs" conversation a_conversation_goes_on_with_the_same_text;
    "../examples/results.rs" results results_are_read_with_the_counts_that_were_written;
}

#[test]
fn every_example_is_short_and_has_a_test() -> Result<(), Box<dyn Error>> {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
    let mut num_examples = 0;
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        assert!(FILES.contains(&&*format!("../examples/{name}")), "{name} has no test");
        let num_lines = std::fs::read_to_string(&path)?.lines().count();
        assert!(num_lines <= 40, "{name} has {num_lines} lines");
        num_examples += 1;
    }
    assert_eq!(num_examples, FILES.len());
    Ok(())
}
