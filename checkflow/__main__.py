"""``python -m checkflow``: the command line."""

from __future__ import annotations

from checkflow.cli.main import entry

if __name__ == "__main__":
    entry()
