//! A model with its KV cache, which holds one sequence in each slot. Token ids go in, and rows of
//! logits come out.
//!
//! A forward syncs with the device once, when its logits are copied to the host, and never if the
//! model runs in host memory. So a round of K candidates waits K + 1 times: after each draft step,
//! and after the verification. The acceptance head's prediction is copied together with a draft
//! step's logits. Filling the cache and rolling it back need no sync.

#[cfg(test)]
mod counting;
#[cfg(test)]
pub(crate) mod tests;

use std::ops::Range;

use draftsmith_model::{CausalLm, KvCache, ModelError, Rows};

use crate::error::{DecodeError, Result};
use crate::features::{SlotFeatures, WantedFeatures};
use crate::target::{FirstLayers, KeptStates, Logits, Target, TargetLayers, Verification};

/// A model with the KV cache of the sequences that it reads, one in each slot.
#[derive(Debug)]
pub struct ModelSession<'m> {
    model: &'m CausalLm,
    cache: KvCache,
    role: &'static str,
    /// The early-exit state if this session is the target of a self-draft.
    exit: Option<EarlyExit>,
    /// The layers whose hidden states are kept for a drafter, in ascending order.
    kept: Vec<KeptLayer>,
    /// For each slot, the number of tokens that were final when its round began.
    standing: Vec<usize>,
    /// For each slot that began by [`Target::begin_along`], the prompt length in tokens and the
    /// final hidden states from the prompt's last token on; otherwise `None`.
    along: Vec<Option<(usize, Rows)>>,
}

/// The state of a session whose first ("shallow") layers run ahead of the remaining ("deep")
/// layers.
#[derive(Debug)]
struct EarlyExit {
    /// The number of shallow layers, which is the index of the first deep layer.
    layer: usize,
    /// The shallow layers' output, by slot.
    slots: Vec<ExitFeatures>,
}

/// A layer whose output is kept until a drafter has read it.
#[derive(Debug)]
struct KeptLayer {
    /// The number of layers that compute the kept states; 0 means the embeddings.
    layer: usize,
    /// Whether several drafters read these states. Then none are released, because one drafter may
    /// lag behind another by rounds.
    is_shared: bool,
    /// The kept states, by slot.
    slots: Vec<SlotFeatures>,
}

impl KeptLayer {
    /// Appends the states of new tokens, each run to its slot.
    fn push(&mut self, hidden: &Rows) {
        hidden.by_run().for_each(|(slot, run)| self.slots[slot].push(run));
    }
}

/// The shallow layers' output ("features") for one sequence.
#[derive(Debug)]
struct ExitFeatures {
    /// The features of positions that the deep layers or the drafter have not read yet.
    features: SlotFeatures,
    /// The number of positions whose features the drafter has read.
    num_drafted_from: usize,
}

/// The tokens of one sequence that a forward reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewTokens<'a> {
    pub(crate) slot: usize,
    pub(crate) ids: &'a [u32],
    /// The number of final hidden states to return, those of the last tokens.
    pub(crate) num_rows: usize,
}

impl<'m> ModelSession<'m> {
    /// Creates a session for one sequence of at most `capacity` tokens, or the model's context
    /// length if that is shorter. `role` is the model's name in errors: `target` or `draft`.
    pub fn new(model: &'m CausalLm, capacity: usize, role: &'static str) -> Self {
        Self::with_slots(model, capacity, 1, role)
    }

    /// Creates a session for up to `num_slots` concurrent sequences. Each has at most `capacity`
    /// tokens, or the model's context length if that is shorter.
    pub fn with_slots(
        model: &'m CausalLm,
        capacity: usize,
        num_slots: usize,
        role: &'static str,
    ) -> Self {
        let capacity = capacity.min(model.shape().context);
        let cache = model.new_cache(capacity, num_slots);
        let (standing, along) = (vec![0; num_slots], vec![None; num_slots]);
        Self { model, cache, role, exit: None, kept: Vec::new(), standing, along }
    }

    /// Prepares the session for a drafter that reads these layers, and forgets all sequences. If
    /// there is an exit, the layers before it can run ahead. The session keeps their output until
    /// both the remaining layers and the drafter have read it.
    ///
    /// # Panics
    /// If no layer follows the exit, or the model has fewer layers than a kept one requires.
    /// Loading a drafter rules this out.
    pub fn set_layers(&mut self, layers: &TargetLayers) {
        let num_slots = self.cache.num_slots();
        for slot in 0..num_slots {
            self.truncate(slot, 0);
        }
        self.exit = layers.exit.map(|layer| {
            assert!(layer < self.num_layers(), "there is a layer behind the exit");
            let none = |_| ExitFeatures { features: SlotFeatures::new(0), num_drafted_from: 0 };
            EarlyExit { layer, slots: (0..num_slots).map(none).collect() }
        });
        let kept = layers.kept.chunk_by(|layer, next| layer == next).map(|same| {
            assert!(same[0] <= self.num_layers(), "the model has the layer");
            let slots = (0..num_slots).map(|_| SlotFeatures::new(0)).collect();
            KeptLayer { layer: same[0], is_shared: same.len() > 1, slots }
        });
        self.kept = kept.collect();
    }

    /// Reads those of `tokens` that the slot has not read, without computing logits.
    fn read_upto(&mut self, slot: usize, tokens: &[u32]) {
        let ids = &tokens[self.num_read(slot).min(tokens.len())..];
        let new = [NewTokens { slot, ids, num_rows: 0 }];
        let (first, hidden) = if ids.is_empty() {
            return;
        } else if self.exit.is_some() {
            self.read_shallow(&new);
            self.features_of_unread(std::iter::once(slot))
        } else {
            (0, self.embed(&new).expect("there is something to read"))
        };
        // After the last kept layer, only keys and values are needed.
        let last_kept = self.kept.last().map_or(first, |kept| kept.layer.max(first));
        let hidden = self.forward(first..last_kept, hidden);
        if last_kept < self.num_layers() {
            self.model.fill_cache(last_kept, hidden, &mut self.cache);
        }
    }

    /// Runs a range of layers on new tokens, and stores the hidden states after each kept layer.
    fn forward(&mut self, layers: Range<usize>, mut hidden: Rows) -> Rows {
        let mut at = layers.start;
        let within = |kept: &&mut KeptLayer| (layers.start + 1..=layers.end).contains(&kept.layer);
        for kept in self.kept.iter_mut().filter(within) {
            hidden = self.model.forward_layers(at..kept.layer, hidden, &mut self.cache);
            at = kept.layer;
            kept.push(&hidden);
        }
        self.model.forward_layers(at..layers.end, hidden, &mut self.cache)
    }

    /// Returns the model that the session runs.
    pub fn model(&self) -> &'m CausalLm {
        self.model
    }

    /// Returns the number of tokens that have been read in a slot. In the target of a self-draft,
    /// the deep layers may have read fewer.
    pub(crate) fn num_read(&self, slot: usize) -> usize {
        match &self.exit {
            // The exit may precede the first layer. The KV cache then does not count the tokens.
            Some(exit) => exit.slots[slot].features.end(),
            None => self.cache.len(slot, 0),
        }
    }

    /// Returns the number of tokens in a slot that every layer has read.
    pub(crate) fn num_read_by_all(&self, slot: usize) -> usize {
        self.cache.len(slot, self.num_layers() - 1)
    }

    fn num_layers(&self) -> usize {
        self.model.shape().num_layers
    }

    /// Forgets all tokens of a slot from position `len` on.
    fn truncate(&mut self, slot: usize, len: usize) {
        self.cache.truncate(slot, len);
        if let Some(exit) = &mut self.exit {
            let exit = &mut exit.slots[slot];
            exit.features.truncate(len);
            exit.num_drafted_from = exit.num_drafted_from.min(len);
        }
        self.kept.iter_mut().for_each(|kept| kept.slots[slot].truncate(len));
    }

    /// Returns the tokens of a sequence that the target has not read.
    fn unread<'a>(&self, one: &Verification<'a>) -> NewTokens<'a> {
        let (ids, num_rows) = (&one.tokens[self.num_read(one.slot)..], one.proposal.num_rows());
        let is_unread = self.num_read_by_all(one.slot) + num_rows <= one.tokens.len();
        assert!(is_unread, "no layer after the exit has read a token that is to be verified");
        NewTokens { slot: one.slot, ids, num_rows }
    }

    /// Embeds new tokens, and keeps the embeddings if a drafter reads them. Returns `None` if there
    /// are no new tokens in the batch.
    fn embed(&mut self, batch: &[NewTokens<'_>]) -> Option<Rows> {
        let new = batch.iter().filter(|new| !new.ids.is_empty());
        let runs: Vec<(usize, &[u32])> = new.map(|new| (new.slot, new.ids)).collect();
        let embedded = (!runs.is_empty()).then(|| self.model.embed_runs(&runs))?;
        let kept = self.kept.iter_mut().filter(|kept| kept.layer == 0);
        kept.for_each(|kept| kept.push(&embedded));
        Some(embedded)
    }

    /// Runs the layers before the exit on new tokens and stores their output.
    fn read_shallow(&mut self, batch: &[NewTokens<'_>]) {
        let Some(hidden) = self.embed(batch) else { return };
        let exit_layer = expect_exit(&mut self.exit).layer;
        let features = self.forward(0..exit_layer, hidden);
        let exit = expect_exit(&mut self.exit);
        features.by_run().for_each(|(slot, run)| exit.slots[slot].features.push(run));
    }

    /// Returns the number of layers before the exit, and those features of the given slots that the
    /// layers after the exit have not read.
    fn features_of_unread(&mut self, slots: impl Iterator<Item = usize>) -> (usize, Rows) {
        let last_layer = self.num_layers() - 1;
        let exit = expect_exit(&mut self.exit);
        let unread = slots.map(|slot| {
            let ExitFeatures { features, num_drafted_from } = &mut exit.slots[slot];
            let unread = features.since(self.cache.len(slot, last_layer));
            // The last candidate's features remain, because the drafter reads them if the candidate
            // is accepted.
            features.release_before(*num_drafted_from);
            unread
        });
        (exit.layer, Rows::cat(unread))
    }

    /// Reads new tokens of sequences in different slots in one forward. Returns, sequence by
    /// sequence, the normed final hidden states of the last [`NewTokens::num_rows`] tokens.
    pub(crate) fn read(&mut self, batch: &[NewTokens<'_>]) -> Rows {
        let num_layers = self.num_layers();
        let hidden = if self.exit.is_some() {
            self.read_shallow(batch);
            let (exit_layer, hidden) = self.features_of_unread(batch.iter().map(|new| new.slot));
            self.forward(exit_layer..num_layers, hidden)
        } else {
            let hidden = self.embed(batch).expect("there is something to read");
            self.forward(0..num_layers, hidden)
        };
        self.model.normed(hidden.last_of_each(batch.iter().map(|new| new.num_rows)))
    }

    /// Computes the logits of normed hidden states and copies them to the host, which is the only
    /// sync of a forward. `num_tokens`, the number of tokens read, only appears in errors.
    fn logits_of(&self, normed: &Rows, num_tokens: usize) -> Result<Logits> {
        let [values] = to_host([self.model.logits(normed)], self.role)?;
        let vocab_size = self.model.shape().vocab_size;
        check_logits(&values, vocab_size, self.role, num_tokens)?;
        Ok(Logits::new(values, vocab_size))
    }

    /// Checks that a prompt has only tokens of the vocabulary and leaves room for one more.
    pub(crate) fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        check_fits(prompt, self.cache.capacity(), self.role)?;
        let vocab_size = self.model.shape().vocab_size;
        match prompt.iter().find(|id| **id as usize >= vocab_size) {
            Some(id) => Err(DecodeError::Invalid(format!(
                "token id {id} is outside the {}'s vocabulary of {vocab_size}: the tokenizer does not belong to this \
                 model",
                self.role
            ))),
            None => Ok(()),
        }
    }

    /// Computes the logits after each token of `ids[from..]` in one forward, in slot 0 and from an
    /// empty cache.
    ///
    /// # Errors
    /// If the text is longer than the context, a token before the last is outside the vocabulary,
    /// or the logits are not finite.
    pub fn score(&mut self, ids: &[u32], from: usize) -> Result<Logits> {
        self.check_prompt(&ids[..ids.len().saturating_sub(1)])?;
        self.truncate(0, 0);
        let normed = self.read(&[NewTokens { slot: 0, ids, num_rows: ids.len() - from }]);
        self.logits_of(&normed, ids.len())
    }
}

fn expect_exit(exit: &mut Option<EarlyExit>) -> &mut EarlyExit {
    exit.as_mut().expect("the session of a self-draft's target has an exit")
}

/// Checks that a prompt leaves room for one more token in a context of `context` tokens.
pub(crate) fn check_fits(prompt: &[u32], context: usize, role: &'static str) -> Result<()> {
    if prompt.len() < context {
        return Ok(());
    }
    Err(DecodeError::PromptTooLong { prompt: prompt.len(), context, role })
}

/// Checks that rows of `vocab_size` logits define distributions: no logit is NaN or +∞, and in each
/// row at least one is finite.
pub(crate) fn check_logits(
    logits: &[f32],
    vocab_size: usize,
    role: &'static str,
    num_tokens: usize,
) -> Result<()> {
    // The loop has no early exit, so that the compiler can vectorise it.
    let are_all_fine = logits.iter().fold(true, |fine, logit| fine & (*logit < f32::INFINITY));
    let has_finite = |row: &[f32]| row.iter().any(|logit| *logit > f32::NEG_INFINITY);
    let are_all_fine = are_all_fine && logits.chunks(vocab_size).all(has_finite);
    if are_all_fine { Ok(()) } else { Err(not_finite(role, num_tokens)) }
}

/// Describes a model, such as `draft` or `acceptance head`, after the tokens that it had read.
pub(crate) fn not_finite(role: &str, num_tokens: usize) -> DecodeError {
    DecodeError::Invalid(format!(
        "the {role}'s logits are not finite after {num_tokens} tokens: its weights are broken, or too large for f32"
    ))
}

/// Copies rows to the host in one sync, or in none if they are already there.
pub(crate) fn to_host<const N: usize>(
    rows: [Rows; N],
    role: &'static str,
) -> Result<[Vec<f32>; N]> {
    Rows::to_host(rows).map_err(|error| {
        let message = match error {
            ModelError::Device(message) => message,
            other => other.to_string(),
        };
        DecodeError::Invalid(format!("the device failed while it ran the {role}: {message}"))
    })
}

impl FirstLayers for ModelSession<'_> {
    /// Runs the layers before the exit on the sequences' new tokens, and keeps their output for the
    /// layers after the exit.
    ///
    /// # Panics
    /// If the session has no exit, or the features were released.
    fn features(&mut self, wanted: &[WantedFeatures<'_>]) -> Rows {
        for one in wanted {
            self.cache.branch(one.slot, one.tokens.len() - one.parents.len(), one.parents);
        }
        let unread = wanted.iter().map(|one| {
            let ids = &one.tokens[self.num_read(one.slot)..];
            NewTokens { slot: one.slot, ids, num_rows: 0 }
        });
        self.read_shallow(&unread.collect::<Vec<_>>());
        Rows::cat(wanted.iter().map(|one| {
            let num_read_by_all = self.num_read_by_all(one.slot);
            let exit = &mut expect_exit(&mut self.exit).slots[one.slot];
            let features = exit.features.since(one.from);
            exit.num_drafted_from = one.tokens.len();
            exit.features.release_before(num_read_by_all);
            features
        }))
    }
}

impl KeptStates for ModelSession<'_> {
    fn num_standing(&self, slot: usize) -> usize {
        self.standing[slot]
    }

    /// The session first reads the tokens that it has not read. It releases states more than one
    /// position before `from`, unless several drafters read them.
    fn kept_states(
        &mut self,
        slot: usize,
        tokens: &[u32],
        from: usize,
        layers: &[usize],
    ) -> Vec<Rows> {
        let num_known = self.standing[slot] - 1;
        self.read_upto(slot, &tokens[..num_known]);
        assert_eq!(self.num_read_by_all(slot), num_known, "no candidate was read as if it stood");
        let of_layer = |layer: &usize| {
            let kept = self.kept.iter_mut().find(|kept| kept.layer == *layer);
            let KeptLayer { is_shared, slots, .. } = kept.expect("the session keeps the layer");
            let states = slots[slot].since(from).slice(0..num_known - from);
            if !*is_shared {
                slots[slot].release_before(from.saturating_sub(1));
            }
            states
        };
        layers.iter().map(of_layer).collect()
    }
}

impl Target for ModelSession<'_> {
    fn num_slots(&self) -> usize {
        self.cache.num_slots()
    }

    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<()> {
        self.check_prompt(prompt)?;
        self.truncate(slot, 0);
        self.read_upto(slot, &prompt[..prompt.len() - 1]);
        Ok(())
    }

    fn resume(&mut self, slot: usize, prompt: &[u32], num_kept: usize) -> Result<()> {
        self.check_prompt(prompt)?;
        self.commit(slot, num_kept, &[]);
        self.read_upto(slot, &prompt[..prompt.len() - 1]);
        Ok(())
    }

    fn begin_round(&mut self, slot: usize, num_standing: usize) {
        self.standing[slot] = num_standing;
    }

    /// Reads the text in one forward and keeps the final hidden states. Logits need much more
    /// memory, so they are computed from these states a few rows at a time.
    fn begin_along(&mut self, slot: usize, text: &[u32], prompt_len: usize) -> Result<()> {
        let ids = &text[..text.len() - 1];
        self.check_prompt(ids)?;
        self.truncate(slot, 0);
        let num_rows = text.len() - prompt_len;
        let normed = self.read(&[NewTokens { slot, ids, num_rows }]);
        self.along[slot] = Some((prompt_len, normed));
        self.commit(slot, prompt_len - 1, &[]);
        Ok(())
    }

    /// # Panics
    /// If the slot's sequence was not started by [`Target::begin_along`].
    fn logits_along(&mut self, slot: usize, _text: &[u32], lens: Range<usize>) -> Result<Logits> {
        let (first, normed) = self.along[slot].as_ref().expect("the sequence began along its text");
        self.logits_of(&normed.slice(lens.start - first..lens.end - first), lens.start)
    }

    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits> {
        for one in batch.iter().filter(|one| !one.proposal.is_chain()) {
            let num_standing = one.tokens.len() - one.proposal.len();
            let parents: Vec<_> = one.proposal.nodes().iter().map(|node| node.parent).collect();
            self.cache.branch(one.slot, num_standing, &parents);
        }
        let num_tokens = batch.iter().map(|one| one.tokens.len()).max().unwrap_or(0);
        let unread: Vec<NewTokens<'_>> = batch.iter().map(|one| self.unread(one)).collect();
        let normed = self.read(&unread);
        self.logits_of(&normed, num_tokens)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.cache.keep(slot, num_standing, path);
        self.kept.iter_mut().for_each(|kept| kept.slots[slot].keep(num_standing, path));
        if let Some(exit) = &mut self.exit {
            let ExitFeatures { features, num_drafted_from } = &mut exit.slots[slot];
            let is_drafted_from = |node: &&usize| num_standing + **node < *num_drafted_from;
            let num_drafted = path.iter().take_while(is_drafted_from).count();
            features.keep(num_standing, path);
            *num_drafted_from = (*num_drafted_from).min(num_standing + num_drafted);
        }
    }

    fn context(&self) -> usize {
        self.cache.capacity()
    }
}
