"""Every product and attention kernel at the shapes of models, on random data: `kernels.py CUBINS`, a folder with `gemm.cubin.gz` and so on.

Compares with float64 or float32 by PyTorch, bits of a row over all ways to compute it, and times beside cuBLAS and PyTorch's attention.
Times are medians over replays of a graph of launches that go through several weights, so that the cache does not hold them.
"""

import ctypes
import gzip
import statistics
import struct
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

PAGE, SPLIT, ROWS, WARPS = 32, 256, 16, 4
# Name of a tile, rows of the weight and tokens, threads, bytes of shared memory, and whether a block may compute one chunk or all.
TILES = {
    8: (64, 8, 128, 0, "each"),
    32: (64, 32, 128, 4 * (64 + 32) * 128 + 16, "each"),
    64: (128, 64, 256, 4 * (128 + 64) * 128 + 16, "either"),
    128: (128, 128, 256, 3 * (128 + 128) * 128 + 16, "all"),
}
# Weights of models: rows and depth.
WEIGHTS = {
    "llama3-8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)},
    "qwen3-0.6b": {"qkv": (4096, 1024), "out": (1024, 2048), "gate+up": (6144, 1024), "down": (1024, 3072), "head": (151936, 1024)},
}

driver = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    result = getattr(driver, name)(*arguments)
    if result:
        raise RuntimeError(f"{name} gives {result}")


class Kernels:
    """Kernels of a cubin by name."""

    def __init__(self, path):
        self.image = gzip.decompress(path.read_bytes())
        self.module = ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(self.module), self.image)
        self.found = {}

    def launch(self, name, grid, threads, shared, params):
        if name not in self.found:
            function = ctypes.c_void_p()
            call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
            if shared:
                call("cuFuncSetAttribute", function, 8, shared)
            self.found[name] = function
        held = ctypes.create_string_buffer(params, len(params))
        pointers = (ctypes.c_void_p * 1)(ctypes.cast(held, ctypes.c_void_p))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call("cuLaunchKernel", self.found[name], *grid, threads, 1, 1, shared, stream, pointers, None)


def seconds(launches, repeat=7):
    """Median time of one of `launches`, functions that are captured into one graph."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeat + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(launches))
    return statistics.median(times[1:])


def chunk_of(rows, depth, blocks=528, least=512):
    """Values of K in a chunk, as `kernels/src/cuda/layer.rs` has it."""
    tiles = -(-rows // 64)
    chunks = max(1, min(-(-blocks // tiles), 8, depth // least))
    return -(-depth // chunks // 64) * 64


class Product:
    def __init__(self, kernels):
        self.kernels = kernels
        self.partials = torch.full((64 << 20,), float("nan"), device="cuda")
        self.arrived = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")

    def store(self, tile, x, weight, out, chunk, is_split, what="store"):
        n, m, threads, shared, _ = TILES[tile]
        (rows, depth), columns = x.shape, weight.shape[0]
        tiles_n, tiles_m, chunks = -(-columns // n), -(-rows // m), -(-depth // chunk) if is_split else 1
        assert chunks == 1 or tiles_n * tiles_m * chunks * n * m <= self.partials.numel(), "partial results"
        pointers = (x.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), self.partials.data_ptr(), self.arrived.data_ptr())
        params = struct.pack("6Q6I", *pointers, rows, columns, depth, out.shape[1], chunk, chunks)
        if what == "silu":
            params += struct.pack("II", columns // 2, 0)
        self.kernels.launch(f"gemm_{what}_{tile}", (tiles_n, tiles_m, chunks), threads, shared, params)


def ways(rows, columns):
    """Tiles, and whether chunks are split, that are of use for a number of tokens."""
    for tile, (n, m, _, _, chunks) in TILES.items():
        blocks = -(-columns // n) * -(-rows // m)
        if m <= max(8, 4 * rows) and rows <= 16 * m:
            if chunks != "all" and blocks <= 1600:
                yield tile, True
            if chunks != "each":
                yield tile, False


def products(gemm, peers=True):
    product = Product(gemm)
    bits = "the same bits"
    for model, weights in WEIGHTS.items():
        for name, (columns, depth) in weights.items():
            copies = max(1, min(8, (300 << 20) // (2 * columns * depth)))
            stacked = [torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
            chunk = chunk_of(columns, depth)
            print(f"{model} {name} {columns} x {depth}, chunks of {chunk}")
            most = 256 if name == "head" else 4096
            x = torch.randn(most, depth, device="cuda", dtype=torch.bfloat16)
            want = x[:256].float() @ stacked[0].float().T
            first = torch.full((most, columns), float("nan"), device="cuda")
            product.store(8, x[:256], stacked[0], first, chunk, True)
            far = ((first[:256] - want).norm() / want.norm()).item()
            print(f"  error against f32 {far:.1e}")
            for rows in (1, 32, 256, 2048):
                if rows > most:
                    continue
                out = torch.full((rows, columns), float("nan"), device="cuda")
                line = []
                for tile, is_split in ways(rows, columns):
                    out.fill_(float("nan"))
                    product.store(tile, x[:rows], stacked[0], out, chunk, is_split)
                    same = torch.equal(out[:256], first[: min(rows, 256)])
                    bits = bits if same else "OTHER BITS"
                    took = seconds([lambda w=w: product.store(tile, x[:rows], w, out, chunk, is_split) for w in stacked])
                    line.append(f"{tile}{'/' if is_split else ''} {took * 1e6:.1f}{'' if same else ' OTHER BITS'}")
                    best = took if len(line) == 1 else min(best, took)
                half = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
                peer = seconds([lambda w=w: torch.mm(x[:rows], w.T, out=half) for w in stacked])
                moved, flops = 2 * columns * depth / best / 1e12, 2 * rows * columns * depth / best / 1e12
                print(f"  {rows}: us {', '.join(line)}; cuBLAS {peer * 1e6:.1f} ({peer / best:.2f}x); {moved:.2f} TB/s, {flops:.0f} TFLOP/s")
    print("products:", bits)
    assert bits == "the same bits"


class Attention:
    """Paged KV of one layer for `sequences` of `context` tokens, on shuffled pages."""

    def __init__(self, kernels, sequences, context, heads, kv_heads, dim):
        self.held = []
        self.kernels, self.shape = kernels, (sequences, context, heads, kv_heads, dim)
        pages = -(-context // PAGE)
        self.cache = torch.randn(sequences * pages, 2, kv_heads, PAGE, dim, device="cuda", dtype=torch.bfloat16)
        self.order = torch.randperm(sequences * pages, device="cuda").view(sequences, pages)
        self.tables = self.order.to(torch.int32).contiguous()

    def plain(self):
        """K and V of all sequences as `[sequences, kv_heads, context, dim]`."""
        sequences, context, _, kv_heads, dim = self.shape
        kv = self.cache[self.order].permute(2, 0, 3, 1, 4, 5).reshape(2, sequences, kv_heads, -1, dim)
        return kv[:, :, :, :context].contiguous()

    def params(self, queries, out, positions, table_at, items, parts_max):
        _, _, heads, kv_heads, dim = self.shape
        stride = heads * dim
        parts = kv_heads * -(-(heads // kv_heads) // ROWS)
        partials = torch.full((max(1, len(items) * parts * parts_max * WARPS * ROWS * (dim + 4)),), float("nan"), device="cuda")
        arrived = torch.zeros(len(items) * parts, dtype=torch.int32, device="cuda")
        pointers = [queries, out, self.cache, positions, table_at, self.tables, items, partials, arrived]
        self.held.append(pointers)
        numbers = (heads, kv_heads, dim, stride)
        return struct.pack("9Q4IfII4x", *(p.data_ptr() for p in pointers), *numbers, dim**-0.5, 0, parts_max)

    def decode(self, queries, out):
        sequences, context, heads, kv_heads, dim = self.shape
        word = dict(dtype=torch.int32, device="cuda")
        parts_max = -(-context // (SPLIT * WARPS))
        positions = torch.full((sequences,), context - 1, **word)
        table_at = torch.arange(sequences, **word) * self.tables.shape[1]
        params = self.params(queries, out, positions, table_at, torch.arange(sequences, **word), parts_max)
        grid = (sequences, kv_heads * -(-(heads // kv_heads) // ROWS), parts_max)
        return lambda: self.kernels.launch(f"attention_decode_{dim}", grid, 128, 0, params)

    def prefill(self, queries, out):
        sequences, context, heads, kv_heads, dim = self.shape
        word = dict(dtype=torch.int32, device="cuda")
        tokens = 128 // (heads // kv_heads)
        positions = torch.arange(context, **word).repeat(sequences)
        table_at = (torch.arange(sequences, **word) * self.tables.shape[1]).repeat_interleave(context)
        starts = [(s * context + at, min(tokens, context - at)) for s in range(sequences) for at in reversed(range(0, context, tokens))]
        items = torch.tensor(starts, **word)
        params = self.params(queries, out, positions, table_at, items, 1)
        return lambda: self.kernels.launch(f"attention_prefill_{dim}", (len(starts), kv_heads, 1), 256, 0, params)


def attention(kernels):
    is_good = True
    for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 128), (4, 2, 64)):
        print(f"attention, {heads}/{kv_heads} heads of {dim}")
        for sequences, context in ((1, 1024), (1, 8192), (32, 1024), (256, 1024)):
            state = Attention(kernels, sequences, context, heads, kv_heads, dim)
            queries = torch.randn(sequences, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
            out = torch.full((sequences, heads * dim), float("nan"), device="cuda", dtype=torch.bfloat16)
            launch = state.decode(queries, out)
            launch()
            k, v = state.plain()
            want = scaled_dot_product_attention(queries.float(), k.float(), v.float(), enable_gqa=True).view(sequences, -1)
            far = ((out.float() - want).norm() / want.norm()).item()
            is_good &= far < 5e-3
            took = seconds([launch] * 8)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                peer = seconds([lambda: scaled_dot_product_attention(queries, k, v, enable_gqa=True)] * 8)
            moved = 4 * sequences * context * kv_heads * dim
            print(f"  decode {sequences} x {context}: {took * 1e6:.1f} us, {moved / took / 1e12:.2f} TB/s, error {far:.1e}; PyTorch flash {peer * 1e6:.1f} us")
        for sequences, context in ((1, 2048), (1, 8192)):
            state = Attention(kernels, sequences, context, heads, kv_heads, dim)
            queries = torch.randn(sequences, context, heads, dim, device="cuda", dtype=torch.bfloat16)
            out = torch.full((context, heads * dim), float("nan"), device="cuda", dtype=torch.bfloat16)
            launch = state.prefill(queries, out)
            launch()
            k, v = state.plain()
            turned = queries.transpose(1, 2)
            flash = {}
            for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
                with sdpa_kernel([getattr(SDPBackend, name)]):
                    ask = lambda: scaled_dot_product_attention(turned, k, v, is_causal=True, enable_gqa=True)
                    try:
                        theirs = ask()
                        flash[name] = seconds([ask] * 4)
                    except RuntimeError as error:
                        flash[name] = float("nan")
                        print("  ", name, str(error)[:100])
            want = scaled_dot_product_attention(turned.float()[:, :, :2048], k.float()[:, :, :2048], v.float()[:, :, :2048], is_causal=True, enable_gqa=True)
            got = out.view(context, heads, dim)[:2048].transpose(0, 1).float()
            far = ((got - want[0]).norm() / want.norm()).item()
            # The last token by the other kernel.
            alone = torch.full((1, heads * dim), float("nan"), device="cuda", dtype=torch.bfloat16)
            state.decode(queries[:, -1].contiguous(), alone)()
            same = torch.equal(alone[0], out[-1])
            is_good &= far < 5e-3 and same
            took = seconds([launch] * 4)
            flops = 2 * heads * dim * context**2
            rates = ", ".join(f"{name.split('_')[0].lower()} {flops / s / 1e12:.0f}" for name, s in flash.items())
            print(f"  prefill {context}: {took * 1e6:.1f} us, {flops / took / 1e12:.0f} TFLOP/s (PyTorch: {rates}), error {far:.1e}, {'the same bits' if same else 'OTHER BITS'} as decode")
    assert is_good


def main():
    folder = Path(sys.argv[1])
    torch.manual_seed(1)
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    failed = []
    for part, name in ((attention, "attention"), (products, "gemm")):
        try:
            part(Kernels(folder / f"{name}.cubin.gz"))
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print("FAILED", failed[-1])
    sys.exit("; ".join(failed) or 0)


if __name__ == "__main__":
    main()
