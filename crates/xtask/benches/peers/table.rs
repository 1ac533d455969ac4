//! Prints the comparison as a table.

use crate::Measurement;
use crate::theirs::Hello;

/// The results of one work, with rates in tokens per second.
#[derive(Debug)]
pub(crate) struct Row {
    name: &'static str,
    ours: f64,
    theirs: f64,
    /// Ratios of neighbouring runs, ascending.
    ratios: Vec<f64>,
    bar: f64,
    /// How many answers are equal token for token, and how many there are.
    equal: Option<(usize, usize)>,
    num_threads: usize,
    /// The peak memory of each side, in bytes.
    peaks: [Option<usize>; 2],
    versions: String,
}

impl Row {
    /// A row with medians of pairs of our and their measurements.
    pub(crate) fn new(
        name: &'static str,
        bar: f64,
        pairs: &[(Measurement, Measurement)],
        hello: &Hello,
    ) -> Self {
        let rates = |(ours, theirs): &(Measurement, Measurement)| {
            (ours.tokens_per_second(), theirs.tokens_per_second())
        };
        let peak = |of: fn(&(Measurement, Measurement)) -> Option<usize>| {
            pairs.iter().filter_map(of).max()
        };
        let peaks = [peak(|(ours, _)| ours.peak_bytes), peak(|(_, theirs)| theirs.peak_bytes)];
        let (ours, theirs): (Vec<f64>, Vec<f64>) = pairs.iter().map(rates).unzip();
        let ratios = ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect();
        let equal = pairs.first().filter(|(ours, _)| !ours.token_ids.is_empty());
        let equal = equal.map(|(ours, theirs)| {
            let answers = ours.token_ids.iter().zip(&theirs.token_ids);
            (answers.filter(|(ours, theirs)| ours == theirs).count(), ours.token_ids.len())
        });
        Self {
            name,
            ours: median(&sorted(ours)),
            theirs: median(&sorted(theirs)),
            ratios: sorted(ratios),
            bar,
            equal,
            peaks,
            num_threads: hello.num_threads,
            versions: hello.versions.clone(),
        }
    }

    /// The median ratio.
    pub(crate) fn ratio(&self) -> f64 {
        median(&self.ratios)
    }
}

/// Prints the rows.
pub(crate) fn print_table(rows: &[Row], rounds: usize) {
    println!(
        "{:<28}{:>9}{:>9}{:>9}{:>8}{:>15}{:>7}  {:<5}{:>12}{:>13}",
        "tokens/s",
        "ours",
        "theirs",
        "threads",
        "ratio",
        "least-most",
        "bar",
        "met",
        "same ids",
        "memory, MB"
    );
    for row in rows {
        let ratio = row.ratio();
        let range = format!("{:.2}-{:.2}", row.ratios[0], row.ratios[row.ratios.len() - 1]);
        let met = if ratio >= row.bar { "yes" } else { "no" };
        let equal = row.equal.map_or("-".to_owned(), |(equal, all)| format!("{equal} of {all}"));
        let peaks =
            row.peaks.map(|peak| peak.map_or("-".to_owned(), |peak| (peak >> 20).to_string()));
        let peaks = format!("{}/{}", peaks[0], peaks[1]);
        println!(
            "{:<28}{:>9.0}{:>9.0}{:>9}{ratio:>8.2}{range:>15}{:>7.1}  {met:<5}{equal:>12}{peaks:>13}",
            row.name, row.ours, row.theirs, row.num_threads, row.bar
        );
    }
    println!("\nMedians of {rounds} rounds; threads: theirs, the faster of 1 and 2.");
    let mut versions: Vec<&str> = rows.iter().map(|row| row.versions.as_str()).collect();
    versions.dedup();
    println!("Theirs: {}.", versions.join("; "));
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// The median of ascending values.
fn median(sorted: &[f64]) -> f64 {
    let upper = sorted.len() / 2;
    (sorted[upper] + sorted[(sorted.len() - 1) / 2]) / 2.0
}
