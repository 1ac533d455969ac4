//! Hidden states of a frozen model, stored on disk so that later epochs and runs need not compute them
//! again: the recipe's `features = "cache"`. With `features = "server"`, a server gives them before
//! the training begins, and the target's layers are not needed.
//!
//! Storing hidden states changes nothing but their rounding. A state is rounded to 8 or 16 bits per
//! number (`states/format.rs`) before it is first used, so results depend neither on the epoch nor
//! on the states that are already on the disk. A row that the format cannot represent is never
//! stored, and is used unrounded. Only states that depend on nothing but a row's text are stored.
//! `states/file.rs` documents the file layout.

mod file;
mod format;

use std::path::Path;
use std::sync::Arc;

use draftsmith_files::{check_room, hash_bytes, in_bytes};
use serde::{Deserialize, Serialize};

use self::file::FilePlan;
pub(crate) use self::file::StateFile;
pub use self::format::FeatureFormat;
use crate::error::{Result, Section, TrainError};

/// Whether the frozen model's hidden states are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Features {
    /// The hidden states are computed again in each epoch.
    #[default]
    Recompute,
    /// The hidden states are computed once and stored on disk.
    Cache,
    /// A server that runs the target gives the hidden states, which are stored on disk.
    Server,
}

impl Features {
    /// Checks that no server gives the hidden states, for a network that reads those of layers that
    /// it runs itself.
    pub(crate) fn check_local(self, section: Section) -> Result<()> {
        if self != Self::Server {
            return Ok(());
        }
        let expected = "`recompute` or `cache`; drafters of the kinds `eagle3` and `block` allow `server`, and their heads \
                        then read states that follow from the server's";
        Err(TrainError::setting(section, "features", "`server`", expected))
    }
}

/// A row whose hidden states are wanted.
#[derive(Debug, Clone, Copy)]
pub struct StatesRow<'r> {
    /// The row's id.
    pub id: &'r str,
    /// The row's tokens, without the last one.
    pub ids: &'r [u32],
    /// The first position whose final state is wanted.
    pub first_supervised: usize,
}

impl<'r> StatesRow<'r> {
    /// Asks for the states of layers at `ids`, and for no final states.
    pub fn of_layers(id: &'r str, ids: &'r [u32]) -> Self {
        Self { id, ids, first_supervised: ids.len() }
    }
}

/// The hidden states of a row.
#[derive(Debug, Clone)]
pub struct GivenStates {
    /// For each layer that was asked for, a state of each token.
    pub layers: Vec<Vec<f32>>,
    /// The states after the final norm, from the first supervised position on.
    pub last: Vec<f32>,
}

/// The place where a training keeps the states of a source.
pub enum Keeping {
    /// Files, which later trainings read again.
    Disk,
    /// The memory, until the training ends.
    Memory,
    /// Nowhere. Each batch is requested while the one before it is trained on.
    Nowhere(Arc<dyn StatesStream>),
}

/// Gives the hidden states of a batch at a time, while a training runs.
pub trait StatesStream: Send + Sync {
    /// Returns the hidden states of rows, as [`StatesSource::states`] passes them.
    ///
    /// # Errors
    /// As there.
    fn batch(&self, layers: &[usize], rows: &[StatesRow<'_>]) -> Result<Vec<GivenStates>>;
}

/// Gives the hidden states of a target whose layers are not here.
pub trait StatesSource: Sync {
    /// Returns where a training keeps the states.
    fn keeping(&self) -> Keeping;

    /// Passes the hidden states of rows to `keep`, in order, with each row's index. Each is the
    /// state after the number of layers in `layers`.
    ///
    /// # Errors
    /// If states cannot be had or are not the target's, with a description and a hint, or if `keep`
    /// fails.
    fn states(
        &self,
        layers: &[usize],
        rows: &[StatesRow<'_>],
        keep: &mut dyn FnMut(usize, GivenStates) -> Result<()>,
    ) -> Result<()>;
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
    /// What gives the states; set exactly with [`Features::Server`].
    pub source: Option<&'a dyn StatesSource>,
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

    /// Shows a message to the user.
    pub(crate) fn note(&self, message: &str) {
        (self.place.notify)(message.to_owned());
    }

    /// Returns what gives the states, if it is not the target.
    pub(crate) fn source(&self) -> Option<&'a dyn StatesSource> {
        self.place.source
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
    pub(crate) fn open(self) -> Result<Vec<StateFile>> {
        let all = self.plans.iter().map(|plan| plan.num_bytes).sum();
        if matches!(self.source().map(StatesSource::keeping), Some(Keeping::Memory)) {
            (self.place.notify)(format!("hidden states are kept in memory: {}", in_bytes(all)));
            return self.plans.into_iter().map(FilePlan::open_in_memory).collect();
        }
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

/// Checks that a row's states from a source are stored, since they cannot be computed again.
///
/// # Errors
/// If a file has a problem.
pub(crate) fn check_stored(id: &str, files: &[&StateFile]) -> Result<()> {
    match problems(files).pop() {
        Some(problem) => Err(TrainError::States(format!(
            "the hidden states of `{id}` cannot be stored: {problem}; hint: free disk space, or store them with \
             `features_format = \"bf16\"`, which has room for any number"
        ))),
        None => Ok(()),
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
