//! How numbers and names read on the page.

use crate::results::ResultRow;

/// The fragment a group is found under; names may hold anything, so it is not made of them.
pub(super) fn group_id(index: usize) -> String {
    format!("group-{}", index + 1)
}

/// What a row is called on the page.
pub(super) fn label(row: &ResultRow) -> String {
    on_a_page(&row.label())
}

/// What a row is called under its drafter's heading.
pub(super) fn rule_label(row: &ResultRow) -> String {
    on_a_page(&row.rule_label())
}

/// What the row's setting is called: `K`, `h`, `η`.
pub(super) fn symbol(row: &ResultRow) -> String {
    on_a_page(row.stop_rule.symbol().unwrap_or_default())
}

/// A terminal may lack the letter; a page does not.
pub(super) fn on_a_page(label: &str) -> String {
    label.replace("eta", "η")
}

/// `value` with so many decimals; an en dash where there is none. What rounds to 0 has no sign.
pub(super) fn number(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return "\u{2013}".into();
    }
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(zero) if !zero.contains(|digit| matches!(digit, '1'..='9')) => zero.into(),
        Some(digits) => format!("\u{2212}{digits}"),
        None => text,
    }
}

/// `1.25×`; an en dash where there is none.
pub(super) fn times(value: Option<f64>) -> String {
    match value.filter(|value| value.is_finite()) {
        Some(value) => format!("{value:.2}\u{d7}"),
        None => number(f64::NAN, 0),
    }
}

/// `9.0 %`.
pub(super) fn percent(share: f64) -> String {
    if share.is_finite() { number(100.0 * share, 1) + "\u{a0}%" } else { number(share, 1) }
}

/// `+9.0 %`, `−1.2 %`.
pub(super) fn gain(ratio: f64) -> String {
    let text = percent(ratio - 1.0);
    if text.starts_with('\u{2212}') || !ratio.is_finite() { text } else { format!("+{text}") }
}

/// `12 345`, with narrow spaces that do not break.
pub(super) fn thousands(count: usize) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// `1 prompt`, `2 prompts`.
pub(super) fn counted(count: usize, what: &str) -> String {
    format!("{}\u{a0}{what}{}", thousands(count), if count == 1 { "" } else { "s" })
}

/// The text with a capital first.
pub(super) fn sentence_case(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
