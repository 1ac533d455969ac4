//! The training and validation steps of a drafter that reads the target's hidden states.

use std::ops::Range;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use draftsmith_model::{StateNetwork, UnrolledInputs};

use super::scores::{DraftScores, DraftTally};
use super::settings::Eagle3Training;
use crate::data::TrainingBatch;
use crate::error::{Section, TrainError, to_host};
use crate::lessons::batches::LessonBatch;
use crate::lessons::distillation::Student;
use crate::run::member::{Score, Trainee};
use crate::self_draft::loss_and_gradients;

/// A drafter with the settings of its steps. The target is not part of it.
#[derive(Module, Debug)]
pub(crate) struct StateLearner<N: StateNetwork> {
    pub(crate) drafter: N,
    /// The indices in [`LessonBatch::features`] of the hidden states that the drafter reads.
    #[module(skip)]
    pub(crate) states: Vec<usize>,
    #[module(skip)]
    pub(crate) training: Eagle3Training,
}

/// The outputs of a validation step for one batch.
pub(crate) struct DraftOutput {
    /// The score sums of the first step: see
    /// [`LmHead::score_sums`](crate::lessons::distillation::LmHead::score_sums).
    sums: Tensor<1>,
    /// For each step, the most probable token of each supervised position.
    drafted: Vec<Tensor<1, Int>>,
    /// For each row, the tokens of the response that the supervised positions predict, as in
    /// [`LessonBatch::next_ids`].
    wanted: Vec<Vec<Option<u32>>>,
}

impl<N: StateNetwork> StateLearner<N> {
    /// Computes the LM head's inputs at the supervised positions in each step. Also returns the LM
    /// head that reads them, unless it is the target's. Position p of the batch's rows predicts token p + 1.
    /// The drafter makes this prediction at its position p − 1, from the target's hidden states at
    /// p − 1 and the embedding of token p.
    fn outputs(&self, batch: &LessonBatch) -> (Vec<Tensor<2>>, Option<Tensor<2>>) {
        let drafter = self.drafter.to_dtype(batch.features[0].dtype().into());
        let [_, seq] = batch.ids.dims();
        let states = self.states.iter();
        let states = states.map(|nth| batch.features[*nth].clone().narrow(1, 0, seq - 1));
        let next_ids = batch.ids.clone().narrow(1, 1, seq - 1);
        let embedded = match drafter.own_embedding(next_ids.clone()) {
            Some(embedded) => embedded,
            None => {
                let all = batch.embedded.clone().expect("the batch has embeddings");
                all.narrow(1, 1, seq - 1)
            }
        };
        let begun = batch.wanted.iter().map(|wanted| match wanted.is_empty() {
            true => 0..0,
            false => wanted.start - 1..wanted.end - 1,
        });
        let begun: Vec<Range<usize>> = begun.collect();
        let outputs = drafter.unrolled(UnrolledInputs {
            states: states.collect(),
            next_ids,
            embedded,
            begun: &begun,
            num_steps: self.training.num_steps,
            lengths: batch.lengths,
        });
        let own_head = match drafter.more_head() {
            Some(more) => {
                let head = drafter.own_head().unwrap_or_else(|| batch.lm_head.weight());
                Some(Tensor::cat(vec![head, more], 0))
            }
            None => drafter.own_head(),
        };
        (outputs, own_head)
    }
}

impl<N: StateNetwork> Trainee for StateLearner<N> {
    type Content = LessonBatch;
    type Part = N;
    type Output = DraftOutput;
    type Tally = DraftTally;
    type Scores = DraftScores;

    const SECTION: Section = N::KIND;
    const FROZEN: &'static str = "target";
    const SCORES: &'static [Score<DraftScores>] = &[
        Score {
            name: "accepted length",
            higher_is_better: true,
            pick: |scores| scores.accepted_length,
        },
        Score {
            name: "agreement",
            higher_is_better: true,
            pick: |scores| scores.agreement.first(),
        },
        Score {
            name: "cross-entropy",
            higher_is_better: false,
            pick: |scores| scores.cross_entropy,
        },
        Score { name: "overlap", higher_is_better: true, pick: |scores| scores.overlap },
    ];

    fn part(self) -> N {
        self.drafter
    }

    fn train_step(&self, batch: &TrainingBatch<LessonBatch>) -> (Tensor<1>, GradientsParams) {
        let Eagle3Training { step_weight, loss, loss_chunk, .. } = self.training;
        let outputs = self.outputs(&batch.content);
        loss_and_gradients(self, batch, outputs, step_weight, (loss, loss_chunk))
    }

    fn validation_step(&self, batch: &TrainingBatch<LessonBatch>) -> DraftOutput {
        let content = &batch.content;
        let (outputs, own_head) = self.valid().outputs(content);
        let head = &content.lm_head;
        let student =
            |hidden: &Tensor<2>| Student { hidden: hidden.clone(), own_head: own_head.clone() };
        let (tokens, teacher) = (&content.tokens, &content.teacher);
        let sums = head.score_sums(student(&outputs[0]), teacher, tokens, self.training.loss_chunk);
        let drafted = outputs
            .iter()
            .map(|outputs| head.most_probable(student(outputs), self.training.loss_chunk));
        let mut ids = content.next_ids.iter().copied();
        let wanted = content.wanted.iter().map(|row| ids.by_ref().take(row.len()).collect());
        DraftOutput { sums, drafted: drafted.collect(), wanted: wanted.collect() }
    }

    fn tally(&self) -> DraftTally {
        DraftTally::default()
    }

    /// Adds a batch to the tally, and returns the mean cross-entropy of the first step as the batch's loss.
    fn count(output: DraftOutput, tally: &mut DraftTally) -> Result<Option<f64>, TrainError> {
        let DraftOutput { sums, drafted, wanted } = output;
        let sums = to_host(sums)?;
        let mut rows: Vec<Vec<Vec<bool>>> = vec![Vec::new(); wanted.len()];
        for (step, drafted) in drafted.into_iter().enumerate() {
            let mut drafted = to_host(drafted.float())?.into_iter();
            for (row, wanted) in rows.iter_mut().zip(&wanted) {
                let pairs = wanted.iter().zip(drafted.by_ref());
                let are_equal = pairs.map(|(id, own)| *id == Some(own as u32));
                row.push(are_equal.skip(step).collect());
            }
        }
        let num_tokens: usize = wanted.iter().map(Vec::len).sum();
        tally.cross_entropy += f64::from(sums[0]);
        tally.overlap += f64::from(sums[3]);
        tally.add(&rows);
        let is_finite = sums.iter().all(|sum| sum.is_finite());
        Ok(is_finite.then(|| f64::from(sums[0]) / num_tokens as f64))
    }

    fn scores(tally: DraftTally) -> DraftScores {
        tally.scores()
    }

    fn to_minimise(&self, scores: &DraftScores) -> f64 {
        -scores.accepted_length
    }
}
