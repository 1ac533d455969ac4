//! Every filter, test and global of Jinja, every method of Python's texts, lists and dictionaries, and rules where the
//! engine differs, compared with transformers' jinja2 (`tests/fixtures/make_jinja_cases.py`).

use std::collections::BTreeMap;

use super::render;

/// The filters, globals and methods that no template can use. The output of the first two is random.
const REFUSED: [&str; 12] = [
    "random",
    "lipsum",
    "pprint",
    "urlize",
    "wordwrap",
    "xmlattr",
    "encode",
    "expandtabs",
    "format_map",
    "maketrans",
    "translate",
    "fromkeys",
];

/// The outcome of each template, by kind and name; `None` is an error.
type Cases = BTreeMap<String, BTreeMap<String, BTreeMap<String, Option<String>>>>;

#[test]
fn names_of_jinja_and_python_render_as_in_transformers_or_are_refused() {
    let path = "../../tests/fixtures/chat-templates/jinja.json";
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let cases: Cases = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut refused = Vec::new();
    let mut wrong = Vec::new();
    for (name, outcomes) in cases.values().flatten() {
        assert!(!outcomes.is_empty(), "{name} has no template");
        for (template, expected) in outcomes {
            let rendered = render(template);
            if REFUSED.contains(&name.as_str()) {
                let error = rendered.expect_err(template);
                assert!(error.contains(&format!(" {name} ")), "{template}: {error}");
                assert!(error.contains("(line 1 of the template)"), "{template}: {error}");
                refused.push(name.as_str());
            } else if rendered.as_ref().ok() != expected.as_ref() {
                wrong.push(format!("{template}\nrendered {rendered:?}\nexpected {expected:?}"));
            }
        }
    }
    refused.sort_unstable();
    refused.dedup();
    assert_eq!(refused.len(), REFUSED.len(), "each refused name has a template");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
