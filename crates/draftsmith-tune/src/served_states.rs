//! Hidden states of a target that servers run (`features = "server"`): requests for rows, the proof
//! that the states are the target's, and what it costs.

mod middle;
mod proof;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use draftsmith_data::ResponseRow;
use draftsmith_files::in_bytes;
use draftsmith_model::{CausalLm, WeightDtype, is_gguf};
use draftsmith_recipe::exports::config_keys::read_key;
use draftsmith_recipe::exports::servers::lacks_states;
use draftsmith_recipe::{Recipe, Watch, Workspace, quoted, served_path};
use draftsmith_report::duration_text;
use draftsmith_served::{
    KeptIn, ServedStates, ServerHints, ServerRecipe, StatesAsk, StatesClient, side_by_side,
};
use draftsmith_train::{GivenStates, Keeping, StatesRow, StatesSource, StatesStream, TrainError};
use serde::Serialize;
use serde_json::json;

use self::proof::Prover;
use crate::server_access::recipe_token;

/// The memory for states of rows that are requested at the same time, in bytes.
const MOST_BYTES: usize = 1 << 30;
/// The most parameters of local layers that the proof runs.
const MOST_PARAMETERS: usize = 4_000_000_000;

/// A target on servers that give its hidden states, with its local ends: embeddings, final norm and
/// LM head.
pub struct StatesServer<'a> {
    parts: Arc<ServerParts>,
    watch: &'a dyn Watch,
}

/// The client, and what the proof reads.
struct ServerParts {
    client: StatesClient,
    server: ServerRecipe,
    /// The numbers of layers before the states that the servers store, in rising order.
    layers: Vec<usize>,
    ends: CausalLm,
    /// The target's first layers, as many as are here and the proof runs; `None` if there are none.
    local: Option<CausalLm>,
    /// The number of times that rows were requested. The local layers run for the first ones only, since
    /// a stream requests each batch again in every epoch.
    num_times: AtomicUsize,
    /// The largest number that can be stored.
    largest: f32,
}

/// What the proof of some rows found.
#[derive(Debug, Default)]
pub(crate) struct Proved {
    num_rows: usize,
    /// The sum of mean errors in nats over the proof's rows, and the number of these rows.
    errors: (f64, usize),
    /// The number of positions of the proof's rows with log-probabilities, and of all their positions.
    positions: (usize, usize),
    num_tokens: usize,
    num_bytes: u64,
    /// The time of the second requests for the proof's rows, and the number of their tokens.
    again: (Duration, usize),
    /// What is known about the middle layers, and what is not.
    middle: String,
    not_proved: &'static str,
    /// The files that the servers left, if there are any.
    left: Option<String>,
}

impl<'a> StatesServer<'a> {
    /// Prepares the client of servers that store the states after `layers`, the last one among them.
    /// `largest` is the largest number that can be stored, and `ends` the target with any number of its
    /// layers.
    ///
    /// # Errors
    /// If the servers have no directories of states, or the token is not set.
    pub fn open(
        (server, layers): (&ServerRecipe, Vec<usize>),
        largest: f32,
        workspace: &Workspace,
        ends: &CausalLm,
        watch: &'a dyn Watch,
    ) -> Result<Self> {
        let secret = recipe_token(server)?;
        let vocab_size = ends.shape().vocab_size;
        let client = StatesClient::new(server, secret, vocab_size, ServerHints::OF_RECIPE)?;
        let local = local_layers(workspace, &layers);
        let (server, ends) = (server.clone(), ends.clone());
        let num_times = AtomicUsize::new(0);
        let parts = ServerParts { client, server, layers, ends, local, num_times, largest };
        Ok(Self { parts: Arc::new(parts), watch })
    }

    /// Prepares the client of a recipe's servers. The local ends compute in `dtype`.
    ///
    /// # Errors
    /// As [`Self::open`] and [`served_layers`], or if the ends cannot be read.
    pub(crate) fn of_recipe(
        recipe: &Recipe,
        workspace: &Workspace,
        dtype: WeightDtype,
        watch: &'a dyn Watch,
    ) -> Result<Self> {
        let ends = workspace.models.target_of_adapters(dtype)?;
        let (served, largest) = (served_layers(recipe, workspace)?, recipe.largest_stored_state());
        Self::open(served, largest, workspace, ends, watch)
    }

    /// Requests all rows, as [`ServerParts::each`] does, until the user stops the job.
    pub(crate) fn each(
        &self,
        wanted: (&[usize], usize),
        rows: &[StatesRow<'_>],
        keep: impl FnMut(usize, GivenStates) -> Result<(), TrainError>,
    ) -> Result<Proved, TrainError> {
        self.parts.each(wanted, rows, || self.watch.is_interrupted(), keep)
    }

    /// Describes what was proved.
    fn summary(&self, proved: &Proved) -> String {
        let (sum, num) = proved.errors;
        let unversioned = match self.parts.client.is_unversioned() {
            false => "",
            true => "\n  the server names no version of vLLM, so it may be older than 0.31",
        };
        let (num_compared, num_all) = proved.positions;
        let unlisted = match num_compared < num_all {
            false => String::new(),
            true => format!(
                "\n  the server lists no `prompt_logprobs` at {} positions: not compared",
                num_all - num_compared
            ),
        };
        let others = match proved.num_rows - num {
            0 => String::new(),
            others => format!("\n  of {others} more rows, only the last position is proved"),
        };
        let left = proved.left.as_ref().map_or_else(String::new, |left| format!("\n  {left}"));
        format!(
            "hidden states: proved at {num_compared} positions of {num} rows, mean error {:.4} nats{others}\n{}{unlisted}\
             {unversioned}{left}",
            sum / num.max(1) as f64,
            proved.middle
        )
    }

    /// Returns the number of values in a state.
    pub(crate) fn width(&self) -> usize {
        self.parts.ends.shape().hidden_size
    }
}

impl ServerParts {
    fn num_proofs(&self) -> usize {
        self.server.states.as_ref().map_or(1, |states| states.proof)
    }

    /// Requests the states of rows at the same time. After a failure, deletes the files that were left.
    fn fetch(&self, asks: &[StatesAsk<'_>]) -> Result<Vec<ServedStates>, TrainError> {
        let new_thread = || Builder::new().name("states".to_owned());
        side_by_side(new_thread, asks, |ask| self.client.fetch(*ask)).map_err(|error| {
            let left = self.client.sweep().map_or_else(String::new, |left| format!("; {left}"));
            TrainError::States(format!("{error}{left}"))
        })
    }

    /// Requests all rows, proves their states and passes those after `layers` to `keep`. `num_proofs`
    /// rows are compared at every position. Stops once `is_interrupted` returns true.
    ///
    /// # Errors
    /// As [`StatesSource::states`].
    fn each(
        &self,
        (layers, num_proofs): (&[usize], usize),
        rows: &[StatesRow<'_>],
        is_interrupted: impl Fn() -> bool,
        mut keep: impl FnMut(usize, GivenStates) -> Result<(), TrainError>,
    ) -> Result<Proved, TrainError> {
        let width = self.ends.shape().hidden_size;
        let longest = rows.iter().map(|row| row.ids.len()).max().unwrap_or(1);
        let row_bytes = longest * self.layers.len() * width * size_of::<f32>();
        let at_once = (MOST_BYTES / (2 * row_bytes).max(1)).clamp(1, self.server.concurrency);
        let every = rows.len().div_ceil(num_proofs.max(1)).max(1);
        let is_first = self.num_times.fetch_add(1, Ordering::Relaxed) < self.num_proofs();
        let local = self.local.as_ref().filter(|_| is_first);
        let mut prover = Prover::new(&self.ends, local, &self.layers, self.largest);
        let mut proved = Proved::default();
        let asks = rows.iter().enumerate().map(|(nth, row)| StatesAsk {
            id: row.id,
            ids: row.ids,
            num_layers: self.layers.len(),
            width,
            is_proof: nth % every == 0,
        });
        let asks: Vec<StatesAsk<'_>> = asks.collect();
        let places = layers.iter().map(|layer| self.layers.binary_search(layer));
        let places: Vec<usize> =
            places.collect::<Result<_, _>>().expect("the servers store the layers of all drafters");
        for (chunk, first) in asks.chunks(at_once).zip((0..).step_by(at_once)) {
            if is_interrupted() {
                return Err(TrainError::Stopped);
            }
            let states = self.fetch(chunk)?;
            let again = chunk.iter().filter(|ask| ask.is_proof);
            let again: Vec<_> = again.map(|ask| StatesAsk { is_proof: false, ..*ask }).collect();
            let begun = Instant::now();
            let mut seconds = self.fetch(&again)?.into_iter();
            proved.again.0 += begun.elapsed();
            for ((ask, mut states), nth) in chunk.iter().zip(states).zip(first..) {
                let refused = |why| {
                    TrainError::States(format!("row `{}`: the served hidden states {why}", ask.id))
                };
                let (error, mut last) = prover.prove(ask, &states).map_err(refused)?;
                proved.num_rows += 1;
                proved.num_tokens += ask.ids.len();
                proved.num_bytes += states.num_bytes;
                if ask.is_proof {
                    let second = seconds.next().expect("each of them was requested again");
                    prover.check_again(ask, &states, &second).map_err(refused)?;
                    proved.errors = (proved.errors.0 + error, proved.errors.1 + 1);
                    let (num_compared, num_all) = proved.positions;
                    proved.positions = (num_compared + states.known.len(), num_all + ask.ids.len());
                    proved.again.1 += ask.ids.len();
                }
                last.drain(..rows[nth].first_supervised * width);
                let own = places.iter().map(|place| std::mem::take(&mut states.layers[*place]));
                keep(nth, GivenStates { layers: own.collect(), last })?;
            }
        }
        (proved.middle, proved.not_proved) = (prover.middle.text(), prover.middle.not_proved());
        proved.left = self.client.sweep();
        Ok(proved)
    }
}

impl StatesStream for ServerParts {
    /// Proves one row of the batch at every position.
    fn batch(
        &self,
        layers: &[usize],
        rows: &[StatesRow<'_>],
    ) -> Result<Vec<GivenStates>, TrainError> {
        let mut batch = Vec::with_capacity(rows.len());
        self.each(
            (layers, 1),
            rows,
            || false,
            |_, states| {
                batch.push(states);
                Ok(())
            },
        )?;
        Ok(batch)
    }
}

impl StatesSource for StatesServer<'_> {
    fn keeping(&self) -> Keeping {
        let states = self.parts.server.states.as_ref();
        match states.map(|states| states.keep).unwrap_or_default() {
            KeptIn::Disk => Keeping::Disk,
            KeptIn::Memory => Keeping::Memory,
            KeptIn::Nowhere => Keeping::Nowhere(self.parts.clone()),
        }
    }

    fn states(
        &self,
        layers: &[usize],
        rows: &[StatesRow<'_>],
        keep: &mut dyn FnMut(usize, GivenStates) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        if rows.is_empty() {
            return Ok(());
        }
        let progress = self.watch.bar("hidden states", "rows", rows.len() as u64);
        let proved = self.each((layers, self.parts.num_proofs()), rows, |nth, states| {
            progress.advance(1.0);
            keep(nth, states)
        });
        let proved = proved.map_err(|error| match (error, self.keeping()) {
            (TrainError::States(why), Keeping::Disk) => {
                TrainError::States(format!("{why}; states that came before are kept"))
            }
            (error, _) => error,
        })?;
        self.watch.line(&self.summary(&proved));
        Ok(())
    }
}

/// Returns a recipe's servers that give hidden states, and the layers that its drafters read, in rising
/// order, with the last one.
///
/// # Errors
/// If there are none.
pub fn served_layers<'a>(
    recipe: &'a Recipe,
    workspace: &Workspace,
) -> Result<(&'a ServerRecipe, Vec<usize>)> {
    let server = recipe.states_server().context(
        "the recipe has no table `[data.server.states]`; hint: set `data.responses = \"server\"` and name the \
         directories of the servers' states in `data.server.states.dirs`",
    )?;
    let layers = recipe.state_layers(workspace.models.target_config()?)?;
    ensure!(
        !layers.is_empty(),
        "no drafter of the recipe reads hidden states; hint: add one of the kind `eagle3` or `block` with \
         `features = \"server\"`"
    );
    Ok((server, layers))
}

/// What a few rows say about a server's hidden states, as in `--json`.
#[derive(Debug, Serialize)]
pub struct StatesOutcome {
    /// The command that starts the server.
    pub command: String,
    /// The reason why the server will not start; `None` if none is known.
    pub problem: Option<String>,
    /// The numbers of layers before the states that the server stores.
    pub layers: Vec<usize>,
    /// The proof, and the size and time of the whole job; `None` without built data.
    pub examined: Option<ExaminedStates>,
}

/// The proof of a few rows, and the size and time of all.
#[derive(Debug, Serialize)]
pub struct ExaminedStates {
    /// The number of rows that were proved at every position.
    pub num_proved: usize,
    /// The mean error of their log-probabilities, in nats.
    pub mean_error: f64,
    /// What the proof cannot see.
    pub not_proved: &'static str,
    /// The number of rows that a training asks for.
    pub num_rows: usize,
    /// The number of their tokens.
    pub num_tokens: usize,
    /// The bytes of their states, as the server writes them.
    pub num_bytes: u64,
    /// The bytes of their states on the disk, at 16 bits per number.
    pub num_stored_bytes: u64,
    /// The hours that they take, at the speed of the proved rows' second requests.
    pub hours: f64,
}

impl ExaminedStates {
    /// Describes the rows in one line.
    pub fn text(&self) -> String {
        format!(
            "All {} rows have {} tokens: their states are {} on the way, one batch at a time, and {} on the disk, and take \
             about {} at the speed of these {} rows. Not proved: {}.",
            self.num_rows,
            self.num_tokens,
            in_bytes(self.num_bytes),
            in_bytes(self.num_stored_bytes),
            duration_text(3600.0 * self.hours),
            self.num_proved,
            self.not_proved
        )
    }
}

/// Loads the target's first layers: those before as many of the states after `layers` as have their layers
/// here, with at most [`MOST_PARAMETERS`].
fn local_layers(workspace: &Workspace, layers: &[usize]) -> Option<CausalLm> {
    let models = &workspace.models;
    let config = models.target_config().ok()?;
    let of_layer = config.num_parameters() / config.shape.num_layers.max(1);
    let fitting = layers.iter().rev().filter(|layer| **layer * of_layer <= MOST_PARAMETERS);
    // The device's memory is needed for the training.
    let load =
        |num| CausalLm::load(models.target_dir(), WeightDtype::F32, Some(num), &Device::flex());
    fitting.map(|num| load(*num)).find_map(Result::ok)
}

/// Says how to start a server for the recipe's drafters.
///
/// # Errors
/// If the recipe has no servers that give states, or no drafter that reads them.
pub fn how_to_serve(recipe: &Recipe, workspace: &Workspace) -> Result<StatesOutcome> {
    let (server, layers) = served_layers(recipe, workspace)?;
    let command = server_command(recipe, server, &layers);
    let target = workspace.models.target_dir();
    let classes: Option<Option<Vec<String>>> = match is_gguf(target) {
        true => None,
        false => read_key(target, "architectures")?,
    };
    let class = classes.flatten().into_iter().flatten().find(|class| lacks_states(class));
    let problem = class.map(|class| {
        format!(
            "vLLM 0.32 stores no hidden states of a `{class}`: its server would not start. hint: add `--model-impl \
             transformers` to the command, or use a newer vLLM, if that has the interface for EAGLE-3 for this class"
        )
    });
    Ok(StatesOutcome { command, problem, layers, examined: None })
}

/// Returns the command that starts a server which gives the states after `layers`.
fn server_command(recipe: &Recipe, server: &ServerRecipe, layers: &[usize]) -> String {
    let states = server.states.as_ref();
    let dir = states.and_then(|states| states.server_dirs.first().or(states.dirs.first()));
    let dir = dir.map_or("/dev/shm/states".into(), |dir| dir.to_string_lossy());
    let drafting = json!({
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": { "hf_config": { "eagle_aux_hidden_state_layer_ids": layers } },
    });
    let transfer = json!({
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": { "shared_storage_path": dir },
    });
    format!(
        "vllm serve {} --no-enable-prefix-caching \\\n  --speculative-config {} \\\n  --kv-transfer-config {}",
        quoted(&served_path(&recipe.models.target, false)),
        quoted(&drafting.to_string()),
        quoted(&transfer.to_string())
    )
}

/// Proves the states of a few rows.
///
/// # Errors
/// As [`how_to_serve`], or if the server gives no states, or other ones than the target's.
pub fn examine(
    recipe: &Recipe,
    workspace: &Workspace,
    rows: &[ResponseRow],
    watch: &dyn Watch,
) -> Result<ExaminedStates> {
    let context = workspace.models.target_shape()?.context;
    let ids = |row: &ResponseRow| {
        let mut ids = [&row.prompt_ids[..], &row.response_ids].concat();
        ids.truncate((ids.len() - 1).min(context));
        ids
    };
    let all: Vec<Vec<u32>> = rows.iter().map(ids).collect();
    let rows: Vec<StatesRow<'_>> =
        rows.iter().zip(&all).map(|(row, ids)| StatesRow::of_layers(&row.id, ids)).collect();
    let target = StatesServer::of_recipe(recipe, workspace, WeightDtype::F32, watch)?;
    let num = target.parts.num_proofs();
    let every = rows.len().div_ceil(num).max(1);
    let some: Vec<StatesRow<'_>> = rows.iter().step_by(every).copied().collect();
    let proved = target.each((&[], num), &some, |_, _| Ok(()))?;
    watch.line(&target.summary(&proved));
    // The first requests make the server compile what it needs for `prompt_logprobs`.
    let (time, num_timed) = proved.again;
    let hours = time.as_secs_f64() / 3600.0 / num_timed.max(1) as f64;
    let num_tokens: usize = all.iter().map(Vec::len).sum();
    let share = num_tokens as f64 / proved.num_tokens.max(1) as f64;
    let (sum, num_proved) = proved.errors;
    Ok(ExaminedStates {
        num_proved,
        mean_error: sum / num_proved.max(1) as f64,
        not_proved: proved.not_proved,
        num_rows: rows.len(),
        num_tokens,
        num_bytes: (proved.num_bytes as f64 * share) as u64,
        num_stored_bytes: (num_tokens * target.parts.layers.len() * 2 * target.width()) as u64,
        hours: hours * num_tokens as f64,
    })
}
