//! Changes within a frame that stays valid, or nearly: a safetensors header after its length, a Parquet
//! footer before its length, the content of gzip, and a file of a training's state.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;

use super::{EDGES, Mutator};
use crate::readers::state;

/// The size of a Parquet footer's length and of the magic after it.
const FOOTER_TAIL: usize = 8;

impl Mutator<'_> {
    /// A safetensors file with another header, or with other data after it.
    pub(super) fn safetensors(&mut self, bytes: &[u8], num_changes: usize) -> Vec<u8> {
        let Some((length, rest)) = bytes.split_first_chunk() else { return bytes.to_vec() };
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let Some((header, data)) = rest.split_at_checked(length) else { return bytes.to_vec() };
        let (mut header, mut data) = (header.to_vec(), data.to_vec());
        if self.one_in(6) {
            self.change(&mut data);
        } else {
            header = self.json(&header, num_changes);
        }
        let length = match self.one_in(16) {
            true => EDGES[self.below(EDGES.len())],
            false => header.len() as u64,
        };
        [&length.to_le_bytes()[..], &header, &data].concat()
    }

    /// A Parquet file with other bytes in its footer, whose length stays correct, or in its pages.
    pub(super) fn parquet(&mut self, bytes: &[u8], num_changes: usize) -> Vec<u8> {
        let footer_end = bytes.len().saturating_sub(FOOTER_TAIL);
        let Some(length) = bytes[footer_end..].first_chunk() else { return bytes.to_vec() };
        let length = u32::from_le_bytes(*length) as usize;
        let Some(start) = footer_end.checked_sub(length) else { return bytes.to_vec() };
        let (pages, footer) = bytes[..footer_end].split_at(start);
        let (mut pages, mut footer) = (pages.to_vec(), footer.to_vec());
        match self.below(8) {
            0..=3 => (0..num_changes).for_each(|_| self.change_in_place(&mut pages)),
            4..=6 => (0..num_changes).for_each(|_| self.change_in_place(&mut footer)),
            _ => self.change(&mut footer),
        }
        let length = footer.len() as u32;
        [&pages[..], &footer, &length.to_le_bytes(), b"PAR1"].concat()
    }

    /// A training's state with one file changed.
    pub(super) fn state(&mut self, bytes: &[u8], num_changes: usize) -> Vec<u8> {
        let mut files = state::split(bytes);
        let at = self.below(files.len());
        let Some((name, file)) = files.get_mut(at) else { return bytes.to_vec() };
        if name.ends_with(".toml") {
            *file = self.toml(file, num_changes);
        } else {
            (0..num_changes).for_each(|_| self.change(file));
        }
        state::join(&files)
    }

    /// Changed content of gzip; sometimes an enormous run of zeros.
    pub(super) fn gzip(&mut self, bytes: &[u8], num_changes: usize) -> Vec<u8> {
        let mut inner = Vec::new();
        if MultiGzDecoder::new(bytes).read_to_end(&mut inner).is_err() {
            return bytes.to_vec();
        }
        let mut inner = self.json_lines(&inner, num_changes);
        if self.one_in(256) {
            inner.resize(inner.len() + (8 << 20), 0);
        }
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        let written = encoder.write_all(&inner).and_then(|()| encoder.finish());
        written.expect("memory takes all bytes")
    }
}
