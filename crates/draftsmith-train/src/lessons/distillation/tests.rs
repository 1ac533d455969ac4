//! Tests of both implementations of every loss against autodiff.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, TensorData};
use draftsmith_theory::SeededDraws;

use super::*;
use crate::tests::pair::tiny_draft;

const HIDDEN: usize = 16;
const LOSSES: [DistillationLoss; 3] =
    [DistillationLoss::CrossEntropy, DistillationLoss::TotalVariation, DistillationLoss::Dspark];

fn random(num_tokens: usize, width: usize, purpose: &str) -> Tensor<2> {
    let mut draws = SeededDraws::new(3, &[purpose]);
    let values: Vec<f32> =
        (0..num_tokens * width).map(|_| 4.0 * draws.uniform() as f32 - 2.0).collect();
    Tensor::from_data(TensorData::new(values, [num_tokens, width]), &Device::flex())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().unwrap()
}

/// A student that uses the target's LM head.
fn headless(hidden: Tensor<2>) -> Student {
    Student { hidden, own_head: None }
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        // f32 sums in another order, of numbers near 1.
        assert!((a - b).abs() < 1e-5, "{a} for {b}");
    }
}

/// The mean loss by its definition, with autodiff.
fn direct(loss: DistillationLoss, student: Tensor<2>, teacher: Tensor<2>) -> Tensor<1> {
    let (log_q, log_p) = (log_softmax(student, 1), log_softmax(teacher, 1));
    let (q, p) = (log_q.clone().exp(), log_p.exp());
    let [num_tokens, _] = q.dims();
    let cross_entropy = (p.clone() * log_q).sum().neg();
    let distance = (p - q).abs().sum();
    let sum = match loss {
        DistillationLoss::CrossEntropy => cross_entropy,
        DistillationLoss::TotalVariation => distance / 2.0,
        DistillationLoss::Dspark => cross_entropy * 0.1 + distance * 0.9,
    };
    sum / num_tokens as f64
}

/// The mean loss of one step over its tokens.
fn one_step(
    head: &LmHead,
    loss: DistillationLoss,
    student: Student,
    teacher: Tensor<2>,
    tokens: &LessonTokens,
    loss_chunk: usize,
) -> LossAndGradients {
    let share = 1.0 / tokens.num as f64;
    let step = StudentStep { hidden: student.hidden, are: tokens.are.clone(), share };
    head.loss_and_gradients(loss, &[step], student.own_head, &Lesson::States(teacher), loss_chunk)
}

fn states(teacher: &Tensor<2>) -> Lesson {
    Lesson::States(teacher.clone())
}

/// Tokens without padding.
fn all(teacher: &Tensor<2>) -> LessonTokens {
    LessonTokens { num: teacher.dims()[0], are: None }
}

#[test]
fn padding_does_not_change_the_result() {
    let head = LmHead::of(&tiny_draft(HIDDEN, 64));
    let (student, teacher) = (random(16, HIDDEN, "student"), random(16, HIDDEN, "teacher"));
    let own_head = Some(random(HIDDEN, head.weight.dims()[1], "own") * 0.3);
    let first = |x: &Tensor<2>| x.clone().slice([0..11, 0..HIDDEN]);
    let of = |hidden| Student { hidden, own_head: own_head.clone() };
    let are: Vec<f32> = (0..16).map(|token| if token < 11 { 1.0 } else { 0.0 }).collect();
    let are = Tensor::<1>::from_floats(are.as_slice(), &Device::flex()).unsqueeze_dim(1);
    let padded = LessonTokens { num: 11, are: Some(are) };
    let none = LessonTokens { num: 11, are: None };
    for loss in LOSSES {
        for loss_chunk in [4, 16] {
            let found =
                one_step(&head, loss, of(student.clone()), teacher.clone(), &padded, loss_chunk);
            let expected =
                one_step(&head, loss, of(first(&student)), first(&teacher), &none, loss_chunk);
            assert_close(&values(found.loss), &values(expected.loss));
            let [found_hidden, expected_hidden] =
                [&found.hidden, &expected.hidden].map(|hidden| values(hidden[0].clone()));
            assert_close(&found_hidden[..11 * HIDDEN], &expected_hidden);
            assert!(found_hidden[11 * HIDDEN..].iter().all(|x| *x == 0.0));
            let [found, expected] =
                [found.own_head, expected.own_head].map(|own| values(own.unwrap()));
            assert_close(&found, &expected);
        }
    }
    let found = values(head.score_sums(of(student.clone()), &states(&teacher), &padded, 4));
    let expected =
        values(head.score_sums(of(first(&student)), &states(&first(&teacher)), &none, 4));
    for (found, expected) in found.iter().zip(&expected) {
        // Sums over eleven tokens.
        assert!((found - expected).abs() < 1e-4, "{found} for {expected}");
    }
}

#[test]
fn logits_equal_those_of_the_target() {
    let target = tiny_draft(HIDDEN, 64);
    let hidden = random(40, HIDDEN, "hidden");
    let expected = target.lm_head(hidden.clone().unsqueeze()).squeeze_dim::<2>(0);
    let found = hidden.matmul(LmHead::of(&target).weight);
    assert_close(&values(found), &values(expected));
}

#[test]
fn value_and_gradient_equal_autodiff_for_every_chunk_size() {
    let head = LmHead::of(&tiny_draft(HIDDEN, 64));
    for soft_cap in [None, Some(0.8)] {
        assert_equals_autodiff(&LmHead { soft_cap, ..head.clone() });
    }
}

fn assert_equals_autodiff(head: &LmHead) {
    let (student, teacher) = (random(23, HIDDEN, "student"), random(23, HIDDEN, "teacher"));
    for loss in LOSSES {
        let leaf = student.clone().autodiff().require_grad();
        let logits =
            |hidden: Tensor<2>| soft_capped(hidden.matmul(head.weight.clone()), head.soft_cap);
        let expected = direct(loss, logits(leaf.clone()), logits(teacher.clone()));
        let gradient = leaf.grad(&expected.backward()).unwrap();
        // The gradients must be large enough to compare.
        assert!(gradient.clone().abs().max().into_scalar::<f32>() > 1e-3, "{loss:?}");
        for loss_chunk in [1, 2, 7, 22, 23, 24, usize::MAX] {
            let student = headless(student.clone());
            let found = one_step(head, loss, student, teacher.clone(), &all(&teacher), loss_chunk);
            assert_close(&values(found.loss), &values(expected.clone()));
            assert_close(&values(found.hidden[0].clone()), &values(gradient.clone()));
            assert!(found.own_head.is_none());
        }
    }
}

#[test]
fn the_gradient_of_a_separate_head_equals_autodiff() {
    let head = LmHead::of(&tiny_draft(HIDDEN, 64));
    for soft_cap in [None, Some(1.5)] {
        let students_soft_cap = soft_cap;
        assert_separate_head_equals_autodiff(&LmHead {
            soft_cap,
            students_soft_cap,
            ..head.clone()
        });
    }
}

fn assert_separate_head_equals_autodiff(head: &LmHead) {
    let [_, vocab_size] = head.weight.dims();
    let (student, teacher) = (random(23, HIDDEN, "student"), random(23, HIDDEN, "teacher"));
    let own_head = random(HIDDEN, vocab_size, "own") * 0.3;
    for loss in LOSSES {
        let leaves = [student.clone(), own_head.clone()].map(|leaf| leaf.autodiff().require_grad());
        let [hidden, own] = leaves.clone();
        let logits = soft_capped(hidden.matmul(own), head.soft_cap);
        let targets = soft_capped(teacher.clone().matmul(head.weight.clone()), head.soft_cap);
        let expected = direct(loss, logits, targets);
        let grads = expected.backward();
        let [of_hidden, of_head] = leaves.map(|leaf| leaf.grad(&grads).unwrap());
        assert!(of_head.clone().abs().max().into_scalar::<f32>() > 1e-3, "{loss:?}");
        for loss_chunk in [1, 7, 23] {
            let student = Student { hidden: student.clone(), own_head: Some(own_head.clone()) };
            let found = one_step(head, loss, student, teacher.clone(), &all(&teacher), loss_chunk);
            assert_close(&values(found.loss), &values(expected.clone()));
            assert_close(&values(found.hidden[0].clone()), &values(of_hidden.clone()));
            assert_close(&values(found.own_head.unwrap()), &values(of_head.clone()));
        }
    }
    // A copy of the target's head has the same scores as no separate head.
    let [own, none] = [Some(head.weight.clone()), None].map(|own_head| {
        let student = Student { hidden: student.clone(), own_head };
        values(head.score_sums(student, &states(&teacher), &all(&teacher), 7))
    });
    assert_eq!(own, none);
}

#[test]
fn both_implementations_agree() {
    // Sizes with complete chunks, with a rest, and with only a rest.
    for vocab_size in [64, 61, 5] {
        let logits = random(9, vocab_size, "student") * 3.0;
        let target = random(9, vocab_size, "teacher") * 3.0;
        for loss in LOSSES {
            let (expected, expected_gradient) = on_device::losses_and_gradient(
                loss,
                logits.clone(),
                on_device::probabilities(target.clone()),
            );
            let mut found_gradient = values(logits.clone());
            let teacher = on_host::probabilities(values(target.clone()), vocab_size);
            let shares = [1.0; 9];
            let found = on_host::loss_and_gradient(loss, &mut found_gradient, &teacher, &shares);
            // Sums over nine tokens.
            assert!((found as f32 - expected.sum().into_scalar::<f32>()).abs() < 1e-4, "{loss:?}");
            assert_close(&found_gradient, &values(expected_gradient));
        }
        let expected = values(on_device::score_sums(logits.clone(), target.clone(), None));
        let found = on_host::score_sums(values(logits), values(target), vocab_size, &[1.0; 9]);
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((found as f32 - expected).abs() < 1e-4, "{found} for {expected}");
        }
    }
}

#[test]
fn a_student_equal_to_the_teacher_has_no_gradient() {
    let head = LmHead::of(&tiny_draft(HIDDEN, 64));
    let teacher = random(9, HIDDEN, "teacher");
    let sums =
        values(head.score_sums(headless(teacher.clone()), &states(&teacher), &all(&teacher), 4));
    for loss in LOSSES {
        let student = headless(teacher.clone());
        let found = one_step(&head, loss, student, teacher.clone(), &all(&teacher), 4);
        assert_close(&values(found.hidden[0].clone()), &[0.0; 9 * HIDDEN]);
        let entropy = loss.weights()[0] * sums[1] / 9.0;
        assert_close(&values(found.loss), &[entropy]);
    }
    assert_close(&[sums[0], sums[2], sums[3]], &[sums[1], 9.0, 9.0]);
}

#[test]
fn total_variation_between_equal_distributions_has_gradient_zero() {
    for vocab_size in [64, 61] {
        let logits = random(3, vocab_size, "both") * 5.0;
        let loss = DistillationLoss::TotalVariation;
        let (losses, gradient) = on_device::losses_and_gradient(
            loss,
            logits.clone(),
            on_device::probabilities(logits.clone()),
        );
        assert_eq!((values(losses), values(gradient)), (vec![0.0; 3], vec![0.0; 3 * vocab_size]));
        let teacher = on_host::probabilities(values(logits.clone()), vocab_size);
        let mut gradient = values(logits);
        let found = on_host::loss_and_gradient(loss, &mut gradient, &teacher, &[1.0; 3]);
        assert_eq!(found, 0.0);
        assert_eq!(gradient, vec![0.0; 3 * vocab_size]);
    }
}

#[test]
fn score_sums_equal_the_definition_for_every_chunk_size() {
    let head = LmHead::of(&tiny_draft(HIDDEN, 64));
    let (student, teacher) = (random(12, HIDDEN, "student"), random(12, HIDDEN, "teacher"));
    let probs = |hidden: &Tensor<2>| {
        values(log_softmax(hidden.clone().matmul(head.weight.clone()), 1).exp())
    };
    let (q, p) = (probs(&student), probs(&teacher));
    let vocab = q.len() / 12;
    let largest = |row: &[f32]| (0..vocab).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
    let mut expected = [0.0_f32; NUM_SCORES];
    for (q, p) in q.chunks(vocab).zip(p.chunks(vocab)) {
        for (q, p) in q.iter().zip(p) {
            expected[0] -= p * q.ln();
            expected[1] -= p * p.ln();
            expected[3] += p.min(*q);
        }
        expected[2] += f32::from(largest(q) == largest(p));
    }
    for loss_chunk in [1, 5, 12] {
        let student = headless(student.clone());
        let sums = values(head.score_sums(student, &states(&teacher), &all(&teacher), loss_chunk));
        for (found, expected) in sums.iter().zip(expected) {
            // Sums over twelve tokens.
            assert!((found - expected).abs() < 1e-4, "{sums:?} for {expected:?}");
        }
    }
}

#[test]
fn distant_distributions_have_finite_losses_and_nan_logits_do_not() {
    let head = LmHead::of(&tiny_draft(HIDDEN, 64));
    let (student, teacher) =
        (random(5, HIDDEN, "student") * 1e3, random(5, HIDDEN, "teacher") * 1e3);
    for loss in LOSSES {
        let whole = headless(student.clone());
        let found = one_step(&head, loss, whole, teacher.clone(), &all(&teacher), 2);
        assert!(found.loss.into_scalar::<f32>().is_finite(), "{loss:?}");
        assert!(values(found.hidden[0].clone()).iter().all(|x| x.is_finite()), "{loss:?}");
        let broken = headless(student.clone() * f32::NAN);
        let found = one_step(&head, loss, broken, teacher.clone(), &all(&teacher), 2);
        assert!(!found.loss.into_scalar::<f32>().is_finite(), "{loss:?}");
    }
    let sums = values(head.score_sums(headless(student), &states(&teacher), &all(&teacher), 2));
    assert!(sums.iter().all(|x| x.is_finite()), "{sums:?}");
}
