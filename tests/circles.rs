//! No two files of a crate need each other, directly or around a circle: each can be read, moved
//! and tested after those below it.
//!
//! A file needs another where its code names something that is defined there, by a `use` or by a
//! path; tests are left out. A `use` that only hands a name on (`pub use`) is no need: so a parent
//! may present what its children hold. Nor is it one that a child uses types and constants of its
//! own parents: what a folder shares may stand in the file that the folder is named after. Calling
//! a parent's functions is.

#[path = "circles/source.rs"]
mod source;
#[path = "circles/tree.rs"]
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use tree::Tree;

/// Which file needs which, and the names that it takes from there.
type Needs = BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>;

#[test]
fn no_files_need_each_other() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut told = String::new();
    for root in roots(&workspace) {
        let tree = Tree::read(&root);
        for circle in circles(&tree.needs()) {
            told += &tell(&workspace, &circle, &tree.needs());
        }
    }
    assert!(told.is_empty(), "files need each other:\n{told}");
}

#[test]
fn commands_leave_each_other_alone_but_for_run() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let source = workspace.join("crates/draftsmith/src");
    let command_of = |file: &Path| -> Option<PathBuf> {
        let path = file.strip_prefix(source.join("commands")).ok()?;
        Some(Path::new(path.iter().next()?).with_extension(""))
    };
    let needs = Tree::read(&source.join("lib.rs")).needs();
    assert!(needs.keys().filter_map(|file| command_of(file)).count() > 10, "{:?}", needs.keys());
    for (file, others) in &needs {
        let Some(command) = command_of(file).filter(|command| *command != Path::new("run")) else {
            continue;
        };
        for (other, names) in others {
            let is_its_own = command_of(other).is_none_or(|other| other == command);
            assert!(is_its_own, "{} uses {names:?} of {}", file.display(), other.display());
        }
    }
}

/// The root files of all crates: libraries, binaries, benches, examples and integration tests.
fn roots(workspace: &Path) -> Vec<PathBuf> {
    let mut roots = rust_files(&workspace.join("tests"));
    for package in entries(&workspace.join("crates")) {
        roots.extend(["src/lib.rs", "src/main.rs"].map(|name| package.join(name)));
        for folder in ["benches", "examples", "tests"] {
            let folder = package.join(folder);
            roots.extend(rust_files(&folder));
            roots.extend(entries(&folder).into_iter().map(|entry| entry.join("main.rs")));
        }
    }
    roots.retain(|root| root.is_file());
    assert!(roots.len() > 6, "every crate has a root: {roots:?}");
    roots
}

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = entries(dir);
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    files
}

/// What lies in a directory, by name; nothing where there is none.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    paths.sort();
    paths
}

/// The sets of files that each need all others of theirs.
fn circles(needs: &Needs) -> Vec<BTreeSet<PathBuf>> {
    let reached = |from: &PathBuf| {
        let mut reached = BTreeSet::new();
        let mut ahead = vec![from];
        while let Some(file) = ahead.pop() {
            for next in needs.get(file).into_iter().flat_map(BTreeMap::keys) {
                if reached.insert(next.clone()) {
                    ahead.push(next);
                }
            }
        }
        reached
    };
    let reached: BTreeMap<&PathBuf, BTreeSet<PathBuf>> =
        needs.keys().map(|file| (file, reached(file))).collect();
    let circle_of = |(file, ahead): (&&PathBuf, &BTreeSet<PathBuf>)| {
        let needs_it = |other: &&PathBuf| reached.get(other).is_some_and(|it| it.contains(*file));
        ahead.iter().filter(needs_it).cloned().collect::<BTreeSet<PathBuf>>()
    };
    let circles: BTreeSet<BTreeSet<PathBuf>> = reached.iter().map(circle_of).collect();
    circles.into_iter().filter(|circle| !circle.is_empty()).collect()
}

/// The files of a circle and the names that tie them.
fn tell(workspace: &Path, circle: &BTreeSet<PathBuf>, needs: &Needs) -> String {
    let short = |path: &Path| path.strip_prefix(workspace).unwrap_or(path).display().to_string();
    let mut told = format!("a circle of {} files:\n", circle.len());
    for file in circle {
        for (other, names) in needs[file].iter().filter(|(other, _)| circle.contains(*other)) {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            told += &format!("  {} -> {}: {}\n", short(file), short(other), names.join(", "));
        }
    }
    told
}

#[test]
fn a_circle_is_found_and_its_names_are_told() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().expect("in the directory")).expect("made");
        fs::write(path, text).expect("written");
    };
    let found = || {
        let needs = Tree::read(&dir.path().join("lib.rs")).needs();
        circles(&needs).iter().map(|circle| tell(dir.path(), circle, &needs)).collect::<String>()
    };
    write("lib.rs", "mod one; mod two; mod three; pub use one::One;");
    write(
        "one.rs",
        "use crate::two::{self, Two as Deux}; pub struct One(Deux); fn a() { two::b() }",
    );
    write("two.rs", "pub struct Two; // crate::one::One\npub fn b() { \"crate::one::One\"; }");
    write("three.rs", "#[cfg(test)] mod tests { use crate::one::One; }");
    assert_eq!(found(), "", "a comment, a text and a test need nothing");
    // Through the name that the root hands on, and by a path in the code.
    write("two.rs", "pub struct Two; pub fn b() { crate::three::c() }");
    write("three.rs", "pub fn c() -> crate::One { todo!() }");
    let expected = "a circle of 3 files:\n  one.rs -> two.rs: Two, b\n  \
                    three.rs -> one.rs: One\n  two.rs -> three.rs: c\n";
    assert_eq!(found(), expected);
    // What a folder shares.
    write("two.rs", "mod inner; pub use self::inner::Inner; pub struct Two; pub fn b() {}");
    write("two/inner.rs", "use super::Two; pub struct Inner(Two);");
    write("three.rs", "");
    assert_eq!(found(), "");
    write("two/inner.rs", "pub struct Inner; fn d() { super::b() }");
    write("two.rs", "mod inner; pub struct Two(inner::Inner); pub fn b() {}");
    let expected = "a circle of 2 files:\n  two/inner.rs -> two.rs: b\n  \
                    two.rs -> two/inner.rs: Inner\n";
    assert_eq!(found(), expected);
}
