//! Generation of the target's answers to prompts, and recording of drafters along them. `record`
//! and the training of heads write the recordings to files, and `survey` keeps them in memory.
//!
//! Several responses share each forward, because reading the weights dominates the time of a
//! forward, so sixteen rows cost little more than one. The recordings do not depend on batching,
//! threads, order or restarts: a row's logits do not depend on the other rows, and random draws are
//! seeded by row ids.

use std::borrow::Cow;
use std::ops::ControlFlow;

use anyhow::{Context, Result, ensure};
use draftsmith_decode::{
    AnsweringTarget, KnownResponse, KnownStates, RecordOptions, RecordRequest, RecordTask,
    ResponseTarget, TargetLayers,
};
use draftsmith_model::Rows;
use draftsmith_report::DecodingName;
use draftsmith_theory::{Decoding, DrafterId, Recording, SeededDraws, TopProbs};
use draftsmith_train::StatesRow;
use rayon::prelude::*;

use crate::answers::{Answers, OwnTarget, TargetAnswer, answer_all};
use crate::conversation::{SetPrompt, note_ended_by_call};
use crate::decoders::{Decoders, NO_STEPS};
use crate::responses::{Responder, sequences_at_once};
use crate::served_states::StatesServer;
use crate::server_access::{ServerAccess, ask_servers};
use draftsmith_recipe::{
    Bar, DeviceChoice, Interrupted, LabelModels, LoadedDrafters, Pair, Recipe, TextSide, Watch,
    Workspace,
};

/// The models that answer prompts and draft candidates.
#[derive(Clone)]
pub enum RecordedModels<'a> {
    /// A local target with local drafters.
    Pair(&'a Pair),
    /// Local drafters with a target on servers.
    Served(ServedPair<'a>),
}

/// The local models of a recipe whose target runs on servers.
#[derive(Clone)]
pub struct ServedPair<'a> {
    /// The local models that compute labels, and the target's sizes.
    pub models: LabelModels<'a>,
    text: &'a TextSide,
    workspace: &'a Workspace,
    asker: ServerAccess<'a>,
    /// The layers whose hidden states the servers give, with the last one; empty if they give none.
    state_layers: Vec<usize>,
}

impl<'a> RecordedModels<'a> {
    /// Opens the models of a recipe, whose target is local or on servers.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn of(recipe: &'a Recipe, workspace: &'a Workspace) -> Result<Self> {
        if recipe.target_elsewhere().is_none() {
            return Ok(Self::Pair(workspace.pair()?));
        }
        let mut models = Self::served(workspace, ServerAccess::of(recipe)?)?;
        if let (Self::Served(served), Some(_)) = (&mut models, recipe.states_server()) {
            served.state_layers = recipe.state_layers(workspace.models.target_config()?)?;
        }
        Ok(models)
    }

    /// Pairs a workspace's local models with a target on servers.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn served(workspace: &'a Workspace, asker: ServerAccess<'a>) -> Result<Self> {
        let (models, text) = (workspace.models.served_models()?, workspace.text_side()?);
        let state_layers = Vec::new();
        Ok(Self::Served(ServedPair { models, text, workspace, asker, state_layers }))
    }

    /// Returns the target's tokenizer, chat template and context length, and the ends of its
    /// answers.
    pub fn text(&self) -> &'a TextSide {
        match self {
            Self::Pair(pair) => &pair.text,
            Self::Served(served) => served.text,
        }
    }

    /// Returns whether the models run on the CPU, where several threads record batches of responses
    /// in parallel.
    fn on_cpu(&self) -> bool {
        match self {
            Self::Pair(pair) => DeviceChoice::is_cpu(&pair.target.device()),
            Self::Served(served) => DeviceChoice::is_cpu(served.workspace.models.device()),
        }
    }
}

/// A response of the target, with the random draws for its recording.
pub struct ResponseToRecord<'a> {
    /// The token ids of the prompt.
    pub prompt_ids: &'a [u32],
    /// The token ids of the response.
    pub response_ids: &'a [u32],
    /// The known distributions of the response's tokens, as in [`TargetAnswer::probs`].
    pub probs: Option<&'a [TopProbs]>,
    /// The source of random draws for the recording.
    pub draws: SeededDraws,
}

impl ResponseToRecord<'_> {
    /// Returns the tokens that a drafter reads: all but the last one.
    fn read_text(&self) -> StatesText {
        let (_, before) = self.response_ids.split_last().expect("a response has a token");
        let ids = [self.prompt_ids, before].concat();
        StatesText { first: ids.len(), ids }
    }
}

/// A text along which servers give hidden states.
pub struct StatesText {
    /// The text's tokens, without the last one.
    pub ids: Vec<u32>,
    /// The first position whose final state is wanted.
    pub first: usize,
}

/// Requests the hidden states after `layers` along texts. One of the texts is proved at every position. Also
/// returns the wanted final states after the final norm.
///
/// # Errors
/// If the servers fail, or their states are not the target's.
pub fn known_states<'t>(
    server: &StatesServer<'_>,
    layers: &[usize],
    texts: &'t [StatesText],
) -> Result<Vec<(KnownStates<'t>, Vec<f32>)>> {
    let id = "a response to record";
    let row = |text: &'t StatesText| StatesRow { id, ids: &text.ids, first_supervised: text.first };
    let rows: Vec<StatesRow<'_>> = texts.iter().map(row).collect();
    let width = server.width();
    let mut known = Vec::with_capacity(texts.len());
    server.each((layers, 1), &rows, |nth, states| {
        let rows = states.layers.into_iter().map(|values| Rows::of_host(values, width));
        let layers = layers.iter().copied().zip(rows).collect();
        known.push((KnownStates { ids: &texts[nth].ids, layers }, states.last));
        Ok(())
    })?;
    Ok(known)
}

/// A drafter to record along responses of one way of decoding.
pub struct RecordedDrafter<'a> {
    /// The loaded drafters.
    pub drafters: &'a LoadedDrafters,
    /// The drafter's name.
    pub id: DrafterId,
    /// The way of decoding, greedy or sampled.
    pub decoding: Decoding,
}

/// A recorder, which answers prompts with the target and records drafters along the answers.
pub struct AnswerRecorder<'a> {
    /// The target and the drafters' models.
    pub models: RecordedModels<'a>,
    /// The maximum number of new tokens in an answer.
    pub max_new_tokens: usize,
    /// The seed of random draws.
    pub seed: u64,
    /// The maximum number of candidates in a replayed round.
    pub max_length: usize,
    /// Whether candidates get acceptance labels even if the drafter has no head. Training or
    /// estimating a head needs them.
    pub labels: bool,
    /// The interface that shows messages to the user and reports interrupts.
    pub watch: &'a dyn Watch,
    /// The progress, which counts each response once when it is generated and once per recorded
    /// drafter.
    pub progress: &'a dyn Bar,
}

impl AnswerRecorder<'_> {
    /// Records a drafter along answers that were given under the drafter's `decoding`. Returns each
    /// recording with the id of its answer.
    ///
    /// # Errors
    /// If an answer does not fit, a model fails, or the user presses Ctrl-C.
    pub fn record_answers<'a>(
        &self,
        drafter: &RecordedDrafter<'_>,
        answers: impl IntoIterator<Item = &'a TargetAnswer>,
    ) -> Result<Vec<(String, Recording)>> {
        let name = drafter.id.to_string();
        let how = DecodingName::of(&drafter.decoding).text();
        let to_record = |answer: &'a TargetAnswer| ResponseToRecord {
            prompt_ids: &answer.prompt_ids,
            response_ids: &answer.response_ids,
            probs: answer.probs.as_deref(),
            draws: SeededDraws::new(self.seed, &[&answer.id, "rollouts", &name, how]),
        };
        let (ids, mut responses): (Vec<String>, Vec<ResponseToRecord<'_>>) =
            answers.into_iter().map(|answer| (answer.id.clone(), to_record(answer))).unzip();
        Ok(ids.into_iter().zip(self.record(drafter, &mut responses)?).collect())
    }

    /// Records a drafter along responses. Returns the recordings in the order of the responses.
    ///
    /// # Errors
    /// If a response does not fit, a model fails, or the user presses Ctrl-C.
    pub fn record(
        &self,
        drafter: &RecordedDrafter<'_>,
        responses: &mut [ResponseToRecord<'_>],
    ) -> Result<Vec<Recording>> {
        let on_cpu = self.models.on_cpu();
        let at_once = sequences_at_once(responses.len(), on_cpu);
        let recorded: Vec<Vec<Recording>> = match &self.models {
            RecordedModels::Pair(pair) => {
                let decoders =
                    || Decoders::with_slots(pair, drafter.drafters, self.max_new_tokens, at_once);
                let record = |decoders: &mut Decoders<'_>, some: &mut [ResponseToRecord<'_>]| {
                    let has_head = decoders.has_head_for(drafter.id.into());
                    let options = self.options(drafter.decoding, has_head, true);
                    self.record_watched(some, |requests, observe| {
                        decoders.record(drafter.id.into(), &options, requests, observe)
                    })
                };
                // On a GPU one thread records everything, and each free slot takes the next
                // response.
                match on_cpu {
                    true => responses
                        .par_chunks_mut(at_once)
                        .map_init(decoders, record)
                        .collect::<Result<_>>()?,
                    false => vec![record(&mut decoders(), responses)?],
                }
            }
            RecordedModels::Served(served) => {
                let states = self.states_server(served, drafter)?;
                let record = |some: &mut [ResponseToRecord<'_>]| {
                    self.record_served(served, drafter, states.as_ref(), some)
                };
                responses.par_chunks_mut(at_once).map(record).collect::<Result<_>>()?
            }
        };
        Ok(recorded.into_iter().flatten().collect())
    }

    fn options(&self, decoding: Decoding, has_head: bool, is_target_here: bool) -> RecordOptions {
        RecordOptions {
            decoding,
            limits: self.models.text().limits(self.max_new_tokens),
            max_length: self.max_length,
            has_head,
            labels: self.labels,
            is_target_here,
        }
    }

    /// Prepares the client of the servers whose hidden states a drafter reads; `None` if it reads
    /// none, or the servers give none.
    fn states_server<'s>(
        &'s self,
        served: &'s ServedPair<'_>,
        drafter: &RecordedDrafter<'_>,
    ) -> Result<Option<StatesServer<'s>>> {
        let ServedPair { workspace, asker, state_layers, .. } = served;
        let parts = &drafter.drafters.get(drafter.id)?.parts.parts;
        if parts.target_layers().kept.is_empty() || state_layers.is_empty() {
            return Ok(None);
        }
        let ends = workspace.models.target_of_adapters(workspace.models.dtype)?;
        let server = (asker.server, state_layers.clone());
        StatesServer::open(server, f32::INFINITY, workspace, ends, self.watch).map(Some)
    }

    fn record_served(
        &self,
        served: &ServedPair<'_>,
        drafter: &RecordedDrafter<'_>,
        states: Option<&StatesServer<'_>>,
        responses: &mut [ResponseToRecord<'_>],
    ) -> Result<Vec<Recording>> {
        let ServedPair { models, workspace, .. } = served;
        let LabelModels { context, vocab_size, .. } = *models;
        let loaded = drafter.drafters.get(drafter.id)?;
        let parts = &loaded.parts.parts;
        let known =
            responses.iter().map(|to| KnownResponse { response: to.response_ids, probs: to.probs });
        let TargetLayers { exit, kept } = parts.target_layers();
        let texts: Vec<StatesText> = match states {
            Some(_) => responses.iter().map(ResponseToRecord::read_text).collect(),
            None => Vec::new(),
        };
        let known_states = states.map(|server| known_states(server, &kept, &texts)).transpose()?;
        let known_states =
            known_states.map(|known| known.into_iter().map(|(known, _)| known).collect());
        let answers = ResponseTarget::new(known, vocab_size, context, responses.len())
            .with_states(known_states.unwrap_or_default());
        let layers = (exit.is_some() || states.is_some())
            .then(|| workspace.models.target_of_adapters(workspace.models.dtype))
            .transpose()?;
        let target = AnsweringTarget { answers, layers, vocab_size };
        let options = self.options(drafter.decoding, loaded.head_timing().is_some(), false);
        self.record_watched(responses, |requests, observe| {
            let task = RecordTask { options: &options, requests, observe };
            Ok(parts.record_elsewhere(target, task).context(NO_STEPS)??)
        })
    }

    /// Calls `record` with requests for `responses`, reports progress, and stops on Ctrl-C.
    fn record_watched<'r>(
        &self,
        responses: &'r mut [ResponseToRecord<'_>],
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
            self.watch.goes_on()
        };
        let recorded = record(requests.collect(), observe)?;
        if recorded.len() < num_responses {
            return Err(Interrupted.into());
        }
        all.finish();
        Ok(recorded)
    }

    /// Answers all turns of the prompts with the target. Each turn follows the answers to the
    /// earlier turns of its conversation.
    ///
    /// # Errors
    /// If a first turn does not fit, the target fails, or the user presses Ctrl-C.
    pub fn answer(&self, prompts: &[SetPrompt], decoding: Decoding) -> Result<Vec<TargetAnswer>> {
        let text = self.models.text();
        let source: Box<dyn Answers + '_> = match &self.models {
            RecordedModels::Pair(pair) => Box::new(OwnTarget {
                responder: Responder {
                    target: &pair.target,
                    context: text.context,
                    decoding,
                    limits: text.limits(self.max_new_tokens),
                    watch: self.watch,
                },
                seed: self.seed,
                stream: vec!["record", DecodingName::of(&decoding).text()],
                progress: self.progress,
                worth: &|_| 1.0,
                keeps_log_probs: false,
            }),
            RecordedModels::Served(ServedPair { workspace, asker, .. }) => {
                let mut served =
                    asker.open(workspace, decoding, self.max_new_tokens, self.watch)?;
                let all = prompts.iter().map(|prompt| Ok(Cow::Borrowed(prompt)));
                ask_servers(&mut served, all, text, self.watch, self.progress)?;
                Box::new(served)
            }
        };
        let on_cpu = self.models.on_cpu();
        let at_once = sequences_at_once(prompts.len(), on_cpu);
        let some = |prompts: &[SetPrompt]| answer_all(&*source, text, prompts);
        let answers: Vec<(Vec<TargetAnswer>, usize)> = match on_cpu {
            true => prompts.par_chunks(at_once).map(some).collect::<Result<_>>()?,
            false => prompts.chunks(at_once).map(some).collect::<Result<_>>()?,
        };
        let (answers, num_ended): (Vec<_>, Vec<usize>) = answers.into_iter().unzip();
        note_ended_by_call("record", num_ended.iter().sum(), self.watch);
        let answers: Vec<TargetAnswer> = answers.into_iter().flatten().collect();
        ensure!(
            !answers.is_empty() || source.num_left_out() == 0,
            "all {} responses are left out, because the servers' content filter stopped them or their text is not what \
             the target wrote; hint: turn the filter off and use a server that returns token ids, or use other prompts",
            source.num_left_out()
        );
        Ok(answers)
    }
}
