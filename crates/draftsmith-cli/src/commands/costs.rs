//! `costs`: times the rounds of a running server by batch size.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use draftsmith_files::check_place;
use draftsmith_report::{plain_table, wrapped};
use draftsmith_servers::costs::{
    ACCEPT_NOTHING, MeasuredCell, SERVER_FLAGS, ServerCostsFile, ServerPlan, TimedServer,
    measure_server,
};

use crate::commands::certify::AccessArguments;
use crate::console::Console;
use crate::lock::lock;

/// Arguments of `costs`.
#[derive(Debug, Args)]
pub(crate) struct CostsArguments {
    /// The server's address up to `/v1`, as in `http://127.0.0.1:8080/v1`.
    #[arg(long, value_name = "URL")]
    server: String,
    /// A server of the same model without speculation that runs beside: cancels changes of the machine's speed.
    #[arg(long, value_name = "URL")]
    reference: Option<String>,
    /// The number of candidates that it runs now, accepting none; 0: it does not speculate. It accepts none with
    /// llama-server's `--metrics --spec-synth-rates 0,0,…`, vLLM's `"rejection_sample_method": "synthetic",
    /// "synthetic_acceptance_rates": [0, 0, …]` in `--speculative-config`, SGLang's `SGLANG_SIMULATE_ACC_LEN=1.0`.
    #[arg(long, value_name = "K")]
    candidates: usize,
    /// The drafter's name in the recipe, which the file then keeps.
    #[arg(long, value_name = "NAME")]
    drafter: Option<String>,
    /// Numbers of concurrent requests.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,4",
        alias = "batch-sizes"
    )]
    concurrency: Vec<usize>,
    /// The file that cells are added to.
    #[arg(long, value_name = "FILE", default_value = "server-costs.json")]
    out: PathBuf,
    /// Words of each prompt: as many as your prompts have.
    #[arg(long, value_name = "N", default_value = "150", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    prompt_words: u32,
    /// Rounds of a block.
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u32).range(16..=4096))]
    rounds: u32,
    /// Blocks of each batch size.
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    blocks: u32,
    #[command(flatten)]
    access: AccessArguments,
}

/// Runs the command.
pub(crate) fn run(arguments: &CostsArguments, seed: u64, console: &Console) -> Result<()> {
    let mut concurrency = arguments.concurrency.clone();
    concurrency.sort_unstable();
    concurrency.dedup();
    anyhow::ensure!(
        concurrency.first().is_some_and(|size| *size > 0)
            && concurrency.last().is_some_and(|size| *size <= 1024),
        "`--concurrency` must be numbers from 1 to 1024"
    );
    anyhow::ensure!(arguments.candidates <= 256, "`--candidates` is at most 256");
    let access = &arguments.access;
    let open = |url: &str| -> Result<TimedServer> {
        let (model, secret) = (access.model.as_deref(), (access.secret())()?);
        Ok(TimedServer::open(url, model, secret, access.timeout(), SERVER_FLAGS)?)
    };
    check_place(&arguments.out)?;
    let _lock = lock(&arguments.out)?;
    let server = open(&arguments.server)?;
    let beside = arguments.reference.as_deref().map(open).transpose()?;
    let plan = ServerPlan {
        num_candidates: arguments.candidates,
        drafter: arguments.drafter.clone(),
        concurrency,
        num_words: arguments.prompt_words as usize,
        num_rounds: arguments.rounds as usize,
        num_blocks: arguments.blocks as usize,
        seed,
    };
    let file = measure_server(&server, beside.as_ref(), &plan, &arguments.out, console)?;
    console.text(table(&file))?;
    if let Some(rows) = rows_ms(&file) {
        console.text(format!("\nfor `[tune.costs]`: rows_ms = [{rows}]\n"))?;
    }
    let next = match file.cells.iter().any(|cell| cell.num_candidates == 0) {
        false => "Next, start the server without speculation and measure it with `--candidates 0`."
            .to_owned(),
        true => format!(
            "Next, start it with another number of candidates, of which it accepts none ({ACCEPT_NOTHING}), llama-server \
             also with `--metrics`, and run this again, or run `draftsmith tune --for SERVER --server-costs {} RECIPE`.",
            arguments.out.display()
        ),
    };
    console.text(format!("\n{}\n", wrapped(&next, console.width()).join("\n")))?;
    console.document(&file)
}

/// Lists the measured round times without speculation at 1, 2, 3 … requests in milliseconds. They
/// serve as the times of target forwards over 1, 2, 3 … rows. `None` without a measurement at 1
/// request.
fn rows_ms(file: &ServerCostsFile) -> Option<String> {
    let cells = (1..).map_while(|size| file.cell(size, 0));
    let rows: Vec<String> = cells.map(|cell| format!("{:.3}", cell.median_ms())).collect();
    (!rows.is_empty()).then(|| rows.join(", "))
}

/// Formats a table of milliseconds per round, with a row per number of candidates and a column per
/// batch size.
fn table(file: &ServerCostsFile) -> String {
    let distinct =
        |of: fn(&MeasuredCell) -> usize| file.cells.iter().map(of).collect::<BTreeSet<_>>();
    let sizes = distinct(|cell| cell.concurrency);
    let heading = sizes.iter().map(|size| format!("{size} concurrent"));
    let heading = ["ms per round".to_owned()].into_iter().chain(heading);
    let rows = distinct(|cell| cell.num_candidates).into_iter().map(|length| {
        let name = if length == 0 { "no speculation".to_owned() } else { format!("K = {length}") };
        let ms = sizes.iter().map(move |size| {
            let cell = file.cell(*size, length);
            cell.map_or("-".to_owned(), |cell| format!("{:.2}", cell.median_ms()))
        });
        [name].into_iter().chain(ms)
    });
    plain_table(heading, rows, 1..=sizes.len(), (1, 1), None) + "\n"
}
