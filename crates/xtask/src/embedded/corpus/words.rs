//! The words that all kinds of tasks share, and random choices among them.
//!
//! The lists are short on purpose: with a vocabulary of 1,024 tokens nearly every word here is one token, so
//! copying a word is copying a token.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// Things that can be put somewhere.
pub(super) const OBJECTS: [&str; 60] = [
    "lamp", "cup", "chair", "box", "spoon", "rope", "drum", "bell", "brush", "candle", "basket",
    "bottle", "bucket", "blanket", "button", "clock", "kettle", "ladder", "mirror", "needle",
    "pillow", "plate", "ribbon", "shovel", "stone", "hammer", "key", "coat", "hat", "boot", "tent",
    "map", "book", "pencil", "wheel", "net", "nail", "pan", "pot", "jar", "bowl", "broom",
    "barrel", "anchor", "kite", "ball", "vase", "mat", "shell", "coin", "ring", "glove", "fork",
    "knife", "towel", "umbrella", "whistle", "violin", "oven", "urn",
];

/// Things to eat.
pub(super) const FOODS: [&str; 24] = [
    "apple", "bread", "butter", "carrot", "cheese", "egg", "fig", "grape", "honey", "jam", "lemon",
    "melon", "nut", "onion", "peach", "pear", "plum", "potato", "rice", "salt", "soup", "sugar",
    "tomato", "yogurt",
];

/// Animals.
pub(super) const ANIMALS: [&str; 24] = [
    "ant", "bear", "bee", "cat", "cow", "crab", "deer", "dog", "duck", "eagle", "fox", "frog",
    "goat", "hen", "horse", "lion", "mouse", "owl", "pig", "rabbit", "sheep", "snail", "tiger",
    "wolf",
];

/// Colours.
pub(super) const COLOURS: [&str; 10] =
    ["red", "blue", "green", "white", "black", "brown", "yellow", "grey", "pink", "purple"];

/// Pairs of opposite adjectives that fit any object.
pub(super) const OPPOSITES: [(&str, &str); 13] = [
    ("old", "new"),
    ("big", "small"),
    ("heavy", "light"),
    ("clean", "dirty"),
    ("wet", "dry"),
    ("wide", "narrow"),
    ("rough", "smooth"),
    ("bright", "dull"),
    ("cheap", "costly"),
    ("thick", "thin"),
    ("long", "short"),
    ("warm", "cold"),
    ("soft", "hard"),
];

/// Things that cannot be moved.
pub(super) const PLACES: [&str; 16] = [
    "door", "window", "bench", "garden", "river", "bridge", "barn", "shed", "tower", "well",
    "gate", "wall", "hill", "road", "station", "harbour",
];

/// Prepositions of place.
pub(super) const PREPOSITIONS: [&str; 5] = ["near", "behind", "under", "beside", "above"];

/// One of `choices`, all equally likely.
pub(super) fn pick<T: Copy>(rng: &mut ChaCha8Rng, choices: &[T]) -> T {
    choices[rng.random_range(0..choices.len())]
}

/// `count` different members of `choices`, in random order.
pub(super) fn pick_distinct<T: Copy + PartialEq>(
    rng: &mut ChaCha8Rng,
    choices: &[T],
    count: usize,
) -> Vec<T> {
    assert!(count <= choices.len(), "more distinct members than there are");
    let mut picked = Vec::with_capacity(count);
    while picked.len() < count {
        let choice = pick(rng, choices);
        if !picked.contains(&choice) {
            picked.push(choice);
        }
    }
    picked
}

/// An adjective and its opposite, in random order.
pub(super) fn pick_opposites(rng: &mut ChaCha8Rng) -> (&'static str, &'static str) {
    let (first, second) = pick(rng, &OPPOSITES);
    if rng.random() { (first, second) } else { (second, first) }
}

/// `count` different nouns of any kind.
pub(super) fn pick_nouns(rng: &mut ChaCha8Rng, count: usize) -> Vec<&'static str> {
    let nouns = [OBJECTS.as_slice(), &FOODS, &ANIMALS].concat();
    pick_distinct(rng, &nouns, count)
}

/// `A` or `An`, depending on the next word.
pub(super) fn article(next: &str) -> &'static str {
    if next.starts_with(['a', 'e', 'i', 'o', 'u']) { "An" } else { "A" }
}
