//! A training step and a validation batch of EAGLE-3.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor, TensorData};
use draftsmith_model::{DraftVocabulary, Eagle3, Lengths};

use super::scores::{Eagle3Scores, Eagle3Tally};
use crate::adapter::batches::{AdapterBatch, at_positions};
use crate::adapter::distillation::{DistillationLoss, Lesson, LossAndGradients, Student, Tokens};
use crate::data::{TrainingBatch, padding_mask};
use crate::error::{Section, TrainError, to_host};
use crate::run::member::{Score, Trainee};

/// A drafter with the settings of its steps. The target is not part of it.
#[derive(Module, Debug)]
pub(crate) struct Eagle3Learner {
    pub(crate) drafter: Eagle3,
    /// The indices in [`AdapterBatch::features`] of the states that it reads.
    #[module(skip)]
    pub(crate) states: Vec<usize>,
    #[module(skip)]
    pub(crate) vocabulary: Option<DraftVocabulary>,
    #[module(skip)]
    pub(crate) num_steps: usize,
    #[module(skip)]
    pub(crate) step_weight: f64,
    #[module(skip)]
    pub(crate) loss: DistillationLoss,
    #[module(skip)]
    pub(crate) loss_chunk: usize,
}

/// The supervised tokens of one unrolled step.
struct Step {
    student: Student,
    teacher: Lesson,
    tokens: Tokens,
    /// The number of them in each row.
    num_in_rows: Vec<usize>,
    /// Where they are among the supervised tokens of the first step.
    places: Vec<usize>,
}

/// What validation computes for a batch.
pub(crate) struct Eagle3Output {
    /// The sums of the first step: see
    /// [`LmHead::score_sums`](crate::adapter::distillation::LmHead::score_sums).
    sums: Tensor<1>,
    /// For each step, the most probable token of each supervised position.
    drafted: Vec<Tensor<1, Int>>,
    /// For each step and row, the response's tokens there, counted as the drafter counts them; `None` for one
    /// that it cannot draft.
    wanted: Vec<Vec<Vec<Option<usize>>>>,
}

impl Eagle3Learner {
    /// The steps that have a supervised token. Position p of the batch's rows predicts token p + 1, as everywhere;
    /// the drafter's position for it is p − 1, where the target's states were before token p was known.
    fn steps(&self, batch: &AdapterBatch) -> Vec<Step> {
        let dtype = batch.features[0].dtype();
        let drafter = self.drafter.to_dtype(dtype.into());
        let [_, seq] = batch.ids.dims();
        let states = self.states.iter();
        let states = states.map(|nth| batch.features[*nth].clone().narrow(1, 0, seq - 1));
        let features = drafter.of_states(Tensor::cat(states.collect(), 2));
        let embedded = match drafter.own_embedding(batch.ids.clone().narrow(1, 1, seq - 1)) {
            Some(embedded) => embedded,
            None => {
                let all = batch.embedded.clone().expect("a batch for EAGLE-3 has embeddings");
                all.narrow(1, 1, seq - 1)
            }
        };
        let outputs = drafter.unrolled(embedded, features, self.num_steps);
        let own_head = drafter.own_head();
        let steps = outputs.into_iter().enumerate();
        let steps = steps.map(|(step, outputs)| step_of(batch, step, outputs, own_head.clone()));
        steps.take_while(|step| step.tokens.num > 0).collect()
    }
}

/// The supervised tokens of a step, numbered from 0: at each row but for the first `step`, since a round begins
/// at the first supervised position at the earliest.
fn step_of(
    batch: &AdapterBatch,
    step: usize,
    outputs: Tensor<3>,
    own_head: Option<Tensor<2>>,
) -> Step {
    let [_, seq, _] = outputs.dims();
    let (mut positions, mut places, mut num_in_rows) = (Vec::new(), Vec::new(), Vec::new());
    let mut place = 0;
    for (row, wanted) in batch.wanted.iter().enumerate() {
        let num = wanted.len().saturating_sub(step);
        num_in_rows.push(num);
        let first = row * seq + wanted.start + step;
        positions.extend((first..first + num).map(|position| position as i32 - 1));
        places.extend(place + step..place + step + num);
        place += wanted.len();
    }
    let num = places.len();
    let is_padded = batch.tokens.are.is_some();
    let lengths = if is_padded { Lengths::InBuckets } else { Lengths::AsGiven };
    let device = batch.features[0].device();
    let mut padded = places.clone();
    if num > 0 {
        padded.resize(lengths.padded(num), places[num - 1]);
        positions.resize(lengths.padded(num), positions[num - 1]);
    }
    let positions = Tensor::<1, Int>::from_data(TensorData::from(positions.as_slice()), &device);
    let are = padding_mask(num, lengths, &device).map(|are| are.unsqueeze_dim(1));
    Step {
        student: Student { hidden: at_positions(outputs, positions), own_head },
        teacher: batch.teacher.select(&padded),
        tokens: Tokens { num, are },
        num_in_rows,
        places,
    }
}

impl Trainee for Eagle3Learner {
    type Content = AdapterBatch;
    type Part = Eagle3;
    type Output = Eagle3Output;
    type Tally = Eagle3Tally;
    type Scores = Eagle3Scores;

    const FROZEN: &'static str = "target";
    const SCORES: &'static [Score<Eagle3Scores>] = &[
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

    fn section(&self) -> Section {
        Section::Eagle3
    }

    fn part(self) -> Eagle3 {
        self.drafter
    }

    /// The loss is Σ wᵏ · (sum of step k over its tokens) over the number of the first step's tokens.
    fn train_step(&self, batch: &TrainingBatch<AdapterBatch>) -> (Tensor<1>, GradientsParams) {
        let TrainingBatch { content, step_share, .. } = batch;
        let steps = self.steps(content);
        let num_first = steps.first().map_or(1, |step| step.tokens.num);
        let mut loss_sum: Option<Tensor<1>> = None;
        let mut to_differentiate: Option<Tensor<1>> = None;
        let mut head_gradient: Option<Tensor<2>> = None;
        let mut own_head = None;
        for (nth, step) in steps.into_iter().enumerate() {
            let Step { student, teacher, tokens, .. } = step;
            let weight = self.step_weight.powi(nth as i32) * tokens.num as f64 / num_first as f64;
            let LossAndGradients { loss, hidden, own_head: of_head } =
                content.lm_head.loss_and_gradients(
                    self.loss,
                    student.without_autodiff(),
                    teacher,
                    &tokens,
                    self.loss_chunk,
                );
            let loss = loss * weight;
            loss_sum = Some(loss_sum.map_or(loss.clone(), |sum| sum + loss));
            // The gradient of Σ student ∘ g with respect to the student is g.
            let term = (student.hidden * (hidden * (weight * step_share))).sum();
            to_differentiate = Some(to_differentiate.map_or(term.clone(), |sum| sum + term));
            if let Some(gradient) = of_head {
                let gradient = gradient * (weight * step_share);
                head_gradient = Some(head_gradient.map_or(gradient.clone(), |sum| sum + gradient));
            }
            own_head = student.own_head;
        }
        let mut sum = to_differentiate.expect("a batch has a supervised token");
        if let (Some(head), Some(gradient)) = (own_head, head_gradient) {
            let gradient = gradient.cast(head.dtype());
            sum = sum + (head * gradient).sum();
        }
        let loss = loss_sum.expect("a batch has a supervised token");
        (loss, GradientsParams::from_grads(sum.backward(), self))
    }

    fn validation_step(&self, batch: &TrainingBatch<AdapterBatch>) -> Eagle3Output {
        let content = &batch.content;
        let steps = self.valid().steps(content);
        let head = &content.lm_head;
        let number = |id: u32| match &self.vocabulary {
            Some(vocabulary) => vocabulary.ids().binary_search(&id).ok(),
            None => Some(id as usize),
        };
        let first = &steps[0];
        let sums = head.score_sums(
            first.student.clone(),
            first.teacher.clone(),
            &first.tokens,
            self.loss_chunk,
        );
        let (mut drafted, mut wanted) = (Vec::new(), Vec::new());
        for step in steps {
            drafted.push(head.most_probable(step.student, self.loss_chunk));
            let mut ids = step.places.iter().map(|place| number(content.next_ids[*place]));
            let rows = step.num_in_rows.iter().map(|num| ids.by_ref().take(*num).collect());
            wanted.push(rows.collect());
        }
        Eagle3Output { sums, drafted, wanted }
    }

    fn tally(&self) -> Eagle3Tally {
        Eagle3Tally::default()
    }

    /// The shown loss is the cross-entropy of the first step.
    fn count(output: Eagle3Output, tally: &mut Eagle3Tally) -> Result<Option<f64>, TrainError> {
        let Eagle3Output { sums, drafted, wanted } = output;
        let sums = to_host(sums)?;
        let num_rows = wanted.first().map_or(0, Vec::len);
        let mut rows: Vec<Vec<Vec<bool>>> = vec![Vec::new(); num_rows];
        for (drafted, wanted) in drafted.into_iter().zip(wanted) {
            let mut drafted = to_host(drafted.float())?.into_iter();
            for (row, wanted) in rows.iter_mut().zip(wanted) {
                let pairs = wanted.into_iter().zip(drafted.by_ref());
                row.push(pairs.map(|(id, own)| id == Some(own as usize)).collect());
            }
        }
        let num_tokens: usize = rows.iter().filter_map(|row| row.first()).map(Vec::len).sum();
        tally.cross_entropy += f64::from(sums[0]);
        tally.overlap += f64::from(sums[3]);
        tally.add(&rows);
        let is_finite = sums.iter().all(|sum| sum.is_finite());
        Ok(is_finite.then(|| f64::from(sums[0]) / num_tokens as f64))
    }

    fn scores(tally: Eagle3Tally) -> Eagle3Scores {
        tally.scores()
    }

    fn to_minimise(&self, scores: &Eagle3Scores) -> f64 {
        -scores.accepted_length
    }
}
