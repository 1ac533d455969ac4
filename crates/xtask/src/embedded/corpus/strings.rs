//! Words as letters: capitals, spelling, first and last letters, repetition, replacement.
//!
//! A model sees whole words as tokens, so it has to learn each token's letters as facts.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::words::{
    COLOURS, OBJECTS, OPPOSITES, PREPOSITIONS, pick, pick_distinct, pick_nouns, pick_opposites,
};

pub(super) fn draw(rng: &mut ChaCha8Rng) -> (String, String) {
    match rng.random_range(0..10) {
        0..=1 => capitals(rng),
        2 => spell(rng),
        3 => spell_backwards(rng),
        4..=5 => letters(rng),
        6 => repeat(rng),
        7 => replace(rng),
        _ => replace_by_opposite(rng),
    }
}

/// A short description such as `old red lamp`.
fn draw_phrase(rng: &mut ChaCha8Rng) -> [&'static str; 3] {
    let (adjective, _) = pick_opposites(rng);
    [adjective, pick(rng, &COLOURS), pick(rng, &OBJECTS)]
}

fn capitals(rng: &mut ChaCha8Rng) -> (String, String) {
    let words = draw_phrase(rng);
    let prompt = match rng.random_range(0..3) {
        0 => format!("Write this in capital letters: {}", words.join(" ")),
        1 => format!("Write this in upper case: {}", words.join(" ")),
        _ => format!("Change this to capital letters: {}", words.join(" ")),
    };
    let changed: Vec<_> =
        words.iter().map(|word| format!("{word} becomes {}", word.to_uppercase())).collect();
    let answer =
        format!("{}. In capital letters: {}", changed.join(", "), words.join(" ").to_uppercase());
    (prompt, answer)
}

/// The word's letters in the given order, separated by dashes.
fn dashed(letters: impl Iterator<Item = char>) -> String {
    letters.map(String::from).collect::<Vec<_>>().join("-")
}

fn spell(rng: &mut ChaCha8Rng) -> (String, String) {
    let num_words = rng.random_range(2..=3);
    let words = pick_nouns(rng, num_words);
    let prompt = match rng.random_range(0..2) {
        0 => format!("Spell out {} with dashes.", words.join(" and ")),
        _ => format!("Write {} letter by letter.", words.join(" and ")),
    };
    let spelled: Vec<_> =
        words.iter().map(|word| format!("{word} is {}", dashed(word.chars()))).collect();
    (prompt, format!("{}.", spelled.join(" and ")))
}

fn spell_backwards(rng: &mut ChaCha8Rng) -> (String, String) {
    let words = pick_nouns(rng, 2);
    let prompt = match rng.random_range(0..2) {
        0 => format!("Spell {} backwards.", words.join(" and ")),
        _ => format!("Reverse the letters of {}.", words.join(" and ")),
    };
    let reversed: Vec<_> = words
        .iter()
        .map(|word| {
            let backwards = dashed(word.chars().rev());
            format!("{word} is {}, backwards {backwards}", dashed(word.chars()))
        })
        .collect();
    (prompt, format!("{}.", reversed.join(", and ")))
}

fn letters(rng: &mut ChaCha8Rng) -> (String, String) {
    let num_words = rng.random_range(4..=6);
    let words = pick_nouns(rng, num_words);
    let (end, verb) = pick(rng, &[("first", "starts"), ("last", "ends")]);
    let asked = pick(rng, &["Give", "Name", "What is"]);
    let mark = if asked == "What is" { "?" } else { ":" };
    let prompt = format!("{asked} the {end} letter of each word{mark} {}.", words.join(", "));
    let stated: Vec<_> = words
        .iter()
        .map(|word| {
            let mut letters = word.chars();
            let letter = if end == "first" { letters.next() } else { letters.next_back() };
            format!("{word} {verb} with {}", letter.expect("words are not empty"))
        })
        .collect();
    (prompt, format!("{}.", stated.join(", ")))
}

fn repeat(rng: &mut ChaCha8Rng) -> (String, String) {
    let phrase = draw_phrase(rng).join(" ");
    let num_times = rng.random_range(3..=6);
    let prompt = match rng.random_range(0..2) {
        0 => format!("Repeat {phrase} {num_times} times."),
        _ => format!("Write {phrase} {num_times} times."),
    };
    let repeated = vec![phrase.as_str(); num_times].join(", ");
    let answer = format!("{num_times} times {phrase}: {repeated}.");
    (prompt, answer)
}

/// Two clauses about four objects, `adjective` in both.
struct Sentence {
    objects: Vec<&'static str>,
    colour: &'static str,
    prepositions: [&'static str; 2],
}

impl Sentence {
    fn draw(rng: &mut ChaCha8Rng) -> Self {
        Sentence {
            objects: pick_distinct(rng, &OBJECTS, 4),
            colour: pick(rng, &COLOURS),
            prepositions: [pick(rng, &PREPOSITIONS), pick(rng, &PREPOSITIONS)],
        }
    }

    fn with(&self, adjective: &str) -> String {
        let Sentence { objects, colour, prepositions } = self;
        format!(
            "The {adjective} {} is {} the {colour} {}, and the {} is {} the {adjective} {}.",
            objects[0], prepositions[0], objects[1], objects[2], prepositions[1], objects[3]
        )
    }
}

fn replace(rng: &mut ChaCha8Rng) -> (String, String) {
    let sentence = Sentence::draw(rng);
    let adjectives = OPPOSITES.map(|(first, second)| [first, second]);
    let [old, new] = pick_distinct(rng, adjectives.as_flattened(), 2)[..] else {
        unreachable!("two adjectives were picked")
    };
    let prompt = match rng.random_range(0..2) {
        0 => format!("Replace {old} with {new}: {}", sentence.with(old)),
        _ => format!("Put {new} in place of {old}: {}", sentence.with(old)),
    };
    let answer = format!("With {new} in place of {old}: {}", sentence.with(new));
    (prompt, answer)
}

fn replace_by_opposite(rng: &mut ChaCha8Rng) -> (String, String) {
    let sentence = Sentence::draw(rng);
    let (old, new) = pick_opposites(rng);
    let prompt = match rng.random_range(0..2) {
        0 => format!("Replace {old} with its opposite: {}", sentence.with(old)),
        _ => format!("Put the opposite of {old} in its place: {}", sentence.with(old)),
    };
    let answer = format!(
        "The opposite of {old} is {new}. With {new} in place of {old}: {}",
        sentence.with(new)
    );
    (prompt, answer)
}
