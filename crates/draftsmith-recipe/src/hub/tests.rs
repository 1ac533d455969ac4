use super::*;

#[test]
fn hub_names_are_distinguished_from_directories() {
    for (text, id, revision) in [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "main"),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
    ] {
        let model = parse_name(Path::new(text)).expect("a name");
        assert_eq!((model.url(), model.revision()), (id.to_owned(), revision));
    }
    for text in [
        "gpt2",
        "./org/name",
        "../name",
        "/org/name",
        "org/name/more",
        "org/",
        "/name",
        "",
        "org/.name",
        "org/name@",
        "org/name@../main",
        "org/a b",
        "~/model",
    ] {
        assert!(parse_name(Path::new(text)).is_none(), "{text}");
    }
}

#[test]
fn code_and_subdirectories_are_not_downloaded() {
    let known = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "modeling_x.py",
        "onnx/config.json",
        "README.md",
        "training_args.bin",
        "model.safetensors.index.json",
        "model.safetensors",
    ];
    let known = known.map(str::to_owned).into();
    let found: Vec<&str> = small_files(&known).collect();
    let expected =
        ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"];
    assert_eq!(found, expected);
}
