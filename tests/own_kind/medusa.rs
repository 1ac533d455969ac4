//! A kind of drafter that no crate of this workspace knows: a small Medusa (Cai et al. 2024).
//!
//! Each head reads the target's hidden state at the last token but one of a round's beginning and proposes one
//! position, so a single forward proposes the whole round. A head is a residual block, h + SiLU(h·W); all share one LM
//! head. Everything here uses public API only.

use std::path::Path;

use anyhow::Result;
use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{Device, FloatDType, Tensor};
use draftsmith_decode::{
    ComputedRows, DraftStep, RoundDraftParts, RoundNetwork, RoundRow, RoundSource,
};
use draftsmith_model::{
    CausalLm, DraftVocabulary, DrafterDir, ModelConfig, ModelError, NamedTensor, StateNetwork,
    UnrolledInputs, WeightDtype, WeightReader, read_json, uniform_matrix, vectors, write_network,
};
use draftsmith_recipe::exports::ExportEntry;
use draftsmith_recipe::kinds::loaded::{LoadedDrafter, Loading};
use draftsmith_recipe::kinds::origin::Origin;
use draftsmith_recipe::kinds::self_draft::{AboutDraft, SelfDraftForm, SelfDraftOrigin};
use draftsmith_recipe::kinds::{DrafterFiles, DrafterKind, KindDirectory, KindEntry, read_kind};
use draftsmith_theory::{RoundForwards, SeededDraws};
use draftsmith_train::{
    DraftScores, ExportConfig, ExportRecord, LessonSettings, SelfDraftTraining, StateTraining,
    TrainError,
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

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let dir = loading.export_dir();
        MEDUSA.need(&dir)?;
        let (config, network) = Medusa::from_dir(&dir, loading.workspace.models.device())?;
        loading.workspace.check_target(("drafter", &dir), config.target_hash.as_deref())?;
        let sizes = [network.num_params(); 2];
        let parts = RoundDraftParts { network, layers: vec![config.layer] };
        Ok(LoadedDrafter::of_self_draft(loading, parts, None, sizes))
    }

    fn round_forwards(&self) -> RoundForwards {
        RoundForwards::Once
    }
}

impl SelfDraftForm for MedusaShape {
    fn config_in(dir: &DrafterDir, _num_layers: usize) -> Result<MedusaConfig, ModelError> {
        MedusaConfig::from_dir(dir)
    }

    fn about(config: &MedusaConfig) -> AboutDraft {
        let MedusaConfig { layer, medusa_num_heads, hidden_size, .. } = config;
        let size = format!("{medusa_num_heads} Medusa heads");
        AboutDraft {
            files: DrafterFiles { shape: format!("medusa {layer}"), description: size.clone() },
            target_layers: vec![*layer],
            place: format!("over layer {layer}"),
            size,
            has_head: false,
            num_parameters: medusa_num_heads * hidden_size * hidden_size,
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
        target: &ModelConfig,
        _dtype: WeightDtype,
        _vocabulary: Option<&DraftVocabulary>,
    ) -> Result<MedusaConfig, TrainError> {
        Ok(MedusaConfig {
            medusa_num_heads: self.num_steps,
            hidden_size: target.shape.hidden_size,
            vocab_size: target.shape.vocab_size,
            layer: target.shape.num_layers - 1,
            target_hash: None,
            training: Map::new(),
        })
    }

    fn network(
        &self,
        config: &MedusaConfig,
        _is_random: bool,
        target: &CausalLm,
        seed: u64,
    ) -> Medusa {
        let device = target.device().autodiff();
        // As the authors do, begin with the target's LM head.
        let lm_head = Param::from_data(target.lm_head_weight().into_data(), &device);
        Medusa { lm_head, ..Medusa::new(config, seed, &device) }
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
    fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        read_json(&dir.join("config.json"))
    }
}

impl ExportConfig<Medusa> for MedusaConfig {
    fn record(&mut self) -> ExportRecord<'_> {
        ExportRecord { training: &mut self.training, target_hash: &mut self.target_hash }
    }

    fn write(&self, model: &Medusa, dir: &Path) -> Result<(), ModelError> {
        let names = (0..).map(|nth: usize| nth.to_string());
        let blocks = names.zip(&model.blocks).chain([("lm_head".to_owned(), &model.lm_head)]);
        let tensors = blocks.map(|(name, weight)| NamedTensor::from_tensor(&name, weight.val()));
        write_network(dir, &tensors.collect::<Vec<_>>(), &[], self)
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
        let (width, bound) = (config.hidden_size, (config.hidden_size as f64).powf(-0.5));
        let mut drawn =
            |columns| uniform_matrix([width, columns], bound, || draws.uniform(), device);
        let blocks = (0..config.medusa_num_heads).map(|_| drawn(width)).collect();
        Self { blocks, lm_head: drawn(config.vocab_size) }
    }

    fn from_dir(dir: &Path, device: &Device) -> Result<(MedusaConfig, Self), ModelError> {
        let config = MedusaConfig::from_dir(dir)?;
        let (mut reader, width) = (WeightReader::open_dir(dir)?, config.hidden_size);
        let mut read = |name: &str, columns: usize| -> Result<_, ModelError> {
            let shape = [width, columns];
            Ok(Param::from_tensor(vectors::tensor(reader.take(name, &shape)?, shape, device)))
        };
        let blocks = (0..config.medusa_num_heads).map(|nth| read(&nth.to_string(), width));
        let blocks = blocks.collect::<Result<_, _>>()?;
        let lm_head = read("lm_head", config.vocab_size)?;
        reader.finish()?;
        Ok((config, Self { blocks, lm_head }))
    }

    /// Computes a head's output, `[rows, hidden]`, from states of the same shape.
    fn head(&self, nth: usize, states: Tensor<2>) -> Tensor<2> {
        let mean = (states.clone() * states.clone()).mean_dim(1);
        let normed = states / (mean + 1e-6).sqrt();
        normed.clone() + silu(normed.matmul(self.blocks[nth].val()))
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

impl RoundNetwork for Medusa {
    type Memory = ();
    /// The logits of each head.
    type Round = Vec<Vec<f32>>;

    fn num_candidates(&self) -> usize {
        self.blocks.len()
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
            let logits = |nth| self.head(nth, state.clone()).matmul(self.lm_head.val());
            (0..self.blocks.len()).map(|nth| vectors::values(logits(nth))).collect()
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
