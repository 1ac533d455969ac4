//! The forms of prompt records and the meaning of their keys.

use serde_json::Value;

use super::Turn;
use super::given_tokens::{has_tokens, read_tokens};
use super::record::{Keys, Problem, Result, kind};
use crate::chat_template::Message;

/// A prompt without id and source.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) category: Option<String>,
    pub(super) turns: Vec<Turn>,
    pub(super) system: Option<String>,
}

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MessageRole {
    System,
    User,
    Assistant,
    Tool,
}

/// The keys and roles of a list of messages in one form.
#[derive(Clone, Copy)]
struct Dialect {
    list: &'static str,
    role: &'static str,
    text: &'static str,
    roles: &'static [(&'static str, MessageRole)],
    expected_roles: &'static str,
    /// Whether truncated conversations, which begin with an answer or lack a user text, are
    /// allowed.
    may_be_truncated: bool,
}

/// The form of ShareGPT. The answers in its published files come from several assistants.
const SHARE_GPT: Dialect = Dialect {
    list: "conversations",
    role: "from",
    text: "value",
    roles: &[
        ("human", MessageRole::User),
        ("user", MessageRole::User),
        ("gpt", MessageRole::Assistant),
        ("assistant", MessageRole::Assistant),
        ("chatgpt", MessageRole::Assistant),
        ("model", MessageRole::Assistant),
        ("bing", MessageRole::Assistant),
        ("bard", MessageRole::Assistant),
        ("system", MessageRole::System),
    ],
    expected_roles: "`human`, `gpt` or `system`",
    may_be_truncated: true,
};

const CHAT: Dialect = Dialect {
    list: "messages",
    role: "role",
    text: "content",
    roles: &[
        ("user", MessageRole::User),
        ("assistant", MessageRole::Assistant),
        ("system", MessageRole::System),
        ("tool", MessageRole::Tool),
    ],
    expected_roles: "`user`, `assistant`, `system` or `tool`",
    may_be_truncated: false,
};

/// The keys that identify the form of a record, from the richest to the plainest.
pub(super) const KEYS: [&str; 6] =
    ["conversations", "messages", "turns", "instruction", "question", "prompt"];

/// Reads a record in any known form; `None` for a conversation without a user text that was
/// truncated.
///
/// The keys are tried from the richest to the plainest, because sets with conversations often
/// repeat the beginning as `prompt`. Token ids are read if `keeps_tokens`.
pub(super) fn read_record(record: &Value, keeps_tokens: bool) -> Result<Option<Content>> {
    if let Some(key) = media(record) {
        return Err(Problem::key(key, "is beside the text, and only text is read"));
    }
    let Value::Object(record) = record else {
        return Err(Problem::Unknown(format!("no keys (it is {})", kind(record))));
    };
    let one_turn = |user: String, response| {
        Ok(Some(Content {
            category: category(record),
            turns: vec![Turn { user, response, ..Turn::default() }],
            system: system_beside(record)?,
        }))
    };
    for list in [SHARE_GPT.list, CHAT.list] {
        if let Some(messages) = record.get(list) {
            return read_conversation(record, &dialect_of(list, messages));
        }
    }
    if record.contains_key("turns") {
        read_turns(record).map(Some)
    } else if record.contains_key("instruction") {
        let mut user = user_text(record, "instruction")?;
        // Dolly's `context` is what Alpaca calls `input`.
        for key in ["input", "context"] {
            if let Some(input) = optional_text(record, key)? {
                user = format!("{user}\nInput: {input}");
            }
        }
        one_turn(user, response(record, "output")?)
    } else if record.contains_key("question") {
        let question = user_text(record, "question")?;
        match record.get("choices") {
            None | Some(Value::Null) => {
                let context = optional_text(record, "context")?;
                let question = match context {
                    Some(context) => format!("{context}\n{question}"),
                    None => question,
                };
                one_turn(question, response(record, "answer")?)
            }
            Some(_) => {
                let (user, answer) = multiple_choice(record, &question)?;
                one_turn(user, answer)
            }
        }
    } else if record.contains_key("prompt") {
        let mut content = one_turn(user_text(record, "prompt")?, response(record, "response")?)?;
        if keeps_tokens && has_tokens(record) {
            let tokens = read_tokens(record)?;
            let turns = content.iter_mut().flat_map(|content| &mut content.turns);
            turns.for_each(|turn| turn.tokens = Some(tokens.clone()));
        }
        Ok(content)
    } else {
        Err(Problem::Unknown(list_keys(record)))
    }
}

/// The keys of an answer in the plain forms.
pub(super) const RESPONSE_KEYS: [&str; 4] = ["response", "answer", "output", "completion"];

/// Reads the answer of a record in a plain form: the form's own key, or else one of another form.
fn response(record: &Keys, own: &str) -> Result<Option<String>> {
    let keys = [own].into_iter().chain(RESPONSE_KEYS);
    for key in keys {
        // A number or a truth value is an answer too.
        let found = match record.get(key) {
            Some(value @ (Value::Number(_) | Value::Bool(_))) => Some(value.to_string()),
            _ => optional_text(record, key)?,
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Returns the form of a list of messages, by the keys of the first one. Either list may have the
/// messages of the other form.
fn dialect_of(list: &'static str, messages: &Value) -> Dialect {
    let first = messages.as_array().and_then(|messages| messages.first());
    let has = |key: &str| first.is_some_and(|message| message.get(key).is_some());
    let own = if list == CHAT.list { CHAT } else { SHARE_GPT };
    let other = if list == CHAT.list { SHARE_GPT } else { CHAT };
    let is_other = has(other.role) && !has(own.role);
    Dialect { list, ..if is_other { other } else { own } }
}

/// Finds the id in a record, a number or a string, if there is one.
pub(super) fn own_id(record: &Value) -> Option<Value> {
    let keys = ["question_id", "task_id", "id"].into_iter();
    keys.filter_map(|key| record.get(key)).find(|id| id.is_number() || id.is_string()).cloned()
}

/// Formats a multiple-choice question as in MMLU (Hendrycks et al. 2021): the question, one line
/// per choice, and `Answer:`. The response is a letter; `answer` may also be an index.
fn multiple_choice(record: &Keys, question: &str) -> Result<(String, Option<String>)> {
    let choices = array(record, "choices")?;
    let letters: Vec<char> = ('A'..='Z').take(choices.len()).collect();
    if choices.is_empty() || letters.len() < choices.len() {
        let problem = format!("has {} texts, it must have 1 to 26", choices.len());
        return Err(Problem::key("choices", problem));
    }
    let mut user = question.to_owned();
    for (n, (letter, choice)) in letters.iter().zip(choices).enumerate() {
        user += &format!("\n{letter}. {}", string(choice, &format!("choices[{n}]"))?);
    }
    user += "\nAnswer:";
    let Some(index) = record.get("answer").filter(|answer| answer.is_number()) else {
        return Ok((user, optional_text(record, "answer")?));
    };
    let letter = index.as_u64().and_then(|index| letters.get(usize::try_from(index).ok()?));
    let letter = letter.ok_or_else(|| {
        Problem::key("answer", format!("is {index}, but there are {} choices", choices.len()))
    })?;
    Ok((user, Some(letter.to_string())))
}

/// Reads Spec-Bench's form: a list of user texts.
fn read_turns(record: &Keys) -> Result<Content> {
    let texts = array(record, "turns")?;
    if texts.is_empty() {
        return Err(Problem::key("turns", "is empty: a user text is needed"));
    }
    let turns = texts
        .iter()
        .enumerate()
        .map(|(n, text)| {
            let key = format!("turns[{n}]");
            let user = non_empty(string(text, &key)?, &key)?;
            Ok(Turn { user, ..Turn::default() })
        })
        .collect::<Result<_>>()?;
    Ok(Content { category: category(record), turns, system: system_beside(record)? })
}

/// Reads the system text that a record has beside the prompt. OpenOrca has `system_prompt`, other
/// sets `system`.
fn system_beside(record: &Keys) -> Result<Option<String>> {
    let system = optional_text(record, "system_prompt")?;
    Ok(system.or(optional_text(record, "system")?))
}

/// The keys of images and other media beside a text.
pub(super) const MEDIA_KEYS: &str = "image images image_path image_paths image_url image_urls video videos video_path \
                                     audio audios audio_path";

/// The keys of a record or a message that change what a model reads or writes, and that prompts do
/// not keep.
const UNRENDERED_KEYS: &str = "functions function_call reasoning_content reasoning thinking";

/// Reads a record's own variables of the chat template.
pub(super) fn arguments(record: &Value) -> Result<Keys> {
    const OWN: &str = "chat_template_kwargs";
    let mut arguments = match record.get(OWN) {
        None | Some(Value::Null) => Keys::new(),
        Some(Value::Object(own)) => own.clone(),
        Some(other) => {
            return Err(Problem::key(OWN, format!("is {}, it must be an object", kind(other))));
        }
    };
    if is_given(record, "tools") {
        // Tables have the list as a text of JSON.
        let tools = match &record["tools"] {
            Value::String(text) => serde_json::from_str(text).map_err(|error| {
                Problem::key("tools", format!("is a text that is not JSON: {error}"))
            })?,
            tools => tools.clone(),
        };
        arguments.insert("tools".to_owned(), tools);
    }
    Ok(arguments)
}

/// Returns whether a key has a value that is not empty.
fn is_given(record: &Value, key: &str) -> bool {
    match record.get(key) {
        Some(Value::String(text)) => !text.trim().is_empty(),
        Some(Value::Array(values)) => !values.is_empty(),
        Some(Value::Object(keys)) => !keys.is_empty(),
        _ => false,
    }
}

/// Yields a record and its messages.
fn parts(record: &Value) -> impl Iterator<Item = &Value> {
    let lists = [SHARE_GPT.list, CHAT.list].into_iter().filter_map(|list| record.get(list));
    [record].into_iter().chain(lists.filter_map(Value::as_array).flatten())
}

/// Returns the keys of a record and its messages that are given and that its prompt does not keep.
pub(super) fn unrendered(record: &Value) -> impl Iterator<Item = &'static str> {
    let is_in_it = |key: &&str| parts(record).any(|part| is_given(part, key));
    UNRENDERED_KEYS.split(' ').filter(is_in_it)
}

/// Returns the key of a record's first image, video or sound, without which its text is another prompt.
pub(super) fn media(record: &Value) -> Option<&'static str> {
    // A text may be a list of parts, each with its type.
    let of_texts = parts(record).filter_map(|part| part.get(CHAT.text)?.as_array()).flatten();
    let all: Vec<&Value> = parts(record).chain(of_texts).collect();
    let has_type =
        |part: &Value, key: &str| part["type"].as_str().is_some_and(|it| it.contains(key));
    let is_in = |key: &&str| {
        all.iter().any(|part| is_given(part, key)) || all[1..].iter().any(|it| has_type(it, key))
    };
    MEDIA_KEYS.split(' ').find(is_in)
}

fn read_conversation(record: &Keys, dialect: &Dialect) -> Result<Option<Content>> {
    let mut system = None;
    let mut turns: Vec<Turn> = Vec::new();
    let mut answered = true;
    for (n, message) in array(record, dialect.list)?.iter().enumerate() {
        let role_key = format!("{}[{n}].{}", dialect.list, dialect.role);
        let text_key = format!("{}[{n}].{}", dialect.list, dialect.text);
        let role = read_role(message, &role_key, dialect)?;
        let calls = calls(message);
        let text = match message.get(dialect.text) {
            // An answer that only calls tools has no text.
            None | Some(Value::Null) if !calls.is_empty() => String::new(),
            _ if role == MessageRole::Tool => String::new(),
            _ => read_text(message, &text_key, dialect)?,
        };
        let mut refuse = None;
        match role {
            MessageRole::System if n > 0 => {
                refuse = Some("is a system text after the conversation began: put it first");
            }
            // An empty text counts: it replaces the default of a chat template.
            MessageRole::System => system = Some(text),
            MessageRole::User if !answered => {
                refuse = Some("is a second user text in a row: put an answer between them");
            }
            MessageRole::User => {
                let user = non_empty(text, &text_key)?;
                turns.push(Turn { user, ..Turn::default() });
                answered = false;
            }
            MessageRole::Assistant => match turns.last_mut() {
                Some(turn) if !answered => {
                    turn.response = Some(text).filter(|text| !text.trim().is_empty());
                    turn.calls = calls;
                    answered = true;
                }
                Some(_) => {
                    refuse = Some("is a second answer in a row: put a user text between them");
                }
                None if dialect.may_be_truncated => {}
                None => refuse = Some("is an answer before any user text"),
            },
            MessageRole::Tool => match turns.last_mut() {
                Some(turn) if !answered && !turn.results.is_empty() => {
                    turn.results.push(result(message, dialect));
                }
                Some(turn) if answered && !turn.calls.is_empty() => {
                    let results = vec![result(message, dialect)];
                    turns.push(Turn { results, ..Turn::default() });
                    answered = false;
                }
                _ => refuse = Some("is a tool's result, but follows no `tool_calls`"),
            },
        }
        if let Some(problem) = refuse {
            return Err(Problem::key(role_key, problem));
        }
    }
    if let Some(beside) = system_beside(record)? {
        if system.as_ref().is_some_and(|system| *system != beside) {
            let problem =
                format!("differs from the system text beside `{}`: keep one", dialect.list);
            return Err(Problem::key(format!("{}[0]", dialect.list), problem));
        }
        system = Some(beside);
    }
    match (turns.is_empty(), dialect.may_be_truncated) {
        (false, _) => Ok(Some(Content { category: category(record), turns, system })),
        (true, true) => Ok(None),
        (true, false) => Err(Problem::key(dialect.list, "has no user message")),
    }
}

/// Returns the keys of a message that calls tools; empty without calls.
fn calls(message: &Value) -> Keys {
    let (name, mut keys) = ("tool_calls", Keys::new());
    if is_given(message, name) {
        keys.insert(name.to_owned(), message[name].clone());
        if message.get(CHAT.text).is_some_and(Value::is_null) {
            keys.insert(CHAT.text.to_owned(), Value::Null);
        }
    }
    keys
}

/// Reads a message with a tool's result, whose keys all reach the chat template.
fn result(message: &Value, dialect: &Dialect) -> Message {
    let mut keys = message.as_object().cloned().unwrap_or_default();
    keys.shift_remove(dialect.role);
    Message { role: "tool".to_owned(), keys, ..Message::default() }
}

fn read_role(message: &Value, key: &str, dialect: &Dialect) -> Result<MessageRole> {
    let name = string(present(message.get(dialect.role), key)?, key)?;
    let known = dialect.roles.iter().find(|(known, _)| *known == name);
    known.map(|&(_, role)| role).ok_or_else(|| {
        Problem::key(key, format!("is `{name}`, it must be {}", dialect.expected_roles))
    })
}

/// Reads a message's text: a string, or a list of `{"type": "text", "text": …}` parts.
fn read_text(message: &Value, key: &str, dialect: &Dialect) -> Result<String> {
    match present(message.get(dialect.text), key)? {
        Value::Array(parts) => parts
            .iter()
            .enumerate()
            .map(|(n, part)| {
                let key = format!("{key}[{n}].text");
                string(present(part.get("text"), &key)?, &key)
            })
            .collect(),
        text => string(text, key),
    }
}

fn category(record: &Keys) -> Option<String> {
    record.get("category")?.as_str().map(ToOwned::to_owned)
}

fn user_text(record: &Keys, key: &str) -> Result<String> {
    non_empty(string(present(record.get(key), key)?, key)?, key)
}

/// Reads the text under `key`; `None` if it is missing, null or blank.
fn optional_text(record: &Keys, key: &str) -> Result<Option<String>> {
    match record.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => Ok(Some(string(value, key)?).filter(|text| !text.trim().is_empty())),
    }
}

fn array<'a>(record: &'a Keys, key: &str) -> Result<&'a Vec<Value>> {
    let value = present(record.get(key), key)?;
    value
        .as_array()
        .ok_or_else(|| Problem::key(key, format!("is {}, it must be an array", kind(value))))
}

fn present<'a>(value: Option<&'a Value>, key: &str) -> Result<&'a Value> {
    value.ok_or_else(|| Problem::key(key, "is missing"))
}

fn string(value: &Value, key: &str) -> Result<String> {
    value
        .as_str()
        .map(ToOwned::to_owned)
        .ok_or_else(|| Problem::key(key, format!("is {}, it must be a string", kind(value))))
}

fn non_empty(text: String, key: &str) -> Result<String> {
    if text.trim().is_empty() {
        return Err(Problem::key(key, "is empty: a user text is needed"));
    }
    Ok(text)
}

pub(super) fn list_keys(record: &Keys) -> String {
    if record.is_empty() {
        return "no keys".to_owned();
    }
    let keys: Vec<_> = record.keys().map(|key| format!("`{key}`")).collect();
    format!("keys {}", keys.join(", "))
}
