"""Time that operators on a CPU take by how they are called: FFTs by length, a sort and topk, norms
and their like over a dimension that is not the innermost, distances and products of all pairs,
smoothing filters, two products in either order, products with a matrix of zeros,
long filters.

python benchmarks/bench_slow_arguments.py

CPU time of one thread, so that other programs matter little. Shares are of the slow call's time.
The figures of ``rules/kernel/slow_operator_arguments.py`` are from torch 2.13 with MKL, AVX2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import median
from time import thread_time

import torch

from advisor.measure.device.operator_arguments import next_fast_length

Call = Callable[[], object]
PRIMES = (3, 11, 13, 17, 23, 31, 37, 47, 61, 97, 131, 251, 509, 1021)
OPERATORS: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]] = {
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), lambda x: x.square().sum(1).sqrt()),
    "norm, 1": (lambda x: torch.linalg.vector_norm(x, 1, dim=1), lambda x: x.abs().sum(1)),
    "var": (
        lambda x: x.var(1),
        lambda x: (x - x.mean(1, keepdim=True)).square().sum(1) / (x.shape[1] - 1),
    ),
    "argmax": (lambda x: x.argmax(1), lambda x: x.max(1).indices),
}

Pairwise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PAIRS: dict[str, tuple[Pairwise, Pairwise]] = {
    "squared distances": (
        lambda a, b: (a[:, None] - b).pow(2).sum(-1),
        lambda a, b: a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.T,
    ),
    "distances": (lambda a, b: (a[:, None] - b).norm(dim=-1), torch.cdist),
    "distances, in a mode without a product": (
        partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist"),
        torch.cdist,
    ),
    "absolute differences": (
        lambda a, b: (a[:, None] - b).abs().sum(-1),
        lambda a, b: torch.cdist(a, b, p=1),
    ),
    "products": (lambda a, b: (a[:, None] * b).sum(-1), lambda a, b: a @ b.T),
}


def time_of(call: Call) -> float:
    """Return the median CPU time of a call, ms."""
    call()
    took = []
    for _ in range(9):
        begin = thread_time()
        call()
        took.append(thread_time() - begin)
    return 1e3 * median(took)


def time_ffts() -> None:
    """Print what remains at the next good length, by prime factor, parity and kind."""
    for prime in PRIMES:
        for power in (2, 3):
            length = prime * power ** max(0, round(math.log(2000 / prime, power)))
            rows, better = 400_000 // length, next_fast_length(length)
            shares = []
            for kind in ("rfft", "irfft", "fft"):
                times = []
                for n in (length, better):
                    real = torch.randn(rows, n)
                    bins = torch.fft.rfft(real)
                    calls: dict[str, Call] = {
                        "rfft": lambda x=real: torch.fft.rfft(x),  # type: ignore[misc]
                        "irfft": lambda x=bins, n=n: torch.fft.irfft(x, n=n),  # type: ignore[misc]
                        "fft": lambda x=real + 0j: torch.fft.fft(x),  # type: ignore[misc]
                    }
                    times.append(time_of(calls[kind]))
                shares.append(f"{kind} {times[1] / times[0]:4.0%}")
            print(f"{length:5} = {prime} × {power}^k, then {better:5}: {', '.join(shares)}")


def time_sorts() -> None:
    """Print what remains with topk, by length of the row and elements taken."""
    for rows, length in ((4096, 64), (1536, 192), (1024, 1024), (256, 4096), (8, 100_000)):
        x = torch.randn(rows, length)
        full_ms = time_of(lambda x=x: x.sort(-1))  # type: ignore[misc]
        taken = sorted({1, length // 128, length // 64, length // 32, length // 16, length // 8})
        shares = [
            f"{k}: {time_of(lambda x=x, k=k: x.topk(k, -1)) / full_ms:.0%}"  # type: ignore[misc]
            for k in taken
            if k
        ]
        print(f"rows of {length:6}, sort {full_ms:6.1f} ms; topk of {', '.join(shares)}")


def time_reductions() -> None:
    """Print ns per element: of a sum of two tensors, of the operator, and written out."""
    for shape in ((1, 2, 400_000), (1, 4, 400_000), (8, 19, 16_384), (64, 256, 100)):
        x = torch.randn(*shape)
        ns = 1e6 / x.numel()
        print(f"{shape}: add {ns * time_of(lambda x=x: x + x):.2f}", end="")  # type: ignore[misc]
        for name, calls in OPERATORS.items():
            slow, fast = (ns * time_of(lambda x=x, f=f: f(x)) for f in calls)  # type: ignore[misc]
            print(f"; {name} {slow:.1f}, then {fast:.1f}", end="")
        print()


def time_pairs() -> None:
    """Print what remains of distances and products by broadcasting, forward and backward too."""
    for kind, (slow, fast) in PAIRS.items():
        for n, m, d in ((384, 384, 256), (32, 4096, 64), (2000, 128, 16), (1000, 1000, 3)):
            shares = []
            for backward in (False, True):
                a, b = (torch.randn(rows, d, requires_grad=backward) for rows in (n, m))

                def both(call: Pairwise, a: torch.Tensor = a, b: torch.Tensor = b) -> None:
                    result = call(a, b)
                    if result.requires_grad:
                        result.sum().backward()

                before, after = (time_of(lambda f=f: both(f)) for f in (slow, fast))  # type: ignore[misc]
                shares.append(f"{after / before:.3f}")
            print(f"{kind}, {n} × {m} × {d}: {shares[0]} remain, with backward {shares[1]}")


def time_filters() -> None:
    """Print what remains of smoothing with one pass per dimension, forward and with backward."""
    for images, channels, size in ((6, 1, 128), (4, 3, 128), (16, 2, 64)):
        x = torch.rand(images, channels, size, size, requires_grad=True)
        for k in (11, 13, 15, 21, 33, 55):
            row = torch.full((channels, 1, 1, k), 1 / k)

            def smooth(*weights: torch.Tensor, x: torch.Tensor = x, back: bool = False) -> None:
                y = x if back else x.detach()
                for weight in weights:
                    pad = [points // 2 for points in weight.shape[2:]]
                    y = torch.conv2d(y, weight, padding=pad, groups=len(weight))
                if back:
                    torch.autograd.grad(y.sum(), x)

            for back in (False, True):
                full = time_of(partial(smooth, row.mT @ row, back=back))
                remaining_share = time_of(partial(smooth, row, row.mT, back=back)) / full
                print(
                    f"{images} x {channels} x {size}, k={k}, {back=}: {full:.1f} ms, "
                    f"{remaining_share:.2f}"
                )


def time_chains() -> None:
    """Print the time of two products in both orders, and of a sparse product by columns."""
    sizes = (
        *((1, 512, 4000, 512, 1), (1, 64, 4000, 64, 1), (1, 2000, 512, 2000, 64)),
        *((16, 1024, 32, 1024, 32), (64, 256, 16, 256, 16), (1, 4000, 64, 1024, 64)),
    )
    for batch, rows, inner, joined, columns in sizes:
        for back in (False, True):
            shapes = ((rows, inner), (inner, joined), (joined, columns))
            matrices = [torch.randn(batch, *shape, requires_grad=back) for shape in shapes]

            def multiply(from_left: bool, matrices: list[torch.Tensor] = matrices) -> None:
                a, b, c = matrices
                result = (a @ b) @ c if from_left else a @ (b @ c)
                if result.requires_grad:
                    torch.autograd.grad(result.sum(), matrices)

            left, right = (time_of(partial(multiply, order)) for order in (True, False))
            print(f"{batch} x {shapes}, {back=}: {left:.2f} ms, then {right / left:.3f} remain")
    for nodes, degree in ((6000, 20), (20_000, 8), (2000, 60)):
        index = torch.randint(0, nodes, (2, nodes * degree))
        sparse = torch.sparse_coo_tensor(index, torch.ones(nodes * degree)).coalesce()
        for layout, matrix in (("coo", sparse), ("csr", sparse.to_sparse_csr())):
            times = [
                time_of(partial(torch.sparse.mm, matrix, torch.randn(matrix.shape[1], width)))
                for width in (1, 32, 128, 512)
            ]
            times_text = ", ".join(f"{ms:.2f}" for ms in times)
            print(f"{nodes} x {degree}, {layout}; 1, 32, 128, 512 columns: {times_text} ms")


def time_mostly_zero_matrices() -> None:
    """Print what remains of a dense product, forward and backward, with index_add, over the share
    of the entries that are set."""
    for size, degree, width in (
        (512, 3, 64), (1024, 3, 64), (2400, 2, 96), (2400, 10, 96), (4000, 4, 128), (600, 6, 256),
    ):  # fmt: skip
        count = size * degree
        source, target = torch.randint(size, (2, count))
        matrix = torch.zeros(size, size)
        matrix[target, source] = 1
        value, h = torch.rand(count, 1), torch.randn(size, width, requires_grad=True)
        gradient = torch.randn(size, width)

        def multiply(matrix=matrix, h=h, gradient=gradient) -> None:  # type: ignore[no-untyped-def]
            (matrix @ h).backward(gradient)

        def add(s=source, t=target, w=value, h=h, g=gradient) -> None:  # type: ignore[no-untyped-def]
            torch.zeros_like(h).index_add(0, t, h.index_select(0, s) * w).backward(g)

        remains, density = time_of(add) / time_of(multiply), degree / size
        print(f"{size} x {size}, {density:.2%} set: {remains:.3f}, {remains / density:.0f} times")


def time_long_filters() -> None:
    """Print what remains of conv1d with Fourier transforms, and ns per transform over n log2 n."""
    for channels, length, taps in ((32, 16_000, 4_000), (16, 16_000, 512), (16, 16_000, 256),
                                   (64, 4_000, 1_000), (64, 2_048, 2_048)):  # fmt: skip
        x, filters = torch.randn(1, channels, length), torch.randn(channels, 1, taps)
        n = next_fast_length(length + taps - 1)
        padded = torch.nn.functional.pad(x, (taps - 1, 0))
        direct = partial(torch.conv1d, padded, filters, groups=channels)

        def transform(x=x, w=filters[:, 0], n=n) -> None:  # type: ignore[no-untyped-def]
            torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(w, n), n)

        took = time_of(transform)
        each = 1e6 * took / (3 * channels * n * math.log2(n))
        print(f"{taps} taps, {length} values: {took / time_of(direct):.3f}, {each:.2f} ns")


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    time_ffts()
    time_sorts()
    time_reductions()
    time_pairs()
    time_filters()
    time_chains()
    time_mostly_zero_matrices()
    time_long_filters()


if __name__ == "__main__":
    main()
