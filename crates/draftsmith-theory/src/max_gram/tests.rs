use std::collections::BTreeMap;

use super::*;
use crate::{Draws, SeededDraws};

/// The definition, by trying every suffix at every position.
fn looked_up(
    MaxGramConfig { searched, min_match, .. }: MaxGramConfig,
    sequence: &[u32],
    prompt_len: usize,
    most: usize,
) -> Vec<u32> {
    // An occurrence must be followed by a token of the searched text.
    let (text, end) = match searched {
        SearchedText::Prompt => (&sequence[..prompt_len], prompt_len),
        SearchedText::Sequence => (sequence, usize::MAX),
        SearchedText::Answers => unreachable!("tested with suffix decoding"),
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
    let (mut all, mut continuation) = (sequence.to_vec(), max_gram.continuation(most));
    while all.len() < sequence.len() + most
        && let Some(token) = continuation.next(&all)
    {
        all.push(token);
    }
    all.split_off(sequence.len())
}

fn configs() -> impl Iterator<Item = MaxGramConfig> {
    [SearchedText::Prompt, SearchedText::Sequence].into_iter().flat_map(|searched| {
        let of = |min_match| MaxGramConfig { searched, min_match, ..Default::default() };
        [1, 2, 3].map(of)
    })
}

#[test]
fn the_first_occurrence_of_the_longest_suffix_is_found_after_any_edits() {
    let mut draws = SeededDraws::new(0, &["max-gram"]);
    for config in configs() {
        let (mut num_found, mut num_rolled_back) = (0, 0);
        let mut max_gram = MaxGram::new(config, None);
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
    let mut max_gram = MaxGram::new(MaxGramConfig::default(), None);
    max_gram.begin(&sequence);
    assert_eq!(proposed(&max_gram, &sequence, 8), [1, 2, 3, 1, 2, 3, 1, 2]);
    // The prompt ends after three tokens.
    let mut max_gram =
        MaxGram::new(MaxGramConfig { searched: SearchedText::Prompt, ..Default::default() }, None);
    max_gram.begin(&sequence);
    assert_eq!(proposed(&max_gram, &sequence, 8), [1, 2, 3]);
}

#[test]
fn nothing_is_found_if_nothing_repeats() {
    for config in configs() {
        let mut max_gram = MaxGram::new(config, None);
        assert_eq!(proposed(&max_gram, &[], 3), []);
        max_gram.begin(&[1, 2, 3]);
        assert_eq!(proposed(&max_gram, &[1, 2, 3], 3), []);
    }
}

#[test]
fn a_look_up_condition_is_read_only_as_it_is_written() {
    let found: LookupFirst = "2x4".parse().expect("valid");
    assert_eq!(found, LookupFirst::new(2, 4));
    assert_eq!(found.to_string(), "2x4");
    let found: LookupFirst = "answers:2x4".parse().expect("valid");
    assert_eq!(found, LookupFirst { answers: true, ..LookupFirst::new(2, 4) });
    assert_eq!(found.to_string(), "answers:2x4");
    for text in [
        "",
        "answers",
        "answers:",
        "answer:2x4",
        "answers:answers:2x4",
        "2",
        "2x",
        "x4",
        "0x4",
        "2x0",
        "2x4x1",
        "02x4",
        "+2x4",
        "2X4",
        "-1x4",
    ] {
        let message = text.parse::<LookupFirst>().unwrap_err().to_string();
        assert!(message.starts_with(&format!("`{text}` does not say when to look up, as in")));
    }
}

/// Suffix decoding by its definition: counts at every place of every text, for every match.
fn counted(
    texts: &[&[u32]],
    sequence: &[u32],
    (min_match, most): (usize, usize),
    settings: &SuffixSettings,
) -> Continuations {
    let mut best = Continuations::default();
    for len in min_match..settings.depth.min(sequence.len()) {
        let suffix = &sequence[sequence.len() - len..];
        let in_text = |text: &&[u32]| -> Vec<Vec<u32>> {
            let places = (len..=text.len()).filter(|end| &text[end - len..*end] == suffix);
            places.map(|end| text[end..].to_vec()).collect()
        };
        let after: Vec<Vec<u32>> = texts.iter().flat_map(in_text).collect();
        let most = most.min((len as f64 * settings.factor + 1e-6) as usize);
        let found = counted_after(&after, (most, settings.depth - len), settings);
        // Later matches are longer.
        if found.score >= best.score && !found.nodes.is_empty() {
            best = found;
        }
    }
    best
}

fn counted_after(
    after: &[Vec<u32>],
    (most, ahead): (usize, usize),
    settings: &SuffixSettings,
) -> Continuations {
    // The tokens from the match to a node, its parent's number, and its probability.
    let mut open: Vec<(Vec<u32>, Option<usize>, f64)> = Vec::new();
    let mut found = Continuations::default();
    let mut last = Some((Vec::new(), None, 1.0));
    while let Some((path, number, prob)) = last.take() {
        let here: Vec<&Vec<u32>> = after.iter().filter(|text| text.starts_with(&path)).collect();
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        here.iter().filter_map(|text| text.get(path.len())).for_each(|token| {
            *counts.entry(*token).or_default() += 1;
        });
        let mut counts: Vec<(u32, usize)> = counts.into_iter().collect();
        counts.sort_by(|(_, one), (_, other)| other.cmp(one));
        counts.truncate(if settings.tree { usize::MAX } else { 1 });
        counts.retain(|_| path.len() < ahead);
        for (token, count) in counts {
            let prob = prob * count as f64 / here.len() as f64;
            if prob >= settings.min_prob {
                open.push(([&path[..], &[token]].concat(), number, prob));
            }
        }
        let probs = open.iter().map(|(.., prob)| *prob);
        let most_probable = probs.fold(0.0, f64::max);
        let next = open.iter().position(|(.., prob)| *prob == most_probable);
        if let Some(next) = next.filter(|_| found.nodes.len() < most) {
            let (path, parent, prob) = open.remove(next);
            found.nodes.push((path[path.len() - 1], parent));
            found.score += prob;
            last = Some((path, Some(found.nodes.len() - 1), prob));
        }
    }
    found
}

#[test]
fn suffix_decoding_proposes_what_most_often_followed() {
    let mut draws = SeededDraws::new(0, &["suffix"]);
    let (mut num_stored, mut num_own, mut num_branches) = (0, 0, 0);
    for case in 0..2_000 {
        let weights = vec![1.0; 2 + case % 5];
        let token = |draws: &mut SeededDraws| draws.categorical(&weights) as u32;
        let text = |draws: &mut SeededDraws, len: usize| -> Vec<u32> {
            (0..len).map(|_| token(draws)).collect()
        };
        let answers: Vec<Vec<u32>> =
            (0..case % 7).map(|nth| text(&mut draws, (case / 7 + 5 * nth) % 23)).collect();
        let stored = StoredAnswers::build(answers.iter().map(|ids| &ids[..]), |_| Ok::<_, ()>(()));
        let stored = stored.expect("small");
        let parts = (stored.tokens().to_vec(), stored.order().to_vec());
        assert_eq!(StoredAnswers::from_parts(parts.0, parts.1, 7).as_ref(), Ok(&stored));
        let stored = Arc::new(stored);
        let answers: Vec<&[u32]> = answers.iter().map(|ids| &ids[..]).collect();
        let suffix = SuffixSettings {
            depth: [2, 3, 6, 24][case % 4],
            min_prob: [0.1, 0.3, 0.01, 1.0][case / 4 % 4],
            factor: [1.0, 0.5, 3.0][case % 3],
            tree: case % 2 == 1,
            rest: false,
        };
        let min_match = 1 + case / 3 % 3;
        let config = MaxGramConfig { searched: SearchedText::Answers, min_match, suffix };
        let mut found = MaxGram::new(config, (case % 5 > 0).then(|| stored.clone()));
        let searched = if case % 5 > 0 { &answers[..] } else { &[] };
        let mut sequence = text(&mut draws, 1 + case % 9);
        found.begin(&sequence);
        for step in 0..50 {
            let most = 1 + step % 8;
            let sizes = (min_match, most);
            let best = |suffix: &SuffixSettings| {
                let own = counted(&[&sequence], &sequence, sizes, suffix);
                let other = counted(searched, &sequence, sizes, suffix);
                if other.score > own.score { (other, true) } else { (own, false) }
            };
            let (expected, is_stored) = best(&suffix);
            let num = if is_stored { &mut num_stored } else { &mut num_own };
            let (chain, _) = best(&SuffixSettings { tree: false, ..suffix });
            let chain: Vec<u32> = chain.nodes.iter().map(|(token, _)| *token).collect();
            let mut copied = found.continuation(most);
            assert_eq!(std::iter::from_fn(|| copied.next(&sequence)).collect::<Vec<_>>(), chain);
            let proposed = found.continuations(most);
            assert_eq!(proposed.nodes, expected.nodes, "{config:?} {sequence:?} {answers:?}");
            assert!((proposed.score - expected.score).abs() < 1e-9);
            *num += proposed.nodes.len();
            let is_branch = |(at, (_, parent)): (usize, &(u32, Option<usize>))| {
                parent.map_or(0, |parent| parent + 1) < at
            };
            num_branches += proposed.nodes.iter().enumerate().filter(|it| is_branch(*it)).count();
            // Read the proposal sometimes, and roll back some of it or more.
            let num_standing = sequence.len();
            sequence.extend(proposed.nodes.iter().map(|(token, _)| *token));
            found.read(&sequence);
            sequence.truncate(num_standing - usize::from(step % 6 == 5));
            found.truncate(sequence.len());
            sequence.push(token(&mut draws));
            found.read(&sequence);
        }
    }
    assert!(num_stored > 10_000 && num_own > 10_000 && num_branches > 1_000);
}

#[test]
fn a_file_of_stored_answers_that_is_not_their_index_is_refused() {
    let answers: [&[u32]; 2] = [&[1, 2, 1], &[2, 1]];
    let stored = StoredAnswers::build(answers, |_| Ok::<_, ()>(())).expect("small");
    assert_eq!((stored.num_answers(), stored.num_tokens()), (2, 5));
    let parts = || (stored.tokens().to_vec(), stored.order().to_vec());
    let fault = |change: &dyn Fn(&mut Vec<u32>, &mut Vec<u32>)| {
        let (mut tokens, mut order) = parts();
        change(&mut tokens, &mut order);
        StoredAnswers::from_parts(tokens, order, 3).expect_err("is changed")
    };
    let index = "its index is not that of its answers";
    assert_eq!(fault(&|tokens, _| _ = tokens.pop()), "its last answer has no end");
    assert_eq!(fault(&|tokens, _| tokens[0] = 3), "it has a token that the target does not have");
    assert_eq!(fault(&|_, order| _ = order.pop()), index);
    assert_eq!(fault(&|_, order| order.swap(0, 1)), index);
    assert_eq!(fault(&|_, order| order[0] = order[1]), index);
    assert_eq!(fault(&|_, order| order[0] = 99), index);
    assert_eq!(fault(&|_, order| order[0] = 3), index, "the end of an answer");
    let observed =
        StoredAnswers::build(
            answers,
            |num_sorted| if num_sorted < 5 { Ok(()) } else { Err(num_sorted) },
        );
    assert_eq!(observed, Err(5));
}

#[test]
fn rest_counts_what_follows_the_longest_match_in_stored_answers() {
    // `2 3` is followed by 4 twice and by 5 once; `1 2 3` only by 5.
    let answers: [&[u32]; 3] = [&[9, 2, 3, 4, 6], &[8, 2, 3, 4, 7], &[1, 2, 3, 5, 5]];
    let stored = StoredAnswers::build(answers, |_| Ok::<_, ()>(())).expect("small");
    let suffix = SuffixSettings { rest: true, tree: true, ..SuffixSettings::default() };
    let config = MaxGramConfig { searched: SearchedText::Answers, min_match: 1, suffix };
    let mut rest = MaxGram::new(config, Some(Arc::new(stored)));
    let mut proposed = |sequence: &[u32], most| {
        rest.begin(sequence);
        rest.continuations(most).nodes
    };
    assert_eq!(proposed(&[7, 1, 2, 3], 9), [(5, None), (5, Some(0))]);
    let of_two = [(4, None), (5, None), (6, Some(0)), (7, Some(0)), (5, Some(1))];
    assert_eq!(proposed(&[6, 2, 3], 9), of_two);
    assert_eq!(proposed(&[6, 2, 3], 2), of_two[..2]);
    assert_eq!(proposed(&[2, 3, 2, 3, 0], 9), [], "the text itself is not searched");
}
