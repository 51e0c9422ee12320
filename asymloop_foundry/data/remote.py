# SPDX-License-Identifier: Apache-2.0
"""Object stores, through the same clients that streaming reads and MDSWriter writes them with."""

from __future__ import annotations

import logging
import os
import tempfile
from typing import Any

log = logging.getLogger(__name__)


def is_remote(path: str) -> bool:
    """Tell an object store's address from a local folder.

    Args:
        path: A path or URL.

    Returns:
        Whether it is a URL.
    """
    return '://' in path


def fetch_file(url: str, local: str) -> None:
    """Copy a file out of an object store.

    Args:
        url: Its address.
        local: Where to put it.
    """
    from streaming.base.storage import CloudDownloader

    CloudDownloader.direct_download(remote=url, local=local, timeout=60)


def fetch_text(url: str) -> str | None:
    """Read a small file from an object store.

    Args:
        url: Its address.

    Returns:
        Its content; None where it cannot be had (it does not exist, or nothing may be read).
    """
    with tempfile.TemporaryDirectory() as folder:
        local = os.path.join(folder, 'file')
        try:
            fetch_file(url, local)
            with open(local, encoding='utf-8') as file:
                return file.read()
        except Exception as error:
            log.info('cannot read %s: %r', url, error)
            return None


def open_uploader(local: str, remote: str) -> Any:
    """Open MDSWriter's own uploader for a folder.

    Args:
        local: Folder whose files will be uploaded.
        remote: Address of the folder they go to.

    Returns:
        An object with ``upload_file(name)``, which removes the local copy when it is done.
    """
    from streaming.base.storage.upload import CloudUploader

    return CloudUploader.get((local, remote), keep_local=False, retry=5, exist_ok=True)
