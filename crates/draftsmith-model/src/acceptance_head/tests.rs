//! Files round-trip, the authors' names are used, and all ways of computing a head agree.

use super::*;
use burn::tensor::TensorData;

/// A head's logits for three rows: as in training, and as in decoding on the device and in host
/// memory.
fn outputs(head: &AcceptanceHead, hidden: usize) -> [Vec<f32>; 3] {
    let device = Device::flex();
    let rows = |from: usize, width: usize| {
        let values = (0..3 * width).map(|i| ((from + i) as f32 * 0.37).sin()).collect();
        HostRows { values, width }
    };
    let embedding = head.reads().looks_ahead().then(|| rows(100, hidden));
    let own = rows(0, hidden);
    let scalars: Vec<f32> = (0..3)
        .flat_map(|row| {
            let share = f64::from(row) / 3.0;
            let (entropy, log_prob) = (2.0 * share, Some(-share));
            let candidate = DrawnCandidate { entropy, top_prob: share, log_prob };
            head.reads().scalars(&candidate, 50).collect::<Vec<_>>()
        })
        .collect();
    let tensor = |values: &[f32]| {
        let shape = [3, values.len() / 3];
        Tensor::<2>::from_data(TensorData::new(values.to_vec(), shape), &device)
    };
    let scalars_of = |row| scalars[row * scalars.len() / 3..][..scalars.len() / 3].iter();
    let extra: Vec<f32> = (0..3)
        .flat_map(|row| {
            let embedding = embedding.as_ref().map(|rows| &rows.values[row * hidden..][..hidden]);
            embedding.into_iter().flatten().chain(scalars_of(row)).copied()
        })
        .collect();
    let extra = (!extra.is_empty()).then(|| tensor(&extra));
    let features = HeadFeatures { hidden: tensor(&own.values), extra };
    let trained = head.acceptance_logit(features).into_data().try_into_vec().expect("f32");
    let on_device = |rows: &HostRows| Rows::from(tensor(&rows.values).unsqueeze::<3>());
    let decoded = |place: &dyn Fn(&HostRows) -> Rows| {
        let of_embedding = embedding.as_ref().map(|rows| head.of_embedding(&place(rows)));
        let logits = head.acceptance_logits(&place(&own), of_embedding.as_ref(), &scalars);
        let [logits] = Rows::to_host([logits]).expect("brought");
        logits
    };
    [trained, decoded(&on_device), decoded(&|rows| Rows::of_slot_0(rows.clone()))]
}

/// All combinations of inputs.
fn all_reads() -> Vec<HeadReads> {
    use HeadInput::{Entropy, TopProb};
    let inputs: [&[HeadInput]; 3] = [&[], &[TopProb], &[Entropy, TopProb]];
    let forms = [HeadForm::Candidate, HeadForm::LookAhead];
    forms.into_iter().flat_map(|form| inputs.map(|inputs| HeadReads::new(form, inputs))).collect()
}

/// Asserts that two heads have the same weights and predict the same up to the order of sums: a
/// head that was read uses packed weights for few rows.
fn assert_same(found: &AcceptanceHead, expected: &AcceptanceHead, hidden: usize) {
    assert_eq!(found.blocks.len(), expected.blocks.len());
    assert!(found.blocks.iter().zip(&expected.blocks).all(|(a, b)| same(a, b)));
    assert!(same(&found.output, &expected.output));
    assert!(match (&found.input, &expected.input) {
        (Some(a), Some(b)) => same(a, b),
        (a, b) => a.is_none() && b.is_none(),
    });
    assert!(found.reads == expected.reads);
    let [expected, ..] = outputs(expected, hidden);
    for found in outputs(found, hidden) {
        for (a, b) in found.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} for {b}");
        }
    }
}

#[test]
fn heads_of_every_kind_round_trip_at_every_depth() {
    let device = Device::flex();
    for reads in all_reads() {
        for tied in [true, false] {
            for num_layers in 0..=3 {
                let config =
                    AcceptanceHeadConfig::new(8, num_layers, tied).with_reads(reads.clone());
                let head = config.init(&device);
                let dir = tempfile::tempdir().expect("a temporary directory");
                head.write_dir(dir.path(), &config).expect("written");
                let (read_config, read) =
                    AcceptanceHead::from_dir(dir.path(), 8, &device).expect("reads");
                assert_eq!(read_config, config);
                assert_same(&read, &head, 8);
                let [logits, ..] = outputs(&head, 8);
                assert!(logits.iter().any(|logit| *logit != logits[0]), "{logits:?}");
            }
        }
    }
}

#[test]
fn an_embedding_gain_goes_into_the_weights_exactly() {
    let device = Device::flex();
    device.seed(4);
    for reads in all_reads() {
        let config = AcceptanceHeadConfig::new(8, 2, false).with_reads(reads.clone());
        let head = config.init(&device);
        let dir = tempfile::tempdir().expect("a temporary directory");
        head.write_dir(dir.path(), &config).expect("written");
        let (_, on_host) = AcceptanceHead::from_dir(dir.path(), 8, &device).expect("reads");
        for head in [head, on_host] {
            let values = |i: usize| ((i as f32 + 1.0) * 0.71).cos();
            let rows = |width: usize| {
                let values = (0..2 * width).map(values).collect::<Vec<_>>();
                Tensor::<2>::from_data(TensorData::new(values, [2, width]), &device)
            };
            let features = |gain: f32| {
                let num_extra = reads.num_extra(8);
                let extra = (num_extra > 0).then(|| {
                    let (all, embedding) =
                        (rows(num_extra), if reads.looks_ahead() { 8 } else { 0 });
                    let larger = all.clone().slice([0..2, 0..embedding]) * gain;
                    match embedding {
                        0 => all,
                        _ => Tensor::cat(vec![larger, all.slice([0..2, embedding..num_extra])], 1),
                    }
                });
                HeadFeatures { hidden: rows(8), extra }
            };
            let logits = |head: &AcceptanceHead, gain: f32| -> Vec<f32> {
                let logits = head.acceptance_logit(features(gain));
                logits.into_data().try_into_vec().expect("f32")
            };
            let with_gain = head.clone().with_embedding_gain(8.0);
            assert_eq!(logits(&with_gain, 1.0), logits(&head, 8.0), "{reads:?}");
            assert_eq!(logits(&with_gain, 1.0) == logits(&head, 1.0), !reads.looks_ahead());
            // Both ways of decoding.
            let [trained, on_device, on_host] = outputs(&with_gain, 8);
            for (a, b) in trained.iter().zip(on_device).chain(trained.iter().zip(on_host)) {
                assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} for {b}");
            }
        }
    }
}

/// The keys of `config.json`, and the names of the tensors.
fn names(config: &AcceptanceHeadConfig) -> (Vec<String>, Vec<String>) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    config.init(&Device::flex()).write_dir(dir.path(), config).expect("written");
    let text = std::fs::read_to_string(dir.path().join("config.json")).expect("reads");
    let json: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(&text).expect("an object");
    let reader = WeightReader::open_file(&dir.path().join("model.safetensors")).expect("opens");
    (json.keys().cloned().collect(), reader.names().map(str::to_owned).collect())
}

#[test]
fn heads_that_the_authors_class_would_misread_have_other_names() {
    let (keys, _) = names(&AcceptanceHeadConfig::new(4, 2, true));
    assert_eq!(keys, ["hidden_size", "num_layers", "weights_hash"]);
    let mut configs = vec![AcceptanceHeadConfig::new(4, 2, false)];
    let more = all_reads().into_iter().filter(|reads| !reads.is_hidden_only());
    let tied = || AcceptanceHeadConfig::new(4, 2, true);
    configs.extend(more.map(|reads| tied().with_reads(reads)));
    for config in configs {
        let (mut keys, tensors) = names(&config);
        keys.sort();
        let own = ["form", "hidden_size", "inputs", "num_layers", "schema", "tied", "weights_hash"];
        assert_eq!(keys, own);
        assert!(tensors.iter().all(|name| !name.starts_with("model")), "{tensors:?}");
    }
}

#[test]
fn an_inconsistent_config_is_refused_with_its_key() {
    let own = r#""hidden_size": 4, "num_layers": 1, "schema": "draftsmith.head.v2""#;
    let authors = r#""hidden_size": 4, "num_layers": 1"#;
    for (text, parts) in [
        (format!(r#"{{{own}, "form": "candidate", "inputs": []}}"#), ["`tied`", "is missing"]),
        (format!(r#"{{{own}, "tied": true, "form": "candidate"}}"#), ["`inputs`", "is missing"]),
        (format!(r#"{{{authors}, "form": "look-ahead"}}"#), ["`form`", "`schema`"]),
        (format!(r#"{{{authors}, "schema": "draftsmith.head.v3"}}"#), ["`schema`", "v3"]),
        (format!(r#"{{{own}, "tied": true, "form": "x", "inputs": []}}"#), ["`x`", "look-ahead"]),
    ] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("config.json"), &text).expect("written");
        let error = AcceptanceHeadConfig::from_dir(dir.path()).expect_err("refused");
        let sources = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source());
        let message: String = sources.map(|error| format!("{error} ")).collect();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn a_tied_file_has_the_authors_names_and_metadata() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = AcceptanceHeadConfig::new(4, 3, true);
    config.init(&Device::flex()).write_dir(dir.path(), &config).expect("written");
    let path = dir.path().join("model.safetensors");
    let reader = WeightReader::open_file(&path).expect("opens");
    let names: Vec<&str> = reader.names().collect();
    assert_eq!(
        names,
        ["model.0.linear.bias", "model.0.linear.weight", "model.3.bias", "model.3.weight"]
    );
    let metadata = crate::read_metadata(&path).expect("reads");
    assert_eq!(metadata["model.2.linear.weight"], "model.0.linear.weight");
}

#[test]
fn a_block_with_a_later_index_fills_the_missing_ones() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let device = Device::flex();
    let config = AcceptanceHeadConfig::new(4, 3, true);
    let head = config.init(&device);
    // As the authors' program writes it, without a checksum.
    std::fs::write(dir.path().join("config.json"), r#"{"hidden_size": 4, "num_layers": 3}"#)
        .expect("written");
    let mut tensors = Vec::new();
    push_linear(&mut tensors, "model.2.linear", &head.blocks[0]);
    push_linear(&mut tensors, "model.3", &head.output);
    write_safetensors(&dir.path().join("model.safetensors"), &tensors, WeightDtype::F32, &[])
        .expect("written");
    let (_, read) = AcceptanceHead::from_dir(dir.path(), 4, &device).expect("reads");
    assert_same(&read, &head, 4);
}

#[test]
fn wrong_widths_and_untied_blocks_under_the_tied_schema_are_refused() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let device = Device::flex();
    let config = AcceptanceHeadConfig::new(4, 2, true);
    config.init(&device).write_dir(dir.path(), &config).expect("written");
    let message =
        AcceptanceHead::from_dir(dir.path(), 8, &device).expect_err("refused").to_string();
    assert!(message.contains("hidden_size") && message.contains('8'), "{message}");
    let untied = AcceptanceHeadConfig::new(4, 2, false).init(&device);
    let mut tensors = Vec::new();
    push_linear(&mut tensors, "model.0.linear", &untied.blocks[0]);
    push_linear(&mut tensors, "model.1.linear", &untied.blocks[1]);
    push_linear(&mut tensors, "model.2", &untied.output);
    write_safetensors(&dir.path().join("model.safetensors"), &tensors, WeightDtype::F32, &[])
        .expect("written");
    let message =
        AcceptanceHead::from_dir(dir.path(), 4, &device).expect_err("refused").to_string();
    assert!(message.contains("untied"), "{message}");
}

#[test]
fn weights_changed_after_the_export_are_refused() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = AcceptanceHeadConfig::new(4, 2, true);
    config.init(&Device::flex()).write_dir(dir.path(), &config).expect("written");
    let read = || AcceptanceHead::from_dir(dir.path(), 4, &Device::flex());
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).expect("reads");
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        std::fs::write(&path, changed).expect("written");
        let message = read().expect_err("refused").to_string();
        assert!(message.contains("model.safetensors"), "{message}");
    }
    // Only the checksum detects a changed number.
    assert!(read().expect_err("refused").to_string().contains("weights_hash"));
    // Files without a checksum are accepted.
    let config = dir.path().join("config.json");
    let text = std::fs::read_to_string(&config).expect("reads");
    std::fs::write(&config, text.replace("weights_hash", "other_key")).expect("written");
    read().expect("loads");
}
