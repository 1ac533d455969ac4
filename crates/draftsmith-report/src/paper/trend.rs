//! A sentence that says whether measured figures show the same trends as the published ones.

use draftsmith_theory::Estimate;

use crate::results::FilledBlock;

/// The relative difference up to which two rows count as equal.
const EQUAL_WITHIN: f64 = 0.01;

/// A comparison of two rows that all published figures put in the same order.
struct Comparison {
    /// Whether the rows differ by more than 1 % and by more than their 95 % intervals allow. False
    /// without intervals.
    is_decided: bool,
    /// The share by which our figures are in the opposite order; negative if they agree.
    off: f64,
    /// The difference from the paper, in words.
    text: String,
}

/// States how many comparisons of two rows have the same order as in all published figures. Empty
/// if nothing can be compared.
pub(super) fn trend(blocks: &[FilledBlock]) -> String {
    let (published, measured): (Vec<_>, Vec<_>) = blocks.iter().partition(|it| it.is_published);
    let comparisons = measured.iter().flat_map(|block| block.comparisons(&published));
    let (decided, open): (Vec<Comparison>, Vec<_>) = comparisons.partition(|it| it.is_decided);
    let (num, num_open) = (decided.len(), open.len());
    let differing: Vec<Comparison> = decided.into_iter().filter(|it| it.off > 0.0).collect();
    let num_same = num - differing.len();
    let most = differing.into_iter().max_by(|one, other| one.off.total_cmp(&other.off));
    let decided = match most {
        None if num + num_open == 0 => return String::new(),
        None if num == 0 => "No comparison of rows is decided.".to_owned(),
        None => format!("All {num} decided comparisons of rows come out as in the paper."),
        Some(Comparison { text, .. }) => format!(
            "{num_same} of {num} decided comparisons of rows come out as in the paper. The largest difference: {text}."
        ),
    };
    match num_open {
        0 => decided,
        _ => format!(
            "{decided} Undecided: {num_open}, which differ by at most 1 %, by no more than their 95 % intervals allow, or have no interval."
        ),
    }
}

impl FilledBlock {
    /// Compares every two rows that all published figures put in the same order, in each column
    /// that the paper has too.
    fn comparisons(&self, published: &[&Self]) -> Vec<Comparison> {
        let is_shared = |name: &&String| published.iter().any(|it| it.columns.contains(name));
        let columns: Vec<&String> = self.columns.iter().filter(is_shared).collect();
        let mut all = Vec::new();
        for (nth, first) in self.rows.iter().enumerate() {
            for (second, column) in
                self.rows[nth + 1..].iter().flat_map(|row| columns.iter().map(move |it| (row, it)))
            {
                let [first, second] = [&first.name, &second.name];
                let over = |it: &Self| it.ratio(first, second, column);
                let theirs = published.iter().filter_map(|it| over(it));
                let theirs: Vec<f64> = theirs.map(|(ratio, _)| ratio).collect();
                let are = |is: fn(&f64) -> bool| !theirs.is_empty() && theirs.iter().all(is);
                let Some((ours, slack)) = over(self) else { continue };
                let (off, [here, there]) = match (are(|it| *it > 1.0), are(|it| *it < 1.0)) {
                    (true, _) => (1.0 / ours - 1.0, ["lower", "higher"]),
                    (_, true) => (ours - 1.0, ["higher", "lower"]),
                    _ => continue,
                };
                let text = format!(
                    "in \"{}\", {column} of {first} is {here} than of {second}, and {there} in the paper",
                    self.name
                );
                let is_decided = slack > 0.0 && (ours - 1.0).abs() > slack.max(EQUAL_WITHIN);
                all.push(Comparison { is_decided, off, text });
            }
        }
        all
    }

    /// Divides the figure of a row by that of another in a column. Returns the ratio and half the
    /// width of its 95 % interval, as if the figures were independent. Returns `None` if a figure is
    /// missing or the ratio is not finite.
    fn ratio(&self, first: &str, second: &str, column: &str) -> Option<(f64, f64)> {
        let at = self.columns.iter().position(|name| name == column)?;
        let figure = |name: &str| self.rows.iter().find(|row| row.name == name)?.figures[at];
        let half = |it: Estimate| (it.high - it.low) / 2.0 / it.value;
        let (first, second) = (figure(first)?, figure(second)?);
        let ratio = first.value / second.value;
        Some((ratio, ratio * half(first).hypot(half(second)))).filter(|_| ratio.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::FilledRow;

    fn block(is_published: bool, figures: [[f64; 2]; 3]) -> FilledBlock {
        let rows = figures.iter().zip(["a", "b", "c"]).map(|([value, half], name)| FilledRow {
            name: name.to_owned(),
            figures: vec![Some(Estimate { value: *value, low: value - half, high: value + half })],
        });
        let columns = vec!["speed-up".to_owned()];
        FilledBlock { name: "here".into(), is_published, columns, rows: rows.collect() }
    }

    #[test]
    fn only_differences_beyond_chance_are_counted() {
        let paper = block(true, [[1.0, 0.0], [1.5, 0.0], [2.0, 0.0]]);
        let text = |figures| trend(&[block(false, figures), paper.clone()]);
        let sure = text([[1.0, 0.02], [1.4, 0.02], [1.2, 0.02]]);
        assert!(sure.starts_with("2 of 3 decided comparisons"), "{sure}");
        assert!(
            sure.contains("speed-up of b is higher than of c, and lower in the paper"),
            "{sure}"
        );
        let unsure = text([[1.0, 0.02], [1.4, 0.2], [1.3, 0.2]]);
        assert_eq!(
            unsure,
            "All 2 decided comparisons of rows come out as in the paper. Undecided: 1, which differ by at most 1 %, by no more than their 95 % intervals allow, or have no interval."
        );
        let equal = [[1.0, 1e-4], [1.005, 1e-4], [0.999, 1e-4]];
        let without_intervals = [[1.0, 0.0], [1.5, 0.0], [2.0, 0.0]];
        for text in [equal, without_intervals].map(text) {
            assert!(text.starts_with("No comparison of rows is decided. Undecided: 3"), "{text}");
        }
        // The target's speed-up is 1 without an interval.
        let baseline = text([[1.0, 0.0], [1.5, 0.1], [2.0, 0.1]]);
        assert_eq!(baseline, "All 3 decided comparisons of rows come out as in the paper.");
    }
}
