//! Counts of accepted candidates by position in the text, in which a drafter's window or its greatest
//! position shows.

use std::collections::BTreeMap;

use super::Recordings;

/// The last position of the first range. Each further range ends at four times the position before.
const FIRST_RANGE: usize = 512;

impl Recordings {
    /// Counts the first candidates of rounds that begin at every token, and the accepted ones of them, by
    /// position in the text, which includes the prompt. Ranges end at 512, 2,048, 8,192 and so on. The map goes
    /// from the last position of each range to both counts of each response that reaches it.
    pub fn by_text_position(&self) -> BTreeMap<usize, Vec<[usize; 2]>> {
        let mut ranges: BTreeMap<usize, Vec<[usize; 2]>> = BTreeMap::new();
        for response in &self.responses {
            let mut own: BTreeMap<usize, [usize; 2]> = BTreeMap::new();
            // Nothing is drafted at the last token within the limit.
            let places = response.places.iter().take(response.limit.saturating_sub(1));
            for (place, position) in places.zip(response.prompt.len() + 1..) {
                let mut last = FIRST_RANGE;
                while last < position {
                    last *= 4;
                }
                let [drafted, accepted] = own.entry(last).or_default();
                *drafted += 1;
                *accepted += usize::from(place.rejected().is_none());
            }
            own.into_iter().for_each(|(last, counts)| ranges.entry(last).or_default().push(counts));
        }
        ranges
    }
}
