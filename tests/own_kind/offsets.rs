//! A kind of drafter that no crate of this workspace knows: one block that reads which token to predict.
//!
//! It reads the target's hidden state h at the last token but one of a round's beginning, and the vector o of an offset,
//! and proposes the token at that offset: h + SiLU((h ∘ o)·W), then an LM head. So a single forward proposes the whole
//! round. Everything here uses public API only.

use std::path::Path;

use anyhow::Result;
use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{Device, FloatDType, Tensor};
use draftsmith_decode::{
    ComputedRows, DraftStep, RoundDraftParts, RoundNetwork, RoundRow, RoundSource,
};
use draftsmith_model::{
    DrafterDir, ModelConfig, ModelError, NamedTensor, StateNetwork, UnrolledInputs, WeightReader,
    read_json, uniform_matrix, vectors, write_network,
};
use draftsmith_recipe::exports::ExportEntry;
use draftsmith_recipe::kinds::loaded::{LoadedDrafter, Loading};
use draftsmith_recipe::kinds::origin::Origin;
use draftsmith_recipe::kinds::self_draft::{AboutDraft, SelfDraftForm, SelfDraftOrigin};
use draftsmith_recipe::kinds::{DrafterFiles, DrafterKind, KindEntry, read_kind};
use draftsmith_theory::{RoundForwards, SeededDraws};
use draftsmith_train::{
    DraftScores, ExportConfig, ExportRecord, FirstWeights, LessonSettings, SelfDraftTraining,
    StateTraining, TrainError,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The kind's entry, which a program adds to its table of kinds.
pub(crate) static OFFSETS: KindEntry = KindEntry {
    name: "offsets",
    read: read_kind::<OffsetsKind>,
    export: Some(ExportEntry {
        key: "path",
        text: "offsets",
        known_by: "num_offsets",
        is_of: |keys| keys.contains_key("num_offsets"),
        command: Some("train-drafter"),
        forms: &[],
        inspect: |dir| Ok(json!(OffsetsConfig::from_dir(dir)?)),
    }),
};

/// How such a drafter is trained, or the directory of a trained one.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct OffsetsKind(pub Origin<SelfDraftTraining<OffsetsShape>>);

/// The settings that only this kind has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct OffsetsShape {
    /// The number of offsets, 1 to 8.
    num_steps: usize,
}

impl Default for OffsetsShape {
    fn default() -> Self {
        Self { num_steps: 5 }
    }
}

impl DrafterKind for OffsetsKind {
    fn entry(&self) -> &'static KindEntry {
        &OFFSETS
    }

    fn origin(&self) -> Option<&dyn SelfDraftOrigin> {
        Some(&self.0)
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let dir = loading.export_dir();
        OFFSETS.need(&dir)?;
        let (config, network) = Offsets::from_dir(&dir, loading.workspace.models.device())?;
        loading.workspace.check_target(("drafter", &dir), config.target_hash.as_deref())?;
        let sizes = [network.num_params(); 2];
        let parts = RoundDraftParts { network, layers: vec![config.layer] };
        Ok(LoadedDrafter::of_self_draft(loading, parts, None, sizes))
    }

    fn round_forwards(&self) -> RoundForwards {
        RoundForwards::Once
    }
}

impl SelfDraftForm for OffsetsShape {
    fn config_in(dir: &DrafterDir, _num_layers: usize) -> Result<OffsetsConfig, ModelError> {
        OffsetsConfig::from_dir(dir)
    }

    fn about(config: &OffsetsConfig) -> AboutDraft {
        let OffsetsConfig { layer, num_offsets, hidden_size, .. } = config;
        let size = format!("{num_offsets} offsets");
        AboutDraft {
            files: DrafterFiles { shape: format!("offsets {layer}"), description: size.clone() },
            target_layers: vec![*layer],
            place: format!("over layer {layer}"),
            size,
            has_head: false,
            num_parameters: (num_offsets + hidden_size) * hidden_size,
            num_draft_tokens: None,
            properties: vec![("num_offsets", json!(num_offsets))],
        }
    }
}

impl StateTraining for OffsetsShape {
    type Network = Offsets;
    type Config = OffsetsConfig;
    type Scores = DraftScores;

    fn steps(&self) -> (usize, f64) {
        (self.num_steps, 1.0)
    }

    fn check(&self, _common: &LessonSettings) -> Result<(), TrainError> {
        match self.num_steps {
            1..=8 => Ok(()),
            num => Err(TrainError::setting("offsets", "num_steps", num, "1 to 8")),
        }
    }

    fn layers(&self, num_layers: usize) -> Vec<usize> {
        vec![num_layers - 1]
    }

    fn config(&self, target: &ModelConfig) -> Result<OffsetsConfig, TrainError> {
        Ok(OffsetsConfig {
            num_offsets: self.num_steps,
            hidden_size: target.shape.hidden_size,
            vocab_size: target.shape.vocab_size,
            layer: target.shape.num_layers - 1,
            target_hash: None,
            training: Map::new(),
        })
    }

    fn network(&self, config: &OffsetsConfig, first: FirstWeights<'_>) -> Offsets {
        let FirstWeights { target, device, mut draws, .. } = first;
        // Begin with the target's LM head.
        let lm_head = Param::from_data(target.lm_head_weight().into_data(), &device);
        Offsets { lm_head, ..Offsets::new(config, &mut draws, &device) }
    }
}

/// The drafter's `config.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OffsetsConfig {
    pub(crate) num_offsets: usize,
    pub(crate) hidden_size: usize,
    pub(crate) vocab_size: usize,
    /// The number of the target's layers before the state that the block reads.
    pub(crate) layer: usize,
    pub(crate) target_hash: Option<String>,
    #[serde(default)]
    pub(crate) training: Map<String, Value>,
}

impl OffsetsConfig {
    fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        read_json(&dir.join("config.json"))
    }
}

impl ExportConfig<Offsets> for OffsetsConfig {
    fn record(&mut self) -> ExportRecord<'_> {
        ExportRecord { training: &mut self.training, target_hash: &mut self.target_hash }
    }

    fn write(&self, model: &Offsets, dir: &Path) -> Result<(), ModelError> {
        let Offsets { block, offsets, lm_head } = model;
        let tensors = [("block", block), ("offsets", offsets), ("lm_head", lm_head)];
        let tensors = tensors.map(|(name, weight)| NamedTensor::from_tensor(name, weight.val()));
        write_network(dir, &tensors, &[], self)
    }
}

/// The network.
#[derive(Module, Debug)]
pub(crate) struct Offsets {
    /// `[hidden, hidden]`
    block: Param<Tensor<2>>,
    /// A vector for each offset: `[offsets, hidden]`
    offsets: Param<Tensor<2>>,
    /// `[hidden, vocab]`
    lm_head: Param<Tensor<2>>,
}

impl Offsets {
    pub(crate) fn new(config: &OffsetsConfig, draws: &mut SeededDraws, device: &Device) -> Self {
        let (width, bound) = (config.hidden_size, (config.hidden_size as f64).powf(-0.5));
        let mut drawn = |shape, bound| uniform_matrix(shape, bound, || draws.uniform(), device);
        Self {
            block: drawn([width; 2], bound),
            offsets: drawn([config.num_offsets, width], 2.0),
            lm_head: drawn([width, config.vocab_size], bound),
        }
    }

    fn from_dir(dir: &Path, device: &Device) -> Result<(OffsetsConfig, Self), ModelError> {
        let config = OffsetsConfig::from_dir(dir)?;
        let (mut reader, width) = (WeightReader::open_dir(dir)?, config.hidden_size);
        let mut read = |name: &str, shape: [usize; 2]| -> Result<_, ModelError> {
            Ok(Param::from_tensor(vectors::tensor(reader.take(name, &shape)?, shape, device)))
        };
        let network = Self {
            block: read("block", [width; 2])?,
            offsets: read("offsets", [config.num_offsets, width])?,
            lm_head: read("lm_head", [width, config.vocab_size])?,
        };
        reader.finish()?;
        Ok((config, network))
    }

    /// Returns the number of offsets.
    fn num_offsets(&self) -> usize {
        self.offsets.dims()[0]
    }

    /// Computes the output for an offset, `[rows, hidden]`, from states of the same shape.
    fn output(&self, nth: usize, states: Tensor<2>) -> Tensor<2> {
        let mean = (states.clone() * states.clone()).mean_dim(1);
        let normed = states / (mean + 1e-6).sqrt();
        let read = normed.clone() * self.offsets.val().narrow(0, nth, 1);
        normed + silu(read.matmul(self.block.val()))
    }
}

impl StateNetwork for Offsets {
    const KIND: &'static str = "offsets";

    fn to_dtype(&self, _dtype: FloatDType) -> Self {
        self.clone()
    }

    fn own_head(&self) -> Option<Tensor<2>> {
        Some(self.lm_head.val())
    }

    fn unrolled(&self, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        let [batch, seq, width] = inputs.states[0].dims();
        let all = inputs.states[0].clone().reshape([batch * seq, width]);
        let output = |step| self.output(step, all.clone().select(0, inputs.begun_rows(step)));
        (0..inputs.num_steps).map(output).collect()
    }
}

impl RoundNetwork for Offsets {
    type Memory = ();
    /// The logits for each offset.
    type Round = Vec<Vec<f32>>;

    fn num_candidates(&self) -> usize {
        self.num_offsets()
    }

    fn memory(&self, capacity: usize, _num_slots: usize) -> ((), usize) {
        ((), capacity)
    }

    fn run(
        &self,
        source: RoundSource<'_>,
        _memory: &mut (),
        steps: &[(&DraftStep<'_>, usize)],
    ) -> Vec<Vec<Vec<f32>>> {
        let RoundSource { target, layers, states } = source;
        let (width, device) = (target.shape().hidden_size, target.device());
        let of_step = |(step, _): &(&DraftStep<'_>, usize)| {
            // No state comes before the first token.
            let state = states.num_standing(step.slot).checked_sub(2).map_or_else(
                || Tensor::zeros([1, width], &device),
                |at| {
                    let state = states.kept_states(step.slot, step.tokens, at, layers).remove(0);
                    state.into_tensor(&device).reshape([1, width])
                },
            );
            let logits = |nth| self.output(nth, state.clone()).matmul(self.lm_head.val());
            (0..self.num_offsets()).map(|nth| vectors::values(logits(nth))).collect()
        };
        steps.iter().map(of_step).collect()
    }

    fn num_rows(round: &Vec<Vec<f32>>) -> usize {
        round.len()
    }

    fn rows(&self, rows: &[RoundRow<'_, Vec<Vec<f32>>>], _predicts: bool) -> ComputedRows {
        let logits =
            rows.iter().flat_map(|row| row.round[row.number.min(row.round.len() - 1)].clone());
        Ok((logits.collect(), None))
    }
}
