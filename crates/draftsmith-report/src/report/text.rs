//! Numbers and names as the page shows them; most are also filters of the templates.

use crate::results::ResultRow;
use crate::table;

/// The id of a group. It does not contain names, which may hold any character.
pub(super) fn group_id(index: usize) -> String {
    format!("group-{}", index + 1)
}

/// A row's label.
pub(super) fn label(row: &ResultRow) -> String {
    on_a_page(&row.label())
}

/// A row's label under the heading of its drafter.
pub(super) fn rule_label(row: &ResultRow) -> String {
    on_a_page(&row.rule_label())
}

/// The symbol of the row's setting: `K`, `h`, `η`.
pub(super) fn symbol(row: &ResultRow) -> String {
    on_a_page(row.stop_rule.symbol().unwrap_or_default())
}

/// Replaces the terminal's `eta` by the Greek letter.
pub(super) fn on_a_page(label: &str) -> String {
    label.replace("eta", "η")
}

/// `value` with this number of decimals; an en dash if it is not finite. Zero has no sign.
pub(super) fn number(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return "\u{2013}".into();
    }
    table::number(value, decimals).replace('-', "\u{2212}")
}

/// `1.25×`; an en dash if there is none.
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

/// A ratio as a change: `+9.0 %`, `−1.2 %`.
pub(super) fn gain(ratio: f64) -> String {
    let text = percent(ratio - 1.0);
    if text.starts_with('\u{2212}') || !ratio.is_finite() { text } else { format!("+{text}") }
}

/// `12 345`, with narrow no-break spaces.
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

/// The text with its first letter in upper case.
pub(super) fn sentence_case(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
