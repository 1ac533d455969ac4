//! The format of numbers and words in tables and pages.

use draftsmith_theory::Estimate;

/// The width of tables and explanations in columns, if the terminal's width is unknown.
pub(crate) const WIDTH: usize = 80;

/// Formats `value` with this number of decimals; `-` if it is not finite. Zero has no sign.
pub(crate) fn number(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return "-".into();
    }
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(zero) if !zero.contains(|digit| matches!(digit, '1'..='9')) => zero.into(),
        _ => text,
    }
}

/// Formats a ratio of speeds: `1.15x`; `-` if it is not finite.
pub fn times_text(ratio: f64) -> String {
    if ratio.is_finite() { number(ratio, 2) + "x" } else { number(ratio, 2) }
}

/// Formats a speed-up with its interval: `1.15x (1.10 to 1.20)`.
pub fn speed_text(speedup: &Estimate) -> String {
    format!("{} ({:.2} to {:.2})", times_text(speedup.value), speedup.low, speedup.high)
}

/// Formats a ratio of speeds: `1.15x`; `-` if there is none.
pub(crate) fn times(ratio: Option<f64>) -> String {
    times_text(ratio.unwrap_or(f64::NAN))
}

/// Formats a share in percent with this number of decimals: `9.0%`; `-` if it is not finite.
pub(crate) fn percent(share: f64, decimals: usize) -> String {
    let text = number(100.0 * share, decimals);
    if share.is_finite() { text + "%" } else { text }
}

/// Formats a share in percent with its sign, without a percent sign: `+9.0`, `-1.2`.
pub(crate) fn signed(share: f64) -> String {
    let text = number(100.0 * share, 1);
    if text.starts_with('-') { text } else { format!("+{text}") }
}

/// Formats a share in percent with its sign, as in sentences: `+9.0 %`, `-1.2 %`.
pub fn signed_percent(share: f64) -> String {
    signed(share) + " %"
}

/// Formats a share in percent with its sign: `+9.0%`, `-1.2%`.
pub(crate) fn gain(share: f64) -> String {
    if share.is_finite() { signed(share) + "%" } else { number(share, 1) }
}

/// Formats an interval, with `text` for its ends: `+2.0..+4.8`; empty if an end is not finite.
pub(crate) fn interval(estimate: Estimate, text: impl Fn(f64) -> String) -> String {
    let Estimate { low, high, .. } = estimate;
    let is_known = low.is_finite() && high.is_finite();
    if is_known { format!("{}..{}", text(low), text(high)) } else { String::new() }
}

/// Formats a count with its noun: `1 prompt`, `2 prompts`.
pub fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Groups the digits of a count in threes, with narrow no-break spaces: `12 345`.
pub(crate) fn thousands(count: usize) -> String {
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

/// Formats a duration in seconds, minutes or hours: `40 s`, `12 min` or `3.5 h`.
pub fn duration_text(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.0} s"),
        ..7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// Returns the text with its first letter in upper case.
pub(crate) fn sentence_case(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// Wraps `text` at words to fit into `width` columns, or into 80 if the width is unknown.
pub fn wrapped(text: &str, width: Option<usize>) -> Vec<String> {
    let width = width.unwrap_or(WIDTH);
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if width_of(line) + 1 + width_of(word) <= width => {
                *line += " ";
                *line += word;
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

pub(crate) fn width_of(line: &str) -> usize {
    line.chars().count()
}

/// Typesets a number of a table as a page shows it: `-1.2%` becomes `−1.2 %`, `1.25x` becomes
/// `1.25×` and `1..2` becomes `1 to 2`.
pub(crate) fn typeset(figure: &str) -> String {
    if figure == "-" {
        return "\u{2013}".into();
    }
    let text = figure.replace("..", " to ").replace('-', "\u{2212}");
    text.replace('%', "\u{a0}%").replace('x', "\u{d7}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_for_reading() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(1234567), "1\u{202f}234\u{202f}567");
        assert_eq!(typeset(&gain(0.09)), "+9.0\u{a0}%");
        assert_eq!(typeset(&gain(-0.012)), "\u{2212}1.2\u{a0}%");
        assert_eq!((gain(-0.0001), gain(f64::NAN)), ("+0.0%".into(), "-".into()));
        assert_eq!(
            (signed_percent(-0.0001), signed_percent(-0.09)),
            ("+0.0 %".into(), "-9.0 %".into())
        );
        assert_eq!(typeset(&times(Some(2.125))), "2.12\u{d7}");
        assert_eq!((times(None), typeset("-")), ("-".into(), "\u{2013}".into()));
        assert_eq!(number(f64::INFINITY, 2), "-");
        assert_eq!([12.3, 300.0, 9000.0].map(duration_text), ["12 s", "5 min", "2.5 h"]);
    }
}
