// Stand-in for NVIDIA's management library: GPUS made-up GPUs with fixed figures, for machines without one. SILENT: they tell nothing; OLD: two functions are
// not there. Signatures follow nvml.h of CUDA 12.

#include <cstddef>
#include <cstring>

namespace {

enum Result { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

struct Gpu {
  const char *address;
  unsigned long long memory, used;
  unsigned busy, memory_busy, milliwatts, limit_milliwatts, sm_megahertz, memory_megahertz, celsius;
  unsigned long long slowed, errors;
};

// The first one is idle (reason 1), the second one has the limit of power (4), a hardware slowdown (8) and its thermal cause (64).
Gpu gpus[] = {
    {"0000:1b:00.0", 80ull << 30, 3ull << 30, 25, 10, 70500, 700000, 1980, 2619, 35, 1, 0},
    {"0000:43:00.0", 80ull << 30, 80000000000ull, 100, 60, 699000, 700000, 1410, 2619, 88, 4 | 8 | 64, 2},
};

int started = 0;

// Writes a figure, if the GPU has such.
template <typename T, typename U> Result tell(T *out, U value) {
#ifdef SILENT
  (void)out, (void)value;
  return NOT_SUPPORTED;
#else
  if (!out) return INVALID_ARGUMENT;
  return *out = static_cast<T>(value), SUCCESS;
#endif
}

} // namespace

extern "C" {

struct Memory {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

struct Utilization {
  unsigned gpu, memory;
};

Result nvmlInit_v2() { return ++started, SUCCESS; }

Result nvmlShutdown() { return started > 0 ? (--started, SUCCESS) : UNINITIALIZED; }

Result nvmlDeviceGetCount_v2(unsigned *count) {
  if (!started) return UNINITIALIZED;
  return *count = GPUS, SUCCESS;
}

Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
  if (!started) return UNINITIALIZED;
  if (index >= GPUS) return INVALID_ARGUMENT;
  return *gpu = &gpus[index], SUCCESS;
}

Result nvmlDeviceGetHandleByPciBusId_v2(const char *address, Gpu **gpu) {
  if (!started) return UNINITIALIZED;
  for (unsigned index = 0; index < GPUS; index++)
    if (!std::strcmp(gpus[index].address, address)) return *gpu = &gpus[index], SUCCESS;
  return NOT_FOUND;
}

Result nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *out) {
  Result result = tell(&out->gpu, gpu->busy);
  return result == SUCCESS ? tell(&out->memory, gpu->memory_busy) : result;
}

Result nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *out) { return tell(out, gpu->milliwatts); }

Result nvmlDeviceGetEnforcedPowerLimit(Gpu *gpu, unsigned *out) { return tell(out, gpu->limit_milliwatts); }

Result nvmlDeviceGetClockInfo(Gpu *gpu, unsigned clock, unsigned *out) {
  enum { SM = 1, MEMORY = 2 };
  if (clock != SM && clock != MEMORY) return INVALID_ARGUMENT;
  return tell(out, clock == SM ? gpu->sm_megahertz : gpu->memory_megahertz);
}

Result nvmlDeviceGetTemperature(Gpu *gpu, unsigned sensor, unsigned *out) {
  return sensor ? INVALID_ARGUMENT : tell(out, gpu->celsius);
}

Result nvmlDeviceGetTotalEccErrors(Gpu *gpu, unsigned type, unsigned counter, unsigned long long *out) {
  enum { UNCORRECTED = 1, VOLATILE = 0 };
  return type == UNCORRECTED && counter == VOLATILE ? tell(out, gpu->errors) : INVALID_ARGUMENT;
}

#ifndef OLD
Result nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory *out) {
  if (out->version != (sizeof(Memory) | 2u << 24)) return INVALID_ARGUMENT;
  Result result = tell(&out->total, gpu->memory);
  if (result == SUCCESS) out->used = gpu->used, out->reserved = 0, out->free = gpu->memory - gpu->used;
  return result;
}

Result nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *out) { return tell(out, gpu->slowed); }
#endif
}
