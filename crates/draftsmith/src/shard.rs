//! Which of several processes this one is, where they build one data set together: by `--shard i/n`, or
//! as Slurm and Kubernetes number the tasks of an array and the pods of an indexed job.
//!
//! They need nothing of each other but the directory: each builds every n-th shard, from its own number
//! on.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail};

/// How many pods an indexed job of Kubernetes has, which it does not say itself.
const COUNT_VARIABLE: &str = "DRAFTSMITH_SHARD_COUNT";

/// One of `count` processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shard {
    /// From 0.
    index: usize,
    count: usize,
}

impl Shard {
    /// The only one.
    pub(crate) const WHOLE: Self = Self { index: 0, count: 1 };

    fn new(index: usize, count: usize) -> Result<Self> {
        if index >= count {
            bail!("shard {index} of {count}: they are numbered from 0 on");
        }
        Ok(Self { index, count })
    }

    /// Whether it is one of several.
    pub(crate) fn is_part(self) -> bool {
        self.count > 1
    }

    /// The name of a file that each process has for itself: of several, with its number in it.
    pub(crate) fn file_name(self, stem: &str, extension: &str) -> String {
        match self.is_part() {
            false => format!("{stem}.{extension}"),
            true => format!("{stem}-{}-of-{}.{extension}", self.index, self.count),
        }
    }

    /// Whether it builds a file of the data set.
    pub(crate) fn builds(self, file: usize) -> bool {
        file % self.count == self.index
    }

    /// What the environment says, by the name of the variable that says it; nothing outside of arrays
    /// and indexed jobs.
    ///
    /// # Errors
    /// If it says half of it, or what makes no sense.
    pub(crate) fn of_environment(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<(Self, &'static str)>> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = variable(name) else { return Ok(None) };
            let number = text.trim().parse();
            number.map(Some).with_context(|| format!("`{name}` is `{text}`, expected a number"))
        };
        let slurm = "SLURM_ARRAY_TASK_ID";
        if let Some(id) = number(slurm)? {
            let count = number("SLURM_ARRAY_TASK_COUNT")?.with_context(|| {
                format!("`{slurm}` is {id}, but `SLURM_ARRAY_TASK_COUNT` is not there; {HINT}")
            })?;
            let first = number("SLURM_ARRAY_TASK_MIN")?.unwrap_or(0);
            let step = number("SLURM_ARRAY_TASK_STEP")?.unwrap_or(1).max(1);
            let index = id.checked_sub(first).filter(|index| index.is_multiple_of(step));
            let shard = index.and_then(|index| Self::new(index / step, count).ok());
            let shard = shard.with_context(|| {
                format!(
                    "`{slurm}` is {id}, which is none of {count} tasks from {first} on in steps of \
                     {step}: an array with gaps; {HINT}"
                )
            })?;
            return Ok(Some((shard, slurm)));
        }
        let kubernetes = "JOB_COMPLETION_INDEX";
        if let Some(index) = number(kubernetes)? {
            let count = number(COUNT_VARIABLE)?.with_context(|| {
                format!(
                    "`{kubernetes}` is {index}, but nothing says of how many; hint: set \
                     `{COUNT_VARIABLE}` to the job's completions, or give `--shard`"
                )
            })?;
            let shard = Self::new(index, count)
                .with_context(|| format!("`{kubernetes}` and `{COUNT_VARIABLE}`"))?;
            return Ok(Some((shard, kubernetes)));
        }
        Ok(None)
    }
}

const HINT: &str = "hint: give `--shard i/n`, or `--shard 0/1` for all";

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(index, count)| {
            Some((index.parse::<usize>().ok()?, count.parse::<usize>().ok()?))
        });
        let (index, count) =
            numbers.ok_or_else(|| "expected i/n, as in `0/4` for the first of four".to_owned())?;
        Self::new(index, count).map_err(|error| error.to_string())
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_built_by_one() {
        for count in 1..7 {
            let all: Vec<Shard> =
                (0..count).map(|index| Shard::new(index, count).expect("one of them")).collect();
            for file in 0..20 {
                assert_eq!(all.iter().filter(|shard| shard.builds(file)).count(), 1);
            }
        }
        assert_eq!("3/16".parse::<Shard>(), Ok(Shard { index: 3, count: 16 }));
        for bad in ["", "3", "3/", "-1/2", "2/2", "0/0", "a/b", "1/2/3"] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }

    #[test]
    fn schedulers_say_which_one_this_is() {
        let found = |variables: &[(&str, &str)]| {
            let get = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            let found = Shard::of_environment(get).map_err(|error| format!("{error:#}"));
            found.map(|found| found.map(|(shard, name)| format!("{shard} {name}")))
        };
        let slurm = |id, count, min, step| {
            found(&[
                ("SLURM_ARRAY_TASK_ID", id),
                ("SLURM_ARRAY_TASK_COUNT", count),
                ("SLURM_ARRAY_TASK_MIN", min),
                ("SLURM_ARRAY_TASK_STEP", step),
            ])
        };
        let ok = |shard: &str| Ok(Some(format!("{shard} SLURM_ARRAY_TASK_ID")));
        assert_eq!(found(&[]), Ok(None));
        assert_eq!(slurm("5", "16", "0", "1"), ok("5/16"));
        assert_eq!(slurm("16", "16", "1", "1"), ok("15/16"));
        assert_eq!(slurm("6", "4", "2", "2"), ok("2/4"));
        // `--array=0,1,7`
        assert!(slurm("7", "3", "0", "1").unwrap_err().contains("an array with gaps"));
        assert!(slurm("x", "3", "0", "1").unwrap_err().contains("`SLURM_ARRAY_TASK_ID` is `x`"));
        let half = found(&[("SLURM_ARRAY_TASK_ID", "3")]).unwrap_err();
        assert!(half.contains("`SLURM_ARRAY_TASK_COUNT` is not there"), "{half}");

        let pod = [("JOB_COMPLETION_INDEX", "3"), (COUNT_VARIABLE, "4")];
        assert_eq!(found(&pod), Ok(Some("3/4 JOB_COMPLETION_INDEX".to_owned())));
        assert!(found(&pod[..1]).unwrap_err().contains("set `DRAFTSMITH_SHARD_COUNT`"));
        let beyond = found(&[("JOB_COMPLETION_INDEX", "4"), (COUNT_VARIABLE, "4")]).unwrap_err();
        assert!(beyond.contains("numbered from 0"), "{beyond}");
    }
}
