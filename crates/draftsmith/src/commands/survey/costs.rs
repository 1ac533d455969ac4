//! Costs of forwards: given by the user, or measured as in `tune`.

use anyhow::{Context, Result};
use draftsmith_model::{ModelConfig, ModelShape};
use draftsmith_theory::{DrafterId, Recordings};

use super::Surveyor;
use crate::costs::{CostProbe, Costs};
use crate::decoders::Decoders;
use crate::exports::Exports;
use crate::prompts::spread;
use crate::results::CostSource;
use crate::sweep::lengths_under;

/// Prompts that costs are measured on.
const NUM_PROMPTS: usize = 4;
/// The same if no candidate is ever accepted, so that each answer takes as many rounds as it has tokens.
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
        Ok((CostSource::Machine, self.measure(&mut decoders, NUM_PROMPTS, &lengths)?))
    }

    /// Seconds of the target's forwards of 1, 2, 3 … rows. They are measured with a placeholder draft: one
    /// small random layer whose candidates are never accepted.
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
        let costs = self.measure(&mut decoders, NUM_PROMPTS_ALONE, &|_| Ok(Vec::new()))?;
        Ok((CostSource::Machine, costs))
    }

    fn measure(
        &self,
        decoders: &mut Decoders<'_>,
        num_prompts: usize,
        lengths: &dyn Fn(&Costs) -> Result<Vec<usize>>,
    ) -> Result<Costs> {
        let prompts = self.answers.iter().map(|answer| answer.prompt_ids.clone()).collect();
        let prompts: Vec<Vec<u32>> = spread(prompts, Some(num_prompts));
        let measured = CostProbe {
            decoders,
            drafter: DrafterId::Draft,
            decoding: self.decoding,
            prompts: &prompts,
            console: self.console,
        }
        .measure(lengths)
        .context("cannot measure what forwards cost here; hint: give `--costs`")?;
        Ok(measured.costs)
    }
}
