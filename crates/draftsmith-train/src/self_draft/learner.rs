//! The learner of a self-draft: its training and validation steps.

use std::ops::Range;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use draftsmith_model::{StateNetwork, UnrolledInputs};

use super::StateTraining;
use super::scores::{DraftTally, LessonScores};
use super::settings::SelfDraftTraining;
use crate::data::TrainingBatch;
use crate::error::{Result, Section, to_host};
use crate::lessons::batches::LessonBatch;
use crate::lessons::distillation::{Student, StudentStep, heads_of_steps};
use crate::lessons::settings::LessonSettings;
use crate::run::member::{Score, Trainee};

/// A drafter with the settings of its steps. The target is not part of it.
#[derive(Module, Debug)]
pub(crate) struct StateLearner<N: StateNetwork, S: StateTraining> {
    pub(crate) drafter: N,
    /// The indices in [`LessonBatch::features`] of the hidden states that the drafter reads.
    #[module(skip)]
    pub(crate) states: Vec<usize>,
    #[module(skip)]
    pub(crate) training: SelfDraftTraining<S>,
}

/// The outputs of a validation step for one batch.
pub(crate) struct DraftOutput {
    /// The score sums of the first step: see
    /// [`LmHead::score_sums`](crate::lessons::distillation::LmHead::score_sums).
    sums: Tensor<1>,
    num_tokens: usize,
    /// For each step, the most probable token of each supervised position.
    drafted: Vec<Tensor<1, Int>>,
    /// For each row, the tokens of the response that the supervised positions predict, as in
    /// [`LessonBatch::next_ids`].
    wanted: Vec<Vec<Option<u32>>>,
}

impl<N: StateNetwork, S: StateTraining<Network = N>> StateLearner<N, S> {
    /// Computes the LM head's inputs at the supervised positions in each step. Also returns the LM
    /// head that reads them, unless it is the target's. Position p of the batch's rows predicts token
    /// p + 1. A drafter that reads tokens makes this prediction at its position p − 1, from the target's
    /// hidden states at p − 1 and the embedding of token p.
    fn outputs(&self, batch: &LessonBatch) -> (Vec<Tensor<2>>, Option<Tensor<2>>) {
        let drafter = self.drafter.to_dtype(batch.features[0].dtype().into());
        let ([_, seq], ahead) = (batch.ids.dims(), usize::from(S::READS_TOKENS));
        let states = self.states.iter();
        let states = states.map(|nth| batch.features[*nth].clone().narrow(1, 0, seq - ahead));
        let next_ids = batch.ids.clone().narrow(1, ahead, seq - ahead);
        let embedded = drafter
            .own_embedding(next_ids.clone())
            .or_else(|| batch.embedded.clone().map(|all| all.narrow(1, ahead, seq - ahead)));
        let begun = batch.wanted.iter().map(|wanted| match wanted.is_empty() {
            true => 0..0,
            false => wanted.start - ahead..wanted.end - ahead,
        });
        let begun: Vec<Range<usize>> = begun.collect();
        let outputs = drafter.unrolled(UnrolledInputs {
            states: states.collect(),
            next_ids,
            embedded,
            begun: &begun,
            num_steps: self.training.steps().0,
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

impl<N: StateNetwork, S: StateTraining<Network = N>> Trainee for StateLearner<N, S> {
    type Content = LessonBatch;
    type Part = N;
    type Output = DraftOutput;
    type Tally = DraftTally;
    type Scores = S::Scores;

    const SECTION: Section = N::KIND;
    const FROZEN: &'static str = "target";
    const SCORES: &'static [Score<S::Scores>] = S::Scores::SCORES;

    fn part(self) -> N {
        self.drafter
    }

    /// Computes the loss Σₖ wᵏ · (sum of the token losses of step k) / (number of tokens in the
    /// first step), where w is the step weight, and the gradients.
    fn train_step(&self, batch: &TrainingBatch<LessonBatch>) -> (Tensor<1>, GradientsParams) {
        let LessonSettings { loss, loss_chunk, .. } = self.training.common;
        let (_, step_weight) = self.training.steps();
        let TrainingBatch { content, step_share, .. } = batch;
        let (outputs, own_head) = self.outputs(content);
        let steps = outputs.iter().enumerate().map(|(nth, outputs)| StudentStep {
            hidden: outputs.clone().without_autodiff(),
            are: content.are_supervised(nth),
            share: step_weight.powi(nth as i32) / content.tokens.num as f64,
        });
        let found = content.lm_head.loss_and_gradients(
            loss,
            &steps.collect::<Vec<_>>(),
            own_head.clone().map(Tensor::without_autodiff),
            &content.teacher,
            loss_chunk,
        );
        let loss = found.loss.clone();
        (loss, found.backward(self, outputs, own_head, *step_share))
    }

    fn validation_step(&self, batch: &TrainingBatch<LessonBatch>) -> DraftOutput {
        let content = &batch.content;
        let (outputs, own_head) = self.valid().outputs(content);
        let (head, loss_chunk) = (&content.lm_head, self.training.common.loss_chunk);
        let own_heads = heads_of_steps(own_head, &outputs[0]).into_iter().cycle();
        let students = outputs.into_iter().zip(own_heads);
        let students = students.map(|(hidden, own_head)| Student { hidden, own_head });
        let students: Vec<Student> = students.collect();
        let (tokens, teacher) = (&content.tokens, &content.teacher);
        let sums = head.score_sums(students[0].clone(), teacher, tokens, loss_chunk);
        let drafted = students.into_iter().filter(|_| S::Scores::READS_STEPS);
        let drafted = drafted.map(|student| head.most_probable(student, loss_chunk));
        let mut ids = content.next_ids.iter().copied();
        let wanted = content.wanted.iter().map(|row| ids.by_ref().take(row.len()).collect());
        let (drafted, wanted) = (drafted.collect(), wanted.collect());
        DraftOutput { sums, num_tokens: tokens.num, drafted, wanted }
    }

    fn tally(&self) -> DraftTally {
        DraftTally::default()
    }

    /// Adds a batch to the tally, and returns the mean cross-entropy of the first step as the batch's loss.
    fn count(output: DraftOutput, tally: &mut DraftTally) -> Result<Option<f64>> {
        let DraftOutput { sums, num_tokens, drafted, wanted } = output;
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
        for (total, sum) in tally.sums.iter_mut().zip(&sums) {
            *total += f64::from(*sum);
        }
        tally.num_tokens += num_tokens;
        tally.add(&rows);
        let is_finite = sums.iter().all(|sum| sum.is_finite());
        Ok(is_finite.then(|| f64::from(sums[0]) / num_tokens as f64))
    }

    fn scores(tally: DraftTally) -> S::Scores {
        S::Scores::of(tally)
    }

    fn to_minimise(&self, scores: &S::Scores) -> f64 {
        scores.to_minimise(self.training.common.loss)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::activation::{log_softmax, softmax};
    use draftsmith_model::{AdapterArchitecture, AdapterConfig, CausalLm, Lengths, WeightDtype};

    use super::*;
    use crate::adapter::AdapterTraining;
    use crate::data::BatchSource;
    use crate::lessons::Teaching;
    use crate::lessons::batches::{FrozenTarget, LessonSource};
    use crate::lessons::distillation::Lesson;
    use crate::lessons::rows::LessonRow;
    use crate::lessons::settings::InitialWeights;
    use crate::medusa::MedusaTraining;
    use crate::tests::pair::{gradients_of, responses, tiny_draft};

    #[test]
    fn chunked_gradients_equal_those_of_the_whole_loss() {
        for architecture in AdapterArchitecture::ALL {
            for lengths in [Lengths::AsGiven, Lengths::InBuckets] {
                check_gradients(architecture, 1, lengths);
            }
        }
        check_gradients(AdapterArchitecture::DecoderLayer, 3, Lengths::AsGiven);
    }

    /// Lessons of a target, for a drafter that reads the state after `layer` layers.
    fn lessons(
        target: &CausalLm,
        (layer, reads_tokens): (usize, bool),
        lengths: Lengths,
    ) -> LessonSource {
        let row = |row| {
            LessonRow::new(row, usize::from(reads_tokens), 64).expect("it is long enough").into()
        };
        LessonSource {
            targets: FrozenTarget::new(target.clone(), None).into(),
            exit_layers: vec![layer],
            reads_tokens,
            rows: responses(6, 20, 5).iter().map(row).collect(),
            batch_size: 7,
            lengths,
            room: Arc::default(),
            stored: None,
            teaching: Teaching::Target,
        }
    }

    #[test]
    fn each_step_has_the_gradients_of_its_own_lm_head_and_weight() {
        let target = tiny_draft(16, 64);
        let num_layers = target.shape().num_layers;
        let mut training = MedusaTraining::default();
        (training.num_heads, training.step_weight) = (3, 0.5);
        training.common.initial = InitialWeights::Random;
        for lengths in [Lengths::AsGiven, Lengths::InBuckets] {
            let config = training.config(target.config(), WeightDtype::F32, None).unwrap();
            let drafter = training.network(&config, &target, 3);
            let mut learner = StateLearner { drafter, states: vec![0], training: training.clone() };
            let source = lessons(&target, (num_layers, true), lengths);
            for step in source.step_batches(1, &[(0..6).collect::<Vec<_>>()]) {
                let batch = &step.content;
                let Lesson::States(teacher) = batch.teacher.clone() else {
                    panic!("the teacher has states")
                };
                let taught = target.lm_head(teacher.unsqueeze()).squeeze_dim::<2>(0);
                let taught = softmax(taught, 1);
                let (outputs, all) = learner.outputs(batch);
                let all = all.expect("heads have LM heads");
                let losses = outputs.into_iter().enumerate().map(|(nth, hidden)| {
                    let logits = hidden.matmul(all.clone().narrow(0, nth * 16, 16));
                    let losses = (log_softmax(logits, 1) * taught.clone()).sum_dim(1).neg();
                    let share = 0.5_f64.powi(nth as i32) / batch.tokens.num as f64;
                    match batch.are_supervised(nth) {
                        Some(are) => (losses * are).sum() * share,
                        None => losses.sum() * share,
                    }
                });
                let direct = losses.reduce(|sum, more| sum + more).expect("there are steps");
                let expected = (direct.clone() * step.step_share).backward();
                let expected = GradientsParams::from_grads(expected, &learner);
                let expected = gradients_of(&learner, &expected);
                let direct: f32 = direct.into_scalar();
                for loss_chunk in [5, 1000] {
                    learner.training.common.loss_chunk = loss_chunk;
                    let (loss, gradients) = learner.train_step(&step);
                    let loss: f32 = loss.into_scalar();
                    // f32 sums in another order.
                    assert!((loss - direct).abs() < 1e-5, "{loss} {direct}");
                    let found = gradients_of(&learner, &gradients);
                    assert_eq!(found.len(), 3 * (16 * 16 + 16 + 16 * target.shape().vocab_size));
                    for (found, expected) in found.iter().zip(&expected) {
                        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
                    }
                }
            }
        }
    }

    fn check_gradients(architecture: AdapterArchitecture, num_layers: usize, lengths: Lengths) {
        let target = tiny_draft(16, 64);
        let source = lessons(&target, (1, false), lengths);
        let config = AdapterConfig::new(target.config(), 1).unwrap();
        let config = config.with(|it| it.architecture = architecture).with_layers(num_layers);
        let training = AdapterTraining::default().with(|it| it.common.loss_chunk = 7);
        let drafter = config.init(&target.device().autodiff());
        let mut learner = StateLearner { drafter, states: vec![0], training };
        let batches: Vec<TrainingBatch<LessonBatch>> =
            source.step_batches(1, &[(0..6).collect::<Vec<_>>()]).collect();
        assert_eq!(batches.len(), if lengths == Lengths::AsGiven { 2 } else { 1 });
        assert!((batches.iter().map(|batch| batch.step_share).sum::<f64>() - 1.0).abs() < 1e-12);
        for step in &batches {
            let batch = &step.content;
            let is_padded = lengths == Lengths::InBuckets;
            assert_eq!(batch.features[0].dims()[0], if is_padded { 7 } else { 3 });
            let (hidden, own_head) = learner.outputs(batch);
            assert_eq!(hidden[0].dims()[0] > batch.tokens.num, is_padded);
            let hidden = hidden[0].clone().slice(0..batch.tokens.num);
            let head = own_head.unwrap_or_else(|| target.lm_head_weight());
            let log_probs = log_softmax(hidden.matmul(head), 1);
            let Lesson::States(teacher) = batch.teacher.clone() else {
                panic!("the teacher has states")
            };
            let teacher = teacher.slice(0..batch.tokens.num);
            let logits = target.lm_head(teacher.unsqueeze()).squeeze_dim::<2>(0);
            let num_tokens = batch.tokens.num as f64;
            assert!(num_tokens > 16.0, "too few tokens");
            let direct = (log_probs * softmax(logits, 1)).sum().neg() / num_tokens;
            let expected = direct.clone() * step.step_share;
            let expected = GradientsParams::from_grads(expected.backward(), &learner);
            let expected = gradients_of(&learner, &expected);
            let direct: f32 = direct.into_scalar();
            let largest = expected.iter().fold(0.0_f32, |most, grad| most.max(grad.abs()));
            assert!(largest > 1e-3, "the gradients are too small to compare: {largest}");
            for loss_chunk in [1, 7, 1000] {
                learner.training.common.loss_chunk = loss_chunk;
                let (loss, gradients) = learner.train_step(step);
                let loss: f32 = loss.into_scalar();
                // f32 sums in another order.
                assert!((loss - direct).abs() < 1e-5, "{loss} {direct}");
                for (found, expected) in gradients_of(&learner, &gradients).iter().zip(&expected) {
                    assert!((found - expected).abs() < 1e-5, "{found} {expected}");
                }
            }
        }
    }
}
