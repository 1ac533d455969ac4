use super::*;
use crate::{Draws, SeededDraws};

/// The definition, by trying every suffix at every position.
fn looked_up(
    MaxGramConfig { searched, min_match }: MaxGramConfig,
    sequence: &[u32],
    prompt_len: usize,
    most: usize,
) -> Vec<u32> {
    // An occurrence must be followed by a token of the searched text.
    let (text, end) = match searched {
        SearchedText::Prompt => (&sequence[..prompt_len], prompt_len),
        SearchedText::Sequence => (sequence, usize::MAX),
    };
    let longest = (min_match..=sequence.len()).rev().find_map(|len| {
        let suffix = &sequence[sequence.len() - len..];
        (len..text.len()).find(|end| &text[end - len..*end] == suffix)
    });
    let mut all = sequence.to_vec();
    let mut proposed = Vec::new();
    for at in longest.into_iter().flat_map(|first| first..end).take(most) {
        proposed.push(all[at]);
        all.push(all[at]);
    }
    proposed
}

fn proposed(max_gram: &MaxGram, sequence: &[u32], most: usize) -> Vec<u32> {
    let (mut all, mut continuation) = (sequence.to_vec(), max_gram.continuation());
    while all.len() < sequence.len() + most
        && let Some(token) = continuation.next(&all)
    {
        all.push(token);
    }
    all.split_off(sequence.len())
}

fn configs() -> impl Iterator<Item = MaxGramConfig> {
    [SearchedText::Prompt, SearchedText::Sequence]
        .into_iter()
        .flat_map(|searched| [1, 2, 3].map(|min_match| MaxGramConfig { searched, min_match }))
}

#[test]
fn the_first_occurrence_of_the_longest_suffix_is_found_after_any_edits() {
    let mut draws = SeededDraws::new(0, &["max-gram"]);
    for config in configs() {
        let (mut num_found, mut num_rolled_back) = (0, 0);
        let mut max_gram = MaxGram::new(config);
        for case in 0..150 {
            let weights = vec![1.0; 2 + case % 4];
            let token = |draws: &mut SeededDraws| draws.categorical(&weights) as u32;
            let mut sequence: Vec<u32> = (0..1 + case % 23).map(|_| token(&mut draws)).collect();
            let prompt_len = sequence.len();
            max_gram.begin(&sequence);
            for _ in 0..25 {
                let found = proposed(&max_gram, &sequence, 6);
                assert_eq!(
                    found,
                    looked_up(config, &sequence, prompt_len, 6),
                    "{config:?}: {sequence:?} after a prompt of {prompt_len}"
                );
                num_found += found.len();
                // Read the proposal sometimes, and roll some of it back.
                let num_standing = sequence.len();
                sequence.extend(found);
                if draws.bernoulli(0.5) {
                    max_gram.read(&sequence);
                    num_rolled_back += 1;
                }
                let num_kept = draws.categorical(&vec![1.0; sequence.len() - num_standing + 1]);
                sequence.truncate(num_standing + num_kept);
                max_gram.truncate(sequence.len());
                sequence.push(token(&mut draws));
                max_gram.read(&sequence);
                assert_eq!(max_gram.num_read(), sequence.len());
            }
        }
        assert!(num_found > 1000 && num_rolled_back > 1000, "{num_found}, {num_rolled_back}");
    }
}

#[test]
fn repetitions_continue() {
    let sequence = [7, 1, 2, 3, 1, 2, 3];
    let mut max_gram = MaxGram::new(MaxGramConfig::default());
    max_gram.begin(&sequence);
    assert_eq!(proposed(&max_gram, &sequence, 8), [1, 2, 3, 1, 2, 3, 1, 2]);
    // The prompt ends after three tokens.
    let mut max_gram =
        MaxGram::new(MaxGramConfig { searched: SearchedText::Prompt, ..Default::default() });
    max_gram.begin(&sequence);
    assert_eq!(proposed(&max_gram, &sequence, 8), [1, 2, 3]);
}

#[test]
fn nothing_is_found_if_nothing_repeats() {
    for config in configs() {
        let mut max_gram = MaxGram::new(config);
        assert_eq!(proposed(&max_gram, &[], 3), []);
        max_gram.begin(&[1, 2, 3]);
        assert_eq!(proposed(&max_gram, &[1, 2, 3], 3), []);
    }
}

#[test]
fn a_look_up_condition_is_read_only_as_it_is_written() {
    let found: LookupFirst = "2x4".parse().expect("valid");
    assert_eq!(found, LookupFirst { min_match: 2, most: 4 });
    assert_eq!(found.to_string(), "2x4");
    for text in ["", "2", "2x", "x4", "0x4", "2x0", "2x4x1", "02x4", "+2x4", "2X4", "-1x4"] {
        let message = text.parse::<LookupFirst>().unwrap_err().to_string();
        assert!(message.starts_with(&format!("`{text}` does not say when to look up, as in")));
    }
}
