//! Models by their name on the Hub, from the cache and from a test Hub that redirects, breaks off, stalls,
//! sends damaged files and names files outside the cache.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Place, Ran, model};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const WEIGHTS: &str = "model.safetensors";

/// A Hub's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Weights come from another host.
    Redirects,
    /// Weights have a tag that leads out of the cache, from the first request on or only where they are sent.
    Escapes,
    EscapesLater,
    /// The first response with weights ends in the middle.
    BreaksOff,
    /// Weights never come.
    Stalls,
    /// A byte of the weights is wrong.
    Damages,
    /// Every request is denied.
    Refuses,
}

/// A Hub with one model, `org/tiny`, and the requests so far: of the Hub and of the other host.
struct Hub {
    address: String,
    asked: Arc<Mutex<Vec<String>>>,
    asked_elsewhere: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn start(fault: Fault) -> Self {
        let files = std::fs::read_dir(model("draft-small")).unwrap();
        let mut files: BTreeMap<String, Vec<u8>> = files
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name().into_string().unwrap(), entry.path()))
            .map(|(name, path)| (name, std::fs::read(path).unwrap()))
            .collect();
        files.insert("modeling_tiny.py".to_owned(), b"raise SystemExit".to_vec());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let asked_elsewhere = Arc::new(Mutex::new(Vec::new()));
        let mut served = Served { files, fault, elsewhere: None, asked: asked_elsewhere.clone() };
        served.elsewhere = Some(served.clone().start());
        let address = Served { asked: asked.clone(), ..served }.start();
        Self { address, asked, asked_elsewhere }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

#[derive(Clone)]
struct Served {
    files: BTreeMap<String, Vec<u8>>,
    fault: Fault,
    /// The address of the other host, if this is the Hub.
    elsewhere: Option<String>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Served {
    /// Listens on a port of its own and returns the address.
    fn start(self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let served = Arc::new(self);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let served = Arc::clone(&served);
                // A client that goes away is what some tests are about.
                std::thread::spawn(move || drop(served.answer(stream.unwrap())));
            }
        });
        address
    }

    fn answer(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut stream = stream;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let mut words = line.split(' ').map(str::to_owned);
            let (method, path) = (words.next().unwrap(), words.next().unwrap_or_default());
            let (mut range, mut token) = (None, String::new());
            loop {
                let mut header = String::new();
                reader.read_line(&mut header)?;
                let header = header.trim();
                if header.is_empty() {
                    break;
                }
                let (name, value) = header.split_once(": ").unwrap();
                match name.to_ascii_lowercase().as_str() {
                    "range" => {
                        let (from, to) = value["bytes=".len()..].split_once('-').unwrap();
                        range = Some((from.parse().unwrap(), to.parse().ok()));
                    }
                    "authorization" => token = value.to_owned(),
                    _ => {}
                }
            }
            let num_before = {
                let mut asked = self.asked.lock().unwrap();
                asked.push(format!("{method} {path} {range:?} {token}"));
                let is_same = |one: &&String| one.starts_with(&format!("{method} {path} "));
                asked.iter().filter(is_same).count() - 1
            };
            self.answer_one(&mut stream, &method, &path, range, num_before == 0)?;
        }
    }

    fn answer_one(
        &self,
        stream: &mut TcpStream,
        method: &str,
        path: &str,
        range: Option<(usize, Option<usize>)>,
        is_first: bool,
    ) -> std::io::Result<()> {
        if self.fault == Fault::Refuses {
            return stream.write_all(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n");
        }
        if path == "/api/models/org/tiny/revision/main" {
            let siblings: Vec<_> =
                self.files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
            let text = serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string();
            let header = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", text.len());
            stream.write_all(header.as_bytes())?;
            return stream.write_all(text.as_bytes());
        }
        let name = path.rsplit('/').next().unwrap();
        let is_large = name == WEIGHTS;
        let Some(bytes) = self.files.get(name) else {
            return stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
        };
        let etag = match self.fault {
            Fault::Escapes if is_large => "../../../../../evil".to_owned(),
            Fault::EscapesLater if is_large && method == "GET" => "../../../../../evil".to_owned(),
            _ if is_large => sha256(bytes),
            _ => format!("etag-of-{}", name.replace('.', "-")),
        };
        let of_hub = format!("x-repo-commit: {COMMIT}\r\netag: \"{etag}\"\r\n");
        if let Some(elsewhere) = self.elsewhere.as_ref()
            && self.fault == Fault::Redirects
            && is_large
        {
            let header = format!(
                "HTTP/1.1 302 Found\r\nlocation: {elsewhere}/weights/{name}\r\n{of_hub}\
                 x-linked-size: {}\r\ncontent-length: 0\r\n\r\n",
                bytes.len()
            );
            return stream.write_all(header.as_bytes());
        }
        let is_body = method == "GET";
        if is_large && is_body && self.fault == Fault::Stalls {
            std::thread::sleep(Duration::from_secs(3600));
        }
        let (start, last) = range.unwrap_or((0, None));
        let last = last.unwrap_or(bytes.len() - 1);
        let mut part = bytes[start..=last].to_vec();
        let status = match range {
            None => "200 OK".to_owned(),
            Some(_) => {
                let length = bytes.len();
                format!("206 Partial Content\r\ncontent-range: bytes {start}-{last}/{length}")
            }
        };
        let header = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n{of_hub}\r\n", part.len());
        stream.write_all(header.as_bytes())?;
        if !is_body {
            return Ok(());
        }
        if is_large && self.fault == Fault::Damages {
            part[1000] ^= 1;
        }
        if is_large && self.fault == Fault::BreaksOff && is_first {
            stream.write_all(&part[..part.len() / 2])?;
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        stream.write_all(&part)
    }
}

fn sha256(bytes: &[u8]) -> String {
    draftsmith_data::hash_bytes(bytes)
}

/// Two tokens of `org/tiny`, with a cache of this place's own and this Hub.
fn generate(place: &Place, endpoint: &str, more: &[(&str, &str)]) -> Ran {
    let home = place.path("home");
    let mut env = vec![
        ("HF_HOME", home.to_str().unwrap()),
        ("HF_ENDPOINT", endpoint),
        ("HF_HUB_OFFLINE", "0"),
        ("HF_TOKEN", "secret"),
    ];
    env.extend(more);
    place.run_with(
        &["generate", "--target", "org/tiny", "--prompt", "2+2", "--max-new-tokens", "2"],
        &env,
    )
}

/// Where nobody listens.
fn nowhere() -> String {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    format!("http://{free}")
}

fn snapshot(place: &Place) -> PathBuf {
    place.path("home/hub/models--org--tiny/snapshots").join(COMMIT)
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_model_of_the_hub_is_downloaded_once_and_then_read_from_the_cache() {
    for fault in [Fault::None, Fault::Redirects, Fault::BreaksOff] {
        let (place, hub) = (Place::new(), Hub::start(fault));
        let dir = model("draft-small");
        let own = place.run(&[
            "generate",
            "--target",
            dir.to_str().unwrap(),
            "--prompt",
            "2+2",
            "--max-new-tokens",
            "2",
        ]);
        let downloaded = generate(&place, &hub.address, &[]);
        assert!(downloaded.stderr.contains("`org/tiny@main` is in"), "{}", downloaded.stderr);
        let text = own.ok();
        assert_eq!(downloaded.ok(), text, "{fault:?}");
        // Everything but code, with the same bytes.
        assert_eq!(names(&snapshot(&place)), names(&dir));
        for name in names(&dir) {
            assert_eq!(
                std::fs::read(snapshot(&place).join(&name)).unwrap(),
                std::fs::read(dir.join(&name)).unwrap()
            );
        }
        // The token goes to the Hub, and nowhere else.
        let has_token = |one: &String| one.ends_with("Bearer secret");
        assert!(hub.asked().iter().all(has_token), "{:?}", hub.asked());
        let elsewhere = hub.asked_elsewhere.lock().unwrap().clone();
        assert_eq!(elsewhere.len(), usize::from(fault == Fault::Redirects));
        assert!(!elsewhere.iter().any(has_token), "{elsewhere:?}");
        // A second run asks the Hub nothing, so it works without a network.
        let num_asked = hub.asked().len();
        assert_eq!(generate(&place, &hub.address, &[]).ok(), text);
        assert_eq!(hub.asked().len(), num_asked);
        assert_eq!(generate(&place, &nowhere(), &[("HF_HUB_OFFLINE", "1")]).ok(), text);
    }
}

#[test]
fn an_interrupted_download_resumes_where_it_ended() {
    let (place, hub) = (Place::new(), Hub::start(Fault::BreaksOff));
    generate(&place, &hub.address, &[]).ok();
    let of_weights: Vec<String> =
        hub.asked().into_iter().filter(|one| one.contains(WEIGHTS)).collect();
    let half = std::fs::metadata(model("draft-small").join(WEIGHTS)).unwrap().len() / 2;
    let resumed = format!(" Some(({half}, None)) ");
    assert!(of_weights.iter().any(|one| one.contains(&resumed)), "{of_weights:?}");
}

#[test]
fn without_a_network_it_fails_in_one_line() {
    let place = Place::new();
    let refused = generate(&place, &nowhere(), &[]);
    refused.fails_naming(&["`org/tiny@main` is not a directory", "hint: check the name"]);
    let offline = generate(&place, &nowhere(), &[("HF_HUB_OFFLINE", "1")]);
    offline.fails_naming(&["`org/tiny@main`", "`HF_HUB_OFFLINE` is set"]);
}

#[test]
fn a_stalled_download_is_abandoned_and_resumed() {
    let (place, hub) = (Place::new(), Hub::start(Fault::Stalls));
    let stuck = generate(&place, &hub.address, &[("HF_HUB_DOWNLOAD_TIMEOUT", "1")]);
    stuck.fails_naming(&["`org/tiny@main`", "received nothing for 1 s of `model.safetensors`"]);
    // The configuration alone does not count as the whole model.
    assert!(snapshot(&place).join("config.json").is_file());
    let hub = Hub::start(Fault::None);
    generate(&place, &hub.address, &[]).ok();
    assert!(!hub.asked().iter().any(|one| one.contains("config.json")), "{:?}", hub.asked());
}

#[test]
fn damaged_weights_are_not_kept() {
    let (place, hub) = (Place::new(), Hub::start(Fault::Damages));
    let refused = generate(&place, &hub.address, &[]);
    refused.fails_naming(&["`model.safetensors`", "download was damaged"]);
    assert!(!snapshot(&place).join(WEIGHTS).exists());
    generate(&place, &Hub::start(Fault::None).address, &[]).ok();
}

#[test]
fn a_hostile_hub_writes_nothing_outside_the_cache() {
    for fault in [Fault::Escapes, Fault::EscapesLater] {
        let (place, hub) = (Place::new(), Hub::start(fault));
        let refused = generate(&place, &hub.address, &[]);
        refused.fails_naming(&["`model.safetensors`", "`etag`", "../evil", "hint: "]);
        assert!(!snapshot(&place).join(WEIGHTS).exists());
        assert_eq!(names(&place.path("")), ["home"]);
        assert_eq!(names(&place.path("home")), ["hub"]);
        assert_eq!(names(&place.path("home/hub")), [".locks", "models--org--tiny"]);
    }
}

#[test]
fn denied_and_unknown_models_are_named() {
    let place = Place::new();
    let refused = generate(&place, &Hub::start(Fault::Refuses).address, &[]);
    refused.fails_naming(&["`org/tiny@main`", "denies access", "`HF_TOKEN`"]);
    let hub = Hub::start(Fault::None);
    let home = place.path("home");
    let env = [
        ("HF_HOME", home.to_str().unwrap()),
        ("HF_ENDPOINT", hub.address.as_str()),
        ("HF_HUB_OFFLINE", "0"),
    ];
    let arguments = ["generate", "--target", "org/other", "--prompt", "x"];
    place.run_with(&arguments, &env).fails_naming(&["`org/other@main`", "no such model"]);
}

#[test]
fn a_dry_run_downloads_only_the_configuration() {
    let (place, hub) = (Place::new(), Hub::start(Fault::None));
    place.write(
        "dry.toml",
        "models.target = 'org/tiny'\n[drafters.eagle]\nkind = 'eagle3'\nfeatures = 'cache'\n\
         [data]\nprompts = ['nowhere.jsonl']\nnum_prompts = 70\nmax_new_tokens = 50\n",
    );
    let home = place.path("home");
    let env = [
        ("HF_HOME", home.to_str().unwrap()),
        ("HF_ENDPOINT", &hub.address),
        ("HF_HUB_OFFLINE", "0"),
    ];
    let shown = place.run_with(&["run", "--dry", "dry.toml", "--json"], &env).json();
    assert_eq!(names(&snapshot(&place)), ["config.json"]);
    assert_eq!(shown["data"]["num_answer_tokens"], 70 * 50, "{shown}");
    // A later run still downloads the rest.
    generate(&place, &hub.address, &[]).ok();
    assert!(snapshot(&place).join(WEIGHTS).is_file());
}
