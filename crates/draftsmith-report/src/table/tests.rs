//! Tables of an evaluation are aligned, complete and explained.

use std::path::Path;

use super::*;
use crate::report::fixture;
use crate::results::{DrafterName, ResultRow};

#[test]
fn words_are_explained_only_where_they_occur() {
    let words = explained("K = 4  discard", Some(80)).expect("two words");
    assert_eq!(words, "discard: discarded candidates per token; K: candidates per round");
    assert_eq!(explained("means, a discard", None), None);
}

#[test]
fn the_conclusion_comes_first() {
    let (rows, summary) = (fixture::rows(), fixture::summary());
    let path = Path::new("evaluation/report.html");
    let text = render_evaluation(&rows, &summary.conclusion, path, Some(80), false);
    assert!(text.lines().all(|line| width_of(line) <= 80), "{text}");
    let first = text.split("\n\n").next().expect("a conclusion");
    insta::assert_snapshot!(first, @r"
    spec-bench, greedy: Deploy cost-confidence 0.187: 2.38x (2.29 to 2.50). Fastest
    in the sweep, not chosen: K = 5, 2.45x (2.36 to 2.58).
    spec-bench, sampled at T = 0.7: Deploy cost-confidence 0.187: 2.20x (2.11 to
    2.31). Fastest in the sweep, not chosen: head 0.5, 2.29x (2.19 to 2.40).
    gsm8k, greedy: Deploy cost-confidence 0.187: 2.53x (2.43 to 2.66). Fastest in
    the sweep, not chosen: K = 8, 2.66x (2.56 to 2.80).
    gsm8k, sampled at T = 0.7: Deploy cost-confidence 0.187: 2.34x (2.24 to 2.45).
    Fastest in the sweep, not chosen: head 0.3, 2.36x (2.27 to 2.48).
    Doubtful: 2 of the 60 prompts of spec-bench are prompts that the training data
    was built from. Speeds on unseen prompts may be lower.
    ");
}

#[test]
fn tables_are_aligned_and_fit_80_columns() {
    let rows: Vec<ResultRow> =
        fixture::rows().into_iter().filter(|row| row.dataset == "gsm8k").collect();
    let text = render_table(&rows, Some(80), false);
    assert!(text.lines().all(|line| width_of(line) <= 80), "{text}");
    let greedy = text.split("\n\n").next().expect("a table");
    insta::assert_snapshot!(greedy, @r"
    gsm8k, greedy, 20 prompts
    setting                tok/s  speed-up        95 %  7B/70B  lossless
    target alone           158.7     1.00x           -   0.00x       yes
    draft:
    K = 1                  258.1     1.63x  1.56..1.71   0.00x       yes
    K = 2                  313.9     1.98x  1.90..2.08   0.00x       yes
    K = 3                  340.8     2.15x  2.06..2.25   0.00x       yes
    K = 4                  383.6     2.42x  2.32..2.54   0.00x       yes
    K = 5                  403.9     2.54x  2.44..2.67   0.00x       yes
    K = 6                  416.6     2.62x  2.52..2.76   0.00x       yes
    K = 8                  423.0     2.66x  2.56..2.80   0.00x       yes  fastest
    K = 10                 392.9     2.47x  2.38..2.60   0.00x       yes
    K = 12                 380.0     2.39x  2.30..2.51   0.00x       yes
    K = 14                 378.5     2.38x  2.29..2.50   0.00x       yes
    heuristic 1            377.1     2.38x  2.28..2.49   0.00x       yes
    heuristic 5            398.8     2.51x  2.41..2.64   0.00x       yes  *
    head 0.1               362.7     2.29x  2.19..2.40   0.00x       yes
    head 0.3               397.3     2.50x  2.40..2.63   0.00x       yes
    head 0.5               399.4     2.52x  2.42..2.64   0.00x       yes  *
    head 0.7               373.0     2.35x  2.26..2.47   0.00x       yes
    head 0.9               344.3     2.17x  2.08..2.28   0.00x       yes
    head-without-lag 0.1   304.1     1.92x  1.84..2.01   0.00x       yes
    head-without-lag 0.3   353.9     2.23x  2.14..2.34   0.00x       yes
    head-without-lag 0.5   377.4     2.38x  2.28..2.50   0.00x       yes  *
    head-without-lag 0.7   344.8     2.17x  2.09..2.28   0.00x       yes
    head-without-lag 0.9   319.1     2.01x  1.93..2.11   0.00x       yes
    confidence 0.3         339.5     2.14x  2.05..2.25   0.00x       yes
    confidence 0.5         348.1     2.19x  2.11..2.30   0.00x       yes
    confidence 0.6         351.8     2.22x  2.13..2.33   0.00x       yes  *
    confidence 0.7         314.3     1.98x  1.90..2.08   0.00x       yes
    confidence 0.8         292.3     1.84x  1.77..1.93   0.00x       yes
    candidate-prob 0.3     313.5     1.98x  1.90..2.07   0.00x       yes
    candidate-prob 0.5     371.2     2.34x  2.24..2.46   0.00x       yes  *
    candidate-prob 0.6     353.7     2.23x  2.14..2.34   0.00x       yes
    joint-confidence 0.05  349.7     2.20x  2.11..2.31   0.00x       yes
    joint-confidence 0.2   352.4     2.22x  2.13..2.33   0.00x       yes
    joint-confidence 0.4   392.0     2.47x  2.37..2.59   0.00x       yes  *
    joint-confidence 0.6   370.0     2.33x  2.24..2.45   0.00x       yes
    entropy 0.2            287.3     1.81x  1.74..1.90   0.00x       yes
    entropy 0.3            331.2     2.09x  2.00..2.19   0.00x       yes
    entropy 0.35           353.9     2.23x  2.14..2.34   0.00x       yes  *
    entropy 0.4            338.7     2.13x  2.05..2.24   0.00x       yes
    cost-head 0.08         319.2     2.01x  1.93..2.11   0.00x       yes
    cost-head 0.187        358.3     2.26x  2.17..2.37   0.00x       yes
    cost-head 0.45         401.6     2.53x  2.43..2.66   0.00x       yes  *
    cost-confidence 0.08   363.6     2.29x  2.20..2.40   0.00x       yes
    cost-confidence 0.187  402.2     2.53x  2.43..2.66   0.00x       yes  tuned
    cost-confidence 0.45   373.9     2.36x  2.26..2.47   0.00x       yes
    cost-entropy 0.08      339.2     2.14x  2.05..2.24   0.00x       yes
    cost-entropy 0.187     394.5     2.49x  2.39..2.61   0.00x       yes  *
    cost-entropy 0.45      366.4     2.31x  2.22..2.42   0.00x       yes
    exit1:
    K = 1                  233.4     1.47x  1.41..1.54   0.00x       yes
    K = 2                  267.5     1.69x  1.62..1.77   0.00x       yes
    K = 3                  282.7     1.78x  1.71..1.87   0.00x       yes
    K = 4                  292.8     1.84x  1.77..1.94   0.00x       yes
    K = 5                  308.3     1.94x  1.86..2.04   0.00x       yes  best
    K = 6                  297.9     1.88x  1.80..1.97   0.00x       yes
    heuristic 2            290.0     1.83x  1.75..1.92   0.00x       yes  *
    confidence 0.3         202.3     1.27x  1.22..1.34   0.00x       yes
    confidence 0.5         220.3     1.39x  1.33..1.46   0.00x       yes
    confidence 0.6         263.6     1.66x  1.59..1.74   0.00x       yes
    confidence 0.7         275.2     1.73x  1.66..1.82   0.00x       yes  *
    confidence 0.8         256.1     1.61x  1.55..1.69   0.00x       yes
    candidate-prob 0.3     219.4     1.38x  1.33..1.45   0.00x       yes
    candidate-prob 0.5     254.8     1.61x  1.54..1.69   0.00x       yes
    candidate-prob 0.6     274.7     1.73x  1.66..1.82   0.00x       yes  *
    joint-confidence 0.2   268.5     1.69x  1.62..1.78   0.00x       yes
    joint-confidence 0.4   295.4     1.86x  1.79..1.95   0.00x       yes  *
    joint-confidence 0.6   286.3     1.80x  1.73..1.89   0.00x       yes
    entropy 0.25           260.0     1.64x  1.57..1.72   0.00x       yes
    entropy 0.3            275.1     1.73x  1.66..1.82   0.00x       yes  *
    entropy 0.35           269.4     1.70x  1.63..1.78   0.00x       yes
    cost-confidence 0.08   220.9     1.39x  1.34..1.46   0.00x       yes
    cost-confidence 0.187  272.9     1.72x  1.65..1.81   0.00x       yes  *
    cost-entropy 0.08      249.5     1.57x  1.51..1.65   0.00x       yes
    cost-entropy 0.187     281.9     1.78x  1.70..1.86   0.00x       yes  *
    ");
}

#[test]
fn narrow_tables_drop_columns_but_no_rows() {
    let rows = fixture::rows();
    let num_settings =
        |text: &str| text.lines().filter(|line| line.contains('.') && line.contains('x')).count();
    let wide = num_settings(&render_table(&rows, None, false));
    for width in [48, 50, 60, 70] {
        let text = render_table(&rows, Some(width), false);
        assert!(text.lines().all(|line| width_of(line) <= width), "{text}");
        assert_eq!(num_settings(&text), wide);
    }
    assert!(render_table(&rows, Some(1), false).contains("speed-up"));
}

#[test]
fn colour_does_not_change_the_text() {
    let rows = fixture::rows();
    let coloured = render_table(&rows, None, true);
    assert!(coloured.contains('\u{1b}'));
    let mut plain = String::new();
    for (index, part) in coloured.split('\u{1b}').enumerate() {
        let text =
            if index == 0 { part } else { part.split_once('m').map_or("", |(_, text)| text) };
        plain += text;
    }
    let trimmed = |text: &str| text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
    assert_eq!(trimmed(&plain), trimmed(&render_table(&rows, None, false)));
}

#[test]
fn forgiven_ties_follow_the_verdict() {
    let mut rows = fixture::rows();
    for row in rows.iter_mut().filter(|row| row.lossless.is_some()) {
        row.num_forgiven_ties = if row.drafter == DrafterName::None { 0 } else { 2 };
    }
    let text = render_table(&rows, None, false);
    assert!(text.contains("yes, 2 ties\n"), "{text}");
    let plain = text.lines().find(|line| line.starts_with("target alone")).expect("a row");
    assert!(plain.ends_with(" yes"), "{plain}");
}

#[test]
fn missing_measurements_are_dashes() {
    let mut rows = fixture::rows();
    for row in &mut rows {
        (row.tokens_per_second, row.speedup, row.lossless) = (f64::NAN, None, Some(false));
    }
    let text = render_table(&rows, None, false);
    assert!(text.contains("NO") && !text.contains("NaN") && !text.contains("best"), "{text}");
    assert_eq!(render_table(&[], Some(80), true), "");
}
