//! Snapshots of help and error messages. After an intended change, run with `INSTA_UPDATE=always` and
//! review the diff of `snapshots/`.

use crate::help::commands;
use crate::support::{Place, model, root};

/// The output of a command without the repository's path.
fn output_of(place: &Place, arguments: &[&str]) -> String {
    let output = place.command(arguments).env("COLUMNS", "80").output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let code = output.status.code().unwrap();
    let told = format!("$ draftsmith {}\n{out}{err}[exit {code}]\n", arguments.join(" "));
    told.replace(root().to_str().unwrap(), "REPOSITORY")
}

#[test]
fn the_help() {
    let place = Place::new();
    let all = output_of(&place, &["--help"]);
    let each = commands().into_iter().map(|command| {
        output_of(&place, &command.split(' ').chain(["--help"]).collect::<Vec<_>>())
    });
    insta::assert_snapshot!(all + "\n" + &each.collect::<Vec<_>>().join("\n"));
}

#[test]
fn errors() {
    let place = Place::new();
    place.write_small_recipe();
    let recipe = std::fs::read_to_string(place.path("small.toml")).unwrap();
    place.write("misspelt.toml", recipe.replace("max_new_tokens", "max_tokens"));
    place.write("untargeted.toml", recipe.replace("target = ", "# target = "));
    place.write("broken.toml", recipe.replace("[data]", "[data"));
    place.write("notes.txt", "text");
    place.write("odd.jsonl", "{\"prompt\": \"fine\"}\n{\"nothing\": \"known\"}\n");
    let [target, draft] = ["target", "draft"].map(|name| model(name).display().to_string());
    let trees = format!(
        "[models]\ntarget = '{target}'\n[drafters.draft]\nkind = 'model'\nmodel = '{draft}'\n\
         [evaluate]\nprompts = ['train.jsonl']\n[evaluate.trees]\nshapes = ['2-1']\n"
    );
    place.write("trees.toml", trees);
    let cut = place.copy_model("draft-small", "cut").join("model.safetensors");
    let weights = std::fs::read(&cut).unwrap();
    std::fs::write(&cut, &weights[..weights.len() - 100]).unwrap();
    let generate = |extra: &[&str]| {
        let arguments = [&["generate", "--target", &target, "--prompt", "x"], extra].concat();
        output_of(&place, &arguments)
    };
    let small = |command: &str, set: &str| {
        let set: &[&str] = if set.is_empty() { &[] } else { &["--set", set] };
        output_of(&place, &[&[command, "small.toml"], set].concat())
    };
    let errors = [
        output_of(&place, &["frobnicate"]),
        output_of(&place, &["run", "absent.toml"]),
        output_of(&place, &["run", "misspelt.toml"]),
        output_of(&place, &["run", "untargeted.toml"]),
        output_of(&place, &["run", "broken.toml"]),
        small("run", "drafters.draft.head.layers=2"),
        small("run", "seed"),
        small("run", "drafters.draft.head.learning_rate=1e-3"),
        small("run", "drafters.draft.head.mixing_ratio=2"),
        small("run", "drafters.draft.head.dtype=f8"),
        small("run", "drafters.adapter.kind=lookahead"),
        small("evaluate", "evaluate.rules.head=[2]"),
        small("evaluate", "evaluate.rules.heads=[0.5]"),
        small("evaluate", ""),
        small("train-head", ""),
        small("tune", ""),
        small("build-data", "data.prompts=['absent.jsonl']"),
        output_of(
            &place,
            &["build-data", "small.toml", "--strict", "--set", "data.prompts=['odd.jsonl']"],
        ),
        small("build-data", "models.target=nowhere"),
        small("train-adapter", "drafters.adapter={ kind = 'adapter', exit_layer = [2, 3] }"),
        output_of(&place, &["check", "nowhere"]),
        output_of(&place, &["check", &draft]),
        output_of(&place, &["inspect", "notes.txt"]),
        output_of(&place, &["evaluate", "trees.toml"]),
        generate(&["--head", "head"]),
        generate(&["--draft", &draft, "--head", &draft]),
        generate(&["--draft", "cut"]),
        generate(&["--drafter", "."]),
        generate(&["--adapter", "nowhere", "--rule", "confidence=1.5"]),
        generate(&["--draft", &draft, "--rule", "fixed=0"]),
        generate(&["--draft", &draft, "--rule", "heads=0.5"]),
        generate(&["--draft", &draft, "--rule", "cost-entropy=0.6"]),
        output_of(&place, &["costs"]),
        output_of(&place, &["export", "--for", "gguf", "a", "b"]),
        generate(&["--draft", &draft, "--rule", "head=0.5"]),
        generate(&["--draft", &draft, "--rule", "fixed=4", "--max-candidate-length", "9"]),
        generate(&["--prompt-lookup", "--rule", "entropy=0.3"]),
        generate(&["--rule", "fixed=4"]),
        generate(&["--temperature", "-1"]),
        generate(&["--device", "abacus"]),
        generate(&["--dtype", "f8"]),
        generate(&["--dtype", "bf16"]),
    ];
    for error in &errors {
        assert!(error.contains("\nerror: ") && !error.contains("panicked"), "{error}");
    }
    insta::assert_snapshot!(errors.join("\n"));
}
