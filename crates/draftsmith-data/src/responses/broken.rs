//! Shards that are not what was written, or not what their name says.

use std::path::Path;

use rayon::prelude::*;

use super::directory::{shard_files, shard_header};
use super::manifest::Records;
use super::read::read_shard;
use crate::error::DataError;

/// The shards of a directory that are not whole, not what was written, or not what their name says, by
/// index, and what is wrong with each; of those that are `wanted`. Where nothing says what was written,
/// as of builds that kept no record, a shard is read as a whole.
///
/// # Errors
/// If the directory cannot be read, or what it says of its shards.
pub fn broken_shards(
    dir: &Path,
    wanted: impl Fn(usize) -> bool,
) -> Result<Vec<(usize, DataError)>, DataError> {
    let records = Records::read(dir)?;
    let mut files = shard_files(dir)?;
    files.retain(|(index, _)| wanted(*index));
    let problem = |file: &(usize, _)| {
        shard_header(file)?;
        let (index, path) = file;
        if !records.check(path, *index)? {
            read_shard(path, None)?;
        }
        Ok(())
    };
    let broken = files.par_iter().filter_map(|file| Some((file.0, problem(file).err()?)));
    Ok(broken.collect())
}
