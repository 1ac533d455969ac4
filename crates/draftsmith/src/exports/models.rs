//! Whether an export belongs to the models at hand.

use std::path::Path;

use anyhow::{Result, bail};

/// Checks the models that an export names: what each is to it, its hash then and its hash now.
pub(super) fn check_models(
    what: &str,
    dir: &Path,
    models: &[(&str, &Option<String>, &str)],
) -> Result<()> {
    for (of, found, now) in models {
        let Some(found) = found.as_ref().filter(|hash| hash != now) else { continue };
        bail!(
            "the {what} in `{}` was trained with another {of} (hash {found}, this one's is {now}); \
             hint: train it again, or use the {of} it belongs to",
            dir.display()
        );
    }
    Ok(())
}
