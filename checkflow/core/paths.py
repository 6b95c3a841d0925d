"""Paths that users give: URLs in their place are refused, by one function, wherever a path is taken."""

from __future__ import annotations

import os
import re

from checkflow.core.errors import UnsupportedError

_MOST_SHOWN = 200  # characters
# Of "s3://b" pathlib makes "s3:/b"; one letter alone may be a folder, as of a drive.
_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z][A-Za-z0-9+.-]+:/)")


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Refuse ``scheme://…`` in place of a path, before it becomes a local folder named ``scheme:``.

    A folder of such a name is taken by its absolute path, or with ``./`` before it.

    Raises:
        UnsupportedError: it is a URL. The message leaves out what may be secret: a user, a password, a query.
    """
    text = os.fsdecode(path)
    if (found := _URL.match(text)) is None:
        return
    rest = text[found.end() :].partition("?")[0].rpartition("@")[2]
    shown = " ".join(f"{found[1].rstrip('/')}//{rest}".split())[:_MOST_SHOWN]
    raise UnsupportedError(
        f"{shown} is a URL, and checkflow works in directories of this machine: copy its data, or mount its storage "
        "and pass a path there (of a local folder that has this name: the absolute path)"
    )
