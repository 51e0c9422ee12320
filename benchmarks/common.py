# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: interleaved timing, peak memory, and one way to report.

Candidates take turns within a round, so that whatever else the machine does falls on all of them, and
a ratio is the median of the rounds' own ratios. A benchmark prints a table of times for people, and
with ``--json`` one object of named ratios as its last line.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

Times = dict[str, list[float]]


def parser(description: str) -> argparse.ArgumentParser:
    """Command line with the options that all benchmarks have."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument('--json', action='store_true', help='print named ratios as the last line')
    result.add_argument('--quick', action='store_true', help='fewer rounds: under a minute')
    result.add_argument('--rounds', type=int, help='rounds of every measurement')
    result.add_argument('--threads', type=int, default=2, help='CPU threads')
    result.add_argument(
        '--clock',
        choices=('wall', 'cpu'),
        default='wall',
        help='cpu counts processor time: with --threads 1 it is steady on a busy machine',
    )
    return result


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: str = 'wall',
    device: str = 'cpu',
    label: str = '',
) -> Times:
    """Seconds of each candidate in each round, after one untimed call of each."""
    read = time.process_time if clock == 'cpu' else time.perf_counter
    wait = torch.cuda.synchronize if device == 'cuda' else lambda: None
    for run in candidates.values():
        run()
    wait()
    times: Times = {name: [] for name in candidates}
    order = list(candidates)
    for _ in tqdm(range(rounds), desc=label, leave=False, disable=not sys.stderr.isatty()):
        for name in order:
            start = read()
            candidates[name]()
            wait()
            times[name].append(read() - start)
        order.reverse()  # so that no candidate always follows the same one
    return times


def ratio(times: Times, name: str, base: str) -> float:
    """Median over rounds of one candidate's time over another's."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def peak_extra_bytes(run: Callable[[], object], device: str = 'cpu') -> int:
    """High-water mark of torch's allocator inside the call, above its level before."""
    if device == 'cuda':
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
    del result
    level = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == '[memory]':
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def environment(device: str = 'cpu') -> dict[str, Any]:
    """Versions and hardware that a result depends on."""
    result = {
        'date': date.today().isoformat(),
        'torch': torch.__version__,
        'python': platform.python_version(),
        'processor': _processor(),
        'threads': torch.get_num_threads(),
    }
    if device == 'cuda':
        result |= {'gpu': torch.cuda.get_device_name(), 'cuda': torch.version.cuda}
    return result


def _processor() -> str:
    info = Path('/proc/cpuinfo')
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith('model name'):
                return line.split(':', 1)[1].strip()
    return platform.processor() or platform.machine()


def print_environment(args: argparse.Namespace | None = None, /, **configuration: Any) -> None:
    """First lines of every report: what it ran on, and with which options."""
    options = {} if args is None else vars(args)
    configuration |= {key: value for key, value in options.items() if key != 'json'}
    found = environment(configuration.get('device', 'cpu'))
    for title, values in (('environment', found), ('configuration', configuration)):
        print(f'{title}: ' + ', '.join(f'{key} {value}' for key, value in values.items()))


def print_times(times: Times, base: str, *, memory: Mapping[str, int] | None = None) -> None:
    """A line per candidate: median milliseconds, ratio to the base, peak memory."""
    width = max(map(len, times))
    for name, values in times.items():
        line = f'  {name:<{width}} {1e3 * statistics.median(values):10.2f} ms'
        line += f'  x {ratio(times, name, base):6.3f}'
        if memory is not None and name in memory:
            line += f'  peak {memory[name] / 2**20:8.1f} MiB'
        print(line)


def print_ratios(ratios: Mapping[str, float], as_json: bool) -> None:
    """The named ratios, as one JSON object on the last line if asked."""
    for name, value in ratios.items():
        print(f'{name}: {value:.3f}')
    if as_json:
        print(json.dumps({name: round(value, 4) for name, value in ratios.items()}))
