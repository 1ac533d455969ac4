//! Zip archives as `torch.save` writes them: entries stored as they are, one after the other, with
//! 64-bit sizes where files are large. Anything else, compression above all, is refused.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use crate::error::ModelError;

/// The longest table of contents that is read: a million entries.
const MAX_TABLE_BYTES: u64 = 100_000_000;

/// The last record of an archive, but for a comment of up to 65,535 bytes.
const END_BYTES: u64 = 22;

/// Where the entries of an archive are.
#[derive(Debug)]
pub(super) struct Archive {
    entries: BTreeMap<String, Entry>,
}

/// The bytes of an entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    /// Where in the file.
    pub(super) start: u64,
    pub(super) len: u64,
}

/// Why an archive cannot be read.
#[derive(Debug)]
pub(super) enum ZipError {
    Io(std::io::Error),
    Broken(String),
}

impl ZipError {
    /// The same of a file.
    pub(super) fn at(self, path: &Path) -> ModelError {
        match self {
            Self::Io(error) => ModelError::io("read", path, error),
            Self::Broken(problem) => ModelError::Torch { path: path.to_path_buf(), problem },
        }
    }
}

fn broken(problem: &str) -> ZipError {
    ZipError::Broken(problem.to_owned())
}

/// Little-endian numbers, one after the other.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, num: usize) -> Result<&'a [u8], ZipError> {
        let cut = self.0.split_at_checked(num);
        let (bytes, rest) = cut.ok_or_else(|| broken("it is cut short, or is no zip archive"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn number<const BYTES: usize>(&mut self) -> Result<u64, ZipError> {
        let mut all = [0_u8; 8];
        all[..BYTES].copy_from_slice(self.bytes(BYTES)?);
        Ok(u64::from_le_bytes(all))
    }

    fn u16(&mut self) -> Result<u64, ZipError> {
        self.number::<2>()
    }

    fn u32(&mut self) -> Result<u64, ZipError> {
        self.number::<4>()
    }

    fn u64(&mut self) -> Result<u64, ZipError> {
        self.number::<8>()
    }
}

fn read_at(mut file: &File, start: u64, len: u64) -> Result<Vec<u8>, ZipError> {
    let mut bytes = vec![0_u8; usize::try_from(len).map_err(|e| broken(&e.to_string()))?];
    file.seek(SeekFrom::Start(start)).map_err(ZipError::Io)?;
    file.read_exact(&mut bytes).map_err(ZipError::Io)?;
    Ok(bytes)
}

impl Entry {
    /// Its bytes.
    pub(super) fn read(&self, mut file: &File) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(self.start))?;
        file.take(self.len).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

impl Archive {
    /// Reads the table of contents.
    pub(super) fn read(file: &File) -> Result<Self, ZipError> {
        let file_bytes = file.metadata().map_err(ZipError::Io)?.len();
        let (start, len) = table_of(file, file_bytes)?;
        if len > MAX_TABLE_BYTES || start.checked_add(len).is_none_or(|end| end > file_bytes) {
            return Err(broken("its table of contents does not fit it"));
        }
        let table = read_at(file, start, len)?;
        let (mut fields, mut entries) = (Fields(&table), BTreeMap::new());
        while !fields.0.is_empty() {
            let (name, entry) = entry(&mut fields, file, file_bytes)?;
            if entries.insert(name.clone(), entry).is_some() {
                return Err(ZipError::Broken(format!("it has two entries `{name}`")));
            }
        }
        Ok(Self { entries })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub(super) fn entry(&self, name: &str) -> Option<Entry> {
        self.entries.get(name).copied()
    }
}

/// Where the table of contents begins, and its length.
fn table_of(file: &File, file_bytes: u64) -> Result<(u64, u64), ZipError> {
    let tail_bytes = file_bytes.min(END_BYTES + u64::from(u16::MAX));
    let tail_start = file_bytes - tail_bytes;
    let tail = read_at(file, tail_start, tail_bytes)?;
    let found = tail.windows(4).rposition(|window| window == b"PK\x05\x06");
    let Some(place) = found else {
        return Err(broken(
            "it is cut short, or is no zip archive, as torch before 1.6 wrote none",
        ));
    };
    let mut end = Fields(&tail[place + 4..]);
    end.bytes(8)?;
    let (len, start) = (end.u32()?, end.u32()?);
    let comment_len = end.u16()?;
    if end.0.len() as u64 != comment_len {
        return Err(broken("it is cut short"));
    }
    if start != u64::from(u32::MAX) && len != u64::from(u32::MAX) {
        return Ok((start, len));
    }
    // A record of 64-bit numbers stands elsewhere; a locator before this one says where.
    let locator = place.checked_sub(20).and_then(|start| tail.get(start..place));
    let mut locator = Fields(locator.unwrap_or_default());
    if locator.bytes(4)? != b"PK\x06\x07" {
        return Err(broken("its 64-bit record is not there"));
    }
    locator.bytes(4)?;
    let record_start = locator.u64()?;
    if record_start.checked_add(56).is_none_or(|end| end > file_bytes) {
        return Err(broken("its 64-bit record lies beyond its end"));
    }
    let record = read_at(file, record_start, 56)?;
    let mut record = Fields(&record);
    if record.bytes(4)? != b"PK\x06\x06" {
        return Err(broken("its 64-bit record is not one"));
    }
    record.bytes(36)?;
    let (len, start) = (record.u64()?, record.u64()?);
    Ok((start, len))
}

/// One entry of the table, which may leave out what does not fit 32 bits.
fn entry(
    fields: &mut Fields<'_>,
    file: &File,
    file_bytes: u64,
) -> Result<(String, Entry), ZipError> {
    if fields.bytes(4)? != b"PK\x01\x02" {
        return Err(broken("its table of contents is not one"));
    }
    fields.bytes(4)?;
    let (flags, method) = (fields.u16()?, fields.u16()?);
    fields.bytes(8)?;
    let (mut stored_len, mut len) = (fields.u32()?, fields.u32()?);
    let [name_len, extra_len, comment_len] = [fields.u16()?, fields.u16()?, fields.u16()?];
    fields.bytes(8)?;
    let mut header = fields.u32()?;
    let name = String::from_utf8_lossy(fields.bytes(name_len as usize)?).into_owned();
    let mut extra = Fields(fields.bytes(extra_len as usize)?);
    fields.bytes(comment_len as usize)?;
    while !extra.0.is_empty() {
        let (kind, field_len) = (extra.u16()?, extra.u16()?);
        let mut field = Fields(extra.bytes(field_len as usize)?);
        if kind == 1 {
            for number in [&mut len, &mut stored_len, &mut header] {
                if *number == u64::from(u32::MAX) {
                    *number = field.u64()?;
                }
            }
        }
    }
    let fail = |problem: &str| ZipError::Broken(format!("its entry `{name}` {problem}"));
    if method != 0 || flags & 1 != 0 || stored_len != len {
        return Err(fail("is compressed or encrypted, which torch never writes"));
    }
    if header.checked_add(30).is_none_or(|end| end > file_bytes) {
        return Err(fail("lies beyond its end"));
    }
    let local = read_at(file, header, 30)?;
    let mut local = Fields(&local);
    if local.bytes(4)? != b"PK\x03\x04" {
        return Err(fail("is not where the table says"));
    }
    local.bytes(22)?;
    let start = header + 30 + local.u16()? + local.u16()?;
    if start.checked_add(len).is_none_or(|end| end > file_bytes) {
        return Err(fail("lies beyond its end"));
    }
    Ok((name, Entry { start, len }))
}
