//! Responses and labels in the forms of others.

use crate::support::Place;

/// A list as Python prints it.
fn read<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &serde_json::Value) -> Vec<T> {
    let inner = text.as_str().unwrap().strip_prefix('[').unwrap().strip_suffix(']').unwrap();
    inner.split(", ").map(|value| value.parse().unwrap()).collect()
}

#[test]
fn labels_are_written_as_the_specdec_pp_authors_read_them() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    let export = ["export", "--for", "specdec-pp", "data/small", "labels.json"];
    let told = place.run(&export).ok();
    assert!(told.contains("70 responses with labels"), "{told}");
    assert!(!told.contains("as served"), "T = 1 is what theirs are of: {told}");
    let items = place.json("labels.json");
    let items = items.as_array().unwrap();
    let rows =
        draftsmith_data::read_dir(&place.path("data/small"), draftsmith_data::Incomplete::Refused);
    let rows = rows.unwrap().rows;
    assert_eq!(items.len(), rows.len());
    for (item, row) in items.iter().zip(&rows) {
        let draft = row.draft.as_ref().unwrap();
        assert_eq!(item["id"], row.id.as_str());
        assert_eq!(read::<u32>(&item["prefix"]), row.prompt_ids);
        assert_eq!(read::<u32>(&item["tokens"]), row.response_ids);
        assert_eq!(read::<u32>(&item["draft"]), draft.draft_ids);
        assert_eq!(read::<f32>(&item["log_p_7b"]), draft.draft_log_prob);
        assert_eq!(read::<f32>(&item["log_p_70b"]), draft.target_log_prob);
        let pairs = draft.target_log_prob.iter().zip(&draft.draft_log_prob);
        for (found, (p, q)) in read::<f32>(&item["p_acc"]).iter().zip(pairs) {
            assert!((found - (p - q).min(0.0).exp()).abs() < 1e-5);
        }
        assert!(!item["continuation"].as_str().unwrap().contains("</s>"));
    }
    // Nothing is overwritten.
    place.run(&export).fails_naming(&["`labels.json`", "there already"]);

    // One shard, of what was chosen otherwise than theirs.
    let set = ["--set", "data.temperature=0.0", "--set", "name=\"greedy\""];
    place.run(&[&["build-data", "small.toml"], &set[..]].concat()).ok();
    let shard = "data/greedy/responses-00001.parquet";
    let told = place.run(&["export", "--for", "specdec-pp", shard, "one.json"]).ok();
    assert!(told.contains("as served"), "{told}");
    assert_eq!(place.json("one.json").as_array().unwrap().len(), 32);

    // Without a draft there are no labels.
    let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let alone: Vec<&str> = recipe.lines().filter(|line| !line.starts_with("draft =")).collect();
    let alone = alone.join("\n").replace("[head]\nnum_layers = 1\n", "");
    let alone =
        alone.split("[head").next().unwrap().replace("[models]", "name = 'alone'\n[models]");
    place.write("alone.toml", alone);
    place.run(&["build-data", "alone.toml"]).ok();
    place.run(&["export", "--for", "specdec-pp", "data/alone", "none.json"]).fails_naming(&[
        "`train#0`",
        "no labels",
        "`models.draft`",
    ]);
    assert!(!place.path("none.json").exists());
}
