//! NVRTC, NVIDIA's compiler as a library, found by the loader (`LD_LIBRARY_PATH`).

use anyhow::{bail, ensure};
use cudarc::nvrtc::sys::{self, nvrtcResult};
use std::ffi::{CStr, CString, c_char};

/// Most bytes of a log or an image that are read.
const BYTES_MAX: usize = 64 << 20;

/// Name and version of the compiler.
pub(crate) fn version() -> anyhow::Result<String> {
    // SAFETY: runs the initializers of a library that the caller installed for this.
    ensure!(unsafe { sys::is_culib_present() }, "libnvrtc.so is not found: `make kernels` installs it");
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present and writes two integers.
    done(unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) })?;
    Ok(format!("nvrtc {major}.{minor}"))
}

/// Compiles `source`, which may include `headers` (names and texts). Gives the cubin and the log.
pub(crate) fn compile(
    source: &str,
    name: &str,
    headers: &[(&str, String)],
    flags: &[String],
) -> anyhow::Result<(Vec<u8>, String)> {
    let program = Program::new(source, name, headers)?;
    let flags = flags.iter().map(|flag| CString::new(flag.as_str())).collect::<Result<Vec<_>, _>>()?;
    let pointers: Vec<*const c_char> = flags.iter().map(|flag| flag.as_ptr()).collect();
    // SAFETY: a live program, and as many strings as said.
    let compiled = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
    let log = program.log()?;
    if compiled != nvrtcResult::NVRTC_SUCCESS {
        bail!("{compiled:?}\n{log}");
    }
    Ok((program.cubin()?, log))
}

/// A program of the compiler, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &str, name: &str, headers: &[(&str, String)]) -> anyhow::Result<Self> {
        let (source, name) = (CString::new(source)?, CString::new(format!("{name}.cu"))?);
        let names = headers.iter().map(|(name, _)| CString::new(*name)).collect::<Result<Vec<_>, _>>()?;
        let texts = headers.iter().map(|(_, text)| CString::new(text.as_str())).collect::<Result<Vec<_>, _>>()?;
        let pointers = |all: &[CString]| all.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let mut program = std::ptr::null_mut();
        // SAFETY: strings ended by 0 and as many headers as said; the compiler copies them and writes one handle.
        let created = unsafe {
            sys::nvrtcCreateProgram(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                headers.len() as i32,
                pointers(&texts).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        done(created)?;
        Ok(Self(program))
    }

    fn log(&self) -> anyhow::Result<String> {
        let mut bytes = 0;
        // SAFETY: a live program; one size is written.
        done(unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut bytes) })?;
        let mut log = vec![0u8; bytes.clamp(1, BYTES_MAX)];
        ensure!(bytes <= log.len(), "a log of {bytes} bytes");
        // SAFETY: room for as many bytes as the compiler said.
        done(unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) })?;
        Ok(CStr::from_bytes_until_nul(&log).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default())
    }

    fn cubin(&self) -> anyhow::Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: a live program; one size is written.
        done(unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut bytes) })?;
        ensure!((1..=BYTES_MAX).contains(&bytes), "a cubin of {bytes} bytes");
        let mut image = vec![0u8; bytes];
        // SAFETY: room for as many bytes as the compiler said.
        done(unsafe { sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()) })?;
        Ok(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once. A failure has no remedy here.
        let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn done(result: nvrtcResult) -> anyhow::Result<()> {
    ensure!(result == nvrtcResult::NVRTC_SUCCESS, "{result:?}");
    Ok(())
}
