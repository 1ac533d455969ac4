//! A kind of drafter that no crate of this workspace knows: a small Medusa (Cai et al. 2024).
//!
//! Each head reads the target's hidden state at the last token but one of a round's beginning and proposes one
//! position, so a single forward proposes the whole round. A head is a residual block, h + SiLU(h·W); all share one LM
//! head. Everything here uses public API only.

use std::path::Path;

use anyhow::Result;
use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use draftsmith_decode::{
    DecodeError, DraftRound, DraftRow, DraftStep, Drafter, DrafterParts, ModelDrafter,
    ModelSession, Sizes, StepDrafter, TargetLayers, propose_chain,
};
use draftsmith_files::{parse_json, read_file, write_whole};
use draftsmith_model::{
    CausalLm, DraftVocabulary, DrafterDir, ModelError, NamedTensor, StateNetwork, UnrolledInputs,
    WeightDtype, WeightReader, check_trained_with, write_safetensors,
};
use draftsmith_recipe::exports::ExportEntry;
use draftsmith_recipe::kinds::loaded::{LoadedDrafter, Loading};
use draftsmith_recipe::kinds::origin::Origin;
use draftsmith_recipe::kinds::self_draft::{AboutDraft, SelfDraftForm, SelfDraftOrigin};
use draftsmith_recipe::kinds::{DrafterFiles, DrafterKind, KindDirectory, KindEntry, read_kind};
use draftsmith_theory::{DrafterId, RoundForwards, SeededDraws};
use draftsmith_train::{
    DraftScores, ExportConfig, ExportRecord, InitialWeights, LessonSettings, SelfDraftTraining,
    StateTraining, TrainError,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The kind's entry, which a program adds to its table of kinds.
pub(crate) static MEDUSA: KindEntry = KindEntry {
    name: "medusa",
    read: read_kind::<MedusaKind>,
    directory: Some(KindDirectory {
        key: "path",
        export: ExportEntry {
            text: "Medusa heads",
            known_by: "medusa_num_heads",
            is_of: |keys| keys.contains_key("medusa_num_heads"),
            command: Some("train-drafter"),
            forms: &[],
            inspect: |dir| Ok(json!(MedusaConfig::from_dir(dir)?)),
        },
    }),
};

/// How heads are trained, or the directory of trained ones.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct MedusaKind(pub Origin<SelfDraftTraining<MedusaShape>>);

/// The settings that only Medusa has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct MedusaShape {
    /// The number of heads, 1 to 8.
    num_steps: usize,
}

impl Default for MedusaShape {
    fn default() -> Self {
        Self { num_steps: 5 }
    }
}

impl DrafterKind for MedusaKind {
    fn entry(&self) -> &'static KindEntry {
        &MEDUSA
    }

    fn origin(&self) -> Option<&dyn SelfDraftOrigin> {
        Some(&self.0)
    }

    fn text(&self) -> String {
        "Medusa".to_owned()
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let (dir, models) = (loading.export_dir(), &loading.workspace.models);
        MEDUSA.need(&dir)?;
        let (config, model) = Medusa::from_dir(&dir, models.device())?;
        let now = || models.target_hash().map(str::to_owned);
        check_trained_with(("heads", &dir), "target", config.target_hash.as_deref(), now)?;
        let size = model.num_params() as f64;
        let parts = MedusaParts { model, layer: config.layer };
        Ok(LoadedDrafter::of_self_draft(loading, parts, None, size))
    }

    fn round_forwards(&self) -> RoundForwards {
        RoundForwards::Once
    }

    fn max_candidate_length(&self) -> usize {
        5
    }
}

impl SelfDraftForm for MedusaShape {
    fn config_in(dir: &DrafterDir, _num_layers: usize) -> Result<MedusaConfig, ModelError> {
        MedusaConfig::from_dir(dir)
    }

    fn about(config: &MedusaConfig) -> AboutDraft {
        let MedusaConfig { layer, medusa_num_heads, .. } = config;
        let size = format!("{medusa_num_heads} Medusa heads");
        AboutDraft {
            files: DrafterFiles { shape: format!("medusa {layer}"), description: size.clone() },
            target_layers: vec![*layer],
            place: format!("over layer {layer}"),
            size,
            num_draft_tokens: None,
            properties: vec![("num_heads", json!(medusa_num_heads))],
        }
    }
}

impl StateTraining for MedusaShape {
    type Network = Medusa;
    type Config = MedusaConfig;
    type Scores = DraftScores;

    fn num_steps(&self) -> usize {
        self.num_steps
    }

    fn step_weight(&self) -> f64 {
        0.8
    }

    fn check(&self, _common: &LessonSettings) -> Result<(), TrainError> {
        match self.num_steps {
            1..=8 => Ok(()),
            num => Err(TrainError::setting("medusa", "num_steps", num, "1 to 8")),
        }
    }

    fn layers(&self, num_layers: usize) -> Vec<usize> {
        vec![num_layers - 1]
    }

    fn config(
        &self,
        target: &CausalLm,
        _vocabulary: Option<&DraftVocabulary>,
    ) -> Result<MedusaConfig, TrainError> {
        Ok(MedusaConfig {
            medusa_num_heads: self.num_steps,
            hidden_size: target.shape().hidden_size,
            vocab_size: target.shape().vocab_size,
            layer: target.shape().num_layers - 1,
            target_hash: None,
            training: Map::new(),
        })
    }

    fn network(
        &self,
        config: &MedusaConfig,
        _initial: InitialWeights,
        target: &CausalLm,
        seed: u64,
    ) -> Medusa {
        let device = target.device().autodiff();
        let heads = Medusa::new(config, seed, &device);
        // As the authors do, begin with the target's LM head.
        let lm_head = Tensor::from_data(target.lm_head_weight().into_data(), &device);
        Medusa { lm_head: Param::from_tensor(lm_head), ..heads }
    }
}

/// The heads' `config.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MedusaConfig {
    pub(crate) medusa_num_heads: usize,
    pub(crate) hidden_size: usize,
    pub(crate) vocab_size: usize,
    /// The number of the target's layers before the state that the heads read.
    pub(crate) layer: usize,
    pub(crate) target_hash: Option<String>,
    #[serde(default)]
    pub(crate) training: Map<String, Value>,
}

impl MedusaConfig {
    pub(crate) fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        Ok(parse_json(&path, &read_file(&path)?)?)
    }
}

impl ExportConfig<Medusa> for MedusaConfig {
    fn record(&mut self) -> ExportRecord<'_> {
        ExportRecord { training: &mut self.training, target_hash: &mut self.target_hash }
    }

    fn write(&self, model: &Medusa, dir: &Path) -> Result<(), ModelError> {
        let blocks = model.blocks.iter().enumerate();
        let blocks =
            blocks.map(|(nth, weight)| NamedTensor::from_tensor(&format!("{nth}"), weight.val()));
        let lm_head = NamedTensor::from_tensor("lm_head", model.lm_head.val());
        let tensors: Vec<NamedTensor> = blocks.chain([lm_head]).collect();
        write_safetensors(&dir.join("model.safetensors"), &tensors, WeightDtype::F32, &[])?;
        let text = serde_json::to_string_pretty(self).expect("a config is JSON");
        Ok(write_whole(&dir.join("config.json"), text)?)
    }
}

/// The network.
#[derive(Module, Debug)]
pub(crate) struct Medusa {
    /// `[hidden, hidden]` for each head.
    blocks: Vec<Param<Tensor<2>>>,
    /// `[hidden, vocab]`
    lm_head: Param<Tensor<2>>,
}

impl Medusa {
    pub(crate) fn new(config: &MedusaConfig, seed: u64, device: &Device) -> Self {
        let mut draws = SeededDraws::new(seed, &["medusa"]);
        let width = config.hidden_size;
        let mut drawn = |columns: usize| {
            let scale = (width as f64).powf(-0.5);
            let values =
                (0..width * columns).map(|_| ((2.0 * draws.uniform() - 1.0) * scale) as f32);
            let data = TensorData::new(values.collect::<Vec<_>>(), [width, columns]);
            Param::from_tensor(Tensor::from_data(data, device))
        };
        let blocks = (0..config.medusa_num_heads).map(|_| drawn(width)).collect();
        Self { blocks, lm_head: drawn(config.vocab_size) }
    }

    pub(crate) fn from_dir(dir: &Path, device: &Device) -> Result<(MedusaConfig, Self)> {
        let config = MedusaConfig::from_dir(dir)?;
        let mut reader = WeightReader::open_dir(dir)?;
        let mut read = |name: &str, columns: usize| -> Result<Param<Tensor<2>>> {
            let shape = [config.hidden_size, columns];
            let data = TensorData::new(reader.take(name, &shape)?, shape);
            Ok(Param::from_tensor(Tensor::from_data(data, device)))
        };
        let blocks =
            (0..config.medusa_num_heads).map(|nth| read(&nth.to_string(), config.hidden_size));
        let blocks = blocks.collect::<Result<_>>()?;
        let lm_head = read("lm_head", config.vocab_size)?;
        reader.finish()?;
        Ok((config, Self { blocks, lm_head }))
    }

    /// Computes a head's output, `[rows, hidden]`, from states of the same shape.
    fn head(&self, nth: usize, states: Tensor<2>) -> Tensor<2> {
        let mean = (states.clone() * states.clone()).mean_dim(1);
        let normed = states / (mean + 1e-6).sqrt();
        let block = self.blocks[nth.min(self.blocks.len() - 1)].val();
        normed.clone() + silu(normed.matmul(block))
    }

    /// Computes the logits of every head from one state, `[1, hidden]`.
    fn logits(&self, state: &Tensor<2>) -> Result<Vec<Vec<f32>>, DecodeError> {
        let of_head = |nth| {
            let logits = self.head(nth, state.clone()).matmul(self.lm_head.val());
            logits.into_data().iter::<f32>().collect()
        };
        Ok((0..self.blocks.len()).map(of_head).collect())
    }
}

impl StateNetwork for Medusa {
    const KIND: &'static str = "medusa";

    fn to_dtype(&self, _dtype: FloatDType) -> Self {
        self.clone()
    }

    fn own_head(&self) -> Option<Tensor<2>> {
        Some(self.lm_head.val())
    }

    fn unrolled(&self, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        let [batch, seq, width] = inputs.states[0].dims();
        let all = inputs.states[0].clone().reshape([batch * seq, width]);
        let output = |step| self.head(step, all.clone().select(0, inputs.begun_rows(step)));
        (0..inputs.num_steps).map(output).collect()
    }
}

/// The parts of the drafter.
#[derive(Debug)]
pub(crate) struct MedusaParts {
    pub(crate) model: Medusa,
    pub(crate) layer: usize,
}

impl DrafterParts for MedusaParts {
    fn target_layers(&self) -> TargetLayers {
        TargetLayers { exit: None, kept: vec![self.layer] }
    }

    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let rounds = (0..sizes.num_slots).map(|_| None).collect();
        let context = sizes.target.shape().context;
        Box::new(MedusaDraft { id, parts: self, rounds, context })
    }
}

/// What one forward computed for a round: the number of its standing tokens, and each head's logits.
type BlockOfRound = Option<(usize, Vec<Vec<f32>>)>;

/// The drafter beside its target's session.
struct MedusaDraft<'m> {
    id: DrafterId,
    parts: &'m MedusaParts,
    rounds: Vec<BlockOfRound>,
    context: usize,
}

impl<'m> Drafter<ModelSession<'m>> for MedusaDraft<'m> {
    fn begin(
        &mut self,
        _target: &mut ModelSession<'m>,
        slot: usize,
        _prompt: &[u32],
    ) -> Result<(), DecodeError> {
        self.rounds[slot] = None;
        Ok(())
    }

    fn propose(
        &mut self,
        target: &mut ModelSession<'m>,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        propose_chain(self, target, rounds)
    }

    fn commit(&mut self, slot: usize, _num_standing: usize, _path: &[usize]) {
        self.rounds[slot] = None;
    }

    fn context(&self) -> usize {
        self.context
    }
}

impl<'m> StepDrafter<ModelSession<'m>> for MedusaDraft<'m> {
    fn id(&self) -> DrafterId {
        self.id
    }

    fn drafts_by_round(&self) -> bool {
        true
    }

    fn draft(
        &mut self,
        target: &mut ModelSession<'m>,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>, DecodeError> {
        let mut all = Vec::new();
        for step in steps {
            let num_standing = target.num_standing(step.slot);
            let known = &self.rounds[step.slot];
            let is_new = known.as_ref().is_none_or(|(standing, _)| *standing != num_standing);
            if is_new {
                let width = target.model().shape().hidden_size;
                let device = target.model().device();
                let state = match num_standing.checked_sub(2) {
                    Some(at) => {
                        let layers = [self.parts.layer];
                        let state =
                            target.kept_states(step.slot, step.tokens, at, &layers).remove(0);
                        state.into_tensor(&device).reshape([1, width])
                    }
                    // No state comes before the first token.
                    None => Tensor::zeros([1, width], &device),
                };
                let logits = self.parts.model.logits(&state)?;
                self.rounds[step.slot] = Some((num_standing, logits));
            }
            let (_, logits) = self.rounds[step.slot].as_ref().expect("it was computed");
            for row in 0..step.num_rows {
                let depth = step.text_before(row).len().saturating_sub(num_standing);
                let head = &logits[depth.min(logits.len() - 1)];
                let drafted = DraftRow::new((step, row), head.clone(), None);
                all.push(if is_new { drafted } else { drafted.without_forward() });
            }
        }
        Ok(all)
    }
}
