//! The final three sentences of `run`: which setting was fastest, by how much, and what to do next.
//!
//! They cover only the first dataset and way of decoding. The conclusion before the tables covers
//! all of them.

use draftsmith_report::{DeployAdvice, GroupVerdict, ResultRow};
use draftsmith_theory::DrafterId;

use super::quoted;
use draftsmith_recipe::Recipe;
use draftsmith_tune::evaluate::Evaluation;

/// Writes the final sentences of a run. `None` if no drafter was measured.
pub(super) fn sentences(evaluation: &Evaluation, recipe: &Recipe) -> Option<String> {
    let verdict = evaluation.conclusion.verdicts.first()?;
    let setting = verdict.tuned.as_ref().or(verdict.fastest.as_ref())?;
    let row = evaluation.rows.iter().find(|row| row.label() == setting.label)?;
    let drafter = row.drafter.id()?;
    Some(format!("{} {}", verdict.found(&name(row))?, next(verdict, recipe, drafter)))
}

/// Formats a setting's drafter and rule, such as `draft (K = 4)`.
fn name(row: &ResultRow) -> String {
    format!("{} ({})", row.drafter.text(), row.rule_label())
}

/// Recommends the next step in one sentence.
fn next(verdict: &GroupVerdict, recipe: &Recipe, drafter: DrafterId) -> String {
    match verdict.advice {
        DeployAdvice::Deploy => match checked_dir(recipe, drafter) {
            Some(dir) => {
                format!("Next, run `draftsmith check {dir}`, and serve with it if it passes.")
            }
            None => "Next, serve with this setting.".to_owned(),
        },
        DeployAdvice::NotTuned if recipe.tune.is_some() => {
            "Next, measure this setting on other prompts, because these chose it.".to_owned()
        }
        _ => verdict.next().to_owned(),
    }
}

/// Returns the directory to pass to `check` for a drafter, quoted for a shell. `None` if the
/// drafter has no export.
fn checked_dir(recipe: &Recipe, id: DrafterId) -> Option<String> {
    let is_trained = recipe.drafters.get(id).is_some_and(|it| it.kind.training().is_some());
    let own = is_trained.then(|| recipe.export_dir(id));
    own.or_else(|| recipe.head_dir(id)).map(|dir| quoted(&dir))
}

#[cfg(test)]
mod tests {
    use draftsmith_report::MeasuredSetting;

    use super::*;

    fn end(advice: DeployAdvice, recipe: &str) -> String {
        let recipe: Recipe = toml::from_str(recipe).expect("a recipe");
        let (group, interval) = ("test, greedy".to_owned(), Some([1.21, 1.31]));
        let setting = MeasuredSetting { label: "eta = 0.8".to_owned(), speedup: 1.26, interval };
        let verdict = GroupVerdict { group, advice, tuned: None, fastest: Some(setting) };
        let draft = recipe.draft().expect("a draft").0;
        let found = verdict.found("draft (eta = 0.8)").expect("a setting");
        let text = format!("{found} {}", next(&verdict, &recipe, draft));
        assert_eq!(text.matches(". ").count(), 2, "three sentences: {text}");
        text
    }

    #[test]
    fn a_run_ends_with_what_was_fastest_by_how_much_and_what_is_next() {
        let recipe =
            "name = 'a'\n[models]\ntarget = 't'\n[drafters.draft]\nkind = 'model'\nmodel = 'd'\n";
        let trained = format!("{recipe}[drafters.draft.head]\n");
        insta::assert_snapshot!(end(DeployAdvice::Deploy, &trained), @"Of the settings that tuning chose, draft (eta = 0.8) was fastest. It decodes 1.26 times as fast as the target alone (95 %: 1.21 to 1.31; test, greedy). Next, run `draftsmith check checkpoints/a/draft/head`, and serve with it if it passes.");
        let of_eagle3 = format!("{recipe}[drafters.eagle]\nkind = 'eagle3'\n");
        let of_eagle3: Recipe = toml::from_str(&of_eagle3).expect("a recipe");
        let checked = |id| checked_dir(&of_eagle3, DrafterId::named(id));
        assert_eq!(checked("eagle").as_deref(), Some("checkpoints/a/eagle"));
        assert_eq!(checked("draft"), None);
        insta::assert_snapshot!(end(DeployAdvice::Deploy, recipe), @"Of the settings that tuning chose, draft (eta = 0.8) was fastest. It decodes 1.26 times as fast as the target alone (95 %: 1.21 to 1.31; test, greedy). Next, serve with this setting.");
        insta::assert_snapshot!(end(DeployAdvice::DoNotSpeculate, recipe), @"The target alone was faster than the settings that tuning chose. The best of them, draft (eta = 0.8), decodes 1.26 times as fast (95 %: 1.21 to 1.31; test, greedy). Next, try another drafter, or serve the target alone.");
        insta::assert_snapshot!(end(DeployAdvice::TooUncertain, recipe), @"No setting that tuning chose was clearly faster than the target alone. The best of them, draft (eta = 0.8), decodes 1.26 times as fast (95 %: 1.21 to 1.31; test, greedy). Next, measure more prompts on a quiet machine: raise `evaluate.num_prompts`.");
        insta::assert_snapshot!(end(DeployAdvice::NotTuned, recipe), @"Of the settings in the recipe, draft (eta = 0.8) was fastest. It decodes 1.26 times as fast as the target alone (95 %: 1.21 to 1.31; test, greedy). Next, add `tune = {}` to the recipe and run it again, which chooses a setting on other prompts.");
        insta::assert_snapshot!(end(DeployAdvice::NotTuned, &format!("tune = {{}}\n{recipe}")), @"Of the settings in the recipe, draft (eta = 0.8) was fastest. It decodes 1.26 times as fast as the target alone (95 %: 1.21 to 1.31; test, greedy). Next, measure this setting on other prompts, because these chose it.");
    }
}
