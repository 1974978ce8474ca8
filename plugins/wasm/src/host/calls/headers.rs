//! Host functions of headers and trailers. A missing map reads as empty; a map that can no longer be changed answers
//! `BAD_ARGUMENT`.
//!
//! The pseudo headers of a request cannot be written: its destination follows from its model.

use crate::host::abi::{Answer, Fail, MapKind, Status};
use crate::host::fields::Fields;
use crate::host::memory::Guest;

pub(super) fn size(guest: &mut Guest<'_, '_>, map: u32, out_size: u32) -> Answer {
    let size = guest.state().fields(MapKind::from_wire(map)?).map_or(0, Fields::encoded_size);
    guest.write_word(out_size, u32::try_from(size).unwrap_or(u32::MAX))
}

pub(super) fn get_all(guest: &mut Guest<'_, '_>, map: u32, out: u32, out_size: u32) -> Answer {
    let pairs = guest.state().fields(MapKind::from_wire(map)?).map(Fields::encode).unwrap_or_default();
    guest.give(&pairs, out, out_size)
}

/// Replaces all headers. A list without pseudo headers replaces the other headers; a list with pseudo headers must have
/// their present values.
pub(super) fn set_all(guest: &mut Guest<'_, '_>, map: u32, pairs: u32, size: u32) -> Answer {
    let kind = MapKind::from_wire(map)?;
    let mut wanted = Fields::decode(&guest.read(pairs, size)?)?;
    let fields = guest.state().fields_mut(kind)?;
    let mut whole = Fields::default();
    for (name, value) in fields.iter().filter(|(name, _)| name.starts_with(':')) {
        match wanted.get(name) {
            Some(other) if other != *value && is_fact(kind, name) => return Err(Status::BadArgument.into()),
            Some(other) => whole.push(name, other),
            None => whole.push(name, value.clone()),
        }
        wanted.remove(name);
    }
    for (name, value) in wanted.iter() {
        settable(kind, name)?;
        whole.add(name.as_bytes(), value.clone())?;
    }
    *fields = whole;
    Ok(())
}

pub(super) fn get(guest: &mut Guest<'_, '_>, map: u32, name: u32, size: u32, out: u32, out_size: u32) -> Answer {
    let kind = MapKind::from_wire(map)?;
    let name = guest.read_text(name, size)?;
    let value = guest.state().fields(kind).and_then(|fields| fields.get(&name)).ok_or(Status::NotFound)?;
    guest.give(&value, out, out_size)
}

pub(super) fn add(guest: &mut Guest<'_, '_>, map: u32, name: u32, size: u32, value: u32, value_size: u32) -> Answer {
    let kind = MapKind::from_wire(map)?;
    let name = guest.read_text(name, size)?;
    let value = guest.read(value, value_size)?;
    settable(kind, &name)?;
    Ok(guest.state().fields_mut(kind)?.add(name.as_bytes(), value.into())?)
}

pub(super) fn replace(
    guest: &mut Guest<'_, '_>,
    map: u32,
    name: u32,
    size: u32,
    value: u32,
    value_size: u32,
) -> Answer {
    let kind = MapKind::from_wire(map)?;
    let name = guest.read_text(name, size)?;
    let value = guest.read(value, value_size)?;
    settable(kind, &name)?;
    Ok(guest.state().fields_mut(kind)?.replace(name.as_bytes(), value.into())?)
}

pub(super) fn remove(guest: &mut Guest<'_, '_>, map: u32, name: u32, size: u32) -> Answer {
    let kind = MapKind::from_wire(map)?;
    let name = guest.read_text(name, size)?;
    settable(kind, &name)?;
    guest.state().fields_mut(kind)?.remove(&name);
    Ok(())
}

fn is_fact(kind: MapKind, name: &str) -> bool {
    name.starts_with(':') && !(kind == MapKind::ResponseHeaders && name == ":status")
}

fn settable(kind: MapKind, name: &str) -> Result<(), Fail> {
    if is_fact(kind, name) { Err(Status::BadArgument.into()) } else { Ok(()) }
}
