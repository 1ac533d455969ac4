//! `doctor`: drafters with one damage each are diagnosed by name.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use draftsmith_model::{DraftVocabulary, Eagle3Config, ModelConfig};
use draftsmith_theory::SeededDraws;
use serde_json::{Map, Value, json};

use crate::support::{Place, model};

/// A file of tensors: its header, and the bytes after it.
pub(crate) struct Tensors {
    path: PathBuf,
    pub(crate) header: Map<String, Value>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensors {
    pub(crate) fn read(dir: &Path) -> Self {
        let path = dir.join("model.safetensors");
        let file = std::fs::read(&path).unwrap();
        let size = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&file[8..8 + size]).unwrap();
        Self { path, header, bytes: file[8 + size..].to_vec() }
    }

    /// Writes the tensors that the header still names, one after the other.
    fn write(self) {
        let (mut header, mut bytes) = (Map::new(), Vec::new());
        for (name, entry) in self.header {
            if name == "__metadata__" {
                header.insert(name, entry);
                continue;
            }
            let [from, to] = [0, 1].map(|at| entry["data_offsets"][at].as_u64().unwrap() as usize);
            let mut entry = entry;
            entry["data_offsets"] = json!([bytes.len(), bytes.len() + to - from]);
            bytes.extend_from_slice(&self.bytes[from..to]);
            header.insert(name, entry);
        }
        let header = Value::Object(header).to_string();
        let size = (header.len() as u64).to_le_bytes();
        std::fs::write(self.path, [&size[..], header.as_bytes(), &bytes].concat()).unwrap();
    }

    fn range(&self, name: &str) -> std::ops::Range<usize> {
        let at = |at: usize| self.header[name]["data_offsets"][at].as_u64().unwrap() as usize;
        at(0)..at(1)
    }
}

pub(crate) fn edit_tensors(dir: &Path, edit: impl FnOnce(&mut Tensors)) {
    let mut tensors = Tensors::read(dir);
    edit(&mut tensors);
    tensors.write();
}

pub(crate) fn edit_config(dir: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let path = dir.join("config.json");
    let mut config: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(path, Value::Object(config).to_string()).unwrap();
}

/// A drafter of the embedded target with random weights, over 400 tokens or all.
pub(crate) fn write_drafter(dir: &Path, is_narrow: bool) {
    let target = ModelConfig::from_model_dir(&model("target")).unwrap();
    let draft_vocabulary =
        is_narrow.then(|| DraftVocabulary::new((0..400).map(|id| 2 * id).collect::<Vec<u32>>()));
    let config = Eagle3Config { draft_vocabulary, ..Eagle3Config::new(&target) };
    let mut draws = SeededDraws::new(5, &["doctor"]);
    std::fs::create_dir_all(dir).unwrap();
    config.init_from(&Device::flex(), || draws.uniform()).write_dir(dir, &config).unwrap();
}

/// The names of findings, worst first, and whether the command passes.
pub(crate) fn findings(place: &Place, dir: &str) -> (Vec<String>, bool) {
    let target = model("target").display().to_string();
    let ran = place.run(&["server", "doctor", dir, "--target", &target, "--json"]);
    let found: Value = serde_json::from_str(&ran.stdout)
        .unwrap_or_else(|_| panic!("{}{}", ran.stdout, ran.stderr));
    let all = found["findings"].as_array().unwrap();
    for finding in all {
        for key in ["what", "servers", "hint"] {
            assert!(!finding[key].as_str().unwrap().is_empty(), "{finding}");
        }
    }
    let names = all.iter().map(|finding| finding["name"].as_str().unwrap().to_owned());
    let is_broken = all.iter().any(|finding| finding["severity"] == "breaks");
    assert_eq!(ran.code, Some(i32::from(is_broken)), "{}", ran.stderr);
    (names.collect(), !is_broken)
}

/// Adds a mask of the even tokens up to `last`; the drafter's go up to 798.
fn add_mask(dir: &Path, last: usize) {
    edit_tensors(dir, |it| {
        let is_drafted = |id: usize| u8::from(id.is_multiple_of(2) && id <= last);
        let start = it.bytes.len();
        it.bytes.extend((0..1024).map(is_drafted));
        let offsets = [start, start + 1024];
        let entry = json!({ "dtype": "BOOL", "shape": [1024], "data_offsets": offsets });
        it.header.insert("t2d".into(), entry);
    });
    edit_config(dir, |it| drop(it.remove("weights_hash")));
}

type Damage = (&'static str, bool, fn(&Path));

/// One damage each, by its name; whether the drafter has a draft vocabulary.
const DAMAGES: [Damage; 27] = [
    ("other-target", false, |dir| {
        edit_config(dir, |it| drop(it.insert("target_hash".into(), json!("0".repeat(64)))))
    }),
    ("other-activation", false, |dir| {
        edit_config(dir, |it| drop(it.insert("hidden_act".into(), json!("gelu"))))
    }),
    ("other-dtype", false, |dir| {
        edit_tensors(dir, |it| {
            let range = it.range("fc.weight");
            it.header["fc.weight"]["dtype"] = json!("F8_E4M3");
            it.header["fc.weight"]["data_offsets"] =
                json!([range.start, range.start + range.len() / 4]);
        })
    }),
    ("unreadable", false, |dir| {
        edit_tensors(dir, |it| {
            let norm = it.header["midlayer.hidden_norm.weight"].clone();
            it.header.insert("layers.0.hidden_norm.weight".into(), norm);
        })
    }),
    ("no-d2t", true, |dir| edit_tensors(dir, |it| drop(it.header.remove("d2t")))),
    ("surplus-d2t", true, |dir| {
        edit_config(dir, |it| drop(it.insert("draft_vocab_size".into(), json!(1024))))
    }),
    ("ids-for-offsets", true, |dir| {
        edit_tensors(dir, |it| {
            let range = it.range("d2t");
            for (at, entry) in it.bytes[range].chunks_exact_mut(8).enumerate() {
                entry.copy_from_slice(&(2 * at as i64).to_le_bytes());
            }
        });
    }),
    ("wrong-d2t", true, |dir| {
        edit_tensors(dir, |it| {
            let start = it.range("d2t").start;
            it.bytes[start..start + 8].copy_from_slice(&700_i64.to_le_bytes());
        });
    }),
    ("wrong-d2t", true, |dir| {
        add_mask(dir, 800);
    }),
    ("unreadable", false, |dir| {
        edit_config(dir, |it| {
            it.insert("rope_theta".into(), json!(1e-300));
            it.insert("rope_parameters".into(), json!({ "rope_theta": 1e-300 }));
        });
    }),
    ("not-finite", false, |dir| {
        edit_tensors(dir, |it| {
            let start = it.range("lm_head.weight").start;
            it.bytes[start..start + 4].copy_from_slice(&3e38_f32.to_le_bytes());
        });
    }),
    ("missing-tensor", false, |dir| edit_tensors(dir, |it| drop(it.header.remove("fc.weight")))),
    ("no-lm-head", true, |dir| edit_tensors(dir, |it| drop(it.header.remove("lm_head.weight")))),
    ("unknown-tensor", false, |dir| {
        edit_tensors(dir, |it| {
            let norm = it.header["norm.weight"].clone();
            it.header.insert("model.rotary.inv_freq".to_owned(), norm);
        });
    }),
    ("wrong-shape", false, |dir| {
        edit_config(dir, |it| drop(it.insert("intermediate_size".into(), json!(77))))
    }),
    ("not-finite", false, |dir| {
        edit_tensors(dir, |it| {
            let start = it.range("norm.weight").start;
            it.bytes[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        });
    }),
    ("no-draft-vocab-size", false, |dir| {
        edit_config(dir, |it| drop(it.remove("draft_vocab_size")))
    }),
    ("nested-layers", false, |dir| {
        edit_config(dir, |it| {
            it.insert(
                "eagle_config".into(),
                json!({ "eagle_aux_hidden_state_layer_ids": [2, 4, 5] }),
            );
        });
    }),
    ("descending-layers", false, |dir| {
        edit_config(dir, |it| {
            drop(it.insert("eagle_aux_hidden_state_layer_ids".into(), json!([5, 2, 4])))
        });
    }),
    ("wrong-layers", false, |dir| {
        edit_config(dir, |it| {
            drop(it.insert("eagle_aux_hidden_state_layer_ids".into(), json!([2, 4, 50])))
        });
    }),
    ("other-layers", false, |dir| {
        edit_config(dir, |it| {
            drop(it.insert("eagle_aux_hidden_state_layer_ids".into(), json!([1, 4, 5])))
        });
    }),
    ("norm-before-residual", false, |dir| {
        edit_config(dir, |it| drop(it.insert("norm_before_residual".into(), json!(true))));
    }),
    ("missing-tensor", false, |dir| {
        edit_config(dir, |it| drop(it.insert("norm_before_fc".into(), json!(true))))
    }),
    ("tied-embeddings", true, |dir| {
        edit_config(dir, |it| drop(it.insert("tie_word_embeddings".into(), json!(true))))
    }),
    ("several-layers", false, |dir| {
        edit_config(dir, |it| drop(it.insert("num_hidden_layers".into(), json!(2))))
    }),
    ("other-width", false, |dir| {
        edit_config(dir, |it| drop(it.insert("target_hidden_size".into(), json!(4096))))
    }),
    ("other-tokenizer", false, |dir| {
        let text = std::fs::read_to_string(model("target").join("tokenizer.json")).unwrap();
        let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
        tokenizer["added_tokens"][0]["content"] = json!("<other>");
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let first = vocab.keys().next().unwrap().clone();
        let id = vocab.remove(&first).unwrap();
        vocab.insert("<other>".to_owned(), id);
        std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        for name in ["tokenizer_config.json", "special_tokens_map.json"] {
            let _ = std::fs::copy(model("target").join(name), dir.join(name));
        }
    }),
];

#[test]
fn each_damage_is_diagnosed_by_name() {
    let place = Place::new();
    for is_narrow in [false, true] {
        write_drafter(&place.path("sound"), is_narrow);
        assert_eq!(findings(&place, "sound"), (Vec::new(), true));
        if is_narrow {
            add_mask(&place.path("sound"), 798);
            assert_eq!(findings(&place, "sound"), (Vec::new(), true));
        }
        std::fs::remove_dir_all(place.path("sound")).unwrap();
    }
    for (name, is_narrow, damage) in DAMAGES {
        write_drafter(&place.path(name), is_narrow);
        damage(&place.path(name));
        let (found, _) = findings(&place, name);
        assert!(found.iter().any(|it| it == name), "{name}: {found:?}");
        // A wrong width or number of layers makes shapes wrong, too; nothing else is blamed.
        let others: Vec<&String> =
            found.iter().filter(|it| *it != name && *it != "wrong-shape").collect();
        assert!(
            others
                .iter()
                .all(|it| ["other-layers", "other-template", "missing-tensor"]
                    .contains(&it.as_str())),
            "{name}: {found:?}"
        );
    }
}

#[test]
fn other_forms_are_recognised() {
    let place = Place::new();
    let target = model("target").display().to_string();
    let form = |dir: &str| {
        let found = place.run(&["server", "doctor", dir, "--target", &target, "--json"]);
        serde_json::from_str::<Value>(&found.stdout).unwrap()["form"].clone()
    };
    write_drafter(&place.path("layers"), false);
    edit_tensors(&place.path("layers"), |it| {
        let header = std::mem::take(&mut it.header).into_iter();
        it.header =
            header.map(|(name, entry)| (name.replace("midlayer.", "layers.0."), entry)).collect();
    });
    assert_eq!(form("layers"), "eagle3_layers");
    // The export says which weights it was written with.
    assert_eq!(findings(&place, "layers"), (vec!["unreadable".to_owned()], false));
    edit_config(&place.path("layers"), |it| drop(it.remove("weights_hash")));
    assert_eq!(findings(&place, "layers"), (Vec::new(), true));
    write_drafter(&place.path("speculators"), false);
    edit_config(&place.path("speculators"), |it| {
        it.insert("speculators_model_type".into(), json!("eagle3"));
    });
    assert_eq!(form("speculators"), "eagle3_speculators");
    let (found, passes) = findings(&place, "speculators");
    assert!(passes && found == ["norm-before-residual"], "{found:?}");
    // Medusa: a residual layer and an LM head for each head.
    write_drafter(&place.path("medusa"), false);
    edit_tensors(&place.path("medusa"), |it| {
        let [matrix, bias, head] =
            ["midlayer.self_attn.o_proj.weight", "norm.weight", "lm_head.weight"]
                .map(|name| it.header[name].clone());
        it.header.retain(|name, _| name == "__metadata__");
        for nth in 0..3 {
            it.header.insert(format!("{nth}.0.linear.weight"), matrix.clone());
            it.header.insert(format!("{nth}.0.linear.bias"), bias.clone());
            it.header.insert(format!("{nth}.1.weight"), head.clone());
        }
    });
    place.write("medusa/config.json", json!({ "medusa_num_heads": 5 }).to_string());
    assert_eq!(form("medusa"), "medusa");
    assert_eq!(findings(&place, "medusa").0, ["number-of-heads", "needs-conversion"]);
    edit_tensors(&place.path("medusa"), |it| drop(it.header.remove("2.1.weight")));
    assert_eq!(findings(&place, "medusa").0[0], "unreadable");
    edit_tensors(&place.path("medusa"), |it| drop(it.header.remove("0.0.linear.weight")));
    assert_eq!(findings(&place, "medusa").0[0], "unreadable");
    // Draft models.
    assert_eq!(form(&model("draft").display().to_string()), "draft_model");
    assert_eq!(findings(&place, &model("draft").display().to_string()).0, [""; 0]);
    place.copy_model("draft", "cut");
    edit_tensors(&place.path("cut"), |it| {
        let name = it.header.keys().find(|name| name.contains("q_proj")).unwrap().clone();
        it.header.remove(&name);
    });
    assert_eq!(findings(&place, "cut").0, ["broken-weights"]);
    place.copy_model("draft", "short");
    edit_config(&place.path("short"), |it| {
        drop(it.insert("max_position_embeddings".into(), json!(64)))
    });
    assert_eq!(findings(&place, "short").0, ["short-context"]);
    place
        .run(&["server", "doctor", "nowhere", "--target", &target])
        .fails_naming(&["config.json", "hint:"]);
    place.run(&["server", "doctor", "short", "--target", "nowhere"]).fails_naming(&["nowhere"]);
}

#[test]
fn expected_acceptance_is_that_of_an_evaluation() {
    let place = Place::new();
    place.write_small_recipe();
    let [target, draft] = ["target", "draft"].map(|name| model(name).display().to_string());
    let arguments = [
        "server",
        "doctor",
        &draft,
        "--target",
        &target,
        "--prompts",
        "test.jsonl",
        "--candidates",
        "4",
    ];
    let more = ["--max-new-tokens", "12", "--json"];
    let found = place.run(&[&arguments[..], &more].concat()).json();
    let acceptance = &found["acceptance"];
    let shown = place.run(&[&arguments[..], &more[..2]].concat()).ok();
    assert!(
        shown.contains("num_accepted_tokens_per_pos")
            && shown.lines().all(|line| line.chars().count() <= 80),
        "{shown}"
    );
    place.run(&["evaluate", "small.toml", "--set", "drafters.draft.head.path='x'"]);
    let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let head = recipe.find("[drafters.draft.head]").unwrap()..recipe.find("[evaluate]").unwrap();
    place.write("small.toml", recipe.replace(&recipe[head], ""));
    place.run(&["evaluate", "small.toml", "--set", "evaluate.decodings=['greedy']"]).ok();
    let rows = place.results("small");
    let row = rows.iter().find(|row| row["setting"] == 4).unwrap();
    let shares = acceptance["accepted_by_position"].as_array().unwrap();
    let sum: f64 = shares.iter().map(|share| share.as_f64().unwrap()).sum();
    assert_eq!(shares.len(), 4);
    // A round without candidates, at the limit, is no round of a server's counters.
    let accepted = row["num_accepted"].as_f64().unwrap() / sum;
    let rounds = row["num_target_forwards"].as_f64().unwrap();
    assert!(accepted <= rounds && accepted >= rounds - 3.0, "{accepted} {rounds}");
    assert_eq!(acceptance["num_tokens"], row["num_tokens"]);
}

/// A file in GGUF of version 3 with these keys of numbers, and tensors of these shapes.
fn gguf(architecture: &str, keys: &[(&str, &[u32])], tensors: &[(&str, &[u64])]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((keys.len() as u64 + 2).to_le_bytes());
    bytes.extend(text("general.architecture"));
    bytes.extend(8_u32.to_le_bytes());
    bytes.extend(text(architecture));
    // A list of 1,024 texts.
    bytes.extend(text("tokenizer.ggml.tokens"));
    bytes.extend([9_u32, 8].into_iter().flat_map(u32::to_le_bytes));
    bytes.extend(1024_u64.to_le_bytes());
    (0..1024).for_each(|id| bytes.extend(text(&format!("t{id}"))));
    for (key, numbers) in keys {
        bytes.extend(text(&format!("{architecture}.{key}")));
        if let [number] = numbers {
            bytes.extend([4, *number].into_iter().flat_map(u32::to_le_bytes));
        } else {
            bytes.extend([9_u32, 4].into_iter().flat_map(u32::to_le_bytes));
            bytes.extend((numbers.len() as u64).to_le_bytes());
            bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
    }
    for (name, shape) in tensors {
        bytes.extend(text(name));
        bytes.extend((shape.len() as u32).to_le_bytes());
        bytes.extend(shape.iter().flat_map(|size| size.to_le_bytes()));
        bytes.extend([0; 12]);
    }
    bytes
}

type GgufKey = (&'static str, &'static [u32]);

const EAGLE3_KEYS: [GgufKey; 4] = [
    ("block_count", &[1]),
    ("embedding_length", &[192]),
    ("target_hidden_size", &[192]),
    ("target_layers", &[2, 4, 5]),
];
const BLOCK_KEYS: [GgufKey; 4] = [
    ("block_count", &[2]),
    ("embedding_length", &[192]),
    ("block_size", &[8]),
    ("target_layers", &[2, 6]),
];

#[test]
fn a_drafters_gguf_is_recognised_and_held_against_its_target() {
    let place = Place::new();
    let eagle3 = |keys: &[GgufKey]| {
        gguf("eagle3", keys, &[("fc.weight", &[576, 192]), ("blk.0.attn_q.weight", &[384, 192])])
    };
    let block = |keys: &[GgufKey]| {
        gguf("dflash", keys, &[("fc.weight", &[384, 192]), ("blk.1.attn_q.weight", &[192, 192])])
    };
    let found = |bytes: Vec<u8>| {
        place.write("d.gguf", bytes);
        findings(&place, "d.gguf")
    };
    let fine = (vec!["header-only".to_owned()], true);
    assert_eq!(found(block(&BLOCK_KEYS)), fine);
    assert_eq!(found(eagle3(&EAGLE3_KEYS)), fine);
    let target = model("target").display().to_string();
    let shown =
        place.run(&["server", "doctor", "d.gguf", "--target", &target]).ok().replace('\n', " ");
    let description = "a drafter in GGUF: architecture `eagle3`, 1 layers of width 192, 1024 tokens, reads layers [2, 4, 5]";
    assert!(shown.starts_with(description), "{shown}");
    assert!(!shown.contains("No problem found"), "{shown}");
    // The directory of one, alone and beside the files that it was converted from.
    std::fs::create_dir_all(place.path("dir")).unwrap();
    std::fs::copy(place.path("d.gguf"), place.path("dir/d.gguf")).unwrap();
    assert_eq!(findings(&place, "dir"), fine);
    write_drafter(&place.path("both"), false);
    let without = findings(&place, "both");
    std::fs::copy(place.path("d.gguf"), place.path("both/d.gguf")).unwrap();
    let (with, passes) = findings(&place, "both");
    assert!(passes && with.len() == without.0.len() + 1, "{with:?}");

    let changed =
        |keys: [GgufKey; 4], key: &'static str, numbers: &'static [u32]| -> Vec<GgufKey> {
            keys.into_iter().map(|it| if it.0 == key { (key, numbers) } else { it }).collect()
        };
    for (key, numbers, finding) in [
        ("block_count", &[2][..], "layers"),
        ("embedding_length", &[160], "other-width"),
        ("target_hidden_size", &[256], "other-width"),
        ("target_layers", &[2, 4, 9], "wrong-layers"),
        ("target_layers", &[4, 2, 5], "wrong-layers"),
    ] {
        let (names, passes) = found(eagle3(&changed(EAGLE3_KEYS, key, numbers)));
        assert!(!passes && names == [finding, "header-only"], "{key}: {names:?}");
    }
    for (key, numbers, finding) in [
        ("block_size", &[1][..], "block-size"),
        ("block_size", &[1000], "block-size"),
        ("target_layers", &[2, 9], "wrong-layers"),
        ("block_count", &[1], "layers"),
    ] {
        let (names, passes) = found(block(&changed(BLOCK_KEYS, key, numbers)));
        assert!(!passes && names == [finding, "header-only"], "{key}: {names:?}");
    }
    let (names, _) = found(gguf("eagle3", &EAGLE3_KEYS, &[]));
    assert_eq!(names, ["no-tensors", "layers", "other-width", "header-only"]);
    // A draft model has the target's vocabulary.
    let small = gguf("llama", &[("vocab_size", &[1024])], &[("output.weight", &[96, 1024])]);
    assert_eq!(found(small), fine);
    place.copy_model("target", "wide");
    edit_config(&place.path("wide"), |config| config["vocab_size"] = json!(1152));
    let wide = ["server", "doctor", "d.gguf", "--target", "wide", "--json"];
    assert!(place.run(&wide).stdout.contains("other-vocabulary"));
}

#[test]
fn a_malformed_gguf_is_one_error_that_names_it() {
    let place = Place::new();
    let whole = gguf("eagle3", &EAGLE3_KEYS, &[("fc.weight", &[576, 192])]);
    let target = model("target").display().to_string();
    let fails = |bytes: &[u8], named: &str| {
        place.write("d.gguf", bytes);
        let run = place.run(&["server", "doctor", "d.gguf", "--target", &target]);
        run.fails_naming(&["`d.gguf`", named, "hint: give a GGUF file of version 3"]);
    };
    fails(b"", "it ends within its header");
    fails(b"GGML\x03\0\0\0", "does not begin with `GGUF`");
    fails(&[b"GGUF\x02\0\0\0", &whole[8..]].concat(), "its version is 2, expected 3");
    for len in (8..whole.len()).step_by(whole.len() / 60) {
        fails(&whole[..len], "it ends within its header");
    }
    // Lengths of which nothing follows.
    fails(&[&whole[..8], &[0xff; 16]].concat(), "it claims");
    let at = whole.windows(5).position(|it| it == b"\x09\0\0\0\x08").unwrap();
    let mut long = whole.clone();
    long[at + 8..at + 16].copy_from_slice(&u64::MAX.to_le_bytes());
    fails(&long, "it ends within its header");
    long[at + 8..at + 16].copy_from_slice(&1024_u64.to_le_bytes());
    long[at + 4] = 99;
    fails(&long, "unknown type 99");
}
