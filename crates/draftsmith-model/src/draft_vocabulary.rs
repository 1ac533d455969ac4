//! The subset of the target's tokens that a drafter may draw.
//!
//! A small drafter spends much of a step on its LM head: after two layers of SmolLM2-135M the LM
//! head has 28 M of the 35 M weights. Most tokens are rare, so an LM head for the frequent ones
//! loses little (FR-Spec, Zhao et al. 2025; EAGLE-3's `d2t`, Li et al. 2025). Other tokens get
//! probability exactly 0, so verification needs no change.
//!
//! The token set is part of a drafter's identity in rollouts and tuned rules.

use std::collections::BTreeSet;
use std::sync::Arc;

use burn::tensor::{Int, Tensor};

use crate::causal_lm::CausalLm;
use crate::decoder::few_rows::{self, with_contiguous_columns};
use crate::decoder::kernels::Kernels;
use crate::decoder::soft_capped;
use crate::error::{ModelError, Result};
use crate::frozen::PackableLinear;
use crate::packed::{self, PackedWeights};
use crate::rows::{HostRows, Rows};
use crate::weights::WeightReader;

/// The name of the tensor that lists the tokens as 64-bit integers, and of an adapter's key for the
/// number of tokens.
pub(crate) const DRAFT_VOCABULARY: &str = "draft_vocabulary";

/// The tensor with the offsets of a draft vocabulary in published drafters.
pub(crate) const OFFSETS: &str = "d2t";
/// A mask of the same tokens, which some files also contain.
pub(crate) const MASK: &str = "t2d";

/// The logit of a token that is never drawn. Softmax turns it into exactly 0 at any temperature,
/// and sums with it do not become NaN.
const NEVER: f32 = -1e30;

/// The tokens that a drafter may draw. Clones share the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftVocabulary {
    /// The token ids, in the order of the LM head's rows.
    ids: Arc<[u32]>,
    /// The indices of `ids`, by rising id.
    by_id: Arc<[u32]>,
}

impl DraftVocabulary {
    /// Builds a vocabulary of these tokens.
    ///
    /// # Panics
    /// If `ids` is empty or has a token twice.
    pub fn new(ids: impl Into<Arc<[u32]>>) -> Self {
        let ids: Arc<[u32]> = ids.into();
        let mut by_id: Vec<u32> = (0..ids.len() as u32).collect();
        by_id.sort_unstable_by_key(|at| ids[*at as usize]);
        let mut pairs = by_id.windows(2);
        let is_distinct = pairs.all(|pair| ids[pair[0] as usize] < ids[pair[1] as usize]);
        assert!(!ids.is_empty() && is_distinct, "a list of different tokens");
        Self { ids, by_id: by_id.into() }
    }

    /// Selects the `size` tokens with the highest counts (ties go to the smaller id). All tokens of
    /// `always` are included. The result is smaller if fewer tokens have a count.
    ///
    /// # Panics
    /// If no token qualifies, or `size` is 0.
    pub fn most_frequent(counts: &[u64], size: usize, always: &[u32]) -> Self {
        let mut ids: Vec<u32> = (0..counts.len() as u32).collect();
        ids.retain(|id| counts[*id as usize] > 0 || always.contains(id));
        ids.sort_by_key(|id| (!always.contains(id), std::cmp::Reverse(counts[*id as usize]), *id));
        ids.truncate(size.max(1));
        ids.sort_unstable();
        Self::new(ids)
    }

    /// Adds the tokens of `other` that this vocabulary lacks.
    #[must_use]
    pub fn with_tokens_of(&self, other: &Self) -> Self {
        let added = other.ids.iter().filter(|id| !self.contains(**id));
        Self::new(self.ids.iter().chain(added).copied().collect::<Vec<u32>>())
    }

    /// Returns the token ids, in the order of the LM head's rows.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns a token's index in the vocabulary, from 0; `None` if the token is not in it.
    pub fn number_of(&self, id: u32) -> Option<u32> {
        let at = self.by_id.binary_search_by_key(&id, |at| self.ids[*at as usize]).ok()?;
        Some(self.by_id[at])
    }

    /// Returns whether a token is in the vocabulary.
    pub fn contains(&self, id: u32) -> bool {
        self.number_of(id).is_some()
    }

    /// Reads the vocabulary of `len` tokens from a file's tensor.
    ///
    /// # Errors
    /// If it is missing, has another length, or is not a rising list of ids below `vocab_size`.
    pub(crate) fn take(reader: &mut WeightReader, len: usize, vocab_size: usize) -> Result<Self> {
        let ids = reader.take_ids(DRAFT_VOCABULARY, len, vocab_size)?;
        if ids.is_empty() || !ids.is_sorted_by(|a, b| a < b) {
            let problem = format!("tensor `{DRAFT_VOCABULARY}` has ids that do not rise");
            return Err(ModelError::safetensors(&reader.path, problem));
        }
        Ok(Self::new(ids))
    }

    /// Lists each token's id minus its index, the content of the tensor [`OFFSETS`].
    pub(crate) fn offsets(&self) -> Vec<i64> {
        (0..).zip(&*self.ids).map(|(at, id)| i64::from(*id) - at).collect()
    }

    /// Returns whether the mask of the same file, if it has one, names the same tokens.
    fn agrees_with_mask(&self, reader: &mut WeightReader, vocab_size: usize) -> Result<bool> {
        if reader.shape(MASK).is_none() {
            return Ok(true);
        }
        let mask = reader.take_integers(MASK, vocab_size)?;
        let masked = (0..).zip(mask).filter(|(_, is_drafted)| *is_drafted != 0).map(|(id, _)| id);
        Ok(masked.eq(self.by_id.iter().map(|at| self.ids[*at as usize])))
    }

    /// Reads the vocabulary of `size` tokens from the tensor [`OFFSETS`], which may list the tokens
    /// in any order.
    ///
    /// # Errors
    /// If the tensor is missing, has another length, does not give different ids below `vocab_size`,
    /// or names other tokens than the tensor [`MASK`] of the same file. The error comes with whether the tensor has ids in place of offsets.
    pub(crate) fn take_offsets(
        reader: &mut WeightReader,
        size: usize,
        vocab_size: usize,
    ) -> Result<Self, (bool, ModelError)> {
        let offsets = reader.take_integers(OFFSETS, size).map_err(|error| (false, error))?;
        let tokens = |ids: &mut dyn Iterator<Item = i64>| -> Option<Vec<u32>> {
            let known = |id: i64| u32::try_from(id).ok().filter(|id| (*id as usize) < vocab_size);
            let ids = ids.map(known).collect::<Option<Vec<u32>>>()?;
            let is_distinct = ids.iter().collect::<BTreeSet<_>>().len() == ids.len();
            (is_distinct && !ids.is_empty()).then_some(ids)
        };
        let mut added = (0..).zip(&offsets).map(|(at, offset)| offset.saturating_add(at));
        if let Some(ids) = tokens(&mut added) {
            let vocabulary = Self::new(ids);
            return match vocabulary.agrees_with_mask(reader, vocab_size) {
                Ok(true) => Ok(vocabulary),
                Ok(false) => {
                    let problem = format!("tensors `{OFFSETS}` and `{MASK}` name different tokens");
                    Err((false, ModelError::safetensors(&reader.path, problem)))
                }
                Err(error) => Err((false, error)),
            };
        }
        let are_ids = tokens(&mut offsets.iter().copied()).is_some_and(|ids| ids.is_sorted());
        let problem = match are_ids {
            true => format!("tensor `{OFFSETS}` has the target's ids, where offsets belong"),
            false => format!(
                "tensor `{OFFSETS}` has offsets that do not lead to different target ids below {vocab_size}"
            ),
        };
        Err((are_ids, ModelError::safetensors(&reader.path, problem)))
    }

    /// Computes the fraction of counted tokens that are in the vocabulary; 1 if no token was
    /// counted. `counts[id]` is the count of a token.
    pub fn coverage(&self, counts: &[u64]) -> f64 {
        let all: u64 = counts.iter().sum();
        let covered: u64 = self.ids.iter().filter_map(|id| counts.get(*id as usize)).sum();
        if all == 0 { 1.0 } else { covered as f64 / all as f64 }
    }
}

/// An LM head that has only the rows of a draft vocabulary.
#[derive(Debug, Clone)]
pub(crate) struct NarrowHead {
    pub(crate) vocabulary: DraftVocabulary,
    weight: NarrowWeight,
    logit_soft_cap: Option<f32>,
    /// The number of logits in the output, one per token of the target.
    vocab_size: usize,
}

#[derive(Debug, Clone)]
enum NarrowWeight {
    Packed(Arc<PackedWeights>),
    /// The weights as a tensor, `[hidden, tokens]`.
    Tensor(Box<Tensor<2>>),
}

impl NarrowWeight {
    fn of(weight: Tensor<2>) -> Self {
        let weight = match Kernels::on(&weight.device()) {
            Some(_) => with_contiguous_columns(weight),
            None => weight,
        };
        Self::Tensor(Box::new(weight))
    }
}

impl NarrowHead {
    /// Selects the rows of `model`'s LM head that belong to `vocabulary`.
    pub(crate) fn of(model: &CausalLm, vocabulary: DraftVocabulary) -> Self {
        let weight = match model.packed_lm_head() {
            Some(head) => NarrowWeight::Packed(Arc::new(head.select_outputs(vocabulary.ids()))),
            None => NarrowWeight::of(narrowed(model.lm_head_weight(), &vocabulary)),
        };
        Self {
            weight,
            vocabulary,
            logit_soft_cap: model.config().spec.logit_soft_cap,
            vocab_size: model.shape().vocab_size,
        }
    }

    /// Wraps a drafter's own LM head, whose outputs are the tokens of `vocabulary`; all tokens if it
    /// is `None`.
    pub(crate) fn of_own(
        head: &PackableLinear,
        vocabulary: Option<&DraftVocabulary>,
        vocab_size: usize,
    ) -> Self {
        let weight = match &head.packed {
            Some(packed) => NarrowWeight::Packed(packed.clone()),
            None => NarrowWeight::of(head.weight.val()),
        };
        let all = || DraftVocabulary::new((0..vocab_size as u32).collect::<Vec<u32>>());
        let vocabulary = vocabulary.cloned().unwrap_or_else(all);
        Self { weight, vocabulary, logit_soft_cap: None, vocab_size }
    }

    /// Computes logits of all tokens of the model. Tokens outside the vocabulary get a logit that
    /// is never drawn.
    ///
    /// # Shapes
    /// - normed: the LM head's input, one row per token
    /// - output: `[rows, vocab]`
    pub(crate) fn logits(&self, normed: &Rows) -> Rows {
        match &self.weight {
            NarrowWeight::Packed(weight) => {
                let rows = normed.place.host();
                let narrow = packed::logits(weight, &rows.values, self.logit_soft_cap);
                let num_rows = rows.values.len() / rows.width;
                let mut values = vec![NEVER; num_rows * self.vocab_size];
                let wide = values.chunks_exact_mut(self.vocab_size);
                for (wide, narrow) in wide.zip(narrow.chunks_exact(self.vocabulary.ids.len())) {
                    for (id, logit) in self.vocabulary.ids.iter().zip(narrow) {
                        wide[*id as usize] = *logit;
                    }
                }
                normed.with_place(HostRows { values, width: self.vocab_size })
            }
            NarrowWeight::Tensor(weight) => {
                let device = weight.device();
                // The last column is for all tokens outside the vocabulary.
                let mut column_of = vec![self.vocabulary.ids.len() as i32; self.vocab_size];
                for (column, id) in self.vocabulary.ids.iter().enumerate() {
                    column_of[*id as usize] = column as i32;
                }
                let column_of = Tensor::<1, Int>::from_ints(&column_of[..], &device);
                normed.clone().map_on(&device, |hidden| {
                    let [_, num_rows, width] = hidden.dims();
                    let hidden = hidden.reshape([num_rows, width]);
                    let logits = few_rows::logits(hidden, Tensor::clone(weight));
                    let logits = soft_capped(logits, self.logit_soft_cap);
                    let never = Tensor::<2>::full([num_rows, 1], NEVER, &device);
                    let wide = Tensor::cat(vec![logits, never], 1).select(1, column_of);
                    wide.unsqueeze::<3>()
                })
            }
        }
    }
}

/// Selects the columns of an LM head that belong to a draft vocabulary.
///
/// # Shapes
/// - weight: `[hidden, vocab]`
/// - output: `[hidden, tokens]`
pub fn narrowed(weight: Tensor<2>, vocabulary: &DraftVocabulary) -> Tensor<2> {
    let ids: Vec<i32> = vocabulary.ids.iter().map(|id| *id as i32).collect();
    let ids = Tensor::<1, Int>::from_ints(&ids[..], &weight.device());
    weight.select(1, ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_and_the_required_tokens_are_kept() {
        let counts = [0, 7, 3, 3, 0, 9, 0];
        let kept = |size, always: &[u32]| {
            let vocabulary = DraftVocabulary::most_frequent(&counts, size, always);
            (vocabulary.ids().to_vec(), vocabulary.coverage(&counts))
        };
        assert_eq!(kept(2, &[]), (vec![1, 5], 16.0 / 22.0));
        assert_eq!(kept(3, &[]).0, [1, 2, 5]);
        assert_eq!(kept(3, &[6]), (vec![1, 5, 6], 16.0 / 22.0));
        // No more than have a count.
        assert_eq!(kept(100, &[0]), (vec![0, 1, 2, 3, 5], 1.0));
        let vocabulary = DraftVocabulary::new(vec![1, 5]);
        assert!(vocabulary.contains(5) && !vocabulary.contains(2));
    }
}
