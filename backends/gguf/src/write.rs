//! Writing of GGUF files (version 3), for tests: keys and tensors in the order in which they are added.

use crate::Value;

/// A GGUF file in the making.
#[derive(Clone, Debug, Default)]
pub struct Writer {
    keys: Vec<u8>,
    keys_count: u64,
    infos: Vec<u8>,
    infos_count: u64,
    data: Vec<u8>,
}

const ALIGNMENT: usize = 32;

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Writer {
    /// Adds a key. Integers are written as u32 where they fit, as i64 where not; lists of integers as i32, floats as f32.
    ///
    /// # Panics
    /// For [`Value::Nested`], which has no contents.
    pub fn key(&mut self, name: &str, value: &Value) -> &mut Self {
        let out = &mut self.keys;
        put_text(out, name);
        let list = |out: &mut Vec<u8>, kind: u32, count: usize| {
            out.extend(9u32.to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend((count as u64).to_le_bytes());
        };
        match value {
            Value::Integer(number) => match u32::try_from(*number) {
                Ok(number) => out.extend([4u32.to_le_bytes(), number.to_le_bytes()].concat()),
                Err(_) => {
                    out.extend(11u32.to_le_bytes());
                    out.extend((*number as i64).to_le_bytes());
                }
            },
            Value::Float(number) => out.extend([6u32.to_le_bytes(), (*number as f32).to_le_bytes()].concat()),
            Value::Bool(flag) => {
                out.extend(7u32.to_le_bytes());
                out.push(u8::from(*flag));
            }
            Value::Text(text) => {
                out.extend(8u32.to_le_bytes());
                put_text(out, text);
            }
            Value::Texts(texts) => {
                list(out, 8, texts.len());
                texts.iter().for_each(|text| put_text(out, text));
            }
            Value::Integers(numbers) => {
                list(out, 5, numbers.len());
                numbers.iter().for_each(|number| out.extend((*number as i32).to_le_bytes()));
            }
            Value::Floats(numbers) => {
                list(out, 6, numbers.len());
                numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
            }
            Value::Nested => panic!("a list of lists cannot be written"),
        }
        self.keys_count += 1;
        self
    }

    /// Adds a tensor: its shape, outermost dimension first, the number of its type, and its data.
    pub fn tensor(&mut self, name: &str, shape: &[u64], kind: u32, bytes: &[u8]) -> &mut Self {
        put_text(&mut self.infos, name);
        self.infos.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|dim| self.infos.extend(dim.to_le_bytes()));
        self.infos.extend(kind.to_le_bytes());
        self.infos.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        self.infos_count += 1;
        self
    }

    /// The bytes of the file.
    pub fn finish(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.infos_count.to_le_bytes());
        out.extend(self.keys_count.to_le_bytes());
        out.extend(&self.keys);
        out.extend(&self.infos);
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(&self.data);
        out
    }
}
