//! The CUDA driver as safe types: contexts, memory, modules, kernels, streams. Beside `probe/identity.rs` the only user of `cudarc`, which panics where a
//! library or a symbol is missing: nothing here is called before [`is_present`] and [`missing_symbol`] have said that it can be.
//!
//! Each value holds what it needs alive: memory and streams their context, kernels their module. Operations on a [`Stream`] run in its
//! order; copies to and from host memory return when they are done.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use crate::host::Element;

/// Functions of the driver that are called here. All have been there since CUDA 11.8.
const SYMBOLS: [&CStr; 26] = [
    c"cuInit",
    c"cuDriverGetVersion",
    c"cuGetErrorName",
    c"cuDeviceGetCount",
    c"cuDeviceGet",
    c"cuDeviceGetName",
    c"cuDeviceTotalMem_v2",
    c"cuDeviceGetAttribute",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuCtxSetCurrent",
    c"cuMemGetInfo_v2",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemAllocHost_v2",
    c"cuMemFreeHost",
    c"cuMemsetD8Async",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyDtoDAsync_v2",
    c"cuStreamCreate",
    c"cuStreamSynchronize",
    c"cuModuleLoadData",
    c"cuModuleGetFunction",
    c"cuFuncSetAttribute",
    c"cuLaunchKernelEx",
];

/// Failure of a call to the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DriverError {
    /// Function that failed.
    pub(super) call: &'static str,
    /// Name of the error: `CUDA_ERROR_…`.
    pub(super) name: String,
    result: CUresult,
}

impl DriverError {
    /// True if the device has not enough memory.
    pub(super) fn is_memory(&self) -> bool {
        self.result == CUresult::CUDA_ERROR_OUT_OF_MEMORY
    }

    /// True if there is a driver and no device that it can use.
    pub(super) fn is_no_device(&self) -> bool {
        self.result == CUresult::CUDA_ERROR_NO_DEVICE
    }
}

fn done(call: &'static str, result: CUresult) -> Result<(), DriverError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, since it gave `result`; it writes the address of a string of its own, or null.
    let named = unsafe { sys::cuGetErrorName(result, &raw mut text) };
    let name = if named == CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: a string of the driver, ended by 0 and alive as long as the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        format!("{result:?}")
    };
    Err(DriverError { call, name, result })
}

/// Returns true if the system finds the driver's library (`libcuda.so.1`).
pub(super) fn is_present() -> bool {
    // SAFETY: runs the initializers of the driver's library, which whoever installed it trusts.
    unsafe { sys::is_culib_present() }
}

/// A function that the driver's library lacks; `None`: all are there. Call after [`is_present`] returned true.
pub(super) fn missing_symbol() -> Option<&'static CStr> {
    // SAFETY: as in `is_present`; the library was found there.
    let library = unsafe { sys::culib() };
    let has = |symbol: &CStr| {
        // SAFETY: the address is looked up and not called.
        unsafe { library.get::<unsafe extern "C" fn()>(symbol.to_bytes_with_nul()) }.is_ok()
    };
    SYMBOLS.into_iter().find(|symbol| !has(symbol))
}

/// Starts the driver; any number of times.
pub(super) fn start() -> Result<(), DriverError> {
    // SAFETY: the driver is present.
    done("cuInit", unsafe { sys::cuInit(0) })
}

/// Newest CUDA version that the driver serves, as 1000 · major + 10 · minor. Needs no [`start`].
pub(super) fn version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: the driver is present and writes one integer.
    done("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(version)
}

/// Number of devices that this process sees (`CUDA_VISIBLE_DEVICES` narrows it).
pub(super) fn device_count() -> Result<i32, DriverError> {
    let mut count = 0;
    // SAFETY: the driver is present and writes one integer.
    done("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(count)
}

/// A device by its index, before anything is created on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ordinal(sys::CUdevice);

impl Ordinal {
    pub(super) fn new(index: i32) -> Result<Self, DriverError> {
        let mut device = 0;
        // SAFETY: the driver is started and writes one integer.
        done("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
        Ok(Self(device))
    }

    /// Name of the product.
    pub(super) fn name(self) -> Result<String, DriverError> {
        let mut text = [0u8; 256];
        let length = text.len() as i32;
        // SAFETY: the driver writes at most `length` bytes, the final 0 among them.
        done("cuDeviceGetName", unsafe { sys::cuDeviceGetName(text.as_mut_ptr().cast(), length, self.0) })?;
        let name = CStr::from_bytes_until_nul(&text).map(CStr::to_string_lossy).unwrap_or_default();
        Ok(name.into_owned())
    }

    /// Memory of the device in bytes.
    pub(super) fn memory_bytes(self) -> Result<u64, DriverError> {
        let mut bytes = 0;
        // SAFETY: the driver writes one size.
        done("cuDeviceTotalMem_v2", unsafe { sys::cuDeviceTotalMem_v2(&raw mut bytes, self.0) })?;
        Ok(bytes as u64)
    }

    /// Compute capability: major and minor.
    pub(super) fn capability(self) -> Result<(i32, i32), DriverError> {
        let major = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let minor = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
        Ok((self.attribute(major)?, self.attribute(minor)?))
    }

    /// Number of multiprocessors.
    pub(super) fn multiprocessors(self) -> Result<usize, DriverError> {
        let count = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(usize::try_from(count).unwrap_or(0).max(1))
    }

    fn attribute(self, attribute: sys::CUdevice_attribute) -> Result<i32, DriverError> {
        let mut value = 0;
        // SAFETY: the driver writes one integer.
        done("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.0) })?;
        Ok(value)
    }
}

/// The primary context of a device, kept alive.
#[derive(Debug)]
pub(super) struct Context {
    device: Ordinal,
    raw: sys::CUcontext,
}

// SAFETY: a context may be used from any thread; each makes it current first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver serializes calls on one context.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn new(device: Ordinal) -> Result<Arc<Self>, DriverError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one handle, given back in `drop`.
        done("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device.0) })?;
        let context = Arc::new(Self { device, raw });
        context.enter()?;
        Ok(context)
    }

    /// Makes the context current on this thread, as calls on its memory and streams need.
    pub(super) fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context is alive until `drop`.
        done("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Free and total memory of the device in bytes.
    pub(super) fn memory_bytes(&self) -> Result<(u64, u64), DriverError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; the driver writes two sizes.
        done("cuMemGetInfo_v2", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`; whatever lives on the context holds it by an Arc. A failure has no remedy here.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.0) };
    }
}

/// Address in the memory of a device.
pub(super) type Pointer = sys::CUdeviceptr;

/// Memory of a device, owned.
#[derive(Debug)]
pub(super) struct Memory {
    context: Arc<Context>,
    pointer: Pointer,
    bytes: usize,
}

impl Memory {
    /// Address `offset` bytes into the memory.
    pub(super) fn at(&self, offset: usize) -> Pointer {
        assert!(offset <= self.bytes, "offset {offset} of {} bytes", self.bytes);
        self.pointer + offset as u64
    }

    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: allocated in `Stream::allocate` and freed once; the driver waits for work that uses it. A failure has no remedy here.
        let _ = unsafe { sys::cuMemFree_v2(self.pointer) };
    }
}

/// Kernels of one image (a cubin), loaded into a context.
#[derive(Debug)]
pub(super) struct Module {
    /// Context that the module lives in. Modules are not unloaded: they live as long as the device, and its context takes them along.
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: a handle without state of its own on the host; loading and looking up enter its context.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub(super) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, DriverError> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `image` is a whole cubin, whose header says its size; the driver copies what it needs.
        done("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut raw, image.as_ptr().cast()) })?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Finds a kernel. `threads` of a block, and `shared_bytes` that it asks for at launch, are its own.
    pub(super) fn kernel(&self, name: &CStr, threads: u32, shared_bytes: usize) -> Result<Kernel, DriverError> {
        self.context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded and stays so; the driver writes one handle.
        done("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&raw mut raw, self.raw, name.as_ptr()) })?;
        let shared_bytes = u32::try_from(shared_bytes).expect("shared memory is some hundred KiB at most");
        if shared_bytes > 0 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the handle was just written.
            let set = unsafe { sys::cuFuncSetAttribute(raw, attribute, shared_bytes.cast_signed()) };
            done("cuFuncSetAttribute", set)?;
        }
        Ok(Kernel { raw, threads, shared_bytes })
    }
}

/// A kernel; valid as long as the context of its module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    raw: sys::CUfunction,
    /// Threads of a block.
    threads: u32,
    /// Shared memory of a block that a launch gives, in bytes.
    shared_bytes: u32,
}

// SAFETY: a handle without state of its own on the host.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Two halves of pinned host memory, from which the GPU copies while the other one is filled. Such copies are several times as fast as those
/// from other memory, which the driver moves through pinned memory of its own.
#[derive(Debug)]
pub(super) struct Staging {
    /// The queue of the device, on which the copies are.
    stream: Stream,
    halves: [*mut u8; 2],
    bytes: usize,
    /// Half that is filled next: no copy from it is under way.
    next: usize,
}

// SAFETY: the halves are owned memory of the host, reached through `&mut self` alone.
unsafe impl Send for Staging {}
// SAFETY: a shared reference gives no access to the halves.
unsafe impl Sync for Staging {}

impl Staging {
    /// Allocates two halves of `bytes` bytes for copies on `stream`.
    pub(super) fn new(stream: &Stream, bytes: usize) -> Result<Self, DriverError> {
        let stream = Stream { context: Arc::clone(&stream.context), raw: stream.raw };
        let mut staging = Self { stream, halves: [std::ptr::null_mut(); 2], bytes: bytes.max(1), next: 0 };
        staging.stream.context.enter()?;
        for half in &mut staging.halves {
            let mut raw = std::ptr::null_mut();
            // SAFETY: the context is current; the driver writes one address, freed in `drop`.
            done("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&raw mut raw, staging.bytes) })?;
            *half = raw.cast();
            // SAFETY: the memory was just allocated with this size.
            unsafe { half.write_bytes(0, staging.bytes) };
        }
        Ok(staging)
    }

    /// Size of one half in bytes: the most that [`Staging::send`] takes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Has `fill` write `bytes` bytes and enqueues their copy to `to`, `offset` bytes into it. Returns while the copy is under way.
    ///
    /// # Panics
    /// If the bytes do not fit into a half, or the memory.
    pub(super) fn send(
        &mut self,
        to: &Memory,
        offset: usize,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), DriverError> {
        assert!(bytes <= self.bytes, "{bytes} bytes for a half of {}", self.bytes);
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= to.bytes), "write beyond memory");
        let half = self.halves[self.next];
        // SAFETY: `bytes` bytes of owned, initialized memory. The last copy from this half is done: the stream was waited for before the copy from the
        // other half was enqueued.
        fill(unsafe { std::slice::from_raw_parts_mut(half, bytes) });
        // The copy from the other half ends here, and that one can be filled next.
        self.stream.wait()?;
        self.next = 1 - self.next;
        // SAFETY: both ranges hold `bytes` bytes (asserted above); the half is not written before the stream is waited for, nor freed.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to.at(offset), half.cast(), bytes, self.stream.raw) };
        done("cuMemcpyHtoDAsync", result)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Copies may be under way. A failure has no remedy here.
        let _ = self.stream.wait();
        for half in self.halves.into_iter().filter(|half| !half.is_null()) {
            // SAFETY: allocated in `new` and freed once; no copy reads it any more.
            let _ = unsafe { sys::cuMemFreeHost(half.cast()) };
        }
    }
}

/// A queue of operations of a device.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: a stream may be used from any thread on which its context is current; every method enters the context first.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver serializes calls on one stream.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, DriverError> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        // Ordered against no other stream: everything of this device goes through this one.
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the driver writes one handle. It is given back with the context.
        done("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Allocates memory filled with zeros.
    pub(super) fn allocate(&self, bytes: usize) -> Result<Memory, DriverError> {
        let memory = self.allocate_unfilled(bytes)?;
        // SAFETY: the memory was just allocated with this size.
        done("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(memory.pointer, 0, memory.bytes, self.raw) })?;
        self.wait()?;
        Ok(memory)
    }

    /// Allocates memory whose every byte the caller writes before anything reads it.
    pub(super) fn allocate_unfilled(&self, bytes: usize) -> Result<Memory, DriverError> {
        self.context.enter()?;
        let mut pointer = 0;
        // The driver refuses sizes of 0.
        let bytes = bytes.max(1);
        // SAFETY: the context is current; the driver writes one address.
        done("cuMemAlloc_v2", unsafe { sys::cuMemAlloc_v2(&raw mut pointer, bytes) })?;
        Ok(Memory { context: Arc::clone(&self.context), pointer, bytes })
    }

    /// Copies `from` to `to`, `offset` bytes into it.
    ///
    /// # Panics
    /// If the values do not fit.
    pub(super) fn write<T: Element>(&self, to: &Memory, offset: usize, from: &[T]) -> Result<(), DriverError> {
        let bytes = size_of_val(from);
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= to.bytes), "write beyond memory");
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: both ranges hold `bytes` bytes (asserted above), and `from` stays borrowed until the copy is done.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to.at(offset), from.as_ptr().cast(), bytes, self.raw) };
        done("cuMemcpyHtoDAsync", result)?;
        self.wait()
    }

    /// Copies from `from`, `offset` bytes into it, to `to`.
    ///
    /// # Panics
    /// If there are fewer values.
    pub(super) fn read<T: Element>(&self, from: &Memory, offset: usize, to: &mut [T]) -> Result<(), DriverError> {
        let bytes = size_of_val(to);
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= from.bytes), "read beyond memory");
        if bytes == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: both ranges hold `bytes` bytes (asserted above), any bits are values of `T`, and `to` stays borrowed until the copy is done.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.at(offset), bytes, self.raw) };
        done("cuMemcpyDtoHAsync", result)?;
        self.wait()
    }

    /// Enqueues a copy of `bytes` bytes of the device's memory, from the beginning of `from` to `to`, `offset` bytes into it. Both have to live
    /// until the stream has passed it, as all memory does: freeing waits.
    ///
    /// # Panics
    /// If there are fewer bytes, or the memory is the same and the ranges overlap.
    pub(super) fn copy(&self, to: &Memory, offset: usize, from: &Memory, bytes: usize) -> Result<(), DriverError> {
        assert!(bytes <= from.bytes, "copy beyond memory");
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= to.bytes), "copy beyond memory");
        assert!(to.pointer != from.pointer || bytes <= offset, "copy of overlapping ranges");
        self.context.enter()?;
        // SAFETY: both ranges lie in allocations of the context (asserted above) and do not overlap; `Memory` waits before it frees.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to.at(offset), from.at(0), bytes, self.raw) };
        done("cuMemcpyDtoDAsync", result)
    }

    /// Waits until everything on the stream is done, and reports failures of it.
    pub(super) fn wait(&self) -> Result<(), DriverError> {
        self.context.enter()?;
        // SAFETY: the stream is alive.
        done("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Enqueues a kernel with one parameter, passed by value. With `overlaps`, its blocks may begin while the kernel before it ends, for which it waits
    /// itself (`after_previous` of `ptx.cuh`); kernels for compute capability 9.0 and later do.
    ///
    /// # Safety
    /// The kernel takes one parameter of `P`'s layout, and with these parameters and this grid it stays inside of memory that lives
    /// until the stream has passed it. With `overlaps`, it is of an image that waits for the kernel before.
    pub(super) unsafe fn launch<P: Copy>(
        &self,
        kernel: Kernel,
        (x, y, z): (u32, u32, u32),
        mut params: P,
        overlaps: bool,
    ) -> Result<(), DriverError> {
        self.context.enter()?;
        let mut pointers = [(&raw mut params).cast::<c_void>()];
        let Kernel { raw, threads, shared_bytes } = kernel;
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: self.raw,
            attrs: &raw mut attribute,
            numAttrs: u32::from(overlaps),
        };
        let none = std::ptr::null_mut();
        // SAFETY: the caller's promise; the driver copies configuration, attribute and parameter before it returns.
        let result = unsafe { sys::cuLaunchKernelEx(&raw const config, raw, pointers.as_mut_ptr(), none) };
        done("cuLaunchKernelEx", result)
    }
}
