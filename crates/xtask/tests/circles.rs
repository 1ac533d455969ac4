//! Modules of a crate depend on each other in one direction. Only a module and those inside it may use each other. And only
//! the loop that is enumerated runs drafters.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};

/// The names from a crate's root to a module.
type Module = Vec<String>;

/// The modules of a crate, each with those that it uses.
type Uses = BTreeMap<Module, BTreeSet<Module>>;

/// Collects the paths in a module's code, without that of tests.
#[derive(Default)]
struct Paths {
    found: Vec<Vec<String>>,
    /// The names of methods that are called.
    calls: BTreeSet<String>,
    tests: Vec<String>,
}

impl Paths {
    fn take_use(&mut self, before: &[String], tree: &syn::UseTree) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.take_use(&with(&path.ident), &path.tree),
            syn::UseTree::Name(name) => self.found.push(with(&name.ident)),
            syn::UseTree::Rename(name) => self.found.push(with(&name.ident)),
            syn::UseTree::Glob(_) => self.found.push(before.to_vec()),
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.take_use(before, tree));
            }
        }
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    let tokens = |it: &syn::Attribute| it.meta.require_list().map(|list| list.tokens.to_string());
    attributes.iter().any(|it| it.path().is_ident("cfg") && tokens(it).is_ok_and(|it| it == "test"))
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        match is_test(&item.attrs) {
            true => self.tests.push(item.ident.to_string()),
            false => visit::visit_item_mod(self, item),
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_test(&item.attrs) {
            self.take_use(&[], &item.tree);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.calls.insert(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.found.push(path.segments.iter().map(|it| it.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

/// Finds the module that a path in `module` leads to.
fn target(module: &Module, path: &[String], modules: &Uses) -> Option<Module> {
    let num_supers = path.iter().take_while(|it| *it == "super").count();
    let base = match path.first()?.as_str() {
        "crate" => Module::new(),
        "super" => module[..module.len().checked_sub(num_supers)?].to_vec(),
        "self" => module.clone(),
        first if modules.contains_key(&[&module[..], &[first.to_owned()]].concat()) => {
            module.clone()
        }
        _ => return None,
    };
    let rest = path.iter().filter(|it| !["crate", "super", "self"].contains(&it.as_str()));
    let full: Module = base.into_iter().chain(rest.cloned()).collect();
    (0..=full.len()).rev().map(|len| full[..len].to_vec()).find(|it| modules.contains_key(it))
}

fn rust_files(dir: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a directory of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            rust_files(&path, all);
        } else if path.extension().is_some_and(|it| it == "rs") {
            all.push(path);
        }
    }
}

/// Reads the modules of a crate without those of tests.
fn modules_of(src: &Path) -> BTreeMap<Module, Paths> {
    let mut files = Vec::new();
    rust_files(src, &mut files);
    let module = |file: &PathBuf| -> Module {
        let name = file.strip_prefix(src).expect("within").with_extension("");
        let parts = name.iter().map(|it| it.to_string_lossy().into_owned());
        parts.filter(|it| !["lib", "main"].contains(&it.as_str())).collect()
    };
    let mut paths = BTreeMap::new();
    for file in &files {
        let text = fs::read_to_string(file).expect("a source file");
        let mut found = Paths::default();
        found.visit_file(&syn::parse_file(&text).expect("it compiles"));
        paths.insert(module(file), found);
    }
    let tests = paths.iter().flat_map(|(module, it)| {
        it.tests.iter().map(move |name| [&module[..], std::slice::from_ref(name)].concat())
    });
    let tests: Vec<Module> = tests.collect();
    paths.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
    paths
}

fn uses_of(paths: &BTreeMap<Module, Paths>) -> Uses {
    let names: Uses = paths.keys().map(|module| (module.clone(), BTreeSet::new())).collect();
    let uses = |(module, paths): (&Module, &Paths)| {
        let targets = paths.found.iter().filter_map(|path| target(module, path, &names));
        (module.clone(), targets.filter(|it| it != module).collect())
    };
    paths.iter().map(uses).collect()
}

/// Finds the modules that a module leads to.
fn reached(from: &Module, uses: &Uses) -> BTreeSet<Module> {
    let (mut found, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        next.extend(uses[module].iter().filter(|it| found.insert((*it).clone())));
    }
    found
}

/// Finds the groups of modules that use each other, unless one of them contains the others.
fn circles(uses: &Uses) -> BTreeSet<BTreeSet<Module>> {
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        uses.keys().map(|module| (module, reached(module, uses))).collect();
    let group = |module: &&Module| -> BTreeSet<Module> {
        let back = |it: &&Module| reached[*it].contains(*module);
        reached[*module].iter().filter(back).cloned().collect()
    };
    let groups = reached.keys().map(group);
    groups
        .filter(|group| !group.iter().any(|top| group.iter().all(|it| it.starts_with(top))))
        .filter(|it| !it.is_empty())
        .collect()
}

/// Reads the modules of every crate of the product, by the crate's name.
fn product() -> BTreeMap<String, BTreeMap<Module, Paths>> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates");
    let dirs = fs::read_dir(crates).expect("a directory").map(|it| it.expect("an entry").path());
    let dirs = dirs.filter(|dir| dir.join("src").is_dir() && !dir.ends_with("xtask"));
    let name = |dir: &Path| dir.file_name().expect("a name").to_string_lossy().into_owned();
    dirs.map(|dir| (name(&dir), modules_of(&dir.join("src")))).collect()
}

#[test]
fn no_modules_use_each_other_but_a_module_and_those_inside_it() {
    let mut num_modules = 0;
    for (name, modules) in product() {
        let uses = uses_of(&modules);
        num_modules += uses.len();
        assert_eq!(circles(&uses), BTreeSet::new(), "{name}");
    }
    assert!(num_modules > 400, "{num_modules}");
}

#[test]
fn only_the_decoding_loop_and_two_trainings_run_drafters() {
    let steps = ["forward_cached", "forward_blocks", "read_contexts", "round_states"];
    let runs = |paths: &Paths| steps.iter().any(|step| paths.calls.contains(*step));
    let mut found = BTreeSet::new();
    for (name, modules) in product() {
        let others = modules.iter().filter(|(_, paths)| runs(paths));
        found.extend(others.map(|(module, _)| format!("{name}/{}", module.join("/"))));
    }
    // The networks themselves, and the loop.
    found
        .retain(|it| !it.starts_with("draftsmith-model/") && !it.starts_with("draftsmith-decode/"));
    // Both run a drafter along recorded tokens and draw nothing: see invariant 2 in crates/README.md.
    let expected = ["draftsmith-train/confidence", "draftsmith-train/head/features"];
    assert_eq!(found, expected.map(str::to_owned).into());
}

#[test]
fn circles_are_found() {
    let module = |path: &str| path.split('/').map(str::to_owned).collect::<Module>();
    let uses = |edges: &[(&str, &str)]| {
        let mut uses = Uses::new();
        for (one, other) in edges {
            uses.entry(module(other)).or_default();
            uses.entry(module(one)).or_default().insert(module(other));
        }
        uses
    };
    assert!(circles(&uses(&[("a", "a/b"), ("a/b", "a"), ("a", "c")])).is_empty());
    let found = circles(&uses(&[("a", "b"), ("b", "c/d"), ("c/d", "a"), ("e", "a")]));
    assert_eq!(found, [["a", "b", "c/d"].map(module).into()].into());
}
