//! What forwards cost: given by the user, or measured here as `tune` measures them.

use anyhow::{Context, Result};
use draftsmith_model::{ModelConfig, ModelShape};
use draftsmith_theory::{DrafterId, Recordings};

use super::Surveyor;
use crate::costs::{Costs, Measurement, measure};
use crate::decoders::Decoders;
use crate::exports::Exports;
use crate::prompts::spread;
use crate::results::{CostSource, DrafterName};
use crate::sweep::lengths_under;

/// Prompts that costs are measured on.
const NUM_PROMPTS: usize = 4;
/// The same where every answer takes as many rounds as it has tokens.
const NUM_PROMPTS_ALONE: usize = 2;

impl Surveyor<'_> {
    /// The costs of the separate draft.
    pub(super) fn draft_costs(
        &self,
        exports: &Exports,
        recordings: &Recordings,
    ) -> Result<(CostSource, Costs)> {
        let given = self.given.map(|given| Costs::given(given, DrafterId::Draft, 1)).transpose()?;
        if let Some(costs) = given.flatten() {
            return Ok((CostSource::Given, costs));
        }
        self.console.note("survey: measuring costs, separate draft");
        let mut decoders = Decoders::new(self.workspace.pair()?, exports, self.max_new_tokens);
        let lengths = |costs: &Costs| lengths_under(recordings, costs);
        let measured = self.measure(&mut decoders, NUM_PROMPTS, &lengths)?;
        Ok((CostSource::Machine, measured.costs))
    }

    /// Seconds of the target's forwards of 1, 2, 3 … rows, as the costs of a draft that is none: one
    /// small random layer, whose candidates nobody accepts.
    pub(super) fn target_costs(&self) -> Result<(CostSource, Costs)> {
        let given = self.given.and_then(|given| Costs::given_target(given).transpose());
        if let Some(costs) = given.transpose()? {
            return Ok((CostSource::Given, costs));
        }
        self.console.note("survey: measuring costs, target alone");
        let pair = self.workspace.pair()?;
        let shape = ModelShape {
            hidden_size: 16,
            num_layers: 1,
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: 16,
            ..pair.target.shape().clone()
        };
        let nobody = ModelConfig::llama(shape, 16).with_tied_embeddings(true);
        let pair = pair.with_draft(nobody.init(self.workspace.device()));
        let exports = Exports::default();
        let mut decoders = Decoders::new(&pair, &exports, self.max_new_tokens);
        let measured = self.measure(&mut decoders, NUM_PROMPTS_ALONE, &|_| Ok(Vec::new()))?;
        Ok((CostSource::Machine, measured.costs))
    }

    fn measure(
        &self,
        decoders: &mut Decoders<'_>,
        num_prompts: usize,
        lengths: &dyn Fn(&Costs) -> Result<Vec<usize>>,
    ) -> Result<Measurement> {
        let prompts = self.answers.iter().map(|answer| answer.prompt_ids.clone()).collect();
        let prompts: Vec<Vec<u32>> = spread(prompts, Some(num_prompts));
        let drafter = DrafterName::Of(DrafterId::Draft);
        measure(decoders, drafter, &self.decoding, &prompts, lengths, self.console)
            .context("cannot measure what forwards cost here; hint: give `--costs`")
    }
}
