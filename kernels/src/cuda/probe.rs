//! Search for a GPU that penstock has kernels for, without creating anything on it.

mod identity;

use super::driver::{self, DriverError, Ordinal};
use super::images::Architecture;

/// Oldest driver, as the CUDA version that it serves. Kernels come from a compiler of CUDA 12.9, whose code runs on drivers of 12.0 and later.
const DRIVER_MIN: i32 = 12_000;

/// A GPU and its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Index among the devices that this process sees.
    pub index: usize,
    /// Name of the product.
    pub name: String,
    /// Compute capability: major and minor.
    pub capability: (i32, i32),
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// CUDA version that the driver serves: major and minor.
    pub driver: (i32, i32),
    /// Architecture of the kernels that run on it; `None`: there are none.
    pub kernels: Option<&'static str>,
    /// True if all those kernels have been measured on a GPU.
    pub is_measured: bool,
}

impl std::fmt::Display for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, capability, driver, .. } = self;
        let gigabytes = self.memory_bytes as f64 / 1e9;
        let kernels = self.kernels.unwrap_or("none");
        let state = if self.kernels.is_some() && !self.is_measured { " (never run on a GPU)" } else { "" };
        write!(
            f,
            "{name}, {gigabytes:.1} GB, compute capability {}.{}, driver for CUDA {}.{}, kernels {kernels}{state}",
            capability.0, capability.1, driver.0, driver.1
        )
    }
}

/// Reason why no GPU can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// The driver's library is not on this machine, or where the loader does not look.
    #[error("there is no NVIDIA driver: libcuda.so.1 is not found")]
    NoDriver,
    /// The driver's library lacks a function.
    #[error("libcuda.so.1 has no function {symbol}: it is not a driver that penstock can use")]
    Incomplete {
        /// Name of the function.
        symbol: &'static str,
    },
    /// The driver is older than the kernels need.
    #[error("the NVIDIA driver serves CUDA {}.{}, and 12.0 or later is needed: install driver 525 or later", found.0, found.1)]
    TooOld {
        /// CUDA version that the driver serves: major and minor.
        found: (i32, i32),
    },
    /// There is a driver and no device.
    #[error("the NVIDIA driver finds no GPU (CUDA_VISIBLE_DEVICES may hide it)")]
    NoDevice,
    /// There are devices, and kernels for none of them.
    #[error("there are no kernels for {name} (compute capability {}.{}): 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0 have them", capability.0, capability.1)]
    NoKernels {
        /// Name of the first device.
        name: String,
        /// Compute capability of the first device: major and minor.
        capability: (i32, i32),
    },
    /// The driver failed.
    #[error("the NVIDIA driver fails: {call} gives {error}")]
    Driver {
        /// Function that failed.
        call: &'static str,
        /// Name of the error, as the driver has it.
        error: String,
    },
}

impl From<DriverError> for ProbeError {
    fn from(error: DriverError) -> Self {
        if error.is_no_device() {
            return Self::NoDevice;
        }
        Self::Driver { call: error.call, error: error.name }
    }
}

/// Lists the GPUs of this machine, those without kernels too. Cost: loads the driver and starts it, up to a second; nothing is allocated on a GPU.
///
/// # Errors
/// [`ProbeError`] if there is no GPU or no driver that could serve it.
pub fn gpus() -> Result<Vec<Gpu>, ProbeError> {
    if !driver::is_present() {
        return Err(ProbeError::NoDriver);
    }
    if let Some(symbol) = driver::missing_symbol() {
        return Err(ProbeError::Incomplete { symbol: symbol.to_str().expect("names are ASCII") });
    }
    let version = driver::version()?;
    let driver = (version / 1000, version % 1000 / 10);
    if version < DRIVER_MIN {
        return Err(ProbeError::TooOld { found: driver });
    }
    driver::start()?;
    let all = (0..driver::device_count()?).map(|index| {
        let device = Ordinal::new(index)?;
        let capability = device.capability()?;
        Ok(Gpu {
            index: index as usize,
            name: device.name()?,
            capability,
            memory_bytes: device.memory_bytes()?,
            driver,
            kernels: Architecture::of(capability).map(Architecture::name),
            is_measured: Architecture::of(capability).is_some_and(Architecture::is_measured),
        })
    });
    let all = all.collect::<Result<Vec<_>, DriverError>>()?;
    if all.is_empty() { Err(ProbeError::NoDevice) } else { Ok(all) }
}

/// The first GPU that has kernels.
///
/// # Errors
/// As [`gpus`]; [`ProbeError::NoKernels`] if all GPUs are too old or too new.
pub fn probe() -> Result<Gpu, ProbeError> {
    let all = gpus()?;
    let (name, capability) = (all[0].name.clone(), all[0].capability);
    all.into_iter().find(|gpu| gpu.kernels.is_some()).ok_or(ProbeError::NoKernels { name, capability })
}
