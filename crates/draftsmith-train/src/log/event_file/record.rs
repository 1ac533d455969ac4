//! The records of an event file: TensorFlow's record format, with one `Event` message per record.
//!
//! A record is the length of its data (u64), the length's checksum (u32), the data, and its checksum
//! (u32), all little-endian. The checksum is CRC-32C, masked because the data may contain checksums. The
//! messages have the fields of tensorflow's `event.proto` and `summary.proto` that are written here.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(oneof = "EventContent", tags = "3, 5, 7")]
    pub(super) content: Option<EventContent>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum EventContent {
    /// The first event of a file.
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// The numbers of one step.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) values: Vec<Value>,
}

/// A named number.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
}

/// The start of a session: readers discard what they have read from its step on.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLog {
    #[prost(enumeration = "SessionStatus", tag = "1")]
    pub(super) status: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
pub(super) enum SessionStatus {
    Unspecified = 0,
    Start = 1,
}

/// The bytes before a record's data.
const HEADER: usize = 12;
/// The bytes after it.
const FOOTER: usize = 4;

/// Encodes an event as a record.
pub(super) fn encode(event: &Event) -> Vec<u8> {
    let data = event.encode_to_vec();
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(HEADER + data.len() + FOOTER);
    record.extend(length);
    record.extend(masked_checksum(&length).to_le_bytes());
    record.extend(&data);
    record.extend(masked_checksum(&data).to_le_bytes());
    record
}

/// Decodes the first event of `bytes`, and returns it with the length of its record. `None` if `bytes`
/// does not begin with a complete record.
pub(super) fn decode(bytes: &[u8]) -> Option<(Event, usize)> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let (length_checksum, rest) = rest.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*length_checksum) != masked_checksum(length) {
        return None;
    }
    let (data, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let (checksum, _) = rest.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*checksum) != masked_checksum(data) {
        return None;
    }
    Some((Event::decode(data).ok()?, HEADER + data.len() + FOOTER))
}

fn masked_checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(step: i64, content: EventContent) -> Event {
        Event { wall_time: 1.5, step, content: Some(content) }
    }

    /// Compares with bytes from TensorBoard 2.21's writer:
    /// ```python
    /// from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    /// from tensorboard.compat.proto.summary_pb2 import Summary
    /// from tensorboard.summary.writer.record_writer import RecordWriter
    /// V = Summary.Value
    /// with open("golden", "wb") as f:
    ///     for event in (
    ///         Event(wall_time=1.5, file_version="brain.Event:2"),
    ///         Event(wall_time=1.5, step=3, session_log=SessionLog(status=SessionLog.START)),
    ///         Event(wall_time=1.5, step=300, summary=Summary(value=[
    ///             V(tag="train/loss", simple_value=0.25),
    ///             V(tag="train/learning_rate", simple_value=0.0)])),
    ///     ):
    ///         RecordWriter(f).write(event.SerializeToString())
    /// print(open("golden", "rb").read().hex())
    /// ```
    #[test]
    fn the_bytes_equal_those_of_tensorboards_writer() {
        let golden = "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a32\
                      2a28646c0f000000000000006d532b0909000000000000f83f10033a020801ec8612fc3d\
                      000000000000006049f1ec09000000000000f83f10ac022a2f0a110a0a747261696e2f6c\
                      6f7373150000803e0a1a0a13747261696e2f6c6561726e696e675f726174651500000000\
                      b3ac6c38";
        let value = |tag: &str, value| Value { tag: tag.to_owned(), simple_value: Some(value) };
        let values = vec![value("train/loss", 0.25), value("train/learning_rate", 0.0)];
        let events = [
            event(0, EventContent::FileVersion("brain.Event:2".to_owned())),
            event(3, EventContent::SessionLog(SessionLog { status: SessionStatus::Start.into() })),
            event(300, EventContent::Summary(Summary { values })),
        ];
        let bytes: Vec<u8> = events.iter().flat_map(encode).collect();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, golden);
        let mut rest = &bytes[..];
        for event in events {
            let (found, length) = decode(rest).unwrap();
            assert_eq!(found, event);
            rest = &rest[length..];
        }
        assert!(decode(rest).is_none());
    }

    #[test]
    fn a_truncated_or_changed_record_is_rejected() {
        let record = encode(&event(7, EventContent::FileVersion("brain.Event:2".to_owned())));
        assert!(decode(&record).is_some());
        for length in 0..record.len() {
            assert!(decode(&record[..length]).is_none(), "{length} bytes");
            let mut changed = record.clone();
            changed[length] ^= 1;
            assert!(decode(&changed).is_none(), "byte {length}");
        }
    }
}
