//! Decodes ids while they are generated: only whole characters, each once.

use super::TextTokenizer;
use crate::error::DataError;

/// The character that decoders write for incomplete or invalid bytes.
const REPLACEMENT: char = '\u{fffd}';

/// The largest number of ids to hold back. A character has at most four bytes, but consecutive tokens
/// may all end inside one. Text that stays incomplete for longer is given out as it is, because each
/// new id decodes all ids held back again.
const MAX_HELD_BACK: usize = 64;

/// Turns ids into text increments. All increments and [`Self::finish`] together equal the decoding of
/// all ids at once. One exception: SentencePiece decoders replace a whole run of byte tokens if its
/// last character is incomplete, but earlier characters of the run have been given out by then.
///
/// A character may be divided among tokens, and a decoder may treat the first token of a text
/// differently (drop its leading space). So no id is decoded by itself: the increment is the text that
/// new ids add to that of the ids given out last.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    skip_special: bool,
    /// The ids given out last, which end with a whole character, then the ids held back.
    window: Vec<u32>,
    /// The number of ids in `window` that have been given out.
    num_given: usize,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a TextTokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, window: Vec::new(), num_given: 0 }
    }

    /// Takes the next id; returns the text that it completes, if any.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, DataError> {
        self.window.push(id);
        let added = self.added_text()?;
        let is_held_back = added.is_empty() || added.ends_with(REPLACEMENT);
        if is_held_back && self.window.len() - self.num_given < MAX_HELD_BACK {
            return Ok(None);
        }
        self.window.drain(..self.num_given);
        self.num_given = self.window.len();
        Ok(Some(added).filter(|added| !added.is_empty()))
    }

    /// Ends the stream; returns the text held back, with U+FFFD for an incomplete character.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn finish(self) -> Result<Option<String>, DataError> {
        Ok(Some(self.added_text()?).filter(|text| !text.is_empty()))
    }

    /// The text that the ids held back add to that of the ids given out.
    fn added_text(&self) -> Result<String, DataError> {
        let given = self.tokenizer.decode(&self.window[..self.num_given], self.skip_special)?;
        let mut text = self.tokenizer.decode(&self.window, self.skip_special)?;
        // A decoder may change text that has been given out and cannot be retracted. Everything after
        // the common prefix counts as added.
        let common = given.chars().zip(text.chars()).take_while(|(a, b)| a == b);
        let common = common.map(|(character, _)| character.len_utf8()).sum();
        Ok(text.split_off(common))
    }
}
