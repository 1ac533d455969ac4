//! The target's hidden states on disk: the states after each exit layer at all positions, and the
//! final states at the supervised positions. They depend only on the rows. Later epochs and runs
//! read them and run no layer of the target.

use std::sync::{Arc, Mutex, MutexGuard};

use draftsmith_files::in_bytes;
use draftsmith_model::vectors::values;
use draftsmith_model::{CausalLm, Lengths};

use super::Teaching;
use crate::error::{Result, TrainError};
use crate::lessons::rows::{LessonRow, Padded};
use crate::states::{
    GivenStates, Keeping, RowStatesPlan, StateFile, StateFiles, StatesRow, StatesSource,
    StatesStream, check_stored, problems,
};

/// The open files of a training. A stream has none.
pub(crate) struct StoredStates {
    exits: Vec<StateFile>,
    /// The file of the final hidden states. `None` if the response is the teacher.
    last: Option<StateFile>,
    otherwise: Otherwise,
}

/// The origin of states that are not stored.
enum Otherwise {
    /// The target computes them.
    Target,
    /// A source gave all states before, so they are lost.
    Lost,
    /// A source gives them batch by batch.
    Stream(FallibleStream),
}

/// A stream, with its first failure.
struct FallibleStream {
    stream: Arc<dyn StatesStream>,
    failure: Mutex<Option<TrainError>>,
}

/// The hidden states of a row, token by token.
pub(crate) struct RowStates {
    /// The states after each exit layer.
    pub(crate) exits: Vec<Vec<f32>>,
    /// The final states at the supervised positions; empty if the response is the teacher.
    pub(crate) last: Vec<f32>,
}

impl RowStates {
    /// Returns states that are not numbers, for a row whose states cannot be had. Training then stops
    /// with an error that names the row, because the loss is not finite.
    fn lost(row: &LessonRow, num_exits: usize, width: usize) -> Self {
        let states = |num: usize| vec![f32::NAN; num * width];
        let exits = (0..num_exits).map(|_| states(row.input_ids.len()));
        Self { exits: exits.collect(), last: states(row.num_supervised()) }
    }
}

fn wanted(row: &LessonRow) -> StatesRow<'_> {
    let LessonRow { id, input_ids, first_supervised, .. } = row;
    StatesRow { id, ids: input_ids, first_supervised: *first_supervised }
}

impl FallibleStream {
    fn failure(&self) -> MutexGuard<'_, Option<TrainError>> {
        self.failure.lock().expect("nothing panics while it holds the failure")
    }

    /// Requests the states of a batch; `None` after a failure.
    fn batch(&self, exit_layers: &[usize], rows: &[&LessonRow]) -> Option<Vec<RowStates>> {
        if self.failure().is_some() {
            return None;
        }
        let wanted: Vec<StatesRow<'_>> = rows.iter().map(|row| wanted(row)).collect();
        match self.stream.batch(exit_layers, &wanted) {
            Ok(given) => {
                let of_row = |GivenStates { layers, last }| RowStates { exits: layers, last };
                Some(given.into_iter().map(of_row).collect())
            }
            Err(error) => {
                self.failure().get_or_insert(error);
                None
            }
        }
    }
}

impl StoredStates {
    /// Opens the files for the rows of a target with hidden size `width`.
    ///
    /// # Errors
    /// If the disk has too little room, or a file cannot be opened.
    pub(crate) fn open(
        mut files: StateFiles<'_>,
        (exit_layers, teaching): (&[usize], Teaching),
        width: usize,
        rows: &[&LessonRow],
    ) -> Result<Self> {
        let source = files.source();
        if let Some(Keeping::Nowhere(stream)) = source.map(StatesSource::keeping) {
            let num_tokens: usize = rows.iter().map(|row| row.input_ids.len()).sum();
            let num_numbers = num_tokens * (exit_layers.len() + 1) * width;
            files.note(&format!(
                "hidden states are kept nowhere: each epoch requests those of {} rows ({} at 16 bits per number)",
                rows.len(),
                in_bytes(2 * num_numbers as u64)
            ));
            let otherwise = Otherwise::Stream(FallibleStream { stream, failure: Mutex::default() });
            return Ok(Self { exits: Vec::new(), last: None, otherwise });
        }
        let states = |row: &&'_ LessonRow, num_states| {
            let mut ids = row.input_ids.clone();
            ids.push(num_states as u32);
            ids
        };
        for exit_layer in exit_layers {
            let rows = rows.iter().map(|row| {
                let num_states = row.input_ids.len();
                RowStatesPlan { id: &row.id, num_states, ids: states(row, num_states) }
            });
            files.add(&format!("-layer-{exit_layer}"), width, rows);
        }
        let supervised = rows.iter().map(|row| {
            let num_states = row.num_supervised();
            RowStatesPlan { id: &row.id, num_states, ids: states(row, num_states) }
        });
        if teaching == Teaching::Target {
            files.add("-final", width, supervised);
        }
        let mut exits = files.open()?;
        let last = exits.split_off(exit_layers.len()).pop();
        let otherwise = if source.is_some() { Otherwise::Lost } else { Otherwise::Target };
        let stored = Self { exits, last, otherwise };
        if let Some(source) = source {
            stored.fill(source, exit_layers, rows)?;
        }
        Ok(stored)
    }

    /// Returns the failure of the stream that stopped a training, or else the training's own.
    pub(crate) fn cause_of(&self, error: TrainError) -> TrainError {
        let failure = match &self.otherwise {
            Otherwise::Stream(stream) => stream.failure().take(),
            Otherwise::Target | Otherwise::Lost => None,
        };
        failure.unwrap_or(error)
    }

    /// Asks a source for the states of all rows that are not stored yet, and stores them.
    ///
    /// # Errors
    /// If the source fails, or a row cannot be stored.
    fn fill(
        &self,
        source: &dyn StatesSource,
        exit_layers: &[usize],
        rows: &[&LessonRow],
    ) -> Result<()> {
        let missing = rows.iter().filter(|row| self.read(row).is_none()).map(|row| wanted(row));
        let missing: Vec<StatesRow<'_>> = missing.collect();
        source.states(exit_layers, &missing, &mut |nth, GivenStates { layers, last }| {
            let id = missing[nth].id;
            for (file, states) in self.exits.iter().zip(layers) {
                file.store(id, states);
            }
            if let Some(file) = &self.last {
                file.store(id, last);
            }
            check_stored(id, &self.files())
        })
    }

    /// Returns the states of rows: stored ones, and else those of the target or the stream.
    pub(crate) fn states(
        &self,
        target: &CausalLm,
        exit_layers: &[usize],
        rows: &[&LessonRow],
        batch: (Lengths, usize),
    ) -> Vec<RowStates> {
        let mut all: Vec<Option<RowStates>> = rows.iter().map(|row| self.read(row)).collect();
        let found = rows.iter().zip(&all);
        let missing: Vec<&LessonRow> =
            found.filter(|(_, states)| states.is_none()).map(|(row, _)| *row).collect();
        if !missing.is_empty() {
            let made = match &self.otherwise {
                Otherwise::Target => Some(self.compute(target, exit_layers, &missing, batch)),
                Otherwise::Stream(stream) => stream.batch(exit_layers, &missing),
                Otherwise::Lost => None,
            };
            let width = target.shape().hidden_size;
            let lost = |row: &&LessonRow| RowStates::lost(row, exit_layers.len(), width);
            let made = made.unwrap_or_else(|| missing.iter().map(lost).collect());
            let places = all.iter_mut().filter(|states| states.is_none());
            places.zip(made).for_each(|(place, made)| *place = Some(made));
        }
        all.into_iter().flatten().collect()
    }

    fn read(&self, row: &LessonRow) -> Option<RowStates> {
        if matches!(self.otherwise, Otherwise::Stream(_)) {
            return None;
        }
        let exits = self.exits.iter().map(|file| file.read(&row.id)).collect::<Option<_>>()?;
        let last = self.last.as_ref().map_or(Some(Vec::new()), |file| file.read(&row.id))?;
        Some(RowStates { exits, last })
    }

    /// Computes the states of rows with the target, and stores them.
    fn compute(
        &self,
        target: &CausalLm,
        exit_layers: &[usize],
        rows: &[&LessonRow],
        (lengths, batch_size): (Lengths, usize),
    ) -> Vec<RowStates> {
        let Padded { ids, wanted } = Padded::new(rows, lengths, batch_size, &target.device());
        let [_, seq] = ids.dims();
        let exits = target.exit_states_at(ids, exit_layers, &wanted);
        let last = self
            .last
            .as_ref()
            .map(|file| (file, values(target.final_states_from(exit_layers, &exits, &wanted))));
        let width = target.shape().hidden_size;
        let exits: Vec<Vec<f32>> = exits.into_iter().map(values).collect();
        let of_row = |(nth, row): (usize, &&LessonRow)| {
            let states = |all: &[f32], first: usize, num: usize| {
                let first = (nth * seq + first) * width;
                all[first..first + num * width].to_vec()
            };
            let exits = self.exits.iter().zip(&exits);
            let exits =
                exits.map(|(file, all)| file.store(&row.id, states(all, 0, row.input_ids.len())));
            let own = last.as_ref().map(|(file, all)| {
                file.store(&row.id, states(all, row.first_supervised, row.num_supervised()))
            });
            RowStates { exits: exits.collect(), last: own.unwrap_or_default() }
        };
        rows.iter().enumerate().map(of_row).collect()
    }

    /// Lists messages about problems with the files, for the end of the training.
    pub(crate) fn problems(&self) -> Vec<String> {
        problems(&self.files())
    }

    fn files(&self) -> Vec<&StateFile> {
        self.exits.iter().chain(&self.last).collect()
    }
}
