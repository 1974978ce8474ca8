//! Shared data and queues.

use crate::host::abi::{Answer, Fail, Status};
use crate::host::memory::Guest;

/// Longest name of a value or a queue, in bytes.
const NAME_BYTES_MAX: u32 = 1 << 10;

fn read_name(guest: &mut Guest<'_, '_>, name: u32, size: u32) -> Result<Vec<u8>, Fail> {
    if size > NAME_BYTES_MAX {
        return Err(Status::BadArgument.into());
    }
    guest.read(name, size)
}

pub(super) fn set(guest: &mut Guest<'_, '_>, key: u32, size: u32, value: u32, value_size: u32, cas: u32) -> Answer {
    let key = read_name(guest, key, size)?;
    let value = guest.read(value, value_size)?;
    Ok(guest.state().shared.set(key, value, cas)?)
}

pub(super) fn get(guest: &mut Guest<'_, '_>, key: u32, size: u32, out: u32, out_size: u32, out_cas: u32) -> Answer {
    let key = read_name(guest, key, size)?;
    let (value, cas) = guest.state().shared.get(&key).ok_or(Status::NotFound)?;
    guest.write_word(out_cas, cas)?;
    guest.give(&value, out, out_size)
}

pub(super) fn register(guest: &mut Guest<'_, '_>, name: u32, size: u32, out: u32) -> Answer {
    let name = read_name(guest, name, size)?;
    guest.write_word(out, 0)?;
    let state = guest.state();
    let queue = state.shared.register_queue(&name)?;
    if !state.queues.contains(&queue) {
        state.queues.push(queue);
    }
    guest.write_word(out, queue)
}

pub(super) fn resolve(guest: &mut Guest<'_, '_>, vm: u32, vm_size: u32, name: u32, size: u32, out: u32) -> Answer {
    let vm = read_name(guest, vm, vm_size)?;
    let name = read_name(guest, name, size)?;
    let state = guest.state();
    // Queues of other machines' ids are not to be seen: who shares an id shares its queues.
    if !vm.is_empty() && vm != state.identity.vm_id.as_bytes() {
        return Err(Status::NotFound.into());
    }
    let queue = state.shared.resolve_queue(&name).ok_or(Status::NotFound)?;
    guest.write_word(out, queue)
}

pub(super) fn enqueue(guest: &mut Guest<'_, '_>, queue: u32, value: u32, value_size: u32) -> Answer {
    let value = guest.read(value, value_size)?;
    Ok(guest.state().shared.enqueue(queue, value)?)
}

pub(super) fn dequeue(guest: &mut Guest<'_, '_>, queue: u32, out: u32, out_size: u32) -> Answer {
    // The destination is checked first: an item that cannot be handed over must not be lost.
    guest.write_word(out, 0)?;
    guest.write_word(out_size, 0)?;
    let item = guest.state().shared.dequeue(queue)?;
    guest.give(&item, out, out_size)
}
