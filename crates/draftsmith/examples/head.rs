//! Trains an acceptance head on what the draft proposes along 60 answers of the target, then decodes with it.
//! This takes seconds; a good head needs thousands of answers.

use std::error::Error;

use draftsmith::train::{HeadData, HeadLabels, HeadTraining, RecordedRollouts, TrainingRun};
use draftsmith::{Device, Drafter, Generator, Model, Rule, data::Prompts, rollout_rows, train};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let load = |name| Model::load(format!("{ROOT}/checkpoints/tiny/{name}"), &Device::flex());
    let (target, draft) = (load("target")?, load("draft")?);
    let prompts = Prompts::open(format!("{ROOT}/data/tiny/prompts/train.jsonl").as_ref())?;
    let chats = prompts.take(60).map(|prompt| Ok(prompt?.messages(0, &[])));
    let chats = chats.collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    let mut generator = Generator::new(&target).with_drafter(Drafter::model(&draft))?;
    let rows = generator.respond("train", &chats)?;
    let rollouts = rollout_rows(&rows, &generator.record(&rows, 8)?);

    let dir = tempfile::tempdir()?;
    let (state, head) = (dir.path().join("state"), dir.path().join("head"));
    let mut training = HeadTraining { labels: HeadLabels::Rollouts, ..HeadTraining::default() };
    (training.optimizer.learning_rate, training.optimizer.gradient_accumulation) = (Some(1e-3), 1);
    let recorded = Some(RecordedRollouts { rows: &rollouts, is_greedy: true });
    let data = HeadData { rows: &rows, rollouts: recorded };
    let run = TrainingRun::new(&state, "60 answers");
    let trained = train::train_heads(draft.network(), data, &[training], 0, run)?.best();
    let mut trained = trained.and_then(|mut all| all.pop()).ok_or("training was stopped")?;
    println!("AUROC {:?} on {} rows", trained.scores.auroc, trained.rows.num_validation);
    trained.config.draft_hash = Some(draft.hash()?.to_owned());
    trained.model.write_dir(&head, &trained.config)?;
    let drafter = Drafter::model(&draft).with_head(&head);
    let generator = Generator::new(&target).with_drafter(drafter)?;
    let fast = generator.with_rule("head=0.5".parse::<Rule>()?).generate(&chats[0])?;
    assert_eq!(fast.token_ids, rows[0].response_ids);
    println!("{:?}", fast.counts());
    Ok(())
}
