//! The sessions of a target and its drafters, for decoding plainly or with any drafter.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use draftsmith_decode::{
    DraftStep, Drafter, Drafters, Drafting, Generation, Limits, Logits, LookupFirstDraft,
    ModelDrafter, ModelSession, NoDrafter, RecordOptions, RecordRequest, Request, RoundTokens,
    Sizes, Target, TreeDraft, Verification, decode_many, record,
};
use draftsmith_model::WeightDtype;
use draftsmith_report::{DrafterName, tokens_per_second};
use draftsmith_theory::{
    Decoding, DrafterId, Draws, Proposal, Recording, SeededDraws, SignalNeeds, StopRule,
    StoredAnswers,
};

use draftsmith_recipe::{LoadedDrafter, LoadedDrafters, Pair};

/// The reason why a drafter cannot be recorded.
pub const NO_STEPS: &str = "it has no model, and so no probabilities to record";

/// The reason why a drafter cannot propose trees.
pub const NO_TREE: &str = "a tree needs a drafter with a model, whose candidates it grows by";

/// A prompt to decode.
pub struct PromptToDecode<'r> {
    /// The token ids of the prompt.
    pub prompt_ids: &'r [u32],
    /// The stop rule that ends draft phases; `None` for plain decoding.
    pub rule: Option<&'r mut dyn StopRule>,
    /// The source of random draws.
    pub draws: &'r mut dyn Draws,
}

/// The sessions of the target and all drafters.
pub struct Decoders<'m> {
    drafters: Drafters<'m>,
    /// The dtype that the target computes in.
    pub dtype: WeightDtype,
    /// The drafters that have an acceptance head.
    with_heads: Vec<DrafterId>,
    /// The conditions that end answers.
    pub limits: Limits,
    num_slots: usize,
    answers: Option<Arc<StoredAnswers>>,
}

impl<'m> Decoders<'m> {
    /// Opens sessions for one sequence of the pair's full context length.
    pub fn new(pair: &'m Pair, drafters: &'m LoadedDrafters, max_new_tokens: usize) -> Self {
        Self::with_slots(pair, drafters, max_new_tokens, 1)
    }

    /// Opens sessions for up to `num_slots` concurrent sequences, each of the pair's full context
    /// length.
    pub fn with_slots(
        pair: &'m Pair,
        drafters: &'m LoadedDrafters,
        max_new_tokens: usize,
        num_slots: usize,
    ) -> Self {
        let sizes = Sizes { target: &pair.target, capacity: pair.text.context, num_slots };
        Self {
            dtype: pair.target.dtype(),
            with_heads: drafters
                .iter()
                .filter(|it| it.head_timing().is_some())
                .map(LoadedDrafter::id)
                .collect(),
            drafters: Drafters::new(drafters.iter().map(|it| &it.parts), sizes),
            limits: pair.text.limits(max_new_tokens),
            num_slots,
            answers: drafters.answers.clone(),
        }
    }

    /// Decodes prompts with a drafter or plainly, as many concurrently as there are slots.
    ///
    /// # Errors
    /// If a prompt does not fit, a model fails, or the drafter is missing.
    pub fn decode_many<'r>(
        &mut self,
        drafter: DrafterName,
        decoding: &Decoding,
        all: impl IntoIterator<Item = PromptToDecode<'r>>,
    ) -> Result<Vec<Generation>> {
        let limits = &self.limits.clone();
        let requests = all.into_iter().map(|PromptToDecode { prompt_ids, rule, draws }| Request {
            prompt: prompt_ids,
            decoding: *decoding,
            limits,
            rule: rule.map(|rule| rule as &mut dyn StopRule),
            draws,
        });
        let observe = &mut |_: usize, _: RoundTokens<'_>| ControlFlow::Continue(());
        let (name, num_slots, answers) = (drafter, self.num_slots, self.answers.as_ref());
        if let Some(first) = drafter.as_look_ups_alone() {
            let mut drafter = LookupFirstDraft::new(NoDrafter, (first, answers), num_slots);
            return Ok(decode_many(self.drafters.target(), &mut drafter, requests, observe)?);
        }
        if drafter.id().is_none() {
            return Ok(decode_many(self.drafters.target(), &mut NoDrafter, requests, observe)?);
        }
        let (target, drafter) = drafting(&mut self.drafters, drafter)?;
        proposing(drafter, (name, answers), num_slots, |drafter| {
            Ok(decode_many(target, drafter, requests, observe)?)
        })
    }

    /// Decodes one prompt: speculatively with a drafter and a rule, or plainly without them.
    ///
    /// # Errors
    /// As for [`Self::decode_many`].
    pub fn decode<'r>(
        &mut self,
        drafter: DrafterName,
        rule: Option<&'r mut dyn StopRule>,
        decoding: &Decoding,
        prompt_ids: &'r [u32],
        draws: &'r mut dyn Draws,
    ) -> Result<Generation> {
        let one = PromptToDecode { prompt_ids, rule, draws };
        Ok(self.decode_many(drafter, decoding, [one])?.remove(0))
    }

    /// Records a drafter along responses of the target. `observe` receives the number of recorded
    /// positions and may stop the recording.
    ///
    /// # Errors
    /// If a prompt does not fit, a model fails, or the drafter is missing or has no model.
    pub fn record<'r>(
        &mut self,
        drafter: DrafterName,
        options: &RecordOptions,
        responses: impl IntoIterator<Item = RecordRequest<'r>>,
        observe: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Recording>> {
        let (target, drafter) = drafting(&mut self.drafters, drafter)?;
        let steps = drafter.by_steps().context(NO_STEPS)?;
        Ok(record(target, steps, options, responses, observe)?)
    }

    /// Computes the drafter's logits at each position of a response, token by token as in decoding.
    ///
    /// # Errors
    /// If the prompt does not fit, a model fails, or the drafter is missing or has no model.
    pub fn draft_logits(
        &mut self,
        drafter: DrafterName,
        prompt_ids: &[u32],
        response: &[u32],
    ) -> Result<Vec<Vec<f32>>> {
        const SLOT: usize = 0;
        let (target, drafter) = drafting(&mut self.drafters, drafter)?;
        let drafter = drafter.by_steps().context(NO_STEPS)?;
        target.begin(SLOT, prompt_ids)?;
        drafter.begin(target, SLOT, prompt_ids)?;
        let mut ids = prompt_ids.to_vec();
        let mut logits = Vec::with_capacity(response.len());
        for token in response {
            let needs = SignalNeeds::default();
            target.begin_round(SLOT, ids.len());
            let step = DraftStep::in_chain(SLOT, &ids, 0, needs, &Decoding::GREEDY);
            logits.extend(drafter.draft(target, &[step])?.into_iter().map(|row| row.own_logits));
            ids.push(*token);
        }
        Ok(logits)
    }

    /// Times the target's forwards after a prompt with each number of rows in `rows`, `num_passes`
    /// times. Returns pairs of number of rows and time, or nothing if the largest number does not
    /// fit the context. Each number must be at least 1.
    ///
    /// # Errors
    /// If the prompt does not fit, or the model fails.
    pub fn verify_times(
        &mut self,
        prompt_ids: &[u32],
        rows: &[usize],
        num_passes: usize,
    ) -> Result<Vec<(usize, Duration)>> {
        const SLOT: usize = 0;
        let target = self.drafters.target();
        let most = rows.iter().copied().max().unwrap_or(0);
        if prompt_ids.len() + most > target.context() {
            return Ok(Vec::new());
        }
        target.begin(SLOT, prompt_ids)?;
        let mut times = Vec::with_capacity(rows.len() * num_passes);
        for num_rows in (0..num_passes).flat_map(|_| rows.iter().copied()) {
            // The choice of proposed tokens does not affect the time.
            let proposed: Vec<u32> =
                prompt_ids.iter().cycle().copied().take(num_rows - 1).collect();
            let tokens = &[prompt_ids, &proposed].concat();
            let proposal = &Proposal::certain_chain(&proposed);
            let begun = Instant::now();
            target.verify(&[Verification { slot: SLOT, tokens, proposal }])?;
            times.push((num_rows, begun.elapsed()));
            // The next forward reads the prompt's last token again.
            target.commit(SLOT, prompt_ids.len() - 1, &[]);
        }
        Ok(times)
    }

    /// Returns whether the drafter has an acceptance head.
    pub fn has_head_for(&self, drafter: DrafterName) -> bool {
        drafter.id().is_some_and(|id| self.with_heads.contains(&id))
    }

    /// Computes the target's logits after each token of `ids` from position `from` on.
    ///
    /// # Errors
    /// If the ids do not fit or the model fails.
    pub fn score(&mut self, ids: &[u32], from: usize) -> Result<Logits> {
        Ok(self.drafters.target().score(ids, from)?)
    }
}

/// The maximum number of new tokens in the answer that times the target.
const NUM_TIMED_TOKENS: usize = 16;

/// Measures the target's tokens per second on a short greedy answer to a prompt, after an untimed
/// first answer.
///
/// # Errors
/// If the prompt does not fit, or the model fails.
pub fn target_speed(pair: &Pair, prompt_ids: &[u32]) -> Result<f64> {
    let none = LoadedDrafters::default();
    let mut decoders = Decoders::new(pair, &none, NUM_TIMED_TOKENS);
    let mut answer = || {
        let draws = &mut SeededDraws::new(0, &["speed"]);
        decoders.decode(DrafterName::None, None, &Decoding::GREEDY, prompt_ids, draws)
    };
    answer()?;
    Ok(tokens_per_second(&answer()?.trace))
}

fn drafting<'a, 'm>(
    drafters: &'a mut Drafters<'m>,
    drafter: DrafterName,
) -> Result<Drafting<'a, 'm>> {
    let id = drafter.id().context("the target alone drafts nothing")?;
    drafters.drafting(id).with_context(|| format!("there is no drafter `{id}` to run"))
}

/// Calls `decode` with the drafter that `name` describes: `drafter` itself, trees of its
/// candidates, or `drafter` with prompt lookup in front of it, which searches `answers`.
///
/// # Errors
/// If trees are requested from a drafter without a model, or `decode` fails.
pub fn proposing<'m, R>(
    drafter: &mut (dyn ModelDrafter<'m> + 'm),
    (name, answers): (DrafterName, Option<&Arc<StoredAnswers>>),
    num_slots: usize,
    decode: impl FnOnce(&mut dyn Drafter<ModelSession<'m>>) -> Result<R>,
) -> Result<R> {
    match name {
        DrafterName::None | DrafterName::Of(_) => decode(drafter),
        DrafterName::Tree(_, shape) => {
            decode(&mut TreeDraft::new(drafter.by_steps().context(NO_TREE)?, shape))
        }
        DrafterName::After(first, _) => {
            decode(&mut LookupFirstDraft::new(drafter, (first, answers), num_slots))
        }
    }
}
