//! The guides' commands run on small models and stand-ins for servers, and known models' recipes are valid.

use std::path::Path;
use std::process::Command;

use draftsmith_recipe::{Overrides, Recipe};

use crate::support::{Place, copy_dir, model, root};
use crate::{certify, costs, doctor, gguf, states};

/// Programs that guides start and the test does not. Their commands may go on in an indented line.
const OTHERS: [&str; 4] = ["", "vllm", "llama-server", "hf"];
/// What guides and recipes write, and what is small or quick in its place.
const SMALL: [(&str, &str); 18] = [
    ("num_prompts = 10_000", "num_prompts = 40"),
    ("num_prompts = 60", "num_prompts = 4"),
    ("max_new_tokens = 512", "max_new_tokens = 12"),
    ("draft_vocabulary = 32_000", "draft_vocabulary = 512"),
    ("num_epochs = 3, validation_fraction = 0.02", "num_epochs = 1, validation_fraction = 0.3"),
    ("concurrency = 64", "concurrency = 3"),
    ("repeats = 3", "repeats = 1"),
    ("tune = {}", "tune.costs = { draft_ms = 1.0, target_ms = 5.0 }"),
    ("tune = { prompts", "tune = { costs = { draft_ms = 1.0, target_ms = 5.0 }, prompts"),
    ("tune.prompts = ", "tune.num_prompts = 4\ntune.prompts = "),
    ("decodings = [\"greedy\"] }", "decodings = [\"greedy\"], max_new_tokens = 9 }"),
    (" --device cuda:7 --dtype bf16", ""),
    ("server costs ", "server costs --blocks 1 "),
    ("server doctor ", "server doctor --num-prompts 4 --max-new-tokens 12 "),
    ("survey ", "survey --num-prompts 8 --max-new-tokens 12 "),
    ("run mine.toml", "run mine.toml --set data.max_new_tokens=12 --set evaluate.max_new_tokens=9"),
    ("compare.toml", "compare.toml --set evaluate.max_new_tokens=9"),
    ("svip.toml", "svip.toml --set evaluate.num_prompts=2 --set evaluate.max_new_tokens=9"),
];

/// Returns the blocks of code in a language, after its name.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    text.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix(language)).collect()
}

/// Runs all commands of a guide in order.
fn follow(guide: &Path) {
    let (text, name) = (std::fs::read_to_string(guide).unwrap(), guide.display());
    let words = text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric));
    assert!(words.clone().count() <= 700, "{name}: {} words", words.count());
    let place = Place::new();
    place.copy_model("target", "Qwen/Qwen3-30B-A3B-FP8");
    for name in ["target", "draft"] {
        for dir in ["path/to", "checkpoints/tiny"] {
            place.copy_model(name, &format!("{dir}/{name}"));
        }
        place.write(&format!("{name}.gguf"), gguf::converted(&model(name), |_| {}));
    }
    place.copy_model("target", "path/to/tokenizer");
    doctor::write_drafter(&place.path("path/to/drafter"), false);
    for (file, num) in [("my-prompts", 70), ("my-test-prompts", 4), ("path/to/prompts", 90)] {
        place.write_prompts(&format!("{file}.jsonl"), num);
    }
    place.write("costs.toml", "draft_ms = 1.0\ntarget_ms = 5.0\n");
    place.write("target.toml", "target_ms = 5.0\n");
    for dir in ["recipes/papers", "data/tiny/prompts"] {
        copy_dir(&root().join(dir), &place.path(dir));
    }
    let target = states::Mock::serve(place.path("states"));
    let [certified, reference] = certify::equal_servers();
    let [plain, drafting] = [0, 3].map(costs::server);
    let small = |text: &str| {
        let text = text.replace("http://localhost:8000/v1", &target.url);
        let text = text.replace("/dev/shm/states", &target.dir.display().to_string());
        SMALL.iter().fold(text, |text, (from, to)| text.replace(from, to))
    };
    let recipe = "recipes/models/qwen3-30b-a3b-fp8.toml";
    place.write(recipe, small(&std::fs::read_to_string(root().join(recipe)).unwrap()));
    for block in blocks(&text, "toml\n") {
        let file = block.lines().next().and_then(|line| line.strip_prefix("# "));
        place.write(file.unwrap(), small(block));
    }
    let binary = Path::new(env!("CARGO_BIN_EXE_draftsmith")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    let commands = blocks(&text, "sh\n").concat().replace("\\\n", " ");
    for line in commands.lines().filter(|line| !OTHERS.contains(&line.split(' ').next().unwrap())) {
        let mut before = "";
        let words = line.split(' ').map(|word| -> &str {
            match std::mem::replace(&mut before, word) {
                _ if !word.starts_with("http://") => word,
                "--reference" => &reference.url,
                _ if line.contains("server certify") => &certified.url,
                _ if !line.contains("server costs") => &target.url,
                _ if line.contains("--candidates 0") => &plain.url,
                _ => &drafting.url,
            }
        });
        let mut command = small(&words.collect::<Vec<_>>().join(" "));
        if command.contains("survey") && !command.contains("--costs") {
            let drafter = if command.contains("--draft ") { "costs" } else { "target" };
            command += &format!(" --costs {drafter}.toml");
        }
        let mut shell = Command::new("sh");
        shell.args(["-ec", &command]).current_dir(place.path(".")).env("PATH", &path);
        let output = shell.env("HF_HUB_OFFLINE", "1").output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
        // So little training may not pass the check.
        let is_judged = line.contains("draftsmith check") && out.contains("acceptance");
        assert!(output.status.success() || is_judged, "{name}: {command}\n{out}{err}");
    }
}

#[test]
fn the_commands_of_every_guide_run() {
    std::thread::scope(|scope| {
        for guide in std::fs::read_dir(root().join("recipes/guides")).unwrap() {
            scope.spawn(move || follow(&guide.unwrap().path()));
        }
    });
}

#[test]
fn the_recipes_beside_the_guides_are_valid() {
    let recipes = std::fs::read_dir(root().join("recipes/models")).unwrap();
    for path in recipes.map(|recipe| recipe.unwrap().path()) {
        let recipe = Recipe::read(&path, &Overrides::default()).unwrap();
        assert_eq!(Some(&*recipe.name), path.file_stem().unwrap().to_str());
        assert!(!recipe.trained_self_drafts().is_empty() && !recipe.models.target.exists());
    }
}
