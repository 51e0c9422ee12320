# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ['RESULTS_FILE', 'write_json', 'write_text']

# What a training run leaves in its folder for the tables.
RESULTS_FILE = 'results.json'


def write_text(path: str | Path, text: str) -> None:
    """Writes a UTF-8 file so that no reader, and no crash, ever sees half of it.

    The text goes to a temporary name in the same folder, which is made if need be, and is renamed once
    it is on the disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f'.{path.name}.', dir=path.parent)
    try:
        with os.fdopen(handle, 'w', encoding='utf-8') as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Writes an indented JSON file whole or not at all; refuses NaN and infinity, which JSON has not.

    Raises:
        ValueError: the value holds NaN or infinity.
        TypeError: the value holds something that JSON cannot express.
    """
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + '\n')
