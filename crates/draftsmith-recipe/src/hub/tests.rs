use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Barrier, Mutex};

use draftsmith_files::hash_bytes;

use super::client::is_same_host;
use super::download::small_files;
use super::*;
use crate::watch::Silent;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const FILES: [(&str, &[u8]); 3] = [
    (CONFIG, b"{\"a\": 1}"),
    ("tokenizer.json", b"{\"b\": 2}"),
    (WEIGHTS, b"weights that are long enough to be cut in two"),
];

/// A request that the test server received.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Asked {
    method: String,
    path: String,
    host: String,
    /// The first byte in the `range` header; `None` without the header.
    start: Option<usize>,
    authorization: Option<String>,
    /// The number of earlier requests with the same method and path.
    nth: usize,
}

impl Asked {
    fn is(&self, method: &str, name: &str) -> bool {
        self.method == method && self.path.ends_with(&format!("/{name}"))
    }
}

/// The test server's response.
struct Answer {
    status: u16,
    headers: BTreeMap<&'static str, String>,
    body: Vec<u8>,
}

impl Answer {
    fn new(status: u16) -> Self {
        Self { status, headers: BTreeMap::new(), body: Vec::new() }
    }

    fn with(mut self, header: &'static str, value: impl Into<String>) -> Self {
        self.headers.insert(header, value.into());
        self
    }
}

/// Answers a request about `org/tiny` as the real Hub would.
fn honest(asked: &Asked) -> Answer {
    if asked.path == "/api/models/org/tiny/revision/main" {
        let siblings = FILES.map(|(name, _)| serde_json::json!({ "rfilename": name }));
        return info(&serde_json::json!({ "sha": COMMIT, "siblings": siblings, "private": false }));
    }
    let name = asked.path.rsplit('/').next().unwrap();
    let Some((_, bytes)) = FILES.iter().find(|(known, _)| *known == name) else {
        return Answer::new(404);
    };
    let answer = Answer::new(200).with("x-repo-commit", COMMIT).with("etag", tag_of(name));
    let body = bytes[asked.start.unwrap_or(0)..].to_vec();
    match asked.start {
        Some(start) => {
            let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
            Answer { status: 206, body, ..answer.with("content-range", range) }
        }
        None => Answer { body, ..answer },
    }
}

fn info(document: &serde_json::Value) -> Answer {
    Answer { body: document.to_string().into_bytes(), ..Answer::new(200) }
}

/// Returns a file's tag in quotes: the full SHA-256 hash for weights, which are large files on the
/// Hub, and the first 40 characters of the hash for other files.
fn tag_of(name: &str) -> String {
    let bytes = FILES.iter().find(|(known, _)| *known == name).unwrap().1;
    let tag = hash_bytes(bytes);
    if name == WEIGHTS { format!("\"{tag}\"") } else { format!("\"{}\"", &tag[..40]) }
}

/// A test server on its own port.
struct Server {
    address: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    fn start(answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (asked, answer) = (Arc::new(Mutex::new(Vec::new())), Arc::new(answer));
        let log = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (log, answer) = (Arc::clone(&log), Arc::clone(&answer));
                // A client may close the connection early.
                std::thread::spawn(move || drop(serve(&stream.unwrap(), &log, &*answer)));
            }
        });
        Self { address, asked }
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    fn saw_token(&self) -> bool {
        self.asked().iter().any(|one| one.authorization.is_some())
    }
}

/// Answers one request and closes the connection.
fn serve(
    mut stream: &TcpStream,
    log: &Mutex<Vec<Asked>>,
    answer: &dyn Fn(&Asked) -> Answer,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    let mut words = first.split(' ').map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (mut host, mut start, mut authorization) = (String::new(), None, None);
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        match line.split_once(": ").map(|(name, value)| (name.to_ascii_lowercase(), value)) {
            Some((name, value)) if name == "host" => value.clone_into(&mut host),
            Some((name, value)) if name == "range" => {
                start = Some(value["bytes=".len()..].trim_end_matches('-').parse().unwrap());
            }
            Some((name, value)) if name == "authorization" => {
                authorization = Some(value.to_owned())
            }
            _ => {}
        }
    }
    let asked = {
        let mut log = log.lock().unwrap();
        let nth = log.iter().filter(|one| (&one.method, &one.path) == (&method, &path)).count();
        log.push(Asked { method, path, host, start, authorization, nth });
        log.last().unwrap().clone()
    };
    let Answer { status, mut headers, body } = answer(&asked);
    headers.entry("content-length").or_insert(body.len().to_string());
    write!(stream, "HTTP/1.1 {status} Answer\r\nconnection: close\r\n")?;
    for (name, value) in headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    if asked.method == "HEAD" { Ok(()) } else { stream.write_all(&body) }
}

/// A cache in an otherwise empty temporary directory.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Downloads `org/tiny` from a server, with a token, and returns the model's directory.
    fn load(&self, server: &Server) -> Result<PathBuf> {
        self.load_with(server, HubWeights::All)
    }

    fn load_with(&self, server: &Server, weights: HubWeights) -> Result<PathBuf> {
        let hub = Hub {
            cache: self.0.path().join("in/cache"),
            endpoint: format!("{}/", server.address),
            token: Some("secret".to_owned()),
            is_offline: false,
            timeout: Duration::from_secs(20),
        };
        hub.dir(&parse_name(Path::new("org/tiny")).unwrap(), weights, &Silent)
    }

    #[track_caller]
    fn load_fails(&self, server: &Server, named: &[&str]) {
        let message = format!("{:#}", self.load(server).unwrap_err());
        for text in named {
            assert!(message.contains(text), "`{text}` is not in: {message}");
        }
        assert!(!message.contains("secret"), "{message}");
    }

    fn model(&self) -> PathBuf {
        self.0.path().join("in/cache/models--org--tiny")
    }

    /// Lists the paths of all files and links, relative to the directory.
    fn files(&self) -> Vec<String> {
        fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
            for path in draftsmith_files::paths_in(dir).unwrap() {
                match path.is_dir() && !path.is_symlink() {
                    true => walk(&path, found),
                    false => found.push(path),
                }
            }
        }
        let mut found = Vec::new();
        walk(self.0.path(), &mut found);
        let shown =
            |path: &PathBuf| path.strip_prefix(self.0.path()).unwrap().display().to_string();
        found.iter().map(shown).collect()
    }

    #[track_caller]
    fn holds_the_model(&self, dir: &Path) {
        assert_eq!(dir, self.model().join("snapshots").join(COMMIT));
        for (name, bytes) in FILES {
            assert_eq!(std::fs::read(dir.join(name)).unwrap(), bytes, "{name}");
        }
        assert!(!self.files().iter().any(|name| name.ends_with(".part")), "{:?}", self.files());
    }

    /// Asserts that a hostile response left no blob, no snapshot and nothing outside the cache.
    #[track_caller]
    fn is_clean(&self) {
        let is_expected = |name: &String| name == "in/cache/models--org--tiny/refs/main";
        let unexpected: Vec<_> = self.files().into_iter().filter(|one| !is_expected(one)).collect();
        assert!(unexpected.is_empty(), "{unexpected:?}");
    }
}

#[test]
fn hub_names_are_distinguished_from_directories() {
    for (text, id, revision) in [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "main"),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
    ] {
        let model = parse_name(Path::new(text)).expect("a name");
        assert_eq!((model.id.as_str(), model.revision.as_str()), (id, revision));
    }
    for text in [
        "gpt2",
        "./org/name",
        "../name",
        "/org/name",
        "org/name/more",
        "org/",
        "/name",
        "",
        "org/.name",
        "org/name@",
        "org/name@../main",
        "org/a b",
        "~/model",
    ] {
        assert!(parse_name(Path::new(text)).is_none(), "{text}");
    }
}

#[test]
fn code_and_subdirectories_are_not_downloaded() {
    let known = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "modeling_x.py",
        "onnx/config.json",
        "README.md",
        "training_args.bin",
        "model.safetensors.index.json",
        "model.safetensors",
        "../config.json",
        "/tmp/config.json",
        "..\\config.json",
        "C:config.json",
        "..json",
        "a?b=c.json",
        "a b.json",
    ];
    let known = known.map(str::to_owned).into();
    let found: Vec<&str> = small_files(&known).collect();
    let expected =
        ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"];
    assert_eq!(found, expected);
}

#[test]
fn the_cache_has_the_layout_of_huggingface_hub() {
    let (place, server) = (Place::new(), Server::start(honest));
    place.holds_the_model(&place.load(&server).unwrap());
    let read = |name: &str| std::fs::read(place.model().join(name)).unwrap();
    assert_eq!(read("refs/main"), COMMIT.as_bytes());
    for (name, bytes) in FILES {
        let tag = tag_of(name).replace('"', "");
        assert_eq!(read(&format!("blobs/{tag}")), bytes);
        if cfg!(unix) {
            let link = place.model().join("snapshots").join(COMMIT).join(name);
            assert_eq!(std::fs::read_link(link).unwrap(), Path::new("../../blobs").join(tag));
        }
    }
    // Files are requested by commit, and none is requested twice.
    let asked = server.asked();
    let is_by_commit = |one: &Asked| one.path.starts_with(&format!("/org/tiny/resolve/{COMMIT}/"));
    assert!(asked[1..].iter().all(is_by_commit), "{asked:?}");
    place.load(&server).unwrap();
    assert_eq!(server.asked().len(), asked.len());
}

#[test]
fn a_cache_of_python_is_read_and_its_blobs_are_used() {
    let (place, server) = (Place::new(), Server::start(honest));
    let blob = place.model().join("blobs").join(tag_of(WEIGHTS).replace('"', ""));
    draftsmith_files::write_whole(&blob, FILES[2].1).unwrap();
    place.holds_the_model(&place.load(&server).unwrap());
    assert!(!server.asked().iter().any(|one| one.is("GET", WEIGHTS)), "{:?}", server.asked());
}

#[test]
fn a_reference_in_the_cache_cannot_lead_out_of_it() {
    let (place, server) = (Place::new(), Server::start(honest));
    for (name, bytes) in FILES {
        draftsmith_files::write_whole(&place.0.path().join("outside").join(name), bytes).unwrap();
    }
    std::fs::create_dir_all(place.model().join("snapshots")).unwrap();
    draftsmith_files::write_whole(&place.model().join("refs/main"), "../../../../outside").unwrap();
    place.holds_the_model(&place.load(&server).unwrap());
}

/// Lists header values that would lead out of the cache, or that are no valid names.
fn unsafe_words(place: &Place) -> Vec<String> {
    let absolute = place.0.path().join("evil").display().to_string();
    let words =
        ["../../../../evil", "..", ".", "a/b", "a\\b", "C:evil", "a b", "", "a.part", "\u{e9}"];
    let long = "a".repeat(200);
    [absolute, long].into_iter().chain(words.map(str::to_owned)).collect()
}

#[test]
fn tags_and_commits_that_are_no_names_are_refused() {
    for header in ["etag", "x-linked-etag", "x-repo-commit"] {
        for value in unsafe_words(&Place::new()) {
            for written in [value.clone(), format!("\"{value}\""), format!("W/\"{value}\"")] {
                let place = Place::new();
                let server = Server::start(move |asked| match asked.is("HEAD", CONFIG) {
                    true => honest(asked).with(header, written.clone()),
                    false => honest(asked),
                });
                place.load_fails(&server, &["`config.json`", &format!("`{header}`"), "hint: "]);
                place.is_clean();
                assert!(!server.asked().iter().any(|one| one.is("GET", CONFIG)));
            }
        }
    }
}

#[test]
fn a_commit_of_the_list_of_files_that_is_no_name_is_refused() {
    for value in unsafe_words(&Place::new()) {
        let place = Place::new();
        let server = Server::start(move |asked| match asked.path.starts_with("/api/") {
            true => {
                let siblings = [serde_json::json!({ "rfilename": CONFIG })];
                info(&serde_json::json!({ "sha": value, "siblings": siblings }))
            }
            false => honest(asked),
        });
        place.load_fails(&server, &["`sha`", "hint: "]);
        assert_eq!(place.files(), Vec::<String>::new());
    }
}

#[test]
fn absent_tags_and_commits_are_named() {
    for header in ["etag", "x-repo-commit"] {
        let place = Place::new();
        let server = Server::start(move |asked| {
            let mut answer = honest(asked);
            answer.headers.remove(header);
            answer
        });
        place.load_fails(&server, &["`config.json`", &format!("no `{header}`"), "hint: "]);
        place.is_clean();
    }
}

#[test]
fn quotes_and_the_mark_of_weak_tags_are_not_part_of_a_name() {
    let tag = tag_of(CONFIG).replace('"', "");
    for written in [tag.clone(), format!("\"{tag}\""), format!("W/\"{tag}\""), format!("W/{tag}")] {
        let place = Place::new();
        let server = Server::start(move |asked| match asked.path.ends_with(CONFIG) {
            // The linked tag takes precedence.
            true => honest(asked).with("x-linked-etag", written.clone()).with("etag", "../other"),
            false => honest(asked),
        });
        place.holds_the_model(&place.load(&server).unwrap());
        assert!(place.model().join("blobs").join(&tag).is_file());
    }
}

#[test]
fn an_answer_that_turns_hostile_after_a_good_one_is_refused() {
    for header in ["etag", "x-linked-etag", "x-repo-commit"] {
        for value in unsafe_words(&Place::new()) {
            let place = Place::new();
            let server = Server::start(move |asked| match asked.is("GET", CONFIG) {
                true => honest(asked).with(header, value.clone()),
                false => honest(asked),
            });
            place.load_fails(&server, &["`config.json`", &format!("`{header}`"), "hint: "]);
            let part = format!("{}.part", tag_of(CONFIG).replace('"', ""));
            let is_ours = |name: &String| name.ends_with(&part) || name.ends_with(".lock");
            let is_safe = |name: &String| is_ours(name) || name.ends_with("refs/main");
            assert!(place.files().iter().all(is_safe), "{:?}", place.files());
        }
        // The first metadata request fails, so metadata are requested again.
        let place = Place::new();
        let server = Server::start(move |asked| match (asked.is("HEAD", CONFIG), asked.nth) {
            (true, 0) => Answer::new(503),
            (true, _) => honest(asked).with(header, "../../../../evil"),
            _ => honest(asked),
        });
        place.load_fails(&server, &["`config.json`", &format!("`{header}`")]);
        place.is_clean();
    }
}

#[test]
fn a_file_that_changes_between_requests_is_requested_again() {
    for (header, value) in [
        ("etag", "other"),
        ("x-linked-etag", "other"),
        ("x-repo-commit", "other"),
        ("x-linked-size", "3"),
    ] {
        for method in ["GET", "HEAD"] {
            let is_changed = move |asked: &Asked| asked.is(method, WEIGHTS);
            let server = Server::start(move |asked| match is_changed(asked) && asked.nth == 0 {
                true => honest(asked).with(header, value),
                false => honest(asked),
            });
            let place = Place::new();
            place.holds_the_model(&place.load(&server).unwrap());
            let server = Server::start(move |asked| match is_changed(asked) {
                true => honest(asked).with(header, value),
                false => honest(asked),
            });
            let place = Place::new();
            place.load_fails(&server, &["`model.safetensors`", "answers differ", "hint: "]);
            let num_asked = server.asked().iter().filter(|one| is_changed(one)).count();
            assert_eq!(num_asked, 4, "{header} {method}");
        }
    }
}

#[test]
fn a_file_of_another_commit_is_refused() {
    let hub = Server::start(|asked| match asked.path.ends_with(WEIGHTS) {
        true => honest(asked).with("x-repo-commit", "other"),
        false => honest(asked),
    });
    let place = Place::new();
    place.load_fails(&hub, &["`model.safetensors`", "answers differ", "hint: "]);
    assert!(!place.model().join("snapshots/other").exists());
}

#[test]
fn the_token_goes_to_no_other_host() {
    let token = Some("Bearer secret".to_owned());
    // The targets are an absolute URL, a URL without a scheme, and a URL that leads back to the
    // Hub.
    for form in ["http://{}", "//{}", "http://{}/back"] {
        let elsewhere = Server::start(|asked| match asked.path.strip_prefix("/back/") {
            Some(address) => Answer::new(302).with("location", format!("http://{address}")),
            None => honest(asked),
        });
        let address = elsewhere.address["http://".len()..].to_owned();
        let start = form.replace("{}", &address);
        let hub = Server::start(move |asked| {
            if !asked.path.starts_with("/org/tiny/") {
                return honest(asked);
            }
            // The Hub sends the file's metadata before it redirects.
            let tag = honest(asked).headers["etag"].clone();
            let location = format!("{start}/{}/of{}", asked.host, asked.path);
            let answer = Answer::new(302).with("location", location).with("x-linked-etag", tag);
            answer.with("x-repo-commit", COMMIT)
        });
        let place = Place::new();
        place.holds_the_model(&place.load(&hub).unwrap());
        for one in hub.asked() {
            let is_back = one.path.starts_with("/of/");
            assert_eq!(one.authorization, token.clone().filter(|_| !is_back), "{one:?}");
        }
        assert!(!elsewhere.saw_token(), "{:?}", elsewhere.asked());
        // Metadata are requested only from the Hub itself.
        assert_eq!(elsewhere.asked().len(), FILES.len());
        assert!(elsewhere.asked().iter().all(|one| one.method == "GET"));
    }
}

#[test]
fn another_scheme_port_or_user_is_another_host() {
    let hub = "https://hub.co/a".parse().unwrap();
    for (address, is_same) in [
        ("https://hub.co/b?c", true),
        ("HTTPS://HUB.CO/b", true),
        ("http://hub.co/a", false),
        ("https://hub.co:8443/a", false),
        ("https://hub.co.evil.co/a", false),
        ("https://hub.co@evil.co/a", false),
        ("https://user@hub.co/a", false),
        ("https://cdn.hub.co/a", false),
    ] {
        assert_eq!(is_same_host(&address.parse().unwrap(), &hub), is_same, "{address}");
    }
}

#[test]
fn the_list_of_files_is_requested_elsewhere_without_the_token() {
    let elsewhere = Server::start(honest);
    let address = elsewhere.address.clone();
    let hub = Server::start(move |asked| match asked.path.starts_with("/api/") {
        true => Answer::new(307).with("location", format!("{address}{}", asked.path)),
        false => honest(asked),
    });
    let place = Place::new();
    place.holds_the_model(&place.load(&hub).unwrap());
    assert!(hub.saw_token() && !elsewhere.saw_token());
    assert_eq!(elsewhere.asked().len(), 1);
}

#[test]
fn redirects_within_the_hub_keep_the_token_and_are_bounded() {
    for is_absolute in [false, true] {
        let hub = Server::start(move |asked| match asked.path.strip_prefix("/renamed") {
            Some(path) => honest(&Asked { path: path.to_owned(), ..asked.clone() }),
            None => {
                let start =
                    if is_absolute { format!("http://{}", asked.host) } else { String::new() };
                Answer::new(307).with("location", format!("{start}/renamed{}", asked.path))
            }
        });
        let place = Place::new();
        place.holds_the_model(&place.load(&hub).unwrap());
        assert!(hub.asked().iter().all(|one| one.authorization.is_some()), "{:?}", hub.asked());
    }
    let endless = Server::start(|asked| Answer::new(302).with("location", asked.path.clone()));
    Place::new().load_fails(&endless, &["redirects more than 5 times"]);
    assert_eq!(endless.asked().len(), 6);
}

#[test]
fn a_redirect_to_no_address_is_refused() {
    for location in ["", "elsewhere", "http://", "//", "ftp:x", "\u{e9}"] {
        let hub = Server::start(move |_| Answer::new(302).with("location", location));
        Place::new().load_fails(&hub, &["`location`", "hint: "]);
    }
    let hub = Server::start(|_| Answer::new(302));
    Place::new().load_fails(&hub, &["no `location`"]);
}

#[test]
fn hostile_names_of_files_are_not_downloaded() {
    let names =
        ["../../../../evil.json", "/tmp/evil.json", "..\\evil.json", "a/evil.json", "x?y.json"];
    let place = Place::new();
    let hub = Server::start(move |asked| match asked.path.starts_with("/api/") {
        true => {
            let all = names.iter().copied().chain(FILES.map(|(name, _)| name));
            let siblings: Vec<_> =
                all.map(|name| serde_json::json!({ "rfilename": name })).collect();
            info(&serde_json::json!({ "sha": COMMIT, "siblings": siblings }))
        }
        false => honest(asked),
    });
    place.holds_the_model(&place.load(&hub).unwrap());
    assert!(!hub.asked().iter().any(|one| one.path.contains("evil") || one.path.contains('?')));
}

#[test]
fn only_the_shards_with_the_ends_are_downloaded() {
    let place = Place::new();
    let hub = Server::start(|asked| {
        let name = asked.path.rsplit('/').next().unwrap().to_owned();
        let index = "model.safetensors.index.json";
        if asked.path.starts_with("/api/") {
            let siblings = [CONFIG, "tokenizer.json", index, "a", "b", "c"];
            let siblings = siblings.map(|name| serde_json::json!({ "rfilename": name }));
            return info(&serde_json::json!({ "sha": COMMIT, "siblings": siblings }));
        }
        let weights = serde_json::json!({ "weight_map": {
            "model.embed_tokens.weight": "a", "model.layers.0.mlp.experts.7.up_proj.weight": "b",
            "model.layers.1.input_layernorm.weight": "c", "model.norm.weight": "c",
        } });
        match name.as_str() {
            "a" | "c" => {
                info(&serde_json::json!({})).with("etag", &name).with("x-repo-commit", COMMIT)
            }
            name if name == index => {
                info(&weights).with("etag", "index").with("x-repo-commit", COMMIT)
            }
            _ => honest(asked),
        }
    });
    let dir = place.load_with(&hub, HubWeights::Ends).unwrap();
    assert!(["a", "c"].iter().all(|name| dir.join(name).is_file()));
    assert!(!hub.asked().iter().any(|one| one.path.ends_with("/b")), "{:?}", hub.asked());
    // Nothing is missing the second time.
    let num_asked = hub.asked().len();
    place.load_with(&hub, HubWeights::Ends).unwrap();
    assert_eq!(hub.asked().len(), num_asked);
}

#[test]
fn hostile_names_in_an_index_are_refused() {
    for name in
        ["../../../../evil", "/tmp/evil", "..\\evil", "a/evil", "..", "", "evil?x", "evil%2f"]
    {
        let place = Place::new();
        let hub = Server::start(move |asked| {
            let index = "model.safetensors.index.json";
            if asked.path.starts_with("/api/") {
                let siblings = [CONFIG, "tokenizer.json", index];
                let siblings = siblings.map(|name| serde_json::json!({ "rfilename": name }));
                return info(&serde_json::json!({ "sha": COMMIT, "siblings": siblings }));
            }
            if !asked.path.ends_with(index) {
                return honest(asked);
            }
            let weights = serde_json::json!({ "weight_map": { "a": name } });
            info(&weights).with("etag", "index").with("x-repo-commit", COMMIT)
        });
        place.load_fails(&hub, &["org/tiny"]);
        let files = place.files();
        assert!(!files.iter().any(|name| name.contains("evil")), "{files:?}");
        assert!(!hub.asked().iter().any(|one| one.path.contains("evil")), "{:?}", hub.asked());
    }
}

#[test]
fn an_endless_list_of_files_ends_in_an_error() {
    let hub = Server::start(|_| Answer { body: vec![b' '; 16_000_001], ..Answer::new(200) });
    Place::new().load_fails(&hub, &["longer than 16 MB"]);
    let hub = Server::start(|_| Answer { body: vec![b'['; 1 << 20], ..Answer::new(200) });
    Place::new().load_fails(&hub, &["/api/models/org/tiny/revision/main`"]);
}

/// Cuts a response's body to `num_bytes`, while `content-length` still names the full length.
fn cut(mut answer: Answer, num_bytes: usize) -> Answer {
    let promised = answer.body.len();
    answer.body.truncate(num_bytes);
    answer.with("content-length", promised.to_string())
}

#[test]
fn a_download_that_breaks_off_is_continued_even_if_the_server_ignores_where() {
    for ignores in [false, true] {
        let hub = Server::start(move |asked| match (asked.is("GET", WEIGHTS), asked.nth) {
            (true, 0) => cut(honest(asked), 10),
            (true, _) if ignores => honest(&Asked { start: None, ..asked.clone() }),
            _ => honest(asked),
        });
        let place = Place::new();
        place.holds_the_model(&place.load(&hub).unwrap());
        let is_weights = |one: &Asked| one.is("GET", WEIGHTS);
        let starts: Vec<_> =
            hub.asked().into_iter().filter(is_weights).map(|one| one.start).collect();
        assert_eq!(starts, [None, Some(10)]);
    }
}

#[test]
fn a_part_that_does_not_fit_the_answer_is_begun_anew() {
    let other_range = |asked: &Asked| match asked.start {
        Some(_) => honest(asked).with("content-range", "bytes 3-44/45"),
        None => honest(asked),
    };
    let other_length = |asked: &Asked| match asked.start {
        Some(_) => honest(asked).with("content-range", "bytes 10-99/100"),
        None => honest(asked),
    };
    let refuses = |asked: &Asked| match asked.start {
        Some(_) => Answer::new(416),
        None => honest(asked),
    };
    let answers: [fn(&Asked) -> Answer; 3] = [other_range, other_length, refuses];
    for answer in answers {
        let (place, hub) = (Place::new(), Server::start(answer));
        let tag = tag_of(WEIGHTS).replace('"', "");
        let part = place.model().join("blobs").join(format!("{tag}.part"));
        draftsmith_files::write_whole(&part, &FILES[2].1[..10]).unwrap();
        place.holds_the_model(&place.load(&hub).unwrap());
    }
    // A partial file that is longer than the Hub's file is downloaded again, too.
    let ignores = |asked: &Asked| honest(&Asked { start: None, ..asked.clone() });
    let answers: [fn(&Asked) -> Answer; 2] = [refuses, ignores];
    for answer in answers {
        let (place, hub) = (Place::new(), Server::start(answer));
        let tag = tag_of(CONFIG).replace('"', "");
        let part = place.model().join("blobs").join(format!("{tag}.part"));
        draftsmith_files::write_whole(&part, "longer than the configuration is").unwrap();
        place.holds_the_model(&place.load(&hub).unwrap());
    }
}

#[test]
fn failures_are_tried_four_times() {
    let hub = Server::start(|asked| match asked.is("GET", WEIGHTS) {
        true => cut(honest(asked), 0),
        false => honest(asked),
    });
    let place = Place::new();
    place.load_fails(&hub, &["`model.safetensors`"]);
    assert_eq!(hub.asked().iter().filter(|one| one.is("GET", WEIGHTS)).count(), 4);
    for (status, text) in [(401, "denies access"), (403, "denies access"), (404, "no such model")] {
        let hub = Server::start(move |asked| match asked.is("HEAD", WEIGHTS) {
            true => Answer::new(status),
            false => honest(asked),
        });
        Place::new().load_fails(&hub, &["`model.safetensors`", text, "hint: "]);
        assert_eq!(hub.asked().iter().filter(|one| one.is("HEAD", WEIGHTS)).count(), 1);
    }
}

#[test]
fn downloads_side_by_side_receive_each_file_once() {
    let together = Barrier::new(4);
    let hub = Server::start(move |asked| {
        if asked.is("HEAD", CONFIG) {
            together.wait();
        }
        honest(asked)
    });
    let place = Place::new();
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(|| place.load(&hub))).collect();
        all.into_iter().for_each(|one| place.holds_the_model(&one.join().unwrap().unwrap()));
    });
    for (name, _) in FILES {
        assert_eq!(hub.asked().iter().filter(|one| one.is("GET", name)).count(), 1, "{name}");
    }
}
