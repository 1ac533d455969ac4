//! Hidden states of a frozen model, stored on disk so that later epochs and runs need not compute them
//! again: the recipe's `features = "cache"`.
//!
//! Storing hidden states changes nothing but their rounding. A state is rounded to 8 or 16 bits per
//! number (`states/format.rs`) before it is first used, so results depend neither on the epoch nor
//! on the states that are already on the disk. A row that the format cannot represent is never
//! stored, and is used unrounded. Only states that depend on nothing but a row's text are stored.
//! `states/file.rs` documents the file layout.

mod file;
mod format;

use std::path::Path;

use draftsmith_files::{check_room, hash_bytes, in_bytes};
use serde::{Deserialize, Serialize};

use self::file::FilePlan;
pub(crate) use self::file::StateFile;
pub use self::format::FeatureFormat;
use crate::error::TrainError;

/// Whether the frozen model's hidden states are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Features {
    /// The hidden states are computed again in each epoch.
    #[default]
    Recompute,
    /// The hidden states are computed once and stored on disk.
    Cache,
}

/// The place where hidden states are stored, and the model that they belong to.
#[derive(Clone)]
pub struct FeatureDir<'a> {
    /// The directory.
    pub dir: &'a Path,
    /// The frozen model's name in file names: `target`, `draft`, `self_draft_2`.
    pub name: String,
    /// An identifier of the frozen models' weights and compute type.
    pub models: String,
    /// A callback for messages about the size of the files and about problems with them.
    pub notify: &'a (dyn Fn(String) + 'a),
}

/// The plan for storing one row: `num_states` hidden states that depend only on `ids`.
pub(crate) struct RowStatesPlan<'r> {
    pub(crate) id: &'r str,
    pub(crate) num_states: usize,
    pub(crate) ids: Vec<u32>,
}

/// The planned files of a training, before they are opened.
pub(crate) struct StateFiles<'a> {
    place: FeatureDir<'a>,
    format: FeatureFormat,
    plans: Vec<FilePlan>,
}

impl<'a> StateFiles<'a> {
    pub(crate) fn new(place: FeatureDir<'a>, format: FeatureFormat) -> Self {
        Self { place, format, plans: Vec::new() }
    }

    /// Plans a file for hidden states of `width` numbers each. `what` is a suffix of the file's
    /// name that says which states they are.
    pub(crate) fn add<'r>(
        &mut self,
        what: &str,
        width: usize,
        rows: impl Iterator<Item = RowStatesPlan<'r>>,
    ) {
        let mut hashes = String::new();
        let rows = rows.map(|RowStatesPlan { id, num_states, ids }| {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            hashes += &hash_bytes(&bytes);
            (id.to_owned(), num_states)
        });
        let rows: Vec<(String, usize)> = rows.collect();
        let path = self.place.dir.join(format!("features-{}{what}.bin", self.place.name));
        let identity = format!(
            "{} {what} {:?} {width} {}",
            self.place.models,
            self.format,
            hash_bytes(hashes.as_bytes())
        );
        self.plans.push(FilePlan::new(path, &identity, self.format, width, rows));
    }

    /// Reports the size of the files, then opens them in the order in which they were added.
    ///
    /// # Errors
    /// If the disk has too little room, or a file cannot be opened.
    pub(crate) fn open(self) -> Result<Vec<StateFile>, TrainError> {
        let all = self.plans.iter().map(|plan| plan.num_bytes).sum();
        let missing = self.plans.iter().map(FilePlan::num_missing_bytes).sum();
        check_room("hidden states", self.place.dir, missing)?;
        (self.place.notify)(format!(
            "hidden states are stored in `{}`: {} in total, up to {} still to be written",
            self.place.dir.join(format!("features-{}*.bin", self.place.name)).display(),
            in_bytes(all),
            in_bytes(missing)
        ));
        self.plans.into_iter().map(FilePlan::open).collect()
    }
}

/// Lists messages about problems with files, for the end of a training.
pub(crate) fn problems(files: &[&StateFile]) -> Vec<String> {
    let num_unfit: usize = files.iter().map(|file| file.num_unfit()).sum();
    let mut problems: Vec<String> = files.iter().filter_map(|file| file.problem()).collect();
    if num_unfit > 0 {
        problems.push(format!(
            "{num_unfit} times a row's hidden states did not fit the format and were not stored"
        ));
    }
    problems
}
