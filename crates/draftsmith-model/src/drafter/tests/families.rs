//! Heads on drafts and self-drafts of every family: they read the hidden state that the LM head
//! reads, and predict the same while decoding as in training, on packed weights and on tensors.

use super::*;
use crate::acceptance_head::{
    AcceptanceHead, AcceptanceHeadConfig, DrawnCandidate, HeadForm, HeadInput, HeadReads,
};
use crate::fixtures::{FIXTURES, expected, load};

/// The number of tokens before the first candidate.
const NUM_BEFORE: usize = 6;

/// A drafter with packed weights, and the same with tensors.
type Both = [DrafterModel; 2];

/// A fixture's model as a draft.
fn drafts(name: &str) -> Both {
    let model = load(name);
    [(&model).into(), (&model.to_tensors()).into()]
}

/// A self-draft of it, whose adapter was written and read back packed.
fn self_drafts(name: &str) -> Both {
    let (target, dir) = (load(name), tempfile::tempdir().expect("a temporary directory"));
    let config = AdapterConfig::new(target.config(), EXIT_LAYER)
        .expect("a valid exit layer")
        .with(|it| it.architecture = AdapterArchitecture::DecoderLayer);
    let drawn = config.init(&Device::flex());
    drawn.write_dir(dir.path(), &config).expect("written");
    let read = Adapter::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex());
    let (_, read) = read.expect("reads");
    let on_tensors = target.to_tensors();
    [(target, read), (on_tensors, drawn)]
        .map(|(target, adapter)| DrafterModel::self_draft(target, adapter, EXIT_LAYER))
}

/// Equal up to the order of sums, through three layers.
#[track_caller]
fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1.0_f32, |most, x| most.max(x.abs()));
    let off = found.iter().zip(expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(off <= 1e-4 * scale, "{what}: off by {off} of {scale}");
}

/// The LM head's input after each token, from the last one before the candidates on, and its
/// logits: the prompt in one forward, then a token per forward, as in decoding.
fn steps(drafter: &DrafterModel, ids: &[u32]) -> Vec<(Rows, Vec<f32>)> {
    let len = ids.len();
    let (mut features, mut cache) = (drafter.new_feature_cache(len, 1), drafter.new_cache(len, 1));
    let mut read = 0;
    let step = |end: usize| {
        let new = drafter.features(&ids[read..end], features.as_mut());
        read = end;
        let normed = drafter.forward_cached(new, std::iter::once(1), &mut cache);
        let [logits] = Rows::to_host([drafter.logits(&normed)]).expect("brought");
        (normed, logits)
    };
    (NUM_BEFORE..=len).map(step).collect()
}

#[test]
fn a_head_reads_the_same_hidden_state_as_the_lm_head() {
    for name in FIXTURES {
        let expected = expected(name);
        let (normed, ids) =
            (expected.hidden_states.last().expect("there are layers"), &expected.ids);
        for drafter in drafts(name) {
            assert_near(&values(drafter.hidden_states(&[ids], Lengths::AsGiven)), normed, name);
            let (width, vocab) = (drafter.hidden_size(), drafter.vocab_size());
            for (at, (read, logits)) in (NUM_BEFORE - 1..).zip(steps(&drafter, ids)) {
                let [read] = Rows::to_host([read]).expect("brought");
                assert_near(&read, &normed[at * width..][..width], name);
                assert_near(&logits, &expected.logits[at * vocab..][..vocab], name);
            }
        }
    }
}

/// A token as a candidate drawn from the distribution of `logits`.
fn drawn(logits: &[f32], token: u32) -> DrawnCandidate {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted: Vec<f64> = logits.iter().map(|logit| f64::from(logit - largest)).collect();
    let log_sum = shifted.iter().map(|x| x.exp()).sum::<f64>().ln();
    let log_probs: Vec<f64> = shifted.iter().map(|x| x - log_sum).collect();
    DrawnCandidate {
        entropy: -log_probs.iter().map(|x| x.exp() * x).sum::<f64>(),
        top_prob: (-log_sum).exp(),
        log_prob: Some(log_probs[token as usize]),
    }
}

/// A head's predictions while drafting.
fn while_decoding(drafter: &DrafterModel, head: &AcceptanceHead, ids: &[u32]) -> Vec<f32> {
    let (reads, steps) = (head.reads(), steps(drafter, ids));
    let predict = |(position, pair): (usize, &[(Rows, Vec<f32>)])| {
        let [(drawn_from, logits), (own, _)] = pair else { panic!("windows of two") };
        let token = ids[NUM_BEFORE + position];
        let scalars: Vec<f32> = drafter.scalars(reads, &drawn(logits, token)).collect();
        let of_embedding =
            reads.looks_ahead().then(|| head.of_embedding(&drafter.embed_ids(&[token])));
        let hidden = if reads.looks_ahead() { drawn_from } else { own };
        let logit = head.acceptance_logits(hidden, of_embedding.as_ref(), &scalars);
        let [logit] = Rows::to_host([logit]).expect("brought");
        logit[0]
    };
    steps.windows(2).enumerate().map(predict).collect()
}

/// The same predictions in training, from one pass over the sequence.
fn in_training(drafter: &DrafterModel, head: &AcceptanceHead, ids: &[u32]) -> Vec<f32> {
    let mut candidates = CandidateRows::default();
    for (at, token) in ids.iter().enumerate().skip(NUM_BEFORE) {
        candidates.push(*token, at, at - 1);
    }
    let hidden = drafter.hidden_states(&[ids], Lengths::AsGiven).squeeze_dim::<2>(0);
    values(head.acceptance_logit(drafter.head_features(head.reads(), hidden, candidates)))
}

#[test]
fn a_head_predicts_the_same_in_decoding_and_training_for_every_family() {
    use HeadInput::{Entropy, TopProb};
    let device = Device::flex();
    let inputs: [&[HeadInput]; 2] = [&[], &[Entropy, TopProb]];
    let forms = [HeadForm::Candidate, HeadForm::LookAhead];
    let all_reads = forms.map(|form| inputs.map(|inputs| HeadReads::new(form, inputs)));
    for name in FIXTURES {
        let ids = expected(name).ids;
        for both in [drafts(name), self_drafts(name)] {
            for reads in all_reads.as_flattened() {
                let width = both[0].hidden_size();
                let config = AcceptanceHeadConfig::new(width, 2, true).with_reads(reads.clone());
                let trained = config.init(&device);
                // The export is for unscaled embeddings.
                let exported = trained.clone().with_embedding_gain(both[0].embedding_gain());
                let dir = tempfile::tempdir().expect("a temporary directory");
                exported.write_dir(dir.path(), &config).expect("written");
                let (_, packed) =
                    AcceptanceHead::from_dir(dir.path(), width, &device).expect("reads");
                let expected = in_training(&both[1], &trained, &ids);
                let (least, most) =
                    expected.iter().fold((f32::MAX, f32::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
                assert!(most - least > 0.01, "{name}: a head that reads nothing says {least}");
                let what = format!("{name}, {reads:?}");
                assert_near(&in_training(&both[0], &trained, &ids), &expected, &what);
                for (drafter, head) in both.iter().zip([&packed, &exported]) {
                    assert_near(&while_decoding(drafter, head, &ids), &expected, &what);
                }
            }
        }
    }
}
