//! The modules of a crate, and in which file what a path names is defined.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::Needs;
use super::source::{Import, Source};

/// The modules of a crate, by path from its root, which is the empty one.
#[derive(Debug)]
pub(crate) struct Tree {
    modules: BTreeMap<Vec<String>, Module>,
}

#[derive(Debug)]
struct Module {
    file: PathBuf,
    source: Source,
}

impl Tree {
    /// Reads the root file of a crate and all files that belong to it.
    pub(crate) fn read(root: &Path) -> Self {
        let mut tree = Self { modules: BTreeMap::new() };
        let dir = root.parent().expect("a file lies in a directory");
        tree.add(Vec::new(), root.to_path_buf(), dir);
        tree
    }

    fn add(&mut self, path: Vec<String>, file: PathBuf, children_dir: &Path) {
        let text = fs::read_to_string(&file).expect("the file was found");
        let source = Source::of(&text);
        for child in &source.children {
            let dir = children_dir.join(child);
            let files = [children_dir.join(format!("{child}.rs")), dir.join("mod.rs")];
            // A module with a `#[path]` is left out.
            if let Some(file) = files.into_iter().find(|file| file.is_file()) {
                self.add([&path[..], std::slice::from_ref(child)].concat(), file, &dir);
            }
        }
        self.modules.insert(path, Module { file, source });
    }

    /// Which file needs which: for what its code names, but for its own parents' types and
    /// constants.
    pub(crate) fn needs(&self) -> Needs {
        let mut needs = Needs::new();
        for (here, module) in &self.modules {
            let of_file = needs.entry(module.file.clone()).or_default();
            let imports = module.source.imports.iter().filter(|import| !import.is_public);
            let imported = imports.map(|import| &import.path);
            for path in imported.chain(&module.source.paths) {
                for (place, name) in self.resolve(here, path, 0) {
                    let file = &self.modules[&place].file;
                    let is_called = name.starts_with(char::is_lowercase);
                    if *file != module.file && (is_called || !here.starts_with(&place)) {
                        of_file.entry(file.clone()).or_default().insert(name);
                    }
                }
            }
        }
        needs
    }

    /// The modules that may define what a path names in the module `here`, and the name; none for
    /// a module itself, and for what other crates define.
    fn resolve(
        &self,
        here: &[String],
        path: &[String],
        depth: usize,
    ) -> Vec<(Vec<String>, String)> {
        let (first, rest) = path.split_first().expect("a path has a segment");
        let parent = || here[..here.len().saturating_sub(1)].to_vec();
        match first.as_str() {
            "crate" => self.descend(Vec::new(), rest, depth),
            "self" => self.descend(here.to_vec(), rest, depth),
            "super" if rest.first().is_some_and(|next| next == "super") => {
                self.resolve(&parent(), rest, depth)
            }
            "super" => self.descend(parent(), rest, depth),
            _ => {
                let module = &self.modules[here];
                let mut found = self.through(here, &module.source.imports, first, rest, depth);
                let child = [here, std::slice::from_ref(first)].concat();
                if self.modules.contains_key(&child) {
                    found.extend(self.descend(child, rest, depth));
                }
                found
            }
        }
    }

    /// Follows a path downwards from a module.
    fn descend(
        &self,
        place: Vec<String>,
        path: &[String],
        depth: usize,
    ) -> Vec<(Vec<String>, String)> {
        let Some((first, rest)) = path.split_first() else { return Vec::new() };
        let child = [&place[..], std::slice::from_ref(first)].concat();
        if self.modules.contains_key(&child) && !rest.is_empty() {
            return self.descend(child, rest, depth);
        }
        let found = self.through(&place, &self.modules[&place].source.imports, first, rest, depth);
        let is_module = self.modules.contains_key(&child);
        if found.is_empty() && !is_module { vec![(place, first.clone())] } else { found }
    }

    /// Follows what the imports of a module call `first`.
    fn through(
        &self,
        place: &[String],
        imports: &[Import],
        first: &String,
        rest: &[String],
        depth: usize,
    ) -> Vec<(Vec<String>, String)> {
        // Names that import each other lead nowhere.
        if depth > 16 {
            return Vec::new();
        }
        let imports = imports.iter().filter(|import| import.name == *first);
        let imports = imports.filter(|import| import.path != [first.clone()]);
        imports
            .flat_map(|import| self.resolve(place, &[&import.path[..], rest].concat(), depth + 1))
            .collect()
    }
}
