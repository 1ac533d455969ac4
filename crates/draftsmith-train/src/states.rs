//! Hidden states of a frozen model that are kept on the disk, so that later epochs and runs do not
//! compute them again: the recipe's `features = "cache"`.
//!
//! States are rounded to a format of 8 or 16 bits a number (`states/format.rs`), and what is trained
//! sees the rounded ones from the first epoch on, whether they were computed or read: so nothing
//! depends on what is there already. A row whose states the format cannot hold is never kept, and
//! trained on as it is. `states/file.rs` is how they lie on the disk.

mod file;
mod format;

use std::path::Path;

use draftsmith_data::hash_bytes;
use draftsmith_files::{check_room, in_bytes};
use serde::{Deserialize, Serialize};

pub(crate) use self::file::StateFile;
use self::file::{Plan, RowPlan};
pub use self::format::FeatureFormat;
use crate::error::TrainError;

/// Where the frozen model's hidden states come from in each epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Features {
    /// They are computed.
    #[default]
    Recompute,
    /// They are computed once, and kept on the disk.
    Cache,
}

/// Where hidden states are kept, and whose they are.
#[derive(Clone)]
pub struct FeatureDir<'a> {
    /// The directory.
    pub dir: &'a Path,
    /// What files' names have of the frozen model: `target`, `draft`, `self_draft_2`.
    pub name: String,
    /// Names the frozen models' weights, and the type that they compute in.
    pub models: String,
    /// Told how much is kept and was read.
    pub tell: &'a (dyn Fn(String) + 'a),
}

/// What states a file has of a row: those of `num_states` tokens, which depend on `ids` alone.
pub(crate) struct StatesOf<'r> {
    pub(crate) id: &'r str,
    pub(crate) num_states: usize,
    pub(crate) ids: Vec<u32>,
}

/// All files of a training.
pub(crate) struct StateFiles<'a> {
    place: FeatureDir<'a>,
    format: FeatureFormat,
    plans: Vec<Plan>,
}

impl<'a> StateFiles<'a> {
    pub(crate) fn new(place: FeatureDir<'a>, format: FeatureFormat) -> Self {
        Self { place, format, plans: Vec::new() }
    }

    /// One more file: `what` of the model's states, each of `width` numbers.
    pub(crate) fn add<'r>(
        &mut self,
        what: &str,
        width: usize,
        rows: impl Iterator<Item = StatesOf<'r>>,
    ) {
        let mut hashes = String::new();
        let rows = rows.map(|StatesOf { id, num_states, ids }| {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            hashes += &hash_bytes(&bytes);
            RowPlan { id: id.to_owned(), num_states }
        });
        let rows: Vec<RowPlan> = rows.collect();
        let path = self.place.dir.join(format!("features-{}{what}.bin", self.place.name));
        let identity = format!(
            "{} {what} {:?} {width} {}",
            self.place.models,
            self.format,
            hash_bytes(hashes.as_bytes())
        );
        self.plans.push(Plan::new(path, &identity, self.format, width, rows));
    }

    /// The bytes of all files, when they are whole.
    fn num_bytes(&self) -> u64 {
        self.plans.iter().map(Plan::num_bytes).sum()
    }

    /// Opens the files, in the order in which they were added, after telling how large they are.
    ///
    /// # Errors
    /// If the disk has no room for them, or one cannot be opened.
    pub(crate) fn open(self) -> Result<Vec<StateFile>, TrainError> {
        let num_bytes = self.num_bytes();
        let missing: u64 = self.plans.iter().map(Plan::num_missing_bytes).sum();
        check_room("hidden states", self.place.dir, missing)?;
        (self.place.tell)(format!(
            "hidden states are kept in `{}`: {} in all, up to {} to be written",
            self.place.dir.join(format!("features-{}*.bin", self.place.name)).display(),
            in_bytes(num_bytes),
            in_bytes(missing)
        ));
        self.plans.into_iter().map(Plan::open).collect()
    }
}

/// What is to be told of files when training ends: nothing where all went well.
pub(crate) fn problems(files: &[&StateFile]) -> Vec<String> {
    let num_unfit: usize = files.iter().map(|file| file.num_unfit()).sum();
    let mut told: Vec<String> = files.iter().filter_map(|file| file.problem()).collect();
    if num_unfit > 0 {
        told.push(format!(
            "{num_unfit} times a row's hidden states did not fit the format, and were not kept"
        ));
    }
    told
}
