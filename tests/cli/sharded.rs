//! Data in several shards. The bytes equal those of one uninterrupted build, even if builds are killed or bytes
//! are damaged.
#![cfg(unix)]

use std::collections::BTreeMap;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::support::{Place, model, wait};

const DATA: &str = "data/many";
/// Six shards of 32 prompts, the last one smaller.
const NUM_PROMPTS: usize = 170;
const NUM_SHARDS: usize = 6;

/// A place with a recipe whose data has six shards.
fn place() -> Place {
    let place = Place::new();
    place.write_prompts("train.jsonl", NUM_PROMPTS);
    place.write(
        "many.toml",
        format!(
            "[models]\ntarget = '{}'\n[drafters.draft]\nkind = 'model'\nmodel = '{}'\n\
             [data]\nprompts = ['train.jsonl']\nmax_new_tokens = 3\n\
             [drafters.draft.head]\nnum_layers = 1\n[drafters.draft.head.optimizer]\nnum_epochs = 1\n",
            model("target").display(),
            model("draft-small").display()
        ),
    );
    place
}

fn shard(index: usize) -> String {
    format!("{DATA}/responses-{index:05}.parquet")
}

/// All files of the data, including hidden ones.
fn files(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let read = |name: String| {
        let bytes = std::fs::read(place.path(DATA).join(&name)).unwrap();
        (name, bytes)
    };
    place.names(DATA).into_iter().map(read).collect()
}

/// The files of an uninterrupted build, and their place.
fn whole() -> (BTreeMap<String, Vec<u8>>, Place) {
    let place = place();
    place.run(&["build-data", "many.toml"]).ok();
    (files(&place), place)
}

fn start(place: &Place) -> Child {
    let mut command = place.command(&["build-data", "many.toml", "--quiet"]);
    command.stdout(Stdio::null()).spawn().unwrap()
}

#[track_caller]
fn same(found: &BTreeMap<String, Vec<u8>>, expected: &BTreeMap<String, Vec<u8>>) {
    assert!(found.keys().eq(expected.keys()), "{:?}", found.keys());
    for (name, bytes) in found {
        assert!(*bytes == expected[name], "`{name}` has other bytes");
    }
}

fn flip(place: &Place, name: &str, at: usize) {
    let path = place.path(name);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn the_manifest_has_the_size_and_hash_of_each_shard() {
    let (files, place) = whole();
    let manifest: Value = serde_json::from_slice(&files["manifest.json"]).unwrap();
    assert_eq!(manifest["num_shards"], NUM_SHARDS);
    assert_eq!(manifest["num_rows"], NUM_PROMPTS);
    let shards = manifest["shards"].as_array().unwrap();
    for (index, record) in shards.iter().enumerate() {
        let name = record["name"].as_str().unwrap();
        let bytes = &files[name];
        assert_eq!(format!("{DATA}/{name}"), shard(index));
        assert_eq!(record["num_bytes"], bytes.len());
        assert_eq!(record["blake3"], blake3::hash(bytes).to_hex().as_str());
    }
    // A build that was killed has no manifest yet.
    std::fs::remove_file(place.path(&format!("{DATA}/manifest.json"))).unwrap();
    std::fs::remove_file(place.path(&shard(NUM_SHARDS - 1))).unwrap();
    place.run(&["train-head", "many.toml"]).fails_naming(&["is incomplete"]);
    let ran = place.run(&["build-data", "many.toml", "--json"]);
    assert_eq!(ran.json()["num_shards_kept"], NUM_SHARDS - 1);
    same(&self::files(&place), &files);
    place.run(&["train-head", "many.toml"]).ok();
}

#[test]
fn killed_builds_resume_to_the_bytes_of_an_uninterrupted_one() {
    let (expected, _) = whole();
    let place = place();
    let mut num_killed = 0;
    for round in 0..6 {
        let mut child = start(&place);
        // Wait until this round has a shard, and a moment longer.
        let before = place.names(DATA).len();
        while place.names(DATA).len() <= before && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        wait(Duration::from_micros(700 * round));
        // It may have ended.
        let _ = child.kill();
        num_killed += usize::from(!child.wait().unwrap().success());
    }
    assert!(num_killed > 0, "each ended before it was killed");
    place.run(&["build-data", "many.toml"]).ok();
    same(&files(&place), &expected);
}

#[test]
fn a_damaged_shard_is_named_and_repaired() {
    let (expected, place) = whole();
    let size = |index: usize| expected[&format!("responses-{index:05}.parquet")].len();
    // In a page, the header and the footer.
    for at in [size(2) / 3, 0, size(2) - 20] {
        flip(&place, &shard(2), at);
        let named = ["responses-00002.parquet`", "--repair"];
        place.run(&["build-data", "many.toml"]).fails_naming(&named);
        place.run(&["train-head", "many.toml"]).fails_naming(&["responses-00002.parquet`"]);
        let ran = place.run(&["build-data", "many.toml", "--repair", "--json"]);
        assert!(ran.stderr.contains("responses-00002.parquet`"), "{}", ran.stderr);
        assert!(ran.stderr.contains("built again"), "{}", ran.stderr);
        assert_eq!(ran.json()["num_shards_kept"], NUM_SHARDS - 1);
        same(&files(&place), &expected);
    }
    // Two damaged shards, one of them truncated.
    flip(&place, &shard(3), 1000);
    std::fs::write(place.path(&shard(4)), &expected["responses-00004.parquet"][..500]).unwrap();
    place.run(&["build-data", "many.toml"]).fails_naming(&["responses-00003.parquet` ", "1 more"]);
    let both = place.run(&["build-data", "many.toml", "--repair"]);
    assert!(both.stderr.contains("00003") && both.stderr.contains("00004"), "{}", both.stderr);
    same(&files(&place), &expected);
    // Damage to a hash in the manifest, and to the manifest's format.
    let manifest = format!("{DATA}/manifest.json");
    let text = String::from_utf8(expected["manifest.json"].clone()).unwrap();
    let at = text.find("\"blake3\": \"").unwrap() + 12;
    flip(&place, &manifest, at);
    place.run(&["build-data", "many.toml"]).fails_naming(&["responses-00000.parquet`", "BLAKE3"]);
    place.run(&["build-data", "many.toml", "--repair"]).ok();
    same(&files(&place), &expected);
    std::fs::write(place.path(&manifest), "{").unwrap();
    place.run(&["build-data", "many.toml"]).fails_naming(&["manifest.json", "--repair"]);
    place.run(&["build-data", "many.toml", "--repair"]).ok();
    same(&files(&place), &expected);
    // Data without a manifest gets one.
    std::fs::remove_file(place.path(&manifest)).unwrap();
    place.run(&["build-data", "many.toml"]).ok();
    same(&files(&place), &expected);
}

#[test]
fn other_settings_fail_for_any_existing_shards() {
    let (_, place) = whole();
    for index in [0, 2, 3] {
        std::fs::remove_file(place.path(&shard(index))).unwrap();
    }
    let other = ["build-data", "many.toml", "--set", "data.temperature=0.5"];
    place.run(&other).fails_naming(&["`temperature` = 1.0, which is 0.5 now"]);
    let repair = [&other[..], &["--repair"]].concat();
    place.run(&repair).fails_naming(&["`temperature` = 1.0, which is 0.5 now"]);
    place.write_prompts("train.jsonl", 40);
    place.run(&["build-data", "many.toml"]).fails_naming(&["`prompts[0]`"]);
    assert_eq!(place.names(DATA).iter().filter(|name| name.ends_with(".parquet")).count(), 3);
}

#[test]
fn shards_with_other_settings_never_get_a_manifest() {
    let ((_, one), other) = (whole(), place());
    other.run(&["build-data", "many.toml", "--set", "data.temperature=0.5"]).ok();
    std::fs::remove_file(one.path(&format!("{DATA}/manifest.json"))).unwrap();
    std::fs::copy(other.path(&shard(1)), one.path(&shard(1))).unwrap();
    one.run(&["build-data", "many.toml"]).fails_naming(&["responses-0000", "`temperature` is 1.0"]);
    assert!(!one.names(DATA).contains(&"manifest.json".to_owned()));
}
