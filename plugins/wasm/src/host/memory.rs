//! Memory of a plugin as host functions see it: every pointer and every length is a claim until it was checked here.

use std::ops::Range;

use wasmtime::Caller;

use super::abi::{Answer, Fail, Status};
use super::state::State;

/// Fuel per host function, in instructions: the cost of crossing the border, so that a loop of calls ends as soon as a
/// loop of additions.
const CALL_FUEL: u64 = 100;
/// Bytes that are copied for one unit of fuel.
const BYTES_PER_FUEL: u64 = 8;

/// One host function at work: the plugin's memory and the host's state of the machine.
pub(super) struct Guest<'a, 'b> {
    caller: &'a mut Caller<'b, State>,
}

impl<'a, 'b> Guest<'a, 'b> {
    /// Begins a host function and charges its fuel.
    pub(super) fn enter(caller: &'a mut Caller<'b, State>) -> Result<Self, Fail> {
        let mut guest = Self { caller };
        guest.charge(CALL_FUEL)?;
        Ok(guest)
    }

    /// State that the host keeps of the machine.
    pub(super) fn state(&mut self) -> &mut State {
        self.caller.data_mut()
    }

    /// Takes fuel; a lack of it stops the plugin.
    fn charge(&mut self, fuel: u64) -> Result<(), Fail> {
        let left = self.caller.get_fuel()?;
        let Some(rest) = left.checked_sub(fuel) else {
            self.caller.set_fuel(0)?;
            return Err(Fail::Trap(wasmtime::Trap::OutOfFuel.into()));
        };
        Ok(self.caller.set_fuel(rest)?)
    }

    /// Copies the bytes that the plugin points at.
    pub(super) fn read(&mut self, pointer: u32, size: u32) -> Result<Vec<u8>, Fail> {
        let range = self.checked(pointer, size)?;
        self.charge(u64::from(size) / BYTES_PER_FUEL)?;
        Ok(self.memory()?[range].to_vec())
    }

    /// Checks that a range lies in the plugin's memory.
    pub(super) fn check(&mut self, pointer: u32, size: u32) -> Answer {
        self.checked(pointer, size).map(drop)
    }

    /// Copies the text that the plugin points at.
    pub(super) fn read_text(&mut self, pointer: u32, size: u32) -> Result<String, Fail> {
        String::from_utf8(self.read(pointer, size)?).map_err(|_| Status::BadArgument.into())
    }

    /// Reads a little-endian number.
    pub(super) fn read_word(&mut self, pointer: u32) -> Result<u32, Fail> {
        let range = self.checked(pointer, 4)?;
        let four = self.memory()?[range].try_into().map_err(|_| Status::InvalidMemoryAccess)?;
        Ok(u32::from_le_bytes(four))
    }

    /// Writes bytes where the plugin points.
    pub(super) fn write(&mut self, pointer: u32, bytes: &[u8]) -> Answer {
        let size = u32::try_from(bytes.len()).map_err(|_| Status::InternalFailure)?;
        let range = self.checked(pointer, size)?;
        self.charge(u64::from(size) / BYTES_PER_FUEL)?;
        self.memory()?[range].copy_from_slice(bytes);
        Ok(())
    }

    /// Writes a little-endian number.
    pub(super) fn write_word(&mut self, pointer: u32, word: u32) -> Answer {
        self.write(pointer, &word.to_le_bytes())
    }

    /// Hands bytes over in memory from the plugin's own allocator, and writes their address and size. No bytes need no
    /// memory: then the pointer is 0. The AssemblyScript kit, where it has no settings, passes their size in place of
    /// the address of the size: nothing is written at address 0, and the kit gets an empty block, which it reads
    /// whatever size it remembers.
    pub(super) fn give(&mut self, bytes: &[u8], pointer_out: u32, size_out: u32) -> Answer {
        let size = u32::try_from(bytes.len()).map_err(|_| Status::InternalFailure)?;
        // Before anything is allocated, so that a wrong place to write to leaks nothing.
        self.checked(pointer_out, 4)?;
        self.checked(size_out, 4)?;
        if size == 0 && size_out == 0 {
            let pointer = match self.allocate(0) {
                Err(Fail::Told(_)) => 0,
                pointer => pointer?,
            };
            return self.write_word(pointer_out, pointer);
        }
        let pointer = if size == 0 { 0 } else { self.allocate(size)? };
        self.write(pointer, bytes)?;
        self.write_word(pointer_out, pointer)?;
        self.write_word(size_out, size)
    }

    fn allocate(&mut self, size: u32) -> Result<u32, Fail> {
        let allocate = self.state().allocate.clone().ok_or(Status::InternalFailure)?;
        match allocate.call(&mut *self.caller, size)? {
            0 => Err(Status::InternalFailure.into()),
            pointer => Ok(pointer),
        }
    }

    fn checked(&mut self, pointer: u32, size: u32) -> Result<Range<usize>, Fail> {
        let end = u64::from(pointer) + u64::from(size);
        if end > self.memory()?.len() as u64 {
            return Err(Status::InvalidMemoryAccess.into());
        }
        Ok(pointer as usize..end as usize)
    }

    fn memory(&mut self) -> Result<&mut [u8], Fail> {
        let memory = self.caller.data().memory.ok_or(Status::InvalidMemoryAccess)?;
        Ok(memory.data_mut(&mut *self.caller))
    }
}
