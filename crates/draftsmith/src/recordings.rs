//! What a drafter does along many responses, several recorded at once.
//!
//! A place of sixteen responses takes forwards that read all weights once, and so do the candidates
//! that are rolled out from there. Each gets the recording that it would get alone: a row's result
//! does not depend on the rows beside it, and draws are keyed by the response's id.

use std::ops::ControlFlow;

use anyhow::{Context, Result};
use draftsmith_decode::{
    KnownResponse, RecordOptions, RecordRequest, ResponseTarget, SelfDraft, ServedTarget, record,
    separate_draft,
};
use draftsmith_theory::{Decoding, DrafterId, Recording, SeededDraws, TopProbs};
use rayon::prelude::*;

use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::decoders::Decoders;
use crate::exports::Exports;
use crate::labels::LabelModels;
use crate::pair::Pair;
use crate::recipe::Recipe;
use crate::responses::sequences_at_once;
use crate::results::DrafterName;
use crate::served::ServerAccess;
use crate::shard::Shard;
use crate::text_side::TextSide;
use crate::workspace::Workspace;

/// Whose responses are recorded, and who drafts.
#[derive(Clone)]
pub(crate) enum RecordedModels<'a> {
    /// Both are here.
    Pair(&'a Pair),
    /// The draft is here; of the target, what servers answered.
    Served {
        models: LabelModels<'a>,
        text: &'a TextSide,
        workspace: &'a Workspace,
        access: ServerAccess<'a>,
    },
}

impl<'a> RecordedModels<'a> {
    /// Those of a recipe.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn of(recipe: &'a Recipe, workspace: &'a Workspace) -> Result<Self> {
        if recipe.target_elsewhere().is_none() {
            return Ok(Self::Pair(workspace.pair()?));
        }
        Self::served(workspace, ServerAccess::of(recipe, Shard::WHOLE)?)
    }

    /// Those of a target that servers serve.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn served(workspace: &'a Workspace, access: ServerAccess<'a>) -> Result<Self> {
        let (models, text) = (workspace.served_models()?, workspace.text_side()?);
        Ok(Self::Served { models, text, workspace, access })
    }

    /// What is known of text, whoever has the models.
    pub(crate) fn text(&self) -> &'a TextSide {
        match self {
            Self::Pair(pair) => &pair.text,
            Self::Served { text, .. } => text,
        }
    }
}

/// How a drafter is recorded.
pub(crate) struct RecordingJob<'a> {
    pub(crate) models: RecordedModels<'a>,
    pub(crate) exports: &'a Exports,
    pub(crate) drafter: DrafterName,
    pub(crate) decoding: Decoding,
    pub(crate) max_new_tokens: usize,
    /// The most candidates that a round can be replayed with.
    pub(crate) max_length: usize,
    /// Whether candidates get their labels also where the drafter has no head: one is to be trained on
    /// them, or weighed.
    pub(crate) labels: bool,
    /// Whether several threads record, each several responses.
    pub(crate) on_cpu: bool,
    pub(crate) console: &'a Console,
    /// Counts responses.
    pub(crate) progress: &'a Progress,
}

/// A response of the target, with the draws of its recording.
pub(crate) struct ToRecord<'a> {
    pub(crate) prompt_ids: &'a [u32],
    pub(crate) response_ids: &'a [u32],
    /// What a served target drew each token from, as far as it is known; None where each was the most
    /// probable.
    pub(crate) probs: Option<&'a [TopProbs]>,
    pub(crate) draws: SeededDraws,
}

impl RecordingJob<'_> {
    /// The recordings of responses, in their order.
    ///
    /// # Errors
    /// If a response does not fit, a model fails, or Ctrl-C is met.
    pub(crate) fn record(&self, responses: &mut [ToRecord<'_>]) -> Result<Vec<Recording>> {
        let at_once = sequences_at_once(responses.len(), self.on_cpu);
        let pair = match &self.models {
            RecordedModels::Pair(pair) => pair,
            RecordedModels::Served { models, text, workspace, .. } => {
                let (models, text, workspace) = (*models, *text, *workspace);
                let chunks = responses.par_chunks_mut(at_once);
                let recorded = chunks.map(|some| self.record_served(workspace, models, text, some));
                let recorded: Vec<Vec<Recording>> = recorded.collect::<Result<_>>()?;
                return Ok(recorded.into_iter().flatten().collect());
            }
        };
        let decoders = || Decoders::with_slots(pair, self.exports, self.max_new_tokens, at_once);
        let some = |decoders: &mut Decoders<'_>, responses: &mut [ToRecord<'_>]| {
            self.record_some(decoders, responses)
        };
        // On a device, one thread has them all, and a slot that comes free goes to the next.
        let recorded: Vec<Vec<Recording>> = if self.on_cpu {
            let chunks = responses.par_chunks_mut(at_once);
            chunks.map_init(decoders, some).collect::<Result<_>>()?
        } else {
            vec![some(&mut decoders(), responses)?]
        };
        Ok(recorded.into_iter().flatten().collect())
    }

    fn record_some(
        &self,
        decoders: &mut Decoders<'_>,
        responses: &mut [ToRecord<'_>],
    ) -> Result<Vec<Recording>> {
        let how = (self.max_length, self.labels);
        self.watched(responses, |requests, observe| {
            decoders.record(self.drafter, &self.decoding, how, requests, observe)
        })
    }

    fn record_served(
        &self,
        workspace: &Workspace,
        models: LabelModels<'_>,
        text: &TextSide,
        responses: &mut [ToRecord<'_>],
    ) -> Result<Vec<Recording>> {
        let LabelModels { draft, context, vocab_size, .. } = models;
        let known: Vec<KnownResponse<'_>> = responses
            .iter()
            .map(|to| KnownResponse { response: to.response_ids, probs: to.probs })
            .collect();
        let num_slots = known.len();
        let mut answers = ResponseTarget::new(known, vocab_size, context, num_slots);
        let mut options = RecordOptions {
            decoding: self.decoding,
            limits: text.limits(self.max_new_tokens),
            max_length: self.max_length,
            has_head: false,
            labels: self.labels,
            is_target_here: false,
        };
        if let DrafterName::Of(DrafterId::SelfDraft { exit_layer }) = self.drafter {
            let adapter = self.exports.adapters.iter();
            let adapter = adapter.clone().find(|one| one.config.exit_layer == exit_layer);
            let adapter = adapter.context("an adapter that is recorded was read")?;
            let head = adapter.head.as_ref().map(|head| &head.head);
            options.has_head = head.is_some();
            let layers = workspace.target_of_adapters(workspace.dtype)?;
            let adapter = &adapter.adapter;
            let mut drafter = SelfDraft::new(layers, adapter, exit_layer, head, context, num_slots);
            let mut target = ServedTarget::new(layers, exit_layer, answers);
            return self.watched(responses, |requests, observe| {
                Ok(record(&mut target, &mut drafter, &options, requests, observe)?)
            });
        }
        let draft = draft.context("a served target needs a draft to be recorded along it")?;
        let vocabulary = self.exports.draft_tokens.as_ref().map(|tokens| &tokens.vocabulary);
        let head = self.exports.head.as_ref().map(|head| &head.head);
        options.has_head = head.is_some();
        let mut drafter = separate_draft(draft, vocabulary, head, vocab_size, context, num_slots);
        self.watched(responses, |requests, observe| {
            Ok(record(&mut answers, &mut drafter, &options, requests, observe)?)
        })
    }

    /// What `record` makes of responses, which are counted as they come.
    fn watched<'r>(
        &self,
        responses: &'r mut [ToRecord<'_>],
        record: impl FnOnce(
            Vec<RecordRequest<'r>>,
            &mut dyn FnMut(usize) -> ControlFlow<()>,
        ) -> Result<Vec<Recording>>,
    ) -> Result<Vec<Recording>> {
        let num_responses = responses.len();
        let num_places: usize = responses.iter().map(|one| one.response_ids.len()).sum();
        let requests = responses.iter_mut().map(|response| RecordRequest {
            prompt: response.prompt_ids,
            response: response.response_ids,
            draws: &mut response.draws,
        });
        let mut all = self.progress.side_by_side(vec![num_responses as f64]);
        let observe = &mut |num_recorded: usize| {
            all.reach(0, num_recorded as f64 / num_places as f64);
            match self.console.is_interrupted() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let recorded = record(requests.collect(), observe)?;
        if recorded.len() < num_responses {
            return Err(Interrupted.into());
        }
        all.finish();
        Ok(recorded)
    }
}
