//! The arguments of `generate`, and the recipe that is built from them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use draftsmith_recipe::exports::HEAD;
use draftsmith_recipe::kinds::FoundExport;
use draftsmith_recipe::{
    DrafterRecipe, DrafterRecipes, Kinds, NOTHING_DRAFTS, Origin, Overrides, Recipe, check_known,
};
use draftsmith_theory::{DrafterId, LookupFirst, TreeShape};
use draftsmith_tune::decoders::NO_TREE;

use super::rule::{self, AskedRule};
use crate::decoding_arguments::{DecodingArguments, EndArguments};

const DIRECTORY: &str =
    "with `--recipe`, give the name of a drafter of the recipe; a directory goes with `--target`";

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// Target: a directory, Hub name or GGUF file.
    #[arg(long, value_name = "MODEL", required_unless_present = "recipe")]
    pub(super) target: Option<PathBuf>,
    /// Directory of a GGUF target's tokenizer.
    #[arg(long, value_name = "DIR", requires = "target")]
    pub(super) tokenizer: Option<PathBuf>,
    /// Instead: a recipe with target and drafters.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["target", "draft", "head", "adapter", "prompt_lookup", "chat_template"]
    )]
    pub(super) recipe: Option<PathBuf>,
    /// Trained drafter, or a name of the recipe's.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["draft", "adapter", "prompt_lookup"])]
    pub(super) drafter: Option<String>,
    /// Draft: a directory, Hub name or GGUF file.
    #[arg(long, value_name = "MODEL")]
    pub(super) draft: Option<PathBuf>,
    /// Acceptance head of the draft.
    #[arg(long, value_name = "DIR", requires = "draft")]
    pub(super) head: Option<PathBuf>,
    /// As `--drafter DIR`.
    #[arg(long, value_name = "DIR", conflicts_with = "draft")]
    pub(super) adapter: Option<PathBuf>,
    /// Propose what followed the same words before.
    #[arg(long, conflicts_with_all = ["draft", "adapter"])]
    pub(super) prompt_lookup: bool,
    /// Earlier answers to look up.
    #[arg(long, value_name = "FILE", conflicts_with = "recipe")]
    pub(super) answers: Option<PathBuf>,
    /// Try prompt lookup first, `2x4` by default.
    #[arg(
        long,
        value_name = "AxB",
        num_args = 0..=1,
        default_missing_value = "2x4",
        conflicts_with_all = ["prompt_lookup", "tree"]
    )]
    pub(super) lookup_first: Option<LookupFirst>,
    /// Propose trees of this shape: `3-2x4x12`.
    #[arg(long, value_name = "SHAPE", conflicts_with = "prompt_lookup")]
    pub(super) tree: Option<TreeShape>,
    /// The user's message.
    #[arg(long, value_name = "TEXT")]
    pub(super) prompt: String,
    /// Use the prompt without the chat template.
    #[arg(long)]
    pub(super) raw: bool,
    /// `vicuna`, `llama-2`, `alpaca`, `none`, a file.
    #[arg(long, value_name = "NAME", conflicts_with = "raw")]
    pub(super) chat_template: Option<String>,
    #[command(flatten)]
    pub(super) decoding: DecodingArguments,
    #[command(flatten)]
    pub(super) ends: EndArguments,
    /// The most new tokens.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(super) max_new_tokens: usize,
    /// When a round ends: `fixed=4`, `tuned=DIR`.
    #[arg(long, value_name = "NAME=VALUE", value_parser = rule::parse)]
    pub(super) rule: Option<AskedRule>,
    /// The most candidates a round.
    #[arg(long, value_name = "K", requires = "rule")]
    pub(super) max_candidate_length: Option<usize>,
    /// Show where each token came from.
    #[arg(long, conflicts_with = "json")]
    pub(super) show: bool,
}

impl GenerateArguments {
    /// Returns the directory of a trained drafter; `None` if a recipe or another flag gives the
    /// drafter.
    fn drafter_dir(&self) -> Option<&Path> {
        let named = self.drafter.as_deref().filter(|_| self.recipe.is_none());
        self.adapter.as_deref().or(named.map(Path::new))
    }

    /// Returns the name of the recipe's drafter to use; `None` means the first one.
    pub(super) fn drafter_name(&self) -> Result<Option<DrafterId>> {
        let named = self.drafter.as_deref().filter(|_| self.recipe.is_some());
        named
            .map(str::parse)
            .transpose()
            .map_err(|error| anyhow::anyhow!("flag `--drafter`: {error}; hint: {DIRECTORY}"))
    }
}

/// Checks that the directory given by a flag does not contain an export of the wrong kind. Unknown
/// contents are reported later, when the directory is read.
fn check_found(
    flag: &str,
    dir: &Path,
    is_expected: impl Fn(&FoundExport) -> bool,
    expected: &str,
) -> Result<()> {
    let Ok(found) = Kinds::default().found_in(dir) else { return Ok(()) };
    if is_expected(&found) {
        return Ok(());
    }
    let hint = match (found.kind, found.export.command) {
        (None, _) => "give it with `--head`, beside the draft it was trained for",
        (Some(_), None) => "give it with `--draft`",
        (Some(_), Some(_)) => "give it with `--drafter`, without a draft",
    };
    bail!(
        "`{flag} {}`: expected an export of the kind {expected}, found one of the kind {}; hint: {hint}",
        dir.display(),
        found.export.text
    )
}

/// Checks flags that depend on another flag, a file or a drafter.
pub(super) fn check_flags(arguments: &GenerateArguments) -> Result<()> {
    let searches = arguments.lookup_first.is_none_or(|first| first.answers);
    ensure!(
        arguments.answers.is_none() || searches,
        "flag `--answers` needs look-ups that search them; hint: `--lookup-first answers:2x4`"
    );
    if let Some(dir) = &arguments.head {
        check_found("--head", dir, |found| found.kind.is_none(), HEAD.text)?;
    }
    if let Some(dir) = arguments.drafter_dir() {
        check_found("--drafter", dir, |found| found.kind.is_some(), "drafter")?;
    }
    if arguments.draft.is_none() && arguments.drafter_dir().is_none() && arguments.recipe.is_none()
    {
        ensure!(
            arguments.rule.is_none() || arguments.prompt_lookup,
            "flag `--rule` needs a drafter; hint: give `--draft`, `--adapter` or `--prompt-lookup`"
        );
        ensure!(
            arguments.tree.is_none(),
            "flag `--tree`: {NO_TREE}; hint: give `--draft` or `--adapter`"
        );
        ensure!(
            arguments.lookup_first.is_none(),
            "flag `--lookup-first` needs a drafter for rounds without a match; hint: give `--draft` \
             or `--adapter`, or `--prompt-lookup` instead"
        );
    }
    Ok(())
}

/// Reads the given recipe, or builds one from the target and drafters given by flags.
pub(super) fn recipe_of(arguments: &GenerateArguments, seed: u64) -> Result<Recipe> {
    if let Some(path) = &arguments.recipe {
        let recipe = Recipe::read(path, &Overrides { seed: Some(seed), ..Overrides::default() })?;
        ensure!(recipe.drafters.iter().next().is_some(), "{NOTHING_DRAFTS}");
        if let Some(asked) = arguments.drafter_name()? {
            let known: Vec<DrafterId> = recipe.drafters.iter().map(|(id, _)| id).collect();
            check_known(&known, asked, "drafter")?;
        }
        return Ok(recipe);
    }
    let target = arguments.target.clone().context("a target is given without a recipe")?;
    let mut drafters = DrafterRecipes::default();
    let kinds = Kinds::default();
    let of_keys = |kind: &str, keys: &[(&str, &Path)]| {
        let keys =
            keys.iter().map(|(key, path)| ((*key).to_owned(), path.display().to_string().into()));
        let mut table = toml::Table::from_iter(keys);
        table.insert("kind".to_owned(), kind.into());
        kinds.read(table).map_err(anyhow::Error::msg)
    };
    if let Some(model) = &arguments.draft {
        let kind = of_keys("model", &[("model", model)])?;
        let head = arguments.head.as_ref().map(|dir| Origin::Path(dir.into()));
        drafters.push(DrafterId::DRAFT, DrafterRecipe { head, ..DrafterRecipe::new(kind) });
    }
    if let Some(dir) = arguments.drafter_dir() {
        let trained = kinds.trained_in(dir).ok().and_then(|found| found.kind);
        let given = arguments.adapter.as_ref().and_then(|_| kinds.get("adapter"));
        let kind = match trained.or(given) {
            Some(kind) => kind,
            None => kinds.found_in(dir)?.kind.context("a drafter was found")?,
        };
        let drafter = kind.in_dir(dir).context("its kind has directories")?;
        drafters.push(DrafterId::named(kind.name), DrafterRecipe::new(drafter));
    }
    if arguments.prompt_lookup {
        let searched = arguments.answers.as_ref().map(|_| ("searched", Path::new("answers")));
        let drafter = DrafterRecipe::new(of_keys("prompt-lookup", searched.as_slice())?);
        drafters.push(DrafterId::named("lookup"), drafter);
    }
    let answers = arguments.answers.clone();
    let mut recipe = Recipe::of_drafters(target, arguments.chat_template.clone(), drafters);
    recipe.models.tokenizer.clone_from(&arguments.tokenizer);
    Ok(Recipe { answers, ..recipe })
}
