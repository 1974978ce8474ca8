//! Instruction paths that this machine offers, and the choice among them at start.

use crate::device::KernelError;

/// An instruction path. Within one path results are the same bits everywhere; `Amx`, `Avx512`, `Avx2` and `Portable`
/// also agree with each other (see `docs/adr/0004-canonical-order.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    /// The fastest path that this machine has; the default.
    #[default]
    Auto,
    /// `tdpbf16ps` on tiles (Sapphire Rapids and later).
    Amx,
    /// `vdpbf16ps` (Zen 4 and later at full rate; on Intel at half the rate of an FMA).
    Avx512Bf16,
    /// f32 FMA on bf16 expanded to f32, 512 bits wide.
    Avx512,
    /// f32 FMA on bf16 expanded to f32, 256 bits wide.
    Avx2,
    /// Rust alone, compiled twice on x86-64: with and without AVX2 and FMA.
    Portable,
}

/// Every path but `Auto`, fastest first where `vdpbf16ps` runs at full rate.
pub(super) const PATHS: [Path; 5] = [Path::Amx, Path::Avx512Bf16, Path::Avx512, Path::Avx2, Path::Portable];

impl Path {
    /// Name of the path in configuration and logs.
    pub fn name(self) -> &'static str {
        match self {
            Path::Auto => "auto",
            Path::Amx => "amx",
            Path::Avx512Bf16 => "avx512bf16",
            Path::Avx512 => "avx512",
            Path::Avx2 => "avx2",
            Path::Portable => "portable",
        }
    }

    /// Reason why this machine cannot run the path; `None` if it can.
    pub(super) fn missing(self) -> Option<&'static str> {
        match self {
            Path::Auto | Path::Portable => None,
            Path::Avx512 => missing_avx512(),
            Path::Avx2 => (!has_avx2_fma()).then_some("the processor lacks AVX2 or FMA"),
            Path::Avx512Bf16 => missing_avx512().or(missing_bf16()),
            Path::Amx => missing_avx512().or_else(missing_amx),
        }
    }

    /// Resolves the path to run: `Auto` decides, and a named path is refused if the machine lacks it.
    ///
    /// # Errors
    /// [`KernelError::Unavailable`]: the machine lacks the path.
    pub fn resolve(self) -> Result<Path, KernelError> {
        if self == Path::Auto {
            let usable = |path: &Path| path.missing().is_none() && (*path != Path::Avx512Bf16 || full_rate_bf16());
            return Ok(PATHS.into_iter().find(usable).unwrap_or(Path::Portable));
        }
        match self.missing() {
            None => Ok(self),
            Some(why) => {
                Err(KernelError::Unavailable { what: format!("CPU path {}", self.name()), why: why.to_owned() })
            }
        }
    }
}

impl std::str::FromStr for Path {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Self, KernelError> {
        let all = PATHS.into_iter().chain([Path::Auto]);
        all.into_iter().find(|path| path.name() == name).ok_or_else(|| KernelError::Unavailable {
            what: format!("CPU path {name:?}"),
            why: "the paths are auto, amx, avx512bf16, avx512, avx2, portable".into(),
        })
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    pub(super) fn missing_avx512() -> Option<&'static str> {
        Some("this is not an x86-64 processor")
    }
    pub(super) fn missing_bf16() -> Option<&'static str> {
        missing_avx512()
    }
    pub(super) fn missing_amx() -> Option<&'static str> {
        missing_avx512()
    }
    pub(super) fn full_rate_bf16() -> bool {
        false
    }
    pub(in crate::cpu) fn has_avx2_fma() -> bool {
        false
    }
}

#[cfg(target_arch = "x86_64")]
mod machine {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    pub(super) fn missing_avx512() -> Option<&'static str> {
        let there = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        (!there).then_some("the processor or the system lacks AVX-512 F, BW, DQ or VL")
    }

    pub(super) fn missing_bf16() -> Option<&'static str> {
        (!is_x86_feature_detected!("avx512bf16")).then_some("the processor lacks AVX512_BF16")
    }

    /// Returns true if `vdpbf16ps` runs at full rate. AMD runs it at the rate of an FMA, with twice its work; Intel at half
    /// that rate, where f32 FMAs are as fast, and give the same bits as AMX machines.
    pub(super) fn full_rate_bf16() -> bool {
        let leaf = __cpuid(0);
        [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    }

    pub(in crate::cpu) fn has_avx2_fma() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    /// Reason why AMX is unavailable. Checks CPUID leaf 7 (edx bit 22 AMX-BF16, bit 24 AMX-TILE), XCR0 bits 17 and 18
    /// (the system saves tiles), and the permission to use them.
    pub(super) fn missing_amx() -> Option<&'static str> {
        if __cpuid(0).eax < 7 || !is_x86_feature_detected!("avx512f") {
            return Some("the processor lacks AMX");
        }
        let edx = __cpuid_count(7, 0).edx;
        if edx & (1 << 22) == 0 || edx & (1 << 24) == 0 {
            return Some("the processor lacks AMX-TILE or AMX-BF16");
        }
        if xcr0() & (3 << 17) != 3 << 17 {
            return Some("the system does not save AMX tiles");
        }
        (!amx_permitted()).then_some("the system refuses AMX (arch_prctl)")
    }

    /// Returns true if AMX is available with products of integers: AMX-INT8 (edx bit 25) beside what [`missing_amx`] asks.
    pub(in crate::cpu) fn has_amx_int8() -> bool {
        missing_amx().is_none() && __cpuid_count(7, 0).edx & (1 << 25) != 0
    }

    #[target_feature(enable = "xsave")]
    fn read_xcr0() -> u64 {
        // SAFETY: register 0 exists wherever XGETBV does.
        unsafe { _xgetbv(0) }
    }

    fn xcr0() -> u64 {
        // SAFETY: called only after AVX-512 was detected, which implies OSXSAVE.
        unsafe { read_xcr0() }
    }

    /// Asks Linux, once a process, for the tile data state (XFEATURE 18). Threads started later inherit it.
    fn amx_permitted() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        #[cfg(target_os = "linux")]
        // SAFETY: arch_prctl with this code takes one integer and touches no memory of ours.
        return unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, 18 as libc::c_long) } == 0;
        #[cfg(not(target_os = "linux"))]
        return false;
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use machine::has_amx_int8;
pub(super) use machine::has_avx2_fma;
use machine::{full_rate_bf16, missing_amx, missing_avx512, missing_bf16};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_auto_resolves() {
        for path in PATHS.into_iter().chain([Path::Auto]) {
            assert_eq!(path.name().parse::<Path>().unwrap(), path);
        }
        assert!("sse".parse::<Path>().is_err());
        let chosen = Path::Auto.resolve().unwrap();
        assert!(chosen != Path::Auto && chosen.missing().is_none());
    }

    #[test]
    fn a_missing_path_is_refused_by_name() {
        for path in PATHS {
            match (path.missing(), path.resolve()) {
                (None, Ok(same)) => assert_eq!(same, path),
                (Some(_), Err(KernelError::Unavailable { what, .. })) => assert!(what.contains(path.name())),
                other => panic!("{path:?}: {other:?}"),
            }
        }
    }
}
