# SPDX-License-Identifier: Apache-2.0
"""Every row of the paper's result tables: the run behind it, what is read off it, the printed value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import paper
from .runs import RUNS, SEED, Run

__all__ = ['ROWS', 'TABLES', 'Cell', 'Row', 'find_runs']


@dataclass(frozen=True)
class Cell:
    """A printed number.

    Attributes:
        column: its title.
        metric: what it is: ``ce``, ``ppl``, ``ppl_30_31`` (Table 3's scale), ``gsm8k``,
            ``parameters_millions``, ``seconds_per_step``, ``peak_gib``, or ``acc/TASK/SHOTS`` in per
            cent.
        paper: the printed value.
        digits: printed decimals.
        spread: printed standard deviation over seeds, if any.
    """

    column: str
    metric: str
    paper: float
    digits: int
    spread: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of a table: one run, and the numbers printed for it."""

    id: str
    table: str
    label: str
    run: str
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...] = (SEED,)


LABELS = {'dense': 'Dense', 'full-loop': 'Full Loop', 'asymloop': 'AsymLoop'}
MAIN_RUN = {'dense': 'dense', 'full-loop': 'full-loop-k2', 'asymloop': 'asymloop-k3'}
# Rows of Table 4 by the run that gives them, without its K.
COMPONENT_RUNS = {
    'asymloop-alrs': ('AsymLoop (ALRS)', '60m-asymloop-k{k}'),
    'asymloop-uniform': ('AsymLoop (uniform LR)', '60m-asymloop-k{k}-uniform'),
    'no-qk-norm': ('w/o QKNorm', '60m-asymloop-k{k}-no-qk-norm'),
    'no-global-kv': ('w/o Global KV', '60m-no-global-kv-k{k}'),
    'no-local-kv': ('w/o Local KV', '60m-no-local-kv-k{k}'),
    'no-global-kv-param-matched-ffn': ('parameter matching', '60m-param-matched-k{k}'),
}
RATE_RUNS = {
    'asymloop-alrs': ('AsymLoop', '60m-asymloop-k{k}'),
    'uniform': ('w/o ALRS', '60m-asymloop-k{k}-uniform'),
    'lr-x0.5': ('w/ 0.5x LR', '60m-asymloop-k{k}-lr-x0.5'),
    'lr-x2': ('w/ 2x LR', '60m-asymloop-k{k}-lr-x2'),
    'lr-x4': ('w/ 4x LR', '60m-asymloop-k{k}-lr-x4'),
    'static-decoder-boost': ('w/ static decoder boost', '60m-asymloop-k{k}-static-boost'),
}
TABLES = {
    '1': 'Downstream accuracy (%), zero- and five-shot',
    '2': 'Downstream accuracy (%) at 350M after 35B tokens',
    '3': "Validation PPL by recurrent depth, on the table's own scale (30/31 of the CE)",
    '4a': 'Component ablations at 60M, validation PPL',
    '4b': 'Learning-rate ablations at 60M, validation PPL',
    '4c': 'Full Loop K = 2 at 60M, validation PPL',
    '6': 'Global KV by recurrent depth at 60M, validation CE',
    '7': 'Context access at 60M, validation PPL',
    '8': 'Further validation results at 60M',
    '10': 'Cost and validation CE on eight H100s (a validation protocol of its own)',
    '12': 'OLMo-style backbone',
    '13': 'GSM8K accuracy (%) at 1B after three epochs of fine-tuning',
    '14': 'Mixture of experts (a validation protocol of its own)',
}


def _accuracies(printed: Mapping[int, Sequence[float]]) -> tuple[Cell, ...]:
    return tuple(
        Cell(f'{task} {shots}-shot', f'acc/{task}/{shots}', value, 2)
        for shots, values in printed.items()
        for task, value in zip(paper.ACCURACY_COLUMNS, values, strict=True)
    )


def _rows() -> Iterator[Row]:
    for scale, system in paper.ACCURACY_BY_SCALE[0]:
        printed = {shots: paper.ACCURACY_BY_SCALE[shots][scale, system] for shots in (0, 5)}
        name = f'{scale}-{MAIN_RUN[system]}'
        label = f'{scale.upper()} {LABELS[system]}'
        yield Row(f'1/{name}', '1', label, name, _accuracies(printed))

    for system in paper.ACCURACY_350M_35B[0]:
        printed = {shots: paper.ACCURACY_350M_35B[shots][system] for shots in (0, 5)}
        name = MAIN_RUN[system]
        yield Row(f'2/{name}', '2', LABELS[system], f'350m-35b-{name}', _accuracies(printed))

    for (scale, system, k), ppl in paper.DEPTH_PPL.items():
        name = f'{scale}-{system}' + ('' if system == 'dense' else f'-k{k}')
        label = f'{scale.upper()} {LABELS[system]} K={k}'
        yield Row(f'3/{name}', '3', label, name, (Cell('PPL', 'ppl_30_31', ppl, 2),))

    for table, ablations, runs in (
        ('4a', paper.COMPONENT_ABLATIONS, COMPONENT_RUNS),
        ('4b', paper.LEARNING_RATE_ABLATIONS, RATE_RUNS),
    ):
        for variant, by_k in ablations.items():
            label, run = runs[variant]
            for k, ppl in by_k.items():
                yield Row(
                    f'{table}/{variant}-k{k}',
                    table,
                    f'{label} K={k}',
                    run.format(k=k),
                    (Cell('PPL', 'ppl', ppl, 3),),
                )

    for rates, ppl in paper.FULL_LOOP_RATES.items():
        run = '60m-full-loop-k2' + ('-alrs' if rates == 'alrs' else '')
        yield Row(
            f'4c/{rates}', '4c', f'Full Loop K=2, {rates}', run, (Cell('PPL', 'ppl', ppl, 3),)
        )

    for variant, by_k in paper.GLOBAL_KV_CE.items():
        for k, ce in by_k.items():
            run = f'60m-asymloop-k{k}-uniform' if variant == 'asymloop' else f'60m-{variant}-k{k}'
            label = f'{"AsymLoop" if variant == "asymloop" else "w/o Global KV"} K={k}'
            yield Row(f'6/{variant}-k{k}', '6', label, run, (Cell('CE', 'ce', ce, 6),))

    context_runs = {
        'asymloop': ('AsymLoop', '60m-asymloop-k3-uniform'),
        'no-global-kv': ('w/o Global KV', '60m-no-global-kv-k3'),
        'additive-injection': ('w/ additive injection', '60m-additive-injection-k3'),
        'full-loop': ('Full Loop (QKNorm)', '60m-full-loop-k2-qk-norm'),
    }
    for (variant, k), ppl in paper.CONTEXT_ACCESS.items():
        label, run = context_runs[variant]
        yield Row(f'7/{variant}', '7', f'{label} K={k}', run, (Cell('PPL', 'ppl', ppl, 3),))

    for (system, rates, k), (ce, ppl) in paper.ADDITIONAL_VALIDATION.items():
        name = {
            'dense': 'dense' + ('-alrs' if rates == 'alrs' else ''),
            'full-loop': f'full-loop-k{k}',
            'asymloop': f'asymloop-k{k}-no-qk-norm',
        }[system]
        without = ' w/o QKNorm' if system == 'asymloop' else ''
        yield Row(
            f'8/{name}',
            '8',
            f'{LABELS[system]}{without}, {rates}, K={k}',
            f'60m-{name}',
            (Cell('CE', 'ce', ce, 6), Cell('PPL', 'ppl', ppl, 6)),
        )

    for (scale, system), numbers in paper.COST_AND_CE.items():
        _, parameters, seconds, gib, ce, spread = numbers
        name = 'full-loop-wide-k2' if system == 'full-loop-wide' else MAIN_RUN[system]
        label = {'full-loop-wide': 'Full Loop, FLOPs matched', **LABELS}[system]
        yield Row(
            f'10/{scale}-{name}',
            '10',
            f'{scale.upper()} {label}',
            f'{scale}-{name}',
            (
                Cell('parameters (M)', 'parameters_millions', parameters, 2),
                Cell('s/step', 'seconds_per_step', seconds, 3),
                Cell('peak GiB', 'peak_gib', gib, 1),
                Cell('CE', 'ce', ce, 4 if spread is None else 5, spread),
            ),
            (SEED,) if spread is None else (SEED, SEED + 1, SEED + 2),
        )

    for system, (ce, ppl) in paper.OLMO_VALIDATION.items():
        name = MAIN_RUN[system]
        cells = (Cell('CE', 'ce', ce, 6), Cell('PPL', 'ppl', ppl, 6))
        yield Row(f'12/{name}', '12', LABELS[system], f'olmo-{name}', cells)

    for system, accuracy in paper.GSM8K_ACCURACY.items():
        name = MAIN_RUN[system]
        cell = Cell('accuracy (%)', 'gsm8k', accuracy, 2)
        yield Row(f'13/{name}', '13', LABELS[system], f'1b-gsm8k-{name}', (cell,))

    for (scale, system), (ce, ppl) in paper.MOE_VALIDATION.items():
        name = MAIN_RUN[system]
        yield Row(
            f'14/{scale}-{name}',
            '14',
            f'{scale.upper()} {LABELS[system]} + MoE',
            f'{scale}-moe-{name}',
            (Cell('CE', 'ce', ce, 4), Cell('PPL', 'ppl', ppl, 3)),
        )


ROWS = {row.id: row for row in _rows()}


def find_runs(names: Sequence[str]) -> list[tuple[Run, tuple[int, ...]]]:
    """Runs with the seeds they need, each run once, in the order asked for.

    Args:
        names: tables (``4a``, or ``4`` for 4a to 4c), rows (``4a/no-global-kv-k3``) or runs.

    Raises:
        ValueError: a name is none of these.
    """
    found: dict[str, set[int]] = {}
    for name in names:
        if name in RUNS:
            rows = [row for row in ROWS.values() if row.run == name]
            seeds = {name: {SEED}.union(*(row.seeds for row in rows))}
        elif name in ROWS:
            seeds = {ROWS[name].run: set(ROWS[name].seeds)}
        else:
            tables = [t for t in TABLES if t == name or (t.rstrip('abc') == name and t != name)]
            rows = [row for row in ROWS.values() if row.table in tables]
            if not rows:
                raise ValueError(
                    f'{name!r} is no run, row or table; '
                    '`python -m asymloop_foundry.experiments list` prints them all.'
                )
            seeds = {}
            for row in rows:
                seeds.setdefault(row.run, set()).update(row.seeds)
        for run, more in seeds.items():
            found.setdefault(run, set()).update(more)
    return [(RUNS[run], tuple(sorted(seeds))) for run, seeds in found.items()]
