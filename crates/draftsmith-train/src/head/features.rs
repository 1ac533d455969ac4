//! The features of labelled positions. They are the frozen draft's hidden states at these
//! positions, or at the positions that their tokens were drawn from, and the head's further inputs.

use std::ops::Range;

use burn::tensor::{Device, Tensor};
use draftsmith_model::{
    CandidateRows, DrafterModel, HeadFeatures, HeadReads, Lengths, Rows, vectors,
};

use crate::head::rows::Mixture;
use crate::run::devices::PerDevice;
use crate::states::StateFile;

/// One mixture's rows in the features of a forward pass.
#[derive(Debug, Clone)]
pub(crate) struct LabelledRows {
    /// The index of the forward pass.
    forward: usize,
    features: HeadFeatures,
    rows: Range<usize>,
}

impl LabelledRows {
    /// Concatenates the features of several mixtures on a device, then pads them to `num_rows` rows
    /// by repeating the last one.
    pub(crate) fn cat(parts: &[Self], num_rows: usize, device: &Device) -> HeadFeatures {
        let mut forwards: Vec<&Self> = Vec::new();
        for part in parts {
            if forwards.iter().all(|other| other.forward != part.forward) {
                forwards.push(part);
            }
        }
        let mut rows = Vec::with_capacity(num_rows);
        for part in parts {
            let before = forwards.iter().take_while(|other| other.forward != part.forward);
            let start: usize = before.map(|other| other.features.hidden.dims()[0]).sum();
            rows.extend(part.rows.clone().map(|row| start + row));
        }
        let last = rows.last().copied();
        rows.extend(last.into_iter().cycle().take(num_rows.saturating_sub(rows.len())));
        let features = forwards.into_iter().map(|part| part.features.clone().to_device(device));
        HeadFeatures::cat(features.collect()).select(&rows)
    }
}

/// The file of a drafter's hidden states at recorded rows and their branches.
pub(crate) struct StoredRounds {
    pub(crate) file: StateFile,
    /// Whether all states were stored before the training, because the target's layers are not here.
    pub(crate) is_given: bool,
}

/// The frozen draft, with the settings of its forward passes.
pub(crate) struct Frozen<'a> {
    pub(crate) drafts: &'a PerDevice<DrafterModel>,
    pub(crate) reads: &'a HeadReads,
    /// The maximum number of rows per forward pass.
    pub(crate) batch_size: usize,
    pub(crate) lengths: Lengths,
    pub(crate) origin: StatesOrigin<'a>,
}

/// Where the drafter's hidden states come from.
#[derive(Clone, Copy)]
pub(crate) enum StatesOrigin<'a> {
    /// The drafter computes them.
    Drafter,
    /// The drafter computes them from the target's hidden states along the only mixture.
    Target(&'a [Vec<f32>]),
    /// They are stored in a file, under the row id of each mixture.
    Stored(&'a StoredRounds, &'a [&'a str]),
}

impl Frozen<'_> {
    /// Computes the features of each mixture's labelled positions, then of its branches.
    ///
    /// Rows without branches go through the draft `batch_size` at a time. They are sorted by length
    /// and padded on the right, which does not affect a causal model. A row with branches, or of an
    /// EAGLE-3 drafter, has a forward to itself, and each branch reads its prefix from the KV cache.
    /// The forwards are distributed over the devices in turn; the rows of a forward do not depend on
    /// the number of devices.
    ///
    /// # Shapes
    /// - output: for each mixture, in the order given, rows of `[labels, hidden]` and `[labels, extra]`,
    ///   on the device that its forward was on
    pub(crate) fn labelled_rows(&self, mixtures: &[Mixture]) -> Vec<LabelledRows> {
        let draft = self.drafts.first();
        let (branching, mut by_length): (Vec<usize>, Vec<usize>) =
            (0..mixtures.len()).partition(|row| has_own_forward(draft, &mixtures[*row]));
        by_length.sort_by_key(|row| mixtures[*row].input_ids.len());
        let forwards: Vec<&[usize]> =
            by_length.chunks(self.batch_size).chain(branching.chunks(1)).collect();
        let num_used = self.drafts.num_devices().min(forwards.len());
        let made = self.drafts.work(num_used, |nth, draft| {
            let forwards_here = (0..forwards.len()).skip(nth).step_by(num_used);
            let run = |forward: usize| {
                let rows = forwards[forward];
                let batch: Vec<&Mixture> = rows.iter().map(|row| &mixtures[*row]).collect();
                let names: Vec<&str>;
                let origin = match self.origin {
                    StatesOrigin::Stored(stored, all) => {
                        names = rows.iter().map(|row| all[*row]).collect();
                        StatesOrigin::Stored(stored, &names)
                    }
                    other => other,
                };
                (forward, self.forward_features(draft, &batch, origin))
            };
            forwards_here.map(run).collect::<Vec<_>>()
        });
        let mut of_mixtures: Vec<Option<LabelledRows>> = vec![None; mixtures.len()];
        for (forward, features) in made.into_iter().flatten() {
            let mut end = 0;
            for row in forwards[forward] {
                let start = end;
                end += mixtures[*row].num_labels();
                let features = features.clone();
                of_mixtures[*row] = Some(LabelledRows { forward, features, rows: start..end });
            }
        }
        of_mixtures.into_iter().map(|rows| rows.expect("every row is in a forward")).collect()
    }

    /// Computes the features of one forward's mixtures, one mixture after another.
    fn forward_features(
        &self,
        draft: &DrafterModel,
        batch: &[&Mixture],
        origin: StatesOrigin<'_>,
    ) -> HeadFeatures {
        let alone = |only: &Mixture, given| {
            let mut candidates = CandidateRows::default();
            push_all(&mut candidates, only, 0);
            (branching_states(draft, only, given), candidates)
        };
        let (hidden, mut candidates) = match (origin, batch) {
            (StatesOrigin::Stored(stored, names), _) => {
                stored_states(draft, stored, names, batch, self.lengths)
            }
            (StatesOrigin::Target(given), [only]) => alone(only, Some(given.to_vec())),
            (_, [only]) if has_own_forward(draft, only) => alone(only, None),
            _ => batch_states(draft, batch, self.batch_size, self.lengths),
        };
        candidates.pad(self.lengths.padded(candidates.num_candidates()));
        draft.head_features(self.reads, hidden, candidates)
    }
}

/// Returns whether a mixture needs a forward of its own.
fn has_own_forward(draft: &DrafterModel, mixture: &Mixture) -> bool {
    draft.drafts_by_round() || !mixture.branches.is_empty()
}

/// Reads the stored hidden states of rows, after computing and storing missing ones. Also returns
/// the labelled positions among them.
fn stored_states(
    draft: &DrafterModel,
    stored: &StoredRounds,
    names: &[&str],
    batch: &[&Mixture],
    lengths: Lengths,
) -> (Tensor<2>, CandidateRows) {
    let (mut all, mut candidates, mut num_rows) = (Vec::new(), CandidateRows::default(), 0);
    for (name, mixture) in names.iter().zip(batch) {
        push_all(&mut candidates, mixture, num_rows);
        let num_tokens = mixture.num_tokens();
        num_rows += num_tokens;
        all.extend(stored.file.read(name).unwrap_or_else(|| match stored.is_given {
            // Training then ends with an error that names the row, because the loss is not finite.
            true => vec![f32::NAN; num_tokens * draft.hidden_size()],
            false => stored.file.store(name, values_of(draft, mixture, None)),
        }));
    }
    (rows_of(all, lengths.padded(num_rows), draft), candidates)
}

/// Computes the hidden states of a mixture and of its branches, without padding.
pub(crate) fn values_of(
    draft: &DrafterModel,
    mixture: &Mixture,
    given: Option<Vec<Vec<f32>>>,
) -> Vec<f32> {
    // On some devices, padding follows the tokens.
    vectors::values(branching_states(draft, mixture, given).slice(0..mixture.num_tokens()))
}

/// Builds a tensor of `num_rows` rows from their values, in the model's type. Missing rows are
/// zeros.
fn rows_of(mut values: Vec<f32>, num_rows: usize, model: &DrafterModel) -> Tensor<2> {
    let width = model.hidden_size();
    values.resize(num_rows * width, 0.0);
    let rows = vectors::tensor(values, [num_rows, width], &model.device());
    rows.cast(model.dtype().float_dtype())
}

/// Computes the hidden states of mixtures without branches as one padded batch. Also returns the
/// labelled positions among them.
fn batch_states(
    draft: &DrafterModel,
    batch: &[&Mixture],
    batch_size: usize,
    lengths: Lengths,
) -> (Tensor<2>, CandidateRows) {
    let mut rows: Vec<&[u32]> = batch.iter().map(|mixture| &mixture.input_ids[..]).collect();
    rows.resize(lengths.padded_batch(rows.len(), batch_size), &[]);
    let hidden = draft.hidden_states(&rows, lengths);
    let [rows, seq, width] = hidden.dims();
    let mut candidates = CandidateRows::default();
    for (row, mixture) in batch.iter().enumerate() {
        push_labelled(&mut candidates, mixture, row * seq);
    }
    (hidden.reshape([rows * seq, width]), candidates)
}

/// Computes the hidden states of a mixture, then those of its branches. `given` is as in
/// [`DrafterModel::round_states`].
fn branching_states(
    draft: &DrafterModel,
    mixture: &Mixture,
    given: Option<Vec<Vec<f32>>>,
) -> Tensor<2> {
    if draft.drafts_by_round() {
        let rounds = mixture.branches.iter().map(|branch| (branch.start, &branch.token_ids[..]));
        let rounds: Vec<(usize, &[u32])> = rounds.collect();
        let states = draft.round_states(&mixture.input_ids, &rounds, given);
        return states.into_tensor(&draft.device()).squeeze_dim(0);
    }
    let longest = mixture.branches.iter().map(|branch| branch.start + branch.token_ids.len());
    let capacity = longest.max().unwrap_or(0).max(mixture.input_ids.len());
    let (mut feature_cache, mut cache) =
        (draft.new_feature_cache(capacity, 1), draft.new_cache(capacity, 1));
    // Reads tokens in place of those from position `start` on.
    let mut read = |ids: &[u32], start: usize| {
        feature_cache.iter_mut().for_each(|cache| cache.truncate(0, start));
        cache.truncate(0, start);
        let features = draft.features(ids, feature_cache.as_mut());
        draft.forward_cached(features, std::iter::once(ids.len()), &mut cache)
    };
    let mut hidden = vec![read(&mixture.input_ids, 0)];
    // Branches are read from the last to the first. A branch overwrites only what follows its start
    // in the cache, so the prefixes of earlier branches remain.
    let branches = mixture.branches.iter().rev();
    let mut of_branches: Vec<Rows> =
        branches.map(|branch| read(&branch.token_ids, branch.start)).collect();
    of_branches.reverse();
    hidden.extend(of_branches);
    Rows::cat(hidden).into_tensor(&draft.device()).squeeze_dim(0)
}

/// Adds the labelled positions of a mixture, whose first token has the row `start`, and then those
/// of its branches, whose rows follow.
fn push_all(candidates: &mut CandidateRows, mixture: &Mixture, start: usize) {
    push_labelled(candidates, mixture, start);
    let mut num_read = start + mixture.input_ids.len();
    for branch in &mixture.branches {
        for (nth, id) in branch.token_ids.iter().enumerate() {
            let before = if nth == 0 { start + branch.start - 1 } else { num_read + nth - 1 };
            candidates.push(*id, num_read + nth, before);
        }
        num_read += branch.token_ids.len();
    }
}

/// Adds the labelled positions of a mixture, whose first token has the row `start`. Each position
/// has a predecessor, because every row has a prompt.
fn push_labelled(candidates: &mut CandidateRows, mixture: &Mixture, start: usize) {
    for at in &mixture.labelled {
        candidates.push(mixture.input_ids[*at], start + at, start + at - 1);
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_model::{DrawnCandidate, HeadForm, HeadInput};
    use draftsmith_theory::{entropy_of_log_probs, log_softmax};

    use super::*;
    use crate::head::rows::{Branch, TrainingRow};
    use crate::head::settings::MixedLabels;
    use crate::tests::pair::{VOCAB_SIZE, deep_target, responses, tiny_draft, tiny_drafters};

    /// Computes the features of each mixture, without padded lengths.
    fn labelled_features(
        drafts: &PerDevice<DrafterModel>,
        reads: &HeadReads,
        mixtures: &[Mixture],
        batch_size: usize,
    ) -> Vec<HeadFeatures> {
        features_in(Lengths::AsGiven, drafts, reads, mixtures, batch_size)
    }

    fn features_in(
        lengths: Lengths,
        drafts: &PerDevice<DrafterModel>,
        reads: &HeadReads,
        mixtures: &[Mixture],
        batch_size: usize,
    ) -> Vec<HeadFeatures> {
        let frozen = Frozen { drafts, reads, batch_size, lengths, origin: StatesOrigin::Drafter };
        let rows = frozen.labelled_rows(mixtures).into_iter();
        let device = drafts.first().device();
        rows.map(|rows| LabelledRows::cat(&[rows], 0, &device)).collect()
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    #[track_caller]
    fn assert_close(found: Vec<f32>, expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.into_iter().zip(expected) {
            // Another batch shape may sum in another order: f32 rounding of numbers near 1.
            assert!((found - expected).abs() < 1e-5, "{found} != {expected}");
        }
    }

    /// Computes the expected features of a labelled position, from the whole row's hidden states and logits.
    fn expected(
        draft: &DrafterModel,
        reads: &HeadReads,
        mixture: &Mixture,
        nth: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let hidden = draft.hidden_states(&[&mixture.input_ids], Lengths::AsGiven);
        let logits = values(draft.logits(&hidden.clone().into()).into_tensor(&draft.device()));
        let (hidden, vocab_size) = (values(hidden), VOCAB_SIZE as usize);
        let at = mixture.labelled[nth];
        let token = mixture.input_ids[at];
        let log_probs = log_softmax(&logits[(at - 1) * vocab_size..at * vocab_size]);
        let candidate = DrawnCandidate {
            entropy: entropy_of_log_probs(&log_probs),
            top_prob: log_probs.iter().copied().fold(f64::NEG_INFINITY, f64::max).exp(),
            log_prob: Some(log_probs[token as usize]),
        };
        let mut extra = Vec::new();
        if reads.looks_ahead() {
            extra = values(draft.embed_ids(&[token]).into_tensor(&draft.device()));
            extra.iter_mut().for_each(|number| *number *= draft.embedding_gain());
        }
        extra.extend(draft.scalars(reads, &candidate));
        let from = if reads.looks_ahead() { at - 1 } else { at };
        (hidden[from * 16..(from + 1) * 16].to_vec(), extra)
    }

    #[test]
    fn features_equal_those_of_single_rows() {
        tiny_drafters(16, 64).iter().for_each(assert_features_equal_those_of_single_rows);
    }

    fn assert_features_equal_those_of_single_rows(draft: &DrafterModel) {
        let mixtures: Vec<Mixture> = responses(9, 20, 8)
            .iter()
            .map(|row| {
                let row = TrainingRow::new(row, 64, MixedLabels::Sampled).unwrap().unwrap();
                row.mixture(2, 1, 0.3)
            })
            .collect();
        use HeadInput::{Entropy, TopProb};
        for form in [HeadForm::Candidate, HeadForm::LookAhead] {
            for inputs in [&[][..], &[TopProb], &[Entropy, TopProb]] {
                let reads = HeadReads::new(form, inputs);
                let drafts: PerDevice<DrafterModel> = draft.clone().into();
                let features = labelled_features(&drafts, &reads, &mixtures, 4);
                let padded = features_in(Lengths::InBuckets, &drafts, &reads, &mixtures, 4);
                assert_eq!((features.len(), padded.len()), (mixtures.len(), mixtures.len()));
                let twice = mixtures.iter().chain(&mixtures);
                for (mixture, features) in twice.zip(features.into_iter().chain(padded)) {
                    let HeadFeatures { hidden, extra } = features;
                    let (own, more): (Vec<_>, Vec<_>) = (0..mixture.labels.len())
                        .map(|nth| expected(draft, &reads, mixture, nth))
                        .unzip();
                    assert_close(values(hidden), &own.concat());
                    assert_eq!(extra.is_none(), reads.is_hidden_only());
                    assert_close(extra.map(values).unwrap_or_default(), &more.concat());
                }
            }
        }
    }

    #[test]
    fn devices_take_turns() {
        let drafts =
            [tiny_draft(16, 64), deep_target(16, 64)].map(|draft| DrafterModel::from(&draft));
        let mixtures: Vec<Mixture> = responses(11, 20, 8)
            .iter()
            .map(|row| {
                let row = TrainingRow::new(row, 64, MixedLabels::Sampled).unwrap().unwrap();
                row.mixture(2, 1, 0.3)
            })
            .collect();
        let reads = HeadReads::new(HeadForm::LookAhead, &[HeadInput::Entropy]);
        let features = |drafts: PerDevice<DrafterModel>| -> Vec<Vec<f32>> {
            let features = labelled_features(&drafts, &reads, &mixtures, 2).into_iter();
            features.map(|of_row| values(of_row.hidden)).collect()
        };
        let [first, second] = drafts.clone().map(|draft| features(draft.into()));
        let found = features(PerDevice::new(drafts.to_vec(), 1).unwrap());
        let mut by_length: Vec<usize> = (0..mixtures.len()).collect();
        by_length.sort_by_key(|row| mixtures[*row].input_ids.len());
        for (nth, row) in by_length.into_iter().enumerate() {
            let expected = if (nth / 2).is_multiple_of(2) { &first } else { &second };
            assert!(found[row] == expected[row], "row {row} was in another forward");
            assert!(first[row] != second[row]);
        }
    }

    #[test]
    fn a_branch_is_read_as_a_continuation_of_its_prefix() {
        tiny_drafters(16, 64).iter().for_each(assert_branch_continues_its_prefix);
    }

    fn assert_branch_continues_its_prefix(draft: &DrafterModel) {
        let trunk = Mixture {
            input_ids: vec![3, 9, 4, 30, 11, 25],
            labelled: vec![2, 5],
            labels: vec![0.25, 0.5],
            branches: Vec::new(),
        };
        let branch = |start, token_ids: &[u32]| Branch {
            start,
            token_ids: token_ids.to_vec(),
            labels: vec![0.75; token_ids.len()],
        };
        let branches = vec![branch(1, &[7, 8, 40]), branch(3, &[7]), branch(6, &[2, 7])];
        let whole = Mixture { branches: branches.clone(), ..trunk.clone() };
        for form in [HeadForm::Candidate, HeadForm::LookAhead] {
            let reads = HeadReads::new(form, &[HeadInput::Entropy, HeadInput::TopProb]);
            let alone = branches.iter().map(|branch| Mixture {
                input_ids: [&trunk.input_ids[..branch.start], &branch.token_ids].concat(),
                labelled: (branch.start..branch.start + branch.token_ids.len()).collect(),
                labels: branch.labels.clone(),
                branches: Vec::new(),
            });
            let alone: Vec<Mixture> = std::iter::once(trunk.clone()).chain(alone).collect();
            let expected =
                HeadFeatures::cat(labelled_features(&draft.clone().into(), &reads, &alone, 1));
            let mixtures = [trunk.clone(), whole.clone()];
            let found = labelled_features(&draft.clone().into(), &reads, &mixtures, 4).remove(1);
            assert_eq!(found.hidden.dims()[0], whole.num_labels());
            assert_close(values(found.hidden), &values(expected.hidden));
            let extra = |features: Option<_>| values::<2>(features.unwrap());
            assert_close(extra(found.extra), &extra(expected.extra));
        }
    }

    #[test]
    fn a_token_outside_the_drafts_vocabulary_is_read_as_token_0() {
        let [draft, _] = &tiny_drafters(16, 64);
        let mixture = |id: u32| Mixture {
            input_ids: vec![3, id, 5],
            labelled: vec![1, 2],
            labels: vec![0.5; 2],
            branches: Vec::new(),
        };
        for form in [HeadForm::Candidate, HeadForm::LookAhead] {
            let reads = HeadReads::new(form, &[HeadInput::Entropy]);
            let [known, unknown] = [0, 1_000_000].map(|id| {
                let features =
                    labelled_features(&draft.clone().into(), &reads, &[mixture(id)], 1).remove(0);
                (values(features.hidden), features.extra.map(values))
            });
            assert_eq!(known, unknown);
        }
    }
}
