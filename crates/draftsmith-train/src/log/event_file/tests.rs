//! Tests that read event files back with an independent reader: it parses the framing, checksums and
//! messages by hand.

use std::path::Path;

use super::*;

/// The masked CRC-32C, bit by bit.
fn checksum(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    let crc = !crc;
    crc.rotate_left(17).wrapping_add(0xa282_ead8)
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(length);
    *bytes = rest;
    taken
}

/// Reads groups of seven bits, the lowest first; the last group's high bit is 0.
fn varint(bytes: &mut &[u8]) -> u64 {
    let mut number = 0;
    for place in 0.. {
        let byte = take(bytes, 1)[0];
        number |= u64::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            break;
        }
    }
    number
}

/// The fields of a message: their numbers and bytes. A varint has eight bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => varint(&mut bytes).to_le_bytes().to_vec(),
            1 => take(&mut bytes, 8).to_vec(),
            2 => {
                let length = varint(&mut bytes) as usize;
                take(&mut bytes, length).to_vec()
            }
            5 => take(&mut bytes, 4).to_vec(),
            kind => panic!("wire type {kind}"),
        };
        found.push((key >> 3, value));
    }
    found
}

fn field(fields: &[(u64, Vec<u8>)], number: u64) -> Option<&[u8]> {
    fields.iter().find(|(found, _)| *found == number).map(|(_, bytes)| &bytes[..])
}

/// Checks a file and returns its numbers: (step, name, number).
fn read(path: &Path) -> Vec<(i64, String, f32)> {
    let all = std::fs::read(path).unwrap();
    let mut bytes = &all[..];
    let mut numbers = Vec::new();
    let mut nth = 0;
    while !bytes.is_empty() {
        let header = take(&mut bytes, 8);
        let length = u64::from_le_bytes(header.try_into().unwrap()) as usize;
        assert_eq!(take(&mut bytes, 4), checksum(header).to_le_bytes());
        let data = take(&mut bytes, length);
        assert_eq!(take(&mut bytes, 4), checksum(data).to_le_bytes());
        let event = fields(data);
        let wall_time = f64::from_le_bytes(field(&event, 1).unwrap().try_into().unwrap());
        assert!(wall_time > 1.7e9, "{wall_time}");
        let step = field(&event, 2).map_or(0, |step| i64::from_le_bytes(step.try_into().unwrap()));
        match nth {
            0 => assert_eq!(field(&event, 3).unwrap(), b"brain.Event:2"),
            1 => {
                assert_eq!(fields(field(&event, 7).unwrap())[0], (1, vec![1, 0, 0, 0, 0, 0, 0, 0]))
            }
            _ => {
                for (number, value) in fields(field(&event, 5).unwrap()) {
                    assert_eq!(number, 1);
                    let value = fields(&value);
                    let tag = String::from_utf8(field(&value, 1).unwrap().to_vec()).unwrap();
                    let number = field(&value, 2).unwrap().try_into().unwrap();
                    numbers.push((step, tag, f32::from_le_bytes(number)));
                }
            }
        }
        nth += 1;
    }
    numbers
}

/// The numbers of all files, in the order in which TensorBoard reads them.
fn read_all(dir: &Path) -> Vec<(i64, String, f32)> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().flat_map(|path| read(path)).collect()
}

/// Logs steps, with a validation after every third.
fn take_steps(file: &mut EventFile, steps: std::ops::RangeInclusive<usize>) {
    for step in steps {
        let loss = 1.0 / step as f64;
        file.push_numbers(TRAINING, step, &[("loss", loss), ("learning_rate", 0.0)]).unwrap();
        if step.is_multiple_of(3) {
            file.push_numbers(VALIDATION, step, &[("KL", 0.5)]).unwrap();
        }
    }
}

#[test]
fn an_independent_reader_finds_every_number() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = EventFile::begin(dir.path(), 0, 0).unwrap();
    take_steps(&mut file, 1..=3);
    let number = |step, name: &str, value| (step, name.to_owned(), value);
    let expected = [
        number(1, "train/loss", 1.0),
        number(1, "train/learning_rate", 0.0),
        number(2, "train/loss", 0.5),
        number(2, "train/learning_rate", 0.0),
        number(3, "train/loss", 1.0 / 3.0),
        number(3, "train/learning_rate", 0.0),
        number(3, "validation/KL", 0.5),
    ];
    assert_eq!(read_all(dir.path()), expected);
    // Runs that end before their first step leave no file.
    let empty = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        EventFile::begin(empty.path(), 0, 0).unwrap();
    }
    take_steps(&mut EventFile::begin(empty.path(), 0, 0).unwrap(), 1..=3);
    assert_eq!(read_all(empty.path()), expected);
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 1);
}

#[test]
fn no_step_appears_twice_after_a_kill_at_any_point() {
    let whole = tempfile::tempdir().unwrap();
    take_steps(&mut EventFile::begin(whole.path(), 0, 0).unwrap(), 1..=9);
    let expected = read_all(whole.path());
    let check = |saved: usize, killed: usize, is_validated: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut file = EventFile::begin(dir.path(), 0, 0).unwrap();
        take_steps(&mut file, 1..=killed);
        if killed > saved {
            // The process was killed while it wrote a record.
            let length = file.file.metadata().unwrap().len();
            file.file.set_len(length - 5).unwrap();
        }
        let num_validations = saved / 3 - usize::from(!is_validated);
        let mut file = EventFile::begin(dir.path(), saved, num_validations).unwrap();
        if !is_validated {
            file.push_numbers(VALIDATION, saved, &[("KL", 0.5)]).unwrap();
        }
        take_steps(&mut file, saved + 1..=9);
        assert_eq!(read_all(dir.path()), expected, "saved after {saved}, killed after {killed}");
    };
    for saved in 0..=9 {
        for killed in saved..=9 {
            check(saved, killed, true);
            if saved > 0 && saved.is_multiple_of(3) {
                check(saved, killed, false);
            }
        }
    }
}

#[test]
fn stopping_after_every_step_loses_nothing() {
    let whole = tempfile::tempdir().unwrap();
    take_steps(&mut EventFile::begin(whole.path(), 0, 0).unwrap(), 1..=9);
    let dir = tempfile::tempdir().unwrap();
    for step in 1..=9 {
        let mut file = EventFile::begin(dir.path(), step - 1, (step - 1) / 3).unwrap();
        take_steps(&mut file, step..=step);
    }
    assert_eq!(read_all(dir.path()), read_all(whole.path()));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 9);
    // A new training removes all of them.
    drop(EventFile::begin(dir.path(), 0, 0).unwrap());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    assert!(read_all(dir.path()).is_empty());
}
