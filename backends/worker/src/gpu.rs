//! Figures of the GPU that computes, by NVIDIA's management library (NVML, `libnvidia-ml.so.1`): memory, utilization, power, clocks, temperature.
//!
//! The library is loaded when the first GPU is read, and a worker serves without it. It numbers GPUs otherwise than the driver does
//! (`CUDA_VISIBLE_DEVICES`), so the GPU is found by its address on the PCI bus; where the driver does not tell the address, the figures are read on a
//! machine with one GPU alone.
//!
//! Reading takes a millisecond or a few, and much longer where a GPU is lost: a thread of its own does it.
//!
//! *Absent*: Xid errors (the library tells them as events only), processes on the GPU, every setting.

use std::ffi::OsStr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use penstock_kernels::cuda::Gpu;
use penstock_proto::frames::{GpuState, Throttle};
use tokio::sync::mpsc::WeakSender;
use tracing::{info, warn};

use crate::inbox::Command;

/// Name under which every driver installs the library; the name without a version is that of development packages.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Time from one look at the GPU to the next. Utilization is an average over up to a second.
const EVERY: Duration = Duration::from_secs(2);

const HERTZ_PER_MEGAHERTZ: u64 = 1_000_000;

/// Reason why there are no figures of a GPU.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MonitorError {
    /// The library is not there, lacks a function, or does not start.
    #[error("NVIDIA's management library ({LIBRARY}) cannot be used: {0}")]
    Library(NvmlError),
    /// The library does not know the GPU.
    #[error("NVIDIA's management library knows no GPU at the PCI address {address}: {why}")]
    Unknown {
        /// Address that the driver told.
        address: String,
        /// Library's answer.
        why: NvmlError,
    },
    /// The driver told no address, and the machine has not exactly one GPU.
    #[error("the driver does not tell the GPU's PCI address, and the machine has {count} GPUs")]
    Ambiguous {
        /// Number of GPUs that the library knows.
        count: u32,
    },
}

/// The management library, and the GPU that is looked at.
pub(crate) struct Monitor {
    library: Nvml,
    /// Address on the PCI bus; `None`: the only GPU.
    address: Option<String>,
}

impl Monitor {
    /// Loads the library, and finds the GPU. Cost: a fraction of a second, some seconds where the driver has to be woken.
    ///
    /// # Errors
    /// [`MonitorError`] if there is no library, or it does not know the GPU.
    pub(crate) fn open(gpu: &Gpu) -> Result<Self, MonitorError> {
        Self::open_at(LIBRARY.as_ref(), gpu.pci_address())
    }

    fn open_at(library: &OsStr, address: Option<String>) -> Result<Self, MonitorError> {
        let library = Nvml::builder().lib_path(library).init().map_err(MonitorError::Library)?;
        let monitor = Self { library, address };
        if monitor.address.is_none() {
            match monitor.library.device_count().map_err(MonitorError::Library)? {
                1 => {}
                count => return Err(MonitorError::Ambiguous { count }),
            }
        }
        if let Err(why) = monitor.device() {
            let address = monitor.address.unwrap_or_default();
            return Err(MonitorError::Unknown { address, why });
        }
        Ok(monitor)
    }

    fn device(&self) -> Result<Device<'_>, NvmlError> {
        match &self.address {
            Some(address) => self.library.device_by_pci_bus_id(address.as_str()),
            None => self.library.device_by_index(0),
        }
    }

    /// Figures of the GPU now; those that the library does not tell are absent, and all are of a GPU that is lost.
    pub(crate) fn read(&self) -> GpuState {
        let Ok(device) = self.device() else { return GpuState::default() };
        let memory = device.memory_info().ok();
        let utilization = device.utilization_rates().ok();
        let share = |percent: u32| f64::from(percent.min(100)) / 100.0;
        let watts = |milliwatts: u32| f64::from(milliwatts) / 1000.0;
        let clock = |which| device.clock_info(which).ok().map(|megahertz| u64::from(megahertz) * HERTZ_PER_MEGAHERTZ);
        let state = GpuState {
            memory_used_bytes: memory.as_ref().map(|memory| memory.used),
            memory_total_bytes: memory.as_ref().map(|memory| memory.total),
            utilization: utilization.as_ref().map(|rates| share(rates.gpu)),
            memory_utilization: utilization.as_ref().map(|rates| share(rates.memory)),
            power_watts: device.power_usage().ok().map(watts),
            power_limit_watts: device.enforced_power_limit().ok().map(watts),
            sm_clock_hertz: clock(Clock::SM),
            memory_clock_hertz: clock(Clock::Memory),
            temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok().and_then(|it| i32::try_from(it).ok()),
            throttles: device.current_throttle_reasons().map(throttles).unwrap_or_default(),
            ecc_errors: device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).ok(),
        };
        state.checked()
    }
}

/// Numbers of the reasons for low clocks, behind the number that says that they are known.
fn throttles(reasons: ThrottleReasons) -> Vec<i32> {
    let is_thermal = reasons.contains(ThrottleReasons::HW_THERMAL_SLOWDOWN);
    let is_brake = reasons.contains(ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN);
    let settings = ThrottleReasons::APPLICATIONS_CLOCKS_SETTING | ThrottleReasons::DISPLAY_CLOCK_SETTING;
    let all = [
        (Throttle::Known, true),
        (Throttle::Power, reasons.contains(ThrottleReasons::SW_POWER_CAP)),
        (Throttle::Thermal, reasons.contains(ThrottleReasons::SW_THERMAL_SLOWDOWN)),
        (Throttle::HardwareThermal, is_thermal),
        (Throttle::PowerBrake, is_brake),
        // Set beside the two above, which say more.
        (Throttle::Hardware, reasons.contains(ThrottleReasons::HW_SLOWDOWN) && !is_thermal && !is_brake),
        (Throttle::Setting, reasons.intersects(settings)),
        (Throttle::Sync, reasons.contains(ThrottleReasons::SYNC_BOOST)),
    ];
    all.into_iter().filter(|(_, holds)| *holds).map(|(reason, _)| reason as i32).collect()
}

/// Figures of a GPU in a line, for a person; `None` if there are none.
pub(crate) fn line(state: &GpuState) -> Option<String> {
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let of = |value: Option<f64>, limit: Option<f64>, digits: usize, unit: &str| {
        value.map(|value| match limit {
            Some(limit) => format!("{value:.digits$} {unit} of {limit:.digits$} {unit}"),
            None => format!("{value:.digits$} {unit}"),
        })
    };
    let memory = |bytes: Option<u64>| bytes.map(gigabytes);
    let parts = [
        of(state.power_watts, state.power_limit_watts, 0, "W").map(|text| format!("power {text}")),
        of(memory(state.memory_used_bytes), memory(state.memory_total_bytes), 1, "GB")
            .map(|text| format!("memory {text}")),
        state.utilization.map(|share| format!("busy {:.0} %", share * 100.0)),
        state.sm_clock_hertz.map(|hertz| format!("SM clock {:.0} MHz", hertz as f64 / 1e6)),
        state.memory_clock_hertz.map(|hertz| format!("memory clock {:.0} MHz", hertz as f64 / 1e6)),
        state.temperature_celsius.map(|degrees| format!("{degrees} °C")),
        state.throttled().filter(|reasons| !reasons.is_empty()).map(|reasons| {
            let names: Vec<_> = reasons.into_iter().map(Throttle::name).collect();
            format!("slowed by {}", names.join(" and "))
        }),
        state.ecc_errors.filter(|count| *count > 0).map(|count| format!("{count} uncorrected memory errors")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Thread that reads the figures of a GPU until this value is dropped. Nobody waits for its end: the library may hang where a GPU is lost.
pub(crate) struct Watch {
    _stop: mpsc::Sender<()>,
}

/// Starts to send the figures of `gpu` to the engine's thread. Where there are none, one line of the log says why. `None`: there are no more threads.
pub(crate) fn watch(gpu: Gpu, commands: WeakSender<Command>) -> Option<Watch> {
    let (stop, stopped) = mpsc::channel();
    let look = move || {
        let monitor = match Monitor::open(&gpu) {
            Ok(monitor) => monitor,
            Err(why) => {
                let reason = crate::chain(&why);
                return info!(gpu = gpu.name, reason, "power, clocks and temperature of the GPU are not shown");
            }
        };
        loop {
            let state = monitor.read();
            let Some(commands) = commands.upgrade() else { return };
            // Full: the engine has more urgent things to do, and newer figures come.
            let _ = commands.try_send(Command::Gpu(Box::new(state)));
            drop(commands);
            if stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Disconnected) {
                return;
            }
        }
    };
    match std::thread::Builder::new().name("penstock-gpu".into()).spawn(look) {
        Ok(_) => Some(Watch { _stop: stop }),
        Err(error) => {
            warn!(%error, "no thread for the figures of the GPU");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};
    use std::process::Command as Process;

    /// Builds the stand-in for the library, which has two GPUs or as many as its name says, in the target folder.
    fn stand_in(name: &str) -> PathBuf {
        let program = std::env::current_exe().expect("the path of this program");
        let folder = program.parent().and_then(Path::parent).expect("a target folder").join("penstock-stand-in-nvml");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("stand-in/build.sh");
        let built = Process::new(script).args([folder.as_os_str(), name.as_ref()]).output().expect("sh and a compiler");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        String::from_utf8(built.stdout).expect("a path").trim().into()
    }

    #[test]
    fn a_gpu_is_found_by_its_address_and_read() {
        let library = stand_in("two");
        let at = |address: &str| Monitor::open_at(library.as_os_str(), Some(address.to_owned()));
        let first = at("0000:1b:00.0").expect("it is there").read();
        let want = GpuState {
            memory_used_bytes: Some(3 << 30),
            memory_total_bytes: Some(80 << 30),
            utilization: Some(0.25),
            memory_utilization: Some(0.1),
            power_watts: Some(70.5),
            power_limit_watts: Some(700.0),
            sm_clock_hertz: Some(1_980_000_000),
            memory_clock_hertz: Some(2_619_000_000),
            temperature_celsius: Some(35),
            throttles: vec![Throttle::Known as i32],
            ecc_errors: Some(0),
        };
        assert_eq!(first, want);
        let second = at("0000:43:00.0").expect("it is there").read();
        assert_eq!((second.power_watts, second.ecc_errors), (Some(699.0), Some(2)));
        assert_eq!(second.throttled(), Some(vec![Throttle::Power, Throttle::HardwareThermal]));
        let why = at("0000:99:00.0").err().expect("there is none").to_string();
        assert!(why.contains("0000:99:00.0"), "{why}");
    }

    #[test]
    fn without_an_address_a_gpu_has_to_be_alone() {
        let open = |name| Monitor::open_at(stand_in(name).as_os_str(), None);
        assert!(matches!(open("two"), Err(MonitorError::Ambiguous { count: 2 })));
        assert_eq!(open("one").expect("it is alone").read().power_watts, Some(70.5));
    }

    #[test]
    fn what_a_gpu_does_not_tell_is_absent() {
        let monitor = Monitor::open_at(stand_in("silent").as_os_str(), None).expect("one GPU");
        assert_eq!((monitor.read(), line(&monitor.read())), (GpuState::default(), None));
        // Functions that a library lacks are as figures that a GPU lacks.
        let old = Monitor::open_at(stand_in("old").as_os_str(), None).expect("one GPU").read();
        assert_eq!((old.memory_used_bytes, old.power_watts, old.throttled()), (None, Some(70.5), None));
    }

    #[test]
    fn a_library_that_is_not_there_is_a_reason() {
        let why = Monitor::open_at("libpenstock-no-such-library.so.1".as_ref(), None).err().expect("none");
        assert!(crate::chain(&why).contains("no-such-library"), "{}", crate::chain(&why));
    }

    #[test]
    fn figures_are_a_line() {
        let read = |address: &str| {
            let monitor = Monitor::open_at(stand_in("two").as_os_str(), Some(address.to_owned()));
            line(&monitor.expect("it is there").read())
        };
        assert_eq!(
            read("0000:43:00.0").as_deref(),
            Some(
                "power 699 W of 700 W, memory 80.0 GB of 85.9 GB, busy 100 %, SM clock 1410 MHz, memory clock 2619 MHz, 88 °C, \
                 slowed by power and hardware_thermal, 2 uncorrected memory errors"
            )
        );
        assert_eq!(line(&GpuState { power_watts: Some(7.0), ..GpuState::default() }).as_deref(), Some("power 7 W"));
    }
}
