# SPDX-License-Identifier: Apache-2.0
"""Verifies the joint attention and the chunked loss on one GPU, and times them, in three minutes.

It needs torch and ``asymloop_foundry/models`` alone, so that it also runs where Foundry is not
installed and torch is newer. It exits with 1 if anything is wrong.

    python benchmarks/gpu_check.py [--json]

Every back end that runs here is held against the literal softmax in float64: output and the five
gradients in relative Frobenius norm, next to the same error of ``scaled_dot_product_attention`` with a
mask where that is the yardstick. Then: gradients under compile (no graph break) and under activation
checkpointing, decoding, linear memory, and the times of attention and loss.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from asymloop_foundry.models.cross_entropy import linear_cross_entropy
from asymloop_foundry.models.joint_attention import (
    choose_backend,
    joint_attention,
)
from asymloop_foundry.models.reference import reference_joint_attention

DEVICE = torch.device('cuda')
CHOICES = [
    ('auto', torch.bfloat16),
    ('auto', torch.float32),
    ('auto', torch.float64),
    ('cuda_flash', torch.bfloat16),
    ('cuda_flash', torch.float16),
    ('flash_attn', torch.bfloat16),
    ('efficient', torch.float32),
    ('efficient', torch.bfloat16),
]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}


class Report:
    """Prints each check as it ends, and remembers whether any failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def __call__(self, name: str, passed: bool, detail: str) -> None:
        """One finished check."""
        print(f'{"ok  " if passed else "FAIL"} {name}: {detail}', flush=True)
        if not passed:
            self.failed.append(name)

    def guard(self, name: str, run: Callable[[], None]) -> None:
        """Runs a group of checks; an exception is a failure of the group, not the end."""
        try:
            run()
        except Exception as error:
            self(name, False, f'{type(error).__name__}: {error}')


def make(
    n: int, width: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 4, batch: int = 2
) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [
        torch.randn(batch, n, h, width, device=DEVICE, generator=generator)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for h in (heads, *(kv_heads,) * 4)
    ]


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-3)).item()


def errors(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[float]:
    """Of the output and of the gradients of q, k_global, v_global, k_local, v_local."""
    exact = [x.detach().double().requires_grad_() for x in tensors]
    out, expected = attend(*tensors), reference_joint_attention(*exact)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, upstream)
    exact_grads = torch.autograd.grad(expected, exact, upstream.double())
    return [error(a, b) for a, b in zip((out, *grads), (expected, *exact_grads), strict=True)]


def masked_sdpa(q: Tensor, kg: Tensor, vg: Tensor, kl: Tensor, vl: Tensor) -> Tensor:
    n = q.shape[2]
    causal_NN = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(
        q,
        torch.cat((kg, kl), dim=2),
        torch.cat((vg, vl), dim=2),
        attn_mask=torch.cat((causal_NN, causal_NN), dim=1),
    )


def check_exactness(report: Report) -> None:
    for backend, dtype in CHOICES:
        try:
            chosen = choose_backend(backend, DEVICE, dtype, 64)
        except ValueError as reason:
            print(f'skip {backend} {dtype}: {reason}', flush=True)
            continue
        for n, width, kv_heads, scale in (
            (1, 64, 4, 1),
            (31, 80, 4, 1),
            (257, 64, 4, 1),
            (257, 64, 2, 1),
            (1000, 128, 4, 1),
            (2048, 128, 4, 1),
            (300, 64, 4, 50),
        ):
            tensors = make(n, width, dtype, kv_heads=kv_heads)
            if scale != 1:
                with torch.no_grad():
                    tensors[1].mul_(scale)
            name = f'{backend} ({chosen}) {dtype} N={n} d={width} kv_heads={kv_heads} x{scale}'

            def run(name=name, tensors=tensors, backend=backend, scale=scale) -> None:
                found = errors(lambda *t: joint_attention(*t, backend=backend), tensors)
                allowed = TOLERANCE[tensors[0].dtype]
                if scale != 1:  # saturated: as good as the kernel with a mask, no more can be asked
                    yardstick = errors(masked_sdpa, tensors)
                    passed = all(a < 2 * b + allowed for a, b in zip(found, yardstick, strict=True))
                else:
                    passed = max(found) < allowed
                report(name, passed, ' '.join(f'{x:.1e}' for x in found))

            report.guard(name, run)


def check_machinery(report: Report) -> None:
    tensors = make(130, 64, torch.bfloat16)
    plain = torch.autograd.grad(joint_attention(*tensors).square().sum(), tensors)

    def compiled() -> None:
        run = torch.compile(lambda *t: joint_attention(*t).square().sum(), fullgraph=True)
        grads = torch.autograd.grad(run(*tensors), tensors)
        worst = max(error(a, b.double()) for a, b in zip(grads, plain, strict=True))
        report('compile without a graph break', worst < 2e-2, f'worst gradient {worst:.1e}')

    def recomputed() -> None:
        loss = checkpoint(
            lambda *t: joint_attention(*t).square().sum(), *tensors, use_reentrant=False
        )
        grads = torch.autograd.grad(loss, tensors)
        # The flash backward adds its shares of dq in no fixed order.
        worst = max(error(a, b.double()) for a, b in zip(grads, plain, strict=True))
        report('activation checkpointing', worst < 5e-3, f'worst gradient {worst:.1e}')

    def decoding() -> None:
        for dtype in (torch.bfloat16, torch.float32):
            for kv_heads in (4, 2):
                q, kg, vg, kl, vl = (x.detach() for x in make(200, 64, dtype, kv_heads=kv_heads))
                args = (q[:, :, -1:], kg, vg, kl[:, :, :77], vl[:, :, :77])
                wide = [x.double() for x in args]
                found = error(joint_attention(*args), joint_attention(*wide))
                name = f'single query {dtype} kv_heads={kv_heads}'
                report(name, found < TOLERANCE[dtype], f'{found:.1e}')

    def masked() -> None:
        q, kg, vg, kl, vl = (x.detach() for x in make(64, 64, torch.bfloat16))
        mask = torch.ones(64, 64, dtype=torch.bool, device=DEVICE).tril().expand(2, 1, 64, 64)
        mask = mask.clone()
        mask[0, :, :, :5] = False
        out = joint_attention(q, kg, vg, kl, vl, mask=mask)
        report('blind queries get zeros', bool(out[0, :, :5].eq(0).all()), 'left padding')
        found = error(out[1], joint_attention(q, kg, vg, kl, vl)[1].double())
        report('a causal mask equals no mask', found < 2e-2, f'{found:.1e}')

    def memory() -> None:
        peaks = []
        for n in (4096, 16384):
            leaves = make(n, 64, torch.bfloat16, batch=1)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(joint_attention(*leaves).sum(), leaves)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        growth = peaks[1] / peaks[0]
        report('linear memory', growth < 5, f'4 times the length, {growth:.2f} times the memory')

    for check in (compiled, recomputed, decoding, masked, memory):
        report.guard(check.__name__, check)


def check_loss(report: Report) -> None:
    for dtype, autocast in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        x = torch.randn(2, 300, 64, device=DEVICE, dtype=dtype, requires_grad=True)
        weight = torch.randn(1000, 64, device=DEVICE, dtype=dtype, requires_grad=True)
        labels = torch.randint(1000, (2, 300), device=DEVICE)
        labels[0, 5:50] = -100
        with torch.autocast('cuda', torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(x, weight, labels)
        exact = [t.detach().double().requires_grad_() for t in (x, weight)]
        logits = exact[0][:, :-1] @ exact[1].T
        expected = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        found = [error(loss, expected)]
        grads = torch.autograd.grad(loss * 3, (x, weight))
        for a, b in zip(grads, torch.autograd.grad(expected * 3, exact), strict=True):
            found.append(error(a, b))
        half = autocast or dtype is torch.bfloat16
        name = f'cross-entropy {dtype}{" under bf16 autocast" if autocast else ""}'
        report(name, max(found) < (2e-2 if half else 1e-3), ' '.join(f'{e:.1e}' for e in found))


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if i >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def time_attention(backend: str, dtype: torch.dtype, n: int, ratios: dict[str, float]) -> None:
    leaves = make(n, 128, dtype, heads=6, kv_heads=6, batch=max(1, 16 * 1024 // n))
    q, kg, vg, kl, vl = leaves
    upstream = torch.randn_like(q)

    def floor() -> object:
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True) for k, v in ((kg, vg), (kl, vl))
        ]
        return torch.autograd.grad(outs, leaves, (upstream, upstream))

    found = interleaved(
        {
            'floor': floor,
            'joint': lambda: torch.autograd.grad(
                joint_attention(*leaves, backend=backend), leaves, upstream
            ),
            'masked': lambda: torch.autograd.grad(masked_sdpa(*leaves), leaves, upstream),
        },
        rounds=10,
    )
    name = f'{backend}_{str(dtype).removeprefix("torch.")}_{n}'
    ratios[f'vs_floor_{name}'] = found['joint'] / found['floor']
    ratios[f'vs_masked_sdpa_{name}'] = found['masked'] / found['joint']
    print('time', name, ' '.join(f'{k} {v:.2f} ms' for k, v in found.items()), flush=True)


def time_loss(ratios: dict[str, float]) -> None:
    x = torch.randn(4, 1024, 768, device=DEVICE, requires_grad=True)
    weight = torch.randn(32128, 768, device=DEVICE).mul_(0.02).requires_grad_()
    labels = torch.randint(32128, (4, 1024), device=DEVICE)

    def full() -> object:
        with torch.autocast('cuda', torch.bfloat16):
            logits = F.linear(x, weight).float()
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return torch.autograd.grad(loss, (x, weight))

    def chunked(size: int) -> object:
        with torch.autocast('cuda', torch.bfloat16):
            loss = linear_cross_entropy(x, weight, labels, chunk_size=size)
        return torch.autograd.grad(loss, (x, weight))

    runs: dict[str, Callable[[], object]] = {'full': full}
    runs |= {f'chunk_{size}': lambda size=size: chunked(size) for size in (256, 512, 1024, 2048)}
    found = interleaved(runs, rounds=10)
    for name, run in runs.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f'time cross-entropy {name} {found[name]:.2f} ms, peak {peak:.0f} MiB', flush=True)
        if name != 'full':
            ratios[f'cross_entropy_{name}_over_full'] = found[name] / found['full']


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--json', action='store_true', help='print named ratios as the last line')
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print('gpu_check needs a CUDA device, and torch sees none here.')
        return 1
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    print(f'torch {torch.__version__}, CUDA {torch.version.cuda}, {name}, capability {capability}')
    report, ratios = Report(), {}
    report.guard('exactness', lambda: check_exactness(report))
    check_machinery(report)
    report.guard('cross-entropy', lambda: check_loss(report))
    for backend, dtype in CHOICES[:1] + CHOICES[3:4] + CHOICES[5:7]:
        try:
            choose_backend(backend, DEVICE, dtype, 128)
        except ValueError:
            continue
        for n in (1024, 2048, 8192):
            report.guard(
                f'time {backend} {n}',
                lambda b=backend, t=dtype, n=n: time_attention(b, t, n, ratios),
            )
    report.guard('time cross-entropy', lambda: time_loss(ratios))
    print(f'{len(report.failed)} failed' + ''.join(f'\n  {name}' for name in report.failed))
    if args.json:
        print(json.dumps({key: round(value, 4) for key, value in ratios.items()}))
    return 1 if report.failed else 0


if __name__ == '__main__':
    sys.exit(main())
