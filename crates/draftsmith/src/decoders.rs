//! A pair with what was trained for it, ready to decode: the target alone, with its draft, or with
//! its own first layers and an adapter.

use std::ops::ControlFlow;

use anyhow::{Context, Result, bail};
use draftsmith_decode::{
    DecodeError, Drafter, Generation, Limits, Logits, ModelSession, RecordOptions, RoundTokens,
    SelfDraft, SeparateDraft, Target, decode_plain, decode_speculative, record,
};
use draftsmith_theory::{Decoding, Draws, Recording, SignalNeeds, StopRule};

use crate::exports::calibration::HeadCalibration;
use crate::exports::{AdapterExport, Exports};
use crate::pair::Pair;
use crate::results::{DecodingName, DrafterName};

/// Sessions of all models, one sequence at a time.
pub(crate) struct Decoders<'m> {
    target: ModelSession<'m>,
    drafter: Option<SeparateDraft<'m>>,
    self_drafts: Vec<SelfDrafting<'m>>,
    pub(crate) limits: Limits,
    /// How the draft's head is calibrated; None without a head.
    calibration: Option<&'m HeadCalibration>,
}

/// An adapter with a session of the target that exits where it sits.
struct SelfDrafting<'m> {
    exit_layer: usize,
    target: ModelSession<'m>,
    drafter: SelfDraft<'m>,
    /// How the adapter's head is calibrated; None without a head.
    calibration: Option<&'m HeadCalibration>,
}

impl<'m> Decoders<'m> {
    /// Sessions that hold the pair's whole context.
    pub(crate) fn new(pair: &'m Pair, trained: &'m Exports, max_new_tokens: usize) -> Self {
        let (context, vocab_size) = (pair.context(), pair.target.config().vocab_size);
        let head = trained.head.as_ref().map(|head| &head.head);
        let drafter = |draft: &'m _| SeparateDraft::new(draft, head, vocab_size, context);
        let self_drafting = |trained: &'m AdapterExport| {
            let exit_layer = trained.config.exit_layer;
            SelfDrafting {
                exit_layer,
                target: ModelSession::with_exit(&pair.target, exit_layer, context, "target"),
                drafter: SelfDraft::new(
                    &trained.adapter,
                    trained.head.as_ref().map(|head| &head.head),
                    context,
                ),
                calibration: trained.head.as_ref().map(|head| &head.calibration),
            }
        };
        Self {
            target: ModelSession::new(&pair.target, context, "target"),
            drafter: pair.draft.as_ref().map(drafter),
            self_drafts: trained.adapters.iter().map(self_drafting).collect(),
            limits: Limits {
                max_new_tokens,
                eos_token_ids: pair.target.config().eos_token_ids.clone(),
            },
            calibration: trained.head.as_ref().map(|head| &head.calibration),
        }
    }

    /// Decodes with a drafter and a rule, which reads the head's predictions as they are calibrated
    /// for this way of decoding.
    ///
    /// # Errors
    /// If the prompt does not fit, a model fails, or there is no such drafter.
    pub(crate) fn decode(
        &mut self,
        drafter: DrafterName,
        rule: &mut dyn StopRule,
        decoding: &Decoding,
        prompt_ids: &[u32],
        draws: &mut dyn Draws,
    ) -> Result<Generation> {
        let mut observe = |_: RoundTokens<'_>| ControlFlow::Continue(());
        let (limits, observe) = (&self.limits, &mut observe);
        Ok(match drafter {
            DrafterName::None => bail!("the target alone has no stop rule"),
            DrafterName::Draft => {
                let drafter = self.drafter.as_mut().context(NO_DRAFT)?;
                let calibration = self.calibration;
                drafter.set_calibration(
                    calibration.and_then(|head| head.map(DecodingName::of(decoding))),
                );
                let target = &mut self.target;
                decode_speculative(
                    target, drafter, rule, decoding, prompt_ids, limits, draws, observe,
                )?
            }
            DrafterName::SelfDraft { exit_layer } => {
                let SelfDrafting { target, drafter, calibration, .. } =
                    find(&mut self.self_drafts, exit_layer)?;
                drafter.set_calibration(
                    calibration.and_then(|head| head.map(DecodingName::of(decoding))),
                );
                decode_speculative(
                    target, drafter, rule, decoding, prompt_ids, limits, draws, observe,
                )?
            }
        })
    }

    /// Decodes with the target alone.
    ///
    /// # Errors
    /// If the prompt does not fit or the model fails.
    pub(crate) fn decode_plain(
        &mut self,
        decoding: &Decoding,
        prompt_ids: &[u32],
        draws: &mut dyn Draws,
    ) -> Result<Generation> {
        let mut observe = |_: RoundTokens<'_>| ControlFlow::Continue(());
        let (target, limits) = (&mut self.target, &self.limits);
        Ok(decode_plain(target, decoding, prompt_ids, limits, draws, &mut observe)?)
    }

    /// Records what a drafter does along a response of the target, for replay: predictions as the
    /// head says them.
    ///
    /// # Errors
    /// If the prompt does not fit, a model fails, or there is no such drafter.
    pub(crate) fn record(
        &mut self,
        drafter: DrafterName,
        decoding: &Decoding,
        max_length: usize,
        prompt_ids: &[u32],
        response: &[u32],
        draws: &mut dyn Draws,
    ) -> Result<Recording> {
        let options = RecordOptions {
            decoding: *decoding,
            limits: self.limits.clone(),
            max_length,
            has_head: self.has_head_for(drafter),
        };
        Ok(match drafter {
            DrafterName::None => bail!("there is nothing to record of the target alone"),
            DrafterName::Draft => {
                let drafter = self.drafter.as_mut().context(NO_DRAFT)?;
                drafter.set_calibration(None);
                record(&mut self.target, drafter, &options, prompt_ids, response, draws)?
            }
            DrafterName::SelfDraft { exit_layer } => {
                let SelfDrafting { target, drafter, .. } = find(&mut self.self_drafts, exit_layer)?;
                drafter.set_calibration(None);
                record(target, drafter, &options, prompt_ids, response, draws)?
            }
        })
    }

    /// What a drafter would draw from at each place of a response, read token by token as in
    /// decoding.
    ///
    /// # Errors
    /// If the prompt does not fit, a model fails, or there is no such drafter.
    pub(crate) fn draft_logits(
        &mut self,
        drafter: DrafterName,
        prompt_ids: &[u32],
        response: &[u32],
    ) -> Result<Vec<Vec<f32>>> {
        Ok(match drafter {
            DrafterName::None => bail!("the target alone drafts nothing"),
            DrafterName::Draft => {
                let drafter = self.drafter.as_mut().context(NO_DRAFT)?;
                draft_along(&mut self.target, drafter, prompt_ids, response)?
            }
            DrafterName::SelfDraft { exit_layer } => {
                let SelfDrafting { target, drafter, .. } = find(&mut self.self_drafts, exit_layer)?;
                draft_along(target, drafter, prompt_ids, response)?
            }
        })
    }

    /// Whether an acceptance head speaks of a drafter's candidates.
    pub(crate) fn has_head_for(&self, drafter: DrafterName) -> bool {
        match drafter {
            DrafterName::None => false,
            DrafterName::Draft => self.calibration.is_some(),
            DrafterName::SelfDraft { exit_layer } => self.self_drafts.iter().any(|drafting| {
                drafting.exit_layer == exit_layer && drafting.calibration.is_some()
            }),
        }
    }

    /// All drafters there are.
    pub(crate) fn drafters(&self) -> Vec<DrafterName> {
        let draft = self.drafter.iter().map(|_| DrafterName::Draft);
        let exit_layer = |drafting: &SelfDrafting<'_>| drafting.exit_layer;
        let exits = self.self_drafts.iter().map(exit_layer);
        draft.chain(exits.map(|exit_layer| DrafterName::SelfDraft { exit_layer })).collect()
    }

    /// The target's logits after each token of `ids` from position `from` on.
    ///
    /// # Errors
    /// If the ids do not fit or the model fails.
    pub(crate) fn score(&mut self, ids: &[u32], from: usize) -> Result<Logits> {
        Ok(self.target.score(ids, from)?)
    }
}

fn draft_along<T: Target, D: Drafter<T>>(
    target: &mut T,
    drafter: &mut D,
    prompt_ids: &[u32],
    response: &[u32],
) -> Result<Vec<Vec<f32>>, DecodeError> {
    target.begin(prompt_ids)?;
    drafter.begin(target, prompt_ids)?;
    let mut ids = prompt_ids.to_vec();
    let mut logits = Vec::with_capacity(response.len());
    for token in response {
        logits.push(drafter.draft(target, &ids, 0, SignalNeeds::default())?.logits);
        ids.push(*token);
    }
    Ok(logits)
}

const NO_DRAFT: &str = "a draft's setting is run where there is one";

fn find<'a, 'm>(
    self_drafts: &'a mut [SelfDrafting<'m>],
    exit_layer: usize,
) -> Result<&'a mut SelfDrafting<'m>> {
    let found = self_drafts.iter_mut().find(|drafting| drafting.exit_layer == exit_layer);
    found.context("an adapter's setting is run where there is one")
}
