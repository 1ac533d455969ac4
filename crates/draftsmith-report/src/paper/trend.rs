//! A sentence that says whether measured figures show the same trends as the published ones.

use crate::results::FilledBlock;

/// The relative difference below which figures count as equal.
const EQUAL_WITHIN: f64 = 0.01;

/// States how many comparisons of two rows have the same order as in all published figures. Empty
/// if nothing can be compared.
pub(super) fn trend(blocks: &[FilledBlock]) -> String {
    let (published, measured): (Vec<_>, Vec<_>) = blocks.iter().partition(|it| it.is_published);
    let comparisons = measured.iter().flat_map(|block| block.comparisons(&published));
    let (same, differing): (Vec<_>, Vec<_>) =
        comparisons.partition(|(off, _)| *off <= EQUAL_WITHIN);
    let num_all = same.len() + differing.len();
    match differing.into_iter().max_by(|(one, _), (other, _)| one.total_cmp(other)) {
        None if num_all == 0 => String::new(),
        None => format!("All {num_all} comparisons of rows come out as in the paper."),
        Some((_, most)) => format!(
            "{} of {num_all} comparisons of rows come out as in the paper. The largest difference: {most}.",
            same.len()
        ),
    }
}

impl FilledBlock {
    /// Compares every two rows that all published figures put in the same order. Returns the share
    /// by which our figures are in the opposite order, which is negative if they agree, and a
    /// description of the difference. Rows are compared in the columns that the paper has too. If
    /// it has none of them, they are compared by the mean of their ratios over all columns.
    fn comparisons(&self, published: &[&Self]) -> Vec<(f64, String)> {
        let is_shared = |name: &&String| published.iter().any(|it| it.columns.contains(name));
        let shared: Vec<Option<&str>> =
            self.columns.iter().filter(is_shared).map(|name| Some(name.as_str())).collect();
        let columns = if shared.is_empty() { vec![None] } else { shared };
        let mut all = Vec::new();
        for (nth, first) in self.rows.iter().enumerate() {
            for (second, column) in
                self.rows[nth + 1..].iter().flat_map(|row| columns.iter().map(move |it| (row, it)))
            {
                let over = |it: &Self| it.ratio(&first.name, &second.name, *column);
                let theirs: Vec<f64> = published.iter().filter_map(|it| over(it)).collect();
                let are = |is: fn(&f64) -> bool| !theirs.is_empty() && theirs.iter().all(is);
                let Some(ours) = over(self) else { continue };
                let (off, [here, there]) = match (are(|it| *it > 1.0), are(|it| *it < 1.0)) {
                    (true, _) => (1.0 / ours - 1.0, ["lower", "higher"]),
                    (_, true) => (ours - 1.0, ["higher", "lower"]),
                    _ => continue,
                };
                let (what, [first, second]) =
                    (column.unwrap_or("the mean"), [&first.name, &second.name]);
                let text = format!(
                    "in \"{}\", {what} of {first} is {here} than of {second}, and {there} in the paper",
                    self.name
                );
                all.push((off, text));
            }
        }
        all
    }

    /// Divides the figure of a row by that of another in a column, or averages the ratios over all
    /// columns that have both figures. Returns `None` if a row is missing or the result is not
    /// finite.
    fn ratio(&self, first: &str, second: &str, column: Option<&str>) -> Option<f64> {
        let row = |name: &str| self.rows.iter().find(|row| row.name == name);
        let pairs = row(first)?.figures.iter().zip(&row(second)?.figures).zip(&self.columns);
        let pairs = pairs.filter(|(_, name)| column.is_none_or(|wanted| wanted == *name));
        let ratios: Vec<f64> =
            pairs.filter_map(|((first, second), _)| Some((*first)? / (*second)?)).collect();
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        Some(mean).filter(|ratio| ratio.is_finite())
    }
}
