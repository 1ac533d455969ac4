//! Formats a survey as text.

use anyhow::Result;
use draftsmith_recipe::exports::servers::target_argument;
use draftsmith_report::{
    CostSource, DecodingName, TextRange, explained, plain_table, render_rules, wrapped,
};
use draftsmith_theory::Estimate;

use draftsmith_servers::explain::explain_hint;
use draftsmith_servers::survey::pair::PairSurvey;
use draftsmith_servers::survey::target_alone::{DRAFT_VOCABULARY, TargetSurvey};
use draftsmith_servers::survey::verdict::gain_text;
use draftsmith_servers::survey::{ServerAdvice, Survey, SurveyResult};

use crate::commands::tune::servers;

const OTHER_TARGET: &str = "The drafter was trained for another target. This is what it gives with this one, without a new training.";

/// Formats a survey as text that begins with the advice.
///
/// # Errors
/// If the costs lack the time of a draft forward.
pub(super) fn survey(survey: &Survey, width: Option<usize>, colour: bool) -> Result<String> {
    let heading = format!(
        "{}: {} prompts, {} answers, {} tokens\n",
        DecodingName::of(&survey.decoding).text(),
        survey.num_prompts,
        survey.num_answers,
        survey.num_tokens
    );
    let (text, sentence) = match &survey.found {
        SurveyResult::Pair(found) => (pair(found, width, colour)?, &found.verdict.sentence),
        SurveyResult::Target(found) => (target(found, width), &found.verdict.sentence),
    };
    let mut advice = wrapped(sentence, width).join("\n");
    if survey.trained_for.is_some() {
        advice += &format!("\n\n{}", wrapped(OTHER_TARGET, width).join("\n"));
    }
    if let Some(lines) = survey.recipe_lines() {
        advice += &format!("\n\nfor your recipe:\n  {lines}");
    }
    for ServerAdvice { setting, expected_gain, flags } in &survey.in_servers {
        let gain = gain_text(*expected_gain);
        advice += &format!("\n\nfor your server: {setting}, {gain}\n  {}", flags.join("\n  "));
    }
    let server = server(survey, width);
    let hint = survey.served_as.as_deref();
    let hint = hint.and_then(|draft| explain_hint(survey.kind, draft, &given_target(survey)));
    let hint = hint.map_or_else(String::new, |it| wrapped(&it, width).join("\n") + "\n");
    Ok(format!("{advice}\n\n{heading}{text}\n{server}{hint}"))
}

/// Returns the text after `--target` in a command.
fn given_target(survey: &Survey) -> String {
    target_argument(&survey.target.display().to_string(), survey.tokenizer.as_deref())
}

/// Formats the server's settings, and the commands that check them. Empty if the survey has no
/// server settings.
fn server(survey: &Survey, width: Option<usize>) -> String {
    let found = match &survey.found {
        SurveyResult::Pair(found) => &found.server,
        SurveyResult::Target(found) => &found.server,
    };
    let Some(settings) = found else { return String::new() };
    let mut text = servers::text(settings, width);
    if settings.files.is_empty() {
        return text;
    }
    text += &format!("start: {}\n", settings.start.join(" &&\n"));
    let is_look_up = settings.single.is_some_and(|it| it.num_matched.is_some());
    if let Some(draft) = survey.served_as.as_ref().filter(|_| !is_look_up) {
        text += &format!(
            "check: draftsmith server doctor {draft} --target {}\n",
            survey.target.display()
        );
    }
    text + &format!(
        "check: draftsmith server certify --server URL --reference URL --target {} --prompts FILE\n",
        given_target(survey)
    )
}

fn pair(found: &PairSurvey, width: Option<usize>, colour: bool) -> Result<String> {
    let costs = &found.costs.costs;
    let mut text = String::new();
    if let Some(agreement) = found.agreement {
        let overlap = found.overlap.map(|overlap| format!(", overlap {}", share(overlap)));
        let agreement = share(agreement);
        text +=
            &format!("most probable tokens agree at {agreement}{}\n", overlap.unwrap_or_default());
    }
    let by_position: Vec<String> =
        found.acceptance_by_position.iter().map(|share| format!("{share:.2}")).collect();
    if !by_position.is_empty() {
        text += &format!("accepted by position in a round: {}\n", by_position.join(" "));
    }
    text += &TextRange::text(&found.by_text_position).map_or(String::new(), |text| text + "\n");
    text += &format!(
        "a draft forward {}, verifications of {}{}\n",
        milliseconds(costs.rounds.draft_seconds(costs.drafter)?),
        rows(&|rows| costs.rounds.verify_seconds(rows)),
        source(found.cost_source, found.costs.uncertainty)
    );
    let lengths: Vec<String> = found
        .fixed_lengths
        .iter()
        .map(|fixed| format!("{} {:.2}x", fixed.candidate_length, fixed.speedup.value))
        .collect();
    text += &format!("speed-up at K: {}\n\n", lengths.join(", "));
    text += "every rule, each half of the prompts judged by what the other half chose:\n";
    text += &render_rules(&found.rules, found.oracle, width, colour);
    text += &format!(
        "\nthe best rule that needs no training: {}, {:.2}x, {} over the best K\n",
        found.untrained.setting,
        found.untrained.speedup.value,
        gain_text(found.untrained_gain)
    );
    text += &format!("{}\n", found.look_ups.text());
    // With a perfect head, a rule may do worse than the best K, because its setting was chosen on
    // the other half of the prompts. That result is not an upper bound.
    if let Some(ceiling) = found.head.ceiling.filter(|ceiling| ceiling.value > 0.0) {
        text += &format!("a perfect head: {} over the best K\n", gain_text(ceiling));
    }
    if let Some(probe) = &found.head.probe {
        text += &format!(
            "small heads trained on half of the prompts explain {} of what a constant leaves \
             unexplained{}; {}: {} over the best K, and more with more data\n",
            share(probe.explained),
            probe.scores.auroc.map_or_else(String::new, |auroc| format!(" (AUROC {auroc:.3})")),
            match found.head.ceiling {
                Some(_) => "a head gains about that share of a perfect one's gain",
                None => "the best rule that reads them gains",
            },
            gain_text(probe.outlook.over_fixed),
        );
    }
    Ok(text)
}

fn target(found: &TargetSurvey, width: Option<usize>) -> String {
    let mut text = format!(
        "target forwards of {}{}\n\n",
        rows(&|rows| found.verify_seconds[rows - 1]),
        source(found.cost_source, found.uncertainty)
    );
    let heading = ["exit layer", "cost", "pays from", "agrees", "setting", "speed-up", "95 %", ""];
    let rows = found.exits.iter().map(|exit| {
        let interval = |estimate: Estimate| format!("{:.3}..{:.3}", estimate.low, estimate.high);
        [
            exit.exit_layer.map_or("EAGLE-3".to_owned(), |layer| layer.to_string()),
            format!("{:.1} %", 100.0 * exit.draft_share),
            format!("{:.3}", exit.break_even),
            format!("{:.3}", exit.agreement.value),
            exit.setting.clone(),
            format!("{:.3}x", exit.speedup.value),
            interval(exit.speedup),
            if exit.exit_layer == found.best_exit_layer { "*" } else { "" }.to_owned(),
        ]
    });
    let table = plain_table(heading, rows, [0, 1, 2, 3, 5, 6], (1, 1), None);
    let words = explained(&table, width).map(|words| words + "\n").unwrap_or_default();
    text += &table;
    let legend = format!(
        "*: the best; cost: of a draft forward, with at most {DRAFT_VOCABULARY} tokens, in target forwards; \
         pays from: the share of tokens that must be accepted for one candidate per round to gain; agrees: \
         how often a linear read-out of the layer gives the target's token, less often than an adapter; EAGLE-3: \
         of what such a drafter reads, as if it agreed as often at each step"
    );
    text += &format!("\n\n{}\n{words}", wrapped(&legend, width).join("\n"));
    text += &format!("\n{}\n", found.look_ups.text());
    text
}

/// Formats the times of forwards over four row counts: `1, 2, 4 and 8 rows 1.10, 1.21, 1.40 and
/// 1.90 ms`.
fn rows(seconds: &dyn Fn(usize) -> f64) -> String {
    let ms = |rows: usize| format!("{:.3}", 1e3 * seconds(rows));
    format!("1, 2, 4 and 8 rows {}, {}, {} and {} ms", ms(1), ms(2), ms(4), ms(8))
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.3} ms", 1e3 * seconds)
}

fn source(source: CostSource, uncertainty: f64) -> String {
    match source {
        CostSource::Machine => format!(" here (± {:.0} %)", 100.0 * uncertainty),
        other => format!(", {}", other.text()),
    }
}

/// Formats a share with its interval: `0.912 (0.900 to 0.923)`.
fn share(estimate: Estimate) -> String {
    let Estimate { value, low, high } = estimate;
    format!("{value:.3} ({low:.3} to {high:.3})")
}
