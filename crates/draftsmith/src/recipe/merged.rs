//! The tables `[[evaluate.merged]]`: drafters whose chains are merged into one tree.

use std::fmt;

use anyhow::Result;
use draftsmith_theory::{DrafterId, LookupFirst, MAX_DRAFTERS};
use serde::{Deserialize, Serialize};

use super::require;

/// Drafters whose chains are merged.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MergedRecipe {
    /// Drafters with models: `self_draft_N`, which must be the first, `draft`, `small_draft`.
    pub(crate) drafters: Vec<DrafterId>,
    /// Prompt lookup that adds a chain; none if absent.
    pub(crate) lookup: Option<LookupFirst>,
}

impl MergedRecipe {
    pub(super) fn check(&self) -> Result<()> {
        let (key, drafters) = ("evaluate.merged", &self.drafters);
        let has_model = |id: &DrafterId| match id {
            DrafterId::Draft | DrafterId::SmallDraft | DrafterId::SelfDraft { .. } => true,
            DrafterId::MaxGram | DrafterId::Cascade { .. } | DrafterId::Merged { .. } => false,
        };
        require(
            (1..MAX_DRAFTERS).contains(&drafters.len()) && drafters.iter().all(has_model),
            key,
            "has a table whose `drafters` are empty, more than three, or without a model: name \
             `self_draft_N`, `draft` or `small_draft`, and `lookup` for prompt lookup",
        )?;
        let mut entries = (0..drafters.len()).map(|at| (&drafters[..at], drafters[at]));
        require(
            entries.clone().all(|(before, id)| !before.contains(&id)),
            key,
            "has a table that names a drafter twice",
        )?;
        require(
            entries.all(|(before, id)| before.is_empty() || id.exit_layer().is_none()),
            key,
            "has a self-draft after another drafter: put it first, and at most one",
        )?;
        require(
            drafters.len() + usize::from(self.lookup.is_some()) > 1,
            key,
            "has a table of one drafter: name another, or `lookup`",
        )
    }
}

/// The description in results and in the report.
impl fmt::Display for MergedRecipe {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.drafters.iter().map(DrafterId::to_string);
        let lookup = self.lookup.map(|lookup| format!("lookup {lookup}"));
        formatter.write_str(&names.chain(lookup).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_key_of_an_invalid_merge() {
        let read = |keys: &str| toml::from_str::<MergedRecipe>(keys).expect("TOML");
        for (keys, problem) in [
            ("drafters = []", "are empty"),
            ("drafters = ['max_gram', 'draft']", "without a model"),
            ("drafters = ['cascade_1', 'draft']", "without a model"),
            ("drafters = ['draft', 'draft']", "twice"),
            ("drafters = ['draft', 'self_draft_1']", "put it first"),
            ("drafters = ['self_draft_2', 'self_draft_1']", "put it first"),
            ("drafters = ['draft']", "of one drafter"),
        ] {
            let message = format!("{:#}", read(keys).check().expect_err("refused"));
            assert!(message.contains("`evaluate.merged`"), "{message}");
            assert!(message.contains(problem), "{message}");
        }
        let all = read("drafters = ['self_draft_1', 'draft', 'small_draft']\nlookup = '2x4'");
        all.check().expect("they go together");
        assert_eq!(all.to_string(), "self_draft_1, draft, small_draft, lookup 2x4");
    }
}
