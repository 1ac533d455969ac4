//! The kind `merged` (SpecInfer): several drafters whose candidate chains are merged into one tree.

use anyhow::Result;
use draftsmith_decode::MergedParts;
use draftsmith_theory::{DrafterId, LookupFirst, MAX_DRAFTERS, Road};
use serde::{Deserialize, Serialize};

use super::loaded::{LoadedDrafter, Loading};
use super::{DrafterKind, DrafterRecipes, KindEntry, Role, check_members, names_text, read_kind};
use crate::recipe::keys::require;

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry =
    KindEntry { name: "merged", read: read_kind::<MergedKind>, export: None };

/// The settings of the merged drafters.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergedKind {
    /// The merged drafters, which must draft step by step. A self-draft must come first.
    pub drafters: Vec<DrafterId>,
    /// Prompt lookup, whose candidates form another chain; no lookup if absent.
    pub lookup: Option<LookupFirst>,
}

impl DrafterKind for MergedKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

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

    fn has_signals(&self) -> bool {
        true
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let members = loading.members(&self.drafters)?;
        let drafters = members.iter().map(|it| it.parts.clone()).collect();
        let searches = self.lookup.is_some_and(|lookup| lookup.answers);
        let answers = searches.then(|| loading.workspace.need_answers()).transpose()?;
        let parts = MergedParts { drafters, lookup: self.lookup, answers };
        Ok(LoadedDrafter::of_members(loading.id, parts, members))
    }

    fn members_text(&self) -> Option<String> {
        let lookup = self.lookup.map(|lookup| format!(", lookup {lookup}"));
        Some(names_text(&self.drafters) + &lookup.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{message, recipes};

    #[test]
    fn messages_name_the_key_of_an_invalid_merge() {
        for (keys, problem) in [
            ("drafters = []", "is empty"),
            ("drafters = ['lookup', 'draft']", "draft step by step"),
            ("drafters = ['mix', 'draft']", "draft step by step"),
            ("drafters = ['draft', 'nobody']", "`[drafters.nobody]`"),
            ("drafters = ['draft', 'draft']", "twice"),
            ("drafters = ['draft', 'exit1']", "put it first"),
            ("drafters = ['exit2', 'exit1']", "two self-drafts"),
            ("drafters = ['draft']", "names one drafter"),
        ] {
            let message = message("merged", keys);
            assert!(message.contains("`drafters.it.drafters`"), "{message}");
            assert!(message.contains(problem), "{message}");
        }
        let all = "drafters = ['exit1', 'draft', 'small']\nlookup = '2x4'";
        recipes("merged", all).check().expect("they go together");
    }
}
