//! This process's index when several build one data set together: from `--shard i/n`, from Slurm's array
//! tasks or from the pods of a Kubernetes indexed job.
//!
//! The processes share only the directory. Process i of n builds the files i, i + n, i + 2n, ….

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail};

/// The number of pods of an indexed job, which Kubernetes does not pass to them.
const COUNT_VARIABLE: &str = "DRAFTSMITH_SHARD_COUNT";

/// This process's index among `count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// From 0.
    index: usize,
    count: usize,
}

impl Shard {
    /// A process that builds the whole data set.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    fn new(index: usize, count: usize) -> Result<Self> {
        if index >= count {
            bail!("shard {index} of {count}: shards are numbered from 0");
        }
        Ok(Self { index, count })
    }

    /// Whether there are several processes.
    pub fn is_part(self) -> bool {
        self.count > 1
    }

    /// The name of a file that each process writes separately: with the shard's number if there are several.
    pub fn file_name(self, stem: &str, extension: &str) -> String {
        match self.is_part() {
            false => format!("{stem}.{extension}"),
            true => format!("{stem}-{}-of-{}.{extension}", self.index, self.count),
        }
    }

    /// Whether this process builds the `file`-th file of the data set.
    pub fn builds(self, file: usize) -> bool {
        file % self.count == self.index
    }

    /// The shard that a scheduler's environment variables give, with the name of the variable; `None`
    /// outside arrays and indexed jobs.
    ///
    /// # Errors
    /// If variables are missing or contradict each other.
    pub fn of_environment(
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
                format!("`{slurm}` is {id}, but `SLURM_ARRAY_TASK_COUNT` is not set; {HINT}")
            })?;
            let first = number("SLURM_ARRAY_TASK_MIN")?.unwrap_or(0);
            let step = number("SLURM_ARRAY_TASK_STEP")?.unwrap_or(1).max(1);
            let index = id.checked_sub(first).filter(|index| index.is_multiple_of(step));
            let shard = index.and_then(|index| Self::new(index / step, count).ok()).with_context(|| {
                format!(
                    "`{slurm}` is {id}, outside {count} tasks from {first} in steps of {step}: the array \
                     has gaps; {HINT}"
                )
            })?;
            return Ok(Some((shard, slurm)));
        }
        let kubernetes = "JOB_COMPLETION_INDEX";
        if let Some(index) = number(kubernetes)? {
            let count = number(COUNT_VARIABLE)?.with_context(|| {
                format!(
                    "`{kubernetes}` is {index}, but the number of pods is not set; hint: set \
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
    fn exactly_one_process_builds_each_file() {
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
    fn the_shard_is_read_from_slurm_and_kubernetes() {
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
        assert!(slurm("7", "3", "0", "1").unwrap_err().contains("array has gaps"));
        assert!(slurm("x", "3", "0", "1").unwrap_err().contains("`SLURM_ARRAY_TASK_ID` is `x`"));
        let half = found(&[("SLURM_ARRAY_TASK_ID", "3")]).unwrap_err();
        assert!(half.contains("`SLURM_ARRAY_TASK_COUNT` is not set"), "{half}");

        let pod = [("JOB_COMPLETION_INDEX", "3"), (COUNT_VARIABLE, "4")];
        assert_eq!(found(&pod), Ok(Some("3/4 JOB_COMPLETION_INDEX".to_owned())));
        assert!(found(&pod[..1]).unwrap_err().contains("set `DRAFTSMITH_SHARD_COUNT`"));
        let beyond = found(&[("JOB_COMPLETION_INDEX", "4"), (COUNT_VARIABLE, "4")]).unwrap_err();
        assert!(beyond.contains("numbered from 0"), "{beyond}");
    }
}
