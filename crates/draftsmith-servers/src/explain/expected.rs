//! The acceptance that a reading of a drafter has along a server's answers. The drafter is recorded as in
//! `record`, along the target's hidden states, and a fixed number of candidates is replayed.

use anyhow::{Context, Result};
use draftsmith_decode::{
    AnsweringTarget, BlockDraftParts, DraftModelParts, DrafterParts, KeptStates, KnownResponse,
    KnownStates, Limits, ModelSession, RecordOptions, RecordRequest, RecordTask, ResponseTarget,
    StateDraftParts, Target, TargetLayers,
};
use draftsmith_model::{BlockDrafter, CausalLm, Eagle3, Rows};
use draftsmith_recipe::{Interrupted, Watch, Workspace};
use draftsmith_theory::{
    Decoding, DrafterId, FixedLengthConfig, Recording, Recordings, Sampling, SeededDraws, Trace,
    argmax,
};
use rayon::prelude::*;

use super::counts::Expected;
use super::measured::CountedAnswer;
use super::misreadings::{BLOCK, DrafterReading, EAGLE3, MisreadDrafter, add_noise};

/// The number of answers that share a forward.
const AT_ONCE: usize = 8;
/// The gap of logits up to which two tokens count as tied: twice that of two bf16 numbers of the usual size.
const TIE: f32 = 0.5;
/// What the target gives along an answer.
pub(super) struct Along {
    /// The tokens that have states: all but the last one.
    ids: Vec<u32>,
    /// The states by the number of layers before them.
    layers: Vec<(usize, Rows)>,
    /// The positions of the answer whose token is not the target's most probable one.
    pub(super) others: Vec<usize>,
}

impl Along {
    /// Runs the target along an answer, and keeps its states after these layers.
    ///
    /// # Errors
    /// If the answer does not fit.
    pub(super) fn of(target: &CausalLm, layers: &[usize], answer: &CountedAnswer) -> Result<Self> {
        let CountedAnswer { prompt_ids, ids, .. } = answer;
        let text = [&prompt_ids[..], ids].concat();
        let read = &text[..text.len() - 1];
        let mut session = ModelSession::with_slots(target, text.len(), 1, "target");
        session.set_layers(&TargetLayers::kept(layers));
        let logits = session.score(read, prompt_ids.len() - 1)?;
        session.begin_round(0, text.len());
        let states = match layers {
            [] => Vec::new(),
            _ => session.kept_states(0, &text, 0, layers),
        };
        let others = others(logits.rows(), ids);
        Ok(Self {
            ids: read.to_vec(),
            layers: layers.iter().copied().zip(states).collect(),
            others,
        })
    }

    /// Takes states that servers gave, with the target's last one after its norm, from the prompt's last
    /// token on.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn of_served(
        ends: &CausalLm,
        layers: Vec<(usize, Rows)>,
        last: Vec<f32>,
        answer: &CountedAnswer,
    ) -> Result<Self> {
        let text = [&answer.prompt_ids[..], &answer.ids].concat();
        let normed = Rows::of_host(last, ends.shape().hidden_size);
        let [logits] = Rows::to_host([ends.logits(&normed)])?;
        let others = others(logits.chunks_exact(ends.shape().vocab_size), &answer.ids);
        Ok(Self { ids: text[..text.len() - 1].to_vec(), layers, others })
    }

    /// Returns the states that a reading takes for those of the drafter's layers; `None` if one of them
    /// is not known.
    fn read_by(
        &self,
        reading: &DrafterReading,
        drafter: &MisreadDrafter,
    ) -> Option<KnownStates<'_>> {
        let of = |(own, read): (&usize, &usize)| {
            let (_, states) = self.layers.iter().find(|(number, _)| number == read)?;
            let states = match reading.reads_behind {
                true => {
                    let before = states.slice(0..states.num_rows() - 1);
                    Rows::cat([states.slice(0..1), before])
                }
                false => states.clone(),
            };
            Some((*own, with_noise(states, reading.noise)))
        };
        let layers = drafter.layers.iter().zip(&reading.layers).map(of).collect::<Option<_>>()?;
        Some(KnownStates { ids: &self.ids, layers })
    }
}

/// Lists the positions whose token is clearly not the most probable one.
fn others<'l>(rows: impl Iterator<Item = &'l [f32]>, ids: &[u32]) -> Vec<usize> {
    let pairs = rows.zip(ids).enumerate();
    let is_other = |(_, (row, id)): &(usize, (&[f32], &u32))| {
        row[argmax(row) as usize] - row[**id as usize] > TIE
    };
    pairs.filter(is_other).map(|(at, _)| at).collect()
}

/// Adds random errors to states.
fn with_noise(states: Rows, noise: f32) -> Rows {
    if noise == 0.0 {
        return states;
    }
    let num_rows = states.num_rows();
    let [mut values] = Rows::to_host([states]).expect("known states are in host memory");
    add_noise(&mut values, noise);
    let width = values.len() / num_rows;
    Rows::of_host(values, width)
}

/// Computes expected acceptance along a server's answers.
pub(super) struct Expecting<'a> {
    pub(super) workspace: &'a Workspace,
    /// The target, or its ends.
    pub(super) ends: &'a CausalLm,
    pub(super) drafter: &'a MisreadDrafter,
    pub(super) answers: &'a [CountedAnswer],
    pub(super) along: &'a [Along],
    /// The most candidates of a recorded round.
    pub(super) max_length: usize,
    pub(super) watch: &'a dyn Watch,
}

impl Expecting<'_> {
    /// Records a reading of the drafter along the answers; `None` if it reads states that are not known.
    ///
    /// # Errors
    /// If the drafter cannot be read, or an answer does not fit.
    pub(super) fn recordings(
        &self,
        reading: &DrafterReading,
        seed: u64,
    ) -> Result<Option<Recordings>> {
        let parts = self.load(reading)?;
        let record =
            |(answers, along): (&[CountedAnswer], &[Along])| -> Result<Option<Vec<Recording>>> {
                let states = along.iter().map(|along| along.read_by(reading, self.drafter));
                let Some(states) = states.collect::<Option<Vec<_>>>() else { return Ok(None) };
                let known =
                    answers.iter().map(|it| KnownResponse { response: &it.ids, probs: None });
                let (vocab_size, num) = (self.ends.shape().vocab_size, answers.len());
                let context = self.ends.shape().context;
                let target = AnsweringTarget {
                    answers: ResponseTarget::new(known, vocab_size, context, num)
                        .with_states(states),
                    layers: Some(self.ends),
                    vocab_size,
                };
                let longest = answers.iter().map(|it| it.ids.len()).max().unwrap_or(0);
                let options = RecordOptions {
                    decoding: match reading.is_drawn {
                        true => Decoding::sampled(Sampling::default()),
                        false => Decoding::GREEDY,
                    },
                    // Servers verify candidates beyond the limit, so it ends no round here.
                    limits: Limits::new(longest + self.max_length + 1, Vec::new()),
                    max_length: self.max_length,
                    has_head: false,
                    labels: false,
                    is_target_here: false,
                };
                let mut draws: Vec<SeededDraws> = (0..num)
                    .map(|nth| SeededDraws::new(seed, &["explain", &nth.to_string()]))
                    .collect();
                let requests = answers.iter().zip(&mut draws).map(|(answer, draws)| {
                    RecordRequest { prompt: &answer.prompt_ids, response: &answer.ids, draws }
                });
                let requests = requests.collect();
                let observe = &mut |_| self.watch.goes_on();
                let task = RecordTask { options: &options, requests, observe };
                let recorded = parts.record_elsewhere(target, task);
                let recorded =
                    recorded.context("such a drafter cannot be recorded without its target")??;
                if recorded.len() < num { Err(Interrupted.into()) } else { Ok(Some(recorded)) }
            };
        let chunks = self.answers.par_chunks(AT_ONCE).zip(self.along.par_chunks(AT_ONCE));
        let recorded: Vec<Option<Vec<Recording>>> = chunks.map(record).collect::<Result<_>>()?;
        let responses = recorded.into_iter().collect::<Option<Vec<_>>>();
        Ok(responses.map(|responses| Recordings {
            drafter: DrafterId::DRAFT,
            max_length: self.max_length,
            eos_token_ids: Vec::new(),
            head: None,
            responses: responses.concat(),
            answers: None,
        }))
    }

    /// Loads the parts of a drafter as a reading has them.
    fn load(&self, reading: &DrafterReading) -> Result<Box<dyn DrafterParts>> {
        let (models, target) = (&self.workspace.models, self.ends.shape());
        let (dir, device) = (reading.dir.clone(), models.device());
        Ok(match self.drafter.kind {
            EAGLE3 => {
                let (config, network) = Eagle3::from_dir(dir, target, models.dtype, device)?;
                let (network, layers) = (network.with_faults(reading.faults), config.target_layers);
                Box::new(StateDraftParts { network, layers, head: None })
            }
            BLOCK => {
                let (config, network) = BlockDrafter::from_dir(dir, target, models.dtype, device)?;
                let (network, layers) = (network.with_faults(reading.faults), config.target_layers);
                Box::new(BlockDraftParts { network, layers })
            }
            _ => {
                let model = CausalLm::load(&dir, models.dtype, None, device)?;
                let model = model.with_faults(reading.faults);
                Box::new(DraftModelParts { model, head: None })
            }
        })
    }
}

/// Replays rounds of a fixed number of candidates after each answer's first token.
///
/// # Errors
/// If fewer candidates were recorded.
pub(super) fn replayed(recordings: &Recordings, num_candidates: usize) -> Result<Vec<Expected>> {
    let candidate_length = num_candidates.min(recordings.max_length);
    let rule = FixedLengthConfig { candidate_length }.into();
    let of_answer = |recording: &Recording| {
        let responses = vec![recording.clone()];
        let one = Recordings { responses, ..recordings.clone() }.after_first_token();
        let Trace { rounds, num_tokens, .. } = one.trace(&rule)?;
        let accepted = rounds.iter().map(|round| round.num_accepted);
        Ok(Expected::of_rounds(accepted, num_tokens, candidate_length))
    };
    recordings.responses.iter().map(of_answer).collect()
}
