//! One data set built by several independent processes. The bytes equal those of one process, even if
//! processes are killed or run twice, or bytes are damaged.
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

/// The files that one process builds, and their place.
fn whole() -> (BTreeMap<String, Vec<u8>>, Place) {
    let place = place();
    place.run(&["build-data", "many.toml"]).ok();
    (files(&place), place)
}

fn start(place: &Place, arguments: &[&str]) -> Child {
    let mut command = place.command(&[&["build-data", "many.toml", "--quiet"], arguments].concat());
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
fn several_processes_give_the_bytes_of_one() {
    let (expected, _) = whole();
    let manifest: Value = serde_json::from_slice(&expected["manifest.json"]).unwrap();
    assert_eq!(manifest["num_shards"], NUM_SHARDS);
    assert_eq!(manifest["num_rows"], NUM_PROMPTS);
    let shards = manifest["shards"].as_array().unwrap();
    for (index, record) in shards.iter().enumerate() {
        let name = record["name"].as_str().unwrap();
        let bytes = &expected[name];
        assert_eq!(format!("{DATA}/{name}"), shard(index));
        assert_eq!(record["num_bytes"], bytes.len());
        assert_eq!(record["blake3"], blake3::hash(bytes).to_hex().as_str());
    }
    // Three processes, one of them twice.
    let place = place();
    let all = ["0/3", "1/3", "2/3", "1/3"].map(|shard| start(&place, &["--shard", shard]));
    for mut child in all {
        assert!(child.wait().unwrap().success());
    }
    same(&files(&place), &expected);
    // In sequence, numbered by schedulers, and more processes than shards.
    std::fs::remove_dir_all(place.path(DATA)).unwrap();
    let slurm = |id: &'static str| {
        [
            ("SLURM_ARRAY_TASK_ID", id),
            ("SLURM_ARRAY_TASK_COUNT", "7"),
            ("SLURM_ARRAY_TASK_MIN", "1"),
        ]
    };
    for (nth, id) in ["3", "7", "1", "2", "4", "5", "6"].into_iter().enumerate() {
        let ran = place.run_with(&["build-data", "many.toml", "--json"], &slurm(id));
        assert!(ran.stderr.contains(", from `SLURM_ARRAY_TASK_ID`"), "{}", ran.stderr);
        let left = ran.json()["num_shards_left"].as_u64().unwrap() as usize;
        // The seventh has nothing to build.
        let built = if nth == 0 { 1 } else { nth };
        assert_eq!(left, NUM_SHARDS - built);
        assert_eq!(expected.keys().eq(&place.names(DATA)), left == 0, "{:?}", place.names(DATA));
        if left > 0 {
            place.run(&["train-head", "many.toml"]).fails_naming(&["is incomplete"]);
        }
    }
    same(&files(&place), &expected);
    place.run(&["train-head", "many.toml"]).ok();
    let pod = [("JOB_COMPLETION_INDEX", "2")];
    place.run_with(&["build-data", "many.toml"], &pod).fails_naming(&["DRAFTSMITH_SHARD_COUNT"]);
    place.run_with(&["build-data", "many.toml", "--shard", "0/1"], &pod).ok();
    place.run(&["build-data", "many.toml", "--shard", "3/3"]).fails_naming(&["--shard", "3/3"]);
}

#[test]
fn killed_processes_resume_to_the_bytes_of_one_process() {
    let (expected, _) = whole();
    let place = place();
    let mut num_killed = 0;
    for round in 0..6 {
        let mut all = ["0/2", "1/2"].map(|shard| start(&place, &["--shard", shard]));
        // Wait until this round has a shard, and a moment longer.
        let before = place.names(DATA).len();
        while place.names(DATA).len() <= before
            && all.iter_mut().any(|child| child.try_wait().unwrap().is_none())
        {
            std::thread::yield_now();
        }
        wait(Duration::from_micros(700 * round));
        for mut child in all {
            // It may have ended.
            let _ = child.kill();
            num_killed += usize::from(!child.wait().unwrap().success());
        }
    }
    assert!(num_killed > 0, "each ended before it was killed");
    for shard in ["0/2", "1/2"] {
        place.run(&["build-data", "many.toml", "--shard", shard]).ok();
    }
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
    // Two damaged shards, one of them truncated; each is repaired by its process.
    flip(&place, &shard(3), 1000);
    std::fs::write(place.path(&shard(4)), &expected["responses-00004.parquet"][..500]).unwrap();
    place.run(&["build-data", "many.toml"]).fails_naming(&["responses-00003.parquet` ", "1 more"]);
    let one = place.run(&["build-data", "many.toml", "--shard", "1/2", "--repair"]);
    assert!(one.stderr.contains("00003") && !one.stderr.contains("00004"), "{}", one.stderr);
    place.run(&["build-data", "many.toml", "--shard", "0/2", "--repair"]).ok();
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
    let place = place();
    place.run(&["build-data", "many.toml", "--shard", "1/2"]).ok();
    let other = ["--set", "data.temperature=0.5"];
    for shard in ["0/2", "1/2", "0/1"] {
        let arguments = [&["build-data", "many.toml", "--shard", shard], &other[..]].concat();
        place.run(&arguments).fails_naming(&["`temperature` = 1.0, which is 0.5 now"]);
        let repair = [&arguments[..], &["--repair"]].concat();
        place.run(&repair).fails_naming(&["`temperature` = 1.0, which is 0.5 now"]);
    }
    place.write_prompts("train.jsonl", 40);
    place.run(&["build-data", "many.toml", "--shard", "0/2"]).fails_naming(&["`prompts[0]`"]);
    assert_eq!(place.names(DATA).iter().filter(|name| name.ends_with(".parquet")).count(), 3);
}

#[test]
fn of_processes_with_other_settings_that_start_together_one_is_refused() {
    for _ in 0..4 {
        let place = place();
        let other = ["--shard", "1/2", "--set", "data.temperature=0.5"];
        let mut all = [start(&place, &["--shard", "0/2"]), start(&place, &other)];
        let codes = all.each_mut().map(|child| child.wait().unwrap().code());
        assert_eq!(codes.iter().filter(|code| **code == Some(0)).count(), 1, "{codes:?}");
        assert!(!place.names(DATA).contains(&"manifest.json".to_owned()));
    }
}

#[test]
fn shards_with_other_settings_never_get_a_manifest() {
    let (one, other) = (place(), place());
    one.run(&["build-data", "many.toml", "--shard", "0/2"]).ok();
    let cold = ["--set", "data.temperature=0.5"];
    let build = [&["build-data", "many.toml", "--shard", "1/2"], &cold[..]].concat();
    other.run(&build).ok();
    for name in other.names(DATA).iter().filter(|name| name.contains("responses-")) {
        let bytes = std::fs::read(other.path(DATA).join(name)).unwrap();
        one.write(&format!("{DATA}/{name}"), bytes);
    }
    let named = ["`temperature` = 0.5", "which is 1.0 now"];
    one.run(&["build-data", "many.toml", "--shard", "0/2"]).fails_naming(&named);
    assert!(!one.names(DATA).contains(&"manifest.json".to_owned()));
}

#[test]
fn machines_share_data_through_a_store() {
    let (mut expected, _) = whole();
    expected.remove("recipe.toml");
    let common = Place::new();
    let key = format!("data.store=file://{}", common.path("store").display());
    let store = || {
        let read = |name: String| {
            let bytes = std::fs::read(common.path("store").join(&name)).unwrap();
            (name, bytes)
        };
        common.names("store").into_iter().map(read).collect::<BTreeMap<_, _>>()
    };
    // The second process is killed once, and then runs on two machines at once.
    let machines = [place(), place(), place(), place()];
    let mut killed = start(&machines[1], &["--shard", "1/3", "--set", &key]);
    while common.names("store").is_empty() && killed.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    let _ = killed.kill();
    killed.wait().unwrap();
    let all: Vec<Child> = ["0/3", "1/3", "2/3", "1/3"]
        .iter()
        .zip(&machines)
        .map(|(shard, machine)| start(machine, &["--shard", shard, "--set", &key]))
        .collect();
    for mut child in all {
        assert!(child.wait().unwrap().success());
    }
    same(&store(), &expected);
    for machine in &machines {
        let shards = machine.names(DATA).into_iter().filter(|name| name.ends_with(".parquet"));
        // It also copies others' shards, to compare settings or because a record was missing.
        assert!(shards.count() >= 2, "each has its own");
    }
    // Readers copy missing files.
    let reader = place();
    reader.run(&["train-head", "many.toml", "--set", &key]).ok();
    same(&files_but_recipe(&reader), &expected);

    // Damage in the store, found by a machine without a copy.
    let object = common.path("store").join("responses-00002.parquet");
    let mut bytes = expected["responses-00002.parquet"].clone();
    bytes[2000] ^= 1;
    std::fs::write(&object, &bytes).unwrap();
    let other = place();
    let build =
        |more: &[&str]| other.run(&[&["build-data", "many.toml", "--set", &key], more].concat());
    build(&[]).fails_naming(&["responses-00002.parquet` hashes to BLAKE3", "--repair"]);
    place()
        .run(&["train-head", "many.toml", "--set", &key])
        .fails_naming(&["responses-00002.parquet` hashes to BLAKE3"]);
    build(&["--repair"]).ok();
    same(&store(), &expected);
    build(&["--set", "data.temperature=0.5"]).fails_naming(&["`temperature` = 1.0"]);
    let fresh = place();
    fresh
        .run(&["build-data", "many.toml", "--shard", "9/10", "--set", &key, "--seed", "5"])
        .fails_naming(&["`seed` = 0, which is 5 now"]);
    // Data built without a store.
    std::fs::remove_dir_all(common.path("store")).unwrap();
    assert_eq!(build(&["--json"]).json()["num_shards_kept"], NUM_SHARDS);
    same(&store(), &expected);
    let bad = ["build-data", "many.toml", "--set", "data.store=bucket/path"];
    other.run(&bad).fails_naming(&["`data.store` is `bucket/path`, expected `s3://BUCKET/PATH`"]);
}

fn files_but_recipe(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let mut files = files(place);
    files.remove("recipe.toml");
    files
}
