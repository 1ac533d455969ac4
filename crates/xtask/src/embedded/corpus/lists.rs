//! Lists of words: sort, reverse, remove, add, count.
//!
//! The hard tokens come first: the next word in the alphabet, a word's position, a count. The changed list
//! after them is mostly copied.

use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::words::{pick, pick_nouns};

pub(super) fn draw(rng: &mut ChaCha8Rng) -> (String, String) {
    match rng.random_range(0..12) {
        0..=2 => sort(rng),
        3..=4 => reverse(rng),
        5..=6 => remove(rng),
        7..=8 => add(rng),
        9..=10 => count(rng),
        _ => count_word(rng),
    }
}

fn draw_words(rng: &mut ChaCha8Rng) -> Vec<&'static str> {
    let num_words = rng.random_range(5..=8);
    pick_nouns(rng, num_words)
}

fn sort(rng: &mut ChaCha8Rng) -> (String, String) {
    let words = draw_words(rng);
    let mut sorted = words.clone();
    sorted.sort_unstable();
    let order = pick(rng, &["in alphabetical order", "from A to Z", "from Z to A"]);
    if order == "from Z to A" {
        sorted.reverse();
    }
    let verb = pick(rng, &["Sort", "Put", "Write"]);
    let prompt = format!("{verb} these words {order}: {}.", words.join(", "));
    let answer = format!(
        "First comes {}. The words {order} are: {}.",
        sorted.join(", then "),
        sorted.join(", ")
    );
    (prompt, answer)
}

fn reverse(rng: &mut ChaCha8Rng) -> (String, String) {
    let words = draw_words(rng);
    let asked =
        pick(rng, &["Reverse this list", "Write this list backwards", "Turn this list around"]);
    let reversed: Vec<_> = words.iter().rev().copied().collect();
    let prompt = format!("{asked}: {}.", words.join(", "));
    let answer = format!(
        "The list begins with {} and ends with {}. The reversed list is: {}.",
        words[0],
        reversed[0],
        reversed.join(", ")
    );
    (prompt, answer)
}

fn remove(rng: &mut ChaCha8Rng) -> (String, String) {
    let mut words = draw_words(rng);
    let position = rng.random_range(0..words.len());
    let list = words.join(", ");
    let removed = words.remove(position);
    let prompt = match rng.random_range(0..3) {
        0 => format!("Remove {removed} from this list: {list}."),
        1 => format!("Take {removed} out of this list: {list}."),
        _ => format!("Write this list without {removed}: {list}."),
    };
    let answer = format!(
        "The word {removed} is number {} in the list. The list without {removed} is: {}.",
        position + 1,
        words.join(", ")
    );
    (prompt, answer)
}

fn add(rng: &mut ChaCha8Rng) -> (String, String) {
    let mut words = draw_words(rng);
    let added = words.remove(0);
    let list = words.join(", ");
    let num_words = words.len();
    let end = pick(rng, &["start", "end"]);
    if end == "start" {
        words.insert(0, added);
    } else {
        words.push(added);
    }
    let verb = pick(rng, &["Add", "Put", "Write"]);
    let connector = if verb == "Add" { "to" } else { "at" };
    let prompt = format!("{verb} {added} {connector} the {end} of this list: {list}.");
    let answer = format!(
        "The list has {num_words} words. With {added} at the {end} it has {} words: {}.",
        num_words + 1,
        words.join(", ")
    );
    (prompt, answer)
}

fn count(rng: &mut ChaCha8Rng) -> (String, String) {
    let words = draw_words(rng);
    let list = words.join(", ");
    let prompt = match rng.random_range(0..3) {
        0 => format!("Count the words in this list: {list}."),
        1 => format!("How many words are in this list? {list}."),
        _ => format!("Number the words in this list: {list}."),
    };
    let numbered: Vec<_> =
        (1..).zip(&words).map(|(number, word)| format!("{number} {word}")).collect();
    let answer =
        format!("The words are {}. The list has {} words.", numbered.join(", "), words.len());
    (prompt, answer)
}

fn count_word(rng: &mut ChaCha8Rng) -> (String, String) {
    let mut words = draw_words(rng);
    words.truncate(5);
    let counted = words[0];
    let num_repeats = rng.random_range(1..=2);
    words.extend(vec![counted; num_repeats]);
    words.shuffle(rng);
    let list = words.join(", ");
    let prompt = match rng.random_range(0..2) {
        0 => format!("How many times is {counted} in this list? {list}."),
        _ => format!("Count the word {counted} in this list: {list}."),
    };
    let mut num_found = 0;
    let checked: Vec<_> = words
        .iter()
        .map(|&word| {
            if word == counted {
                num_found += 1;
                format!("{word}: {num_found}")
            } else {
                format!("{word}: no")
            }
        })
        .collect();
    let answer =
        format!("{}. The word {counted} is in the list {num_found} times.", checked.join(", "));
    (prompt, answer)
}
