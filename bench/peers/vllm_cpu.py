#!/usr/bin/env python3
"""vLLM's CPU backend on a checkpoint folder: the figures of bench/engine.sh, one JSON line.

vllm_cpu.py FOLDER [--threads N]

Its own scheduler, offline; a decode rate is the difference of a long and a short run, so that prefill drops out.
"""

import argparse
import json
import os
import random
import resource
import statistics
import time

CONTEXT = 128
STEPS = 32


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="4",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{args.threads - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    model = LLM(
        model=args.model,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    load_s = time.perf_counter() - started
    numbers = random.Random(1)

    def seconds(sequences, prompt, output):
        prompts = [
            {"prompt_token_ids": [numbers.randrange(1000, 100000) for _ in range(prompt)]} for _ in range(sequences)
        ]
        params = SamplingParams(max_tokens=output, min_tokens=output, ignore_eos=True, temperature=0, detokenize=False)
        begun = time.perf_counter()
        model.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begun

    def prefill(tokens):
        return tokens / statistics.median(seconds(1, tokens, 1) for _ in range(3))

    def generate(sequences):
        spent = [seconds(sequences, CONTEXT, STEPS + 1) - seconds(sequences, CONTEXT, 1) for _ in range(3)]
        return sequences * STEPS / statistics.median(spent)

    seconds(1, 64, 4)
    report = {"engine": "vLLM CPU", "threads": args.threads, "load_s": round(load_s, 1)}
    report |= {f"prefill_{n}": round(prefill(n), 1) for n in (512, 2048)}
    report |= {f"decode_b{n}": round(generate(n), 2) for n in (1, 8, 32)}
    report["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
