//! The hidden states of a faithful mock of vLLM with `ExampleHiddenStatesConnector`: what is refused,
//! with a message that says why, and what is innocent.

use std::fs::File;
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};

use half::bf16;

use super::*;
use crate::loopback::{Request, read_request};

const LAYERS: usize = 3;
const WIDTH: usize = 4;
const VOCABULARY: usize = 50;
const IDS: [u32; 6] = [3, 14, 15, 9, 2, 6];

/// Changes the header and the data of a file.
type ChangeFile = fn(&mut Value, &mut Vec<u8>);
/// Changes an answer.
type ChangeAnswer = fn(&mut Value);

/// What the mock does with a request.
#[derive(Default)]
struct Mock {
    /// Changes the answer.
    answer: Option<ChangeAnswer>,
    /// Changes the header and the data before the file is written.
    file: Option<ChangeFile>,
    /// Changes the file after it was written.
    after: Option<fn(&Path)>,
    /// The type of the states: `F32` if empty.
    dtype: &'static str,
    writes_nothing: bool,
    keeps_lock: bool,
    /// The pause between the answer and the file.
    pause: Duration,
}

/// The state of layer `layer` at a token, exact in all formats.
fn state(layer: usize, position: usize, at: usize) -> f32 {
    (layer * 100 + position * 10 + at) as f32 / 4.0 - 8.0
}

/// Serves one directory, whose name on the server is `/data/states`.
fn serve(dir: &Path, mock: Mock) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/v1", listener.local_addr().expect("it is bound"));
    let dir = dir.to_owned();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let _ = stream.and_then(|stream| meet(stream, &dir, number, &mock));
        }
    });
    url
}

fn meet(mut stream: TcpStream, dir: &Path, number: usize, mock: &Mock) -> std::io::Result<()> {
    let Request { body, .. } = read_request(&stream)?;
    assert_eq!((body["max_tokens"].as_u64(), body["temperature"].as_f64()), (Some(1), Some(0.0)));
    let ids: Vec<u32> = serde_json::from_value(body["prompt"].clone()).expect("token ids");
    let name = format!("cmpl-{number}-0-1a2b3c4d.safetensors");
    let path = dir.join(&name);
    let lock = File::create(dir.join(format!("{name}.lock")))?;
    lock.lock()?;
    let mut answer = json!({
        "system_fingerprint": "vllm-0.32.0-1a2b",
        "kv_transfer_params": { "hidden_states_path": format!("/data/states/{name}") },
        "choices": [{
            "index": 0, "token_ids": [7], "prompt_token_ids": ids, "text": "x", "finish_reason": "length",
            "logprobs": {
                "tokens": ["token_id:7"], "token_logprobs": [-0.5],
                "top_logprobs": [{ "token_id:7": -0.5, "token_id:8": -1.5 }],
            },
        }],
    });
    if body["prompt_logprobs"].is_number() {
        let of_token = |id: &u32| json!({ id.to_string(): { "logprob": -0.25, "rank": 1 } });
        let mut all: Vec<Value> = ids.iter().map(of_token).collect();
        all[0] = Value::Null;
        answer["choices"][0]["prompt_logprobs"] = json!(all);
    }
    if let Some(change) = mock.answer {
        change(&mut answer);
    }
    let answer = answer.to_string();
    let head =
        format!("HTTP/1.1 200 X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", answer.len());
    stream.write_all(format!("{head}{answer}").as_bytes())?;
    drop(stream);
    std::thread::sleep(mock.pause);
    if !mock.writes_nothing {
        write_states(&path, &ids, mock)?;
    }
    if let Some(change) = mock.after {
        change(&path);
    }
    if mock.keeps_lock {
        std::mem::forget(lock);
    }
    Ok(())
}

fn write_states(path: &Path, ids: &[u32], mock: &Mock) -> std::io::Result<()> {
    let dtype = if mock.dtype.is_empty() { "F32" } else { mock.dtype };
    let mut data: Vec<u8> = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
    let num_ids = data.len();
    for position in 0..ids.len() {
        for layer in 0..LAYERS {
            for at in 0..WIDTH {
                let value = state(layer, position, at);
                match dtype {
                    "BF16" => data.extend(bf16::from_f32(value).to_le_bytes()),
                    "F16" => data.extend(half::f16::from_f32(value).to_le_bytes()),
                    _ => data.extend(value.to_le_bytes()),
                }
            }
        }
    }
    let mut header = json!({
        "token_ids": { "dtype": "I64", "shape": [ids.len()], "data_offsets": [0, num_ids] },
        "hidden_states": {
            "dtype": dtype, "shape": [ids.len(), LAYERS, WIDTH], "data_offsets": [num_ids, data.len()],
        },
    });
    if let Some(change) = mock.file {
        change(&mut header, &mut data);
    }
    let header = header.to_string();
    let mut file = File::create(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    file.write_all(&data)
}

fn recipe(url: &str, dir: &Path) -> ServerRecipe {
    let states = StatesRecipe {
        dirs: vec![dir.to_owned()],
        server_dirs: vec!["/data/states".into()],
        proof: 1,
        keep: KeptIn::Disk,
    };
    ServerRecipe { states: Some(states), retries: 1, timeout_s: 0.5, ..servers(&[url]) }
}

fn fetch(dir: &Path, mock: Mock) -> Result<ServedStates, String> {
    let recipe = recipe(&serve(dir, mock), dir);
    recipe.check().expect("a recipe");
    let hints = ServerHints::OF_RECIPE;
    let client = StatesClient::new(&recipe, Secret::default(), VOCABULARY, hints).expect("a table");
    let ask = StatesAsk { id: "a#0", ids: &IDS, num_layers: LAYERS, width: WIDTH, is_proof: true };
    client.fetch(ask).map_err(|error| error.to_string())
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("it is there");
    entries.map(|entry| entry.expect("reads").file_name().into_string().expect("UTF-8")).collect()
}

#[test]
fn states_come_by_layer_in_every_type_and_their_files_are_deleted() {
    let innocents = [
        Mock { dtype: "BF16", ..Mock::default() },
        Mock { dtype: "F16", ..Mock::default() },
        Mock { pause: Duration::from_millis(150), ..Mock::default() },
        Mock { answer: Some(|answer| answer["more"] = json!([1])), ..Mock::default() },
        Mock { file: Some(|header, _| header["__metadata__"] = json!({})), ..Mock::default() },
        Mock {
            answer: Some(|answer| answer["system_fingerprint"] = Value::Null),
            ..Mock::default()
        },
    ];
    for mock in [Mock::default()].into_iter().chain(innocents) {
        let dir = tempfile::tempdir().expect("a directory");
        let dtype = mock.dtype;
        let found = fetch(dir.path(), mock).expect("states");
        assert_eq!(found.layers.len(), LAYERS);
        for (layer, own) in found.layers.iter().enumerate() {
            let place = |nth: usize| state(layer, nth / WIDTH, nth % WIDTH);
            assert_eq!(*own, (0..IDS.len() * WIDTH).map(place).collect::<Vec<f32>>());
        }
        let expected = match dtype {
            "BF16" => StatesDtype::Bf16,
            "F16" => StatesDtype::F16,
            _ => StatesDtype::F32,
        };
        assert_eq!(found.dtype, expected);
        // The token at each position is predicted by the position before.
        let positions: Vec<usize> = found.known.iter().map(|(position, _)| *position).collect();
        assert_eq!(positions, [0, 1, 2, 3, 4, 5]);
        assert_eq!((&found.known[0].1[..], found.known[5].1.len()), (&[(14, -0.25)][..], 2));
        assert_eq!(names(dir.path()), [""; 0], "only we delete");
    }
}

#[test]
fn files_of_another_form_are_refused_and_left() {
    let faults: [(ChangeFile, &str); 13] = [
        (|_, data| data.truncate(data.len() - 1), "its header describes"),
        (|_, data| data.push(0), "its header describes"),
        (|_, data| data.resize(1 << 20, 0), "take at most"),
        (|header, _| header["more"] = json!({}), "the further tensor `more`"),
        (|header, _| *header = json!([1]), "not safetensors'"),
        (|header, _| header["pad"] = json!("x".repeat(65_400)), "its header has"),
        (|header, _| header["hidden_states"]["shape"][0] = json!(1_u64 << 60), "has the shape"),
        (|header, _| header["hidden_states"]["shape"] = json!([6, 2, 6]), "has the shape"),
        // The rows of a cached prefix are missing.
        (|header, _| header["hidden_states"]["shape"][0] = json!(2), "has the shape [2,"),
        (
            |header, _| header["hidden_states"]["dtype"] = json!("F8_E4M3"),
            "has the type \"F8_E4M3\"",
        ),
        (|header, _| header["token_ids"]["data_offsets"] = json!([8, 56]), "one after the other"),
        (|_, data| data[8] = 1, "its token 1 is not the one that was sent"),
        (
            |header, _| drop(header.as_object_mut().expect("a map").remove("token_ids")),
            "no tensor `token_ids`",
        ),
    ];
    for (fault, expected) in faults {
        let dir = tempfile::tempdir().expect("a directory");
        let message =
            fetch(dir.path(), Mock { file: Some(fault), dtype: "F16", ..Mock::default() });
        let message = message.expect_err("refused");
        assert!(message.contains(expected) && message.contains("row `a#0`"), "{message}");
        assert_eq!(names(dir.path()).len(), 2, "{expected}: the file and its lock");
    }
}

#[test]
fn answers_and_paths_that_nobody_asked_for_are_refused() {
    let faults: [(ChangeAnswer, &str); 13] = [
        (|it| it["kv_transfer_params"] = Value::Null, "does not extract hidden states"),
        (
            |it| it["kv_transfer_params"]["hidden_states_path"] = json!("/etc/passwd"),
            "no plain file name in `/data/states`",
        ),
        (
            |it| {
                let path = "/data/states/../x.safetensors";
                it["kv_transfer_params"]["hidden_states_path"] = json!(path);
            },
            "no plain file name",
        ),
        (
            |it| {
                let path = "/data/states/a/x.safetensors";
                it["kv_transfer_params"]["hidden_states_path"] = json!(path);
            },
            "no plain file name",
        ),
        (
            |it| it["kv_transfer_params"]["hidden_states_path"] = json!("/data/states/x.lock"),
            "no plain file name",
        ),
        (|it| it["system_fingerprint"] = json!("vllm-0.30.1-ab"), "is vLLM 0.30"),
        (|it| it["choices"] = json!([]), "0 choices"),
        (|it| it["choices"] = json!([it["choices"][0], it["choices"][0]]), "2 choices"),
        (|it| it["choices"][0]["prompt_token_ids"] = json!([1]), "other prompt tokens"),
        (|it| it["choices"][0]["token_ids"] = json!([1, 2]), "2 token ids"),
        (|it| it["choices"][0]["logprobs"] = Value::Null, "no log-probabilities"),
        (|it| it["choices"][0]["prompt_logprobs"] = json!([null]), "of 1 tokens instead of 6"),
        (
            |it| it["choices"][0]["prompt_logprobs"][1] = json!({ "99": { "logprob": -1.0 } }),
            "beyond the target's 50",
        ),
    ];
    for (fault, expected) in faults {
        let dir = tempfile::tempdir().expect("a directory");
        let message = fetch(dir.path(), Mock { answer: Some(fault), ..Mock::default() });
        let message = message.expect_err("refused");
        assert!(message.contains(expected), "{message}");
        assert!(!names(dir.path()).is_empty(), "nothing is deleted");
    }
}

#[test]
fn locks_links_and_missing_files_end_with_a_message() {
    let faults = [
        (Mock { writes_nothing: true, ..Mock::default() }, "wrote no file"),
        (Mock { keeps_lock: true, ..Mock::default() }, "stayed locked for 500ms"),
        (
            Mock {
                after: Some(|path| {
                    let real = path.with_extension("real");
                    std::fs::rename(path, &real).expect("renames");
                    symlink(&real, path).expect("links");
                }),
                ..Mock::default()
            },
            "is not a regular file",
        ),
        (
            Mock {
                writes_nothing: true,
                after: Some(|path| std::fs::create_dir(path).expect("creates")),
                ..Mock::default()
            },
            "is not a regular file",
        ),
        (
            Mock {
                after: Some(|path| {
                    File::create(path).expect("opens").set_len(4 << 30).expect("sparse")
                }),
                ..Mock::default()
            },
            "it has 4.3 GB",
        ),
    ];
    for (mock, expected) in faults {
        let dir = tempfile::tempdir().expect("a directory");
        let message = fetch(dir.path(), mock).expect_err("refused");
        assert!(message.contains(expected), "{message} for {expected}");
        assert!(!names(dir.path()).is_empty(), "nothing is deleted");
    }
}

#[test]
fn the_table_has_an_absolute_directory_for_each_server() {
    let urls = ["http://a/v1", "http://b/v1"];
    let states = |dirs: &[&str], server_dirs: &[&str], proof| StatesRecipe {
        dirs: dirs.iter().map(PathBuf::from).collect(),
        server_dirs: server_dirs.iter().map(PathBuf::from).collect(),
        proof,
        keep: KeptIn::Disk,
    };
    let check = |states| ServerRecipe { states: Some(states), ..servers(&urls) }.check();
    check(states(&["/a", "/b"], &[], 1)).expect("a table");
    for (states, expected) in [
        (
            states(&["/a"], &[], 1),
            "`data.server.states.dirs` has 1 entries, expected one for each of the 2",
        ),
        (
            states(&["/a", "b"], &[], 1),
            "`data.server.states.dirs` has `b`, expected an absolute path",
        ),
        (states(&["/a", "/b"], &["/c"], 1), "`data.server.states.server_dirs` has 1 entries"),
        (states(&["/a", "/b"], &[], 0), "`data.server.states.proof` is 0"),
    ] {
        let message = check(states).expect_err("refused").to_string();
        assert!(message.contains(expected), "{message}");
    }
}
