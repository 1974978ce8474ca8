"""Every product and attention kernel at the shapes of models, on random data: `kernels.py PREBUILT [PART]...`, the folder with cubins of all architectures
and the parts to run: bits, ends, products, end_times, attention; all without.

Compares with float64 or float32 by PyTorch, bits of a row over all ways to compute it, and times beside cuBLAS and PyTorch's attention.
Times are medians over replays of a graph of launches that go through several weights, so that the cache does not hold them.
"""

import ctypes
import gzip
import statistics
import struct
import sys
import traceback
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

PAGE, SPLIT, ROWS, WARPS = 32, 128, 16, 4
# By the end of a kernel's name: rows of the weight and tokens of a tile, threads, stages of shared memory, as `kernels/src/cuda/tiles.rs` has them.
TILES = {
    "8": (16, 8, 32, 10),
    "8_tall": (64, 8, 128, 8),
    "64": (32, 64, 128, 8),
    "128": (128, 128, 256, 3),
    "wide_64": (128, 64, 256, 6),
    "wide_128": (128, 128, 256, 6),
    "fed_256": (128, 256, 384, 4),
    "chunks_8": (16, 8, 128, 24),
    "chunks_32": (16, 32, 128, 16),
    "chunks_128": (128, 128, 256, 3),
    "chunks_wide_64": (64, 64, 512, 12),
    "chunks_wide_tall": (128, 64, 256, 6),
    "chunks_wide_large": (128, 128, 256, 6),
}
# Kernels of attention for several rows of a sequence: threads, tokens of keys and of values in shared memory, bytes of its barriers.
PREFILLS = {"prefill": (256, 6 * PAGE, 0), "grouped": (384, 128 + 5 * SPLIT, 1024)}


def chunk_of(columns, depth):
    """Depth of a chunk of a weight that is summed in chunks, as `tiles.rs` has it; `None`: it is one chain."""
    return None if columns > 5120 or depth < 2048 else -(-depth // 256) * 64


# Weights of models: rows and depth.
WEIGHTS = {
    "llama3-8b": {
        "qkv": (6144, 4096),
        "out": (4096, 4096),
        "gate+up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "qwen3-0.6b": {
        "qkv": (4096, 1024),
        "out": (1024, 2048),
        "gate+up": (6144, 1024),
        "down": (1024, 3072),
        "head": (151936, 1024),
    },
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


class Product:
    """Kernels of products, in one cubin or several."""

    def __init__(self, folder):
        kinds = {"wide": "wgmma", "fed": "wgmma_fed"}
        kind = {tile: next((kind for kind in kinds if kind in tile), None) for tile in TILES}
        self.cubins = {tile: kinds.get(kind[tile], "gemm") for tile in TILES}
        paths = {name: folder / f"{name}.cubin.gz" for name in set(self.cubins.values())}
        self.kernels = {name: Kernels(path) for name, path in paths.items() if path.exists()}
        self.tiles = [tile for tile in TILES if self.cubins[tile] in self.kernels]

    def store(self, tile, x, weight, out, end="store"):
        n, m, threads, stages = TILES[tile]
        (rows, depth), columns = x.shape, weight.shape[0]
        pointers = (x.data_ptr(), weight.data_ptr(), 0, out.data_ptr())
        chunk = chunk_of(columns, depth) or depth
        params = struct.pack("4Q5I4x", *pointers, rows, columns, depth, out.shape[1], chunk)
        if end == "silu":
            params += struct.pack("I4x", columns // 2)
        # Beside the stages, a fed tile has barriers.
        shared = stages * (n + m) * 128 + (1024 if tile.startswith("fed") else 0)
        grid = (-(-rows // m), -(-columns // n), 1)
        self.kernels[self.cubins[tile]].launch(f"gemm_{end}_{tile}", grid, threads, shared, params)

    def summing(self, chunked):
        """Tiles that sum in chunks, or those that do not."""
        return [tile for tile in self.tiles if tile.startswith("chunks") == chunked]

    def of_use(self, rows, columns, depth):
        """Tiles for a weight that are not far too large or too small for a number of tokens."""
        tiles = self.summing(chunk_of(columns, depth) is not None)
        return [tile for tile in tiles if TILES[tile][1] <= max(8, 4 * rows) and rows <= 32 * TILES[tile][1]]


def bits(folder):
    """Bits of every row, alone and at every place of steps of 1 to 4096 rows, by every tile."""
    product, checked = Product(folder), 0
    shapes = ((320, 4096), (1024, 3072), (4096, 14336))
    for (columns, depth), chunked in ((shape, chunked) for shape in shapes for chunked in (False, True)):
        weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(4096, depth, device="cuda", dtype=torch.bfloat16)
        alone = torch.full((4096, columns), float("nan"), device="cuda")
        tiles = product.summing(chunked)
        for row in range(0, 4096, 1 if columns == 320 else 37):
            product.store(tiles[0], x[row : row + 1], weight, alone[row : row + 1])
        known = ~alone[:, 0].isnan()
        for rows in (*range(1, 66), 100, 127, 128, 129, 255, 256, 257, 511, 1000, 2048, 4095, 4096):
            for tile in tiles:
                for first in {0, (4096 - rows) // 2, 4096 - rows}:
                    out = torch.full((rows, columns), float("nan"), device="cuda")
                    product.store(tile, x[first : first + rows], weight, out)
                    some = known[first : first + rows]
                    if not torch.equal(out[some], alone[first : first + rows][some]) or out.isnan().any():
                        raise AssertionError(f"other bits: {rows} rows from {first}, {columns} x {depth}, tile {tile}")
                    checked += int(some.sum())
    print(f"bits: {checked} rows in steps of 1 to 4096, {len(product.tiles)} tiles: the same as alone")


def ends(folder):
    """What tiles do with their sums besides storing them: added to a residual, the bits of a sum; gated, close to f32."""
    product = Product(folder)
    for columns, depth, chunked in ((6144, 1024, False), (1024, 2112, True)):
        weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) / 32
        tiles = product.summing(chunked)
        for rows in (1, 8, 65, 300):
            x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
            stored = torch.full((rows, columns), float("nan"), device="cuda")
            product.store(tiles[0], x, weight, stored)
            residual = torch.randn(rows, columns, device="cuda")
            groups = stored.view(rows, -1, 2, 8)
            gated = (torch.nn.functional.silu(groups[:, :, 0]) * groups[:, :, 1]).reshape(rows, -1)
            for tile in tiles:
                added = residual.clone()
                product.store(tile, x, weight, added, "add")
                assert torch.equal(added, residual + stored), f"{rows} rows added by tile {tile}"
                if chunked:
                    continue
                out = torch.full((rows, columns // 2), float("nan"), device="cuda", dtype=torch.bfloat16)
                product.store(tile, x, weight, out, "silu")
                far = ((out.float() - gated).norm() / gated.norm()).item()
                assert far < 3e-3, f"{rows} rows gated by tile {tile}: {far:.1e}"
    print(f"ends: sums added and gated by {len(product.tiles)} tiles")


def products(folder):
    product = Product(folder)
    for model, weights in WEIGHTS.items():
        for name, (columns, depth) in weights.items():
            copies = max(1, min(8, (300 << 20) // (2 * columns * depth)))
            stacked = [torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
            most = 256 if name == "head" else 4096
            x = torch.randn(most, depth, device="cuda", dtype=torch.bfloat16)
            want = x[:256].double() @ stacked[0].double().T
            print(f"{model} {name} {columns} x {depth}")
            for rows in (1, 8, 32, 128, 256, 4096):
                if rows > most:
                    continue
                line, far = {}, 0
                for tile in product.of_use(rows, columns, depth):
                    out = torch.full((rows, columns), float("nan"), device="cuda")
                    product.store(tile, x[:rows], stacked[0], out)
                    some = min(rows, 256)
                    far = max(far, ((out[:some] - want[:some]).norm() / want[:some].norm()).item())
                    line[tile] = seconds([partial(product.store, tile, x[:rows], w, out) for w in stacked])
                half = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
                peer = seconds([partial(torch.mm, x[:rows], w.T, out=half) for w in stacked])
                best = min(line.values())
                moved, flops = 2 * columns * depth / best / 1e12, 2 * rows * columns * depth / best / 1e12
                times = ", ".join(
                    f"{tile} {took * 1e6:.1f}" for tile, took in sorted(line.items(), key=lambda item: item[1])
                )
                print(
                    f"  {rows}: us {times}; cuBLAS {peer * 1e6:.1f} ({peer / best:.2f}x); {moved:.2f} TB/s, {flops:.0f} TFLOP/s, error {far:.0e}"
                )
                # Matrix units cut off what they add to a long chain, cuBLAS's too.
                assert far < 5e-5, "far from float64"


def end_times(folder):
    """Products of a layer by what is done with their sums, every tile, microseconds."""
    product = Product(folder)
    for model, weights in WEIGHTS.items():
        for name, end in (("qkv", "store"), ("out", "add"), ("gate+up", "silu"), ("down", "add")):
            columns, depth = weights[name]
            copies = max(1, min(8, (300 << 20) // (2 * columns * depth)))
            stacked = [torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(copies)]
            x = torch.randn(4096, depth, device="cuda", dtype=torch.bfloat16)
            halves = (columns // 2, torch.bfloat16) if end == "silu" else (columns, torch.float32)
            for rows in (1, 32, 256, 2048, 4096):
                out = torch.zeros(rows, halves[0], device="cuda", dtype=halves[1])
                took = {}
                for tile in product.of_use(rows, columns, depth):
                    took[tile] = seconds([partial(product.store, tile, x[:rows], w, out, end) for w in stacked])
                line = ", ".join(f"{tile} {s * 1e6:.1f}" for tile, s in sorted(took.items(), key=lambda item: item[1]))
                flops = 2 * rows * columns * depth / min(took.values()) / 1e12
                print(f"{model} {name} {columns} x {depth}, {end}, {rows}: us {line}; {flops:.0f} TFLOP/s")


class Attention:
    """Paged KV of one layer for `sequences` of `context` tokens, on shuffled pages."""

    def __init__(self, kernels, sequences, context, heads, kv_heads, dim):
        self.held, self.window = [], 0
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

    def params(self, queries, out, positions, table_at, items, depth):
        sequences, context, heads, kv_heads, dim = self.shape
        stride = heads * dim
        parts = kv_heads * -(-(heads // kv_heads) // ROWS)
        splits = self.tables.numel() // (SPLIT // PAGE) + sequences
        partials = torch.full((splits * heads * (dim + 4),), float("nan"), device="cuda")
        arrived = torch.zeros(len(items) * parts, dtype=torch.int32, device="cuda")
        pointers = [queries, out, self.cache, positions, table_at, self.tables, items, partials, arrived]
        self.held.append(pointers)
        numbers = (heads, kv_heads, dim, stride)
        return struct.pack(
            "9Q4IfIII", *(p.data_ptr() for p in pointers), *numbers, dim**-0.5, self.window, depth, sequences
        )

    def decode(self, queries, out):
        sequences, context, heads, kv_heads, dim = self.shape
        word = dict(dtype=torch.int32, device="cuda")
        groups = kv_heads * -(-(heads // kv_heads) // ROWS)
        depth = -(-context // (SPLIT * WARPS)) if sequences * groups < 132 else 1
        positions = torch.full((sequences,), context - 1, **word)
        table_at = torch.arange(sequences, **word) * self.tables.shape[1]
        params = self.params(queries, out, positions, table_at, torch.arange(sequences, **word), depth)
        grid = (sequences, groups, depth)
        return lambda: self.kernels.launch(f"attention_decode_{dim}", grid, 128, 0, params)

    def decode_at(self, queries, out, positions):
        """Rows of the first sequence at `positions`, each by a block of its own."""
        sequences, context, heads, kv_heads, dim = self.shape
        word = dict(dtype=torch.int32, device="cuda")
        groups = kv_heads * -(-(heads // kv_heads) // ROWS)
        rows, table_at = torch.arange(len(positions), **word), torch.zeros(len(positions), **word)
        params = self.params(queries, out, torch.tensor(positions, **word), table_at, rows, 1)
        self.kernels.launch(f"attention_decode_{dim}", (len(positions), groups, 1), 128, 0, params)

    def prefill(self, kernels, name, queries, out):
        sequences, context, heads, kv_heads, dim = self.shape
        word = dict(dtype=torch.int32, device="cuda")
        tokens = 128 // (heads // kv_heads)
        positions = torch.arange(context, **word).repeat(sequences)
        table_at = (torch.arange(sequences, **word) * self.tables.shape[1]).repeat_interleave(context)
        items = torch.tensor([(s * context, context) for s in range(sequences)], **word)
        threads, slots, barriers = PREFILLS[name]
        depth, shared = -(-context // tokens), (128 + slots) * dim * 2 + barriers
        params = self.params(queries, out, positions, table_at, items, depth)
        tiles = sequences * kv_heads * depth
        shares = (min(tiles, torch.cuda.get_device_properties(0).multi_processor_count), 1, 1)
        grid = shares if name == "grouped" else (sequences, kv_heads, depth)
        return lambda: kernels.launch(f"attention_{name}_{dim}", grid, threads, shared, params)


def unlike(got, want, heads, names):
    """Says which rows of two results differ in bits, and how far; empty if none does."""
    other = (got.view(torch.int16) != want.view(torch.int16)).view(len(got), heads, -1)
    rows = other.flatten(1).any(1).nonzero().flatten().tolist()
    if not rows:
        return ""
    far = (got.float() - want.float()).abs()
    head = other[rows[0]].any(1).nonzero().flatten().tolist()
    columns = other[rows[0], head[0]].nonzero().flatten().tolist()
    return (
        f"OTHER BITS: {names}: {len(rows)} of {len(got)} rows, {int(other.sum())} of {other.numel()} values, "
        f"{int(far.isnan().sum())} NaN, at most {far.nan_to_num().max().item():.2e} apart; rows {rows[:6]}..{rows[-1]}; "
        f"row {rows[0]}: heads {head[:6]}, columns {columns[:10]} of head {head[0]}, "
        f"{got.view(len(got), heads, -1)[rows[0], head[0], columns[:4]].tolist()} for {want.view(len(got), heads, -1)[rows[0], head[0], columns[:4]].tolist()}"
    )


def attention(folder):
    kernels, is_good = Kernels(folder / "attention.cubin.gz"), True
    ways = {"prefill": kernels}
    if (folder / "wgmma_attention.cubin.gz").exists():
        ways["grouped"] = Kernels(folder / "wgmma_attention.cubin.gz")
    for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 128), (4, 2, 64)):
        print(f"attention, {heads}/{kv_heads} heads of {dim}")
        for sequences, context in ((1, 1024), (1, 8192), (32, 1024), (256, 1024)):
            state = Attention(kernels, sequences, context, heads, kv_heads, dim)
            queries = torch.randn(sequences, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
            out = torch.full((sequences, heads * dim), float("nan"), device="cuda", dtype=torch.bfloat16)
            launch = state.decode(queries, out)
            launch()
            k, v = state.plain()
            want = scaled_dot_product_attention(queries.float(), k.float(), v.float(), enable_gqa=True).view(
                sequences, -1
            )
            far = ((out.float() - want).norm() / want.norm()).item()
            is_good &= far < 5e-3
            took = seconds([launch] * 8)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                peer = seconds([partial(scaled_dot_product_attention, queries, k, v, enable_gqa=True)] * 8)
            moved = 4 * sequences * context * kv_heads * dim
            print(
                f"  decode {sequences} x {context}: {took * 1e6:.1f} us, {moved / took / 1e12:.2f} TB/s, error {far:.1e}; PyTorch flash {peer * 1e6:.1f} us"
            )
        for sequences, context in ((1, 2048), (1, 8192), (4, 777)):
            state = Attention(kernels, sequences, context, heads, kv_heads, dim)
            queries = torch.randn(sequences, context, heads, dim, device="cuda", dtype=torch.bfloat16)
            k, v = state.plain()
            turned, some = queries.transpose(1, 2), min(context, 2048)
            flash = {}
            for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
                with sdpa_kernel([getattr(SDPBackend, name)]):
                    ask = partial(scaled_dot_product_attention, turned, k, v, is_causal=True, enable_gqa=True)
                    try:
                        ask()
                        flash[name] = seconds([ask] * 4)
                    except RuntimeError as error:
                        flash[name] = float("nan")
                        print("  ", name, str(error)[:100])
            first = [part[:1, :, :some].float() for part in (turned, k, v)]
            want = scaled_dot_product_attention(*first, is_causal=True, enable_gqa=True)[0]
            flops = 2 * sequences * heads * dim * context**2
            rates = ", ".join(f"{name.split('_')[0].lower()} {flops / s / 1e12:.0f}" for name, s in flash.items())
            # Some tokens by the kernel for rows that are alone.
            places = sorted({0, 1, 31, 32, 127, 128, 500, context // 2, context - 2, context - 1})
            alone = torch.full((len(places), heads * dim), float("nan"), device="cuda", dtype=torch.bfloat16)
            state.decode_at(queries[0, places].contiguous(), alone, places)
            for name, module in ways.items():
                out = torch.full((sequences * context, heads * dim), float("nan"), device="cuda", dtype=torch.bfloat16)
                launch = state.prefill(module, name, queries, out)
                launch()
                got = out.view(sequences, context, heads, dim)[0, :some].transpose(0, 1).float()
                far = ((got - want).norm() / want.norm()).item()
                other = [unlike(out[places], alone, heads, f"{name} and decode at {places}")]
                if name == "prefill":
                    first_out = out
                else:
                    other.append(unlike(out, first_out, heads, f"{name} and prefill"))
                is_good &= far < 5e-3 and not any(other)
                took = seconds([launch] * 4)
                print(
                    f"  {name} {sequences} x {context}: {took * 1e6:.1f} us, {flops / took / 1e12:.0f} TFLOP/s (PyTorch: {rates}), "
                    f"error {far:.1e}, {'; '.join(filter(None, other)) or 'the same bits'}"
                )
            if sequences == 1:
                continue
            # A window whose first page is seen in part.
            state.window = 300
            state.decode_at(queries[0, places].contiguous(), alone, places)
            for name, module in ways.items():
                out = torch.full((sequences * context, heads * dim), float("nan"), device="cuda", dtype=torch.bfloat16)
                state.prefill(module, name, queries, out)()
                other = unlike(out[places], alone, heads, f"{name} and decode at {places}")
                is_good &= not other and not out.isnan().any().item()
                print(f"  {name} with a window of 300: {other or 'the same bits'}")
    assert is_good, "attention is far from float32, or its kernels differ in bits"


def main():
    torch.manual_seed(1)
    torch.cuda.init()
    major, minor = torch.cuda.get_device_capability()
    name = {8: "sm_80", 9: "sm_90a", 10: "sm_100a", 12: "sm_120a"}.get(major, f"sm_{major}{minor}")
    folder = Path(sys.argv[1], name)
    torch.zeros(1, device="cuda")
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    failed = []
    parts = (bits, ends, products, end_times, attention)
    for part in (part for part in parts if part.__name__ in sys.argv[2:] or not sys.argv[2:]):
        try:
            part(folder)
        except Exception:
            failed.append(part.__name__)
            traceback.print_exc(file=sys.stdout)
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
