//! Files of `torch.save` are read. Anything else in a pickle makes no tensor, a broken archive is
//! refused, and nothing is executed.

use std::path::Path;

use crate::error::Result;
use crate::weights::WeightReader;

/// Pickle instructions, named as in Python's `pickletools`.
fn text(text: &str) -> Vec<u8> {
    [&[b'X'][..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

fn global(module: &str, name: &str) -> Vec<u8> {
    format!("c{module}\n{name}\n").into_bytes()
}

fn int(int: i32) -> Vec<u8> {
    [&[b'J'][..], &int.to_le_bytes()].concat()
}

fn tuple(values: &[Vec<u8>]) -> Vec<u8> {
    [b"(", values.concat().as_slice(), b"t"].concat()
}

fn ints(values: &[i32]) -> Vec<u8> {
    tuple(&values.iter().map(|value| int(*value)).collect::<Vec<_>>())
}

/// A tensor of storage `0`.
fn tensor(offset: i32, shape: &[i32], strides: &[i32]) -> Vec<u8> {
    let kind = global("torch", "FloatStorage");
    let storage = tuple(&[text("storage"), kind, text("0"), text("cpu"), int(6)]);
    let storage = [storage.as_slice(), b"Q"].concat();
    let hooks = [global("collections", "OrderedDict").as_slice(), b")R"].concat();
    let arguments = tuple(&[storage, int(offset), ints(shape), ints(strides), vec![0x89], hooks]);
    [global("torch._utils", "_rebuild_tensor_v2").as_slice(), &arguments, b"R"].concat()
}

/// A dictionary with one value, called `a`.
fn pickle(value: &[u8]) -> Vec<u8> {
    [b"\x80\x02}q\x00", text("a").as_slice(), value, b"s."].concat()
}

/// An archive of raw entries, each with compression method `method`.
fn archive(entries: &[(&str, &[u8])], method: u16) -> Vec<u8> {
    let (mut file, mut table) = (Vec::new(), Vec::new());
    for (name, bytes) in entries {
        let (start, len) = (file.len() as u32, bytes.len() as u32);
        let mut sizes = [0_u8; 12];
        sizes[4..8].copy_from_slice(&len.to_le_bytes());
        sizes[8..].copy_from_slice(&len.to_le_bytes());
        let name_len = (name.len() as u16).to_le_bytes();
        let method = method.to_le_bytes();
        file.extend([b"PK\x03\x04\0\0\0\0".as_slice(), &method, &[0; 4], &sizes].concat());
        file.extend([name_len.as_slice(), &[0; 2], name.as_bytes(), bytes].concat());
        table.extend([b"PK\x01\x02\0\0\0\0\0\0".as_slice(), &method, &[0; 4], &sizes].concat());
        table.extend(
            [name_len.as_slice(), &[0; 12], &start.to_le_bytes(), name.as_bytes()].concat(),
        );
    }
    let num = (entries.len() as u16).to_le_bytes();
    let (start, len) = (file.len() as u32, table.len() as u32);
    file.extend(table);
    file.extend([b"PK\x05\x06\0\0\0\0".as_slice(), &num, &num].concat());
    file.extend([len.to_le_bytes().as_slice(), &start.to_le_bytes(), &[0; 2]].concat());
    file
}

fn of_pickle(pickle: &[u8]) -> Vec<u8> {
    archive(&[("m/data.pkl", pickle), ("m/data/0", &numbers())], 0)
}

/// 0 to 5, as stored.
fn numbers() -> Vec<u8> {
    (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect()
}

fn open(bytes: &[u8]) -> Result<WeightReader> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("pytorch_model.bin");
    std::fs::write(&path, bytes).expect("written");
    WeightReader::open_dir(dir.path())
}

#[test]
fn a_tensor_is_read_from_its_part_of_a_storage() {
    let read = |pickle: &[u8], shape: &[usize]| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("pytorch_model.bin"), of_pickle(pickle)).expect("written");
        let mut reader = WeightReader::open_dir(dir.path()).expect("opens");
        reader.take("a", shape).expect("reads")
    };
    assert_eq!(read(&pickle(&tensor(2, &[2, 2], &[2, 1])), &[2, 2]), [2.0, 3.0, 4.0, 5.0]);
    // The stride of a dimension of 1 does not matter.
    assert_eq!(read(&pickle(&tensor(1, &[3, 1], &[1, 77])), &[3, 1]), [1.0, 2.0, 3.0]);
    // A transposed view is gathered.
    let transposed = pickle(&tensor(0, &[3, 2], &[1, 3]));
    assert_eq!(read(&transposed, &[3, 2]), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    // A parameter is its tensor; a dictionary's attributes are ignored.
    let plain = tensor(0, &[6], &[1]);
    let arguments = tuple(&[plain, vec![0x88], vec![b'N']]);
    let parameter = global("torch._utils", "_rebuild_parameter");
    let mut dict = pickle(&[parameter.as_slice(), &arguments, b"R"].concat());
    dict.pop();
    dict.extend([b"}".as_slice(), &text("_metadata"), b"}sb."].concat());
    assert_eq!(read(&dict, &[6]).len(), 6);
}

#[test]
fn calls_of_other_functions_make_no_tensor() {
    let call = |module: &str, name: &str| {
        pickle(&[global(module, name).as_slice(), &tuple(&[text("true")]), b"R"].concat())
    };
    for pickle in [
        call("os", "system"),
        call("builtins", "eval"),
        call("torch._utils", "_rebuild_sparse_tensor"),
        call("collections", "OrderedDict"),
        pickle(&[text("os"), text("system"), vec![0x93]].concat()),
        pickle(&text("text")),
        pickle(b"ios\nsystem\n"),
        pickle(b")\x81"),
        pickle(&[tensor(0, &[6], &[1]).as_slice(), b"}b"].concat()),
    ] {
        if let Ok(reader) = open(&of_pickle(&pickle)) {
            assert_eq!(reader.names().count(), 0, "{pickle:?}");
        }
    }
}

#[test]
fn tensors_that_a_file_cannot_hold_and_broken_pickles_are_refused() {
    for pickle in [
        pickle(&tensor(-1, &[2], &[1])),
        pickle(&tensor(1, &[6], &[1])),
        pickle(&tensor(0, &[i32::MAX; 3], &[i32::MAX, 1, 1])),
        pickle(&tensor(i32::MAX, &[1], &[1])),
        // A stride of 0 repeats a number: 4 GB from a file of 300 bytes.
        pickle(&tensor(0, &[1_000_000, 1000], &[0, 0])),
        b"\x80\x02].".to_vec(),
        b"\x80\x02h\x07.".to_vec(),
        b"\x80\x02t.".to_vec(),
        b"\x80\x02\x85.".to_vec(),
        b"\x80\x02}X\xff\xff\xff\xff.".to_vec(),
        b"\x80\x02}".to_vec(),
    ] {
        let message = open(&of_pickle(&pickle)).expect_err("refused").to_string();
        assert!(message.contains("pytorch_model.bin"), "{message}");
    }
    // Nested and repeated values take no more memory than a bound.
    let mut nested = b"\x80\x02)".to_vec();
    nested.extend(b"q\x00h\x00h\x00\x86".repeat(200_000));
    nested.push(b'.');
    assert!(open(&of_pickle(&nested)).is_err());
}

#[test]
fn an_archive_that_torch_would_not_write_is_refused() {
    let good = pickle(&tensor(0, &[6], &[1]));
    let numbers = numbers();
    let data: (&str, &[u8]) = ("m/data/0", &numbers);
    let all: &[(&str, &[u8])] = &[("m/data.pkl", &good), data];
    for (file, part) in [
        (archive(all, 8), "deflate"),
        (archive(&[all[0], all[0]], 0), "data/0"),
        (archive(&[data], 0), "data.pkl"),
        (archive(&[all[0]], 0), "data/0"),
        (archive(&[all[0], ("m/data/0", &numbers[..20])], 0), "only 5 are available"),
        (archive(&[all[0], data, ("m/byteorder", b"big")], 0), "Big-endian"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.".to_vec(), "legacy"),
        (b"\x80\x02}.".to_vec(), "torch before 1.6"),
        (Vec::new(), "no ZIP"),
    ] {
        let read = open(&file).and_then(|mut reader| reader.take("a", &[6]));
        let message = read.expect_err("refused").to_string();
        assert!(message.contains("pytorch_model.bin") && message.contains(part), "{message}");
    }
    assert!(open(&archive(&[all[0], data, ("m/byteorder", b"little")], 0)).is_ok());
}

#[test]
fn a_file_cut_or_changed_anywhere_causes_an_error_or_keeps_its_shape() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let saved = std::fs::read(fixtures.join("llama-yarn-bin-f32/pytorch_model.bin"));
    let small = of_pickle(&pickle(&tensor(0, &[6], &[1])));
    for (whole, step) in [(small, 1), (saved.expect("the fixture is there"), 499)] {
        assert!(open(&whole).is_ok());
        for cut in (0..whole.len()).step_by(step) {
            assert!(open(&whole[..cut]).is_err(), "cut at {cut}");
        }
        for position in (0..whole.len()).step_by(step) {
            let mut changed = whole.clone();
            changed[position] ^= 0x15;
            if let Ok(mut reader) = open(&changed) {
                // Refused or read, but never a panic.
                let names: Vec<String> = reader.names().map(str::to_owned).collect();
                for name in names {
                    let shape = reader.shape(&name).expect("it is named").to_vec();
                    let _ = reader.take(&name, &shape);
                }
            }
        }
    }
}
