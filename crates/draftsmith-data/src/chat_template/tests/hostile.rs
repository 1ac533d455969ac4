//! Templates that would run forever, fill the memory or overflow the stack. Each fails quickly and
//! in little memory.

use std::time::{Duration, Instant};

use super::*;
use crate::peak::peak_bytes;

/// Rendering fails quickly with this error.
fn refuses(template: &str, expected: &str) {
    let started = Instant::now();
    let error = render(template).expect_err(template);
    assert!(error.contains(expected), "{template}\n{error}");
    assert!(started.elapsed() < Duration::from_secs(30), "{template}");
    // All of these together stay below 100 MB.
    if let Some(peak) = peak_bytes() {
        assert!(peak < 500 << 20, "{} MB after {template}", peak >> 20);
    }
}

/// Asserts that loading `template` fails with an error that contains `expected`.
fn does_not_load(template: &str, expected: &str) {
    let error = load(Some(template), None).unwrap_err();
    assert!(
        error.starts_with("`chat_template.jinja`: cannot parse the chat template: "),
        "{error}"
    );
    assert!(error.contains(expected), "{error}");
}

const LONG_TEXT: &str = "it makes a text of more than 2 MB";
const BIG_LIST: &str = "it makes a list or dictionary of more than 8 MB";
const MANY_BYTES: &str = "it makes more than 32 MB of text and values";
const MANY_STEPS: &str = "it runs for more steps than any chat needs";

#[test]
fn loops_run_out_of_steps() {
    refuses(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        MANY_STEPS,
    );
    refuses("{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion limit");
    refuses("{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}", "recursion limit");
}

#[test]
fn large_numbers_do_not_allocate() {
    for large in [
        "{{ 'a\nb' | indent(2000000000) }}",
        "{{ 'a\nb' | indent(width=2000000000) }}",
        "{{ ['a\nb'] | map('indent', 2000000000) | list }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%.1000000000f' | format(1.5) }}",
        "{{ '%*d' | format(1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'a' * 100000000 }}",
        "{{ 100000000 * 'a' }}",
        "{{ ('a' * 100000000) ~ ('a' * 100000000) }}",
        "{{ {'a': [1]} | tojson(indent=1000000000) }}",
        "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
        "{% set s = 'a' * 1000000 %}{{ s | replace('', s) }}",
        "{% set s = 'a' * 1000000 %}{{ s | join(s) }}",
        "{% set s = 'a' * 1000000 %}{{ s.join(range(99999)) }}",
        "{% set s = 'a' * 1000000 %}{{ ('%s' * 1000) | format(s, s) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a' | center(width=1000000000) }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.ljust(1000000, '😀') }}",
        "{{ 'a'.rjust(1000000000, '-') }}",
        "{{ '1'.zfill(1000000000) }}",
        "{{ ['a'] | map('center', 1000000000) | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1.5 }}",
        "{% set s = 'a' * 1000000 %}{{ '%s%s%s' % (s, s, s) }}",
        "{% set s = 'a' * 1000000 %}{{ '%(s)s%(s)s%(s)s' % {'s': s} }}",
        "{{ {'a': [1]} | tojson(indent='\t' * 1000000) }}",
        "{{ ('é' * 900000) | tojson(ensure_ascii=true) }}",
        "{{ ('<' * 1000000) | escape }}",
        "{{ ('<' * 1000000) | forceescape }}",
        "{{ ['\\x00' * 900000] }}",
        "{% set s = 'a' * 1000000 %}{{ s | replace('a', s, 9) }}",
        "{% set s = 'a' * 1000000 %}{{ [s, s, s] | string }}",
        "{% set s = 'a' * 1000000 %}{{ [{'a': s}, {'a': s}, {'a': s}] | join(attribute='a') }}",
    ] {
        refuses(large, LONG_TEXT);
    }
    for large in [
        "{{ [1] * 100000000 }}",
        "{{ (1, 2) * 100000000 }}",
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ [1] | slice(1000000000) | list }}",
    ] {
        refuses(large, BIG_LIST);
    }
    refuses("{{ range(1000000000) }}", "range has too many elements");
}

#[test]
fn doubling_is_stopped_early() {
    let forty =
        |step: &str| format!("{{% set ns = namespace(s='x', l=[1], d={{}}) %}}{}", step.repeat(40));
    for step in [
        "{% set s = (s or 'x') ~ (s or 'x') %}",
        "{% set s = (s or 'x') + (s or 'x') %}",
        "{% set ns.s = ns.s ~ ns.s %}",
        "{% set ns.s = ns.s * 2 %}",
        "{% set ns.s = [ns.s, ns.s] | join %}",
        "{% set ns.s = '%s%s' | format(ns.s, ns.s) %}",
        "{% set ns.s = '{}{}'.format(ns.s, ns.s) %}",
        "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
        "{% set ns.s = ns.s.replace('x', 'xx') %}",
        "{% set ns.s = '%s%s' % (ns.s, ns.s) %}",
        "{% set ns.s = ns.s.center(2 * (ns.s | length)) %}",
        "{% set ns.s = ns.s.ljust(2 * (ns.s | length), 'x') %}",
        "{% set ns.s = (ns.s ~ '<') | forceescape %}{% set ns.s = ns.s ~ ns.s %}",
    ] {
        refuses(&forty(step), LONG_TEXT);
    }
    for step in [
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = ns.l * 2 %}",
        "{% set ns.l = [ns.l, ns.l] %}",
        "{% set ns.l = (ns.l, ns.l) %}",
        "{% set ns.d = {'a': ns.d, 'b': ns.d} %}",
        "{% set ns.d = dict(a=ns.d, b=ns.d) %}",
        "{% set ns.l = [ns.l, ns.l] | map('list') %}",
        "{% set ns.l = ns.l | zip(ns.l) | list %}",
        "{% set ns.l = (ns.l + ns.l) | groupby('a', default=1) %}",
    ] {
        refuses(&forty(step), BIG_LIST);
    }
    refuses(&forty("{% set ns.l = ns.l.copy() + ns.l.copy() %}"), MANY_BYTES);
    // Text between tags is charged too.
    let raw = format!("{{% for i in range(99999) %}}{}{{% endfor %}}", "x".repeat(9999));
    refuses(&raw, MANY_BYTES);
    refuses(&format!("{{% set s %}}{raw}{{% endset %}}"), MANY_BYTES);
    refuses(&format!("{{% macro f() %}}{raw}{{% endmacro %}}{{{{ f() }}}}"), MANY_BYTES);
    refuses(
        "{% set ns = namespace(l=[]) %}{% set s = 'x' * 1000000 %}{% for i in range(99) %}{% set ns.l = ns.l + [s ~ i] %}{% endfor %}",
        BIG_LIST,
    );
    refuses(
        "{% set s = 'x' * 1000000 %}{% for i in range(99) %}{% set t = s ~ i %}{% endfor %}",
        MANY_BYTES,
    );
}

#[test]
fn nesting_is_limited() {
    let often = |step: &str| {
        format!(
            "{{% set ns = namespace(l=[]) %}}{{% for i in range(20000) %}}{step}{{% endfor %}}{{{{ ns.l }}}}"
        )
    };
    refuses(&often("{% set ns.l = [ns.l] %}"), "it nests lists more than 64 deep");
    refuses(&often("{% set ns.l = {'a': ns.l} %}"), "it nests lists more than 64 deep");
    // Lazy lists become lists, so slices of slices do not nest calls.
    assert_eq!(render(&often("{% set ns.l = ns.l[0:] | map('list') %}")).unwrap(), "[]");
    let itself = "it puts a namespace, a loop or a lazy list into another value";
    refuses("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", itself);
    refuses("{% set ns = namespace() %}{% set ns.a, b = [ns], 1 %}{{ ns }}", itself);
    refuses("{% set a = namespace() %}{% set b = namespace(a=a) %}", itself);
    refuses("{% set a = namespace() %}{% set b = namespace({'a': a}) %}", itself);
    refuses("{% for i in range(2) %}{% set l = [loop] %}{% endfor %}", itself);
    let holder = "it puts a function or a method into another value";
    refuses(&often("{% set ns.l = {'a': ns.l}.copy %}"), holder);
    refuses(&often("{% set ns.l = cycler(ns.l) %}"), holder);
    refuses(&often("{% set ns.l = joiner(ns.l) %}"), holder);
}

#[test]
fn slow_steps_are_stopped() {
    let slow = "{% set s = 'x' * 2000000 %}{% set l = [s ~ 'a', s ~ 'b', s ~ 'c'] %}";
    for step in [
        "{{ l == [s ~ 'a', s ~ 'b', s ~ 'd'] }}",
        "{{ l < [s ~ 'a', s ~ 'b', s ~ 'd'] }}",
        "{{ l | select('<', s ~ 'd') | list }}",
        "{{ l | sort }}",
        "{{ l == l < l == l }}",
        "{{ s | trim('y' * 300 ~ 'x') }}",
    ] {
        let template = format!("{slow}{{% for i in range(99999) %}}{step}{{% endfor %}}");
        refuses(&template, "it ");
    }
}

#[test]
fn deep_sources_are_refused_and_shallow_ones_fit_the_stack() {
    let one = "more than 4096 tokens in one tag";
    does_not_load(&format!("{{{{ {}1 }}}}", "1+".repeat(10_000)), one);
    does_not_load(&format!("{{{{ a{} }}}}", ".x".repeat(10_000)), one);
    does_not_load(&format!("{{{{ {}1 }}}}", "not ".repeat(10_000)), one);
    does_not_load(&format!("{{{{ a{} }}}}", "|trim".repeat(10_000)), one);
    does_not_load(&format!("{{{{ f({}1) }}}}", "1,".repeat(70_000)), one);
    does_not_load(
        &format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(10_000)),
        "1024 `elif`",
    );
    does_not_load(&"(".repeat(200).replace('(', "{{ ("), "cannot parse the chat template");
    does_not_load(&"x".repeat(300_000), "it has 300000 bytes, more than 262144");

    // The deepest accepted sources, called on a small stack as in a thread pool.
    let deepest = |part: &str, num_tokens: usize, end: &str| {
        let template = format!("{{{{ 'x'{}{end} }}}}", part.repeat(4000 / num_tokens));
        let thread = std::thread::Builder::new().stack_size(256 << 10);
        thread.spawn(move || render(&template)).unwrap().join().unwrap()
    };
    assert_eq!(deepest(" ~ ''", 2, "").unwrap(), "x");
    assert_eq!(deepest("|trim", 2, "").unwrap(), "x");
    assert_eq!(deepest(" if true else 'x'", 4, "").unwrap(), "x");
    assert_eq!(deepest(" and 'x'", 2, "").unwrap(), "x");
    assert_eq!(deepest("[0]", 3, "").unwrap(), "x");
    let elifs = format!("{{% if no %}}{}{{% endif %}}", "{% elif no %}".repeat(1000));
    assert_eq!(render(&elifs).unwrap(), "");
}

#[test]
fn unsupported_statements_are_refused() {
    does_not_load("{% include 'a' %}", "`include` is not supported in a chat template (line 1)");
    does_not_load("\n{% extends 'a' %}", "`extends` is not supported in a chat template (line 2)");
    does_not_load("{% import 'a' as b %}", "`import` is not supported");
    does_not_load("{% autoescape true %}{% endautoescape %}", "`autoescape` is not supported");
    does_not_load("{{ f(*a) }}", "`*` is not supported");
}

#[test]
fn incomplete_tags_are_errors() {
    for template in ["{%}", "a{%}%}", "{%", "{%%}", "{% %}"] {
        does_not_load(template, "cannot parse the chat template");
    }
}

#[test]
fn errors_contain_no_control_characters() {
    let error = render("{{ raise_exception('a\\x1b[2Jb\\r\\nc\\x07') }}").unwrap_err();
    assert!(error.contains("these messages: a[2Jb  c (line 1 of the template)"), "{error:?}");
    let error = render("{{ raise_exception('x' * 1000000) }}").unwrap_err();
    assert!(error.len() < 600 && error.contains("x… (line 1"), "{error}");
    let error = load(Some("{{ '\u{1b}[2J' \u{7} }}"), None).unwrap_err();
    assert!(!error.chars().any(char::is_control), "{error:?}");
}
