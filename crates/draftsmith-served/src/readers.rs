//! Readers of untrusted journals, server answers and files of hidden states, for the bench `fuzz` and the test `corpus`.

use std::path::Path;
use std::time::Duration;

use draftsmith_files::FileError;
use draftsmith_theory::{Decoding, Sampling};

use super::journal::{Entry, Journal};
use super::known::{KnownTokens, top_probs};
use super::protocol::{Ask, Terms};
use super::reply::{BoundedBody, Completion, Tokens, Unusable, most_bytes, read};
use super::states_file::StatesPlan;

/// The vocabulary size of the assumed target.
const VOCAB_SIZE: usize = 96;
/// The assumed numbers of requested tokens and log-probabilities.
const MAX_TOKENS: usize = 2;
const LOG_PROBS: usize = 4;

/// Reads all valid responses of a journal.
///
/// # Errors
/// If the journal cannot be read, or has no valid response.
pub fn journal(path: &Path) -> Result<(), String> {
    let said = |error: FileError| error.to_string();
    let journal = Journal::open(path).map_err(said)?;
    let requests: Vec<String> = journal.requests().map(str::to_owned).collect();
    let mut num_sound = 0;
    for request in requests {
        let entry = journal.get(&request).map_err(said)?.ok_or("the journal lists it")?;
        if entry.is_sound(VOCAB_SIZE) {
            num_sound += 1;
            let Entry { response_ids, known, .. } = entry;
            check_probs(&response_ids, known.unwrap_or_default());
        }
    }
    (num_sound > 0).then_some(()).ok_or_else(|| "a journal without a response".to_owned())
}

/// Parses a server's answer as the answer to a greedy request and to a sampled request.
///
/// # Errors
/// If the answer is invalid for both.
pub fn answer(bytes: &[u8]) -> Result<(), String> {
    let terms = |decoding, log_probs| Terms {
        model: "m".to_owned(),
        decoding,
        eos_token_ids: vec![2],
        stop_strings: Vec::new(),
        vocab_size: VOCAB_SIZE,
        log_probs,
    };
    let ask = Ask { id: "a".to_owned(), prompt_ids: vec![1, 2], max_tokens: MAX_TOKENS, seed: 0 };
    let read =
        |terms: &Terms| read(&mut BoundedBody::new(bytes, most_bytes(&ask, terms)), &ask, terms);
    let greedy = read(&terms(Decoding::GREEDY, None));
    let sampled = read(&terms(Decoding::sampled(Sampling::default()), Some(LOG_PROBS)));
    if let Ok(Completion { tokens: Tokens::Ids(ids), known: Some(known), .. }) = &sampled {
        check_probs(ids, known.clone());
    }
    greedy.or(sampled).map(drop).map_err(|problem| match problem {
        Unusable::Broken(error) => error.to_string(),
        Unusable::Foreign(what) => what.to_owned(),
        Unusable::Invalid(what) => what,
        Unusable::CutShort(num) => format!("{num} of {MAX_TOKENS} tokens"),
    })
}

/// Reads a file of hidden states as the one of a request for three tokens, two layers and a width
/// of four, and deletes it.
///
/// # Errors
/// If it is not that file.
pub fn states(path: &Path) -> Result<(), String> {
    let plan = StatesPlan { ids: &[7, 8, 9], num_layers: 2, width: 4 };
    let (layers, ..) = plan.take(path, Duration::ZERO).map_err(|untaken| untaken.what)?;
    assert_eq!(layers.iter().map(Vec::len).collect::<Vec<_>>(), [12, 12], "as requested");
    Ok(())
}

/// Builds distributions from known log-probabilities, as labels are built, and checks them.
fn check_probs(ids: &[u32], known: Vec<KnownTokens>) {
    for (id, known) in ids.iter().zip(known) {
        let probs = top_probs(*id, known, LOG_PROBS);
        let logits = probs.logits(VOCAB_SIZE);
        assert!(logits.iter().all(|logit| !logit.is_nan()), "a distribution of numbers");
        let mass = probs.outside_mass(&Sampling::default(), VOCAB_SIZE);
        assert!((-1e-9..=1.0 + 1e-9).contains(&mass), "a share of 1");
    }
}
