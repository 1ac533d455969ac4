//! Builds a wheel: the command `draftsmith` and its manual pages, for people without a Rust toolchain.
//!
//! maturin compiles and packs. On Linux zig links, against a glibc of 2012, so that one wheel runs on any
//! distribution.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

const PYPROJECT: &str = include_str!("wheel/pyproject.toml");

/// Arguments of `wheel`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The directory to write the wheel to, instead of `target/wheel/dist`.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// More arguments of `maturin build`, after `--`, such as `--features cuda`.
    #[arg(last = true)]
    more: Vec<String>,
}

/// Runs the task.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let project = root.join("target/wheel");
    stage(&root, &project)?;
    let out = arguments.out.as_deref().unwrap_or(Path::new("target/wheel/dist"));
    let mut maturin = Command::new("maturin");
    maturin.args(["build", "--release", "--out"]).arg(std::path::absolute(out)?);
    if cfg!(target_os = "linux") {
        maturin.args(["--zig", "--compatibility", "manylinux_2_17"]);
    }
    let built = maturin.args(&arguments.more).current_dir(&project).status();
    let built = built.context("cannot run `maturin`; hint: pip install 'maturin[zig]'")?;
    ensure!(built.success(), "maturin failed");
    Ok(())
}

/// Writes the project that maturin reads.
fn stage(root: &Path, project: &Path) -> Result<()> {
    let manual = project.join("draftsmith.data/data/share/man/man1");
    std::fs::create_dir_all(&manual)?;
    std::fs::write(project.join("pyproject.toml"), PYPROJECT)?;
    for name in ["README.md", "LICENSE-APACHE", "LICENSE-MIT"] {
        std::fs::copy(root.join(name), project.join(name)).with_context(|| name.to_owned())?;
    }
    clap_mangen::generate_to(draftsmith_cli::command(), &manual)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_has_a_page_for_each_command_with_its_flags_and_example() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let project = tempfile::tempdir().expect("a directory");
        stage(&root, project.path()).expect("a project");
        let manual = project.path().join("draftsmith.data/data/share/man/man1");
        let page = |name: &str| {
            let page = std::fs::read_to_string(manual.join(name)).expect(name);
            page.replace("\\-", "-")
        };
        let all = page("draftsmith.1");
        for command in draftsmith_cli::command().get_subcommands() {
            let name = command.get_name();
            assert!(all.contains(&format!("draftsmith-{name}(1)")), "{name}: {all}");
            if name != "help" {
                let page = page(&format!("draftsmith-{name}.1"));
                assert!(page.contains("--json"), "{page}");
                assert!(page.contains(&format!("draftsmith {name} ")), "{page}");
            }
        }
    }

    #[test]
    fn the_project_names_files_that_exist() {
        let project: toml::Table = PYPROJECT.parse().expect("TOML");
        let manifest = project["tool"]["maturin"]["manifest-path"].as_str().expect("a path");
        // Two directories below the root, like this crate.
        let beside = Path::new(env!("CARGO_MANIFEST_DIR"));
        let manifest = std::fs::read_to_string(beside.join(manifest)).expect("a crate");
        let described = format!("description = {}", project["project"]["description"]);
        assert!(manifest.contains(&described), "{manifest}");
    }
}
