//! The checks of `run` before its first stage, so that mistakes in the recipe do not surface after
//! hours of training. They cover exit layers, costs and all prompts. Then `run` estimates the
//! maximum number of tokens, bytes and minutes of the stages.

use anyhow::{Context, Result, bail};
use draftsmith_files::in_bytes;
use draftsmith_theory::{DrafterId, setting_text};

use crate::commands::StageJob;
use crate::console::Console;
use draftsmith_recipe::{
    Dataset, DrafterRecipe, EvaluateRecipe, PromptChoice, Recipe, Responses, Role, Workspace,
    choose_prompts, num_known, prompts_in_data, read_sources,
};
use draftsmith_report::{DecodingName, DrafterName, counted, duration_text};
use draftsmith_tune::build_data::BYTES_PER_TOKEN;
use draftsmith_tune::decoders::target_speed;
use draftsmith_tune::rollouts::{PromptSet, set_prompts};
use draftsmith_tune::tuning::given_costs;

/// Checks the recipe, and shows a note with the work that its stages will take.
///
/// # Errors
/// If a later stage would fail because of a key that can be checked now.
pub(super) fn check(job: StageJob<'_>) -> Result<()> {
    let StageJob { recipe, workspace, .. } = job;
    let num_layers = workspace.models.target_shape()?.num_layers;
    for (id, training) in recipe.trained_self_drafts() {
        training.check_layers(num_layers).with_context(|| format!("section `[drafters.{id}]`"))?;
    }
    check_costs(recipe)?;
    let datasets = evaluated_prompts(recipe, workspace)?;
    if recipe.tune.as_ref().is_some_and(|tune| tune.prompts.is_some()) {
        set_prompts(recipe, PromptSet::Validation, workspace, &Console::silent())?;
    }
    note_overlap(job, &datasets)?;
    note_work(job, &datasets)
}

/// Checks that given costs name existing drafters, and that they are complete if costs cannot be
/// measured.
fn check_costs(recipe: &Recipe) -> Result<()> {
    let Some(tune) = &recipe.tune else { return Ok(()) };
    let with_steps = recipe.evaluated().filter(|(_, it)| it.kind.is_recorded());
    let drafters: Vec<DrafterName> = with_steps.map(|(id, _)| id.into()).collect();
    let given = given_costs(tune.costs.as_ref(), &drafters).context("section `[tune.costs]`")?;
    let missing =
        |drafter: &&DrafterName| !given.iter().any(|costs| drafter.id() == Some(costs.drafter));
    if recipe.target_elsewhere().is_some()
        && let Some(drafter) = drafters.iter().find(missing)
    {
        bail!(
            "section `[tune.costs]` has no costs of `{drafter}`, which are not measured where servers run \
             the target; hint: give `draft_ms` and `target_ms`, which `draftsmith server costs` measures"
        );
    }
    Ok(())
}

/// Reads the evaluation prompts, which must exist and fit the models' context.
fn evaluated_prompts(recipe: &Recipe, workspace: &Workspace) -> Result<Vec<Dataset>> {
    let Some(evaluate) = &recipe.evaluate else { return Ok(Vec::new()) };
    let sources = read_sources(&evaluate.prompts, &recipe.reading(evaluate.split))?;
    let choice =
        PromptChoice { num_prompts: evaluate.num_prompts, skip_long: evaluate.skip_long_prompts };
    choice.of_each(sources, workspace.text_side()?, &Console::silent())
}

fn note_overlap(job: StageJob<'_>, datasets: &[Dataset]) -> Result<()> {
    let StageJob { recipe, workspace, console } = job;
    let Some(known) = prompts_in_data(recipe, workspace.text_side()?) else { return Ok(()) };
    for Dataset { name, prompts } in datasets {
        let num = num_known(prompts, &known);
        if num > 0 {
            console.note(format!(
                "run: {num} of the {} prompts of `{name}` are prompts that the training data is built \
                 from; speeds on unseen prompts may be lower",
                prompts.len()
            ));
        }
    }
    Ok(())
}

/// Shows a note with the maximum number of tokens, bytes and minutes of the stages.
fn note_work(job: StageJob<'_>, datasets: &[Dataset]) -> Result<()> {
    let StageJob { recipe, workspace, console } = job;
    let text = workspace.text_side()?;
    let (mut parts, mut num_decoded) = (Vec::new(), 0);
    if let Some(data) = recipe.data.as_ref().filter(|it| it.responses != Responses::Existing) {
        let prompts = choose_prompts(recipe, data, text, &Console::silent())?;
        let num_turns = prompts.num_turns(0..prompts.len());
        let num_tokens = num_turns * data.max_new_tokens.min(text.context);
        let bytes = in_bytes(num_tokens as u64 * BYTES_PER_TOKEN);
        parts.push(format!("{num_tokens} tokens of data ({bytes})"));
        num_decoded += num_tokens;
    }
    let head = recipe.trained_head();
    let num_heads = head.iter().flat_map(|(_, head)| head.passes()).map(|pass| pass.len());
    let num_heads: usize = num_heads.sum();
    if num_heads > 1 {
        parts.push(format!("{num_heads} heads in all"));
    }
    if let Some(evaluate) = &recipe.evaluate {
        let num_settings = num_settings(recipe, evaluate) * evaluate.decodings.len();
        let prompts = datasets.iter().flat_map(|dataset| &dataset.prompts);
        let num_turns: usize = prompts.map(|prompt| prompt.turns.len()).sum();
        let num_tokens = num_turns * num_settings * evaluate.max_new_tokens.min(text.context);
        let more = if recipe.tune.is_some() { " and in those that tuning adds" } else { "" };
        let settings = counted(num_settings, "setting");
        parts.push(format!("{num_tokens} tokens of evaluation in {settings}{more}"));
        num_decoded += num_tokens;
    }
    let prompt = datasets.iter().flat_map(|dataset| &dataset.prompts).next();
    let mut note = format!("run: at most {}", parts.join(", "));
    if let Some(prompt) = prompt.filter(|_| recipe.target_elsewhere().is_none()) {
        let pair = workspace.pair()?;
        let speed = target_speed(pair, &pair.text.encode_turn(prompt, 0, &[])?)?;
        note += &format!(
            "; decoding takes about {} at the target's {} tokens/s, and training comes on top",
            duration_text(num_decoded as f64 / speed),
            setting_text(Some(speed))
        );
    }
    if !parts.is_empty() {
        console.note(note);
    }
    Ok(())
}

/// Counts the settings of the recipe that an evaluation measures for one way of decoding.
fn num_settings(recipe: &Recipe, evaluate: &EvaluateRecipe) -> usize {
    let num_trees = evaluate.trees.iter().map(|trees| trees.shapes.len()).sum::<usize>();
    let variants = 1 + num_trees + evaluate.lookup_first.len();
    let of_drafter = |(_, drafter): (DrafterId, &DrafterRecipe)| {
        let has_head = drafter.head.is_some() || drafter.kind.own_head().is_some();
        let rules = drafter.stop_rules(&evaluate.rules, DecodingName::Greedy, has_head).len();
        rules * if drafter.kind.role() == Role::Steps { variants } else { 1 }
    };
    1 + recipe.evaluated().map(of_drafter).sum::<usize>() + evaluate.lookup_first.len()
}
