#!/usr/bin/env python3
"""llama.cpp (PyPI package llama-cpp-python) on a GGUF: the figures of bench/engine.sh, one JSON line.

bench_llama.py FILE.gguf [--threads N] [--name NAME]

Uses the low-level calls that llama-bench and llama-batched-bench use: one `llama_decode` per measured step, logits of the
last token only.
"""

import argparse
import ctypes
import json
import resource
import statistics
import time

import llama_cpp as llama
import numpy as np

CONTEXT = 128
STEPS = 24


# Kept for as long as the library may call it.
QUIET = llama.llama_log_callback(lambda *_: None)


class Bench:
    """A model and a context for the sequences of one measurement."""

    def __init__(self, path, threads):
        llama.llama_log_set(QUIET, ctypes.c_void_p(0))
        llama.llama_backend_init()
        started = time.perf_counter()
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        assert self.model, f"llama.cpp does not load {path}"
        self.threads, self.context = threads, None
        self.begin(1, 64)
        self.load_s = time.perf_counter() - started
        self.batch = llama.llama_batch_init(2048, 0, 1)
        self.random = np.random.default_rng(0)

    def begin(self, sequences, tokens):
        """A fresh context for so many sequences of so many tokens."""
        if self.context:
            llama.llama_free(self.context)
        params = llama.llama_context_default_params()
        params.n_ctx = sequences * -(-tokens // 256) * 256
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, sequences
        params.n_threads = params.n_threads_batch = self.threads
        # One KV cache for each sequence: with one for all, every row attends over the cells of every other.
        params.kv_unified = False
        self.context = llama.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp makes no context"

    def clear(self):
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def decode(self, rows):
        """Runs rows of (sequence, position, wants logits) and returns the seconds it took."""
        for index, (sequence, position, wanted) in enumerate(rows):
            self.batch.token[index] = int(self.random.integers(1000, 100000))
            self.batch.pos[index] = position
            self.batch.n_seq_id[index] = 1
            self.batch.seq_id[index][0] = sequence
            self.batch.logits[index] = wanted
        self.batch.n_tokens = len(rows)
        started = time.perf_counter()
        assert llama.llama_decode(self.context, self.batch) == 0
        llama.llama_synchronize(self.context)
        return time.perf_counter() - started

    def prefill(self, tokens):
        """Tokens per second of one prompt; median of three."""

        self.begin(1, tokens)

        def once():
            self.clear()
            return self.decode([(0, position, position == tokens - 1) for position in range(tokens)])

        return tokens / statistics.median(once() for _ in range(3))

    def generate(self, sequences):
        """Tokens per second of a batch at a context of CONTEXT tokens; median step."""
        self.begin(sequences, CONTEXT + STEPS)
        for sequence in range(sequences):
            self.decode([(sequence, position, position == CONTEXT - 1) for position in range(CONTEXT)])
        steps = [self.decode([(s, CONTEXT + step, True) for s in range(sequences)]) for step in range(STEPS)]
        return sequences / statistics.median(steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="llama.cpp")
    args = parser.parse_args()
    bench = Bench(args.model, args.threads)
    bench.prefill(64)
    report = {"engine": args.name, "threads": args.threads, "load_s": round(bench.load_s, 2)}
    report |= {f"prefill_{n}": round(bench.prefill(n), 1) for n in (512, 2048)}
    report |= {f"decode_b{n}": round(bench.generate(n), 2) for n in (1, 8, 32)}
    report["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(report))


if __name__ == "__main__":
    main()
