// A stand-in for the CUDA driver: host memory, and kernels run by the host model. For tests; nothing of it is in the product.
//
// An unchanged program finds it by LD_LIBRARY_PATH. It has the functions that `kernels/src/cuda/driver.rs` calls, and it is strict where a
// real driver would fail or corrupt: work waits on its stream until somebody waits for it, new memory is NaN, copies and launches are
// checked against allocations and limits, calls need a current context, and a module has the kernels that its cubin names.
//
// PENSTOCK_STAND_IN is a list of settings, as `no-device,driver=11080`:
//   no-device       a driver without a GPU                 capability=75      compute capability 7.5
//   driver=11080    the version of CUDA that it serves     memory=BYTES       the GPU's memory
//   busy            another process has the GPU alone      held=BYTES         the part of the memory that other processes hold
//   lost-after=N    the GPU fails at launch N and stays so   skip-kernels   kernels do nothing: what is left is the host's work
// `stand_in_set` takes the same text at run time, for tests in one process.
#define PENSTOCK_HOST
#include "../rows.cu"
#include "../gemm.cu"
#include "../wgmma.cu"
#include "../wgmma_fed.cu"
#include "../attention.cu"
#include "../wgmma_attention.cu"
#include "../sampling.cu"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

typedef int Result;
typedef u64 Pointer;
enum : Result {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  DEVICE_UNAVAILABLE = 46,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  LAUNCH_FAILED = 719,
};

namespace {

struct Settings {
  bool no_device = false, skip_kernels = false, busy = false;
  int driver = 13000, capability = 90;
  u64 memory = 64ull << 30, held = 0;
  long lost_after = -1;
};

struct Function {
  const char *name;
  size_t params;
  unsigned threads;
  size_t shared; // bytes of shared memory that the launch has to give
  void (*call)(const void *params);
};

// Most bytes of shared memory of a launch, by function, once they were asked for.
std::map<const void *, size_t> shared_max;

template <class P, void (*kernel)(P)>
Function function(const char *name, unsigned threads, size_t shared = 0) {
  return {name, sizeof(P), threads, shared, [](const void *params) { kernel(*(const P *)params); }};
}

const Function FUNCTIONS[] = {
    function<EmbedParams, embed>("embed", ROW_THREADS),
    function<SelectParams, select_rows>("select_rows", ROW_THREADS),
    function<RmsnormParams, rmsnorm>("rmsnorm", ROW_THREADS),
    function<GemmParams, gemm_store_8>("gemm_store_8", Tile8::THREADS, sizeof(Tile8::Shared)),
    function<GemmParams, gemm_store_8_tall>("gemm_store_8_tall", Tile8Tall::THREADS, sizeof(Tile8Tall::Shared)),
    function<GemmParams, gemm_store_64>("gemm_store_64", Tile64::THREADS, sizeof(Tile64::Shared)),
    function<GemmParams, gemm_store_128>("gemm_store_128", Tile128::THREADS, sizeof(Tile128::Shared)),
    function<GemmParams, gemm_store_wide_64>("gemm_store_wide_64", Wide64::THREADS, sizeof(Wide64::Shared)),
    function<GemmParams, gemm_store_wide_128>("gemm_store_wide_128", Wide128::THREADS, sizeof(Wide128::Shared)),
    function<GemmParams, gemm_store_fed_256>("gemm_store_fed_256", Fed256::THREADS, sizeof(Fed256::Shared)),
    function<GemmParams, gemm_add_8>("gemm_add_8", Tile8::THREADS, sizeof(Tile8::Shared)),
    function<GemmParams, gemm_add_8_tall>("gemm_add_8_tall", Tile8Tall::THREADS, sizeof(Tile8Tall::Shared)),
    function<GemmParams, gemm_add_64>("gemm_add_64", Tile64::THREADS, sizeof(Tile64::Shared)),
    function<GemmParams, gemm_add_128>("gemm_add_128", Tile128::THREADS, sizeof(Tile128::Shared)),
    function<GemmParams, gemm_add_wide_64>("gemm_add_wide_64", Wide64::THREADS, sizeof(Wide64::Shared)),
    function<GemmParams, gemm_add_wide_128>("gemm_add_wide_128", Wide128::THREADS, sizeof(Wide128::Shared)),
    function<GemmParams, gemm_add_fed_256>("gemm_add_fed_256", Fed256::THREADS, sizeof(Fed256::Shared)),
    function<GemmParams, gemm_store_chunks_8>("gemm_store_chunks_8", Chunks8::THREADS, sizeof(Chunks8::Shared)),
    function<GemmParams, gemm_store_chunks_32>("gemm_store_chunks_32", Chunks32::THREADS, sizeof(Chunks32::Shared)),
    function<GemmParams, gemm_store_chunks_128>("gemm_store_chunks_128", Tile128::THREADS, sizeof(Tile128::Shared)),
    function<GemmParams, gemm_store_chunks_wide_64>("gemm_store_chunks_wide_64", WideChunks64::THREADS, sizeof(WideChunks64::Shared)),
    function<GemmParams, gemm_store_chunks_wide_tall>("gemm_store_chunks_wide_tall", Wide64::THREADS, sizeof(Wide64::Shared)),
    function<GemmParams, gemm_store_chunks_wide_large>("gemm_store_chunks_wide_large", Wide128::THREADS, sizeof(Wide128::Shared)),
    function<GemmParams, gemm_add_chunks_8>("gemm_add_chunks_8", Chunks8::THREADS, sizeof(Chunks8::Shared)),
    function<GemmParams, gemm_add_chunks_32>("gemm_add_chunks_32", Chunks32::THREADS, sizeof(Chunks32::Shared)),
    function<GemmParams, gemm_add_chunks_128>("gemm_add_chunks_128", Tile128::THREADS, sizeof(Tile128::Shared)),
    function<GemmParams, gemm_add_chunks_wide_64>("gemm_add_chunks_wide_64", WideChunks64::THREADS, sizeof(WideChunks64::Shared)),
    function<GemmParams, gemm_add_chunks_wide_tall>("gemm_add_chunks_wide_tall", Wide64::THREADS, sizeof(Wide64::Shared)),
    function<GemmParams, gemm_add_chunks_wide_large>("gemm_add_chunks_wide_large", Wide128::THREADS, sizeof(Wide128::Shared)),
    function<GatedParams, gemm_silu_8>("gemm_silu_8", Tile8::THREADS, sizeof(Tile8::Shared)),
    function<GatedParams, gemm_silu_8_tall>("gemm_silu_8_tall", Tile8Tall::THREADS, sizeof(Tile8Tall::Shared)),
    function<GatedParams, gemm_silu_64>("gemm_silu_64", Tile64::THREADS, sizeof(Tile64::Shared)),
    function<GatedParams, gemm_silu_128>("gemm_silu_128", Tile128::THREADS, sizeof(Tile128::Shared)),
    function<GatedParams, gemm_silu_wide_64>("gemm_silu_wide_64", Wide64::THREADS, sizeof(Wide64::Shared)),
    function<GatedParams, gemm_silu_wide_128>("gemm_silu_wide_128", Wide128::THREADS, sizeof(Wide128::Shared)),
    function<GatedParams, gemm_silu_fed_256>("gemm_silu_fed_256", Fed256::THREADS, sizeof(Fed256::Shared)),
    function<HeadsParams, finish_heads>("finish_heads", HEAD_THREADS),
    function<AttentionParams, attention>("attention", HEAD_THREADS),
    function<AttentionParams, attention_decode_64>("attention_decode_64", HEAD_THREADS),
    function<AttentionParams, attention_decode_128>("attention_decode_128", HEAD_THREADS),
    function<AttentionParams, attention_prefill_64>("attention_prefill_64", PREFILL_THREADS, sizeof(PrefillShared<64>)),
    function<AttentionParams, attention_prefill_128>("attention_prefill_128", PREFILL_THREADS, sizeof(PrefillShared<128>)),
    function<AttentionParams, attention_grouped_64>("attention_grouped_64", Grouped<64>::THREADS, sizeof(Grouped<64>::Shared)),
    function<AttentionParams, attention_grouped_128>("attention_grouped_128", Grouped<128>::THREADS, sizeof(Grouped<128>::Shared)),
    function<BestPartsParams, best_parts>("best_parts", PART_THREADS),
    function<BestTokensParams, best_tokens>("best_tokens", MERGE_THREADS),
    function<DrawParams, draw_sums>("draw_sums", SUM_THREADS),
    function<DrawParams, draw_tokens>("draw_tokens", DRAW_THREADS),
};

struct Stream {
  std::deque<std::function<void()>> work;
};

struct Module {
  std::string image;
};

std::recursive_mutex lock;
Settings settings;
bool configured = false, started = false, lost = false;
long launches = 0;
u64 used = 0;
std::map<Pointer, size_t> allocations;
std::vector<Stream *> streams;
std::map<Pointer, size_t> pinned; // memory of the host that copies are made from when the stream gets there
thread_local void *current = nullptr;
char context; // its address is the one context

void configure(const char *text) {
  settings = Settings();
  launches = 0, lost = false, configured = true;
  std::string all = text ? text : "";
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find(',', at), all.size()), equals = all.find('=', at);
    const std::string name = all.substr(at, std::min(equals, end) - at);
    const long value = equals < end ? atol(all.c_str() + equals + 1) : 0;
    if (name == "no-device") settings.no_device = true;
    else if (name == "skip-kernels") settings.skip_kernels = true;
    else if (name == "driver") settings.driver = value;
    else if (name == "capability") settings.capability = value;
    else if (name == "memory") settings.memory = value;
    else if (name == "busy") settings.busy = true;
    else if (name == "held") settings.held = value;
    else if (name == "lost-after") settings.lost_after = value;
    else model::fail(("no setting of the stand-in: " + name).c_str());
    at = end + 1;
  }
}

void configure_once() {
  if (!configured) configure(getenv("PENSTOCK_STAND_IN"));
}

// State in which a call that needs a context finds the driver.
Result ready() {
  if (!started) return NOT_INITIALIZED;
  if (lost) return LAUNCH_FAILED;
  return current == &context ? SUCCESS : INVALID_CONTEXT;
}

// Bytes of the memory that nobody holds.
u64 left() {
  const u64 all = used + settings.held;
  return settings.memory - std::min(all, settings.memory);
}

// True if the range lies in one allocation.
bool is_allocated(Pointer pointer, size_t bytes, const std::map<Pointer, size_t> &allocations = ::allocations) {
  auto next = allocations.upper_bound(pointer);
  if (next == allocations.begin()) return false;
  auto [start, size] = *std::prev(next);
  return pointer - start <= size && bytes <= size - (pointer - start);
}

Result drain(Stream *stream) {
  while (!stream->work.empty()) {
    auto work = std::move(stream->work.front());
    stream->work.pop_front();
    work();
  }
  return lost ? LAUNCH_FAILED : SUCCESS;
}

} // namespace

#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)
#define READY                                \
  LOCKED;                                    \
  if (Result state = ready()) return state

extern "C" {

void stand_in_set(const char *text) {
  LOCKED;
  configure(text);
}

Result cuInit(unsigned) {
  LOCKED;
  configure_once();
  if (settings.no_device) return NO_DEVICE;
  started = true;
  return SUCCESS;
}

Result cuDriverGetVersion(int *version) {
  LOCKED;
  configure_once();
  *version = settings.driver;
  return SUCCESS;
}

Result cuGetErrorName(Result result, const char **name) {
  static const std::map<Result, const char *> names = {
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},     {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
      {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},   {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
      {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},             {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
      {DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
  };
  auto found = names.find(result);
  if (found == names.end()) return INVALID_VALUE;
  *name = found->second;
  return SUCCESS;
}

Result cuDeviceGetCount(int *count) {
  if (!started) return NOT_INITIALIZED;
  *count = 1;
  return SUCCESS;
}

Result cuDeviceGet(int *device, int index) {
  if (index != 0) return INVALID_DEVICE;
  *device = 0;
  return SUCCESS;
}

Result cuDeviceGetName(char *name, int length, int) {
  snprintf(name, length, "stand-in on the CPU");
  return SUCCESS;
}

Result cuDeviceTotalMem_v2(size_t *bytes, int) {
  *bytes = settings.memory;
  return SUCCESS;
}

Result cuDeviceGetAttribute(int *value, int attribute, int) {
  enum { MULTIPROCESSORS = 16, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
  if (attribute == MULTIPROCESSORS) return *value = 4, SUCCESS;
  if (attribute != CAPABILITY_MAJOR && attribute != CAPABILITY_MINOR) return INVALID_VALUE;
  *value = attribute == CAPABILITY_MAJOR ? settings.capability / 10 : settings.capability % 10;
  return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(void **made, int) {
  if (!started) return NOT_INITIALIZED;
  if (settings.busy) return DEVICE_UNAVAILABLE;
  *made = &context;
  return SUCCESS;
}

Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

Result cuCtxSetCurrent(void *made) {
  if (made != &context && made) return INVALID_CONTEXT;
  current = made;
  return SUCCESS;
}

Result cuMemGetInfo_v2(size_t *free, size_t *total) {
  READY;
  *free = left(), *total = settings.memory;
  return SUCCESS;
}

Result cuMemAlloc_v2(Pointer *pointer, size_t bytes) {
  READY;
  if (bytes == 0) return INVALID_VALUE;
  if (bytes > left()) return OUT_OF_MEMORY;
  void *memory = nullptr;
  if (posix_memalign(&memory, 256, bytes)) return OUT_OF_MEMORY;
  memset(memory, 0xff, bytes);
  *pointer = (Pointer)memory;
  allocations[*pointer] = bytes;
  used += bytes;
  return SUCCESS;
}

// Waits for work that may use the memory, as a driver does.
Result cuMemFree_v2(Pointer pointer) {
  LOCKED;
  auto found = allocations.find(pointer);
  if (found == allocations.end()) return INVALID_VALUE;
  for (Stream *stream : streams) drain(stream);
  used -= found->second;
  allocations.erase(found);
  free((void *)pointer);
  return SUCCESS;
}

Result cuMemAllocHost_v2(void **memory, size_t bytes) {
  READY;
  if (posix_memalign(memory, 4096, bytes)) return OUT_OF_MEMORY;
  memset(*memory, 0xff, bytes);
  pinned[(Pointer)*memory] = bytes;
  return SUCCESS;
}

Result cuMemFreeHost(void *memory) {
  LOCKED;
  if (!pinned.erase((Pointer)memory)) return INVALID_VALUE;
  free(memory);
  return SUCCESS;
}

Result cuMemsetD8Async(Pointer to, unsigned char value, size_t bytes, Stream *stream) {
  READY;
  if (!is_allocated(to, bytes)) return INVALID_VALUE;
  stream->work.push_back([=] { memset((void *)to, value, bytes); });
  return SUCCESS;
}

// From memory that is not pinned, the driver takes a copy before it returns.
Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t bytes, Stream *stream) {
  READY;
  if (!is_allocated(to, bytes)) return INVALID_VALUE;
  if (is_allocated((Pointer)from, bytes, pinned)) {
    stream->work.push_back([=] { memcpy((void *)to, from, bytes); });
    return SUCCESS;
  }
  std::string copy((const char *)from, bytes);
  stream->work.push_back([=] { memcpy((void *)to, copy.data(), bytes); });
  return SUCCESS;
}

Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, Stream *stream) {
  READY;
  if (!is_allocated(from, bytes)) return INVALID_VALUE;
  memset(to, 0xff, bytes);
  stream->work.push_back([=] { memcpy(to, (void *)from, bytes); });
  return SUCCESS;
}

Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Stream *stream) {
  READY;
  if (!is_allocated(to, bytes) || !is_allocated(from, bytes)) return INVALID_VALUE;
  stream->work.push_back([=] { memmove((void *)to, (void *)from, bytes); });
  return SUCCESS;
}

Result cuStreamCreate(Stream **stream, unsigned) {
  READY;
  *stream = new Stream;
  streams.push_back(*stream);
  return SUCCESS;
}

Result cuStreamSynchronize(Stream *stream) {
  READY;
  return drain(stream);
}

Result cuModuleLoadData(Module **module, const void *image) {
  READY;
  const char *bytes = (const char *)image;
  if (memcmp(bytes, "\x7f" "ELF", 4)) return INVALID_IMAGE;
  // The section headers of a 64-bit ELF file come last: their place, size and number.
  u64 offset;
  u16 size, count;
  memcpy(&offset, bytes + 0x28, 8), memcpy(&size, bytes + 0x3a, 2), memcpy(&count, bytes + 0x3c, 2);
  *module = new Module{std::string(bytes, offset + (u64)size * count)};
  return SUCCESS;
}

Result cuModuleGetFunction(const Function **made, Module *module, const char *name) {
  READY;
  // A kernel's code is a section of this name.
  if (module->image.find(std::string(".text.") + name + '\0') == std::string::npos) return NOT_FOUND;
  for (const Function &each : FUNCTIONS)
    if (!strcmp(each.name, name)) return *made = &each, SUCCESS;
  return NOT_FOUND;
}

Result cuFuncSetAttribute(const Function *kernel, int attribute, int value) {
  READY;
  enum { SHARED_BYTES = 8 };
  if (attribute != SHARED_BYTES || value < 0 || (size_t)value > model::LARGE_MAX) return INVALID_VALUE;
  shared_max[kernel] = value;
  return SUCCESS;
}

// What a launch is given, as the driver has it (CUlaunchConfig, CUlaunchAttribute).
struct Attribute {
  int id;
  alignas(8) char value[64];
};
struct Config {
  unsigned x, y, z, threads, threads_y, threads_z, shared;
  Stream *stream;
  const Attribute *attributes;
  unsigned attribute_count;
};

Result cuLaunchKernelEx(const Config *config, const Function *kernel, void **params, void **) {
  READY;
  enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
  const Config &c = *config;
  if (c.x == 0 || c.y == 0 || c.x > 0x7fffffff || c.y > 65535 || c.z == 0 || c.z > 65535 || c.threads != kernel->threads || c.threads_y != 1 || c.threads_z != 1)
    return INVALID_VALUE;
  // Kernels for older GPUs do not wait for the one before.
  for (unsigned i = 0; i < c.attribute_count; i++)
    if (c.attributes[i].id != PROGRAMMATIC_STREAM_SERIALIZATION || settings.capability < 90) return INVALID_VALUE;
  // 48 KiB without being asked for. A kernel that is given too little would write outside of it.
  const size_t most = shared_max.count(kernel) ? shared_max[kernel] : 48 << 10;
  if (c.shared > most || c.shared < kernel->shared) return INVALID_VALUE;
  if (settings.lost_after >= 0 && launches++ >= settings.lost_after) {
    c.stream->work.push_back([] { lost = true; });
    return SUCCESS;
  }
  if (settings.skip_kernels) return SUCCESS;
  std::string copy((const char *)params[0], kernel->params);
  const model::Grid grid = {c.x, c.y, c.z};
  c.stream->work.push_back([=] { model::run(grid, kernel->threads, kernel->call, copy.data()); });
  return SUCCESS;
}

} // extern "C"
