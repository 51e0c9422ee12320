# SPDX-License-Identifier: Apache-2.0
"""Real English that every Python has: the documentation that comes with it.

For trying the whole pipeline on a machine without a network: the language reference as ``pydoc`` keeps
it, and the docstrings of the standard library and of installed packages, read from source without
importing anything.
"""

import ast
import importlib.util
import inspect
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

from tqdm import tqdm

MIN_CHARACTERS = 200  # shorter docstrings are mostly one-line signatures
PACKAGES = ('torch',)
# Not prose: test suites, vendored copies, and generated or legacy modules.
SKIPPED_FOLDERS = frozenset({'test', 'tests', 'idle_test', 'site-packages', 'lib2to3', '_vendor'})


def docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Docstrings of modules, classes and functions below a folder, as (name, text), in a fixed order."""
    for path in sorted(folder.rglob('*.py')):
        if SKIPPED_FOLDERS & set(path.relative_to(folder).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                tree = ast.parse(path.read_text(encoding='utf-8'))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) >= MIN_CHARACTERS:
                    name = getattr(node, 'name', '')
                    yield f'{path.relative_to(folder)}:{name}', inspect.cleandoc(text)


def documents() -> Iterator[tuple[str, str]]:
    """All documents as (name, text), each text once."""
    folders = [Path(sysconfig.get_paths()['stdlib'])]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent)

    found = chain(
        ((f'topics:{name}', text) for name, text in sorted(topics.items())),
        *(docstrings(folder) for folder in folders),
    )
    seen: set[str] = set()
    for name, text in found:
        if len(text) >= MIN_CHARACTERS and text not in seen:
            seen.add(text)
            yield name, text


def write_builtin_text(
    train: Path, validation: Path, validation_every: int = 40
) -> tuple[int, int]:
    """Writes the documents as jsonl with columns ``id`` and ``text``.

    Args:
        train: file of the training documents.
        validation: file of every ``validation_every``-th document, which training does not see.
        validation_every: 40 keeps one text in forty for validation.

    Returns:
        Numbers of training and of validation documents.
    """
    counts = [0, 0]
    paths = (train, validation)
    partial = [path.with_suffix('.partial') for path in paths]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    with open(partial[0], 'w', encoding='utf-8') as a, open(partial[1], 'w', encoding='utf-8') as b:
        found = tqdm(documents(), desc='Reading documentation', unit=' texts', mininterval=0.5)
        for i, (name, text) in enumerate(found):
            held_out = i % validation_every == 0
            (b if held_out else a).write(json.dumps({'id': name, 'text': text}) + '\n')
            counts[held_out] += 1
    for source, path in zip(partial, paths, strict=True):
        os.replace(source, path)
    return counts[0], counts[1]
