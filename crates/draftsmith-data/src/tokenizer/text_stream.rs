//! Ids to text while they are being generated: only whole characters, nothing twice.

use super::TextTokenizer;
use crate::error::DataError;

/// What a decoder writes for bytes that are not (yet) a character.
const REPLACEMENT: char = '\u{fffd}';

/// So many ids are held back at most. A character has four bytes, but tokens may end in the midst of
/// one for a while; text that stays broken longer is given out as it is, since each id costs what
/// those that are held back cost.
const MOST_HELD_BACK: usize = 64;

/// Turns ids into text increments; what all of them and [`Self::finish`] give together is what
/// decoding all ids at once gives. (SentencePiece's byte tokens are the one exception: a decoder
/// gives up a whole run of them if its last character is broken, but characters before that one
/// have been given out by then.)
///
/// A character may be split over tokens, and a decoder may treat the first token of a text in its
/// own way (drop its leading space), so an id is never decoded alone: the increment is what the new
/// ids add to the text of the ids given out last.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    skip_special: bool,
    /// The ids given out last, which end with a whole character, and those held back after them.
    window: Vec<u32>,
    /// How many of `window` have been given out.
    num_given: usize,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a TextTokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, window: Vec::new(), num_given: 0 }
    }

    /// Takes the next id; gives the text that it completes, if it completes any.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, DataError> {
        self.window.push(id);
        let added = self.added_text()?;
        let is_held_back = added.is_empty() || added.ends_with(REPLACEMENT);
        if is_held_back && self.window.len() - self.num_given < MOST_HELD_BACK {
            return Ok(None);
        }
        self.window.drain(..self.num_given);
        self.num_given = self.window.len();
        Ok(Some(added).filter(|added| !added.is_empty()))
    }

    /// Ends the stream; gives what was held back, with U+FFFD for a character that was never
    /// completed.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn finish(self) -> Result<Option<String>, DataError> {
        Ok(Some(self.added_text()?).filter(|text| !text.is_empty()))
    }

    /// What the ids held back add to the text of those given out.
    fn added_text(&self) -> Result<String, DataError> {
        let given = self.tokenizer.decode(&self.window[..self.num_given], self.skip_special)?;
        let mut text = self.tokenizer.decode(&self.window, self.skip_special)?;
        // A decoder that tidies up across tokens may change text that was given out; it cannot be
        // taken back, so what follows the common beginning is what was added.
        let common = given.chars().zip(text.chars()).take_while(|(a, b)| a == b);
        let common = common.map(|(character, _)| character.len_utf8()).sum();
        Ok(text.split_off(common))
    }
}
