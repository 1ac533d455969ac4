//! Reads recipe keys and checks their values.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use draftsmith_files::{Notation, plain_problem, read_text};
use draftsmith_theory::{Decoding, Sampling};
use serde::de::DeserializeOwned;

/// Checks that a condition on a key's value holds.
///
/// # Errors
/// If the condition is false. The message names the key and the problem.
pub(crate) fn require(holds: bool, key: &str, problem: &str) -> Result<()> {
    if holds { Ok(()) } else { bail!("key `{key}` {problem}") }
}

/// Checks that a table of drafters or a list of settings has at most 256 entries. Reports compare
/// all with all, which takes hours for thousands.
///
/// # Errors
/// If it has more. The message names the key.
pub(crate) fn require_few(num: usize, key: &str) -> Result<()> {
    let expected = "expected at most 256; hint: divide them among several recipes";
    require(num <= 256, key, &format!("has {num} entries, {expected}"))
}

/// Reads and checks the keys of a table in its own file. Error messages call the file `what`.
pub(super) fn read_keys<T: DeserializeOwned>(
    what: &str,
    path: &Path,
    check: impl Fn(&T) -> Result<()>,
) -> Result<T> {
    let named = || format!("{what} `{}`", path.display());
    let text = read_text(path).with_context(|| format!("cannot read the {}", named()))?;
    ensure!(
        !text.trim_start().starts_with('{'),
        "{} is JSON, and TOML was expected; hint: a file that `draftsmith server costs` wrote goes with `--for \
         SERVER`: `tune --for SERVER --server-costs FILE` or `survey --for SERVER --server-costs FILE`",
        named()
    );
    let keys: T = toml::from_str(&text).map_err(|e| toml_error(&e)).with_context(named)?;
    check(&keys).with_context(named)?;
    Ok(keys)
}

/// Finds the expected name that is most like an unknown one, given a message such as `unknown field
/// \`promts\`, expected one of \`prompts\`, …`. `None` if none is like it.
fn similar_name(message: &str) -> Option<&str> {
    let (found, expected) = message.strip_prefix("unknown ")?.split_once(", expected ")?;
    let found = found.rsplit(' ').next()?.trim_matches(['`', '"']);
    let likeness = |name: &str| strsim::jaro_winkler(found, name);
    let names = expected.split('`').skip(1).step_by(2).filter(|name| likeness(name) > 0.8);
    names.max_by(|one, other| likeness(one).total_cmp(&likeness(other)))
}

/// Converts a TOML parser's error to a message that shows the line, but not the names of Rust
/// types.
pub(super) fn toml_error(error: &toml::de::Error) -> anyhow::Error {
    let message = error.message();
    if message.starts_with("unknown field `draft`") {
        return anyhow::anyhow!(
            "{message}; hint: a draft model is a drafter: `drafters.draft = {{ kind = \"model\", model = \"PATH\" }}`"
        );
    }
    let problem = plain_problem(message, Notation::Toml);
    let hint = similar_name(message);
    let hint = hint.map_or_else(String::new, |name| format!("; hint: did you mean `{name}`?"));
    let text = error.to_string().replace(message, &(problem + &hint));
    anyhow::anyhow!("{}", text.trim_end().to_owned())
}

/// Converts sampling settings to a [`Decoding`]; temperature 0 means greedy.
pub fn decoding(sampling: Sampling) -> Decoding {
    if sampling.temperature == 0.0 { Decoding::GREEDY } else { Decoding::sampled(sampling) }
}

/// Returns 1, as a default value for serde.
pub(crate) fn one() -> f64 {
    1.0
}
