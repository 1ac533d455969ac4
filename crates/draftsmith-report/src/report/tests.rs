//! The page is well formed, complete and escaped, and makes no request.

use draftsmith_theory::{CostSource, DrafterId};

use super::*;
use crate::results::{DrafterName, Estimate, ReplayGroup, Road, ServingWay, StopRuleName};

/// Elements without an end tag.
const VOID: [&str; 3] = ["meta", "link", "br"];

/// Checks that the page's tags are balanced, and returns them as (name, attributes).
#[track_caller]
fn tags(page: &str) -> Vec<(String, String)> {
    let (mut open, mut tags) = (Vec::new(), Vec::new());
    // Texts, attributes and style sheets contain `<` only as `&lt;`.
    for part in page.split('<').skip(1) {
        let (tag, _) = part.split_once('>').expect("every tag is closed");
        if tag.starts_with('!') {
            continue;
        }
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "an end tag without its start tag");
            continue;
        }
        let name: String = tag.chars().take_while(char::is_ascii_alphanumeric).collect();
        tags.push((name.clone(), tag[name.len()..].to_owned()));
        if !tag.ends_with('/') && !VOID.contains(&name.as_str()) {
            open.push(name);
        }
    }
    assert_eq!(open, Vec::<String>::new(), "start tags without an end tag");
    tags
}

fn attribute<'a>(attributes: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = attributes.split_once(&format!(" {name}=\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

#[test]
fn promised_and_measured_gains_are_shown_together() {
    let page = page();
    for part in ["What tuning promised", "+11.4\u{a0}%", "+12.1\u{a0}%", "held"] {
        assert!(page.contains(part), "`{part}`");
    }
}

#[test]
fn heads_of_a_sweep_and_lengths_of_answers_are_shown() {
    let page = page();
    for part in [
        "d2-w6-r0.15 is the fastest of 20 heads.",
        "d1-w6-r0.15 has the lowest KL and is 4.8% slower (3.8 to 5.8).",
        "no head needs less of both",
        "over the first 64 tokens",
    ] {
        assert!(page.contains(part), "`{part}`");
    }
}

/// Writes the page, for a browser: `REPORT_PAGE=page.html cargo test the_page_can_be_viewed`.
#[test]
fn the_page_can_be_viewed() {
    if let Some(path) = std::env::var_os("REPORT_PAGE") {
        std::fs::write(path, page()).expect("writable");
    }
}

fn page() -> String {
    render_html(&fixture::rows(), &fixture::summary(), &fixture::replay())
        .expect("the page is rendered")
}

#[test]
fn the_page_is_well_formed_and_its_numbers_are_finite() {
    let page = page();
    let tags = tags(&page);
    // In two sizes: six pictures for every dataset and decoding, one for every replay, and one for
    // the head's predictions and one for the heads of a sweep under each decoding.
    assert_eq!(
        tags.iter()
            .filter(
                |(name, attributes)| name == "svg" && attribute(attributes, "role") == Some("img")
            )
            .count(),
        (4 * 6 + 8 + 2 + 2) * 2
    );
    for (name, attributes) in &tags {
        for number in ["x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "width", "height"] {
            let Some(text) = attribute(attributes, number) else { continue };
            let value: f64 = text.parse().unwrap_or_else(|_| panic!("<{name} {number}={text}>"));
            assert!(
                value.is_finite() && (-1.0..=900.0).contains(&value),
                "<{name} {number}={text}>"
            );
        }
        for list in ["points", "viewBox"] {
            let numbers = attribute(attributes, list).unwrap_or("");
            for text in numbers.split([' ', ',']).filter(|text| !text.is_empty()) {
                assert!(text.parse::<f64>().is_ok_and(f64::is_finite), "<{name} {list}={numbers}>");
            }
        }
        if let Some(outline) = attribute(attributes, "d") {
            let numbers =
                outline.split(|letter: char| letter.is_ascii_alphabetic() || letter == ' ');
            for text in numbers.filter(|text| !text.is_empty()) {
                assert!(text.parse::<f64>().is_ok_and(f64::is_finite), "<{name} d={outline}>");
            }
        }
    }
    assert!(!page.contains("NaN") && !page.contains("inf\""));
    let ids: Vec<&str> =
        tags.iter().filter_map(|(_, attributes)| attribute(attributes, "id")).collect();
    for (index, id) in ids.iter().enumerate() {
        assert!(!ids[..index].contains(id), "`{id}` occurs twice");
    }
}

/// Yields the parts of the page that hold the pictures, the legend and the tables of a group.
fn sections(page: &str) -> impl Iterator<Item = &str> {
    page.split("<section class=\"group\" id=")
        .skip(1)
        .map(|section| section.split_once("</section>").expect("every section ends").0)
}

#[test]
fn the_first_chart_shows_speed_and_marks_the_setting_to_deploy() {
    let page = page();
    assert!(page.contains("Whiskers: 95 % intervals."), "the first chart has intervals");
    for section in sections(&page) {
        let title = section.split("<title").nth(1).expect("a chart");
        assert!(title.contains("Speed-up over plain decoding"), "{title}");
        let marked = section.split(r#"class="frame""#).skip(1).map(|rest| &rest[..300]);
        let marked: Vec<&str> = marked.collect();
        assert_eq!(marked.len(), 2, "one setting in two sizes");
        assert!(marked.iter().all(|it| it.contains(">deploy: tuning chose it on other prompts<")));
        // Screen readers read it too.
        assert!(section.contains("\u{d7}; deploy: tuning chose it on other prompts. cost-entropy"));
        assert!(section.contains("Framed: the fastest setting that tuning chose."));
    }
}

#[test]
fn a_tuned_setting_is_marked_though_others_of_its_rule_are_faster_or_it_is_not_to_be_deployed() {
    let (mut rows, summary) = (fixture::rows(), fixture::summary());
    for row in rows.iter_mut().filter(|row| row.is_tuned) {
        row.speedup_interval = Some([0.9, 1.1]);
        (row.speedup, row.tokens_per_second) = (Some(1.0), 0.4 * row.tokens_per_second);
    }
    let summary = summary.concluded(&rows);
    let page = render_html(&rows, &summary, &Replay::default()).expect("the page is rendered");
    assert_eq!(page.matches(">tuned on other prompts</text>").count(), 4 * 2);
    assert!(!page.contains("deploy: tuning chose"));
    // Without tuning, nothing is framed and the fastest of all is bold.
    rows.iter_mut().for_each(|row| row.is_tuned = false);
    let page = render_html(&rows, &summary, &Replay::default()).expect("the page is rendered");
    assert!(!page.contains(r#"class="frame""#) && !page.contains("Framed:"));
    let bars = page.split(r#"<g class="bar "#).skip(1);
    let bold = bars.filter(|bar| bar.split('"').next().is_some_and(|it| it.ends_with("best")));
    assert_eq!(bold.count(), 4 * 2);
}

#[test]
fn one_legend_serves_all_charts_of_a_section() {
    let page = page();
    let keys = |text: &str| text.matches(r#"<ul class="key""#).count();
    // The heads of the sweep have their own legend.
    assert_eq!((sections(&page).count(), keys(&page)), (4, 4 + 1));
    for section in sections(&page) {
        assert_eq!(keys(section), 1);
        let (_, key) = section.split_once(r#"<ul class="key""#).expect("a legend");
        let (key, charts) = key.split_once("</ul>").expect("charts after the legend");
        for series in charts.split(r#"<g class="series "#).skip(1) {
            let (class, _) = series.split_once('"').expect("a class");
            assert!(key.contains(&format!(r#"<g class="series {class}">"#)), "{class}");
        }
    }
}

#[test]
fn symbols_are_explained_before_the_first_chart_and_before_replays() {
    let (mut rows, mut replay) = (fixture::rows(), fixture::replay());
    let first = "4x6".parse().expect("a look-up");
    for row in rows.iter_mut().filter(|row| row.stop_rule == StopRuleName::Heuristic) {
        row.drafter = row.drafter.with_lookup(Some(first));
    }
    replay.groups[0].rows[3].lookup_first = Some(first);
    let page = render_html(&rows, &fixture::summary(), &replay).expect("the page is rendered");
    let (start, rest) = page.split_once("<svg class=\"wide\"").expect("a chart");
    let (_, replays) = rest.split_once("id=\"replay\"").expect("replays");
    let (replays, _) = replays.split_once("<svg").expect("a chart of a replay");
    for text in [start, replays] {
        for words in [
            "K: candidates per round;",
            "cost: drafts while a draft forward yields enough tokens for its time, by head,",
            "lookup: 4x6 proposes up to 6 tokens after a match of at least 4",
        ] {
            assert!(text.contains(words), "{words}");
        }
    }
}

#[test]
fn texts_for_terminals_have_no_backticks_on_the_page() {
    let (mut rows, mut summary) = (fixture::rows(), fixture::summary());
    rows.iter_mut().for_each(|row| row.is_tuned = false);
    summary = summary.concluded(&rows);
    summary.conclusion.last = Some("Next, run `draftsmith check DIR`.".to_owned());
    summary.conclusion.doubts.push("raise `evaluate.num_prompts`".to_owned());
    let page = render_html(&rows, &summary, &Replay::default()).expect("the page is rendered");
    assert!(!page.contains('`') && page.contains("raise evaluate.num_prompts"));
    assert!(page.contains("Next, run draftsmith check DIR."), "the last sentences are its lead");
}

#[test]
fn the_page_says_where_to_serve_and_how_to_start_it_there() {
    let mut summary = fixture::summary();
    let way = |runtime: &str, low| ServingWay {
        runtime: runtime.to_owned(),
        drafter: DrafterName::None,
        setting: "K = 2".to_owned(),
        drafting: None,
        speedup: Estimate { value: 1.5, low, high: 1.6 },
        costs: Some(CostSource::Machine),
        lost: vec!["prompt lookup".to_owned()],
        start: vec![format!("start {runtime} <x>")],
    };
    summary.conclusion.serving = vec![way("vLLM", 1.4), way("SGLang", 0.9)];
    let page = render_html(&fixture::rows(), &summary, &Replay::default()).expect("a page");
    assert!(
        page.contains("vLLM: 1.50x (1.40 to 1.60), modelled from this machine&#x27;s times: K = 2, without prompt lookup<pre>")
    );
    assert!(page.contains("start vLLM &lt;x&gt;") && !page.contains("start SGLang"));
    assert!(page.contains("leave speculation off there"));
}

/// Checks that no text of a chart leaves its picture, that ticks do not overlap, and that no
/// caption lies in a box that scrolls sideways.
#[test]
fn no_text_is_cut() {
    let mut replay = fixture::replay();
    replay.groups[0].rows[8].lookup_first = Some("12x10".parse().expect("a look-up"));
    let page = render_html(&fixture::rows(), &fixture::summary(), &replay).expect("a page");
    assert!(!page.contains("<caption") && page.contains("<strong>By category, with"));
    for chart in page.split("<svg class=\"").skip(1).filter(|chart| !chart.starts_with("mark")) {
        let size = attribute(chart, "viewBox").expect("a size").split(' ').nth(2).expect("a width");
        let size: f64 = size.parse().expect("a number");
        let (chart, _) = chart.split_once("</svg>").expect("the chart ends");
        let mut ticks = (0.0, 0.0);
        for text in chart.split("<text").skip(1) {
            let (attributes, text) = text.split_once('>').expect("a text");
            let (text, _) = text.split_once("</text>").expect("the text ends");
            let at = |name| attribute(attributes, name).expect("a place");
            let (x, width): (f64, f64) = (at("x").parse().expect("a number"), chart::width(text));
            let left = x - width
                * ["start", "middle", "end"]
                    .iter()
                    .position(|it| *it == at("text-anchor"))
                    .expect("an anchor") as f64
                / 2.0;
            assert!(left >= -1.0 && left + width <= size + 1.0, "{text}: {left} of {size}");
            if attribute(attributes, "class") == Some("axis") {
                let y: f64 = at("y").parse().expect("a number");
                assert!(ticks.0 != y || ticks.1 <= left, "the ticks at {text} overlap");
                ticks = (y, left + width);
            }
        }
    }
}

#[test]
fn the_oracle_is_not_called_the_fastest() {
    let mut replay = fixture::replays().swap_remove(0);
    let best = &mut replay.rows[8];
    best.lookup_first = Some("4x6".parse().expect("a look-up"));
    best.gain = Estimate { value: 0.4, low: 0.35, high: 0.45 };
    let page = page_of(&[replay]);
    assert!(page.contains("oracle +31.2\u{a0}%") && page.contains(">+40.0\u{a0}%</text>"));
    assert!(!page.contains("no rule can be faster"));
    assert!(page.contains("A rule can still be faster than the oracle: prompt lookup"));
}

#[test]
fn the_picture_of_the_speeds_needs_no_other_file() {
    let (rows, summary) = (fixture::rows(), fixture::summary());
    let picture = render_speed_svg(&rows, &summary).expect("rendered").expect("a picture");
    tags(&picture);
    assert!(picture.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" width="));
    assert!(
        picture.contains(
            "<title>Speed-up over plain decoding by stop rule: spec-bench, greedy</title>"
        )
    );
    assert!(
        picture.contains("deploy: tuning chose it")
            && picture.contains("prefers-color-scheme: dark")
    );
    assert!(
        picture.contains(">Recipe tiny on 8 cores, 32 GiB, Linux x86_64, draftsmith 0.1.0</text>")
    );
    assert_eq!(picture.matches("http").count(), 1, "only the name of the format");
    assert!(!picture.contains("<script") && picture.len() < 25_000, "{}", picture.len());
    assert_eq!(render_speed_svg(&[], &summary).expect("rendered"), None);
}

#[test]
fn the_page_makes_no_request() {
    let page = page();
    for (name, attributes) in tags(&page) {
        assert!(
            !["script", "img", "iframe", "object", "embed"].contains(&name.as_str()),
            "<{name}>"
        );
        assert_eq!(attribute(&attributes, "src"), None);
        if let Some(target) = attribute(&attributes, "href") {
            assert!(target.starts_with('#') || target == "data:,", "{target}");
        }
    }
    for forbidden in ["http:", "https:", "url(", "@import", "@font-face"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
}

#[test]
fn links_within_the_page_lead_somewhere() {
    let tags = tags(&page());
    let links = tags.iter().filter_map(|(_, attributes)| attribute(attributes, "href"));
    let links: Vec<&str> = links.filter_map(|target| target.strip_prefix('#')).collect();
    assert_eq!(links.len(), 4 + 1);
    for link in links {
        assert!(tags.iter().any(|(_, attributes)| attribute(attributes, "id") == Some(link)));
    }
}

#[test]
fn all_text_is_escaped() {
    const HOSTILE: &str = r#"<b>"'&</b>{{ 7 * 6 }}"#;
    let (mut rows, mut summary) = (fixture::rows(), fixture::summary());
    for row in &mut rows {
        row.dataset = HOSTILE.into();
        if !row.is_pooled() {
            row.category = HOSTILE.into();
        }
    }
    for known in &mut summary.groups {
        known.dataset = HOSTILE.into();
    }
    for dataset in &mut summary.datasets {
        dataset.name = HOSTILE.into();
    }
    for text in
        [&mut summary.recipe, &mut summary.version, &mut summary.machine, &mut summary.device]
    {
        *text = HOSTILE.into();
    }
    for model in &mut summary.models {
        for text in [&mut model.role, &mut model.name, &mut model.description, &mut model.hash] {
            *text = HOSTILE.into();
        }
    }
    for version in &mut summary.versions {
        (version.name, version.version) = (HOSTILE.into(), HOSTILE.into());
    }
    let page = render_html(&rows, &summary, &Replay::default()).expect("the page is rendered");
    tags(&page);
    assert!(!page.contains("<b>") && !page.contains("42}}"));
    assert!(page.contains("&lt;b&gt;&quot;&#x27;&amp;&lt;&#x2f;b&gt;{{ 7 * 6 }}"));
}

#[test]
fn missing_values_are_left_out() {
    let (rows, summary) = (fixture::rows(), fixture::summary());
    let without = |rule| -> Vec<ResultRow> {
        rows.iter().filter(|row| row.stop_rule != rule).cloned().collect()
    };
    let without_road =
        |road| -> Vec<ResultRow> { rows.iter().filter(|row| row.road != road).cloned().collect() };
    let mut unmeasured = rows.clone();
    for row in &mut unmeasured {
        (row.tokens_per_second, row.speedup, row.modelled_speedup) = (f64::NAN, None, None);
        (row.discard_rate, row.verification_rate, row.lossless) = (f64::NAN, f64::NAN, None);
    }
    let bare =
        EvaluationSummary { groups: vec![], models: vec![], datasets: vec![], ..summary.clone() };
    for rows in [
        without(StopRuleName::None),
        without(StopRuleName::FixedLength),
        without(StopRuleName::RejectionThreshold),
        without(StopRuleName::ConfidenceThreshold),
        without_road(None),
        without_road(Some(Road::SeparateDraft)),
        without_road(Some(Road::SelfDraft)),
        rows.iter().filter(|row| row.stop_rule == StopRuleName::None).cloned().collect(),
        rows.iter().filter(|row| row.is_pooled()).cloned().collect(),
        rows[..1].to_vec(),
        unmeasured,
        vec![],
    ] {
        for summary in [&summary, &bare] {
            let page =
                render_html(&rows, summary, &Replay::default()).expect("the page is rendered");
            tags(&page);
            assert!(!page.contains("NaN") && !page.contains(">none<"), "{page}");
        }
    }
}

#[test]
fn findings_name_losing_rules_and_differing_settings() {
    let (mut rows, summary) = (fixture::rows(), fixture::summary());
    for row in &mut rows {
        if ![StopRuleName::None, StopRuleName::FixedLength].contains(&row.stop_rule) {
            row.tokens_per_second *= 0.5;
        }
    }
    let page = render_html(&rows, &summary, &Replay::default()).expect("the page is rendered");
    assert!(page.contains("in 0 of 4 comparisons"), "no rule is faster");
    assert!(page.contains("gain slower") && !page.contains("gain faster"));

    let greedy = rows.iter_mut().find(|row| row.label() == "K = 3").expect("a fixed length");
    greedy.lossless = Some(false);
    let page = render_html(&rows, &summary, &Replay::default()).expect("the page is rendered");
    assert!(page.contains("differs from the target\u{2019}s output with K = 3."));
}

#[test]
fn kinds_of_drafters_and_exit_layers_look_different() {
    let (mut rows, summary) = (fixture::rows(), fixture::summary());
    let self_drafts: Vec<ResultRow> =
        rows.iter().filter(|row| row.road == Some(Road::SelfDraft)).cloned().collect();
    rows.extend(self_drafts.into_iter().map(|row| ResultRow {
        drafter: DrafterName::Of(DrafterId::named("exit2")),
        tokens_per_second: 0.9 * row.tokens_per_second,
        speedup: row.speedup.map(|speedup| 0.9 * speedup),
        discard_rate: 1.1 * row.discard_rate,
        ..row
    }));
    let page = render_html(&rows, &summary, &Replay::default()).expect("the page is rendered");
    tags(&page);
    for heading in ["Draft", "Exit1", "Exit2"] {
        assert!(page.contains(&format!("<span>{heading}</span>")), "{heading}");
    }
    for entry in ["head-without-lag", "joint-confidence", "cost-entropy"] {
        assert!(page.contains(&format!("</svg>{entry}</li>")), "{entry}");
    }
    assert!(page.contains("series self length other") && page.contains("curve self length other"));
    assert!(page.contains("series self confidence hollow dotted other"));
    assert!(page.contains("Self-drafting at its best is faster than the separate draft"));
}

fn page_of(groups: &[ReplayGroup]) -> String {
    let replay = Replay { groups: groups.to_vec(), ..Replay::default() };
    let page = render_html(&[], &fixture::summary(), &replay).expect("the page is rendered");
    tags(&page);
    assert!(!page.contains("NaN") && !page.contains(">none<"), "{page}");
    page
}

#[test]
fn replays_show_ceilings_and_intervals() {
    assert!(!page_of(&[]).contains("replay"));
    let replays = fixture::replays();
    let page = page_of(&replays[..1]);
    assert!(page.contains(
        "Most is gained with <span class=\"nowrap\">cost-head 0.319</span>: +4.1\u{a0}% (+2.7 to +5.5) over <span class=\"nowrap\">K = 6</span>."
    ));
    // Three rules read the head, and the picture has two sizes.
    assert_eq!(page.matches(r#"class="ceiling""#).count(), 3 * 2);
    assert_eq!(page.matches(r#"class="whisker""#).count(), 10 * 2);
    assert!(page.contains("oracle +31.2\u{a0}%"));
    assert!(
        page.contains(r#"<tr class="slower">"#) && page.contains(r#"<tr class="best faster">"#)
    );
    assert!(page.contains("<h3>Draft, greedy</h3>"));
    assert!(!page_of(&replays[4..]).contains(r#"class="ceiling""#), "self-drafts have no head");

    // A distant oracle does not compress the bars.
    let mut far = replays[0].clone();
    far.oracle = far.oracle.map(|oracle| crate::OracleResult {
        gain: Estimate { value: 5.0, ..oracle.gain },
        ..oracle
    });
    assert!(page_of(&[far]).contains("oracle +500.0\u{a0}% \u{2192}"));
}

#[test]
fn predictions_are_shown_with_their_reliability() {
    let page_of = |replay: &Replay| {
        let page = render_html(&[], &fixture::summary(), replay).expect("the page is rendered");
        tags(&page);
        assert!(!page.contains("NaN") && !page.contains(">none<"), "{page}");
        page
    };
    let mut replay = Replay { groups: Vec::new(), ..fixture::replay() };
    let page = page_of(&replay);
    assert!(page.contains("The expected calibration error is 19.4"));
    let num_points = |class: &str| {
        let start = format!("<g class=\"series {class}\"><title>");
        let points =
            page.split(&start).skip(1).map(|rest| rest.split("</g>").next().expect("a group"));
        points.map(|points| points.matches("<path").count()).collect::<Vec<_>>()
    };
    let [greedy, sampled] = &replay.predictions[..] else { panic!("two ways of decoding") };
    let [few, many] = [greedy, sampled].map(|one| one.bins.len());
    assert_eq!(num_points("draft head"), [few, few, many, many]);
    for score in [greedy.scores.ece, sampled.scores.ece, sampled.scores.brier] {
        assert!(page.contains(&format!(r#"<td class="num">{score:.4}</td>"#)), "{score}");
    }

    // A single kind of outcome has no AUROC.
    for one in &mut replay.predictions {
        one.scores.auroc = None;
        one.bins.truncate(1);
    }
    page_of(&replay);
    replay.predictions.clear();
    assert!(!page_of(&replay).contains("predictions-title"));
}

#[test]
fn missing_values_of_a_replay_are_left_out() {
    let mut replay = fixture::replays().swap_remove(0);
    let nothing = Estimate { value: f64::NAN, low: f64::NAN, high: f64::NAN };
    replay.rows[3].share_of_ceiling = Some(nothing);
    page_of(&[replay.clone()]);
    replay.oracle = None;
    for row in &mut replay.rows {
        (row.speedup, row.gain) = (nothing, nothing);
        (row.ceiling, row.share_of_ceiling) = (None, None);
    }
    assert!(!page_of(&[replay.clone()]).contains("Most is gained"));
    replay.rows.truncate(1);
    page_of(&[replay.clone()]);
    replay.rows.clear();
    page_of(&[replay]);
}

#[test]
fn few_settings_are_labelled_and_many_are_collapsed() {
    let (rows, summary) = (fixture::rows(), fixture::summary());
    let few: Vec<ResultRow> = rows
        .iter()
        .filter(|row| {
            use StopRuleName as Rule;
            [Rule::None, Rule::FixedLength, Rule::RejectionThreshold].contains(&row.stop_rule)
        })
        .cloned()
        .collect();
    let page = render_html(&few, &summary, &Replay::default()).expect("the page is rendered");
    assert!(page.contains("<details open>") && page.contains("equal modelled speed-up"));
    assert!(!page.contains("in addition") && !page.contains("Not shown"));
    let page = render_html(&rows, &summary, &Replay::default()).expect("the page is rendered");
    assert!(!page.contains("<details open>") && page.contains("equal modelled speed-up"));
    assert!(page.contains("in addition") && page.contains("Not shown"));
}
