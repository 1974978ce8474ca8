//! Address of a GPU on the PCI bus, by which other libraries know it: the index of a GPU is another one under each `CUDA_VISIBLE_DEVICES`.
//!
//! The function is no part of what `driver.rs` requires of a driver: without it there is no address, and the GPU computes all the same.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

use super::{Gpu, driver};

/// Function that tells the address.
const SYMBOL: &CStr = c"cuDeviceGetPCIBusId";

/// Room for an address, its final 0 included: `ffffffff:ff:ff.f` takes 17 bytes.
const ROOM: usize = 32;

impl Gpu {
    /// Address on the PCI bus, as `0000:1b:00.0`; `None` if the driver does not tell it. That of a part of a GPU (MIG) is the GPU's.
    pub fn pci_address(&self) -> Option<String> {
        if !driver::is_present() || driver::missing_symbol().is_some() || !has_function() {
            return None;
        }
        driver::start().ok()?;
        let (mut device, mut text) = (0, [0u8; ROOM]);
        let index = i32::try_from(self.index).ok()?;
        // SAFETY: the driver is started, and writes one integer.
        let found = unsafe { sys::cuDeviceGet(&raw mut device, index) };
        if found != CUresult::CUDA_SUCCESS {
            return None;
        }
        // SAFETY: the driver has the function, and writes at most `ROOM` bytes, the final 0 among them.
        let told = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), ROOM as i32, device) };
        let address = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
        (told == CUresult::CUDA_SUCCESS && !address.is_empty()).then(|| address.to_ascii_lowercase())
    }
}

/// Returns true if the driver has the function. Call after `driver::is_present` returned true.
fn has_function() -> bool {
    // SAFETY: the library was found.
    let library = unsafe { sys::culib() };
    // SAFETY: the address is looked up and not called.
    unsafe { library.get::<unsafe extern "C" fn()>(SYMBOL.to_bytes_with_nul()) }.is_ok()
}
