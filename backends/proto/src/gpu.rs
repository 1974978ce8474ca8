//! Figures of the GPU that computes at a worker, for the operator. No decision is made by them.

use prost::Message;

/// Figures that a worker reads of its GPU now and then; absent figures are those that the GPU or its driver does not tell. Other processes on the GPU count in
/// all of them. Workers without a GPU, or without NVIDIA's management library, send none.
#[derive(Clone, PartialEq, Message)]
pub struct GpuState {
    /// Memory in use, by all processes, in bytes.
    #[prost(uint64, optional, tag = "1")]
    pub memory_used_bytes: Option<u64>,
    /// Memory of the device in bytes.
    #[prost(uint64, optional, tag = "2")]
    pub memory_total_bytes: Option<u64>,
    /// Share of the last second or less in which a kernel ran, from 0 to 1.
    #[prost(double, optional, tag = "3")]
    pub utilization: Option<f64>,
    /// Share of that time in which memory was read or written, from 0 to 1.
    #[prost(double, optional, tag = "4")]
    pub memory_utilization: Option<f64>,
    /// Power drawn, in watts.
    #[prost(double, optional, tag = "5")]
    pub power_watts: Option<f64>,
    /// Limit of the power in force, in watts.
    #[prost(double, optional, tag = "6")]
    pub power_limit_watts: Option<f64>,
    /// Clock of the multiprocessors, in hertz.
    #[prost(uint64, optional, tag = "7")]
    pub sm_clock_hertz: Option<u64>,
    /// Clock of the memory, in hertz.
    #[prost(uint64, optional, tag = "8")]
    pub memory_clock_hertz: Option<u64>,
    /// Temperature of the chip, in degrees Celsius.
    #[prost(sint32, optional, tag = "9")]
    pub temperature_celsius: Option<i32>,
    /// Each [`Throttle`] in force, as its number, and one number without a meaning if the reasons are known and there are none.
    #[prost(enumeration = "Throttle", repeated, tag = "10")]
    pub throttles: Vec<i32>,
    /// Errors of memory that could not be corrected, since the driver was loaded.
    #[prost(uint64, optional, tag = "11")]
    pub ecc_errors: Option<u64>,
}

/// Reasons why a GPU's clocks are lower than they could be, as in [`GpuState::throttles`]. An idle GPU's low clocks have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Throttle {
    /// Number without a meaning: the reasons are known.
    Known = 0,
    /// The limit of power.
    Power = 1,
    /// Temperature, by the driver.
    Thermal = 2,
    /// Temperature, by the hardware, which halves the clocks or more.
    HardwareThermal = 3,
    /// Signal from outside, such as the power supply's, by the hardware.
    PowerBrake = 4,
    /// Another cause of the hardware's.
    Hardware = 5,
    /// Clocks that an operator has set.
    Setting = 6,
    /// Another GPU, whose clocks this one follows.
    Sync = 7,
}

impl Throttle {
    /// Reasons with a meaning.
    pub const ALL: [Self; 7] = [
        Self::Power,
        Self::Thermal,
        Self::HardwareThermal,
        Self::PowerBrake,
        Self::Hardware,
        Self::Setting,
        Self::Sync,
    ];

    /// Name of the reason: `power`, `thermal`, `hardware_thermal`, `power_brake`, `hardware`, `setting`, `sync`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Known => "known",
            Self::Power => "power",
            Self::Thermal => "thermal",
            Self::HardwareThermal => "hardware_thermal",
            Self::PowerBrake => "power_brake",
            Self::Hardware => "hardware",
            Self::Setting => "setting",
            Self::Sync => "sync",
        }
    }
}

impl GpuState {
    /// Reasons in force, each once; `None` if they are not known. Numbers of later versions are left out.
    pub fn throttled(&self) -> Option<Vec<Throttle>> {
        let is_in_force = |reason: &Throttle| self.throttles.contains(&(*reason as i32));
        (!self.throttles.is_empty()).then(|| Throttle::ALL.into_iter().filter(is_in_force).collect())
    }

    /// Figures without those that are no numbers, and with each reason at most once.
    pub fn checked(mut self) -> Self {
        let shares = [&mut self.utilization, &mut self.memory_utilization];
        shares.into_iter().for_each(|share| *share = share.filter(|share| (0.0..=1.0).contains(share)));
        let watts = [&mut self.power_watts, &mut self.power_limit_watts];
        watts.into_iter().for_each(|watts| *watts = watts.filter(|watts| watts.is_finite() && *watts >= 0.0));
        if let Some(known) = self.throttled() {
            self.throttles = std::iter::once(Throttle::Known).chain(known).map(|reason| reason as i32).collect();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_from_outside_are_checked() {
        let told = GpuState {
            utilization: Some(f64::NAN),
            memory_utilization: Some(0.5),
            power_watts: Some(f64::INFINITY),
            power_limit_watts: Some(700.0),
            throttles: [0, 2, 1, 1, 99].repeat(1000),
            ..GpuState::default()
        };
        let checked = told.checked();
        assert_eq!((checked.utilization, checked.memory_utilization), (None, Some(0.5)));
        assert_eq!((checked.power_watts, checked.power_limit_watts), (None, Some(700.0)));
        assert_eq!(checked.throttled(), Some(vec![Throttle::Power, Throttle::Thermal]));
        assert_eq!(checked.throttles, [0, 1, 2]);
    }

    #[test]
    fn no_reason_is_told_from_none_known() {
        assert_eq!(GpuState::default().throttled(), None);
        let free = GpuState { throttles: vec![Throttle::Known as i32], ..GpuState::default() };
        assert_eq!(free.throttled(), Some(vec![]));
        assert_eq!(free.clone().checked(), free);
    }
}
