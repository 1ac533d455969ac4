//! The pickle of a state dictionary, limited to what `torch.save` writes: names and tensors.
//!
//! A pickle is a program for a stack machine, and Python's runs any function that it names. This
//! one builds numbers, texts, tuples, lists, dictionaries and tensors, and refuses everything else
//! with its name. Containers are in a table and referenced by index, so a pickle cannot nest deeply
//! or grow beyond its length.

use std::collections::HashMap;

use safetensors::Dtype;

/// A tensor that a pickle describes.
#[derive(Debug, Clone)]
pub(super) struct TorchTensor {
    /// The name of its storage in the archive.
    pub(super) storage: String,
    pub(super) dtype: Dtype,
    /// Index of its first number in the storage.
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
}

#[derive(Debug, Clone)]
enum Value {
    None,
    /// A boolean or float, which tensors do not need.
    Other,
    Int(i64),
    Text(usize),
    /// Index into `sequences`.
    Sequence(usize),
    /// Index into `dicts`.
    Dict(usize),
    Global(Global),
    /// A storage's type, and the index of its name in `texts`.
    Storage(Dtype, usize),
    /// Index into `tensors`.
    Tensor(usize),
}

/// What a pickle may name.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Dtype),
}

impl Global {
    fn of(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Self::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Self::RebuildParameter,
            ("torch", "FloatStorage") => Self::Storage(Dtype::F32),
            ("torch", "HalfStorage") => Self::Storage(Dtype::F16),
            ("torch", "BFloat16Storage") => Self::Storage(Dtype::BF16),
            ("torch", "DoubleStorage") => Self::Storage(Dtype::F64),
            ("torch", "LongStorage") => Self::Storage(Dtype::I64),
            ("torch", "IntStorage") => Self::Storage(Dtype::I32),
            ("torch", "ShortStorage") => Self::Storage(Dtype::I16),
            ("torch", "CharStorage") => Self::Storage(Dtype::I8),
            ("torch", "ByteStorage") => Self::Storage(Dtype::U8),
            ("torch", "BoolStorage") => Self::Storage(Dtype::BOOL),
            _ => return None,
        })
    }
}

#[derive(Default)]
struct Machine<'a> {
    rest: &'a [u8],
    stack: Vec<Value>,
    /// Marked stack lengths.
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
    texts: Vec<String>,
    sequences: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
    tensors: Vec<TorchTensor>,
}

/// The tensors of a state dictionary with their names.
pub(super) fn tensors(pickle: &[u8]) -> Result<Vec<(String, TorchTensor)>, String> {
    let mut machine = Machine { rest: pickle, ..Machine::default() };
    let Value::Dict(all) = machine.run()? else {
        return Err("it does not hold a dictionary of tensors".to_owned());
    };
    let mut tensors = Vec::with_capacity(machine.dicts[all].len());
    for (name, value) in &machine.dicts[all] {
        let Value::Text(name) = name else {
            return Err("a tensor's name is not a text".to_owned());
        };
        let name = machine.texts[*name].clone();
        let Value::Tensor(tensor) = value else {
            return Err(format!("its `{name}` is not a tensor, so it is not a state dictionary"));
        };
        tensors.push((name, machine.tensors[*tensor].clone()));
    }
    Ok(tensors)
}

impl Machine<'_> {
    fn run(&mut self) -> Result<Value, String> {
        loop {
            let [op] = self.bytes()?;
            match op {
                // PROTO and FRAME, which need no action.
                0x80 => drop(self.bytes::<1>()?),
                0x95 => drop(self.bytes::<8>()?),
                b'.' => return self.pop(),
                b'(' => self.marks.push(self.stack.len()),
                b'N' => self.stack.push(Value::None),
                0x88 | 0x89 => self.stack.push(Value::Other),
                b'G' => {
                    self.bytes::<8>()?;
                    self.stack.push(Value::Other);
                }
                b'J' => {
                    let int = i32::from_le_bytes(self.bytes()?);
                    self.stack.push(Value::Int(int.into()));
                }
                b'K' | b'M' => {
                    let int = self.uint(if op == b'K' { 1 } else { 2 })?;
                    self.stack.push(Value::Int(int.into()));
                }
                0x8a => self.long()?,
                b'X' | 0x8c => {
                    let len = self.uint(if op == b'X' { 4 } else { 1 })?;
                    self.text(len as usize)?;
                }
                b'}' => self.new_dict(),
                b']' | b')' => self.new_sequence(Vec::new()),
                b't' | 0x85..=0x87 => {
                    let values = self.items((op != b't').then(|| usize::from(op - 0x84)))?;
                    self.new_sequence(values);
                }
                b'a' | b'e' => {
                    let values = self.items((op == b'a').then_some(1))?;
                    let Some(Value::Sequence(list)) = self.stack.last() else {
                        return Err("it appends to a value that is not a list".to_owned());
                    };
                    self.sequences[*list].extend(values);
                }
                b's' | b'u' => {
                    let values = self.items((op == b's').then_some(2))?;
                    self.set_items(values)?;
                }
                b'q' | b'r' => {
                    let place = self.uint(if op == b'q' { 1 } else { 4 })?;
                    self.remember(place)?;
                }
                0x94 => self.remember(self.memo.len() as u32)?,
                b'h' | b'j' => {
                    let place = self.uint(if op == b'h' { 1 } else { 4 })?;
                    let value =
                        self.memo.get(&place).ok_or("it recalls a value it never stored")?;
                    self.stack.push(value.clone());
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.global(&module, &name)?;
                }
                0x93 => {
                    let (name, module) = (self.pop_text()?, self.pop_text()?);
                    self.global(&module, &name)?;
                }
                b'Q' => self.storage()?,
                b'R' => self.call()?,
                // BUILD sets a dictionary's attributes (`_metadata`), which do not concern tensors.
                b'b' => {
                    self.pop()?;
                    if !matches!(self.stack.last(), Some(Value::Dict(_))) {
                        let problem = "it sets attributes of a value that is not a dictionary";
                        return Err(problem.to_owned());
                    }
                }
                other => {
                    return Err(format!(
                        "its pickle has the instruction {other:#04x}, which state dictionaries do \
                         not need"
                    ));
                }
            }
        }
    }

    fn bytes<const NUM: usize>(&mut self) -> Result<[u8; NUM], String> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or_else(cut_short)?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// An unsigned number of up to four bytes.
    fn uint(&mut self, len: usize) -> Result<u32, String> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or_else(cut_short)?;
        self.rest = rest;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte)))
    }

    /// A signed number of up to eight bytes.
    fn long(&mut self) -> Result<(), String> {
        let [len] = self.bytes()?;
        let (bytes, rest) = self.rest.split_at_checked(len.into()).ok_or_else(cut_short)?;
        self.rest = rest;
        if bytes.len() > 8 {
            return Err("it has a number of more than 64 bits".to_owned());
        }
        let fill = if bytes.last().is_some_and(|last| *last >= 0x80) { 0xff } else { 0 };
        let mut all = [fill; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        self.stack.push(Value::Int(i64::from_le_bytes(all)));
        Ok(())
    }

    fn text(&mut self, len: usize) -> Result<(), String> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or_else(cut_short)?;
        self.rest = rest;
        let text = str::from_utf8(bytes).map_err(|_| "a text is not UTF-8".to_owned())?;
        self.texts.push(text.to_owned());
        self.stack.push(Value::Text(self.texts.len() - 1));
        Ok(())
    }

    fn line(&mut self) -> Result<String, String> {
        let end = self.rest.iter().position(|byte| *byte == b'\n').ok_or_else(cut_short)?;
        let (line, rest) = self.rest.split_at(end);
        self.rest = &rest[1..];
        Ok(String::from_utf8_lossy(line).into_owned())
    }

    fn pop(&mut self) -> Result<Value, String> {
        self.stack.pop().ok_or_else(underflow)
    }

    fn pop_text(&mut self) -> Result<String, String> {
        match self.pop()? {
            Value::Text(text) => Ok(self.texts[text].clone()),
            _ => Err("a name is not a text".to_owned()),
        }
    }

    /// Pops the last `num` values; `None` for all since the last mark.
    fn items(&mut self, num: Option<usize>) -> Result<Vec<Value>, String> {
        let start = match num {
            Some(num) => self.stack.len().checked_sub(num),
            None => self.marks.pop(),
        };
        let start = start.filter(|start| *start <= self.stack.len());
        Ok(self.stack.split_off(start.ok_or_else(underflow)?))
    }

    fn new_dict(&mut self) {
        self.dicts.push(Vec::new());
        self.stack.push(Value::Dict(self.dicts.len() - 1));
    }

    fn new_sequence(&mut self, values: Vec<Value>) {
        self.sequences.push(values);
        self.stack.push(Value::Sequence(self.sequences.len() - 1));
    }

    fn set_items(&mut self, values: Vec<Value>) -> Result<(), String> {
        let Some(Value::Dict(dict)) = self.stack.last() else {
            return Err("it sets items of a value that is not a dictionary".to_owned());
        };
        let dict = &mut self.dicts[*dict];
        let mut values = values.into_iter();
        while let Some(key) = values.next() {
            dict.push((key, values.next().ok_or_else(underflow)?));
        }
        Ok(())
    }

    fn remember(&mut self, place: u32) -> Result<(), String> {
        let value = self.stack.last().ok_or_else(underflow)?;
        self.memo.insert(place, value.clone());
        Ok(())
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), String> {
        let Some(global) = Global::of(module, name) else {
            return Err(format!("its pickle names `{module}.{name}`, but only tensors are read"));
        };
        self.stack.push(Value::Global(global));
        Ok(())
    }

    /// Pops a tuple's values.
    fn pop_tuple(&mut self) -> Result<Vec<Value>, String> {
        match self.pop()? {
            Value::Sequence(values) => Ok(self.sequences[values].clone()),
            _ => Err("arguments are not a tuple".to_owned()),
        }
    }

    /// `('storage', type, name, device, length)`, a reference to bytes in the archive.
    fn storage(&mut self) -> Result<(), String> {
        match self.pop_tuple()?.as_slice() {
            [Value::Text(_), Value::Global(Global::Storage(dtype)), Value::Text(name), ..] => {
                self.stack.push(Value::Storage(*dtype, *name));
                Ok(())
            }
            _ => Err("a reference is not to a storage".to_owned()),
        }
    }

    fn call(&mut self) -> Result<(), String> {
        let arguments = self.pop_tuple()?;
        let Value::Global(function) = self.pop()? else {
            return Err("it calls a value that is not a function".to_owned());
        };
        match (function, arguments.as_slice()) {
            (Global::OrderedDict, []) => self.new_dict(),
            (Global::RebuildParameter, [tensor @ Value::Tensor(_), ..]) => {
                self.stack.push(tensor.clone());
            }
            (
                Global::RebuildTensor,
                [
                    Value::Storage(dtype, storage),
                    Value::Int(offset),
                    Value::Sequence(shape),
                    Value::Sequence(strides),
                    ..,
                ],
            ) => {
                let offset = size(&Value::Int(*offset))?;
                let shape = self.sizes(*shape)?;
                if !is_contiguous(&shape, &self.sizes(*strides)?) {
                    return Err("a tensor is not contiguous; hint: save it again after \
                                `.contiguous()`"
                        .to_owned());
                }
                let (dtype, storage) = (*dtype, self.texts[*storage].clone());
                self.tensors.push(TorchTensor { storage, dtype, offset, shape });
                self.stack.push(Value::Tensor(self.tensors.len() - 1));
            }
            (function, _) => return Err(format!("it calls {function:?} with other arguments")),
        }
        Ok(())
    }

    fn sizes(&self, sequence: usize) -> Result<Vec<usize>, String> {
        self.sequences[sequence].iter().map(size).collect()
    }
}

fn size(value: &Value) -> Result<usize, String> {
    match value {
        Value::Int(int) => usize::try_from(*int).map_err(|_| format!("a size is {int}")),
        _ => Err("a size is not a number".to_owned()),
    }
}

/// Whether numbers are stored row by row. The stride of a dimension of size 1 does not matter.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut step = Some(1_usize);
    let row_by_row = shape.iter().zip(strides).rev().all(|(dim, stride)| {
        let is_next = *dim == 1 || step == Some(*stride);
        step = step.and_then(|step| step.checked_mul(*dim));
        is_next
    });
    shape.len() == strides.len() && (row_by_row || shape.contains(&0))
}

fn underflow() -> String {
    "its pickle takes more values than there are".to_owned()
}

fn cut_short() -> String {
    "its pickle is cut short".to_owned()
}
