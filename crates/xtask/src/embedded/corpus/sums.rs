//! Column addition, spelled out digit by digit, so that each step adds only one column.
//!
//! The hard tokens are a column's sum and its carry; everything else is copied from the line above.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::words::pick;

const COLUMNS: [&str; 3] = ["Ones", "Tens", "Hundreds"];

pub(super) fn draw(rng: &mut ChaCha8Rng) -> (String, String) {
    let (a, b) = match rng.random_range(0..20) {
        0 => (rng.random_range(10..100), rng.random_range(10..100)),
        1..=3 => (rng.random_range(10..100), rng.random_range(100..1000)),
        4..=6 => (rng.random_range(100..1000), rng.random_range(10..100)),
        _ => (rng.random_range(100..1000), rng.random_range(100..1000)),
    };
    let prompt = match rng.random_range(0..4) {
        0 => format!("Add {a} and {b}."),
        1 => format!("What is {a} + {b}?"),
        2 => format!("Find the sum of {a} and {b}."),
        _ => format!("Work out {a} + {b} {}.", pick(rng, &["in columns", "step by step"])),
    };
    (prompt, worked_sum(a, b))
}

/// The addition with one column per line, the last sum in full, then the `Answer:` line.
fn worked_sum(a: u32, b: u32) -> String {
    let num_columns = a.max(b).to_string().len();
    let (mut rest_a, mut rest_b, mut carry) = (a, b, 0);
    let mut answer = String::new();
    for (position, column) in COLUMNS[..num_columns].iter().enumerate() {
        let (digit_a, digit_b) = (rest_a % 10, rest_b % 10);
        let sum = digit_a + digit_b + carry;
        let carried = if position == 0 { String::new() } else { format!(" + {carry}") };
        answer += &format!("{column}: {digit_a} + {digit_b}{carried} = {sum}, ");
        answer += &if position + 1 == num_columns {
            format!("write {sum}.\n")
        } else {
            format!("write {}, carry {}.\n", sum % 10, sum / 10)
        };
        carry = sum / 10;
        (rest_a, rest_b) = (rest_a / 10, rest_b / 10);
    }
    answer + &format!("Answer: {}", a + b)
}

/// The text after `Answer:` on the last line that has it.
pub(super) fn final_answer(answer: &str) -> Option<&str> {
    answer.lines().rev().find_map(|line| line.trim().strip_prefix("Answer:")).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carries_are_written_out() {
        let expected = "\
Ones: 7 + 6 = 13, write 3, carry 1.
Tens: 5 + 8 + 1 = 14, write 4, carry 1.
Hundreds: 9 + 0 + 1 = 10, write 10.
Answer: 1043";
        assert_eq!(worked_sum(957, 86), expected);
    }

    #[test]
    fn the_written_digits_make_the_answer() {
        for (a, b) in [(10, 10), (99, 99), (99, 999), (505, 505), (123, 98)] {
            let worked = worked_sum(a, b);
            let written: String = worked
                .lines()
                .rev()
                .filter_map(|line| line.split_once("write "))
                .map(|(_, rest)| rest.split([',', '.']).next().unwrap_or_default())
                .collect();
            assert_eq!(written, (a + b).to_string());
            assert_eq!(final_answer(&worked), Some(written.as_str()));
        }
    }
}
