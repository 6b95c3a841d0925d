"""checkflow: checkpoints of every iteration, planned so that they cost (almost) nothing."""

from __future__ import annotations

import os

# A clone made without symbolic links has planner/, runtime/ and models/ beside this folder, not in it.
_here = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_here, "planner")):
    __path__.append(os.path.dirname(_here))
