//! Defaults, overrides and what is refused.

use draftsmith_model::WeightDtype;
use draftsmith_report::DecodingName;
use draftsmith_theory::{Decoding, TokenChoice};
use draftsmith_train::Clipping;

use super::*;

const RECIPE: &str = "[models]\ntarget = 't'\ndraft = 'd'\n\
                      [data]\nprompts = ['p.jsonl']\n\
                      [head]\n[evaluate]\nprompts = ['q.jsonl']\n";

fn read(text: &str, overrides: &[&str]) -> Result<Recipe> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("mine.toml");
    std::fs::write(&path, text).expect("written");
    let keys: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
    Recipe::read(&path, &Overrides { keys: &keys, ..Overrides::default() })
}

fn message(text: &str, overrides: &[&str]) -> String {
    format!("{:#}", read(text, overrides).expect_err("refused"))
}

#[test]
fn defaults_and_overrides_resolve() {
    let recipe =
        read(RECIPE, &["head.num_layers=2", "seed=7", "models.draft=other"]).expect("reads");
    assert_eq!(recipe.name, "mine");
    assert_eq!(recipe.seed, 7);
    assert_eq!(recipe.head.as_ref().expect("a head").num_layers, 2);
    assert_eq!(recipe.models.draft.as_deref(), Some(Path::new("other")));
    assert_eq!(recipe.evaluate.expect("a section").max_candidate_length, 20);
}

#[test]
fn an_adapters_head_learns_only_from_rollouts() {
    let head = ["adapter.exit_layer=1", "adapter_head.labels=rollouts"];
    let with = |more: &'static str| [head[0], head[1], more];
    read(RECIPE, &head).expect("reads");
    assert!(message(RECIPE, &head[1..]).contains("`[adapter]`"));
    let sampled = with("adapter_head.labels=sampled");
    assert!(message(RECIPE, &sampled).contains("`adapter_head.labels` is not `rollouts`"));
    let bad = message(RECIPE, &with("adapter_head.num_layers=65"));
    assert!(bad.contains("`adapter_head.num_layers` is 65"), "{bad}");
    let sweep = with("adapter_head.sweep.num_layers=[0, 1]");
    assert!(message(RECIPE, &sweep).contains("`adapter_head.sweep`"));
}

#[test]
fn evaluate_decides_how_stages_sample() {
    let top_k = |overrides: &[&str]| {
        let evaluate = read(RECIPE, overrides).expect("reads").evaluate.expect("a section");
        assert_eq!(evaluate.decoding(DecodingName::Greedy), Decoding::GREEDY);
        match evaluate.decoding(DecodingName::Sampled).choice {
            TokenChoice::Sampled(sampling) => sampling.top_k,
            TokenChoice::Greedy => panic!("it is sampled"),
        }
    };
    assert_eq!(top_k(&[]), None);
    assert_eq!(top_k(&["data.top_k=3"]), None);
    assert_eq!(top_k(&["evaluate.top_k=3"]), Some(3));
}

#[test]
fn the_command_lines_dtype_applies_to_trainings_without_one() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("mine.toml");
    let adapters = "[adapter]\nexit_layer = 1\n[adapter_head]\nlabels = 'rollouts'\n\
                    dtype = 'f32'\n";
    std::fs::write(&path, format!("{RECIPE}{adapters}")).expect("written");
    let dtypes = |dtype, keys: &[String]| {
        let recipe = Recipe::read(&path, &Overrides { keys, dtype, ..Overrides::default() });
        let Recipe { head, adapter, adapter_head, .. } = recipe.expect("reads");
        let [head, adapter_head] = [head, adapter_head].map(|it| it.expect("a section").dtype);
        [head, adapter.expect("a section").dtype, adapter_head]
    };
    use WeightDtype::{Bf16, F32};
    assert_eq!(dtypes(F32, &[]), [F32; 3]);
    assert_eq!(dtypes(Bf16, &[]), [Bf16, Bf16, F32]);
    assert_eq!(dtypes(Bf16, &["adapter.dtype=f32".to_owned()]), [Bf16, F32, F32]);
    assert_eq!(dtypes(F32, &["head.dtype=bf16".to_owned()]), [Bf16, F32, F32]);
    // It adds no section.
    std::fs::write(&path, RECIPE).expect("written");
    let recipe = Recipe::read(&path, &Overrides { dtype: Bf16, ..Overrides::default() });
    assert!(recipe.expect("reads").adapter.is_none());
}

#[test]
fn the_written_recipe_reads_back() {
    let overrides =
        ["data.top_k=5", "head.optimizer.clipping.value=0.5", "head.optimizer.schedule=linear"];
    let recipe = read(RECIPE, &overrides).expect("reads");
    assert_eq!(recipe.head.as_ref().expect("a head").optimizer.clipping, Clipping::Value(0.5));
    let dir = tempfile::tempdir().expect("a temporary directory");
    recipe.write_beside(dir.path()).expect("written");
    let again = Recipe::read(&dir.path().join("recipe.toml"), &Overrides::default());
    let again = again.expect("reads back");
    assert_eq!(toml::to_string(&again).expect("TOML"), toml::to_string(&recipe).expect("TOML"));
}

#[test]
fn messages_name_misspelt_missing_and_invalid_keys() {
    let misspelt = RECIPE.replace("prompts = ['q.jsonl']", "prompt = ['q.jsonl']");
    assert!(message(&misspelt, &[]).contains("`prompt`"));
    let missing = RECIPE.replace("target = 't'\n", "");
    assert!(message(&missing, &[]).contains("`target`"));
    assert!(message(RECIPE, &["head.layers=2"]).contains("`layers`"));
    assert!(message(RECIPE, &["head.optimizer.rate=2"]).contains("`rate`"));
    assert!(message(RECIPE, &["head.learning_rate=1"]).contains("`learning_rate`"));
    assert!(message(RECIPE, &["data.temperature=-1"]).contains("data"));
    for section in ["data", "evaluate"] {
        let none = message(RECIPE, &[&format!("{section}.top_k=0")]);
        assert!(none.contains(&format!("`{section}`")) && none.contains("top_k"), "{none}");
    }
    assert!(
        message(RECIPE, &["head.optimizer.clipping.norm=0"])
            .contains("`head.optimizer.clipping.norm`")
    );
    assert!(message(RECIPE, &["evaluate.candidate_lengths=[0]"]).contains("candidate_lengths"));
    assert!(message(RECIPE, &["name=../x"]).contains("`name`"));
    assert!(message(RECIPE, &["seed"]).contains("KEY=VALUE"));
    assert!(message(RECIPE, &["seed.x=1"]).len() > 5);
}
