//! Passages of two to four sentences, copied whole, in reverse order, or one sentence at a time.
//!
//! Copying is the easiest kind: a model only chooses the next sentence and finds its start.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::words::{
    COLOURS, OBJECTS, PLACES, PREPOSITIONS, article, pick, pick_distinct, pick_opposites,
};

const ORDINALS: [&str; 4] = ["first", "second", "third", "fourth"];

/// A passage. No object occurs in two of its sentences.
struct Passage {
    sentences: Vec<String>,
    /// The object that each sentence is about.
    subjects: Vec<&'static str>,
}

pub(super) fn draw(rng: &mut ChaCha8Rng) -> (String, String) {
    let num_sentences = pick(rng, &[2, 3, 3, 4, 4]);
    let Passage { sentences, subjects } = draw_passage(rng, num_sentences);
    let passage = sentences.join(" ");
    let chosen = rng.random_range(0..num_sentences);
    let verb = pick(rng, &["Copy", "Repeat", "Write out"]);
    match rng.random_range(0..10) {
        0..=3 => {
            let text = pick(rng, &["passage", "text"]);
            (format!("{verb} this {text}:\n{passage}"), passage)
        }
        4..=5 => {
            let reversed: Vec<_> = sentences.iter().rev().map(String::as_str).collect();
            let prompt = format!("{verb} these sentences in reverse order:\n{passage}");
            (prompt, reversed.join(" "))
        }
        6..=7 => {
            let ordinal = ORDINALS[chosen];
            let prompt = format!("{verb} the {ordinal} sentence of this passage:\n{passage}");
            let answer = format!(
                "The passage has {num_sentences} sentences. Sentence {} is: {}",
                chosen + 1,
                sentences[chosen]
            );
            (prompt, answer)
        }
        _ => {
            let subject = subjects[chosen];
            let prompt = format!("{verb} the sentence about the {subject}:\n{passage}");
            let answer =
                format!("Sentence {} is about the {subject}: {}", chosen + 1, sentences[chosen]);
            (prompt, answer)
        }
    }
}

fn draw_passage(rng: &mut ChaCha8Rng, num_sentences: usize) -> Passage {
    let objects = pick_distinct(rng, &OBJECTS, 2 * num_sentences);
    let (sentences, subjects) =
        objects.chunks_exact(2).map(|pair| (draw_sentence(rng, pair[0], pair[1]), pair[0])).unzip();
    Passage { sentences, subjects }
}

/// A sentence about `subject`, which also mentions `other` if the sentence has room for it.
fn draw_sentence(rng: &mut ChaCha8Rng, subject: &str, other: &str) -> String {
    let (adjective, opposite) = pick_opposites(rng);
    let colour = pick(rng, &COLOURS);
    let place = pick(rng, &PLACES);
    let preposition = pick(rng, &PREPOSITIONS);
    match rng.random_range(0..6) {
        0 => format!("The {adjective} {subject} is {preposition} the {colour} {other}."),
        1 => format!("The {subject} by the {place} is {colour} and {adjective}."),
        2 => format!("{} {adjective} {subject} is {preposition} the {place}.", article(adjective)),
        3 => format!("The {subject} is {adjective}, but the {other} is {opposite}."),
        4 => format!("{} {colour} {subject} was found near the {place}.", article(colour)),
        _ => {
            let price = rng.random_range(2..100);
            format!("The {adjective} {subject} costs {price} coins.")
        }
    }
}
