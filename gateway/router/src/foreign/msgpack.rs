//! Subset of MessagePack that KV events need: one pass over borrowed bytes, without building values and without trusting sizes.
//! <https://github.com/msgpack/msgpack/blob/master/spec.md>

use super::ForeignError;

/// Deepest nesting of values that are skipped.
const DEPTH_MAX: usize = 16;

/// Cursor over the bytes of a message that reads MessagePack values in order.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Bytes left: an upper bound of the elements of any collection.
    pub(super) fn left(&self) -> usize {
        self.bytes.len()
    }

    fn peek(&self) -> Result<u8, ForeignError> {
        self.bytes.first().copied().ok_or(ForeignError::Short)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], ForeignError> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or(ForeignError::Short)?;
        self.bytes = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, ForeignError> {
        Ok(self.take(1)?[0])
    }

    /// A big-endian number of `count` bytes, at most 8.
    fn number(&mut self, count: usize) -> Result<u64, ForeignError> {
        Ok(self.take(count)?.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }

    fn length(&mut self, count: usize) -> Result<usize, ForeignError> {
        usize::try_from(self.number(count)?).map_err(|_| ForeignError::Range)
    }

    /// Whether the next value is nil; a nil is consumed.
    pub(super) fn nil(&mut self) -> Result<bool, ForeignError> {
        let is_nil = self.peek()? == 0xc0;
        if is_nil {
            self.byte()?;
        }
        Ok(is_nil)
    }

    /// Whether the next value is an array.
    pub(super) fn is_array(&self) -> Result<bool, ForeignError> {
        Ok(matches!(self.peek()?, 0x90..=0x9f | 0xdc | 0xdd))
    }

    /// Whether the next value is bytes or text.
    pub(super) fn is_blob(&self) -> Result<bool, ForeignError> {
        Ok(matches!(self.peek()?, 0xa0..=0xbf | 0xc4..=0xc6 | 0xd9..=0xdb))
    }

    /// Reads an array's head: its number of elements.
    pub(super) fn array(&mut self) -> Result<usize, ForeignError> {
        let count = match self.byte()? {
            small @ 0x90..=0x9f => usize::from(small & 0x0f),
            0xdc => self.length(2)?,
            0xdd => self.length(4)?,
            other => return Err(ForeignError::Type(other)),
        };
        self.holds(count)
    }

    /// Reads a map's head: its number of pairs.
    pub(super) fn map(&mut self) -> Result<usize, ForeignError> {
        let count = match self.byte()? {
            small @ 0x80..=0x8f => usize::from(small & 0x0f),
            0xde => self.length(2)?,
            0xdf => self.length(4)?,
            other => return Err(ForeignError::Type(other)),
        };
        self.holds(count)
    }

    /// Checks that a collection of `count` elements can be complete: each takes at least a byte.
    fn holds(&self, count: usize) -> Result<usize, ForeignError> {
        if count > self.left() { Err(ForeignError::Short) } else { Ok(count) }
    }

    /// Reads bytes or text: both come as bytes, and text is not checked for UTF-8.
    pub(super) fn blob(&mut self) -> Result<&'a [u8], ForeignError> {
        let count = match self.byte()? {
            small @ 0xa0..=0xbf => usize::from(small & 0x1f),
            0xc4 | 0xd9 => self.length(1)?,
            0xc5 | 0xda => self.length(2)?,
            0xc6 | 0xdb => self.length(4)?,
            other => return Err(ForeignError::Type(other)),
        };
        self.take(count)
    }

    /// Reads an integer; a negative one as its two's complement.
    pub(super) fn integer(&mut self) -> Result<u64, ForeignError> {
        Ok(match self.byte()? {
            small @ 0x00..=0x7f => u64::from(small),
            small @ 0xe0..=0xff => small.cast_signed() as i64 as u64,
            0xcc => self.number(1)?,
            0xcd => self.number(2)?,
            0xce => self.number(4)?,
            0xcf | 0xd3 => self.number(8)?,
            0xd0 => (self.number(1)? as u8).cast_signed() as i64 as u64,
            0xd1 => (self.number(2)? as u16).cast_signed() as i64 as u64,
            0xd2 => (self.number(4)? as u32).cast_signed() as i64 as u64,
            other => return Err(ForeignError::Type(other)),
        })
    }

    pub(super) fn u32(&mut self) -> Result<u32, ForeignError> {
        u32::try_from(self.integer()?).map_err(|_| ForeignError::Range)
    }

    /// Skips one value of any type.
    pub(super) fn skip(&mut self) -> Result<(), ForeignError> {
        self.skip_within(DEPTH_MAX)
    }

    fn skip_within(&mut self, depth: usize) -> Result<(), ForeignError> {
        let depth = depth.checked_sub(1).ok_or(ForeignError::Deep)?;
        match self.peek()? {
            0x90..=0x9f | 0xdc | 0xdd => {
                let count = self.array()?;
                (0..count).try_for_each(|_| self.skip_within(depth))
            }
            0x80..=0x8f | 0xde | 0xdf => {
                let count = self.map()?;
                (0..count).try_for_each(|_| self.skip_within(depth).and_then(|()| self.skip_within(depth)))
            }
            0xa0..=0xbf | 0xc4..=0xc6 | 0xd9..=0xdb => self.blob().map(drop),
            0x00..=0x7f | 0xe0..=0xff | 0xcc..=0xcf | 0xd0..=0xd3 => self.integer().map(drop),
            0xc0 | 0xc2 | 0xc3 => self.byte().map(drop),
            0xca => self.take(5).map(drop),
            0xcb => self.take(9).map(drop),
            other => Err(ForeignError::Type(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_every_width() {
        for (bytes, value) in [
            (&[0x7f][..], 127),
            (&[0xff], u64::MAX),
            (&[0xcc, 200], 200),
            (&[0xcd, 1, 0], 256),
            (&[0xce, 0, 1, 0, 0], 65_536),
            (&[0xcf, 0xff, 0, 0, 0, 0, 0, 0, 1], 0xff00_0000_0000_0001),
            (&[0xd3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe], u64::MAX - 1),
            (&[0xd0, 0xfe], u64::MAX - 1),
        ] {
            assert_eq!(Reader::new(bytes).integer(), Ok(value), "{bytes:x?}");
        }
        assert_eq!(Reader::new(&[0xcf, 1]).integer(), Err(ForeignError::Short));
        assert_eq!(Reader::new(&[0xc0]).integer(), Err(ForeignError::Type(0xc0)));
    }

    #[test]
    fn a_collection_that_cannot_be_there_is_not_believed() {
        assert_eq!(Reader::new(&[0xdd, 0xff, 0xff, 0xff, 0xff, 0]).array(), Err(ForeignError::Short));
        assert_eq!(Reader::new(&[0xdf, 0, 0, 0, 9, 0]).map(), Err(ForeignError::Short));
        assert_eq!(Reader::new(&[0x91; 40]).skip(), Err(ForeignError::Deep));
        assert_eq!(Reader::new(&[0x82, 0xa1, b'a', 0xc3, 0xc4, 1, 0, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0]).skip(), Ok(()));
    }
}
