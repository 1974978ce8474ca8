"""Ceilings of a GPU by PyTorch: copy and read bandwidth on 4 GB, bf16 products on random data. Medians of ten."""

import statistics

import torch


def seconds(run):
    for _ in range(3):
        run()
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def bandwidths():
    count = 1 << 30
    source = torch.randn(count, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    copied, read = seconds(lambda: target.copy_(source)), seconds(source.sum)
    print(f"copy, bytes read and written: {2 * 4 * count / copied / 1e12:.2f} TB/s")
    print(f"read (a sum): {4 * count / read / 1e12:.2f} TB/s")


def main():
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    bandwidths()
    for rows in (1, 32, 256, 4096):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16)
        took = seconds(lambda x=x, weight=weight: x @ weight.T)
        flops, moved = 2 * rows * 4096 * 14336 / took, 2 * 4096 * 14336 / took
        print(
            f"bf16 product {rows} x 14336 x 4096: {took * 1e6:.1f} us, {flops / 1e12:.0f} TFLOP/s, weights at {moved / 1e12:.2f} TB/s"
        )


if __name__ == "__main__":
    main()
