//! `inspect DATA --html`: the page of a data set.

use crate::support::{Place, model};

/// The number of occurrences of `part`.
fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn a_page_shows_tokens_with_their_overlap() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    let target = model("target").display().to_string();
    let page = ["--html", "page.html", "--rows", "7"];
    let inspect = ["inspect", "data/small"];
    let shown = place.run(&[&inspect[..], &page, &["--tokenizer", &target]].concat()).ok();
    assert_eq!(shown, place.run(&inspect).ok(), "the text output stays the same");
    let html = std::fs::read_to_string(place.path("page.html")).unwrap();
    assert_eq!(count(&html, "<article class=\"row\">"), 7);
    for id in ["acceptance", "overlap", "entropy", "entropy-ratio", "accepted-lengths", "bounds"] {
        assert_eq!(count(&html, &format!("id=\"{id}-wide-title\"")), 1, "{id}");
    }
    // Each token has a background and a title.
    let (rows, _) =
        draftsmith_data::read_shard(&place.path("data/small/responses-00000.parquet"), None)
            .unwrap();
    let first = rows.first().unwrap();
    let article = html.split("<article").nth(1).unwrap();
    assert!(article.contains(&first.id));
    let overlap = &first.draft.as_ref().unwrap().overlap;
    assert_eq!(count(article, "title=\"token "), overlap.len());
    for tenth in 0..10 {
        let of = |overlap: &&f32| (**overlap * 10.0).min(9.0) as usize == tenth;
        let num = overlap.iter().filter(of).count();
        assert_eq!(count(article, &format!("class=\"t{tenth}\"")), num, "{overlap:?}");
    }
    // The page makes no request and has no script.
    assert_eq!(
        (count(&html, "<script"), count(&html, "http://"), count(&html, "https://")),
        (0, 0, 0)
    );

    // Without a tokenizer the page shows ids, also for a single shard.
    let shard = ["inspect", "data/small/responses-00000.parquet", "--html", "ids.html"];
    place.run(&shard).ok();
    let html = std::fs::read_to_string(place.path("ids.html")).unwrap();
    assert!(html.contains(&format!(">{} </span>", first.response_ids[0])));
    assert_eq!(count(&html, "<article class=\"row\">"), 20);
}

#[test]
fn pages_of_other_files_are_refused() {
    let place = Place::new();
    place.write_small_recipe();
    place.run(&["build-data", "small.toml"]).ok();
    let target = model("target").display().to_string();
    let page = ["--html", "page.html"];
    let model = ["inspect", target.as_str()];
    place.run(&[&model[..], &page].concat()).fails_naming(&["`--html`", "responses-*.parquet"]);
    let rollouts = draftsmith_data::rollouts_path(&place.path("."), "draft", "test", "greedy");
    std::fs::copy(place.path("data/small/responses-00000.parquet"), &rollouts).unwrap();
    let rollouts = ["inspect", rollouts.to_str().unwrap()];
    place.run(&[&rollouts[..], &page].concat()).fails_naming(&["`--html`", "responses-*.parquet"]);
    place.copy_model("target", "other");
    let tokenizer = place.path("other/tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    std::fs::write(&tokenizer, text + "\n").unwrap();
    let other = ["inspect", "data/small", "--html", "page.html", "--tokenizer", "other"];
    place.run(&other).fails_naming(&["`other`", "differs from the data", "`--tokenizer`"]);
    assert!(!place.path("page.html").exists());
}
