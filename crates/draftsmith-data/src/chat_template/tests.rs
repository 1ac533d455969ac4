//! Templates in both layouts, compared with texts derived by hand from Jinja's rules.

mod hostile;
mod jinja;
mod published;

use serde_json::json;

use super::*;
use crate::text_files::CONFIG_FILE;

/// The template under test is `template`; `config` is `tokenizer_config.json`.
fn load(template: Option<&str>, config: Option<&str>) -> Result<Option<ChatTemplate>, String> {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [(TEMPLATE_FILE, template), (CONFIG_FILE, config)] {
        if let Some(text) = text {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
    }
    let prefix = format!("{}/", dir.path().display());
    ChatTemplate::from_model_dir(dir.path()).map_err(|e| e.to_string().replace(&prefix, ""))
}

fn render(template: &str) -> Result<String, String> {
    let config = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null}"#;
    let template = load(Some(template), Some(config))?.unwrap();
    let messages = [
        Message::system("be brief"),
        Message::user("1 < 2 & 'yes'"),
        Message::assistant("ok "),
        Message::user("why?"),
    ];
    template
        .render(&messages, true)
        .map_err(|e| e.to_string().split_once(" cannot render ").unwrap().1.to_owned())
}

fn check(template: &str, expected: &str) {
    assert_eq!(render(template).unwrap(), expected, "{template}");
}

#[test]
fn blocks_trim_like_transformers() {
    check(
        "{% for m in messages %}\n    {% if m.role == 'user' %}\nU:{{ m.content }}\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\nA:\n{% endif %}\n",
        "U:1 < 2 & 'yes'\nU:why?\nA:\n",
    );
    check("x\n{%- if true %} y {% endif -%}\n z\n", "x y z");
}

#[test]
fn special_tokens_are_variables() {
    check("{{ bos_token }}{{ eos_token }}[{{ pad_token }}]", "<s></s>[]");
    check(
        "{{ pad_token is defined }} {{ tools is none }} {{ documents is none }}",
        "False True True",
    );
    // Llama 3's templates write this date by default.
    check("{{ strftime_now('%d %b %Y') if strftime_now is defined else '' }}", "26 Jul 2024");
}

#[test]
fn features_of_published_templates_work() {
    check("{{ messages[0]['content'].upper().strip() }}", "BE BRIEF");
    check("{% for m in messages[1:] %}{{ loop.index0 }}{{ m['role'][0] }}{% endfor %}", "0u1a2u");
    check(
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
        "user",
    );
    check(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "4",
    );
    check("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[-1].content | trim) }}", "<why?>");
    check("{{ 'a</think>b'.split('</think>')[-1] }}", "b");
    check("{{ messages[2].content }}|{{ messages[2].content.rstrip() }}|", "ok |ok|");
    // From Qwen3-Coder.
    check(
        "{{ tools is iterable and tools | length > 0 }} {{ messages is iterable }}",
        "False True",
    );
    check("{{ 'tool' not in messages[0] and messages[0].role in ['system'] }}", "True");
}

#[test]
fn tojson_does_not_escape_html() {
    check("{{ messages[1] | tojson }}", r#"{"role": "user", "content": "1 < 2 & 'yes'"}"#);
    check(r#"{{ 'é \\u003c "q" <' | tojson(ensure_ascii=False) }}"#, r#""é \\u003c \"q\" <""#);
    check("{{ [1, {'a': none}] | tojson(indent=2) }}", "[\n  1,\n  {\n    \"a\": null\n  }\n]");
}

#[test]
fn generation_tags_render_their_contents() {
    check(
        "{% for m in messages %}\n{%- generation %}{{ m.role[0] }}{%- endgeneration -%}\n{% endfor %}",
        "suau",
    );
    assert_eq!(plain_source("a {% x"), "a {% x");
    assert_eq!(plain_source("{%}{%"), "{%}{%");
    check("{{ 'a {% generation %} b' }}", "a {% generation %} b");
    check("{{ \"'{%\" }}{% generation %}x{% endgeneration %}{# {% generation %} ' #}", "'{%x");
    check("{% raw %}{% generation %}{{ 'x{% endraw %}y", "{% generation %}{{ 'xy");
    check("{ {% if '%}' %}{{ '}}' }}{% endif %} {x}", "{ }} {x}");
}

#[test]
fn lines_end_as_in_jinja_whatever_the_file_has() {
    check("a\r\n{% if true %}\r\nb\rc{% endif %}", "a\nb\nc");
    check("{{ 'x\r\ny' }}", "x\ny");
}

#[test]
fn texts_have_pythons_methods() {
    check(
        r"{{ '\x1cabc\x1f'.strip() }}|{{ ' \x85a '.lstrip() }}|{{ 'xxaxx'.strip('x') }}",
        "abc|a |a",
    );
    check(r"{{ 'a\x0bb\x0cc\x1cd\u2028e\x85f'.splitlines() | join('-') }}", "a-b-c-d-e-f");
    check(r"{{ 'a\r\nb\n\nc\n'.splitlines() | length }}", "4");
    check(r"{{ 'a\r\nb'.splitlines(keepends=true) | map('length') | join(',') }}", "3,1");
    check("{{ \"it's o'neill-smith\" | title }}", "It's O'neill-Smith");
    check("{{ \"it's mcDONALD x2y\".title() }}", "It'S Mcdonald X2Y");
    check(r"{{ '\U0001F600' }}{{ '\\U0001F600' }}", "\u{1F600}\\U0001F600");
    check("{{ 'a</think>b</think>c'.partition('</think>') | join('|') }}", "a|</think>|b</think>c");
    check(
        "{{ 'abc'.partition('x') | join('|') }} {{ 'abc'.rpartition('x') | join('|') }}",
        "abc|| ||abc",
    );
    check(
        "{{ 'axbxc'.rsplit('x', 1) | join('|') }} {{ 'axbxc'.split('x', 1) | join('|') }}",
        "axb|c a|bxc",
    );
    check(
        r"{{ ' a  b\x1cc '.split() | join('|') }} {{ ' a b  c '.rsplit(none, 1) | join('|') }}",
        "a|b|c  a b|c",
    );
    check("{{ 'a b  c '.split(maxsplit=1) | join('|') }}", "a|b  c ");
    check("{{ 'prefix-x'.removeprefix('prefix-') }}{{ 'x.py'.removesuffix('.py') }}", "xx");
    check(
        "{{ 'abc' is sequence }} {{ [] is sequence }} {{ {} is sequence }} {{ 5 is sequence }}",
        "True True True False",
    );
    check("{{ none is sequence }} {{ missing | length }} {{ missing | count }}", "False 0 0");
    check(
        "{{ {'b': [1, 2], 'a': 'é<'} | tojson(separators=(',', ':')) }}",
        r#"{"b":[1,2],"a":"é<"}"#,
    );
    check("{{ {'b': 1, 'a': {}} | tojson(sort_keys=true) }}", r#"{"a": {}, "b": 1}"#);
    check(
        "{{ [1, {'a': []}] | tojson(indent=1, separators=(',', ' : ')) }}",
        "[\n 1,\n {\n  \"a\" : []\n }\n]",
    );
}

#[test]
fn exceptions_and_mistakes_are_reported_with_their_line() {
    let check = |template: &str, expected: &str| {
        let error = render(template).unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    check(
        "\n{{ raise_exception('roles must alternate') }}",
        "these messages: roles must alternate (line 2 of the template)",
    );
    check("{{ strftime_now('%Q') }}", "`strftime_now` cannot write `%Q`");
    check("{{ messages.role.name }}", "undefined value");
    check(
        "a\n{% for m in messages %}",
        "`chat_template.jinja`: cannot parse the chat template: syntax error",
    );
}

#[test]
fn the_template_file_takes_precedence_over_the_config() {
    let content = |found: Option<ChatTemplate>| {
        found.map(|t| t.render(&[Message::user("x")], false).unwrap())
    };
    let check = |template, config, expected: Option<&str>| {
        assert_eq!(content(load(template, config).unwrap()).as_deref(), expected);
    };
    let text = r#"{"chat_template": "old {{ messages[0].content }}"}"#;
    let list = r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#;
    check(None, None, None);
    check(None, Some("{}"), None);
    check(None, Some(r#"{"chat_template": null}"#), None);
    check(None, Some(text), Some("old x"));
    check(None, Some(list), Some("d"));
    check(Some("new"), Some(text), Some("new"));
    check(Some("new"), None, Some("new"));
}

#[test]
fn bad_configs_are_named() {
    let check = |config: &str, expected: &str| {
        let error = load(None, Some(config)).unwrap_err();
        assert!(error.starts_with(expected), "{error}");
    };
    check("{\n\"a\": }", "`tokenizer_config.json`, line 2, column 6: not JSON");
    check(r#"{"chat_template": 5}"#, "`tokenizer_config.json`: key `chat_template` must be");
    check(
        r#"{"chat_template": [{"name": "rag", "template": "r"}]}"#,
        "`tokenizer_config.json`: key `chat_template` is a list without a template named `default`",
    );
    check(
        r#"{"chat_template": "x", "bos_token": {"id": 1}}"#,
        "`tokenizer_config.json`: key `bos_token` must be a string",
    );
}

#[test]
fn the_hash_covers_the_source() {
    let template = load(Some("abc"), None).unwrap().unwrap();
    assert_eq!(template.hash(), hash_bytes(b"abc"));
}

#[test]
fn a_template_that_writes_the_date_writes_the_chosen_one() {
    let template = load(Some("{{ strftime_now('%Y-%m-%d, %A %-d %B') }}"), None).unwrap().unwrap();
    let render = |template: &ChatTemplate| template.render(&[Message::user("x")], true).unwrap();
    assert_eq!(render(&template), "2024-07-26, Friday 26 July");
    let chosen = template.clone().with_date("2026-11-02").unwrap();
    assert_eq!(render(&chosen), "2026-11-02, Monday 2 November");
    assert_ne!(chosen.hash(), template.hash(), "other prompts have another hash");
    let error = template.clone().with_date("02/11/2026").unwrap_err().to_string();
    assert!(error.contains("`02/11/2026`") && error.contains("2026-01-31"), "{error}");
    let plain = load(Some("abc"), None).unwrap().unwrap();
    assert_eq!(plain.clone().with_date("2026-11-02").unwrap().hash(), plain.hash());
}

#[test]
fn arguments_reach_the_template_as_in_transformers() {
    let source = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}\
                  {% for tool in tools or [] %}{{ tool.name }}={{ tool | tojson }};{% endfor %}{{ messages[0].content }}";
    let template = load(Some(source), None).unwrap().unwrap();
    let render = |template: &ChatTemplate| template.render(&[Message::user("x")], true).unwrap();
    assert_eq!(render(&template), "x");
    let with =
        |arguments: Json| template.clone().with_arguments(arguments.as_object().unwrap().clone());
    let chosen = with(json!({ "enable_thinking": false, "tools": [{ "name": "f" }] })).unwrap();
    assert_eq!(render(&chosen), "<think></think>f={\"name\": \"f\"};x");
    assert_ne!(chosen.hash(), template.hash(), "other prompts have another hash");
    let error = with(json!({ "messages": [] })).unwrap_err().to_string();
    assert!(error.contains("`messages`") && error.contains("hint:"), "{error}");
}
