//! Written files read back; files that are cut, changed, misshapen or incomplete cause an error
//! that names them.

use std::path::Path;

use super::*;

fn tensor(name: &str, shape: &[usize]) -> NamedTensor {
    let len: usize = shape.iter().product();
    NamedTensor {
        name: name.to_owned(),
        shape: shape.to_vec(),
        values: (0..len).map(|i| i as f32 * 0.25 - 1.0).collect(),
    }
}

#[test]
fn tensors_round_trip_in_both_types() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("model.safetensors");
    for dtype in [WeightDtype::F32, WeightDtype::Bf16] {
        let tensors = [tensor("a", &[2, 3]), tensor("b", &[4])];
        write_safetensors(&path, &tensors, dtype, &[("k".into(), "v".into())]).expect("written");
        let mut reader = WeightReader::open_dir(dir.path()).expect("opens");
        assert_eq!(reader.take("a", &[2, 3]).expect("reads"), tensors[0].values);
        assert_eq!(reader.take("b", &[4]).expect("reads"), tensors[1].values);
        reader.finish().expect("nothing left");
        let metadata = read_metadata(&path).expect("reads");
        assert_eq!(metadata["format"], "pt");
        assert_eq!(metadata["k"], "v");
    }
}

#[test]
fn the_same_tensors_give_the_same_bytes() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("model.safetensors");
    let metadata: Vec<(String, String)> =
        (0..8).map(|i| (format!("key{i}"), format!("value{i}"))).collect();
    let write = || {
        write_safetensors(&path, &[tensor("a", &[2, 3])], WeightDtype::F32, &metadata)
            .expect("written");
        std::fs::read(&path).expect("reads")
    };
    let first = write();
    for _ in 0..8 {
        assert_eq!(write(), first);
    }
    assert_eq!(read_metadata(&path).expect("reads")["key7"], "value7");
}

#[test]
fn a_file_cut_or_changed_anywhere_causes_an_error_or_keeps_its_shape() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("model.safetensors");
    write_safetensors(&path, &[tensor("a", &[2, 3])], WeightDtype::F32, &[]).expect("written");
    let whole = std::fs::read(&path).expect("reads");
    for cut in 0..whole.len() {
        std::fs::write(&path, &whole[..cut]).expect("written");
        let error = WeightReader::open_file(&path).expect_err("a cut file is refused");
        assert!(error.to_string().contains("model.safetensors"), "{error}");
    }
    for position in 0..whole.len() {
        let mut changed = whole.clone();
        changed[position] ^= 0x15;
        std::fs::write(&path, &changed).expect("written");
        if let Ok(mut reader) = WeightReader::open_file(&path) {
            // Refused or read, but never a panic.
            let _ = reader.take("a", &[2, 3]);
        }
    }
    for lie in [u64::MAX, 1 << 40, whole.len() as u64, 0] {
        let mut lying = whole.clone();
        lying[..8].copy_from_slice(&lie.to_le_bytes());
        std::fs::write(&path, &lying).expect("written");
        WeightReader::open_file(&path).expect_err("a lying header is refused");
    }
}

#[test]
fn errors_name_missing_misshapen_and_extra_tensors() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("model.safetensors");
    write_safetensors(&path, &[tensor("a", &[2, 3])], WeightDtype::F32, &[]).expect("written");
    let open = || WeightReader::open_file(&path).expect("opens");
    assert!(open().take("z", &[1]).expect_err("missing").to_string().contains("`z`"));
    let message = open().take("a", &[3, 2]).expect_err("misshapen").to_string();
    assert!(message.contains("`a`") && message.contains("[2, 3]"), "{message}");
    assert!(open().finish().expect_err("extra").to_string().contains("`a`"));
}

#[test]
fn shards_are_read_and_a_wrong_index_causes_an_error_that_names_it() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let write = |name: &str, tensor: NamedTensor| {
        write_safetensors(&dir.path().join(name), &[tensor], WeightDtype::F32, &[])
            .expect("written");
    };
    write("model-1.safetensors", tensor("a", &[2]));
    write("model-2.safetensors", tensor("b", &[3]));
    let index = dir.path().join("model.safetensors.index.json");
    std::fs::write(
        &index,
        r#"{"metadata":{},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}"#,
    )
    .expect("written");
    let mut reader = WeightReader::open_dir(dir.path()).expect("opens");
    assert_eq!(reader.take("b", &[3]).expect("reads").len(), 3);
    assert_eq!(reader.take("a", &[2]).expect("reads").len(), 2);
    std::fs::write(&index, r#"{"weight_map":{"c":"model-1.safetensors"}}"#).expect("written");
    // An index may name a tensor that no file has; it is missed only where it is needed.
    let mut reader = WeightReader::open_dir(dir.path()).expect("opens");
    let message = reader.take("c", &[2]).expect_err("refused").to_string();
    assert!(message.contains("`c`"), "{message}");
}

#[test]
fn an_index_may_only_name_files_of_its_directory() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let dir = root.path().join("model");
    std::fs::create_dir_all(dir.join("sub")).expect("created");
    let outside = root.path().join("outside.safetensors");
    let write = |path: &Path| write_safetensors(path, &[tensor("a", &[2])], WeightDtype::F32, &[]);
    write(&outside).expect("written");
    write(&dir.join("sub/inside.safetensors")).expect("written");
    let open = |name: &str| {
        let index = serde_json::json!({ "weight_map": { "a": name } });
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string())
            .expect("written");
        WeightReader::open_dir(&dir)
    };
    let absolute = outside.to_str().expect("a plain path");
    for name in
        ["../outside.safetensors", absolute, "sub/inside.safetensors", "sub/", "./a", "..", ".", ""]
    {
        let message = open(name).expect_err("refused").to_string();
        for part in ["model.safetensors.index.json", "`weight_map`", "`a`", name] {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    }
    // A file may link out of the directory.
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&outside, dir.join("link.safetensors")).expect("linked");
        let mut reader = open("link.safetensors").expect("opens");
        assert_eq!(reader.take("a", &[2]).expect("reads").len(), 2);
    }
}

#[test]
fn the_hash_covers_exactly_the_files_that_weights_are_read_from() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let elsewhere = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| dir.path().join(name);
    let save = |path: &Path, tensor: NamedTensor| {
        write_safetensors(path, &[tensor], WeightDtype::F32, &[]).expect("written");
    };
    let hash = || hash_model_dir(dir.path(), &mut |_, _| ()).expect("a hash");
    std::fs::write(path("config.json"), "{}").expect("written");
    let message = hash_model_dir(dir.path(), &mut |_, _| ()).expect_err("refused").to_string();
    assert!(message.contains("has no weights"), "{message}");

    // Weights with unusual file names, and a link out of the directory, as in Hugging Face's cache.
    let blob = elsewhere.path().join("6a1f");
    save(&path("weights-1"), tensor("a", &[2]));
    save(&blob, tensor("b", &[3]));
    #[cfg(unix)]
    std::os::unix::fs::symlink(&blob, path("weights-2.bin")).expect("linked");
    #[cfg(not(unix))]
    std::fs::copy(&blob, path("weights-2.bin")).expect("copied");
    let index = r#"{"weight_map":{"a":"weights-1","b":"weights-2.bin"}}"#;
    std::fs::write(path("model.safetensors.index.json"), index).expect("written");
    let mut hashes = vec![hash()];
    let mut changed = || {
        let hash = hash();
        assert!(!hashes.contains(&hash), "a change was not seen");
        hashes.push(hash);
    };
    save(&path("weights-1"), tensor("z", &[2]));
    changed();
    save(&if cfg!(unix) { blob } else { path("weights-2.bin") }, tensor("y", &[3]));
    changed();
    std::fs::write(path("model.safetensors.index.json"), format!("{index} ")).expect("written");
    changed();
    std::fs::write(path("config.json"), "{} ").expect("written");
    changed();
    let before = hash();
    save(&path("unused.safetensors"), tensor("a", &[2]));
    assert_eq!(hash(), before);
    let outside =
        format!(r#"{{"weight_map":{{"a":"{}"}}}}"#, elsewhere.path().join("6a1f").display());
    std::fs::write(path("model.safetensors.index.json"), outside).expect("written");
    let message = hash_model_dir(dir.path(), &mut |_, _| ()).expect_err("refused").to_string();
    assert!(message.contains("`weight_map`"), "{message}");
    save(&path("model.safetensors"), tensor("a", &[2]));
    assert_ne!(hash(), before, "one file is read before an index");
}

#[test]
fn integers_have_32_or_64_bits() {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = [3_i32, -2, 7].iter().flat_map(|it| it.to_le_bytes()).collect();
    let read = |dtype| {
        let view = safetensors::tensor::TensorView::new(dtype, vec![3], &bytes).unwrap();
        let path = dir.path().join("model.safetensors");
        safetensors::serialize_to_file([("d2t", view)], None, &path).unwrap();
        WeightReader::open_dir(dir.path()).unwrap().take_integers("d2t", 3)
    };
    assert_eq!(read(safetensors::Dtype::I32).unwrap(), [3, -2, 7]);
    let error = read(safetensors::Dtype::F32).unwrap_err().to_string();
    assert!(error.contains("`d2t` is stored as F32, expected integers"), "{error}");
}
