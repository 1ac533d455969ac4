//! Measures a drafter's acceptance rate by position, for comparison with a server's own counters.

use std::path::Path;

use anyhow::{Context, Result};
use draftsmith_data::Prompt;
use draftsmith_recipe::{
    DrafterRecipe, DrafterRecipes, Kinds, PromptChoice, Reading, Recipe, Watch, Workspace,
    read_sources,
};
use draftsmith_theory::{
    Decoding, DrafterId, FixedLengthConfig, SeededDraws, StopRuleConfig, Trace,
};
use draftsmith_tune::conversation::answer_turns;
use draftsmith_tune::decoders::Decoders;
use serde::Serialize;

use super::FileForm;

/// The acceptance of candidates in greedy decoding.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExpectedAcceptance {
    /// The number of candidates per round.
    pub num_candidates: usize,
    /// The number of prompts that were answered.
    pub num_prompts: usize,
    /// The number of tokens in all answers.
    pub num_tokens: usize,
    /// For each position, the share of rounds in which the candidates up to and including that
    /// position were accepted: in vLLM's terms, `num_accepted_tokens_per_pos` over `num_drafts`.
    pub accepted_by_position: Vec<f64>,
    /// The tokens per round: 1 plus the sum of the shares.
    pub tokens_per_round: f64,
}

/// The plan of the measurement.
#[derive(Debug, Clone)]
pub struct AcceptancePlan<'a> {
    /// The prompt files.
    pub prompts: &'a [std::path::PathBuf],
    /// The maximum number of prompts, spread evenly.
    pub num_prompts: usize,
    /// The number of candidates per round.
    pub num_candidates: usize,
    /// The maximum number of tokens in an answer.
    pub max_new_tokens: usize,
}

/// Builds a recipe for a drafter and its target.
///
/// # Errors
/// If this program cannot run drafters in this format.
pub fn recipe_of(form: &FileForm, dir: &Path, target: &Path) -> Result<Recipe> {
    let kind = form.kind.and_then(|name| Kinds::default().get(name)?.in_dir(dir));
    let kind = kind.with_context(|| format!("{} cannot be run by itself", form.text))?;
    let drafters = DrafterRecipes::one(DrafterId::DRAFT, DrafterRecipe::new(kind));
    Ok(Recipe::of_drafters(target.to_path_buf(), None, drafters))
}

/// Measures the acceptance rate by position in greedy answers with a fixed candidate length.
///
/// # Errors
/// If prompts or models cannot be read.
pub fn expected_acceptance(
    recipe: &Recipe,
    workspace: &Workspace,
    plan: &AcceptancePlan<'_>,
    watch: &dyn Watch,
) -> Result<ExpectedAcceptance> {
    let pair = workspace.pair()?;
    let sources = read_sources(plan.prompts, &Reading::default())?;
    let choice = PromptChoice { num_prompts: Some(plan.num_prompts), skip_long: true };
    let datasets = choice.of_each(sources, &pair.text, watch)?;
    let prompts: Vec<&Prompt> = datasets.iter().flat_map(|dataset| &dataset.prompts).collect();
    let loaded = recipe.load_drafters(workspace, true)?;
    let id = loaded.iter().next().context("there is a drafter")?.id();
    let mut decoders = Decoders::new(pair, &loaded, plan.max_new_tokens);
    let rule: StopRuleConfig = FixedLengthConfig { candidate_length: plan.num_candidates }.into();
    let mut traces: Vec<Trace> = Vec::new();
    for prompt in &prompts {
        answer_turns(
            &pair.text,
            prompt,
            |ids: &Vec<u32>| ids,
            |turn| {
                let (mut rule, mut draws) = (rule.init()?, SeededDraws::new(0, &["doctor"]));
                let (rule, ids) = (Some(&mut *rule as _), &turn.prompt_ids);
                let greedy = &Decoding::GREEDY;
                let generation = decoders.decode(id.into(), rule, greedy, ids, &mut draws)?;
                traces.push(generation.trace);
                Ok(generation.token_ids)
            },
        )?;
    }
    let trace = Trace::merge(&traces);
    // We count rounds as servers do. The last round of an answer may draft fewer candidates.
    let num_rounds = trace.rounds.iter().filter(|round| round.num_drafted > 0).count() as f64;
    let share = |position: usize| {
        let accepted = trace.rounds.iter().filter(|round| round.num_accepted >= position).count();
        accepted as f64 / num_rounds
    };
    let accepted_by_position: Vec<f64> = (1..=plan.num_candidates).map(share).collect();
    Ok(ExpectedAcceptance {
        num_candidates: plan.num_candidates,
        num_prompts: prompts.len(),
        num_tokens: trace.num_tokens,
        tokens_per_round: 1.0 + accepted_by_position.iter().sum::<f64>(),
        accepted_by_position,
    })
}
