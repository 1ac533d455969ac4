//! The arguments of `generate`, and the recipe that they make.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use draftsmith_recipe::exports::ExportKind;
use draftsmith_recipe::kinds::adapter::AdapterKind;
use draftsmith_recipe::kinds::loaded::check_known;
use draftsmith_recipe::kinds::model::ModelKind;
use draftsmith_recipe::kinds::origin::Origin;
use draftsmith_recipe::kinds::prompt_lookup::PromptLookupKind;
use draftsmith_recipe::kinds::{DrafterRecipe, DrafterRecipes, Kind, NOTHING_DRAFTS};
use draftsmith_recipe::{Overrides, Recipe};
use draftsmith_theory::{DrafterId, LookupFirst, NamedRule, TreeShape};
use draftsmith_tune::decoders::NO_TREE;

use super::rule;
use crate::decoding_arguments::{DecodingArguments, EndArguments};

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// Target: a directory, or a Hugging Face name.
    #[arg(long, value_name = "MODEL", required_unless_present = "recipe")]
    pub(super) target: Option<PathBuf>,
    /// Instead: a recipe with target and drafters.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["target", "draft", "head", "adapter", "prompt_lookup", "chat_template"]
    )]
    pub(super) recipe: Option<PathBuf>,
    /// Drafter of the recipe; the first if absent.
    #[arg(long, value_name = "NAME", requires = "recipe")]
    pub(super) drafter: Option<DrafterId>,
    /// Draft: a directory, or a Hugging Face name.
    #[arg(long, value_name = "MODEL")]
    pub(super) draft: Option<PathBuf>,
    /// Acceptance head of the draft.
    #[arg(long, value_name = "DIR", requires = "draft")]
    pub(super) head: Option<PathBuf>,
    /// Self-draft adapter, instead of a draft.
    #[arg(long, value_name = "DIR", conflicts_with = "draft")]
    pub(super) adapter: Option<PathBuf>,
    /// Propose what followed the same words before.
    #[arg(long, conflicts_with_all = ["draft", "adapter"])]
    pub(super) prompt_lookup: bool,
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
    /// When a round ends, as in `fixed=4`, `head=0.7`.
    #[arg(long, value_name = "NAME=VALUE", value_parser = rule::parse)]
    pub(super) rule: Option<NamedRule>,
    /// The most candidates a round.
    #[arg(long, value_name = "K", requires = "rule")]
    pub(super) max_candidate_length: Option<usize>,
    /// Show where each token came from.
    #[arg(long, conflicts_with = "json")]
    pub(super) show: bool,
}

/// Checks flags that need a file or a drafter.
pub(super) fn check_flags(arguments: &GenerateArguments) -> Result<()> {
    for (kind, flag, dir) in [
        (ExportKind::Head, "--head", &arguments.head),
        (ExportKind::Adapter, "--adapter", &arguments.adapter),
    ] {
        dir.iter().try_for_each(|dir| kind.check(flag, dir))?;
    }
    if arguments.draft.is_none() && arguments.adapter.is_none() && arguments.recipe.is_none() {
        if arguments.rule.is_some() && !arguments.prompt_lookup {
            bail!(
                "flag `--rule` needs a drafter; hint: give `--draft`, `--adapter` or `--prompt-lookup`"
            );
        }
        if arguments.tree.is_some() {
            bail!("flag `--tree`: {NO_TREE}; hint: give `--draft` or `--adapter`");
        }
        if arguments.lookup_first.is_some() {
            bail!(
                "flag `--lookup-first` needs a drafter for rounds without a match; hint: give `--draft` \
                 or `--adapter`, or `--prompt-lookup` instead"
            );
        }
    }
    Ok(())
}

/// Reads the given recipe, or makes one of the target and drafters that flags name.
pub(super) fn recipe_of(arguments: &GenerateArguments, seed: u64) -> Result<Recipe> {
    if let Some(path) = &arguments.recipe {
        let recipe = Recipe::read(path, &Overrides { seed: Some(seed), ..Overrides::default() })?;
        if recipe.drafters.iter().next().is_none() {
            bail!("{NOTHING_DRAFTS}");
        }
        if let Some(asked) = arguments.drafter {
            let known: Vec<DrafterId> = recipe.drafters.iter().map(|(id, _)| id).collect();
            check_known(&known, asked, "drafter")?;
        }
        return Ok(recipe);
    }
    let target = arguments.target.clone().context("a target is given without a recipe")?;
    let mut drafters = DrafterRecipes::default();
    if let Some(model) = &arguments.draft {
        let kind = Kind::Model(ModelKind { model: model.clone() });
        let head = arguments.head.clone().map(Origin::Path);
        drafters.push(DrafterId::DRAFT, DrafterRecipe { head, ..DrafterRecipe::new(kind) });
    }
    if let Some(dir) = &arguments.adapter {
        let kind = Kind::Adapter(AdapterKind::in_dir(dir));
        drafters.push(DrafterId::named("adapter"), DrafterRecipe::new(kind));
    }
    if arguments.prompt_lookup {
        let kind = Kind::PromptLookup(PromptLookupKind::default());
        drafters.push(DrafterId::named("lookup"), DrafterRecipe::new(kind));
    }
    Ok(Recipe::of_drafters(target, arguments.chat_template.clone(), drafters))
}
