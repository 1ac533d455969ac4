//! The costs of forwards, given by the user or measured as in `tune`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use draftsmith_report::CostSource;
use draftsmith_theory::{DrafterId, Recordings};

use super::{MAX_LENGTH, Surveyor};
use draftsmith_recipe::{LoadedDrafters, spread};
use draftsmith_tune::costs::{COSTS_TIME_LIMIT, CostProbe, Costs, MeasuredCosts};
use draftsmith_tune::decoders::Decoders;
use draftsmith_tune::sweep::lengths_under;

/// The number of prompts for measuring costs.
const NUM_PROMPTS: usize = 4;
/// The number of prompts after which the target's forwards are timed separately.
const NUM_PROMPTS_ALONE: usize = 2;
/// The number of times that each row count is timed after a prompt. Each pass times every row count once.
const NUM_PASSES: usize = 8;

impl Surveyor<'_> {
    /// Returns the costs of the drafter, as given or measured on this machine.
    pub(super) fn draft_costs(
        &self,
        drafters: &LoadedDrafters,
        recordings: &Recordings,
    ) -> Result<(CostSource, MeasuredCosts)> {
        let given = self.given.map(|given| Costs::given(given, DrafterId::DRAFT, 1)).transpose()?;
        if let Some(costs) = given.flatten() {
            return Ok((CostSource::Given, MeasuredCosts::given(costs)));
        }
        self.watch.note("survey: measuring costs with the drafter");
        let mut decoders = Decoders::new(self.workspace.pair()?, drafters, self.max_new_tokens);
        let mut measured = CostProbe {
            decoders: &mut decoders,
            drafter: DrafterId::DRAFT,
            decodings: &[self.decoding],
            prompts: &self.cost_prompts(NUM_PROMPTS),
            time_limit: COSTS_TIME_LIMIT,
            watch: self.watch,
        }
        .measure(&|costs| lengths_under(recordings, costs))
        .context("cannot measure what forwards cost here; hint: give `--costs`")?;
        Ok((CostSource::Machine, measured.remove(0)))
    }

    /// Returns the seconds of target forwards over 1, 2, 3 … rows, as given or measured here.
    pub(super) fn target_costs(&self) -> Result<(CostSource, MeasuredCosts)> {
        let given = self.given.and_then(|given| Costs::given_target(given).transpose());
        if let Some(costs) = given.transpose()? {
            return Ok((CostSource::Given, MeasuredCosts::given(costs)));
        }
        self.watch.note("survey: measuring costs, target alone");
        let none = LoadedDrafters::default();
        let mut decoders = Decoders::new(self.workspace.pair()?, &none, self.max_new_tokens);
        let rows: Vec<usize> = (1..=MAX_LENGTH + 1).collect();
        let mut times: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for prompt in self.cost_prompts(NUM_PROMPTS_ALONE) {
            for (rows, time) in decoders.verify_times(&prompt, &rows, NUM_PASSES)? {
                times.entry(rows).or_default().push(time.as_secs_f64());
            }
        }
        let costs = MeasuredCosts::of_target(times)
            .context("the context has no room to time forwards; hint: give `--costs`")?;
        Ok((CostSource::Machine, costs))
    }

    /// Selects at most `num_prompts` of the answers' prompts, spread evenly, for measuring costs.
    fn cost_prompts(&self, num_prompts: usize) -> Vec<Vec<u32>> {
        let prompts = self.answers.iter().map(|answer| answer.prompt_ids.clone()).collect();
        spread(prompts, Some(num_prompts))
    }
}
