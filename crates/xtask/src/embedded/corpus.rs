//! The instruction corpus that the embedded models learn: seven kinds of short tasks, drawn from a
//! seed.
//!
//! Owns the task at each index, the judgement of answers and the file format of prompts. Each submodule owns
//! the wording of one kind; tokens belong to `tokenizer`, training to `main`.
//!
//! The corpus is made for studying speculative decoding. Answers spell out their steps, so most tokens are a
//! copy or a small local computation that a 2-layer draft gets right, while some need more depth: a carry, a
//! value looked up, the next word of a sorted list. Every answer follows from its prompt, so no second model
//! is needed to judge answers.

mod code;
mod copying;
mod lists;
mod strings;
mod sums;
mod tables;
mod units;
mod words;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use anyhow::Context;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// The kind of a task; the `category` in a prompt file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Column addition of two numbers of 2 or 3 digits, least significant digit first.
    Sums,
    /// Conversion between two units, with the factor stated first.
    Units,
    /// Sorting, reversing, changing and counting a list of words.
    Lists,
    /// Letters and words: capitals, spelling, repetition, replacement.
    Strings,
    /// Copying a passage, or one sentence of it.
    Copying,
    /// A short Python function from its signature and docstring.
    Code,
    /// A look-up in a small markdown table.
    Tables,
}

impl Kind {
    /// Every kind, in the order of reports.
    pub(crate) const ALL: [Kind; 7] = [
        Kind::Sums,
        Kind::Units,
        Kind::Lists,
        Kind::Strings,
        Kind::Copying,
        Kind::Code,
        Kind::Tables,
    ];

    /// The kind's name in prompt files and results, in snake case.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Sums => "sums",
            Kind::Units => "units",
            Kind::Lists => "lists",
            Kind::Strings => "strings",
            Kind::Copying => "copying",
            Kind::Code => "code",
            Kind::Tables => "tables",
        }
    }
}

/// The kinds of consecutive indices. Units come less often, because they have the fewest tasks.
const CYCLE: [Kind; 20] = [
    Kind::Sums,
    Kind::Copying,
    Kind::Lists,
    Kind::Code,
    Kind::Strings,
    Kind::Tables,
    Kind::Units,
    Kind::Sums,
    Kind::Copying,
    Kind::Lists,
    Kind::Code,
    Kind::Strings,
    Kind::Tables,
    Kind::Sums,
    Kind::Copying,
    Kind::Lists,
    Kind::Code,
    Kind::Strings,
    Kind::Tables,
    Kind::Units,
];

/// One task with its only correct answer. Neither text begins or ends with white space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Example {
    pub(crate) kind: Kind,
    pub(crate) prompt: String,
    pub(crate) answer: String,
}

/// The example at `index` of the corpus with a seed: a pure function of the two, so any range of indices is a
/// split.
pub(crate) fn example(seed: u64, index: u64) -> Example {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&index.to_le_bytes());
    let rng = &mut ChaCha8Rng::from_seed(key);

    let kind = CYCLE[(index % CYCLE.len() as u64) as usize];
    let (prompt, answer) = match kind {
        Kind::Sums => sums::draw(rng),
        Kind::Units => units::draw(rng),
        Kind::Lists => lists::draw(rng),
        Kind::Strings => strings::draw(rng),
        Kind::Copying => copying::draw(rng),
        Kind::Code => code::draw(rng),
        Kind::Tables => tables::draw(rng),
    };
    Example { kind, prompt, answer }
}

/// Whether a model's answer `got` is correct, given the corpus's answer `expected`.
///
/// A sum is correct if its last `Answer:` line is; every other answer must be equal except for surrounding
/// white space.
pub(crate) fn is_correct(kind: Kind, expected: &str, got: &str) -> bool {
    match kind {
        Kind::Sums => {
            let wanted = sums::final_answer(expected);
            wanted.is_some() && wanted == sums::final_answer(got)
        }
        Kind::Units | Kind::Lists | Kind::Strings | Kind::Copying | Kind::Code | Kind::Tables => {
            expected.trim() == got.trim()
        }
    }
}

/// Writes the examples of `range` to `path`, one JSON object a line: `id` (kind and index),
/// `category`, `prompt`, `answer`.
///
/// # Errors
/// If the file cannot be created or written.
pub(crate) fn write_prompts(path: &Path, seed: u64, range: Range<u64>) -> anyhow::Result<()> {
    let context = || format!("writing prompts to `{}`", path.display());
    let mut file = BufWriter::new(File::create(path).with_context(context)?);
    for index in range {
        let Example { kind, prompt, answer } = example(seed, index);
        let line = serde_json::json!({
            "id": format!("{}-{index:05}", kind.name()),
            "category": kind.name(),
            "prompt": prompt,
            "answer": answer,
        });
        writeln!(file, "{line}").with_context(context)?;
    }
    file.flush().with_context(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_example_depends_on_seed_and_index_alone() {
        assert_eq!(example(3, 41), example(3, 41));
        assert_ne!(example(3, 41), example(4, 41));
        assert_ne!(example(3, 40).prompt, example(3, 60).prompt);
    }

    #[test]
    fn every_kind_comes_up_and_accepts_its_own_answer() {
        let examples: Vec<_> = (0..2_000).map(|index| example(7, index)).collect();
        for kind in Kind::ALL {
            assert!(examples.iter().any(|example| example.kind == kind));
        }
        for Example { kind, prompt, answer } in &examples {
            assert!(is_correct(*kind, answer, &format!("{answer}\n")));
            assert!(!is_correct(*kind, answer, ""));
            assert_eq!(prompt.trim(), prompt);
            assert_eq!(answer.trim(), answer);
        }
    }

    #[test]
    fn a_sum_is_judged_by_its_last_answer_line() {
        let expected = "Ones: 2 + 3 = 5, write 5.\nAnswer: 5";
        assert!(is_correct(Kind::Sums, expected, "Answer: 4\nAnswer: 5"));
        assert!(!is_correct(Kind::Sums, expected, "Answer: 50"));
        assert!(!is_correct(Kind::Sums, expected, "5"));
    }
}
