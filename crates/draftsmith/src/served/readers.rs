//! What others may have changed or said, read as it is before anything is made of it: a journal, and a
//! server's answer. For the bench `fuzz` and the test `corpus`.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use draftsmith_theory::{Decoding, Sampling, TopProbs};

use super::journal::{Entry, Journal};
use super::known::KnownTokens;
use super::protocol::{Completion, Terms, Tokens, read};

/// The tokens of the target.
const VOCAB_SIZE: usize = 96;
/// Of how many log-probabilities are asked for.
const LOG_PROBS: usize = 4;

/// Reads all responses of a journal that are sound.
///
/// # Errors
/// If it cannot be read, or has none.
pub(crate) fn journal(path: &Path) -> Result<()> {
    let journal = Journal::open(path)?;
    let requests: Vec<String> = journal.requests().map(str::to_owned).collect();
    let mut num_sound = 0;
    for request in requests {
        let entry = journal.get(&request)?.context("a request that was found is there")?;
        if entry.is_sound(VOCAB_SIZE) {
            num_sound += 1;
            let Entry { response_ids, known, .. } = entry;
            check_probs(&response_ids, known.unwrap_or_default());
        }
    }
    (num_sound > 0).then_some(()).context("a journal without a response")
}

/// Reads a server's answer to a greedy and to a sampled request.
///
/// # Errors
/// If it is none to either.
pub(crate) fn answer(bytes: &[u8]) -> Result<()> {
    let terms = |decoding, log_probs| Terms {
        model: "m".to_owned(),
        decoding,
        eos_token_ids: vec![2],
        stop_strings: Vec::new(),
        vocab_size: VOCAB_SIZE,
        log_probs,
    };
    let greedy = read(bytes, &terms(Decoding::GREEDY, None));
    let sampled = terms(Decoding::sampled(Sampling::default()), Some(LOG_PROBS));
    let sampled = read(bytes, &sampled);
    if let Ok(Completion { tokens: Tokens::Ids(ids), known: Some(known), .. }) = &sampled {
        check_probs(ids, known.clone());
    }
    greedy.or(sampled).map(drop).map_err(|problem| anyhow!(problem))
}

/// Makes distributions of what is known, as labels do.
fn check_probs(ids: &[u32], known: Vec<KnownTokens>) {
    for (id, known) in ids.iter().zip(known) {
        let probs = match known.is_empty() {
            true => TopProbs::unknown(*id),
            false => TopProbs::new(known, LOG_PROBS),
        };
        let logits = probs.logits(VOCAB_SIZE);
        assert!(logits.iter().all(|logit| !logit.is_nan()), "a distribution of numbers");
        let mass = probs.outside_mass(&Sampling::default(), VOCAB_SIZE);
        assert!((-1e-9..=1.0 + 1e-9).contains(&mass), "a share of 1");
    }
}
