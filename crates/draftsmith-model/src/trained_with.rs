//! Checks that a head or an adapter is used with the models that it was trained with. Its
//! configuration records hashes of these models.

use std::path::Path;

use draftsmith_files::hash_bytes;

use crate::error::ModelError;
use crate::weights::weight_files;

/// Checks that a head or an adapter was trained with the model that is in use. `what` is `head` or
/// `adapter`, `dir` its directory, and `of` the model's role, such as `target`. `then` is the
/// recorded hash; exports from other programs have none and pass. `now` computes the hash of the
/// model in use, and is called only if a hash is recorded.
///
/// # Errors
/// If the hashes differ, or `now` fails.
pub fn check_trained_with<E: From<ModelError>>(
    (what, dir): (&'static str, &Path),
    of: &'static str,
    then: Option<&str>,
    now: impl FnOnce() -> Result<String, E>,
) -> Result<(), E> {
    let Some(then) = then else { return Ok(()) };
    let now = now()?;
    if then == now {
        return Ok(());
    }
    let dir = dir.display();
    let measured = match of == "target" && what != "head" {
        true => format!(
            "; `draftsmith survey --draft {dir} --target MODEL --prompts FILE` measures what it gives with this target"
        ),
        false => String::new(),
    };
    Err(ModelError::Invalid(format!(
        "the {what} in `{dir}` was trained with another {of} (hash {then}, this one's is {now}); hint: train it again, or \
         use the {of} it belongs to{measured}"
    ))
    .into())
}

/// Hashes the weights of a head or an adapter in `dir`, together with its `shape`. `hash` hashes
/// one file.
///
/// # Errors
/// If a file cannot be read.
pub fn hash_export<E: From<ModelError>>(
    dir: &Path,
    shape: &str,
    hash: impl Fn(&Path) -> Result<String, E>,
) -> Result<String, E> {
    let hashes = weight_files(dir)?.into_iter().map(|name| hash(&dir.join(name)));
    let hashes = hashes.collect::<Result<Vec<_>, _>>()?;
    Ok(hash_bytes(format!("{} {shape}", hashes.join(" ")).as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_hash_is_an_error() {
        let check = |then| {
            let now = || Ok::<_, ModelError>("beef".to_owned());
            check_trained_with(("head", Path::new("heads/one")), "draft", then, now)
        };
        assert!(check(None).is_ok() && check(Some("beef")).is_ok());
        let message = check(Some("cafe")).expect_err("differs").to_string();
        for part in ["the head in `heads/one`", "another draft", "cafe", "beef"] {
            assert!(message.contains(part), "{message}");
        }
        let unread = || Err(ModelError::Device("unread".to_owned()));
        assert!(check_trained_with(("head", Path::new("one")), "draft", None, unread).is_ok());
    }
}
