//! Tests of recipes: defaults, overrides and invalid input.

use draftsmith_model::WeightDtype;
use draftsmith_theory::{Decoding, DecodingName, DrafterId, TokenChoice};
use draftsmith_train::Clipping;

use super::*;

const RECIPE: &str = "[models]\ntarget = 't'\n[drafters.draft]\nkind = 'model'\nmodel = 'd'\n\
                      [drafters.draft.head]\n[data]\nprompts = ['p.jsonl']\n\
                      [evaluate]\nprompts = ['q.jsonl']\n";

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
fn an_adapter_that_asks_for_states_of_servers_is_refused_by_its_own_key() {
    let own = "[drafters.exit]\nkind = 'adapter'\nexit_layer = 1\nfeatures = 'server'\n";
    let message = message(&format!("{RECIPE}{own}"), &[]);
    let expected =
        "section `[drafters.exit]`: `adapter.features` is `server`, expected `recompute`";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn all_recipes_of_the_repository_read() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes");
    for dir in [dir.to_owned(), format!("{dir}/papers")] {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|it| it == "toml") {
                let recipe = Recipe::read(&path, &Overrides::default());
                recipe.unwrap_or_else(|error| panic!("{error:#}"));
            }
        }
    }
}

#[test]
fn defaults_and_overrides_resolve() {
    let recipe =
        read(RECIPE, &["drafters.draft.head.num_layers=2", "seed=7", "drafters.draft.model=other"])
            .expect("reads");
    assert_eq!(recipe.name, "mine");
    assert_eq!(recipe.seed, 7);
    assert_eq!(recipe.trained_head().expect("a head").1.num_layers, 2);
    assert_eq!(recipe.draft(), Some((DrafterId::DRAFT, Path::new("other"))));
    assert_eq!(recipe.head_dir(DrafterId::DRAFT), Some("checkpoints/mine/draft/head".into()));
}

#[test]
fn only_evaluated_drafters_are_measured_and_an_exports_recipe_has_one() {
    let more = "[drafters.exit2]\nkind = 'adapter'\nexit_layer = 2\n";
    let both = format!("{RECIPE}{more}");
    let ids = |recipe: &Recipe| -> Vec<String> {
        recipe.evaluated().map(|(id, _)| id.to_string()).collect()
    };
    assert_eq!(ids(&read(&both, &[]).expect("reads")), ["draft", "exit2"]);
    let asked = read(&both, &["evaluate.drafters=['exit2']"]).expect("reads");
    assert_eq!(ids(&asked), ["exit2"]);
    for key in ["drafters", "trees.drafters"] {
        let given = format!("evaluate.{key}=['exit2']");
        assert!(message(RECIPE, &[&given]).contains("`[drafters.exit2]`"));
    }
    let ratios = ["evaluate.cost_ratios.pw={ exit2 = 0.04 }"];
    assert!(message(RECIPE, &ratios).contains("`evaluate.cost_ratios` names the drafter `exit2`"));
    let below = message(&both, &["evaluate.cost_ratios.pw={ exit2 = -1.0 }"]);
    assert!(below.contains("`evaluate.cost_ratios` has a ratio below 0"), "{below}");
    let dir = tempfile::tempdir().expect("a temporary directory");
    asked.write_of(DrafterId::named("exit2"), dir.path()).expect("written");
    let alone = Recipe::read(&dir.path().join("recipe.toml"), &Overrides::default());
    let alone = alone.expect("reads");
    assert_eq!((ids(&alone), alone.drafters.models().len()), (vec!["exit2".to_owned()], 0));
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
    let adapters = "[drafters.exit1]\nkind = 'adapter'\nexit_layer = 1\n[drafters.exit1.head]\n\
                    labels = 'rollouts'\ndtype = 'f32'\n";
    std::fs::write(&path, format!("{RECIPE}{adapters}")).expect("written");
    let dtypes = |dtype, keys: &[String]| {
        let recipe = Recipe::read(&path, &Overrides { keys, dtype, ..Overrides::default() });
        let drafters = recipe.expect("reads").drafters;
        let [draft, exit] = ["draft", "exit1"]
            .map(|name| drafters.get(name.parse().expect("a name")).expect("there"));
        let [head, of_adapter] =
            [draft, exit].map(|drafter| drafter.head_training().expect("one").dtype);
        let adapter = exit.kind.training().expect("an adapter that is trained");
        [head, adapter.lessons().dtype, of_adapter]
    };
    use WeightDtype::{Bf16, F32};
    assert_eq!(dtypes(F32, &[]), [F32; 3]);
    assert_eq!(dtypes(Bf16, &[]), [Bf16, Bf16, F32]);
    assert_eq!(dtypes(Bf16, &["drafters.exit1.dtype=f32".to_owned()]), [Bf16, F32, F32]);
    assert_eq!(dtypes(F32, &["drafters.draft.head.dtype=bf16".to_owned()]), [Bf16, F32, F32]);
    // The overrides add no section.
    std::fs::write(&path, RECIPE).expect("written");
    let recipe = Recipe::read(&path, &Overrides { dtype: Bf16, ..Overrides::default() });
    assert!(recipe.expect("reads").trained_self_drafts().is_empty());
}

#[test]
fn the_written_recipe_reads_back() {
    let overrides = [
        "data.top_k=5",
        "drafters.draft.head.optimizer.clipping.value=0.5",
        "drafters.draft.head.optimizer.schedule=linear",
    ];
    let recipe = read(RECIPE, &overrides).expect("reads");
    assert_eq!(recipe.trained_head().expect("a head").1.optimizer.clipping, Clipping::Value(0.5));
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
    assert!(message(RECIPE, &["drafters.draft.head.layers=2"]).contains("`layers`"));
    assert!(message(RECIPE, &["drafters.draft.head.optimizer.rate=2"]).contains("`rate`"));
    assert!(message(RECIPE, &["drafters.draft.head.learning_rate=1"]).contains("`learning_rate`"));
    for kind in ["kind = 'adapter', exit_layer = 1", "kind = 'eagle3'"] {
        let twice = ["a", "b"].map(|name| format!("drafters.{name}={{ {kind} }}"));
        let twice = message(RECIPE, &[&*twice[0], &*twice[1]]);
        assert!(twice.contains("`a` and `b` would be trained to the same weights"), "{twice}");
    }
    assert!(message(RECIPE, &["data.temperature=-1"]).contains("data"));
    for section in ["data", "evaluate"] {
        let none = message(RECIPE, &[&format!("{section}.top_k=0")]);
        assert!(none.contains(&format!("`{section}`")) && none.contains("top_k"), "{none}");
    }
    assert!(
        message(RECIPE, &["drafters.draft.head.optimizer.clipping.norm=0"])
            .contains("`head.optimizer.clipping.norm`")
    );
    let fixed = message(RECIPE, &["evaluate.rules.fixed=[0]"]);
    assert!(fixed.contains("`evaluate.rules.fixed`"), "{fixed}");
    let unknown = message(RECIPE, &["evaluate.rules.lengths=[1]"]);
    assert!(
        unknown.contains("`evaluate.rules.lengths`") && unknown.contains("`fixed`"),
        "{unknown}"
    );
    let unknown = message(RECIPE, &["evaluate.num_prompt=1"]);
    assert!(unknown.contains("line ") && unknown.contains("`num_prompts`"), "{unknown}");
    assert!(message(RECIPE, &["name=../x"]).contains("`name`"));
    assert!(message(RECIPE, &["seed"]).contains("KEY=VALUE"));
    assert!(message(RECIPE, &["seed.x=1"]).len() > 5);
}

#[test]
fn a_drafters_own_key_comes_before_a_shared_one() {
    let text = "[models]\ntarget = 't'\n[training]\nmax_len = 64\nloss_chunk = 8\n\
                optimizer = { num_epochs = 2, learning_rate = 1e-3 }\n\
                [drafters.exit2]\nkind = 'adapter'\nmax_len = 32\noptimizer.num_epochs = 5\n\
                [drafters.eagle]\nkind = 'eagle3'\n[drafters.ready]\nkind = 'eagle3'\npath = 'there'\n\
                [drafters.draft]\nkind = 'model'\nmodel = 'd'\n";
    let recipe = read(text, &["training.cache_mib=0"]).expect("reads");
    let of = |name: &str| {
        let id = DrafterId::named(name);
        let drafter = recipe.drafters.iter().find(|(it, _)| *it == id).expect("it is there").1;
        drafter.kind.training().map(|training| training.settings())
    };
    let of_adapter = of("exit2").expect("trained");
    assert_eq!((&of_adapter["max_len"], &of_adapter["loss_chunk"]), (&32.into(), &8.into()));
    assert_eq!(of_adapter["optimizer"]["num_epochs"], 5);
    assert_eq!(of_adapter["optimizer"]["learning_rate"], 1e-3);
    let of_eagle = of("eagle").expect("trained");
    assert_eq!((&of_eagle["max_len"], &of_eagle["cache_mib"]), (&64.into(), &0.into()));
    assert_eq!(of_eagle["optimizer"]["num_epochs"], 2);
    assert_eq!(of_eagle["optimizer"]["clipping"]["norm"], 0.5, "the kind's own default");
    assert_eq!(of("ready"), None);
    // A recipe written beside an export stores all keys at its drafters.
    assert!(!toml::to_string(&recipe).expect("it is TOML").contains("[training]"));

    let unknown = message(&text.replace("loss_chunk", "loss_chunks"), &[]);
    assert!(unknown.contains("`training.loss_chunks`"), "{unknown}");
    let none = message("[models]\ntarget = 't'\n[training]\nmax_len = 9\n", &[]);
    assert!(none.contains("`[training]`"), "{none}");
}
