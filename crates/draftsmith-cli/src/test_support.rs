//! Helpers for tests with recipes and workspaces.

use std::any::Any;
use std::sync::{Arc, Mutex};

use draftsmith_recipe::kinds::adapter::AdapterKind;
use draftsmith_recipe::{DrafterRecipe, DrafterRecipes, Origin, Watch};
use draftsmith_theory::DrafterId;
use draftsmith_train::{AdapterTraining, HeadTraining};

/// An extension of recipes to change their drafters.
pub(crate) trait ChangeDrafters {
    /// Returns the drafter with this name, for modification.
    fn of(&mut self, name: &str) -> &mut DrafterRecipe;
    /// Returns the training settings of a drafter's acceptance head, for modification.
    fn head_of(&mut self, name: &str) -> &mut HeadTraining;
    /// Returns the training settings of an adapter, for modification.
    fn adapter_of(&mut self, name: &str) -> &mut AdapterTraining;
    /// Removes all drafters except these.
    fn keep(&mut self, names: &[&str]);
}

impl ChangeDrafters for DrafterRecipes {
    fn of(&mut self, name: &str) -> &mut DrafterRecipe {
        let id = name.parse::<DrafterId>().expect("a name");
        self.get_mut(id).expect("the recipe has the drafter")
    }

    fn head_of(&mut self, name: &str) -> &mut HeadTraining {
        match &mut self.of(name).head {
            Some(Origin::Training(training)) => training,
            _ => panic!("the head of `{name}` is trained"),
        }
    }

    fn adapter_of(&mut self, name: &str) -> &mut AdapterTraining {
        let kind = &mut self.of(name).kind;
        let own = (&**kind as &dyn Any).downcast_ref::<AdapterKind>().expect("an adapter").clone();
        *kind = Arc::new(own);
        let own: &mut dyn Any = Arc::get_mut(kind).expect("nobody else has it");
        match own.downcast_mut() {
            Some(AdapterKind(Origin::Training(training))) => training,
            _ => panic!("`{name}` is not trained"),
        }
    }

    fn keep(&mut self, names: &[&str]) {
        self.retain(|id| names.contains(&id.as_str()));
    }
}

/// A log of the files that a workspace reads or hashes, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reads(Arc<Mutex<Vec<String>>>);

impl Reads {
    /// Returns the log so far, in order.
    pub(crate) fn all(&self) -> Vec<String> {
        self.0.lock().expect("nobody panicked").clone()
    }
}

impl Watch for Reads {
    fn reads(&self, what: &str) {
        self.0.lock().expect("nobody panicked").push(what.to_owned());
    }

    fn share(&self) -> Box<dyn Watch> {
        Box::new(self.clone())
    }
}
