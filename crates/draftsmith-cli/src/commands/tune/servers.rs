//! `tune --for SERVER`: its arguments, and the table and files that it writes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use draftsmith_files::write_whole;
use draftsmith_recipe::{Recipe, Workspace, quoted, served_path};
use draftsmith_report::{plain_table, speed_text, times_text, wrapped};
use draftsmith_servers::costs::ServerCostsFile;
use draftsmith_servers::settings::{
    LoadCell, ScheduleKeys, ServerKind, ServerLoad, ServerSettings, ServerTuning, SettingsFile,
    tune_for_server, winner,
};
use draftsmith_theory::{Drafting, Estimate};

use crate::console::Console;

/// Arguments about a server's load.
#[derive(Debug, Args)]
pub(crate) struct LoadArguments {
    /// For a server: the number of concurrent requests, kept up by as many clients.
    #[arg(long, value_name = "N", default_value = "1", alias = "clients", conflicts_with_all = ["load", "rate"])]
    concurrency: u16,
    /// Or shares of the tokens by concurrent requests, as in `1=0.7,4=0.3`.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = share, conflicts_with = "rate")]
    load: Vec<(f64, f64)>,
    /// Or requests per second and tokens per request, as in `2,300`.
    #[arg(long, value_name = "R,N", value_parser = rate)]
    rate: Option<(f64, f64)>,
    /// What TensorRT-LLM's keys are: `upper` bounds since its pull request 10860 (March 2026), `lower` before.
    #[arg(long, value_name = "BOUNDS", value_parser = ["upper", "lower"], hide_possible_values = true)]
    schedule_keys: Option<String>,
}

fn rate(text: &str) -> Result<(f64, f64), String> {
    let read = || {
        let (requests, tokens) = text.split_once(',')?;
        let both: (f64, f64) = (requests.parse().ok()?, tokens.parse().ok()?);
        (both.0 > 0.0 && both.1 >= 1.0 && (both.0 * both.1).is_finite()).then_some(both)
    };
    read().ok_or_else(|| {
        "expected requests per second and tokens per request, as in `2,300`".to_owned()
    })
}

fn share(text: &str) -> Result<(f64, f64), String> {
    let read = || {
        let (size, share) = text.split_once('=')?;
        let both: (f64, f64) = (size.parse().ok()?, share.parse().ok()?);
        let is_valid = both.0 >= 1.0 && both.1 > 0.0 && both.0.is_finite() && both.1.is_finite();
        is_valid.then_some(both)
    };
    read().ok_or_else(|| "expected concurrent requests and their share, as in `4=0.3`".to_owned())
}

impl LoadArguments {
    fn load(&self) -> ServerLoad {
        if let Some((requests, tokens)) = self.rate {
            return ServerLoad::Rate(requests, tokens);
        }
        if self.load.is_empty() {
            return ServerLoad::Shares(vec![(f64::from(self.concurrency.max(1)), 1.0)]);
        }
        let total: f64 = self.load.iter().map(|(_, share)| share).sum();
        ServerLoad::Shares(self.load.iter().map(|(size, share)| (*size, share / total)).collect())
    }

    /// Collects the server program `form`, its measured costs and its load from the arguments.
    ///
    /// # Errors
    /// If an argument is missing or invalid, or the costs cannot be read.
    pub(crate) fn tuning(&self, form: &str, costs: Option<&Path>) -> Result<ServerTuning> {
        let keys = self.schedule_keys.as_deref().map(|keys| match keys {
            "upper" => ScheduleKeys::UpperBounds,
            _ => ScheduleKeys::LowerBounds,
        });
        let kind = ServerKind::named(form, keys).context(
            "TensorRT-LLM changed what the keys of `draft_len_schedule` mean; hint: give `--schedule-keys upper` \
             for versions since its pull request 10860 (March 2026), `--schedule-keys lower` before",
        )?;
        let Some(costs) = costs else {
            bail!(
                "`--server-costs FILE` is missing: the server's rounds, which `draftsmith server costs --server URL` measures"
            );
        };
        let source = costs.display().to_string();
        let (costs, drafter) = ServerCostsFile::read(costs)?;
        Ok(ServerTuning { kind, source, costs, drafter, load: self.load() })
    }
}

/// Runs the stage tune for a server.
pub(crate) fn run(
    recipe: &Recipe,
    workspace: &Workspace,
    tuning: &ServerTuning,
    console: &Console,
) -> Result<()> {
    let mut all = tune_for_server(recipe, workspace, tuning)?;
    let list = |all: Vec<usize>| all.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    console.text(format!(
        "costs: {}{}, with {} candidates at {} concurrent requests\n\n",
        tuning.source,
        tuning.drafter.as_ref().map(|name| format!(" of `{name}`")).unwrap_or_default(),
        list([0].into_iter().chain(tuning.costs.lengths()).collect()),
        list(tuning.costs.batch_sizes())
    ))?;
    let (mut written, mut removed) = (Vec::new(), Vec::new());
    for settings in &mut all {
        let name =
            format!("{}-{}-{}", tuning.kind.name(), settings.drafter, settings.decoding.text());
        let dir = recipe.tuning_dir().join(name);
        if settings.files.is_empty() && dir.is_dir() {
            std::fs::remove_dir_all(&dir)
                .with_context(|| format!("cannot remove `{}`", dir.display()))?;
            removed.push(dir.clone());
        }
        write(settings, &dir)?;
        let files = settings.files.iter().chain(&settings.benchmark);
        written.extend(files.map(|file| dir.join(file.name)));
        console.text(text(settings, console.width()))?;
    }
    let lines = |what: &str, paths: Vec<PathBuf>| -> String {
        paths.iter().map(|path| format!("{what}: {}\n", path.display())).collect()
    };
    console
        .text(lines("removed, because it no longer pays", removed) + &lines("written", written))?;
    console.text(last(&all, console.width()))?;
    console.document(&all)
}

/// Writes a server's settings files, and puts their paths into the commands that start it.
pub(crate) fn write(settings: &mut ServerSettings, dir: &Path) -> Result<()> {
    for name in settings.files.iter().map(|file| file.name).collect::<Vec<_>>() {
        let path = quoted(&served_path(&dir.join(name), true));
        let texts = settings.files.iter_mut().map(|file| &mut file.text);
        settings.start.iter_mut().chain(texts).for_each(|text| *text = text.replace(name, &path));
    }
    for file in settings.files.iter().chain(&settings.benchmark) {
        write_whole(&dir.join(file.name), &file.text)?;
    }
    Ok(())
}

/// Formats the last sentences: the settings to use and the command that starts the server with them.
fn last(all: &[ServerSettings], width: Option<usize>) -> String {
    let Some(best) = winner(all) else {
        let surely =
            if all.iter().any(|it| it.uncertain_speedup.is_some()) { " certainly" } else { "" };
        let none = format!(
            "No drafter{surely} pays in every way of decoding at this load: serve without speculation."
        );
        return format!("\n{}\n", wrapped(&none, width).join("\n"));
    };
    let setting = best.single.map(|single| single.text()).unwrap_or_default();
    let sentence = format!(
        "Serve with {}, {setting}: {} in {} decoding, where it gains the least. Start the server with:",
        best.drafter.text(),
        times_text(best.speedup()),
        best.decoding.text(),
    );
    format!("\n{}\n{}\n", wrapped(&sentence, width).join("\n"), best.start.join(" &&\n"))
}

/// Formats the table of speeds by batch size, the chosen settings and their notes.
pub(crate) fn text(settings: &ServerSettings, width: Option<usize>) -> String {
    // Lookups and probability thresholds are too many to show, so we show only the chosen one.
    let is_shown = |cell: &&LoadCell| {
        let is_fixed = cell.drafting.least_prob == 0.0 && cell.drafting.num_matched.is_none();
        is_fixed || Some(cell.drafting) == settings.single
    };
    let lengths: Vec<&LoadCell> =
        settings.rows.iter().take(1).flat_map(|row| &row.cells).filter(is_shown).collect();
    let heading = lengths.iter().map(|cell| short_name(cell.drafting));
    let first = ["requests".to_owned(), "best".to_owned(), "95 %".to_owned()];
    let heading = first.into_iter().chain(heading);
    let rows = settings.rows.iter().map(|row| {
        let best = match row.best {
            0 => "off".to_owned(),
            best => format!("K = {best}"),
        };
        let interval = row
            .speedup
            .map_or("-".to_owned(), |Estimate { low, high, .. }| format!("{low:.2}..{high:.2}"));
        let cells = row.cells.iter().filter(is_shown).map(|cell| times_text(cell.speedup));
        [row.batch_size.to_string(), best, interval].into_iter().chain(cells)
    });
    let tokens: Vec<String> = lengths
        .iter()
        .map(|it| format!("{:.2} at {}", it.tokens_per_round, short_name(it.drafting)))
        .collect();
    let mut lines = vec![
        format!(
            "{}, {}, {} test prompts: speed by concurrent requests, over the server without speculation",
            settings.drafter.text(),
            settings.decoding.text(),
            settings.num_prompts
        ),
        plain_table(heading, rows, 2..3 + lengths.len(), (1, 1), None),
    ];
    if !tokens.is_empty() {
        lines.push(format!("tokens per round: {}", tokens.join(", ")));
    }
    lines.push(match settings.single.zip(settings.single_speedup) {
        Some((single, speedup)) => {
            format!("at your load: {}, {}", single.text(), speed_text(&speedup))
        }
        None => "at your load: off".to_owned(),
    });
    lines.extend(
        settings.files.iter().map(|file| format!("{}: {}", file.name, file.text.trim_end())),
    );
    if let Some(SettingsFile { name, text }) = &settings.benchmark {
        lines.push(format!(
            "{name}, for benchmarks only, with synthetic acceptance at the recorded rates: {}",
            text.trim_end()
        ));
    }
    lines.extend(settings.notes.iter().map(|note| wrapped(note, width).join("\n")));
    lines.join("\n") + "\n\n"
}

fn short_name(drafting: Drafting) -> String {
    let Drafting { num_candidates, least_prob, num_matched, is_suffix } = drafting;
    match num_matched {
        Some(_) if is_suffix => format!("suffix {num_candidates}"),
        Some(num_matched) => format!("{num_matched}x{num_candidates}"),
        None if least_prob > 0.0 => format!("K = {num_candidates}, p = {least_prob}"),
        None => format!("K = {num_candidates}"),
    }
}
