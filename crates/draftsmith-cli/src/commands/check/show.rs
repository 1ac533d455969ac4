//! Formats the results of `check` as a table.

use draftsmith_report::{
    LEAST_PROMPTS, MAX_FOREIGN_LOAD, counted, plain_table, rule_label, speed_text,
};
use draftsmith_theory::Decoding;
use draftsmith_tune::check::{
    AcceptanceCheck, CheckReport, DecodingCheck, p_value_text, rate_text,
};

/// Formats the results as a table, one line per check, ending with a line break. It fits into 80
/// columns.
pub(super) fn table(checked: &CheckReport) -> String {
    let CheckReport { greedy, sampled, .. } = checked;
    let acceptance = |name: &str, acceptance: &AcceptanceCheck| {
        [
            name.to_owned(),
            format!("{} of {}", rate_text(&acceptance.rate), acceptance.num_drafted),
            acceptance.promised.as_ref().map_or_else(|| "nothing promised".to_owned(), rate_text),
            verdict(acceptance.holds).to_owned(),
        ]
    };
    let speed = &checked.speed;
    let rows = [
        [
            "greedy output".to_owned(),
            greedy_output(checked),
            "plain greedy output".to_owned(),
            verdict(Some(greedy.output.holds)).to_owned(),
        ],
        [
            "sampled output".to_owned(),
            sampled_output(checked),
            format!("p at least {}", sampled.output.alpha),
            verdict(Some(sampled.output.holds)).to_owned(),
        ],
        acceptance("greedy acceptance", &greedy.acceptance),
        acceptance("sampled acceptance", &sampled.acceptance),
        [
            "greedy speed".to_owned(),
            speed_text(&speed.speedup),
            "1.00x or more".to_owned(),
            speed.holds.map_or_else(|| unsure(checked), |holds| verdict(Some(holds)).to_owned()),
        ],
    ];
    format!(
        "{}: {}, {}\n{} of {}, up to {} new tokens a turn\ngreedy: {}\nsampled, {}: {}\n\n{}\n",
        checked.export.display(),
        checked.kind,
        if checked.passed { "passed" } else { "failed" },
        counted(checked.num_prompts, "prompt"),
        checked.prompts.join(", "),
        checked.max_new_tokens,
        rule(greedy),
        sampling(sampled),
        rule(sampled),
        plain_table(["check", "found", "must be", ""], rows, [], (0, 2), None)
    )
}

/// Says that the speed does not decide, and why if not by its interval.
fn unsure(checked: &CheckReport) -> String {
    let load = checked.speed.foreign_load.filter(|load| *load > MAX_FOREIGN_LOAD);
    match load {
        _ if checked.num_prompts < LEAST_PROMPTS => "unsure: too few prompts".to_owned(),
        Some(load) => format!("unsure: {:.0} % other load", 100.0 * load),
        None => "unsure".to_owned(),
    }
}

fn greedy_output(checked: &CheckReport) -> String {
    let output = &checked.greedy.output;
    let ties = match output.num_forgiven_ties {
        0 => String::new(),
        ties => format!(", {} forgiven", counted(ties, "tie")),
    };
    let found = match output.differences.len() {
        0 => "the same".to_owned(),
        1 => "1 answer differs".to_owned(),
        several => format!("{several} answers differ"),
    };
    format!("{found}, {} tokens{ties}", checked.greedy.num_tokens)
}

fn sampled_output(checked: &CheckReport) -> String {
    let output = &checked.sampled.output;
    let edges = match output.num_forgiven_edges {
        0 => String::new(),
        edges => format!(", {edges} at the nucleus's edge"),
    };
    let p_value = p_value_text(output.p_value);
    format!("p = {p_value}, {} tokens{edges}", checked.sampled.num_tokens)
}

fn sampling<T>(decoding: &DecodingCheck<T>) -> String {
    let DecodingCheck { sampling, repetition_penalty, .. } = decoding;
    let filters = Decoding::sampled(*sampling).penalising(*repetition_penalty).filters_text();
    [vec![format!("T = {}", sampling.temperature)], filters].concat().join(", ")
}

fn rule<T>(checked: &DecodingCheck<T>) -> String {
    let rule = rule_label(checked.lookup_first, &checked.stop_rule);
    format!("{rule}, {}", if checked.is_tuned { "tuned" } else { "default" })
}

fn verdict(holds: Option<bool>) -> &'static str {
    match holds {
        Some(true) => "pass",
        Some(false) => "FAIL",
        None => "-",
    }
}
