//! Tests of adapters for a target on servers whose first layers are available locally.

use std::collections::BTreeMap;

use draftsmith_data::read_rollouts;
use serde_json::json;

use super::*;
use crate::commands::train_drafter;
use crate::test_support::ChangeDrafters;

const EXIT: usize = 2;

/// Creates a directory with the target's tokenizer and configuration, the index of all its weights,
/// and the weights of its first layers and of everything outside the layers.
fn first_layers(dir: &Path) -> PathBuf {
    let target = without_weights(dir);
    let bytes = fs::read(model("target").join("model.safetensors")).expect("it is committed");
    let (len, rest) = bytes.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).expect("a header");
    let (mut kept, mut local, mut map) =
        (serde_json::Map::new(), Vec::new(), serde_json::Map::new());
    for (name, mut tensor) in header {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
        let is_here = layer.is_none_or(|layer| layer.parse::<usize>().expect("a number") < EXIT);
        if name == "__metadata__" {
            continue;
        }
        map.insert(name.clone(), json!(format!("model-{}.safetensors", usize::from(!is_here))));
        if is_here {
            let at = |nth: usize| tensor["data_offsets"][nth].as_u64().expect("an offset") as usize;
            let bytes = &data[at(0)..at(1)];
            tensor["data_offsets"] = json!([local.len(), local.len() + bytes.len()]);
            local.extend_from_slice(bytes);
            kept.insert(name, tensor);
        }
    }
    assert!(kept.len() < map.len() / 2, "{} of {} tensors", kept.len(), map.len());
    let mut header = serde_json::to_vec(&kept).expect("JSON");
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &local].concat();
    fs::write(target.join("model-0.safetensors"), file).expect("written");
    let index = json!({ "weight_map": map }).to_string();
    fs::write(target.join("model.safetensors.index.json"), index).expect("written");
    target
}

/// Builds a recipe that only trains an adapter, for a target on servers or a local one.
fn of_adapter(dir: &Path, name: &str, target: &Path, data: &str, more: &str) -> Recipe {
    let optimizer = "num_epochs = 2, learning_rate = 1e-3, validation_fraction = 0.3";
    let adapter = format!(
        "[drafters.adapter]\nkind = 'adapter'\nexit_layer = {EXIT}\nteacher = 'response'\ninitial = 'random'\n\
         optimizer = {{ {optimizer} }}\n{more}"
    );
    of_drafters(dir, name, target, data, &adapter)
}

const WITH_HEAD: &str = "[drafters.adapter.head]\nlabels = 'rollouts'\nnum_layers = 1\n\
                         optimizer = { num_epochs = 1, validation_fraction = 0.3 }";
const ADAPTER: DrafterId = DrafterId::named("adapter");

/// Trains the adapter. Returns its weights, and the results of later stages without paths.
fn trained(recipe: &Recipe) -> (Vec<Vec<u8>>, String, Value, Value) {
    let (workspace, console) = (workspace(recipe), Console::silent());
    train_drafter::run(StageJob::new(recipe, &workspace, &console), None).expect("trains");
    let dir = recipe.export_dir(ADAPTER);
    let weights = ["model.safetensors", "head/model.safetensors"].map(|name| dir.join(name));
    let weights = weights.iter().filter(|path| path.exists());
    let weights = weights.map(|path| fs::read(path).expect("weights")).collect();
    let recorded = record::run(StageJob::new(recipe, &workspace, &console)).expect("records");
    // We compare the rows as text, because missing values are NaN.
    let rows = recorded.iter().map(|file| {
        let (rows, _) = read_rollouts(&file.path, None).expect("rollouts");
        format!("{rows:?}")
    });
    let rows = rows.collect::<Vec<_>>().join("\n");
    let mut tuned = serde_json::to_value(
        tune::run(StageJob::new(recipe, &workspace, &console)).expect("tunes"),
    )
    .expect("JSON");
    for tuning in tuned.as_array_mut().expect("a list") {
        (tuning["export"], tuning["ways"]) = (Value::Null, Value::Null);
    }
    let mut replayed = serde_json::to_value(
        replay::run(StageJob::new(recipe, &workspace, &console)).expect("replays"),
    )
    .expect("JSON");
    for group in replayed["groups"].as_array_mut().expect("a list") {
        for row in group["rows"].as_array_mut().expect("a list") {
            (row["ceiling"], row["share_of_ceiling"]) = (Value::Null, Value::Null);
        }
    }
    (weights, rows, tuned, replayed)
}

#[test]
fn greedy_adapters_and_results_equal_those_of_the_whole_target() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = first_layers(dir.path());
    let loopback = loopback::serve(|_, _| Deed::Answer);
    for (which, more) in [("alone", ""), ("head", WITH_HEAD)] {
        let name = |of: &str| format!("{of}-{which}");
        let greedy = "temperature = 0";
        let data = format!("{greedy}\n{}", server(&loopback, ""));
        let mut served = of_adapter(dir.path(), &name("served"), &target, &data, more);
        let mut local = of_adapter(dir.path(), &name("local"), &model("target"), greedy, more);
        for recipe in [&mut served, &mut local] {
            let evaluate = recipe.evaluate.as_mut().expect("a section");
            evaluate.decodings.retain(|decoding| decoding.text() == "greedy");
        }
        assert_eq!(built(&served).rows, built(&local).rows);
        let (of_served, of_local) = (trained(&served), trained(&local));
        assert_eq!(of_served.0.len(), 1 + usize::from(!more.is_empty()));
        assert!(of_served.0 == of_local.0, "{which}: another adapter");
        // With a head, rollouts with the whole target also contain its probabilities.
        assert!(!more.is_empty() || of_served.1 == of_local.1, "other rollouts");
        assert!(of_served.1.len() > 1000);
        assert_eq!(of_served.2, of_local.2, "{which}");
        assert_eq!(of_served.3, of_local.3, "{which}");
        // Without the whole target, its hash is unknown.
        let config = draftsmith_model::AdapterConfig::from_dir(served.export_dir(ADAPTER));
        assert_eq!(config.expect("an adapter").target_hash, None);
    }
}

#[test]
fn sampled_adapters_are_trained_recorded_and_tuned() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = first_layers(dir.path());
    let loopback = loopback::serve(|_, _| Deed::Answer);
    for (name, more) in [("alone", ""), ("head", WITH_HEAD)] {
        let recipe = of_adapter(dir.path(), name, &target, &server(&loopback, ""), more);
        built(&recipe);
        let (weights, _, tuned, replayed) = trained(&recipe);
        assert_eq!(weights.len(), 1 + usize::from(!more.is_empty()));
        assert_eq!(tuned.as_array().map(Vec::len), Some(2), "{tuned}");
        let groups = replayed["groups"].as_array().expect("a list");
        let has_rows = |group: &Value| group["rows"].as_array().is_some_and(|rows| rows.len() > 2);
        assert!(!groups.is_empty() && groups.iter().all(has_rows), "{replayed}");
    }
}

#[test]
fn missing_layers_are_named() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = first_layers(dir.path());
    let loopback = loopback::serve(|_, _| Deed::Answer);
    let data = server(&loopback, "");
    let recipe = of_adapter(dir.path(), "a", &target, &data, "");
    built(&recipe);
    let train = |recipe: &Recipe| {
        let trained =
            train_drafter::run(StageJob::new(recipe, &workspace(recipe), &Console::silent()), None);
        format!("{:#}", trained.expect_err("refused"))
    };
    // Initialising from the target needs one layer more than the directory contains.
    let mut deeper = of_adapter(dir.path(), "a", &target, &data, "");
    deeper.drafters.adapter_of("adapter").common.initial = draftsmith_train::InitialWeights::Target;
    let error = train(&deeper);
    assert!(error.contains("drafters need the target's first 3 layers"), "{error}");
    fs::remove_file(target.join("model-0.safetensors")).expect("it was there");
    let error = train(&recipe);
    assert!(error.contains("drafters need the target's first 2 layers"), "{error}");
    assert!(error.contains("model-0.safetensors"), "{error}");
}
