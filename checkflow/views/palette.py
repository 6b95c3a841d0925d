"""One colour for each kind of thing, on all pages: Okabe and Ito's and Tol's, told apart by colour-blind eyes too."""

from __future__ import annotations

from typing import Final

FORWARD: Final = "#56B4E9"
TURN: Final = "#3A8FC8"  # the end of forward and the begin of backward, in one segment
BACKWARD: Final = "#0072B2"
OPTIMIZER: Final = "#CC79A7"
CHECKFLOW: Final = "#009E73"  # copies that leave the live tensors; the plan
SNAPSHOT: Final = "#E69F00"  # copies within device memory, and what leaves from them
STORAGE: Final = "#D55E00"
CHECKFREQ: Final = "#AA3377"
TRAFFIC: Final = "#7B5FD9"  # training's own on the link: collectives, mostly
TRAINING: Final = "#8A929B"  # without checkpoints
PLANNING: Final = "#44AA99"
DATA: Final = "#999933"
OTHER: Final = "#BBBBBB"
FAILURE: Final = "#CC3311"

# By the phases of a run's report.
PHASES: Final = {
    "data": DATA,
    "forward_backward": BACKWARD,
    "update": OPTIMIZER,
    "snapshot_wait": SNAPSHOT,
    "persist_wait": STORAGE,
    "planning": PLANNING,
    "other": OTHER,
}
# Of several lines of one kind, such as one an interval.
SHADES: Final = ("#007355", CHECKFLOW, "#4FC0A0", "#83D3BC", "#A9DFD0")
