//! The subcommands, one file each.

pub(crate) mod attach_head;
pub(crate) mod build_data;
pub(crate) mod certify;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod costs;
pub(crate) mod doctor;
pub(crate) mod evaluate;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod import;
pub(crate) mod inspect;
pub(crate) mod record;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod states;
pub(crate) mod survey;
#[cfg(test)]
mod tests;
pub(crate) mod train_bigram;
pub(crate) mod train_drafter;
pub(crate) mod train_head;
pub(crate) mod tune;
