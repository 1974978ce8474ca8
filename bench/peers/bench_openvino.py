#!/usr/bin/env python3
"""OpenVINO's CPU plugin on a model that export_openvino.py made: the figures of bench/engine.sh, one JSON line.

bench_openvino.py FOLDER [--threads N] [--weights bf16|int8|int4]

One inference per measured step, with the KV cache inside of the model. Only the last position's logits are computed, as a serving
pipeline does: the exported model would compute those of every token of a prompt. The KV cache is bf16, as in the other engines;
OpenVINO's own default for it is 8 bits.
"""

import argparse
import json
import resource
import statistics
import time

import numpy as np
import openvino
from openvino import opset13

CONTEXT = 128
STEPS = 24


def keep_last_position(model):
    """Cuts what goes into the head down to the last position."""
    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()

    def number(value):
        return opset13.constant(np.array([value], np.int64))

    last = opset13.slice(node.input_value(0), number(-1), number(2**31 - 1), number(1), number(1))
    node.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


class Bench:
    """A compiled model and its one stream of inferences."""

    def __init__(self, folder, threads, weights):
        core = openvino.Core()
        model = core.read_model(f"{folder}/openvino_model.xml")
        keep_last_position(model)
        if weights != "bf16":
            import nncf

            modes = nncf.CompressWeightsMode
            # Of 4 bits with OpenVINO's own group size; embedding and head get 8 bits.
            model = nncf.compress_weights(model, mode=modes.INT8_SYM if weights == "int8" else modes.INT4_SYM)
        started = time.perf_counter()
        config = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }
        self.request = core.compile_model(model, "CPU", config).create_infer_request()
        self.load_s = time.perf_counter() - started
        self.inputs = {one.any_name for one in self.request.model_inputs}
        self.random = np.random.default_rng(0)

    def step(self, sequences, tokens, past):
        """Runs so many tokens of each sequence behind `past` others and returns the seconds it took."""
        given = {
            "input_ids": self.random.integers(1000, 100000, (sequences, tokens), np.int64),
            "attention_mask": np.ones((sequences, past + tokens), np.int64),
            "position_ids": np.tile(np.arange(past, past + tokens, dtype=np.int64), (sequences, 1)),
            "beam_idx": np.arange(sequences, dtype=np.int32),
        }
        given = {name: value for name, value in given.items() if name in self.inputs}
        started = time.perf_counter()
        self.request.infer(given, share_inputs=True)
        return time.perf_counter() - started

    def prefill(self, tokens):
        """Tokens per second of one prompt; median of three."""

        def once():
            self.request.reset_state()
            return self.step(1, tokens, 0)

        return tokens / statistics.median(once() for _ in range(3))

    def generate(self, sequences):
        """Tokens per second of a batch at a context of CONTEXT tokens; median step."""
        self.request.reset_state()
        self.step(sequences, CONTEXT, 0)
        return sequences / statistics.median(self.step(sequences, 1, CONTEXT + at) for at in range(STEPS))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", choices=["bf16", "int8", "int4"], default="bf16")
    args = parser.parse_args()
    bench = Bench(args.model, args.threads, args.weights)
    bench.prefill(64)
    name = "OpenVINO" if args.weights == "bf16" else f"OpenVINO {args.weights}"
    report = {"engine": name, "threads": args.threads, "load_s": round(bench.load_s, 2)}
    report |= {f"prefill_{n}": round(bench.prefill(n), 1) for n in (512, 2048)}
    report |= {f"decode_b{n}": round(bench.generate(n), 2) for n in (1, 8, 32)}
    report["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(report))


if __name__ == "__main__":
    main()
