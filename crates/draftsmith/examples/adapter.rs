//! Stores 40 answers of the target as Parquet, trains a self-draft adapter (Kangaroo) from the file, and decodes
//! with it. This takes seconds; a good adapter needs thousands of answers.

use std::error::Error;

use draftsmith::data::{Prompts, Provenance, read_shard, write_shard};
use draftsmith::train::{AdapterTraining, TrainingRun, train_self_drafts};
use draftsmith::{Device, Drafter, Generator, Model};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let target = Model::load(format!("{ROOT}/checkpoints/tiny/target"), &Device::flex())?;
    let prompts = Prompts::open(format!("{ROOT}/data/tiny/prompts/train.jsonl").as_ref())?;
    let prompts = prompts.take(40).collect::<Result<Vec<_>, _>>()?;
    let chats: Vec<_> = prompts.iter().map(|prompt| prompt.messages(0, &[])).collect();
    let answers = Generator::new(&target).respond("train", &chats)?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("responses.parquet");
    let target_hash = target.hash()?.to_owned();
    let provenance = Provenance { target: target_hash.clone(), ..Provenance::default() };
    write_shard(&file, &answers, &provenance, None)?;

    let (rows, _) = read_shard(&file, Some(target.network().shape().vocab_size))?;
    let (state, adapter) = (dir.path().join("state"), dir.path().join("adapter"));
    let mut training = AdapterTraining::default();
    training.common.optimizer.num_epochs = 3;
    let run = TrainingRun::new(&state, "40 answers");
    let trained = train_self_drafts(target.network(), &rows, &[training], 0, run)?.best();
    let mut trained = trained.and_then(|mut all| all.pop()).ok_or("training was stopped")?;
    println!("{:.0} % of tokens agree", 100.0 * trained.scores.agreement);
    trained.config.target_hash = Some(target_hash);
    trained.model.write_dir(&adapter, &trained.config)?;

    let mut generator = Generator::new(&target).with_drafter(Drafter::open(&adapter)?)?;
    let fast = generator.generate(&chats[0])?;
    assert_eq!(fast.token_ids, answers[0].response_ids);
    println!("{}\n{:?}", fast.text, fast.counts());
    Ok(())
}
