use draftsmith_model::{AcceptanceHeadConfig, WeightDtype};

use std::sync::{Arc, Mutex};

use super::*;
use crate::watch::Silent;

/// A record of the files that were read.
#[derive(Debug, Clone, Default)]
struct Reads(Arc<Mutex<Vec<String>>>);

impl Watch for Reads {
    fn line(&self, text: &str) {
        self.reads(text);
    }

    fn reads(&self, what: &str) {
        self.0.lock().expect("nobody panics").push(what.to_owned());
    }

    fn share(&self) -> Box<dyn Watch> {
        Box::new(self.clone())
    }
}

fn workspace() -> Workspace {
    let model = |name: &str| {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny").join(name)
    };
    let drafts = [(DrafterId::DRAFT, &*model("draft"))];
    Workspace::new(&model("target"), &drafts, vec![Device::flex()])
}

#[test]
fn each_input_is_read_once_and_only_if_needed() {
    let (seen, mut workspace) = (Reads::default(), workspace());
    workspace.models.watch = seen.share();
    let reads = || seen.0.lock().expect("nobody panics").len();
    workspace.models.context().expect("two configs");
    assert_eq!(reads(), 0);
    workspace.target_alone().expect("the target");
    assert_eq!(reads(), 2, "tokenizer and weights");
    let alone = workspace.pair().expect("a pair").text.context;
    assert_eq!(alone, workspace.models.context().expect("two configs"));
    workspace.models.draft_in(WeightDtype::F32).expect("the draft's weights");
    assert_eq!(reads(), 3);
    for _ in 0..2 {
        let target = workspace.models.target_hash().expect("a hash");
        assert_eq!(target, hash_dir(workspace.models.target_dir(), &Silent).expect("a hash"));
        assert_eq!(reads(), 4);
    }
}

#[test]
fn rewritten_exports_are_read_again() {
    let (workspace, dir) = (workspace(), tempfile::tempdir().expect("a temporary directory"));
    let write = |num_layers| {
        let config = AcceptanceHeadConfig::new(8, num_layers, true);
        workspace.artifacts.forget(dir.path());
        config.init(&Device::flex()).write_dir(dir.path(), &config).expect("written");
    };
    let hash = || workspace.artifacts.export_hash(dir.path(), "a shape").expect("a hash");
    let num_layers =
        || workspace.artifacts.head(&workspace.models, dir.path(), 8).expect("a head").0.num_layers;
    write(1);
    let first = hash();
    assert_eq!((num_layers(), hash()), (1, first.clone()));
    write(2);
    assert_eq!(num_layers(), 2);
    assert_ne!(hash(), first);
}

/// Copies a model whose head is tied, and stores a head beside: the embeddings with their last byte
/// changed by `change`.
fn with_head(name: &str, change: u8) -> tempfile::TempDir {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny").join(name);
    let to = tempfile::tempdir().expect("a temporary directory");
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(from.join(file), to.path().join(file)).expect("copied");
    }
    let bytes = std::fs::read(from.join("model.safetensors")).expect("there");
    let (header, data) = bytes[8..].split_at(bytes[0] as usize + 256 * bytes[1] as usize);
    let mut header: serde_json::Value = serde_json::from_slice(header).expect("a header");
    let mut head = header["model.embed_tokens.weight"].clone();
    let place = |at: usize| head["data_offsets"][at].as_u64().expect("an offset") as usize;
    let mut own = data[place(0)..place(1)].to_vec();
    *own.last_mut().expect("numbers") ^= change;
    head["data_offsets"] = serde_json::json!([data.len(), data.len() + own.len()]);
    header["lm_head.weight"] = head;
    let header = header.to_string();
    let size = (header.len() as u64).to_le_bytes();
    let file = [&size, header.as_bytes(), data, &own].concat();
    std::fs::write(to.path().join("model.safetensors"), file).expect("written");
    to
}

#[test]
fn a_stored_head_that_is_not_used_is_noted_once() {
    for (target, draft, num_notes) in [(0, 0, 0), (1, 0, 1), (1, 1, 2)] {
        let (target, draft) = (with_head("target", target), with_head("draft", draft));
        let drafts = [(DrafterId::DRAFT, draft.path())];
        let mut workspace = Workspace::new(target.path(), &drafts, vec![Device::flex()]);
        let seen = Reads::default();
        workspace.models.watch = seen.share();
        for dtype in [WeightDtype::F32, WeightDtype::Bf16, WeightDtype::F32] {
            workspace.models.target_in(dtype).expect("reads");
            workspace.models.draft_in(dtype).expect("reads");
        }
        let seen = seen.0.lock().expect("nobody panics");
        let notes: Vec<_> = seen.iter().filter(|line| line.contains("`lm_head.weight`")).collect();
        assert_eq!(notes.len(), num_notes, "{notes:?}");
        for note in notes {
            assert!(note.contains("tie_word_embeddings") && note.contains("hint: "), "{note}");
        }
    }
}

#[test]
fn a_missing_directory_is_named_with_its_role() {
    let workspace = Workspace::new(Path::new("nowhere"), &[], vec![Device::flex()]);
    let error = workspace.pair().expect_err("refused").to_string();
    assert!(error.starts_with("the target `nowhere` is not a directory; hint:"), "{error}");
}
