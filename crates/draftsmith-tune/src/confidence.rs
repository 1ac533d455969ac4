//! Confidence heads for block drafters: what `attach-head` trains, writes and advises.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use draftsmith_files::{hash_bytes, write_whole};
use draftsmith_model::{BlockDrafterConfig, BlockForm};
use draftsmith_recipe::built_data::built_data;
use draftsmith_recipe::kinds::self_draft::read_network;
use draftsmith_recipe::{Interrupted, OutDir, Recipe, Watch, Workspace, check_known};
use draftsmith_theory::{DrafterId, Estimate, RoundForwards};
use draftsmith_train::{
    ConfidenceTraining, FrozenBlock, JudgedPlace, TrainedConfidence, train_confidence,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::over_online::mean_losses;

/// The file with the temperatures of each place, in the form that SGLang reads.
pub const TEMPERATURES: &str = "temperatures.json";

/// The file with the result, and the hash of what it was made from.
const FINISHED: &str = "confidence.json";

/// What the user chooses.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ConfidenceOptions {
    /// The weight of rejections in the loss.
    pub rejection_weight: f64,
    /// Whether the drafter's Markov head stays as it is, so that the head has no number for the
    /// token before a candidate.
    pub keeps_markov_head: bool,
}

/// The result, as in `--json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct ConfidenceOutcome {
    /// The directory of the drafter with its new head.
    pub dir: PathBuf,
    /// The number of places that trained the head.
    pub num_places: usize,
    /// The number of held-out responses, and of places in them.
    pub num_held_out: [usize; 2],
    /// The log-losses on held-out places, in nats: the head's, that of the largest probability with
    /// an intercept for each place, and that of the place.
    pub log_losses: [f64; 3],
    /// How much smaller the head's log-loss is than that of the largest probability. The interval
    /// is over responses.
    pub gain: Estimate,
    /// The expected calibration error, averaged over places, before and after each place's logits
    /// are divided by its temperature.
    pub calibration_errors: [f64; 2],
    /// What to do on each server.
    pub advice: Vec<String>,
}

impl ConfidenceOutcome {
    /// Describes the head and the advice, one line each.
    pub fn lines(&self) -> Vec<String> {
        let [head, largest, place] = self.log_losses;
        let [num_responses, num_held_out] = self.num_held_out;
        let mut lines = vec![
            format!(
                "{}: a confidence head from {} places, judged on {num_held_out} of {num_responses} other responses",
                self.dir.display(),
                self.num_places
            ),
            format!(
                "Log-loss: {head:.3} nats per candidate against {largest:.3} by its largest probability (better by {:.3}, \
                 95 %: {:.3} to {:.3}) and {place:.3} by its place",
                self.gain.value, self.gain.low, self.gain.high
            ),
            format!(
                "Calibration error by place: {:.3}, and {:.3} with SGLang's temperatures",
                self.calibration_errors[0], self.calibration_errors[1]
            ),
        ];
        lines.extend(self.advice.iter().cloned());
        lines
    }
}

/// Trains a confidence head for a block drafter of the recipe on its built data, and writes the
/// drafter with this head to `out`.
///
/// # Errors
/// If the recipe has no such block drafter, data or files are missing or invalid, `out` exists, or
/// the training is interrupted.
pub fn train_confidence_head(
    (recipe, asked): (&Recipe, Option<DrafterId>),
    workspace: &Workspace,
    out: &Path,
    options: ConfidenceOptions,
    watch: &dyn Watch,
) -> Result<ConfidenceOutcome> {
    let id = block_drafter(recipe, asked)?;
    let decoding = recipe.data.as_ref().context("the recipe has no section `[data]`")?.decoding();
    ensure!(
        !decoding.is_penalised(),
        "`data.repetition_penalty` is not 1, which a confidence head cannot learn; hint: leave it out"
    );
    if !(options.rejection_weight > 0.0 && options.rejection_weight.is_finite()) {
        bail!("`--rejection-weight` is {}, expected a positive number", options.rejection_weight);
    }
    let models = &workspace.models;
    let data = built_data(recipe, workspace, models.target_shape()?.vocab_size)?;
    let loading = recipe.loading(id, workspace);
    let drafter_hash = recipe.drafters.get(id).map(|it| it.kind.weights_hash(&loading));
    let made_from = hash_bytes(
        json!([drafter_hash.transpose()?, data.hash, options, decoding]).to_string().as_bytes(),
    );
    if let Some(found) = finished(out, &made_from) {
        watch.note(format!("attach-head: `{}` is there, kept", out.display()));
        return Ok(found);
    }
    let dir = OutDir::begin(out)?;
    let (config, drafter) = read_network::<BlockForm>(&loading)
        .with_context(|| format!("cannot read the drafter `{id}`"))?;
    watch.note(format!("attach-head: the rounds of `{id}` along {} responses", data.rows.len()));
    let frozen = FrozenBlock {
        target: models.target_in(models.dtype)?,
        drafter: &drafter,
        layers: &config.target_layers,
    };
    let training = ConfidenceTraining {
        choice: decoding.choice,
        rejection_weight: options.rejection_weight,
        reads_token: !options.keeps_markov_head,
    };
    let trained = train_confidence(frozen, &data.rows, training, || watch.is_interrupted())?;
    let trained = trained.ok_or(Interrupted)?;
    let (drafter, with_head) = drafter.with_confidence(&config, &trained.weights);
    let (drafter, mut with_head) = drafter.as_dspark(&with_head);
    let mut outcome = judged(&trained, out, recipe.seed);
    with_head.training.insert(
        "confidence_head".to_owned(),
        json!({
            "data": data.hash,
            "rejection_weight": options.rejection_weight,
            "num_places": outcome.num_places,
            "log_losses": outcome.log_losses,
        }),
    );
    drafter.write_dir(dir.path(), &with_head)?;
    let temperatures = temperatures(&trained, recipe.data_dir(), &outcome);
    write_whole(&dir.path().join(TEMPERATURES), format!("{temperatures:#}\n"))?;
    // Commands find the models of a drafter by the recipe beside it.
    recipe.write_of(id, dir.path())?;
    dir.finish()?;
    outcome.advice = advice(&outcome, &config, out);
    write_whole(&out.join(FINISHED), json!([made_from, outcome]).to_string())?;
    Ok(outcome)
}

/// Returns the drafter `asked`, or the recipe's first block drafter.
fn block_drafter(recipe: &Recipe, asked: Option<DrafterId>) -> Result<DrafterId> {
    let blocks = recipe
        .drafters
        .iter()
        .filter(|(_, drafter)| drafter.kind.round_forwards() == RoundForwards::Once);
    let blocks: Vec<DrafterId> = blocks.map(|(id, _)| id).collect();
    match (asked, blocks.first()) {
        (Some(asked), _) => check_known(&blocks, asked, "block drafter").map(|()| asked),
        (None, Some(first)) => Ok(*first),
        (None, None) => bail!(
            "the recipe has no block drafter; hint: add a table `[drafters.NAME]` with `kind = \"block\"` and the \
             `path` of a DFlash or DSpark drafter, or train one with `draftsmith train-drafter`"
        ),
    }
}

/// Reads the result of a finished training in `out` that was made from the same; `None` for anything
/// else.
fn finished(out: &Path, made_from: &str) -> Option<ConfidenceOutcome> {
    let text = std::fs::read(out.join(FINISHED)).ok()?;
    let (then, outcome) = serde_json::from_slice::<(String, ConfidenceOutcome)>(&text).ok()?;
    (then == made_from).then_some(outcome)
}

/// Compares the head with its rivals on the held-out places.
fn judged(trained: &TrainedConfidence, out: &Path, seed: u64) -> ConfidenceOutcome {
    let sums = |places: &Vec<JudgedPlace>| {
        let sum =
            |of: &dyn Fn(&JudgedPlace) -> f64| places.iter().map(|it| it.weight * of(it)).sum();
        ([0, 1, 2].map(|which| sum(&|it| it.log_loss(which))), sum(&|_| 1.0))
    };
    let sums: Vec<([f64; 3], f64)> = trained.held_out.iter().map(sums).collect();
    let (log_losses, gain) = mean_losses(&sums, seed);
    ConfidenceOutcome {
        dir: out.to_path_buf(),
        num_places: trained.num_places,
        num_held_out: [sums.len(), trained.held_out.iter().map(Vec::len).sum()],
        log_losses,
        gain,
        calibration_errors: trained.calibration_errors,
        advice: Vec::new(),
    }
}

/// Returns the temperatures as SGLang's `--speculative-dspark-confidence-sts-path` reads them.
fn temperatures(trained: &TrainedConfidence, data: PathBuf, outcome: &ConfidenceOutcome) -> Value {
    let [before, after] = outcome.calibration_errors;
    json!({
        "temperatures": trained.temperatures,
        "dataset": data.display().to_string(),
        "num_samples": outcome.num_places,
        "ece_before": before,
        "ece_after": after,
    })
}

/// Says what to do on each server that can cut by a confidence head.
fn advice(outcome: &ConfidenceOutcome, config: &BlockDrafterConfig, out: &Path) -> Vec<String> {
    let is_dflash = config.markov_rank == 0 && !config.is_anchor_first;
    let (pays, loses) = (outcome.gain.low > 0.0, outcome.gain.high < 0.0);
    let out = out.display();
    let llama = match (is_dflash, loses) {
        (true, true) => {
            "llama.cpp cuts a plain DFlash by its largest probability, which predicts better: serve the drafter as \
             it was, with `--spec-type draft-dflash` and `--spec-draft-p-min P`."
                .to_owned()
        }
        _ => format!(
            "llama.cpp: serve `{out}` with `--spec-type draft-dspark` and `--spec-draft-p-min P`; it cuts a DSpark \
             only by its head. `draftsmith tune --for llama.cpp` chooses P by its costs."
        ),
    };
    let vllm = match pays {
        true => format!(
            "vLLM: serve `{out}` with `\"method\": \"dspark\"` and `\"enable_adaptive_verification\": true`."
        ),
        false => {
            "vLLM: without a head, its online estimator reads the largest probability, which predicts as well or \
             better: serve the drafter without this head, with `\"enable_adaptive_verification\": true`."
                .to_owned()
        }
    };
    let sglang = format!(
        "SGLang: serve `{out}` with `SGLANG_RAGGED_VERIFY_MODE=compact` and \
         `--speculative-dspark-confidence-sts-path {out}/{TEMPERATURES}` at K = {}; without that mode, it never \
         builds the head.",
        config.num_candidates()
    );
    vec![llama, vllm, sglang]
}
