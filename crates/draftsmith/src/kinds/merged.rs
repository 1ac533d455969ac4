//! The kind `merged` (SpecInfer): drafters whose chains are merged into one tree.

use std::fmt;
use std::sync::Arc;

use anyhow::Result;
use draftsmith_decode::{MergedParts, NamedParts};
use draftsmith_theory::{DrafterId, LookupFirst, MAX_DRAFTERS};
use serde::{Deserialize, Serialize};

use super::loaded::{LoadedDrafter, Loading};
use super::{DrafterKind, DrafterRecipes, Role, check_members, names_text};
use crate::names::Road;
use crate::recipe::require;

/// The settings.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MergedKind {
    /// Drafters that draft step by step. A self-draft must be the first.
    pub(crate) drafters: Vec<DrafterId>,
    /// Prompt lookup that adds a chain; none if absent.
    pub(crate) lookup: Option<LookupFirst>,
}

impl DrafterKind for MergedKind {
    fn text(&self) -> String {
        "merged drafts".to_owned()
    }

    fn road(&self) -> Road {
        Road::Several
    }

    fn check(&self, key: &str, all: &DrafterRecipes) -> Result<()> {
        let (key, drafters) = (format!("{key}.drafters"), &self.drafters);
        const NO_MODEL: &str = "is empty, names more than three drafters, or one that does not draft step by \
                                step; hint: `lookup` adds prompt lookup";
        require((1..MAX_DRAFTERS).contains(&drafters.len()), &key, NO_MODEL)?;
        check_members(&key, drafters, all, |role| role == Role::Steps, NO_MODEL)?;
        let has_exit = |id: &DrafterId| all.get(*id).is_some_and(|it| it.kind.has_exit());
        require(
            !drafters[1..].iter().any(has_exit),
            &key,
            "has a self-draft after another drafter: put it first",
        )?;
        require(
            drafters.len() + usize::from(self.lookup.is_some()) > 1,
            &key,
            "names one drafter: name another, or set `lookup`",
        )
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let members = self.drafters.iter().map(|id| loading.member(*id));
        let members: Vec<LoadedDrafter> = members.collect::<Result<_>>()?;
        let drafters = members.iter().map(|it| it.parts.clone()).collect();
        let parts = Arc::new(MergedParts { drafters, lookup: self.lookup });
        Ok(LoadedDrafter {
            parts: NamedParts { id: loading.id, parts },

            summaries: vec![loading.plain_summary(self.to_string())],
            sizes_of_members: members.iter().flat_map(LoadedDrafter::sizes).collect(),
            ..LoadedDrafter::new(loading.id, None)
        })
    }
}

/// The description in results and in the report.
impl fmt::Display for MergedKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&names_text(&self.drafters))?;
        self.lookup.map_or(Ok(()), |lookup| write!(formatter, ", lookup {lookup}"))
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
